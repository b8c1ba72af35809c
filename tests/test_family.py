from hypothesis import given
from hypothesis import strategies as st
from page_support import duplicate_series, pairs, samples_of

from exporter.metrics import catalog
from exporter.metrics.text_format import (
    NO_LABELS,
    Dropped,
    Family,
    Kind,
    PageBuilder,
    labels,
    named,
    plus,
)

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ("\\", "\n", '"', '",b="', "\\n", "=", ",", "{}")
)


@given(st.lists(st.tuples(st.sampled_from(("a", "b", "c_d")), TEXTS), max_size=5))
def test_label_set_returns_its_names_and_values(given: list[tuple[str, str]]) -> None:
    assert pairs(labels(*given)) == tuple((name, value) for name, value in given if value)


@given(st.lists(TEXTS, min_size=2, max_size=2), st.lists(TEXTS, min_size=3, max_size=3))
def test_label_names_build_the_same_sets_as_pairs(first: list[str], more: list[str]) -> None:
    base = named(("a", "b"), *first)
    assert base == labels(("a", first[0]), ("b", first[1]))
    assert named(("c", "d", "e"), *more, base=base) == plus(base, *zip(("c", "d", "e"), more, strict=True))


def test_unknown_values_are_left_out() -> None:
    assert named(("a", "b", "c"), "x", None, "") == labels(("a", "x"))
    assert labels() == plus(NO_LABELS, ("a", None)) == ""


def test_names_that_render_alike_are_one_series_and_counted() -> None:
    dropped = Dropped()
    page = PageBuilder([catalog.GPU_UP], dropped=dropped)
    for bad in ("\udc80", "\udc81"):
        page.metric(catalog.GPU_UP, labels(("node", bad)), 1)
    (family,) = page.families()
    assert [sample.pairs for sample in samples_of(family)] == [(("node", "?"),)]
    assert dropped.reasons == {"duplicate_series": 1}


def test_duplicate_series_with_reordered_labels_are_detected() -> None:
    values = {labels(("a", "1"), ("b", "2")): 1, labels(("b", "2"), ("a", "1")): 2}
    family = Family(name="x", kind=Kind.GAUGE, help="h", values=values)
    assert duplicate_series([family]) == [("x", frozenset({("a", "1"), ("b", "2")}))]

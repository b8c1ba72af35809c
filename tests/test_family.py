import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples_support import duplicate_series, pairs, samples_of

from exporter.metrics import catalog
from exporter.metrics.text_format import (
    NO_LABELS,
    Family,
    Kind,
    LabelNames,
    PageBuilder,
    forget_unused,
    labels,
    plus,
)

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8) | st.sampled_from(
    ("\\", "\n", '"', '",b="', "\\n", "=", ",", "{}")
)


@given(st.lists(st.tuples(st.sampled_from(("a", "b", "c_d")), TEXTS), max_size=5))
def test_a_label_set_gives_its_names_and_values_back(given: list[tuple[str, str]]) -> None:
    assert pairs(labels(*given)) == tuple((name, value) for name, value in given if value)


@given(st.lists(TEXTS, min_size=2, max_size=2), st.lists(TEXTS, min_size=3, max_size=3))
def test_names_that_go_together_make_the_same_sets_as_pairs(first: list[str], more: list[str]) -> None:
    base = LabelNames("a", "b").of(*first)
    assert base == labels(("a", first[0]), ("b", first[1]))
    expected = plus(base, *zip(("c", "d", "e"), more, strict=True))
    assert LabelNames("c", "d", "e").behind(base, *more) == expected
    forget_unused()
    assert LabelNames("c", "d", "e").behind(base, *more) == expected
    forget_unused()
    forget_unused()
    assert LabelNames("c", "d", "e").behind(base, *more) == expected


def test_what_is_not_known_is_left_out() -> None:
    assert LabelNames("a", "b", "c").of("x", None, "") == labels(("a", "x"))
    assert labels() == plus(NO_LABELS, ("a", None)) == ""


def test_two_names_that_are_shown_alike_are_one_series_and_counted() -> None:
    page = PageBuilder()
    page.declare_all([catalog.GPU_UP])
    for bad in ("\udc80", "\udc81"):
        page.metric(catalog.GPU_UP, labels(("node", bad)), 1)
    (family,) = page.families()
    assert [sample.pairs for sample in samples_of(family)] == [(("node", "?"),)]
    assert page.reasons == {"duplicate_series": 1}


def test_the_same_labels_in_another_order_are_found_out() -> None:
    values = {labels(("a", "1"), ("b", "2")): 1, labels(("b", "2"), ("a", "1")): 2}
    family = Family(name="x", kind=Kind.GAUGE, help="h", values=values)
    assert duplicate_series([family]) == [("x", frozenset({("a", "1"), ("b", "2")}))]


COLUMN = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.floats() | st.integers(0, 3)), max_size=6)


@pytest.mark.parametrize("already", ["", "ab"])
@given(column=COLUMN)
def test_a_column_is_taken_as_its_series_one_by_one(already: str, column: list[tuple[str, float | None]]) -> None:
    told: list[tuple[dict[str, float], dict[str, int]]] = []
    for whole in (True, False):
        page = PageBuilder()
        page.declare_all([catalog.GPU_UP])
        for name in already:
            page.metric(catalog.GPU_UP, labels(("n", name)), 7)
        if whole:
            page.column(catalog.GPU_UP, [labels(("n", name)) for name, _ in column], [value for _, value in column])
        else:
            for name, value in column:
                page.metric(catalog.GPU_UP, labels(("n", name)), value)
        told.append(({str(k): v for family in page.families() for k, v in family.values.items()}, dict(page.reasons)))
    assert told[0] == told[1]
    assert list(told[0][0]) == list(told[1][0]), "in the same order"

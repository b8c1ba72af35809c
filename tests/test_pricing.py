"""Choice of a price: matches, specificity, time, and the arithmetic of a price."""

import re
from itertools import product
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.accounting.prices import Match, OnPrem, PriceBook, PricedGpu, PriceRow, money, overlaps, patterns_meet
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import ByState, Price

H100 = "NVIDIA H100 80GB HBM3"
P5 = NodeFacts(instance_type="p5.48xlarge", capacity_type="spot", region="us-east-1")
PATTERNS = st.text("ab*?", max_size=5)


def row(number: int, match: Match, per_hour: float = 1.0, *, start: float = -inf, end: float = inf) -> PriceRow:
    price = Price(per_hour=per_hour, currency="USD", source=f"b:{number}", as_of="2026-01-01")
    return PriceRow(number=number, match=match, price=price, from_seconds=start, to_seconds=end, source="s")


def asked(book: PriceBook, at: float = 0.0, facts: NodeFacts = P5, node: str = "n1", model: str = H100) -> float | None:
    price = book.price(PricedGpu(model, node, facts), at)
    return None if price is None else price.per_hour


def test_most_specific_row_wins_in_any_order() -> None:
    rows = [
        row(1, Match()),
        row(2, Match(model="NVIDIA H100*"), 2.0),
        row(3, Match(model=H100), 3.0),
        row(4, Match(region="us-east-1", model=H100), 4.0),
        row(5, Match(capacity_type="spot", region="us-east-1"), 5.0),
        row(6, Match(instance_type="p5.*"), 6.0),
        row(7, Match(instance_type="p5.48xlarge"), 7.0),
        row(8, Match(instance_type="p5.48xlarge", region="us-east-1"), 8.0),
        row(9, Match(node="n*"), 9.0),
        row(10, Match(node="n1"), 10.0),
        row(11, Match(node="n1", model="*H100*"), 11.0),
    ]
    for count in range(1, len(rows) + 1):
        book = PriceBook(name="b", currency="USD", rows=tuple(reversed(rows[:count])))
        assert asked(book) == pytest.approx(count)


def test_row_requiring_an_unknown_property_does_not_match() -> None:
    book = PriceBook(rows=(row(1, Match(region="*")), row(2, Match(instance_type="p5*"))))
    assert asked(book, facts=NodeFacts()) is None
    assert asked(book, facts=NodeFacts(region="eu")) == 1.0


def test_patterns_ignore_case_and_only_star_and_question_mark_are_special() -> None:
    book = PriceBook(rows=(row(1, Match(model="nvidia h?00 [80]*")),))
    assert asked(book, model="NVIDIA H100 [80] GB") == 1.0
    assert asked(book, model="NVIDIA H100 8 GB") is None


def test_row_start_is_inclusive_and_its_end_exclusive() -> None:
    book = PriceBook(rows=(row(1, Match(), 1.0, end=100.0), row(2, Match(), 2.0, start=100.0, end=200.0)))
    assert [asked(book, at) for at in (-1e9, 99.999, 100.0, 199.0, 200.0)] == [1.0, 1.0, 2.0, 2.0, None]


def test_less_specific_row_applies_outside_the_time_of_the_specific_one() -> None:
    book = PriceBook(rows=(row(1, Match(), 1.0), row(2, Match(node="n1"), 2.0, start=10.0, end=20.0)))
    assert [asked(book, at) for at in (5.0, 15.0, 25.0)] == [1.0, 2.0, 1.0]


def test_fallback_book_is_used_last_and_marked() -> None:
    other = PriceBook(name="list", currency="USD", rows=(row(1, Match(), 9.0),))
    book = PriceBook(name="own", currency="EUR", rows=(row(1, Match(node="n1"), 2.0),), fallback=other)
    own = book.price(PricedGpu(H100, "n1", P5), 0.0)
    listed = book.price(PricedGpu(H100, "n2", P5), 0.0)
    assert own is not None
    assert listed is not None
    assert (own.per_hour, own.fallback) == (2.0, False)
    assert (listed.per_hour, listed.fallback) == (9.0, True)
    assert asked(PriceBook()) is None


def test_book_description_has_its_name_and_gpu_part() -> None:
    other = PriceBook(name="list-prices", rows=(row(1, Match()),))
    book = PriceBook(name="own.yaml", gpu_part=0.95, rows=(row(1, Match()),), fallback=other)
    assert "own.yaml (GPUs are 95% of a node's price); else list-prices (GPUs are 100%" in book.description
    assert PriceBook().description == ""


def test_rows_overlap_only_if_neither_wins_and_both_can_apply() -> None:
    spot, region = Match(capacity_type="spot"), Match(region="us-*")
    rows = (
        row(1, Match(model="NVIDIA H*"), end=100.0),
        row(2, Match(model="*80GB*"), start=50.0),
        row(3, Match(model="*80GB*"), end=50.0),  # it ends at the start of row 2, but overlaps with row 1
        row(4, Match(model=H100)),  # an exact name is more specific
        row(5, Match(model="Tesla*", node="x")),
        row(6, spot),
        row(7, region),  # a pattern: less specific than row 6
        row(8, Match(region="us-east-1")),
    )
    assert [(one.number, other.number, *when) for one, other, *when in overlaps(rows)] == [
        (1, 2, 50.0, 100.0),
        (1, 3, -inf, 50.0),
        (6, 8, -inf, inf),
    ]


def test_model_patterns_overlap_only_if_a_known_gpu_matches_both() -> None:
    known = ("NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB")
    rows = (row(1, Match(model="*H100*")), row(2, Match(model="*A100*")), row(3, Match(model="*NVL")))
    assert [(one.number, other.number) for one, other, *_ in overlaps(rows, known)] == [(1, 3)]
    unknown = (row(1, Match(model="*H100*")), row(2, Match(model="*X900*")))
    assert len(list(overlaps(unknown, known))) == 1


@given(PATTERNS, PATTERNS)
@example("a*", "*b")
@example("*", "")
@example("?", "")
def test_two_patterns_meet_exactly_if_some_text_matches_both(one: str, other: str) -> None:
    def expression(pattern: str) -> str:
        return pattern.replace("*", "[ab]*").replace("?", "[ab]")

    texts = ("".join(letters) for length in range(9) for letters in product("ab", repeat=length))
    found = any(re.fullmatch(expression(one), text) and re.fullmatch(expression(other), text) for text in texts)
    assert patterns_meet(one, other) is found


@given(st.lists(st.tuples(PATTERNS, PATTERNS), max_size=6), st.text("ab", max_size=4), st.text("ab", max_size=4))
def test_price_is_independent_of_row_order_without_overlaps(keys: list[tuple[str, str]], node: str, model: str) -> None:
    rows = tuple(row(number, Match(node=of, model=what), number) for number, (of, what) in enumerate(keys))
    if not list(overlaps(rows)):
        there, back = (asked(PriceBook(rows=order), node=node, model=model) for order in (rows, rows[::-1]))
        assert there == back


def test_on_prem_formula_gives_the_published_example() -> None:
    server = OnPrem(
        capex=300_000, years=4, gpus=8, kw_per_gpu=10.2 * 0.7 / 8, pue=1.35, per_kwh=0.12, opex_per_year=24_000
    )
    assert server.per_gpu_hour() == pytest.approx(1.56, abs=0.005)
    sold = OnPrem(
        capex=300_000,
        years=4,
        gpus=8,
        kw_per_gpu=10.2 * 0.7 / 8,
        pue=1.35,
        per_kwh=0.12,
        opex_per_year=24_000,
        target_availability=0.7,
    )
    assert sold.per_gpu_hour() == pytest.approx(2.22, abs=0.005)


def test_measured_energy_replaces_the_energy_term_and_ignores_availability() -> None:
    server = OnPrem(capex=280_320, years=4, gpus=8, pue=1.5, per_kwh=0.2, target_availability=0.5)
    assert server.per_gpu_hour() == pytest.approx(2.0)
    assert server.per_measured_kwh == pytest.approx(0.3)
    assert server.per_gpu_hour(gpu_part=0.5) == pytest.approx(1.0)


SECONDS = st.floats(min_value=0, max_value=1e6)


@given(SECONDS, SECONDS, SECONDS, st.none() | SECONDS, st.floats(0, 100), st.floats(0, 1))
def test_idle_cost_is_a_part_of_the_cost(
    active: float, idle: float, unknown: float, joules: float | None, per_hour: float, per_kwh: float
) -> None:
    price = Price(per_hour=per_hour, per_kwh=per_kwh, currency="USD", source="s", as_of="2026-01-01")
    cost = money(ByState(unprofiled=active, idle=idle, unknown=unknown), joules, price)
    hours = (active + idle + unknown) / 3600
    assert cost.total == pytest.approx(hours * per_hour + (joules or 0.0) / 3.6e6 * per_kwh)
    assert 0 <= cost.idle <= cost.total * (1 + 1e-9)
    if active == unknown == 0 and idle > 0:
        assert cost.idle == pytest.approx(cost.total)


def test_energy_without_seconds_is_not_idle_cost() -> None:
    price = Price(per_hour=1.0, per_kwh=0.36, currency="USD", source="s", as_of="2026-01-01")
    cost = money(ByState(), 1e7, price)
    assert (cost.total, cost.idle) == (pytest.approx(1.0), 0.0)

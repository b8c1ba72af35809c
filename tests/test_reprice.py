"""Recomputed money: the seconds stay, the prices are the book's of each day, and both totals are reported."""

from dataclasses import replace

import pytest
from fleet_support import A100, H100, hours, ledger, ledgers, nobody, owner
from hypothesis import given
from hypothesis import strategies as st

from exporter.config import price_book
from exporter.cost.dimensions import UNALLOCATED
from exporter.cost.ledger import FleetLedger, reprice
from exporter.cost.report import Question, make_report
from exporter.model.ledger import ByState


def book(*rows: str, head: str = "list_prices: off") -> price_book.PriceBook:
    listed = "".join(f"- {{{row}, source: contract, as_of: 2026-01-01}}\n" for row in rows)
    return price_book.parse(f"currency: USD\n{head}\nrows:\n{listed}", "book.yaml")


def money_of(priced: FleetLedger, number: int = 0) -> list[dict[str, ByState]]:
    return [dict(figures.money) for figures in priced.chunks[number].lines.values()]


def test_cost_is_hours_times_the_book_price_and_idle_cost_that_of_idle_hours() -> None:
    known = ledger({owner("a", "x"): hours(active=6, idle=2, unknown=2, usd=1), nobody(UNALLOCATED): hours(idle=14)})
    priced = reprice(known, book(f"model: {H100}, per_gpu_hour: 7"))
    assert money_of(priced) == [{"USD": ByState(unprofiled=42, idle=14, unknown=14)}, {"USD": ByState(idle=98)}]
    assert [one.seconds.total for one in priced.chunks[0].lines.values()] == [36_000, 50_400]


def test_each_day_has_the_price_of_its_time() -> None:
    line = {owner("a", "x"): hours(active=24)}
    priced = reprice(
        ledger(line, line, line),
        book(
            f"model: {H100}, per_gpu_hour: 8, to: 2026-10-02T12:00:00Z",
            f"model: {H100}, per_gpu_hour: 6, from: 2026-10-02T12:00:00Z",
        ),
    )
    assert [money_of(priced, number)[0]["USD"].total for number in range(3)] == pytest.approx([192, 168, 144])


def test_hours_without_a_matching_row_are_unpriced_not_free() -> None:
    known = ledger({owner("a", "x", model=A100): hours(active=5, usd=50), owner("a", "x"): hours(active=1)})
    priced = reprice(known, book(f"model: {H100}, per_gpu_hour: 7, to: 2026-10-01T06:00:00Z"))
    first, second = priced.chunks[0].lines.values()
    assert (first.money, first.unpriced_seconds) == ({}, 5 * 3600)
    assert second.money["USD"].total == pytest.approx(7 / 4)
    assert second.unpriced_seconds == pytest.approx(0.75 * 3600)


def test_rows_match_a_node_by_its_facts_and_unknown_nodes_are_named() -> None:
    lines = {owner("a", "x"): hours(active=1), owner("a", "x", node="n9"): hours(active=1)}
    priced = reprice(ledger(lines), book("instance_type: p5.48xlarge, node_hour: 80, gpus: 8"))
    assert money_of(priced) == [{"USD": ByState(unprofiled=10)}, {}]
    assert any("nothing but the name is known of 1 node(s) (n9)" in note for note in priced.notes)


def test_measured_energy_is_charged_if_a_row_has_measured_energy() -> None:
    site = "capex: 0, years: 4, gpus: 8, measured_energy: true, pue: 1.5, per_kwh: 0.2"
    priced = reprice(
        ledger({owner("a", "x"): hours(active=5, idle=5, kwh=10), owner("b", "x"): hours(active=5)}),
        book(f"node: n1, on_prem: {{{site}}}"),
    )
    first, second = money_of(priced)
    assert first["USD"].total == pytest.approx(3.0)
    assert first["USD"].idle == pytest.approx(1.5)
    assert second["USD"].total == 0


def test_fallback_list_prices_keep_their_own_currency() -> None:
    lines = {owner("a", "x"): hours(active=1), owner("a", "x", model=A100): hours(active=1)}
    euros = price_book.parse(
        f"currency: EUR\nrows:\n- {{model: {H100}, per_gpu_hour: 5, source: contract, as_of: 2026-01-01}}\n",
        "book.yaml",
    )
    assert [set(money) for money in money_of(reprice(ledger(lines), euros))] == [{"EUR"}, {"USD"}]


def test_report_shows_the_repriced_and_the_original_total() -> None:
    known = ledger({owner("a", "x"): hours(active=10, usd=99.5)}, {owner("b", "x", model=A100): hours(active=2, eur=3)})
    priced = reprice(known, book(f"model: {H100}, per_gpu_hour: 7"))
    report = make_report(priced, Question(by=("namespace",)), "book.yaml")
    (note,) = report.trust.notes
    assert note == (
        "re-priced at book.yaml (GPUs are 100% of a node's price): 70.00 USD (2.0 GPU-hours unpriced); at the prices of"
        " the time of use it was 3.00 EUR and 99.50 USD"
    )


@given(ledgers(), st.floats(0.01, 100))
def test_one_price_for_all_nodes_gives_cost_in_proportion_to_hours(known: FleetLedger, per_hour: float) -> None:
    priced = reprice(replace(known, nodes={}), book(f"node: '*', per_gpu_hour: {per_hour!r}"))
    named = [figures.seconds.total for chunk in known.chunks for key, figures in chunk.lines.items() if key.node]
    total = sum(
        figures.money["USD"].total for chunk in priced.chunks for figures in chunk.lines.values() if figures.money
    )
    assert total == pytest.approx(sum(named) / 3600 * per_hour)
    unpriced = sum(figures.unpriced_seconds for chunk in priced.chunks for figures in chunk.lines.values())
    whole = sum(figures.seconds.total for chunk in known.chunks for figures in chunk.lines.values())
    assert unpriced == pytest.approx(whole - sum(named))

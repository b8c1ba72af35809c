"""Money on the page: cost per hour of held, idle and unheld GPUs; a missing price is never $0."""

from dataclasses import replace

import page_support as made
import pytest
from page_support import changed
from test_page import EVIL, read

from exporter.model.attribution import AllocationState
from exporter.model.formatting import money
from exporter.model.ledger import LedgerView, Price
from exporter.model.snapshot import DeviceView, MeteringView, Snapshot
from exporter.web import node_page

PRICE = Price(per_hour=4.0, currency="USD", source="fleet:h100", as_of="2026-10-01")


def priced(*views: DeviceView, price: Price = PRICE, **changes: object) -> Snapshot:
    prices = {view.gpu.uuid: price for view in views}
    metering = MeteringView(prices=prices, price_book="fleet (GPUs are 80% of a node's price)")
    return changed(made.snapshot(*views, metering=metering), **changes)


def test_idle_notebook_is_highlighted_with_its_past_and_hourly_cost() -> None:
    view = priced(made.held(0, "train-0", 0.9), made.held(1, "notebook-anna", 0.0, 3 * 3600.0))
    text = read(view).text
    assert "idle for 3 h 0 min $12.00 at $4.00 an hour ml/ notebook-anna GPU 1" in text
    assert "Held, cost now $8.00 /h" in text
    assert "Idle holders 1 $4.00/h" in text
    assert "Held, but idle $4.00 an hour" in text
    assert "0 % idle 3 h ml/notebook-anna $4.00/h" in text, "the card has the price, too"
    assert "<b>$4.00</b>" in made.fragment(view)


def test_most_expensive_idle_holder_comes_first_not_the_longest_idle() -> None:
    text = read(priced(*made.partitioned(0, made.MIXED), made.held(1, "notebook-anna", 0.0, 5000.0))).text
    assert text.index("ml/ notebook-anna") < text.index("research/ worker-0-1")


def test_holder_costs_its_share_and_unallocated_cost_is_separate() -> None:
    view = priced(made.shared(0), *made.partitioned(1, made.MIXED), made.view(2))
    text = read(view).text
    assert "Held, cost now $5.86 /h" in text  # 3 x 1/4, 3/7 and 2/7 of 4.00
    assert "Free 2 $6.14/h" in text
    assert "$1.71" in text


def test_unknown_holders_give_no_unallocated_cost() -> None:
    unknown = replace(made.view(0), allocation=AllocationState.UNKNOWN)
    assert "/h" not in read(priced(unknown)).text


def test_rest_of_a_gpu_with_possible_holders_is_not_unallocated() -> None:
    doubtful = [replace(view, rest_is_free=False) for view in made.partitioned(0, made.MIXED)]
    lacking = [replace(view, lacks_instances=not view.instance) for view in doubtful]
    shared = replace(made.shared(0), rest_is_free=False)
    assert node_page.unheld(priced(*lacking)) == node_page.unheld(priced(shared)) == {}
    stranded = node_page.unheld(priced(*made.partitioned(0, made.MIXED)))
    assert stranded
    assert node_page.unheld(priced(*doubtful)) == {}, "as in the ledger, slices without an instance are in doubt"


def test_unknown_price_is_shown_in_words_and_never_as_zero() -> None:
    view = priced(made.held(0, "a", 0.0, 7200.0), price=PRICE, metering={"prices": {}, "unpriced_gpus": 1})
    text = read(view).text
    assert "idle for 2 h 0 min no price ml/ a" in text
    assert "Held, cost now no price" in text
    assert "No price for GPU 0, H100 80GB HBM3: no row of the price book matches" in text
    assert "$" not in text


def test_held_gpus_without_a_price_are_counted_next_to_the_sum() -> None:
    view = priced(made.held(0, "a"), made.held(1, "b"))
    half = changed(view, metering={"prices": {made.gpu(0).uuid: PRICE}})
    assert "Held, cost now $4.00 /h and 1 without price" in read(half).text


def test_price_source_is_shown_once_with_the_gpus_that_it_covers() -> None:
    eight = [made.held(index, f"train-{index}") for index in range(8)]
    text = read(priced(*eight)).text
    assert text.count("8 x H100 80GB HBM3: $4.00 an hour fleet:h100, as of 2026-10-01") == 1
    assert text.count("GPUs are 80% of a node's price") == 1
    listed = replace(PRICE, fallback=True, per_kwh=0.3)
    text = read(priced(made.held(0, "a"), price=listed)).text
    assert "and $0.30 per measured kWh" in text
    assert "a bundled list price, what you pay may differ" in text


def test_currencies_are_shown_side_by_side() -> None:
    view = priced(made.held(0, "a"), made.held(1, "b"))
    euro = replace(PRICE, currency="EUR", per_hour=3.0)
    both = changed(view, metering={"prices": {made.gpu(0).uuid: PRICE, made.gpu(1).uuid: euro}})
    assert "€3.00 + $4.00 /h" in read(both).text


def test_page_has_no_cost_texts_without_prices_and_price_book() -> None:
    text = read(made.rich_snapshot()).text
    assert not any(word in text for word in ("price", "cost now", "Per hour", "$"))


def test_free_gpu_is_never_an_idle_cost_of_a_holder() -> None:
    text = read(priced(made.view(0))).text
    assert "Held, cost now none" in text
    assert "Idle holders 0 Held" in text
    assert "Free 1 $4.00/h" in text


def test_every_table_row_has_a_cell_for_every_column() -> None:
    stray = replace(made.view(3, 0.2), unattributed_activity_ratio=0.2, unattributed_processes=1)
    views = (made.held(0, "a"), made.shared(1), *made.partitioned(2, made.SEVEN), stray, made.lost(4))
    for snapshot in (priced(*views), made.snapshot(*views)):
        tables = made.fragment(snapshot).split("<table ")[1:]
        assert len(tables) == 2
        for table in tables:
            counts = {row.count('role="cell"') + row.count("header") for row in table.split("<tr ")[1:]}
            assert len(counts) == 1


def test_unsaved_ledger_is_shown_as_a_problem_at_the_top() -> None:
    ledger = LedgerView(state_problem="/state/ledger.json: disk full; free some space")
    text = read(priced(made.held(0, "a"), metering={"ledger": ledger})).text
    assert "ledger : /state/ledger.json: disk full; free some space" in text


def test_price_sources_and_price_book_names_are_escaped() -> None:
    evil = replace(PRICE, source=EVIL, as_of=EVIL, currency="<b>")
    tags = read(priced(made.held(0, "a", 0.0, 7200.0), price=evil, metering={"price_book": EVIL}))
    assert EVIL in tags.text
    assert "<b> 4.00" in tags.text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "$0.00"), (0.001, "<$0.01"), (12.345, "$12.35"), (12345.6, "$12,346")],
)
def test_amounts_are_formatted_for_reading(value: float, shown: str) -> None:
    assert money(value, "USD") == shown

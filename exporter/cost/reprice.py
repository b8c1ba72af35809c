"""Recomputes the money of a ledger from seconds and joules with another price book."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise

from exporter.accounting.ledger import money as cost_of
from exporter.accounting.prices import PriceBook, PricedGpu
from exporter.cost.dimensions import Dimension
from exporter.cost.ledger import Chunk, Figures, FleetLedger, total_of
from exporter.cost.window import HOUR_SECONDS
from exporter.model import NO_SECONDS, ByState, NodeFacts, Price

REPRICE_DIMENSIONS: frozenset[Dimension] = frozenset({"cluster", "node", "model"})
"""Dimensions that a ledger needs for prices to be found."""
_Priced = tuple[tuple[float, Price | None], ...]
"""Parts of a chunk's time, 0-1, with the price that holds in them."""


def reprice(ledger: FleetLedger, book: PriceBook) -> FleetLedger:
    """Return the ledger with money at the book's prices of each chunk's time; ``notes`` have both totals.

    A line's seconds are taken to be spread evenly over its chunk, so that a price that changes within one day is
    charged by the part of the day for which it holds. What no row matches is unpriced.

    Args:
        ledger: At ``REPRICE_DIMENSIONS`` or finer.
        book: With its fallback, as ``config.price_book.load`` gives it.
    """
    chunks = tuple(_repriced(chunk, book, ledger.nodes) for chunk in ledger.chunks)
    nodes = {(key.cluster, key.node) for chunk in chunks for key in chunk.lines if key.node}
    unknown = sorted({name for _, name in nodes - ledger.nodes.keys()})
    at = book.description or "a book without prices"
    before, after = _money_words(ledger.chunks), _money_words(chunks)
    notes = [*ledger.notes, f"re-priced at {at}: {after}; at the prices of the time of use it was {before}"]
    if unknown:
        few = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")  # noqa: PLR2004 - enough to look at
        notes.append(
            f"nothing but the name is known of {len(unknown)} node(s) ({few}): rows of the price book that ask for an"
            " instance type, capacity type or region do not match them; gpu_node_info has these facts"
        )
    return replace(ledger, chunks=chunks, notes=tuple(notes))


def _repriced(chunk: Chunk, book: PriceBook, nodes: Mapping[tuple[str, str], NodeFacts]) -> Chunk:
    start, end = float(chunk.window.start_seconds), float(chunk.window.end_seconds)

    @cache
    def prices(cluster: str, node: str, model: str) -> _Priced:
        gpu = PricedGpu(model, node, nodes.get((cluster, node)) or NodeFacts())
        changes = book.changes(gpu, after=start, until=end)
        return tuple(
            ((after - at) / (end - start), book.price(gpu, at))
            for at, after in pairwise(sorted({start, *changes, end}))
        )

    lines = {key: _priced(figures, prices(key.cluster, key.node, key.model)) for key, figures in chunk.lines.items()}
    return replace(chunk, lines=lines)


def _priced(figures: Figures, prices: _Priced) -> Figures:
    money: dict[str, ByState] = {}
    unpriced = 0.0
    for part, price in prices:
        if price is None:
            unpriced += figures.seconds.total * part
        else:
            cost = cost_of(figures.seconds, figures.energy_joules, price).scaled(part)
            money[price.currency] = money.get(price.currency, NO_SECONDS) + cost
    return replace(figures, unpriced_seconds=unpriced, money=money)


def _money_words(chunks: tuple[Chunk, ...]) -> str:
    total = total_of(figures for chunk in chunks for figures in chunk.lines.values())
    amounts = (f"{money.total:,.2f} {currency}" for currency, money in sorted(total.money.items()))
    amount = " and ".join(amounts) or "nothing"
    unpriced = total.unpriced_seconds
    return f"{amount} ({unpriced / HOUR_SECONDS:,.1f} GPU-hours unpriced)" if unpriced else amount

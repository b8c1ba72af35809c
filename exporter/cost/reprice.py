"""Recomputes the money of a ledger from seconds and joules with another price book."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

from exporter.accounting.ledger import money as cost_of
from exporter.accounting.prices import PriceBook
from exporter.cost.ledger import Chunk, Dimension, Figures, FleetLedger, LineKey, Window
from exporter.model import Account, Money, NodeFacts, Owner, Portion, Price, ShareMode

REPRICE_DIMENSIONS: frozenset[Dimension] = frozenset({"cluster", "node", "model"})
"""What a ledger must be told apart by for prices to be found."""
_NOBODY = Account(owner=Owner(), model="", mode=ShareMode.EXCLUSIVE)


def reprice(ledger: FleetLedger, book: PriceBook) -> FleetLedger:
    """The ledger with money at the book's prices of each chunk's time; ``notes`` tell both totals.

    A line's seconds are taken to be spread evenly over its chunk, so that a price that changes within one day is
    charged by the part of the day for which it holds. What no row matches is unpriced.

    Args:
        ledger: At ``REPRICE_DIMENSIONS`` or finer.
        book: With its fallback, as ``config.price_book.load`` gives it.
    """
    changes = tuple(sorted(set(_changes(book))))
    chunks = tuple(_repriced(chunk, book, ledger.nodes, changes) for chunk in ledger.chunks)
    unknown = sorted(
        {
            key.node
            for chunk in chunks
            for key in chunk.lines
            if key.node and (key.cluster, key.node) not in ledger.nodes
        }
    )
    notes = [*ledger.notes, _both_totals(ledger, chunks, book)]
    if unknown:
        few = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")  # noqa: PLR2004 - enough to look at
        notes.append(
            f"nothing but the name is known of {len(unknown)} node(s) ({few}): rows of the price book that ask for an"
            " instance type, capacity type or region do not match them; gpu_node_info tells these facts"
        )
    return replace(ledger, chunks=chunks, notes=tuple(notes))


def _changes(book: PriceBook) -> Iterator[float]:
    """Unix times at which some row begins or ends to hold."""
    for row in book.rows:
        yield from (at for at in (row.from_seconds, row.to_seconds) if isfinite(at))
    if book.fallback is not None:
        yield from _changes(book.fallback)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A part of a chunk in which no price changes."""

    part: float
    """Of the chunk's time, 0-1."""
    start_seconds: float


def _stretches(window: Window, changes: tuple[float, ...]) -> tuple[_Stretch, ...]:
    within = [at for at in changes if window.start_seconds < at < window.end_seconds]
    borders = [float(window.start_seconds), *within, float(window.end_seconds)]
    return tuple(_Stretch(part=(end - start) / window.seconds, start_seconds=start) for start, end in pairwise(borders))


_Priced = tuple[tuple[float, Price | None], ...]
"""Parts of a chunk's time with the price that holds in them."""


def _repriced(
    chunk: Chunk, book: PriceBook, nodes: Mapping[tuple[str, str], NodeFacts], changes: tuple[float, ...]
) -> Chunk:
    stretches = _stretches(chunk.window, changes)
    known: dict[tuple[str, str, str], _Priced] = {}
    lines: dict[LineKey, Figures] = {}
    for key, figures in chunk.lines.items():
        place = (key.cluster, key.node, key.model)
        prices = known.get(place)
        if prices is None:
            facts = nodes.get((key.cluster, key.node)) or NodeFacts()
            prices = known[place] = tuple(
                (one.part, book.price(model=key.model, node=key.node, facts=facts, at_seconds=one.start_seconds))
                for one in stretches
            )
        lines[key] = _priced(figures, prices)
    return replace(chunk, lines=lines)


def _priced(figures: Figures, prices: _Priced) -> Figures:
    money: dict[str, Money] = {}
    unpriced = 0.0
    for part, price in prices:
        if price is None:
            unpriced += figures.allocated_seconds * part
            continue
        cost = cost_of(_portion(figures, part), price)
        money[price.currency] = money.get(price.currency, Money()) + cost
    return Figures(
        active_seconds=figures.active_seconds,
        idle_seconds=figures.idle_seconds,
        unknown_seconds=figures.unknown_seconds,
        unpriced_seconds=unpriced,
        energy_joules=figures.energy_joules,
        money=money,
    )


def _portion(figures: Figures, part: float) -> Portion:
    joules = figures.energy_joules
    return Portion(
        gpu_uuid="",
        account=_NOBODY,
        active_seconds=figures.active_seconds * part,
        idle_seconds=figures.idle_seconds * part,
        unknown_seconds=figures.unknown_seconds * part,
        energy_joules=None if joules is None else joules * part,
    )


def _both_totals(ledger: FleetLedger, chunks: tuple[Chunk, ...], book: PriceBook) -> str:
    at = book.description or "a book without prices"
    return f"re-priced at {at}: {_told(chunks)}; at the prices of the time of use it was {_told(ledger.chunks)}"


def _told(chunks: tuple[Chunk, ...]) -> str:
    totals: dict[str, float] = {}
    unpriced = 0.0
    for chunk in chunks:
        for figures in chunk.lines.values():
            unpriced += figures.unpriced_seconds
            for currency, money in figures.money.items():
                totals[currency] = totals.get(currency, 0.0) + money.total
    told = " and ".join(f"{amount:,.2f} {currency}" for currency, amount in sorted(totals.items())) or "nothing"
    return f"{told} ({unpriced / 3600:,.1f} GPU-hours unpriced)" if unpriced else told

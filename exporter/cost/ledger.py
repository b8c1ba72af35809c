"""The ledger of a fleet over a window: holders, seconds, money also at other prices, and what could not be read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Protocol, TypeAlias

from exporter.accounting.prices import PriceBook, PricedGpu
from exporter.accounting.prices import money as cost_of
from exporter.cost.dimensions import EVERYTHING, Dimension, Filters, LineKey
from exporter.cost.window import HOUR_SECONDS, Window
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import NO_SECONDS, ByState, Price

MOST_FIGURE = 1e15
"""Seconds, joules or money: more than any fleet has. Sums of any number of such figures stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a line. Seconds are share-weighted GPU-seconds."""

    seconds: ByState = NO_SECONDS
    """Always all of the allocated seconds."""
    unpriced_seconds: float = 0.0
    """Allocated seconds that had no price and are in no money."""
    energy_joules: float | None = None
    """``None`` where none was measured."""
    energy_unknown_seconds: float = 0.0
    """Allocated seconds without measured energy, of one node; a fleet's are not known."""
    money: Mapping[str, ByState] = field(default_factory=dict)
    """By ISO 4217 currency; a currency in which nothing was priced is absent."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing on the line: no seconds, joules or money.

        A line may have joules and money without seconds: those of a process of no pod on a GPU that a pod holds.
        """
        return not (self.seconds.total or self.energy_joules or any(money.total for money in self.money.values()))

    def money_in(self, currency: str) -> ByState:
        """Return the money in a currency; 0 if nothing was priced in it."""
        return self.money.get(currency, NO_SECONDS)

    def amounts(self, currency: str) -> ByState:
        """Return the money in a currency, or the seconds if none is named."""
        return self.money_in(currency) if currency else self.seconds


NOTHING = Figures()


def total_of(many: Iterable[Figures]) -> Figures:
    """Return the sum of figures, currency by currency."""
    summed = list(many)
    if len(summed) == 1:
        return summed[0]  # mostly, at the finest: and making values is what takes time
    unpriced = unmeasured = 0.0
    energy: float | None = None
    money: dict[str, list[ByState]] = {}
    for figures in summed:
        unpriced += figures.unpriced_seconds
        unmeasured += figures.energy_unknown_seconds
        if figures.energy_joules is not None:
            energy = figures.energy_joules + (energy or 0.0)
        for currency, amount in figures.money.items():
            money.setdefault(currency, []).append(amount)
    return Figures(
        seconds=total_by_state(figures.seconds for figures in summed),
        unpriced_seconds=unpriced,
        energy_joules=energy,
        energy_unknown_seconds=unmeasured,
        money={currency: total_by_state(amounts) for currency, amounts in money.items()},
    )


def total_by_state(many: Iterable[ByState]) -> ByState:
    """Return the sum with one new value; ``__add__`` makes one for each."""
    effective = ineffective = unprofiled = idle = unknown = 0.0
    for one in many:
        effective += one.effective
        ineffective += one.ineffective
        unprofiled += one.unprofiled
        idle += one.idle
        unknown += one.unknown
    return ByState(effective=effective, ineffective=ineffective, unprofiled=unprofiled, idle=idle, unknown=unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The ledger of one UTC day, or of the part of it in the window; of several days if the source reads it so."""

    window: Window
    lines: Mapping[LineKey, Figures] = field(default_factory=dict)
    capacity_seconds: Mapping[str, float] = field(default_factory=dict)
    """By cluster: GPU-seconds that were metered, whoever held them; what the lines must sum to."""
    recorded_hours: Mapping[str, int] = field(default_factory=dict)
    """By cluster: hours of the chunk for which the hourly ledger was recorded."""
    closed: bool = False
    """Read from the store of closed days, rather than from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A query without an answer after all retries; the ledger lacks its figures."""

    window: Window
    what: str
    """The series that was asked for."""
    reason: str
    """In words, with the fix."""
    may_pass: bool = True
    """Whether it may be answered within the hour; not where it asks too much, or for a day that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLedger:
    """The ledger over a window, chunk by chunk in the order of time, at the dimensions that were asked for."""

    window: Window
    dimensions: frozenset[Dimension]
    chunks: tuple[Chunk, ...] = field(repr=False)  # asyncio.run makes the text of its result, twice
    nodes: Mapping[tuple[str, str], NodeFacts] = field(default_factory=dict)
    """What prices go by, by (cluster, node), as last seen within the window."""
    failures: tuple[Failure, ...] = ()
    """Empty, or the ledger is not whole."""
    label_keys: frozenset[str] = frozenset()
    """Keys of cost labels that occur; only where it was read by labels."""
    engine: str = ""
    """Where it was read: ``Prometheus 3.5.0``, ``VictoriaMetrics 1.112``, ``store of closed days``, or several."""
    simulated: bool = False
    """Some of it is of simulated nodes."""
    notes: tuple[str, ...] = ()
    """One line each: what a reader must know, such as warnings of the engine."""


Progress: TypeAlias = Callable[[int, int], object]
"""Called with how many questions of a long reading are over, retries not counted, and how many there are."""


def unseen(_done: int, _total: int) -> None:
    """Show no progress."""


class LedgerSource(Protocol):
    """Reads the ledger over a window."""

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters = EVERYTHING,
        progress: Progress = unseen,
    ) -> FleetLedger:
        """Return the ledger, summed over every dimension that is not selected.

        ``kind`` stays apart for Unallocated and Unattributed even where it is not asked for. Filters hold for the
        lines, not for capacity. What cannot be read after retries is in ``failures``; it is never left out silently.

        Raises:
            PrometheusError: Nothing can be read at all: wrong address, no access, no such server.
            StoreError: The store is damaged or not to be opened.
        """
        ...


def joined(window: Window, dimensions: frozenset[Dimension], parts: Sequence[FleetLedger]) -> FleetLedger:
    """Return the ledger of a window that was read in parts, in the order of time."""
    return FleetLedger(
        window=window,
        dimensions=dimensions,
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        nodes={node: facts for part in parts for node, facts in part.nodes.items()},
        failures=tuple(failure for part in parts for failure in part.failures),
        label_keys=frozenset[str]().union(*(part.label_keys for part in parts)),
        engine=", ".join(dict.fromkeys(part.engine for part in parts if part.engine)),
        simulated=any(part.simulated for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


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
        few = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")  # noqa: PLR2004 - enough to find the mistake
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

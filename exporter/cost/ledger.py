"""Defines the ledger of a fleet over a window: lines, capacity, facts of nodes, failed queries. Reprices it."""

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
"""Largest accepted figure in seconds, joules or money; no fleet reaches it. Sums of such figures stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a line. Seconds are share-weighted GPU-seconds."""

    seconds: ByState = NO_SECONDS
    """Allocated seconds by state, with or without a price."""
    unpriced_seconds: float = 0.0
    """Allocated seconds without a price; no money includes them."""
    energy_joules: float | None = None
    """Measured energy; ``None`` if no energy was measured."""
    energy_unknown_seconds: float = 0.0
    """Allocated seconds without measured energy; known for a single node only, 0 for a fleet."""
    money: Mapping[str, ByState] = field(default_factory=dict)
    """Money by ISO 4217 currency; a currency without priced time is absent."""

    @property
    def is_empty(self) -> bool:
        """Whether the line has no seconds, joules or money.

        A line may have joules and money without seconds: energy of a process without a pod, on a GPU that a pod holds.
        """
        return not (self.seconds.total or self.energy_joules or any(money.total for money in self.money.values()))

    def money_in(self, currency: str) -> ByState:
        """Return the money in a currency; 0 if no time was priced in it."""
        return self.money.get(currency, NO_SECONDS)

    def amounts(self, currency: str) -> ByState:
        """Return the money in a currency, or the seconds for an empty currency."""
        return self.money_in(currency) if currency else self.seconds


NOTHING = Figures()


def total_of(many: Iterable[Figures]) -> Figures:
    """Return the sum of figures, currency by currency."""
    summed = list(many)
    if len(summed) == 1:
        return summed[0]  # the usual case at the finest level; creating values is the slow part
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
    """Return the sum in one new value; repeated ``__add__`` creates a value for each operand."""
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
    """The ledger of one UTC day, or of its part in the window; of several days if the source reads longer chunks."""

    window: Window
    lines: Mapping[LineKey, Figures] = field(default_factory=dict)
    capacity_seconds: Mapping[str, float] = field(default_factory=dict)
    """Metered GPU-seconds by cluster, held or not; the lines sum to this."""
    recorded_hours: Mapping[str, int] = field(default_factory=dict)
    """Hours of the chunk with a recorded hourly ledger, by cluster."""
    closed: bool = False
    """Whether the chunk comes from the store of closed days; false: from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A query without an answer after all retries; the ledger lacks its figures."""

    window: Window
    what: str
    """Queried series."""
    reason: str
    """Cause and fix, as text for users."""
    may_pass: bool = True
    """Whether a retry within the hour may succeed; false for a query over a limit, or for a day that is not closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLedger:
    """The ledger over a window at the requested dimensions, in chunks ordered by time."""

    window: Window
    dimensions: frozenset[Dimension]
    chunks: tuple[Chunk, ...] = field(repr=False)  # asyncio.run builds the repr of its result twice
    nodes: Mapping[tuple[str, str], NodeFacts] = field(default_factory=dict)
    """Facts that select a price, by (cluster, node), last seen in the window."""
    failures: tuple[Failure, ...] = ()
    """Failed queries; empty if the ledger is complete."""
    label_keys: frozenset[str] = frozenset()
    """Keys of the cost labels that occur; empty if the ledger was not read by labels."""
    engine: str = ""
    """Source of the ledger: ``Prometheus 3.5.0``, ``VictoriaMetrics 1.112``, ``store of closed days``, or several."""
    simulated: bool = False
    """Whether any node of the ledger is simulated."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, one line each, such as warnings of the engine."""


Progress: TypeAlias = Callable[[int, int], object]
"""Called with the numbers of finished and of all queries; retries do not count."""


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

        The kinds Unallocated and Unattributed stay separate lines even if ``kind`` is not selected. Filters apply to
        the lines, not to capacity. ``failures`` lists every query that failed after all retries.

        Raises:
            PrometheusError: No query can be answered: wrong address, no access, or an unknown server.
            StoreError: The store is damaged or cannot be opened.
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
"""Dimensions of a ledger that price selection requires."""
_Priced = tuple[tuple[float, Price | None], ...]
"""Fractions of a chunk's time, 0-1, each with the price in effect."""


def reprice(ledger: FleetLedger, book: PriceBook) -> FleetLedger:
    """Return the ledger with money at the book's prices for each chunk's time; ``notes`` contains both totals.

    A line's seconds count as evenly spread over its chunk. If a price changes within the chunk, each price applies to
    its fraction of the time. Time that no row matches is unpriced.

    Args:
        ledger: Ledger at ``REPRICE_DIMENSIONS`` or finer.
        book: Price book with its fallback, as returned by ``config.price_book.load``.
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

"""The ledger of a fleet over a window: who held GPUs, for how long and for how much, and what could not be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from exporter.model import Money, NodeFacts

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400

Dimension = Literal["cluster", "node", "pool", "namespace", "kind", "workload", "team", "model", "mode"]
"""What lines can be told apart by. ``workload`` is kind and name within a namespace; ``pool`` is a node's sort."""
UNALLOCATED, UNATTRIBUTED = "Unallocated", "Unattributed"
"""Kinds of what no known owner held: see ``exporter.model.ledger``, whose Other no agent sends."""


class LineKey(NamedTuple):
    """Whose a line is. A part that was summed away, and one that is not known, is empty."""

    cluster: str = ""
    node: str = ""
    pool: str = ""
    """``p5.48xlarge on-demand``: instance type and capacity type of the node, as far as they are known."""
    namespace: str = ""
    kind: str = ""
    """Of the workload, or ``Unallocated``, ``Unattributed``; these two are never summed away."""
    workload: str = ""
    team: str = ""
    model: str = ""
    mode: str = ""
    """``exclusive``, ``mig``, ``shared``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What stands on a line. Seconds are share-weighted GPU-seconds."""

    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    """Allocated seconds that had no price and are in no money."""
    energy_joules: float | None = None
    """``None`` where none was measured."""
    money: Mapping[str, Money] = field(default_factory=dict)
    """By ISO 4217 currency; a currency in which nothing was priced is absent."""

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown, always."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing on the line: no seconds, joules or money.

        A line may have joules and money without seconds: those of a process of no pod on a GPU that a pod holds.
        """
        return not (self.allocated_seconds or self.energy_joules or any(money.total for money in self.money.values()))

    def unknown_cost(self, currency: str) -> float:
        """The part of the money that unknown seconds have cost: of what is not idle, by seconds; 0 without money."""
        money = self.money.get(currency)
        busy_or_unknown = self.active_seconds + self.unknown_seconds
        if money is None or not busy_or_unknown:
            return 0.0
        return (money.total - money.idle) * (self.unknown_seconds / busy_or_unknown)

    def active_cost(self, currency: str) -> float:
        """The part of the money that active seconds have cost; with idle and unknown cost it is the total."""
        money = self.money.get(currency)
        return 0.0 if money is None else money.total - money.idle - self.unknown_cost(currency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period, its ends on whole hours UTC; the end is outside of it."""

    start_seconds: int
    end_seconds: int
    label: str = ""
    """As the user wrote it: ``30d``, ``2026-10``."""

    @property
    def seconds(self) -> int:
        """How long it is."""
        return self.end_seconds - self.start_seconds

    @property
    def hours(self) -> int:
        """How many hours it has."""
        return self.seconds // HOUR_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is known of one UTC day, or of the part of it that lies in the window."""

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
    """A question that stayed unanswered after all retries; what it asked for is not in the ledger."""

    window: Window
    what: str
    """The series that was asked for."""
    reason: str
    """In words, with the mend."""
    may_pass: bool = True
    """Whether it may be answered within the hour; not where it asks too much, or for a day that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLedger:
    """The ledger over a window, chunk by chunk in the order of time, at the dimensions that were asked for."""

    window: Window
    dimensions: frozenset[Dimension]
    chunks: tuple[Chunk, ...]
    nodes: Mapping[tuple[str, str], NodeFacts] = field(default_factory=dict)
    """What prices go by, by (cluster, node), as last seen within the window."""
    failures: tuple[Failure, ...] = ()
    """Empty, or the ledger is not whole."""
    engine: str = ""
    """Where it was read: ``Prometheus 3.5.0``, ``VictoriaMetrics 1.112``, ``store of closed days``, or several."""
    simulated: bool = False
    """Some of it is of simulated nodes."""
    notes: tuple[str, ...] = ()
    """One line each: what a reader must know, such as warnings of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What is asked for: for each dimension that is named the values of which a line must have one."""

    wanted: Mapping[Dimension, frozenset[str]] = field(default_factory=dict)

    def keep(self, key: LineKey) -> bool:
        """Whether a line is asked for."""
        return all(getattr(key, dimension) in values for dimension, values in self.wanted.items())

"""What a digest tells, before it has a form."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.report.budget.values import BudgetState
from exporter.report.fleet.report import Trust
from exporter.report.fleet.values import LineKey, Window
from exporter.report.recommend.values import Recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class Spend:
    """Money of the week in one currency; the parts sum to the total."""

    currency: str
    total: float
    before: float | None
    """Of the week before; ``None`` where too little of that is known."""
    active: float
    idle: float
    """Held and without work."""
    unknown: float
    """Held, and whether it worked is not known."""
    unattributed: float
    unallocated: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """A team whose money changed."""

    team: str
    currency: str
    before: float
    after: float

    @property
    def change(self) -> float:
        """More than 0: it paid more than the week before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Money that a workload paid for GPUs that it held and did not use."""

    key: LineKey
    """Cluster, namespace, kind, workload and team."""
    currency: str
    idle: float
    total: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A week of a fleet."""

    week: Window
    """Labelled ``2026-W46``."""
    title: str
    external_url: str
    """Of the cost page, for links; empty where there is none."""
    spends: tuple[Spend, ...]
    """By currency, in which anything was priced, this week or the week before."""
    movers: tuple[Mover, ...]
    """The largest changes first, per currency; empty where the weeks cannot be compared."""
    waste: tuple[Waste, ...]
    """The dearest first, per currency."""
    recommendations: tuple[Recommendation, ...] | None
    """The dearest first; ``None`` where they could not be read."""
    budgets: tuple[BudgetState, ...]
    """All of them."""
    trust: Trust
    unpriced_seconds: float
    allocated_seconds: float
    """Of all lines."""
    engine: str
    simulated: bool
    notes: tuple[str, ...] = ()
    """One line each: what a reader must know of the figures."""
    savings: Mapping[str, float] = field(default_factory=dict)
    """By currency: a month's money of all recommendations."""

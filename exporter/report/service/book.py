"""What pages and API ask for: one door to the store of closed days, to Prometheus, and to what follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from exporter.report.budget.values import BudgetState
from exporter.report.fleet.live import LivePod
from exporter.report.fleet.report import FleetReport, ShareIdle
from exporter.report.fleet.values import Dimension, Filters, FleetLedger, Window
from exporter.report.recommend.values import Recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthMoney:
    """This month in one currency."""

    currency: str
    spent: float
    """Month to date: held, Unallocated and Unattributed."""
    forecast: float | None
    """Of the whole month; ``None`` while too little is known."""
    last_month: float | None
    """Of the whole month before, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """Mean numbers of GPUs over a window: what is there, held, at work, and what full use of the work would be."""

    total: float
    allocated: float
    at_work: float | None
    """Held, and active for 5 % of a quarter of an hour or more; ``None`` where it is not recorded."""
    effective: float
    """GPUs worth of measured activity: half a GPU for one that is half busy."""
    unknown: float
    """Held, and not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How new what is shown is."""

    now_seconds: float
    first_day_seconds: float | None
    """Start of the oldest day that is known; ``None`` while nothing is."""
    closed_until_seconds: float | None
    """End of the newest closed day."""
    read_until_seconds: float | None
    """End of the newest hour that was read from Prometheus."""
    problem: str = ""
    """Why newer hours are not there, in one sentence with the mend; empty where all is well."""
    simulated: bool = False


class Book(Protocol):
    """Answers from the store and, for what is not closed yet, from Prometheus; never blocks the event loop."""

    async def report(
        self,
        window: Window,
        by: Sequence[Dimension],
        filters: Filters | None = None,
        *,
        share_idle: ShareIdle = "none",
        share_unallocated: bool = False,
        with_series: bool = False,
    ) -> FleetReport:
        """The report over a window; ``with_series`` also day by day.

        Raises:
            PrometheusError: Nothing of it is in the store and Prometheus cannot be asked.
            StoreError: The store cannot be read.
        """
        ...

    async def ledger(
        self, window: Window, dimensions: frozenset[Dimension], filters: Filters | None = None
    ) -> FleetLedger:
        """The ledger that reports are made of, read anew; for exports.

        Raises:
            PrometheusError: As for ``report``.
            StoreError: As for ``report``.
        """
        ...

    async def months(self) -> Sequence[MonthMoney]:
        """This month's money, currency by currency."""
        ...

    async def at_work_ratio(self, window: Window, filters: Filters) -> float | None:
        """Mean part of the held GPUs that were at work; ``None`` where it is not recorded or cannot be asked."""
        ...

    async def pods(self, filters: Filters) -> Sequence[LivePod]:
        """Pods of a workload that hold devices now or did within a day, from the live series.

        Raises:
            PrometheusError: Prometheus cannot be asked.
        """
        ...

    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """Values by key of the cost labels that owners have."""
        ...

    def recommendations(self) -> Sequence[Recommendation]:
        """Of the last hour's look, dearest first."""
        ...

    def budgets(self) -> Sequence[BudgetState]:
        """Every budget, in the order of its file."""
        ...

    def freshness(self) -> Freshness:
        """How new all this is."""
        ...

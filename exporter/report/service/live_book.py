"""The book over live sources: reports kept while they hold, months, and what the loop last found."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo

from exporter.errors import ConfigError, ExporterError, PrometheusError
from exporter.report.budget.values import BudgetState
from exporter.report.fleet.costs import dimensions_of, make_report
from exporter.report.fleet.live import LivePod
from exporter.report.fleet.report import FleetReport, ShareIdle
from exporter.report.fleet.sources import LedgerSource
from exporter.report.fleet.values import Dimension, Filters, FleetLedger, Window
from exporter.report.fleet.windows import parse_window
from exporter.report.recommend.values import Recommendation
from exporter.report.service.book import Freshness, MonthMoney
from exporter.report.service.months import month_coverage, month_money, month_start, months_window
from exporter.report.service.readings import Question, Readings, question_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is asked."""

    ledger: LedgerSource
    pods: Callable[[Filters], Awaitable[Sequence[LivePod]]]
    """Pods that match, from the live series. Raises PrometheusError."""
    at_work_ratio: Callable[[Window, Filters], Awaitable[float | None]]
    """Part of the held GPUs that were at work. Raises PrometheusError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Months:
    """A month's money as it was read."""

    start_seconds: int
    money: tuple[MonthMoney, ...]
    coverage: float | None


class LiveBook:
    """A ``Book``. For one event loop; whoever refreshes it calls ``learn`` and ``renew``.

    Args:
        sources: What is asked.
        clock: Unix seconds.
        zone: Whose days and months the names of reports mean.
    """

    def __init__(self, sources: Sources, clock: Callable[[], float], zone: tzinfo = UTC) -> None:
        self._sources = sources
        self._clock = clock
        self._zone = zone
        self._freshness = Freshness(
            now_seconds=clock(), first_day_seconds=None, closed_until_seconds=None, read_until_seconds=None
        )
        self._down = ""
        self._months: _Months | None = None
        self._months_hold = False
        self._counting = asyncio.Lock()
        self._labels: Mapping[str, tuple[str, ...]] = {}
        self._recommendations: tuple[Recommendation, ...] = ()
        self._budgets: tuple[BudgetState, ...] = ()
        self.readings = Readings(clock)

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
        """The report over a window; see ``Book.report``."""
        question = question_of(
            window,
            tuple(by),
            filters or Filters(),
            share_idle=share_idle,
            share_unallocated=share_unallocated,
            with_series=with_series,
        )
        self.readings.look(question)
        return await self._report(question, window)

    async def again(self, question: Question, now: float) -> None:
        """Read a report again, for the window that its name means now; one that has none is left.

        Raises:
            PrometheusError: As for ``report``.
            StoreError: As for ``report``.
        """
        try:
            window = parse_window(question.name, now, self._zone)
        except ConfigError:
            return
        await self._report(question, window)

    async def _report(self, question: Question, window: Window) -> FleetReport:
        wanted = Filters(wanted=dict(question.filters))

        async def read() -> FleetReport:
            ledger = await self._sources.ledger.ledger(window, dimensions_of(question.by), wanted)
            report = await asyncio.to_thread(
                make_report,
                ledger,
                question.by,
                wanted,
                share_idle=question.share_idle,
                share_unallocated=question.share_unallocated,
                with_series=question.with_series,
            )
            self._note(simulated=ledger.simulated)
            return report

        is_closed = window.end_seconds <= (self._freshness.closed_until_seconds or 0.0)
        return await self.readings.get(question, window, read, "" if is_closed else self._down)

    async def ledger(
        self, window: Window, dimensions: frozenset[Dimension], filters: Filters | None = None
    ) -> FleetLedger:
        """The ledger, read anew; see ``Book.ledger``."""
        async with self.readings.turn():
            return await self._sources.ledger.ledger(window, dimensions, filters)

    async def months(self) -> Sequence[MonthMoney]:
        """This month's money; as it was last read where it cannot be read now, and none where a part cannot be."""
        async with self._counting:
            now = self._clock()
            known = self._months_at(now)
            if known and (self._months_hold or self._down):
                return known.money
            try:
                ledger = await self._sources.ledger.ledger(months_window(now), frozenset())
            except ExporterError:
                if known is None:
                    raise
                return known.money
            self._note(simulated=ledger.simulated)
            if ledger.failures and known:
                return known.money
            start = month_start(now)
            if any(failure.window.end_seconds > start for failure in ledger.failures):
                return ()
            money, coverage = month_money(ledger, now), month_coverage(ledger, now)
            self._months = _Months(start_seconds=start, money=money, coverage=coverage)
            self._months_hold = not ledger.failures
            return money

    def known_months(self) -> tuple[Sequence[MonthMoney], float | None]:
        """This month's money as it was last read, and the part of its hours that were recorded."""
        known = self._months_at(self._clock())
        return (known.money, known.coverage) if known else ((), None)

    def _months_at(self, now: float) -> _Months | None:
        """What is known of the month of now: that of another month is not passed off as this one's."""
        return self._months if self._months and self._months.start_seconds == month_start(now) else None

    async def pods(self, filters: Filters) -> Sequence[LivePod]:
        """Pods that match, from the live series; see ``Book.pods``."""
        return await self._sources.pods(filters)

    async def at_work_ratio(self, window: Window, filters: Filters) -> float | None:
        """As recorded; a page goes without it where Prometheus cannot be asked."""
        try:
            return await self._sources.at_work_ratio(window, filters)
        except PrometheusError:
            return None

    def labels(self) -> Mapping[str, tuple[str, ...]]:
        """As they were last learned."""
        return self._labels

    def recommendations(self) -> Sequence[Recommendation]:
        """As they were last learned."""
        return self._recommendations

    def budgets(self) -> Sequence[BudgetState]:
        """As they were last learned."""
        return self._budgets

    def freshness(self) -> Freshness:
        """As it was last learned, with the time of now."""
        return replace(self._freshness, now_seconds=self._clock())

    def learn(
        self,
        *,
        freshness: Freshness | None = None,
        down: str | None = None,
        labels: Mapping[str, tuple[str, ...]] | None = None,
        recommendations: Sequence[Recommendation] | None = None,
        budgets: Sequence[BudgetState] | None = None,
    ) -> None:
        """Show something newer. ``down`` is why Prometheus does not answer now, empty where it does."""
        if down is not None:
            self._down = down
        if freshness is not None:
            self._freshness = replace(freshness, simulated=freshness.simulated or self._freshness.simulated)
        if labels is not None:
            self._labels = labels
        if recommendations is not None:
            self._recommendations = tuple(recommendations)
        if budgets is not None:
            self._budgets = tuple(budgets)

    def _note(self, *, simulated: bool) -> None:
        if simulated and not self._freshness.simulated:
            self._freshness = replace(self._freshness, simulated=True)

    def renew(self) -> None:
        """From now on everything is read anew: an hour, a closed day or another budget has come."""
        self._months_hold = False
        self.readings.expire()

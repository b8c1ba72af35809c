"""What pages and API ask for: one door to the store of closed days, to Prometheus, and to what follows from them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, tzinfo
from math import inf
from typing import Annotated, Generic, TypeVar

from exporter.cost.budgets import Budget, BudgetState, complete_days, forecast, standings
from exporter.cost.document import Funnel, funnel
from exporter.cost.holdings import Recommendation
from exporter.cost.ledger import (
    DAY_SECONDS,
    HOUR_SECONDS,
    Dimension,
    Filters,
    FleetLedger,
    Window,
    last_recorded,
    pairs,
    parse_window,
    period_at,
    period_before,
    total_of,
)
from exporter.cost.live import PodDocument, PriceRows
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.queries import COST_LABELS, RECORDED, SECONDS
from exporter.cost.query_rows import LedgerSource
from exporter.cost.report import KNOWN_RATIO, FleetReport, ShareIdle, dimensions_of, make_report
from exporter.errors import ConfigError, ExporterError, PrometheusError
from exporter.service.report_cache import Question, Readings


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """This month in one currency."""

    currency: Annotated[str, "ISO 4217."]
    spent: Annotated[float, "Month to date: all GPUs, held or not."]
    forecast: Annotated[float | None, "Of the whole month; null while too little is known."]
    last_month: Annotated[float | None, "Of the month before; null where it is not wholly known."]


def gpu_funnel(report: FleetReport, now_seconds: float) -> Funnel | None:
    """Return the funnel in mean numbers of GPUs over the recorded hours; ``None`` where there are none."""
    trust, window = report.trust, report.window
    over = min(window.end_seconds, now_seconds) - window.start_seconds
    if not trust.recorded_hours or not trust.expected_hours or over <= 0:
        return None
    # Hours of several clusters run side by side: what counts is the part of all expected hours.
    seconds = over // HOUR_SECONDS * HOUR_SECONDS * (trust.recorded_hours / trust.expected_hours)
    return funnel(report, unit=seconds) if seconds > 0 else None


_TIME = "Unix time; null while it is not known."


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How new what is shown is."""

    now_seconds: Annotated[float, "Time of the answer, Unix time."]
    first_day_seconds: Annotated[float | None, f"Start of the oldest day that is known. {_TIME}"] = None
    closed_until_seconds: Annotated[float | None, f"End of the newest closed day. {_TIME}"] = None
    read_until_seconds: Annotated[float | None, f"End of the newest recorded hour. {_TIME}"] = None
    problem: Annotated[str | None, "Why newer hours are not there, with the fix."] = None
    simulated: Annotated[bool, "Some of it is of simulated nodes."] = False


def this_month(ledger: FleetLedger, now_seconds: float) -> "ThisMonth":
    """Return this month's money, a line per currency.

    Args:
        ledger: Over last month and this one, as far as they are recorded; its dimensions do not matter.
        now_seconds: Unix time.
    """
    this = period_at("month", now_seconds)
    last = [chunk for chunk in ledger.chunks if chunk.window.start_seconds < this.start_seconds]
    now = [chunk for chunk in ledger.chunks if chunk.window.start_seconds >= this.start_seconds]
    hours = sum(chunk.window.hours for chunk in last)
    recorded = [max(chunk.recorded_hours.values(), default=0) for chunk in ledger.chunks]  # a new cluster has fewer
    known = bool(hours) and sum(recorded[: len(last)]) >= KNOWN_RATIO * hours
    by_day = [total_of(chunk.lines.values()) for chunk in ledger.chunks]
    months = []
    for currency in sorted({currency for figures in by_day for currency in figures.money}):
        money = [figures.money_in(currency).total for figures in by_day]
        spent = sum(money[len(last) :])
        days = complete_days(ledger, money, recorded)
        months.append(
            Month(
                currency=currency,
                spent=spent,
                forecast=forecast(spent, days, ledger.window.end_seconds, this),
                last_month=sum(money[: len(last)]) if known else None,
            )
        )
    clusters = {cluster for chunk in now for cluster in chunk.recorded_hours}
    hours = (ledger.window.end_seconds - this.start_seconds) // HOUR_SECONDS * max(1, len(clusters))
    return ThisMonth(
        start_seconds=this.start_seconds,
        money=tuple(months),
        coverage=sum(sum(chunk.recorded_hours.values()) for chunk in now) / hours if hours > 0 else None,
    )


Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True, eq=False)
class Cached(Generic[Value]):
    """A value that is read again when it is due; the old one stays while it cannot be read. For one event loop."""

    name: str
    read: Callable[[float], Awaitable[Value]]
    """Reads it at a Unix time. Raises ExporterError."""
    value: Value
    every_seconds: float = inf
    """Between two readings that went well."""
    retry_seconds: float = 0.0
    """After a reading that failed; twice as long after each further one."""
    longest_retry_seconds: float = 0.0
    holds: Callable[[Value, float], bool] = field(default=lambda _value, _now: True)
    """Whether a value may still be shown at a Unix time."""
    problem: str = ""
    """Why the last reading failed; empty where it did not."""
    pause_seconds: float = 0.0
    """Between the last reading, which failed, and the next one; 0 where it did not fail."""
    _due_at: float = 0.0
    _expired: bool = False
    """Whether it was made due while it was read."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def expire(self) -> None:
        """Make it due; the value stays as the old one."""
        self._due_at, self.pause_seconds, self._expired = 0.0, 0.0, True

    def is_due(self, now: float) -> bool:
        """Return whether it is time to read it; a clock that was set back makes no pause longer."""
        return not self.holds(self.value, now) or not 0 < self._due_at - now <= (
            self.pause_seconds or self.every_seconds
        )

    async def refresh(self, now: float) -> None:
        """Read it if it is due; one reading at a time.

        Raises:
            ExporterError: It could not be read.
        """
        async with self._reading:
            if not self.is_due(now):
                return
            self._expired = False
            try:
                self.value = await self.read(now)
            except ExporterError as error:
                self.problem = str(error)
                self.pause_seconds = min(max(2 * self.pause_seconds, self.retry_seconds), self.longest_retry_seconds)
                self._due_at = now + self.pause_seconds
                raise
            self.problem, self.pause_seconds = "", 0.0
            if not self._expired:
                self._due_at = now + self.every_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BookSources:
    """What is asked; each raises PrometheusError where Prometheus does not answer."""

    ledger: LedgerSource
    prices: Callable[[float, Filters], Awaitable[PriceRows]]
    """Rows of the price book that GPUs have at a Unix time."""
    pods: Callable[[Filters], Awaitable[Sequence[PodDocument]]]
    """Pods that match and hold devices now, or did within a day, from the live series."""
    newest_hour: Callable[[float], Awaitable[float | None]]
    labels: Callable[[float], Awaitable[Mapping[str, tuple[str, ...]]]]
    recommendations: Callable[[float], Awaitable[Sequence[Recommendation]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMonth:
    """A month's money as it was read."""

    start_seconds: int
    money: tuple[Month, ...]
    coverage: float | None
    """Part of its hours so far that were recorded, over all clusters; ``None`` of a month just begun."""


FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 60.0, 3600.0
"""Before budgets that could not be counted are counted again: twice as long each time, as each costs many questions."""


class Book:
    """Answers from the store and, for what is not closed yet, from Prometheus; never blocks the event loop.

    For one event loop.

    Args:
        sources: What is asked.
        clock: Unix seconds.
        zone: Time zone of the days and months that names of reports mean.

    Attributes:
        labels: Values by key of the cost labels that owners have.
        recommendations: Those of the last reading, dearest first.
        budgets: How every budget stands, in the order of its file.
        down: Why Prometheus does not answer now; empty where it does.
    """

    def __init__(self, sources: BookSources, clock: Callable[[], float], zone: tzinfo = UTC) -> None:
        self.sources = sources
        self._clock = clock
        self._zone = zone
        self._freshness = Freshness(now_seconds=clock())
        self.down = ""
        self.labels = Cached[Mapping[str, tuple[str, ...]]](name="labels", read=sources.labels, value={})
        self.month = Cached[ThisMonth | None](
            name="months", read=self._read_month, value=None, holds=lambda month, now: _is_of(month, now) is not None
        )
        self.budgets = Cached[Sequence[BudgetState]](
            name="budgets",
            read=self._count_budgets,
            value=(),
            retry_seconds=FIRST_PAUSE_SECONDS,
            longest_retry_seconds=MOST_PAUSE_SECONDS,
        )
        self.recommendations = Cached[Sequence[Recommendation]](name="advice", read=sources.recommendations, value=())
        self._wanted: Sequence[Budget] = ()
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
        """Return the report over a window; ``with_series`` also day by day.

        Raises:
            PrometheusError: Nothing of it is in the store and Prometheus cannot be asked.
            StoreError: The store cannot be read.
        """
        question = Question(
            name=window.label or f"{window.start_seconds},{window.end_seconds}",
            by=tuple(by),
            filters=frozenset((filters or Filters()).wanted.items()),
            share_idle=share_idle,
            share_unallocated=share_unallocated,
            with_series=with_series,
        )
        self.readings.look(question)
        return await self._report(question, window)

    def before(self, window: Window) -> Window | None:
        """Return the period before a calendar period that is over; ``None`` for every other window."""
        return period_before(window, self._zone)

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
            ledger = await self.sources.ledger.ledger(window, dimensions_of(question.by), wanted)
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
        return await self.readings.get(question, window, read, "" if is_closed else self.down)

    async def ledger(
        self, window: Window, dimensions: frozenset[Dimension], filters: Filters | None = None
    ) -> FleetLedger:
        """Return the ledger that reports are made of, read again; for exports.

        Raises:
            PrometheusError: As for ``report``.
            StoreError: As for ``report``.
        """
        async with self.readings.turn():
            return await self.sources.ledger.ledger(window, dimensions, filters)

    async def months(self) -> Sequence[Month]:
        """Return this month's money; as it was last read where it cannot be read now, none where a part cannot be."""
        now = self._clock()
        known = _is_of(self.month.value, now)
        if known is None or not self.down:
            try:
                await self.month.refresh(now)
            except ExporterError:
                if known is None:
                    raise
            known = _is_of(self.month.value, now)
        return known.money if known else ()

    async def _read_month(self, now: float) -> ThisMonth | None:
        start = period_at("month", now).start_seconds
        months = Window(
            start_seconds=period_at("month", start - 1).start_seconds,
            end_seconds=last_recorded(now),
            label="last month and this",
        )
        ledger = await self.sources.ledger.ledger(months, frozenset())
        self._note(simulated=ledger.simulated)
        known = _is_of(self.month.value, now)
        if ledger.failures:
            self.month.expire()
            if known or any(failure.window.end_seconds > start for failure in ledger.failures):
                return known
        return this_month(ledger, now)

    def known_month(self) -> ThisMonth | None:
        """Return this month's money as it was last read."""
        return _is_of(self.month.value, self._clock())

    def set_budgets(self, budgets: Sequence[Budget]) -> None:
        """Count other budgets from now on."""
        self._wanted = budgets
        self.budgets.expire()

    async def _count_budgets(self, now: float) -> Sequence[BudgetState]:
        states = await standings(self._wanted, self.sources.ledger, now)
        # A budget without known figures raises no alert; it is counted again before there is a newer hour.
        if unread := [state for state in states if state.unread]:
            self.budgets.value = states
            what = f"{len(unread)} of {len(states)} budgets could not be counted: {unread[0].unread}"
            raise PrometheusError("budgets_unread", what, retriable=True)
        return states

    def freshness(self) -> Freshness:
        """Return how new the data is, at the present time."""
        return replace(self._freshness, now_seconds=self._clock())

    def show(self, freshness: Freshness) -> None:
        """Show how new the data is now; what was simulated stays so."""
        self._freshness = replace(freshness, simulated=freshness.simulated or self._freshness.simulated)

    def _note(self, *, simulated: bool) -> None:
        self.show(replace(self._freshness, simulated=simulated))

    def expire(self) -> None:
        """Read everything again from now on: there is an hour or a closed day that was not there."""
        for one in (self.labels, self.month, self.budgets, self.recommendations):
            one.expire()
        self.readings.expire()


def _is_of(month: ThisMonth | None, now: float) -> ThisMonth | None:
    """Return a month's money if it is that of now: another month's is not passed off as this one's."""
    return month if month and month.start_seconds == period_at("month", now).start_seconds else None


LOOK_BACK_HOURS = 26
PATIENCE_SECONDS = 20.0
"""Retries included: pages must not seem to be new while Prometheus hangs."""
LATE_SECONDS = 2.5 * HOUR_SECONDS
"""After the end of the newest hour: one that was missed is in the next, and two are no accident."""


async def newest_hour(client: PrometheusClient, now_seconds: float) -> float | None:
    """When the newest recorded hour ended, Unix time; ``None`` where none was within the last 26 hours.

    Raises:
        PrometheusError: It cannot be asked.
    """
    # A recorded sample is of one moment: in steps of 5 min each is seen once, with its own time.
    query = f"max(max_over_time(timestamp({RECORDED})[{LOOK_BACK_HOURS}h:5m]))"
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            samples = await client.instant(query, now_seconds)
    except TimeoutError:
        raise PrometheusError(
            "timeout",
            f"{client.settings.url}: no answer to a light question in {PATIENCE_SECONDS:g} s; see what keeps it busy",
            retriable=True,
        ) from None
    newest = samples[0].value if samples else None
    if newest is not None and newest > now_seconds + DAY_SECONDS:
        raise PrometheusError(
            "bad_rows",
            f"{client.settings.url}: {RECORDED} has an hour that is more than a day in the future; see the clock of"
            " what records it, and other writers of this series",
        )
    return None if newest is None else newest // HOUR_SECONDS * HOUR_SECONDS


async def label_values(client: PrometheusClient, now_seconds: float) -> dict[str, tuple[str, ...]]:
    """Values by key of the cost labels that owners of the last day had, both in the order of the alphabet.

    Raises:
        PrometheusError: It cannot be asked.
    """
    series = SECONDS.series("workload", f'{COST_LABELS}!=""')
    samples = await client.instant(f"count by ({COST_LABELS}) (last_over_time({series}[1d]))", now_seconds)
    found: dict[str, set[str]] = {}
    for sample in samples:
        for key, value in pairs(sample.labels.get(COST_LABELS, "")).items():
            found.setdefault(key, set()).add(value)
    return {key: tuple(sorted(values)) for key, values in sorted(found.items())}


def lateness(newest_seconds: float | None, now_seconds: float) -> str:
    """Why there is no newer hour, in one sentence with the fix; empty where it is new enough."""
    if newest_seconds is None:
        return (
            f"{RECORDED} has no sample of the last {LOOK_BACK_HOURS} hours: load rules/prometheus-rules.yaml into"
            " Prometheus, and see that it scrapes the agents"
        )
    if now_seconds - newest_seconds <= LATE_SECONDS:
        return ""
    at = f"{datetime.fromtimestamp(newest_seconds, UTC):%Y-%m-%d %H:%M} UTC"
    return f"no hour after {at} was recorded: see whether Prometheus evaluates its rules and scrapes the agents"

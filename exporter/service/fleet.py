"""Reads the data of pages and API from the store and from Prometheus, and runs the jobs that keep both fresh."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from exporter.config.options import FleetSettings
from exporter.cost.budgets import Budget, BudgetState, load, standings
from exporter.cost.dimensions import EVERYTHING, Dimension, Filters, dimensions_of
from exporter.cost.ledger import FleetLedger, LedgerSource
from exporter.cost.live import PodDocument, PriceRows, live_pods, price_rows
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.recommend import Recommendation, read_recommendations
from exporter.cost.report import FleetReport, Question, make_report
from exporter.cost.store import ClosedDay, DayStore
from exporter.cost.store_ledger import close_due_days, oldest_day
from exporter.cost.window import DAY_SECONDS, Now, Window, last_recorded, parse_window, period_at, period_before
from exporter.errors import ConfigError, ExporterError, PrometheusError, StoreError
from exporter.model.formatting import day
from exporter.service.cache import Asked, Cached, Readings
from exporter.service.data import Freshness, Month, ThisMonth, label_values, lateness, newest_hour, this_month

LOG = logging.getLogger("exporter.service")
RETRY_SECONDS = 15.0
"""Seconds between checks while Prometheus does not answer."""
CLOSING_SECONDS, CLOSING_RETRY_SECONDS = 3600.0, 60.0
"""Seconds between checks for complete days, and after a failed check."""
BUDGET_RETRY_SECONDS = 60.0
"""Seconds after a failed reading of the budgets; doubled each time, because a reading takes many queries."""
WARM_SECONDS = 7200.0
"""Reports requested within this time are read again as soon as newer data exists."""
MOST_WARM = 8
"""Maximum number of these reports, the newest requests first; each takes the queries of a report."""


class Fleet:
    """The data of a fleet for pages and API, read again when due. Never blocks; for one event loop.

    Args:
        client: Client for the data of pages.
        ledger: Source of the ledger: the store with Prometheus, or Prometheus alone.
        keeping: Writer of the store.
        clock: Returns Unix seconds.
        settings: Settings of reading and storing.
        first: Reports to read before the first visit, so that the first visitor does not wait.
    """

    def __init__(
        self,
        client: PrometheusClient,
        ledger: LedgerSource,
        keeping: "Keeping",
        clock: Callable[[], float],
        settings: FleetSettings,
        first: Sequence[Asked] = (),
    ) -> None:
        self._ledger = ledger
        self.keeping = keeping
        self._clock = clock
        self._settings = settings
        self._first = first
        self.pods: Callable[[Filters], Awaitable[Sequence[PodDocument]]] = partial(live_pods, client)
        """Returns matching pods that hold devices now or held them within a day. Raises PrometheusError."""
        self.prices: Callable[[float, Filters], Awaitable[PriceRows]] = partial(price_rows, client)
        """Returns the rows of the price book that apply to GPUs at a Unix time. Raises PrometheusError."""
        self.newest = Cached[float | None](read=partial(newest_hour, client), value=None, every_seconds=0.0)
        """End of the newest recorded hour; ``problem`` is the reason why Prometheus does not answer."""
        self.labels = Cached[Mapping[str, tuple[str, ...]]](read=partial(label_values, client), value={})
        """Values of the cost labels of owners, by key."""
        self.month = Cached[ThisMonth | None](
            read=self._read_month, value=None, holds=lambda month, now: _is_of(month, now) is not None
        )
        """Money of the month of the last reading, which may be over; see ``known_month``."""
        self.budgets = Cached[Sequence[BudgetState]](
            read=self._count_budgets, value=(), retry_seconds=BUDGET_RETRY_SECONDS
        )
        """States of the budgets, in the order of the file."""
        self.recommendations = Cached[Sequence[Recommendation]](
            read=partial(read_recommendations, client, ledger), value=()
        )
        """Recommendations of the last reading, dearest first."""
        self._warm = Cached[None](read=self._read_warm, value=None)
        self._jobs: tuple[Cached[Any], ...] = (self.labels, self.month, self.budgets, self.recommendations, self._warm)
        self.readings = Readings(clock)
        self.wake = asyncio.Event()
        """Set to start the next check at once."""
        self.errors = Counter[str]()
        """Failed readings since the start, by reason."""
        self.looked = False
        """Whether the first check is complete, successful or not."""
        self.last_read_seconds: float | None = None
        """Unix time of the last check without failures; ``None`` before the first."""
        self._simulated = False
        self._seen: object = None
        self.wanted: Sequence[Budget] | None = None
        """Budgets of the file; ``None`` before the first reading."""

    async def report(self, window: Window, question: Question) -> FleetReport:
        """Return the report over a window.

        Raises:
            PrometheusError: The store has no day of the window, and Prometheus cannot be queried.
            StoreError: The store cannot be read.
        """
        asked = Asked(window.label or f"{window.start_seconds},{window.end_seconds}", question)
        self.readings.look(asked)
        return await self._report(asked, window)

    async def _report(self, asked: Asked, window: Window) -> FleetReport:
        question = asked.question

        async def read() -> FleetReport:
            ledger = await self._read(window, dimensions_of(question.by), question.filters)
            return await asyncio.to_thread(make_report, ledger, question)

        is_closed = window.end_seconds <= (self.keeping.closed_until_seconds or 0.0)
        return await self.readings.get(asked, window, read, "" if is_closed else self.newest.problem)

    async def _read(self, window: Window, dimensions: frozenset[Dimension], filters: Filters) -> FleetLedger:
        ledger = await self._ledger.ledger(window, dimensions, filters)
        self._simulated |= ledger.simulated
        return ledger

    async def ledger(self, window: Window, dimensions: frozenset[Dimension], filters: Filters) -> FleetLedger:
        """Read and return the ledger of reports without the cache; for exports.

        Raises:
            PrometheusError: As for ``report``.
            StoreError: As for ``report``.
        """
        async with self.readings.turn():
            return await self._read(window, dimensions, filters)

    def now(self) -> Now:
        """Return the current time, and the time zone of days and months."""
        return Now(self._clock(), self._settings.timezone)

    def before(self, window: Window) -> Window | None:
        """Return the period before a calendar period; ``None`` for any other window."""
        return period_before(window, self._settings.timezone)

    async def months(self) -> Sequence[Month]:
        """Return this month's money; the last known value if reading fails, empty if a part cannot be read."""
        known = self.known_month()
        if known is None or not self.newest.problem:
            try:
                await self.month.refresh(self._clock())
            except ExporterError:
                if known is None:
                    raise
            known = self.known_month()
        return known.money if known else ()

    def known_month(self) -> ThisMonth | None:
        """Return this month's money of the last reading; ``None`` if unknown."""
        return _is_of(self.month.value, self._clock())

    async def _read_month(self, now: float) -> ThisMonth | None:
        start = period_at("month", now).start_seconds
        months = Window(
            start_seconds=period_at("month", start - 1).start_seconds,
            end_seconds=last_recorded(now),
            label="last month and this",
        )
        ledger = await self._read(months, frozenset(), EVERYTHING)
        known = _is_of(self.month.value, now)
        if ledger.failures:
            self.month.expire()
            if known or any(failure.window.end_seconds > start for failure in ledger.failures):
                return known
        return this_month(ledger, now)

    def load_budgets(self) -> None:
        """Read the budgets file; if it has mistakes, the budgets that are already loaded stay.

        Raises:
            ConfigError: The file has mistakes, and no budgets are loaded.
        """
        path = self._settings.budgets
        try:
            self.wanted = load(path) if path else ()
        except ConfigError as error:
            if self.wanted is None:
                raise
            for problem in error.problems:
                LOG.warning("the budgets stay as they were: %s", problem)
        self.budgets.expire()

    async def _count_budgets(self, now: float) -> Sequence[BudgetState]:
        states = await standings(self.wanted or (), self._ledger, now)
        # A budget without known figures raises no alert, so it is read again before the next hour is recorded.
        if unread := [state for state in states if state.unread]:
            self.budgets.value = states
            what = f"{len(unread)} of {len(states)} budgets could not be counted: {unread[0].unread}"
            raise PrometheusError("budgets_unread", what, retriable=True)
        return states

    async def _read_warm(self, now: float) -> None:
        """Read again the reports that clients requested lately, so that they do not wait."""
        for asked in self.readings.lately(now - WARM_SECONDS)[-MOST_WARM:] or self._first:
            # A window may be empty now, such as a month in its first hour.
            with suppress(ConfigError):
                await self._report(asked, parse_window(asked.window, now, self._settings.timezone))

    def freshness(self) -> Freshness:
        """Return the current freshness of the data."""
        now, down = self._clock(), self.newest.problem
        late = lateness(self.newest.value, now) if self.looked and not down else ""
        problems = (down, late, self.keeping.problem, *(job.problem for job in self._jobs))
        return Freshness(
            now_seconds=now,
            first_day_seconds=self.keeping.first_day_seconds,
            closed_until_seconds=self.keeping.closed_until_seconds,
            read_until_seconds=self.newest.value,
            problem="; ".join(dict.fromkeys(filter(None, problems))) or None,
            simulated=self._simulated,
        )

    async def look(self, now: float) -> float:
        """Check for a newer hour or closed day, and read what is due; return the seconds until the next check."""
        await self._refresh(self.newest, now)
        if self.newest.problem:
            self.looked = True
            return RETRY_SECONDS
        state = (self.newest.value, self.keeping.days)
        if state != self._seen:
            self._seen = state
            for job in self._jobs:
                job.expire()
            self.readings.expire()
        self.looked = True
        for job in self._jobs:
            await self._refresh(job, now)
        if not any(job.problem for job in self._jobs):
            self.last_read_seconds = now
        interval = self._settings.refresh_interval_seconds
        return min((job.pause_seconds for job in self._jobs if 0 < job.pause_seconds < interval), default=interval)

    async def _refresh(self, job: "Cached[Any]", now: float) -> None:
        try:
            await job.refresh(now)
        except ExporterError as error:
            self._count(error)

    async def close_days(self, now: float) -> float:
        """Close the days that are due; return the seconds until the next time."""
        try:
            await self.keeping.round(now)
        except ExporterError as error:
            self.keeping.problem = str(error)
            self._count(error)
            return CLOSING_RETRY_SECONDS
        self.wake.set()
        return CLOSING_SECONDS

    def _count(self, error: ExporterError) -> None:
        reason = getattr(error, "reason", "other")
        self.errors[reason] += 1
        LOG.warning("refresh failed", extra={"reason": reason, "problem": str(error)})

    async def repeat(self, job: Callable[[float], Awaitable[float]], wake: asyncio.Event) -> None:
        """Run ``look`` or ``close_days`` until cancelled, after each returned pause or when woken."""
        while True:
            wake.clear()
            try:
                pause = await job(self._clock())
            except Exception:
                # The pages keep their data and show its age; without the service they would show nothing.
                LOG.exception("a round has failed")
                self.errors["internal"] += 1
                pause = RETRY_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), pause)


def _is_of(month: ThisMonth | None, now: float) -> ThisMonth | None:
    """Return a month's money if it is the current month, otherwise ``None``."""
    return month if month and month.start_seconds == period_at("month", now).start_seconds else None


@dataclass(slots=True, kw_only=True)
class Keeping:
    """The store, if any, and its days."""

    prometheus: LedgerSource
    path: Path | None
    history_days: int
    problem: str = ""
    """Reason why days are not closed, in one sentence; empty without a problem."""
    days: tuple[ClosedDay, ...] = ()
    not_closed: int | None = None
    """Days that the last closing could not close, except those that wait for hours; ``None`` if none was."""
    _store: DayStore | None = None
    """Store in which this process closes days; ``None`` if it closes none."""
    _writing: ExitStack = field(default_factory=ExitStack)
    _oldest: Cached[float | None] = field(init=False)

    def __post_init__(self) -> None:
        self._oldest = Cached(
            read=self._read_oldest,
            value=None,
            every_seconds=DAY_SECONDS,
            holds=lambda found, _: found is not None,
        )

    @property
    def first_day_seconds(self) -> float | None:
        """Start of the oldest day in the store or in Prometheus."""
        closed = float(self.days[0].window.start_seconds) if self.days else None
        return min((known for known in (closed, self._oldest.value) if known is not None), default=None)

    @property
    def closed_until_seconds(self) -> float | None:
        """End of the newest closed day."""
        return float(self.days[-1].window.end_seconds) if self.days else None

    def open(self, now: float) -> None:
        """Open the store for writing; if another process writes it, ``problem`` names that process.

        Raises:
            StoreError: The store can neither be read nor written.
        """
        if self.path is None or self._store is not None:
            return
        store = DayStore(self.path)
        try:
            self._enter(store, now)
            self._store, self.problem = store, ""
        except StoreError as error:
            if error.reason != "in_use":
                raise
            self.problem = str(error)
        self.days = store.closed_days()

    def _enter(self, store: DayStore, now: float) -> None:
        try:
            self._writing.enter_context(store.writing(now))
        except StoreError as error:
            if error.reason != "damaged":
                raise
            LOG.error("%s", error)  # noqa: TRY400 - the message is complete: the damaged file is renamed
            self._writing.enter_context(store.writing(now))

    def close(self) -> None:
        """Release the store for other writers."""
        self._writing.close()
        self._store = None

    async def round(self, now: float) -> None:
        """Close the days that are due; search for the oldest day if it is unknown.

        Raises:
            PrometheusError: A query failed.
            StoreError: The store cannot be read or written.
        """
        if self._store is None:
            await asyncio.to_thread(self.open, now)
        await self._oldest.refresh(now)
        if self._store is None or self._oldest.value is None:
            return
        from_day = None if self.days else int(self._oldest.value)
        closing = await close_due_days(
            self._store, self.prometheus, now, from_day=from_day, accept_gaps=True, by="serve", progress=_log
        )
        for left in closing.left:
            LOG.info("a day is not closed", extra={"day": day(left.day_seconds), "reason": left.reason})
        stuck = [left for left in closing.left if not left.waits]
        self.not_closed = len(stuck)
        self.problem = stuck[0].reason if stuck else ""
        self.days = await asyncio.to_thread(self._store.closed_days)

    async def _read_oldest(self, now: float) -> float | None:
        midnight = int(now // DAY_SECONDS) * DAY_SECONDS
        return await oldest_day(
            self.prometheus, midnight + DAY_SECONDS, from_day=midnight - self.history_days * DAY_SECONDS
        )


def _log(done: int, due: int) -> None:
    LOG.info("closing days", extra={"done": done, "due": due})

"""What pages and API ask for, from the store of closed days and from Prometheus, and the jobs that keep both fresh."""

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
"""Between two looks while Prometheus does not answer."""
CLOSING_SECONDS, CLOSING_RETRY_SECONDS = 3600.0, 60.0
"""Seconds between checks for complete days, and after a failed check."""
BUDGET_RETRY_SECONDS = 60.0
"""Before budgets that could not be counted are counted again: twice as long each time, as each costs many questions."""
WARM_SECONDS = 7200.0
"""Reports that were read within this are read again as soon as there is something newer."""
MOST_WARM = 8
"""Of these the ones that were looked at last, no more: each costs Prometheus the questions of a report."""


class Fleet:
    """The figures of a fleet: answers pages and API, and reads again what is due. Never blocks; for one event loop.

    Args:
        client: Asks Prometheus for what is shown.
        ledger: The store with Prometheus, or Prometheus alone.
        keeping: The store's writer.
        clock: Unix seconds.
        settings: What is read and kept.
        first: What is read before the first visit, so that the first visitor does not wait for it.
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
        """Pods that match and hold devices now, or did within a day. Raises PrometheusError."""
        self.prices: Callable[[float, Filters], Awaitable[PriceRows]] = partial(price_rows, client)
        """Rows of the price book that GPUs have at a Unix time. Raises PrometheusError."""
        self.newest = Cached[float | None](read=partial(newest_hour, client), value=None, every_seconds=0.0)
        """End of the newest recorded hour; its ``problem`` is why Prometheus does not answer now."""
        self.labels = Cached[Mapping[str, tuple[str, ...]]](read=partial(label_values, client), value={})
        """Values by key of the cost labels that owners have."""
        self.month = Cached[ThisMonth | None](
            read=self._read_month, value=None, holds=lambda month, now: _is_of(month, now) is not None
        )
        """Of another month where that was read last; see ``known_month``."""
        self.budgets = Cached[Sequence[BudgetState]](
            read=self._count_budgets, value=(), retry_seconds=BUDGET_RETRY_SECONDS
        )
        """How every budget stands, in the order of its file."""
        self.recommendations = Cached[Sequence[Recommendation]](
            read=partial(read_recommendations, client, ledger), value=()
        )
        """Those of the last reading, dearest first."""
        self._warm = Cached[None](read=self._read_warm, value=None)
        self._jobs: tuple[Cached[Any], ...] = (self.labels, self.month, self.budgets, self.recommendations, self._warm)
        self.readings = Readings(clock)
        self.wake = asyncio.Event()
        """Set where the next look is to be at once."""
        self.errors = Counter[str]()
        """Questions that failed since the start, by reason."""
        self.looked = False
        """Whether the first look is over, however it went."""
        self.last_read_seconds: float | None = None
        """When all of a look was answered last."""
        self._simulated = False
        self._seen: object = None
        self.wanted: Sequence[Budget] | None = None
        """The budgets of the file; ``None`` before it was read."""

    async def report(self, window: Window, question: Question) -> FleetReport:
        """Return the report over a window.

        Raises:
            PrometheusError: Nothing of it is in the store and Prometheus cannot be asked.
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
        """Return the ledger that reports are made of, read again; for exports.

        Raises:
            PrometheusError: As for ``report``.
            StoreError: As for ``report``.
        """
        async with self.readings.turn():
            return await self._read(window, dimensions, filters)

    def now(self) -> Now:
        """Return the time, and the time zone of the days and months that names of periods mean."""
        return Now(self._clock(), self._settings.timezone)

    def before(self, window: Window) -> Window | None:
        """Return the period before a calendar period that is over; ``None`` for every other window."""
        return period_before(window, self._settings.timezone)

    async def months(self) -> Sequence[Month]:
        """Return this month's money; as it was last read where it cannot be read now, none where a part cannot be."""
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
        """Return this month's money as it was last read."""
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
        """Read the file of budgets; where it has mistakes and there are budgets already, these stay.

        Raises:
            ConfigError: It has mistakes, and there are none.
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
        # A budget without known figures raises no alert; it is counted again before there is a newer hour.
        if unread := [state for state in states if state.unread]:
            self.budgets.value = states
            what = f"{len(unread)} of {len(states)} budgets could not be counted: {unread[0].unread}"
            raise PrometheusError("budgets_unread", what, retriable=True)
        return states

    async def _read_warm(self, now: float) -> None:
        """Read again the reports that clients request, so that they do not wait for it."""
        for asked in self.readings.lately(now - WARM_SECONDS)[-MOST_WARM:] or self._first:
            # A name may have no window now, such as a month in its first hour.
            with suppress(ConfigError):
                await self._report(asked, parse_window(asked.window, now, self._settings.timezone))

    def freshness(self) -> Freshness:
        """Return how new the data is, at the present time."""
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
        """Run ``look`` or ``close_days`` until cancelled: again after the pause that it returns, or when woken."""
        while True:
            wake.clear()
            try:
                pause = await job(self._clock())
            except Exception:
                # The pages stay as they are and show their age; a service that ended would show nothing.
                LOG.exception("a round has failed")
                self.errors["internal"] += 1
                pause = RETRY_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), pause)


def _is_of(month: ThisMonth | None, now: float) -> ThisMonth | None:
    """Return a month's money if it is that of now: another month's is not passed off as this one's."""
    return month if month and month.start_seconds == period_at("month", now).start_seconds else None


@dataclass(slots=True, kw_only=True)
class Keeping:
    """The store, where there is one, and what is in it."""

    prometheus: LedgerSource
    path: Path | None
    history_days: int
    problem: str = ""
    """Why days are not kept, in one sentence; empty where all is well."""
    days: tuple[ClosedDay, ...] = ()
    not_closed: int | None = None
    """Days that the last closing left, but for those that wait for hours; ``None`` before it, and without a store."""
    _store: DayStore | None = None
    """Where this process closes days."""
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
        """Start of the oldest day that the store or Prometheus has."""
        closed = float(self.days[0].window.start_seconds) if self.days else None
        return min((known for known in (closed, self._oldest.value) if known is not None), default=None)

    @property
    def closed_until_seconds(self) -> float | None:
        """End of the newest closed day."""
        return float(self.days[-1].window.end_seconds) if self.days else None

    def open(self, now: float) -> None:
        """Open the store to write; where another process does, its days are shown and ``problem`` says so.

        Raises:
            StoreError: It can neither be read nor written.
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
            LOG.error("%s", error)  # noqa: TRY400 - the message says all: what was damaged is set aside
            self._writing.enter_context(store.writing(now))

    def close(self) -> None:
        """Let another process write."""
        self._writing.close()
        self._store = None

    async def round(self, now: float) -> None:
        """Close what is due; the oldest day is looked for where it is not known.

        Raises:
            PrometheusError: It cannot be asked.
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

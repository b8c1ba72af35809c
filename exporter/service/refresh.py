"""Keep the data fresh: look for newer hours, then update months, budgets and recommendations when each is due."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter.cost.budgets import Budget
from exporter.cost.ledger import DAY_SECONDS
from exporter.cost.query_rows import LedgerSource, Progress
from exporter.cost.store import ClosedDay, DayStore
from exporter.cost.store_ledger import close_due_days, oldest_day
from exporter.errors import ConfigError, ExporterError, PrometheusError, StoreError
from exporter.model.formatting import day
from exporter.service.data import Book, Cached, Freshness, lateness
from exporter.service.report_cache import Question

LOG = logging.getLogger("exporter.service")

EVERY_SECONDS = 3600.0
"""Between two looks for days that are over."""
CLOSING_RETRY_SECONDS = 60.0
BY = "serve"


@dataclass(slots=True, kw_only=True)
class Keeping:
    """The store, where there is one, and what is in it."""

    prometheus: LedgerSource
    path: Path | None
    history_days: int
    changed: Callable[[], None] = field(default=lambda: None)
    """Called when something was closed."""
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
            name="oldest day",
            read=self._read_oldest,
            value=None,
            every_seconds=DAY_SECONDS,
            holds=lambda found, _: found is not None,
        )

    @property
    def state(self) -> object:
        """Another one when a day was closed or reopened."""
        return tuple((day.window.start_seconds, day.version) for day in self.days)

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
            self.changed()
            return
        from_day = None if self.days else int(self._oldest.value)
        closing = await close_due_days(
            self._store, self.prometheus, now, from_day=from_day, accept_gaps=True, by=BY, progress=_log
        )
        for left in closing.left:
            LOG.info("a day is not closed", extra={"day": day(left.day_seconds), "reason": left.reason})
        stuck = [left for left in closing.left if not left.waits]
        self.not_closed = len(stuck)
        self.problem = stuck[0].reason if stuck else ""
        self.days = await asyncio.to_thread(self._store.closed_days)
        self.changed()

    async def _read_oldest(self, now: float) -> float | None:
        midnight = int(now // DAY_SECONDS) * DAY_SECONDS
        return await oldest_day(
            self.prometheus, midnight + DAY_SECONDS, from_day=midnight - self.history_days * DAY_SECONDS
        )


def _log(progress: Progress) -> None:
    LOG.info("closing days", extra={"done": progress.done, "due": progress.total})


RETRY_SECONDS = 15.0
"""Between two looks while Prometheus does not answer."""
WARM_SECONDS = 7200.0
"""Reports that were read within this are read again as soon as there is something newer."""
MOST_WARM = 8
"""Of these the ones that were looked at last, no more: each costs Prometheus the questions of a report."""


@dataclass(slots=True, kw_only=True)
class Refreshing:
    """The rounds, one at a time."""

    book: Book
    load: Callable[[], Sequence[Budget]]
    """Reads the file of budgets. Raises ConfigError where it has mistakes."""
    keeping: Keeping
    first: Sequence[Question] = ()
    """What is read before the first visit, so that the first visitor does not wait for it."""
    errors: Counter[str] = field(default_factory=Counter)
    """Questions that failed, by reason."""
    looked: bool = False
    """Whether the first look is over, however it went."""
    last_read_seconds: float | None = None
    """When all of a round was answered last."""
    _loaded: bool = False
    _newest: float | None = None
    _seen: object = None
    _warm: Cached[None] = field(init=False)

    def __post_init__(self) -> None:
        self._warm = Cached(name="reports", read=self._read_warm, value=None)

    @property
    def _jobs(self) -> "tuple[Cached[Any], ...]":
        book = self.book
        return (book.labels, book.month, book.budgets, book.recommendations, self._warm)

    @property
    def pause_seconds(self) -> float:
        """The shortest pause before something that could not be read is read again; 0 where there is none."""
        return min((job.pause_seconds for job in self._jobs if job.pause_seconds), default=0.0)

    def load_budgets(self) -> None:
        """Read the file of budgets; where it has mistakes and there are budgets already, these stay.

        Raises:
            ConfigError: It has mistakes, and there are none.
        """
        try:
            self.book.set_budgets(self.load())
            self._loaded = True
        except ConfigError as error:
            if not self._loaded:
                raise
            for problem in error.problems:
                LOG.warning("the budgets stay as they were: %s", problem)
            self.book.budgets.expire()

    async def round(self, now: float) -> bool:
        """One look; false where Prometheus did not answer."""
        down = ""
        try:
            self._newest = await self.book.sources.newest_hour(now)
        except PrometheusError as error:
            down = self.failed(error)
        self.book.down = down
        state = (self._newest, self.keeping.state)
        if not down and state != self._seen:
            self._seen = state
            self._warm.expire()
            self.book.expire()
        self._show(now)
        self.looked = True
        if down:
            return False
        for job in self._jobs:
            if job.is_due(now):
                try:
                    await job.refresh(now)
                except ExporterError as error:
                    self.failed(error)
        self._show(now)
        if not any(job.problem for job in self._jobs):
            self.last_read_seconds = now
        return True

    def _show(self, now: float) -> None:
        down = self.book.down
        late = "" if down else lateness(self._newest, now)
        problems = (down, late, self.keeping.problem, *(job.problem for job in self._jobs))
        self.book.show(
            Freshness(
                now_seconds=now,
                first_day_seconds=self.keeping.first_day_seconds,
                closed_until_seconds=self.keeping.closed_until_seconds,
                read_until_seconds=self._newest,
                problem="; ".join(dict.fromkeys(filter(None, problems))) or None,
            )
        )

    async def _read_warm(self, now: float) -> None:
        """Read again what people look at, so that they do not wait for it."""
        for question in self.book.readings.lately(now - WARM_SECONDS)[-MOST_WARM:] or self.first:
            await self.book.again(question, now)

    def failed(self, error: ExporterError) -> str:
        """Count and log a failure; its words."""
        reason = getattr(error, "reason", "other")
        self.errors[reason] += 1
        LOG.warning("refresh failed", extra={"reason": reason, "problem": str(error)})
        return str(error)


async def rounds(
    refreshing: Refreshing, clock: Callable[[], float], interval_seconds: float, wake: asyncio.Event
) -> None:
    """Look until cancelled; at once when woken, and soon again while Prometheus does not answer."""
    while True:
        wake.clear()
        try:
            good = await refreshing.round(clock())
        except Exception:
            # The pages stay as they are and show their age; a service that ended would show nothing.
            LOG.exception("a round has failed")
            refreshing.errors["internal"] += 1
            good = False
        wanted = (refreshing.pause_seconds or interval_seconds) if good else RETRY_SECONDS
        with suppress(TimeoutError):
            await asyncio.wait_for(wake.wait(), min(wanted, interval_seconds))


async def keep(keeping: Keeping, clock: Callable[[], float], failed: Callable[[ExporterError], str]) -> None:
    """Close days until cancelled; ``failed`` gets each error."""
    while True:
        pause = EVERY_SECONDS
        try:
            await keeping.round(clock())
        except ExporterError as error:
            keeping.problem = failed(error)
            pause = CLOSING_RETRY_SECONDS
        except Exception:
            # The service goes on with what it has; a day that was not closed is closed later.
            LOG.exception("closing days has failed")
            pause = CLOSING_RETRY_SECONDS
        await asyncio.sleep(pause)

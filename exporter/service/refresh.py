"""Keeps the book fresh: looks for newer hours, and then counts months and budgets and asks for recommendations anew."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from exporter.cost.budgets import BudgetState
from exporter.cost.holdings import Recommendation
from exporter.cost.ledger import DAY_SECONDS
from exporter.cost.query_rows import LedgerSource, Progress
from exporter.cost.store import DayStore
from exporter.cost.store_ledger import close_due_days, oldest_day
from exporter.cost.store_schema import ClosedDay
from exporter.errors import ConfigError, ExporterError, PrometheusError, StoreError
from exporter.service.data import LiveBook, lateness
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
    _oldest_seconds: float | None = None
    _oldest_at: float = 0.0

    @property
    def state(self) -> object:
        """Another one when a day was closed or reopened."""
        return tuple((day.window.start_seconds, day.version) for day in self.days)

    @property
    def first_day_seconds(self) -> float | None:
        """Start of the oldest day that the store or Prometheus has."""
        known = [float(self.days[0].window.start_seconds)] if self.days else []
        return min([*known, *([] if self._oldest_seconds is None else [self._oldest_seconds])], default=None)

    @property
    def closed_until_seconds(self) -> float | None:
        """End of the newest closed day."""
        return float(self.days[-1].window.end_seconds) if self.days else None

    def open(self, now: float) -> None:
        """Open the store to write; where another process does, its days are shown and that is told.

        Raises:
            StoreError: It can neither be read nor written.
        """
        if self.path is None or self._store is not None:
            return
        try:
            self._store = self._opened(self.path, now)
            self.problem = ""
        except StoreError as error:
            if error.reason != "in_use":
                raise
            self.problem = str(error)
        self.days = DayStore.open(self.path, write=False).closed_days()

    @staticmethod
    def _opened(path: Path, now: float) -> DayStore:
        try:
            return DayStore.open(path, write=True, now=now)
        except StoreError as error:
            if error.reason != "damaged":
                raise
            LOG.error("%s", error)  # noqa: TRY400 - the message is all there is to tell: what was damaged is set aside
            return DayStore.open(path, write=True, now=now)

    def close(self) -> None:
        """Let another process write."""
        if self._store is not None:
            self._store.close()
            self._store = None

    async def round(self, now: float) -> None:
        """Close what is due; the oldest day is looked for where it is not known.

        Raises:
            PrometheusError: It cannot be asked.
            StoreError: The store cannot be read or written.
        """
        if self._store is None:
            await asyncio.to_thread(self.open, now)
        midnight = int(now // DAY_SECONDS) * DAY_SECONDS
        if self._oldest_seconds is None or now - self._oldest_at >= DAY_SECONDS:
            self._oldest_seconds = await oldest_day(
                self.prometheus, midnight + DAY_SECONDS, from_day=midnight - self.history_days * DAY_SECONDS
            )
            self._oldest_at = now
        if self._store is None or self._oldest_seconds is None:
            self.changed()
            return
        from_day = None if self.days else int(self._oldest_seconds)
        closing = await close_due_days(
            self._store, self.prometheus, now, from_day=from_day, accept_gaps=True, by=BY, progress=_told
        )
        for left in closing.left:
            LOG.info("a day is not closed", extra={"day": _date(left.day_seconds), "reason": left.reason})
        stuck = [left for left in closing.left if not left.waits]
        self.not_closed = len(stuck)
        self.problem = stuck[0].reason if stuck else ""
        self.days = await asyncio.to_thread(self._store.closed_days)
        self.changed()


def _told(progress: Progress) -> None:
    LOG.info("closing days", extra={"done": progress.done, "due": progress.total})


def _date(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


async def keep(keeping: Keeping, clock: Callable[[], float], failed: Callable[[ExporterError], str]) -> None:
    """Close days until cancelled; ``failed`` is told what went wrong."""
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


RETRY_SECONDS = 15.0
"""Between two looks while Prometheus does not answer."""
WARM_SECONDS = 7200.0
"""Reports that were read within this are read again as soon as there is something newer."""
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 60.0, 3600.0
"""Before budgets that could not be counted are counted again: twice as long each time, as each costs many questions."""
MOST_WARM = 8
"""Of these the ones that were looked at last, no more: each costs Prometheus the questions of a report."""

Count = Callable[[float], Awaitable[Sequence[BudgetState]]]
"""Counts all budgets at a Unix time. Raises PrometheusError or StoreError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked in the rounds; each raises PrometheusError where Prometheus does not answer."""

    newest_hour: Callable[[float], Awaitable[float | None]]
    labels: Callable[[float], Awaitable[Mapping[str, tuple[str, ...]]]]
    recommendations: Callable[[float], Awaitable[Sequence[Recommendation]]]
    load_budgets: Callable[[], Count]
    """Reads the file of budgets. Raises ConfigError where it has mistakes."""


@dataclass(slots=True, kw_only=True)
class Refreshing:
    """The rounds, one at a time."""

    book: LiveBook
    questions: Questions
    keeping: Keeping
    first: Sequence[Question] = ()
    """What is read while nobody has looked at anything: the first visitor does not wait for it."""
    errors: Counter[str] = field(default_factory=Counter)
    """Questions that failed, by reason."""
    looked: bool = False
    """Whether the first look is over, however it went."""
    last_read_seconds: float | None = None
    """When all of a round was answered last."""
    pause_seconds: float = 0.0
    """Between the last count of budgets, which failed, and the next one; 0 where it did not fail."""
    _count: Count | None = None
    _newest: float | None = None
    _seen: object = None
    _due: set[str] = field(default_factory=set)
    _problems: dict[str, str] = field(default_factory=dict)
    """Of the parts that are due still, why."""
    _budgets_from: float = 0.0
    """They are not counted before."""

    def load_budgets(self) -> None:
        """Read the file of budgets; where it has mistakes and there are budgets already, these stay.

        Raises:
            ConfigError: It has mistakes, and there are none.
        """
        try:
            self._count = self.questions.load_budgets()
        except ConfigError as error:
            if self._count is None:
                raise
            for problem in error.problems:
                LOG.warning("the budgets stay as they were: %s", problem)
        self._due.add("budgets")
        self._rest(0.0, 0.0)

    async def round(self, now: float) -> bool:
        """One look; false where Prometheus did not answer."""
        down = ""
        try:
            self._newest = await self.questions.newest_hour(now)
        except PrometheusError as error:
            down = self.failed(error)
        state = (self._newest, self.keeping.state)
        if not down and state != self._seen:
            self._seen = state
            self._due |= {"labels", "budgets", "months", "advice", "reports"}
            self._rest(0.0, now)
            self.book.renew()
        self._tell(now, down)
        self.looked = True
        if not down:
            await self._count_what_is_due(now)
            self._tell(now, down)
            if not self._due:
                self.last_read_seconds = now
        return not down

    def _tell(self, now: float, down: str) -> None:
        late = "" if down else lateness(self._newest, now)
        self.book.learn(
            down=down,
            freshness=replace(
                self.book.freshness(),
                first_day_seconds=self.keeping.first_day_seconds,
                closed_until_seconds=self.keeping.closed_until_seconds,
                read_until_seconds=self._newest,
                problem="; ".join(one for one in (down, late, self.keeping.problem, *self._problems.values()) if one),
            ),
        )

    async def _count_what_is_due(self, now: float) -> None:
        parts: dict[str, Callable[[float], Awaitable[None]]] = {
            "labels": self._labels,
            "months": self._months,
            "budgets": self._budgets,
            "advice": self._advice,
            "reports": self._reports,
        }
        for name, part in parts.items():
            # A clock that was set back makes no pause longer.
            if name not in self._due or (name == "budgets" and 0 < self._budgets_from - now <= MOST_PAUSE_SECONDS):
                continue
            try:
                await part(now)
                self._due.discard(name)
                self._problems.pop(name, None)
            except ExporterError as error:
                self._problems[name] = self.failed(error)
                if name == "budgets":
                    self._rest(min(max(2 * self.pause_seconds, FIRST_PAUSE_SECONDS), MOST_PAUSE_SECONDS), now)

    def _rest(self, seconds: float, now: float) -> None:
        self.pause_seconds, self._budgets_from = seconds, now + seconds

    async def _labels(self, now: float) -> None:
        self.book.learn(labels=await self.questions.labels(now))

    async def _months(self, _now: float) -> None:
        await self.book.months()

    async def _budgets(self, now: float) -> None:
        if self._count is None:
            return
        states = await self._count(now)
        self.book.learn(budgets=states)
        # Of a budget of which nothing is known nobody is alerted: not to be so until there is a newer hour.
        if unread := [state for state in states if state.unread]:
            what = f"{len(unread)} of {len(states)} budgets could not be counted: {unread[0].unread}"
            raise PrometheusError("budgets_unread", what, retriable=True)
        self._rest(0.0, now)

    async def _advice(self, now: float) -> None:
        self.book.learn(recommendations=await self.questions.recommendations(now))

    async def _reports(self, now: float) -> None:
        """Read again what people look at, so that they do not wait for it."""
        for question in self.book.readings.lately(now - WARM_SECONDS)[-MOST_WARM:] or self.first:
            await self.book.again(question, now)

    def failed(self, error: ExporterError) -> str:
        """Count and log a failure; its words."""
        reason = getattr(error, "reason", "other")
        self.errors[reason] += 1
        LOG.warning("a look has failed", extra={"reason": reason, "problem": str(error)})
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
            # The pages stay as they are and tell their age; a service that ended would tell nothing.
            LOG.exception("a round has failed")
            refreshing.errors["internal"] += 1
            good = False
        wanted = (refreshing.pause_seconds or interval_seconds) if good else RETRY_SECONDS
        pause = min(wanted, interval_seconds)
        try:
            await asyncio.wait_for(wake.wait(), pause)
        except TimeoutError:
            continue

"""Caches reports and other values: concurrent requests share one reading; if a reading fails, the old value stays."""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from math import inf
from typing import Generic, NamedTuple, TypeVar

from exporter.cost.report import FleetReport, Question
from exporter.cost.window import Window
from exporter.errors import ExporterError, PrometheusError
from exporter.model.formatting import minute

LOG = logging.getLogger("exporter.service")

AT_ONCE = 3
"""Concurrent readings; each sends several queries to Prometheus in parallel."""
MOST_WAITING, MOST_OF_ONE = 30, 15
"""Maximum number of waiting readings, in total and per client; further requests raise an error."""
CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")
"""Address of the client of the request; empty for readings of the service itself, which have no limit."""
MOST_FIGURES = 300_000
"""Maximum of lines times periods in the cache: about 100 MiB."""
_FIGURES_OF_NONE = 300
"""Weight of a report without lines, for its question and its notes."""
_MOST_LOOKED = 100
OLDEST_SECONDS = 86_400.0
"""Maximum age of a report that replaces one that cannot be read."""
REST_SECONDS = 30.0
"""Seconds until a retry of a failed report, if an older one is available."""
PATIENCE_SECONDS = 20.0
"""Longest wait for a reading in seconds, if an older report is available."""


class Asked(NamedTuple):
    """Key of a cached report."""

    window: str
    """Window of the report: a label such as ``30d``, which moves with time, or its two ends."""
    question: Question


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    """A cached report, and the last failure to read it again."""

    report: FleetReport
    generation: int
    read_at_seconds: float
    failed_at_seconds: float = 0.0
    problem: str = ""
    """Reason of the last failed or incomplete reading; empty after a complete one."""

    @property
    def weight(self) -> int:
        lines = len(self.report.held) + len(self.report.apart)
        return _FIGURES_OF_NONE + lines * (1 + len(self.report.periods))


@dataclass(slots=True, eq=False)
class _Running:
    """A reading in progress."""

    task: "asyncio.Task[FleetReport]"
    waiting: int = 0
    """Number of requests that wait for the reading."""


class Readings:
    """Caches reports by question. For one event loop.

    Args:
        clock: Returns Unix seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[Asked, _Kept] = OrderedDict()
        self._running: dict[tuple[Asked, Window], _Running] = {}
        self._looked: dict[Asked, float] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._places: Counter[str] = Counter()
        """Readings that run or wait, by client."""
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._generation = 0
        self.begun = 0
        """Number of readings since the start."""

    def expire(self) -> None:
        """Mark every cached report as old, so that the next request reads it again."""
        self._generation += 1

    def look(self, asked: Asked) -> None:
        """Record a request, so that the service reads the question again in advance for a while."""
        self._looked.pop(asked, None)
        self._looked[asked] = self._clock()
        while len(self._looked) > _MOST_LOOKED:
            self._looked.pop(next(iter(self._looked)))

    def lately(self, since_seconds: float) -> tuple[Asked, ...]:
        """Return the cached questions that were requested since a Unix time, the newest last."""
        return tuple(asked for asked, at in self._looked.items() if at >= since_seconds and asked in self._kept)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a slot for a reading that is not cached.

        Raises:
            PrometheusError: Too many readings wait.
        """
        client = CLIENT.get()
        # One client leaves half of the places, and one slot, to other clients.
        if self._places.total() >= MOST_WAITING or (client and self._places[client] >= MOST_OF_ONE):
            raise PrometheusError("busy", "too many reports are being read now; ask again soon", retriable=True)
        self._places[client] += 1
        of_client = self._turns.setdefault(client, asyncio.Semaphore(AT_ONCE - 1 if client else AT_ONCE))
        try:
            async with of_client, self._turn:
                yield
        finally:
            self._places[client] -= 1
            if not self._places[client]:
                del self._places[client], self._turns[client]

    async def get(
        self, asked: Asked, window: Window, read: Callable[[], Awaitable[FleetReport]], trouble: str = ""
    ) -> FleetReport:
        """Return the report for a question.

        Args:
            asked: Key of the report.
            window: Current window of the question.
            read: Reads the report; only the first of several requests calls it.
            trouble: Known reason why Prometheus does not answer; an old report is then returned at once.

        Raises:
            PrometheusError: The report cannot be read and no old one exists, or too many readings wait.
            StoreError: The report cannot be read and no old one exists.
        """
        kept = self._kept.get(asked)
        if kept and kept.report.window == window and kept.generation == self._generation:
            self._kept.move_to_end(asked)
            if not kept.report.trust.failures or self._resting(kept):
                return kept.report
        old = kept if kept and self._clock() - kept.read_at_seconds < OLDEST_SECONDS else None
        trouble = trouble or self._resting(kept)
        if old is not None and trouble:
            return _aged(old, trouble)
        key = asked, window
        running = self._running.get(key)
        if running is None:
            running = self._running[key] = _Running(asyncio.ensure_future(self._read(asked, read)))
            running.task.add_done_callback(lambda _: self._over(key, running))
        running.waiting += 1
        try:
            await asyncio.wait([running.task], timeout=PATIENCE_SECONDS if old else None)
        except asyncio.CancelledError:
            if running.waiting == 1 and not running.task.done():
                # No request waits for this reading any more; the next request starts another one.
                self._running.pop(key, None)
                running.task.cancel()
            raise
        finally:
            running.waiting -= 1
        return _best(running.task, old)

    def _resting(self, kept: _Kept | None) -> str:
        """Return the reason why the question is not read again yet; empty if it may be read."""
        if kept is None or not 0 <= self._clock() - kept.failed_at_seconds < REST_SECONDS:
            return ""  # below 0 if the clock was set back
        return kept.problem

    async def _read(self, asked: Asked, read: Callable[[], Awaitable[FleetReport]]) -> FleetReport:
        async with self.turn():
            generation = self._generation
            self.begun += 1
            try:
                report = await read()
            except ExporterError as error:
                LOG.info("a report could not be read", extra={"window": asked.window, "reason": str(error)})
                self._fail(asked, str(error))
                raise
        before, failures = self._kept.get(asked), report.trust.failures
        good = before is not None and not before.report.trust.failures
        if before is None or not (failures and good) or self._clock() - before.read_at_seconds >= OLDEST_SECONDS:
            self._keep(asked, _Kept(report=report, generation=generation, read_at_seconds=self._clock()))
        if failures:
            self._fail(asked, failures[0].reason)
        return report

    def _fail(self, asked: Asked, why: str) -> None:
        """Record a failure for a cached report; a question without one is read again at the next request."""
        if kept := self._kept.get(asked):
            kept.failed_at_seconds, kept.problem = self._clock(), why

    def _keep(self, asked: Asked, kept: _Kept) -> None:
        self._kept[asked] = kept
        self._kept.move_to_end(asked)
        weight = sum(one.weight for one in self._kept.values())
        while weight > MOST_FIGURES and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            weight -= gone.weight

    def _over(self, key: tuple[Asked, Window], running: _Running) -> None:
        if self._running.get(key) is running:
            del self._running[key]
        error = None if running.task.cancelled() else running.task.exception()
        if error and not isinstance(error, ExporterError):
            LOG.error("a report could not be made", exc_info=error)

    async def stop(self) -> None:
        """Cancel all readings."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _best(reading: "asyncio.Task[FleetReport]", old: _Kept | None) -> FleetReport:
    """Return the new report, or the old one if the new one is late, failed or less complete."""
    if old is None:
        return reading.result()
    if not reading.done():
        return _aged(old, "a newer report is still being read")
    try:
        report = reading.result()
    except ExporterError as error:
        return _aged(old, str(error))
    if report.trust.failures and not old.report.trust.failures:
        return _aged(old, report.trust.failures[0].reason)
    return report


def _aged(old: _Kept, why: str) -> FleetReport:
    note = f"figures as read at {minute(old.read_at_seconds)} UTC; newer ones are not available: {why}"
    return replace(old.report, trust=replace(old.report.trust, notes=(note, *old.report.trust.notes)))


Value = TypeVar("Value")
MOST_PAUSE_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True, eq=False)
class Cached(Generic[Value]):
    """A value that is read again when due; the old value stays if reading fails. For one event loop."""

    read: Callable[[float], Awaitable[Value]]
    """Function that reads the value at a Unix time. Raises ExporterError."""
    value: Value
    every_seconds: float = inf
    """Seconds between successful readings."""
    retry_seconds: float = 0.0
    """Seconds after a failed reading; doubled after each further one, up to an hour. 0: due at the next request."""
    holds: Callable[[Value, float], bool] = field(default=lambda _value, _now: True)
    """Function that returns whether a value is still valid at a Unix time."""
    problem: str = ""
    """Reason why the last reading failed; empty after a success."""
    pause_seconds: float = 0.0
    """Seconds between the last reading, if it failed, and the next one; 0 after a success."""
    _due_at: float = 0.0
    _expired: bool = False
    """Whether ``expire`` was called during a reading."""
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def expire(self) -> None:
        """Make the value due; the old value stays until the next reading."""
        self._due_at, self.pause_seconds, self._expired = 0.0, 0.0, True

    def is_due(self, now: float) -> bool:
        """Return whether the value is due; a clock that was set back does not extend the pause."""
        return not self.holds(self.value, now) or not 0 < self._due_at - now <= (
            self.pause_seconds or self.every_seconds
        )

    async def refresh(self, now: float) -> None:
        """Read the value if it is due; one reading at a time.

        Raises:
            ExporterError: Reading failed.
        """
        async with self._reading:
            if not self.is_due(now):
                return
            self._expired = False
            try:
                self.value = await self.read(now)
            except ExporterError as error:
                self.problem = str(error)
                self.pause_seconds = min(max(2 * self.pause_seconds, self.retry_seconds), MOST_PAUSE_SECONDS)
                self._due_at = now + self.pause_seconds
                raise
            self.problem, self.pause_seconds = "", 0.0
            if not self._expired:
                self._due_at = now + self.every_seconds

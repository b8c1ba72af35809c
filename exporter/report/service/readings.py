"""Reports as they were last read: asked once however many ask, kept while they hold, and shown old rather than not."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from exporter.errors import ExporterError, PrometheusError
from exporter.report.fleet.report import FleetReport, ShareIdle
from exporter.report.fleet.values import Dimension, Filters, Window

LOG = logging.getLogger("exporter.service")

AT_ONCE = 3
"""Readings at the same time: one answers Prometheus' questions in parallel itself."""
MOST_WAITING = 30
"""Different questions that may wait for their turn; beyond them an answer is refused for now."""
MOST_FIGURES = 300_000
"""Lines times periods that are kept: some 100 MiB."""
_FIGURES_OF_NONE = 300
"""What a report weighs besides: one without a line has its question and its notes, too."""
_MOST_LOOKED = 100
OLDEST_SECONDS = 86_400.0
"""An old report is shown in the place of one that cannot be read now, unless it is older than this."""
REST_SECONDS = 30.0
"""A report that could not be read is not tried again for so long where an older one is at hand."""
PATIENCE_SECONDS = 20.0
"""How long a reading is waited for where an older report is at hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a report was asked for by. ``name`` stands for the window: a label such as ``30d``, or its two ends."""

    name: str
    by: tuple[Dimension, ...]
    filters: frozenset[tuple[Dimension, frozenset[str]]]
    share_idle: ShareIdle
    share_unallocated: bool
    with_series: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    report: FleetReport
    generation: int
    read_at_seconds: float

    @property
    def weight(self) -> int:
        lines = len(self.report.held) + len(self.report.apart)
        return _FIGURES_OF_NONE + lines * (1 + len(self.report.periods))


class Readings:
    """Keeps reports by question. For one event loop.

    Args:
        clock: Unix seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[Question, _Kept] = OrderedDict()
        self._running: dict[tuple[Question, Window], asyncio.Task[FleetReport]] = {}
        self._looked: dict[Question, float] = {}
        self._failed: dict[Question, tuple[float, str]] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._others = 0
        self._generation = 0
        self.begun = 0
        """Readings since the start."""

    def expire(self) -> None:
        """From now on every report is read anew; what is kept stays as the old one."""
        self._generation += 1

    def look(self, question: Question) -> None:
        """Somebody asks: it is one of those that are read again by themselves for a while."""
        self._looked.pop(question, None)
        self._looked[question] = self._clock()
        while len(self._looked) > _MOST_LOOKED:
            self._looked.pop(next(iter(self._looked)))

    def lately(self, since_seconds: float) -> tuple[Question, ...]:
        """Questions of which there is a report and that somebody asked since then, the newest last."""
        return tuple(
            question for question, at in self._looked.items() if at >= since_seconds and question in self._kept
        )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A turn for a reading that is not kept.

        Raises:
            PrometheusError: Too many wait already.
        """
        if len(self._running) + self._others >= MOST_WAITING:
            raise _busy()
        self._others += 1
        try:
            async with self._turn:
                yield
        finally:
            self._others -= 1

    async def get(
        self, question: Question, window: Window, read: Callable[[], Awaitable[FleetReport]], trouble: str = ""
    ) -> FleetReport:
        """The report for a question.

        Args:
            question: What is asked for.
            window: Its window now: that of ``30d`` moves from hour to hour.
            read: Reads it; called by the first who asks.
            trouble: Why Prometheus is known not to answer now: then an old report is not waited for.

        Raises:
            PrometheusError: It cannot be read and no older one is there, or too many questions wait already.
            StoreError: As above.
        """
        kept = self._kept.get(question)
        if kept and kept.report.window == window and kept.generation == self._generation:
            self._kept.move_to_end(question)
            if not kept.report.trust.failures or self._resting(question):
                return kept.report
        old = kept if kept and self._clock() - kept.read_at_seconds < OLDEST_SECONDS else None
        trouble = trouble or self._resting(question)
        if old is not None and trouble:
            return _aged(old, trouble)
        task = self._running.get((question, window))
        if task is None:
            if len(self._running) + self._others >= MOST_WAITING:
                if old is not None:
                    return _aged(old, "too many reports are being read now")
                raise _busy()
            task = asyncio.ensure_future(self._read(question, read))
            self._running[question, window] = task
            task.add_done_callback(lambda done: self._over(question, window, done))
        return await self._wait(task, old)

    def _resting(self, question: Question) -> str:
        """Why the question is not asked again yet; empty where it may be."""
        at, why = self._failed.get(question, (0.0, ""))
        return why if 0 <= self._clock() - at < REST_SECONDS else ""  # less than 0: the clock was set back

    async def _wait(self, task: "asyncio.Task[FleetReport]", old: _Kept | None) -> FleetReport:
        if old is None:
            return await asyncio.shield(task)
        try:
            report = await asyncio.wait_for(asyncio.shield(task), PATIENCE_SECONDS)
        except TimeoutError:
            return _aged(old, "a newer report is still being read")
        except ExporterError as error:
            return _aged(old, str(error))
        if report.trust.failures and not old.report.trust.failures:
            return _aged(old, report.trust.failures[0].reason)
        return report

    async def _read(self, question: Question, read: Callable[[], Awaitable[FleetReport]]) -> FleetReport:
        async with self._turn:
            generation = self._generation
            self.begun += 1
            try:
                report = await read()
            except ExporterError as error:
                self._fail(question, str(error))
                raise
        before, failures = self._kept.get(question), report.trust.failures
        good = before is not None and not before.report.trust.failures
        if before is None or not (failures and good) or self._clock() - before.read_at_seconds >= OLDEST_SECONDS:
            self._keep(question, _Kept(report=report, generation=generation, read_at_seconds=self._clock()))
        if failures:
            self._fail(question, failures[0].reason)
        else:
            self._failed.pop(question, None)
        return report

    def _fail(self, question: Question, why: str) -> None:
        """Remember it where it matters: a question without an older report is asked again at once."""
        if question in self._kept:
            self._failed[question] = (self._clock(), why)

    def _keep(self, question: Question, kept: _Kept) -> None:
        self._kept[question] = kept
        self._kept.move_to_end(question)
        weight = sum(one.weight for one in self._kept.values())
        while weight > MOST_FIGURES and len(self._kept) > 1:
            last, gone = self._kept.popitem(last=False)
            self._failed.pop(last, None)
            weight -= gone.weight

    def _over(self, question: Question, window: Window, task: "asyncio.Task[FleetReport]") -> None:
        self._running.pop((question, window), None)
        if not task.cancelled() and (error := task.exception()):
            LOG.info("a report could not be read", extra={"window": window.label, "reason": str(error)})

    async def stop(self) -> None:
        """End what is being read."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def question_of(
    window: Window,
    by: tuple[Dimension, ...],
    filters: Filters,
    *,
    share_idle: ShareIdle,
    share_unallocated: bool,
    with_series: bool,
) -> Question:
    """The question; two that are the same but for the hour at which they are asked are one."""
    return Question(
        name=window.label or f"{window.start_seconds},{window.end_seconds}",
        by=by,
        filters=frozenset(filters.wanted.items()),
        share_idle=share_idle,
        share_unallocated=share_unallocated,
        with_series=with_series,
    )


def _busy() -> PrometheusError:
    return PrometheusError("busy", "too many reports are being read now; ask again soon", retriable=True)


def _aged(old: _Kept, why: str) -> FleetReport:
    at = datetime.fromtimestamp(old.read_at_seconds, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
    note = f"figures as read at {at}; newer ones cannot be had now: {why}"
    return replace(old.report, trust=replace(old.report.trust, notes=(note, *old.report.trust.notes)))

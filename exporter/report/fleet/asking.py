"""Puts the questions of a reading: days together where that can be answered, one by one where not."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from exporter.errors import PrometheusError
from exporter.report.fleet import prometheus_errors
from exporter.report.fleet.prometheus import Answer, PrometheusClient
from exporter.report.fleet.queries import asked_at, span
from exporter.report.fleet.sources import Progress
from exporter.report.fleet.values import DAY_SECONDS, Failure, Window

BLOCK_DAYS = 15
"""Days in one question. A month of 8,000 GPUs by workload and day cost Prometheus 2.42 a third more at 7 than at 15."""
_LOST_HOPE_AFTER, _OF_SERIES = 4, 3
"""Failures without an answer in between, and of how many series: one or two may be all that is wrong."""
_IN_THREAD_ROWS = 5000
"""With more rows the loop would stand still for too long."""
_DIVISIBLE = frozenset({"timeout", "too_many_samples", "too_large", "server_error", "broken", "garbage", "partial"})
_TOO_MUCH = frozenset({"timeout", "too_many_samples", "too_large"})
"""A shorter question may be answered, and a longer one of the others will not."""

Block = tuple[int, ...]
"""Chunks, by number, that one question is for: whole days in a row, or a part of a day alone."""
Rows = Iterable[Mapping[str, Any]]
Take = Callable[[Rows], None]


def blocks(windows: Sequence[Window]) -> tuple[Block, ...]:
    """Which chunks are asked for together."""
    found: list[Block] = []
    days: list[int] = []
    for number, window in enumerate(windows):
        whole = window.seconds == DAY_SECONDS
        if days and (not whole or len(days) == BLOCK_DAYS):
            found.append(tuple(days))
            days = []
        if whole:
            days.append(number)
        else:
            found.append((number,))
    if days:
        found.append(tuple(days))
    return tuple(found)


class Asking:
    """The questions of one reading, and what became of them.

    Args:
        client: Where.
        windows: The chunks.
        progress: Is told of every question that is done with.
        total: How many questions there will be.
    """

    def __init__(
        self,
        client: PrometheusClient,
        windows: Sequence[Window],
        progress: Callable[[Progress], None] | None,
        total: int,
    ) -> None:
        self.windows = windows
        self.notes: dict[str, None] = {}
        self._client = client
        self._progress = progress
        self._done, self._total = 0, total
        # Here and not only in the client: who waits for a turn hears of what the others met.
        self._slots = asyncio.Semaphore(client.settings.concurrency)
        self._taking = asyncio.Lock()  # what takes rows may do so in a thread, and is not made for two
        self._is_slow = False
        self._in_a_row: list[str] = []
        self._hopeless: PrometheusError | None = None
        self._failures: list[Failure] = []
        self.last_error: PrometheusError | None = None

    async def ask(self, block: Block, what: str, query: Callable[[str], str], take: Take) -> bool:
        """Put a question over a block; where it cannot be answered in one, chunk by chunk.

        Args:
            block: Over which chunks.
            what: The series, for messages.
            query: PromQL by its span.
            take: Takes the rows; raises KeyError, TypeError, ValueError or AttributeError where they are none.

        Returns:
            Whether all of it was answered; what was not is in ``failures``.
        """
        async with self._slots:
            answered = await self._divided(block, what, query, take)
        self._step()
        return answered

    async def ask_more(self, block: Block, what: str, query: Callable[[str], str], take: Take) -> bool:
        """As ``ask``, for what was not counted on."""
        self._total += 1
        return await self.ask(block, what, query, take)

    async def ask_moments(self, block: Block, what: str, query: str, moments: tuple[int, int, int], take: Take) -> None:
        """Ask a range query that stands for all of the block.

        Args:
            block: Over which chunks.
            what: The series, for messages.
            query: PromQL.
            moments: Start, end and step in seconds.
            take: As for ``ask``; rows have ``values``.
        """
        async with self._slots:
            try:
                await self._taken(self._client.ask_range(query, *moments), take)
            except PrometheusError as error:
                self._fail(block, what, error)
        self._step()

    def _step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(Progress(done=self._done, total=self._total))

    async def _divided(self, block: Block, what: str, query: Callable[[str], str], take: Take) -> bool:
        try:
            if len(block) == 1 or not self._is_slow:
                await self._once(block, query, take)
                return True
        except PrometheusError as error:
            if len(block) == 1 or error.reason not in _DIVISIBLE or self._hopeless is not None:
                self._fail(block, what, error)
                return False
            self._is_slow |= error.reason in _TOO_MUCH
        # One after the other: the server has just been asked too much.
        return all([await self._divided((chunk,), what, query, take) for chunk in block])

    async def _once(self, block: Block, query: Callable[[str], str], take: Take) -> None:
        first, last = self.windows[block[0]], self.windows[block[-1]]
        if len(block) == 1:
            question = self._client.ask_instant(query(span(last)), asked_at(last))
        else:
            question = self._client.ask_range(
                query(span(first)),
                asked_at(first),
                asked_at(last),
                DAY_SECONDS,
                retry_timeouts=False,
            )
        await self._taken(question, take)

    async def _taken(self, question: Coroutine[Any, Any, Answer], take: Take) -> None:
        if self._hopeless is not None:
            question.close()
            raise self._hopeless
        answer = await question
        self.notes.update(dict.fromkeys(f"{self._client.settings.url} warns: {note}" for note in answer.notes))
        async with self._taking:
            with prometheus_errors.rows_read(self._client.settings):
                if len(answer.data) > _IN_THREAD_ROWS:
                    await asyncio.to_thread(take, answer.data)
                else:
                    take(answer.data)
        self._in_a_row.clear()

    def _fail(self, block: Block, what: str, error: PrometheusError) -> None:
        self.last_error = error
        self._in_a_row.append(what)
        if len(self._in_a_row) >= _LOST_HOPE_AFTER and len(set(self._in_a_row)) >= _OF_SERIES and error.retriable:
            # It is down rather than flaky: waiting out all retries of all other questions would tell no more.
            self._hopeless = error
        self._failures += [
            Failure(
                window=self.windows[chunk], what=what, reason=str(error), may_pass=prometheus_errors.may_pass(error)
            )
            for chunk in block
        ]

    def failures(self) -> tuple[Failure, ...]:
        """What stayed unanswered; days in a row that failed alike are one."""
        merged: list[Failure] = []
        for failure in sorted(self._failures, key=lambda one: (one.what, one.reason, one.window.start_seconds)):
            last = merged[-1] if merged else None
            same = last is not None and (last.what, last.reason) == (failure.what, failure.reason)
            if last is not None and same and last.window.end_seconds == failure.window.start_seconds:
                window = Window(start_seconds=last.window.start_seconds, end_seconds=failure.window.end_seconds)
                merged[-1] = replace(failure, window=window)
            else:
                merged.append(failure)
        return tuple(merged)

    def failed_chunks(self, *series: str) -> set[int]:
        """Chunks for which one of the series is missing."""
        missing = {failure.window for failure in self._failures if failure.what in series}
        return {number for number, window in enumerate(self.windows) if window in missing}

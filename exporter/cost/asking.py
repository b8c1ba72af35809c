"""Sends queries over chunks to Prometheus, divides queries over a limit, and stops if the server is down."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

from exporter.cost import prometheus_access
from exporter.cost.ledger import MOST_FIGURE, Failure, Progress
from exporter.cost.prometheus import PrometheusAnswer, PrometheusClient
from exporter.cost.queries import Part, asked_at
from exporter.cost.recorders import Recorder
from exporter.cost.window import DAY_SECONDS, Window
from exporter.errors import PrometheusError
from exporter.model.attribution import NodeFacts

BLOCK_DAYS = 15
"""Days in one query. A month of 8,000 GPUs by workload and day cost Prometheus 2.42 a third more at 7 than at 15."""
_LOST_HOPE_AFTER, _OF_SERIES = 4, 3
"""Consecutive failures, and distinct series among them, after which the server counts as down."""
_IN_THREAD_ROWS = 5000
"""Number of rows above which a thread takes them, because the event loop would block for too long."""
_DIVISIBLE = frozenset({"timeout", "too_many_samples", "too_large", "server_error", "broken", "garbage", "partial"})
_TOO_MUCH = frozenset({"timeout", "too_many_samples", "too_large"})
"""Reasons that exclude long queries for the rest of the reading; a shorter query may succeed."""

Key: TypeAlias = tuple[str, ...]
"""Values of the kept labels, in the order of the labels."""
Column: TypeAlias = tuple[str, str, str]
"""Quantity, state and currency."""
Cell: TypeAlias = dict[Column, float]
"""Figures of one key in one chunk."""
Node: TypeAlias = tuple[str, str]
"""Cluster and node."""
Metric: TypeAlias = Mapping[str, str]
Take: TypeAlias = Callable[[Metric, Sequence[tuple[int, float]]], None]
"""Receives a series and its values by Unix time."""


@dataclass(slots=True, eq=False)
class Draft:
    """A chunk that is being filled from answers."""

    window: Window
    parts: Sequence[Part] = field(init=False)
    """Hours to query, by recorder."""
    hours: dict[str, int] = field(default_factory=dict)
    """Recorded hours by cluster; an hour counts if at least one recorder has it."""
    recorders: dict[str, set[Recorder]] = field(default_factory=dict)
    """Recorders by cluster."""
    capacity: dict[str, float] = field(default_factory=dict)
    """GPU-seconds by cluster."""
    cells: dict[Key, Cell] = field(default_factory=dict)
    nodes: dict[Node, NodeFacts] = field(default_factory=dict)
    """Facts of nodes, last seen within the chunk."""
    unanswered: set[str] = field(default_factory=set)
    """Series with a failed query."""

    def __post_init__(self) -> None:
        self.parts = (Part(self.window.seconds),)


Block: TypeAlias = tuple[Draft, ...]
"""Chunks that one query covers."""


def blocks(windows: Iterable[Window]) -> list[tuple[Window, ...]]:
    """Return groups of chunks to query together: consecutive whole days, or a single part of a day."""
    found: list[tuple[Window, ...]] = []
    for is_whole, several in groupby(windows, key=lambda window: window.seconds == DAY_SECONDS):
        some, size = tuple(several), BLOCK_DAYS if is_whole else 1
        found += [some[at : at + size] for at in range(0, len(some), size)]
    return found


class Asking:
    """Runs the queries of one reading, and collects failures and notes.

    Args:
        client: Client of the queried server.
        progress: Called after each query.
        total: Expected number of queries.
    """

    def __init__(self, client: PrometheusClient, progress: Progress, total: int) -> None:
        self.total = total
        self.notes: dict[str, None] = {}
        self.last_error: PrometheusError | None = None
        self._client = client
        self._progress = progress
        self._done = 0
        # In addition to the limit of the client: a query that waits here sees the results of earlier queries.
        self._slots = asyncio.Semaphore(client.settings.concurrency)
        self._taking = asyncio.Lock()  # one query at a time takes rows, possibly in a thread
        self._is_slow = False
        self._in_a_row: list[str] = []
        self._hopeless: PrometheusError | None = None
        self._failures: list[Failure] = []

    async def ask(
        self,
        block: Block,
        what: str,
        query: Callable[[Draft], str],
        take: Callable[[Metric, Sequence[tuple[Draft, float]]], None],
    ) -> bool:
        """Run a query over a block; chunk by chunk if the query differs between chunks or fails for the whole block.

        Args:
            block: Chunks to query.
            what: Name of the series, for messages.
            query: Returns the PromQL of a chunk.
            take: Receives a series and its value in each chunk.

        Returns:
            Whether all chunks were answered; ``failures`` lists the others.
        """
        at = {asked_at(draft.window): draft for draft in block}

        def take_points(metric: Metric, points: Sequence[tuple[int, float]]) -> None:
            take(metric, [(at[moment], value) for moment, value in points])

        async with self._slots:
            runs = [tuple(run) for _, run in groupby(block, key=query)]
            answered = all([await self._divided(run, what, query(run[0]), take_points) for run in runs])
        self._step()
        return answered

    async def ask_moments(self, block: Block, what: str, query: str, moments: tuple[int, int, int], take: Take) -> None:
        """Run one range query for the whole block.

        Args:
            block: Chunks to query.
            what: Name of the series, for messages.
            query: PromQL.
            moments: Start, end and step in seconds.
            take: Receives a series and its values by Unix time.
        """
        async with self._slots:
            try:
                await self._taken(self._client.ask_range(query, *moments), what, take)
            except PrometheusError as error:
                self._fail(block, what, error)
        self._step()

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, self.total)

    async def _divided(self, block: Block, what: str, query: str, take: Take) -> bool:
        first, last = asked_at(block[0].window), asked_at(block[-1].window)
        try:
            if len(block) == 1:
                await self._taken(self._client.ask_instant(query, last), what, take)
                return True
            if not self._is_slow:
                days = self._client.ask_range(query, first, last, DAY_SECONDS, retry_timeouts=False)
                await self._taken(days, what, take)
                return True
        except PrometheusError as error:
            if len(block) == 1 or error.reason not in _DIVISIBLE or self._hopeless is not None:
                self._fail(block, what, error)
                return False
            self._is_slow |= error.reason in _TOO_MUCH
        # Sequentially, because the server has just failed on a larger query.
        return all([await self._divided((draft,), what, query, take) for draft in block])

    async def _taken(self, question: Coroutine[Any, Any, PrometheusAnswer], what: str, take: Take) -> None:
        if self._hopeless is not None:
            question.close()
            raise self._hopeless
        answer = await question
        self.notes.update(dict.fromkeys(f"{self._client.settings.url} warns: {note}" for note in answer.notes))
        async with self._taking:
            with prometheus_access.rows_read(self._client.settings):
                if len(answer.data) > _IN_THREAD_ROWS:
                    await asyncio.to_thread(self._take_rows, answer.data, what, take)
                else:
                    self._take_rows(answer.data, what, take)
        self._in_a_row.clear()

    def _take_rows(self, rows: Iterable[Mapping[str, Any]], what: str, take: Take) -> None:
        """Take the rows of an answer; malformed rows raise the errors that ``rows_read`` converts."""
        for row in rows:
            metric = row["metric"]
            "".join(metric.values())  # raises for a label that is not text, which would otherwise fail in sorting
            points = []
            for moment, text in row["values"] if "values" in row else (row["value"],):
                value = float(text)
                if 0 <= value <= MOST_FIGURE:
                    points.append((int(moment), value))
                elif value > MOST_FIGURE:
                    beyond = f"values beyond {MOST_FIGURE:g} are left out, as no fleet has them"
                    self.notes[f"{what}: {beyond}; see which target sends them"] = None
            take(metric, points)

    def _fail(self, block: Block, what: str, error: PrometheusError) -> None:
        self.last_error = error
        self._in_a_row.append(what)
        if len(self._in_a_row) >= _LOST_HOPE_AFTER and len(set(self._in_a_row)) >= _OF_SERIES and error.retriable:
            # The server is down rather than flaky; retries of the remaining queries would only take time.
            self._hopeless = error
        reason, may_pass = str(error), prometheus_access.may_pass(error)
        for draft in block:
            draft.unanswered.add(what)
            self._failures.append(Failure(window=draft.window, what=what, reason=reason, may_pass=may_pass))

    def failures(self) -> tuple[Failure, ...]:
        """Return the failures; those of one series and reason over consecutive days are merged."""
        merged: list[Failure] = []
        for failure in sorted(set(self._failures), key=lambda one: (one.what, one.reason, one.window.start_seconds)):
            last = merged[-1] if merged else failure
            same = (last.what, last.reason) == (failure.what, failure.reason)
            if same and last.window.end_seconds == failure.window.start_seconds:
                window = Window(start_seconds=last.window.start_seconds, end_seconds=failure.window.end_seconds)
                merged[-1] = replace(failure, window=window)
            else:
                merged.append(failure)
        return tuple(merged)

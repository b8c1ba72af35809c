"""Listens to a source's child for a moment, with a deadline: a call into a driver or an engine can hang for ever."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exporter.model import Reading, SourceState, SourceStatus
from exporter.sources.worker import Worker

_LOOK_SECONDS = 0.05
_BAD_STATES = frozenset({SourceState.FAILED, SourceState.HUNG, SourceState.DIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a child has said."""

    last: Reading | None
    """``None``: no reading within the deadline."""
    first_after_seconds: float
    status: SourceStatus
    errors: Mapping[str, int]
    """Of all its readings, by reason."""

    def trouble(self, deadline_seconds: float) -> str:
        """Why there is no reading, in one line."""
        status = self.status
        return status.message or status.reason.replace("_", " ") or f"no answer within {deadline_seconds:g} s"


async def listen(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    interval_seconds: float,
    deadline_seconds: float,
    enough: int,
    clock: Callable[[], float],
) -> Heard:
    """Start a source's child, and end it after so many readings, at its first trouble or at the deadline.

    Args:
        name: Of the source.
        command: Of the child.
        env: Beside this process's own.
        interval_seconds: Between the child's readings.
        deadline_seconds: For all of them together.
        enough: How many readings are wanted.
        clock: Of a clock that nobody sets.
    """
    worker = Worker(
        name=name,
        command=command,
        interval_seconds=interval_seconds,
        # Longer than this check's own: one of the two must decide, and restarting is not wanted here.
        deadline_seconds=2 * deadline_seconds,
        start_deadline_seconds=2 * deadline_seconds,
        env=env,
        clock=clock,
    )
    task = asyncio.ensure_future(worker.run())
    try:
        readings, first_after = await _readings(worker, task, deadline_seconds=deadline_seconds, enough=enough)
        status = worker.status
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    errors: Counter[str] = Counter()
    for reading in readings:
        errors.update(reading.errors)
    return Heard(last=readings[-1] if readings else None, first_after_seconds=first_after, status=status, errors=errors)


async def _readings(
    worker: Worker, task: asyncio.Future[None], *, deadline_seconds: float, enough: int
) -> tuple[list[Reading], float]:
    """Readings until there are enough, something is wrong or time is up; and after how long the first one came."""
    readings: list[Reading] = []
    now = asyncio.get_running_loop().time
    start, first_after = now(), 0.0
    while now() - start < deadline_seconds and len(readings) < enough and not task.done():
        await asyncio.sleep(_LOOK_SECONDS)
        taken = worker.take()
        if taken and not readings:
            first_after = now() - start
        readings += taken
        if worker.status.state in _BAD_STATES:
            break
    return readings, first_after

"""Reads ledgers from the store, combines them with Prometheus, and closes days that are due."""

import asyncio
from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from exporter.cost import prometheus_access
from exporter.cost.dimensions import EVERYTHING, Dimension, Filters
from exporter.cost.fleet_reading import missing_hours
from exporter.cost.ledger import Failure, FleetLedger, LedgerSource, Progress, joined, unseen
from exporter.cost.store import ALL_OF_A_DAY, GRACE_HOURS, DayStore, day_window, is_day
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Window, chunks
from exporter.errors import PrometheusError, StoreError

_DAYS_AT_ONCE = 31
"""Limit of days per reading, so that progress is shown, and the lines of a long window are in memory only once."""


class StoreLedger:
    """Reads closed days from the store and other days from another source; a closed day does not change.

    Args:
        store: Store of the closed days; each query runs in a thread.
        rest: Source of the other days; without it, these days are failures.
    """

    def __init__(self, store: DayStore, rest: LedgerSource | None = None) -> None:
        self._store = store
        self._rest = rest

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters = EVERYTHING,
        progress: Progress = unseen,
    ) -> FleetLedger:
        """Return the ledger of the window.

        Raises:
            PrometheusError: The store has no day of the window, and Prometheus cannot be queried.
            StoreError: The store cannot be read.
        """
        closed = {day.window.start_seconds for day in await asyncio.to_thread(self._store.closed_days)}
        runs = _runs(window, closed)
        parts: list[FleetLedger] = []
        problem: PrometheusError | None = None
        for run, is_closed in runs:
            report = _of_part(progress, run, window)
            if is_closed or self._rest is None:
                part = await asyncio.to_thread(self._store.read, run, dimensions, filters)
                report(1, 1)
            elif problem is None:
                try:
                    part = await self._rest.ledger(run, dimensions, filters, report)
                except PrometheusError as error:
                    if not any(is_closed for _, is_closed in runs):
                        raise
                    problem = error
                    part = _unread(run, dimensions, problem)
            else:
                part = _unread(run, dimensions, problem)
            parts.append(part)
        whole = joined(window, dimensions, parts)
        stored = [chunk for chunk in whole.chunks if chunk.closed]
        gaps = missing_hours([chunk.window for chunk in stored], [chunk.recorded_hours for chunk in stored])
        return replace(whole, notes=tuple(dict.fromkeys((*gaps, *whole.notes))))


def _runs(window: Window, closed: Collection[int]) -> list[tuple[Window, bool]]:
    """Return the window in few pieces, each of closed days or of other days, and whether the piece is closed."""

    def kind(numbered: tuple[int, Window]) -> tuple[bool, int]:
        number, piece = numbered
        is_closed = is_day(piece) and piece.start_seconds in closed
        return is_closed, number // _DAYS_AT_ONCE if is_closed else 0

    found = []
    for (is_closed, _), run in groupby(enumerate(chunks(window)), key=kind):
        pieces = [piece for _, piece in run]
        found.append((replace(pieces[0], end_seconds=pieces[-1].end_seconds), is_closed))
    return found


def _of_part(progress: Progress, run: Window, window: Window) -> Progress:
    """Return a callback that converts the progress of a part to progress of the whole, by hours."""
    before = (run.start_seconds - window.start_seconds) // HOUR_SECONDS
    return lambda done, total: progress(before + (run.hours * done // total if total else 0), window.hours)


def _unread(run: Window, dimensions: frozenset[Dimension], problem: PrometheusError) -> FleetLedger:
    failures = tuple(
        Failure(window=piece, what="ledger", reason=str(problem), may_pass=prometheus_access.may_pass(problem))
        for piece in chunks(run)
    )
    return FleetLedger(window=run, dimensions=dimensions, chunks=(), failures=failures)


LAG_HOURS = 2
"""Hours from midnight to the closing of a day, in which the last hour is recorded and reaches remote storage."""
MOST_DAYS = 5 * 366
"""Maximum age of the oldest day."""
_LOOK_DAYS = 30
"""Days per query in the search for the oldest day."""
_OF_THE_DAY = frozenset({"not_whole", "gaps", "less"})
"""Reasons of errors that concern one day and not the store."""


class NotClosed(NamedTuple):
    """A day that has ended and was not closed."""

    day_seconds: int
    reason: str
    """Reason in one sentence, with the fix."""
    waits: bool = False
    """Whether missing hours may still arrive, or a user may accept the gaps."""


class Closing(NamedTuple):
    """The result for the days that were due."""

    closed: tuple[int, ...]
    """Starts of the days that were closed, as Unix times."""
    left: tuple[NotClosed, ...]


async def close_due_days(
    store: DayStore,
    source: LedgerSource,
    now: float,
    *,
    from_day: int | None = None,
    accept_gaps: bool = False,
    by: str = "",
    progress: Progress = unseen,
) -> Closing:
    """Close every day that has ended and is not closed, or is reopened, oldest first.

    Args:
        store: Store, within ``writing``.
        source: Source of the days: Prometheus, not the store.
        now: Unix time.
        from_day: Start of the first day. By default the day after the oldest closed day; in an empty store, the oldest
            day of the source.
        accept_gaps: Whether to close days with missing hours once ``GRACE_HOURS`` have passed.
        by: User or service that closes them.
        progress: Called after each day.

    Raises:
        StoreError: The store cannot be read or written, or the clock is wrong. Days that are already closed stay
            closed.
        PrometheusError: The oldest day is not known, and no query can be answered.
    """
    due = await due_days(store, source, now, from_day=from_day)
    closed: list[int] = []
    left: list[NotClosed] = []
    for number, day in enumerate(due, start=1):
        waited = now >= day + DAY_SECONDS + GRACE_HOURS * HOUR_SECONDS
        try:
            ledger = await source.ledger(day_window(day), ALL_OF_A_DAY)
            await asyncio.to_thread(store.close_day, ledger, now=now, by=by, accept_gaps=accept_gaps and waited)
            closed.append(day)
        except PrometheusError as error:
            left.append(NotClosed(day, str(error)))
        except StoreError as error:
            if error.reason not in _OF_THE_DAY:
                raise
            left.append(NotClosed(day, str(error), waits=error.reason == "gaps"))
        progress(number, len(due))
    return Closing(tuple(closed), tuple(left))


async def due_days(
    store: DayStore, source: LedgerSource, now: float, *, from_day: int | None = None
) -> tuple[int, ...]:
    """Return the starts of the days that ``close_due_days`` would close, oldest first.

    Raises:
        StoreError: The store cannot be read, or it has a day that has not ended yet: the clock is wrong.
        PrometheusError: As for ``close_due_days``.
    """
    known = await asyncio.to_thread(store.closed_days)
    if known and known[-1].window.end_seconds > now:
        raise StoreError(
            "clock", f"store: {known[-1].window.label} is closed, and by this clock not over: set the clock"
        )
    end = int(now - LAG_HOURS * HOUR_SECONDS) // DAY_SECONDS * DAY_SECONDS
    start = known[0].window.start_seconds if known and from_day is None else from_day
    if start is None:
        start = await oldest_day(source, end)
    if start is None:
        return ()
    done = {day.window.start_seconds for day in known if not day.reopened}
    again = {day.window.start_seconds for day in known if day.reopened}
    fresh = set(range(start - start % DAY_SECONDS, end, DAY_SECONDS))
    return tuple(sorted((fresh | again) - done))


async def oldest_day(source: LedgerSource, end_seconds: int, *, from_day: int = 0) -> int | None:
    """Return the start of the oldest day with a recorded hour in the source; ``None`` without such a day.

    The search goes back to ``from_day``; by default, it ends at 30 consecutive days without records.

    Raises:
        PrometheusError: A query failed; unread days must not count as days without records.
    """
    oldest: int | None = None
    first = max(from_day, end_seconds - MOST_DAYS * DAY_SECONDS)
    while end_seconds > first:
        start = max(first, end_seconds - _LOOK_DAYS * DAY_SECONDS)
        found = await source.ledger(Window(start_seconds=start, end_seconds=end_seconds), frozenset())
        days = [chunk.window.start_seconds for chunk in found.chunks if any(chunk.recorded_hours.values())]
        unseen = [one for one in found.failures if not days or one.window.start_seconds < min(days)]
        if unseen:
            raise PrometheusError("partial", unseen[0].reason, retriable=True)
        if not days and not from_day:
            break
        oldest, end_seconds = min(days, default=oldest), start
    return None if oldest is None else oldest // DAY_SECONDS * DAY_SECONDS

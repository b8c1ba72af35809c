"""Closing days that are over: in order, each read whole, and no day held up by another's failure."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from exporter.errors import PrometheusError, StoreError
from exporter.report.fleet.sources import LedgerSource, Progress
from exporter.report.fleet.values import DAY_SECONDS, HOUR_SECONDS, Window
from exporter.report.store.days import DayStore
from exporter.report.store.values import ALL_OF_A_DAY, day_name, day_window

LAG_HOURS = 2
"""After midnight, before a day is closed: the last hour is recorded by then, and remote storage has it."""
GRACE_HOURS = 48
"""How long hours that are missing may still come: a Prometheus that catches up, a rule that is backfilled."""
MOST_DAYS = 5 * 366
"""How far back the oldest day is looked for."""
_LOOK_DAYS = 30
"""Asked at once while looking for the oldest day."""
_OF_THE_DAY = frozenset({"not_whole", "gaps", "less", "nonsense"})
"""Reasons that say something of one day, and not of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotClosed:
    """A day that is over and was not closed."""

    day_seconds: int
    reason: str
    """One sentence, with the mend."""
    waits: bool = False
    """Its hours may still come, or somebody accepts that they will not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What became of the days that were due."""

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
    progress: Callable[[Progress], None] | None = None,
) -> Closing:
    """Close every day that is over and not closed, or reopened, oldest first.

    Args:
        store: Opened to write.
        source: What has the days: Prometheus, not the store.
        now: Unix time.
        from_day: Start of the first day; without one, the day after the oldest that is closed, or in an empty store the
            oldest that the source has.
        accept_gaps: Close days of which hours are missing, once ``GRACE_HOURS`` are over.
        by: Who closes.
        progress: Told after each day.

    Raises:
        StoreError: The store cannot be read or written, or the clock is wrong. Days closed before stay closed.
        PrometheusError: Where the oldest day is to be found, and nothing can be read at all.
    """
    due = await due_days(store, source, now, from_day=from_day)
    closed: list[int] = []
    left: list[NotClosed] = []
    for number, day in enumerate(due, start=1):
        gaps_too = accept_gaps and now >= day + DAY_SECONDS + GRACE_HOURS * HOUR_SECONDS
        reason = await _close(store, source, day, now, by=by, accept_gaps=gaps_too)
        if reason is None:
            closed.append(day)
        else:
            left.append(reason)
        if progress is not None:
            progress(Progress(done=number, total=len(due)))
    return Closing(closed=tuple(closed), left=tuple(left))


async def due_days(
    store: DayStore,
    source: LedgerSource,
    now: float,
    *,
    from_day: int | None = None,
) -> tuple[int, ...]:
    """Starts of the days that ``close_due_days`` would close, oldest first.

    Raises:
        StoreError: The store cannot be read, or it has a day that is not over yet: the clock is wrong.
        PrometheusError: The oldest day is to be found, and nothing can be read at all.
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
    """Start of the oldest day of which the source has an hour, looking back to ``from_day``, or until 30 days are bare.

    Raises:
        PrometheusError: Something could not be read: days that were not seen must not be taken for bare ones.
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


async def _close(
    store: DayStore, source: LedgerSource, day: int, now: float, *, by: str, accept_gaps: bool
) -> NotClosed | None:
    """Read and close a day; why not, where it was not.

    Raises:
        StoreError: The store cannot be written.
    """
    try:
        ledger = await source.ledger(day_window(day), ALL_OF_A_DAY)
    except PrometheusError as error:
        return NotClosed(day_seconds=day, reason=str(error))
    if now < day + DAY_SECONDS + GRACE_HOURS * HOUR_SECONDS:
        recorded = {cluster for chunk in ledger.chunks for cluster in chunk.recorded_hours}
        gone = sorted(await asyncio.to_thread(store.clusters_before, day) - recorded)
        if gone and recorded and not ledger.failures:
            told = ", ".join(f"'{cluster}'" for cluster in gone)
            reason = (
                f"store: {day_name(day)} is not closed: no hour of cluster {told} was recorded, which was there before"
            )
            return NotClosed(
                day_seconds=day, reason=f"{reason}; it may still come within {GRACE_HOURS} hours", waits=True
            )
    try:
        await asyncio.to_thread(store.close_day, ledger, now=now, by=by, accept_gaps=accept_gaps)
    except StoreError as error:
        if error.reason in _OF_THE_DAY:
            return NotClosed(day_seconds=day, reason=str(error), waits=error.reason == "gaps")
        raise
    return None

"""Reads ledgers from the store, combines them with Prometheus, and closes days that are due."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from sqlite3 import Connection

from exporter.cost import prometheus_access
from exporter.cost import store as door
from exporter.cost.fleet_reading import missing_hours
from exporter.cost.ledger import (
    DAY_SECONDS,
    HOUR_SECONDS,
    Chunk,
    Dimension,
    Failure,
    Filters,
    FleetLedger,
    Window,
    chunks,
    pairs,
)
from exporter.cost.query_rows import LedgerSource, Progress
from exporter.cost.store import DayStore
from exporter.cost.store_schema import ALL_OF_A_DAY, FACTS, capacity_of, day_window, is_day, owners_labels, sums
from exporter.errors import PrometheusError, StoreError
from exporter.model import NodeFacts
from exporter.model.formatting import day as day_name

ENGINE = "store of closed days"
_DAYS_AT_ONCE = 31
"""So that progress is shown, and a long window's lines are not twice in memory."""


class StoreLedger:
    """Reads closed days; every question on a thread and a connection of its own, so that none waits for a writer."""

    def __init__(self, store: DayStore) -> None:
        self._path = store.path

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger of the closed days in the window; what else is in it is in ``failures``.

        Raises:
            StoreError: The store cannot be read.
        """
        pieces = chunks(window)
        read: dict[Window, Chunk] = {}
        nodes: dict[tuple[str, str], NodeFacts] = {}
        simulated = False
        keys: frozenset[str] = frozenset()
        iterator = iter(piece for piece in pieces if is_day(piece))
        asked = 0
        while days := tuple(islice(iterator, _DAYS_AT_ONCE)):
            found, facts, some, keys = await asyncio.to_thread(
                _read, self._path, days, dimensions, filters or Filters()
            )
            read.update(found)
            nodes.update(facts)
            simulated = simulated or some
            asked += len(days)
            if progress is not None:
                progress(Progress(done=asked, total=sum(map(is_day, pieces))))
        closed = tuple(read[piece] for piece in pieces if piece in read)
        return FleetLedger(
            window=window,
            dimensions=dimensions,
            chunks=closed,
            nodes=nodes,
            failures=tuple(_failure(piece) for piece in pieces if piece not in read),
            label_keys=keys,
            engine=ENGINE,
            simulated=simulated,
            notes=tuple(missing_hours([one.window for one in closed], [one.recorded_hours for one in closed])),
        )

    async def closed(self) -> frozenset[int]:
        """Starts of all closed days, as Unix times.

        Raises:
            StoreError: The store cannot be read.
        """
        return await asyncio.to_thread(_closed, self._path)


def _failure(piece: Window) -> Failure:
    if is_day(piece):
        reason = f"{piece.label} is not closed; close it, or ask Prometheus"
    else:
        reason = f"the store has whole UTC days only, and this is a part of {piece.label}; ask for whole days"
    return Failure(window=piece, what="closed day", reason=reason, may_pass=False)


def _closed(path: Path) -> frozenset[int]:
    with door.reading(path) as connection:
        return frozenset(day * DAY_SECONDS for (day,) in connection.execute("SELECT day FROM days"))


def _read(
    path: Path, days: Sequence[Window], dimensions: frozenset[Dimension], filters: Filters
) -> tuple[dict[Window, Chunk], dict[tuple[str, str], NodeFacts], bool, frozenset[str]]:
    with door.reading(path) as connection:
        wanted = {day.start_seconds // DAY_SECONDS: day for day in days}
        rows = connection.execute(
            "SELECT days.day, versions.id, simulated FROM days JOIN versions ON versions.id = days.version"
            " WHERE days.day BETWEEN ? AND ? ORDER BY days.day",
            (min(wanted), max(wanted)),
        )
        held = [(version, wanted[day], simulated) for day, version, simulated in rows if day in wanted]
        lines = sums(connection, [version for version, *_ in held], dimensions, filters)
        found = {}
        for version, day, _ in held:
            seconds, hours = capacity_of(connection, version)
            found[day] = Chunk(
                window=day, lines=lines[version], capacity_seconds=seconds, recorded_hours=hours, closed=True
            )
        nodes = dict(_nodes(connection, [version for version, *_ in held]))
        keys = frozenset(key for labels in owners_labels(connection) for key in pairs(labels))
        return found, nodes, any(simulated for *_, simulated in held), keys


def _nodes(connection: Connection, versions: Sequence[int]) -> Iterator[tuple[tuple[str, str], NodeFacts]]:
    """Facts of every node, oldest first: the last word on a node is that of its newest day."""
    for version in versions:
        rows = connection.execute(
            f"SELECT cluster, name, {', '.join(FACTS)} FROM node_facts"  # noqa: S608 - names of columns
            " JOIN nodes ON nodes.id = node_facts.node JOIN facts ON facts.id = node_facts.facts WHERE version = ?",
            (version,),
        )
        for cluster, name, *facts in rows:
            yield (cluster, name), NodeFacts(**dict(zip(FACTS, facts, strict=True)))


class CombinedLedger:
    """Reads closed days from the store and the rest from Prometheus: a closed day is what it was when it was closed."""

    def __init__(self, store: StoreLedger, rest: LedgerSource) -> None:
        self._store = store
        self._rest = rest

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger of the window.

        Raises:
            PrometheusError: Nothing of it is in the store, and Prometheus cannot be asked.
            StoreError: The store cannot be read.
        """
        closed = await self._store.closed()
        runs = _runs(window, closed)
        parts: list[FleetLedger] = []
        problem: PrometheusError | None = None
        for run, is_closed in runs:
            report = _of_part(progress, run, window)
            if is_closed:
                parts.append(await self._store.ledger(run, dimensions, filters, report))
                continue
            if problem is None:
                try:
                    parts.append(await self._rest.ledger(run, dimensions, filters, report))
                    continue
                except PrometheusError as error:
                    if not any(is_closed for _, is_closed in runs):
                        raise
                    problem = error
            parts.append(_unread(run, dimensions, problem))
        return _joined(window, dimensions, parts)


def _runs(window: Window, closed: frozenset[int]) -> list[tuple[Window, bool]]:
    """Return the window in few pieces, each of closed days or of others, and which are closed."""
    days = groupby(chunks(window), key=lambda piece: is_day(piece) and piece.start_seconds in closed)
    return [
        (replace(several[0], end_seconds=several[-1].end_seconds), is_closed)
        for is_closed, several in ((is_closed, tuple(pieces)) for is_closed, pieces in days)
    ]


def _of_part(
    progress: Callable[[Progress], None] | None, run: Window, window: Window
) -> Callable[[Progress], None] | None:
    """Progress of a part as progress of the whole, by hours."""
    if progress is None:
        return None
    before = (run.start_seconds - window.start_seconds) // 3600

    def report(part: Progress) -> None:
        done = before + (run.hours * part.done // part.total if part.total else 0)
        progress(Progress(done=done, total=window.hours))

    return report


def _unread(run: Window, dimensions: frozenset[Dimension], problem: PrometheusError) -> FleetLedger:
    failures = tuple(
        Failure(window=piece, what="ledger", reason=str(problem), may_pass=prometheus_access.may_pass(problem))
        for piece in chunks(run)
    )
    return FleetLedger(window=run, dimensions=dimensions, chunks=(), failures=failures)


def _joined(window: Window, dimensions: frozenset[Dimension], parts: list[FleetLedger]) -> FleetLedger:
    return FleetLedger(
        window=window,
        dimensions=dimensions,
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        nodes={node: facts for part in parts for node, facts in part.nodes.items()},
        failures=tuple(failure for part in parts for failure in part.failures),
        label_keys=frozenset[str]().union(*(part.label_keys for part in parts)),
        engine=", ".join(dict.fromkeys(part.engine for part in parts if part.engine)),
        simulated=any(part.simulated for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


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
    """One sentence, with the fix."""
    waits: bool = False
    """Its hours may still come, or a user accepts that they will not."""


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
        progress: Called after each day.

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
            names = ", ".join(f"'{cluster}'" for cluster in gone)
            reason = (
                f"store: {day_name(day)} is not closed: no hour of cluster {names} was recorded, which was there before"
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

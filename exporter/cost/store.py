"""Stores closed days in SQLite: each day as it was recorded, replaced only with a reason."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from sqlite3 import Connection
from typing import NamedTuple, Self

from exporter.cost import store_file
from exporter.cost.dimensions import EVERYTHING, UNALLOCATED, UNATTRIBUTED, Dimension, Filters, LineKey, pairs
from exporter.cost.ledger import Chunk, Failure, Figures, FleetLedger, total_of
from exporter.cost.store_file import changing, reading
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Window, chunks
from exporter.errors import StoreError
from exporter.model.attribution import NodeFacts
from exporter.model.formatting import day as day_name
from exporter.model.ledger import NO_SECONDS, ByState

HOURS_OF_A_DAY = 24
GRACE_HOURS = 48
"""Hours in which missing hours may still arrive, from a Prometheus that catches up or a rule that is backfilled."""
ALL_OF_A_DAY: frozenset[Dimension] = frozenset(LineKey._fields)
"""Dimensions of a stored day: all of them."""
ENGINE = "store of closed days"
SKEW_SECONDS = 3600.0
"""Largest accepted lag of the clock behind the newest closing; no day is closed with a larger lag."""
_MOST_PROBLEMS = 20


class ClosedDay(NamedTuple):
    """A day that reports read from the store."""

    window: Window
    version: int
    """Number of the version; 1 for a day that was closed once."""
    recorded_hours: int
    """Recorded hours of the cluster with the fewest; below 24, the day was closed with gaps."""
    simulated: bool
    reopened: str
    """Reason for reopening; this version stays valid until the next closing. Empty if the day is not reopened."""


class DayVersion(NamedTuple):
    """The result of closing a day; a day may have several versions, of which the last is valid."""

    number: int
    closed_at_seconds: float
    closed_by: str
    reason: str
    """Reason for closing again; empty for the first version."""
    engine: str
    """Source of the ledger."""
    lines: int
    figures: Figures
    """Total of all lines, including Unallocated and Unattributed."""
    recorded_hours: Mapping[str, int]
    """Recorded hours by cluster."""


def day_window(start_seconds: int) -> Window:
    """Return the UTC day that begins at a Unix time; its label is the date."""
    return Window(start_seconds=start_seconds, end_seconds=start_seconds + DAY_SECONDS, label=day_name(start_seconds))


def is_day(window: Window) -> bool:
    """Return whether a window is exactly one UTC day."""
    return window.start_seconds % DAY_SECONDS == 0 and window.seconds == DAY_SECONDS


@dataclass(frozen=True, slots=True)
class DayStore:
    """An SQLite file of closed days. Any number of processes and threads may read it; one process closes days.

    Every method blocks on the disk: call it with ``asyncio.to_thread``, not on an event loop. Methods may be called
    from any thread, open their own connection, and raise StoreError if the file cannot be read or written. A method
    either writes all of its changes to the disk, or none.
    """

    path: Path

    @contextmanager
    def writing(self, now: float) -> Iterator[Self]:
        """Lock the store against other writers; the file is created if it is missing, checked and upgraded.

        Args:
            now: Unix time, shown to other writers during the lock.

        Raises:
            StoreError: ``in_use``, ``damaged`` (set aside; the next try starts a new store), ``newer``,
                ``not_a_store``, ``unreadable``, ``unwritable``, ``read_only``, ...
        """
        with store_file.locked(self.path, now):
            store_file.prepare(self.path)
            yield self

    def close_day(
        self,
        ledger: FleetLedger,
        *,
        now: float,
        by: str = "",
        reason: str = "",
        accept_gaps: bool = False,
        accept_less: bool = False,
    ) -> int:
        """Store a UTC day, within ``writing``, and return the number of its version, 1 for the first.

        Args:
            ledger: Ledger of that day at ``ALL_OF_A_DAY``, with at most one chunk.
            now: Unix time; the day must have ended.
            by: User or service that closes it.
            reason: Reason for closing again, if the day was not reopened with a reason.
            accept_gaps: Whether hours of the day may be missing.
            accept_less: Whether a reopened day may have fewer hours than before, because Prometheus deletes old data.

        Raises:
            StoreError: ``not_a_day``, ``not_over``, ``clock``, ``not_whole`` (the reading has failures), ``gaps``,
                ``less``, ``closed`` (before, without a reason), or the file cannot be written. The store does not
                change.
        """
        chunk = _day_of(ledger, now, accept_gaps=accept_gaps)
        day = chunk.window.start_seconds // DAY_SECONDS
        name = day_name(chunk.window.start_seconds)
        with changing(self.path) as connection:
            newest = connection.execute("SELECT max(closed_at) FROM versions").fetchone()[0]
            if newest is not None and now < newest - SKEW_SECONDS:
                raise _refused("clock", name, "the clock is behind the newest closing; set the clock")
            closed = connection.execute("SELECT reopened_reason FROM days WHERE day = ?", (day,)).fetchone()
            if closed and not (reason or closed[0]):
                raise StoreError("closed", f"store: {name} is closed: reopen it with a reason to close it again")
            if not accept_less:
                _refuse_less(connection, chunk)
            if not accept_gaps and now < chunk.window.end_seconds + GRACE_HOURS * HOUR_SECONDS:
                _refuse_lost_clusters(connection, chunk)
            why = reason or (closed[0] if closed else "")
            last = connection.execute("SELECT max(number) FROM versions WHERE day = ?", (day,)).fetchone()[0] or 0
            _write(connection, ledger, chunk, (day, last + 1, now, by, why, ledger.engine, ledger.simulated))
        return int(last) + 1

    def reopen(self, day_seconds: int, *, reason: str, by: str, now: float) -> None:
        """Mark a closed day to be read and closed again; its version stays valid until then.

        Raises:
            StoreError: ``no_reason``, ``not_closed``, or the file cannot be written.
        """
        name = day_name(day_seconds)
        if not reason.strip():
            raise StoreError("no_reason", f"store: {name} is not reopened: give a reason, which its history will have")
        with changing(self.path) as connection:
            done = connection.execute(
                "UPDATE days SET reopened_at = ?, reopened_by = ?, reopened_reason = ? WHERE day = ?",
                (now, by, reason.strip(), day_seconds // DAY_SECONDS),
            )
            if not done.rowcount:
                raise StoreError("not_closed", f"store: {name} is not closed; see: gpu-cost-exporter store list")

    def forget(self, before_seconds: int) -> None:
        """Delete all versions of the days that ended at or before ``before_seconds``."""
        day = (before_seconds // DAY_SECONDS,)
        with changing(self.path) as connection:
            for table in ("lines", "capacity", "node_facts"):
                versions = "version IN (SELECT id FROM versions WHERE day < ?)"
                connection.execute(f"DELETE FROM {table} WHERE {versions}", day)  # noqa: S608 - names of tables
            for table in ("days", "versions"):
                connection.execute(f"DELETE FROM {table} WHERE day < ?", day)  # noqa: S608 - names of tables

    def shrink(self) -> None:
        """Delete names without lines, and return free space to the disk, within ``writing``."""
        with changing(self.path) as connection:
            for table, used in (
                ("owners", "SELECT owner FROM lines"),
                ("sorts", "SELECT sort FROM lines"),
                ("nodes", "SELECT node FROM lines UNION SELECT node FROM node_facts"),
            ):
                connection.execute(f"DELETE FROM {table} WHERE id NOT IN ({used})")  # noqa: S608 - names of tables
        store_file.vacuum(self.path)

    def closed_days(self) -> tuple[ClosedDay, ...]:
        """Return every closed day, oldest first."""
        with reading(self.path) as connection:
            rows = connection.execute(
                "SELECT days.day, number, (SELECT min(hours) FROM capacity WHERE capacity.version = days.version),"
                " simulated, reopened_reason FROM days JOIN versions ON versions.id = days.version ORDER BY days.day"
            )
            return tuple(
                ClosedDay(day_window(day * DAY_SECONDS), number, hours or 0, bool(simulated), reopened or "")
                for day, number, hours, simulated, reopened in rows
            )

    def read(self, window: Window, dimensions: frozenset[Dimension], filters: Filters) -> FleetLedger:
        """Return the ledger of the closed days in a window; ``failures`` lists its other days."""
        pieces = chunks(window)
        with reading(self.path) as connection:
            rows = connection.execute(
                "SELECT days.day, versions.id, simulated FROM days JOIN versions ON versions.id = days.version"
                " WHERE days.day BETWEEN ? AND ? ORDER BY days.day",
                (window.start_seconds // DAY_SECONDS, window.end_seconds // DAY_SECONDS),
            )
            known = {day_window(day * DAY_SECONDS): (version, simulated) for day, version, simulated in rows}
            held = {piece: known[piece] for piece in pieces if piece in known}
            lines = _sums(connection, [version for version, _ in held.values()], dimensions, filters)
            return FleetLedger(
                window=window,
                dimensions=dimensions,
                chunks=tuple(
                    _chunk(connection, version, piece, lines[version]) for piece, (version, _) in held.items()
                ),
                nodes=dict(_nodes(connection, lines)),
                failures=tuple(_failure(piece) for piece in pieces if piece not in held),
                label_keys=frozenset(key for labels in _labels(connection) for key in pairs(labels)),
                engine=ENGINE,
                simulated=any(simulated for _, simulated in held.values()),
            )

    def restatements(self, day_seconds: int) -> tuple[DayVersion, ...]:
        """Return all versions of a day, first to last; empty if it was never closed."""
        with reading(self.path) as connection:
            rows = connection.execute(
                "SELECT id, number, closed_at, closed_by, reason, engine, lines FROM versions WHERE day = ?"
                " ORDER BY number",
                (day_seconds // DAY_SECONDS,),
            ).fetchall()
            lines = _sums(connection, [version for version, *_ in rows], frozenset(), EVERYTHING)
            found = []
            for version, number, at, by, reason, engine, count in rows:
                chunk = _chunk(connection, version, day_window(day_seconds), lines[version])
                total = total_of(chunk.lines.values())
                found.append(DayVersion(number, at, by, reason, engine, count, total, chunk.recorded_hours))
            return tuple(found)

    def check(self) -> tuple[str, ...]:
        """Return the problems of the file, one line each; reads the whole file."""
        with reading(self.path) as connection:
            words = (row[0] for row in connection.execute(f"PRAGMA integrity_check({_MOST_PROBLEMS})"))
            if found := [f"damaged: {' '.join(str(one).split())}" for one in words if one != "ok"]:
                return tuple(found)
            broken = connection.execute("PRAGMA foreign_key_check")
            found = [f"{table}: a row refers to a missing row" for table, *_ in broken]
            seconds_of = " + ".join(f"total({state})" for state in _STATES)
            rows = connection.execute(
                "SELECT versions.day, number, lines, allocated_seconds,"  # noqa: S608 - names of columns
                " (SELECT count(*) FROM (SELECT DISTINCT node, owner, sort FROM lines WHERE version = versions.id)),"
                f" (SELECT {seconds_of} FROM lines WHERE version = versions.id)"
                " FROM versions ORDER BY versions.day, number"
            )
            found += [
                f"{day_name(day * DAY_SECONDS)}, version {number}: {has_lines} lines of {has_seconds:.0f}"
                f" GPU-seconds are there, {lines} of {seconds:.0f} were written"
                for day, number, lines, seconds, has_lines, has_seconds in rows
                if lines != has_lines or abs(seconds - has_seconds) > 1e-9 * seconds
            ]
            return tuple(found[:_MOST_PROBLEMS])


def _refused(reason: str, day: str, why: str) -> StoreError:
    return StoreError(reason, f"store: {day} is not closed: {why}")


def _day_of(ledger: FleetLedger, now: float, *, accept_gaps: bool) -> Chunk:
    """Return the day to close.

    Raises:
        StoreError: The day must not be closed.
    """
    window = ledger.window
    name = day_name(window.start_seconds)
    if not is_day(window) or ledger.dimensions != ALL_OF_A_DAY:
        raise StoreError(
            "not_a_day", f"store: {window.hours} hours from {name}: only whole UTC days are closed, unsummed"
        )
    if window.end_seconds > now:
        raise StoreError("not_over", f"store: {name} is not over, or the clock is wrong; close it tomorrow")
    if ledger.failures:
        first = ledger.failures[0]
        why = f"{len(ledger.failures)} queries failed, first {first.what}: {first.reason}"
        raise _refused("not_whole", name, why)
    chunk = next((chunk for chunk in ledger.chunks if is_day(chunk.window)), Chunk(window=window))
    hours, cluster = min(((hours, name) for name, hours in chunk.recorded_hours.items()), default=(0, ""))
    if hours < HOURS_OF_A_DAY and not (accept_gaps and hours):
        waiting = "they may still come; if they will not: store close --accept-gaps"
        fix = waiting if hours else "there is nothing to close"
        raise _refused("gaps", name, f"{hours} of its 24 hours{_of_cluster(cluster)} were recorded; {fix}")
    return chunk


def _of_cluster(name: str) -> str:
    return f" of cluster '{name}'" if name else ""


def _refuse_less(connection: Connection, chunk: Chunk) -> None:
    """Raise an error for a day with fewer hours than its closed version.

    Raises:
        StoreError: ``less``.
    """
    known = connection.execute(
        "SELECT cluster, hours FROM capacity JOIN days ON days.version = capacity.version WHERE day = ?",
        (chunk.window.start_seconds // DAY_SECONDS,),
    )
    for cluster, hours in known:
        now = chunk.recorded_hours.get(cluster, 0)
        if now < hours:
            raise StoreError(
                "less",
                f"store: {day_name(chunk.window.start_seconds)} is not closed again: {now} hours{_of_cluster(cluster)}"
                f" are there now, the closed day has {hours} and stays valid; store close --accept-gaps accepts less",
            )


def _refuse_lost_clusters(connection: Connection, chunk: Chunk) -> None:
    """Raise an error for a day without hours of a cluster that the newest day before it has.

    Raises:
        StoreError: ``gaps``.
    """
    known = connection.execute(
        "SELECT cluster FROM capacity JOIN days ON days.version = capacity.version"
        " WHERE day = (SELECT max(day) FROM days WHERE day < ?)",
        (chunk.window.start_seconds // DAY_SECONDS,),
    )
    if gone := sorted({cluster for (cluster,) in known} - chunk.recorded_hours.keys()):
        names = ", ".join(f"'{cluster}'" for cluster in gone)
        why = f"no hour of cluster {names} was recorded, which was there before"
        name = day_name(chunk.window.start_seconds)
        raise _refused("gaps", name, f"{why}; it may still come within {GRACE_HOURS} hours")


def _failure(piece: Window) -> Failure:
    if is_day(piece):
        reason = f"{piece.label} is not closed; close it, or ask Prometheus"
    else:
        reason = f"the store has whole UTC days only, and this is a part of {piece.label}; ask for whole days"
    return Failure(window=piece, what="closed day", reason=reason, may_pass=False)


_STATES = ByState.__slots__
_FIGURES = (*_STATES, "unpriced", "energy", *(f"{state}_cost" for state in _STATES))
"""Columns of a line's figures: time by state, unpriced time, energy, and money by state."""
_FACTS = ("instance_type", "capacity_type", "region", "gpu_product")
"""Columns of a node's facts: the fields of ``NodeFacts``."""
_NAMES: Mapping[str, tuple[str, ...]] = {
    "owners": ("namespace", "kind", "workload", "team", "labels"),
    "sorts": ("pool", "model", "mode"),
    "nodes": ("cluster", "name"),
    "currencies": ("code",),
    "facts": _FACTS,
}
"""Columns of the tables that give each combination of names an id."""
_ID = {"owners": "owner", "sorts": "sort", "nodes": "node"}
"""Column of ``lines`` with the id, by table."""
_COLUMNS: Mapping[Dimension, tuple[str, str]] = {
    "node" if column == "name" else column: (table, column) for table in _ID for column in _NAMES[table]
}
"""Table and column of each dimension."""


def _interned(connection: Connection, table: str) -> Callable[..., int]:
    """Return a function that returns the id of names and inserts a missing row; for one transaction."""
    columns = _NAMES[table]
    where = " AND ".join(f"{column} = ?" for column in columns)
    select = f"SELECT id FROM {table} WHERE {where}"  # noqa: S608 - names are bound
    insert = _insert(table, columns)

    @cache
    def identify(*names: str) -> int:
        row = connection.execute(select, names).fetchone()
        return int(row[0] if row else connection.execute(insert, names).lastrowid or 0)

    return identify


def _insert(table: str, columns: Sequence[str]) -> str:
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608 - names of tables and columns


_VERSION = ("day", "number", "closed_at", "closed_by", "reason", "engine", "simulated", "lines", "allocated_seconds")
_LINE = ("version", "owner", "currency", "sort", "node", *_FIGURES)


def _write(
    connection: Connection, ledger: FleetLedger, chunk: Chunk, head: tuple[int, int, float, str, str, str, bool]
) -> None:
    """Add a version of a day and make it the valid one.

    Args:
        connection: Connection within a transaction.
        ledger: Ledger of the day.
        chunk: The day, at full dimensions.
        head: Day and number of the version; time, author and reason of the closing; engine; whether simulated.
    """
    lines = {key: figures for key, figures in chunk.lines.items() if not figures.is_empty}
    allocated = sum(figures.seconds.total for figures in lines.values())
    added = connection.execute(_insert("versions", _VERSION), (*head, len(lines), allocated))
    version = int(added.lastrowid or 0)
    connection.executemany(
        "INSERT INTO capacity VALUES (?, ?, ?, ?)",
        [
            (version, cluster, chunk.capacity_seconds.get(cluster, 0.0), chunk.recorded_hours.get(cluster, 0))
            for cluster in sorted({*chunk.capacity_seconds, *chunk.recorded_hours})
        ],
    )
    ids = {table: _interned(connection, table) for table in _NAMES}
    # In the order of the key, so that pages of the table are filled one after another.
    connection.executemany(_insert("lines", _LINE), sorted(_rows(version, lines, ids), key=itemgetter(1, 2, 3, 4)))
    connection.executemany(
        "INSERT INTO node_facts VALUES (?, ?, ?)",
        sorted(
            (version, ids["nodes"](*node), ids["facts"](*(getattr(facts, name) for name in _FACTS)))
            for node, facts in ledger.nodes.items()
        ),
    )
    connection.execute(
        "INSERT INTO days (day, version) VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET version = excluded.version,"
        " reopened_at = NULL, reopened_by = NULL, reopened_reason = NULL",
        (head[0], version),
    )


def _rows(
    version: int, lines: Mapping[LineKey, Figures], ids: Mapping[str, Callable[..., int]]
) -> Iterator[tuple[float | None, ...]]:
    for key, figures in lines.items():
        owner = ids["owners"](key.namespace, key.kind, key.workload, key.team, key.labels)
        place = ids["sorts"](key.pool, key.model, key.mode), ids["nodes"](key.cluster, key.node)
        plain = (*(value for _, value in figures.seconds), figures.unpriced_seconds, figures.energy_joules)
        for currency, money in sorted(figures.money.items()) or (("", NO_SECONDS),):
            yield (version, owner, ids["currencies"](currency), *place, *plain, *(value for _, value in money))
            plain = (*[0.0] * (len(_STATES) + 1), None)


def _chunk(connection: Connection, version: int, day: Window, lines: Mapping[LineKey, Figures]) -> Chunk:
    """Return a version of a day, with its metered seconds and recorded hours."""
    rows = connection.execute("SELECT cluster, seconds, hours FROM capacity WHERE version = ?", (version,)).fetchall()
    return Chunk(
        window=day,
        lines=lines,
        capacity_seconds={cluster: seconds for cluster, seconds, _ in rows},
        recorded_hours={cluster: hours for cluster, _, hours in rows},
        closed=True,
    )


def _nodes(connection: Connection, versions: Iterable[int]) -> Iterator[tuple[tuple[str, str], NodeFacts]]:
    """Yield the facts of every node, oldest day first, so that newer facts replace older ones."""
    for version in versions:
        rows = connection.execute(
            f"SELECT cluster, name, {', '.join(_FACTS)} FROM node_facts"  # noqa: S608 - names of columns
            " JOIN nodes ON nodes.id = node_facts.node JOIN facts ON facts.id = node_facts.facts WHERE version = ?",
            (version,),
        )
        for cluster, name, *facts in rows:
            yield (cluster, name), NodeFacts(**dict(zip(_FACTS, facts, strict=True)))


def _labels(connection: Connection) -> list[str]:
    """Return every combination of cost labels in the store."""
    return [labels for (labels,) in connection.execute("SELECT DISTINCT labels FROM owners")]


def _sums(
    connection: Connection, versions: Sequence[int], dimensions: frozenset[Dimension], filters: Filters
) -> dict[int, dict[LineKey, Figures]]:
    """Return the lines of each version that the filters keep, summed over dimensions that are not requested.

    ``workload`` adds ``namespace`` and ``kind``, as in a ledger from Prometheus.
    """
    if "workload" in dimensions:
        dimensions |= {"namespace", "kind"}
    by_label = filters.by_label
    if by_label.wanted:
        kept = {labels for labels in _labels(connection) if by_label.keep(LineKey(labels=labels))}
        others = {name: values for name, values in filters.wanted.items() if name not in by_label.wanted}
        filters = Filters(wanted={**others, "labels": frozenset(kept)})
    question, values = _question(versions, dimensions, filters)
    found: dict[int, dict[LineKey, Figures]] = {version: {} for version in versions}
    once: dict[str, str] = {}  # SQLite creates each name again, and 10^5 lines share a few thousand names
    keys = len(LineKey._fields)
    for version, *row in connection.execute(question, values):
        key = LineKey(*[once.setdefault(name, name) for name in row[:keys]])
        lines = found[version]
        figures = _figures(row[keys], row[keys + 1 :])
        earlier = lines.get(key)
        lines[key] = figures if earlier is None else total_of((earlier, figures))
    return {version: {k: f for k, f in lines.items() if not f.is_empty} for version, lines in found.items()}


def _question(
    versions: Sequence[int], dimensions: frozenset[Dimension], filters: Filters
) -> tuple[str, tuple[str, ...]]:
    """Return the query and its values. It groups by ids first, so that names are looked up per group, not per row."""
    tables = ["owners", *(t for t in ("sorts", "nodes") if any(_COLUMNS[d][0] == t for d in dimensions))]
    # In the storage order of lines, so that the most frequent sums need no sorting.
    ids = ", ".join(("version", "owner", "currency", *(_ID[table] for table in tables[1:])))
    where, values = ["version IN (SELECT value FROM json_each(?))"], [json.dumps(list(versions))]
    for dimension, wanted in sorted(filters.wanted.items()):
        table, column = _COLUMNS[dimension]
        where.append(
            f"{_ID[table]} IN (SELECT id FROM {table} WHERE {column} IN (SELECT value FROM json_each(?)))"  # noqa: S608
        )
        values.append(json.dumps(sorted(wanted)))
    sums = ", ".join(f"sum({name}) AS {name}" for name in _FIGURES)
    joins = " ".join(f"JOIN {table} ON {table}.id = grouped.{_ID[table]}" for table in tables)
    figures, group = ", ".join(_FIGURES), ""
    if "workload" not in dimensions:  # otherwise almost no rows are left to sum
        figures = sums
        group = "GROUP BY " + ", ".join(str(number) for number in range(1, len(LineKey._fields) + 3))
    names = ", ".join(_name(dimension, dimensions) for dimension in LineKey._fields)
    # The inserted text consists of names of the tables above; values of users are bound.
    question = (
        f"WITH grouped AS MATERIALIZED (SELECT {ids}, {sums} FROM lines WHERE {' AND '.join(where)}"  # noqa: S608
        f" GROUP BY {ids}) SELECT version, {names}, currencies.code, {figures} FROM grouped {joins}"
        f" JOIN currencies ON currencies.id = grouped.currency {group}"
    )
    return question, tuple(values)


def _name(dimension: Dimension, dimensions: frozenset[Dimension]) -> str:
    """Return the SQL of a line's name; Unallocated and Unattributed stay separate."""
    if dimension in dimensions:
        return ".".join(_COLUMNS[dimension])
    if dimension != "kind":
        return "''"
    return f"CASE WHEN owners.kind IN ('{UNALLOCATED}', '{UNATTRIBUTED}') THEN owners.kind ELSE '' END"


def _figures(currency: str, row: Sequence[float | None]) -> Figures:
    count = len(_STATES)
    return Figures(
        seconds=_by_state(row[:count]),
        unpriced_seconds=row[count] or 0.0,
        energy_joules=row[count + 1],
        money={currency: _by_state(row[count + 2 :])} if currency else {},
    )


def _by_state(values: Sequence[float | None]) -> ByState:
    return ByState(**{state: value or 0.0 for state, value in zip(_STATES, values, strict=True)})

"""What the store has, and whether it is sound: questions to an open connection."""

from collections.abc import Iterator
from sqlite3 import Connection

from exporter.report.fleet.values import DAY_SECONDS, Filters
from exporter.report.store.sums import added, sums
from exporter.report.store.values import ClosedDay, DayVersion, day_name, day_window

_MOST_PROBLEMS = 20


def closed_days(connection: Connection) -> tuple[ClosedDay, ...]:
    """Every closed day, oldest first."""
    rows = connection.execute(
        "SELECT days.day, number, simulated, reopened_reason,"
        " (SELECT min(hours) FROM capacity WHERE capacity.version = days.version)"
        " FROM days JOIN versions ON versions.id = days.version ORDER BY days.day"
    )
    return tuple(
        ClosedDay(
            window=day_window(day * DAY_SECONDS),
            version=number,
            simulated=bool(simulated),
            reopened=reopened or "",
            recorded_hours=hours or 0,
        )
        for day, number, simulated, reopened, hours in rows
    )


def versions(connection: Connection, day: int) -> tuple[DayVersion, ...]:
    """All versions of a day, counted since 1970, first to last."""
    return tuple(_versions(connection, day))


def _versions(connection: Connection, day: int) -> Iterator[DayVersion]:
    rows = connection.execute("SELECT * FROM versions WHERE day = ? ORDER BY number", (day,))
    for number, _, count, at, by, reason, engine, simulated, lines, _ in rows.fetchall():
        found = sums(connection, [number], frozenset(), Filters())[number]
        capacity = connection.execute("SELECT cluster, seconds, hours FROM capacity WHERE version = ?", (number,))
        known = capacity.fetchall()
        yield DayVersion(
            window=day_window(day * DAY_SECONDS),
            number=count,
            closed_at_seconds=at,
            closed_by=by,
            reason=reason,
            engine=engine,
            simulated=bool(simulated),
            lines=lines,
            figures=added(found.values()),
            capacity_seconds={cluster: seconds for cluster, seconds, _ in known},
            recorded_hours={cluster: hours for cluster, _, hours in known},
        )


def problems(connection: Connection) -> tuple[str, ...]:
    """What is wrong with the file, one line each."""
    found = [
        f"damaged: {' '.join(str(words).split())}"
        for (words,) in connection.execute(f"PRAGMA integrity_check({_MOST_PROBLEMS})")
        if words != "ok"
    ]
    if found:
        return tuple(found)
    found += [f"{table}: a row names what is not there" for table, *_ in connection.execute("PRAGMA foreign_key_check")]
    rows = connection.execute(
        "SELECT versions.day, number, lines, allocated_seconds,"
        " (SELECT count(*) FROM (SELECT DISTINCT node, owner, sort FROM lines WHERE version = versions.id)),"
        " (SELECT total(active) + total(idle) + total(unknown) FROM lines WHERE version = versions.id)"
        " FROM versions ORDER BY versions.day, number"
    )
    for day, number, lines, seconds, has_lines, has_seconds in rows:
        if lines != has_lines or abs(seconds - has_seconds) > 1e-9 * seconds:
            found.append(
                f"{day_name(day * DAY_SECONDS)}, version {number}: {has_lines} lines of {has_seconds:.0f} GPU-seconds"
                f" are there, {lines} of {seconds:.0f} were written"
            )
    return tuple(found[:_MOST_PROBLEMS])


def shrink(connection: Connection) -> None:
    """Drop names that no line has, then write the file anew without holes."""
    # A parent's row would be looked for in all lines, one after the other, which have no index for that.
    connection.execute("PRAGMA foreign_keys = OFF")
    try:
        connection.execute("BEGIN IMMEDIATE")
        for table, column in (("owners", "owner"), ("sorts", "sort")):
            connection.execute(f"DELETE FROM {table} WHERE id NOT IN (SELECT {column} FROM lines)")  # noqa: S608
        connection.execute(
            "DELETE FROM nodes WHERE id NOT IN (SELECT node FROM lines) AND id NOT IN (SELECT node FROM node_facts)"
        )
        connection.execute("COMMIT")
        connection.execute("VACUUM")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        connection.execute("PRAGMA foreign_keys = ON")

"""Tables of the store, migrations of older files, and the lock of its only writer."""

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from operator import itemgetter
from pathlib import Path
from sqlite3 import Connection

from exporter.cost.ledger import (
    DAY_SECONDS,
    UNALLOCATED,
    UNATTRIBUTED,
    Chunk,
    Dimension,
    Figures,
    Filters,
    LineKey,
    Window,
    total_of,
)
from exporter.errors import StoreError
from exporter.model import NO_SECONDS, ByState, NodeFacts
from exporter.model.formatting import day as day_name

APPLICATION_ID = 0x47435831
"""In the file's header, so that no other program's database is taken for a store."""

STEPS: tuple[str, ...] = tuple(
    Path(__file__).with_name(f"store_{version}.sql").read_text(encoding="utf-8") for version in (1, 2, 3)
)
"""Step n makes a file of version n of one of version n - 1. A step that was released never changes."""


def upgrade(connection: Connection, version: int, steps: Sequence[str] = STEPS) -> None:
    """Bring a file of ``version`` (0: an empty one) to the last, all steps or none of them.

    Raises:
        sqlite3.Error: It stays as it was.
    """
    if version >= len(steps):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for step in steps[version:]:
            for statement in step.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


_MOST_BYTES = 500


def claim(path: Path, now: float) -> int:
    """Lock the store for this process; the descriptor to close is the lock.

    Raises:
        StoreError: Another process has it (``in_use``), with its id, machine and time; or it cannot be locked.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fix = "see that the directory is there, and writable for this user"
        raise StoreError("unwritable", f"store: cannot write {lock}: {error.strerror}; {fix}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, _MOST_BYTES, 0).decode("utf-8", "replace").strip()
        os.close(descriptor)
        raise StoreError(
            "in_use",
            f"store: {path} is being written by {holder or 'another process'}; one may write at a time: end that one,"
            " or ask it (any number may read)",
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StoreError("unlockable", f"store: {lock} cannot be locked: {error.strerror}; use a local disk") from None
    since = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return descriptor


HOURS_OF_A_DAY = 24
ALL_OF_A_DAY: frozenset[Dimension] = frozenset(LineKey._fields)
"""Dimensions that a day is kept at: every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedDay:
    """A day that reports read from the store."""

    window: Window
    version: int
    """1 for a day that was closed once."""
    recorded_hours: int
    """Of the cluster that has the fewest; below 24 the day was closed with gaps."""
    simulated: bool
    reopened: str = ""
    """Why it is to be read again; this version holds until that is done. Empty where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayVersion:
    """What a closing of a day found; a day that was closed again has several, and the last one holds."""

    window: Window
    number: int
    closed_at_seconds: float
    closed_by: str
    reason: str
    """Why it was closed again; empty for the first."""
    engine: str
    """Where it was read."""
    simulated: bool
    lines: int
    figures: Figures
    """Of all lines, Unallocated and Unattributed, too."""
    capacity_seconds: Mapping[str, float] = field(default_factory=dict)
    """By cluster."""
    recorded_hours: Mapping[str, int] = field(default_factory=dict)
    """By cluster."""


def day_window(start_seconds: int) -> Window:
    """The UTC day that begins then; its label is the date."""
    return Window(start_seconds=start_seconds, end_seconds=start_seconds + DAY_SECONDS, label=day_name(start_seconds))


def is_day(window: Window) -> bool:
    """Whether it is a whole UTC day, and one only."""
    return window.start_seconds % DAY_SECONDS == 0 and window.seconds == DAY_SECONDS


FACTS = ("instance_type", "capacity_type", "region", "gpu_product")
"""Columns of what prices go by, as ``NodeFacts`` has them."""
_TABLES = {
    "nodes": ("cluster", "name"),
    "owners": ("namespace", "kind", "workload", "team", "labels"),
    "sorts": ("pool", "model", "mode"),
    "currencies": ("code",),
    "facts": FACTS,
}


def interned(connection: Connection, table: str) -> Callable[[tuple[str, ...]], int]:
    """What gives the id of a row's names within the transaction, and makes the row where there is none."""
    columns = _TABLES[table]
    marks, names = ", ".join("?" * len(columns)), ", ".join(columns)
    where = " AND ".join(f"{column} = ?" for column in columns)
    # Names are bound; what is put in here is of the table above.
    select = f"SELECT id FROM {table} WHERE {where}"  # noqa: S608
    insert = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608
    known: dict[tuple[str, ...], int] = {}

    def identify(names: tuple[str, ...]) -> int:
        found = known.get(names)
        if found is None:
            row = connection.execute(select, names).fetchone()
            found = int(row[0] if row else connection.execute(insert, names).lastrowid or 0)
            known[names] = found
        return found

    return identify


_STATES = ByState.__slots__
_COSTS = tuple(f"{state}_cost" for state in _STATES)
_FIGURES = (*_STATES, "unpriced", "energy", *_COSTS)
"""Columns of a line's figures: by state, two that are not, and money by state."""
_PLACE = ("version", "owner", "currency", "sort", "node")
# What is put in here are the names of columns above.
_LINE = (
    f"INSERT INTO lines ({', '.join((*_PLACE, *_FIGURES))})"  # noqa: S608
    f" VALUES ({', '.join('?' * len((*_PLACE, *_FIGURES)))})"
)
_VERSION = (
    "INSERT INTO versions (day, number, closed_at, closed_by, reason, engine, simulated, lines, allocated_seconds)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def write_version(
    connection: Connection,
    chunk: Chunk,
    nodes: Mapping[tuple[str, str], NodeFacts],
    *,
    number: int,
    closed: tuple[float, str, str, str, bool],
) -> int:
    """Add a version of a day and make it the one that holds; its id.

    Args:
        connection: Within a transaction.
        chunk: The day, at full dimensions.
        nodes: Facts by (cluster, node).
        number: Of the version.
        closed: When, by whom, why, from which engine, and whether simulated.
    """
    day = chunk.window.start_seconds // DAY_SECONDS
    lines = {key: figures for key, figures in chunk.lines.items() if not figures.is_empty}
    allocated = sum(figures.seconds.total for figures in lines.values())
    version = int(connection.execute(_VERSION, (day, number, *closed, len(lines), allocated)).lastrowid or 0)
    connection.executemany(
        "INSERT INTO capacity VALUES (?, ?, ?, ?)",
        [
            (version, cluster, chunk.capacity_seconds.get(cluster, 0.0), chunk.recorded_hours.get(cluster, 0))
            for cluster in sorted({*chunk.capacity_seconds, *chunk.recorded_hours})
        ],
    )
    # In the order of the key: the pages of the table are filled one after the other.
    connection.executemany(_LINE, sorted(_rows(connection, version, lines), key=itemgetter(1, 2, 3, 4)))
    node_of, facts_of = interned(connection, "nodes"), interned(connection, "facts")
    connection.executemany(
        "INSERT INTO node_facts VALUES (?, ?, ?)",
        sorted(
            (version, node_of(node), facts_of(tuple(getattr(facts, name) for name in FACTS)))
            for node, facts in nodes.items()
        ),
    )
    connection.execute(
        "INSERT INTO days (day, version) VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET version = excluded.version,"
        " reopened_at = NULL, reopened_by = NULL, reopened_reason = NULL",
        (day, version),
    )
    return version


def _rows(connection: Connection, version: int, lines: Mapping[LineKey, Figures]) -> Iterator[tuple[float | None, ...]]:
    node_of, owner_of = interned(connection, "nodes"), interned(connection, "owners")
    sort_of, currency_of = interned(connection, "sorts"), interned(connection, "currencies")
    for key, figures in lines.items():
        owner = owner_of((key.namespace, key.kind, key.workload, key.team, key.labels))
        place = (sort_of((key.pool, key.model, key.mode)), node_of((key.cluster, key.node)))
        plain = (*(value for _, value in figures.seconds), figures.unpriced_seconds, figures.energy_joules)
        for currency, money in sorted(figures.money.items()) or (("", NO_SECONDS),):
            yield (version, owner, currency_of((currency,)), *place, *plain, *(value for _, value in money))
            plain = (*[0.0] * (len(_STATES) + 1), None)


def capacity_of(connection: Connection, version: int) -> tuple[dict[str, float], dict[str, int]]:
    """Return metered seconds and recorded hours of a version of a day, both by cluster."""
    rows = connection.execute("SELECT cluster, seconds, hours FROM capacity WHERE version = ?", (version,)).fetchall()
    return {cluster: seconds for cluster, seconds, _ in rows}, {cluster: hours for cluster, _, hours in rows}


def refuse_nonsense(chunk: Chunk) -> None:
    """Refuse a number that no ledger has: a store that has it would have it for years.

    Raises:
        StoreError: With the line.
    """
    day = day_name(chunk.window.start_seconds)
    for key, figures in chunk.lines.items():
        numbers = [figures.unpriced_seconds, figures.energy_joules or 0.0]
        numbers += [value for amounts in (figures.seconds, *figures.money.values()) for _, value in amounts]
        if not all(isfinite(number) and number >= 0 for number in numbers):
            name = "/".join(part for part in key if part)
            raise StoreError(
                "nonsense", f"store: {day} is not closed: {name} has a figure that is negative or no number"
            )
    for cluster, seconds in chunk.capacity_seconds.items():
        if not (isfinite(seconds) and seconds >= 0):
            raise StoreError("nonsense", f"store: {day} is not closed: capacity of cluster '{cluster}' is {seconds}")


_COLUMNS: Mapping[Dimension, tuple[str, str]] = {
    "cluster": ("nodes", "cluster"),
    "node": ("nodes", "name"),
    "pool": ("sorts", "pool"),
    "namespace": ("owners", "namespace"),
    "kind": ("owners", "kind"),
    "workload": ("owners", "workload"),
    "team": ("owners", "team"),
    "labels": ("owners", "labels"),
    "model": ("sorts", "model"),
    "mode": ("sorts", "mode"),
}
"""Table and column of each dimension, in the order of ``LineKey``."""
_ID = {"nodes": "node", "owners": "owner", "sorts": "sort"}
"""The column of ``lines`` that names a row of the table."""
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in _FIGURES)
_APART = f"CASE WHEN owners.kind IN ('{UNALLOCATED}', '{UNATTRIBUTED}') THEN owners.kind ELSE '' END"


def sums(
    connection: Connection, versions: Sequence[int], dimensions: frozenset[Dimension], filters: Filters
) -> dict[int, dict[LineKey, Figures]]:
    """The lines of each version that the filters keep, summed over the dimensions that are not asked for.

    A workload has namespace and kind with it, as where Prometheus is read.
    """
    if "workload" in dimensions:
        dimensions |= {"namespace", "kind"}
    by_label = filters.by_label
    if by_label.wanted:
        kept = {labels for labels in owners_labels(connection) if by_label.keep(LineKey(labels=labels))}
        others = {name: values for name, values in filters.wanted.items() if name not in by_label.wanted}
        filters = Filters(wanted={**others, "labels": frozenset(kept)})
    question, values = _question(versions, dimensions, filters)
    found: dict[int, dict[LineKey, Figures]] = {version: {} for version in versions}
    keys = len(_COLUMNS)
    once: dict[str, str] = {}  # SQLite makes every name again, and 10^5 lines have the same few thousand
    for row in connection.execute(question, values):
        key = LineKey(*[once.setdefault(name, name) for name in row[1 : 1 + keys]])
        lines = found[row[0]]
        figures = _figures(row[1 + keys], row[2 + keys :])
        earlier = lines.get(key)
        lines[key] = figures if earlier is None else total_of((earlier, figures))
    return {version: {k: f for k, f in lines.items() if not f.is_empty} for version, lines in found.items()}


def owners_labels(connection: Connection) -> list[str]:
    """Every combination of cost labels that a line of the store has."""
    return [labels for (labels,) in connection.execute("SELECT DISTINCT labels FROM owners")]


def _question(
    versions: Sequence[int], dimensions: frozenset[Dimension], filters: Filters
) -> tuple[str, tuple[str, ...]]:
    """Group by ids first, so that names are looked up once per group and not once per row."""
    tables = ["owners", *(t for t in ("sorts", "nodes") if any(_COLUMNS[d][0] == t for d in dimensions))]
    # In the order in which lines lie: what is asked for most is summed as it is read.
    ids = ", ".join(("version", "owner", "currency", *(_ID[table] for table in tables[1:])))
    where, values = ["version IN (SELECT value FROM json_each(?))"], [json.dumps(list(versions))]
    for dimension, wanted in sorted(filters.wanted.items()):
        table, column = _COLUMNS[dimension]
        where.append(
            f"{_ID[table]} IN (SELECT id FROM {table} WHERE {column} IN (SELECT value FROM json_each(?)))"  # noqa: S608
        )
        values.append(json.dumps(sorted(wanted)))
    names = ", ".join(_name(dimension, dimensions) for dimension in _COLUMNS)
    joins = " ".join(f"JOIN {table} ON {table}.id = grouped.{_ID[table]}" for table in tables)
    figures, group = ", ".join(_FIGURES), ""
    if "workload" not in dimensions:  # else there is next to nothing left to sum
        figures = _SUMS
        group = "GROUP BY " + ", ".join(str(number) for number in range(1, len(_COLUMNS) + 3))
    # What is put in here is of the tables above; what users ask for is bound.
    question = (
        f"WITH grouped AS MATERIALIZED (SELECT {ids}, {_SUMS} FROM lines WHERE {' AND '.join(where)}"  # noqa: S608
        f" GROUP BY {ids}) SELECT version, {names}, currencies.code, {figures} FROM grouped {joins}"
        f" JOIN currencies ON currencies.id = grouped.currency {group}"
    )
    return question, tuple(values)


def _name(dimension: Dimension, dimensions: frozenset[Dimension]) -> str:
    if dimension in dimensions:
        return ".".join(_COLUMNS[dimension])
    return _APART if dimension == "kind" else "''"


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

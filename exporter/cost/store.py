"""Stores closed days in SQLite: each day as it was recorded, replaced only with a reason."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Self
from urllib.parse import quote

from exporter.cost import store_schema
from exporter.cost.ledger import DAY_SECONDS, Chunk, Filters, FleetLedger, total_of
from exporter.cost.store_schema import (
    ALL_OF_A_DAY,
    APPLICATION_ID,
    HOURS_OF_A_DAY,
    STEPS,
    ClosedDay,
    DayVersion,
    capacity_of,
    day_window,
    is_day,
    refuse_nonsense,
    sums,
    upgrade,
    write_version,
)
from exporter.errors import StoreError
from exporter.model import ByState
from exporter.model.formatting import day as day_name

BUSY_SECONDS = 10.0
"""How long a question waits for another process' short lock: at a checkpoint, at a migration."""
_MAGIC = b"SQLite format 3\0"
_ID_AT = 68
"""Where the header has the application's id."""
_WAL_BYTES = 64 << 20
"""What is left of the log after a large day."""
_REASONS = {
    "SQLITE_FULL": ("disk_full", "the disk is full: free space there; what was stored before is unharmed"),
    "SQLITE_READONLY": ("read_only", "not writable: give this user the right to write the file and its directory"),
    "SQLITE_CANTOPEN": ("unreadable", "cannot be opened: see that its directory is there, and writable for this user"),
    "SQLITE_PERM": ("unreadable", "no permission: give this user the right to read the file"),
    "SQLITE_BUSY": ("busy", "another program has it locked: end that one, or try again"),
    "SQLITE_LOCKED": ("busy", "another program has it locked: end that one, or try again"),
    "SQLITE_CORRUPT": ("damaged", "damaged; see what is wrong with: gpu-cost-exporter store check"),
    "SQLITE_NOTADB": ("not_a_store", "no store and no database at all; name another file"),
    "SQLITE_IOERR": ("unreadable", "the disk cannot be read or written: look at the machine's log"),
}


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Raise errors of SQLite as this program's.

    Raises:
        StoreError: With the file, what is wrong, and the fix.
    """
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        for start, (reason, words) in _REASONS.items():
            if name.startswith(start):
                raise StoreError(reason, f"store: {path}: {words} ({error})") from error
        raise StoreError("unexpected", f"store: {path}: {error}; this is a fault of the program") from error
    except UnicodeEncodeError as error:
        raise StoreError("not_text", f"store: {path}: a label is no valid Unicode: {error.object!r:.80}") from error


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of its own that sees the store as it is now, whatever is written meanwhile; for one thread.

    Raises:
        StoreError: There is none, it is no store, of another version, or cannot be read.
    """
    with sqlite_errors(path):
        _refuse_strangers(path)
        with closing(_connect(path, "ro")) as connection:
            version = _version(connection)
            if version < len(STEPS):
                raise StoreError(
                    "older", f"store: {path} is of version {version}, this program reads {len(STEPS)}; {_UPGRADE}"
                )
            _refuse_newer(path, version, len(STEPS))
            connection.execute("BEGIN")
            yield connection


_UPGRADE = "bring it there with: gpu-cost-exporter store vacuum --store FILE, once no older program has it open"


def connect_to_write(path: Path, steps: Sequence[str] = STEPS) -> sqlite3.Connection:
    """A connection that may write, for one thread at a time; makes the file, or brings it to this program's version.

    Raises:
        StoreError: It is no store, newer than this program, or cannot be written. One that is damaged is set aside.
    """
    with sqlite_errors(path):
        if path.exists() and path.stat().st_size:
            _refuse_strangers(path)
        _make(path)
        connection = _connect(path, "rwc")
        try:
            _prepare(path, connection, steps)
        except BaseException:
            connection.close()
            raise
        return connection


def connect_beside(path: Path) -> sqlite3.Connection:
    """A connection for short changes beside a process that closes days: SQLite lets one of them write after the other.

    Raises:
        StoreError: There is no store, it is of another version, or cannot be written.
    """
    with sqlite_errors(path), reading(path):
        connection = _connect(path, "rw")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection


def _prepare(path: Path, connection: sqlite3.Connection, steps: Sequence[str]) -> None:
    try:
        version = _version(connection)
        _refuse_newer(path, version, len(steps))
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            connection.close()
            raise _set_aside(path, str(error)) from error
        raise
    if problem != "ok":
        connection.close()
        raise _set_aside(path, " ".join(problem.split()))
    connection.execute("PRAGMA journal_mode = WAL")
    # A closed day is not read again: it must be on the disk when closing is reported.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    upgrade(connection, version, steps)
    connection.execute("PRAGMA foreign_keys = ON")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )


def _make(path: Path) -> None:
    """Make an empty file for its owner alone; SQLite gives its log the same mode. One that is there stays as it is."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError:
        return  # SQLite says better what is wrong


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _refuse_strangers(path: Path) -> None:
    """Refuse what never was a store, before anything is done to it."""
    try:
        with path.open("rb") as file:
            head = file.read(_ID_AT + 4)
    except FileNotFoundError:
        fix = "make it with: gpu-cost-exporter store backfill, or name another file"
        raise StoreError("missing", f"store: there is no {path}; {fix}") from None
    except OSError as error:
        raise StoreError("unreadable", f"store: cannot read {path}: {error.strerror}; name a file") from None
    if not head.startswith(_MAGIC):
        raise StoreError("not_a_store", f"store: {path} is no store and no database at all; name another file")
    if head[_ID_AT:] not in {APPLICATION_ID.to_bytes(4, "big"), bytes(4)}:
        raise StoreError("not_a_store", f"store: {path} is another program's database; name another file")


def _refuse_newer(path: Path, version: int, known: int) -> None:
    if version > known:
        raise StoreError(
            "newer",
            f"store: {path} is of version {version}, this program knows {known}: use the program that wrote it, or a"
            " newer one; the file is as it was",
        )


def _set_aside(path: Path, what: str) -> StoreError:
    """Move a damaged store out of the way, with its log: never away for good."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        for ending in ("-wal", "-shm", ""):
            part = path.with_name(path.name + ending)
            if part.exists():
                part.rename(aside.with_name(aside.name + ending))
    except OSError as error:
        return StoreError("damaged", f"store: {path} is damaged ({what}) and cannot be set aside: {error.strerror}")
    return StoreError(
        "damaged",
        f"store: {path} is damaged ({what}); kept as {aside.name}. Put a backup in its place, or start again: a new"
        " store gets the days that Prometheus still has",
    )


_MOST_PROBLEMS = 20


SKEW_SECONDS = 3600.0
"""How far a clock may have gone back since the newest closing before nothing is closed by it."""


@dataclass(slots=True)
class DayStore:
    """An SQLite file of closed days. Any number of processes and threads may read it, one process writes.

    Every method takes as long as the disk: call it with ``asyncio.to_thread``, not on an event loop. Writing methods
    may be called from any thread, one after the other. What they change is on the disk when they return, or not at all.
    """

    path: Path
    _connection: sqlite3.Connection | None = None
    _claim: int | None = None
    _one_at_a_time: Lock = field(default_factory=Lock)

    @classmethod
    def open(cls, path: Path, *, write: bool, now: float = 0.0, alone: bool = True) -> Self:
        """Open a store; to write, it is made where there is none, checked, and kept from other writers.

        Args:
            path: The file. Beside it lie its log (``-wal``, ``-shm``) and its lock (``.lock``).
            write: Whether days are to be closed.
            now: Unix time, shown to other writers meanwhile.
            alone: False is to write beside another process that closes days: to reopen and to forget.

        Raises:
            StoreError: ``missing`` (to read), ``in_use`` (to write), ``damaged`` (set aside; opening once more starts a
                new store), ``newer``, ``older``, ``not_a_store``, ``unreadable``, ``unwritable``, ``read_only``, ...
        """
        path = path.absolute()
        if not write:
            with reading(path):
                return cls(path)
        if not alone:
            return cls(path, connect_beside(path))
        claim = store_schema.claim(path, now)
        try:
            return cls(path, connect_to_write(path), claim)
        except BaseException:
            os.close(claim)
            raise

    def close(self) -> None:
        """Let others write."""
        with self._one_at_a_time:
            if self._connection is not None:
                self._connection.close()
            if self._claim is not None:
                os.close(self._claim)
            self._connection = self._claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        """Keep a UTC day for good; the number of its version, 1 for the first.

        Args:
            ledger: Of that day, read at every dimension (``values.ALL_OF_A_DAY``), with one chunk or none.
            now: Unix time; the day must be over.
            by: Who closes it.
            reason: Why a day that was closed before is closed again, where it was not reopened with one.
            accept_gaps: Whether a day is taken of which hours were not recorded.
            accept_less: Whether a day that was reopened is taken with fewer hours than it had: Prometheus forgets.

        Raises:
            StoreError: ``not_a_day``, ``not_over``, ``clock``, ``not_whole`` (the reading has failures), ``gaps``,
                ``less``, ``nonsense``, ``closed`` (before, without a reason), or it cannot be written. The store is as
                it was.
        """
        chunk = _day_of(ledger, now, accept_gaps=accept_gaps)
        day = chunk.window.start_seconds // DAY_SECONDS
        name = day_name(chunk.window.start_seconds)
        with self._transaction() as connection:
            newest = connection.execute("SELECT max(closed_at) FROM versions").fetchone()[0]
            if newest is not None and now < newest - SKEW_SECONDS:
                words = "the clock is behind the newest closing; set the clock"
                raise StoreError("clock", f"store: {name} is not closed: {words}")
            row = connection.execute("SELECT reopened_reason FROM days WHERE day = ?", (day,)).fetchone()
            if row and not (reason or row[0]):
                raise StoreError("closed", f"store: {name} is closed: reopen it with a reason to close it again")
            if not accept_less:
                _refuse_less(connection, chunk)
            last = connection.execute("SELECT max(number) FROM versions WHERE day = ?", (day,)).fetchone()[0] or 0
            why = reason or (row[0] if row else "")
            closed = (now, by, why, ledger.engine, ledger.simulated)
            write_version(connection, chunk, ledger.nodes, number=last + 1, closed=closed)
        return int(last) + 1

    def reopen(self, day_seconds: int, *, reason: str, by: str, now: float) -> None:
        """Have a closed day read again and closed again; until then, what is there holds.

        Raises:
            StoreError: ``no_reason``, ``not_closed``, or it cannot be written.
        """
        name = day_name(day_seconds)
        if not reason.strip():
            raise StoreError("no_reason", f"store: {name} is not reopened: give a reason, which its history will have")
        with self._transaction() as connection:
            done = connection.execute(
                "UPDATE days SET reopened_at = ?, reopened_by = ?, reopened_reason = ? WHERE day = ?",
                (now, by, reason.strip(), day_seconds // DAY_SECONDS),
            )
            if not done.rowcount:
                raise StoreError("not_closed", f"store: {name} is not closed; see: gpu-cost-exporter store list")

    def forget(self, before_seconds: int) -> tuple[str, ...]:
        """Delete the days that ended by then, all versions of them; their dates."""
        with self._transaction() as connection:
            day = before_seconds // DAY_SECONDS
            gone = connection.execute("SELECT day FROM days WHERE day < ? ORDER BY day", (day,)).fetchall()
            versions = "version IN (SELECT id FROM versions WHERE day < ?)"
            for table in ("lines", "capacity", "node_facts"):
                connection.execute(f"DELETE FROM {table} WHERE {versions}", (day,))  # noqa: S608 - names of tables
            connection.execute("DELETE FROM days WHERE day < ?", (day,))
            connection.execute("DELETE FROM versions WHERE day < ?", (day,))
        return tuple(day_name(number * DAY_SECONDS) for (number,) in gone)

    def shrink(self) -> None:
        """Drop names that no line has any more, and give free room back to the disk; needs room for a second copy."""
        with self._one_at_a_time, sqlite_errors(self.path):
            connection = self._writer()
            # A parent's row would be looked for in all lines, one after the other, which have no index for that.
            connection.execute("PRAGMA foreign_keys = OFF")
            try:
                connection.execute("BEGIN IMMEDIATE")
                for table, column in (("owners", "owner"), ("sorts", "sort")):
                    connection.execute(f"DELETE FROM {table} WHERE id NOT IN (SELECT {column} FROM lines)")  # noqa: S608
                connection.execute(
                    "DELETE FROM nodes WHERE id NOT IN (SELECT node FROM lines)"
                    " AND id NOT IN (SELECT node FROM node_facts)"
                )
                connection.execute("COMMIT")
                connection.execute("VACUUM")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                connection.execute("PRAGMA foreign_keys = ON")

    def closed_days(self) -> tuple[ClosedDay, ...]:
        """Every closed day, oldest first."""
        with reading(self.path) as connection:
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

    def clusters_before(self, day_seconds: int) -> frozenset[str]:
        """Clusters of the newest closed day before this one."""
        with reading(self.path) as connection:
            rows = connection.execute(
                "SELECT cluster FROM capacity JOIN days ON days.version = capacity.version"
                " WHERE day = (SELECT max(day) FROM days WHERE day < ?)",
                (day_seconds // DAY_SECONDS,),
            )
            return frozenset(cluster for (cluster,) in rows)

    def restatements(self, day_seconds: int) -> tuple[DayVersion, ...]:
        """All versions of a day, first to last; empty where it never was closed."""
        with reading(self.path) as connection:
            rows = connection.execute(
                "SELECT * FROM versions WHERE day = ? ORDER BY number", (day_seconds // DAY_SECONDS,)
            )
            found = []
            for version, _, count, at, by, reason, engine, simulated, lines, _ in rows.fetchall():
                capacity_seconds, recorded_hours = capacity_of(connection, version)
                found.append(
                    DayVersion(
                        window=day_window(day_seconds),
                        number=count,
                        closed_at_seconds=at,
                        closed_by=by,
                        reason=reason,
                        engine=engine,
                        simulated=bool(simulated),
                        lines=lines,
                        figures=total_of(sums(connection, [version], frozenset(), Filters())[version].values()),
                        capacity_seconds=capacity_seconds,
                        recorded_hours=recorded_hours,
                    )
                )
            return tuple(found)

    def check(self) -> tuple[str, ...]:
        """What is wrong with the file, one line each; reads all of it."""
        with reading(self.path) as connection:
            found = [
                f"damaged: {' '.join(str(words).split())}"
                for (words,) in connection.execute(f"PRAGMA integrity_check({_MOST_PROBLEMS})")
                if words != "ok"
            ]
            if found:
                return tuple(found)
            found += [
                f"{table}: a row names what is not there"
                for table, *_ in connection.execute("PRAGMA foreign_key_check")
            ]
            seconds_of = " + ".join(f"total({state})" for state in ByState.__slots__)
            rows = connection.execute(
                "SELECT versions.day, number, lines, allocated_seconds,"  # noqa: S608 - names of columns
                " (SELECT count(*) FROM (SELECT DISTINCT node, owner, sort FROM lines WHERE version = versions.id)),"
                f" (SELECT {seconds_of} FROM lines WHERE version = versions.id)"
                " FROM versions ORDER BY versions.day, number"
            )
            for day, number, lines, seconds, has_lines, has_seconds in rows:
                if lines != has_lines or abs(seconds - has_seconds) > 1e-9 * seconds:
                    found.append(
                        f"{day_name(day * DAY_SECONDS)}, version {number}: {has_lines} lines of {has_seconds:.0f}"
                        f" GPU-seconds are there, {lines} of {seconds:.0f} were written"
                    )
            return tuple(found[:_MOST_PROBLEMS])

    def _writer(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError("read_only", f"store: {self.path} was opened to read; open it to write")
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._one_at_a_time, sqlite_errors(self.path):
            connection = self._writer()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


def _day_of(ledger: FleetLedger, now: float, *, accept_gaps: bool) -> Chunk:
    """The day that is to be closed.

    Raises:
        StoreError: It is none that may be.
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
        why = f"{len(ledger.failures)} questions stayed unanswered, first {first.what}: {first.reason}"
        raise StoreError("not_whole", f"store: {name} is not closed: {why}")
    chunk = next((chunk for chunk in ledger.chunks if is_day(chunk.window)), Chunk(window=window))
    hours, cluster = min(((hours, name) for name, hours in chunk.recorded_hours.items()), default=(0, ""))
    if hours < HOURS_OF_A_DAY and not (accept_gaps and hours):
        where = f" of cluster '{cluster}'" if cluster else ""
        fix = (
            "they may still come; if they will not: store close --accept-gaps" if hours else "there is nothing to close"
        )
        raise StoreError("gaps", f"store: {name} is not closed: {hours} of its 24 hours{where} were recorded; {fix}")
    refuse_nonsense(chunk)
    return chunk


def _refuse_less(connection: sqlite3.Connection, chunk: Chunk) -> None:
    """Refuse what would replace a day by less of it.

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
            where = f" of cluster '{cluster}'" if cluster else ""
            raise StoreError(
                "less",
                f"store: {day_name(chunk.window.start_seconds)} is not closed again: {now} hours{where} are there now,"
                f" the closed day has {hours}; what is closed holds; store close --accept-gaps takes less",
            )

"""Days that are closed: kept as they were found, replaced only for a reason, and never half."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Self

from exporter.errors import StoreError
from exporter.report.fleet.values import DAY_SECONDS, Chunk, FleetLedger
from exporter.report.store import door, lock, look
from exporter.report.store.values import ALL_OF_A_DAY, HOURS_OF_A_DAY, ClosedDay, DayVersion, day_name, is_day
from exporter.report.store.writing import refuse_nonsense, write_version

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
            now: Unix time, told to whoever wants to write meanwhile.
            alone: False is to write beside another process that closes days: to reopen and to forget.

        Raises:
            StoreError: ``missing`` (to read), ``in_use`` (to write), ``damaged`` (set aside; opening once more starts a
                new store), ``newer``, ``older``, ``not_a_store``, ``unreadable``, ``unwritable``, ``read_only``, ...
        """
        path = path.absolute()
        if not write:
            with door.reading(path):
                return cls(path)
        if not alone:
            return cls(path, door.connect_beside(path))
        claim = lock.claim(path, now)
        try:
            return cls(path, door.connect_to_write(path), claim)
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
        """Have a closed day read anew and closed again; until then, what is there holds.

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
        with self._one_at_a_time, door.told(self.path):
            look.shrink(self._writer())

    def closed_days(self) -> tuple[ClosedDay, ...]:
        """Every closed day, oldest first."""
        with door.reading(self.path) as connection:
            return look.closed_days(connection)

    def clusters_before(self, day_seconds: int) -> frozenset[str]:
        """Clusters of the newest closed day before this one."""
        with door.reading(self.path) as connection:
            rows = connection.execute(
                "SELECT cluster FROM capacity JOIN days ON days.version = capacity.version"
                " WHERE day = (SELECT max(day) FROM days WHERE day < ?)",
                (day_seconds // DAY_SECONDS,),
            )
            return frozenset(cluster for (cluster,) in rows)

    def restatements(self, day_seconds: int) -> tuple[DayVersion, ...]:
        """All versions of a day, first to last; empty where it never was closed."""
        with door.reading(self.path) as connection:
            return look.versions(connection, day_seconds // DAY_SECONDS)

    def check(self) -> tuple[str, ...]:
        """What is wrong with the file, one line each; reads all of it."""
        with door.reading(self.path) as connection:
            return look.problems(connection)

    def _writer(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError("read_only", f"store: {self.path} was opened to read; open it to write")
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._one_at_a_time, door.told(self.path):
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
        told = f"{len(ledger.failures)} questions stayed unanswered, first {first.what}: {first.reason}"
        raise StoreError("not_whole", f"store: {name} is not closed: {told}")
    chunk = next((chunk for chunk in ledger.chunks if is_day(chunk.window)), Chunk(window=window))
    hours, cluster = min(((hours, name) for name, hours in chunk.recorded_hours.items()), default=(0, ""))
    if hours < HOURS_OF_A_DAY and not (accept_gaps and hours):
        where = f" of cluster '{cluster}'" if cluster else ""
        mend = (
            "they may still come; if they will not: store close --accept-gaps" if hours else "there is nothing to close"
        )
        raise StoreError("gaps", f"store: {name} is not closed: {hours} of its 24 hours{where} were recorded; {mend}")
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

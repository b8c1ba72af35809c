"""The door to SQLite: opens the store's file to read or to write, and puts its errors into words."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from exporter.errors import StoreError
from exporter.report.store.schema import APPLICATION_ID, STEPS, upgrade

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
def told(path: Path) -> Iterator[None]:
    """Errors of SQLite as this program's.

    Raises:
        StoreError: With the file, what is wrong, and the mend.
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
    with told(path):
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
    with told(path):
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
    with told(path), reading(path):
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
    # A closed day is not read again: it must be on the disk when closing is told.
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
        mend = "make it with: gpu-cost-exporter store backfill, or name another file"
        raise StoreError("missing", f"store: there is no {path}; {mend}") from None
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

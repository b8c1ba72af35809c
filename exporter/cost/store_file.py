"""Opens, checks and migrates the SQLite file of the store, and locks it for one writer."""

import fcntl
import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from exporter.errors import StoreError

APPLICATION_ID = 0x47435831
"""Value in the file's header that distinguishes a store from databases of other programs."""
STEPS: tuple[str, ...] = tuple(
    Path(__file__).with_name(f"store_{version}.sql").read_text(encoding="utf-8") for version in (1, 2, 3)
)
"""Step n converts a file of version n - 1 to version n. A released step never changes."""
_BUSY_SECONDS = 10.0
"""Maximum wait of a query for a short lock of another process, at a checkpoint or a migration."""
_REASONS = {
    "SQLITE_FULL": ("disk_full", "the disk is full: free space there; days stored before are intact"),
    "SQLITE_READONLY": ("read_only", "not writable: give this user the right to write the file and its directory"),
    "SQLITE_CANTOPEN": ("unreadable", "cannot be opened: see that its directory is there, and writable for this user"),
    "SQLITE_PERM": ("unreadable", "no permission: give this user the right to read the file"),
    "SQLITE_BUSY": ("busy", "another program has it locked: end that one, or try again"),
    "SQLITE_LOCKED": ("busy", "another program has it locked: end that one, or try again"),
    "SQLITE_CORRUPT": ("damaged", "damaged; see what is wrong with: gpu-cost-exporter store check"),
    "SQLITE_NOTADB": ("not_a_store", "no store and no database at all; name another file"),
    "SQLITE_IOERR": ("unreadable", "the disk cannot be read or written: see the log of the machine"),
}


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite and of the file to a StoreError.

    Raises:
        StoreError: Contains the file, the problem and the fix.
    """
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        unexpected = ("unexpected", "this is a fault of the program")
        reason, words = next((found for start, found in _REASONS.items() if name.startswith(start)), unexpected)
        raise StoreError(reason, f"store: {path}: {words} ({error})") from error
    except UnicodeEncodeError as error:
        raise StoreError("not_text", f"store: {path}: a label is no valid Unicode: {error.object!r:.80}") from error
    except OSError as error:
        fix = "see that the directory is there, and writable for this user"
        raise StoreError("unwritable", f"store: cannot write {error.filename}: {error.strerror}; {fix}") from None


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection with a snapshot of the store, independent of other writers; for one thread.

    Raises:
        StoreError: The file is missing, is not a store, has another version, or cannot be read.
    """
    with _of_this_version(path, "ro") as connection:
        connection.execute("BEGIN")
        yield connection


@contextmanager
def changing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection within a transaction, for one thread; at the end, all changes or none are on the disk.

    Raises:
        StoreError: As for ``reading``, or the store cannot be written.
    """
    with _of_this_version(path, "rw") as connection, connection:  # the connection commits, or rolls back
        # Prometheus may delete the data of a closed day: it must be on the disk when closing is reported.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        yield connection


def vacuum(path: Path) -> None:
    """Return free space to the disk; needs space for a second copy.

    Raises:
        StoreError: As for ``changing``.
    """
    with _of_this_version(path, "rw") as connection:
        connection.execute("VACUUM")


@contextmanager
def _of_this_version(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    with _errors(path), _connected(path, mode) as connection:
        version = _version(connection)
        if version < len(STEPS):
            fix = "bring it there with: gpu-cost-exporter store vacuum --store FILE, once no older program has it open"
            raise StoreError("older", f"store: {path} is of version {version}, this program reads {len(STEPS)}; {fix}")
        yield connection


@contextmanager
def _connected(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a store of this version or an older one.

    Raises:
        sqlite3.Error: The file is not a database, or cannot be read.
        StoreError: The file is missing, is of another program, or is newer than this program.
    """
    if not path.exists():
        fix = "make it with: gpu-cost-exporter store backfill, or name another file"
        raise StoreError("missing", f"store: there is no {path}; {fix}")
    if path.is_dir():
        raise StoreError("not_a_store", f"store: {path} is a directory; name a file")
    address = f"file:{quote(str(path.absolute()))}?mode={mode}"
    with closing(sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
        version = _version(connection)
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        is_new = not application and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application != APPLICATION_ID and not is_new:
            raise StoreError("not_a_store", f"store: {path} is another program's database; name another file")
        if version > len(STEPS):
            raise StoreError(
                "newer",
                f"store: {path} is of version {version}, this program knows {len(STEPS)}: use the program that wrote"
                " it, or a newer one; the file is unchanged",
            )
        yield connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def prepare(path: Path) -> None:
    """Create the file if it is missing, check it, and upgrade it to this program's version.

    Raises:
        StoreError: The file is not a store, is newer than this program, or cannot be written. A damaged one is renamed.
    """
    with _errors(path):
        if not path.exists():
            path.touch(mode=0o600)  # only its owner may read it; SQLite gives its log the same mode
        try:
            with _connected(path, "rw") as connection:
                problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if problem == "ok":
                    connection.execute("PRAGMA journal_mode = WAL")
                    _upgrade(connection)
        except sqlite3.DatabaseError as error:
            if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_CORRUPT"):
                raise
            problem = str(error)
    if problem != "ok":
        raise _set_aside(path, " ".join(problem.split()))


def _upgrade(connection: sqlite3.Connection) -> None:
    """Upgrade a file to the last version, by all steps or none of them."""
    version = _version(connection)
    if version == len(STEPS):
        return
    with connection:  # commits, or rolls back
        connection.execute("BEGIN IMMEDIATE")
        for step in STEPS[version:]:
            for statement in step.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(STEPS)}")


def _set_aside(path: Path, what: str) -> StoreError:
    """Rename a damaged store and its log, and return the error to raise. No file is deleted."""
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


_MOST_CHARACTERS = 500


@contextmanager
def locked(path: Path, now: float) -> Iterator[None]:
    """Exclude other writers; the kernel releases the lock of a process that has ended.

    Raises:
        StoreError: Another process holds the lock (``in_use``, with its id, machine and time), or locking failed.
    """
    with _errors(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path.with_name(f"{path.name}.lock"), flags, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = lock.read(_MOST_CHARACTERS).strip() or "another process"
            fix = "one may write at a time: end that one, or ask it (any number may read)"
            raise StoreError("in_use", f"store: {path} is being written by {holder}; {fix}") from None
        except OSError as error:
            words = f"store: {path}.lock cannot be locked: {error.strerror}; use a local disk"
            raise StoreError("unlockable", words) from None
        since = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        lock.flush()
        yield

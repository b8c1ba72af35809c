"""Stores the ledger on disk, replacing the file atomically, and manages the locks of the node's only writer."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from exporter.errors import StateError
from exporter.model.records import written

Parsed = TypeVar("Parsed")

VERSION = 3
"""Version of the layout of the file; files of other versions are not read."""
MAX_BYTES = 16 * 1024 * 1024
"""Maximum size of the file. A full ledger with 110 pods has less than 2 MB; a larger file indicates a fault."""
UNSYNCED = "state_unsynced"
"""Reason of a save that a power failure can undo: the file is written, but its directory is not synced."""
SET_ASIDE_LIMIT = 9
"""Maximum number of files that are set aside and kept; a further file replaces the last one."""

_LAYOUT = re.compile(rb'\{"version":([0-9]{1,9}),"sha256":"([0-9a-f]{64})","state":(.*)\}\n', re.DOTALL)
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(slots=True)
class StateFile:
    """A file in its own directory: one line of JSON with version and checksum, mode 0600.

    Only one process at a time may write it: the holder of the ``WriterLock``.
    """

    directory: Path
    name: str = "ledger.json"
    content: str = "the ledger"
    """Name in messages of the data that starts at 0 when the file is lost."""
    _unread_in_the_way: bool = False
    """Whether an unreadable file could not be set aside; a save must then try that again before it replaces it."""

    @property
    def path(self) -> Path:
        """Path of the state file."""
        return self.directory / self.name

    def load(self) -> dict[str, Any] | None:
        """Return the last saved state; ``None`` without a file.

        Raises:
            StateError: The file is damaged (``state_damaged``), of another version (``state_newer``, ``state_older``),
                too large (``state_too_large``) or cannot be read (``state_unreadable``). It has been set aside, and
                the message contains its new path; the next save creates a new file.
        """
        try:
            content = self._read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self.set_aside("state_unreadable", f"cannot be read: {error.strerror}") from error
        if len(content) > MAX_BYTES:
            raise self.set_aside("state_too_large", f"is larger than {MAX_BYTES} bytes")
        layout = _LAYOUT.fullmatch(content)
        if layout is None:
            raise self.set_aside("state_damaged", "is damaged: it is truncated or not a state file")
        version, checksum, body = layout.groups()
        if _checksum(version, body) != checksum:
            raise self.set_aside("state_damaged", "is damaged: its checksum does not match")
        if int(version) != VERSION:
            why = f"is of version {int(version)}, this program reads version {VERSION}; use that one, move it back"
            raise self.set_aside("state_newer" if int(version) > VERSION else "state_older", why)
        try:
            state = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise self.set_aside("state_damaged", f"is damaged: {error}") from error
        if not isinstance(state, dict):
            raise self.set_aside("state_damaged", "is damaged: its state is not an object")
        return state

    def parsed(self, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed | None:
        """Return the result of ``parse`` for the last saved state; ``None`` without a file.

        Raises:
            StateError: As for ``load``, or ``parse`` has failed (``state_damaged``).
        """
        state = self.load()
        try:
            return None if state is None else parse(state)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, OSError) as error:
            raise self.set_aside("state_damaged", f"is damaged: {error!r}") from error

    def save(self, data: Mapping[str, Any]) -> None:
        """Replace the saved state with ``data``; on return it is on disk.

        Blocks until the disk has answered; call it in a thread.

        Raises:
            StateError: The disk is full (``disk_full``) or read-only (``read_only``), the state exceeds the limit
                (``state_too_large``), or the file cannot be written (``state_unwritable``); the old state stays on
                disk. With ``state_unsynced``, the new state is written, but a power failure can undo that.
        """
        content = encode(data)
        if len(content) > MAX_BYTES:
            raise StateError(
                "state_too_large",
                f"state: {len(content)} bytes are more than {MAX_BYTES}; the last smaller state stays in {self.path}",
            )
        if self._unread_in_the_way:
            self._move_away()
        temporary = self.directory / f"{self.name}.new"
        try:
            self._replace(temporary, content)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()  # a partial file would keep a full disk full
            raise _not_saved(self.path, error) from error
        try:
            self._sync_directory()
        except OSError as error:
            words = f"state: {self.path} is written, but may be lost with the power: {error.strerror}"
            raise StateError(UNSYNCED, f"{words}; check the disk of --state-dir") from error

    def try_save(self, data: Mapping[str, Any]) -> StateError | None:
        """Save the state like ``save``, and return the error instead of raising it."""
        try:
            self.save(data)
        except StateError as error:
            return error
        return None

    def _read(self) -> bytes:
        # Non-blocking, because the path may be a pipe without a writer.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a path cannot carry the flags above
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            return file.read(MAX_BYTES + 1)

    def _replace(self, temporary: Path, content: bytes) -> None:
        # Always a new file: an existing one can have another mode, block (a pipe) or be a link.
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a path cannot carry the flags above
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(descriptor)
        temporary.replace(self.path)

    def _sync_directory(self) -> None:
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def set_aside(self, reason: str, what: str) -> StateError:
        """Set the file aside and return the error to report, for callers that cannot use its content.

        Args:
            reason: Reason of the error.
            what: Fault of the file, as the end of a sentence that starts with its path.
        """
        try:
            aside = self._move_away()
        except StateError as error:
            return StateError(reason, f"state: {self.path} {what}; {self.content} starts at 0 in memory; {error}")
        return StateError(reason, f"state: {self.path} {what}; kept as {aside.name}, {self.content} starts at 0")

    def _move_away(self) -> Path:
        """Rename the file.

        Raises:
            StateError: The file cannot be renamed; the next save tries that again first.
        """
        names = [self.directory / f"{self.name}.damaged-{number}" for number in range(1, SET_ASIDE_LIMIT + 1)]
        self._unread_in_the_way = True
        try:
            aside = next((path for path in names if not path.exists()), names[-1])
            self.path.rename(aside)
        except OSError as error:
            raise _not_saved(self.path, error) from error
        self._unread_in_the_way = False
        return aside


def encode(data: Mapping[str, Any]) -> bytes:
    """Return the file's content for a state.

    Raises:
        StateError: A number of the state is not finite.
    """
    try:
        body = to_json(data)
    except ValueError as error:
        raise StateError("state_unwritable", f"state: not saved, a total is not a finite number: {error}") from error
    version = str(VERSION).encode("ascii")
    return b'{"version":%b,"sha256":"%b","state":%b}\n' % (version, _checksum(version, body), body)


def to_json(data: object) -> bytes:
    """Return compact JSON of values and records.

    Raises:
        ValueError: A number is not finite.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False, default=written).encode("ascii")


def _checksum(*parts: bytes) -> bytes:
    """Return a checksum. The checksum of a state includes its version, so that a flipped bit there is detected."""
    return hashlib.sha256(b"\n".join(parts)).hexdigest().encode("ascii")


def _not_saved(path: Path, error: OSError) -> StateError:
    what = f"state: cannot write {path}: {error.strerror or error}"
    if error.errno in _FULL:
        return StateError("disk_full", f"{what}; free space there or move --state-dir")
    if error.errno in _READ_ONLY:
        return StateError("read_only", f"{what}; make --state-dir writable for uid {os.geteuid()}")
    return StateError("state_unwritable", f"{what}; check that --state-dir exists")


_LONGEST_NAME = 200
"""Maximum number of characters of a file name; file systems allow 255."""
_MOST_BYTES = 1024 * 1024
"""Maximum size of a note in bytes; a note with 110 holders has less than 100 KB."""


@dataclass(slots=True, kw_only=True)
class WriterLock:
    """Decides which agent of a node writes its ledger.

    The writer holds a lock on ``<directory>/<node>.lock``, a host path that every agent of the node uses, and on its
    state directory. The kernel releases both locks when the process ends. Without paths, every agent gets the lock.
    """

    node: str = ""
    directory: Path | None = None
    """Host path of the lock file; ``None``: this agent takes no host lock."""
    state_directory: Path | None = None
    """Directory of the state file, which is locked too: two agents there would replace each other's totals."""
    waits_for: str = ""
    """Path that another agent had locked at the last attempt; empty otherwise."""
    warning: str = ""
    """Fault of the host lock and its fix, in one line; empty if the lock works or is not configured."""
    held: bool = False
    """Whether this agent is the writer."""
    _host: int | None = None
    """Descriptor of the lock file."""
    _state: int | None = None
    """Descriptor of the state directory."""

    @property
    def fault(self) -> str:
        """Reason why this agent does not write the ledger, or another may write it too, in one line; or empty."""
        if not self.waits_for:
            return self.warning
        return (
            f"another agent on this node writes the ledger ({self.waits_for} is locked);"
            " this one shows no ledger and takes over when that one ends"
        )

    @property
    def host_held(self) -> bool | None:
        """Whether the writer holds the host lock; ``None`` if this agent does not write or has no host lock."""
        return self._host is not None if self.held and self.directory is not None else None

    @property
    def path(self) -> Path | None:
        """Path of the lock file; ``None`` without one."""
        if self.directory is None:
            return None
        name = quote(self.node, safe="") or "node"
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(name.encode("ascii")).hexdigest()
        return self.directory / f"{name}.lock"

    def take(self) -> bool:
        """Take the locks if no other agent has one of them, and return whether this agent is the writer.

        Never blocks. If the host path cannot be locked, ``warning`` is set and only the lock of the state directory
        counts. A state directory that cannot be locked does not prevent a ledger; saves report the fault.
        """
        if self.held:
            return True
        self.waits_for = self.warning = ""
        try:
            self._host = self._locked_file()
            if self.state_directory is not None:
                with contextlib.suppress(OSError):
                    self._state = _locked(self.state_directory, os.O_RDONLY | os.O_DIRECTORY)
        except _TakenError as error:
            self.waits_for = str(error)
            self.release()
            return False
        self.held = True
        return True

    def release(self) -> None:
        """Release the locks, so that another agent can become the writer."""
        descriptors = self._host, self._state
        self._host = self._state = None
        self.held = False
        for descriptor in descriptors:
            if descriptor is not None:
                os.close(descriptor)

    def note(self, point: object) -> None:
        """Replace the note in the lock file. It is kept after the end of the process, until the next boot.

        Does nothing without a lock file.

        Args:
            point: A record, or ``None`` to remove the note.

        Raises:
            OSError: The note cannot be written.
        """
        if self._host is None:
            return
        body = to_json(point) if point else b""
        content = b"%b %b\n" % (_checksum(body), body) if body else b""
        os.pwrite(self._host, content, 0)
        os.ftruncate(self._host, len(content))

    def noted(self) -> dict[str, Any]:
        """Return the note in the lock file; empty without a complete note."""
        if self._host is None:
            return {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            line, end, _ = os.pread(self._host, _MOST_BYTES, 0).partition(b"\n")
            checksum, _, body = line.partition(b" ")
            if end and checksum == _checksum(body):
                point = json.loads(body)
                return point if isinstance(point, dict) else {}
        return {}

    def _locked_file(self) -> int | None:
        """Lock the file of the host and return its descriptor; ``None`` if that is not possible.

        Raises:
            _TakenError: Another agent has the lock.
        """
        path = self.path
        if path is None:
            return None
        try:
            path.parent.mkdir(mode=0o755, exist_ok=True)
            return _locked(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            self.warning = (
                f"lock: cannot lock {path}: {error.strerror or error}; a second agent on this node would count the "
                f"same time again; make {path.parent} of the host writable for uid {os.geteuid()}, or set --lock-dir"
            )
            return None


class _TakenError(Exception):
    """Another process holds the lock; the message is its path."""


def _locked(path: Path, flags: int) -> int:
    """Open and lock a file or directory without waiting, and return the descriptor.

    Raises:
        _TakenError: Another process holds the lock, or has just replaced the file.
        OSError: The path cannot be opened or locked, or is neither a file nor a directory.
    """
    # Mode 0600, because every process that can open the file can lock it.
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine, there = os.fstat(descriptor), path.stat()
        if not (stat.S_ISREG(mine.st_mode) or stat.S_ISDIR(mine.st_mode)):
            raise OSError(errno.EINVAL, "it is not a file")  # noqa: TRY301 - the descriptor is closed below
        if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
            raise BlockingIOError  # a lock on a removed file excludes no process
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise _TakenError(str(path)) from error
        raise
    return descriptor

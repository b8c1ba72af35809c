"""The locks that make one agent the writer of a node's ledger, and the note that outlives its process."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

_LONGEST_NAME = 200
"""Characters of a file name; a file system allows 255."""
_MOST_BYTES = 1024 * 1024
"""Of a note: one of 110 holders is under 100 KB."""


@dataclass(slots=True, kw_only=True)
class WriterLock:
    """Decides which agent of a node writes its ledger.

    The writer holds a lock on ``<directory>/<node>.lock``, a host path that every agent of the node uses, and on its
    state directory. The kernel releases both locks when the process ends. Without paths the lock is free for everyone.
    """

    node: str = ""
    directory: Path | None = None
    """Host path of the lock file; None: this agent takes no lock of the host."""
    state_directory: Path | None = None
    """Directory of the state file; two agents that save there in turn would replace each other's totals."""
    waits_for: str = ""
    """Path that another agent had locked at the last attempt; empty where there was none."""
    warning: str = ""
    """Why the host lock cannot be used and how to fix it, in one line; empty where it is used or not asked for."""
    held: bool = False
    """Whether this agent is the writer."""
    _host: int | None = None
    """Descriptor of the lock file."""
    _others: list[int] = field(default_factory=list)

    @property
    def path(self) -> Path | None:
        """Path of the lock file; None where there is none."""
        if self.directory is None:
            return None
        name = quote(self.node, safe="") or "node"
        if len(name) > _LONGEST_NAME:
            name = hashlib.sha256(name.encode("ascii")).hexdigest()
        return self.directory / f"{name}.lock"

    def take(self) -> bool:
        """Take the locks if no other agent holds one of them, and return whether this agent is the writer.

        Never blocks. A host path that cannot be locked leaves the state directory's lock alone, with a ``warning``.
        A state directory that cannot be locked is no reason to have no ledger: saving reports what is wrong with it.
        """
        if self.held:
            return True
        self.waits_for = self.warning = ""
        try:
            self._host = self._locked_file()
            if self.state_directory is not None:
                with contextlib.suppress(OSError):
                    self._others.append(_locked(self.state_directory, os.O_RDONLY | os.O_DIRECTORY))
        except _TakenError as error:
            self.waits_for = str(error)
            self.release()
            return False
        self.held = True
        return True

    def release(self) -> None:
        """Let another agent become the writer."""
        descriptors = [*self._others, *([] if self._host is None else [self._host])]
        self._host, self._others, self.held = None, [], False
        for descriptor in descriptors:
            os.close(descriptor)

    def note(self, point: Mapping[str, Any]) -> None:
        """Write a note into the lock file, in place of the former one; it outlives the process but not the boot.

        Without a lock file nothing is written.

        Args:
            point: Values for JSON; an empty one removes the note.

        Raises:
            OSError: The note cannot be written.
        """
        if self._host is None:
            return
        body = json.dumps(point, separators=(",", ":"), allow_nan=False).encode("ascii") if point else b""
        content = b"%b %b\n" % (_checksum(body), body) if body else b""
        os.pwrite(self._host, content, 0)
        os.ftruncate(self._host, len(content))

    def noted(self) -> dict[str, Any]:
        """Return the note in the lock file; empty where there is none, or a process ended while it wrote it."""
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
        """Lock the host's file and return its descriptor; None where that is not possible.

        Raises:
            _TakenError: Another agent holds it.
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
        OSError: It cannot be opened or locked.
    """
    # Only the owner may open the file: whoever can open it can lock it.
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = _is_file_or_directory(descriptor, path)
    except BlockingIOError as error:
        os.close(descriptor)
        raise _TakenError(str(path)) from error
    except OSError:
        os.close(descriptor)
        raise
    if not is_there:
        os.close(descriptor)
        raise _TakenError(str(path))
    return descriptor


def _is_file_or_directory(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path: a lock on a removed file keeps nobody out.

    Raises:
        OSError: It is neither a file nor a directory.
    """
    mine, there = os.fstat(descriptor), path.stat()
    if not (stat.S_ISREG(mine.st_mode) or stat.S_ISDIR(mine.st_mode)):
        raise OSError(errno.EINVAL, "it is not a file")
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode("ascii")

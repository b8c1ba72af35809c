"""One writer at a time: a lock beside the store that the kernel lets go of, however its holder ends."""

import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from exporter.errors import StoreError

_MOST_BYTES = 500


def claim(path: Path, now: float) -> int:
    """Lock the store for this process; the descriptor to close is the lock.

    Raises:
        StoreError: Another process has it (``in_use``), told by its id, machine and time; or it cannot be locked.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        mend = "see that the directory is there, and writable for this user"
        raise StoreError("unwritable", f"store: cannot write {lock}: {error.strerror}; {mend}") from None
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

"""How the files of a process in ``/proc`` are read, and what was read of it remembered."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Found = TypeVar("Found")

_MANY = 1024
"""Processes; more than those of a node's GPUs are at a time."""
# Behind the last ")" of /proc/<pid>/stat comes field 3, so field 22 is the twentieth word there.
_START_TIME_WORD = 19


def content(path: str) -> str:
    """Read a file, with what is no UTF-8 replaced.

    Raises:
        OSError: It cannot be read; of a process that has ended it is gone.
    """
    # Asked for every process with every sample: a third of what pathlib takes.
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
        return (file.read() or b"").decode("utf-8", "replace")


def name_and_start(directory: str) -> tuple[str, str | None]:
    """Read a process' own name and when it started, in clock ticks; it tells processes of one pid apart.

    Args:
        directory: ``/proc/<pid>``.

    Returns:
        An empty name and ``None`` where the process cannot be seen.
    """
    try:
        before, _, after = content(f"{directory}/stat").rpartition(")")
    except OSError:
        return "", None
    words = after.split()
    return before.partition("(")[2], words[_START_TIME_WORD] if len(words) > _START_TIME_WORD else None


def own_name(proc_root: str, pid: int) -> str:
    """Read a process' own name, of which the kernel keeps 15 characters; empty where it cannot be seen."""
    return name_and_start(f"{proc_root}/{pid}")[0]


class Remembered(Generic[Found]):
    """What was read of processes, by pid and start time, as pids are used again.

    Who has not been asked for while a thousand others were is forgotten: that has ended.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
        read: From a process' directory and its own name to what is known of it; may raise OSError.
    """

    def __init__(self, proc_root: Path, read: Callable[[str, str], Found]) -> None:
        self._proc_root = str(proc_root)
        self._read = read
        self._known: dict[int, tuple[str, Found]] = {}
        self._before: dict[int, tuple[str, Found]] = {}

    def look(self, pid: int) -> Found | None:
        """Look up a process.

        Args:
            pid: In the PID namespace of ``proc_root``.

        Returns:
            What is known of it; of one that has ended what was known, as what the driver says of it is of the time
            before. ``None`` for one that cannot be seen: another PID namespace, or gone before it was ever looked up.
        """
        directory = f"{self._proc_root}/{pid}"
        name, started = name_and_start(directory)
        known = self._known.get(pid)
        if known is None and (known := self._before.pop(pid, None)):
            self._remember(pid, known)
        if known and started in {None, known[0]}:
            return known[1]
        if started is None:
            return None
        try:
            found = self._read(directory, name)
        except OSError:
            return None
        self._remember(pid, (started, found))
        return found

    def lives(self, pid: int) -> bool:
        """Return whether the process that was last looked up under a pid still exists."""
        known = self._known.get(pid) or self._before.get(pid)
        _, started = name_and_start(f"{self._proc_root}/{pid}")
        return started is not None and (known is None or known[0] == started)

    def forget(self, pid: int) -> None:
        """Look at a process afresh next time: it may be moved to another cgroup yet."""
        self._known.pop(pid, None)
        self._before.pop(pid, None)

    def _remember(self, pid: int, known: tuple[str, Found]) -> None:
        if len(self._known) >= _MANY and pid not in self._known:
            self._before, self._known = self._known, {}
        self._known[pid] = known

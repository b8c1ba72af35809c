"""What processes cost, as the kernel counts it: CPU time to the nanosecond, proportional memory."""

import time
from collections.abc import Iterable
from pathlib import Path


def family(pid: int) -> tuple[int, ...]:
    """Return ``pid`` and all its living descendants, the parent first."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(directory.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(directory.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, ()))
    return tuple(found)


def cpu(pids: Iterable[int]) -> float:
    """Return user and system time so far of the processes in seconds, of ended threads too."""
    return sum(_cpu_seconds(pid) for pid in pids)


def pss_bytes(pid: int) -> int:
    """Return the proportional set size: shared pages are divided among their users.

    Raises:
        OSError: the process is gone or not ours.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; empty when the process is gone. The name may hold blanks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid() returns for a process
    except OSError:  # it is gone
        return 0.0

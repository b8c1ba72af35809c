"""What processes cost, as the kernel counts it: CPU time to the nanosecond where it tells, proportional memory."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """User and system time so far of a group of processes, by two counters."""

    exact_seconds: float
    """Nanosecond counters of the living threads; an ended thread takes its time along."""
    ticks_seconds: float
    """Hundredths of a second, ended threads included."""
    rounding_seconds: float
    """How far the second counter may lag by rounding."""


def cpu(pids: Iterable[int]) -> Cpu:
    """Read both counters of the processes; one that is gone counts 0."""
    exact = ticks = rounding = 0.0
    for pid in pids:
        rounding += 1 / _TICKS_PER_SECOND
        fields = _stat(pid)
        ticks += (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND if fields else 0.0
        exact += sum(_nanoseconds(path) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    return Cpu(exact_seconds=exact, ticks_seconds=ticks, rounding_seconds=rounding)


def spent_seconds(before: Cpu, after: Cpu) -> float:
    """Return the CPU time between two readings: the exact one, unless it misses what ended threads used."""
    exact = after.exact_seconds - before.exact_seconds
    ticks = after.ticks_seconds - before.ticks_seconds
    return exact if exact >= ticks - before.rounding_seconds else ticks


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


def _nanoseconds(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0

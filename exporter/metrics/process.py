"""Collects memory, CPU and garbage collection of this process."""

import contextlib
import gc
import os
import resource
from pathlib import Path

from exporter.metrics import catalog
from exporter.metrics.text_format import NO_LABELS, Family, Labels, labels

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_GC_NAMES = {"collections": "collections", "objects_collected": "collected", "objects_uncollectable": "uncollectable"}


class ProcessMetrics:
    """Reads ``/proc/self`` and the garbage collector's counters when asked."""

    def families(self) -> list[Family]:
        """The families that the catalogue lists, in its order; those of ``/proc`` only where there is one."""
        values: dict[str, dict[Labels, float]] = {
            f"python_gc_{name}_total": {
                labels(("generation", str(number))): float(of[key]) for number, of in enumerate(gc.get_stats())
            }
            for name, key in _GC_NAMES.items()
        }
        with contextlib.suppress(OSError):
            values |= {f"process_{name}": {NO_LABELS: value} for name, value in _of_proc().items()}
        return [
            Family(name=one.name, kind=one.kind, help=one.help, values=values[one.name])
            for one in catalog.PROCESS
            if one.name in values
        ]


def _of_proc() -> dict[str, float]:
    """Read the figures of this process.

    Raises:
        OSError: There is no ``/proc``.
    """
    words = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    booted = float(Path("/proc/stat").read_bytes().partition(b"btime ")[2].split()[0])
    return {
        "cpu_seconds_total": (int(words[11]) + int(words[12])) / _TICKS_PER_SECOND,
        "resident_memory_bytes": float(words[21]) * resource.getpagesize(),
        "virtual_memory_bytes": float(words[20]),
        "start_time_seconds": booted + int(words[19]) / _TICKS_PER_SECOND,
        "open_fds": float(sum(1 for _ in Path("/proc/self/fd").iterdir())),
        "max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }

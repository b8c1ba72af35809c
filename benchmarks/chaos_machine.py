"""The machine under chaos: a wall clock with steps, a disk that hangs, and the resource use of an agent."""

import contextlib
import mmap
import os
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from measure import family

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

import stub_support  # noqa: E402 - lies with the tests, which the line above makes importable

_CONTROL_BYTES = 16


def built_clock(directory: Path) -> Path | None:
    """Build the library with a clock that can be set and a disk that can hang; ``None`` without a compiler."""
    if stub_support.compiler() is None:
        return None
    place = directory / "chaos_clock.so"
    stub_support.compiled(place, [HERE / "chaos_clock.c"], "-fPIC", "-shared", "-ldl")
    return place


class Machine:
    """Clock and disk of one node; a context manager.

    Args:
        directory: Directory of the node.
        clock: The library, if it exists.
    """

    def __init__(self, directory: Path, clock: Path | None) -> None:
        path = directory / "control"
        path.write_bytes(bytes(_CONTROL_BYTES))
        with path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL_BYTES)
        preload = {"LD_PRELOAD": str(clock)} if clock else {}
        self.environment = {**os.environ, **preload, "CHAOS_CONTROL": str(path)}
        """Environment that places a process on this machine."""

    def __enter__(self) -> Self:
        """Return the machine."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the disk."""
        self.hang(hangs=False)
        self._control.close()

    def step(self, seconds: float) -> None:
        """Set the offset of the wall clock in seconds."""
        self._control[0:8] = struct.pack("q", int(seconds * 1e9))

    def hang(self, *, hangs: bool) -> None:
        """Block every fsync, or release all of them."""
        self._control[8:16] = struct.pack("q", int(hangs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Resource use of an agent and its children."""

    threads: int
    descriptors: int
    children: int
    files: int
    """Files in the state directory."""
    series: int
    """Series of live objects."""
    memory_kib: int
    """Memory of all its processes; shared memory counts once (PSS)."""


def weigh(pid: int, state: Path, series: int) -> Weight | None:
    """Return the resource use of the agent now; ``None`` if it has ended.

    Args:
        pid: Process id of the agent.
        state: Its state directory.
        series: Number of series of live objects on its newest page.
    """
    try:
        own = Path(f"/proc/{pid}")
        processes = family(pid)
        return Weight(
            threads=len(list((own / "task").iterdir())),
            descriptors=len(list((own / "fd").iterdir())),
            children=len(processes) - 1,
            files=len(list(state.iterdir())),
            series=series,
            memory_kib=sum(map(_pss_kib, processes)),
        )
    except OSError:
        return None


def _pss_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended; 0 means no process."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

"""The machine under chaos: a disk of its own that fills up, turns read-only and hangs, and a wall clock that is set."""

import contextlib
import errno
import mmap
import os
import shutil
import signal
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from chaos_schedule import CLOCK_LIKE, Act
from measure import family

HERE = Path(__file__).parent
_DISK_BYTES = 512 * 1024
_CONTROL_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What this machine has."""

    clock: Path | None
    """Library with a wall clock that can be set and a disk that can hang; ``None`` without a compiler."""
    may_mount: bool

    @property
    def cannot(self) -> frozenset[str]:
        """Kinds that are left out here."""
        without: set[str] = set() if self.clock else {*CLOCK_LIKE}
        return frozenset(without if self.may_mount else without | {Act.DISK_FULL, Act.DISK_READ_ONLY})


def tools(directory: Path) -> Tools:
    """Build the clock into ``directory`` and see whether a file system can be mounted there."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    clock = directory / "chaos_clock.so" if compiler else None
    if compiler:
        command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared"]
        subprocess.run([*command, str(HERE / "chaos_clock.c"), "-o", str(clock), "-ldl"], check=True)
    probe = directory / "probe"
    probe.mkdir()
    mounted = os.geteuid() == 0 and _mount(probe)
    if mounted:
        subprocess.run(["umount", str(probe)], check=True)
    return Tools(clock=clock, may_mount=mounted)


def _mount(directory: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(directory)]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


class Machine:
    """Disk and clock of one node; a context.

    Args:
        directory: Of the node.
        at_hand: What this machine has.
    """

    def __init__(self, directory: Path, at_hand: Tools) -> None:
        self._directory = directory
        self._tools = at_hand
        self._full = 0

    @property
    def state(self) -> Path:
        """The state directory: a file system of its own where that can be."""
        return self._directory / "state"

    @property
    def environment(self) -> dict[str, str]:
        """What puts a process on this machine."""
        preload = {"LD_PRELOAD": str(self._tools.clock)} if self._tools.clock else {}
        return {**os.environ, **preload, "CHAOS_CONTROL": str(self._directory / "control")}

    def __enter__(self) -> Self:
        """Make the disk and start the clock."""
        self.state.mkdir()
        if self._tools.may_mount and not _mount(self.state):
            raise OSError("cannot mount a file system any more")
        path = self._directory / "control"
        path.write_bytes(bytes(_CONTROL_BYTES))
        with path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), _CONTROL_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        """Take the disk away."""
        self.hang(hangs=False)
        self._control.close()
        if self._tools.may_mount:
            subprocess.run(["umount", "-l", str(self.state)], check=False, capture_output=True)

    def step(self, seconds: float) -> None:
        """Set the wall clock to be off by so much from now on."""
        self._control[0:8] = struct.pack("q", int(seconds * 1e9))

    def hang(self, *, hangs: bool) -> None:
        """Let no fsync return, or let them go on."""
        self._control[8:16] = struct.pack("q", int(hangs))

    def remount(self, *, writable: bool) -> None:
        """Make the disk read-only, or writable again; busy with an open file it stays as it is."""
        mode = "rw" if writable else "ro"
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.state)], check=False, capture_output=True)
        if writable and not self._full:
            self._make_room()

    def fill(self) -> None:
        """Leave no room on the disk."""
        self._full += 1
        try:
            with (self.state / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EROFS):
                raise

    def empty(self) -> None:
        """Make room again; on a disk that is read-only now, as soon as it is not."""
        self._full -= 1
        if not self._full:
            self._make_room()

    def _make_room(self) -> None:
        with contextlib.suppress(OSError):
            (self.state / "ballast").unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What an agent and its children take."""

    threads: int
    descriptors: int
    children: int
    files: int
    """In the state directory."""
    series: int
    """Of what is there."""
    memory_kib: int
    """Of all its processes; what they share counts once (PSS)."""


def weigh(pid: int, state: Path, series: int) -> Weight | None:
    """What the agent takes now; ``None`` where it is gone.

    Args:
        pid: Of the agent.
        state: Its state directory.
        series: How many of its newest page's tell of what is there.
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
    """Send a signal to a process that may be gone; 0 is none."""
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

"""Real cgroups of pods for tests: a containerd of our own with real containers, and cgroups made by hand.

What the kernel refuses is skipped with its reason.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools" / "bin"
SEARCH = f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"
PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2", "runc", "busybox")
PATIENCE_SECONDS = 30.0
SHIM_DIRECTORY = Path("/run/containerd")
"""Where shims have their sockets, whatever containerd's state directory is."""

# Nothing but containers: the plugins left out want images, disks or a network.
_CONFIG = """version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{directory}/c.sock"
"""


def lacking() -> str:
    """What a real container needs and is not here; empty when all is there."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in PROGRAMS if shutil.which(program, path=SEARCH) is None]
    return f"needs {', '.join(missing)}: make install" if missing else ""


@dataclass(kw_only=True)
class Containerd:
    """A running containerd that is nobody else's; containers in it are named by their 64 hex digits."""

    directory: Path
    containers: list[str] = field(default_factory=list)

    def run(self, cgroup: str, container: str) -> int:
        """Start a container that sleeps, in the cgroup of that path; return its process id on the host."""
        pid_file = self.directory / f"{container}.pid"
        options = ["--detach", "--null-io", "--pid-file", str(pid_file), "--cgroup", cgroup]
        options += ["--runc-binary", _program("runc"), "--runc-root", str(self.directory / "runc")]
        command = ["/bin/busybox", "sleep", "3600"]
        self.containers.append(container)
        done = self.ctr("run", *options, "--rootfs", str(self.directory / "tree"), container, *command)
        if done.returncode:
            pytest.skip(f"no container runs here: {done.stderr.strip()}")
        return int(pid_file.read_text(encoding="ascii"))

    def remove(self, container: str) -> None:
        """Kill a container and forget it."""
        self.ctr("task", "rm", "--force", container)
        self.ctr("container", "rm", container)
        self.containers.remove(container)

    def ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ctr on this containerd, in the namespace that the kubelet's containers are in."""
        command = [_program("ctr"), "--address", str(self.directory / "c.sock"), "--namespace", "k8s.io", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=_environment())


@contextlib.contextmanager
def running_containerd(directory: Path) -> Iterator[Containerd]:
    """Start containerd with everything it keeps below ``directory``; its containers end with the block."""
    tree = directory / "tree" / "bin"
    tree.mkdir(parents=True)
    shutil.copy(_program("busybox"), tree / "busybox")
    config = directory / "config.toml"
    config.write_text(_CONFIG.format(directory=directory), encoding="utf-8")
    shims_were_here = SHIM_DIRECTORY.exists()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [_program("containerd"), "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
        )
    containerd = Containerd(directory=directory)
    try:
        _wait_until_it_answers(containerd, process)
        yield containerd
    finally:
        for container in list(containerd.containers):
            containerd.remove(container)
        process.terminate()
        process.wait(timeout=PATIENCE_SECONDS)
        if not shims_were_here:
            remove_empty(SHIM_DIRECTORY)


def _wait_until_it_answers(containerd: Containerd, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if containerd.ctr("version").returncode == 0:
            return
        time.sleep(0.05)
    tail = (containerd.directory / "log").read_text(encoding="utf-8", errors="replace")[-500:]
    pytest.skip(f"containerd does not come up: {tail}")


def hierarchies() -> dict[str, Path]:
    """Mount points of the cgroup hierarchies that a process can be put into, by version: ``v1``, ``v2``."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        # cpuset takes no process before its cores and memory nodes are set; memory may be where this test is confined.
        if kind == "cgroup2" or (kind == "cgroup" and "cpuset" not in options and "memory" not in options):
            mount = Path(before.split()[4])
            if os.access(mount, os.W_OK):
                found.setdefault("v2" if kind == "cgroup2" else "v1", mount)
    if not found:
        pytest.skip("no cgroup can be made here: no hierarchy is mounted for writing")
    return found


@contextlib.contextmanager
def made_cgroup(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup ``path`` of a hierarchy, made for the block; whoever was put into it must have left by its end."""
    cgroup = mount / path.lstrip("/")
    try:
        cgroup.mkdir(parents=True, exist_ok=True)
        yield cgroup
    finally:
        remove_cgroup(path)


@contextlib.contextmanager
def sleeper(*prefix: str) -> Iterator[int]:
    """A process that does nothing; ``prefix`` is a command that becomes it."""
    process = subprocess.Popen([*prefix, "sleep", "3600"], stdin=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def put(pid: int, cgroup: Path) -> None:
    """Move a process into a cgroup."""
    try:
        (cgroup / "cgroup.procs").write_text(str(pid), encoding="ascii")
    except OSError as error:
        pytest.skip(f"no process can be put into {cgroup}: {error}")


def within(cgroup: Path) -> tuple[str, ...]:
    """Command prefix that moves itself into a cgroup and from there into a cgroup namespace of its own."""
    script = 'echo $$ > "$0/cgroup.procs" && exec unshare --cgroup "$@"'
    return ("sh", "-c", script, str(cgroup))


def remove_cgroup(path: str) -> None:
    """Remove a cgroup from every hierarchy, and those above it that nobody else uses."""
    parts = path.strip("/").split("/")
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    for line in mounts:
        before, _, after = line.partition(" - ")
        if not after.startswith("cgroup"):
            continue
        for count in range(len(parts), 0, -1):
            with contextlib.suppress(OSError):  # not here, or in use
                Path(before.split()[4]).joinpath(*parts[:count]).rmdir()


def remove_empty(directory: Path) -> None:
    """Remove a directory whose folders hold no file."""
    for folder, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _program(name: str) -> str:
    return shutil.which(name, path=SEARCH) or name


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH}

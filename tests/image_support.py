"""The image and its containers, and real cgroups of pods from a containerd."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from agent_support import PATIENCE_SECONDS, ROOT, AgentProcess

BASE = ROOT / ".tools" / "image_base" / "base.tar"
CACHE = ROOT / ".cache" / "image"
PROGRAMS = ("podman", "buildah", "runc")
TARGETS = ("agent", "service")
NAME = "localhost/gpu-cost-exporter"
NOBODY = "65534:65534"
SOCKET_DIRECTORY = "/var/lib/kubelet/pod-resources"
_LISTENING = re.compile(r"listening on \S*:(\d+)")
# Wheels for every glibc version of possible bases.
_GLIBC = ("manylinux2014", "manylinux_2_17", "manylinux_2_28")


def lacking() -> str:
    """Return the missing requirements for building and running an image; empty without any."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or not BASE.exists():
        return f"needs {', '.join([*missing, *([] if BASE.exists() else [str(BASE.relative_to(ROOT))])])}: make install"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A separate storage of images and containers, with a storage driver that works on this machine."""

    root: Path
    driver: str

    def run(self, program: str, *arguments: str, timeout: float = 300) -> str:
        """Run podman or buildah on it; return the output."""
        done = subprocess.run(
            [*self.command(program), *arguments], capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT
        )
        assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stdout[-1000:]}{done.stderr[-3000:]}"
        return done.stdout

    def command(self, program: str) -> list[str]:
        """Return the first words of each of their commands."""
        return [program, "--root", str(self.root), "--runroot", f"{self.root}.run", "--storage-driver", self.driver]

    def has(self, image: str) -> bool:
        """Return whether an image exists."""
        done = subprocess.run([*self.command("podman"), "image", "exists", image], check=False, capture_output=True)
        return done.returncode == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Both images of this working tree."""

    storage: Storage
    base: str
    agent: str
    service: str

    def facts(self, image: str) -> dict[str, object]:
        """Return podman's description of an image."""
        (facts,) = json.loads(self.storage.run("podman", "image", "inspect", image))
        return dict(facts)

    def size_bytes(self, image: str) -> int:
        """Return its unpacked size, including its base."""
        size = self.facts(image)["Size"]
        assert isinstance(size, int)
        return size


def build() -> Images:
    """Build missing images: the name of an image is a digest of its content."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        base = f"localhost/stand-in-user:{BASE.stat().st_mtime_ns}"
        storage = _storage(base)
        digest = _content()
        names = {target: f"{NAME}:{digest}-{target}" for target in TARGETS}
        if not all(storage.has(name) for name in names.values()):
            _build(storage, base, names)
        return Images(storage=storage, base=base, agent=names["agent"], service=names["service"])


def _storage(base: str) -> Storage:
    """Use overlays if the kernel and this file system support them: they are three times as fast."""
    for driver in ("overlay", "vfs"):
        storage = Storage(root=CACHE / driver, driver=driver)
        # The storage can be that of a working tree that was moved, which podman refuses.
        for _ in range(2):
            if storage.has(base):
                return storage
            # As in some bases: the build must not depend on the user of its base.
            command = [*storage.command("podman"), "import", "--quiet", "--change", "USER 1001", str(BASE), base]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return storage
            shutil.rmtree(storage.root, ignore_errors=True)
            shutil.rmtree(f"{storage.root}.run", ignore_errors=True)
    pytest.skip("podman can keep no image here, neither in overlays nor in plain directories")


def _content() -> str:
    """Return a digest of every file in the image: those of .dockerignore, which names the input of the build."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    given = [ROOT / line[1:] for line in lines if line.startswith("!")]
    files = [ROOT / "Dockerfile", BASE]
    for path in given:
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    digest = hashlib.sha256()
    for file in sorted(set(files)):
        if "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(ROOT)}\0".encode())
            digest.update(file.read_bytes() if file != BASE else str(file.stat().st_mtime_ns).encode())
    return digest.hexdigest()[:12]


def _build(storage: Storage, base: str, names: Mapping[str, str]) -> None:
    wheels = _wheels()
    # The build uses this folder in place of an index.
    settings = CACHE / "pip.conf"
    settings.write_text("[global]\nno-index = true\nfind-links = /wheelhouse\n", encoding="utf-8")
    # Layers are kept for the second image, unless each is a full copy.
    options = ["--isolation", "chroot", *(["--layers"] if storage.driver == "overlay" else [])]
    options += ["--volume", f"{wheels}:/wheelhouse:ro", "--volume", f"{settings}:/etc/pip.conf:ro"]
    words = {
        "BUILDER": shlex.join(storage.command("buildah")),
        "BUILD_OPTIONS": shlex.join(options),
        "BASE_IMAGE": base,
        "IMAGE": NAME,
    }
    command = ["make", "image", *(f"{key}={value}" for key, value in words.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-3000:]}"
    for target, name in names.items():
        suffix = "" if target == "agent" else f"-{target}"
        storage.run("podman", "tag", f"{NAME}{suffix}:{version()}", name)
    kept = {*names.values(), base}
    listed = storage.run("podman", "images", "--format", "{{.Repository}}:{{.Tag}}").split()
    old = [name for name in listed if name not in kept and "<none>" not in name]
    if old:
        storage.run("podman", "rmi", "--force", *old)
    storage.run("podman", "image", "prune", "--force")


def unmount() -> None:
    """Unmount the layers that podman and buildah leave mounted: a working tree with mounts cannot be deleted."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    mine = [mount for mount in mounts if Path(mount).is_relative_to(CACHE)]
    if mine:
        # The deepest first; a mount that another process uses is released when that process ends.
        subprocess.run(["umount", "--lazy", *sorted(mine, reverse=True)], check=True, capture_output=True)


def version() -> str:
    """Return the version of the program."""
    text = (ROOT / "exporter" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def _wheels() -> Path:
    """Return a folder with the wheel of every requirement, for the base's Python; kept until a requirement changes."""
    names = ("build", "runtime")
    lists = [ROOT / "requirements" / f"{name}.txt" for name in names]
    python = _base_python()
    digest = hashlib.sha256(python.encode() + b"".join(path.read_bytes() for path in lists)).hexdigest()[:12]
    folder = CACHE / f"wheels-{digest}"
    if folder.exists():
        return folder
    part = CACHE / "wheels.part"
    shutil.rmtree(part, ignore_errors=True)
    for old in CACHE.glob("wheels-*"):
        shutil.rmtree(old)
    options = ["--quiet", "--require-hashes", "--only-binary", ":all:", "--implementation", "cp"]
    options += ["--python-version", python, "--dest", str(part)]
    for glibc in _GLIBC:
        options += ["--platform", f"{glibc}_{platform.machine()}"]
    for path in lists:
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "-r", str(path)], check=True, timeout=600)
    part.rename(folder)
    return folder


def _base_python() -> str:
    listed = subprocess.run(["tar", "-tf", str(BASE)], check=True, capture_output=True, text=True).stdout
    (found,) = set(re.findall(r"^\./usr/bin/python(3\.\d+)$", listed, re.MULTILINE))
    return str(found)


@dataclass
class Container(AgentProcess):
    """A running container of one of the images, in the host's network."""

    storage: Storage | None = None
    name: str = ""
    image: str = ""
    answered: threading.Event = field(default_factory=threading.Event)

    def pid(self) -> int:
        """Return the host's id of its first process."""
        assert self.storage is not None
        return int(self.storage.run("podman", "inspect", "--format", "{{.State.Pid}}", self.name))

    def said(self, words: str) -> str:
        """Wait for the first line of its log with these words; return it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if words in line:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"not in the log: {words}; log: {self.lines}")

    def check(self) -> tuple[int, str]:
        """Run the image's health check; return exit code and output."""
        assert self.storage is not None
        said = self.storage.run("podman", "image", "inspect", "--format", "{{json .HealthCheck}}", self.image)
        kind, *words = json.loads(said)["Test"]
        assert kind == "CMD"
        done = subprocess.run(
            [*self.storage.command("podman"), "exec", self.name, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, (done.stdout + done.stderr).strip()


def command(storage: Storage, image: str, words: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the command of a container with the manifests' settings: read-only, no capabilities, no new privileges."""
    # Limits that every machine allows; cgroups without systemd, which may be missing; the network of the host.
    here = ["--runtime", "runc", "--cgroup-manager", "cgroupfs", "--log-level", "error"]
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--network", "host"]
    strict = ["--read-only", "--read-only-tmpfs=false", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    start = [*storage.command("podman"), *here, "run", "--rm", "--no-healthcheck", *limits, *strict]
    return [*start, *options, image, *words]


def output(images: Images, image: str, *words: str, options: Sequence[str] = ()) -> str:
    """Return the output of a container that must end with code 0."""
    whole = command(images.storage, image, words, options)
    done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def running(
    images: Images,
    image: str,
    *words: str,
    mounts: Mapping[str | Path, str] | None = None,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Container]:
    """Start a container and wait until it listens; it ends with the block.

    Args:
        images: Images of this working tree.
        image: Name of the image.
        words: Arguments of the program in it.
        mounts: Place in the container, with ``:ro`` for read-only, by path on the host.
        env: Environment in the container.
        options: Further options of podman run.
    """
    name = f"test-{secrets.token_hex(6)}"
    more = ["--name", name, *options]
    for path, place in (mounts or {}).items():
        more += ["--volume", f"{path}:{place}"]
    for key, value in (env or {}).items():
        more += ["--env", f"{key}={value}"]
    process = subprocess.Popen(
        command(images.storage, image, words, more), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    container = Container(process, storage=images.storage, name=name, image=image)
    reader = threading.Thread(target=_read, args=(container,), daemon=True)
    reader.start()
    try:
        assert container.answered.wait(PATIENCE_SECONDS), "it does not listen"
        assert container.port, f"it ended: {container.lines}"
        yield container
    finally:
        if process.poll() is None:
            images.storage.run("podman", "kill", "--signal", "KILL", name)
            process.wait(timeout=30)
        reader.join(timeout=5)
        if process.stderr is not None:
            process.stderr.close()


def _read(container: Container) -> None:
    assert container.process.stderr is not None
    for line in container.process.stderr:
        container.lines.append(line.rstrip())
        if found := _LISTENING.search(line):
            container.port = int(found[1])
            container.answered.set()
    container.answered.set()


ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools" / "bin"
SEARCH = f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}"
CONTAINERD_PROGRAMS = ("containerd", "ctr", "containerd-shim-runc-v2", "runc", "busybox")
CONTAINERD_PATIENCE_SECONDS = 30.0
SHIM_DIRECTORY = Path("/run/containerd")
"""Directory of the sockets of shims, for every state directory of containerd."""

# Containers only: the disabled plugins need images, disks or a network.
_CONFIG = """version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{directory}/c.sock"
"""


def lacking_containerd() -> str:
    """Return the missing requirements of a real container; empty without any."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [program for program in CONTAINERD_PROGRAMS if shutil.which(program, path=SEARCH) is None]
    return f"needs {', '.join(missing)}: make install" if missing else ""


@dataclass(kw_only=True)
class Containerd:
    """A separate running containerd; its containers are named by their 64 hex digits."""

    directory: Path
    containers: list[str] = field(default_factory=list)

    def run(self, cgroup: str, container: str) -> int:
        """Start a container that sleeps, in the given cgroup; return its process id on the host."""
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
        """Kill and remove a container."""
        self.ctr("task", "rm", "--force", container)
        self.ctr("container", "rm", container)
        self.containers.remove(container)

    def ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ctr on this containerd, in the namespace of the kubelet's containers."""
        command = [_program("ctr"), "--address", str(self.directory / "c.sock"), "--namespace", "k8s.io", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=_environment())


@contextlib.contextmanager
def running_containerd(directory: Path) -> Iterator[Containerd]:
    """Start containerd with all its files below ``directory``; its containers end with the block."""
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
        process.wait(timeout=CONTAINERD_PATIENCE_SECONDS)
        if not shims_were_here:
            remove_empty(SHIM_DIRECTORY)


def _wait_until_it_answers(containerd: Containerd, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + CONTAINERD_PATIENCE_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if containerd.ctr("version").returncode == 0:
            return
        time.sleep(0.05)
    tail = (containerd.directory / "log").read_text(encoding="utf-8", errors="replace")[-500:]
    pytest.skip(f"containerd does not come up: {tail}")


def hierarchies() -> dict[str, Path]:
    """Return mount points of the cgroup hierarchies that accept a process, by version: ``v1``, ``v2``."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        # cpuset accepts no process before its cores and memory nodes are set; memory may confine this test.
        if kind == "cgroup2" or (kind == "cgroup" and "cpuset" not in options and "memory" not in options):
            mount = Path(before.split()[4])
            if os.access(mount, os.W_OK):
                found.setdefault("v2" if kind == "cgroup2" else "v1", mount)
    if not found:
        pytest.skip("no cgroup can be made here: no hierarchy is mounted for writing")
    return found


@contextlib.contextmanager
def made_cgroup(mount: Path, path: str) -> Iterator[Path]:
    """Make the cgroup ``path`` of a hierarchy for the block; processes in it must have left by its end."""
    cgroup = mount / path.lstrip("/")
    try:
        cgroup.mkdir(parents=True, exist_ok=True)
        yield cgroup
    finally:
        remove_cgroup(path)


@contextlib.contextmanager
def sleeper(*prefix: str) -> Iterator[int]:
    """Start a process that does nothing; ``prefix`` is a command that becomes it."""
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
    """Return a command prefix that moves itself into a cgroup and from there into a new cgroup namespace."""
    script = 'echo $$ > "$0/cgroup.procs" && exec unshare --cgroup "$@"'
    return ("sh", "-c", script, str(cgroup))


def remove_cgroup(path: str) -> None:
    """Remove a cgroup from every hierarchy, and unused ones above it."""
    parts = path.strip("/").split("/")
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    for line in mounts:
        before, _, after = line.partition(" - ")
        if not after.startswith("cgroup"):
            continue
        for count in range(len(parts), 0, -1):
            with contextlib.suppress(OSError):  # missing, or in use
                Path(before.split()[4]).joinpath(*parts[:count]).rmdir()


def remove_empty(directory: Path) -> None:
    """Remove a directory without any file below it."""
    for folder, _, _ in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _program(name: str) -> str:
    return shutil.which(name, path=SEARCH) or name


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH}

"""The simulated part of a node's filesystem: ``/proc/<pid>`` of its processes, and pod-log directories."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from exporter.errors import ConfigError
from gpu_simulator.truth import NodeTruth, ProcessTruth

MARK = "simulated"
"""Name of the file that marks a directory as ours: without it nothing in a directory is ever removed."""

_RUNNING = "Running"
_KTHREADD = ProcessTruth(pid=2, start_ticks=0, comm="kthreadd", cgroup="0::/\n", memory_used_bytes=0)
"""The kernel's thread daemon: process 2 of every host, and how a host's /proc is told from a container's."""


def write(truth: NodeTruth, proc_root: Path, pod_log_root: Path) -> None:
    """Make both trees agree with the truth; only what differs is touched.

    Args:
        truth: The node now.
        proc_root: Gets ``<pid>/cgroup``, ``<pid>/stat`` and ``<pid>/comm``; a pid used again changes all of them.
        pod_log_root: Gets ``<namespace>_<pod>_<uid>/<container>`` of each pod that is alive.

    Raises:
        ConfigError: When a directory has something in it already and is not one of ours.
    """
    for root in (proc_root, pod_log_root):
        _claim(root)
    pods = _pod_directories(truth)
    # As on a node: a container has its logs' directory before it has a process, and has it still when it has none.
    for name, containers in pods.items():
        for container in containers:
            (pod_log_root / name / container).mkdir(parents=True, exist_ok=True)
    processes = {process.pid: process for process in _processes(truth)}
    for pid, process in processes.items():
        _write_files(
            proc_root / str(pid), {"cgroup": process.cgroup, "comm": f"{process.comm}\n", "stat": _stat(process)}
        )
    for directory in proc_root.iterdir():
        if directory.name.isdecimal() and int(directory.name) not in processes:
            _remove(directory)
    for directory in pod_log_root.iterdir():
        if directory.name != MARK and directory.name not in pods:
            _remove(directory)


def _claim(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    mark = root / MARK
    if mark.exists():
        return
    if any(root.iterdir()):
        raise ConfigError(f"{root}: not empty and not made by the simulator; name a new or an empty directory")
    mark.write_text("Nothing in this directory is real: it is written by the simulator.\n")


def _processes(truth: NodeTruth) -> Iterator[ProcessTruth]:
    yield _KTHREADD
    for gpu in truth.gpus:
        yield from gpu.processes
        for instance in gpu.instances:
            yield from instance.processes


def _pod_directories(truth: NodeTruth) -> Mapping[str, set[str]]:
    pods = {f"{pod.namespace}_{pod.name}_{pod.uid}": set(pod.containers) for pod in truth.pods if pod.phase == _RUNNING}
    alive = {(namespace, pod) for namespace, pod, _ in truth.other_pods}
    for holder in truth.holders:
        if not holder.pod_uid:
            continue
        pods.setdefault(f"{holder.namespace}_{holder.pod}_{holder.pod_uid}", set()).add(holder.container)
    for process in _processes(truth):
        # A pod that is listed without a device is alive; one that is not listed is gone, whatever runs on.
        if process.pod_uid and (process.namespace, process.pod) in alive:
            name = f"{process.namespace}_{process.pod}_{process.pod_uid}"
            pods.setdefault(name, set()).add(process.container)
    return pods


def _stat(process: ProcessTruth) -> str:
    before = f"{process.pid} ({process.comm}) S 1 {process.pid} {process.pid} 0 -1 4194304"
    return f"{before} {'0 ' * 12}{process.start_ticks} {'0 ' * 29}0\n"


def _write_files(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        path = directory / name
        try:
            if path.read_text() == text:
                continue
        except FileNotFoundError:
            pass
        # A reader must never see half a file: it would find a process outside its pod.
        new = directory / f"{name}.new"
        new.write_text(text)
        new.replace(path)


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            _remove(path)
        else:
            path.unlink()
    directory.rmdir()

"""Simulates a node: kubelet socket, Kubernetes API, /proc and pod logs, consistent with one scenario."""

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from exporter.errors import ConfigError
from exporter.model.fields import Field
from gpu_simulator import identities
from gpu_simulator.api_server import ApiServer, objects_of
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.scenario import Scenario
from gpu_simulator.truth import NodeTruth, PodTruth, ProcessTruth

MARK = "simulated"
"""Name of the file that marks a directory of the simulator: files are removed only from marked directories."""

_RUNNING = "Running"
_KTHREADD = ProcessTruth(pid=2, start_ticks=0, comm="kthreadd", cgroup="0::/\n", memory_used_bytes=0)
"""The kernel's thread daemon, process 2 of every host: it distinguishes /proc of a host from that of a container."""


def write_filesystem(truth: NodeTruth, proc_root: Path, pod_log_root: Path) -> None:
    """Update both trees to the truth; files without a difference are not written.

    Args:
        truth: The current node.
        proc_root: Directory for ``<pid>/cgroup``, ``<pid>/stat`` and ``<pid>/comm``; a reused pid changes all of them.
        pod_log_root: Directory for ``<namespace>_<pod>_<uid>/<container>`` of each running pod.

    Raises:
        ConfigError: A directory is not empty and has no mark of the simulator.
    """
    for root in (proc_root, pod_log_root):
        _claim(root)
    pods = _pod_directories(truth)
    # Like on a node, the log directory of a container exists before its first process and after its last one.
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
            shutil.rmtree(directory)
    for directory in pod_log_root.iterdir():
        if directory.name != MARK and directory.name not in pods:
            shutil.rmtree(directory)


def _claim(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    mark = root / MARK
    if mark.exists():
        return
    if any(root.iterdir()):
        raise ConfigError(f"{root}: not empty and not created by the simulator; use a new or empty directory")
    mark.write_text("All files in this directory are simulated: the simulator writes them.\n")


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
        # A pod listed without a device is running; an unlisted pod is deleted, even if processes continue.
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
        # The rename is atomic: a reader of half a file would find a process outside its pod.
        new = directory / f"{name}.new"
        new.write_text(text)
        new.replace(path)


REFRESH_SECONDS = 1.0
"""Seconds between updates of ``/proc`` and the pod logs."""
_SAME_INSTANT_SECONDS = 0.02


class SimulatedNode:
    """The parts of a scenario without the driver, which runs in the child process.

    Args:
        scenario: The node as a function of time.
        directory: Directory for socket and trees; empty, or used by the simulator before.
        clock: Unix time in seconds.
        epoch_seconds: Unix time of the scenario's start; None: the time of ``start``.
        agent: Namespace and name of the agent's pod, which is added to the node; None: no pod is added.
    """

    def __init__(
        self,
        scenario: Scenario,
        directory: Path,
        clock: Callable[[], float],
        epoch_seconds: float | None = None,
        agent: tuple[str, str] | None = None,
    ) -> None:
        self._agent = agent
        self._scenario = scenario
        self._clock = clock
        self._epoch_seconds = epoch_seconds
        self._truth: NodeTruth | None = None
        self.kubelet_socket = directory / "pod-resources" / "kubelet.sock"
        """Socket of the pod-resources API."""
        self.proc_root = directory / "proc"
        """Replacement of ``/proc``."""
        self.pod_log_root = directory / "pods"
        """Replacement of ``/var/log/pods``."""
        self.kubeconfig = directory / "api" / "kubeconfig"
        """Kubeconfig of the node's cluster; exists after ``start``."""
        self.kubelet = KubeletServer(self.kubelet_socket, self.truth)
        self.api = ApiServer(
            lambda: objects_of(self.truth()),
            lambda: self.truth().faults,
            token_file=directory / "api" / "token",
            kubeconfig=self.kubeconfig,
        )
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def epoch_seconds(self) -> float:
        """Return the Unix time of the scenario's start, which the first call sets."""
        if self._epoch_seconds is None:
            self._epoch_seconds = self._clock()
        return self._epoch_seconds

    def truth(self) -> NodeTruth:
        """Return the current node, cached for hundredths of a second, so that all servers return the same."""
        t = self._clock() - self.epoch_seconds
        if self._truth is None or abs(t - self._truth.at_seconds) > _SAME_INSTANT_SECONDS:
            self._truth = _with_agent(self._scenario.at(t), self._agent)
        return self._truth

    async def start(self) -> None:
        """Create socket, API and trees, and update them until ``stop``.

        Raises:
            ConfigError: The directory is not empty and has no mark of the simulator.
        """
        self.kubelet_socket.parent.mkdir(parents=True, exist_ok=True)
        self._refresh()
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        await self.kubelet.start()
        await self.api.start()
        self._refreshing = asyncio.create_task(self._keep_fresh(), name="simulated-filesystem")

    async def stop(self) -> None:
        """Stop the servers and the updates; the directory stays."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refreshing
            self._refreshing = None
        await self.api.stop()
        await self.kubelet.stop()

    def child_command(
        self, interval_seconds: float, fields: Iterable[Field], dcgm_address: str = ""
    ) -> tuple[str, ...]:
        """Return the command of the child process with this scenario's driver, for ``sources.worker.Worker``.

        Args:
            interval_seconds: Seconds between samples.
            fields: Sampled fields.
            dcgm_address: Address of the host engine, for its child; the simulated one is at ``localhost:5555``.

        Raises:
            ConfigError: The scenario exists only in memory, so that another process cannot load it.
        """
        if not self._scenario.source:
            raise ConfigError(f"scenario {self._scenario.name!r} has no file; a child process needs one")
        command = [sys.executable, "-m", "gpu_simulator.child", "--scenario", self._scenario.source]
        command += ["--epoch", repr(self.epoch_seconds), "--interval", repr(interval_seconds)]
        command += ["--fields", ",".join(str(int(field)) for field in sorted(fields))]
        return (*command, *(("--dcgm-address", dcgm_address) if dcgm_address else ()))

    def _refresh(self) -> None:
        write_filesystem(self.truth(), self.proc_root, self.pod_log_root)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self._refresh()


def _with_agent(truth: NodeTruth, agent: tuple[str, str] | None) -> NodeTruth:
    if agent is None:
        return truth
    namespace, name = agent
    pod = PodTruth(
        namespace=namespace,
        name=name,
        uid=identities.stable_uuid(truth.node, namespace, name),
        owner_kind="DaemonSet",
        owner_name="gpu-cost-exporter",
        owner_api="apps/v1",
        containers=("agent",),
    )
    return replace(truth, other_pods=(*truth.other_pods, (namespace, name, "agent")), pods=(*truth.pods, pod))

"""Checks the host and container: packages, driver, device nodes, /proc, directories, clock and port."""

import asyncio
import contextlib
import errno
import http.client
import os
import socket
import ssl
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from exporter.accounting.state_file import WriterLock
from exporter.attribution.processes import sees_host_processes
from exporter.config import AgentConfig, read_collectors, state_dir_problem, web_config
from exporter.doctor.findings import Finding, Surroundings, fail, first_of, interval_seconds, ok, warn
from exporter.errors import ConfigError
from exporter.gpu.worker import Worker, child_command
from exporter.metrics.collectors_file import Collectors
from exporter.model import DeviceState, Field, GpuReading, Reading, SourceState, SourceStatus

_ANSWER_SECONDS = 1.0
_REALM = "gpu-cost-exporter"


def answers(host: str, number: int) -> bool:
    """Request ``/healthz``; a server that requires our password, or a client's certificate, counts as an agent."""
    address = host or "127.0.0.1"
    # The certificate is of the node's name, which is not this address; nothing secret is sent or received.
    context = ssl._create_unverified_context()  # noqa: S323, SLF001
    return _is_ours(http.client.HTTPConnection(address, number, timeout=_ANSWER_SECONDS)) or _is_ours(
        http.client.HTTPSConnection(address, number, timeout=_ANSWER_SECONDS, context=context)
    )


def _is_ours(connection: http.client.HTTPConnection) -> bool:
    is_tls = False
    try:
        connection.connect()
        is_tls = isinstance(connection.sock, ssl.SSLSocket)
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        refused = response.status == http.client.UNAUTHORIZED
        return response.read(16) == b"ok\n" or (refused and _REALM in response.headers.get("WWW-Authenticate", ""))
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException) as error:
        # A server that requires a client's certificate sends an alert, or closes the connection without one.
        return is_tls or (isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""))
    finally:
        connection.close()


_FIRST_SANE_YEAR, _LAST_SANE_YEAR = 2025, 2099


def device_nodes(dev_root: Path) -> Finding:
    """The driver is talked to through device nodes; a container sees them only if its runtime gives them."""
    name = "device nodes"
    nodes = sorted(path.name for path in dev_root.glob("nvidia[0-9]*"))
    if not nodes or not (dev_root / "nvidiactl").exists():
        return fail(
            name,
            f"no {dev_root}/nvidiactl with {dev_root}/nvidia0",
            "load the driver; in Kubernetes set runtimeClassName: nvidia and NVIDIA_VISIBLE_DEVICES=all",
        )
    closed = [node for node in nodes if not os.access(dev_root / node, os.R_OK | os.W_OK)]
    if closed:
        return fail(name, f"uid {os.geteuid()} may not open {', '.join(closed)}", "run as uid 0")
    return ok(name, f"{len(nodes)} GPU nodes in {dev_root}")


def process_tree(proc_root: Path) -> Finding:
    """Only the host's PID namespace shows the processes of a GPU; there process 2 is the kernel's thread daemon."""
    name = "PID namespace"
    fix = "set hostPID: true, or mount the host's /proc and name it with --proc-root"
    if sees_host_processes(proc_root):
        return ok(name, f"{proc_root} is the host's")
    return warn(name, f"{proc_root} is not the host's: use of shared devices is estimated, not measured", fix)


def pod_logs(pod_log_root: Path) -> Finding:
    """The names of the pod-log directories give a pod's name by its uid, without the API server."""
    name = "pod logs"
    fix = "mount the host's /var/log/pods read-only, or name it with --pod-log-root"
    try:
        count = sum(1 for entry in pod_log_root.iterdir() if entry.name.count("_") >= 2)  # noqa: PLR2004 - ns_pod_uid
    except OSError as error:
        return warn(name, f"{pod_log_root}: {error.strerror}; processes cannot be assigned to pods", fix)
    if not count:
        return warn(name, f"{pod_log_root} has no pod's directory; processes cannot be assigned to pods", fix)
    return ok(name, f"{count} pods in {pod_log_root}")


def state_dir(path: Path | None) -> Finding:
    """What is kept across restarts needs a directory that can be written."""
    name = "state directory"
    if path is None:
        return ok(name, "none: nothing is kept across restarts")
    if problem := state_dir_problem(path):
        return fail(name, problem, "")
    if not os.access(path, os.W_OK):
        return warn(name, f"{path} is read-only: the ledger is in memory only", "see why: mount, dmesg")
    free_mib = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize // 2**20
    return ok(name, f"{path}, {free_mib} MiB free")


def writer_lock(config: AgentConfig) -> Finding:
    """One agent per node writes the ledger; a lock of the host decides which one."""
    name = "ledger lock"
    running = config.running
    lock = WriterLock(node=config.attribution.node_name, directory=running.lock_dir, state_directory=running.state_dir)
    if lock.path is None:
        return ok(name, "none: a simulated node takes no lock of the host")
    if not lock.path.parent.is_dir() and os.access(lock.path.parent.parent, os.W_OK | os.X_OK):
        return ok(name, f"{lock.path} is free; the agent makes it")
    taken = lock.take()
    lock.release()
    if not taken:
        return ok(name, f"an agent of this node has it: {lock.waits_for}")
    if lock.warning:
        return warn(name, *lock.warning.rsplit("; ", 1))
    return ok(name, f"{lock.path} is free")


def clock(now: float) -> Finding:
    """The year must be sane."""
    name = "clock"
    at = datetime.fromtimestamp(now, tz=UTC)
    if not _FIRST_SANE_YEAR <= at.year <= _LAST_SANE_YEAR:
        return fail(name, f"it is {at:%Y-%m-%d %H:%M} UTC here", "set the node's clock: chronyc makestep")
    return ok(name, f"{at:%Y-%m-%d %H:%M:%S} UTC")


def port(host: str, number: int) -> Finding:
    """The port must be free, or an agent must already answer on it."""
    name = "port"
    where = f"{host or 'every interface'}, port {number}"
    both = not host and socket.has_dualstack_ipv6()  # as the agent binds, or a listener on [::] goes unseen
    family = socket.AF_INET6 if ":" in host or both else socket.AF_INET
    try:
        with socket.create_server((host, number), family=family, dualstack_ipv6=both):
            return ok(name, f"{where} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE and answers(host, number):
            return ok(name, f"{where}: an agent is already serving there")
        why = (error.strerror or str(error)).partition(" (while")[0]  # create_server repeats the address there
        return fail(name, f"{where}: {why}", "free the port, or choose another with --listen")


def collectors(config: AgentConfig) -> tuple[Finding, Collectors]:
    """The collectors file must be readable and right, or the agent will not start; the default set stands for it."""
    name = "collectors"
    try:
        made = read_collectors(config.exposition.collectors)
    except ConfigError as error:
        return fail(name, first_of(error), "fix the file, or leave --collectors out"), read_collectors(None)
    if made.without_dcgm and not config.sampling.dcgm_address:
        cause, _, fix = made.without_dcgm.removeprefix("collectors: ").partition("; ")
        return warn(name, cause, f"{fix}, or take the rows out"), made
    where = str(config.exposition.collectors) if config.exposition.collectors else "dcgm-exporter's default set"
    if made.warnings:
        return warn(name, first_of(made.warnings), "no harm is done; take the rows out to silence this"), made
    return ok(name, f"{where}, {len(made.fields)} fields"), made


def options(config: AgentConfig) -> list[Finding]:
    """What was set and does nothing, or something else than it says; each as the agent would log it at its start."""
    return [warn("options", warning, "take it out to silence this") for warning in config.warnings]


_LOOK_SECONDS = 0.05
_BAD_STATES = frozenset({SourceState.FAILED, SourceState.HUNG, SourceState.DIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What a child has said."""

    last: Reading | None
    """``None``: no reading within the deadline."""
    first_after_seconds: float
    status: SourceStatus
    errors: Mapping[str, int]
    """Of all its readings, by reason."""

    def trouble(self, deadline_seconds: float) -> str:
        """Why there is no reading, in one line."""
        status = self.status
        return status.message or status.reason.replace("_", " ") or f"no answer within {deadline_seconds:g} s"


async def listen(around: Surroundings, name: str, command: Sequence[str], *, enough: int) -> ProbeAnswer:
    """Start a source's child, and end it after so many readings, at its first trouble or at the deadline.

    Args:
        around: The node; its deadline is for all readings together.
        name: Of the source.
        command: Of the child.
        enough: How many readings are wanted.
    """
    deadline_seconds = around.driver_deadline_seconds
    worker = Worker(
        name=name,
        command=command,
        interval_seconds=interval_seconds(around.config),
        # Longer than this check's own: one of the two must decide, and restarting is not wanted here.
        deadline_seconds=2 * deadline_seconds,
        start_deadline_seconds=2 * deadline_seconds,
        env=around.worker_env,
    )
    readings: list[Reading] = []
    now = asyncio.get_running_loop().time
    start, first_after = now(), 0.0
    task = asyncio.ensure_future(worker.run())
    try:
        while now() - start < deadline_seconds and len(readings) < enough and not task.done():
            await asyncio.sleep(_LOOK_SECONDS)
            taken = worker.take()
            if taken and not readings:
                first_after = now() - start
            readings += taken
            if worker.status.state in _BAD_STATES:
                break
        status = worker.status
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    errors = sum((Counter(reading.errors) for reading in readings), Counter[str]())
    last = readings[-1] if readings else None
    return ProbeAnswer(last=last, first_after_seconds=first_after, status=status, errors=errors)


_ENOUGH_READINGS = 3
"""Rates and engine counters are differences: the first reading cannot have them."""
_BLIND = "see the lines of DCGM; the driver may refuse profiling, too: see dmesg"
_BLIND_WITHOUT_DCGM = (
    "MIG before Hopper is measured by DCGM alone: run its host engine and name it, --dcgm-address HOST:5555"
    " (docs/dcgm.md); elsewhere the driver may refuse profiling: see dmesg"
)


async def read(around: Surroundings, fields: Collection[Field]) -> tuple[Finding, Reading | None]:
    """How the driver does, and its last reading; ``None`` where there was none within the deadline."""
    command = around.worker_command or child_command(interval_seconds(around.config), fields)
    heard = await listen(around, "nvml", command, enough=_ENOUGH_READINGS)
    if heard.last is None:
        fix = "" if heard.status.message else "see the kernel log: dmesg | grep -i nvrm"
        return fail("driver", heard.trouble(around.driver_deadline_seconds), fix), None
    version = f"driver {heard.last.driver_version or 'of unknown version'}"
    return ok("driver", f"{version}, first reading after {heard.first_after_seconds:.1f} s"), heard.last


def devices(reading: Reading) -> Finding:
    """Every GPU that the driver lists must be up."""
    if bad := not_up(reading):
        return fail("devices", f"{bad}; the others go on", "reset it (nvidia-smi --gpu-reset -i N) or restart the node")
    if not reading.gpus:
        fix = "check lspci and the kernel log; set NVIDIA_VISIBLE_DEVICES=all"
        return fail("devices", "the driver lists no GPU", fix)
    return ok("devices", by_model(reading))


def not_up(reading: Reading) -> str:
    """Name the GPUs that are not up, each with its state."""
    bad = [gpu for gpu in reading.gpus if gpu.state is not DeviceState.UP]
    return ", ".join(f"GPU {gpu.gpu.index} {gpu.state.value.replace('_', ' ')}" for gpu in bad)


def by_model(reading: Reading) -> str:
    """Count the GPUs of each model, and the MIG instances."""
    models = Counter(gpu.gpu.model for gpu in reading.gpus)
    return ", ".join(f"{count} x {model}" for model, count in sorted(models.items())) + instances(reading)


def instances(reading: Reading) -> str:
    """Count the MIG instances; empty where there are none."""
    count = sum(len(gpu.instances) for gpu in reading.gpus)
    return f", {count} MIG instances" if count else ""


def activity(reading: Reading, *, dcgm: bool = False) -> Finding:
    """Where activity comes from: engine counters where there are some, else utilisation, else nowhere.

    Args:
        reading: Of all sources together.
        dcgm: Whether DCGM is one of them.
    """
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    if not up:
        return warn("activity", "no GPU is up, so that none is measured", "see the checks above")
    blind = sum(not _is_measured(gpu) for gpu in up)
    engine = sum(has_engine(gpu) for gpu in up)
    if blind:
        return warn(
            "activity",
            f"{blind} of {len(up)} GPUs have no activity for at least one device, which shows as unknown",
            _BLIND if dcgm else _BLIND_WITHOUT_DCGM,
        )
    by_dcgm = sum(has_engine(gpu) and _is_of_dcgm(gpu) for gpu in up)
    by = f", on {by_dcgm} of them by DCGM" if by_dcgm else ""
    if engine < len(up):
        return ok("activity", f"engine counters on {engine} of {len(up)} GPUs{by}, utilisation on the others")
    return ok("activity", f"engine counters on all {len(up)} GPUs{by}")


def _is_of_dcgm(reading: GpuReading) -> bool:
    parts = [part.from_dcgm for part in reading.instances] or [reading.from_dcgm]
    return any(Field.PROF_GR_ENGINE_ACTIVE in fields for fields in parts)


def has_engine(reading: GpuReading) -> bool:
    """Return whether engine counters are there of a GPU, or of all its instances."""
    parts = [part.values for part in reading.instances] or [reading.values]
    return all(Field.PROF_GR_ENGINE_ACTIVE in values for values in parts)


def _is_measured(reading: GpuReading) -> bool:
    return has_engine(reading) or (not reading.instances and Field.GPU_UTIL in reading.values)


def processes(reading: Reading) -> Finding:
    """The process list, which NVML alone has, divides a shared device between its holders."""
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    silent = sum(gpu.processes is None and all(part.processes is None for part in gpu.instances) for gpu in up)
    if silent:
        return warn(
            "processes", f"{silent} of {len(up)} GPUs do not list their processes", "set hostPID: true and run as uid 0"
        )
    count = sum(len(gpu.processes or ()) + sum(len(part.processes or ()) for part in gpu.instances) for gpu in up)
    return ok("processes", f"{count} processes listed")


_NAME = "web config"


def face(path: Path) -> Finding:
    """A file with mistakes stops the start."""
    try:
        settings = web_config.load(path)
    except ConfigError as error:
        return fail(_NAME, first_of(error), "fix it; docs/security.md has every key")
    users = f"{len(settings.users)} user{'s' if len(settings.users) != 1 else ''}"
    summary = f"{'TLS' if settings.tls else 'plain HTTP'}, {users if settings.users else 'no passwords'}"
    if settings.warnings:
        return warn(_NAME, f"{summary}; {settings.warnings[0]}", "see docs/security.md")
    return ok(_NAME, summary)

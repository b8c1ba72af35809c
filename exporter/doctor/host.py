"""Checks of the host and the container around the agent: packages, device nodes, /proc, directories, clock, port."""

import errno
import os
import socket
import stat
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from exporter.accounting.writer_lock import WriterLock
from exporter.config import AgentConfig, read_collectors
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.doctor.serving import answers
from exporter.errors import ConfigError

_BINDING = "nvidia-ml-py"
_FIRST_SANE_YEAR, _LAST_SANE_YEAR = 2025, 2099
_STEP_SECONDS = 0.5


def package() -> Finding:
    """The module pynvml must come from nvidia-ml-py; an abandoned package provides one of the same name."""
    name = "package"
    owners = set(metadata.packages_distributions().get("pynvml", ()))
    if _BINDING not in owners:
        others = f"; the module pynvml is of {', '.join(sorted(owners))}" if owners else ""
        return fail(name, f"{_BINDING} is not installed{others}", f"pip install {_BINDING}")
    if owners != {_BINDING}:
        rest = ", ".join(sorted(owners - {_BINDING}))
        return warn(name, f"the module pynvml is also of {rest}", f"pip uninstall {rest}, then reinstall {_BINDING}")
    return ok(name, f"{_BINDING} {metadata.version(_BINDING)}")


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


def kernel_module(proc_root: Path) -> Finding:
    """The loaded kernel module says its version, whatever library lies beside it."""
    name = "kernel module"
    path = proc_root / "driver" / "nvidia" / "version"
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError as error:
        return fail(name, f"{path}: {error.strerror}", "load the NVIDIA kernel module: modprobe nvidia")
    return ok(name, " ".join(first.removeprefix("NVRM version:").split()))


def process_tree(proc_root: Path) -> Finding:
    """Only the host's PID namespace shows whose processes use a GPU; there process 2 is the kernel's thread daemon."""
    name = "PID namespace"
    mend = "set hostPID: true, or mount the host's /proc and name it with --proc-root"
    try:
        comm = (proc_root / "2" / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        comm = ""
    if comm == "kthreadd":
        return ok(name, f"{proc_root} is the host's")
    return warn(name, f"{proc_root} is not the host's: use of shared devices is estimated, not measured", mend)


def pod_logs(pod_log_root: Path) -> Finding:
    """The names of the pod-log directories tell a pod's name by its uid, without the API server."""
    name = "pod logs"
    mend = "mount the host's /var/log/pods read-only, or name it with --pod-log-root"
    try:
        count = sum(1 for entry in pod_log_root.iterdir() if entry.name.count("_") >= 2)  # noqa: PLR2004 - ns_pod_uid
    except OSError as error:
        return warn(name, f"{pod_log_root}: {error.strerror}; processes cannot be told apart by pod", mend)
    if not count:
        return warn(name, f"{pod_log_root} has no pod's directory; processes cannot be told apart by pod", mend)
    return ok(name, f"{count} pods in {pod_log_root}")


def state_dir(path: Path | None) -> Finding:
    """What is kept across restarts needs a directory that can be written."""
    name = "state directory"
    if path is None:
        return ok(name, "none: nothing is kept across restarts")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return fail(name, f"{path}: {error.strerror}", "create it or mount a volume there, and let the agent reach it")
    if not stat.S_ISDIR(mode):
        return fail(name, f"{path} is not a directory", "create it, or mount a volume there")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return fail(name, f"uid {os.geteuid()} may not write {path}", "change its owner or its mode")
    free_mib = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize // 2**20
    return ok(name, f"{path}, {free_mib} MiB free")


def writer_lock(config: AgentConfig) -> Finding:
    """One agent per node writes the ledger; a lock of the host decides which one."""
    name = "ledger lock"
    lock = WriterLock(node=config.node_name, directory=config.lock_dir, state_directory=config.state_dir)
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


def clock(wall: tuple[float, float], monotonic: tuple[float, float]) -> Finding:
    """The year must be sane, and wall time must have passed as monotonic time did (both from the start to the end)."""
    name = "clock"
    at = datetime.fromtimestamp(wall[1], tz=UTC)
    if not _FIRST_SANE_YEAR <= at.year <= _LAST_SANE_YEAR:
        return fail(name, f"it is {at:%Y-%m-%d %H:%M} UTC here", "set the node's clock: chronyc makestep")
    step = (wall[1] - wall[0]) - (monotonic[1] - monotonic[0])
    if abs(step) > _STEP_SECONDS:
        return warn(name, f"the wall clock jumped by {step:+.1f} s during the check", "see why: chronyc tracking")
    return ok(name, f"{at:%Y-%m-%d %H:%M:%S} UTC, steady")


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


def collectors(config: AgentConfig) -> Finding:
    """The collectors file must be readable and right, or the agent will not start."""
    name = "collectors"
    try:
        made = read_collectors(config.collectors)
    except ConfigError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return fail(name, f"{error.problems[0]}{more}", "mend the file, or leave --collectors out")
    if made.without_dcgm and not config.dcgm_address:
        cause, _, mend = made.without_dcgm.removeprefix("collectors: ").partition("; ")
        return warn(name, cause, f"{mend}, or take the rows out")
    where = str(config.collectors) if config.collectors else "dcgm-exporter's default set"
    if made.warnings:
        more = f" (and {len(made.warnings) - 1} more)" if len(made.warnings) > 1 else ""
        return warn(name, f"{made.warnings[0]}{more}", "no harm is done; take the rows out to silence this")
    return ok(name, f"{where}, {len(made.fields)} fields")


def options(config: AgentConfig) -> list[Finding]:
    """What was set and does nothing, or something else than it says; each as the agent would log it at its start."""
    return [warn("options", warning, "take it out to silence this") for warning in config.warnings]

"""Checks the host and container: device nodes, /proc, directories, clock, port and files of settings."""

import errno
import http.client
import os
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

from exporter.accounting.state_file import WriterLock
from exporter.attribution.processes import sees_host_processes
from exporter.config import AgentConfig, read_collectors, state_dir_problem, web_config
from exporter.doctor.findings import Finding, fail, first_of, ok, warn
from exporter.errors import ConfigError
from exporter.metrics.collectors_file import Collectors
from exporter.model.formatting import plural

_ANSWER_SECONDS = 1.0
_REALM = "gpu-cost-exporter"


def answers(host: str, number: int) -> bool:
    """Return whether an agent serves there: by ``/healthz``, our password realm, or a required client certificate."""
    address = host or "127.0.0.1"
    # The certificate has the name of the node, not this address; no secret is sent or received.
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
    """Check the driver's device nodes, which a container has only if its runtime mounts them."""
    name = "device nodes"
    nodes = sorted(path.name for path in dev_root.glob("nvidia[0-9]*"))
    if not nodes or not (dev_root / "nvidiactl").exists():
        fix = "load the driver; in Kubernetes set runtimeClassName: nvidia and NVIDIA_VISIBLE_DEVICES=all"
        return fail(name, f"no {dev_root}/nvidiactl with {dev_root}/nvidia0", fix)
    closed = [node for node in nodes if not os.access(dev_root / node, os.R_OK | os.W_OK)]
    if closed:
        return fail(name, f"uid {os.geteuid()} may not open {', '.join(closed)}", "run as uid 0")
    return ok(name, f"{len(nodes)} GPU nodes in {dev_root}")


def process_tree(proc_root: Path) -> Finding:
    """Check that /proc is the host's: only its PID namespace has the processes of a GPU."""
    name = "PID namespace"
    fix = "set hostPID: true, or mount the host's /proc and name it with --proc-root"
    if sees_host_processes(proc_root):
        return ok(name, f"{proc_root} is the host's")
    return warn(name, f"{proc_root} is not the host's: use of shared devices is estimated, not measured", fix)


def pod_logs(pod_log_root: Path) -> Finding:
    """Check the pod-log directories, whose names map a pod's UID to its name without the API server."""
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
    """Check that the ledger can be kept across restarts."""
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
    """Check the host's lock, with which one agent per node writes the ledger."""
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
    """Check that the clock was set."""
    name = "clock"
    at = datetime.fromtimestamp(now, tz=UTC)
    if not _FIRST_SANE_YEAR <= at.year <= _LAST_SANE_YEAR:
        return fail(name, f"it is {at:%Y-%m-%d %H:%M} UTC here", "set the node's clock: chronyc makestep")
    return ok(name, f"{at:%Y-%m-%d %H:%M:%S} UTC")


def port(host: str, number: int) -> Finding:
    """Check that the port is free, or that an agent already answers on it."""
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
    """Check the collectors file, without which the agent does not start; return the default set in its place."""
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
    """Report options without effect, or with another effect than expected, as the agent logs them at its start."""
    return [warn("options", warning, "take it out to silence this") for warning in config.warnings]


_NAME = "web config"


def face(path: Path) -> Finding:
    """Check the web configuration, of which a mistake stops the start."""
    try:
        settings = web_config.load(path)
    except ConfigError as error:
        return fail(_NAME, first_of(error), "fix it; docs/security.md has every key")
    users = plural(len(settings.users), "user") if settings.users else "no passwords"
    summary = f"{'TLS' if settings.tls else 'plain HTTP'}, {users}"
    if settings.warnings:
        return warn(_NAME, f"{summary}; {settings.warnings[0]}", "see docs/security.md")
    return ok(_NAME, summary)

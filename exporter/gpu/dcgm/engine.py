"""Connects to a DCGM host engine, and converts return codes and failures to errors with a fix."""

import ctypes
import socket
import time
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass

from exporter.errors import NoValuesError, SourceError
from exporter.gpu.dcgm import library as libdcgm
from exporter.gpu.dcgm.library import Code, Handle, Library, reason_of

UNIX = "unix://"


def knock(address: str, timeout_seconds: float) -> str:
    """Check that an address (``host:port`` or ``unix:///path``) accepts connections.

    Returns:
        The resolved address: libdcgm would resolve only IPv4, and use the first of several.

    Raises:
        OSError, UnicodeError: No connection is accepted.
    """
    path = address.removeprefix(UNIX)
    if path != address:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(timeout_seconds)
            one.connect(path)
        return address
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout_seconds) as reached:
        number = reached.getpeername()[0]
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"


EMBEDDED = "embedded"
MISMATCH = "dcgm_version_mismatch"
"""Reason of an engine and a library with different major versions."""
_CONNECT_SECONDS = 3.0
_SILENT_PART = 0.8
"""Part of the connection timeout after which an engine counts as silent; refusals are faster."""
_UNINITIALIZED = -10
_GONE = frozenset({Code.CONNECTION_LOST, _UNINITIALIZED})
_REFUSED = _GONE | {Code.VERSION_MISMATCH}
"""Codes with which an engine refuses to report its version; an engine that cannot report it is accepted."""
_AUTOMATIC = 1


_PROBLEMS = {
    "dcgm_no_such_host": "no host of the name in {address} is known ({words}): correct --dcgm-address, or see the DNS",
    "dcgm_refused": "nothing listens at {address}: start nv-hostengine there (systemctl start nvidia-dcgm, or the"
    " GPU Operator's dcgm pod), or correct --dcgm-address",
    "dcgm_socket_missing": "there is no socket {address}: start nv-hostengine with -d and this path, mount the"
    " socket into the container, or correct --dcgm-address",
    "dcgm_unreachable": "{address} cannot be reached ({words}): see whether a network policy or a firewall is in"
    " between, or correct --dcgm-address",
    "dcgm_no_permission": "the host engine at {address} refuses this client ({words}): see its options and log",
    "dcgm_silent": "something takes connections at {address} and does not answer ({words}): see whether it is"
    " nv-hostengine and hangs (restart it), or correct --dcgm-address",
    "dcgm_not_an_engine": "what listens at {address} does not answer as a DCGM host engine ({words}): correct"
    " --dcgm-address; an engine listens on port 5555 by default, and has to be of {library}'s major version",
    MISMATCH: "the host engine at {address} is DCGM {theirs} and this side's {library} is {own}: the major versions"
    " have to be the same; install DCGM's client library {wanted} here, or DCGM {major}.x there",
    "dcgm_connection_lost": "the DCGM host engine at {address} went away: it is tried again; see why nv-hostengine"
    " ended or was restarted (systemctl status nvidia-dcgm, or its pod)",
    "dcgm_no_values": "the DCGM host engine at {address} has {gpus} GPUs and gives no values of them: its telemetry"
    " is paused, as a diagnosis (dcgmi diag) does, or it cannot read the driver; wait for the diagnosis to end,"
    " which a restart of the engine would abort; else see the engine's log",
    "dcgm_no_gpus": "the DCGM host engine at {address} has no GPU: see nvidia-smi on its machine; an engine that was"
    " started before the driver has to be restarted",
    "dcgm_limit_reached": "the DCGM host engine at {address} has {gpus} GPUs and no room for another group, so that"
    " none of them is watched: end the clients that fill it (dcgmi group -l, dcgmi fieldgroup -l); it is tried again"
    " every minute",
}
_WITHOUT_VALUES = frozenset({"dcgm_no_values", "dcgm_no_gpus", "dcgm_limit_reached"})
"""Reasons of engines that answer; the connection stays open."""


def problem(reason: str, address: str, **facts: object) -> SourceError:
    """Return the error for a reason, with its cause and its fix.

    Args:
        reason: A reason of the table.
        address: Address of the engine.
        facts: Other values in the text.
    """
    kind = NoValuesError if reason in _WITHOUT_VALUES else SourceError
    return kind(reason, _PROBLEMS[reason].format(address=address, **facts))


def _unreachable(address: str, error: OSError | UnicodeError) -> SourceError:
    words = "no answer" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or str(error)
    if isinstance(error, socket.gaierror | UnicodeError):
        words = words if isinstance(error, OSError) else "no name can be so"
        return problem("dcgm_no_such_host", address, words=words)
    if isinstance(error, ConnectionRefusedError):
        return problem("dcgm_refused", address)
    if address.startswith(UNIX) and isinstance(error, FileNotFoundError | NotADirectoryError):
        return problem("dcgm_socket_missing", address)
    if address.startswith(UNIX) and isinstance(error, PermissionError):
        what = f"this user may not open the socket {address}: run as a user or group that may write to it"
        return SourceError("dcgm_no_permission", what)
    return problem("dcgm_unreachable", address, words=words)


_ADVICE = {
    "dcgm_module_not_loaded": "the engine has no profiling module: install datacenter-gpu-manager-4-proprietary with"
    " it and restart it; until then it measures no engines of GPUs before Hopper",
    "dcgm_limit_reached": "the engine has no room for another group: end the clients that fill it (dcgmi group -l,"
    " dcgmi fieldgroup -l); what could not be watched is absent, and tried again every minute",
    "dcgm_stale": "values that the engine does not renew are left out: see its log",
    "dcgm_nameless_gpu": "the engine gives no UUID of a GPU, which is left out: see its log",
}


def advice_of(reason: str) -> str:
    """Return the meaning of a reason and the fix, in one line."""
    return _ADVICE.get(reason, "refused fields are absent, the rest continues; docs/dcgm.md has the reasons")


@dataclass(slots=True, kw_only=True)
class Engine:
    """Connection to an engine; it is open until ``close``, or until a call reports its loss."""

    library: Library
    """Library that opened it."""
    handle: Handle
    """Handle of the connection."""
    address: str
    """Address of the engine, for messages."""
    count: Callable[[str], None]
    """Called with the reason of each error."""
    progress: Callable[[], None]
    """Called after each call that returned."""
    version: str | None = None
    """Version of the engine: ``4.6.0``."""

    def call(self, name: str, *arguments: object) -> int:
        """Call a function of this connection and return its code.

        Raises:
            SourceError: The engine is gone.
        """
        code = self.library.call(name, self.handle, *arguments)
        self.progress()
        if code in _GONE:
            raise problem("dcgm_connection_lost", self.address)
        return code

    def close(self) -> None:
        """Close the connection with all its groups and watches; never raises for the engine's error."""
        name = "dcgmStopEmbedded" if self.address == EMBEDDED else "dcgmDisconnect"
        self.library.call(name, self.handle)
        self.library.call("dcgmShutdown")

    def supported_gpus(self) -> list[int]:
        """Return the engine's own ids of the GPUs that it supports.

        Raises:
            SourceError: It does not list them.
        """
        # While telemetry is paused, all GPUs are disabled, and the engine does not list them as supported.
        supported = self._list_gpus(libdcgm.SUPPORTED_ONLY)
        return supported or [one for one in self._list_gpus(0) if self.gpu_status(one) == libdcgm.DISABLED]

    def _list_gpus(self, flags: int) -> list[int]:
        ids, count = (ctypes.c_uint * libdcgm.MAX_GPUS)(), ctypes.c_int(libdcgm.MAX_GPUS)
        code = self.call("dcgmGetEntityGroupEntities", libdcgm.GPU, ids, byref(count), ctypes.c_uint(flags))
        if code != Code.OK:
            raise SourceError(
                reason_of(code),
                f"the DCGM host engine at {self.address} does not list its GPUs ({self.library.describe(code)}): see"
                " its log, and dmesg for NVRM lines",
            )
        return list(ids[: count.value])

    def gpu_status(self, gpu_id: int) -> int | None:
        """Return a GPU's DcgmEntityStatus_t, ``None`` if it is not reported."""
        status = ctypes.c_int(0)
        code = self.call("dcgmGetGpuStatus", gpu_id, byref(status))
        return status.value if code == Code.OK else None

    def profiling_paused(self) -> bool | None:
        """Return whether profiling is paused for the whole engine; ``None`` if it is not reported."""
        statuses = libdcgm.versioned(libdcgm.ModuleStatuses)
        if self.call("dcgmModuleGetStatuses", byref(statuses)) != Code.OK:
            return None
        rows = statuses.statuses[: statuses.numStatuses]
        return any(row.id == libdcgm.PROFILING_MODULE and row.status == libdcgm.MODULE_PAUSED for row in rows)

    def profiling_fields(self, gpu_id: int) -> tuple[int, frozenset[int]]:
        """Return the code of the call, and the available profiling fields of a GPU."""
        groups = libdcgm.versioned(libdcgm.MetricGroups, gpuId=gpu_id)
        code = self.call("dcgmProfGetSupportedMetricGroups", byref(groups))
        if code != Code.OK:
            return code, frozenset()
        ids = (group.fieldIds[: group.numFieldIds] for group in groups.metricGroups[: groups.numMetricGroups])
        return code, frozenset(int(one) for some in ids for one in some)


def connect(
    address: str,
    *,
    count: Callable[[str], None],
    progress: Callable[[], None],
    monotonic: Callable[[], float] = time.monotonic,
) -> Engine:
    """Connect to the engine at an address, or start one within this process for ``embedded``.

    Args:
        address: ``host:port``, ``unix:///path`` or ``embedded``.
        count: Called with the reason of each error.
        progress: Called after each call over the connection that returned.
        monotonic: Clock, in seconds.

    Raises:
        SourceError: There is no library, no listener, another kind of listener, ...; the message has the fix.
    """
    library = libdcgm.load()
    try:
        # For a closed port, the library itself waits for its whole timeout and has one code for all errors.
        reached = address if address == EMBEDDED else (library.knock or knock)(address, _CONNECT_SECONDS)
    except (OSError, UnicodeError) as error:
        raise _unreachable(address, error) from error
    code = library.call("dcgmInit")
    if code != Code.OK:
        raise SourceError(
            reason_of(code), f"{library.soname} cannot be initialised ({library.describe(code)}): install DCGM again"
        )
    handle = Handle()
    started = monotonic()
    connected = code = _open(library, reached, handle)
    engine = Engine(library=library, handle=handle, address=address, count=count, progress=progress)
    if connected == Code.OK:
        # It also returns OK for a failed login and closes the connection, so that the next call fails.
        code, engine.version = _version_of(library, "dcgmHostengineVersionInfo", handle)
    if code in _REFUSED or connected != Code.OK:
        silent = monotonic() - started >= _SILENT_PART * _CONNECT_SECONDS
        trouble = _refusal(library, address, code, silent=silent)
    elif engine.version is not None and not engine.version.startswith(f"{library.major}."):
        trouble = _mismatch(library, address, engine.version)
    else:
        return engine
    if connected == Code.OK:
        engine.close()
    else:
        library.call("dcgmShutdown")
    raise trouble


def _open(library: Library, address: str, handle: Handle) -> int:
    milliseconds = round(1000 * _CONNECT_SECONDS)
    if address == EMBEDDED:
        embedded = libdcgm.versioned(libdcgm.EmbeddedParams, opMode=_AUTOMATIC)
        code = library.call("dcgmStartEmbedded_v2", byref(embedded))
        handle.value = embedded.dcgmHandle
        return code
    path = address.removeprefix(UNIX)
    if "dcgmConnect_v3" in library.functions:
        to = libdcgm.versioned(libdcgm.ConnectV3Params, timeoutMs=milliseconds)
        uri = address if path != address else f"tcp://{address}"
        return library.call("dcgmConnect_v3", uri.encode(), byref(to), byref(handle))
    older = libdcgm.versioned(libdcgm.ConnectV2Params, timeoutMs=milliseconds, addressIsUnixSocket=path != address)
    return library.call("dcgmConnect_v2", path.encode(), byref(older), byref(handle))


def _version_of(library: Library, function: str, *handle: Handle) -> tuple[int, str | None]:
    """Return the code of a call for a version, and the version: ``4.6.0``; ``None`` if it is not reported."""
    info = libdcgm.versioned(libdcgm.VersionInfo)
    code = library.call(function, *handle, byref(info))
    parts = (part.partition(":") for part in info.rawBuildInfoString.decode("ascii", "replace").split(";"))
    return code, {name: value for name, _, value in parts}.get("version") or None


def _refusal(library: Library, address: str, code: int, *, silent: bool) -> SourceError:
    words = library.describe(code)
    if code == Code.VERSION_MISMATCH:
        return _mismatch(library, address, None)
    if address == EMBEDDED:
        return SourceError(
            reason_of(code),
            f"an engine could not be started within this process ({words}): it takes DCGM's whole package and the"
            " NVIDIA driver; or let nv-hostengine run and give its address",
        )
    reason = "dcgm_no_permission" if code == Code.NO_PERMISSION else "dcgm_silent" if silent else "dcgm_not_an_engine"
    return problem(reason, address, words=words, library=library.soname)


def _mismatch(library: Library, address: str, engine_version: str | None) -> SourceError:
    return problem(
        MISMATCH,
        address,
        theirs=engine_version or "of another major version",
        own=_version_of(library, "dcgmVersionInfo")[1] or f"{library.major}.x",
        wanted=f"{engine_version.split('.')[0]}.x" if engine_version else "of the engine's major version",
        library=library.soname,
        major=library.major,
    )

"""A DCGM host engine that does not exist, put as the loaded library under ``exporter.gpu.dcgm.library``."""

import errno
import os
import time
from collections.abc import Callable

from exporter.gpu.dcgm import library
from gpu_simulator import dcgm_connections, dcgm_groups, dcgm_latest
from gpu_simulator.dcgm_core import Call, Connection, Engine, EngineKilledError, Failure, Refused
from gpu_simulator.dcgm_known import Version, meta_pointer
from gpu_simulator.driver_core import CArgument, plain
from gpu_simulator.truth import Fault, NodeTruth

__all__ = ["EngineKilledError", "clear_failures", "fail", "held", "install", "uninstall"]

_ERRORS = {
    0: "Success",
    -1: "Bad parameter passed to function",
    -3: "Generic unspecified error",
    -5: "Setting not configured",
    -6: "Feature not supported",
    -8: "NVML error",
    -10: "Object is in an undefined state",
    -11: "Timeout",
    -12: "API version mismatch",
    -13: "Unknown field identifier",
    -14: "No data is available",
    -16: "Field is not being watched",
    -17: "No permission",
    -18: "GPU is lost",
    -19: "GPU requires a reset",
    -21: "Host engine connection invalid/disconnected",
    -22: "GPU is not supported",
    -24: "Limit reached",
    -26: "Duplicate key",
    -29: "Requires root",
    -31: "Buffer too small",
    -33: "Module not loaded",
    -34: "In use",
    -36: "Profiling is not supported",
    -37: "Profiling library error",
    -38: "Profiling multi-pass",
    -44: "Driver too old",
    -54: "Paused",
    -67: "Detached",
}
_CALLS: dict[str, Call] = {
    **dcgm_connections.CALLS.by_name,
    **dcgm_groups.CALLS.by_name,
    **dcgm_latest.CALLS.by_name,
}


class _Functions:
    """What ``Library`` takes for a ``CDLL``: C symbols as plain functions."""

    def __init__(self, engine: Engine, version: Version) -> None:
        self._engine = engine
        self._version = version

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "errorString":
            return lambda code: _ERRORS.get(plain(code), "Unknown error").encode()
        if name == "DcgmFieldGetById":
            return lambda field_id: meta_pointer(plain(field_id), self._version)
        call = _CALLS.get(name)
        if call is None or not dcgm_connections.has_function(name, self._version):
            raise AttributeError(name)
        engine = self._engine

        def function(*arguments: CArgument) -> int:
            try:
                call(engine, arguments)
            except Refused as refusal:
                return refusal.code
            return 0

        return function


class _Installed:
    """The one engine of this process."""

    engine: Engine | None = None


def install(
    truth: Callable[[], NodeTruth],
    *,
    cache_seconds: float = 0.02,
    epoch_seconds: float = 1_700_000_000.0,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    soname: str = "",
) -> None:
    """Put a fake libdcgm in place whose engine, at ``localhost:5555``, answers from ``truth``.

    Watches are brought up to date when somebody reads them, on the beat of ``monotonic`` from when they were made:
    a field is sampled once per beat, and a profiling field is the mean since the beat before.

    Args:
        truth: The node now; asked at most every ``cache_seconds`` (0: at every call).
        cache_seconds: How long one answer of ``truth`` serves, in real seconds.
        epoch_seconds: Unix time of the scenario's start, for the timestamps of values.
        monotonic: Clock of the watches, seconds.
        sleep: How hangs, slow calls and connecting in vain pass time.
        soname: Of the library; empty for the engine's own major version.
    """
    version = truth().dcgm.version
    soname = soname or f"libdcgm.so.{version.partition('.')[0]}"
    engine = _Installed.engine = Engine(
        source=truth,
        monotonic=monotonic,
        sleep=sleep,
        cache_seconds=cache_seconds,
        epoch_seconds=epoch_seconds,
        library_major=int(soname.rpartition(".")[2]),
    )
    library.install(_Functions(engine, engine.version), soname, knock=knock)


def set_epoch(epoch_seconds: float) -> None:
    """Let the engine stamp by another Unix time of the scenario's start, as it does once the wall clock was set."""
    _engine().epoch_seconds = epoch_seconds


def uninstall() -> None:
    """Take the library away; harmless where there is none."""
    _Installed.engine = None
    library.uninstall()


def knock(address: str, _seconds: float) -> None:
    """Look at an endpoint as a plain socket would; ``address`` is ``host:port`` or ``unix:///path``.

    Raises:
        OSError: as the socket would: refused, or no such file.
    """
    if address.startswith("unix:"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if Fault.ENGINE_DOWN in _engine().now().faults or not dcgm_connections.listens_at(address):
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def fail(function_name: str, code: int, *, field_id: int | None = None, times: int | None = None) -> None:
    """Let a C function answer an error until ``clear_failures``.

    Args:
        function_name: C symbol, e.g. ``dcgmWatchFields``.
        code: dcgmReturn_t.
        field_id: Only for field groups that have this field: ``dcgmWatchFields`` and ``dcgmFieldGroupCreate``.
        times: How many calls fail; ``None``: all.

    Raises:
        ValueError: The fake library has no such function, or is not installed.
    """
    if function_name not in _CALLS:
        raise ValueError(f"the simulated libdcgm has no function {function_name!r}")
    name = function_name if field_id is None else f"{function_name} of"
    _engine().failures.setdefault(name, []).append(Failure(code=code, field_id=field_id, times=times))


def clear_failures() -> None:
    """End every error that ``fail`` asked for."""
    _engine().failures.clear()


def held() -> dict[str, int]:
    """How many connections, groups, field groups and watches there are now: leaks show here."""
    connections: list[Connection] = list(_engine().connections.values())
    return {
        "connections": len(connections),
        "groups": sum(len(one.groups) for one in connections),
        "field_groups": sum(len(one.field_groups) for one in connections),
        "watches": sum(len(one.watches) for one in connections),
    }


def _engine() -> Engine:
    if _Installed.engine is None:
        raise ValueError("the simulated libdcgm is not installed: call dcgm.install(truth) first")
    return _Installed.engine

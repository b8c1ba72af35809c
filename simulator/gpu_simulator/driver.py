"""A driver that does not exist, put as the loaded library under the real pynvml binding."""

import time
from collections.abc import Callable

import pynvml

from gpu_simulator import driver_devices, driver_mig, driver_processes
from gpu_simulator.driver_session import (
    CALLS,
    CArgument,
    CLibrary,
    Session,
    plain,
    put_text,
    system,
)
from gpu_simulator.gpu_values import cuda_major
from gpu_simulator.truth import NodeTruth

_DECLARE = (driver_devices, driver_mig, driver_processes)
"""Modules that declare C functions when they are imported."""
_NO_GPUS_IS_FINE = 0x1
_ERRORS = {
    0: "Success",
    1: "Uninitialized",
    2: "Invalid Argument",
    3: "Not Supported",
    4: "Insufficient Permissions",
    6: "Not Found",
    7: "Insufficient Size",
    9: "Driver Not Loaded",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires reset",
    18: "Driver/library version mismatch",
    25: "Argument version mismatch",
    28: "GPU not found",
}


@system("nvmlInitWithFlags", needs_init=False)
def _init_with_flags(session: Session, flags: CArgument) -> None:
    session.open(tolerate_no_gpus=bool(plain(flags) & _NO_GPUS_IS_FINE))


@system("nvmlSystemGetDriverVersion")
def _driver_version(session: Session, buffer: CArgument, size: CArgument) -> None:
    put_text(buffer, size, session.now().driver_version)


@system("nvmlSystemGetNVMLVersion")
def _nvml_version(session: Session, buffer: CArgument, size: CArgument) -> None:
    version = session.now().driver_version
    put_text(buffer, size, f"{cuda_major(version)}.{version}")


def _shutdown(session: Session) -> None:
    """Closing works whatever is wrong with the driver, except while it hangs."""
    session.wait_while_hung()
    session.close()


CALLS["nvmlShutdown"] = _shutdown


def _error_string(code: CArgument) -> bytes:
    return _ERRORS.get(plain(code), "Unknown Error").encode()


class _Installed:
    """The one session of this process and what was loaded before it."""

    session: Session | None = None
    previous: object = None


def install(
    truth: Callable[[], NodeTruth],
    *,
    cache_seconds: float = 0.02,
    epoch_seconds: float = 1_700_000_000.0,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Put a fake driver that answers from ``truth`` under pynvml, as if the process had just loaded its library.

    Args:
        truth: The node now; asked at most every ``cache_seconds`` (0: at every call).
        cache_seconds: How long one answer of ``truth`` serves, in real seconds, so that a burst of calls costs one.
        epoch_seconds: Unix time of the scenario's start, for the timestamps in samples and field values.
        monotonic: Real clock for cache and waits, seconds.
        sleep: How hangs, slow calls and waits pass time.
    """
    if _Installed.session is None:
        _Installed.previous = pynvml.nvmlLib
    _Installed.session = Session(
        source=truth, monotonic=monotonic, sleep=sleep, cache_seconds=cache_seconds, epoch_seconds=epoch_seconds
    )
    _swap(CLibrary(_Installed.session, CALLS, {"nvmlErrorString": _error_string}))


def uninstall() -> None:
    """Give pynvml back what it had before the first ``install``; harmless where there was none."""
    if _Installed.session is not None:
        _swap(_Installed.previous)
        _Installed.session = _Installed.previous = None


def _swap(library: object) -> None:
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - pointers are cached by name for ever
    pynvml._nvmlLib_refcount = 0  # noqa: SLF001 - the new library was never initialised


def set_epoch(epoch_seconds: float) -> None:
    """Let the driver stamp by another Unix time of the scenario's start, as it does once the wall clock was set.

    Raises:
        ValueError: The fake driver is not installed.
    """
    _session().epoch_seconds = epoch_seconds


def fail(function_name: str, code: int, device_index: int | None = None, times: int | None = None) -> None:
    """Let a C function answer an error until ``clear_failures``.

    Args:
        function_name: C symbol as pynvml looks it up, e.g. ``nvmlDeviceGetMemoryInfo_v2``.
        code: nvmlReturn_t; 13 is what a missing symbol looks like.
        device_index: Index of the GPU in the truth; ``None``: whatever it is called for.
        times: How many calls fail; ``None``: all.

    Raises:
        ValueError: The fake driver has no such function, or is not installed.
    """
    _session().failures.add(function_name, code, device_index, times)


def clear_failures() -> None:
    """End every error that ``fail`` asked for."""
    _session().failures.by_name.clear()


def events_told() -> bool:
    """Return whether every event set has delivered its events so far and is waited on again; true without a set."""
    session = _session()
    node = session.now(fresh=True)
    return all(driver_processes.is_delivered(registered, node) for registered in list(session.event_sets.values()))


def _session() -> Session:
    if _Installed.session is None:
        raise ValueError("the simulated driver is not installed: call driver.install(truth) first")
    return _Installed.session

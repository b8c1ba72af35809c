"""Loads and unloads NVML, and interprets its error codes."""

import ctypes
import math
from collections.abc import Callable, Container, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

from exporter.errors import SourceError
from exporter.model.fields import Field

Handle = Any
"""Handle from pynvml; never a number, because ctypes would cut it to 32 bits."""


_REASONS: Mapping[int, str] = {
    **{
        code: name.removeprefix("NVML_ERROR_").lower()
        for name, code in vars(pynvml).items()
        if name.startswith("NVML_ERROR_")
    },
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "library_mismatch",
    pynvml.NVML_ERROR_UNKNOWN: "unknown_error",
}

DRIVER_GONE = frozenset(
    {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
)
"""Codes that concern the driver as a whole, from a call on any device. NOT_READY is not among them, because a GPU may
return it for one field (for example in confidential-computing mode)."""

UNAVAILABLE = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_CORRUPTED_INFOROM,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
"""Codes that the next sample would return too, so that the call is left out for some time."""

_RETRY_SECONDS = 600.0

_FIXES = {
    "library_not_found": "the driver library libnvidia-ml.so.1 was not found: install the NVIDIA driver on the node, or"
    " run this container with the NVIDIA runtime (runtimeClassName: nvidia), which mounts the library",
    "driver_not_loaded": "the NVIDIA kernel module is not loaded: load it (modprobe nvidia) or see dmesg for NVRM lines"
    " on why it does not load; normal for minutes while a driver is upgraded",
    "library_mismatch": "the driver library and the loaded kernel module have different versions: finish the driver"
    " upgrade (reload the kernel module or restart the node); in a container, restart the pod",
    "no_permission": "the driver refuses access: the /dev/nvidia* device nodes must be readable and writable for this"
    " process (in a container: use the NVIDIA runtime with NVIDIA_VISIBLE_DEVICES=all)",
    "not_ready": "the driver is not ready yet: it is tried again",
    "timeout": "the driver did not start in time: see dmesg for NVRM lines; it is tried again",
    "no_gpus": "the driver is loaded and shows no GPU: check lspci and dmesg for NVRM lines; in a container set"
    " NVIDIA_VISIBLE_DEVICES=all; keep this agent off nodes without GPUs with a node selector",
    "gpu_is_lost": "no GPU answers; they fell off the bus: see dmesg for Xid 79, then reset them or restart the node",
    "wrong_package": "the module pynvml is not nvidia-ml-py: uninstall the package pynvml and install nvidia-ml-py",
}


def code_of(error: pynvml.NVMLError) -> int:
    """Return the NVML return code of an error; the errors must not be compared or hashed."""
    return int(error.value)


def code_unless_fatal(error: pynvml.NVMLError) -> int:
    """Return the return code of an error.

    Raises:
        pynvml.NVMLError: The same error, if the device is lost or the driver as a whole is gone.
    """
    code = code_of(error)
    if code == pynvml.NVML_ERROR_GPU_IS_LOST or code in DRIVER_GONE:
        raise error
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Data that the readers of devices share in one session of the driver."""

    fields: frozenset[Field]
    """Fields to read."""
    count: Callable[[str], None]
    """Called with the reason of each error."""
    clock: Callable[[], float]
    """Clock of the samples, in seconds; read again during a sample, since driver calls can take long."""
    major: int
    """Branch of the driver: 590 for 590.48.01; 0 if unknown."""
    record: type[ctypes.Structure]
    """Layout of a process record in the loaded library."""
    oldest_seconds: float
    """Longest time over which a mean is still reported."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Stores the failed calls of one device, and the time of the next attempt of each."""

    count: Callable[[str], None]
    """Called with the reason of each failure, but not of a missing feature."""
    prefix: str = ""
    """Prefix of the reasons."""
    counts_missing: bool = False
    """Whether a missing feature is counted too, because the driver has reported that it exists."""
    _due_at: dict[Hashable, float] = field(default_factory=dict)

    def is_due(self, call: Hashable, now: float) -> bool:
        """Return whether a call must be made now."""
        return self._due_at.get(call, now) <= now

    def put_off(self, call: Hashable, until: float) -> None:
        """Leave a call out until a time."""
        self._due_at[call] = until

    def failed(self, call: Hashable, error: pynvml.NVMLError, now: float, *, soon_seconds: float = 0.0) -> None:
        """Leave a failed call out: permanently without the function, long if it would fail again, otherwise shortly.

        Raises:
            pynvml.NVMLError: The same error, if the device is lost or the driver as a whole is gone.
        """
        code = code_unless_fatal(error)
        if code not in UNAVAILABLE or code == pynvml.NVML_ERROR_NO_PERMISSION or self.counts_missing:
            self.count(self.prefix + reason_of(code))
        seconds = _RETRY_SECONDS if code in UNAVAILABLE else soon_seconds
        # A function that the library lacks stays missing; other errors can end (ECC enabled, MIG disabled).
        self._due_at[call] = now + (math.inf if code == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND else seconds)


def optional(call: Callable[..., Any], *arguments: object, absent: Container[int] = UNAVAILABLE) -> Any:  # noqa: ANN401 - pynvml is untyped
    """Return the answer of a call; ``None`` for an error with one of the codes of a missing feature.

    Raises:
        pynvml.NVMLError: An error with any other code.
    """
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if code_of(error) not in absent:
            raise
        return None


def reason_of(code: int) -> str:
    """Return a snake-case reason for an NVML return code, valid as a label value."""
    return _REASONS.get(code, f"nvml_error_{code}")


def driver_error(error: pynvml.NVMLError) -> SourceError:
    """Return the error for a driver that does not work as a whole, with its cause and fix."""
    return problem(reason_of(code_of(error)))


def problem(reason: str) -> SourceError:
    """Return the error for a reason, with its cause and its fix."""
    fallback = f"the driver library could not be opened ({reason}): see dmesg for NVRM lines; it is tried again"
    return SourceError(reason, _FIXES.get(reason, fallback))


def open_driver() -> None:
    """Load the library if needed, and initialise it; this also succeeds on a node without a GPU.

    Raises:
        SourceError: With reason ``library_not_found``, ``driver_not_loaded``, ``library_mismatch``, ...
    """
    if not hasattr(pynvml, "_nvmlGetFunctionPointer") or not hasattr(pynvml, "NVMLError"):
        raise problem("wrong_package")
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    except pynvml.NVMLError as error:
        raise driver_error(error) from error
    except AttributeError as error:
        raise problem("wrong_package") from error


def close_driver() -> None:
    """Shut the library down, so that a GPU can be reset or the driver unloaded; driver errors are ignored."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        # The driver is already gone; there is nothing to close.
        return


def text(call: Callable[..., object], *arguments: object) -> str | None:
    """Return a text from the driver; ``None`` if it is missing or not text (a damaged InfoROM)."""
    try:
        value = call(*arguments)
    except UnicodeDecodeError:
        return None
    decoded = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return decoded.strip() or None


def function(name: str) -> Callable[..., int] | None:
    """Return a C function of the library by name; ``None`` if this driver lacks it."""
    try:
        pointer: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001 - the binding has no public way
    except pynvml.NVMLError:
        return None
    return pointer


def address(handle: Handle) -> int:
    """Return the number of a handle, only to compare handles; never pass it to the driver."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0

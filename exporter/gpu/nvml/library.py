"""Loads and unloads NVML, and interprets its error codes."""

import ctypes
from collections.abc import Callable, Container, Mapping
from typing import Any

import pynvml

from exporter.errors import SourceError


class NvmlCode:
    """Return codes (nvmlReturn_t) in use. No enum: access to its members takes ten times as long."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIBRARY_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    GPU_NOT_FOUND = 28
    INVALID_STATE = 29
    UNKNOWN_ERROR = 999


_REASONS: Mapping[int, str] = {code: name.lower() for name, code in vars(NvmlCode).items() if name.isupper()}

DRIVER_GONE = frozenset({NvmlCode.UNINITIALIZED, NvmlCode.DRIVER_NOT_LOADED, NvmlCode.LIBRARY_MISMATCH})
"""Codes about the driver as a whole, from a call on any device. NOT_READY is not one: a GPU may return it for one field
(in confidential-computing mode, for example)."""

UNAVAILABLE = frozenset(
    {
        NvmlCode.NOT_SUPPORTED,
        NvmlCode.NO_PERMISSION,
        NvmlCode.FUNCTION_NOT_FOUND,
        NvmlCode.CORRUPTED_INFOROM,
        NvmlCode.ARGUMENT_VERSION_MISMATCH,
        NvmlCode.DEPRECATED,
    }
)
"""Codes that will be the same at the next sample, so the call is skipped for a while."""

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
    """Return the NVML return code of an error; errors themselves must not be compared or hashed."""
    return int(error.value)


def code_unless_fatal(error: pynvml.NVMLError) -> int:
    """Return the return code of an error.

    Raises:
        pynvml.NVMLError: The same error, if the device is lost or the driver as a whole is gone.
    """
    code = code_of(error)
    if code == NvmlCode.GPU_IS_LOST or code in DRIVER_GONE:
        raise error
    return code


def optional(call: Callable[..., Any], *arguments: object, absent: Container[int] = UNAVAILABLE) -> Any:  # noqa: ANN401 - pynvml is untyped
    """Return the answer of a call; ``None`` for an error with one of the codes that mean "not there".

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


def error_of(code: int) -> SourceError:
    """Return the error of a driver that cannot work as a whole, with its cause and its fix."""
    return problem(reason_of(code))


def problem(reason: str) -> SourceError:
    """Return the error for a reason, with its cause and its fix."""
    fallback = f"the driver library could not be opened ({reason}): see dmesg for NVRM lines; it is tried again"
    return SourceError(reason, _FIXES.get(reason, fallback))


def open_driver() -> None:
    """Load the library if it is not loaded yet, and initialise it; also succeeds on a node without a GPU.

    Raises:
        SourceError: With reason ``library_not_found``, ``driver_not_loaded``, ``library_mismatch``, ...
    """
    if not hasattr(pynvml, "_nvmlGetFunctionPointer") or not hasattr(pynvml, "NVMLError"):
        raise problem("wrong_package")
    try:
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
    except pynvml.NVMLError as error:
        raise error_of(code_of(error)) from error
    except AttributeError as error:
        raise problem("wrong_package") from error


def close_driver() -> None:
    """Shut the library down, so that a GPU can be reset or the driver unloaded; never raises for a driver's error."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        # The driver is already gone; there is nothing to close.
        return


def read_text(call: Callable[..., object], *arguments: object) -> str | None:
    """Return a text of the driver; ``None`` without one or if its bytes are not text.

    A damaged InfoROM gives bytes that are not UTF-8.

    Raises:
        pynvml.NVMLError: The device is lost, or the driver as a whole is gone.
    """
    try:
        value = call(*arguments)
    except UnicodeDecodeError:
        return None
    except pynvml.NVMLError as error:
        code_unless_fatal(error)
        return None
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.strip() or None


def function(name: str) -> Callable[..., int] | None:
    """Return the library's C function of this name, or ``None`` if this driver does not have it."""
    try:
        pointer: Callable[..., int] = pynvml._nvmlGetFunctionPointer(name)  # noqa: SLF001 - the binding has no other door
    except pynvml.NVMLError:
        return None
    return pointer


def address(handle: Any) -> int:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return the number behind a handle, to compare two handles; never pass it to the driver."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0

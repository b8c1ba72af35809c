"""What is fixed about a physical GPU: its identity, its place, its text fields, its MIG shape."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pynvml

from exporter.errors import SourceError
from exporter.model import Field, Gpu
from exporter.sources import driver, mig

_RETRY_SECONDS = 10.0
_UNAVAILABLE_RETRY_SECONDS = 600.0

# As DCGM spells them.
_BRANDS = {
    0: "Unknown",
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    7: "NVIDIA Virtual Applications",
    8: "NVIDIA Virtual PC",
    9: "NVIDIA Virtual Compute Server",
    10: "NVIDIA RTX Virtual Workstation",
    11: "NVIDIA vGaming",
    12: "Quadro RTX",
    13: "NVIDIA RTX",
    14: "NVIDIA",
    15: "GeForce RTX",
    16: "Titan RTX",
}


def read(handle: Any, index: int) -> Gpu:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return the identity of the GPU behind a handle.

    Raises:
        pynvml.NVMLError: the GPU does not say who it is.
        SourceError: its UUID is not text (a damaged InfoROM).
    """
    try:
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError as error:
        message = f"GPU {index} tells a UUID that is not text: its InfoROM is damaged; see nvidia-smi -q -i {index}"
        raise SourceError("undecodable_uuid", message) from error
    shape = mig.shape(handle)
    return Gpu(
        uuid=uuid,
        index=index,
        minor=None,
        model="unknown",
        pci_bus_id=_bus_id(handle),
        mig_enabled=shape.enabled,
        compute_slices=shape.compute_slices,
        memory_slices=shape.memory_slices,
    )


class Facts:
    """Facts of one GPU that do not change: each is asked for until the driver has answered.

    Args:
        handle: Of the GPU, in the present generation of the driver.
        count: Called with the reason of each failure.
    """

    def __init__(self, handle: Any, count: Callable[[str], None]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self._handle = handle
        self._count = count
        self._due = dict.fromkeys(_FACTS, -math.inf)

    def complete(self, gpu: Gpu, now: float) -> Gpu:
        """Return the GPU with what is known by now.

        Args:
            gpu: The GPU as it is known so far.
            now: Seconds; only differences matter.

        Raises:
            pynvml.NVMLError: the GPU is lost, or the driver as a whole is gone.
        """
        for fact in [fact for fact, due in self._due.items() if due <= now]:
            try:
                answer = _FACTS[fact](self._handle)
            except pynvml.NVMLError as error:
                self._put_off(fact, driver.code_of(error), now)
                continue
            except UnicodeDecodeError:
                answer = None  # a damaged InfoROM
            del self._due[fact]
            if isinstance(fact, Field):
                gpu = replace(gpu, labels={**gpu.labels, fact: str(answer)}) if answer else gpu
            elif answer is not None:
                gpu = replace(gpu, minor=int(answer)) if fact == "minor" else replace(gpu, model=str(answer))
        return gpu

    def _put_off(self, fact: "str | Field", code: int, now: float) -> None:
        if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
            raise pynvml.NVMLError(code)
        if code in driver.UNAVAILABLE:
            self._due[fact] = now + _UNAVAILABLE_RETRY_SECONDS
        else:
            self._count(driver.reason_of(code))
            self._due[fact] = now + _RETRY_SECONDS


def _bus_id(handle: Any) -> str:  # noqa: ANN401 - a handle is whatever pynvml gave
    raw = pynvml.nvmlDeviceGetPciInfo_v3(handle).busId
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    return text.upper()


def _text(call: Callable[..., Any], handle: Any, *arguments: int) -> str | None:  # noqa: ANN401 - a handle is whatever pynvml gave
    value = call(handle, *arguments)
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.strip() or None


def _brand(handle: Any) -> str:  # noqa: ANN401 - a handle is whatever pynvml gave
    return _BRANDS.get(int(pynvml.nvmlDeviceGetBrand(handle)), "Unknown")


def _inforom(number: int, handle: Any) -> str | None:  # noqa: ANN401 - a handle is whatever pynvml gave
    return _text(pynvml.nvmlDeviceGetInforomVersion, handle, number)


def _minor(handle: Any) -> int:  # noqa: ANN401 - a handle is whatever pynvml gave
    return int(pynvml.nvmlDeviceGetMinorNumber(handle))


_FACTS: Mapping[str | Field, Callable[[Any], int | str | None]] = {
    "minor": _minor,
    "model": lambda handle: _text(pynvml.nvmlDeviceGetName, handle),
    Field.BRAND: _brand,
    Field.SERIAL: lambda handle: _text(pynvml.nvmlDeviceGetSerial, handle),
    Field.OEM_INFOROM_VER: partial(_inforom, 0),
    Field.ECC_INFOROM_VER: partial(_inforom, 1),
    Field.POWER_INFOROM_VER: partial(_inforom, 2),
    Field.INFOROM_IMAGE_VER: lambda handle: _text(pynvml.nvmlDeviceGetInforomImageVersion, handle),
    Field.VBIOS_VERSION: lambda handle: _text(pynvml.nvmlDeviceGetVbiosVersion, handle),
}
"""By the label's field, or by the name of what else they are; memory and MIG shape are read with every sample."""

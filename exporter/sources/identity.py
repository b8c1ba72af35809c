"""What is fixed about a physical GPU: its identity, its place, its text fields, its MIG shape."""

from collections.abc import Callable
from typing import Any

import pynvml

from exporter.errors import SourceError
from exporter.model import Field, Gpu
from exporter.sources import driver, mig

# As DCGM spells them.
_BRANDS = {
    0: "Unknown",
    1: "Quadro",
    2: "Tesla",
    3: "NVS",
    4: "Grid",
    5: "GeForce",
    6: "Titan",
    7: "NvidiaVApps",
    8: "NvidiaVPC",
    9: "NvidiaVCS",
    10: "NvidiaVWS",
    11: "NvidiaCloudGaming",
    12: "QuadroRTX",
    13: "NvidiaRTX",
    14: "Nvidia",
    15: "GeForceRTX",
    16: "TitanRTX",
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
        minor=_optional(pynvml.nvmlDeviceGetMinorNumber, handle),
        model=driver.read_text(pynvml.nvmlDeviceGetName, handle) or "unknown",
        pci_bus_id=_bus_id(handle),
        mig_enabled=shape.enabled,
        compute_slices=shape.compute_slices,
        memory_slices=shape.memory_slices,
        memory_total_bytes=_optional(_memory_total, handle) or None,
        labels=_labels(handle),
    )


def _optional(call: Callable[[Any], Any], handle: Any) -> int | None:  # noqa: ANN401 - a handle is whatever pynvml gave
    try:
        return int(call(handle))
    except pynvml.NVMLError as error:
        if driver.code_of(error) == driver.GPU_IS_LOST or driver.code_of(error) in driver.DRIVER_GONE:
            raise
        return None


def _memory_total(handle: Any) -> int:  # noqa: ANN401 - a handle is whatever pynvml gave
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _bus_id(handle: Any) -> str:  # noqa: ANN401 - a handle is whatever pynvml gave
    raw = pynvml.nvmlDeviceGetPciInfo_v3(handle).busId
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    return text.upper()


def _labels(handle: Any) -> dict[Field, str]:  # noqa: ANN401 - a handle is whatever pynvml gave
    brand = _optional(pynvml.nvmlDeviceGetBrand, handle)
    texts = {
        Field.BRAND: None if brand is None else _BRANDS.get(brand, "Unknown"),
        Field.SERIAL: driver.read_text(pynvml.nvmlDeviceGetSerial, handle),
        Field.OEM_INFOROM_VER: driver.read_text(pynvml.nvmlDeviceGetInforomVersion, handle, 0),
        Field.ECC_INFOROM_VER: driver.read_text(pynvml.nvmlDeviceGetInforomVersion, handle, 1),
        Field.POWER_INFOROM_VER: driver.read_text(pynvml.nvmlDeviceGetInforomVersion, handle, 2),
        Field.INFOROM_IMAGE_VER: driver.read_text(pynvml.nvmlDeviceGetInforomImageVersion, handle),
        Field.VBIOS_VERSION: driver.read_text(pynvml.nvmlDeviceGetVbiosVersion, handle),
    }
    return {field: text for field, text in texts.items() if text is not None}

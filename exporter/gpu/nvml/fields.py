"""Maps NVML calls and field values to fields with unit and pace, and reads identities."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, auto
from typing import Any

import pynvml

from exporter.errors import SourceError
from exporter.gpu.nvml import library, mig
from exporter.gpu.nvml.library import NvmlCode
from exporter.model import Field, Gpu

Number = int | float
Handle = Any
"""A device handle from pynvml; never a number, which ctypes would cut to 32 bits."""

MIB = 2**20
ALL_LINKS = 0xFFFFFFFF


class Pace(IntEnum):
    """How often a value is read."""

    FAST = auto()
    """Every sample."""
    SLOW = auto()
    """Every few samples; the last value is reported in between."""
    RARE = auto()
    """Once a minute; the last value is reported in between."""
    STATIC = auto()
    """Until it is read once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Getter:
    """One driver call and the fields that its answer fills, in order; ``None`` in the answer is "not reported"."""

    fields: tuple[Field, ...]
    read: Callable[[Handle], tuple[Number | None, ...]]
    pace: Pace = Pace.FAST


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldValue:
    """One item of the batched field-value call.

    The meaning of ids from 199 up changed between drivers, so those have the first driver branch with this meaning.
    """

    field: Field
    id: int
    scope: int = 0
    pace: Pace = Pace.FAST
    convert: Callable[[Number], Number] | None = None
    since_driver: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Key that distinguishes the items of the batch."""
        return self.id, self.scope


def _number(value: object) -> tuple[Number | None, ...]:
    return (value if isinstance(value, int | float) else int(getattr(value, "value", 0)),)


def _one(field: Field, call: Callable[[Handle], object], pace: Pace = Pace.FAST) -> Getter:
    """Return a getter for one number in the field's own unit."""
    return Getter(fields=(field,), read=lambda handle: _number(call(handle)), pace=pace)


def _either(handle: Handle, new: Callable[[Handle], Any], old: Callable[[Handle], Any]) -> Any:  # noqa: ANN401 - pynvml is untyped
    """Try the newer form of a call first; older drivers lack it, and some report it as not supported."""
    answer = library.optional(new, handle)
    return old(handle) if answer is None else answer


def _utilisation(handle: Handle) -> tuple[int, int]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


def _temperature(handle: Handle) -> int:
    return int(
        _either(
            handle,
            lambda one: pynvml.nvmlDeviceGetTemperatureV(one, pynvml.NVML_TEMPERATURE_GPU),
            lambda one: pynvml.nvmlDeviceGetTemperature(one, pynvml.NVML_TEMPERATURE_GPU),
        )
    )


def _event_reasons(handle: Handle) -> int:
    return int(
        _either(
            handle,
            pynvml.nvmlDeviceGetCurrentClocksEventReasons,
            pynvml.nvmlDeviceGetCurrentClocksThrottleReasons,
        )
    )


_OLD_MEMORY_CALL = (NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.ARGUMENT_VERSION_MISMATCH)
MEMORY_FIELDS = (Field.FB_TOTAL, Field.FB_FREE, Field.FB_USED, Field.FB_RESERVED, Field.FB_USED_PERCENT)


def memory(handle: Handle) -> tuple[Number | None, ...]:
    """Return ``MEMORY_FIELDS`` of a GPU or MIG handle: MiB, and the used part as a ratio.

    The old form of the call counts the driver's reserved memory as used and does not separate it.
    """
    info = library.optional(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2, absent=_OLD_MEMORY_CALL)
    if info is None:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
        ratio = info.used / info.total if info.total else None
        return info.total // MIB, info.free // MIB, info.used // MIB, None, ratio
    usable = info.total - info.reserved
    ratio = info.used / usable if usable > 0 else None
    return info.total // MIB, info.free // MIB, info.used // MIB, info.reserved // MIB, ratio


def _bar1(handle: Handle) -> tuple[int, int, int]:
    info = pynvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    return info.bar1Total // MIB, info.bar1Used // MIB, info.bar1Free // MIB


def _limits(handle: Handle) -> tuple[int, int]:
    low, high = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return low // 1000, high // 1000


def _licence(handle: Handle) -> int:
    """Return 1 if a vGPU guest has its licence; 0 without one, like dcgm-exporter."""
    absent = (NvmlCode.NOT_SUPPORTED,)
    features = library.optional(pynvml.nvmlDeviceGetGridLicensableFeatures, handle, absent=absent)
    for feature in features.gridLicensableFeatures[: features.licensableFeaturesCount] if features else ():
        if feature.featureCode == pynvml.NVML_GRID_LICENSE_FEATURE_CODE_VGPU:
            return int(feature.featureState)
    return 0


def _clock(field: Field, clock: int) -> Getter:
    return _one(field, lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, clock))


def _max_clock(field: Field, clock: int) -> Getter:
    return _one(field, lambda handle: pynvml.nvmlDeviceGetMaxClockInfo(handle, clock), Pace.STATIC)


def _threshold(field: Field, threshold: int) -> Getter:
    return _one(field, lambda handle: pynvml.nvmlDeviceGetTemperatureThreshold(handle, threshold), Pace.STATIC)


def _first(field: Field, call: Callable[[Handle], Any]) -> Getter:
    """Return a getter for an answer of [value, sampling period]."""
    return _one(field, lambda handle: call(handle)[0])


def _milliwatts(field: Field, call: Callable[[Handle], Any]) -> Getter:
    """Return a getter for a limit in milliwatts; DCGM reports whole watts."""
    return _one(field, lambda handle: call(handle) // 1000, Pace.SLOW)


# Functions are resolved when called: a binding of another version may lack one, and then only one field is absent.
def _call(name: str) -> Callable[[Handle], Any]:
    def call(handle: Handle) -> Any:  # noqa: ANN401 - pynvml is untyped
        target = getattr(pynvml, name, None)
        if target is None:
            raise pynvml.NVMLError(NvmlCode.FUNCTION_NOT_FOUND)
        return target(handle)

    return call


GETTERS = (
    Getter(fields=MEMORY_FIELDS, read=memory),
    Getter(fields=(Field.GPU_UTIL, Field.MEM_COPY_UTIL), read=_utilisation),
    _clock(Field.SM_CLOCK, pynvml.NVML_CLOCK_SM),
    _clock(Field.MEM_CLOCK, pynvml.NVML_CLOCK_MEM),
    _clock(Field.VIDEO_CLOCK, pynvml.NVML_CLOCK_VIDEO),
    _one(Field.GPU_TEMP, _temperature),
    _one(Field.POWER_USAGE, lambda handle: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
    _first(Field.ENC_UTIL, _call("nvmlDeviceGetEncoderUtilization")),
    _first(Field.DEC_UTIL, _call("nvmlDeviceGetDecoderUtilization")),
    _first(Field.JPG_UTIL, _call("nvmlDeviceGetJpgUtilization")),
    _first(Field.OFA_UTIL, _call("nvmlDeviceGetOfaUtilization")),
    _one(Field.CLOCK_THROTTLE_REASONS, _event_reasons),
    _one(Field.PSTATE, _call("nvmlDeviceGetPerformanceState")),
    _one(Field.GPU_TEMP_LIMIT, _call("nvmlDeviceGetMarginTemperature"), Pace.SLOW),
    _one(Field.FAN_SPEED, _call("nvmlDeviceGetFanSpeed"), Pace.SLOW),
    Getter(fields=(Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE), read=_bar1, pace=Pace.SLOW),
    _one(Field.PCIE_LINK_GEN, _call("nvmlDeviceGetCurrPcieLinkGeneration"), Pace.RARE),
    _one(Field.PCIE_LINK_WIDTH, _call("nvmlDeviceGetCurrPcieLinkWidth"), Pace.RARE),
    _milliwatts(Field.POWER_MGMT_LIMIT, _call("nvmlDeviceGetPowerManagementLimit")),
    _milliwatts(Field.POWER_MGMT_LIMIT_DEF, _call("nvmlDeviceGetPowerManagementDefaultLimit")),
    _milliwatts(Field.ENFORCED_POWER_LIMIT, _call("nvmlDeviceGetEnforcedPowerLimit")),
    Getter(fields=(Field.POWER_MGMT_LIMIT_MIN, Field.POWER_MGMT_LIMIT_MAX), read=_limits, pace=Pace.SLOW),
    _one(Field.RETIRED_SBE, lambda handle: len(pynvml.nvmlDeviceGetRetiredPages(handle, 0)), Pace.SLOW),
    _one(Field.MEMORY_UNREPAIRABLE_FLAG, _call("nvmlDeviceGetUnrepairableMemoryFlag_v1"), Pace.SLOW),
    _one(Field.VGPU_LICENSE_STATUS, _licence, Pace.SLOW),
    _max_clock(Field.MAX_SM_CLOCK, pynvml.NVML_CLOCK_SM),
    _max_clock(Field.MAX_MEM_CLOCK, pynvml.NVML_CLOCK_MEM),
    _threshold(Field.SHUTDOWN_TEMP, 0),
    _threshold(Field.SLOWDOWN_TEMP, 1),
    _threshold(Field.MEM_MAX_OP_TEMP, 2),
    _threshold(Field.GPU_MAX_OP_TEMP, 3),
    _one(Field.PCIE_MAX_LINK_GEN, _call("nvmlDeviceGetMaxPcieLinkGeneration"), Pace.STATIC),
    _one(Field.PCIE_MAX_LINK_WIDTH, _call("nvmlDeviceGetMaxPcieLinkWidth"), Pace.STATIC),
    _one(Field.VIRTUAL_MODE, _call("nvmlDeviceGetVirtualizationMode"), Pace.STATIC),
)


def _kib_to_bytes(value: Number) -> Number:
    return value * 1024


def _slow(field: Field, number: int, *, scope: int = 0, since_driver: int = 0) -> FieldValue:
    return FieldValue(field=field, id=number, scope=scope, pace=Pace.SLOW, since_driver=since_driver)


_VIOLATIONS = tuple(_slow(Field(field), number) for field, number in zip(range(240, 248), range(74, 82), strict=True))

FIELD_VALUES = (
    FieldValue(field=Field.MEMORY_TEMP, id=82),
    FieldValue(field=Field.TOTAL_ENERGY_CONSUMPTION, id=83),
    FieldValue(field=Field.POWER_USAGE_INSTANT, id=186, convert=lambda milliwatts: milliwatts / 1000),
    # Not 197 and 198, bytes over PCIe: on an H100 with driver 580 they have 32 bits and wrap 13 times a second.
    FieldValue(field=Field.NVLINK_TX_BYTES_TOTAL, id=138, scope=ALL_LINKS, convert=_kib_to_bytes),
    FieldValue(field=Field.NVLINK_RX_BYTES_TOTAL, id=139, scope=ALL_LINKS, convert=_kib_to_bytes),
    # NVLink 5 (Blackwell) counts bytes, elsewhere.
    FieldValue(field=Field.NVLINK_TX_BYTES_TOTAL, id=202, scope=ALL_LINKS, since_driver=570),
    FieldValue(field=Field.NVLINK_RX_BYTES_TOTAL, id=204, scope=ALL_LINKS, since_driver=570),
    *_VIOLATIONS,
    _slow(Field.ECC_SBE_VOL_TOTAL, 3),
    _slow(Field.ECC_DBE_VOL_TOTAL, 4),
    _slow(Field.ECC_SBE_AGG_TOTAL, 5),
    _slow(Field.ECC_DBE_AGG_TOTAL, 6),
    _slow(Field.RETIRED_DBE, 30),
    _slow(Field.RETIRED_PENDING, 31),
    _slow(Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 38),
    _slow(Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, 45),
    _slow(Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL, 52),
    _slow(Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, 59),
    _slow(Field.PCIE_REPLAY_COUNTER, 94),
    _slow(Field.CORRECTABLE_REMAPPED_ROWS, 142),
    _slow(Field.UNCORRECTABLE_REMAPPED_ROWS, 143),
    _slow(Field.ROW_REMAP_PENDING, 144),
    _slow(Field.ROW_REMAP_FAILURE, 145),
    _slow(Field.NVLINK_ERROR_DL_REPLAY, 161),
    _slow(Field.NVLINK_ERROR_DL_RECOVERY, 162),
    _slow(Field.NVLINK_ERROR_DL_CRC, 163),
    _slow(Field.PCIE_COUNT_CORRECTABLE_ERRORS, 173),
    # NVLink 5 (Blackwell) counts its errors elsewhere too; symbol errors are left to its error correction.
    _slow(Field.NVLINK_COUNT_RX_ERRORS, 208, scope=ALL_LINKS, since_driver=570),
    _slow(Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS, 211, scope=ALL_LINKS, since_driver=570),
    _slow(Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS, 213, scope=ALL_LINKS, since_driver=570),
    _slow(Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, 214, scope=ALL_LINKS, since_driver=570),
    _slow(Field.GPU_RECOVERY_ACTION, 230, since_driver=565),
    # These changed within 575 and 580, where the ids had other meanings.
    _slow(Field.CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS, 269, since_driver=590),
    _slow(Field.CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS, 270, since_driver=590),
    _slow(Field.CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS, 271, since_driver=590),
)

LAST_ECC_ID = 31
"""Last id of error counters: whole numbers, whatever type the driver reports."""


def getters(fields: Iterable[Field]) -> tuple[Getter, ...]:
    """Return the calls that provide at least one of the fields."""
    wanted = frozenset(fields)
    return tuple(getter for getter in GETTERS if wanted.intersection(getter.fields))


def field_values(fields: Iterable[Field], driver_major: int) -> tuple[FieldValue, ...]:
    """Return the batch items of the fields that have a known meaning on this driver branch."""
    wanted = frozenset(fields)
    if Field.NVLINK_BANDWIDTH_TOTAL in wanted:
        wanted |= {Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL}
    return tuple(item for item in FIELD_VALUES if item.field in wanted and item.since_driver <= driver_major)


_RETRY_SECONDS = 10.0
_UNAVAILABLE_RETRY_SECONDS = 600.0

# In DCGM's spelling.
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


def identity_of(handle: Any, index: int) -> Gpu:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return the identity of the GPU behind a handle.

    Raises:
        pynvml.NVMLError: The GPU does not report its identity.
        SourceError: Its UUID is not text (a damaged InfoROM).
    """
    try:
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError as error:
        message = f"GPU {index} reports a UUID that is not text: its InfoROM is damaged; see nvidia-smi -q -i {index}"
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


class DeviceFacts:
    """Constant facts of one GPU: each is read until the driver has answered.

    Args:
        handle: Handle of the GPU, in the current session of the driver.
        count: Called with the reason of each failure.
    """

    def __init__(self, handle: Any, count: Callable[[str], None]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self._handle = handle
        self._count = count
        self._due = dict.fromkeys(_FACTS, -math.inf)

    def complete(self, gpu: Gpu, now: float) -> Gpu:
        """Return the GPU with the facts known so far.

        Args:
            gpu: The GPU with the facts known before.
            now: Seconds; only differences matter.

        Raises:
            pynvml.NVMLError: The GPU is lost, or the driver as a whole is gone.
        """
        for fact in [fact for fact, due in self._due.items() if due <= now]:
            try:
                answer = _FACTS[fact](self._handle)
            except pynvml.NVMLError as error:
                self._put_off(fact, library.code_unless_fatal(error), now)
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
        if code in library.UNAVAILABLE:
            self._due[fact] = now + _UNAVAILABLE_RETRY_SECONDS
        else:
            self._count(library.reason_of(code))
            self._due[fact] = now + _RETRY_SECONDS


def _bus_id(handle: Any) -> str:  # noqa: ANN401 - a handle is whatever pynvml gave
    raw = pynvml.nvmlDeviceGetPciInfo_v3(handle).busId
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    return text.upper()


def _text(call: Callable[..., Any], handle: Any, *arguments: int) -> str | None:  # noqa: ANN401 - a handle is whatever pynvml gave
    value = call(handle, *arguments)
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return text.strip() or None


_FACTS: Mapping[str | Field, Callable[[Any], int | str | None]] = {
    "minor": lambda handle: int(pynvml.nvmlDeviceGetMinorNumber(handle)),
    "model": lambda handle: _text(pynvml.nvmlDeviceGetName, handle),
    Field.BRAND: lambda handle: _BRANDS.get(int(pynvml.nvmlDeviceGetBrand(handle)), "Unknown"),
    Field.SERIAL: lambda handle: _text(pynvml.nvmlDeviceGetSerial, handle),
    Field.OEM_INFOROM_VER: lambda handle: _text(pynvml.nvmlDeviceGetInforomVersion, handle, 0),
    Field.ECC_INFOROM_VER: lambda handle: _text(pynvml.nvmlDeviceGetInforomVersion, handle, 1),
    Field.POWER_INFOROM_VER: lambda handle: _text(pynvml.nvmlDeviceGetInforomVersion, handle, 2),
    Field.INFOROM_IMAGE_VER: lambda handle: _text(pynvml.nvmlDeviceGetInforomImageVersion, handle),
    Field.VBIOS_VERSION: lambda handle: _text(pynvml.nvmlDeviceGetVbiosVersion, handle),
}
"""Calls by the label's field, or by the name of another fact; memory and MIG shape are read with every sample."""

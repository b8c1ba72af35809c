"""Reads the values and the identity of one GPU, and defines the NVML calls, units and paces of fields."""

import ctypes
import math
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pynvml

from exporter.errors import SourceError
from exporter.gpu.nvml import library, mig
from exporter.gpu.nvml.library import Driver, Handle, Retries
from exporter.model.devices import Gpu
from exporter.model.fields import Field

Number = int | float
MIB = 2**20
ALL_LINKS = 0xFFFFFFFF

FAST, SLOW, RARE, STATIC = 0.0, 10.0, 60.0, math.inf
"""Minimum seconds between two reads of a value: from every sample to a single read. Between reads, the last value is
reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Getter:
    """One driver call, and the fields of its answer in order; ``None`` in the answer means "not reported"."""

    fields: tuple[Field, ...]
    read: Callable[[Handle], tuple[Number | None, ...]]
    pace: float = FAST


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldValue:
    """One item of the batched field-value call.

    The meaning of ids from 199 up changed between drivers, so those have the first driver branch with this meaning.
    """

    field: Field
    id: int
    scope: int = 0
    pace: float = FAST
    convert: Callable[[Number], Number] | None = None
    since_driver: int = 0


def _call(name: str, handle: Handle, *arguments: int) -> Any:  # noqa: ANN401 - pynvml is untyped
    """Call a function of the binding; if this version of the binding lacks it, only its field is absent."""
    target = getattr(pynvml, name, None)
    if target is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    return target(handle, *arguments)


def _either(new: str, old: str, handle: Handle, *arguments: int) -> Any:  # noqa: ANN401 - pynvml is untyped
    """Make the newer form of a call, or the older form if the driver lacks or does not support the newer one."""
    answer = library.optional(_call, new, handle, *arguments)
    return _call(old, handle, *arguments) if answer is None else answer


def _utilisation(handle: Handle) -> tuple[int, int]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu, rates.memory


_OLD_MEMORY_CALL = (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
MEMORY_FIELDS = (Field.FB_TOTAL, Field.FB_FREE, Field.FB_USED, Field.FB_RESERVED, Field.FB_USED_PERCENT)


def memory(handle: Handle) -> tuple[Number | None, ...]:
    """Return ``MEMORY_FIELDS`` of a GPU or MIG handle: MiB, and the used part as a ratio.

    The older form of the call includes the driver's reserved memory in the used memory.
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
    absent = (pynvml.NVML_ERROR_NOT_SUPPORTED,)
    features = library.optional(pynvml.nvmlDeviceGetGridLicensableFeatures, handle, absent=absent)
    for feature in features.gridLicensableFeatures[: features.licensableFeaturesCount] if features else ():
        if feature.featureCode == pynvml.NVML_GRID_LICENSE_FEATURE_CODE_VGPU:
            return int(feature.featureState)
    return 0


def _number(answer: Any) -> Number:  # noqa: ANN401 - pynvml is untyped
    return answer if isinstance(answer, int | float) else int(getattr(answer, "value", 0))


def _first(answer: Any) -> Number:  # noqa: ANN401 - as above
    """Return the value of an answer of [value, sampling period]."""
    return _number(answer[0])


def _whole_watts(milliwatts: int) -> int:
    """Return whole watts, like DCGM."""
    return milliwatts // 1000


def _watts(milliwatts: Number) -> Number:
    return milliwatts / 1000


def _one(
    field: Field,
    call: str | Callable[..., Any],
    *arguments: int,
    pace: float = FAST,
    convert: Callable[[Any], Number] = _number,
) -> Getter:
    """Return a getter for one number: a function of the binding by name, or another one, its arguments and its unit."""
    ask = partial(_call, call) if isinstance(call, str) else call
    return Getter(fields=(field,), read=lambda handle: (convert(ask(handle, *arguments)),), pace=pace)


_temperature = partial(_either, "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
_event_reasons = partial(_either, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
GETTERS = (
    Getter(fields=MEMORY_FIELDS, read=memory),
    Getter(fields=(Field.GPU_UTIL, Field.MEM_COPY_UTIL), read=_utilisation),
    _one(Field.SM_CLOCK, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
    _one(Field.MEM_CLOCK, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
    _one(Field.VIDEO_CLOCK, "nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_VIDEO),
    _one(Field.GPU_TEMP, _temperature, pynvml.NVML_TEMPERATURE_GPU),
    _one(Field.POWER_USAGE, "nvmlDeviceGetPowerUsage", convert=_watts),
    _one(Field.ENC_UTIL, "nvmlDeviceGetEncoderUtilization", convert=_first),
    _one(Field.DEC_UTIL, "nvmlDeviceGetDecoderUtilization", convert=_first),
    _one(Field.JPG_UTIL, "nvmlDeviceGetJpgUtilization", convert=_first),
    _one(Field.OFA_UTIL, "nvmlDeviceGetOfaUtilization", convert=_first),
    _one(Field.CLOCK_THROTTLE_REASONS, _event_reasons),
    _one(Field.PSTATE, "nvmlDeviceGetPerformanceState"),
    _one(Field.GPU_TEMP_LIMIT, "nvmlDeviceGetMarginTemperature", pace=SLOW),
    _one(Field.FAN_SPEED, "nvmlDeviceGetFanSpeed", pace=SLOW),
    Getter(fields=(Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE), read=_bar1, pace=SLOW),
    _one(Field.PCIE_LINK_GEN, "nvmlDeviceGetCurrPcieLinkGeneration", pace=RARE),
    _one(Field.PCIE_LINK_WIDTH, "nvmlDeviceGetCurrPcieLinkWidth", pace=RARE),
    _one(Field.POWER_MGMT_LIMIT, "nvmlDeviceGetPowerManagementLimit", pace=SLOW, convert=_whole_watts),
    _one(Field.POWER_MGMT_LIMIT_DEF, "nvmlDeviceGetPowerManagementDefaultLimit", pace=SLOW, convert=_whole_watts),
    _one(Field.ENFORCED_POWER_LIMIT, "nvmlDeviceGetEnforcedPowerLimit", pace=SLOW, convert=_whole_watts),
    Getter(fields=(Field.POWER_MGMT_LIMIT_MIN, Field.POWER_MGMT_LIMIT_MAX), read=_limits, pace=SLOW),
    _one(Field.RETIRED_SBE, "nvmlDeviceGetRetiredPages", 0, pace=SLOW, convert=len),
    _one(Field.MEMORY_UNREPAIRABLE_FLAG, "nvmlDeviceGetUnrepairableMemoryFlag_v1", pace=SLOW),
    _one(Field.VGPU_LICENSE_STATUS, _licence, pace=SLOW),
    _one(Field.MAX_SM_CLOCK, "nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_SM, pace=STATIC),
    _one(Field.MAX_MEM_CLOCK, "nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM, pace=STATIC),
    _one(Field.SHUTDOWN_TEMP, "nvmlDeviceGetTemperatureThreshold", 0, pace=STATIC),
    _one(Field.SLOWDOWN_TEMP, "nvmlDeviceGetTemperatureThreshold", 1, pace=STATIC),
    _one(Field.MEM_MAX_OP_TEMP, "nvmlDeviceGetTemperatureThreshold", 2, pace=STATIC),
    _one(Field.GPU_MAX_OP_TEMP, "nvmlDeviceGetTemperatureThreshold", 3, pace=STATIC),
    _one(Field.PCIE_MAX_LINK_GEN, "nvmlDeviceGetMaxPcieLinkGeneration", pace=STATIC),
    _one(Field.PCIE_MAX_LINK_WIDTH, "nvmlDeviceGetMaxPcieLinkWidth", pace=STATIC),
    _one(Field.VIRTUAL_MODE, "nvmlDeviceGetVirtualizationMode", pace=STATIC),
)


def _kib_to_bytes(value: Number) -> Number:
    return value * 1024


def _slow(field: Field, number: int, *, scope: int = 0, since_driver: int = 0) -> FieldValue:
    return FieldValue(field=field, id=number, scope=scope, pace=SLOW, since_driver=since_driver)


FIELD_VALUES = (
    FieldValue(field=Field.MEMORY_TEMP, id=82),
    FieldValue(field=Field.TOTAL_ENERGY_CONSUMPTION, id=83),
    FieldValue(field=Field.POWER_USAGE_INSTANT, id=186, convert=_watts),
    # Without 197 and 198, bytes over PCIe: with driver 580, an H100 has only 32 bits, which wrap 13 times a second.
    FieldValue(field=Field.NVLINK_TX_BYTES_TOTAL, id=138, scope=ALL_LINKS, convert=_kib_to_bytes),
    FieldValue(field=Field.NVLINK_RX_BYTES_TOTAL, id=139, scope=ALL_LINKS, convert=_kib_to_bytes),
    # NVLink 5 (Blackwell) counts bytes under another id.
    FieldValue(field=Field.NVLINK_TX_BYTES_TOTAL, id=202, scope=ALL_LINKS, since_driver=570),
    FieldValue(field=Field.NVLINK_RX_BYTES_TOTAL, id=204, scope=ALL_LINKS, since_driver=570),
    # The violations, in the same order.
    *(_slow(Field(field), number) for field, number in zip(range(240, 248), range(74, 82), strict=True)),
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
    # NVLink 5 (Blackwell) counts errors under other ids too; its error correction handles symbol errors.
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
"""Last id of error counters, which are whole numbers whatever type the driver reports."""


def field_values(fields: Iterable[Field], driver_major: int) -> tuple[FieldValue, ...]:
    """Return the batch items of the fields that have a known meaning on this driver branch."""
    wanted = frozenset(fields)
    if Field.NVLINK_BANDWIDTH_TOTAL in wanted:
        wanted |= {Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL}
    return tuple(item for item in FIELD_VALUES if item.field in wanted and item.since_driver <= driver_major)


_DOUBLE = 0
_SLOT = struct.Struct("8xq8xII8s")
"""Timestamp, type, return code and value of an ``nvmlFieldValue_t``; its attributes take ten times as long."""
_VALUES = tuple(struct.Struct(kind) for kind in "dILQqiH")
"""Formats by ``nvmlValueType_t``."""


class Batch:
    """Field-value array of one device; it is kept between samples, because filling it takes longer than the call."""

    def __init__(self, items: Sequence[FieldValue]) -> None:
        self.items = tuple(items)
        self._array = (pynvml.c_nvmlFieldValue_t * len(self.items))()
        for slot, item in zip(self._array, self.items, strict=True):
            slot.fieldId, slot.scopeId = item.id, item.scope
        self._template = bytes(self._array)

    def ask(self, handle: Handle) -> list[tuple[FieldValue, int, Number]]:
        """Return (item, return code, value) of each item.

        Raises:
            pynvml.NVMLError: The call as a whole failed.
        """
        if not self.items:
            return []
        # Some drivers do not change slots, and values of the previous sample must not count as new.
        ctypes.memmove(self._array, self._template, len(self._template))
        call = library.function("nvmlDeviceGetFieldValues")
        if call is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        code = call(handle, ctypes.c_int32(len(self.items)), ctypes.byref(self._array))
        if code != 0:
            raise pynvml.NVMLError(code)
        slots = _SLOT.iter_unpack(self._array)
        return [(item, *_answer(item, *slot)) for item, slot in zip(self.items, slots, strict=True)]


def _answer(item: FieldValue, timestamp: int, kind: int, code: int, raw: bytes) -> tuple[int, Number]:
    if code != 0:
        # For one item, "invalid argument" means "not supported".
        return pynvml.NVML_ERROR_NOT_SUPPORTED if code == pynvml.NVML_ERROR_INVALID_ARGUMENT else code, 0
    if kind == _DOUBLE and timestamp == 0:
        # Not changed by the driver (error counters with ECC off): the zero was not measured.
        return pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    if item.id <= LAST_ECC_ID:
        # The driver may report the type "double" for these though the value is a whole number.
        return 0, int.from_bytes(raw, sys.byteorder)
    if kind >= len(_VALUES):
        return pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    value: Number = _VALUES[kind].unpack_from(raw)[0]
    if isinstance(value, float) and not math.isfinite(value):
        return pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    return 0, value if item.convert is None else item.convert(value)


class NvmlDevice:
    """Reads the values of one GPU; unsupported values are rarely tried again.

    Args:
        handle: Handle of this GPU, in the current session of the driver.
        driver: The driver's session.
    """

    def __init__(self, handle: Handle, driver: Driver) -> None:
        self._handle = handle
        self._driver = driver
        self._getters = [(key, one) for key, one in enumerate(GETTERS) if driver.fields.intersection(one.fields)]
        self._items = field_values(driver.fields, driver.major)
        self._retries = Retries(self._note)
        self._fast: Batch | None = None
        """Batch of usual samples; ``None`` after an item has failed."""
        self._slow_at = -math.inf
        self._values: dict[Field, Number] = {}
        self._nvlink: tuple[float, float] | None = None
        self.reasons: list[str] = []
        """Distinct reasons for which calls failed at the last read."""

    def read(self, now: float) -> dict[Field, Number]:
        """Return all current values of this GPU; empty if no call was answered.

        Raises:
            pynvml.NVMLError: The GPU is lost, or the driver as a whole is gone.
        """
        self.reasons.clear()
        answered = [self._get(key, getter, now) for key, getter in self._getters if self._retries.is_due(key, now)]
        answered.append(self._get_batch(now))
        values = dict(self._values) if any(answered) else {}
        self._add_nvlink_rate(values, self._driver.clock())
        return values

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self._driver.count(reason)
            self.reasons.append(reason)

    def _get(self, key: int, getter: Getter, now: float) -> bool:
        """Make one call, and return whether it was answered."""
        for field in getter.fields:
            self._values.pop(field, None)
        try:
            answer = getter.read(self._handle)
        except pynvml.NVMLError as error:
            self._retries.failed(key, error, now)
            return False
        if getter.pace:
            self._retries.put_off(key, now + getter.pace)
        pairs = zip(getter.fields, answer, strict=True)
        self._values.update({field: value for field, value in pairs if value is not None})
        return True

    def _get_batch(self, now: float) -> bool:
        """Make the batched call, with slow items if they are due; return whether an item was answered."""
        slow = now - self._slow_at >= SLOW
        batch = self._fast
        if slow or batch is None:
            due = [item for item in self._items if self._retries.is_due(item, now)]
            batch = Batch(due if slow else [item for item in due if item.pace == FAST])
            self._slow_at, self._fast = (now, None) if slow else (self._slow_at, batch)
        for item in batch.items:
            self._values.pop(item.field, None)
        try:
            answers = batch.ask(self._handle)
        except pynvml.NVMLError as error:
            answers = [(item, library.code_of(error), 0) for item in batch.items]
        answered = False
        for item, code, value in answers:
            if code == 0:
                # Two ids have the same counter, and the id that this board generation does not use may report 0.
                self._values[item.field] = max(value, self._values.get(item.field, value))
                answered = True
            else:
                self._retries.failed(item, pynvml.NVMLError(code), now)
                self._fast = None
        return answered

    def _add_nvlink_rate(self, values: dict[Field, Number], now: float) -> None:
        """Add DCGM's field, a rate despite its name: kibibytes per second divided by a thousand, both directions."""
        sent, received = values.get(Field.NVLINK_TX_BYTES_TOTAL), values.get(Field.NVLINK_RX_BYTES_TOTAL)
        if Field.NVLINK_BANDWIDTH_TOTAL not in self._driver.fields or sent is None or received is None:
            self._nvlink = None
            return
        before, self._nvlink = self._nvlink, (now, sent + received)
        if before is not None and now > before[0] and sent + received >= before[1]:
            kib = (sent + received - before[1]) / 1024
            values[Field.NVLINK_BANDWIDTH_TOTAL] = round(kib / (now - before[0]) / 1000)


_SOON_SECONDS = 10.0

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


def identity_of(handle: Handle, index: int) -> Gpu:
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
    gpu = Gpu(uuid=uuid, index=index, minor=None, model="unknown", pci_bus_id=_bus_id(handle))
    return mig.shaped(handle, gpu)[0]


class DeviceFacts:
    """Reads constant facts of one GPU, each until the driver has answered.

    Args:
        handle: Handle of the GPU, in the current session of the driver.
        count: Called with the reason of each failure.
    """

    def __init__(self, handle: Handle, count: Callable[[str], None]) -> None:
        self._handle = handle
        self._retries = library.Retries(count)
        self._unknown = dict(_FACTS)

    def complete(self, gpu: Gpu, now: float) -> Gpu:
        """Return the GPU with the known facts.

        Args:
            gpu: The GPU with the facts of earlier calls.
            now: Seconds; only differences matter.

        Raises:
            pynvml.NVMLError: The GPU is lost, or the driver as a whole is gone.
        """
        for fact in [fact for fact in self._unknown if self._retries.is_due(fact, now)]:
            try:
                answer = self._unknown[fact](self._handle)
            except pynvml.NVMLError as error:
                self._retries.failed(fact, error, now, soon_seconds=_SOON_SECONDS)
                continue
            del self._unknown[fact]
            if isinstance(fact, Field):
                gpu = replace(gpu, labels={**gpu.labels, fact: str(answer)}) if answer else gpu
            elif answer is not None:
                gpu = replace(gpu, minor=int(answer)) if fact == "minor" else replace(gpu, model=str(answer))
        return gpu


def _bus_id(handle: Handle) -> str:
    raw = pynvml.nvmlDeviceGetPciInfo_v3(handle).busId
    text = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
    return text.upper()


_FACTS: Mapping[str | Field, Callable[[Any], int | str | None]] = {
    "minor": lambda handle: int(pynvml.nvmlDeviceGetMinorNumber(handle)),
    "model": lambda handle: library.text(pynvml.nvmlDeviceGetName, handle),
    Field.BRAND: lambda handle: _BRANDS.get(int(pynvml.nvmlDeviceGetBrand(handle)), "Unknown"),
    Field.SERIAL: lambda handle: library.text(pynvml.nvmlDeviceGetSerial, handle),
    Field.OEM_INFOROM_VER: lambda handle: library.text(pynvml.nvmlDeviceGetInforomVersion, handle, 0),
    Field.ECC_INFOROM_VER: lambda handle: library.text(pynvml.nvmlDeviceGetInforomVersion, handle, 1),
    Field.POWER_INFOROM_VER: lambda handle: library.text(pynvml.nvmlDeviceGetInforomVersion, handle, 2),
    Field.INFOROM_IMAGE_VER: lambda handle: library.text(pynvml.nvmlDeviceGetInforomImageVersion, handle),
    Field.VBIOS_VERSION: lambda handle: library.text(pynvml.nvmlDeviceGetVbiosVersion, handle),
}
"""Calls by the label's field, or by the name of another fact; memory and MIG shape are read with every sample."""

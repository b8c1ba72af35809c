"""NVML functions of a device: handles, identity, single values, and many values in one call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from exporter.model import Field
from gpu_simulator.driver_session import (
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    CArgument,
    Refused,
    Session,
    Target,
    check_version,
    device,
    out,
    plain,
    put_pointer,
    put_text,
    supported,
    system,
)
from gpu_simulator.gpu_values import instance_bar1_bytes, is_before, read
from gpu_simulator.models import MIB
from gpu_simulator.truth import Fault, GpuTruth, MigTruth, ModelSpec

_BRAND_NVIDIA = 14
_MEMORY_V2 = 0x02000028
_SAMPLING_PERIOD_US = 166_666
_ECC_CORRECTED = 0
_VGPU_LICENSED_FEATURE = 1


def whole(gpu: GpuTruth, field: Field, scale: float = 1.0) -> int:
    """Return ``field`` as NVML's whole number; refused where the board lacks it."""
    return round(supported(read(gpu, field)) * scale)


def instance_of(target: Target) -> MigTruth:
    """The instance behind a MIG handle; other handles are refused."""
    if target.instance is None:
        raise Refused(NOT_SUPPORTED)
    return target.instance


def _lookup(session: Session, name: str, device: CArgument, uuid: str | None) -> None:
    """Store the handle of an enumerated GPU; a lost one cannot even be found."""
    if uuid is None:
        raise Refused(NOT_FOUND)
    session.refuse_faulty(name, session.find_gpu(uuid), static=True)
    put_pointer(device, session.pointer((uuid, "")))


@system("nvmlDeviceGetCount_v2")
def _count(session: Session, count: CArgument) -> None:
    out(count).value = len(session.enumerated)


@system("nvmlDeviceGetHandleByIndex_v2")
def _by_index(session: Session, index: CArgument, device: CArgument) -> None:
    position = plain(index)
    if not 0 <= position < len(session.enumerated):
        raise Refused(INVALID_ARGUMENT)
    _lookup(session, "nvmlDeviceGetHandleByIndex_v2", device, session.enumerated[position])


@system("nvmlDeviceGetHandleByPciBusId_v2")
def _by_pci_bus_id(session: Session, text: CArgument, device: CArgument) -> None:
    wanted = _bus_id(text.value.decode())
    gpus = (gpu for gpu in session.now().gpus if gpu.uuid in session.enumerated)
    uuid = next((gpu.uuid for gpu in gpus if _bus_id(gpu.pci_bus_id) == wanted), None)
    _lookup(session, "nvmlDeviceGetHandleByPciBusId_v2", device, uuid)


def _bus_id(text: str) -> tuple[int, str]:
    """(domain, rest) of a bus id, however many digits its domain has."""
    domain, _, rest = text.partition(":")
    try:
        return (int(domain, 16), rest.upper())
    except ValueError as error:
        raise Refused(INVALID_ARGUMENT) from error


@device("nvmlDeviceGetInforomVersion", static=True)
def _inforom(target: Target, kind: CArgument, buffer: CArgument, size: CArgument) -> None:
    versions = target.gpu.model.inforom[1:]
    if not 0 <= plain(kind) < len(versions):
        raise Refused(INVALID_ARGUMENT)
    _put(buffer, size, versions[plain(kind)])


def _put(buffer: CArgument, size: CArgument, version: str | None) -> None:
    if version is None:
        raise Refused(NOT_SUPPORTED)
    put_text(buffer, size, version)


@device("nvmlDeviceGetPciInfo_v3", static=True)
def _pci(target: Target, info: CArgument) -> None:
    struct = out(info)
    domain, rest = _bus_id(target.gpu.pci_bus_id)
    bus, _, number = rest.partition(":")
    struct.busId = f"{domain:08X}:{rest}".encode()
    struct.busIdLegacy = f"{domain:04X}:{rest}".encode()
    struct.domain, struct.bus, struct.device = domain, int(bus, 16), int(number.split(".")[0], 16)
    struct.pciDeviceId = target.gpu.model.pci_device_id


def _name(target: Target) -> str:
    return target.gpu.model.name + (f" MIG {target.instance.profile}" if target.instance else "")


_TEXTS: Mapping[str, Callable[[Target], str | None]] = {
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetUUID": lambda target: (target.instance or target.gpu).uuid,
    "nvmlDeviceGetSerial": lambda target: target.gpu.serial,
    "nvmlDeviceGetVbiosVersion": lambda target: target.gpu.model.vbios,
    "nvmlDeviceGetInforomImageVersion": lambda target: target.gpu.model.inforom[0],
}
_OF_INSTANCES_TOO = frozenset(
    {"nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"}
)
_NUMBERS: Mapping[str, Callable[[Target], int]] = {
    "nvmlDeviceGetBrand": lambda _: _BRAND_NVIDIA,
    "nvmlDeviceGetMinorNumber": lambda target: target.gpu.minor,
    "nvmlDeviceGetMaxMigDeviceCount": lambda target: target.gpu.model.compute_slices if target.gpu.mig_enabled else 0,
    "nvmlDeviceGetGpuInstanceId": lambda target: instance_of(target).gpu_instance_id,
    "nvmlDeviceGetComputeInstanceId": lambda target: instance_of(target).compute_instance_id,
}
"""Static numbers with one out-argument."""
_STRUCTS: Mapping[str, tuple[int, str, Field]] = {
    "nvmlDeviceGetTemperatureV": (0x0100000C, "temperature", Field.GPU_TEMP),
    "nvmlDeviceGetMarginTemperature": (0x01000008, "marginTemperature", Field.GPU_TEMP_LIMIT),
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": (0x01000008, "unrepairableMemory", Field.MEMORY_UNREPAIRABLE_FLAG),
}
"""C functions with a versioned struct: its version word, its member and the member's field."""
_SCALARS: Mapping[str, tuple[Field, float]] = {
    "nvmlDeviceGetPowerUsage": (Field.POWER_USAGE, 1000.0),
    "nvmlDeviceGetPowerManagementLimit": (Field.POWER_MGMT_LIMIT, 1000.0),
    "nvmlDeviceGetPowerManagementDefaultLimit": (Field.POWER_MGMT_LIMIT_DEF, 1000.0),
    "nvmlDeviceGetEnforcedPowerLimit": (Field.ENFORCED_POWER_LIMIT, 1000.0),
    "nvmlDeviceGetPerformanceState": (Field.PSTATE, 1.0),
    "nvmlDeviceGetFanSpeed": (Field.FAN_SPEED, 1.0),
    "nvmlDeviceGetCurrentClocksEventReasons": (Field.CLOCK_THROTTLE_REASONS, 1.0),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (Field.CLOCK_THROTTLE_REASONS, 1.0),
    "nvmlDeviceGetMaxPcieLinkGeneration": (Field.PCIE_MAX_LINK_GEN, 1.0),
    "nvmlDeviceGetMaxPcieLinkWidth": (Field.PCIE_MAX_LINK_WIDTH, 1.0),
    "nvmlDeviceGetCurrPcieLinkGeneration": (Field.PCIE_LINK_GEN, 1.0),
    "nvmlDeviceGetCurrPcieLinkWidth": (Field.PCIE_LINK_WIDTH, 1.0),
    "nvmlDeviceGetVirtualizationMode": (Field.VIRTUAL_MODE, 1.0),
}
"""C functions with one out-argument: the field, and what one of its units is in NVML's."""
_ENGINES: Mapping[str, Field] = {
    "nvmlDeviceGetEncoderUtilization": Field.ENC_UTIL,
    "nvmlDeviceGetDecoderUtilization": Field.DEC_UTIL,
    "nvmlDeviceGetJpgUtilization": Field.JPG_UTIL,
    "nvmlDeviceGetOfaUtilization": Field.OFA_UTIL,
}
_CHOICES: Mapping[str, Mapping[int, Field]] = {
    "nvmlDeviceGetClockInfo": {0: Field.SM_CLOCK, 1: Field.SM_CLOCK, 2: Field.MEM_CLOCK, 3: Field.VIDEO_CLOCK},
    "nvmlDeviceGetMaxClockInfo": {0: Field.MAX_SM_CLOCK, 1: Field.MAX_SM_CLOCK, 2: Field.MAX_MEM_CLOCK},
    "nvmlDeviceGetTemperature": {0: Field.GPU_TEMP},
    "nvmlDeviceGetTemperatureThreshold": {
        0: Field.SHUTDOWN_TEMP,
        1: Field.SLOWDOWN_TEMP,
        2: Field.MEM_MAX_OP_TEMP,
        3: Field.GPU_MAX_OP_TEMP,
    },
}
"""C functions with a choice and one out-argument: the field of each choice."""


def _put_text_of(text_of: Callable[[Target], str | None], target: Target, buffer: CArgument, size: CArgument) -> None:
    _put(buffer, size, text_of(target))


def _put_number(number_of: Callable[[Target], int], target: Target, value: CArgument) -> None:
    out(value).value = number_of(target)


def _put_member(layout: tuple[int, str, Field], target: Target, struct: CArgument) -> None:
    version, attribute, field = layout
    check_version(out(struct), version)
    setattr(out(struct), attribute, whole(target.gpu, field))


def _put_scalar(item: tuple[Field, float], target: Target, value: CArgument) -> None:
    out(value).value = whole(target.gpu, *item)


def _put_engine(field: Field, target: Target, value: CArgument, period: CArgument) -> None:
    out(value).value = whole(target.gpu, field)
    out(period).value = _SAMPLING_PERIOD_US


def _put_chosen(fields: Mapping[int, Field], target: Target, choice: CArgument, value: CArgument) -> None:
    if plain(choice) not in fields:
        raise Refused(INVALID_ARGUMENT)
    out(value).value = whole(target.gpu, fields[plain(choice)])


def _declare(
    table: Mapping[str, Any], put: Callable[..., None], *, static: bool = False, mig: frozenset[str] = frozenset()
) -> None:
    for symbol, item in table.items():
        device(symbol, static=static, mig=symbol in mig)(partial(put, item))


_declare(_TEXTS, _put_text_of, static=True, mig=_OF_INSTANCES_TOO)
_declare(_NUMBERS, _put_number, static=True, mig=_OF_INSTANCES_TOO)
_declare(_STRUCTS, _put_member)
_declare(_SCALARS, _put_scalar)
_declare(_ENGINES, _put_engine)
_declare(_CHOICES, _put_chosen)


@device("nvmlDeviceGetPowerManagementLimitConstraints")
def _limits(target: Target, lowest: CArgument, highest: CArgument) -> None:
    out(lowest).value = whole(target.gpu, Field.POWER_MGMT_LIMIT_MIN, 1000.0)
    out(highest).value = whole(target.gpu, Field.POWER_MGMT_LIMIT_MAX, 1000.0)


@device("nvmlDeviceGetUtilizationRates")
def _utilisation(target: Target, rates: CArgument) -> None:
    out(rates).gpu = whole(target.gpu, Field.GPU_UTIL)
    out(rates).memory = whole(target.gpu, Field.MEM_COPY_UTIL)


def _memory_bytes(target: Target) -> tuple[int, int, int, int]:
    """(total, reserved, free, used) in bytes."""
    if target.instance:
        total, used = target.instance.memory_bytes, target.instance.load.memory_used_bytes
        return (total, 0, total - used, used)
    fields = (Field.FB_TOTAL, Field.FB_RESERVED, Field.FB_FREE, Field.FB_USED)
    total, reserved, free, used = (whole(target.gpu, field, MIB) for field in fields)
    return (total, reserved, free, used)


@device("nvmlDeviceGetMemoryInfo_v2", mig=True)
def _memory_v2(target: Target, info: CArgument) -> None:
    struct = out(info)
    check_version(struct, _MEMORY_V2)
    struct.total, struct.reserved, struct.free, struct.used = _memory_bytes(target)


@device("nvmlDeviceGetMemoryInfo", mig=True)
def _memory(target: Target, info: CArgument) -> None:
    struct = out(info)
    struct.total, reserved, struct.free, used = _memory_bytes(target)
    struct.used = used + reserved


@device("nvmlDeviceGetBAR1MemoryInfo", mig=True)
def _bar1(target: Target, info: CArgument) -> None:
    struct = out(info)
    if target.instance:
        struct.bar1Total = struct.bar1Free = instance_bar1_bytes(target.gpu, target.instance)
        struct.bar1Used = 0
        return
    fields = (Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE)
    struct.bar1Total, struct.bar1Used, struct.bar1Free = (whole(target.gpu, field, MIB) for field in fields)


@device("nvmlDeviceGetRetiredPages")
def _retired_pages(target: Target, cause: CArgument, count: CArgument, pages: CArgument) -> None:
    field = Field.RETIRED_SBE if plain(cause) == _ECC_CORRECTED else Field.RETIRED_DBE
    number, room = whole(target.gpu, field), out(count).value
    out(count).value = number
    if number > room or (number and pages is None):
        raise Refused(INSUFFICIENT_SIZE)
    for position in range(number):
        out(pages)[position] = 0x1000 * (position + 1)


@device("nvmlDeviceGetGridLicensableFeatures_v4")
def _licences(target: Target, features: CArgument) -> None:
    struct = out(features)
    licensed = whole(target.gpu, Field.VGPU_LICENSE_STATUS)
    struct.isGridLicenseSupported = struct.licensableFeaturesCount = licensed
    if licensed:
        struct.gridLicensableFeatures[0].featureCode = _VGPU_LICENSED_FEATURE
        struct.gridLicensableFeatures[0].featureState = 1


_DOUBLE, _UINT, _ULONGLONG, _INT = 0, 1, 3, 5
_MEMBER = {_DOUBLE: "ullVal", _UINT: "uiVal", _ULONGLONG: "ullVal", _INT: "siVal"}
"""Union member per value type. The driver stores some ECC counts as integers and calls them doubles (a known bug)."""
_ALL_LINKS = 0xFFFFFFFF
_LATENCY_US = 12
_LAST_ECC_ID = 6


@dataclass(frozen=True, slots=True)
class _Item:
    """Where one NVML field id gets its value: the field, what one of its units is in NVML's, and the type said."""

    field: Field
    scale: float = 1.0
    value_type: int = _ULONGLONG
    all_links: bool = False


_ITEMS: Mapping[int, _Item] = {
    3: _Item(Field.ECC_SBE_VOL_TOTAL),
    4: _Item(Field.ECC_DBE_VOL_TOTAL),
    5: _Item(Field.ECC_SBE_AGG_TOTAL, value_type=_DOUBLE),
    6: _Item(Field.ECC_DBE_AGG_TOTAL, value_type=_DOUBLE),
    29: _Item(Field.RETIRED_SBE, value_type=_UINT),
    30: _Item(Field.RETIRED_DBE, value_type=_UINT),
    31: _Item(Field.RETIRED_PENDING, value_type=_UINT),
    38: _Item(Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
    45: _Item(Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
    52: _Item(Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL),
    59: _Item(Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
    74: _Item(Field.POWER_VIOLATION),
    75: _Item(Field.THERMAL_VIOLATION),
    76: _Item(Field.SYNC_BOOST_VIOLATION),
    77: _Item(Field.BOARD_LIMIT_VIOLATION),
    78: _Item(Field.LOW_UTIL_VIOLATION),
    79: _Item(Field.RELIABILITY_VIOLATION),
    80: _Item(Field.TOTAL_APP_CLOCKS_VIOLATION),
    81: _Item(Field.TOTAL_BASE_CLOCKS_VIOLATION),
    82: _Item(Field.MEMORY_TEMP, value_type=_UINT),
    83: _Item(Field.TOTAL_ENERGY_CONSUMPTION),
    92: _Item(Field.RETIRED_SBE, value_type=_UINT),
    93: _Item(Field.RETIRED_DBE, value_type=_UINT),
    94: _Item(Field.PCIE_REPLAY_COUNTER, value_type=_UINT),
    138: _Item(Field.NVLINK_TX_BYTES_TOTAL, 1 / 1024, all_links=True),
    139: _Item(Field.NVLINK_RX_BYTES_TOTAL, 1 / 1024, all_links=True),
    142: _Item(Field.CORRECTABLE_REMAPPED_ROWS, value_type=_UINT),
    143: _Item(Field.UNCORRECTABLE_REMAPPED_ROWS, value_type=_UINT),
    144: _Item(Field.ROW_REMAP_PENDING, value_type=_UINT),
    145: _Item(Field.ROW_REMAP_FAILURE, value_type=_UINT),
    161: _Item(Field.NVLINK_ERROR_DL_REPLAY),
    162: _Item(Field.NVLINK_ERROR_DL_RECOVERY),
    163: _Item(Field.NVLINK_ERROR_DL_CRC),
    173: _Item(Field.PCIE_COUNT_CORRECTABLE_ERRORS, value_type=_UINT),
    185: _Item(Field.POWER_USAGE, 1000.0, _UINT),
    186: _Item(Field.POWER_USAGE_INSTANT, 1000.0, _UINT),
    187: _Item(Field.POWER_MGMT_LIMIT_MIN, 1000.0, _UINT),
    188: _Item(Field.POWER_MGMT_LIMIT_MAX, 1000.0, _UINT),
    189: _Item(Field.POWER_MGMT_LIMIT_DEF, 1000.0, _UINT),
    190: _Item(Field.ENFORCED_POWER_LIMIT, 1000.0, _UINT),
    191: _Item(Field.TOTAL_ENERGY_CONSUMPTION),
    192: _Item(Field.POWER_MGMT_LIMIT, 1000.0, _UINT),
    197: _Item(Field.PCIE_TX_BYTES_TOTAL),
    198: _Item(Field.PCIE_RX_BYTES_TOTAL),
    208: _Item(Field.NVLINK_COUNT_RX_ERRORS, all_links=True),
    211: _Item(Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS, all_links=True),
    213: _Item(Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS, all_links=True),
    214: _Item(Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS, all_links=True),
    230: _Item(Field.GPU_RECOVERY_ACTION, value_type=_UINT),
    269: _Item(Field.CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS),
    270: _Item(Field.CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS),
    271: _Item(Field.CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS),
}
_RECOVERY_ACTION = 230
_BOARD_POWER_IDS = frozenset({185, 186, 187, 188, 189, 190, 191, 192})
_MARGINS: Mapping[int, Callable[[ModelSpec], int]] = {
    193: lambda board: -board.celsius[2],
    194: lambda board: -board.celsius[1],
    196: lambda _: 0,
}
"""Thresholds as distances below the highest operating temperature, as newer drivers answer them."""


def _answer(target: Target, number: int, scope: int) -> tuple[int, int]:
    """(NVML value, value type) of one field id; ``Refused`` carries its return code."""
    item = _ITEMS.get(number)
    if item is not None and is_before(target.node, item.field):
        raise Refused(INVALID_ARGUMENT)
    if target.instance is not None:
        raise Refused(NOT_SUPPORTED)
    if target.gpu.fault is Fault.RESET_REQUIRED and number != _RECOVERY_ACTION:
        raise Refused(RESET_REQUIRED)
    if number in _MARGINS and Field.GPU_TEMP_LIMIT not in target.gpu.model.not_supported:
        return (_MARGINS[number](target.gpu.model), _INT)
    if item is None or (scope and number in _BOARD_POWER_IDS) or (item.all_links and scope != _ALL_LINKS):
        raise Refused(NOT_SUPPORTED)
    value = supported(read(target.gpu, item.field)) * item.scale
    # Counters are cut off, measured values rounded, as the units' resolution wants it.
    return (int(value) if item.all_links else round(value), item.value_type)


@device("nvmlDeviceGetFieldValues", static=True, mig=True)
def _field_values(target: Target, count: CArgument, values: CArgument) -> None:
    if target.gpu.fault is Fault.UNKNOWN_ERROR:
        target.session.refuse_faulty("nvmlDeviceGetFieldValues", target.gpu, static=False)
    timestamp_us = round((target.session.epoch_seconds + target.node.at_seconds) * 1e6)
    for value in out(values)[: plain(count)]:
        try:
            number, value_type = _answer(target, value.fieldId, value.scopeId)
        except Refused as refusal:
            if value.fieldId <= _LAST_ECC_ID and refusal.code == NOT_SUPPORTED:
                continue  # a known driver bug: ECC items stay untouched where ECC is off
            value.timestamp, value.latencyUsec, value.nvmlReturn = timestamp_us, _LATENCY_US, refusal.code
            continue
        value.timestamp, value.latencyUsec = timestamp_us, _LATENCY_US
        value.nvmlReturn, value.valueType = 0, value_type
        value.value.ullVal = 0
        setattr(value.value, _MEMBER[value_type], number)

"""NVML functions of a device that answer one value: clocks, temperature, power, memory, errors."""

from collections.abc import Mapping

from exporter.model import Field
from gpu_simulator.driver_board import MIB, read
from gpu_simulator.driver_core import (
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    Calls,
    CArgument,
    Refused,
    Target,
    check_version,
    out,
    plain,
    supported,
)
from gpu_simulator.truth import GpuTruth, MigTruth

CALLS = Calls()

_BRAND_NVIDIA = 14
_TEMPERATURE_V1 = 0x0100000C
_MARGIN_V1 = 0x01000008
_MEMORY_V2 = 0x02000028
_UNREPAIRABLE_V1 = 0x01000008
_SAMPLING_PERIOD_US = 166_666
_ECC_CORRECTED, _ECC_UNCORRECTED = 0, 1
_ECC_VOLATILE = 0
_LOCATION_DRAM = 2
_BAR1_PER_MEMORY_SLICE = 0.047186
"""Part of the board's BAR1 that an instance shows per memory slice, recorded on H100 with driver 590.48.01."""

_SCALARS: Mapping[str, tuple[Field, float]] = {
    "nvmlDeviceGetPowerUsage": (Field.POWER_USAGE, 1000.0),
    "nvmlDeviceGetTotalEnergyConsumption": (Field.TOTAL_ENERGY_CONSUMPTION, 1.0),
    "nvmlDeviceGetPowerManagementLimit": (Field.POWER_MGMT_LIMIT, 1000.0),
    "nvmlDeviceGetPowerManagementDefaultLimit": (Field.POWER_MGMT_LIMIT_DEF, 1000.0),
    "nvmlDeviceGetEnforcedPowerLimit": (Field.ENFORCED_POWER_LIMIT, 1000.0),
    "nvmlDeviceGetPerformanceState": (Field.PSTATE, 1.0),
    "nvmlDeviceGetPowerState": (Field.PSTATE, 1.0),
    "nvmlDeviceGetFanSpeed": (Field.FAN_SPEED, 1.0),
    "nvmlDeviceGetPcieReplayCounter": (Field.PCIE_REPLAY_COUNTER, 1.0),
    "nvmlDeviceGetCurrentClocksEventReasons": (Field.CLOCK_THROTTLE_REASONS, 1.0),
    "nvmlDeviceGetCurrentClocksThrottleReasons": (Field.CLOCK_THROTTLE_REASONS, 1.0),
    "nvmlDeviceGetMaxPcieLinkGeneration": (Field.PCIE_MAX_LINK_GEN, 1.0),
    "nvmlDeviceGetMaxPcieLinkWidth": (Field.PCIE_MAX_LINK_WIDTH, 1.0),
    "nvmlDeviceGetCurrPcieLinkGeneration": (Field.PCIE_LINK_GEN, 1.0),
    "nvmlDeviceGetCurrPcieLinkWidth": (Field.PCIE_LINK_WIDTH, 1.0),
    "nvmlDeviceGetRetiredPagesPendingStatus": (Field.RETIRED_PENDING, 1.0),
    "nvmlDeviceGetVirtualizationMode": (Field.VIRTUAL_MODE, 1.0),
}
"""C functions with one out-argument: the field, and what one of its units is in NVML's."""

_ENGINES: Mapping[str, Field] = {
    "nvmlDeviceGetEncoderUtilization": Field.ENC_UTIL,
    "nvmlDeviceGetDecoderUtilization": Field.DEC_UTIL,
    "nvmlDeviceGetJpgUtilization": Field.JPG_UTIL,
    "nvmlDeviceGetOfaUtilization": Field.OFA_UTIL,
}
_CLOCKS = {0: Field.SM_CLOCK, 1: Field.SM_CLOCK, 2: Field.MEM_CLOCK, 3: Field.VIDEO_CLOCK}
_MAX_CLOCKS = {0: Field.MAX_SM_CLOCK, 1: Field.MAX_SM_CLOCK, 2: Field.MAX_MEM_CLOCK}
_THRESHOLDS = {0: Field.SHUTDOWN_TEMP, 1: Field.SLOWDOWN_TEMP, 2: Field.MEM_MAX_OP_TEMP, 3: Field.GPU_MAX_OP_TEMP}
_VIOLATIONS = {
    0: Field.POWER_VIOLATION,
    1: Field.THERMAL_VIOLATION,
    2: Field.SYNC_BOOST_VIOLATION,
    3: Field.BOARD_LIMIT_VIOLATION,
    4: Field.LOW_UTIL_VIOLATION,
    5: Field.RELIABILITY_VIOLATION,
    10: Field.TOTAL_APP_CLOCKS_VIOLATION,
    11: Field.TOTAL_BASE_CLOCKS_VIOLATION,
}
_ECC_TOTALS = {
    (0, 0): Field.ECC_SBE_VOL_TOTAL,
    (1, 0): Field.ECC_DBE_VOL_TOTAL,
    (0, 1): Field.ECC_SBE_AGG_TOTAL,
    (1, 1): Field.ECC_DBE_AGG_TOTAL,
}


def whole(gpu: GpuTruth, field: Field, scale: float = 1.0) -> int:
    """``field`` as NVML's whole number; refused where the board lacks it."""
    return round(supported(read(gpu, field)) * scale)


def _field(table: Mapping[int, Field], key: CArgument) -> Field:
    field = table.get(plain(key))
    if field is None:
        raise Refused(INVALID_ARGUMENT)
    return field


def _declare_scalars() -> None:
    for name, (field, scale) in _SCALARS.items():

        def scalar(target: Target, value: CArgument, field: Field = field, scale: float = scale) -> None:
            out(value).value = whole(target.gpu, field, scale)

        CALLS.device(name)(scalar)
    for name, field in _ENGINES.items():

        def engine(target: Target, value: CArgument, period: CArgument, field: Field = field) -> None:
            out(value).value = whole(target.gpu, field)
            out(period).value = _SAMPLING_PERIOD_US

        CALLS.device(name)(engine)


_declare_scalars()


@CALLS.device("nvmlDeviceGetClockInfo")
def _clock(target: Target, kind: CArgument, mhz: CArgument) -> None:
    out(mhz).value = whole(target.gpu, _field(_CLOCKS, kind))


@CALLS.device("nvmlDeviceGetClock")
def _clock_by_id(target: Target, kind: CArgument, _which: CArgument, mhz: CArgument) -> None:
    out(mhz).value = whole(target.gpu, _field(_CLOCKS, kind))


@CALLS.device("nvmlDeviceGetMaxClockInfo")
def _max_clock(target: Target, kind: CArgument, mhz: CArgument) -> None:
    out(mhz).value = whole(target.gpu, _field(_MAX_CLOCKS, kind))


@CALLS.device("nvmlDeviceGetTemperature")
def _temperature(target: Target, sensor: CArgument, celsius: CArgument) -> None:
    if plain(sensor) != 0:
        raise Refused(INVALID_ARGUMENT)
    out(celsius).value = whole(target.gpu, Field.GPU_TEMP)


@CALLS.device("nvmlDeviceGetTemperatureV")
def _temperature_v(target: Target, info: CArgument) -> None:
    struct = out(info)
    check_version(struct, _TEMPERATURE_V1)
    if struct.sensorType != 0:
        raise Refused(INVALID_ARGUMENT)
    struct.temperature = whole(target.gpu, Field.GPU_TEMP)


@CALLS.device("nvmlDeviceGetTemperatureThreshold")
def _threshold(target: Target, kind: CArgument, celsius: CArgument) -> None:
    out(celsius).value = whole(target.gpu, _field(_THRESHOLDS, kind))


@CALLS.device("nvmlDeviceGetMarginTemperature")
def _margin(target: Target, info: CArgument) -> None:
    struct = out(info)
    check_version(struct, _MARGIN_V1)
    struct.marginTemperature = whole(target.gpu, Field.GPU_TEMP_LIMIT)


@CALLS.device("nvmlDeviceGetPowerManagementLimitConstraints")
def _limits(target: Target, lowest: CArgument, highest: CArgument) -> None:
    out(lowest).value = whole(target.gpu, Field.POWER_MGMT_LIMIT_MIN, 1000.0)
    out(highest).value = whole(target.gpu, Field.POWER_MGMT_LIMIT_MAX, 1000.0)


@CALLS.device("nvmlDeviceGetPowerManagementMode", "nvmlDeviceGetEccModeCurrent")
def _enabled(_target: Target, mode: CArgument) -> None:
    out(mode).value = 1


@CALLS.device("nvmlDeviceGetUtilizationRates")
def _utilisation(target: Target, rates: CArgument) -> None:
    struct = out(rates)
    struct.gpu = whole(target.gpu, Field.GPU_UTIL)
    struct.memory = whole(target.gpu, Field.MEM_COPY_UTIL)


def _memory_bytes(target: Target) -> tuple[int, int, int, int]:
    """(total, reserved, free, used) in bytes."""
    if target.instance:
        total, used = target.instance.memory_bytes, target.instance.load.memory_used_bytes
        return (total, 0, total - used, used)
    fields = (Field.FB_TOTAL, Field.FB_RESERVED, Field.FB_FREE, Field.FB_USED)
    total, reserved, free, used = (whole(target.gpu, field, MIB) for field in fields)
    return (total, reserved, free, used)


@CALLS.device("nvmlDeviceGetMemoryInfo_v2", mig=True)
def _memory_v2(target: Target, info: CArgument) -> None:
    struct = out(info)
    check_version(struct, _MEMORY_V2)
    struct.total, struct.reserved, struct.free, struct.used = _memory_bytes(target)


@CALLS.device("nvmlDeviceGetMemoryInfo", mig=True)
def _memory(target: Target, info: CArgument) -> None:
    struct = out(info)
    struct.total, reserved, struct.free, used = _memory_bytes(target)
    struct.used = used + reserved


def instance_bar1_bytes(gpu: GpuTruth, instance: MigTruth) -> tuple[int, int, int]:
    """(total, used, free) of an instance's part of the board's BAR1."""
    total = int(whole(gpu, Field.BAR1_TOTAL, MIB) * _BAR1_PER_MEMORY_SLICE * instance.memory_slices)
    return (total, 0, total)


@CALLS.device("nvmlDeviceGetBAR1MemoryInfo", mig=True)
def _bar1(target: Target, info: CArgument) -> None:
    struct = out(info)
    if target.instance:
        total, used, free = instance_bar1_bytes(target.gpu, target.instance)
    else:
        fields = (Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE)
        total, used, free = (whole(target.gpu, field, MIB) for field in fields)
    struct.bar1Total, struct.bar1Used, struct.bar1Free = total, used, free


@CALLS.device("nvmlDeviceGetEccMode")
def _ecc_mode(target: Target, current: CArgument, pending: CArgument) -> None:
    out(current).value = out(pending).value = int(read(target.gpu, Field.ECC_SBE_VOL_TOTAL) is not None)


@CALLS.device("nvmlDeviceGetTotalEccErrors", mig=True)
def _ecc_total(target: Target, kind: CArgument, counter: CArgument, count: CArgument) -> None:
    key = (plain(kind), plain(counter))
    if target.instance and key != (_ECC_UNCORRECTED, _ECC_VOLATILE):
        raise Refused(NOT_SUPPORTED)
    if key not in _ECC_TOTALS:
        raise Refused(INVALID_ARGUMENT)
    out(count).value = whole(target.gpu, _ECC_TOTALS[key])


@CALLS.device("nvmlDeviceGetMemoryErrorCounter")
def _ecc_at(target: Target, kind: CArgument, counter: CArgument, location: CArgument, count: CArgument) -> None:
    key = (plain(kind), plain(counter))
    if key not in _ECC_TOTALS:
        raise Refused(INVALID_ARGUMENT)
    total = whole(target.gpu, _ECC_TOTALS[key])
    out(count).value = total if plain(location) == _LOCATION_DRAM else 0


@CALLS.device("nvmlDeviceGetRetiredPages")
def _retired_pages(target: Target, cause: CArgument, count: CArgument, pages: CArgument) -> None:
    field = Field.RETIRED_SBE if plain(cause) == _ECC_CORRECTED else Field.RETIRED_DBE
    number, room = whole(target.gpu, field), out(count).value
    out(count).value = number
    if number > room or (number and pages is None):
        raise Refused(INSUFFICIENT_SIZE)
    for position in range(number):
        out(pages)[position] = 0x1000 * (position + 1)


@CALLS.device("nvmlDeviceGetRemappedRows")
def _remapped(
    target: Target, corrected: CArgument, uncorrected: CArgument, pending: CArgument, failed: CArgument
) -> None:
    if target.gpu.mig_enabled and target.gpu.instances:
        raise Refused(NOT_SUPPORTED)
    out(corrected).value = whole(target.gpu, Field.CORRECTABLE_REMAPPED_ROWS)
    out(uncorrected).value = whole(target.gpu, Field.UNCORRECTABLE_REMAPPED_ROWS)
    out(pending).value = whole(target.gpu, Field.ROW_REMAP_PENDING)
    out(failed).value = whole(target.gpu, Field.ROW_REMAP_FAILURE)


@CALLS.device("nvmlDeviceGetUnrepairableMemoryFlag_v1")
def _unrepairable(target: Target, info: CArgument) -> None:
    struct = out(info)
    check_version(struct, _UNREPAIRABLE_V1)
    struct.unrepairableMemory = whole(target.gpu, Field.MEMORY_UNREPAIRABLE_FLAG)


@CALLS.device("nvmlDeviceGetViolationStatus")
def _violation(target: Target, policy: CArgument, info: CArgument) -> None:
    struct = out(info)
    struct.violationTime = whole(target.gpu, _field(_VIOLATIONS, policy))
    struct.referenceTime = round((target.session.epoch_seconds + target.node.at_seconds) * 1e6)

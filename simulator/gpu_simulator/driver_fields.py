"""nvmlDeviceGetFieldValues: many quantities in one call, each with a return code of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exporter.model import Field
from gpu_simulator.driver_board import Board, board_of, read
from gpu_simulator.driver_core import (
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    Calls,
    CArgument,
    Refused,
    Target,
    out,
    plain,
)
from gpu_simulator.truth import Fault

CALLS = Calls()

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
_SINCE_DRIVER = {208: 570, 211: 570, 213: 570, 214: 570, _RECOVERY_ACTION: 565, 269: 590, 270: 590, 271: 590}
"""First driver branch of the newer ids."""
_BOARD_POWER_IDS = frozenset({185, 186, 187, 188, 189, 190, 191, 192})
_MARGINS: Mapping[int, Callable[[Board], int]] = {
    193: lambda board: -board.shutdown_above_celsius,
    194: lambda board: -board.slowdown_above_celsius,
    196: lambda _: 0,
}
"""Thresholds as distances below the highest operating temperature, as newer drivers tell them."""


def driver_major(version: str) -> int:
    """``590`` of ``590.48.01``."""
    return int(version.partition(".")[0])


def is_before(driver_version: str, field: Field) -> bool:
    """Whether a driver is older than a field, so that nobody gets it from there."""
    since = (
        _SINCE_DRIVER[number] for number, item in _ITEMS.items() if item.field is field and number in _SINCE_DRIVER
    )
    return driver_major(driver_version) < max(since, default=0)


def _answer(target: Target, number: int, scope: int) -> tuple[int, int]:
    """(NVML value, value type) of one field id; ``Refused`` carries its return code."""
    if driver_major(target.node.driver_version) < _SINCE_DRIVER.get(number, 0):
        raise Refused(INVALID_ARGUMENT)
    if target.instance is not None:
        raise Refused(NOT_SUPPORTED)
    if target.gpu.fault is Fault.RESET_REQUIRED and number != _RECOVERY_ACTION:
        raise Refused(RESET_REQUIRED)
    if number in _MARGINS and Field.GPU_TEMP_LIMIT not in target.gpu.model.not_supported:
        return (_MARGINS[number](board_of(target.gpu)), _INT)
    item = _ITEMS.get(number)
    if item is None or (scope and number in _BOARD_POWER_IDS) or (item.all_links and scope != _ALL_LINKS):
        raise Refused(NOT_SUPPORTED)
    value = read(target.gpu, item.field)
    if value is None:
        raise Refused(NOT_SUPPORTED)
    return (_converted(value, item), item.value_type)


def _converted(value: float, item: _Item) -> int:
    """Counters are cut off, measured values rounded, as the units' resolution wants it."""
    return int(value * item.scale) if item.all_links else round(value * item.scale)


@CALLS.device("nvmlDeviceGetFieldValues", static=True, mig=True)
def _field_values(target: Target, count: CArgument, values: CArgument) -> None:
    if target.gpu.fault is Fault.UNKNOWN_ERROR:
        target.session.refuse_faulty("nvmlDeviceGetFieldValues", target.gpu, static=False)
    timestamp_us = round((target.session.epoch_seconds + target.node.at_seconds) * 1e6)
    for value in out(values)[: plain(count)]:
        try:
            number, value_type = _answer(target, value.fieldId, value.scopeId)
        except Refused as refusal:
            if value.fieldId <= _LAST_ECC_ID and refusal.code == NOT_SUPPORTED:
                continue  # a driver bug that careful callers know: ECC items stay untouched where ECC is off
            value.timestamp, value.latencyUsec, value.nvmlReturn = timestamp_us, _LATENCY_US, refusal.code
            continue
        value.timestamp, value.latencyUsec = timestamp_us, _LATENCY_US
        value.nvmlReturn, value.valueType = 0, value_type
        value.value.ullVal = 0
        setattr(value.value, _MEMBER[value_type], number)

"""What a board tells of its health: errors, remapped memory, links, temperatures, and what holds its clocks down."""

from collections.abc import Iterator

from exporter.exposition import catalog
from exporter.exposition.family import Labels, plus
from exporter.exposition.metric import Metric
from exporter.model import CLOCK_EVENTS, DeviceEvents, DeviceState, DeviceView, Field

_NANOSECONDS = 1_000_000_000
ANSWERING = (DeviceState.UP, DeviceState.RESET_REQUIRED)
"""One that needs a reset has no activity any more, and still says what is wrong."""

_Row = tuple[Metric, Labels, float | None]

_PLAIN = (
    (catalog.GPU_RECOVERY_ACTION, Field.GPU_RECOVERY_ACTION),
    (catalog.GPU_ROW_REMAP_PENDING, Field.ROW_REMAP_PENDING),
    (catalog.GPU_ROW_REMAP_FAILURE, Field.ROW_REMAP_FAILURE),
    (catalog.GPU_RETIRED_PAGES_PENDING, Field.RETIRED_PENDING),
    (catalog.GPU_PCIE_REPLAYS_TOTAL, Field.PCIE_REPLAY_COUNTER),
    (catalog.GPU_TEMPERATURE_MARGIN_CELSIUS, Field.GPU_TEMP_LIMIT),
)
_LABELLED: tuple[tuple[Metric, str, tuple[tuple[str, Field], ...]], ...] = (
    (
        catalog.GPU_ECC_ERRORS_TOTAL,
        "type",
        (("corrected", Field.ECC_SBE_VOL_TOTAL), ("uncorrected", Field.ECC_DBE_VOL_TOTAL)),
    ),
    (
        catalog.GPU_REMAPPED_ROWS,
        "type",
        (("corrected", Field.CORRECTABLE_REMAPPED_ROWS), ("uncorrected", Field.UNCORRECTABLE_REMAPPED_ROWS)),
    ),
    (
        catalog.GPU_RETIRED_PAGES,
        "cause",
        (("single_bit", Field.RETIRED_SBE), ("double_bit", Field.RETIRED_DBE)),
    ),
    (
        catalog.GPU_NVLINK_ERRORS_TOTAL,
        "kind",
        (
            ("crc_flit", Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
            ("crc_data", Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
            ("replay", Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL),
            ("receive", Field.NVLINK_COUNT_RX_ERRORS),
            ("integrity", Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS),
            ("recovery_failed", Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS),
        ),
    ),
    (
        catalog.GPU_TEMPERATURE_CELSIUS,
        "sensor",
        (("gpu", Field.GPU_TEMP), ("memory", Field.MEMORY_TEMP)),
    ),
    (
        catalog.GPU_TEMPERATURE_LIMIT_CELSIUS,
        "limit",
        (
            ("slowdown", Field.SLOWDOWN_TEMP),
            ("shutdown", Field.SHUTDOWN_TEMP),
            ("max_operating", Field.GPU_MAX_OP_TEMP),
            ("memory_max_operating", Field.MEM_MAX_OP_TEMP),
        ),
    ),
)
# Two generations of NVLink, which count the same at two places.
_RECOVERIES = (Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS)

_THROTTLE_TIMES = {
    "power": Field.POWER_VIOLATION,
    "thermal": Field.THERMAL_VIOLATION,
    "sync_boost": Field.SYNC_BOOST_VIOLATION,
    "board_limit": Field.BOARD_LIMIT_VIOLATION,
    "low_utilisation": Field.LOW_UTIL_VIOLATION,
    "reliability": Field.RELIABILITY_VIOLATION,
    "application_clocks": Field.TOTAL_APP_CLOCKS_VIOLATION,
    "base_clocks": Field.TOTAL_BASE_CLOCKS_VIOLATION,
    "sw_thermal": Field.CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS,
    "hw_thermal": Field.CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS,
    "hw_power_brake": Field.CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS,
}

FIELDS: frozenset[Field] = frozenset(
    {
        *(field for _, field in _PLAIN),
        *(field for _, _, parts in _LABELLED for _, field in parts),
        *_RECOVERIES,
        *_THROTTLE_TIMES.values(),
        Field.CLOCK_THROTTLE_REASONS,
    }
)
"""What the health series are made of."""


def rows(view: DeviceView, identity: Labels, events: DeviceEvents | None = None) -> Iterator[_Row]:
    """The health series of a device: its Xids, and of a whole GPU that answers the rest; ``None`` is not told."""
    for xid, count in sorted(view.xids.items()):
        yield catalog.GPU_XID_ERRORS_TOTAL, plus(identity, ("xid", str(xid))), count
    for xid, at_seconds in sorted(view.xid_last_seen_seconds.items()):
        yield catalog.GPU_XID_LAST_SEEN_TIMESTAMP_SECONDS, plus(identity, ("xid", str(xid))), at_seconds
    if view.instance is None and view.state in ANSWERING:
        yield from _board(view, identity)
        yield from _throttling(view, identity)
        for event, times in (events.clock_events or {}).items() if events else ():
            yield catalog.GPU_CLOCK_EVENTS_TOTAL, plus(identity, ("event", event)), times


def _board(view: DeviceView, identity: Labels) -> Iterator[_Row]:
    for metric, field in _PLAIN:
        yield metric, identity, view.values.get(field)
    for metric, label, parts in _LABELLED:
        for value, field in parts:
            yield metric, plus(identity, (label, value)), view.values.get(field)
    recoveries = [view.values[field] for field in _RECOVERIES if field in view.values]
    if recoveries:
        yield catalog.GPU_NVLINK_ERRORS_TOTAL, plus(identity, ("kind", "recovery")), max(recoveries)


def _throttling(view: DeviceView, identity: Labels) -> Iterator[_Row]:
    for reason, field in _THROTTLE_TIMES.items():
        nanoseconds = view.values.get(field)
        if nanoseconds is not None:
            yield catalog.GPU_THROTTLE_SECONDS_TOTAL, plus(identity, ("reason", reason)), nanoseconds / _NANOSECONDS
    mask = view.values.get(Field.CLOCK_THROTTLE_REASONS)
    if mask is not None:
        for bit, reason in enumerate(CLOCK_EVENTS):
            active = int(mask) >> bit & 1
            yield catalog.GPU_THROTTLE_ACTIVE, plus(identity, ("reason", reason)), active

"""Collects the health of a board: errors, remapped memory, links, temperatures and clock limits."""

from collections.abc import Iterator, Mapping
from enum import StrEnum

from exporter.metrics import catalog
from exporter.metrics.dcgm_names import table_lines
from exporter.metrics.text_format import Kind, Labels, Metric, plus
from exporter.model import CLOCK_EVENTS, DeviceEvents, DeviceState, DeviceView, Field, Snapshot, xid_tier

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
_LABELLED: Mapping[Metric, Mapping[str, Field]] = {
    catalog.GPU_ECC_ERRORS_TOTAL: {"corrected": Field.ECC_SBE_VOL_TOTAL, "uncorrected": Field.ECC_DBE_VOL_TOTAL},
    catalog.GPU_REMAPPED_ROWS: {
        "corrected": Field.CORRECTABLE_REMAPPED_ROWS,
        "uncorrected": Field.UNCORRECTABLE_REMAPPED_ROWS,
    },
    catalog.GPU_RETIRED_PAGES: {"single_bit": Field.RETIRED_SBE, "double_bit": Field.RETIRED_DBE},
    catalog.GPU_NVLINK_ERRORS_TOTAL: {
        "crc_flit": Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        "crc_data": Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        "replay": Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        "receive": Field.NVLINK_COUNT_RX_ERRORS,
        "integrity": Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
        "recovery_failed": Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    },
    catalog.GPU_TEMPERATURE_CELSIUS: {"gpu": Field.GPU_TEMP, "memory": Field.MEMORY_TEMP},
    catalog.GPU_TEMPERATURE_LIMIT_CELSIUS: {
        "slowdown": Field.SLOWDOWN_TEMP,
        "shutdown": Field.SHUTDOWN_TEMP,
        "max_operating": Field.GPU_MAX_OP_TEMP,
        "memory_max_operating": Field.MEM_MAX_OP_TEMP,
    },
}
"""By value of the metric's last label."""
# Two generations of NVLink, which count the same at two places.
_RECOVERIES = (Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS)

_MEMORY_LIMIT_CELSIUS = 95
"""Where the driver names none: the limit of HBM on boards whose driver does."""

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
        *(field for parts in _LABELLED.values() for field in parts.values()),
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
    is_board = view.instance is None and view.state in ANSWERING
    tells_action = is_board and Field.GPU_RECOVERY_ACTION in view.values
    for xid, at_seconds in sorted(view.xid_last_seen_seconds.items()):
        tier = xid_tier(xid, tells_action=tells_action)
        yield catalog.GPU_XID_LAST_SEEN_TIMESTAMP_SECONDS, plus(identity, ("xid", str(xid)), ("tier", tier)), at_seconds
    if is_board:
        yield from _board(view, identity)
        yield from _throttling(view, identity)
        if events:
            yield catalog.GPU_THERMAL_THROTTLE_RATIO, identity, events.thermal_throttle_ratio
            for event, times in (events.clock_events or {}).items():
                yield catalog.GPU_CLOCK_EVENTS_TOTAL, plus(identity, ("event", event)), times


def _board(view: DeviceView, identity: Labels) -> Iterator[_Row]:
    for metric, field in _PLAIN:
        yield metric, identity, view.values.get(field)
    for metric, parts in _LABELLED.items():
        for value, field in parts.items():
            yield metric, plus(identity, (metric.labels[-1], value)), view.values.get(field)
    memory = view.values.get(Field.MEMORY_TEMP)
    if memory is not None:
        told = view.values.get(Field.MEM_MAX_OP_TEMP)
        limit, margin = ("assumed", _MEMORY_LIMIT_CELSIUS - memory) if told is None else ("driver", told - memory)
        yield catalog.GPU_MEMORY_TEMPERATURE_MARGIN_CELSIUS, plus(identity, ("limit", limit)), margin
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


_MILLISECONDS = 1000
_Pairs = tuple[tuple[str, str], ...]
_NONE_TOLD = DeviceEvents()


class EventCount(StrEnum):
    """What can be made, under dcgm-exporter's names."""

    XIDS_RECENT = "DCGM_EXP_XID_ERRORS_COUNT"
    XIDS = "DCGM_EXP_XID_ERRORS_TOTAL"
    CLOCK_EVENTS_RECENT = "DCGM_EXP_CLOCK_EVENTS_COUNT"
    CLOCK_EVENTS = "DCGM_EXP_CLOCK_EVENTS_TOTAL"
    HEALTH = "DCGM_EXP_GPU_HEALTH_STATUS"


RECENT = frozenset({EventCount.XIDS_RECENT, EventCount.CLOCK_EVENTS_RECENT})
"""Those of a window, which go up and down."""

NOT_MADE: Mapping[str, str] = {
    "DCGM_EXP_P2P_STATUS": "gpu_nvlink_errors_total, or DCGM_FI_DEV_P2P_NVLINK_STATUS with DCGM",
}
"""dcgm-exporter's others, each with what tells the same or more here."""

_HELP = {
    EventCount.XIDS_RECENT: "Xid events in the window, by code; 0 without a code where there was none.",
    EventCount.XIDS: "Xid events since this agent started, by code; a code appears with its first event.",
    EventCount.CLOCK_EVENTS_RECENT: (
        "Samples of the window in which the event held clocks down, at this agent's sample interval; 0 without an "
        "event where there was none."
    ),
    EventCount.CLOCK_EVENTS: (
        "Times an event began to hold clocks down since this agent started; appears with its first."
    ),
    EventCount.HEALTH: (
        "Health of a GPU by watch: 0 pass, 10 warn, 20 fail; derived from its recovery action, row remapping and the "
        "Xids of the window."
    ),
}
_PASS, _WARN, _FAIL = 0, 10, 20
_Verdict = tuple[int, str]
_FALLEN: _Verdict = (_FAIL, "DCGM_FR_FALLEN_OFF_BUS")
_FATAL: _Verdict = (_FAIL, "DCGM_FR_XID_ERROR")
_SERIOUS: _Verdict = (_WARN, "DCGM_FR_XID_ERROR")
_XIDS: Mapping[str, Mapping[int, _Verdict]] = {
    "ALL": {
        **dict.fromkeys((48, 74, 94, 119, 120, 140), _FATAL),
        79: _FALLEN,
        95: (_FAIL, "DCGM_FR_UNCONTAINED_ERROR"),
    },
    "MEM": {
        **dict.fromkeys((31, 32, 43), _SERIOUS),
        63: (_WARN, "DCGM_FR_PENDING_PAGE_RETIREMENTS"),
        64: (_WARN, "DCGM_FR_ROW_REMAP_FAILURE"),
    },
    "NVLINK": dict.fromkeys((73, 121, 137), _SERIOUS),
    "INFOROM": {93: (_WARN, "DCGM_FR_CORRUPT_INFOROM")},
}
"""By watch: what DCGM's own health check says of an Xid."""
_FIELDS: Mapping[str, Mapping[tuple[Field, int], _Verdict]] = {
    "MEM": {
        (Field.ROW_REMAP_FAILURE, 1): (_FAIL, "DCGM_FR_ROW_REMAP_FAILURE"),
        (Field.ROW_REMAP_PENDING, 1): (_WARN, "DCGM_FR_PENDING_ROW_REMAP"),
    },
    "DRIVER": {
        **dict.fromkeys(((Field.GPU_RECOVERY_ACTION, one) for one in (1, 6)), (_FAIL, "DCGM_FR_GPU_RECOVERY_RESET")),
        **dict.fromkeys(((Field.GPU_RECOVERY_ACTION, one) for one in (2, 7)), (_FAIL, "DCGM_FR_GPU_RECOVERY_REBOOT")),
        (Field.GPU_RECOVERY_ACTION, 3): (_FAIL, "DCGM_FR_GPU_RECOVERY_DRAIN_P2P"),
        (Field.GPU_RECOVERY_ACTION, 4): (_FAIL, "DCGM_FR_GPU_RECOVERY_DRAIN_RESET"),
        (Field.GPU_RECOVERY_ACTION, 5): (_FAIL, "DCGM_FR_GPU_RECOVERY_IMEX_DOMAIN"),
    },
}
"""By watch: field and value that mean trouble."""


def row(name: str, text: str) -> Metric:
    """The metric of a name of ``EventCount``, of its true type; without a help of its own it gets ours."""
    count = EventCount(name)
    falls = count in RECENT or count is EventCount.HEALTH
    return Metric(name=count, kind=Kind.GAUGE if falls else Kind.COUNTER, help=text or _HELP[count])


def samples(name: str, view: DeviceView, snapshot: Snapshot) -> Iterator[tuple[_Pairs, int]]:
    """Labels and values of one device, of a metric with a name of ``EventCount``.

    Clock events are the board's, and stand on its row alone. A device that is down keeps its Xids, which may be why.
    """
    told = snapshot.events.get(view.uuid, _NONE_TOLD)
    up = view.state is DeviceState.UP
    match EventCount(name):
        case EventCount.XIDS_RECENT:
            yield from _in_window("xid", _by_text(told.recent_xids), snapshot.xid_window_seconds, with_none=up)
        case EventCount.XIDS:
            yield from _each("xid", _by_text(view.xids))
        case EventCount.CLOCK_EVENTS_RECENT if up and told.recent_clock_events is not None:
            seconds = snapshot.clock_events_window_seconds
            yield from _in_window("clock_event", told.recent_clock_events, seconds, with_none=True)
        case EventCount.CLOCK_EVENTS if up and told.clock_events is not None:
            yield from _each("clock_event", {event: times for event, times in told.clock_events.items() if times})
        case EventCount.HEALTH if view.instance is None:
            for watch, (result, error) in sorted(_health(view, snapshot).items()):
                yield (("health_error_code", error), ("health_watch", watch)), result


def _health(view: DeviceView, snapshot: Snapshot) -> Mapping[str, _Verdict]:
    """Return the worst verdict by watch on a GPU and its instances; a watch of which nothing is known is absent."""
    devices = (one.uuid for one in snapshot.devices if one.gpu.uuid == view.gpu.uuid)
    xids = {xid for uuid in devices if uuid in snapshot.events for xid in snapshot.events[uuid].recent_xids}
    found: dict[str, list[_Verdict]] = {}
    if view.state in ANSWERING:
        judged = {watch for watch, signs in _FIELDS.items() if any(field in view.values for field, _ in signs)}
        found = {watch: [(_PASS, "DCGM_FR_OK")] for watch in {*_XIDS, *judged}}
    if view.state is DeviceState.LOST:
        found["ALL"] = [_FALLEN]
    for watch, verdicts in _XIDS.items():
        found.setdefault(watch, []).extend(verdicts[xid] for xid in xids & verdicts.keys())
    for watch, signs in _FIELDS.items():
        found.setdefault(watch, []).extend(
            verdict for (field, value), verdict in signs.items() if view.values.get(field) == value
        )
    return {watch: max(verdicts) for watch, verdicts in found.items() if verdicts}


def _by_text(xids: Mapping[int, int]) -> dict[str, int]:
    return {str(xid): xids[xid] for xid in sorted(xids)}


def _each(label: str, counts: Mapping[str, int]) -> Iterator[tuple[_Pairs, int]]:
    for value, times in counts.items():
        yield ((label, value),), times


def _in_window(
    label: str, counts: Mapping[str, int], seconds: float, *, with_none: bool
) -> Iterator[tuple[_Pairs, int]]:
    window = ("window_size_in_ms", str(round(seconds * _MILLISECONDS)))
    for value, times in counts.items():
        yield tuple(sorted((window, (label, value)))), times
    if not counts and with_none:
        yield (window,), 0


_TEXTS = dict(line.split(" ", 1) for line in table_lines("xid_texts.txt"))


def text(code: int) -> str:
    """What an Xid code means, in a few words."""
    if code == 0:
        return "No error"
    return _TEXTS.get(str(code), "Unknown error")

"""What dcgm-exporter makes itself, ``DCGM_EXP_*``: which a collectors file may ask for, and their rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from exporter.exposition.family import Kind
from exporter.exposition.health_collector import ANSWERING
from exporter.model import DeviceEvents, DeviceState, DeviceView, Field, Snapshot

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """One such metric; its type is what is true, whatever the file says."""

    count: EventCount
    help: str

    @property
    def name(self) -> str:
        """As printed."""
        return str(self.count)

    @property
    def kind(self) -> Kind:
        """A window's count falls again, the others never do."""
        return Kind.GAUGE if self.count in RECENT or self.count is EventCount.HEALTH else Kind.COUNTER


def row(name: str, text: str) -> EventRow:
    """The row of a name of ``EventCount``; without a help of its own it gets ours."""
    count = EventCount(name)
    return EventRow(count=count, help=text or _HELP[count])


def samples(count: EventCount, view: DeviceView, snapshot: Snapshot) -> Iterator[tuple[_Pairs, int]]:
    """Labels and values of one device.

    Clock events are the board's, and stand on its row alone. A device that is down keeps its Xids, which may be why.
    """
    told = snapshot.events.get(view.uuid, _NONE_TOLD)
    up = view.state is DeviceState.UP
    match count:
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

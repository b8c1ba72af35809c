"""The counts that dcgm-exporter makes itself, ``DCGM_EXP_*``: which a collectors file may ask for, and their rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from exporter.exposition.family import Kind
from exporter.model import DeviceEvents, DeviceState, DeviceView, Snapshot

_MILLISECONDS = 1000
_Pairs = tuple[tuple[str, str], ...]
_NONE_TOLD = DeviceEvents()


class EventCount(StrEnum):
    """What can be counted, under dcgm-exporter's names."""

    XIDS_RECENT = "DCGM_EXP_XID_ERRORS_COUNT"
    XIDS = "DCGM_EXP_XID_ERRORS_TOTAL"
    CLOCK_EVENTS_RECENT = "DCGM_EXP_CLOCK_EVENTS_COUNT"
    CLOCK_EVENTS = "DCGM_EXP_CLOCK_EVENTS_TOTAL"


RECENT = frozenset({EventCount.XIDS_RECENT, EventCount.CLOCK_EVENTS_RECENT})
"""Those of a window, which go up and down."""

NOT_MADE: Mapping[str, str] = {
    "DCGM_EXP_GPU_HEALTH_STATUS": "gpu_up, gpu_recovery_action, gpu_xid_errors_total and the other health metrics",
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
}


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
        return Kind.GAUGE if self.count in RECENT else Kind.COUNTER


def row(name: str, text: str) -> EventRow:
    """The row of a name of ``EventCount``; without a help of its own it gets ours."""
    count = EventCount(name)
    return EventRow(count=count, help=text or _HELP[count])


def samples(count: EventCount, view: DeviceView, snapshot: Snapshot) -> Iterator[tuple[_Pairs, int]]:
    """Labels and values of one device.

    Clock events are the board's, and stand on its row alone. A device that is down keeps its Xids, which may be why.
    """
    instance = view.instance.gpu_instance_id if view.instance else None
    told = snapshot.events.get((view.gpu.uuid, instance), _NONE_TOLD)
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

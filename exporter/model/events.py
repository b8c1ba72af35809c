"""What happened to a device: Xids lately, and what began to hold its clocks down."""

from collections.abc import Mapping
from dataclasses import dataclass, field

CLOCK_EVENTS = (
    "gpu_idle",
    "clocks_setting",
    "power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
    "display_clocks",
)
"""What holds clocks down, in the order of the bits of ``Field.CLOCK_THROTTLE_REASONS``; dcgm-exporter's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvents:
    """Of a GPU, or of one GPU instance of it: what its readings told since the agent started."""

    recent_xids: Mapping[int, int] = field(default_factory=dict)
    """Events per Xid in the snapshot's ``xid_window_seconds``; empty, too, where no window is kept."""
    clock_events: Mapping[str, int] | None = None
    """How often each of ``CLOCK_EVENTS`` began; ``None`` for what does not tell: a GPU instance, some models."""
    recent_clock_events: Mapping[str, int] | None = None
    """Readings of the snapshot's ``clock_events_window_seconds`` in which it held clocks down, for those that did;
    ``None`` without any reading of it in that time, or where no window is kept."""

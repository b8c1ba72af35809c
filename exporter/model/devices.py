"""Values of devices: GPUs, MIG instances, their readings and events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.model.fields import Field

NO_PROCESS_MEMORY_MIB = 64
"""With less memory in use than the smallest CUDA context, an empty process list is credible."""


class DeviceState(StrEnum):
    """Condition of a physical GPU as its driver reports it."""

    UP = "up"
    LOST = "lost"
    """Fell off the bus (NVML GpuIsLost); comes back only by itself, a reset or a reboot."""
    RESET_REQUIRED = "reset_required"
    FAILED = "failed"
    """Calls fail for another reason; see the reason string."""
    MISSING = "missing"
    """Was there before, is not enumerated now."""
    UNKNOWN = "unknown"
    """The host engine that is asked in place of the driver gives no values now; that says nothing of the GPU."""


class SourceState(StrEnum):
    """Condition of a source of readings as a whole."""

    STARTING = "starting"
    UP = "up"
    FAILED = "failed"
    """The source said why it cannot work (no driver, no library, mismatch, ...); it is tried again."""
    HUNG = "hung"
    """Past its deadline; the child was killed and another one is started."""
    DIED = "died"
    """The child ended by itself or was killed; another one is started."""
    RELEASED = "released"
    """Closed on request, so that a GPU reset or driver upgrade can pass; opens again by itself."""


class ProfilingState(StrEnum):
    """Whether DCGM's profiling fields (``DCGM_FI_PROF_*``) can be had of a GPU, and if not, why."""

    RUNNING = "running"
    PAUSED = "paused"
    """Somebody paused it, for the whole host engine (``dcgmi profile --pause``): its values are blank meanwhile."""
    UNSUPPORTED = "unsupported"
    """DCGM has no profiling for this model."""
    NO_MODULE = "no_module"
    """The engine could not load its profiling module, which only NVIDIA's full package has."""
    NO_PERMISSION = "no_permission"
    """The engine lacks a right that profiling takes (root, or CAP_SYS_ADMIN)."""
    REFUSED = "refused"
    """Refused for another reason, such as a profiler that has the counters, or a driver that is too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Identity and static facts of one physical GPU.

    ``uuid`` is the identity; ``index`` and ``minor`` hold for one boot only. ``compute_slices`` and
    ``memory_slices`` are those of the largest MIG profile (7 and 8 on A100, H100), 0 without MIG support.
    """

    uuid: str
    index: int
    minor: int | None
    model: str
    pci_bus_id: str
    """With 8-digit domain, upper case: ``00000000:17:00.0``."""
    mig_enabled: bool = False
    compute_slices: int = 0
    memory_slices: int = 0
    memory_total_bytes: int | None = None
    """Its whole framebuffer; ``None`` where the driver does not report it."""
    labels: Mapping[Field, str] = field(default_factory=dict)
    """Text fields of the device, e.g. ``Field.VBIOS_VERSION``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """One MIG compute instance: what the kubelet allocates on a partitioned GPU."""

    uuid: str
    parent_uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    """``1g.10gb``, ``1c.3g.40gb``, ..."""
    compute_slices: int
    memory_slices: int
    profile_id: int | None = None
    """NVML's number of the GPU instance's profile; ``None``, as the next, where the driver does not report it."""
    placement_start: int | None = None
    """First memory slice of its GPU instance: with profile and parent it is what DRA names an instance by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """What one process uses of one device. ``None`` is "not reported", never 0.

    Ratios are 0..1 of the whole device, averaged over the samples since the previous poll of the process
    ring; a process that is listed and had no sample in a ring that did answer has ratio 0.0.
    """

    pid: int
    """In the host's PID namespace."""
    memory_used_bytes: int | None = None
    sm_ratio: float | None = None
    enc_ratio: float | None = None
    dec_ratio: float | None = None
    jpg_ratio: float | None = None
    """As the next: ``None`` before R550, where the call has no JPEG and optical-flow engines."""
    ofa_ratio: float | None = None
    ended: bool = False
    """Was sampled since the previous poll and is not on the device any more: activity, but no memory."""
    mps: bool = False
    """The driver lists it as a client of an MPS server, or did at the previous poll."""

    @property
    def busiest_ratio(self) -> float | None:
        """Use of its busiest engine, as a transcoder is not idle; ``None`` without samples."""
        engines = (self.sm_ratio, self.enc_ratio, self.dec_ratio, self.jpg_ratio, self.ofa_ratio)
        return max((ratio for ratio in engines if ratio is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigReading:
    """One MIG instance at one instant; only what is truly measured per instance."""

    instance: MigInstance
    values: Mapping[Field, int | float] = field(default_factory=dict)
    processes: tuple[ProcessUse, ...] | None = None
    """``None``: the driver did not report them; empty: it reported none."""
    from_dcgm: frozenset[Field] = frozenset()
    """Those of ``values`` that DCGM reported; the others are NVML's. Set where the sources are joined, empty before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One physical GPU at one instant. A quantity that was not measured is not a key of ``values``."""

    gpu: Gpu
    state: DeviceState = DeviceState.UP
    reason: str = ""
    """Snake-case cause when not up: ``gpu_is_lost``, ``reset_required``, ``unknown_error``, ..."""
    values: Mapping[Field, int | float] = field(default_factory=dict)
    instances: tuple[MigReading, ...] = ()
    processes: tuple[ProcessUse, ...] | None = None
    from_dcgm: frozenset[Field] = frozenset()
    """As of ``MigReading``."""
    profiling: ProfilingState | None = None
    """``None`` where DCGM was not asked for a profiling field, or did not answer."""
    lacks_instances: bool = False
    """Whether there are MIG instances that the driver fails to describe, so that ``instances`` are not all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """One Xid (driver error) event. ``at_seconds`` is Unix time."""

    uuid: str
    """Of the physical GPU."""
    xid: int
    at_seconds: float
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    """Of one compute instance of the GPU instance; ``None`` where the source reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything one source measured in one sample.

    ``errors`` counts what went wrong since the previous reading, by snake-case reason; ``xids`` are the events
    since the previous reading. Both are to be added up by whoever keeps them.
    """

    source: str
    """``nvml`` or ``dcgm``."""
    taken_at_seconds: float
    """Unix time at the end of the sample."""
    duration_seconds: float
    """How long the sample took in the driver."""
    steady_seconds: float | None = None
    """The same instant on the machine's monotonic clock, which all processes share; intervals are computed from
    it. ``None`` where time is replayed: then ``taken_at_seconds`` serves."""
    driver_version: str | None = None
    nvml_version: str | None = None
    dcgm_version: str | None = None
    """Of the host engine: ``4.6.0``."""
    gpus: tuple[GpuReading, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def instant(self) -> float:
        """When it was taken, in seconds of the monotonic clock; where time is replayed, in Unix time."""
        return self.taken_at_seconds if self.steady_seconds is None else self.steady_seconds

    def age_seconds(self, now: float, steady: float) -> float:
        """Return how old it is, by the monotonic clock where it has an instant of that.

        Args:
            now: Unix time. A clock that was set back makes a reading look as if it came from the future: it is not old
                for that, and if no more come, the source's own deadline reports it.
            steady: Seconds of the monotonic clock.
        """
        return (now if self.steady_seconds is None else steady) - self.instant


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """How a source is doing. ``message`` says what is wrong and how to fix it, in one line."""

    name: str
    state: SourceState
    reason: str = ""
    message: str = ""
    restarts: int = 0


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


class XidTier(StrEnum):
    """Who has to act on an Xid; a label value of ``gpu_xid_last_seen_timestamp_seconds``."""

    CRITICAL = "critical"
    """The GPU needs a reset or its node a reboot."""
    APPLICATION = "application"
    """A program did what it cannot do."""
    WARNING = "warning"
    """Somebody should look it up: codes of which nothing is known among them."""
    NONE = "none"
    """No holder."""


_XID_TIERS = {
    XidTier.CRITICAL: (46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158),
    XidTier.APPLICATION: (
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89),
        *(96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139),
    ),
    XidTier.NONE: (
        *(14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161),
    ),
}
"""docs/runbook.md gives the reasons."""
_TIER_OF = {xid: tier for tier, xids in _XID_TIERS.items() for xid in xids}
_RECOVERY_ACTION_CHANGED = 154
"""Also back to none."""


def xid_tier(xid: int, *, tells_action: bool = False) -> XidTier:
    """Return the tier of an Xid.

    Args:
        xid: The code.
        tells_action: Whether the GPU reports its recovery action itself, so that a change of it needs no Xid.
    """
    if xid == _RECOVERY_ACTION_CHANGED and tells_action:
        return XidTier.NONE
    return _TIER_OF.get(xid, XidTier.WARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvents:
    """Of a GPU, or of one GPU instance of it: what its readings reported since the agent started."""

    recent_xids: Mapping[int, int] = field(default_factory=dict)
    """Events per Xid in the snapshot's ``xid_window_seconds``; empty, too, where no window is kept."""
    clock_events: Mapping[str, int] | None = None
    """How often each of ``CLOCK_EVENTS`` began; ``None`` without that report: a GPU instance, some models."""
    recent_clock_events: Mapping[str, int] | None = None
    """Readings of the snapshot's ``clock_events_window_seconds`` in which it held clocks down, for those that did;
    ``None`` without any reading of it in that time, or where no window is kept."""
    thermal_throttle_ratio: float | None = None
    """Part of the last minutes in which heat reduced clocks, 0..1; ``None`` while unknown."""

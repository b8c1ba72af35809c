"""Values of devices: GPUs, MIG instances, their readings and events."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.model.fields import Field

NO_PROCESS_MEMORY_MIB = 64
"""Memory of the smallest CUDA context. With less memory in use, an empty process list is credible."""


class DeviceState(StrEnum):
    """Condition of a physical GPU as its driver reports it."""

    UP = "up"
    LOST = "lost"
    """The GPU fell off the bus (NVML GpuIsLost); recovers only by itself, a reset or a reboot."""
    RESET_REQUIRED = "reset_required"
    FAILED = "failed"
    """Calls fail for another cause; see ``reason``."""
    MISSING = "missing"
    """The GPU was present before and is not enumerated now."""
    UNKNOWN = "unknown"
    """The agent, or the host engine in place of the driver, has no values now. This is not a fault of the GPU."""


class SourceState(StrEnum):
    """Condition of a source of readings as a whole."""

    STARTING = "starting"
    UP = "up"
    FAILED = "failed"
    """The source cannot work and has reported why (no driver, no library, mismatch, ...); it is tried again."""
    HUNG = "hung"
    """The source exceeded its deadline; its child is killed and another one started."""
    DIED = "died"
    """The child exited or was killed; another one is started."""
    RELEASED = "released"
    """The source is closed on request, for a GPU reset or driver upgrade; reopens by itself."""


class ProfilingState(StrEnum):
    """Availability of DCGM's profiling fields (``DCGM_FI_PROF_*``) for a GPU, and the reason if there are none."""

    RUNNING = "running"
    PAUSED = "paused"
    """Paused by a user for the whole host engine (``dcgmi profile --pause``): its values are blank until resumed."""
    UNSUPPORTED = "unsupported"
    """DCGM has no profiling for this model."""
    NO_MODULE = "no_module"
    """The engine could not load its profiling module, which only NVIDIA's full package contains."""
    NO_PERMISSION = "no_permission"
    """The engine lacks a permission that profiling needs (root, or CAP_SYS_ADMIN)."""
    REFUSED = "refused"
    """Refused for another reason, such as a profiler that uses the counters, or an old driver."""


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
    """PCI bus id with 8-digit domain, upper case: ``00000000:17:00.0``."""
    mig_enabled: bool = False
    compute_slices: int = 0
    memory_slices: int = 0
    memory_total_bytes: int | None = None
    """Size of the whole framebuffer in bytes; ``None`` if the driver does not report it."""
    labels: Mapping[Field, str] = field(default_factory=dict)
    """Text fields of the device, e.g. ``Field.VBIOS_VERSION``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """One MIG compute instance: the unit that the kubelet allocates on a partitioned GPU."""

    uuid: str
    parent_uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    """Profile name: ``1g.10gb``, ``1c.3g.40gb``, ..."""
    compute_slices: int
    memory_slices: int
    profile_id: int | None = None
    """NVML's number of the GPU instance's profile; ``None``, like the next field, if the driver does not report it."""
    placement_start: int | None = None
    """First memory slice of its GPU instance; with profile and parent, it is DRA's name of an instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """Use of one device by one process. ``None`` is "not reported", never 0.

    Ratios are 0..1 of the whole device, averaged over the samples since the previous poll of the process
    ring. A listed process without a sample has ratio 0.0 if its ring answered.
    """

    pid: int
    """Process id in the host's PID namespace."""
    memory_used_bytes: int | None = None
    sm_ratio: float | None = None
    enc_ratio: float | None = None
    dec_ratio: float | None = None
    jpg_ratio: float | None = None
    """JPEG engine. This field and the next one are ``None`` before R550: the call has no such engines there."""
    ofa_ratio: float | None = None
    ended: bool = False
    """Whether it was sampled since the previous poll and is no longer listed: it has activity, but no memory."""
    mps: bool = False
    """Whether the driver lists it as a client of an MPS server, or did so at the previous poll."""
    graphics: bool = False
    """Whether the driver lists a graphics context of it; no source measures raster and ray-tracing units."""

    @property
    def busiest_ratio(self) -> float | None:
        """Use of its busiest engine, codecs included, because a transcoder is not idle; ``None`` without samples."""
        engines = (self.sm_ratio, self.enc_ratio, self.dec_ratio, self.jpg_ratio, self.ofa_ratio)
        return max((ratio for ratio in engines if ratio is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigReading:
    """One MIG instance at one instant; contains only values that are measured per instance."""

    instance: MigInstance
    values: Mapping[Field, int | float] = field(default_factory=dict)
    processes: tuple[ProcessUse, ...] | None = None
    """Processes on the instance; ``None`` if the driver did not report them, empty if it reported none."""
    from_dcgm: frozenset[Field] = frozenset()
    """Keys of ``values`` that DCGM reported; NVML reported the others. Empty until the sources are merged."""

    @property
    def uuid(self) -> str:
        """UUID of the instance."""
        return self.instance.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One physical GPU at one instant. ``values`` has only measured quantities."""

    gpu: Gpu
    state: DeviceState = DeviceState.UP
    reason: str = ""
    """Snake-case cause if not up: ``gpu_is_lost``, ``reset_required``, ``unknown_error``, ..."""
    values: Mapping[Field, int | float] = field(default_factory=dict)
    instances: tuple[MigReading, ...] = ()
    processes: tuple[ProcessUse, ...] | None = None
    from_dcgm: frozenset[Field] = frozenset()
    """Like ``MigReading.from_dcgm``."""
    profiling: ProfilingState | None = None
    """State of DCGM's profiling; ``None`` if no profiling field was requested from DCGM, or it did not answer."""
    lacks_instances: bool = False
    """Whether ``instances`` is incomplete, because the driver fails to describe some MIG instances."""

    @property
    def uuid(self) -> str:
        """UUID of the GPU."""
        return self.gpu.uuid

    @property
    def devices(self) -> "tuple[DeviceReading, ...]":
        """The devices that processes use: the MIG instances, or the GPU itself if it has none."""
        return self.instances or (self,)

    @property
    def with_instances(self) -> "tuple[DeviceReading, ...]":
        """The GPU, and then its MIG instances."""
        return (self, *self.instances)

    def without_values(self, state: DeviceState, reason: str) -> "GpuReading":
        """Return the GPU in another state, with only its identity and the identities of its instances."""
        bare = tuple(MigReading(instance=part.instance) for part in self.instances)
        return GpuReading(
            gpu=self.gpu, state=state, reason=reason, instances=bare, lacks_instances=self.lacks_instances
        )


DeviceReading = GpuReading | MigReading


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """One Xid (driver error) event. ``at_seconds`` is Unix time."""

    uuid: str
    """UUID of the physical GPU."""
    xid: int
    at_seconds: float
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    """Id of one compute instance of the GPU instance; ``None`` if the source reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything one source measured in one sample.

    ``errors`` counts the errors since the previous reading, by snake-case reason; ``xids`` are the events
    since the previous reading. The consumer must sum both.
    """

    source: str
    """Name of the source: ``nvml`` or ``dcgm``."""
    taken_at_seconds: float
    """Unix time at the end of the sample."""
    duration_seconds: float
    """Duration of the sample in the driver, in seconds."""
    steady_seconds: float | None = None
    """The same instant on the machine's monotonic clock, which all processes share; used to compute intervals.
    ``None`` in a replay: then ``taken_at_seconds`` is used."""
    driver_version: str | None = None
    nvml_version: str | None = None
    dcgm_version: str | None = None
    """Version of the host engine: ``4.6.0``."""
    gpus: tuple[GpuReading, ...] = ()
    xids: tuple[XidEvent, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def instant(self) -> float:
        """Instant of the reading in seconds of the monotonic clock; in a replay, Unix time."""
        return self.taken_at_seconds if self.steady_seconds is None else self.steady_seconds

    def age_seconds(self, now: float, steady: float) -> float:
        """Return the age in seconds, by the monotonic clock if the reading has an instant on it.

        Args:
            now: Unix time. After the clock was set back, a reading seems to be from the future, which does not make it
                old; if no more readings arrive, the source's own deadline reports it.
            steady: Seconds of the monotonic clock.
        """
        return (now if self.steady_seconds is None else steady) - self.instant


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """State of a source. ``message`` contains the fault and its fix, in one line."""

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
"""Reasons for reduced clocks, in the order of the bits of ``Field.CLOCK_THROTTLE_REASONS``; dcgm-exporter's words."""


class XidTier(StrEnum):
    """Tier of an Xid, by the required action; a label value of ``gpu_xid_last_seen_timestamp_seconds``."""

    CRITICAL = "critical"
    """The GPU needs a reset or its node a reboot."""
    APPLICATION = "application"
    """A program performed an illegal operation."""
    WARNING = "warning"
    """An operator should check the meaning of the code; includes unknown codes."""
    NONE = "none"
    """No action."""


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
"""Xids by tier; docs/runbook.md has the reasons."""
_TIER_OF = {xid: tier for tier, xids in _XID_TIERS.items() for xid in xids}
_RECOVERY_ACTION_CHANGED = 154
"""Xid of a changed recovery action; also sent when the action changes back to none."""


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
    """Events of a GPU, or of one GPU instance of it, since the agent started."""

    recent_xids: Mapping[int, int] = field(default_factory=dict)
    """Events per Xid in the snapshot's ``xid_window_seconds``; empty if there are none or no window is kept."""
    clock_events: Mapping[str, int] | None = None
    """Number of starts of each of ``CLOCK_EVENTS``; ``None`` if not reported: for GPU instances and some models."""
    recent_clock_events: Mapping[str, int] | None = None
    """Number of readings with reduced clocks in the snapshot's ``clock_events_window_seconds``, by reason; a reason
    without one is absent. ``None`` without a reading in that time, or if no window is kept."""
    thermal_throttle_ratio: float | None = None
    """Part of the last minutes in which heat reduced clocks, 0..1; ``None`` while unknown."""

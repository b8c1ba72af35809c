"""Values of a snapshot: the immutable state of a node that each tick creates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import ClassVar

from exporter.model.attribution import AllocationState, Attribution, Holder, MetadataStatus, NodeFacts, PodFacts
from exporter.model.devices import DeviceEvents, DeviceState, Gpu, MigInstance, ProfilingState, Reading, SourceStatus
from exporter.model.fields import Field
from exporter.model.ledger import Bottleneck, LedgerView, OwnersView, Price, ResourceProfile


class ActivitySource(StrEnum):
    """Source of an activity ratio; a label value of ``gpu_activity_ratio``."""

    ENGINE = "engine"
    """GPM or DCGM graphics-engine-active, the true mean over the sample."""
    UTILISATION = "utilisation"
    """NVML utilisation: share of time in which a kernel was resident."""
    CODEC = "codec"
    """A video, JPEG or optical-flow engine was busier than the compute engines."""
    COPY = "copy"
    """Copies: the PCIe link was busier than the engines."""
    PROCESS_SAMPLES = "process_samples"
    """A holder's part, divided in proportion to the driver's per-process samples."""
    ESTIMATED = "estimated"
    """A holder's part, mostly divided by share because processes do not attribute it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Activity over a sample as a ratio 0..1, and its source."""

    ratio: float
    source: ActivitySource
    measured_by: str = "nvml"
    """Source of the reading: ``nvml`` or ``dcgm``."""
    profile: ResourceProfile | None = None
    """Effective part and bottleneck; ``None`` if a resource was not measured, or for a part of a shared device."""


IDLE_SHOWN_SECONDS = 120.0
"""Minimum idle time of a holder that pages and commands mark; shorter pauses are normal for a busy pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodUse:
    """A holder and its known use of its device. ``None`` is unknown, never 0."""

    holder: Holder
    age_seconds: float
    """Seconds since the container was first seen to hold the device."""
    activity: Activity | None = None
    """Part of the device's activity, 0..1 of the *device*; the parts and the remainder sum to the device's."""
    idle_for_seconds: float | None = None
    """Measured idle time since the holder was last busy, in seconds; ``None`` while it may be idle or busy."""
    memory_used_bytes: int | None = None
    values: Mapping[Field, int | float] = field(default_factory=dict)
    """Drop-in fields measured per holder on a shared device (utilisation, memory); empty if not measured."""
    facts: PodFacts | None = None
    """Owner of the pod; ``None`` without Kubernetes metadata, or until it is known."""

    @property
    def is_idle(self) -> bool:
        """Whether the holder is known to have been idle for long enough to be marked."""
        return self.idle_for_seconds is not None and self.idle_for_seconds >= IDLE_SHOWN_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """One device: a whole GPU (``instance`` is ``None``) or one MIG instance of it.

    A partitioned GPU appears once as a GPU, with the board's values, and once per instance.
    """

    gpu: Gpu
    instance: MigInstance | None = None
    state: DeviceState = DeviceState.UP
    reason: str = ""
    values: Mapping[Field, int | float] = field(default_factory=dict)
    activity: Activity | None = None
    activity_unknown_reason: str = ""
    """Reason for ``activity`` being ``None``: ``no_source``, ``contradiction``, ``incomplete``, ``device_down``,
    ``stale``."""
    share_ratio: float = 1.0
    """The device's part of its physical GPU: 1, or an instance's normalised part."""
    allocation: AllocationState | None = AllocationState.UNKNOWN
    """Allocation state; ``None`` for a partitioned GPU, which is not allocatable itself."""
    pods: tuple[PodUse, ...] = ()
    rest_is_free: bool = True
    """Whether the unheld rest of a device, or slices outside instances, are free; False if they may have an unknown
    holder."""
    lacks_instances: bool = False
    """Whether a partitioned GPU has instances that the driver does not describe, which have no view."""
    unattributed_activity_ratio: float | None = None
    """Activity of the device that belongs to no listed pod; ``None`` while unknown."""
    unattributed_memory_bytes: int | None = None
    unattributed_processes: int | None = None
    profiling: ProfilingState | None = None
    """DCGM's profiling state of the physical GPU; ``None`` if DCGM is not used or does not answer."""
    xids: Mapping[int, int] = field(default_factory=dict)
    """Events per Xid since the agent started."""
    xid_last_seen_seconds: Mapping[int, float] = field(default_factory=dict)
    """Unix time of the newest event per Xid."""
    last_xid: int | None = None

    @property
    def uuid(self) -> str:
        """UUID of the device: that of the MIG instance, or of the whole GPU."""
        return self.instance.uuid if self.instance else self.gpu.uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class MeteringView:
    """Ledgers, owners and prices to show; the defaults are for a node that is not metered."""

    ledger: LedgerView | None = None
    """The shown ledgers; ``None`` before the first reading was metered."""
    owners: OwnersView | None = None
    """Figures of owners; ``None`` if no ledger is shown, or the snapshot is too old."""
    node_facts: NodeFacts = field(default_factory=NodeFacts)
    prices: Mapping[str, Price] = field(default_factory=dict)
    """Current price by UUID of the physical GPU; a GPU without a price is absent."""
    price_book: str = ""
    """Name of the price book in use; empty without one."""
    unpriced_gpus: int = 0
    """Number of GPUs without a price."""
    awaits_labels: bool = False
    """Whether the labels of the node, on which prices may depend, have not been read yet."""
    is_writer: bool | None = None
    """Whether this agent is the writer of the node's ledger; ``None`` without metering."""
    is_locked: bool | None = None
    """Whether the writer holds the host lock; ``None`` if it does not write or has no such lock."""
    lock_note: str = ""
    """Reason why this agent does not write the ledger, or another may write it too, in one line; otherwise empty."""


_NOT_MEASURED = 255
_LEVELS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityHistory:
    """Activity of each device in the last 15 minutes, by steps of ten seconds."""

    STEP_SECONDS: ClassVar[int] = 10
    STEPS: ClassVar[int] = 90
    """Maximum number of steps."""

    ends_at_seconds: float | None = None
    """Unix time of the end of the newest step; ``None`` before the first one ends."""
    levels: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes by UUID of the device: one per step, as from ``level``, oldest first."""
    bottlenecks: Mapping[str, Mapping[Bottleneck, float]] = field(default_factory=dict)
    """Parts of the profiled active time by bottleneck, by UUID of the device; absent without such time."""

    @staticmethod
    def level(ratio: float | None) -> int:
        """Return a ratio in steps of 0.5 %, 0 only for 0; without a ratio, the byte for an unmeasured step."""
        if ratio is None:
            return _NOT_MEASURED
        return min(_LEVELS, max(1, round(ratio * _LEVELS))) if ratio > 0 else 0

    def ratios(self, uuid: str) -> list[float | None]:
        """Return the means of a device, 0..1, oldest first; ``None`` for an unmeasured step."""
        return [None if level == _NOT_MEASURED else level / _LEVELS for level in self.levels.get(uuid, b"")]


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Snapshot:
    """State of one node at one instant, with all data that the exposition shows."""

    taken_at_seconds: float
    """Unix time of the tick."""
    taken_steady_seconds: float | None = None
    """Time of the tick on the monotonic clock; ``None``: the age is not checked."""
    stale_after_seconds: float = inf
    """Age in seconds from which the snapshot is too old."""
    node: str
    simulated: bool = False
    reading: Reading | None = None
    """The newest reading, without values if it is too old to be shown; ``None`` before the first."""
    devices: tuple[DeviceView, ...] = ()
    sources: tuple[SourceStatus, ...] = ()
    history: ActivityHistory = field(default_factory=ActivityHistory)
    events: Mapping[str, DeviceEvents] = field(default_factory=dict)
    """Events by UUID of the device, a GPU or a MIG instance; a device without any is absent."""
    xid_window_seconds: float = 300.0
    clock_events_window_seconds: float = 300.0
    attribution: Attribution = field(default_factory=lambda: Attribution(known=False))
    metadata: MetadataStatus | None = None
    """State of the Kubernetes API's data; ``None`` if the agent does not read pods from the API."""
    metering: MeteringView = field(default_factory=MeteringView)
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Counts since start by (part, reason), e.g. ("attribution", "unavailable")."""
    tick_duration_seconds: float = 0.0
    ready: bool = False
    not_ready_reasons: tuple[str, ...] = ()

    @property
    def expected_devices(self) -> int | None:
        """Expected number of GPUs: the larger of the kubelet's number and the number seen before."""
        return max(len({view.gpu.uuid for view in self.devices}), self.attribution.expected_devices or 0) or None

    def stale_reason(self, steady: float) -> str:
        """Return the reason why the snapshot is too old at an instant of the monotonic clock; empty if it is not."""
        age = 0.0 if self.taken_steady_seconds is None else steady - self.taken_steady_seconds
        if age <= self.stale_after_seconds:
            return ""
        return (
            f"the newest picture of the node is {age:.0f} s old (limit {self.stale_after_seconds:g} s): "
            "the agent's loop fails or hangs; see the agent's log"
        )

"""Keeps the agent's memory between ticks: the newest readings, every GPU ever seen, and event counts."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import NamedTuple

from exporter.gpu.merge import by_index
from exporter.model import (
    CLOCK_EVENTS,
    ActivityHistory,
    Bottleneck,
    DeviceEvents,
    DeviceState,
    DeviceView,
    Field,
    GpuReading,
    MigInstance,
    Reading,
    XidEvent,
)

LOG = logging.getLogger("exporter.agent")
_NVIDIA = "nvidia"

MOST_XIDS = 64
"""Maximum number of Xid codes per device: more than a GPU has in its life; limits the memory for a faulty source."""


MOST_DEVICES = 512
"""Maximum number of remembered devices with Xids, including MIG instances that no longer exist."""


class DeviceXid(NamedTuple):
    """An Xid event of a device."""

    uuid: str
    """UUID of the device: a GPU or a MIG instance."""
    xid: int


@dataclass(slots=True)
class XidRecord:
    """Xid events of one device since the agent started."""

    counts: Counter[int] = field(default_factory=Counter)
    last_seen_seconds: dict[int, float] = field(default_factory=dict)
    last: int | None = None


@dataclass(slots=True)
class SourceRecord:
    """Everything that is kept of the readings."""

    newest: Reading | None = None
    """The newest reading, with every GPU ever seen except those known to have left; an absent GPU is missing."""
    bound_driver: Callable[[str], str | None] = lambda _bus_id: None
    """Returns the kernel driver that a PCI bus id is bound to; ``None`` if that is not known."""
    known: dict[str, GpuReading] = field(default_factory=dict)
    """Last reading of each GPU while it was up, by UUID."""
    xids: dict[str, XidRecord] = field(default_factory=dict)
    """Xid records by UUID of the device, a GPU or a MIG instance."""

    def add(self, reading: Reading) -> tuple[DeviceXid, ...]:
        """Add one reading: counts add up, values replace.

        Returns:
            Its Xid events with their devices, without codes beyond ``MOST_XIDS``, because every code is a series.
        """
        before = self.newest
        self.newest = newest = replace(reading, gpus=self._with_all_known(reading.gpus))
        self._forget_former(newest)
        placed = [(_device_of(event, before, newest), event) for event in reading.xids]
        return tuple(DeviceXid(uuid, event.xid) for uuid, event in placed if self._count(uuid, event))

    def _forget_former(self, newest: Reading) -> None:
        """Keep the records of absent MIG instances only while they are few: the instances may be listed again."""
        if len(self.xids) > MOST_DEVICES:
            here = {uuid for gpu in newest.gpus for uuid in (gpu.gpu.uuid, *_instances(gpu))}
            self.xids = {uuid: record for uuid, record in self.xids.items() if uuid in here}

    def _count(self, uuid: str, event: XidEvent) -> bool:
        record = self.xids.setdefault(uuid, XidRecord())
        if event.xid not in record.counts and len(record.counts) >= MOST_XIDS:
            return False
        record.counts[event.xid] += 1
        record.last_seen_seconds[event.xid] = event.at_seconds
        record.last = event.xid
        return True

    def _with_all_known(self, gpus: tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
        """Complete a reading with the remembered data of GPUs that do not answer.

        A new child does not know a GPU that was lost before it started, and a lost GPU does not list its MIG
        instances; but their holders still hold them.
        """
        up = {gpu.gpu.pci_bus_id: gpu.gpu.uuid for gpu in gpus if gpu.state is DeviceState.UP and gpu.gpu.pci_bus_id}
        self.known.update((gpu.gpu.uuid, gpu) for gpu in gpus if gpu.state is DeviceState.UP)
        completed = [self._with_instances(gpu) for gpu in gpus]
        here = {gpu.gpu.uuid for gpu in gpus}
        gone = (gpu for uuid, gpu in self.known.items() if uuid not in here)
        completed.extend(gpu.without_values(DeviceState.MISSING, "not_enumerated") for gpu in gone)
        there = [gpu for gpu in completed if gpu.state is not DeviceState.MISSING and not self._has_left(gpu, up)]
        missing = [gpu for gpu in completed if gpu.state is DeviceState.MISSING and not self._has_left(gpu, up)]
        # The driver numbers only the present GPUs, so one of them may have the index of a missing one.
        return by_index(there, missing)

    def _has_left(self, gpu: GpuReading, up: Mapping[str, str]) -> bool:
        """Return whether a GPU is known to have left this node's driver, and forget it then.

        Only positive evidence counts; without it, an unresponsive GPU is missing, and its time is charged.

        Args:
            gpu: The GPU as it would be shown.
            up: UUIDs of the GPUs that are up, by PCI bus id.
        """
        if gpu.state is DeviceState.UP:
            return False
        bus_id, uuid = gpu.gpu.pci_bus_id, gpu.gpu.uuid
        successor, bound = up.get(bus_id), self.bound_driver(bus_id)
        if successor is None and bound in {None, _NVIDIA}:
            return False
        if self.known.pop(uuid, None):
            why = f"replaced by {successor}" if successor else f"bound to kernel driver {bound}"
            LOG.info("GPU forgotten: uuid=%s pci_bus_id=%s: %s", uuid, bus_id, why)
        return True

    def _with_instances(self, gpu: GpuReading) -> GpuReading:
        before = self.known.get(gpu.gpu.uuid)
        if gpu.state is DeviceState.UP or gpu.instances or before is None:
            return gpu
        bare = before.without_values(gpu.state, gpu.reason)
        return replace(gpu, instances=bare.instances, lacks_instances=bare.lacks_instances)


def _device_of(event: XidEvent, before: Reading | None, newest: Reading) -> str:
    """Return the UUID of the device that shows an event: a MIG instance, or the GPU if the instance is not listed.

    The driver reuses the id of a destroyed GPU instance for the next one. An event in the same reading as a new layout
    belongs to the former one: the new instance has no holder before it is listed. A GPU instance with several compute
    instances has a row for each: an event without a compute instance id is counted once, for the GPU.
    """
    here = _instances_of(newest, event.uuid)
    for layout in (_instances_of(before, event.uuid) if before else {}, here):
        parts = {uuid: one for uuid, one in layout.items() if one.gpu_instance_id == event.gpu_instance_id}
        if len(parts) > 1:
            parts = {uuid: one for uuid, one in parts.items() if one.compute_instance_id == event.compute_instance_id}
        if parts:
            uuid = next(iter(parts))
            return uuid if uuid in here else event.uuid
    return event.uuid


def _instances_of(reading: Reading, uuid: str) -> Mapping[str, MigInstance]:
    return next((_instances(gpu) for gpu in reading.gpus if gpu.gpu.uuid == uuid), {})


def _instances(gpu: GpuReading) -> Mapping[str, MigInstance]:
    return {part.instance.uuid: part.instance for part in gpu.instances}


_MOST_KINDS = 4096
"""More kinds than all GPUs and instances of a node report; limits the memory for a source that invents codes."""
_Kind = tuple[str, int | None, int]
_STEPS = 60
"""Number of steps in a window, which moves by one step: its memory does not depend on the sample interval."""


@dataclass(slots=True, kw_only=True)
class EventWindow:
    """Number of additions of each key in the last ``seconds``. Instants are of the monotonic clock."""

    seconds: float
    _steps: deque[tuple[int, dict[int, int]]] = field(default_factory=deque)
    """Number and additions of each step, oldest first."""
    _counts: dict[int, int] = field(default_factory=dict)
    """Sums over all steps."""

    def add(self, key: int, at: float) -> None:
        """Count one addition; an instant before the last one counts as the last one."""
        step = self._step(at)
        if not self._steps or self._steps[-1][0] < step:
            self._steps.append((step, {}))
            self._forget(step)
        for counts in (self._steps[-1][1], self._counts):
            counts[key] = counts.get(key, 0) + 1

    def counts(self, now: float) -> dict[int, int]:
        """Return the counts of the window that ends ``now``; a key without additions is absent."""
        self._forget(self._step(now))
        return dict(self._counts)

    def _step(self, at: float) -> int:
        return int(at // (self.seconds / _STEPS))

    def _forget(self, step: int) -> None:
        while self._steps and self._steps[0][0] <= step - _STEPS:
            for key, times in self._steps.popleft()[1].items():
                self._counts[key] -= times
                if not self._counts[key]:
                    del self._counts[key]


@dataclass(slots=True)
class _Clocks:
    """Clock events of one GPU."""

    mask: int
    began: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CLOCK_EVENTS, 0)))
    recent: EventWindow | None = None
    """Window of event masks; ``None`` without windows."""


_HEAT_SECONDS = 300.0
_HEAT_STEP_SECONDS = 5.0
_THERMAL = frozenset({"sw_thermal", "hw_thermal"})
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class _Heat:
    """Time for which heat reduced the clocks of one GPU in the last five minutes."""

    nanoseconds: float | None
    """The driver's total of that time; ``None`` if it has none."""
    at: float
    total_seconds: float = 0.0
    points: deque[tuple[float, float]] = field(default_factory=deque)
    """Instants and totals, oldest first; the last instant replaces one less than a step before it."""

    def add(self, nanoseconds: float | None, mask: int, at: float) -> None:
        """Add a reading; without the driver's total, the time since the last reading has the current flags."""
        if nanoseconds is not None and self.nanoseconds is not None:
            self.total_seconds += max(0.0, nanoseconds - self.nanoseconds) / _NANOSECONDS
        elif nanoseconds is None and _THERMAL.intersection(_events(mask)):
            self.total_seconds += at - self.at
        self.nanoseconds, self.at = nanoseconds, at
        if len(self.points) > 1 and at - self.points[-2][0] < _HEAT_STEP_SECONDS:
            self.points.pop()
        self.points.append((at, self.total_seconds))
        while self.points[0][0] < at - _HEAT_SECONDS:
            self.points.popleft()

    def ratio(self, now: float) -> float | None:
        """Return that part of the window, 0..1; ``None`` before the second reading, and without one in the window."""
        (first_at, first), (last_at, last) = self.points[0], self.points[-1]
        if last_at <= first_at or now - last_at > _HEAT_SECONDS:
            return None
        return round(min(1.0, (last - first) / (last_at - first_at)), 4)


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Xids, heat and clock events of a node's devices; windows only ``with_windows``, as few pages show them."""

    with_windows: bool = False
    xid_window_seconds: float = 300.0
    clock_events_window_seconds: float = 300.0
    _xids: dict[str, EventWindow] = field(default_factory=dict)
    """Event windows by UUID of the device."""
    _clocks: dict[str, _Clocks] = field(default_factory=dict)
    _heat: dict[str, _Heat] = field(default_factory=dict)

    def add(self, reading: Reading, xids: Iterable[DeviceXid], at: float) -> None:
        """Count the events of a reading, each once and in their order.

        Args:
            reading: The newest reading.
            xids: Its Xid events.
            at: Now, in seconds of the monotonic clock.
        """
        if self.with_windows:
            for event in xids:
                self._xids.setdefault(event.uuid, EventWindow(seconds=self.xid_window_seconds)).add(event.xid, at)
        for gpu in reading.gpus:
            mask = gpu.values.get(Field.CLOCK_THROTTLE_REASONS)
            if mask is not None:
                self._add_mask(gpu.gpu.uuid, int(mask), at)
            heat = gpu.values.get(Field.THERMAL_VIOLATION)
            if mask is not None or heat is not None:
                self._heat.setdefault(gpu.gpu.uuid, _Heat(heat, at)).add(heat, int(mask or 0), at)

    def _add_mask(self, uuid: str, mask: int, at: float) -> None:
        clocks = self._clocks.get(uuid)
        if clocks is None:
            # Events in the first reading began before it, at an unknown time.
            recent = EventWindow(seconds=self.clock_events_window_seconds) if self.with_windows else None
            clocks = self._clocks[uuid] = _Clocks(mask, recent=recent)
        clocks.began.update(_events(mask & ~clocks.mask))
        clocks.mask = mask
        if clocks.recent:
            clocks.recent.add(mask, at)

    def by_device(self, now: float) -> Mapping[str, DeviceEvents]:
        """Return the events up to ``now`` on the monotonic clock, by UUID of the device."""
        xids = {device: counts for device, window in self._xids.items() if (counts := window.counts(now))}
        self._xids = {device: self._xids[device] for device in xids}
        events = {device: DeviceEvents(recent_xids=counts) for device, counts in xids.items()}
        for uuid, heat in self._heat.items():
            clocks = self._clocks.get(uuid)
            events[uuid] = DeviceEvents(
                recent_xids=xids.get(uuid, {}),
                clock_events=dict(clocks.began) if clocks else None,
                recent_clock_events=_recent(clocks.recent, now) if clocks else None,
                thermal_throttle_ratio=heat.ratio(now),
            )
        return events


_MOST_STEPS = ActivityHistory.STEPS


@dataclass(slots=True)
class ActivityLog:
    """Means of each device's activity in steps, for ``ActivityHistory``. Instants are of the monotonic clock."""

    _levels: dict[str, bytes] = field(default_factory=dict)
    _samples: dict[str, list[float]] = field(default_factory=dict)
    """Measured samples of each device in the step that has not ended."""
    _limited: dict[str, deque[dict[Bottleneck, float]]] = field(default_factory=dict)
    """Sums of profiled activity by bottleneck of each device: of each of the last steps, the newest has not ended."""
    _bottlenecks: Mapping[str, Mapping[Bottleneck, float]] = field(default_factory=dict)
    _step: int | None = None
    """Number of the step that has not ended."""
    _sampled_at: float = -inf

    def add(self, views: Sequence[DeviceView], at: float, tolerated_gap_seconds: float) -> None:
        """Add a sample of the devices that exist now; former ones are forgotten.

        Args:
            views: The devices.
            at: Now. A sample is the mean since the one before it, so it has all steps between them.
            tolerated_gap_seconds: Most seconds between two samples; the time of a longer gap is not measured.
        """
        ratios = {view.uuid: view.activity.ratio if view.activity else None for view in views}
        is_gap = at - self._sampled_at > tolerated_gap_seconds
        self._end_steps(at, dict.fromkeys(ratios) if is_gap else ratios)
        self._sampled_at = at
        for view in views:
            if view.activity is not None:
                self._samples.setdefault(view.uuid, []).append(view.activity.ratio)
                if view.activity.profile and view.activity.ratio > 0:
                    newest = self._limited.setdefault(view.uuid, deque(({},), maxlen=_MOST_STEPS))[-1]
                    kind = view.activity.profile.bottleneck
                    newest[kind] = newest.get(kind, 0.0) + view.activity.ratio

    def history(self, now: float, steady: float, tolerated_gap_seconds: float) -> ActivityHistory:
        """Return the steps that have ended; ``now`` is Unix time, ``steady`` the same instant."""
        if steady - self._sampled_at > tolerated_gap_seconds:
            self._end_steps(steady, dict.fromkeys(self._levels | self._samples))
        if not self._levels or self._step is None:
            return ActivityHistory()
        ended = self._step * ActivityHistory.STEP_SECONDS
        return ActivityHistory(
            ends_at_seconds=now - (steady - ended), levels=self._levels, bottlenecks=self._bottlenecks
        )

    def _end_steps(self, at: float, between: Mapping[str, float | None]) -> None:
        """End the steps before an instant; those without a sample have the activity ``between`` the samples."""
        step = int(at // ActivityHistory.STEP_SECONDS)
        ended = 0 if self._step is None else step - self._step
        if ended > 0:
            self._levels = {
                uuid: (self._levels.get(uuid, b"") + self._mean(uuid) + _level(ratio) * min(ended - 1, _MOST_STEPS))[
                    -_MOST_STEPS:
                ]
                for uuid, ratio in between.items()
            }
            self._samples = {}
            self._end_limited(ended, between)
        if self._step is None or ended > 0:
            self._step = step

    def _end_limited(self, ended: int, here: Mapping[str, object]) -> None:
        """Sum the steps that have ended, and begin a new one; forget devices without profiled activity in them."""
        found: dict[str, Mapping[Bottleneck, float]] = {}
        for uuid in self._limited.keys() & here:
            sums: dict[Bottleneck, float] = {}
            for kind, activity in chain.from_iterable(step.items() for step in self._limited[uuid]):
                sums[kind] = sums.get(kind, 0.0) + activity
            if sums:
                total = sum(sums.values())
                found[uuid] = {kind: part / total for kind, part in sums.items()}
        self._bottlenecks, self._limited = found, {uuid: self._limited[uuid] for uuid in found}
        for steps in self._limited.values():
            steps.extend({} for _ in range(min(ended, _MOST_STEPS)))

    def _mean(self, uuid: str) -> bytes:
        samples = self._samples.get(uuid)
        return _level(sum(samples) / len(samples) if samples else None)


def _level(ratio: float | None) -> bytes:
    return bytes((ActivityHistory.level(ratio),))


@dataclass(slots=True)
class LargerCounts:
    """Passes on each Xid event of two sources once, as soon as one of them reports it.

    Per kind (GPU, GPU instance, code), the number of events passed on is the larger of the sources' counts. A source
    that does not answer misses events, so its counts are raised to the other's: its later reports are new.
    """

    _reported: dict[str, Counter[_Kind]] = field(default_factory=dict)
    """Reported events by name of the source."""
    _passed: Counter[_Kind] = field(default_factory=Counter)
    _ready: list[XidEvent] = field(default_factory=list)

    def hear(self, source: str, events: Iterable[XidEvent]) -> None:
        """Add the events of a source's reading; each reading once."""
        reported = self._reported.setdefault(source, Counter())
        for event in events:
            kind = (event.uuid, event.gpu_instance_id, event.xid)
            if kind not in self._passed and len(self._passed) >= _MOST_KINDS:
                self._ready.append(event)  # the record drops it as one code too many
                continue
            reported[kind] += 1
            if reported[kind] > self._passed[kind]:
                self._passed[kind] += 1
                self._ready.append(event)

    def follow(self, source: str) -> None:
        """Record that a source does not answer now."""
        self._reported[source] = Counter(self._passed)

    def ready(self) -> tuple[XidEvent, ...]:
        """Return the events since the last call."""
        events = tuple(self._ready)
        self._ready.clear()
        return events


def _recent(masks: EventWindow | None, now: float) -> dict[str, int] | None:
    seen = masks.counts(now) if masks else None
    if not seen:
        return None
    counts: Counter[str] = Counter()
    for mask, readings in seen.items():
        counts.update(dict.fromkeys(_events(mask), readings))
    return dict(counts)


def _events(mask: int) -> list[str]:
    return [event for bit, event in enumerate(CLOCK_EVENTS) if mask >> bit & 1]

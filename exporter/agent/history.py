"""Stores data between ticks: the newest readings, every GPU seen so far, and event counts."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from exporter.gpu.merge import by_index
from exporter.model.devices import CLOCK_EVENTS, DeviceEvents, DeviceState, GpuReading, MigInstance, Reading, XidEvent
from exporter.model.fields import Field
from exporter.model.ledger import Bottleneck
from exporter.model.snapshot import ActivityHistory, DeviceView

LOG = logging.getLogger("exporter.agent")
_NVIDIA = "nvidia"

MOST_XIDS = 64
"""Maximum number of Xid codes per device; limits the memory for a faulty source. A GPU has fewer in its life."""


MOST_DEVICES = 512
"""Maximum number of remembered devices with Xids, including MIG instances that no longer exist."""


@dataclass(slots=True)
class SourceRecord:
    """Stores the last data of every GPU that was read."""

    newest: Reading | None = None
    """Newest reading with every known GPU, except those that have left; a known GPU without data is missing."""
    bound_driver: Callable[[str], str | None] = lambda _bus_id: None
    """Returns the kernel driver that a PCI bus id is bound to; ``None`` if unknown."""
    known: dict[str, GpuReading] = field(default_factory=dict)
    """Last reading of each GPU while it was up, by UUID."""

    def add(self, reading: Reading) -> Reading:
        """Return a reading with the known GPUs that it lacks added."""
        self.newest = replace(reading, gpus=self._with_all_known(reading.gpus))
        return self.newest

    def _with_all_known(self, gpus: tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
        """Complete a reading with the remembered data of GPUs that do not answer.

        A new child does not know a GPU that was lost before it started, and a lost GPU does not list its MIG
        instances. Their holders still hold them.
        """
        up = {gpu.gpu.pci_bus_id: gpu.uuid for gpu in gpus if gpu.state is DeviceState.UP and gpu.gpu.pci_bus_id}
        self.known.update((gpu.uuid, gpu) for gpu in gpus if gpu.state is DeviceState.UP)
        here = {gpu.uuid for gpu in gpus}
        gone = [gpu for uuid, gpu in self.known.items() if uuid not in here]
        completed = [self._with_instances(gpu) for gpu in gpus]
        completed += [gpu.without_values(DeviceState.MISSING, "not_enumerated") for gpu in gone]
        staying = [gpu for gpu in completed if not self._has_left(gpu, up)]
        # The driver numbers only the present GPUs, so one of them may have the index of a missing GPU.
        return by_index(
            (gpu for gpu in staying if gpu.state is not DeviceState.MISSING),
            (gpu for gpu in staying if gpu.state is DeviceState.MISSING),
        )

    def _has_left(self, gpu: GpuReading, up: Mapping[str, str]) -> bool:
        """Return whether a GPU has left this node's driver; if so, forget it.

        Only positive evidence counts; without it, an unresponsive GPU is missing, and its time is charged.

        Args:
            gpu: The GPU with its last data.
            up: UUIDs of the GPUs that are up, by PCI bus id.
        """
        if gpu.state is DeviceState.UP:
            return False
        bus_id, uuid = gpu.gpu.pci_bus_id, gpu.uuid
        successor, bound = up.get(bus_id), self.bound_driver(bus_id)
        if successor is None and bound in {None, _NVIDIA}:
            return False
        if self.known.pop(uuid, None):
            why = f"replaced by {successor}" if successor else f"bound to kernel driver {bound}"
            LOG.info("GPU forgotten: uuid=%s pci_bus_id=%s: %s", uuid, bus_id, why)
        return True

    def _with_instances(self, gpu: GpuReading) -> GpuReading:
        before = self.known.get(gpu.uuid)
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
    for layout in (_instances_of(before, event.uuid), here):
        parts = [one for one in layout if one.gpu_instance_id == event.gpu_instance_id]
        if len(parts) > 1:
            parts = [one for one in parts if one.compute_instance_id == event.compute_instance_id]
        if parts:
            uuid = parts[0].uuid
            return uuid if any(one.uuid == uuid for one in here) else event.uuid
    return event.uuid


def _instances_of(reading: Reading | None, uuid: str) -> list[MigInstance]:
    gpus = reading.gpus if reading else ()
    return [part.instance for gpu in gpus if gpu.uuid == uuid for part in gpu.instances]


_MOST_KINDS = 4096
"""Maximum number of counted kinds; limits the memory for a faulty source. A node reports fewer."""
_Kind = tuple[str, int | None, int]
_STEPS = 60
"""Number of steps in a window, so that its memory does not depend on the sample interval."""


@dataclass(slots=True, kw_only=True)
class EventWindow:
    """Number of additions of each key in the last ``seconds``. Instants are of the monotonic clock."""

    seconds: float
    _steps: deque[tuple[int, Counter[int]]] = field(default_factory=lambda: deque(maxlen=_STEPS + 1))
    """Number and additions of each step, oldest first."""

    def add(self, key: int, at: float) -> None:
        """Count one addition; an instant before the last addition counts as that of the last addition."""
        step = self._step(at)
        if not self._steps or self._steps[-1][0] < step:
            self._steps.append((step, Counter()))
        self._steps[-1][1][key] += 1

    def counts(self, now: float) -> dict[int, int]:
        """Return the counts of the window that ends ``now``; a key without additions is absent."""
        while self._steps and self._steps[0][0] <= self._step(now) - _STEPS:
            self._steps.popleft()
        counts: Counter[int] = Counter()
        for _, added in self._steps:
            counts.update(added)
        return counts

    def _step(self, at: float) -> int:
        return int(at // (self.seconds / _STEPS))


@dataclass(slots=True)
class XidRecord:
    """Xid events of one device since the agent started."""

    counts: Counter[int] = field(default_factory=Counter)
    last_seen_seconds: dict[int, float] = field(default_factory=dict)
    last: int | None = None
    recent: EventWindow | None = None
    """Window of codes; ``None`` without windows."""

    def add(self, event: XidEvent, at: float) -> bool:
        """Count an event; return False if its code is new and the device already has ``MOST_XIDS`` codes."""
        if event.xid not in self.counts and len(self.counts) >= MOST_XIDS:
            return False
        self.counts[event.xid] += 1
        self.last_seen_seconds[event.xid] = event.at_seconds
        self.last = event.xid
        if self.recent:
            self.recent.add(event.xid, at)
        return True


_HEAT_SECONDS = 300.0
_HEAT_STEP_SECONDS = 5.0
_THERMAL = frozenset({"sw_thermal", "hw_thermal"})
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True, kw_only=True)
class _Clocks:
    """Clock events of one GPU, and the time for which heat reduced its clocks in the last five minutes."""

    recent: EventWindow | None
    """Window of event masks; ``None`` without windows."""
    mask: int | None = None
    """Events in the last reading with them; ``None`` before it."""
    began: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CLOCK_EVENTS, 0)))
    heat_nanoseconds: float | None = None
    """The driver's total of time with heat; ``None`` if it has none."""
    points: deque[tuple[float, float]] = field(default_factory=deque)
    """Instants of readings and seconds of heat, oldest first; a point replaces the last one within the same step."""

    def add(self, mask: int | None, heat_nanoseconds: float | None, at: float) -> None:
        """Add a reading; without the driver's total, the current flags apply to the time since the last reading."""
        last, heat_seconds = self.points[-1] if self.points else (at, 0.0)
        if heat_nanoseconds is not None and self.heat_nanoseconds is not None:
            heat_seconds += max(0.0, heat_nanoseconds - self.heat_nanoseconds) / _NANOSECONDS
        elif heat_nanoseconds is None and _THERMAL.intersection(_events(mask or 0)):
            heat_seconds += at - last
        self.heat_nanoseconds = heat_nanoseconds
        if len(self.points) > 1 and at - self.points[-2][0] < _HEAT_STEP_SECONDS:
            self.points.pop()
        self.points.append((at, heat_seconds))
        while self.points[0][0] < at - _HEAT_SECONDS:
            self.points.popleft()
        if mask is not None:
            # Events in the first reading began before it, at an unknown time.
            self.began.update(_events(0 if self.mask is None else mask & ~self.mask))
            self.mask = mask
            if self.recent:
                self.recent.add(mask, at)

    def heat_ratio(self, now: float) -> float | None:
        """Return the part of the window with heat, 0..1; ``None`` without two readings or without a recent one."""
        (first_at, first), (last_at, last) = self.points[0], self.points[-1]
        if last_at <= first_at or now - last_at > _HEAT_SECONDS:
            return None
        return round(min(1.0, (last - first) / (last_at - first_at)), 4)


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Xids, heat and clock events of a node's devices; windows only ``with_windows``, since few pages show them."""

    with_windows: bool = False
    xid_window_seconds: float = 300.0
    clock_events_window_seconds: float = 300.0
    xids: dict[str, XidRecord] = field(default_factory=dict)
    """Xid records by UUID of the device, a GPU or a MIG instance."""
    _clocks: dict[str, _Clocks] = field(default_factory=dict)

    def add(self, reading: Reading, before: Reading | None, at: float) -> int:
        """Count the events of a reading, each once and in their order; return the number of those left out.

        Args:
            reading: The newest reading.
            before: The reading before it.
            at: Now, in seconds of the monotonic clock.
        """
        self._forget_former(reading)
        counted = [self._xids_of(_device_of(event, before, reading)).add(event, at) for event in reading.xids]
        for gpu in reading.gpus:
            mask, heat = gpu.values.get(Field.CLOCK_THROTTLE_REASONS), gpu.values.get(Field.THERMAL_VIOLATION)
            if mask is not None or heat is not None:
                if gpu.uuid not in self._clocks:
                    self._clocks[gpu.uuid] = _Clocks(recent=self._window(self.clock_events_window_seconds))
                self._clocks[gpu.uuid].add(None if mask is None else int(mask), heat, at)
        return counted.count(False)

    def _xids_of(self, uuid: str) -> XidRecord:
        if uuid not in self.xids:
            self.xids[uuid] = XidRecord(recent=self._window(self.xid_window_seconds))
        return self.xids[uuid]

    def _window(self, seconds: float) -> EventWindow | None:
        return EventWindow(seconds=seconds) if self.with_windows else None

    def _forget_former(self, newest: Reading) -> None:
        """Drop the records of absent devices if there are too many; before that, they may be listed again."""
        if len(self.xids) > MOST_DEVICES:
            here = {device.uuid for gpu in newest.gpus for device in gpu.with_instances}
            self.xids = {uuid: record for uuid, record in self.xids.items() if uuid in here}

    def by_device(self, now: float) -> Mapping[str, DeviceEvents]:
        """Return the events up to ``now`` on the monotonic clock, by UUID of the device."""
        windows = {uuid: record.recent.counts(now) for uuid, record in self.xids.items() if record.recent}
        events = {uuid: DeviceEvents(recent_xids=counts) for uuid, counts in windows.items() if counts}
        for uuid, clocks in self._clocks.items():
            events[uuid] = DeviceEvents(
                recent_xids=windows.get(uuid, {}),
                clock_events=None if clocks.mask is None else dict(clocks.began),
                recent_clock_events=_recent(clocks.recent, now),
                thermal_throttle_ratio=clocks.heat_ratio(now),
            )
        return events


@dataclass(slots=True)
class _Past:
    """Activity history of one device."""

    levels: bytes = b""
    """Means of the finished steps, as levels of ``ActivityHistory``."""
    samples: list[float] = field(default_factory=list)
    """Measured samples of the current step."""
    limited: dict[tuple[int, Bottleneck], float] = field(default_factory=dict)
    """Sums of profiled activity by number of the step and bottleneck."""

    def end_steps(self, first: int, next_step: int, between: float | None) -> None:
        """End the steps from ``first`` to ``next_step``; steps without a sample get the activity ``between``."""
        mean = sum(self.samples) / len(self.samples) if self.samples else None
        unsampled = min(next_step - first - 1, ActivityHistory.STEPS)
        levels = self.levels + _level(mean) + _level(between) * unsampled
        self.levels, self.samples = levels[-ActivityHistory.STEPS :], []
        oldest = next_step - ActivityHistory.STEPS
        self.limited = {place: part for place, part in self.limited.items() if place[0] >= oldest}

    def bottlenecks(self) -> dict[Bottleneck, float]:
        """Return the parts of the profiled activity, which sum to 1."""
        total = sum(self.limited.values())
        parts: dict[Bottleneck, float] = {}
        for (_, kind), part in self.limited.items():
            parts[kind] = parts.get(kind, 0.0) + part / total
        return parts


@dataclass(slots=True)
class ActivityLog:
    """Mean activity of each device by step, for ``ActivityHistory``. Instants are of the monotonic clock."""

    _past: dict[str, _Past] = field(default_factory=dict)
    _ended: ActivityHistory = field(default_factory=ActivityHistory)
    """Finished steps."""
    _step: int | None = None
    """Number of the current step."""
    _sampled_at: float = -inf

    def add(self, views: Sequence[DeviceView], at: float, tolerated_gap_seconds: float) -> None:
        """Add a sample of the current devices; drop the history of other devices.

        Args:
            views: The devices.
            at: Now. A sample is the mean since the previous sample, so it applies to all steps between them.
            tolerated_gap_seconds: Longest time between two samples; the time of a longer gap is not measured.
        """
        ratios = {view.uuid: view.activity.ratio if view.activity else None for view in views}
        is_gap = at - self._sampled_at > tolerated_gap_seconds
        step = self._end_steps(at, dict.fromkeys(ratios) if is_gap else ratios)
        self._sampled_at = at
        for view in views:
            if view.activity is not None:
                past = self._past.setdefault(view.uuid, _Past())
                past.samples.append(view.activity.ratio)
                if view.activity.profile and view.activity.ratio > 0:
                    place = step, view.activity.profile.bottleneck
                    past.limited[place] = past.limited.get(place, 0.0) + view.activity.ratio

    def history(self, now: float, steady: float, tolerated_gap_seconds: float) -> ActivityHistory:
        """Return the finished steps; ``now`` is Unix time, ``steady`` the same instant on the monotonic clock."""
        if steady - self._sampled_at > tolerated_gap_seconds:
            self._end_steps(steady, dict.fromkeys(self._past))
        if not self._ended.levels or self._step is None:
            return self._ended
        ended = self._step * ActivityHistory.STEP_SECONDS
        return replace(self._ended, ends_at_seconds=now - (steady - ended))

    def _end_steps(self, at: float, between: Mapping[str, float | None]) -> int:
        """End the steps before an instant, and return the number of the current step.

        Args:
            at: The instant.
            between: Activity of each device between the samples; the history of other devices is dropped.
        """
        step = int(at // ActivityHistory.STEP_SECONDS)
        if self._step is not None and step <= self._step:
            return self._step
        if self._step is not None:
            self._past = {uuid: self._past.get(uuid) or _Past() for uuid in between}
            for uuid, past in self._past.items():
                past.end_steps(self._step, step, between[uuid])
            found = {uuid: past.bottlenecks() for uuid, past in self._past.items()}
            self._ended = ActivityHistory(
                levels={uuid: past.levels for uuid, past in self._past.items()},
                bottlenecks={uuid: parts for uuid, parts in found.items() if parts},
            )
        self._step = step
        return step


def _level(ratio: float | None) -> bytes:
    return bytes((ActivityHistory.level(ratio),))


@dataclass(slots=True)
class LargerCounts:
    """Merges the Xid events of two sources: each event is returned once, when the first source reports it.

    Per kind (GPU, GPU instance, code), the number of returned events is the larger of the sources' counts. A source
    that does not answer misses events. Its counts are raised to those of the other source, so its later reports count
    as new events.
    """

    _reported: dict[str, Counter[_Kind]] = field(default_factory=dict)
    """Reported events by name of the source."""
    _passed: Counter[_Kind] = field(default_factory=Counter)
    _ready: list[XidEvent] = field(default_factory=list)

    def add(self, source: str, events: Iterable[XidEvent]) -> None:
        """Add the events of a reading; call it once per reading."""
        reported = self._reported.setdefault(source, Counter())
        for event in events:
            kind = (event.uuid, event.gpu_instance_id, event.xid)
            if kind not in self._passed and len(self._passed) >= _MOST_KINDS:
                self._ready.append(event)  # XidRecord drops it: too many codes
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

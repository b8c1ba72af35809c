"""Keeps what the agent remembers between ticks: the newest readings, every GPU ever seen, and event counts."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from exporter.gpu.merge import by_index, identities
from exporter.model import (
    CLOCK_EVENTS,
    DeviceEvents,
    DeviceState,
    Field,
    GpuReading,
    MigInstance,
    Reading,
    XidEvent,
)

LOG = logging.getLogger("exporter.agent")
_NVIDIA = "nvidia"

MOST_XIDS = 64
"""Most Xid codes kept per device: more than a GPU meets in its life, fewer than a faulty source can invent."""


MOST_DEVICES = 512
"""Devices with Xids that are remembered, MIG instances that are gone among them."""


class DeviceXid(NamedTuple):
    """An Xid event of a device."""

    uuid: str
    """Of the device: a GPU or a MIG instance."""
    xid: int


@dataclass(slots=True)
class XidRecord:
    """Xid events of one device since the agent started."""

    counts: Counter[int] = field(default_factory=Counter)
    last_seen_seconds: dict[int, float] = field(default_factory=dict)
    last: int | None = None


@dataclass(slots=True)
class SourceRecord:
    """Everything kept of the readings."""

    newest: Reading | None = None
    """With every GPU that was ever seen, but those that are known to have left: one that is gone is missing."""
    bound_driver: Callable[[str], str | None] = lambda _bus_id: None
    """Returns the kernel driver that a PCI bus id is bound to; ``None`` where that is not known."""
    known: dict[str, GpuReading] = field(default_factory=dict)
    """The last reading of each GPU while it was up, by UUID."""
    xids: dict[str, XidRecord] = field(default_factory=dict)
    """By UUID of the device, a GPU or a MIG instance."""

    def add(self, reading: Reading) -> tuple[DeviceXid, ...]:
        """Add one reading: counts add up, values replace.

        Returns:
            Its Xid events, each with its device, without those of codes beyond ``MOST_XIDS``: every code is a series.
        """
        before = self.newest
        self.newest = newest = replace(reading, gpus=self._with_all_known(reading.gpus))
        self._forget_former(newest)
        placed = [(_device_of(event, before, newest), event) for event in reading.xids]
        return tuple(DeviceXid(uuid, event.xid) for uuid, event in placed if self._count(uuid, event))

    def _forget_former(self, newest: Reading) -> None:
        """Keep the records of MIG instances that are gone only while they are few: they may be listed again."""
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
        """Complete a reading by what it cannot say of GPUs that do not answer.

        A new child does not know a GPU that was lost before it started, and a lost GPU does not list its MIG
        instances; their holders keep them nevertheless.
        """
        up = {gpu.gpu.pci_bus_id: gpu.gpu.uuid for gpu in gpus if gpu.state is DeviceState.UP and gpu.gpu.pci_bus_id}
        self.known.update((gpu.gpu.uuid, gpu) for gpu in gpus if gpu.state is DeviceState.UP)
        completed = [self._with_instances(gpu) for gpu in gpus]
        here = {gpu.gpu.uuid for gpu in gpus}
        completed.extend(
            GpuReading(
                gpu=gpu.gpu,
                state=DeviceState.MISSING,
                reason="not_enumerated",
                instances=identities(gpu.instances),
                lacks_instances=gpu.lacks_instances,
            )
            for uuid, gpu in self.known.items()
            if uuid not in here
        )
        there = [gpu for gpu in completed if gpu.state is not DeviceState.MISSING and not self._has_left(gpu, up)]
        missing = [gpu for gpu in completed if gpu.state is DeviceState.MISSING and not self._has_left(gpu, up)]
        # The driver counts the GPUs that are there, so that one of them may have the index of a missing one.
        return by_index(there, missing)

    def _has_left(self, gpu: GpuReading, up: Mapping[str, str]) -> bool:
        """Return whether a GPU is known to belong to this node's driver no more, and forget it then.

        Only what can be seen counts: without it a GPU that does not answer is missing, and its time is charged.

        Args:
            gpu: As it is shown otherwise.
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
        return replace(gpu, instances=identities(before.instances), lacks_instances=before.lacks_instances)


def _device_of(event: XidEvent, before: Reading | None, newest: Reading) -> str:
    """Return the UUID of the device that shows an event: a MIG instance, or the GPU where no row of it is to be had.

    The driver gives the id of a destroyed GPU instance to the next one. An event that arrives together with a new
    layout belongs to the former one: the new instance has no holder before it is listed. A GPU instance that several
    compute instances share has a row for each: without an id of one the event stands on the GPU's row, so that it
    counts once.
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
"""More than all GPUs and instances of a node report; a source that makes codes up must not fill the memory."""
_Kind = tuple[str, int | None, int]
_STEPS = 60
"""Of a window, which moves on by one: so its size in memory does not depend on how often is read."""


@dataclass(slots=True, kw_only=True)
class EventWindow:
    """How often each key was added in the last ``seconds``. Instants are of the monotonic clock."""

    seconds: float
    _steps: deque[tuple[int, dict[int, int]]] = field(default_factory=deque)
    """Oldest first: number of the step and what was added in it."""
    _counts: dict[int, int] = field(default_factory=dict)
    """Over all steps."""

    def add(self, key: int, at: float) -> None:
        """Count one; an instant before the last one counts as that."""
        step = self._step(at)
        if not self._steps or self._steps[-1][0] < step:
            self._steps.append((step, {}))
            self._forget(step)
        for counts in (self._steps[-1][1], self._counts):
            counts[key] = counts.get(key, 0) + 1

    def counts(self, now: float) -> dict[int, int]:
        """The counts of the window that ends ``now``; a key that is not in it is absent."""
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
    """Of one GPU."""

    mask: int
    began: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CLOCK_EVENTS, 0)))
    recent: EventWindow | None = None
    """Of masks."""


_HEAT_SECONDS = 300.0
_HEAT_STEP_SECONDS = 5.0
_THERMAL = frozenset({"sw_thermal", "hw_thermal"})
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class _Heat:
    """For how long heat held the clocks of one GPU down in the last five minutes."""

    nanoseconds: float | None
    """The driver's own clock of it; ``None`` where it keeps none."""
    at: float
    total_seconds: float = 0.0
    points: deque[tuple[float, float]] = field(default_factory=deque)
    """Instants and the total then, oldest first; the last instant replaces one that is less than a step before it."""

    def add(self, nanoseconds: float | None, mask: int, at: float) -> None:
        """Add a reading; without a clock the time since the last one is as the flags are now."""
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
        """Return the part of the window, 0..1; ``None`` before the second reading, and without one in the window."""
        (first_at, first), (last_at, last) = self.points[0], self.points[-1]
        if last_at <= first_at or now - last_at > _HEAT_SECONDS:
            return None
        return round(min(1.0, (last - first) / (last_at - first_at)), 4)


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Xids, heat and clock events of a node's devices; the windows only ``with_windows``, as few pages show them."""

    with_windows: bool = False
    xid_window_seconds: float = 300.0
    clock_events_window_seconds: float = 300.0
    _xids: dict[str, EventWindow] = field(default_factory=dict)
    """By UUID of the device."""
    _clocks: dict[str, _Clocks] = field(default_factory=dict)
    _heat: dict[str, _Heat] = field(default_factory=dict)

    def add(self, reading: Reading, xids: Iterable[DeviceXid], at: float) -> None:
        """Count what a reading reports; each one once, in their order.

        Args:
            reading: The newest.
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
            # What reduces clocks at the first reading began before it, at an unknown time.
            recent = EventWindow(seconds=self.clock_events_window_seconds) if self.with_windows else None
            clocks = self._clocks[uuid] = _Clocks(mask, recent=recent)
        clocks.began.update(_events(mask & ~clocks.mask))
        clocks.mask = mask
        if clocks.recent:
            clocks.recent.add(mask, at)

    def by_device(self, now: float) -> Mapping[str, DeviceEvents]:
        """Return the events until now, of the same clock, by UUID of the device."""
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


@dataclass(slots=True)
class LargerCounts:
    """Passes on each Xid event of two sources once, as soon as one of them reports it.

    Of each kind (GPU, GPU instance, code) as many events are passed on as the source has reported that reported more.
    While a source is away it misses events, so its counts follow: what it reports later is new.
    """

    _reported: dict[str, Counter[_Kind]] = field(default_factory=dict)
    """By name of the source."""
    _passed: Counter[_Kind] = field(default_factory=Counter)
    _ready: list[XidEvent] = field(default_factory=list)

    def hear(self, source: str, events: Iterable[XidEvent]) -> None:
        """Take the events of a source's reading; each reading once."""
        reported = self._reported.setdefault(source, Counter())
        for event in events:
            kind = (event.uuid, event.gpu_instance_id, event.xid)
            if kind not in self._passed and len(self._passed) >= _MOST_KINDS:
                self._ready.append(event)  # the record counts it as one too many
                continue
            reported[kind] += 1
            if reported[kind] > self._passed[kind]:
                self._passed[kind] += 1
                self._ready.append(event)

    def follow(self, source: str) -> None:
        """Note that a source does not answer now."""
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

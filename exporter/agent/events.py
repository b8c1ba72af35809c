"""Counts what readings tell of Xids and clock events: since the start, and in a window that moves on."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporter.agent.record import DeviceXid
from exporter.model import CLOCK_EVENTS, DeviceEvents, Field, Reading, XidEvent

_MOST_KINDS = 4096
"""More than all GPUs and instances of a node report; a source that makes codes up must not fill the memory."""
_Kind = tuple[str, int | None, int]
_STEPS = 60
"""Of a window, which moves on by one: so its size in memory does not depend on how often is read."""


@dataclass(slots=True, kw_only=True)
class Window:
    """How often each key was added in the last ``seconds``. Instants are of a clock that nobody sets."""

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
    recent: Window | None = None
    """Of masks."""


@dataclass(slots=True, kw_only=True)
class EventLog:
    """Xids and clock events of a node's devices; the windows only ``with_windows``, as few pages show them."""

    with_windows: bool = False
    xid_window_seconds: float = 300.0
    clock_events_window_seconds: float = 300.0
    _xids: dict[str, Window] = field(default_factory=dict)
    """By UUID of the device."""
    _clocks: dict[str, _Clocks] = field(default_factory=dict)

    def add(self, reading: Reading, xids: Iterable[DeviceXid], at: float) -> None:
        """Count what a reading reports; each one once, in their order.

        Args:
            reading: The newest.
            xids: Its Xid events.
            at: Now, in seconds of a clock that nobody sets.
        """
        if self.with_windows:
            for event in xids:
                self._xids.setdefault(event.uuid, Window(seconds=self.xid_window_seconds)).add(event.xid, at)
        for gpu in reading.gpus:
            mask = gpu.values.get(Field.CLOCK_THROTTLE_REASONS)
            if mask is not None:
                self._add_mask(gpu.gpu.uuid, int(mask), at)

    def _add_mask(self, uuid: str, mask: int, at: float) -> None:
        clocks = self._clocks.get(uuid)
        if clocks is None:
            # What holds clocks down at the first reading began before it, nobody knows when.
            recent = Window(seconds=self.clock_events_window_seconds) if self.with_windows else None
            clocks = self._clocks[uuid] = _Clocks(mask, recent=recent)
        clocks.began.update(_events(mask & ~clocks.mask))
        clocks.mask = mask
        if clocks.recent:
            clocks.recent.add(mask, at)

    def told(self, now: float) -> Mapping[str, DeviceEvents]:
        """Return what is known by now, of the same clock, by UUID of the device."""
        xids = {device: counts for device, window in self._xids.items() if (counts := window.counts(now))}
        self._xids = {device: self._xids[device] for device in xids}
        told = {device: DeviceEvents(recent_xids=counts) for device, counts in xids.items()}
        for uuid, clocks in self._clocks.items():
            told[uuid] = DeviceEvents(
                recent_xids=xids.get(uuid, {}),
                clock_events=dict(clocks.began),
                recent_clock_events=_recent(clocks.recent, now),
            )
        return told


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


def _recent(masks: Window | None, now: float) -> dict[str, int] | None:
    seen = masks.counts(now) if masks else None
    if not seen:
        return None
    counts: Counter[str] = Counter()
    for mask, readings in seen.items():
        counts.update(dict.fromkeys(_events(mask), readings))
    return dict(counts)


def _events(mask: int) -> list[str]:
    return [event for bit, event in enumerate(CLOCK_EVENTS) if mask >> bit & 1]

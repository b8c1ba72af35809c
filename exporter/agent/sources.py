"""One source, or two as one: joined readings in step, each used once, and how every source is doing."""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from exporter.agent.counters import Counters
from exporter.model import Reading, SourceState, SourceStatus, XidEvent
from exporter.sources.merge import in_place_of, joined, of_one_machine

LOG = logging.getLogger("exporter.agent")

FIRST_WAIT_SECONDS = 5.0
"""For so long the second source waits for the first to start, so that GPUs have one identity from the beginning."""
SAME_XID_SECONDS = 10.0
"""One event that both sources tell of within this time is one: they see it some moments apart."""
_KEPT = 600
_OTHER_MACHINE = (
    "its host engine has none of the GPUs that NVML has, so it is another machine's and nothing of it is used; give the"
    " --dcgm-address of this node's engine"
)


class Source(Protocol):
    """Where readings come from: ``sources.worker.Worker``, or the same source without a child for a replay."""

    @property
    def status(self) -> SourceStatus:
        """How the source is doing."""
        ...

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since start by reason, beside those that readings carry."""
        ...

    def take(self) -> tuple[Reading, ...]:
        """Readings since the last call, oldest first."""
        ...


@dataclass(slots=True)
class _XidsOnce:
    """Sees that an event that both sources tell of, as one leads after the other, is told once."""

    _told: deque[tuple[str, XidEvent]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """With the source that told of it, until the other one has, too."""
    _kept: list[XidEvent] = field(default_factory=list)

    def keep(self, reading: Reading) -> None:
        """Keep the events of a reading that is not given out."""
        self._kept += self._new(reading)

    def once(self, reading: Reading) -> Reading:
        """Return the reading with the events that are new, and with those that were kept."""
        events = (*self._kept, *self._new(reading))
        self._kept.clear()
        return reading if events == reading.xids else replace(reading, xids=events)

    def _new(self, reading: Reading) -> list[XidEvent]:
        return [event for event in reading.xids if self._is_new(event, reading.source)]

    def _is_new(self, event: XidEvent, source: str) -> bool:
        for entry in self._told:
            by, other = entry
            same = (other.uuid, other.xid, other.gpu_instance_id) == (event.uuid, event.xid, event.gpu_instance_id)
            if by != source and same and abs(other.at_seconds - event.at_seconds) <= SAME_XID_SECONDS:
                self._told.remove(entry)
                return False
        self._told.append((source, event))
        return True


@dataclass(slots=True, kw_only=True)
class Sources:
    """NVML with DCGM beside it, or either alone.

    While the first answers there is one joined reading for each of its own. When it does not (it is down, or silent for
    ``stale_after_seconds``) those of the second take their place, from the ones that came in meanwhile on, and under
    the identities that the first gave. With two sources instants only ever rise.
    """

    first: Source
    second: Source | None
    """DCGM beside NVML; ``None`` where one source is used alone."""
    stale_after_seconds: float
    """How old a reading may be and still be used."""
    _counted: Counter[tuple[str, str]] = field(default_factory=Counter)
    _led: Reading | None = None
    """The newest that the first source led, joined."""
    _beside: Reading | None = None
    """The second's newest."""
    _waiting: deque[Reading] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """The second's that are newer than what was given out last."""
    _known_to_second: set[str] = field(default_factory=set)
    _given: float = float("-inf")
    """Instant of what was given out last."""
    _began: float | None = None
    _other_machine: bool = False
    _counters: Counters = field(init=False)
    _xids: _XidsOnce = field(default_factory=_XidsOnce)

    def __post_init__(self) -> None:
        self._counters = Counters(patience_seconds=self.stale_after_seconds)

    @property
    def statuses(self) -> tuple[SourceStatus, ...]:
        """How each source is doing, the one that leads first."""
        if self.second is None:
            return (self.first.status,)
        second = self.second.status
        if self._other_machine and second.state is SourceState.UP:
            second = replace(second, state=SourceState.FAILED, reason="other_machine", message=_OTHER_MACHINE)
        return self.first.status, second

    @property
    def errors(self) -> dict[tuple[str, str], int]:
        """Counts since start by source and reason."""
        errors = Counter(self._counted)
        for source in (self.first, self.second):
            if source is not None:
                name = source.status.name
                errors.update({(name, reason): count for reason, count in source.errors.items()})
        return dict(errors)

    def is_fresh(self, age_seconds: float) -> bool:
        """Tell whether a newest reading of this age still holds: a source works, and is leading or about to."""
        return age_seconds <= self.stale_after_seconds and any(one.state is SourceState.UP for one in self.statuses)

    def take(self, now: float, steady: float) -> tuple[Reading, ...]:
        """Return joined readings since the last call, oldest first; never blocks.

        Args:
            now: Unix time.
            steady: Seconds of a clock that nobody sets.
        """
        self._began = steady if self._began is None else self._began
        led = self._taken_from(self.first)
        if self.second is None:
            return tuple(_alone(reading) for reading in led)
        self._waiting.extend(self._taken_from(self.second))
        if self._waiting:
            self._beside = self._waiting[-1]
        for reading in self._waiting:
            self._known_to_second.update(gpu.gpu.uuid for gpu in reading.gpus)
        given = list(self._led_by_first(led, works=self.second.status.state is SourceState.UP))
        if not self._first_answers(now, steady):
            given += self._led_by_second()
        while self._waiting and instant(self._waiting[0]) <= self._given:
            self._waiting.popleft()
        self._note_machine(self.second.status.name)
        return tuple(given)

    def _taken_from(self, source: Source) -> tuple[Reading, ...]:
        """Take readings and count their errors: once, however often a reading is used."""
        readings, name = source.take(), source.status.name
        for reading in readings:
            self._counted.update({(name, reason): count for reason, count in reading.errors.items()})
        return tuple(replace(reading, errors={}) if reading.errors else reading for reading in readings)

    def _first_answers(self, now: float, steady: float) -> bool:
        state = self.first.status.state
        if self._led is None:
            waited = steady - (steady if self._began is None else self._began)
            return state is SourceState.STARTING and waited <= FIRST_WAIT_SECONDS
        led_at = self._led.steady_seconds
        age = now - self._led.taken_at_seconds if led_at is None else steady - led_at
        return state is SourceState.UP and age <= self.stale_after_seconds

    def _led_by_first(self, led: Iterable[Reading], *, works: bool) -> Iterator[Reading]:
        for reading in led:
            self._led = joined(reading, self._nearest(instant(reading)) if works else None)
            if instant(reading) > self._given:
                yield self._give(self._led)
            else:  # the second was faster; an event is told all the same
                self._xids.keep(self._led)

    def _nearest(self, at: float) -> Reading | None:
        """The second's reading of about the same instant, if it is not too old."""
        candidates = [one for one in (*self._waiting, self._beside) if one is not None]
        nearest = min(candidates, key=lambda one: abs(at - instant(one)), default=None)
        return nearest if nearest and abs(at - instant(nearest)) <= self.stale_after_seconds else None

    def _led_by_second(self) -> Iterator[Reading]:
        reason = self.first.status.reason or "stale"
        for reading in self._waiting:
            if instant(reading) <= self._given:
                continue
            whole = joined(None, reading)
            if self._led is None:
                yield self._give(whole)
            elif of_one_machine(self._led, reading) and (reading.gpus or not self._led.gpus):
                # An engine that was started without a driver has no GPUs: that does not make them missing.
                yield self._give(in_place_of(whole, self._led, self._known_to_second, reason))

    def _give(self, reading: Reading) -> Reading:
        self._given = instant(reading)
        return self._counters.kept_from_falling(self._xids.once(reading), self._given)

    def _note_machine(self, name: str) -> None:
        if self._led is None or self._beside is None:
            return
        before, self._other_machine = self._other_machine, not of_one_machine(self._led, self._beside)
        if self._other_machine and not before:
            self._counted[name, "other_machine"] += 1
            LOG.warning("source %s: %s", name, _OTHER_MACHINE)


def instant(reading: Reading) -> float:
    """When a reading was taken, on the machine's monotonic clock; where time is replayed, in Unix time."""
    return reading.taken_at_seconds if reading.steady_seconds is None else reading.steady_seconds


def _alone(reading: Reading) -> Reading:
    return joined(None, reading) if reading.source == "dcgm" else reading

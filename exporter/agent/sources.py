"""One source, or two as one: joined readings in step, each used once, and how every source is doing."""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from exporter.agent.history import LargerCounts
from exporter.config import AgentConfig
from exporter.gpu.dcgm.fields import COUNTERS, alone, is_profiling, supplement
from exporter.gpu.merge import in_place_of, joined, of_one_machine
from exporter.gpu.worker import Worker, dcgm_command, nvml_command
from exporter.model import Field, GpuReading, Reading, SourceState, SourceStatus

LOG = logging.getLogger("exporter.agent")

FIRST_WAIT_SECONDS = 5.0
"""For so long the second source waits for the first to start, so that GPUs have one identity from the beginning."""
SLOW_COUNTER_SECONDS = 60.0
"""A counter of DCGM's may be this old and some intervals: it measures what is slow every 10 s, and waits for three."""
_KEPT = 600
_RISING = frozenset(one for one in Field if one in COUNTERS)
"""What only rises until the driver is loaded anew, and either source can tell."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    value: float
    by_dcgm: bool
    at: float


@dataclass(slots=True, kw_only=True)
class Counters:
    """Remembers what was told last of each GPU's counters, and by whom.

    DCGM's figures are up to some intervals older than NVML's, what it measures slowly half a minute. A counter that
    falls is taken for one that has begun again from 0, by Prometheus and by whoever takes differences, so that all it
    ever counted would be counted once more.
    """

    patience_seconds: float
    """A counter that is still lower after this time has truly begun again."""
    _told: dict[tuple[str, Field], _Told] = field(default_factory=dict)

    def kept_from_falling(self, reading: Reading, at: float) -> Reading:
        """Return the reading without the counters that have changed source and are not yet where they were.

        Args:
            reading: With ``from_dcgm`` set.
            at: Its instant, in seconds of a clock that nobody sets.
        """
        gpus = tuple(self._without_fallen(gpu, at) for gpu in reading.gpus)
        changed = any(new is not old for new, old in zip(gpus, reading.gpus, strict=True))
        return replace(reading, gpus=gpus) if changed else reading

    def _without_fallen(self, gpu: GpuReading, at: float) -> GpuReading:
        fallen = set()
        for key in _RISING & gpu.values.keys():
            value, by_dcgm = gpu.values[key], key in gpu.from_dcgm
            before = self._told.get((gpu.gpu.uuid, key))
            if (
                before is not None
                and before.by_dcgm is not by_dcgm
                and value < before.value
                and at - before.at <= self.patience_seconds
            ):
                fallen.add(key)
            else:
                self._told[gpu.gpu.uuid, key] = _Told(value=value, by_dcgm=by_dcgm, at=at)
        if not fallen:
            return gpu
        values = {key: value for key, value in gpu.values.items() if key not in fallen}
        return replace(gpu, values=values, from_dcgm=gpu.from_dcgm - fallen)


@dataclass(slots=True, kw_only=True)
class Sources:
    """NVML with DCGM beside it, or either alone.

    While the first answers there is one joined reading for each of its own. When it does not (it is down, or silent for
    ``stale_after_seconds``) those of the second take their place, from the ones that came in meanwhile on, and under
    the identities that the first gave. With two sources instants only ever rise.

    When DCGM begins to measure what it alone can, or does so again, nobody waits for the next beat of NVML to see it:
    one joined reading more has DCGM's instant and the newest that NVML has told.
    """

    first: Source
    second: Source | None
    """DCGM beside NVML; ``None`` where one source is used alone."""
    stale_after_seconds: float
    """How old a reading may be and still be used."""
    _counted: Counter[tuple[str, str]] = field(default_factory=Counter)
    _led: Reading | None = None
    """The newest that the first source led, joined."""
    _led_alone: Reading | None = None
    """The same, as the first gave it."""
    _beside: Reading | None = None
    """The second's newest."""
    _heard: deque[Reading] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """The first's since the last ``take``."""
    _waiting: deque[Reading] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """The second's that are newer than what was given out last."""
    _known_to_second: set[str] = field(default_factory=set)
    _given: float = float("-inf")
    """Instant of what was given out last."""
    _profiled: bool = False
    """Whether DCGM profiled something in it."""
    _began: float | None = None
    _other_machine: bool = False
    _counters: Counters = field(init=False)
    _xids: LargerCounts = field(default_factory=LargerCounts)

    def __post_init__(self) -> None:
        patience = SLOW_COUNTER_SECONDS + 2 * self.stale_after_seconds
        self._counters = Counters(patience_seconds=patience)

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

    def is_fresh(self, age: float) -> bool:
        """Tell whether a newest reading of this age in seconds holds: a source works, and leads or is about to."""
        return age <= self.stale_after_seconds and any(one.state is SourceState.UP for one in self.statuses)

    def take(self, now: float, steady: float) -> tuple[Reading, ...]:
        """Return joined readings since the last call, oldest first; never blocks.

        Args:
            now: Unix time.
            steady: Seconds of a clock that nobody sets.
        """
        self._began = steady if self._began is None else self._began
        self._hear()
        led = tuple(self._heard)
        self._heard.clear()
        if self.second is None:
            return tuple(self._noted(_alone(reading)) for reading in led)
        given = list(self._led_by_first(led, works=self.second.status.state is SourceState.UP))
        if not self._first_answers(now, steady):
            given += self._led_by_second()
            self._waiting.clear()  # also of what could not be used: it would be looked at again at every tick
        elif back := self._back(now, steady):
            given.append(self._give(back))
        while self._waiting and instant(self._waiting[0]) <= self._given:
            self._waiting.popleft()
        self._note_machine(self.second.status.name)
        return tuple(given)

    def is_back(self, now: float, steady: float) -> bool:
        """Tell whether ``take`` would give what DCGM alone measures, and what was given out last had nothing of that.

        Args:
            now: Unix time.
            steady: Seconds of a clock that nobody sets.
        """
        self._hear()
        return self._back(now, steady) is not None

    def _hear(self) -> None:
        """Take in what has come; errors and events are counted once, however often a reading is used."""
        self._heard.extend(self._taken_from(self.first))
        theirs = self._taken_from(self.second) if self.second else ()
        self._waiting.extend(theirs)
        for reading in theirs:
            self._beside = reading
            self._known_to_second.update(gpu.gpu.uuid for gpu in reading.gpus)
        for status in self.statuses:
            if status.state is not SourceState.UP:
                self._xids.follow(status.name)
        if (self.second or self.first).status.state is not SourceState.UP:
            self._beside, self._profiled = None, False

    def _taken_from(self, source: Source) -> tuple[Reading, ...]:
        readings, name = source.take(), source.status.name
        for reading in readings:
            self._counted.update({(name, reason): count for reason, count in reading.errors.items()})
            if self.second is not None and not (source is self.second and self._other_machine):
                self._xids.hear(name, reading.xids)
        return tuple(replace(reading, errors={}) if reading.errors else reading for reading in readings)

    def _back(self, now: float, steady: float) -> Reading | None:
        """A reading at the instant of DCGM's newest, where DCGM profiles in it and did not in what was given last."""
        newest = self._beside if self.second else _last(self._heard)
        if newest is None or self._profiled or self._other_machine or instant(newest) <= self._given:
            return None
        beside = None
        if self.second and self._first_answers(now, steady):
            if self._led_alone is None:  # it is starting, and is waited for
                return None
            beside = self._led_alone
        back = joined(beside, newest) if newest.source == "dcgm" else newest
        if not _is_profiled(back):
            return None
        return replace(back, taken_at_seconds=newest.taken_at_seconds, steady_seconds=newest.steady_seconds)

    def _first_answers(self, now: float, steady: float) -> bool:
        state = self.first.status.state
        if self._led is None:
            waited = steady - (steady if self._began is None else self._began)
            return state is SourceState.STARTING and waited <= FIRST_WAIT_SECONDS
        return state is SourceState.UP and age_seconds(self._led, now, steady) <= self.stale_after_seconds

    def _led_by_first(self, led: Iterable[Reading], *, works: bool) -> Iterator[Reading]:
        for reading in led:
            self._led_alone = reading
            self._led = joined(reading, self._nearest(instant(reading)) if works else None)
            if instant(reading) > self._given:  # else the second was faster
                yield self._give(self._led)

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
        events = self._xids.ready()
        reading = reading if events == reading.xids else replace(reading, xids=events)
        return self._counters.kept_from_falling(self._noted(reading), self._given)

    def _noted(self, reading: Reading) -> Reading:
        self._given, self._profiled = instant(reading), _is_profiled(reading)
        return reading

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


def age_seconds(reading: Reading, now: float, steady: float) -> float:
    """How old a reading is, by the clock that nobody sets where it has an instant of that.

    Args:
        reading: The reading.
        now: Unix time. A clock that was set back makes a reading look as if it came from the future: it is not old for
            that, and if no more come, the source's own deadline tells.
        steady: Seconds of the clock that nobody sets.
    """
    return now - reading.taken_at_seconds if reading.steady_seconds is None else steady - reading.steady_seconds


def _alone(reading: Reading) -> Reading:
    return joined(None, reading) if reading.source == "dcgm" else reading


def _last(readings: deque[Reading]) -> Reading | None:
    return readings[-1] if readings else None


def _is_profiled(reading: Reading) -> bool:
    """Whether DCGM measured something in it that a profiling module or GPM measures, and NVML did not."""
    measured = (gpu.from_dcgm.union(*(part.from_dcgm for part in gpu.instances)) for gpu in reading.gpus)
    return any(is_profiling(one) for fields in measured for one in fields)


LIBRARY_NOT_FOUND = "library_not_found"
"""Reason of NVML: its library is not installed here."""

FIRST_SECONDS = 60.0
LONGEST_SECONDS = 600.0


def workers_of(
    config: AgentConfig,
    fields: Iterable[Field],
    commands: Mapping[str, Sequence[str] | None],
) -> tuple[Worker, ...]:
    """Return a worker per source that is asked for, the one that leads first.

    Args:
        config: Says which sources.
        fields: What the page shows.
        commands: Command lines of children by source, where they are not the real ones.
    """
    return tuple(
        Worker(
            name=name,
            command=commands.get(name) or _command(config, name, fields),
            interval_seconds=config.sample_interval_seconds,
            clock=time.monotonic,
        )
        for name in sources_of(config)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """Has DCGM read all that the page shows while NVML's library is not installed.

    Without it nothing else can: an engine on another machine, or a container without the NVIDIA runtime. While NVML
    answers, or only fails for a moment, DCGM reads what NVML may not have.
    """

    nvml: Worker
    dcgm: Worker
    alone: tuple[str, ...]
    beside: tuple[str, ...]

    def follow(self) -> None:
        """Choose by the state of NVML."""
        if self.nvml.status.reason == LIBRARY_NOT_FOUND:
            self.dcgm.use(self.alone)
        elif self.nvml.status.state is SourceState.UP:
            self.dcgm.use(self.beside)


def standby_of(
    config: AgentConfig,
    fields: Iterable[Field],
    commands: Mapping[str, Sequence[str] | None],
    workers: Sequence[Worker],
) -> Standby | None:
    """Return how DCGM stands in for NVML; ``None`` where one source is used alone. Arguments as of ``workers_of``."""
    if len(workers) == 1 or commands.get("dcgm"):
        return None
    interval, address = config.sample_interval_seconds, config.dcgm_address
    whole = dcgm_command(interval, alone(fields), address)
    return Standby(nvml=workers[0], dcgm=workers[1], alone=whole, beside=_command(config, "dcgm", fields))


def sources_of(config: AgentConfig) -> tuple[str, ...]:
    """Return the names of the sources that are asked for, the one that leads first."""
    if config.source == "dcgm":
        return ("dcgm",)
    return ("nvml", "dcgm") if config.source == "auto" and config.dcgm_address else ("nvml",)


def fields_of(config: AgentConfig, name: str, fields: Iterable[Field]) -> frozenset[Field]:
    """Return what a source is asked for: DCGM beside NVML only for what NVML may not have."""
    if name == "nvml":
        return frozenset(fields)
    return alone(fields) if config.source == "dcgm" else supplement(fields)


def _command(config: AgentConfig, name: str, fields: Iterable[Field]) -> tuple[str, ...]:
    interval, asked = config.sample_interval_seconds, fields_of(config, name, fields)
    return nvml_command(interval, asked) if name == "nvml" else dcgm_command(interval, asked, config.dcgm_address)


class MissingGpus:
    """How long GPUs have not been up while the driver as a whole works.

    The driver fixes its list of GPUs when a process opens it. A GPU that was away at that moment is not in the list
    when it is back, and a process that was started meanwhile does not even know that there is one to be looked for.

    Args:
        first_seconds: How long a GPU is away before the driver is opened again. Doubles, up to ``longest_seconds``,
            while that does not bring it back.
        longest_seconds: See there.
    """

    def __init__(self, *, first_seconds: float = FIRST_SECONDS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._first_seconds = self._pause_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._since: float | None = None

    def is_due(self, *, expected: int | None, well: int | None, steady: float) -> bool:
        """Return whether the driver is to be opened again now; the next pause begins with that.

        Args:
            expected: GPUs that should be here; ``None`` where that is unknown.
            well: GPUs of the driver's newest reading that are up; ``None`` while the driver does not answer, which says
                nothing about its GPUs.
            steady: Seconds of a monotonic clock.
        """
        if well is None:
            return False
        if expected is None or well >= expected:
            self._since, self._pause_seconds = None, self._first_seconds
            return False
        if self._since is None:
            self._since = steady
        if steady - self._since < self._pause_seconds:
            return False
        self._since = steady
        self._pause_seconds = min(2 * self._pause_seconds, self._longest_seconds)
        return True

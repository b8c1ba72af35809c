"""Manages the sources of readings: workers, states and merged readings."""

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.accounting.meter import stale_after_seconds
from exporter.agent.history import LargerCounts
from exporter.config import AgentConfig
from exporter.gpu.merge import SLOW_COUNTER_SECONDS, MergeMemory, alone, merge, supplement
from exporter.gpu.worker import Worker, child_command
from exporter.model.devices import Reading, SourceState, SourceStatus
from exporter.model.fields import Field
from exporter.model.snapshot import Snapshot

LOG = logging.getLogger("exporter.agent")

FIRST_WAIT_SECONDS = 5.0
"""Time for which readings of DCGM wait for the start of NVML, so that GPUs keep one identity."""
_KEPT = 600
_LIBRARY_NOT_FOUND = "library_not_found"
"""Reason of NVML if its library is not installed on this machine."""
_OTHER_MACHINE = (
    "its host engine has none of the GPUs that NVML has, so it is on another machine and is not used; give the"
    " --dcgm-address of this node's engine"
)
FIRST_SECONDS, LONGEST_SECONDS = 60.0, 600.0
"""First and longest time for which a GPU is missing before the driver is opened again."""


class MissingGpus:
    """Decides when to open the driver again, because GPUs are not up although the driver works.

    The driver fixes its list of GPUs when a process opens it. A GPU that is absent then does not appear in the list
    when it returns. A process that starts in the meantime does not know that a GPU is missing.

    Args:
        first_seconds: Time for which a GPU is absent before the driver is reopened. Doubles, up to
            ``longest_seconds``, while that does not recover the GPU.
        longest_seconds: Upper limit of that time.
    """

    def __init__(self, *, first_seconds: float = FIRST_SECONDS, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._first_seconds = self._pause_seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._since: float | None = None

    def is_due(self, *, expected: int | None, well: int | None, steady: float) -> bool:
        """Return whether the driver must be reopened now; if so, the next pause begins.

        Args:
            expected: Expected number of GPUs; ``None`` if unknown.
            well: GPUs of the driver's newest reading that are up; ``None`` while the driver does not answer, which does
                not mean that its GPUs are down.
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


@dataclass(slots=True, kw_only=True)
class Sources:
    """Returns the readings of NVML, of DCGM, or of both merged.

    While NVML answers, each NVML reading leads to one merged reading. While it does not (it is down, or silent for
    ``stale_after_seconds``), each DCGM reading after the last merged one does. Instants only increase.
    """

    nvml: Worker | None = None
    dcgm: Worker | None = None
    stale_after_seconds: float
    """Maximum age of a usable reading."""
    dcgm_commands: tuple[Sequence[str], Sequence[str]] | None = None
    """Commands of DCGM's child: with NVML, and alone; ``None`` if the command never changes."""
    missing: MissingGpus = field(default_factory=MissingGpus)
    _memory: MergeMemory = field(default_factory=MergeMemory)
    _unmerged: deque[Reading] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """DCGM readings after the last merged reading, and the newest DCGM reading."""
    _counted: Counter[tuple[str, str]] = field(default_factory=Counter)
    _xids: LargerCounts = field(default_factory=LargerCounts)
    _began: float = math.inf
    """Instant of the first call of ``take``."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Workers of the sources, NVML first."""
        return tuple(worker for worker in (self.nvml, self.dcgm) if worker is not None)

    @property
    def statuses(self) -> tuple[SourceStatus, ...]:
        """State of each source, NVML first."""
        statuses = [source.status for source in self.workers]
        if self._memory.other_machine and statuses[-1].state is SourceState.UP:
            statuses[-1] = replace(
                statuses[-1], state=SourceState.FAILED, reason="other_machine", message=_OTHER_MACHINE
            )
        return tuple(statuses)

    @property
    def errors(self) -> dict[tuple[str, str], int]:
        """Counts since start by source and reason."""
        errors = Counter(self._counted)
        for source in self.workers:
            errors.update({(source.status.name, reason): count for reason, count in source.errors.items()})
        return dict(errors)

    def is_fresh(self, age: float) -> bool:
        """Return whether a newest reading of this age in seconds is valid, and a source works."""
        return age <= self.stale_after_seconds and any(one.state is SourceState.UP for one in self.statuses)

    def take(self, now: float, steady: float) -> tuple[Reading, ...]:
        """Return merged readings since the last call, oldest first; never blocks.

        Args:
            now: Unix time.
            steady: Seconds of the monotonic clock.
        """
        self._began = min(self._began, steady)
        led, added = self._new_of(self.nvml), self._new_of(self.dcgm)
        for status in self.statuses:
            if status.state is not SourceState.UP:
                self._xids.follow(status.name)
        if self.dcgm is None:  # nothing to merge; the meter handles late and repeated readings
            return tuple(replace(reading, xids=self._xids.ready()) for reading in led)
        self._unmerged.extend(added)
        taken = [self._merged(reading, self._nearest(reading.instant)) for reading in led]
        answers = self._nvml_answers(now, steady)
        if not answers:
            taken += [self._merged(None, reading) for reading in self._unmerged]
        elif self._memory.nvml and self._usable and not self._memory.profiled:
            taken.append(self._merged(self._memory.nvml, self._usable[-1]))
        while len(self._unmerged) > 1 and (not answers or self._unmerged[0].instant <= self._memory.at):
            self._unmerged.popleft()
        return tuple(reading for reading in taken if reading is not None)

    def choose_fields(self) -> None:
        """Let DCGM read all shown fields while NVML's library is not installed, otherwise those that NVML may lack.

        Without the library no other source exists: an engine on another machine, or a container without the NVIDIA
        runtime. A temporary failure of NVML changes nothing.
        """
        if self.nvml and self.dcgm and self.dcgm_commands:
            with_nvml, without_nvml = self.dcgm_commands
            if self.nvml.status.reason == _LIBRARY_NOT_FOUND:
                self.dcgm.use(without_nvml)
            elif self.nvml.status.state is SourceState.UP:
                self.dcgm.use(with_nvml)

    def reopen_for_missing(self, snapshot: Snapshot, steady: float) -> None:
        """Reopen the driver if that may recover a GPU that is missing or does not answer.

        Args:
            snapshot: The newest snapshot.
            steady: Seconds of the monotonic clock.
        """
        if self.nvml is None:
            return
        expected, well = snapshot.expected_devices, self.nvml.well_gpus
        if snapshot.attribution.unseen_instances and well is not None:
            # A GPU may have been absent at the opening, or the device plugin still advertises a former layout.
            expected = max(expected or 0, well + 1)
        if self.missing.is_due(expected=expected, well=well, steady=steady):
            LOG.info("opening the driver again in a new process: gpus_expected=%s gpus_up=%s", expected, well)
            self.nvml.renew()

    def _new_of(self, source: Worker | None) -> tuple[Reading, ...]:
        """Return a source's new readings; count their errors and events once."""
        if source is None:
            return ()
        readings, name = source.take(), source.status.name
        for reading in readings:
            self._counted.update({(name, reason): count for reason, count in reading.errors.items()})
            if source is self.nvml or not self._memory.other_machine:
                self._xids.add(name, reading.xids)
        return tuple(replace(reading, errors={}, xids=()) for reading in readings)

    @property
    def _usable(self) -> Sequence[Reading]:
        """DCGM readings; empty while DCGM does not work."""
        return self._unmerged if self.dcgm and self.dcgm.status.state is SourceState.UP else ()

    def _nearest(self, at: float) -> Reading | None:
        """Return the DCGM reading nearest to an instant, if it is recent enough."""
        nearest = min(self._usable, key=lambda one: abs(at - one.instant), default=None)
        return nearest if nearest and abs(at - nearest.instant) <= self.stale_after_seconds else None

    def _nvml_answers(self, now: float, steady: float) -> bool:
        """Return whether NVML has current readings, or is still starting."""
        if self.nvml is None:
            return False
        state, newest = self.nvml.status.state, self._memory.nvml
        if newest is None:
            return state is SourceState.STARTING and steady - self._began <= FIRST_WAIT_SECONDS
        return state is SourceState.UP and newest.age_seconds(now, steady) <= self.stale_after_seconds

    def _merged(self, nvml: Reading | None, dcgm: Reading | None) -> Reading | None:
        """Merge two readings, and add the events of both sources to the result."""
        before = self._memory.other_machine
        reading, self._memory = merge(
            nvml,
            dcgm,
            self._memory,
            away=(self.nvml.status.reason if self.nvml else "") or "stale",
            patience_seconds=SLOW_COUNTER_SECONDS + 2 * self.stale_after_seconds,
        )
        if self._memory.other_machine and not before:
            self._counted["dcgm", "other_machine"] += 1
            LOG.warning("source dcgm: %s", _OTHER_MACHINE)
        return reading and replace(reading, xids=self._xids.ready())


def sources_of(config: AgentConfig) -> tuple[str, ...]:
    """Return the names of the configured sources, NVML first."""
    if config.sampling.source == "dcgm":
        return ("dcgm",)
    return ("nvml", "dcgm") if config.sampling.source == "auto" and config.sampling.dcgm_address else ("nvml",)


def fields_of(config: AgentConfig, name: str, fields: Iterable[Field]) -> frozenset[Field]:
    """Return the fields to read from a source: with NVML, DCGM reads only those that NVML may lack."""
    if name == "nvml":
        return frozenset(fields)
    return alone(fields) if config.sampling.source == "dcgm" else supplement(fields)


def make_sources(config: AgentConfig, fields: Iterable[Field], commands: Mapping[str, Sequence[str]]) -> Sources:
    """Return the configured sources with their workers; their children are not started yet.

    Args:
        config: Selects the sources.
        fields: Fields that the page shows.
        commands: Command lines of children by source that replace the default ones.
    """
    interval, address = config.sampling.interval_seconds, config.sampling.dcgm_address
    defaults = {
        name: child_command(interval, fields_of(config, name, fields), address if name == "dcgm" else "")
        for name in sources_of(config)
    }
    workers = {
        name: Worker(name=name, command=commands.get(name) or command, interval_seconds=interval)
        for name, command in defaults.items()
    }
    is_chosen = len(workers) > 1 and not commands.get("dcgm")
    return Sources(
        nvml=workers.get("nvml"),
        dcgm=workers.get("dcgm"),
        stale_after_seconds=stale_after_seconds(interval),
        dcgm_commands=(defaults["dcgm"], child_command(interval, alone(fields), address)) if is_chosen else None,
    )

"""Chooses the sources that are asked for, what each of them is asked, and when the driver is opened again."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.config import AgentConfig
from exporter.model import Field, SourceState
from exporter.sources import dcgm_fields
from exporter.sources.worker import Worker, dcgm_command, nvml_command

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
    alone = dcgm_command(interval, dcgm_fields.alone(fields), address)
    return Standby(nvml=workers[0], dcgm=workers[1], alone=alone, beside=_command(config, "dcgm", fields))


def sources_of(config: AgentConfig) -> tuple[str, ...]:
    """Return the names of the sources that are asked for, the one that leads first."""
    if config.source == "dcgm":
        return ("dcgm",)
    return ("nvml", "dcgm") if config.source == "auto" and config.dcgm_address else ("nvml",)


def fields_of(config: AgentConfig, name: str, fields: Iterable[Field]) -> frozenset[Field]:
    """Return what a source is asked for: DCGM beside NVML only for what NVML may not have."""
    if name == "nvml":
        return frozenset(fields)
    return dcgm_fields.alone(fields) if config.source == "dcgm" else dcgm_fields.supplement(fields)


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

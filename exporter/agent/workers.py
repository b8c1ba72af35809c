"""Chooses the sources that are asked for, and what each of them is asked."""

import time
from collections.abc import Iterable, Mapping, Sequence

from exporter.config import AgentConfig
from exporter.model import Field
from exporter.sources import dcgm_fields
from exporter.sources.worker import Worker, dcgm_command, nvml_command


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

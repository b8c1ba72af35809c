"""Input and results of checks; findings as text and JSON, and the hardware report."""

import json
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from exporter import __version__
from exporter.config import AgentConfig
from exporter.config.resolve import redacted
from exporter.errors import ConfigError
from exporter.model.devices import GpuReading, MigReading, ProcessUse, Reading
from exporter.model.fields import Field
from exporter.web.node_api import picked

_LONGEST_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Input of the checks.

    ``worker_command`` replaces the NVML child, ``dcgm_command`` DCGM's, on simulated nodes and in tests.
    """

    config: AgentConfig
    wall: Callable[[], float]
    """Unix time in seconds."""
    monotonic: Callable[[], float]
    worker_command: Sequence[str] | None = None
    dcgm_command: Sequence[str] | None = None
    worker_env: Mapping[str, str] | None = None
    simulated: bool = False
    dev_root: Path = Path("/dev")
    sys_root: Path = Path("/sys")
    driver_deadline_seconds: float = 20.0


def interval_seconds(config: AgentConfig) -> float:
    """Return the time between readings of the checks; a long sample interval would leave too few of them."""
    return min(config.sampling.interval_seconds, _LONGEST_INTERVAL_SECONDS)


class Level(StrEnum):
    """Severity of a finding; with a fail the agent cannot do its work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor: check, severity, observation, and fix (empty if all is well)."""

    name: str
    level: Level
    cause: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Results of all checks."""

    findings: tuple[Finding, ...]
    readings: tuple[Reading, ...]
    """The last reading of each source that works."""
    seconds: float
    """Duration of the checks."""


def ok(name: str, cause: str) -> Finding:
    """Return a finding for a check that passed."""
    return Finding(name=name, level=Level.OK, cause=cause)


def warn(name: str, cause: str, fix: str) -> Finding:
    """Return a finding for a node on which some data of the agent is missing or unsure."""
    return Finding(name=name, level=Level.WARN, cause=cause, fix=fix)


def fail(name: str, cause: str, fix: str) -> Finding:
    """Return a finding for a node on which the agent cannot do its work."""
    return Finding(name=name, level=Level.FAIL, cause=cause, fix=fix)


def first_of(problems: ConfigError | Sequence[str]) -> str:
    """Return the first of some problems, and how many more there are."""
    lines = problems.problems if isinstance(problems, ConfigError) else problems
    return lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")


_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_NAME_WIDTH = 19


def write_text(findings: Sequence[Finding], *, simulated: bool, stream: TextIO) -> None:
    """Write one line per finding, and a last line with the counts."""
    console = Console(file=stream, soft_wrap=True, highlight=False)
    if simulated:
        console.print(Text("SIMULATED NODE: nothing here is real", style="bold yellow"))
    for finding in findings:
        line = Text(f"{finding.level.value:<5}", style=_STYLES[finding.level])
        line.append(f"{finding.name:<{_NAME_WIDTH}}", style="bold")
        line.append(_one_line(finding.cause), style="default")
        if finding.fix:
            line.append(f"  → {_one_line(finding.fix)}", style="dim")
        console.print(line)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    console.print(Text(", ".join(f"{count} {level.value}" for level, count in counts.items()), style="bold"))


def write_json(findings: Sequence[Finding], *, simulated: bool, stream: TextIO) -> None:
    """Write one object: ``simulated``, ``level`` (the worst) and ``findings``."""
    listed = [
        {**picked(one, "name", "level"), "cause": _one_line(one.cause), "fix": _one_line(one.fix) or None}
        for one in findings
    ]
    document = {"simulated": simulated, "level": worst(findings).value, "findings": listed}
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level of the findings."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def _one_line(words: str) -> str:
    return redacted(" ".join(words.split()))


_PUBLIC = frozenset(
    {
        *("device nodes", "driver", "devices", "activity", "processes"),
        *(f"DCGM {what}" for what in ("refusals", "devices", "profiling", "fields")),
        *("layers", "clock"),
    }
)
"""Checks with texts on hardware and drivers only; of all others the report has just the level."""
_UUID = re.compile(r"\b(GPU-|MIG-)([0-9a-fA-F]{8})-[0-9a-fA-F-]+")
_PACKAGES = ("nvidia-ml-py", "nvidia-dcgm", "protobuf")


def write_report(done: Examination, around: Surroundings, stream: TextIO) -> None:
    """Write the hardware report: versions, fields, values and timings, without names of hosts, pods and users."""
    hosts = {socket.gethostname(), around.config.attribution.node_name}
    words = sorted((re.escape(name) for name in hosts if name), key=len, reverse=True)
    names = re.compile(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])")

    def public(text: str) -> str:
        return names.sub("<host>", _short(_one_line(text)))

    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    system = {"kernel": platform.release(), "machine": platform.machine(), "cpus": os.cpu_count()}
    with suppress(OSError):
        system["system"] = platform.freedesktop_os_release().get("PRETTY_NAME")
    document = {
        "report": "gpu-cost-exporter hardware report",
        "version": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "system": system,
        "simulated": around.simulated,
        "seconds": round(done.seconds, 3),
        "checks": [
            {"name": one.name, "level": one.level.value, "cause": public(one.cause) if one.name in _PUBLIC else None}
            for one in done.findings
        ],
        "sources": [_source(reading) for reading in done.readings],
    }
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def _short(text: str) -> str:
    return _UUID.sub(r"\1\2...", text)


def _source(reading: Reading) -> dict[str, Any]:
    return {
        "name": reading.source,
        **picked(reading, "driver_version", "nvml_version", "dcgm_version", "errors"),
        "sample_seconds": round(reading.duration_seconds, 6),
        "gpus": [_gpu(gpu) for gpu in reading.gpus],
    }


def _gpu(reading: GpuReading) -> dict[str, Any]:
    gpu = reading.gpu
    return {
        "uuid": _short(gpu.uuid),
        **picked(gpu, "index", "model", "mig_enabled", "compute_slices", "memory_slices", "memory_total_bytes"),
        "reason": reading.reason or None,
        **picked(reading, "state", "profiling"),
        **_measured(reading),
        "instances": [
            {"uuid": _short(part.instance.uuid), "profile": part.instance.profile, **_measured(part)}
            for part in reading.instances
        ],
    }


def _measured(reading: GpuReading | MigReading) -> dict[str, Any]:
    return {
        "values": {Field(field).name: value for field, value in sorted(reading.values.items())},
        "processes": None if reading.processes is None else _processes(reading.processes),
    }


def _processes(processes: Sequence[ProcessUse]) -> dict[str, int]:
    return {
        "listed": sum(not process.ended for process in processes),
        "ended": sum(process.ended for process in processes),
        "with_samples": sum(process.busiest_ratio is not None for process in processes),
        "with_memory": sum(process.memory_used_bytes is not None for process in processes),
        "mps_clients": sum(process.mps for process in processes),
    }

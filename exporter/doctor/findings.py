"""What checks look at and what they find, and the text and JSON forms of findings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.text import Text

from exporter.config import AgentConfig
from exporter.config.resolve import redacted
from exporter.errors import ConfigError

_LONGEST_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the checks look at.

    ``worker_command`` replaces the NVML child, ``dcgm_command`` DCGM's: a simulated one, or a test's.
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

    @property
    def interval_seconds(self) -> float:
        """Between the readings of the checks."""
        return interval_seconds(self.config)


def interval_seconds(config: AgentConfig) -> float:
    """Between the readings of the checks: an agent that samples every 30 s would leave too few of them to judge by."""
    return min(config.sampling.interval_seconds, _LONGEST_INTERVAL_SECONDS)


class Level(StrEnum):
    """How bad it is; a fail is what keeps the agent from doing its work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor: the check, how it went, what was seen, and how to fix it (empty when all is well)."""

    name: str
    level: Level
    cause: str
    fix: str = ""


def ok(name: str, cause: str) -> Finding:
    """All is well."""
    return Finding(name=name, level=Level.OK, cause=cause)


def warn(name: str, cause: str, fix: str) -> Finding:
    """The agent works, but some of what it shows is missing or unsure."""
    return Finding(name=name, level=Level.WARN, cause=cause, fix=fix)


def fail(name: str, cause: str, fix: str) -> Finding:
    """The agent cannot do its work."""
    return Finding(name=name, level=Level.FAIL, cause=cause, fix=fix)


def first_of(problems: ConfigError | Sequence[str]) -> str:
    """Return the first of some problems, and how many more there are."""
    lines = problems.problems if isinstance(problems, ConfigError) else problems
    return lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")


def some(names: Sequence[str], most: int) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}
_NAME_WIDTH = 19


def write_text(findings: Sequence[Finding], *, simulated: bool, stream: TextIO) -> None:
    """One line per finding, and a last one with the counts."""
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
    """One object: ``simulated``, ``level`` (the worst) and ``findings``."""
    listed = [
        {
            "name": finding.name,
            "level": finding.level.value,
            "cause": _one_line(finding.cause),
            "fix": _one_line(finding.fix) or None,
        }
        for finding in findings
    ]
    document = {"simulated": simulated, "level": worst(findings).value, "findings": listed}
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among the findings."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def _one_line(words: str) -> str:
    return redacted(" ".join(words.split()))

"""Writes findings for people, one line each and in colour on a terminal, or as JSON."""

import json
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from exporter.config.logs import told
from exporter.doctor.finding import Finding, Level

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
        if finding.mend:
            line.append(f"  → {_one_line(finding.mend)}", style="dim")
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
            "mend": _one_line(finding.mend) or None,
        }
        for finding in findings
    ]
    document = {"simulated": simulated, "level": worst(findings).value, "findings": listed}
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among the findings."""
    return max((finding.level for finding in findings), key=list(Level).index, default=Level.OK)


def _one_line(words: str) -> str:
    return told(" ".join(words.split()))

"""Every budget of the design in one table, with what was measured and what others were seen to take."""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from measure import Figures
from report import MIB, verdict_of
from scrapes import percentile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import accuracy_check  # noqa: E402 - needs the path above
import report_check  # noqa: E402 - as above


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One budget; ``measured`` is ``None`` where it could not be, and ``note`` says why."""

    what: str
    unit: str
    budget: float
    measured: float | None
    anchor: str = ""
    note: str = ""


def table(*, whole: Figures, partitioned: Figures, both: Figures) -> str:
    """Measure what is left and return the table.

    Args:
        whole: A node of 8 GPUs.
        partitioned: A node of 56 instances.
        both: 8 GPUs with metadata and DCGM.
    """
    lines = [*_of_agent(whole, partitioned, both), *_of_accuracy(), _of_report()]
    head = ["### Budgets\n", "| what | measured | budget | | elsewhere |", "|---|---:|---:|---|---|"]
    return "\n".join([*head, *(_text(line) for line in lines), ""])


def _of_agent(whole: Figures, partitioned: Figures, both: Figures) -> list[Line]:
    fleet = "dcgm-exporter: 65 MiB on one engine; median 467 to 484 MiB in another's fleet of 32 nodes"
    return [
        Line(
            what="memory alone on a node, 8 GPUs, 110 pods, metadata and DCGM",
            unit="MiB",
            budget=90.0,
            measured=both.alone_bytes / MIB,
            anchor=fleet,
        ),
        Line(
            what="CPU at 1 sample/s, the same",
            unit="% of a core",
            budget=1.0,
            measured=both.cpu_per_sample_seconds * 100,
            anchor="dcgm-exporter: 0.06 % of a core on one engine, 4 GPUs",
        ),
        Line(
            what="scrape p99, 8 whole GPUs",
            unit="ms",
            budget=5.0,
            measured=percentile(whole.plain_seconds, 99) * 1e3,
            anchor="dcgm-exporter: 10 s reported",
            note=_busy(whole),
        ),
        Line(
            what="scrape p99, 56 MIG instances",
            unit="ms",
            budget=12.0,
            measured=percentile(partitioned.plain_seconds, 99) * 1e3,
            anchor="as above",
            note=_busy(partitioned),
        ),
    ]


def _busy(figures: Figures) -> str:
    """What tells a slow page from a busy machine."""
    return f"CPU of one {figures.cpu_per_scrape_seconds * 1e3:.1f} ms; load average {os.getloadavg()[2]:.1f}"


def _of_accuracy() -> list[Line]:
    found = accuracy_check.run()
    note = "the whole day: make bench-accuracy" if found else accuracy_check.MISSING
    return [
        Line(
            what=f"GPU-seconds per namespace, {accuracy_check.HOURS} h of the real trace",
            unit="%",
            budget=0.1,
            measured=found and abs(found.total_ratio) * 100,
            anchor="gauges or counters at 30 s: 12 to 20 % lost for pods of 60 s",
            note=note,
        ),
        Line(
            what="the same, pods under 60 s",
            unit="%",
            budget=0.5,
            measured=None,
            note=f"of {accuracy_check.HOURS} h too few; the mean of 20 whole days: make bench-accuracy",
        ),
        Line(
            what="cost conservation, relative",
            unit="",
            budget=1e-9,
            measured=found and found.conservation_ratio,
            anchor="OpenCost: 7 times over, $0 or N times on MIG and sharing",
            note=note,
        ),
    ]


def _of_report() -> Line:
    with tempfile.TemporaryDirectory(prefix="bench-report-") as name:
        found = report_check.run(Path(name))
    return Line(
        what=f"30-day report, {report_check.NODES * 8:,} GPUs, by team and model",
        unit="s",
        budget=5.0,
        measured=found,
        anchor="raw counters at 30 s: minutes",
        note="8,000 GPUs: benchmarks/report_scale.py, half an hour" if found else report_check.MISSING,
    )


def _text(line: Line) -> str:
    note = f" ({line.note})" if line.note else ""
    cells = [line.what + note, "", f"{line.budget:g} {line.unit}".strip(), "", line.anchor]
    if line.measured is not None:
        cells[1] = f"{line.measured:.3g} {line.unit}".strip()
        cells[3] = verdict_of(line.measured, line.budget)
    return "| " + " | ".join(cells) + " |"

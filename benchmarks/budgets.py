"""The figures of a measurement, and every budget of the design with what was measured and what others take."""

import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import report_scale
from accuracy import cases, judge
from accuracy_agent import record
from accuracy_day import TRACE, busiest_day, nodes_of_day, read_pods
from accuracy_score import RECORDED
from measure import Figures, percentile

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB = 1024, 1024 * 1024
HOURS, GPUS = 1, 16
"""Of the real trace: a short piece of ``accuracy.py``, the clean case alone."""
TRACES = ROOT.parent / "shared" / "traces"
REPORT_NODES = 50
"""A short piece of ``report_scale.py``: a report of 30 days over a fleet of 400 GPUs, from a real Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One budget; ``measured`` is ``None`` where it could not be, and ``note`` says why."""

    what: str
    unit: str
    budget: float
    measured: float | None
    anchor: str = ""
    note: str = ""


def figures_table(title: str, one: Figures) -> str:
    """Return a Markdown table of what the agent cost on a node."""
    rows = {
        "CPU at 1 sample/s, % of a core": one.cpu_per_sample_seconds * 100,
        "CPU per scrape of a new sample, ms": one.cpu_per_scrape_seconds * 1e3,
        "scrape p50, ms": percentile(one.plain_seconds, 50) * 1e3,
        "scrape p99, ms": percentile(one.plain_seconds, 99) * 1e3,
        "scrape p50, gzip, ms": percentile(one.gzip_seconds, 50) * 1e3,
        "scrape p99, gzip, ms": percentile(one.gzip_seconds, 99) * 1e3,
        "scrape of a new sample, median, ms": percentile(one.fresh_seconds, 50) * 1e3,
        "scrape of a new sample, worst, ms": max(one.fresh_seconds) * 1e3,
        "memory of all processes alone on a node, MiB": one.alone_bytes / MIB,
        **{
            f"of it the {name}, MiB": held.size_bytes / MIB
            for name, held in zip(one.process_names, one.held, strict=True)
        },
        "of it files as they are on the disk, MiB": sum(held.file_bytes for held in one.held) / MIB,
        "page, KiB": one.page_bytes / KIB,
        "page, gzip, KiB": one.gzip_bytes / KIB,
        "series": float(one.series),
    }
    lines = [f"| {what} | {value:,.{0 if value >= 100 else 2}f} |" for what, value in rows.items()]  # noqa: PLR2004 - three digits say enough
    return "\n".join([f"### {title}\n", "| what | agent |", "|---|---:|", *lines, ""])


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
    path = TRACES / TRACE
    total = lost = None
    note = "not measured: needs the trace next to the repository, prometheus and promtool; see make bench-accuracy"
    if path.is_file() and _has_prometheus():
        pods = read_pods(path)
        nodes = nodes_of_day(pods, busiest_day(pods), GPUS)
        length = HOURS * 3600.0
        with ProcessPoolExecutor(2) as pool:
            records = list(pool.map(record, nodes, range(len(nodes)), [length] * len(nodes)))
        rows = judge(cases(records, length)["clean"], nodes, length, 0).rows
        total = next(abs(row.total) * 100 for row in rows if row.way == RECORDED)
        pairs = zip(nodes, records, strict=True)
        lost = max(one.conservation_error_seconds / (node.gpu_count * length) for node, one in pairs)
        note = "the whole day: make bench-accuracy"
    return [
        Line(
            what=f"GPU-seconds per namespace, {HOURS} h of the real trace",
            unit="%",
            budget=0.1,
            measured=total,
            anchor="gauges or counters at 30 s: 12 to 20 % lost for pods of 60 s",
            note=note,
        ),
        Line(
            what="the same, pods under 60 s",
            unit="%",
            budget=0.5,
            measured=None,
            note=f"of {HOURS} h too few; the mean of 20 whole days: make bench-accuracy",
        ),
        Line(
            what="cost conservation, relative",
            unit="",
            budget=1e-9,
            measured=lost,
            anchor="OpenCost: 7 times over, $0 or N times on MIG and sharing",
            note=note,
        ),
    ]


def _of_report() -> Line:
    measured, note = None, "not measured: needs prometheus and promtool on the PATH (make install)"
    if _has_prometheus():
        with tempfile.TemporaryDirectory(prefix="bench-report-") as name:
            directory = Path(name)
            with report_scale.recorded(directory, REPORT_NODES) as (server, truth):
                measured, _ = report_scale.measure(directory, server, truth, "team,model")
        note = "8,000 GPUs: benchmarks/report_scale.py, half an hour"
    return Line(
        what=f"30-day report, {REPORT_NODES * 8:,} GPUs, by team and model",
        unit="s",
        budget=5.0,
        measured=measured,
        anchor="raw counters at 30 s: minutes",
        note=note,
    )


def _has_prometheus() -> bool:
    return bool(shutil.which("promtool") and shutil.which("prometheus"))


def _text(line: Line) -> str:
    note = f" ({line.note})" if line.note else ""
    cells = [line.what + note, "", f"{line.budget:g} {line.unit}".strip(), "", line.anchor]
    if line.measured is not None:
        cells[1] = f"{line.measured:.3g} {line.unit}".strip()
        cells[3] = "PASS" if line.measured <= line.budget else "OVER"
    return "| " + " | ".join(cells) + " |"

"""The figures of a measurement, and every budget of the design with its measured value."""

import os
import shutil
import tempfile
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import report_scale
from accuracy import cases, judge, replayed
from accuracy_day import TRACE, busiest_day, nodes_of_day, read_pods
from accuracy_score import RECORDED
from measure import Figures, percentile

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB = 1024, 1024 * 1024
HOURS, GPUS, SEEDS = 1, 16, 3
"""Part of the real trace for a short run of ``accuracy.py``, the clean case alone.

Recorded values at both ends of the hour are up to 35 s old. Over seeds that is 0.065 % on average, with a standard
deviation of 0.026 %, so one seed may exceed the budget.
"""
TRACES = ROOT.parent / "shared" / "traces"
REPORT_NODES = 50
"""Fleet for a short run of ``report_scale.py``: a report of 30 days over 400 GPUs, from a real Prometheus."""


class Line(NamedTuple):
    """One budget; ``measured`` is ``None`` where the measurement is impossible, and ``note`` gives the reason."""

    what: str
    unit: str
    budget: float
    measured: float | None
    note: str = ""


def figures_table(title: str, one: Figures) -> str:
    """Return a Markdown table of the cost of the agent on a node."""
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
    lines = [f"| {what} | {value:,.{0 if value >= 100 else 2}f} |" for what, value in rows.items()]  # noqa: PLR2004 - three digits are enough
    return "\n".join([f"### {title}\n", "| what | agent |", "|---|---:|", *lines, ""])


def table(*, whole: Figures, partitioned: Figures, both: Figures) -> str:
    """Measure the remaining figures and return the table.

    Args:
        whole: A node of 8 GPUs.
        partitioned: A node of 56 instances.
        both: 8 GPUs with metadata and DCGM.
    """
    lines = [*_of_agent(whole, partitioned, both), *_of_accuracy(), _of_report()]
    head = ["### Budgets\n", "| what | measured | budget | |", "|---|---:|---:|---|"]
    return "\n".join([*head, *(_text(line) for line in lines), ""])


def _of_agent(whole: Figures, partitioned: Figures, both: Figures) -> list[Line]:
    memory, cpu = both.alone_bytes / MIB, both.cpu_per_sample_seconds * 100
    return [
        Line("memory alone on a node, 8 GPUs, 110 pods, metadata and DCGM", "MiB", 90.0, memory),
        Line("CPU at 1 sample/s, the same", "% of a core", 1.0, cpu),
        *(
            Line(f"scrape p99, {what}", "ms", budget, percentile(one.plain_seconds, 99) * 1e3, _busy(one))
            for what, budget, one in (("8 whole GPUs", 5.0, whole), ("56 MIG instances", 12.0, partitioned))
        ),
    ]


def _busy(figures: Figures) -> str:
    """Return the figures that distinguish a slow page from a busy machine."""
    return f"CPU of one {figures.cpu_per_scrape_seconds * 1e3:.1f} ms; load average {os.getloadavg()[2]:.1f}"


def _of_accuracy() -> list[Line]:
    path = TRACES / TRACE
    total = lost = None
    note = "not measured: needs the trace next to the repository, prometheus and promtool; see make bench-accuracy"
    if path.is_file() and _has_prometheus():
        pods = read_pods(path)
        nodes = nodes_of_day(pods, busiest_day(pods), GPUS)
        length = HOURS * 3600.0
        runs = [replayed(nodes, length, seed) for seed in range(SEEDS)]
        found = [judge(cases(run, length)["clean"], nodes, length, seed) for seed, run in enumerate(runs)]
        total = abs(fmean(one.rows[RECORDED].total for one in found)) * 100
        pairs = (pair for run in runs for pair in zip(nodes, run, strict=True))
        lost = max(one.conservation_error_seconds / (node.gpu_count * length) for node, one in pairs)
        note = "the whole day: make bench-accuracy"
    return [
        Line(f"GPU-seconds of namespaces, {HOURS} h of the real trace, mean of {SEEDS} runs", "%", 0.1, total, note),
        Line("the same, pods under 60 s", "%", 0.5, None, f"of {HOURS} h too few; 20 whole days: make bench-accuracy"),
        Line("cost conservation, relative", "", 1e-9, lost, note),
    ]


def _of_report() -> Line:
    measured, note = None, "not measured: needs prometheus and promtool on the PATH (make install)"
    if _has_prometheus():
        with tempfile.TemporaryDirectory(prefix="bench-report-") as name:
            directory = Path(name)
            with report_scale.recorded(directory, REPORT_NODES) as (server, truth):
                measured, _ = report_scale.measure(directory, server, truth, "team,model")
        note = "8,000 GPUs: benchmarks/report_scale.py, half an hour"
    return Line(f"30-day report, {REPORT_NODES * 8:,} GPUs, by team and model", "s", 5.0, measured, note)


def _has_prometheus() -> bool:
    return bool(shutil.which("promtool") and shutil.which("prometheus"))


def _text(line: Line) -> str:
    note = f" ({line.note})" if line.note else ""
    measured = verdict = ""
    if line.measured is not None:
        measured, verdict = f"{line.measured:.3g} {line.unit}", "PASS" if line.measured <= line.budget else "OVER"
    return f"| {line.what}{note} | {measured} | {line.budget:g} {line.unit} | {verdict} |"

"""Figures as a Markdown table: the agent, its budget and the verdict, another exporter and the ratio."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from measure import Figures
from scrapes import percentile

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One node to measure on, and its budgets."""

    title: str
    partitioned: bool
    pods: int = 110
    metadata: bool = False
    """Whether the agent asks the Kubernetes API."""
    dcgm: bool = False
    """Whether there is a host engine too, and GPUs that only its profiling module measures, as before Hopper."""
    scrape_p99_seconds: float
    cpu_ratio: float = 0.02
    memory_bytes: int = 100 * MIB


@dataclass(frozen=True, slots=True)
class _Row:
    title: str
    pick: Callable[[Figures], float | None]
    budget: float | None = None


def table(setting: Setting, ours: Figures, theirs: Figures | None, rival: str) -> str:
    """Return the table under its heading; ``rival`` names what ``theirs`` was measured on."""
    head, line = "| what | agent | budget | |", "|---|---:|---:|---|"
    if theirs:
        head, line = f"{head} {rival} | ratio |", f"{line}---:|---:|"
    rows = [_cells(row, ours, theirs) for row in _rows(setting, ours.process_names)]
    return "\n".join([f"### {setting.title}\n", head, line, *rows, ""])


def _rows(setting: Setting, names: Sequence[str]) -> list[_Row]:
    milli = 1e3
    p99 = setting.scrape_p99_seconds * milli
    memory = setting.memory_bytes / MIB
    return [
        _Row("CPU at 1 sample/s, % of a core", lambda one: one.cpu_per_sample_seconds * 100, setting.cpu_ratio * 100),
        _Row("CPU per sample, ms", lambda one: one.cpu_per_sample_seconds * milli),
        _Row("CPU per scrape of a new sample, ms", lambda one: one.cpu_per_scrape_seconds * milli),
        _Row("scrape p50, ms", lambda one: percentile(one.plain_seconds, 50) * milli),
        _Row("scrape p99, ms", lambda one: percentile(one.plain_seconds, 99) * milli, p99),
        _Row("scrape p50, gzip, ms", lambda one: percentile(one.gzip_seconds, 50) * milli),
        _Row("scrape p99, gzip, ms", lambda one: percentile(one.gzip_seconds, 99) * milli, p99),
        _Row("scrape of a new sample, median, ms", lambda one: percentile(one.fresh_seconds, 50) * milli),
        _Row("scrape of a new sample, worst, ms", lambda one: max(one.fresh_seconds) * milli),
        _Row("memory of all processes alone on a node, MiB", lambda one: _mib(one.alone_bytes), memory),
        *(_Row(f"of it the {names[place]}, MiB", partial(_process, place)) for place in range(len(names))),
        _Row("of it files as they are on the disk, MiB", lambda one: _mib(sum(h.files.total() for h in one.held))),
        _Row("memory beside other Python programs, MiB PSS", lambda one: _mib(sum(one.pss_bytes))),
        _Row("page, KiB", lambda one: one.page_bytes / KIB),
        _Row("page, gzip, KiB", lambda one: one.gzip_bytes / KIB),
        _Row("series", lambda one: float(one.series)),
    ]


def verdict_of(value: float, budget: float) -> str:
    """Return PASS or OVER."""
    return "PASS" if value <= budget else "OVER"


def _mib(size_bytes: int) -> float:
    return size_bytes / MIB


def _process(place: int, figures: Figures) -> float | None:
    """Memory of one process where there are several; nothing to tell apart where there is one."""
    return _mib(figures.held[place].size_bytes) if 1 < len(figures.held) > place else None


def _cells(row: _Row, ours: Figures, theirs: Figures | None) -> str:
    value = row.pick(ours)
    budget = "" if row.budget is None else f"{row.budget:g}"
    verdict = "" if row.budget is None or value is None else verdict_of(value, row.budget)
    cells = [row.title, _number(value), budget, verdict]
    if theirs:
        other = row.pick(theirs)
        cells += [_number(other), f"{other / value:.1f} x" if value and other is not None else ""]
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"  # noqa: PLR2004 - three digits tell enough

"""The tables of owners, models and places: their lines in the order that was asked for, a hundred at a time."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exporter.cost.focus_rows import ORIGIN_DIMENSIONS
from exporter.cost.holdings import PAYER, Recommendation
from exporter.cost.ledger import Dimension, Figures, LineKey
from exporter.cost.recommend import totals
from exporter.cost.render import noun, title
from exporter.cost.report import FleetReport, ReportLine, is_apart, total_of
from exporter.model.formatting import model
from exporter.service.data import Book
from exporter.service.page_frame import View, sum_line

LINES = 100
"""Of one page."""
_MOST_APART = 16
_DOWNLOADS = (("CSV", "csv"), ("JSON", "json"), ("HTML", "html"), ("FOCUS", "focus"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a table is of."""

    title: str
    by: tuple[Dimension, ...]
    """Dimensions of its lines, and other facts about them."""
    name: Dimension
    """What a line is called by."""


WORKLOADS = Subject(title="Workloads", by=("cluster", "namespace", "kind", "workload", "team"), name="workload")
_ALONE: tuple[Dimension, ...] = ("team", "namespace", "model", "pool", "cluster")
SUBJECTS: Mapping[str, Subject] = {
    **{name: Subject(title=f"{title(name)}s", by=(name,), name=name) for name in _ALONE},
    "workload": WORKLOADS,
    "node": Subject(title="Nodes", by=("cluster", "node", "pool"), name="node"),
}


def subject_of(name: str) -> Subject:
    """What the page ``/by/name`` is of; a name that is not known is that of a label."""
    return SUBJECTS.get(name) or Subject(title=f"Label {title(name)}", by=(name,), name=name)


class TableRow(NamedTuple):
    """One line of a table; its money is in the currency of the page."""

    name: str
    figures: Figures
    beside: str = ""
    """What else is known of it, in small letters."""
    href: str = ""
    apart: bool = False
    """Some of it has no owner, so that its use is not shown."""
    shared: float = 0.0
    """Money of GPUs without an owner that was spread onto it."""
    of_total: float | None = None
    """Its part of the money, or of the hours where nothing has a price."""


_Sort = Callable[[TableRow, str], float | str]
_SORTS: Mapping[str, tuple[str, _Sort, bool]] = {
    "name": ("", lambda row, _: row.name.casefold() + "\0" + row.beside.casefold(), False),
    "hours": ("GPU-hours", lambda row, _: row.figures.allocated_seconds, True),
    "active": ("Active", lambda row, _: row.figures.active_seconds, True),
    "idle": ("Idle", lambda row, _: row.figures.idle_seconds, True),
    "unknown": ("Unknown", lambda row, _: row.figures.unknown_seconds, True),
    "cost": ("Cost", lambda row, currency: _amount(row, currency, "total") + row.shared, True),
    "idle-cost": ("Idle", lambda row, currency: _amount(row, currency, "idle"), True),
}


def _amount(row: TableRow, currency: str, part: str) -> float:
    """Return a row's money to sort by; what has none comes after what costs nothing."""
    money = row.figures.money.get(currency)
    return float(getattr(money, part)) if money else -1.0


def make_table(
    report: FleetReport, view: View, currency: str, subject: Subject, *, lines: int = LINES
) -> dict[str, object]:
    """The page of the table that was asked for."""
    with_clusters = len({line.key.cluster for line in report.held}) > 1
    rows, apart = (
        [make_row(line, report, view, currency, subject, with_clusters=with_clusters) for line in some]
        for some in (report.held, _apart(report))
    )
    found = _searched(rows, view.search)
    sort = view.sort if view.sort.removeprefix("-") in _SORTS else "-cost" if currency else "-hours"
    key, backwards = _SORTS[sort.removeprefix("-")][1], sort.startswith("-")
    # Names first, so that equal figures stay in one order whichever way they are sorted.
    found.sort(key=lambda row: (row.name, row.beside))
    found.sort(key=lambda row: key(row, currency), reverse=backwards)
    pages = max(1, -(-len(found) // lines))
    page = min(view.page, pages)
    start = (page - 1) * lines
    held, total = total_of(line.figures for line in report.held), report.total
    return {
        "caption": subject.title,
        "columns": _columns(view, sort, currency, subject),
        "rows": found[start : start + lines],
        "apart": apart,
        "held": TableRow("All owners", held) if held.allocated_seconds else None,
        "total": TableRow("Total", total, apart=bool(apart)) if total.allocated_seconds else None,
        "with_shared": report.share_idle != "none",
        "found": len(found),
        "of": len(rows),
        "first": start + 1,
        "page": page,
        "pages": pages,
        "downloads": _downloads(view, subject),
    }


def _downloads(view: View, subject: Subject) -> list[tuple[str, str, str]]:
    """Return names, addresses and file names of every form of a table.

    Without FOCUS where a filter would leave out parts of its split charges, which must sum to the whole.
    """
    of_owners = bool(set(view.filters.wanted) - ORIGIN_DIMENSIONS)
    head = re.sub(r"[^A-Za-z0-9.-]+", "-", f"gpu-cost-{view.window_text}-{subject.name}")
    return [
        (words, view.download(subject.by, form), f"{head}.{'csv' if form == 'focus' else form}")
        for words, form in _DOWNLOADS
        if form != "focus" or not of_owners
    ]


def _apart(report: FleetReport) -> Sequence[ReportLine]:
    """Return the lines without an owner; of a thousand nodes only their sums, which the table's foot can hold."""
    if len(report.apart) <= _MOST_APART:
        return report.apart
    kinds: dict[str, list[ReportLine]] = {}
    for line in report.apart:
        kinds.setdefault(line.key.kind, []).append(line)
    return [sum_line(LineKey(kind=kind), lines) for kind, lines in kinds.items()]


def make_row(
    line: ReportLine, report: FleetReport, view: View, currency: str, subject: Subject, *, with_clusters: bool = False
) -> TableRow:
    """A line as a row."""
    money, total = line.figures.money.get(currency), report.total.money.get(currency)
    if total and total.total:
        of_total = None if money is None else money.total / total.total
    else:
        whole = 0.0 if currency else report.total.allocated_seconds
        of_total = line.figures.allocated_seconds / whole if whole else None
    apart = is_apart(line.key)
    return TableRow(
        name=line.key.kind if apart else name_of(line.key, subject.name),
        figures=line.figures,
        beside=_beside(line.key, subject, view, with_clusters=with_clusters),
        href="" if apart else _href(line.key, subject, view),
        apart=apart,
        shared=line.shared.get(currency, 0.0),
        of_total=of_total,
    )


def name_of(key: LineKey, dimension: Dimension) -> str:
    """What a line is called: the value, or in words that there is none."""
    if dimension == "workload":
        return key.workload or key.namespace or "(no workload)"
    value = key.value(dimension)
    if dimension == "model":
        value = model(value)
    return value or f"(no {noun(dimension)})"


def _beside(key: LineKey, subject: Subject, view: View, *, with_clusters: bool) -> str:
    """Of a workload kind, namespace and team; of a node its pool; of what has no owner here where it was.

    What the page is filtered by is not said again on each line.
    """
    if is_apart(key):
        where = [key.value(name) for name in subject.by if name not in {"kind", "workload", "team"}]
        return " · ".join(model(part) for part in where if part)
    if subject.name not in {"workload", "node"}:
        return ""
    parts = {
        "kind": key.kind if subject.name == "workload" else "",
        "namespace": key.namespace,
        "team": f"team {key.team}" if key.team else "",
        "pool": key.pool,
        "cluster": key.cluster if with_clusters else "",
    }
    return " · ".join(part for name, part in parts.items() if part and len(view.asked.get(name, ())) != 1)


def _href(key: LineKey, subject: Subject, view: View) -> str:
    if subject.name == "workload":
        return view.workload(key) if key.workload or key.kind else view.owner(namespace=key.namespace)
    where = {"cluster": key.cluster} if key.cluster and subject.name == "node" else {}
    return view.owner(**where, **{subject.name: key.value(subject.name)})


def _searched(rows: Sequence[TableRow], search: str) -> list[TableRow]:
    wanted = search.casefold().split()
    if not wanted:
        return list(rows)
    texts = ((row, f"{row.name} {row.beside}".casefold()) for row in rows)
    return [row for row, text in texts if all(word in text for word in wanted)]


def _columns(view: View, sort: str, currency: str, subject: Subject) -> list[tuple[str, str, str]]:
    """Return headings, the addresses that sort by them, and ``aria-sort`` of the one that is sorted by."""
    columns = []
    for name, (words, _, largest_first) in _SORTS.items():
        if name in {"cost", "idle-cost"} and not currency:
            continue
        heading = title(subject.name) if name == "name" else f"{words} {currency}" if "cost" in name else words
        current, descending = sort.removeprefix("-") == name, sort.startswith("-")
        wanted = (not descending) if current else largest_first
        direction = "" if not current else "descending" if descending else "ascending"
        columns.append((heading, view.link(None, sort=("-" if wanted else "") + name), direction))
    return columns


def advised(recommendations: Sequence[Recommendation], view: View) -> list[Recommendation]:
    """Return those within the filters; what a recommendation does not know, as the pool, it is not said to have."""
    return [
        one
        for one in recommendations
        if all(
            not values.isdisjoint(one.nodes if name == "node" else [one.owner.value(name)] if name in PAYER else ())
            for name, values in view.filters.wanted.items()
        )
    ]


async def recommendations(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page of recommendations."""
    report = await book.report(view.window, (), view.filters)
    advice = advised(book.recommendations.value, view)
    return report, {"advice": advice, "savings": sorted(totals(advice).items())}


async def budgets(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page of budgets."""
    report = await book.report(view.window, ())
    return report, {"budgets": book.budgets.value}


async def about(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page that says how the others come about."""
    return await book.report(view.window, ()), {}

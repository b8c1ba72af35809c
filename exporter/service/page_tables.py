"""The tables of owners, models and places: their lines in the order that was asked for, a hundred at a time."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exporter.cost.budgets import BudgetState
from exporter.cost.holdings import Recommendation
from exporter.cost.ledger import Dimension, Figures, LineKey
from exporter.cost.recommend_render import totals
from exporter.cost.render_rows import noun, title
from exporter.cost.report import FleetReport, ReportLine, is_apart, total_of
from exporter.model.formatting import decimal, model
from exporter.service.data import Book
from exporter.service.page_frame import Link, View, sum_line

LINES = 100
"""Of one page."""
_MOST_APART = 16
_OF_PLACES = frozenset({"cluster", "node", "pool", "model"})
_DOWNLOADS = (("CSV", "csv"), ("JSON", "json"), ("HTML", "html"), ("FOCUS", "focus"))


class Download(NamedTuple):
    """A table's data; the name is that of the file where the answer brings none."""

    words: str
    href: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a table is of."""

    title: str
    by: tuple[Dimension, ...]
    """What its lines are told apart by, and what is known of them besides."""
    name: Dimension
    """What a line is called by."""


WORKLOADS = Subject(title="Workloads", by=("cluster", "namespace", "kind", "workload", "team"), name="workload")
SUBJECTS: Mapping[str, Subject] = {
    "team": Subject(title="Teams", by=("team",), name="team"),
    "namespace": Subject(title="Namespaces", by=("namespace",), name="namespace"),
    "workload": WORKLOADS,
    "model": Subject(title="Models", by=("model",), name="model"),
    "pool": Subject(title="Node pools", by=("pool",), name="pool"),
    "cluster": Subject(title="Clusters", by=("cluster",), name="cluster"),
    "node": Subject(title="Nodes", by=("cluster", "node", "pool"), name="node"),
}


def subject_of(name: str) -> Subject:
    """What the page ``/by/name`` is of; a name that is not known is that of a label."""
    return SUBJECTS.get(name) or Subject(title=f"Label {title(name)}", by=(name,), name=name)


class TableRow(NamedTuple):
    """One line of a table."""

    name: str
    beside: str
    """What else is known of it, in small letters."""
    href: str
    figures: Figures
    cost: float | None
    """In the currency of the page; ``None`` where there is none."""
    idle_cost: float | None
    shared: float
    """Money of nobody's GPUs that was spread onto it, in the same currency."""
    of_total: float | None
    """Its part of the money, or of the hours where nothing has a price."""

    @property
    def cost_words(self) -> str:
        """Its money, or that it has no price; a star where a part of it has none. Empty: no money in this currency."""
        if self.cost is None:
            return "no price" if self.figures.unpriced_seconds > 0 and not self.figures.money else ""
        return decimal(self.cost) + ("*" if self.figures.unpriced_seconds > 0 else "")

    @property
    def charged_words(self) -> str:
        """Its money with what was spread onto it; empty where there is neither."""
        if self.cost is None and not self.shared:
            return ""
        return decimal((self.cost or 0.0) + self.shared) + ("*" if self.figures.unpriced_seconds > 0 else "")

    @property
    def parts(self) -> tuple[float, float, float]:
        """Active, idle and unknown as parts of what was held; zeros where nothing was."""
        whole = self.figures.allocated_seconds
        if not whole:
            return (0.0, 0.0, 0.0)
        return tuple(  # type: ignore[return-value]
            seconds / whole
            for seconds in (self.figures.active_seconds, self.figures.idle_seconds, self.figures.unknown_seconds)
        )


class TableColumn(NamedTuple):
    """A column that lines can be put into the order of."""

    words: str
    href: str
    direction: str
    """``ascending``, ``descending`` or ``none``, as ``aria-sort`` has it."""
    number: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table, or the part of it that one page shows."""

    caption: str
    columns: tuple[TableColumn, ...]
    rows: tuple[TableRow, ...]
    apart: tuple[TableRow, ...]
    held: TableRow | None
    """The sum of all rows of all pages, where there are any."""
    total: TableRow | None
    """Of held and apart."""
    with_shared: bool
    found: int
    """Lines of all pages."""
    of: int
    """Lines before the search."""
    first: int
    """Number of the first row shown, from 1."""
    pages: tuple[Link, ...]
    previous: str
    following: str
    downloads: tuple[Download, ...]
    search: str


_Sort = Callable[[TableRow], float | str]
_SORTS: Mapping[str, tuple[str, _Sort, bool]] = {
    "name": ("", lambda row: row.name.casefold() + "\0" + row.beside.casefold(), False),
    "hours": ("GPU-hours", lambda row: row.figures.allocated_seconds, True),
    "active": ("Active", lambda row: row.figures.active_seconds, True),
    "idle": ("Idle", lambda row: row.figures.idle_seconds, True),
    "unknown": ("Unknown", lambda row: row.figures.unknown_seconds, True),
    "cost": ("Cost", lambda row: -1.0 if row.cost is None else row.cost + row.shared, True),
    "idle-cost": ("Idle", lambda row: -1.0 if row.idle_cost is None else row.idle_cost, True),
}


def make_table(report: FleetReport, view: View, currency: str, subject: Subject, *, lines: int = LINES) -> Table:
    """The page of the table that was asked for."""
    with_clusters = len({line.key.cluster for line in report.held}) > 1
    rows = [make_row(line, report, view, currency, subject, with_clusters=with_clusters) for line in report.held]
    found = _searched(rows, view.search)
    sort = view.sort if view.sort.removeprefix("-") in _SORTS else "-cost" if currency else "-hours"
    key, backwards = _SORTS[sort.removeprefix("-")][1], sort.startswith("-")
    # Names first, so that equal figures stay in one order whichever way they are sorted.
    found.sort(key=lambda row: (row.name, row.beside))
    found.sort(key=key, reverse=backwards)
    count = max(1, -(-len(found) // lines))
    page = min(view.page, count)
    start = (page - 1) * lines
    return Table(
        caption=subject.title,
        columns=_columns(view, sort, currency, subject),
        rows=tuple(found[start : start + lines]),
        apart=tuple(
            make_row(line, report, view, currency, subject, with_clusters=with_clusters) for line in _apart(report)
        ),
        held=_sum_row("All owners", total_of(line.figures for line in report.held), currency),
        total=_sum_row("Total", report.total, currency),
        with_shared=report.share_idle != "none",
        found=len(found),
        of=len(rows),
        first=start + 1 if found else 0,
        pages=_pages(view, page, count),
        previous=view.link(None, page=page - 1) if page > 1 else "",
        following=view.link(None, page=page + 1) if page < count else "",
        downloads=_downloads(view, subject),
        search=view.search,
    )


def _downloads(view: View, subject: Subject) -> tuple[Download, ...]:
    """Every form but FOCUS where a filter would leave out parts of its split charges, which must sum to the whole."""
    of_owners = bool(set(view.filters.wanted) - _OF_PLACES)
    head = re.sub(r"[^A-Za-z0-9.-]+", "-", f"gpu-cost-{view.window_text}-{subject.name}")
    return tuple(
        Download(words, view.download(subject.by, form), f"{head}.{'csv' if form == 'focus' else form}")
        for words, form in _DOWNLOADS
        if form != "focus" or not of_owners
    )


def _apart(report: FleetReport) -> Sequence[ReportLine]:
    """What is nobody's, by what the table is by; of a thousand nodes only its sums, which the table's foot can hold."""
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
        beside=_beside(line.key, subject, view, with_clusters=with_clusters),
        href="" if apart else _href(line.key, subject, view),
        figures=line.figures,
        cost=money.total if money else None,
        idle_cost=None if apart or money is None else money.idle,
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


def _columns(view: View, sort: str, currency: str, subject: Subject) -> tuple[TableColumn, ...]:
    columns = []
    for name, (words, _, largest_first) in _SORTS.items():
        if name in {"cost", "idle-cost"} and not currency:
            continue
        heading = title(subject.name) if name == "name" else f"{words} {currency}" if "cost" in name else words
        current = sort.removeprefix("-") == name
        descending = sort.startswith("-")
        wanted = (not descending) if current else largest_first
        direction = "none" if not current else "descending" if descending else "ascending"
        href = view.link(None, sort=("-" if wanted else "") + name)
        columns.append(TableColumn(heading, href, direction, number=name != "name"))
    return tuple(columns)


def _pages(view: View, page: int, count: int) -> tuple[Link, ...]:
    """First, last and those about this one."""
    shown = sorted({1, count, *(number for number in range(page - 2, page + 3) if 1 <= number <= count)})
    return tuple(Link(str(number), view.link(None, page=number), number == page) for number in shown)


def _sum_row(name: str, figures: Figures, currency: str) -> TableRow | None:
    if not figures.allocated_seconds:
        return None
    money = figures.money.get(currency)
    return TableRow(
        name=name,
        beside="",
        href="",
        figures=figures,
        cost=money.total if money else None,
        idle_cost=money.idle if money else None,
        shared=0.0,
        of_total=None,
    )


_LONGEST_BAR_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStanding:
    """How a budget stands, in words and as parts of its amount."""

    state: BudgetState
    words: str
    look: str
    """``ok``, ``warn``, ``bad``: the words say the same."""
    spent_ratio: float | None
    """``None`` where what was spent is not known."""
    projected_ratio: float | None
    scale_ratio: float
    """Where its bar ends: at the amount, or beyond it."""
    owner: str
    href: str


def advised(recommendations: Sequence[Recommendation], view: View) -> list[Recommendation]:
    """Return those within the filters; what a recommendation does not know, as the pool, it is not said to have."""
    return [
        one
        for one in recommendations
        if all(
            not values.isdisjoint(one.nodes if name == "node" else (getattr(one, name, None),))
            for name, values in view.filters.wanted.items()
        )
    ]


def standing(state: BudgetState, view: View) -> BudgetStanding:
    """Words for a budget."""
    amount = state.budget.amount
    spent = state.spent / amount if amount > 0 and state.known else None
    projected = state.projected / amount if state.projected is not None and amount > 0 else None
    if spent is None:
        words, look = "not known", "unknown"
    elif spent >= 1:
        words, look = "spent", "bad"
    elif projected is not None and projected > 1:
        words, look = "will be overspent", "warn"
    elif projected is None:
        words, look = "too early to tell", "unknown"
    else:
        words, look = "on course", "ok"
    owner = ", ".join(f"{noun(name)} {value}" for name, value in state.budget.owner.items())
    return BudgetStanding(
        state=state,
        words=words,
        look=look,
        spent_ratio=spent,
        projected_ratio=projected,
        scale_ratio=min(_LONGEST_BAR_RATIO, max(1.0, spent or 0.0, projected or 0.0)),
        owner=owner or ("all GPUs, held or not" if state.budget.include_unallocated else "all that is held"),
        href=view.owner(**{str(name): value for name, value in state.budget.owner.items()})
        if state.budget.owner
        else view.link("/"),
    )


async def recommendations(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page of recommendations."""
    report = await book.report(view.window, (), view.filters)
    advice = advised(book.recommendations.value, view)
    return report, {"advice": advice, "savings": sorted(totals(advice).items())}


async def budgets(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page of budgets."""
    report = await book.report(view.window, ())
    return report, {"budgets": [standing(state, view) for state in book.budgets.value]}


async def about(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page that says how the others come about."""
    return await book.report(view.window, ()), {}

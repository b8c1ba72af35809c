"""Builds the tables of owners, models and places: sorted lines, a hundred per page."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from exporter.cost.dimensions import APART, Dimension, LineKey
from exporter.cost.focus import ORIGIN_DIMENSIONS
from exporter.cost.holdings import PAYER
from exporter.cost.ledger import NOTHING, Figures
from exporter.cost.live import PriceNow, PriceRows
from exporter.cost.recommend import Recommendation
from exporter.cost.recommend_render import totals
from exporter.cost.render import cost_words, noun, title
from exporter.cost.report import FleetReport, Question, ReportLine, figures_before, sum_line
from exporter.cost.window import HOUR_SECONDS
from exporter.model.formatting import decimal, hours, model, percent
from exporter.model.ledger import NO_SECONDS
from exporter.service.cache import Asked
from exporter.service.charts import whole
from exporter.service.fleet import Fleet
from exporter.service.page_frame import DEFAULT_WINDOW, GROUPS, View

LINES = 100
"""Lines per page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of a table."""

    title: str
    by: tuple[Dimension, ...]
    """Dimensions of the lines, and of other facts about them."""
    name: Dimension
    """Dimension that names a line."""
    is_place: bool = False
    """Whether GPUs without an owner belong to the lines, such as those of a node."""


WORKLOADS = Subject(title="Workloads", by=("cluster", "namespace", "kind", "workload", "team"), name="workload")
PLACES = Subject(title="On which GPUs", by=("model", "pool", "mode"), name="model")
SUBJECTS: Mapping[str, Subject] = {
    **{name: Subject(title=f"{title(name)}s", by=(name,), name=name) for name in ("team", "namespace")},
    **{
        name: Subject(title=f"{title(name)}s", by=(name,), name=name, is_place=True)
        for name in ("model", "pool", "cluster")
    },
    "workload": WORKLOADS,
    "node": Subject(title="Nodes", by=("cluster", "node", "pool"), name="node", is_place=True),
}


FIRST = tuple(Asked(DEFAULT_WINDOW, one) for one in (Question(by=GROUPS, with_series=True), Question(by=WORKLOADS.by)))
"""Reports of the start page, which take long to read."""


def subject_of(name: str) -> Subject:
    """Return the subject of the page ``/by/name``; an unknown name is a label."""
    return SUBJECTS.get(name) or Subject(title=f"Label {title(name)}", by=(name,), name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of a table; its money is in the currency of the page."""

    name: str
    line: ReportLine
    beside: str = ""
    """Secondary facts, shown in small letters."""
    href: str = ""
    length: float = 0.0
    """Length of the bar, 0 to 1: part of the money of the largest row."""
    nobodys: Mapping[str, Figures] = field(default_factory=dict)
    """Figures without an owner in the place of the row, by kind; empty if the row is not a place."""
    prices: Sequence[PriceNow] = ()
    """Rows of the price book that apply to the row."""


class Column(NamedTuple):
    """One column of figures."""

    name: str
    words: str
    """Heading of the column."""
    value: Callable[[TableRow], float | None]
    """Returns the value of a row; ``None`` if the row has no value, or it is unknown."""
    form: Callable[[float], str] = decimal
    special: Callable[[TableRow], str] | None = None
    """Returns the text of a row, shown instead of the value."""
    is_minor: bool = False
    """Whether phones hide the column."""

    def text(self, row: TableRow) -> str:
        """Return the text of a row in this column."""
        if self.special:
            return self.special(row)
        value = self.value(row)
        return "" if value is None else self.form(value)


def columns_of(report: FleetReport, currency: str, subject: Subject, *, is_funnel: bool) -> Iterator[Column]:
    """Yield the columns after the name; for a funnel, held, active and effective amounts."""
    ratio = Column("effective", "Effective %", lambda row: row.line.ratio("effective_ratio"), special=_effective_words)
    if is_funnel:
        yield from (*_of_states(("active", "effective"), ("active", "effective"), currency), ratio)
        return
    signed = "{:+,.2f}".format
    yield from _of_states(("active", "idle", "unknown"), ("idle",), currency)
    if currency and report.question.is_shared:
        yield Column("shared", f"Shared {currency}", lambda row: row.line.shared.get(currency) or None, signed)
        yield Column("charged", f"Charged {currency}", partial(_charged, currency=currency))
    if currency and report.before:
        yield Column("change", f"Change {currency}", lambda row: row.line.change(currency)[1], signed)
    # A table of places with shared money has no room for it.
    if report.owned.seconds.profiled and not (subject.is_place and report.question.is_shared):
        yield ratio
    for kind in APART if subject.is_place else ():
        form = decimal if currency else hours
        yield Column(kind.lower(), f"{kind} {currency}".strip(), partial(_of_nobody, kind, currency), form)
    if subject is PLACES:
        yield Column("rate", f"{currency}/h", partial(_rate, currency=currency), partial(decimal, digits=4))
        yield Column("price", "Price row", lambda _: None, special=_price_words)
    elif not subject.is_place:
        yield Column("part", "Part", partial(_part, report, currency), percent, is_minor=True)


def _of_states(of_hours: Sequence[str], of_money: Sequence[str], currency: str) -> Iterator[Column]:
    """Yield the columns of total hours and money, and those of some states."""
    yield Column("hours", "GPU-hours", lambda row: row.line.figures.seconds.total, hours)
    for name in of_hours:
        key = "effective-hours" if name == "effective" else name
        minor = name != "idle" or bool(currency)
        yield Column(key, name.capitalize(), partial(_of_state, name, None), hours, is_minor=minor)
    if currency:
        cost = partial(_cost_words, currency)
        yield Column("cost", f"Cost {currency}", lambda row: _total(row.line.figures, currency), special=cost)
        for name in of_money:
            yield Column(f"{name}-cost", f"{name.capitalize()} {currency}", partial(_of_state, name, currency))


def _of_state(name: str, currency: str | None, row: TableRow) -> float | None:
    return row.line.by_state(currency)[name]


def _of_nobody(kind: str, currency: str, row: TableRow) -> float | None:
    return _total(row.nobodys.get(kind), currency)


def _cost_words(currency: str, row: TableRow) -> str:
    """Return the cost; a dash if it is in other currencies."""
    return cost_words(row.line, currency, "—" if row.line.figures.seconds.total else "")


def _part(report: FleetReport, currency: str, row: TableRow) -> float | None:
    """Return a row's part of the money, or of the hours without a currency; ``None`` for a sum."""
    part, whole = _total(row.line.figures, currency), report.total.amounts(currency).total
    return None if row.line.owned or part is None or not whole else part / whole


def _total(figures: Figures | None, currency: str) -> float | None:
    """Return the money in a currency, ``None`` without any; the seconds for an empty currency."""
    if figures is None or (currency and currency not in figures.money):
        return None
    return figures.amounts(currency).total


def _effective_words(row: TableRow) -> str:
    """Return the effective part of the profiled time, and the coverage if not all active time was profiled."""
    seconds = row.line.states.seconds if row.line.states else NO_SECONDS
    if seconds.effective_ratio is None or seconds.profiled_ratio is None:
        return ""
    return percent(seconds.effective_ratio) + (f" (of {percent(seconds.profiled_ratio)})" if seconds.unprofiled else "")


def _charged(row: TableRow, currency: str) -> float | None:
    shared, money = row.line.shared.get(currency), row.line.figures.money.get(currency)
    if row.line.owned or not (shared or money):
        return None
    return (money.total if money else 0.0) + (shared or 0.0)


def _rate(row: TableRow, currency: str) -> float | None:
    """Return the mean price of a GPU-hour; ``None`` if the row has no money, or money in another currency."""
    seconds = row.line.figures.seconds.total - row.line.figures.unpriced_seconds
    paid = row.line.figures.money
    return paid[currency].total / seconds * HOUR_SECONDS if list(paid) == [currency] and seconds > 0 else None


def _price_words(row: TableRow) -> str:
    return "; ".join(f"{one.source} at {_range(one)} {one.currency}" for one in row.prices)


def _range(price: PriceNow) -> str:
    most = f" to {decimal(price.most)}" if price.most > price.least else ""
    return f"{decimal(price.least)}{most}"


def make_table(
    report: FleetReport,
    view: View,
    currency: str,
    subject: Subject,
    *,
    lines: int = LINES,
    prices: PriceRows | None = None,
) -> dict[str, object]:
    """Return the values of a page of the table."""
    rows = _rows(report, view, currency, subject, prices or {})
    foot = _foot(report, view, subject)
    found = _searched(rows, view.first("q"))
    columns = list(columns_of(report, currency, subject, is_funnel=view.is_funnel))
    sorts = {column.name: column.value for column in columns}
    sort = view.first("sort")
    if sort.removeprefix("-") not in {*sorts, "name"}:
        sort = "-cost" if currency else "-hours"
    # By name first, so that rows with equal figures keep the same order in both directions.
    found.sort(key=lambda row: (row.name.casefold(), row.beside.casefold()), reverse=sort == "-name")
    if value := sorts.get(sort.removeprefix("-")):
        found.sort(key=lambda row: (value(row) is not None, value(row) or 0.0), reverse=sort.startswith("-"))
    pages = max(1, -(-len(found) // lines))
    page = min(view.page, pages)
    start = (page - 1) * lines
    return {
        "subject": subject,
        "columns": columns,
        "sort": sort,
        "rows": found[start : start + lines],
        "foot": foot,
        "total": report.total.seconds.total > 0,
        "starred": bool(currency)
        and any(row.line.figures.unpriced_seconds and row.line.figures.money for row in (*rows, *foot)),
        "before": report.before.window.label if report.before else "",
        "found": len(found),
        "of": len(rows),
        "first": start + 1,
        "page": page,
        "pages": pages,
        "file": re.sub(r"[^A-Za-z0-9.-]+", "-", f"gpu-cost-{view.window_text}-{subject.name}"),
        # Other filters would remove parts of FOCUS' split charges, which must sum to the whole.
        "has_focus": set(view.question.filters.wanted) <= ORIGIN_DIMENSIONS,
    }


def _foot(report: FleetReport, view: View, subject: Subject) -> list[TableRow]:
    """Return the rows below those of owners: the sum of owners, lines without an owner, and the total."""
    before, nobodys = report.before, _apart(report, subject)
    earlier = {line.key: line.figures for line in _apart(before, subject)} if before else {}
    apart = [make_row(replace(line, before=earlier.get(line.key, NOTHING)), view, subject) for line in nobodys]
    owned = replace(report.sum_of_lines, figures=report.owned, before=before.owned if before else NOTHING)
    kinds = {line.key.kind: line.figures for line in nobodys}
    return [
        *([TableRow(name="All owners", line=owned)] if apart and report.owned.seconds.total else []),
        *apart,
        *([TableRow(name="Total", line=report.sum_of_lines, nobodys=kinds)] if report.total.seconds.total else []),
    ]


def _rows(report: FleetReport, view: View, currency: str, subject: Subject, prices: PriceRows) -> list[TableRow]:
    """Return the rows of owners; rows of places include their time without an owner."""
    nobodys: dict[LineKey, dict[str, Figures]] = {}
    for line in report.apart if subject.is_place else ():
        nobodys.setdefault(line.key._replace(kind=""), {})[line.key.kind] = line.figures
    held, earlier, value = {line.key for line in report.held}, figures_before(report), whole(currency)
    free = [ReportLine(key=key, figures=NOTHING, before=earlier(key)) for key in nobodys if key not in held]
    lines = [*report.held, *free]
    most = max((value(line.figures) for line in lines), default=0.0)
    with_clusters = len({line.key.cluster for line in lines}) > 1
    return [
        replace(
            make_row(line, view, subject),
            name=name,
            beside=_beside(
                line.key, subject, view, with_cluster=with_clusters and name == name_of(line.key, subject.name)
            ),
            length=value(line.figures) / most if most else 0.0,
            nobodys=nobodys.get(line.key, {}),
            prices=prices.get((line.key.model, line.key.pool), ()),
        )
        for name, line in zip(names_of(lines, subject), lines, strict=True)
    ]


def names_of(lines: Sequence[ReportLine], subject: Subject) -> list[str]:
    """Return the names of lines; lines with the same name get their cluster."""
    names = [name_of(line.key, subject.name) for line in lines]
    counts = Counter(names)
    return [
        f"{name} ({line.key.cluster})" if counts[name] > 1 and line.key.cluster else name
        for name, line in zip(names, lines, strict=True)
    ]


def _apart(report: FleetReport, subject: Subject) -> Sequence[ReportLine]:
    """Return the lines without an owner; for places, whose columns show them, only their sums."""
    if not subject.is_place:
        return report.apart
    kinds: dict[str, list[ReportLine]] = {}
    for line in report.apart:
        kinds.setdefault(line.key.kind, []).append(line)
    return [sum_line(LineKey(kind=kind), lines) for kind, lines in kinds.items()]


def make_row(line: ReportLine, view: View, subject: Subject) -> TableRow:
    """Convert a line to a row."""
    return TableRow(
        name=name_of(line.key, subject.name),
        line=line,
        beside=_beside(line.key, subject, view),
        href="" if line.key.is_apart else _href(line.key, subject, view),
    )


def name_of(key: LineKey, dimension: Dimension) -> str:
    """Return the name of a line: the value, or a placeholder for an empty value."""
    if key.is_apart:
        return key.kind
    if dimension == "workload":
        return "/".join(filter(None, (key.namespace, key.workload))) or "(no workload)"
    value = key.value(dimension)
    if dimension == "model":
        value = model(value)
    return value or f"(no {noun(dimension)})"


def _beside(key: LineKey, subject: Subject, view: View, *, with_cluster: bool = False) -> str:
    """Return secondary facts: kind, team and cluster of a workload, pool of a node, place of a line without an owner.

    Values in the filters of the page are not repeated on each line.
    """
    if key.is_apart or subject is PLACES:
        where = [key.value(name) for name in subject.by if name not in {"kind", "workload", "team"}]
        where = where if key.is_apart else [key.pool, key.mode]
        return "" if subject.is_place else " · ".join(model(part) for part in where if part)
    if subject.name not in {"workload", "node"}:
        return ""
    parts = {
        "kind": key.kind if subject.name == "workload" else "",
        "team": f"team {key.team}" if key.team else "",
        "pool": key.pool,
        "cluster": key.cluster if with_cluster else "",
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


def advised(recommendations: Sequence[Recommendation], view: View) -> list[Recommendation]:
    """Return the recommendations within the filters; a filter on an unknown dimension, such as pool, excludes all."""
    return [
        one
        for one in recommendations
        if all(
            not values.isdisjoint(one.nodes if name == "node" else [one.owner.value(name)] if name in PAYER else ())
            for name, values in view.question.filters.wanted.items()
        )
    ]


async def recommendations(fleet: Fleet, view: View) -> tuple[FleetReport, dict[str, object]]:
    """Return report and values of the page of recommendations."""
    report = await fleet.report(view.window, view.about())
    advice = advised(fleet.recommendations.value, view)
    return report, {"advice": advice, "savings": sorted(totals(advice).items())}


async def plain(fleet: Fleet, view: View) -> tuple[FleetReport, dict[str, object]]:
    """Return report and values of a page that does not depend on the question."""
    return await fleet.report(view.window, Question()), {}

"""The first page: what was spent, what will be, how much of it did work, and where to begin."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from exporter.report.budget.values import BudgetState
from exporter.report.fleet.costs import is_part
from exporter.report.fleet.report import FleetReport, ReportLine
from exporter.report.fleet.values import DAY_SECONDS, HOUR_SECONDS, Figures
from exporter.report.service.book import Book, Funnel
from exporter.report.service.charts import uses
from exporter.report.service.readings import Question
from exporter.report.service.view_advice import advised, standing
from exporter.report.service.view_frame import chosen_currency
from exporter.report.service.view_groups import GROUPS, groups, read, summed, with_days
from exporter.report.service.view_query import DEFAULT_WINDOW, View
from exporter.report.service.view_table import SUBJECTS, WORKLOADS, Row, make_row

_LARGEST, _WASTE, _ADVICE = 5, 8, 5
_AT_WORK_RATIO = 0.05
_TOLD_GPUS = 0.05
"""A day with less activity than this was one of waste."""
_WASTE_LEAST_SECONDS = HOUR_SECONDS
_RANKED = ("team", "namespace", "model")


class Step(NamedTuple):
    """A step of the funnel."""

    words: str
    meaning: str
    gpus: float
    ratio: float
    """Of the first step."""
    look: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """An owner whose GPUs were idle."""

    row: Row
    idle_ratio: float
    """Of what it held and was measured."""
    since_seconds: float | None
    """Start of the first day of the window on which it held GPUs; ``None``: longer than the window."""
    until_seconds: float | None
    """Start of the last such day; ``None``: it held GPUs on the window's last day, too."""
    at_work_seconds: float | None
    """Start of the last day on which its GPUs were at work; ``None``: on none."""


class Ranking(NamedTuple):
    """The dearest of a sort."""

    title: str
    href: str
    rows: tuple[Row, ...]
    more: int


def questions() -> tuple[Question, ...]:
    """What the page of a first visit asks the book for, and takes long."""
    return tuple(
        Question(
            name=DEFAULT_WINDOW,
            by=by,
            filters=frozenset(),
            share_idle="none",
            share_unallocated=False,
            with_series=with_series,
        )
        for by, with_series in ((GROUPS, True), (WORKLOADS.by, False))
    )


async def overview(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The fleet's report, and what the template shows."""
    total, workloads = await asyncio.gather(groups(book, view), read(book, view, WORKLOADS.by))
    currency = chosen_currency(total, view)
    wasteful = await with_days(book, view, workloads, _wasteful(workloads, currency))
    ranked = await asyncio.gather(*(summed(book, view, SUBJECTS[name].by) for name in _RANKED))
    at_work = await book.at_work_ratio(total.window, total.filters)
    starts = [period.start_seconds for period in total.periods]
    months = [] if view.filters.wanted else await book.months()
    advice = advised(book.recommendations(), view)
    return total, {
        "month": next((month for month in months if month.currency == currency or not currency), None),
        "budgets": [] if view.filters.wanted else [standing(state, view) for state in _budgets(book.budgets())],
        "cost": total.total.money.get(currency),
        "figures": total.total,
        "idle_cost": sum(line.figures.money_in(currency).idle for line in total.held),
        "funnel": _steps(funnel(total, view.now_seconds, at_work), whole=not is_part(view.filters)),
        "chart": uses(total, currency, with_apart=True),
        "waste": [_waste(line, starts, workloads, view, currency) for line in wasteful],
        "advice": advice[:_ADVICE],
        "advice_more": max(0, len(advice) - _ADVICE),
        "rankings": [_ranking(report, view, currency, name) for name, report in zip(_RANKED, ranked, strict=True)],
    }


def _budgets(states: Sequence[BudgetState]) -> list[BudgetState]:
    """Those nearest to their end first."""
    return sorted(states, key=lambda state: -_used(state))[:_LARGEST]


def _used(state: BudgetState) -> float:
    largest = max(state.spent, state.projected or 0.0)
    return largest / state.budget.amount if state.budget.amount > 0 else 0.0


def funnel(report: FleetReport, now_seconds: float, at_work_ratio: float | None) -> Funnel | None:
    """Mean numbers of GPUs over the recorded hours; ``None`` where there are none."""
    trust, window = report.trust, report.window
    over = min(window.end_seconds, now_seconds) - window.start_seconds
    if not trust.recorded_hours or not trust.expected_hours or over <= 0:
        return None
    # Hours of several clusters run side by side: what counts is the part of all expected hours.
    seconds = over // HOUR_SECONDS * HOUR_SECONDS * (trust.recorded_hours / trust.expected_hours)
    if seconds <= 0:
        return None
    held = [line.figures for line in report.held]
    allocated = sum(figures.allocated_seconds for figures in held) / seconds
    return Funnel(
        total=trust.capacity_seconds / seconds,
        allocated=allocated,
        at_work=None if at_work_ratio is None else allocated * at_work_ratio,
        effective=sum(figures.active_seconds for figures in held) / seconds,
        unknown=sum(figures.unknown_seconds for figures in held) / seconds,
    )


def _steps(of: Funnel | None, *, whole: bool) -> list[Step]:
    """From all GPUs to those at work; without the first step where only a part of the fleet is shown."""
    if of is None:
        return []
    unknown = f"; what {of.unknown:.1f} of them did is not known" if of.unknown >= _TOLD_GPUS else ""
    steps = [("Allocated", f"held by owners{unknown}", of.allocated, "held")]
    if of.at_work is not None:
        steps.append(("Active", "at work for 5 % of the time or more", of.at_work, "measured"))
    steps.append(("Effective", "active in the tables: half busy counts half", of.effective, "active"))
    if whole:
        steps.insert(0, ("Total", "there and metered, on average", of.total, "total"))
    first = steps[0][2]
    return [
        Step(words, meaning, count, min(1.0, count / first) if first > 0 else 0.0, look)
        for words, meaning, count, look in steps
    ]


def _wasteful(report: FleetReport, currency: str) -> list[ReportLine]:
    """Owners with the most idle money, or idle hours where nothing has a price."""

    def size(line: ReportLine) -> float:
        money = line.figures.money.get(currency)
        return money.idle if money else 0.0 if currency else line.figures.idle_seconds

    lines = [line for line in report.held if line.figures.idle_seconds >= _WASTE_LEAST_SECONDS and size(line) > 0]
    return sorted(lines, key=size, reverse=True)[:_WASTE]


def _waste(line: ReportLine, starts: Sequence[int], report: FleetReport, view: View, currency: str) -> Waste:
    figures = line.figures
    held = [start for start, of_day in zip(starts, line.series, strict=False) if of_day.allocated_seconds > 0]
    at_work = [start for start, of_day in zip(starts, line.series, strict=False) if _was_at_work(of_day)]
    first = held[0] if held else None
    last = held[-1] if held and starts and held[-1] < starts[-1] else None
    return Waste(
        row=make_row(line, report, view, currency, WORKLOADS),
        idle_ratio=figures.idle_seconds / (figures.active_seconds + figures.idle_seconds),
        since_seconds=None if first is None or first < report.window.start_seconds + DAY_SECONDS else first,
        until_seconds=last,
        at_work_seconds=at_work[-1] if at_work else None,
    )


def _was_at_work(figures: Figures) -> bool:
    measured = figures.active_seconds + figures.idle_seconds
    return measured > 0 and figures.active_seconds / measured >= _AT_WORK_RATIO


def _ranking(report: FleetReport, view: View, currency: str, name: str) -> Ranking:
    subject = SUBJECTS[name]
    priced = [line for line in report.held if not currency or currency in line.figures.money]
    rows = [make_row(line, report, view, currency, subject) for line in priced]
    if currency:
        rows.sort(key=lambda row: -(row.cost or 0.0))
    shown = tuple(rows[:_LARGEST])
    return Ranking(subject.title, view.link(f"/by/{name}"), shown, max(0, len(report.held) - len(shown)))

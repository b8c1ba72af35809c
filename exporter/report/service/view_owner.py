"""The pages of tables, and of one team, namespace, workload or place: its days, its workloads, its pods and devices."""

import asyncio
from collections.abc import Sequence

from exporter.errors import PrometheusError
from exporter.report.fleet.costs import total_of
from exporter.report.fleet.live import LivePod
from exporter.report.fleet.report import FleetReport, ReportLine
from exporter.report.fleet.values import LABEL, Dimension
from exporter.report.render.rows import noun, title
from exporter.report.service.book import Book
from exporter.report.service.charts import largest, uses
from exporter.report.service.view_advice import advised
from exporter.report.service.view_frame import Link, chosen_currency
from exporter.report.service.view_groups import read, summed, with_days
from exporter.report.service.view_query import NONE, View, dimensions_in
from exporter.report.service.view_table import WORKLOADS, Subject, make_row, make_table, name_of, subject_of

_DRAWN, _FEW, _PODS = 8, 25, 200
_PLACES = Subject(title="Models and node pools", by=("model", "pool", "mode"), name="model")
_SUBJECTS: tuple[Dimension, ...] = ("workload", "namespace", "model", "node", "pool", "team", "cluster")
"""What a page can be on, the narrowest first, labels between pool and team."""
_OF_PODS: tuple[Dimension, ...] = ("namespace", "workload", "node")
"""Whose pods are asked for: a whole team or cluster would be a list that nobody reads."""


async def table(book: Book, view: View, name: str) -> tuple[FleetReport, dict[str, object]]:
    """A page of ``SUBJECTS``."""
    subject = subject_of(name)
    if subject is WORKLOADS:
        report, whole = await asyncio.gather(read(book, view, subject.by), summed(book, view, ()))
    else:
        report = whole = await summed(book, view, subject.by)
    currency = chosen_currency(report, view)
    drawn = [line for line in report.held if not currency or currency in line.figures.money][:_DRAWN]
    if subject is WORKLOADS and drawn:
        drawn = await with_days(book, view, report, drawn)
    names = _drawn_names(drawn, subject)
    return report, {
        "subject": subject,
        # Thousands of lines are not to keep other visitors waiting.
        "table": await asyncio.to_thread(make_table, report, view, currency, subject),
        "chart": largest(whole, currency, names, more=len(report.held) > len(names)),
    }


def _drawn_names(lines: Sequence[ReportLine], subject: Subject) -> list[tuple[str, ReportLine]]:
    """Names in a legend, with the cluster where two would be the same."""
    names = [_drawn_name(line, name_of(line.key, subject.name)) for line in lines]
    return [
        (f"{name} ({line.key.cluster})" if names.count(name) > 1 and line.key.cluster else name, line)
        for name, line in zip(names, lines, strict=True)
    ]


def _drawn_name(line: ReportLine, name: str) -> str:
    """A name in a legend, where nothing stands beside it."""
    return f"{line.key.namespace}/{name}" if line.key.workload and line.key.namespace else name


async def owner(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page on what the filters say."""
    report, places, days, (pods, problem) = await asyncio.gather(
        read(book, view, WORKLOADS.by),
        read(book, view, _PLACES.by),
        read(book, view, (), with_series=True),
        _pods(book, view),
    )
    currency = chosen_currency(report, view)
    held = total_of(line.figures for line in report.held)
    return report, {
        "title": _title(view),
        "crumbs": _crumbs(view),
        "team": _team(report),
        "figures": held,
        "recorded": report.total.allocated_seconds > 0,
        "cost": held.money.get(currency),
        "apart": total_of(line.figures for line in report.apart),
        "idle_cost": sum(line.figures.money_in(currency).idle for line in report.held),
        "shared": sum(line.shared.get(currency, 0.0) for line in report.held),
        "chart": uses(days, currency, with_apart=True),
        "table": None
        if "workload" in view.asked
        else await asyncio.to_thread(make_table, report, view, currency, WORKLOADS, lines=_FEW),
        "all_href": view.link("/by/workload"),
        "places": [
            (line.key, make_row(line, places, view, currency, _PLACES)) for line in (*places.held, *places.apart)
        ],
        "pods": pods[:_PODS],
        "pods_more": max(0, len(pods) - _PODS),
        "pods_asked": _asks_pods(view),
        "pods_problem": problem,
        "advice": advised(book.recommendations(), view),
    }


async def _pods(book: Book, view: View) -> tuple[Sequence[LivePod], str]:
    if not _asks_pods(view):
        return (), ""
    try:
        return await book.pods(view.filters), ""
    except PrometheusError as error:
        return (), str(error)


def _asks_pods(view: View) -> bool:
    return any(name in view.filters.wanted for name in _OF_PODS)


def _named(view: View, name: Dimension) -> str:
    return " or ".join(f"(no {noun(name)})" if value == NONE else value for value in view.asked[name])


def _title(view: View) -> tuple[str, str]:
    """What it is, and its name."""
    for name in _subjects(view):
        kind = view.asked.get("kind") if name == "workload" else None
        return (kind[0] if kind and kind[0] != NONE else title(name), _named(view, name))
    return "Fleet", "Everything"


def _subjects(view: View) -> list[Dimension]:
    """What the page is on, the narrowest first."""
    labels = (name for name in view.asked if name.startswith(LABEL))
    return [name for name in (*_SUBJECTS[:5], *labels, *_SUBJECTS[5:]) if name in view.asked]


def _crumbs(view: View) -> list[Link]:
    """The way here, from the fleet inwards."""
    crumbs = [Link("Overview", view.menu("/"))]
    so_far: dict[str, str | None] = dict.fromkeys(dimensions_in(view.asked))
    here = _subjects(view)[::-1]
    for name in here[:-1]:
        so_far[name] = view.asked[name][0]
        crumbs.append(Link(f"{title(name)} {_named(view, name)}", view.link(None, **so_far)))
    return crumbs


def _team(report: FleetReport) -> str:
    teams = {line.key.team for line in report.held}
    return teams.pop() if len(teams) == 1 else ""

"""Reports of a page from as few readings as can be: one that tells groups apart serves every sum over them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from exporter.report.fleet.costs import group_of, is_apart, total_of
from exporter.report.fleet.report import FleetReport, ReportLine
from exporter.report.fleet.values import Dimension, Filters, LineKey
from exporter.report.service.book import Book
from exporter.report.service.view_query import NONE, View

GROUPS: tuple[Dimension, ...] = ("cluster", "namespace", "team", "model")
"""Few enough lines in any fleet to be had with their days, and what the filters of every page offer."""
MOST_CHOICES = 500
_OF_A_WORKLOAD: tuple[Dimension, ...] = ("namespace", "workload")


async def groups(book: Book, view: View) -> FleetReport:
    """What is asked for by ``GROUPS``, day by day."""
    return await read(book, view, GROUPS, with_series=True)


async def read(book: Book, view: View, by: Sequence[Dimension], *, with_series: bool = False) -> FleetReport:
    """What is asked for by any dimensions."""
    return await book.report(
        view.window,
        tuple(by),
        view.filters,
        share_idle=view.share_idle,
        share_unallocated=view.share_unallocated,
        with_series=with_series,
    )


async def everything(book: Book, view: View) -> FleetReport:
    """All of the window by ``GROUPS``, whatever is asked for."""
    return await book.report(view.window, GROUPS, Filters(), with_series=True)


def usual_currency(report: FleetReport) -> str:
    """The currency that most GPU-hours were paid in; empty where nothing has a price."""
    seconds = dict.fromkeys(report.currencies, 0.0)
    for line in report.held:
        for currency in line.figures.money:
            seconds[currency] += line.figures.allocated_seconds
    return max(seconds, key=lambda currency: seconds[currency], default="")


def choices(report: FleetReport) -> Mapping[Dimension, tuple[str, ...]]:
    """What the filters can be set to: what there is in a report by ``GROUPS``, in the order of the alphabet."""
    lines = (*report.held, *report.apart)
    found: dict[Dimension, list[str]] = {
        name: sorted({str(getattr(line.key, name)) for line in lines}) for name in GROUPS
    }
    return {name: tuple(value or NONE for value in values[:MOST_CHOICES]) for name, values in found.items()}


async def summed(book: Book, view: View, by: Sequence[Dimension]) -> FleetReport:
    """The report day by day at some of ``GROUPS``, summed from the one at all of them where that is the same."""
    if view.share_idle != "none" or not set(by) <= set(GROUPS):
        # What is spread evenly depends on how many lines there are.
        return await read(book, view, by, with_series=True)
    report = await groups(book, view)
    return replace(report, by=tuple(by), held=_regrouped(report.held, by), apart=_regrouped(report.apart, by))


async def with_days(book: Book, view: View, report: FleetReport, lines: Sequence[ReportLine]) -> list[ReportLine]:
    """Lines of a report on workloads that was read without days, now with them, in the same order.

    Thousands of workloads with their days would be a lot to read for the few that are shown.
    """
    if not lines:
        return []
    wanted = dict(view.filters.wanted)
    for name in _OF_A_WORKLOAD:
        wanted[name] = frozenset(str(getattr(line.key, name)) for line in lines)
    some = await book.report(view.window, report.by, Filters(wanted=wanted), with_series=True)
    series = {line.key: line.series for line in some.held}
    return [replace(line, series=series.get(line.key, ())) for line in lines]


def _regrouped(lines: Iterable[ReportLine], by: Sequence[Dimension]) -> tuple[ReportLine, ...]:
    found: dict[LineKey, list[ReportLine]] = {}
    for line in lines:
        found.setdefault(group_of(line.key, by), []).append(line)
    summed_lines = [sum_line(key, many) for key, many in found.items()]
    if lines and is_apart(next(iter(found))):
        return tuple(summed_lines)
    return tuple(sorted(summed_lines, key=_rank))


def _rank(line: ReportLine) -> tuple[float, float, LineKey]:
    cost = sum(money.total for money in line.figures.money.values())
    return (-cost, -line.figures.allocated_seconds, line.key)


def sum_line(key: LineKey, lines: Sequence[ReportLine]) -> ReportLine:
    """One line for several, with what was shared onto them or taken from them, and their days where all have them."""
    if len(lines) == 1:
        return replace(lines[0], key=key)
    periods = zip(*(line.series for line in lines), strict=True)
    shared: dict[str, float] = {}
    for line in lines:
        for currency, money in line.shared.items():
            shared[currency] = shared.get(currency, 0.0) + money
    return ReportLine(
        key=key,
        figures=total_of(line.figures for line in lines),
        shared=shared,
        series=tuple(total_of(figures) for figures in periods),
    )

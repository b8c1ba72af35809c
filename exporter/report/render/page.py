"""A fleet's report as one HTML file: for mails, for print, for keeping; no script, nothing loaded from anywhere."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from exporter.report.fleet.costs import total_of
from exporter.report.fleet.report import FleetReport, ReportLine
from exporter.report.fleet.values import UNATTRIBUTED
from exporter.report.render.escaping import render
from exporter.report.render.foot import remarks
from exporter.report.render.rows import Row, number_titles, numbers, rows, titles
from exporter.report.render.words import HOUR, clean, decimal, digits_of, encodable, minute, percent

_WITH_BARS = ("held", "apart")
_PARTS = (
    ("Active", "active"),
    ("Idle", "idle"),
    ("Unknown", "unknown"),
    ("Unattributed", "nobody"),
    ("Unallocated", "free"),
)
"""What all GPU-seconds and all money consist of, and how each is coloured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A part of a bar."""

    name: str
    css: str
    width_percent: float
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A bar of pieces under a heading."""

    title: str
    value: str
    pieces: tuple[_Piece, ...]


def write_html(report: FleetReport, stream: TextIO, top: int | None = None) -> None:
    """One document in UTF-8, light and dark as the reader's device is.

    Raises:
        ExporterError: jinja2 is not installed.
    """
    digits = digits_of(report.trust.capacity_seconds)
    shown = rows(report, top)
    dearest = max((_weight(row, report) for row in shown if row.sort in _WITH_BARS), default=0.0)
    window = report.window
    values = {
        "simulated": report.simulated,
        "label": clean(window.label),
        "period": f"{minute(window.start_seconds)} to {minute(window.end_seconds)} UTC",
        "bars": [*_money_bars(report), _time_bar(report, digits)],
        "titles": titles(report),
        "number_titles": number_titles(report),
        "rows": [(row, numbers(row, report, digits), _row_pieces(row, report, dearest)) for row in shown],
        "remarks": list(remarks(report)),
    }
    stream.write(encodable(render("exporter.report.render", "report.html", values)))


def _money_bars(report: FleetReport) -> Iterator[_Bar]:
    for currency in report.currencies:
        held, unattributed, unallocated = (total_of(line.figures for line in lines) for lines in _thirds(report))
        own = held.money_in(currency)
        apart = (unattributed.money_in(currency).total, unallocated.money_in(currency).total)
        amounts = (own.active, own.idle, own.unknown, *apart)
        yield _bar(f"Cost {currency}", amounts, lambda amount: decimal(amount, 2))


def _time_bar(report: FleetReport, digits: int) -> _Bar:
    held, unattributed, unallocated = (total_of(line.figures for line in lines) for lines in _thirds(report))
    seconds = (
        held.active_seconds,
        held.idle_seconds,
        held.unknown_seconds,
        unattributed.allocated_seconds,
        unallocated.allocated_seconds,
    )
    return _bar("GPU-hours", seconds, lambda value: decimal(value / HOUR, digits))


def _thirds(report: FleetReport) -> tuple[Sequence[ReportLine], Sequence[ReportLine], Sequence[ReportLine]]:
    """Lines of owners, Unattributed and Unallocated."""
    unattributed = [line for line in report.apart if line.key.kind == UNATTRIBUTED]
    unallocated = [line for line in report.apart if line.key.kind != UNATTRIBUTED]
    return report.held, unattributed, unallocated


def _bar(title: str, values: Sequence[float], shown: Callable[[float], str]) -> _Bar:
    whole = sum(values)
    pieces = tuple(
        _piece(name, css, value, whole, shown(value))
        for (name, css), value in zip(_PARTS, values, strict=True)
        if value > 0
    )
    return _Bar(title=title, value=shown(whole), pieces=pieces)


def _piece(name: str, css: str, value: float, whole: float, shown: str) -> _Piece:
    part = value / whole if whole else 0.0
    return _Piece(name=name, css=css, width_percent=round(100 * part, 2), value=f"{shown} ({percent(part, 1)})")


def _weight(row: Row, report: FleetReport) -> float:
    """How long a row's bar is: its money where there is one currency, else its hours."""
    if len(report.currencies) == 1:
        money = row.figures.money.get(report.currencies[0])
        return money.total if money else 0.0
    return row.figures.allocated_seconds


def _row_pieces(row: Row, report: FleetReport, dearest: float) -> tuple[_Piece, ...]:
    whole = row.figures.allocated_seconds
    if row.sort not in _WITH_BARS or not dearest or not whole:
        return ()
    length = _weight(row, report) / dearest
    figures = row.figures
    parts = (
        [("Active", "active", figures.active_seconds), ("Idle", "idle", figures.idle_seconds)]
        if row.sort != "apart"
        else [("", "free", figures.active_seconds + figures.idle_seconds)]
    )
    return tuple(
        _Piece(name=name, css=css, width_percent=round(100 * length * seconds / whole, 2), value="")
        for name, css, seconds in (*parts, ("Unknown", "unknown", figures.unknown_seconds))
        if seconds > 0
    )

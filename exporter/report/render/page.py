"""A fleet's report as one HTML file: for mails, for print, for keeping; no script, nothing loaded from anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from exporter.report.fleet.costs import total_of
from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import UNATTRIBUTED, Figures
from exporter.report.render.escaping import render
from exporter.report.render.foot import remarks
from exporter.report.render.rows import Row, number_titles, numbers, rows, titles
from exporter.report.render.words import HOUR, clean, decimal, digits_of, encodable, minute, percent

_WITH_BARS = ("held", "apart")


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


def _time_bar(report: FleetReport, digits: int) -> _Bar:
    parts = [(name, css, _seconds(figures, css)) for name, css, figures in _parts(report)]
    whole = sum(seconds for _, _, seconds in parts)
    pieces = tuple(
        _piece(name, css, value, whole, decimal(value / HOUR, digits)) for name, css, value in parts if value
    )
    return _Bar(title="GPU-hours", value=decimal(whole / HOUR, digits), pieces=pieces)


def _money_bars(report: FleetReport) -> Iterator[_Bar]:
    for currency in report.currencies:
        parts = [(name, css, _money(figures, css, currency)) for name, css, figures in _parts(report)]
        whole = sum(amount for _, _, amount in parts)
        pieces = tuple(_piece(name, css, value, whole, decimal(value, 2)) for name, css, value in parts if value)
        yield _Bar(title=f"Cost {currency}", value=decimal(whole, 2), pieces=pieces)


def _parts(report: FleetReport) -> list[tuple[str, str, Figures]]:
    """What all GPU-seconds and all money consist of: name, style, and the figures that it is a part of."""
    held = total_of(line.figures for line in report.held)
    unattributed = total_of(line.figures for line in report.apart if line.key.kind == UNATTRIBUTED)
    unallocated = total_of(line.figures for line in report.apart if line.key.kind != UNATTRIBUTED)
    return [
        ("Active", "active", held),
        ("Idle", "idle", held),
        ("Unknown", "unknown", held),
        ("Unattributed", "nobody", unattributed),
        ("Unallocated", "free", unallocated),
    ]


def _seconds(figures: Figures, css: str) -> float:
    known = {"active": figures.active_seconds, "idle": figures.idle_seconds, "unknown": figures.unknown_seconds}
    return known.get(css, figures.allocated_seconds)


def _money(figures: Figures, css: str, currency: str) -> float:
    money = figures.money.get(currency)
    if money is None:
        return 0.0
    if css == "active":
        return figures.active_cost(currency)
    known = {"idle": money.idle, "unknown": figures.unknown_cost(currency)}
    return known.get(css, money.total)


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

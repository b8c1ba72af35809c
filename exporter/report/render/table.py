"""A fleet's report as a table for people."""

from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exporter.report.fleet.report import FleetReport
from exporter.report.render.foot import Tone, remarks
from exporter.report.render.rows import number_titles, numbers, rows, titles
from exporter.report.render.words import digits_of, minute

WIDTH_OF_A_FILE = 160
LABEL_WIDTH = 10
_WIDEST = 240
"""Names of several dimensions, and money in several currencies, spread and charged."""
_STYLES: dict[Tone, str] = {"": "", "note": "dim", "warning": "yellow", "error": "bold red"}
_ROW_STYLES = {"held": "", "more": "dim", "apart": "dim", "total": "bold"}


def write_table(report: FleetReport, stream: TextIO, top: int | None = None) -> None:
    """A table with what nobody held apart, and at its foot how far it can be trusted."""
    console = console_for(stream)
    table = _table(report, top)
    widen(console, table, _WIDEST)
    if report.simulated:
        console.print(Text("SIMULATED FLEET: nothing here is real", style="bold yellow"))
    period = f"{minute(report.window.start_seconds)} to {minute(report.window.end_seconds)} UTC"
    console.print(Text(f"GPU cost, {period}", style="bold"))
    console.print(table)
    for remark in remarks(report):
        line = Text(f"{remark.label:<{LABEL_WIDTH}}", style="bold")
        line.append(remark.words, style=_STYLES[remark.tone])
        console.print(line, soft_wrap=True)


def console_for(stream: TextIO) -> Console:
    """What writes to a terminal, or to a file as wide as ours are."""
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_FILE)


def widen(console: Console, table: Table, most: int = WIDTH_OF_A_FILE) -> None:
    """In a terminal that is too narrow lines are broken; shortened names and figures would be of no use."""
    wanted = Measurement.get(console, console.options.update(max_width=most), table).maximum
    console.width = max(console.width, min(wanted, most))


def _table(report: FleetReport, top: int | None) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for title in titles(report):
        table.add_column(title, overflow="fold")
    for title in number_titles(report):
        table.add_column(title, justify="right", no_wrap=True)
    digits = digits_of(report.trust.capacity_seconds)
    shown = rows(report, top)
    for row, after in zip(shown, [*shown[1:], None], strict=True):
        ends = after is not None and after.sort not in {row.sort, "more"}
        names = (Text(name) for name in row.names)
        table.add_row(*names, *numbers(row, report, digits), end_section=ends, style=_ROW_STYLES[row.sort])
    return table

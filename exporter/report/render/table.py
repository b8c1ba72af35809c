"""A fleet's report as a table for people."""

from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
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
_GAP = "  "
_STYLES: dict[Tone, str] = {"": "", "note": "dim", "warning": "yellow", "error": "bold red"}
_ROW_STYLES = {"held": "", "more": "dim", "apart": "dim", "total": "bold"}


def write_table(report: FleetReport, stream: TextIO, top: int | None = None) -> None:
    """A table with what nobody held apart, and at its foot how far it can be trusted.

    In a terminal that is too narrow lines are broken; shortened names and figures would be of no use.
    """
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if report.simulated:
        console.print(Text("SIMULATED FLEET: nothing here is real", style="bold yellow"))
    period = f"{minute(report.window.start_seconds)} to {minute(report.window.end_seconds)} UTC"
    console.print(Text(f"GPU cost, {period}", style="bold"))
    styled = console.is_terminal
    for line, style in _table(report, top):
        if styled:
            console.print(Text(line, style=style))
        else:
            stream.write(f"{line}\n")  # thousands of rows: a console takes a millisecond for each
    for remark in remarks(report):
        line_of_foot = Text(f"{remark.label:<{LABEL_WIDTH}}", style="bold")
        line_of_foot.append(remark.words, style=_STYLES[remark.tone])
        console.print(line_of_foot)


def console_for(stream: TextIO) -> Console:
    """What writes a table of rich's to a terminal, or to a file as wide as ours are."""
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_FILE)


def widen(console: Console, table: Table) -> None:
    """In a terminal that is too narrow lines are broken; shortened names and figures would be of no use."""
    wanted = Measurement.get(console, console.options.update(max_width=WIDTH_OF_A_FILE), table).maximum
    console.width = max(console.width, min(wanted, WIDTH_OF_A_FILE))


def _table(report: FleetReport, top: int | None) -> Iterator[tuple[str, str]]:
    """Lines with their styles."""
    digits = digits_of(report.trust.capacity_seconds)
    shown = rows(report, top)
    names = len(titles(report))
    head = (*titles(report), *number_titles(report))
    body = [(*row.names, *numbers(row, report, digits)) for row in shown]
    widths = [max(map(cell_len, column)) for column in zip(head, *body, strict=True)]
    yield _line(head, widths, names), "bold"
    yield "─" * (sum(widths) + len(_GAP) * (len(widths) - 1)), ""
    for row, cells, after in zip(shown, body, [*shown[1:], None], strict=True):
        yield _line(cells, widths, names), _ROW_STYLES[row.sort]
        if after is not None and after.sort not in {row.sort, "more"}:
            yield "", ""


def _line(cells: Sequence[str], widths: Sequence[int], names: int) -> str:
    """Names to the left, numbers to the right."""
    padded = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - cell_len(cell))
        padded.append(cell + space if number < names else space + cell)
    return _GAP.join(padded).rstrip()

"""Renders a fleet's report as a table, CSV, JSON or HTML."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exporter.cost.document import write_json
from exporter.cost.ledger import DIMENSIONS, LABEL, Dimension, Figures
from exporter.cost.render_rows import (
    HOUR,
    JOULES_PER_KWH,
    Remark,
    ReportRow,
    Tone,
    charged,
    clean,
    csv_stream,
    encodable,
    failure_words,
    guarded,
    is_shared,
    number_titles,
    numbers,
    remarks,
    rows,
    titles,
)
from exporter.cost.report import FleetReport, filter_words, is_apart, is_part, parts
from exporter.model import Totals
from exporter.model.formatting import hour_digits, iso, minute, percent_down
from exporter.web.templating import render

_KEYS = {"namespace": "owner_namespace", "kind": "owner_kind", "workload": "owner_name"}
"""Names of columns that differ from those of the dimensions."""
CSV_HOURS = ("gpu_hours", "active_hours", "idle_hours", "unknown_hours", "unpriced_hours")

CsvCells = dict[str, str | float]
"""A row by column."""


def write_csv(report: FleetReport, stream: TextIO) -> None:
    """Rows by ``record``: ``Owner``, ``Unattributed``, ``Unallocated``, and then those of no line.

    ``Total`` (of the lines), ``Capacity`` (metered GPU-hours), ``Missing`` (what the lines lack of it), ``Coverage``
    (``ratio`` and in ``remark`` of what), ``Failure``, ``Note``, ``Source``. Empty is not known, or summed over.
    """
    kinds = ("cost", "idle_cost", "shared", "charged") if is_shared(report) else ("cost", "idle_cost")
    money = [f"{kind}_{currency}" for currency in report.currencies for kind in kinds]
    names = [_KEYS.get(dimension, dimension) for dimension in _columns(report)]
    head = ("record", "from", "to", *names, *CSV_HOURS, "energy_kwh", "active_ratio", *money, "ratio", "remark")
    writer = csv.DictWriter(csv_stream(stream), head, restval="", lineterminator="\n")
    writer.writeheader()
    period: CsvCells = {"from": iso(report.window.start_seconds), "to": iso(report.window.end_seconds)}
    for cells in (*_lines(report), *_foot(report)):
        writer.writerow({**period, **cells})


def _lines(report: FleetReport) -> Iterator[CsvCells]:
    for line, charges in zip((*report.held, *report.apart), charged(report), strict=True):
        key = line.key
        yield {
            "record": key.kind if is_apart(key) else "Owner",
            **{_KEYS.get(name, name): guarded(key.value(name)) for name in _columns(report)},
            **_figures(line.figures),
            **{f"shared_{currency}": line.shared.get(currency, 0.0) for currency in charges},
            **{f"charged_{currency}": amount for currency, amount in charges.items()},
        }


def _columns(report: FleetReport) -> tuple[Dimension, ...]:
    """What names a line: every dimension, and the labels that are asked for."""
    return (*DIMENSIONS, *(name for name in report.by if name.startswith(LABEL)))


def _figures(figures: Figures) -> CsvCells:
    ratio = figures.active_ratio
    activity: CsvCells = {} if ratio is None else {"active_ratio": ratio}
    return {**csv_figures(figures, figures.energy_joules), **activity}


def csv_figures(figures: Figures | Totals, energy_joules: float | None) -> CsvCells:
    """Hours, energy and money by column; what is not known has no cell."""
    seconds = (figures.allocated_seconds, figures.active_seconds, figures.idle_seconds, figures.unknown_seconds)
    cells: CsvCells = {
        title: value / HOUR for title, value in zip(CSV_HOURS, (*seconds, figures.unpriced_seconds), strict=True)
    }
    if energy_joules is not None:
        cells["energy_kwh"] = energy_joules / JOULES_PER_KWH
    for currency, money in figures.money.items():
        cells[f"cost_{currency}"], cells[f"idle_cost_{currency}"] = money.total, money.idle
    return cells


def _foot(report: FleetReport) -> Iterator[CsvCells]:
    trust = report.trust
    part = f"a part of the capacity: only {filter_words(report.filters)}" if is_part(report.filters) else ""
    totals: CsvCells = {}
    for charges in charged(report):
        for currency, amount in charges.items():
            name = f"charged_{currency}"
            totals[name] = round(float(totals.get(name, 0.0)) + amount, 2)
    yield {"record": "Total", **_figures(report.total), **totals, "remark": guarded(part)}
    yield {"record": "Capacity", "gpu_hours": trust.capacity_seconds / HOUR}
    if not part:
        yield {"record": "Missing", "gpu_hours": trust.missing_seconds / HOUR}
    hours = f"hours recorded: {trust.recorded_hours} of {trust.expected_hours}"
    covered = (
        (trust.period_coverage_ratio, hours),
        (trust.activity_coverage_ratio, "held GPU-hours with measured activity"),
        (trust.price_coverage_ratio, "GPU-hours with a price"),
    )
    for ratio, words in covered:
        yield {"record": "Coverage", "ratio": "" if ratio is None else ratio, "remark": words}
    told = [("Failure", failure_words(failure)) for failure in trust.failures]
    told += [("Note", note) for note in trust.notes]
    if report.engine:
        told.append(("Source", report.engine))
    told.append(("Prices", report.prices or "of the time of use"))
    if report.simulated:
        told.append(("Simulated", "nothing here is real"))
    for record, words in told:
        yield {"record": record, "remark": guarded(words)}


WIDTH_OF_A_FILE = 160
_LABEL_WIDTH = 10
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
    write_foot(console, remarks(report))


def write_foot(console: Console, found: Iterable[Remark]) -> None:
    """Write remarks below a table, each on a line."""
    for label, words, tone in found:
        line = Text(f"{label:<{_LABEL_WIDTH}}", style="bold")
        console.print(line.append(words, style=_STYLES[tone]), soft_wrap=True)


def console_for(stream: TextIO, table: Table) -> Console:
    """What writes a table of rich's to a terminal, or to a file as wide as ours are.

    In a terminal that is too narrow lines are broken; shortened names and figures would be of no use.
    """
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_FILE)
    wanted = Measurement.get(console, console.options.update(max_width=WIDTH_OF_A_FILE), table).maximum
    console.width = max(console.width, min(wanted, WIDTH_OF_A_FILE))
    return console


def _table(report: FleetReport, top: int | None) -> Iterator[tuple[str, str]]:
    """Lines with their styles."""
    digits = hour_digits(report.trust.capacity_seconds)
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


def write_html(report: FleetReport, stream: TextIO, top: int | None = None) -> None:
    """One document in UTF-8, light and dark as the reader's device is."""
    digits = hour_digits(report.trust.capacity_seconds)
    shown = rows(report, top)
    window = report.window
    currencies = [(f"Cost {currency}", parts(report, currency), 2, 1.0) for currency in report.currencies]
    values = {
        "simulated": report.simulated,
        "label": clean(window.label),
        "period": f"{minute(window.start_seconds)} to {minute(window.end_seconds)} UTC",
        "bars": [*currencies, ("GPU-hours", parts(report), digits, HOUR)],
        "titles": titles(report),
        "number_titles": number_titles(report),
        "rows": [(row, numbers(row, report, digits), _length(row, report)) for row in shown],
        "dearest": max((_length(row, report) for row in shown if row.sort in {"held", "apart"}), default=0.0),
        "remarks": list(remarks(report)),
        "percent_down": percent_down,
    }
    stream.write(encodable(render("exporter.cost", "report.html", values)))


def _length(row: ReportRow, report: FleetReport) -> float:
    """How long a row's bar is: its money where there is one currency, else its hours."""
    if len(report.currencies) == 1:
        return row.figures.money_in(report.currencies[0]).total
    return row.figures.allocated_seconds


Form = Literal["table", "csv", "json", "html"]
FLEET_FORMATS: tuple[Form, ...] = ("table", "csv", "json", "html")


def write_fleet(report: FleetReport, form: Form, stream: TextIO, *, top: int | None = None) -> None:
    """Write the report.

    Args:
        report: What is written.
        form: One of ``FLEET_FORMATS``.
        stream: Takes UTF-8 text.
        top: How many owners' lines ``table`` and ``html`` show before they sum up the rest; the others show all.
    """
    if form in {"table", "html"}:
        (write_table if form == "table" else write_html)(report, stream, top)
    else:
        (write_csv if form == "csv" else write_json)(report, stream)

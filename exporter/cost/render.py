"""Renders a fleet's report as a table, JSON or HTML, which share their rows; or as CSV."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exporter.cost.document import PARTS, document_without_lines, line_documents, money_kinds, parts
from exporter.cost.foot import HOUR, clean, remarks, write_foot
from exporter.cost.ledger import LABEL, Dimension, Figures, LineKey
from exporter.cost.report import FleetReport, ReportLine, change, is_apart, money_sums, sum_line
from exporter.cost.report_csv import encodable, write_csv
from exporter.model import ByState, Totals, state_columns
from exporter.model.formatting import decimal, hour_digits, minute, model, percent_down
from exporter.web.templating import render

Form = Literal["table", "funnel", "csv", "json", "html"]
FLEET_FORMATS: tuple[Form, ...] = ("table", "funnel", "csv", "json", "html")
Sort = Literal["held", "more", "apart", "total"]
_OWNERS: tuple[Dimension, ...] = ("namespace", "kind", "workload", "team")
TITLES: Mapping[Dimension, str] = {
    "cluster": "Cluster",
    "node": "Node",
    "pool": "Node pool",
    "namespace": "Namespace",
    "kind": "Kind",
    "workload": "Workload",
    "team": "Team",
    "model": "Model",
    "mode": "Mode",
}
_UNKNOWN: Mapping[Dimension, str] = {
    "cluster": "(no cluster label)",
    "pool": "(unknown pool)",
    "namespace": "(no namespace)",
    "team": "(no team)",
}


class ReportRow(NamedTuple):
    """One row."""

    names: tuple[str, ...]
    line: ReportLine
    states: Figures | None
    """What the columns of active, idle and unknown show: of owners; ``None`` of a line without an owner."""
    sort: Sort


def titles(report: FleetReport) -> tuple[str, ...]:
    """Of the columns that name a row."""
    return (*map(title, report.by), *(() if _of_owners(report.by) else ("Held by",)))


def number_titles(report: FleetReport, form: Form) -> tuple[str, ...]:
    """Of the columns with numbers, as ``numbers`` gives them."""
    kinds = ["Cost", *map(str.capitalize, (*_money_states(report, form), *_more_money(report, form)))]
    money = [f"{kind} {currency}".strip() for currency in report.currencies or ("",) for kind in kinds]
    of_hours = HOUR_TITLES[:2] if form == "funnel" else (*HOUR_TITLES, "Active %")
    return (*of_hours, *(EFFECTIVE_TITLES if report.owned.seconds.profiled else ()), *money)


def _money_states(report: FleetReport, form: Form) -> tuple[str, ...]:
    """Return the states with a column of money: a page has room for all of them, a terminal has not."""
    steps = ("active", "effective") if report.owned.seconds.profiled else ("active",)
    return {"table": ("idle",), "funnel": steps}.get(form, (*steps, "idle"))


def _more_money(report: FleetReport, form: Form) -> tuple[str, ...]:
    return () if form == "funnel" else money_kinds(report)


def rows(report: FleetReport, top: int | None = None) -> list[ReportRow]:
    """Return rows: owners, dearest first, no owner, the total; beyond ``top`` owners one row has the rest."""
    rest = ("",) * (len(titles(report)) - 1)
    held, more = report.held[:top], report.held[len(report.held) if top is None else top :]
    found = [ReportRow(tuple(_names(line.key, report.by)), line, line.states, "held") for line in held]
    if more:
        line = sum_line(LineKey(), more)
        found.append(ReportRow((f"({len(more):,} more)", *rest), line, line.figures, "more"))
    found += [ReportRow(tuple(_names(line.key, report.by)), line, None, "apart") for line in report.apart]
    total = ReportLine(
        key=LineKey(),
        figures=report.total,
        charged=money_sums(line.charged for line in (*report.held, *report.apart)),
        before=report.before.total if report.before else Figures(),
    )
    return [*found, ReportRow(("Total", *rest), total, report.owned, "total")]


def numbers(row: ReportRow, report: FleetReport, digits: int, form: Form) -> list[str]:
    """The row's numbers as text, in the order of ``number_titles``; empty where they are not known."""
    line = row.line
    shown = hours_of(line.figures, row.states, digits)
    shown.append(_ratio(row.states.seconds.active_ratio if row.states else None))
    if form == "funnel":
        del shown[2:]
    if report.owned.seconds.profiled:
        shown += effective_of(row.states, digits)
    for currency in report.currencies or ("",):
        shown += money_of(line.figures, row.states, currency, _money_states(report, form))
        before, more = change(line.figures, line.before, currency)
        amounts = {"shared": line.shared.get(currency), "charged": line.charged.get(currency), "before": before}
        texts = {kind: "" if amount is None else decimal(amount) for kind, amount in amounts.items()}
        texts["change"] = "" if more is None else f"{more:+,.2f}"
        shown += [texts[kind] for kind in _more_money(report, form)]
    return shown


HOUR_TITLES = ("GPU-hours", "Active", "Idle", "Unknown")
EFFECTIVE_TITLES = ("Effective", "Effective %", "Unprofiled")
"""Of the columns of ``effective_of``, where some active time was profiled."""


def hours_of(figures: Figures | Totals, states: Figures | Totals | None, digits: int) -> list[str]:
    """Hours held, active, idle and unknown, as text; the latter three empty without an owner."""
    parts = _texts(states.seconds if states else None, ("active", "idle", "unknown"), digits, HOUR)
    return [decimal(figures.seconds.total / HOUR, digits), *parts]


def _texts(amounts: ByState | None, names: Sequence[str], digits: int = 2, unit: float = 1.0) -> list[str]:
    """Return some of ``STATE_COLUMNS`` in a unit; empty without an owner, and of effect without a profile."""
    known = state_columns(amounts)
    return ["" if (value := known[name]) is None else decimal(value / unit, digits) for name in names]


def effective_of(states: Figures | Totals | None, digits: int) -> list[str]:
    """Effective hours, their part of the profiled ones, and active hours that were not profiled, as text.

    The first two are empty where nothing was profiled, all without an owner.
    """
    seconds = states.seconds if states else None
    effective, unprofiled = _texts(seconds, ("effective", "unprofiled"), digits, HOUR)
    return [effective, _ratio(seconds.effective_ratio if seconds else None), unprofiled]


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else percent_down(ratio, 0)


def money_of(
    figures: Figures | Totals, states: Figures | Totals | None, currency: str, names: Sequence[str] = ("idle",)
) -> list[str]:
    """Cost, and that of some states, in a currency, as text; a star where a part of the hours has no price."""
    unpriced, money = figures.unpriced_seconds > 0, figures.money.get(currency)
    if money is None:
        cost = "no price" if unpriced and not figures.money else ""
    else:
        cost = decimal(money.total) + ("*" if unpriced else "")
    return [cost, *_texts(states.money.get(currency) if states else None, names)]


def _of_owners(by: Sequence[Dimension]) -> list[Dimension]:
    return [dimension for dimension in by if dimension in _OWNERS or dimension.startswith(LABEL)]


def _names(key: LineKey, by: Sequence[Dimension]) -> Iterator[str]:
    """Yield the texts of the columns that name a line; the first column of owners names lines without an owner."""
    ours, of_owners = key.kind if is_apart(key) else "", _of_owners(by)
    for dimension in by:
        if ours and dimension in of_owners:
            yield ours if dimension == of_owners[0] else ""
        elif dimension == "workload":
            yield workload_name(key, whole="namespace" not in by)
        elif dimension == "model":
            yield clean(model(key.model))
        else:
            unknown = f"(no {title(dimension)})" if dimension.startswith(LABEL) else _UNKNOWN.get(dimension, "")
            yield clean(key.value(dimension)) or unknown
    if not of_owners:
        yield ours or "owners"


def title(dimension: Dimension) -> str:
    """What a dimension is called; a label by its key."""
    return TITLES.get(dimension) or dimension.removeprefix(LABEL)


def noun(dimension: Dimension) -> str:
    """The same within a sentence."""
    return title(dimension).lower() if dimension in TITLES else title(dimension)


def workload_name(key: LineKey, *, whole: bool) -> str:
    """``vision/Job/resnet``, as far as it is known; without the namespace where that stands beside it."""
    parts = (key.namespace if whole else "", key.kind, key.workload)
    return clean("/".join(part for part in parts if part)) or "(no workload)"


WIDTH_OF_A_FILE = 160
_GAP = "  "
_ROW_STYLES = {"held": "", "more": "dim", "apart": "dim", "total": "bold"}


def write_table(report: FleetReport, stream: TextIO, top: int | None = None, form: Form = "table") -> None:
    """Write a table with separate lines without an owner; its foot shows how far it can be trusted.

    In a terminal that is too narrow lines are broken; shortened names and figures would be of no use.
    """
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if report.simulated:
        console.print(Text("SIMULATED FLEET: nothing here is real", style="bold yellow"))
    period = f"{minute(report.window.start_seconds)} to {minute(report.window.end_seconds)} UTC"
    console.print(Text(f"GPU cost, {period}", style="bold"))
    styled = console.is_terminal
    for line, style in _table(report, top, form):
        if styled:
            console.print(Text(line, style=style))
        else:
            stream.write(f"{line}\n")  # thousands of rows: a console takes a millisecond for each
    write_foot(console, remarks(report))


def console_for(stream: TextIO, table: Table, most: int = WIDTH_OF_A_FILE) -> Console:
    """What writes a table of rich's to a terminal, or to a file: as wide as the table, up to ``most``.

    In a terminal that is too narrow lines are broken; shortened names and figures would be of no use.
    """
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_FILE)
    wanted = Measurement.get(console, console.options.update(max_width=most), table).maximum
    console.width = max(console.width, min(wanted, most))
    return console


def _table(report: FleetReport, top: int | None, form: Form) -> Iterator[tuple[str, str]]:
    """Lines with their styles."""
    digits = hour_digits(report.trust.capacity_seconds)
    shown = rows(report, top)
    names = len(titles(report))
    head = (*titles(report), *number_titles(report, form))
    body = [(*row.names, *numbers(row, report, digits, form)) for row in shown]
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
        "names": PARTS,
        "bars": [*currencies, ("GPU-hours", parts(report), digits, HOUR)],
        "titles": titles(report),
        "number_titles": number_titles(report, "html"),
        "rows": [(row, numbers(row, report, digits, "html"), _length(row, report)) for row in shown],
        "dearest": max((_length(row, report) for row in shown if row.sort in {"held", "apart"}), default=0.0),
        "remarks": list(remarks(report)),
        "percent_down": percent_down,
    }
    stream.write(encodable(render("exporter.cost", "report.html", values)))


def _length(row: ReportRow, report: FleetReport) -> float:
    """How long a row's bar is: its money where there is one currency, else its hours."""
    if len(report.currencies) == 1:
        return row.line.figures.money_in(report.currencies[0]).total
    return row.line.figures.seconds.total


def write_json(report: FleetReport, stream: TextIO) -> None:
    """Write one object, each line of ``lines`` on a line of its own."""
    for number, (key, value) in enumerate(document_without_lines(report).items()):
        stream.write(f"{',' if number else '{'}\n  {_text(key)}: ")
        if key != "lines":
            stream.write(_text(value))
            continue
        opening = "["
        for line in line_documents(report):
            stream.write(f"{opening}\n    {_text(line)}")
            opening = ","
        stream.write("[]" if opening == "[" else "\n  ]")
    stream.write("\n}\n")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def _text(value: object) -> str:
    return encodable(_ENCODER.encode(value))


def write_fleet(
    report: FleetReport, form: Form, stream: TextIO, *, top: int | None = None, with_notes: bool = False
) -> None:
    """Write the report.

    Args:
        report: What is written.
        form: One of ``FLEET_FORMATS``.
        stream: Takes UTF-8 text.
        top: How many owners' lines ``table``, ``funnel`` and ``html`` show before they sum up the rest.
        with_notes: CSV has more than owners' lines, too.
    """
    if form in {"table", "funnel"}:
        write_table(report, stream, top, form)
    elif form == "html":
        write_html(report, stream, top)
    elif form == "csv":
        write_csv(report, stream, with_notes=with_notes)
    else:
        write_json(report, stream)

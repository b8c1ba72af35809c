"""Renders a fleet's report as a table or HTML, which share their rows, as JSON, or as CSV without formulas."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TextIO, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exporter.accounting.prices import JOULES_PER_KWH
from exporter.cost.dimensions import DIMENSIONS, LABEL, Dimension, LineKey
from exporter.cost.document import PARTS, document_without_lines, line_documents, money_kinds, parts
from exporter.cost.foot import HOUR, Remark, failure_words, remarks, write_foot
from exporter.cost.report import RATIOS, FleetReport, ReportLine, sum_line
from exporter.model.formatting import clean, decimal, hour_digits, iso, minute, model, percent_down
from exporter.model.ledger import STATE_COLUMNS
from exporter.web.templating import render

Form = Literal["table", "funnel", "csv", "json", "html"]
FLEET_FORMATS: tuple[Form, ...] = ("table", "funnel", "csv", "json", "html")
Sort = Literal["held", "more", "apart", "total"]
_OWNERS: tuple[Dimension, ...] = ("namespace", "kind", "workload", "team")
TITLES: Mapping[Dimension, str] = {**{name: name.capitalize() for name in DIMENSIONS}, "pool": "Node pool"}
_UNKNOWN: Mapping[Dimension, str] = {
    "cluster": "(no cluster label)",
    "pool": "(unknown pool)",
    "namespace": "(no namespace)",
    "team": "(no team)",
}


_FORMULA_START = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\n")
_FORMULA_WITHIN = re.compile(r'(^\s+|[;\t\n|][\s"]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])')
"""A formula sign at the beginning of a cell, for a spreadsheet that splits at another character than the comma."""


def guarded(name: str) -> str:
    """Return the text of a CSV cell that UTF-8 can encode and that no spreadsheet reads as a formula or another row.

    Spreadsheets of many locales split at ``;`` and ignore quotes within a cell, so each part gets its own guard.
    """
    name = encodable(name).replace("\r\n", "\n").replace("\r", "\n")  # Python's writer does not quote a lone \r
    name = _FORMULA_WITHIN.sub(r"\1'", name)
    return f"'{name}" if name.startswith(_FORMULA_START) else name


def csv_stream(stream: TextIO) -> "TextIO | _Terminal":
    """Return the stream for CSV: control characters are removed for a terminal, but not for a file."""
    return _Terminal(stream) if stream.isatty() else stream


class _Terminal:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> object:
        return self._stream.write("\n".join(clean(line) for line in text.split("\n")))


def encodable(name: str) -> str:
    """Return a text that UTF-8 can encode: half a surrogate pair, which JSON can contain, becomes a question mark."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


class ReportRow(NamedTuple):
    """One row of a report."""

    names: tuple[str, ...]
    line: ReportLine
    sort: Sort


def titles(report: FleetReport) -> tuple[str, ...]:
    """Return the titles of the columns that name a row."""
    by = report.question.by
    return (*map(title, by), *(() if _of_owners(by) else ("Held by",)))


def rows(report: FleetReport, top: int | None = None) -> list[ReportRow]:
    """Return rows: owners, dearest first, lines without an owner, the total; one row sums the owners beyond ``top``."""
    by, rest = report.question.by, ("",) * (len(titles(report)) - 1)
    held, more = report.held[:top], report.held[len(report.held) if top is None else top :]
    found = [ReportRow(tuple(_names(line.key, by)), line, "held") for line in held]
    if more:
        found.append(ReportRow((f"({len(more):,} more)", *rest), sum_line(LineKey(), more), "more"))
    found += [ReportRow(tuple(_names(line.key, by)), line, "apart") for line in report.apart]
    return [*found, ReportRow(("Total", *rest), report.sum_of_lines, "total")]


Column: TypeAlias = tuple[str, Callable[[ReportLine], str]]
"""Title of a column, and a function that returns the text of a line in it; empty if the value is unknown."""


def number_columns(report: FleetReport, form: Form) -> Iterator[Column]:
    """Yield the columns of hours, ratios and money; HTML has more of them than a terminal."""
    digits = hour_digits(report.trust.capacity_seconds)
    profiled = report.owned.seconds.profiled > 0
    yield "GPU-hours", lambda line: decimal(line.figures.seconds.total / HOUR, digits)
    yield "Active", partial(_hours, "active", digits)
    if form != "funnel":
        yield "Idle", partial(_hours, "idle", digits)
        yield "Unknown", partial(_hours, "unknown", digits)
        yield "Active %", partial(_ratio, "active_ratio")
    if profiled:
        yield "Effective", partial(_hours, "effective", digits)
        yield "Effective %", partial(_ratio, "effective_ratio")
        yield "Unprofiled", partial(_hours, "unprofiled", digits)
    steps = ("active", "effective") if profiled else ("active",)
    states = {"table": ("idle",), "funnel": steps}.get(form, (*steps, "idle"))
    for currency in report.currencies or ("",):
        yield f"Cost {currency}".rstrip(), partial(cost_words, currency=currency)
        for state in states:
            yield f"{state.capitalize()} {currency}".rstrip(), partial(_money, state, currency)
        for kind in money_kinds(report) if form != "funnel" else ():
            yield f"{kind.capitalize()} {currency}".rstrip(), partial(_more_money, kind, currency)


def _hours(state: str, digits: int, line: ReportLine) -> str:
    seconds = line.by_state()[state]
    return "" if seconds is None else decimal(seconds / HOUR, digits)


def _ratio(name: str, line: ReportLine) -> str:
    ratio = line.ratio(name)
    return "" if ratio is None else percent_down(ratio, 0)


def cost_words(line: ReportLine, currency: str, otherwise: str = "") -> str:
    """Return the cost; a star marks hours without a price."""
    figures = line.figures
    unpriced, money = figures.unpriced_seconds > 0, figures.money.get(currency)
    if money is None:
        return "no price" if unpriced and not figures.money else otherwise
    return decimal(money.total) + ("*" if unpriced else "")


def _money(state: str, currency: str, line: ReportLine) -> str:
    money = line.by_state(currency)[state]
    return "" if money is None else decimal(money)


def _more_money(kind: str, currency: str, line: ReportLine) -> str:
    before, more = line.change(currency)
    if kind == "change":
        return "" if more is None else f"{more:+,.2f}"
    amount = {"shared": line.shared.get(currency), "charged": line.charged.get(currency), "before": before}[kind]
    return "" if amount is None else decimal(amount)


def _of_owners(by: Sequence[Dimension]) -> list[Dimension]:
    return [dimension for dimension in by if dimension in _OWNERS or dimension.startswith(LABEL)]


def _names(key: LineKey, by: Sequence[Dimension]) -> Iterator[str]:
    """Yield the texts of the columns that name a line; the first column of owners names lines without an owner."""
    ours, of_owners = key.kind if key.is_apart else "", _of_owners(by)
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
    """Return the title of a dimension; the title of a label is its key."""
    return TITLES.get(dimension) or dimension.removeprefix(LABEL)


def noun(dimension: Dimension) -> str:
    """Return the title of a dimension for use in a sentence."""
    return title(dimension).lower() if dimension in TITLES else title(dimension)


def workload_name(key: LineKey, *, whole: bool) -> str:
    """Return the name of a workload, ``vision/Job/resnet``, without unknown parts; ``whole`` includes the namespace."""
    parts = (key.namespace if whole else "", key.kind, key.workload)
    return clean("/".join(part for part in parts if part)) or "(no workload)"


WIDTH_OF_A_FILE = 160
_GAP = "  "
_ROW_STYLES = {"held": "", "more": "dim", "apart": "dim", "total": "bold"}


def _period(report: FleetReport) -> str:
    return f"{minute(report.window.start_seconds)} to {minute(report.window.end_seconds)} UTC"


def write_table(
    report: FleetReport,
    stream: TextIO,
    what: Literal["FLEET", "NODE"],
    heading: str,
    foot: Iterable[Remark],
    *,
    top: int | None = None,
    form: Form = "table",
) -> None:
    """Write a table with separate lines for time without an owner, below a heading and above remarks.

    A narrow terminal wraps lines, because shortened names and figures would be useless.
    """
    console = Console(file=stream, highlight=False, soft_wrap=True)
    if report.simulated:
        console.print(Text(f"SIMULATED {what}: nothing here is real", style="bold yellow"))
    console.print(Text(heading, style="bold"))
    styled = console.is_terminal
    for line, style in _table(report, top, form):
        if styled:
            console.print(Text(line, style=style))
        else:
            stream.write(f"{line}\n")  # a console takes a millisecond per line, and a report may have thousands
    write_foot(console, foot)


def console_for(stream: TextIO, table: Table) -> Console:
    """Return a console for a table, on a terminal or a file: as wide as the table, up to ``WIDTH_OF_A_FILE``.

    A narrow terminal wraps lines, because shortened names and figures would be useless.
    """
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDTH_OF_A_FILE)
    wanted = Measurement.get(console, console.options.update(max_width=WIDTH_OF_A_FILE), table).maximum
    console.width = max(console.width, min(wanted, WIDTH_OF_A_FILE))
    return console


def _table(report: FleetReport, top: int | None, form: Form) -> Iterator[tuple[str, str]]:
    """Yield lines with their styles."""
    shown, columns = rows(report, top), list(number_columns(report, form))
    names = len(titles(report))
    head = (*titles(report), *(title for title, _ in columns))
    body = [(*row.names, *(text(row.line) for _, text in columns)) for row in shown]
    widths = [max(map(cell_len, column)) for column in zip(head, *body, strict=True)]
    yield _line(head, widths, names), "bold"
    yield "─" * (sum(widths) + len(_GAP) * (len(widths) - 1)), ""
    for row, cells, after in zip(shown, body, [*shown[1:], None], strict=True):
        yield _line(cells, widths, names), _ROW_STYLES[row.sort]
        if after is not None and after.sort not in {row.sort, "more"}:
            yield "", ""


def _line(cells: Sequence[str], widths: Sequence[int], names: int) -> str:
    """Return a line with names aligned left and numbers aligned right."""
    padded = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - cell_len(cell))
        padded.append(cell + space if number < names else space + cell)
    return _GAP.join(padded).rstrip()


def write_html(report: FleetReport, stream: TextIO, top: int | None = None) -> None:
    """Write one HTML document in UTF-8, in the light or dark scheme of the reader's device."""
    digits = hour_digits(report.trust.capacity_seconds)
    shown, columns = rows(report, top), list(number_columns(report, "html"))
    currencies = [(f"Cost {currency}", parts(report, currency), 2, 1.0) for currency in report.currencies]
    values = {
        "simulated": report.simulated,
        "label": clean(report.window.label),
        "period": _period(report),
        "names": PARTS,
        "bars": [*currencies, ("GPU-hours", parts(report), digits, HOUR)],
        "titles": titles(report),
        "number_titles": [title for title, _ in columns],
        "rows": [(row, [text(row.line) for _, text in columns], _length(row, report)) for row in shown],
        "dearest": max((_length(row, report) for row in shown if row.sort in {"held", "apart"}), default=0.0),
        "remarks": list(remarks(report)),
        "percent_down": percent_down,
    }
    stream.write(encodable(render("exporter.cost", "report.html", values)))


def _length(row: ReportRow, report: FleetReport) -> float:
    """Return the length of a row's bar: its money if there is one currency, otherwise its hours."""
    if len(report.currencies) == 1:
        return row.line.figures.money_in(report.currencies[0]).total
    return row.line.figures.seconds.total


def write_json(report: FleetReport, stream: TextIO) -> None:
    """Write one JSON object, with each element of ``lines`` on a separate line."""
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


_KEYS = {"namespace": "owner_namespace", "kind": "owner_kind", "workload": "owner_name"}
"""Names of columns that differ from their dimensions."""
MONEY_DIGITS, HOUR_DIGITS, _RATIO_DIGITS = 2, 3, 4
"""Decimals in CSV; values in JSON are not rounded."""
CSV_HOURS = ("gpu_hours", *(f"{name}_hours" for name in STATE_COLUMNS), "unpriced_hours")
CSV_MONEY = ("cost", *(f"{name}_cost" for name in STATE_COLUMNS))
CsvCells = dict[str, str | float]
"""Cells of a row, by column."""


def write_csv(report: FleetReport, stream: TextIO, *, with_notes: bool = False) -> None:
    """Write a row for each owner, with rounded values; an empty cell is unknown or summed over.

    With notes, CSV also has the columns ``record``, ``ratio`` and ``remark``. ``record`` is ``Owner``, ``Unattributed``
    or ``Unallocated`` for a line, and ``Total`` for their sum. ``Capacity`` is the metered GPU-hours, ``Missing`` the
    capacity without a line. ``Coverage`` has a ``ratio``, with its meaning in ``remark``. ``Failure``, ``Note``,
    ``Source`` and others follow.
    """
    kinds = dict.fromkeys((*CSV_MONEY, *money_kinds(report)))
    money = [f"{kind}_{currency}" for currency in report.currencies for kind in kinds]
    names = [_KEYS.get(dimension, dimension) for dimension in _columns(report)]
    head = ["from", "to", *names, *CSV_HOURS, "energy_kwh", *RATIOS, *money]
    if with_notes:
        head = ["record", *head, "ratio", "remark"]
    writer = csv.DictWriter(csv_stream(stream), head, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    period: CsvCells = {"from": iso(report.window.start_seconds), "to": iso(report.window.end_seconds)}
    for cells in _csv_lines(report):
        if with_notes or cells["record"] == "Owner":
            writer.writerow({**period, **cells})
    for cells in _csv_foot(report) if with_notes else ():
        writer.writerow({**period, **cells})


def _csv_lines(report: FleetReport) -> Iterator[CsvCells]:
    for line in (*report.held, *report.apart):
        yield {
            "record": line.key.kind if line.key.is_apart else "Owner",
            **{_KEYS.get(name, name): guarded(line.key.value(name)) for name in _columns(report)},
            **_figures(report, line),
            **{f"shared_{currency}": line.shared.get(currency, 0.0) for currency in line.charged},
        }


def _columns(report: FleetReport) -> tuple[Dimension, ...]:
    """Return the dimensions that name a line: all dimensions, and the labels of the question."""
    return (*DIMENSIONS, *(name for name in report.question.by if name.startswith(LABEL)))


def _figures(report: FleetReport, line: ReportLine) -> CsvCells:
    """Return hours, energy, ratios and money by column, rounded; unknown values are left out."""
    figures = line.figures
    seconds = {"gpu": figures.seconds.total, **line.by_state()}
    seconds["unpriced"] = figures.unpriced_seconds
    cells: CsvCells = {
        f"{name}_hours": round(value / HOUR, HOUR_DIGITS) for name, value in seconds.items() if value is not None
    }
    if figures.energy_joules is not None:
        cells["energy_kwh"] = round(figures.energy_joules / JOULES_PER_KWH, HOUR_DIGITS)
    for name in RATIOS:
        if (ratio := line.ratio(name)) is not None:
            cells[name] = round(ratio, _RATIO_DIGITS)
    for currency in report.currencies:
        cost = figures.money.get(currency)
        money = {
            "cost": cost.total if cost else None,
            **{f"{name}_cost": amount for name, amount in line.by_state(currency).items()},
        }
        if report.before:
            money["before"], money["change"] = line.change(currency)
        cells |= {
            f"{kind}_{currency}": round(value, MONEY_DIGITS) for kind, value in money.items() if value is not None
        }
    return cells | {f"charged_{currency}": amount for currency, amount in line.charged.items()}


def _csv_foot(report: FleetReport) -> Iterator[CsvCells]:
    trust, filters = report.trust, report.question.filters
    part = f"a part of the capacity: only {filters.words}" if filters.is_part else ""
    yield {"record": "Total", **_figures(report, report.sum_of_lines), "remark": guarded(part)}
    yield {"record": "Capacity", "gpu_hours": round(trust.capacity_seconds / HOUR, HOUR_DIGITS)}
    if not part:
        yield {"record": "Missing", "gpu_hours": round(trust.missing_seconds / HOUR, HOUR_DIGITS)}
    hours = f"hours recorded: {trust.recorded_hours} of {trust.expected_hours}"
    covered = (
        (trust.period_coverage_ratio, hours),
        (trust.activity_coverage_ratio, "held GPU-hours with measured activity"),
        (trust.price_coverage_ratio, "GPU-hours with a price"),
    )
    for ratio, words in covered:
        if ratio is not None:
            yield {"record": "Coverage", "ratio": round(ratio, _RATIO_DIGITS), "remark": words}
    records = [("Failure", failure_words(failure)) for failure in trust.failures]
    records += [("Note", note) for note in trust.notes]
    if report.engine:
        records.append(("Source", report.engine))
    records.append(("Prices", report.prices or "of the time of use"))
    if report.simulated:
        records.append(("Simulated", "nothing here is real"))
    for record, words in records:
        yield {"record": record, "remark": guarded(words)}


def write_fleet(
    report: FleetReport, form: Form, stream: TextIO, *, top: int | None = None, with_notes: bool = False
) -> None:
    """Write the report.

    Args:
        report: Report to write.
        form: One of ``FLEET_FORMATS``.
        stream: Stream for UTF-8 text.
        top: Maximum number of owners' lines in ``table``, ``funnel`` and ``html``; one line sums the rest.
        with_notes: Whether CSV has other lines in addition to owners' lines.
    """
    if form in {"table", "funnel"}:
        write_table(report, stream, "FLEET", f"GPU cost, {_period(report)}", remarks(report), top=top, form=form)
    elif form == "html":
        write_html(report, stream, top)
    elif form == "csv":
        write_csv(report, stream, with_notes=with_notes)
    else:
        write_json(report, stream)

"""Renders a fleet's report as a table, CSV, JSON or HTML; rows, foot and safe texts are shared by all forms."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from exporter.cost.document import charged, document_without_lines, is_shared, line_documents
from exporter.cost.ledger import DIMENSIONS, LABEL, Dimension, Failure, Figures, LineKey
from exporter.cost.report import FleetReport, filter_words, is_apart, is_part, parts, total_of
from exporter.model import Totals
from exporter.model.formatting import decimal, hour_digits, iso, minute, model, moment, money_with_code, percent_down
from exporter.web.templating import render

HOUR = 3600.0
JOULES_PER_KWH = 3.6e6
_FORMULA_START = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\n")
_FORMULA_WITHIN = re.compile(r'(^\s+|[;\t\n|][\s"]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])')
"""A formula sign where a spreadsheet that splits at another character than the comma sees the begin of a cell."""


def clean(name: str) -> str:
    """A text that cannot steer the terminal or turn the line around that it is written to."""
    return name if name.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in name)


def guarded(name: str) -> str:
    """Return the text of a CSV cell: UTF-8 can encode it, and no spreadsheet reads a formula or another row in it.

    Spreadsheets of many locales split at ``;`` and ignore quotes within a cell, so each part gets its own guard.
    """
    name = encodable(name).replace("\r\n", "\n").replace("\r", "\n")  # Python's writer does not quote a lone \r
    name = _FORMULA_WITHIN.sub(r"\1'", name)
    return f"'{name}" if name.startswith(_FORMULA_START) else name


def csv_stream(stream: TextIO) -> "TextIO | _Terminal":
    """Return where to write CSV: a terminal gets no control characters, a file gets every name as it is."""
    return _Terminal(stream) if stream.isatty() else stream


class _Terminal:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> object:
        return self._stream.write("\n".join(clean(line) for line in text.split("\n")))


def encodable(name: str) -> str:
    """A text that UTF-8 has: half a surrogate pair, which JSON can smuggle in, becomes a question mark."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One row."""

    names: tuple[str, ...]
    figures: Figures
    sort: Sort
    shared: Mapping[str, float] = field(default_factory=dict)
    """By currency; empty where nothing is spread."""
    charged: Mapping[str, float] = field(default_factory=dict)
    """Own and shared money, by currency; the rows' sum to the total's to the hundredth."""


def titles(report: FleetReport) -> tuple[str, ...]:
    """Of the columns that name a row."""
    return (*map(title, report.by), *(() if _of_owners(report.by) else ("Held by",)))


def number_titles(report: FleetReport) -> tuple[str, ...]:
    """Of the columns with numbers, as ``numbers`` gives them."""
    kinds = ("Cost", "Idle", "Shared", "Charged") if is_shared(report) else ("Cost", "Idle")
    money = [f"{kind} {currency}".strip() for currency in report.currencies or ("",) for kind in kinds]
    return ("GPU-hours", "Active", "Idle", "Unknown", "Active %", *money)


def rows(report: FleetReport, top: int | None = None) -> list[ReportRow]:
    """Return rows: owners, dearest first, no owner, the total; beyond ``top`` owners one row has the rest."""
    made = [
        ReportRow(
            names=tuple(_names(line.key, report.by)),
            figures=line.figures,
            sort="apart" if is_apart(line.key) else "held",
            shared=line.shared,
            charged=charges,
        )
        for line, charges in zip((*report.held, *report.apart), charged(report), strict=True)
    ]
    rest = [""] * (len(titles(report)) - 1)
    held, apart = made[: len(report.held)], made[len(report.held) :]
    if top is not None and len(held) > top:
        held = [*held[:top], _summed(held[top:], (f"({len(held) - top:,} more)", *rest))]
    total = ReportRow(
        names=("Total", *rest),
        figures=report.total,
        sort="total",
        charged=_sums([row.charged for row in made]),
    )
    return [*held, *apart, total]


def _summed(many: Sequence[ReportRow], names: tuple[str, ...]) -> ReportRow:
    return ReportRow(
        names=names,
        figures=total_of(row.figures for row in many),
        sort="more",
        shared=_sums([row.shared for row in many]),
        charged=_sums([row.charged for row in many]),
    )


def _sums(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    currencies = {currency for one in many for currency in one}
    return {currency: round(sum(one.get(currency, 0.0) for one in many), 2) for currency in currencies}


def numbers(row: ReportRow, report: FleetReport, digits: int) -> list[str]:
    """The row's numbers as text, in the order of ``number_titles``; empty where they are not known."""
    activity = row.figures.active_ratio
    shown = hours_of(row.figures, digits)
    shown.append("" if activity is None or row.sort == "apart" else percent_down(activity, 0))
    for currency in report.currencies or ("",):
        shown += money_of(row.figures, currency)
        if is_shared(report):
            amounts = (row.shared.get(currency), row.charged.get(currency))
            shown += ["" if amount is None else decimal(amount, 2) for amount in amounts]
    return shown


def hours_of(figures: Figures | Totals, digits: int) -> list[str]:
    """Hours held, active, idle and unknown, as text."""
    seconds = (figures.allocated_seconds, figures.active_seconds, figures.idle_seconds, figures.unknown_seconds)
    return [decimal(value / HOUR, digits) for value in seconds]


def money_of(figures: Figures | Totals, currency: str) -> list[str]:
    """Cost and idle cost in a currency, as text; a star where a part of the hours has no price."""
    unpriced, money = figures.unpriced_seconds > 0, figures.money.get(currency)
    if money is None:
        return ["no price" if unpriced and not figures.money else "", ""]
    return [decimal(money.total, 2) + ("*" if unpriced else ""), decimal(money.idle, 2)]


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


Tone = Literal["", "note", "warning", "error"]


class Remark(NamedTuple):
    """One line of the foot; ``label`` is empty where the line goes on with the subject of the one before."""

    label: str
    words: str
    tone: Tone = ""


def remarks(report: FleetReport) -> Iterator[Remark]:
    """All that a reader must know of a report beside its rows."""
    yield from _sum(report)
    yield _funnel(report)
    yield from _sharing(report)
    yield from _coverage(report)
    window = report.window
    label = f" ({clean(window.label)})" if window.label else ""
    yield Remark("Period", f"{moment(window.start_seconds)} to {moment(window.end_seconds)}{label}")
    if report.engine:
        yield Remark("Source", clean(report.engine))
    yield Remark("Prices", clean(report.prices) or "of the time of use")
    yield from unpriced(report.total, hour_digits(report.trust.capacity_seconds))
    for label, failure in zip(("Not read", *("",) * len(report.trust.failures)), report.trust.failures, strict=False):
        yield Remark(label, failure_words(failure), "error")
    for label, note in zip(("Note", *("",) * len(report.trust.notes)), report.trust.notes, strict=False):
        yield Remark(label, clean(note), "warning")


def unpriced(total: Figures | Totals, digits: int) -> Iterator[Remark]:
    """Say how much had no price, if anything."""
    if total.unpriced_seconds > 0:
        mark = " (marked * where that is a part)" if total.money else ""
        hours = decimal(total.unpriced_seconds / HOUR, digits)
        yield Remark("Unpriced", f"{hours} GPU-hours had no price and are in no cost{mark}", "warning")


def failure_words(failure: Failure) -> str:
    """What was not read, and why."""
    window = failure.window
    when = f"{minute(window.start_seconds)} to {minute(window.end_seconds)} UTC"
    return clean(f"{when}: {failure.what}: {failure.reason}; what it asked for is missing")


def _sum(report: FleetReport) -> Iterator[Remark]:
    trust = report.trust
    digits = hour_digits(trust.capacity_seconds)
    capacity = f"{decimal(trust.capacity_seconds / HOUR, digits)} GPU-hours metered"
    if is_part(report.filters):
        hours = decimal(report.total.allocated_seconds / HOUR, digits)
        only = f"only {clean(filter_words(report.filters))}"
        yield Remark("Sum", f"{hours} of {capacity}: {only}; that nothing is missing can be seen without the filter")
        return
    lines = decimal((trust.capacity_seconds - trust.missing_seconds) / HOUR, digits)
    if trust.missing_seconds:
        state = f"conservation error {abs(trust.missing_seconds):.1e} s"
    elif trust.failures or trust.recorded_hours < trust.expected_hours:
        state = "all that was recorded and read is on a line; what was not is in no sum"
    else:
        state = "nothing is missing"
    yield Remark("Sum", f"{lines} of {capacity}, {state}")
    if trust.missing_seconds:
        what = "have no line" if trust.missing_seconds > 0 else "are on lines and were not metered"
        hours = f"{abs(trust.missing_seconds) / HOUR:,.3f} GPU-hours"
        yield Remark(
            "",
            f"{hours} {what}: owner:gpu_ledger:delta1h and workload:gpu_ledger:delta1h do not"
            " agree; is one set of rules loaded, of this release, and does it see every agent?",
            "error",
        )


def _funnel(report: FleetReport) -> Remark:
    held = total_of(line.figures for line in report.held)
    whole = report.total.allocated_seconds
    digits = hour_digits(report.trust.capacity_seconds)
    steps = [f"{decimal(whole / HOUR, digits)} GPU-hours"]
    for seconds, word in ((held.allocated_seconds, "held"), (held.active_seconds, "active")):
        part = f" ({percent_down(seconds / whole, 1)})" if whole else ""
        steps.append(f"{decimal(seconds / HOUR, digits)} {word}{part}")
    unknown = held.unknown_seconds / HOUR
    rest = f"; of {decimal(unknown, digits)} held it is not known" if unknown else ""
    return Remark("Funnel", " > ".join(steps) + rest)


def _sharing(report: FleetReport) -> Iterator[Remark]:
    if report.share_idle == "none":
        return
    how = "evenly over owners' lines" if report.share_idle == "even" else "over owners by their own cost"
    what = "Unallocated and Unattributed" if report.share_unallocated else "Unallocated"
    spread = {currency: sum(line.shared.get(currency, 0.0) for line in report.held) for currency in report.currencies}
    amounts = " and ".join(money_with_code(amount, currency) for currency, amount in spread.items()) or "nothing"
    yield Remark("Shared", f"{amounts} of {what}, {how}; Charged is Cost and Shared")


def _coverage(report: FleetReport) -> Iterator[Remark]:
    trust = report.trust
    label = "Coverage"
    if trust.period_coverage_ratio is not None:
        hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
        tone: Tone = "warning" if trust.recorded_hours < trust.expected_hours else ""
        yield Remark(label, f"{percent_down(trust.period_coverage_ratio)} of the hours were recorded ({hours})", tone)
        label = ""
    if trust.activity_coverage_ratio is not None:
        yield Remark(
            label, f"{percent_down(trust.activity_coverage_ratio)} of the held GPU-hours had their activity measured"
        )
        label = ""
    if trust.price_coverage_ratio is not None:
        yield Remark(label, f"{percent_down(trust.price_coverage_ratio)} of the GPU-hours had a price")


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
    records = [("Failure", failure_words(failure)) for failure in trust.failures]
    records += [("Note", note) for note in trust.notes]
    if report.engine:
        records.append(("Source", report.engine))
    records.append(("Prices", report.prices or "of the time of use"))
    if report.simulated:
        records.append(("Simulated", "nothing here is real"))
    for record, words in records:
        yield {"record": record, "remark": guarded(words)}


WIDTH_OF_A_FILE = 160
_LABEL_WIDTH = 10
_GAP = "  "
_STYLES: dict[Tone, str] = {"": "", "note": "dim", "warning": "yellow", "error": "bold red"}
_ROW_STYLES = {"held": "", "more": "dim", "apart": "dim", "total": "bold"}


def write_table(report: FleetReport, stream: TextIO, top: int | None = None) -> None:
    """Write a table with separate lines without an owner; its foot shows how far it can be trusted.

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

"""Writes a report as CSV for spreadsheets, in which no name is a formula."""

import csv
import re
from collections.abc import Iterator
from typing import TextIO

from exporter.cost.document import money_kinds
from exporter.cost.foot import HOUR, clean, failure_words
from exporter.cost.ledger import DIMENSIONS, LABEL, Dimension, Figures
from exporter.cost.report import FleetReport, change, filter_words, is_apart, is_part, money_sums
from exporter.model import STATE_COLUMNS, ByState, state_columns
from exporter.model.formatting import iso

JOULES_PER_KWH = 3.6e6
_FORMULA_START = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\n")
_FORMULA_WITHIN = re.compile(r'(^\s+|[;\t\n|][\s"]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])')
"""A formula sign where a spreadsheet that splits at another character than the comma sees the begin of a cell."""


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


_KEYS = {"namespace": "owner_namespace", "kind": "owner_kind", "workload": "owner_name"}
"""Names of columns that differ from those of the dimensions."""
MONEY_DIGITS, HOUR_DIGITS, _RATIO_DIGITS = 2, 3, 4
"""Decimals in CSV; JSON is not rounded."""
CSV_HOURS = ("gpu_hours", *(f"{name}_hours" for name in STATE_COLUMNS), "unpriced_hours")
CSV_MONEY = ("cost", *(f"{name}_cost" for name in STATE_COLUMNS))
CSV_RATIOS = ("active_ratio", "effective_ratio", "profiled_ratio")

CsvCells = dict[str, str | float]
"""A row by column."""


def write_csv(report: FleetReport, stream: TextIO, *, with_notes: bool = False) -> None:
    """Write a row for each owner, rounded; empty is not known, or summed over.

    With notes there are the columns ``record``, ``ratio`` and ``remark``, and after the rows ``Owner`` those of
    ``Unattributed``, ``Unallocated``, ``Total`` (of all these), ``Capacity`` (metered GPU-hours), ``Missing`` (what the
    lines lack of it), ``Coverage`` (``ratio`` and in ``remark`` of what), ``Failure``, ``Note``, ``Source`` and others.
    """
    kinds = dict.fromkeys((*CSV_MONEY, *money_kinds(report)))
    money = [f"{kind}_{currency}" for currency in report.currencies for kind in kinds]
    names = [_KEYS.get(dimension, dimension) for dimension in _columns(report)]
    head = ["from", "to", *names, *CSV_HOURS, "energy_kwh", *CSV_RATIOS, *money]
    if with_notes:
        head = ["record", *head, "ratio", "remark"]
    writer = csv.DictWriter(csv_stream(stream), head, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    period: CsvCells = {"from": iso(report.window.start_seconds), "to": iso(report.window.end_seconds)}
    for cells in _lines(report):
        if with_notes or cells["record"] == "Owner":
            writer.writerow({**period, **cells})
    for cells in _foot(report) if with_notes else ():
        writer.writerow({**period, **cells})


def _lines(report: FleetReport) -> Iterator[CsvCells]:
    for line in (*report.held, *report.apart):
        yield {
            "record": line.key.kind if is_apart(line.key) else "Owner",
            **{_KEYS.get(name, name): guarded(line.key.value(name)) for name in _columns(report)},
            **_figures(line.figures, line.states),
            **_changes(report, line.figures, line.before),
            **{f"shared_{currency}": line.shared.get(currency, 0.0) for currency in line.charged},
            **{f"charged_{currency}": amount for currency, amount in line.charged.items()},
        }


def _changes(report: FleetReport, figures: Figures, before: Figures) -> CsvCells:
    cells: CsvCells = {}
    for currency in report.currencies if report.before else ():
        for kind, amount in zip(("before", "change"), change(figures, before, currency), strict=True):
            if amount is not None:
                cells[f"{kind}_{currency}"] = round(amount, MONEY_DIGITS)
    return cells


def _columns(report: FleetReport) -> tuple[Dimension, ...]:
    """What names a line: every dimension, and the labels that are asked for."""
    return (*DIMENSIONS, *(name for name in report.by if name.startswith(LABEL)))


def _figures(figures: Figures, states: Figures | None) -> CsvCells:
    """Hours, energy, ratios and money by column, rounded; what is not known, or has no owner, has no cell."""
    seconds = {"gpu_hours": figures.seconds.total, "unpriced_hours": figures.unpriced_seconds}
    seconds |= {f"{name}_hours": value for name, value in _known(states.seconds if states else None)}
    cells: CsvCells = {title: round(value / HOUR, HOUR_DIGITS) for title, value in seconds.items()}
    if figures.energy_joules is not None:
        cells["energy_kwh"] = round(figures.energy_joules / JOULES_PER_KWH, HOUR_DIGITS)
    for name in CSV_RATIOS:
        if states and (ratio := getattr(states.seconds, name)) is not None:
            cells[name] = round(ratio, _RATIO_DIGITS)
    for currency, money in figures.money.items():
        cells[f"cost_{currency}"] = round(money.total, MONEY_DIGITS)
        for name, value in _known(states.money.get(currency) if states else None):
            cells[f"{name}_cost_{currency}"] = round(value, MONEY_DIGITS)
    return cells


def _known(amounts: ByState | None) -> list[tuple[str, float]]:
    return [(name, value) for name, value in state_columns(amounts).items() if value is not None]


def _foot(report: FleetReport) -> Iterator[CsvCells]:
    trust = report.trust
    part = f"a part of the capacity: only {filter_words(report.filters)}" if is_part(report.filters) else ""
    charged = money_sums(line.charged for line in (*report.held, *report.apart))
    yield {
        "record": "Total",
        **_figures(report.total, report.owned),
        **(_changes(report, report.total, report.before.total) if report.before else {}),
        **{f"charged_{currency}": amount for currency, amount in charged.items()},
        "remark": guarded(part),
    }
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

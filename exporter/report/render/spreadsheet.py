"""A fleet's report as CSV: rows for spreadsheets, and after them what they sum to and how far to trust them."""

import csv
from collections.abc import Iterator
from typing import TextIO

from exporter.report.fleet.costs import filter_words, is_apart, is_part
from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import DIMENSIONS, LABEL, Dimension, Figures
from exporter.report.render.foot import failure_words
from exporter.report.render.rows import active_ratio, charged, is_shared
from exporter.report.render.words import HOUR, JOULES_PER_KWH, csv_stream, guarded, iso

_KEYS = {"namespace": "owner_namespace", "kind": "owner_kind", "workload": "owner_name"}
"""Names of columns that differ from those of the dimensions."""
_HOURS = ("gpu_hours", "active_hours", "idle_hours", "unknown_hours", "unpriced_hours")

_Cells = dict[str, str | float]


def write_csv(report: FleetReport, stream: TextIO) -> None:
    """Rows by ``record``: ``Owner``, ``Unattributed``, ``Unallocated``, and then those of no line.

    ``Total`` (of the lines), ``Capacity`` (metered GPU-hours), ``Missing`` (what the lines lack of it), ``Coverage``
    (``ratio`` and in ``remark`` of what), ``Failure``, ``Note``, ``Source``. Empty is not known, or summed over.
    """
    kinds = ("cost", "idle_cost", "shared", "charged") if is_shared(report) else ("cost", "idle_cost")
    money = [f"{kind}_{currency}" for currency in report.currencies for kind in kinds]
    names = [_KEYS.get(dimension, dimension) for dimension in _columns(report)]
    head = ("record", "from", "to", *names, *_HOURS, "energy_kwh", "active_ratio", *money, "ratio", "remark")
    writer = csv.DictWriter(csv_stream(stream), head, restval="", lineterminator="\n")
    writer.writeheader()
    period: _Cells = {"from": iso(report.window.start_seconds), "to": iso(report.window.end_seconds)}
    for cells in (*_lines(report), *_foot(report)):
        writer.writerow({**period, **cells})


def _lines(report: FleetReport) -> Iterator[_Cells]:
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


def _figures(figures: Figures) -> _Cells:
    seconds = (
        figures.allocated_seconds,
        figures.active_seconds,
        figures.idle_seconds,
        figures.unknown_seconds,
        figures.unpriced_seconds,
    )
    cells: _Cells = {title: value / HOUR for title, value in zip(_HOURS, seconds, strict=True)}
    if figures.energy_joules is not None:
        cells["energy_kwh"] = figures.energy_joules / JOULES_PER_KWH
    activity = active_ratio(figures)
    if activity is not None:
        cells["active_ratio"] = activity
    for currency, money in figures.money.items():
        cells[f"cost_{currency}"], cells[f"idle_cost_{currency}"] = money.total, money.idle
    return cells


def _foot(report: FleetReport) -> Iterator[_Cells]:
    trust = report.trust
    part = f"a part of the capacity: only {filter_words(report.filters)}" if is_part(report.filters) else ""
    totals: _Cells = {}
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

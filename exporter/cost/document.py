"""Converts a fleet's report to its one JSON document, for the command and the API."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NotRequired, TextIO, TypedDict

from exporter.cost.ledger import Figures, Window, pairs
from exporter.cost.render_rows import charged, encodable, is_shared
from exporter.cost.report import FleetReport, ReportLine, is_apart, is_part


class PeriodDocument(TypedDict):
    """A period, such as a day."""

    from_seconds: Annotated[int, "Start, Unix time."]
    to_seconds: Annotated[int, "End, Unix time; outside of the period."]


class WindowDocument(PeriodDocument):
    """The period of a report."""

    label: Annotated[str | None, "As it was asked for."]


class MoneyDocument(TypedDict):
    """Cost in one currency: the parts sum to the cost."""

    currency: Annotated[str, "ISO 4217."]
    cost: Annotated[float, "Of all priced seconds."]
    active_cost: Annotated[float, "Of active seconds."]
    idle_cost: Annotated[float, "Of idle seconds."]
    unknown_cost: Annotated[float, "Of unknown seconds."]


class FiguresDocument(TypedDict):
    """Seconds, energy and money."""

    allocated_seconds: Annotated[float, "GPU-seconds weighted by share: active, idle and unknown, always."]
    active_seconds: Annotated[float, "Of these at work."]
    idle_seconds: Annotated[float, "Of these idle."]
    unknown_seconds: Annotated[float, "Of these not measured."]
    unpriced_seconds: Annotated[float, "Allocated seconds that had no price and are in no money."]
    active_ratio: Annotated[float | None, "Active of what was measured; null where nothing was."]
    energy_joules: Annotated[float | None, "Measured energy; null where none was."]
    money: Annotated[list[MoneyDocument], "By currency; empty where nothing was priced."]


class OwnerDocument(TypedDict):
    """The owner and the model of GPUs."""

    cluster: Annotated[str | None, "Null here and below: not known, or summed over."]
    owner_namespace: Annotated[str | None, "Namespace of the owner."]
    owner_kind: Annotated[str | None, "Of the workload, or Unallocated, Unattributed."]
    owner_name: Annotated[str | None, "Of the workload."]
    team: Annotated[str | None, "The team that pays."]
    model: Annotated[str | None, "Of the GPU."]


class LineDocument(OwnerDocument, FiguresDocument):
    """One line of a report."""

    node: Annotated[str | None, "Name of the node."]
    pool: Annotated[str | None, "Instance type and capacity type of the node."]
    labels: Annotated[
        Mapping[str, Any] | None, "Values by key of the labels that were asked for; null where it has none of them."
    ]
    mode: Annotated[str | None, "exclusive, mig or shared."]
    held: Annotated[bool, "False: Unallocated or Unattributed, which are nobody's."]
    charges: NotRequired[Annotated[list[Mapping[str, Any]], "Where idle money is shared: currency, shared, charged."]]
    series: NotRequired[Annotated[list[FiguresDocument], "By period, where it was asked for."]]


class TrustDocument(TypedDict):
    """How far the report can be trusted."""

    whole: Annotated[bool, "Every question was answered and every second is on a line."]
    capacity_seconds: Annotated[float, "GPU-seconds that were metered; all lines sum to it."]
    missing_seconds: Annotated[float | None, "What the lines lack of it; null with filters."]
    expected_hours: Annotated[int, "Hours of the window that are over, times clusters."]
    recorded_hours: Annotated[int, "For how many of them the ledger was recorded."]
    period_coverage_ratio: Annotated[float | None, "Part of the hours that were recorded."]
    activity_coverage_ratio: Annotated[float | None, "Part of the held seconds whose activity was measured."]
    price_coverage_ratio: Annotated[float | None, "Part of all seconds that had a price."]
    failures: Annotated[list[Mapping[str, Any]], "What was not read: from_seconds, to_seconds, what, reason."]
    notes: Annotated[list[str], "What a reader must know."]


class FleetDocument(TypedDict):
    """A fleet's report; units are in the keys, times Unix seconds, null is not known or summed over."""

    api_version: Literal[1]
    window: WindowDocument
    by: Annotated[list[str], "Dimensions of the lines."]
    filters: Annotated[Mapping[str, Any], "By dimension what was asked for."]
    share_idle: Annotated[str, "How Unallocated money is spread."]
    share_unallocated: Annotated[bool, "Whether Unattributed money is, too."]
    lines: Annotated[list[LineDocument], "Owners' lines, dearest first, then what is nobody's."]
    total: FiguresDocument
    periods: Annotated[list[PeriodDocument], "Of the lines' series."]
    trust: TrustDocument
    engine: Annotated[str | None, "Where it was read."]
    simulated: Annotated[bool, "Some of it is of simulated nodes."]
    prices: Annotated[str | None, "Null: prices of the time of use."]


def write_json(report: FleetReport, stream: TextIO) -> None:
    """Write one object, each line of ``lines`` on a line of its own."""
    for number, (key, value) in enumerate(_without_lines(report).items()):
        stream.write(f"{',' if number else '{'}\n  {_text(key)}: ")
        if key != "lines":
            stream.write(_text(value))
            continue
        opening = "["
        for line in _lines(report):
            stream.write(f"{opening}\n    {_text(line)}")
            opening = ","
        stream.write("[]" if opening == "[" else "\n  ]")
    stream.write("\n}\n")


def document(report: FleetReport) -> FleetDocument:
    """Return the report as plain values."""
    return {**_without_lines(report), "lines": list(_lines(report))}


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def _text(value: object) -> str:
    return encodable(_ENCODER.encode(value))


def _without_lines(report: FleetReport) -> FleetDocument:
    return {
        "api_version": 1,
        "window": window_document(report.window),
        "by": list(report.by),
        "filters": {dimension: sorted(values) for dimension, values in sorted(report.filters.wanted.items())},
        "share_idle": report.share_idle,
        "share_unallocated": report.share_unallocated,
        "lines": [],
        "total": _figures(report.total),
        "periods": [_period(period) for period in report.periods],
        "trust": trust_document(report),
        "engine": report.engine or None,
        "simulated": report.simulated,
        "prices": report.prices or None,
    }


def window_document(window: Window) -> WindowDocument:
    """Return a report's period as plain values."""
    return {**_period(window), "label": window.label or None}


def trust_document(report: FleetReport) -> TrustDocument:
    """Return a report's foot as plain values."""
    trust = report.trust
    return {
        "whole": trust.whole,
        "capacity_seconds": trust.capacity_seconds,
        "missing_seconds": None if is_part(report.filters) else trust.missing_seconds,
        "expected_hours": trust.expected_hours,
        "recorded_hours": trust.recorded_hours,
        "period_coverage_ratio": trust.period_coverage_ratio,
        "activity_coverage_ratio": trust.activity_coverage_ratio,
        "price_coverage_ratio": trust.price_coverage_ratio,
        "failures": [
            {**_period(failure.window), "what": failure.what, "reason": failure.reason} for failure in trust.failures
        ],
        "notes": list(trust.notes),
    }


def _period(window: Window) -> PeriodDocument:
    return {"from_seconds": window.start_seconds, "to_seconds": window.end_seconds}


def _lines(report: FleetReport) -> Iterator[LineDocument]:
    for line, charges in zip((*report.held, *report.apart), charged(report), strict=True):
        yield _line(line, charges, with_shares=is_shared(report))


def _line(line: ReportLine, amounts: Mapping[str, float], *, with_shares: bool) -> LineDocument:
    key = line.key
    found: LineDocument = {
        "cluster": key.cluster or None,
        "node": key.node or None,
        "pool": key.pool or None,
        "owner_namespace": key.namespace or None,
        "owner_kind": key.kind or None,
        "owner_name": key.workload or None,
        "team": key.team or None,
        "labels": pairs(key.labels) or None,
        "model": key.model or None,
        "mode": key.mode or None,
        "held": not is_apart(key),
        **_figures(line.figures),
        "charges": [
            {"currency": currency, "shared": line.shared.get(currency, 0.0), "charged": amount}
            for currency, amount in sorted(amounts.items())
        ],
        "series": [_figures(figures) for figures in line.series],
    }
    if not with_shares:
        del found["charges"]
    if not line.series:
        del found["series"]
    return found


def _figures(figures: Figures) -> FiguresDocument:
    """Return figures as plain values, named as the agent's ledger names its totals."""
    return {
        "allocated_seconds": figures.allocated_seconds,
        "active_seconds": figures.active_seconds,
        "idle_seconds": figures.idle_seconds,
        "unknown_seconds": figures.unknown_seconds,
        "unpriced_seconds": figures.unpriced_seconds,
        "active_ratio": figures.active_ratio,
        "energy_joules": figures.energy_joules,
        "money": [
            {
                "currency": currency,
                "cost": money.total,
                "active_cost": money.active,
                "idle_cost": money.idle,
                "unknown_cost": money.unknown,
            }
            for currency, money in sorted(figures.money.items())
        ],
    }

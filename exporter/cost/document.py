"""Converts a fleet's report to the JSON document of the command and the API, and to its funnel."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

from exporter.cost.dimensions import APART, UNALLOCATED, UNATTRIBUTED
from exporter.cost.ledger import Figures, total_by_state
from exporter.cost.report import RATIOS, FleetReport, ReportLine
from exporter.cost.window import Window
from exporter.model.ledger import ByState, state_columns

PARTS: Mapping[str, str] = {
    "effective": "Effective",
    "ineffective": "Ineffective",
    "unprofiled": "Active, not profiled",
    "idle": "Idle",
    "unknown": "Unknown",
    "unattributed": UNATTRIBUTED,
    "unallocated": UNALLOCATED,
}
"""Display names of the parts of all GPU-seconds or money: owners' parts by state, then parts without an owner."""


def parts(report: FleetReport, currency: str = "", period: int | None = None) -> dict[str, float]:
    """Return GPU-seconds, or money in a currency, by ``PARTS``; ``period`` selects one of the report's periods."""

    def amounts(line: ReportLine) -> ByState:
        return (line.figures if period is None else line.series[period]).amounts(currency)

    unowned = [(line.key.kind, amounts(line).total) for line in report.apart]
    values = [value for _, value in total_by_state(map(amounts, report.held))]
    values += [sum(value for kind, value in unowned if kind == wanted) for wanted in APART]
    return dict(zip(PARTS, values, strict=True))


MEANINGS: Mapping[str, str] = {
    "Active": "share x activity x time: a GPU that is half busy for an hour is half an active GPU-hour.",
    "Effective": "active time weighted by use of the resource nearest to its limit (arithmetic pipes, memory, links,"
    " video engines): at most so much of what the GPU can do. What is at a limit, as decoding at that of memory, is"
    " no waste.",
    "Unprofiled": "active time in which one of these resources was not measured: effective or not is not known.",
    "Idle": "held, measured, and not active. It belongs to its holder.",
    "Unknown": "held, and its activity could not be measured. It is never counted as idle.",
    UNALLOCATED: "parts of GPUs that nobody held.",
    UNATTRIBUTED: "GPUs that were held, or may have been, by an unknown holder.",
}
"""Definitions of the terms for hours and money, for help and pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """Steps from all GPUs to their effective use, in GPUs or money; each step is a part of the previous one."""

    total: Annotated[float, "Metered."]
    allocated: Annotated[float, "Held by owners."]
    active: Annotated[float, "Held and at work; a GPU that is half busy counts half."]
    effective: Annotated[float | None, "The profiled part of it, by use of its limit; null where nothing was profiled."]
    unprofiled: Annotated[float, "Active, without a measurement of effective use."]
    unknown: Annotated[float, "Held and not measured."]

    @property
    def profiled_ratio(self) -> float:
        """Profiled part of the active amount: coverage of ``effective``."""
        return 1 - self.unprofiled / self.active if self.active else 0.0


def funnel(report: FleetReport, currency: str = "", unit: float = 1.0) -> Funnel:
    """Return the funnel of money in a currency, or of GPU-seconds, in a unit."""
    held = report.owned.amounts(currency).scaled(1 / unit)
    return Funnel(
        total=report.total.amounts(currency).total / unit,
        allocated=held.total,
        active=held.active,
        effective=held.effective if held.profiled else None,
        unprofiled=held.unprofiled,
        unknown=held.unknown,
    )


class PeriodDocument(TypedDict):
    """A period, such as a day."""

    from_seconds: Annotated[int, "Start, Unix time."]
    to_seconds: Annotated[int, "End, Unix time; outside of the period."]


class WindowDocument(PeriodDocument):
    """The period of a report."""

    label: Annotated[str | None, "Window as requested."]


class MoneyDocument(TypedDict):
    """Cost in one currency: the parts sum to the cost of owners."""

    currency: Annotated[str, "ISO 4217."]
    cost: Annotated[float, "Of all priced seconds."]
    active_cost: Annotated[float | None, "Of owners' active seconds; null of a line without an owner, as below."]
    effective_cost: Annotated[float | None, "Of the parts of active seconds, as below."]
    ineffective_cost: Annotated[float | None, "With it and unprofiled_cost active_cost."]
    unprofiled_cost: Annotated[float | None, "Of active seconds that were not profiled."]
    idle_cost: Annotated[float | None, "Of owners' idle seconds."]
    unknown_cost: Annotated[float | None, "Of owners' unknown seconds."]


class FiguresDocument(TypedDict):
    """Seconds, energy and money."""

    allocated_seconds: Annotated[float, "GPU-seconds weighted by share; of an owner active, idle and unknown together."]
    active_seconds: Annotated[float | None, "Of owners: at work. Null of a line without an owner; here and below."]
    effective_seconds: Annotated[float | None, "Active, weighted by use of the nearest limit; null: nothing profiled."]
    ineffective_seconds: Annotated[float | None, "The rest of the profiled active seconds."]
    unprofiled_seconds: Annotated[float | None, "Active seconds of which it is not known."]
    idle_seconds: Annotated[float | None, "Of owners: idle."]
    unknown_seconds: Annotated[float | None, "Of owners: not measured."]
    unpriced_seconds: Annotated[float, "Allocated seconds that had no price and are in no money."]
    active_ratio: Annotated[float | None, "Of owners: active part of measured time; null without such time."]
    effective_ratio: Annotated[float | None, "Of owners: effective part of profiled time; null without such time."]
    profiled_ratio: Annotated[float | None, "Profiled part of the active time: coverage of effective_ratio."]
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
    held: Annotated[bool, "False: Unallocated or Unattributed, which have no owner."]
    charges: NotRequired[Annotated[list[Mapping[str, Any]], "Where idle money is shared: currency, shared, charged."]]
    series: NotRequired[Annotated[list[FiguresDocument], "By period, where it was asked for."]]
    before: NotRequired[Annotated[list[MoneyDocument], "Its money of the period before, where that is compared with."]]


class TrustDocument(TypedDict):
    """How far the report can be trusted."""

    whole: Annotated[bool, "No query failed, and every second is on a line."]
    capacity_seconds: Annotated[float, "GPU-seconds that were metered; all lines sum to it."]
    missing_seconds: Annotated[float | None, "Capacity without a line; null with filters."]
    expected_hours: Annotated[int, "Past hours of the window, times clusters."]
    recorded_hours: Annotated[int, "Number of them with a recorded ledger."]
    period_coverage_ratio: Annotated[float | None, "Part of the hours that were recorded."]
    activity_coverage_ratio: Annotated[float | None, "Part of the held seconds whose activity was measured."]
    price_coverage_ratio: Annotated[float | None, "Part of all seconds that had a price."]
    failures: Annotated[list[Mapping[str, Any]], "Failed queries: from_seconds, to_seconds, what, reason."]
    notes: Annotated[list[str], "Notes for the reader."]


class BeforeDocument(WindowDocument):
    """The calendar period before the period of the report."""

    money: Annotated[list[MoneyDocument], "Of all its lines."]


class FleetDocument(TypedDict):
    """A fleet's report; units are in the keys, times Unix seconds, null is not known or summed over."""

    api_version: Literal[1]
    window: WindowDocument
    by: Annotated[list[str], "Dimensions of the lines."]
    filters: Annotated[Mapping[str, Any], "Requested values by dimension."]
    share_idle: Annotated[str, "How Unallocated money is spread."]
    share_unallocated: Annotated[bool, "Whether Unattributed money is, too."]
    lines: Annotated[list[LineDocument], "Owners' lines, dearest first, then those without an owner."]
    total: FiguresDocument
    before: Annotated[BeforeDocument | None, "Null without a comparison."]
    periods: Annotated[list[PeriodDocument], "Of the lines' series."]
    trust: TrustDocument
    engine: Annotated[str | None, "Source of the ledger."]
    simulated: Annotated[bool, "Some of it is of simulated nodes."]
    prices: Annotated[str | None, "Null: prices of the time of use."]


def money_kinds(report: FleetReport) -> tuple[str, ...]:
    """Return the optional columns of each currency in a report."""
    shared = ("shared", "charged") if report.question.is_shared else ()
    return (*shared, *(("before", "change") if report.before else ()))


def document(report: FleetReport) -> FleetDocument:
    """Return the report as plain values."""
    return {**document_without_lines(report), "lines": list(line_documents(report))}


def document_without_lines(report: FleetReport) -> FleetDocument:
    """Return the report as plain values, without its lines."""
    question = report.question
    return {
        "api_version": 1,
        "window": window_document(report.window),
        "by": list(question.by),
        "filters": {dimension: sorted(values) for dimension, values in sorted(question.filters.wanted.items())},
        "share_idle": question.share_idle,
        "share_unallocated": question.share_unallocated,
        "lines": [],
        "total": figures_document(report.total, report.owned),
        "before": _before(report.before) if report.before else None,
        "periods": [_period(period) for period in report.periods],
        "trust": trust_document(report),
        "engine": report.engine or None,
        "simulated": report.simulated,
        "prices": report.prices or None,
    }


def _before(earlier: FleetReport) -> BeforeDocument:
    return {**window_document(earlier.window), "money": _money(earlier.total, earlier.owned)}


def window_document(window: Window) -> WindowDocument:
    """Return a report's period as plain values."""
    return {**_period(window), "label": window.label or None}


def trust_document(report: FleetReport) -> TrustDocument:
    """Return a report's foot as plain values."""
    trust = report.trust
    return {
        "whole": trust.whole,
        "capacity_seconds": trust.capacity_seconds,
        "missing_seconds": None if report.question.filters.is_part else trust.missing_seconds,
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


def line_documents(report: FleetReport) -> Iterator[LineDocument]:
    """Yield the lines of owners, then those without an owner."""
    for line in (*report.held, *report.apart):
        found = line_document(line)
        if report.question.is_shared:
            found["charges"] = [
                {"currency": currency, "shared": line.shared.get(currency, 0.0), "charged": amount}
                for currency, amount in sorted(line.charged.items())
            ]
        if report.before:
            found["before"] = _money(line.before, line.before if line.states else None)
        if line.series:
            found["series"] = [figures_document(one, one if line.states else None) for one in line.series]
        yield found


def line_document(line: ReportLine) -> LineDocument:
    """Return the names and figures of a line as plain values."""
    key = line.key
    found = {
        "cluster": key.cluster or None,
        "node": key.node or None,
        "pool": key.pool or None,
        "owner_namespace": key.namespace or None,
        "owner_kind": key.kind or None,
        "owner_name": key.workload or None,
        "team": key.team or None,
        "labels": key.label_values or None,
        "model": key.model or None,
        "mode": key.mode or None,
        "held": line.states is not None,
        **figures_document(line.figures, line.states),
    }
    return cast("LineDocument", found)


def figures_document(figures: Figures, states: Figures | None) -> FiguresDocument:
    """Return figures as plain values, named as the agent's ledger names its totals."""
    seconds = states.seconds if states else None
    found = {
        "allocated_seconds": figures.seconds.total,
        **{f"{name}_seconds": value for name, value in state_columns(seconds).items()},
        "unpriced_seconds": figures.unpriced_seconds,
        **{name: getattr(seconds, name, None) for name in RATIOS},
        "energy_joules": figures.energy_joules,
        "money": _money(figures, states),
    }
    return cast("FiguresDocument", found)


def _money(figures: Figures, states: Figures | None) -> list[MoneyDocument]:
    found = []
    for currency, money in sorted(figures.money.items()):
        parts = state_columns(states.money_in(currency) if states else None)
        costs = {f"{name}_cost": value for name, value in parts.items()}
        found.append(cast("MoneyDocument", {"currency": currency, "cost": money.total, **costs}))
    return found

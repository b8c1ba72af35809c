"""Serves OpenCost's `/allocation` from the GPU ledger for clients of OpenCost; see docs/service.md."""

# ruff: noqa: N815 - names of OpenCost's

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from exporter.cost.dimensions import UNATTRIBUTED, LineKey
from exporter.cost.ledger import Figures, total_of
from exporter.cost.report import FleetReport, Question, ReportLine, in_period
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Window
from exporter.errors import ConfigError
from exporter.model.formatting import iso, shown
from exporter.service import opencost_query as query
from exporter.service.api import Ask, Endpoint

MOST_PARTS_OF_DAYS = 48
"""Maximum number of sets in an answer that need separate readings."""
_UNCHARGED = 0.005


_Zero = Annotated[float, "0: not of this ledger."]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDocument:
    """Common fields of all rows: their period, and costs that clients add but this ledger does not contain."""

    window: Annotated[Mapping[str, Any], "start and end, RFC 3339."]
    start: Annotated[str, "RFC 3339."]
    end: Annotated[str, "RFC 3339."]
    minutes: Annotated[float, "Of the set, or window."]
    properties: Annotated[Mapping[str, Any], "Common properties of the row: cluster, node, namespace, ..."]
    gpuCount: Annotated[float, "Mean number of GPUs, by share."]
    gpuCost: Annotated[float | None, "Cost, including shared cost; null without a price."]
    totalCost: Annotated[float | None, "The same as gpuCost."]
    cpuCost: _Zero = 0.0
    ramCost: _Zero = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationDocument(RowDocument):
    """One row."""

    name: Annotated[str, "Values of the aggregated properties, joined by /."]
    gpuHours: Annotated[float, "GPU-hours held, by share."]
    gpuCostIdle: Annotated[float, "Shared cost of GPUs without a holder."]
    gpuEfficiency: Annotated[float | None, "Active part of the measured time; null if nothing was measured."]
    totalEfficiency: Annotated[float | None, "The same as gpuEfficiency."]
    gpuAllocation: Annotated[Mapping[str, Any], "gpuModel; gpuUsageAverage and gpuRequestAverage, both in GPUs."]
    gpuCostAdjustment: _Zero = 0.0
    pvCost: _Zero = 0.0
    networkCost: _Zero = 0.0
    loadBalancerCost: _Zero = 0.0
    sharedCost: _Zero = 0.0
    externalCost: _Zero = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetDocument(RowDocument):
    """The GPUs of a node, held or not."""

    GPUHours: Annotated[float, "GPU-hours."]
    type: Literal["Node"] = "Node"
    labels: Annotated[Mapping[str, Any], "Empty."] = field(default_factory=dict)
    adjustment: _Zero = 0.0


class _Envelope(TypedDict):
    code: Literal[200]
    status: Annotated[str, "success"]


class _CostEnvelope(_Envelope):
    currency: Annotated[str | None, "Of all costs; null where there are none."]
    warning: NotRequired[
        Annotated[
            str,
            "What a reader must know, joined by '; ': parameters that were ignored, properties that the ledger does not"
            " record, currencies that were left out, hours that were not recorded, GPU-hours without a price. Absent"
            " where there is nothing of it.",
        ]
    ]


class AllocationsDocument(_CostEnvelope):
    """Rows in the shape of OpenCost's allocation API; see docs/service.md for what differs."""

    data: Annotated[list[Mapping[str, AllocationDocument]], "A set of rows by name for each step."]


class AssetsDocument(_CostEnvelope):
    """GPUs' cost by node in the shape of OpenCost's assets; see docs/service.md for what differs."""

    data: Annotated[
        Mapping[str, AssetDocument] | list[Mapping[str, AssetDocument]],
        "Nodes by name; with filterTypes a list of one such set.",
    ]


class SuggestionsDocument(_Envelope):
    """Values of a field."""

    data: Annotated[list[str], "In alphabetical order."]


class ConfigsDocument(_Envelope):
    """Settings for clients of Kubecost."""

    data: "SettingsDocument"


class SettingsDocument(TypedDict):
    """Settings."""

    currencyCode: Annotated[str, "ISO 4217; empty while nothing has a price."]


async def _allocation(ask: Ask) -> object:
    values = ask.values
    reports = await _reports(ask, query.sets_of(values["window"], values, ask.settings.fleet.timezone))
    currency, warnings = _currency(ask, (currency for report in reports for currency in report.currencies))
    sets = await asyncio.to_thread(lambda: [_set(report, values, currency) for report in reports])
    warnings += [
        f"aggregate: the ledger does not record {name}; every owner is {query.NOBODY} in it"
        for name in values["aggregate"]
        if query.is_lacking(name)
    ]
    return _answer(ask, sets, currency, reports, warnings)


def _answer(
    ask: Ask, data: object, currency: str, reports: Sequence[FleetReport], warnings: Sequence[str]
) -> dict[str, Any]:
    document: dict[str, Any] = {"code": 200, "status": "success", "data": data, "currency": currency or None}
    of_reports = (warning for report in reports for warning in _warnings(report))
    if found := list(dict.fromkeys((*ask.ignored, *warnings, *of_reports))):
        document["warning"] = "; ".join(found)
    return document


async def _reports(ask: Ask, periods: Sequence[Window]) -> list[FleetReport]:
    wanted = query.wanted_of(ask.values)
    # The whole fleet, because money without an owner is spread over all of it.
    question = Question(by=query.dimensions_of((*ask.values["aggregate"], *wanted)), share_idle=ask.values["shareIdle"])
    if not question.is_shared:  # with shared money, more dimensions would change how it is spread
        by = tuple(dict.fromkeys((*question.by, "model")))
        question = Question(by=by, filters=query.pushed(wanted))
    if len(periods) > 1 and not any(period.start_seconds % DAY_SECONDS for period in periods[1:]):
        # Whole days need one reading, with as many queries as for one set.
        whole = Window(start_seconds=periods[0].start_seconds, end_seconds=periods[-1].end_seconds)
        report = await ask.fleet.report(whole, replace(question, with_series=True))
        return await asyncio.to_thread(lambda: [in_period(report, period) for period in periods])
    if len(periods) > MOST_PARTS_OF_DAYS:
        raise ConfigError(
            f"step: {len(periods)} sets that do not begin at midnight are more than {MOST_PARTS_OF_DAYS}; allowed: a"
            " step of days in a window that begins at midnight, or a shorter window"
        )
    return [await ask.fleet.report(period, question) for period in periods]


def _currency(ask: Ask, known: Iterable[str]) -> tuple[str, list[str]]:
    """Return the currency of the answer (the requested, else the configured, else the only one), and warnings.

    The currency is empty if nothing has a price.
    """
    there, asked, usual = sorted(set(known)), ask.values.get("currency"), ask.settings.fleet.currency
    if asked:
        if there and asked not in there:
            raise ConfigError(f"currency: there is no money in '{shown(asked)}'; allowed: {', '.join(there)}")
        return asked, []
    if not usual and len(there) > 1:
        raise ConfigError(
            f"currency: money is in {', '.join(there)}, and is not added across currencies; allowed: one of them, or"
            " start the service with --currency"
        )
    others = ", ".join(one for one in there if usual and one != usual)
    left_out = [f"currency: costs are in {usual}; costs in {others} are left out"] if others else []
    return usual or "".join(there), left_out


def _set(report: FleetReport, values: Mapping[str, Any], currency: str) -> dict[str, AllocationDocument]:
    wanted, rows = query.wanted_of(values), dict[str, list[ReportLine]]()
    for line in (*report.held, *report.apart):
        if query.keeps(wanted, line.key):
            rows.setdefault(_name(line.key, values["aggregate"]), []).append(line)
    found = {
        name: document
        for name, lines in rows.items()
        if name != query.IDLE or _shows_idle(lines, values, currency)
        if (document := _row(name, lines, report.window, values["aggregate"], currency)) is not None
    }
    names = sorted(found, key=lambda name: (-(found[name].totalCost or 0.0), -found[name].gpuHours, name))
    end = None if values["limit"] is None else values["offset"] + values["limit"]
    return {name: found[name] for name in names[values["offset"] : end]}


def _name(key: LineKey, aggregate: Sequence[str]) -> str:
    """Return a row's name, with a part per aggregated property; only idle has a single name, as in OpenCost."""
    if not key.is_apart:
        return "/".join(query.value_of(name, key) or query.NOBODY for name in aggregate)
    return "/".join(query.UNATTRIBUTED_NAME for _ in aggregate) if key.kind == UNATTRIBUTED else query.IDLE


def _shared(lines: Sequence[ReportLine], currency: str) -> float:
    return sum(line.shared.get(currency, 0.0) for line in lines)


def _shows_idle(lines: Sequence[ReportLine], values: Mapping[str, Any], currency: str) -> bool:
    """Return whether to show idle; if its money is spread, whether a part could not be spread."""
    if values["shareIdle"] == "none":
        return bool(values["includeIdle"] or values["idle"])
    money = total_of(line.figures for line in lines).money.get(currency)
    return money is not None and money.total + _shared(lines, currency) >= _UNCHARGED


def _row(
    name: str, lines: Sequence[ReportLine], window: Window, aggregate: Sequence[str], currency: str
) -> AllocationDocument | None:
    """Return one row in OpenCost's shape; ``None`` if its money is in other currencies only."""
    keys, figures = [line.key for line in lines], total_of(line.figures for line in lines)
    seconds, money, shared = figures.seconds, figures.money.get(currency), _shared(lines, currency)
    if money is None and figures.money and not shared:
        return None
    cost = (
        None if money is None and figures.unpriced_seconds and not shared else (money.total if money else 0.0) + shared
    )
    efficiency = None if name == query.IDLE else seconds.active_ratio
    count = seconds.total / window.seconds
    return AllocationDocument(
        **_period(window),
        name=name,
        properties=_properties(keys, aggregate),
        gpuCount=count,
        gpuHours=seconds.total / HOUR_SECONDS,
        gpuCost=cost,
        totalCost=cost,
        gpuCostIdle=shared,
        gpuEfficiency=efficiency,
        totalEfficiency=efficiency,
        # Usage and request are in GPUs, so that their quotient is a ratio: 8 GPUs at 90 % are 7.2 of 8.
        gpuAllocation={
            "gpuDevice": "",
            "gpuModel": ", ".join(sorted({key.model for key in keys} - {""})),
            "gpuUUID": "",
            "gpuUsageAverage": None if seconds.active_ratio is None else seconds.active / window.seconds,
            "gpuRequestAverage": count,
        },
    )


def _properties(keys: Sequence[LineKey], aggregate: Sequence[str]) -> dict[str, Any]:
    """Return the requested properties that all lines of the row have in common."""
    parts = {
        "cluster": {key.cluster for key in keys},
        "node": {key.node for key in keys},
        "namespace": {key.namespace for key in keys},
        "controllerKind": {query.kind_of(key) for key in keys if not key.is_apart},
        "controller": {key.workload for key in keys},
    }
    found: dict[str, Any] = {name: min(values) for name, values in parts.items() if len(values) == 1 and any(values)}
    teams = {key.team for key in keys}
    if "team" in query.dimensions_of(aggregate) and len(teams) == 1 and any(teams):
        found["labels"] = {"team": min(teams)}
    return found


def _period(window: Window) -> dict[str, Any]:
    start, end = iso(window.start_seconds), iso(window.end_seconds)
    return {"window": {"start": start, "end": end}, "start": start, "end": end, "minutes": window.seconds / 60}


def _warnings(report: FleetReport) -> list[str]:
    trust = report.trust
    found = [f"{failure.what}: {failure.reason}" for failure in trust.failures]
    if trust.recorded_hours < trust.expected_hours:
        found.append(f"only {trust.recorded_hours} of {trust.expected_hours} hours were recorded")
    if report.total.unpriced_seconds:
        hours = report.total.unpriced_seconds / HOUR_SECONDS
        found.append(f"{hours:.1f} GPU-hours had no price and are in no cost")
    if report.simulated:
        found.append("simulated: nothing here is real")
    return [*found, *trust.notes]


async def _assets(ask: Ask) -> object:
    """Return the money of every node's GPUs, held or not."""
    wanted = ask.values["filter"] or {}
    wrong = sorted(set(wanted) - {"cluster", "node"})
    if wrong:
        raise ConfigError(f"filter: {', '.join(wrong)} is no property of a node; allowed: cluster, node")
    question = Question(by=("cluster", "node"), filters=query.pushed(wanted))
    report = await ask.fleet.report(ask.values["window"], question)
    currency, warnings = _currency(ask, report.currencies)
    types = ask.values["filterTypes"]
    rows: dict[tuple[str, str], list[Figures]] = {}
    for line in (*report.held, *report.apart):
        rows.setdefault((line.key.cluster, line.key.node), []).append(line.figures)
    nodes = {
        "/".join(part for part in (cluster, "Node", node) if part): asset
        for (cluster, node), figures in sorted(rows.items())
        if (types is None or "node" in types)
        and (asset := _asset(cluster, node, total_of(figures), report.window, currency))
    }
    # OpenCost returns one set of assets; Kubecost, which has this parameter, returns a list of sets.
    return _answer(ask, nodes if types is None else [nodes], currency, [report], warnings)


def _asset(cluster: str, node: str, figures: Figures, window: Window, currency: str) -> AssetDocument | None:
    """Return a node's row; ``None`` if its money is in other currencies only."""
    amount = figures.money.get(currency)
    if amount is None and figures.money:
        return None
    cost = amount.total if amount else None
    return AssetDocument(
        **_period(window),
        properties={"category": "Compute", "service": "Kubernetes", "cluster": cluster, "name": node},
        gpuCount=figures.seconds.total / window.seconds,
        GPUHours=figures.seconds.total / HOUR_SECONDS,
        gpuCost=cost,
        totalCost=cost,
    )


async def _suggestions(ask: Ask) -> object:
    """Return the values of a field that occur in the window."""
    field_name, search = ask.values["field"] or "", (ask.values["search"] or "").lower()
    found: set[str] = set()
    if field_name in query.FILTERABLE:
        wanted = ask.values["filter"] or {}
        question = Question(by=query.dimensions_of((field_name, *wanted)), filters=query.pushed(wanted))
        report = await ask.fleet.report(ask.values["window"], question)
        found = {query.value_of(field_name, line.key) for line in report.held if query.keeps(wanted, line.key)} - {""}
    names = sorted(name for name in found if search in name.lower())[: ask.values["limit"]]
    return SuggestionsDocument(code=200, status="success", data=names)


async def _configs(ask: Ask) -> object:
    """Return the currency that clients show with amounts."""
    currency, _ = _currency(ask, (month.currency for month in await ask.fleet.months()))
    return ConfigsDocument(code=200, status="success", data={"currencyCode": currency})


_ALLOCATIONS = partial(Endpoint, handle=_allocation, answer=AllocationsDocument, parameters=query.PARAMETERS)
_ASSETS = partial(Endpoint, handle=_assets, answer=AssetsDocument, parameters=query.ASSET_PARAMETERS)
_VALUES = partial(Endpoint, handle=_suggestions, answer=SuggestionsDocument, parameters=query.SUGGESTION_PARAMETERS)
ENDPOINTS: tuple[Endpoint, ...] = (
    _ALLOCATIONS("/allocation", "Cost of GPUs in the shape of OpenCost's allocation API."),
    _ALLOCATIONS("/allocation/compute", "The same; the path that OpenCost's own page asks."),
    _ALLOCATIONS("/model/allocation", "The same; the path that clients of Kubecost ask."),
    _ALLOCATIONS("/model/allocation/compute", "The same; the path of OpenCost's own page without a proxy of its own."),
    _ASSETS("/assets", "Cost of the GPUs of every node in the shape of OpenCost's assets."),
    _ASSETS("/model/assets", "The same; the path that clients of Kubecost ask."),
    _VALUES("/allocation/autocomplete", "Values of a field, for the filters of OpenCost's own page."),
    _VALUES("/model/allocation/autocomplete", "The same, for a page without a proxy of its own."),
    Endpoint("/model/getConfigs", "The currency that clients of Kubecost show.", _configs, ConfigsDocument),
)

"""OpenCost's `/allocation` over the GPU ledger, so that its clients can point here; see docs/service.md."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from exporter.cost.ledger import DAY_SECONDS, HOUR_SECONDS, UNATTRIBUTED, Dimension, Figures, Filters, LineKey, Window
from exporter.cost.report import FleetReport, ReportLine, ShareIdle, in_periods, is_apart, total_of
from exporter.errors import ConfigError
from exporter.service import responses
from exporter.service.api import Answer, Ask, Endpoint
from exporter.service.opencost_query import (
    FILTER_DIMENSIONS,
    IDLE,
    NOBODY,
    PARAMETERS,
    UNATTRIBUTED_NAME,
    conditions,
    dimensions_of_field,
    ignored,
    is_lacking,
    keeps,
    kind_of,
    part_of,
    sets_of,
    value_of,
    wanted_of,
)
from exporter.service.parameters import Parameter, shown

MOST_PARTS_OF_DAYS = 48
"""Sets of one answer that are read one by one."""
_UNCHARGED = 0.005


@dataclass(slots=True)
class _Row:
    """What goes into one row."""

    keys: list[LineKey] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    shared: dict[str, float] = field(default_factory=dict)

    def add(self, line: ReportLine) -> None:
        self.keys.append(line.key)
        self.figures.append(line.figures)
        for currency, amount in line.shared.items():
            self.shared[currency] = self.shared.get(currency, 0.0) + amount


async def _allocation(ask: Ask) -> Answer:
    values = ask.values
    periods = sets_of(values["window"], values, ask.settings.timezone)
    reports = await _reports(ask, periods)
    money = _money(ask, reports)
    sets = await asyncio.to_thread(lambda: [_set(report, values, money.currency) for report in reports])
    lacking = [
        f"aggregate: the ledger does not record {name}; every owner is {NOBODY} in it"
        for name in values["aggregate"]
        if is_lacking(name)
    ]
    return await _answer(ask, sets, money, reports, lacking)


async def _answer(
    ask: Ask, data: object, money: "_Money", reports: Sequence[FleetReport], more: Sequence[str]
) -> Answer:
    document: dict[str, Any] = {"code": 200, "status": "success", "data": data, "currency": money.currency or None}
    of_reports = (warning for report in reports for warning in _warnings(report))
    warnings = list(dict.fromkeys((*ask.ignored, *more, *money.warnings, *of_reports)))
    if warnings:
        document["warning"] = "; ".join(warnings)
    return Answer(body=await asyncio.to_thread(responses.json_body, document))


async def _reports(ask: Ask, periods: Sequence[Window]) -> list[FleetReport]:
    values = ask.values
    share, wanted = _share(values), wanted_of(values)
    by, filters = _dimensions(values, share), _pushed(wanted, share)
    if len(periods) > 1 and not any(period.start_seconds % DAY_SECONDS for period in periods[1:]):
        # Of whole days: one reading has them all, whose questions are no more than those of one set.
        whole = Window(start_seconds=periods[0].start_seconds, end_seconds=periods[-1].end_seconds)
        report = await ask.book.report(whole, by, filters, share_idle=share, with_series=True)
        return await asyncio.to_thread(in_periods, report, periods)
    if len(periods) > MOST_PARTS_OF_DAYS:
        raise ConfigError(
            f"step: {len(periods)} sets that do not begin at midnight are more than {MOST_PARTS_OF_DAYS}; allowed: a"
            " step of days in a window that begins at midnight, or a shorter window"
        )
    return [await ask.book.report(period, by, filters, share_idle=share) for period in periods]


def _share(values: Mapping[str, Any]) -> ShareIdle:
    share: ShareIdle = values["shareSplit"] if values["shareIdle"] == "true" else values["shareIdle"]
    return share


def _dimensions(values: Mapping[str, Any], share: ShareIdle) -> tuple[Dimension, ...]:
    found: list[Dimension] = [one for name in values["aggregate"] for one in part_of(name).dimensions]
    found += [one for name in wanted_of(values) for one in dimensions_of_field(name)]
    if values["splitIdle"] or values["idleByNode"]:
        found.append("cluster")
    if values["idleByNode"]:
        found.append("node")
    if share == "none":
        found.append("model")  # where money is spread, models would be told apart in the spreading, too
    return tuple(dict.fromkeys(found))


def _pushed(wanted: Mapping[str, frozenset[str]], share: ShareIdle) -> Filters:
    """What can be left to the source: kinds are spelt otherwise there, and what is spread is of the whole fleet."""
    if share != "none":
        return Filters()
    return Filters(
        wanted={dimensions_of_field(name)[0]: values for name, values in wanted.items() if name != "controllerKind"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Money:
    """The currency of an answer, and what a reader must know of it."""

    currency: str
    """ISO 4217; empty where nothing has a price."""
    warnings: tuple[str, ...] = ()


def _money(ask: Ask, reports: Iterable[FleetReport]) -> _Money:
    """Return the currency of the answer: the one asked for, else the server's, else the only one."""
    known = sorted({currency for report in reports for currency in report.currencies})
    asked, usual = ask.values["currency"], ask.settings.currency
    if asked and known and asked not in known:
        raise ConfigError(f"currency: there is no money in '{shown(asked)}'; allowed: {', '.join(known)}")
    if not asked and not usual and len(known) > 1:
        raise ConfigError(
            f"currency: money is in {', '.join(known)}, and is not added across currencies; allowed: one of them, or"
            " start the service with --currency"
        )
    if asked:
        return _Money(currency=asked)
    others = [one for one in known if one != usual] if usual else []
    left_out = f"currency: costs are in {usual}; costs in {', '.join(others)} are left out"
    return _Money(currency=usual or (known[0] if known else ""), warnings=(left_out,) if others else ())


def _set(report: FleetReport, values: Mapping[str, Any], currency: str) -> dict[str, Any]:
    wanted, rows = wanted_of(values), dict[str, _Row]()
    for line in (*report.held, *report.apart):
        if keeps(wanted, line.key):
            rows.setdefault(_name(line.key, values), _Row()).add(line)
    found = {}
    for name, row in rows.items():
        if name.endswith(IDLE) and not _shows_idle(row, values, currency):
            continue
        document = _document(name, row, report.window, values, currency)
        if document is not None:
            found[name] = document
    names = sorted(found, key=lambda name: (-(found[name]["totalCost"] or 0.0), -found[name]["gpuHours"], name))
    end = None if values["limit"] is None else values["offset"] + values["limit"]
    return {name: found[name] for name in names[values["offset"] : end]}


def _name(key: LineKey, values: Mapping[str, Any]) -> str:
    """Return a row's name: as many parts as the aggregation has; only idle has a name of its own, as in OpenCost."""
    if not is_apart(key):
        return "/".join(part_of(name).name(key) or NOBODY for name in values["aggregate"])
    if key.kind == UNATTRIBUTED:
        return "/".join(UNATTRIBUTED_NAME for _ in values["aggregate"])
    if values["idleByNode"]:
        return "/".join(part for part in (key.cluster, key.node, IDLE) if part)
    return "/".join(part for part in (key.cluster, IDLE) if part) if values["splitIdle"] else IDLE


def _shows_idle(row: _Row, values: Mapping[str, Any], currency: str) -> bool:
    """Asked for; where it was spread only if something could not be."""
    if _share(values) == "none":
        return bool(values["includeIdle"] or values["idle"])
    money = total_of(row.figures).money.get(currency)
    return money is not None and money.total + row.shared.get(currency, 0.0) >= _UNCHARGED


def _document(name: str, row: _Row, window: Window, values: Mapping[str, Any], currency: str) -> dict[str, Any] | None:
    """One row in OpenCost's shape; ``None`` where its money is in other currencies only."""
    figures = total_of(row.figures)
    money, shared = figures.money.get(currency), row.shared.get(currency, 0.0)
    if money is None and figures.money and not shared:
        return None
    cost = (
        None if money is None and figures.unpriced_seconds and not shared else (money.total if money else 0.0) + shared
    )
    efficiency = _efficiency(figures, is_idle=name.endswith(IDLE))
    start, end = _time(window.start_seconds), _time(window.end_seconds)
    return {
        "name": name,
        "properties": _properties(row.keys, values),
        "window": {"start": start, "end": end},
        "start": start,
        "end": end,
        "minutes": window.seconds / 60,
        "gpuCount": figures.allocated_seconds / window.seconds,
        "gpuHours": figures.allocated_seconds / HOUR_SECONDS,
        "gpuCost": cost,
        "gpuCostAdjustment": 0.0,
        "gpuCostIdle": shared,
        "gpuEfficiency": efficiency,
        "gpuAllocation": _gpu(row.keys, figures, window),
        **dict.fromkeys(_NOT_CHARGED, 0.0),
        "totalCost": cost,
        "totalEfficiency": efficiency,
    }


_NOT_CHARGED = (
    "cpuCost",
    "ramCost",
    "pvCost",
    "networkCost",
    "loadBalancerCost",
    "sharedCost",
    "externalCost",
)
"""Clients add these up; what this ledger charges for them is nothing. Amounts of CPU and memory it does not know."""


def _efficiency(figures: Figures, *, is_idle: bool) -> float | None:
    measured = figures.active_seconds + figures.idle_seconds
    return None if is_idle or not measured else figures.active_seconds / measured


def _gpu(keys: Sequence[LineKey], figures: Figures, window: Window) -> dict[str, Any]:
    """Usage and request are both in GPUs, so that their quotient is a ratio: 8 GPUs at 90 % are 7.2 of 8."""
    known = figures.active_seconds + figures.idle_seconds
    return {
        "gpuDevice": "",
        "gpuModel": ", ".join(sorted({key.model for key in keys} - {""})),
        "gpuUUID": "",
        "gpuUsageAverage": figures.active_seconds / window.seconds if known else None,
        "gpuRequestAverage": figures.allocated_seconds / window.seconds,
    }


def _properties(keys: Sequence[LineKey], values: Mapping[str, Any]) -> dict[str, Any]:
    """What all lines of the row have in common, of what is asked for."""
    found: dict[str, Any] = {}
    asked = {one for name in values["aggregate"] for one in part_of(name).dimensions}
    parts = {
        "cluster": [key.cluster for key in keys],
        "node": [key.node for key in keys],
        "namespace": [key.namespace for key in keys],
        "controllerKind": [kind_of(key) for key in keys if not is_apart(key)],
        "controller": [key.workload for key in keys],
    }
    for name, several in parts.items():
        if len(set(several)) == 1 and several[0]:
            found[name] = several[0]
    teams = {key.team for key in keys}
    if "team" in asked and len(teams) == 1 and teams != {""}:
        found["labels"] = {"team": teams.pop()}
    return found


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"


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


async def _assets(ask: Ask) -> Answer:
    """Answer with the GPUs' money of every node, held or not."""
    wanted = ask.values["filter"] or {}
    wrong = sorted(set(wanted) - {"cluster", "node"})
    if wrong:
        raise ConfigError(f"filter: {', '.join(wrong)} is no property of a node; allowed: cluster, node")
    report = await ask.book.report(
        ask.values["window"], ("cluster", "node"), _pushed(wanted, "none"), share_idle="none"
    )
    money = _money(ask, [report])
    types = ask.values["filterTypes"]
    rows: dict[tuple[str, str], _Row] = {}
    for line in (*report.held, *report.apart):
        rows.setdefault((line.key.cluster, line.key.node), _Row()).add(line)
    nodes = {
        "/".join(part for part in (cluster, "Node", node) if part): asset
        for (cluster, node), row in sorted(rows.items())
        if (types is None or "node" in types) and (asset := _asset(cluster, node, row, report.window, money))
    }
    # OpenCost has one set of assets where Kubecost, whose parameter this is, has a list of sets.
    data = nodes if types is None else [nodes]
    return await _answer(ask, data, money, [report], ())


def _asset(cluster: str, node: str, row: _Row, window: Window, money: _Money) -> dict[str, Any] | None:
    """Return a node's row; ``None`` where its money is in other currencies only."""
    figures = total_of(row.figures)
    amount = figures.money.get(money.currency)
    if amount is None and figures.money:
        return None
    cost = amount.total if amount else None
    start, end = _time(window.start_seconds), _time(window.end_seconds)
    return {
        "type": "Node",
        "properties": {"category": "Compute", "service": "Kubernetes", "cluster": cluster, "name": node},
        "labels": {},
        "window": {"start": start, "end": end},
        "start": start,
        "end": end,
        "minutes": window.seconds / 60,
        "gpuCount": figures.allocated_seconds / window.seconds,
        "GPUHours": figures.allocated_seconds / HOUR_SECONDS,
        "gpuCost": cost,
        "cpuCost": 0.0,
        "ramCost": 0.0,
        "adjustment": 0.0,
        "totalCost": cost,
    }


async def _suggestions(ask: Ask) -> Answer:
    """Answer with the values of a field that occur in the window."""
    field_name, search = ask.values["field"] or "", (ask.values["search"] or "").lower()
    found: set[str] = set()
    if field_name in FILTER_DIMENSIONS:
        wanted = ask.values["filter"] or {}
        dimensions = [one for name in (field_name, *wanted) for one in dimensions_of_field(name)]
        report = await ask.book.report(ask.values["window"], tuple(dict.fromkeys(dimensions)), _pushed(wanted, "none"))
        found = {value_of(field_name, line.key) for line in report.held if keeps(wanted, line.key)} - {""}
    names = sorted(name for name in found if search in name.lower())[: ask.values["limit"]]
    return Answer(body=responses.json_body({"code": 200, "status": "success", "data": names}))


async def _configs(ask: Ask) -> Answer:
    """Answer with the currency, which clients show beside amounts."""
    known = sorted({month.currency for month in await ask.book.months()})
    usual = ask.settings.currency
    if not usual and len(known) > 1:
        raise ConfigError(f"currency: money is in {', '.join(known)}; start the service with --currency")
    document = {"code": 200, "status": "success", "data": {"currencyCode": usual or (known[0] if known else "")}}
    return Answer(body=responses.json_body(document))


def _text(name: str, about: str) -> Parameter:
    return Parameter(name=name, about=about, parse=lambda text, _: text.strip(), allowed="any text")


_SUGGESTION_PARAMETERS: tuple[Parameter, ...] = (
    *(one for one in PARAMETERS if one.name in {"window", "filter", "limit"}),
    _text("field", f"Whose values: {', '.join(FILTER_DIMENSIONS)}; anything else has none."),
    _text("search", "Only values that contain this, whatever the case."),
)
_ASSET_PARAMETERS: tuple[Parameter, ...] = (
    *(one for one in PARAMETERS if one.name in {"window", "currency"}),
    Parameter(
        name="filter",
        about='Nodes that are wanted: cluster:"a" or node:"a","b", joined by +.',
        parse=conditions,
        allowed='such as cluster:"a"',
    ),
    Parameter(
        name="filterTypes",
        about="Kubecost's: types of assets; there are nodes only. Where it is given, data is a list of one set.",
        parse=lambda text, _: frozenset(one.strip().lower() for one in text.split(",")),
        allowed="Node",
    ),
    *(ignored(name) for name in ("aggregate", "accumulate", "includeIdle", "step", "disableAdjustments")),
)

_PATHS = (
    ("/allocation", "Cost of GPUs in the shape of OpenCost's allocation API."),
    ("/allocation/compute", "The same; the path that OpenCost's own page asks."),
    ("/model/allocation", "The same; the path that clients of Kubecost ask."),
    ("/model/allocation/compute", "The same; the path of OpenCost's own page without a proxy of its own."),
)
_ASSET_PATHS = (
    ("/assets", "Cost of the GPUs of every node in the shape of OpenCost's assets."),
    ("/model/assets", "The same; the path that clients of Kubecost ask."),
)
_SUGGESTION_PATHS = (
    ("/allocation/autocomplete", "Values of a field, for the filters of OpenCost's own page."),
    ("/model/allocation/autocomplete", "The same, for a page without a proxy of its own."),
)
_CONFIG_PATHS = (("/model/getConfigs", "The currency that clients of Kubecost show."),)

ENDPOINTS: tuple[Endpoint, ...] = tuple(
    Endpoint(path=path, about=about, handle=handle, parameters=parameters, schema=schema, ignores_unknown=True)
    for handle, parameters, schema, paths in (
        (_allocation, PARAMETERS, "Allocations", _PATHS),
        (_assets, _ASSET_PARAMETERS, "Assets", _ASSET_PATHS),
        (_suggestions, _SUGGESTION_PARAMETERS, "Suggestions", _SUGGESTION_PATHS),
        (_configs, (), "Configs", _CONFIG_PATHS),
    )
    for path, about in paths
)

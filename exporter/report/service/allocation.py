"""OpenCost's `/allocation` over the GPU ledger, so that its clients can point here; see docs/service.md."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from exporter.errors import ConfigError
from exporter.report.fleet.costs import is_apart, total_of
from exporter.report.fleet.report import FleetReport, ReportLine, ShareIdle
from exporter.report.fleet.values import (
    HOUR_SECONDS,
    UNATTRIBUTED,
    Dimension,
    Figures,
    Filters,
    LineKey,
    Window,
)
from exporter.report.service import responses
from exporter.report.service.allocation_parts import (
    FILTER_DIMENSIONS,
    IDLE,
    NOBODY,
    PARTS,
    UNATTRIBUTED_NAME,
    keeps,
    kind_of,
)
from exporter.report.service.allocation_query import PARAMETERS, sets_of, wanted_of
from exporter.report.service.api import Answer, Ask, Endpoint
from exporter.report.service.parameters import shown

AT_ONCE = 2
"""Sets that are read at the same time, so that one client leaves room for others."""
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
    periods = sets_of(values["window"], values)
    reports = await _reports(ask, periods)
    currency = _currency(values["currency"], reports)
    sets = await asyncio.to_thread(lambda: [_set(report, values, currency) for report in reports])
    document: dict[str, Any] = {"code": 200, "status": "success", "data": sets, "currency": currency or None}
    warnings = list(dict.fromkeys(warning for report in reports for warning in _warnings(report)))
    if warnings:
        document["warning"] = "; ".join(warnings)
    return Answer(body=await asyncio.to_thread(responses.json_bytes, document))


async def _reports(ask: Ask, periods: Sequence[Window]) -> list[FleetReport]:
    values = ask.values
    share, wanted = _share(values), wanted_of(values)
    turn = asyncio.Semaphore(AT_ONCE)

    async def read(period: Window) -> FleetReport:
        async with turn:
            return await ask.book.report(period, _dimensions(values, share), _pushed(wanted, share), share_idle=share)

    return list(await asyncio.gather(*(read(period) for period in periods)))


def _share(values: Mapping[str, Any]) -> ShareIdle:
    share: ShareIdle = values["shareSplit"] if values["shareIdle"] == "true" else values["shareIdle"]
    return share


def _dimensions(values: Mapping[str, Any], share: ShareIdle) -> tuple[Dimension, ...]:
    found: list[Dimension] = [one for name in values["aggregate"] for one in PARTS[name].dimensions]
    found += [one for name in wanted_of(values) for one in FILTER_DIMENSIONS[name]]
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
        wanted={FILTER_DIMENSIONS[name][0]: values for name, values in wanted.items() if name != "controllerKind"}
    )


def _currency(asked: str | None, reports: Iterable[FleetReport]) -> str:
    known = sorted({currency for report in reports for currency in report.currencies})
    if asked and known and asked not in known:
        raise ConfigError(f"currency: there is no money in '{shown(asked)}'; allowed: {', '.join(known)}")
    if not asked and len(known) > 1:
        raise ConfigError(
            f"currency: money is in {', '.join(known)}, and is not added across currencies; allowed: one of them"
        )
    return asked or (known[0] if known else "")


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
    if not is_apart(key):
        return "/".join(PARTS[name].name(key) or NOBODY for name in values["aggregate"])
    own = UNATTRIBUTED_NAME if key.kind == UNATTRIBUTED else IDLE
    if values["idleByNode"]:
        return "/".join(part for part in (key.cluster, key.node, own) if part)
    return "/".join(part for part in (key.cluster, own) if part) if values["splitIdle"] else own


def _shows_idle(row: _Row, values: Mapping[str, Any], currency: str) -> bool:
    """Asked for; where it was spread only if something could not be."""
    if _share(values) == "none":
        return bool(values["includeIdle"])
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
    asked = {one for name in values["aggregate"] for one in PARTS[name].dimensions}
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


ENDPOINTS: tuple[Endpoint, ...] = tuple(
    Endpoint(
        path=path,
        about=about,
        handle=_allocation,
        parameters=PARAMETERS,
        schema="Allocations",
    )
    for path, about in (
        ("/allocation", "Cost of GPUs in the shape of OpenCost's allocation API."),
        ("/allocation/compute", "The same; the path that OpenCost's own page asks."),
        ("/model/allocation", "The same; the path that clients of Kubecost ask."),
    )
)

"""A fleet's report as JSON, for programs; the service's API answers with the same document."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from exporter.report.fleet.costs import is_apart, is_part
from exporter.report.fleet.report import FleetReport, ReportLine
from exporter.report.fleet.values import Figures, LineKey, Window, pairs
from exporter.report.render.rows import active_ratio, charged, is_shared
from exporter.report.render.words import encodable

API_VERSION = 1


def write_json(report: FleetReport, stream: TextIO) -> None:
    """One object, each line of ``lines`` on a line of its own."""
    head = {**_head(report), "lines": None, **_foot(report)}
    for number, (key, value) in enumerate(head.items()):
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


def document(report: FleetReport) -> dict[str, Any]:
    """The report as plain values; units are in the keys, times Unix seconds, ``None`` is not known or summed over.

    Keys: ``api_version``, ``window``, ``by``, ``filters``, ``share_idle``, ``share_unallocated``, ``lines`` (held,
    dearest first, then apart), ``total``, ``periods`` (of the lines' ``series``, where asked for), ``trust``,
    ``engine``, ``simulated``, ``prices``. docs/cost.md has the keys within them.
    """
    return {**_head(report), "lines": list(_lines(report)), **_foot(report)}


def _text(value: object) -> str:
    return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _head(report: FleetReport) -> dict[str, Any]:
    return {
        "api_version": API_VERSION,
        "window": {**_period(report.window), "label": report.window.label or None},
        "by": list(report.by),
        "filters": {dimension: sorted(values) for dimension, values in sorted(report.filters.wanted.items())},
        "share_idle": report.share_idle,
        "share_unallocated": report.share_unallocated,
    }


def _foot(report: FleetReport) -> dict[str, Any]:
    trust = report.trust
    return {
        "total": _total(report),
        "periods": [_period(period) for period in report.periods],
        "trust": {
            "whole": trust.whole,
            "capacity_seconds": trust.capacity_seconds,
            "missing_seconds": None if is_part(report.filters) else trust.missing_seconds,
            "expected_hours": trust.expected_hours,
            "recorded_hours": trust.recorded_hours,
            "period_coverage_ratio": trust.period_coverage_ratio,
            "activity_coverage_ratio": trust.activity_coverage_ratio,
            "price_coverage_ratio": trust.price_coverage_ratio,
            "failures": [
                {**_period(failure.window), "what": failure.what, "reason": failure.reason}
                for failure in trust.failures
            ],
            "notes": list(trust.notes),
        },
        "engine": report.engine or None,
        "simulated": report.simulated,
        "prices": report.prices or None,
    }


def _total(report: FleetReport) -> dict[str, Any]:
    found = figures_keys(report.total)
    for money in found["money"]:
        whole = report.total.money_in(money["currency"])
        money |= {"active_cost": whole.active, "unknown_cost": whole.unknown}
    return found


def _period(window: Window) -> dict[str, Any]:
    return {"from_seconds": window.start_seconds, "to_seconds": window.end_seconds}


def _lines(report: FleetReport) -> Iterator[dict[str, Any]]:
    for line, charges in zip((*report.held, *report.apart), charged(report), strict=True):
        yield _line(line, charges, with_shares=is_shared(report))


def _line(line: ReportLine, amounts: Mapping[str, float], *, with_shares: bool) -> dict[str, Any]:
    found = {**key_keys(line.key), "held": not is_apart(line.key), **figures_keys(line.figures)}
    if with_shares:
        found["charges"] = [
            {"currency": currency, "shared": line.shared.get(currency, 0.0), "charged": amount}
            for currency, amount in sorted(amounts.items())
        ]
    if line.series:
        found["series"] = [figures_keys(figures) for figures in line.series]
    return found


def key_keys(key: LineKey) -> dict[str, Any]:
    """How a line is named in JSON, as the agent's ledger names its accounts; ``None`` is not known or summed over."""
    return {
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
    }


def figures_keys(figures: Figures) -> dict[str, Any]:
    """How figures are spelt in JSON, as the agent's ledger spells its totals."""
    return {
        "allocated_seconds": figures.allocated_seconds,
        "active_seconds": figures.active_seconds,
        "idle_seconds": figures.idle_seconds,
        "unknown_seconds": figures.unknown_seconds,
        "unpriced_seconds": figures.unpriced_seconds,
        "active_ratio": active_ratio(figures),
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

"""Converts a fleet's report to its one JSON document, for the command and the API."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, TypeAlias

from exporter.cost.ledger import LABEL, Figures, LineKey, Window, pairs
from exporter.cost.node_report import APART, NodeReport, add, owner_name
from exporter.cost.render_rows import active_ratio, charged, encodable, is_shared
from exporter.cost.report import FleetReport, ReportLine, is_apart, is_part
from exporter.model import Account, Owner, Totals

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


By: TypeAlias = str
"""One of ``BY``, or ``label:KEY``."""
BY: tuple[By, ...] = ("owner", "namespace", "team", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line; what it sums over, and what is not known, is empty. Seconds are share-weighted GPU-seconds."""

    owner: Owner
    model: str = ""
    mode: str = ""
    totals: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Who held GPUs, dearest first, then longest; and apart what no known owner held."""

    by: By
    held: tuple[Line, ...]
    apart: tuple[Line, ...]


_Key = tuple[Owner, str, str]
_KEYS: Mapping[By, Callable[[Account], _Key]] = {
    "owner": lambda account: (account.owner.without_cost_labels, account.model, account.mode.value),
    "namespace": lambda account: (Owner(namespace=account.owner.namespace), "", ""),
    "team": lambda account: (Owner(team=account.owner.team), "", ""),
    "model": lambda account: (Owner(), account.model, ""),
}


def lines(report: NodeReport, by: By) -> Lines:
    """The report's lines summed by ``by``; time without an owner stays apart, and by model where models are told."""
    apart_key = _KEYS["owner"] if by == "owner" else _apart_by_model if by == "model" else _apart
    held = _summed(report.owners, _by_label(by) if by.startswith(LABEL) else _KEYS[by])
    apart = _summed(report.apart, apart_key)
    return Lines(
        by=by,
        held=tuple(sorted(held, key=_rank)),
        apart=tuple(sorted(apart, key=lambda line: (APART.index(line.owner), _rank(line)))),
    )


def label_keys(report: NodeReport) -> set[str]:
    """Keys of the cost labels that owners have."""
    return {key for account, _ in report.owners for key in pairs(account.owner.cost_labels)}


def _by_label(by: By) -> Callable[[Account], _Key]:
    return lambda account: (Owner(cost_labels=LineKey(labels=account.owner.cost_labels).at((by,)).labels), "", "")


def _apart(account: Account) -> _Key:
    return account.owner, "", ""


def _apart_by_model(account: Account) -> _Key:
    return account.owner, account.model, ""


def _summed(accounts: Iterable[tuple[Account, Totals]], key_of: Callable[[Account], _Key]) -> list[Line]:
    parts: dict[_Key, list[Totals]] = {}
    for account, totals in accounts:
        parts.setdefault(key_of(account), []).append(totals)
    return [
        Line(owner=owner, model=model, mode=mode, totals=many[0] if len(many) == 1 else add(many))
        for (owner, model, mode), many in parts.items()
    ]


def _rank(line: Line) -> tuple[float, float, str, str, str, str]:
    # Currencies cannot be compared; a book has one, and then this is the order of money.
    cost = sum(money.total for money in line.totals.money.values())
    owner = line.owner
    return (-cost, -line.totals.allocated_seconds, owner_name(owner), owner.team, line.model, line.mode)

"""The lines of a report: owner by owner, or summed by namespace, team or model; their sum is the same."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from exporter.model import Account, Owner, Totals
from exporter.report.fleet.values import LABEL, LineKey, pairs
from exporter.report.node_report import APART, NodeReport, add, owner_name

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

"""What a fleet's ledger says of the GPUs of one model on one node over one day: the charge that owners share."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from exporter.model import Money, NodeFacts
from exporter.report.fleet.values import UNALLOCATED, UNATTRIBUTED, Chunk, Figures, FleetLedger, LineKey, Window
from exporter.report.focus.values import FocusSummary

APART = (UNATTRIBUTED, UNALLOCATED)
"""What no known owner held: the remainder of a split charge, in the order in which it is told."""


class OwnerKey(NamedTuple):
    """Who a part of a charge is for; the remainder has the kind alone."""

    namespace: str
    kind: str
    workload: str
    team: str
    labels: str = ""

    @property
    def is_remainder(self) -> bool:
        """Whether nobody that is known held it."""
        return self.kind in APART

    @property
    def path(self) -> str:
        """``namespace/kind/workload``, without what is not known."""
        return "/".join(part for part in self[:3] if part) or "(unknown owner)"


@dataclass(slots=True, kw_only=True)
class Part:
    """What one owner has of a charge. Seconds are share-weighted GPU-seconds, money is in the origin's currency."""

    owner: OwnerKey
    modes: set[str] = field(default_factory=set)
    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    money: Money = field(default_factory=Money)

    @property
    def seconds(self) -> float:
        """Held."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds

    def add(self, figures: Figures, mode: str, currency: str, *, with_seconds: bool) -> None:
        """Add a line; its seconds only once where it has money in several currencies."""
        self.modes.add(mode)
        self.money += figures.money_in(currency)
        if with_seconds:
            self.active_seconds += figures.active_seconds
            self.idle_seconds += figures.idle_seconds
            self.unknown_seconds += figures.unknown_seconds
            self.unpriced_seconds += figures.unpriced_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """One charge before it is split; its parts in the order of owners, the remainder last."""

    window: Window
    cluster: str
    node: str
    model: str
    currency: str
    facts: NodeFacts
    parts: tuple[Part, ...]


def origins(ledger: FleetLedger, summary: FocusSummary) -> Iterator[Origin]:
    """Charges of the ledger in the order of time, cluster, node and model; notes in ``summary`` what has no price."""
    for chunk in ledger.chunks:
        summary.capacity_gpu_hours += sum(chunk.capacity_seconds.values()) / 3600
        for (cluster, node, model), lines in groupby(sorted(chunk.lines.items(), key=_place), key=_place):
            parts = _parts(tuple(lines), (cluster, node, model), summary)
            for currency in sorted(parts):
                facts = ledger.nodes.get((cluster, node), NodeFacts())
                yield _origin(chunk, cluster, node, model, currency, facts, parts[currency])


def _place(line: tuple[LineKey, Figures]) -> tuple[str, str, str]:
    return line[0].cluster, line[0].node, line[0].model


def _parts(
    lines: tuple[tuple[LineKey, Figures], ...], place: tuple[str, str, str], summary: FocusSummary
) -> dict[str, dict[OwnerKey, Part]]:
    """By currency and owner."""
    found: dict[str, dict[OwnerKey, Part]] = {}
    for key, figures in lines:
        summary.ledger_gpu_hours += figures.allocated_seconds / 3600
        if not figures.money:
            if not figures.allocated_seconds:
                continue  # joules alone: there is no hour that lacks a price
            summary.unpriced_seconds[place] = summary.unpriced_seconds.get(place, 0.0) + figures.allocated_seconds
            continue
        owner = OwnerKey(key.namespace, key.kind, key.workload, key.team, key.labels)
        for number, currency in enumerate(sorted(figures.money)):
            parts = found.setdefault(currency, {})
            part = parts.setdefault(owner, Part(owner=owner))
            part.add(figures, key.mode, currency, with_seconds=not number)
    return found


def _origin(
    chunk: Chunk,
    cluster: str,
    node: str,
    model: str,
    currency: str,
    facts: NodeFacts,
    parts: dict[OwnerKey, Part],
) -> Origin:
    ordered = sorted(parts.values(), key=lambda part: (_rank(part.owner), part.owner))
    return Origin(
        window=chunk.window,
        cluster=cluster,
        node=node,
        model=model,
        currency=currency,
        facts=facts,
        parts=tuple(ordered),
    )


def _rank(owner: OwnerKey) -> int:
    return APART.index(owner.kind) + 1 if owner.is_remainder else 0

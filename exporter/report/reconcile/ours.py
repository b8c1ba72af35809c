"""What the ledger has for like instances: GPU-hours day by day, and money at our prices."""

from collections.abc import Mapping as Map
from dataclasses import dataclass, field
from decimal import Decimal

from exporter.model import NodeFacts
from exporter.report.fleet.values import HOUR_SECONDS, Chunk, FleetLedger
from exporter.report.focus.amounts import exact
from exporter.report.reconcile.bill import Bill
from exporter.report.reconcile.mapping import Mapping

_NEAR_WHOLE = 0.05

Place = tuple[str, str]
"""Instance type and region."""


@dataclass(slots=True, kw_only=True)
class Metered:
    """What was metered of like instances."""

    hours: dict[int, float] = field(default_factory=dict)
    """GPU-hours, by the Unix time at which the UTC day begins."""
    unpriced_hours: float = 0.0
    priced_hours: dict[str, float] = field(default_factory=dict)
    """By currency."""
    cost: dict[str, Decimal] = field(default_factory=dict)
    """By currency."""
    gpus: int | None = None
    """Of one instance, as its fullest day tells."""

    @property
    def gpu_hours(self) -> float:
        """Of all days."""
        return sum(self.hours.values())


def metered(ledger: FleetLedger, bill: Bill, mapping: Mapping) -> dict[Place, Metered]:
    """The ledger by instance type and region; empty where a node's is not known.

    A node without the label has the type that the mapping or a mapped line of the bill tells; one without a region has
    the bill's, where the bill has its type in a single one.
    """
    places = {node: _place(node, facts, bill, mapping) for node, facts in ledger.nodes.items()}
    found: dict[Place, Metered] = {}
    for chunk in ledger.chunks:
        by_node: dict[tuple[str, str], float] = {}
        for key, figures in chunk.lines.items():
            node = (key.cluster, key.node)
            if node not in places:
                places[node] = _place(node, NodeFacts(), bill, mapping)
            group = found.setdefault(places[node], Metered())
            hours = figures.allocated_seconds / HOUR_SECONDS
            by_node[node] = by_node.get(node, 0.0) + hours
            group.hours[_day(chunk)] = group.hours.get(_day(chunk), 0.0) + hours
            unpriced = figures.unpriced_seconds / HOUR_SECONDS if figures.money else hours
            group.unpriced_hours += unpriced
            for number, (currency, money) in enumerate(sorted(figures.money.items())):
                group.cost[currency] = group.cost.get(currency, Decimal(0)) + exact(money.total)
                priced = 0.0 if number else hours - unpriced
                group.priced_hours[currency] = group.priced_hours.get(currency, 0.0) + priced
        for node, hours in by_node.items():
            group = found[places[node]]
            count = _whole(hours / chunk.window.hours)
            group.gpus = max(filter(None, (group.gpus, count)), default=None)
    return found


def _place(node: tuple[str, str], facts: NodeFacts, bill: Bill, mapping: Mapping) -> Place:
    told_type, told_region = bill.node_types.get(node, ("", ""))
    instance_type = facts.instance_type or mapping.instance_types.get(node, "") or told_type
    region = facts.region or told_region
    if instance_type and not region:
        regions = {key.region for key in bill.groups if key.instance_type == instance_type}
        region = regions.pop() if len(regions) == 1 else ""
    return instance_type, region


def _day(chunk: Chunk) -> int:
    start = chunk.window.start_seconds
    return start - start % (24 * HOUR_SECONDS)


def _whole(gpus: float) -> int | None:
    count = round(gpus)
    return count if count and abs(gpus - count) <= _NEAR_WHOLE * count else None


def recorded_ratios(ledger: FleetLedger) -> Map[int, float]:
    """By day: the part of its hours for which the ledger was recorded, over all clusters."""
    clusters = {name for chunk in ledger.chunks for name in chunk.recorded_hours}
    expected = max(len(clusters), 1)
    return {
        _day(chunk): min(1.0, sum(chunk.recorded_hours.values()) / (expected * chunk.window.hours))
        for chunk in ledger.chunks
    }

"""The truth of a simulated fleet: who had what, by UTC day, without any server in between."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from exporter.model import Money, Totals
from gpu_simulator.fleet_ledger import Line, NodeLedger, day_of, node_ledger
from gpu_simulator.fleet_plan import FleetNode, FleetPlan, fleet_nodes

_MS = 1000


class TruthKey(NamedTuple):
    """Whose a line is; empty where it is not known, or was summed away."""

    cluster: str = ""
    node: str = ""
    namespace: str = ""
    kind: str = ""
    """Of the workload, or ``Unallocated``, ``Unattributed``."""
    workload: str = ""
    team: str = ""
    labels: str = ""
    model: str = ""
    mode: str = ""


@dataclass(slots=True)
class Sum:
    """What adds up on a line, in whole milliseconds and joules."""

    active_ms: int = 0
    idle_ms: int = 0
    unknown_ms: int = 0
    unpriced_ms: int = 0
    energy_joules: int = 0
    active_cost: float = 0.0
    idle_cost: float = 0.0
    unknown_cost: float = 0.0

    @property
    def allocated_ms(self) -> int:
        """Active, idle and unknown, always."""
        return self.active_ms + self.idle_ms + self.unknown_ms

    @property
    def money(self) -> Money:
        """By state."""
        return Money(active=self.active_cost, idle=self.idle_cost, unknown=self.unknown_cost)

    def add(self, line: "Line | Sum") -> None:
        """Add a line, or another sum."""
        self.active_ms += line.active_ms
        self.idle_ms += line.idle_ms
        self.unknown_ms += line.unknown_ms
        self.unpriced_ms += line.unpriced_ms
        self.energy_joules += line.energy_joules
        self.active_cost += line.active_cost
        self.idle_cost += line.idle_cost
        self.unknown_cost += line.unknown_cost


Row = Line | Sum
TruthRows = dict[tuple[int, TruthKey, str], Sum]
"""By Unix time of the day's begin, owner and currency."""
TruthHours = dict[tuple[int, str], set[int]]
"""Recorded hours by day and cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTruth:
    """Totals by UTC day of the hours that end after ``start_seconds`` and by ``end_seconds``."""

    start_seconds: int
    end_seconds: int
    days: Mapping[int, Mapping[TruthKey, Totals]]
    """By Unix time of the day's begin."""
    recorded_hours: Mapping[int, Mapping[str, int]]
    """By day and cluster."""

    def total(self, *names: str, **wanted: str) -> dict[tuple[str, ...], Totals]:
        """Totals of the whole time, by fields of ``TruthKey``, of the lines that have the wanted values."""
        found: dict[tuple[str, ...], Totals] = {}
        for lines in self.days.values():
            for key, totals in lines.items():
                if all(getattr(key, name) == value for name, value in wanted.items()):
                    place = tuple(getattr(key, name) for name in names)
                    found[place] = added(found[place], totals) if place in found else totals
        return found

    def sum(self, **wanted: str) -> Totals:
        """One total of the whole time, of the lines that have the wanted values."""
        return self.total(**wanted).get((), Totals())

    @property
    def capacity_seconds(self) -> float:
        """GPU-seconds of all GPUs that were there."""
        return self.sum().allocated_seconds


def added(one: Totals, other: Totals) -> Totals:
    """Both together."""
    money = dict(one.money)
    for currency, more in other.money.items():
        before = money.get(currency, Money())
        money[currency] = before + more
    return Totals(
        active_seconds=one.active_seconds + other.active_seconds,
        idle_seconds=one.idle_seconds + other.idle_seconds,
        unknown_seconds=one.unknown_seconds + other.unknown_seconds,
        unpriced_seconds=one.unpriced_seconds + other.unpriced_seconds,
        energy_joules=one.energy_joules + other.energy_joules,
        money=money,
    )


@dataclass(slots=True)
class TruthCounter:
    """Adds up nodes; what several processes counted can be merged."""

    start_seconds: int
    end_seconds: int
    by_node: bool = True
    rows: TruthRows = field(default_factory=dict)
    hours: TruthHours = field(default_factory=dict)

    def add(self, ledger: NodeLedger) -> None:
        """Add one node."""
        node = ledger.node
        plan = node.plan
        days = [
            day_of(plan, hour) if self.start_seconds < plan.stamp(hour) <= self.end_seconds else 0
            for hour in range(plan.hours)
        ]
        for (owner, mode), lines in ledger.lines.items():
            key = TruthKey(node.cluster, node.name if self.by_node else "", *owner, owner.labels, node.spec.name, mode)
            at, row = 0, Sum()
            for hour, line in lines.items():
                day = days[hour]
                if day and day != at:
                    at, row = day, self.rows.setdefault((day, key, node.currency), Sum())
                if day:
                    row.add(line)
        for hour in ledger.there:
            if days[hour]:
                self.hours.setdefault((days[hour], node.cluster), set()).add(hour)

    def merge(self, other: "TruthCounter") -> None:
        """Add what another has counted."""
        for key, row in other.rows.items():
            self.rows.setdefault(key, Sum()).add(row)
        for place, hours in other.hours.items():
            self.hours.setdefault(place, set()).update(hours)

    def truth(self) -> FleetTruth:
        """What was counted so far."""
        days: dict[int, dict[TruthKey, Totals]] = {}
        for (day, key, currency), row in sorted(self.rows.items(), key=lambda item: item[0]):
            lines = days.setdefault(day, {})
            lines[key] = added(lines[key], _totals(row, currency)) if key in lines else _totals(row, currency)
        recorded: dict[int, dict[str, int]] = {}
        for (day, cluster), hours in sorted(self.hours.items()):
            recorded.setdefault(day, {})[cluster] = len(hours)
        return FleetTruth(
            start_seconds=self.start_seconds, end_seconds=self.end_seconds, days=days, recorded_hours=recorded
        )


def _totals(row: Sum, currency: str) -> Totals:
    return Totals(
        active_seconds=row.active_ms / _MS,
        idle_seconds=row.idle_ms / _MS,
        unknown_seconds=row.unknown_ms / _MS,
        unpriced_seconds=row.unpriced_ms / _MS,
        energy_joules=float(row.energy_joules),
        money={currency: row.money} if row.money.total else {},
    )


def fleet_truth(plan: FleetPlan) -> FleetTruth:
    """The truth over all of a fleet's time, with its nodes apart."""
    counter = TruthCounter(plan.start_seconds, plan.end_seconds)
    for ledger in ledgers(fleet_nodes(plan)):
        counter.add(ledger)
    return counter.truth()


def ledgers(nodes: Iterable[FleetNode]) -> Iterator[NodeLedger]:
    """Node after node: one at a time is in memory."""
    return map(node_ledger, nodes)


def truth_json(truth: FleetTruth) -> dict[str, Any]:
    """The truth as JSON: days, and in them lines in the order of their keys; seconds are GPU-seconds."""
    return {
        "simulated": True,
        "start_seconds": truth.start_seconds,
        "end_seconds": truth.end_seconds,
        "days": [
            {
                "start_seconds": day,
                "recorded_hours": truth.recorded_hours.get(day, {}),
                "lines": [
                    {
                        **{name: value for name, value in key._asdict().items() if value},
                        "active_seconds": totals.active_seconds,
                        "idle_seconds": totals.idle_seconds,
                        "unknown_seconds": totals.unknown_seconds,
                        "unpriced_seconds": totals.unpriced_seconds,
                        "energy_joules": totals.energy_joules,
                        "money": {
                            currency: {"total": money.total, "idle": money.idle}
                            for currency, money in totals.money.items()
                        },
                    }
                    for key, totals in lines.items()
                ],
            }
            for day, lines in truth.days.items()
        ],
    }

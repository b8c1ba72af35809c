"""What a simulated node's ledger records, hour by hour: who had how many seconds, joules and money."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from gpu_simulator.fleet_holdings import Holding, activity_ratio, away_hours, holdings, unmeasured_hours
from gpu_simulator.fleet_owners import NOBODY, FleetOwner
from gpu_simulator.fleet_plan import DAY_HOURS, DAY_SECONDS, HOUR_SECONDS, FleetNode, FleetPlan

_MS = 1000
_HOUR_MS = HOUR_SECONDS * _MS
_ROUNDING_MS = 200
"""What rounding down leaves of a GPU that is held by many; it belongs to a holder, and is not free."""
_EPOCH_WEEKDAY = 3
"""1970-01-01 was a Thursday."""


class Line(NamedTuple):
    """One owner's gain of one hour; integers add up without rounding."""

    active_ms: int
    idle_ms: int
    unknown_ms: int
    unpriced_ms: int
    energy_joules: int
    """0 where none was measured."""
    active_cost: float
    idle_cost: float
    unknown_cost: float

    @property
    def allocated_ms(self) -> int:
        """Active, idle and unknown, always."""
        return self.active_ms + self.idle_ms + self.unknown_ms

    @property
    def cost(self) -> float:
        """Of all states."""
        return self.active_cost + self.idle_cost + self.unknown_cost


class LineOwner(NamedTuple):
    """What the ledger's series of one node are told apart by."""

    owner: FleetOwner
    mode: str


class Use(NamedTuple):
    """How an owner used a device in an hour; milliseconds are of physical GPUs, by share."""

    active_ms: int
    idle_ms: int
    unknown_ms: int


Uses = dict[tuple[int, FleetOwner], dict[int, Use]]
"""By the first slot of the device, and owner; then by hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """One node's: lines by owner and hour of their sample, and what its devices were used for."""

    node: FleetNode
    lines: Mapping[LineOwner, Mapping[int, Line]]
    uses: Mapping[tuple[int, FleetOwner], Mapping[int, Use]]
    """Only of hours that were recorded."""
    there: tuple[int, ...]
    """Hours in which the node was there and was recorded."""


@lru_cache(maxsize=4)
def recording_hours(plan: FleetPlan) -> tuple[int, ...]:
    """For each hour the hour whose sample tells it; another than itself where Prometheus was away at its end.

    The rules look back on a counter for a day: what was counted while Prometheus was away stands in the first sample
    after.
    """
    recorded = list(range(plan.hours))
    if plan.outages and plan.days >= 3:  # noqa: PLR2004 - a shorter one would be an outage in the main
        middle = plan.hours // 3
        recorded[middle : middle + 3] = [middle + 3] * 3
    return tuple(recorded)


def node_ledger(node: FleetNode) -> NodeLedger:
    """All that a node records; active, idle and unknown over all owners is what its GPUs were there for."""
    recorded = recording_hours(node.plan)
    away = away_hours(node)
    uses = _uses(node, away)
    sums: dict[LineOwner, dict[int, list[int]]] = {}
    for (slot, owner), hours in uses.items():
        rows = sums.setdefault(LineOwner(owner, node.slots[slot].mode), {})
        for hour, use in hours.items():
            row = rows.get(recorded[hour])
            if row is None:
                rows[recorded[hour]] = list(use)
            else:
                row[0] += use.active_ms
                row[1] += use.idle_ms
                row[2] += use.unknown_ms
    return NodeLedger(
        node=node,
        lines={key: {hour: _line(node, hour, *rows[hour]) for hour in sorted(rows)} for key, rows in sums.items()},
        uses={
            key: {hour: use for hour, use in sorted(hours.items()) if recorded[hour] == hour}
            for key, hours in uses.items()
            if key[1] != NOBODY
        },
        there=tuple(hour for hour in range(node.plan.hours) if hour not in away and recorded[hour] == hour),
    )


def _uses(node: FleetNode, away: frozenset[int]) -> Uses:
    """Every holding, hour by hour, and what nobody held, by the first slot of its GPU."""
    random, unmeasured = node.random("activity"), unmeasured_hours(node)
    uses: Uses = {}
    free = [[_HOUR_MS] * node.plan.hours for _ in range(node.plan.gpus_per_node)]
    last: list[dict[int, dict[int, Use]]] = [{} for _ in free]
    first_hour = node.plan.start_seconds // HOUR_SECONDS
    devices = [node.device(slot) for slot in range(len(node.slots))]
    for holding in holdings(node):
        of_hour = uses.setdefault((devices[holding.slot], holding.owner), {})
        gpu = node.slots[holding.slot].gpu
        for hour in range(holding.start_seconds // HOUR_SECONDS, (holding.end_seconds - 1) // HOUR_SECONDS + 1):
            if hour in away:
                continue
            allocated = _allocated_ms(holding, hour)
            free[gpu][hour] -= allocated
            last[gpu][hour] = of_hour
            before = of_hour.get(hour, _NOTHING)
            if hour in unmeasured:
                of_hour[hour] = Use(before[0], before[1], before[2] + allocated)
                continue
            days, hour_of_day = divmod(first_hour + hour, DAY_HOURS)
            active = int(allocated * activity_ratio(holding, hour_of_day, (days + _EPOCH_WEEKDAY) % 7, random))
            of_hour[hour] = Use(before[0] + active, before[1] + allocated - active, before[2])
    for slot, part in enumerate(node.slots):
        if (slot == 0 or node.slots[slot - 1].gpu != part.gpu) and free[part.gpu]:
            uses[slot, NOBODY] = _nobodys(free[part.gpu], last[part.gpu], away, measured=node.measured)
    return uses


_NOTHING = Use(0, 0, 0)


def _nobodys(
    free: list[int], last: Mapping[int, dict[int, Use]], away: frozenset[int], *, measured: bool
) -> dict[int, Use]:
    """What is left of a GPU, hour by hour; a trifle that rounding left goes to its last holder."""
    rest: dict[int, Use] = {}
    for hour, left in enumerate(free):
        if hour in away or not left:
            continue
        if left >= _ROUNDING_MS:
            rest[hour] = Use(0, left, 0) if measured else Use(0, 0, left)
        else:
            active, idle, unknown = last[hour][hour]
            last[hour][hour] = Use(active, idle, unknown + left) if unknown else Use(active, idle + left, unknown)
    return rest


def _allocated_ms(holding: Holding, hour: int) -> int:
    begin = hour * HOUR_SECONDS
    seconds = min(holding.end_seconds, begin + HOUR_SECONDS) - max(holding.start_seconds, begin)
    return int(seconds * holding.share_ratio * _MS)


def _line(node: FleetNode, hour: int, active: int, idle: int, unknown: int) -> Line:
    price = node.price(hour)
    spec = node.spec
    joules = int((spec.idle_watts * idle + spec.power_limit_watts * active) / _MS)
    if price is None:
        return Line(active, idle, unknown, active + idle + unknown, joules, 0.0, 0.0, 0.0)
    money = (round(one * price / _HOUR_MS, 9) for one in (active, idle, unknown))
    return Line(active, idle, unknown, 0, joules, *money)


def day_of(plan: FleetPlan, hour: int) -> int:
    """Unix time of the begin of the UTC day that an hour lies in; the hour before midnight is of the day before."""
    return (plan.stamp(hour) - 1) // DAY_SECONDS * DAY_SECONDS

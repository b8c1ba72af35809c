"""Computes the hourly ledger of a simulated node: its holdings with their seconds, joules and cost."""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from random import Random
from typing import Any, Literal, NamedTuple

from exporter.model.ledger import Bottleneck, ByState, Totals
from gpu_simulator.fleet_plan import (
    DAY_HOURS,
    DAY_SECONDS,
    FLEET,
    HOUR_SECONDS,
    NOBODY,
    FleetNode,
    FleetOwner,
    FleetPlan,
    task,
    task_owner,
    team_names,
    workload,
)

Shape = Literal["busy", "bursty", "diurnal", "sessions", "low", "idle"]
LoadShape = tuple[Shape, float]
"""Shape, and highest activity (0-1)."""


class FleetHolding(NamedTuple):
    """A container on a slot; times are seconds since the fleet's start, within the fleet's time."""

    slot: int
    owner: FleetOwner
    start_seconds: int
    end_seconds: int
    share_ratio: float
    """Part of the physical GPU."""
    shape: Shape
    level_ratio: float
    """Highest activity, 0-1."""


_WEEK_DAYS, _OPEN_HOUR, _CLOSE_HOUR = 5, 9, 18
_SESSION_RATIO, _BURST_RATIO = 0.3, 0.6
_JITTER_RATIO = 0.05
_HUNG_RATIO, _HALF_RATIO = 0.12, 0.2
_MOST_WAIT_SECONDS = 900.0
_SERVICE_LOADS: tuple[LoadShape, ...] = tuple((shape, level) for shape, level in FLEET["service_loads"])
_TASK_LOADS: tuple[LoadShape, ...] = tuple((shape, level) for shape, level in FLEET["task_loads"])
_PART_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25)


def holdings(node: FleetNode) -> Iterator[FleetHolding]:
    """Return the holdings of a node, in sequence on each slot."""
    if node.use == "train":
        return _trainings(node)
    if node.use == "serve":
        return _services(node)
    if node.use == "interactive":
        return _notebooks(node)
    return _tasks(node)


def activity_ratio(holding: FleetHolding, hour_of_day: int, weekday: int, random: Random) -> float:
    """Return the activity in an hour, 0-1, rounded to 1/1000."""
    shape, level = holding.shape, holding.level_ratio
    if shape == "busy":
        ratio = level - _JITTER_RATIO * random.random()
    elif shape == "diurnal":
        ratio = level * float(FLEET["day"][hour_of_day])
    elif shape == "bursty":
        ratio = level if random.random() < _BURST_RATIO else 0.0
    elif shape == "sessions":
        there = weekday < _WEEK_DAYS and _OPEN_HOUR <= hour_of_day < _CLOSE_HOUR
        ratio = level * random.random() if there and random.random() < _SESSION_RATIO else 0.0
    else:
        ratio = level if shape == "low" else 0.0
    return round(min(max(ratio, 0.0), 1.0), 3)


def profile_of(node: FleetNode, owner: FleetOwner) -> tuple[Bottleneck, float] | None:
    """Return the bottleneck of a workload and its use of that limit (0-1); ``None`` without profiling."""
    if not node.profiled:
        return None
    # A separate seed, because a workload is the same program on all its nodes.
    random = Random(f"{node.plan.seed}/profile/{node.use}/{owner.namespace}/{owner.name}")  # noqa: S311 - as above
    bottleneck, ratio = random.choice(FLEET["profiles"][node.use])
    return Bottleneck(bottleneck), ratio * random.uniform(0.9, 1.1)


def _trainings(node: FleetNode) -> Iterator[FleetHolding]:
    """Yield jobs over all nodes of a group, in sequence; they depend on the seed of the group, so all nodes agree."""
    plan = node.plan
    random = Random(f"{plan.seed}/{node.group}")  # noqa: S311 - a repeatable simulation
    clock = -random.randrange(DAY_SECONDS)
    serial = 0
    end_of_time = plan.days * DAY_SECONDS
    while clock < end_of_time:
        seconds = int(HOUR_SECONDS * min(random.lognormvariate(3.0, 1.0), 240.0))
        team = random.choice(team_names(plan))
        name = f"pretrain-{node.group.replace('/', '-')}-{serial}"
        owner = FleetOwner(team, random.choice(("PyTorchJob", "RayJob", "Job")), name, team)
        level = random.uniform(0.75, 0.98)
        hung_after = int(seconds * random.random()) if random.random() < _HUNG_RATIO else seconds
        slots = len(node.slots) // 2 or 1 if random.random() < _HALF_RATIO else len(node.slots)
        for slot in range(slots):
            yield from _within(node, slot, owner, (clock, clock + hung_after), ("busy", level))
            yield from _within(node, slot, owner, (clock + hung_after, clock + seconds), ("idle", 0.0))
        clock += seconds + int(random.expovariate(1 / (3 * HOUR_SECONDS)))
        serial += 1


def _services(node: FleetNode) -> Iterator[FleetHolding]:
    """Yield Deployments that hold their GPU for weeks; some are scaled down at night."""
    random = node.random("services")
    for slot in range(len(node.slots)):
        clock = 0
        while clock < node.plan.days * DAY_SECONDS:
            seconds = random.randrange(5 * DAY_SECONDS, 40 * DAY_SECONDS)
            kind = "StatefulSet" if random.random() < _HALF_RATIO else "Deployment"
            owner = workload(node, random, kind, "serving", 4)
            what = random.choice(_SERVICE_LOADS)
            what = what[0], round(what[1] * random.uniform(0.4, 1.0), 3)
            if random.random() < _HALF_RATIO:
                for morning in range(clock // DAY_SECONDS * DAY_SECONDS, clock + seconds, DAY_SECONDS):
                    day = morning + 7 * HOUR_SECONDS, min(morning + 20 * HOUR_SECONDS, clock + seconds)
                    yield from _within(node, slot, owner, (max(day[0], clock), day[1]), what)
            else:
                yield from _within(node, slot, owner, (clock, clock + seconds), what)
            clock += seconds + random.randrange(2 * HOUR_SECONDS)


def _notebooks(node: FleetNode) -> Iterator[FleetHolding]:
    """Yield notebooks, and small services."""
    random = node.random("notebooks")
    for slot in range(len(node.slots)):
        clock = random.randrange(DAY_SECONDS)
        while clock < node.plan.days * DAY_SECONDS:
            seconds = random.randrange(4 * HOUR_SECONDS, 6 * DAY_SECONDS)
            what: LoadShape = "sessions", random.uniform(0.2, 0.9)
            owner = workload(node, random, "Notebook", "notebook", 9)
            if random.random() < _HALF_RATIO:
                what = "low", random.uniform(0.03, 0.2)
                owner = workload(node, random, "Deployment", "embedder", 3)
            yield from _within(node, slot, owner, (clock, clock + seconds), what)
            clock += seconds + int(random.expovariate(1 / (12 * HOUR_SECONDS)))


def _tasks(node: FleetNode) -> Iterator[FleetHolding]:
    """Yield short tasks on one GPU, a part of one, or several."""
    plan, random = node.plan, node.random("tasks")
    free = [(random.randrange(HOUR_SECONDS), slot) for slot in range(len(node.slots))]
    heapq.heapify(free)
    serial = 0
    while free[0][0] < plan.days * DAY_SECONDS:
        wanted = task(plan, random)
        taken = [heapq.heappop(free) for _ in range(min(wanted.gpus, len(free)))]
        begin = taken[-1][0] + int(random.random() * _MOST_WAIT_SECONDS)
        end = begin + max(1, wanted.seconds)
        owner = task_owner(node, random, serial)
        serial += 1
        what = random.choice(_TASK_LOADS)
        part = wanted.share_ratio if plan.trace else random.choice(_PART_RATIOS)
        for _, slot in taken:
            whole = node.slots[slot].share_ratio
            share = min(part, whole) if node.use == "parts" else whole
            yield from _within(node, slot, owner, (begin, end), what, share)
            heapq.heappush(free, (end, slot))


def _within(
    node: FleetNode,
    slot: int,
    owner: FleetOwner,
    span: tuple[int, int],
    what: LoadShape,
    share_ratio: float | None = None,
) -> Iterator[FleetHolding]:
    """Yield the holding, cut to the fleet's time, if any of it is in that time."""
    begin, end = max(span[0], 0), min(span[1], node.plan.days * DAY_SECONDS)
    if begin < end:
        share = node.slots[slot].share_ratio if share_ratio is None else share_ratio
        yield FleetHolding(slot, owner, begin, end, share, *what)


def away_hours(node: FleetNode) -> frozenset[int]:
    """Return the hours without the node: those of spot nodes, and one outage of every tenth other node."""
    plan, random = node.plan, node.random("away")
    if not plan.outages:
        return frozenset()
    if node.facts.capacity_type == "spot":
        first = random.randrange(DAY_HOURS)
        return frozenset(range(first)) | _stretch(random, plan.hours, 36)
    return _stretch(random, plan.hours, 20) if random.random() < 0.1 else frozenset()  # noqa: PLR2004 - one in ten


def unmeasured_hours(node: FleetNode) -> frozenset[int]:
    """Return the hours in which the activity of the node's GPUs was not measured."""
    random = node.random("unmeasured")
    if not node.measured:
        return frozenset(range(node.plan.hours))
    return frozenset(hour for hour in range(node.plan.hours) if random.random() < 0.005)  # noqa: PLR2004 - 1 in 200


def _stretch(random: Random, hours: int, longest: int) -> frozenset[int]:
    first = random.randrange(hours)
    return frozenset(range(first, min(first + random.randrange(1, longest), hours)))


MS = 1000
HOUR_MS = HOUR_SECONDS * MS
_ROUNDING_MS = 200
"""Largest rounding remainder of a GPU with many holders, which belongs to a holder and is not unallocated time."""
_EPOCH_WEEKDAY = 3
"""1970-01-01 was a Thursday."""


NAMES = ByState.__slots__
"""Names of the states."""


class FleetFigures(NamedTuple):
    """Additive figures of an owner, of an hour, a day or a model; integers have no rounding errors."""

    effective_ms: int = 0
    ineffective_ms: int = 0
    unprofiled_ms: int = 0
    idle_ms: int = 0
    unknown_ms: int = 0
    unpriced_ms: int = 0
    energy_joules: int = 0
    """Energy; 0 if it was not measured."""
    effective_cost: float = 0.0
    ineffective_cost: float = 0.0
    unprofiled_cost: float = 0.0
    idle_cost: float = 0.0
    unknown_cost: float = 0.0

    @property
    def active_ms(self) -> int:
        """Return the sum of effective, ineffective and unprofiled time."""
        return self.effective_ms + self.ineffective_ms + self.unprofiled_ms

    @property
    def allocated_ms(self) -> int:
        """Return the sum of active, idle and unknown time."""
        return self.active_ms + self.idle_ms + self.unknown_ms

    @property
    def money(self) -> ByState:
        """Return the cost by state."""
        return ByState(**{name: getattr(self, f"{name}_cost") for name in NAMES})

    def __add__(self, other: tuple[Any, ...]) -> "FleetFigures":
        """Return the sum of two lines."""
        return FleetFigures._make(map(add, self, other))

    def totals(self, currency: str) -> Totals:
        """Return the figures in seconds, with cost in a currency."""
        return Totals(
            seconds=ByState(**{name: getattr(self, f"{name}_ms") / MS for name in NAMES}),
            unpriced_seconds=self.unpriced_ms / MS,
            energy_joules=float(self.energy_joules),
            money={currency: self.money} if self.money.total else {},
        )


def add_at(rows: dict[Any, FleetFigures], place: object, more: FleetFigures) -> None:
    """Add figures to those at a place, which is usually empty."""
    rows[place] = rows[place] + more if place in rows else more


LineOwner = tuple[FleetOwner, str]
"""Owner and mode, which identify a series of a node's ledger."""
HourUses = dict[tuple[int, FleetOwner], dict[int, FleetFigures]]
"""Time without cost by first slot of the device and owner, then by hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLedger:
    """Ledger of a node: lines by owner and hour of their sample, and use of its devices."""

    node: FleetNode
    lines: Mapping[LineOwner, Mapping[int, FleetFigures]]
    uses: HourUses
    """Use of devices in recorded hours."""
    there: tuple[int, ...]
    """Recorded hours in which the node existed."""


@lru_cache(maxsize=4)
def recording_hours(plan: FleetPlan) -> tuple[int, ...]:
    """Return for each hour the hour in which it was recorded; a later one if Prometheus was down at its end.

    The rules read a counter over a day, so the first sample after an outage of Prometheus includes the increase of the
    outage.
    """
    recorded = list(range(plan.hours))
    if plan.outages and plan.days >= 3:  # noqa: PLR2004 - a shorter time would be mostly an outage
        middle = plan.hours // 3
        recorded[middle : middle + 3] = [middle + 3] * 3
    return tuple(recorded)


def node_ledger(node: FleetNode) -> NodeLedger:
    """Return the ledger of a node; active, idle and unknown time of all owners sum to the time of its GPUs."""
    recorded = recording_hours(node.plan)
    away = away_hours(node)
    uses = _uses(node, away)
    sums: dict[LineOwner, dict[int, FleetFigures]] = {}
    for (slot, owner), hours in uses.items():
        rows = sums.setdefault((owner, node.slots[slot].mode), {})
        for hour, use in hours.items():
            add_at(rows, recorded[hour], use)
    return NodeLedger(
        node=node,
        lines={key: {hour: _line(node, hour, rows[hour]) for hour in sorted(rows)} for key, rows in sums.items()},
        uses={
            key: {hour: use for hour, use in sorted(hours.items()) if recorded[hour] == hour}
            for key, hours in uses.items()
            if key[1] != NOBODY
        },
        there=tuple(hour for hour in range(node.plan.hours) if hour not in away and recorded[hour] == hour),
    )


def _uses(node: FleetNode, away: frozenset[int]) -> HourUses:
    """Return every holding by hour, and the unheld rest by the first slot of its GPU."""
    random, unmeasured = node.random("activity"), unmeasured_hours(node)
    uses: HourUses = {}
    free = [[HOUR_MS] * node.plan.hours for _ in range(node.plan.gpus_per_node)]
    last: list[dict[int, dict[int, FleetFigures]]] = [{} for _ in free]
    first_hour = node.plan.start_seconds // HOUR_SECONDS
    devices = [node.device(slot) for slot in range(len(node.slots))]
    for holding in holdings(node):
        profile = profile_of(node, holding.owner)
        of_hour = uses.setdefault((devices[holding.slot], holding.owner), {})
        gpu = node.slots[holding.slot].gpu
        for hour in range(holding.start_seconds // HOUR_SECONDS, (holding.end_seconds - 1) // HOUR_SECONDS + 1):
            if hour in away:
                continue
            allocated = _allocated_ms(holding, hour)
            free[gpu][hour] -= allocated
            last[gpu][hour] = of_hour
            if hour in unmeasured:
                use = FleetFigures(unknown_ms=allocated)
            else:
                days, hour_of_day = divmod(first_hour + hour, DAY_HOURS)
                active = int(allocated * activity_ratio(holding, hour_of_day, (days + _EPOCH_WEEKDAY) % 7, random))
                effective = int(active * profile[1]) if profile else 0
                use = FleetFigures(
                    effective_ms=effective,
                    ineffective_ms=active - effective if profile else 0,
                    unprofiled_ms=0 if profile else active,
                    idle_ms=allocated - active,
                )
            add_at(of_hour, hour, use)
    for slot, part in enumerate(node.slots):
        if (slot == 0 or node.slots[slot - 1].gpu != part.gpu) and free[part.gpu]:
            uses[slot, NOBODY] = _nobodys(free[part.gpu], last[part.gpu], away, measured=node.measured)
    return uses


def _nobodys(
    free: list[int], last: Mapping[int, dict[int, FleetFigures]], away: frozenset[int], *, measured: bool
) -> dict[int, FleetFigures]:
    """Return the unheld time of a GPU by hour; a rounding remainder is added to its last holder."""
    rest: dict[int, FleetFigures] = {}
    for hour, left in enumerate(free):
        if hour in away or not left:
            continue
        if left >= _ROUNDING_MS:
            rest[hour] = FleetFigures(idle_ms=left) if measured else FleetFigures(unknown_ms=left)
        else:
            use = last[hour][hour]
            last[hour][hour] = use + (FleetFigures(unknown_ms=left) if use.unknown_ms else FleetFigures(idle_ms=left))
    return rest


def _allocated_ms(holding: FleetHolding, hour: int) -> int:
    begin = hour * HOUR_SECONDS
    seconds = min(holding.end_seconds, begin + HOUR_SECONDS) - max(holding.start_seconds, begin)
    return int(seconds * holding.share_ratio * MS)


def _line(node: FleetNode, hour: int, use: FleetFigures) -> FleetFigures:
    """Return the figures of an hour with joules and cost."""
    price, spec = node.price(hour), node.spec
    joules = int((spec.idle_watts * use.idle_ms + spec.power_limit_watts * use.active_ms) / MS)
    if price is None:
        return use._replace(unpriced_ms=use.allocated_ms, energy_joules=joules)
    costs = {f"{name}_cost": round(getattr(use, f"{name}_ms") * price / HOUR_MS, 9) for name in NAMES}
    return use._replace(energy_joules=joules, **costs)

"""Who holds which part of a simulated node's GPUs from when to when, and how busy it keeps them."""

import heapq
from collections.abc import Iterator
from random import Random
from typing import Literal, NamedTuple

from gpu_simulator.fleet_owners import FleetOwner, task, task_owner, team_names, workload
from gpu_simulator.fleet_plan import DAY_HOURS, DAY_SECONDS, HOUR_SECONDS, FleetNode

Shape = Literal["busy", "bursty", "diurnal", "sessions", "low", "idle"]
Load = tuple[Shape, float]
"""Shape, and how busy it is at its busiest, 0-1."""


class Holding(NamedTuple):
    """A container on one slot; times are seconds since the fleet's start, and lie within the fleet's time."""

    slot: int
    owner: FleetOwner
    start_seconds: int
    end_seconds: int
    share_ratio: float
    """Of the physical GPU."""
    shape: Shape
    level_ratio: float
    """How busy it is when it is at its busiest, 0-1."""


_WEEK_DAYS, _OPEN_HOUR, _CLOSE_HOUR = 5, 9, 18
_SESSION_RATIO, _BURST_RATIO = 0.3, 0.6
_JITTER_RATIO = 0.05
_DAY_RATIOS = (
    (0.3, 0.25, 0.2, 0.2, 0.2, 0.3, 0.4, 0.55),
    (0.7, 0.85, 0.95, 1.0, 1.0, 1.0, 0.95, 0.95),
    (0.9, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4),
)
"""Of what is asked for at its busiest: each hour from midnight, eight in a row."""
_HUNG_RATIO, _HALF_RATIO = 0.12, 0.2
_MOST_WAIT_SECONDS = 900.0
_SERVICE_LOADS: tuple[Load, ...] = ("diurnal", 0.95), ("diurnal", 0.8), ("busy", 0.95), ("low", 0.12), ("idle", 0.0)
_TASK_LOADS: tuple[Load, ...] = ("busy", 0.95), ("busy", 0.8), ("bursty", 0.7), ("idle", 0.0)
_PART_RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25)


def holdings(node: FleetNode) -> Iterator[Holding]:
    """All that is held on a node; on a slot one after the other."""
    if node.use == "train":
        return _trainings(node)
    if node.use == "serve":
        return _services(node)
    if node.use == "interactive":
        return _notebooks(node)
    return _tasks(node)


def activity_ratio(holding: Holding, hour_of_day: int, weekday: int, random: Random) -> float:
    """How busy it is in an hour, 0-1, to 1/1000."""
    shape, level = holding.shape, holding.level_ratio
    if shape == "busy":
        ratio = level - _JITTER_RATIO * random.random()
    elif shape == "diurnal":
        ratio = level * _DAY_RATIOS[hour_of_day // 8][hour_of_day % 8]
    elif shape == "bursty":
        ratio = level if random.random() < _BURST_RATIO else 0.0
    elif shape == "sessions":
        there = weekday < _WEEK_DAYS and _OPEN_HOUR <= hour_of_day < _CLOSE_HOUR
        ratio = level * random.random() if there and random.random() < _SESSION_RATIO else 0.0
    else:
        ratio = level if shape == "low" else 0.0
    return round(min(max(ratio, 0.0), 1.0), 3)


def _trainings(node: FleetNode) -> Iterator[Holding]:
    """Jobs over all nodes of a group, one after the other: drawn from the group's seed, so that all nodes agree."""
    plan = node.plan
    random = Random(f"{plan.seed}/{node.group}")  # noqa: S311 - a simulation, repeatable on purpose
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


def _services(node: FleetNode) -> Iterator[Holding]:
    """Deployments that hold their GPU for weeks; some are scaled down at night."""
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


def _notebooks(node: FleetNode) -> Iterator[Holding]:
    """People's notebooks, and small services beside them."""
    random = node.random("notebooks")
    for slot in range(len(node.slots)):
        clock = random.randrange(DAY_SECONDS)
        while clock < node.plan.days * DAY_SECONDS:
            seconds = random.randrange(4 * HOUR_SECONDS, 6 * DAY_SECONDS)
            what: Load = "sessions", random.uniform(0.2, 0.9)
            owner = workload(node, random, "Notebook", "notebook", 9)
            if random.random() < _HALF_RATIO:
                what = "low", random.uniform(0.03, 0.2)
                owner = workload(node, random, "Deployment", "embedder", 3)
            yield from _within(node, slot, owner, (clock, clock + seconds), what)
            clock += seconds + int(random.expovariate(1 / (12 * HOUR_SECONDS)))


def _tasks(node: FleetNode) -> Iterator[Holding]:
    """Short tasks, of one GPU, of a part of one, or of several."""
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
    what: Load,
    share_ratio: float | None = None,
) -> Iterator[Holding]:
    """The holding, cut to the fleet's time; nothing where nothing of it is left."""
    begin, end = max(span[0], 0), min(span[1], node.plan.days * DAY_SECONDS)
    if begin < end:
        share = node.slots[slot].share_ratio if share_ratio is None else share_ratio
        yield Holding(slot, owner, begin, end, share, *what)


def away_hours(node: FleetNode) -> frozenset[int]:
    """Hours in which the node was not there: spot nodes come and go, and one in ten others was down once."""
    plan, random = node.plan, node.random("away")
    if not plan.outages:
        return frozenset()
    if node.facts.capacity_type == "spot":
        first = random.randrange(DAY_HOURS)
        return frozenset(range(first)) | _stretch(random, plan.hours, 36)
    return _stretch(random, plan.hours, 20) if random.random() < 0.1 else frozenset()  # noqa: PLR2004 - one in ten


def unmeasured_hours(node: FleetNode) -> frozenset[int]:
    """Hours in which nothing told how busy the node's GPUs were."""
    random = node.random("unmeasured")
    if not node.measured:
        return frozenset(range(node.plan.hours))
    return frozenset(hour for hour in range(node.plan.hours) if random.random() < 0.005)  # noqa: PLR2004 - 1 in 200


def _stretch(random: Random, hours: int, longest: int) -> frozenset[int]:
    first = random.randrange(hours)
    return frozenset(range(first, min(first + random.randrange(1, longest), hours)))

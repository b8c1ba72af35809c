"""Describes a simulated fleet: size and time, nodes and prices, teams, workloads and short tasks."""

import csv
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

from exporter.errors import ConfigError
from exporter.model.attribution import NodeFacts
from gpu_simulator.models import MODELS, table
from gpu_simulator.truth import ModelSpec

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400
DAY_HOURS = 24
RECORDED_AFTER_SECONDS = 900
"""Delay after an hour until its ledger is recorded, in seconds; the rules record it after 5 to 20 minutes."""
NodeUse = Literal["train", "serve", "interactive", "batch", "parts"]
"""Purpose of a pool of nodes."""


class TraceTask(NamedTuple):
    """A pod of a trace: run time, number of GPUs, and share of each GPU."""

    seconds: int
    gpus: int
    share_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Parameters of a simulated fleet; equal plans give equal fleets."""

    nodes: int
    gpus_per_node: int = 8
    days: int = 30
    end_seconds: int
    """Unix time of the end, a whole hour."""
    seed: int = 1
    clusters: tuple[str, ...] = ("",)
    """Names of clusters, each with a block of nodes; with an empty name, series have no label cluster."""
    currencies: tuple[str, ...] = ("USD",)
    """Currencies: the first is the default; on-premises nodes use the others in turn."""
    one_shot_ratio: float = 0.05
    """Part of the short tasks that are Jobs with a unique name, which increases the number of owners."""
    outages: bool = True
    """Whether nodes and Prometheus have outages."""
    trace: tuple[TraceTask, ...] = ()
    """Source of short tasks; empty: lifetimes are distributed as in a production trace."""

    def __post_init__(self) -> None:
        """Refuse invalid parameters.

        Raises:
            ConfigError: A parameter is invalid; the message has all of them.
        """
        problems = [
            f"{name}: {value}; allowed: {least:,} to {most:,}"
            for name, value, least, most in (
                ("nodes", self.nodes, 1, 100_000),
                ("gpus", self.gpus_per_node, 1, 64),
                ("days", self.days, 1, 3660),
                ("number of clusters", len(self.clusters), 1, max(1, self.nodes)),
                ("number of currencies", len(self.currencies), 1, 10),
                ("one-shot", self.one_shot_ratio, 0, 1),
            )
            if not least <= value <= most
        ]
        if len(set(self.clusters)) < len(self.clusters):
            problems.append(f"clusters: {','.join(self.clusters)}; allowed: each name once")
        if self.end_seconds % HOUR_SECONDS:
            problems.append(f"end: {self.end_seconds}; allowed: whole hours, such as 2026-10-01T14:00Z")
        if problems:
            raise ConfigError(*problems)

    @property
    def start_seconds(self) -> int:
        """Return the Unix time of the start."""
        return self.end_seconds - self.days * DAY_SECONDS

    @property
    def hours(self) -> int:
        """Return the number of hours; hour ``h`` ends at ``stamp(h)``."""
        return self.days * DAY_HOURS

    def stamp(self, hour: int) -> int:
        """Return the Unix time of an hour's end, which is that of its live samples."""
        return self.start_seconds + (hour + 1) * HOUR_SECONDS


class FleetSlot(NamedTuple):
    """Unit that a container can hold: a GPU, an instance, or a replica of a shared GPU."""

    gpu: int
    share_ratio: float
    """Part of the physical GPU."""
    mode: str
    instance: str = ""
    profile: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNode:
    """A simulated node with a separate random seed."""

    plan: FleetPlan
    index: int
    cluster: str
    name: str
    group: str
    """Name of the group of nodes that run the same multi-node trainings."""
    use: NodeUse
    spec: ModelSpec
    facts: NodeFacts
    slots: tuple[FleetSlot, ...]
    measured: bool
    """Whether the activity of its GPUs is measured."""
    profiled: bool
    """Whether all resources of its GPUs are measured."""
    currency: str
    price_per_hour: float
    """Base price of a physical GPU per hour, see ``price``; 0: no price."""
    priced_from_hour: int
    """First hour with a price."""

    def device(self, slot: int) -> int:
        """Return the first slot of the device of a slot: replicas of a shared GPU are one device."""
        if self.slots[slot].mode != "shared":
            return slot
        return next(number for number, part in enumerate(self.slots) if part.gpu == self.slots[slot].gpu)

    def random(self, purpose: str) -> Random:
        """Return a random generator with a repeatable sequence."""
        return Random(f"{self.plan.seed}/{self.index}/{purpose}")  # noqa: S311 - a repeatable simulation

    def price(self, hour: int) -> float | None:
        """Return the price of a GPU-hour at that time; spot prices change daily."""
        if hour < self.priced_from_hour or not self.price_per_hour:
            return None
        if self.facts.capacity_type != "spot":
            return self.price_per_hour
        return round(self.price_per_hour * (1 + 0.02 * ((hour // DAY_HOURS + self.index) % 10)), 4)


class _Pool(NamedTuple):
    use: NodeUse
    model: str
    instance_type: str
    capacity_type: str
    price: float
    parts: int = 1
    profile: str = ""
    instance_ratio: float = 1.0


_DOZEN = 12
_MIXED_DOZENS = 4
"""Every fourth dozen of nodes has all pools; the others train and serve, like most of a large fleet."""
FLEET = table("fleet")
_MIXED = tuple(_Pool(**row) for row in FLEET["pools"])
_COMMON = (*_MIXED[:3], *_MIXED[:3], *_MIXED[4:6], _MIXED[4], *_MIXED[7:9], _MIXED[7])
_LARGE_GROUP = 2 * _DOZEN
"""Number of adjacent nodes; those of one model train together, up to eight."""


def fleet_nodes(plan: FleetPlan) -> tuple[FleetNode, ...]:
    """Return all nodes; clusters can have nodes with the same name."""
    firsts: dict[int, int] = {}
    nodes = []
    for index in range(plan.nodes):
        place = index * len(plan.clusters) // plan.nodes
        nodes.append(_node(plan, index, place, index - firsts.setdefault(place, index)))
    return tuple(nodes)


def _node(plan: FleetPlan, index: int, place: int, number: int) -> FleetNode:
    dozen, member = divmod(index, _DOZEN)
    mixed, common = divmod(dozen, _MIXED_DOZENS)
    pool = _COMMON[member] if common else _MIXED[member]
    on_premises = not pool.instance_type
    turn = 1 + mixed % max(1, len(plan.currencies) - 1)
    currency = plan.currencies[turn % len(plan.currencies)] if on_premises else plan.currencies[0]
    # On premises, prices start late, and every second node has none.
    price = 0.0 if on_premises and mixed % 2 else pool.price
    spec = MODELS[pool.model]
    return FleetNode(
        plan=plan,
        index=index,
        cluster=plan.clusters[place],
        name=f"sim-node-{number:04d}",
        group=f"{place}/{index // _LARGE_GROUP}/{pool.model}",
        use=pool.use,
        spec=spec,
        facts=NodeFacts(
            instance_type=pool.instance_type,
            capacity_type=pool.capacity_type,
            region="" if on_premises else FLEET["regions"][place % len(FLEET["regions"])],
            gpu_product=spec.name.replace(" ", "-"),
        ),
        slots=tuple(slot for gpu in range(plan.gpus_per_node) for slot in _slots(pool, gpu)),
        # On A100, NVML does not measure the activity of instances.
        measured=not (pool.profile and pool.model == "a100-80gb"),
        profiled=pool.parts == 1 and pool.model in FLEET["profiled"],
        currency=currency,
        price_per_hour=price,
        priced_from_hour=plan.hours // 4 if on_premises else 0,
    )


def _slots(pool: _Pool, gpu: int) -> tuple[FleetSlot, ...]:
    if pool.profile:
        return tuple(
            FleetSlot(gpu, pool.instance_ratio, "mig", str(instance + 1), pool.profile)
            for instance in range(pool.parts)
        )
    if pool.parts > 1:
        return tuple(FleetSlot(gpu, 1 / pool.parts, "shared") for _ in range(pool.parts))
    return (FleetSlot(gpu, 1.0, "exclusive"),)


class FleetOwner(NamedTuple):
    """Owner of GPU time; empty fields are unknown. ``kind`` can be Unallocated or Unattributed."""

    namespace: str = ""
    kind: str = ""
    name: str = ""
    team: str = ""

    @property
    def labels(self) -> str:
        """Return the cost labels: environment of the namespace, and project of most workloads."""
        if not self.name:
            return ""
        project = self.name.partition("-")[0]
        environment = "dev" if self.namespace.endswith("-dev") else "prod"
        return f"environment={environment}" + (f",project={project}" if project != "debug" else "")


NOBODY = FleetOwner(kind="Unallocated")
UNATTRIBUTED = FleetOwner(kind="Unattributed")

_TEAMS: list[str] = FLEET["teams"]
_NODES_PER_TEAM = 8
_LIFETIMES: list[tuple[float, int]] = [(rank, seconds) for rank, seconds in FLEET["lifetimes"]]
_RANKS = tuple(rank for rank, _ in _LIFETIMES)
_UNKNOWN_RATIO, _PLAIN_POD_RATIO = 0.01, 0.05
_CRON_RATIO = 0.6
_TRACE_COLUMNS = ("num_gpu", "gpu_milli", "deletion_time", "scheduled_time")
_MILLI = 1000


@lru_cache(maxsize=4)
def team_names(plan: FleetPlan) -> tuple[str, ...]:
    """Return all teams; a larger fleet has more teams."""
    count = max(4, plan.nodes // _NODES_PER_TEAM)
    return tuple(
        _TEAMS[number % len(_TEAMS)] + (f"-{number // len(_TEAMS) + 1}" if number >= len(_TEAMS) else "")
        for number in range(min(count, 60))
    )


def workload(node: FleetNode, random: Random, kind: str, role: str, variants: int) -> FleetOwner:
    """Return a workload with a stable name, one of ``variants`` of its team; some teams have no label."""
    teams = team_names(node.plan)
    team = teams[int(len(teams) * random.random() ** 1.5)]
    namespace = team if random.random() < 0.7 else f"{team}-dev"  # noqa: PLR2004 - three in ten are in a dev namespace
    name = f"{role}-{random.randrange(variants)}"
    return FleetOwner(namespace, kind, name, "" if namespace == f"{teams[-1]}-dev" else team)


def task_owner(node: FleetNode, random: Random, serial: int) -> FleetOwner:
    """Return the owner of a short task; ``serial`` makes the name of one-shot tasks unique."""
    dice = random.random()
    if dice < node.plan.one_shot_ratio:
        owner = workload(node, random, "Job", "sweep", 1)
        return owner._replace(name=f"sweep-{node.index:04d}-{serial:05d}")
    if random.random() < _UNKNOWN_RATIO:
        return UNATTRIBUTED
    if random.random() < _PLAIN_POD_RATIO:
        return workload(node, random, "Pod", "debug", 3)
    if random.random() < _CRON_RATIO:
        return workload(node, random, "CronJob", "nightly", 6)
    return workload(node, random, "Workflow", "features", 4)


def task(plan: FleetPlan, random: Random) -> TraceTask:
    """Return run time, GPUs and share of a short task."""
    if plan.trace:
        return random.choice(plan.trace)
    rank = random.random()
    above = max(1, bisect_left(_RANKS, rank))
    (low_rank, low), (high_rank, high) = _LIFETIMES[above - 1], _LIFETIMES[above]
    return TraceTask(int(low + (high - low) * (rank - low_rank) / (high_rank - low_rank)), 1, 1.0)


def read_trace(file: Path) -> tuple[TraceTask, ...]:
    """Return the finished GPU pods of a trace.

    The file is CSV with the columns num_gpu, gpu_milli (of one GPU), deletion_time and scheduled_time (seconds).

    Raises:
        ConfigError: The file cannot be read, or is not a trace.
    """
    tasks = []
    try:
        with file.open(encoding="utf-8", newline="") as text:
            rows = csv.DictReader(text)
            missing = set(_TRACE_COLUMNS) - set(rows.fieldnames or ())
            if missing:
                raise ConfigError(f"--trace: {file}: no column {', '.join(sorted(missing))}; see docs/scenarios.md")
            for row in rows:
                one = _traced(row, f"--trace: {file}, line {rows.line_num}")
                if one is not None:
                    tasks.append(one)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"--trace: {file}: cannot be read: {error}; expected: a CSV file") from None
    if not tasks:
        raise ConfigError(f"--trace: {file}: no finished GPU pod; expected: a trace with some")
    return tuple(tasks)


def _traced(row: dict[str, str | None], where: str) -> TraceTask | None:
    gpus, milli, end, begin = (row[name] or "" for name in _TRACE_COLUMNS)
    if not end or not begin:
        return None
    try:
        seconds, count, share = int(float(end) - float(begin)), int(gpus), int(milli or 0) / _MILLI
    except (ValueError, OverflowError):
        raise ConfigError(f"{where}: not a number among {gpus!r}, {milli!r}, {end!r}, {begin!r}") from None
    return TraceTask(seconds, count, min(max(share, 1 / _MILLI), 1.0)) if seconds > 0 and count > 0 else None

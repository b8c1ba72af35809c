"""Whose pods a simulated fleet runs: teams, their namespaces and workloads, and how long tasks live."""

import csv
from bisect import bisect_left
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from exporter.errors import ConfigError
from gpu_simulator.fleet_plan import FleetNode, FleetPlan, TraceTask


class FleetOwner(NamedTuple):
    """Who pays; empty parts are not known. ``kind`` may be Unallocated or Unattributed."""

    namespace: str = ""
    kind: str = ""
    name: str = ""
    team: str = ""

    @property
    def labels(self) -> str:
        """Its cost labels: the environment of its namespace, and the project of most workloads."""
        if not self.name:
            return ""
        project = self.name.partition("-")[0]
        environment = "dev" if self.namespace.endswith("-dev") else "prod"
        return f"environment={environment}" + (f",project={project}" if project != "debug" else "")


NOBODY = FleetOwner(kind="Unallocated")
UNATTRIBUTED = FleetOwner(kind="Unattributed")

_TEAMS = ("vision", "speech", "search", "ads", "robotics", "genomics", "research", "platform", "fraud", "maps")
_NODES_PER_TEAM = 8
_LIFETIMES = (
    (0.0, 5),
    (0.01, 20),
    (0.05, 48),
    (0.1, 67),
    (0.25, 183),
    (0.5, 655),
    (0.75, 2303),
    (0.9, 7389),
    (0.95, 16_994),
    (0.99, 147_608),
    (1.0, 400_000),
)
"""Quantiles of lifetimes, in seconds; what lies between is drawn from the line between their neighbours.

Those of the GPU pods of Alibaba's public cluster-trace-gpu-v2023 that ran.
"""
_RANKS = tuple(rank for rank, _ in _LIFETIMES)
_UNKNOWN_RATIO, _PLAIN_POD_RATIO = 0.01, 0.05
_CRON_RATIO = 0.6
_TRACE_COLUMNS = ("num_gpu", "gpu_milli", "deletion_time", "scheduled_time")
_MILLI = 1000


@lru_cache(maxsize=4)
def team_names(plan: FleetPlan) -> tuple[str, ...]:
    """All teams; a large fleet has more than a small one."""
    count = max(4, plan.nodes // _NODES_PER_TEAM)
    return tuple(
        _TEAMS[number % len(_TEAMS)] + (f"-{number // len(_TEAMS) + 1}" if number >= len(_TEAMS) else "")
        for number in range(min(count, 60))
    )


def workload(node: FleetNode, random: Random, kind: str, role: str, variants: int) -> FleetOwner:
    """A workload of a name that stays, one of ``variants`` that its team has; some teams have no label."""
    teams = team_names(node.plan)
    team = teams[int(len(teams) * random.random() ** 1.5)]
    namespace = team if random.random() < 0.7 else f"{team}-dev"  # noqa: PLR2004 - three in ten try things out
    name = f"{role}-{random.randrange(variants)}"
    return FleetOwner(namespace, kind, name, "" if namespace == f"{teams[-1]}-dev" else team)


def task_owner(node: FleetNode, random: Random, serial: int) -> FleetOwner:
    """The owner of one short task; ``serial`` tells those apart that have a name of their own."""
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
    """How long a short task lives, and what it holds."""
    if plan.trace:
        return random.choice(plan.trace)
    rank = random.random()
    above = max(1, bisect_left(_RANKS, rank))
    (low_rank, low), (high_rank, high) = _LIFETIMES[above - 1], _LIFETIMES[above]
    return TraceTask(int(low + (high - low) * (rank - low_rank) / (high_rank - low_rank)), 1, 1.0)


def read_trace(file: Path) -> tuple[TraceTask, ...]:
    """Read the GPU pods of a trace that ran and ended.

    The file is CSV with the columns num_gpu, gpu_milli (of one GPU), deletion_time and scheduled_time (seconds).

    Raises:
        ConfigError: It cannot be read, or is not that.
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
        raise ConfigError(f"--trace: {file}: cannot be read: {error}; give a CSV file") from None
    if not tasks:
        raise ConfigError(f"--trace: {file}: no pod in it had a GPU and ended; give another trace")
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

"""A day of a cluster from the pod trace: the devices and the activity of each job, and its true GPU-seconds.

The trace is Alibaba cluster-trace-gpu-v2023 (CC BY 4.0). Its pods are placed first fit: whole GPUs on nodes of eight,
parts of a GPU as time-slicing replicas of a twentieth each on nodes of four.
"""

import csv
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_simulator import identities
from gpu_simulator.activity import Levels, square
from gpu_simulator.models import MODELS

TRACE = "openb_pod_list_default.csv"
WHOLE_MILLI = 1000
REPLICAS = 20
GPUS_OF_A_NODE = {False: 8, True: 4}
"""GPUs of a node, by whether the node shares GPUs."""
MODEL_OF_A_NODE = {False: "a100-80gb", True: "t4"}
NAMESPACES = ("search", "ads", "vision", "nlp", "recommend", "speech")
DAY_SECONDS = 86_400
OPENS_AT = 1_767_225_600
"""Unix time at which the replayed day starts: 2026-01-01 00:00 UTC."""
WARM_SECONDS = 900
"""Time for which the agents run before the day, so that Prometheus has the day's first value of every series."""


@dataclass(frozen=True, slots=True)
class TracePod:
    """One GPU pod of the trace; times in seconds of the trace."""

    name: str
    gpus: int
    replicas: int
    """Replicas of each GPU; 0 for whole GPUs."""
    start: float
    end: float


@dataclass(slots=True)
class Node:
    """A node during placement: the free replicas of each GPU, and the GPUs of each pod."""

    shared: bool
    free: list[int]
    pods: list[tuple[TracePod, tuple[int, ...]]] = field(default_factory=list)

    def take(self, pod: TracePod) -> tuple[int, ...] | None:
        """Take GPUs for a pod and return their indices; ``None`` if it does not fit."""
        need = pod.replicas or 1
        fitting = tuple(index for index, units in enumerate(self.free) if units >= need)[: pod.gpus]
        if len(fitting) < pod.gpus:
            return None
        for index in fitting:
            self.free[index] -= need
        self.pods.append((pod, fitting))
        return fitting


def new_node(*, shared: bool) -> Node:
    """Return a node with all GPUs free."""
    return Node(shared, [REPLICAS if shared else 1] * GPUS_OF_A_NODE[shared])


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod with GPUs; seconds count from the start of the day and may be negative."""

    namespace: str
    name: str
    gpus: tuple[int, ...]
    """Indices of its GPUs on its node."""
    share_ratio: float
    """Share of each of its GPUs: 1, or its part of the replicas."""
    shared: bool
    start_seconds: float
    end_seconds: float
    signal: Levels
    """Activity of its share over time, 0..1."""

    def busy_seconds(self, first: float, last: float) -> float:
        """Return the integral of its activity (0..1 of its share) between two instants, per GPU."""
        first, last = max(first, self.start_seconds), min(last, self.end_seconds)
        if last <= first:
            return 0.0
        start = self.start_seconds
        return self.signal.integral(last - start) - self.signal.integral(first - start)

    def next_change(self, after: float) -> float:
        """Return the next instant at which its activity may change."""
        if after < self.start_seconds:
            return self.start_seconds
        if after >= self.end_seconds:
            return math.inf
        period = self.signal.period_seconds
        within = (after - self.start_seconds + self.signal.phase_seconds) % period
        on = self.signal.starts[1]
        return min(self.end_seconds, after + (on - within if within < on else period - within))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Share-weighted GPU-seconds of a job within the day."""

    allocated_seconds: float
    active_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDay:
    """A node and all its jobs of the day."""

    name: str
    model: str
    gpu_count: int
    jobs: tuple[Job, ...]


def read_pods(path: Path) -> list[TracePod]:
    """Read the pods with GPUs, by start, without those that were never scheduled."""
    pods: list[TracePod] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"])
            if gpus and row["scheduled_time"] and row["deletion_time"]:
                replicas = 0 if milli == WHOLE_MILLI else math.ceil(milli * REPLICAS / WHOLE_MILLI)
                start, end = float(row["scheduled_time"]), float(row["deletion_time"])
                pods.append(TracePod(row["name"], gpus, replicas, start, end))
    return sorted(pods, key=lambda pod: (pod.start, pod.name))


def place(pods: Iterable[TracePod]) -> list[Node]:
    """Place pods first fit in order of start, with a new node when nothing fits."""
    nodes: list[Node] = []
    ending: list[tuple[float, int, Node, tuple[int, ...], int]] = []
    for number, pod in enumerate(pods):
        while ending and ending[0][0] <= pod.start:
            _, _, left, indices, units = heapq.heappop(ending)
            for index in indices:
                left.free[index] += units
        shared = pod.replicas > 0
        fresh = new_node(shared=shared)
        for node in (*(one for one in nodes if one.shared is shared), fresh):
            if (taken := node.take(pod)) is not None:
                break
        else:
            raise SystemExit(f"{pod.name} asks for {pod.gpus} GPUs and fits no node")
        if node is fresh:
            nodes.append(fresh)
        heapq.heappush(ending, (pod.end, number, node, taken, pod.replicas or 1))
    return nodes


def busiest_day(pods: Sequence[TracePod]) -> int:
    """Return the number of the day with the most pods."""
    alive: Counter[int] = Counter()
    for pod in pods:
        alive.update(range(int(pod.start // DAY_SECONDS), int(pod.end // DAY_SECONDS) + 1))
    whole_days = int(max(pod.end for pod in pods) // DAY_SECONDS)
    return max((day for day in alive if day < whole_days), key=lambda day: (alive[day], day))


def nodes_of_day(pods: Iterable[TracePod], day: int, least_gpus: int) -> list[NodeDay]:
    """Place the day's pods, first fit, and add free nodes until there are enough GPUs."""
    opens = day * DAY_SECONDS
    todays = [pod for pod in pods if pod.start < opens + DAY_SECONDS and pod.end > opens - WARM_SECONDS]
    placed = place(todays)
    while sum(GPUS_OF_A_NODE[node.shared] for node in placed) < least_gpus:
        placed.append(new_node(shared=False))
    return [_node_day(node, number, opens) for number, node in enumerate(placed)]


def truth_of(job: Job, first: float, last: float) -> Truth:
    """Return the true GPU-seconds of a job between two instants, in seconds since the day's start."""
    held = max(0.0, min(job.end_seconds, last) - max(job.start_seconds, first))
    weight = job.share_ratio * len(job.gpus)
    return Truth(allocated_seconds=weight * held, active_seconds=weight * job.busy_seconds(first, last))


def _node_day(node: Node, number: int, opens: float) -> NodeDay:
    jobs: list[Job] = []
    for pod, gpus in node.pods:
        seed = identities.stable_number(pod.name)
        jobs.append(
            Job(
                namespace=NAMESPACES[seed % len(NAMESPACES)],
                name=pod.name,
                gpus=gpus,
                share_ratio=pod.replicas / REPLICAS if node.shared else 1.0,
                shared=node.shared,
                start_seconds=pod.start - opens,
                end_seconds=pod.end - opens,
                signal=_signal(seed),
            )
        )
    model = MODELS[MODEL_OF_A_NODE[node.shared]].name
    return NodeDay(name=f"node-{number:02d}", model=model, gpu_count=GPUS_OF_A_NODE[node.shared], jobs=tuple(jobs))


def _signal(seed: int) -> Levels:
    """Return bursts of 30 s to 10 minutes, with a load and a rhythm of the job's own."""
    period = 30.0 + seed % 571
    return square(
        high=0.2 + seed // 571 % 81 / 100,
        low=0.0,
        period_seconds=period,
        duty=0.1 + seed // 46_251 % 81 / 100,
        phase_seconds=float(seed // 3_746_331 % int(period)),
    )

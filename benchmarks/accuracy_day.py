"""A day of a cluster from the pod trace: which job holds what on which node, how busy it is, and what is truly owed."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trace_replay import GPUS_OF_A_NODE, MODEL_OF_A_NODE, NAMESPACES, REPLICAS, Node, TracePod, place

from gpu_simulator import identities
from gpu_simulator.activity import Levels, square
from gpu_simulator.models import MODELS

DAY_SECONDS = 86_400
WARM_SECONDS = 900
"""The agents run so long before the day: their Prometheus knows the day's first value of every series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A pod with GPUs; seconds count from the start of the day and may be negative."""

    namespace: str
    name: str
    gpus: tuple[int, ...]
    """Indices on its node."""
    share_ratio: float
    """Of each of its GPUs: 1, or its replicas' part."""
    shared: bool
    start_seconds: float
    end_seconds: float
    signal: Levels
    """How busy its share is, 0..1."""

    def busy_seconds(self, first: float, last: float) -> float:
        """Integral of its activity (0..1 of its share) between two instants, per GPU."""
        first, last = max(first, self.start_seconds), min(last, self.end_seconds)
        if last <= first:
            return 0.0
        start = self.start_seconds
        return self.signal.integral(last - start) - self.signal.integral(first - start)

    def next_change(self, after: float) -> float:
        """The next instant at which its activity may change."""
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
    """A node and all jobs that it ever holds during the day."""

    name: str
    model: str
    gpu_count: int
    jobs: tuple[Job, ...]


def busiest_day(pods: Sequence[TracePod]) -> int:
    """Number of the day with the most pods."""
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
        placed.append(Node(shared=False))
    return [_node_day(node, number, opens) for number, node in enumerate(placed)]


def truth_of(job: Job, first: float, last: float) -> Truth:
    """What the job is owed for between two instants, in seconds since the day's start."""
    held = max(0.0, min(job.end_seconds, last) - max(job.start_seconds, first))
    weight = job.share_ratio * len(job.gpus)
    return Truth(allocated_seconds=weight * held, active_seconds=weight * job.busy_seconds(first, last))


def _node_day(node: Node, number: int, opens: float) -> NodeDay:
    jobs: list[Job] = []
    for pod in node.pods:
        claims = pod.containers[0].claims
        seed = identities.stable_number(pod.name)
        end = pod.window.end_seconds
        jobs.append(
            Job(
                namespace=NAMESPACES[seed % len(NAMESPACES)],
                name=pod.name,
                gpus=tuple(claim.gpu for claim in claims),
                share_ratio=len(claims[0].replicas) / REPLICAS if node.shared else 1.0,
                shared=node.shared,
                start_seconds=pod.window.start_seconds - opens,
                end_seconds=math.inf if end is None else end - opens,
                signal=_signal(seed),
            )
        )
    model = MODELS[MODEL_OF_A_NODE[node.shared]].name
    return NodeDay(name=f"node-{number:02d}", model=model, gpu_count=GPUS_OF_A_NODE[node.shared], jobs=tuple(jobs))


def _signal(seed: int) -> Levels:
    """Bursts of half a minute to ten minutes, with a load and a rhythm of the job's own."""
    period = 30.0 + seed % 571
    return square(
        high=0.2 + seed // 571 % 81 / 100,
        low=0.0,
        period_seconds=period,
        duty=0.1 + seed // 46_251 % 81 / 100,
        phase_seconds=float(seed // 3_746_331 % int(period)),
    )

"""What PromQL makes of a recorded day, and how far that is from the truth."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accuracy_agent import SCRAPE_SECONDS
from accuracy_day import Job, NodeDay, Truth, truth_of
from accuracy_prometheus import Server
from accuracy_rules import Span

RECORDED = "ledger, recorded hours"
"""The way of the reports."""
BRIEF_SECONDS = 60.0
SHORT_SECONDS = 300.0
TAIL_SECONDS = 60.0
"""Brief jobs of the last minute are not in their class: a scrape shows them after the end of the query."""
CHECKPOINT_SECONDS = 1200.0
"""The rules record an hour within so long after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """GPU-seconds by one way to ask."""

    way: str
    span: Span
    """The time to which they are held."""
    by_namespace: Mapping[str, float]
    by_pod: Mapping[str, float]
    active_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The recorded ledger of a whole day beside capacity, in GPU-seconds."""

    capacity: float
    told: float
    workloads: float
    """The sum of what is recorded by workload."""
    marker: float
    """The sum of what is recorded as capacity."""
    unknown: float
    unallocated_error: float
    unattributed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Relative errors; ``None`` where the way does not tell."""

    way: str
    total: float
    worst_namespace: float
    brief: float | None
    short: float | None
    worst_pod_seconds: float | None
    active: float | None


def recorded_span(server: Server, length: float) -> Span:
    """Return the times whose values the first and the last checkpoint hold: the last evaluations before the hours."""
    return server.newest("owner:gpu_ledger_total:max", 0.0), server.newest("owner:gpu_ledger_total:max", length)


def ask(server: Server, jobs: Sequence[Job], length: float) -> list[Told]:
    """Every way to ask for the same day."""
    whole = f"{length / 3600:g}h"
    day = (0.0, length)
    namespace_of = {job.name: job.namespace for job in jobs}
    weight = {job.name: job.share_ratio for job in jobs}

    def pods(way: str, by_pod: Mapping[str, float], active: float | None, span: Span = day) -> Told:
        sums: dict[str, float] = defaultdict(float)
        for pod, seconds in by_pod.items():
            sums[namespace_of[pod]] += seconds
        return Told(way=way, span=span, by_namespace=sums, by_pod=by_pod, active_seconds=active)

    def daily(series: str) -> dict[str, float]:
        first = f"(last_over_time({series}[15m] offset {whole}) or min_over_time({series}[{whole}]))"
        return _plain(server.query(f"sum by (pod_name) (last_over_time({series}[{whole}]) - {first})", length))

    def recorded(series: str) -> dict[str, float]:
        query = f"sum by (workload_name) (sum_over_time({series}[{whole}]))"
        return _plain(server.query(query, length + CHECKPOINT_SECONDS))

    of_jobs = 'owner:gpu_ledger:delta1h{quantity="seconds",workload_namespace!=""'
    hours = recorded(f"{of_jobs}}}")
    active = sum(recorded(f'{of_jobs},state=~"active.*"}}').values())
    jobs_series = 'gpu_ledger_seconds_total{workload_namespace!=""}'
    increases = _plain(server.hourly_sum(f"sum by (workload_name) (increase({jobs_series}[1h]))", int(length // 3600)))
    counters = _plain(server.query(f"sum by (pod_name) (increase(gpu_pod_allocated_seconds_total[{whole}]))", length))
    counted = _plain(server.query(f"sum by (pod) (count_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}]))", length))
    average = f"avg_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}]) * count_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}])"
    busy = _plain(server.query(f"sum by (pod) ({average})", length))
    return [
        pods(RECORDED, hours, active, recorded_span(server, length)),
        pods("the same, against the day itself", hours, active),
        pods("the ledger by `increase()`", increases, None),
        pods(
            "pod counters, last - first",
            daily("gpu_pod_allocated_seconds_total"),
            sum(daily("gpu_pod_active_seconds_total").values()),
        ),
        pods("pod counters, `increase()`", counters, None),
        pods(
            "gauges, count x 30 s",
            {pod: count * SCRAPE_SECONDS * weight[pod] for pod, count in counted.items()},
            sum(value / 100 * SCRAPE_SECONDS * weight[pod] for pod, value in busy.items()),
        ),
    ]


def balance(server: Server, nodes: Sequence[NodeDay], length: float) -> Balance:
    """Hold the recorded ledger, Unallocated and Unattributed included, to the capacity of the day."""
    window = f"[{length / 3600:g}h]"

    def recorded(series: str, by: str = "") -> dict[str, float]:
        return _plain(server.query(f"sum by ({by}) (sum_over_time({series}{window}))", length + CHECKPOINT_SECONDS))

    told = recorded('owner:gpu_ledger:delta1h{quantity="seconds"}', "workload_kind")
    span = recorded_span(server, length)
    capacity = sum(node.gpu_count for node in nodes) * (span[1] - span[0])
    held = sum(truth_of(job, *span).allocated_seconds for node in nodes for job in node.jobs)
    return Balance(
        capacity=capacity,
        told=sum(told.values()),
        workloads=sum(recorded('workload:gpu_ledger:delta1h{quantity="seconds"}').values()),
        marker=sum(recorded("cluster:gpu_capacity_seconds:delta1h").values()),
        unknown=sum(recorded('owner:gpu_ledger:delta1h{quantity="seconds",state="unknown"}').values()),
        unallocated_error=told.get("Unallocated", 0.0) - (capacity - held),
        unattributed=told.get("Unattributed", 0.0),
    )


def score(told: Told, jobs: Sequence[Job]) -> Row:
    """Compare one way with the truth."""
    first, last = told.span
    truth = {job.name: truth_of(job, first, last) for job in jobs}
    owed: dict[str, float] = defaultdict(float)
    for job in jobs:
        owed[job.namespace] += truth[job.name].allocated_seconds
    active = sum(one.active_seconds for one in truth.values())
    inside = [job for job in jobs if job.start_seconds > first and job.end_seconds < last - TAIL_SECONDS]
    brief = [job for job in inside if job.end_seconds - job.start_seconds < BRIEF_SECONDS]
    short = [job for job in inside if job.end_seconds - job.start_seconds < SHORT_SECONDS]
    by_namespace = told.by_namespace
    return Row(
        way=told.way,
        total=sum(by_namespace.values()) / sum(owed.values()) - 1,
        worst_namespace=max(
            (by_namespace.get(name, 0.0) / seconds - 1 for name, seconds in owed.items() if seconds), key=abs
        ),
        brief=_class_error(told.by_pod, brief, truth),
        short=_class_error(told.by_pod, short, truth),
        worst_pod_seconds=max((_apart(told.by_pod, job, truth) for job in inside), key=abs, default=None),
        active=None if told.active_seconds is None or not active else told.active_seconds / active - 1,
    )


def _class_error(by_pod: Mapping[str, float], jobs: Iterable[Job], truth: Mapping[str, Truth]) -> float | None:
    owed = sum(truth[job.name].allocated_seconds for job in jobs)
    if not owed:
        return None
    return sum(by_pod.get(job.name, 0.0) for job in jobs) / owed - 1


def _apart(by_pod: Mapping[str, float], job: Job, truth: Mapping[str, Truth]) -> float:
    """Seconds of holding that a pod is told too many or too few, whatever its share."""
    weight = job.share_ratio * len(job.gpus)
    return (by_pod.get(job.name, 0.0) - truth[job.name].allocated_seconds) / weight


def _plain(rows: Mapping[tuple[str, ...], float]) -> dict[str, float]:
    """Rows of at most one label, by its value."""
    return {key[0] if key else "": value for key, value in rows.items()}

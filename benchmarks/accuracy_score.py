"""What PromQL makes of a recorded day, and how far that is from the truth."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accuracy_agent import SCRAPE_SECONDS
from accuracy_day import DAY_SECONDS, Job, NodeDay, Truth, truth_of
from accuracy_prometheus import Server

BRIEF_SECONDS = 60.0
SHORT_SECONDS = 300.0
TAIL_SECONDS = 300.0
"""Brief jobs of the last minutes are left out of their class: what is told of them later is not of this day's query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """GPU-seconds by one way to ask; a way that asks by namespace tells no pods."""

    way: str
    by_namespace: Mapping[str, float]
    by_pod: Mapping[str, float]
    active_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The ledger of a whole day beside capacity, in GPU-seconds."""

    capacity: float
    told: float
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


def ask(server: Server, jobs: Sequence[Job], length: float) -> list[Told]:
    """Every way to ask for the same day."""
    whole = f"{length / 3600:g}h"
    hours = int(length // 3600)
    namespace_of = {job.name: job.namespace for job in jobs}
    weight = {job.name: job.share_ratio for job in jobs}

    def pods(way: str, by_pod: Mapping[str, float], active: float | None) -> Told:
        sums: dict[str, float] = defaultdict(float)
        for pod, seconds in by_pod.items():
            sums[namespace_of[pod]] += seconds
        return Told(way=way, by_namespace=sums, by_pod=by_pod, active_seconds=active)

    def hourly(kind: str, scheme: str, label: str, *, guarded: bool = True) -> dict[str, float]:
        series = f'gpu_ledger_{kind}_seconds_total{{ledger="{scheme}",workload_namespace!=""}}'
        return _plain(server.hourly_sum(f"sum by ({label}) ({_difference(series, guarded=guarded)})", hours))

    def daily(series: str) -> dict[str, float]:
        first = f"(last_over_time({series}[15m] offset {whole}) or min_over_time({series}[{whole}]))"
        return _plain(server.query(f"sum by (pod_name) (last_over_time({series}[{whole}]) - {first})", length))

    job_series = 'gpu_ledger_allocated_seconds_total{ledger="job",workload_namespace!=""}'
    increases = _plain(server.hourly_sum(f"sum by (workload_name) (increase({job_series}[1h]))", hours))
    counters = _plain(server.query(f"sum by (pod_name) (increase(gpu_pod_allocated_seconds_total[{whole}]))", length))
    counted = _plain(server.query(f"sum by (pod) (count_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}]))", length))
    average = f"avg_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}]) * count_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}])"
    busy = _plain(server.query(f"sum by (pod) ({average})", length))
    return [
        Told(
            way="ledger, owner = namespace",
            by_namespace=hourly("allocated", "namespace", "workload_namespace"),
            by_pod={},
            active_seconds=sum(hourly("active", "namespace", "workload_namespace").values()),
        ),
        pods(
            "ledger, owner = each job",
            hourly("allocated", "job", "workload_name"),
            sum(hourly("active", "job", "workload_name").values()),
        ),
        pods(
            "the same without the guard",
            hourly("allocated", "job", "workload_name", guarded=False),
            sum(hourly("active", "job", "workload_name", guarded=False).values()),
        ),
        pods("the same by `increase()`", increases, None),
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
    """Hold the namespace ledger, Unallocated and Unattributed included, to the capacity of the day."""
    hours = int(length // 3600)
    expression = 'gpu_ledger_{0}_seconds_total{{ledger="namespace"}}'
    allocated = _difference(expression.format("allocated"))
    told = _plain(server.hourly_sum(f"sum by (workload_kind) ({allocated})", hours))
    unknown = server.hourly_sum(f"sum ({_difference(expression.format('unknown'))})", hours)
    capacity = sum(node.gpu_count for node in nodes) * length
    held = sum(truth_of(job, length).allocated_seconds for node in nodes for job in node.jobs)
    return Balance(
        capacity=capacity,
        told=sum(told.values()),
        unknown=sum(unknown.values()),
        unallocated_error=told.get("Unallocated", 0.0) - (capacity - held),
        unattributed=told.get("Unattributed", 0.0),
    )


def score(told: Told, jobs: Sequence[Job], length: float = DAY_SECONDS) -> Row:
    """Compare one way with the truth."""
    truth = {job.name: truth_of(job, length) for job in jobs}
    owed: dict[str, float] = defaultdict(float)
    for job in jobs:
        owed[job.namespace] += truth[job.name].allocated_seconds
    active = sum(one.active_seconds for one in truth.values())
    inside = [job for job in jobs if job.start_seconds > 0 and job.end_seconds < length - TAIL_SECONDS]
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
        worst_pod_seconds=max((_apart(told.by_pod, job, truth) for job in inside), key=abs, default=None)
        if told.by_pod
        else None,
        active=None if told.active_seconds is None or not active else told.active_seconds / active - 1,
    )


def _class_error(by_pod: Mapping[str, float], jobs: Iterable[Job], truth: Mapping[str, Truth]) -> float | None:
    owed = sum(truth[job.name].allocated_seconds for job in jobs)
    if not by_pod or not owed:
        return None
    return sum(by_pod.get(job.name, 0.0) for job in jobs) / owed - 1


def _apart(by_pod: Mapping[str, float], job: Job, truth: Mapping[str, Truth]) -> float:
    """Seconds of holding that a pod is told too many or too few, whatever its share."""
    weight = job.share_ratio * len(job.gpus)
    return (by_pod.get(job.name, 0.0) - truth[job.name].allocated_seconds) / weight


def _difference(series: str, *, guarded: bool = True) -> str:
    """The hour's last value less the last before it.

    A series without a value before the hour starts from its least one. With the guard it starts from 0 where its node's
    ledger was seen before: then the series was born since, whatever scrapes were lost meanwhile.
    """
    last = f"last_over_time({series}[1h])"
    seen = "last_over_time(gpu_ledger_allocated_seconds_total[24h] offset 1h)"
    born = f"or (0 * {last} and on (node) {seen}) " if guarded else ""
    before = f"last_over_time({series}[24h] offset 1h) {born}or min_over_time({series}[1h])"
    return f"({last} - ({before})) >= 0 or increase({series}[1h])"


def _plain(rows: Mapping[tuple[str, ...], float]) -> dict[str, float]:
    """Rows of at most one label, by its value."""
    return {key[0] if key else "": value for key, value in rows.items()}

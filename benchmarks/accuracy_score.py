"""Queries a recorded day with PromQL, and computes the errors of the answers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accuracy_agent import SCRAPE_SECONDS
from accuracy_day import OPENS_AT, Job, NodeDay, Truth, truth_of
from accuracy_rules import Span
from remote_write import Prometheus

RECORDED = "ledger, recorded hours"
"""Name of the query method of the reports."""
BRIEF_SECONDS = 60.0
SHORT_SECONDS = 300.0
TAIL_SECONDS = 60.0
"""Brief jobs that end in the last minute are not in their class: the query ends before the scrape that shows them."""
CHECKPOINT_SECONDS = 1200.0
"""Time after an hour within which the rules record it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """GPU-seconds by one query method."""

    way: str
    span: Span
    """Time for which the true GPU-seconds are computed."""
    by_namespace: Mapping[str, float]
    by_pod: Mapping[str, float]
    active_seconds: float | None


class Balance(NamedTuple):
    """The recorded ledger of a whole day, in hours, relative errors and seconds."""

    capacity_hours: float
    owners: float
    """Sum over owners, against the capacity."""
    workloads: float
    """Seconds recorded by workload, against those by owner."""
    marker: float
    """Seconds recorded as capacity, against those by owner."""
    unknown_seconds: float
    unattributed_seconds: float
    unallocated: float


class Row(NamedTuple):
    """Relative errors of one query method; ``None`` where it has no such figure."""

    total: float
    worst_namespace: float
    brief: float | None
    short: float | None
    worst_pod_seconds: float | None
    active: float | None


def recorded_span(server: Prometheus, length: float) -> Span:
    """Return the times of the values in the first and the last checkpoint: the last evaluations before the hours."""
    newest = "max(timestamp(owner:gpu_ledger_total:max))"
    first, last = (server.by(newest, OPENS_AT + at)[""] - OPENS_AT for at in (0.0, length))
    return first, last


def ask(server: Prometheus, jobs: Sequence[Job], length: float) -> list[Answer]:
    """Query the same day with every method."""
    whole = f"{length / 3600:g}h"
    day = (0.0, length)
    namespace_of = {job.name: job.namespace for job in jobs}
    weight = {job.name: job.share_ratio for job in jobs}

    def pods(way: str, by_pod: Mapping[str, float], active: float | None, span: Span = day) -> Answer:
        sums: dict[str, float] = defaultdict(float)
        for pod, seconds in by_pod.items():
            sums[namespace_of[pod]] += seconds
        return Answer(way=way, span=span, by_namespace=sums, by_pod=by_pod, active_seconds=active)

    end = OPENS_AT + length

    def daily(series: str) -> dict[str, float]:
        first = f"(last_over_time({series}[15m] offset {whole}) or min_over_time({series}[{whole}]))"
        return server.by(f"sum by (pod_name) (last_over_time({series}[{whole}]) - {first})", end)

    def recorded(series: str) -> dict[str, float]:
        return server.by(f"sum by (workload_name) (sum_over_time({series}[{whole}]))", end + CHECKPOINT_SECONDS)

    increases = defaultdict[str, float](float)
    hourly = 'sum by (workload_name) (increase(gpu_ledger_seconds_total{workload_namespace!=""}[1h]))'
    for labels, values in server.range(hourly, OPENS_AT + 3600.0, end, 3600.0):
        increases[labels["workload_name"]] += sum(value for _, value in values)
    of_jobs = 'owner:gpu_ledger:delta1h{quantity="seconds",workload_namespace!=""'
    hours = recorded(f"{of_jobs}}}")
    active = sum(recorded(f'{of_jobs},state=~"active.*"}}').values())
    counters = server.by(f"sum by (pod_name) (increase(gpu_pod_allocated_seconds_total[{whole}]))", end)
    counted = server.by(f"sum by (pod) (count_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}]))", end)
    busy = server.by(f"sum by (pod) (sum_over_time(DCGM_FI_DEV_GPU_UTIL[{whole}]))", end)
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


def balance(server: Prometheus, nodes: Sequence[NodeDay], length: float) -> Balance:
    """Compare the recorded ledger, including Unallocated and Unattributed, with the capacity of the day."""
    window = f"[{length / 3600:g}h]"

    def recorded(series: str, by: str = "") -> dict[str, float]:
        at = OPENS_AT + length + CHECKPOINT_SECONDS
        return server.by(f"sum by ({by}) (sum_over_time({series}{window}))", at)

    by_kind = recorded('owner:gpu_ledger:delta1h{quantity="seconds"}', "workload_kind")
    span = recorded_span(server, length)
    capacity = sum(node.gpu_count for node in nodes) * (span[1] - span[0])
    held = sum(truth_of(job, *span).allocated_seconds for node in nodes for job in node.jobs)
    allocated = sum(by_kind.values())
    return Balance(
        capacity_hours=capacity / 3600,
        owners=allocated / capacity - 1,
        workloads=sum(recorded('workload:gpu_ledger:delta1h{quantity="seconds"}').values()) / allocated - 1,
        marker=sum(recorded("cluster:gpu_capacity_seconds:delta1h").values()) / allocated - 1,
        unknown_seconds=sum(recorded('owner:gpu_ledger:delta1h{quantity="seconds",state="unknown"}').values()),
        unattributed_seconds=by_kind.get("Unattributed", 0.0),
        unallocated=(by_kind.get("Unallocated", 0.0) - (capacity - held)) / capacity,
    )


def score(answer: Answer, jobs: Sequence[Job]) -> Row:
    """Compare the answer of one query method with the truth."""
    first, last = answer.span
    truth = {job.name: truth_of(job, first, last) for job in jobs}
    owed: dict[str, float] = defaultdict(float)
    for job in jobs:
        owed[job.namespace] += truth[job.name].allocated_seconds
    active = sum(one.active_seconds for one in truth.values())
    inside = [job for job in jobs if job.start_seconds > first and job.end_seconds < last - TAIL_SECONDS]
    brief = [job for job in inside if job.end_seconds - job.start_seconds < BRIEF_SECONDS]
    short = [job for job in inside if job.end_seconds - job.start_seconds < SHORT_SECONDS]
    by_namespace = answer.by_namespace
    return Row(
        total=sum(by_namespace.values()) / sum(owed.values()) - 1,
        worst_namespace=max(
            (by_namespace.get(name, 0.0) / seconds - 1 for name, seconds in owed.items() if seconds), key=abs
        ),
        brief=_class_error(answer.by_pod, brief, truth),
        short=_class_error(answer.by_pod, short, truth),
        worst_pod_seconds=max((_pod_error(answer.by_pod, job, truth) for job in inside), key=abs, default=None),
        active=None if answer.active_seconds is None or not active else answer.active_seconds / active - 1,
    )


def _class_error(by_pod: Mapping[str, float], jobs: Iterable[Job], truth: Mapping[str, Truth]) -> float | None:
    owed = sum(truth[job.name].allocated_seconds for job in jobs)
    if not owed:
        return None
    return sum(by_pod.get(job.name, 0.0) for job in jobs) / owed - 1


def _pod_error(by_pod: Mapping[str, float], job: Job, truth: Mapping[str, Truth]) -> float:
    """Return the error of a pod's held time in seconds, independent of its share."""
    weight = job.share_ratio * len(job.gpus)
    return (by_pod.get(job.name, 0.0) - truth[job.name].allocated_seconds) / weight

"""Reads from Prometheus how each workload used each of its devices: hourly evidence over days, in a few questions."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from exporter.report.fleet.prometheus import Sample
from exporter.report.fleet.values import DAY_SECONDS, Filters, LineKey, Window
from exporter.report.recommend.values import DeviceUse

EVIDENCE = "workload_device:gpu_share:ratio"
"""Has a sample for each hour in which a workload held a device."""
_DEVICE = ("node", "gpu", "uuid", "gpu_instance", "mig_profile", "model")
_OWNER = ("workload_namespace", "workload_kind", "workload_name", "team")
_DAY_HOURS = 18
"""Of a day's 24, for which a device that is still held was held: an hour that was not recorded is no end of it."""
_NEWEST = "7199s"
_WHOLE = 0.999

_Key = tuple[str, ...]
"""Values of cluster, device and owner labels, in this order; of the device alone, or of the owner alone."""


class Asks(Protocol):
    """What answers instant queries."""

    async def instant(self, query: str, at_seconds: float | None) -> tuple[Sample, ...]:
        """Labels and values."""
        ...


class _Answers(NamedTuple):
    held: Mapping[_Key, float]
    share: Mapping[_Key, float]
    of_day: Mapping[_Key, float]
    measured: Mapping[_Key, float]
    active: Mapping[_Key, float]
    p95: Mapping[_Key, float]
    peak: Mapping[_Key, float]
    memory: Mapping[_Key, float]
    estimated: Mapping[_Key, float]
    total: Mapping[_Key, float]
    reserved: Mapping[_Key, float]
    inference: Mapping[_Key, float]
    muted: Mapping[_Key, float]


async def read_evidence(
    client: Asks, window: Window, cluster_label: str = "cluster", filters: Filters | None = None
) -> tuple[DeviceUse, ...]:
    """How each workload that holds a device when the window ends used each that it held in it.

    Empty where no evidence was recorded. Workloads whose owners want no waste alerts now are left out. Filters may name
    every dimension but ``pool``.

    Raises:
        PrometheusError: A question stayed unanswered: evidence without it would not be right.
    """
    use, device, owner = (
        (cluster_label, *_DEVICE, *_OWNER),
        (cluster_label, *_DEVICE),
        (cluster_label, *_OWNER),
    )
    questions = _questions(window, ", ".join(use), ", ".join(device), ", ".join(owner))
    kept = {"total": device, "reserved": owner, "inference": owner, "muted": owner}
    try:
        async with asyncio.TaskGroup() as group:  # where one fails the others end, and ask nothing of a closed client
            tasks = {
                name: group.create_task(_ask(client, question, window.end_seconds, kept.get(name, use)))
                for name, question in questions.items()
            }
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    found = _uses(_Answers(**{name: task.result() for name, task in tasks.items()}))
    return tuple(one for one in found if filters is None or filters.keep(_line(one)))


def _questions(window: Window, use: str, device: str, owner: str) -> Mapping[str, str]:
    """By field of ``_Answers``. Two Prometheis that recorded the same are one, by ``max``."""
    # A second less: an engine whose ranges are closed would take the hour before in.
    over, day = f"{window.seconds - 1}s", f"{min(window.seconds, DAY_SECONDS) - 1}s"
    active, memory = "workload_device:gpu_active:rate1h", "workload_device:gpu_memory_used_bytes:max1h"
    # Of workloads that hold something now: the others, mostly short tasks, are many more.
    here = f"and on ({owner}) last_over_time({EVIDENCE}[{_NEWEST}])"
    return {
        "held": f"max by ({use}) (count_over_time({EVIDENCE}[{over}]) {here})",
        # The median: neither an hour that was held in part nor one in which pods took turns is how much it holds.
        "share": f"max by ({use}) (quantile_over_time(0.5, {EVIDENCE}[{over}]) {here})",
        "of_day": f"max by ({use}) (count_over_time({EVIDENCE}[{day}]) and last_over_time({EVIDENCE}[{_NEWEST}]))",
        "measured": f"max by ({use}) (sum_over_time(workload_device:gpu_measured:rate1h[{over}]) {here})",
        "active": f"max by ({use}) (sum_over_time({active}[{over}]) {here})",
        "p95": f"max by ({use}) (quantile_over_time(0.95, {active}[{over}]) {here})",
        "peak": f"max by ({use}) (max_over_time({active}[{over}]) {here})",
        "memory": f"max by ({use}) (max_over_time({memory}[{over}]) {here})",
        "estimated": f"max by ({use}) (max_over_time(workload_device:gpu_estimated:info[{over}]) {here}) > 0",
        "total": f"max by ({device}) (last_over_time(workload_device:gpu_memory_total_bytes:max[{over}]))",
        "reserved": f'max by ({owner}) (last_over_time(workload:gpu_policy:info{{policy="reserved"}}[1h])) > 0',
        "inference": f'max by ({owner}) (last_over_time(workload:gpu_policy:info{{policy="inference"}}[1h])) > 0',
        "muted": (
            f"max by ({owner}) (last_over_time(workload:gpu_alerts_off_until_seconds:max[1h])) > {window.end_seconds}"
        ),
    }


async def _ask(client: Asks, question: str, at_seconds: float, labels: Iterable[str]) -> Mapping[_Key, float]:
    wanted = tuple(labels)
    samples = await client.instant(question, at_seconds)
    return {tuple(labels.get(name, "") for name in wanted): value for labels, value in samples}


def _uses(answers: _Answers) -> Iterable[DeviceUse]:
    for key, held_hours in answers.held.items():
        cluster, node, _, uuid, gpu_instance, mig_profile, model, namespace, kind, workload, team = key
        owner = (cluster, namespace, kind, workload, team)
        share = answers.share.get(key, 0.0)
        if share <= 0 or owner in answers.muted:
            continue
        measured = answers.measured.get(key, 0.0)
        yield DeviceUse(
            cluster=cluster,
            node=node,
            uuid=uuid,
            gpu_instance=gpu_instance,
            mig_profile=mig_profile,
            model=model,
            namespace=namespace,
            kind=kind,
            workload=workload,
            team=team,
            share_ratio=min(1.0, share),
            held_hours=held_hours,
            measured_hours=min(held_hours, measured / share),
            mean_ratio=min(1.0, answers.active.get(key, 0.0) / measured) if measured > 0 else None,
            p95_ratio=_of_share(answers.p95.get(key, 0.0), share, measured),
            peak_ratio=_of_share(answers.peak.get(key, 0.0), share, measured),
            peak_memory_bytes=answers.memory.get(key),
            memory_total_bytes=answers.total.get(key[:7]),
            estimated=key in answers.estimated,
            still_held=answers.of_day.get(key, 0.0) >= _DAY_HOURS,
            policy="reserved" if owner in answers.reserved else "inference" if owner in answers.inference else "",
        )


def _of_share(gpus: float, share: float, measured: float) -> float | None:
    """Activity of the part that is held; an hour that was measured in part is no busier than what was seen of it.

    Where activity was measured and none was recorded, there was none.
    """
    return min(1.0, gpus / share) if measured > 0 else None


def _line(use: DeviceUse) -> LineKey:
    mode = "mig" if use.gpu_instance or use.mig_profile else "exclusive" if use.share_ratio >= _WHOLE else "shared"
    return LineKey(
        cluster=use.cluster,
        node=use.node,
        namespace=use.namespace,
        kind=use.kind,
        workload=use.workload,
        team=use.team,
        model=use.model,
        mode=mode,
    )

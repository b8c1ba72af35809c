"""The series that agents on a fleet of GPUs would show: trainings, single GPUs, MIG and shared ones, with owners."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from remote_write import encode_labels
from rules_labels import ON_INSTANCES, STATES, is_there, own_labels

from exporter.metrics import catalog
from exporter.metrics.collectors_file import DEFAULT
from exporter.metrics.text_format import Metric
from exporter.model import WINDOWS, shown_windows

GPUS_PER_NODE = 8
JOB_SECONDS, POD_SECONDS = 12 * 3600, 6 * 3600
"""How long a training's pods live, and others: each is followed by one with another name."""
STEP_SECONDS = 1800
"""Pods begin and end at multiples of this, so that samples can be sent in slices."""
IDLE_PERCENT = 15
_AT_WORK = 0.05
PRICE = 4.0
MODEL = "NVIDIA H100 80GB HBM3"


class Pattern(NamedTuple):
    """How a value goes: ``ramp`` by so much per second, ``level``, ``noise`` around it, ``clock`` (the time itself)."""

    shape: str
    size: float


DEVICE_PATTERNS = {
    "gpu_info": Pattern("level", 1.0),
    "gpu_up": Pattern("level", 1.0),
    "gpu_shared_idle_gpus": Pattern("level", 0.5),
    "gpu_hourly_price": Pattern("level", PRICE),
    "gpu_energy_joules_total": Pattern("ramp", 400.0),
    "gpu_power_watts": Pattern("noise", 400.0),
    "gpu_temperature_celsius": Pattern("noise", 50.0),
    "gpu_temperature_margin_celsius": Pattern("noise", 40.0),
    "gpu_memory_temperature_margin_celsius": Pattern("noise", 40.0),
    "gpu_temperature_limit_celsius": Pattern("level", 90.0),
    "gpu_activity_ratio": Pattern("noise", 0.6),
}
"""Of devices; what is not named here stays 0, as errors and faults do."""


class Series(NamedTuple):
    """One series: its metric, its labels as sent, its values."""

    metric: str
    labels: bytes
    pattern: Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one pod on one node, which pods of one workload take one after another."""

    name: str
    kind: str
    namespace: str
    workload: str
    workload_class: str
    mode: str
    share: float
    life_seconds: int
    devices: tuple[Mapping[str, str], ...] = field(hash=False, compare=False)

    def generation(self, at: int) -> int:
        """Number of the pod that holds the slot at a Unix time; slots change at different times."""
        return (at + zlib.crc32(self.name.encode()) % 24 * STEP_SECONDS) // self.life_seconds

    def workload_name(self, generation: int) -> str:
        """A Job has another name each time; what is kept running has one."""
        return f"{self.workload}-{generation}" if self.kind in {"Job", "PyTorchJob"} else self.workload

    @property
    def activity(self) -> float:
        """Mean activity of the holder, 0 for those that are idle."""
        number = zlib.crc32(f"{self.workload}/{self.kind}".encode())
        return 0.0 if number % 100 < IDLE_PERCENT else 0.3 + number % 14 * 0.05


class Fleet:
    """GPUs on nodes of eight; of ten nodes five train, two have a pod per GPU, two MIG instances, one shares."""

    def __init__(self, gpus: int, ended_owners: int) -> None:
        self.nodes = max(1, round(gpus / GPUS_PER_NODE))
        self.gpus = self.nodes * GPUS_PER_NODE
        self._ended = ended_owners
        self._slots = [_slots(index) for index in range(self.nodes)]
        self._owners = [_owners(slots) for slots in self._slots]
        self._fixed = [list(_fixed(index)) for index in range(self.nodes)]

    @property
    def pods(self) -> int:
        """Pods at a time."""
        return sum(len(slots) for slots in self._slots)

    @property
    def workloads(self) -> int:
        """Workloads at a time."""
        return len({(slot.namespace, slot.kind, slot.workload) for slots in self._slots for slot in slots})

    def series(self, at: int) -> Iterator[Series]:
        """All series of the half hour that begins at a Unix time."""
        for index, slots in enumerate(self._slots):
            yield from self._fixed[index]
            for slot in slots:
                generation = slot.generation(at)
                yield from _pod_series(index, slot, generation)
            for slot, share in self._owners[index]:
                generation = slot.generation(at)
                ended = self._ended if slot.workload_name(0) != slot.workload_name(1) else 0
                for back in range(ended + 1):
                    yield from _owner_series(index, slot, share, generation - back, running=back == 0)


def _node(index: int) -> dict[str, str]:
    """A node and its ledger."""
    return {"node": f"gpu-{index:04d}", "ledger": f"{index:012x}"}


def _target(index: int) -> dict[str, str]:
    """What Prometheus adds: the labels of a PodMonitor's target."""
    address = f"10.{index // 65536}.{index // 256 % 256}.{index % 256}:9400"
    job = "gpu-cost/gpu-cost-exporter"
    names = {"container": "gpu-cost-exporter", "endpoint": "metrics", "namespace": "gpu-cost"}
    return {"instance": address, "job": job, "pod": f"gpu-cost-exporter-{index:05x}", **names}


def _boards(index: int) -> list[dict[str, str]]:
    return [
        {
            "node": f"gpu-{index:04d}",
            "gpu": str(gpu),
            "uuid": f"GPU-{index:08x}-{gpu:04x}-4f8a-9c1e-77d2",
            "model": MODEL,
        }
        for gpu in range(GPUS_PER_NODE)
    ]


def _instances(index: int) -> list[dict[str, str]]:
    if index % 10 not in {7, 8}:
        return []
    return [
        {**board, "uuid": f"MIG-{board['uuid'][4:]}-{place}", "gpu_instance": str(place + 2), "mig_profile": profile}
        for board in _boards(index)
        for place, profile in enumerate(("3g.40gb", "2g.20gb", "2g.20gb"))
    ]


def _slots(index: int) -> list[Slot]:
    decade, place = divmod(index, 10)
    boards = _boards(index)
    if place < 5:  # noqa: PLR2004 - the mix that the class names
        name = f"pretrain-{decade}" if place < 4 else f"finetune-{decade}"  # noqa: PLR2004 - four nodes one training
        kind = "PyTorchJob" if place < 4 else "Job"  # noqa: PLR2004 - as above
        fields = {"kind": kind, "workload": name, "workload_class": "batch", "mode": "exclusive"}
        return [_slot(index, 0, tuple(boards), share=1.0, life_seconds=JOB_SECONDS, **fields)]
    if place < 7:  # noqa: PLR2004 - as above
        # One of the eight is free.
        return [_single(index, gpu, board) for gpu, board in enumerate(boards[:-1])]
    if place < 9:  # noqa: PLR2004 - as above
        return [_part(index, number, instance) for number, instance in enumerate(_instances(index)[:20])]
    return [
        _slot(
            index,
            gpu * 4 + replica,
            (board,),
            kind="Deployment",
            workload=f"embed-{decade}-{replica}",
            workload_class="inference",
            mode="shared",
            share=0.25,
            life_seconds=POD_SECONDS,
        )
        for gpu, board in enumerate(boards)
        for replica in range(4)
    ]


def _owners(slots: list[Slot]) -> list[tuple[Slot, float]]:
    """A slot for each workload of a node, and the GPUs that the workload holds there."""
    held: dict[tuple[str, str], tuple[Slot, float]] = {}
    for slot in slots:
        first, share = held.get((slot.kind, slot.workload), (slot, 0.0))
        held[slot.kind, slot.workload] = first, share + slot.share * len(slot.devices)
    return list(held.values())


def _single(index: int, gpu: int, board: Mapping[str, str]) -> Slot:
    if gpu % 2:
        what = {"kind": "Notebook", "workload": f"nb-{index}-{gpu}", "workload_class": "interactive"}
    else:
        what = {"kind": "Deployment", "workload": f"serve-{index}", "workload_class": "inference"}
    return _slot(index, gpu, (board,), mode="exclusive", share=1.0, life_seconds=POD_SECONDS, **what)


def _part(index: int, number: int, instance: Mapping[str, str]) -> Slot:
    share = int(instance["mig_profile"][0]) / 7
    if number % 2:
        what = {"kind": "Notebook", "workload": f"nb-{index}-{number}", "workload_class": ""}
    else:
        what = {"kind": "Job", "workload": f"sweep-{index}-{number}", "workload_class": "batch"}
    return _slot(index, number, (instance,), mode="mig", share=share, life_seconds=POD_SECONDS, **what)


def _slot(  # noqa: PLR0913 - by keyword
    index: int,
    number: int,
    devices: tuple[Mapping[str, str], ...],
    *,
    kind: str,
    workload: str,
    workload_class: str,
    mode: str,
    share: float,
    life_seconds: int,
) -> Slot:
    return Slot(
        name=f"{workload}-{index:04d}-{number}",
        kind=kind,
        namespace=f"team-{index // 10 % 40}",
        workload=workload,
        workload_class=workload_class,
        mode=mode,
        share=share,
        life_seconds=life_seconds,
        devices=devices,
    )


def _made(metric: Metric, labels: Mapping[str, str], index: int, pattern: Pattern) -> Series:
    held = {name: value for name, value in labels.items() if name in metric.labels}
    return Series(metric.name, encode_labels({"__name__": metric.name, **_target(index), **held}), pattern)


def _device_pattern(metric: Metric, labels: Mapping[str, str]) -> Pattern:
    if metric.name == "gpu_allocation_state":
        return Pattern("level", float(labels["state"] == "allocated"))
    if metric.name.endswith("bytes_total"):
        return Pattern("ramp", 1e9)
    return DEVICE_PATTERNS.get(metric.name, Pattern("level", 0.0))


def _fixed(index: int) -> Iterator[Series]:
    """What a node shows whoever is on it: devices, the exporter itself, dcgm-exporter's names, and ``up``."""
    for metric in catalog.BY_NAME.values():
        if {"pod_name", "workload_name"} & set(metric.labels):
            continue
        devices: list[dict[str, str]] = [_node(index)]
        if "uuid" in metric.labels:
            devices = _boards(index) + (_instances(index) if metric.name in ON_INSTANCES else [])
        for device in devices:
            if is_there(metric.name, device.get("uuid", device["node"])):
                for own in own_labels(metric, {**device, "gpu_instance": "", "mig_profile": ""}):
                    yield _made(metric, {**device, **own}, index, _fixed_pattern(metric, own))
    for device in _boards(index) + _instances(index):
        for row in DEFAULT.rows:
            if row.name.startswith("DCGM_FI_DRIVER"):
                continue
            names = {"UUID": device["uuid"], "modelName": MODEL, "Hostname": device["node"], "gpu": device["gpu"]}
            labels = {"__name__": row.name, **_target(index), **names, "device": f"nvidia{device['gpu']}"}
            yield Series(row.name, encode_labels(labels), Pattern("noise", 50.0))
    yield Series("up", encode_labels({"__name__": "up", **_target(index)}), Pattern("level", 1.0))


def _fixed_pattern(metric: Metric, own: Mapping[str, str]) -> Pattern:
    if "uuid" in metric.labels:
        return _device_pattern(metric, own)
    if metric.name.endswith("timestamp_seconds") and "created" not in metric.name:
        return Pattern("clock", 0.0)
    if metric.name in {
        "gpu_exporter_source_up",
        "gpu_exporter_state_saved",
        "gpu_exporter_build_info",
        "gpu_node_info",
    }:
        return Pattern("level", 1.0)
    if metric.name in {"gpu_devices", "gpu_pool_gpus"}:
        return Pattern("level", float(GPUS_PER_NODE))
    if metric.name == "gpu_exporter_ledger_capacity_seconds_total":
        return Pattern("ramp", float(GPUS_PER_NODE))
    return Pattern("level", 0.0)


def _rates(share: float, activity: float) -> dict[str, Pattern]:
    """Patterns of what pods and owners have alike, by the end of the metric's name."""
    return {
        "allocated_seconds_total": Pattern("ramp", share),
        "active_seconds_total": Pattern("ramp", round(share * activity, 3)),
        "idle_seconds_total": Pattern("ramp", round(share * (1 - activity), 3)),
        "unknown_seconds_total": Pattern("level", 0.0),
        "energy_joules_total": Pattern("ramp", round(share * (100 + 500 * activity), 1)),
        "cost_total": Pattern("ramp", round(share * PRICE / 3600, 6)),
        "share_ratio": Pattern("level", share),
        "activity_ratio": Pattern("noise" if activity else "level", round(share * activity, 3)),
        "idle_for_seconds": Pattern("level", 0.0) if activity else Pattern("ramp", 1.0),
        "age_seconds": Pattern("ramp", 1.0),
        "memory_used_bytes": Pattern("level", 2e10),
        "info": Pattern("level", 1.0),
        "timestamp_seconds": Pattern("level", 253402300799.0),
        "owner_gpus": Pattern("level", share),
        "active_gpus": Pattern("level", share if activity >= _AT_WORK else 0.0),
        "underused_gpus": Pattern("level", share),
        "unused_gpus": Pattern("level", share),
        "broken_gpus": Pattern("level", share),
        "estimated_gpus": Pattern("level", share),
        "active_gpu_seconds": Pattern("noise" if activity else "level", round(3600 * share * activity, 1)),
        "measured_gpu_seconds": Pattern("level", 3600 * share),
        "policy": Pattern("level", 1.0),
        "idle_cost_per_hour": Pattern("level", round(share * (1 - activity) * PRICE, 3)),
        "cost_per_hour": Pattern("level", share * PRICE),
    }


def _rate(metric: Metric, rates: Mapping[str, Pattern], own: Mapping[str, str]) -> Pattern:
    """The pattern of a metric; money by state is the seconds of the state at the price of an hour."""
    if metric.name in STATES:
        state = rates["active_seconds_total" if own["state"] == "active_unprofiled" else "idle_seconds_total"]
        per_second = PRICE / 3600 if "cost" in metric.name else 1.0
        return Pattern("ramp", round(state.size * per_second, 6))
    shape, size = next(pattern for end, pattern in rates.items() if metric.name.endswith(end))
    return Pattern(shape, size * WINDOWS.get(own.get("window", ""), 3600.0) / 3600.0)


@lru_cache(maxsize=1 << 20)
def _pod_series(index: int, slot: Slot, generation: int) -> tuple[Series, ...]:
    pod = f"{slot.name}-{generation % 65536:04x}"
    owner = {
        "workload_namespace": slot.namespace,
        "workload_kind": slot.kind,
        "workload_name": slot.workload_name(generation),
        "team": slot.namespace,
        "workload_class": slot.workload_class,
        "share_mode": slot.mode,
        "resource": "nvidia.com/gpu",
        "attribution_source": "device-plugin",
        "share_estimated": "false",
    }
    names = {"pod_namespace": slot.namespace, "pod_name": pod, "container_name": "main", "pod_uid": f"{pod}-4be1-a0c2"}
    rates = _rates(slot.share, slot.activity)
    return tuple(
        _made(metric, {**device, **names, **owner, **own}, index, _rate(metric, rates, own))
        for metric in catalog.BY_NAME.values()
        if "pod_name" in metric.labels and is_there(metric.name, pod)
        for device in slot.devices
        for own in own_labels(metric, {**device, "gpu_instance": "", "mig_profile": "", **names, **owner, "queue": ""})
    )


def _is_shown(name: str, slot: Slot, *, running: bool) -> bool:
    """Whether an owner has a series: all is priced and measured, and few are idle or opted out."""
    if not name.startswith("gpu_owner_"):
        return name != "gpu_ledger_unpriced_seconds_total"
    if name in {"gpu_owner_underused_gpus", "gpu_owner_unused_gpus"}:
        return running and not slot.activity
    return running and is_there(name, slot.name)


@lru_cache(maxsize=1 << 20)
def _owner_series(index: int, slot: Slot, share: float, generation: int, *, running: bool) -> tuple[Series, ...]:
    """The ledger of one owner on one node, all its pods there together; of one that has ended the last values."""
    owner = {
        **_node(index),
        "workload_namespace": slot.namespace,
        "workload_kind": slot.kind,
        "workload_name": slot.workload_name(generation),
        "team": slot.namespace,
        "model": MODEL,
        "mode": slot.mode,
        "policy": slot.workload_class or "default",
    }
    rates = _rates(round(share, 3), slot.activity)
    return tuple(
        _made(metric, {**owner, **own}, index, _rate(metric, rates, own) if running else Pattern("level", 7200.0))
        for metric in catalog.BY_NAME.values()
        if "workload_name" in metric.labels and "pod_name" not in metric.labels
        if _is_shown(metric.name, slot, running=running)
        for own in own_labels(metric, owner)
        if own.get("window", "1h") in shown_windows(owner["policy"])
    )

"""Series of the agents on a fleet of GPUs: pages of the agent on four kinds of simulated node, repeated."""

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families
from remote_write import encode_labels

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from gpu_simulator import scenario, scenario_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from pipeline_support import AgentSettings, pipeline

GPUS_PER_NODE = 8
LIFE_SECONDS = 6 * 3600
"""Lifetime of pods: a pod with another name follows each, and for a Job's pod another Job."""
STEP_SECONDS = 1800
"""Pods begin and end at multiples of this time, so that samples can be sent in slices."""
APART_SECONDS = 20
"""Time between the two pages from which the values of a series are continued."""
PACE = 3600.0
"""Speed-up of owners' windows, so that all are full on the first page."""
TARGET = ("container", "endpoint", "instance", "job", "namespace", "pod")
"""Labels that Prometheus adds; those of a page get a prefix."""
ONE_OF_A_KIND = frozenset({"node", "uuid", "UUID", "parent_uuid", "Hostname", "pod_name", "pod_uid", "exported_pod"})
OF_A_TEAM = frozenset({"workload_namespace", "pod_namespace", "exported_namespace", "team"})


class Pattern(NamedTuple):
    """Course of a value: ``ramp`` (per second), ``level``, ``noise`` around it, ``clock`` (the time itself)."""

    shape: str
    size: float


class Series(NamedTuple):
    """One series: its metric, its labels as sent, its values."""

    metric: str
    labels: bytes
    pattern: Pattern


@dataclass(frozen=True, slots=True)
class Shown:
    """One series of a page."""

    metric: str
    labels: Mapping[str, str]
    pattern: Pattern

    @property
    def ends(self) -> bool:
        """Return whether it is the ledger of a Job, which stays after the end of its last pod."""
        return self.metric.startswith("gpu_ledger_") and self.labels.get("workload_kind") in {"Job", "PyTorchJob"}


def _node(place: int) -> dict[str, Any]:
    """Return a scenario. Of ten nodes, five train, two have a pod per GPU and a free one, two have MIG, one shares."""
    mig, shared = place in {7, 8}, place == 9  # noqa: PLR2004 - the mix
    gpu: dict[str, Any] = {"model": "h100", "count": GPUS_PER_NODE}
    if mig:
        gpu["mig"] = ["3g.40gb", "2g.20gb", "2g.20gb"]
    if shared:
        gpu["sharing"] = {"strategy": "time-slicing", "replicas": 4}
    if place < 5:  # noqa: PLR2004 - as above
        held = [[{"gpu": number} for number in range(GPUS_PER_NODE)]]
    elif mig:
        held = [[{"gpu": number // 3, "mig": number % 3}] for number in range(20)]
    elif shared:
        held = [[{"gpu": number // 4, "replicas": [number % 4]}] for number in range(32)]
    else:
        held = [[{"gpu": number}] for number in range(GPUS_PER_NODE - 1)]
    kinds = ("PyTorchJob",) if place < 5 else ("StatefulSet",) if shared else ("Job", "StatefulSet")  # noqa: PLR2004 - as above
    pods = [
        {
            "namespace": "team",
            "name": f"pod-{number}",
            "start": -7200,
            "labels": {"team": "team"},
            "owner": {"kind": kinds[number % len(kinds)], "name": f"work-{number % 16}"},
            "devices": devices,
            "activity": 0.0 if number % 7 == 6 else 0.3 + number % 7 * 0.1,  # noqa: PLR2004 - one in seven is idle
            "memory_mib": 2048,
        }
        for number, devices in enumerate(held)
    ]
    return {"node": "gpu", "gpus": [gpu], "pods": pods, "other_pods": 20}


async def _pages(place: int) -> list[dict[tuple[str, frozenset[tuple[str, str]]], float]]:
    """Return values by name and labels on two pages of the agent on a node."""
    loaded = scenario.build(scenario_file.parse(yaml.safe_dump(_node(place)), "fleet.yaml"))
    with tempfile.TemporaryDirectory() as name:
        settings = AgentSettings(pace=PACE)
        async with pipeline(loaded, Path(name), with_api=True, agent=settings) as node:
            snapshots = [await node.until(at, steps=APART_SECONDS) for at in (APART_SECONDS, 2 * APART_SECONDS)]
    return [
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(
                render(families(snapshot, ExpositionOptions()), openmetrics=False).decode()
            )
            for sample in family.samples
        }
        for snapshot in snapshots
    ]


@cache
def _shown(place: int) -> tuple[Shown, ...]:
    """Return the series of a kind of node, and the course of their values."""
    before, after = asyncio.run(_pages(place))
    found = []
    for (name, labels), value in after.items():
        own = {f"exported_{key}" if key in TARGET else key: text for key, text in labels}
        found.append(Shown(name, own, _pattern(name, before.get((name, labels), value), value)))
    return tuple(found)


def _pattern(name: str, old: float, new: float) -> Pattern:
    moved = (new - old) / APART_SECONDS
    if name.endswith("timestamp_seconds"):
        return Pattern("clock", 0.0) if moved else Pattern("level", new)
    if name.endswith(("_total", "idle_for_seconds", "age_seconds")):
        return Pattern("ramp", round(moved, 6)) if moved > 0 else Pattern("level", new)
    return Pattern("noise" if moved else "level", round(new, 3))


class Fleet:
    """GPUs on nodes of eight."""

    def __init__(self, gpus: int, ended_owners: int) -> None:
        self.nodes = max(1, round(gpus / GPUS_PER_NODE))
        self.gpus = self.nodes * GPUS_PER_NODE
        self._ended = ended_owners
        self._made: dict[int, tuple[int, tuple[Series, ...]]] = {}

    def _count(self, *labels: str) -> int:
        """Return the number of different values that some labels of ``gpu_pod_info`` have in the fleet."""
        return len(
            {
                tuple(_renamed(one.labels, index, 0)[label] for label in labels)
                for index in range(self.nodes)
                for one in _shown(_kind(index))
                if one.metric == "gpu_pod_info"
            }
        )

    @property
    def pods(self) -> int:
        """Return the number of pods at a time."""
        return self._count("pod_name")

    @property
    def workloads(self) -> int:
        """Return the number of workloads at a time."""
        return self._count("workload_namespace", "workload_kind", "workload_name")

    def series(self, at: int) -> Iterator[Series]:
        """Yield all series of the half hour that begins at a Unix time."""
        for index in range(self.nodes):
            generation = (at + index % 12 * STEP_SECONDS) // LIFE_SECONDS
            if self._made.get(index, (None,))[0] != generation:
                self._made[index] = generation, tuple(self._of_node(index, generation))
            yield from self._made[index][1]

    def _of_node(self, index: int, generation: int) -> Iterator[Series]:
        yield Series("up", encode_labels({"__name__": "up", **_target(index)}), Pattern("level", 1.0))
        for one in _shown(_kind(index)):
            for back in range(self._ended + 1 if one.ends else 1):
                labels = {"__name__": one.metric, **_target(index), **_renamed(one.labels, index, generation - back)}
                yield Series(one.metric, encode_labels(labels), Pattern("level", 7200.0) if back else one.pattern)


def _kind(index: int) -> int:
    """Return the first of ten places with the same kind of node."""
    place = index % 10
    return 0 if place < 5 else 5 if place < 7 else 7 if place < 9 else 9  # noqa: PLR2004 - as in _node


def _target(index: int) -> dict[str, str]:
    """Return the labels that Prometheus adds for the target of a PodMonitor."""
    address = f"10.{index // 65536}.{index // 256 % 256}.{index % 256}:9400"
    names = {"container": "gpu-cost-exporter", "endpoint": "metrics", "namespace": "gpu-cost"}
    return {"instance": address, "job": "gpu-cost/gpu-cost-exporter", "pod": f"gpu-cost-exporter-{index:05x}", **names}


def _renamed(labels: Mapping[str, str], index: int, generation: int) -> dict[str, str]:
    """Return the labels of a page for a node of the fleet; a training spans four nodes."""
    made, group = dict(labels), index // 4 if _kind(index) == 0 else index
    for name, value in labels.items():
        if not value:
            continue
        if name == "ledger":
            made[name] = f"{index:012x}"
        elif name in ONE_OF_A_KIND:
            made[name] = f"{value}-{index}-{generation:x}" if "pod" in name else f"{value}-{index}"
        elif name in OF_A_TEAM:
            made[name] = f"{value}-{index // 10 % 40}"
        elif name == "workload_name":
            of_job = labels.get("workload_kind") in {"Job", "PyTorchJob"}
            made[name] = f"{value}-{group}-{generation}" if of_job else f"{value}-{group}"
    return made

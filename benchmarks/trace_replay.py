"""Replays the GPU pods of a public production trace through kubelet, join and exposition, and compares with the truth.

Source of the pods: Alibaba cluster-trace-gpu-v2023 (CC BY 4.0). Every pod that was ever scheduled is placed on a
simulated node (first fit: whole GPUs on 8-GPU nodes, parts of a GPU as time-slicing replicas of a twentieth each).
At every sampled instant of a node the kubelet's answer goes over real gRPC on a unix socket into the agent's own
client, join, views and page; the (device, namespace, pod) triples of ``gpu_pod_info`` on that page must be those of
the ground truth, and every share ratio too. The instants are chosen so that each pod is seen at least once.

    python benchmarks/trace_replay.py [--traces DIR] [--instants N]
"""

import argparse
import asyncio
import csv
import heapq
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from exporter.accounting.idle import IdleClock
from exporter.agent.facts import Attributor
from exporter.agent.views import Viewer
from exporter.attribution.join import attribute
from exporter.attribution.processes import PidResolver, PodNames
from exporter.kube.kubelet import KubeletClient
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from exporter.model import Field, Gpu, GpuReading, Reading, Snapshot
from gpu_simulator import identities, scenario
from gpu_simulator.activity import MIXES, mix, steady
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.models import MODELS
from gpu_simulator.plan import (
    Claim,
    ContainerPlan,
    GpuPlan,
    IdForm,
    NodePlan,
    Plugin,
    PodPlan,
    ProcessPlan,
    Sharing,
    Window,
)
from gpu_simulator.truth import NodeTruth

TRACE = "openb_pod_list_default.csv"
WHOLE_MILLI = 1000
REPLICAS = 20
GPUS_OF_A_NODE = {False: 8, True: 4}
MODEL_OF_A_NODE = {False: "a100-80gb", True: "t4"}
NAMESPACES = ("search", "ads", "vision", "nlp", "recommend", "speech")
MIX = mix(**MIXES["inference"])
CALLS_APART_SECONDS = 0.025
"""The simulated kubelet limits its callers to 100 a second, as the real one does; an instant takes two calls."""
WORST_SHARE_ERROR = 1e-9


@dataclass(frozen=True, slots=True)
class TracePod:
    """One GPU pod of the trace; times in seconds of the trace."""

    name: str
    gpus: int
    replicas: int
    """Of each GPU; 0 for whole GPUs."""
    start: float
    end: float


@dataclass(slots=True)
class Node:
    """A node while pods are being placed: which replicas of which GPU are free."""

    shared: bool
    free: list[list[int]] = field(default_factory=list)
    pods: list[PodPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        units = range(REPLICAS if self.shared else 1)
        self.free = [list(units) for _ in range(GPUS_OF_A_NODE[self.shared])]

    def take(self, pod: TracePod) -> tuple[Claim, ...] | None:
        """Claims for a pod, or ``None`` where it does not fit."""
        need = pod.replicas or 1
        fitting = [index for index, units in enumerate(self.free) if len(units) >= need][: pod.gpus]
        if len(fitting) < pod.gpus:
            return None
        taken = {index: tuple(self.free[index][:need]) for index in fitting}
        for index, units in taken.items():
            self.free[index] = [unit for unit in self.free[index] if unit not in units]
        return tuple(Claim(gpu=index, replicas=units if self.shared else ()) for index, units in sorted(taken.items()))

    def give_back(self, claims: Iterable[Claim]) -> None:
        """The pod is gone."""
        for claim in claims:
            self.free[claim.gpu] = sorted({*self.free[claim.gpu], *(claim.replicas or (0,))})


@dataclass(slots=True)
class Tally:
    """What was compared."""

    pods: set[tuple[str, str]] = field(default_factory=set)
    samples: int = 0
    instants: int = 0
    mismatches: int = 0
    shown: int = 0


def read_pods(path: Path) -> tuple[list[TracePod], int]:
    """Pods that held GPUs, by start, and how many GPU pods were never scheduled."""
    pods: list[TracePod] = []
    never = 0
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpus, milli = int(row["num_gpu"]), int(row["gpu_milli"])
            if gpus == 0:
                continue
            if not row["scheduled_time"] or not row["deletion_time"]:
                never += 1
                continue
            replicas = 0 if milli == WHOLE_MILLI else math.ceil(milli * REPLICAS / WHOLE_MILLI)
            start, end = float(row["scheduled_time"]), float(row["deletion_time"])
            pods.append(TracePod(row["name"], gpus, replicas, start, end))
    return sorted(pods, key=lambda pod: (pod.start, pod.name)), never


def place(pods: Sequence[TracePod]) -> list[Node]:
    """First fit in order of start; a new node when nothing fits."""
    nodes: list[Node] = []
    ending: list[tuple[float, int, Node, tuple[Claim, ...]]] = []
    for number, pod in enumerate(pods):
        while ending and ending[0][0] <= pod.start:
            _, _, leaving, left = heapq.heappop(ending)
            leaving.give_back(left)
        shared = pod.replicas > 0
        candidates = [node for node in nodes if node.shared is shared]
        fresh = Node(shared)
        found = next(((node, taken) for node in (*candidates, fresh) if (taken := node.take(pod))), None)
        if found is None:
            raise SystemExit(f"{pod.name} asks for {pod.gpus} GPUs and fits no node")
        node, claims = found
        if node is fresh:
            nodes.append(fresh)
        node.pods.append(_plan(pod, claims))
        heapq.heappush(ending, (pod.end, number, node, claims))
    return nodes


def _plan(pod: TracePod, claims: tuple[Claim, ...]) -> PodPlan:
    level = identities.stable_number(pod.name) % 1000 / 1000 / (REPLICAS if pod.replicas else 1)
    container = ContainerPlan(
        name="main",
        claims=claims,
        signal=steady(level),
        mix=MIX,
        memory_bytes=0,
        processes=(ProcessPlan(comm="python", memory_bytes=0, part=1.0),),
    )
    namespace = NAMESPACES[identities.stable_number(pod.name) % len(NAMESPACES)]
    window = Window(start_seconds=pod.start, end_seconds=pod.end)
    return PodPlan(namespace=namespace, name=pod.name, window=window, containers=(container,))


def to_scenario(node: Node, number: int) -> scenario.Scenario:
    """A node with its pods; every second one speaks in GKE's device ids."""
    name = f"trace-{'shared' if node.shared else 'whole'}-{number:03d}"
    key = MODEL_OF_A_NODE[node.shared]
    gpus = tuple(
        GpuPlan(
            index=index,
            minor=index,
            uuid="GPU-" + identities.stable_uuid(name, index),
            pci_bus_id=identities.pci_bus_id(index),
            serial="0",
            model=MODELS[key],
            sharing=Sharing.TIME_SLICING if node.shared else Sharing.NONE,
            replicas=REPLICAS if node.shared else 1,
        )
        for index in range(GPUS_OF_A_NODE[node.shared])
    )
    plugin = Plugin(ids=IdForm.GKE if number % 2 else IdForm.UUID)
    plan = NodePlan(name=name, node=name, plugin=plugin, gpus=gpus, pods=tuple(node.pods), other_pods=20)
    return scenario.build(plan)


def instants(pods: Iterable[PodPlan], most: int | None) -> list[float]:
    """Times at which, taken together, every pod is there; the fewest that do."""
    chosen: list[float] = []
    for pod in sorted(pods, key=lambda pod: pod.window.end_seconds or math.inf):
        window = pod.window
        if window.end_seconds is not None and (not chosen or chosen[-1] < window.start_seconds):
            chosen.append(window.end_seconds - min(0.5, (window.end_seconds - window.start_seconds) / 2))
    return chosen if most is None else chosen[:: max(1, len(chosen) // most)]


def reading_of(truth: NodeTruth, now: float) -> Reading:
    """What a driver without GPM and without process data would say of the node."""
    gpus = tuple(
        GpuReading(
            gpu=Gpu(uuid=gpu.uuid, index=gpu.index, minor=gpu.minor, model=gpu.model.name, pci_bus_id=gpu.pci_bus_id),
            values={Field.GPU_UTIL: round(100 * gpu.load.utilisation), Field.POWER_USAGE: gpu.power_watts},
        )
        for gpu in truth.gpus
    )
    return Reading(source="nvml", taken_at_seconds=now, duration_seconds=0.0, gpus=gpus)


def shown_on(page: str) -> dict[tuple[str, str, str], float]:
    """Share ratio of every (device, namespace, pod) that the page tells."""
    wanted = ("gpu_pod_info", "gpu_pod_share_ratio")
    lines = [line for line in page.splitlines() if line.startswith(wanted)]
    found: dict[str, dict[tuple[str, str, str], float]] = {name: {} for name in wanted}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            labels = sample.labels
            found[sample.name][labels["uuid"], labels["pod_namespace"], labels["pod_name"]] = sample.value
    return {key: found["gpu_pod_share_ratio"].get(key, math.nan) for key in found["gpu_pod_info"]}


async def replay(loaded: scenario.Scenario, times: Sequence[float], directory: Path, tally: Tally) -> None:
    """One node at all its instants."""
    now = 0.0
    socket = directory / f"{loaded.node}.sock"
    server = KubeletServer(socket, lambda: loaded.at(now))
    client = KubeletClient(str(socket))
    nowhere = directory / "nowhere"
    attributor = Attributor(kubelet=None, pids=PidResolver(nowhere), names=PodNames(nowhere), expiry_seconds=60)
    viewer = Viewer(attributor=attributor, clock=IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=10))
    options = ExpositionOptions()
    await server.start()
    try:
        for instant in times:
            now = instant
            await asyncio.sleep(CALLS_APART_SECONDS)
            truth = loaded.at(now)
            reading = reading_of(truth, now)
            allocations = await client.fetch(now)
            attribution = attribute(
                allocations=allocations,
                gpus=[gpu.gpu for gpu in reading.gpus],
                instances=(),
                now=now,
                expiry_seconds=60,
            )
            views = viewer.views(reading, attribution, {}, now)
            snapshot = Snapshot(
                taken_at_seconds=now,
                node=loaded.node,
                simulated=True,
                devices=views,
                attribution_known=attribution.known,
                unresolved=attribution.unresolved,
            )
            page = render(families(snapshot, options), openmetrics=False).decode()
            compare(shown_on(page), truth, tally)
    finally:
        await server.stop()


async def replay_all(nodes: Sequence[Node], most_instants: int | None, directory: Path, tally: Tally) -> None:
    """All nodes side by side, since each waits for its own kubelet's rate limit."""
    async with asyncio.TaskGroup() as group:
        for number, node in enumerate(nodes):
            times = instants(node.pods, most_instants)
            group.create_task(replay(to_scenario(node, number), times, directory, tally))


def compare(shown: Mapping[tuple[str, str, str], float], truth: NodeTruth, tally: Tally) -> None:
    """Add one instant to the tally; the first mismatches are printed."""
    true = {(h.device_uuid, h.namespace, h.pod): h.share_ratio for h in truth.holders}
    tally.instants += 1
    tally.samples += len(true)
    tally.pods |= {key[1:] for key in true}
    wrong = [key for key in true.keys() | shown.keys() if not _same(true.get(key), shown.get(key))]
    tally.mismatches += len(wrong)
    for key in wrong[: max(0, 5 - tally.shown)]:
        tally.shown += 1
        print(f"  mismatch on {truth.node} at {truth.at_seconds:g} s: {key}: {true.get(key)} is {shown.get(key)}")


def _same(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= WORST_SHARE_ERROR


def by_kind(nodes: Iterable[Node]) -> Iterator[str]:
    """How many nodes of which kind."""
    counts: dict[bool, int] = defaultdict(int)
    for node in nodes:
        counts[node.shared] += 1
    for shared, count in sorted(counts.items()):
        what = f"{REPLICAS} replicas each" if shared else "whole"
        yield f"{count} nodes of {GPUS_OF_A_NODE[shared]} x {MODELS[MODEL_OF_A_NODE[shared]].name} ({what})"


def main() -> int:
    """Replay and report; exit code 1 on any mismatch or pod that was never seen."""
    parser = argparse.ArgumentParser(description="Replay the pods of the trace and compare with the truth.")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the CSV files")
    parser.add_argument("--instants", type=int, help="at most about so many per node (default: all that are needed)")
    arguments = parser.parse_args()
    path = arguments.traces / TRACE
    if not path.is_file():
        print(f"trace replay: skipped, {path} is not there (give the folder with --traces)")
        return 0
    pods, never = read_pods(path)
    nodes = place(pods)
    print("source: Alibaba cluster-trace-gpu-v2023 (CC BY 4.0)")
    print(f"trace: {len(pods) + never} GPU pods, {never} of them never scheduled (no device to compare)")
    print(
        f"placed: {len(pods)} pods, {sum(pod.replicas > 0 for pod in pods)} on shared GPUs; {'; '.join(by_kind(nodes))}"
    )
    tally = Tally()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(replay_all(nodes, arguments.instants, Path(directory), tally))
    print(
        f"compared: {len(tally.pods)} pods in {tally.samples} samples at {tally.instants} instants; "
        f"mismatches: {tally.mismatches} ({time.monotonic() - started:.0f} s)"
    )
    complete = arguments.instants is not None or len(tally.pods) == len(pods)
    if not complete:
        print(f"  {len(pods) - len(tally.pods)} pods were never seen")
    return 0 if complete and tally.mismatches == 0 and tally.samples else 1


if __name__ == "__main__":
    raise SystemExit(main())

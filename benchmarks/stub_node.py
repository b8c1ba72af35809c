"""The node around the measured agent: kubelet, Kubernetes API and /proc, in a separate process."""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from api_support import self_signed
from stub_support import gpu_uuid, holdable

from gpu_simulator import scenario, scenario_file
from gpu_simulator.api_server import ApiObjects, ApiServer, objects_of
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.node import write_filesystem
from gpu_simulator.truth import Fault, NodeTruth

CHANGE_SECONDS = 2.0
"""Time between changes of a pod: less than on a real busy node."""
FORGET_SECONDS = 4.0
"""Time at which versions are too old, once: memory is measured after a second list of pods."""
PODS, PARTS = 110, 7


def truth(*, partitioned: bool) -> NodeTruth:
    """Return the truth for kubelet, API and /proc: one pod with a process per device of the driver, and other pods."""
    uuids = holdable(partitioned=partitioned)
    gpu: dict[str, Any] = {"model": "h100"} | ({"mig": ["1g.10gb"] * PARTS} if partitioned else {})
    pods = [
        {
            "namespace": f"team-{place % 7}",
            "name": f"training-job-{place:04d}-7d9f8b6c5d-x{place:04d}",
            "start": -3600,
            "labels": {"team": "research", "kueue.x-k8s.io/cluster-queue-name": "gpu-h100"},
            "owner": {"kind": "Job", "name": f"training-job-{place:04d}"},
            "devices": [{"gpu": place // PARTS, "mig": place % PARTS} if partitioned else {"gpu": place}],
            "activity": 0.5,
            "memory_mib": 1000,
            "processes": 1 if partitioned else 2,
        }
        for place in range(len(uuids))
    ]
    plan = {
        "node": "bench",
        "node_labels": {"node.kubernetes.io/instance-type": "p5.48xlarge", "karpenter.sh/capacity-type": "spot"},
        "gpus": [gpu | {"uuid": gpu_uuid(index)} for index in range(8)],
        "pods": pods,
        "other_pods": PODS - len(pods),
    }
    node = scenario.build(scenario_file.parse(json.dumps(plan), "bench")).at(0.0)
    holders = tuple(
        replace(one, device_uuid=uuid, device_ids=(uuid,)) for one, uuid in zip(node.holders, uuids, strict=True)
    )
    return replace(node, holders=holders, allocatable={holders[0].resource: tuple(uuids)})


def pids(node: NodeTruth) -> list[list[int]]:
    """Return the processes of each device, in the order of the holders."""
    parts = (part for gpu in node.gpus for part in gpu.instances or (gpu,))
    return [[process.pid for process in part.processes] for part in parts]


def _managed(manager: str, settings: int) -> dict[str, Any]:
    """Return an entry of ``managedFields``, which are most of a real pod's metadata."""
    names = {f'k:{{"name":"SETTING_{n:02d}"}}': {"f:name": {}, "f:value": {}} for n in range(settings)}
    head = {"manager": manager, "operation": "Update", "apiVersion": "v1", "time": "2026-11-20T08:00:00Z"}
    return {**head, "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:containers": names}}}


MANAGED = [_managed("kube-controller-manager", 58), _managed("kubelet", 18)]


class World:
    """Objects of the Kubernetes API: the pods that the kubelet lists, one of which changes at intervals.

    Args:
        node: The node.
        clock: Returns seconds.
    """

    def __init__(self, node: NodeTruth, clock: Callable[[], float]) -> None:
        made = objects_of(node)
        full = ({**pod, "metadata": {**pod["metadata"], "managedFields": MANAGED}} for pod in made.pods)
        self._objects = replace(made, pods=tuple(full))
        self._clock, self._started, self._changes = clock, clock(), 0

    def objects(self) -> ApiObjects:
        """Return the objects now."""
        changes = int((self._clock() - self._started) / CHANGE_SECONDS)
        if changes != self._changes:
            pods = list(self._objects.pods)
            place = changes % len(pods)
            labels = {**pods[place]["metadata"]["labels"], "attempt": str(changes)}
            pods[place] = {**pods[place], "metadata": {**pods[place]["metadata"], "labels": labels}}
            self._objects, self._changes = replace(self._objects, pods=tuple(pods)), changes
        return self._objects

    def faults(self) -> Mapping[Fault, float]:
        """Return the faults now."""
        forgets = FORGET_SECONDS <= self._clock() - self._started < FORGET_SECONDS + 1
        return {Fault.API_GONE: 0.0} if forgets else {}


async def serve(directory: Path, node: NodeTruth) -> None:
    """Write /proc, pod logs and a service account, serve kubelet and API until SIGTERM; print ``ready`` and the URL."""
    write_filesystem(node, directory / "proc", directory / "pods")
    kubelet = KubeletServer(directory / "kubelet.sock", lambda: node)
    world = World(node, time.monotonic)
    api = ApiServer(
        world.objects,
        world.faults,
        token_file=directory / "token",
        kubeconfig=directory / "kubeconfig",
        tls=self_signed(directory),
    )
    await kubelet.start()
    await api.start()
    print("ready", api.url, flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await api.stop()
    await kubelet.stop()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--partitioned", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.directory, truth(partitioned=arguments.partitioned)))


if __name__ == "__main__":
    main()

"""The node around the agent under measurement: kubelet, Kubernetes API and /proc, in a process of their own."""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import kube_objects
from api_support import self_signed
from stub_support import MIB, RELEASE, gpu_uuid

from gpu_simulator.api_objects import ApiObjects
from gpu_simulator.api_server import ApiServer
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.node import write_filesystem
from gpu_simulator.truth import Fault, GpuTruth, HolderTruth, ModelSpec, NodeTruth, ProcessTruth

CHANGE_SECONDS = 2.0
"""A pod changes, more often than a real one of a busy node."""
FORGET_SECONDS = 4.0
"""After so long versions are too old, once: memory is measured after pods were listed again."""
WHOLE, PARTITIONED = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"

MODEL = ModelSpec(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=81559 * MIB,
    memory_reserved_bytes=500 * MIB,
    power_limit_watts=700.0,
    idle_watts=70.0,
    max_sm_clock_mhz=1980,
    max_mem_clock_mhz=2619,
    multiprocessors=132,
    gpm=True,
)


def truth(pids: dict[str, list[int]], *, pods: int, partitioned: bool) -> NodeTruth:
    """Return what kubelet and /proc say: one pod per device with that device's processes, and other pods.

    Args:
        pids: device UUID to the processes that the stub driver lists on it.
        pods: all of them.
        partitioned: whether the devices are MIG instances.
    """
    resource = PARTITIONED if partitioned else WHOLE
    holders = tuple(
        HolderTruth(
            namespace=f"team-{place % 7}",
            pod=f"training-job-{place:04d}-7d9f8b6c5d-x{place:04d}",
            container="main",
            pod_uid=kube_objects.uid(place),
            device_uuid=uuid,
            resource=resource,
            device_ids=(uuid,),
            share_ratio=1 / 7 if partitioned else 1.0,
            activity_ratio=0.5,
            started_seconds=0.0,
        )
        for place, uuid in enumerate(pids)
    )
    processes = tuple(
        _process(pid, place, holder) for place, holder in enumerate(holders) for pid in pids[holder.device_uuid]
    )
    others = tuple(("default", f"web-{place:03d}", "main") for place in range(pods - len(holders)))
    # The fake /proc needs processes only, whichever GPU of the truth they are on.
    gpu = GpuTruth(
        index=0, minor=0, uuid=gpu_uuid(0), pci_bus_id="00000000:10:00.0", serial="1", model=MODEL, processes=processes
    )
    return NodeTruth(
        at_seconds=0.0,
        node="bench",
        driver_version=RELEASE,
        gpus=(gpu,),
        holders=holders,
        other_pods=others,
        allocatable={resource: tuple(pids)},
    )


def _process(pid: int, place: int, holder: HolderTruth) -> ProcessTruth:
    pod_slice = f"kubepods-burstable-pod{kube_objects.uid(place).replace('-', '_')}.slice"
    path = f"/kubepods.slice/kubepods-burstable.slice/{pod_slice}/cri-containerd-{pid:064x}.scope"
    return ProcessTruth(
        pid=pid,
        start_ticks=1000 + pid,
        comm="python",
        cgroup=f"0::{path}\n",
        memory_used_bytes=1000 * MIB,
        sm_ratio=0.4,
        namespace=holder.namespace,
        pod=holder.pod,
        container=holder.container,
        pod_uid=holder.pod_uid,
    )


class World:
    """What the Kubernetes API has: the pods that the kubelet lists, one of which changes every so often.

    Args:
        what: Of the node.
        clock: Seconds.
    """

    def __init__(self, what: NodeTruth, clock: Callable[[], float]) -> None:
        names = [(holder.namespace, holder.pod) for holder in what.holders]
        names += [(namespace, pod) for namespace, pod, _ in what.other_pods]
        self._pods = [kube_objects.pod(n, namespace=space, name=name) for n, (space, name) in enumerate(names)]
        self._namespaces = tuple(kube_objects.namespace(number) for number in range(7))
        self._clock = clock
        self._started = clock()
        self._changes = -1
        self._objects = ApiObjects()

    def objects(self) -> ApiObjects:
        """Return what there is now."""
        changes = int((self._clock() - self._started) / CHANGE_SECONDS)
        if changes != self._changes:
            self._changes = changes
            place = changes % len(self._pods)
            before = self._pods[place]
            labels = {**before["metadata"]["labels"], "attempt": str(changes)}
            self._pods[place] = {**before, "metadata": {**before["metadata"], "labels": labels}}
            self._objects = ApiObjects(
                pods=tuple(self._pods), namespaces=self._namespaces, node=kube_objects.node(kube_objects.NODE)
            )
        return self._objects

    def faults(self) -> Mapping[Fault, float]:
        """Return what is wrong now."""
        forgets = FORGET_SECONDS <= self._clock() - self._started < FORGET_SECONDS + 1
        return {Fault.API_GONE: 0.0} if forgets else {}


async def serve(directory: Path, what: NodeTruth) -> None:
    """Write /proc, pod logs and a service account, serve kubelet and API, say ``ready`` and its URL; until SIGTERM."""
    write_filesystem(what, directory / "proc", directory / "pods")
    kubelet = KubeletServer(directory / "kubelet.sock", lambda: what)
    world = World(what, time.monotonic)
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
    """Read the processes per device (JSON: UUID to pids) from standard input and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--pods", type=int, required=True)
    parser.add_argument("--partitioned", action="store_true")
    arguments = parser.parse_args()
    pids = json.load(sys.stdin)
    asyncio.run(serve(arguments.directory, truth(pids, pods=arguments.pods, partitioned=arguments.partitioned)))


if __name__ == "__main__":
    main()

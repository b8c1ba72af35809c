"""The node around the agent under measurement: kubelet, Kubernetes API and /proc, in a process of their own."""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from api_support import self_signed
from stub_support import MIB, RELEASE, gpu_uuid

from gpu_simulator.api_server import ApiObjects, ApiServer
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.node import write_filesystem
from gpu_simulator.truth import Fault, GpuTruth, HolderTruth, ModelSpec, NodeTruth, ProcessTruth

CHANGE_SECONDS = 2.0
"""A pod changes, more often than a real one of a busy node."""
FORGET_SECONDS = 4.0
"""After so long versions are too old, once: memory is measured after pods were listed again."""
NODE, PODS = "bench", 110
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


NODE_OBJECT = {
    "metadata": {
        "name": NODE,
        "uid": "00000000-0000-4000-8000-000000300000",
        "labels": {
            "kubernetes.io/hostname": NODE,
            "node.kubernetes.io/instance-type": "p5.48xlarge",
            "topology.kubernetes.io/region": "us-east-1",
            "karpenter.sh/capacity-type": "spot",
        },
    },
    "status": {
        "images": [{"names": [f"registry.example/image-{n}@sha256:{n:064x}"], "sizeBytes": n} for n in range(50)]
    },
}
"""With the 50 largest images, as a kubelet names them."""


def uid(number: int) -> str:
    """Return the UID of an object."""
    return f"00000000-0000-4000-8000-{number:012d}"


def pod_object(number: int, *, namespace: str, name: str) -> dict[str, Any]:
    """Return the pod of a training job, whose metadata has 5.5 kB as a real one has, most of it ``managedFields``."""
    job = f"training-job-{number:04d}"
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": uid(number + 100_000), "controller": True}
    return {
        "metadata": {
            "name": name,
            "generateName": f"{job}-worker-",
            "namespace": namespace,
            "uid": uid(number),
            "creationTimestamp": "2026-11-20T08:00:00Z",
            "labels": {
                "app.kubernetes.io/name": "trainer",
                "batch.kubernetes.io/controller-uid": uid(1),
                "batch.kubernetes.io/job-name": job,
                "kueue.x-k8s.io/local-queue-name": "research",
                "kueue.x-k8s.io/cluster-queue-name": "gpu-h100",
                "team": "research",
            },
            "annotations": {"cni.projectcalico.org/podIP": "10.0.0.1/32", "kueue.x-k8s.io/workload": f"job-{job}"},
            "ownerReferences": [owner],
            "managedFields": [_managed("kube-controller-manager", 58), _managed("kubelet", 18)],
        },
        "spec": {"nodeName": NODE},
        "status": {"phase": "Running"},
    }


def _managed(manager: str, settings: int) -> dict[str, Any]:
    names = {f'k:{{"name":"SETTING_{n:02d}"}}': {"f:name": {}, "f:value": {}} for n in range(settings)}
    head = {"manager": manager, "operation": "Update", "apiVersion": "v1", "time": "2026-11-20T08:00:00Z"}
    return {**head, "fieldsType": "FieldsV1", "fieldsV1": {"f:spec": {"f:containers": names}}}


def truth(pids: dict[str, list[int]], *, partitioned: bool) -> NodeTruth:
    """Return what kubelet and /proc say: one pod per device with that device's processes, and other pods.

    Args:
        pids: device UUID to the processes that the stub driver lists on it.
        partitioned: whether the devices are MIG instances.
    """
    resource = PARTITIONED if partitioned else WHOLE
    holders = tuple(
        HolderTruth(
            namespace=f"team-{place % 7}",
            pod=f"training-job-{place:04d}-7d9f8b6c5d-x{place:04d}",
            container="main",
            pod_uid=uid(place),
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
    others = tuple(("default", f"web-{place:03d}", "main") for place in range(PODS - len(holders)))
    # The fake /proc needs processes only, whichever GPU of the truth they are on.
    gpu = GpuTruth(
        index=0, minor=0, uuid=gpu_uuid(0), pci_bus_id="00000000:10:00.0", serial="1", model=MODEL, processes=processes
    )
    return NodeTruth(
        at_seconds=0.0,
        node=NODE,
        driver_version=RELEASE,
        gpus=(gpu,),
        holders=holders,
        other_pods=others,
        allocatable={resource: tuple(pids)},
    )


def _process(pid: int, place: int, holder: HolderTruth) -> ProcessTruth:
    pod_slice = f"kubepods-burstable-pod{uid(place).replace('-', '_')}.slice"
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
        self._pods = [pod_object(n, namespace=space, name=name) for n, (space, name) in enumerate(names)]
        self._namespaces = tuple(
            {"metadata": {"name": f"team-{n}", "uid": uid(200_000 + n), "labels": {"team": f"research-{n}"}}}
            for n in range(7)
        )
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
            self._objects = ApiObjects(pods=tuple(self._pods), namespaces=self._namespaces, node=NODE_OBJECT)
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
    parser.add_argument("--partitioned", action="store_true")
    arguments = parser.parse_args()
    pids = json.load(sys.stdin)
    asyncio.run(serve(arguments.directory, truth(pids, partitioned=arguments.partitioned)))


if __name__ == "__main__":
    main()

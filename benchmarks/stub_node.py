"""The node around the agent under measurement: a kubelet with 110 pods and a /proc, in a process of its own."""

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from stub_support import MIB, RELEASE, gpu_uuid

from exporter.simulator import filesystem
from exporter.simulator.kubelet import KubeletServer
from exporter.simulator.truth import GpuTruth, HolderTruth, ModelSpec, NodeTruth, ProcessTruth

PODS = 110
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


def truth(pids: dict[str, list[int]], *, partitioned: bool) -> NodeTruth:
    """Return what kubelet and /proc say: one pod per device with that device's processes, other pods up to 110.

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
            pod_uid=_uid(place),
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
        node="bench",
        driver_version=RELEASE,
        gpus=(gpu,),
        holders=holders,
        other_pods=others,
        allocatable={resource: tuple(pids)},
    )


def _uid(place: int) -> str:
    return f"00000000-0000-4000-8000-{place:012d}"


def _process(pid: int, place: int, holder: HolderTruth) -> ProcessTruth:
    pod_slice = f"kubepods-burstable-pod{_uid(place).replace('-', '_')}.slice"
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


async def serve(directory: Path, what: NodeTruth) -> None:
    """Write /proc and pod logs, serve the kubelet's socket, say ``ready``, and stay until SIGTERM."""
    filesystem.write(what, directory / "proc", directory / "pods")
    server = KubeletServer(directory / "kubelet.sock", lambda: what)
    await server.start()
    print("ready", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop()


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

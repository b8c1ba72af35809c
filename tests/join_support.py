"""Devices, listed containers and API objects for tests of the join."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from exporter.agent.attributor import Attributor
from exporter.agent.run import attributor_of
from exporter.attribution import vgpu
from exporter.attribution.join import NOTHING_REMEMBERED, attribute
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, AllocatedDevice, Evidence
from exporter.config import AgentConfig
from exporter.kube.dra import allocated_devices, parse_slice, pools_of, uid_of
from exporter.kube.kubelet import KubeletClient, KubeletPoller
from exporter.kube.metadata import parse_pod
from exporter.model.attribution import (
    Allocations,
    Attribution,
    ClaimedDevice,
    ContainerAllocation,
    DeviceIds,
    PodMetadata,
)
from exporter.model.devices import Gpu, GpuReading, MigInstance, MigReading
from gpu_simulator.api_server import ApiObjects

NOW = 1_000_000.0
MIB = 1 << 20
GPU_MIB = 81920
CLAIM = "0f1e2d3c-0000-4000-8000-0000000000{:02d}"


def gpu_uuid(number: int) -> str:
    return f"GPU-00000000-0000-4000-8000-{number:012d}"


def mig_uuid(number: int) -> str:
    return f"MIG-00000000-0000-5000-8000-{number:012d}"


def gpu(index: int = 0, *, mig: bool = False, memory_mib: int | None = GPU_MIB) -> Gpu:
    return Gpu(
        uuid=gpu_uuid(index),
        index=index,
        minor=index + 10,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id=f"00000000:{index:02X}:00.0",
        mig_enabled=mig,
        compute_slices=7,
        memory_slices=8,
        memory_total_bytes=None if memory_mib is None else memory_mib * MIB,
    )


def instance(number: int, parent: int = 0, *, start: int | None = None, profile_id: int | None = None) -> MigInstance:
    return MigInstance(
        uuid=mig_uuid(number),
        parent_uuid=gpu_uuid(parent),
        gpu_instance_id=number,
        compute_instance_id=0,
        profile="1g.10gb",
        compute_slices=1,
        memory_slices=1,
        profile_id=profile_id,
        placement_start=start,
    )


def held(
    pod: str, *ids: str, resource: str = "nvidia.com/gpu", container: str = "main", namespace: str = "ml"
) -> ContainerAllocation:
    return ContainerAllocation(
        namespace=namespace, pod=pod, container=container, devices=(DeviceIds(resource=resource, ids=ids),)
    )


def claimed(
    pod: str, *devices: str, claim: int | None = 1, share_id: str | None = None, container: str = "main"
) -> ContainerAllocation:
    """Return a container with one claim; each device has one more CDI name, as from a kubelet."""
    names: tuple[str, ...] = ()
    claims = []
    for device in devices:
        if claim is not None:
            names += (f"k8s.gpu.nvidia.com/claim={CLAIM.format(claim)}-{device}",)
        claims.append(
            ClaimedDevice(
                claim_name=f"c{claim}",
                claim_namespace="ml",
                driver="gpu.nvidia.com",
                pool="node-1",
                device=device,
                share_id=share_id,
                cdi_names=names,
            )
        )
    return ContainerAllocation(namespace="ml", pod=pod, container=container, claims=tuple(claims))


def allocated(device: str, **values: object) -> AllocatedDevice:
    return replace(AllocatedDevice(driver="gpu.nvidia.com", pool="node-1", device=device), **values)


def pod_metadata(
    name: str,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    namespace: str = "ml",
) -> PodMetadata:
    return PodMetadata(
        namespace=namespace, name=name, uid=f"uid-{name}", labels=labels or {}, annotations=annotations or {}
    )


def knowing(*pods: PodMetadata, **values: object) -> Evidence:
    return replace(NO_EVIDENCE, pods={(pod.namespace, pod.name): pod for pod in pods}, **values)


def join(
    containers: Sequence[ContainerAllocation],
    gpus: Sequence[Gpu],
    instances: Sequence[MigInstance] = (),
    *,
    evidence: Evidence = NO_EVIDENCE,
    others: Sequence[tuple[str, str, str]] = (),
    allocatable: Mapping[str, Sequence[str]] | None = None,
    replicas: Mapping[tuple[str, str], int] = NOTHING_REMEMBERED,
) -> Attribution:
    advertised = (
        None
        if allocatable is None
        else tuple(DeviceIds(resource=resource, ids=tuple(ids)) for resource, ids in allocatable.items())
    )
    return attribute(
        Allocations(
            answered_at_seconds=NOW - 1,
            containers=tuple(containers),
            allocatable=advertised,
            other_containers=tuple(others),
        ),
        read(gpus, instances),
        evidence,
        replicas,
    )


def read(gpus: Sequence[Gpu], instances: Sequence[MigInstance] = ()) -> list[GpuReading]:
    """Return the devices as reported by a driver."""
    return [
        GpuReading(
            gpu=gpu, instances=tuple(MigReading(instance=one) for one in instances if one.parent_uuid == gpu.uuid)
        )
        for gpu in gpus
    ]


def shares(attribution: Attribution) -> dict[tuple[str, str, str], float]:
    """Return the share by (device, pod, container)."""
    return {
        (uuid, holder.pod, holder.container): holder.share_ratio
        for uuid, holders in attribution.holders.items()
        for holder in holders
    }


def reasons(attribution: Attribution) -> list[tuple[str, str]]:
    return [(unresolved.pod, unresolved.reason) for unresolved in attribution.unresolved]


def polled(answer: Allocations | None) -> KubeletPoller:
    """Return a poller with this answer."""
    poller = KubeletPoller(KubeletClient("/none.sock"), interval_seconds=5, clock=time.time)
    poller.latest = answer
    return poller


def attributor(config: AgentConfig, answer: Allocations | None, clock: Callable[[], float] = time.time) -> Attributor:
    """Return the agent's attributor, with this answer of the kubelet."""
    made = attributor_of(config, clock)
    made.kubelet = polled(answer)
    return made


_FINISHED = ("Succeeded", "Failed")


def evidence_of(objects: ApiObjects) -> Evidence:
    """Return everything in the API, as seen by a watcher with all rights after a while."""
    running = [pod for pod in objects.pods if pod["status"]["phase"] not in _FINISHED]
    parsed = [parse_pod(pod, vgpu.KEYS) for pod in running]
    pods = {(pod.namespace, pod.name): pod for pod in parsed if pod is not None}
    names = [(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in objects.pods]
    slices = [found for each in objects.resource_slices if (found := parse_slice(each)) is not None]
    pools = pools_of(slices, {})
    return Evidence(
        pods=pods,
        ended=frozenset(set(names) - set(pods)),
        claims={uid_of(claim): allocated_devices(claim) or () for claim in objects.resource_claims},
        reads_claims=True,
        devices={(pool, name): device for pool, devices in pools.items() for name, device in devices.items()},
    )

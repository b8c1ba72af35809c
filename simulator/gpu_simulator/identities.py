"""Names of simulated things that look like real ones and are always the same: UUIDs, ids, cgroup paths."""

import hashlib
import uuid
from collections.abc import Sequence
from functools import lru_cache

from gpu_simulator.plan import Claim, GpuPlan, IdForm, MigStrategy, Plugin, Runtime, Sharing
from gpu_simulator.truth import MigTruth

_NAMESPACE = uuid.UUID("5f1f3c1c-6d0b-4d55-8f3a-0a4a2f3b7c10")
_HGX_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
VOLCANO_NUMBER, VOLCANO_MEMORY = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory"
DRA_DRIVER = "gpu.nvidia.com"
DRA_PREFIX = "dra:"
"""Marks what is a claim's: ``dra:<claim>`` as a resource, ``dra:<driver>/<pool>/<device>[#<share id>]`` as an id."""
_QOS = ("burstable", "besteffort", "")
"""Guaranteed pods have no level of their own in the path."""


@lru_cache(maxsize=4096)  # asked for the same pods many times a second
def stable_uuid(*parts: object) -> str:
    """A UUID that follows from its parts."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(map(str, parts))))


def stable_number(*parts: object) -> int:
    """A number below 2**32 that follows from its parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest())


def pci_bus_id(index: int) -> str:
    """Bus id of the n-th board, as an 8-GPU server has them; ``00000000:1B:00.0``."""
    domain, position = divmod(index, len(_HGX_BUSES))
    return f"{domain:08X}:{_HGX_BUSES[position]:02X}:00.0"


def container_id(*parts: object) -> str:
    """64 hex digits that follow from the parts."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).hexdigest()


@lru_cache(maxsize=4096)  # as above
def cgroup_text(runtime: Runtime, pod_uid: str, container: str) -> str:
    """The whole of ``/proc/<pid>/cgroup`` of a process in a container of a pod."""
    number = stable_number(pod_uid)
    if runtime is Runtime.MIXED:
        runtime = (Runtime.CONTAINERD, Runtime.CRIO, Runtime.CGROUPFS, Runtime.CGROUP_V1)[number % 4]
    qos = _QOS[number // 4 % len(_QOS)]
    cid = container_id(pod_uid, container)
    if runtime in (Runtime.CGROUPFS, Runtime.CGROUP_V1):
        path = f"/kubepods/{qos + '/' if qos else ''}pod{pod_uid}/{cid}"
        if runtime is Runtime.CGROUPFS:
            return f"0::{path}\n"
        return "".join(f"{n}:{name}:{path}\n" for n, name in ((11, "devices"), (4, "memory"), (1, "name=systemd")))
    level = f"kubepods-{qos}" if qos else "kubepods"
    slices = f"/kubepods.slice/{level}.slice" if qos else "/kubepods.slice"
    prefix = "crio" if runtime is Runtime.CRIO else "cri-containerd"
    tail = "/container" if runtime is Runtime.CRIO and number % 2 else ""
    return f"0::{slices}/{level}-pod{pod_uid.replace('-', '_')}.slice/{prefix}-{cid}.scope{tail}\n"


def outside_cgroup_text(name: str) -> str:
    """The same for a process that is in no pod."""
    if stable_number(name) % 2:
        return f"0::/system.slice/{name}.service\n"
    return "0::/user.slice/user-1000.slice/session-3.scope\n"


def resource_name(plugin: Plugin, gpu: GpuPlan, instance: MigTruth | None) -> str:
    """Extended resource under which a device plugin advertises a device."""
    if plugin.ids is IdForm.VOLCANO:
        return VOLCANO_NUMBER
    name = "nvidia.com/gpu"
    if instance and plugin.ids in (IdForm.UUID, IdForm.LEGACY_MIG) and plugin.mig_strategy is MigStrategy.MIXED:
        name = f"nvidia.com/mig-{instance.profile.replace('+', '.')}"
    return name + ".shared" if plugin.rename_shared and gpu.sharing is not Sharing.NONE else name


def claim_name(pod: str, container: str, claim: Claim, *, only_container: bool) -> str:
    """Name of the DRA claim by which a container of a pod has a device."""
    if claim.claim_name:
        return claim.claim_name
    if claim.extended:
        return f"{pod}-extended-resources-{stable_number(pod, container):08x}"[:63]
    return f"{pod}-gpu" if only_container else f"{pod}-{container}-gpu"


def dra_device(minor: int, profile: str = "", profile_id: int = 0, placement_start: int = 0) -> str:
    """Name of a device in its pool, as driver 25.12 makes it; with a profile, of a MIG instance."""
    name = f"gpu-{minor}"
    return f"{name}-mig-{profile.replace('.', '')}-{profile_id}-{placement_start}" if profile else name


def claim_uid(namespace: str, name: str) -> str:
    """UID of a DRA claim."""
    return stable_uuid("claim", namespace, name)


def _base_id(plugin: Plugin, node: str, gpu: GpuPlan, instance: MigTruth | None) -> str:
    if plugin.ids is IdForm.GKE:
        return f"nvidia{gpu.minor}" + (f"/gi{instance.gpu_instance_id}" if instance else "")
    if plugin.ids is IdForm.DRA:
        device = dra_device(gpu.minor)
        if instance:
            device = dra_device(gpu.minor, instance.profile, instance.profile_id, instance.placement_start)
        return f"{DRA_PREFIX}{DRA_DRIVER}/{node}/{device}"
    if instance is None:
        return gpu.uuid
    if plugin.ids is IdForm.LEGACY_MIG:
        return f"MIG-{gpu.uuid}/{instance.gpu_instance_id}/{instance.compute_instance_id}"
    return instance.uuid


def device_ids(
    plugin: Plugin, node: str, gpu: GpuPlan, instance: MigTruth | None, replicas: Sequence[int]
) -> tuple[str, ...]:
    """Ids by which the kubelet lists a device, or these replicas of it."""
    base = _base_id(plugin, node, gpu, instance)
    if plugin.ids in (IdForm.HAMI, IdForm.VOLCANO) and instance is None:
        return tuple(f"{base}-{number}" for number in replicas or (0,))
    if not replicas or plugin.ids is IdForm.DRA:
        return (base,)
    separator = "/vgpu" if plugin.ids is IdForm.GKE else "::"
    return tuple(f"{base}{separator}{number}" for number in replicas)

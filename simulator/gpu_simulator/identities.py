"""Generates stable names in real formats for simulated objects: UUIDs, ids, cgroup paths."""

import hashlib
import uuid
from collections.abc import Sequence
from functools import lru_cache

from gpu_simulator.plan import Claim, GpuPlan, IdForm, MigStrategy, NodePlan, Runtime, Sharing
from gpu_simulator.truth import MigTruth

_NAMESPACE = uuid.UUID("5f1f3c1c-6d0b-4d55-8f3a-0a4a2f3b7c10")
_HGX_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
VOLCANO_NUMBER, VOLCANO_MEMORY = "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory"
DRA_DRIVER = "gpu.nvidia.com"
DRA_PREFIX = "dra:"
"""Prefix of claims: ``dra:<claim>`` as a resource, ``dra:<driver>/<pool>/<device>[#<share id>]`` as an id."""
_QOS = ("burstable", "besteffort", "")
"""QoS levels in the path; guaranteed pods have none."""


@lru_cache(maxsize=4096)  # called for the same pods many times a second
def stable_uuid(*parts: object) -> str:
    """Return a UUID derived from the parts."""
    return str(uuid.uuid5(_NAMESPACE, "/".join(map(str, parts))))


def stable_number(*parts: object) -> int:
    """Return a number below 2**32 derived from the parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest())


def pci_bus_id(index: int) -> str:
    """Return the bus id of a board of an 8-GPU server, such as ``00000000:1B:00.0``."""
    domain, position = divmod(index, len(_HGX_BUSES))
    return f"{domain:08X}:{_HGX_BUSES[position]:02X}:00.0"


def container_id(*parts: object) -> str:
    """Return 64 hex digits derived from the parts."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).hexdigest()


@lru_cache(maxsize=4096)  # as above
def cgroup_text(runtime: Runtime, pod_uid: str, container: str) -> str:
    """Return ``/proc/<pid>/cgroup`` of a process in a container of a pod."""
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
    """Return ``/proc/<pid>/cgroup`` of a process outside pods."""
    if stable_number(name) % 2:
        return f"0::/system.slice/{name}.service\n"
    return "0::/user.slice/user-1000.slice/session-3.scope\n"


def resource_name(plan: NodePlan, gpu: GpuPlan, instance: MigTruth | None) -> str:
    """Return the extended resource with which the node's device plugin advertises a device."""
    plugin = plan.plugin
    if plugin.ids is IdForm.VOLCANO:
        return VOLCANO_NUMBER
    name = "nvidia.com/gpu"
    if instance and plugin.ids in (IdForm.UUID, IdForm.LEGACY_MIG) and plugin.mig_strategy is MigStrategy.MIXED:
        name = f"nvidia.com/mig-{instance.profile.replace('+', '.')}"
    return name + ".shared" if plugin.rename_shared and gpu.sharing is not Sharing.NONE else name


def claim_name(pod: str, container: str, claim: Claim, *, only_container: bool) -> str:
    """Return the name of the DRA claim of a container for a device."""
    if claim.claim_name:
        return claim.claim_name
    if claim.extended:
        return f"{pod}-extended-resources-{stable_number(pod, container):08x}"[:63]
    return f"{pod}-gpu" if only_container else f"{pod}-{container}-gpu"


def dra_device(gpu: GpuPlan, instance: MigTruth | None = None) -> str:
    """Return the name of a device in its pool, like DRA driver 25.12."""
    name = f"gpu-{gpu.minor}"
    if instance is None:
        return name
    return f"{name}-mig-{instance.profile.replace('.', '')}-{instance.profile_id}-{instance.placement_start}"


def claim_uid(namespace: str, name: str) -> str:
    """Return the UID of a DRA claim."""
    return stable_uuid("claim", namespace, name)


def device_ids(
    plan: NodePlan, gpu: GpuPlan, instance: MigTruth | None, replicas: Sequence[int] = ()
) -> tuple[str, ...]:
    """Return the ids in the kubelet's list of a device, or of replicas of it."""
    base, separator = instance.uuid if instance else gpu.uuid, "::"
    match plan.plugin.ids:
        case IdForm.DRA:
            return (f"{DRA_PREFIX}{DRA_DRIVER}/{plan.node}/{dra_device(gpu, instance)}",)
        case IdForm.HAMI | IdForm.VOLCANO if instance is None:
            return tuple(f"{base}-{number}" for number in replicas or (0,))
        case IdForm.GKE:
            base = f"nvidia{gpu.minor}" + (f"/gi{instance.gpu_instance_id}" if instance else "")
            separator = "/vgpu"
        case IdForm.LEGACY_MIG if instance:
            base = f"MIG-{gpu.uuid}/{instance.gpu_instance_id}/{instance.compute_instance_id}"
    return tuple(f"{base}{separator}{number}" for number in replicas) or (base,)

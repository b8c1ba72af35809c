"""Values of attribution: the kubelet's allocations, holders and shares, and pods and owners of the Kubernetes API."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class ShareMode(StrEnum):
    """Mode in which a holder has its device."""

    EXCLUSIVE = "exclusive"
    MIG = "mig"
    SHARED = "shared"
    """Time-slicing, MPS, or several holders of one device by other means; of a whole GPU or a MIG instance."""


class AllocationState(StrEnum):
    """Allocation of a device."""

    ALLOCATED = "allocated"
    UNALLOCATED = "unallocated"
    UNKNOWN = "unknown"
    """The kubelet did not answer (recently enough): the device may be in either of the other states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIds:
    """Device-plugin ids of one resource, as the kubelet lists them."""

    resource: str
    """``nvidia.com/gpu``, ``nvidia.com/mig-1g.10gb``, ``nvidia.com/gpu.shared``, ..."""
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedDevice:
    """One device of a DRA claim, as the kubelet lists it."""

    claim_name: str
    claim_namespace: str
    driver: str
    pool: str
    device: str
    share_id: str | None = None
    cdi_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAllocation:
    """One container and the devices that the kubelet lists with it."""

    namespace: str
    pod: str
    container: str
    devices: tuple[DeviceIds, ...] = ()
    claims: tuple[ClaimedDevice, ...] = ()

    @property
    def name(self) -> tuple[str, str, str]:
        """Namespace, pod and container."""
        return self.namespace, self.pod, self.container


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """One valid answer of the kubelet, restricted to containers with devices or claims."""

    answered_at_seconds: float
    """Unix time."""
    containers: tuple[ContainerAllocation, ...] = ()
    allocatable: tuple[DeviceIds, ...] | None = None
    """Healthy devices of ``GetAllocatableResources``, allocated or not; ``None`` if the kubelet does not list them."""
    other_containers: tuple[tuple[str, str, str], ...] = ()
    """(namespace, pod, container) of containers without any device; they may still have a fraction of a GPU."""


HolderKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container): identifies a container that holds a device."""


def is_other_pod(before: str | None, after: str | None) -> bool:
    """Return whether two UIDs under one pod name belong to different pods; an unknown UID can be of the same pod."""
    return bool(before and after and before != after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A container that holds a device, or replicas of it.

    ``share_ratio`` is its part of the *physical* GPU, 0..1: an exclusive GPU 1; a MIG instance
    max(compute, memory slices) as parts of the GPU, normalised; a shared device its replicas' part of that.
    """

    namespace: str
    pod: str
    container: str
    """Container name; empty if only the pod is known."""
    device_uuid: str
    """UUID of the whole GPU or the MIG instance."""
    mode: ShareMode
    resource: str
    source: str
    """Source of the holder: ``device-plugin``, ``dra``, ``annotation`` (HAMi, volcano-vgpu, KAI), ``job-mapping``
    (Slurm) or ``process`` (the tenant of a running process, on nodes without an allocator)."""
    share_ratio: float
    device_share_ratio: float
    """Part of the *device* (GPU or MIG instance), 0..1; 1 unless shared."""
    share_estimated: bool = False
    """Whether the share is estimated because the number of replicas is uncertain."""
    replicas: int = 1
    pod_uid: str | None = None

    @property
    def key(self) -> HolderKey:
        """Container and device."""
        return self.device_uuid, self.namespace, self.pod, self.container


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """A listed device of a container without a match on this node, or a device that an unlisted pod uses."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str
    reason: str
    """Snake case: ``unknown_uuid``, ``unknown_form``, ``needs_annotation``, ``dra_unresolved``, ..."""
    devices: tuple[str, ...] | None = None
    """UUIDs of the GPUs and MIG instances that it can be, whole or in part; ``None`` if it can be any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Holders of every device at one instant.

    ``known`` is False if the kubelet has not answered for longer than the expiry: then ``holders`` is
    empty and every device's allocation is unknown. Devices are keyed by UUID (GPU or MIG instance).
    """

    known: bool
    source: str = "kubelet"
    """Source of holders: ``kubelet``, ``slurm`` or ``host``; empty if attribution is disabled."""
    problem: str = ""
    """Why attribution is unknown or outdated, and the fix, in one line; empty without a problem."""
    answered_at_seconds: float | None = None
    holders: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    unresolved: tuple[Unresolved, ...] = ()
    expected_devices: int | None = None
    """Physical GPUs that the kubelet advertises or has allocated; ``None`` if it does not report them."""
    unseen_instances: bool = False
    """Whether the kubelet lists a MIG instance that is on no GPU of the driver's list."""
    advertised_devices: int | None = None
    """Physical GPUs that the kubelet advertises as healthy; ``None`` if it does not report them."""
    allocated_devices: int | None = None
    """Physical GPUs with at least one holder, seen by the driver or not; ``None`` if unknown."""
    replicas: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Last advertised number of replicas by (device UUID, resource)."""

    def is_doubtful(self, uuid: str) -> bool:
        """Return whether a device may have an unknown holder: no holders are known, or an unresolved id may be it."""
        return not self.known or any(one.devices is None or uuid in one.devices for one in self.unresolved)

    def allocation(self, uuid: str) -> AllocationState:
        """Return the allocation state of a device; "unallocated" only if no unresolved id can be the device."""
        if self.holders.get(uuid):
            return AllocationState.ALLOCATED
        return AllocationState.UNKNOWN if self.is_doubtful(uuid) else AllocationState.UNALLOCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Owner that GPU time is charged to. Unknown parts are empty; without metadata, only the namespace is set."""

    namespace: str = ""
    kind: str = ""
    """Kind of the workload: ``Job``, ``Deployment``, ..., or ``Unallocated`` or ``Unattributed``."""
    name: str = ""
    team: str = ""
    cost_labels: str = ""
    """Pairs ``key=value``, sorted by key and joined with commas; only set in the ledger, not in windows."""
    provisional: bool = False
    """Whether it replaces the unknown owner of a pod; never shown, and resolved to the actual owner later."""
    pod_uid: str = ""
    """UID of the pod of a provisional owner, if known; empty for every other owner."""

    @property
    def without_cost_labels(self) -> "Owner":
        """Return the owner without cost labels, as used outside the ledger."""
        return replace(self, cost_labels="") if self.cost_labels else self


PLATFORM_NAMESPACES = frozenset(
    {
        "kube-system",
        "gpu-operator",
        "nvidia-gpu-operator",
        "cw-hpc-verification",
        "kai-resource-reservation",
        "runai-reservation",
    }
)
"""Namespaces of pods that hold GPUs for other pods; alerts and advice on waste leave them out."""

UNALLOCATED = Owner(kind="Unallocated")
"""Owner of GPU time without a holder: free GPUs, MIG instances and replicas, and stranded slices."""
UNATTRIBUTED = Owner(kind="Unattributed")
"""Owner of GPU time with an unknown holder, or used by an unlisted process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    """One pod of this node, with the metadata that the agent reads."""

    namespace: str
    name: str
    uid: str
    """UID in the kubelet and cgroups: for a static pod the hash of its file, not the API object's UID."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations that the agent uses; all of them can be a megabyte."""
    owner_kind: str = ""
    """Kind of the owner reference with ``controller: true``; empty for a pod without a controller."""
    owner_name: str = ""
    owner_api: str = ""
    """API group and version of the controller: ``apps/v1``, ``batch/v1``, ``ray.io/v1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """Owner of a pod, and its alert settings; empty parts are unknown."""

    owner: Owner
    queue: str = ""
    """Queue of Kueue, KAI, Volcano or Run:ai."""
    workload_class: str = ""
    """Class for the rules: ``batch``, ``interactive``, ``inference``, ``reserved``."""
    opt_out_until_seconds: float | None = None
    """Unix time until which waste alerts skip the pod; ``inf`` is permanent, ``None`` means no opt-out."""
    exported: tuple[tuple[str, str], ...] = ()
    """Allowed labels and annotations as (label name, value), sanitised, sorted by name."""
    problems: tuple[str, ...] = ()
    """Snake-case reasons for values of the pod that could not be parsed, such as ``bad_opt_out``."""
    pod_uid: str = field(default="", compare=False)
    """UID of the pod; empty if unknown. Comparisons ignore it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts of a node that select its prices; unknown facts are empty."""

    instance_type: str = ""
    capacity_type: str = ""
    """Capacity type: ``on-demand``, ``spot`` or ``reserved``."""
    region: str = ""
    gpu_product: str = ""
    """Model in the node's labels, for comparison only; the driver's model is authoritative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataStatus:
    """State of the data of the Kubernetes API."""

    known: bool
    """Whether the pods are listed and watched."""
    at_seconds: float | None = None
    """Unix time of the API's last list, event or bookmark."""
    problem: str = ""
    """The missing data and the fix, in one line; empty without a problem."""
    names_other_node: bool = False
    """Whether the problem is a wrong --node-name: an error of configuration, which needs a change by the user."""
    remark: str = ""
    """Fault that does not affect the data, such as a clock difference, in one line; empty without one."""

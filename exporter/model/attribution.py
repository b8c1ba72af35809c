"""Values of attribution: the kubelet's allocations, holders, shares and unresolved ids."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ShareMode(StrEnum):
    """The way in which a holder has its device."""

    EXCLUSIVE = "exclusive"
    MIG = "mig"
    SHARED = "shared"
    """Time-slicing, MPS, or several holders of one device by other means; of a whole GPU or a MIG instance."""


class AllocationState(StrEnum):
    """Allocation of a device; the three states are strictly distinct."""

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
    """One good answer of the kubelet, restricted to containers that have devices or claims."""

    answered_at_seconds: float
    """Unix time."""
    containers: tuple[ContainerAllocation, ...] = ()
    allocatable: tuple[DeviceIds, ...] | None = None
    """``GetAllocatableResources``: healthy devices, allocated or not; ``None`` if the kubelet does not list them."""
    other_containers: tuple[tuple[str, str, str], ...] = ()
    """(namespace, pod, container) of containers without any device; they may still have a fraction of a GPU."""


HolderKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container): identifies a container that holds a device."""


def is_other_pod(before: str | None, after: str | None) -> bool:
    """Return whether the UIDs of pods with one name are of two pods; an unknown UID may be that of the same pod."""
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
    """A device of a container in the kubelet's list without a match on this node, or one that an unlisted pod uses."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str
    reason: str
    """Snake case: ``unknown_uuid``, ``unknown_form``, ``needs_annotation``, ``dra_unresolved``, ..."""
    devices: tuple[str, ...] | None = None
    """UUIDs of the GPUs and MIG instances that it may be, whole or in part; ``None`` if it may be any device."""


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
    """Whether the kubelet knows a MIG instance on none of the GPUs that the driver lists."""
    advertised_devices: int | None = None
    """Physical GPUs that the kubelet advertises as healthy; ``None`` if it does not report them."""
    allocated_devices: int | None = None
    """Physical GPUs with at least one holder, seen by the driver or not; ``None`` if unknown."""
    replicas: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Last advertised number of replicas by (device UUID, resource)."""

    def is_doubtful(self, uuid: str) -> bool:
        """Return whether a device may have an unknown holder: none is known, or an unresolved id may be the device."""
        return not self.known or any(one.devices is None or uuid in one.devices for one in self.unresolved)

    def allocation(self, uuid: str) -> AllocationState:
        """Return the state of a device; "unallocated" only if no unresolved id can be the device."""
        if self.holders.get(uuid):
            return AllocationState.ALLOCATED
        return AllocationState.UNKNOWN if self.is_doubtful(uuid) else AllocationState.UNALLOCATED

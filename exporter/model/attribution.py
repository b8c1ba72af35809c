"""Values of attribution: the kubelet's allocations, holders, shares and what is unresolved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ShareMode(StrEnum):
    """How a holder has its device."""

    EXCLUSIVE = "exclusive"
    MIG = "mig"
    SHARED = "shared"
    """Time-slicing, MPS, or several holders of one device by other means; of a whole GPU or a MIG instance."""


class AllocationState(StrEnum):
    """Three different things that must never be mixed up."""

    ALLOCATED = "allocated"
    UNALLOCATED = "unallocated"
    UNKNOWN = "unknown"
    """The kubelet could not be asked (or not recently enough): neither of the other two may be said."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """One good answer of the kubelet, restricted to containers that have devices or claims."""

    answered_at_seconds: float
    """Unix time."""
    containers: tuple[ContainerAllocation, ...] = ()
    allocatable: tuple[DeviceIds, ...] | None = None
    """``GetAllocatableResources``: healthy devices, allocated or not; ``None`` if the kubelet does not list them."""
    other_containers: tuple[tuple[str, str, str], ...] = ()
    """(namespace, pod, container) of containers without any device; a fraction of a GPU may still be theirs."""


HolderKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container): what must be the same for the same container to hold the same device."""


def is_other_pod(before: str | None, after: str | None) -> bool:
    """Return whether pods of one name are two pods by their UIDs; one with an unknown UID may be the same."""
    return bool(before and after and before != after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A container that holds a device, or replicas of it.

    ``share_ratio`` is its part of the *physical* GPU, 0..1 (design: share): exclusive 1; a MIG instance
    max(compute, memory slices) as parts of the GPU, normalised; a shared device its replicas' part of that.
    """

    namespace: str
    pod: str
    container: str
    """Empty where only the pod is known."""
    device_uuid: str
    """Of the whole GPU or the MIG instance."""
    mode: ShareMode
    resource: str
    source: str
    """How it is known: ``device-plugin``, ``dra``, ``annotation`` (HAMi, volcano-vgpu, KAI), ``job-mapping`` (Slurm) or
    ``process`` (whoever runs there, where nothing allocates)."""
    share_ratio: float
    device_share_ratio: float
    """Its part of the *device* (GPU or MIG instance), 0..1; 1 unless shared."""
    share_estimated: bool = False
    """True where the number of replicas is not known for sure."""
    replicas: int = 1
    pod_uid: str | None = None

    @property
    def key(self) -> HolderKey:
        """Container and device."""
        return self.device_uuid, self.namespace, self.pod, self.container


@dataclass(frozen=True, slots=True, kw_only=True)
class Unresolved:
    """A device that the kubelet lists with a container and that matches none here, or one that a pod uses unlisted."""

    namespace: str
    pod: str
    container: str
    resource: str
    device_id: str
    reason: str
    """Snake case: ``unknown_uuid``, ``unknown_form``, ``needs_annotation``, ``dra_unresolved``, ..."""
    gpu_uuids: tuple[str, ...] | None = None
    """Physical GPUs of which it may be one or a part; ``None`` where it may be any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Holders of every device at one instant.

    ``known`` is False while the kubelet could not be asked for longer than the expiry: then ``holders`` is
    empty and every device's allocation is unknown. Devices are keyed by UUID (GPU or MIG instance).
    """

    known: bool
    answered_at_seconds: float | None = None
    holders: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    unresolved: tuple[Unresolved, ...] = ()
    expected_devices: int | None = None
    """Physical GPUs that the kubelet advertises or has allocated; ``None`` where it does not report them."""
    unseen_instances: bool = False
    """Whether the kubelet knows a MIG instance that is on no GPU that the driver lists."""
    advertised_devices: int | None = None
    """Physical GPUs that the kubelet advertises as healthy; ``None`` where it does not report them."""
    allocated_devices: int | None = None
    """Physical GPUs of which somebody holds something, seen by the driver or not; ``None`` where not known."""
    replicas: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Into how many replicas devices are divided, by (device UUID, resource), as the kubelet advertised it last."""

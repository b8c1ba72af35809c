"""What the Kubernetes API says that the kubelet does not: one value, the same object while nothing changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.model import PodMetadata

DEFAULT_RESERVATION_NAMESPACES = ("kai-resource-reservation", "runai-reservation")


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDevice:
    """A device of a ResourceSlice of this node; what the slice does not say is empty or ``None``."""

    kind: str = ""
    """``gpu``, ``mig`` or ``vfio``."""
    uuid: str = ""
    """Empty for a MIG device that is made when it is claimed."""
    parent_uuid: str = ""
    """Of a MIG device."""
    profile: str = ""
    """Of a MIG device: ``1g.24gb``."""
    memory_bytes: int | None = None
    """Capacity, of which a share may consume a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """One result of a claim's allocation."""

    driver: str
    pool: str
    device: str
    share_id: str | None = None
    admin_access: bool = False
    """Monitoring, not holding."""
    consumed_memory_bytes: int | None = None
    """Of consumable capacity; ``None`` where the claim has the device whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything of the API that the join looks at."""

    pods: Mapping[tuple[str, str], PodMetadata] | None = None
    """Pods of this node that have not finished, by (namespace, name); ``None`` while they are not known."""
    is_followed: bool = True
    """Whether ``pods`` is of now: without it a pod that the kubelet lists may be missing here."""
    ended: frozenset[tuple[str, str]] = frozenset()
    """Pods that have finished or are gone for the API, though a kubelet up to 1.33 may still list them."""
    claims: Mapping[str, tuple[AllocatedDevice, ...]] = field(default_factory=dict)
    """Results of allocated claims by the claim's UID."""
    unreadable_claims: frozenset[str] = frozenset()
    """UIDs of claims that cannot be read (no right, gone): judged by the kubelet's word alone."""
    reads_claims: bool = False
    """Whether a claim that is in neither of the two will still be read."""
    devices: Mapping[tuple[str, str], SliceDevice] | None = None
    """By (pool, device), of the newest complete generation of each pool; ``None`` while no slice is known."""
    own_pod: tuple[str, str] | None = None
    """(namespace, name) of this agent's pod, which looks at all devices and holds none."""
    reservation_namespaces: tuple[str, ...] = DEFAULT_RESERVATION_NAMESPACES
    """Where KAI and Run:ai keep pods that hold a GPU on behalf of those who have fractions of it."""


NO_EVIDENCE = Evidence()
"""Without the Kubernetes API."""

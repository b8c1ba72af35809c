"""Defines the data of the Kubernetes API that completes the kubelet's answer, and decides which pods have ended."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporter.model.attribution import PodMetadata

PodName = tuple[str, str]
"""Namespace and name."""
DEFAULT_RESERVATION_NAMESPACES = ("kai-resource-reservation", "runai-reservation")


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceDevice:
    """A device of a ResourceSlice of this node; attributes missing in the slice are empty or ``None``."""

    kind: str = ""
    """Kind of the device: ``gpu``, ``mig`` or ``vfio``."""
    uuid: str = ""
    """UUID; empty for a MIG device that is created when it is claimed."""
    parent_uuid: str = ""
    """UUID of the GPU of a MIG device."""
    profile: str = ""
    """Profile of a MIG device: ``1g.24gb``."""
    memory_bytes: int | None = None
    """Memory capacity in bytes; a share may consume part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedDevice:
    """One device in the allocation result of a claim."""

    driver: str
    pool: str
    device: str
    share_id: str | None = None
    admin_access: bool = False
    """Whether the claim only monitors the device, without holding it."""
    consumed_memory_bytes: int | None = None
    """Consumed memory capacity in bytes; ``None`` if the claim has the whole device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Data of the API that the join reads."""

    pods: Mapping[PodName, PodMetadata] | None = None
    """Pods of this node that have not finished, by (namespace, name); ``None`` while unknown."""
    is_followed: bool = True
    """Whether ``pods`` is up to date; if not, a pod that the kubelet lists may be missing."""
    ended: frozenset[PodName] = frozenset()
    """Pods that have finished or left the API; a kubelet up to 1.33 may still list them."""
    claims: Mapping[str, tuple[AllocatedDevice, ...]] = field(default_factory=dict)
    """Results of allocated claims by UID of the claim."""
    unreadable_claims: frozenset[str] = frozenset()
    """UIDs of claims that cannot be read (no permission, deleted); only the kubelet's answer counts for them."""
    reads_claims: bool = False
    """Whether claims that are neither read nor unreadable will still be read."""
    devices: Mapping[tuple[str, str], SliceDevice] | None = None
    """Devices by (pool, device), of the newest complete generation of each pool; ``None`` without a known slice."""
    own_pod: PodName | None = None
    """Namespace and name of this agent's pod, which can access all devices and holds none; ``None`` if unknown."""
    reservation_namespaces: tuple[str, ...] = DEFAULT_RESERVATION_NAMESPACES
    """Namespaces of the pods with which KAI and Run:ai reserve GPUs for pods with fractions of them."""

    def pod(self, namespace: str, name: str) -> PodMetadata | None:
        """Return a pod of this node; ``None`` if unknown."""
        return self.pods.get((namespace, name)) if self.pods is not None else None

    def awaits_claim(self, uid: str | None) -> bool:
        """Return whether the result of a claim will still be read."""
        return self.reads_claims and uid is not None and uid not in self.claims and uid not in self.unreadable_claims

    def holds_nothing(self, name: PodName) -> bool:
        """Return whether a listed pod holds no device, because it has ended or is the agent's own pod."""
        return name in self.ended or name == self.own_pod


NO_EVIDENCE = Evidence()
"""Evidence of an agent without the Kubernetes API."""


DEPARTED_SECONDS = 600.0
DEPARTED_LIMIT = 1024


class Endings:
    """Compares the kubelet's pods with the API's, to find ended pods.

    A pod has left when the API no longer has it: after a DELETED event, or in a complete list without it. In addition,
    the kubelet must have listed its name without a gap since before that. A name that the API never had proves nothing:
    a static pod without a mirror has no object, and the kubelet can list a new pod before the watch reports it.
    """

    def __init__(self) -> None:
        self._listed: frozenset[PodName] = frozenset()
        self._departed: dict[PodName, tuple[PodMetadata, float]] = {}
        """Pods that left the API in the last ten minutes, with the instant; oldest first."""
        self.pods: Mapping[PodName, PodMetadata] = {}
        """Pods of the API; the same object while they do not change."""
        self.left: frozenset[PodName] = frozenset()
        """Pods that the kubelet lists and that have left the API."""

    @property
    def strangers(self) -> frozenset[PodName]:
        """Pods that the kubelet lists, and that the API has not had since the kubelet listed them."""
        return self._listed - self.pods.keys() - self.left

    def note(self, pods: Iterable[PodName]) -> None:
        """Store the pods with devices of a new answer of the kubelet."""
        listed = frozenset(pods)
        self.left &= self._listed & listed  # a name that returns after a gap is another pod
        self._listed = listed

    def update(self, pods: Mapping[PodName, PodMetadata], steady: float) -> None:
        """Store the API's pods.

        Args:
            pods: The complete list of pods.
            steady: Seconds of a monotonic clock.
        """
        if pods is self.pods or pods == self.pods:
            return
        gone = self.pods.keys() - pods.keys()
        self.left = ((self.left | gone) & self._listed) - pods.keys()
        departed = {**self._departed, **{name: (self.pods[name], steady) for name in gone}}
        recent = [
            (name, one) for name, one in departed.items() if name not in pods and steady - one[1] < DEPARTED_SECONDS
        ]
        self._departed = dict(recent[-DEPARTED_LIMIT:])
        self.pods = pods

    def find(self, name: PodName) -> PodMetadata | None:
        """Return a pod that the API has, or had in the last ten minutes; its last time may not be charged yet."""
        departed = self._departed.get(name)
        return self.pods.get(name) or (departed[0] if departed else None)

"""Collects what the Kubernetes API adds to the kubelet's answer, and decides which pods have ended."""

from collections.abc import Iterable, Mapping
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


DEPARTED_SECONDS = 600.0
DEPARTED_LIMIT = 1024

PodName = tuple[str, str]


class Endings:
    """Compares the kubelet's pods with the API's.

    A pod has left when the API had it, lost it (a DELETED event, or a complete list without it), and the kubelet has
    listed its name without a gap since before that. A name that the API never had proves nothing: a static pod without
    a mirror has no object, and a new pod can reach the kubelet before it reaches the watch.
    """

    def __init__(self) -> None:
        self._listed: frozenset[PodName] = frozenset()
        self._departed: dict[PodName, tuple[PodMetadata, float]] = {}
        self.pods: Mapping[PodName, PodMetadata] = {}
        """As the API has them, the same object while nothing changes."""
        self.left: frozenset[PodName] = frozenset()
        """Pods that the kubelet lists and that have left the API."""

    @property
    def strangers(self) -> frozenset[PodName]:
        """Pods that the kubelet lists and that the API has not had since."""
        return self._listed - self.pods.keys() - self.left

    def note(self, pods: Iterable[PodName]) -> None:
        """Take note of all pods with devices of a new answer of the kubelet."""
        listed = frozenset(pods)
        self.left &= self._listed & listed  # a name that comes back after a gap is another pod
        self._listed = listed

    def update(self, pods: Mapping[PodName, PodMetadata], steady: float) -> None:
        """Take note of the API's pods.

        Args:
            pods: All of them, complete; an incomplete list is not to be given.
            steady: Seconds of a monotonic clock.
        """
        if pods is self.pods or pods == self.pods:
            return
        gone = self.pods.keys() - pods.keys()
        self.left = ((self.left | gone) & self._listed) - pods.keys()
        self._depart(pods, steady)
        self.pods = pods

    def find(self, name: PodName) -> PodMetadata | None:
        """Return a pod that the API has, or had within ten minutes: its time is still being entered."""
        found = self.pods.get(name)
        if found is None and name in self._departed:
            found, _ = self._departed[name]
        return found

    def _depart(self, pods: Mapping[PodName, PodMetadata], steady: float) -> None:
        """Remember what is in the API no more, and forget what left it long ago."""
        kept = {
            name: gone
            for name, gone in self._departed.items()
            if name not in pods and steady - gone[1] < DEPARTED_SECONDS
        }
        kept |= {name: (pod, steady) for name, pod in self.pods.items() if name not in pods}
        while len(kept) > DEPARTED_LIMIT:
            del kept[next(iter(kept))]
        self._departed = kept

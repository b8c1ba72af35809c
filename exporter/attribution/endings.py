"""Which pods have left the Kubernetes API while the kubelet lists them: a pod ends by evidence, never by absence."""

from collections.abc import Iterable, Mapping

from exporter.model import PodMetadata

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

"""Into how many replicas each device is divided: kept from answer to answer, and across restarts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.attribution.shares import ReplicaKey

LARGEST = 1_000_000_000
"""Numbers of replicas have at most nine digits."""


@dataclass(slots=True)
class Replicas:
    """What the kubelet advertised last of each shared device that is there or held."""

    counts: Mapping[ReplicaKey, int] = field(default_factory=dict)
    """By (device UUID, resource)."""

    def dump(self) -> list[list[str | int]]:
        """Return what JSON can keep: lists of device UUID, resource and count."""
        return [[uuid, resource, count] for (uuid, resource), count in self.counts.items()]


def counts_of(kept: object) -> dict[ReplicaKey, int]:
    """Read what ``dump`` wrote.

    Raises:
        TypeError, ValueError: It is something else.
    """
    if not isinstance(kept, list):
        raise TypeError(f"no list of replicas: {kept!r:.100}")
    counts: dict[ReplicaKey, int] = {}
    for uuid, resource, count in kept:
        if not isinstance(uuid, str) or not isinstance(resource, str) or type(count) is not int:
            raise TypeError(f"no replicas of a device: {uuid!r:.100}, {resource!r:.100}, {count!r:.100}")
        if not 1 <= count <= LARGEST:
            raise ValueError(f"no number of replicas: {count!r:.100}")
        counts[uuid, resource] = count
    return counts

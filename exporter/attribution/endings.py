"""Which pods the API knows, which it knew a moment ago, and which the kubelet lists though they have ended."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from exporter.model import PodMetadata

MISSING_SECONDS = 30.0
"""A new pod may reach the kubelet before it reaches our watch."""
DEPARTED_SECONDS = 600.0
DEPARTED_LIMIT = 1024

PodName = tuple[str, str]


class Followed(Protocol):
    """Pods of this node as the API has them: a ``ListWatch``."""

    @property
    def items(self) -> Mapping[PodName, PodMetadata]:
        """Replaced, not mutated, when something changes."""
        ...

    @property
    def removed(self) -> Mapping[PodName, float]:
        """Unix time of what went away lately and has not come back."""
        ...

    @property
    def known(self) -> bool:
        """Whether they have been listed and are followed."""
        ...

    @property
    def complete(self) -> bool:
        """Whether what is not among them is not there, as nothing was skipped."""
        ...

    @property
    def at_seconds(self) -> float | None:
        """Unix time of the last sign of life."""
        ...

    @property
    def problem(self) -> str:
        """Empty while all is well."""
        ...


@dataclass(slots=True)
class _Listed:
    """A pod that the kubelet lists."""

    since: float
    """Unix time of the first answer without a gap that has it."""
    since_steady: float
    missing_since: float | None = None
    """Steady time since which the API is well and does not have it."""


class Endings:
    """Compares the kubelet's pods with the API's."""

    def __init__(self) -> None:
        self._listed: dict[PodName, _Listed] = {}
        self._alive_at: float | None = None
        self._alive_steady = 0.0
        self._departed: dict[PodName, tuple[PodMetadata, float]] = {}
        self.pods: Mapping[PodName, PodMetadata] = {}
        """As the API has them, the same object while nothing changes."""
        self.ended: frozenset[PodName] = frozenset()
        """Listed by the kubelet and finished or gone for the API; once said, it stands until one of them changes."""

    def note(self, pods: Iterable[PodName], now: float, steady: float) -> None:
        """Take note of all pods of a new answer of the kubelet.

        Args:
            pods: Names of pods with devices.
            now: Unix time.
            steady: Seconds of a time that nobody sets.
        """
        self._listed = {name: self._listed.get(name) or _Listed(since=now, since_steady=steady) for name in pods}
        self.ended = self.ended.intersection(self._listed)

    def update(self, followed: Followed, steady: float) -> None:
        """Look at the API's pods again.

        Args:
            followed: As they are now.
            steady: As for ``note``.
        """
        if followed.at_seconds != self._alive_at:
            self._alive_at, self._alive_steady = followed.at_seconds, steady
        if followed.items is not self.pods and followed.items != self.pods:
            self._depart(followed.items, steady)
            self.pods = followed.items
        is_well = followed.known and not followed.problem
        ended = frozenset(
            name for name, listed in self._listed.items() if self._has_ended(name, listed, followed, is_well, steady)
        )
        if ended != self.ended:
            self.ended = ended

    def find(self, name: PodName) -> PodMetadata | None:
        """Return a pod that the API has, or had within ten minutes: its time is still being entered."""
        found = self.pods.get(name)
        if found is None and name in self._departed:
            found, _ = self._departed[name]
        return found

    def _has_ended(self, name: PodName, listed: _Listed, followed: Followed, is_well: bool, steady: float) -> bool:  # noqa: FBT001
        if name in self.pods:
            listed.missing_since = None
            return False
        if name in self.ended:
            return True
        if not is_well:  # a watch that has lost the server proves nothing
            listed.missing_since = None
            return False
        if followed.removed.get(name, listed.since - 1) >= listed.since:
            return True
        if listed.missing_since is None:
            listed.missing_since = steady
        if not followed.complete:  # it may be what was skipped
            return False
        return self._alive_steady >= listed.since_steady and steady - listed.missing_since >= MISSING_SECONDS

    def _depart(self, items: Mapping[PodName, PodMetadata], steady: float) -> None:
        """Remember what is in the API no more, and forget what left it long ago."""
        kept = {
            name: gone
            for name, gone in self._departed.items()
            if name not in items and steady - gone[1] < DEPARTED_SECONDS
        }
        kept |= {name: (pod, steady) for name, pod in self.pods.items() if name not in items}
        while len(kept) > DEPARTED_LIMIT:
            del kept[next(iter(kept))]
        self._departed = kept

"""What a simulated API server keeps: objects with resource versions, and the changes that watches are told of."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
Key = tuple[str, str, str]
"""Resource, namespace, name."""
HISTORY_LENGTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiObjects:
    """Everything the API has, as full JSON objects; ``metadata.resourceVersion`` is the server's to set."""

    pods: tuple[Json, ...] = ()
    namespaces: tuple[Json, ...] = ()
    node: Json | None = None
    resource_slices: tuple[Json, ...] = ()
    resource_claims: tuple[Json, ...] = ()
    dra_version: str = ""
    """``v1``, ``v1beta2`` or ``v1beta1``; empty: a cluster without DRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One object before and after; ``None`` where there was or is none."""

    version: int
    resource: str
    before: Json | None
    after: Json | None


class Store:
    """Objects by key, and the last changes, oldest first."""

    def __init__(self) -> None:
        self.version = 1000
        self.oldest = 1000
        """The oldest version from which a watch can start."""
        self._seen: ApiObjects | None = None
        self._objects: dict[Key, tuple[Json, Json]] = {}
        self._changes: deque[Change] = deque(maxlen=HISTORY_LENGTH)

    def follow(self, objects: ApiObjects) -> bool:
        """Take what there is now; say whether anything changed."""
        if objects is self._seen:
            return False
        self._seen, before = objects, self.version
        wanted = {_key(resource, each): each for resource, each in _all(objects)}
        for key in [key for key in self._objects if key not in wanted]:
            self._remove(key)
        for key, given in wanted.items():
            known = self._objects.get(key)
            if known is not None and known[0] != given:
                if _uid(known[0]) != _uid(given):
                    self._remove(key)  # another object under the same name
                self._put(key, given)
            elif known is None:
                self._put(key, given)
        return self.version != before

    def get(self, resource: str, namespace: str, name: str) -> Json | None:
        """Return one object."""
        known = self._objects.get((resource, namespace, name))
        return known[1] if known else None

    def list(self, resource: str) -> Iterator[Json]:
        """Yield all objects of a resource."""
        return (shown for key, (_, shown) in self._objects.items() if key[0] == resource)

    def changes(self, resource: str, after: int) -> Iterator[Change]:
        """Yield what happened to a resource later than a version."""
        return (change for change in self._changes if change.version > after and change.resource == resource)

    def forget(self) -> None:
        """Lose all history, as a server that was started again: watches can start from now on only."""
        self._changes.clear()
        self.oldest = self.version

    def _put(self, key: Key, given: Json) -> None:
        known = self._objects.get(key)
        self.version += 1
        shown = {**given, "metadata": {**given["metadata"], "resourceVersion": str(self.version)}}
        self._objects[key] = (given, shown)
        self._tell(key[0], known[1] if known else None, shown)

    def _remove(self, key: Key) -> None:
        shown = self._objects.pop(key)[1]
        self.version += 1
        self._tell(key[0], {**shown, "metadata": {**shown["metadata"], "resourceVersion": str(self.version)}}, None)

    def _tell(self, resource: str, before: Json | None, after: Json | None) -> None:
        if len(self._changes) == HISTORY_LENGTH:
            self.oldest = self._changes[0].version
        self._changes.append(Change(version=self.version, resource=resource, before=before, after=after))


def _all(objects: ApiObjects) -> Iterator[tuple[str, Json]]:
    kinds: tuple[tuple[str, Iterable[Json]], ...] = (
        ("pods", objects.pods),
        ("namespaces", objects.namespaces),
        ("nodes", (objects.node,) if objects.node is not None else ()),
        ("resourceslices", objects.resource_slices),
        ("resourceclaims", objects.resource_claims),
    )
    return ((resource, each) for resource, every in kinds for each in every)


def _key(resource: str, given: Json) -> Key:
    metadata = given["metadata"]
    return resource, metadata.get("namespace", ""), metadata["name"]


def _uid(given: Json) -> object:
    return given["metadata"].get("uid")

"""Objects of a simulated API server: pods, namespaces, node, slices and claims as JSON, with versions and changes."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpu_simulator import identities
from gpu_simulator.truth import Fault, NodeTruth, PodTruth

Json = Mapping[str, Any]
ObjectKey = tuple[str, str, str]
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
class ObjectChange:
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
        self._objects: dict[ObjectKey, tuple[Json, Json]] = {}
        self._changes: deque[ObjectChange] = deque(maxlen=HISTORY_LENGTH)

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

    def changes(self, resource: str, after: int) -> Iterator[ObjectChange]:
        """Yield what happened to a resource later than a version."""
        return (change for change in self._changes if change.version > after and change.resource == resource)

    def forget(self) -> None:
        """Lose all history, as a server that was started again: watches can start from now on only."""
        self._changes.clear()
        self.oldest = self.version

    def _put(self, key: ObjectKey, given: Json) -> None:
        known = self._objects.get(key)
        self.version += 1
        shown = {**given, "metadata": {**given["metadata"], "resourceVersion": str(self.version)}}
        self._objects[key] = (given, shown)
        self._tell(key[0], known[1] if known else None, shown)

    def _remove(self, key: ObjectKey) -> None:
        shown = self._objects.pop(key)[1]
        self.version += 1
        self._tell(key[0], {**shown, "metadata": {**shown["metadata"], "resourceVersion": str(self.version)}}, None)

    def _tell(self, resource: str, before: Json | None, after: Json | None) -> None:
        if len(self._changes) == HISTORY_LENGTH:
            self.oldest = self._changes[0].version
        self._changes.append(ObjectChange(version=self.version, resource=resource, before=before, after=after))


def _all(objects: ApiObjects) -> Iterator[tuple[str, Json]]:
    kinds: tuple[tuple[str, Iterable[Json]], ...] = (
        ("pods", objects.pods),
        ("namespaces", objects.namespaces),
        ("nodes", (objects.node,) if objects.node is not None else ()),
        ("resourceslices", objects.resource_slices),
        ("resourceclaims", objects.resource_claims),
    )
    return ((resource, each) for resource, every in kinds for each in every)


def _key(resource: str, given: Json) -> ObjectKey:
    metadata = given["metadata"]
    return resource, metadata.get("namespace", ""), metadata["name"]


def _uid(given: Json) -> object:
    return given["metadata"].get("uid")


OTHER_NAME = ".example.internal"
"""What the API adds to the node's name where the fault says that it has another one."""
_CREATED = "2026-01-05T08:00:00Z"
_Texts = tuple[tuple[str, str], ...]


def objects_of(truth: NodeTruth) -> ApiObjects:
    """Everything the API has at this instant; objects that did not change are the same ones as before."""
    node = truth.node + OTHER_NAME if Fault.API_OTHER_NODE_NAME in truth.faults else truth.node
    upgraded = Fault.API_UPGRADED in truth.faults and bool(truth.cluster.dra_version)
    return ApiObjects(
        pods=tuple(_pod(node, pod) for pod in truth.pods),
        namespaces=tuple(_namespaces(truth)),
        node=_node(node, _texts(truth.cluster.node_labels)),
        resource_slices=truth.cluster.slices,
        resource_claims=truth.cluster.claims,
        dra_version="v1" if upgraded else truth.cluster.dra_version,
    )


def _texts(texts: Mapping[str, str]) -> _Texts:
    return tuple(texts.items())


def _namespaces(truth: NodeTruth) -> Iterator[Json]:
    """Those that the scenario describes, and those that it only has pods in."""
    names = dict.fromkeys([*truth.cluster.namespaces, *(pod.namespace for pod in truth.pods)])
    for name in names:
        yield _namespace(name, _texts(truth.cluster.namespaces.get(name, {})))


@lru_cache(maxsize=256)  # made ten times a second
def _namespace(name: str, labels: _Texts) -> Json:
    metadata = {
        "name": name,
        "uid": identities.stable_uuid("namespace", name),
        "creationTimestamp": _CREATED,
        "labels": {"kubernetes.io/metadata.name": name, **dict(labels)},
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata, "status": {"phase": "Active"}}


@lru_cache(maxsize=16)  # as above
def _node(name: str, labels: _Texts) -> Json:
    metadata = {
        "name": name,
        "uid": identities.stable_uuid("node", name),
        "creationTimestamp": _CREATED,
        "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **dict(labels)},
    }
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": {}}


def _pod(node: str, pod: PodTruth) -> Json:
    return _pod_json(
        node,
        (pod.namespace, pod.name, pod.uid, pod.phase),
        _texts(pod.labels),
        _texts(pod.annotations),
        (pod.owner_kind, pod.owner_name, pod.owner_api),
        pod.containers,
    )


@lru_cache(maxsize=2048)  # as above
def _pod_json(
    node: str,
    identity: tuple[str, str, str, str],
    labels: _Texts,
    annotations: _Texts,
    owner: tuple[str, str, str],
    containers: tuple[str, ...],
) -> Json:
    namespace, name, uid, phase = identity
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "creationTimestamp": _CREATED,
        "labels": dict(labels),
        "annotations": dict(annotations),
        "managedFields": _managed_fields(labels, containers),
    }
    kind, owner_name, api = owner
    if kind:
        reference = {"apiVersion": api, "kind": kind, "name": owner_name, "controller": True}
        reference["uid"] = identities.stable_uuid("owner", namespace, kind, owner_name)
        metadata["ownerReferences"] = [reference | {"blockOwnerDeletion": True}]
        if kind in ("ReplicaSet", "StatefulSet", "DaemonSet", "Job"):
            metadata["generateName"] = f"{owner_name}-"
    image = "registry.invalid/simulated:1"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "nodeName": node,
            "restartPolicy": "Always",
            "containers": [{"name": one, "image": image, "resources": {}} for one in containers],
        },
        "status": {
            "phase": phase,
            "containerStatuses": [
                {"name": one, "image": image, "containerID": f"containerd://{identities.container_id(uid, one)}"}
                for one in containers
            ],
        },
    }


def _managed_fields(labels: _Texts, containers: Iterable[str]) -> list[Json]:
    """Who set what: most of a real object's metadata, and nothing that anybody here may read."""
    of_labels: Json = {"f:labels": {".": {}, **{f"f:{key}": {} for key, _ in labels}}, "f:ownerReferences": {".": {}}}
    fields = ("f:image", "f:imagePullPolicy", "f:name", "f:resources", "f:terminationMessagePath", "f:volumeMounts")
    of_spec: Json = {f'k:{{"name":"{one}"}}': {".": {}, **{field: {} for field in fields}} for one in containers}
    spec = {"f:containers": of_spec, "f:enableServiceLinks": {}, "f:restartPolicy": {}, "f:tolerations": {}}
    conditions = ("ContainersReady", "Initialized", "PodReadyToStartContainers", "Ready", "PodScheduled")
    of_conditions: Json = {
        f'k:{{"type":"{one}"}}': {".": {}, "f:lastProbeTime": {}, "f:lastTransitionTime": {}, "f:status": {}}
        for one in conditions
    }
    status = {"f:conditions": of_conditions, "f:containerStatuses": {}, "f:phase": {}, "f:podIP": {}, "f:startTime": {}}
    common = {"apiVersion": "v1", "fieldsType": "FieldsV1", "operation": "Update", "time": _CREATED}
    return [
        common | {"manager": "kube-controller-manager", "fieldsV1": {"f:metadata": of_labels, "f:spec": spec}},
        common | {"manager": "kubelet", "subresource": "status", "fieldsV1": {"f:status": status}},
    ]

"""The objects that the API server of a simulated node has: pods, namespaces, the node, slices and claims as JSON."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from gpu_simulator import identities
from gpu_simulator.api_store import ApiObjects
from gpu_simulator.truth import Fault, NodeTruth, PodTruth

Json = dict[str, Any]
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
    metadata: Json = {
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

"""Pods, node and namespaces as a real API server has them, ``managedFields`` and all: how large answers are follows."""

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]

NODE = "bench"
_STARTED = "2026-11-20T08:00:00Z"
# What the fields' managers are said to have written: most of the metadata of a real pod.
_SPEC_FIELDS: Mapping[str, tuple[str, ...]] = {
    "f:metadata": ("f:annotations", "f:generateName", "f:labels", "f:ownerReferences"),
    "f:spec": (
        "f:affinity",
        "f:enableServiceLinks",
        "f:nodeSelector",
        "f:priorityClassName",
        "f:restartPolicy",
        "f:runtimeClassName",
        "f:schedulerName",
        "f:securityContext",
        "f:terminationGracePeriodSeconds",
        "f:tolerations",
        "f:volumes",
    ),
}
_CONTAINER_FIELDS = (
    "f:args",
    "f:command",
    "f:image",
    "f:imagePullPolicy",
    "f:name",
    "f:ports",
    "f:resources",
    "f:terminationMessagePath",
    "f:terminationMessagePolicy",
    "f:volumeMounts",
)
_CONDITIONS = (
    "PodReadyToStartContainers",
    "Initialized",
    "Ready",
    "ContainersReady",
    "PodScheduled",
)


def pod(number: int, *, namespace: str = "", name: str = "", node: str = NODE) -> Json:
    """A pod of a training job, whole: about 5.5 kB of metadata and as much of spec and status."""
    job = f"training-job-{number:04d}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name or f"{job}-worker-0",
            "generateName": f"{job}-worker-",
            "namespace": namespace or f"team-{number % 7}",
            "uid": uid(number),
            "resourceVersion": "1",
            "creationTimestamp": _STARTED,
            "labels": _labels(job),
            "annotations": _annotations(job),
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": job,
                    "uid": uid(number + 100_000),
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
            "managedFields": [_managed("kube-controller-manager", _spec_fields()), _managed("kubelet", _status())],
        },
        "spec": _spec(job, node),
        "status": _pod_status(number),
    }


def uid(number: int) -> str:
    """UID of an object."""
    return f"00000000-0000-4000-8000-{number:012d}"


def namespace(number: int) -> Json:
    """A namespace that names its team."""
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": f"team-{number}",
            "uid": uid(200_000 + number),
            "resourceVersion": "1",
            "labels": {"kubernetes.io/metadata.name": f"team-{number}", "team": f"research-{number}"},
        },
    }


def node(name: str = NODE) -> Json:
    """A GPU node's object; the kubelet names the 50 largest images on it."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": uid(300_000),
            "resourceVersion": "1",
            "labels": {
                "kubernetes.io/hostname": name,
                "node.kubernetes.io/instance-type": "p5.48xlarge",
                "topology.kubernetes.io/region": "us-east-1",
                "topology.kubernetes.io/zone": "us-east-1a",
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
                "nvidia.com/gpu.count": "8",
                "karpenter.sh/capacity-type": "spot",
            },
        },
        "status": {
            "images": [
                {
                    "names": [
                        f"registry.example/research/image-{n}@sha256:{n:064x}",
                        f"registry.example/research/image-{n}:2026.11.{n}",
                    ],
                    "sizeBytes": 10_000_000_000 + n,
                }
                for n in range(50)
            ]
        },
    }


def _labels(job: str) -> Json:
    return {
        "app.kubernetes.io/name": "trainer",
        "app.kubernetes.io/part-of": "research-platform",
        "batch.kubernetes.io/controller-uid": uid(1),
        "batch.kubernetes.io/job-name": job,
        "batch.kubernetes.io/job-completion-index": "0",
        "kueue.x-k8s.io/local-queue-name": "research",
        "kueue.x-k8s.io/cluster-queue-name": "gpu-h100",
        "team": "research",
    }


def _annotations(job: str) -> Json:
    return {
        "batch.kubernetes.io/job-completion-index": "0",
        "cni.projectcalico.org/podIP": "10.0.0.1/32",
        "kueue.x-k8s.io/workload": f"job-{job}",
        "prometheus.io/scrape": "true",
    }


def _managed(manager: str, fields: Json) -> Json:
    return {
        "manager": manager,
        "operation": "Update",
        "apiVersion": "v1",
        "time": _STARTED,
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
    }


def _spec_fields() -> Json:
    fields: Json = {part: {name: {} for name in names} for part, names in _SPEC_FIELDS.items()}
    fields["f:metadata"]["f:labels"] = {f"f:{key}": {} for key in _labels("")}
    fields["f:metadata"]["f:annotations"] = {f"f:{key}": {} for key in _annotations("")}
    containers = {f'k:{{"name":"{name}"}}': _each(_CONTAINER_FIELDS) for name in ("main", "sidecar")}
    for container in containers.values():
        container["f:resources"] = {".": {}, "f:limits": {".": {}, "f:memory": {}, "f:nvidia.com/gpu": {}}}
        container["f:env"] = {f'k:{{"name":"SETTING_{n}"}}': {".": {}, "f:name": {}, "f:value": {}} for n in range(15)}
    return {**fields, "f:spec": {**fields["f:spec"], "f:containers": containers}}


def _each(names: Iterable[str]) -> Json:
    return {name: {} for name in names}


def _status() -> Json:
    names = ("f:lastProbeTime", "f:lastTransitionTime", "f:message", "f:observedGeneration", "f:reason", "f:status")
    conditions: Json = {f'k:{{"type":"{kind}"}}': _each((".", *names, "f:type")) for kind in _CONDITIONS}
    others = ("f:containerStatuses", "f:hostIP", "f:hostIPs", "f:phase", "f:podIP", "f:podIPs", "f:startTime")
    return {"f:status": {"f:conditions": conditions, **_each(others)}}


def _spec(job: str, node: str) -> Json:
    return {
        "nodeName": node,
        "restartPolicy": "Never",
        "schedulerName": "default-scheduler",
        "priorityClassName": "batch",
        "containers": [_container(name, job) for name in ("main", "sidecar")],
        "tolerations": [
            {"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in ("nvidia.com/gpu", "pool")
        ],
        "volumes": [{"name": name, "emptyDir": {"sizeLimit": "64Gi"}} for name in ("scratch", "shm", "cache")],
    }


def _container(name: str, job: str) -> Json:
    return {
        "name": name,
        "image": f"registry.example/research/{name}@sha256:{'0' * 64}",
        "command": ["torchrun", "--nproc-per-node=8", "train.py"],
        "args": [f"--job={job}", "--data=/data", "--checkpoints=/scratch/checkpoints"],
        "env": [{"name": f"SETTING_{n}", "value": f"some value of setting {n}"} for n in range(15)],
        "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "512Gi"}, "requests": {"cpu": "32"}},
        "volumeMounts": [{"name": one, "mountPath": f"/{one}"} for one in ("scratch", "shm", "cache")],
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent",
    }


def _pod_status(number: int) -> Json:
    conditions = [
        {"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": _STARTED} for kind in _CONDITIONS
    ]
    containers = [
        {
            "name": name,
            "containerID": f"containerd://{number:064x}",
            "image": f"registry.example/research/{name}",
            "imageID": f"registry.example/research/{name}@sha256:{'0' * 64}",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "lastState": {},
            "state": {"running": {"startedAt": _STARTED}},
        }
        for name in ("main", "sidecar")
    ]
    return {
        "phase": "Running",
        "conditions": conditions,
        "containerStatuses": containers,
        "hostIP": "10.1.0.1",
        "podIP": "10.0.0.1",
        "startTime": _STARTED,
    }

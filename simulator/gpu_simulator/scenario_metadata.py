"""What a scenario file says for the Kubernetes API: labels, annotations, owners, namespaces and the node's labels."""

from collections.abc import Mapping

from gpu_simulator.plan import OwnerPlan
from gpu_simulator.scenario_keys import Section, close_match

OWNER_APIS: Mapping[str, str] = {
    "ReplicaSet": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "Job": "batch/v1",
    "Node": "v1",
    "PyTorchJob": "kubeflow.org/v1",
    "MPIJob": "kubeflow.org/v1",
    "RayCluster": "ray.io/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "Workflow": "argoproj.io/v1alpha1",
    "SparkApplication": "sparkoperator.k8s.io/v1beta2",
    "VolcanoJob": "batch.volcano.sh/v1alpha1",
}
"""API of an owner that a file gives no ``api`` for."""


def read_texts(section: Section, key: str) -> dict[str, str]:
    """A mapping of names to texts: labels or annotations; empty ones are allowed, as Kubernetes does."""
    part = section.section(key)
    if part is None:
        return {}
    texts: dict[str, str] = {}
    for name in part.keys():  # noqa: SIM118 - a section is no mapping
        item = part.item(name)
        if item is None or not isinstance(item.value, str):
            told = "empty" if item is None else repr(item.value)
            part.problem(name, f"is {told}; allowed: a text (in quotes if it looks like something else)")
        else:
            texts[name] = item.value
    return texts


def read_owner(section: Section) -> OwnerPlan | None:
    """``owner``: kind and name of a pod's controller, and its API where that does not follow from the kind."""
    part = section.section("owner")
    if part is None:
        return None
    kind, name = part.text("kind"), part.text("name")
    default = OWNER_APIS.get(kind)
    if kind and default is None and not part.has("api"):
        hint = close_match(kind, OWNER_APIS)
        part.problem("api", f"is missing, and {kind!r} has no usual one{hint}; allowed: a text such as apps/v1")
        default = ""
    api = part.text("api", default)
    part.finish()
    return OwnerPlan(kind=kind, name=name, api=api)


def read_namespaces(top: Section) -> dict[str, Mapping[str, str]]:
    """``namespaces``: labels by namespace."""
    part = top.section("namespaces")
    if part is None:
        return {}
    namespaces: dict[str, Mapping[str, str]] = {}
    for name in part.keys():  # noqa: SIM118 - a section is no mapping
        one = part.section(name)
        if one is None:
            part.problem(name, "is empty; allowed: such as {labels: {team: ml}}")
            continue
        namespaces[name] = read_texts(one, "labels")
        one.finish()
    return namespaces

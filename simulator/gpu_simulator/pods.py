"""The pods of a simulated node as the Kubernetes API knows them: labels, annotations, owners and phases."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpu_simulator import declared, identities
from gpu_simulator.devices import pod_identity
from gpu_simulator.plan import IdForm, NodePlan, PodPlan
from gpu_simulator.truth import HolderTruth, PodTruth

RUNNING, SUCCEEDED = "Running", "Succeeded"
_DAEMONS = ("kube-proxy", "cilium", "node-exporter", "fluent-bit", "csi-node")
_OTHERS = (*_DAEMONS, "coredns", "web", "worker", "redis")
_STATEFUL = "redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPod:
    """A pod of the scenario with everything that users and schedulers wrote on it."""

    plan: PodPlan
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


def known_pods(plan: NodePlan) -> tuple[KnownPod, ...]:
    """Every pod that will ever come; processes outside pods are none."""
    return tuple(
        KnownPod(
            plan=pod,
            labels=dict(pod.labels) | declared.labels_of(plan, pod),
            annotations=declared.annotations_of(plan, pod) | dict(pod.annotations),
        )
        for pod in plan.pods
        if pod.namespace
    )


def present(node: str, known: Iterable[KnownPod], t: float) -> Iterator[tuple[KnownPod, PodTruth]]:
    """Pods that are there at ``t``, those that have finished and are still listed among them."""
    for one in known:
        pod = one.plan
        found = pod.window.occurrence(t, pod.finished_seconds)
        if found is None:
            continue
        name, uid = pod_identity(node, pod, found[0])
        yield (
            one,
            PodTruth(
                namespace=pod.namespace,
                name=name,
                uid=uid,
                labels=one.labels,
                annotations=one.annotations,
                owner_kind=pod.owner.kind if pod.owner else "",
                owner_name=pod.owner.name if pod.owner else "",
                owner_api=pod.owner.api if pod.owner else "",
                containers=(*pod.sidecars, *(container.name for container in pod.containers)),
                phase=RUNNING if pod.window.occurrence(t) else SUCCEEDED,
            ),
        )


def without_devices(
    other: Iterable[PodTruth], there: Iterable[tuple[KnownPod, PodTruth]]
) -> Iterator[tuple[str, str, str]]:
    """(namespace, pod, container) of every container that has no device and that the kubelet lists."""
    for pod in other:
        for container in pod.containers:
            yield pod.namespace, pod.name, container
    for known, pod in there:
        for container in known.plan.sidecars:
            yield pod.namespace, pod.name, container


def reservations(plan: NodePlan, also_listed: Iterable[HolderTruth]) -> Iterator[PodTruth]:
    """KAI's pods that hold GPUs for others."""
    if plan.plugin.ids is not IdForm.KAI:
        return
    groups = {gpu.uuid: declared.group_of(plan, gpu.index) for gpu in plan.gpus}
    for listed in also_listed:
        if listed.namespace == declared.RESERVATION_NAMESPACE:
            yield PodTruth(
                namespace=listed.namespace,
                name=listed.pod,
                uid=listed.pod_uid,
                labels={"app": "kai-resource-reservation", declared.GROUP_LABEL: groups[listed.device_uuid]},
                annotations={"run.ai/reserve_for_gpu_index": listed.device_uuid},
                containers=(listed.container,),
            )


def others(plan: NodePlan) -> tuple[PodTruth, ...]:
    """Pods without devices, as every node has them."""
    return tuple(_other(plan.node, number) for number in range(plan.other_pods))


def _other(node: str, number: int) -> PodTruth:
    again, position = divmod(number, len(_OTHERS))
    container = _OTHERS[position]
    name = container if not again else f"{container}-{again + 1}"
    namespace = "kube-system" if position <= len(_DAEMONS) else "apps"
    stable = identities.stable_number(node, number)
    labels = {"app.kubernetes.io/name": container}
    if container in _DAEMONS:
        owner, kind, pod = name, "DaemonSet", f"{name}-{stable:08x}"[:-3]
        labels |= {"controller-revision-hash": f"{stable % 2**28:07x}", "pod-template-generation": "1"}
    elif container == _STATEFUL:
        owner, kind, pod = name, "StatefulSet", f"{name}-0"
        labels |= {"apps.kubernetes.io/pod-index": "0", "statefulset.kubernetes.io/pod-name": pod}
    else:
        template = f"{identities.stable_number(node, 'template', number):08x}"
        owner, kind, pod = f"{name}-{template}", "ReplicaSet", f"{name}-{template}-{stable:08x}"[:-3]
        labels |= {"pod-template-hash": template}
    return PodTruth(
        namespace=namespace,
        name=pod,
        uid=identities.stable_uuid(node, namespace, pod),
        labels=labels,
        owner_kind=kind,
        owner_name=owner,
        owner_api="apps/v1",
        containers=(container,),
    )

"""Objects of a simulated cluster: pods as the Kubernetes API knows them, ResourceSlices and ResourceClaims."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_simulator import holders, identities
from gpu_simulator.holders import HeldDevice, pod_identity
from gpu_simulator.models import MIB, instances
from gpu_simulator.plan import DraMig, DraVersion, GpuPlan, IdForm, NodePlan, PodPlan, Sharing
from gpu_simulator.truth import HolderTruth, MigTruth, PodTruth

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
            labels=dict(pod.labels) | holders.labels_of(plan, pod),
            annotations=holders.annotations_of(plan, pod) | dict(pod.annotations),
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
    groups = {gpu.uuid: holders.group_of(plan, gpu.index) for gpu in plan.gpus}
    for listed in also_listed:
        if listed.namespace == holders.RESERVATION_NAMESPACE:
            yield PodTruth(
                namespace=listed.namespace,
                name=listed.pod,
                uid=listed.pod_uid,
                labels={"app": "kai-resource-reservation", holders.GROUP_LABEL: groups[listed.device_uuid]},
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


JsonObject = dict[str, Any]
_GENERATION = 2
STALE_SECONDS = 30.0
"""For so long after the start a slice of an older generation is there too, as after an update of the driver."""
_REQUEST = "gpu"
_BRAND = "Nvidia"


def slices(plan: NodePlan) -> tuple[JsonObject, ...]:
    """ResourceSlices of the node's pool, one of an older generation first; empty on a node without DRA's driver."""
    if plan.plugin.ids is not IdForm.DRA:
        return ()
    devices = [device for gpu in plan.gpus for device in _devices(plan, gpu)]
    newest = [_slice(plan, "0", _GENERATION, devices)]
    if plan.plugin.dra_mig is DraMig.DYNAMIC:
        counters = _slice(plan, "1", _GENERATION, [])
        counters["spec"]["sharedCounters"] = [_counters(gpu) for gpu in plan.gpus if gpu.mig_enabled]
        newest.append(counters)
    for each in newest:
        each["spec"]["pool"]["resourceSliceCount"] = len(newest)
    wrong = {"type": {"string": "gpu"}, "uuid": {"string": f"GPU-{identities.stable_uuid(plan.node, 'stale')}"}}
    stale = [_device(plan, identities.dra_device(gpu.minor), wrong, gpu.model.memory_bytes) for gpu in plan.gpus]
    return (_slice(plan, "stale", _GENERATION - 1, stale), *newest)


def claims(plan: NodePlan, held: Iterable[HeldDevice]) -> tuple[JsonObject, ...]:
    """ResourceClaims of everybody who has a device by one now, or looks at it."""
    if plan.plugin.ids is not IdForm.DRA:
        return ()
    found: dict[tuple[str, str], list[HeldDevice]] = {}
    for holding in held:
        found.setdefault((holding.held.use.pod.namespace, holding.claim_name), []).append(holding)
    return tuple(_claim(plan, namespace, name, users) for (namespace, name), users in found.items())


def _slice(plan: NodePlan, name: str, generation: int, devices: list[JsonObject]) -> JsonObject:
    name = f"{plan.node}-{identities.DRA_DRIVER}-{name}"
    return {
        "apiVersion": f"resource.k8s.io/{plan.dra_version}",
        "kind": "ResourceSlice",
        "metadata": {"name": name, "uid": identities.stable_uuid("slice", name)},
        "spec": {
            "driver": identities.DRA_DRIVER,
            "nodeName": plan.node,
            "pool": {"name": plan.node, "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def _devices(plan: NodePlan, gpu: GpuPlan) -> Iterator[JsonObject]:
    common = {
        "productName": {"string": gpu.model.name},
        "brand": {"string": _BRAND},
        "architecture": {"string": "Hopper" if gpu.model.gpm else "Ampere"},
        "driverVersion": {"version": ".".join((plan.driver_version + ".0").split(".")[:3])},
        "resource.kubernetes.io/pciBusID": {"string": gpu.pci_bus_id[4:].lower()},
    }
    dynamic = plan.plugin.dra_mig is DraMig.DYNAMIC
    if not gpu.mig_enabled or dynamic:
        whole = {"type": {"string": "gpu"}, "uuid": {"string": gpu.uuid}} | common
        device = _device(plan, identities.dra_device(gpu.minor), whole, gpu.model.memory_bytes)
        yield device | ({"allowMultipleAllocations": True} if gpu.sharing is Sharing.FRACTION else {})
    if not gpu.mig_enabled:
        return
    common |= {"type": {"string": "mig"}, "parentUUID": {"string": gpu.uuid}}
    if dynamic:
        for possible in instances(gpu.model):
            attributes = common | {"profile": {"string": possible.profile}}
            yield _device(plan, _device_name(gpu, possible), attributes, possible.memory_bytes)
        return
    for instance in gpu.instances:
        attributes = common | {"profile": {"string": instance.profile}, "uuid": {"string": instance.uuid}}
        yield _device(plan, _device_name(gpu, instance), attributes, instance.memory_bytes)


def _device(plan: NodePlan, name: str, attributes: Mapping[str, JsonObject], memory_bytes: int) -> JsonObject:
    parts = {"attributes": dict(attributes), "capacity": {"memory": {"value": f"{memory_bytes // MIB}Mi"}}}
    if plan.dra_version == DraVersion.V1BETA1:
        return {"name": name, "basic": parts}
    return {"name": name, **parts}


def _device_name(gpu: GpuPlan, instance: MigTruth | None) -> str:
    if instance is None:
        return identities.dra_device(gpu.minor)
    return identities.dra_device(gpu.minor, instance.profile, instance.profile_id, instance.placement_start)


def _counters(gpu: GpuPlan) -> JsonObject:
    return {"name": f"gpu-{gpu.minor}-counter-set", "counters": {"memory": {"value": f"{gpu.model.memory_slices}"}}}


def _claim(plan: NodePlan, namespace: str, name: str, users: list[HeldDevice]) -> JsonObject:
    by_device = {_device_name(user.gpu, user.instance): user for user in users}
    admin = any(user.held.use.claim.admin for user in users)
    asked: JsonObject = {
        "deviceClassName": identities.DRA_DRIVER,
        "allocationMode": "ExactCount",
        "count": len(by_device),
    }
    if admin:
        asked["adminAccess"] = True
    flat = plan.dra_version == DraVersion.V1BETA1
    request: JsonObject = {"name": _REQUEST, **asked} if flat else {"name": _REQUEST, "exactly": asked}
    pods = {user.held.pod_uid: user.held.pod for user in users}
    metadata: JsonObject = {"name": name, "namespace": namespace, "uid": identities.claim_uid(namespace, name)}
    if any(user.held.use.claim.extended for user in users):
        metadata["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
    return {
        "apiVersion": f"resource.k8s.io/{plan.dra_version}",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": {"requests": [request]}},
        "status": {
            "allocation": {"devices": {"results": [_result(plan, *entry) for entry in by_device.items()]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": uid} for uid, pod in pods.items()],
        },
    }


def _result(plan: NodePlan, device: str, user: HeldDevice) -> JsonObject:
    claim = user.held.use.claim
    result: JsonObject = {"request": _REQUEST, "driver": identities.DRA_DRIVER, "pool": plan.node, "device": device}
    if claim.admin:
        result["adminAccess"] = True
    if user.share_id:
        result["shareID"] = user.share_id
        result["consumedCapacity"] = {"memory": f"{(claim.memory_bytes or 0) // MIB}Mi"}
    return result

"""Builds objects of a simulated cluster: pods with labels of schedulers, ResourceSlices and ResourceClaims."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from exporter.model.attribution import PodMetadata
from gpu_simulator import identities
from gpu_simulator.holders import RESERVATION_NAMESPACE, PresentUse, declared_ratio, is_kai_part, pod_identity
from gpu_simulator.models import MIB, instances
from gpu_simulator.plan import Claim, DraMig, DraVersion, GpuPlan, IdForm, NodePlan, PodPlan, Sharing
from gpu_simulator.truth import HolderTruth, MigTruth, PodTruth

JsonObject = dict[str, Any]
STALE_SECONDS = 30.0
"""Seconds after the start in which a slice of an older generation also exists, as after a driver update."""
_DAEMONS = ("kube-proxy", "cilium", "node-exporter", "fluent-bit", "csi-node")
_OTHERS = (*_DAEMONS, "coredns", "web", "worker", "redis")
_STATEFUL = "redis"
_GROUP_LABEL = "runai-gpu-group"
_GENERATION = 2
_REQUEST = "gpu"
_METADATA = tuple(field.name for field in fields(PodMetadata))


def scheduled(plan: NodePlan) -> NodePlan:
    """Return the plan with the labels and annotations that schedulers set on its pods."""
    return replace(
        plan,
        pods=tuple(
            replace(
                pod,
                labels={**pod.labels, **_group_labels(plan, pod)},
                annotations={**_part_annotations(plan, pod), **pod.annotations},
            )
            if pod.namespace
            else pod
            for pod in plan.pods
        ),
    )


def _group(plan: NodePlan, gpu: int) -> str:
    """Return the name of the group of KAI's pods that share a GPU."""
    return identities.stable_uuid(plan.node, "gpu-group", gpu)


def _group_labels(plan: NodePlan, pod: PodPlan) -> dict[str, str]:
    groups = [_group(plan, claim.gpu) for claim in pod.claims if is_kai_part(plan, claim)]
    if len(groups) == 1:
        return {_GROUP_LABEL: groups[0]}
    return {f"{_GROUP_LABEL}/{group}": group for group in groups}


def _part_annotations(plan: NodePlan, pod: PodPlan) -> dict[str, str]:
    if plan.plugin.ids is IdForm.HAMI:
        # HAMi writes an empty element for a container without a device.
        devices = ";" * len(pod.sidecars) + _vgpus(plan, pod)
        written = {"hami.io/vgpu-devices-allocated": devices, "hami.io/vgpu-node": plan.node}
        parts = list(_vgpu_instances(plan, pod))
        return written | ({"hami.io/vgpu-mig-allocations": json.dumps(parts)} if parts else {})
    if plan.plugin.ids is IdForm.VOLCANO:
        return {"volcano.sh/vgpu-ids-new": _vgpus(plan, pod), "volcano.sh/vgpu-node": plan.node}
    return _kai(pod, [claim for claim in pod.claims if is_kai_part(plan, claim)])


def _instance_of(plan: NodePlan, claim: Claim) -> MigTruth | None:
    return None if claim.instance is None else plan.gpus[claim.gpu].instances[claim.instance]


def _vgpus(plan: NodePlan, pod: PodPlan) -> str:
    """Return the text of the devices; ``;`` ends a container, ``:`` a device."""
    return "".join(
        "".join(f"{_vgpu(plan, claim)}:" for claim in container.claims) + ";" for container in pod.containers
    )


def _vgpu(plan: NodePlan, claim: Claim) -> str:
    gpu, instance = plan.gpus[claim.gpu], _instance_of(plan, claim)
    memory = claim.memory_bytes
    if memory is None:
        memory = instance.memory_bytes if instance else round(gpu.model.memory_bytes * declared_ratio(gpu, claim))
    return f"{gpu.uuid},NVIDIA,{memory // MIB},{claim.cores}"


def _vgpu_instances(plan: NodePlan, pod: PodPlan) -> Iterator[JsonObject]:
    for container_index, container in enumerate(pod.containers, start=len(pod.sidecars)):
        for device_index, claim in enumerate(container.claims):
            if instance := _instance_of(plan, claim):
                yield {
                    "containerIndex": container_index,
                    "deviceIndex": device_index,
                    "gpuUUID": plan.gpus[claim.gpu].uuid,
                    "profile": instance.profile,
                    "placement": {"start": instance.placement_start, "size": instance.memory_slices},
                    "migUUID": instance.uuid,
                    "gpuInstanceID": instance.gpu_instance_id,
                    "computeInstanceID": instance.compute_instance_id,
                }


def _kai(pod: PodPlan, parts: list[Claim]) -> dict[str, str]:
    if not parts:
        return {}
    part = parts[0]
    if part.fraction is not None:
        written = {"gpu-fraction": f"{part.fraction:g}"}
    else:
        written = {"gpu-memory": str((part.memory_bytes or 0) // MIB)}
    written["received-resource-type"] = "Fraction"
    if len(parts) > 1:
        written["gpu-fraction-num-devices"] = str(len(parts))
    if len(pod.containers) > 1 or pod.sidecars:
        names = [container.name for container in pod.containers if part in container.claims]
        written["gpu-fraction-container-name"] = names[0]
    return written


def present(plan: NodePlan, t: float) -> Iterator[tuple[PodPlan, PodTruth]]:
    """Yield the pods with devices that exist at ``t``, including finished pods that are still listed."""
    for pod in plan.pods:
        found = pod.window.occurrence(t, pod.finished_seconds)
        if found is None or not pod.namespace:
            continue
        name, uid = pod_identity(plan.node, pod, found[0])
        metadata = {field: getattr(pod, field) for field in _METADATA} | {"name": name, "uid": uid}
        names = (*pod.sidecars, *(container.name for container in pod.containers))
        phase = "Running" if pod.window.occurrence(t) else "Succeeded"
        yield pod, PodTruth(**metadata, containers=names, phase=phase)


def reservations(plan: NodePlan, listed: Iterable[HolderTruth]) -> Iterator[PodTruth]:
    """Yield KAI's reservation pods."""
    groups = {gpu.uuid: _group(plan, gpu.index) for gpu in plan.gpus}
    for one in listed:
        if one.namespace == RESERVATION_NAMESPACE and plan.plugin.ids is IdForm.KAI:
            yield PodTruth(
                namespace=one.namespace,
                name=one.pod,
                uid=one.pod_uid,
                labels={"app": "kai-resource-reservation", _GROUP_LABEL: groups[one.device_uuid]},
                annotations={"run.ai/reserve_for_gpu_index": one.device_uuid},
                containers=(one.container,),
            )


def others(plan: NodePlan) -> tuple[PodTruth, ...]:
    """Return the pods without devices."""
    return tuple(_other(plan.node, number) for number in range(plan.other_pods))


def _other(node: str, number: int) -> PodTruth:
    again, position = divmod(number, len(_OTHERS))
    container = _OTHERS[position]
    owner = container if not again else f"{container}-{again + 1}"
    namespace = "kube-system" if position <= len(_DAEMONS) else "apps"
    stable = identities.stable_number(node, number)
    labels = {"app.kubernetes.io/name": container}
    if container in _DAEMONS:
        kind, pod = "DaemonSet", f"{owner}-{stable:08x}"[:-3]
        labels |= {"controller-revision-hash": f"{stable % 2**28:07x}", "pod-template-generation": "1"}
    elif container == _STATEFUL:
        kind, pod = "StatefulSet", f"{owner}-0"
        labels |= {"apps.kubernetes.io/pod-index": "0", "statefulset.kubernetes.io/pod-name": pod}
    else:
        template = f"{identities.stable_number(node, 'template', number):08x}"
        kind, owner = "ReplicaSet", f"{owner}-{template}"
        pod = f"{owner}-{stable:08x}"[:-3]
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


def slices(plan: NodePlan) -> tuple[JsonObject, ...]:
    """Return the ResourceSlices of the node's pool, first one of an older generation; none without the DRA driver."""
    if plan.plugin.ids is not IdForm.DRA:
        return ()
    newest = [_slice(plan, "0", _GENERATION, [device for gpu in plan.gpus for device in _devices(plan, gpu)])]
    if plan.plugin.dra_mig is DraMig.DYNAMIC:
        newest.append(_slice(plan, "1", _GENERATION, []))
        newest[1]["spec"]["sharedCounters"] = [
            {
                "name": f"gpu-{gpu.minor}-counter-set",
                "counters": {"memory": {"value": f"{gpu.model.memory_slices}"}},
            }
            for gpu in plan.gpus
            if gpu.mig_enabled
        ]
    for each in newest:
        each["spec"]["pool"]["resourceSliceCount"] = len(newest)
    wrong = {"type": "gpu", "uuid": f"GPU-{identities.stable_uuid(plan.node, 'stale')}"}
    stale = [_device(plan, gpu, None, wrong) for gpu in plan.gpus]
    return (_slice(plan, "stale", _GENERATION - 1, stale), *newest)


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
        "productName": gpu.model.name,
        "brand": "Nvidia",
        "architecture": "Hopper" if gpu.model.gpm else "Ampere",
        "resource.kubernetes.io/pciBusID": gpu.pci_bus_id[4:].lower(),
    }
    dynamic = plan.plugin.dra_mig is DraMig.DYNAMIC
    if not gpu.mig_enabled or dynamic:
        device = _device(plan, gpu, None, {"type": "gpu", "uuid": gpu.uuid} | common, full=True)
        yield device | ({"allowMultipleAllocations": True} if gpu.sharing is Sharing.FRACTION else {})
    for instance in (instances(gpu.model) if dynamic else gpu.instances) if gpu.mig_enabled else ():
        own = {"type": "mig", "parentUUID": gpu.uuid, "profile": instance.profile}
        own |= {} if dynamic else {"uuid": instance.uuid}
        yield _device(plan, gpu, instance, common | own, full=True)


def _device(
    plan: NodePlan, gpu: GpuPlan, instance: MigTruth | None, texts: Mapping[str, str], *, full: bool = False
) -> JsonObject:
    attributes = {name: {"string": text} for name, text in texts.items()}
    if full:
        attributes["driverVersion"] = {"version": ".".join((plan.driver_version + ".0").split(".")[:3])}
    memory = (instance.memory_bytes if instance else gpu.model.memory_bytes) // MIB
    parts = {"attributes": attributes, "capacity": {"memory": {"value": f"{memory}Mi"}}}
    name = identities.dra_device(gpu, instance)
    return {"name": name, "basic": parts} if plan.dra_version == DraVersion.V1BETA1 else {"name": name, **parts}


def claims(plan: NodePlan, held: Iterable[PresentUse]) -> tuple[JsonObject, ...]:
    """Return the ResourceClaims of devices that are held or monitored now."""
    if plan.plugin.ids is not IdForm.DRA:
        return ()
    found: dict[tuple[str, str], list[PresentUse]] = {}
    for hold in held:
        found.setdefault((hold.use.pod.namespace, hold.claim_name), []).append(hold)
    return tuple(_claim(plan, namespace, name, users) for (namespace, name), users in found.items())


def _claim(plan: NodePlan, namespace: str, name: str, users: list[PresentUse]) -> JsonObject:
    by_device = {identities.dra_device(user.use.gpu, user.use.instance): user for user in users}
    asked: JsonObject = {
        "deviceClassName": identities.DRA_DRIVER,
        "allocationMode": "ExactCount",
        "count": len(by_device),
    }
    if any(user.use.claim.admin for user in users):
        asked["adminAccess"] = True
    asked = asked if plan.dra_version == DraVersion.V1BETA1 else {"exactly": asked}
    metadata: JsonObject = {"name": name, "namespace": namespace, "uid": identities.claim_uid(namespace, name)}
    if any(user.use.claim.extended for user in users):
        metadata["annotations"] = {"resource.kubernetes.io/extended-resource-claim": "true"}
    pods = {user.pod_uid: user.pod for user in users}
    return {
        "apiVersion": f"resource.k8s.io/{plan.dra_version}",
        "kind": "ResourceClaim",
        "metadata": metadata,
        "spec": {"devices": {"requests": [{"name": _REQUEST, **asked}]}},
        "status": {
            "allocation": {"devices": {"results": [_result(plan, *entry) for entry in by_device.items()]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": uid} for uid, pod in pods.items()],
        },
    }


def _result(plan: NodePlan, device: str, user: PresentUse) -> JsonObject:
    result: JsonObject = {"request": _REQUEST, "driver": identities.DRA_DRIVER, "pool": plan.node, "device": device}
    if user.use.claim.admin:
        result["adminAccess"] = True
    if user.share_id:
        result["shareID"] = user.share_id
        result["consumedCapacity"] = {"memory": f"{(user.use.claim.memory_bytes or 0) // MIB}Mi"}
    return result

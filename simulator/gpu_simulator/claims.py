"""Dynamic resource allocation of a simulated node: its ResourceSlices and ResourceClaims as the API shows them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpu_simulator import identities
from gpu_simulator.holding import Holding
from gpu_simulator.mig_layout import placements
from gpu_simulator.models import MIB, instance_memory_bytes
from gpu_simulator.plan import DraMig, DraVersion, GpuPlan, IdForm, InstancePlan, NodePlan, Sharing

Json = dict[str, Any]
_GENERATION = 2
STALE_SECONDS = 30.0
"""For so long after the start a slice of an older generation is there too, as after an update of the driver."""
_REQUEST = "gpu"
_BRAND = "Nvidia"


def slices(plan: NodePlan) -> tuple[Json, ...]:
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


def claims(plan: NodePlan, held: Iterable[Holding]) -> tuple[Json, ...]:
    """ResourceClaims of everybody who has a device by one now, or looks at it."""
    if plan.plugin.ids is not IdForm.DRA:
        return ()
    found: dict[tuple[str, str], list[Holding]] = {}
    for holding in held:
        found.setdefault((holding.held.use.pod.namespace, holding.claim_name), []).append(holding)
    return tuple(_claim(plan, namespace, name, users) for (namespace, name), users in found.items())


def _slice(plan: NodePlan, name: str, generation: int, devices: list[Json]) -> Json:
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


def _devices(plan: NodePlan, gpu: GpuPlan) -> Iterator[Json]:
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
        for possible in placements(gpu.model):
            name = identities.dra_device(gpu.minor, possible.profile, possible.profile_id, possible.start)
            memory = instance_memory_bytes(gpu.model, possible.memory_slices)
            yield _device(plan, name, common | {"profile": {"string": possible.profile}}, memory)
        return
    for instance in gpu.instances:
        attributes = common | {"profile": {"string": instance.profile}, "uuid": {"string": instance.uuid}}
        yield _device(plan, _device_name(gpu, instance), attributes, instance.memory_bytes)


def _device(plan: NodePlan, name: str, attributes: Mapping[str, Json], memory_bytes: int) -> Json:
    parts = {"attributes": dict(attributes), "capacity": {"memory": {"value": f"{memory_bytes // MIB}Mi"}}}
    if plan.dra_version == DraVersion.V1BETA1:
        return {"name": name, "basic": parts}
    return {"name": name, **parts}


def _device_name(gpu: GpuPlan, instance: InstancePlan | None) -> str:
    if instance is None:
        return identities.dra_device(gpu.minor)
    return identities.dra_device(gpu.minor, instance.profile, instance.profile_id, instance.placement_start)


def _counters(gpu: GpuPlan) -> Json:
    return {"name": f"gpu-{gpu.minor}-counter-set", "counters": {"memory": {"value": f"{gpu.model.memory_slices}"}}}


def _claim(plan: NodePlan, namespace: str, name: str, users: list[Holding]) -> Json:
    by_device = {_device_name(user.gpu, user.instance): user for user in users}
    admin = any(user.held.use.claim.admin for user in users)
    asked: Json = {"deviceClassName": identities.DRA_DRIVER, "allocationMode": "ExactCount", "count": len(by_device)}
    if admin:
        asked["adminAccess"] = True
    flat = plan.dra_version == DraVersion.V1BETA1
    request: Json = {"name": _REQUEST, **asked} if flat else {"name": _REQUEST, "exactly": asked}
    pods = {user.held.pod_uid: user.held.pod for user in users}
    metadata: Json = {"name": name, "namespace": namespace, "uid": identities.claim_uid(namespace, name)}
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


def _result(plan: NodePlan, device: str, user: Holding) -> Json:
    claim = user.held.use.claim
    result: Json = {"request": _REQUEST, "driver": identities.DRA_DRIVER, "pool": plan.node, "device": device}
    if claim.admin:
        result["adminAccess"] = True
    if user.share_id:
        result["shareID"] = user.share_id
        result["consumedCapacity"] = {"memory": f"{(claim.memory_bytes or 0) // MIB}Mi"}
    return result

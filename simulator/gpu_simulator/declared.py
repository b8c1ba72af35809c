"""Parts of a device that pods declare, and what schedulers write on those pods: HAMi, volcano-vgpu and KAI."""

import json
from collections.abc import Iterator

from gpu_simulator import identities
from gpu_simulator.models import MIB
from gpu_simulator.plan import Claim, ContainerPlan, GpuPlan, IdForm, InstancePlan, NodePlan, PodPlan, Sharing

RESERVATION_NAMESPACE = "kai-resource-reservation"
GROUP_LABEL = "runai-gpu-group"
_HAMI_DEVICES, _HAMI_INSTANCES = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-mig-allocations"
_VOLCANO_DEVICES = "volcano.sh/vgpu-ids-new"
_WHOLE_CORES = 100


def instance_of(plan: NodePlan, claim: Claim) -> InstancePlan | None:
    """Give the MIG instance that a claim is of."""
    return None if claim.instance is None else plan.gpus[claim.gpu].instances[claim.instance]


def declared_ratio(gpu: GpuPlan, claim: Claim) -> float:
    """Part of the device (not of the board) that a claim declares; what is not limited is not counted."""
    if claim.fraction is not None:
        return claim.fraction
    if claim.replicas:
        return len(claim.replicas) / gpu.replicas
    memory = 1.0 if claim.memory_bytes is None else claim.memory_bytes / gpu.model.memory_bytes
    return max(memory, claim.cores / _WHOLE_CORES)


def labels_of(plan: NodePlan, pod: PodPlan) -> dict[str, str]:
    """What schedulers label a pod with: KAI's groups of those who have parts of one GPU."""
    groups = [group_of(plan, claim.gpu) for claim in _claims(pod) if is_kai_part(plan, claim)]
    if len(groups) == 1:
        return {GROUP_LABEL: groups[0]}
    return {f"{GROUP_LABEL}/{group}": group for group in groups}


def annotations_of(plan: NodePlan, pod: PodPlan) -> dict[str, str]:
    """What users and schedulers annotate a pod with so that it gets its parts."""
    if plan.plugin.ids is IdForm.HAMI:
        written = {_HAMI_DEVICES: _vgpus(plan, pod, empty=len(pod.sidecars)), "hami.io/vgpu-node": plan.node}
        instances = list(_instances(plan, pod))
        return written | ({_HAMI_INSTANCES: json.dumps(instances)} if instances else {})
    if plan.plugin.ids is IdForm.VOLCANO:
        return {_VOLCANO_DEVICES: _vgpus(plan, pod, empty=0), "volcano.sh/vgpu-node": plan.node}
    parts = [claim for claim in _claims(pod) if is_kai_part(plan, claim)]
    return _kai(pod, parts) if parts else {}


def is_kai_part(plan: NodePlan, claim: Claim) -> bool:
    """Whether somebody else holds the GPU on the claim's behalf."""
    return plan.plugin.ids is IdForm.KAI and plan.gpus[claim.gpu].sharing is Sharing.FRACTION


def group_of(plan: NodePlan, gpu: int) -> str:
    """Name of the group of those who have parts of a GPU."""
    return identities.stable_uuid(plan.node, "gpu-group", gpu)


def reservation_of(plan: NodePlan, gpu: int) -> str:
    """Name of the pod that holds a GPU for its group."""
    return f"gpu-reservation-{plan.node}-{identities.stable_number(plan.node, 'reservation', gpu):08x}"[:-3]


def _claims(pod: PodPlan) -> Iterator[Claim]:
    return (claim for container in pod.containers for claim in container.claims)


def _vgpus(plan: NodePlan, pod: PodPlan, *, empty: int) -> str:
    """Containers end with ``;``, devices with ``:``; HAMi leaves an empty element for a container without."""
    return ";" * empty + "".join(_container(plan, container) + ";" for container in pod.containers)


def _container(plan: NodePlan, container: ContainerPlan) -> str:
    return "".join(f"{_device(plan, claim)}:" for claim in container.claims)


def _device(plan: NodePlan, claim: Claim) -> str:
    gpu, instance = plan.gpus[claim.gpu], instance_of(plan, claim)
    memory = claim.memory_bytes
    if memory is None:
        memory = instance.memory_bytes if instance else round(gpu.model.memory_bytes * declared_ratio(gpu, claim))
    return f"{gpu.uuid},NVIDIA,{memory // MIB},{claim.cores}"


def _instances(plan: NodePlan, pod: PodPlan) -> Iterator[dict[str, object]]:
    for container_index, container in enumerate(pod.containers, start=len(pod.sidecars)):
        for device_index, claim in enumerate(container.claims):
            instance = instance_of(plan, claim)
            if instance:
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
    part = parts[0]
    if part.fraction is not None:
        written = {"gpu-fraction": f"{part.fraction:g}", "received-resource-type": "Fraction"}
    else:
        written = {"gpu-memory": str((part.memory_bytes or 0) // MIB), "received-resource-type": "Fraction"}
    if len(parts) > 1:
        written["gpu-fraction-num-devices"] = str(len(parts))
    if len(pod.containers) > 1 or pod.sidecars:
        names = [container.name for container in pod.containers if part in container.claims]
        written["gpu-fraction-container-name"] = names[0]
    return written

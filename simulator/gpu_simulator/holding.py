"""Who holds which part of which device at an instant, and what else the kubelet lists with devices."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gpu_simulator import declared, identities, loads
from gpu_simulator.devices import DeviceState, Held, Use, pod_identity
from gpu_simulator.plan import GpuPlan, IdForm, InstancePlan, NodePlan, Sharing
from gpu_simulator.truth import HolderTruth

_Key = tuple[int, int | None]
_VOLCANO_UNIT_BYTES = 1 << 30
"""Of the ids by which volcano's plugin counts memory; its default, a MiB, makes a list of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One container's hold on one device."""

    gpu: GpuPlan
    instance: InstancePlan | None
    held: Held
    share_ratio: float
    """Part of the physical GPU; 0 for one that only looks at it."""

    @property
    def claim_name(self) -> str:
        """Of its DRA claim, if it has one."""
        use = self.held.use
        return identities.claim_name(
            self.held.pod, use.container.name, use.claim, only_container=len(use.pod.containers) == 1
        )

    @property
    def share_id(self) -> str:
        """Of consumable capacity; empty where the claim has the device whole."""
        if self.gpu.sharing is not Sharing.FRACTION:
            return ""
        return identities.stable_uuid("share", self.held.use.pod.namespace, self.claim_name, self.gpu.uuid)


def holdings(plan: NodePlan, states: Mapping[_Key, DeviceState]) -> Iterator[Holding]:
    """Everybody who has a device, with the share; on one device the shares never sum to more than it is."""
    for (index, position), state in states.items():
        gpu = plan.gpus[index]
        instance = None if position is None else gpu.instances[position]
        ratios = _ratios(plan, gpu, state.held)
        whole = physical_share(gpu, instance) / max(1.0, sum(ratios))
        for held, ratio in zip(state.held, ratios, strict=True):
            yield Holding(gpu=gpu, instance=instance, held=held, share_ratio=ratio * whole)


def _ratios(plan: NodePlan, gpu: GpuPlan, held: tuple[Held, ...]) -> list[float]:
    """Parts of the device as declared; who names one claim divides what it has."""
    users = Counter(_shared_claim(plan, one) for one in held)
    return [
        0.0 if one.use.claim.admin else declared.declared_ratio(gpu, one.use.claim) / users[_shared_claim(plan, one)]
        for one in held
    ]


def _shared_claim(plan: NodePlan, held: Held) -> tuple[str, ...]:
    use = held.use
    if plan.plugin.ids is IdForm.DRA and use.claim.claim_name:
        return (use.pod.namespace, use.claim.claim_name)
    return (use.pod.namespace, held.pod, use.container.name, str(use.position))


def physical_share(gpu: GpuPlan, instance: InstancePlan | None) -> float:
    """Part of the physical GPU that a device is; the instances of one GPU never sum to more than 1."""
    if instance is None:
        return 1.0

    def parts(plan: InstancePlan) -> float:
        return max(plan.compute_slices / gpu.model.compute_slices, plan.memory_slices / gpu.model.memory_slices)

    return parts(instance) / max(1.0, sum(map(parts, gpu.instances)))


def holders(plan: NodePlan, held: list[Holding], states: Mapping[_Key, DeviceState]) -> Iterator[HolderTruth]:
    """The truth of everybody who holds something."""
    for holding in held:
        if not holding.held.use.claim.admin:
            gpu, use = holding.gpu, holding.held.use
            vector = states[gpu.index, use.claim.instance].vector
            busiest = loads.dominant(vector, gpm=gpu.model.gpm)
            activity = holding.held.amount * use.container.mix.factors[busiest]
            yield _truth(plan, holding, holding.share_ratio, activity_ratio=activity)


def also_listed(
    plan: NodePlan, held: list[Holding], uses: Mapping[_Key, tuple[Use, ...]], t: float
) -> Iterator[HolderTruth]:
    """What the kubelet lists beside the holders; nobody of these holds anything by it."""
    for holding in held:
        if holding.held.use.claim.admin:
            yield _truth(plan, holding, 0.0)
        elif plan.plugin.ids is IdForm.VOLCANO and holding.instance is None:
            yield _volcano_memory(holding)
    yield from _finished(plan, uses, t)
    yield from _reservations(plan, held)


def _truth(plan: NodePlan, holding: Holding, share_ratio: float, activity_ratio: float = 0.0) -> HolderTruth:
    held, gpu, instance = holding.held, holding.gpu, holding.instance
    claim = held.use.claim
    is_part = declared.is_kai_part(plan, claim)
    resource = identities.resource_name(plan.plugin, gpu, instance)
    ids: tuple[str, ...] = ()
    if is_part:
        resource = "gpu-fraction"
    elif plan.plugin.ids is IdForm.DRA:
        resource = f"{identities.DRA_PREFIX}{holding.claim_name}"
        ids = identities.device_ids(plan.plugin, plan.node, gpu, instance, claim.replicas)
        ids = tuple(f"{text}#{holding.share_id}" if holding.share_id else text for text in ids)
    elif gpu.sharing is Sharing.FRACTION:
        number = held.use.position % gpu.splits
        ids = identities.device_ids(plan.plugin, plan.node, placeholder(plan, gpu), None, (number,))
    else:
        ids = identities.device_ids(plan.plugin, plan.node, gpu, instance, claim.replicas)
    return HolderTruth(
        namespace=held.use.pod.namespace,
        pod=held.pod,
        container=held.use.container.name,
        pod_uid=held.pod_uid,
        device_uuid=instance.uuid if instance else gpu.uuid,
        resource=resource,
        device_ids=ids,
        share_ratio=share_ratio,
        activity_ratio=activity_ratio,
        listed=not is_part,
        init=held.use.container.init,
        started_seconds=held.started_seconds,
    )


def placeholder(plan: NodePlan, gpu: GpuPlan) -> GpuPlan:
    """Give the board that the kubelet's id names for a part of ``gpu``: another one, where there is another."""
    boards = [one for one in plan.gpus if one.sharing is Sharing.FRACTION]
    return boards[(boards.index(gpu) + 1) % len(boards)]


def _volcano_memory(holding: Holding) -> HolderTruth:
    gpu, held = holding.gpu, holding.held
    memory = held.use.claim.memory_bytes or gpu.model.memory_bytes
    ids = range(memory // _VOLCANO_UNIT_BYTES)
    return HolderTruth(
        namespace=held.use.pod.namespace,
        pod=held.pod,
        container=held.use.container.name,
        pod_uid=held.pod_uid,
        device_uuid=gpu.uuid,
        resource=identities.VOLCANO_MEMORY,
        device_ids=tuple(f"{gpu.uuid}-memory-{number}" for number in ids),
        share_ratio=0.0,
        activity_ratio=0.0,
        started_seconds=held.started_seconds,
    )


def _finished(plan: NodePlan, uses: Mapping[_Key, tuple[Use, ...]], t: float) -> Iterator[HolderTruth]:
    """Pods that have ended, and whose devices a kubelet up to 1.33 may list a while longer."""
    for (index, position), uses_of in uses.items():
        gpu = plan.gpus[index]
        for use in uses_of:
            window, claim = use.pod.window, use.claim
            found = window.occurrence(t, use.pod.finished_seconds)
            if found is None or window.occurrence(t) or claim.admin or declared.is_kai_part(plan, claim):
                continue
            name, uid = pod_identity(plan.node, use.pod, found[0])
            held = Held(use=use, pod=name, pod_uid=uid, amount=0.0, started_seconds=round(t - found[1], 6))
            instance = None if position is None else gpu.instances[position]
            yield _truth(plan, Holding(gpu=gpu, instance=instance, held=held, share_ratio=0.0), 0.0)


def _reservations(plan: NodePlan, held: list[Holding]) -> Iterator[HolderTruth]:
    """KAI's pods, each with the GPU of a group as long as somebody is in it."""
    started: dict[int, float] = {}
    for holding in held:
        if declared.is_kai_part(plan, holding.held.use.claim):
            index, since = holding.gpu.index, holding.held.started_seconds
            started[index] = min(since, started.get(index, since))
    for index, since in started.items():
        gpu, name = plan.gpus[index], declared.reservation_of(plan, index)
        yield HolderTruth(
            namespace=declared.RESERVATION_NAMESPACE,
            pod=name,
            container="resource-reservation",
            pod_uid=identities.stable_uuid(plan.node, declared.RESERVATION_NAMESPACE, name),
            device_uuid=gpu.uuid,
            resource=identities.resource_name(plan.plugin, gpu, None),
            device_ids=(gpu.uuid,),
            share_ratio=0.0,
            activity_ratio=0.0,
            started_seconds=since,
        )

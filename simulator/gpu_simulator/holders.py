"""Holders of devices: who uses which device how much at an instant, with which share, and what the kubelet lists."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpu_simulator import activity, identities
from gpu_simulator.models import MIB
from gpu_simulator.plan import Claim, ContainerPlan, GpuPlan, IdForm, NodePlan, PodPlan, Sharing
from gpu_simulator.truth import HolderTruth, MigTruth, ProcessTruth

FIRST_PID = 20_000
_PIDS = 4_000_000
_TICKS_PER_SECOND = 100
_UPTIME_SECONDS = 10_000_000
"""How long the node had been up when the scenario began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One container's use of one device."""

    pod: PodPlan
    container: ContainerPlan
    claim: Claim
    scale: float
    """Claim's scale, less what the device's users together would have above 1."""
    first_process: int
    """Number of its first process among all of the node's."""
    all_processes: int
    position: int = 0
    """Among the uses of its device."""

    def amount(self, t: float) -> float:
        """Activity at ``t``."""
        found = self.pod.window.occurrence(t, self.pod.linger_seconds)
        return self.scale * self.container.signal.value(found[1]) if found else 0.0

    def amount_integral(self, t: float) -> float:
        """Integral of the activity from 0 to ``t``, in seconds."""
        return self.scale * (self._cumulative(t) - self._cumulative(0.0))

    def _cumulative(self, t: float) -> float:
        window = self.pod.window
        elapsed = t - window.start_seconds
        if elapsed <= 0:
            return 0.0
        signal = self.container.signal
        if window.end_seconds is None:
            return signal.integral(elapsed)
        lifetime = window.end_seconds - window.start_seconds + self.pod.linger_seconds
        before = 0.0
        if window.every_seconds is not None:
            rounds, elapsed = divmod(elapsed, window.every_seconds)
            before = rounds * signal.integral(lifetime) if rounds else 0.0
        return before + signal.integral(min(elapsed, lifetime))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A use whose pod is there now."""

    use: DeviceUse
    pod: str
    """Name of this occurrence of the pod."""
    pod_uid: str
    amount: float
    started_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """One device at an instant; vectors in the order of ``activity.NAMES``."""

    vector: tuple[float, ...] = activity.NOTHING
    integral: tuple[float, ...] = activity.NOTHING
    memory_bytes: int = 0
    processes: tuple[ProcessTruth, ...] = ()
    held: tuple[Held, ...] = ()


def pod_identity(node: str, pod: PodPlan, number: int) -> tuple[str, str]:
    """Name and UID of an occurrence of a pod; both empty outside every pod."""
    if not pod.namespace:
        return "", ""
    name = pod.name if pod.window.every_seconds is None else f"{pod.name}-{number}"
    return name, identities.stable_uuid(node, pod.namespace, name)


def device_state(uses: tuple[DeviceUse, ...], plan: NodePlan, t: float) -> DeviceState:
    """What all uses of a device together make of it at ``t``."""
    amounts: list[tuple[float, activity.Mix]] = []
    processes: list[ProcessTruth] = []
    held: list[Held] = []
    memory = 0
    for use in uses:
        found = use.pod.window.occurrence(t, use.pod.linger_seconds)
        if found is None:
            continue
        number, elapsed = found
        amount = use.scale * use.container.signal.value(elapsed)
        name, uid = pod_identity(plan.node, use.pod, number)
        started = t - elapsed
        amounts.append((amount, use.container.mix))
        memory += use.container.memory_bytes
        processes += _processes(use, plan, (name, uid), amount, number)
        if uid and use.pod.window.occurrence(t):
            held.append(Held(use=use, pod=name, pod_uid=uid, amount=amount, started_seconds=round(started, 6)))
    return DeviceState(
        vector=activity.add(amounts),
        integral=activity.add((use.amount_integral(t), use.container.mix) for use in uses),
        memory_bytes=memory,
        processes=tuple(processes),
        held=tuple(held),
    )


def _processes(
    use: DeviceUse, plan: NodePlan, identity: tuple[str, str], amount: float, number: int
) -> Iterable[ProcessTruth]:
    name, uid = identity
    pod, container = use.pod, use.container
    engines = ("utilisation", "memory_copy", "encode", "decode", "jpeg", "optical_flow")
    sm, memory, encode, decode, jpeg, flow = (min(1.0, amount * container.mix.factor(engine)) for engine in engines)
    start = pod.window.start_seconds + number * (pod.window.every_seconds or 0.0)
    if uid:
        cgroup = identities.cgroup_text(plan.runtime, uid, container.name)
    else:
        cgroup = identities.outside_cgroup_text(pod.name)
    for position, process in enumerate(container.processes):
        serial = use.first_process + position + number * use.all_processes
        yield ProcessTruth(
            pid=FIRST_PID + serial % _PIDS,
            start_ticks=round((start + _UPTIME_SECONDS) * _TICKS_PER_SECOND),
            comm=process.comm,
            cgroup=cgroup,
            memory_used_bytes=process.memory_bytes,
            sm_ratio=sm * process.part,
            mem_ratio=memory * process.part,
            enc_ratio=encode * process.part,
            dec_ratio=decode * process.part,
            jpg_ratio=jpeg * process.part,
            ofa_ratio=flow * process.part,
            namespace=pod.namespace,
            pod=name,
            container=container.name if uid else "",
            pod_uid=uid,
        )


def _peak_together(uses: list[DeviceUse]) -> float:
    """Greatest sum of peaks of uses that are there at the same time; recurring pods count as always there."""
    edges: list[tuple[float, int, float]] = []
    for use in uses:
        window = use.pod.window
        peak = use.container.signal.peak * use.container.mix.peak * use.claim.scale
        edges.append((window.start_seconds, 1, peak))
        if window.end_seconds is not None and window.every_seconds is None:
            edges.append((window.end_seconds + use.pod.linger_seconds, 0, -peak))
    level = greatest = 0.0
    for _, _, change in sorted(edges):
        level += change
        greatest = max(greatest, level)
    return greatest


def board_uses(plan: NodePlan) -> Mapping[tuple[int, int | None], tuple[DeviceUse, ...]]:
    """Everybody's use of every device, with pids given out and activity kept to what a device can do.

    Where the users of a device could together pass 1, all of them are scaled by the same constant: then the
    device's activity is the sum of its users' at every instant, and every integral stays exact.
    """
    claims = [
        (pod, container, claim) for pod in plan.pods for container in pod.containers for claim in container.claims
    ]
    total = sum(len(container.processes) for _, container, _ in claims)
    by_device: dict[tuple[int, int | None], list[DeviceUse]] = defaultdict(list)
    first = 0
    for pod, container, claim in claims:
        use = DeviceUse(
            pod=pod, container=container, claim=claim, scale=claim.scale, first_process=first, all_processes=total
        )
        by_device[claim.gpu, claim.instance].append(use)
        first += len(container.processes)
    return {key: _fitted(uses) for key, uses in by_device.items()}


def _fitted(uses: list[DeviceUse]) -> tuple[DeviceUse, ...]:
    factor = 1.0 / max(1.0, _peak_together(uses))
    return tuple(replace(use, scale=use.scale * factor, position=position) for position, use in enumerate(uses))


RESERVATION_NAMESPACE = "kai-resource-reservation"
GROUP_LABEL = "runai-gpu-group"
_HAMI_DEVICES, _HAMI_INSTANCES = "hami.io/vgpu-devices-allocated", "hami.io/vgpu-mig-allocations"
_VOLCANO_DEVICES = "volcano.sh/vgpu-ids-new"
_WHOLE_CORES = 100


def instance_of(plan: NodePlan, claim: Claim) -> MigTruth | None:
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
    return ";" * empty + "".join(_vgpu_container(plan, container) + ";" for container in pod.containers)


def _vgpu_container(plan: NodePlan, container: ContainerPlan) -> str:
    return "".join(f"{_vgpu_device(plan, claim)}:" for claim in container.claims)


def _vgpu_device(plan: NodePlan, claim: Claim) -> str:
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


_Device = tuple[int, int | None]
_VOLCANO_UNIT_BYTES = 1 << 30
"""Of the ids by which volcano's plugin counts memory; its default, a MiB, makes a list of megabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """One container's hold on one device."""

    gpu: GpuPlan
    instance: MigTruth | None
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


def holdings(plan: NodePlan, states: Mapping[_Device, DeviceState]) -> Iterator[HeldDevice]:
    """Everybody who has a device, with the share; on one device the shares never sum to more than it is."""
    for (index, position), state in states.items():
        gpu = plan.gpus[index]
        instance = None if position is None else gpu.instances[position]
        ratios = _ratios(plan, gpu, state.held)
        whole = physical_share(gpu, instance) / max(1.0, sum(ratios))
        for held, ratio in zip(state.held, ratios, strict=True):
            yield HeldDevice(gpu=gpu, instance=instance, held=held, share_ratio=ratio * whole)


def _ratios(plan: NodePlan, gpu: GpuPlan, held: tuple[Held, ...]) -> list[float]:
    """Parts of the device as declared; who names one claim divides what it has."""
    users = Counter(_shared_claim(plan, one) for one in held)
    return [
        0.0 if one.use.claim.admin else declared_ratio(gpu, one.use.claim) / users[_shared_claim(plan, one)]
        for one in held
    ]


def _shared_claim(plan: NodePlan, held: Held) -> tuple[str, ...]:
    use = held.use
    if plan.plugin.ids is IdForm.DRA and use.claim.claim_name:
        return (use.pod.namespace, use.claim.claim_name)
    return (use.pod.namespace, held.pod, use.container.name, str(use.position))


def physical_share(gpu: GpuPlan, instance: MigTruth | None) -> float:
    """Part of the physical GPU that a device is; the instances of one GPU never sum to more than 1."""
    if instance is None:
        return 1.0

    def parts(plan: MigTruth) -> float:
        return max(plan.compute_slices / gpu.model.compute_slices, plan.memory_slices / gpu.model.memory_slices)

    return parts(instance) / max(1.0, sum(map(parts, gpu.instances)))


def holders(plan: NodePlan, held: list[HeldDevice], states: Mapping[_Device, DeviceState]) -> Iterator[HolderTruth]:
    """The truth of everybody who holds something."""
    for hold in held:
        if not hold.held.use.claim.admin:
            gpu, use = hold.gpu, hold.held.use
            vector = states[gpu.index, use.claim.instance].vector
            busiest = activity.dominant(vector, gpm=gpu.model.gpm)
            ratio = hold.held.amount * use.container.mix.factors[busiest]
            yield _truth(plan, hold, hold.share_ratio, activity_ratio=ratio)


def also_listed(
    plan: NodePlan, held: list[HeldDevice], uses: Mapping[_Device, tuple[DeviceUse, ...]], t: float
) -> Iterator[HolderTruth]:
    """What the kubelet lists beside the holders; nobody of these holds anything by it."""
    for hold in held:
        if hold.held.use.claim.admin:
            yield _truth(plan, hold, 0.0)
        elif plan.plugin.ids is IdForm.VOLCANO and hold.instance is None:
            yield _volcano_memory(plan, hold)
    yield from _finished(plan, uses, t)
    yield from _reservation_holders(plan, held)


def _truth(plan: NodePlan, hold: HeldDevice, share_ratio: float, activity_ratio: float = 0.0) -> HolderTruth:
    held, gpu, instance = hold.held, hold.gpu, hold.instance
    claim = held.use.claim
    is_part = is_kai_part(plan, claim)
    resource = identities.resource_name(plan.plugin, gpu, instance)
    ids: tuple[str, ...] = ()
    if is_part:
        resource = "gpu-fraction"
    elif plan.plugin.ids is IdForm.DRA:
        resource = f"{identities.DRA_PREFIX}{hold.claim_name}"
        ids = identities.device_ids(plan.plugin, plan.node, gpu, instance, claim.replicas)
        ids = tuple(f"{text}#{hold.share_id}" if hold.share_id else text for text in ids)
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


def _volcano_memory(plan: NodePlan, hold: HeldDevice) -> HolderTruth:
    memory = hold.held.use.claim.memory_bytes or hold.gpu.model.memory_bytes
    ids = tuple(f"{hold.gpu.uuid}-memory-{number}" for number in range(memory // _VOLCANO_UNIT_BYTES))
    return replace(_truth(plan, hold, 0.0), resource=identities.VOLCANO_MEMORY, device_ids=ids)


def _finished(plan: NodePlan, uses: Mapping[_Device, tuple[DeviceUse, ...]], t: float) -> Iterator[HolderTruth]:
    """Pods that have ended, and whose devices a kubelet up to 1.33 may list a while longer."""
    for (index, position), uses_of in uses.items():
        gpu = plan.gpus[index]
        for use in uses_of:
            window, claim = use.pod.window, use.claim
            found = window.occurrence(t, use.pod.finished_seconds)
            if found is None or window.occurrence(t) or claim.admin or is_kai_part(plan, claim):
                continue
            name, uid = pod_identity(plan.node, use.pod, found[0])
            held = Held(use=use, pod=name, pod_uid=uid, amount=0.0, started_seconds=round(t - found[1], 6))
            instance = None if position is None else gpu.instances[position]
            yield _truth(plan, HeldDevice(gpu=gpu, instance=instance, held=held, share_ratio=0.0), 0.0)


def _reservation_holders(plan: NodePlan, held: list[HeldDevice]) -> Iterator[HolderTruth]:
    """KAI's pods, each with the GPU of a group as long as somebody is in it."""
    started: dict[int, float] = {}
    for hold in held:
        if is_kai_part(plan, hold.held.use.claim):
            index, since = hold.gpu.index, hold.held.started_seconds
            started[index] = min(since, started.get(index, since))
    for index, since in started.items():
        gpu, name = plan.gpus[index], reservation_of(plan, index)
        yield HolderTruth(
            namespace=RESERVATION_NAMESPACE,
            pod=name,
            container="resource-reservation",
            pod_uid=identities.stable_uuid(plan.node, RESERVATION_NAMESPACE, name),
            device_uuid=gpu.uuid,
            resource=identities.resource_name(plan.plugin, gpu, None),
            device_ids=(gpu.uuid,),
            share_ratio=0.0,
            activity_ratio=0.0,
            started_seconds=since,
        )

"""Computes the holders of devices: use of each device at a time, shares, and the lists of the kubelet."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpu_simulator import activity, identities
from gpu_simulator.plan import Claim, ContainerPlan, GpuPlan, IdForm, NodePlan, PodPlan, Sharing
from gpu_simulator.truth import HolderTruth, MigTruth, ProcessTruth

FIRST_PID = 20_000
RESERVATION_NAMESPACE = "kai-resource-reservation"
_PIDS = 4_000_000
_TICKS_PER_SECOND = 100
_UPTIME_SECONDS = 10_000_000
"""Uptime of the node at the scenario's start, in seconds."""
_WHOLE_CORES = 100
_VOLCANO_UNIT_BYTES = 1 << 30
"""Memory per id of volcano's plugin; its default of one MiB would make a list of megabytes."""
_ENGINES = {
    "sm_ratio": "utilisation",
    "mem_ratio": "memory_copy",
    "enc_ratio": "encode",
    "dec_ratio": "decode",
    "jpg_ratio": "jpeg",
    "ofa_ratio": "optical_flow",
}
"""Load of the device to which each ratio of a process refers."""
DeviceKey = tuple[int, int | None]
"""Index of the GPU, position in its MIG layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsePlan:
    """Use of a device by a container."""

    pod: PodPlan
    container: ContainerPlan
    claim: Claim
    gpu: GpuPlan
    instance: MigTruth | None
    scale: float
    """Scale of the claim, reduced so that the users of the device do not exceed 1 together."""
    first_process: int
    """Number of its first process among all processes of the node."""
    all_processes: int
    position: int = 0
    """Index among the uses of its device."""

    def integral(self, t: float) -> float:
        """Return the integral of the activity from 0 to ``t``, in seconds."""
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
class PresentUse:
    """A use with an existing pod."""

    use: UsePlan
    pod: str
    """Name of the current occurrence of the pod."""
    pod_uid: str
    started_seconds: float
    amount: float = 0.0
    activity_ratio: float = 0.0
    """Part of the device's busiest engine."""
    share_ratio: float = 0.0
    """Part of the physical GPU; 0 for a monitoring claim."""

    @property
    def claim_name(self) -> str:
        """Return the name of its DRA claim."""
        only = len(self.use.pod.containers) == 1
        return identities.claim_name(self.pod, self.use.container.name, self.use.claim, only_container=only)

    @property
    def share_id(self) -> str:
        """Return the id of consumable capacity; empty if the claim has the whole device."""
        if self.use.gpu.sharing is not Sharing.FRACTION:
            return ""
        return identities.stable_uuid("share", self.use.pod.namespace, self.claim_name, self.use.gpu.uuid)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTruth:
    """State of a device at a time."""

    vector: activity.Vector = activity.NOTHING
    integral: activity.Vector = activity.NOTHING
    memory_bytes: int = 0
    processes: tuple[ProcessTruth, ...] = ()
    held: tuple[PresentUse, ...] = ()


def pod_identity(node: str, pod: PodPlan, number: int) -> tuple[str, str]:
    """Return name and UID of an occurrence of a pod; both are empty for processes outside pods."""
    if not pod.namespace:
        return "", ""
    name = pod.name if pod.window.every_seconds is None else f"{pod.name}-{number}"
    return name, identities.stable_uuid(node, pod.namespace, name)


def device_state(uses: tuple[UsePlan, ...], plan: NodePlan, t: float) -> DeviceTruth:
    """Return the state of a device at ``t`` from all its uses."""
    amounts: list[tuple[float, activity.Vector]] = []
    processes: list[ProcessTruth] = []
    held: list[PresentUse] = []
    memory = 0
    for use in uses:
        found = use.pod.window.occurrence(t, use.pod.linger_seconds)
        if found is None:
            continue
        number, elapsed = found
        name, uid = pod_identity(plan.node, use.pod, number)
        started = round(t - elapsed, 6)
        one = PresentUse(
            use=use,
            pod=name,
            pod_uid=uid,
            started_seconds=started,
            amount=use.scale * use.container.signal.value(elapsed),
        )
        amounts.append((one.amount, use.container.mix))
        memory += use.container.memory_bytes
        processes += _processes(one, plan, number)
        if uid and use.pod.window.occurrence(t):
            held.append(one)
    return DeviceTruth(
        vector=activity.add(amounts),
        integral=activity.add((use.integral(t), use.container.mix) for use in uses),
        memory_bytes=memory,
        processes=tuple(processes),
        held=tuple(held),
    )


def _processes(held: PresentUse, plan: NodePlan, number: int) -> Iterator[ProcessTruth]:
    use, uid, mix = held.use, held.pod_uid, held.use.container.mix
    pod, container = use.pod, use.container
    ratios = {name: min(1.0, held.amount * mix[activity.NAMES.index(engine)]) for name, engine in _ENGINES.items()}
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
            namespace=pod.namespace,
            pod=held.pod,
            container=container.name if uid else "",
            pod_uid=uid,
            **{name: ratio * process.part for name, ratio in ratios.items()},
        )


def board_uses(plan: NodePlan) -> Mapping[DeviceKey, tuple[UsePlan, ...]]:
    """Return the uses of each device, with assigned pids and limited activity.

    If the users of a device could exceed 1 together, all of them are scaled by the same constant: the activity of the
    device is then always the sum of its users, and every integral stays exact.
    """
    claims = [
        (pod, container, claim) for pod in plan.pods for container in pod.containers for claim in container.claims
    ]
    total = sum(len(container.processes) for _, container, _ in claims)
    by_device: dict[DeviceKey, list[UsePlan]] = defaultdict(list)
    first = 0
    for pod, container, claim in claims:
        gpu = plan.gpus[claim.gpu]
        use = UsePlan(
            pod=pod,
            container=container,
            claim=claim,
            gpu=gpu,
            instance=None if claim.instance is None else gpu.instances[claim.instance],
            scale=claim.scale,
            first_process=first,
            all_processes=total,
        )
        by_device[claim.gpu, claim.instance].append(use)
        first += len(container.processes)
    return {key: _fitted(uses) for key, uses in by_device.items()}


def _fitted(uses: list[UsePlan]) -> tuple[UsePlan, ...]:
    factor = 1.0 / max(1.0, _peak_together(uses))
    return tuple(replace(use, scale=use.scale * factor, position=position) for position, use in enumerate(uses))


def _peak_together(uses: list[UsePlan]) -> float:
    """Return the highest sum of peaks of concurrent uses; recurring pods count as permanent."""
    edges: list[tuple[float, int, float]] = []
    for use in uses:
        window = use.pod.window
        peak = use.container.signal.peak * activity.peak(use.container.mix) * use.claim.scale
        edges.append((window.start_seconds, 1, peak))
        if window.end_seconds is not None and window.every_seconds is None:
            edges.append((window.end_seconds + use.pod.linger_seconds, 0, -peak))
    level = greatest = 0.0
    for _, _, change in sorted(edges):
        level += change
        greatest = max(greatest, level)
    return greatest


def declared_ratio(gpu: GpuPlan, claim: Claim) -> float:
    """Return the part of the device (not of the board) that a claim declares; unlimited resources do not count."""
    if claim.fraction is not None:
        return claim.fraction
    if claim.replicas:
        return len(claim.replicas) / gpu.replicas
    memory = 1.0 if claim.memory_bytes is None else claim.memory_bytes / gpu.model.memory_bytes
    return max(memory, claim.cores / _WHOLE_CORES)


def is_kai_part(plan: NodePlan, claim: Claim) -> bool:
    """Return whether a reservation pod holds the GPU for the claim."""
    return plan.plugin.ids is IdForm.KAI and plan.gpus[claim.gpu].sharing is Sharing.FRACTION


def holdings(plan: NodePlan, states: Iterable[DeviceTruth]) -> Iterator[PresentUse]:
    """Yield every hold on a device with its share; the shares of a device never exceed it in sum."""
    for state in states:
        users = Counter(_shared_claim(plan, one) for one in state.held)
        ratios = [
            0.0 if one.use.claim.admin else declared_ratio(one.use.gpu, one.use.claim) / users[_shared_claim(plan, one)]
            for one in state.held
        ]
        whole = max(1.0, sum(ratios))
        for held, ratio in zip(state.held, ratios, strict=True):
            gpu = held.use.gpu
            busiest = activity.dominant(state.vector, gpm=gpu.model.gpm)
            yield replace(
                held,
                share_ratio=ratio * (physical_share(gpu, held.use.instance) / whole),
                activity_ratio=held.amount * held.use.container.mix[busiest],
            )


def _shared_claim(plan: NodePlan, held: PresentUse) -> tuple[str, ...]:
    use = held.use
    if plan.plugin.ids is IdForm.DRA and use.claim.claim_name:
        return (use.pod.namespace, use.claim.claim_name)
    return (use.pod.namespace, held.pod, use.container.name, str(use.position))


def physical_share(gpu: GpuPlan, instance: MigTruth | None) -> float:
    """Return the part of the physical GPU of a device; the sum over instances of a GPU is at most 1."""
    if instance is None:
        return 1.0

    def parts(one: MigTruth) -> float:
        return max(one.compute_slices / gpu.model.compute_slices, one.memory_slices / gpu.model.memory_slices)

    return parts(instance) / max(1.0, sum(map(parts, gpu.instances)))


def holder_truth(plan: NodePlan, held: PresentUse) -> HolderTruth:
    """Return the truth of a hold, including its entry in the kubelet's list."""
    use, gpu, instance = held.use, held.use.gpu, held.use.instance
    is_part = is_kai_part(plan, use.claim)
    resource = identities.resource_name(plan, gpu, instance)
    ids = identities.device_ids(plan, gpu, instance, use.claim.replicas)
    if is_part:
        resource, ids = "gpu-fraction", ()
    elif plan.plugin.ids is IdForm.DRA:
        resource = f"{identities.DRA_PREFIX}{held.claim_name}"
        ids = tuple(f"{text}#{held.share_id}" if held.share_id else text for text in ids)
    elif gpu.sharing is Sharing.FRACTION:
        # The kubelet's id names another board, if one exists.
        boards = [one for one in plan.gpus if one.sharing is Sharing.FRACTION]
        named = boards[(boards.index(gpu) + 1) % len(boards)]
        ids = identities.device_ids(plan, named, None, (use.position % gpu.splits,))
    return HolderTruth(
        namespace=use.pod.namespace,
        pod=held.pod,
        container=use.container.name,
        pod_uid=held.pod_uid,
        device_uuid=instance.uuid if instance else gpu.uuid,
        resource=resource,
        device_ids=ids,
        share_ratio=held.share_ratio,
        activity_ratio=held.activity_ratio,
        listed=not is_part,
        init=use.container.init,
        started_seconds=held.started_seconds,
    )


def also_listed(plan: NodePlan, held: list[PresentUse], uses: Iterable[UsePlan], t: float) -> Iterator[HolderTruth]:
    """Yield the entries of the kubelet that are not holds."""
    for hold in held:
        use = hold.use
        if use.claim.admin:
            yield replace(holder_truth(plan, hold), activity_ratio=0.0)
        elif plan.plugin.ids is IdForm.VOLCANO and use.instance is None:
            units = (use.claim.memory_bytes or use.gpu.model.memory_bytes) // _VOLCANO_UNIT_BYTES
            yield replace(
                holder_truth(plan, hold),
                share_ratio=0.0,
                activity_ratio=0.0,
                resource=identities.VOLCANO_MEMORY,
                device_ids=tuple(f"{use.gpu.uuid}-memory-{number}" for number in range(units)),
            )
    yield from _finished(plan, uses, t)
    yield from _reservation_holders(plan, held)


def _finished(plan: NodePlan, uses: Iterable[UsePlan], t: float) -> Iterator[HolderTruth]:
    """Yield finished pods: a kubelet up to 1.33 lists their devices for some time."""
    for use in uses:
        found = use.pod.window.occurrence(t, use.pod.finished_seconds)
        if found and not (use.pod.window.occurrence(t) or use.claim.admin or is_kai_part(plan, use.claim)):
            name, uid = pod_identity(plan.node, use.pod, found[0])
            started = round(t - found[1], 6)
            yield holder_truth(plan, PresentUse(use=use, pod=name, pod_uid=uid, started_seconds=started))


def _reservation_holders(plan: NodePlan, held: list[PresentUse]) -> Iterator[HolderTruth]:
    """Yield KAI's reservation pods, each with the GPU of a group that has a member."""
    started: dict[int, float] = {}
    for hold in held:
        if is_kai_part(plan, hold.use.claim):
            index = hold.use.gpu.index
            started[index] = min(hold.started_seconds, started.get(index, hold.started_seconds))
    for index, since in started.items():
        gpu = plan.gpus[index]
        number = identities.stable_number(plan.node, "reservation", index)
        name = f"gpu-reservation-{plan.node}-{number:08x}"[:-3]
        yield HolderTruth(
            namespace=RESERVATION_NAMESPACE,
            pod=name,
            container="resource-reservation",
            pod_uid=identities.stable_uuid(plan.node, RESERVATION_NAMESPACE, name),
            device_uuid=gpu.uuid,
            resource=identities.resource_name(plan, gpu, None),
            device_ids=(gpu.uuid,),
            share_ratio=0.0,
            activity_ratio=0.0,
            started_seconds=since,
        )

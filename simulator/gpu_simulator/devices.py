"""The state of one simulated device at an instant: who uses it, how much, and what that adds up to."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gpu_simulator import identities, loads
from gpu_simulator.plan import Claim, ContainerPlan, NodePlan, PodPlan
from gpu_simulator.truth import ProcessTruth

FIRST_PID = 20_000
_PIDS = 4_000_000
_TICKS_PER_SECOND = 100
_UPTIME_SECONDS = 10_000_000
"""How long the node had been up when the scenario began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
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

    use: Use
    pod: str
    """Name of this occurrence of the pod."""
    pod_uid: str
    amount: float
    started_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """One device at an instant; vectors in the order of ``loads.NAMES``."""

    vector: tuple[float, ...] = loads.NOTHING
    integral: tuple[float, ...] = loads.NOTHING
    memory_bytes: int = 0
    processes: tuple[ProcessTruth, ...] = ()
    held: tuple[Held, ...] = ()


def pod_identity(node: str, pod: PodPlan, number: int) -> tuple[str, str]:
    """Name and UID of an occurrence of a pod; both empty outside every pod."""
    if not pod.namespace:
        return "", ""
    name = pod.name if pod.window.every_seconds is None else f"{pod.name}-{number}"
    return name, identities.stable_uuid(node, pod.namespace, name)


def device_state(uses: tuple[Use, ...], plan: NodePlan, t: float) -> DeviceState:
    """What all uses of a device together make of it at ``t``."""
    amounts: list[tuple[float, loads.Mix]] = []
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
        vector=loads.add(amounts),
        integral=loads.add((use.amount_integral(t), use.container.mix) for use in uses),
        memory_bytes=memory,
        processes=tuple(processes),
        held=tuple(held),
    )


def _processes(
    use: Use, plan: NodePlan, identity: tuple[str, str], amount: float, number: int
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


def _peak_together(uses: list[Use]) -> float:
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


def board_uses(plan: NodePlan) -> Mapping[tuple[int, int | None], tuple[Use, ...]]:
    """Everybody's use of every device, with pids given out and activity kept to what a device can do.

    Where the users of a device could together pass 1, all of them are scaled by the same constant: then the
    device's activity is the sum of its users' at every instant, and every integral stays exact.
    """
    claims = [
        (pod, container, claim) for pod in plan.pods for container in pod.containers for claim in container.claims
    ]
    total = sum(len(container.processes) for _, container, _ in claims)
    by_device: dict[tuple[int, int | None], list[Use]] = defaultdict(list)
    first = 0
    for pod, container, claim in claims:
        use = Use(
            pod=pod, container=container, claim=claim, scale=claim.scale, first_process=first, all_processes=total
        )
        by_device[claim.gpu, claim.instance].append(use)
        first += len(container.processes)
    return {key: _fitted(uses) for key, uses in by_device.items()}


def _fitted(uses: list[Use]) -> tuple[Use, ...]:
    factor = 1.0 / max(1.0, _peak_together(uses))
    return tuple(replace(use, scale=use.scale * factor, position=position) for position, use in enumerate(uses))

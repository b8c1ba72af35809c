"""Whether the pods of a scenario file can all have what they ask for: no device twice, no more than a device has."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpu_simulator.models import MIB
from gpu_simulator.plan import Claim, GpuPlan, PodPlan, Sharing, Window
from gpu_simulator.scenario_keys import Section

_WHOLE_PERCENT = 100
_ROUNDING = 1e-9
_Place = tuple[Section, PodPlan]
_Slot = tuple[int, int | None, int]


def check_conflicts(places: Sequence[_Place], gpus: Sequence[GpuPlan]) -> None:
    """Tell of every pod that cannot have its devices beside the pods before it."""
    _check_shared_claims(places)
    _check_whole(places, gpus)
    for gpu in gpus:
        if gpu.sharing is Sharing.FRACTION:
            _check_parts([(section, pod) for section, pod in places if _parts(pod, gpu)], gpu)


def _check_whole(places: Sequence[_Place], gpus: Sequence[GpuPlan]) -> None:
    """Two pods cannot have the same whole device, or the same replica, at the same time, but by one claim."""
    taken: dict[_Slot, list[tuple[PodPlan, str]]] = defaultdict(list)
    for section, pod in places:
        for slot, claim in _slots(pod, gpus):
            others = [
                other
                for other, name in taken[slot]
                if (other is pod or _overlap(other.window, pod.window))
                and not (claim.claim_name and name == claim.claim_name and other.namespace == pod.namespace)
            ]
            if others:
                gpu, instance, number = slot
                what = f"GPU {gpu}" + (f" MIG {instance}" if instance is not None else "")
                what += f" replica {number}" if gpus[gpu].replicas > 1 else ""
                section.problem("devices", f"{what} is held by {others[0].namespace}/{others[0].name} at the same time")
            taken[slot].append((pod, claim.claim_name))


def _slots(pod: PodPlan, gpus: Sequence[GpuPlan]) -> Iterator[tuple[_Slot, Claim]]:
    for container in pod.containers:
        for claim in container.claims:
            if gpus[claim.gpu].sharing is not Sharing.FRACTION and not claim.admin:
                for number in claim.replicas or (0,):
                    yield (claim.gpu, claim.instance, number), claim


def _parts(pod: PodPlan, gpu: GpuPlan) -> list[Claim]:
    return [
        claim
        for container in pod.containers
        for claim in container.claims
        if claim.gpu == gpu.index and not claim.admin
    ]


def _check_parts(places: Sequence[_Place], gpu: GpuPlan) -> None:
    """Parts of one GPU cannot be more than it has at any time; recurring pods count as always there."""
    for number, (section, pod) in enumerate(places):
        before = places[:number]
        # The most is had when somebody comes: at the pod's own start, or at that of one before it.
        for start in {pod.window.start_seconds, *(other.window.start_seconds for _, other in before)}:
            if not _is_there(pod.window, start):
                continue
            there = [other for _, other in [*before, (section, pod)] if _is_there(other.window, start)]
            told = _excess(_distinct(there, gpu), gpu)
            if told:
                section.problem("devices", f"GPU {gpu.index} would have {told} in use at the same time")
                break


def _distinct(pods: Sequence[PodPlan], gpu: GpuPlan) -> list[Claim]:
    """Claims of all pods on a GPU; who names one DRA claim has one part together."""
    found = [(pod.namespace, claim) for pod in pods for claim in _parts(pod, gpu)]
    named = {(namespace, claim.claim_name): claim for namespace, claim in found if claim.claim_name}
    return [*(claim for _, claim in found if not claim.claim_name), *named.values()]


def _check_shared_claims(places: Sequence[_Place]) -> None:
    """Whoever names a DRA claim gets all of its devices, so that all must list the same ones."""
    devices: dict[tuple[str, str], set[Claim]] = {}
    for section, pod in places:
        for container in pod.containers:
            for name in {claim.claim_name for claim in container.claims} - {""}:
                listed = {replace(claim, scale=1.0) for claim in container.claims if claim.claim_name == name}
                if devices.setdefault((pod.namespace, name), listed) != listed:
                    section.problem(
                        "devices", f"has other devices of claim {name!r} than another container; allowed: the same"
                    )


def _excess(claims: Sequence[Claim], gpu: GpuPlan) -> str:
    room = gpu.model.memory_bytes
    memory = sum(claim.memory_bytes or (round(claim.fraction * room) if claim.fraction else room) for claim in claims)
    if memory > room * (1 + _ROUNDING) + len(claims):
        return f"{memory // MIB} of {room // MIB} MiB"
    cores = sum(claim.cores for claim in claims)
    return f"{cores} of {_WHOLE_PERCENT} % of its cores" if cores > _WHOLE_PERCENT else ""


def _is_there(window: Window, t: float) -> bool:
    if window.every_seconds is not None:
        return True
    return window.start_seconds <= t and (window.end_seconds is None or t < window.end_seconds)


def _overlap(one: Window, other: Window) -> bool:
    """Whether two lifetimes can meet; of recurring ones only the plain case of never-ending is sure."""
    if one.every_seconds is not None or other.every_seconds is not None:
        return False

    def ends(window: Window) -> float:
        return float("inf") if window.end_seconds is None else window.end_seconds

    return one.start_seconds < ends(other) and other.start_seconds < ends(one)

"""The pods of a scenario file: devices, activity, processes, and whether all can have what they ask for."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpu_simulator.activity import MIXES, NAMES, IdleAfter, Mix, Ramp, Signal, Sine, Square, Steady, Steps, mix, noise
from gpu_simulator.models import MIB
from gpu_simulator.plan import Claim, ContainerPlan, GpuPlan, IdForm, OwnerPlan, PodPlan, ProcessPlan, Sharing, Window
from gpu_simulator.scenario_keys import Item, Section, close_match

OWNER_APIS: Mapping[str, str] = {
    "ReplicaSet": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "Job": "batch/v1",
    "Node": "v1",
    "PyTorchJob": "kubeflow.org/v1",
    "MPIJob": "kubeflow.org/v1",
    "RayCluster": "ray.io/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "Workflow": "argoproj.io/v1alpha1",
    "SparkApplication": "sparkoperator.k8s.io/v1beta2",
    "VolcanoJob": "batch.volcano.sh/v1alpha1",
}
"""API of an owner that a file gives no ``api`` for."""
_MOST_PROCESSES = 32


def read_pods(top: Section, gpus: Sequence[GpuPlan], ids: IdForm) -> tuple[PodPlan, ...]:
    """Every pod with devices; ``ids`` decides what may be said of them."""
    places: list[tuple[Section, PodPlan]] = []
    for section in top.sections("pods"):
        namespace, name = section.text("namespace"), section.text("name")
        linger = section.number("linger", 0.0, low=0.0)
        finished = section.number("finished", 0.0, low=0.0)
        window = section.window("start", "end", max(linger, finished))
        nested = section.sections("containers")
        parts = nested or (section,)
        names = [part.text("name") if nested else part.text("container", "main") for part in parts]
        containers = tuple(
            _container(part, gpus, ids, f"{namespace}/{name}", container)
            for part, container in zip(parts, names, strict=True)
        )
        for part in nested:
            part.finish()
        pod = PodPlan(
            namespace=namespace,
            name=name,
            window=window,
            containers=containers,
            linger_seconds=linger,
            finished_seconds=finished,
            labels=section.texts("labels"),
            annotations=section.texts("annotations"),
            owner=read_owner(section),
            sidecars=_sidecars(section, names),
        )
        section.finish()
        if ids is IdForm.KAI:
            _check_kai(section, pod, gpus)
        places.append((section, pod))
    check_conflicts(places, gpus)
    return tuple(pod for _, pod in places)


def _sidecars(section: Section, taken: Sequence[str]) -> tuple[str, ...]:
    names = [item.value for item in section.items("sidecars") if isinstance(item.value, str)]
    if len(names) != len(section.items("sidecars")) or len({*names, *taken}) != len(names) + len(taken):
        section.problem(
            "sidecars", "has what is no name, or a name twice; allowed: names of containers, such as [proxy]"
        )
    return tuple(names)


def _check_kai(section: Section, pod: PodPlan, gpus: Sequence[GpuPlan]) -> None:
    """One container of a pod can have parts, and all alike: there is one annotation for them."""
    parts = [
        (container.name, claim.fraction, claim.memory_bytes)
        for container in pod.containers
        for claim in container.claims
        if gpus[claim.gpu].sharing is Sharing.FRACTION
    ]
    if len(set(parts)) > 1:
        section.problem("devices", "are different parts, or of different containers; allowed: parts of the same size")


def read_outside(top: Section, gpus: Sequence[GpuPlan]) -> tuple[PodPlan, ...]:
    """Processes outside every pod."""
    pods: list[PodPlan] = []
    for section in top.sections("outside"):
        comm = section.text("comm")
        window = section.window("start", "end")
        index = section.gpu_index(len(gpus))
        memory = section.integer("memory_mib", 256) * MIB
        container = ContainerPlan(
            name="",
            claims=(Claim(gpu=index),) if index is not None else (),
            signal=read_signal(section, f"outside/{comm}") if section.has("activity") else Steady(level=0.0),
            mix=_mix(section),
            memory_bytes=memory,
            processes=(ProcessPlan(comm=comm[:15], memory_bytes=memory, part=1.0),),
        )
        if index is not None and gpus[index].mig_enabled:
            section.problem("gpu", f"is {index}, which is partitioned; allowed: a whole GPU")
        pods.append(PodPlan(namespace="", name=comm, window=window, containers=(container,)))
        section.finish()
    return tuple(pods)


def _container(section: Section, gpus: Sequence[GpuPlan], ids: IdForm, owner: str, name: str) -> ContainerPlan:
    claims = read_devices(section, gpus, ids)
    memory = section.integer("memory_mib", 0) * MIB
    for claim in claims:
        gpu = gpus[claim.gpu]
        room = gpu.instances[claim.instance].memory_bytes if claim.instance is not None else gpu.model.memory_bytes
        room = min(room, claim.memory_bytes or room)
        if memory > room:
            section.problem("memory_mib", f"is {memory // MIB}; allowed: at most the device's {room // MIB}")
    processes = _processes(section, name, memory)
    return ContainerPlan(
        name=name,
        claims=claims,
        signal=read_signal(section, f"{owner}/{name}"),
        mix=_mix(section),
        memory_bytes=max(memory, sum(process.memory_bytes for process in processes)),
        processes=processes,
        init=section.flag("init", default=False),
    )


def _mix(section: Section) -> Mix:
    kind = section.text("kind", "training")
    if kind not in MIXES:
        section.problem("kind", f"is {kind!r}{close_match(kind, MIXES)}; allowed: {', '.join(MIXES)}")
        kind = "training"
    factors = dict(MIXES[kind])
    part = section.section("mix")
    if part:
        for name in NAMES:
            if part.has(name):
                high = float("inf") if name.endswith("_per_second") else 1.0
                factors[name] = part.number(name, low=0.0, high=high)
        part.finish()
    return mix(**factors)


def _processes(section: Section, name: str, memory_bytes: int) -> tuple[ProcessPlan, ...]:
    """A list of processes, or a number of equal ones; one by default."""
    comm = section.text("comm", "python")[:15]
    listed = section.item("processes")
    if listed is None or isinstance(listed.value, int):
        count = section.integer("processes", 1, high=_MOST_PROCESSES)
        each = memory_bytes // count if count else 0
        return tuple(ProcessPlan(comm=comm, memory_bytes=each, part=1.0 / count) for _ in range(count))
    plans: list[ProcessPlan] = []
    for part in section.sections("processes"):
        plans.append(
            ProcessPlan(
                comm=part.text("comm", name or comm)[:15],
                memory_bytes=part.integer("memory_mib", 0) * MIB,
                part=part.number("part", low=0.0, high=1.0),
            )
        )
        part.finish()
    if plans and abs(sum(plan.part for plan in plans) - 1.0) > 1e-9:  # noqa: PLR2004 - rounding of decimal parts
        section.problem("processes", f"have parts that sum to {sum(p.part for p in plans):g}; allowed: 1 in all")
    return tuple(plans)


_SHORTEST_SECONDS = 0.01
_FORMS = ("steady", "square", "sine", "ramp", "noise", "steps")


def read_signal(section: Section, seed: str) -> Signal:
    """The signal of ``activity``; ``seed`` makes noise differ between containers."""
    item = section.item("activity")
    if item is None or not isinstance(item.value, dict):
        return Steady(level=section.number("activity", low=0.0, high=1.0))
    part = section.section("activity")
    if part is None:
        return Steady(level=0.0)
    forms = [key for key in part.keys() if key in _FORMS]  # noqa: SIM118 - a section is no mapping
    unknown = [key for key in part.keys() if key not in _FORMS and key != "idle_after"]  # noqa: SIM118 - as above
    if len(forms) != 1 or unknown:
        hint = "".join(close_match(key, _FORMS) for key in unknown)
        found = ", ".join([*forms, *unknown]) or "no form"
        section.problem("activity", f"has {found}{hint}; allowed: exactly one of {', '.join(_FORMS)}, and idle_after")
        return Steady(level=0.0)
    signal = _form(part, forms[0], seed)
    after = part.optional_number("idle_after", low=0.0)
    return signal if after is None else IdleAfter(signal=signal, seconds=after)


def _level(section: Section, key: str, default: float | None = None) -> float:
    return section.number(key, default, low=0.0, high=1.0)


def _form(part: Section, form: str, seed: str) -> Signal:
    """One form with its parameters."""
    if form == "steady":
        return Steady(level=_level(part, form))
    if form == "steps":
        return _steps(part)
    section = part.section(form) or part.sub(Item({}, part.line), form)
    signal: Signal
    if form == "noise":
        low = _level(section, "low", 0.0)
        high, slot = section.number("high", low=low, high=1.0), section.number("slot", 5.0, low=_SHORTEST_SECONDS)
        signal = noise(low=low, high=high, slot_seconds=slot, seed=seed)
    elif form == "ramp":
        first, last = _level(section, "first"), _level(section, "last")
        signal = Ramp(first=first, last=last, seconds=section.number("seconds", low=_SHORTEST_SECONDS) or 1.0)
    elif form == "sine":
        mean = _level(section, "mean")
        amplitude = section.number("amplitude", low=0.0, high=min(mean, 1.0 - mean))
        signal = Sine(mean=mean, amplitude=amplitude, **_times(section))
    else:
        high, low, duty = _level(section, "high"), _level(section, "low", 0.0), _level(section, "duty", 0.5)
        signal = Square(high=high, low=low, duty=duty, **_times(section))
    section.finish()
    return signal


def _times(section: Section) -> dict[str, float]:
    period = section.number("period", low=_SHORTEST_SECONDS) or 1.0
    return {"period_seconds": period, "phase_seconds": section.number("phase", 0.0, low=0.0)}


def _steps(part: Section) -> Signal:
    points: list[tuple[float, float]] = []
    for step in part.sections("steps"):
        at = step.number("at", low=points[-1][0] if points else 0.0)
        points.append((at, _level(step, "level")))
        step.finish()
    if not points:
        part.problem("steps", "is empty; allowed: a list such as [{at: 0, level: 0.2}, {at: 60, level: 1}]")
    return Steps(points=tuple(points) or ((0.0, 0.0),))


_LEAST_FRACTION = 0.001
_WHOLE_PERCENT = 100
_PLACEHOLDERS = (IdForm.HAMI, IdForm.VOLCANO)


def read_devices(section: Section, gpus: Sequence[GpuPlan], ids: IdForm) -> tuple[Claim, ...]:
    """Every device of a container; wrong ones are told and left out."""
    found = section.sections("devices")
    if not found:
        section.problem("devices", "is missing or empty; allowed: a list such as [{gpu: 0}, {gpu: 1, mig: 2}]")
    return tuple(claim for part in found if (claim := _claim(part, gpus, ids)))


def _claim(section: Section, gpus: Sequence[GpuPlan], ids: IdForm) -> Claim | None:
    index = section.gpu_index(len(gpus))
    scale = section.number("scale", 1.0, low=0.0, high=1.0)
    position = section.integer("mig") if section.has("mig") else None
    replicas = tuple(
        item.value for item in section.items("replicas") if isinstance(item.value, int) and item.value >= 0
    )
    if len(replicas) != len(section.items("replicas")) or len(set(replicas)) != len(replicas):
        section.problem("replicas", "has a value that is no replica number, or one twice; allowed: such as [0, 1]")
    gpu = None if index is None else gpus[index]
    claim_name, admin, extended = _dra(section, ids)
    memory_bytes, cores, fraction = _part(section, gpu, ids)
    section.finish()
    if index is None or gpu is None:
        return None
    if not (_check_mig(section, gpu, position) and _check_replicas(section, gpu, replicas)):
        return None
    return Claim(
        gpu=index,
        instance=position,
        replicas=replicas,
        scale=scale,
        memory_bytes=memory_bytes,
        cores=cores,
        fraction=fraction,
        claim_name=claim_name,
        admin=admin,
        extended=extended,
    )


def _part(section: Section, gpu: GpuPlan | None, ids: IdForm) -> tuple[int | None, int, float | None]:
    """The declared part: memory, percent of the cores, fraction."""
    divided = gpu is not None and gpu.sharing is Sharing.FRACTION
    allowed = {
        "memory_mib": divided,
        "cores": divided and ids in _PLACEHOLDERS,
        "fraction": divided and ids is IdForm.KAI,
    }
    for key, right in allowed.items():
        if section.has(key) and not right:
            section.problem(key, f"means nothing with this plugin and this GPU; allowed: {_allowed(divided, ids)}")
    if not divided or gpu is None:
        return None, 0, None
    room = gpu.model.memory_bytes // MIB
    memory = section.integer("memory_mib", low=1, high=room) * MIB if section.has("memory_mib") else None
    cores = section.integer("cores", 0, high=_WHOLE_PERCENT) if allowed["cores"] else 0
    fraction = None
    if allowed["fraction"] and section.has("fraction"):
        fraction = section.number("fraction", low=_LEAST_FRACTION, high=1.0)
    if ids is IdForm.KAI and (memory is None) == (fraction is None):
        section.problem("fraction", f"or memory_mib must be given; allowed: {_allowed(divided, ids)}")
    if ids is IdForm.DRA and memory is None and not section.flag("admin", default=False):
        section.problem("memory_mib", f"is missing; allowed: {_allowed(divided, ids)}")
    return memory, cores, fraction


def _allowed(divided: bool, ids: IdForm) -> str:  # noqa: FBT001 - one of two sentences
    if not divided:
        return "only on a GPU with sharing: {strategy: fraction}"
    if ids is IdForm.KAI:
        return "one of fraction (0.001 to 1) and memory_mib"
    return "memory_mib and cores" if ids in _PLACEHOLDERS else "memory_mib"


def _dra(section: Section, ids: IdForm) -> tuple[str, bool, bool]:
    for key in ("claim", "admin", "extended"):
        if section.has(key) and ids is not IdForm.DRA:
            section.problem(key, f"means nothing with plugin ids {ids.value}; allowed: only with dra")
    claim = section.text("claim") if section.has("claim") else ""
    admin, extended = section.flag("admin", default=False), section.flag("extended", default=False)
    if extended and (claim or admin):
        section.problem("extended", "is a claim of its own; allowed: without claim and admin")
    return claim, admin, extended


def _check_mig(section: Section, gpu: GpuPlan, position: int | None) -> bool:
    if gpu.mig_enabled and (position is None or position >= len(gpu.instances)):
        layout = ", ".join(f"{n} ({plan.profile})" for n, plan in enumerate(gpu.instances)) or "none: no instances"
        told = "is missing" if position is None else f"is {position}, which is not there"
        section.problem("mig", f"{told}, and GPU {gpu.index} is partitioned; allowed: {layout}")
        return False
    if not gpu.mig_enabled and position is not None:
        section.problem("mig", f"is {position}, and GPU {gpu.index} is not partitioned; allowed: leave it out")
        return False
    return True


def _check_replicas(section: Section, gpu: GpuPlan, replicas: tuple[int, ...]) -> bool:
    if gpu.replicas == 1 and replicas:
        section.problem("replicas", f"is given, and GPU {gpu.index} is not shared; allowed: leave it out")
        return False
    if gpu.replicas > 1 and not replicas:
        section.problem("replicas", f"is missing, and GPU {gpu.index} is shared; allowed: 0 to {gpu.replicas - 1}")
        return False
    if any(number >= gpu.replicas for number in replicas):
        section.problem("replicas", f"has {max(replicas)}; allowed on GPU {gpu.index}: 0 to {gpu.replicas - 1}")
        return False
    return True


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
            _check_parts([(section, pod) for section, pod in places if _claims_on(pod, gpu)], gpu)


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


def _claims_on(pod: PodPlan, gpu: GpuPlan) -> list[Claim]:
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
    found = [(pod.namespace, claim) for pod in pods for claim in _claims_on(pod, gpu)]
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


def read_owner(section: Section) -> OwnerPlan | None:
    """``owner``: kind and name of a pod's controller, and its API where that does not follow from the kind."""
    part = section.section("owner")
    if part is None:
        return None
    kind, name = part.text("kind"), part.text("name")
    default = OWNER_APIS.get(kind)
    if kind and default is None and not part.has("api"):
        hint = close_match(kind, OWNER_APIS)
        part.problem("api", f"is missing, and {kind!r} has no usual one{hint}; allowed: a text such as apps/v1")
        default = ""
    api = part.text("api", default)
    part.finish()
    return OwnerPlan(kind=kind, name=name, api=api)

"""The ``pods`` and ``outside`` parts of a scenario file: who holds which device, and what it does there."""

from collections import defaultdict
from collections.abc import Sequence

from exporter.simulator.loads import MIXES, NAMES, Mix, mix
from exporter.simulator.models import MIB
from exporter.simulator.plan import Claim, ContainerPlan, GpuPlan, PodPlan, ProcessPlan, Window
from exporter.simulator.profiles import Steady
from exporter.simulator.scenario_activity import read_signal
from exporter.simulator.scenario_faults import read_gpu_index
from exporter.simulator.scenario_keys import Section, close_match

_MOST_PROCESSES = 32


def read_pods(top: Section, gpus: Sequence[GpuPlan]) -> tuple[PodPlan, ...]:
    """Every pod with devices."""
    pods: list[PodPlan] = []
    places: list[tuple[Section, PodPlan]] = []
    for section in top.sections("pods"):
        namespace, name = section.text("namespace"), section.text("name")
        linger = section.number("linger", 0.0, low=0.0)
        window = _lifetime(section, linger)
        nested = section.sections("containers")
        parts = nested or (section,)
        names = [part.text("name") if nested else part.text("container", "main") for part in parts]
        containers = tuple(
            _container(part, gpus, f"{namespace}/{name}", container)
            for part, container in zip(parts, names, strict=True)
        )
        for part in nested:
            part.finish()
        section.finish()
        pod = PodPlan(namespace=namespace, name=name, window=window, containers=containers, linger_seconds=linger)
        places.append((section, pod))
        pods.append(pod)
    _check_conflicts(places, gpus)
    return tuple(pods)


def read_outside(top: Section, gpus: Sequence[GpuPlan]) -> tuple[PodPlan, ...]:
    """Processes outside every pod."""
    pods: list[PodPlan] = []
    for section in top.sections("outside"):
        comm = section.text("comm")
        window = _lifetime(section, 0.0)
        index = read_gpu_index(section, len(gpus))
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


def _lifetime(section: Section, linger: float) -> Window:
    start = section.number("start", 0.0)
    end = section.optional_number("end", low=start)
    every = section.optional_number("every", low=0.001)
    if every is not None and (end is None or end - start + linger > every):
        section.problem("every", f"is {every:g}; allowed: at least what it lasts, with 'end' given")
        every = None
    return Window(start_seconds=start, end_seconds=end, every_seconds=every)


def _container(section: Section, gpus: Sequence[GpuPlan], owner: str, name: str) -> ContainerPlan:
    claims = tuple(claim for part in _device_sections(section) if (claim := _claim(part, gpus)))
    memory = section.integer("memory_mib", 0) * MIB
    for claim in claims:
        gpu = gpus[claim.gpu]
        room = gpu.instances[claim.instance].memory_bytes if claim.instance is not None else gpu.model.memory_bytes
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
    )


def _device_sections(section: Section) -> tuple[Section, ...]:
    found = section.sections("devices")
    if not found:
        section.problem("devices", "is missing or empty; allowed: a list such as [{gpu: 0}, {gpu: 1, mig: 2}]")
    return found


def _claim(section: Section, gpus: Sequence[GpuPlan]) -> Claim | None:
    index = read_gpu_index(section, len(gpus))
    scale = section.number("scale", 1.0, low=0.0, high=1.0)
    position = section.integer("mig") if section.has("mig") else None
    replicas = tuple(
        item.value for item in section.items("replicas") if isinstance(item.value, int) and item.value >= 0
    )
    if len(replicas) != len(section.items("replicas")) or len(set(replicas)) != len(replicas):
        section.problem("replicas", "has a value that is no replica number, or one twice; allowed: such as [0, 1]")
    section.finish()
    if index is None:
        return None
    gpu = gpus[index]
    right = _check_mig(section, gpu, position) and _check_replicas(section, gpu, replicas)
    return Claim(gpu=index, instance=position, replicas=replicas, scale=scale) if right else None


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


def _check_conflicts(places: Sequence[tuple[Section, PodPlan]], gpus: Sequence[GpuPlan]) -> None:
    """Two pods cannot have the same whole device, or the same replica, at the same time."""
    taken: dict[tuple[int, int | None, int], list[PodPlan]] = defaultdict(list)
    for section, pod in places:
        for claim in (claim for container in pod.containers for claim in container.claims):
            for number in claim.replicas or (0,):
                slot = (claim.gpu, claim.instance, number)
                others = [other for other in taken[slot] if other is pod or _overlap(other.window, pod.window)]
                if others:
                    what = f"GPU {claim.gpu}" + (f" MIG {claim.instance}" if claim.instance is not None else "")
                    what += f" replica {number}" if gpus[claim.gpu].replicas > 1 else ""
                    section.problem(
                        "devices", f"{what} is held by {others[0].namespace}/{others[0].name} at the same time"
                    )
                taken[slot].append(pod)


def _overlap(one: Window, other: Window) -> bool:
    """Whether two lifetimes can meet; of recurring ones only the plain case of never-ending is sure."""
    if one.every_seconds is not None or other.every_seconds is not None:
        return False

    def ends(window: Window) -> float:
        return float("inf") if window.end_seconds is None else window.end_seconds

    return one.start_seconds < ends(other) and other.start_seconds < ends(one)

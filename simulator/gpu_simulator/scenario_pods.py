"""The ``pods`` and ``outside`` parts of a scenario file: who holds which device, and what it does there."""

from collections.abc import Sequence

from gpu_simulator.loads import MIXES, NAMES, Mix, mix
from gpu_simulator.models import MIB
from gpu_simulator.plan import Claim, ContainerPlan, GpuPlan, IdForm, PodPlan, ProcessPlan, Sharing, Window
from gpu_simulator.profiles import Steady
from gpu_simulator.scenario_activity import read_signal
from gpu_simulator.scenario_conflicts import check_conflicts
from gpu_simulator.scenario_devices import read_devices
from gpu_simulator.scenario_faults import read_gpu_index
from gpu_simulator.scenario_keys import Section, close_match
from gpu_simulator.scenario_metadata import read_owner, read_texts

_MOST_PROCESSES = 32


def read_pods(top: Section, gpus: Sequence[GpuPlan], ids: IdForm) -> tuple[PodPlan, ...]:
    """Every pod with devices; ``ids`` decides what may be said of them."""
    places: list[tuple[Section, PodPlan]] = []
    for section in top.sections("pods"):
        namespace, name = section.text("namespace"), section.text("name")
        linger = section.number("linger", 0.0, low=0.0)
        finished = section.number("finished", 0.0, low=0.0)
        window = _lifetime(section, max(linger, finished))
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
            labels=read_texts(section, "labels"),
            annotations=read_texts(section, "annotations"),
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

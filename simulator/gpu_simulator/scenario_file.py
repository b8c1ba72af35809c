"""Parses scenario files: from YAML to a checked plan, with all mistakes by file, line and key."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from exporter.errors import ConfigError, expected
from exporter.model.fields import Field
from gpu_simulator import identities
from gpu_simulator.activity import (
    MIXES,
    NAMES,
    Signal,
    Vector,
    idle_after,
    mix,
    noise,
    ramp,
    sine,
    square,
    steady,
    steps,
)
from gpu_simulator.models import MIB, MODELS, LayoutError, place
from gpu_simulator.plan import (
    WHOLE_PERCENT,
    Claim,
    ContainerPlan,
    DraMig,
    DraVersion,
    FaultPlan,
    GpuPlan,
    IdForm,
    MigStrategy,
    NodePlan,
    Override,
    Plugin,
    PodPlan,
    ProcessPlan,
    Runtime,
    ScenarioWindow,
    Sharing,
    XidPlan,
    conflicts,
)
from gpu_simulator.scenario_keys import Problems, Section, read_tree
from gpu_simulator.truth import GPU_FAULTS, DcgmTruth, Fault, MigTruth, ModelSpec

MOST_OTHER_PODS = 250
MOST_REPLICAS = 64
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
"""Default API of an owner by kind."""
_DCGM_VERSION = re.compile(r"(?:3\.[3-9]|4\.\d{1,2})\.\d{1,2}")
_IDENTITIES = {
    "uuid": re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "pci": re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]"),
    "serial": re.compile(r"\d{13}"),
}
_SPLITS = 10
"""Default number of HAMi's placeholders of a GPU."""
_PLACEHOLDERS = (IdForm.HAMI, IdForm.VOLCANO)
_WITH_FRACTIONS = (*_PLACEHOLDERS, IdForm.KAI, IdForm.DRA)
_MOST_OF_A_KIND = 16
_MOST_PROCESSES = 32
_FORMS = ("steady", "square", "sine", "ramp", "noise", "steps")
_SHORTEST_SECONDS = 0.01
_LEAST_FRACTION = 0.001
_ROUNDING = 1e-9
_WITH_SECONDS: Mapping[Fault, float | None] = {
    Fault.SLOW: None,
    Fault.KUBELET_PARTIAL: 0.0,
    Fault.API_SLOW: None,
    Fault.API_TOO_MANY: 1.0,
    Fault.ENGINE_SLOW: None,
}
"""Faults with a parameter, and its default; ``None``: the parameter is required."""


def parse(text: str, source: str, *, is_ours: bool = False) -> NodePlan:
    """Return the plan of a scenario file (format: docs/scenarios.md).

    Args:
        text: YAML.
        source: File name from the user, for messages; its stem is the name of the scenario.
        is_ours: Whether the file is part of the package.

    Raises:
        ConfigError: The file has mistakes; one line for each: file, line, key, problem and allowed values.
    """
    problems = Problems(source)
    item = read_tree(text, problems, is_ours=is_ours)
    plan = _plan(Section(item, "", problems), problems, source) if item else None
    for section in problems.sections:
        section.finish()
    if problems.lines or plan is None:
        raise ConfigError(*dict.fromkeys(problems.lines))
    return plan


def _plan(top: Section, problems: Problems, source: str) -> NodePlan:
    node, plugin = top.text("node"), _plugin(top.section("plugin"))
    gpus: list[GpuPlan] = []
    for section in top.sections("gpus"):
        count = section.integer("count", 1, low=1, high=_MOST_OF_A_KIND)
        gpus += [_gpu(section, node, len(gpus) + n, plugin.ids, single=count == 1) for n in range(count)]
    if not gpus and not problems.lines:
        top.problem("gpus", "is missing or empty; allowed: a list of boards, each with a model")
    pods = _pods(top, gpus, plugin.ids)
    return NodePlan(
        name=source.rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml"),
        node=node,
        plugin=plugin,
        gpus=tuple(gpus),
        description=top.text("description", "no description"),
        driver_version=top.text("driver", "590.48.01"),
        runtime=top.choice("runtime", Runtime.CONTAINERD),
        pods=(*pods, *_outside(top, gpus)),
        faults=tuple(_fault(section, len(gpus)) for section in top.sections("faults")),
        xids=_xids(top, len(gpus)),
        other_pods=top.integer("other_pods", 0, high=MOST_OTHER_PODS),
        namespaces=_namespaces(top.section("namespaces")),
        node_labels=top.texts("node_labels"),
        dra_version=top.choice("dra_version", DraVersion.V1).value
        if top.has("dra_version") or plugin.ids is IdForm.DRA
        else "",
        dcgm=_dcgm(top.section("dcgm")),
    )


def _plugin(section: Section) -> Plugin:
    plugin = Plugin(
        ids=section.choice("ids", IdForm.UUID),
        mig_strategy=section.choice("mig_strategy", MigStrategy.MIXED),
        rename_shared=section.flag("rename_shared"),
        dra_mig=section.choice("dra_mig", DraMig.STATIC),
    )
    if section.has("dra_mig") and plugin.ids is not IdForm.DRA:
        section.problem("dra_mig", f"has no effect with ids {plugin.ids.value}; allowed: only with dra")
    return plugin


def _dcgm(section: Section) -> DcgmTruth:
    version = section.text("version", DcgmTruth().version)
    if not _DCGM_VERSION.fullmatch(version):
        section.problem("version", f"is {version!r}; allowed: three numbers, from 3.3.0 to 4.99.99")
    return DcgmTruth(
        version=version, profiling_module=not section.has("profiling_module") or section.flag("profiling_module")
    )


def _namespaces(section: Section) -> dict[str, Mapping[str, str]]:
    """Return labels by namespace."""
    for name in section.names():
        if not section.has(name):
            section.problem(name, "is empty; allowed: such as {labels: {team: ml}}")
    return {name: section.section(name).texts("labels") for name in section.names() if section.has(name)}


def _gpu(section: Section, node: str, index: int, ids: IdForm, *, single: bool) -> GpuPlan:
    key = section.text("model")
    if key and key not in MODELS:
        section.problem("model", f"is {key!r}{expected(key, MODELS, ', '.join(MODELS))}")
    model = MODELS.get(key, MODELS["h100"])
    identity = {
        "uuid": "GPU-" + identities.stable_uuid(node, "gpu", index),
        "pci": identities.pci_bus_id(index),
        "serial": f"16{identities.stable_number(node, 'serial', index) % 10**11:011d}",
    }
    for name, default in identity.items():
        if section.has(name) and not single:
            section.problem(name, "cannot be the same for several boards; allowed: only with count 1")
        elif not _IDENTITIES[name].fullmatch(value := section.text(name, default)):
            section.problem(name, f"is {value!r}; allowed: the form of {default}")
        else:
            identity[name] = value
    sharing, replicas = _sharing(section, ids)
    divided = sharing is Sharing.FRACTION
    return GpuPlan(
        index=index,
        minor=section.integer("minor", index, high=255) if single else index,
        uuid=identity["uuid"],
        pci_bus_id=identity["pci"],
        serial=identity["serial"],
        model=model,
        mig_enabled=section.has("mig"),
        instances=_instances(section, model, identity["uuid"]),
        sharing=sharing,
        replicas=1 if divided else replicas,
        splits=replicas if divided else 1,
        overrides=tuple(_override(part) for part in section.sections("overrides")),
    )


def _sharing(section: Section, ids: IdForm) -> tuple[Sharing, int]:
    if not section.has("sharing"):
        return Sharing.NONE, 1
    part, partitioned = section.section("sharing"), section.has("mig")
    strategy = part.choice("strategy", Sharing.TIME_SLICING)
    replicas = part.integer("replicas", _SPLITS if strategy is Sharing.FRACTION else None, low=2, high=MOST_REPLICAS)
    if strategy is Sharing.FRACTION and (partitioned or ids not in _WITH_FRACTIONS):
        where = "on a partitioned GPU" if partitioned else f"with plugin ids {ids.value}"
        part.problem(
            "strategy", f"is 'fraction' {where}; allowed: a whole GPU, and plugin ids {', '.join(_WITH_FRACTIONS)}"
        )
        return Sharing.NONE, 1
    if strategy is Sharing.MPS and partitioned:
        part.problem("strategy", "is 'mps' on a partitioned GPU; allowed: time-slicing, or no MIG")
    return strategy, replicas


def _instances(section: Section, model: ModelSpec, uuid: str) -> tuple[MigTruth, ...]:
    profiles = [item.value for item in section.items("mig") if isinstance(item.value, str)]
    for item in section.items("mig"):
        if item.value not in profiles:
            section.problem("mig", f"has {item.value!r}; allowed: profile names, such as 1g.10gb")
    if section.has("mig") and not model.mig_profiles:
        section.problem("mig", f"is not possible with {model.name}, which has no MIG; remove it")
        return ()
    try:
        placed = place(model, profiles)
    except LayoutError as error:
        section.problem("mig", str(error))
        return ()
    return tuple(
        replace(one, uuid="MIG-" + identities.stable_uuid(uuid, "mig", number, one.profile))
        for number, one in enumerate(placed)
    )


def _override(section: Section) -> Override:
    start = section.number("from", 0.0)
    window = ScenarioWindow(start_seconds=start, end_seconds=section.optional_number("to", low=start))
    if not section.has("values"):
        section.problem("values", "is missing; allowed: field names with a number, or null for not supported")
    part, values = section.section("values"), dict[Field, int | float | None]()
    for key in part.names():
        if key not in Field.__members__:
            part.problem(key, f"is not a field{expected(key, Field.__members__, 'names of exporter.model.Field')}")
        elif (item := part.item(key)) is None:
            values[Field[key]] = None
        else:
            is_float = isinstance(item.value, float)
            values[Field[key]] = part.number(key) if is_float else part.integer(key, low=-(2**53))
    return Override(window=window, values=values)


def _fault(section: Section, gpus: int) -> FaultPlan:
    kind = section.choice("kind", Fault.SLOW if section.has("seconds") else Fault.GPU_LOST)
    if not section.has("kind"):
        section.problem("kind", f"is missing; allowed: {', '.join(Fault)}")
    gpu = None
    if kind in GPU_FAULTS or (kind is Fault.HANG and section.has("gpu")):
        gpu = section.gpu_index(gpus)
    elif section.has("gpu"):
        section.problem("gpu", f"has no effect with {kind.value}, which affects the whole node; remove it")
    seconds = section.number("seconds", _WITH_SECONDS[kind], low=0.0) if kind in _WITH_SECONDS else 0.0
    return FaultPlan(kind=kind, gpu=gpu, window=section.window("from", "to"), parameter=seconds)


def _xids(top: Section, gpus: int) -> tuple[XidPlan, ...]:
    found = [
        (
            section.gpu_index(gpus),
            section.integer("code", low=1, high=999),
            section.number("at", low=0.0),
            section.optional_number("every", low=0.001),
        )
        for section in top.sections("xids")
    ]
    return tuple(
        XidPlan(gpu=gpu, code=code, at_seconds=at, every_seconds=every)
        for gpu, code, at, every in found
        if gpu is not None
    )


def _pods(top: Section, gpus: Sequence[GpuPlan], ids: IdForm) -> tuple[PodPlan, ...]:
    """Return the pods with devices; their keys depend on ``ids``."""
    pods: list[PodPlan] = []
    for section in top.sections("pods"):
        namespace, name = section.text("namespace"), section.text("name")
        linger, finished = section.number("linger", 0.0, low=0.0), section.number("finished", 0.0, low=0.0)
        window = section.window("start", "end", max(linger, finished))
        nested = section.sections("containers")
        parts = nested or (section,)
        names = [part.text("name") if nested else part.text("container", "main") for part in parts]
        pod = PodPlan(
            namespace=namespace,
            name=name,
            window=window,
            containers=tuple(
                _container(part, gpus, ids, f"{namespace}/{name}", container)
                for part, container in zip(parts, names, strict=True)
            ),
            linger_seconds=linger,
            finished_seconds=finished,
            labels=section.texts("labels"),
            annotations=section.texts("annotations"),
            **_owner(section),
            sidecars=_sidecars(section, names),
        )
        pods.append(pod)
    for number, told in conflicts(pods, gpus, ids):
        top.sections("pods")[number].problem("devices", told)
    return tuple(pods)


def _owner(section: Section) -> dict[str, str]:
    """Return kind, name and API of the controller of a pod."""
    if not section.has("owner"):
        return {}
    part = section.section("owner")
    kind, name = part.text("kind"), part.text("name")
    default = OWNER_APIS.get(kind)
    if kind and default is None and not part.has("api"):
        fix = expected(kind, OWNER_APIS, "a text such as apps/v1")
        part.problem("api", f"is missing, and {kind!r} has no default{fix}")
        default = ""
    return {"owner_kind": kind, "owner_name": name, "owner_api": part.text("api", default)}


def _sidecars(section: Section, taken: Sequence[str]) -> tuple[str, ...]:
    items = section.items("sidecars")
    names = [item.value for item in items if isinstance(item.value, str)]
    if len(names) != len(items) or len({*names, *taken}) != len(names) + len(taken):
        section.problem("sidecars", "has an invalid or repeated name; allowed: names of containers, such as [proxy]")
    return tuple(names)


def _outside(top: Section, gpus: Sequence[GpuPlan]) -> Iterator[PodPlan]:
    """Yield processes outside pods."""
    for section in top.sections("outside"):
        comm, window, index = section.text("comm"), section.window("start", "end"), section.gpu_index(len(gpus))
        memory = section.integer("memory_mib", 256) * MIB
        container = ContainerPlan(
            name="",
            claims=(Claim(gpu=index),) if index is not None else (),
            signal=_signal(section, f"outside/{comm}") if section.has("activity") else steady(0.0),
            mix=_mix(section),
            memory_bytes=memory,
            processes=(ProcessPlan(comm=comm[:15], memory_bytes=memory, part=1.0),),
        )
        if index is not None and gpus[index].mig_enabled:
            section.problem("gpu", f"is {index}, which is partitioned; allowed: a whole GPU")
        yield PodPlan(namespace="", name=comm, window=window, containers=(container,))


def _container(section: Section, gpus: Sequence[GpuPlan], ids: IdForm, owner: str, name: str) -> ContainerPlan:
    devices = section.sections("devices")
    if not devices:
        section.problem("devices", "is missing or empty; allowed: a list such as [{gpu: 0}, {gpu: 1, mig: 2}]")
    claims = tuple(claim for part in devices if (claim := _claim(part, gpus, ids)))
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
        signal=_signal(section, f"{owner}/{name}"),
        mix=_mix(section),
        memory_bytes=max(memory, sum(process.memory_bytes for process in processes)),
        processes=processes,
        init=section.flag("init"),
    )


def _mix(section: Section) -> Vector:
    kind = section.text("kind", "training")
    if kind not in MIXES:
        section.problem("kind", f"is {kind!r}{expected(kind, MIXES, ', '.join(MIXES))}")
    part, factors = section.section("mix"), dict(MIXES.get(kind, {}))
    for name in NAMES:
        if part.has(name):
            factors[name] = part.number(name, low=0.0, high=float("inf") if name.endswith("_per_second") else 1.0)
    return mix(**factors)


def _processes(section: Section, name: str, memory_bytes: int) -> tuple[ProcessPlan, ...]:
    """Return a list of processes, or a number of equal processes; default: one."""
    comm = section.text("comm", "python")[:15]
    listed = section.item("processes")
    if listed is None or isinstance(listed.value, int):
        count = section.integer("processes", 1, high=_MOST_PROCESSES)
        each = memory_bytes // count if count else 0
        return tuple(ProcessPlan(comm=comm, memory_bytes=each, part=1.0 / count) for _ in range(count))
    plans = tuple(
        ProcessPlan(
            comm=part.text("comm", name or comm)[:15],
            memory_bytes=part.integer("memory_mib", 0) * MIB,
            part=part.number("part", low=0.0, high=1.0),
        )
        for part in section.sections("processes")
    )
    total = sum(plan.part for plan in plans)
    if plans and abs(total - 1.0) > _ROUNDING:
        section.problem("processes", f"have parts that sum to {total:g}; allowed: 1 in all")
    return plans


def _signal(section: Section, seed: str) -> Signal:
    """Return the signal of ``activity``; with ``seed``, containers have different noise."""
    item = section.item("activity")
    if item is None or not isinstance(item.value, dict):
        return steady(section.number("activity", low=0.0, high=1.0))
    part = section.section("activity")
    forms = [key for key in part.names() if key in _FORMS]
    unknown = [key for key in part.names() if key not in _FORMS and key != "idle_after"]
    if len(forms) != 1 or unknown:
        found = ", ".join([*forms, *unknown]) or "no form"
        fix = expected(next(iter(unknown), ""), _FORMS, f"exactly one of {', '.join(_FORMS)}, and idle_after")
        section.problem("activity", f"has {found}{fix}")
        return steady(0.0)
    signal = _form(part, forms[0], seed)
    after = part.optional_number("idle_after", low=0.0)
    return signal if after is None else idle_after(signal, after)


def _form(part: Section, form: str, seed: str) -> Signal:
    """Return a form with its parameters."""
    if form == "steady":
        return steady(part.number(form, low=0.0, high=1.0))
    if form == "steps":
        return _steps(part)
    section = part.section(form)

    def level(key: str, default: float | None = None) -> float:
        return section.number(key, default, low=0.0, high=1.0)

    def period() -> dict[str, float]:
        seconds = section.number("period", low=_SHORTEST_SECONDS)
        return {"period_seconds": seconds, "phase_seconds": section.number("phase", 0.0, low=0.0)}

    match form:
        case "noise":
            low = level("low", 0.0)
            high, slot = section.number("high", low=low, high=1.0), section.number("slot", 5.0, low=_SHORTEST_SECONDS)
            return noise(low=low, high=high, slot_seconds=slot, seed=seed)
        case "ramp":
            first, last = level("first"), level("last")
            return ramp(first=first, last=last, seconds=section.number("seconds", low=_SHORTEST_SECONDS))
        case "sine":
            mean = level("mean")
            amplitude = section.number("amplitude", low=0.0, high=min(mean, 1.0 - mean))
            return sine(mean=mean, amplitude=amplitude, **period())
    return square(high=level("high"), low=level("low", 0.0), duty=level("duty", 0.5), **period())


def _steps(part: Section) -> Signal:
    points: list[tuple[float, float]] = []
    for step in part.sections("steps"):
        at = step.number("at", low=points[-1][0] if points else 0.0)
        points.append((at, step.number("level", low=0.0, high=1.0)))
    if not points:
        part.problem("steps", "is empty; allowed: a list such as [{at: 0, level: 0.2}, {at: 60, level: 1}]")
    return steps(points or [(0.0, 0.0)])


def _claim(section: Section, gpus: Sequence[GpuPlan], ids: IdForm) -> Claim | None:
    """Return a device of a container; ``None`` after a mistake."""
    index = section.gpu_index(len(gpus))
    scale = section.number("scale", 1.0, low=0.0, high=1.0)
    position = section.integer("mig") if section.has("mig") else None
    items = section.items("replicas")
    replicas = tuple(item.value for item in items if isinstance(item.value, int) and item.value >= 0)
    if len(set(replicas)) != len(items):
        section.problem("replicas", "has an invalid or repeated replica number; allowed: such as [0, 1]")
    gpu = None if index is None else gpus[index]
    claim_name, admin, extended = _dra(section, ids)
    memory_bytes, cores, fraction = _part(section, gpu, ids)
    problem = _misplaced(gpu, position, replicas) if gpu else None
    if problem:
        section.problem(*problem)
    if gpu is None or problem:
        return None
    return Claim(
        gpu=gpu.index,
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
    """Return the declared part: memory, percentage of the cores, fraction."""
    divided = gpu is not None and gpu.sharing is Sharing.FRACTION
    usual = "memory_mib and cores" if ids in _PLACEHOLDERS else "memory_mib"
    usual = "one of fraction (0.001 to 1) and memory_mib" if ids is IdForm.KAI else usual
    told = usual if divided else "only on a GPU with sharing: {strategy: fraction}"
    has_cores, has_fraction = divided and ids in _PLACEHOLDERS, divided and ids is IdForm.KAI
    for key, right in (("memory_mib", divided), ("cores", has_cores), ("fraction", has_fraction)):
        if section.has(key) and not right:
            section.problem(key, f"has no effect with this plugin and this GPU; allowed: {told}")
    if not divided or gpu is None:
        return None, 0, None
    room = gpu.model.memory_bytes // MIB
    memory = section.integer("memory_mib", low=1, high=room) * MIB if section.has("memory_mib") else None
    cores = section.integer("cores", 0, high=WHOLE_PERCENT) if has_cores else 0
    fraction = None
    if has_fraction and section.has("fraction"):
        fraction = section.number("fraction", low=_LEAST_FRACTION, high=1.0)
    if ids is IdForm.KAI and (memory is None) == (fraction is None):
        section.problem("fraction", f"or memory_mib is required; allowed: {told}")
    if ids is IdForm.DRA and memory is None and not section.flag("admin"):
        section.problem("memory_mib", f"is missing; allowed: {told}")
    return memory, cores, fraction


def _dra(section: Section, ids: IdForm) -> tuple[str, bool, bool]:
    """Return the name of a shared claim, whether it monitors, and whether it is for an extended resource."""
    for key in ("claim", "admin", "extended"):
        if section.has(key) and ids is not IdForm.DRA:
            section.problem(key, f"has no effect with plugin ids {ids.value}; allowed: only with dra")
    claim = section.text("claim") if section.has("claim") else ""
    admin, extended = section.flag("admin"), section.flag("extended")
    if extended and (claim or admin):
        section.problem("extended", "creates its own claim; allowed: without claim and admin")
    return claim, admin, extended


def _misplaced(gpu: GpuPlan, position: int | None, replicas: tuple[int, ...]) -> tuple[str, str] | None:
    """Return key and problem of a place that the GPU does not have."""
    if gpu.mig_enabled and (position is None or position >= len(gpu.instances)):
        layout = ", ".join(f"{n} ({plan.profile})" for n, plan in enumerate(gpu.instances)) or "none: no instances"
        told = "is missing" if position is None else f"is {position}, which does not exist"
        return "mig", f"{told}, but GPU {gpu.index} is partitioned; allowed: {layout}"
    if not gpu.mig_enabled and position is not None:
        return "mig", f"is {position}, but GPU {gpu.index} is not partitioned; remove it"
    if gpu.replicas == 1 and replicas:
        return "replicas", f"is set, but GPU {gpu.index} is not shared; remove it"
    if gpu.replicas > 1 and not replicas:
        return "replicas", f"is missing, but GPU {gpu.index} is shared; allowed: 0 to {gpu.replicas - 1}"
    if any(number >= gpu.replicas for number in replicas):
        return "replicas", f"has {max(replicas)}; allowed on GPU {gpu.index}: 0 to {gpu.replicas - 1}"
    return None

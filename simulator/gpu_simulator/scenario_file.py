"""Scenario files: YAML into a checked plan; every mistake is reported at once by file, line and key."""

import re
from collections.abc import Mapping
from dataclasses import replace

from exporter.errors import ConfigError
from exporter.model import Field
from gpu_simulator import identities
from gpu_simulator.models import MODELS, LayoutError, place
from gpu_simulator.plan import (
    DraMig,
    DraVersion,
    FaultPlan,
    GpuPlan,
    IdForm,
    MigStrategy,
    NodePlan,
    Override,
    Plugin,
    Runtime,
    Sharing,
    Window,
    XidPlan,
)
from gpu_simulator.scenario_keys import Problems, Section, close_match, read_tree
from gpu_simulator.scenario_pods import read_outside, read_pods
from gpu_simulator.truth import DcgmTruth, Fault, MigTruth, ModelSpec

MOST_OTHER_PODS = 250
_DCGM_VERSION = re.compile(r"(?:3\.[3-9]|4\.\d{1,2})\.\d{1,2}")


def parse(text: str, source: str) -> NodePlan:
    """A plan from the text of a scenario file (format: docs/scenarios.md).

    Args:
        text: YAML.
        source: file name as the user knows it, for messages; its stem becomes the scenario's name.

    Raises:
        ConfigError: one line per mistake: file, line, key, what is wrong and what is allowed.
    """
    problems = Problems(source)
    item = read_tree(text, problems)
    plan = _plan(Section(item, "", problems), problems, source) if item else None
    if problems.lines or plan is None:
        raise ConfigError(*problems.lines)
    return plan


def _plan(top: Section, problems: Problems, source: str) -> NodePlan:
    node = top.text("node")
    plugin = _plugin(top)
    gpus = read_gpus(top, node, plugin.ids)
    if not gpus and not problems.lines:
        top.problem("gpus", "is missing or empty; allowed: a list of boards, each with a model")
    pods = read_pods(top, gpus, plugin.ids)
    plan = NodePlan(
        name=source.rsplit("/", 1)[-1].removesuffix(".yaml").removesuffix(".yml"),
        description=top.text("description", "no description"),
        node=node,
        driver_version=top.text("driver", "590.48.01"),
        runtime=top.choice("runtime", Runtime.CONTAINERD),
        plugin=plugin,
        gpus=gpus,
        pods=(*pods, *read_outside(top, gpus)),
        faults=read_faults(top, len(gpus)),
        xids=read_xids(top, len(gpus)),
        other_pods=top.integer("other_pods", 0, high=MOST_OTHER_PODS),
        namespaces=read_namespaces(top),
        node_labels=top.texts("node_labels"),
        dra_version=_dra_version(top, plugin),
        dcgm=_dcgm(top),
    )
    top.finish()
    return plan


def _plugin(top: Section) -> Plugin:
    section = top.section("plugin")
    if section is None:
        return Plugin()
    plugin = Plugin(
        ids=section.choice("ids", IdForm.UUID),
        mig_strategy=section.choice("mig_strategy", MigStrategy.MIXED),
        rename_shared=section.flag("rename_shared", default=False),
        dra_mig=section.choice("dra_mig", DraMig.STATIC),
    )
    if section.has("dra_mig") and plugin.ids is not IdForm.DRA:
        section.problem("dra_mig", f"means nothing with ids {plugin.ids.value}; allowed: only with dra")
    section.finish()
    return plugin


def _dra_version(top: Section, plugin: Plugin) -> str:
    """Of the API; a cluster whose driver needs none has none by default."""
    if not top.has("dra_version") and plugin.ids is not IdForm.DRA:
        return ""
    return top.choice("dra_version", DraVersion.V1).value


def _dcgm(top: Section) -> DcgmTruth:
    section = top.section("dcgm")
    if section is None:
        return DcgmTruth()
    version = section.text("version", DcgmTruth().version)
    if not _DCGM_VERSION.fullmatch(version):
        section.problem("version", f"is {version!r}; allowed: three numbers, from 3.3.0 to 4.99.99")
        version = DcgmTruth().version
    module = section.flag("profiling_module", default=True)
    section.finish()
    return DcgmTruth(version=version, profiling_module=module)


MOST_REPLICAS = 64
_SPLITS = 10
"""Placeholders that HAMi advertises for a GPU by default."""
_WITH_FRACTIONS = (IdForm.HAMI, IdForm.VOLCANO, IdForm.KAI, IdForm.DRA)
_MOST_OF_A_KIND = 16
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_SERIAL = re.compile(r"\d{13}")
_PCI = re.compile(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.[0-7]")


def read_gpus(top: Section, node: str, ids: IdForm) -> tuple[GpuPlan, ...]:
    """All boards in order; each entry may stand for several alike."""
    gpus: list[GpuPlan] = []
    for section in top.sections("gpus"):
        count = section.integer("count", 1, low=1, high=_MOST_OF_A_KIND)
        gpus += [_gpu(section, node, len(gpus) + n, ids, single=count == 1) for n in range(count)]
        section.finish()
    return tuple(gpus)


def _gpu(section: Section, node: str, index: int, ids: IdForm, *, single: bool) -> GpuPlan:
    key = section.text("model")
    if key and key not in MODELS:
        section.problem("model", f"is {key!r}{close_match(key, MODELS)}; allowed: {', '.join(MODELS)}")
    key = key if key in MODELS else "h100"
    uuid = _pattern(section, "uuid", _UUID, "GPU-" + identities.stable_uuid(node, "gpu", index), single=single)
    bus = _pattern(section, "pci", _PCI, identities.pci_bus_id(index), single=single)
    number = f"16{identities.stable_number(node, 'serial', index) % 10**11:011d}"
    serial = _pattern(section, "serial", _SERIAL, number, single=single)
    sharing, replicas = _sharing(section, ids)
    divided = sharing is Sharing.FRACTION
    return GpuPlan(
        index=index,
        minor=section.integer("minor", index, high=255) if single else index,
        uuid=uuid,
        pci_bus_id=bus,
        serial=serial,
        model_key=key,
        model=MODELS[key],
        mig_enabled=section.has("mig"),
        instances=_instances(section, MODELS[key], uuid),
        sharing=sharing,
        replicas=1 if divided else replicas,
        splits=replicas if divided else 1,
        overrides=_overrides(section),
    )


def _pattern(section: Section, key: str, pattern: re.Pattern[str], default: str, *, single: bool) -> str:
    if not section.has(key):
        return default
    if not single:
        section.problem(key, "cannot be the same for several boards; allowed: only with count 1")
        return default
    value = section.text(key, default)
    if not pattern.fullmatch(value):
        section.problem(key, f"is {value!r}; allowed: the form of {default}")
        return default
    return value


def _sharing(section: Section, ids: IdForm) -> tuple[Sharing, int]:
    part = section.section("sharing")
    if part is None:
        return Sharing.NONE, 1
    strategy = part.choice("strategy", Sharing.TIME_SLICING)
    default = _SPLITS if strategy is Sharing.FRACTION else None
    replicas = part.integer("replicas", default, low=2, high=MOST_REPLICAS)
    if strategy is Sharing.FRACTION and (section.has("mig") or ids not in _WITH_FRACTIONS):
        told = "on a partitioned GPU" if section.has("mig") else f"with plugin ids {ids.value}"
        names = ", ".join(form.value for form in _WITH_FRACTIONS)
        part.problem("strategy", f"is 'fraction' {told}; allowed: a whole GPU, and plugin ids {names}")
        strategy, replicas = Sharing.NONE, 1
    if strategy is Sharing.MPS and section.has("mig"):
        part.problem("strategy", "is 'mps' on a partitioned GPU; allowed: time-slicing, or no MIG")
    part.finish()
    return strategy, replicas


def _instances(section: Section, model: ModelSpec, uuid: str) -> tuple[MigTruth, ...]:
    profiles = []
    for item in section.items("mig"):
        if isinstance(item.value, str):
            profiles.append(item.value)
        else:
            section.problem("mig", f"has {item.value!r}; allowed: profile names, such as 1g.10gb")
    if section.has("mig") and not model.mig_profiles:
        section.problem("mig", f"is not for {model.name}, which has no MIG; allowed: leave it out")
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


def _overrides(section: Section) -> tuple[Override, ...]:
    overrides: list[Override] = []
    for part in section.sections("overrides"):
        start = part.number("from", 0.0)
        window = Window(start_seconds=start, end_seconds=part.optional_number("to", low=start))
        values = part.section("values")
        if values is None:
            part.problem("values", "is missing; allowed: field names with a number, or none for not supported")
        else:
            overrides.append(Override(window=window, values=_override_values(values)))
        part.finish()
    return tuple(overrides)


def _override_values(section: Section) -> dict[Field, int | float | None]:
    values: dict[Field, int | float | None] = {}
    names = Field.__members__
    for key in section.keys():  # noqa: SIM118 - a section is no mapping
        if key not in names:
            section.problem(key, f"is no field{close_match(key, names)}; allowed: names of exporter.model.Field")
        elif section.has(key):
            item = section.item(key)
            is_float = item is not None and isinstance(item.value, float)
            values[names[key]] = section.number(key) if is_float else section.integer(key, low=-(2**53))
        else:
            values[names[key]] = None
    return values


GPU_FAULTS = frozenset({Fault.GPU_LOST, Fault.RESET_REQUIRED, Fault.UNKNOWN_ERROR, Fault.GPU_ABSENT})
"""Faults of one GPU; all others are of the driver, the kubelet, the API or the host engine as a whole."""
_WITH_SECONDS: dict[Fault, float | None] = {
    Fault.SLOW: None,
    Fault.KUBELET_PARTIAL: 0.0,
    Fault.API_SLOW: None,
    Fault.API_TOO_MANY: 1.0,
    Fault.ENGINE_SLOW: None,
}
"""Faults that have a parameter, and what it is by default; ``None``: it must be given."""


def read_faults(top: Section, gpus: int) -> tuple[FaultPlan, ...]:
    """Everything that goes wrong."""
    faults: list[FaultPlan] = []
    for section in top.sections("faults"):
        kind = section.choice("kind", Fault.SLOW if section.has("seconds") else Fault.GPU_LOST)
        if not section.has("kind"):
            section.problem("kind", f"is missing; allowed: {', '.join(Fault)}")
        gpu = None
        if kind in GPU_FAULTS or (kind is Fault.HANG and section.has("gpu")):
            gpu = section.gpu_index(gpus)
        elif section.has("gpu"):
            section.problem("gpu", f"means nothing for {kind.value}, which is of the whole node; allowed: leave it out")
        seconds = 0.0
        if kind in _WITH_SECONDS:
            seconds = section.number("seconds", _WITH_SECONDS[kind], low=0.0)
        faults.append(FaultPlan(kind=kind, gpu=gpu, window=section.window("from", "to"), parameter=seconds))
        section.finish()
    return tuple(faults)


def read_xids(top: Section, gpus: int) -> tuple[XidPlan, ...]:
    """Every driver error."""
    xids: list[XidPlan] = []
    for section in top.sections("xids"):
        gpu = section.gpu_index(gpus)
        code = section.integer("code", low=1, high=999)
        at = section.number("at", low=0.0)
        every = section.optional_number("every", low=0.001)
        if gpu is not None:
            xids.append(XidPlan(gpu=gpu, code=code, at_seconds=at, every_seconds=every))
        section.finish()
    return tuple(xids)


def read_namespaces(top: Section) -> dict[str, Mapping[str, str]]:
    """``namespaces``: labels by namespace."""
    part = top.section("namespaces")
    if part is None:
        return {}
    namespaces: dict[str, Mapping[str, str]] = {}
    for name in part.keys():  # noqa: SIM118 - a section is no mapping
        one = part.section(name)
        if one is None:
            part.problem(name, "is empty; allowed: such as {labels: {team: ml}}")
            continue
        namespaces[name] = one.texts("labels")
        one.finish()
    return namespaces

"""The ``gpus`` part of a scenario file: boards, their MIG layouts, sharing and overridden values."""

import re

from exporter.model import Field
from gpu_simulator import identities
from gpu_simulator.mig_layout import LayoutError, place
from gpu_simulator.models import MODELS, instance_memory_bytes, instance_multiprocessors
from gpu_simulator.plan import GpuPlan, IdForm, InstancePlan, Override, Sharing, Window
from gpu_simulator.scenario_keys import Section, close_match
from gpu_simulator.truth import ModelSpec

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


def _instances(section: Section, model: ModelSpec, uuid: str) -> tuple[InstancePlan, ...]:
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
        placements = place(model, profiles)
    except LayoutError as error:
        section.problem("mig", str(error))
        return ()
    return tuple(
        InstancePlan(
            uuid="MIG-" + identities.stable_uuid(uuid, "mig", number, placement.profile),
            gpu_instance_id=placement.gpu_instance_id,
            compute_instance_id=0,
            profile=placement.profile,
            profile_id=placement.profile_id,
            placement_start=placement.start,
            compute_slices=placement.compute_slices,
            memory_slices=placement.memory_slices,
            memory_bytes=instance_memory_bytes(model, placement.memory_slices),
            multiprocessors=instance_multiprocessors(model, placement.compute_slices),
        )
        for number, placement in enumerate(placements)
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

"""The ``devices`` of a container in a scenario file: which board, instance, replicas or part it has, and how."""

from collections.abc import Sequence

from gpu_simulator.models import MIB
from gpu_simulator.plan import Claim, GpuPlan, IdForm, Sharing
from gpu_simulator.scenario_faults import read_gpu_index
from gpu_simulator.scenario_keys import Section

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
    index = read_gpu_index(section, len(gpus))
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

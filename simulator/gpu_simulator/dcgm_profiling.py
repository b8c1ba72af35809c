"""Profiling of the simulated host engine: who can be profiled, and means between two beats of a watch."""

from collections.abc import Callable, Mapping

from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, GPU
from exporter.model import Field
from gpu_simulator.dcgm_entities import Entity
from gpu_simulator.dcgm_known import level_of
from gpu_simulator.dcgm_values import Blank, Value, answers
from gpu_simulator.driver_gpm import joined
from gpu_simulator.truth import Fault, GpuTruth, Load, NodeTruth

_SHORTEST_SECONDS = 0.05
_RATES = frozenset({*range(1009, 1013), *range(1076, 1080)})

_LOADS: Mapping[int, Callable[[Load], float]] = {
    1001: lambda x: x.engine,
    1002: lambda x: x.sm,
    1003: lambda x: x.occupancy,
    1004: lambda x: x.tensor,
    1005: lambda x: x.dram,
    1006: lambda x: x.fp64,
    1007: lambda x: x.fp32,
    1008: lambda x: x.fp16,
    1009: lambda x: x.pcie_tx_bytes_per_second,
    1010: lambda x: x.pcie_rx_bytes_per_second,
    1011: lambda x: x.nvlink_tx_bytes_per_second,
    1012: lambda x: x.nvlink_rx_bytes_per_second,
    1013: lambda _: 0.0,
    1014: lambda x: x.tensor,
    1015: lambda _: 0.0,
    1016: lambda x: x.fp32 / 2,
    1017: lambda x: x.decode,
    1025: lambda x: x.jpeg,
    1033: lambda x: x.optical_flow,
    **dict.fromkeys(range(1076, 1080), lambda _: 0.0),
}
"""What a field is the mean of. All tensor work counts as that of half precision; no board here has a C2C link."""
_ONLY_BY_GPM = frozenset({1025, 1033, *range(1076, 1080)})

_GPM_GROUPS = (
    (0, 0, tuple(range(1001, 1035))),
    (1, 0, (*range(1040, 1084), 1532, 1533)),
    (2, 0, tuple(range(1084, 1097))),
)
_MODULE_GROUPS = (
    (0, 1, (1002, 1003, 1004, 1007, 1008)),
    (0, 2, (1006, 1013, 1014, 1015, 1016)),
    (1, 0, (1005,)),
    (2, 0, (1009, 1010)),
    (3, 0, (1001,)),
    (4, 0, (1011, 1012)),
    (5, 0, (1017,)),
)


def can_profile(node: NodeTruth, gpu: GpuTruth) -> bool:
    """Whether a GPU has profiling fields: by GPM, or by the closed module where that is installed."""
    return gpu.model.gpm or node.dcgm.profiling_module


def is_measured(node: NodeTruth, gpu: GpuTruth) -> bool:
    """Whether profiling goes on now."""
    return answers(node, gpu) and Fault.PROFILING_PAUSED not in node.faults


def metric_groups(gpu: GpuTruth) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """(major, minor, fields) of what can be measured together; fields of one major exclude each other's passes."""
    lacking = gpu.model.not_supported
    groups = _GPM_GROUPS if gpu.model.gpm else _MODULE_GROUPS
    told = ((major, minor, tuple(one for one in ids if one not in lacking)) for major, minor, ids in groups)
    return tuple(group for group in told if group[2])


def integral_of(entity: Entity) -> Load | None:
    """Integral of an entity's load since the scenario's start."""
    if entity.gpu is None:
        return None
    if entity.group == GPU:
        return entity.gpu.load_integral
    return joined(entity.members) if entity.members else None


def mean(
    node: NodeTruth, entity: Entity, field_id: int, since: tuple[float, Load] | None, integral: Load | None
) -> Value:
    """Mean of a field since a beat before; blank at the first beat, and for what an entity cannot have."""
    gpu = entity.gpu
    if gpu is None or integral is None or not is_measured(node, gpu) or _is_above(field_id, entity):
        return Blank.NULL
    of = _LOADS.get(field_id)
    field = Field(field_id)
    if of is None or field in gpu.model.not_supported or (field_id in _ONLY_BY_GPM and not gpu.model.gpm):
        return Blank.NOT_SUPPORTED
    if since is None or node.at_seconds - since[0] < _SHORTEST_SECONDS:
        return Blank.NULL
    if entity.group == GPU and field in gpu.overrides:
        fixed = gpu.overrides[field]
        return Blank.NOT_SUPPORTED if fixed is None else fixed
    level = (of(integral) - of(since[1])) / (node.at_seconds - since[0])
    return round(level) if field_id in _RATES else level


def _is_above(field_id: int, entity: Entity) -> bool:
    """Whether a field is of something larger than the entity, so that it is blank there."""
    level = level_of(field_id)
    return (level == GPU and entity.group != GPU) or (level != COMPUTE_INSTANCE and entity.group == COMPUTE_INSTANCE)

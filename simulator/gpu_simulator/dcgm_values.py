"""What the simulated host engine answers for each field but profiling's, in DCGM's types and units, from the truth."""

from collections.abc import Callable, Mapping
from enum import IntEnum

from exporter.gpu.dcgm.library import DOUBLE, GPU, NONE, STRING
from exporter.model import Field
from gpu_simulator.dcgm_entities import Entity
from gpu_simulator.driver import cuda_major
from gpu_simulator.driver_board import MIB, board_of, read
from gpu_simulator.driver_device import instance_bar1_bytes
from gpu_simulator.driver_fields import is_before
from gpu_simulator.truth import Fault, GpuTruth, MigTruth, NodeTruth


class Blank(IntEnum):
    """Kinds of no value, as offsets of DCGM's sentinels."""

    NULL = 0
    NOT_FOUND = 1
    NOT_SUPPORTED = 2
    NO_PERMISSION = 3


Value = int | float | str | Blank

_TEXTS = {
    Blank.NULL: "<<<NULL>>>",
    Blank.NOT_FOUND: "<<<NOT_FOUND>>>",
    Blank.NOT_SUPPORTED: "<<<NOT_SUPPORTED>>>",
    Blank.NO_PERMISSION: "<<<NOT_PERM>>>",
}
_BLANK_32, _BLANK_64, _BLANK_DOUBLE = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, float(2**47)
_NARROW = frozenset({Field.MEMORY_TEMP, Field.FAN_SPEED})
"""Whole numbers whose blank is that of 32 bits."""
_BROKEN = frozenset({Fault.GPU_LOST, Fault.GPU_ABSENT, Fault.UNKNOWN_ERROR, Fault.RESET_REQUIRED})
_DRIVER_GONE = frozenset({Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISMATCH, Fault.LIBRARY_MISSING})
_WHOLE_WATTS = frozenset(
    {
        Field.POWER_MGMT_LIMIT,
        Field.POWER_MGMT_LIMIT_MIN,
        Field.POWER_MGMT_LIMIT_MAX,
        Field.POWER_MGMT_LIMIT_DEF,
        Field.ENFORCED_POWER_LIMIT,
    }
)
_MILLIWATTS = frozenset({Field.POWER_USAGE, Field.POWER_USAGE_INSTANT})
_MEMORY = (Field.FB_TOTAL, Field.FB_RESERVED, Field.FB_FREE, Field.FB_USED)
_BAR1 = (Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE)
_COMPUTED = frozenset({Field.NVLINK_BANDWIDTH_TOTAL, Field.XID_ERRORS})
"""Those that the cache makes of several samples or of events."""

_OF_THE_NODE: Mapping[int, Callable[[NodeTruth], Value]] = {
    1: lambda node: node.driver_version,
    2: lambda node: f"{cuda_major(node.driver_version)}.{node.driver_version}",
    4: lambda node: len(node.gpus),
    5: lambda node: cuda_major(node.driver_version) * 1000,
}


def _text(value: str | None) -> Value:
    return Blank.NOT_SUPPORTED if value is None else value


def _capability(gpu: GpuTruth) -> int:
    major, minor = board_of(gpu).compute_capability
    return major << 16 | minor


_FIXED: Mapping[int, Callable[[GpuTruth], Value]] = {
    50: lambda gpu: gpu.model.name,
    51: lambda _: "NVIDIA",
    52: lambda gpu: gpu.index,
    53: lambda gpu: gpu.serial,
    54: lambda gpu: gpu.uuid,
    55: lambda gpu: gpu.minor,
    56: lambda gpu: _text(board_of(gpu).inforom_oem),
    57: lambda gpu: gpu.pci_bus_id,
    63: _capability,
    65: lambda _: 0,
    66: lambda _: 1,
    67: lambda gpu: int(gpu.mig_enabled) if gpu.model.mig_profiles else Blank.NOT_SUPPORTED,
    69: lambda gpu: gpu.model.compute_slices if gpu.model.mig_profiles else Blank.NOT_SUPPORTED,
    80: lambda gpu: _text(board_of(gpu).inforom_ecc),
    81: lambda gpu: _text(board_of(gpu).inforom_power),
    82: lambda gpu: _text(board_of(gpu).inforom_image),
    85: lambda gpu: board_of(gpu).vbios,
    94: lambda gpu: int(gpu.model.gpm),
}
"""What the engine read once and still tells of a GPU that does not answer."""


def answers(node: NodeTruth, gpu: GpuTruth) -> bool:
    """Whether the driver measures anything of a GPU now."""
    return gpu.fault not in _BROKEN and not _DRIVER_GONE & node.faults.keys()


def value_of(node: NodeTruth, entity: Entity, field_id: int) -> Value:
    """Value of a field on an entity now; what an instance has not itself is its parent's."""
    if field_id in _OF_THE_NODE:
        return _OF_THE_NODE[field_id](node)
    gpu = entity.gpu
    if entity.group == NONE or gpu is None:
        return Blank.NOT_SUPPORTED
    if entity.group != GPU:
        own = _of_instance(node, entity, gpu, field_id)
        if own is not None:
            return own
    if field_id in _FIXED:
        return _FIXED[field_id](gpu)
    recovers = gpu.fault is Fault.RESET_REQUIRED and field_id == Field.GPU_RECOVERY_ACTION
    if not answers(node, gpu) and not recovers:
        return Blank.NULL
    return Blank.NOT_SUPPORTED if is_before(node.driver_version, Field(field_id)) else _of_gpu(gpu, field_id)


def _of_instance(node: NodeTruth, entity: Entity, gpu: GpuTruth, field_id: int) -> Value | None:
    """What an instance has of its own; ``None`` for all else."""
    if not entity.members:
        return Blank.NOT_FOUND
    first = entity.members[0]
    if field_id == 54:  # noqa: PLR2004 - DCGM_FI_DEV_UUID
        return first.uuid
    if field_id == 50:  # noqa: PLR2004 - DCGM_FI_DEV_NAME
        return first.profile
    if field_id in _BAR1:
        return instance_bar1_bytes(gpu, first)[_BAR1.index(Field(field_id))] // MIB
    if field_id in _MEMORY or field_id == Field.FB_USED_PERCENT:
        return _memory_of(first, field_id) if answers(node, gpu) else Blank.NULL
    return None


def _memory_of(instance: MigTruth, field_id: int) -> Value:
    total, used = instance.memory_bytes, instance.load.memory_used_bytes
    if field_id == Field.FB_USED_PERCENT:
        return used / total
    return {Field.FB_TOTAL: total, Field.FB_FREE: total - used, Field.FB_USED: used}.get(Field(field_id), 0) // MIB


def _of_gpu(gpu: GpuTruth, field_id: int) -> Value:
    if field_id in (300, 301):
        return int(read(gpu, Field.ECC_SBE_VOL_TOTAL) is not None)
    if field_id == Field.FB_USED_PERCENT:
        return _used_ratio(gpu)
    raw = read(gpu, Field(field_id))
    return Blank.NOT_SUPPORTED if raw is None or field_id in _COMPUTED else _in_its_unit(raw, field_id)


def _in_its_unit(raw: float, field_id: int) -> int | float:
    if field_id in _MEMORY or field_id in _BAR1:
        return round(raw * MIB) // MIB
    if field_id in _WHOLE_WATTS:
        return float(int(raw))
    if field_id in _MILLIWATTS:
        return round(raw * 1000) / 1000
    return round(raw)


def _used_ratio(gpu: GpuTruth) -> Value:
    """Of bytes, as the driver counts them."""
    total, reserved, used = (read(gpu, field) for field in (Field.FB_TOTAL, Field.FB_RESERVED, Field.FB_USED))
    if total is None or reserved is None or used is None:
        return Blank.NOT_SUPPORTED
    return round(used * MIB) / (round(total * MIB) - round(reserved * MIB))


def encoded(value: Value, field_id: int, kind: int) -> int | float | bytes:
    """A value or blank as it stands in a record."""
    if kind == STRING:
        return (_TEXTS[value] if isinstance(value, Blank) else str(value)).encode()
    if not isinstance(value, Blank):
        return value if not isinstance(value, str) else 0
    if kind == DOUBLE:
        return _BLANK_DOUBLE + value
    return (_BLANK_32 if field_id in _NARROW else _BLANK_64) + int(value)

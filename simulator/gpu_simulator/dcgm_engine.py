"""A simulated DCGM host engine: fields and their values in DCGM's units, entities with DCGM's ids, watches."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import BINARY, COMPUTE_INSTANCE, DOUBLE, GPU, GPU_INSTANCE, INTEGER, NONE, STRING
from exporter.model import Field
from gpu_simulator.driver_mig import joined
from gpu_simulator.driver_session import HANG_POLL_SECONDS, CArgument, InjectedErrors, Refused, fill_slots, plain
from gpu_simulator.gpu_values import cuda_major, instance_bar1_bytes, is_before, read
from gpu_simulator.models import MIB
from gpu_simulator.truth import Fault, GpuTruth, Load, MigTruth, NodeTruth

_STRINGS = frozenset({1, 2, 3, 50, 51, 53, 54, 56, 57, 68, 80, 81, 82, 85, 172, 1502})
_BLOBS = frozenset({60, 61, 62, 75, 76, 77, 91, 130, 165, 166, 167, 205})
_DOUBLES = frozenset({155, 157, *range(160, 165), 254, *range(1001, 1009), *range(1013, 1035), 1216, 1218})
_OF_THE_NODE = frozenset({*range(1, 7), 91, 1502, 1503})
_OF_COMPUTE_INSTANCES = frozenset(
    {50, 54, 68, 90, 92, 93, 230, *range(250, 255), *range(1001, 1005), 1006, 1007, 1008, *range(1013, 1017)}
)
_OF_GPU_INSTANCES = frozenset({1005})
_SINCE = {
    (3, 3, 0): "1-6 50-93 100-102 110-115 120 130 140 150-167 170-175 190-191 200-207 230 235-247 250-254 285-287"
    " 300-301 310-333 385-396 400-499 500 526 1001-1096",
    (4, 0, 0): "94 334-346 825-897 1200-1220 1400-1424 1501-1503 1507 1523",
    (4, 6, 0): "1525-1533",
    (4, 6, 1): "1600-1612",
    (4, 7, 0): "1613-1628 1648",
}
"""Fields by the version that brought them."""


class Blank(IntEnum):
    """Kinds of a lacking value, as offsets of DCGM's sentinels."""

    NULL = 0
    NOT_FOUND = 1
    NOT_SUPPORTED = 2


Value = int | float | str | Blank
_BLANK_32, _BLANK_64, _BLANK_DOUBLE = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, float(2**47)
_NARROW = frozenset({Field.MEMORY_TEMP, Field.FAN_SPEED})
"""Whole numbers whose blank is that of 32 bits."""
_BROKEN = frozenset({Fault.GPU_LOST, Fault.GPU_ABSENT, Fault.UNKNOWN_ERROR, Fault.RESET_REQUIRED})
_DRIVER_GONE = frozenset({Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISMATCH, Fault.LIBRARY_MISSING})
_WHOLE_WATTS = frozenset(range(Field.POWER_MGMT_LIMIT, Field.ENFORCED_POWER_LIMIT + 1))
_MILLIWATTS = frozenset({Field.POWER_USAGE, Field.POWER_USAGE_INSTANT})
_MEMORY = (Field.FB_TOTAL, Field.FB_RESERVED, Field.FB_FREE, Field.FB_USED)
_BAR1 = (Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE)
_COMPUTED = frozenset({Field.NVLINK_BANDWIDTH_TOTAL, Field.XID_ERRORS})
"""Fields that the engine makes of several samples or of events."""
_NODE_VALUES: Mapping[int, Callable[[NodeTruth], Value]] = {
    1: lambda node: node.driver_version,
    2: lambda node: f"{cuda_major(node.driver_version)}.{node.driver_version}",
    4: lambda node: len(node.gpus),
    5: lambda node: cuda_major(node.driver_version) * 1000,
}
_FIXED: Mapping[int, Callable[[GpuTruth], Value | None]] = {
    50: lambda gpu: gpu.model.name,
    51: lambda _: "NVIDIA",
    52: lambda gpu: gpu.index,
    53: lambda gpu: gpu.serial,
    54: lambda gpu: gpu.uuid,
    55: lambda gpu: gpu.minor,
    56: lambda gpu: gpu.model.inforom[1],
    57: lambda gpu: gpu.pci_bus_id,
    63: lambda gpu: gpu.model.compute_capability[0] << 16 | gpu.model.compute_capability[1],
    65: lambda _: 0,
    66: lambda _: 1,
    67: lambda gpu: int(gpu.mig_enabled) if gpu.model.mig_profiles else None,
    69: lambda gpu: gpu.model.compute_slices if gpu.model.mig_profiles else None,
    80: lambda gpu: gpu.model.inforom[2],
    81: lambda gpu: gpu.model.inforom[3],
    82: lambda gpu: gpu.model.inforom[0],
    85: lambda gpu: gpu.model.vbios,
    94: lambda gpu: int(gpu.model.gpm),
}
"""What the engine reads once and still answers of a GPU that does not."""
_LOADS = ("engine", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16")
_LINKS = ("pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx")
_PROFILED: Mapping[int, str] = {
    **dict(enumerate(_LOADS, start=1001)),
    **{number: f"{link}_bytes_per_second" for number, link in enumerate(_LINKS, start=1009)},
    1014: "tensor",
    1016: "fp32",
    1017: "decode",
    1025: "jpeg",
    1033: "optical_flow",
    **dict.fromkeys((1013, 1015, *range(1076, 1080)), ""),
}
"""What a field is the mean of. All tensor work counts as half precision; no board here has a C2C link."""
_HALF_OF_FP32 = 1016
_RATES = frozenset({*range(1009, 1013), *range(1076, 1080)})
_ONLY_BY_GPM = frozenset({1025, 1033, *range(1076, 1080)})
_BY_GPM = (*range(1001, 1035), *range(1040, 1097), 1532, 1533)
_BY_MODULE = tuple(range(1001, 1018))
_SHORTEST_MEAN_SECONDS = 0.05


def is_profiling(field_id: int) -> bool:
    """Return whether the profiling module or GPM measures a field."""
    return 1001 <= field_id <= 1096 or field_id in (1532, 1533)  # noqa: PLR2004 - DCGM's own bounds


def type_of(field_id: int) -> int:
    """Return the character code of a field's type."""
    if field_id in _STRINGS:
        return STRING
    if field_id in _BLOBS:
        return BINARY
    return DOUBLE if field_id in _DOUBLES else INTEGER


def level_of(field_id: int) -> int:
    """Return the entity group of the smallest entity that has a value of its own."""
    if field_id in _OF_THE_NODE:
        return NONE
    if field_id in _OF_GPU_INSTANCES:
        return GPU_INSTANCE
    return COMPUTE_INSTANCE if field_id in _OF_COMPUTE_INSTANCES else GPU


@lru_cache(maxsize=8)
def known(version: str) -> frozenset[int]:
    """Return the ids that a version has."""
    now = tuple(int(part) for part in version.split("."))
    ranges = [one.partition("-") for since, text in _SINCE.items() if now >= since for one in text.split()]
    return frozenset(number for low, _, high in ranges for number in range(int(low), int(high or low) + 1))


def meta_pointer(field_id: int, version: str) -> "ctypes._Pointer[library.FieldMeta]":
    """Return a pointer to a field's description; a null pointer where the version does not know the field."""
    pointer = ctypes.POINTER(library.FieldMeta)
    if field_id not in known(version):
        return pointer()
    return pointer(
        library.FieldMeta(
            fieldId=field_id,
            fieldType=bytes([type_of(field_id)]),
            size=0 if type_of(field_id) in (STRING, BINARY) else 8,
            tag=f"simulated_{field_id}".encode(),
            scope=int(level_of(field_id) != NONE),
            entityLevel=level_of(field_id),
        )
    )


def encoded(value: Value, field_id: int) -> int | float | bytes:
    """Return a value or blank as a record has it."""
    kind = type_of(field_id)
    if kind == STRING:
        return (f"<<<{value.name}>>>" if isinstance(value, Blank) else str(value)).encode()
    if not isinstance(value, Blank):
        return value if not isinstance(value, str) else 0
    if kind == DOUBLE:
        return _BLANK_DOUBLE + value
    return (_BLANK_32 if field_id in _NARROW else _BLANK_64) + int(value)


def answers(node: NodeTruth, gpu: GpuTruth) -> bool:
    """Return whether the driver measures anything of a GPU now."""
    return gpu.fault not in _BROKEN and not _DRIVER_GONE & node.faults.keys()


def profiling_fields(node: NodeTruth, gpu: GpuTruth) -> tuple[int, ...]:
    """Return the profiling fields of a GPU: by GPM, or by the closed module where it is installed."""
    if not gpu.model.gpm and not node.dcgm.profiling_module:
        return ()
    return tuple(one for one in (_BY_GPM if gpu.model.gpm else _BY_MODULE) if one not in gpu.model.not_supported)


def value_of(node: NodeTruth, gpu: GpuTruth | None, members: tuple[MigTruth, ...], field_id: int) -> Value:
    """Return the value of a field of the node, a GPU, or an instance with ``members``, now.

    What an instance does not have itself is its parent's.
    """
    if field_id in _NODE_VALUES:
        return _NODE_VALUES[field_id](node)
    if gpu is None:
        return Blank.NOT_SUPPORTED
    answering, value = answers(node, gpu), None
    if members:
        value = _of_instance(gpu, members[0], field_id)
        if value is not None:
            return value if answering or field_id not in (*_MEMORY, Field.FB_USED_PERCENT) else Blank.NULL
    if field_id in _FIXED:
        value = _FIXED[field_id](gpu)
    elif not answering and not (gpu.fault is Fault.RESET_REQUIRED and field_id == Field.GPU_RECOVERY_ACTION):
        return Blank.NULL
    elif field_id not in _COMPUTED and not is_before(node, Field(field_id)):
        value = _of_gpu(gpu, field_id)
    return Blank.NOT_SUPPORTED if value is None else value


def _of_instance(gpu: GpuTruth, instance: MigTruth, field_id: int) -> Value | None:
    """What an instance has of its own; ``None`` for all else."""
    total, used = instance.memory_bytes, instance.load.memory_used_bytes
    memory = {Field.FB_TOTAL: total, Field.FB_RESERVED: 0, Field.FB_FREE: total - used, Field.FB_USED: used}
    if field_id in memory:
        return memory[Field(field_id)] // MIB
    if field_id in _BAR1:
        return 0 if field_id == Field.BAR1_USED else instance_bar1_bytes(gpu, instance) // MIB
    own: dict[int, Value] = {50: instance.profile, 54: instance.uuid, Field.FB_USED_PERCENT: used / total}
    return own.get(field_id)


def _of_gpu(gpu: GpuTruth, field_id: int) -> int | float | None:
    if field_id in (300, 301):
        return int(read(gpu, Field.ECC_SBE_VOL_TOTAL) is not None)
    value = read(gpu, Field(field_id))
    if value is None or field_id == Field.FB_USED_PERCENT:
        return value
    if field_id in _MEMORY or field_id in _BAR1:
        return round(value * MIB) // MIB
    if field_id in _WHOLE_WATTS:
        return float(int(value))
    return round(value * 1000) / 1000 if field_id in _MILLIWATTS else round(value)


def mean_of(gpu: GpuTruth, group: int, field_id: int, seconds: float, loads: tuple[Load, Load]) -> Value:
    """Return the mean of a profiling field over ``seconds``, from the integrals of the load before and after."""
    level, of, field = level_of(field_id), _PROFILED.get(field_id), Field(field_id)
    if (level == GPU and group != GPU) or (level != COMPUTE_INSTANCE and group == COMPUTE_INSTANCE):
        return Blank.NULL  # a field of something larger than the entity
    if of is None or field in gpu.model.not_supported or (field_id in _ONLY_BY_GPM and not gpu.model.gpm):
        return Blank.NOT_SUPPORTED
    if seconds < _SHORTEST_MEAN_SECONDS:
        return Blank.NULL
    if group == GPU and field in gpu.overrides:
        fixed = gpu.overrides[field]
        return Blank.NOT_SUPPORTED if fixed is None else fixed
    mean = (getattr(loads[1], of) - getattr(loads[0], of)) / seconds if of else 0.0
    mean /= 2 if field_id == _HALF_OF_FP32 else 1
    return round(mean) if field_id in _RATES else mean


INSTANCES_PER_GPU = 8
FieldKey = tuple[int, int, int]
"""Entity group, entity id, field id."""
Record = tuple[int, int, int, Value]
"""Field id, status, microseconds, value."""
CALLS: dict[str, Callable[..., None]] = {}
"""Every C function by symbol: called with the engine and the C arguments, it raises ``Refused`` or fills arguments."""
_FIRST_HANDLE = 0x7F00_0000_1000
"""Above 2^32, so that a truncated handle shows."""
_NO_DRIVER = frozenset({Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISSING})
"""The engine has lost its GPUs. With a driver that was replaced under it, it has them still and can ask nothing."""
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """What an id stands for now: the node, a GPU, or an instance with its compute instances."""

    gpu: GpuTruth | None = None
    members: tuple[MigTruth, ...] = ()

    @property
    def integral(self) -> Load:
        """Integral of its load since the scenario's start."""
        whole = self.gpu.load_integral if self.gpu else Load()
        return joined(self.members) if self.members else whole


@dataclass(slots=True, kw_only=True)
class FieldWatch:
    """Fields that are sampled together; all of them are measured anew at each beat, when they are read."""

    keys: tuple[FieldKey, ...]
    interval_seconds: float
    started: float
    """Of the monotonic clock."""
    from_seconds: float
    """Of the scenario, when the watch began."""
    beat: int = -1
    at_seconds: float = 0.0
    """Of the scenario, at the last beat."""
    values: dict[FieldKey, Value] = field(default_factory=dict)
    before: dict[tuple[int, int], tuple[float, Entity]] = field(default_factory=dict)
    """(seconds, entity) at the beat before, of what was measured then."""


@dataclass(slots=True, kw_only=True)
class Connection:
    """Groups of entities, groups of fields and watches of one client; all end with the connection."""

    embedded: bool = False
    alive: bool = True
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    field_groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    watches: dict[tuple[int, int], FieldWatch] = field(default_factory=dict)

    def watch(self, group: CArgument, fields: CArgument) -> FieldWatch | None:
        """Return the watch of two of its own groups."""
        if plain(group) not in self.groups or plain(fields) not in self.field_groups:
            raise Refused(library.NOT_CONFIGURED)
        return self.watches.get((plain(group), plain(fields)))


@dataclass(slots=True, kw_only=True)
class Engine:
    """The library of this process and the engine behind it."""

    source: Callable[[], NodeTruth]
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    cache_seconds: float
    epoch_seconds: float
    version: str
    major: int
    """Of the library."""
    connections: dict[int, Connection] = field(default_factory=dict)
    failures: InjectedErrors = field(default_factory=lambda: InjectedErrors("libdcgm", CALLS))
    gpus: list[GpuTruth] = field(default_factory=list)
    """By DCGM's id; one that vanishes stays."""
    slots: dict[int, tuple[list[int | None], list[str | None]]] = field(default_factory=dict)
    """By DCGM's id: the GPU instance, and the UUID of the compute instance, in each slot."""
    entities: dict[tuple[int, int], Entity] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    last_handle: int = _FIRST_HANDLE
    truth: NodeTruth | None = None
    truth_at: float = 0.0

    def now(self, *, fresh: bool = False) -> NodeTruth:
        """Return the truth, at most ``cache_seconds`` old unless ``fresh``; entities follow it."""
        if fresh or self.truth is None or self.monotonic() - self.truth_at >= self.cache_seconds:
            self.truth, self.truth_at = self.source(), self.monotonic()
            self._follow(() if _NO_DRIVER & self.truth.faults.keys() else self.truth.gpus)
        return self.truth

    def _follow(self, there: Sequence[GpuTruth]) -> None:
        self.present = frozenset(gpu.uuid for gpu in there if gpu.fault is not Fault.GPU_ABSENT)
        uuids = list(dict.fromkeys([*(gpu.uuid for gpu in self.gpus), *(gpu.uuid for gpu in there)]))
        known = {gpu.uuid: gpu for gpu in (*self.gpus, *there)}
        self.gpus = [known[uuid] for uuid in uuids]
        self.entities = {
            (NONE, 0): Entity(),
            **{(GPU, number): Entity(gpu=gpu) for number, gpu in enumerate(self.gpus)},
        }
        for number, gpu in enumerate(self.gpus):
            alive = gpu.instances if gpu.mig_enabled and gpu.uuid in self.present else ()
            instances, parts = self.slots.setdefault(number, ([], []))
            fill_slots(instances, list(dict.fromkeys(one.gpu_instance_id for one in alive)))
            fill_slots(parts, [one.uuid for one in alive])
            for group, slots in ((GPU_INSTANCE, instances), (COMPUTE_INSTANCE, parts)):
                for slot, name in enumerate(slots):
                    members = tuple(one for one in alive if name in (one.gpu_instance_id, one.uuid))
                    if members:
                        entity = Entity(gpu=gpu, members=members)
                        self.entities[group, number * INSTANCES_PER_GPU + slot] = entity

    def gate(self) -> NodeTruth:
        """Wait as long as the engine hangs or is slow; end connections while it is down."""
        node = self.now()
        while Fault.ENGINE_HANG in node.faults:
            self.sleep(HANG_POLL_SECONDS)
            node = self.now(fresh=True)
        if Fault.ENGINE_DOWN in node.faults:
            self.kill()
        elif seconds := node.faults.get(Fault.ENGINE_SLOW):
            self.sleep(seconds)
        return node

    def kill(self) -> None:
        """End the engine: connections to it stay dead."""
        for handle, one in self.connections.items():
            if not one.embedded:
                self.connections[handle] = Connection(alive=False)

    def new_handle(self) -> int:
        """Return a number that was never given out before."""
        self.last_handle += 0x10
        return self.last_handle

    def opened(self, connection: Connection) -> int:
        """Take a new connection, and return its handle."""
        handle = self.new_handle()
        self.connections[handle] = connection
        return handle

    def update(self, watch: FieldWatch) -> None:
        """Measure what is watched if its beat has come; with a driver that hangs nothing moves."""
        node, beat = self.now(), int((self.monotonic() - watch.started) / watch.interval_seconds + 1e-6)
        if Fault.HANG in node.faults or beat <= watch.beat:
            return
        watch.beat, watch.at_seconds, watch.values = beat, node.at_seconds, {}
        for key in watch.keys:
            entity = self.entities.get(key[:2])
            if entity is not None:
                watch.values[key] = self._value(node, watch, key, entity)
        watch.before = {
            place: (node.at_seconds, entity)
            for place, entity in self.entities.items()
            if entity.gpu and answers(node, entity.gpu) and Fault.PROFILING_PAUSED not in node.faults
        }

    def _value(self, node: NodeTruth, watch: FieldWatch, key: FieldKey, entity: Entity) -> Value:
        gpu, members, field_id = entity.gpu, entity.members, key[2]
        since, before = watch.before.get(key[:2], (0.0, Entity()))
        same = before.gpu is not None and [one.uuid for one in before.members] == [one.uuid for one in members]
        if gpu is None or not (is_profiling(field_id) or field_id == Field.NVLINK_BANDWIDTH_TOTAL):
            return value_of(node, gpu, members, field_id)
        if not answers(node, gpu) or (is_profiling(field_id) and Fault.PROFILING_PAUSED in node.faults):
            return Blank.NULL
        seconds = node.at_seconds - since if same else 0.0
        if field_id == Field.NVLINK_BANDWIDTH_TOTAL:
            return _link_rate(before.gpu if same else None, gpu, seconds)
        return mean_of(gpu, key[0], field_id, seconds, (before.integral, entity.integral))

    def record(self, watch: FieldWatch | None, key: FieldKey) -> Record:
        """Return the newest value of a field, or why there is none."""
        if watch is None or key[:2] not in self.entities:
            return (key[2], library.NOT_WATCHED, 0, Blank.NULL)
        if key[2] == Field.XID_ERRORS:
            events = self.xids(watch, key, 0)
            return events[-1] if events else (key[2], library.NO_DATA, 0, Blank.NULL)
        return (key[2], library.OK, self.microseconds(watch.at_seconds), watch.values.get(key, Blank.NULL))

    def xids(self, watch: FieldWatch, key: FieldKey, since_microseconds: int) -> list[Record]:
        """Return the Xid errors of a GPU since the watch began and since a time."""
        gpu = self.entities.get(key[:2], Entity()).gpu
        return [
            (key[2], library.OK, self.microseconds(seconds), code)
            for seconds, code, *_ in (gpu.xids if gpu and Fault.HANG not in self.now().faults else ())
            if seconds > watch.from_seconds and self.microseconds(seconds) >= since_microseconds
        ]

    def microseconds(self, seconds: float) -> int:
        """Return an instant of the scenario as the engine's time stamp."""
        return round((self.epoch_seconds + seconds) * 1e6)


def _link_rate(before: GpuTruth | None, gpu: GpuTruth, seconds: float) -> Value:
    """The field's name says total: it is a rate, KiB per second over a thousand; the first value is 0."""
    moved = 0.0
    for one in (Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL):
        after, first = read(gpu, one), read(before or gpu, one)
        if after is None or first is None:
            return Blank.NOT_SUPPORTED
        moved += int(after / _KIB) - int(first / _KIB)
    return round(moved / seconds / 1000) if before and seconds > 0 else 0

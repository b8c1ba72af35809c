"""Lists the GPUs and MIG instances of an engine, with identity and state."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.engine import Engine
from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, GPU, GPU_INSTANCE, NONE, Code, Hierarchy, reason_of
from exporter.gpu.dcgm.readings import Entity, Live, Value, whole
from exporter.model.devices import DeviceState, Gpu, MigInstance
from exporter.model.fields import Field

_NODE: Entity = (NONE, 0)
NAME, NVML_INDEX, UUID, MINOR, BUS_ID, MIG_MODE, MIG_MAX_SLICES = 50, 52, 54, 55, 57, 67, 69
_TEXTS = tuple(one for one in Field if Field.BRAND <= one <= Field.VBIOS_VERSION)
"""Text fields of a GPU; their ids are consecutive."""
_IDENTITY = (NAME, NVML_INDEX, UUID, MINOR, BUS_ID, MIG_MODE, MIG_MAX_SLICES, Field.FB_TOTAL)
_CHANGES = (UUID, MIG_MODE)
_VERSIONS = (Field.DRIVER_VERSION, Field.NVML_VERSION)
"""Text fields of the node, which are not labels of its GPUs."""
_FULL_COMPUTE_SLICES, _FULL_MEMORY_SLICES = 7, 8
_MIB = 2**20
PAUSED = "telemetry_paused"
"""Reason of a GPU that works but is not read by the engine."""
_STATES = {
    0: (DeviceState.MISSING, "not_enumerated"),
    1: (DeviceState.UP, ""),
    2: (DeviceState.FAILED, "gpu_not_supported"),
    3: (DeviceState.FAILED, "inaccessible"),
    4: (DeviceState.LOST, "gpu_is_lost"),
    5: (DeviceState.UP, ""),
    library.DISABLED: (DeviceState.UP, PAUSED),
    7: (DeviceState.MISSING, "detached"),
}
"""States by DcgmEntityStatus_t; 5 is a fake GPU for tests."""
Place = tuple[str, int | None, int | None]
"""UUID of a GPU, and NVML's ids of a GPU instance and compute instance; ``None`` for the containing entity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One MIG instance, and the entity with its measurements."""

    instance: MigInstance
    measured: Entity
    """GPU instance if this is its only compute instance, otherwise the compute instance."""
    has_memory: bool
    """Whether the memory is its own, because its GPU instance has no other compute instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmDevice:
    """One GPU of the engine; ``gpu_id`` is the number in the engine, valid for one connection."""

    gpu_id: int
    gpu: Gpu
    state: DeviceState = DeviceState.UP
    reason: str = ""
    instances: tuple[Instance, ...] = ()

    @property
    def entity(self) -> Entity:
        """The GPU as a whole."""
        return GPU, self.gpu_id


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmLayout:
    """All devices, and the place of each entity in a GPU and GPU instance, for events."""

    devices: tuple[DcgmDevice, ...] = ()
    places: Mapping[Entity, Place] = field(default_factory=dict)
    listed: int = 0
    """Number of GPUs that the engine lists, including those without a UUID."""


class _Row(NamedTuple):
    """A row of the hierarchy: a GPU instance or compute instance, and its parent."""

    entity: Entity
    parent: Entity
    instance_id: int
    compute_instance_id: int
    profile_id: int
    slices: int


class Entities:
    """Follows the engine's GPUs and MIG instances over one connection.

    Args:
        engine: Connected engine.
        texts: Text fields to read of every GPU, in addition to those that NVML also reports.
        node_fields: Fields without an entity (driver version, ...) to read.
    """

    def __init__(self, engine: Engine, *, texts: Iterable[int], node_fields: Iterable[int]) -> None:
        self._engine = engine
        self._live = Live(engine)
        self._texts = tuple(sorted({*_TEXTS, *texts}))
        self._node_fields = tuple(sorted({*_VERSIONS, *node_fields}))
        self._gpus: dict[int, Gpu] = {}
        """GPUs by the engine's id."""
        self._present: set[int] = set()
        self._values: dict[int, Mapping[int, Value]] = {}
        self._hierarchy = Hierarchy()
        self._rows: dict[Entity, _Row] = {}
        self._uuids: dict[Entity, Value | None] = {}
        """UUIDs of the compute instances."""
        self._instances: dict[int, tuple[Instance, ...]] = {}
        """Instances in the engine's order, by the engine's id of their GPU."""
        self._sizes_known = True
        """Whether the size of every instance is known."""
        self.node_values: Mapping[int, Value] = {}
        """Values that are the same for all devices, by field id."""

    def look(self, *, again: bool = False) -> DcgmLayout:
        """Return the current devices, after a new read of identities that may have changed.

        Args:
            again: Whether to read all identities again, even if the devices are the same.

        Raises:
            SourceError: The engine is gone, or does not list its GPUs.
        """
        present = self._engine.supported_gpus()
        # The driver renumbers its GPUs when one is added or removed.
        again, self._present = again or set(present) != self._present, set(present)
        changed = self._follow_gpus(present, again=again)
        if not self.node_values or again:
            self.node_values = self._read_node(present)
        self._follow_instances(again=again or changed)
        devices = (self._device(gpu_id) for gpu_id in self._gpus)
        return DcgmLayout(
            devices=tuple(sorted(devices, key=lambda one: one.gpu.index)), places=self._places(), listed=len(present)
        )

    def _read_node(self, present: Sequence[int]) -> Mapping[int, Value]:
        """Read the node's fields from the engine, or from its first GPU if it has no entity for the node."""
        for entity in (_NODE, *((GPU, gpu_id) for gpu_id in present[:1])):
            if values := self._live.read([entity], self._node_fields)[entity]:
                return values
        return {}

    def _device(self, gpu_id: int) -> DcgmDevice:
        known, status = self._gpus[gpu_id], self._engine.gpu_status(gpu_id)
        texts = {Field(one): text for one, text in self.node_values.items() if isinstance(text, str)}
        labels = {**known.labels, **{one: text for one, text in texts.items() if one not in _VERSIONS}}
        gpu = replace(known, labels=labels)
        state, reason = _STATES.get(1 if status is None else status, (DeviceState.FAILED, "unknown_status"))
        if state is DeviceState.UP and gpu_id not in self._present:
            state, reason = DeviceState.MISSING, "not_enumerated"
        instances = self._instances.get(gpu_id, ()) if state is DeviceState.UP and gpu.mig_enabled else ()
        return DcgmDevice(gpu_id=gpu_id, gpu=gpu, state=state, reason=reason, instances=instances)

    def _places(self) -> dict[Entity, Place]:
        places: dict[Entity, Place] = {(GPU, gpu_id): (gpu.uuid, None, None) for gpu_id, gpu in self._gpus.items()}
        for entity, row in self._rows.items():
            gpu = self._gpus.get(self._gpu_id(row))
            if gpu is not None:
                part = row.compute_instance_id if entity[0] == COMPUTE_INSTANCE else None
                places[entity] = (gpu.uuid, row.instance_id, part)
        return places

    def _gpu_id(self, row: _Row) -> int:
        """Return the engine's id of the GPU of an instance; -1 if its GPU instance is not listed."""
        if row.parent[0] == GPU:
            return row.parent[1]
        above = self._rows.get(row.parent)
        return -1 if above is None else above.parent[1]

    def _follow_gpus(self, present: Sequence[int], *, again: bool) -> bool:
        """Read the identities of new and replaced GPUs and after MIG changes; of all GPUs with ``again``."""
        changed = False
        values = self._live.read([(GPU, gpu_id) for gpu_id in present], _CHANGES)
        for gpu_id in present:
            known, now = self._gpus.get(gpu_id), values[GPU, gpu_id]
            same = (
                known is not None
                and now.get(UUID, known.uuid) == known.uuid
                and bool(now.get(MIG_MODE, int(known.mig_enabled))) == known.mig_enabled
            )
            if same and not again:
                continue
            gpu = self._identity(gpu_id)
            if gpu is None:
                self._engine.count("dcgm_nameless_gpu")
                continue
            # The engine may number a GPU differently after its return.
            self._gpus = {other: one for other, one in self._gpus.items() if one.uuid != gpu.uuid or other == gpu_id}
            changed = changed or gpu != known
            self._gpus[gpu_id] = gpu
        return changed

    def _identity(self, gpu_id: int) -> Gpu | None:
        entity = (GPU, gpu_id)
        now = self._live.read([entity], (*_IDENTITY, *self._texts))[entity]
        before = self._values.get(gpu_id, {})
        # Values that a GPU does not report during a reset stay.
        values = {**before, **now} if now.get(UUID, before.get(UUID)) == before.get(UUID) else now
        self._values[gpu_id] = values
        uuid, slices = values.get(UUID), whole(values.get(MIG_MAX_SLICES)) or 0
        if not isinstance(uuid, str):
            return None
        index, memory_mib = whole(values.get(NVML_INDEX)), whole(values.get(Field.FB_TOTAL))
        return Gpu(
            uuid=uuid,
            index=gpu_id if index is None else index,
            minor=whole(values.get(MINOR)),
            model=str(values.get(NAME, "unknown")),
            pci_bus_id=str(values.get(BUS_ID, "")).upper(),
            mig_enabled=values.get(MIG_MODE) == 1,
            compute_slices=slices,
            memory_slices=_FULL_MEMORY_SLICES if slices == _FULL_COMPUTE_SLICES else slices,
            memory_total_bytes=memory_mib * _MIB if memory_mib else None,
            labels={Field(one): str(values[one]) for one in self._texts if one in values},
        )

    def _follow_instances(self, *, again: bool) -> None:
        """Read the current instances; their identities if they have changed, or with ``again``."""
        if not any(gpu.mig_enabled for gpu in self._gpus.values()):
            self._rows, self._uuids, self._instances = {}, {}, {}
            return
        rows = self._read_rows()
        if rows is None:
            # Without an answer, the earlier instances stay, since they may have holders.
            return
        parts = [entity for entity in rows if entity[0] == COMPUTE_INSTANCE]
        values = self._live.read(parts, (UUID,))
        # The ids of a destroyed instance are reused for the next one.
        # The UUID of an instance that is not reported now stays.
        known = self._uuids if rows == self._rows else {}
        uuids = {entity: values[entity].get(UUID, known.get(entity)) for entity in parts}
        if rows == self._rows and uuids == self._uuids and self._sizes_known and not again:
            return
        self._rows, self._uuids = rows, uuids
        self._instances = self._identify()
        if None in uuids.values():
            self._engine.count("dcgm_nameless_instance")

    def _read_rows(self) -> dict[Entity, _Row] | None:
        self._hierarchy.version = library.version_word(Hierarchy)
        code = self._engine.call("dcgmGetGpuInstanceHierarchy", byref(self._hierarchy))
        if code != Code.OK:
            self._engine.count(f"mig_{reason_of(code)}")
            return None
        rows = (
            _Row(
                (info.entity.entityGroupId, info.entity.entityId),
                (info.parent.entityGroupId, info.parent.entityId),
                *(info.nvmlInstanceId, info.nvmlComputeInstanceId, info.nvmlMigProfileId, info.nvmlProfileSlices),
            )
            for info in self._hierarchy.entityList[: self._hierarchy.count]
        )
        return {row.entity: row for row in rows}

    def _identify(self) -> dict[int, tuple[Instance, ...]]:
        memory = self._live.read([one for one in self._rows if one[0] == GPU_INSTANCE], (Field.FB_TOTAL,))
        names = self._live.read(list(self._uuids), (NAME,))
        together = Counter(self._rows[entity].parent for entity in self._uuids)
        before = {one.instance.uuid: one.instance for some in self._instances.values() for one in some}
        self._sizes_known = True
        found: dict[int, tuple[Instance, ...]] = {}
        for entity, uuid in self._uuids.items():
            row = self._rows[entity]
            parent, gpu_id = self._rows.get(row.parent), self._gpu_id(row)
            gpu = self._gpus.get(gpu_id)
            if parent is None or gpu is None or not isinstance(uuid, str):
                continue
            known = before.get(uuid)
            memory_slices = _memory_slices(gpu, whole(memory[parent.entity].get(Field.FB_TOTAL)))
            profile = names[entity].get(NAME) or (known.profile if known else "unknown")
            if memory_slices is None:
                # An instance has just been created, or its GPU is being reset.
                self._sizes_known = False
                memory_slices = known.memory_slices if known else 1
            instance = MigInstance(
                uuid=uuid,
                parent_uuid=gpu.uuid,
                gpu_instance_id=parent.instance_id,
                compute_instance_id=row.compute_instance_id,
                profile=str(profile).rpartition(" MIG ")[2],
                compute_slices=row.slices,
                memory_slices=memory_slices,
                profile_id=parent.profile_id,
            )
            alone = together[parent.entity] == 1
            measured = parent.entity if alone and row.slices == parent.slices else entity
            one = Instance(instance=instance, measured=measured, has_memory=alone)
            found[gpu_id] = (*found.get(gpu_id, ()), one)
        return found


def _memory_slices(gpu: Gpu, mib: int | None) -> int | None:
    # Rounded, because an instance has slightly less memory than its slices: the driver reserves some.
    if not mib or not gpu.memory_total_bytes:
        return None
    return max(1, round(gpu.memory_slices * mib * _MIB / gpu.memory_total_bytes))

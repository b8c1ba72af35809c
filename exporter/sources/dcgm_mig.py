"""MIG as the engine tells it: which instances there are, who they are, and which entity is measured for each."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from ctypes import byref
from dataclasses import dataclass

from exporter.model import Field, Gpu, MigInstance
from exporter.sources import _libdcgm
from exporter.sources._libdcgm import COMPUTE_INSTANCE, GPU, GPU_INSTANCE, Hierarchy
from exporter.sources.dcgm_engine import Engine, reason_of
from exporter.sources.dcgm_live import Live
from exporter.sources.dcgm_values import Entity, Value, whole

NAME, UUID = 50, 54
_FB_TOTAL = int(Field.FB_TOTAL)
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One MIG instance, and the entity that is measured for it."""

    instance: MigInstance
    measured: Entity
    """Its GPU instance where it is all of that, else the compute instance itself."""
    has_memory: bool
    """Whether no other compute instance is in its GPU instance; they have its memory together."""

    @property
    def is_part(self) -> bool:
        """Whether it is not all of its GPU instance."""
        return self.measured[0] == COMPUTE_INSTANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of the hierarchy."""

    entity: Entity
    parent: Entity
    instance_id: int
    compute_instance_id: int
    profile_id: int
    slices: int


class Instances:
    """Follows the MIG instances of all GPUs over one connection.

    Args:
        engine: To ask.
        live: Reads names.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, engine: Engine, live: Live, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._live = live
        self._count = count
        self._hierarchy = Hierarchy()
        self._rows: tuple[_Row, ...] = ()
        self._uuids: dict[Entity, Value | None] = {}
        self._found: dict[int, tuple[Instance, ...]] = {}
        self._complete = True
        """Whether the size of every instance was told."""

    def of(self, gpu_id: int) -> tuple[Instance, ...]:
        """Return the instances of a GPU, in the engine's order."""
        return self._found.get(gpu_id, ())

    def places(self) -> Iterator[tuple[Entity, int, int, int | None]]:
        """Yield every entity with the engine's id of its GPU and NVML's ids of its GPU and compute instance."""
        parents = {row.entity: row.parent for row in self._rows}
        for row in self._rows:
            top = row.parent if row.parent[0] == GPU else parents.get(row.parent, (GPU, -1))
            part = row.compute_instance_id if row.entity[0] == COMPUTE_INSTANCE else None
            yield row.entity, top[1], row.instance_id, part

    def follow(self, gpus: Mapping[int, Gpu], *, anew: bool) -> None:
        """See which instances there are now.

        Args:
            gpus: By the engine's id.
            anew: Read who they are though they seem to be the same.

        Raises:
            SourceError: the engine is gone.
        """
        if not any(gpu.mig_enabled for gpu in gpus.values()):
            self._rows, self._uuids, self._found = (), {}, {}
            return
        self._hierarchy.version = _libdcgm.version_word(Hierarchy)
        code = self._engine.call("dcgmGetGpuInstanceHierarchy", byref(self._hierarchy))
        if code != _libdcgm.OK:
            # Not told is not changed: what was there before is still held by somebody.
            self._count(f"mig_{reason_of(code)}")
            return
        rows = tuple(_row(info) for info in self._hierarchy.entityList[: self._hierarchy.count])
        parts = [row.entity for row in rows if row.entity[0] == COMPUTE_INSTANCE]
        told = self._live.read(parts, (UUID,))
        # The ids of an instance that was destroyed are given to the next one.
        # One that is not told now, as while the engine's telemetry is paused, is as it was.
        known = self._uuids if rows == self._rows else {}
        uuids = {entity: told[entity].get(UUID, known.get(entity)) for entity in parts}
        if rows == self._rows and uuids == self._uuids and self._complete and not anew:
            return
        self._rows, self._uuids = rows, uuids
        self._found = self._identify(gpus)
        if None in uuids.values():
            self._count("dcgm_nameless_instance")

    def _identify(self, gpus: Mapping[int, Gpu]) -> dict[int, tuple[Instance, ...]]:
        by_entity = {row.entity: row for row in self._rows}
        memory = self._live.read([one for one in by_entity if one[0] == GPU_INSTANCE], (_FB_TOTAL,))
        names = self._live.read(list(self._uuids), (NAME,))
        together = Counter(by_entity[entity].parent for entity in self._uuids)
        before = {one.instance.uuid: one.instance for some in self._found.values() for one in some}
        self._complete = True
        found: dict[int, list[Instance]] = {}
        for entity, uuid in self._uuids.items():
            row, parent = by_entity[entity], by_entity.get(by_entity[entity].parent)
            gpu = None if parent is None else gpus.get(parent.parent[1])
            if parent is None or gpu is None or not isinstance(uuid, str):
                continue
            known = before.get(uuid)
            memory_slices = _memory_slices(gpu, whole(memory[parent.entity].get(_FB_TOTAL)))
            profile = names[entity].get(NAME) or (known.profile if known else "unknown")
            if memory_slices is None:
                # An instance has just been made, or its GPU is being reset.
                self._complete = False
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
            found.setdefault(parent.parent[1], []).append(one)
        return {gpu_id: tuple(some) for gpu_id, some in found.items()}


def _row(info: _libdcgm.HierarchyInfo) -> _Row:
    entity, parent = info.entity, info.parent
    return _Row(
        entity=(entity.entityGroupId, entity.entityId),
        parent=(parent.entityGroupId, parent.entityId),
        instance_id=info.nvmlInstanceId,
        compute_instance_id=info.nvmlComputeInstanceId,
        profile_id=info.nvmlMigProfileId,
        slices=info.nvmlProfileSlices,
    )


def _memory_slices(gpu: Gpu, mib: int | None) -> int | None:
    # Rounded: an instance has a little less memory than its slices, for the driver keeps some.
    if not mib or not gpu.memory_total_bytes:
        return None
    return max(1, round(gpu.memory_slices * mib * _MIB / gpu.memory_total_bytes))

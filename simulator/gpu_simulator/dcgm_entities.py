"""Entities of the simulated host engine: GPUs that stay known, instances with DCGM's own ids in slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, GPU, GPU_INSTANCE, NONE
from gpu_simulator.truth import Fault, GpuTruth, MigTruth, NodeTruth

_Name = TypeVar("_Name", int, str)

INSTANCES_PER_GPU = 8
_NO_DRIVER = frozenset({Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISSING})
"""The engine has let go of its GPUs. One whose driver was replaced under it has them still and can ask nothing."""

STATUS_OK = 1
STATUS_LOST = 4
STATUS_DETACHED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """What an id stands for now: the node, a GPU, or a GPU or compute instance with its members."""

    group: int
    id: int
    gpu: GpuTruth | None = None
    members: tuple[MigTruth, ...] = ()
    """Compute instances: all of a GPU instance, or the one."""

    @property
    def name(self) -> str:
        """What tells it from another that had the same id before."""
        return ",".join(one.uuid for one in self.members) or (self.gpu.uuid if self.gpu else "")


@dataclass(slots=True)
class Entities:
    """Ids of everything, kept from truth to truth: survivors of a new MIG layout keep their slot."""

    gpus: dict[int, GpuTruth] = field(default_factory=dict)
    """By DCGM's id; one that vanished stays."""
    instance_slots: dict[int, list[int | None]] = field(default_factory=dict)
    """Per GPU id: the GPU-instance id in each slot."""
    compute_slots: dict[int, list[str | None]] = field(default_factory=dict)
    """Per GPU id: the UUID of the compute instance in each slot."""
    _ids: dict[str, int] = field(default_factory=dict)
    _present: frozenset[str] = frozenset()

    def follow(self, node: NodeTruth) -> None:
        """Take in a new truth."""
        present = () if _NO_DRIVER & node.faults.keys() else node.gpus
        for gpu in present:
            number = self._ids.setdefault(gpu.uuid, len(self._ids))
            self.gpus[number] = gpu
            alive = gpu.instances if gpu.mig_enabled else ()
            _fill(self.instance_slots.setdefault(number, []), [one.gpu_instance_id for one in alive])
            _fill(self.compute_slots.setdefault(number, []), [one.uuid for one in alive])
        self._present = frozenset(gpu.uuid for gpu in present if gpu.fault is not Fault.GPU_ABSENT)

    def status(self, number: int) -> int:
        """DcgmEntityStatus of a GPU; 0 for one that nobody knows."""
        gpu = self.gpus.get(number)
        if gpu is None:
            return 0
        if gpu.uuid not in self._present:
            return STATUS_DETACHED
        return STATUS_LOST if gpu.fault is Fault.GPU_LOST else STATUS_OK

    def ids(self, group: int, *, supported_only: bool = False) -> list[int]:
        """Ids of all entities of a group."""
        if group == GPU:
            return [one for one in self.gpus if not supported_only or self.status(one) != STATUS_DETACHED]
        if group == GPU_INSTANCE:
            return self._taken(self.instance_slots)
        return self._taken(self.compute_slots) if group == COMPUTE_INSTANCE else []

    def _taken(self, slots: Mapping[int, Sequence[int | str | None]]) -> list[int]:
        return [
            number * INSTANCES_PER_GPU + slot
            for number in self.ids(GPU, supported_only=True)
            for slot, held in enumerate(slots.get(number, ()))
            if held is not None
        ]

    def find(self, group: int, number: int) -> Entity | None:
        """What an id stands for; ``None`` for one that is not there (any more)."""
        if group == NONE:
            return Entity(group=NONE, id=number)
        if group == GPU:
            gpu = self.gpus.get(number)
            return Entity(group=group, id=number, gpu=gpu) if gpu else None
        gpu = self.gpus.get(number // INSTANCES_PER_GPU)
        if gpu is None or group not in (GPU_INSTANCE, COMPUTE_INSTANCE) or number not in self.ids(group):
            return None
        slot = number % INSTANCES_PER_GPU
        if group == COMPUTE_INSTANCE:
            uuid = self.compute_slots[number // INSTANCES_PER_GPU][slot]
            members = tuple(one for one in gpu.instances if one.uuid == uuid)
        else:
            held = self.instance_slots[number // INSTANCES_PER_GPU][slot]
            members = tuple(one for one in gpu.instances if one.gpu_instance_id == held)
        return Entity(group=group, id=number, gpu=gpu, members=members)


def _fill(slots: list[_Name | None], alive: list[_Name]) -> None:
    slots[:] = [held if held in alive else None for held in slots]
    for name in alive:
        if name in slots:
            continue
        if None in slots:
            slots[slots.index(None)] = name
        else:
            slots.append(name)

"""Finds the devices of a node by the names in ids."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from exporter.attribution.device_ids import IdKind, ParsedId, ReplicaKey, comparable_profile
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance

PASSED_THROUGH = "dra_passed_through"
"""Reason of a device that is passed through to a virtual machine: the driver does not list it, without a fault."""
_NOT_HERE = frozenset({"unknown_uuid", "unknown_minor", "unknown_instance"})
"""Reasons of an id of a device that the driver does not list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfGpu:
    """Part of the physical GPU that a device has, 0..1."""

    ratio: float
    estimated: bool = False


_WHOLE = PartOfGpu(ratio=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Devices by UUID, minor number and place; built once per join."""

    gpus: Mapping[str, Gpu]
    instances: Mapping[str, MigInstance]
    parts: Mapping[str, PartOfGpu]
    """Part of the GPU by UUID of the device."""
    by_minor: Mapping[int, str]
    incomplete: frozenset[str]
    """UUIDs of GPUs in MIG mode with instances that the driver may not have listed."""

    @classmethod
    def of(cls, readings: Sequence[GpuReading]) -> Self:
        """Index the devices that the driver reports; a minor number identifies the first present GPU with it."""
        # The number of a missing GPU may belong to another GPU now.
        by_rank = [reading.gpu for reading in sorted(readings, key=lambda one: one.state is DeviceState.MISSING)]
        return cls(
            gpus={reading.uuid: reading.gpu for reading in readings},
            instances={part.uuid: part.instance for reading in readings for part in reading.instances},
            parts={uuid: part for reading in readings for uuid, part in parts_of(reading).items()},
            by_minor={gpu.minor: gpu.uuid for gpu in reversed(by_rank) if gpu.minor is not None},
            incomplete=frozenset(
                one.uuid for one in readings if one.gpu.mig_enabled and (one.lacks_instances or not one.instances)
            ),
        )

    def gpu_of(self, uuid: str) -> str:
        """Return the UUID of a device's physical GPU."""
        instance = self.instances.get(uuid)
        return instance.parent_uuid if instance else uuid

    def memory_bytes(self, uuid: str) -> int | None:
        """Return the memory of a device's physical GPU in bytes; ``None`` if the driver does not report it."""
        return self.gpus[self.gpu_of(uuid)].memory_total_bytes

    def resolve(self, parsed: ParsedId) -> tuple[tuple[str, ...], str]:
        """Find the devices that an id identifies.

        Returns:
            UUIDs and an empty reason, or nothing and a snake-case reason.
        """
        if parsed.kind in (IdKind.NEEDS_ANNOTATION, IdKind.UNKNOWN):
            return (), parsed.reason
        if parsed.kind is IdKind.ALL:
            found, reason = tuple(self.gpus), "no_devices"
        elif parsed.kind in (IdKind.GPU, IdKind.MIG):
            uuid = parsed.uuid or ""
            found, reason = (uuid,) if uuid in self.parts else (), "unknown_uuid"
        else:
            found, reason = self._placed(parsed)
        return found, "" if found else reason

    def physical(self, parsed: ParsedId) -> str | None:
        """Return the physical GPU of an id, also if the driver does not report it.

        Returns:
            A UUID, ``minor <n>`` if that is the only known name, or ``None`` if the id identifies no GPU.
        """
        if parsed.uuid is not None and parsed.uuid.startswith("MIG-"):
            instance = self.instances.get(parsed.uuid)
            return instance.parent_uuid if instance else None
        if parsed.minor is not None:
            return self.by_minor.get(parsed.minor, f"minor {parsed.minor}")
        return parsed.uuid

    def physical_gpus(self, ids: Iterable[ParsedId]) -> set[str] | None:
        """Return the physical GPUs of ids; ``None`` if one of the ids identifies no GPU."""
        found: set[str | None] = set()
        for parsed in ids:
            found |= self.gpus.keys() if parsed.kind is IdKind.ALL else {self.physical(parsed)}
        known = {gpu for gpu in found if gpu is not None}
        return known if len(known) == len(found) else None

    def replicas(self, ids: Iterable[tuple[str, ParsedId]]) -> dict[ReplicaKey, set[int]]:
        """Return the numbers of replicas in ids by device and resource, also of devices that are not listed (yet).

        Args:
            ids: Pairs of resource and id.
        """
        numbers: dict[ReplicaKey, set[int]] = {}
        for resource, parsed in ids:
            if parsed.replica is not None:
                named = (parsed.uuid,) if parsed.uuid and parsed.kind in {IdKind.GPU, IdKind.MIG} else ()
                for uuid in self.resolve(parsed)[0] or named:
                    numbers.setdefault((uuid, resource), set()).add(parsed.replica)
        return numbers

    def may_have(self, uuid: str) -> bool:
        """Return whether a device is listed, or no devices are known."""
        return not self.parts or uuid in self.parts

    def suspects(self, parsed: ParsedId, reason: str) -> tuple[str, ...] | None:
        """Return the devices that an unresolved id can identify, whole or in part; ``None`` for any device.

        An id of a device that the driver does not list can be that of an instance that the driver left out.
        """
        gpu = self.physical(parsed)
        gpus: Iterable[str]
        if reason == PASSED_THROUGH:
            return ()
        if reason in _NOT_HERE:
            gpus = self.incomplete if parsed.kind is IdKind.MIG else self.incomplete.intersection([gpu])
        elif parsed.minor is not None and parsed.minor not in self.by_minor:
            gpus = [one.uuid for one in self.gpus.values() if one.minor is None]
        elif gpu is None:
            return None
        else:
            gpus = [gpu]
        return (*gpus, *(uuid for uuid, instance in self.instances.items() if instance.parent_uuid in gpus))

    def profile(self, parsed: ParsedId) -> tuple[str | None, str] | None:
        """Return GPU and profile of an id if only these identify its instance; otherwise ``None``."""
        if parsed.profile is None:
            return None
        gpu = self.physical(parsed)
        starts = [parsed.placement_start, *(one.placement_start for one in self._instances_of(gpu))]
        return (gpu, parsed.profile) if None in starts else None

    def _instances_of(self, gpu: str | None) -> list[MigInstance]:
        return [instance for instance in self.instances.values() if instance.parent_uuid == gpu]

    def _placed(self, parsed: ParsedId) -> tuple[tuple[str, ...], str]:
        gpu = parsed.uuid if parsed.minor is None else self.by_minor.get(parsed.minor)
        if gpu is None or gpu not in self.gpus:
            if parsed.minor is None:
                return (), "unknown_uuid"
            return (), "minor_not_told" if any(one.minor is None for one in self.gpus.values()) else "unknown_minor"
        if parsed.kind is IdKind.MINOR and parsed.gpu_instance_id is None:
            return (gpu,), ""
        found = [inst.uuid for inst in self._instances_of(gpu) if _is_named(parsed, inst)]
        reason = "dra_unresolved" if parsed.kind is IdKind.MINOR_PROFILE else "unknown_instance"
        return (tuple(found) if len(found) == 1 else ()), reason


def parts_of(reading: GpuReading) -> dict[str, PartOfGpu]:
    """Return the parts of the physical GPU that the GPU and its MIG instances have, by UUID.

    The part of an instance is the larger of its compute slices and its memory slices, as parts of the GPU. Compute
    instances of one GPU instance share its memory, so it is divided among them by compute slices. If the parts sum to
    more than 1 (3g + 4g is 15/14), they are divided by their sum. If slices are unknown, all parts are equal and
    estimated.
    """
    gpu, instances = reading.gpu, [part.instance for part in reading.instances]
    compute_within: Counter[int] = Counter()
    for instance in instances:
        compute_within[instance.gpu_instance_id] += instance.compute_slices
    raw: dict[str, float] = {}
    for instance in instances:
        if min(gpu.compute_slices, gpu.memory_slices, instance.compute_slices) <= 0:
            equal = PartOfGpu(ratio=1 / len(instances), estimated=True)
            return {gpu.uuid: _WHOLE, **{one.uuid: equal for one in instances}}
        compute = instance.compute_slices / gpu.compute_slices
        within = instance.compute_slices / compute_within[instance.gpu_instance_id]
        raw[instance.uuid] = max(compute, within * max(instance.memory_slices, 0) / gpu.memory_slices)
    excess = max(sum(raw.values()), 1.0)
    return {gpu.uuid: _WHOLE, **{uuid: PartOfGpu(ratio=part / excess) for uuid, part in raw.items()}}


def _is_named(parsed: ParsedId, instance: MigInstance) -> bool:
    if parsed.kind is IdKind.MINOR_PROFILE:
        have = (instance.profile_id, instance.placement_start)
        named = (parsed.profile_id, parsed.placement_start)
        if any(one is not None and other is not None and one != other for one, other in zip(have, named, strict=True)):
            return False
        # A compute instance that is smaller than its GPU instance has another profile.
        return None not in (*have, *named) or comparable_profile(instance.profile) == parsed.profile
    place = (parsed.gpu_instance_id, parsed.compute_instance_id)
    return (instance.gpu_instance_id, instance.compute_instance_id) == place

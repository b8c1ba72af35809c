"""Finds the devices of a node by any name that an id can contain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, assert_never

from exporter.attribution.device_ids import IdKind, ParsedId, comparable_profile
from exporter.model import Gpu, MigInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfGpu:
    """A device's part of its physical GPU, 0..1."""

    ratio: float
    estimated: bool = False


_WHOLE = PartOfGpu(ratio=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Devices by UUID, minor number and place; built once per join."""

    gpus: Mapping[str, Gpu]
    instances: Mapping[str, MigInstance]
    parts: Mapping[str, PartOfGpu]
    """Part of the GPU by UUID of the instance."""
    by_minor: Mapping[int, str]
    by_index: Mapping[int, str]

    @classmethod
    def of(cls, gpus: Sequence[Gpu], instances: Sequence[MigInstance]) -> Self:
        """Index the devices that the driver reports.

        Args:
            gpus: Physical GPUs; if two have the same minor number, the first one counts.
            instances: MIG instances; those without their GPU in ``gpus`` are left out.
        """
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        parts: dict[str, PartOfGpu] = {}
        for gpu in by_uuid.values():
            parts.update(instance_parts(gpu, [inst for inst in instances if inst.parent_uuid == gpu.uuid]))
        return cls(
            gpus=by_uuid,
            instances={instance.uuid: instance for instance in instances if instance.parent_uuid in by_uuid},
            parts=parts,
            by_minor={gpu.minor: gpu.uuid for gpu in reversed(gpus) if gpu.minor is not None},
            by_index={gpu.index: gpu.uuid for gpu in reversed(gpus)},
        )

    def gpu_of(self, uuid: str) -> str:
        """Return the UUID of a device's physical GPU."""
        instance = self.instances.get(uuid)
        return instance.parent_uuid if instance else uuid

    def part_of_gpu(self, uuid: str) -> PartOfGpu:
        """Return a device's part of its physical GPU: 1 for a whole one."""
        return self.parts.get(uuid, _WHOLE)

    def resolve(self, parsed: ParsedId) -> tuple[tuple[str, ...], str]:
        """Find the devices that an id identifies.

        Returns:
            UUIDs and an empty reason, or nothing and a snake-case reason.
        """
        found: tuple[str, ...]
        match parsed.kind:
            case IdKind.NEEDS_ANNOTATION | IdKind.UNKNOWN:
                found, reason = (), parsed.reason
            case IdKind.ALL:
                found, reason = tuple(self.gpus), "no_devices"
            case IdKind.GPU:
                found, reason = self._present(parsed.uuid, self.gpus), "unknown_uuid"
            case IdKind.MIG:
                found, reason = self._present(parsed.uuid, self.instances), "unknown_uuid"
            case IdKind.INDEX:
                found, reason = self._present(self.by_index.get(parsed.index or 0), self.gpus), "unknown_index"
            case IdKind.LEGACY_MIG | IdKind.MINOR | IdKind.MINOR_PROFILE:
                found, reason = self._placed(parsed)
            case _:
                assert_never(parsed.kind)
        return found, "" if found else reason

    def physical(self, parsed: ParsedId) -> str | None:
        """Return the physical GPU behind an id, also if the driver does not report it.

        Returns:
            A UUID, ``minor <n>`` or ``index <n>`` if that is the only known name, or ``None`` if the id identifies no
            GPU.
        """
        if parsed.uuid is not None and parsed.uuid.startswith("MIG-"):
            instance = self.instances.get(parsed.uuid)
            return instance.parent_uuid if instance else None
        if parsed.minor is not None:
            return self.by_minor.get(parsed.minor, f"minor {parsed.minor}")
        if parsed.index is not None:
            return self.by_index.get(parsed.index, f"index {parsed.index}")
        return parsed.uuid

    def suspects(self, parsed: ParsedId) -> tuple[str, ...] | None:
        """Return the physical GPUs that an unresolved id may refer to, whole or in part; ``None``: any GPU."""
        if parsed.minor is not None and parsed.minor not in self.by_minor:
            return tuple(gpu.uuid for gpu in self.gpus.values() if gpu.minor is None)
        if parsed.index is not None:  # indexes are valid for one boot, and the id may be from an earlier one
            return None
        gpu = self.physical(parsed)
        return None if gpu is None else (gpu,)

    def knows_places(self, parsed: ParsedId) -> bool:
        """Return whether profile and placement identify an instance unambiguously."""
        instances = self._instances_of(self.physical(parsed))
        return parsed.placement_start is not None and all(inst.placement_start is not None for inst in instances)

    def _instances_of(self, gpu: str | None) -> list[MigInstance]:
        return [instance for instance in self.instances.values() if instance.parent_uuid == gpu]

    @staticmethod
    def _present(uuid: str | None, known: Mapping[str, object]) -> tuple[str, ...]:
        return (uuid,) if uuid is not None and uuid in known else ()

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


def instance_parts(gpu: Gpu, instances: Sequence[MigInstance]) -> dict[str, PartOfGpu]:
    """Return each MIG instance's part of its GPU.

    The part is the larger of its compute slices and its memory slices, as parts of the GPU. Compute instances of one
    GPU instance share its memory, so it is divided among them by compute. Where the parts sum to more than the GPU
    (3g + 4g is 15/14), they are divided by their sum. Where slices are unknown, all parts are equal and estimated.

    Args:
        gpu: The parent.
        instances: All instances of the parent.

    Returns:
        Part by UUID of the instance.
    """
    compute_within: dict[int, int] = {}
    for instance in instances:
        compute_within.setdefault(instance.gpu_instance_id, 0)
        compute_within[instance.gpu_instance_id] += instance.compute_slices
    raw: dict[str, float] = {}
    for instance in instances:
        if min(gpu.compute_slices, gpu.memory_slices, instance.compute_slices) <= 0:
            return {one.uuid: PartOfGpu(ratio=1 / len(instances), estimated=True) for one in instances}
        compute = instance.compute_slices / gpu.compute_slices
        within = instance.compute_slices / compute_within[instance.gpu_instance_id]
        raw[instance.uuid] = max(compute, within * max(instance.memory_slices, 0) / gpu.memory_slices)
    excess = max(sum(raw.values()), 1.0)
    return {uuid: PartOfGpu(ratio=part / excess) for uuid, part in raw.items()}


def _is_named(parsed: ParsedId, instance: MigInstance) -> bool:
    if parsed.kind is IdKind.MINOR_PROFILE:
        have = (instance.profile_id, instance.placement_start)
        named = (parsed.profile_id, parsed.placement_start)
        if any(one is not None and other is not None and one != other for one, other in zip(have, named, strict=True)):
            return False
        # The profile of a compute instance that is smaller than its GPU instance differs from that one's profile.
        return None not in (*have, *named) or comparable_profile(instance.profile) == parsed.profile
    place = (parsed.gpu_instance_id, parsed.compute_instance_id)
    return (instance.gpu_instance_id, instance.compute_instance_id) == place

"""Which fields are watched on which entities, and how often: what an entity cannot have is not asked of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from exporter.model import CODECS, DeviceState, Field
from exporter.sources._libdcgm import COMPUTE_INSTANCE, GPU_INSTANCE, MAX_ENTITIES_PER_GROUP, MAX_FIELDS_PER_GROUP
from exporter.sources.dcgm_entities import Layout
from exporter.sources.dcgm_fields import (
    DRAM_ACTIVE,
    MEMORY,
    NOT_OF_INSTANCES,
    is_profiling,
    is_slow,
)
from exporter.sources.dcgm_mig import Instance
from exporter.sources.dcgm_values import Entity

OF_INSTANCES = frozenset({GPU_INSTANCE, COMPUTE_INSTANCE})
"""Levels of fields of which a MIG instance has its own value, and not its GPU's."""


class Pace(Enum):
    """How often the engine measures, and apart from what else."""

    FAST = auto()
    """Every sample."""
    SLOW = auto()
    """Every few samples; the last value is carried between."""
    PROFILING = auto()
    """Every sample, in groups of their own: without the module a whole watch fails."""
    CODECS = auto()
    """The same of codec units; apart, for those that a GPU lacks are soon left out, which disturbs a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """Entities of one kind that are watched for the same fields."""

    pace: Pace
    members: tuple[Entity, ...]
    field_ids: tuple[int, ...]


def plan(
    layout: Layout,
    levels: Mapping[int, int],
    profiled: Callable[[int], frozenset[int]],
    refused: Callable[[Entity, int], bool],
    most_fields: int = MAX_FIELDS_PER_GROUP,
) -> tuple[Watching, ...]:
    """Return what to watch; devices that can have the same are together.

    Args:
        layout: The devices; those that are not up are left alone.
        levels: Field id to the entity level of the field.
        profiled: Gives the profiling fields that can be had of a GPU, by the engine's id of it.
        refused: Tells what the engine would not watch a while ago.
        most_fields: How many fields the engine takes in one watch.
    """
    members: dict[tuple[Pace, int, tuple[int, ...]], list[Entity]] = {}
    for entity, field_ids in _wanted(layout, levels, profiled):
        by_pace: dict[Pace, list[int]] = {}
        for one in field_ids:
            if not refused(entity, one):
                by_pace.setdefault(_pace(one), []).append(one)
        for pace, some in by_pace.items():
            for start in range(0, len(some), most_fields):
                key = (pace, entity[0], tuple(some[start : start + most_fields]))
                members.setdefault(key, []).append(entity)
    return tuple(
        Watching(pace=pace, members=tuple(entities[start : start + MAX_ENTITIES_PER_GROUP]), field_ids=field_ids)
        for (pace, _, field_ids), entities in members.items()
        for start in range(0, len(entities), MAX_ENTITIES_PER_GROUP)
    )


def _wanted(
    layout: Layout, levels: Mapping[int, int], profiled: Callable[[int], frozenset[int]]
) -> Iterator[tuple[Entity, list[int]]]:
    for device in layout.devices:
        if device.state is not DeviceState.UP:
            continue
        can = profiled(device.gpu_id)
        yield device.entity, [one for one in sorted(levels) if not is_profiling(one) or one in can]
        for one in device.instances:
            yield one.measured, _of_instance(one, levels, can)


def _of_instance(instance: Instance, levels: Mapping[int, int], can: frozenset[int]) -> list[int]:
    left_out = set(NOT_OF_INSTANCES)
    if not instance.has_memory:
        left_out |= MEMORY
    if instance.is_part:
        left_out.add(DRAM_ACTIVE)
    own = [one for one, level in sorted(levels.items()) if level in OF_INSTANCES and one not in left_out]
    return [one for one in own if not is_profiling(one) or one in can]


def _pace(field_id: int) -> Pace:
    if is_profiling(field_id):
        return Pace.CODECS if field_id in CODECS else Pace.PROFILING
    return Pace.SLOW if is_slow(Field(field_id)) else Pace.FAST

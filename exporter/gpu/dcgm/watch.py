"""Manages the watches of one connection: plans them, splits refused watches, and reads values."""

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from ctypes import byref, c_double, c_int, c_int64, c_uint, c_ushort
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum, auto

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.engine import Engine
from exporter.gpu.dcgm.entities import DcgmLayout, Instance
from exporter.gpu.dcgm.library import MAX_ENTITIES_PER_GROUP, MAX_FIELDS_PER_GROUP, Code, Handle, reason_of
from exporter.gpu.dcgm.readings import CurrentValues, Entity, Inbox, Value
from exporter.model.devices import DeviceState
from exporter.model.fields import CODECS, PROFILING, Field


class RefusedError(Exception):
    """The engine refused a watch; not raised outside the sources. ``code`` is its dcgmReturn_t."""

    def __init__(self, code: int) -> None:
        """Store the code of the refusal."""
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class FieldGroup:
    """An active watch; ``close`` ends it.

    Raises:
        RefusedError: One of the steps was refused; the completed steps are undone.
        SourceError: The engine is gone.
    """

    engine: Engine
    members: Sequence[Entity]
    """Entities of any groups, at most ``MAX_ENTITIES_PER_GROUP``."""
    field_ids: Sequence[int]
    """Field ids that the library knows, at most ``MAX_FIELDS_PER_GROUP``."""
    _: KW_ONLY
    every_seconds: float
    """Interval at which the engine measures."""
    keep_seconds: float = 0.0
    """Time for which the engine keeps values; 0.0 for no limit."""
    samples: int = 1
    """Number of values per field that the engine keeps."""
    _group: Handle = field(default_factory=Handle, init=False)
    _fields: Handle = field(default_factory=Handle, init=False)
    _undo: list[tuple[str, tuple[Handle, ...]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Create both groups, and watch."""
        try:
            self._make()
            self._do("dcgmWatchFields", *self._watch)
        except RefusedError:
            self.close()
            raise
        self._undo.append(("dcgmUnwatchFields", (self._group, self._fields)))

    @property
    def _watch(self) -> tuple[object, ...]:
        microseconds = c_int64(round(self.every_seconds * 1e6))
        return self._group, self._fields, microseconds, c_double(self.keep_seconds), c_int(self.samples)

    def renew(self) -> None:
        """Watch again after a group with some of the same members and fields was closed.

        The engine watches a field of an entity once per connection, independent of the number of groups.

        Raises:
            SourceError: The engine is gone.
        """
        self.engine.call("dcgmWatchFields", *self._watch)

    def _make(self) -> None:
        # Names of field groups are global in the engine, and those of two agents must differ.
        name = f"gpu-cost-exporter-{os.urandom(8).hex()}".encode()
        self._do("dcgmGroupCreate", c_int(library.EMPTY_GROUP), name, byref(self._group))
        self._undo.append(("dcgmGroupDestroy", (self._group,)))
        for entity_group, entity_id in self.members:
            self._do("dcgmGroupAddEntity", self._group, c_uint(entity_group), c_uint(entity_id))
        ids = (c_ushort * len(self.field_ids))(*self.field_ids)
        self._do("dcgmFieldGroupCreate", c_int(len(self.field_ids)), ids, name, byref(self._fields))
        self._undo.append(("dcgmFieldGroupDestroy", (self._fields,)))

    def _do(self, name: str, *arguments: object) -> None:
        code = self.engine.call(name, *arguments)
        if code != Code.OK:
            raise RefusedError(code)

    def close(self) -> None:
        """End the watch; an error of the engine is ignored.

        Raises:
            SourceError: The engine is gone, which also ends the watch.
        """
        while self._undo:
            name, arguments = self._undo.pop()
            self.engine.call(name, *arguments)

    def latest(self, callback: Callable[..., int]) -> int:
        """Request the latest values for the callback, and return the code."""
        return self.engine.call("dcgmGetLatestValues_v2", self._group, self._fields, callback, None)

    def since(self, microseconds: int, callback: Callable[..., int]) -> int:
        """Request every value since a time of the engine's clock for the callback, and return the code.

        The library makes a round trip for each entity and field.
        """
        # The returned time to continue from is not used, because the clock of the engine can be set back.
        go_on = c_int64(0)
        return self.engine.call(
            "dcgmGetValuesSince_v2",
            *(self._group, self._fields, c_int64(microseconds), byref(go_on), callback, None),
        )


NOT_OF_INSTANCES = frozenset({1009, 1010, 1011, 1012})
"""Fields of PCIe and NVLink, which only the board has; on an instance, the engine logs an error at each interval."""

MEMORY = frozenset({90, 92, 93, 250, 251, 252, 253, 254})
"""Fields of memory, which the compute instances of one GPU instance share."""

DRAM_ACTIVE = 1005
"""Field that needs a whole GPU instance; on a part of one it is blank, and the engine logs an error per interval."""

_FAST = frozenset(
    {
        Field.SM_CLOCK,
        Field.MEM_CLOCK,
        Field.VIDEO_CLOCK,
        Field.CLOCK_THROTTLE_REASONS,
        Field.MEMORY_TEMP,
        Field.GPU_TEMP,
        Field.POWER_USAGE,
        Field.TOTAL_ENERGY_CONSUMPTION,
        Field.POWER_USAGE_INSTANT,
        Field.PSTATE,
        Field.GPU_UTIL,
        Field.MEM_COPY_UTIL,
        Field.ENC_UTIL,
        Field.DEC_UTIL,
        Field.FB_TOTAL,
        Field.FB_FREE,
        Field.FB_USED,
        Field.FB_RESERVED,
        Field.FB_USED_PERCENT,
        Field.NVLINK_BANDWIDTH_TOTAL,
    }
)
OF_INSTANCES = frozenset({library.GPU_INSTANCE, library.COMPUTE_INSTANCE})
"""Levels of fields for which a MIG instance has a separate value."""


class WatchPace(Enum):
    """Pace of measurements; fields of different paces are in different groups."""

    FAST = auto()
    """Every sample."""
    SLOW = auto()
    """Every few samples; the last value is reported in between."""
    PROFILING = auto()
    """Every sample, in separate groups: without the module, a whole watch fails."""
    CODECS = auto()
    """Like ``PROFILING``, for codec units: missing units are soon left out, which interrupts their group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """Entities of one kind with the same watched fields."""

    pace: WatchPace
    members: tuple[Entity, ...]
    field_ids: tuple[int, ...]


def plan(
    layout: DcgmLayout,
    levels: Mapping[int, int],
    profiled: Callable[[int], frozenset[int]],
    refused: Collection[tuple[Entity, int]] = (),
) -> tuple[Watching, ...]:
    """Return the watches to create; devices with the same fields are combined.

    Args:
        layout: The devices; only devices that are up are watched.
        levels: Field id to the entity level of the field.
        profiled: Returns the profiling fields of a GPU, by the engine's id.
        refused: Entities and fields that the engine recently refused to watch.
    """
    members: dict[tuple[WatchPace, int, tuple[int, ...]], list[Entity]] = {}
    for entity, field_ids in _wanted(layout, levels, profiled):
        by_pace: dict[WatchPace, list[int]] = {}
        for one in field_ids:
            if (entity, one) not in refused:
                by_pace.setdefault(_pace(one), []).append(one)
        for pace, some in by_pace.items():
            for start in range(0, len(some), MAX_FIELDS_PER_GROUP):
                key = (pace, entity[0], tuple(some[start : start + MAX_FIELDS_PER_GROUP]))
                members.setdefault(key, []).append(entity)
    return tuple(
        Watching(pace=pace, members=tuple(entities[start : start + MAX_ENTITIES_PER_GROUP]), field_ids=field_ids)
        for (pace, _, field_ids), entities in members.items()
        for start in range(0, len(entities), MAX_ENTITIES_PER_GROUP)
    )


def _wanted(
    layout: DcgmLayout, levels: Mapping[int, int], profiled: Callable[[int], frozenset[int]]
) -> Iterator[tuple[Entity, list[int]]]:
    for device in layout.devices:
        if device.state is DeviceState.UP:
            can = profiled(device.gpu_id)
            own = [one for one in sorted(levels) if one not in PROFILING or one in can]
            yield device.entity, own
            for part in device.instances:
                yield part.measured, [one for one in own if levels[one] in OF_INSTANCES and one not in _lacking(part)]


def _lacking(instance: Instance) -> frozenset[int]:
    """Return the fields that an instance does not have itself."""
    shared = frozenset() if instance.has_memory else MEMORY
    is_part = instance.measured[0] == library.COMPUTE_INSTANCE
    return NOT_OF_INSTANCES | shared | frozenset({DRAM_ACTIVE} if is_part else ())


def _pace(field_id: int) -> WatchPace:
    if field_id in PROFILING:
        return WatchPace.CODECS if field_id in CODECS else WatchPace.PROFILING
    return WatchPace.FAST if field_id in _FAST or Field(field_id).only_dcgm else WatchPace.SLOW


_SHORTEST_SECONDS = {WatchPace.FAST: 0.0, WatchPace.SLOW: 10.0, WatchPace.PROFILING: 0.1, WatchPace.CODECS: 0.1}
"""Minimum interval of each pace; for profiling, a limit of the counters of the hardware."""
_MISSED_UPDATES = 3.0
_RETRY_SECONDS = 600.0
_FULL_RETRY_SECONDS = 60.0
_SILENT_SECONDS = 10.0
_SILENT_RETRY_SECONDS = 3600.0
_ROUNDS = 4
_WAIT = 1
"""Argument of the call that makes the engine measure all due fields: wait for the end."""
_EARLY = 0.1
"""Tolerated earliness of a read, as a part of the interval."""
NOT_UP = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.DETACHED})
"""Codes of values of an entity that is not up."""
_NOTHING_YET = frozenset({Code.OK, Code.NO_DATA, Code.NOT_WATCHED, Code.STALE})

Values = Mapping[Entity, Mapping[int, Value]]


@dataclass(slots=True, kw_only=True)
class _Watch:
    """An active watch, and its last values."""

    group: FieldGroup
    pace: WatchPace
    current: CurrentValues
    begun_at: float
    read_at: float = -math.inf
    values: Values = field(default_factory=dict)
    codes: Mapping[Entity, int] = field(default_factory=dict)
    gone: bool = False
    spoke: bool = False
    """Whether it had a value at the last read."""

    def is_awaited(self, now: float) -> bool:
        """Return whether a first value is expected now; the interval of the engine may be slightly later."""
        age = now - self.begun_at
        begun = (1 - _EARLY) * self.group.every_seconds <= age <= _MISSED_UPDATES * self.group.every_seconds
        return self.pace is WatchPace.PROFILING and not self.spoke and begun

    def is_due(self, now: float) -> bool:
        # At first with every sample, because the time of the first values is unknown.
        if now - self.begun_at < 2 * self.group.every_seconds:
            return True
        return now - self.read_at >= self.group.every_seconds * (0.5 - _EARLY)


@dataclass(slots=True)
class Watches:
    """Creates and reads all watches of one connection."""

    engine: Engine
    interval_seconds: float
    """Time between samples."""
    inbox: Inbox
    """Receives the values."""
    levels: Mapping[int, int]
    """Fields to watch, with the entity level of each."""
    profiling_stopped: bool = False
    """Whether profiling values stopped at the last read."""
    _standing: dict[Watching, _Watch] = field(default_factory=dict)
    _refused: dict[tuple[Entity, int], tuple[int, float]] = field(default_factory=dict)
    """Code of the refusal and time of the next attempt, by entity and field."""
    _codecs: dict[Entity, Mapping[int, Value]] = field(default_factory=dict)

    def stands_for(self, entity: Entity) -> bool:
        """Return whether any field of an entity is watched."""
        return any(entity in watching.members for watching in self._standing)

    @property
    def full(self) -> bool:
        """Whether no field is watched because the engine has no room for another group."""
        return not self._standing and any(code == Code.LIMIT_REACHED for code, _ in self._refused.values())

    def refusal_of(self, entity: Entity, field_ids: Collection[int]) -> int | None:
        """Return the code with which all of the fields were refused; ``None`` if some were not."""
        codes = [self._refused[entity, one][0] for one in sorted(field_ids) if (entity, one) in self._refused]
        return codes[0] if codes and len(codes) == len(field_ids) else None

    def follow(self, layout: DcgmLayout, profiled: Callable[[int], frozenset[int]], now: float) -> None:
        """Create the planned watches and end all others; existing watches continue undisturbed.

        Args:
            layout: The devices.
            profiled: Returns the profiling fields of a GPU, by the engine's id.
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: The engine is gone.
        """
        self._refused = {key: (code, until) for key, (code, until) in self._refused.items() if now < until}
        self._leave_out_silent(now)
        for watching in [one for one, watch in self._standing.items() if watch.gone]:
            self._standing.pop(watching).group.close()
        made = False
        ended: list[Watching] = []
        wanted: Sequence[Watching] = ()
        for _ in range(_ROUNDS):
            wanted = plan(layout, self.levels, profiled, self._refused)
            missing = [one for one in wanted if one not in self._standing]
            refusals = [one for one in missing if not self._begin(one, now)]
            made = made or len(refusals) < len(missing)
            # The attempts for parts of refused watches have ended watches.
            ended += refusals
            if not refusals:
                break
        # Ended last, so that values in both the old and the new watches are not interrupted.
        for watching in [one for one in self._standing if one not in wanted]:
            self._standing.pop(watching).group.close()
            ended.append(watching)
        for standing, watch in self._standing.items():
            if any(_overlap(standing, one) for one in ended):
                watch.group.renew()
        if made:
            self.engine.call("dcgmUpdateAllFields", _WAIT)

    def _leave_out_silent(self, now: float) -> None:
        """Leave out codec units without values: GPUs have fewer units than DCGM has fields, and engines log errors."""
        for watching, watch in self._standing.items():
            patience = max(_SILENT_SECONDS, _MISSED_UPDATES * watch.group.every_seconds)
            if watch.pace is not WatchPace.CODECS or not watch.spoke or now - watch.begun_at < patience:
                continue
            for entity, values in watch.values.items():
                for unit in set(watching.field_ids) - values.keys() if values else ():
                    self._refused[entity, unit] = (Code.NOT_SUPPORTED, now + _SILENT_RETRY_SECONDS)

    def _carry_codecs(self, watching: Watching, watch: _Watch, now: float) -> None:
        """Keep values of codecs after a change of the plan, because the first values of a watch take an interval."""
        if watch.spoke:
            self._codecs.update({entity: values for entity, values in watch.values.items() if values})
        elif now - watch.begun_at <= _MISSED_UPDATES * watch.group.every_seconds:
            watch.values = {entity: self._codecs[entity] for entity in watching.members if entity in self._codecs}

    def read(self, now: float) -> tuple[dict[Entity, dict[int, Value]], dict[Entity, int]]:
        """Return the valid values by entity and field id, and the codes of entities that are lost or need a reset.

        Args:
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: The engine is gone.
        """
        values: dict[Entity, dict[int, Value]] = {}
        codes: dict[Entity, int] = {}
        self.profiling_stopped = False
        for watching, watch in self._standing.items():
            if watch.is_due(now):
                self._read(watch, now)
                if watch.pace is WatchPace.CODECS:
                    self._carry_codecs(watching, watch, now)
            for entity, some in watch.values.items():
                values.setdefault(entity, {}).update(some)
            codes.update(watch.codes)
        return values, codes

    def speaks(self, entity: Entity) -> bool:
        """Return whether an entity had a new value at the last read, other than kept values."""
        own = [watch for watching, watch in self._standing.items() if entity in watching.members]
        quick = [watch for watch in own if watch.pace is WatchPace.FAST]
        return any(watch.values.get(entity) for watch in quick or own)

    @property
    def lost_one(self) -> bool:
        """Whether the engine has dropped a watch, so that ``follow`` must run again."""
        return any(watch.gone for watch in self._standing.values())

    def _read(self, watch: _Watch, now: float) -> None:
        if watch.is_awaited(now):
            self.engine.call("dcgmUpdateAllFields", _WAIT)
        code, found = self.inbox.fetch(watch.group.latest)
        watch.values = {entity: watch.current.values(entity, some, now) for entity, some in found.items()}
        watch.codes = {entity: one.status for entity, some in found.items() for one in some if one.status in NOT_UP}
        watch.read_at = now
        speaks = any(watch.values.values())
        if watch.spoke and not speaks and watch.pace is WatchPace.PROFILING:
            self.profiling_stopped = True
        watch.spoke = speaks
        watch.gone = watch.gone or code == Code.NOT_CONFIGURED
        if code not in _NOTHING_YET:
            self.engine.count(reason_of(code))

    def _group(self, watching: Watching) -> FieldGroup:
        every_seconds = max(self.interval_seconds, _SHORTEST_SECONDS[watching.pace])
        return FieldGroup(self.engine, watching.members, watching.field_ids, every_seconds=every_seconds)

    def _begin(self, watching: Watching, now: float) -> bool:
        """Create a watch; after a refusal, find the refused entities and fields, and return False."""
        try:
            group = self._group(watching)
        except RefusedError as refusal:
            self._settle(watching, refusal.code, now)
            return False
        current = CurrentValues(_MISSED_UPDATES * group.every_seconds, self.engine.count)
        self._standing[watching] = _Watch(group=group, pace=watching.pace, current=current, begun_at=now)
        return True

    def _settle(self, watching: Watching, code: int, now: float) -> None:
        """Find and record the refused fields of each entity, first by entity, then by field."""
        if code == Code.LIMIT_REACHED:
            # The engine has no room for any further group now.
            refused, until = dict.fromkeys(watching.field_ids, code), now + _FULL_RETRY_SECONDS
        else:
            alone = {one: replace(watching, members=(one,)) for one in watching.members}
            failing = tuple(one for one in alone if len(alone) > 1 and self._try(alone[one]))
            watching = replace(watching, members=failing or watching.members)
            refused, until = self._halve(watching), now + _RETRY_SECONDS
        if not refused:
            self.engine.count(reason_of(code))
        for reason in {reason_of(one) for one in refused.values()}:
            self.engine.count(reason)
        for entity in watching.members:
            for field_id, why in refused.items():
                self._refused[entity, field_id] = (why, until)

    def _halve(self, watching: Watching) -> dict[int, int]:
        """Return the refused fields, with the code of the refusal."""
        code, ids = self._try(watching), watching.field_ids
        if code == Code.OK:
            return {}
        if len(ids) == 1:
            return {ids[0]: code}
        middle = len(ids) // 2
        first, second = (replace(watching, field_ids=half) for half in (ids[:middle], ids[middle:]))
        return {**self._halve(first), **self._halve(second)}

    def _try(self, watching: Watching) -> int:
        try:
            self._group(watching).close()
        except RefusedError as refusal:
            return refusal.code
        return Code.OK


def _overlap(one: Watching, other: Watching) -> bool:
    return not (set(one.members).isdisjoint(other.members) or set(one.field_ids).isdisjoint(other.field_ids))

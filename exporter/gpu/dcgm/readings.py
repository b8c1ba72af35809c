"""Converts DCGM records to values, without blanks, codes, stale values and impossible ratios."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ctypes import c_uint, c_ushort
from dataclasses import dataclass, field

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.engine import Engine
from exporter.gpu.dcgm.library import Code, EntityPair, FieldValueV2, Library, Record, reason_of, records
from exporter.model.devices import ProfilingState
from exporter.model.fields import COUNTERS, PROFILING, Field, ratio_in_range

Entity = tuple[int, int]
"""Entity group and id in the engine, of a GPU, a GPU instance or a compute instance."""
Value = int | float | str
_USABLE = frozenset({library.DOUBLE, library.INTEGER, library.STRING, library.TIMESTAMP})
_BLANK_LARGE = frozenset(range(0x7FFFFFFFFFFFFFF0, 0x7FFFFFFFFFFFFFF4))
_BLANK_SMALL = frozenset(range(0x7FFFFFF0, 0x7FFFFFF4))
_BLANK_DOUBLES = frozenset(2.0**47 + one for one in range(4))
_BLANK_TEXTS = frozenset({b"<<<NULL>>>", b"<<<NOT_FOUND>>>", b"<<<NOT_SUPPORTED>>>", b"<<<NOT_PERM>>>"})
RATIOS = frozenset(range(1001, 1009)) | frozenset(range(1013, 1035))
"""Profiling fields with ratios, which are limited to 0..1 because of counter noise."""


def decode(record: Record) -> Value | None:
    """Return the value of a record; ``None`` without a usable value.

    A status of 0 does not mean that there is a value or that it is new.
    """
    value = record.value
    if record.status != Code.OK or record.type not in _USABLE:
        return None
    if isinstance(value, bytes):
        if value in _BLANK_TEXTS:
            return None
        return value.decode("utf-8", "replace").strip() or None
    if record.type == library.DOUBLE:
        return None if value in _BLANK_DOUBLES or not math.isfinite(value) else value
    if value in _BLANK_LARGE or (value in _BLANK_SMALL and record.field_id not in COUNTERS):
        return None
    return value


def whole(value: Value | None) -> int | None:
    """Return a value as a whole number from 0; ``None`` without a value, or for a text."""
    return None if value is None or isinstance(value, str) or value < 0 else int(value)


@dataclass(frozen=True, slots=True)
class CurrentValues:
    """Detects values of dead watches: their timestamps do not change for a time on the clock of this process."""

    lasts_seconds: float
    """Time for which a value with an unchanged timestamp is still valid."""
    count: Callable[[str], None]
    """Called with a reason, once each time that a value becomes stale, and for a ratio out of range."""
    _seen: dict[Entity, dict[int, tuple[int, float]]] = field(default_factory=dict)

    def values(self, entity: Entity, some: Iterable[Record], now: float) -> dict[int, Value]:
        """Return the valid values of an entity's records by field id.

        Args:
            entity: The entity.
            some: Records of the entity. Their timestamps are of the engine's clock, possibly on another machine.
            now: Seconds of this process's monotonic clock.
        """
        seen = self._seen.setdefault(entity, {})
        values: dict[int, Value] = {}
        for record in some:
            value, field_id, at = decode(record), record.field_id, record.at_microseconds
            if value is None:
                continue
            changed_at, changed = seen.get(field_id, (None, now))
            if changed_at != at:
                seen[field_id] = (at, now)
            elif now - changed > self.lasts_seconds:
                if changed > -math.inf:
                    self.count("dcgm_stale")
                    seen[field_id] = (at, -math.inf)
                continue
            if field_id in RATIOS and not isinstance(value, str):
                value, clamped = ratio_in_range(field_id, value)
                if clamped:
                    self.count("dcgm_clamped")
            if value is not None:
                values[field_id] = value
        return values


class Inbox:
    """Receives the records of callbacks; a source has one for its whole life, because the library has its address.

    It and its callback reference each other, so that one per connection would never be freed.
    """

    def __init__(self) -> None:
        self._callback = library.CALLBACK(self._take)
        self._records: dict[Entity, list[Record]] = {}

    def fetch(self, call: Callable[[Callable[..., int]], int]) -> tuple[int, Mapping[Entity, Sequence[Record]]]:
        """Return the code of a call that uses the callback, and the delivered records by entity."""
        self._records = {}
        return call(self._callback), self._records

    def _take(self, group: int, entity: int, address: int, count: int, _user: object) -> int:
        self._records.setdefault((group, entity), []).extend(records(address, count))
        return 0


_RECORDS = 32
"""Maximum number of values per call; each record takes 4 KiB."""
_NOT_LIVE = frozenset({230})
"""Fields of events, which cannot be read directly: they make the whole call fail."""


class Live:
    """Reads fields directly, without a watch; a field that makes the call fail does not affect the others.

    Args:
        engine: Connected engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = (FieldValueV2 * _RECORDS)()

    def read(self, entities: Sequence[Entity], field_ids: Iterable[int]) -> Mapping[Entity, Mapping[int, Value]]:
        """Return values by entity and field id.

        Args:
            entities: Entities of one or several groups.
            field_ids: Fields other than profiling fields, whose direct read would terminate the engine.

        Raises:
            SourceError: The engine is gone.
        """
        wanted = [one for one in field_ids if one not in PROFILING and one not in _NOT_LIVE]
        found: dict[Entity, dict[int, Value]] = {entity: {} for entity in entities}
        for start in range(0, len(wanted), _RECORDS):
            some = wanted[start : start + _RECORDS]
            step = max(1, _RECORDS // len(some))
            for first in range(0, len(entities), step):
                self._ask(entities[first : first + step], some, found)
        return found

    def _ask(self, entities: Sequence[Entity], field_ids: Sequence[int], into: dict[Entity, dict[int, Value]]) -> None:
        pairs = (EntityPair * len(entities))(*(EntityPair(*one) for one in entities))
        ids = (c_ushort * len(field_ids))(*field_ids)
        code = self._engine.call(
            "dcgmEntitiesGetLatestValues",
            *(pairs, c_uint(len(entities)), ids, c_uint(len(field_ids)), c_uint(library.LIVE), self._buffer),
        )
        if code == Code.OK:
            for slot in self._buffer[: len(entities) * len(field_ids)]:
                value = decode(slot.record())
                if value is not None:
                    into.setdefault((slot.entityGroupId, slot.entityId), {})[slot.fieldId] = value
        elif len(field_ids) > 1:
            for one in field_ids:
                self._ask(entities, [one], into)
        elif len(entities) > 1:
            for entity in entities:
                self._ask([entity], field_ids, into)
        else:
            self._engine.count(reason_of(code))


_VGPU = 2
_OF_GPUS = frozenset({library.GPU, _VGPU, library.GPU_INSTANCE, library.COMPUTE_INSTANCE})
"""Levels of a GPU or its parts; fields of a vGPU are read from the GPU of its host. Others: switches, links, CPUs."""


@dataclass(slots=True, kw_only=True)
class SessionFields:
    """Fields of one session, by the way in which they are read."""

    xids: bool
    levels: dict[int, int] = field(default_factory=dict)
    """Watched numeric fields of GPUs and their parts: entity level by field id."""
    texts: list[int] = field(default_factory=list)
    """Text fields of GPUs, which are read directly and rarely."""
    of_the_node: list[int] = field(default_factory=list)
    """Fields without an entity."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Reason by field id for fields that are not read."""


def sort(fields: Collection[Field], loaded: Library) -> SessionFields:
    """Return how each field is read; NVML's own fields and Xid events are not read here.

    Args:
        fields: Selected fields.
        loaded: Library after its initialisation, before which it does not know its fields.
    """
    found = SessionFields(xids=Field.XID_ERRORS in fields)
    for field_id in sorted(int(one) for one in fields if one < Field.OWN_FIRST and one != Field.XID_ERRORS):
        meta = loaded.field_meta(field_id)
        if meta is None:
            found.left_out[field_id] = "dcgm_unknown_field"
        elif ord(meta.fieldType) == library.BINARY:
            found.left_out[field_id] = "dcgm_binary_field"
        elif meta.entityLevel == library.NONE:
            found.of_the_node.append(field_id)
        elif meta.entityLevel not in _OF_GPUS:
            found.left_out[field_id] = "dcgm_field_of_other_entity"
        elif ord(meta.fieldType) == library.STRING:
            found.texts.append(field_id)
        else:
            found.levels[field_id] = meta.entityLevel
    return found


_RETRY_SECONDS = 60.0
_LOOK_SECONDS = 4.9
_STATES: Mapping[int, ProfilingState] = {
    Code.MODULE_NOT_LOADED: ProfilingState.NO_MODULE,
    Code.PROFILING_NOT_SUPPORTED: ProfilingState.UNSUPPORTED,
    Code.NOT_SUPPORTED: ProfilingState.UNSUPPORTED,
    Code.GPU_NOT_SUPPORTED: ProfilingState.UNSUPPORTED,
    Code.NO_PERMISSION: ProfilingState.NO_PERMISSION,
    Code.REQUIRES_ROOT: ProfilingState.NO_PERMISSION,
    Code.PAUSED: ProfilingState.PAUSED,
}


def state_of(code: int) -> ProfilingState:
    """Return the profiling state for the code of a refusal."""
    return _STATES.get(code, ProfilingState.REFUSED)


@dataclass(slots=True)
class Profiling:
    """Follows the profiling capabilities of the engine over one connection."""

    engine: Engine
    wanted: frozenset[int]
    """Selected profiling fields."""
    paused: bool = False
    """Whether profiling was paused at the last ``look``."""
    _can: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    """Code of the engine's answer and available fields, by its number of the GPU."""
    _asked_at: dict[int, float] = field(default_factory=dict)
    _looked_at: float = -math.inf

    def follow(self, gpu_ids: Iterable[int], now: float) -> None:
        """Read the available fields of new GPUs, and again of GPUs without available fields.

        Args:
            gpu_ids: The engine's numbers of the GPUs.
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: The engine is gone.
        """
        if not self.wanted:
            return
        present = set(gpu_ids)
        self._can = {gpu_id: one for gpu_id, one in self._can.items() if gpu_id in present}
        for gpu_id in sorted(present):
            code, _ = self._can.get(gpu_id, (None, None))
            if code == Code.OK or (code is not None and now - self._asked_at[gpu_id] < _RETRY_SECONDS):
                continue
            self._can[gpu_id], self._asked_at[gpu_id] = self.engine.profiling_fields(gpu_id), now
            if self._can[gpu_id][0] not in (Code.OK, code):
                self.engine.count(reason_of(self._can[gpu_id][0]))

    def fields_of(self, gpu_id: int) -> frozenset[int]:
        """Return the selected profiling fields that a GPU supports."""
        return self.wanted & self._can.get(gpu_id, (0, frozenset()))[1]

    def state(self, gpu_id: int, refusal: int | None) -> ProfilingState | None:
        """Return the profiling state of a GPU; ``None`` if no profiling field is selected.

        Args:
            gpu_id: The engine's number.
            refusal: Code with which the engine refused to watch all of its fields; ``None`` otherwise.
        """
        if gpu_id not in self._can:
            return None
        code, can = self._can[gpu_id]
        if self.paused or code == Code.PAUSED:
            return ProfilingState.PAUSED
        if code != Code.OK:
            return state_of(code)
        if not can:
            return ProfilingState.UNSUPPORTED
        return ProfilingState.RUNNING if refusal is None else state_of(refusal)

    def look(self, now: float, *, at_once: bool) -> None:
        """Check whether profiling is paused: at once, or if the check is due.

        Args:
            now: Seconds of the monotonic clock.
            at_once: Whether to check now, because values have stopped or are expected again.

        Raises:
            SourceError: The engine is gone.
        """
        if not self.wanted or (not at_once and now - self._looked_at < _LOOK_SECONDS):
            return
        self._looked_at = now
        paused = self.engine.profiling_paused()
        self.paused = self.paused if paused is None else paused

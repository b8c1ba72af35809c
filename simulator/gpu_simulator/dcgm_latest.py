"""Functions of the simulated libdcgm that hand out values: by callback, and into the caller's records."""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import DOUBLE, STRING, STRING_BYTES, FieldValueV1, FieldValueV2
from exporter.model import Field
from gpu_simulator.dcgm_cache import NOT_WATCHED, Key, Sample
from gpu_simulator.dcgm_core import Calls, Connection, Engine, EngineKilledError, Refused
from gpu_simulator.dcgm_groups import fields_of, keys_of, members_of, update
from gpu_simulator.dcgm_known import is_profiling, known, type_of
from gpu_simulator.dcgm_values import encoded, value_of
from gpu_simulator.driver_core import CArgument, out, plain
from gpu_simulator.truth import Fault

CALLS = Calls()

_RECORD_BYTES = ctypes.sizeof(FieldValueV1)
_HEAD = struct.Struct("<IHHi4xq")
_NUMBERS = {DOUBLE: struct.Struct("<d"), 0: struct.Struct("<q")}
_VALUE_OFFSET = FieldValueV1.value.offset
_WORD = library.version_word(FieldValueV1)
_POISON = 0xA5


class _Records:
    """Memory for the records of one entity; spoilt after each delivery, so that a pointer that was kept shows."""

    def __init__(self) -> None:
        self._memory = (ctypes.c_char * 0)()

    def deliver(self, callback: Callable[..., int], entity: tuple[int, int], told: Sequence[tuple[int, Sample]]) -> int:
        """Hand out samples of one entity, (field id, sample) each; the callback's answer is returned."""
        size = len(told) * _RECORD_BYTES
        if len(self._memory) < size:
            self._memory = (ctypes.c_char * size)()
        view = memoryview(self._memory).cast("B")
        for position, (field_id, sample) in enumerate(told):
            _pack(view, position * _RECORD_BYTES, field_id, sample)
        answer = callback(*entity, ctypes.addressof(self._memory), len(told), None)
        ctypes.memset(self._memory, _POISON, size)
        return int(answer)


def _pack(view: memoryview, start: int, field_id: int, sample: Sample) -> None:
    kind = type_of(field_id)
    _HEAD.pack_into(view, start, _WORD, field_id, kind, sample.status, sample.at_microseconds)
    value, place = encoded(sample.value, field_id, kind), start + _VALUE_OFFSET
    if isinstance(value, bytes):
        text = value[: STRING_BYTES - 1] + b"\0"
        view[place : place + len(text)] = text
    else:
        _NUMBERS.get(kind, _NUMBERS[0]).pack_into(view, place, value)


_records = _Records()


def _by_entity(members: Sequence[tuple[int, int]], ids: Sequence[int]) -> Iterator[tuple[tuple[int, int], list[Key]]]:
    for entity in members:
        yield entity, [(*entity, field_id) for field_id in ids]


@CALLS.engine("dcgmGetLatestValues_v2")
def _latest(
    engine: Engine,
    connection: Connection,
    group: CArgument,
    fields: CArgument,
    callback: CArgument,
    _data: CArgument,
) -> None:
    members, ids = members_of(connection, group), fields_of(connection, fields)
    update(engine, keys_of(members, ids))
    for entity, keys in _by_entity(members, ids):
        told = [(key[2], _kept(engine, key)) for key in keys]
        if _records.deliver(callback, entity, told) < 0:
            return


def _kept(engine: Engine, key: Key) -> Sample:
    return engine.cache.latest(key) if engine.entities.find(key[0], key[1]) is not None else NOT_WATCHED


@CALLS.engine("dcgmGetValuesSince_v2")
def _since(
    engine: Engine,
    connection: Connection,
    group: CArgument,
    fields: CArgument,
    since: CArgument,
    following: CArgument,
    callback: CArgument,
    _data: CArgument,
) -> None:
    members, ids = members_of(connection, group), fields_of(connection, fields)
    update(engine, keys_of(members, ids))
    start = plain(since)
    newest = start - 1
    for entity, keys in _by_entity(members, ids):
        told = [(key[2], one) for key in keys for one in engine.cache.since(key, start)]
        newest = max([newest, *(one.at_microseconds for _, one in told)])
        if told and _records.deliver(callback, entity, told) < 0:
            break
    out(following).value = newest + 1


@CALLS.engine("dcgmEntitiesGetLatestValues")
def _of_entities(
    engine: Engine,
    _connection: Connection,
    pairs: CArgument,
    count: CArgument,
    ids: CArgument,
    ids_count: CArgument,
    flags: CArgument,
    values: CArgument,
) -> None:
    fields = tuple(int(one) for one in out(ids)[: plain(ids_count)])
    members = [(pair.entityGroupId, pair.entityId) for pair in out(pairs)[: plain(count)]]
    live = bool(plain(flags) & library.LIVE)
    if live and any(is_profiling(one) for one in fields):
        engine.kill()
        raise EngineKilledError(f"a live read of profiling fields {fields} kills a real host engine")
    if not known(engine.version).issuperset(fields) or (live and Field.XID_ERRORS in fields):
        raise Refused(library.GENERIC)
    keys = keys_of(members, fields)
    if live:
        while Fault.HANG in engine.now(fresh=True).faults:
            engine.sleep(0.05)
    else:
        update(engine, keys)
    for position, key in enumerate(keys):
        _put(out(values)[position], key, _live(engine, key) if live else _kept(engine, key))


def _live(engine: Engine, key: Key) -> Sample:
    """Ask the driver now."""
    node = engine.now()
    entity = engine.entities.find(key[0], key[1])
    if entity is None:
        return NOT_WATCHED
    at = round((engine.epoch_seconds + node.at_seconds) * 1e6)
    return Sample(at_microseconds=at, value=value_of(node, entity, key[2]))


def _put(record: CArgument, key: Key, sample: Sample) -> None:
    kind = type_of(key[2])
    record.version = library.version_word(FieldValueV2)
    record.entityGroupId, record.entityId, record.fieldId = key
    record.fieldType, record.status, record.ts = kind, sample.status, sample.at_microseconds
    value = encoded(sample.value, key[2], kind)
    if isinstance(value, bytes):
        record.value.str = value[: STRING_BYTES - 1]
    elif kind == DOUBLE:
        record.value.dbl = value
    elif kind != STRING:
        record.value.i64 = int(value)

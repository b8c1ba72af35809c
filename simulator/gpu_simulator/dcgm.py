"""A DCGM host engine that does not exist, put as the loaded library under ``exporter.gpu.dcgm.library``.

It has what the product's client asks for, answered from the truth. The ABI itself is held by tests/dcgm_stub.
"""

import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import groupby

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, DOUBLE, GPU, GPU_INSTANCE
from exporter.model import Field
from gpu_simulator.dcgm_engine import (
    CALLS,
    INSTANCES_PER_GPU,
    Blank,
    Connection,
    Engine,
    Entity,
    FieldKey,
    FieldWatch,
    Record,
    Value,
    encoded,
    is_profiling,
    known,
    meta_pointer,
    profiling_fields,
    type_of,
    value_of,
)
from gpu_simulator.driver_mig import slices_of
from gpu_simulator.driver_session import HANG_POLL_SECONDS, CArgument, CLibrary, Refused, out, plain
from gpu_simulator.truth import Fault, GpuTruth, MigTruth, NodeTruth

_ADDRESSES = frozenset({"localhost:5555", "127.0.0.1:5555", "localhost", "127.0.0.1"})
_OK, _LOST, _DETACHED = 1, 4, 7
_UNKNOWN_ID = 0xFFFFFFFF
_POISON = 0xA5
_ERRORS = {
    value: name.capitalize().replace("_", " ")
    for name, value in vars(library).items()
    if type(value) is int and value < 0
}


class EngineKilledError(AssertionError):
    """A call that kills a real host engine, for every client of the node; the product must never make it."""


_Function = Callable[..., None]


def _function(name: str, *, connected: bool = True) -> Callable[[_Function], _Function]:
    """Declare ``handler(engine, connection, *arguments)``; without a connection ``handler(engine, *arguments)``."""

    def declare(handler: _Function) -> _Function:
        def call(engine: Engine, *arguments: CArgument) -> None:
            if connected:
                engine.gate()
                connection = engine.connections.get(plain(arguments[0]))
                if connection is None or not connection.alive:
                    raise Refused(library.CONNECTION_GONE)
                arguments = (connection, *arguments[1:])
            engine.failures.refuse(name)
            handler(engine, *arguments)

        CALLS[name] = call
        return handler

    return declare


def _struct(argument: CArgument) -> CArgument:
    """Return the struct behind an argument; refused where its version word is not that of its layout."""
    struct = out(argument)
    if struct.version != library.version_word(type(struct)):
        raise Refused(library.VERSION_MISMATCH)
    return struct


@_function("dcgmInit", connected=False)
@_function("dcgmShutdown", connected=False)
def _nothing(_engine: Engine) -> None:
    pass


@_function("dcgmConnect_v2", connected=False)
@_function("dcgmConnect_v3", connected=False)
def _connect(engine: Engine, address: bytes, params: CArgument, handle: CArgument) -> None:
    node, struct = engine.gate(), _struct(params)
    if Fault.ENGINE_DOWN in node.faults or address.decode().removeprefix("tcp://") not in _ADDRESSES:
        engine.sleep(struct.timeoutMs / 1000)  # recorded: a closed port costs all of it
        raise Refused(library.CONNECTION_GONE)
    if not engine.version.startswith(f"{engine.major}."):
        raise Refused(library.VERSION_MISMATCH)
    out(handle).value = engine.opened(Connection())


@_function("dcgmStartEmbedded_v2", connected=False)
def _start_embedded(engine: Engine, params: CArgument) -> None:
    _struct(params).dcgmHandle = engine.opened(Connection(embedded=True))


@_function("dcgmDisconnect", connected=False)
@_function("dcgmStopEmbedded", connected=False)
def _disconnect(engine: Engine, handle: CArgument) -> None:
    connection = engine.connections.pop(plain(handle), None)
    if connection is None:
        raise Refused(library.CONNECTION_GONE)


@_function("dcgmVersionInfo", connected=False)
def _library_version(engine: Engine, info: CArgument) -> None:
    _struct(info).rawBuildInfoString = f"version:{engine.version};buildtype:Release;commit:simulated".encode()


@_function("dcgmHostengineVersionInfo")
def _engine_version(engine: Engine, _connection: Connection, info: CArgument) -> None:
    _library_version(engine, info)


@_function("dcgmModuleGetStatuses")
def _modules(engine: Engine, _connection: Connection, statuses: CArgument) -> None:
    struct, paused = _struct(statuses), Fault.PROFILING_PAUSED in engine.now().faults
    struct.numStatuses, struct.statuses[0].id = 1, library.PROFILING_MODULE
    struct.statuses[0].status = library.MODULE_PAUSED if paused else library.MODULE_LOADED


@_function("dcgmGetGpuStatus")
def _status(engine: Engine, _connection: Connection, number: CArgument, status: CArgument) -> None:
    gpu = engine.gpus[plain(number)]
    lost = _LOST if gpu.fault is Fault.GPU_LOST else _OK
    out(status).value = lost if gpu.uuid in engine.present else _DETACHED


@_function("dcgmGetEntityGroupEntities")
def _entities(engine: Engine, _connection: Connection, group: CArgument, *rest: CArgument) -> None:
    ids, count, _flags = rest
    there = (place for place, one in engine.entities.items() if one.gpu and one.gpu.uuid in engine.present)
    found = [number for level, number in there if level == plain(group)]
    room, out(count).value = out(count).value, len(found)
    if len(found) > room:
        raise Refused(library.BUFFER_TOO_SMALL)
    out(ids)[: len(found)] = found


@_function("dcgmGetGpuInstanceHierarchy")
def _hierarchy(engine: Engine, _connection: Connection, hierarchy: CArgument) -> None:
    struct = _struct(hierarchy)
    struct.count = 0
    for (level, number), entity in engine.entities.items():
        gpu = entity.gpu
        if level != GPU_INSTANCE or gpu is None:
            continue
        first, board = entity.members[0], (GPU, number // INSTANCES_PER_GPU)
        _add_row(
            struct, (level, number), board, (gpu, first), (_UNKNOWN_ID, first.profile_id or 0, slices_of(first)[0])
        )
        for place, part in engine.entities.items():
            one = part.members[0] if place[0] == COMPUTE_INSTANCE else None
            if one is not None and one in entity.members and part.gpu is gpu:
                shape = (one.compute_instance_id, slices_of(one)[1] - 1, slices_of(one)[1])
                _add_row(struct, place, (level, number), (gpu, one), shape)


def _add_row(
    struct: CArgument,
    entity: tuple[int, int],
    parent: tuple[int, int],
    device: tuple[GpuTruth, MigTruth],
    shape: tuple[int, int, int],
) -> None:
    row, (gpu, instance) = struct.entityList[struct.count], device
    struct.count += 1
    row.entity.entityGroupId, row.entity.entityId = entity
    row.parent.entityGroupId, row.parent.entityId = parent
    row.gpuUuid, row.nvmlGpuIndex, row.nvmlInstanceId = gpu.uuid.encode(), gpu.index, instance.gpu_instance_id
    row.nvmlComputeInstanceId, row.nvmlMigProfileId, row.nvmlProfileSlices = shape


@_function("dcgmGroupCreate")
def _create_group(engine: Engine, connection: Connection, _kind: CArgument, _name: CArgument, group: CArgument) -> None:
    out(group).value = engine.new_handle()
    connection.groups[out(group).value] = []


@_function("dcgmGroupAddEntity")
def _add_entity(engine: Engine, connection: Connection, group: CArgument, level: CArgument, number: CArgument) -> None:
    members, entity = connection.groups.get(plain(group), []), (plain(level), plain(number))
    if entity not in engine.entities or entity in members:
        raise Refused(library.BAD_PARAMETER)
    members.append(entity)


@_function("dcgmFieldGroupCreate")
def _create_fields(engine: Engine, connection: Connection, count: CArgument, ids: CArgument, *rest: CArgument) -> None:
    _name, group = rest
    fields = tuple(int(one) for one in out(ids)[: plain(count)])
    if not 0 < len(fields) <= library.MAX_FIELDS_PER_GROUP or not known(engine.version).issuperset(fields):
        raise Refused(library.BAD_PARAMETER)
    engine.failures.refuse("dcgmFieldGroupCreate", fields)
    out(group).value = engine.new_handle()
    connection.field_groups[out(group).value] = fields


@_function("dcgmGroupDestroy")
@_function("dcgmFieldGroupDestroy")
def _destroy(_engine: Engine, connection: Connection, handle: CArgument) -> None:
    group = plain(handle)
    if connection.groups.pop(group, None) is None and connection.field_groups.pop(group, None) is None:
        raise Refused(library.NOT_CONFIGURED)
    for watch in [one for one in connection.watches if group in one]:
        del connection.watches[watch]


@_function("dcgmWatchFields")
def _watch(engine: Engine, connection: Connection, group: CArgument, fields: CArgument, *rest: CArgument) -> None:
    connection.watch(group, fields)
    members, ids, node = connection.groups[plain(group)], connection.field_groups[plain(fields)], engine.now()
    engine.failures.refuse("dcgmWatchFields", ids)
    gpus = (engine.entities.get(place, Entity()).gpu for place in members)
    if any(map(is_profiling, ids)) and not all(profiling_fields(node, gpu) for gpu in gpus if gpu):
        raise Refused(library.MODULE_NOT_LOADED)
    watch = connection.watches[plain(group), plain(fields)] = FieldWatch(
        keys=tuple((*place, one) for place in members for one in ids),
        interval_seconds=plain(rest[0]) / 1e6,
        started=engine.monotonic(),
        from_seconds=node.at_seconds,
    )
    engine.update(watch)


@_function("dcgmUnwatchFields")
def _unwatch(_engine: Engine, connection: Connection, group: CArgument, fields: CArgument) -> None:
    connection.watches.pop((plain(group), plain(fields)), None)


@_function("dcgmUpdateAllFields")
def _update_all(engine: Engine, connection: Connection, _wait: CArgument) -> None:
    for watch in connection.watches.values():
        engine.update(watch)


@_function("dcgmProfGetSupportedMetricGroups")
def _metric_groups(engine: Engine, _connection: Connection, groups: CArgument) -> None:
    struct = _struct(groups)
    ids = profiling_fields(engine.now(), engine.gpus[struct.gpuId])
    if not ids:
        raise Refused(library.MODULE_NOT_LOADED)
    struct.numMetricGroups = 0
    for row, start in zip(struct.metricGroups, range(0, len(ids), len(struct.metricGroups[0].fieldIds)), strict=False):
        some = ids[start : start + len(row.fieldIds)]
        struct.numMetricGroups += 1
        row.numFieldIds = len(some)
        row.fieldIds[: len(some)] = some


@lru_cache(maxsize=32)
def _records(count: int) -> CArgument:
    return (library.FieldValueV1 * count)()


def _deliver(callback: CArgument, keys: Iterable[FieldKey], told: Callable[[FieldKey], list[Record]]) -> None:
    """Call back with the records of each entity; the memory is overwritten then, so that a kept pointer shows."""
    for entity, some in groupby(keys, key=lambda key: key[:2]):
        values = [record for key in some for record in told(key)]
        if not values:
            continue
        records = _records(len(values))
        for record, value in zip(records, values, strict=True):
            _put(record, *value)
        answer = callback(*entity, ctypes.addressof(records), len(values), None)
        ctypes.memset(records, _POISON, ctypes.sizeof(records))
        if answer < 0:
            return


def _put(record: CArgument, field_id: int, status: int, at_microseconds: int, value: Value) -> None:
    record.version, record.fieldId, record.fieldType = library.version_word(type(record)), field_id, type_of(field_id)
    record.status, record.ts = status, at_microseconds
    raw = encoded(value, field_id)
    if isinstance(raw, bytes):
        record.value.str = raw[: library.STRING_BYTES - 1]
    elif type_of(field_id) == DOUBLE:
        record.value.dbl = raw
    else:
        record.value.i64 = int(raw)


@_function("dcgmGetLatestValues_v2")
def _latest(engine: Engine, connection: Connection, group: CArgument, fields: CArgument, *rest: CArgument) -> None:
    watch = connection.watch(group, fields)
    if watch is not None:
        engine.update(watch)
    keys = (
        (*place, one) for place in connection.groups[plain(group)] for one in connection.field_groups[plain(fields)]
    )
    _deliver(rest[0], keys, lambda key: [engine.record(watch, key)])


@_function("dcgmGetValuesSince_v2")
def _since(engine: Engine, connection: Connection, group: CArgument, fields: CArgument, *rest: CArgument) -> None:
    start, following, callback, _data = rest
    watch = connection.watch(group, fields)
    keys = watch.keys if watch else ()
    told = {key: engine.xids(watch, key, plain(start)) for key in keys if watch}
    out(following).value = max([plain(start) - 1, *(one[2] for some in told.values() for one in some)]) + 1
    _deliver(callback, keys, lambda key: told[key])


@_function("dcgmEntitiesGetLatestValues")
def _live(engine: Engine, _connection: Connection, pairs: CArgument, count: CArgument, *rest: CArgument) -> None:
    ids, ids_count, _flags, values = rest
    fields = tuple(int(one) for one in out(ids)[: plain(ids_count)])
    if any(is_profiling(one) for one in fields):
        engine.kill()
        raise EngineKilledError(f"a live read of profiling fields {fields} kills a real host engine")
    if not known(engine.version).issuperset(fields) or Field.XID_ERRORS in fields:
        raise Refused(library.GENERIC)
    while Fault.HANG in (node := engine.now(fresh=True)).faults:
        engine.sleep(HANG_POLL_SECONDS)
    records, at = iter(out(values)), engine.microseconds(node.at_seconds)
    for pair in out(pairs)[: plain(count)]:
        entity = engine.entities.get((pair.entityGroupId, pair.entityId))
        for field_id in fields:
            record = next(records)
            record.entityGroupId, record.entityId = pair.entityGroupId, pair.entityId
            if entity is None:
                _put(record, field_id, library.NOT_WATCHED, 0, Blank.NULL)
            else:
                _put(record, field_id, library.OK, at, value_of(node, entity.gpu, entity.members, field_id))


class _Current:
    """The one engine of this process."""

    engine: Engine | None = None


def install(
    truth: Callable[[], NodeTruth],
    *,
    cache_seconds: float = 0.02,
    epoch_seconds: float = 1_700_000_000.0,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    soname: str = "",
) -> None:
    """Put a fake libdcgm in place whose engine, at ``localhost:5555``, answers from ``truth``.

    A watched field is sampled once per beat of ``monotonic``, when it is read; a profiling field is the mean since
    the beat before.

    Args:
        truth: The node now; asked at most every ``cache_seconds`` (0: at every call).
        cache_seconds: How long one answer of ``truth`` serves, in real seconds.
        epoch_seconds: Unix time of the scenario's start, for the timestamps of values.
        monotonic: Clock of the watches, seconds.
        sleep: How hangs, slow calls and connecting in vain pass time.
        soname: Of the library; empty for the engine's own major version.
    """
    version = truth().dcgm.version
    soname = soname or f"libdcgm.so.{version.partition('.')[0]}"
    _Current.engine = Engine(
        source=truth,
        monotonic=monotonic,
        sleep=sleep,
        cache_seconds=cache_seconds,
        epoch_seconds=epoch_seconds,
        version=version,
        major=int(soname.rpartition(".")[2]),
    )
    calls = {name: call for name, call in CALLS.items() if name != "dcgmConnect_v3" or version >= "4.5"}
    others = {
        "errorString": lambda code: _ERRORS.get(plain(code), "Unknown error").encode(),
        "DcgmFieldGetById": lambda field_id: meta_pointer(plain(field_id), version),
    }
    library.install(CLibrary(_Current.engine, calls, others), soname, knock=knock)


def uninstall() -> None:
    """Remove the library; harmless where there is none."""
    _Current.engine = None
    library.uninstall()


def set_epoch(epoch_seconds: float) -> None:
    """Stamp by another Unix time of the scenario's start, as an engine does after the wall clock was set."""
    _engine().epoch_seconds = epoch_seconds


def knock(address: str, _seconds: float) -> None:
    """Connect to an endpoint as a plain socket does; ``address`` is ``host:port`` or ``unix:///path``.

    Raises:
        OSError: as the socket does: refused, or no such file.
    """
    if address.startswith("unix:"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if Fault.ENGINE_DOWN in _engine().now().faults or address not in _ADDRESSES:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def fail(function_name: str, code: int, *, field_id: int | None = None, times: int | None = None) -> None:
    """Make a C function answer an error until ``clear_failures``.

    Args:
        function_name: C symbol, e.g. ``dcgmWatchFields``.
        code: dcgmReturn_t.
        field_id: Only for field groups that have this field: ``dcgmWatchFields`` and ``dcgmFieldGroupCreate``.
        times: How many calls fail; ``None``: all.

    Raises:
        ValueError: The fake library has no such function, or is not installed.
    """
    _engine().failures.add(function_name, code, field_id, times)


def clear_failures() -> None:
    """End every error that ``fail`` asked for."""
    _engine().failures.by_name.clear()


def held() -> dict[str, int]:
    """Return how many connections, groups, field groups and watches there are now: leaks show here."""
    connections = _engine().connections.values()
    return {
        "connections": len(connections),
        "groups": sum(len(one.groups) for one in connections),
        "field_groups": sum(len(one.field_groups) for one in connections),
        "watches": sum(len(one.watches) for one in connections),
    }


def _engine() -> Engine:
    if _Current.engine is None:
        raise ValueError("the simulated libdcgm is not installed: call dcgm.install(truth) first")
    return _Current.engine

"""Functions of the simulated libdcgm about entities, groups of them, groups of fields, and watches."""

from collections.abc import Sequence

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, EMPTY_GROUP, GPU, GPU_INSTANCE
from gpu_simulator.dcgm_cache import Key, Sample
from gpu_simulator.dcgm_core import (
    MOST_ENTITIES,
    MOST_FIELD_GROUPS,
    MOST_GROUPS,
    Calls,
    Connection,
    Engine,
    Refused,
    Watch,
    check_version,
)
from gpu_simulator.dcgm_entities import INSTANCES_PER_GPU
from gpu_simulator.dcgm_known import is_profiling, known
from gpu_simulator.dcgm_profiling import can_profile, metric_groups
from gpu_simulator.dcgm_values import value_of
from gpu_simulator.driver_core import CArgument, out, plain
from gpu_simulator.driver_mig import slices_of
from gpu_simulator.truth import GpuTruth, MigTruth

CALLS = Calls()

_NOT_TOLD = 0xFFFFFFFF
_TOO_MANY_FIELDS = 128
_GROUP_KINDS = {
    0: (GPU,),
    EMPTY_GROUP: (),
    3: (GPU_INSTANCE,),
    4: (COMPUTE_INSTANCE,),
    5: (GPU, GPU_INSTANCE, COMPUTE_INSTANCE),
}


@CALLS.engine("dcgmGetGpuStatus")
def _status(engine: Engine, _connection: Connection, number: CArgument, status: CArgument) -> None:
    out(status).value = engine.entities.status(plain(number))


@CALLS.engine("dcgmGetEntityGroupEntities")
def _entities(
    engine: Engine, _connection: Connection, group: CArgument, ids: CArgument, count: CArgument, flags: CArgument
) -> None:
    found = engine.entities.ids(plain(group), supported_only=bool(plain(flags) & library.SUPPORTED_ONLY))
    room, out(count).value = out(count).value, len(found)
    if len(found) > room:
        raise Refused(library.BUFFER_TOO_SMALL)
    for position, number in enumerate(found):
        out(ids)[position] = number


@CALLS.engine("dcgmGetGpuInstanceHierarchy")
def _hierarchy(engine: Engine, _connection: Connection, hierarchy: CArgument) -> None:
    check_version(hierarchy)
    struct = out(hierarchy)
    struct.count = 0
    for number in engine.entities.ids(GPU_INSTANCE):
        entity = engine.entities.find(GPU_INSTANCE, number)
        if entity is None or entity.gpu is None or not entity.members:
            continue
        first = entity.members[0]
        parent = (GPU, number // INSTANCES_PER_GPU)
        slices = slices_of(first)[0]
        _add_row(struct, (GPU_INSTANCE, number), parent, entity.gpu, first, (_NOT_TOLD, first.profile_id or 0, slices))
        for compute_id in engine.entities.ids(COMPUTE_INSTANCE):
            member = engine.entities.find(COMPUTE_INSTANCE, compute_id)
            if member is None or member.members[0] not in entity.members:
                continue
            one = member.members[0]
            told = (one.compute_instance_id, slices_of(one)[1] - 1, slices_of(one)[1])
            _add_row(struct, (COMPUTE_INSTANCE, compute_id), (GPU_INSTANCE, number), entity.gpu, one, told)


def _add_row(
    struct: CArgument,
    entity: tuple[int, int],
    parent: tuple[int, int],
    gpu: GpuTruth,
    instance: MigTruth,
    told: tuple[int, int, int],
) -> None:
    row = struct.entityList[struct.count]
    struct.count += 1
    row.entity.entityGroupId, row.entity.entityId = entity
    row.parent.entityGroupId, row.parent.entityId = parent
    row.gpuUuid, row.nvmlGpuIndex, row.nvmlInstanceId = gpu.uuid.encode(), gpu.index, instance.gpu_instance_id
    row.nvmlComputeInstanceId, row.nvmlMigProfileId, row.nvmlProfileSlices = told


@CALLS.engine("dcgmGroupCreate")
def _create_group(engine: Engine, connection: Connection, kind: CArgument, _name: CArgument, group: CArgument) -> None:
    if plain(kind) not in _GROUP_KINDS:
        raise Refused(library.BAD_PARAMETER)
    if sum(len(one.groups) for one in engine.connections.values()) >= MOST_GROUPS:
        raise Refused(library.LIMIT_REACHED)
    levels = _GROUP_KINDS[plain(kind)]
    handle = engine.new_handle()
    connection.groups[handle] = [(level, one) for level in levels for one in engine.entities.ids(level)]
    out(group).value = handle


@CALLS.engine("dcgmGroupAddEntity")
def _add_entity(engine: Engine, connection: Connection, group: CArgument, level: CArgument, number: CArgument) -> None:
    members, entity = members_of(connection, group), (plain(level), plain(number))
    if engine.entities.find(*entity) is None or entity in members:
        raise Refused(library.BAD_PARAMETER)
    if len(members) >= MOST_ENTITIES:
        raise Refused(library.LIMIT_REACHED)
    members.append(entity)


@CALLS.engine("dcgmGroupDestroy")
def _destroy_group(engine: Engine, connection: Connection, group: CArgument) -> None:
    members_of(connection, group)
    _forget(engine, connection, group=plain(group))
    del connection.groups[plain(group)]


@CALLS.engine("dcgmFieldGroupCreate")
def _create_fields(
    engine: Engine, connection: Connection, count: CArgument, ids: CArgument, name: bytes, group: CArgument
) -> None:
    number = plain(count)
    fields = tuple(int(one) for one in out(ids)[:number]) if 0 < number < _TOO_MANY_FIELDS else ()
    if not fields or not known(engine.version).issuperset(fields):
        raise Refused(library.BAD_PARAMETER)
    engine.refuse_injected("dcgmFieldGroupCreate of", fields)
    groups = [one for each in engine.connections.values() for one in each.field_groups.values()]
    if any(held == name.decode() for held, _ in groups):
        raise Refused(library.DUPLICATE_KEY)
    if len(groups) >= MOST_FIELD_GROUPS:
        raise Refused(library.LIMIT_REACHED)
    handle = engine.new_handle()
    connection.field_groups[handle] = (name.decode(), fields)
    out(group).value = handle


@CALLS.engine("dcgmFieldGroupDestroy")
def _destroy_fields(engine: Engine, connection: Connection, group: CArgument) -> None:
    fields_of(connection, group)
    _forget(engine, connection, fields=plain(group))
    del connection.field_groups[plain(group)]


def _forget(engine: Engine, connection: Connection, *, group: int | None = None, fields: int | None = None) -> None:
    """End the watches of a group that goes."""
    for key in [key for key in connection.watches if key[0] == group or key[1] == fields]:
        engine.cache.unwatch(connection.watches.pop(key).keys)


def members_of(connection: Connection, group: CArgument) -> list[tuple[int, int]]:
    """Entities of a connection's own group."""
    if plain(group) not in connection.groups:
        raise Refused(library.NOT_CONFIGURED)
    return connection.groups[plain(group)]


def fields_of(connection: Connection, group: CArgument) -> tuple[int, ...]:
    """Ids of a connection's own field group."""
    if plain(group) not in connection.field_groups:
        raise Refused(library.NOT_CONFIGURED)
    return connection.field_groups[plain(group)][1]


def keys_of(members: Sequence[tuple[int, int]], fields: Sequence[int]) -> tuple[Key, ...]:
    """Every field of every entity, entity by entity."""
    return tuple((*entity, field_id) for entity in members for field_id in fields)


@CALLS.engine("dcgmWatchFields")
def _watch(
    engine: Engine,
    connection: Connection,
    group: CArgument,
    fields: CArgument,
    interval: CArgument,
    _age: CArgument,
    keep: CArgument,
) -> None:
    members, ids = members_of(connection, group), fields_of(connection, fields)
    if plain(interval) <= 0:
        raise Refused(library.BAD_PARAMETER)
    engine.refuse_injected("dcgmWatchFields of", ids)
    keys, node, now = keys_of(members, ids), engine.now(), engine.monotonic()
    engine.profiled = engine.profiled or any(is_profiling(one) for one in ids)
    gpus = (engine.entities.find(*one) for one in members)
    if any(is_profiling(one) for one in ids) and not all(
        can_profile(node, one.gpu) for one in gpus if one is not None and one.gpu is not None
    ):
        _keep_once(engine, keys, now)
        raise Refused(library.MODULE_NOT_LOADED)
    key = (plain(group), plain(fields))
    if key in connection.watches:
        engine.cache.unwatch(connection.watches.pop(key).keys)
    for one in keys:
        engine.cache.watch(
            one,
            interval_seconds=plain(interval) / 1e6,
            keep=max(1, plain(keep)),
            started=now,
            from_seconds=node.at_seconds,
        )
    connection.watches[key] = Watch(keys=keys)
    update(engine, keys)


def _keep_once(engine: Engine, keys: Sequence[Key], now: float) -> None:
    """What a failed watch of profiling fields leaves: one value of each other field, which never moves again."""
    node = engine.now()
    at = round((engine.epoch_seconds + node.at_seconds) * 1e6)
    for level, number, field_id in keys:
        entity = engine.entities.find(level, number)
        if entity is not None and not is_profiling(field_id):
            value = value_of(node, entity, field_id)
            engine.cache.keep_once((level, number, field_id), Sample(at_microseconds=at, value=value), now=now)


@CALLS.engine("dcgmUnwatchFields")
def _unwatch(engine: Engine, connection: Connection, group: CArgument, fields: CArgument) -> None:
    members_of(connection, group)
    ids = fields_of(connection, fields)
    watch = connection.watches.pop((plain(group), plain(fields)), None)
    if watch is not None:
        engine.cache.unwatch(watch.keys)
    elif any(is_profiling(one) for one in ids):
        raise Refused(library.MODULE_NOT_LOADED)


def update(engine: Engine, keys: Sequence[Key], *, at_once: bool = False) -> None:
    """Let the engine's cache catch up with its beats."""
    engine.cache.update(
        keys,
        engine.now(),
        engine.entities,
        monotonic=engine.monotonic(),
        epoch_seconds=engine.epoch_seconds,
        at_once=at_once,
    )


@CALLS.engine("dcgmUpdateAllFields")
def _update_all(engine: Engine, _connection: Connection, _wait: CArgument) -> None:
    update(engine, tuple(engine.cache.cells), at_once=True)


@CALLS.engine("dcgmProfGetSupportedMetricGroups")
def _metric_groups(engine: Engine, _connection: Connection, groups: CArgument) -> None:
    check_version(groups)
    struct, node = out(groups), engine.now()
    entity = engine.entities.find(GPU, struct.gpuId)
    engine.profiled = True
    if entity is None or entity.gpu is None:
        raise Refused(library.BAD_PARAMETER)
    if not can_profile(node, entity.gpu):
        raise Refused(library.MODULE_NOT_LOADED)
    told = metric_groups(entity.gpu)
    struct.numMetricGroups = len(told)
    for row, (major, minor, ids) in zip(struct.metricGroups, told, strict=False):
        row.majorId, row.minorId, row.numFieldIds = major, minor, len(ids)
        for position, field_id in enumerate(ids):
            row.fieldIds[position] = field_id

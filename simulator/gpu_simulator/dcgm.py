"""Simulates a DCGM host engine, as a replacement of the library that ``exporter.gpu.dcgm.library`` loads.

It has the functions that the exporter's client calls, and returns values of the truth with DCGM's units and ids.
tests/dcgm_stub tests the ABI.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache, partial
from itertools import groupby
from typing import Unpack

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, DOUBLE, GPU, GPU_INSTANCE, INTEGER, NONE, STRING, Code
from exporter.model.fields import Field
from gpu_simulator.driver_devices import BAR1, MEMORY, cuda_major, is_before, joined, read, slices_of
from gpu_simulator.driver_session import Call, CArgument, Double, Installed, Refused, Timing, fill_slots
from gpu_simulator.models import MIB, table
from gpu_simulator.truth import GPU_FAULTS, Fault, GpuTruth, Load, MigTruth, NodeTruth


def _ids(text: str) -> frozenset[int]:
    ranges = (one.partition("-") for one in text.split())
    return frozenset(number for low, _, high in ranges for number in range(int(low), int(high or low) + 1))


_FIELDS = table("dcgm_fields")
_TYPES, _LEVELS = (
    {number: getattr(library, name) for name, text in _FIELDS[key].items() for number in _ids(text)}
    for key in ("types", "levels")
)
_GROUPS = {name: _ids(text) for name, text in _FIELDS["groups"].items()}
_PROFILING = _GROUPS["profiling"]


class _Blank(IntEnum):
    """Kinds of a missing value, as offsets of DCGM's sentinels."""

    NULL = 0
    NOT_SUPPORTED = 2


Value = int | float | str | _Blank
_BLANK_32, _BLANK_64, _BLANK_DOUBLE = 0x7FFFFFF0, 0x7FFFFFFFFFFFFFF0, float(2**47)
_NARROW = (Field.MEMORY_TEMP, Field.FAN_SPEED)
"""Integer fields with the 32-bit sentinel for a missing value."""
_WHOLE_WATTS = range(Field.POWER_MGMT_LIMIT, Field.ENFORCED_POWER_LIMIT + 1)
_NO_DRIVER = frozenset({Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISSING})
"""Faults that remove the engine's GPUs. After a driver replacement it still lists them, without values."""
_FIXED = (50, 54, 51, 52, 53, 55, 57, 85, 82, 56, 80, 81, 63, 65, 66, 94, 67, 69)
"""Fields that the engine reads once and returns also for an unresponsive GPU, in the order of ``_fixed``."""
_ECC_MODES = (300, 301)
# Number of fields of a group: the limit of DCGM, independent of the client.
_SHORTEST_MEAN_SECONDS, _MOST_FIELDS = 0.05, 127
_KIB = 1024
_LINK_BYTES = (Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL)


@lru_cache(maxsize=8)
def _known(version: str) -> frozenset[int]:
    now = [int(part) for part in version.split(".")]
    since = ((list(map(int, first.split("."))), text) for first, text in _FIELDS["since"].items())
    return _ids(" ".join(text for first, text in since if now >= first))


def _meta_pointer(field_id: int, version: str) -> "ctypes._Pointer[library.FieldMeta]":
    """Return a pointer to the description of a field; a null pointer if the version does not have the field."""
    pointer = ctypes.POINTER(library.FieldMeta)
    if field_id not in _known(version):
        return pointer()
    kind, level = bytes([_TYPES.get(field_id, INTEGER)]), _LEVELS.get(field_id, GPU)
    return pointer(library.FieldMeta(fieldId=field_id, fieldType=kind, scope=int(level != NONE), entityLevel=level))


def _answers(node: NodeTruth, gpu: GpuTruth) -> bool:
    """Return whether the driver measures a GPU now."""
    return gpu.fault not in GPU_FAULTS and not (_NO_DRIVER | {Fault.LIBRARY_MISMATCH}) & node.faults.keys()


def _profiling_fields(node: NodeTruth, gpu: GpuTruth) -> list[int]:
    """Return the profiling fields of a GPU: from GPM, or from the proprietary module if it is installed."""
    if not gpu.model.gpm and not node.dcgm.profiling_module:
        return []
    return sorted(_GROUPS["by_gpm" if gpu.model.gpm else "by_module"] - gpu.model.not_supported)


def _value_of(node: NodeTruth, entity: "_Entity", field_id: int) -> Value:
    """Return the current value of a field of an entity; fields that an instance lacks are those of its parent."""
    version, cuda = node.driver_version, cuda_major(node)
    of_node: dict[int, Value] = {1: version, 2: f"{cuda}.{version}", 4: len(node.gpus), 5: cuda * 1000}
    gpu, member, value = entity.gpu, next(iter(entity.members), None), None
    if gpu is None or field_id in of_node:
        return of_node.get(field_id, _Blank.NOT_SUPPORTED)
    if field_id in _FIXED:
        value = _fixed(gpu, member)[_FIXED.index(field_id)]
    elif not _answers(node, gpu) and not (gpu.fault is Fault.RESET_REQUIRED and field_id == Field.GPU_RECOVERY_ACTION):
        return _Blank.NULL
    elif not is_before(node, Field(field_id)):
        value = _measured(gpu, member, Field(field_id))
    return _Blank.NOT_SUPPORTED if value is None else value


def _fixed(gpu: GpuTruth, member: MigTruth | None) -> tuple[Value | None, ...]:
    model, (major, minor) = gpu.model, gpu.model.compute_capability
    names = (member.profile, member.uuid) if member else (model.name, gpu.uuid)
    board = ("NVIDIA", gpu.index, gpu.serial, gpu.minor, gpu.pci_bus_id, model.vbios, *model.inforom)
    mig = (int(gpu.mig_enabled), model.compute_slices) if model.mig_profiles else (None, None)
    return (*names, *board, major << 16 | minor, 0, 1, int(model.gpm), *mig)


def _measured(gpu: GpuTruth, member: MigTruth | None, field: Field) -> Value | None:
    if field in _ECC_MODES:
        return int(read(gpu, Field.ECC_SBE_VOL_TOTAL) is not None)
    value = read(gpu, field, member)
    if value is None or field is Field.FB_USED_PERCENT:
        return value
    if field in MEMORY or field in BAR1:
        return round(value * MIB) // MIB
    if field in _WHOLE_WATTS:
        return float(int(value))
    return round(value, 3 if _TYPES.get(field) == DOUBLE else None)


def _mean_of(entity: "_Entity", before: Load, group: int, field_id: int, seconds: float) -> Value:
    """Return the mean of a profiling field over ``seconds``, from the integral of the load now and ``before``."""
    gpu, level, of, field = entity.gpu, _LEVELS.get(field_id, GPU), _FIELDS["mean_of"].get(field_id), Field(field_id)
    if gpu is None or (level == GPU != group) or (level != COMPUTE_INSTANCE == group):
        return _Blank.NULL  # a field of a larger entity
    if of is None or field in gpu.model.not_supported or (field in _GROUPS["only_by_gpm"] and not gpu.model.gpm):
        return _Blank.NOT_SUPPORTED
    if seconds < _SHORTEST_MEAN_SECONDS:
        return _Blank.NULL
    if group == GPU and field in gpu.overrides:
        fixed = gpu.overrides[field]
        return _Blank.NOT_SUPPORTED if fixed is None else fixed
    mean: float = (getattr(entity.integral, of) - getattr(before, of)) / seconds if of else 0.0
    return round(mean) if field_id in _GROUPS["rates"] else mean


def _link_rate(before: GpuTruth, gpu: GpuTruth, seconds: float) -> Value:
    """Return the value of a field named total, which is a rate: thousands of KiB per second; the first value is 0."""
    counters = [read(one, name) for name in _LINK_BYTES for one in (before, gpu)]
    begun_tx, ended_tx, begun_rx, ended_rx = (None if one is None else int(one / _KIB) for one in counters)
    if begun_tx is None or ended_tx is None or begun_rx is None or ended_rx is None:
        return _Blank.NOT_SUPPORTED
    return round((ended_tx - begun_tx + ended_rx - begun_rx) / seconds / 1000) if seconds > 0 else 0


_INSTANCES_PER_GPU = 8
_ADDRESSES = frozenset({"localhost:5555", "127.0.0.1:5555", "localhost", "127.0.0.1"})
_FINE, _LOST, _DETACHED = 1, 4, 7
_UNKNOWN_ID = 0xFFFFFFFF
_ERRORS = {code: name.capitalize().replace("_", " ") for name, code in vars(Code).items() if name.isupper()}
_Place = tuple[int, int]
"""Entity group, entity id."""
_Key = tuple[int, int, int]
"""Entity group, entity id, field id."""
_Record = tuple[int, int, int, Value]
"""Field id, status, microseconds, value."""
_CALLS: dict[str, Call] = {}
"""Every C function by symbol."""


class EngineKilledError(AssertionError):
    """A call that crashes a real host engine for every client of the node; the exporter must not make it."""


@dataclass(frozen=True, kw_only=True)
class _Entity:
    """Entity of an id now: the node, a GPU, or an instance with its compute instances."""

    gpu: GpuTruth | None = None
    members: tuple[MigTruth, ...] = ()
    above: _Place = (NONE, 0)
    """GPU of an instance."""

    @cached_property
    def integral(self) -> Load:
        """Integral of the load since the scenario's start."""
        whole = self.gpu.load_integral if self.gpu else Load()
        return joined(self.members) if self.members else whole


@dataclass(slots=True, kw_only=True)
class _Watch:
    """Fields that are sampled together, once per interval, when they are read."""

    interval_seconds: float
    started: float
    """Start of the watch on the monotonic clock, in seconds."""
    from_seconds: float
    """Start of the watch, in seconds since the scenario's start."""
    samples: deque[tuple[NodeTruth, Mapping[_Place, _Entity]]]
    """Truth at the previous and at the last sample."""
    beat: int = -1


@dataclass(slots=True, kw_only=True)
class _Connection:
    """Groups of entities, groups of fields and watches of one client; they end with the connection."""

    embedded: bool = False
    alive: bool = True
    groups: dict[int, list[_Place]] = field(default_factory=dict)
    field_groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    watches: dict[tuple[int, int], _Watch] = field(default_factory=dict)

    def watched(self, group: int, fields: int) -> tuple[tuple[_Key, ...], _Watch | None]:
        """Return entities and fields of two groups of this connection, and their watch."""
        if group not in self.groups or fields not in self.field_groups:
            raise Refused(Code.NOT_CONFIGURED)
        keys = tuple((*place, one) for place in self.groups[group] for one in self.field_groups[fields])
        return keys, self.watches.get((group, fields))


def _function(*names: str, connected: bool = True) -> Callable[[Call], Call]:
    """Declare ``handler(engine, connection, *arguments)``; without a connection ``handler(engine, *arguments)``."""

    def declare(handler: Call) -> Call:
        def call(name: str, engine: "_Engine", *arguments: CArgument) -> None:
            if connected:
                engine.gate()
                connection = engine.connections.get(arguments[0])
                if connection is None or not connection.alive:
                    raise Refused(Code.CONNECTION_LOST)
                arguments = (connection, *arguments[1:])
            engine.refuse(name)
            handler(engine, *arguments)

        _CALLS.update({name: partial(call, name) for name in names})
        return handler

    return declare


@dataclass(slots=True, kw_only=True)
class _Engine(Double):
    """The library of this process and its engine."""

    version: str
    major: int
    """Version of the library."""
    connections: dict[int, _Connection] = field(default_factory=dict)
    gpus: list[GpuTruth] = field(default_factory=list)
    """UUIDs of GPUs by DCGM's id; a removed GPU keeps its id."""
    slots: dict[int, tuple[list[int | None], list[str | None]]] = field(default_factory=dict)
    """GPU instance, and UUID of the compute instance, by DCGM's id."""
    entities: dict[_Place, _Entity] = field(default_factory=dict)
    present: frozenset[str] = frozenset()

    def follow(self, truth: NodeTruth) -> None:
        """Assign ids to the current devices."""
        there = () if _NO_DRIVER & truth.faults.keys() else truth.gpus
        self.present = frozenset(gpu.uuid for gpu in there if gpu.fault is not Fault.GPU_ABSENT)
        self.gpus = list(({gpu.uuid: gpu for gpu in self.gpus} | {gpu.uuid: gpu for gpu in there}).values())
        self.entities = {(NONE, 0): _Entity()}
        self.entities |= {(GPU, number): _Entity(gpu=gpu) for number, gpu in enumerate(self.gpus)}
        for number, gpu in enumerate(self.gpus):
            alive = gpu.instances if gpu.mig_enabled and gpu.uuid in self.present else ()
            instances, parts = self.slots.setdefault(number, ([], []))
            fill_slots(instances, list(dict.fromkeys(one.gpu_instance_id for one in alive)))
            fill_slots(parts, [one.uuid for one in alive])
            first = number * _INSTANCES_PER_GPU
            for member in alive:
                instance = (GPU_INSTANCE, first + instances.index(member.gpu_instance_id))
                part = (COMPUTE_INSTANCE, first + parts.index(member.uuid))
                members = tuple(one for one in alive if one.gpu_instance_id == member.gpu_instance_id)
                self.entities[instance] = _Entity(gpu=gpu, members=members, above=(GPU, number))
                self.entities[part] = _Entity(gpu=gpu, members=(member,), above=instance)

    def gate(self) -> NodeTruth:
        """Wait while the engine hangs or is slow; close the connections if it is down."""
        node = self.wait_while(Fault.ENGINE_HANG)
        if Fault.ENGINE_DOWN in node.faults:
            self.kill()
        elif seconds := node.faults.get(Fault.ENGINE_SLOW):
            self.sleep(seconds)
        return node

    def kill(self) -> None:
        """Stop the engine: existing connections stay closed."""
        for handle, one in self.connections.items():
            self.connections[handle] = one if one.embedded else _Connection(alive=False)

    def update(self, watch: _Watch) -> None:
        """Sample the watched fields if they are due; not while the driver hangs."""
        node, beat = self.now(), int((self.monotonic() - watch.started) / watch.interval_seconds + 1e-6)
        if Fault.HANG not in node.faults and beat > watch.beat:
            watch.beat = beat
            watch.samples.append((node, self.entities))

    def _value(self, watch: _Watch, key: _Key) -> Value:
        """Return the values of the last sample."""
        (then, entities_then), (node, entities) = watch.samples
        place, field_id, entity = key[:2], key[2], entities.get(key[:2])
        profiled = field_id in _PROFILING
        if entity is None:
            return _Blank.NULL
        if entity.gpu is None or not (profiled or field_id == Field.NVLINK_BANDWIDTH_TOTAL):
            return _value_of(node, entity, field_id)
        if not _answers(node, entity.gpu) or (profiled and Fault.PROFILING_PAUSED in node.faults):
            return _Blank.NULL
        before, seconds = entities_then.get(place, _Entity()), node.at_seconds - then.at_seconds
        measured = before.gpu and _answers(then, before.gpu) and Fault.PROFILING_PAUSED not in then.faults
        if not measured or [one.uuid for one in before.members] != [one.uuid for one in entity.members]:
            before, seconds = entity, 0.0
        if profiled:
            return _mean_of(entity, before.integral, key[0], field_id, seconds)
        return _link_rate(before.gpu or entity.gpu, entity.gpu, seconds)

    def _record(self, watch: _Watch | None, key: _Key) -> _Record:
        if watch is None or key[:2] not in self.entities:
            return (key[2], Code.NOT_WATCHED, 0, _Blank.NULL)
        if key[2] == Field.XID_ERRORS:
            return (self._xids(watch, key, 0) or [(key[2], Code.NO_DATA, 0, _Blank.NULL)])[-1]
        return (key[2], Code.OK, self._microseconds(watch.samples[-1][0].at_seconds), self._value(watch, key))

    def _xids(self, watch: _Watch, key: _Key, since_microseconds: int) -> list[_Record]:
        """Return the Xid errors of a GPU since the start of the watch and since a time."""
        gpu = self.entities.get(key[:2], _Entity()).gpu
        return [
            (key[2], Code.OK, self._microseconds(seconds), code)
            for seconds, code, *_ in (gpu.xids if gpu and Fault.HANG not in self.now().faults else ())
            if seconds > watch.from_seconds and self._microseconds(seconds) >= since_microseconds
        ]

    def _microseconds(self, seconds: float) -> int:
        return round((self.epoch_seconds + seconds) * 1e6)

    @_function("dcgmInit", "dcgmShutdown", connected=False)
    def _nothing(self) -> None:
        pass

    @_function("dcgmConnect_v2", "dcgmConnect_v3", connected=False)
    def _connect(self, address: bytes, params: CArgument, handle: CArgument) -> None:
        if Fault.ENGINE_DOWN in self.gate().faults or address.decode().removeprefix("tcp://") not in _ADDRESSES:
            self.sleep(params.timeoutMs / 1000)  # recorded: with a closed port the call takes the complete timeout
            raise Refused(Code.CONNECTION_LOST)
        if not self.version.startswith(f"{self.major}."):
            raise Refused(Code.VERSION_MISMATCH)
        handle.value = self.new_pointer()
        self.connections[handle.value] = _Connection()

    @_function("dcgmStartEmbedded_v2", connected=False)
    def _start_embedded(self, params: CArgument) -> None:
        params.dcgmHandle = self.new_pointer()
        self.connections[params.dcgmHandle] = _Connection(embedded=True)

    @_function("dcgmDisconnect", "dcgmStopEmbedded", connected=False)
    def _disconnect(self, handle: int) -> None:
        if self.connections.pop(handle, None) is None:
            raise Refused(Code.CONNECTION_LOST)

    @_function("dcgmVersionInfo", connected=False)
    @_function("dcgmHostengineVersionInfo")
    def _version(self, *arguments: CArgument) -> None:
        arguments[-1].rawBuildInfoString = f"version:{self.version};buildtype:Release;commit:simulated".encode()

    @_function("dcgmModuleGetStatuses")
    def _modules(self, _connection: _Connection, struct: CArgument) -> None:
        paused = Fault.PROFILING_PAUSED in self.now().faults
        struct.numStatuses, struct.statuses[0].id = 1, library.PROFILING_MODULE
        struct.statuses[0].status = library.MODULE_PAUSED if paused else library.MODULE_LOADED

    @_function("dcgmGetGpuStatus")
    def _status(self, _connection: _Connection, number: int, status: CArgument) -> None:
        gpu = self.gpus[number]
        status.value = _LOST if gpu.fault is Fault.GPU_LOST else _FINE
        if gpu.uuid not in self.present:
            status.value = _DETACHED

    @_function("dcgmGetEntityGroupEntities")
    def _list(self, _connection: _Connection, group: int, ids: CArgument, count: CArgument, _flags: int) -> None:
        there = (place for place, one in self.entities.items() if one.gpu and one.gpu.uuid in self.present)
        found = [number for level, number in there if level == group]
        count.value = len(found)
        ids[: len(found)] = found

    @_function("dcgmGetGpuInstanceHierarchy")
    def _hierarchy(self, _connection: _Connection, struct: CArgument) -> None:
        instances = [(place, one) for place, one in self.entities.items() if one.members]
        instances.sort(key=lambda row: (row[0] if row[0][0] == GPU_INSTANCE else row[1].above, row[0]))
        struct.count = len(instances)
        for row, (place, one) in zip(struct.entityList, instances, strict=False):
            row.entity.entityGroupId, row.entity.entityId = place
            row.parent.entityGroupId, row.parent.entityId = one.above
            gpu, member = self.gpus[place[1] // _INSTANCES_PER_GPU], one.members[0]
            row.gpuUuid, row.nvmlGpuIndex, row.nvmlInstanceId = gpu.uuid.encode(), gpu.index, member.gpu_instance_id
            slices, part = slices_of(member)
            whole = (_UNKNOWN_ID, member.profile_id or 0, slices)
            shape = whole if place[0] == GPU_INSTANCE else (member.compute_instance_id, part - 1, part)
            row.nvmlComputeInstanceId, row.nvmlMigProfileId, row.nvmlProfileSlices = shape

    @_function("dcgmGroupCreate")
    def _create_group(self, connection: _Connection, _kind: int, _name: bytes, group: CArgument) -> None:
        group.value = self.new_pointer()
        connection.groups[group.value] = []

    @_function("dcgmGroupAddEntity")
    def _add_entity(self, connection: _Connection, group: int, level: int, number: int) -> None:
        members = connection.groups.get(group, [])
        if (level, number) not in self.entities or (level, number) in members:
            raise Refused(Code.BAD_PARAMETER)
        members.append((level, number))

    @_function("dcgmFieldGroupCreate")
    def _create_fields(
        self, connection: _Connection, count: int, ids: CArgument, _name: bytes, group: CArgument
    ) -> None:
        fields = tuple(int(one) for one in ids[:count])
        if not 0 < len(fields) <= _MOST_FIELDS or not _known(self.version).issuperset(fields):
            raise Refused(Code.BAD_PARAMETER)
        self.refuse("dcgmFieldGroupCreate", fields)
        group.value = self.new_pointer()
        connection.field_groups[group.value] = fields

    @_function("dcgmGroupDestroy", "dcgmFieldGroupDestroy")
    def _destroy(self, connection: _Connection, group: int) -> None:
        if connection.groups.pop(group, None) is None and connection.field_groups.pop(group, None) is None:
            raise Refused(Code.NOT_CONFIGURED)
        for watch in [one for one in connection.watches if group in one]:
            del connection.watches[watch]

    @_function("dcgmWatchFields")
    def _watch(self, connection: _Connection, group: int, fields: int, interval_us: int, *_keep: float) -> None:
        (keys, _), ids, node = connection.watched(group, fields), connection.field_groups[fields], self.now()
        self.refuse("dcgmWatchFields", ids)
        gpus = [self.entities.get(key[:2], _Entity()).gpu for key in keys]
        if not _PROFILING.isdisjoint(ids) and not all(_profiling_fields(node, gpu) for gpu in gpus if gpu):
            raise Refused(Code.MODULE_NOT_LOADED)
        watch = connection.watches[group, fields] = _Watch(
            interval_seconds=interval_us / 1e6,
            started=self.monotonic(),
            from_seconds=node.at_seconds,
            samples=deque([(node, {}), (node, {})], maxlen=2),
        )
        self.update(watch)

    @_function("dcgmUnwatchFields")
    def _unwatch(self, connection: _Connection, group: int, fields: int) -> None:
        connection.watches.pop((group, fields), None)

    @_function("dcgmUpdateAllFields")
    def _update_all(self, connection: _Connection, _wait: int) -> None:
        for watch in connection.watches.values():
            self.update(watch)

    @_function("dcgmProfGetSupportedMetricGroups")
    def _metric_groups(self, _connection: _Connection, struct: CArgument) -> None:
        ids = _profiling_fields(self.now(), self.gpus[struct.gpuId])
        if not ids:
            raise Refused(Code.MODULE_NOT_LOADED)
        room = len(struct.metricGroups[0].fieldIds)
        some = [ids[start : start + room] for start in range(0, len(ids), room)]
        struct.numMetricGroups = len(some)
        for row, fields in zip(struct.metricGroups, some, strict=False):
            row.numFieldIds = len(fields)
            row.fieldIds[: len(fields)] = fields

    @_function("dcgmGetLatestValues_v2")
    def _latest(self, connection: _Connection, group: int, fields: int, callback: CArgument, _data: object) -> None:
        keys, watch = connection.watched(group, fields)
        if watch is not None:
            self.update(watch)
        _deliver(callback, keys, lambda key: [self._record(watch, key)])

    @_function("dcgmGetValuesSince_v2")
    def _since(self, connection: _Connection, group: int, fields: int, start: int, *rest: CArgument) -> None:
        following, callback, _data = rest
        keys, watch = connection.watched(group, fields)
        told = {key: self._xids(watch, key, start) if watch else [] for key in keys}
        following.value = max([start - 1, *(one[2] for some in told.values() for one in some)]) + 1
        _deliver(callback, keys, lambda key: told[key])

    @_function("dcgmEntitiesGetLatestValues")
    def _live(self, _connection: _Connection, pairs: CArgument, count: int, ids: CArgument, *rest: CArgument) -> None:
        ids_count, _flags, values = rest
        fields = tuple(int(one) for one in ids[:ids_count])
        if not _PROFILING.isdisjoint(fields):
            self.kill()
            raise EngineKilledError(f"a live read of profiling fields {fields} crashes a real host engine")
        if not _known(self.version).issuperset(fields) or Field.XID_ERRORS in fields:
            raise Refused(Code.ERROR)
        self.now(fresh=True)
        node, records = self.wait_while(Fault.HANG), iter(values)
        for place in [(pair.entityGroupId, pair.entityId) for pair in pairs[:count]]:
            entity = self.entities.get(place)
            for field_id, record in zip(fields, records, strict=False):
                record.entityGroupId, record.entityId = place
                value = _value_of(node, entity, field_id) if entity else _Blank.NULL
                at = self._microseconds(node.at_seconds) if entity else 0
                _put(record, field_id, Code.OK if entity else Code.NOT_WATCHED, at, value)


def _deliver(callback: CArgument, keys: Iterable[_Key], told: Callable[[_Key], list[_Record]]) -> None:
    """Call the callback with the records of each entity."""
    for entity, some in groupby(keys, key=lambda key: key[:2]):
        values = [record for key in some for record in told(key)]
        records = (library.FieldValueV1 * len(values))()
        for record, value in zip(records, values, strict=True):
            _put(record, *value)
        if values:
            callback(*entity, ctypes.addressof(records), len(values), None)


def _put(record: CArgument, field_id: int, status: int, at_microseconds: int, value: Value) -> None:
    kind, is_blank = _TYPES.get(field_id, INTEGER), isinstance(value, _Blank)
    record.version, record.fieldId, record.fieldType = library.version_word(type(record)), field_id, kind
    record.status, record.ts = status, at_microseconds
    if kind == STRING:
        text = f"<<<{value.name}>>>" if isinstance(value, _Blank) else str(value)
        record.value.str = text.encode()[: library.STRING_BYTES - 1]
    elif kind == DOUBLE:
        record.value.dbl = float(value) + (_BLANK_DOUBLE if is_blank else 0.0)
    elif is_blank:
        record.value.i64 = int(value) + (_BLANK_32 if field_id in _NARROW else _BLANK_64)
    else:
        record.value.i64 = 0 if isinstance(value, str) else int(value)


_installed: Installed[_Engine] = Installed("libdcgm")
set_epoch, fail, clear_failures = _installed.set_epoch, _installed.fail, _installed.clear_failures


def install(truth: Callable[[], NodeTruth], *, soname: str = "", **timing: Unpack[Timing]) -> None:
    """Install a fake libdcgm with an engine at ``localhost:5555`` that returns values of ``truth``.

    A watched field is sampled once per interval, when it is read; a profiling field is the mean since the previous
    sample. ``soname`` is the name of the library; empty: the name for the major version of the engine.
    """
    version = truth().dcgm.version
    soname = soname or f"libdcgm.so.{version.partition('.')[0]}"
    calls = {name: call for name, call in _CALLS.items() if name != "dcgmConnect_v3" or version >= "4.5"}
    major = int(soname.rpartition(".")[2])
    engine = _installed.double = _Engine(source=truth, calls=calls, version=version, major=major, **timing)
    functions = engine.library(
        errorString=lambda code: _ERRORS.get(code, "Unknown error").encode(),
        DcgmFieldGetById=lambda field_id: _meta_pointer(field_id, version),
    )
    library.install(functions, soname, knock=knock)


def uninstall() -> None:
    """Remove the library; no effect if it is not installed."""
    _installed.double = None
    library.uninstall()


def knock(address: str, _seconds: float) -> str:
    """Connect to an endpoint, like a socket, and return the address: ``host:port`` or ``unix:///path``.

    Raises:
        OSError: The connection is refused, or the file does not exist.
    """
    if address.startswith("unix:"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    if Fault.ENGINE_DOWN in _installed.get().now().faults or address not in _ADDRESSES:
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return address


def held() -> dict[str, int]:
    """Return the numbers of connections, groups, field groups and watches, which show leaks."""
    ones = _installed.get().connections.values()
    counts = {name: sum(len(getattr(one, name)) for one in ones) for name in ("groups", "field_groups", "watches")}
    return {"connections": len(ones), **counts}

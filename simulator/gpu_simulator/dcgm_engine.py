"""State of a simulated DCGM host engine: entities with DCGM's ids, connections, watches, and what they measure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import COMPUTE_INSTANCE, GPU, GPU_INSTANCE, NONE
from exporter.model import Field
from gpu_simulator.dcgm_fields import Blank, Value, answers, is_profiling, mean_of, value_of
from gpu_simulator.driver_mig import joined
from gpu_simulator.driver_session import HANG_POLL_SECONDS, CArgument, InjectedErrors, Refused, fill_slots, plain
from gpu_simulator.gpu_values import read
from gpu_simulator.truth import Fault, GpuTruth, Load, MigTruth, NodeTruth

INSTANCES_PER_GPU = 8
FieldKey = tuple[int, int, int]
"""Entity group, entity id, field id."""
Record = tuple[int, int, int, Value]
"""Field id, status, microseconds, value."""
CALLS: dict[str, Callable[..., None]] = {}
"""Every C function by symbol: called with the engine and the C arguments, it raises ``Refused`` or fills arguments."""
_FIRST_HANDLE = 0x7F00_0000_1000
"""Above 2^32, so that a truncated handle shows."""
_NO_DRIVER = frozenset({Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISSING})
"""The engine has lost its GPUs. With a driver that was replaced under it, it has them still and can ask nothing."""
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """What an id stands for now: the node, a GPU, or an instance with its compute instances."""

    gpu: GpuTruth | None = None
    members: tuple[MigTruth, ...] = ()

    @property
    def integral(self) -> Load:
        """Integral of its load since the scenario's start."""
        whole = self.gpu.load_integral if self.gpu else Load()
        return joined(self.members) if self.members else whole


@dataclass(slots=True, kw_only=True)
class FieldWatch:
    """Fields that are sampled together; all of them are measured anew at each beat, when they are read."""

    keys: tuple[FieldKey, ...]
    interval_seconds: float
    started: float
    """Of the monotonic clock."""
    from_seconds: float
    """Of the scenario, when the watch began."""
    beat: int = -1
    at_seconds: float = 0.0
    """Of the scenario, at the last beat."""
    values: dict[FieldKey, Value] = field(default_factory=dict)
    before: dict[tuple[int, int], tuple[float, Entity]] = field(default_factory=dict)
    """(seconds, entity) at the beat before, of what was measured then."""


@dataclass(slots=True, kw_only=True)
class Connection:
    """Groups of entities, groups of fields and watches of one client; all end with the connection."""

    embedded: bool = False
    alive: bool = True
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    field_groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    watches: dict[tuple[int, int], FieldWatch] = field(default_factory=dict)

    def watch(self, group: CArgument, fields: CArgument) -> FieldWatch | None:
        """Return the watch of two of its own groups."""
        if plain(group) not in self.groups or plain(fields) not in self.field_groups:
            raise Refused(library.NOT_CONFIGURED)
        return self.watches.get((plain(group), plain(fields)))


@dataclass(slots=True, kw_only=True)
class Engine:
    """The library of this process and the engine behind it."""

    source: Callable[[], NodeTruth]
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    cache_seconds: float
    epoch_seconds: float
    version: str
    major: int
    """Of the library."""
    connections: dict[int, Connection] = field(default_factory=dict)
    failures: InjectedErrors = field(default_factory=lambda: InjectedErrors("libdcgm", CALLS))
    gpus: list[GpuTruth] = field(default_factory=list)
    """By DCGM's id; one that vanishes stays."""
    slots: dict[int, tuple[list[int | None], list[str | None]]] = field(default_factory=dict)
    """By DCGM's id: the GPU instance, and the UUID of the compute instance, in each slot."""
    entities: dict[tuple[int, int], Entity] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    last_handle: int = _FIRST_HANDLE
    truth: NodeTruth | None = None
    truth_at: float = 0.0

    def now(self, *, fresh: bool = False) -> NodeTruth:
        """Return the truth, at most ``cache_seconds`` old unless ``fresh``; entities follow it."""
        if fresh or self.truth is None or self.monotonic() - self.truth_at >= self.cache_seconds:
            self.truth, self.truth_at = self.source(), self.monotonic()
            self._follow(() if _NO_DRIVER & self.truth.faults.keys() else self.truth.gpus)
        return self.truth

    def _follow(self, there: Sequence[GpuTruth]) -> None:
        self.present = frozenset(gpu.uuid for gpu in there if gpu.fault is not Fault.GPU_ABSENT)
        uuids = list(dict.fromkeys([*(gpu.uuid for gpu in self.gpus), *(gpu.uuid for gpu in there)]))
        known = {gpu.uuid: gpu for gpu in (*self.gpus, *there)}
        self.gpus = [known[uuid] for uuid in uuids]
        self.entities = {
            (NONE, 0): Entity(),
            **{(GPU, number): Entity(gpu=gpu) for number, gpu in enumerate(self.gpus)},
        }
        for number, gpu in enumerate(self.gpus):
            alive = gpu.instances if gpu.mig_enabled and gpu.uuid in self.present else ()
            instances, parts = self.slots.setdefault(number, ([], []))
            fill_slots(instances, list(dict.fromkeys(one.gpu_instance_id for one in alive)))
            fill_slots(parts, [one.uuid for one in alive])
            for group, slots in ((GPU_INSTANCE, instances), (COMPUTE_INSTANCE, parts)):
                for slot, name in enumerate(slots):
                    members = tuple(one for one in alive if name in (one.gpu_instance_id, one.uuid))
                    if members:
                        entity = Entity(gpu=gpu, members=members)
                        self.entities[group, number * INSTANCES_PER_GPU + slot] = entity

    def gate(self) -> NodeTruth:
        """Wait as long as the engine hangs or is slow; end connections while it is down."""
        node = self.now()
        while Fault.ENGINE_HANG in node.faults:
            self.sleep(HANG_POLL_SECONDS)
            node = self.now(fresh=True)
        if Fault.ENGINE_DOWN in node.faults:
            self.kill()
        elif seconds := node.faults.get(Fault.ENGINE_SLOW):
            self.sleep(seconds)
        return node

    def kill(self) -> None:
        """End the engine: connections to it stay dead."""
        for handle, one in self.connections.items():
            if not one.embedded:
                self.connections[handle] = Connection(alive=False)

    def new_handle(self) -> int:
        """Return a number that was never given out before."""
        self.last_handle += 0x10
        return self.last_handle

    def opened(self, connection: Connection) -> int:
        """Take a new connection, and return its handle."""
        handle = self.new_handle()
        self.connections[handle] = connection
        return handle

    def update(self, watch: FieldWatch) -> None:
        """Measure what is watched if its beat has come; with a driver that hangs nothing moves."""
        node, beat = self.now(), int((self.monotonic() - watch.started) / watch.interval_seconds + 1e-6)
        if Fault.HANG in node.faults or beat <= watch.beat:
            return
        watch.beat, watch.at_seconds, watch.values = beat, node.at_seconds, {}
        for key in watch.keys:
            entity = self.entities.get(key[:2])
            if entity is not None:
                watch.values[key] = self._value(node, watch, key, entity)
        watch.before = {
            place: (node.at_seconds, entity)
            for place, entity in self.entities.items()
            if entity.gpu and answers(node, entity.gpu) and Fault.PROFILING_PAUSED not in node.faults
        }

    def _value(self, node: NodeTruth, watch: FieldWatch, key: FieldKey, entity: Entity) -> Value:
        gpu, members, field_id = entity.gpu, entity.members, key[2]
        since, before = watch.before.get(key[:2], (0.0, Entity()))
        same = before.gpu is not None and [one.uuid for one in before.members] == [one.uuid for one in members]
        if gpu is None or not (is_profiling(field_id) or field_id == Field.NVLINK_BANDWIDTH_TOTAL):
            return value_of(node, gpu, members, field_id)
        if not answers(node, gpu) or (is_profiling(field_id) and Fault.PROFILING_PAUSED in node.faults):
            return Blank.NULL
        seconds = node.at_seconds - since if same else 0.0
        if field_id == Field.NVLINK_BANDWIDTH_TOTAL:
            return _link_rate(before.gpu if same else None, gpu, seconds)
        return mean_of(gpu, key[0], field_id, seconds, (before.integral, entity.integral))

    def record(self, watch: FieldWatch | None, key: FieldKey) -> Record:
        """Return the newest value of a field, or why there is none."""
        if watch is None or key[:2] not in self.entities:
            return (key[2], library.NOT_WATCHED, 0, Blank.NULL)
        if key[2] == Field.XID_ERRORS:
            events = self.xids(watch, key, 0)
            return events[-1] if events else (key[2], library.NO_DATA, 0, Blank.NULL)
        return (key[2], library.OK, self.microseconds(watch.at_seconds), watch.values.get(key, Blank.NULL))

    def xids(self, watch: FieldWatch, key: FieldKey, since_microseconds: int) -> list[Record]:
        """Return the Xid errors of a GPU since the watch began and since a time."""
        gpu = self.entities.get(key[:2], Entity()).gpu
        return [
            (key[2], library.OK, self.microseconds(seconds), code)
            for seconds, code, *_ in (gpu.xids if gpu and Fault.HANG not in self.now().faults else ())
            if seconds > watch.from_seconds and self.microseconds(seconds) >= since_microseconds
        ]

    def microseconds(self, seconds: float) -> int:
        """Return an instant of the scenario as the engine's time stamp."""
        return round((self.epoch_seconds + seconds) * 1e6)


def _link_rate(before: GpuTruth | None, gpu: GpuTruth, seconds: float) -> Value:
    """The field's name says total: it is a rate, KiB per second over a thousand; the first value is 0."""
    moved = 0.0
    for one in (Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL):
        after, first = read(gpu, one), read(before or gpu, one)
        if after is None or first is None:
            return Blank.NOT_SUPPORTED
        moved += int(after / _KIB) - int(first / _KIB)
    return round(moved / seconds / 1000) if before and seconds > 0 else 0

"""The simulated engine's cache: what each watch sampled at its own beat, whatever its reader's beat is."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.gpu.dcgm import library
from exporter.model import Field
from gpu_simulator.dcgm_entities import Entities, Entity
from gpu_simulator.dcgm_known import is_profiling
from gpu_simulator.dcgm_profiling import integral_of, is_measured, mean
from gpu_simulator.dcgm_values import Blank, Value, answers, value_of
from gpu_simulator.driver_board import read
from gpu_simulator.truth import Fault, GpuTruth, Load, NodeTruth

Key = tuple[int, int, int]
"""Entity group, entity id, field id."""
_ROUNDING = 1e-6
_KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of one field of one entity, or the lack of it."""

    status: int = library.OK
    at_microseconds: int = 0
    value: Value = Blank.NULL


NOT_WATCHED = Sample(status=library.NOT_WATCHED)
NO_DATA = Sample(status=library.NO_DATA)


@dataclass(slots=True, kw_only=True)
class Cell:
    """One watched field of one entity."""

    interval_seconds: float
    started: float
    """On the engine's clock."""
    from_seconds: float
    """Of the scenario, when it was first watched."""
    samples: deque[Sample]
    watchers: int = 1
    beat: int = -1
    owner: str = ""
    """Whose samples they are: an instance that is made anew gets the id of one that was destroyed."""
    since: tuple[float, Load] | None = None
    """Where the mean of a profiling field begins."""
    sent: tuple[float, float] | None = None
    """(seconds, bytes over NVLink so far) at the sample before."""


@dataclass(slots=True)
class Cache:
    """Every cell by its key; one that nobody watches any more keeps its last values, which age."""

    cells: dict[Key, Cell] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget everything, as an engine that ends does."""
        self.cells.clear()

    def watch(self, key: Key, *, interval_seconds: float, keep: int, started: float, from_seconds: float) -> None:
        """Begin to sample, or sample more often and keep more than before."""
        cell = self.cells.get(key)
        if cell is None or cell.watchers == 0:
            self.cells[key] = Cell(
                interval_seconds=interval_seconds,
                started=started,
                from_seconds=from_seconds,
                samples=deque(maxlen=keep),
            )
            return
        cell.watchers += 1
        cell.interval_seconds = min(cell.interval_seconds, interval_seconds)
        cell.samples = deque(cell.samples, maxlen=max(keep, cell.samples.maxlen or 1))

    def unwatch(self, keys: Iterable[Key]) -> None:
        """One watcher less for each."""
        for key in keys:
            if key in self.cells:
                self.cells[key].watchers -= 1

    def keep_once(self, key: Key, sample: Sample, *, now: float) -> None:
        """Store the one value that a field gets whose watch failed because of its neighbours."""
        if key not in self.cells:
            samples = deque([sample], maxlen=1)
            self.cells[key] = Cell(interval_seconds=1, started=now, from_seconds=0, samples=samples, watchers=0)

    def latest(self, key: Key) -> Sample:
        """The newest value that is kept."""
        cell = self.cells.get(key)
        if cell is None:
            return NOT_WATCHED
        return cell.samples[-1] if cell.samples else NO_DATA

    def since(self, key: Key, microseconds: int) -> list[Sample]:
        """All kept values from a time on, oldest first."""
        cell = self.cells.get(key)
        return [one for one in cell.samples if one.at_microseconds >= microseconds] if cell else []

    def update(
        self,
        keys: Iterable[Key],
        node: NodeTruth,
        entities: Entities,
        *,
        monotonic: float,
        epoch_seconds: float,
        at_once: bool = False,
    ) -> None:
        """Bring cells up to date whose beat has come; with a driver that hangs nothing moves.

        Args:
            keys: Which cells.
            node: The truth now.
            entities: What the keys stand for.
            monotonic: The engine's clock.
            epoch_seconds: Unix time of the scenario's start.
            at_once: Sample whatever is no profiling field though its beat has not come.
        """
        if Fault.HANG in node.faults:
            return
        for key in keys:
            cell = self.cells.get(key)
            if cell is None or cell.watchers <= 0:
                continue
            beat = math.floor((monotonic - cell.started) / cell.interval_seconds + _ROUNDING)
            if beat <= cell.beat and not (at_once and not is_profiling(key[2])):
                continue
            cell.beat = beat
            entity = entities.find(key[0], key[1])
            if entity is not None:
                _sample(cell, node, entity, key[2], epoch_seconds)


def _sample(cell: Cell, node: NodeTruth, entity: Entity, field_id: int, epoch_seconds: float) -> None:
    at = round((epoch_seconds + node.at_seconds) * 1e6)
    if cell.owner != entity.name:
        cell.owner, cell.since, cell.sent = entity.name, None, None
        cell.samples.clear()
    if field_id == Field.XID_ERRORS:
        _follow_xids(cell, entity.gpu, epoch_seconds)
    elif is_profiling(field_id):
        cell.samples.append(Sample(at_microseconds=at, value=_mean(cell, node, entity, field_id)))
    elif field_id == Field.NVLINK_BANDWIDTH_TOTAL and entity.gpu is not None:
        cell.samples.append(Sample(at_microseconds=at, value=_link_rate(cell, node, entity.gpu)))
    else:
        cell.samples.append(Sample(at_microseconds=at, value=value_of(node, entity, field_id)))


def _mean(cell: Cell, node: NodeTruth, entity: Entity, field_id: int) -> Value:
    integral = integral_of(entity)
    value = mean(node, entity, field_id, cell.since, integral)
    goes_on = entity.gpu is not None and is_measured(node, entity.gpu)
    cell.since = (node.at_seconds, integral) if goes_on and integral is not None else None
    return value


def _link_rate(cell: Cell, node: NodeTruth, gpu: GpuTruth) -> Value:
    """The field's name says total: it is a rate, KiB per second over a thousand; the first value is 0."""
    sent, received = read(gpu, Field.NVLINK_TX_BYTES_TOTAL), read(gpu, Field.NVLINK_RX_BYTES_TOTAL)
    if not answers(node, gpu) or sent is None or received is None:
        cell.sent = None
        return Blank.NOT_SUPPORTED if answers(node, gpu) else Blank.NULL
    total = sum(int(one / _KIB) * _KIB for one in (sent, received))
    before, cell.sent = cell.sent, (node.at_seconds, float(total))
    if before is None or node.at_seconds <= before[0]:
        return 0
    return round((total - before[1]) / _KIB / (node.at_seconds - before[0]) / 1000)


def _follow_xids(cell: Cell, gpu: GpuTruth | None, epoch_seconds: float) -> None:
    """Events since the watch began; those of before were never seen."""
    told = cell.samples[-1].at_microseconds if cell.samples else round((epoch_seconds + cell.from_seconds) * 1e6)
    for seconds, code, *_ in gpu.xids if gpu else ():
        at = round((epoch_seconds + seconds) * 1e6)
        if at > told:
            cell.samples.append(Sample(at_microseconds=at, value=code))

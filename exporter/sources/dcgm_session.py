"""One connection to an engine from its devices to their readings; over when the engine goes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from exporter.errors import NoValuesError
from exporter.model import DeviceState, Field, Gpu, GpuReading, MigReading, ProfilingState, XidEvent
from exporter.sources import _libdcgm
from exporter.sources.dcgm_engine import NO_GPUS, NO_VALUES, Engine, no_gpus, no_room, no_values
from exporter.sources.dcgm_entities import Device, Entities, Layout
from exporter.sources.dcgm_fields import is_profiling
from exporter.sources.dcgm_plan import plan
from exporter.sources.dcgm_profiling import Profiling
from exporter.sources.dcgm_values import Entity, Inbox, Value
from exporter.sources.dcgm_wanted import Wanted
from exporter.sources.dcgm_watch import Watches
from exporter.sources.dcgm_xids import Xids

_LOOK_SECONDS = 4.9
_ANEW_SECONDS = 60.0
_SILENT_INTERVALS = 3.0
_VERSIONS = (Field.DRIVER_VERSION, Field.NVML_VERSION)
_MEASURED = (DeviceState.UP, DeviceState.RESET_REQUIRED)
_DOWN = {
    _libdcgm.GPU_IS_LOST: (DeviceState.LOST, "gpu_is_lost"),
    _libdcgm.RESET_REQUIRED: (DeviceState.RESET_REQUIRED, "reset_required"),
    _libdcgm.DETACHED: (DeviceState.MISSING, "detached"),
}
Values = Mapping[Entity, Mapping[int, Value]]


class Session:
    """What is known and watched over one connection.

    Args:
        engine: Connected.
        wanted: What to read.
        interval_seconds: Between samples.
        inbox: Takes in what the engine delivers.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(
        self, engine: Engine, wanted: Wanted, interval_seconds: float, inbox: Inbox, count: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self.layout = Layout()
        self._wanted = wanted
        self._interval_seconds = interval_seconds
        self._entities = Entities(engine, texts=wanted.texts, node_fields=wanted.of_the_node, count=count)
        self._profiling = Profiling(engine, filter(is_profiling, wanted.levels), count)
        self._watches = Watches(engine, interval_seconds, inbox, count)
        self._xids = Xids(engine, interval_seconds, inbox, count)
        self._looked_at = self._anew_at = -math.inf
        self._speaking: frozenset[str] = frozenset()
        self._spoke_at: dict[str, float] = {}

    def look(self, now: float) -> None:
        """See which devices there are and how they are, and watch what they can have.

        Args:
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: the engine is gone.
        """
        anew = now - self._anew_at >= _ANEW_SECONDS
        layout = self._entities.look(anew=anew)
        self._anew_at = now if anew else self._anew_at
        up = [device for device in layout.devices if device.state is DeviceState.UP]
        self._profiling.follow((device.gpu_id for device in up), now)
        self._watches.follow(
            lambda: plan(
                layout,
                self._wanted.levels,
                self._profiling.fields_of,
                self._watches.is_refused,
                self._watches.most_fields,
            ),
            now,
        )
        if self._wanted.xids:
            # One that is lost, too: the event that says why may still be on its way.
            uuids = {device.gpu.uuid for device in layout.devices if device.state is not DeviceState.MISSING}
            self._xids.follow(frozenset(one for one, place in layout.places.items() if place[0] in uuids))
        self.layout, self._looked_at = layout, now

    def read(self, now: float) -> dict[str, GpuReading]:
        """Return a reading of every device by its UUID.

        Args:
            now: Seconds of the monotonic clock.

        Raises:
            NoValuesError: the engine answers and lists no GPU, or gives no values of any.
            SourceError: the engine is gone.
        """
        if now - self._looked_at >= _LOOK_SECONDS or self._watches.lost_one or not self.layout.listed:
            self.look(now)
        values, codes = self._watches.read(now)
        if self._fell_silent():
            self.look(now)
        self._profiling.look(now, at_once=self._profiling.paused or self._watches.profiling_stopped)
        self._note_silence(codes, now)
        return {device.gpu.uuid: self._reading(device, values, codes, now) for device in self.layout.devices}

    def events(self, now: float) -> tuple[XidEvent, ...]:
        """Return the Xid events since the last call; ``now`` is Unix time.

        Raises:
            SourceError: the engine is gone.
        """
        return self._xids.read(self.layout.places, now)

    def text(self, field: Field) -> str | None:
        """Return a text of the node, ``None`` where it is not told."""
        told = self._entities.node_values.get(int(field))
        return told if isinstance(told, str) else None

    def _fell_silent(self) -> bool:
        """Tell whether a GPU that spoke at the last sample says nothing now, so that its state is asked at once."""
        speaking = frozenset(device.gpu.uuid for device in self.layout.devices if self._watches.speaks(device.entity))
        before, self._speaking = self._speaking, speaking
        return not before <= speaking

    def _note_silence(self, codes: Mapping[Entity, int], now: float) -> None:
        """Note since when each GPU gives no values.

        Raises:
            NoValuesError: none of those that are up gives any, or all are missing at once. That is evidence about the
                engine and not about the GPUs.
        """
        if all(one.state is DeviceState.MISSING for one in self.layout.devices):
            raise NoValuesError(NO_GPUS, no_gpus(self.engine.address))
        up = [one for one in self.layout.devices if one.state is DeviceState.UP and one.entity not in codes]
        self._spoke_at = {one.gpu.uuid: self._spoke_at.get(one.gpu.uuid, now) for one in up}
        if not self._wanted.levels:
            return
        for one in up:
            if self._watches.speaks(one.entity):
                self._spoke_at[one.gpu.uuid] = now
        if up and self._watches.full:
            raise NoValuesError("dcgm_limit_reached", no_room(self.engine.address, len(up)))
        if up and all(self._is_silent(one, now) for one in up):
            raise NoValuesError(NO_VALUES, no_values(self.engine.address, len(up)))

    def _is_silent(self, device: Device, now: float) -> bool:
        spoke_at = self._spoke_at.get(device.gpu.uuid, now)
        silent = now - spoke_at > _SILENT_INTERVALS * self._interval_seconds
        return silent and bool(self._wanted.levels)

    def _reading(self, device: Device, values: Values, codes: Mapping[Entity, int], now: float) -> GpuReading:
        gpu, state, reason = self._gpu(device), device.state, device.reason
        if state is DeviceState.UP and device.entity in codes:
            state, reason = _DOWN[codes[device.entity]]
        if state not in _MEASURED:
            return GpuReading(gpu=gpu, state=state, reason=reason)
        profiled = sorted(self._profiling.fields_of(device.gpu_id))
        profiling = self._profiling.state(device.gpu_id, self._watches.refusal_of(device.entity, profiled))
        paused = profiling is ProfilingState.PAUSED
        own = _numbers(values.get(device.entity, {}), paused=paused)
        if self._watches.stands_for(device.entity) and self._is_silent(device, now):
            return GpuReading(gpu=gpu, state=DeviceState.FAILED, reason="no_values", profiling=profiling)
        return GpuReading(
            gpu=gpu,
            state=state,
            reason=reason,
            values={**self._of_the_node(), **own},
            instances=tuple(
                MigReading(instance=one.instance, values=_numbers(values.get(one.measured, {}), paused=paused))
                for one in device.instances
            ),
            profiling=profiling,
        )

    def _gpu(self, device: Device) -> Gpu:
        told = self._entities.node_values
        texts = {
            Field(one): text
            for one in self._wanted.of_the_node
            if one not in _VERSIONS and isinstance(text := told.get(one), str)
        }
        return replace(device.gpu, labels={**device.gpu.labels, **texts}) if texts else device.gpu

    def _of_the_node(self) -> dict[Field, int | float]:
        told = self._entities.node_values
        return {
            Field(one): number for one in self._wanted.of_the_node if isinstance(number := told.get(one), int | float)
        }


def _numbers(told: Mapping[int, Value], *, paused: bool) -> dict[Field, int | float]:
    """Keep numbers; while profiling is paused, what the engine still has of it is from before."""
    return {
        Field(one): value
        for one, value in told.items()
        if not isinstance(value, str) and not (paused and is_profiling(one))
    }

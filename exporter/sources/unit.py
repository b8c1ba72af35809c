"""One attached GPU with all that is read of it: numbers, engines, MIG instances, processes."""

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from exporter.model import DeviceState, Field, Gpu, GpuReading, MigReading, ProcessUse
from exporter.sources import driver, gpm, identity, mig, nvml_fields
from exporter.sources.device import Device, Plan
from exporter.sources.processes import Poller

_PROCESS_SECONDS = 1.9
"""A little under two, so that the jitter of samples a second apart does not make it three; at most 5 (the ring)."""
_LAYOUT_SECONDS = 4.9
_RETRY_SECONDS = 600.0
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is read of every GPU of this driver."""

    fields: frozenset[Field]
    plan: Plan
    record: type[ctypes.Structure]
    """Layout of a process record in the loaded library."""
    oldest_seconds: float
    """The longest time over which a mean is still told."""
    count: Callable[[str], None]
    """Called with the reason of everything that goes wrong."""
    took: Callable[[], float]
    """Seconds since the sample that is being taken began: a driver may have been silent for any part of it."""


class _Instance:
    """One MIG instance and what is kept of it between samples."""

    def __init__(self, found: mig.Found, parent: Any, wanted: Wanted, has_gpm: Callable[[float], bool]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.found = found
        self.processes: tuple[ProcessUse, ...] | None = None
        self.has_memory = True
        """Whether no other compute instance is in its GPU instance; they have its memory together."""
        self._fields = wanted.fields
        self._no_memory_before = -math.inf
        self.poller = Poller(found.handle, utilisation=False, record=wanted.record, count=wanted.count)
        level = gpm.Level.GPU_INSTANCE if found.fills_its_gpu_instance else gpm.Level.COMPUTE_INSTANCE
        fields = gpm.fields_at(level, wanted.fields)
        gpu_instance_id = found.instance.gpu_instance_id

        def take(sample: Any) -> None:  # noqa: ANN401 - a GPM sample is whatever pynvml gave
            if level is gpm.Level.GPU_INSTANCE:
                pynvml.nvmlGpmMigSampleGet(parent, gpu_instance_id, sample)
            else:
                pynvml.nvmlGpmSampleGet(found.handle, sample)

        self.sampler = gpm.Sampler(
            take,
            fields,
            wanted.count,
            oldest_seconds=wanted.oldest_seconds,
            took=wanted.took,
            supported=has_gpm,
        )

    def read(self, now: float, *, poll: bool) -> MigReading:
        values = {**self._memory(now), **self.sampler.sample(now)}
        if poll:
            self.processes = self.poller.poll(now)
        return MigReading(instance=self.found.instance, values=values, processes=self.processes)

    def _memory(self, now: float) -> dict[Field, int | float]:
        if not self.has_memory or now < self._no_memory_before:
            return {}
        try:
            answer = nvml_fields.memory(self.found.handle)
        except pynvml.NVMLError as error:
            if driver.code_of(error) not in driver.UNAVAILABLE:
                raise
            self._no_memory_before = now + _RETRY_SECONDS
            return {}
        told = zip(nvml_fields.MEMORY_FIELDS, answer, strict=True)
        return {field: value for field, value in told if value is not None and field in self._fields}


def without_means(reading: GpuReading) -> GpuReading:
    """Return a reading during which the MIG layout changed, without what GPM measured of the instances."""
    instances = tuple(
        replace(one, values={field: value for field, value in one.values.items() if field not in gpm.METRICS})
        for one in reading.instances
    )
    return replace(reading, instances=instances)


class Unit:
    """One GPU from attaching to losing it; never used after the driver was shut down.

    Args:
        handle: Of this GPU, in the present generation of the driver.
        gpu: Its identity.
        wanted: What to read.
    """

    def __init__(self, handle: Any, gpu: Gpu, wanted: Wanted) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.handle = handle
        self._facts = identity.Facts(handle, wanted.count)
        self.gpu = self._facts.complete(gpu, -math.inf)
        """With the facts and the MIG shape that are known by now."""
        self._wanted = wanted
        self._device = self._new_device()
        self._gpm = gpm.Support(handle, wanted.count)
        self._sampler = gpm.Sampler(
            lambda sample: pynvml.nvmlGpmSampleGet(handle, sample),
            gpm.fields_at(gpm.Level.GPU, wanted.fields),
            wanted.count,
            oldest_seconds=wanted.oldest_seconds,
            took=wanted.took,
            supported=self._gpm.known,
        )
        self._poller = self._new_poller()
        self._processes: tuple[ProcessUse, ...] | None = None
        self._polled_at = -math.inf
        self._instances: tuple[_Instance, ...] = ()
        self._lacks_instances = False
        self._layout_at = -math.inf

    def _new_device(self) -> Device:
        return Device(self.handle, self._wanted.plan, self._wanted.count, self._wanted.took)

    def _new_poller(self) -> Poller | None:
        """Begin to follow processes; of a partitioned GPU only the instances say who uses them."""
        if self.gpu.mig_enabled:
            return None
        return Poller(self.handle, utilisation=True, record=self._wanted.record, count=self._wanted.count)

    def clock_was_set_back(self) -> None:
        """Begin anew with processes: the driver stamps samples of them by the wall clock, and none would be new."""
        self._poller = self._new_poller()

    def layout_changed(self) -> None:
        """Describe the MIG layout again at the next sample, and report no mean that includes the time before now.

        An instance that was destroyed and created again keeps its UUID, and its counters start again: a difference
        between the two may be any value.
        """
        self._layout_at = -math.inf
        for one in self._instances:
            one.sampler.begin_anew()

    def sample(self, now: float) -> GpuReading:
        """Return everything that the GPU tells now, and its state.

        Args:
            now: Seconds; only differences matter.

        Raises:
            pynvml.NVMLError: the driver as a whole is gone.
        """
        outcome = self._device.read(now)
        if driver.GPU_IS_LOST in outcome.codes:
            return self._down(DeviceState.LOST, driver.GPU_IS_LOST)
        needs_reset = driver.RESET_REQUIRED in outcome.codes
        if outcome.silent:
            code = outcome.codes[0] if outcome.codes else driver.NOT_SUPPORTED
            state = DeviceState.RESET_REQUIRED if needs_reset else DeviceState.FAILED
            return self._down(state, driver.RESET_REQUIRED if needs_reset else code)
        try:
            self.gpu = self._facts.complete(self.gpu, now)
            self._note_memory(outcome.values)
            values = {**self._own(outcome.values), **self._sampler.sample(now)}
            poll = not 0 <= now - self._polled_at < _PROCESS_SECONDS
            if poll:
                self._polled_at = now
                used = outcome.values.get(Field.FB_USED, 0)
                self._processes = None if self._poller is None else self._poller.poll(now, used)
                # What the driver tells next is of the time since this answer, not since the sample's begin.
                self._polled_at = now + self._wanted.took()
            self._follow_layout(now)
            instances = self._read_instances(now, poll=poll)
        except pynvml.NVMLError as error:
            if driver.code_of(error) != driver.GPU_IS_LOST:
                raise
            self._wanted.count(driver.reason_of(driver.GPU_IS_LOST))
            return self._down(DeviceState.LOST, driver.GPU_IS_LOST)
        return GpuReading(
            gpu=self.gpu,
            state=DeviceState.RESET_REQUIRED if needs_reset else DeviceState.UP,
            reason=driver.reason_of(driver.RESET_REQUIRED) if needs_reset else "",
            values=values,
            instances=instances,
            processes=self._processes,
            lacks_instances=self._lacks_instances,
        )

    def close(self) -> None:
        """Free what the driver holds for this GPU; to be called before the driver is shut down."""
        self._sampler.close()
        self._drop_instances()

    def _note_memory(self, values: Mapping[Field, int | float]) -> None:
        total = int(values.get(Field.FB_TOTAL, 0)) * _MIB
        if total and total != self.gpu.memory_total_bytes:
            self.gpu = replace(self.gpu, memory_total_bytes=total)

    def _own(self, values: Mapping[Field, int | float]) -> dict[Field, int | float]:
        """Leave out what came along with a wanted field in the same call."""
        return {field: value for field, value in values.items() if field in self._wanted.fields}

    def _down(self, state: DeviceState, code: int) -> GpuReading:
        for sampler in (self._sampler, *(one.sampler for one in self._instances)):
            sampler.begin_anew()
        return GpuReading(gpu=self.gpu, state=state, reason=driver.reason_of(code))

    def _follow_layout(self, now: float) -> None:
        """Describe the whole MIG layout again: an instance may come back under its UUID in another shape."""
        if 0 <= now - self._layout_at < _LAYOUT_SECONDS:
            return
        self._layout_at = now
        try:
            if not (self.gpu.mig_enabled or mig.enabled(self.handle)):
                return
            shape = mig.shape(self.handle)
            layout = mig.instances(self.handle, self.gpu.uuid, shape) if shape.enabled else mig.Layout(())
        except pynvml.NVMLError as error:
            # No answer is no change: the instances of before are still held. But there may be others by now.
            self._lacks_instances = self.gpu.mig_enabled
            self._note_of_mig(error)
            return
        for failed in layout.failed:
            self._note_of_mig(failed.error)
        self._lacks_instances = bool(layout.failed)
        self._adopt_shape(shape)
        self._adopt((*layout.found, *self._kept(layout)))

    def _kept(self, layout: mig.Layout) -> Iterator[mig.Found]:
        """Yield the instances that the driver fails to describe and that are not known to be others by now."""
        described = {found.instance.uuid for found in layout.found}
        uuid_at = {failed.slot: failed.uuid for failed in layout.failed}
        for one in self._instances:
            before = one.found
            if (
                before.slot in uuid_at
                and before.instance.uuid not in described
                and uuid_at[before.slot] in {None, before.instance.uuid}
            ):
                yield before

    def _adopt_shape(self, shape: mig.Shape) -> None:
        switched = shape.enabled is not self.gpu.mig_enabled
        self.gpu = replace(
            self.gpu,
            mig_enabled=shape.enabled,
            compute_slices=shape.compute_slices,
            memory_slices=shape.memory_slices,
        )
        if switched:  # the GPU now supports other calls
            self._device, self._poller, self._processes = self._new_device(), self._new_poller(), None
            self._sampler.begin_anew()

    def _adopt(self, found: tuple[mig.Found, ...]) -> None:
        """Follow a new layout; instances that are the same as before keep what they have measured."""
        before = {(one.found.instance, driver.address(one.found.handle)): one for one in self._instances}
        instances = []
        for new in found:
            same = before.pop((new.instance, driver.address(new.handle)), None)
            instances.append(_Instance(new, self.handle, self._wanted, self._gpm.known) if same is None else same)
        self._instances = tuple(instances)
        together = Counter(new.instance.gpu_instance_id for new in found)
        for one in self._instances:
            one.has_memory = together[one.found.instance.gpu_instance_id] == 1
        for gone in before.values():
            gone.sampler.close()

    def _read_instances(self, now: float, *, poll: bool) -> tuple[MigReading, ...]:
        readings = []
        for one in self._instances:
            try:
                readings.append(one.read(now, poll=poll or one.processes is None))
            except pynvml.NVMLError as error:
                # Its handle died with it, or it does not answer now: the next look at the layout tells which.
                self._note_of_mig(error)
                self._layout_at = -math.inf
                readings.append(MigReading(instance=one.found.instance))
        return tuple(readings)

    def _drop_instances(self) -> None:
        for one in self._instances:
            one.sampler.close()
        self._instances = ()

    def _note_of_mig(self, error: pynvml.NVMLError) -> None:
        code = driver.code_of(error)
        if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
            raise error
        self._wanted.count(f"mig_{driver.reason_of(code)}")

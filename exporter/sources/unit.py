"""One attached GPU with all that is read of it: numbers, engines, MIG instances, processes."""

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from exporter.model import DeviceState, Field, Gpu, GpuReading, MigReading, ProcessUse
from exporter.sources import driver, gpm, mig, nvml_fields
from exporter.sources.device import Device, Plan
from exporter.sources.processes import Poller

_PROCESS_SECONDS = 1.9
"""A little under two, so that the jitter of samples a second apart does not make it three; at most 5 (the ring)."""
_LAYOUT_SECONDS = 4.9
_PATIENCE_SECONDS = 60.0
"""So long the layout of before is told while an instance cannot be described."""
_RETRY_SECONDS = 600.0


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

    def __init__(self, found: mig.Found, parent: Any, wanted: Wanted, *, has_gpm: bool) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.found = found
        self.processes: tuple[ProcessUse, ...] | None = None
        self.has_memory = True
        """Whether no other compute instance is in its GPU instance; they have its memory together."""
        self._fields = wanted.fields
        self._no_memory_before = -math.inf
        self.poller = Poller(found.handle, utilisation=False, record=wanted.record, count=wanted.count)
        level = gpm.Level.GPU_INSTANCE if found.fills_its_gpu_instance else gpm.Level.COMPUTE_INSTANCE
        fields = gpm.fields_at(level, wanted.fields) if has_gpm else {}
        gpu_instance_id = found.instance.gpu_instance_id

        def take(sample: Any) -> None:  # noqa: ANN401 - a GPM sample is whatever pynvml gave
            if level is gpm.Level.GPU_INSTANCE:
                pynvml.nvmlGpmMigSampleGet(parent, gpu_instance_id, sample)
            else:
                pynvml.nvmlGpmSampleGet(found.handle, sample)

        self.sampler = gpm.Sampler(take, fields, wanted.count, oldest_seconds=wanted.oldest_seconds, took=wanted.took)

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


class Unit:
    """One GPU from attaching to losing it; never used after the driver was shut down.

    Args:
        handle: Of this GPU, in the present generation of the driver.
        gpu: Its identity.
        wanted: What to read.
    """

    def __init__(self, handle: Any, gpu: Gpu, wanted: Wanted) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.handle = handle
        self.gpu = gpu
        self.out_of_date = False
        """Set when MIG was switched on or off, so that the GPU has to be attached anew."""
        self._wanted = wanted
        self._device = Device(handle, wanted.plan, wanted.count, wanted.took)
        self._has_gpm = gpm.supported(handle)
        self._sampler = gpm.Sampler(
            lambda sample: pynvml.nvmlGpmSampleGet(handle, sample),
            gpm.fields_at(gpm.Level.GPU, wanted.fields) if self._has_gpm else {},
            wanted.count,
            oldest_seconds=wanted.oldest_seconds,
            took=wanted.took,
        )
        self._poller = self._new_poller()
        self._processes: tuple[ProcessUse, ...] | None = None
        self._polled_at = -math.inf
        self._instances: tuple[_Instance, ...] = ()
        self._layout: frozenset[str] | None = None
        self._layout_at = -math.inf
        self._undescribed_since: float | None = None

    def _new_poller(self) -> Poller | None:
        """Begin to follow processes; of a partitioned GPU only the instances say who uses them."""
        if self.gpu.mig_enabled:
            return None
        return Poller(self.handle, utilisation=True, record=self._wanted.record, count=self._wanted.count)

    def clock_was_set_back(self) -> None:
        """Begin anew with processes: the driver stamps samples of them by the wall clock, and none would be new."""
        self._poller = self._new_poller()

    def layout_changed(self) -> None:
        """Look at the MIG layout again at the next sample, though its time has not come."""
        self._layout_at = -math.inf

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
            values = {**self._own(outcome.values), **self._sampler.sample(now)}
            poll = not 0 <= now - self._polled_at < _PROCESS_SECONDS
            if poll:
                self._polled_at = now
                self._processes = None if self._poller is None else self._poller.poll(now)
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
            lacks_instances=self._undescribed_since is not None,
        )

    def close(self) -> None:
        """Free what the driver holds for this GPU; to be called before the driver is shut down."""
        self._sampler.close()
        self._drop_instances()

    def _own(self, values: Mapping[Field, int | float]) -> dict[Field, int | float]:
        """Leave out what came along with a wanted field in the same call."""
        return {field: value for field, value in values.items() if field in self._wanted.fields}

    def _down(self, state: DeviceState, code: int) -> GpuReading:
        for sampler in (self._sampler, *(one.sampler for one in self._instances)):
            sampler.begin_anew()
        return GpuReading(gpu=self.gpu, state=state, reason=driver.reason_of(code))

    def _follow_layout(self, now: float) -> None:
        """See whether MIG was switched, or its instances are others than before."""
        if 0 <= now - self._layout_at < _LAYOUT_SECONDS:
            return
        self._layout_at = now
        try:
            if mig.enabled(self.handle) != self.gpu.mig_enabled:
                self.out_of_date = True
            elif self.gpu.mig_enabled and self._may_have_changed():
                self._look_at_instances(now)
        except pynvml.NVMLError as error:
            # Not told is not changed: what was there before is still held by somebody. But there may be others by now.
            if self.gpu.mig_enabled and self._undescribed_since is None:
                self._undescribed_since = now
            self._note_of_mig(error)

    def _may_have_changed(self) -> bool:
        """Tell whether the instances are to be described: there are others, or not all of them say who they are."""
        if self._undescribed_since is not None:
            return True
        try:
            return mig.uuids(self.handle) != self._layout
        except pynvml.NVMLError:
            return True  # which one fails, and how, shows when each is described

    def _look_at_instances(self, now: float) -> None:
        """Adopt the layout, at once where every instance is described; else there is patience with the one that fails.

        Without it its holder's part would look free. For ever, a GPU would show instances that are gone.
        """
        found, failed = mig.instances(self.handle, self.gpu.uuid, mig.shape(self.handle))
        if failed is None:
            self._undescribed_since = None
            self._adopt(found)
            return
        if self._undescribed_since is None:
            self._undescribed_since = now
        # Where nothing was told before, there is nothing to be patient for.
        patient = self._layout is not None and 0 <= now - self._undescribed_since < _PATIENCE_SECONDS
        self._note_of_mig(failed, again_soon=patient)
        if not patient:
            self._adopt(found)

    def _adopt(self, found: tuple[mig.Found, ...]) -> None:
        """Follow a new layout; instances that are the same as before keep what they have measured."""
        before = {(one.found.instance, driver.address(one.found.handle)): one for one in self._instances}
        instances = []
        for new in found:
            same = before.pop((new.instance, driver.address(new.handle)), None)
            instances.append(_Instance(new, self.handle, self._wanted, has_gpm=self._has_gpm) if same is None else same)
        self._instances = tuple(instances)
        together = Counter(new.instance.gpu_instance_id for new in found)
        for one in self._instances:
            one.has_memory = together[one.found.instance.gpu_instance_id] == 1
        self._layout = frozenset(new.instance.uuid for new in found)
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
                readings.append(MigReading(instance=one.found.instance))
        return tuple(readings)

    def _drop_instances(self) -> None:
        for one in self._instances:
            one.sampler.close()
        self._instances = ()
        self._layout = None

    def _note_of_mig(self, error: pynvml.NVMLError, *, again_soon: bool = True) -> None:
        code = driver.code_of(error)
        if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
            raise error
        self._wanted.count(f"mig_{driver.reason_of(code)}")
        if again_soon:
            self.layout_changed()

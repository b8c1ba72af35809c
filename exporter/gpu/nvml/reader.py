"""Reads one GPU: values, engines, MIG instances and processes."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pynvml

from exporter.gpu.nvml import activity, library, mig
from exporter.gpu.nvml.activity import GpmLevel, Poller, Sampler
from exporter.gpu.nvml.fields import MEMORY_FIELDS, MIB, DeviceFacts, NvmlDevice, memory
from exporter.gpu.nvml.library import Driver, Handle, Retries
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigReading, ProcessUse
from exporter.model.fields import Field

_SOON_SECONDS = 10.0
_RESET_REQUIRED, _LOST = "reset_required", "gpu_is_lost"
"""Reasons of states, from codes of the driver."""


_PROCESS_SECONDS = 1.9
"""Time between two polls of processes: slightly below 2 s, for the jitter of samples; at most 5 s (the ring)."""
_LAYOUT_SECONDS, _MODE_SECONDS = 4.9, 9.9
"""Time between two reads of the MIG layout, and of the mode of an unpartitioned GPU; events cause an earlier read."""
_MEMORY_RETRY_SECONDS = 600.0


class _Instance:
    """One MIG instance and its state between samples."""

    def __init__(self, found: mig.Found, parent: Handle, driver: Driver) -> None:
        self.found = found
        self.has_memory = True
        """Whether its GPU instance has no other compute instance, which would share the memory."""
        self._processes: tuple[ProcessUse, ...] | None = None
        self._fields = driver.fields
        self._no_memory_before = -math.inf
        self._poller = Poller(found.handle, driver, utilisation=False)
        if found.fills_its_gpu_instance:
            take = partial(pynvml.nvmlGpmMigSampleGet, parent, found.instance.gpu_instance_id)
            self.sampler = Sampler(take, GpmLevel.GPU_INSTANCE, driver)
        else:
            take = partial(pynvml.nvmlGpmSampleGet, found.handle)
            self.sampler = Sampler(take, GpmLevel.COMPUTE_INSTANCE, driver)

    def read(self, now: float, *, poll: bool, has_gpm: bool) -> MigReading:
        values = self._memory(now)
        if has_gpm:
            values.update(self.sampler.sample(now))
        if poll or self._processes is None:
            self._processes = self._poller.poll(now)
        return MigReading(instance=self.found.instance, values=values, processes=self._processes)

    def _memory(self, now: float) -> dict[Field, int | float]:
        if not self.has_memory or now < self._no_memory_before:
            return {}
        answer = library.optional(memory, self.found.handle)
        if answer is None:
            self._no_memory_before = now + _MEMORY_RETRY_SECONDS
            return {}
        pairs = zip(MEMORY_FIELDS, answer, strict=True)
        return {field: value for field, value in pairs if value is not None and field in self._fields}


def without_means(reading: GpuReading) -> GpuReading:
    """Return a reading without GPM values of instances, because the MIG layout changed during the reading."""
    instances = tuple(
        replace(one, values={field: value for field, value in one.values.items() if field not in activity.METRICS})
        for one in reading.instances
    )
    return replace(reading, instances=instances)


class Unit:
    """Reads one attached GPU; not used after the shutdown of the driver.

    Args:
        handle: Handle of this GPU, in the current session of the driver.
        gpu: Its identity.
        driver: The driver's session.
    """

    def __init__(self, handle: Handle, gpu: Gpu, driver: Driver) -> None:
        self.handle = handle
        self._driver = driver
        self._facts = DeviceFacts(handle, driver.count)
        self.gpu = self._facts.complete(gpu, -math.inf)
        """The GPU with its known facts and MIG shape."""
        self._device = NvmlDevice(handle, driver)
        self._has_gpm: bool | None = None
        """Whether the GPU supports GPM; ``None`` until the driver has answered."""
        self._gpm_retries = Retries(driver.count, "gpm_")
        self._sampler = Sampler(partial(pynvml.nvmlGpmSampleGet, handle), GpmLevel.GPU, driver)
        self._poller = self._new_poller()
        self._processes: tuple[ProcessUse, ...] | None = None
        self._instances: tuple[_Instance, ...] = ()
        self._lacks_instances = False
        self._polled_at = self._layout_at = -math.inf
        self.failures = 0
        """Number of failed samples since the last good one."""

    def _new_poller(self) -> Poller | None:
        """Create a poller for processes; on a partitioned GPU, only the instances list processes."""
        return None if self.gpu.mig_enabled else Poller(self.handle, self._driver, utilisation=True)

    @property
    def _samplers(self) -> tuple[Sampler, ...]:
        return self._sampler, *(one.sampler for one in self._instances)

    def clock_was_set_back(self) -> None:
        """Restart the process polls: samples have wall-clock timestamps, so that no sample would count as new."""
        self._poller = self._new_poller()

    def layout_changed(self) -> None:
        """Read the MIG layout again at the next sample, and drop means that include earlier time.

        An instance that was destroyed and created again keeps its UUID, but its counters restart, so that a difference
        can have any value.
        """
        self._layout_at = -math.inf
        for one in self._instances:
            one.sampler.begin_again()

    def sample(self, now: float) -> GpuReading:
        """Return the current values and state of the GPU.

        Args:
            now: Seconds; only differences matter.

        Raises:
            pynvml.NVMLError: The driver as a whole is gone.
        """
        try:
            return self._sample(now)
        except pynvml.NVMLError as error:
            if library.code_of(error) != pynvml.NVML_ERROR_GPU_IS_LOST:
                raise
            self._driver.count(_LOST)
            return self._down(DeviceState.LOST, _LOST)

    def _sample(self, now: float) -> GpuReading:
        values, reasons = self._device.read(now), self._device.reasons
        needs_reset = _RESET_REQUIRED in reasons
        if not values:
            state = DeviceState.RESET_REQUIRED if needs_reset else DeviceState.FAILED
            return self._down(state, _RESET_REQUIRED if needs_reset else (reasons or ["not_supported"])[0])
        self.gpu = self._facts.complete(self.gpu, now)
        total = int(values.get(Field.FB_TOTAL, 0)) * MIB
        if total and total != self.gpu.memory_total_bytes:
            self.gpu = replace(self.gpu, memory_total_bytes=total)
        has_gpm = self._supports_gpm(now)
        means = self._sampler.sample(now) if has_gpm else {}
        poll = now - self._polled_at >= _PROCESS_SECONDS
        if poll:
            used = values.get(Field.FB_USED, 0)
            self._processes = None if self._poller is None else self._poller.poll(now, used)
            # Process samples of the next poll cover the time since this answer, not since the start of this sample.
            self._polled_at = self._driver.clock()
        self._follow_layout(now)
        instances = self._read_instances(now, poll=poll, has_gpm=has_gpm)
        # A call for a wanted field can return other fields too.
        own = {field: value for field, value in values.items() if field in self._driver.fields}
        return GpuReading(
            gpu=self.gpu,
            state=DeviceState.RESET_REQUIRED if needs_reset else DeviceState.UP,
            reason=_RESET_REQUIRED if needs_reset else "",
            values={**own, **means},
            instances=instances,
            processes=self._processes,
            lacks_instances=self._lacks_instances,
        )

    def _supports_gpm(self, now: float) -> bool:
        """Return whether GPM is known to be supported."""
        if self._has_gpm is None and self._gpm_retries.is_due("support", now):
            try:
                self._has_gpm = bool(pynvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice)
            except pynvml.NVMLError as error:
                self._gpm_retries.failed("support", error, now, soon_seconds=_SOON_SECONDS)
        return bool(self._has_gpm)

    def close(self) -> None:
        """Free the resources of the driver for this GPU; call it before the shutdown of the driver."""
        for sampler in self._samplers:
            sampler.close()
        self._instances = ()

    def _down(self, state: DeviceState, reason: str) -> GpuReading:
        for sampler in self._samplers:
            sampler.begin_again()
        return GpuReading(gpu=self.gpu, state=state, reason=reason)

    def _follow_layout(self, now: float) -> None:
        """Read the whole MIG layout again, because an instance can return under its UUID with another size."""
        if now - self._layout_at < (_LAYOUT_SECONDS if self.gpu.mig_enabled else _MODE_SECONDS):
            return
        self._layout_at = now
        try:
            if not (self.gpu.mig_enabled or mig.enabled(self.handle)):
                return
            gpu, memory_mib = mig.shaped(self.handle, self.gpu)
            before = [one.found for one in self._instances]
            found, complete = (
                mig.instances(self.handle, gpu, memory_mib, before, self._note_of_mig)
                if gpu.mig_enabled
                else ([], True)
            )
        except pynvml.NVMLError as error:
            # Without an answer, the earlier instances stay, since they may be held; others may have been added.
            self._lacks_instances = self.gpu.mig_enabled
            self._note_of_mig(error)
            return
        self._lacks_instances = not complete
        switched, self.gpu = gpu.mig_enabled is not self.gpu.mig_enabled, gpu
        if switched:  # the GPU now supports other calls
            self._device, self._poller = NvmlDevice(self.handle, self._driver), self._new_poller()
            self._processes = None
            self._sampler.begin_again()
        self._adopt(found)

    def _adopt(self, found: Sequence[mig.Found]) -> None:
        """Use a new layout; unchanged instances keep their measurements."""
        before = {(one.found.instance, library.address(one.found.handle)): one for one in self._instances}
        together = Counter(new.instance.gpu_instance_id for new in found)
        instances = []
        for new in found:
            same = before.pop((new.instance, library.address(new.handle)), None)
            one = _Instance(new, self.handle, self._driver) if same is None else same
            one.has_memory = together[new.instance.gpu_instance_id] == 1
            instances.append(one)
        self._instances = tuple(instances)
        for gone in before.values():
            gone.sampler.close()

    def _read_instances(self, now: float, *, poll: bool, has_gpm: bool) -> tuple[MigReading, ...]:
        readings = []
        for one in self._instances:
            try:
                readings.append(one.read(now, poll=poll, has_gpm=has_gpm))
            except pynvml.NVMLError as error:
                # The instance was destroyed or does not answer; the next read of the layout shows which.
                self._note_of_mig(error)
                self._layout_at = -math.inf
                # It may return as another instance with its UUID, with counters from 0.
                one.sampler.begin_again()
                readings.append(MigReading(instance=one.found.instance))
        return tuple(readings)

    def _note_of_mig(self, error: pynvml.NVMLError) -> None:
        """Count an error.

        Raises:
            pynvml.NVMLError: The same error, if the GPU is lost or the driver gone.
        """
        self._driver.count(f"mig_{library.reason_of(library.code_unless_fatal(error))}")

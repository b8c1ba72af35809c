"""Reads one GPU: values, engines, MIG instances and processes."""

import ctypes
import math
import struct
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pynvml

from exporter.gpu.nvml import activity, library, mig
from exporter.gpu.nvml.activity import GpmLevel, Poller, Sampler
from exporter.gpu.nvml.fields import (
    FAST,
    LAST_ECC_ID,
    MEMORY_FIELDS,
    SLOW,
    DeviceFacts,
    FieldValue,
    Getter,
    Number,
    field_values,
    getters,
    memory,
)
from exporter.gpu.nvml.library import Driver, Handle, Retries
from exporter.model import DeviceState, Field, Gpu, GpuReading, MigReading, ProcessUse

_KIB = 1024
_DOUBLE = 0
_SLOT = struct.Struct("8xq8xII8s")
"""Timestamp, type, return code and value of an ``nvmlFieldValue_t``; its attributes take ten times as long."""
_VALUES = tuple(struct.Struct(kind) for kind in "dILQqiH")
"""Formats by ``nvmlValueType_t``."""
_SOON_SECONDS = 10.0
_NOT_SUPPORTED, _RESET_REQUIRED = map(
    library.reason_of, (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_RESET_REQUIRED)
)


class Batch:
    """The field-value array of one device, kept between samples: filling it takes longer than the call."""

    def __init__(self, items: Sequence[FieldValue]) -> None:
        self.items = tuple(items)
        self._array = (pynvml.c_nvmlFieldValue_t * len(self.items))()
        for slot, item in zip(self._array, self.items, strict=True):
            slot.fieldId, slot.scopeId = item.id, item.scope
        self._template = bytes(self._array)

    def ask(self, handle: Handle) -> list[tuple[FieldValue, int, Number]]:
        """Return (item, return code, value) of each item.

        Raises:
            pynvml.NVMLError: The call as a whole failed.
        """
        if not self.items:
            return []
        # Some drivers leave slots untouched: values of the previous sample must not count as new.
        ctypes.memmove(self._array, self._template, len(self._template))
        call = library.function("nvmlDeviceGetFieldValues")
        if call is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        code = call(handle, ctypes.c_int32(len(self.items)), ctypes.byref(self._array))
        if code != 0:
            raise pynvml.NVMLError(code)
        slots = _SLOT.iter_unpack(self._array)
        return [(item, *_answer(item, *slot)) for item, slot in zip(self.items, slots, strict=True)]


def _answer(item: FieldValue, timestamp: int, kind: int, code: int, raw: bytes) -> tuple[int, Number]:
    if code != 0:
        return code, 0
    if kind == _DOUBLE and timestamp == 0:
        # Left untouched by the driver (error counters with ECC off): a zero that was not measured.
        return pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    if item.id <= LAST_ECC_ID:
        # The driver may report the type "double" for these though the value is a whole number.
        return 0, int.from_bytes(raw, sys.byteorder)
    if kind >= len(_VALUES):
        return pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    value: Number = _VALUES[kind].unpack_from(raw)[0]
    if isinstance(value, float) and not math.isfinite(value):
        return pynvml.NVML_ERROR_NOT_SUPPORTED, 0
    return 0, value if item.convert is None else item.convert(value)


class NvmlDevice:
    """The values of one GPU from sample to sample; unsupported ones are retried only rarely.

    Args:
        handle: Handle of this GPU, in the current session of the driver.
        driver: The driver's session.
    """

    def __init__(self, handle: Handle, driver: Driver) -> None:
        self._handle = handle
        self._driver = driver
        self._getters = tuple(enumerate(getters(driver.fields)))
        self._items = field_values(driver.fields, driver.major)
        self._retries = Retries(self._note)
        self._fast: Batch | None = None
        """The batch of most samples, until one of its items fails."""
        self._slow_at = -math.inf
        self._values: dict[Field, Number] = {}
        self._nvlink: tuple[float, float] | None = None
        self.reasons: list[str] = []
        """Distinct reasons for which calls failed at the last read."""

    def read(self, now: float) -> dict[Field, Number]:
        """Return everything that this GPU reports now; empty if no call was answered.

        Raises:
            pynvml.NVMLError: The GPU is lost, or the driver as a whole is gone.
        """
        self.reasons.clear()
        answered = [self._get(key, getter, now) for key, getter in self._getters if self._retries.is_due(key, now)]
        answered.append(self._get_batch(now))
        values = dict(self._values) if any(answered) else {}
        self._add_nvlink_rate(values, self._driver.clock())
        return values

    def _note(self, reason: str) -> None:
        if reason not in self.reasons:
            self._driver.count(reason)
            self.reasons.append(reason)

    def _get(self, key: int, getter: Getter, now: float) -> bool:
        """Make one call, and return whether it was answered."""
        for field in getter.fields:
            self._values.pop(field, None)
        try:
            answer = getter.read(self._handle)
        except pynvml.NVMLError as error:
            self._retries.failed(key, error, now)
            return False
        if getter.pace:
            self._retries.put_off(key, now + getter.pace)
        pairs = zip(getter.fields, answer, strict=True)
        self._values.update({field: value for field, value in pairs if value is not None})
        return True

    def _get_batch(self, now: float) -> bool:
        """Make the batched call, with the slow items when they are due; return whether an item was answered."""
        slow = now - self._slow_at >= SLOW
        batch = self._fast
        if slow or batch is None:
            due = [item for item in self._items if self._retries.is_due(item, now)]
            batch = Batch(due if slow else [item for item in due if item.pace == FAST])
            self._slow_at, self._fast = (now, None) if slow else (self._slow_at, batch)
        for item in batch.items:
            self._values.pop(item.field, None)
        try:
            answers = batch.ask(self._handle)
        except pynvml.NVMLError as error:
            answers = [(item, library.code_of(error), 0) for item in batch.items]
        answered = False
        for item, code, value in answers:
            if code == 0:
                # Two ids of one counter: the id that this board generation does not use may report 0.
                self._values[item.field] = max(value, self._values.get(item.field, value))
                answered = True
            else:
                # In a batch, an invalid argument of one item means "not supported".
                shown = pynvml.NVML_ERROR_NOT_SUPPORTED if code == pynvml.NVML_ERROR_INVALID_ARGUMENT else code
                self._retries.failed(item, pynvml.NVMLError(shown), now)
                self._fast = None
        return answered

    def _add_nvlink_rate(self, values: dict[Field, Number], now: float) -> None:
        """Add DCGM's field, a rate despite its name: kibibytes per second divided by a thousand, both directions."""
        sent, received = values.get(Field.NVLINK_TX_BYTES_TOTAL), values.get(Field.NVLINK_RX_BYTES_TOTAL)
        if Field.NVLINK_BANDWIDTH_TOTAL not in self._driver.fields or sent is None or received is None:
            self._nvlink = None
            return
        before, self._nvlink = self._nvlink, (now, sent + received)
        if before is not None and now > before[0] and sent + received >= before[1]:
            kib = (sent + received - before[1]) / _KIB
            values[Field.NVLINK_BANDWIDTH_TOTAL] = round(kib / (now - before[0]) / 1000)


_PROCESS_SECONDS = 1.9
"""A little under two, so that the jitter of samples a second apart does not make it three; at most 5 (the ring)."""
_LAYOUT_SECONDS = 4.9
_MEMORY_RETRY_SECONDS = 600.0
_MIB = 2**20


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

    def _memory(self, now: float) -> dict[Field, Number]:
        if not self.has_memory or now < self._no_memory_before:
            return {}
        answer = library.optional(memory, self.found.handle)
        if answer is None:
            self._no_memory_before = now + _MEMORY_RETRY_SECONDS
            return {}
        pairs = zip(MEMORY_FIELDS, answer, strict=True)
        return {field: value for field, value in pairs if value is not None and field in self._fields}


def without_means(reading: GpuReading) -> GpuReading:
    """Return a reading during which the MIG layout changed, without the GPM values of the instances."""
    instances = tuple(
        replace(one, values={field: value for field, value in one.values.items() if field not in activity.METRICS})
        for one in reading.instances
    )
    return replace(reading, instances=instances)


class Unit:
    """One GPU from attaching to losing it; never used after the driver was shut down.

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
        """The GPU with the facts and the MIG shape that are known so far."""
        self._device = NvmlDevice(handle, driver)
        self._has_gpm: bool | None = None
        """Whether it supports GPM; ``None`` until the driver has answered."""
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
        """Restart the processes: the driver's samples have wall-clock timestamps, and none would be new."""
        self._poller = self._new_poller()

    def layout_changed(self) -> None:
        """Read the MIG layout again at the next sample, and drop means that include earlier time.

        An instance that was destroyed and created again keeps its UUID, but its counters restart: a difference between
        the two may be any value.
        """
        self._layout_at = -math.inf
        for one in self._instances:
            one.sampler.begin_again()

    def sample(self, now: float) -> GpuReading:
        """Return everything that the GPU reports now, and its state.

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
            reason = library.reason_of(pynvml.NVML_ERROR_GPU_IS_LOST)
            self._driver.count(reason)
            return self._down(DeviceState.LOST, reason)

    def _sample(self, now: float) -> GpuReading:
        values, reasons = self._device.read(now), self._device.reasons
        needs_reset = _RESET_REQUIRED in reasons
        if not values:
            state = DeviceState.RESET_REQUIRED if needs_reset else DeviceState.FAILED
            return self._down(state, _RESET_REQUIRED if needs_reset else (reasons or [_NOT_SUPPORTED])[0])
        self.gpu = self._facts.complete(self.gpu, now)
        total = int(values.get(Field.FB_TOTAL, 0)) * _MIB
        if total and total != self.gpu.memory_total_bytes:
            self.gpu = replace(self.gpu, memory_total_bytes=total)
        has_gpm = self._supports_gpm(now)
        means = self._sampler.sample(now) if has_gpm else {}
        poll = now - self._polled_at >= _PROCESS_SECONDS
        if poll:
            used = values.get(Field.FB_USED, 0)
            self._processes = None if self._poller is None else self._poller.poll(now, used)
            # The next samples cover the time since this answer, not since the start of this sample.
            self._polled_at = self._driver.clock()
        self._follow_layout(now)
        instances = self._read_instances(now, poll=poll, has_gpm=has_gpm)
        # A call returns other values with a wanted field.
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
        """Free the driver's resources for this GPU; call it before the driver is shut down."""
        for sampler in self._samplers:
            sampler.close()
        self._instances = ()

    def _down(self, state: DeviceState, reason: str) -> GpuReading:
        for sampler in self._samplers:
            sampler.begin_again()
        return GpuReading(gpu=self.gpu, state=state, reason=reason)

    def _follow_layout(self, now: float) -> None:
        """Read the whole MIG layout again: an instance may return under its UUID with another size."""
        if now - self._layout_at < _LAYOUT_SECONDS:
            return
        self._layout_at = now
        try:
            if not (self.gpu.mig_enabled or mig.enabled(self.handle)):
                return
            shape = mig.shape(self.handle)
            before = [one.found for one in self._instances]
            found, complete = (
                mig.instances(self.handle, self.gpu.uuid, shape, before, self._note_of_mig)
                if shape.enabled
                else ([], True)
            )
        except pynvml.NVMLError as error:
            # No answer means no change: the earlier instances are still held. But there may be others now.
            self._lacks_instances = self.gpu.mig_enabled
            self._note_of_mig(error)
            return
        self._lacks_instances = not complete
        self._adopt_shape(shape)
        self._adopt(found)

    def _adopt_shape(self, shape: mig.Shape) -> None:
        switched = shape.enabled is not self.gpu.mig_enabled
        self.gpu = replace(
            self.gpu,
            mig_enabled=shape.enabled,
            compute_slices=shape.compute_slices,
            memory_slices=shape.memory_slices,
        )
        if switched:  # the GPU now supports other calls
            self._device, self._poller = NvmlDevice(self.handle, self._driver), self._new_poller()
            self._processes = None
            self._sampler.begin_again()

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
                # It was destroyed, or does not answer now: the next reading of the layout shows which.
                self._note_of_mig(error)
                self._layout_at = -math.inf
                # It may return as another instance under its UUID, with counters from 0.
                one.sampler.begin_again()
                readings.append(MigReading(instance=one.found.instance))
        return tuple(readings)

    def _note_of_mig(self, error: pynvml.NVMLError) -> None:
        """Count an error.

        Raises:
            pynvml.NVMLError: The same error, if the GPU is lost or the driver gone.
        """
        self._driver.count(f"mig_{library.reason_of(library.code_unless_fatal(error))}")

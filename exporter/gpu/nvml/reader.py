"""Reads one GPU: values, engines, MIG instances and processes."""

import ctypes
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from exporter.gpu.nvml import activity, library, mig
from exporter.gpu.nvml.activity import Poller
from exporter.gpu.nvml.fields import LAST_ECC_ID, MEMORY_FIELDS, DeviceFacts, FieldValue, Getter, Number, Pace, memory
from exporter.gpu.nvml.library import NvmlCode
from exporter.model import DeviceState, Field, Gpu, GpuReading, MigReading, ProcessUse

_SLOW_SECONDS = 10.0
_KEPT_SECONDS = {Pace.RARE: 60.0, Pace.STATIC: math.inf}
_RETRY_SECONDS = 600.0
_KIB = 1024
_DOUBLE = 0
_SLOT = struct.Struct("8xq8xII8s")
"""Timestamp, type, return code and value of an ``nvmlFieldValue_t``; its attributes take ten times as long."""
_VALUES = tuple(struct.Struct(kind) for kind in "dILQqiH")
"""Formats by ``nvmlValueType_t``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The values to read from every GPU of this driver."""

    fields: frozenset[Field]
    getters: tuple[Getter, ...]
    items: tuple[FieldValue, ...]
    record: type[ctypes.Structure]
    """Layout of a process record in the loaded library."""
    oldest_seconds: float
    """Longest time over which a mean is still reported."""
    count: Callable[[str], None]
    """Called with the reason of each error."""
    took: Callable[[], float]
    """Seconds since the start of the current sample: the driver may have been silent for any part of it."""


@dataclass(slots=True)
class Outcome:
    """Result of one read of a device, and its return codes."""

    values: dict[Field, Number]
    codes: list[int]
    """Distinct codes of failed calls that were expected to succeed."""
    silent: bool = True
    """Whether no call was answered; ``values`` may still contain earlier values."""


class Batch:
    """The field-value array of one device, kept between samples: filling it takes longer than the call."""

    def __init__(self, items: Sequence[FieldValue]) -> None:
        self.items = tuple(items)
        self._array = (pynvml.c_nvmlFieldValue_t * len(self.items))()
        for slot, item in zip(self._array, self.items, strict=True):
            slot.fieldId, slot.scopeId = item.id, item.scope
        self._template = bytes(self._array)

    def ask(self, handle: Any) -> list[tuple[FieldValue, int, Number]]:  # noqa: ANN401 - a handle is whatever pynvml gave
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
            raise pynvml.NVMLError(NvmlCode.FUNCTION_NOT_FOUND)
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
        return NvmlCode.NOT_SUPPORTED, 0
    if item.id <= LAST_ECC_ID:
        # The driver may report the type "double" for these though the value is a whole number.
        return 0, int.from_bytes(raw, sys.byteorder)
    if kind >= len(_VALUES):
        return NvmlCode.NOT_SUPPORTED, 0
    value: Number = _VALUES[kind].unpack_from(raw)[0]
    if isinstance(value, float) and not math.isfinite(value):
        return NvmlCode.NOT_SUPPORTED, 0
    return 0, value if item.convert is None else item.convert(value)


class NvmlDevice:
    """The values of one GPU from sample to sample; unsupported ones are retried only rarely.

    Args:
        handle: Handle of this GPU, in the current session of the driver.
        plan: The values to read.
    """

    def __init__(self, handle: Any, plan: ReadPlan) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.handle = handle
        self._plan = plan
        self._left_out: dict[object, float] = {}
        self._batches: dict[bool, Batch] = {}
        self._static: dict[Field, Number] = {}
        self._kept_until: dict[int, float] = {}
        """Time of the next call of each getter of a constant or rarely read value."""
        self._slow: dict[Field, Number] = {}
        self._slow_at = -math.inf
        self._nvlink: tuple[float, float] | None = None

    def read(self, now: float) -> Outcome:
        """Return everything that this GPU reports now; stop at the first sign that it is lost.

        Raises:
            pynvml.NVMLError: The driver as a whole is gone.
        """
        slow = not 0 <= now - self._slow_at < _SLOW_SECONDS
        self._retry_left_out(now)
        outcome = Outcome(values={}, codes=[])
        by_pace: dict[Pace, dict[Field, Number]] = {pace: {} for pace in Pace}
        for key, getter in enumerate(self._plan.getters):
            if self._is_due(key, getter.pace, now, slow=slow):
                self._get(key, getter, by_pace[getter.pace], outcome.codes, now)
            if NvmlCode.GPU_IS_LOST in outcome.codes:
                return outcome
        self._get_batch(by_pace, outcome.codes, now, slow=slow)
        counted_at = now + self._plan.took()
        self._static |= by_pace[Pace.STATIC] | by_pace[Pace.RARE]
        if slow:
            self._slow, self._slow_at = by_pace[Pace.SLOW], now
        outcome.values = {**self._static, **self._slow, **by_pace[Pace.FAST]}
        outcome.silent = not any(by_pace.values())
        self._add_nvlink_rate(outcome.values, counted_at)
        return outcome

    def _is_due(self, key: int, pace: Pace, now: float, *, slow: bool) -> bool:
        """Return whether a getter must be called now; one of a constant fact, until it is answered."""
        if pace in _KEPT_SECONDS:
            return not 0 < self._kept_until.get(key, now) - now <= _KEPT_SECONDS[pace]
        return slow or pace is Pace.FAST

    def _get(self, key: int, getter: Getter, into: dict[Field, Number], codes: list[int], now: float) -> None:
        if key in self._left_out:
            return
        try:
            answer = getter.read(self.handle)
        except pynvml.NVMLError as error:
            self._failed(key, library.code_of(error), codes, now)
            for field in getter.fields:
                self._static.pop(field, None)
            return
        if getter.pace in _KEPT_SECONDS:
            self._kept_until[key] = now + _KEPT_SECONDS[getter.pace]
        pairs = zip(getter.fields, answer, strict=True)
        into.update({field: value for field, value in pairs if value is not None})

    def _get_batch(self, by_pace: dict[Pace, dict[Field, Number]], codes: list[int], now: float, *, slow: bool) -> None:
        batch = self._batches.get(slow)
        if batch is None:
            batch = self._batches[slow] = Batch(
                [
                    item
                    for item in self._plan.items
                    if item.key not in self._left_out and (slow or item.pace is Pace.FAST)
                ]
            )
        try:
            answers = batch.ask(self.handle)
        except pynvml.NVMLError as error:
            code = library.code_of(error)
            for item in batch.items if code in library.UNAVAILABLE else ():
                self._leave_out(item.key, code, now)
            self._note(code, codes)
            return
        for item, code, value in answers:
            if code == 0:
                # Two ids of one counter: the id that this board generation does not use may report 0.
                into = by_pace[item.pace]
                into[item.field] = max(value, into.get(item.field, value))
            else:
                # In a batch, an invalid argument of one item means "not supported".
                invalid = code == NvmlCode.INVALID_ARGUMENT
                self._failed(item.key, NvmlCode.NOT_SUPPORTED if invalid else code, codes, now)

    def _failed(self, key: object, code: int, codes: list[int], now: float) -> None:
        if code in library.UNAVAILABLE:
            self._leave_out(key, code, now)
            if code == NvmlCode.NO_PERMISSION:
                self._plan.count(library.reason_of(code))
            return
        self._note(code, codes)

    def _note(self, code: int, codes: list[int]) -> None:
        if code in library.DRIVER_GONE:
            raise pynvml.NVMLError(code)
        if code not in codes:
            self._plan.count(library.reason_of(code))
            codes.append(code)

    def _leave_out(self, key: object, code: int, now: float) -> None:
        # A function missing in the library stays missing; other errors may end (ECC enabled, MIG disabled).
        self._left_out[key] = math.inf if code == NvmlCode.FUNCTION_NOT_FOUND else now + _RETRY_SECONDS
        self._batches.clear()

    def _retry_left_out(self, now: float) -> None:
        due = [key for key, at in self._left_out.items() if now >= at]
        for key in due:
            del self._left_out[key]
        if due:
            self._batches.clear()

    def _add_nvlink_rate(self, values: dict[Field, Number], now: float) -> None:
        """Add DCGM's field, a rate despite its name: kibibytes per second divided by a thousand, both directions."""
        sent, received = values.get(Field.NVLINK_TX_BYTES_TOTAL), values.get(Field.NVLINK_RX_BYTES_TOTAL)
        if Field.NVLINK_BANDWIDTH_TOTAL not in self._plan.fields or sent is None or received is None:
            self._nvlink = None
            return
        before, self._nvlink = self._nvlink, (now, sent + received)
        if before is not None and now > before[0] and sent + received >= before[1]:
            kib = (sent + received - before[1]) / _KIB
            values[Field.NVLINK_BANDWIDTH_TOTAL] = round(kib / (now - before[0]) / 1000)


_PROCESS_SECONDS = 1.9
"""A little under two, so that the jitter of samples a second apart does not make it three; at most 5 (the ring)."""
_LAYOUT_SECONDS = 4.9
_MIB = 2**20


class _Instance:
    """One MIG instance and its state between samples."""

    def __init__(self, found: mig.Found, parent: Any, wanted: ReadPlan, has_gpm: Callable[[float], bool]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.found = found
        self.processes: tuple[ProcessUse, ...] | None = None
        self.has_memory = True
        """Whether its GPU instance has no other compute instance, which would share the memory."""
        self._fields = wanted.fields
        self._no_memory_before = -math.inf
        self.poller = Poller(found.handle, utilisation=False, record=wanted.record, count=wanted.count)
        level = activity.GpmLevel.GPU_INSTANCE if found.fills_its_gpu_instance else activity.GpmLevel.COMPUTE_INSTANCE
        fields = activity.fields_at(level, wanted.fields)
        gpu_instance_id = found.instance.gpu_instance_id

        def take(sample: Any) -> None:  # noqa: ANN401 - a GPM sample is whatever pynvml gave
            if level is activity.GpmLevel.GPU_INSTANCE:
                pynvml.nvmlGpmMigSampleGet(parent, gpu_instance_id, sample)
            else:
                pynvml.nvmlGpmSampleGet(found.handle, sample)

        self.sampler = activity.Sampler(
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
        answer = library.optional(memory, self.found.handle)
        if answer is None:
            self._no_memory_before = now + _RETRY_SECONDS
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
        wanted: The values to read.
    """

    def __init__(self, handle: Any, gpu: Gpu, wanted: ReadPlan) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.handle = handle
        self._facts = DeviceFacts(handle, wanted.count)
        self.gpu = self._facts.complete(gpu, -math.inf)
        """The GPU with the facts and the MIG shape that are known so far."""
        self._wanted = wanted
        self._device = NvmlDevice(handle, wanted)
        self._gpm = activity.Support(handle, wanted.count)
        self._sampler = activity.Sampler(
            lambda sample: pynvml.nvmlGpmSampleGet(handle, sample),
            activity.fields_at(activity.GpmLevel.GPU, wanted.fields),
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

    def _new_poller(self) -> Poller | None:
        """Create a poller for processes; on a partitioned GPU, only the instances list processes."""
        if self.gpu.mig_enabled:
            return None
        return Poller(self.handle, utilisation=True, record=self._wanted.record, count=self._wanted.count)

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
        outcome = self._device.read(now)
        if NvmlCode.GPU_IS_LOST in outcome.codes:
            return self._down(DeviceState.LOST, NvmlCode.GPU_IS_LOST)
        needs_reset = NvmlCode.RESET_REQUIRED in outcome.codes
        if outcome.silent:
            code = outcome.codes[0] if outcome.codes else NvmlCode.NOT_SUPPORTED
            state = DeviceState.RESET_REQUIRED if needs_reset else DeviceState.FAILED
            return self._down(state, NvmlCode.RESET_REQUIRED if needs_reset else code)
        try:
            self.gpu = self._facts.complete(self.gpu, now)
            self._note_memory(outcome.values)
            # A call returns other values with a wanted field.
            own = {field: value for field, value in outcome.values.items() if field in self._wanted.fields}
            values = {**own, **self._sampler.sample(now)}
            poll = not 0 <= now - self._polled_at < _PROCESS_SECONDS
            if poll:
                self._polled_at = now
                used = outcome.values.get(Field.FB_USED, 0)
                self._processes = None if self._poller is None else self._poller.poll(now, used)
                # The next samples cover the time since this answer, not since the start of this sample.
                self._polled_at = now + self._wanted.took()
            self._follow_layout(now)
            instances = self._read_instances(now, poll=poll)
        except pynvml.NVMLError as error:
            if library.code_of(error) != NvmlCode.GPU_IS_LOST:
                raise
            self._wanted.count(library.reason_of(NvmlCode.GPU_IS_LOST))
            return self._down(DeviceState.LOST, NvmlCode.GPU_IS_LOST)
        return GpuReading(
            gpu=self.gpu,
            state=DeviceState.RESET_REQUIRED if needs_reset else DeviceState.UP,
            reason=library.reason_of(NvmlCode.RESET_REQUIRED) if needs_reset else "",
            values=values,
            instances=instances,
            processes=self._processes,
            lacks_instances=self._lacks_instances,
        )

    def close(self) -> None:
        """Free the driver's resources for this GPU; call it before the driver is shut down."""
        for one in (self._sampler, *(one.sampler for one in self._instances)):
            one.close()
        self._instances = ()

    def _note_memory(self, values: Mapping[Field, int | float]) -> None:
        total = int(values.get(Field.FB_TOTAL, 0)) * _MIB
        if total and total != self.gpu.memory_total_bytes:
            self.gpu = replace(self.gpu, memory_total_bytes=total)

    def _down(self, state: DeviceState, code: int) -> GpuReading:
        for sampler in (self._sampler, *(one.sampler for one in self._instances)):
            sampler.begin_again()
        return GpuReading(gpu=self.gpu, state=state, reason=library.reason_of(code))

    def _follow_layout(self, now: float) -> None:
        """Read the whole MIG layout again: an instance may return under its UUID with another size."""
        if 0 <= now - self._layout_at < _LAYOUT_SECONDS:
            return
        self._layout_at = now
        try:
            if not (self.gpu.mig_enabled or mig.enabled(self.handle)):
                return
            shape = mig.shape(self.handle)
            layout = mig.instances(self.handle, self.gpu.uuid, shape) if shape.enabled else mig.MigLayout(())
        except pynvml.NVMLError as error:
            # No answer means no change: the earlier instances are still held. But there may be others now.
            self._lacks_instances = self.gpu.mig_enabled
            self._note_of_mig(error)
            return
        for failed in layout.failed:
            self._note_of_mig(failed.error)
        self._lacks_instances = bool(layout.failed)
        self._adopt_shape(shape)
        self._adopt((*layout.found, *self._kept(layout)))

    def _kept(self, layout: mig.MigLayout) -> Iterator[mig.Found]:
        """Yield the instances that the driver fails to describe and that are not known to have been replaced."""
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
            self._device, self._poller = NvmlDevice(self.handle, self._wanted), self._new_poller()
            self._processes = None
            self._sampler.begin_again()

    def _adopt(self, found: tuple[mig.Found, ...]) -> None:
        """Use a new layout; unchanged instances keep their measurements."""
        before = {(one.found.instance, library.address(one.found.handle)): one for one in self._instances}
        instances = []
        for new in found:
            same = before.pop((new.instance, library.address(new.handle)), None)
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
                # It was destroyed, or does not answer now: the next reading of the layout shows which.
                self._note_of_mig(error)
                self._layout_at = -math.inf
                # It may return as another instance under its UUID, with counters from 0.
                one.sampler.begin_again()
                readings.append(MigReading(instance=one.found.instance))
        return tuple(readings)

    def _note_of_mig(self, error: pynvml.NVMLError) -> None:
        self._wanted.count(f"mig_{library.reason_of(library.code_unless_fatal(error))}")

"""One attached GPU: its numbers at each sample, read with as few driver calls as possible."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from exporter.model import Field
from exporter.sources import driver, nvml_fields
from exporter.sources.nvml_fields import FieldValue, Getter, Number, Pace

_SLOW_SECONDS = 10.0
_RETRY_SECONDS = 600.0
_KIB = 1024
_DOUBLE = 0
_VALUE_NAMES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is read of every GPU."""

    getters: tuple[Getter, ...]
    items: tuple[FieldValue, ...]
    nvlink_rate: bool
    """Whether ``Field.NVLINK_BANDWIDTH_TOTAL`` is wanted, which is computed."""


@dataclass(slots=True)
class Outcome:
    """What one read of a device gave, and which return codes it met."""

    values: dict[Field, Number]
    codes: list[int]
    """Codes of calls that failed and were expected to work; each once."""
    silent: bool = True
    """Whether nothing at all was answered now; ``values`` may still carry what was read before."""


class Batch:
    """The field-value array of one device, kept between samples: filling it anew costs more than the call."""

    def __init__(self, items: Sequence[FieldValue]) -> None:
        self.items = tuple(items)
        self._array = (pynvml.c_nvmlFieldValue_t * len(self.items))()
        for slot, item in zip(self._array, self.items, strict=True):
            slot.fieldId, slot.scopeId = item.id, item.scope
        self._template = bytes(self._array)

    def ask(self, handle: Any) -> list[tuple[FieldValue, int, Number]]:  # noqa: ANN401 - a handle is whatever pynvml gave
        """Return (item, return code, value) of each item.

        Raises:
            pynvml.NVMLError: the call as a whole failed.
        """
        if not self.items:
            return []
        # Some drivers leave slots untouched: what the previous sample wrote must not pass for new.
        ctypes.memmove(self._array, self._template, len(self._template))
        call = driver.function("nvmlDeviceGetFieldValues")
        if call is None:
            raise pynvml.NVMLError(driver.FUNCTION_NOT_FOUND)
        code = call(handle, ctypes.c_int32(len(self.items)), ctypes.byref(self._array))
        if code != 0:
            raise pynvml.NVMLError(code)
        return [(item, *_answer(item, slot)) for item, slot in zip(self.items, self._array, strict=True)]


def _answer(item: FieldValue, slot: Any) -> tuple[int, Number]:  # noqa: ANN401 - a ctypes structure
    code = int(slot.nvmlReturn)
    if code != 0:
        return code, 0
    kind = slot.valueType
    if kind == _DOUBLE and slot.timestamp == 0:
        # Untouched by the driver (known of error counters where ECC is off): a zero that nobody measured.
        return driver.NOT_SUPPORTED, 0
    if item.id <= nvml_fields.LAST_ECC_ID:
        # The type of these may be left at "double" though the value is a whole number.
        return 0, int(slot.value.ullVal)
    if kind >= len(_VALUE_NAMES):
        return driver.NOT_SUPPORTED, 0
    value: Number = getattr(slot.value, _VALUE_NAMES[kind])
    if isinstance(value, float) and not math.isfinite(value):
        return driver.NOT_SUPPORTED, 0
    return 0, value if item.convert is None else item.convert(value)


class Device:
    """The numbers of one GPU from sample to sample; what it does not support is asked again only rarely.

    Args:
        handle: Of this GPU, in the present generation of the driver.
        plan: What to read.
        count: Called with the reason of everything that goes wrong.
        took: Seconds since the ``now`` of ``read``, for the driver may be silent for any part of it.
    """

    def __init__(self, handle: Any, plan: Plan, count: Callable[[str], None], took: Callable[[], float]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self.handle = handle
        self._plan = plan
        self._count = count
        self._took = took
        self._left_out: dict[object, float] = {}
        self._batches: dict[bool, Batch] = {}
        self._static: dict[Field, Number] = {}
        self._static_answered: set[int] = set()
        self._slow: dict[Field, Number] = {}
        self._slow_at = -math.inf
        self._nvlink: tuple[float, float] | None = None

    def read(self, now: float) -> Outcome:
        """Return everything that this GPU tells now; stops at the first sign that it is lost.

        Raises:
            pynvml.NVMLError: the driver as a whole is gone.
        """
        slow = not 0 <= now - self._slow_at < _SLOW_SECONDS
        self._retry_left_out(now)
        outcome = Outcome(values={}, codes=[])
        by_pace: dict[Pace, dict[Field, Number]] = {pace: {} for pace in Pace}
        for key, getter in enumerate(self._plan.getters):
            if self._is_due(key, getter.pace, slow=slow):
                self._get(key, getter, by_pace[getter.pace], outcome.codes, now)
            if driver.GPU_IS_LOST in outcome.codes:
                return outcome
        self._get_batch(by_pace, outcome.codes, now, slow=slow)
        counted_at = now + self._took()
        self._static.update(by_pace[Pace.STATIC])
        if slow:
            self._slow, self._slow_at = by_pace[Pace.SLOW], now
        outcome.values = {**self._static, **self._slow, **by_pace[Pace.FAST]}
        outcome.silent = not any(by_pace.values())
        self._add_nvlink_rate(outcome.values, counted_at)
        return outcome

    def _is_due(self, key: int, pace: Pace, *, slow: bool) -> bool:
        """Return whether a getter is to be called now; a fact that does not change, until it is answered."""
        return key not in self._static_answered if pace is Pace.STATIC else slow or pace is Pace.FAST

    def _get(self, key: int, getter: Getter, into: dict[Field, Number], codes: list[int], now: float) -> None:
        if key in self._left_out:
            return
        try:
            answer = getter.read(self.handle)
        except pynvml.NVMLError as error:
            self._failed(key, driver.code_of(error), codes, now)
            return
        if getter.pace is Pace.STATIC:
            self._static_answered.add(key)
        told = zip(getter.fields, answer, strict=True)
        into.update({field: value for field, value in told if value is not None})

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
            code = driver.code_of(error)
            for item in batch.items if code in driver.UNAVAILABLE else ():
                self._leave_out(item.key, code, now)
            self._note(code, codes)
            return
        for item, code, value in answers:
            if code == 0:
                # Two ids of one counter: the one that this generation of boards does not count by may say 0.
                into = by_pace[item.pace]
                into[item.field] = max(value, into.get(item.field, value))
            else:
                # Items speak for themselves: an argument that one of them does not take is "not supported".
                invalid = code == driver.INVALID_ARGUMENT
                self._failed(item.key, driver.NOT_SUPPORTED if invalid else code, codes, now)

    def _failed(self, key: object, code: int, codes: list[int], now: float) -> None:
        if code in driver.UNAVAILABLE:
            self._leave_out(key, code, now)
            if code == driver.NO_PERMISSION:
                self._count(driver.reason_of(code))
            return
        self._note(code, codes)

    def _note(self, code: int, codes: list[int]) -> None:
        if code in driver.DRIVER_GONE:
            raise pynvml.NVMLError(code)
        if code not in codes:
            self._count(driver.reason_of(code))
            codes.append(code)

    def _leave_out(self, key: object, code: int, now: float) -> None:
        # A function that the library lacks cannot come; anything else may (ECC switched on, MIG switched off).
        self._left_out[key] = math.inf if code == driver.FUNCTION_NOT_FOUND else now + _RETRY_SECONDS
        self._batches.clear()

    def _retry_left_out(self, now: float) -> None:
        due = [key for key, at in self._left_out.items() if now >= at]
        for key in due:
            del self._left_out[key]
        if due:
            self._batches.clear()

    def _add_nvlink_rate(self, values: dict[Field, Number], now: float) -> None:
        """DCGM's field is a rate though its name says total: kibibytes per second over a thousand, of both ways."""
        sent, received = values.get(Field.NVLINK_TX_BYTES_TOTAL), values.get(Field.NVLINK_RX_BYTES_TOTAL)
        if not self._plan.nvlink_rate or sent is None or received is None:
            self._nvlink = None
            return
        before, self._nvlink = self._nvlink, (now, sent + received)
        if before is not None and now > before[0] and sent + received >= before[1]:
            kib = (sent + received - before[1]) / _KIB
            values[Field.NVLINK_BANDWIDTH_TOTAL] = round(kib / (now - before[0]) / 1000)

"""Reads all GPUs of a node through NVML, the state of GPUs that do not answer, and the driver's events."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pynvml

from exporter.errors import SourceError
from exporter.gpu.nvml import activity, library
from exporter.gpu.nvml.fields import field_values, getters, identity_of
from exporter.gpu.nvml.library import NvmlCode
from exporter.gpu.nvml.reader import ReadPlan, Unit, without_means
from exporter.model import DeviceState, Field, Gpu, GpuReading, Reading, XidEvent

NAME = "nvml"
_FAILURES_BEFORE_ATTACHING_AGAIN = 3
_SET_BACK_SECONDS = 0.5
"""Smaller steps back are slewing of the clock, or the time between two readings of clocks."""
_NOT_THERE = frozenset({NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND, NvmlCode.GPU_NOT_FOUND})


_XID = 0x8
_MIG_CHANGE = 0x100
_WAIT_MILLISECONDS = 500
_PAUSE_SECONDS = 0.05
_EVENTS_RETRY_SECONDS = 10.0
_EVENTS_UNAVAILABLE_RETRY_SECONDS = 600.0
_JOIN_SECONDS = 5.0
_NO_INSTANCE = 0xFFFFFFFF
"""Id of a GPU instance or compute instance in an event of the whole GPU or the whole GPU instance."""
_LIMIT = 4096
_Item = TypeVar("_Item")


class EventWatch:
    """Owns one event set from start to end: operations on a set are not thread-safe.

    Args:
        handles: Handles of the GPUs to watch, by UUID.
        monotonic: Clock in seconds for retries of GPUs that could not be registered.
    """

    def __init__(self, handles: Mapping[str, Any], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._handles = dict(handles)
        self._monotonic = monotonic
        self._xids: deque[XidEvent] = deque(maxlen=_LIMIT)
        self._changed: deque[str] = deque(maxlen=_LIMIT)
        self._errors: deque[str] = deque(maxlen=_LIMIT)
        self._stopping = False
        self._renewed = threading.Event()
        """Set when the thread's GPUs are out of date, and to wake it."""
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)

    def start(self) -> None:
        """Start waiting; returns at once."""
        self._thread.start()

    def renew(self, handles: Mapping[str, Any]) -> None:
        """Watch other GPUs from now on; returns at once, the thread switches by itself."""
        self._handles = dict(handles)
        self._renewed.set()

    def close(self) -> None:
        """Stop waiting; call it before the driver is shut down."""
        self._stopping = True
        self._renewed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def drain(self) -> tuple[list[XidEvent], list[str], list[str]]:
        """Return Xids, UUIDs of GPUs with a new MIG layout, and reasons of errors since the last call."""
        return _emptied(self._xids), _emptied(self._changed), _emptied(self._errors)

    def _run(self) -> None:
        while not self._stopping:
            self._renewed.clear()
            pause_seconds = _EVENTS_RETRY_SECONDS
            try:
                if not self._watch():
                    pause_seconds = _EVENTS_UNAVAILABLE_RETRY_SECONDS
            except pynvml.NVMLError as error:
                # A lost GPU makes every wait fail at once: register without it.
                self._errors.append(f"events_{library.reason_of(library.code_of(error))}")
            if not self._stopping:
                self._renewed.wait(pause_seconds)

    def _watch(self) -> bool:
        """Wait on one set until it is out of date; return False if there is nothing to wait for, now or soon."""
        try:
            event_set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            self._errors.append("events_unavailable")
            return library.code_of(error) not in library.UNAVAILABLE
        try:
            uuids, left_out = self._register(event_set, self._handles)
            retry_at = self._monotonic() + _EVENTS_RETRY_SECONDS
            # Both: the thread may have consumed the wake-up of a close at its own start.
            while uuids and not (self._stopping or self._renewed.is_set()):
                self._wait(event_set, uuids)
                if left_out and self._monotonic() >= retry_at:
                    # Into the same set: with a second one, events of the other GPUs would be lost or duplicated.
                    added, left_out = self._register(event_set, left_out)
                    uuids.update(added)
                    retry_at = self._monotonic() + _EVENTS_RETRY_SECONDS
        finally:
            self._free(event_set)
        return bool(uuids or left_out)

    def _register(self, event_set: Any, handles: Mapping[str, Any]) -> tuple[dict[int, str], dict[str, Any]]:  # noqa: ANN401 - handles are whatever pynvml gave
        """Return the UUIDs of the GPUs that are watched now, by the number of their handle, and those to retry."""
        uuids, left_out = {}, {}
        for uuid, handle in handles.items():
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, self._mask(handle), event_set)
            except pynvml.NVMLError as error:
                self._errors.append("events_unavailable")
                if library.code_of(error) not in library.UNAVAILABLE:
                    left_out[uuid] = handle
                continue
            uuids[library.address(handle)] = uuid
        return uuids, left_out

    def _mask(self, handle: Any) -> int:  # noqa: ANN401 - a handle is whatever pynvml gave
        """Return the types of events that a GPU accepts for registration.

        Raises:
            pynvml.NVMLError: It reports no Xids, or not now.
        """
        mask = int(pynvml.nvmlDeviceGetSupportedEventTypes(handle)) & (_XID | _MIG_CHANGE)
        if not mask & _XID:
            raise pynvml.NVMLError(NvmlCode.NOT_SUPPORTED)
        try:
            self._try_mask(handle, mask)
        except pynvml.NVMLError:
            if mask == _XID:
                raise
            # Some GPUs list the MIG event and then refuse it.
            mask = _XID
            self._try_mask(handle, mask)
        return mask

    def _try_mask(self, handle: Any, mask: int) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        """Register a GPU in a separate set: by NVML's manual, a set is unusable after an unknown error."""
        event_set = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, mask, event_set)
        finally:
            self._free(event_set)

    def _free(self, event_set: Any) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        try:
            pynvml.nvmlEventSetFree(event_set)
        except pynvml.NVMLError:
            self._errors.append("events_not_freed")

    def _wait(self, event_set: Any, uuids: Mapping[int, str]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        began = self._monotonic()
        try:
            data = pynvml.nvmlEventSetWait_v2(event_set, _WAIT_MILLISECONDS)
        except pynvml.NVMLError as error:
            if library.code_of(error) != NvmlCode.TIMEOUT:
                raise
            # A driver that returns "timeout" without waiting must not cause a busy loop.
            if self._monotonic() - began < _PAUSE_SECONDS:
                self._renewed.wait(_PAUSE_SECONDS)
            return
        uuid = uuids.get(library.address(data.device))
        if data.eventType == _MIG_CHANGE:
            self._changed.extend([uuid] if uuid else uuids.values())
        elif data.eventType == _XID and uuid is not None:
            event = XidEvent(
                uuid=uuid,
                xid=int(data.eventData),
                at_seconds=0.0,
                gpu_instance_id=_instance(data.gpuInstanceId),
                compute_instance_id=_instance(data.computeInstanceId),
            )
            self._xids.append(event)
        else:
            self._errors.append("events_unknown_device" if uuid is None else "events_unknown_type")


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else int(number)


def _emptied(queue: deque[_Item]) -> list[_Item]:
    return [queue.popleft() for _ in range(len(queue))]


@dataclass(slots=True)
class _Down:
    """A known GPU that is not attached."""

    state: DeviceState
    reason: str
    look_at: float


class NvmlSource:
    """Owns the driver library of this process; open, sample repeatedly, close; may be opened again.

    Args:
        fields: Fields to read; those that NVML lacks are absent. A GPU that answers none of them counts as down.
        interval_seconds: Planned time between samples.
        retry_seconds: Time after which a GPU that is down is tried again.
        left_out: Indexes of GPUs that hang: no call is made for them.
        note_asked: Called with the index of a GPU before its calls, and with ``None`` after them.
        monotonic: Clock that times the samples, in seconds.
        steady: Seconds of the monotonic clock, for waits; ``None``: the time passed to ``sample``.
    """

    name = NAME
    waits_seconds = (1.0, 10.0)

    def __init__(
        self,
        fields: frozenset[Field],
        *,
        interval_seconds: float = 1.0,
        retry_seconds: float = 10.0,
        left_out: frozenset[int] = frozenset(),
        note_asked: Callable[[int | None], None] = lambda _index: None,
        monotonic: Callable[[], float] = time.monotonic,
        steady: Callable[[], float] | None = None,
    ) -> None:
        self.announce: Callable[[], None] = lambda: None
        """Called before the driver is reopened within a sample, which may take seconds for each GPU."""
        self._fields = fields
        self._oldest_seconds = max(activity.OLDEST_SECONDS, 2 * interval_seconds)
        self._retry_seconds = retry_seconds
        self._left_out = left_out
        self._note_asked = note_asked
        self._monotonic = monotonic
        self._steady = steady
        self._sampled_at: tuple[float, float] | None = None
        """Unix time and ``steady`` at the start of the previous sample, or of the current one."""
        self._errors: Counter[str] = Counter()
        self._known: dict[str, Gpu] = {}
        self._units: dict[str, Unit] = {}
        self._down: dict[str, _Down] = {}
        self._nameless: dict[int, float] = {}
        """Time of the next attempt by index, for GPUs that did not report their UUID."""
        self._failures: Counter[str] = Counter()
        self._events: EventWatch | None = None
        self._xids: list[XidEvent] = []
        """Xid events for the next reading."""
        self._wanted: ReadPlan | None = None
        self._count_at_open = 0
        self._counted_at: float | None = None
        self._driver_version: str | None = None
        self._nvml_version: str | None = None

    def open(self) -> None:
        """Open the driver and attach every GPU that answers.

        Raises:
            SourceError: There is no library, no driver, no permission, no GPU, ...; the message has the fix.
        """
        library.open_driver()
        try:
            self._attach_all()
        except pynvml.NVMLError as error:
            self.close()
            raise library.error_of(library.code_of(error)) from error
        except SourceError:
            self.close()
            raise

    def close(self) -> None:
        """Close the driver, so that a GPU can be reset; GPUs that were seen stay known."""
        if self._events is not None:
            self._events.close()
            self._events = None
        for unit in self._units.values():
            unit.close()
        self._units.clear()
        library.close_driver()

    def sample(self, now: float) -> Reading:
        """Return one reading of every GPU that was ever seen.

        Args:
            now: Unix time at the start of the sample, in seconds.

        Raises:
            SourceError: The driver as a whole is gone; close, and open again later.
        """
        started = self._monotonic()
        own = self._own_time(now)
        self._drain_events(now)
        try:
            self._reopen_if_number_changed(own)
            self._look_for_nameless(own)
            gpus = tuple(self._read(uuid, own) for uuid in sorted(self._known, key=lambda one: self._known[one].index))
        except pynvml.NVMLError as error:
            raise library.error_of(library.code_of(error)) from error
        changed = self._drain_events(now)
        gpus = tuple(without_means(gpu) if gpu.gpu.uuid in changed else gpu for gpu in gpus)
        xids, self._xids = tuple(self._xids), []
        errors, self._errors = self._errors, Counter()
        ended = self._monotonic()
        took = ended - started
        return Reading(
            source=NAME,
            taken_at_seconds=now + took,
            duration_seconds=took,
            steady_seconds=ended,
            driver_version=self._driver_version,
            nvml_version=self._nvml_version,
            gpus=gpus,
            xids=xids,
            errors=dict(errors),
        )

    def _own_time(self, now: float) -> float:
        """Return the time for waits, by a monotonic clock: a wall clock set back by an hour would add an hour."""
        own = now if self._steady is None else self._steady()
        if self._sampled_at is not None and now - self._sampled_at[0] < own - self._sampled_at[1] - _SET_BACK_SECONDS:
            for unit in self._units.values():
                unit.clock_was_set_back()
        self._sampled_at = now, own
        return own

    def _took(self) -> float:
        """Return the seconds that the sample has taken so far; 0 if waits use the time passed to ``sample``."""
        return 0.0 if self._steady is None or self._sampled_at is None else self._steady() - self._sampled_at[1]

    def _count(self, reason: str) -> None:
        self._errors[reason] += 1

    def _attach_all(self) -> None:
        """Attach the enumerated GPUs, and set the reason for the other known ones."""
        self._driver_version = library.read_text(pynvml.nvmlSystemGetDriverVersion)
        self._nvml_version = library.read_text(pynvml.nvmlSystemGetNVMLVersion)
        self._wanted = self._wanted_of(self._driver_version)
        self._down.clear()
        self._failures.clear()
        self._count_at_open = pynvml.nvmlDeviceGetCount()
        indexes = sorted(set(range(self._count_at_open)) - self._left_out)
        unreadable = {index: reason for index in indexes if (reason := self._attach_at(index))}
        self._nameless = dict.fromkeys(unreadable, -1.0)
        for uuid, gpu in self._known.items():
            if uuid not in self._units:
                reason = unreadable.get(gpu.index, "not_enumerated")
                self._down[uuid] = _Down(state=_state_of(reason), reason=reason, look_at=-1.0)
        if not self._known and not self._left_out:
            raise library.problem(next(iter(unreadable.values()), "no_gpus"))
        self._watch_events()

    def _wanted_of(self, driver_version: str | None) -> ReadPlan:
        major = (driver_version or "").split(".")[0]
        return ReadPlan(
            fields=self._fields,
            getters=getters(self._fields),
            items=field_values(self._fields, int(major) if major.isdigit() else 0),
            record=activity.record_type(),
            oldest_seconds=self._oldest_seconds,
            count=self._count,
            took=self._took,
        )

    @contextmanager
    def _asking(self, index: int) -> Iterator[None]:
        """Record the GPU of the calls within, so that it is known which GPU hangs."""
        self._note_asked(index)
        try:
            yield
        finally:
            self._note_asked(None)

    def _attach_at(self, index: int) -> str:
        """Attach the GPU of an index; return the reason if it does not answer, which is counted."""
        try:
            with self._asking(index):
                self._attach(pynvml.nvmlDeviceGetHandleByIndex(index), index)
        except SourceError as error:
            reason = error.reason
        except pynvml.NVMLError as error:
            if library.code_of(error) in library.DRIVER_GONE:
                raise
            reason = library.reason_of(library.code_of(error))
        else:
            return ""
        self._count(reason)
        return reason

    def _attach(self, handle: Any, index: int, expected_uuid: str | None = None) -> bool:  # noqa: ANN401 - a handle is whatever pynvml gave
        """Attach one GPU; return False if it is not the expected one."""
        gpu = identity_of(handle, index)
        if self._wanted is None or (expected_uuid is not None and gpu.uuid != expected_uuid):
            return False
        # Steps that can fail come first: a known GPU is either attached or has a reason why not.
        unit = self._units[gpu.uuid] = Unit(handle, gpu, self._wanted)
        self._known[gpu.uuid] = unit.gpu
        self._down.pop(gpu.uuid, None)
        return True

    def _watch_events(self) -> None:
        handles = {uuid: unit.handle for uuid, unit in self._units.items()}
        if self._events is None:
            self._events = EventWatch(handles)
            self._events.start()
        else:
            self._events.renew(handles)

    def _read(self, uuid: str, now: float) -> GpuReading:
        with self._asking(self._known[uuid].index):
            if uuid not in self._units:
                self._look_for(uuid, now)
            unit = self._units.get(uuid)
            if unit is None:
                down = self._down[uuid]
                return GpuReading(gpu=self._known[uuid], state=down.state, reason=down.reason)
            reading = unit.sample(now)
        self._known[uuid] = unit.gpu
        if reading.state is DeviceState.LOST:
            self._detach(uuid, reading.state, reading.reason, look_at=now + self._retry_seconds)
        elif reading.state is DeviceState.FAILED:
            self._failures[uuid] += 1
            if self._failures[uuid] >= _FAILURES_BEFORE_ATTACHING_AGAIN:
                self._failures[uuid] = 0
                self._detach(uuid, reading.state, reading.reason, look_at=now)
        else:
            self._failures[uuid] = 0
        return reading

    def _detach(self, uuid: str, state: DeviceState, reason: str, *, look_at: float) -> None:
        self._units.pop(uuid).close()
        self._down[uuid] = _Down(state=state, reason=reason, look_at=look_at)
        self._watch_events()

    def _look_for(self, uuid: str, now: float) -> None:
        """Attach a GPU again if it answers at its place under its UUID; its old handle is not reliable."""
        down = self._down[uuid]
        if down.look_at > now:
            return
        gpu = self._known[uuid]
        down.look_at = now + self._retry_seconds
        try:
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id)
            if self._attach(handle, gpu.index, expected_uuid=uuid):
                self._watch_events()
            else:
                down.state, down.reason = DeviceState.MISSING, "replaced"
        except SourceError as error:
            down.state, down.reason = DeviceState.FAILED, error.reason
        except pynvml.NVMLError as error:
            code = library.code_of(error)
            if code in library.DRIVER_GONE:
                raise
            down.reason = "not_enumerated" if code in _NOT_THERE else library.reason_of(code)
            down.state = _state_of(down.reason)
            self._count(library.reason_of(code))

    def _look_for_nameless(self, now: float) -> None:
        """Attach GPUs that have not answered since the driver was opened."""
        attached = {unit.gpu.index for unit in self._units.values()}
        for index in [index for index, look_at in self._nameless.items() if look_at <= now]:
            if index in attached:
                del self._nameless[index]
                continue
            self._nameless[index] = now + self._retry_seconds
            if not self._attach_at(index):
                del self._nameless[index]
                self._watch_events()

    def _reopen_if_number_changed(self, now: float) -> None:
        """Reopen the driver if its number of GPUs has changed since it was opened."""
        if self._counted_at is not None and 0 <= now - self._counted_at < self._retry_seconds:
            return
        self._counted_at = now
        if self._number_changed():
            self.announce()
            self.close()
            self.open()

    def _number_changed(self) -> bool:
        try:
            return int(pynvml.nvmlDeviceGetCount()) != self._count_at_open
        except pynvml.NVMLError as error:
            code = library.code_of(error)
            if code in library.DRIVER_GONE:
                raise
            # A single failed call does not concern the GPUs, which are read themselves.
            self._count(library.reason_of(code))
            return False

    def _drain_events(self, now: float) -> frozenset[str]:
        """Keep the Xids for the reading, and return the UUIDs of the GPUs with a changed MIG layout."""
        if self._events is None:
            return frozenset()
        xids, changed, errors = self._events.drain()
        self._errors.update(errors)
        for uuid in self._units.keys() & changed:
            self._units[uuid].layout_changed()
        self._xids += [replace(xid, at_seconds=now) for xid in xids]
        return frozenset(changed)


def _state_of(reason: str) -> DeviceState:
    states = {
        "gpu_is_lost": DeviceState.LOST,
        "reset_required": DeviceState.RESET_REQUIRED,
        "not_enumerated": DeviceState.MISSING,
    }
    return states.get(reason, DeviceState.FAILED)

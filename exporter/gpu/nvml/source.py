"""Reads all GPUs of a node through NVML, the state of GPUs that do not answer, and the driver's events."""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pynvml

from exporter.errors import SourceError
from exporter.gpu.nvml import activity, library
from exporter.gpu.nvml.fields import identity_of
from exporter.gpu.nvml.library import Driver, Handle, NvmlCode
from exporter.gpu.nvml.reader import Unit, without_means
from exporter.model import DeviceState, Field, Gpu, GpuReading, Reading, XidEvent

NAME = "nvml"
_FAILURES_BEFORE_ATTACHING_AGAIN = 3
_SET_BACK_SECONDS = 0.5
"""Smaller steps back are slewing of the clock, or the time between two readings of clocks."""
_NOT_THERE = frozenset(map(library.reason_of, (NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND, NvmlCode.GPU_NOT_FOUND)))
"""Reasons why a GPU is not found at its bus id."""

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

    def __init__(self, handles: Mapping[str, Handle], monotonic: Callable[[], float] = time.monotonic) -> None:
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

    def renew(self, handles: Mapping[str, Handle]) -> None:
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

    def _register(self, event_set: Handle, handles: Mapping[str, Handle]) -> tuple[dict[int, str], dict[str, Handle]]:
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

    def _mask(self, handle: Handle) -> int:
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

    def _try_mask(self, handle: Handle, mask: int) -> None:
        """Register a GPU in a separate set: by NVML's manual, a set is unusable after an unknown error."""
        event_set = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, mask, event_set)
        finally:
            self._free(event_set)

    def _free(self, event_set: Handle) -> None:
        try:
            pynvml.nvmlEventSetFree(event_set)
        except pynvml.NVMLError:
            self._errors.append("events_not_freed")

    def _wait(self, event_set: Handle, uuids: Mapping[int, str]) -> None:
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
        clock: Seconds of the monotonic clock; ``None``: the time passed to ``sample``.
    """

    name = NAME
    waits_seconds = (1.0, 10.0)
    announce: Callable[[], None]
    """Not used: no step of a sample takes long."""

    def __init__(
        self,
        fields: frozenset[Field],
        *,
        interval_seconds: float = 1.0,
        retry_seconds: float = 10.0,
        left_out: frozenset[int] = frozenset(),
        note_asked: Callable[[int | None], None] = lambda _index: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._fields = fields
        self._oldest_seconds = max(activity.OLDEST_SECONDS, 2 * interval_seconds)
        self._retry_seconds = retry_seconds
        self._left_out = left_out
        self._note_asked = note_asked
        self._now = self._began_at = -math.inf
        """Unix time and monotonic time at the start of the current sample, or of the previous one."""
        self._clock = clock or (lambda: self._now)
        self._errors: Counter[str] = Counter()
        self._known: dict[str, Gpu] = {}
        self._units: dict[str, Unit] = {}
        self._down: dict[str, _Down] = {}
        self._nameless: dict[int, float] = {}
        """Time of the next attempt by index, for GPUs that did not report their UUID."""
        self._events: EventWatch | None = None
        self._xids: list[XidEvent] = []
        """Xid events for the next reading."""
        self._versions: tuple[str | None, ...] = (None, None)
        """Versions of the driver and of NVML."""

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
            raise library.driver_error(error) from error
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
        started = self._begin(now)
        self._drain_events()
        try:
            self._look_for_nameless(started)
            gpus = [self._read(uuid, started) for uuid in sorted(self._known, key=lambda one: self._known[one].index)]
        except pynvml.NVMLError as error:
            raise library.driver_error(error) from error
        finally:
            self._note_asked(None)
        changed = self._drain_events()
        xids, self._xids = self._xids, []
        errors, self._errors = self._errors, Counter()
        ended = self._clock()
        took = ended - started
        return Reading(
            source=NAME,
            taken_at_seconds=now + took,
            duration_seconds=took,
            steady_seconds=ended,
            driver_version=self._versions[0],
            nvml_version=self._versions[1],
            gpus=tuple(without_means(gpu) if gpu.gpu.uuid in changed else gpu for gpu in gpus),
            xids=tuple(replace(xid, at_seconds=now) for xid in xids),
            errors=dict(errors),
        )

    def _begin(self, now: float) -> float:
        """Return the monotonic time of a new sample: a wall clock set back by an hour would add an hour to waits."""
        passed, before = now - self._now, self._began_at
        self._now = now
        self._began_at = self._clock()
        if passed < self._began_at - before - _SET_BACK_SECONDS:
            for unit in self._units.values():
                unit.clock_was_set_back()
        return self._began_at

    def _count(self, reason: str) -> None:
        self._errors[reason] += 1

    def _attach_all(self) -> None:
        """Attach the enumerated GPUs, and set the reason for the other known ones."""
        calls = (pynvml.nvmlSystemGetDriverVersion, pynvml.nvmlSystemGetNVMLVersion)
        self._versions = tuple(map(_version, calls))
        major = (self._versions[0] or "").split(".")[0]
        self._driver = Driver(
            fields=self._fields,
            count=self._count,
            clock=self._clock,
            major=int(major) if major.isdigit() else 0,
            record=activity.record_type(),
            oldest_seconds=self._oldest_seconds,
        )
        self._down.clear()
        indexes = sorted(set(range(pynvml.nvmlDeviceGetCount())) - self._left_out)
        unreadable = {index: reason for index in indexes if (reason := self._attach_at(index))}
        self._note_asked(None)
        self._nameless = dict.fromkeys(unreadable, -math.inf)
        for uuid, gpu in self._known.items():
            if uuid not in self._units:
                reason = unreadable.get(gpu.index, "not_enumerated")
                self._down[uuid] = _Down(state=_state_of(reason), reason=reason, look_at=-math.inf)
        if not self._known and not self._left_out:
            raise library.problem(next(iter(unreadable.values()), "no_gpus"))
        self._watch_events()

    def _attach_at(self, index: int) -> str:
        return self._attach(index, partial(pynvml.nvmlDeviceGetHandleByIndex, index))

    def _attach(self, index: int, find: Callable[[], Handle], expected_uuid: str | None = None) -> str:
        """Attach a GPU if it answers and is the expected one; return the reason if not.

        Raises:
            pynvml.NVMLError: The driver as a whole is gone.
        """
        self._note_asked(index)
        try:
            handle = find()
            gpu = identity_of(handle, index)
            if expected_uuid not in {None, gpu.uuid}:
                return "replaced"
            unit = Unit(handle, gpu, self._driver)
        except SourceError as error:
            reason = error.reason
        except pynvml.NVMLError as error:
            code = library.code_of(error)
            if code in library.DRIVER_GONE:
                raise
            reason = library.reason_of(code)
        else:
            self._units[gpu.uuid], self._known[gpu.uuid] = unit, unit.gpu
            self._down.pop(gpu.uuid, None)
            return ""
        self._count(reason)
        return reason

    def _watch_events(self) -> None:
        handles = {uuid: unit.handle for uuid, unit in self._units.items()}
        if self._events is None:
            self._events = EventWatch(handles)
            self._events.start()
        else:
            self._events.renew(handles)

    def _read(self, uuid: str, now: float) -> GpuReading:
        self._note_asked(self._known[uuid].index)
        if uuid not in self._units:
            self._look_for(uuid, now)
        unit = self._units.get(uuid)
        if unit is None:
            down = self._down[uuid]
            return GpuReading(gpu=self._known[uuid], state=down.state, reason=down.reason)
        reading = unit.sample(now)
        self._known[uuid] = unit.gpu
        unit.failures = unit.failures + 1 if reading.state is DeviceState.FAILED else 0
        lost = reading.state is DeviceState.LOST
        if lost or unit.failures >= _FAILURES_BEFORE_ATTACHING_AGAIN:
            self._units.pop(uuid).close()
            look_at = now + self._retry_seconds if lost else now
            self._down[uuid] = _Down(state=reading.state, reason=reading.reason, look_at=look_at)
            self._watch_events()
        return reading

    def _look_for(self, uuid: str, now: float) -> None:
        """Attach a GPU again if it answers at its place under its UUID; its old handle is not reliable."""
        down, gpu = self._down[uuid], self._known[uuid]
        if down.look_at > now:
            return
        down.look_at = now + self._retry_seconds
        reason = self._attach(gpu.index, partial(pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id), uuid)
        if reason:
            down.reason = "not_enumerated" if reason in _NOT_THERE else reason
            down.state = _state_of(down.reason)
        else:
            self._watch_events()

    def _look_for_nameless(self, now: float) -> None:
        """Attach GPUs that have not answered since the driver was opened."""
        attached = {unit.gpu.index for unit in self._units.values()}
        for index in [index for index, look_at in self._nameless.items() if look_at <= now]:
            self._nameless[index] = now + self._retry_seconds
            if index in attached:
                del self._nameless[index]
            elif not self._attach_at(index):
                del self._nameless[index]
                self._watch_events()

    def _drain_events(self) -> frozenset[str]:
        """Keep the Xids for the reading, and return the UUIDs of the GPUs with a changed MIG layout."""
        if self._events is None:
            return frozenset()
        xids, changed, errors = self._events.drain()
        self._errors.update(errors)
        for uuid in self._units.keys() & changed:
            self._units[uuid].layout_changed()
        self._xids += xids
        return frozenset(changed)


def _version(call: Callable[[], object]) -> str | None:
    try:
        return library.text(call)
    except pynvml.NVMLError as error:
        library.code_unless_fatal(error)
        return None


def _state_of(reason: str) -> DeviceState:
    states = {
        "gpu_is_lost": DeviceState.LOST,
        "reset_required": DeviceState.RESET_REQUIRED,
        "not_enumerated": DeviceState.MISSING,
        "replaced": DeviceState.MISSING,
    }
    return states.get(reason, DeviceState.FAILED)

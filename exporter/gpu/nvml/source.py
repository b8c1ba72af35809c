"""Reads all GPUs of a node through NVML: values, states of GPUs that do not answer, and events."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import pynvml

from exporter.errors import SourceError
from exporter.gpu.nvml import activity, library
from exporter.gpu.nvml.fields import identity_of
from exporter.gpu.nvml.library import Driver, Handle
from exporter.gpu.nvml.reader import Unit, without_means
from exporter.model.devices import DeviceState, Gpu, GpuReading, Reading, XidEvent
from exporter.model.fields import Field

NAME = "nvml"
_FAILURES_BEFORE_ATTACHING_AGAIN = 3
_SET_BACK_SECONDS = 0.5
"""Minimum step back of a set clock; slewing, or the time between two reads of clocks, causes smaller steps."""
_NOT_THERE = frozenset({"invalid_argument", "not_found", "gpu_not_found"})
"""Reasons why a GPU is not found at its bus id."""
_STATES = {
    "gpu_is_lost": DeviceState.LOST,
    "reset_required": DeviceState.RESET_REQUIRED,
    "not_enumerated": DeviceState.MISSING,
    "replaced": DeviceState.MISSING,
}
"""States of GPUs that are not attached, by reason; failed for any other reason."""

_XID = 0x8
_MIG_CHANGE = 0x100
_EVENTS_RETRY_SECONDS = 10.0
_EVENTS_UNAVAILABLE_RETRY_SECONDS = 600.0
_MOST_EVENTS = 4096
_NO_INSTANCE = 0xFFFFFFFF
"""Id of a GPU instance or compute instance in an event of the whole GPU or the whole GPU instance."""


class Events:
    """Receives Xids and changes of the MIG layout of the attached GPUs with one event set.

    Args:
        count: Called with the reason of each error.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self.handles: dict[str, Handle] = {}
        """Handles of the watched GPUs by UUID."""
        self._set: Handle | None = None
        self._uuids: dict[int, str] = {}
        """UUIDs of the GPUs in the set, by number of the handle."""
        self._unwatched: dict[str, Handle] = {}
        """GPUs to add to the set."""
        self._add_at = -math.inf
        self.xids: list[XidEvent] = []
        """Xids since the last reading."""
        self._changed: set[str] = set()

    def watch(self, handles: Mapping[str, Handle]) -> None:
        """Watch these GPUs, by UUID, beginning with the next ``drain``; earlier events are kept."""
        self._take()
        self.close()
        self.handles = dict(handles)
        self._unwatched, self._add_at = self.handles.copy(), -math.inf

    def close(self) -> None:
        """Free the set; call it before the shutdown of the driver."""
        if self._set is not None:
            self._free(self._set)
        self._set, self._uuids = None, {}

    def drain(self, now: float) -> frozenset[str]:
        """Store new events, and return the UUIDs of GPUs with a new MIG layout since the last call.

        Args:
            now: Seconds; only differences matter.
        """
        if self._unwatched and now >= self._add_at:
            self._add_at = now + self._add()
        if not self._take():
            # A lost GPU makes every call fail, until the next attempt detaches it.
            self.close()
            self._unwatched, self._add_at = self.handles.copy(), now + _EVENTS_RETRY_SECONDS
        changed, self._changed = self._changed, set()
        return frozenset(changed)

    def _add(self) -> float:
        """Add GPUs to the set, and return the wait in seconds before the next attempt for the rest.

        A second set would lose or duplicate events of the other GPUs.
        """
        try:
            self._set = pynvml.nvmlEventSetCreate() if self._set is None else self._set
        except pynvml.NVMLError as error:
            self._count("events_unavailable")
            unavailable = library.code_of(error) in library.UNAVAILABLE
            return _EVENTS_UNAVAILABLE_RETRY_SECONDS if unavailable else _EVENTS_RETRY_SECONDS
        for uuid, handle in list(self._unwatched.items()):
            try:
                pynvml.nvmlDeviceRegisterEvents(handle, self._mask(handle), self._set)
            except pynvml.NVMLError as error:
                self._count("events_unavailable")
                if library.code_of(error) not in library.UNAVAILABLE:
                    continue
            else:
                self._uuids[library.address(handle)] = uuid
            del self._unwatched[uuid]
        return _EVENTS_RETRY_SECONDS

    def _mask(self, handle: Handle) -> int:
        """Return the types of events that a GPU accepts for registration.

        Raises:
            pynvml.NVMLError: The GPU does not report Xids, or not now.
        """
        mask = int(pynvml.nvmlDeviceGetSupportedEventTypes(handle)) & (_XID | _MIG_CHANGE)
        if not mask & _XID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        with suppress(pynvml.NVMLError):
            self._try_mask(handle, mask)
            return mask
        # Some GPUs list the MIG event but refuse it.
        self._try_mask(handle, _XID)
        return _XID

    def _try_mask(self, handle: Handle, mask: int) -> None:
        """Register a GPU in a separate set, since a set is unusable after an unknown error (manual of NVML)."""
        event_set = pynvml.nvmlEventSetCreate()
        try:
            pynvml.nvmlDeviceRegisterEvents(handle, mask, event_set)
        finally:
            self._free(event_set)

    def _free(self, event_set: Handle) -> None:
        try:
            pynvml.nvmlEventSetFree(event_set)
        except pynvml.NVMLError:
            self._count("events_not_freed")

    def _take(self) -> bool:
        """Store the events that have arrived, without waiting; return False if the set does not work."""
        for _ in range(_MOST_EVENTS if self._uuids else 0):
            try:
                data = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError as error:
                code = library.code_of(error)
                if code == pynvml.NVML_ERROR_TIMEOUT:
                    break
                self._count(f"events_{library.reason_of(code)}")
                return False
            self._keep(data)
        return True

    def _keep(self, data: Any) -> None:  # noqa: ANN401 - pynvml is untyped
        uuid = self._uuids.get(library.address(data.device))
        if data.eventType == _MIG_CHANGE:
            self._changed.update([uuid] if uuid else self._uuids.values())
        elif data.eventType == _XID and uuid is not None:
            instance, part = (
                None if number == _NO_INSTANCE else int(number)
                for number in (data.gpuInstanceId, data.computeInstanceId)
            )
            event = XidEvent(
                uuid=uuid, xid=int(data.eventData), at_seconds=0.0, gpu_instance_id=instance, compute_instance_id=part
            )
            self.xids.append(event)
        else:
            self._count("events_unknown_device" if uuid is None else "events_unknown_type")


@dataclass(slots=True)
class _Down:
    """A known GPU that is not attached."""

    reason: str
    look_at: float
    """Time of the next attempt to attach it."""


@dataclass
class NvmlSource:
    """Reads all GPUs with the driver library of this process; open, sample repeatedly, close; can be opened again."""

    name = NAME
    waits_seconds = (1.0, 10.0)
    fresh_process_reasons = frozenset({"library_mismatch"})
    fresh_arguments = ()

    fields: frozenset[Field]
    """Fields to read; fields that NVML lacks are absent. A GPU without an answer for any field counts as down."""
    _: KW_ONLY
    interval_seconds: float = 1.0
    """Planned time between samples."""
    retry_seconds: float = 10.0
    """Time after which a GPU that is down is tried again."""
    left_out: frozenset[int] = frozenset()
    """Indexes of GPUs that hang, for which no call is made."""
    note_asked: Callable[[int | None], None] = lambda _index: None
    """Called with the index of a GPU before its calls, and with ``None`` after them."""
    clock: Callable[[], float] | None = None
    """Seconds of the monotonic clock; ``None``: the time passed to ``sample``."""

    def __post_init__(self) -> None:
        """Begin without a driver."""
        self.announce: Callable[[], None] = lambda: None
        """Not used: no step of a sample takes long."""
        self._now = self._began_at = -math.inf
        """Unix time and monotonic time at the start of the current sample, or of the previous one."""
        self._clock = self.clock or (lambda: self._now)
        self._errors: Counter[str] = Counter()
        self._known: dict[str, Gpu] = {}
        self._units: dict[str, Unit] = {}
        self._down: dict[str, _Down] = {}
        self._nameless: dict[int, float] = {}
        """Time of the next attempt by index, for GPUs that did not report their UUID."""
        self._events = Events(self._count)
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
        self._events.close()
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
        self._drain_events(started)
        try:
            self._look_for_nameless(started)
            gpus = [self._read(uuid, started) for uuid in sorted(self._known, key=lambda one: self._known[one].index)]
        except pynvml.NVMLError as error:
            raise library.driver_error(error) from error
        finally:
            self.note_asked(None)
        regrouped = self._units.keys() != self._events.handles.keys()
        if regrouped:  # at once, since Xids before the registration are lost, and other GPUs often have Xids next
            self._watch_events()
        partitioned = any(unit.gpu.mig_enabled for unit in self._units.values())
        changed = self._drain_events(started) if regrouped or partitioned else frozenset()
        xids, self._events.xids = self._events.xids, []
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
            gpus=tuple(without_means(gpu) if gpu.uuid in changed else gpu for gpu in gpus),
            xids=tuple(replace(xid, at_seconds=now) for xid in xids),
            errors=dict(errors),
        )

    def _begin(self, now: float) -> float:
        """Return the monotonic time of a new sample, since a wall clock that is set back would extend waits."""
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
        """Attach the enumerated GPUs, and set the reason for the other known GPUs."""
        calls = (pynvml.nvmlSystemGetDriverVersion, pynvml.nvmlSystemGetNVMLVersion)
        self._versions = tuple(map(_version, calls))
        major = (self._versions[0] or "").split(".")[0]
        self._driver = Driver(
            fields=self.fields,
            count=self._count,
            clock=self._clock,
            major=int(major) if major.isdigit() else 0,
            record=activity.record_type(),
            oldest_seconds=max(activity.OLDEST_SECONDS, 2 * self.interval_seconds),
        )
        self._down.clear()
        indexes = sorted(set(range(pynvml.nvmlDeviceGetCount())) - self.left_out)
        unreadable = {index: reason for index in indexes if (reason := self._attach_at(index))}
        self.note_asked(None)
        self._nameless = dict.fromkeys(unreadable, -math.inf)
        for uuid, gpu in self._known.items():
            if uuid not in self._units:
                reason = unreadable.get(gpu.index, "not_enumerated")
                self._down[uuid] = _Down(reason, look_at=-math.inf)
        if not self._known and not self.left_out:
            raise library.problem(next(iter(unreadable.values()), "no_gpus"))
        self._watch_events()

    def _attach_at(self, index: int) -> str:
        return self._attach(index, partial(pynvml.nvmlDeviceGetHandleByIndex, index))

    def _attach(self, index: int, find: Callable[[], Handle], expected_uuid: str | None = None) -> str:
        """Attach a GPU if it answers and is the expected GPU; otherwise return the reason.

        Raises:
            pynvml.NVMLError: The driver as a whole is gone.
        """
        self.note_asked(index)
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
        self._events.watch({uuid: unit.handle for uuid, unit in self._units.items()})

    def _read(self, uuid: str, now: float) -> GpuReading:
        self.note_asked(self._known[uuid].index)
        if uuid not in self._units:
            self._look_for(uuid, now)
        unit = self._units.get(uuid)
        if unit is None:
            reason = self._down[uuid].reason
            return GpuReading(gpu=self._known[uuid], state=_STATES.get(reason, DeviceState.FAILED), reason=reason)
        reading = unit.sample(now)
        self._known[uuid] = unit.gpu
        unit.failures = unit.failures + 1 if reading.state is DeviceState.FAILED else 0
        lost = reading.state is DeviceState.LOST
        if lost or unit.failures >= _FAILURES_BEFORE_ATTACHING_AGAIN:
            self._units.pop(uuid).close()
            self._down[uuid] = _Down(reading.reason, look_at=now + self.retry_seconds if lost else now)
        return reading

    def _look_for(self, uuid: str, now: float) -> None:
        """Attach a GPU again if it answers at its bus id with its UUID; its old handle is not reliable."""
        down, gpu = self._down[uuid], self._known[uuid]
        if down.look_at > now:
            return
        down.look_at = now + self.retry_seconds
        reason = self._attach(gpu.index, partial(pynvml.nvmlDeviceGetHandleByPciBusId, gpu.pci_bus_id), uuid)
        if reason:
            down.reason = "not_enumerated" if reason in _NOT_THERE else reason

    def _look_for_nameless(self, now: float) -> None:
        """Attach GPUs that have not answered since the driver was opened."""
        attached = {unit.gpu.index for unit in self._units.values()}
        for index in [index for index, look_at in self._nameless.items() if look_at <= now]:
            self._nameless[index] = now + self.retry_seconds
            if index in attached or not self._attach_at(index):
                del self._nameless[index]

    def _drain_events(self, now: float) -> frozenset[str]:
        """Return the UUIDs of the GPUs with a changed MIG layout, which is read again at the next sample."""
        changed = self._events.drain(now)
        for uuid in self._units.keys() & changed:
            self._units[uuid].layout_changed()
        return changed


def _version(call: Callable[[], object]) -> str | None:
    try:
        return library.text(call)
    except pynvml.NVMLError as error:
        library.code_unless_fatal(error)
        return None

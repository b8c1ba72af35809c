"""Waits for driver events in a thread: Xids and changes of the MIG layout."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pynvml

from exporter.gpu.nvml import library
from exporter.gpu.nvml.library import Code
from exporter.model import XidEvent

_XID = 0x8
_MIG_CHANGE = 0x100
_WAIT_MILLISECONDS = 500
_PAUSE_SECONDS = 0.05
_RETRY_SECONDS = 10.0
_UNAVAILABLE_RETRY_SECONDS = 600.0
_JOIN_SECONDS = 5.0
_NO_INSTANCE = 0xFFFFFFFF
"""Id of a GPU instance or compute instance in an event of the whole GPU or the whole GPU instance."""
_LIMIT = 4096
_Item = TypeVar("_Item")


class EventWatch:
    """Owns one event set from start to end: operations on a set are not thread-safe.

    Args:
        handles: Of the GPUs to watch, by UUID.
        monotonic: Clock by which a GPU that could not be registered is tried again, in seconds.
    """

    def __init__(self, handles: Mapping[str, Any], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._handles = dict(handles)
        self._monotonic = monotonic
        self._xids: deque[XidEvent] = deque(maxlen=_LIMIT)
        self._changed: deque[str] = deque(maxlen=_LIMIT)
        self._errors: deque[str] = deque(maxlen=_LIMIT)
        self._stopping = False
        self._renewed = threading.Event()
        """Set when what the thread works on is out of date, and to wake it."""
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)

    def start(self) -> None:
        """Start waiting; returns at once."""
        self._thread.start()

    def renew(self, handles: Mapping[str, Any]) -> None:
        """Watch other GPUs from now on; returns at once, the thread changes over by itself."""
        self._handles = dict(handles)
        self._renewed.set()

    def close(self) -> None:
        """Stop waiting; to be called before the driver is shut down."""
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
            pause_seconds = _RETRY_SECONDS
            try:
                if not self._watch():
                    pause_seconds = _UNAVAILABLE_RETRY_SECONDS
            except pynvml.NVMLError as error:
                # A lost GPU makes every wait fail at once: register without it.
                self._errors.append(f"events_{library.reason_of(library.code_of(error))}")
            if not self._stopping:
                self._renewed.wait(pause_seconds)

    def _watch(self) -> bool:
        """Wait on one set until it is out of date; return False where there is nothing to wait for, now or soon."""
        try:
            event_set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            self._errors.append("events_unavailable")
            return library.code_of(error) not in library.UNAVAILABLE
        try:
            uuids, left_out = self._register(event_set, self._handles)
            retry_at = self._monotonic() + _RETRY_SECONDS
            # Both: the thread may have taken back the wake-up of a close for one of its own beginning.
            while uuids and not (self._stopping or self._renewed.is_set()):
                self._wait(event_set, uuids)
                if left_out and self._monotonic() >= retry_at:
                    # Into the same set: with another one events of the other GPUs would be lost, or told by both.
                    added, left_out = self._register(event_set, left_out)
                    uuids.update(added)
                    retry_at = self._monotonic() + _RETRY_SECONDS
        finally:
            self._free(event_set)
        return bool(uuids or left_out)

    def _register(self, event_set: Any, handles: Mapping[str, Any]) -> tuple[dict[int, str], dict[str, Any]]:  # noqa: ANN401 - handles are whatever pynvml gave
        """Return the UUIDs of the GPUs that are watched now, by the number of their handle, and those to try again."""
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
        """Return the types of events that a GPU lets itself be registered for.

        Raises:
            pynvml.NVMLError: it tells no Xids, or not now.
        """
        mask = int(pynvml.nvmlDeviceGetSupportedEventTypes(handle)) & (_XID | _MIG_CHANGE)
        if not mask & _XID:
            raise pynvml.NVMLError(Code.NOT_SUPPORTED)
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
        """Register a GPU in a set of its own: by NVML's manual one is of no use after an unknown error."""
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
        try:
            data = pynvml.nvmlEventSetWait_v2(event_set, _WAIT_MILLISECONDS)
        except pynvml.NVMLError as error:
            if library.code_of(error) != Code.TIMEOUT:
                raise
            # A driver that answers "timeout" without waiting must not make this a busy loop.
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

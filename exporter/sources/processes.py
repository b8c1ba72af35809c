"""Which processes use a device, how much of its memory, and how much of its time by the driver's samples."""

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pynvml

from exporter.model import NO_PROCESS_MEMORY_MIB, ProcessUse
from exporter.sources import driver

_MPS_LIST = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3", _MPS_LIST)
_NO_SUCH_LIST = frozenset({driver.NOT_SUPPORTED, driver.FUNCTION_NOT_FOUND, driver.INVALID_ARGUMENT})
"""Codes after which no process can be in a list; after any other one processes may be missing."""
_NO_VALUE = 2**64 - 1
_SUCCESS = 0
_ATTEMPTS = 3
_FIRST_ROOM, _MOST_ROOM = 8, 1 << 16
_RETRY_SECONDS = 600.0
_PERCENT = 100


class _LongProcessInfo(ctypes.Structure):
    """Record of the R535 drivers up to about 535.86: 8 bytes longer under the same function name."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
        ("usedGpuCcProtectedMemory", ctypes.c_ulonglong),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One record of the driver's utilisation ring: percent, and microseconds of the driver's clock."""

    pid: int
    timestamp_us: int
    sm: int
    enc: int
    dec: int
    jpg: int | None = None
    """``None``, as the next, where only the call from before R550 answers."""
    ofa: int | None = None

    @property
    def percents(self) -> tuple[int | None, ...]:
        """Use of every engine."""
        return self.sm, self.enc, self.dec, self.jpg, self.ofa


def record_type() -> type[ctypes.Structure]:
    """Return the layout of a process record in the library that is loaded.

    Between the two symbols lie just the drivers with the long record.
    """
    long = driver.function("nvmlDeviceGetConfComputeMemSizeInfo") is not None
    fixed = driver.function("nvmlDeviceGetRunningProcessDetailList") is not None
    if long and not fixed:
        return _LongProcessInfo
    layout: type[ctypes.Structure] = pynvml.c_nvmlProcessInfo_v3_t
    return layout


def good_samples(samples: Iterable[Sample], last_us: int) -> list[Sample]:
    """Drop what the driver left unfilled: it answers with more slots than it has samples, and with garbage in them."""
    return [
        one
        for one in samples
        if one.pid != 0
        and one.timestamp_us > last_us
        and all(percent is None or 0 <= percent <= _PERCENT for percent in one.percents)
    ]


class Poller:
    """Processes of one GPU or MIG instance, from poll to poll.

    Args:
        handle: Of the GPU or MIG instance.
        utilisation: Whether the driver has utilisation samples for it; it has none for MIG instances.
        record: Layout of a process record, from ``record_type``.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(
        self,
        handle: Any,  # noqa: ANN401 - a handle is whatever pynvml gave
        *,
        utilisation: bool,
        record: type[ctypes.Structure],
        count: Callable[[str], None],
    ) -> None:
        self._handle = handle
        self._record = record
        self._count = count
        self._last_us = 0
        self._baseline = False
        self._with_jpg_ofa = True
        """Whether the last answer was of the call that has these engines."""
        self._no_utilisation_before = -math.inf if utilisation else math.inf
        self._no_list_before = dict.fromkeys(_LISTS, -math.inf)
        self._untold: set[str] = set()
        """Lists that are there and were not told when last asked for."""
        self._mps_clients: frozenset[int] = frozenset()
        self._polled_at = -math.inf
        self._hides: bool | None = None
        """Whether the last answer listed no process while memory was in use."""
        self._room = dict.fromkeys(_LISTS, _FIRST_ROOM)
        """Records that there is room for at the first attempt: mostly enough, so that one call tells all."""

    def poll(self, now: float, memory_used_mib: float = 0.0) -> tuple[ProcessUse, ...] | None:
        """Return the processes now; ``None`` where the driver does not tell.

        A process with samples that is listed no more has ended since the last poll, and is there once more.

        Args:
            now: Seconds; only differences matter.
            memory_used_mib: Of the device: an empty list is no evidence while there is more than a driver needs itself.

        Raises:
            pynvml.NVMLError: the device is lost or the driver is gone.
        """
        if now < self._polled_at:
            # The clock was set back, and the driver stamps its samples with it: none would be new for as long.
            self._last_us, self._baseline = 0, False
        self._polled_at = now
        clients_before, self._mps_clients = self._mps_clients, frozenset()
        memory = self._listed(now)
        if memory is None:
            return None
        samples = self._samples(now)
        hides = not memory and memory_used_mib >= NO_PROCESS_MEMORY_MIB
        if self._hides not in {None, hides}:
            # The driver lost its processes meanwhile, or has them again: samples are of a part of the time, and a
            # process without one may have been busy in the rest.
            samples = None
        self._hides = hides
        pids = dict.fromkeys(memory)
        pids.update(dict.fromkeys(samples or ()))
        result = []
        for pid in sorted(pids):
            sm, enc, dec, jpg, ofa = self._ratios(pid, samples)
            result.append(
                ProcessUse(
                    pid=pid,
                    memory_used_bytes=memory.get(pid),
                    sm_ratio=sm,
                    enc_ratio=enc,
                    dec_ratio=dec,
                    jpg_ratio=jpg,
                    ofa_ratio=ofa,
                    ended=pid not in memory,
                    mps=pid in self._mps_clients or pid in clients_before,
                )
            )
        return tuple(result)

    def _ratios(self, pid: int, samples: dict[int, Sample] | None) -> tuple[float | None, ...]:
        """Return the use of every engine by one process; 0 without a sample, as the ring leaves out who did nothing."""
        if samples is None:
            return (None,) * 5
        unseen = 0 if self._with_jpg_ofa else None
        idle = Sample(pid=pid, timestamp_us=0, sm=0, enc=0, dec=0, jpg=unseen, ofa=unseen)
        percents = samples.get(pid, idle).percents
        return tuple(None if percent is None else percent / _PERCENT for percent in percents)

    def _listed(self, now: float) -> dict[int, int | None] | None:
        """Return memory by pid over all kinds of contexts, or ``None`` when some that there are could not be listed.

        A process that is missing from half a list would look as if it used nothing.
        """
        found: dict[int, int | None] = {}
        answered = False
        for name in _LISTS:
            if now < self._no_list_before[name]:
                continue
            try:
                rows = self._ask_list(name)
            except pynvml.NVMLError as error:
                self._no_list_before[name] = self._later(error, now)
                if driver.code_of(error) not in _NO_SUCH_LIST:
                    self._untold.add(name)
                continue
            answered = True
            self._untold.discard(name)
            if name == _MPS_LIST:
                self._mps_clients = frozenset(pid for pid, _ in rows)
            for pid, memory in rows:
                # A process with both compute and graphics contexts is in two lists, with the same memory.
                known = found.get(pid)
                found[pid] = memory if known is None else max(known, memory or 0)
        return found if answered and not self._untold else None

    def _ask_list(self, name: str) -> list[tuple[int, int | None]]:
        call = driver.function(name)
        if call is None:
            raise pynvml.NVMLError(driver.FUNCTION_NOT_FOUND)
        code = driver.INSUFFICIENT_SIZE
        for _ in range(_ATTEMPTS):
            size = ctypes.c_uint(self._room[name])
            records = (self._record * size.value)()
            code = call(self._handle, ctypes.byref(size), records)
            if code == _SUCCESS:
                return [
                    (one.pid, None if one.usedGpuMemory == _NO_VALUE else one.usedGpuMemory)
                    for one in records[: min(size.value, len(records))]
                    if one.pid
                ]
            if code != driver.INSUFFICIENT_SIZE:
                break
            # Room for processes that start meanwhile, too.
            self._room[name] = min(size.value * 2 + 5, _MOST_ROOM)
        raise pynvml.NVMLError(code)

    def _samples(self, now: float) -> dict[int, Sample] | None:
        """Return the samples since the last poll by pid; ``None`` where the driver has none to give."""
        if now < self._no_utilisation_before:
            return None
        try:
            samples = good_samples(self._ask_samples(), self._last_us)
        except pynvml.NVMLError as error:
            self._no_utilisation_before = self._later(error, now)
            return None
        first = not self._baseline
        self._baseline = True
        self._last_us = max((one.timestamp_us for one in samples), default=self._last_us)
        # The first answer is the whole ring, that is the mean of ten seconds nobody asked about.
        return None if first else {one.pid: one for one in samples}

    def _ask_samples(self) -> list[Sample]:
        code = driver.NOT_SUPPORTED
        newer = pynvml.nvmlDeviceGetProcessesUtilizationInfo
        for call in (newer, pynvml.nvmlDeviceGetProcessUtilization):
            self._with_jpg_ofa = call is newer
            for _ in range(_ATTEMPTS):
                try:
                    rows = call(self._handle, self._last_us)
                except pynvml.NVMLError as error:
                    code = driver.code_of(error)
                    if code in (_SUCCESS, driver.NOT_FOUND):
                        return []
                    if code == driver.INSUFFICIENT_SIZE:
                        # More processes since the first of the binding's two calls.
                        continue
                    if code in driver.UNAVAILABLE or code == driver.INVALID_ARGUMENT:
                        # Perhaps the older call is there.
                        break
                    raise
                return [
                    Sample(
                        pid=row.pid,
                        timestamp_us=row.timeStamp,
                        sm=row.smUtil,
                        enc=row.encUtil,
                        dec=row.decUtil,
                        jpg=getattr(row, "jpgUtil", None),
                        ofa=getattr(row, "ofaUtil", None),
                    )
                    for row in rows
                ]
        raise pynvml.NVMLError(code)

    def _later(self, error: pynvml.NVMLError, now: float) -> float:
        """Return when to ask again, after an error of one call."""
        code = driver.code_of(error)
        if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
            raise error
        if code == driver.FUNCTION_NOT_FOUND:
            return math.inf
        if code != driver.NOT_SUPPORTED:
            self._count(f"processes_{driver.reason_of(code)}")
        return now + _RETRY_SECONDS if code in driver.UNAVAILABLE else now

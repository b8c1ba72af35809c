"""Measures activity through NVML: GPM means of engines, and process samples."""

import ctypes
import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from itertools import chain
from typing import Any, NamedTuple

import pynvml

from exporter.gpu.nvml import library
from exporter.gpu.nvml.library import Driver, Handle, Retries
from exporter.model.devices import NO_PROCESS_MEMORY_MIB, ProcessUse
from exporter.model.fields import CODECS, DECODERS, FLOW_ENGINES, JPEG_DECODERS, Field, ratio_in_range

_MIB = 2**20
_MINIMUM_SECONDS = 0.1
"""Minimum distance of two valid samples (a limit of the counters of the hardware)."""
OLDEST_SECONDS = 60.0
"""Maximum time of a current mean, unless the sample interval is longer; after it, the mean restarts."""
_RETRY_SECONDS = 600.0
_SOON_SECONDS = 10.0
"""Wait after a refusal of a metric; it doubles up to ``_RETRY_SECONDS``."""
_SAMPLE, _PROBE = "sample", "probe"
"""Steps of a sampler that are left out for a time."""
_NOISE_MIB = 1.0
"""Tolerated negative rate in MiB/s; a lower rate is invalid, because its counter has restarted."""

METRICS: Mapping[Field, int] = {
    Field.PROF_GR_ENGINE_ACTIVE: 1,
    Field.PROF_SM_ACTIVE: 2,
    Field.PROF_SM_OCCUPANCY: 3,
    Field.PROF_PIPE_INT_ACTIVE: 4,
    Field.PROF_PIPE_TENSOR_ACTIVE: 5,
    Field.PROF_DRAM_ACTIVE: 10,
    Field.PROF_PIPE_FP64_ACTIVE: 11,
    Field.PROF_PIPE_FP32_ACTIVE: 12,
    Field.PROF_PIPE_FP16_ACTIVE: 13,
    Field.PROF_PCIE_TX_BYTES: 20,
    Field.PROF_PCIE_RX_BYTES: 21,
    Field.PROF_NVLINK_TX_BYTES: 61,
    Field.PROF_NVLINK_RX_BYTES: 60,
    Field.PROF_C2C_TX_ALL_BYTES: 100,
    Field.PROF_C2C_RX_ALL_BYTES: 102,
    **dict(zip(DECODERS, range(30, 38), strict=True)),
    **dict(zip(JPEG_DECODERS, range(40, 48), strict=True)),
    **dict(zip(FLOW_ENGINES, range(50, 52), strict=True)),
}
"""GPM metric id by field. Ratios are reported as percent, bytes per second as MiB per second."""

_C2C = (Field.PROF_C2C_TX_ALL_BYTES, Field.PROF_C2C_RX_ALL_BYTES)
_RATES = frozenset(field for field in METRICS if field.name.endswith("_BYTES"))


class GpmLevel(Enum):
    """Kind of entity that a sampler measures; determines the available metrics."""

    GPU = auto()
    GPU_INSTANCE = auto()
    """A whole MIG GPU instance: no PCIe, no NVLink, no C2C."""
    COMPUTE_INSTANCE = auto()
    """One of several compute instances of a GPU instance: no memory bandwidth either."""


def fields_at(level: GpmLevel, fields: Iterable[Field]) -> dict[Field, int]:
    """Return the wanted fields that exist at a level, with their metric ids.

    Always included are codecs of instances, because no other source measures them. For a whole GPU, NVML has the
    utilisation of codecs, and DCGM the single units that a collectors file selects. Also always included are C2C of a
    whole GPU and the activity of multiprocessors: DCGM would try C2C on boards without that link, and would need
    another pass of the profiler for multiprocessors.
    """
    wanted = {*fields, Field.PROF_SM_ACTIVE}
    wanted = (wanted - CODECS) | {*_C2C} if level is GpmLevel.GPU else (wanted | CODECS) - _RATES
    if level is GpmLevel.COMPUTE_INSTANCE:
        wanted -= {Field.PROF_DRAM_ACTIVE}
    return {field: metric for field, metric in METRICS.items() if field in wanted}


def convert(field: Field, raw: float) -> tuple[int | float | None, bool]:
    """Return a metric in the field's unit, and whether it was out of range; ``None`` for an invalid value.

    Args:
        field: A ratio (0..1) or a rate (whole bytes per second).
        raw: Percent, or MiB per second.
    """
    if not math.isfinite(raw):
        return None, False
    if field not in _RATES:
        return ratio_in_range(field, raw / 100)
    return (None, True) if raw < -_NOISE_MIB else (max(0, round(raw * _MIB)), raw < 0)


class Sampler:
    """Two sample buffers of one GPU or MIG instance, swapped at each sample.

    Args:
        take: Fills a sample of the entity, e.g. ``pynvml.nvmlGpmSampleGet`` of its handle.
        level: Level of the entity.
        driver: The driver's session.
    """

    def __init__(self, take: Callable[[Any], object], level: GpmLevel, driver: Driver) -> None:
        self._take = take
        self._fields = fields_at(level, driver.fields)
        self._driver = driver
        self._retries = Retries(driver.count, "gpm_", counts_missing=True)
        self._known: dict[Field, int] = {}
        """Fields that the driver supported at the last check, with metric ids."""
        self._probe_pause = _SOON_SECONDS
        self._old: Any = None
        self._new: Any = None
        self._taken_at: float | None = None
        self._values: dict[Field, int | float] = {}
        self._metrics: Any = None

    def sample(self, now: float) -> Mapping[Field, int | float]:
        """Return the means since the previous sample; empty at the first one and if the driver reports none.

        Raises:
            pynvml.NVMLError: The device is lost or the driver is gone.
        """
        if not self._fields or not self._retries.is_due(_SAMPLE, now):
            return {}
        since = math.inf if self._taken_at is None else self._driver.clock() - self._taken_at
        if 0 <= since <= _MINIMUM_SECONDS:
            return self._values
        try:
            self._values = self._difference(now)
        except pynvml.NVMLError as error:
            self.begin_again()
            self._retries.failed(_SAMPLE, error, now)
        return self._values

    def begin_again(self) -> None:
        """Drop means that include a time in which the device was down."""
        self._taken_at = None
        self._values = {}

    def close(self) -> None:
        """Free the buffers; call it before the shutdown of the driver or the loss of the instance's handle."""
        for sample in (self._old, self._new):
            if sample is not None:
                try:
                    pynvml.nvmlGpmSampleFree(sample)
                except pynvml.NVMLError:
                    # Already freed with its device or driver.
                    continue
        self._old = self._new = None
        self.begin_again()

    def _difference(self, now: float) -> dict[Field, int | float]:
        if self._old is None:
            self._old, self._new = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
            self._metrics = pynvml.c_nvmlGpmMetricsGet_t()
        self._take(self._new)
        before, self._taken_at = self._taken_at, self._driver.clock()
        usable = before is not None and 0 < self._taken_at - before <= self._driver.oldest_seconds
        values = self._read(now) if usable else {}
        self._old, self._new = self._new, self._old
        return values

    def _read(self, now: float) -> dict[Field, int | float]:
        if self._retries.is_due(_PROBE, now):
            self._probe(now)
        raw = self._ask(list(self._known.values())) if self._known else {}
        values: dict[Field, int | float] = {}
        for field, metric in self._known.items():
            code, number = raw[metric]
            if code != 0:
                continue
            value, clamped = convert(field, number)
            if clamped:
                self._driver.count("gpm_clamped")
            if value is not None:
                values[field] = value
        return values

    def _ask(self, metric_ids: list[int]) -> dict[int, tuple[int, float]]:
        """Return (return code, raw value) by metric id, for the difference of the two samples."""
        request = self._metrics
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metric_ids)
        request.sample1, request.sample2 = self._old, self._new
        for slot, metric in zip(request.metrics, metric_ids, strict=False):
            slot.metricId, slot.nvmlReturn, slot.value = metric, 0, math.nan
        pynvml.nvmlGpmMetricsGet(request)
        return {slot.metricId: (slot.nvmlReturn, slot.value) for slot in request.metrics[: len(metric_ids)]}

    def _probe(self, now: float) -> None:
        """Find the metrics that the driver supports, because some drivers refuse a whole call for one unknown id.

        A refused metric is tried again later, since a single refusal does not mean that it is unknown.
        """
        known = dict(self._known)
        for field, metric in self._fields.items():
            if field in known:
                continue
            try:
                code = self._ask([metric])[metric][0]
            except pynvml.NVMLError as error:
                code = library.code_unless_fatal(error)
            if code not in (
                pynvml.NVML_ERROR_NOT_SUPPORTED,
                pynvml.NVML_ERROR_INVALID_ARGUMENT,
                pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            ):
                known[field] = metric
        self._known = known
        self._retries.put_off(_PROBE, math.inf if len(known) == len(self._fields) else now + self._probe_pause)
        self._probe_pause = min(2 * self._probe_pause, _RETRY_SECONDS)


_MPS_LIST = "nvmlDeviceGetMPSComputeRunningProcesses_v3"
_GRAPHICS_LIST = "nvmlDeviceGetGraphicsRunningProcesses_v3"
_LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", _GRAPHICS_LIST, _MPS_LIST)
_SAMPLES = "samples"
_NO_SUCH_LIST = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT}
)
"""Codes that mean an empty process list; after any other code, processes may be missing."""
_NO_VALUE = 2**64 - 1
_SUCCESS = 0
_ATTEMPTS = 3
_FIRST_ROOM, _MOST_ROOM = 8, 1 << 16
_PERCENT = 100
_ENGINES = ("smUtil", "encUtil", "decUtil", "jpgUtil", "ofaUtil")


class _LongProcessInfo(ctypes.Structure):
    """Process record of R535 drivers up to about 535.86, which is 8 bytes longer under the same function name."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
        ("usedGpuCcProtectedMemory", ctypes.c_ulonglong),
    )


class ProcessSample(NamedTuple):
    """One record of the driver's utilisation ring."""

    pid: int
    timestamp_us: int
    """Time in microseconds of the driver's clock."""
    percents: tuple[int | None, ...]
    """Use of each of ``_ENGINES``; ``None`` for the last two if only the call from before R550 answers."""


def record_type() -> type[ctypes.Structure]:
    """Return the layout of a process record in the loaded library.

    The drivers between the two symbols are exactly those with the long record.
    """
    long = library.function("nvmlDeviceGetConfComputeMemSizeInfo") is not None
    fixed = library.function("nvmlDeviceGetRunningProcessDetailList") is not None
    if long and not fixed:
        return _LongProcessInfo
    layout: type[ctypes.Structure] = pynvml.c_nvmlProcessInfo_v3_t
    return layout


def good_samples(samples: Iterable[ProcessSample], last_us: int) -> list[ProcessSample]:
    """Return samples without unfilled slots: the driver returns more slots than samples, with garbage in them."""
    return [
        one
        for one in samples
        if one.pid != 0
        and one.timestamp_us > last_us
        and all(percent is None or 0 <= percent <= _PERCENT for percent in one.percents)
    ]


class Poller:
    """Polls the processes of one GPU or MIG instance.

    Args:
        handle: Handle of the GPU or MIG instance.
        driver: The driver's session.
        utilisation: Whether the driver has utilisation samples for it; there are none for MIG instances.
    """

    def __init__(self, handle: Handle, driver: Driver, *, utilisation: bool) -> None:
        self._handle = handle
        self._record = driver.record
        self._retries = Retries(driver.count, "processes_")
        if not utilisation:
            self._retries.put_off(_SAMPLES, math.inf)
        self._last_us: int | None = None
        """Time of the newest sample so far; ``None`` before the first answer."""
        self._unsampled: tuple[int | None, ...] = (None,) * len(_ENGINES)
        """Percents of a process without a sample; the ring leaves out idle processes."""
        self._failed_lists: set[str] = set()
        """Existing lists whose last request failed."""
        self._mps_clients: frozenset[int] = frozenset()
        self._hides: bool | None = None
        """Whether the last answer listed no process while memory was in use."""
        self._room = dict.fromkeys(_LISTS, _FIRST_ROOM)
        """Number of records of the first attempt, usually enough for all processes."""

    def poll(self, now: float, memory_used_mib: float = 0.0) -> tuple[ProcessUse, ...] | None:
        """Return the current processes; ``None`` if the driver does not report them.

        A process with samples that is no longer listed has ended since the last poll, and is reported once more.

        Args:
            now: Seconds; only differences matter.
            memory_used_mib: Memory in use on the device. If it is more than the driver needs, an empty list is not
                reliable.

        Raises:
            pynvml.NVMLError: The device is lost or the driver is gone.
        """
        clients_before, self._mps_clients = self._mps_clients, frozenset()
        lists = self._lists(now)
        if lists is None:
            return None
        self._mps_clients = frozenset(lists.get(_MPS_LIST, ()))
        memory: dict[int, int | None] = {}
        for pid, used in chain.from_iterable(one.items() for one in lists.values()):
            # A process with both compute and graphics contexts is in two lists, with the same memory.
            known = memory.get(pid)
            memory[pid] = used if known is None else max(known, used or 0)
        samples = self._samples(now)
        hides = not memory and memory_used_mib >= NO_PROCESS_MEMORY_MIB
        if self._hides not in {None, hides}:
            # The driver has lost its process list, or has it again. Samples cover only a part of the time, and a
            # process without a sample may have been busy in the rest.
            samples = None
        self._hides = hides
        result = []
        for pid in sorted({*memory, *(samples or ())}):
            percents = (None,) * len(_ENGINES) if samples is None else samples.get(pid, self._unsampled)
            sm, enc, dec, jpg, ofa = (None if one is None else one / _PERCENT for one in percents)
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
                    graphics=pid in lists.get(_GRAPHICS_LIST, ()),
                )
            )
        return tuple(result)

    def _lists(self, now: float) -> dict[str, dict[int, int | None]] | None:
        """Return memory by pid of each list, or ``None`` if an existing list could not be read.

        A process that an incomplete list lacks would look unused.
        """
        found: dict[str, dict[int, int | None]] = {}
        for name in _LISTS:
            if not self._retries.is_due(name, now):
                continue
            try:
                found[name] = self._ask_list(name)
            except pynvml.NVMLError as error:
                self._retries.failed(name, error, now)
                if library.code_of(error) not in _NO_SUCH_LIST:
                    self._failed_lists.add(name)
            else:
                self._failed_lists.discard(name)
        return found if found and not self._failed_lists else None

    def _ask_list(self, name: str) -> dict[int, int | None]:
        call = library.function(name)
        if call is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        code = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
        for _ in range(_ATTEMPTS):
            size = ctypes.c_uint(self._room[name])
            records = (self._record * size.value)()
            code = call(self._handle, ctypes.byref(size), records)
            if code == _SUCCESS:
                return {
                    one.pid: None if one.usedGpuMemory == _NO_VALUE else one.usedGpuMemory
                    for one in records[: min(size.value, len(records))]
                    if one.pid
                }
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            # With room for processes that start in the meantime.
            self._room[name] = min(size.value * 2 + 5, _MOST_ROOM)
        raise pynvml.NVMLError(code)

    def _samples(self, now: float) -> dict[int, tuple[int | None, ...]] | None:
        """Return the percents since the last poll by pid; ``None`` if the driver has none."""
        if not self._retries.is_due(_SAMPLES, now):
            return None
        first, last_us = self._last_us is None, self._last_us or 0
        try:
            samples = good_samples(self._ask_samples(last_us), last_us)
        except pynvml.NVMLError as error:
            self._retries.failed(_SAMPLES, error, now)
            return None
        self._last_us = max((one.timestamp_us for one in samples), default=last_us)
        # The first answer contains the whole ring, which covers the last ten seconds.
        return None if first else {one.pid: one.percents for one in samples}

    def _ask_samples(self, last_us: int) -> list[ProcessSample]:
        code = pynvml.NVML_ERROR_NOT_SUPPORTED
        newer = pynvml.nvmlDeviceGetProcessesUtilizationInfo
        for call in (newer, pynvml.nvmlDeviceGetProcessUtilization):
            self._unsampled = (0,) * 5 if call is newer else (0, 0, 0, None, None)
            for _ in range(_ATTEMPTS):
                try:
                    rows = call(self._handle, last_us)
                except pynvml.NVMLError as error:
                    code = library.code_of(error)
                    if code in (_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND):
                        return []
                    if code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                        # More processes have started since the first of the binding's two calls.
                        continue
                    if code in library.UNAVAILABLE or code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
                        # The older call may exist.
                        break
                    raise
                return [
                    ProcessSample(row.pid, row.timeStamp, tuple(getattr(row, name, None) for name in _ENGINES))
                    for row in rows
                ]
        raise pynvml.NVMLError(code)

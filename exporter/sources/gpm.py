"""GPU Performance Monitoring (Hopper and later): true means of engine activity between two samples."""

import math
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any

import pynvml

from exporter.model import CODECS, DECODERS, FLOW_ENGINES, JPEG_DECODERS, Field
from exporter.sources import driver

_MIB = 2**20
_MINIMUM_SECONDS = 0.1
"""Two samples that are closer give nonsense (a hard limit of the hardware's counters)."""
OLDEST_SECONDS = 60.0
"""A mean over longer than this says nothing about now, unless the user samples as rarely: start again."""
_RETRY_SECONDS = 600.0
_SOON_SECONDS = 10.0
"""Until the next attempt where the driver refused for a reason that may pass; doubles up to ``_RETRY_SECONDS``."""
_RATIO_DIGITS = 6
"""As DCGM's tools print ratios; what lies behind is noise of the division by percent."""
_ROUNDING = 1e-6
_NOISE_PERCENT = 1.0

METRICS: Mapping[Field, int] = {
    Field.PROF_GR_ENGINE_ACTIVE: 1,
    Field.PROF_SM_ACTIVE: 2,
    Field.PROF_SM_OCCUPANCY: 3,
    Field.PROF_PIPE_TENSOR_ACTIVE: 5,
    Field.PROF_DRAM_ACTIVE: 10,
    Field.PROF_PIPE_FP64_ACTIVE: 11,
    Field.PROF_PIPE_FP32_ACTIVE: 12,
    Field.PROF_PIPE_FP16_ACTIVE: 13,
    Field.PROF_PCIE_TX_BYTES: 20,
    Field.PROF_PCIE_RX_BYTES: 21,
    Field.PROF_NVLINK_TX_BYTES: 61,
    Field.PROF_NVLINK_RX_BYTES: 60,
    **dict(zip(DECODERS, range(30, 38), strict=True)),
    **dict(zip(JPEG_DECODERS, range(40, 48), strict=True)),
    **dict(zip(FLOW_ENGINES, range(50, 52), strict=True)),
}
"""Field to GPM metric id. Ratios come as percent, bytes per second as MiB per second."""

_RATES = frozenset(
    {
        Field.PROF_PCIE_TX_BYTES,
        Field.PROF_PCIE_RX_BYTES,
        Field.PROF_NVLINK_TX_BYTES,
        Field.PROF_NVLINK_RX_BYTES,
    }
)


class Level(Enum):
    """What a sampler watches; decides which metrics mean something."""

    GPU = auto()
    GPU_INSTANCE = auto()
    """A whole MIG GPU instance: no PCIe, no NVLink."""
    COMPUTE_INSTANCE = auto()
    """One of several compute instances of a GPU instance: no memory bandwidth either."""


class Support:
    """Whether a GPU has GPM at all: asked until the driver has answered.

    Args:
        handle: Of the GPU.
        count: Called with the reason of each failure.
    """

    def __init__(self, handle: Any, count: Callable[[str], None]) -> None:  # noqa: ANN401 - a handle is whatever pynvml gave
        self._handle = handle
        self._count = count
        self._answer: bool | None = None
        self._not_before = -math.inf

    def known(self, now: float) -> bool:
        """Return whether GPM is known to be there.

        Raises:
            pynvml.NVMLError: the GPU is lost or the driver is gone.
        """
        if self._answer is None and now >= self._not_before:
            try:
                self._answer = bool(pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
            except pynvml.NVMLError as error:
                code = driver.code_of(error)
                if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
                    raise
                unavailable = code in driver.UNAVAILABLE
                if not unavailable:
                    self._count(f"gpm_{driver.reason_of(code)}")
                self._not_before = now + (_RETRY_SECONDS if unavailable else _SOON_SECONDS)
        return bool(self._answer)


def fields_at(level: Level, fields: Iterable[Field]) -> dict[Field, int]:
    """Return the wanted fields that exist at a level, with their metric ids.

    The codecs of an instance are always wanted: nothing else measures them. Of a whole GPU NVML has their utilisation;
    rows of a collectors file for each of their units are DCGM's.
    """
    wanted = frozenset(fields)
    wanted = wanted - CODECS if level is Level.GPU else (wanted | CODECS) - _RATES
    if level is Level.COMPUTE_INSTANCE:
        wanted -= {Field.PROF_DRAM_ACTIVE}
    return {field: metric for field, metric in METRICS.items() if field in wanted}


def convert(field: Field, raw: float) -> tuple[int | float | None, bool]:
    """Return a metric in the field's unit, and whether it was out of what is possible.

    Below zero it is absent: a counter began anew between the samples, as with a MIG instance that was made again in
    place of another, and 0 would say that the device was idle. What is less than a hundredth below is noise.

    Args:
        field: A ratio (0..1) or a rate (whole bytes per second).
        raw: Percent, or MiB per second.
    """
    if not math.isfinite(raw):
        return None, False
    if raw < -_NOISE_PERCENT:
        return None, True
    if field in _RATES:
        return max(0, round(raw * _MIB)), raw < 0
    ratio = raw / 100
    return round(min(1.0, max(0.0, ratio)), _RATIO_DIGITS), not -_ROUNDING <= ratio <= 1 + _ROUNDING


class Sampler:
    """Two sample buffers of one GPU or MIG instance, swapped at each sample.

    Args:
        take: Fills a sample of the entity, e.g. ``pynvml.nvmlGpmSampleGet`` of its handle.
        fields: Wanted fields and their metric ids, from ``fields_at``.
        count: Called with the reason of everything that goes wrong.
        oldest_seconds: The longest time over which a mean is still told.
        took: Seconds since the ``now`` of ``sample``, for the driver may be silent for any part of it.
        supported: Returns whether the GPU is known to have GPM at a time, as ``now`` of ``sample``.
    """

    def __init__(
        self,
        take: Callable[[Any], object],
        fields: Mapping[Field, int],
        count: Callable[[str], None],
        *,
        oldest_seconds: float = OLDEST_SECONDS,
        took: Callable[[], float] = lambda: 0.0,
        supported: Callable[[float], bool] = lambda _now: True,
    ) -> None:
        self._take = take
        self._fields = dict(fields)
        self._known: dict[Field, int] = {}
        """Those that this driver was last found to know."""
        self._probe_at = -math.inf
        self._probe_pause = _SOON_SECONDS
        self._supported = supported
        self._count = count
        self._oldest_seconds = oldest_seconds
        self._took = took
        self._old: Any = None
        self._new: Any = None
        self._taken_at: float | None = None
        self._values: dict[Field, int | float] = {}
        self._not_before = -math.inf
        self._metrics: Any = None

    def sample(self, now: float) -> Mapping[Field, int | float]:
        """Return the means since the previous sample; empty at the first one and where the driver will not tell.

        Raises:
            pynvml.NVMLError: the device is lost or the driver is gone.
        """
        if not self._fields or now < self._not_before or not self._supported(now):
            return {}
        since = math.inf if self._taken_at is None else now + self._took() - self._taken_at
        if 0 <= since <= _MINIMUM_SECONDS:
            return self._values
        try:
            self._values = self._difference(now)
        except pynvml.NVMLError as error:
            self._give_up(error, now)
        return self._values

    def begin_anew(self) -> None:
        """Tell no mean of a time in which the device was down, for that says little of what it does now."""
        self._taken_at = None
        self._values = {}

    def close(self) -> None:
        """Free the buffers; to be called before the driver is shut down or the instance's handle is dropped."""
        for sample in (self._old, self._new):
            if sample is not None:
                try:
                    pynvml.nvmlGpmSampleFree(sample)
                except pynvml.NVMLError:
                    # Gone with its device or driver; nothing is left to free.
                    continue
        self._old = self._new = None
        self.begin_anew()

    def _difference(self, now: float) -> dict[Field, int | float]:
        if self._old is None:
            self._old, self._new = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
            self._metrics = pynvml.c_nvmlGpmMetricsGet_t()
        self._take(self._new)
        before, self._taken_at = self._taken_at, now + self._took()
        usable = before is not None and 0 < self._taken_at - before <= self._oldest_seconds
        values = self._read(now) if usable else {}
        self._old, self._new = self._new, self._old
        return values

    def _read(self, now: float) -> dict[Field, int | float]:
        if now >= self._probe_at:
            self._probe(now)
        raw = self._ask(list(self._known.values())) if self._known else {}
        values: dict[Field, int | float] = {}
        for field, metric in self._known.items():
            code, number = raw[metric]
            if code != 0:
                continue
            value, clamped = convert(field, number)
            if clamped:
                self._count("gpm_clamped")
            if value is not None:
                values[field] = value
        return values

    def _ask(self, metric_ids: list[int]) -> dict[int, tuple[int, float]]:
        """Return (return code, raw value) by metric id, of the difference new - old."""
        request = self._metrics
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metric_ids)
        request.sample1, request.sample2 = self._old, self._new
        for slot, metric in zip(request.metrics, metric_ids, strict=False):
            slot.metricId, slot.nvmlReturn, slot.value = metric, 0, math.nan
        pynvml.nvmlGpmMetricsGet(request)
        return {slot.metricId: (slot.nvmlReturn, slot.value) for slot in request.metrics[: len(metric_ids)]}

    def _probe(self, now: float) -> None:
        """Find the metrics that this driver knows: some drivers refuse a whole call for one unknown id.

        One that is refused is asked for again later: a single refusal does not say that it is unknown for good.
        """
        known = {}
        for field, metric in self._fields.items():
            try:
                code = self._ask([metric])[metric][0]
            except pynvml.NVMLError as error:
                code = driver.code_of(error)
                if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
                    raise
            if code not in (driver.NOT_SUPPORTED, driver.INVALID_ARGUMENT, driver.FUNCTION_NOT_FOUND):
                known[field] = metric
        self._known = known
        self._probe_at = math.inf if len(known) == len(self._fields) else now + self._probe_pause
        self._probe_pause = min(2 * self._probe_pause, _RETRY_SECONDS)

    def _give_up(self, error: pynvml.NVMLError, now: float) -> None:
        code = driver.code_of(error)
        self.begin_anew()
        if code == driver.GPU_IS_LOST or code in driver.DRIVER_GONE:
            raise error
        self._count(f"gpm_{driver.reason_of(code)}")
        if code in driver.UNAVAILABLE:
            self._not_before = now + _RETRY_SECONDS

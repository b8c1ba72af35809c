from collections.abc import Callable

import pynvml
import pytest
from driver_support import code_of, gpu, instance, load, partitioned, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_simulator.truth import Load


def _request(old: object, new: object, *metrics: int) -> object:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics, request.sample1, request.sample2 = len(metrics), old, new
    for slot, metric in zip(request.metrics, metrics, strict=False):
        slot.metricId = metric
    return request


def _values(old: object, new: object, *metrics: int) -> list[float | int]:
    """Value per metric, or the negative return code."""
    answer = pynvml.nvmlGpmMetricsGet(_request(old, new, *metrics))
    return [m.value if m.nvmlReturn == 0 else -m.nvmlReturn for m in answer.metrics[: len(metrics)]]


def _sampled(take: Callable[[object], object]) -> object:
    sample = pynvml.nvmlGpmSampleAlloc()
    take(sample)
    return sample


_integral = st.builds(
    Load, **dict.fromkeys(("engine", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16"), st.floats(0, 1e6))
)
_ids = {1: "engine", 2: "sm", 3: "occupancy", 5: "tensor", 10: "dram", 11: "fp64", 12: "fp32", 13: "fp16"}


@settings(deadline=None)
@given(_integral, _integral, st.floats(0.2, 3600))
def test_a_metric_is_the_mean_between_its_two_samples(before: Load, after: Load, seconds: float) -> None:
    with simulated(gpu(0, load_integral=before)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 1
        old = _sampled(lambda sample: pynvml.nvmlGpmSampleGet(handle, sample))
        node.change(at=100.0 + seconds, load_integral=after)
        new = _sampled(lambda sample: pynvml.nvmlGpmSampleGet(handle, sample))
        for value, name in zip(_values(old, new, *_ids), _ids.values(), strict=True):
            mean = (getattr(after, name) - getattr(before, name)) / (node.truth.at_seconds - 100.0)
            assert value == pytest.approx(mean * 100, abs=1e-9)


def test_an_instance_is_measured_by_its_handle_and_by_its_gpu_instance() -> None:
    first = instance(2, "1c.3g.40gb", compute_instance=0)
    second = instance(2, "2c.3g.40gb", compute_instance=1)
    with simulated(partitioned(first, second)) as node:
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)
        old = _sampled(lambda sample: pynvml.nvmlGpmSampleGet(mig, sample))
        old_whole = _sampled(lambda sample: pynvml.nvmlGpmMigSampleGet(parent, 2, sample))
        busy = instance(2, "1c.3g.40gb", load_integral=load(engine=0.9, sm=0.3))
        node.change(at=101.0, instances=(busy, second))
        new = _sampled(lambda sample: pynvml.nvmlGpmSampleGet(mig, sample))
        new_whole = _sampled(lambda sample: pynvml.nvmlGpmMigSampleGet(parent, 2, sample))
        assert _values(old, new, 1, 2) == pytest.approx([90.0, 30.0])
        assert _values(old, new, 20) == [-pynvml.NVML_ERROR_NOT_SUPPORTED]
        assert _values(old_whole, new_whole, 1, 2) == pytest.approx([30.0, 10.0])
        assert code_of(pynvml.nvmlGpmMigSampleGet, parent, 5, new) == pynvml.NVML_ERROR_NOT_FOUND
        mixed = _request(old, new_whole, 1)
        assert code_of(pynvml.nvmlGpmMetricsGet, mixed) == pynvml.NVML_ERROR_INVALID_ARGUMENT

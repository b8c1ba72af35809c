"""Engine activity through GPM: true means over the time between two samples, and no value without samples."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pynvml
import pytest
from driver_support import H100, T4, gpu, instance, load, partitioned, session, simulated
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpu.nvml import activity
from exporter.gpu.nvml.source import NvmlSource
from exporter.model.devices import DeviceState
from exporter.model.fields import CODECS, DECODERS, FLOW_ENGINES, JPEG_DECODERS, PIPES, Field
from gpu_simulator import driver as simulated_driver
from gpu_simulator.truth import Fault

ENGINE = Field.PROF_GR_ENGINE_ACTIVE
RATES = [field for field in activity.METRICS if field.name.endswith("_BYTES")]
RATIOS = [field for field in activity.METRICS if field not in RATES]
EVERYTHING = frozenset(activity.METRICS)
READ = EVERYTHING | {Field.FB_USED}
"""A GPU that answers GPM alone counts as down."""


@given(st.sampled_from(RATIOS), st.floats(allow_nan=True, allow_infinity=True))
def test_ratio_is_between_0_and_1_and_clamping_is_reported(field: Field, raw: float) -> None:
    value, clamped = activity.convert(field, raw)
    if not math.isfinite(raw):
        assert (value, clamped) == (None, False)
        return
    if raw < -1:
        assert (value, clamped) == (None, True), "a restarted counter is not an idle device"
        return
    if field in {*PIPES, Field.PROF_DRAM_ACTIVE} and raw > 105:
        assert (value, clamped) == (None, True), "a pipe cannot be used above its limit"
        return
    assert value is not None
    assert 0 <= value <= 1
    if 0 <= raw <= 100:
        assert not clamped
        assert value == pytest.approx(raw / 100, abs=5e-7)
    assert value == round(value, 6), "float noise of the division is not a measurement"
    if raw > 101:
        assert clamped


@given(st.sampled_from(RATES), st.floats(0, 1e7))
def test_rate_is_integer_bytes_per_second(field: Field, mebibytes: float) -> None:
    value, clamped = activity.convert(field, mebibytes)
    assert isinstance(value, int)
    assert value == pytest.approx(mebibytes * 2**20, abs=1)
    assert not clamped


def test_first_sample_has_no_mean_and_the_second_has_the_mean_between() -> None:
    with simulated(gpu(load_integral=load(engine=10.0, nvlink_tx_bytes_per_second=0.0)), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        assert ENGINE not in source.sample(100.0).gpus[0].values
        node.change(at=104.0, load_integral=load(engine=11.0, nvlink_tx_bytes_per_second=4 * 2**20))
        values = source.sample(104.0).gpus[0].values
        assert values[ENGINE] == pytest.approx(0.25)
        assert values[Field.PROF_NVLINK_TX_BYTES] == 2**20
        assert set(values) >= EVERYTHING - CODECS
        source.close()


def test_samples_within_100_ms_give_the_same_value() -> None:
    with simulated(gpu(), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        source.sample(100.0)
        node.change(at=101.0, load_integral=load(engine=0.5))
        assert source.sample(101.0).gpus[0].values[ENGINE] == pytest.approx(0.5)
        node.change(at=101.05, load_integral=load(engine=0.55))
        assert source.sample(101.05).gpus[0].values[ENGINE] == pytest.approx(0.5)
        source.close()


def test_clock_set_back_restarts_the_mean() -> None:
    with simulated(gpu(), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        source.sample(100.0)
        node.change(at=101.0, load_integral=load(engine=0.5))
        assert ENGINE not in source.sample(90.0).gpus[0].values
        node.change(at=102.0, load_integral=load(engine=0.75))
        assert source.sample(91.0).gpus[0].values[ENGINE] == pytest.approx(0.25)
        source.close()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_ERROR, Fault.RESET_REQUIRED, Fault.GPU_LOST])
def test_mean_does_not_cover_device_downtime(fault: Fault) -> None:
    """The GPU was idle during its failure, so a mean over that time would show an idle GPU after it."""
    with simulated(gpu(0), partitioned(instance(1), index=1), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        source.sample(100.0)
        for index in (0, 1):
            node.change(index, at=101.0, fault=fault)
        source.sample(101.0)
        for index in (0, 1):
            node.change(index, at=113.0, fault=None)
        back = source.sample(113.0).gpus
        assert [one.state for one in back] == [DeviceState.UP, DeviceState.UP]
        assert ENGINE not in back[0].values
        assert [ENGINE in one.values for one in back[1].instances] == [False]
        node.change(0, at=114.0, load_integral=load(engine=0.9))
        after = source.sample(114.0).gpus
        assert after[0].values[ENGINE] == pytest.approx(0.9)
        assert [ENGINE in one.values for one in after[1].instances] == [True]
        source.close()


def test_mean_does_not_cover_the_absence_of_an_instance() -> None:
    """The instance returns under its UUID; its counters have restarted and happen to be as high as before."""
    with simulated(partitioned(instance(1), instance(2)), init=False) as node:
        simulated_driver.fail("nvmlEventSetCreate", pynvml.NVML_ERROR_NOT_SUPPORTED)
        source = NvmlSource(READ)
        source.open()
        busy = instance(1, load_integral=load(engine=0.1, decode=0.9))
        for at, parts in ((100.0, (busy, instance(2))), (101.0, (instance(2),)), (102.0, (busy, instance(2)))):
            node.change(at=at, instances=parts)
            reading = source.sample(at)
        found = {part.instance.uuid: part.values for part in reading.gpus[0].instances}
        assert ENGINE not in found[busy.uuid]
        assert DECODERS[0] not in found[busy.uuid]
        source.close()
        simulated_driver.clear_failures()


def test_mean_over_minutes_is_absent() -> None:
    with simulated(gpu(), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        source.sample(100.0)
        node.change(at=400.0, load_integral=load(engine=150.0))
        assert ENGINE not in source.sample(400.0).gpus[0].values
        source.close()


def test_two_minute_sample_interval_gives_two_minute_means() -> None:
    with simulated(gpu(), init=False) as node:
        source = NvmlSource(READ, interval_seconds=120.0)
        source.open()
        source.sample(100.0)
        node.change(at=225.0, load_integral=load(engine=50.0))
        assert source.sample(225.0).gpus[0].values[ENGINE] == pytest.approx(0.4)
        source.close()


def test_each_mig_instance_has_its_own_engine_and_no_board_rates() -> None:
    with simulated(partitioned(instance(1), instance(2)), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        source.sample(100.0)
        busy = instance(1, load_integral=load(engine=1.5, dram=0.5))
        node.set(partitioned(busy, instance(2)), at=102.0)
        first, second = source.sample(102.0).gpus[0].instances
        assert first.values[ENGINE] == pytest.approx(0.75)
        assert first.values[Field.PROF_DRAM_ACTIVE] == pytest.approx(0.25)
        assert second.values[ENGINE] == 0.0
        assert not set(RATES) & set(first.values)
        source.close()


def test_codecs_of_an_instance_are_read_regardless_of_the_requested_fields() -> None:
    with simulated(partitioned(instance(3), instance(5)), init=False) as node:
        source = NvmlSource(frozenset({Field.FB_USED}))
        source.open()
        source.sample(100.0)
        decoding = load(decode=1.8, jpeg=0.4, optical_flow=0.2)
        node.change(at=102.0, instances=(instance(3, load_integral=decoding), instance(5)))
        first, second = (part.values for part in source.sample(102.0).gpus[0].instances)
        measured = (DECODERS[0], JPEG_DECODERS[0], FLOW_ENGINES[0])
        assert [first[unit] for unit in measured] == pytest.approx([0.9, 0.2, 0.1])
        assert [second[unit] for unit in measured] == [0.0, 0.0, 0.0]
        assert CODECS & set(first) == set(measured), "a unit that the instance lacks is absent"
        source.close()


def test_compute_instance_has_no_memory_bandwidth() -> None:
    level = activity.GpmLevel.COMPUTE_INSTANCE
    assert Field.PROF_DRAM_ACTIVE not in activity.fields_at(level, EVERYTHING)
    assert ENGINE in activity.fields_at(level, EVERYTHING)
    assert Field.PROF_DRAM_ACTIVE in activity.fields_at(activity.GpmLevel.GPU_INSTANCE, EVERYTHING)


def test_gpu_without_gpm_has_no_engine_values_and_no_errors() -> None:
    with simulated(gpu(model=T4), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        source.sample(100.0)
        node.change(at=101.0)
        reading = source.sample(101.0)
        assert not EVERYTHING & set(reading.gpus[0].values)
        assert reading.errors == {}
        source.close()


@pytest.mark.parametrize(("code", "reason"), [(3, "gpm_not_supported"), (4, "gpm_no_permission")])
def test_refused_sample_is_counted_and_not_retried_in_the_next_sample(code: int, reason: str) -> None:
    with simulated(gpu(model=replace(H100)), init=False) as node:
        source = NvmlSource(READ)
        source.open()
        simulated_driver.fail("nvmlGpmSampleGet", code)
        assert source.sample(100.0).errors == {reason: 1}
        node.change(at=101.0)
        reading = source.sample(101.0)
        assert reading.errors == {}
        assert Field.FB_USED in reading.gpus[0].values
        source.close()


class Scripted(activity.Sampler):
    """A driver that answers 50 percent, except for some metrics; one of these can make it refuse the whole call."""

    refused: frozenset[int] = frozenset()
    whole_call = False
    asked: list[int]

    def at(self, now: float) -> dict[Field, float]:
        """Sample at a time; return the metrics of the multiprocessors and the memory."""
        self.seconds = now
        return {field: value for field, value in self.sample(now).items() if field in SCRIPTED}

    def _ask(self, metric_ids: list[int]) -> dict[int, tuple[int, float]]:
        self.asked = metric_ids
        if self.whole_call and self.refused.intersection(metric_ids):
            raise pynvml.NVMLError(2)
        return {one: (2 if one in self.refused else 0, 50.0) for one in metric_ids}


SCRIPTED = (ENGINE, Field.PROF_SM_ACTIVE, Field.PROF_DRAM_ACTIVE)
DRAM = activity.METRICS[Field.PROF_DRAM_ACTIVE]


@contextmanager
def scripted(counted: list[str]) -> Iterator[Scripted]:
    with simulated(gpu()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        take = partial(pynvml.nvmlGpmSampleGet, handle)
        driver = session(*SCRIPTED, count=counted.append, clock=lambda: sampler.seconds)
        sampler = Scripted(take, activity.GpmLevel.GPU, driver)
        yield sampler
        sampler.close()


def test_metrics_unknown_to_the_driver_are_left_out() -> None:
    counted: list[str] = []
    with scripted(counted) as sampler:
        sampler.refused, sampler.whole_call = frozenset({DRAM}), True
        assert sampler.at(1.0) == {}
        assert sampler.at(2.0) == {ENGINE: 0.5, Field.PROF_SM_ACTIVE: 0.5}
        assert sampler.at(3.0) == {ENGINE: 0.5, Field.PROF_SM_ACTIVE: 0.5}
        assert DRAM not in sampler.asked
    assert counted == []


def test_refused_metric_is_requested_again() -> None:
    with scripted([]) as sampler:
        sampler.refused = frozenset({DRAM})
        sampler.at(1.0)
        assert Field.PROF_DRAM_ACTIVE not in sampler.at(2.0)
        sampler.refused = frozenset()
        assert Field.PROF_DRAM_ACTIVE not in sampler.at(3.0)
        assert sampler.at(13.0) == dict.fromkeys(SCRIPTED, 0.5)

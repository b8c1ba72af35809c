"""The wall clock of a node steps while its GPUs are sampled: no wait depends on it, and no holder becomes idle."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from driver_support import Node, gpu, load, process, simulated

from exporter.gpu.nvml.source import NvmlSource
from exporter.model.devices import DeviceState, GpuReading
from exporter.model.fields import Field
from gpu_simulator import driver
from gpu_simulator.truth import Fault, GpuTruth, NodeTruth

HOUR = 3600.0
EPOCH = 1_700_000_000.0
Sample = Callable[[float, float], GpuReading]
BUSY = gpu(load=load(engine=0.9, utilisation=0.9), processes=(process(1, sm=0.5), process(2, sm=0.4)))


@contextmanager
def sampled(one: GpuTruth) -> Iterator[tuple[Node, Sample]]:
    """Yield a node of one GPU and a sampler: a sample some seconds later, with an offset of the wall clock."""
    with simulated(one, init=False) as node:
        source = NvmlSource(frozenset(Field), clock=lambda: node.truth.at_seconds)
        source.open()

        def sample(later: float, off: float) -> GpuReading:
            node.set(at=node.truth.at_seconds + later)
            driver.set_epoch(EPOCH + off)
            return source.sample(EPOCH + node.truth.at_seconds + off).gpus[0]

        try:
            yield node, sample
        finally:
            source.close()


def test_failed_gpu_is_retried_on_time_after_the_clock_is_set_back() -> None:
    with sampled(gpu()) as (node, sample):
        assert sample(1.0, HOUR).state is DeviceState.UP
        node.change(fault=Fault.GPU_LOST)
        assert sample(1.0, HOUR).state is DeviceState.LOST
        node.change(fault=None)
        assert sample(1.0, 0.0).state is DeviceState.LOST
        assert sample(10.0, 0.0).state is DeviceState.UP


def test_driver_opened_without_a_gpu_is_reopened_after_the_clock_is_set_back() -> None:
    with sampled(gpu()) as (node, sample):
        sample(1.0, HOUR)
        node.change(fault=Fault.UNKNOWN_ERROR)
        states = [sample(1.0, HOUR).state for _ in range(4)]
        assert states[-1] is not DeviceState.UP
        node.change(fault=None)
        assert sample(5.0, -HOUR).state is DeviceState.UP


def test_processes_are_not_polled_sooner_after_the_clock_is_set_forward() -> None:
    """In a fifth of a second the driver has a sample of one of two processes only, and the other would seem idle."""
    with sampled(BUSY) as (_, sample):
        for _ in range(20):
            before = sample(0.25, 0.0)
        assert before.processes is not None
        assert all((one.sm_ratio or 0.0) > 0.2 for one in before.processes)
        for off in (HOUR, 2 * HOUR, 3 * HOUR):
            after = sample(0.2, off)
            assert after.processes is not None
            assert all((one.sm_ratio or 0.0) > 0.2 for one in after.processes)


def test_processes_stay_active_after_the_clock_is_set_back() -> None:
    with sampled(BUSY) as (_, sample):
        for _ in range(20):
            sample(0.25, 0.0)
        for _ in range(20):
            reported = sample(0.25, -HOUR).processes
            assert reported is not None
            assert all(one.sm_ratio is None or one.sm_ratio > 0.2 for one in reported)
        assert all(one.sm_ratio for one in reported)


def readings_between_silences() -> Iterator[GpuReading]:
    """Yield readings at an even load, every 0.15 s, of a driver that hangs for 3 s in every fifth sample."""
    at, silent_until = 100.0, 0.0

    def truth() -> NodeTruth:
        faults = {Fault.HANG: 0.0} if at < silent_until else {}
        one = replace(BUSY, load_integral=load(engine=0.9 * at, nvlink_tx_bytes_per_second=4.0e9 * at))
        return NodeTruth(at_seconds=at, node="simulated", driver_version="590.48.01", gpus=(one,), faults=faults)

    def sleep(seconds: float) -> None:
        nonlocal at
        at += seconds

    driver.install(truth, cache_seconds=0.0, monotonic=lambda: at, sleep=sleep)
    source = NvmlSource(frozenset(Field), clock=lambda: at)
    try:
        source.open()
        for _ in range(20):
            sleep(0.25)
            source.sample(EPOCH + at)
        for _ in range(10):
            sleep(2.0)
            silent_until = at + 3.0
            for _ in range(5):
                yield source.sample(EPOCH + at).gpus[0]
                sleep(0.15)
    finally:
        source.close()
        driver.uninstall()


def test_processes_are_not_polled_sooner_after_a_driver_hang_in_a_sample() -> None:
    """The process samples cover the time since the driver's last answer; in 0.2 s they have one process only."""
    for reported in readings_between_silences():
        assert reported.processes is not None
        assert all(one.sm_ratio is None or one.sm_ratio > 0.2 for one in reported.processes)


def test_rates_use_the_time_between_answers() -> None:
    for reported in readings_between_silences():
        assert reported.values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(0.9, abs=0.01)
        assert reported.values[Field.NVLINK_BANDWIDTH_TOTAL] == pytest.approx(4.0e9 / 1024 / 1000, rel=0.01)

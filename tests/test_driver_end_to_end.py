"""The NVML source over the simulated driver: its readings are the truth."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from driver_support import H100, MIB, T4, Node, gpu, instance, load, partitioned, process

from exporter.errors import SourceError
from exporter.gpu.nvml.source import NvmlSource
from exporter.model.devices import DeviceState, GpuReading, Reading
from exporter.model.fields import Field
from gpu_simulator import driver, scenario
from gpu_simulator.driver_devices import read
from gpu_simulator.truth import Fault, GpuTruth, NodeTruth

_ALL = frozenset(Field)
_EPOCH = 1_700_000_000.0
_START = 100.0
_NEEDS_TWO_SAMPLES = {field for field in Field if field.name.startswith("PROF_")} | {Field.NVLINK_BANDWIDTH_TOTAL}
_WHOLE_WATTS = {
    Field.POWER_MGMT_LIMIT,
    Field.POWER_MGMT_LIMIT_MIN,
    Field.POWER_MGMT_LIMIT_MAX,
    Field.POWER_MGMT_LIMIT_DEF,
    Field.ENFORCED_POWER_LIMIT,
}
_SINCE_590 = {field for field in Field if field.name.startswith("CLOCKS_EVENT_REASON_")}
_KIB = 1024
_DRIVER_FAULTS = (Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISMATCH, Fault.LIBRARY_MISSING)


@contextmanager
def _running(*gpus: GpuTruth) -> Iterator[tuple[Node, Callable[[float], Reading]]]:
    """Return a manual node and a function that reads it some seconds after the start."""
    node = Node(NodeTruth(at_seconds=_START, node="simulated", driver_version="590.48.01", gpus=gpus))
    driver.install(lambda: node.truth, cache_seconds=0.0, epoch_seconds=_EPOCH)
    source = NvmlSource(_ALL)
    try:
        source.open()

        def sample(seconds: float) -> Reading:
            node.set(at=_START + seconds)
            return source.sample(_EPOCH + _START + seconds)

        yield node, sample
    finally:
        source.close()
        driver.uninstall()


def _of(reading: Reading, index: int = 0) -> GpuReading:
    return next(one for one in reading.gpus if one.gpu.index == index)


def _expected(truth: GpuTruth, driver_version: str = "590.48.01") -> dict[Field, int | float]:
    """Return the expected values of a whole GPU: the truth, within the resolution of NVML's units."""
    expected = {}
    for field in Field:
        value = read(truth, field)
        if value is None or field in _NEEDS_TWO_SAMPLES or (field in _SINCE_590 and driver_version < "590"):
            continue
        if (field.name.startswith(("FB_", "BAR1_")) and field is not Field.FB_USED_PERCENT) or field in _WHOLE_WATTS:
            value = int(value)
        elif field in (Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL):
            value = value // _KIB * _KIB
        elif field in (Field.POWER_USAGE, Field.POWER_USAGE_INSTANT):
            value = round(value * 1000) / 1000
        elif field is Field.TOTAL_ENERGY_CONSUMPTION:
            value = round(value)
        expected[field] = value
    return expected


@pytest.mark.parametrize("model", [H100, T4])
def test_every_field_of_a_whole_gpu_is_read(model: object) -> None:
    truth = gpu(
        0,
        model=model,
        memory_temp_celsius=48 if model is H100 else None,
        power_watts=61.5,
        energy_joules=123456.789,
        gpu_temp_celsius=55,
        clock_event_reasons=0x4,
        performance_state=2,
        load=load(utilisation=0.42, memory_copy=0.2, encode=0.1, decode=0.3, jpeg=0.05, memory_used_bytes=777 * MIB),
        load_integral=load(pcie_tx_bytes_per_second=1e9, nvlink_tx_bytes_per_second=5e9),
        overrides={
            Field.ECC_SBE_AGG_TOTAL: 7,
            Field.PCIE_REPLAY_COUNTER: 9,
            Field.POWER_VIOLATION: 5_000_000,
            Field.RETIRED_SBE: 1,
            Field.UNCORRECTABLE_REMAPPED_ROWS: 3,
        },
    )
    with _running(truth) as (_, sample):
        reading = _of(sample(0))
    assert reading.state is DeviceState.UP
    expected = _expected(truth)
    assert {field: reading.values.get(field) for field in expected} == pytest.approx(expected)
    assert set(reading.values) == set(expected)
    assert reading.gpu.uuid == truth.uuid
    assert (reading.gpu.minor, reading.gpu.pci_bus_id) == (2, "00000000:17:00.0")
    assert reading.gpu.labels[Field.SERIAL] == truth.serial


def test_engine_activity_is_the_mean_over_the_interval() -> None:
    with _running(gpu(0)) as (node, sample):
        assert not _NEEDS_TWO_SAMPLES & set(_of(sample(0)).values)
        node.change(load_integral=load(engine=1.5, sm=0.5, tensor=0.25, pcie_tx_bytes_per_second=4e9))
        values = _of(sample(2)).values
    assert values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(0.75)
    assert values[Field.PROF_SM_ACTIVE] == pytest.approx(0.25)
    assert values[Field.PROF_PIPE_TENSOR_ACTIVE] == pytest.approx(0.125)
    assert values[Field.PROF_PCIE_TX_BYTES] == pytest.approx(2e9, rel=1e-6)


def test_instances_are_read_across_a_layout_change() -> None:
    big = instance(2, "3g.40gb", compute_slices=3, memory_slices=4, memory_bytes=40448 * MIB)
    small = instance(9, processes=(process(11),), load=load(memory_used_bytes=9 * MIB))
    with _running(partitioned(big, small)) as (node, sample):
        first = _of(sample(0))
        assert Field.GPU_UTIL not in first.values
        assert [one.instance.profile for one in first.instances] == ["3g.40gb", "1g.10gb"]
        assert [one.instance.memory_slices for one in first.instances] == [4, 1]
        assert first.instances[1].values[Field.FB_USED] == 9
        assert [one.pid for one in first.instances[1].processes or ()] == [11]
        node.change(instances=(instance(2, "3g.40gb", load_integral=load(engine=0.6)), small))
        second = _of(sample(1))
        assert second.instances[0].values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(0.6)
        assert second.instances[1].values[Field.PROF_GR_ENGINE_ACTIVE] == 0.0
        assert Field.PROF_PCIE_TX_BYTES not in second.instances[0].values
        node.change(instances=(small, instance(10)))
        for seconds in range(2, 12):
            last = _of(sample(seconds))
        assert [one.instance.uuid for one in last.instances] == [instance(10).uuid, small.uuid]


def test_processes_of_a_shared_gpu_get_their_activity() -> None:
    processes = (process(11, sm=0.6, memory=3 * MIB), process(12, sm=0.2), process(13))
    with _running(gpu(0, processes=processes, load=load(utilisation=0.8))) as (_, sample):
        sample(0)
        parts: dict[int, list[float]] = {11: [], 12: [], 13: []}
        for seconds in range(1, 61):
            for one in _of(sample(seconds)).processes or ():
                if one.sm_ratio is not None:
                    parts[one.pid].append(one.sm_ratio)
    means = {pid: sum(values) / len(values) for pid, values in parts.items()}
    assert means == pytest.approx({11: 0.6, 12: 0.2, 13: 0.0}, abs=0.02)


def test_lost_gpu_is_reported_with_its_xid_and_returns() -> None:
    with _running(gpu(0), gpu(1)) as (node, sample):
        assert {one.state for one in sample(0).gpus} == {DeviceState.UP}
        node.change(0, fault=Fault.GPU_LOST, xids=((_START + 1, 79),))
        lost = sample(1)
        assert (_of(lost, 0).state, _of(lost, 1).state) == (DeviceState.LOST, DeviceState.UP)
        assert _of(lost, 0).reason == "gpu_is_lost"
        xids = list(lost.xids)
        deadline = time.monotonic() + 10
        while not xids and time.monotonic() < deadline:
            time.sleep(0.02)
            xids.extend(sample(2).xids)
        assert [(event.uuid, event.xid) for event in xids] == [(gpu(0).uuid, 79)]
        node.change(0, fault=None)
        assert _of(sample(30), 0).state is DeviceState.UP


def test_gpu_that_needs_a_reset_is_in_that_state() -> None:
    with _running(gpu(0), gpu(1)) as (node, sample):
        sample(0)
        node.change(1, fault=Fault.RESET_REQUIRED)
        after = sample(20)
        assert _of(after, 1).state is DeviceState.RESET_REQUIRED
        assert _of(after, 0).state is DeviceState.UP


def test_unknown_error_fails_a_gpu_until_it_ends() -> None:
    with _running(gpu(0)) as (node, sample):
        sample(0)
        node.change(0, fault=Fault.UNKNOWN_ERROR)
        assert _of(sample(1)).state is DeviceState.FAILED
        node.change(0, fault=None)
        for seconds in range(2, 40, 5):
            last = _of(sample(seconds))
        assert last.state is DeviceState.UP


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(Fault.DRIVER_UNLOADED, "driver_not_loaded"), (Fault.LIBRARY_MISMATCH, "library_mismatch")],
)
def test_lost_driver_is_one_error_with_a_reason(fault: Fault, reason: str) -> None:
    with _running(gpu(0)) as (node, sample):
        sample(0)
        node.set(faults={fault: 0.0})
        with pytest.raises(SourceError) as caught:
            sample(1)
        assert caught.value.reason == reason


def test_uninstalled_driver_is_library_not_found_until_reinstalled() -> None:
    node = Node(NodeTruth(at_seconds=_START, node="simulated", driver_version="590.48.01", gpus=(gpu(0),)))
    driver.install(lambda: node.truth, cache_seconds=0.0, epoch_seconds=_EPOCH)
    source = NvmlSource(_ALL)
    try:
        source.open()
        node.set(faults={Fault.LIBRARY_MISSING: 0.0})
        with pytest.raises(SourceError) as caught:
            source.sample(_EPOCH + _START)
        assert caught.value.reason == "driver_not_loaded"
        source.close()
        with pytest.raises(SourceError) as caught:
            source.open()
        assert caught.value.reason == "library_not_found"
        node.set(faults={})
        source.open()
        assert _of(source.sample(_EPOCH + _START + 1)).state is DeviceState.UP
    finally:
        source.close()
        driver.uninstall()


@pytest.mark.parametrize("name", scenario.shipped())
def test_readings_of_every_shipped_scenario_match_its_truth(name: str) -> None:
    shipped = scenario.load(name)
    for seconds in (70.0, 900.0):
        truth = shipped.at(seconds)
        if not {Fault.HANG, Fault.SLOW, *_DRIVER_FAULTS}.isdisjoint(truth.faults):
            continue
        driver.install(lambda truth=truth: truth, cache_seconds=0.0, epoch_seconds=_EPOCH)
        source = NvmlSource(_ALL)
        try:
            source.open()
            reading = source.sample(_EPOCH + seconds)
        finally:
            source.close()
            driver.uninstall()
        for found in reading.gpus:
            gpu_truth = next(one for one in truth.gpus if one.uuid == found.gpu.uuid)
            if gpu_truth.fault is not None:
                continue
            expected = _expected(gpu_truth, truth.driver_version)
            assert found.values == pytest.approx(expected), f"{name} at {seconds} s: GPU {found.gpu.index}"
            assert {one.instance.uuid: one.instance.profile for one in found.instances} == {
                one.uuid: one.profile for one in gpu_truth.instances
            }
            pids = [one.pid for one in gpu_truth.processes]
            assert gpu_truth.mig_enabled or sorted(one.pid for one in found.processes or ()) == sorted(pids)

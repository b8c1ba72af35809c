"""The simulated driver through the real binding: values are the truth, and errors are those of a driver."""

import ctypes
from collections.abc import Callable

import pynvml
import pytest
from driver_support import H100, code_of, gpu, instance, load, partitioned, process, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.model.fields import Field
from gpu_simulator import driver
from gpu_simulator.driver_devices import profile_index
from gpu_simulator.driver_session import ProcessSamples
from gpu_simulator.truth import GpuTruth, Load, ProcessTruth


def test_64_bit_handle_survives_the_binding() -> None:
    with simulated(gpu(0)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert (ctypes.cast(handle, ctypes.c_void_p).value or 0) > 2**32
        truncated = ctypes.c_void_p((ctypes.cast(handle, ctypes.c_void_p).value or 0) & 0xFFFFFFFF)
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, truncated) == pynvml.NVML_ERROR_INVALID_ARGUMENT


_ratio = st.floats(0.0, 1.0)
_loads = st.builds(
    Load,
    utilisation=_ratio,
    memory_copy=_ratio,
    encode=_ratio,
    decode=_ratio,
    jpeg=_ratio,
    optical_flow=_ratio,
    memory_used_bytes=st.integers(0, H100.memory_bytes - H100.memory_reserved_bytes),
)
_integrals = st.builds(
    Load,
    pcie_tx_bytes_per_second=st.floats(0, 1e15),
    pcie_rx_bytes_per_second=st.floats(0, 1e15),
    nvlink_tx_bytes_per_second=st.floats(0, 1e15),
    nvlink_rx_bytes_per_second=st.floats(0, 1e15),
)
_gpus = st.builds(
    gpu,
    load=_loads,
    load_integral=_integrals,
    power_watts=st.floats(0, 1500),
    energy_joules=st.floats(0, 1e12),
    gpu_temp_celsius=st.integers(0, 110),
    memory_temp_celsius=st.none() | st.integers(0, 110),
    sm_clock_mhz=st.integers(0, 3000),
    mem_clock_mhz=st.integers(0, 10000),
    performance_state=st.integers(0, 15),
    clock_event_reasons=st.integers(0, 0x1FF),
)


@settings(deadline=None)
@given(_gpus)
def test_every_value_matches_the_truth_in_nvml_units(truth: GpuTruth) -> None:
    with simulated(truth):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        busy = truth.load
        rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
        assert (rates.gpu, rates.memory) == (round(busy.utilisation * 100), round(busy.memory_copy * 100))
        assert pynvml.nvmlDeviceGetEncoderUtilization(handle)[0] == round(busy.encode * 100)
        assert pynvml.nvmlDeviceGetDecoderUtilization(handle)[0] == round(busy.decode * 100)
        assert pynvml.nvmlDeviceGetJpgUtilization(handle)[0] == round(busy.jpeg * 100)
        assert pynvml.nvmlDeviceGetOfaUtilization(handle)[0] == round(busy.optical_flow * 100)
        assert pynvml.nvmlDeviceGetPowerUsage(handle) == round(truth.power_watts * 1000)
        assert pynvml.nvmlDeviceGetTemperature(handle, 0) == truth.gpu_temp_celsius
        assert pynvml.nvmlDeviceGetTemperatureV(handle, 0) == truth.gpu_temp_celsius
        assert pynvml.nvmlDeviceGetClockInfo(handle, 1) == truth.sm_clock_mhz
        assert pynvml.nvmlDeviceGetClockInfo(handle, 2) == truth.mem_clock_mhz
        assert pynvml.nvmlDeviceGetPerformanceState(handle) == truth.performance_state
        assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == truth.clock_event_reasons
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        assert (memory.total, memory.used) == (H100.memory_bytes, busy.memory_used_bytes)
        assert memory.total == memory.free + memory.used + memory.reserved
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == memory.used + memory.reserved
        all_links = 0xFFFFFFFF
        asked = [82, 83, 186, (138, all_links), (139, all_links)]
        temperature, energy, power, link_tx, link_rx = pynvml.nvmlDeviceGetFieldValues(handle, asked)
        if truth.memory_temp_celsius is None:
            assert temperature.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
        else:
            assert temperature.value.uiVal == truth.memory_temp_celsius
        assert energy.value.ullVal == round(truth.energy_joules * 1000)
        assert power.value.uiVal == round(truth.power_watts * 1000)
        moved = truth.load_integral
        assert abs(link_tx.value.ullVal * 1024 - moved.nvlink_tx_bytes_per_second) <= 1024
        assert abs(link_rx.value.ullVal * 1024 - moved.nvlink_rx_bytes_per_second) <= 1024


def test_override_replaces_a_value_and_none_is_not_supported() -> None:
    overrides = {Field.GPU_UTIL: 77, Field.FAN_SPEED: 30, Field.POWER_USAGE: None, Field.PCIE_REPLAY_COUNTER: 9}
    with simulated(gpu(0, overrides=overrides, load=load(utilisation=0.1))):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 77
        assert pynvml.nvmlDeviceGetFanSpeed(handle) == 30
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_unsupported_field_value_fails_alone_and_disabled_ecc_stays_untouched() -> None:
    off = dict.fromkeys((Field.ECC_SBE_VOL_TOTAL, Field.ECC_DBE_VOL_TOTAL))
    with simulated(gpu(0, overrides=off)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        ecc, energy, unknown, module_power = pynvml.nvmlDeviceGetFieldValues(handle, [3, 83, 250, (186, 1)])
        assert (ecc.timestamp, ecc.valueType) == (0, 0)
        assert energy.nvmlReturn == 0
        assert energy.timestamp > 0
        assert energy.latencyUsec > 0
        assert unknown.nvmlReturn == module_power.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_recovery_action_needs_a_driver_that_supports_it() -> None:
    with simulated(gpu(0)):
        (value,) = pynvml.nvmlDeviceGetFieldValues(pynvml.nvmlDeviceGetHandleByIndex(0), [230])
        assert (value.nvmlReturn, value.value.uiVal) == (0, 0)
    with simulated(gpu(0), driver_version="535.129.03"):
        (value,) = pynvml.nvmlDeviceGetFieldValues(pynvml.nvmlDeviceGetHandleByIndex(0), [230])
        assert value.nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_struct_of_the_wrong_version_is_refused() -> None:
    with simulated(gpu(0)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        mismatch = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        assert code_of(pynvml.nvmlDeviceGetMemoryInfo, handle, 0x03000030) == mismatch


def test_injected_errors_affect_the_named_device_the_given_number_of_times() -> None:
    with simulated(gpu(0), gpu(1)):
        first, second = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        driver.fail("nvmlDeviceGetPowerUsage", 4, only=1, times=2)
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, first) == 0
        assert [code_of(pynvml.nvmlDeviceGetPowerUsage, second) for _ in range(3)] == [4, 4, 0]
        driver.fail("nvmlDeviceGetCount_v2", 13)
        assert code_of(pynvml.nvmlDeviceGetCount) == 13
        driver.clear_failures()
        assert pynvml.nvmlDeviceGetCount() == 2
        with pytest.raises(ValueError, match="nvmlDeviceGetWatts"):
            driver.fail("nvmlDeviceGetWatts", 3)


def test_truth_is_read_once_per_burst_of_calls() -> None:
    asked = []
    with simulated(gpu(0)) as node:

        def truth() -> object:
            asked.append(node.truth)
            return node.truth

        driver.install(truth, cache_seconds=0.02, monotonic=lambda: node.seconds, sleep=node.sleep)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for _ in range(50):
            pynvml.nvmlDeviceGetPowerUsage(handle)
        assert len(asked) == 1
        node.seconds += 0.02
        pynvml.nvmlDeviceGetPowerUsage(handle)
        assert len(asked) == 2


def test_uninstall_restores_the_binding() -> None:
    before = pynvml.nvmlLib
    with simulated(gpu(0)):
        assert pynvml.nvmlLib is not before
    assert pynvml.nvmlLib is before
    driver.uninstall()
    with pytest.raises(ValueError, match="not installed"):
        driver.clear_failures()


def _mig_handles(parent: object) -> dict[int, object]:
    """Return the handle per index, without holes."""
    found = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            found[index] = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
        except pynvml.NVMLError_NotFound:
            continue
    return found


def test_destroyed_instance_leaves_a_gap_and_its_handle_becomes_invalid() -> None:
    with simulated(partitioned(instance(7), instance(8), instance(9))) as node:
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        handles = _mig_handles(parent)
        assert list(handles) == [0, 1, 2]
        node.change(instances=(instance(7), instance(9)))
        assert list(_mig_handles(parent)) == [0, 2]
        assert code_of(pynvml.nvmlDeviceGetUUID, handles[1]) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert pynvml.nvmlDeviceGetUUID(handles[2]) == instance(9).uuid
        assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, 7) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        node.change(instances=(instance(7), instance(9), instance(11)))
        assert list(_mig_handles(parent)) == [0, 1, 2]
        node.change(mig_enabled=False, instances=())
        assert code_of(pynvml.nvmlDeviceGetUUID, handles[2]) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(parent) == 0


def test_processes_are_listed_per_instance_and_on_the_gpu() -> None:
    busy, other = instance(7, processes=(process(11),)), instance(9, processes=(process(12), process(13)))
    with simulated(partitioned(busy, other)):
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        first, second = _mig_handles(parent).values()
        assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(first)] == [11]
        assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(second)] == [12, 13]
        of_all = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(parent)
        assert [(one.pid, one.gpuInstanceId) for one in of_all] == [(11, 7), (12, 9), (13, 9)]


@pytest.mark.parametrize(
    ("name", "memory_slices", "index"),
    [
        ("1g.5gb", 1, 0),
        ("1g.10gb", 2, 9),
        ("1g.5gb+me", 1, 7),
        ("2g.12gb+me", 2, 8),
        ("4g.24gb", 4, 3),
        ("1c.3g.40gb", 4, 2),
        ("1g.12gb-me", 1, 13),
        ("nonsense", 1, None),
    ],
)
def test_profile_names_map_to_nvml_profile_numbers(name: str, memory_slices: int, index: int | None) -> None:
    assert profile_index(name, memory_slices) == index


def _request(old: object, new: object, *metrics: int) -> object:
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics, request.sample1, request.sample2 = len(metrics), old, new
    for slot, metric in zip(request.metrics, metrics, strict=False):
        slot.metricId = metric
    return request


def _values(old: object, new: object, *metrics: int) -> list[float | int]:
    """Return the value per metric, or the negative return code."""
    answer = pynvml.nvmlGpmMetricsGet(_request(old, new, *metrics))
    return [m.value if m.nvmlReturn == 0 else -m.nvmlReturn for m in answer.metrics[: len(metrics)]]


def _sampled(take: Callable[[object], object]) -> object:
    sample = pynvml.nvmlGpmSampleAlloc()
    take(sample)
    return sample


_integral = st.builds(
    Load,
    **dict.fromkeys(
        ("engine", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16", "integer"), st.floats(0, 1e6)
    ),
)
_ids = {1: "engine", 2: "sm", 3: "occupancy", 4: "integer", 5: "tensor", 10: "dram", 11: "fp64", 12: "fp32", 13: "fp16"}


@settings(deadline=None)
@given(_integral, _integral, st.floats(0.2, 3600))
def test_gpm_metric_is_the_mean_between_two_samples(before: Load, after: Load, seconds: float) -> None:
    with simulated(gpu(0, load_integral=before)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice == 1
        old = _sampled(lambda sample: pynvml.nvmlGpmSampleGet(handle, sample))
        node.change(at=100.0 + seconds, load_integral=after)
        new = _sampled(lambda sample: pynvml.nvmlGpmSampleGet(handle, sample))
        for value, name in zip(_values(old, new, *_ids), _ids.values(), strict=True):
            mean = (getattr(after, name) - getattr(before, name)) / (node.truth.at_seconds - 100.0)
            assert value == pytest.approx(mean * 100, abs=1e-9)


def test_sample_has_time_and_load_of_the_same_instant() -> None:
    """A process without CPU time between two steps of a call finds another truth at each of them."""
    with simulated(gpu(0)) as node:

        def moved() -> object:
            seconds = 1.5 * node.truth.at_seconds
            node.change(at=seconds, load_integral=Load(engine=seconds))
            return node.truth

        driver.install(moved, cache_seconds=0.0, monotonic=lambda: node.seconds, sleep=node.sleep)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        old, new = [_sampled(lambda sample: pynvml.nvmlGpmSampleGet(handle, sample)) for _ in range(2)]
        assert _values(old, new, 1) == [pytest.approx(100.0, abs=1e-9)]


def test_instance_is_measured_by_its_handle_and_by_its_gpu_instance() -> None:
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


def _good(samples: list[object], last_us: int) -> dict[int, object]:
    return {s.pid: s for s in samples if s.pid and 0 <= s.smUtil <= 100 and s.timeStamp > last_us}


@pytest.mark.parametrize("call", [pynvml.nvmlDeviceGetProcessUtilization, pynvml.nvmlDeviceGetProcessesUtilizationInfo])
def test_process_samples_since_the_last_poll_match_the_processes(call: object) -> None:
    processes = (process(11, sm=0.6, mem_ratio=0.3), process(12, sm=0.2, enc_ratio=0.5))
    with simulated(gpu(0, processes=processes)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        last_us = max(one.timeStamp for one in _good(call(handle, 0), 0).values())
        for second in range(1, 6):
            node.change(at=100.0 + second)
            pynvml.nvmlDeviceGetCount()
        samples = call(handle, last_us)
        assert len(samples) == 100
        assert any(one.smUtil > 100 for one in samples)
        good = _good(samples, last_us)
        assert good[11].smUtil == pytest.approx(60, abs=3)
        assert good[12].smUtil == pytest.approx(20, abs=3)
        assert good[11].memUtil == pytest.approx(30, abs=3)
        assert good[12].encUtil == pytest.approx(50, abs=3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=5), st.integers(5, 50))
def test_process_samples_over_minutes_match_the_activity_of_each_process(
    parts: list[float], interval_tenths: int
) -> None:
    processes: list[ProcessTruth] = [process(pid, sm=part) for pid, part in enumerate(parts, start=1)]
    total = sum(parts)
    scale = min(total, 1.0) / total if total else 0.0
    ring, seen, busy_seconds = ProcessSamples(), 0.0, dict.fromkeys(range(1, len(parts) + 1), 0.0)
    ring.observe(0.0, processes)
    for poll in range(1, 201):
        ring.observe(poll * interval_tenths / 10, processes)
        uses = ring.since(seen)
        newest = max((use.newest_seconds for use in uses), default=seen)
        for use in uses:
            busy_seconds[use.pid] += use.percents[0] / 100 * (newest - seen)
        seen = newest
    if seen:
        for pid, part in enumerate(parts, start=1):
            assert busy_seconds[pid] / seen == pytest.approx(part * scale, abs=0.03)

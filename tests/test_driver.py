import ctypes

import pynvml
import pytest
from driver_support import H100, code_of, gpu, load, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.model import Field
from gpu_simulator import driver
from gpu_simulator.truth import GpuTruth, Load


def test_a_pointer_too_wide_for_an_int_survives_the_binding() -> None:
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
def test_every_value_read_through_the_binding_is_the_truth_in_nvml_units(truth: GpuTruth) -> None:
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
        asked = [82, 83, 186, 197, 198, (138, all_links), (139, all_links)]
        temperature, energy, power, tx, rx, link_tx, link_rx = pynvml.nvmlDeviceGetFieldValues(handle, asked)
        if truth.memory_temp_celsius is None:
            assert temperature.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
        else:
            assert temperature.value.uiVal == truth.memory_temp_celsius
        assert energy.value.ullVal == round(truth.energy_joules * 1000)
        assert power.value.uiVal == round(truth.power_watts * 1000)
        moved = truth.load_integral
        assert (tx.value.ullVal, rx.value.ullVal) == (
            int(moved.pcie_tx_bytes_per_second),
            int(moved.pcie_rx_bytes_per_second),
        )
        assert abs(link_tx.value.ullVal * 1024 - moved.nvlink_tx_bytes_per_second) <= 1024
        assert abs(link_rx.value.ullVal * 1024 - moved.nvlink_rx_bytes_per_second) <= 1024


def test_an_override_wins_and_none_is_not_supported() -> None:
    overrides = {Field.GPU_UTIL: 77, Field.FAN_SPEED: 30, Field.POWER_USAGE: None, Field.PCIE_REPLAY_COUNTER: 9}
    with simulated(gpu(0, overrides=overrides, load=load(utilisation=0.1))):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetUtilizationRates(handle).gpu == 77
        assert pynvml.nvmlDeviceGetFanSpeed(handle) == 30
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_field_value_that_the_board_lacks_fails_alone_and_ecc_off_stays_untouched() -> None:
    off = dict.fromkeys((Field.ECC_SBE_VOL_TOTAL, Field.ECC_DBE_VOL_TOTAL))
    with simulated(gpu(0, overrides=off)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        ecc, energy, unknown, module_power = pynvml.nvmlDeviceGetFieldValues(handle, [3, 83, 250, (186, 1)])
        assert (ecc.timestamp, ecc.valueType) == (0, 0)
        assert energy.nvmlReturn == 0
        assert energy.timestamp > 0
        assert energy.latencyUsec > 0
        assert unknown.nvmlReturn == module_power.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_the_recovery_action_needs_a_driver_that_knows_it() -> None:
    with simulated(gpu(0)):
        (value,) = pynvml.nvmlDeviceGetFieldValues(pynvml.nvmlDeviceGetHandleByIndex(0), [230])
        assert (value.nvmlReturn, value.value.uiVal) == (0, 0)
    with simulated(gpu(0), driver_version="535.129.03"):
        (value,) = pynvml.nvmlDeviceGetFieldValues(pynvml.nvmlDeviceGetHandleByIndex(0), [230])
        assert value.nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_struct_of_the_wrong_version_is_refused() -> None:
    with simulated(gpu(0)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        mismatch = pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        assert code_of(pynvml.nvmlDeviceGetMemoryInfo, handle, 0x03000030) == mismatch
        assert code_of(pynvml.nvmlDeviceGetRunningProcessDetailList, handle, 0x02000018, 0) == mismatch


def test_injected_errors_hit_the_named_device_as_often_as_asked() -> None:
    with simulated(gpu(0), gpu(1)):
        first, second = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        driver.fail("nvmlDeviceGetPowerUsage", 4, device_index=1, times=2)
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, first) == 0
        assert [code_of(pynvml.nvmlDeviceGetPowerUsage, second) for _ in range(3)] == [4, 4, 0]
        driver.fail("nvmlDeviceGetCount_v2", 13)
        assert code_of(pynvml.nvmlDeviceGetCount) == 13
        driver.clear_failures()
        assert pynvml.nvmlDeviceGetCount() == 2
        with pytest.raises(ValueError, match="nvmlDeviceGetWatts"):
            driver.fail("nvmlDeviceGetWatts", 3)


def test_the_truth_is_asked_once_per_burst_of_calls() -> None:
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


def test_uninstalling_gives_the_binding_back_what_it_had() -> None:
    before = pynvml.nvmlLib
    with simulated(gpu(0)):
        assert pynvml.nvmlLib is not before
    assert pynvml.nvmlLib is before
    driver.uninstall()
    with pytest.raises(ValueError, match="not installed"):
        driver.clear_failures()

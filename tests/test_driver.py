import ctypes
from collections.abc import Callable
from dataclasses import replace

import pynvml
import pytest
from driver_support import H100, MIB, T4, code_of, gpu, load, partitioned, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.model import Field
from gpu_simulator import driver
from gpu_simulator.truth import GpuTruth, Load


def test_devices_are_found_by_index_uuid_bus_id_and_serial() -> None:
    with simulated(gpu(0), gpu(1)):
        assert pynvml.nvmlDeviceGetCount() == 2
        second = pynvml.nvmlDeviceGetHandleByIndex(1)
        uuid = pynvml.nvmlDeviceGetUUID(second)
        for found in (
            pynvml.nvmlDeviceGetHandleByUUID(uuid),
            pynvml.nvmlDeviceGetHandleByPciBusId("00000000:18:00.0"),
            pynvml.nvmlDeviceGetHandleByPciBusId("0000:18:00.0"),
            pynvml.nvmlDeviceGetHandleBySerial("1652423000001"),
        ):
            assert pynvml.nvmlDeviceGetUUID(found) == uuid
            assert pynvml.nvmlDeviceGetIndex(found) == 1
        assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 2) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert code_of(pynvml.nvmlDeviceGetHandleByUUID, "GPU-nowhere") == pynvml.NVML_ERROR_NOT_FOUND


def test_identity_is_the_truth() -> None:
    with simulated(gpu(0)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
        assert pynvml.nvmlDeviceGetSerial(handle) == "1652423000000"
        assert pynvml.nvmlDeviceGetMinorNumber(handle) == 2
        info = pynvml.nvmlDeviceGetPciInfo(handle)
        assert (info.busId, info.busIdLegacy) == ("00000000:17:00.0", "0000:17:00.0")
        assert (info.domain, info.bus, info.device) == (0, 0x17, 0)
        assert pynvml.nvmlDeviceGetVbiosVersion(handle) == "96.00.A5.00.01"
        assert pynvml.nvmlDeviceGetInforomVersion(handle, 1) == "7.16"
        assert code_of(pynvml.nvmlDeviceGetInforomVersion, handle, 2) == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert pynvml.nvmlSystemGetDriverVersion() == "590.48.01"
        assert pynvml.nvmlSystemGetNVMLVersion() == "13.590.48.01"
        assert pynvml.nvmlDeviceGetBrand(handle) == pynvml.NVML_BRAND_NVIDIA
        assert pynvml.nvmlDeviceGetVirtualizationMode(handle) == 0
        assert pynvml.nvmlDeviceGetAccountingMode(handle) == 0


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
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) == round(truth.energy_joules * 1000)
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
        assert pynvml.nvmlDeviceGetPcieReplayCounter(handle) == 9
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_power_limits_and_thresholds_are_those_of_the_board() -> None:
    with simulated(gpu(0, gpu_temp_celsius=41)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetPowerManagementLimit(handle) == 700_000
        assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) == 700_000
        assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 700_000
        assert pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle) == [200_000, 700_000]
        assert pynvml.nvmlDeviceGetMarginTemperature(handle) == 46
        assert pynvml.nvmlDeviceGetTemperatureThreshold(handle, 1) < pynvml.nvmlDeviceGetTemperatureThreshold(handle, 0)
        assert pynvml.nvmlDeviceGetMaxClockInfo(handle, 1) == 1980
        assert pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Total == 131072 * MIB
        assert pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle) == 5
        assert pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle) == 16
        assert code_of(pynvml.nvmlDeviceGetFanSpeed, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_error_counters_come_by_every_door() -> None:
    overrides = {
        Field.ECC_SBE_VOL_TOTAL: 3,
        Field.ECC_DBE_AGG_TOTAL: 5,
        Field.UNCORRECTABLE_REMAPPED_ROWS: 2,
        Field.RETIRED_SBE: 2,
        Field.POWER_VIOLATION: 12345,
        Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL: 4,
    }
    with simulated(gpu(0, overrides=overrides)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 0, 0) == 3
        assert pynvml.nvmlDeviceGetTotalEccErrors(handle, 1, 1) == 5
        assert pynvml.nvmlDeviceGetMemoryErrorCounter(handle, 0, 0, 2) == 3
        assert pynvml.nvmlDeviceGetRemappedRows(handle) == (0, 2, 0, 0)
        assert len(pynvml.nvmlDeviceGetRetiredPages(handle, 0)) == 2
        assert pynvml.nvmlDeviceGetRetiredPages(handle, 1) == []
        assert pynvml.nvmlDeviceGetViolationStatus(handle, 0).violationTime == 12345
        assert pynvml.nvmlDeviceGetNvLinkState(handle, 0) == 1
        assert pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, 0, 0) == 4
        values = pynvml.nvmlDeviceGetFieldValues(handle, [3, 6, 74, 143, 52])
        assert [value.value.ullVal for value in values] == [3, 5, 12345, 2, 4]


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


def test_a_board_without_a_licence_server_has_no_licensable_feature() -> None:
    with simulated(gpu(0)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetGridLicensableFeatures(handle).licensableFeaturesCount == 0
        node.change(overrides={Field.VGPU_LICENSE_STATUS: 1})
        assert pynvml.nvmlDeviceGetGridLicensableFeatures(handle).gridLicensableFeatures[0].featureState == 1


def test_a_symbol_that_the_driver_lacks_is_function_not_found() -> None:
    with simulated(gpu(0, model=T4)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        missing = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert code_of(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) == 0
        assert code_of(pynvml.nvmlDeviceGetAdaptiveClockInfoStatus, handle) == missing


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


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (pynvml.nvmlDeviceGetClockInfo, (9,)),
        (pynvml.nvmlDeviceGetTemperature, (7,)),
        (pynvml.nvmlDeviceGetTemperatureV, (7,)),
        (pynvml.nvmlDeviceGetTemperatureThreshold, (99,)),
        (pynvml.nvmlDeviceGetViolationStatus, (7,)),
        (pynvml.nvmlDeviceGetTotalEccErrors, (5, 0)),
        (pynvml.nvmlDeviceGetMemoryErrorCounter, (5, 0, 2)),
        (pynvml.nvmlDeviceGetInforomVersion, (9,)),
        (pynvml.nvmlDeviceGetNvLinkState, (18,)),
        (pynvml.nvmlDeviceGetNvLinkErrorCounter, (0, 9)),
        (pynvml.nvmlDeviceGetMigDeviceHandleByIndex, (7,)),
        (pynvml.nvmlDeviceGetGpuInstanceProfileInfo, (18,)),
    ],
)
def test_an_argument_that_nvml_does_not_know_is_invalid(
    call: Callable[..., object], arguments: tuple[int, ...]
) -> None:
    with simulated(partitioned()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert code_of(call, handle, *arguments) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_board_without_nvlink_has_no_links_and_pcie_is_measured_while_the_caller_waits() -> None:
    lacking = replace(H100, not_supported=frozenset({Field.NVLINK_TX_BYTES_TOTAL}))
    with simulated(gpu(0, model=lacking, load=load(pcie_tx_bytes_per_second=2e6))) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert code_of(pynvml.nvmlDeviceGetNvLinkState, handle, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
        before = node.seconds
        assert pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES) == 2000
        assert node.seconds >= before + 0.02


def test_fixed_facts_follow_the_model() -> None:
    with simulated(gpu(0), gpu(1, model=T4)):
        hopper, turing = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        assert pynvml.nvmlDeviceGetCudaComputeCapability(hopper) == (9, 0)
        assert pynvml.nvmlDeviceGetCudaComputeCapability(turing) == (7, 5)
        assert pynvml.nvmlDeviceGetArchitecture(hopper) == pynvml.NVML_DEVICE_ARCH_HOPPER
        assert pynvml.nvmlDeviceGetArchitecture(turing) == pynvml.NVML_DEVICE_ARCH_TURING
        assert pynvml.nvmlDeviceGetInforomImageVersion(turing) != pynvml.nvmlDeviceGetInforomImageVersion(hopper)
        assert pynvml.nvmlDeviceGetPersistenceMode(hopper) == 1
        assert pynvml.nvmlDeviceGetEccMode(hopper) == [1, 1]
        assert pynvml.nvmlDeviceGetAccountingPids(hopper) == []
        assert pynvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(hopper) == 0
        assert pynvml.nvmlSystemGetCudaDriverVersion_v2() == 13000


def test_thresholds_are_told_as_distances_too() -> None:
    with simulated(gpu(0)):
        values = pynvml.nvmlDeviceGetFieldValues(pynvml.nvmlDeviceGetHandleByIndex(0), [193, 194, 196])
        assert [value.value.siVal for value in values] == [-8, -2, 0]

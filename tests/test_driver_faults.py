import threading
import time

import pynvml
import pytest
from driver_support import code_of, gpu, simulated

from gpu_simulator import driver
from gpu_simulator.truth import Fault


def test_calls_before_init_and_after_the_last_shutdown_are_uninitialized() -> None:
    with simulated(gpu(0), init=False):
        assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_UNINITIALIZED
        pynvml.nvmlInit()
        pynvml.nvmlInit()
        pynvml.nvmlShutdown()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlShutdown()
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_UNINITIALIZED
        assert code_of(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_lost_gpu_leaves_the_others_untouched_and_returns_by_itself() -> None:
    with simulated(gpu(0), gpu(1)) as node:
        lost, well = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        node.change(0, fault=Fault.GPU_LOST)
        gone = pynvml.NVML_ERROR_GPU_IS_LOST
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, lost) == gone
        assert code_of(pynvml.nvmlDeviceGetUUID, lost) == gone
        assert code_of(pynvml.nvmlDeviceGetHandleByIndex, 0) == gone
        assert code_of(pynvml.nvmlDeviceGetFieldValues, lost, [83]) == gone
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, well) == 0
        assert pynvml.nvmlDeviceGetCount() == 2
        node.change(0, fault=None)
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, lost) == 0


def test_a_gpu_that_needs_a_reset_still_says_who_it_is_and_what_to_do() -> None:
    with simulated(gpu(0, fault=Fault.RESET_REQUIRED)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetUUID(handle) == gpu(0).uuid
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_RESET_REQUIRED
        energy, action = pynvml.nvmlDeviceGetFieldValues(handle, [83, 230])
        assert energy.nvmlReturn == pynvml.NVML_ERROR_RESET_REQUIRED
        assert (action.nvmlReturn, action.value.uiVal) == (0, 1)


def test_an_unknown_error_strikes_every_measurement() -> None:
    with simulated(gpu(0, fault=Fault.UNKNOWN_ERROR)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_UNKNOWN
        assert code_of(pynvml.nvmlDeviceGetFieldValues, handle, [83]) == pynvml.NVML_ERROR_UNKNOWN


def test_an_absent_gpu_is_not_enumerated_until_the_driver_is_opened_again() -> None:
    with simulated(gpu(0, fault=Fault.GPU_ABSENT), gpu(1)) as node:
        assert pynvml.nvmlDeviceGetCount() == 1
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)) == gpu(1).uuid
        node.change(0, fault=None)
        assert pynvml.nvmlDeviceGetCount() == 1
        pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 2
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        node.set(gpu(1))
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_GPU_IS_LOST


def test_an_unloaded_driver_needs_a_new_initialisation_once_it_is_back() -> None:
    with simulated(gpu(0)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        node.set(faults={Fault.DRIVER_UNLOADED: 0.0})
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        node.set(faults={})
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_UNINITIALIZED
        pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetPowerUsage(pynvml.nvmlDeviceGetHandleByIndex(0)) == 123456


def test_a_mismatched_library_stays_so_for_the_life_of_its_process() -> None:
    with simulated(gpu(0)) as node:
        node.set(faults={Fault.LIBRARY_MISMATCH: 0.0})
        mismatch = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
        assert code_of(pynvml.nvmlDeviceGetCount) == mismatch
        node.set(faults={})
        pynvml.nvmlShutdown()
        assert code_of(pynvml.nvmlInit) == mismatch
        driver.install(lambda: node.truth)
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 1


def test_an_uninstalled_driver_has_no_library_to_open_and_no_module_to_ask() -> None:
    with simulated(gpu(0)) as node:
        node.set(faults={Fault.LIBRARY_MISSING: 0.0})
        assert code_of(pynvml.nvmlDeviceGetCount) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        pynvml.nvmlShutdown()
        assert code_of(pynvml.nvmlInit) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        node.set(faults={})
        pynvml.nvmlInit()


@pytest.mark.parametrize("whole_node", [True, False])
def test_a_hanging_call_returns_when_the_fault_is_over(whole_node: bool) -> None:  # noqa: FBT001 - a pytest parameter
    with simulated(gpu(0)) as node:
        driver.install(lambda: node.truth)
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        if whole_node:
            node.set(faults={Fault.HANG: 0.0})
        else:
            node.change(fault=Fault.HANG)
        time.sleep(0.05)
        answers: list[int] = []
        caller = threading.Thread(target=lambda: answers.append(pynvml.nvmlDeviceGetPowerUsage(handle)))
        caller.start()
        caller.join(0.2)
        assert caller.is_alive()
        node.set(faults={})
        node.change(fault=None)
        caller.join(5)
        assert answers == [123456]


def test_a_slow_driver_takes_its_time_for_every_call() -> None:
    with simulated(gpu(0), gpu(1, fault=Fault.SLOW)) as node:
        handle, slow = (pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2))
        before = node.seconds
        pynvml.nvmlDeviceGetPowerUsage(handle)
        assert node.seconds == before
        pynvml.nvmlDeviceGetPowerUsage(slow)
        assert node.seconds > before
        node.set(faults={Fault.SLOW: 0.3})
        before = node.seconds
        pynvml.nvmlDeviceGetPowerUsage(handle)
        assert node.seconds == pytest.approx(before + 0.3)

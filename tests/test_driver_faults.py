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


def test_reloaded_driver_needs_a_new_initialisation() -> None:
    with simulated(gpu(0)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        node.set(faults={Fault.DRIVER_UNLOADED: 0.0})
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        node.set(faults={})
        assert code_of(pynvml.nvmlDeviceGetPowerUsage, handle) == pynvml.NVML_ERROR_UNINITIALIZED
        pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetPowerUsage(pynvml.nvmlDeviceGetHandleByIndex(0)) == 123456


def test_mismatched_library_stays_mismatched_for_the_process() -> None:
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


@pytest.mark.parametrize("whole_node", [True, False])
def test_hanging_call_returns_when_the_fault_ends(whole_node: bool) -> None:  # noqa: FBT001 - a pytest parameter
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


def test_slow_driver_delays_every_call() -> None:
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

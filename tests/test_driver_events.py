import ctypes

import pynvml
from driver_support import T4, code_of, gpu, instance, partitioned, simulated

_TYPES = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventMigConfigChange


def _number(handle: object) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def test_an_xid_is_told_once_to_who_registered_before_it() -> None:
    with simulated(gpu(0, xids=((1.0, 13),)), gpu(1)) as node:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
        events = pynvml.nvmlEventSetCreate()
        for handle in handles:
            pynvml.nvmlDeviceRegisterEvents(handle, _TYPES, events)
        assert code_of(pynvml.nvmlEventSetWait_v2, events, 1000) == pynvml.NVML_ERROR_TIMEOUT
        node.change(0, xids=((1.0, 13), (103.0, 79)))
        node.change(1, xids=((102.0, 31),))
        first, second = (pynvml.nvmlEventSetWait_v2(events, 1000) for _ in range(2))
        assert (first.eventType, first.eventData, _number(first.device)) == (8, 31, _number(handles[1]))
        assert (second.eventData, _number(second.device)) == (79, _number(handles[0]))
        assert second.gpuInstanceId == 0xFFFFFFFF
        assert code_of(pynvml.nvmlEventSetWait_v2, events, 1000) == pynvml.NVML_ERROR_TIMEOUT


def test_a_wait_ends_as_soon_as_something_happens_and_not_after_its_timeout() -> None:
    with simulated(gpu(0)) as node:
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(0), _TYPES, events)
        assert code_of(pynvml.nvmlEventSetWait_v2, events, 2500) == pynvml.NVML_ERROR_TIMEOUT
        assert 2.5 <= node.seconds <= 2.7
        node.change(xids=((101.0, 48),))
        assert pynvml.nvmlEventSetWait_v2(events, 2500).eventData == 48
        assert node.seconds <= 2.7


def test_a_new_mig_layout_is_an_event() -> None:
    with simulated(partitioned(instance(7))) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(handle, _TYPES, events)
        node.change(instances=(instance(7), instance(8)))
        assert pynvml.nvmlEventSetWait_v2(events, 100).eventType == pynvml.nvmlEventMigConfigChange
        assert code_of(pynvml.nvmlEventSetWait_v2, events, 100) == pynvml.NVML_ERROR_TIMEOUT


def test_events_that_a_board_does_not_have_cannot_be_registered() -> None:
    with simulated(gpu(0, model=T4)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _TYPES == pynvml.nvmlEventTypeXidCriticalError
        events = pynvml.nvmlEventSetCreate()
        refused = code_of(pynvml.nvmlDeviceRegisterEvents, handle, _TYPES, events)
        assert refused == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_wait_ends_when_its_set_is_freed_or_the_driver_closed() -> None:
    with simulated(gpu(0)) as node:
        events = pynvml.nvmlEventSetCreate()
        closing = {3: lambda: pynvml.nvmlEventSetFree(events)}

        def sleep_then_free(seconds: float) -> None:
            node.seconds += seconds
            closing.pop(round(node.seconds * 10), lambda: None)()

        node_sleep, node.sleep = node.sleep, sleep_then_free
        session_sleep = pynvml.nvmlLib._session
        session_sleep.sleep = sleep_then_free
        assert code_of(pynvml.nvmlEventSetWait_v2, events, 60_000) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert node.seconds < 1
        node.sleep = session_sleep.sleep = node_sleep
        assert code_of(pynvml.nvmlEventSetFree, events) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_scenario_that_starts_again_repeats_its_events() -> None:
    with simulated(gpu(0, xids=((1.0, 13), (2.0, 31)))) as node:
        events = pynvml.nvmlEventSetCreate()
        pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(0), _TYPES, events)
        node.change(at=0.0, xids=())
        assert code_of(pynvml.nvmlEventSetWait_v2, events, 100) == pynvml.NVML_ERROR_TIMEOUT
        node.change(at=1.0, xids=((1.0, 13),))
        assert pynvml.nvmlEventSetWait_v2(events, 100).eventData == 13

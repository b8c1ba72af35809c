import ctypes
from typing import TYPE_CHECKING

import pynvml
import pytest
from driver_support import GIB, T4, code_of, gpu, process, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_simulator.driver_session import ProcessSamples

if TYPE_CHECKING:
    from gpu_simulator.truth import ProcessTruth


def _good(samples: list[object], last_us: int) -> dict[int, object]:
    return {s.pid: s for s in samples if s.pid and 0 <= s.smUtil <= 100 and s.timeStamp > last_us}


def test_running_processes_tell_pid_and_memory() -> None:
    with simulated(gpu(0, processes=(process(11, memory=2 * GIB), process(12)))):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        compute = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        assert [(one.pid, one.usedGpuMemory) for one in compute] == [(11, 2 * GIB), (12, GIB)]
        assert {one.gpuInstanceId for one in compute} == {0xFFFFFFFF}
        assert pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle) == []
        assert pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle) == []
        details = pynvml.nvmlDeviceGetRunningProcessDetailList(handle, pynvml.nvmlProcessDetailList_v1, 0)
        assert [one.pid for one in details] == [11, 12]


def test_too_little_room_for_the_list_is_told_with_the_number_needed() -> None:
    with simulated(gpu(0, processes=(process(11), process(12)))):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        call = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")
        count, records = ctypes.c_uint(1), (pynvml.c_nvmlProcessInfo_v3_t * 1)()
        assert call(handle, ctypes.byref(count), records) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
        assert count.value == 2


def test_clients_of_an_mps_server_and_display_servers_have_lists_of_their_own() -> None:
    server, client = process(10, comm="nvidia-cuda-mps-server"), process(11)
    with simulated(gpu(0, processes=(server, client, process(9, comm="Xorg")))):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        lists = (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        )
        assert [[one.pid for one in call(handle)] for call in lists] == [[10], [11], [9]]


@pytest.mark.parametrize("call", [pynvml.nvmlDeviceGetProcessUtilization, pynvml.nvmlDeviceGetProcessesUtilizationInfo])
def test_samples_since_the_last_poll_divide_the_device_among_its_processes(call: object) -> None:
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


def test_a_process_without_new_samples_is_absent_and_an_idle_ring_finds_nothing() -> None:
    with simulated(gpu(0, processes=(process(11, sm=0.6), process(12, sm=0.3)))) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        call = pynvml.nvmlDeviceGetProcessUtilization
        last_us = max(one.timeStamp for one in _good(call(handle, 0), 0).values())
        assert code_of(call, handle, last_us) == pynvml.NVML_ERROR_NOT_FOUND
        node.change(at=103.0, processes=(process(11), process(12, sm=0.3)))
        assert list(_good(call(handle, last_us), last_us)) == [12]
        node.change(at=106.0, processes=(process(11),))
        last_us = max(one.timeStamp for one in _good(call(handle, last_us), last_us).values())
        assert code_of(call, handle, last_us) == pynvml.NVML_ERROR_NOT_FOUND


def test_asking_from_zero_gives_the_whole_ring_a_stale_mean() -> None:
    with simulated(gpu(0, processes=(process(11, sm=1.0),))) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for second in range(1, 11):
            node.change(at=100.0 + second, processes=(process(11, sm=1.0 if second <= 5 else 0.0),))
            pynvml.nvmlDeviceGetCount()
        (sample,) = _good(pynvml.nvmlDeviceGetProcessUtilization(handle, 0), 0).values()
        assert sample.smUtil == pytest.approx(52, abs=4)


def test_the_newer_call_needs_a_newer_driver() -> None:
    with simulated(gpu(0, model=T4, processes=(process(11, sm=0.5),)), driver_version="535.129.03"):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        newer = pynvml.nvmlDeviceGetProcessesUtilizationInfo
        assert code_of(newer, handle, 0) == pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
        assert 11 in _good(pynvml.nvmlDeviceGetProcessUtilization(handle, 0), 0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=5), st.integers(5, 50))
def test_over_minutes_every_process_gets_its_part_of_the_samples(parts: list[float], interval_tenths: int) -> None:
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


def test_a_clock_that_went_back_starts_the_ring_anew() -> None:
    ring = ProcessSamples()
    ring.observe(50.0, [process(1, sm=1.0)])
    ring.observe(10.0, [process(2, sm=1.0)])
    assert [use.pid for use in ring.since(0.0)] == [2]


@given(st.integers(0, 10_000_000))
def test_the_newest_timestamp_finds_nothing_newer_than_itself(milliseconds: int) -> None:
    with simulated(gpu(0, processes=(process(11, sm=0.5),)), at=milliseconds / 1000):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        call = pynvml.nvmlDeviceGetProcessUtilization
        last_us = _good(call(handle, 0), 0)[11].timeStamp
        assert code_of(call, handle, last_us) == pynvml.NVML_ERROR_NOT_FOUND

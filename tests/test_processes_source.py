"""Processes on a device: pids, memory, and active time from the driver's statistical samples."""

import ctypes

import pynvml
import pytest
from driver_support import GIB, gpu, instance, partitioned, process, session, simulated
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpu.nvml import activity
from exporter.gpu.nvml.activity import Poller, ProcessSample, good_samples
from exporter.model.devices import ProcessUse
from gpu_simulator import driver as simulated_driver

SAMPLES = st.builds(
    ProcessSample,
    pid=st.integers(0, 5),
    timestamp_us=st.integers(0, 20),
    percents=st.tuples(st.integers(0, 40_000), *(st.integers(0, 200),) * 2, *(st.none() | st.integers(0, 200),) * 2),
)


def poller(counted: list[str] | None = None, *, utilisation: bool = True) -> Poller:
    return Poller(
        pynvml.nvmlDeviceGetHandleByIndex(0),
        session(count=(counted if counted is not None else []).append),
        utilisation=utilisation,
    )


def by_pid(found: tuple[ProcessUse, ...] | None) -> dict[int, ProcessUse]:
    assert found is not None
    return {one.pid: one for one in found}


@given(st.lists(SAMPLES), st.integers(0, 20))
def test_unfilled_slots_and_old_samples_are_ignored(samples: list[ProcessSample], last_us: int) -> None:
    good = good_samples(samples, last_us)
    assert all(
        one.pid and one.timestamp_us > last_us and max(filter(None, one.percents), default=0) <= 100 for one in good
    )
    assert all(one in samples for one in good)


def test_first_poll_has_memory_only_and_the_next_has_mean_ratios() -> None:
    one, two = process(11, sm=0.6, memory=3 * GIB), process(12, sm=0.2, memory=GIB)
    with simulated(gpu(processes=(one, two))) as node:
        it = poller()
        first = by_pid(it.poll(100.0))
        assert first[11].memory_used_bytes == 3 * GIB
        assert first[11].sm_ratio is None
        node.set(at=104.0)
        second = by_pid(it.poll(104.0))
        ratios = [second[11].sm_ratio, second[12].sm_ratio]
        assert ratios == [pytest.approx(0.6, abs=0.15), pytest.approx(0.2, abs=0.15)]


def test_process_without_new_samples_is_idle() -> None:
    with simulated(gpu(processes=(process(11, sm=0.9),))) as node:
        it = poller()
        it.poll(100.0)
        node.set(at=103.0)
        busy = by_pid(it.poll(103.0))[11].sm_ratio
        assert busy is not None
        assert busy > 0.5
        node.change(at=106.0, processes=(process(11, sm=0.0),))
        it.poll(106.0)
        node.set(at=120.0)
        it.poll(120.0)
        node.set(at=123.0)
        assert by_pid(it.poll(123.0))[11].sm_ratio == 0.0


def test_ended_process_is_listed_once_more() -> None:
    with simulated(gpu(processes=(process(11, sm=0.8),))) as node:
        it = poller()
        it.poll(100.0)
        node.set(at=102.0)
        it.poll(102.0)
        node.set(at=104.0)
        simulated_driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", 3, times=1)
        ended = by_pid(it.poll(104.0))
        assert ended[11].ended
        assert ended[11].memory_used_bytes is None
        assert ended[11].sm_ratio is not None


def test_process_with_a_graphics_context_is_marked() -> None:
    with simulated(gpu(processes=(process(11), process(12, comm="Xorg")))):
        assert {pid: one.graphics for pid, one in by_pid(poller().poll(100.0)).items()} == {11: False, 12: True}


def test_empty_list_is_an_answer_and_unsupported_lists_give_none() -> None:
    with simulated(gpu()):
        assert poller().poll(100.0) == ()
        for name in ("Compute", "Graphics", "MPSCompute"):
            simulated_driver.fail(f"nvmlDeviceGet{name}RunningProcesses_v3", 3)
        counted: list[str] = []
        assert poller(counted).poll(100.0) is None
        assert counted == []


def test_refused_list_is_counted_and_not_retried_for_a_while() -> None:
    with simulated(gpu(processes=(process(11),))):
        simulated_driver.fail("nvmlDeviceGetGraphicsRunningProcesses_v3", 4)
        counted: list[str] = []
        it = poller(counted)
        assert it.poll(100.0) is None
        assert it.poll(102.0) is None
        assert counted == ["processes_no_permission"]
        simulated_driver.clear_failures()
        assert set(by_pid(it.poll(701.0))) == {11}


@pytest.mark.parametrize("code", [4, 7, 999])
def test_incomplete_process_list_is_discarded(code: int) -> None:
    with simulated(gpu(processes=(process(11),))):
        simulated_driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", code)
        assert poller().poll(100.0) is None


def test_older_sample_call_is_used_if_the_newer_is_missing() -> None:
    with simulated(gpu(processes=(process(11, sm=0.5),))) as node:
        simulated_driver.fail("nvmlDeviceGetProcessesUtilizationInfo", 13)
        it = poller()
        it.poll(100.0)
        node.set(at=103.0)
        assert by_pid(it.poll(103.0))[11].sm_ratio == pytest.approx(0.5, abs=0.15)


@pytest.mark.parametrize("driver_version", ["590.48.01", "535.129.03"])
def test_jpeg_and_optical_flow_ratios_are_read_if_the_driver_has_them(driver_version: str) -> None:
    thumbnails, flow = process(11, jpg_ratio=0.8), process(12, ofa_ratio=0.4)
    with simulated(gpu(processes=(thumbnails, flow)), driver_version=driver_version) as node:
        it = poller()
        it.poll(100.0)
        node.set(at=104.0)
        found = by_pid(it.poll(104.0))
    use = [found[pid].jpg_ratio for pid in (11, 12)] + [found[pid].ofa_ratio for pid in (11, 12)]
    if driver_version.startswith("535"):
        assert use == [None] * 4
    else:
        assert use == [pytest.approx(0.8, abs=0.05), 0.0, 0.0, pytest.approx(0.4, abs=0.05)]


def test_processes_without_samples_have_memory_but_no_ratio() -> None:
    with simulated(gpu(processes=(process(11, sm=0.5),))) as node:
        simulated_driver.fail("nvmlDeviceGetProcessesUtilizationInfo", 3)
        simulated_driver.fail("nvmlDeviceGetProcessUtilization", 3)
        it = poller()
        it.poll(100.0)
        node.set(at=103.0)
        one = by_pid(it.poll(103.0))[11]
        assert (one.memory_used_bytes, one.sm_ratio, one.enc_ratio) == (GIB, None, None)


def test_a_mig_instance_lists_its_own_processes_without_ratios() -> None:
    with simulated(partitioned(instance(1, processes=(process(11),)), instance(2))):
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)
        it = Poller(handle, session(), utilisation=False)
        assert it.poll(1.0) == (ProcessUse(pid=11, memory_used_bytes=GIB),)


def test_lost_gpu_raises_instead_of_an_empty_list() -> None:
    with simulated(gpu(processes=(process(11),))):
        it = poller()
        simulated_driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", 15)
        with pytest.raises(pynvml.NVMLError):
            it.poll(100.0)


@pytest.mark.parametrize(
    ("symbols", "size_bytes"),
    [
        ({"nvmlDeviceGetConfComputeMemSizeInfo"}, 32),
        ({"nvmlDeviceGetConfComputeMemSizeInfo", "nvmlDeviceGetRunningProcessDetailList"}, 24),
        (set(), 24),
    ],
)
def test_long_records_of_early_r535_drivers_are_detected_by_symbols(
    symbols: set[str], size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def __getattr__(self, name: str) -> object:
            if name not in symbols:
                raise AttributeError(name)
            return lambda *_: 0

    monkeypatch.setattr(pynvml, "nvmlLib", Library())
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    assert ctypes.sizeof(activity.record_type()) == size_bytes


def test_mps_clients_are_marked_and_stay_marked_for_one_poll_after_their_end() -> None:
    server = process(10, comm="nvidia-cuda-mps-server")
    with simulated(gpu(processes=(server, process(11, sm=0.8)))) as node:
        it = poller()
        assert {pid: use.mps for pid, use in by_pid(it.poll(100.0)).items()} == {10: False, 11: True}
        node.set(at=102.0)
        it.poll(102.0)
        node.set(at=104.0)
        simulated_driver.fail("nvmlDeviceGetMPSComputeRunningProcesses_v3", 3, times=1)
        ended = by_pid(it.poll(104.0))[11]
        assert (ended.ended, ended.mps) == (True, True)
        node.change(at=1000.0, processes=(process(11),))
        it.poll(1000.0)
        assert not by_pid(it.poll(1002.0))[11].mps

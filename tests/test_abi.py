"""The sources through the real binding, a real shared library and a real child process: layouts, faults, recovery."""

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pynvml
import pytest
import stub_support as stub

from exporter.gpu.worker import Worker, child_command
from exporter.model.devices import DeviceState, GpuReading, ProcessUse, Reading, SourceState
from exporter.model.fields import Field

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated driver needs a C compiler")

T = TypeVar("T")
INTERVAL_SECONDS = 0.25
DEADLINE_SECONDS = 1.5
PATIENCE_SECONDS = 30.0
GPU_IS_LOST, DRIVER_NOT_LOADED, UNKNOWN = 15, 9, 999


class Watched:
    """A worker on a simulated driver, and its readings so far."""

    def __init__(self, worker: Worker, control: stub.StubControl) -> None:
        self.worker, self.control = worker, control
        self.readings: list[Reading] = []

    async def until(self, check: Callable[[Reading], T], what: str) -> T:
        """Return the first true result of ``check`` for a reading from now on."""
        until = time.monotonic() + PATIENCE_SECONDS
        self.worker.take()
        while time.monotonic() < until:
            for reading in self.worker.take():
                self.readings.append(reading)
                if result := check(reading):
                    return result
            await asyncio.sleep(0.02)
        pytest.fail(f"not seen within {PATIENCE_SECONDS} s: {what}; {self.worker.status}, {self.worker.errors}")

    async def state(self, state: SourceState) -> None:
        """Wait until the source is in a state."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self.worker.status.state is not state:
            assert time.monotonic() < until, f"not {state}: {self.worker.status}, {self.worker.errors}"
            await asyncio.sleep(0.02)


def gpu(reading: Reading, index: int) -> GpuReading:
    return next(one for one in reading.gpus if one.gpu.uuid == stub.gpu_uuid(index))


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def all_up(reading: Reading) -> bool:
    return [one.state for one in reading.gpus] == [DeviceState.UP] * 8


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def control(tmp_path: Path) -> stub.StubControl:
    return stub.control(tmp_path / "control")


@contextlib.asynccontextmanager
async def watched(
    library: Path, control_path: Path, control: stub.StubControl, *, start_deadline_seconds: float = 20.0
) -> AsyncIterator[Watched]:
    worker = Worker(
        name="nvml",
        command=child_command(INTERVAL_SECONDS, list(Field)),
        interval_seconds=INTERVAL_SECONDS,
        deadline_seconds=DEADLINE_SECONDS,
        start_deadline_seconds=start_deadline_seconds,
        env={**os.environ, **stub.environment(library, control_path)},
    )
    task = asyncio.create_task(worker.run())
    try:
        yield Watched(worker, control)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def node(library: Path, tmp_path: Path, control: stub.StubControl) -> AsyncIterator[Watched]:
    async with watched(library, tmp_path / "control", control) as one:
        yield one


# ---- Layouts ----


@pytest.mark.parametrize(
    ("layout", "size_bytes"),
    [
        ("c_nvmlFieldValue_t", 40),
        ("c_nvmlMemory_v2_t", 40),
        ("nvmlPciInfo_t", 68),
        ("c_nvmlProcessInfo_v3_t", 24),
        ("c_nvmlProcessUtilizationSample_t", 32),
        ("c_nvmlProcessUtilizationInfo_v1_t", 40),
        ("c_nvmlGpmMetric_t", 40),
        ("c_nvmlEventData_t", 32),
        ("c_nvmlDeviceAttributes", 40),
        ("c_nvmlGpuInstanceProfileInfo_t", 48),
    ],
)
def test_binding_layouts_match_the_c_headers(layout: str, size_bytes: int) -> None:
    assert ctypes.sizeof(getattr(pynvml, layout)) == size_bytes


async def test_every_gpu_reading_matches_the_driver(node: Watched) -> None:
    def complete(reading: Reading) -> Reading | None:
        return reading if all(Field.PROF_SM_ACTIVE in one.values for one in reading.gpus) and reading.gpus else None

    reading = await node.until(complete, "a reading with GPM")
    assert reading.driver_version == stub.RELEASE
    assert reading.nvml_version == f"13.{stub.RELEASE}"
    assert len(reading.gpus) == 8
    for index, one in enumerate(reading.gpus):
        assert (one.gpu.uuid, one.gpu.index, one.gpu.minor) == (stub.gpu_uuid(index), index, index)
        assert one.gpu.pci_bus_id == f"00000000:{0x10 + index:02X}:00.0"
        assert one.gpu.model == "NVIDIA H100 80GB HBM3"
        assert (one.gpu.compute_slices, one.gpu.memory_slices) == (7, 8)
        assert one.gpu.labels[Field.SERIAL] == f"16500000000{index:02d}"
        expected = expected_values(index)
        assert {field: one.values.get(field) for field in expected} == pytest.approx(expected)


def expected_values(index: int) -> dict[Field, float]:
    """Return the values of the simulated driver, in the units of ``Field``."""
    counters = {Field.ECC_SBE_VOL_TOTAL: 3, Field.ECC_DBE_AGG_TOTAL: 6, Field.POWER_VIOLATION: 74}
    counters |= {Field.TOTAL_BASE_CLOCKS_VIOLATION: 81, Field.PCIE_REPLAY_COUNTER: 94}
    counters |= {Field.CORRECTABLE_REMAPPED_ROWS: 142, Field.UNCORRECTABLE_REMAPPED_ROWS: 143}
    counters |= {Field.NVLINK_ERROR_DL_REPLAY: 161}
    engine = (805 - index) / 1000
    return {
        **{field: 1000 * number + index for field, number in counters.items()},
        Field.NVLINK_TX_BYTES_TOTAL: (138_000 + index) * 1024,
        Field.NVLINK_RX_BYTES_TOTAL: (139_000 + index) * 1024,
        Field.GPU_UTIL: 90 - index,
        Field.MEM_COPY_UTIL: 40 + index,
        Field.GPU_TEMP: 50 + index,
        Field.MEMORY_TEMP: 60 + index,
        Field.POWER_USAGE: 400 + index,
        Field.POWER_USAGE_INSTANT: 400 + index,
        Field.TOTAL_ENERGY_CONSUMPTION: 5_000_000_000_000 + index,
        Field.SM_CLOCK: 1900 + index,
        Field.MEM_CLOCK: 2600 + index,
        Field.MAX_SM_CLOCK: 1980,
        Field.POWER_MGMT_LIMIT: 650,
        Field.POWER_MGMT_LIMIT_MIN: 200,
        Field.POWER_MGMT_LIMIT_MAX: 700,
        Field.ENFORCED_POWER_LIMIT: 640,
        Field.GPU_TEMP_LIMIT: 37 - index,
        Field.FB_TOTAL: 81559,
        Field.FB_RESERVED: 500,
        Field.FB_USED: 20_000 + index,
        Field.FB_FREE: 81559 - 500 - 20_000 - index,
        Field.PROF_GR_ENGINE_ACTIVE: engine,
        Field.PROF_SM_ACTIVE: engine * 0.9,
        Field.PROF_PIPE_TENSOR_ACTIVE: engine * 0.4,
        Field.PROF_DRAM_ACTIVE: engine * 0.3,
        Field.PROF_PCIE_TX_BYTES: 20 * stub.MIB,
        Field.PROF_NVLINK_RX_BYTES: 60 * stub.MIB,
    }


def sampled(reading: Reading) -> tuple[ProcessUse, ...] | None:
    processes = gpu(reading, 3).processes if reading.gpus else None
    return processes if processes and any(one.sm_ratio for one in processes) else None


async def test_process_readings_have_memory_and_samples_and_drop_garbage_slots(node: Watched) -> None:
    processes = await node.until(sampled, "process samples")
    assert {(one.pid, one.memory_used_bytes, one.sm_ratio) for one in processes} == {
        (100_030, 9_000 * stub.MIB, 0.40),
        (100_031, 9_001 * stub.MIB, 0.41),
    }
    assert {(one.enc_ratio, one.dec_ratio, one.jpg_ratio, one.ofa_ratio) for one in processes} == {
        (0.01, 0.02, 0.03, 0.04)
    }


async def test_missing_process_sample_call_falls_back_to_the_older_call(
    tmp_path: Path, control: stub.StubControl
) -> None:
    library = stub.build(tmp_path / "driver", without=["nvmlDeviceGetProcessesUtilizationInfo"])
    async with watched(library, tmp_path / "control", control) as node:
        processes = await node.until(sampled, "process samples")
    assert {one.pid: one.sm_ratio for one in processes} == {100_030: 0.40, 100_031: 0.41}
    assert {(one.jpg_ratio, one.ofa_ratio) for one in processes} == {(None, None)}, "an unreported value is not 0"


async def test_early_r535_drivers_long_process_records_are_recognised(
    tmp_path: Path, control: stub.StubControl
) -> None:
    library = stub.build(tmp_path / "driver", without=["nvmlDeviceGetRunningProcessDetailList"], wide=True)
    async with watched(library, tmp_path / "control", control) as node:
        processes = await node.until(lambda reading: reading.gpus and gpu(reading, 5).processes, "processes")
    assert {one.pid: one.memory_used_bytes for one in processes} == {
        100_050: 9_000 * stub.MIB,
        100_051: 9_001 * stub.MIB,
    }


async def test_every_mig_instance_has_its_own_values(library: Path, tmp_path: Path) -> None:
    control = stub.control(tmp_path / "control", partitioned=True)

    def complete(reading: Reading) -> Reading | None:
        parts = [part for one in reading.gpus for part in one.instances]
        return reading if parts and all(Field.PROF_GR_ENGINE_ACTIVE in part.values for part in parts) else None

    async with watched(library, tmp_path / "control", control) as node:
        reading = await node.until(complete, "a reading with GPM of every instance")
    assert [len(one.instances) for one in reading.gpus] == [7] * 8
    for index, one in enumerate(reading.gpus):
        assert one.gpu.mig_enabled
        assert Field.GPU_UTIL not in one.values
        assert one.values[Field.POWER_USAGE] == 400 + index
        for place, part in enumerate(one.instances):
            assert part.instance.uuid == stub.instance_uuid(index, place)
            assert part.instance.parent_uuid == stub.gpu_uuid(index)
            assert (part.instance.gpu_instance_id, part.instance.compute_instance_id) == (7 + place, 0)
            assert (part.instance.profile, part.instance.compute_slices) == ("1g.10gb", 1)
            assert part.instance.memory_slices == 1
            assert part.values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx((100 * place + index) / 1000)
            assert part.values[Field.FB_USED] == 1_000 + 10 * index + place
            assert part.values[Field.FB_TOTAL] == 9_984
            assert Field.POWER_USAGE not in part.values
            assert part.processes is not None
            assert [process.pid for process in part.processes] == [200_000 + 10 * index + place]


async def test_changed_mig_layout_is_detected_while_running(library: Path, tmp_path: Path) -> None:
    control = stub.control(tmp_path / "control", partitioned=True)

    def instances(reading: Reading) -> list[str]:
        return [part.instance.uuid for part in gpu(reading, 2).instances] if reading.gpus else []

    async with watched(library, tmp_path / "control", control) as node:
        await node.until(lambda reading: len(instances(reading)) == 7, "seven instances")
        control.gpus[2].instance_count = 2
        control.gpus[2].instances[0].generation = 1
        after = [stub.instance_uuid(2, 0, 1), stub.instance_uuid(2, 1)]
        await node.until(lambda reading: instances(reading) == after, "the new layout")


# ---- Optional parts of a driver ----


async def test_missing_symbol_removes_only_its_field(tmp_path: Path, control: stub.StubControl) -> None:
    missing = ["nvmlDeviceGetEncoderUtilization", "nvmlGpmQueryDeviceSupport", "nvmlDeviceGetMarginTemperature"]
    library = stub.build(tmp_path / "driver", without=missing)
    async with watched(library, tmp_path / "control", control) as node:
        await node.until(all_up, "a first reading")
        reading = await node.until(lambda reading: reading if all_up(reading) else None, "a second, as GPM needs")
    for one in reading.gpus:
        absent = {Field.ENC_UTIL, Field.GPU_TEMP_LIMIT, Field.PROF_GR_ENGINE_ACTIVE, Field.PROF_SM_ACTIVE}
        assert not absent & one.values.keys()
        assert {Field.DEC_UTIL, Field.GPU_TEMP, Field.GPU_UTIL, Field.POWER_USAGE} <= one.values.keys()


async def test_missing_temperature_call_falls_back_to_the_older_call(tmp_path: Path, control: stub.StubControl) -> None:
    library = stub.build(tmp_path / "driver", without=["nvmlDeviceGetTemperatureV"])
    async with watched(library, tmp_path / "control", control) as node:
        reading = await node.until(lambda reading: reading if all_up(reading) else None, "a reading")
    assert [one.values[Field.GPU_TEMP] for one in reading.gpus] == [50 + index for index in range(8)]


# ---- Faults: a stated condition, a counted reason, and everything back by itself ----


async def test_lost_gpu_leaves_other_gpus_up_and_returns(node: Watched) -> None:
    await node.until(all_up, "all up")
    node.control.gpus[3].error = GPU_IS_LOST
    reading = await node.until(
        lambda reading: reading if gpu(reading, 3).state is DeviceState.LOST else None, "GPU 3 lost"
    )
    assert gpu(reading, 3).reason == "gpu_is_lost"
    assert not gpu(reading, 3).values
    assert all(gpu(reading, index).state is DeviceState.UP for index in range(8) if index != 3)
    node.control.gpus[3].error = 0
    await node.until(all_up, "GPU 3 back")


async def test_gpu_lost_before_start_does_not_hide_other_gpus(node: Watched) -> None:
    node.control.gpus[0].error = GPU_IS_LOST
    await node.until(
        lambda reading: sum(one.state is DeviceState.UP for one in reading.gpus) == 7, "seven GPUs up without the first"
    )
    node.control.gpus[0].error = 0
    await node.until(all_up, "GPU 0 seen")


async def test_gpu_with_failing_calls_is_down_with_the_reason(node: Watched) -> None:
    await node.until(all_up, "all up")
    node.control.gpus[6].error = UNKNOWN
    reading = await node.until(
        lambda reading: reading if gpu(reading, 6).state is not DeviceState.UP else None, "GPU 6 down"
    )
    assert gpu(reading, 6).reason == "unknown_error"
    node.control.gpus[6].error = 0
    await node.until(all_up, "GPU 6 back")


async def test_hanging_call_is_cut_off_and_reading_resumes(node: Watched) -> None:
    await node.until(all_up, "all up")
    first_pid = node.worker.pid
    node.control.hang = b"nvmlGpmSampleGet"
    await node.state(SourceState.HUNG)
    assert node.worker.errors["hung"] >= 1
    node.control.hang = b""
    await node.until(all_up, "reading again")
    assert node.worker.status.state is SourceState.UP
    assert node.worker.status.restarts >= 1
    assert node.worker.pid != first_pid


async def test_hanging_start_is_cut_off(library: Path, tmp_path: Path, control: stub.StubControl) -> None:
    control.hang = b"nvmlInitWithFlags"
    async with watched(library, tmp_path / "control", control, start_deadline_seconds=3.0) as node:
        await node.state(SourceState.HUNG)
        control.hang = b""
        await node.until(all_up, "reading")


async def test_unloaded_driver_is_reported_and_retried(node: Watched) -> None:
    node.control.driver_error = DRIVER_NOT_LOADED
    await node.state(SourceState.FAILED)
    assert node.worker.status.reason == "driver_not_loaded"
    assert "modprobe" in node.worker.status.message
    node.control.driver_error = 0
    await node.until(all_up, "reading once the driver is loaded")


async def test_driver_unloaded_while_running_is_reported_and_returns(node: Watched) -> None:
    await node.until(all_up, "all up")
    node.control.driver_error = DRIVER_NOT_LOADED
    await node.state(SourceState.FAILED)
    assert node.worker.status.reason == "driver_not_loaded"
    node.control.driver_error = 0
    await node.until(all_up, "reading again")


async def test_xid_is_reported_once(node: Watched) -> None:
    await node.until(all_up, "all up")
    node.control.gpus[4].xid = 79
    node.control.gpus[4].xid_count = 1
    event = await node.until(lambda reading: reading.xids[0] if reading.xids else None, "the Xid")
    assert (event.uuid, event.xid, event.gpu_instance_id) == (stub.gpu_uuid(4), 79, None)
    reading = await node.until(lambda reading: reading, "the next reading")
    assert reading.xids == ()


async def test_slow_driver_is_not_reported_as_hung(node: Watched) -> None:
    await node.until(all_up, "all up")
    node.control.slow_micros = 2_000
    await node.until(lambda reading: all_up(reading) and reading.duration_seconds > 0.1, "a slow sample")
    assert "hung" not in {reason for reason, count in node.worker.errors.items() if count}

"""A node whose host engine ends, returns, is paused or lacks its module: unknown values are absent, and return."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from page_support import rows
from pipeline_support import Pipeline, pipeline

from exporter.gpu import wire
from exporter.gpu.merge import supplement
from exporter.model.devices import DeviceState, Reading, SourceState, SourceStatus
from exporter.model.fields import Field
from exporter.model.snapshot import Snapshot
from gpu_simulator import scenario
from gpu_simulator.node import SimulatedNode

PATIENCE_SECONDS = 30.0
SHIPPED = Path(scenario.__file__).parent / "scenarios"


def written(directory: Path, name: str, more: str) -> str:
    """Write a shipped scenario with additions, as a file."""
    file = directory / f"{name}.yaml"
    file.write_text((SHIPPED / f"{name}.yaml").read_text(encoding="utf-8") + more, encoding="utf-8")
    return str(file)


@asynccontextmanager
async def a100(directory: Path, more: str, source: str = "auto") -> AsyncIterator[Pipeline]:
    loaded = scenario.load(written(directory, "a100-mig", more))
    async with pipeline(loaded, directory, start=100.0, source=source) as node:
        yield node


def shown(snapshot: Snapshot, name: str, **wanted: str) -> list[float]:
    return [value for labels, value in rows(snapshot, name) if wanted.items() <= labels.items()]


def measured(snapshot: Snapshot) -> Sequence[float]:
    """Return the activity of MIG instances, which only DCGM knows on this node."""
    return [view.activity.ratio for view in snapshot.devices if view.instance and view.activity]


async def test_lost_engine_removes_only_its_own_values_until_it_returns(tmp_path: Path) -> None:
    async with a100(tmp_path, "faults: [{kind: engine_down, from: 105, to: 110}]\n") as node:
        found = {second: await node.step(float(second)) for second in range(100, 115)}
        now = {second: len(measured(snapshot)) for second, snapshot in found.items()}
        assert [now[second] for second in (103, 104)] == [4, 4]
        assert [now[second] for second in range(105, 110)] == [0] * 5
        assert [now[second] for second in range(112, 115)] == [4, 4, 4], "within two samples after its return"
        for second in (104, 107, 113):
            assert len(shown(found[second], "gpu_power_watts")) == 2
            assert len(shown(found[second], "gpu_memory_used_bytes")) == 6
            assert shown(found[second], "gpu_exporter_source_up", source="nvml") == [1]
            assert shown(found[second], "gpu_exporter_source_up", source="dcgm") == [int(second != 107)]
        assert shown(found[107], "DCGM_FI_PROF_GR_ENGINE_ACTIVE") == []
        assert shown(found[107], "gpu_profiling_state") == []
        assert [one.reason for one in found[107].sources] == ["", "dcgm_refused"]


async def test_lost_engine_with_dcgm_alone_makes_everything_unknown(tmp_path: Path) -> None:
    async with a100(tmp_path, "faults: [{kind: engine_down, from: 105, to: 115}]\n", source="dcgm") as node:
        before = await node.until(104.0, steps=4)
        gone = await node.until(112.0, steps=7)
        after = await node.until(119.0, steps=4)
        for snapshot, there in ((before, True), (gone, False), (after, True)):
            assert bool(shown(snapshot, "gpu_power_watts")) is there
            assert bool(shown(snapshot, "gpu_memory_used_bytes")) is there
            assert len(measured(snapshot)) == (4 if there else 0)


async def test_paused_profiling_is_a_state_without_values(tmp_path: Path) -> None:
    async with a100(tmp_path, "faults: [{kind: profiling_paused, from: 105, to: 115}]\n") as node:
        paused = await node.until(112.0, steps=12)
        assert shown(paused, "gpu_profiling_state", state="paused") == [1, 1]
        assert shown(paused, "gpu_profiling_state", state="running") == []
        assert measured(paused) == []
        assert shown(paused, "gpu_exporter_source_up", source="dcgm") == [1]
        again = await node.until(125.0, steps=12)
        assert shown(again, "gpu_profiling_state", state="running") == [1, 1]
        assert len(measured(again)) == 4


async def test_a100_without_the_profiling_module_has_all_other_values(tmp_path: Path) -> None:
    async with a100(tmp_path, "dcgm: {profiling_module: false}\n", source="dcgm") as node:
        snapshot = await node.until(104.0, steps=5)
        assert shown(snapshot, "gpu_profiling_state", state="no_module") == [1, 1]
        assert measured(snapshot) == []
        assert len(shown(snapshot, "gpu_power_watts")) == 2
        assert len(shown(snapshot, "gpu_memory_used_bytes")) == 6


@pytest.mark.parametrize("version", ["3.3.9", "4.4.2", "4.7.0"])
async def test_engines_of_other_versions_give_the_same_values(version: str, tmp_path: Path) -> None:
    async with a100(tmp_path, f"dcgm: {{version: {version}}}\n", source="dcgm") as node:
        snapshot = await node.until(104.0, steps=5)
        assert shown(snapshot, "gpu_exporter_dcgm_info", version=version) == [1]
        assert len(measured(snapshot)) == 4
        assert len(shown(snapshot, "DCGM_FI_DEV_FB_USED")) == 5


@pytest.mark.parametrize(
    ("second", "index", "states"),
    [
        (40, 0, {DeviceState.LOST}),
        # DCGM's values are plain blanks while a GPU needs a reset: with DCGM alone the GPU has failed.
        (80, 1, {DeviceState.RESET_REQUIRED, DeviceState.FAILED}),
        (120, 2, {DeviceState.FAILED}),
        (160, 3, {DeviceState.MISSING, DeviceState.LOST}),
    ],
)
@pytest.mark.parametrize("source", ["nvml", "dcgm", "auto"])
async def test_faulty_gpu_is_down_through_either_source_and_others_are_up(
    source: str, second: int, index: int, states: set[DeviceState], tmp_path: Path
) -> None:
    async with pipeline(scenario.load("chaos"), tmp_path, start=second - 14.0, source=source) as node:
        snapshot = await node.until(float(second), steps=15)
        assert shown(snapshot, "gpu_up", gpu=str(index)) == [0]
        assert shown(snapshot, "gpu_up").count(1) == 3
        assert shown(snapshot, "gpu_power_watts", gpu=str(index)) == []
        newest = node.node.record.newest
        assert newest is not None
        assert newest.gpus[index].state in states
        well = await node.until(second + 20.0, steps=5)
        assert shown(well, "gpu_up") == [1] * 4
        assert len(shown(well, "gpu_power_watts")) == 4


async def test_xids_are_counted_through_dcgm_alone(tmp_path: Path) -> None:
    async with pipeline(scenario.load("chaos"), tmp_path, start=28.0, source="dcgm") as node:
        await node.until(32.0, steps=5)
        snapshot = await node.until(72.0, steps=6)
        assert shown(snapshot, "gpu_xid_errors_total", gpu="0", xid="79") == [1]
        assert shown(snapshot, "gpu_xid_errors_total", gpu="1", xid="48") == [1]


@asynccontextmanager
async def child(command: Sequence[str]) -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=2**24)
    assert process.stdout
    try:
        yield process.stdout
    finally:
        process.kill()
        await process.wait()


async def messages_of(stream: asyncio.StreamReader) -> AsyncIterator[Reading | SourceStatus]:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while line := await stream.readline():
            yield wire.decode(line)


@pytest.mark.parametrize("address", ["localhost:5555", "embedded"])
async def test_child_of_a_simulated_node_reads_its_engine(address: str, tmp_path: Path) -> None:
    node = SimulatedNode(scenario.load("a100-mig"), tmp_path, time.time)
    fields = supplement([Field.PROF_SM_ACTIVE])
    async with child(node.child_command(0.2, fields, address)) as stream:
        async for found in messages_of(stream):
            if isinstance(found, Reading) and _instances(found).get(Field.PROF_SM_ACTIVE, 0.0) > 0:
                assert (found.source, found.dcgm_version) == ("dcgm", "4.6.0")
                assert len(found.gpus[1].instances) == 4
                return
    raise AssertionError("the child ended without a profiled reading")


def _instances(reading: Reading) -> Mapping[Field, int | float]:
    return reading.gpus[1].instances[0].values


async def test_child_reports_a_missing_engine(tmp_path: Path) -> None:
    node = SimulatedNode(scenario.load("demo"), tmp_path, time.time)
    async with child(node.child_command(0.2, supplement([]), "elsewhere:5555")) as stream:
        async for found in messages_of(stream):
            if isinstance(found, SourceStatus) and found.state is SourceState.FAILED:
                assert found.reason == "dcgm_refused"
                assert re.search("nothing listens at elsewhere:5555", found.message)
                return
    raise AssertionError("the child ended without a reason")

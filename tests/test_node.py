"""A simulated node end to end: real gRPC, a real child process with the real NVML binding, real files."""

import asyncio
import time
from pathlib import Path

import pytest

from exporter.attribution.join import attribute
from exporter.attribution.processes import PodLookup
from exporter.errors import ConfigError
from exporter.gpu.worker import Worker
from exporter.kube.kubelet import KubeletClient
from exporter.metrics.collectors_file import DEFAULT
from exporter.model.devices import DeviceState, Reading, SourceState
from exporter.model.fields import Field
from gpu_simulator import scenario
from gpu_simulator.child import main
from gpu_simulator.node import SimulatedNode
from gpu_simulator.truth import NodeTruth

EPOCH = 1_700_000_000.0


async def readings(node: SimulatedNode, directory: Path, count: int) -> list[Reading]:
    """Return the first readings of a real child of this node."""
    worker = Worker(name="nvml", command=node.child_command(0.25, DEFAULT.fields), interval_seconds=0.25)
    task = asyncio.create_task(worker.run())
    taken: list[Reading] = []
    try:
        async with asyncio.timeout(30):
            while len(taken) < count:
                await asyncio.sleep(0.05)
                taken += worker.take()
    except TimeoutError:
        pytest.fail(f"no readings in {directory}: {worker.status}")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert worker.status.state is not SourceState.FAILED
    return taken


def kubelet_view(truth: NodeTruth) -> set[tuple[str, str, str, str]]:
    return {(h.device_uuid, h.namespace, h.pod, h.container) for h in truth.holders}


async def test_simulated_kubelet_and_files_match_the_scenario(tmp_path: Path) -> None:
    now = EPOCH + 100.0
    node = SimulatedNode(scenario.load("demo"), tmp_path, lambda: now, EPOCH)
    await node.start()
    client = KubeletClient(str(node.kubelet_socket))
    try:
        allocations = await client.fetch(now)
    finally:
        await node.stop()
    truth = node.truth()
    reported = {(c.namespace, c.pod, c.container, i) for c in allocations.containers for d in c.devices for i in d.ids}
    assert reported == {(h.namespace, h.pod, h.container, i) for h in truth.holders for i in h.device_ids}
    lookup = PodLookup(node.proc_root, node.pod_log_root)
    processes = [p for gpu in truth.gpus for part in (gpu, *gpu.instances) for p in part.processes]
    assert len(processes) > 10
    for process in processes:
        uid = lookup.pod_uid(process.pid)
        assert uid == process.pod_uid
        assert lookup.name_of(uid) == (process.namespace, process.pod)


async def test_simulated_driver_matches_the_scenario_and_the_join_finds_every_holder(tmp_path: Path) -> None:
    node = SimulatedNode(scenario.load("demo"), tmp_path, time.time, time.time() - 100.0)
    await node.start()
    client = KubeletClient(str(node.kubelet_socket))
    try:
        reading = (await readings(node, tmp_path, 4))[-1]
        allocations = await client.fetch(reading.taken_at_seconds)
    finally:
        await node.stop()
    truth = node.truth()
    assert [gpu.gpu.uuid for gpu in reading.gpus] == [gpu.uuid for gpu in truth.gpus]
    assert [gpu.state for gpu in reading.gpus] == [DeviceState.UP] * 8
    instances = [part.instance for gpu in reading.gpus for part in gpu.instances]
    assert [part.uuid for part in instances] == [i.uuid for gpu in truth.gpus for i in gpu.instances]
    # student-05 and the notebook are idle, the notebook since second 20.
    assert reading.gpus[3].values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(0.0, abs=1e-6)
    assert reading.gpus[5].instances[4].values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(0.0, abs=1e-6)
    assert reading.gpus[4].instances[2].values[Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(0.3, abs=1e-3)
    attribution = attribute(allocations, reading.gpus)
    found = {(uuid, h.namespace, h.pod, h.container) for uuid, held in attribution.holders.items() for h in held}
    assert found == kubelet_view(truth)
    shares = {(h.device_uuid, h.pod): h.share_ratio for held in attribution.holders.values() for h in held}
    assert shares == pytest.approx({(h.device_uuid, h.pod): h.share_ratio for h in truth.holders})


async def test_scenario_fault_reaches_the_reading_of_the_child_process(tmp_path: Path) -> None:
    node = SimulatedNode(scenario.load("demo"), tmp_path, time.time, time.time() - 185.0)
    reading = (await readings(node, tmp_path, 3))[-1]
    assert [gpu.gpu.index for gpu in reading.gpus if gpu.state is DeviceState.UP] == [0, 2, 3, 4, 5, 6, 7]


async def test_pod_log_directories_follow_the_scenario(tmp_path: Path) -> None:
    now = EPOCH + 30.0
    node = SimulatedNode(scenario.load("t4-timeslicing"), tmp_path, lambda: now, EPOCH)
    await node.start()
    try:
        before = {path.name for path in node.pod_log_root.iterdir()}
        now = EPOCH + 100.0
        async with asyncio.timeout(10):
            while {path.name for path in node.pod_log_root.iterdir()} == before:  # noqa: ASYNC110 - files send no event
                await asyncio.sleep(0.05)
    finally:
        await node.stop()
    gone = before - {path.name for path in node.pod_log_root.iterdir()}
    assert {name.split("_")[1] for name in gone} == {"thumbnails-0"}


def test_in_memory_scenario_has_no_child_command(tmp_path: Path) -> None:
    loaded = scenario.load("demo")
    node = SimulatedNode(scenario.build(loaded.plan), tmp_path, lambda: EPOCH)
    with pytest.raises(ConfigError, match="'demo' has no file"):
        node.child_command(1.0, DEFAULT.fields)


def test_child_with_an_unknown_scenario_exits_with_2_and_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scenario", "dmeo", "--epoch", "0"]) == 2
    assert "did you mean 'demo'" in capsys.readouterr().err

"""Holders of a shared device, on the agent's page in virtual time: use of each, and its idle time."""

from dataclasses import replace
from pathlib import Path

import pytest
from page_support import rows
from pipeline_support import AgentSettings, Pipeline, pipeline, save_now

from exporter.model.snapshot import Snapshot
from gpu_simulator import driver
from gpu_simulator.scenario import Scenario, load

LONG_SECONDS = 7200
COMPUTE_LIST = "nvmlDeviceGetComputeRunningProcesses_v3"
NOT_SUPPORTED = 3

Values = dict[tuple[str, str], float]


def column(snapshot: Snapshot, name: str) -> Values:
    """Return values of a metric by pod and container; the device itself has two empty names."""
    return {
        (pairs.get("pod_name", pairs.get("pod", "")), pairs.get("container_name", pairs.get("container", ""))): value
        for pairs, value in rows(snapshot, name)
    }


def sources(snapshot: Snapshot) -> dict[tuple[str, str], str]:
    """Return the label ``source`` of ``gpu_pod_activity_ratio``."""
    return {
        (use.holder.pod, use.holder.container): str(use.activity.source)
        for view in snapshot.devices
        for use in view.pods
        if use.activity
    }


def active_seconds(snapshot: Snapshot) -> dict[str, float]:
    """Return the active time of the ledger by namespace, where every pod has a separate one."""
    ledger = snapshot.metering.ledger
    assert ledger
    return {account.owner.namespace: totals.seconds.active for account, totals in ledger.accounts.items()}


def scenario(directory: Path, pods: str, *, more: str = "", replicas: int = 4) -> Scenario:
    """Return one time-sliced H100."""
    file = directory / "scenario.yaml"
    gpu = f"{{model: h100, sharing: {{strategy: time-slicing, replicas: {replicas}}}}}"
    file.write_text(f"node: n1\ngpus:\n  - {gpu}\npods:\n{pods}{more}")
    return load(str(file))


def pod(name: str, replica: int, activity: str, more: str = "") -> str:
    device = f"devices: [{{gpu: 0, replicas: [{replica}]}}], activity: {activity}, memory_mib: 4096"
    return f"  - {{namespace: {name}, name: {name}, {device}{more}}}\n"


async def test_two_containers_of_one_pod_do_not_affect_other_pods(tmp_path: Path) -> None:
    containers = ", ".join(
        f"{{name: {name}, devices: [{{gpu: 0, replicas: [{replica}]}}], activity: {activity}, memory_mib: 4096}}"
        for name, replica, activity in (("x", 0, 0.4), ("y", 1, 0))
    )
    pair = f"  - {{namespace: pair, name: pair, containers: [{containers}]}}\n"
    async with pipeline(scenario(tmp_path, pair + pod("solo", 2, "0"), replicas=3), tmp_path) as node:
        snapshot = await node.until(90.0, steps=91)
    activity = column(snapshot, "gpu_pod_activity_ratio")
    assert activity["pair", "x"] + activity["pair", "y"] == pytest.approx(0.4, abs=0.01)
    assert activity["solo", "main"] == 0.0
    assert sources(snapshot) == {
        ("pair", "x"): "estimated",
        ("pair", "y"): "estimated",
        ("solo", "main"): "process_samples",
    }
    assert active_seconds(snapshot)["solo"] == pytest.approx(0.0, abs=1.0), "except for the first poll of processes"
    assert column(snapshot, "gpu_pod_idle_for_seconds")["solo", "main"] > 80
    memory = column(snapshot, "gpu_pod_memory_used_bytes")
    assert set(memory) == {("solo", "main")}, "the parts of the pair are unknown"
    assert column(snapshot, "gpu_unattributed_processes") == {("", ""): 0}


JPEG = ", mix: {engine: 0, jpeg: 1}"


async def test_jpeg_use_of_a_shared_gpu_belongs_to_its_pod(tmp_path: Path) -> None:
    pods = pod("jpeg", 0, "0.9", JPEG) + pod("trickle", 1, "0.02")
    async with pipeline(scenario(tmp_path, pods), tmp_path) as node:
        snapshot = await node.until(120.0, steps=121)
    activity = column(snapshot, "gpu_pod_activity_ratio")
    assert activity["jpeg", "main"] > 0.85
    assert activity["trickle", "main"] < 0.04
    assert column(snapshot, "gpu_pod_idle_for_seconds")["jpeg", "main"] == 0
    assert active_seconds(snapshot)["jpeg"] > 10 * active_seconds(snapshot)["trickle"]


@pytest.mark.parametrize(("jpeg", "other"), [(0.9, 0.02), (0.6, 0.4)], ids=["little is sampled", "much is sampled"])
async def test_activity_of_an_unsampled_engine_is_divided_by_share(tmp_path: Path, jpeg: float, other: float) -> None:
    pods = pod("jpeg", 0, str(jpeg), JPEG) + pod("other", 1, str(other))
    old = "driver: 535.129.03\n"
    async with pipeline(scenario(tmp_path, pods, more=old), tmp_path) as node:
        snapshot = await node.until(120.0, steps=121)
    assert set(sources(snapshot).values()) == {"estimated"}
    assert column(snapshot, "gpu_pod_activity_ratio") == {
        ("jpeg", "main"): pytest.approx(jpeg / 2, abs=0.01),
        ("other", "main"): pytest.approx(jpeg / 2, abs=0.01),
    }
    assert column(snapshot, "gpu_pod_idle_for_seconds") == {}, "each of them may be idle"


async def test_single_sample_of_one_holder_does_not_make_the_other_idle(tmp_path: Path) -> None:
    """Process samples return 0.1 s before a poll: the driver has one of about 14, and it belongs to one sharer."""
    pods = pod("a", 0, "0.5") + pod("b", 1, "0.3")
    lost = "faults:\n  - {kind: processes_lost, from: 10, to: 19.95}\n"
    async with pipeline(scenario(tmp_path, pods, more=lost), tmp_path) as node:
        await node.until(18.0, steps=19)
        await node.step(19.88)
        polled = await node.step(20.0)
        later = await node.until(24.0, steps=4)
    assert set(sources(polled).values()) == {"estimated"}
    assert column(polled, "gpu_pod_activity_ratio")["b", "main"] == pytest.approx(0.4, abs=0.05), "divided by share"
    assert set(sources(later).values()) == {"process_samples"}
    assert column(later, "gpu_pod_activity_ratio")["b", "main"] == pytest.approx(0.3, abs=0.1)


async def test_samples_of_a_small_part_of_a_poll_interval_do_not_make_a_holder_idle(tmp_path: Path) -> None:
    """The driver has no samples of processes for 1.8 of the 2 s, and lists all processes at both polls."""
    pods = pod("a", 0, "0.5") + pod("b", 1, "0.3")
    lost = "faults:\n  - {kind: processes_lost, from: 20.05, to: 21.85}\n"
    async with pipeline(scenario(tmp_path, pods, more=lost), tmp_path) as node:
        before = await node.until(20.0, steps=21)
        for at in (20.5, 21.0, 21.5, 21.84):
            await node.step(at)
        polled = await node.step(22.0)
    assert set(sources(before).values()) == {"process_samples"}
    assert set(sources(polled).values()) == {"estimated"}
    assert column(polled, "gpu_pod_activity_ratio")["b", "main"] == pytest.approx(0.4, abs=0.05), "divided by share"


async def test_burst_is_not_attributed_to_the_previously_active_holder(tmp_path: Path) -> None:
    """Samples of the 2 s before the burst have the other sharer only; the next poll shows the holder of the burst."""
    pods = pod("a", 0, "0.02") + pod("b", 1, "{steps: [{at: 0, level: 0}, {at: 20.05, level: 0.9}]}")
    async with pipeline(scenario(tmp_path, pods), tmp_path) as node:
        await node.until(20.0, steps=21)
        burst = await node.step(21.0)
        later = await node.until(24.0, steps=4)
    assert set(sources(burst).values()) == {"estimated"}
    assert column(burst, "gpu_pod_activity_ratio")["b", "main"] > 0.3
    assert column(later, "gpu_pod_activity_ratio")["b", "main"] == pytest.approx(0.9, abs=0.05)


async def test_samples_before_a_process_loss_do_not_divide_the_time_after_it(tmp_path: Path) -> None:
    pods = pod("a", 0, "0.5") + pod("b", 1, "0.3")
    lost = "faults:\n  - {kind: processes_lost, from: 10.95, to: 19}\n"
    async with pipeline(scenario(tmp_path, pods, more=lost), tmp_path) as node:
        await node.until(10.0, steps=11)
        for at in (10.3, 10.5, 10.7, 10.9):
            before = await node.step(at)
        polled = await node.step(12.0)
        later = await node.until(24.0, steps=12)
    assert set(sources(before).values()) == {"process_samples"}
    assert set(sources(polled).values()) == {"estimated"}
    assert column(polled, "gpu_pod_activity_ratio")["b", "main"] == pytest.approx(0.4, abs=0.05), "divided by share"
    assert set(sources(later).values()) == {"process_samples"}


async def test_memory_of_hidden_processes_is_absent_not_zero(tmp_path: Path) -> None:
    """In a separate PID namespace with the host's /proc: the list is empty, samples have pids of the host."""
    pods = pod("a", 0, "0.6") + pod("b", 1, "0.2")
    async with pipeline(scenario(tmp_path, pods), tmp_path) as node:
        driver.fail(COMPUTE_LIST, NOT_SUPPORTED)
        snapshot = await node.until(60.0, steps=61)
        driver.clear_failures()
    assert column(snapshot, "gpu_pod_memory_used_bytes") == {}
    assert column(snapshot, "gpu_unattributed_memory_used_bytes") == {}
    assert column(snapshot, "gpu_unattributed_processes") == {}
    assert set(column(snapshot, "DCGM_FI_DEV_FB_USED")) == {("", "")}
    activity = column(snapshot, "gpu_pod_activity_ratio")
    assert activity["a", "main"] == pytest.approx(0.6, abs=0.1), "samples show pids of the host"
    assert sources(snapshot) == {("a", "main"): "process_samples", ("b", "main"): "process_samples"}


async def test_small_shares_of_utilisation_are_fractional(tmp_path: Path) -> None:
    pods = "".join(pod(f"p{number}", number, "0.0075") for number in range(4))
    async with pipeline(scenario(tmp_path, pods), tmp_path) as node:
        seen = [await node.step(float(second)) for second in range(60)]
    parts = [column(snapshot, "DCGM_FI_DEV_GPU_UTIL") for snapshot in seen[20:]]
    of_pods = [sum(value for (name, _), value in one.items() if name) for one in parts]
    of_device = [one["", ""] for one in parts]
    sums = [(pods, device) for pods, device, one in zip(of_pods, of_device, parts, strict=True) if len(one) > 1]
    assert sums
    for pods_sum, device in sums:
        assert pods_sum == pytest.approx(device, abs=0.001)
    assert any(0 < value < 1 for one in parts for value in one.values())


# ---- Idle for long ----

SERVER = "  - {namespace: ml, name: server, devices: [{gpu: 0}], activity: 0, memory_mib: 4096}\n"


def server(directory: Path, faults: str = "") -> Scenario:
    """Return one H100 with an inference server without requests."""
    file = directory / "server.yaml"
    file.write_text(f"node: n1\ngpus:\n  - {{model: h100}}\npods:\n{SERVER}{faults}")
    return load(str(file))


def idle_for(snapshot: Snapshot, name: str = "server") -> float | None:
    return column(snapshot, "gpu_pod_idle_for_seconds").get((name, "main"))


async def sampled(node: Pipeline, begin: int, end: int, step: int) -> Snapshot:
    """Sample every ``step`` seconds."""
    for second in range(begin, end + 1, step):
        snapshot = await node.step(float(second))
    return snapshot


EVERY_MINUTE = AgentSettings(interval_seconds=60.0)
TOLERATED_GAP_SECONDS = 180


async def test_long_idle_time_continues_through_an_outage_of_four_samples(tmp_path: Path) -> None:
    fault = "faults:\n  - {kind: driver_unloaded, from: 3600, for: 230}\n"
    async with pipeline(server(tmp_path, fault), tmp_path, agent=EVERY_MINUTE) as node:
        await sampled(node, 0, 3420, TOLERATED_GAP_SECONDS)
        during = await sampled(node, 3480, 3780, 60)
        assert idle_for(during) is None
        before = await sampled(node, 3840, LONG_SECONDS, TOLERATED_GAP_SECONDS)
        assert LONG_SECONDS - 420 <= (idle_for(before) or 0) < LONG_SECONDS, "at most the measured time"
        snapshot = await sampled(node, LONG_SECONDS + 60, LONG_SECONDS + 360, 60)
    assert LONG_SECONDS <= (idle_for(snapshot) or 0) <= LONG_SECONDS + 120


async def test_long_idle_time_continues_through_a_restart_of_the_agent(tmp_path: Path) -> None:
    agent = AgentSettings(interval_seconds=240.0, state_dir=tmp_path / "state")
    agent.state_dir.mkdir()
    async with pipeline(server(tmp_path), tmp_path, agent=agent) as node:
        await sampled(node, 0, LONG_SECONDS // 2, 240)
        assert node.node.metering
        save_now(node.node.metering, 0.0, LONG_SECONDS / 2)
    async with pipeline(server(tmp_path), tmp_path, agent=agent, start=LONG_SECONDS / 2 + 60) as node:
        snapshot = await node.step(LONG_SECONDS / 2 + 60)
        assert idle_for(snapshot) == LONG_SECONDS / 2
        assert column(snapshot, "gpu_pod_age_seconds")["server", "main"] == LONG_SECONDS / 2 + 60
        snapshot = await sampled(node, LONG_SECONDS // 2 + 300, LONG_SECONDS + 60, 240)
        assert node.node.metering
        save_now(node.node.metering, 0.0, LONG_SECONDS + 60)
    assert idle_for(snapshot) == LONG_SECONDS
    rebooted = replace(agent, boot_id="boot-2")
    async with pipeline(server(tmp_path), tmp_path, agent=rebooted, start=LONG_SECONDS + 120) as node:
        assert idle_for(await node.step(LONG_SECONDS + 120)) == 0


async def test_process_poll_without_a_baseline_does_not_restart_the_idle_clock(tmp_path: Path) -> None:
    pods = pod("busy", 0, "0.5") + pod("server", 1, "0")
    async with pipeline(scenario(tmp_path, pods), tmp_path) as node:
        before = await node.until(60.0, steps=61)
        assert (idle_for(before) or 0) > 50
        node.sampled[0].close()
        during = await node.step(61.0)
        assert sources(during)["server", "main"] == "estimated"
        assert idle_for(during) is None
        snapshot = await node.until(80.0, steps=19)
    assert 60 < (idle_for(snapshot) or 0) < 80
    assert column(snapshot, "gpu_pod_idle_for_seconds")["busy", "main"] == 0


async def test_four_seconds_without_driver_do_not_restart_the_idle_clock(tmp_path: Path) -> None:
    fault = "faults:\n  - {kind: driver_unloaded, from: 100, for: 4}\n"
    async with pipeline(server(tmp_path, fault), tmp_path) as node:
        await node.until(99.0, steps=100)
        snapshot = await node.until(110.0, steps=11)
    assert 103 <= (idle_for(snapshot) or 0) <= 107

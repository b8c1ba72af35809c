"""An incomplete answer is a failed lookup: no GPU becomes free, and no clock restarts."""

import json
from pathlib import Path

import pytest
from agent_support import matching, running_agent, until
from pipeline_support import AgentSettings, pipeline

from exporter.cli import main
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, AllocationState, Owner
from exporter.model.snapshot import Snapshot
from gpu_simulator import scenario, scenario_file

HELD = """
description: one GPU that is held and idle, one that nobody holds
node: sim-node-1
other_pods: 2
gpus: [{model: h100, count: 2}]
pods:
  - {namespace: ml, name: a, start: -600, devices: [{gpu: 0}], activity: 0}
faults:
"""
STARTING = HELD + "  - {kind: kubelet_starting, from: 30, to: 60}\n"


INIT_ONLY = """
description: one GPU that an ordinary init container asked for, and one that nobody has
node: sim-node-1
gpus: [{model: h100, count: 2}]
pods:
  - namespace: ml
    name: p-initonly
    start: -600
    sidecars: [main]
    containers: [{name: setup, init: true, devices: [{gpu: 0}], activity: 0.6, memory_mib: 4096}]
"""


UPGRADED = """
description: an API server that is upgraded, after which a pod that only monitors and one that works get their claims
node: sim-node-1
plugin: {ids: dra}
dra_version: v1beta2
gpus: [{model: h100, count: 2}]
pods:
  - {namespace: ml, name: before, start: -600, devices: [{gpu: 0}], activity: 0.9}
  - {namespace: ml, name: after, start: 8, devices: [{gpu: 1}], activity: 0.9}
  - {namespace: health, name: watch, start: 8, devices: [{gpu: 0, admin: true}], activity: 0, processes: 0}
faults:
  - {kind: api_upgraded, from: 5}
"""


def seconds_of(snapshot: Snapshot, owner: Owner) -> float:
    ledger = snapshot.metering.ledger
    assert ledger is not None
    return sum(totals.seconds.total for line, totals in ledger.accounts.items() if line.owner == owner)


def socket_of(directory: Path) -> tuple[int, int] | None:
    """Return the identity of the kubelet's socket file; ``None`` without one."""
    try:
        found = (directory / "kubelet.sock").stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


@pytest.mark.parametrize("inside", [False, True])
async def test_starting_kubelet_frees_no_gpu_and_resets_no_duration(tmp_path: Path, *, inside: bool) -> None:
    node = scenario.build(scenario_file.parse(STARTING, "starting.yaml"))
    own = (node.others[0].namespace, node.others[0].name) if inside else None
    async with pipeline(node, tmp_path, agent=AgentSettings(own_pod=own)) as made:
        await made.until(29, steps=30)
        before = socket_of(tmp_path)
        await made.step(30)
        # Virtual seconds pass faster than a restart of the kubelet.
        await until(lambda: socket_of(tmp_path) not in {None, before})
        problems = set()
        while made.clock.seconds < 59:
            snapshot = await made.step(made.clock.seconds + 1)
            assert snapshot.devices[0].allocation is AllocationState.ALLOCATED
            assert snapshot.devices[1].allocation is AllocationState.UNALLOCATED
            problems.add(snapshot.attribution.problem)
        # Virtual seconds pass fast: some of the thirty calls meet the kubelet's rate limit, which is another problem.
        assert any("does not know its pods yet" in problem for problem in problems)
        snapshot = await made.until(70, steps=11)
        assert snapshot.attribution.problem == ""
        (use,) = snapshot.devices[0].pods
        assert use.idle_for_seconds == pytest.approx(70, abs=1)
        assert use.age_seconds == pytest.approx(70, abs=1)
        assert seconds_of(snapshot, UNALLOCATED) == pytest.approx(seconds_of(snapshot, Owner(namespace="ml")))


def test_agent_with_a_starting_kubelet_reports_unknown_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "starting.yaml"
    file.write_text(HELD + "  - {kind: kubelet_starting, from: 0, to: 6}\n")
    own = {"POD_NAMESPACE": "monitoring", "POD_NAME": "gpu-cost-exporter-x7"}
    options = ("--simulate", str(file), "--kube-metadata", "off", "--kubelet-interval", "1s")
    with running_agent(*options, env=own) as agent:
        page = agent.until(lambda page: matching(page, "gpu_activity_ratio"), "a sample")
        states = matching(page, "gpu_allocation_state", state="unknown")
        assert len(states) == 2
        assert set(states.values()) == {1.0}
        assert "monitoring/gpu-cost-exporter-x7, the pod of this agent" in agent.get("/readyz")[1]
        assert agent.until(
            lambda page: matching(page, "gpu_exporter_errors_total", part="attribution", reason="kubelet_starting"),
            "it is counted",
        )
        agent.until(lambda page: 1.0 in matching(page, "gpu_allocation_state", state="allocated").values(), "known")
        assert "kubelet" not in agent.get("/readyz")[1]
        assert any("does not know its pods yet" in line for line in agent.lines)


async def test_gpu_in_use_by_an_unlisted_init_container_is_unknown_and_not_free(tmp_path: Path) -> None:
    node = scenario.build(scenario_file.parse(INIT_ONLY, "init.yaml"))
    async with pipeline(node, tmp_path) as made:
        snapshot = await made.until(20, steps=20)
    used, free = snapshot.devices
    assert used.allocation is AllocationState.UNKNOWN
    assert free.allocation is AllocationState.UNALLOCATED
    (doubt,) = snapshot.attribution.unresolved
    assert (doubt.namespace, doubt.pod, doubt.device_id) == ("ml", "p-initonly", used.uuid)
    assert doubt.reason == "unlisted_use"
    assert seconds_of(snapshot, UNATTRIBUTED) == pytest.approx(seconds_of(snapshot, UNALLOCATED))


def test_doctor_names_the_pod_that_uses_an_unlisted_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "init.yaml"
    file.write_text(INIT_ONLY)
    options = ("--kube-metadata", "off", "--listen", "127.0.0.1:0", "--format", "json")
    main(["doctor", "--simulate", str(file), *options])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}["kubelet and driver"]
    assert found["level"] == "warn"
    assert "of ml/p-initonly (unlisted use)" in found["cause"]
    assert "init container" in found["fix"]


@pytest.mark.parametrize("own", [{}, {"POD_NAMESPACE": "monitoring", "POD_NAME": "gpu-cost-exporter-x7"}])
def test_wrong_node_name_is_an_error_and_frees_no_gpu(tmp_path: Path, own: dict[str, str]) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(HELD + "  - {kind: api_other_node_name, from: 0}\n")
    options = ("--simulate", str(file), "--kube-metadata", "on", "--kubelet-interval", "1s")
    with running_agent(*options, env=own) as agent:
        agent.until(lambda page: matching(page, "gpu_exporter_errors_total", part="metadata"), "the API is asked")
        agent.until(lambda page: 1.0 in matching(page, "gpu_allocation_state", state="allocated").values(), "known")
        status, ready = agent.get("/readyz")
        assert status == 200, "GPUs are still measured and have their holders"
        assert [line.split(":")[0] for line in ready.splitlines()] == ["ready", "error"]
        assert "sim-node-1'" in ready
        assert "--node-name" in ready
        assert "spec.nodeName" in ready
        metered = "gpu_exporter_ledger_capacity_seconds_total"
        page = agent.until(lambda page: sum(matching(page, metered).values()) > 3, "pods were asked for one by one")
        assert sorted(matching(page, "gpu_allocation_state", state="allocated").values()) == [0.0, 1.0]


def test_upgraded_api_server_is_asked_for_claims_in_its_current_version(tmp_path: Path) -> None:
    file = tmp_path / "upgraded.yaml"
    file.write_text(UPGRADED)
    options = ("--simulate", str(file), "--kube-metadata", "on", "--kubelet-interval", "1s")
    with running_agent(*options) as agent:
        agent.until(lambda page: matching(page, "gpu_pod_share_ratio", pod_name="before"), "a claim of v1beta2")
        agent.until(lambda page: matching(page, "gpu_pod_share_ratio", pod_name="after"), "a claim of v1")
        # Until its claim is read, the monitoring pod also counts as a holder.
        page = agent.until(
            lambda page: sorted(matching(page, "gpu_pod_share_ratio").values()) == [1.0, 1.0],
            "the monitoring pod holds no part",
        )
        assert matching(page, "gpu_exporter_errors_total", part="metadata", reason="claim_not_found")
        agent.until(lambda _: agent.get("/readyz")[1] == "ready\n", "all is well again")

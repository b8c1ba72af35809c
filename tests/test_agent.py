"""The agent as a process: its endpoints, its exit, and its behaviour without a driver."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_support import ROOT, AgentProcess, matching, run_fork, running_agent

from gpu_simulator import stack
from gpu_simulator.stack import StackOptions, Tools

AS_PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
NEEDS_NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare for a PID namespace"
)


def up(page: dict[str, float]) -> list[float]:
    return list(matching(page, "gpu_up").values())


def sampled(page: dict[str, float]) -> object:
    return matching(page, "gpu_activity_ratio")


def test_simulated_node_is_served_and_marked_as_simulated(demo_agent: AgentProcess) -> None:
    page = demo_agent.series()
    assert page["gpu_exporter_simulated"] == 1
    assert demo_agent.get("/readyz")[0] == 200
    assert demo_agent.get("/healthz")[0] == 200
    assert "SIMULATED" in demo_agent.get("/")[1]
    assert json.loads(demo_agent.get("/api/v1/devices")[1])["simulated"] is True


def test_every_kind_of_holder_in_the_demo_is_attributed(demo_agent: AgentProcess) -> None:
    page = demo_agent.series()
    whole = matching(page, "DCGM_FI_DEV_POWER_USAGE", namespace="research", pod="llama-pretrain-worker-0")
    assert len(whole) == 1
    instance = matching(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", pod="protein-fold-5c8d7", GPU_I_PROFILE="3g.40gb")
    assert len(instance) == 1
    shares = matching(page, "gpu_pod_share_ratio", gpu="6")
    assert list(shares.values()) == [0.25] * 3
    free = matching(page, "gpu_allocation_state", gpu="7", state="unallocated")
    assert list(free.values()) == [1]


def test_demo_splits_cost_by_pod_and_namespace_labels(tmp_path: Path) -> None:
    alone = Tools(prometheus=None, alertmanager=None)
    command = stack.programs(StackOptions(scenario="demo", agent_command=()), alone, None, 0, tmp_path)[0].command
    with running_agent(*command, "--kube-start-jitter", "0s") as agent:

        def divided(page: dict[str, float]) -> set[tuple[str, ...]]:
            """Return the kinds of owners with their cost labels."""
            of = re.compile(r'workload_kind="(.*?)".*cost_labels="(.*?)"')
            return {found.groups() for one in matching(page, "gpu_ledger_seconds_total") if (found := of.search(one))}

        page = agent.until(lambda page: len(divided(page)) == 8, "all owners, each with cost labels")
        assert divided(page) >= {
            ("PyTorchJob", "environment=prod,project=llama"),
            ("JupyterHub", "environment=prod,project=gpu-course"),
            ("Notebook", "environment=dev"),
            ("Notebook", "environment=prod,project=ranking"),
        }
        assert not [one for one in page if "cost_labels" in one and not one.startswith("gpu_ledger_")]


def test_openmetrics_is_served_when_requested(demo_agent: AgentProcess) -> None:
    status, body = demo_agent.get("/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert status == 200
    assert body.endswith("# EOF\n")


@NEEDS_NAMESPACES
def test_agent_as_process_1_ends_on_sigterm() -> None:
    with running_agent("--simulate", "t4-timeslicing", prefix=AS_PROCESS_1) as agent:
        agent.until(sampled, "a first sample")
        (inner,) = agent.children()
        status = Path(f"/proc/{inner}/status").read_text(encoding="ascii")
        assert [line.split()[-1] for line in status.splitlines() if line.startswith("NSpid")] == ["1"]
        os.kill(inner, signal.SIGTERM)
        assert agent.process.wait(timeout=10) == 0


@NEEDS_NAMESPACES
def test_command_blocked_on_a_file_as_process_1_ends_on_sigterm(tmp_path: Path) -> None:
    book = tmp_path / "book.yaml"
    os.mkfifo(book)
    command = (sys.executable, "-m", "exporter", "prices", "check", str(book))
    with subprocess.Popen([*AS_PROCESS_1, *command], cwd=ROOT) as process:
        try:
            with book.open("wb"):  # the agent reads the book from here on
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii")
                os.kill(int(children), signal.SIGTERM)
                assert process.wait(timeout=10) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_missing_kubelet_affects_only_attribution(tmp_path: Path) -> None:
    demo = (ROOT / "simulator/gpu_simulator/scenarios/demo.yaml").read_text(encoding="utf-8")
    without_kubelet = tmp_path / "without-kubelet.yaml"
    without_kubelet.write_text(demo.replace("faults:", "faults:\n  - {kind: kubelet_down, from: 0}", 1))
    with running_agent("--simulate", str(without_kubelet)) as agent:
        page = agent.until(sampled, "a first sample")
        assert set(matching(page, "gpu_allocation_state", state="unknown").values()) == {1.0}
        assert set(matching(page, "gpu_allocation_state", state="unallocated").values()) == {0.0}
        agent.until(lambda page: matching(page, "gpu_exporter_errors_total", part="attribution"), "the failure counts")
        assert agent.get("/readyz")[0] == 200, "readings remain useful without the kubelet"


def test_agent_without_a_driver_reports_the_reason_and_retries(tmp_path: Path) -> None:
    # This file is found before any real library, and is not a library: the machine has no usable driver.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    with running_agent("--attribution", "off", env={"LD_LIBRARY_PATH": str(tmp_path)}) as agent:
        agent.until(lambda page: matching(page, "gpu_exporter_errors_total", part="nvml"), "the failure is counted")
        page = agent.series()
        assert not up(page), "no GPU is invented"
        assert page["gpu_exporter_simulated"] == 0
        status, reasons = agent.get("/readyz")
        assert status == 503
        assert "libnvidia-ml" in reasons
        assert agent.get("/healthz")[0] == 200


def refused(*arguments: str) -> list[str]:
    done = run_fork("agent", *arguments)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


def test_all_configuration_errors_are_reported_at_once(tmp_path: Path) -> None:
    config = tmp_path / "agent.yaml"
    config.write_text("sample-intervall: 1s\nidle-threshold: 7\n")
    collectors = tmp_path / "collectors.csv"
    collectors.write_text("DCGM_FI_DEV_GPU_UTIL, gauge, fine\nDCGM_FI_DEV_GPU_UTLI, gauge, typo\n")
    state = tmp_path / "state"
    state.write_text("a file, not a directory")
    lines = refused("--config", str(config), "--listen", "nonsense", "--state-dir", str(state))
    reported = "\n".join(lines)
    for word in ("sample-intervall", "idle-threshold", "nonsense", str(state)):
        assert word in reported
    (line,) = refused("--simulate", "demo", "--collectors", str(collectors))
    assert f"{collectors}:2" in line
    assert "DCGM_FI_DEV_GPU_UTIL" in line, "the message has the nearest name"


def failed_ticks(page: dict[str, float]) -> float:
    return sum(matching(page, "gpu_exporter_errors_total", part="agent", reason="tick").values())


FAILING_TICKS = """
import os, sys
from exporter.agent.node import Node
from exporter.cli import main

steps = Node.steps

def failing(*arguments):
    if os.path.exists(sys.argv[0] + ".fails"):
        raise RuntimeError("a fault that no test knows")
    return steps(*arguments)

Node.steps = failing
sys.exit(main(sys.argv[4:]))
"""
"""Runs the agent; its ticks fail while a file exists. Arguments: python -m exporter, and the arguments of the agent."""


def test_failing_tick_is_counted_and_ends_readiness(tmp_path: Path) -> None:
    script, fails = tmp_path / "agent.py", tmp_path / "agent.py.fails"
    script.write_text(FAILING_TICKS)
    fails.touch()
    arguments = ("--simulate", "t4-timeslicing", "--sample-interval", "250ms")
    with running_agent(*arguments, prefix=(sys.executable, str(script)), env={"PYTHONPATH": str(ROOT)}) as agent:
        counted = 0.0
        for _ in ("from the start", "once it was ready"):
            page = agent.until(lambda page, former=counted: failed_ticks(page) > former, "the counter")
            agent.until(lambda _: agent.get("/readyz")[0] == 503, "not ready")
            old = "s old (limit 2 s): the agent's loop fails or hangs"
            agent.until(lambda _, old=old: old in agent.get("/readyz")[1], "why")
            agent.until(lambda page: not sampled(page) and set(up(page)) <= {0.0}, "no value of what is not measured")
            fails.unlink()
            page = agent.until(lambda page: sampled(page) and agent.get("/readyz")[0] == 200, "ready")
            counted = failed_ticks(page)
            fails.touch()

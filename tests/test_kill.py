"""kill -9 at random moments: shown values never decrease, and every second counts exactly once."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from agent_support import ROOT, AgentProcess, matching, running_agent
from kill_support import gpus_and_capacity

ROUNDS = 100
AGENTS = 4


def test_hundred_kills_lose_no_second_and_lower_no_counter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "kill_support.py", tmp_path, str(ROUNDS), "20261121"],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["rounds"] == ROUNDS
    assert seen["saved"] > ROUNDS / 10, "many rounds ended after a save"
    assert seen["visible"] > ROUNDS / 2
    assert seen["ledgers"] > ROUNDS / 50, "the disk failed in some rounds"
    assert 0 < seen["unknown"] < seen["gpu_seconds"], "sampled time is known, other time is unknown"
    kept = {"ledger.json", "windows.json"}
    assert set(seen["left"]) <= kept | {f"{name}.new" for name in kept}, "no file was set aside as damaged"


def counters(agent: AgentProcess) -> dict[str, float]:
    page = agent.series()
    return {
        name: value
        for name, value in page.items()
        if name.startswith(("gpu_ledger_", "gpu_pod_", "gpu_exporter_ledger_")) and "_total" in name
    }


def test_killed_agents_continue_from_the_values_they_had_shown(tmp_path: Path) -> None:
    chance = random.Random(9)  # noqa: S311 - moments to kill
    arguments = ("--simulate", "demo", "--sample-interval", "250ms", "--state-interval", "1s")
    state_dir = ("--state-dir", str(tmp_path))
    with running_agent(*arguments, *state_dir) as agent:
        agent.until(
            lambda page: matching(
                page, "gpu_ledger_seconds_total", workload_name="llama-pretrain", state="active_effective"
            ),
            "owners are known and metered",
        )
        assert agent.end() == 0
    gpus, metered, steady = gpus_and_capacity(tmp_path)
    began = steady - metered / gpus
    before: dict[str, float] = {}
    for _ in range(AGENTS):
        with running_agent(*arguments, *state_dir) as agent:
            page = counters(agent)
            assert page
            gone_back = {name: (value, page.get(name)) for name, value in before.items() if page.get(name, 0.0) < value}
            assert not gone_back
            time.sleep(chance.uniform(1.0, 2.5))
            before = counters(agent)
            assert agent.end(signal.SIGKILL) == -signal.SIGKILL
        gpus, metered, steady = gpus_and_capacity(tmp_path)
        assert abs(steady - metered / gpus - began) < 1e-6, "every second since the start counts once"
    assert sum(matching(before, "gpu_ledger_seconds_total", state="active_unprofiled").values()) > 0
    assert [path.name for path in tmp_path.glob("*damaged*")] == []

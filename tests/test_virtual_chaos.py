"""A piece of the chaos in virtual time: after each tick of short schedules the books equal the truth."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_every_second_has_an_owner_and_no_counter_decreases_under_faults() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "virtual_chaos.py", "--seeds", "4", "--first", "1", "--faults", "24"],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| **all** | 96 |" in done.stdout, "every fault was injected"


# A pod is recreated under its name, busy after an idle one, and the API does not report it.
AGAIN = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from random import Random
import virtual_world
from virtual_checks import Checks
from virtual_node import Settings
from virtual_run import Run

virtual_world.LOGS_SECONDS = 0.0  # while both pods have a log directory, the running one is unknown
place = Path(sys.argv[2])
board = virtual_world.Board(index=0, serial=1, model=virtual_world.MODELS[0])
world = virtual_world.World(random=Random(3), boards=[board], directory=place, churn=0.0)
run = Run(random=Random(3), world=world, settings=Settings(directory=place), checks=Checks(world=world))


def lives(name, level):
    pod = world.start(world.free()[0], job="", name=name, namespace="ml")
    pod.ends_at, pod.level = 1e9, level
    return pod


first = lives("lone", 0.0)
for _ in range(20):
    run.step()
run.troubles["API"] = "down"
run.step()
world.end(first)
lives("lone", 1.0)
for _ in range(60):
    run.step()
run.troubles.clear()
for _ in range(20):
    run.step()
run.checks.owners(run.agent, run.expected)
assert run.checks.checks["no false idle"] > 50
assert not run.checks.violations, run.checks.violations
"""


def test_pod_recreated_during_an_api_outage_is_neither_idle_nor_the_former_one(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, BENCHMARKS, tmp_path],
        cwd=BENCHMARKS.parent,
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr

"""A piece of the chaos in virtual time: after each tick of short schedules the books are those of the truth."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_whatever_befalls_a_node_every_second_has_its_owner_and_nothing_shown_goes_back() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "virtual_chaos.py", "--seeds", "8", "--first", "1", "--faults", "14"],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| in all | 112 |" in done.stdout, "every fault was injected"

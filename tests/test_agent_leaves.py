"""An agent that is told to end ends, though a thread of it cannot."""

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from agent_support import ROOT, running_agent

COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_an_agent_whose_disk_hangs_ends_when_it_is_told_to(tmp_path: Path) -> None:
    library, control, state = tmp_path / "chaos_clock.so", tmp_path / "control", tmp_path / "state"
    source = ROOT / "benchmarks" / "chaos_clock.c"
    subprocess.run([str(COMPILER), "-O2", "-fPIC", "-shared", str(source), "-o", str(library), "-ldl"], check=True)
    state.mkdir()
    control.write_bytes(bytes(16))
    env = {"LD_PRELOAD": str(library), "CHAOS_CONTROL": str(control)}
    options = ("--simulate", "demo", "--state-dir", str(state), "--state-interval", "1s")
    with running_agent(*options, env=env) as agent:
        agent.until(lambda page: page.get("gpu_exporter_state_saved") == 1, "a first save")
        with control.open("r+b") as file, mmap.mmap(file.fileno(), 16) as block:
            block[8:16] = struct.pack("q", 1)
            began = agent.series()["gpu_exporter_snapshot_timestamp_seconds"]
            agent.until(lambda page: page["gpu_exporter_snapshot_timestamp_seconds"] > began + 1.5, "a save that hangs")
            assert agent.end(seconds=30) == 0
    assert any("without a thread" in line for line in agent.lines)

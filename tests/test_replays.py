"""The scripts that compare with real input: they skip aloud without it, and they find what they should with it."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
ROWS = (
    "pod-whole,1,1,1,1000,,LS,Running,0,500,0",
    "pod-eight,1,1,8,1000,,LS,Running,0,400,10",
    "pod-half,1,1,1,470,,BE,Running,0,300,20",
    "pod-tenth,1,1,1,110,,BE,Failed,0,60,50",
    "pod-brief,1,1,1,810,,BE,Succeeded,0,71,70",
    "pod-never,1,1,1,810,,BE,Pending,0,900,",
    "pod-cpu,1,1,0,0,,BE,Running,0,900,1",
)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(("script", "option"), [("trace_replay.py", "--traces"), ("capture_compare.py", "--captures")])
def test_without_its_input_a_script_says_so_and_is_content(script: str, option: str, tmp_path: Path) -> None:
    done = run(script, option, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert option in done.stdout


def test_a_small_trace_is_replayed_whole_and_without_a_mismatch(tmp_path: Path) -> None:
    (tmp_path / "openb_pod_list_default.csv").write_text("\n".join((HEADER, *ROWS)) + "\n")
    done = run("trace_replay.py", "--traces", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 GPU pods, 1 of them never scheduled" in done.stdout
    assert "placed: 5 pods, 3 on shared GPUs" in done.stdout
    assert "compared: 5 pods" in done.stdout
    assert "mismatches: 0" in done.stdout

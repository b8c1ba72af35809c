"""The accuracy benchmark on a small trace: it reports a skip, is near the truth, and records the values of the page."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPT = BENCHMARKS / "accuracy.py"
HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
ROWS = (
    "pod-long,1,1,8,1000,,LS,Running,0,100000,0",
    "pod-whole,1,1,1,1000,,LS,Running,0,2900,300",
    "pod-half,1,1,1,470,,BE,Running,0,1800,20",
    "pod-tenth,1,1,1,110,,BE,Failed,0,660,250",
    "pod-brief,1,1,1,810,,BE,Succeeded,0,1150,1100",
    "pod-never,1,1,1,810,,BE,Pending,0,900,",
)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / "openb_pod_list_default.csv").write_text("\n".join((HEADER, *ROWS)) + "\n")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def cells(output: str, case: str, way: str) -> list[float | None]:
    """Return the figures of a row of the table; ``None`` for an empty one."""
    (row,) = [line for line in output.splitlines() if line.startswith(f"| {case} | {way} |")]
    texts = [cell.strip() for cell in row.strip("|").split("|")[2:]]
    return [float(text.split()[0]) if text else None for text in texts]


def balance(output: str, case: str) -> list[float]:
    """Return the relative errors of the sums over owners, of workloads and of the marker, in percent."""
    row = [line for line in output.splitlines() if line.startswith(f"| {case} | ")][-1]
    return [float(cell.split()[0]) for cell in row.strip("|").split("|")[3:6]]


def test_accuracy_benchmark_without_a_trace_reports_the_skip_and_succeeds(tmp_path: Path) -> None:
    done = run(str(SCRIPT), "--traces", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert "--traces" in done.stdout


@pytest.mark.skipif(
    not shutil.which("promtool") or not shutil.which("prometheus"), reason="needs prometheus: make install"
)
def test_prometheus_results_match_the_metered_hour_of_a_small_trace(traces: Path) -> None:
    done = run(str(SCRIPT), "--traces", str(traces), "--hours", "1", "--gpus", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    for case in ("clean", "2 % of scrapes lost", "agents restarted", "Prometheus away 10 min"):
        total, worst, *_ = cells(done.stdout, case, "ledger, recorded hours")
        # The last value before the hour is at most half a minute old.
        assert total is not None
        assert abs(total) < 1
        assert worst is not None
        assert abs(worst) < 2
        owners, workloads, marker = balance(done.stdout, case)
        assert abs(owners) < 1
        assert workloads == marker == 0
    assert abs(cells(done.stdout, "clean", "gauges, count x 30 s")[0] or 0.0) < 5
    conservation = next(line for line in done.stdout.splitlines() if "conservation error" in line)
    assert float(conservation.split(":")[1].split()[0]) < 1e-9

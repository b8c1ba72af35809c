"""Measures the duration, memory and accuracy of `report` over fleets of 100 to 10,000 GPUs and 30 days."""

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import cpu

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fleet_support  # noqa: E402 - lies with the tests, which the line above makes importable
import scale_support  # noqa: E402 - as above
from fleet_support import FleetServer  # noqa: E402 - as above

from gpu_simulator.fleet import FleetTruth, Writing, write_fleet  # noqa: E402 - as above
from gpu_simulator.fleet_plan import FleetPlan  # noqa: E402 - as above

MIB = 1024 * 1024
BUDGET_SECONDS, WRONG_RATIO = 5.0, 0.001
HEADER = (
    "\n\n| GPUs | by | lines | wall, s | CPU: report, engine, s | MiB: report, engine | error: sums, a line |\n"
    "|---:|---|---:|---:|---|---|---|"
)


def main() -> None:
    """Print a table; exit with code 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[13, 125, 1000, 1250], help="sizes of the fleets")
    parser.add_argument("--directory", type=Path, help="working directory; needs 10 GB for 1,000 nodes")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the modules of an installation are compiled
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}{HEADER}")
    kept = True
    for nodes in arguments.nodes:
        with (
            tempfile.TemporaryDirectory(prefix="report-scale-", dir=arguments.directory) as name,
            recorded(Path(name), nodes) as (server, truth),
        ):
            for by in scale_support.FIELDS:
                seconds, row = measure(Path(name), server, truth, by)
                print(row, flush=True)
                kept &= seconds <= BUDGET_SECONDS
    sys.exit(0 if kept else 1)


@contextmanager
def recorded(directory: Path, nodes: int) -> Iterator[tuple[FleetServer, FleetTruth]]:
    """Serve 30 days of a fleet in a real Prometheus."""
    plan = FleetPlan(nodes=nodes, end_seconds=fleet_support.END_SECONDS, clusters=("alpha", "beta"))
    text, blocks = directory / "fleet.om", directory / "blocks"
    with text.open("w", encoding="utf-8") as output:
        writing = Writing(form="openmetrics", devices=False, processes=os.cpu_count() or 1)
        truth = write_fleet(plan, output, writing)
    fleet_support.backfill(text, blocks, block_hours=768)
    with fleet_support.prometheus(directory, blocks, plan) as server:
        yield server, truth


def measure(directory: Path, server: FleetServer, truth: FleetTruth, by: str) -> tuple[float, str]:
    """Make a report; return its duration in seconds, and a row of the table.

    Raises:
        RuntimeError: The report is incomplete, or wrong.
    """
    plan = server.plan
    forget_peak(server.process.pid)
    before = cpu([server.process.pid])
    period = scale_support.window(plan.start_seconds, plan.end_seconds)
    made = scale_support.report(server.url, period, by, directory / "report.json")
    engine_cpu = cpu([server.process.pid]) - before
    wrong = scale_support.errors(scale_support.reported(made.report, by), scale_support.true_numbers(truth, by))
    row = (
        f"| {plan.nodes * plan.gpus_per_node:,} | {by} | {len(made.report['lines']):,} | {made.wall_seconds:.1f} |"
        f" {made.cpu_seconds:.1f}, {engine_cpu:.1f} |"
        f" {made.peak_bytes / MIB:.0f}, {peak_bytes(server.process.pid) / MIB:.0f} |"
        f" {wrong.total:.0e}, {wrong.line:.0e} |"
    )
    if made.exit_code or wrong.total > WRONG_RATIO:
        raise RuntimeError(f"the report ended with {made.exit_code}, its sums are wrong by {wrong.total}: {made.said}")
    return made.wall_seconds, row


def forget_peak(pid: int) -> None:
    """Reset the kernel's peak memory of a process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process since the reset."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()

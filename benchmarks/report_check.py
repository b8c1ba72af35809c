"""A short piece of ``report_scale.py``: a report of 30 days over a fleet of 400 GPUs, from a real Prometheus."""

import os
import shutil
from pathlib import Path

import fleet_support
import scale_support

from gpu_simulator.fleet import Writing, write_fleet
from gpu_simulator.fleet_plan import FleetPlan

NODES = 50
MISSING = "not measured: needs prometheus and promtool on the PATH (make install)"


def run(directory: Path) -> float | None:
    """Return the seconds that the command took; ``None`` where there is no Prometheus.

    Raises:
        RuntimeError: The report is not whole, or wrong.
    """
    if not (shutil.which("promtool") and shutil.which("prometheus")):
        return None
    plan = FleetPlan(nodes=NODES, end_seconds=fleet_support.END_SECONDS, clusters=("alpha", "beta"))
    text, blocks = directory / "fleet.om", directory / "blocks"
    with text.open("w", encoding="utf-8") as output:
        writing = Writing(form="openmetrics", devices=False, processes=os.cpu_count() or 1)
        truth = write_fleet(plan, output, writing)
    fleet_support.backfill(text, blocks, block_hours=768)
    by = "team,model"
    with fleet_support.prometheus(directory, blocks, plan) as server:
        period = scale_support.window(plan.start_seconds, plan.end_seconds)
        made = scale_support.report(server.url, period, by, directory / "report.json")
    wrong = scale_support.errors(scale_support.reported(made.report, by), scale_support.true_numbers(truth, by)).total
    if made.exit_code or wrong > 0.001:  # noqa: PLR2004 - a tenth of a percent, as in report_scale
        raise RuntimeError(f"the report ended with {made.exit_code}, its sums are wrong by {wrong:.1e}: {made.said}")
    return made.wall_seconds

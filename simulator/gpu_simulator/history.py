"""The demonstration's past: a simulated fleet's recorded series as blocks that Prometheus starts with."""

import subprocess
from pathlib import Path

from exporter.errors import ExporterError
from gpu_simulator.fleet import Writing, write_fleet
from gpu_simulator.fleet_owners import team_names
from gpu_simulator.fleet_plan import HOUR_SECONDS, RECORDED_AFTER_SECONDS, FleetPlan

NODES = 12
CLUSTERS = ("sim-research", "sim-serving")
_PROMTOOL_SECONDS = 120.0
_BUDGETS = """\
# Of the simulated fleet: one that holds, one that does not, and one for everything.
budgets:
  - {{name: {first}, amount: 90000, currency: USD, period: month, owner: {{team: {first}}}}}
  - {{name: {second}, amount: 45000, currency: USD, period: month, owner: {{team: {second}}}}}
  - {{name: all-gpus, amount: 230000, currency: USD, period: month, include_unallocated: true}}
"""


def plan(now_seconds: float, days: int) -> FleetPlan:
    """The fleet whose past ends with the last hour that is recorded: Prometheus appends nothing before its newest."""
    end = int((now_seconds - RECORDED_AFTER_SECONDS) // HOUR_SECONDS) * HOUR_SECONDS
    return FleetPlan(nodes=NODES, days=days, end_seconds=end, clusters=CLUSTERS)


def make(fleet: FleetPlan, promtool: str, blocks: Path) -> None:
    """Write the fleet's past as blocks into a directory that Prometheus has not opened yet; takes seconds.

    Raises:
        ExporterError: promtool could not make them; its words are in the message.
    """
    blocks.mkdir(parents=True, exist_ok=True)
    text = blocks.with_suffix(".om")
    with text.open("w", encoding="utf-8") as output:
        write_fleet(fleet, output, Writing(form="openmetrics"))
    command = [promtool, "tsdb", "create-blocks-from", "--max-block-duration=768h", "--quiet", "openmetrics"]
    try:
        made = subprocess.run(  # noqa: S603 - promtool, found on the PATH, on a file of ours
            [*command, str(text), str(blocks)], check=False, capture_output=True, text=True, timeout=_PROMTOOL_SECONDS
        )
        problem = "" if made.returncode == 0 else (made.stderr or made.stdout).strip()[-500:] or "it said nothing"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    finally:
        text.unlink()
    if problem:
        raise ExporterError(f"{promtool}: could not make the simulated fleet's past: {problem}")


def budgets(fleet: FleetPlan) -> str:
    """A budget file for teams of the fleet."""
    first, second = team_names(fleet)[:2]
    return _BUDGETS.format(first=first, second=second)

"""The simulated fleet adds up, is the same each time, and real engines take its series."""

import json
import urllib.parse
import urllib.request
from typing import Any

import pytest
from fleet_support import FleetServer

from exporter.simulator.fleet_plan import FleetPlan
from exporter.simulator.fleet_truth import FleetTruth


def ask(server: FleetServer, expression: str, at_seconds: int) -> dict[tuple[str, ...], float]:
    """An instant query's values, by the values of their labels in the order of the labels' names."""
    query = urllib.parse.urlencode({"query": expression, "time": str(at_seconds)})
    with urllib.request.urlopen(f"{server.url}/api/v1/query?{query}", timeout=60) as answer:  # noqa: S310 - local
        rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return {
        tuple(value for name, value in sorted(row["metric"].items()) if name != "__name__"): float(row["value"][1])
        for row in rows
    }


@pytest.fixture(params=["fleet_prometheus", "fleet_victoria"])
def server(request: pytest.FixtureRequest) -> FleetServer:
    found: FleetServer = request.getfixturevalue(request.param)
    return found


def test_engines_have_what_is_true(server: FleetServer, small_fleet: FleetPlan, fleet_truth: FleetTruth) -> None:
    seconds = small_fleet.days * 86_400
    answer = ask(
        server,
        f"sum by (cluster) (sum_over_time(owner:gpu_active_seconds:delta1h[{seconds - 1}s]))",
        small_fleet.end_seconds,
    )
    true = fleet_truth.total("cluster")
    assert answer == pytest.approx({key: totals.active_seconds for key, totals in true.items()}, rel=1e-9)

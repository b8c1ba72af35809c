"""Forty days of a fleet with the command of users: exact to the last second, also with faults."""

import pytest
from fleet_support import SMALL_FLEET, FleetServer
from scale_support import FIELDS, errors, flaky, report, reported, true_numbers, window

from gpu_simulator.fleet import FleetTruth

PERIOD = window(SMALL_FLEET.start_seconds, SMALL_FLEET.end_seconds)


@pytest.fixture(params=["fleet_prometheus", "fleet_victoria"])
def fleet(request: pytest.FixtureRequest, fleet_truth: FleetTruth) -> tuple[FleetServer, FleetTruth]:
    return request.getfixturevalue(request.param), fleet_truth


@pytest.mark.parametrize("by", list(FIELDS))
def test_report_of_all_days_matches_the_truth(
    fleet: tuple[FleetServer, FleetTruth], by: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, truth = fleet
    run = report(server.url, PERIOD, by, tmp_path_factory.mktemp("report") / "report.json")
    assert run.exit_code == 0, run.said
    true = true_numbers(truth, by)
    found = reported(run.report, by)
    assert found.keys() == true.keys()
    worst = errors(found, true)
    assert worst.total < 1e-9
    assert worst.line < 1e-6
    trust = run.report["trust"]
    assert trust["whole"]
    assert trust["capacity_seconds"] == pytest.approx(truth.capacity_seconds, rel=1e-9)
    assert trust["recorded_hours"] == sum(sum(day.values()) for day in truth.recorded_hours.values())


def test_failing_and_hanging_queries_do_not_change_the_report(
    fleet: tuple[FleetServer, FleetTruth], tmp_path_factory: pytest.TempPathFactory
) -> None:
    server, truth = fleet
    output = tmp_path_factory.mktemp("report") / "report.json"
    with flaky(server.url) as proxy:
        run = report(proxy.url, PERIOD, "workload", output, "--prometheus-timeout", "4s")
    assert run.exit_code == 0, run.said
    asked, refused, hung = proxy.failed
    assert (refused + hung) / asked > 0.04
    assert min(refused, hung) >= 1
    assert run.report["trust"]["whole"]
    worst = errors(reported(run.report, "workload"), true_numbers(truth, "workload"))
    assert worst.total < 1e-9
    assert worst.line < 1e-6

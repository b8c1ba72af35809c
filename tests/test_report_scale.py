"""A fleet of 160 GPUs, a month, the command as users run it: right to the last second, with faults, too."""

from collections.abc import Iterator

import pytest
from fleet_support import END_SECONDS, FleetServer, backfill, prometheus, victoria
from scale_support import FIELDS, errors, flaky, report, reported, true_numbers, window

from gpu_simulator.fleet import FleetTruth, Writing, write_fleet
from gpu_simulator.fleet_plan import FleetPlan

PLAN = FleetPlan(nodes=20, end_seconds=END_SECONDS, seed=3, clusters=("alpha", "beta"), currencies=("USD", "EUR"))
PERIOD = window(PLAN.start_seconds, PLAN.end_seconds)


@pytest.fixture(scope="module", params=["prometheus", "victoria"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FleetServer, FleetTruth]]:
    directory = tmp_path_factory.mktemp(f"scale-{request.param}")
    text = directory / "fleet"
    form = "openmetrics" if request.param == "prometheus" else "import"
    with text.open("w", encoding="utf-8") as output:
        truth = write_fleet(PLAN, output, Writing(form=form, devices=False))
    if request.param == "victoria":
        with victoria(directory, text, PLAN) as server:
            yield server, truth
    else:
        backfill(text, directory / "blocks")
        with prometheus(directory, directory / "blocks", PLAN) as server:
            yield server, truth


@pytest.mark.parametrize("by", list(FIELDS))
def test_a_month_of_a_fleet_is_reported_as_it_was(
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


def test_questions_that_fail_or_are_never_answered_cost_time_and_nothing_else(
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

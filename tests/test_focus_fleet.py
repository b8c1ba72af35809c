"""FOCUS from the command line, over a fleet with a known truth in a real Prometheus."""

import asyncio
import csv
import json
from decimal import Decimal
from pathlib import Path

import pytest
from fleet_support import FleetServer, truth_between
from focus_support import assert_promises

from exporter.cli import main
from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.store import ALL_OF_A_DAY, DayStore
from exporter.cost.window import DAY_SECONDS, Window
from gpu_simulator.fleet import FleetTruth

START, END = 1_788_566_400, 1_788_825_600  # 2026-09-05 to 2026-09-08
WINDOW = "2026-09-05..2026-09-07"


@pytest.fixture(scope="module")
def truth() -> FleetTruth:
    return truth_between(START, END)


@pytest.fixture(scope="module")
def files(fleet_prometheus: FleetServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("focus")
    written = {}
    for version in ("1.2", "1.4"):
        path = written[version] = folder / f"focus-{version}.csv"
        arguments = ["--format", "focus", "--focus-version", version, "--window", WINDOW, "--output", str(path)]
        assert main(["report", "--prometheus", fleet_prometheus.url, *arguments]) == 0
    return written


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("version", ["1.2", "1.4"])
def test_fleet_export_is_valid(files: dict[str, Path], version: str) -> None:
    assert_promises(files[version].read_text(), version)


@pytest.mark.parametrize("version", ["1.2", "1.4"])
def test_export_has_the_true_cost_and_hours(files: dict[str, Path], version: str, truth: FleetTruth) -> None:
    rows = rows_of(files[version])
    total = truth.sum()
    for currency, money in total.money.items():
        own = [row for row in rows if row["BillingCurrency"] == currency]
        assert float(sum(Decimal(row["EffectiveCost"]) for row in own)) == pytest.approx(money.total, rel=1e-9)
        assert float(sum(Decimal(row["x_IdleCost"]) for row in own)) == pytest.approx(money.idle, rel=1e-9)
    priced = float(sum(Decimal(row["PricingQuantity"]) for row in rows))
    assert priced == pytest.approx((total.seconds.total - total.unpriced_seconds) / 3600, rel=1e-9)
    metadata = json.loads(files[version].with_name(f"{files[version].name}.metadata.json").read_text())
    conservation = metadata["x_Conservation"]
    assert conservation["LedgerGpuHours"] == pytest.approx(conservation["MeteredGpuHours"], rel=1e-9)
    unpriced = sum(one["GpuHours"] for one in metadata["x_Unpriced"])
    assert priced + unpriced == pytest.approx(conservation["MeteredGpuHours"], rel=1e-9)


def test_export_has_the_true_cost_of_each_team(files: dict[str, Path], truth: FleetTruth) -> None:
    by_team: dict[tuple[str, str], Decimal] = {}
    for row in rows_of(files["1.4"]):
        place = (row["x_Team"], row["BillingCurrency"])
        by_team[place] = by_team.get(place, Decimal(0)) + Decimal(row["EffectiveCost"])
    expected = {
        (team, currency): money.total
        for (team,), totals in truth.total("team").items()
        for currency, money in totals.money.items()
    }
    assert {place: float(cost) for place, cost in by_team.items()} == pytest.approx(expected, rel=1e-9)


def test_store_of_closed_days_gives_the_same_export(
    files: dict[str, Path], fleet_prometheus: FleetServer, tmp_path: Path
) -> None:
    store = tmp_path / "days.sqlite"

    async def fill(into: DayStore) -> None:
        async with PrometheusClient(PrometheusSettings(url=fleet_prometheus.url)) as client:
            for start in range(START, END, DAY_SECONDS):
                day = Window(start_seconds=start, end_seconds=start + DAY_SECONDS)
                into.close_day(await PrometheusLedger(client).ledger(day, ALL_OF_A_DAY), now=float(END))

    with DayStore(store).writing(float(END)) as opened:
        asyncio.run(fill(opened))
    stored = tmp_path / "stored.csv"
    arguments = ["--store", str(store), "--window", WINDOW]
    assert main(["report", "--format", "focus", *arguments, "--output", str(stored)]) == 0
    money = ("EffectiveCost", "x_IdleCost", "ConsumedQuantity")
    for mine, theirs in zip(rows_of(stored), rows_of(files["1.4"]), strict=True):
        assert (mine["ResourceId"], mine["AllocatedResourceId"]) == (
            theirs["ResourceId"],
            theirs["AllocatedResourceId"],
        )
        for name in money:
            assert float(mine[name]) == pytest.approx(float(theirs[name]), rel=1e-6, abs=1e-6)

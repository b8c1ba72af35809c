"""FOCUS and reconciliation from the command line, over a fleet in a real Prometheus whose truth is known."""

import asyncio
import csv
import json
from decimal import Decimal
from pathlib import Path

import pytest
from fleet_support import FleetServer, truth_between
from focus_support import as_csv

from exporter.cli import main
from exporter.config.prometheus_options import PrometheusSettings
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.reading import PrometheusLedger
from exporter.report.fleet.values import DAY_SECONDS, Window
from exporter.report.store import DayStore
from exporter.report.store.values import ALL_OF_A_DAY
from exporter.simulator.fleet_truth import FleetTruth

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
def test_the_export_of_a_fleet_passes_the_checker(
    files: dict[str, Path], version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["focus", "check", str(files[version])]) == 0, capsys.readouterr().out
    assert f"FOCUS {version}" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["1.2", "1.4"])
def test_money_and_hours_are_those_of_the_truth(files: dict[str, Path], version: str, truth: FleetTruth) -> None:
    rows = rows_of(files[version])
    total = truth.sum()
    for currency, money in total.money.items():
        own = [row for row in rows if row["BillingCurrency"] == currency]
        assert float(sum(Decimal(row["EffectiveCost"]) for row in own)) == pytest.approx(money.total, rel=1e-9)
        assert float(sum(Decimal(row["x_IdleCost"]) for row in own)) == pytest.approx(money.idle, rel=1e-9)
    priced = float(sum(Decimal(row["PricingQuantity"]) for row in rows))
    assert priced == pytest.approx((total.allocated_seconds - total.unpriced_seconds) / 3600, rel=1e-9)
    metadata = json.loads(files[version].with_name(f"{files[version].name}.metadata.json").read_text())
    conservation = metadata["x_Conservation"]
    assert conservation["LedgerGpuHours"] == pytest.approx(conservation["MeteredGpuHours"], rel=1e-9)
    unpriced = sum(one["GpuHours"] for one in metadata["x_Unpriced"])
    assert priced + unpriced == pytest.approx(conservation["MeteredGpuHours"], rel=1e-9)


def test_each_team_has_the_money_that_is_true(files: dict[str, Path], truth: FleetTruth) -> None:
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


def bill_of(files: dict[str, Path], folder: Path, factor: str) -> Path:
    """A bill of whole nodes in place of GPUs: as the export has it, times a factor, an instance per GPU."""
    names = ("BillingCurrency", "ChargeCategory", "ChargePeriodStart", "ChargePeriodEnd", "RegionId", "SkuPriceDetails")
    costs = ("EffectiveCost", "BilledCost", "ListCost", "ContractedCost")
    lines = []
    for row in rows_of(files["1.4"]):
        cost = str(Decimal(row["EffectiveCost"]) * Decimal(factor))
        line = {name: row.get(name, "") for name in names} | dict.fromkeys(costs, cost)
        lines.append({**line, "ConsumedQuantity": row["PricingQuantity"], "ConsumedUnit": "Hours"})
    path = folder / "bill.csv"
    path.write_text(as_csv([lines[0], *(line.values() for line in lines)]))
    return path


def test_a_bill_ten_percent_dearer_is_explained_by_the_price_alone(
    files: dict[str, Path], fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bill = bill_of(files, tmp_path, "1.1")
    arguments = ["--bill", str(bill), "--window", WINDOW, "--prometheus", fleet_prometheus.url, "--format", "json"]
    assert main(["reconcile", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    billed = [group for group in document["groups"] if group["billed_gpu_hours"]]
    assert billed
    for group in billed:
        explained = {one["kind"]: Decimal(one["amount"]) for one in group["explanations"]}
        assert sum(explained.values()) == Decimal(group["gap"])
        assert float(explained["price_book"]) == pytest.approx(float(group["metered"]) / 10, abs=0.02)
        assert set(explained) <= {"price_book", "not_billed", "unpriced"}


def test_a_damaged_line_is_told_and_the_exit_code_says_that_something_is_missing(
    files: dict[str, Path], fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bill = bill_of(files, tmp_path, "1")
    with bill.open("a") as stream:
        stream.write("USD,Usage\n")
    arguments = ["--bill", str(bill), "--window", WINDOW, "--prometheus", fleet_prometheus.url]
    assert main(["reconcile", *arguments]) == 3
    told = capsys.readouterr()
    assert "another number of fields than the header; the line is in no sum" in told.err
    assert "1 could not be read" in told.out


def test_the_store_of_closed_days_gives_the_same_export_and_the_same_gaps(
    files: dict[str, Path], fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "days.sqlite"

    async def fill(into: DayStore) -> None:
        async with PrometheusClient(PrometheusSettings(url=fleet_prometheus.url)) as client:
            for start in range(START, END, DAY_SECONDS):
                day = Window(start_seconds=start, end_seconds=start + DAY_SECONDS)
                into.close_day(await PrometheusLedger(client).ledger(day, ALL_OF_A_DAY), now=float(END))

    with DayStore.open(store, write=True, now=float(END)) as opened:
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
    bill = bill_of(files, tmp_path, "1.1")
    documents = []
    for source in (["--store", str(store)], ["--prometheus", fleet_prometheus.url]):
        capsys.readouterr()
        assert main(["reconcile", "--bill", str(bill), "--window", WINDOW, "--format", "json", *source]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    gaps = [[(one["instance_type"], one["currency"], one["gap"]) for one in each["groups"]] for each in documents]
    assert sorted(gaps[0], key=str) == sorted(gaps[1], key=str)

import asyncio
import os
from pathlib import Path

import pytest
from fleet_support import FleetServer, prometheus
from store_support import D1, D3, NOW, assert_lines, chunk, day_ledger

from exporter.cli import main
from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.dimensions import Dimension
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.ledger import FleetLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.store import ALL_OF_A_DAY, DayStore
from exporter.cost.store_ledger import StoreLedger
from exporter.cost.window import Window, parse_window
from gpu_simulator.fleet_plan import FleetPlan


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "days.sqlite"
    with DayStore(path).writing(NOW) as made:
        for day in (chunk(D1, nodes=30, owners=10), chunk(D3, nodes=30, owners=10)):
            made.close_day(day_ledger(day), now=NOW, by="ann@host")
    return path


def run(*words: str) -> int:
    try:
        return main(["store", *words])
    except SystemExit as error:
        return int(str(error.code))


def test_list_shows_closed_days_and_the_missing_ones_between(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--store", str(store)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2026-09-04  version 1",
        "2026-09-05  not closed",
        "2026-09-06  version 1",
        "2 closed days",
    ]


def test_a_day_is_reopened_while_another_process_closes_days(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("reopen", "2026-09-04", "--store", str(store), "--reason", "late \x1b[31mprices")
    with DayStore(store).writing(0.0):
        assert run(*words) == 0
        assert "2026-09-04 reopened: serve or store backfill closes it again" in capsys.readouterr().out
    assert run("list", "--store", str(store)) == 0
    assert capsys.readouterr().out.splitlines()[0] == "2026-09-04  version 1, reopened: late ?[31mprices"


def test_history_shows_time_author_and_reason(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with DayStore(store).writing(0.0) as opened:
        opened.close_day(day_ledger(chunk(D1, seed=1)), now=NOW + 60, by="bob", reason="wrong price")
    assert run("history", "2026-09-04", "--store", str(store)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "version 1: closed 2026-09-07 05:00:00 UTC by ann@host, read from Prometheus 2.42.0"
    assert lines[1].endswith("idle)")
    assert lines[2].startswith("version 2: closed 2026-09-07 05:01:00 UTC by bob")
    assert lines[3] == "  why: wrong price"
    assert run("history", "2026-09-05", "--store", str(store)) == 1
    assert "2026-09-05 is not closed" in capsys.readouterr().err


def test_prune_deletes_old_days_only_with_yes(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prune", "--store", str(store), "--keep", "1d") == 0
    assert "2 days older, 2026-09-04 to 2026-09-06: would be deleted; add --yes" in capsys.readouterr().out
    assert len(DayStore(store).closed_days()) == 2
    assert run("prune", "--store", str(store), "--keep", "90y", "--yes") == 0
    assert "no day is older than" in capsys.readouterr().out
    assert run("prune", "--store", str(store), "--keep", "1d", "--yes") == 0
    assert "2 days older, 2026-09-04 to 2026-09-06: deleted" in capsys.readouterr().out
    assert DayStore(store).closed_days() == ()
    assert run("vacuum", "--store", str(store)) == 0
    before, after = (int(word) for word in capsys.readouterr().out.split() if word.isdecimal())
    assert after < before


def test_check_reports_damage_without_moving_the_file(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", "--store", str(store)) == 0
    assert capsys.readouterr().out == f"{store}: ok\n"
    content = bytearray(store.read_bytes())
    content[len(content) // 2 :: 7] = os.urandom(len(content[len(content) // 2 :: 7]))
    store.write_bytes(content)
    assert run("check", "--store", str(store)) in {1, 3}
    assert "damaged" in capsys.readouterr().err
    assert store.read_bytes() == content


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("list",), "required: --store"),
        (("close", "20260904", "--store", "x"), "value '20260904' is not a date; allowed: 2026-10-31"),
        (("reopen", "2026-02-30", "--store", "x", "--reason", "y"), "is not a date"),
        (("prune", "--store", "x", "--keep", "0d"), "value '0d' is not an age; allowed: 5y, 400d"),
        (("list", "--stor", "x"), "--store"),
        (("backfill", "--store", "x"), "prometheus: not given"),
    ],
)
def test_invalid_argument_is_reported_with_the_allowed_values(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    assert problem in capsys.readouterr().err
    assert not Path("x").exists()


def test_missing_store_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("list", "check", "vacuum"):
        assert run(name, "--store", str(tmp_path / "none")) == 1
        assert "make it with: gpu-cost-exporter store backfill" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unreachable_prometheus_is_reported_and_the_store_is_unchanged(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    down = ("--prometheus", "http://127.0.0.1:1", "--prometheus-retries", "0")
    assert run("close", "2026-09-04", "--store", str(store), "--reason", "again", *down) == 1
    assert "127.0.0.1" in capsys.readouterr().err
    assert run("backfill", "--store", str(store), "--from", "2026-09-05", *down) == 3
    assert "no day closed" in capsys.readouterr().out
    assert [day.window.start_seconds for day in DayStore(store).closed_days()] == [D1, D3]


def test_prometheus_without_a_ledger_is_reported_with_a_hint(
    small_fleet: FleetPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "days.sqlite"
    with prometheus(tmp_path, tmp_path / "empty", small_fleet) as server:
        assert run("backfill", "--store", str(path), "--prometheus", server.url) == 1
    shown = capsys.readouterr()
    assert "there is nothing to close" in shown.err
    assert "is this the right Prometheus, and the right tenant" in shown.err
    assert shown.out == ""


def test_days_closed_from_a_real_prometheus_match_its_report(
    fleet_prometheus: FleetServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "days.sqlite"
    words = ("--store", str(path), "--prometheus", fleet_prometheus.url)
    with DayStore(path).writing(0.0):
        pass
    assert run("close", "2026-09-18", *words) == 0
    assert run("close", "2026-09-19", *words) == 0
    assert run("close", "2026-09-19", *words) == 1
    assert "2026-09-19 is closed: reopen it with a reason" in capsys.readouterr().err
    assert run("close", "2026-09-19", "--reason", "to see it", *words) == 0
    assert "2026-09-19 closed, version 2" in capsys.readouterr().out
    assert run("close", "2026-09-21", *words) == 1
    assert "14 of its 24 hours of cluster 'alpha' were recorded" in capsys.readouterr().err
    assert run("check", "--store", str(path)) == 0
    window = parse_window("2026-09-18..2026-09-19", fleet_prometheus.plan.end_seconds)
    some: tuple[frozenset[Dimension], ...] = (frozenset({"cluster", "team"}), frozenset({"pool", "workload"}))
    for dimensions in (*some, frozenset(), ALL_OF_A_DAY):
        kept, asked = asyncio.run(both(path, fleet_prometheus.url, window, dimensions))
        for one, other in zip(kept.chunks, asked.chunks, strict=True):
            assert_lines(one.lines, other.lines)
            assert one.capacity_seconds == pytest.approx(dict(other.capacity_seconds))
            assert one.recorded_hours == other.recorded_hours
        assert {node: facts for node, facts in kept.nodes.items() if node in asked.nodes} == asked.nodes


async def both(
    path: Path, url: str, window: Window, dimensions: frozenset[Dimension]
) -> tuple[FleetLedger, FleetLedger]:
    """Return the ledger of the store and that of Prometheus."""
    async with PrometheusClient(PrometheusSettings(url=url)) as client:
        asked = await PrometheusLedger(client).ledger(window, dimensions)
    return await StoreLedger(DayStore(path)).ledger(window, dimensions), asked

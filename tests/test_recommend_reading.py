"""Evidence is read correctly through real servers, and the command prints the resulting recommendations."""

import asyncio
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_support import SMALL_FLEET, backfill, prometheus, victoria
from store_support import END_SECONDS, GB, H100, HOURS, L40S, T4, WEEK, use

from exporter.cli import main
from exporter.cli.output import EXIT_FAILED, EXIT_USAGE
from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.dimensions import EVERYTHING, Filters
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.holdings import HeldDevice, read_evidence
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.recommend import Recommendation, read_recommendations

LATE_SECONDS = 1234
"""Seconds after the hour at which the hourly rules of evidence run, the same in each hour."""
PRICES = {H100: 4.0, L40S: 2.0, T4: 0.5}
OF_ALL = {"cluster": "prod"}
FLEET = (
    use(0, 0.0, **OF_ALL, workload="given-back", peak_memory_bytes=0.1 * GB),
    use(1, 0.9, **OF_ALL, workload="fewer", kind="Job"),
    use(2, 0.0, **OF_ALL, workload="fewer", kind="Job"),
    use(3, 0.2, **OF_ALL, workload="smaller-mig", peak_memory_bytes=12 * GB),
    use(4, 0.1, **OF_ALL, workload="shared", model=L40S, memory_total_bytes=48 * GB, peak_memory_bytes=8 * GB),
    use(5, 0.1, **OF_ALL, workload="smaller-model", peak_memory_bytes=9 * GB),
    use(6, 0.9, **OF_ALL, workload="busy", model=T4, memory_total_bytes=16 * GB, peak_memory_bytes=15 * GB),
    use(7, 0.0, **OF_ALL, workload="estimated", share_ratio=0.5, estimated=True),
    use(8, 0.0, **OF_ALL, workload="half-measured", measured_hours=HOURS / 2),
    use(9, 0.0, **OF_ALL, workload="ended", still_held=False, held_hours=100.0, measured_hours=100.0),
    use(12, 0.9, **OF_ALL, workload="busy", still_held=False, held_hours=100.0, measured_hours=100.0),
    use(15, 0.0, **OF_ALL, workload="given-back", still_held=False, held_hours=HOURS - 4, measured_hours=HOURS - 4),
    use(10, 0.0, **OF_ALL, workload="reserved", policy="reserved"),
    use(11, 0.0, **OF_ALL, workload="quiet, please"),
    use(
        13,
        0.96,
        **OF_ALL,
        workload="starved",
        peak_memory_bytes=12 * GB,
        bottlenecks={"starved": 600.0, "memory": 9.0},
        resource_uses={"compute": 0.0, "memory": 54.0, "profiled": 609.0, "sm": 42.0, "sm_profiled": 600.0},
    ),
    use(14, 0.96, **OF_ALL, workload="decoding", bottlenecks={"memory": 3000.0, "of a later agent": 100.0}),
)
EFFECTIVE_RATIO = 0.09
"""Effective part of the profiled time."""
TRUTH = {
    "smaller-model": ("smaller-model", 730 * 3.5),
    "given-back": ("give-back", 730 * 4.0),
    "fewer": ("fewer-gpus", 730 * 4.0),
    "smaller-mig": ("smaller-mig", 730 * 4.0 * 5 / 7),
    "shared": ("share", 730 * 2.0 * 0.75),
    "starved": ("smaller-mig", 730 * 4.0 * 0.75),
    "decoding": ("bottleneck", None),
}


def labels(**pairs: str) -> str:
    return ",".join(f'{name}="{value}"' for name, value in pairs.items() if value)


def samples(one: HeldDevice, extra: dict[str, str]) -> Iterator[tuple[str, str, float, int]]:
    """Yield the records of the rules for one device: name, labels, value, time."""
    device = {
        "cluster": one.owner.cluster,
        "node": one.owner.node,
        "gpu": "0",
        "uuid": one.uuid,
        "model": one.owner.model,
        **extra,
    }
    owner = {
        "workload_namespace": one.owner.namespace,
        "workload_kind": one.owner.kind,
        "workload_name": one.owner.workload,
        "team": one.owner.team,
    }
    inside = labels(**device, **owner)
    account = labels(cluster=one.owner.cluster, model=one.owner.model, **owner, **extra)
    parts = {"active_effective": EFFECTIVE_RATIO, "active_ineffective": 1 - EFFECTIVE_RATIO} if one.bottlenecks else {}
    facts = "workload_device:gpu_use:facts"
    for hour in range(int(HOURS)):
        at = END_SECONDS - int(HOURS) * 3600 + hour * 3600 + LATE_SECONDS
        yield "workload_device:gpu_memory_total_bytes:max", labels(**device), one.memory_total_bytes or 0.0, at
        if hour >= one.held_hours:
            continue
        measured = one.share_ratio * one.measured_hours / one.held_hours
        yield facts, f'{inside},fact="share"', one.share_ratio, at
        yield facts, f'{inside},fact="measured"', measured, at
        yield facts, f'{inside},fact="active"', (one.mean_ratio or 0.0) * measured, at
        yield facts, f'{inside},fact="memory_used_bytes"', one.peak_memory_bytes or 0.0, at
        if one.estimated:
            yield facts, f'{inside},fact="estimated"', 1.0, at
        over = at - LATE_SECONDS + 3600
        hourly, money = "workload:gpu_ledger:delta1h", one.share_ratio * PRICES[one.owner.model]
        for state, part in (parts or {"idle": 1.0}).items():
            inside_state = f'{account},state="{state}"'
            yield hourly, f'{inside_state},quantity="seconds"', part * 3600 * one.share_ratio, over
            yield hourly, f'{inside_state},quantity="cost",currency="USD"', part * money, over
        for series, by_resource in (("bottleneck", one.bottlenecks), ("resource_use", one.resource_uses)):
            for resource, seconds in by_resource.items():
                of_class = labels(cluster=one.owner.cluster, **owner, **extra, resource=resource)
                yield f"workload:gpu_{series}_seconds:sum", of_class, seconds, over
        yield "cluster:gpu_capacity_seconds:delta1h", labels(cluster=one.owner.cluster, **extra), 3600.0, over
    of_workload = labels(cluster=one.owner.cluster, **owner, **extra)
    if one.policy:
        yield "workload:gpu_policy:info", f'{of_workload},policy="{one.policy}"', 1.0, END_SECONDS - 60
    if "quiet" in one.owner.workload:
        yield "workload:gpu_alerts_off_until_seconds:max", of_workload, END_SECONDS + 3600.0, END_SECONDS - 60


def written(path: Path, *extras: dict[str, str], openmetrics: bool) -> Path:
    """Write the fleet once for each of ``extras``, in the text form of promtool or VictoriaMetrics."""
    found = sorted({sample for extra in extras for one in FLEET for sample in samples(one, extra)})
    scale = 1 if openmetrics else 1000
    lines = [f"{name}{{{inside}}} {value!r} {at * scale}" for name, inside, value, at in found]
    path.write_text("\n".join(lines) + ("\n# EOF\n" if openmetrics else "\n"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def real_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Prometheus with the series of a pair, which has recorded everything twice."""
    folder = tmp_path_factory.mktemp("recommend-prometheus")
    pair = ({"prometheus_replica": "a"}, {"prometheus_replica": "b"})
    backfill(written(folder / "fleet.om", *pair, openmetrics=True), folder / "blocks")
    with prometheus(folder, folder / "blocks", SMALL_FLEET) as server:
        yield server.url


@pytest.fixture(scope="module")
def real_victoria(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("recommend-victoria")
    with victoria(folder, written(folder / "fleet.txt", {}, openmetrics=False), SMALL_FLEET) as server:
        yield server.url


@pytest.fixture(params=["real_prometheus", "real_victoria"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


async def uses_at(address: str, filters: Filters = EVERYTHING) -> tuple[HeldDevice, ...]:
    async with PrometheusClient(PrometheusSettings(url=address)) as client:
        return await read_evidence(client, WEEK, filters)


async def recommendations_at(address: str) -> tuple[Recommendation, ...]:
    async with PrometheusClient(PrometheusSettings(url=address)) as client:
        return await read_recommendations(client, PrometheusLedger(client), END_SECONDS + 1200)


def test_evidence_of_each_device_is_read_once_from_one_or_two_servers(url: str) -> None:
    found = {one.owner.workload + one.uuid: one for one in asyncio.run(uses_at(url))}
    expected = {
        one.owner.workload + one.uuid: one for one in FLEET if one.owner.workload not in {"quiet, please", "ended"}
    }
    assert found.keys() == expected.keys()
    for name, one in found.items():
        truth = expected[name]
        if one.owner.workload == "half-measured":
            truth = replace(truth, mean_ratio=0.0)
        exact = ("held_hours", "share_ratio", "peak_memory_bytes", "memory_total_bytes", "estimated", "policy")
        assert [getattr(one, field) for field in exact] == [getattr(truth, field) for field in exact]
        assert one.still_held == truth.still_held
        for kind in ("bottlenecks", "resource_uses"):
            hourly = getattr(truth, kind)
            assert getattr(one, kind) == {name: pytest.approx(HOURS * hour) for name, hour in hourly.items()}
        for name_of in ("team", "kind", "model"):
            assert one.owner.value(name_of) == truth.owner.value(name_of)
        assert one.measured_hours == pytest.approx(truth.measured_hours)
        for field in ("mean_ratio", "p95_ratio", "peak_ratio"):
            assert getattr(one, field) == pytest.approx(getattr(truth, field)), name


def test_every_recommendation_has_its_saving_and_no_other_is_made(url: str) -> None:
    found = asyncio.run(recommendations_at(url))
    months = [one.per_month or 0.0 for one in found]
    assert months == sorted(months, reverse=True)
    assert {one.owner.workload: one.advice for one in found} == {name: advice for name, (advice, _) in TRUTH.items()}
    for one in found:
        month = TRUTH[one.owner.workload][1]
        assert one.per_month == (month and pytest.approx(month))
        assert (one.owner.cluster, one.currency) == ("prod", "USD" if month else "")


def test_filters_select_workloads(real_prometheus: str) -> None:
    of_two = Filters(wanted={"workload": frozenset({"fewer", "shared"}), "mode": frozenset({"exclusive"})})
    found = asyncio.run(uses_at(real_prometheus, of_two))
    assert sorted(one.owner.workload for one in found) == ["fewer", "fewer", "shared"]
    assert asyncio.run(uses_at(real_prometheus, Filters(wanted={"team": frozenset({"nobody"})}))) == ()


def command(url: str, *arguments: str) -> list[str]:
    return ["recommend", "--prometheus", url, "--window", "2026-09-14T14:00Z..2026-09-21T14:00Z", *arguments]


def test_command_shows_advice_reason_and_saving(real_prometheus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(real_prometheus)) == 0
    reported = capsys.readouterr().out
    flat = " ".join(reported.split())
    assert "Give back 1 of 2 H100" in flat
    assert "2,920.00 USD" in flat
    assert "prod: Deployment ml/given-back" in flat
    assert "a month, of 6 recommendations" in flat


def test_json_and_csv_have_the_same_advice_and_json_has_sums(
    real_prometheus: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(command(real_prometheus, "--format", "json")) == 0
    document = json.loads(capsys.readouterr().out)
    months = [one["per_month"] for one in document["recommendations"]]
    assert document["per_month"]["USD"] == pytest.approx(sum(month or 0.0 for _, month in TRUTH.values()))
    assert {one["owner_name"] for one in document["recommendations"]} == set(TRUTH)
    assert all(one["evidence"] and one["risk"] and one["devices"] for one in document["recommendations"])
    target = tmp_path / "recommendations.csv"
    assert main(command(real_prometheus, "--format", "csv", "--output", str(target))) == 0
    with target.open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["per_month"]) if row["per_month"] else None for row in rows] == months
    assert rows[0]["from"] == "2026-09-14T14:00:00Z"


def test_filter_without_matches_succeeds_with_a_warning(
    real_prometheus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(real_prometheus, "--filter", "team=nobody")) == 0
    shown = capsys.readouterr()
    assert "none found" in shown.out
    assert "warning: nothing matches team nobody" in shown.err


def test_missing_evidence_names_the_missing_rules(real_prometheus: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recommend", "--prometheus", real_prometheus, "--window", "2025-01"]) == EXIT_FAILED
    assert "gpu-evidence" in capsys.readouterr().err


def test_every_flag_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["recommend", "--prometheus", "ftp://x", "--window", "3h", "--filter", "pool=a", "--filter", "x"]
    assert main(wrong) == EXIT_USAGE
    reported = capsys.readouterr().err
    for words in ("prometheus", "shorter than a day", "pool is not known", "value 'x' has no ="):
        assert words in reported


def test_unreachable_prometheus_is_reported_in_one_line() -> None:
    command = [sys.executable, "-m", "exporter", "recommend", "--prometheus", "http://127.0.0.1:1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == EXIT_FAILED
    (reported,) = done.stderr.splitlines()
    assert "cannot connect" in reported

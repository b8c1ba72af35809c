"""The simulated fleet has exact sums, is the same each time, and real engines accept its series."""

import io
import json
import re
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_support import END_SECONDS, FleetServer, backfill, truth_between
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.cli import main
from exporter.errors import ConfigError
from exporter.model.ledger import STATES
from gpu_simulator.fleet import FleetTruth, Writing, fleet_truth, write_fleet
from gpu_simulator.fleet_ledger import node_ledger, recording_hours
from gpu_simulator.fleet_plan import FleetPlan, TraceTask, fleet_nodes, read_trace, task
from gpu_simulator.past import demo_fleet
from gpu_simulator.stack import HISTORY_DAYS

TINY = FleetPlan(nodes=12, gpus_per_node=2, days=4, end_seconds=END_SECONDS, clusters=("a", "b"))
HOUR_MS = 3_600_000
LINE = re.compile(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+) (\d+)")


def text_of(plan: FleetPlan, **how: Any) -> str:  # noqa: ANN401 - as Writing has them
    output = io.StringIO()
    write_fleet(plan, output, Writing(**{"form": "openmetrics", **how}))
    return output.getvalue()


def ask(server: FleetServer, expression: str, at_seconds: float) -> dict[tuple[str, ...], float]:
    """Return an instant query's values, by the label values in the order of the label names."""
    query = urllib.parse.urlencode({"query": expression, "time": str(at_seconds)})
    with urllib.request.urlopen(f"{server.url}/api/v1/query?{query}", timeout=60) as answer:  # noqa: S310 - local
        rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return {
        tuple(value for name, value in sorted(row["metric"].items()) if name != "__name__"): float(row["value"][1])
        for row in rows
    }


@given(seed=st.integers(0, 2**32), gpus=st.integers(1, 9), days=st.integers(1, 4), node=st.integers(0, 20))
@settings(max_examples=40, deadline=None)
def test_owner_seconds_sum_to_the_seconds_of_the_gpus(seed: int, gpus: int, days: int, node: int) -> None:
    plan = FleetPlan(nodes=21, gpus_per_node=gpus, days=days, end_seconds=END_SECONDS, seed=seed)
    ledger = node_ledger(fleet_nodes(plan)[node])
    carried = Counter(recording_hours(plan))
    lasted: Counter[int] = Counter()
    for lines in ledger.lines.values():
        for hour, line in lines.items():
            assert min(line) >= 0
            lasted[hour] += line.allocated_ms
    for hour in ledger.there:
        # After an outage of Prometheus an hour also has the missed hours in which the node existed.
        assert lasted[hour] % (gpus * HOUR_MS) == 0
        assert gpus * HOUR_MS <= lasted[hour] <= carried[hour] * gpus * HOUR_MS


@given(seed=st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_cost_is_seconds_times_the_price_at_the_time(seed: int) -> None:
    for ledger in map(node_ledger, fleet_nodes(replace(TINY, seed=seed))):
        for lines in ledger.lines.values():
            for hour, line in lines.items():
                price = ledger.node.price(hour)
                assert line.unpriced_ms == (line.allocated_ms if price is None else 0)
                assert line.money.total == pytest.approx(line.allocated_ms * (price or 0.0) / HOUR_MS, abs=2e-9)
                assert line.idle_cost == pytest.approx(line.idle_ms * (price or 0.0) / HOUR_MS, abs=1e-9)


def test_fleet_is_deterministic_for_any_number_of_processes() -> None:
    once = text_of(TINY)
    assert text_of(TINY, processes=2) == once
    assert text_of(replace(TINY, seed=2)) != once


def test_every_series_has_one_value_per_time_and_zeros_as_the_rules_do() -> None:
    seen, zeros = set(), set()
    last: dict[str, int] = {}
    for row in text_of(TINY).splitlines():
        if row.startswith("#"):
            continue
        found = LINE.fullmatch(row)
        assert found is not None, row
        name, inside, value, at = found.groups()
        assert float(value) >= 0, row
        if not float(value):
            zeros.update(re.findall(r'fact="(\w+)"', inside) or [name])
        assert (name, inside, at) not in seen, row
        seen.add((name, inside, at))
        assert last.get(f"{name}{inside}", 0) < int(at), "out of order"
        last[f"{name}{inside}"] = int(at)
    names = {name for name, _, _ in seen}
    assert zeros == {"active", "measured", "workload:gpu_resource_use_seconds:sum"}
    ledger = {(name, *re.findall(r'quantity="\w+"', inside)) for name, inside, _ in seen if ":gpu_ledger:" in name}
    assert len(ledger) == 8
    facts = {fact for name, inside, _ in seen for fact in re.findall(r'fact="(\w+)"', inside)}
    assert facts == {"share", "active", "measured", "memory_used_bytes", "estimated"}
    assert "workload_device:gpu_memory_total_bytes:max" in names
    assert {"gpu_node_info", "gpu_hourly_price", "gpu_exporter_simulated"} <= names


def test_demo_has_workloads_idle_for_the_last_week() -> None:
    fleet = demo_fleet(END_SECONDS, HISTORY_DAYS)
    week = range(fleet.hours - 7 * 24, fleet.hours)
    assert any(
        all(hour in hours and not hours[hour].active_ms and not hours[hour].unknown_ms for hour in week[-24:])
        and not any(hours[hour].active_ms for hour in week if hour in hours)
        for node in fleet_nodes(fleet)
        for hours in node_ledger(node).uses.values()
    ), "no workload was idle for the last week"


def test_fleet_has_every_kind_of_line_that_reports_distinguish(small_fleet: FleetPlan, fleet_truth: FleetTruth) -> None:
    kinds = {kind for (kind,) in fleet_truth.total("kind")}
    assert {"Unallocated", "Unattributed", "Job", "CronJob", "Deployment", "Notebook"} <= kinds
    assert "Other" not in kinds, "Prometheus has folded owners by name; only the agent folds them"
    assert {mode for (mode,) in fleet_truth.total("mode")} == {"exclusive", "mig", "shared"}
    assert len(fleet_truth.total("model")) == 5
    total = fleet_truth.sum()
    assert set(total.money) == {"USD", "EUR"}
    assert 0 < total.unpriced_seconds < 0.1 * total.seconds.total
    assert 0 < total.seconds.unknown < 0.2 * total.seconds.total
    assert any(not team for namespace, team in fleet_truth.total("namespace", "team") if namespace)
    by_day = [hours for day in fleet_truth.recorded_hours.values() for hours in day.values()]
    assert min(by_day) == 10
    assert {22, 23} <= set(by_day), "Prometheus was down for three hours around midnight"
    assert sum(by_day) == 2 * (small_fleet.hours - 3)


def test_short_tasks_have_the_durations_of_the_real_trace() -> None:
    random = Random(1)  # noqa: S311 - the same numbers each time
    plan = FleetPlan(nodes=1, end_seconds=END_SECONDS)
    lives = sorted(task(plan, random).seconds for _ in range(20_000))
    for rank, seconds in ((0.01, 20), (0.05, 48), (0.1, 67), (0.5, 655), (0.9, 7389)):
        assert lives[int(rank * len(lives))] == pytest.approx(seconds, rel=0.1)


@pytest.fixture(params=["fleet_prometheus", "fleet_victoria"])
def server(request: pytest.FixtureRequest) -> FleetServer:
    found: FleetServer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("level", ["owner", "workload"])
@pytest.mark.parametrize("what", [*STATES, "unpriced"])
def test_engines_return_the_true_seconds(
    server: FleetServer, small_fleet: FleetPlan, fleet_truth: FleetTruth, what: str, level: str
) -> None:
    window = f"[{small_fleet.days}d]"
    inside = f'quantity="seconds",state="{what}"' if what in STATES else f'quantity="{what}_seconds"'
    answer = ask(
        server,
        f"sum by (cluster, workload_namespace, team) (sum_over_time({level}:gpu_ledger:delta1h{{{inside}}}{window}))",
        small_fleet.end_seconds + 1200,
    )
    true: Counter[tuple[str, ...]] = Counter()
    for (cluster, team, namespace), totals in fleet_truth.total("cluster", "team", "namespace").items():
        seconds = {**dict(totals.seconds), "unpriced": totals.unpriced_seconds}[what]
        if seconds:
            true[tuple(label for label in (cluster, team, namespace) if label)] += seconds
    assert answer == pytest.approx(true, rel=1e-9)


def test_engines_return_the_true_cost_of_a_single_day(server: FleetServer, small_fleet: FleetPlan) -> None:
    day = small_fleet.end_seconds // 86_400 * 86_400 - 5 * 86_400
    true = truth_between(day, day + 86_400)
    assert set(true.days) == {day}
    answer = ask(
        server,
        'sum by (currency) (sum_over_time(workload:gpu_ledger:delta1h{quantity="cost"}[1d]))',
        day + 86_400 + 1200,
    )
    assert answer == pytest.approx({(code,): money.total for code, money in true.sum().money.items()}, rel=1e-9)


@pytest.mark.parametrize("quantity", ["seconds", "cost", "unpriced_seconds", "energy_joules"])
def test_workload_series_are_sums_of_the_owner_series(
    server: FleetServer, small_fleet: FleetPlan, quantity: str
) -> None:
    by = "cluster, workload_namespace, workload_kind, workload_name, team, cost_labels, model, state, currency"
    at = small_fleet.start_seconds + 5 * 86_400 + 960
    hourly = f'gpu_ledger:delta1h{{quantity="{quantity}"}}'
    recorded = ask(server, f"sum by ({by}) (workload:{hourly})", at)
    assert recorded == pytest.approx(ask(server, f"sum by ({by}) (owner:{hourly})", at), rel=1e-9)
    assert len(recorded) >= 2


def test_capacity_is_the_sum_of_all_owners(server: FleetServer, small_fleet: FleetPlan) -> None:
    hour = small_fleet.end_seconds - 7200
    at = hour + 960
    capacity = ask(server, "cluster:gpu_capacity_seconds:delta1h", at)
    assert capacity == pytest.approx(
        ask(server, 'sum by (cluster) (workload:gpu_ledger:delta1h{quantity="seconds"})', at), rel=1e-9
    )
    steps = ("capacity", "allocated", "working", "active", "profiled", "effective")
    funnel = [ask(server, f"cluster:gpu_{step}:sum", hour) for step in steps]
    for cluster in capacity:
        counts = [step[cluster] for step in funnel]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] * 3600 == pytest.approx(capacity[cluster])


def test_device_facts_match_the_ledger(server: FleetServer, small_fleet: FleetPlan) -> None:
    at = small_fleet.end_seconds
    known = 'quantity="seconds",workload_kind!~"Unallocated|Unattributed",state=~"active_.*"'
    by = "sum by (cluster, node, workload_name)"
    active = ask(server, f"{by} (owner:gpu_ledger:delta1h{{{known}}}) / 3600", at + 960)
    assert ask(server, f'{by} (workload_device:gpu_use:facts{{fact="active"}}) > 0', at) == pytest.approx(
        active, abs=1e-4
    )


def test_promtool_accepts_any_fleet(tmp_path: Path) -> None:
    for seed, plan in enumerate((replace(TINY, clusters=("",)), replace(TINY, days=1, nodes=50, gpus_per_node=8))):
        text = tmp_path / "fleet.om"
        text.write_text(text_of(replace(plan, seed=seed)), encoding="utf-8")
        backfill(text, tmp_path / f"blocks-{seed}")


def test_trace_gives_durations_and_shares_of_tasks(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\n"
        "a,1,460,0,70,10\nnot-a-gpu-pod,0,0,0,70,10\nstill-there,1,1000,5,,10\nb,8,1000,0,7200,0\n",
        encoding="utf-8",
    )
    assert read_trace(file) == (TraceTask(60, 1, 0.46), TraceTask(7200, 8, 1.0))
    truth = fleet_truth(replace(TINY, trace=read_trace(file)))
    assert truth.capacity_seconds == pytest.approx(fleet_truth(TINY).capacity_seconds)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "no column deletion_time, gpu_milli, num_gpu, scheduled_time"),
        ("num_gpu,gpu_milli,deletion_time,scheduled_time\nx,1,2,1\n", "line 2: not a number"),
        ("num_gpu,gpu_milli,deletion_time,scheduled_time\n", "no finished GPU pod"),
    ],
)
def test_invalid_trace_is_refused_with_the_reason(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_command_writes_matching_series_and_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    series, truth = tmp_path / "fleet.txt", tmp_path / "truth.json"
    words = ["simulate", "fleet", "--nodes", "2", "--gpus", "3", "--days", "2", "--end", "2026-09-21T14:00Z"]
    more = ["--clusters", "x,y", "--format", "import", "--output", str(series), "--truth", str(truth)]
    assert main([*words, *more, "--processes", "1", "--ledger-only"]) == 0
    assert "nothing in" in capsys.readouterr().out
    assert sorted(file.name for file in tmp_path.iterdir()) == ["fleet.txt", "truth.json"]
    rows = [LINE.fullmatch(row) for row in series.read_text(encoding="utf-8").splitlines() if row.startswith("owner:")]
    seconds = [row for row in rows if row and 'quantity="seconds"' in row[2]]
    active = sum(float(row[3]) for row in seconds if 'state="active_' in row[2])
    assert max(int(row[4]) for row in rows if row) == (END_SECONDS + 900) * 1000
    reported = json.loads(truth.read_text(encoding="utf-8"))
    assert reported["simulated"] is True
    lines = [line for day in reported["days"] for line in day["lines"]]
    assert sum(line["active_seconds"] for line in lines) == pytest.approx(active)
    assert {line["cluster"] for line in lines} == {"x", "y"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "nodes: 0; allowed: 1 to 100,000"),
        (["--nodes", "2", "--days", "0"], "days: 0"),
        (["--nodes", "2", "--end", "2026-09-21T14:10Z"], "allowed: a whole hour UTC"),
        (["--nodes", "2", "--end", "yesterday"], "allowed: a whole hour UTC"),
        (["--nodes", "2", "--clusters", "a,a"], "each name once"),
        (["--nodes", "2", "--trace", "/nowhere.csv"], "/nowhere.csv"),
    ],
)
def test_invalid_options_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["simulate", "fleet", *words, "--output", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unwritable_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "fleet", "--nodes", "1", "--days", "1", "--processes", "1"]
    assert main([*words, "--output", str(tmp_path / "no" / "out")]) == 1
    assert "cannot write" in capsys.readouterr().err

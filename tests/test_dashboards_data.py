"""Every panel of every dashboard has data from a real Prometheus, and the data are the truth."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from dashboards_support import NAMES, Engine, Panel, Vector, live_node, load, panels
from fleet_support import END_SECONDS, SMALL_FLEET, FleetServer, backfill, backfilled, prometheus, truth_between
from service_support import quiet_fleet

from exporter.cost.budgets import Budget, BudgetState
from exporter.cost.window import period_at
from exporter.model.ledger import ByState, Totals
from exporter.service.data import Month, ThisMonth
from exporter.service.metrics import render
from gpu_simulator.fleet import FleetTruth
from gpu_simulator.fleet_plan import FleetPlan

DAY, HOUR = 86_400, 3600
H100_PRICE = 6.16
BOARDS = {name: load(name) for name in NAMES}
STEPS = ("active", "profiled", "effective")
APART = ("Unallocated", "Unattributed")
MONTH_START = int(datetime(2026, 9, 1, tzinfo=UTC).timestamp())
TODAY = END_SECONDS // DAY * DAY


def _service_page() -> list[str]:
    """Return the metrics of the cost service, as on its page."""
    now = time.time()
    budget = Budget(name="research", amount=1000.0, currency="USD", period="month", owner={"team": "vision"})
    state = BudgetState(
        budget=budget,
        period=period_at("month", now),
        spent=400.0,
        projected=900.0,
        unpriced_seconds=0.0,
        as_of_seconds=now,
    )
    fleet = quiet_fleet(now, (state,))
    money = (Month(currency="USD", spent=5.0, forecast=9.0, last_month=7.0),)
    fleet.month.value = ThisMonth(start_seconds=period_at("month", now).start_seconds, money=money, coverage=None)
    page = render(fleet, "").plain.decode()
    return [line for line in page.splitlines() if line.startswith(("gpu_budget", "gpu_cost_month", "gpu_cost_last"))]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Load a node with faults, and a cost service."""
    with live_node(tmp_path_factory.mktemp("dashboards"), *_service_page()) as engine:
        yield engine


@pytest.fixture(scope="module")
def recorded(fleet_prometheus: FleetServer) -> Engine:
    """Load forty days of a fleet, as recorded by the rules."""
    return Engine(url=fleet_prometheus.url, now=float(END_SECONDS), step=HOUR)


def panel_of(name: str, title: str) -> Panel:
    return next(panel for panel in panels(BOARDS[name]) if panel["title"] == title)


def shown(engine: Engine, name: str, title: str, letter: str = "A", **chosen: str) -> list[Any]:
    """Return the series of a target."""
    panel = panel_of(name, title)
    target = next(target for target in panel["targets"] if target["refId"] == letter)
    return engine.series(BOARDS[name], panel, target, **chosen)


def value(engine: Engine, name: str, title: str, letter: str = "A", **labels: str) -> float:
    """Return the only value of a target now, or that of the series with these labels."""
    found: Vector = [row for row in shown(engine, name, title, letter) if labels.items() <= row[0].items()]
    assert len(found) == 1, (title, found)
    return found[0][1]


def newest(engine: Engine, name: str, title: str, letter: str = "A") -> dict[tuple[str, ...], float]:
    """Return the last value of each line, by the values of its labels."""
    return {tuple(labels.values()): values[-1][1] for labels, values in shown(engine, name, title, letter)}


@pytest.mark.parametrize("name", NAMES)
def test_every_panel_target_returns_data(name: str, live: Engine, recorded: Engine) -> None:
    dead = [
        f"{panel['title']} {target['refId']}: {target['expr']}"
        for panel in panels(BOARDS[name])
        for target in panel["targets"]
        if not any(engine.series(BOARDS[name], panel, target) for engine in (live, recorded))
    ]
    assert not dead


def test_cluster_variable_filters_every_panel(live: Engine) -> None:
    for name in ("fleet", "oncall"):
        for panel in panels(BOARDS[name]):
            for target in panel["targets"]:
                if "$cluster" in target["expr"] and "vector(0)" not in target["expr"]:
                    assert not live.series(BOARDS[name], panel, target, cluster="another"), panel["title"]


def test_eight_gpu_pod_at_90_percent_shows_90_percent(live: Engine) -> None:
    by_pod = newest(live, "fleet", "Activity by pod")
    assert by_pod["live", "trainer-0", "research"] == pytest.approx(0.9, abs=0.01)
    assert by_pod["live", "notebook-0", "research"] == 0.0
    # By share: 8 GPUs at 90 %, 2 at 0.
    assert newest(live, "fleet", "Activity by namespace")["research",] == pytest.approx(0.72, abs=0.01)
    row = value(live, "fleet", "Top idle workloads", "C", workload_name="trainer")
    assert row == pytest.approx(0.9, abs=0.01)


def test_funnel_narrows_from_capacity_to_effective_use(live: Engine) -> None:
    funnel = [value(live, "fleet", "GPUs: capacity to effective use", letter) for letter in "ABCDEF"]
    # 8 at 90 %, 2 idle, half a GPU at 50 %, a quarter at work, and a lost one without any measurement. GPUs that are
    # not shared are profiled, at half of a limit or more.
    assert funnel == pytest.approx([17, 11.75, 8.75, 7.7, 7.45, 3.87], abs=0.05)
    money = [
        value(live, "fleet", "Cost per hour: capacity to effective use", letter, currency="USD") for letter in "BCDE"
    ]
    assert money == pytest.approx([H100_PRICE * gpus for gpus in (funnel[1], *funnel[3:])], abs=0.5)
    # Nothing of the serving team's quarter was profiled: its cost is active, and in no later step.
    parts = {row["workload_name"]: part for row, part in shown(live, "fleet", "Top idle workloads", "D")}
    assert parts.keys() == {"trainer", "slice-0"}


def test_idle_workloads_are_shown_with_their_cost(live: Engine) -> None:
    notebook = {"workload_name": "notebook", "workload_kind": "StatefulSet", "team": "vision", "currency": "USD"}
    assert value(live, "fleet", "Top idle workloads", "A", **notebook) == pytest.approx(2 * H100_PRICE, abs=0.1)
    assert value(live, "fleet", "Top idle workloads", "B", workload_name="notebook") == 2


def test_free_gpus_are_counted_by_the_jobs_that_fit(live: Engine) -> None:
    free = value(live, "fleet", "Free whole GPUs")
    assert free == 4
    assert value(live, "fleet", "Jobs that fit") == 0
    assert value(live, "fleet", "Free GPUs lost to fragmentation") == free
    assert shown(live, "fleet", "Jobs that fit", job_gpus="2")[0][1] == 2
    assert shown(live, "fleet", "Free GPUs lost to fragmentation", job_gpus="3")[0][1] == 1
    assert value(live, "fleet", "MIG layout", "A", mig_profile="3g.40gb") == 1
    assert value(live, "fleet", "MIG layout", "B", mig_profile="2g.20gb") == 0


def test_oncall_dashboard_shows_faults_and_the_holder_of_the_gpu(live: Engine) -> None:
    tiers = {row[0]["xid"]: row[0]["tier"] for row in shown(live, "oncall", "Xids")}
    assert tiers == {"31": "application", "94": "warning", "45": "none", "48": "critical"}
    assert value(live, "oncall", "Recovery actions") == 4
    assert value(live, "oncall", "Memory errors by GPU", "A", gpu="12") == 6
    firing = {row[0]["alertname"] for row in shown(live, "oncall", "Firing alerts")}
    assert {"GPUXidCritical", "GPUMissing", "GPURecoveryActionNeeded"} <= firing
    fired = {labels["alertname"] for labels, _ in shown(live, "oncall", "Alerts over time")}
    assert {"GPUEccUncorrectable", *firing} <= fired
    held = {(labels["gpu"], labels["pod_name"]) for labels, _ in shown(live, "oncall", "Holders")}
    assert {("0", "trainer-0"), ("15", "victim-0")} <= held
    reasons = {(labels["gpu"], labels["reason"]) for labels, _ in shown(live, "oncall", "Throttling reasons")}
    assert reasons == {("13", "hw_thermal")}


def test_budgets_and_the_month_match_the_cost_service(live: Engine) -> None:
    row = [value(live, "finops", "Budgets", letter, budget="research", team="vision") for letter in "ABCDE"]
    assert row == [1000, 400, 900, 0.4, 0.9]
    month = [value(live, "finops", "Month, from the cost service", letter) for letter in "ABC"]
    assert month == [5, 9, 7]


def _money(truth: FleetTruth, currency: str, **wanted: str) -> float:
    money = truth.sum(**wanted).money.get(currency)
    return money.total if money else 0.0


@pytest.mark.parametrize("currency", SMALL_FLEET.currencies)
def test_today_and_month_to_date_match_the_ledger(recorded: Engine, currency: str) -> None:
    for title, since in (("Today", TODAY), ("Month to date", MONTH_START)):
        truth = truth_between(since, END_SECONDS)
        assert value(recorded, "finops", title, currency=currency) == pytest.approx(_money(truth, currency), rel=1e-6)
    month = truth_between(MONTH_START, END_SECONDS)
    free = _money(month, currency, kind="Unallocated")
    assert value(recorded, "finops", "Unallocated, month to date", currency=currency) == pytest.approx(free, rel=1e-6)


def test_forecast_is_month_to_date_plus_the_pace_of_seven_days(recorded: Engine) -> None:
    week = truth_between(END_SECONDS - 7 * DAY, END_SECONDS)
    hours: dict[str, int] = {}
    for clusters in week.recorded_hours.values():
        for cluster, count in clusters.items():
            hours[cluster] = hours.get(cluster, 0) + count
    pace = sum(_money(week, "USD", cluster=cluster) / count for cluster, count in hours.items())
    spent = _money(truth_between(MONTH_START, END_SECONDS), "USD")
    rest = (30 * DAY - (END_SECONDS - MONTH_START)) / HOUR
    forecast = value(recorded, "finops", "Forecast for the month", currency="USD")
    assert forecast == pytest.approx(spent + pace * rest, rel=1e-6)


def test_daily_bars_match_the_ledger(recorded: Engine) -> None:
    panel = panel_of("finops", "Cost by day")
    drawn: dict[float, float] = {}
    for target in panel["targets"]:
        for labels, values in recorded.series(BOARDS["finops"], panel, target):
            for at, money in values:
                if labels["currency"] == "USD":
                    drawn[at] = drawn.get(at, 0.0) + money
    truth = truth_between(END_SECONDS - 40 * DAY, END_SECONDS)
    assert len(drawn) == 31
    assert max(drawn) == TODAY
    for day, lines in truth.days.items():
        whole = sum(totals.money["USD"].total for totals in lines.values() if "USD" in totals.money)
        if day in drawn:
            assert drawn[day] == pytest.approx(whole, rel=1e-6), datetime.fromtimestamp(day, UTC)


def test_hourly_bars_sum_to_the_cost_of_today(recorded: Engine) -> None:
    panel = panel_of("finops", "Cost by hour")
    drawn = sum(
        money
        for target in panel["targets"]
        for labels, values in recorded.series(BOARDS["finops"], panel, target)
        for at, money in values
        if labels["currency"] == "USD" and at >= TODAY
    )
    assert drawn == pytest.approx(_money(truth_between(TODAY, END_SECONDS), "USD"), rel=1e-6)


def test_top_waste_lists_the_highest_idle_cost(recorded: Engine) -> None:
    truth = truth_between(END_SECONDS - 30 * DAY, END_SECONDS)
    by = ("cluster", "namespace", "kind", "workload", "team")
    idle = {
        owner: totals.money["USD"].idle
        for owner, totals in truth.total(*by).items()
        if owner[2] not in APART and "USD" in totals.money
    }
    most = sorted(idle.values(), reverse=True)[:20]
    names = ("cluster", "workload_namespace", "workload_kind", "workload_name", "team")
    rows = [row for row in shown(recorded, "finops", "Top 20 by idle cost") if row[0]["currency"] == "USD"]
    assert sorted((money for _, money in rows), reverse=True) == pytest.approx(most, rel=1e-6)
    owners = {tuple(row[0].get(name, "") for name in names) for row in shown(recorded, "finops", "Top 20 by idle cost")}
    hours = shown(recorded, "finops", "Top 20 by idle cost", "D")
    assert {tuple(labels.get(name, "") for name in names) for labels, _ in hours} == owners
    for labels, money in rows:
        assert money == pytest.approx(idle[tuple(labels.get(name, "") for name in names)], rel=1e-6)


@pytest.mark.parametrize(
    ("title", "label", "field"),
    [("By team", "team", "team"), ("By namespace", "workload_namespace", "namespace"), ("By model", "model", "model")],
)
def test_owner_tables_have_allocated_and_effective_hours_and_cost(
    recorded: Engine, title: str, label: str, field: str
) -> None:
    truth = truth_between(END_SECONDS - 30 * DAY, END_SECONDS)
    expected: dict[str, Totals] = {}
    for (kind, name), totals in truth.total("kind", field).items():
        if kind not in APART:
            expected[name] = expected.get(name, Totals()) + totals
    hours = {labels.get(label, ""): amount for labels, amount in shown(recorded, "finops", title, "D")}
    assert hours == pytest.approx({name: totals.seconds.total / HOUR for name, totals in expected.items()}, rel=1e-6)
    for currency in SMALL_FLEET.currencies:
        shares = [part for labels, part in shown(recorded, "finops", title, "B") if labels["currency"] == currency]
        assert sum(shares) == pytest.approx(1.0)
    for step, of_money, of_hours in zip(STEPS, "EFG", "HIJ", strict=True):
        hours = {labels.get(label, ""): amount for labels, amount in shown(recorded, "finops", title, of_hours)}
        seconds = {name: _step(totals.seconds, step) for name, totals in expected.items()}
        assert hours == pytest.approx({name: of / HOUR for name, of in seconds.items() if of is not None}, rel=1e-6)
        money = {
            (labels.get(label, ""), labels["currency"]): amount
            for labels, amount in shown(recorded, "finops", title, of_money)
        }
        paid = {
            (name, currency): _step(amounts, step)
            for name, totals in expected.items()
            for currency, amounts in totals.money.items()
        }
        assert money == pytest.approx({key: of for key, of in paid.items() if of is not None}, rel=1e-6)


def _step(amounts: ByState, step: str) -> float | None:
    """Return the GPUs of a step of the funnel; ``None`` without a measurement."""
    known = amounts.measured if step == "active" else amounts.profiled
    return float(getattr(amounts, step)) if known else None


@pytest.mark.parametrize("team", ["", "vision"])
def test_funnel_of_the_range_matches_the_ledger(recorded: Engine, team: str) -> None:
    truth, chosen = truth_between(END_SECONDS - 30 * DAY, END_SECONDS), {"team": team} if team else {}
    every = sum(truth.total("kind", **chosen).values(), Totals())
    held = sum((totals for (kind,), totals in truth.total("kind", **chosen).items() if kind not in APART), Totals())
    for title, labels, unit, whole, owned in (
        ("GPU-hours from capacity to effective", {}, HOUR, every.seconds, held.seconds),
        ("Cost from capacity to effective", {"currency": "USD"}, 1, every.money["USD"], held.money["USD"]),
    ):
        found = [
            amount
            for letter in "ABCDE"
            for row, amount in shown(recorded, "finops", title, letter, **chosen)
            if labels.items() <= row.items()
        ]
        steps = [whole.total, owned.total, *(_step(owned, step) for step in STEPS)]
        assert found == pytest.approx([amount / unit for amount in steps if amount is not None], rel=1e-6)
        assert found == sorted(found, reverse=True)


def test_known_price_and_activity_match_the_recorded_hours(recorded: Engine) -> None:
    # Unpriced time is older than the dashboard's default range of thirty days.
    recorded = replace(recorded, back=40 * DAY)
    truth = truth_between(END_SECONDS - 40 * DAY, END_SECONDS)
    held = [totals for (kind,), totals in truth.total("kind").items() if kind not in APART]
    allocated = sum(totals.seconds.total for totals in held)
    unpriced = sum(totals.unpriced_seconds for totals in held) / allocated
    unknown = sum(totals.seconds.unknown for totals in held) / allocated
    assert unpriced > 0
    assert value(recorded, "finops", "Price known") == pytest.approx(1 - unpriced, rel=1e-6)
    assert value(recorded, "finops", "Activity known") == pytest.approx(1 - unknown, rel=1e-6)
    counted: dict[str, int] = {}
    for clusters in truth.recorded_hours.values():
        for cluster, count in clusters.items():
            counted[cluster] = counted.get(cluster, 0) + count
    fewest = min(counted.values()) / (40 * 24)
    assert value(recorded, "finops", "Hours recorded") == pytest.approx(fewest)
    assert fewest < 1


def test_cost_per_gpu_hour_is_the_price(recorded: Engine) -> None:
    per_hour = {
        labels["model"]: (labels["currency"], money) for labels, money in shown(recorded, "finops", "Cost per GPU-hour")
    }
    truth = truth_between(END_SECONDS - 30 * DAY, END_SECONDS)
    for model, (currency, money) in per_hour.items():
        held = [totals for (kind,), totals in truth.total("kind", model=model).items() if kind not in APART]
        hours = sum(totals.seconds.total - totals.unpriced_seconds for totals in held) / HOUR
        paid = sum(totals.money[currency].total for totals in held if currency in totals.money)
        assert money == pytest.approx(paid / hours, rel=1e-6), model
    assert len(per_hour) >= 3


def test_prometheus_replicas_count_once(tmp_path: Path) -> None:
    plan = FleetPlan(nodes=2, gpus_per_node=2, days=25, end_seconds=END_SECONDS, seed=3)
    blocks = backfilled(plan, tmp_path, {"replica": "a"}, {"replica": "b"}, devices=False)
    with prometheus(tmp_path, blocks, plan) as server:
        engine = Engine(url=server.url, now=float(END_SECONDS), step=HOUR)
        truth = truth_between(MONTH_START, END_SECONDS, plan)
        assert value(engine, "finops", "Month to date") == pytest.approx(_money(truth, "USD"), rel=1e-6)
        last = newest(engine, "finops", "GPU-hours by day", "F")
        free = truth_between(TODAY, END_SECONDS, plan).sum(kind="Unattributed").seconds.total / HOUR
        assert sum(last.values()) == pytest.approx(free)
        hours = sum(amount for _, amount in shown(engine, "finops", "By namespace", "D"))
        held = truth_between(plan.start_seconds, END_SECONDS, plan).total("kind")
        assert hours == pytest.approx(sum(t.seconds.total for (k,), t in held.items() if k not in APART) / HOUR)


def test_replicas_that_split_hours_differently_count_once(tmp_path: Path) -> None:
    """A job of 75 minutes over midnight: replicas have different parts of its first hour, and one missed the second."""
    job = 'quantity="seconds",workload_namespace="ml",workload_kind="Job",workload_name="job",state="idle"'
    lines = []
    for replica, seconds in {"a": {22: 300, 23: 3600, 24: 600}, "b": {22: 600, 24: 3900}}.items():
        for hour in range(25):
            at = TODAY - DAY + (hour + 1) * HOUR + 900
            if replica == "a" or hour != 23:
                capacity = 28800 * (2 if replica == "b" and hour == 24 else 1)
                recorder = f'cluster="c",replica="{replica}"'
                lines.append((at, f"cluster:gpu_capacity_seconds:delta1h{{{recorder}}} {capacity}"))
                if hour in seconds:
                    lines.append((at, f"workload:gpu_ledger:delta1h{{{recorder},{job}}} {seconds[hour]}"))
    text = tmp_path / "text.om"
    text.write_text("".join(f"{line} {at}\n" for at, line in sorted(lines)) + "# EOF\n", encoding="utf-8")
    backfill(text, tmp_path / "blocks")
    with prometheus(tmp_path, tmp_path / "blocks", SMALL_FLEET) as server:
        engine = Engine(url=server.url, now=float(TODAY + 2 * HOUR), step=HOUR)
        drawn = {at: amount for _, points in shown(engine, "finops", "GPU-hours by day", "D") for at, amount in points}
        assert drawn == pytest.approx({TODAY - DAY: 3900 / HOUR, TODAY: 600 / HOUR})
        (row,) = shown(engine, "finops", "By namespace", "D")
        assert row[1] == pytest.approx(4500 / HOUR)


def test_victoria_metrics_returns_the_same_values(recorded: Engine, fleet_victoria: FleetServer) -> None:
    other = replace(recorded, url=fleet_victoria.url)
    compared = 0
    for panel in panels(BOARDS["finops"]):
        for target in panel["targets"]:
            if target.get("instant"):
                here, there = (
                    {
                        tuple(sorted(labels.items())): amount
                        for labels, amount in engine.series(BOARDS["finops"], panel, target)
                    }
                    for engine in (recorded, other)
                )
                assert there == pytest.approx(here, rel=1e-6), panel["title"]
                compared += len(here)
    assert compared > 100
    for name in ("fleet", "oncall"):
        for panel in panels(BOARDS[name]):
            for target in panel["targets"]:
                other.series(BOARDS[name], panel, target)  # the query is valid

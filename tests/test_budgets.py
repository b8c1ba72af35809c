import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_support import quiet_fleet
from store_support import Known

from exporter.cost.budgets import Budget, BudgetState, load, parse, standings
from exporter.cost.dimensions import LineKey
from exporter.cost.ledger import Chunk, Figures
from exporter.cost.store import day_window
from exporter.cost.window import DAY_SECONDS, period_at
from exporter.errors import ConfigError
from exporter.model.ledger import ByState
from exporter.service.fleet import Fleet

ONE = """\
budgets:
  - name: research
    amount: 120000
    currency: USD
    period: month
    owner: {team: research, cluster: east}
    thresholds: [100%, 0.5]
  - name: platform
    amount: 1e6
    currency: EUR
    period: quarter
    include_unallocated: true
"""


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


NOW = at("2026-10-11T06:30")


def test_budgets_file_is_read() -> None:
    research, platform = parse(ONE, "b.yaml")
    assert research == Budget(
        name="research",
        amount=120_000,
        currency="USD",
        period="month",
        owner={"team": "research", "cluster": "east"},
        thresholds=(0.5, 1.0),
    )
    assert (platform.owner, platform.include_unallocated, platform.thresholds) == ({}, True, (0.5, 0.8, 1.0))


def test_budget_owner_can_be_a_label() -> None:
    text = "budgets: [{name: a, amount: 5, currency: USD, period: week, owner: {'label:example.com/centre': '42'}}]"
    assert parse(text, "b.yaml")[0].owner == {"label:example.com/centre": "42"}


def test_documented_example_is_valid() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "cost.md").read_text()
    research, everything = parse("budgets:" + text.split("```yaml\nbudgets:")[1].split("```")[0], "docs/cost.md")
    assert research.thresholds == everything.thresholds
    assert everything.include_unallocated


def test_all_errors_are_reported_with_line_key_and_allowed_values() -> None:
    text = """\
budgets:
  - name: a
    amount: -5
    currency: usd
    period: moth
  - name: b
    amount: 5
    currency: USD
    period: month
    owner: {tema: x, team: "", "label:": y}
    thresholds: [0.5, twelve, 20]
  - name: c
    amount: 5
    currency: USD
    period: week
    owner: {team: x}
    include_unallocated: true
  - {name: d, amount: 5, currency: USD, period: week, limit: 3}
  - {name: d, amount: 5, currency: USD, period: week}
  - {name: d, amount: 6, currency: USD, period: year}
  - just text
budgts: []
"""
    with pytest.raises(ConfigError) as caught:
        parse(text, "b.yaml")
    parts = "allowed: a list of 1 to 20 parts of the amount, such as 0.8 or 80%, at most 10"
    keys = "amount, currency, include_unallocated, name, owner, period, thresholds"
    nobody = "GPUs without an owner belong to no namespace, team or label; allowed: for all, or for a cluster"
    label = "names no label; allowed: label:KEY, a key of the agents' --cost-labels, as label:project"
    currency = "'usd' is not known; did you mean 'USD'? Allowed: an ISO 4217 code such as USD or EUR"
    assert caught.value.problems == (
        "b.yaml:3: budget 1: amount: '-5' is not a number in range; allowed: an amount of money, 0.01 or more",
        f"b.yaml:4: budget 1: currency: {currency}",
        "b.yaml:5: budget 1: period: 'moth' is not known; did you mean 'month'? Allowed: week, month, quarter, year",
        f"b.yaml:10: budget 2: owner: label:: {label}",
        "b.yaml:10: budget 2: owner: team: empty, nested or not printable; allowed: one name, as reports show it",
        "b.yaml:10: budget 2: owner: tema: unknown key; did you mean 'team'?",
        f"b.yaml:11: budget 2: thresholds: 'twelve' is not a threshold; {parts}",
        f"b.yaml:11: budget 2: thresholds: '20' is not a threshold; {parts}",
        f"b.yaml:17: budget 3: include_unallocated: {nobody}",
        f"b.yaml:18: budget 4: limit: unknown key; allowed: {keys}",
        "b.yaml:19: budget 5: name: 'd' is given twice, first in line 18; rename one",
        "b.yaml:20: budget 6: name: 'd' is given twice, first in line 18; rename one",
        "b.yaml:21: budget 7: not a mapping; allowed: keys with values",
        "b.yaml:22: budgts: unknown key; did you mean 'budgets'?",
    )


def test_duplicate_name_on_one_line_is_an_error() -> None:
    budget = "{name: a, amount: 5, currency: USD, period: week}"
    with pytest.raises(ConfigError) as caught:
        parse(f"budgets: [{budget}, {budget}]", "b.yaml")
    assert caught.value.problems == ("b.yaml:1: budget 2: name: 'a' is given twice, first in line 1; rename one",)


@pytest.mark.parametrize("text", ["", "[]", "budgets:", "budgets: 3", "budgets: []", "budgets: [\n", "a: *b"])
def test_invalid_budgets_file_is_reported_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"b\.yaml:1|b\.yaml:2|not YAML"):
        parse(text, "b.yaml")


def test_unreadable_budgets_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "b.yaml")
    (tmp_path / "b.yaml").write_text(ONE)
    assert len(load(tmp_path / "b.yaml")) == 2


@pytest.mark.parametrize(
    ("period", "start", "end", "label"),
    [
        ("week", "2026-10-05", "2026-10-12", "2026-W41"),
        ("month", "2026-10-01", "2026-11-01", "2026-10"),
        ("quarter", "2026-10-01", "2027-01-01", "2026-Q4"),
        ("year", "2026-01-01", "2027-01-01", "2026"),
    ],
)
def test_periods_are_calendar_periods_in_utc(period: str, start: str, end: str, label: str) -> None:
    found = period_at(period, NOW)  # type: ignore[arg-type]
    assert (found.start_seconds, found.end_seconds, found.label) == (at(start), at(end), label)


@given(st.floats(at("2001-01-01"), at("2150-01-01")), st.sampled_from(("week", "month", "quarter", "year")))
def test_period_contains_the_given_time_and_borders_the_next_period(now: float, period: str) -> None:
    found = period_at(period, now)  # type: ignore[arg-type]
    assert found.start_seconds <= now < found.end_seconds
    assert period_at(period, found.end_seconds).start_seconds == found.end_seconds  # type: ignore[arg-type]
    assert period_at(period, found.end_seconds - 1).start_seconds == found.start_seconds  # type: ignore[arg-type]


def line(cost: float, currency: str = "USD", unpriced: float = 0.0) -> Figures:
    return Figures(
        seconds=ByState(unprofiled=3600.0),
        unpriced_seconds=unpriced,
        money={currency: ByState(unprofiled=cost)} if cost else {},
    )


def october(days: int = 60, *, hours: int = 24, currency: str = "USD") -> Known:
    """Return days until the 11th, 06:00: team red 100 a day in namespace a of cluster east, blue 10, Unallocated 7."""
    today = int(at("2026-10-11"))
    known = {}
    for back in range(days + 1):
        start = today - back * DAY_SECONDS
        part = 0.25 if back == 0 else 1.0  # the elapsed part of the last day
        lines = {
            LineKey(cluster="east", namespace="a", team="red", labels="project=llm", kind="Job", workload="w"): line(
                100 * part, currency
            ),
            LineKey(cluster="west", namespace="b", team="blue", kind="Job", workload="v"): line(10 * part, currency),
            LineKey(cluster="east", kind="Unallocated"): line(7 * part, currency),
        }
        recorded = 6 if back == 0 else hours
        known[start] = Chunk(
            window=day_window(start),
            lines=lines,
            capacity_seconds={"east": 7200.0, "west": 3600.0},
            recorded_hours={"east": recorded, "west": recorded},
        )
    return Known(known)


def budget(**owner: str) -> Budget:
    return Budget(name="b", amount=2000.0, currency="USD", period="month", owner=owner)  # type: ignore[arg-type]


def stand(source: Known, *budgets: Budget) -> tuple[BudgetState, ...]:
    return asyncio.run(standings(budgets, source, NOW))


def test_budget_counts_the_cost_of_its_owner_in_the_period() -> None:
    source = october()
    everything = Budget(name="all", amount=1e5, currency="USD", period="month", include_unallocated=True)
    week = Budget(name="w", amount=650.0, currency="USD", period="week", owner={"cluster": "east"})
    red, blue, project, held, whole, of_week = stand(
        source,
        budget(team="red"),
        budget(team="blue", cluster="west"),
        budget(**{"label:project": "llm"}),
        budget(),
        everything,
        week,
    )
    assert red.spent == pytest.approx(10.25 * 100)
    assert red.projected == pytest.approx(31 * 100, rel=1e-3)
    assert (red.passed, red.notes, red.known) == ((0.5,), (), True)
    assert blue.spent == pytest.approx(10.25 * 10)
    assert project.spent == red.spent
    assert held.spent == pytest.approx(10.25 * 110)
    assert whole.spent == pytest.approx(10.25 * 117)
    assert of_week.spent == pytest.approx(6.25 * 100)
    assert of_week.passed == (0.5, 0.8)
    assert of_week.as_of_seconds == at("2026-10-11T06:00")
    assert len(source.asked) == 1, "one reading for all budgets"


def test_empty_budget_list_queries_nothing() -> None:
    source = october()
    assert stand(source) == ()
    assert source.asked == []


def test_cost_in_another_currency_is_reported_and_not_counted_as_0() -> None:
    (state,) = stand(october(currency="EUR"), budget(team="red"))
    assert (state.known, state.projected, state.passed) == (False, None, ())
    assert state.notes == (
        "1025.00 EUR of the period are not in it: give the budget in EUR, or the price book in USD.",
    )


def test_unreadable_day_is_reported_and_prevents_a_projection() -> None:
    source = october()
    source.failing = {int(at("2026-10-04"))}
    (state,) = stand(source, budget(team="red"))
    assert not state.known
    assert state.projected is None
    assert state.notes == ("1 queries about the period failed, first: no answer in 60 s; try again.",)
    (week,) = stand(source, Budget(name="w", amount=1.0, currency="USD", period="week"))
    assert week.known, "the day is before the week"


@pytest.mark.parametrize(
    "series",
    [
        'workload:gpu_ledger:delta1h{quantity="energy_joules"}',
        "capacity",
        "gpu_exporter_simulated",
        "gpu_node_info",
    ],
)
def test_failed_query_that_does_not_affect_cost_keeps_the_budget_known(series: str) -> None:
    source = october()
    source.failing, source.unanswered = {int(at("2026-10-04"))}, series
    (state,) = stand(source, budget(team="red"))
    assert (state.known, state.unread) == (True, "")


async def looks_of(source: Known, *seconds: float) -> tuple[Fleet, list[int], float]:
    """Run rounds at these times, all with the same newest hour.

    Returns:
        The fleet; the number of budget readings in each round; the pause after the last round.
    """

    async def newest(_now: float) -> float:
        return NOW // 3600 * 3600

    async def advice(_now: float) -> tuple[()]:
        return ()

    async def labels(_now: float) -> dict[str, tuple[str, ...]]:
        return {}

    fleet = quiet_fleet(NOW, source=source)
    fleet.newest.read, fleet.recommendations.read, fleet.labels.read = newest, advice, labels
    fleet.wanted = [budget(team="red")]
    counted, pause = [], 0.0
    for second in seconds:
        pause = await fleet.look(NOW + second)
        counted.append(sum(window.label == "budgets" for window in source.asked))
    return fleet, counted, pause


async def test_budget_with_a_failed_query_is_retried_with_growing_delay() -> None:
    source = october()
    source.failing = {int(at("2026-10-04"))}
    fleet, counted, pause = await looks_of(source, 0, 30, 60, 120, 180, 400, 420, 890)
    assert counted == [1, 1, 2, 2, 3, 3, 4, 4]
    assert pause == 480
    assert fleet.last_read_seconds is None
    assert "1 of 1 budgets could not be counted: no answer in 60 s" in (fleet.freshness().problem or "")
    source.failing = set()
    assert await fleet.look(NOW + 900) == 3600
    assert fleet.last_read_seconds == NOW + 900
    assert "budgets" not in (fleet.freshness().problem or "")


async def test_permanent_query_failure_is_not_retried_before_the_next_hour() -> None:
    source = october()
    source.failing, source.may_pass = {int(at("2026-10-04"))}, False
    fleet, counted, _ = await looks_of(source, 0, 300, 3000)
    assert counted == [1, 1, 1]
    assert fleet.last_read_seconds == NOW + 3000


def test_unrecorded_hours_are_reported() -> None:
    (state,) = stand(october(hours=20), budget(team="red"))
    assert state.notes == ("40 of the period's 246 hours were not recorded, and are not in it.",)
    assert state.projected is None, "no complete day is known"


def test_unrecorded_cluster_and_unknown_owner_are_reported() -> None:
    nowhere, unknown = stand(october(), budget(cluster="esat"), budget(team="rde"))
    assert (nowhere.known, nowhere.projected, nowhere.passed) == (False, None, ())
    assert nowhere.notes == ("246 of the period's 246 hours were not recorded for cluster 'esat', and are not in it.",)
    assert (unknown.known, unknown.spent) == (True, 0)
    assert unknown.notes == ("No line of the period is of this budget's owner: check the spelling against a report.",)


def test_unpriced_use_is_counted() -> None:
    source = october()
    day = source.days[int(at("2026-10-05"))]
    key = LineKey(cluster="east", namespace="a", team="red", kind="Job", workload="x")
    source.days[day.window.start_seconds] = Chunk(
        window=day.window,
        lines={**day.lines, key: line(0.0, unpriced=1800.0)},
        capacity_seconds=day.capacity_seconds,
        recorded_hours=day.recorded_hours,
    )
    (state,) = stand(source, budget(team="red"))
    assert state.unpriced_seconds == 1800.0

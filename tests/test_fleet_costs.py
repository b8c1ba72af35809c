"""The report of a fleet: every line in its place, nothing lost, and its coverage."""

from dataclasses import replace
from typing import get_args

import pytest
from fleet_support import A100, H100, START, day, hours, ledger, ledgers, nobody, owner, small_ledger
from hypothesis import given
from hypothesis import strategies as st

from exporter.cost.dimensions import UNALLOCATED, UNATTRIBUTED, Dimension, Filters, LineKey
from exporter.cost.ledger import Failure, FleetLedger
from exporter.cost.report import FleetReport, Question, ShareIdle, close, divide, make_report
from exporter.cost.window import DAY_SECONDS, Window

LATER = START + 40 * DAY_SECONDS
DIMENSIONS: tuple[Dimension, ...] = LineKey._fields


def reported(
    ledger: FleetLedger,
    *by: Dimension,
    share_idle: ShareIdle = "none",
    share_unallocated: bool = False,
    **wanted: str,
) -> FleetReport:
    filters = Filters(wanted={name: frozenset(values.split(",")) for name, values in wanted.items()})  # type: ignore[misc]
    question = Question(by=by, filters=filters, share_idle=share_idle, share_unallocated=share_unallocated)
    return make_report(ledger, question)


def usd(report: FleetReport) -> list[float]:
    return [line.figures.money["USD"].total for line in report.held]


def test_lines_are_grouped_by_dimension_and_sorted_by_cost() -> None:
    report = reported(small_ledger(), "namespace")
    assert [(line.key.namespace, line.key.kind) for line in report.held] == [("vision", ""), ("lab", ""), ("batch", "")]
    vision = report.held[0].figures
    assert vision.money["USD"].total == pytest.approx(1344 + 84 + 672)
    assert vision.money["USD"].idle == pytest.approx((1344 + 672) / 10 + 84)
    assert vision.seconds.total == pytest.approx(300 * 3600)
    assert vision.energy_joules == pytest.approx(165.75 * 3.6e6)
    assert report.held[2].figures.energy_joules is None


def test_unattributed_and_unallocated_are_separate_lines() -> None:
    report = reported(small_ledger(), "team", "model")
    assert [(line.key.kind, line.key.model) for line in report.apart] == [
        (UNATTRIBUTED, H100),
        (UNALLOCATED, H100),
        (UNALLOCATED, A100),
    ]
    assert report.total.seconds.total == pytest.approx((192 + 12 + 24 + 24 + 4 + 2 + 10 + 24 + 96 + 24 + 96) * 3600)


def test_labels_are_dimensions_and_unlabelled_lines_are_one_line() -> None:
    labelled = ledger(
        {
            owner("ml", "a", labels="environment=dev,project=llm"): hours(active=10, usd=10.0),
            owner("ml", "a", labels="environment=prod,project=llm"): hours(active=20, usd=20.0),
            owner("ml", "b", labels="project=__other__"): hours(active=31, usd=31.0),
            owner("ml", "c"): hours(active=40, usd=40.0),
            nobody(UNALLOCATED): hours(idle=50, usd=50.0),
        }
    )
    labelled = replace(labelled, label_keys=frozenset({"environment", "project"}))
    report = reported(labelled, "label:project", "namespace")
    lines = [(line.key.namespace, line.key.labels, line.figures.money["USD"].total) for line in report.held]
    assert lines == [("ml", "", 40), ("ml", "project=__other__", 31), ("ml", "project=llm", 30)]
    assert [line.key for line in report.apart] == [LineKey(kind=UNALLOCATED)]
    assert ["__other__" in note for note in report.trust.notes] == [True]
    by_label = replace(labelled, dimensions=labelled.dimensions | {"label:project"})
    none = reported(by_label, "workload", **{"label:project": ""})
    assert [line.key.workload for line in none.held] == ["c"]
    assert none.apart == ()
    (note,) = reported(labelled, "label:projekt").trust.notes
    assert note == "no line has the label projekt; labels of this period: environment, project"


def test_workload_lines_have_namespace_and_kind() -> None:
    lines = {owner("a", "train"): hours(active=1), owner("b", "train"): hours(active=2)}
    report = reported(ledger({**lines, owner("b", "train", kind="Pod"): hours(active=3)}), "workload")
    assert [tuple(line.key)[3:6] for line in report.held] == [
        ("b", "Pod", "train"),
        ("b", "Job", "train"),
        ("a", "Job", "train"),
    ]


def test_workload_kind_named_unallocated_belongs_to_its_owner() -> None:
    report = reported(ledger({owner("a", "trick", kind=UNALLOCATED): hours(active=1)}), "namespace")
    assert [line.key.namespace for line in report.held] == ["a"]
    assert report.apart == ()


def test_filtered_report_checks_capacity_but_reports_no_missing_seconds() -> None:
    report = reported(small_ledger(), "workload", namespace="lab,nowhere")
    assert {line.key.namespace for line in report.held} == {"lab"}
    assert report.apart == ()
    assert report.trust.missing_seconds == 0
    assert report.trust.capacity_seconds == pytest.approx(508 * 3600)


def test_empty_team_filter_excludes_unallocated_lines() -> None:
    report = reported(small_ledger(), "namespace", "team", team="")
    assert [(line.key.namespace, line.key.kind) for line in report.held] == [("batch", ""), ("lab", "")]
    assert report.apart == ()


def test_cluster_filter_compares_with_the_capacity_of_that_cluster() -> None:
    two = ledger({owner("a", "x", cluster="east"): hours(active=1), nobody(UNALLOCATED, cluster="west"): hours(idle=9)})
    report = reported(two, "namespace", cluster="east")
    assert (report.trust.capacity_seconds, report.trust.missing_seconds) == (3600, 0)
    assert (report.trust.recorded_hours, report.trust.expected_hours) == (24, 24)
    assert report.apart == ()


def test_filter_without_matches_adds_a_note() -> None:
    (note,) = [note for note in reported(small_ledger(), "team", team="nope").trust.notes if "nothing" in note]
    assert note.startswith("nothing matches team nope")


def test_seconds_without_a_line_are_reported_but_rounding_is_not() -> None:
    line = {owner("a", "x"): hours(active=24)}
    whole = 24 * 3600.0
    assert reported(ledger(line, capacity={"": whole * (1 + 1e-12)}), "team").trust.missing_seconds == 0
    lacking = reported(ledger(line, capacity={"": whole + 10}), "team").trust
    assert lacking.missing_seconds == pytest.approx(10)
    assert not lacking.whole
    assert reported(ledger(line, capacity={"": whole - 10}), "team").trust.missing_seconds == pytest.approx(-10)


def test_unread_chunk_is_a_failure_and_not_missing_seconds() -> None:
    first, second = {owner("a", "x"): hours(active=24)}, {}
    failed = Failure(window=day(1), what='workload:gpu_ledger:delta1h{quantity="cost"}', reason="timed out")
    read = ledger(first, second, capacity={"": 24 * 3600.0}, failures=(failed,))
    trust = reported(read, "team").trust
    assert (trust.missing_seconds, trust.capacity_seconds) == (0, 24 * 3600)
    assert trust.failures == (failed,)
    assert not trust.whole


def test_failure_without_missing_seconds_keeps_the_conservation_check() -> None:
    failed = Failure(window=day(0), what='workload:gpu_ledger:delta1h{quantity="energy_joules"}', reason="timed out")
    trust = reported(ledger({owner("a", "x"): hours(active=24)}, failures=(failed,)), "team").trust
    assert trust.capacity_seconds == 24 * 3600


def test_coverage_counts_the_hours_of_every_cluster() -> None:
    two = ledger({owner("a", "x", cluster=name): hours(active=1) for name in ("east", "west")})
    chunk = replace(two.chunks[0], recorded_hours={"east": 5, "west": 3})
    window = Window(start_seconds=START, end_seconds=START + 5 * 3600)
    trust = make_report(
        replace(two, window=window, chunks=(replace(chunk, window=window),)), Question(by=("team",))
    ).trust
    assert (trust.recorded_hours, trust.expected_hours) == (8, 10)
    assert trust.period_coverage_ratio == pytest.approx(0.8)


def test_new_cluster_is_not_expected_to_have_earlier_hours() -> None:
    old, new = owner("a", "x", cluster="old"), owner("a", "x", cluster="new")
    days = [
        replace(ledger({old: hours(active=1)}).chunks[0], recorded_hours=recorded, window=day)
        for day, recorded in zip(
            (Window(start_seconds=at, end_seconds=at + DAY_SECONDS) for at in range(START, LATER, DAY_SECONDS)),
            [{}, {"old": 24}, {"old": 24, "new": 10}],
            strict=False,
        )
    ]
    window = Window(start_seconds=START, end_seconds=START + 3 * DAY_SECONDS)
    two = replace(ledger({new: hours(active=1)}), window=window, chunks=tuple(days))
    trust = make_report(two, Question(by=("team",))).trust
    assert (trust.recorded_hours, trust.expected_hours) == (58, 72 + 24)


def test_activity_coverage_is_of_allocated_and_price_coverage_of_all_seconds() -> None:
    lines = {
        owner("a", "x"): hours(active=6, unknown=2, usd=1),
        nobody(UNALLOCATED): hours(unknown=8, unpriced=8),
    }
    trust = reported(ledger(lines), "team").trust
    assert trust.activity_coverage_ratio == pytest.approx(0.75)
    assert trust.price_coverage_ratio == pytest.approx(0.5)


def test_empty_ledger_has_no_coverage() -> None:
    trust = reported(ledger({}), "team").trust
    assert (trust.activity_coverage_ratio, trust.price_coverage_ratio) == (None, None)


def test_series_has_every_chunk_and_sums_to_its_line() -> None:
    report = make_report(small_ledger(), Question(by=("namespace",), with_series=True))
    assert report.periods == (day(0), day(1))
    for line in (*report.held, *report.apart):
        assert len(line.series) == 2
        assert sum(one.seconds.total for one in line.series) == pytest.approx(line.figures.seconds.total)
    assert report.held[2].series[1].seconds.total == 0


@given(
    any_ledger=ledgers(),
    by=st.lists(st.sampled_from(DIMENSIONS), min_size=1, unique=True),
    share_idle=st.sampled_from(get_args(ShareIdle)),
    also_unattributed=st.booleans(),
    with_series=st.booleans(),
)
def test_grouping_and_sharing_preserve_the_total(
    *, any_ledger: FleetLedger, by: list[Dimension], share_idle: ShareIdle, also_unattributed: bool, with_series: bool
) -> None:
    question = Question(
        by=tuple(by), share_idle=share_idle, share_unallocated=also_unattributed, with_series=with_series
    )
    report = make_report(any_ledger, question)
    lines = (*report.held, *report.apart)
    of_ledger = [figures for chunk in any_ledger.chunks for figures in chunk.lines.values()]
    assert report.trust.missing_seconds == 0
    seconds = sum(line.figures.seconds.total for line in lines)
    assert seconds == pytest.approx(sum(one.seconds.total for one in of_ledger))
    assert len({line.key for line in lines}) == len(lines)
    for currency in report.currencies:
        money = sum(one.money[currency].total for one in of_ledger if currency in one.money)
        assert report.total.money[currency].total == pytest.approx(money)
        shared = [line.shared.get(currency, 0.0) for line in lines]
        assert sum(shared) == pytest.approx(0, abs=1e-6)
        assert all(amount >= 0 and round(amount, 2) == amount for amount in shared[: len(report.held)])
        if share_idle != "none":
            amounts = [line.charged[currency] for line in lines if currency in line.charged]
            assert sum(amounts) == pytest.approx(round(money, 2), abs=0.011)
            assert all(amount >= 0 for amount in amounts)


def test_idle_cost_of_an_owner_is_never_distributed() -> None:
    report = reported(ledger({owner("a", "x"): hours(idle=9, usd=90)}), "namespace", share_idle="weighted")
    assert report.held[0].shared == {}


def shared_of(report: FleetReport) -> dict[str, float]:
    return {line.key.namespace: line.shared.get("USD", 0.0) for line in report.held}


THREE = {
    owner("a", "x"): hours(active=6, usd=60),
    owner("b", "x"): hours(active=3, usd=30),
    owner("c", "x"): hours(active=1, usd=10),
    nobody(UNATTRIBUTED): hours(unknown=1, usd=7),
    nobody(UNALLOCATED): hours(idle=1, usd=10),
}


def test_unallocated_cost_is_distributed_by_the_cost_of_owners() -> None:
    report = reported(ledger(THREE), "namespace", share_idle="weighted")
    assert shared_of(report) == {"a": 6, "b": 3, "c": 1}
    assert [line.shared for line in report.apart] == [{}, {"USD": -10}]


def test_unallocated_cost_is_distributed_evenly_to_the_cent() -> None:
    assert shared_of(reported(ledger(THREE), "namespace", share_idle="even")) == {"a": 3.34, "b": 3.33, "c": 3.33}


@pytest.mark.parametrize(
    ("share_idle", "shared"), [("weighted", [0.57, 0.43, 0.0]), ("even", [0.34, 0.33, 0.33])], ids=["weighted", "even"]
)
def test_odd_cent_goes_to_the_largest_remainder_else_to_the_most_expensive_owner(
    share_idle: ShareIdle, shared: list[float]
) -> None:
    owners = {owner("a", "x"): hours(active=1, usd=4.0), owner("b", "x"): hours(active=1, usd=3.0)}
    free = {owner("c", "x"): hours(active=1, usd=0.0), nobody(UNALLOCATED): hours(idle=1, usd=1.0)}
    report = reported(ledger(owners | free), "namespace", share_idle=share_idle)
    assert [line.shared.get("USD", 0.0) for line in report.held] == shared
    assert [line.charged["USD"] for line in report.held] == [4 + shared[0], 3 + shared[1], shared[2]]


def test_unattributed_cost_is_distributed_on_request() -> None:
    report = reported(ledger(THREE), "namespace", share_idle="weighted", share_unallocated=True)
    assert shared_of(report) == {"a": 10.2, "b": 5.1, "c": 1.7}
    assert [line.shared for line in report.apart] == [{"USD": -7}, {"USD": -10}]


def test_owners_without_the_currency_are_charged_by_their_hours() -> None:
    lines = {
        owner("a", "x"): hours(active=3, eur=1),
        owner("b", "x"): hours(active=1, eur=9),
        nobody(UNALLOCATED): hours(idle=1, usd=4),
    }
    assert shared_of(reported(ledger(lines), "namespace", share_idle="weighted")) == {"a": 3, "b": 1}


def placed(report: FleetReport) -> dict[LineKey, float]:
    return {line.key: line.shared["USD"] for line in report.held if line.shared}


def test_unallocated_cost_of_a_pool_is_charged_to_its_owners() -> None:
    lines = {
        owner("a", "x", pool="big"): hours(active=1, usd=10),
        owner("b", "x", pool="small"): hours(active=1, usd=10),
        nobody(UNALLOCATED, pool="big"): hours(idle=1, usd=8),
    }
    report = reported(ledger(lines), "namespace", "pool", share_idle="even")
    assert placed(report) == {LineKey(namespace="a", pool="big"): 8}


def test_pool_without_owners_is_charged_to_its_cluster_only() -> None:
    lines = {
        owner("a", "x", cluster="east", pool="big"): hours(active=1, usd=10),
        nobody(UNALLOCATED, cluster="east", pool="empty"): hours(idle=1, usd=5),
        nobody(UNALLOCATED, cluster="west", pool="big"): hours(idle=1, usd=7),
    }
    report = reported(ledger(lines), "cluster", "pool", "namespace", share_idle="even")
    assert placed(report) == {LineKey(cluster="east", namespace="a", pool="big"): 5}
    west = [line for line in report.apart if line.key.cluster == "west"]
    assert [line.shared for line in west] == [{}]


def test_unallocated_cost_without_owners_is_kept() -> None:
    report = reported(ledger({nobody(UNALLOCATED): hours(idle=1, usd=5)}), "namespace", share_idle="weighted")
    assert report.apart[0].shared == {}
    assert report.apart[0].charged == {"USD": 5.0}


@given(st.integers(0, 10**12), st.lists(st.floats(0, 1e9), min_size=1).filter(any))
def test_parts_sum_to_the_whole_and_zero_weight_gets_nothing(whole: int, weights: list[float]) -> None:
    parts = divide(whole, weights)
    assert sum(parts) == whole
    for part, weight in zip(parts, weights, strict=True):
        assert part >= 0
        assert part == pytest.approx(whole * weight / sum(weights), abs=2)


@given(st.lists(st.floats(0.01, 1e6), min_size=1))
def test_bill_sums_to_the_cent_and_every_line_is_within_one_cent(amounts: list[float]) -> None:
    closed = close(amounts)
    assert sum(closed) == pytest.approx(round(sum(amounts) * 100) / 100, abs=1e-6)
    assert closed == pytest.approx(amounts, abs=0.0101)


def test_remainder_of_a_distributed_line_is_rounded_to_zero() -> None:
    assert close([10.004, 0.0046, -0.0041]) == [10.0, 0.0, 0.0]
    assert close([0.004] * 100) == [0.01] * 40 + [0.0] * 60


def test_cent_of_amounts_below_half_a_cent_goes_to_the_largest() -> None:
    assert close([0.0, 0.004, 0.004]) == [0.0, 0.01, 0.0]
    assert close([0.001, 0.004, 0.0045]) == [0.0, 0.0, 0.01]

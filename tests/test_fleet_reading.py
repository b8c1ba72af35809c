"""The fleet's ledger from real servers over a backfilled fleet: it is the truth, or it reports the missing parts."""

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from fleet_support import FaultyProxy, FleetServer, backfill, backfilled, failure, prometheus, serving, truth_between

from exporter.cli import main
from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost import queries
from exporter.cost.asking import blocks
from exporter.cost.dimensions import EVERYTHING, Dimension, Filters, LineKey
from exporter.cost.fleet_reading import PrometheusLedger, missing_hours
from exporter.cost.ledger import Figures, FleetLedger, Progress, unseen
from exporter.cost.live import live_pods
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.window import CHECKPOINT_SECONDS, DAY_SECONDS, Window, chunks
from exporter.errors import PrometheusError
from exporter.model.ledger import Totals
from gpu_simulator.fleet import FleetTruth
from gpu_simulator.fleet_plan import FleetPlan

DIMENSIONS: tuple[Dimension, ...] = tuple(name for name in LineKey._fields if name != "pool")
ENGINES = pytest.mark.parametrize("engine", ["fleet_prometheus", "fleet_victoria"])
DAY = 1_789_862_400
"""2026-09-20, the last whole day of the small fleet."""
COST = queries.COST.series("workload")


async def read(
    url: str,
    window: Window,
    *dimensions: Dimension,
    filters: Filters = EVERYTHING,
    by_day: bool = True,
    progress: Progress = unseen,
    **settings: object,
) -> FleetLedger:
    """Read with a new client, which never waits between attempts."""

    async def sleep(_: float) -> None:
        return None

    made = PrometheusSettings(url=url, **settings)  # type: ignore[arg-type]
    async with PrometheusClient(made, sleep=sleep) as client:
        return await PrometheusLedger(client, by_day=by_day).ledger(window, frozenset(dimensions), filters, progress)


def whole(plan: FleetPlan) -> Window:
    return Window(start_seconds=plan.start_seconds, end_seconds=plan.end_seconds)


def day(count: int = 1) -> Window:
    return Window(start_seconds=DAY - (count - 1) * DAY_SECONDS, end_seconds=DAY + DAY_SECONDS)


def totals(figures: Figures) -> Totals:
    return Totals(
        seconds=figures.seconds,
        unpriced_seconds=figures.unpriced_seconds,
        energy_joules=figures.energy_joules or 0.0,
        money=figures.money,
    )


def summed(ledger: FleetLedger, *fields: str) -> dict[tuple[str, ...], Totals]:
    """Sum the lines of all chunks by some of their fields."""
    found: dict[tuple[str, ...], Totals] = {}
    for chunk in ledger.chunks:
        for key, figures in chunk.lines.items():
            place = tuple(getattr(key, field) for field in fields)
            found[place] = found[place] + totals(figures) if place in found else totals(figures)
    return found


def numbers(total: Totals) -> dict[str, float]:
    """Return every number of a total that is not 0."""
    money = {f"{currency} {name}": amount for currency, one in total.money.items() for name, amount in one}
    plain = {"unpriced": total.unpriced_seconds, "energy": total.energy_joules}
    return {name: value for name, value in {**dict(total.seconds), **plain, **money}.items() if value}


def assert_same(found: dict[tuple[str, ...], Totals], true: dict[tuple[str, ...], Totals]) -> None:
    true = {key: total for key, total in true.items() if numbers(total)}
    assert found.keys() == true.keys()
    for key, total in true.items():
        assert numbers(found[key]) == pytest.approx(numbers(total), rel=1e-9, abs=1e-6), key


def with_owners_summed(truth: FleetTruth, *names: str) -> dict[tuple[str, ...], Totals]:
    """Return the truth by some fields, with the kinds of known owners added up."""
    found: dict[tuple[str, ...], Totals] = {}
    for (kind, *rest), total in truth.total("kind", *names).items():
        place = (kind if kind in {"Unallocated", "Unattributed"} else "", *rest)
        found[place] = found[place] + total if place in found else total
    return found


@ENGINES
async def test_every_line_of_every_day_matches_the_truth(
    engine: str, fleet_truth: FleetTruth, request: pytest.FixtureRequest
) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    ledger = await read(server.url, whole(server.plan), *DIMENSIONS)
    assert not ledger.failures
    assert ledger.simulated
    for chunk in ledger.chunks:
        start = chunk.window.start_seconds // DAY_SECONDS * DAY_SECONDS
        found = {tuple(getattr(key, name) for name in DIMENSIONS): totals(line) for key, line in chunk.lines.items()}
        assert_same(found, {tuple(key): total for key, total in fleet_truth.days[start].items()})
        assert chunk.recorded_hours == fleet_truth.recorded_hours[start]
        assert sum(chunk.capacity_seconds.values()) == pytest.approx(
            sum(line.seconds.total for line in fleet_truth.days[start].values()), rel=1e-9
        )
    assert [note for note in ledger.notes if "not recorded" in note] == [
        f"cluster {name}: 3 hours were not recorded: 2026-08-25 (2), 2026-08-26 (1)" for name in ("alpha", "beta")
    ]


@ENGINES
@pytest.mark.parametrize("by_day", [True, False])
@pytest.mark.parametrize(
    ("dimensions", "names"),
    [((), ()), (("namespace",), ("namespace",)), (("team", "cluster"), ("team", "cluster")), (("mode",), ("mode",))],
)
async def test_sums_by_a_few_dimensions_match_the_truth(
    engine: str,
    by_day: bool,  # noqa: FBT001 - a parameter
    dimensions: tuple[Dimension, ...],
    names: tuple[str, ...],
    fleet_truth: FleetTruth,
    request: pytest.FixtureRequest,
) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    ledger = await read(server.url, whole(server.plan), *dimensions, by_day=by_day)
    assert_same(summed(ledger, "kind", *names), with_owners_summed(fleet_truth, *names))
    assert len(ledger.chunks) == (41 if by_day else 2)
    gaps = "2026-08-25 (2), 2026-08-26 (1)" if by_day else "within 2026-08-12 to 2026-09-12 (3)"
    for cluster in ("alpha", "beta"):
        assert f"cluster {cluster}: 3 hours were not recorded: {gaps}" in ledger.notes
    assert sum(sum(chunk.capacity_seconds.values()) for chunk in ledger.chunks) == pytest.approx(
        fleet_truth.capacity_seconds, rel=1e-9
    )


@ENGINES
async def test_window_within_a_day_has_exactly_its_hours(engine: str, request: pytest.FixtureRequest) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    window = Window(start_seconds=DAY + 5 * 3600, end_seconds=DAY + 8 * 3600)
    ledger = await read(server.url, window, "workload")
    true = truth_between(window.start_seconds, window.end_seconds).total("namespace", "kind", "workload")
    assert_same(summed(ledger, "namespace", "kind", "workload"), true)
    assert [dict(chunk.recorded_hours) for chunk in ledger.chunks] == [{"alpha": 3, "beta": 3}]


@ENGINES
async def test_filters_apply_to_lines_and_not_to_capacity(engine: str, request: pytest.FixtureRequest) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    true = truth_between(DAY, DAY + DAY_SECONDS)
    teams = sorted({team for (team,) in true.total("team") if team})
    wanted = Filters(wanted={"team": frozenset((teams[0], teams[-1], "no.such|team")), "cluster": frozenset(("beta",))})
    ledger = await read(server.url, day(), "team", filters=wanted)
    expected = true.total("team", cluster="beta")
    assert_same(summed(ledger, "team"), {(team,): expected[team,] for team in (teams[0], teams[-1])})
    (chunk,) = ledger.chunks
    assert sum(chunk.capacity_seconds.values()) == pytest.approx(true.capacity_seconds)


@ENGINES
async def test_nodes_are_summed_by_pool(engine: str, request: pytest.FixtureRequest) -> None:
    server: FleetServer = request.getfixturevalue(engine)
    ledger = await read(server.url, day(), "pool", "model")
    by_node = await read(server.url, day(), "cluster", "node", "model")
    sorts = {node: f"{facts.instance_type} {facts.capacity_type}".strip() for node, facts in by_node.nodes.items()}
    expected: dict[tuple[str, ...], Totals] = {}
    for (cluster, node, model), total in summed(by_node, "cluster", "node", "model").items():
        place = (sorts[cluster, node], model)
        expected[place] = expected[place] + total if place in expected else total
    assert_same(summed(ledger, "pool", "model"), expected)
    assert {"p5.48xlarge reserved", "g6e.48xlarge on-demand", ""} <= {pool for pool, _ in expected}
    assert not any(key.node or key.cluster for chunk in ledger.chunks for key in chunk.lines)
    filters = Filters(wanted={"pool": frozenset(("p5.48xlarge reserved",))})
    one = await read(server.url, day(), "model", filters=filters)
    assert_same(
        summed(one, "model"),
        {(model,): total for (pool, model), total in expected.items() if pool in filters.wanted["pool"]},
    )


async def test_fleet_behind_a_faulty_proxy_gives_the_same_ledger(
    fleet_prometheus: FleetServer, fleet_truth: FleetTruth
) -> None:
    proxy = FaultyProxy(fleet_prometheus.url, rate=0.3)
    steps: list[tuple[int, int]] = []
    async with serving(proxy) as server:
        ledger = await read(
            server.url,
            whole(fleet_prometheus.plan),
            "namespace",
            "cluster",
            timeout_seconds=2,
            retries=8,
            progress=lambda *step: steps.append(step),
        )
    assert not ledger.failures
    assert set(proxy.faults_sent) == {"", *proxy.faults}
    assert_same(summed(ledger, "kind", "namespace"), with_owners_summed(fleet_truth, "namespace"))
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1))
    assert steps[-1][0] == steps[-1][1]


async def test_day_with_an_unanswered_series_has_no_lines_and_is_reported(
    fleet_prometheus: FleetServer, fleet_truth: FleetTruth
) -> None:
    """The cost of one day has no answer: neither in a query with its neighbours, nor alone."""
    bad = DAY - 2 * DAY_SECONDS

    def is_bad(form: dict[str, str]) -> bool:
        span = re.search(r'{quantity="cost"[^}]*}\[(\d+)s\]', form.get("query", ""))
        if span is None:
            return False
        first = float(form.get("start", form.get("time", "0"))) - int(span[1]) - CHECKPOINT_SECONDS
        return first < bad + DAY_SECONDS and float(form.get("end", form.get("time", "0"))) - CHECKPOINT_SECONDS > bad

    for by_day in (True, False):
        async with serving(FaultyProxy(fleet_prometheus.url, rate=0, refuse=is_bad)) as server:
            ledger = await read(server.url, day(7), "namespace", retries=1, by_day=by_day)
        (reported,) = ledger.failures
        assert (reported.what, reported.window.start_seconds, reported.window.seconds) == (
            COST,
            bad,
            DAY_SECONDS,
        )
        assert "storage is away" in reported.reason
        for chunk in ledger.chunks:
            true = fleet_truth.days[chunk.window.start_seconds]
            metered = sum(line.seconds.total for line in true.values())
            assert sum(chunk.capacity_seconds.values()) == pytest.approx(metered)
            shown = sum(line.seconds.total for line in chunk.lines.values())
            assert shown == pytest.approx(0 if chunk.window.start_seconds == bad else metered)


async def test_always_failing_series_affects_no_other(fleet_prometheus: FleetServer) -> None:
    proxy = FaultyProxy(fleet_prometheus.url, rate=0, refuse=lambda form: 'quantity="cost"' in form.get("query", ""))
    for by_day in (True, False):
        async with serving(proxy) as server:
            ledger = await read(server.url, day(30), retries=0, by_day=by_day, concurrency=1)
        assert {failure.what for failure in ledger.failures} == {COST}
        assert all(chunk.capacity_seconds for chunk in ledger.chunks)


async def test_cost_is_read_without_energy(fleet_prometheus: FleetServer) -> None:
    async with serving(
        FaultyProxy(fleet_prometheus.url, rate=0, refuse=lambda form: "energy" in form.get("query", ""))
    ) as server:
        ledger = await read(server.url, day(2), retries=0)
    true = truth_between(DAY - DAY_SECONDS, DAY + DAY_SECONDS)
    (reported,) = ledger.failures
    assert (reported.what, reported.window) == (
        'workload:gpu_ledger:delta1h{quantity="energy_joules"}',
        replace(day(2), label=""),
    )
    assert all(line.energy_joules is None for chunk in ledger.chunks for line in chunk.lines.values())
    assert sum(total.money["USD"].total for total in summed(ledger).values()) == pytest.approx(
        true.sum().money["USD"].total
    )


async def test_capacity_is_read_independently_of_the_seconds(fleet_prometheus: FleetServer) -> None:
    refused = queries.SECONDS.series("workload")
    proxy = FaultyProxy(fleet_prometheus.url, rate=0, refuse=lambda form: refused[:-1] in form.get("query", ""))
    async with serving(proxy) as server:
        ledger = await read(server.url, day(2), retries=0)
    assert [failure.what for failure in ledger.failures] == [refused]
    true = truth_between(DAY - DAY_SECONDS, DAY + DAY_SECONDS)
    assert sum(sum(chunk.capacity_seconds.values()) for chunk in ledger.chunks) == pytest.approx(true.capacity_seconds)


async def test_server_that_goes_away_gets_fewer_than_100_queries(fleet_prometheus: FleetServer) -> None:
    proxy = FaultyProxy(fleet_prometheus.url, rate=0, refuse=lambda form: "sum_over_time" in form.get("query", ""))
    async with serving(proxy) as server:
        ledger = await read(server.url, whole(fleet_prometheus.plan), retries=1)
        asked = len(server.requests)
    assert asked < 100
    series = {measure.series("workload") for measure in queries.MEASURES}
    assert {failure.what for failure in ledger.failures} == {queries.CAPACITY, *series}
    assert not any(chunk.lines or chunk.capacity_seconds for chunk in ledger.chunks)


async def test_server_limit_leads_to_smaller_queries(
    small_fleet: FleetPlan, fleet_prometheus: FleetServer, fleet_truth: FleetTruth
) -> None:
    def is_long(form: dict[str, str]) -> bool:
        return "start" in form and "workload:" in form["query"]

    proxy = FaultyProxy(fleet_prometheus.url, rate=0)

    async def limited(request: object) -> object:
        form = {name: str(value) for name, value in (await request.post()).items()}  # type: ignore[attr-defined]
        if is_long(form):
            return failure(422, "query processing would load too many samples into memory in query execution")
        return await proxy(request)  # type: ignore[arg-type]

    async with serving(limited) as server:  # type: ignore[arg-type]
        ledger = await read(server.url, whole(small_fleet), "namespace")
    assert not ledger.failures
    assert_same(summed(ledger, "kind", "namespace"), with_owners_summed(fleet_truth, "namespace"))


def line(series: str, hours: range | list[int], value: float = 3600, late: float = 0, **labels: str) -> str:
    """Return samples of a recorded series, for hours of ``DAY``, with timestamps ``late`` seconds after the hour.

    Samples of one series must be in the order of time: later ones are dropped.
    """
    inside = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return "".join(f"{series}{{{inside}}} {value} {DAY + (hour + 1) * 3600 + late}\n" for hour in hours)


def owner(
    hours: range | list[int], value: float = 3600, late: float = 0, capacity: float | None = None, **labels: str
) -> str:
    """Return all series of an idle owner, and its cluster's capacity; 0: with another owner."""
    carried = {"quantity": "seconds", "workload_namespace": "ml", "workload_kind": "Job", "state": "idle", **labels}
    recorder = {name: text for name, text in labels.items() if name != "team"}
    whole = value if capacity is None else capacity
    return (
        line("owner:gpu_ledger:delta1h", hours, value, late, node="n", **carried)
        + line("workload:gpu_ledger:delta1h", hours, value, late, **carried)
        + (line("cluster:gpu_capacity_seconds:delta1h", hours, whole, late, **recorder) if whole else "")
    )


@pytest.fixture
def hand_written(tmp_path: Path, small_fleet: FleetPlan) -> Iterator[Callable[..., object]]:
    """Serve a few lines of text in a Prometheus."""

    def serve(text: str, *options: str) -> object:
        (tmp_path / "text.om").write_text(text + "# EOF\n")
        backfill(tmp_path / "text.om", tmp_path / "blocks")
        return prometheus(tmp_path, tmp_path / "blocks", small_fleet, *options)

    return serve  # type: ignore[return-value]


async def test_two_prometheus_replicas_count_each_hour_once(hand_written: Callable[..., object]) -> None:
    """One of them was down from 2 to 5, the other from 10 to 20; once both had a part of an hour."""
    text = owner([*range(2), *range(5, 24)], replica="a") + owner([*range(9), *range(20, 24)], replica="b")
    text += owner([9], 900, replica="b")
    with hand_written(text) as server:  # type: ignore[attr-defined]
        for by_day, dimensions in ((True, ()), (False, ("mode",))):
            ledger = await read(server.url, day(2), *dimensions, by_day=by_day)
            assert sum(total.seconds.idle for total in summed(ledger).values()) == 24 * 3600
            assert sum(sum(chunk.recorded_hours.values()) for chunk in ledger.chunks) == 24
            assert sum(sum(chunk.capacity_seconds.values()) for chunk in ledger.chunks) == 24 * 3600
            assert any("distinguished by replica" in note for note in ledger.notes)


async def test_late_hours_of_one_replica_are_not_added_to_the_other(
    hand_written: Callable[..., object],
) -> None:
    """One was down from 2 to 5 and the other from 10 to 13: its next value has those hours, which the rules carry."""
    text = owner(range(2), replica="a") + owner([5], 4 * 3600, capacity=4 * 3600 + 1200, replica="a")
    text += owner(range(6, 24), replica="a") + owner(range(2), replica="b")
    text += (
        owner(range(2, 4), capacity=4200, replica="b")
        + owner(range(4, 10), replica="b")
        + owner([13], 4 * 3600, replica="b")
        + owner(range(14, 24), replica="b")
    )
    # Ended while one replica was down.
    text += owner(range(2, 4), 600, capacity=0, team="ended", replica="b")
    text += owner([5], 1200, capacity=0, team="ended", replica="a")
    with hand_written(text) as server:  # type: ignore[attr-defined]
        for by_day in (True, False):
            ledger = await read(server.url, day(2), "team", by_day=by_day)
            found = summed(ledger, "team")
            assert {team: total.seconds.idle for (team,), total in found.items()} == {"": 24 * 3600, "ended": 1200}
            assert sum(sum(chunk.capacity_seconds.values()) for chunk in ledger.chunks) == 24 * 3600 + 1200


async def test_replicas_that_missed_consecutive_hours_count_each_once(hand_written: Callable[..., object]) -> None:
    """One missed hour 3 and the other hour 4: no replica has both, and the values of 4 and 5 have two hours."""
    text = owner(range(3), replica="a") + owner([4], 2 * 3600, capacity=2 * 3600 + 900, replica="a")
    text += owner(range(5, 24), replica="a") + owner(range(3), replica="b")
    text += (
        owner([3], capacity=3600 + 600 + 900, replica="b")
        + owner([5], 2 * 3600, replica="b")
        + owner(range(6, 24), replica="b")
    )
    # Ended in hour 3: entirely, or after the replica without its record had seen it.
    text += owner([3], 600, capacity=0, team="unseen", replica="b")
    text += owner([3], 900, capacity=0, team="seen", replica="b")
    text += owner([4], 900, capacity=0, team="seen", replica="a")
    # A third replica in place of both lacks their hours.
    text += owner(range(24, 30), replica="c")
    with hand_written(text) as server:  # type: ignore[attr-defined]
        window = Window(start_seconds=DAY, end_seconds=DAY + 30 * 3600)
        found = summed(await read(server.url, window, "team"), "team")
        assert {team: total.seconds.idle for (team,), total in found.items()} == {
            "": 30 * 3600,
            "unseen": 600,
            "seen": 900,
        }


async def test_two_replicas_of_a_whole_fleet_give_the_same_sums_as_one(small_fleet: FleetPlan, tmp_path: Path) -> None:
    plan = replace(small_fleet, nodes=4, days=3)
    blocks = backfilled(plan, tmp_path, {"replica": "a"}, {"replica": "b"}, devices=False)
    true = truth_between(plan.start_seconds, plan.end_seconds, plan)
    with prometheus(tmp_path, blocks, plan) as server:
        ledger = await read(server.url, whole(plan), "workload", "cluster")
    assert_same(
        summed(ledger, "cluster", "namespace", "kind", "workload"),
        true.total("cluster", "namespace", "kind", "workload"),
    )


async def test_clusters_are_separated_by_the_configured_label(hand_written: Callable[..., object]) -> None:
    text = owner(range(24), k8s_cluster="east") + owner(range(24), k8s_cluster="west")
    with hand_written(text) as server:  # type: ignore[attr-defined]
        named = await read(server.url, day(), "cluster", cluster_label="k8s_cluster")
        unnamed = await read(server.url, day(), "cluster")
    assert {key.cluster for key in named.chunks[0].lines} == {"east", "west"}
    assert sum(total.seconds.idle for total in summed(named).values()) == 48 * 3600
    assert not named.notes
    assert any("--cluster-label" in note and "k8s_cluster" in note for note in unnamed.notes)


async def test_names_with_arbitrary_characters_are_found_and_kept(hand_written: Callable[..., object]) -> None:
    names = ('a"b', "x.*|y", "back\\slash", "new\nline", "=cmd|'/c'!A1", "\u202egnp.exe", "<script>", "{{x}}", "")
    escaped = [name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name in names]
    with hand_written("".join(owner(range(24), team=name) for name in escaped)) as server:  # type: ignore[attr-defined]
        everything = await read(server.url, day(), "team")
        assert {key.team for key in everything.chunks[0].lines} == set(names)
        for name in names:
            for others in ((), ("no such",)):
                filters = Filters(wanted={"team": frozenset((name, *others))})
                ledger = await read(server.url, day(), "team", filters=filters)
                assert {key.team for key in ledger.chunks[0].lines} == {name}
        for nothing in (frozenset[str](), frozenset(("\udcff",))):
            ledger = await read(server.url, day(), "team", filters=Filters(wanted={"team": nothing}))
            assert not ledger.chunks[0].lines
            assert not ledger.failures


def test_missing_hours_note_names_the_cluster() -> None:
    windows, hours = chunks(day(2)), [{"east": 24}, {"east": 24, "": 23}]
    assert missing_hours(windows, hours) == [
        "nodes without a cluster: nothing was recorded before 2026-09-20, 24 hours",
        "nodes without a cluster: 1 hour was not recorded: 2026-09-20 (1)",
    ]


async def test_unrecorded_hours_are_reported(hand_written: Callable[..., object]) -> None:
    with hand_written(owner([*range(3), *range(4, 24)])) as server:  # type: ignore[attr-defined]
        ledger = await read(server.url, day(3))
    assert [dict(chunk.recorded_hours) for chunk in ledger.chunks] == [{}, {}, {"": 23}]
    assert ledger.notes == (
        "nothing was recorded before 2026-09-20, 48 hours",
        "1 hour was not recorded: 2026-09-20 (1)",
    )


@pytest.mark.parametrize("late", [0, 0.001, 299.999])
async def test_hours_recorded_at_any_offset_within_five_minutes_are_separated(
    hand_written: Callable[..., object], late: float
) -> None:
    with hand_written(owner(range(-1, 25), late=late)) as server:  # type: ignore[attr-defined]
        for dimensions in ((), ("node",)):
            ledger = await read(server.url, day(), *dimensions)
            assert sum(total.seconds.idle for total in summed(ledger).values()) == 24 * 3600
            assert [dict(chunk.recorded_hours) for chunk in ledger.chunks] == [{"": 24}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no series of an agent at all"),
        (owner(range(-400, -390)), "the newest hours before it are of 2026-09-0"),
    ],
)
async def test_empty_ledger_note_has_the_reason(hand_written: Callable[..., object], text: str, words: str) -> None:
    with hand_written(text or "x 1 1789862400\n") as server:  # type: ignore[attr-defined]
        ledger = await read(server.url, day())
    assert not ledger.failures
    (note,) = ledger.notes
    assert words in note


async def test_server_that_refuses_every_query_is_an_error(fleet_prometheus: FleetServer) -> None:
    everything = FaultyProxy(fleet_prometheus.url, rate=0, refuse=lambda form: "query" in form)
    async with serving(everything) as server:
        with pytest.raises(PrometheusError) as caught:
            await read(server.url, day(), retries=0)
    assert caught.value.reason == "server_error"
    assert "storage is away" in str(caught.value)


async def test_unresponsive_server_is_abandoned_within_40_seconds(fleet_prometheus: FleetServer) -> None:
    """Blocks time out, then days do; the many other queries do not follow."""
    started = asyncio.get_running_loop().time()

    async def stalled(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        if "workload:" in str(form.get("query", "")):
            await asyncio.sleep(60)
        return await FaultyProxy(fleet_prometheus.url, rate=0)(request)

    async with serving(stalled) as server:
        ledger = await read(server.url, whole(fleet_prometheus.plan), timeout_seconds=0.1)
        asked = len(server.requests)
    assert asyncio.get_running_loop().time() - started < 40
    assert asked < 60
    assert {"no answer within 0.1 s" in failure.reason for failure in ledger.failures} == {True}


def test_whole_days_are_queried_together_and_partial_days_alone() -> None:
    ends = [DAY + 5 * 3600, *(DAY + n * DAY_SECONDS for n in range(1, 21)), DAY + 20 * DAY_SECONDS + 3600]
    pieces = [Window(start_seconds=start, end_seconds=end) for start, end in pairwise(ends)]
    found = [tuple(map(pieces.index, block)) for block in blocks(pieces)]
    assert found == [(0,), tuple(range(1, 16)), (16, 17, 18, 19), (20,)]


def now_series(name: str, value: float = 1, **labels: str) -> str:
    """Return a sample of a live series, from a few seconds ago."""
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value} {int(time.time()) - 5}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (lambda: now_series("gpu_ledger_seconds_total"), "load rules/prometheus-rules.yaml into Prometheus"),
        (lambda: now_series("gpu_exporter_build_info"), "they have no ledger yet"),
        (
            lambda: now_series("cluster:gpu_capacity_seconds:delta1h"),
            "on 2026-09-20, but is now: that is before the rules were loaded, or older",
        ),
    ],
)
async def test_current_series_explain_a_missing_recording(
    hand_written: Callable[..., object], text: Callable[[], str], words: str
) -> None:
    with hand_written(text()) as server:  # type: ignore[attr-defined]
        ledger = await read(server.url, day())
    (note,) = ledger.notes
    assert words in note


async def test_pods_on_devices_are_read_once_from_two_replicas(hand_written: Callable[..., object]) -> None:
    device = {"node": "n", "gpu": "0", "uuid": "MIG-1", "gpu_instance": "2", "mig_profile": "1g.10gb", "model": "A100"}
    text = ""
    for replica in ("a", "b"):
        for pod, team in (("train-0", "vision"), ("other-0", "speech")):
            one = {**device, "pod_namespace": "ml", "pod_name": pod, "container_name": "main", "replica": replica}
            carried = {
                "quantity": "seconds",
                "workload_namespace": "ml",
                "workload_kind": "Job",
                "workload_name": pod[:-2],
                "team": team,
            }
            text += now_series("gpu_pod_info", **one, **carried)
            text += now_series("gpu_pod_share_ratio", 0.25, **one)
            text += now_series("gpu_pod_age_seconds", 600, **one)
        text += now_series("gpu_pod_activity_ratio", 0.5, **{**one, "pod_name": "train-0"}, source="engine")
        text += now_series("gpu_hourly_price", 4, node="n", gpu="0", uuid="GPU-1", currency="USD", replica=replica)
    ended = {**device, "pod_namespace": "ml", "pod_name": "train-9", "container_name": "main"}
    carried = {
        "quantity": "seconds",
        "workload_namespace": "ml",
        "workload_kind": "Job",
        "workload_name": "train",
        "team": "vision",
    }
    for name, value, labels in (("gpu_pod_info", 1, {**ended, **carried}), ("gpu_pod_share_ratio", 1, ended)):
        text += now_series(name, value, **labels).rpartition(" ")[0] + f" {int(time.time()) - 7200}\n"
    with hand_written("".join(sorted(text.splitlines(keepends=True)))) as server:  # type: ignore[attr-defined]
        async with PrometheusClient(PrometheusSettings(url=server.url)) as client:
            train, gone = await live_pods(client, Filters(wanted={"workload": frozenset(("train",))}))
            (other,) = await live_pods(client, Filters(wanted={"team": frozenset(("speech",))}))
            assert len(await live_pods(client, Filters())) == 2
            assert not await live_pods(client, Filters(wanted={"team": frozenset(("no such",))}))
    assert (train.pod, train.gpu_uuid, train.gpu_share_ratio, train.activity_ratio, train.age_seconds) == (
        "train-0", "MIG-1", 0.25, 0.5, 600,
    )  # fmt: skip
    assert (train.cost_per_hour, train.live, train.memory_used_bytes) == (
        [{"currency": "USD", "cost": 1.0}],
        True,
        None,
    )
    assert (gone.pod, gone.live, gone.cost_per_hour, gone.activity_ratio) == ("train-9", False, [], None)
    assert (other.pod, other.activity_ratio, other.idle_for_seconds) == ("other-0", None, None)


async def test_fleet_top_has_holders_with_owners_and_unallocated_devices(
    hand_written: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"cluster": "a", "node": "n", "gpu": "0", "uuid": "GPU-1", "model": "NVIDIA A100"}
    one = {**held, "pod_namespace": "ml", "pod_name": "train-0", "container_name": "main"}
    carried = {"workload_namespace": "ml", "workload_kind": "Job", "workload_name": "train", "team": "vision"}
    lines = [
        now_series("gpu_pod_info", **one, **carried),
        now_series("gpu_pod_share_ratio", 1, **one),
        now_series("gpu_pod_idle_for_seconds", 7200, **one),
        now_series("gpu_hourly_price", 4, **held, currency="USD"),
        now_series("gpu_hourly_price", 2, **{**held, "gpu": "1", "uuid": "GPU-2"}, currency="USD"),
        now_series("gpu_allocation_state", 1, **held, state="allocated"),
        now_series("gpu_allocation_state", 0, **held, state="unallocated"),
        now_series("gpu_allocation_state", 1, **{**held, "gpu": "1", "uuid": "GPU-2"}, state="unallocated"),
    ]
    with hand_written("".join(sorted(lines))) as server:  # type: ignore[attr-defined]
        command = ["top", "--prometheus", server.url, "--json"]
        assert await asyncio.to_thread(main, command) == 0
        train, free = json.loads(capsys.readouterr().out)["rows"]
    assert [train[key] for key in ("cluster", "pod", "owner_kind", "owner_name", "team", "idle_for_seconds")] == [
        "a", "train-0", "Job", "train", "vision", 7200,
    ]  # fmt: skip
    assert (train["activity_ratio"], train["cost_per_hour"]) == (None, [{"currency": "USD", "cost": 4.0}])
    assert (free["gpu_uuid"], free["pod"], free["state"]) == ("GPU-2", None, "unallocated")
    assert free["cost_per_hour"] == [{"currency": "USD", "cost": 2.0}]


def test_cost_labels_are_queried_only_for_a_label_dimension() -> None:
    assert "cost_labels" not in queries.labels_of({"cluster", "workload", "team", "model"}, "cluster")
    assert queries.labels_of({"team", "label:project"}, "cluster") == ("workload_kind", "team", "cost_labels")

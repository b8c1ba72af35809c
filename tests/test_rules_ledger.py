"""Every GPU-second of a ledger is recorded once, through faults of nodes, agents and the recorder."""

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from rules_support import (
    EPOCH_SECONDS,
    HOUR,
    MEASURES,
    RECORDED_BY,
    SCRAPE,
    TURN,
    Ledger,
    Owner,
    Recorder,
    Run,
    Spans,
    World,
    engine,
    hours_of,
)

from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.window import Window

ALWAYS: Spans = ((0.0, 1e9),)
WEEKS = -30 * 86400.0
MISSING = {("old agent", "j"): TURN, ("lost state", "j"): SCRAPE, ("leaves unseen", "j"): 400 + TURN + SCRAPE}
"""For an agent older than the rules, its values at the first turn. For a ledger that ends, the time that no scrape saw,
or that no turn saw before Prometheus went down.
"""


def shown(*spans: tuple[float, float]) -> Mapping[str, Spans]:
    return {"a": spans or ALWAYS}


def cases(end: float, measures: tuple[str, ...] = ("seconds",)) -> World:
    """Return a world with a case per cluster; every owner ends half an hour before the last full hour."""
    last = end - 0.5 * HOUR
    job = Owner("j", 1.0, last)
    before = Owner("j", WEEKS, last)
    return World(
        {
            "steady": (Ledger("l", (job,), shown()),),
            "births": (
                Ledger(
                    "l",
                    tuple(
                        Owner(f"b{number}", begin, begin + lasts)
                        for number, begin in enumerate((1.0, 700.0, 3300.0, 3590.0, 3610.0, 7190.0, 9001.0, 10797.0))
                        for lasts in (40.0 + 1000 * (number % 3),)
                    ),
                    shown(),
                ),
            ),
            "restart": (Ledger("l", (job,), {"a": ((0, 6700),), "b": ((6880, 1e9),)}),),
            "overlap": (Ledger("l", (job,), {"a": ((0, 7600),), "b": ((7000, 1e9),)}, age_seconds={"a": 40.0}),),
            "lost state": (
                Ledger("l", (Owner("j", 1.0, 5000.0),), shown((0, 5000))),
                Ledger("m", (Owner("j", 5030.0, last),), {"a": ((5030, 1e9),)}, created=5030.0),
            ),
            "leaves": (Ledger("l", (Owner("j", 1.0, 5400.0),), shown((0, 5430))),),
            "returns": (
                Ledger("l", (Owner("j", 1.0, last), Owner("k", 9000.0, last)), shown((0, 4000), (11200, 1e9))),
            ),
            "disk full": (
                Ledger("l", (Owner("j", 1.0, last, pause=(7800.0, 9300.0)),), shown()),
                Ledger("m", (Owner("j", 7800.0, 9300.0),), shown((7800, 9300 + 25 * HOUR)), created=7800.0),
            ),
            "leaves unseen": (Ledger("l", (Owner("j", 1.0, 7400.0),), shown((0, 7400))),),
            "rotation": (
                Ledger("l", (Owner("j", 1.0, 7210.0),), shown((0, 7210 + 25 * HOUR))),
                Ledger("m", (Owner("j", 7210.0, last), Owner("k", 9000.0, last)), shown((7210, 1e9)), created=7210.0),
            ),
            "new node": (Ledger("l", (Owner("j", 9420.0, last, 8.0),), shown((9450, 1e9)), created=9420.0),),
            "old agent": (Ledger("l", (before, Owner("k", 4000.0, last)), shown(), created=WEEKS),),
        },
        measures,
    )


def counted(world: World, cluster: str, name: str, since: float, end: float) -> float:
    """Return the GPU-seconds of an owner between two moments."""
    owners = [(ledger, owner) for ledger in world.clusters[cluster] for owner in ledger.owners if owner.name == name]
    return sum((ledger.value(owner, end) or 0.0) - (ledger.value(owner, since) or 0.0) for ledger, owner in owners)


def all_owners(world: World) -> list[tuple[str, str]]:
    """Return cluster and name of every owner."""
    return sorted(
        {(cluster, o.name) for cluster, ledgers in world.clusters.items() for one in ledgers for o in one.owners}
    )


def recorded_hours(
    recorder: Recorder, end: float, measures: tuple[str, ...] = ("seconds",)
) -> dict[str, dict[tuple[str, str], dict[int, float]]]:
    """Return GPU-seconds by measure, owner and hour; owners, workloads and the cluster's sum must agree."""
    found = {}
    for measure in measures:
        by_owner = hours_of(recorder, f'owner:gpu_ledger:delta1h{{quantity="{measure}"}}', end)
        by_workload = hours_of(recorder, f'workload:gpu_ledger:delta1h{{quantity="{measure}"}}', end)
        assert by_owner.keys() == by_workload.keys()
        for key, hours in by_owner.items():
            assert hours == pytest.approx(by_workload[key])
        found[measure] = {
            key: {hour: value / MEASURES[measure] for hour, value in hours.items()} for key, hours in by_owner.items()
        }
    for (cluster, _), hours in hours_of(recorder, "cluster:gpu_capacity_seconds:delta1h", end).items():
        of_owners = [owned for (where, _), owned in found["seconds"].items() if where == cluster]
        assert hours == pytest.approx({hour: sum(owned.get(hour, 0.0) for owned in of_owners) for hour in hours})
    return found


RUNS = {
    "undisturbed": ("prometheus", Run(hours=6.4)),
    "late in the turn": ("prometheus-3", Run(hours=6.4, phase=299.5)),
    "away over a full hour": ("prometheus", Run(hours=6.4, phase=61.0, away=((7000.0, 7600.0),))),
    "a turn is missed": ("prometheus-2.53", Run(hours=6.4, phase=137.25, skipped=((7200.0, 7500.0),))),
    "the turn of an hour is missed": ("prometheus-2.53", Run(hours=6.4, phase=137.25, skipped=((7500.0, 8400.0),))),
    "away for three hours": ("prometheus", Run(hours=8.4, away=((7000.0, 17900.0),))),
    "away for a day": ("prometheus", Run(hours=32.4, phase=299.5, away=((7000.0, 7000.0 + 24 * HOUR),))),
    "VictoriaMetrics": ("victoria-metrics-1.112", Run(hours=6.4)),
    "VictoriaMetrics away": ("victoria-metrics-new", Run(hours=8.4, away=((7000.0, 17900.0),))),
}
"""Engine and run; vmalert evaluates at whole minutes."""


@pytest.mark.parametrize("name", RUNS)
def test_each_gpu_second_is_recorded_once(tmp_path: Path, name: str) -> None:
    program, run = RUNS[name]
    end = math.floor(run.hours) * HOUR
    # Rules do not distinguish measures, under any fault.
    world = cases(end, tuple(MEASURES) if run == Run(hours=6.4) else ("seconds", "cost"))
    with engine(tmp_path, program) as recorder:
        run.drive(world, recorder)
        found = recorded_hours(recorder, end, world.measures)
    for measure, owned in found.items():
        for cluster, owner in all_owners(world):
            expected = counted(world, cluster, owner, 0.0, end)
            least = expected - MISSING.get((cluster, owner), 0.0)
            sum_ = sum(owned.get((cluster, owner), {}).values())
            assert least - 0.01 <= sum_ <= expected + 0.01, (measure, cluster, owner)
    if not run.away and not run.skipped:
        hours = found["seconds"]["steady", "j"]
        assert hours == pytest.approx({1: 3300, 2: 3600, 3: 3600, 4: 3600, 5: 3600, 6: 2100}, abs=TURN + SCRAPE)
        assert len({round(hours[hour]) for hour in (2, 3, 4, 5)}) == 1


def test_late_prometheus_counts_from_its_first_evaluation(tmp_path: Path) -> None:
    begin, end = 5000.0, 6 * HOUR
    world = cases(end)
    with engine(tmp_path, "prometheus") as recorder:
        Run(hours=6.4, begins=begin).drive(world, recorder)
        found = recorded_hours(recorder, end)["seconds"]
    for cluster, owner in all_owners(world):
        if cluster == "returns":  # the only node that is down at that time
            continue
        expected = counted(world, cluster, owner, begin, end)
        assert expected - TURN - SCRAPE <= sum(found.get((cluster, owner), {}).values()) <= expected + 0.01


def test_series_absent_for_more_than_a_day_are_not_counted_twice(tmp_path: Path) -> None:
    world = World(
        {
            "node": (Ledger("l", (Owner("j", 1.0, 1e9),), shown((0, 5000), (5000 + 26 * HOUR, 1e9))),),
            "new": (Ledger("l", (Owner("j", 1.0, 5000), Owner("k", 5000.0, 1e9)), shown((0, 6000), (99000.0, 1e9))),),
        }
    )
    with engine(tmp_path, "prometheus") as recorder:
        Run(hours=30.4).drive(world, recorder)
        found = recorded_hours(recorder, 30 * HOUR)["seconds"]
    assert sum(found["node", "j"].values()) == pytest.approx(30 * HOUR, abs=TURN + SCRAPE)
    assert sum(found["new", "k"].values()) == pytest.approx(30 * HOUR - 5000, abs=TURN + SCRAPE)


def test_prometheus_down_for_28_hours_resumes_with_current_samples(tmp_path: Path) -> None:
    world = World({"steady": (Ledger("l", (Owner("j", 1.0, 1e9),), shown()),)})
    with engine(tmp_path, "prometheus") as recorder:
        Run(hours=32.4, away=((7000.0, 7000.0 + 28 * HOUR),)).drive(world, recorder)
        hours = recorded_hours(recorder, 32 * HOUR)["seconds"]["steady", "j"]
    assert hours == pytest.approx({1: 3600, 31: 3600, 32: 3600}, abs=SCRAPE)


def test_outage_of_25_and_a_half_hours_loses_nothing_of_existing_owners(tmp_path: Path) -> None:
    world = World({"steady": (Ledger("l", (Owner("j", 1.0, 1e9),), shown(), created=1.0),)})
    away = 6600.0, 6600.0 + 25.5 * HOUR
    with engine(tmp_path, "prometheus") as recorder:
        Run(hours=30.4, away=(away,)).drive(world, recorder)
        hours = recorded_hours(recorder, 30 * HOUR)["seconds"]["steady", "j"]
    assert 30 * HOUR - TURN - SCRAPE <= sum(hours.values()) <= 30 * HOUR


@pytest.mark.parametrize(("missing", "forgotten"), [(25.0, set()), (26.8, {"k"})])
def test_hours_unrecorded_for_more_than_a_day_are_in_the_next_one(
    tmp_path: Path, missing: float, forgotten: set[str]
) -> None:
    """The queries of an hour can take too long. After 26 hours ledgers are unknown: new owners begin then."""
    owners = Owner("j", 1.0, 1e9), Owner("k", 9000.0, 1e9)
    world = World({"steady": (Ledger("l", owners, shown()),), "old agent": (Ledger("l", owners, shown(), WEEKS),)})
    with engine(tmp_path, "prometheus") as recorder:
        Run(hours=32.4, phase=61.0, unrecorded=((7300.0, 7300.0 + missing * HOUR),)).drive(world, recorder)
        found = recorded_hours(recorder, 32 * HOUR)["seconds"]
    for cluster, owner in all_owners(world):
        expected = counted(world, cluster, owner, 0.0, 32 * HOUR)
        least = 0.0 if owner in forgotten else expected - TURN - SCRAPE
        assert least <= sum(found[cluster, owner].values()) <= expected + 0.01


@pytest.mark.parametrize(
    ("program", "stored", "hours"),
    [("prometheus", 1, 1), ("prometheus-3", 2, 3), ("prometheus", 3, 2), ("victoria-metrics-1.112", 2, 1)],
)
def test_server_stopped_between_the_rules_of_an_hour_loses_nothing(
    tmp_path: Path, program: str, stored: int, hours: int
) -> None:
    """For some hours the server stores only the first rules: every other rule has them in its next hour."""
    world = cases(7 * HOUR)
    with engine(tmp_path, program) as recorder:
        Run(hours=7.4, cut=((7500.0, 7500.0 + hours * HOUR),), cut_after=stored).drive(world, recorder)
        found = {
            level: hours_of(recorder, f'{level}:gpu_ledger:delta1h{{quantity="seconds"}}', 7 * HOUR)
            for level in ("owner", "workload")
        }
        capacity = hours_of(recorder, "cluster:gpu_capacity_seconds:delta1h", 7 * HOUR)
    for place, level in enumerate(found, start=2):
        for cluster, owner in all_owners(world):
            expected = counted(world, cluster, owner, 0.0, 7 * HOUR)
            least = expected - MISSING.get((cluster, owner), 0.0)
            assert least - 0.01 <= sum(found[level].get((cluster, owner), {}).values()) <= expected + 0.01
        late = {hour: value for hour, value in found[level]["steady", "j"].items() if hour > 1}
        first = 2 if stored >= place else 2 + hours
        assert min(late) == first
        assert late[first] == pytest.approx((first - 1) * HOUR)
    for (cluster, _), by_hour in capacity.items():
        owned = sum(sum(hours.values()) for (where, _), hours in found["owner"].items() if where == cluster)
        assert sum(by_hour.values()) == pytest.approx(owned)
        assert not set(by_hour) & set(range(2, 2 + hours))


def recorded_samples(recorder: Recorder, end: float) -> list[tuple[float, dict[str, str], float]]:
    """Return all hourly samples of a recorder with their times, since the epoch of a run."""
    seconds = round(end + RECORDED_BY)
    return [
        (moment - EPOCH_SECONDS, labels, value)
        for labels, values in recorder.samples(f'{{__name__=~".+:delta1h"}}[{seconds}s]', float(seconds))
        for moment, value in values
    ]


PAIRS = {
    "other phases": (Run(hours=6.4), Run(hours=6.4, phase=240.0)),
    "one is away over full hours": (Run(hours=6.4, away=((7000.0, 14900.0),)), Run(hours=6.4, phase=240.0)),
    "one is away at the end": (Run(hours=6.4, away=((20000.0, 1e9),)), Run(hours=6.4, phase=240.0)),
    "turns of hours that follow are missed": (
        Run(hours=6.4, phase=61.0, unrecorded=((7300.0, 8400.0),)),
        Run(hours=6.4, phase=299.5, unrecorded=((10900.0, 12000.0),)),
    ),
}
"""Runs of two recorders of the same series; sums have no error beyond the edges of the chosen recorder."""


@pytest.mark.parametrize("name", PAIRS)
async def test_server_pair_with_different_phases_reads_each_gpu_second_once(tmp_path: Path, name: str) -> None:
    end = 6 * HOUR
    jobs = (
        Owner("long", 1.0, 3 * HOUR + 1000),
        Owner("full hour", 3550.0, 7150.0, 8.0),
        *(Owner(f"short {number}", number * HOUR - 60.0, number * HOUR + 30.0, 8.0) for number in range(1, 6)),
        Owner("kept", 1.0),
    )
    world = World({"c": (Ledger("l", jobs, shown()),)})
    samples = []
    for replica, run in zip("ab", PAIRS[name], strict=True):
        directory = tmp_path / replica
        directory.mkdir()
        with engine(directory, "prometheus") as recorder:
            run.drive(world, recorder)
            samples += [
                (at, {**labels, "replica": replica}, value) for at, labels, value in recorded_samples(recorder, end)
            ]
    (tmp_path / "both").mkdir()
    with engine(tmp_path / "both", "prometheus") as both:
        for at, labels, value in sorted(samples, key=lambda one: one[0]):
            both.write([(labels, value)], at)
        both.settle()
        window = Window(start_seconds=round(EPOCH_SECONDS), end_seconds=round(EPOCH_SECONDS + end))
        async with PrometheusClient(PrometheusSettings(url=both.url)) as client:
            read = await PrometheusLedger(client).ledger(window, frozenset(("workload",)))
    found = {key.workload: line.seconds.total for chunk in read.chunks for key, line in chunk.lines.items()}
    assert not read.failures
    for job in jobs[:-1]:
        assert found[job.name] == pytest.approx(counted(world, "c", job.name, 0.0, end), abs=0.01), job.name
    assert found["kept"] == pytest.approx(end, abs=TURN + SCRAPE)
    assert sum(found.values()) == pytest.approx(sum(read.chunks[0].capacity_seconds.values()))
    assert read.chunks[0].recorded_hours == {"c": 6}

from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote
from zoneinfo import ZoneInfo

import pytest
from fleet_support import END_SECONDS, FleetServer, truth_between
from service_support import Running, running

from exporter.cost.dimensions import LineKey, pairs
from exporter.cost.window import DAY_SECONDS, Now
from exporter.errors import ConfigError
from exporter.service.opencost_query import conditions, keeps, window_of

MIDNIGHT = END_SECONDS // DAY_SECONDS * DAY_SECONDS
WEEK = MIDNIGHT - 6 * DAY_SECONDS
"""Today and the six days before, as in OpenCost's 7d."""
NEEDED = {
    "name",
    "cpuCost",
    "ramCost",
    "gpuCost",
    "pvCost",
    "networkCost",
    "loadBalancerCost",
    "sharedCost",
    "externalCost",
    "totalCost",
    "minutes",
    "window",
    "properties",
}
"""Properties that OpenCost guarantees for every row."""
OURS = {"Unallocated", "Unattributed"}


@pytest.fixture
async def site(fleet_prometheus: FleetServer) -> AsyncIterator[Running]:
    async with running(fleet_prometheus.url) as made:
        yield made


async def rows(site: Running, query: str) -> dict[str, Any]:
    """Return the rows of the only set."""
    (found,) = (await site.json(f"/allocation?currency=USD&{query}"))["data"]
    return dict(found)


def truth_of(name: str, start: int = WEEK, end: int = END_SECONDS, **wanted: str) -> dict[str, float]:
    """Return the USD of owners by a field of the truth."""
    found: dict[str, float] = {}
    for (kind, value), totals in truth_between(start, end).total("kind", name, **wanted).items():
        if kind not in OURS and "USD" in totals.money:
            found[value] = found.get(value, 0.0) + totals.money["USD"].total
    return found


async def test_cost_of_every_namespace_matches_the_ledger(site: Running) -> None:
    found = await rows(site, "window=7d&aggregate=namespace")
    costs = {name: row["gpuCost"] for name, row in found.items() if not name.startswith("__unattributed")}
    truth = {name or "__unallocated__": cost for name, cost in truth_of("namespace").items()}
    assert costs == pytest.approx(truth, rel=1e-6)


async def test_row_has_every_key_that_opencost_clients_need(site: Running) -> None:
    document = await site.json(
        "/allocation/compute?window=7d&aggregate=namespace&step=1d&includeIdle=true&currency=USD"
    )
    assert document["code"] == 200
    assert len(document["data"]) == 7
    for one in document["data"]:
        for name, row in one.items():
            assert row["name"] == name
            assert set(row) >= NEEDED
            assert set(row["window"]) == {"start", "end"}
            parts = ("cpu", "ram", "gpu", "pv", "network", "loadBalancer", "shared", "external")
            assert sum(row[f"{part}Cost"] for part in parts) == pytest.approx(row["totalCost"])


async def test_steps_sum_to_the_whole_window(site: Running) -> None:
    whole = await rows(site, "window=7d&aggregate=label:team&includeIdle=true")
    steps = (await site.json("/allocation?window=7d&aggregate=label:team&includeIdle=true&step=1d&currency=USD"))[
        "data"
    ]
    for name, row in whole.items():
        several = [one[name]["gpuCost"] for one in steps if name in one]
        assert sum(several) == pytest.approx(row["gpuCost"], rel=1e-9)


async def test_rows_can_be_aggregated_and_filtered_by_label(site: Running) -> None:
    cost: dict[str, float] = {}
    for (labels, kind), totals in truth_between(WEEK, END_SECONDS).total("labels", "kind").items():
        if kind != "Unallocated" and "USD" in totals.money:
            name = "__unattributed__" if kind == "Unattributed" else pairs(labels).get("project", "__unallocated__")
            cost[name] = cost.get(name, 0.0) + totals.money["USD"].total
    found = await rows(site, "window=7d&aggregate=label:project")
    assert {name: row["gpuCost"] for name, row in found.items()} == pytest.approx(cost)
    some = await rows(site, 'window=7d&aggregate=label:project&filter=label[project]:"sweep","nightly"')
    assert some.keys() == {"sweep", "nightly"}
    assert some["sweep"]["gpuCost"] == found["sweep"]["gpuCost"]
    unknown = await site.json("/allocation?window=7d&aggregate=label:app&currency=USD")
    assert unknown["data"][0].keys() == {"__unallocated__", "__unattributed__"}
    assert "no line has the label app; labels of this period: environment, project" in unknown["warning"]


async def test_hourly_steps_are_read_per_hour(site: Running) -> None:
    document = await site.json("/allocation?window=6h&aggregate=cluster&step=1h&currency=USD")
    assert [one["alpha"]["minutes"] for one in document["data"]] == [60.0] * 6
    last = truth_of("cluster", END_SECONDS - 3600, END_SECONDS)
    assert document["data"][-1]["alpha"]["gpuCost"] == pytest.approx(last["alpha"], rel=1e-6)


async def test_accumulate_true_returns_one_set_for_any_step(site: Running) -> None:
    for words in ("accumulate=true&step=1d", "step=window", ""):
        assert len((await site.json(f"/allocation?window=3d&currency=USD&aggregate=cluster&{words}"))["data"]) == 1
    daily = await site.json("/allocation?window=3d&currency=USD&aggregate=cluster&accumulate=day")
    assert len(daily["data"]) == 3


async def test_idle_row_is_the_unallocated_cost_and_appears_only_on_request(site: Running) -> None:
    without = await rows(site, "window=7d&aggregate=namespace")
    found = await rows(site, "window=7d&aggregate=namespace&includeIdle=true")
    assert "__idle__" not in without
    truth = truth_between(WEEK, END_SECONDS).sum(kind="Unallocated")
    assert found["__idle__"]["gpuCost"] == pytest.approx(truth.money["USD"].total, rel=1e-6)
    assert found["__idle__"]["gpuEfficiency"] is None
    del found["__idle__"]
    assert found == without


async def test_share_idle_distributes_all_idle_cost_over_owner_rows(site: Running) -> None:
    apart = await rows(site, "window=7d&aggregate=namespace&includeIdle=true")
    whole = sum(row["totalCost"] for row in apart.values())
    for words in ("shareIdle=true", "shareIdle=weighted", "shareIdle=even"):
        shared = await rows(site, f"window=7d&aggregate=namespace&includeIdle=true&{words}")
        assert "__idle__" not in shared
        assert sum(row["totalCost"] for row in shared.values()) == pytest.approx(whole, abs=0.01)
        taken = sum(row["gpuCostIdle"] for row in shared.values())
        assert taken == pytest.approx(apart["__idle__"]["totalCost"], abs=0.01)


async def test_controllers_are_named_as_in_opencost(site: Running) -> None:
    found = await rows(site, "window=7d&aggregate=namespace,controllerKind,controller")
    name, row = next((name, row) for name, row in found.items() if "statefulset" in name)
    namespace, kind, controller = name.split("/")
    assert row["properties"] == {
        "namespace": namespace,
        "controllerKind": kind,
        "controller": controller.removeprefix("statefulset:"),
    }
    assert controller.startswith("statefulset:")


async def test_controller_kind_can_be_an_aggregate(site: Running) -> None:
    found = await rows(site, "window=7d&aggregate=statefulset")
    truth = truth_of("workload", kind="StatefulSet")
    costs = {name: row["gpuCost"] for name, row in found.items() if not name.startswith("__")}
    assert costs == pytest.approx(truth, rel=1e-6)
    assert "__unallocated__" in found


async def test_opencost_ui_filters_are_accepted(site: Running) -> None:
    every = await rows(site, "window=7d&aggregate=namespace,controllerKind,controller")
    namespace, kind, _ = next(name for name in every if "statefulset" in name).split("/")
    words = quote(f'namespace:"{namespace}"+controllerKind:"{kind}"', safe="")
    some = await rows(site, f"window=7d&aggregate=namespace,controllerKind,controller&filter={words}")
    assert some
    assert some == {name: row for name, row in every.items() if name.startswith(f"{namespace}/{kind}/")}
    old = await rows(
        site,
        "window=7d&aggregate=namespace,controllerKind,controller"
        f'&filterNamespaces={namespace}&filter=controllerKind:"{kind}"',
    )
    assert old == some


async def test_efficiency_is_active_over_measured_for_any_number_of_gpus(site: Running) -> None:
    found = await rows(site, "window=7d&aggregate=namespace")
    truth = truth_between(WEEK, END_SECONDS)
    for name, row in found.items():
        if name.startswith("__"):
            continue
        totals = truth.sum(namespace=name)
        measured = totals.seconds.active + totals.seconds.idle
        assert row["gpuEfficiency"] == pytest.approx(totals.seconds.active / measured, rel=1e-6)
        gpu = row["gpuAllocation"]
        seconds = END_SECONDS - WEEK
        assert gpu["gpuUsageAverage"] == pytest.approx(totals.seconds.active / seconds, rel=1e-6)
        assert gpu["gpuRequestAverage"] == pytest.approx(totals.seconds.total / seconds, rel=1e-6)


async def test_window_with_several_currencies_requires_a_currency(site: Running) -> None:
    answer = await site.get("/allocation?window=7d&aggregate=namespace")
    assert answer.status == 400
    assert "EUR, USD" in answer.json()["message"]
    wrong = await site.get("/allocation?window=7d&aggregate=namespace&currency=GBP")
    assert wrong.status == 400
    assert "EUR, USD" in wrong.json()["message"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("aggregate=namespcae", "is no property of OpenCost's"),
        ("window=30m", "no whole number of hours"),
        ("window=invalid-window", "not a period"),
        ("window=60d&step=1h", "more than 400"),
        ("step=10m", "whole number of hours"),
        ("filter=pod:%22x%22", "not understood"),
        ("filter=namespace", "not understood"),
        ("shareNamespaces=kube-system", "unknown parameter"),
        ("shareIdle=true&shareSplit=even", "unknown parameter"),
        ("filterClusters=alpha", "unknown parameter"),
    ],
)
async def test_unsupported_query_is_refused_with_the_reason(site: Running, query: str, words: str) -> None:
    answer = await site.get(f"/allocation?currency=USD&{query}")
    assert answer.status == 400
    document = answer.json()
    assert document["code"] == 400
    assert words in document["message"]


async def test_irrelevant_parameters_are_accepted(site: Running) -> None:
    found = await rows(
        site, "window=1d&aggregate=cluster&resolution=1m&reconcile=true&etl=true&includeAggregatedMetadata=true"
    )
    assert set(found) >= {"alpha"}


async def test_rows_are_sorted_by_cost_and_paginated(site: Running) -> None:
    every = await rows(site, "window=7d&aggregate=controller")
    names = list(every)
    costs = [every[name]["totalCost"] for name in names]
    assert costs == sorted(costs, reverse=True)
    assert list(await rows(site, "window=7d&aggregate=controller&offset=1&limit=2")) == names[1:3]


async def test_unrecorded_hours_add_a_warning(site: Running) -> None:
    document = await site.json("/allocation?window=2026-08-25&aggregate=cluster&currency=USD")
    assert "hours were recorded" in document["warning"]


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("7d", WEEK, END_SECONDS),
        ("1d", MIDNIGHT, END_SECONDS),
        ("1w", WEEK, END_SECONDS),
        ("120m", END_SECONDS - 7200, END_SECONDS),
        ("24h", END_SECONDS - DAY_SECONDS, END_SECONDS),
        ("2026-09-01T00:00:00Z,2026-09-08T00:00:00Z", 1_788_220_800, 1_788_220_800 + 7 * DAY_SECONDS),
        ("1788220800,1788307200", 1_788_220_800, 1_788_307_200),
    ],
)
def test_windows_match_opencost(text: str, start: int, end: int) -> None:
    window = window_of(text, Now(END_SECONDS + 1500.0))
    assert (window.start_seconds, window.end_seconds) == (start, end)


def test_one_day_window_in_the_first_hour_is_the_previous_day() -> None:
    window = window_of("1d", Now(MIDNIGHT + 1500.0))
    assert (window.start_seconds, window.end_seconds) == (MIDNIGHT - DAY_SECONDS, MIDNIGHT)


def test_day_windows_use_the_time_zone() -> None:
    window = window_of("2d", Now(MIDNIGHT + 3.5 * 3600, ZoneInfo("Europe/Berlin")))
    assert (window.start_seconds, window.end_seconds) == (MIDNIGHT - 26 * 3600, MIDNIGHT + 3 * 3600)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('namespace:"a","b"', {"namespace": {"a", "b"}}),
        ('namespace:"a"+controllerKind:"Job"', {"namespace": {"a"}, "controllerKind": {"job"}}),
        ('namespace:"a" controllerName:"b"', {"namespace": {"a"}, "controllerName": {"b"}}),
        ("cluster:alpha", {"cluster": {"alpha"}}),
        ('label[team]:"core"', {"team": {"core"}}),
        ('label[example.com/centre]:"42","43"', {"label:example.com/centre": {"42", "43"}}),
        ("", {}),
    ],
)
def test_filter_terms_are_parsed(text: str, wanted: Mapping[str, set[str]]) -> None:
    assert conditions(text, 0.0) == wanted


@pytest.mark.parametrize(
    "text", ['namespace!:"a"', 'namespace:"a"|namespace:"b"', 'label[a b]:"x"', 'cluster[app]:"x"', "namespace:", '"a"']
)
def test_unsupported_filter_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        conditions(text, 0.0)


def test_controller_kinds_match_in_lower_case() -> None:
    assert keeps({"controllerKind": frozenset({"job"})}, LineKey(kind="Job"))
    assert not keeps({"controllerKind": frozenset({"job"})}, LineKey(kind="Deployment"))

"""Clients of OpenCost and Kubecost, unmodified: their requests get answers that they can show."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from files_support import read_yaml
from fleet_support import END_SECONDS, FleetServer, truth_between
from service_support import Running, running

from exporter.cost.window import DAY_SECONDS

FIXTURES = Path(__file__).resolve().parent / "fixtures"
REQUESTS: list[dict[str, Any]] = read_yaml((FIXTURES / "opencost_clients.yaml").read_text(encoding="utf-8"))
WEEK = END_SECONDS // DAY_SECONDS * DAY_SECONDS - 6 * DAY_SECONDS
WEEKLY = "/model/allocation?window=7d&accumulate=true&includeIdle=true"


@pytest.fixture
async def site(fleet_prometheus: FleetServer) -> AsyncIterator[Running]:
    """Serve a fleet with two currencies; the clients name none."""
    async with running(fleet_prometheus.url, currency="USD") as made:
        yield made


@pytest.mark.parametrize("asked", [pytest.param(one, id=f"{one['client']}: {one['path']}") for one in REQUESTS])
async def test_requests_of_clients_are_answered(site: Running, asked: dict[str, Any]) -> None:
    answer = await site.get(f"{asked['path']}?{asked['query']}", method=asked["method"])
    assert answer.status == asked["status"], answer.text
    if answer.status != 200:
        assert "GPUs only" in answer.json()["message"]
        return
    for rows in answer.json()["data"] if "parts" in asked else ():
        for name, row in rows.items():
            assert row["name"] == name
            # kubectl-cost panics on any other name.
            assert name == "__idle__" or name.count("/") + 1 == asked["parts"]


async def test_unattributed_row_has_a_name_for_each_part(site: Running) -> None:
    (found,) = (await site.json(f"{WEEKLY}&aggregate=cluster,namespace,controller"))["data"]
    assert {name for name in found if "__unattributed__" in name} == {"/".join(["__unattributed__"] * 3)}
    assert "__idle__" in found


@pytest.mark.parametrize("name", ["pod", "container", "service", "annotation:owner"])
async def test_cost_total_is_the_same_for_dimensions_not_in_the_ledger(site: Running, name: str) -> None:
    document = await site.json(f"{WEEKLY}&aggregate=namespace,{name}")
    (found,), (whole,) = document["data"], (await site.json(f"{WEEKLY}&aggregate=namespace"))["data"]
    costs = {key.partition("/")[0]: row["totalCost"] for key, row in found.items()}
    assert costs == pytest.approx({key: row["totalCost"] for key, row in whole.items()})
    assert {key.partition("/")[2] for key in found} == {"__unallocated__", "__unattributed__", ""}
    assert f"does not record {name}" in document["warning"]


async def test_idle_row_is_present_for_either_parameter(site: Running) -> None:
    for words, there in (("idle=true", True), ("includeIdle=true", True), ("idle=false&includeIdle=false", False)):
        (found,) = (await site.json(f"/allocation?window=7d&aggregate=namespace&{words}"))["data"]
        assert ("__idle__" in found) is there


async def test_default_currency_applies_and_other_currencies_are_named_in_a_warning(site: Running) -> None:
    usual = await site.json(f"{WEEKLY}&aggregate=namespace")
    assert usual["currency"] == "USD"
    assert "costs in EUR are left out" in usual["warning"]
    asked = await site.json(f"{WEEKLY}&aggregate=namespace&currency=EUR")
    assert asked["currency"] == "EUR"
    assert "left out" not in asked["warning"]
    assert (await site.json("/model/getConfigs"))["data"] == {"currencyCode": "USD"}


async def test_gpu_without_a_price_has_an_unknown_cost_instead_of_zero(site: Running) -> None:
    """In the first days of the fleet, one of its twelve nodes has no price."""
    start = WEEK - 31 * DAY_SECONDS
    document = await site.json(f"/allocation?window={start},{start + DAY_SECONDS}&aggregate=cluster,node")
    (found,) = document["data"]
    truth = truth_between(start, start + DAY_SECONDS).total("cluster", "node")
    unpriced = {"/".join(node) for node, totals in truth.items() if not totals.money}
    assert unpriced
    assert {name for name, row in found.items() if row["gpuCost"] is None} == unpriced
    assert {name for name, row in found.items() if row["totalCost"] is None} == unpriced
    assert "had no price and are in no cost" in document["warning"]


async def test_ambiguous_currency_is_refused(fleet_prometheus: FleetServer) -> None:
    async with running(fleet_prometheus.url) as site:
        for path in ("/model/getConfigs", "/model/assets", "/model/allocation?aggregate=namespace"):
            answer = await site.get(path)
            assert answer.status == 400
            assert "EUR, USD" in answer.json()["message"]
            assert "--currency" in answer.json()["message"]


async def test_unknown_parameters_are_ignored_with_a_warning(site: Running) -> None:
    document = await site.json(f"{WEEKLY}&aggregate=namespace&metrics=totalCost&agregate=pod")
    assert "metrics: unknown parameter, ignored" in document["warning"]
    assert "did you mean 'aggregate'?" in document["warning"]
    many = "&".join(f"x{number}=1" for number in range(30))
    warning = (await site.json(f"{WEEKLY}&aggregate=namespace&{many}"))["warning"]
    assert "10 more unknown parameters" in warning
    strict = await site.get("/api/v1/report?window=7d&metrics=totalCost")
    assert strict.status == 400


async def test_node_cost_includes_allocated_and_unallocated_gpus(site: Running) -> None:
    (listed,) = (await site.json("/model/assets?window=7d&accumulate=true&filterTypes=Node"))["data"]
    truth = {
        f"{cluster}/Node/{node}": totals.money["USD"].total
        for (cluster, node), totals in truth_between(WEEK, END_SECONDS).total("cluster", "node").items()
        if "USD" in totals.money
    }
    assert {name: asset["totalCost"] for name, asset in listed.items()} == pytest.approx(truth, rel=1e-6)
    mapped = (await site.json("/assets?window=7d&aggregate=assetType&step=1d"))["data"]
    assert mapped == listed
    assert (await site.json("/assets?window=7d&filterTypes=Disk"))["data"] == [{}]
    some = (await site.json('/assets?window=7d&filter=cluster:"beta"'))["data"]
    assert some == {name: asset for name, asset in listed.items() if name.startswith("beta/")}
    assert (await site.get('/assets?window=7d&filter=namespace:"vision"')).status == 400


async def test_sets_of_the_calendar_sum_to_the_window(site: Running) -> None:
    whole = await site.json("/allocation?window=40d&aggregate=cluster&accumulate=all")
    for word, weekday, day in (("weeknow", 0, None), ("month", None, 1), ("quarter", None, 1)):
        sets = (await site.json(f"/allocation?window=40d&aggregate=cluster&accumulate={word}"))["data"]
        starts = [datetime.fromisoformat(next(iter(rows.values()))["start"]) for rows in sets if rows]
        assert all(start.tzinfo == UTC for start in starts)
        assert all(weekday is None or start.weekday() == weekday for start in starts[1:])
        assert all(day is None or start.day == day for start in starts[1:])
        total = sum(row["totalCost"] for rows in sets for row in rows.values())
        assert total == pytest.approx(sum(row["totalCost"] for row in whole["data"][0].values()), rel=1e-6)


async def test_suggestions_are_values_of_the_window(site: Running) -> None:
    found = (await site.json("/model/allocation/autocomplete?window=7d&field=namespace&search=VIS"))["data"]
    assert found == ["vision", "vision-dev"]
    words = '/allocation/autocomplete?window=7d&field=controllerKind&limit=2&filter=namespace:"vision"'
    assert (await site.json(words))["data"] == ["cronjob", "deployment"]
    assert (await site.json("/allocation/autocomplete?window=7d&field=pod"))["data"] == []

import csv
import gzip
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession
from files_support import problems
from fleet_support import END_SECONDS, SMALL_FLEET, FleetServer, truth_between
from service_support import NOW, Running, running

from exporter.cost.dimensions import pairs
from exporter.model.ledger import Totals
from exporter.service.openapi import ENDPOINTS, document, name_of
from exporter.service.parameters import FILTERS

WEEK = END_SECONDS - 7 * 86_400


@pytest.fixture
async def site(fleet_prometheus: FleetServer) -> AsyncIterator[Running]:
    async with running(fleet_prometheus.url) as made:
        yield made


def seconds(line: dict[str, Any]) -> tuple[float, float, float]:
    return line["active_seconds"], line["idle_seconds"], line["unknown_seconds"]


def of_truth(totals: Totals) -> tuple[float, float, float]:
    return totals.seconds.active, totals.seconds.idle, totals.seconds.unknown


def cost(line: dict[str, Any], currency: str) -> float:
    return sum(money["cost"] for money in line["money"] if money["currency"] == currency)


async def test_report_seconds_and_costs_match_the_truth_of_every_namespace(site: Running) -> None:
    report = await site.json("/api/v1/report?window=7d&by=namespace")
    truth = truth_between(WEEK, END_SECONDS).total("namespace")
    lines = {line["owner_namespace"]: line for line in report["lines"] if line["held"] and line["owner_namespace"]}
    names = {name for (name,) in truth if name}
    assert set(lines) == names
    for name in names:
        assert seconds(lines[name]) == pytest.approx(of_truth(truth[name,]), rel=1e-6, abs=1e-3)
        for currency, money in truth[name,].money.items():
            assert cost(lines[name], currency) == pytest.approx(money.total, rel=1e-6, abs=1e-4)


async def test_report_lines_sum_to_the_metered_capacity(site: Running) -> None:
    report = await site.json("/api/v1/report?window=2026-09-01..2026-09-20&by=workload,team,model")
    assert report["trust"]["missing_seconds"] == 0.0
    total = sum(line["allocated_seconds"] for line in report["lines"])
    assert total == pytest.approx(report["trust"]["capacity_seconds"], rel=1e-9)


async def test_paged_report_has_all_special_owner_lines_and_the_whole_total(site: Running) -> None:
    whole = await site.json("/api/v1/report?window=7d&by=workload")
    part = await site.json("/api/v1/report?window=7d&by=workload&offset=2&limit=3")
    held = [line for line in whole["lines"] if line["held"]]
    assert [line for line in part["lines"] if line["held"]] == held[2:5]
    assert [line for line in part["lines"] if not line["held"]] == [line for line in whole["lines"] if not line["held"]]
    assert part["total"] == whole["total"]
    assert part["paging"] == {"offset": 2, "limit": 3, "lines": len(held)}


async def test_days_of_the_service_time_zone_are_exact(
    fleet_prometheus: FleetServer,
) -> None:
    async with running(fleet_prometheus.url, timezone="Europe/Berlin") as site:
        start = 1_789_077_600  # 2026-09-10 22:00 UTC
        for _ in range(2):
            day = await site.json("/api/v1/report?window=2026-09-11")
            assert (day["window"]["from_seconds"], day["window"]["to_seconds"]) == (start, start + 86_400)
        truth = truth_between(start, start + 86_400)
        assert day["trust"]["capacity_seconds"] == pytest.approx(truth.capacity_seconds, rel=1e-9)
        page = await site.get("/?window=2026-09-11")
        assert "2026-09-10 22:00 to 2026-09-11 22:00 UTC" in page.text
        months = await site.json("/allocation?window=2026-08-30..2026-09-02&accumulate=month&currency=USD")
        assert [one["window"]["start"] for one in first_windows(months)] == [
            "2026-08-29T22:00:00Z",
            "2026-08-31T22:00:00Z",
        ]


def first_windows(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [next(iter(one.values())) for one in document["data"]]


async def test_window_within_an_hour_is_refused_with_a_valid_window(site: Running) -> None:
    for path in ("/api/v1/report?window=", "/allocation?currency=USD&window="):
        answer = await site.get(path + "2026-09-11T10:00%2B05:30..2026-09-11T12:00%2B05:30")
        assert answer.status == 400
        assert "such as 2026-09-11T04:00Z..2026-09-11T07:00Z" in answer.text


async def test_filters_keep_lines_with_one_of_the_values(site: Running) -> None:
    whole = await site.json("/api/v1/report?window=7d&by=team,namespace")
    teams = sorted({line["team"] for line in whole["lines"] if line["team"]})[:2]
    commas = await site.json(f"/api/v1/report?window=7d&by=team,namespace&filter.team={','.join(teams)}")
    repeated = await site.json(
        f"/api/v1/report?window=7d&by=team,namespace&filter.team={teams[0]}&filter.team={teams[1]}"
    )
    assert {line["team"] for line in commas["lines"]} == set(teams)
    assert repeated["lines"] == commas["lines"]


async def test_empty_filter_selects_lines_without_a_value(site: Running) -> None:
    report = await site.json("/api/v1/report?window=7d&by=team&filter.team=")
    assert {line["team"] for line in report["lines"]} == {None}


async def test_labels_group_and_filter_lines(site: Running) -> None:
    report = await site.json("/api/v1/report?window=7d&by=label:project,namespace&filter.label:environment=dev,none")
    lines = {line["labels"]["project"] for line in report["lines"] if line["labels"]}
    truth = truth_between(WEEK, END_SECONDS).total("labels")
    dev = {labels: totals for (labels,), totals in truth.items() if pairs(labels).get("environment") == "dev"}
    assert lines == {pairs(labels)["project"] for labels in dev if "project" in pairs(labels)}
    total = sum(totals.seconds.total for totals in dev.values())
    assert report["total"]["allocated_seconds"] == pytest.approx(total, rel=1e-6)
    assert report["filters"] == {"label:environment": ["dev", "none"]}
    for query, said in (
        ("by=label:", "names no label; allowed: label:KEY"),
        ("filter.label:a/b/c=d", "names no label; allowed: label:KEY"),
        ("&".join(f"filter.label:k{number}=x" for number in range(9)), "names 9 labels; allowed: at most 8"),
    ):
        assert said in (await site.get(f"/api/v1/report?{query}")).text


async def test_series_has_a_part_per_day_that_sums_to_the_line(site: Running) -> None:
    report = await site.json("/api/v1/report?window=7d&by=team&series=true")
    assert len(report["periods"]) == 8
    for line in report["lines"]:
        assert sum(part["allocated_seconds"] for part in line["series"]) == pytest.approx(line["allocated_seconds"])


@pytest.mark.parametrize(
    ("form", "content_type", "ending"),
    [("csv", "text/csv", "csv"), ("html", "text/html", "html"), ("focus", "text/csv", "csv")],
)
async def test_report_download_has_its_file_name_and_content_type(
    site: Running, form: str, content_type: str, ending: str
) -> None:
    answer = await site.get(f"/api/v1/report?window=2026-09-10..2026-09-12&by=team&format={form}")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(content_type)
    disposition = answer.headers["content-disposition"]
    assert disposition.startswith('attachment; filename="')
    assert "20260910T00-20260913T00" in disposition
    assert disposition.endswith(f'.{ending}"')


async def test_the_csv_has_the_same_total_as_the_json(site: Running) -> None:
    report = await site.json("/api/v1/report?window=7d&by=team")
    answer = await site.get("/api/v1/report?window=7d&by=team&format=csv&withNotes=true")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    (total,) = [row for row in rows if row["record"] == "Total"]
    assert float(total["gpu_hours"]) == round(report["total"]["allocated_seconds"] / 3600, 3)
    assert float(total["cost_USD"]) == round(cost(report["total"], "USD"), 2)
    owners = await site.get("/api/v1/report?window=7d&by=team&format=csv")
    assert len(list(csv.DictReader(io.StringIO(owners.text)))) == sum(line["held"] for line in report["lines"])


async def test_table_is_shown_inline(site: Running) -> None:
    answer = await site.get("/api/v1/report?window=7d&format=table")
    assert "GPU-hours" in answer.text
    assert "content-disposition" not in answer.headers


async def test_every_parameter_mistake_is_reported_with_its_place_and_fix(site: Running) -> None:
    answer = await site.get("/api/v1/report?window=someday&by=namespce&filter.teams=a&limit=-1&format=pdf&series=maybe")
    assert answer.status == 400
    reported = {problem["where"]: problem for problem in answer.json()["problems"]}
    assert set(reported) == {"window", "by", "filter.teams", "limit", "format", "series"}
    assert "did you mean 'filter.team'?" in reported["filter.teams"]["fix"]
    assert "did you mean 'namespace'?" in reported["by"]["fix"]
    assert all(problem["error"] and problem["fix"] for problem in reported.values())
    assert answer.headers["cache-control"] == "no-store"


async def test_focus_refuses_a_filter_that_would_break_a_split_charge(site: Running) -> None:
    answer = await site.get("/api/v1/report?window=7d&format=focus&filter.team=vision")
    assert answer.status == 400
    assert answer.json()["where"] == "filter.team"


async def test_summary_costs_sum_to_the_total_and_the_funnel_narrows(site: Running) -> None:
    summary = await site.json("/api/v1/summary?window=7d")
    truth = truth_between(WEEK, END_SECONDS)
    for money in summary["money"]:
        parts = ("active", "idle", "unknown", "unattributed", "unallocated")
        assert sum(money[part] for part in parts) == pytest.approx(money["total"])
        of_active = [money[part] for part in ("effective", "ineffective", "unprofiled") if money[part] is not None]
        assert sum(of_active) == pytest.approx(money["active"])
        assert money["total"] == pytest.approx(truth.sum().money[money["currency"]].total, rel=1e-6)
    funnel = summary["funnel"]
    assert funnel["total"] == pytest.approx(SMALL_FLEET.nodes * SMALL_FLEET.gpus_per_node, rel=0.02)
    assert funnel["total"] > funnel["allocated"] > funnel["active"] > funnel["effective"] > 0


async def test_months_have_the_cost_to_date_and_a_forecast(site: Running) -> None:
    months = (await site.json("/api/v1/months"))["months"]
    first = 1_788_220_800  # 2026-09-01
    truth = truth_between(first, END_SECONDS).sum()
    assert {month["currency"] for month in months} == {"USD", "EUR"}
    for month in months:
        spent = truth.money[month["currency"]].total
        assert month["spent"] == pytest.approx(spent, rel=1e-6)
        assert month["forecast"] == pytest.approx(spent * 30 / (20 + 14 / 24), rel=0.1)
        assert month["last_month"] is None, "the record of August lacks its first days"


async def test_every_answer_matches_the_published_schema(fleet_prometheus: FleetServer) -> None:
    openapi = document()
    async with running(fleet_prometheus.url, currency="USD") as site:
        await site.round()
        for endpoint in ENDPOINTS:
            found = await site.json(endpoint.path)
            schema = {"$ref": f"#/components/schemas/{name_of(endpoint.answer)}", "components": openapi["components"]}
            assert not problems(found, schema)
            assert set(found) <= set(openapi["components"]["schemas"][name_of(endpoint.answer)]["properties"])


async def test_client_with_a_current_etag_gets_304(site: Running) -> None:
    first = await site.get("/api/v1/report?window=7d&by=team")
    again = await site.get("/api/v1/report?window=7d&by=team", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    other = await site.get("/api/v1/report?window=6d&by=team", headers={"If-None-Match": first.headers["etag"]})
    assert other.status == 200


async def test_answer_is_compressed_if_accepted(site: Running) -> None:
    plain = await site.get("/api/v1/report?window=7d&by=workload", headers={"Accept-Encoding": "identity"})
    async with (
        ClientSession(auto_decompress=False) as session,
        session.get(f"{site.url}/api/v1/report?window=7d&by=workload", headers={"Accept-Encoding": "gzip"}) as response,
    ):
        packed = await response.read()
        assert response.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed) == plain.body


async def test_write_methods_are_refused(site: Running) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        answer = await site.get("/api/v1/report", method=method)
        assert answer.status == 405
        assert "GET" in answer.headers["allow"]
    head = await site.get("/api/v1/freshness", method="HEAD")
    assert (head.status, head.body) == (200, b"")


async def test_every_answer_has_the_security_headers(site: Running) -> None:
    for path in ("/api/v1/freshness", "/healthz", "/nothing", "/metrics", "/openapi.json"):
        headers = (await site.get(path)).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["x-frame-options"] == "SAMEORIGIN", path
        assert headers["referrer-policy"] == "no-referrer", path


async def test_service_behind_a_proxy_answers_with_and_without_the_prefix(fleet_prometheus: FleetServer) -> None:
    async with running(fleet_prometheus.url, external_url="https://example.org/team/cost/") as site:
        assert (await site.get("/healthz")).status == 200
        assert (await site.get("/team/cost/healthz")).status == 200
        with_prefix = await site.json("/team/cost/api/v1/report?window=7d")
        assert with_prefix == await site.json("/api/v1/report?window=7d")
        assert (await site.json("/team/cost/openapi.json"))["servers"] == [{"url": "/team/cost"}]
        bare = await site.get("/team/cost?window=7d")
        assert (bare.status, bare.headers["location"]) == (308, "/team/cost/?window=7d")
        missing = await site.get("/team/cost/nothing")
        assert missing.status == 404
        assert "/team/cost/openapi.json" in missing.json()["fix"]


async def test_metrics_export_the_cost_of_the_month(site: Running) -> None:
    await site.round()
    page = (await site.get("/metrics")).text
    truth = truth_between(1_788_220_800, END_SECONDS).sum()
    (line,) = [line for line in page.splitlines() if line.startswith('gpu_cost_month_to_date{currency="USD"}')]
    assert float(line.split()[1]) == pytest.approx(truth.money["USD"].total, rel=1e-6)
    assert "gpu_exporter_simulated" in page or "simulated" in page


async def test_recommendations_can_be_filtered_by_owner(site: Running) -> None:
    await site.round()
    every = (await site.json("/api/v1/recommendations"))["recommendations"]
    assert every
    namespace = every[0]["owner_namespace"]
    some = (await site.json(f"/api/v1/recommendations?filter.namespace={namespace}"))["recommendations"]
    assert some == [advice for advice in every if advice["owner_namespace"] == namespace]


async def test_freshness_reports_how_recent_the_data_is(site: Running) -> None:
    await site.round()
    freshness = await site.json("/api/v1/freshness")
    assert freshness["read_until_seconds"] == END_SECONDS
    assert freshness["now_seconds"] == NOW
    assert freshness["problem"] is None
    assert freshness["simulated"] is True


def test_every_dimension_has_a_filter() -> None:
    assert {parameter.name for parameter in FILTERS} >= {"filter.cluster", "filter.pool", "filter.mode"}

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from fleet_support import END_SECONDS, SMALL_FLEET, FleetServer, backfilled, prometheus, truth_between
from service_support import running

from exporter.cost.store import DayStore
from exporter.errors import StoreError

LIVE_FLEET = replace(SMALL_FLEET, nodes=4)
DAY = 86_400
MIDNIGHT = END_SECONDS // DAY * DAY
SUM = "/api/v1/report?window=7d&by="


class Gate:
    """A proxy in front of a Prometheus that can delay or refuse queries, and records their headers."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.open = asyncio.Event()
        self.open.set()
        self.refuses = False
        self.refused: tuple[bytes, ...] = ()
        """Queries with all of these words are refused."""
        self.headers: set[str] = set()
        """Names of all request headers, in lower case, and their values."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.headers |= {part for name, value in request.headers.items() for part in (name.lower(), value)}
        body = await request.read()
        await self.open.wait()
        if self.refuses or (self.refused and all(word in body for word in self.refused)):
            return web.json_response({"status": "error", "errorType": "unavailable", "error": "overloaded"}, status=503)
        kind = request.headers.get("Content-Type")
        async with (
            ClientSession() as session,
            session.request(
                request.method,
                self.target + request.path_qs,
                data=body,
                headers={"Content-Type": kind} if kind else {},
            ) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)


@asynccontextmanager
async def gated(target: str) -> AsyncIterator[tuple[str, Gate]]:
    gate = Gate(target)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", gate.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", gate
    finally:
        gate.open.set()
        await runner.cleanup()


@pytest.fixture(scope="module")
def live_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the blocks of a fleet that is read in 0.1 s: each service here reads all of it, some more than once."""
    return backfilled(LIVE_FLEET, tmp_path_factory.mktemp("live-blocks"))


@pytest.fixture(scope="module")
def live(live_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    """Run a Prometheus that tests only read."""
    directory = tmp_path_factory.mktemp("live")
    with prometheus(directory, shutil.copytree(live_blocks, directory / "data"), LIVE_FLEET) as server:
        yield server


@pytest.fixture
def own_prometheus(live_blocks: Path, tmp_path: Path) -> Iterator[FleetServer]:
    """Run a Prometheus that a test may end."""
    with prometheus(tmp_path, shutil.copytree(live_blocks, tmp_path / "data"), LIVE_FLEET) as server:
        yield server


async def test_fifty_identical_queries_cause_one_reading(live: FleetServer) -> None:
    async with running(live.url) as site:
        answers = await asyncio.gather(*(site.get("/api/v1/report?window=7d&by=team") for _ in range(50)))
        assert {answer.status for answer in answers} == {200}
        assert len({answer.body for answer in answers}) == 1
        assert site.fleet.readings.begun == 1


async def test_report_is_read_again_only_after_a_new_hour(live: FleetServer) -> None:
    now = END_SECONDS - 2100.0
    async with running(live.url, now=now) as site:
        await site.round()
        before = await site.json("/api/v1/report?window=7d&by=")
        begun = site.fleet.readings.begun
        site.clock.now += 300
        await site.round()
        assert await site.json("/api/v1/report?window=7d&by=") == before
        assert site.fleet.readings.begun == begun
        site.clock.now = END_SECONDS + 1200.0
        await site.round()
        after = await site.json("/api/v1/report?window=7d&by=")
        assert after["window"]["to_seconds"] == END_SECONDS
        assert after["total"] != before["total"]


async def test_the_first_visitor_does_not_wait_for_the_long_readings(live: FleetServer) -> None:
    async with running(live.url) as site:
        await site.round()
        begun = site.fleet.readings.begun
        assert begun >= 2
        assert "From GPUs to work" in (await site.get("/")).text
        window = "window=30d&by=cluster,namespace,kind,workload,team"
        assert (await site.get(f"/api/v1/report?{window}")).status == 200
        # The page still needs the days of the most wasteful workloads.
        assert site.fleet.readings.begun - begun <= 1


async def test_victoriametrics_is_supported_as_a_source(fleet_victoria: FleetServer) -> None:
    async with running(fleet_victoria.url) as site:
        assert await site.round()
        freshness = await site.json("/api/v1/freshness")
        assert freshness["read_until_seconds"] == pytest.approx(END_SECONDS, abs=300)
        assert freshness["problem"] is None
        report = await site.json("/api/v1/report?window=7d&by=")
        truth = truth_between(END_SECONDS - 7 * DAY, END_SECONDS).sum()
        assert report["total"]["allocated_seconds"] == pytest.approx(truth.seconds.total, rel=1e-6)
        assert report["engine"].startswith("VictoriaMetrics")


async def test_too_many_different_queries_get_503_with_retry_after(live: FleetServer) -> None:
    async with gated(live.url) as (url, gate), running(url) as site:
        gate.open.clear()
        asked = [asyncio.ensure_future(site.get(f"/api/v1/report?window={hours}h")) for hours in range(1, 41)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        first = done.pop().result()
        assert first.status == 503
        assert int(first.headers["retry-after"]) > 0
        assert "too many" in first.json()["message"]
        gate.open.set()
        rest = await asyncio.gather(*waiting)
        assert [answer.status for answer in rest].count(200) == 15


async def test_pages_stay_available_during_a_prometheus_outage_with_their_age(own_prometheus: FleetServer) -> None:
    async with running(own_prometheus.url) as site:
        await site.round()
        before = await site.json(SUM)
        assert (await site.get("/", headers={"Accept": "text/html"})).status == 200
        own_prometheus.process.kill()
        own_prometheus.process.wait()
        site.clock.now += 3600
        assert not await site.round()
        after = await site.json(SUM)
        assert after["total"] == before["total"]
        (note,) = after["trust"]["notes"][:1]
        assert "figures as read at 2026-09-21 14:25 UTC" in note
        freshness = await site.json("/api/v1/freshness")
        assert "cannot connect" in freshness["problem"]
        assert freshness["read_until_seconds"] == END_SECONDS
        assert (await site.get("/readyz")).status == 200
        page = await site.get("/", headers={"Accept": "text/html"})
        assert page.status == 200
        assert "cannot connect" in page.text
        assert 'gpu_cost_service_read_errors_total{reason="unreachable"} 1' in (await site.get("/metrics")).text


async def test_unread_data_during_a_prometheus_outage_is_reported_with_its_fix(own_prometheus: FleetServer) -> None:
    own_prometheus.process.kill()
    own_prometheus.process.wait()
    async with running(own_prometheus.url) as site:
        assert (await site.get("/readyz")).status == 503
        await site.round()
        assert (await site.get("/readyz")).status == 200
        answer = await site.get(SUM)
        assert answer.status == 503
        assert "cannot connect" in answer.json()["message"]
        assert "retry-after" in answer.headers
        page = await site.get("/", headers={"Accept": "text/html"})
        assert page.status in {200, 503}
        assert "<h1" in page.text
        assert "cannot connect" in page.text


async def test_figures_are_current_again_after_a_prometheus_outage(
    own_prometheus: FleetServer,
) -> None:
    async with gated(own_prometheus.url) as (url, gate), running(url) as site:
        await site.round()
        await site.json(SUM)
        gate.refuses = True
        site.clock.now += 3600
        assert not await site.round()
        assert (await site.json(SUM))["trust"]["notes"]
        gate.refuses = False
        site.clock.now += 60
        assert await site.round()
        report = await site.json(SUM)
        assert not [note for note in report["trust"]["notes"] if "as read at" in note]
        assert report["window"]["to_seconds"] == END_SECONDS + 3600


async def test_cost_of_last_month_is_not_shown_for_this_month(own_prometheus: FleetServer) -> None:
    async with gated(own_prometheus.url) as (url, gate), running(url) as site:
        await site.round()
        assert "gpu_cost_month_to_date{" in (await site.get("/metrics")).text
        gate.refuses = True
        site.clock.now += 3600
        await site.round()
        assert "gpu_cost_month_to_date{" in (await site.get("/metrics")).text
        assert (await site.json("/api/v1/months"))["months"]
        site.clock.now += 11 * DAY
        await site.round()
        assert "gpu_cost_month_to_date{" not in (await site.get("/metrics")).text
        assert (await site.get("/api/v1/months")).status == 503


async def test_partly_read_month_is_not_shown_as_complete(own_prometheus: FleetServer, tmp_path: Path) -> None:
    store = str(tmp_path / "days.sqlite")
    async with running(own_prometheus.url, store=store) as site:
        await site.keep()
    async with gated(own_prometheus.url) as (url, gate), running(url, store=store) as site:
        gate.refuses = True
        await site.round()
        assert (await site.json("/api/v1/months"))["months"] == []
        assert "gpu_cost_month_to_date{" not in (await site.get("/metrics")).text
        gate.refuses = False
        await site.round()
        assert (await site.json("/api/v1/months"))["months"]


async def test_unread_budget_is_retried_before_a_newer_hour(live: FleetServer, tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text("budgets:\n  - {name: vision, amount: 1000, currency: USD, period: month, owner: {team: vision}}\n")
    async with gated(live.url) as (url, gate), running(url, budgets=file) as site:
        gate.refused = (b"quantity%3D%22cost%22", b"team")
        await site.round()
        assert 'gpu_budget_limit{budget="vision"' in (page := (await site.get("/metrics")).text)
        assert "gpu_budget_spent{" not in page
        assert "gpu_cost_service_last_read_timestamp_seconds " not in page, "GPUCostServiceStale fires in the end"
        assert 'gpu_cost_service_read_errors_total{reason="budgets_unread"} 1' in page
        gate.refused = ()
        site.clock.now += 300.0
        await site.round()
        page = (await site.get("/metrics")).text
        assert 'gpu_budget_spent{budget="vision"' in page
        assert "gpu_cost_service_last_read_timestamp_seconds " in page


async def test_visitor_headers_are_not_forwarded_to_prometheus(live: FleetServer) -> None:
    sent = {
        "Authorization": "Bearer of-a-visitor",
        "Cookie": "session=of-a-visitor",
        "X-Scope-OrgID": "of-a-visitor",
        "X-Forwarded-User": "of-a-visitor",
        "Accept-Language": "of-a-visitor",
    }
    async with (
        gated(live.url) as (url, gate),
        running(url, prometheus_headers="X-Scope-OrgID=ours") as site,
    ):
        for path in (SUM, "/api/v1/pods", "/allocation?window=1d&currency=USD", "/"):
            assert (await site.get(path, headers=sent)).status == 200
        assert "ours" in gate.headers
        assert not [part for part in gate.headers if "of-a-visitor" in part]
        assert "authorization" not in gate.headers
        assert "cookie" not in gate.headers


async def test_prometheus_without_the_rules_is_reported_with_the_fix(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with prometheus(tmp_path, data, LIVE_FLEET) as empty:
        async with running(empty.url) as site:
            await site.round()
            problem = (await site.json("/api/v1/freshness"))["problem"]
            assert "rules/prometheus-rules.yaml" in problem
            report = await site.json(SUM)
            assert report["total"]["allocated_seconds"] == 0
            assert report["total"]["money"] == []
            assert report["trust"]["price_coverage_ratio"] is None


async def test_closed_days_are_shown_after_prometheus_has_lost_them(
    own_prometheus: FleetServer, tmp_path: Path
) -> None:
    store = tmp_path / "days.sqlite"
    async with running(own_prometheus.url, store=store, history="10d") as site:
        await site.keep()
        await site.round()
        freshness = await site.json("/api/v1/freshness")
        assert freshness["closed_until_seconds"] == MIDNIGHT
        assert freshness["first_day_seconds"] == MIDNIGHT - 10 * DAY
    own_prometheus.process.kill()
    own_prometheus.process.wait()
    truth = truth_between(MIDNIGHT - 10 * DAY, MIDNIGHT, LIVE_FLEET).sum()
    async with running(own_prometheus.url, store=store) as site:
        await site.round()
        report = await site.json("/api/v1/report?window=2026-09-11..2026-09-20&by=")
        assert report["trust"]["whole"] is True
        assert report["total"]["allocated_seconds"] == pytest.approx(truth.seconds.total, rel=1e-9)
        partly = await site.json("/api/v1/report?window=2026-09-20..2026-09-21&by=")
        assert partly["trust"]["failures"]
        day = truth_between(MIDNIGHT - DAY, MIDNIGHT, LIVE_FLEET).sum()
        assert partly["total"]["allocated_seconds"] == pytest.approx(day.seconds.total, rel=1e-9)


async def test_store_locked_by_another_service_is_read_and_reported(live: FleetServer, tmp_path: Path) -> None:
    store = tmp_path / "days.sqlite"
    async with running(live.url, store=store, history="2d") as writer:
        await writer.keep()
        async with running(live.url, store=store) as reader:
            await reader.round()
            freshness = await reader.json("/api/v1/freshness")
            assert freshness["closed_until_seconds"] == MIDNIGHT
            assert freshness["problem"]
            report = await reader.json("/api/v1/report?window=2026-09-20&by=")
            assert report["engine"] == "store of closed days"


async def test_invalid_store_prevents_the_start(live: FleetServer, tmp_path: Path) -> None:
    store = tmp_path / "days.sqlite"
    store.write_text("not a database, and longer than its header would be")
    with pytest.raises(StoreError):
        async with running(live.url, store=store):
            raise AssertionError
    assert store.read_text().startswith("not a database"), "a foreign file stays unchanged"


async def test_closed_day_is_read_from_the_store(live: FleetServer, tmp_path: Path) -> None:
    store = tmp_path / "days.sqlite"
    async with running(live.url, store=store, history="3d") as site:
        await site.round()
        before = await site.json("/api/v1/report?window=2026-09-19&by=team")
        assert before["engine"].startswith("Prometheus")
        await site.keep()
        await site.round()
        after = await site.json("/api/v1/report?window=2026-09-19&by=team")
        assert after["engine"] == "store of closed days"
        assert after["total"]["allocated_seconds"] == pytest.approx(before["total"]["allocated_seconds"], rel=1e-12)
    assert len(DayStore(store).closed_days()) == 3


async def test_labels_of_owners_are_offered_after_a_round(live: FleetServer) -> None:
    async with running(live.url) as site:
        await site.round()
        assert site.fleet.labels.value["environment"] == ("dev", "prod")
        assert 'href="/by/label:project"' in (await site.get("/")).text


async def test_budgets_are_computed_and_reloaded(live: FleetServer, tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text("budgets:\n  - {name: vision, amount: 1000, currency: USD, period: month, owner: {team: vision}}\n")
    async with running(live.url, budgets=file) as site:
        await site.round()
        (budget,) = (await site.json("/api/v1/budgets"))["budgets"]
        truth = truth_between(1_788_220_800, END_SECONDS, LIVE_FLEET).sum(team="vision")
        assert budget["spent"] == pytest.approx(truth.money["USD"].total, rel=1e-6)
        file.write_text("budgets:\n  - {name: vision, amount: none}\n")
        site.fleet.load_budgets()
        await site.round()
        assert [one["name"] for one in (await site.json("/api/v1/budgets"))["budgets"]] == ["vision"]
        file.write_text("budgets:\n  - {name: all, amount: 5, currency: EUR, period: month}\n")
        site.fleet.load_budgets()
        await site.round()
        assert [one["name"] for one in (await site.json("/api/v1/budgets"))["budgets"]] == ["all"]

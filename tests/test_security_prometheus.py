"""Attacks of a compromised Prometheus on the cost service, and of one reader on the others."""

import asyncio
import contextlib

import aiohttp
from fleet_support import StubLedger, serving
from service_support import NOW, running

from exporter.cost.window import DAY_SECONDS
from exporter.service.cache import MOST_OF_ONE
from exporter.service.routes import client_of

API = ("/api/v1/report?window=7d&by=team", "/api/v1/summary", "/allocation?window=7d&aggregate=team")
PAGES = ("/", "/by/team", "/by/node", "/recommendations", "/budgets", "/about")


async def test_impossible_figures_are_omitted_and_named() -> None:
    lines = [({"team": "a"}, "1e308"), ({"team": "b"}, "1e308"), ({"team": "c"}, "3600"), ({"team": "d"}, "Inf")]
    money = [({"team": of["team"], "currency": "USD"}, value) for of, value in lines]
    async with serving(StubLedger(lines=lines, money=money)) as stub, running(stub.url) as site:
        for path in (*API, *PAGES, *(f"{API[0]}&format={form}" for form in ("csv", "html", "table"))):
            answer = await site.get(path)
            assert answer.status == 200, (path, answer.text)
        report = await site.json(API[0])
    assert [line["team"] for line in report["lines"] if line["team"]] == ["c"]
    assert any("values beyond 1e+15 are left out" in note for note in report["trust"]["notes"])


async def test_hour_in_the_far_future_breaks_no_page() -> None:
    stub = StubLedger(lines=[({"team": "a"}, "3600")], newest_hour=9e14)
    async with serving(stub) as prometheus, running(prometheus.url) as site:
        assert not await site.round()
        for path in (*API, *PAGES, "/readyz", "/metrics"):
            answer = await site.get(path, {"Accept": "text/html"})
            assert answer.status == 200, (path, answer.text)
        assert "more than a day in the future" in (await site.get("/readyz")).text
        stub.newest_hour = NOW + DAY_SECONDS - 60
        assert await site.round(), "a clock may have a small error"


async def test_readings_stop_once_their_clients_disconnect() -> None:
    stub = StubLedger(lines=[({"team": "a"}, "3600")], delay_seconds=0.05)
    async with serving(stub) as prometheus, running(prometheus.url) as site:
        for number in range(1, 6):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.15):
                    await site.get(f"/allocation?window=48h&step=1h&filter=team:%22{number}%22")
        await asyncio.sleep(0.2)
        asked = len(stub.asked)
        assert asked
        await asyncio.sleep(0.5)
        assert len(stub.asked) == asked


async def test_reading_continues_while_one_of_two_clients_waits() -> None:
    stub = StubLedger(lines=[({"team": "a"}, "3600")], delay_seconds=0.05)
    async with serving(stub) as prometheus, running(prometheus.url) as site:
        path = "/api/v1/report?window=3d&by=team"
        leaves, stays = (asyncio.ensure_future(site.get(path)) for _ in range(2))
        await asyncio.sleep(0.1)
        leaves.cancel()
        assert (await stays).status == 200
        assert site.fleet.readings.begun == 1


async def test_one_client_leaves_slots_for_others() -> None:
    stub = StubLedger(lines=[({"team": "a"}, "3600")], delay_seconds=0.3)
    other = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0), limit=0)
    greedy = aiohttp.TCPConnector(limit=0)
    async with (
        serving(stub) as prometheus,
        running(prometheus.url) as site,
        aiohttp.ClientSession(connector=greedy) as many,
        aiohttp.ClientSession(connector=other) as one,
    ):

        async def ask(session: aiohttp.ClientSession, number: int) -> int:
            async with session.get(f"{site.url}/api/v1/report?window={number + 1}h&by=team") as answer:
                return answer.status

        flood = [asyncio.ensure_future(ask(many, number)) for number in range(40)]
        await asyncio.sleep(0.5)
        assert await ask(one, 100) == 200
        done = [task.result() for task in flood if task.done()]
        assert done.count(503) == 40 - MOST_OF_ONE
        assert len(done) < 40, "the others do not wait for the flood"
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_daily_steps_use_one_reading_and_hourly_steps_are_limited() -> None:
    stub = StubLedger(lines=[({"team": "a"}, "3600")])
    async with serving(stub) as prometheus, running(prometheus.url) as site:
        found = await site.json("/allocation?window=30d&step=1d&aggregate=team")
        assert len(found["data"]) == 30
        assert all(round(one["a"]["gpuHours"], 6) == 1 for one in found["data"])
        assert len(stub.asked) < 60
        refused = await site.get("/allocation?window=16d&step=1h&aggregate=team")
    assert refused.status == 400
    assert "more than 48" in refused.text


def test_clients_are_identified_by_address_or_ipv6_network() -> None:
    assert client_of(("10.0.0.1", 5)) == client_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    network = client_of(("2001:db8::1", 5, 0, 0))
    assert network == client_of(("2001:db8::ffff:2", 6, 0, 0)) != client_of(("2001:db8:0:1::", 5))
    assert client_of(("fe80::1%eth0", 5, 0, 2)) == "fe80::/64"
    assert client_of("") == ""

"""Access and requests: agent and service against malicious clients."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import bcrypt
import pytest
from agent_support import AgentProcess, running_agent
from service_support import PASSWORD, Raw, Running, ask, hashed, raw, running, web_file
from test_web_config import ALICE, basic, served

from exporter.web.access import MOST_WAITING, Passwords
from exporter.web.server import PATHS
from gpu_simulator.stack import free_port

AGENT_PAGES = (*(path for path in PATHS if not path.startswith("/-/")), "/?fragment=1", "/nothing")
SERVICE_PAGES = (
    *("/", "/owner", "/by/team", "/budgets", "/about", "/nothing", "/cost", "/static/none", "/metrics", "/readyz"),
    *("/api/v1/report", "/api/v1/report?format=html", "/allocation/compute?window=7d", "/openapi.json"),
)
STRANGER = {"Origin": "https://evil.example", "Cookie": "session=1"}
ELSEWHERE = (
    "/../../../../etc/passwd",
    "/static/../../../../etc/passwd",
    "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/static/..%5c..%5cetc%5cpasswd",
    "/static//etc/passwd",
    "//etc/passwd",
    "/%2fetc%2fpasswd",
    "/api/v1/../../etc/passwd",
    "/static/page.css%00.js",
    "/.git/config",
    "/static/%252e%252e/app.py",
    "file:///etc/passwd",
    "/?fragment=../../etc/passwd",
)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent("--simulate", "demo") as one:
        one.until(lambda page: page.get("gpu_exporter_simulated") == 1, "a page")
        yield one


@asynccontextmanager
async def service(external_url: str | None = None) -> AsyncIterator[tuple[Running, int]]:
    """Run a service without a Prometheus: it still serves every page and every error."""
    async with running(f"http://127.0.0.1:{free_port(0)}", prometheus_retries=0, external_url=external_url) as one:
        yield one, int(one.url.rpartition(":")[2])


async def test_unknown_user_costs_the_same_bcrypt_work(monkeypatch: pytest.MonkeyPatch) -> None:
    work: list[int] = []
    real = bcrypt.checkpw

    def counted(password: bytes, known: bytes) -> bool:
        work.append(2 ** int(known[4:6]))
        return real(password, known)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    dear = bcrypt.hashpw(b"dear", bcrypt.gensalt(7))
    users = Passwords({"cheap": hashed().encode(), "dear": dear})
    reported = {}
    for user in ("cheap", "dear", "nobody", "", "c" * 1000):
        work.clear()
        assert await users.check(user, b"a guess") == "wrong"
        reported[user] = sum(work)
    assert set(reported.values()) == {2**7}, reported
    work.clear()
    assert await users.check("cheap", PASSWORD.encode()) == "right"
    assert sum(work) == 2**7, "a correct password takes the same work"


async def test_scrapes_continue_during_password_checks_and_excess_guesses_get_503(
    tmp_path: Path,
) -> None:
    dear = bcrypt.hashpw(b"dear", bcrypt.gensalt(9)).decode()
    async with served(web_file(tmp_path, users={"alice": hashed(), "bob": dear})) as one:
        assert (await one.get(auth=ALICE))[0] == 200
        guesses = [asyncio.ensure_future(one.get(auth=basic("bob", str(number)))) for number in range(MOST_WAITING + 4)]
        await asyncio.wait(guesses, return_when=asyncio.FIRST_COMPLETED)
        assert (await one.get(auth=ALICE))[0] == 200
        assert (await one.get("/healthz"))[0] == 200
        assert sum(guess.done() for guess in guesses) < MOST_WAITING, "password checks are still running"
        answers = await asyncio.gather(*guesses)
    assert sorted(status for status, _, _ in answers) == [401] * MOST_WAITING + [503] * 4
    assert {headers.get("Retry-After") for status, _, headers in answers if status == 503} == {"1"}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"Origin": "https://evil.example"}, "no page of a browser"),
        ({"Origin": "null"}, "no page of a browser"),
        ({"Referer": "http://localhost:9400/"}, "no page of a browser"),
        ({"Sec_Fetch_Site": "cross-site"}, "no page of a browser"),
        ({"X_Forwarded_For": "127.0.0.1"}, "not released through a proxy"),
        ({"Forwarded": "for=127.0.0.1"}, "not released through a proxy"),
        ({"Via": "1.1 proxy"}, "not released through a proxy"),
        ({"x_real_ip": "127.0.0.1"}, "not released through a proxy"),
        ({"X_Forwarded_Proto": "http"}, "not released through a proxy"),
        ({"x_envoy_attempt_count": "1"}, "not released through a proxy"),
        ({"X_Request_ID": "0f1e"}, "not released through a proxy"),
        ({"X_Client_IP": "127.0.0.1"}, "not released through a proxy"),
        ({"True_Client_IP": "127.0.0.1"}, "not released through a proxy"),
        ({"X_Original_Forwarded_For": "127.0.0.1"}, "not released through a proxy"),
        ({"X_Remote_User": "system:anonymous"}, "not released through a proxy"),
        ({"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, "not released through a proxy"),
        ({"X_B3_TraceId": "463ac35c9f6413ad48485a3953bb6124"}, "not released through a proxy"),
    ],
)
async def test_browser_and_proxy_headers_prevent_a_driver_release(
    agent: AgentProcess, header: dict[str, str], why: str
) -> None:
    answer = await raw(agent.port, ask("/-/release?seconds=1", "POST", Content_Length="0", **header))
    assert (answer.status, why in answer.body.decode()) == (403, True)
    assert not any("driver released" in line for line in agent.lines)


async def test_release_accepts_the_headers_of_common_clients(agent: AgentProcess) -> None:
    common = {"User_Agent": "curl/8.5.0", "Accept": "*/*", "Accept_Encoding": "identity", "Content_Type": "text/plain"}
    answer = await raw(agent.port, ask("/-/release?seconds=nan", "POST", Content_Length="0", **common))
    assert (answer.status, b"allowed: more than 0" in answer.body) == (400, True)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 421),
        ("cost.example.org.evil.example", 421),
        ("gpu-cost.svc.evil.example", 421),
        ("cost.example.org", 200),
        ("COST.example.org.:8443", 200),
        ("localhost:9401", 200),
        ("127.0.0.1:9401", 200),
        ("[::1]:9401", 200),
        ("gpu-cost.monitoring.svc:9401", 200),
        ("gpu-cost.monitoring.svc.cluster.local", 200),
    ],
)
async def test_service_with_an_external_url_refuses_other_host_names(host: str, status: int) -> None:
    async with service(external_url="https://cost.example.org/cost") as (_, port):
        for page in ("/healthz", "/cost/metrics"):
            assert (await raw(port, ask(page, Host=host))).status == status, page
        assert (await raw(port, ask("/openapi.json", Host="[::1]"))).status == 200


async def test_service_without_an_external_url_accepts_any_host_name() -> None:
    async with service() as (_, port):
        assert (await raw(port, ask("/healthz", Host="cost.example.org"))).status == 200


async def test_refusals_have_a_referrer_policy_and_readiness_text_only_its_own_statuses(tmp_path: Path) -> None:
    async with served(web_file(tmp_path, users={"alice": hashed()})) as one:
        refused = await raw(one.port, ask("/metrics"))
        posted = await raw(one.port, ask("/readyz", "POST", Content_Length="0"))
    assert (refused.status, refused.values("referrer-policy")) == (401, ["no-referrer"])
    assert (posted.status, b"ready;" in posted.body, posted.values("allow")) == (405, False, ["GET, HEAD"])


async def test_driver_release_from_this_host_requires_the_password(tmp_path: Path) -> None:
    async with served(web_file(tmp_path, users={"alice": hashed()})) as one:
        bare = await raw(one.port, ask("/-/release", "POST", Content_Length="0"))
        let_in = await raw(one.port, ask("/-/release", "POST", Content_Length="0", Authorization=ALICE))
    assert (bare.status, let_in.status) == (401, 202)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "CONNECT", "PROPFIND"])
async def test_other_methods_are_refused_without_echo(agent: AgentProcess, method: str) -> None:
    async with service() as (_, port):
        for place, pages in ((agent.port, AGENT_PAGES), (port, SERVICE_PAGES)):
            for page in pages:
                answer = await raw(place, ask(page, method, Cookie="echo-of-a-secret", Content_Length="0"))
                assert answer.status in {400, 404, 405}, (method, page, answer)
                assert b"echo-of-a-secret" not in answer.body


NO_REQUESTS = {
    "two lengths": b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 9\r\n\r\n",
    "length, chunks": b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks within": b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "folded": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: a\r\n Origin: b\r\n\r\n",
    "space before colon": b"GET / HTTP/1.1\r\nHost: a\r\nOrigin : b\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: a\n\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no method": b"<script>alert(1)</script> / HTTP/1.1\r\nHost: a\r\n\r\n",
    "no path": b"GET http://[::1/ HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99),
    "expectation": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: <script>alert(1)</script>\r\n\r\n",
    "expectation elsewhere": b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: x\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", NO_REQUESTS.values(), ids=NO_REQUESTS)
async def test_invalid_request_is_refused_as_text_without_version(agent: AgentProcess, request_bytes: bytes) -> None:
    async with service() as (_, port):
        for place in (agent.port, port):
            answer = await raw(place, request_bytes)
            assert answer.status in {400, 417}, answer
            assert answer.values("content-type") == ["text/plain; charset=utf-8"]
            assert answer.values("x-content-type-options") == ["nosniff"]
            assert answer.values("server") == ["gpu-cost-exporter"]
            assert answer.values("referrer-policy") == ["no-referrer"]
            assert answer.status != 400 or answer.body.startswith(b"this is not an unambiguous HTTP"), answer
    assert not any("Traceback" in line for line in agent.lines)


async def everything(agent: AgentProcess, port: int) -> dict[str, Raw]:
    """Return every page of agent and service, requested by a script of another site."""
    asked = [(agent.port, page) for page in AGENT_PAGES] + [(port, page) for page in SERVICE_PAGES]
    accept = "text/html" if port else "*/*"
    return {f"{place}{page}": await raw(place, ask(page, Accept=accept, **STRANGER)) for place, page in asked}


async def test_cross_origin_reads_and_framing_are_refused_and_no_cookies_are_set(agent: AgentProcess) -> None:
    async with service(external_url="http://localhost/cost") as (_, port):
        answers = await everything(agent, port)
    kinds = set()
    for page, answer in answers.items():
        names = {name for name, _ in answer.headers}
        assert answer.status, page
        assert not [name for name in names if name.startswith("access-control-")], page
        assert "set-cookie" not in names, page
        (kind,) = answer.values("content-type") or [""]
        kinds.add(kind.partition(";")[0])
        if answer.status != 404 or kind:
            assert answer.values("x-content-type-options") == ["nosniff"], page
        if kind.startswith("text/html"):
            (policy,) = answer.values("content-security-policy")
            assert policy.startswith("default-src 'none'"), page
            assert re.search(r"frame-ancestors '(none|self)'", policy), page
            assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0], page
    assert kinds >= {"text/html", "application/json", "text/plain"}, "the pages are not only errors"


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_paths_outside_the_pages_return_no_file(agent: AgentProcess, path: str) -> None:
    async with service() as (_, port):
        for place in (agent.port, port):
            answer = await raw(place, ask(path))
            assert answer.status in {200, 400, 404, 503}, answer
            assert b"root:" not in answer.body
            assert answer.status != 200 or path.startswith("/?"), "only a page with an unknown parameter may answer"


async def test_parameters_never_become_a_header_or_a_redirect() -> None:
    smuggled = "%0d%0aSet-Cookie:%20a=b%0d%0a"
    async with service(external_url="http://localhost/cost") as (_, port):
        for path in (
            f"/cost?a={smuggled}",
            f"/api/v1/report?format=csv&focusVersion={smuggled}",
            f"/api/v1/report?format=csv&window={smuggled}",
            f"/owner?namespace={smuggled}",
            f"/nothing{smuggled}",
        ):
            answer = await raw(port, ask(path))
            assert answer.status
            assert not answer.values("set-cookie"), path
        for path in ("//evil.example/cost", "/cost//evil.example", "/cost/\\evil.example", "/%5cevil.example/.."):
            answer = await raw(port, ask(path))
            assert not any("//evil" in place or "\\" in place for place in answer.values("location")), path
        assert not (await raw(port, ask("/cost?a=1", Host="evil.example"))).values("location")
        (place,) = (await raw(port, ask("/cost?a=1"))).values("location")
        assert place.startswith("/cost/"), "the answer never repeats the client's Host header"


async def test_invalid_input_is_repeated_as_text_only(agent: AgentProcess) -> None:
    evil = "<script>alert(1)</script>"
    async with service() as (_, port):
        for place in (agent.port, port):
            for path in (f"/{evil}", f"/api/v1/report?window={evil}", f"/-/release?seconds={evil}"):
                for accept in ("text/html", "*/*"):
                    answer = await raw(place, ask(path.replace(" ", "%20"), Accept=accept))
                    assert b"<script>alert" not in answer.body or answer.values("content-type")[0].startswith(
                        ("text/plain", "application/json")
                    ), answer
        reported = json.loads((await raw(port, ask(f"/api/v1/report?window={evil}"))).body)
        assert evil in reported["error"]

"""The client of Prometheus' API against real HTTP servers: its queries, tolerated faults, and error messages."""

import base64
import gc
import gzip
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from fleet_support import FleetServer, Server, failure, serving, success, vector

from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost import prometheus
from exporter.cost import prometheus as engine
from exporter.cost.prometheus import MEMORY, MemoryBudget, PrometheusClient, SeriesSample, memory_budget_bytes
from exporter.errors import PrometheusError

ONE = vector(({"team": "a"}, "1.5"))


async def one(request: web.Request) -> web.Response:  # noqa: ARG001 - answers everything
    return success(ONE)


def client(
    url: str, waits: list[float] | None = None, *, memory: MemoryBudget = MEMORY, **settings: object
) -> PrometheusClient:
    """Return a client that records its waits instead of waiting."""

    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(seconds)

    made = PrometheusSettings(url=url, **settings)  # type: ignore[arg-type]
    return PrometheusClient(made, random=lambda: 1.0, sleep=sleep, memory=memory)


async def refused(
    answer: Callable[[web.Request], web.StreamResponse], **settings: object
) -> tuple[PrometheusError, Server]:
    """Return the client's error for an answer, and the server of the answer."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return answer(request)

    async with serving(handler) as server, client(server.url, **settings) as asked:
        with pytest.raises(PrometheusError) as caught:
            await asked.instant("vector(1)", 1_790_000_000)
        return caught.value, server


async def test_query_is_posted_as_a_form_with_a_timeout() -> None:
    async with serving(one) as server, client(server.url + "/prefix/prometheus") as asked:
        assert await asked.instant("sum(x)", 1_790_000_000.001) == (SeriesSample({"team": "a"}, 1.5),)
    (request,), (form,) = server.requests, server.forms
    assert (request.method, request.path) == ("POST", "/prefix/prometheus/api/v1/query")
    assert (form["query"], form["time"], form["timeout"]) == ("sum(x)", "1790000000.001", "60000ms")
    assert (form["partial_response"], form["nocache"]) == ("false", "1")


async def test_non_finite_values_are_omitted() -> None:
    async def answer(_: web.Request) -> web.Response:
        return success(vector(({"a": "1"}, "NaN"), ({"a": "2"}, "+Inf"), ({"a": "3"}, "3")))

    async with serving(answer) as server, client(server.url) as asked:
        assert await asked.instant("x", 1) == (SeriesSample({"a": "3"}, 3.0),)


@pytest.mark.parametrize("collects", [True, False])
async def test_query_leaves_the_garbage_collection_setting_unchanged(collects: bool) -> None:  # noqa: FBT001 - a case
    was = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        async with serving(one) as server, client(server.url) as asked:
            await asked.instant("x", 1)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()


async def test_server_warnings_are_returned_with_the_answer() -> None:
    async def answer(_: web.Request) -> web.Response:
        return success(ONE, warnings=["remote read\nfailed"], infos=["PromQL info: metric might not be a counter"])

    async with serving(answer) as server, client(server.url) as asked:
        assert (await asked.ask_instant("x", 1)).notes == ("remote read failed",)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
async def test_temporary_errors_are_retried_with_increasing_waits(status: int) -> None:
    answers = [web.Response(status=status), web.Response(status=status), success(ONE)]
    waits: list[float] = []

    async def answer(_: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    async with serving(answer) as server, client(server.url, waits) as asked:
        assert await asked.instant("x", 1)
    assert waits == [0.5, 1.0]


async def test_retry_after_sets_the_wait() -> None:
    answers = [web.Response(status=429, headers={"Retry-After": "7"}), success(ONE)]
    waits: list[float] = []

    async def answer(_: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    async with serving(answer) as server, client(server.url, waits) as asked:
        assert await asked.instant("x", 1)
    assert waits == [7.25]


async def test_retries_are_limited() -> None:
    error, server = await refused(lambda _: web.Response(status=503, text="no healthy upstream"), retries=2)
    assert len(server.requests) == 3
    assert (error.reason, error.retriable) == ("server_error", True)
    assert "HTTP 503: no healthy upstream" in str(error)


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        (lambda: failure(400, "parse error: unclosed", "bad_data"), "bad_query", "parse error: unclosed"),
        (lambda: failure(422, "it would load too many samples"), "too_many_samples", "--query.max-samples"),
        (lambda: failure(422, "more than -search.maxSamplesPerQuery=1"), "too_many_samples", "shorter window"),
        (lambda: failure(422, "multiple matches for labels"), "bad_query", "multiple matches"),
        (lambda: web.Response(status=401, text="no org id"), "unauthorised", "X-Scope-OrgID=TENANT"),
        (lambda: web.Response(status=401), "unauthorised", "--prometheus-token-file"),
        (lambda: web.Response(status=403, text="namespaces is forbidden"), "forbidden", "namespaces is forbidden"),
        (lambda: web.Response(status=404, text="404 page not found"), "not_prometheus", "with its path"),
        (lambda: web.Response(status=413), "bad_query", "too long"),
        (lambda: web.Response(status=400, text="remoteAddr"), "not_prometheus", "is not Prometheus' API"),
        (lambda: web.Response(text="<!doctype html>", content_type="text/html"), "not_prometheus", "login"),
        (lambda: web.json_response({"status": "ok"}), "not_prometheus", "its JSON is another"),
        (lambda: success([], "matrix"), "not_prometheus", "no vector"),
    ],
)  # fmt: skip
async def test_permanent_errors_are_reported_at_once_with_their_fix(
    answer: Callable[[], web.StreamResponse], reason: str, words: str
) -> None:
    error, server = await refused(lambda _: answer())
    assert (error.reason, error.retriable, len(server.requests)) == (reason, False, 1)
    assert words in str(error)
    assert str(error).startswith(server.url)


async def test_login_redirect_is_reported_without_its_ticket() -> None:
    place = {"Location": "https://user:pw@sso.example/login?ticket=secret#frag"}
    error, server = await refused(lambda _: web.Response(status=302, headers=place))
    assert error.reason == "redirected"
    assert "sso.example/login" in str(error)
    assert "secret" not in str(error)
    assert "pw" not in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [422, 503])
async def test_server_timeout_is_reported_as_timeout(status: int) -> None:
    error, server = await refused(
        lambda _: failure(status, "query timed out in expression evaluation", "timeout"), retries=1
    )
    assert (error.reason, len(server.requests)) == ("timeout", 2)
    assert "--prometheus-timeout" in str(error)


async def test_timeout_is_not_retried_if_the_caller_can_request_less() -> None:
    async def answer(_: web.Request) -> web.Response:
        return failure(503, "query timed out", "timeout")

    async with serving(answer) as server, client(server.url) as asked:
        with pytest.raises(PrometheusError):
            await asked.ask_range("x", 0, 9, 1, retry_timeouts=False)
        assert len(server.requests) == 1


async def test_invalid_and_partial_answers_are_retried() -> None:
    answers = [web.Response(text='{"status":"succ'), success(ONE, isPartial=True), success(ONE)]

    async def answer(_: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    async with serving(answer) as server, client(server.url) as asked:
        assert await asked.instant("x", 1)
    error, _ = await refused(lambda _: success(ONE, isPartial=True), retries=0)
    assert error.reason == "partial"
    assert "too low" in str(error)


async def test_oversized_answer_is_refused_while_streaming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MOST_BYTES", 1 << 20)
    packed = gzip.compress(b" " * (8 << 20))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    error, server = await refused(lambda _: web.Response(body=packed, headers=headers))
    assert error.reason == "too_large"
    assert "an answer would take more than 1 MiB" in str(error)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("limit", "budget"),
    [("536870912\n", 256 << 20), ("1048576\n", 64 << 20), ("1099511627776000\n", None), ("max\n", None)],
)
def test_memory_budget_is_half_of_the_containers_limit(limit: str, budget: int | None, tmp_path: Path) -> None:
    file = tmp_path / "memory.max"
    file.write_text(limit)
    without = memory_budget_bytes([str(tmp_path / "none")])
    assert memory_budget_bytes([str(tmp_path / "none"), str(file)]) == (without if budget is None else budget)
    assert MEMORY.most_bytes == memory_budget_bytes()


async def test_memory_is_bounded_for_all_answers_of_a_process_together() -> None:
    memory = MemoryBudget(8 << 20)
    packed = gzip.compress(b'{"status":"success","data":{"resultType":"vector","result":[]}}' + b" " * (1 << 20))

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    async with (
        serving(answer) as server,
        client(server.url, memory=memory) as one,
        client(server.url, memory=memory) as other,
    ):
        kept = [await one.ask_instant("x", 1), await other.ask_instant("x", 1)]
        with pytest.raises(PrometheusError, match="all answers together would take more than 8 MiB") as refused:
            await one.ask_instant("x", 1)
        assert refused.value.reason == "too_large"
        kept.clear()
        assert await one.ask_instant("x", 1)
        assert memory.used_bytes == 0


@pytest.mark.parametrize("row", [b"[],", b"{},", b'"",', b'"\\ud800",'])
async def test_memory_budget_includes_decoding(row: bytes) -> None:
    memory = MemoryBudget(64 << 20)
    body = b'{"status":"success","data":{"resultType":"vector","result":[' + row * (1 << 20) + b"0]}}"
    assert len(body) < memory.most_bytes // 6

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with serving(answer) as server, client(server.url, memory=memory) as asked:
        with pytest.raises(PrometheusError, match="more than 64 MiB"):
            await asked.ask_instant("x", 1)
    assert memory.used_bytes == 0


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(b"{}", mtime=0) + b"more",
        b"no gzip",
        gzip.compress(b" " * 300_000, mtime=0)[:-9],
    ],
    ids=["followed", "plain", "cut"],
)
async def test_damaged_gzip_answer_is_refused(body: bytes) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    error, server = await refused(lambda _: web.Response(body=body, headers=headers))
    assert error.reason == "garbage"
    assert len(server.requests) > 1


async def test_unrequested_encoding_is_retried_and_blamed_on_a_proxy() -> None:
    headers = {"Content-Encoding": "br", "Content-Type": "application/json"}
    error, server = await refused(lambda _: web.Response(body=b"packed", headers=headers))
    assert error.reason == "garbage"
    assert "cannot be unpacked; is there a faulty proxy in between?" in str(error)
    assert len(server.requests) > 1


@pytest.mark.parametrize("length", [1, (1 << 18) - 62, 1 << 18, 3 << 18])
async def test_gzip_answer_of_any_length_is_read_whole(length: int) -> None:
    rows = vector(({"name": "x" * length}, "1"))
    packed = gzip.compress(json.dumps({"status": "success", "data": {"resultType": "vector", "result": rows}}).encode())

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    async with serving(answer) as server, client(server.url) as asked:
        (sample,) = await asked.instant("x", 1)
    assert len(sample.labels["name"]) == length


async def test_broken_connection_is_retried() -> None:
    drops = [True, True, False]

    async def answer(request: web.Request) -> web.StreamResponse:
        if drops.pop(0) and request.transport is not None:
            request.transport.abort()
        return success(ONE)

    async with serving(answer) as server, client(server.url) as asked:
        assert await asked.instant("x", 1)
        assert len(server.requests) == 3


async def test_unreachable_unresolvable_and_non_tls_servers_have_distinct_errors() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for url, reason, words in (
        (f"http://127.0.0.1:{port}", "unreachable", "is it running there?"),
        ("http://no-such-host.invalid:9090", "no_such_name", "cannot be resolved"),
    ):
        waits: list[float] = []
        async with client(url, waits) as asked:
            with pytest.raises(PrometheusError) as caught:
                await asked.instant("x", 1)
        assert (caught.value.reason, waits) == (reason, [])
        assert words in str(caught.value)
    async with serving(one) as server, client(server.url.replace("http:", "https:")) as asked:
        with pytest.raises(PrometheusError) as caught:
            await asked.instant("x", 1)
    assert caught.value.reason == "tls"
    assert "https" in str(caught.value)


async def test_refused_connection_after_a_first_answer_is_retriable() -> None:
    async with client("http://127.0.0.1:1") as asked:
        asked._has_answered = True
        with pytest.raises(PrometheusError) as caught:
            await asked.instant("x", 1)
    assert caught.value.retriable


async def test_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with client(url, timeout_seconds=1, retries=0) as asked:
            with pytest.raises(PrometheusError) as caught:
                await asked.instant("x", 1)
    assert caught.value.reason == "timeout"
    assert "no answer within 1 s" in str(caught.value)


async def test_token_file_is_read_for_each_request_and_never_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")

    async def answer(request: web.Request) -> web.StreamResponse:
        return success(ONE) if request.headers["Authorization"] == "Bearer second" else web.Response(status=401)

    async with serving(answer) as server, client(server.url, token_file=token) as asked:
        with pytest.raises(PrometheusError) as caught:
            await asked.instant("x", 1)
        assert str(token) in str(caught.value)
        assert "first" not in str(caught.value)
        token.write_text("second\n")
        assert await asked.instant("x", 1)
        token.unlink()
        with pytest.raises(PrometheusError) as caught:
            await asked.instant("x", 1)
    assert (caught.value.reason, str(token) in str(caught.value)) == ("credentials", True)


async def test_basic_authentication_and_headers_are_sent(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pässwort\n")
    access = {"username": "finops", "password_file": tmp_path / "password", "headers": (("X-Scope-OrgID", "team-a"),)}
    async with serving(one) as server, client(server.url, **access) as asked:
        await asked.instant("x", 1)
    sent = server.requests[0].headers
    assert base64.b64decode(sent["Authorization"].removeprefix("Basic ")).decode() == "finops:pässwort"
    assert sent["X-Scope-OrgID"] == "team-a"


async def test_tls_server_is_verified_and_gets_the_client_certificate(tmp_path: Path) -> None:
    files = _certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(files["ca"]))
    context.load_cert_chain(files["server"], files["server-key"])
    context.verify_mode = ssl.CERT_REQUIRED
    ours = {"cert_file": files["client"], "key_file": files["client-key"]}
    async with serving(one, context) as server:
        async with client(server.url, ca_file=files["ca"], **ours) as asked:
            assert await asked.instant("x", 1)
        async with client(server.url, skip_verify=True, **ours) as asked:
            assert await asked.instant("x", 1)
        for settings, words in (
            (ours, "--prometheus-ca-file"),
            ({"ca_file": files["client-key"]}, "prometheus-ca-file"),
            (
                {"ca_file": files["ca"], "cert_file": files["client"], "key_file": files["server-key"]},
                "belong together",
            ),
        ):
            async with client(server.url, **settings) as asked:
                with pytest.raises(PrometheusError) as caught:
                    await asked.instant("x", 1)
            assert caught.value.reason == "tls"
            assert words in str(caught.value)


def _certificates(folder: Path) -> dict[str, Path]:
    """Make a CA, a server's certificate for 127.0.0.1 and a client's, with openssl."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl on the PATH: make install")

    def run(*arguments: str) -> None:
        subprocess.run([program, *arguments], check=True, capture_output=True, cwd=folder)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "3650", "-subj", "/CN=test authority",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign", "-addext", "basicConstraints=critical,CA:TRUE")  # fmt: skip
    (folder / "san.txt").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    for name in ("server", "client"):
        run("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", "3650", "-extfile", "san.txt", "-out", f"{name}.pem")  # fmt: skip
    return {
        "ca": folder / "ca.pem",
        **{name: folder / f"{name}.pem" for name in ("server", "client")},
        **{f"{name}-key": folder / f"{name}.key" for name in ("server", "client")},
    }


async def test_real_servers_accept_queries_and_are_detected(
    fleet_prometheus: FleetServer, fleet_victoria: FleetServer
) -> None:
    for server, name, version in ((fleet_prometheus, "Prometheus", "2.42.0"), (fleet_victoria, "VictoriaMetrics", "")):
        async with client(server.url) as asked:
            found = await engine.detect(asked)
            assert (found.name, found.version) == (name, version)
            assert await asked.instant("vector(3)", 1_790_000_000) == (SeriesSample({}, 3.0),)
            (series,) = (await asked.ask_range("vector(3)", 1_789_990_000, 1_790_000_000, 5000)).data
            assert [value for _, value in series["values"]] == ["3", "3", "3"]
            with pytest.raises(PrometheusError) as caught:
                await asked.instant("sum(", 1)
            assert caught.value.reason == "bad_query"


@pytest.mark.parametrize(
    ("data", "title"),
    [
        ({"version": "2.55.1+ds", "revision": "x"}, "Prometheus 2.55.1"),
        ({"version": "0.36.1"}, "Thanos 0.36.1"),
        ({"version": "2.14.0", "application": "Grafana Mimir"}, "Grafana Mimir 2.14.0"),
        (None, "Prometheus API"),
    ],
)
async def test_engines_are_detected_from_their_build_info(data: object, title: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if data is None or not request.path.endswith("buildinfo"):
            return web.Response(status=404)
        return web.json_response({"status": "success", "data": data})

    async with serving(answer) as server, client(server.url) as asked:
        assert (await engine.detect(asked)).title == title


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15d", 1_296_000), ("1w2d", 777_600), ("30d or 10GiB", 2_592_000), ("10GiB", None), ("", None), ("0s", 0)],
)
def test_retention_is_parsed_in_the_prometheus_format(text: str, seconds: float | None) -> None:
    assert engine.seconds_of(text) == seconds

"""The agent's HTTP server, over real connections."""

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import page_support
import pytest
from service_support import http_server

from exporter.metrics.collector import ExpositionOptions
from exporter.metrics.text_format import OPENMETRICS
from exporter.model.attribution import Owner, PodFacts
from exporter.model.snapshot import Snapshot
from exporter.web.responses import accepts_gzip
from exporter.web.server import NodeSite, Renderer


@asynccontextmanager
async def served(
    snapshot: Snapshot | None,
    release: Callable[[float], None] | None = None,
    host: str = "127.0.0.1",
    steady: float = 0.0,
) -> AsyncIterator[str]:
    renderer = Renderer(ExpositionOptions(), list)
    app = NodeSite(snapshot=lambda: snapshot, renderer=renderer, release=release, steady=lambda: steady).app()
    async with http_server(app, host=host) as port:
        yield f"http://{host}:{port}"


@asynccontextmanager
async def asked(
    base: str, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
    async with (
        aiohttp.ClientSession(auto_decompress=False) as session,
        session.request(method, base + path, headers={"Accept-Encoding": "identity", **(headers or {})}) as response,
    ):
        yield response, await response.read()


async def test_metrics_use_the_negotiated_format_and_accepted_compression() -> None:
    shown = page_support.snapshot(*(page_support.held(number, f"train-{number}") for number in range(64)))
    page = Renderer(ExpositionOptions(), list).metrics(shown).plain
    async with served(shown) as base:
        async with asked(base, "/metrics", headers={"Accept": "application/openmetrics-text"}) as (plain, body):
            assert plain.status == 200
            assert plain.headers["Content-Type"] == OPENMETRICS
            assert plain.headers["Cache-Control"] == "no-store"
            assert body.endswith(b"# EOF\n")
        async with asked(base, "/metrics", headers={"Accept-Encoding": "gzip"}) as (packed, small):
            assert packed.headers["Content-Encoding"] == "gzip"
            assert len(small) < len(page) / 10
            assert gzip.decompress(small) == page


async def test_page_links_to_the_configured_cost_service() -> None:
    app = NodeSite(
        snapshot=lambda: page_support.snapshot(page_support.held(0, "train-0")),
        renderer=Renderer(ExpositionOptions(), list),
        release=lambda _: None,
        cost_service_url="https://cost.example/gpu",
    ).app()
    async with http_server(app) as port, asked(f"http://127.0.0.1:{port}", "/?fragment=1") as (_, body):
        assert b'href="https://cost.example/gpu/owner?namespace=ml"' in body


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("*", True),
        ("identity", False),
        ("", False),
        ("gzip;q=0", False),
        ("*, gzip;q=0.000", False),
        ("gzip; q=0.001", True),
    ],
)
def test_gzip_is_sent_only_if_accepted(header: str, accepted: bool) -> None:  # noqa: FBT001 - a table's column
    assert accepts_gzip(header) is accepted


async def test_head_request_returns_headers_without_body_on_every_page() -> None:
    async with served(page_support.snapshot()) as base:
        for path in ("/", "/metrics", "/api/v1/devices", "/healthz", "/readyz"):
            async with asked(base, path, "HEAD") as (response, body):
                assert response.status == 200
                assert body == b""
                assert int(response.headers["Content-Length"]) > 0


async def test_process_is_healthy_but_not_ready_before_the_first_snapshot() -> None:
    async with served(None) as base:
        for path in ("/healthz", "/health"):
            async with asked(base, path) as (response, body):
                assert (response.status, body) == (200, b"ok\n")
        async with asked(base, "/readyz") as (response, body):
            assert response.status == 503
            assert b"no picture of the node yet" in body
        async with asked(base, "/") as (response, body):
            assert response.status == 200
            assert b"Starting" in body
        async with asked(base, "/api/v1/devices") as (response, _):
            assert response.status == 503


async def test_readiness_gives_its_reasons() -> None:
    tired = page_support.snapshot(ready=False, not_ready_reasons=("source nvml is hung", "no fresh reading"))
    async with served(tired) as base, asked(base, "/readyz") as (response, body):
        assert response.status == 503
        assert body.decode() == "not ready\n- source nvml is hung\n- no fresh reading\n"
    async with served(page_support.snapshot()) as base, asked(base, "/readyz") as (response, body):
        assert (response.status, body) == (200, b"ready\n")


@pytest.mark.parametrize(("age_seconds", "status"), [(2.9, 200), (3.1, 503)])
async def test_readiness_fails_once_the_snapshot_is_too_old(age_seconds: float, status: int) -> None:
    old = page_support.snapshot(taken_steady_seconds=100.0, stale_after_seconds=3.0)
    async with served(old, steady=100.0 + age_seconds) as base, asked(base, "/readyz") as (response, body):
        assert response.status == status
        assert (b"the newest picture of the node is 3 s old (limit 3 s)" in body) is (status == 503)


async def test_metadata_and_attribution_problems_are_notes_of_readiness() -> None:
    metadata = {"problem": "pods forbidden \ud800; grant list", "remark": "clocks differ"}
    problems = {"attribution": {"problem": "no socket; mount it"}, "metadata": metadata}
    notes = "note: kubelet: no socket; mount it\nnote: kubernetes-api: pods forbidden ?; grant list\n"
    notes += "note: kubernetes-api: clocks differ\n"
    async with served(page_support.snapshot(**problems)) as base, asked(base, "/readyz") as (response, body):
        assert (response.status, body.decode()) == (200, f"ready\n{notes}")
    tired = page_support.snapshot(ready=False, not_ready_reasons=("source nvml is hung",), **problems)
    async with served(tired) as base, asked(base, "/readyz") as (response, body):
        assert (response.status, body.decode()) == (503, f"not ready\n- source nvml is hung\n{notes}")


async def test_pods_with_invalid_annotations_are_a_note_of_readiness() -> None:
    use = page_support.held(0, "trainer-0", 0.9).pods[0]
    facts = PodFacts(owner=Owner(namespace="ml", kind="PodClique", name="x"), problems=("unknown_kind",))
    view = replace(page_support.held(0, "trainer-0", 0.9), pods=(replace(use, facts=facts),))
    async with served(page_support.snapshot(view)) as base, asked(base, "/readyz") as (response, body):
        assert response.status == 200
        assert "note: pods: 1 with labels, annotations or owners that are not understood: unknown_kind" in body.decode()


async def test_driver_is_released_for_the_requested_time() -> None:
    released: list[float] = []
    async with served(None, released.append) as base:
        async with asked(base, "/-/release?seconds=90", "POST") as (response, body):
            assert response.status == 202
            assert b"90 s" in body
        async with asked(base, "/-/release", "POST") as (response, _):
            assert response.status == 202
    assert released == [90.0, 60.0]


@pytest.mark.parametrize("seconds", ["0", "-1", "3601", "nan", "inf", "soon", ""])
async def test_release_with_an_invalid_time_is_refused_with_the_allowed_range(seconds: str) -> None:
    released: list[float] = []
    async with (
        served(None, released.append) as base,
        asked(base, f"/-/release?seconds={seconds}", "POST") as (response, body),
    ):
        assert response.status == 400
        assert b"allowed: more than 0, up to 3600" in body
    assert released == []


async def test_only_local_peers_may_release_the_driver() -> None:
    own_address = _own_address()
    if own_address is None:
        pytest.skip("this host has no address but loopback")
    released: list[float] = []
    async with (
        served(None, released.append, host=own_address) as base,
        asked(base, "/-/release", "POST", {"X-Forwarded-For": "127.0.0.1"}) as (response, body),
    ):
        assert response.status == 403
        assert b"only this host" in body
    assert released == []


async def test_dual_stack_socket_treats_loopback_as_local_and_other_addresses_as_remote() -> None:
    released: list[float] = []
    async with served(None, released.append, host="") as base:  # the default: IPv4 peers are ::ffff:a.b.c.d
        port = base.rpartition(":")[2]
        async with asked(f"http://127.0.0.1:{port}", "/-/release?seconds=7", "POST") as (response, _):
            assert response.status == 202
        if own_address := _own_address():
            async with asked(f"http://{own_address}:{port}", "/-/release?seconds=8", "POST") as (response, _):
                assert response.status == 403
    assert released == [7]


def _own_address() -> str | None:
    import socket  # noqa: PLC0415 - for this check only

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: a datagram socket only selects its route
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if address.startswith("127.") else address


async def test_wrong_path_or_method_lists_the_valid_ones() -> None:
    async with served(None) as base:
        async with asked(base, "/metric") as (response, body):
            assert response.status == 404
            assert all(path in body.decode() for path in ("/metrics", "/api/v1/devices", "/readyz", "/-/release"))
        async with asked(base, "/-/release") as (response, body):
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
        async with asked(base, "/metrics", "POST") as (response, _):
            assert response.status == 405


async def test_failing_page_returns_500_and_the_server_continues(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Snapshot:
        raise RuntimeError("boom")

    app = NodeSite(snapshot=broken, renderer=Renderer(ExpositionOptions(), list), release=lambda _: None).app()
    async with http_server(app) as port:
        base = f"http://127.0.0.1:{port}"
        async with asked(base, "/") as (response, body):
            assert response.status == 500
            assert b"boom" not in body
        async with asked(base, "/healthz") as (response, _):
            assert response.status == 200
    assert "boom" in caplog.text

import asyncio
import json
import random
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from aiohttp import web
from api_support import PODS, SELECTOR, World, pod, pod_list, scripted, self_signed, stream, until, write_kubeconfig
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import ApiError
from exporter.kube import api_client
from exporter.kube import api_client as api_errors
from exporter.kube.api_client import METADATA_LIST, METADATA_WATCH, PLAIN, ApiClient, Request
from exporter.kube.credentials import Credentials, of_service_account
from gpu_simulator.api_server import ServerTls
from gpu_simulator.truth import Fault

LOOKS = """
import asyncio, random, sys
from pathlib import Path
from exporter.kube.api_client import ApiClient, METADATA_LIST, METADATA_WATCH, Request
from exporter.kube.credentials import Credentials

async def main():
    client = ApiClient(Credentials(kubeconfig=Path(sys.argv[1])), random=random.random)
    listed = await client.get(Request("/api/v1/pods", {"resourceVersion": "0"}, METADATA_LIST))
    assert listed["items"], listed
    events = []
    request = Request("/api/v1/pods", {"timeoutSeconds": "1"}, METADATA_WATCH)
    async for event in client.watch(request, silence_seconds=9):
        events.append(event["type"])
    assert events == ["OPENED", "ADDED"], events
    await client.close()

asyncio.run(main())
loaded = [name for name in sys.modules if ".models." in name and name.startswith("kubernetes")]
loaded += [name for name in sys.modules if name.startswith("kubernetes") and ".api." in name]
loaded += [name for name in sys.modules if name.partition(".")[0] == "jsonschema"]
assert not loaded, loaded
"""


IN_A_POD = """
import asyncio, random, sys
from pathlib import Path
from exporter.kube.api_client import ApiClient, METADATA_LIST, Request
from exporter.kube.credentials import Credentials

async def main():
    _, folder, host, port = sys.argv
    environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    client = ApiClient(Credentials(environ=environ, service_account=Path(folder)), random=random.random)
    listed = await client.get(Request("/api/v1/pods", {"resourceVersion": "0"}, METADATA_LIST))
    assert listed["kind"] == "PartialObjectMetadataList", listed
    await client.close()

asyncio.run(main())
loaded = [name for name in sys.modules if name.partition(".")[0] in {"kubernetes", "requests", "urllib3", "pydantic"}]
assert not loaded, loaded
"""


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with World(tmp_path) as made:
        made.put(pod("a"))
        yield made


def new_client(kubeconfig: Path | None, **options: object) -> ApiClient:
    credentials = Credentials(kubeconfig=kubeconfig, **options)  # type: ignore[arg-type] # each test its own
    return ApiClient(credentials, random=random.random)


async def refusal(client: ApiClient, path: str = PODS) -> ApiError:
    try:
        with pytest.raises(ApiError) as caught:
            await client.get(Request(path), timeout_seconds=5)
    finally:
        await client.close()
    return caught.value


async def test_list_and_watch_load_no_typed_models(world: World) -> None:
    command = (sys.executable, "-c", LOOKS, str(world.kubeconfig))
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, said = await process.communicate()
    assert (process.returncode, said.decode()) == (0, "")


def test_agent_without_metadata_does_not_import_kubernetes() -> None:
    code = """
import sys
import exporter.agent.run, exporter.cli, exporter.kube.list_watch
loaded = [name for name in sys.modules if name.partition(".")[0] == "kubernetes"]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


async def test_managed_fields_are_dropped_from_both_list_formats(world: World) -> None:
    for accept, kind in ((PLAIN, "PodList"), (METADATA_LIST, "PartialObjectMetadataList")):
        listed = await world.client.get(Request(PODS, SELECTOR, accept))
        assert listed["kind"] == kind
        assert "managedFields" not in listed["items"][0]["metadata"]
        assert listed["items"][0]["metadata"]["labels"] == {"app": "a"}


async def test_client_address_becomes_the_server_url(world: World) -> None:
    assert str(world.kubeconfig) in world.client.address
    await world.client.get(Request(PODS))
    assert world.client.address == world.server.url


MESSAGES = {
    Fault.API_FORBIDDEN: ("forbidden", "HTTP 403", "grant verb list on resource pods of API group ''"),
    Fault.API_ERROR: ("server_error", "HTTP 500", "HTTP 500"),
    Fault.API_TOO_MANY: ("too_many", "HTTP 429", "asks to wait"),
}


@pytest.mark.parametrize(("fault", "expected"), MESSAGES.items())
async def test_error_names_address_verb_resource_and_fix(
    world: World, fault: Fault, expected: tuple[str, str, str]
) -> None:
    world.faults = {fault: 3}
    error = await refusal(world.client)
    assert error.reason == expected[0]
    assert f"list pods at {world.server.url}" in str(error)
    assert expected[1] in str(error)
    assert expected[2] in str(error)
    assert error.retry_after_seconds == (3 if fault is Fault.API_TOO_MANY else None)


async def test_missing_object_is_not_found(world: World) -> None:
    error = await refusal(world.client, "/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims/x")
    assert error.reason == "not_found"
    assert "HTTP 404" in str(error)
    assert str(error).startswith("get resourceclaims at ")


async def test_rotated_token_is_read_again_once(world: World) -> None:
    await world.client.get(Request(PODS))
    world.server.rotate()
    await world.client.get(Request(PODS))
    assert world.server.requests["list pods"] == 3


async def test_token_refused_twice_is_unauthorised(world: World) -> None:
    world.token_file.write_text("wrong\n")
    error = await refusal(world.client)
    assert error.reason == "unauthorised"
    assert "HTTP 401" in str(error)
    assert world.server.requests["list pods"] == 2
    assert world.server.without_token == 0


async def test_kubeconfig_is_read_again_when_the_old_address_refuses_the_token(world: World, tmp_path: Path) -> None:
    async def moved(_request: web.Request) -> web.StreamResponse:
        world.token_file.with_name("scripted-kubeconfig").write_text(world.kubeconfig.read_text())
        return web.Response(status=401)

    async with scripted(moved, tmp_path) as (client, requests):
        assert (await client.get(Request(PODS)))["kind"] == "PodList"
        assert (len(requests), client.address) == (1, world.server.url)


async def test_open_watch_survives_a_new_token(world: World) -> None:
    events = []

    async def watch() -> None:
        query = {**SELECTOR, "resourceVersion": "1001"}
        async with aclosing(world.client.watch(Request(PODS, query, METADATA_WATCH), silence_seconds=5)) as stream_:
            async for event in stream_:
                events.append(event["type"])  # noqa: PERF401 - read while it grows

    task = asyncio.create_task(watch())
    await until(lambda: world.server.open_streams == 1, "watched")
    world.server.rotate()
    await world.client.get(Request(PODS))
    world.put(pod("a"), pod("b"))
    await until(lambda: "ADDED" in events, "the event")
    task.cancel()
    await until(lambda: world.server.open_streams == 0, "closed")


async def test_missing_server_is_unreachable_and_silent_server_a_timeout(world: World) -> None:
    world.faults = {Fault.API_SILENT: 0}
    with pytest.raises(ApiError) as silent:
        await world.client.get(Request(PODS), timeout_seconds=0.1)
    await world.server.stop()
    error = await refusal(world.client)
    assert (silent.value.reason, error.reason) == ("timeout", "unreachable")
    assert world.server.url in str(error)


BODIES = {b"<html>": "garbage", b"[]": "garbage", b"3": "garbage", b"[" * 100_000: "garbage", b'{"a": ': "garbage"}


@pytest.mark.parametrize(("body", "reason"), BODIES.items(), ids=[str(n) for n in range(len(BODIES))])
async def test_non_json_object_response_is_refused_with_the_reason(tmp_path: Path, body: bytes, reason: str) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async with scripted(answer, tmp_path) as (client, _):
        assert (await refusal(client)).reason == reason


async def test_invalid_utf_8_bytes_are_replaced(tmp_path: Path) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"items": ["\xff", "good"]}', content_type="application/json")

    async with scripted(answer, tmp_path) as (client, _):
        assert await client.get(Request(PODS)) == {"items": ["�", "good"]}


async def test_endless_response_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "ANSWER_LIMIT_BYTES", 1 << 20)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await stream(request, [b"x" * 65536] * 1000)

    async with scripted(answer, tmp_path) as (client, _):
        assert (await refusal(client)).reason == "too_large"


async def test_every_request_carries_the_token_and_the_user_agent(tmp_path: Path) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return pod_list()

    async with scripted(answer, tmp_path) as (client, requests):
        await client.get(Request(PODS, SELECTOR))
        [request] = requests
        assert request.headers["Authorization"] == "Bearer secret"
        assert request.headers["User-Agent"] == "gpu-cost-exporter"
        assert request.query["fieldSelector"] == SELECTOR["fieldSelector"]


async def test_netrc_of_the_user_is_ignored(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("default login somebody password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert (await world.client.get(Request(PODS)))["kind"] == "PodList"


async def test_missing_settings_error_names_the_paths_checked(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    error = await refusal(new_client(None, environ={"KUBECONFIG": str(missing)}))
    assert error.reason == "no_config"
    assert str(missing) in str(error)


BAD_FILES = (
    "",
    "[",
    "{}",
    "a: &a [*a]",
    "current-context: x\ncontexts: 3\n",
    "\x00",
    "clusters: [{}]\ncontexts: [{}]\n",
)


@pytest.mark.parametrize("text", BAD_FILES)
async def test_invalid_kubeconfig_is_reported_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    error = await refusal(new_client(path))
    assert error.reason == "no_config"
    assert str(path) in str(error)


async def test_user_without_credentials_makes_no_anonymous_request(tmp_path: Path) -> None:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return pod_list()

    async with scripted(answer, tmp_path) as (_, requests):
        path = tmp_path / "kubeconfig"
        write_kubeconfig(path, "http://127.0.0.1:1", {"token": ""})
        error = await refusal(new_client(path))
        assert error.reason == "no_config"
        assert "user 'u' has no token" in str(error)
        assert requests == []


async def test_kubeconfig_from_the_environment_is_used(world: World) -> None:
    client = new_client(None, environ={"KUBECONFIG": str(world.kubeconfig)})
    assert (await client.get(Request(PODS)))["kind"] == "PodList"
    await client.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ServerTls:
    return self_signed(tmp_path_factory.mktemp("tls"))


async def test_only_the_ca_of_the_kubeconfig_is_trusted(tmp_path: Path, tls: ServerTls) -> None:
    async with World(tmp_path / "one", tls=tls) as world:
        assert (await world.client.get(Request(PODS)))["kind"] == "PodList"
        other = self_signed(tmp_path / "other")
        path = tmp_path / "kubeconfig"
        write_kubeconfig(path, world.server.url, {"token": "t"}, **{"certificate-authority": str(other.certificate)})
        error = await refusal(new_client(path))
        assert error.reason == "certificate"
        assert "CA" in str(error)
        assert world.server.requests["list pods"] == 1


async def test_replaced_ca_file_is_read_again(tmp_path: Path, tls: ServerTls) -> None:
    async with World(tmp_path / "one", tls=tls) as world:
        authority = tmp_path / "ca.crt"
        authority.write_bytes(self_signed(tmp_path / "other").certificate.read_bytes())
        path = tmp_path / "kubeconfig"
        token = world.token_file.read_text()
        write_kubeconfig(path, world.server.url, {"token": token}, **{"certificate-authority": str(authority)})
        client = new_client(path)
        with pytest.raises(ApiError, match="TLS failed"):
            await client.get(Request(PODS))
        authority.write_bytes(tls.certificate.read_bytes())
        assert (await client.get(Request(PODS)))["kind"] == "PodList"
        await client.close()


async def test_renewed_client_certificate_is_used_after_the_old_one_is_refused(tmp_path: Path, tls: ServerTls) -> None:
    old, renewed = (self_signed(tmp_path / name) for name in ("old", "renewed"))
    current = ServerTls(certificate=tmp_path / "current.crt", key=tmp_path / "current.key")
    shown: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        shown.append(request.transport.get_extra_info("peercert")["serialNumber"])
        return pod_list() if shown[-1] != shown[0] or current_is(old) else web.Response(status=401)

    def current_is(one: ServerTls) -> bool:
        return current.certificate.read_bytes() == one.certificate.read_bytes()

    def show(one: ServerTls) -> None:
        current.certificate.write_bytes(one.certificate.read_bytes())
        current.key.write_bytes(one.key.read_bytes())

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED
    for one in (old, renewed):
        context.load_verify_locations(one.certificate)
    show(old)
    async with scripted(answer, tmp_path, tls=context) as (client, _):
        path = tmp_path / "scripted-kubeconfig"
        user = {"client-certificate": str(current.certificate), "client-key": str(current.key)}
        write_kubeconfig(path, client_url(path), user, **{"certificate-authority": str(tls.certificate)})
        await client.get(Request(PODS))
        await client.get(Request(PODS))
        show(renewed)
        await client.get(Request(PODS))
    assert len(shown) == 4
    assert shown[0] == shown[1] == shown[2] != shown[3]


async def test_client_certificate_is_read_again_after_the_server_disconnects(tmp_path: Path, tls: ServerTls) -> None:
    old, renewed = (self_signed(tmp_path / name) for name in ("old", "renewed"))
    current = ServerTls(certificate=tmp_path / "current.crt", key=tmp_path / "current.key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(renewed.certificate)

    async def answer(_: web.Request) -> web.StreamResponse:
        return pod_list()

    async with scripted(answer, tmp_path, tls=context) as (client, _):
        path = tmp_path / "scripted-kubeconfig"
        user = {"client-certificate": str(current.certificate), "client-key": str(current.key)}
        write_kubeconfig(path, client_url(path), user, **{"certificate-authority": str(tls.certificate)})
        for one, is_taken in ((old, False), (renewed, True)):
            current.certificate.write_bytes(one.certificate.read_bytes())
            current.key.write_bytes(one.key.read_bytes())
            if is_taken:
                await client.get(Request(PODS))
            else:
                with pytest.raises(ApiError, match="client certificate") as caught:
                    await client.get(Request(PODS))
                assert caught.value.reason == "unreachable"


def client_url(kubeconfig: Path) -> str:
    return str(json.loads(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


async def test_ca_file_without_a_certificate_is_reported(tmp_path: Path) -> None:
    authority, path = tmp_path / "ca.crt", tmp_path / "kubeconfig"
    authority.write_text("no certificate")
    write_kubeconfig(path, "https://127.0.0.1:1", {"token": "t"}, **{"certificate-authority": str(authority)})
    assert (await refusal(new_client(path))).reason == "certificate"


async def test_pod_uses_its_service_account_and_reads_a_new_token(tmp_path: Path, tls: ServerTls) -> None:
    async with World(tmp_path, tls=tls) as world:
        host, port = world.server.url.removeprefix("https://").split(":")
        (tmp_path / "ca.crt").write_bytes(tls.certificate.read_bytes())
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        client = new_client(None, environ=environ, service_account=tmp_path)
        await client.get(Request(PODS))
        world.server.rotate()
        await client.get(Request(PODS))
        assert client.address == world.server.url
        assert world.server.without_token == 0
        await client.close()


async def test_agent_in_a_pod_never_loads_the_kubernetes_package(tmp_path: Path, tls: ServerTls) -> None:
    async with World(tmp_path, tls=tls) as world:
        host, port = world.server.url.removeprefix("https://").split(":")
        (tmp_path / "ca.crt").write_bytes(tls.certificate.read_bytes())
        command = (sys.executable, "-c", IN_A_POD, str(tmp_path), host, port)
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        _, said = await process.communicate()
        assert (process.returncode, said.decode()) == (0, "")


async def test_in_cluster_address_can_be_ipv6(tmp_path: Path) -> None:
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x\n")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    settings = of_service_account(environ, tmp_path)
    assert settings.host == "https://[fd00::1]:443"
    assert await settings.authorization() == "Bearer x"


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
async def test_missing_service_account_file_is_reported(tmp_path: Path, missing: str) -> None:
    for name in {"token", "ca.crt"} - {missing}:
        (tmp_path / name).write_text("x")
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    error = await refusal(new_client(None, environ=environ, service_account=tmp_path))
    assert error.reason == "no_config"
    assert str(tmp_path) in str(error)


NAMED = {
    ("/api/v1/pods", ""): "list pods",
    ("/api/v1/pods", "watch"): "watch pods",
    ("/api/v1/nodes/n", ""): "get nodes",
    ("/api/v1/namespaces/ml", ""): "get namespaces",
    ("/api/v1/namespaces/ml/pods/p", ""): "get pods",
    ("/apis/resource.k8s.io/v1/resourceslices", "watch"): "watch resourceslices",
    ("/apis/resource.k8s.io/v1/namespaces/ml/resourceclaims/c", ""): "get resourceclaims",
    ("/apis/resource.k8s.io", ""): "get /apis/resource.k8s.io",
}


@pytest.mark.parametrize(("request_", "name"), NAMED.items())
def test_request_action_names_the_verb_and_resource(request_: tuple[str, str], name: str) -> None:
    path, watch = request_
    assert api_errors.Request(path, {"watch": "1"} if watch else {}).action == name


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("0", 0.0), ("-1", None), ("soon", None), (None, None)])
def test_retry_after_accepts_only_seconds(header: str | None, seconds: float | None) -> None:
    error = api_errors.of_status(429, "a", api_errors.Request(PODS), retry_after=header)
    assert error.retry_after_seconds == seconds


@given(st.integers(1, 10_000), st.floats(0, 1), st.sampled_from(["timeout", "forbidden", "gone", "server_error"]))
def test_retry_delay_is_between_100_ms_and_75_seconds(failures: int, part: float, reason: str) -> None:
    client = ApiClient(Credentials(), random=lambda: part)
    assert 0.1 <= client.retry_seconds(ApiError(reason, ""), failures) <= 75


def test_long_status_details_are_cut_to_one_line() -> None:
    error = api_errors.of_status(503, "a", api_errors.Request(PODS), details="many\nlines " * 1000)
    assert "\n" not in str(error)
    assert len(str(error)) < 500
    assert api_errors.message_of(json.dumps({"message": 3}).encode()) == ""

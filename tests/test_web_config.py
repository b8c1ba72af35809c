"""The web configuration: valid content of its file, and its effect on a connecting client."""

import asyncio
import base64
import functools
import logging
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import page_support
import pytest
from fleet_support import tool
from service_support import PASSWORD, Certificates, hashed, http_server, make_certificates, web_file

from exporter.config.web_config import load, parse
from exporter.doctor.findings import Level
from exporter.doctor.machine import face
from exporter.errors import ConfigError
from exporter.metrics.collector import ExpositionOptions
from exporter.model.snapshot import Snapshot
from exporter.web import access as web_access
from exporter.web.access import MOST_WAITING, Passwords, WebAccess
from exporter.web.server import NodeSite, Renderer

HERE = Path("/etc/web.yaml")


def basic(user: str, password: str) -> str:
    """Return the header of a client with these credentials."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


ALICE = basic("alice", PASSWORD)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@dataclass
class Served:
    """The agent's server behind a web configuration."""

    port: int
    access: WebAccess
    failures: int = 0
    broken: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(
        self,
        path: str = "/metrics",
        *,
        auth: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> tuple[int, str, dict[str, str]]:
        """Return status, body and headers, over a new connection."""
        scheme = "https" if tls else "http"
        headers = {"Authorization": auth} if auth else {}
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers) as session,
            session.get(f"{scheme}://localhost:{self.port}{path}", ssl=tls or True) as response,
        ):
            return response.status, await response.text(), dict(response.headers)

    async def until(self, status: int, **how: object) -> None:
        """Request until the answer has this status."""
        async with asyncio.timeout(20):
            while True:
                try:
                    if (await self.get(**how))[0] == status:  # type: ignore[arg-type]
                        return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.02)

    def failed(self) -> None:
        self.failures += 1
        self.broken.set()


@asynccontextmanager
async def served(path: Path, snapshot: Callable[[], Snapshot | None] = page_support.snapshot) -> AsyncIterator[Served]:
    access = WebAccess(functools.partial(load, path))
    app = NodeSite(
        snapshot=snapshot,
        renderer=Renderer(ExpositionOptions(), list),
        release=lambda _: None,
    ).app()
    async with http_server(app, access=access) as port:
        one = Served(port, access)
        watching = asyncio.ensure_future(access.watch(one.failed, 0.05))
        try:
            yield one
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as reported:
        parse(text, HERE)
    return reported.value.problems


def test_all_mistakes_are_reported_with_line_key_and_fix() -> None:
    found = problems(
        "tls_server_config:\n"
        "  cert_file: server.pem\n"
        "  min_version: TLS10\n"
        "  client_auth_type: RequireAnyClientCert\n"
        "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n"
        "  curve_preferences: [X25519, CurveP256]\n"
        "  key: inline\n"
        "  cert_fil: x\n"
        "http_server_config:\n"
        "  headers:\n"
        "    X-Frame-Options: perhaps\n"
        "    X-Powered-By: me\n"
        "basic_auth_users:\n"
        "  alice: secret123\n"
        "  bob: $2y$31$" + "a" * 53 + "\n"
        "rate_limit: {interval: 1s, burst: 20}\n"
    )
    text = "\n".join(found)
    assert "/etc/web.yaml:2: tls_server_config: key_file: missing" in text
    assert (
        "web.yaml:3: tls_server_config: min_version: 'TLS10' is broken, and not served; allowed: TLS12, TLS13" in text
    )
    assert "web.yaml:4: tls_server_config: client_auth_type: 'RequireAnyClientCert' takes certificates without" in text
    assert (
        "web.yaml:5: tls_server_config: cipher_suites: 'TLS_RSA_WITH_RC4_128_SHA' is not known, or not secure" in text
    )
    assert "web.yaml:6: tls_server_config: curve_preferences: allowed: one of" in text
    assert "web.yaml:7: tls_server_config: key: is not read from here; put it into a file and give key_file" in text
    assert "web.yaml:8: tls_server_config: cert_fil: unknown key; did you mean 'cert_file'?" in text
    assert (
        "web.yaml:11: http_server_config: headers: X-Frame-Options: 'perhaps' is not known; allowed: deny or sameorigin"
        in text
    )
    assert "web.yaml:12: http_server_config: headers: X-Powered-By: unknown key" in text
    assert "web.yaml:14: basic_auth_users: alice: no bcrypt hash" in text
    assert "web.yaml:15: basic_auth_users: bob: a cost of 31" in text
    assert "web.yaml:16: rate_limit: is not served here" in text
    assert "secret123" not in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_server_config: {cert_file: a, key_file: b, client_ca_file: c}", "client_auth_type are nothing without"),
        ("tls_server_config: {cert_file: a, key_file: b, client_allowed_sans: [x]}", "RequireAndVerifyClientCert"),
        ("tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}", "is newer than"),
        ("tls_server_config: {cert_file: a, key_file: b}", "/etc/a, /etc/b: no such file"),
        ("basic_auth_users: {}", "1 to 1000 users"),
        ("basic_auth_users: {'a:b': x}", "a user's name is text without a colon"),
        ("basic_auth_users: [alice]", "not a mapping"),
        ("- list", "not a mapping"),
        ("tls_server_config: [", "not YAML"),
        ("basic_auth_user: {}", "did you mean 'basic_auth_users'?"),
    ],
)
def test_inconsistent_file_is_refused(text: str, said: str) -> None:
    assert any(said in problem for problem in problems(text)), problems(text)


def test_prometheus_web_config_file_is_accepted_unchanged(certificates: Certificates) -> None:
    path = certificates.path("web.yaml")
    path.write_text(
        "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n  client_auth_type: NoClientCert\n"
        "  min_version: TLS12\n  max_version: TLS13\n  prefer_server_cipher_suites: true\n"
        "  cipher_suites: [TLS_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384]\n"
        "  curve_preferences: [CurveP256]\n"
        "http_server_config:\n  http2: true\n  headers:\n    X-Frame-Options: deny\n"
        f"basic_auth_users:\n  alice: {hashed()}\n"
    )
    settings = load(path)
    assert settings.tls is not None
    older = [cipher["name"] for cipher in settings.tls.context.get_ciphers() if cipher["protocol"] != "TLSv1.3"]
    assert older == ["ECDHE-RSA-AES256-GCM-SHA384"]
    assert settings.files == (path, certificates.path("server.pem"), certificates.path("server.key"))
    assert [warning for warning in settings.warnings if "HTTP/2 is not served" in warning] == list(settings.warnings)
    assert settings.headers == {"X-Frame-Options": "deny"}
    assert list(settings.users) == ["alice"]


def test_passwords_over_plain_http_and_an_empty_file_give_warnings(tmp_path: Path) -> None:
    assert "can be read on the network" in load(web_file(tmp_path, users={"alice": hashed()})).warnings[0]
    assert "no TLS, no passwords" in load(web_file(tmp_path)).warnings[0]


async def test_only_a_known_user_with_the_right_password_is_accepted(tmp_path: Path) -> None:
    async with served(web_file(tmp_path, users={"alice": hashed(), "zoë": hashed("pass:wörd")})) as one:
        status, body, headers = await one.get()
        assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="gpu-cost-exporter", charset="UTF-8"')
        assert "gpu_exporter_build_info" not in body
        status, body, _ = await one.get(auth=ALICE)
        assert status == 200
        assert "gpu_exporter_build_info" in body
        assert (await one.get(auth=basic("zoë", "pass:wörd")))[0] == 200
        for user, password in (("alice", "wrong"), ("alice", ""), ("bob", PASSWORD), ("", ""), ("ALICE", PASSWORD)):
            assert (await one.get(auth=basic(user, password)))[0] == 401, user
        for header in ("Basic", "Basic !!!", "Bearer abc", "Basic YWxpY2U=", "Basic " + "A" * 4000):
            assert (await one.get(auth=header))[0] == 401, header
        for path in ("/", "/api/v1/ledger", "/no-such-page", "//healthz", "/healthz/"):
            assert (await one.get(path))[0] == 401, path


async def test_probes_need_no_password_and_get_only_the_status(tmp_path: Path) -> None:
    async with served(web_file(tmp_path, users={"alice": hashed()})) as one:
        assert (await one.get("/healthz"))[:2] == (200, "ok\n")
        assert (await one.get("/health"))[:2] == (200, "ok\n")
        reported = await one.get("/readyz", auth=ALICE)
        bare = await one.get("/readyz")
        assert bare[0] == reported[0]
        assert bare[1] in {"ready\n", "not ready; the reasons need a password\n"}
    async with served(web_file(tmp_path, users={"alice": hashed()}), lambda: None) as one:
        assert "no picture of the node yet" in (await one.get("/readyz", auth=ALICE))[1]
        assert (await one.get("/readyz"))[:2] == (503, "not ready; the reasons need a password\n")


async def test_right_password_is_cached_and_a_wrong_one_is_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashings = []
    real = web_access.bcrypt.checkpw
    monkeypatch.setattr(web_access.bcrypt, "checkpw", lambda *asked: hashings.append(asked[1]) or real(*asked))
    known = hashed().encode()
    users = Passwords({"alice": known})
    for _ in range(5):
        assert await users.check("alice", PASSWORD.encode()) == "right"
    assert hashings == [known]
    assert await users.check("alice", b"wrong") == "wrong"
    assert await users.check("alice", b"wrong") == "wrong"
    assert hashings == [known] * 3
    # An unknown user costs as much as a known one: the server computes a hash of the same cost.
    assert await users.check("mallory", PASSWORD.encode()) == "wrong"
    assert hashings[3][:7] == b"$2b$04$"
    assert hashings[3] != known


async def test_pending_guesses_are_limited_and_do_not_block_known_users() -> None:
    users = Passwords({"alice": hashed().encode()})
    assert await users.check("alice", PASSWORD.encode()) == "right"
    guesses = [asyncio.ensure_future(users.check("alice", f"guess {number}".encode())) for number in range(200)]
    await asyncio.sleep(0)
    assert await users.check("alice", PASSWORD.encode()) == "right"
    verdicts = await asyncio.gather(*guesses)
    assert verdicts.count("wrong") == MOST_WAITING
    assert verdicts.count("busy") == 200 - MOST_WAITING
    assert await users.check("alice", b"x" * 100) == "wrong"


@pytest.mark.parametrize("prefix", [b"2a", b"2b", b"2y"])
async def test_hash_prefixes_of_every_tool_and_long_passwords_are_supported(prefix: bytes) -> None:
    users = Passwords({"alice": hashed("p" * 72, prefix).encode()})
    assert await users.check("alice", b"p" * 72) == "right"
    assert await users.check("alice", b"p" * 90) == "right"  # as in Go's bcrypt, which reads 72 bytes
    assert await users.check("alice", b"p" * 71) == "wrong"


async def test_tls_uses_the_configured_versions(certificates: Certificates) -> None:
    async with served(web_file(certificates.folder, tls={"min_version": "TLS13"})) as one:
        assert (await one.get(tls=certificates.client()))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await one.get(tls=certificates.client(most=ssl.TLSVersion.TLSv1_2))
        with pytest.raises(aiohttp.ClientError):
            await one.get()
    async with served(web_file(certificates.folder, tls={})) as one:
        assert (await one.get(tls=certificates.client(most=ssl.TLSVersion.TLSv1_2)))[0] == 200


async def test_client_without_a_certificate_of_the_authority_is_refused(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> None:
    required = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    async with served(web_file(certificates.folder, tls=required)) as one:
        assert (await one.get(tls=certificates.client(shown=True)))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await one.get(tls=certificates.client())
        stranger = make_certificates(tmp_path_factory.mktemp("stranger"))
        context = certificates.client()
        context.load_cert_chain(stranger.path("client.pem"), stranger.path("client.key"))
        with pytest.raises(aiohttp.ClientError):
            await one.get(tls=context)


async def test_only_clients_with_an_allowed_san_are_accepted(certificates: Certificates) -> None:
    required = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"}
    folder = certificates.folder
    async with served(web_file(folder, tls={**required, "client_allowed_sans": "[prometheus.example]"})) as one:
        assert (await one.get(tls=certificates.client(shown=True)))[0] == 200
    async with served(web_file(folder, tls={**required, "client_allowed_sans": "[other.example]"})) as one:
        assert (await one.get(tls=certificates.client(shown=True)))[0] == 403
        assert "gpu_exporter_build_info" not in (await one.get(tls=certificates.client(shown=True)))[1]


async def test_headers_are_added_without_replacing_the_pages_own(tmp_path: Path) -> None:
    path = tmp_path / "web.yaml"
    path.write_text(
        "http_server_config:\n  headers:\n    Strict-Transport-Security: max-age=600\n"
        "    Content-Security-Policy: default-src *\n"
    )
    async with served(path) as one:
        _, _, headers = await one.get("/metrics")
        assert headers["Strict-Transport-Security"] == "max-age=600"
        _, _, page = await one.get("/")
        assert page["Content-Security-Policy"] != "default-src *"


@pytest.fixture
def reported(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "exporter.web"):
        yield caplog


async def test_new_file_applies_without_a_restart_and_a_broken_one_is_ignored(
    certificates: Certificates, reported: pytest.LogCaptureFixture
) -> None:
    folder = certificates.folder
    path = web_file(folder, users={"alice": hashed()})
    async with served(path) as one:
        assert (await one.get(auth=ALICE))[0] == 200
        web_file(folder, users={"alice": hashed("another")})
        await one.until(401, auth=ALICE)
        path.write_text("basic_auth_users: [")
        await asyncio.wait_for(one.broken.wait(), 20)
        assert (await one.get(auth=basic("alice", "another")))[0] == 200
        assert (await one.get())[0] == 401
        assert "keeping the previous web configuration" in reported.text
        web_file(folder, tls={}, users={"alice": hashed()})
        await one.until(200, auth=ALICE, tls=certificates.client())
        with pytest.raises(aiohttp.ClientError):
            await one.get(auth=ALICE)
    assert one.failures == 1  # the same mistake is reported once over several reads


async def test_new_certificate_is_served_once_it_matches_its_key(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> None:
    newer = make_certificates(tmp_path_factory.mktemp("newer"))
    async with served(web_file(certificates.folder, tls={})) as one:
        assert (await one.get(tls=certificates.client()))[0] == 200
        trusted = newer.client()
        certificates.path("server.pem").write_bytes(newer.path("server.pem").read_bytes())
        await asyncio.wait_for(one.broken.wait(), 20)  # the key is still the old one
        assert (await one.get(tls=certificates.client()))[0] == 200
        certificates.path("server.key").write_bytes(newer.path("server.key").read_bytes())
        await one.until(200, tls=trusted)


async def test_plain_http_request_on_the_tls_port_is_closed(certificates: Certificates) -> None:
    async with served(web_file(certificates.folder, tls={})) as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(20):
            assert b"gpu_exporter_build_info" not in await reader.read()
        writer.close()
        assert (await one.get(tls=certificates.client()))[0] == 200


def test_doctor_reports_mistakes_in_the_file(certificates: Certificates) -> None:
    path = web_file(certificates.folder, tls={}, users={"alice": hashed()})
    assert (face(path).level, face(path).cause) == (Level.OK, "TLS, 1 user")
    path.write_text("basic_auth_users:\n  alice: no hash\nrate_limit: {}\n")
    found = face(path)
    assert found.level is Level.FAIL
    assert "alice: no bcrypt hash" in found.cause
    assert "(and 1 more)" in found.cause
    web_file(certificates.folder, users={"alice": hashed()})
    assert face(path).level is Level.WARN


def test_documented_file_is_a_valid_prometheus_web_config(certificates: Certificates) -> None:
    page = (Path(__file__).parent.parent / "docs" / "security.md").read_text(encoding="utf-8")
    example = re.findall(r"```yaml\n(tls_server_config.*?)```", page, re.DOTALL)[0]
    path = certificates.path("web.yaml")
    path.write_text(example.replace("tls.crt", "server.pem").replace("tls.key", "server.key"))
    settings = load(path)
    assert (list(settings.users), settings.warnings) == (["prometheus"], ())
    checked = subprocess.run(
        [tool("promtool"), "check", "web-config", path], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr

"""Secrets are planted in every possible place, and searched in all output of agent, service and commands."""

import base64
import json
import re
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from agent_support import running_agent, wait_until
from aiohttp import web
from api_support import write_kubeconfig
from files_support import digest
from fleet_support import serving as serving_prometheus
from fleet_support import success
from service_support import hashed, make_certificates, web_file
from test_prometheus_client import client
from test_service_run import serving

from exporter.cli import main

PLANT = "PLANTED"
WEB_PASSWORD, API_TOKEN, BEARER = f"{PLANT}-web-pass", f"{PLANT}-api-token", f"{PLANT}-bearer"
PROMETHEUS_PASSWORD, HEADER, ENVIRONMENT = f"{PLANT}-prom-pass", f"{PLANT}-api-key", f"{PLANT}-environment"
IN_AN_ADDRESS, IN_A_FILE, WEBHOOK = f"{PLANT}-in-url", f"{PLANT}-in-yaml", f"{PLANT}-webhook"
AGENT_PAGES = ("/", "/?fragment=1", "/metrics", "/readyz", "/healthz", "/api/v1/devices", "/api/v1/ledger", "/nothing")
SERVICE_PAGES = (
    *("/", "/owner?namespace=ml", "/by/team", "/recommendations", "/budgets", "/about", "/metrics", "/readyz"),
    *("/api/v1/report", "/api/v1/summary", "/api/v1/freshness", "/api/v1/pods", "/allocation/compute?window=7d"),
    *("/openapi.json", "/nothing"),
)


class _Echo(BaseHTTPRequestHandler):
    """A proxy that refuses, and repeats the request in its answer."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, EchoServer)
        server.asked += 1
        said = f"refused: {self.path} {' '.join(f'{name}={value}' for name, value in self.headers.items())}"
        body = json.dumps({"kind": "Status", "status": "error", "message": said, "error": said}).encode()
        status = server.statuses[server.asked % len(server.statuses)]
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Location", f"http://{self.headers.get('Authorization', '').replace(' ', '-')}@elsewhere/")
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Log nothing."""


class EchoServer(ThreadingHTTPServer):
    """Answers with each of these statuses in turn."""

    daemon_threads = True
    asked = 0
    statuses: tuple[int, ...] = (403, 500, 400, 429, 302, 422, 503, 401)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with EchoServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def pages(url: str, paths: tuple[str, ...], context: ssl.SSLContext | None = None) -> str:
    """Return the answers for these paths, headers included, with the password, a wrong one, and none."""
    known = base64.b64encode(f"prometheus:{WEB_PASSWORD}".encode()).decode()
    wrong = base64.b64encode(f"prometheus:{WEB_PASSWORD}-no".encode()).decode()
    reported = []
    for path in paths:
        for headers in ({"Authorization": f"Basic {known}"}, {"Authorization": f"Basic {wrong}"}, {}):
            request = urllib.request.Request(url + path, headers=headers)  # noqa: S310 - our own server
            try:
                with urllib.request.urlopen(request, timeout=20, context=context) as answer:  # noqa: S310 - as above
                    reported.append(f"{answer.headers}{answer.read().decode()}")
            except urllib.error.HTTPError as error:
                with error:
                    reported.append(f"{error.headers}{error.read().decode()}")
    return "\n".join(reported)


def command_lines(pid: int) -> str:
    """Return the arguments of a process and of all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return own + "".join(command_lines(int(child)) for child in children)


def contents(folder: Path) -> str:
    """Return all files below a folder."""
    return "\n".join(path.read_bytes().decode("latin-1") for path in sorted(folder.rglob("*")) if path.is_file())


def innocent(reported: str, *hashes: str) -> None:
    """Assert that a text has no secret, no hash of a password, and no pair of user and password as in HTTP."""
    assert PLANT not in reported, reported[max(0, reported.index(PLANT) - 300) :][:600]
    assert not re.search(r"Basic [A-Za-z0-9+/=]{8,}|Bearer \S{8,}", reported)
    for secret in (PLANT.encode(), b"prometheus:" + PLANT.encode()):
        assert base64.b64encode(secret).decode()[:8] not in reported, "no secret in base64"
    for known in hashes:
        assert known not in reported


def test_agent_logs_pages_and_process_list_contain_no_secret(tmp_path: Path, echo: EchoServer) -> None:
    certificates = make_certificates(tmp_path)
    known = hashed(WEB_PASSWORD)
    web = web_file(tmp_path, tls={}, users={"prometheus": known})
    kubeconfig = tmp_path / "kubeconfig"
    write_kubeconfig(kubeconfig, echo.url, {"token": API_TOKEN})
    options = ("--log-level", "debug", "--web-config", str(web), "--kube-metadata", "on")
    where = (
        "--kubeconfig",
        str(kubeconfig),
        "--node-name",
        "n",
        "--kube-start-jitter",
        "0s",
        "--kubelet-socket",
        str(tmp_path / "none.sock"),
    )
    environment = {"SOME_PASSWORD": ENVIRONMENT, "HTTP_PROXY": "", "http_proxy": "", "NO_PROXY": "*"}
    with running_agent(*options, *where, env=environment, is_fork=False) as agent:
        url = f"https://localhost:{agent.port}"
        wait_until(lambda: echo.asked, "the API was asked")
        wait_until(lambda: "kubernetes-api" in pages(url, ("/readyz",), certificates.client()), "its refusal is shown")
        web.write_text(f"basic_auth_users:\n  prometheus: {IN_A_FILE}\n")
        wait_until(lambda: any("keeping the previous" in line for line in agent.lines), "a broken file")
        reported = pages(url, AGENT_PAGES, certificates.client()) + command_lines(agent.process.pid)
        assert "gpu_exporter_build_info" in reported, "with the password the pages have content"
        agent.process.terminate()
        agent.process.wait()
    assert "refused" in "\n".join(agent.lines), "the log has the API's answer"
    innocent(reported + "\n".join(agent.lines), known, known[7:])


def test_service_shows_no_own_or_prometheus_secret(tmp_path: Path, echo: EchoServer) -> None:
    known = hashed(WEB_PASSWORD)
    web = web_file(tmp_path, users={"prometheus": known})
    secret = tmp_path / "secret"
    for number, (content, way) in enumerate(
        (
            (BEARER, ("--prometheus-token-file", str(secret))),
            (PROMETHEUS_PASSWORD, ("--prometheus-username", "prometheus", "--prometheus-password-file", str(secret))),
        )
    ):
        secret.write_text(content)
        folder = tmp_path / f"store-{number}"
        folder.mkdir()
        config = folder / "serve.yaml"
        config.write_text(f"prometheus-headers: X-Api-Key={HEADER}\n")
        options = (
            *("--prometheus", echo.url, "--prometheus-retries", "0", "--log-level", "debug", *way),
            *("--config", str(config), "--web-config", str(web), "--store", str(folder / "days.sqlite")),
        )
        log = tmp_path / f"log-{number}"
        with serving(log, *options, ready=False) as (process, url):
            wait_until(lambda: echo.asked > 3, "Prometheus was asked")
            reported = pages(url, SERVICE_PAGES) + command_lines(process.pid)
        config.unlink()
        reported += log.read_text() + contents(folder)
        assert "refused" in reported, "the output has the answer of Prometheus"
        innocent(reported, known, known[7:])


async def test_prometheus_warning_is_shown_without_request_secrets(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        warnings = [f"asked with {request.headers['Authorization']} and {request.headers['X-Api-Key']}"]
        return success([], warnings=warnings)

    token = tmp_path / "token"
    token.write_text(BEARER)
    given = {"token_file": token, "headers": (("X-Api-Key", HEADER),)}
    async with serving_prometheus(answer) as server, client(server.url, **given) as asked:
        reported = await asked.ask_instant("x", 1)
    assert reported.notes == ("asked with Bearer ... and ...",)


@contextmanager
def files(folder: Path, **contents_of: str) -> Iterator[dict[str, str]]:
    """Write files by name; yield their paths."""
    for name, content in contents_of.items():
        (folder / name).write_text(content)
    yield {name: str(folder / name) for name in contents_of}


def test_failing_commands_and_help_show_no_secret(
    tmp_path: Path, echo: EchoServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", ENVIRONMENT)
    monkeypatch.setenv("GPU_COST_EXPORTER_PROMETHEUS_HEADERS", f"X-Api-Key={HEADER}")
    with files(
        tmp_path,
        bearer=BEARER,
        password=PROMETHEUS_PASSWORD,
        lines=f"{BEARER}\n{BEARER}\n",
        web=f"basic_auth_users: {{alice: {IN_A_FILE}}}\n",
        hook=f"{echo.url}/services/{WEBHOOK}",
        no_hook=f"ftp://{WEBHOOK}",
        key=f"-----BEGIN {IN_A_FILE}-----\n",
    ) as named:
        to = ("--prometheus", echo.url, "--prometheus-retries", "1")
        basic = ("--prometheus-username", "prometheus", "--prometheus-password-file", named["password"])
        commands = [
            ["report", *to, "--prometheus-token-file", named["bearer"]],
            ["report", *to, *basic],
            ["report", *to, "--prometheus-token-file", named["lines"]],
            ["report", "--prometheus", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["report", "--prometheus", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:nine"],
            ["serve", "--prometheus", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["serve", "--prometheus", echo.url, "--web-config", named["web"]],
            ["serve", "--prometheus", echo.url, "--external-url", f"http://user:{IN_AN_ADDRESS}@cost.example"],
            ["report", *to, "--prometheus-headers", f"Authorization={HEADER}"],
            ["report", "--prometheus", "https://127.0.0.1:9", "--prometheus-cert-file", named["key"]],
            ["report", "--agent", echo.url, *(one.replace("prometheus-", "agent-", 1) for one in basic)],
            ["report", "--agent", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["report", "--agent", f"user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["agent", "--simulate", "demo", "--web-config", named["web"]],
            ["agent", "--simulate", "demo", "--listen", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["agent", "--dcgm-address", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["agent", "--price-book", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["top", f"http://user:{IN_AN_ADDRESS}@127.0.0.1:9"],
            ["recommend", *to, *basic],
            ["store", "backfill", "--store", str(tmp_path / "days.sqlite"), *to, *basic],
        ]
        for command in commands:
            assert main(command) != 0, command
            said = capsys.readouterr()
            assert "gpu-cost-exporter: " in said.err, command
            innocent(said.out + said.err)
        user = ("--user-file", named["password"])
        for hook in (named["hook"], named["no_hook"]):
            assert digest.main(["--service", echo.url, *user, "--webhook-url-file", hook]) != 0
            said = capsys.readouterr()
            assert "digest: " in said.err
            innocent(said.out + said.err)
    for name in ("agent", "serve", "report", "doctor"):
        with pytest.raises(SystemExit):
            main([name, "--help"])
        innocent(capsys.readouterr().out)

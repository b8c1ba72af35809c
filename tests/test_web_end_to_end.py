"""Agent and service behind a web configuration, as processes: Prometheus scrapes them, the report reaches them."""

import json
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from agent_support import AgentProcess, running_agent, wait_until
from fleet_support import tool
from service_support import PASSWORD, Certificates, hashed, make_certificates, web_file
from test_service_run import serving

from exporter.cli import main
from exporter.doctor import machine
from exporter.doctor.findings import Level
from gpu_simulator.stack import free_port


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@pytest.fixture
def password(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    return path


def status(url: str, context: ssl.SSLContext) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:  # noqa: S310 - our own server
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def scraped(folder: Path, port: int, certificates: Certificates, password: Path) -> None:
    """Check that a real Prometheus finds the target up."""
    own = free_port(0)
    (folder / "prometheus.yml").write_text(
        f"""
scrape_configs:
  - job_name: protected
    scrape_interval: 1s
    scheme: https
    tls_config: {{ca_file: {certificates.path("ca.pem")}, server_name: localhost}}
    basic_auth: {{username: prometheus, password_file: {password}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
    )
    arguments = (
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
    )
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([tool("prometheus"), *arguments], stderr=log, stdout=log)
    try:
        wait_until(lambda: up(own) == "1", f"up; it says {(folder / 'prometheus.log').read_text()[-500:]}")
    finally:
        process.kill()
        process.wait()


def up(port: int) -> str | None:
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query?query=up"
        with urllib.request.urlopen(url, timeout=5) as answer:
            result = json.load(answer)["data"]["result"]
    except OSError:
        return None
    return result[0]["value"][1] if result else None


def test_prometheus_and_the_report_reach_an_agent_with_tls_and_a_password(
    certificates: Certificates, password: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = web_file(tmp_path, tls={}, users={"prometheus": hashed()})
    with running_agent("--simulate", "demo", "--web-config", str(path)) as agent:
        url = f"https://localhost:{agent.port}"
        assert status(f"{url}/metrics", certificates.client()) == 401
        wait_until(lambda: status(f"{url}/readyz", certificates.client()) == 200, "ready")
        scraped(tmp_path, agent.port, certificates, password)

        ca = ("--agent-ca-file", str(certificates.path("ca.pem")))
        user = ("--agent-username", "prometheus", "--agent-password-file", str(password))
        assert main(["report", "--agent", url, *ca, *user, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["lines"]
        assert main(["report", "--agent", url, "--agent-skip-verify", *user]) == 0
        capsys.readouterr()
        _refusals(url, ca, user, tmp_path, capsys, agent)
        assert machine.port("", agent.port).level is Level.OK, "doctor in the pod recognises the agent behind TLS"
        assert agent.end() == 0


def _refusals(
    url: str,
    ca: tuple[str, ...],
    user: tuple[str, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    agent: AgentProcess,
) -> None:
    wrong = folder / "wrong"
    wrong.write_text("guess")
    for code, arguments, reported in (
        (1, (*ca,), "asks for a user and a password; give --agent-username"),
        (1, (*ca, "--agent-username", "prometheus", "--agent-password-file", str(wrong)), "asks for a user"),
        (1, user, "its certificate is not trusted"),
        (2, ("--agent-username", "prometheus"), "needs --agent-password-file"),
        (2, ("--agent-ca-file", "/nowhere"), "/nowhere is not there"),
        (2, ("--agent-key-file", str(wrong)), "does nothing without --agent-cert-file"),
        (2, ("--agent-ca-file", str(wrong)), "allowed: a PEM file of certificates"),
    ):
        assert main(["report", "--agent", url, *arguments]) == code, arguments
        said = capsys.readouterr().err
        assert reported in said
        assert PASSWORD not in said
    assert main(["report", "--agent", f"http://localhost:{agent.port}", *user]) == 1
    assert "gpu-cost-exporter:" in capsys.readouterr().err
    assert main(["report", "--prometheus", "http://localhost:9", *user]) == 2
    assert "does nothing without --agent" in capsys.readouterr().err


def test_agent_requiring_client_certificates_is_reached_with_one(
    certificates: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = web_file(tmp_path, tls={"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"})
    with running_agent("--simulate", "demo", "--web-config", str(path)) as agent:
        url = f"https://localhost:{agent.port}"
        wait_until(lambda: status(f"{url}/readyz", certificates.client(shown=True)) == 200, "ready")
        ca = ("--agent-ca-file", str(certificates.path("ca.pem")))
        pair = ("--agent-cert-file", str(certificates.path("client.pem")))
        key = ("--agent-key-file", str(certificates.path("client.key")))
        assert main(["report", "--agent", url, *ca, *pair, *key]) == 0
        capsys.readouterr()
        assert main(["report", "--agent", url, *ca]) == 1
        assert f"{url}: " in capsys.readouterr().err
        assert machine.port("", agent.port).level is Level.OK, "doctor in the pod has no certificate"


def test_agent_counts_a_broken_file_and_continues(tmp_path: Path) -> None:
    path = web_file(tmp_path)
    with running_agent("--simulate", "demo", "--web-config", str(path)) as agent:
        path.write_text("basic_auth_users: [")
        agent.until(
            lambda page: page.get('gpu_exporter_errors_total{part="web",reason="config"}') == 1, "a counted mistake"
        )
        assert any("keeping the previous web configuration" in line and "not YAML" in line for line in agent.lines)


def test_broken_web_configuration_prevents_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "web.yaml"
    path.write_text("basic_auth_users:\n  alice: hunter2\nrate_limit: {}\n")
    for command in (["agent", "--simulate", "demo"], ["serve", "--prometheus", "http://localhost:9"]):
        assert main([*command, "--web-config", str(path)]) == 2
        said = capsys.readouterr().err
        assert "web.yaml:2: basic_auth_users: alice: no bcrypt hash" in said
        assert "web.yaml:3: rate_limit: is not served here" in said
        assert "hunter2" not in said


def test_prometheus_reaches_a_service_with_tls_and_a_password(
    certificates: Certificates, password: Path, tmp_path: Path
) -> None:
    path = web_file(tmp_path, tls={}, users={"prometheus": hashed()})
    context = certificates.client()
    options = ("--prometheus", "http://127.0.0.1:9", "--web-config", str(path))
    with serving(tmp_path / "serve.log", *options, "--external-url", "https://a.example/cost", tls=context) as (_, url):
        for page in ("/", "/metrics", "/cost/", "/cost/metrics", "/api/v1/freshness", "/static/none"):
            assert status(url + page, context) == 401, page
        for probe in ("/healthz", "/cost/healthz", "/cost/readyz"):
            assert status(url + probe, context) == 200, probe
        scraped(tmp_path, int(url.rpartition(":")[2]), certificates, password)

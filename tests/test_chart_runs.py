"""The rendered chart runs unchanged: the real program accepts it, and a real Prometheus scrapes it."""

import re
import ssl
import urllib.request
from pathlib import Path

import pytest
from agent_support import AgentProcess, running_agent
from chart_support import (
    EVERYTHING,
    MODES,
    PLATFORMS,
    SIMULATED,
    Document,
    Start,
    documents,
    of_kind,
    read,
    rendered,
    scrape_config,
    scraping,
    started,
)
from service_support import PASSWORD, Certificates, hashed, make_certificates
from test_service_run import serving

from exporter.cli import parse
from exporter.config import load_agent
from exporter.config.resolve import AgentConfig
from exporter.cost.budgets import load as read_budgets
from exporter.service.settings import ServeSettings, load_settings

Secrets = dict[str, dict[str, bytes]]


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "certificates")


def secrets_of(certificates: Certificates) -> Secrets:
    """Return the Secrets that `chart-everything.yaml` names, made as in docs/security.md."""
    pair = {"tls.crt": certificates.path("server.pem"), "tls.key": certificates.path("server.key")}
    web = f"""
tls_server_config: {{cert_file: /etc/gpu-cost-exporter/tls/tls.crt, key_file: /etc/gpu-cost-exporter/tls/tls.key}}
basic_auth_users: {{prometheus: "{hashed()}"}}
"""
    return {
        "gpu-agent-tls": {
            **{name: path.read_bytes() for name, path in pair.items()},
            "ca.crt": certificates.path("ca.pem").read_bytes(),
        },
        "gpu-agent-web": {"web.yaml": web.encode()},
        "gpu-agent-scrape": {"username": b"prometheus", "password": PASSWORD.encode()},
        "prometheus-access": {"token": b"t"},
    }


def agent_settings(start: Start) -> AgentConfig:
    """Return the agent's settings from arguments, environment and files."""
    namespace, problems = parse(start.args)
    assert namespace.command == "agent"
    return load_agent(vars(namespace), start.env, dcgm_flags=namespace.dcgm_flags, extra=problems)


def service_settings(start: Start) -> ServeSettings:
    namespace, problems = parse(start.args)
    assert namespace.command == "serve"
    return load_settings(vars(namespace), start.env, extra=problems)


@pytest.mark.parametrize("name", ["simulated", *PLATFORMS])
def test_agent_accepts_the_command_of_the_chart(name: str, tmp_path: Path) -> None:
    found = documents(values=SIMULATED if name == "simulated" else f"platform: {name}")
    agent = of_kind(found, "DaemonSet")
    settings = agent_settings(started(agent, found, tmp_path))
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    assert settings.warnings == ()
    assert {port["containerPort"] for port in container["ports"]} == {settings.serving.listen.port}
    assert (settings.running.simulate is not None) is (name == "simulated")
    assert (settings.running.state_dir is not None) is (name != "simulated")
    assert settings.attribution.enabled
    assert "NODE_NAME" in {entry["name"] for entry in container["env"]}


def test_agent_accepts_all_options_together(certificates: Certificates, tmp_path: Path) -> None:
    found = documents(EVERYTHING)
    start = started(of_kind(found, "DaemonSet"), found, tmp_path, secrets_of(certificates))
    settings = agent_settings(start)
    assert settings.sampling.interval_seconds == 0.5
    assert settings.exposition.linger_seconds == 600
    assert settings.owners.pod_labels == ("team", "example.com/cost-center")
    assert settings.owners.kube_metadata
    assert settings.sampling.dcgm_address == "nvidia-dcgm.gpu-operator:5555"
    assert (settings.logging.log_format, settings.logging.log_level) == ("json", "debug")
    for path in (
        settings.prices.book,
        settings.exposition.collectors,
        settings.serving.web_config,
        settings.running.state_dir,
    ):
        assert path is not None
        assert str(path).startswith(str(tmp_path)), "the file is below a mount"
    assert settings.warnings == ()


@pytest.mark.parametrize("name", [name for name in MODES if name not in {"service-monitors", "service-alone"}])
def test_agent_accepts_the_command_of_every_installation_mode(
    name: str, certificates: Certificates, tmp_path: Path
) -> None:
    files, values = MODES[name]
    found = documents(*files, values=values)
    start = started(of_kind(found, "DaemonSet"), found, tmp_path / "pod", secrets_of(certificates))
    settings = agent_settings(start)
    assert settings.warnings == ()
    assert (settings.serving.web_config is not None) is (name in {"tls", "client-certificates"})
    assert settings.attribution.enabled is (name != "not-root")
    if name == "engine-by-socket":
        assert settings.sampling.dcgm_address.startswith("unix:///")


def test_service_accepts_all_options_together(certificates: Certificates, tmp_path: Path) -> None:
    found = documents(EVERYTHING)
    service = of_kind(found, "Deployment")
    settings = service_settings(started(service, found, tmp_path, secrets_of(certificates)))
    (container,) = service["spec"]["template"]["spec"]["containers"]
    assert settings.prometheus.url == "http://prometheus-operated.monitoring:9090"
    assert settings.path_prefix == "/cost"
    assert settings.fleet.history_days == 30
    assert settings.fleet.budgets is not None
    assert [budget.name for budget in read_budgets(settings.fleet.budgets)] == ["research"]
    assert settings.fleet.store is not None
    assert str(settings.fleet.store).startswith(str(tmp_path))
    assert {port["containerPort"] for port in container["ports"]} == {settings.serving.listen.port}
    assert service["spec"]["strategy"]["type"] == "Recreate", "only one service may write to a store"


def test_service_runs_with_the_command_of_the_chart(certificates: Certificates, tmp_path: Path) -> None:
    found = documents(EVERYTHING)
    start = started(of_kind(found, "Deployment"), found, tmp_path / "pod", secrets_of(certificates))
    options = ["--config", start.env["GPU_COST_EXPORTER_CONFIG"], "--prometheus", "http://127.0.0.1:1"]
    with serving(tmp_path / "log", *start.args[1:], *options, ready=False) as (_, url):
        for probe in ("/healthz", "/cost/healthz"):
            with urllib.request.urlopen(url + probe, timeout=10) as answer:  # noqa: S310 - our own service
                assert answer.status == 200
        assert [path.name for path in start.folders["/store"].glob("*.sqlite")] == ["days.sqlite"]


def test_service_without_a_store_has_no_volume_claim(tmp_path: Path) -> None:
    found = documents(values="service: {enabled: true, store: {type: none}, config: {prometheus: 'http://p:9090'}}")
    assert service_settings(started(of_kind(found, "Deployment"), found, tmp_path)).fleet.store is None
    assert not [one for one in found if one["kind"] == "PersistentVolumeClaim"]


def run_rendered(start: Start) -> list[str]:
    """Return the rendered arguments except the address: a test uses a free port."""
    assert start.args[0] == "agent"
    return [word for word in start.args[1:] if not word.startswith("--listen")]


def labels_of(target: Document, namespace: str = "gpu-cost") -> dict[str, str]:
    """Return the operator's discovery labels of a pod, and the labels that it always derives from them."""
    name = "gpu-cost-gpu-cost-exporter-x7k2p"
    return {
        "__meta_kubernetes_pod_node_name": "node-a",
        "__meta_kubernetes_pod_name": name,
        "__meta_kubernetes_namespace": namespace,
        "namespace": namespace,
        "pod": name,
        "container": target["spec"]["template"]["spec"]["containers"][0]["name"],
        "endpoint": "metrics",
    }


def test_prometheus_scrapes_an_agent_with_tls_and_a_password_by_the_monitor(
    certificates: Certificates, tmp_path: Path
) -> None:
    secrets = secrets_of(certificates)
    values = (
        "agent: {metadata: {enabled: false}, dcgm: {address: ''}, web: {scrape: {tlsConfig: {serverName: localhost}}}}"
    )
    found = documents(EVERYTHING, values=values)
    agent, monitor = of_kind(found, "DaemonSet"), monitor_of_agents(found)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    start = started(agent, found, tmp_path / "pod", secrets)
    with running_agent(*run_rendered(start), "--simulate", "demo", env=start.env) as process:
        target = f"localhost:{process.port}"
        config = scrape_config(endpoint, "unused", target, labels_of(agent), tmp_path, secrets)
        assert config["scheme"] == "https"
        with scraping(tmp_path, [config]) as prometheus:
            ((labels, _),) = prometheus.until("up == 1").items()
            assert ("job", "gpu-cost-exporter") in labels
            assert prometheus.until('DCGM_FI_DEV_GPU_UTIL{pod="llama-pretrain-worker-0"}')
        probes_pass(agent, process)


def monitor_of_agents(found: list[Document]) -> Document:
    wanted = of_kind(found, "DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
    (monitor,) = [
        one for one in found if one["kind"] == "PodMonitor" and one["spec"]["selector"]["matchLabels"].items() <= wanted
    ]
    return monitor


def probes_pass(agent: Document, process: AgentProcess) -> None:
    """Run the kubelet's probes as rendered: without a password, and without a check of the certificate."""
    (container,) = agent["spec"]["template"]["spec"]["containers"]
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    for probe in ("livenessProbe", "readinessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["scheme"] == "HTTPS"
        url = f"https://127.0.0.1:{process.port}{asked['path']}"
        with urllib.request.urlopen(url, timeout=10, context=blind) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_monitor_job_name_matches_the_alert_rules(kind: str) -> None:
    switch = kind[0].lower() + kind[1:]
    found = read(rendered(values=f"monitoring: {{{switch}: {{enabled: true}}, rules: {{enabled: true}}}}"))
    spec = of_kind(found, kind)["spec"]
    (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    (job,) = [rule["replacement"] for rule in endpoint["relabelings"] if rule.get("targetLabel") == "job"]
    rules = [rule for group in of_kind(found, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    (expr,) = (rule["expr"] for rule in rules if rule.get("record") == "instance:gpu_exporter_job:info")
    pattern = re.search(r'job=~"([^"]+)"', expr)
    assert pattern is not None
    assert re.fullmatch(pattern[1], job)


def test_pod_monitors_select_their_pods_and_a_port_of_them() -> None:
    found = documents(EVERYTHING)
    for monitor in (one for one in found if one["kind"] == "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [
            one
            for one in found
            if one["kind"] in {"DaemonSet", "Deployment"}
            and wanted <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        (workload,) = chosen
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}


def test_service_monitors_select_the_services_of_their_pods() -> None:
    values = "monitoring: {podMonitor: {enabled: false}, serviceMonitor: {enabled: true}}"
    found = documents(EVERYTHING, values=values)
    for monitor in (one for one in found if one["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in found if one["kind"] == "Service" and wanted <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        chosen = service["spec"]["selector"].items()
        (workload,) = [
            one
            for one in found
            if one["kind"] in {"DaemonSet", "Deployment"}
            and chosen <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        component = workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        assert service["metadata"]["labels"]["app.kubernetes.io/component"] == component


@pytest.mark.parametrize("kind", ["DaemonSet", "Deployment"])
def test_scrape_annotations_name_the_port_path_and_scheme(kind: str) -> None:
    found = documents(EVERYTHING, values="monitoring: {scrapeAnnotations: true}")
    template = of_kind(found, kind)["spec"]["template"]
    reported = template["metadata"]["annotations"]
    (container,) = template["spec"]["containers"]
    assert reported["prometheus.io/scrape"] == "true"
    assert reported["prometheus.io/port"] == str(container["ports"][0]["containerPort"])
    assert reported["prometheus.io/path"] == "/metrics"
    assert reported["prometheus.io/scheme"] == container["livenessProbe"]["httpGet"].get("scheme", "HTTP").lower()

"""`agent.config` and `service.config`: every option passes through the chart, and the program reads it unchanged."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_support import documents, of_kind, template
from files_support import read_yaml

from exporter.config import load_agent
from exporter.config.options import OPTIONS, Option
from exporter.service.settings import OPTIONS as SERVE_OPTIONS
from exporter.service.settings import load_settings

# A value other than the default, in the form of users.
AGENT: dict[str, Any] = {
    "release-seconds": "90s",
    "sample-interval": "500ms",
    "source": "nvml",
    "idle-threshold": 0.1,
    "kubelet-interval": "10s",
    "attribution-expiry": "2m",
    "gpu-resources": ["nvidia.com/gpu", "nvidia.com/mig-*", "example.com/gpu"],
    "proc-root": "/host/proc",
    "cost-service-url": "https://gpu.example/cost",
    "pod-log-root": "/host/logs",
    "workload-manager": "host",
    "job-mapping-dir": "/jobs",
    "kubeconfig": "/etc/kubeconfig",
    "kube-start-jitter": "0ms",
    "team-keys": "team,example.com/team",
    "cost-labels": ["project", "example.com/cost-center"],
    "pod-labels": ["team"],
    "pod-annotations": ["example.com/cost-center"],
    "reservation-namespaces": ["kai-resource-reservation"],
    "dcgm-names": 4.9,
    "hostname-label": "instance_name",
    "dcgm-pod-uid": True,
    "dcgm-old-labels": "on",
    "dcgm-model-hyphens": False,
    "xid-count-window": "10m",
    "clock-events-window": "1h",
    "series-limit": 10000000,
    "linger": "24h",
    "instance-type": "p5.48xlarge",
    "capacity-type": "spot",
    "region": "us-east-1",
    "state-interval": "1.5s",
    "simulate": "demo",
    "simulate-hour": "1m",
    "log-format": "json",
    "log-level": "warning",
}
# Options that values of the chart decide; the last ones may be set where the chart does not set them.
AGENT_DECIDED = {
    "listen": "agent.port",
    "attribution": "agent.attribution.enabled",
    "kubelet-socket": "agent.attribution.kubeletPath",
    "kube-metadata": "agent.metadata.enabled",
    "namespace-teams": "agent.metadata.namespaceTeams",
    "node-name": "node",
    "dcgm-address": "agent.dcgm.address",
    "state-dir": "agent.state",
    "lock-dir": "lock",
    "price-book": "agent.priceBook",
    "collectors": "agent.collectors",
    "web-config": "agent.web",
}
GIVEN_TOO = {
    "state": {"enabled": True},
    "priceBook": {"existingConfigMap": "a"},
    "collectors": {"existingConfigMap": "b"},
    "web": {"tlsSecret": "c"},
}
SERVICE: dict[str, Any] = {
    "external-url": "https://gpu.example/cost",
    "title": "What GPUs cost",
    "currency": "EUR",
    "timezone": "Europe/Berlin",
    "refresh-interval": "10m",
    "history": "400d",
    "log-format": "json",
    "log-level": "debug",
    "prometheus": "https://mimir.example/prometheus",
    "prometheus-token-file": "/etc/gpu-cost-exporter/prometheus/token",
    "prometheus-username": "me",
    "prometheus-password-file": "/etc/gpu-cost-exporter/prometheus/password",
    "prometheus-ca-file": "/etc/gpu-cost-exporter/prometheus/ca.crt",
    "prometheus-cert-file": "/etc/gpu-cost-exporter/prometheus/tls.crt",
    "prometheus-key-file": "/etc/gpu-cost-exporter/prometheus/tls.key",
    "prometheus-skip-verify": "off",
    "prometheus-headers": ["X-Scope-OrgID=team-a"],
    "prometheus-timeout": "2m",
    "prometheus-concurrency": 8,
    "prometheus-retries": 0,
    "cluster-label": "k8s_cluster",
}
SERVICE_DECIDED = {
    "listen": "service.port",
    "store": "service.store",
    "budgets": "service.budgets",
    "web-config": "service.web",
}


def test_every_option_is_covered_here() -> None:
    assert AGENT.keys() | AGENT_DECIDED.keys() == {option.key for option in OPTIONS}
    assert SERVICE.keys() | SERVICE_DECIDED.keys() == {option.key for option in SERVE_OPTIONS}
    assert not AGENT.keys() & AGENT_DECIDED.keys()


def written(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the options file that the chart makes."""
    name = of_kind(found := documents(values=yaml.safe_dump(values)), kind)["metadata"]["name"]
    (data,) = [one["data"] for one in found if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name]
    (text,) = [text for key, text in data.items() if key in {"agent.yaml", "service.yaml"}]
    return {"text": text, "read": read_yaml(text)}


def test_agent_reads_every_option_as_written(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text(yaml.safe_dump(AGENT | {"listen": ":9400"}), encoding="utf-8")
    charts = tmp_path / "chart.yaml"
    charts.write_text(written({"agent": {"config": AGENT}}, "DaemonSet")["text"], encoding="utf-8")
    assert load_agent({"config": charts}, {}, check_paths=False) == load_agent({"config": ours}, {}, check_paths=False)


def test_service_reads_every_option_as_written() -> None:
    made = written({"service": {"enabled": True, "config": SERVICE}}, "Deployment")["read"]
    assert made == SERVICE | {"listen": ":9401", "store": "/store/days.sqlite"}


@pytest.mark.parametrize("key", AGENT_DECIDED)
def test_agent_config_refuses_options_set_by_chart_values(key: str) -> None:
    value = {"listen": ":9400", "attribution": "on", "kube-metadata": "on", "namespace-teams": "on"}.get(key, "/x")
    refused = template(values=yaml.safe_dump({"agent": GIVEN_TOO | {"config": {key: value}}}), check=False)
    assert f"agent.config.{key}: " in refused.stderr
    assert AGENT_DECIDED[key] in refused.stderr


@pytest.mark.parametrize("key", SERVICE_DECIDED)
def test_service_config_refuses_options_set_by_chart_values(key: str) -> None:
    service = {
        "enabled": True,
        "budgets": {"existingConfigMap": "a"},
        "web": {"tlsSecret": "b"},
        "config": {"prometheus": "http://p:9090", key: ":9401" if key == "listen" else "/x"},
    }
    refused = template(values=yaml.safe_dump({"service": service}), check=False)
    assert f"service.config.{key}: " in refused.stderr
    assert SERVICE_DECIDED[key] in refused.stderr


@pytest.mark.parametrize(
    "option", [one for one in OPTIONS if one.key in AGENT and one.default], ids=lambda one: one.key
)
def test_every_default_can_be_written_explicitly(option: Option) -> None:
    default = read_yaml(option.default or "")
    made = written({"agent": {"config": {option.key: default}}}, "DaemonSet")["read"]
    assert made[option.key] == default


def test_program_refuses_a_wrong_service_option_by_its_key(tmp_path: Path) -> None:
    service = {"enabled": True, "config": {"prometheus": "http://p:9090/api/v1"}}
    path = tmp_path / "service.yaml"
    path.write_text(written({"service": service}, "Deployment")["text"], encoding="utf-8")
    with pytest.raises(Exception, match="prometheus"):
        load_settings({"config": path}, {})


@pytest.mark.parametrize(
    "text", ["  # mine\nDCGM_FI_DEV_GPU_UTIL, gauge, x\n", "\n\ta: {{ b }} 'c' \"d\"\n", "# ä: |\n"]
)
def test_collectors_text_reaches_the_pod_unchanged(text: str) -> None:
    found = documents(values=yaml.safe_dump({"agent": {"collectors": {"content": text}}}))
    (shipped,) = [one["data"] for one in found if one["metadata"]["name"].endswith("-collectors")]
    assert shipped == {"metrics.csv": text}

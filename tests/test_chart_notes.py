"""The notes after an installation: next steps, and settings that may be unintended, each with its key."""

import re
import shutil
from pathlib import Path

import pytest
from chart_support import CHART, FIXTURES, OPERATOR_API, REGISTRY, documents, helm
from files_support import read_yaml

EVERYTHING = FIXTURES / "chart-everything.yaml"
# `helm template` omits the notes and `helm install` needs a cluster: a copy of the chart has them in a manifest.
AS_MANIFEST = '{kind: Notes, apiVersion: v1, text: {{ tpl (.Files.Get "notes.txt") . | toJson }}}\n'


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("chart") / CHART.name
    shutil.copytree(CHART, copy, ignore=shutil.ignore_patterns("dashboards", "prometheus-rules.yaml"))
    shutil.copy(CHART / "templates" / "NOTES.txt", copy / "notes.txt")
    (copy / "templates" / "notes.yaml").write_text(AS_MANIFEST, encoding="utf-8")
    return copy


def notes(chart: Path, values: str = "", *files: Path, api: str = "") -> str:
    (chart.parent / "values.yaml").write_text(values or "{}", encoding="utf-8")
    given = (REGISTRY, *files, chart.parent / "values.yaml")
    words: list[str | Path] = [word for path in given for word in ("--values", path)]
    words += ["--api-versions", api] if api else []
    said = helm("template", "gpu", chart, "-n", "gpu", "--kube-version", "1.33.0", "-s", "templates/notes.yaml", *words)
    text = read_yaml(said.stdout)["text"]
    assert isinstance(text, str)
    return text


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("- ")]


@pytest.mark.parametrize("name", ["default", "everything"])
def test_notes_name_only_objects_that_exist(chart: Path, name: str) -> None:
    files = (EVERYTHING,) if name == "everything" else ()
    text = notes(chart, "monitoring: {dashboards: {enabled: false}, rules: {enabled: false}}", *files)
    found = documents(*files, release="gpu", namespace="gpu")
    there = {f"{document['kind'].lower()}/{document['metadata']['name']}" for document in found}
    named = set(re.findall(r"\b((?:daemonset|service|deployment)/[a-z0-9-]+)", text))
    assert named
    assert named <= there
    assert "pod-security.kubernetes.io/enforce=privileged" in text
    assert "gpu-cost-exporter doctor" in text
    assert ("https://localhost:9400" in text) is (name == "everything")


# Values of a user, and the key at the start of the line.
NOTED = {
    "nothing": ("", "monitoring.podMonitor.enabled"),
    "no rules": ("monitoring: {podMonitor: {enabled: true}}", "monitoring.rules.enabled"),
    "monitors that nobody selects": ("monitoring: {podMonitor: {enabled: true}, labels: null}", "monitoring.labels"),
    "a job that the alert does not know": (
        "monitoring: {podMonitor: {enabled: true}, scrape: {job: gpus}}",
        "monitoring.scrape.job",
    ),
    "a job of Prometheus' own": ("monitoring: {scrapeAnnotations: true}", "monitoring.scrapeAnnotations"),
    "no metadata": ("agent: {metadata: {enabled: false}}", "agent.metadata.enabled"),
    "labels without metadata": (
        "agent: {metadata: {enabled: false}, config: {pod-labels: [team]}}",
        "agent.config.pod-labels",
    ),
    "cost labels without metadata": (
        "agent: {metadata: {enabled: false}, config: {cost-labels: [project]}}",
        "agent.config.cost-labels",
    ),
    "no process data": ("agent: {processes: {enabled: false}}", "agent.processes.enabled"),
    "no state": ("agent: {state: {enabled: false}}", "agent.state.enabled"),
    "no attribution": ("agent: {attribution: {enabled: false}}", "agent.attribution.enabled"),
    "no driver": ("agent: {driver: {mode: none}}", "agent.driver.mode"),
    "a simulated node": ("agent: {config: {simulate: demo}}", "agent.config.simulate"),
    "the whole host as the driver's folder": (
        "agent: {driver: {mode: privileged, privileged: {hostPath: /}}}",
        "agent.driver.privileged.hostPath",
    ),
    "OpenCost and another port": ("agent: {port: 9500}", "agent.openCost"),
    "an engine without its library": ("agent: {dcgm: {address: 'dcgm:5555'}}", "agent.dcgm.library"),
    "an engine on the pod's own loopback": ("agent: {dcgm: {address: 'localhost:5555'}}", "agent.dcgm.address"),
    "DCGM alone, and no engine": ("agent: {config: {source: dcgm}}", "agent.dcgm.address"),
    "DCGM alone, and no library": ("agent: {hostNetwork: true, config: {source: dcgm}}", "agent.dcgm.library"),
    "a Secret that may have TLS": ("agent: {web: {existingSecret: w, basicAuth: true}}", "agent.web.existingSecret"),
    "two ways of scraping": (
        "monitoring: {podMonitor: {enabled: true}, scrapeAnnotations: true}",
        "monitoring.scrapeAnnotations",
    ),
    "rights that nobody makes": ("agent: {metadata: {enabled: true}}\nrbac: {create: false}", "rbac.create"),
    "a network policy for the host's network": (
        "agent: {hostNetwork: true, metadata: {enabled: false}}\nnetworkPolicy: {enabled: true}",
        "networkPolicy.enabled",
    ),
    "an affinity of one's own": (
        "agent: {affinity: {nodeAffinity: {}}}",
        "agent.affinity",
    ),
    "admin access before it is on everywhere": (
        "agent: {metadata: {enabled: true}, driver: {mode: dra}}",
        "agent.driver.mode",
    ),
    "a store that goes with its pod": (
        "service: {enabled: true, config: {prometheus: 'http://p:9090'}, store: {type: emptyDir}}",
        "service.store.type",
    ),
}


def test_notes_warn_about_an_agent_that_cannot_lock_the_node(chart: Path) -> None:
    stateless = "agent: {{attribution: {{enabled: {}}}, state: {{enabled: false}}}}"
    assert [line for line in warnings(notes(chart, stateless.format("false"))) if "cannot lock the node" in line]
    assert not [line for line in warnings(notes(chart, stateless.format("true"))) if "cannot lock the node" in line]


@pytest.mark.parametrize("what", NOTED)
def test_notes_warn_about_questionable_values_by_key(chart: Path, what: str) -> None:
    values, key = NOTED[what]
    said = warnings(notes(chart, values))
    assert [line for line in said if line.startswith(f"- {key}: ")], said


OPENSHIFT_API = "security.openshift.io/v1"


def test_notes_warn_about_openshift_without_an_scc(chart: Path) -> None:
    assert "- agent.scc.create: no Sec" in notes(chart, "agent: {scc: {create: false}}", api=OPENSHIFT_API)
    text = notes(chart, api=OPENSHIFT_API)
    assert "Platform: openshift" in text
    assert "agent.scc.create" not in text
    assert "podSecurityLabelSync=false" in text


def test_notes_of_a_correct_installation_have_only_the_price_decision(chart: Path) -> None:
    text = notes(chart, api=OPERATOR_API)
    assert warnings(text) == []
    assert "Warnings:" not in text
    assert "Your prices are missing." in text
    assert "prices init --agent localhost:9400 > prices.yaml" in text
    assert "the agents read pods, nodes, namespaces, resource claims and slices of the whole cluster, and write" in text
    assert "release=kube-prometheus-stack" in text
    decided = notes(chart, "agent: {priceBook: {existingConfigMap: prices}, metadata: {enabled: false}}")
    assert "prices" not in decided
    assert "Permissions:" not in decided

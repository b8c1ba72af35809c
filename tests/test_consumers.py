"""Public dashboards, OpenCost, Kubecost and alert rules for dcgm-exporter, unmodified, find the truth."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from agent_support import ROOT, AgentProcess
from alerts_support import HIDING, HOLDERS, NODES, PageError, agents, opencost_reads, prometheuses
from chart_support import FIXTURES, Scraper, documents, of_kind
from files_support import read_yaml

CONSUMERS: list[dict[str, Any]] = read_yaml((FIXTURES / "consumers.yaml").read_text(encoding="utf-8"))
ASKED = [
    pytest.param(consumer, ask, honor, id=f"{consumer['who']}: {ask['where']}, honorLabels {str(honor).lower()}")
    for consumer in CONSUMERS
    for ask in consumer["asks"]
    for honor in ([consumer["honor"]] if "honor" in consumer else [True, False])
]


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, AgentProcess]]:
    with agents() as found:
        yield found


@pytest.fixture(scope="module")
def servers(nodes: dict[str, AgentProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Scraper]]:
    with prometheuses(nodes, tmp_path_factory.mktemp("consumers")) as found:
        yield found


def values(server: Scraper, selector: str, label: str) -> str:
    """Return all values of a dashboard's variable, in the form in which Grafana inserts them into a query."""
    found = {dict(labels).get(label, "") for labels in server.query(f"group by ({label}) ({selector})")} - {""}
    assert found, f"no values: {label} of {selector}"
    return "|".join(re.escape(one).replace("\\", "\\\\") for one in sorted(found))


@pytest.mark.parametrize(("consumer", "ask", "honor"), ASKED)
def test_third_party_queries_return_the_true_values(
    servers: dict[bool, Scraper], consumer: dict[str, Any], ask: dict[str, Any], *, honor: bool
) -> None:
    server, query = servers[honor], ask["query"]
    for name, (selector, label) in consumer.get("variables", {}).items():
        query = query.replace(f"${name}", values(server, selector, label))
    found: dict[str, float] = {}
    for labels, value in server.query(query).items():
        read = [dict(labels).get(name, "") for name in ask["by"]]
        assert all(read), f"the panel reads {ask['by']}, there is {dict(labels)}"
        key = "|".join(read)
        found[key] = max(value, found.get(key, value))
    if "find" in ask:
        assert found == {key: pytest.approx(value, abs=ask["within"] + 1e-9) for key, value in ask["find"].items()}
    if "rows" in ask:
        assert len(found) == ask["rows"], found
    if "between" in ask:
        least, most = ask["between"]
        assert {key: value for key, value in found.items() if not least <= value <= most} == {}


# Alert rules: each by its pending alerts, because half an hour has not passed.


def pending(server: Scraper) -> dict[str, set[str]]:
    """Return the pods, or GPUs without one, that each rule of benchmarks/public_rules.yaml has found; no rule fails."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/api/v1/rules", timeout=10) as answer:
        groups = json.load(answer)["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
    return {
        rule["name"]: {
            one["labels"].get("pod") or f"{one['labels']['instance']} {one['labels']['gpu']}" for one in rule["alerts"]
        }
        for rule in rules
    }


def test_public_alert_rules_find_the_idle_pods_and_no_busy_one(servers: dict[bool, Scraper]) -> None:
    # By the second time, all rules of the group have seen the samples of the last one.
    servers[True].until('count_over_time(ALERTS{alertname="PublicNothingAtAll"}[1m]) >= 2', count=2)
    found = pending(servers[True])
    idle = {HIDING, "idle-slice"}
    # These read whole GPUs alone, because the driver has no utilisation of an instance.
    assert found["PublicAverageRunning"] == found["PublicAverageOnPod"] == {HIDING}
    assert found["PublicNothingAtAll"] == idle
    # These cannot distinguish an idle pod from a GPU without a holder.
    for name in ("PublicInstant", "PublicAverage"):
        assert found[name] >= {HIDING}
        assert found[name] & set.union(*HOLDERS.values()) == {HIDING}


# OpenCost's collector, which has its own scraper.


def is_target(labels: dict[str, str]) -> bool:
    """Return whether it takes a pod with these labels for an exporter."""
    keys = ("app", "app.kubernetes.io/name", "app.kubernetes.io/component")
    return any("dcgm-exporter" in labels.get(key, "").lower() for key in keys)


@pytest.mark.parametrize(("values_text", "seen"), [("", True), ("agent: {openCost: false}", False)])
def test_opencost_detects_the_pods_as_an_exporter_unless_disabled(values_text: str, *, seen: bool) -> None:
    spec = of_kind(documents(values=values_text), "DaemonSet")["spec"]["template"]
    assert is_target(spec["metadata"]["labels"]) is seen
    (container,) = spec["spec"]["containers"]
    assert 9400 in {port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("node", NODES)
def test_opencost_parser_reads_the_whole_page(nodes: dict[str, AgentProcess], node: str) -> None:
    status, text = nodes[node].get("/metrics")
    assert status == 200
    records = opencost_reads(text)
    assert len(records) == len([line for line in text.splitlines() if line and not line.startswith("#")])


def test_opencost_gets_use_of_every_holder_and_the_gpu_of_whole_gpu_holders(
    nodes: dict[str, AgentProcess],
) -> None:
    used, gpus = {}, {}
    for agent in nodes.values():
        for one in opencost_reads(agent.get("/metrics")[1]):
            pod = one.labels.get("pod", "")
            if one.name == "DCGM_FI_PROF_GR_ENGINE_ACTIVE" and one.labels.get("container"):
                assert pod not in used, "two rows of one pod are averaged"
                assert one.labels["pod_uid"]
                used[pod] = one.value
            if one.name == "DCGM_FI_DEV_DEC_UTIL" and one.labels.get("container"):
                gpus[pod] = [one.labels[key] for key in ("device", "modelName", "UUID")]
    (usage,) = (ask for consumer in CONSUMERS for ask in consumer["asks"] if ask["where"] == "QueryGPUsUsageAvg")
    truth = {key.split("|")[1]: value for key, value in usage["find"].items()}
    assert used == {pod: pytest.approx(value, abs=0.03) for pod, value in truth.items()}
    assert set(gpus) == {"train-0", "resnet-0", HIDING}
    assert all(all(identity) for identity in gpus.values())


@pytest.mark.parametrize("text", ['a{b="c} 1\n', "a{b=c} 1\n", 'a{b="c"}\n', 'a{b="c"} x\n', "1 2\n"])
def test_page_invalid_for_the_opencost_parser_is_refused(text: str) -> None:
    with pytest.raises(PageError):
        opencost_reads(text)


# promtool's lint, with the findings that compatibility costs.

TOTAL = 'counter metrics should have "_total" suffix'
# The name is dcgm-exporter's, and so is modelName; other names are available in the 4.9 names and our own series.
PRICE_OF_COMPATIBILITY = {
    f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION {TOTAL}": "its name up to 4.8; a counter",
    f"DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS {TOTAL}": "the same",
    f"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS {TOTAL}": "the same",
    f"DCGM_FI_DEV_PCIE_REPLAY_COUNTER {TOTAL}": "the same",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER metric name should not include type 'counter'": "the same",
    f"DCGM_EXP_XID_ERRORS_TOTAL {TOTAL}": "its name: the suffix is there, in capitals",
    f"DCGM_EXP_CLOCK_EVENTS_TOTAL {TOTAL}": "the same",
}
# The part of a golden page that identifies the program is omitted.
_LEFT_OUT = re.compile(r"^(gpu_exporter_build_info)\{\.\.\.\}", re.MULTILINE)
GOLDEN = [
    path
    for path in sorted((ROOT / "tests" / "golden").glob("*.txt"))
    if path.read_text(encoding="utf-8").startswith("#") and "openmetrics" not in path.name
]


def lint(text: str) -> set[str]:
    """Return promtool's findings for a page, without those for the label modelName."""
    renamed = text.replace("modelName=", "model_name=")
    done = subprocess.run(["promtool", "check", "metrics"], input=renamed, capture_output=True, text=True, check=False)
    return set(done.stderr.splitlines())


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed: make install")
def test_promtool_finds_only_issues_required_for_compatibility(nodes: dict[str, AgentProcess]) -> None:
    assert len(GOLDEN) >= 16
    pages = {path.name: _LEFT_OUT.sub(r"\1", path.read_text(encoding="utf-8")) for path in GOLDEN}
    pages |= {node: agent.get("/metrics")[1] for node, agent in nodes.items()}
    said = {name: lint(text) for name, text in pages.items()}
    assert {
        name: found - PRICE_OF_COMPATIBILITY.keys()
        for name, found in said.items()
        if found - PRICE_OF_COMPATIBILITY.keys()
    } == {}
    assert set.union(*said.values()) == PRICE_OF_COMPATIBILITY.keys(), "the list has an obsolete finding"
    assert any("modelName=" in text for text in pages.values())

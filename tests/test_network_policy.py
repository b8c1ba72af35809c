"""Peers that may connect to agent and cost service under the NetworkPolicies of the chart and of kustomize."""

from collections.abc import Callable
from pathlib import Path

import pytest
from chart_support import Document, Peer, composed, connects, documents, isolated, of_kind, overlay, pod_of

API_SERVER = Peer(address="10.0.0.1")
OUTSIDE = Peer(address="198.51.100.7")
PROMETHEUS = Peer(
    namespace="monitoring", labels={"app.kubernetes.io/name": "prometheus"}, address="10.1.0.5", ports={"web": 9090}
)
NEIGHBOUR = Peer(namespace="gpu-cost", labels={"app": "another"}, address="10.1.0.6")
STRANGER = Peer(namespace="default", labels={"app.kubernetes.io/name": "prometheus"}, address="10.1.0.7")
DNS = Peer(namespace="kube-system", labels={"k8s-app": "kube-dns"}, address="10.1.0.8")
ENGINE = Peer(namespace="gpu-operator", labels={"app": "nvidia-dcgm"}, address="10.1.0.9")
EVERYBODY = (API_SERVER, OUTSIDE, PROMETHEUS, NEIGHBOUR, STRANGER, DNS, ENGINE)

ON = "networkPolicy: {enabled: true, apiServer: {cidrs: [10.0.0.1/32]}}\n"
SERVICE = "service: {enabled: true, config: {prometheus: 'http://prometheus-operated.monitoring:9090'}}\n"
Install = Callable[[Path], list[Document]]

ADDRESS = {
    "target": {"kind": "NetworkPolicy", "name": "gpu-cost-exporter-api-server"},
    "patch": "- {op: replace, path: /spec/egress/1/to/0/ipBlock/cidr, value: 10.0.0.1/32}",
}
"""Required patch of a user of `network-policy-api-server`."""

AGENTS: dict[str, Install] = {
    "chart": lambda _folder: documents(values=ON + "agent: {metadata: {enabled: false}}"),
    "kustomize": lambda _folder: overlay("network-policy"),
}
ASKING: dict[str, Install] = {
    "chart": lambda _folder: documents(values=ON + "agent: {metadata: {enabled: true}}"),
    "kustomize": lambda folder: composed(
        folder, ["metadata", "network-policy", "network-policy-api-server"], patches=[ADDRESS]
    ),
}
MEASURING: dict[str, Install] = {
    "chart": lambda _folder: documents(
        values=ON.replace(
            "true, ", "true, dcgm: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gpu-operator}}}], "
        )
        + "agent: {metadata: {enabled: false}, dcgm: {address: 'nvidia-dcgm.gpu-operator:5555'}}"
    ),
    "kustomize": lambda folder: composed(folder, ["dcgm", "network-policy", "network-policy-dcgm"]),
}
SERVICES: dict[str, Install] = {
    "chart": lambda _folder: documents(values=ON + SERVICE),
    "kustomize": lambda _folder: overlay("cost-service"),
    "kustomize, without agents": lambda _folder: overlay("cost-service-only"),
}


def policies(found: list[Document]) -> list[Document]:
    return [document for document in found if document["kind"] == "NetworkPolicy"]


def reached(found: list[Document], source: Peer) -> set[tuple[str, int, str]]:
    """Return everything that a pod reaches: address, port and protocol, out of many of each."""
    ports = (22, 53, 80, 443, 5353, 5555, 6443, 9090, 9400, 9401, 10250)
    return {
        (peer.address, port, protocol)
        for peer in EVERYBODY
        for port in ports
        for protocol in ("TCP", "UDP")
        if connects(policies(found), source, peer, port, protocol)
    }


NAMES = {(DNS.address, 53, "TCP"), (DNS.address, 53, "UDP")}
"""Connections for name resolution."""


@pytest.mark.parametrize(
    "install", [*AGENTS.values(), *ASKING.values()], ids=[*AGENTS, *(f"{name}, asking" for name in ASKING)]
)
def test_only_prometheus_reaches_the_agent(install: Install, tmp_path: Path) -> None:
    found = install(tmp_path / "ours")
    agent = pod_of(of_kind(found, "DaemonSet"))
    assert isolated(policies(found), agent) == {"Ingress", "Egress"}
    assert agent.ports == {"metrics": 9400}
    assert [peer for peer in EVERYBODY if connects(policies(found), peer, agent, 9400)] == [PROMETHEUS]
    for port, protocol in ((9401, "TCP"), (9400, "UDP"), (22, "TCP")):
        assert not any(connects(policies(found), peer, agent, port, protocol) for peer in EVERYBODY)


@pytest.mark.parametrize("install", AGENTS.values(), ids=AGENTS)
def test_agent_with_kubelet_only_has_no_egress(install: Install, tmp_path: Path) -> None:
    found = install(tmp_path / "ours")
    assert reached(found, pod_of(of_kind(found, "DaemonSet"))) == set()


@pytest.mark.parametrize("install", ASKING.values(), ids=ASKING)
def test_agent_with_metadata_reaches_only_the_api_server_and_dns(install: Install, tmp_path: Path) -> None:
    found = install(tmp_path / "ours")
    api = {(API_SERVER.address, port, "TCP") for port in (443, 6443)}
    assert reached(found, pod_of(of_kind(found, "DaemonSet"))) == api | NAMES


@pytest.mark.parametrize("install", MEASURING.values(), ids=MEASURING)
def test_agent_with_dcgm_reaches_only_the_engine_and_dns(install: Install, tmp_path: Path) -> None:
    found = install(tmp_path / "ours")
    assert reached(found, pod_of(of_kind(found, "DaemonSet"))) == {(ENGINE.address, 5555, "TCP")} | NAMES


@pytest.mark.parametrize("install", SERVICES.values(), ids=SERVICES)
def test_service_reaches_prometheus_and_dns_and_only_prometheus_reaches_it(install: Install, tmp_path: Path) -> None:
    found = install(tmp_path / "ours")
    service = pod_of(of_kind(found, "Deployment"))
    assert isolated(policies(found), service) == {"Ingress", "Egress"}
    assert reached(found, service) == {(PROMETHEUS.address, 9090, "TCP")} | NAMES
    assert service.ports == {"metrics": 9401}
    assert [peer for peer in EVERYBODY if connects(policies(found), peer, service, 9401)] == [PROMETHEUS]
    assert not any(connects(policies(found), peer, service, 9400) for peer in EVERYBODY)


def test_agents_and_service_do_not_reach_each_other() -> None:
    for found in (documents(values=ON + SERVICE), overlay("cost-service")):
        agent, service = pod_of(of_kind(found, "DaemonSet")), pod_of(of_kind(found, "Deployment"))
        assert not connects(policies(found), agent, service, 9401)
        assert not connects(policies(found), service, agent, 9400)


def test_allowed_ingress_controller_reaches_the_service_but_no_agent() -> None:
    named = "[{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}}]"
    found = documents(values=ON.replace("true, ", f"true, serviceFrom: {named}, ") + SERVICE)
    agent, service = pod_of(of_kind(found, "DaemonSet")), pod_of(of_kind(found, "Deployment"))
    assert connects(policies(found), STRANGER, service, 9401)
    assert not connects(policies(found), STRANGER, agent, 9400)


def test_service_egress_uses_namespace_and_port_of_the_prometheus_url() -> None:
    values = SERVICE.replace("http://prometheus-operated.monitoring:9090", "https://prometheus.default")
    where = "prometheus: {namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: default}}}"
    found = documents(values=ON.replace("true, ", f"true, {where}, ") + values)
    service = pod_of(of_kind(found, "Deployment"))
    assert reached(found, service) == {(STRANGER.address, 443, "TCP")} | NAMES
    assert [peer for peer in EVERYBODY if connects(policies(found), peer, service, 9401)] == [STRANGER]


def test_custom_namespace_selectors_replace_the_default_labels() -> None:
    # Helm merges a mapping with the default: both labels would then be required.
    where = "prometheus: {namespaceSelector: {matchLabels: {team: observability}}}"
    names = "dns: {namespaceSelector: {matchLabels: {dns: here}}}"
    found = policies(documents(values=ON.replace("true, ", f"true, {where}, {names}, ") + SERVICE))
    for policy in found:
        (rule,) = policy["spec"]["ingress"]
        assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"team": "observability"}}}]
    (service,) = [one for one in found if one["metadata"]["name"].endswith("-service")]
    assert service["spec"]["egress"][0]["to"] == [{"namespaceSelector": {"matchLabels": {"dns": "here"}}}]


def test_openshift_service_queries_thanos_and_user_workload_prometheus_scrapes() -> None:
    thanos = SERVICE.replace(
        "http://prometheus-operated.monitoring:9090", "https://thanos-querier.openshift-monitoring.svc:9091"
    )
    (service,) = policies(documents(values="platform: openshift\nagent: {enabled: false}\n" + thanos + ON))
    names = {
        key: one["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for key, one in (
            ("in", service["spec"]["ingress"][0]["from"][0]),
            ("out", service["spec"]["egress"][1]["to"][0]),
        )
    }
    assert names == {"in": "openshift-user-workload-monitoring", "out": "openshift-monitoring"}
    assert service["spec"]["egress"][1]["ports"] == [{"port": 9091, "protocol": "TCP"}]


def test_no_policy_is_rendered_by_default() -> None:
    assert policies(documents()) == policies(overlay("base")) == []


def test_api_server_placeholder_address_is_an_invalid_cidr(tmp_path: Path) -> None:
    found = composed(tmp_path / "ours", ["metadata", "network-policy", "network-policy-api-server"])
    policy = of_kind(policies(found), "NetworkPolicy", "api-server")
    (peer,) = policy["spec"]["egress"][1]["to"]
    assert not peer["ipBlock"]["cidr"][0].isdigit(), "a valid placeholder would be applied, and reach no peer"

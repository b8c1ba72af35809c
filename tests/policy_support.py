"""What NetworkPolicies allow, as Kubernetes defines it: a pod that no policy names may speak with everybody."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One end of a connection: a pod, or with an empty namespace an address outside of the cluster's pods."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.9.9.9"
    ports: Mapping[str, int] = field(default_factory=dict)
    """Of a pod, by name."""

    @property
    def namespace_labels(self) -> dict[str, str]:
        """What Kubernetes itself puts on a namespace."""
        return {"kubernetes.io/metadata.name": self.namespace}


def pod_of(workload: Document) -> Peer:
    """A pod of a DaemonSet or a Deployment."""
    template = workload["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for one in template["spec"]["containers"] for port in one["ports"]}
    return Peer(namespace=workload["metadata"]["namespace"], labels=template["metadata"]["labels"], ports=ports)


def isolated(policies: Iterable[Document], pod: Peer) -> set[str]:
    """Directions in which only what is named gets through: Ingress, Egress."""
    return {direction for policy in _of(policies, pod) for direction in policy["spec"]["policyTypes"]}


def connects(policies: Iterable[Document], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is let out of its source and in to its target."""
    every = list(policies)
    return _passes(every, "Egress", source, target, target, port, protocol) and _passes(
        every, "Ingress", target, source, target, port, protocol
    )


def _passes(
    policies: list[Document], direction: str, pod: Peer, other: Peer, target: Peer, port: int, protocol: str
) -> bool:
    if direction not in isolated(policies, pod):
        return True
    return any(
        _ports(rule, target, port, protocol) and _peers(rule, direction, policy, other)
        for policy in _of(policies, pod)
        if direction in policy["spec"]["policyTypes"]
        for rule in policy["spec"].get(direction.lower(), ())
    )


def _of(policies: Iterable[Document], pod: Peer) -> Iterator[Document]:
    for policy in policies:
        here = pod.namespace == policy["metadata"]["namespace"]
        if here and _matches(policy["spec"]["podSelector"], pod.labels):
            yield policy


def _ports(rule: Document, target: Peer, port: int, protocol: str) -> bool:
    """Whether a rule names the port; a named one is the target's own."""
    if not rule.get("ports"):
        return True
    return any(
        one.get("protocol", "TCP") == protocol and target.ports.get(one.get("port"), one.get("port", port)) == port
        for one in rule["ports"]
    )


def _peers(rule: Document, direction: str, policy: Document, other: Peer) -> bool:
    named = rule.get("from" if direction == "Ingress" else "to")
    return not named or any(_peer(one, policy, other) for one in named)


def _peer(named: Document, policy: Document, other: Peer) -> bool:
    if block := named.get("ipBlock"):
        address = ip_address(other.address)
        return address in ip_network(block["cidr"]) and not any(
            address in ip_network(left_out) for left_out in block.get("except", ())
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in named:
        here = _matches(named["namespaceSelector"], other.namespace_labels)
    else:
        here = other.namespace == policy["metadata"]["namespace"]
    return here and _matches(named.get("podSelector", {}), other.labels)


def _matches(selector: Document, labels: Mapping[str, str]) -> bool:
    """Whether labels match; an empty selector matches everything."""
    known = {"matchLabels", "matchExpressions"}
    assert selector.keys() <= known, f"{selector}: this evaluator knows {known} only"
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        _expression(one, labels) for one in selector.get("matchExpressions", ())
    )


def _expression(one: Document, labels: Mapping[str, str]) -> bool:
    value = labels.get(one["key"])
    match one["operator"]:
        case "In":
            return value in one["values"]
        case "NotIn":
            return value not in one["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case unknown:
            raise AssertionError(f"operator {unknown}")

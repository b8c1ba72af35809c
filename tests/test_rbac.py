"""Rights in the manifests against the API requests of the real agent and doctor, per switch."""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from agent_support import fork, run_fork, until
from chart_support import FOLDERS, Document, built, composed, documents, of_kind, options, overlay, pod_spec

from gpu_simulator import scenario
from gpu_simulator.node import SimulatedNode

PATIENCE_SECONDS = 45.0
BINDINGS = {"RoleBinding", "ClusterRoleBinding"}
ROLES = {"Role", "ClusterRole"}

Right = tuple[str, str, str]
"""Verb, group and resource."""

EVERYTHING: frozenset[Right] = frozenset(
    {
        ("list", "", "pods"),
        ("watch", "", "pods"),
        ("get", "", "nodes"),
        ("get", "", "namespaces"),
        ("list", "resource.k8s.io", "resourceslices"),
        ("watch", "resource.k8s.io", "resourceslices"),
        ("get", "resource.k8s.io", "resourceclaims"),
    }
)
NAMES = {"pods": "pods", "nodes": "node", "namespaces": "namespace", "resourceslices": "resourceslices"} | {
    "resourceclaims": "resourceclaim"
}
"""Names of resources in the request counts of the simulated API server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One way to install the agent, and a node on which it makes all of its requests."""

    chart: str
    """Values of the chart."""
    components: tuple[str, ...]
    """Components of kustomize."""
    scenario: str
    more: Mapping[str, object] = field(default_factory=dict)
    """Further options, which need no further right."""


SWITCHES = {
    "metadata": Switch(chart="metadata: {enabled: true}", components=("metadata",), scenario="dra"),
    "metadata without namespaces": Switch(
        chart="metadata: {enabled: true, namespaceTeams: false}",
        components=("metadata", "without-namespace-teams"),
        scenario="dra",
    ),
    "metadata without DRA": Switch(
        chart="metadata: {enabled: true, dra: false}", components=("metadata", "without-dra"), scenario="owners"
    ),
    "metadata without either": Switch(
        chart="metadata: {enabled: true, dra: false, namespaceTeams: false}",
        components=("metadata", "without-dra", "without-namespace-teams"),
        scenario="kai",
        more={
            "gpu-resources": ["nvidia.com/gpu", "example.com/gpu"],
            "reservation-namespaces": ["kai-resource-reservation"],
            "team-keys": ["example.com/team"],
            "pod-labels": ["team"],
            "pod-annotations": ["example.com/cost-center"],
        },
    ),
}


def granted(found: list[Document]) -> set[Right]:
    """Return the rights of the roles that are bound to the agent's account, over all bindings."""
    agent = of_kind(found, "DaemonSet")
    account = (agent["metadata"]["namespace"], pod_spec(agent)["serviceAccountName"])
    roles = {
        (document["kind"], document["metadata"]["name"]): document for document in found if document["kind"] in ROLES
    }
    bound = [
        roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]
        for binding in found
        if binding["kind"] in BINDINGS
        and account in {(subject.get("namespace"), subject["name"]) for subject in binding["subjects"]}
    ]
    assert len(bound) == len(roles), "every role is bound to the agent"
    return {
        (verb, group, resource)
        for role in bound
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def asked(node: SimulatedNode) -> set[Right]:
    """Return the requests to the API as rights, except for the versions of a group, which need none."""
    plural = {name: resource for resource, name in NAMES.items()}
    pairs = (name.split() for name in node.api.requests if name != "get resource.k8s.io")
    return {
        (verb, "resource.k8s.io" if name.startswith("resource") else "", plural.get(name, name)) for verb, name in pairs
    }


@contextmanager
def agent_of(env: Mapping[str, str], log: Path) -> Iterator[None]:
    """Run a real agent on a node that this process simulates; it ends with the block."""
    with log.open("w") as output:
        process = fork("agent", env={**os.environ, **env}, stderr=output)
    try:
        yield
    finally:
        process.kill()
        process.wait(PATIENCE_SECONDS)


async def doctor_of(env: Mapping[str, str]) -> str:
    """Return the output of the real doctor on such a node."""
    done = await asyncio.to_thread(run_fork, "doctor", env={**os.environ, **env})
    return done.stdout + done.stderr


@asynccontextmanager
async def node_of(name: str, rights: set[Right]) -> AsyncIterator[SimulatedNode]:
    """Run a node whose API server refuses all but the granted requests, in a folder with a short name for sockets."""
    folder = tempfile.TemporaryDirectory()
    node = SimulatedNode(scenario.load(name), Path(folder.name), time.time)
    node.api.forbidden = {NAMES[resource] for _, _, resource in EVERYTHING - rights}
    await node.start()
    try:
        yield node
    finally:
        await node.stop()
        folder.cleanup()


def around(node: SimulatedNode, chosen: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Return the environment of a program on a simulated node, with the options of a manifest."""
    (folder / "options.yaml").write_text(
        yaml.safe_dump(
            {
                "kubeconfig": str(node.kubeconfig),
                "kubelet-socket": str(node.kubelet_socket),
                "kube-start-jitter": "0s",
                "listen": "127.0.0.1:0",
                **{key: value for key, value in chosen.items() if key not in {"listen", "state-dir"}},
            }
        ),
        encoding="utf-8",
    )
    return {"GPU_COST_EXPORTER_CONFIG": str(folder / "options.yaml"), "NODE_NAME": node.truth().node}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests of the programs, and the output of the doctor."""

    agent: set[Right]
    doctor: set[Right]
    said: str


async def asked_by_the_programs(name: str, chosen: Mapping[str, object], rights: set[Right], folder: Path) -> Asked:
    """Run agent and doctor on a node until the agent has used all granted rights."""
    async with node_of(name, rights) as node:
        env = around(node, chosen, folder)
        with agent_of(env, folder / "agent.log"):
            deadline = time.monotonic() + PATIENCE_SECONDS
            while rights - asked(node) and time.monotonic() < deadline:  # noqa: ASYNC110 - the API only counts
                await asyncio.sleep(0.1)
            await asyncio.sleep(1)  # for requests beyond the granted ones
        by_agent = asked(node)
        node.api.requests.clear()
        said = await doctor_of(env)
        return Asked(agent=by_agent, doctor=asked(node), said=said)


@pytest.mark.parametrize("name", SWITCHES)
async def test_granted_rights_equal_the_requests_of_the_programs(name: str, tmp_path: Path) -> None:
    switch = SWITCHES[name]
    chart = documents(values=f"agent:\n  {switch.chart}\n")
    kustomized = composed(tmp_path / "kustomization", switch.components)
    rights = granted(kustomized)
    assert rights == granted(chart)
    (container,) = pod_spec(of_kind(kustomized, "DaemonSet"))["containers"]
    seen = await asked_by_the_programs(switch.scenario, options(container) | switch.more, rights, tmp_path)
    assert seen.agent == rights
    assert seen.doctor <= rights
    assert "forbidden" not in seen.said


def test_dra_driver_needs_only_the_rights_of_metadata(tmp_path: Path) -> None:
    values = "agent: {metadata: {enabled: true}, driver: {mode: dra}}"
    kustomized = composed(tmp_path / "kustomization", ["metadata", "driver-dra"])
    assert granted(documents(values=values)) == granted(kustomized) == EVERYTHING


async def test_missing_right_is_reported_by_name(tmp_path: Path) -> None:
    namespaces = ("get", "", "namespaces")
    rights = {right for right in EVERYTHING if right != namespaces and not right[1]}
    seen = await asked_by_the_programs("owners", {"kube-metadata": True}, rights, tmp_path)
    assert seen.agent - rights == {namespaces} == seen.doctor - rights
    assert "get namespaces" in seen.said


async def test_agent_without_metadata_makes_no_requests_and_has_no_rights(tmp_path: Path) -> None:
    for found in (documents(values="agent: {metadata: {enabled: false}}"), overlay("base")):
        assert not {document["kind"] for document in found} & (ROLES | BINDINGS)
        assert pod_spec(of_kind(found, "DaemonSet"))["automountServiceAccountToken"] is False
        account = of_kind(found, "ServiceAccount")
        assert account["automountServiceAccountToken"] is False
    async with node_of("dra", set()) as node:
        env = around(node, {}, tmp_path)
        log = tmp_path / "agent.log"
        with agent_of(env, log):
            await until(lambda: "listening on" in log.read_text(encoding="utf-8"))
            await asyncio.sleep(2)  # as long as the other agents need for their first requests
        assert await doctor_of(env)
        assert not node.api.requests


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_overlay_grants_more_than_the_agent_requests(folder: Path) -> None:
    found = built(folder)
    if "DaemonSet" not in {document["kind"] for document in found}:
        assert not {document["kind"] for document in found} & ROLES
        return
    rights = granted(found)
    # OpenShift's admission reads this right, which the agent never uses, and only for the constraints of that name.
    admission = {("use", "security.openshift.io", "securitycontextconstraints")}
    assert rights - admission in (set(), set(EVERYTHING))
    assert (rights & admission == admission) is (folder.name == "openshift")
    has_token = pod_spec(of_kind(found, "DaemonSet"))["automountServiceAccountToken"]
    assert has_token is bool(rights - admission)


def test_the_cost_service_has_no_token_and_no_rights() -> None:
    values = "agent: {enabled: false}\nservice: {enabled: true, config: {prometheus: 'http://p:9090'}}"
    for found in (documents(values=values), overlay("cost-service-only")):
        assert not {document["kind"] for document in found} & (ROLES | BINDINGS)
        spec = pod_spec(of_kind(found, "Deployment"))
        assert spec["automountServiceAccountToken"] is False
        assert "serviceAccountName" not in spec

"""The deployment is valid for the oldest and the newest Kubernetes that we support, and fits the program."""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.attribution.metadata import Metadata, MetadataSettings
from exporter.attribution.podresources import KubeletClient
from exporter.simulator import scenario
from exporter.simulator.node import SimulatedNode

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "deploy" / "kustomize" / "base"
METADATA = ROOT / "deploy" / "kustomize" / "overlays" / "metadata"
KUBERNETES_VERSIONS = ("1.27", "1.37")
# Kinds of the Prometheus operator, for which there is no schema here; everything else must be validated.
CUSTOM_KINDS = {"PodMonitor", "PrometheusRule"}

Document = dict[str, Any]


def built(tmp_path: Path, folder: Path = BASE) -> tuple[Path, list[Document]]:
    """Build a folder as kubectl would."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
    elif shutil.which("kustomize"):
        command = ["kustomize", "build", str(folder)]
    else:
        pytest.skip("needs kubectl or kustomize: make install")
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    path = tmp_path / "built.yaml"
    path.write_text(text, encoding="utf-8")
    return path, list(yaml.safe_load_all(text))


def of_kind(documents: list[Document], kind: str) -> Document:
    (found,) = (document for document in documents if document["kind"] == kind)
    return found


@pytest.mark.parametrize("folder", [BASE, METADATA], ids=lambda folder: folder.name)
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_document_is_strictly_valid_or_a_known_custom_kind(tmp_path: Path, version: str, folder: Path) -> None:
    path, documents = built(tmp_path, folder)
    validate = Path(sys.executable).with_name("kubernetes-validate")
    result = subprocess.run(
        [validate, "--strict", "-k", version, str(path)], check=False, capture_output=True, text=True
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    passed = set(re.findall(r"passed for resource (\w+)/", output))
    unknown = set(re.findall(r"Couldn't find schema for kind (\w+)", output))
    assert unknown == CUSTOM_KINDS
    assert passed == {document["kind"].lower() for document in documents if document["kind"] not in CUSTOM_KINDS}


def test_strict_validation_sees_a_misspelt_key(tmp_path: Path) -> None:
    path, _ = built(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace("hostPID:", "hostPid:"), encoding="utf-8")
    validate = Path(sys.executable).with_name("kubernetes-validate")
    result = subprocess.run([validate, "--strict", str(path)], check=False, capture_output=True, text=True)
    assert result.returncode != 0
    assert "hostPid" in result.stdout + result.stderr


def test_the_prometheus_rule_is_the_rules_file(tmp_path: Path) -> None:
    _, documents = built(tmp_path)
    rules = yaml.safe_load((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))
    assert of_kind(documents, "PrometheusRule")["spec"] == rules
    script = [sys.executable, str(ROOT / "scripts" / "rules.py"), "--check"]
    result = subprocess.run(script, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_the_agent_gets_no_rights_on_the_api_and_no_capability(tmp_path: Path) -> None:
    _, documents = built(tmp_path)
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & {doc["kind"] for doc in documents}
    spec = of_kind(documents, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"state", "tmp"}


def test_with_metadata_the_agent_gets_its_token_its_own_name_and_nothing_else(tmp_path: Path) -> None:
    _, base = built(tmp_path)
    _, overlay = built(tmp_path, METADATA)
    before, after = (of_kind(documents, "DaemonSet")["spec"]["template"]["spec"] for documents in (base, overlay))
    (old,), (new,) = before["containers"], after["containers"]
    assert after["automountServiceAccountToken"] is True
    assert new["args"] == [*old["args"], "--kube-metadata=on"]
    added = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in new["env"][len(old["env"]) :]}
    assert added == {"POD_NAMESPACE": "metadata.namespace", "POD_NAME": "metadata.name"}
    changed = {"automountServiceAccountToken": True, "containers": after["containers"]}
    assert after == before | changed
    assert new == old | {"args": new["args"], "env": new["env"]}


def test_the_rights_are_bound_to_the_identity_that_the_agent_runs_as(tmp_path: Path) -> None:
    _, documents = built(tmp_path, METADATA)
    role, account = of_kind(documents, "ClusterRole")["metadata"], of_kind(documents, "ServiceAccount")["metadata"]
    binding, agent = of_kind(documents, "ClusterRoleBinding"), of_kind(documents, "DaemonSet")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", role["name"])
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert account["namespace"] == agent["metadata"]["namespace"] == "gpu-cost"
    assert agent["spec"]["template"]["spec"]["serviceAccountName"] == account["name"]


def test_the_rights_follow_the_agent_into_another_namespace(tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    folder.mkdir()
    resource = os.path.relpath(METADATA, folder.resolve())
    (folder / "kustomization.yaml").write_text(f"namespace: elsewhere\nresources: [{resource}]\n", encoding="utf-8")
    _, documents = built(tmp_path, folder)
    (subject,) = of_kind(documents, "ClusterRoleBinding")["subjects"]
    assert subject["namespace"] == of_kind(documents, "ServiceAccount")["metadata"]["namespace"] == "elsewhere"


async def test_the_agent_has_a_right_to_all_that_it_asks_for_and_to_nothing_else(tmp_path: Path) -> None:
    _, documents = built(tmp_path, METADATA)
    rules = of_kind(documents, "ClusterRole")["rules"]
    granted = {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    groups = {resource: rule["apiGroups"] for rule in rules for resource in rule["resources"]}
    assert {resource for resource, group in groups.items() if group == ["resource.k8s.io"]} == {
        "resourceslices",
        "resourceclaims",
    }
    assert all(group == [""] for resource, group in groups.items() if not resource.startswith("resource"))
    node = SimulatedNode(scenario.load("dra"), tmp_path / "node", time.time)
    await node.start()
    settings = MetadataSettings(node=node.truth().node, kubeconfig=node.kubeconfig)
    metadata = Metadata(settings, clock=time.time, random=lambda: 0.5)
    kubelet = KubeletClient(str(node.kubelet_socket))
    running = asyncio.create_task(metadata.run())
    try:
        deadline = time.monotonic() + 30
        while granted - asked_of(node) and time.monotonic() < deadline:
            metadata.note(await kubelet.fetch(time.time()), time.time())
            metadata.evidence(time.time())
            await asyncio.sleep(0.2)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await kubelet.close()
        await node.stop()
    assert asked_of(node) == granted


def asked_of(node: SimulatedNode) -> set[tuple[str, str]]:
    """Verbs and resources that were asked for; what the API's groups are, everybody may ask."""
    pairs = (name.split() for name in node.api.requests if name != "get resource.k8s.io")
    return {(verb, resource if resource.endswith("s") else f"{resource}s") for verb, resource in pairs}


def test_the_pod_monitor_selects_the_agents_pods_and_keeps_the_workloads_labels(tmp_path: Path) -> None:
    _, documents = built(tmp_path)
    template = of_kind(documents, "DaemonSet")["spec"]["template"]
    monitor = of_kind(documents, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True
    assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}


def test_the_alert_on_a_dead_exporter_matches_the_job_that_the_pod_monitor_makes(tmp_path: Path) -> None:
    _, documents = built(tmp_path)
    monitor = of_kind(documents, "PodMonitor")["metadata"]
    groups = of_kind(documents, "PrometheusRule")["spec"]["groups"]
    (expr,) = (rule["expr"] for group in groups for rule in group["rules"] if rule.get("alert") == "GPUExporterDown")
    pattern = re.search(r'job=~"([^"]+)"', expr)
    assert pattern is not None
    assert re.fullmatch(pattern[1], f"{monitor['namespace']}/{monitor['name']}")
    assert re.fullmatch(pattern[1], "gpu-cost-exporter")


def test_the_image_is_made_of_files_that_exist_and_that_the_build_may_see() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")
    }
    copied = [
        source
        for line in dockerfile.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert copied
    for source in copied:
        assert source in allowed, f"{source} is copied, and .dockerignore hides it"
        assert (ROOT / source).exists(), source
    assert "STOPSIGNAL SIGTERM" in dockerfile

"""The kustomize folders are valid for the oldest and the newest supported Kubernetes, and fit the program."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from chart_support import (
    BASE,
    COMPONENTS,
    FOLDERS,
    KUBERNETES_VERSIONS,
    KUSTOMIZE,
    OPERATOR_KINDS,
    ROOT,
    Document,
    built,
    composed,
    of_kind,
    options,
    overlay,
    pod_spec,
    started,
    text_of,
    without_schema,
)
from files_support import read_yaml

from exporter import __version__
from exporter.config import load_agent
from exporter.service.settings import load_settings

NEW = ("driver-dra",)
"""Overlays for newer versions only, as documented in their first lines."""
UNPUBLISHED = {"SecurityContextConstraints"}
"""OpenShift's kinds, which have no published schema."""
RIGHTS = {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
FOLDER = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_document_is_valid_or_has_no_published_schema(tmp_path: Path, version: str) -> None:
    folders = [folder for folder in FOLDERS if folder.name not in NEW or version != KUBERNETES_VERSIONS[0]]
    texts = {text for folder in folders for text in re.split(r"(?m)^---\n", text_of(folder))}
    path = tmp_path / "built.yaml"
    path.write_text("---\n".join(sorted(texts)), encoding="utf-8")
    assert without_schema(version, path) == UNPUBLISHED


def test_readme_names_exactly_the_overlays_and_components() -> None:
    text = (KUSTOMIZE / "README.md").read_text(encoding="utf-8")
    _, overlays, components = re.split(r"(?m)^\| (?:overlay|component) \|.*$", text)
    for folders, section in ((FOLDERS[1:], overlays), (COMPONENTS, components)):
        rows = "\n".join(line.split("|")[1] for line in section.splitlines() if line.startswith("|"))
        assert sorted(re.findall(r"`([a-z0-9-]+)`", rows)) == [folder.name for folder in folders]


ALL_AT_ONCE = (
    "metadata",
    "without-dra",
    "without-namespace-teams",
    "driver-privileged",
    "dcgm",
    "beside-dcgm-exporter",
    "price-book",
    "collectors",
    "service-monitor",
    "tls",
    "cost-service",
    "budgets",
    "dashboards",
    "network-policy",
    "network-policy-api-server",
    "network-policy-dcgm",
    "network-policy-cost-service",
    "priority-quota",
    "openshift",
    "without-fixed-user",
    "links",
)
FILES = ("gpu-cost-exporter-prices", "gpu-cost-exporter-collectors", "gpu-cost-exporter-service-budgets")


def test_links_use_the_addresses_of_the_component(tmp_path: Path) -> None:
    rules = of_kind(composed(tmp_path / "ours", ["links"]), "PrometheusRule")["spec"]["groups"]
    annotations = [rule["annotations"] for group in rules for rule in group["rules"] if "alert" in rule]
    for one in annotations:
        assert one["runbook_url"].startswith("https://gpu-cost.example.com/runbook#gpu")
        assert one["dashboard"].startswith("https://grafana.example.com/d/")


def test_every_component_is_tested_in_combination() -> None:
    used = {
        Path(component).name
        for folder in FOLDERS
        for component in read_yaml((folder / "kustomization.yaml").read_text(encoding="utf-8")).get("components", ())
    }
    assert {folder.name for folder in COMPONENTS} == used | set(ALL_AT_ONCE)


def test_components_combine_and_follow_the_namespace(tmp_path: Path) -> None:
    files = [{"name": name, "literals": ["key=text"]} for name in FILES]
    found = composed(tmp_path / "ours", ALL_AT_ONCE, namespace="elsewhere", configMapGenerator=files)
    cluster = {"ClusterRole", "ClusterRoleBinding", "SecurityContextConstraints"}
    for document in found:
        assert document["kind"] in cluster or "elsewhere" in {
            document["metadata"].get("namespace"),
            document["metadata"]["name"],
        }, document["metadata"]
    text = text_of(tmp_path / "ours")
    assert "gpu-cost" not in re.findall(r"namespace: (\S+)$", text, flags=re.MULTILINE)
    path = tmp_path / "all.yaml"
    path.write_text(text, encoding="utf-8")
    assert without_schema(KUBERNETES_VERSIONS[-1], path) == UNPUBLISHED
    (endpoint,) = of_kind(found, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"


def test_readme_examples_build_and_a_changed_file_restarts_the_pods(tmp_path: Path) -> None:
    text = (KUSTOMIZE / "README.md").read_text(encoding="utf-8")
    blocks = [read_yaml(block) for block in re.findall(r"(?m)(?:^    (?!kubectl).*\n)+", text) if ":" in block]
    whole, more = (block for block in blocks if isinstance(block, dict))
    components = [Path(name).name for name in (*whole.pop("components"), *more.pop("components"))]
    (resource,) = whole.pop("resources")
    names = []
    for number, prices in enumerate(("a: 1", "a: 2")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "prices.yaml").write_text(prices, encoding="utf-8")
        found = composed(folder, components, resource=KUSTOMIZE / "overlays" / Path(resource).name, **whole, **more)
        agent = pod_spec(of_kind(found, "DaemonSet"))
        (volume,) = [volume for volume in agent["volumes"] if volume["name"] == "prices"]
        assert volume["configMap"]["name"] in {one["metadata"]["name"] for one in found if one["kind"] == "ConfigMap"}
        names.append(volume["configMap"]["name"])
        assert options(agent["containers"][0])["sample-interval"] == "500ms"
    assert len(set(names)) == 2
    images = {pod_spec(of_kind(found, kind))["containers"][0]["image"] for kind in ("DaemonSet", "Deployment")}
    assert images == {f"registry.example/gpu-cost-exporter{suffix}:{__version__}" for suffix in ("", "-service")}


def test_without_operator_component_removes_all_operator_kinds(tmp_path: Path) -> None:
    found = composed(tmp_path / "ours", ["cost-service", "service-monitor", "without-operator"])
    assert not {document["kind"] for document in found} & OPERATOR_KINDS
    assert {"Deployment", "DaemonSet"} <= {document["kind"] for document in found}


def test_service_monitor_component_keeps_the_pod_monitor_of_the_service(tmp_path: Path) -> None:
    found = composed(tmp_path / "ours", ["cost-service", "service-monitor"])
    assert of_kind(found, "PodMonitor")["metadata"]["name"] == "gpu-cost-exporter-service"
    assert of_kind(found, "ServiceMonitor")["metadata"]["name"] == "gpu-cost-exporter"


def test_prometheus_rule_matches_the_rules_file() -> None:
    rules = read_yaml((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))
    assert of_kind(built(BASE), "PrometheusRule")["spec"] == rules
    script = [sys.executable, str(ROOT / "scripts" / "rules.py"), "--check"]
    result = subprocess.run(script, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_dashboards_match_the_repository() -> None:
    ours = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "dashboards").glob("*.json")}
    shipped = {
        key: text
        for document in overlay("cost-service")
        if document["kind"] == "ConfigMap" and document["metadata"]["labels"]["grafana_dashboard"] == "1"
        for key, text in document["data"].items()
    }
    assert shipped == ours


def test_images_have_the_current_version() -> None:
    found = overlay("cost-service")
    images = {kind: pod_spec(of_kind(found, kind))["containers"][0]["image"] for kind in ("DaemonSet", "Deployment")}
    assert images == {
        "DaemonSet": f"gpu-cost-exporter:{__version__}",
        "Deployment": f"gpu-cost-exporter-service:{__version__}",
    }


@FOLDER
def test_programs_accept_their_options(folder: Path, tmp_path: Path) -> None:
    for document in built(folder):
        if document["kind"] not in {"DaemonSet", "Deployment"}:
            continue
        start = started(document, built(folder), tmp_path / document["kind"])
        (container,) = pod_spec(document)["containers"]
        (port,) = container["ports"]
        if document["kind"] == "DaemonSet":
            assert start.args == ["agent"]
            agent = load_agent({}, start.env)
            assert (agent.serving.listen.port, agent.warnings) == (port["containerPort"], ())
            kept = agent.running.state_dir
        else:
            assert start.args == ["serve"]
            settings = load_settings({}, start.env)
            assert settings.serving.listen.port == port["containerPort"]
            kept = settings.fleet.store
            assert kept
        assert kept is None or kept.is_relative_to(tmp_path), "the path is on a volume"


def test_agent_has_no_api_rights_and_no_capabilities() -> None:
    found = built(BASE)
    assert not RIGHTS & {document["kind"] for document in found}
    spec = pod_spec(of_kind(found, "DaemonSet"))
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"state", "lock", "tmp"}


def test_metadata_overlay_adds_only_the_token_and_the_pod_name() -> None:
    before, after = (pod_spec(of_kind(found, "DaemonSet")) for found in (built(BASE), overlay("metadata")))
    (old,), (new,) = before["containers"], after["containers"]
    assert after["automountServiceAccountToken"] is True
    assert options(new) == options(old) | {"kube-metadata": True}
    fields = {
        entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in new["env"] if "valueFrom" in entry
    }
    assert fields == {
        "NODE_NAME": "spec.nodeName",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_NAME": "metadata.name",
    }
    changed = {"automountServiceAccountToken": True, "containers": after["containers"]}
    assert after == before | changed
    assert new == old | {"env": new["env"]}


def test_cluster_role_is_bound_to_the_service_account_of_the_agent() -> None:
    found = overlay("metadata")
    role, account = of_kind(found, "ClusterRole")["metadata"], of_kind(found, "ServiceAccount")["metadata"]
    binding, agent = of_kind(found, "ClusterRoleBinding"), of_kind(found, "DaemonSet")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", role["name"])
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert account["namespace"] == agent["metadata"]["namespace"] == "gpu-cost"
    assert pod_spec(agent)["serviceAccountName"] == account["name"]


def test_role_bindings_follow_the_namespace(tmp_path: Path) -> None:
    found = composed(tmp_path / "ours", [], resource=KUSTOMIZE / "overlays" / "metadata", namespace="elsewhere")
    (subject,) = of_kind(found, "ClusterRoleBinding")["subjects"]
    assert subject["namespace"] == of_kind(found, "ServiceAccount")["metadata"]["namespace"] == "elsewhere"
    found = composed(tmp_path / "scc", ["openshift"], namespace="elsewhere")
    (subject,) = of_kind(found, "RoleBinding")["subjects"]
    assert subject["namespace"] == of_kind(found, "RoleBinding")["metadata"]["namespace"] == "elsewhere"
    (rule,) = of_kind(found, "Role")["rules"]
    constraints = of_kind(found, "SecurityContextConstraints")
    assert rule["resourceNames"] == [constraints["metadata"]["name"]]
    assert constraints["priority"] == 0


@pytest.mark.parametrize("names", [(), ("cost-service",), ("cost-service", "service-monitor")], ids=", ".join)
def test_monitor_selects_the_pods_of_its_component_with_honor_labels(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = composed(tmp_path / "ours", names)
    workloads = {document["kind"]: document for document in found if document["kind"] in {"DaemonSet", "Deployment"}}
    jobs = {}
    for monitor in (document for document in found if document["kind"] in {"PodMonitor", "ServiceMonitor"}):
        (chosen,) = [kind for kind, workload in workloads.items() if selected(monitor, workload, found)]
        (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
        assert endpoint["honorLabels"] is True
        (container,) = pod_spec(workloads[chosen])["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
        (relabeling,) = endpoint["relabelings"]
        jobs[chosen] = (relabeling["targetLabel"], relabeling["replacement"])
    assert jobs.pop("DaemonSet") == ("job", "gpu-cost-exporter")
    assert jobs == ({"Deployment": ("job", "gpu-cost-service")} if names else {})


def selected(monitor: Document, workload: Document, found: list[Document]) -> bool:
    """Return whether a monitor selects a workload's pods, directly or through Services."""
    wanted, pod = monitor["spec"]["selector"]["matchLabels"], workload["spec"]["template"]["metadata"]["labels"]
    if monitor["kind"] == "PodMonitor":
        return bool(wanted.items() <= pod.items())
    services = [document for document in found if document["kind"] == "Service"]
    return any(
        wanted.items() <= one["metadata"]["labels"].items() and one["spec"]["selector"].items() <= pod.items()
        for one in services
    )


def test_down_alerts_match_the_job_names_of_the_monitors() -> None:
    groups = of_kind(built(BASE), "PrometheusRule")["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    (expr,) = (rule["expr"] for rule in rules if rule.get("record") == "instance:gpu_exporter_job:info")
    pattern = re.search(r'job=~"([^"]+)"', expr)
    assert pattern is not None
    assert re.fullmatch(pattern[1], "gpu-cost-exporter")
    assert re.fullmatch(pattern[1], "gpu-cost/gpu-cost-exporter"), "job of a PodMonitor without relabeling"
    assert not re.fullmatch(pattern[1], "gpu-cost-service")
    (expr,) = (rule["expr"] for rule in rules if rule.get("alert") == "GPUCostServiceDown")
    pattern = re.search(r'job=~"([^"]+)"', expr)
    assert pattern is not None
    assert re.fullmatch(pattern[1], "gpu-cost-service")
    assert not re.fullmatch(pattern[1], "gpu-cost-exporter")


def test_dockerfile_copies_only_existing_and_allowed_files() -> None:
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
        assert source in allowed, f"{source} is copied, but .dockerignore excludes it"
        assert (ROOT / source).exists(), source
    assert "STOPSIGNAL SIGTERM" in dockerfile

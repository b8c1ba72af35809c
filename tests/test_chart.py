"""The output of the Helm chart: equal to the golden files, valid for every Kubernetes, matching the repository."""

import base64
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chart_support import (
    CHART,
    EVERYTHING,
    FIXTURES,
    KUBERNETES_VERSIONS,
    MODES,
    OPERATOR_API,
    OPERATOR_KINDS,
    PLATFORMS,
    REGISTRY,
    ROOT,
    SIMULATED,
    Document,
    all_of_kind,
    documents,
    helm,
    manifest_problems,
    of_kind,
    read,
    rendered,
    template,
    without_copies,
    without_schema,
)
from files_support import read_yaml

SWITCHED_OVER = FIXTURES / "switched-over-values.yaml"
GOLDEN = ROOT / "tests" / "golden"

INSTALLS: dict[str, tuple[tuple[Path, ...], str]] = {
    "default": ((), ""),
    "everything": ((EVERYTHING,), ""),
    "switched-over": ((SWITCHED_OVER,), ""),
    "simulated": ((), SIMULATED),
    "with-monitors": ((), "monitoring: {podMonitor: {enabled: true}}"),
    **{f"platform-{name}": ((), f"platform: {name}") for name in PLATFORMS if name not in {"bare", "k3s"}},
}
"""Files and values; ``bare`` and ``k3s`` have the defaults, where the chart detects nothing."""
INSTALL = pytest.mark.parametrize("name", INSTALLS)


@INSTALL
def test_manifests_match_the_golden_files(name: str) -> None:
    path = GOLDEN / f"chart_{name}.yaml"
    files, values = INSTALLS[name]
    text = without_copies(rendered(*files, values=values))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "after an intended change: UPDATE_GOLDEN=1 pytest -k golden"


@pytest.mark.parametrize(
    ("platform", "kube_version", "api"),
    [
        ("gke", "1.33.4-gke.1245000", ""),
        ("eks", "1.33.1-eks-1fbb135", ""),
        ("k3s", "1.33.1+k3s1", ""),
        ("k3s", "1.33.1+rke2r1", ""),
        ("gpu-operator", "1.33.1", "nvidia.com/v1"),
        ("openshift", "1.33.1", "security.openshift.io/v1"),
        ("bare", "1.33.1", ""),
    ],
)
def test_auto_platform_equals_the_detected_platform(platform: str, kube_version: str, api: str) -> None:
    found, meant = (
        without_copies(rendered(values=f"platform: {value}", kube_version=kube_version, api=api))
        for value in ("auto", platform)
    )
    assert found == meant


def test_explicit_value_overrides_the_platform() -> None:
    values = """
platform: gke
agent:
  driver: {mode: runtimeClass, runtimeClass: {name: mine, deviceListMount: true}}
  priorityQuotaPods: 7
"""
    found = documents(values=values)
    spec = of_kind(found, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["runtimeClassName"] == "mine"
    assert "device-list" in {volume["name"] for volume in spec["volumes"]}
    assert of_kind(found, "ResourceQuota")["spec"]["hard"] == {"pods": "7"}


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ("", {"PodMonitor", "PrometheusRule"}),
        ("monitoring: {serviceMonitor: {enabled: true}}", {"ServiceMonitor", "PrometheusRule"}),
        ("monitoring: {scrapeAnnotations: true}", {"PrometheusRule"}),
        ("monitoring: {podMonitor: {enabled: false}, rules: {enabled: false}}", set()),
    ],
)
def test_monitoring_objects_are_installed_if_the_cluster_has_their_kinds(values: str, kinds: set[str]) -> None:
    found = read(rendered(values=values, api=OPERATOR_API))
    assert {one["kind"] for one in found} & OPERATOR_KINDS == kinds
    assert [one for one in found if one["metadata"]["labels"].get("grafana_dashboard")]
    assert not {one["kind"] for one in documents(values=values)} & {"PodMonitor", "PrometheusRule"}


@INSTALL
def test_helm_lint_reports_no_warnings(name: str, tmp_path: Path) -> None:
    files, values = INSTALLS[name]
    (tmp_path / "values.yaml").write_text(values or "{}", encoding="utf-8")
    chosen = [word for path in (REGISTRY, *files, tmp_path / "values.yaml") for word in ("--values", str(path))]
    said = helm("lint", "--strict", CHART, *chosen, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "[WARNING]" not in said.stdout
    assert "[INFO]" not in said.stdout or "icon is recommended" in said.stdout


VARIANTS = {**INSTALLS, **MODES}


# Kinds without a published schema: those of OpenShift.
WITHOUT_SCHEMA = {"SecurityContextConstraints"}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_manifest_is_strictly_valid(version: str, tmp_path: Path) -> None:
    texts = [rendered(values="monitoring: {rules: {enabled: true}, dashboards: {enabled: true}}")]
    for name, (files, values) in VARIANTS.items():
        if (name, version) == ("dra", "1.27"):  # this version lacks claims and the pod's field for them
            continue
        texts.append(without_copies(rendered(*files, values=values, kube_version=f"{version}.0")))
    path = tmp_path / "manifests.yaml"
    path.write_text("---\n".join(sorted({manifest for text in texts for manifest in re.split(r"(?m)^---\n", text)})))
    assert without_schema(version, path) == WITHOUT_SCHEMA


def test_validation_detects_misspelt_and_repeated_keys(tmp_path: Path) -> None:
    text = without_copies(rendered(EVERYTHING))
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace("honorLabels:", "honourLabels:").replace("hostPID:", "hostPid:"))
    for said in ("honourLabels", "hostPid"):
        assert any(said in line for line in manifest_problems("1.37", path))
    path.write_text("kind: ConfigMap\napiVersion: v1\nmetadata: {name: a, name: b}\n")
    with pytest.raises(yaml.YAMLError, match="twice"):
        manifest_problems("1.37", path)


@pytest.mark.parametrize(("more", "names"), [("", [""]), (", ineffective: true", ["", "-ineffective"])])
def test_chart_rules_match_the_repository(more: str, names: list[str]) -> None:
    rule = of_kind(read(rendered(values=f"monitoring: {{rules: {{enabled: true{more}}}}}")), "PrometheusRule")
    files = [ROOT / "rules" / f"prometheus-rules{name}.yaml" for name in names]
    groups = [group for file in files for group in read_yaml(file.read_text(encoding="utf-8"))["groups"]]
    assert rule["spec"] == {"groups": groups}


LINKS = """
service: {enabled: true, config: {prometheus: 'http://p:9090', external-url: 'https://cost.example.org/gpu'}}
monitoring: {rules: {enabled: true}, dashboards: {enabled: true}, links: %s}
"""
SHIPPED = "http://localhost:9401"


def links_of(values: str) -> tuple[set[str], set[str], str]:
    """Return the text before # in links to the runbook and before /d/ in links to dashboards, and the dashboards."""
    found = read(rendered(values=values))
    rules = [rule for group in of_kind(found, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    annotations = [rule["annotations"] for rule in rules if "alert" in rule]
    dashboards = [one for one in found if one["metadata"]["labels"].get("app.kubernetes.io/component") == "dashboards"]
    return (
        {one["runbook_url"].partition("#")[0] for one in annotations},
        {one["dashboard"].partition("/d/")[0] for one in annotations},
        "".join(text for one in dashboards for text in one["data"].values()),
    )


def test_default_links_point_to_the_cost_service() -> None:
    runbooks, grafana, dashboards = links_of(LINKS % "{}")
    assert runbooks == {"https://cost.example.org/gpu/runbook"}
    assert grafana == {"https://cost.example.org/gpu"}
    assert '"query": "https://cost.example.org/gpu"' in dashboards
    assert SHIPPED not in dashboards


def test_links_use_the_addresses_in_the_values() -> None:
    values = LINKS % "{runbook: 'https://wiki.example.org/gpu/runbook/', grafana: 'https://grafana.example.org/g/'}"
    runbooks, grafana, dashboards = links_of(values)
    assert runbooks == {"https://wiki.example.org/gpu/runbook"}
    assert grafana == {"https://grafana.example.org/g"}
    assert "https://wiki.example.org/gpu/runbook#gpuunderutilised" in dashboards
    assert "${cost_page}/runbook" not in dashboards


@pytest.mark.parametrize("address", ["wiki.example.org", "https://a.example.org/#x", "https://a.example.org/ b"])
def test_invalid_link_address_is_refused(address: str) -> None:
    done = template(values=f"monitoring: {{links: {{runbook: '{address}'}}}}", check=False)
    assert done.returncode != 0
    assert "monitoring.links.runbook" in done.stderr


def test_chart_dashboards_match_the_repository() -> None:
    found = read(rendered(values="monitoring: {dashboards: {enabled: true}}"))
    shipped = {
        key: text
        for document in all_of_kind(found, "ConfigMap")
        if document["metadata"].get("labels", {}).get("grafana_dashboard")
        for key, text in document["data"].items()
    }
    ours = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "dashboards").glob("*.json"))}
    assert {name: text.strip() for name, text in shipped.items()} == {name: text.strip() for name, text in ours.items()}


def test_every_object_is_small_enough_for_kubectl_apply() -> None:
    # Helm stores the object in an annotation; annotations may have 256 KiB in all.
    for document in read(rendered(EVERYTHING)):
        assert len(json.dumps(document)) < 256 * 1024 - 1024, document["metadata"]["name"]


def test_release_fits_into_the_helm_secret() -> None:
    chart = b"".join(base64.b64encode(path.read_bytes()) for path in sorted(CHART.rglob("*")) if path.is_file())
    kept = base64.b64encode(base64.b64encode(gzip.compress(chart + rendered(EVERYTHING).encode())))
    assert len(kept) < 1024 * 1024 / 2


def test_generated_chart_files_are_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "chart.py"), "--check"]
    done = subprocess.run(script, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def identity(document: Document, namespace: str) -> tuple[str, str, str]:
    cluster = {"ClusterRole", "ClusterRoleBinding", "PriorityClass", "SecurityContextConstraints"}
    meta = document["metadata"]
    where = "" if document["kind"] in cluster else meta.get("namespace", namespace)
    return document["kind"], where, meta["name"]


@pytest.mark.parametrize(
    ("first", "second"),
    [(("a", "gpu"), ("b", "gpu")), (("a", "one"), ("a", "two")), (("gpu-cost-exporter", "gpu"), ("gpu", "gpu"))],
    ids=["two releases in a namespace", "a release's name in two namespaces", "a name that is part of the other"],
)
def test_two_releases_share_no_object_pod_or_folder(first: tuple[str, str], second: tuple[str, str]) -> None:
    values = "agent: {state: {hostPath: ''}}"
    both = [
        (documents(EVERYTHING, values=values, release=release, namespace=namespace), namespace)
        for release, namespace in (first, second)
    ]
    names = [{identity(document, namespace) for document in found} for found, namespace in both]
    assert names[0] & names[1] == set()
    folders = [state_folder(of_kind(found, "DaemonSet")) for found, _ in both]
    assert folders[0] != folders[1]
    if first[1] == second[1]:
        for kind in ("DaemonSet", "Deployment"):
            selectors = [of_kind(found, kind)["spec"]["selector"]["matchLabels"] for found, _ in both]
            labels = [of_kind(found, kind)["spec"]["template"]["metadata"]["labels"] for found, _ in both]
            assert not selectors[0].items() <= labels[1].items()
            assert not selectors[1].items() <= labels[0].items()


def state_folder(daemonset: Document) -> str:
    volumes = daemonset["spec"]["template"]["spec"]["volumes"]
    (path,) = [volume["hostPath"]["path"] for volume in volumes if volume["name"] == "state"]
    return str(path)


@pytest.mark.parametrize("release", ["gpu-cost-exporter", "a" * 53])
def test_names_fit_the_kubernetes_length_limits(release: str) -> None:
    for document in documents(EVERYTHING, release=release, namespace="n" * 63):
        # Pods and Services need names that are DNS labels; other objects may have longer names.
        longest = 63 if document["kind"] in {"DaemonSet", "Deployment", "Service"} else 253
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= longest, document["metadata"]
        for value in document["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def test_numeric_looking_names_stay_strings() -> None:
    values = """
agent: {priorityClassName: '100', driver: {runtimeClass: {name: '1e3'}}}
serviceAccount: {name: '007'}
service: {priorityClassName: '1', serviceAccountName: '0x1', store: {storageClassName: '2'}}
"""
    found = documents(EVERYTHING, values=values, namespace="2026")
    assert {document["metadata"].get("namespace", "2026") for document in found} == {"2026"}
    agent = of_kind(found, "DaemonSet")["spec"]["template"]["spec"]
    names = [agent[key] for key in ("priorityClassName", "runtimeClassName", "serviceAccountName")]
    assert names == ["100", "1e3", "007"]
    service = of_kind(found, "Deployment")["spec"]["template"]["spec"]
    assert [service["priorityClassName"], service["serviceAccountName"]] == ["1", "0x1"]
    assert of_kind(found, "PersistentVolumeClaim")["spec"]["storageClassName"] == "2"
    (subject,) = of_kind(found, "ClusterRoleBinding")["subjects"]
    assert (subject["name"], subject["namespace"]) == ("007", "2026")


def test_objects_are_in_the_release_or_monitoring_namespace() -> None:
    cluster = {"ClusterRole", "ClusterRoleBinding", "SecurityContextConstraints", "PriorityClass"}
    for document in documents(EVERYTHING, namespace="here"):
        place = document["metadata"].get("namespace")
        if document["kind"] in cluster:
            assert place is None
        else:
            assert place in {"here", "monitoring"}, document["metadata"]


def annotations(kind: str, values: str) -> dict[str, str]:
    template = of_kind(documents(EVERYTHING, values=values), kind)["spec"]["template"]
    return dict(template["metadata"].get("annotations") or {})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("DaemonSet", "agent: {config: {sample-interval: 2s}}"),
        ("DaemonSet", "agent: {priceBook: {content: {rows: [{model: x, per_gpu_hour: 1}]}}}"),
        ("DaemonSet", "agent: {collectors: {content: 'DCGM_FI_DEV_GPU_UTIL, gauge, x'}}"),
        ("Deployment", "service: {config: {history: 60d}}"),
        ("Deployment", "service: {budgets: {content: [{name: a, amount: 1, currency: USD, period: week}]}}"),
    ],
)
def test_configuration_change_restarts_only_the_affected_pods(kind: str, values: str) -> None:
    for one in ("DaemonSet", "Deployment"):
        assert (annotations(one, "") != annotations(one, values)) is (one == kind)


def test_unrelated_value_change_restarts_no_pods() -> None:
    values = "monitoring: {rules: {enabled: false}, labels: {a: b}}\nnetworkPolicy: {enabled: false}"
    for kind in ("DaemonSet", "Deployment"):
        assert annotations(kind, "") == annotations(kind, values)


def test_default_role_is_read_only_and_disabled_metadata_has_no_token() -> None:
    found = documents()
    (role,) = all_of_kind(found, "ClusterRole")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    assert not {one["kind"] for one in found} & {"Role", "RoleBinding", *OPERATOR_KINDS}
    for values in ("metadata: {enabled: false}", "attribution: {enabled: false}", "config: {workload-manager: slurm}"):
        without = documents(values=f"agent: {{{values}}}")
        assert not {one["kind"] for one in without} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
        spec = of_kind(without, "DaemonSet")["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False


def test_digest_takes_precedence_over_the_tag() -> None:
    digest = "sha256:" + "a" * 64
    values = f"image: {{registry: r.example, repository: a/b, tag: v1, digest: '{digest}'}}"
    (container,) = of_kind(documents(values=values), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"r.example/a/b@{digest}"

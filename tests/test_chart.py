"""What the Helm chart renders: the same as yesterday, valid for every Kubernetes, and what the repository has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chart_support import (
    CHART,
    FIXTURES,
    KUBERNETES_VERSIONS,
    OPERATOR_KINDS,
    PRESETS,
    ROOT,
    Document,
    all_of_kind,
    documents,
    helm,
    kubeconform,
    of_kind,
    rendered,
)

EVERYTHING = FIXTURES / "chart-everything.yaml"
SWITCHED_OVER = FIXTURES / "switched-over-values.yaml"
GOLDEN = ROOT / "tests" / "golden"
# What the chart ships twice: held to the repository's own files below, and too long to read in a golden file.
COPIES = ("rules.yaml", "dashboards.yaml")
SERVICE_MONITORS = "monitoring: {podMonitor: {enabled: false}, serviceMonitor: {enabled: true}}"

INSTALLS: dict[str, tuple[Path, ...]] = {
    "default": (),
    "everything": (EVERYTHING,),
    "switched-over": (SWITCHED_OVER,),
    **{f"preset-{path.stem}": (path,) for path in sorted(PRESETS.glob("*.yaml"))},
}
INSTALL = pytest.mark.parametrize("name", INSTALLS)


def without_copies(text: str) -> str:
    """The manifests without rules and dashboards."""
    parts = re.split(r"(?m)^---\n", text)
    return "---\n".join(part for part in parts if not any(f"/{name}" in part.partition("\n")[0] for name in COPIES))


@INSTALL
def test_golden_manifests(name: str) -> None:
    path = GOLDEN / f"chart_{name}.yaml"
    text = without_copies(rendered(*INSTALLS[name]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "if this is meant: UPDATE_GOLDEN=1 pytest -k golden"


def test_every_preset_is_of_a_place_that_the_documentation_knows() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} >= {"gke", "gpu-operator", "eks", "aks", "openshift", "k3s"}


@INSTALL
def test_lint_has_nothing_to_say(name: str) -> None:
    chosen = [word for path in INSTALLS[name] for word in ("--values", str(path))]
    said = helm("lint", "--strict", CHART, *chosen, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "[WARNING]" not in said.stdout
    assert "[INFO]" not in said.stdout or "icon is recommended" in said.stdout


VARIANTS = {
    **{name: (files, "") for name, files in INSTALLS.items()},
    "privileged": ((), "agent: {driver: {mode: privileged}}"),
    "cdi": ((), "agent: {driver: {mode: cdi}}"),
    "dra": ((), "agent: {driver: {mode: dra}, metadata: {enabled: true}}"),
    "no-driver": ((), "agent: {driver: {mode: none}, processes: {enabled: false}}"),
    "not-root": ((), "agent: {attribution: {enabled: false}, state: {enabled: false}, processes: {enabled: false}}"),
    "service-monitors": ((EVERYTHING,), SERVICE_MONITORS),
    "service-alone": ((), "agent: {enabled: false}\nservice: {enabled: true, config: {prometheus: http://p:9090}}"),
}


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_manifest_is_strictly_valid(name: str, version: str, tmp_path: Path) -> None:
    files, values = VARIANTS[name]
    if (name, version) == ("dra", "1.27"):  # which has neither the claims nor the field of the pod that names them
        return
    text = rendered(*files, values=values, kube_version=f"{version}.0")
    found = [document for document in yaml.safe_load_all(text) if document]
    kinds = {document["kind"] for document in found}
    exempt = without_schema(kinds, version)
    assert rejected(text, exempt, version, tmp_path) == []
    said = kubeconform(text, version, tmp_path)
    told = [
        line for line in said.splitlines() if not any(f"could not find schema for {kind}" in line for kind in exempt)
    ]
    assert told == []


def without_schema(kinds: set[str], version: str) -> set[str]:
    """Kinds for which nobody publishes a schema: OpenShift's own, and DRA where that version has none."""
    exempt = {"SecurityContextConstraints"}
    if version == "1.27":
        exempt.add("ResourceClaimTemplate")
    return exempt & kinds


def rejected(text: str, exempt: set[str], version: str, folder: Path) -> list[str]:
    """What kubernetes-validate does not pass, the operator's kinds apart, which kubeconform looks at."""
    path = folder / "validated.yaml"
    path.write_text(text, encoding="utf-8")
    program = Path(sys.executable).with_name("kubernetes-validate")
    done = subprocess.run([program, "--strict", "-k", version, str(path)], check=False, capture_output=True, text=True)
    unknown = re.compile(r"Couldn't find schema for kind (\w+)")
    return [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if not line.startswith("INFO ") and not ((kind := unknown.search(line)) and kind[1] in OPERATOR_KINDS | exempt)
    ]


def test_validation_sees_misspelt_keys_of_custom_resources_too(tmp_path: Path) -> None:
    text = rendered(EVERYTHING).replace("honorLabels:", "honourLabels:").replace("hostPID:", "hostPid:")
    said = kubeconform(text, "1.37", tmp_path)
    assert "honourLabels" in said
    assert "hostPid" in said


def test_the_rules_are_the_repositorys() -> None:
    rule = of_kind(documents(values="monitoring: {rules: {enabled: true}}"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))


def test_the_dashboards_are_the_repositorys() -> None:
    found = documents(values="monitoring: {dashboards: {enabled: true}}")
    shipped = {
        key: text
        for document in all_of_kind(found, "ConfigMap")
        if document["metadata"].get("labels", {}).get("grafana_dashboard")
        for key, text in document["data"].items()
    }
    ours = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "dashboards").glob("*.json"))}
    assert {name: text.strip() for name, text in shipped.items()} == {name: text.strip() for name, text in ours.items()}
    # An annotation of kubectl's repeats an object, and no object may have annotations of more than 256 KiB in all.
    assert all(len(text.encode()) < 900_000 for text in shipped.values())


def test_what_is_generated_is_up_to_date() -> None:
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
def test_two_releases_share_no_object_no_pod_and_no_folder(first: tuple[str, str], second: tuple[str, str]) -> None:
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
def test_names_are_no_longer_than_kubernetes_takes(release: str) -> None:
    for document in documents(EVERYTHING, release=release, namespace="n" * 63):
        # Pods and Services have names that DNS has to take; every other object may have a longer one.
        longest = 63 if document["kind"] in {"DaemonSet", "Deployment", "Service"} else 253
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= longest, document["metadata"]
        for value in document["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def test_an_object_is_in_its_releases_namespace_or_says_another() -> None:
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
def test_a_change_of_configuration_rolls_the_pods_of_its_part_and_no_other(kind: str, values: str) -> None:
    for one in ("DaemonSet", "Deployment"):
        assert (annotations(one, "") != annotations(one, values)) is (one == kind)


def test_what_says_nothing_of_the_configuration_rolls_nothing() -> None:
    values = "monitoring: {rules: {enabled: false}, labels: {a: b}}\nnetworkPolicy: {enabled: false}"
    for kind in ("DaemonSet", "Deployment"):
        assert annotations(kind, "") == annotations(kind, values)


def test_the_default_has_no_rights_and_no_token() -> None:
    found = documents()
    kinds = {document["kind"] for document in found}
    assert not kinds & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", *OPERATOR_KINDS}
    spec = of_kind(found, "DaemonSet")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "a" * 64
    values = f"image: {{registry: r.example, repository: a/b, tag: v1, digest: '{digest}'}}"
    (container,) = of_kind(documents(values=values), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"r.example/a/b@{digest}"

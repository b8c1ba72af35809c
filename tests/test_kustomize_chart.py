"""Chart and kustomize make the same objects for the same settings; this file names every intended difference."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from chart_support import (
    FOLDERS,
    PLATFORMS,
    REGISTRY,
    SIMULATED,
    Document,
    composed,
    options,
    overlay,
    pod_spec,
    read,
    rendered,
)
from files_support import read_yaml

RELEASE = "gpu-cost-exporter"
"""Name of a release whose objects have the same names in the chart and in kustomize."""
MONITORED = "monitoring: {podMonitor: {enabled: true}, rules: {enabled: true}}\n"
SERVICE = "service: {enabled: true, config: {prometheus: 'http://prometheus-operated.monitoring:9090'}}\n"
POLICIES = "networkPolicy: {enabled: true}\n"

PLAIN = "agent: {metadata: {enabled: false}}\n"
"""The base has no rights; the chart's default is the component metadata."""
SAME: Mapping[str, str] = {
    "base": MONITORED + PLAIN,
    "metadata": MONITORED,
    "driver-privileged": MONITORED + PLAIN.replace("}}", "}, driver: {mode: privileged}}"),
    "driver-cdi": MONITORED + PLAIN.replace("}}", "}, driver: {mode: cdi}}"),
    "driver-dra": MONITORED + "agent: {driver: {mode: dra}}",
    "dcgm": MONITORED
    + PLAIN.replace("}}", "}, dcgm: {address: 'nvidia-dcgm.gpu-operator:5555', library: {image: dcgm}}}"),
    "slim": MONITORED + PLAIN.replace("}}", "}, processes: {enabled: false}, state: {enabled: false}}"),
    "service-monitor": "monitoring: {serviceMonitor: {enabled: true}, rules: {enabled: true}}\n" + PLAIN,
    "no-operator": "monitoring: {scrapeAnnotations: true}\n" + PLAIN,
    "network-policy": MONITORED + POLICIES + PLAIN,
    "cost-service": MONITORED.replace("rules", "dashboards: {enabled: true}, rules") + SERVICE + POLICIES + PLAIN,
    "cost-service-only": MONITORED.replace(", rules: {enabled: true}", "")
    + SERVICE
    + POLICIES
    + "agent: {enabled: false}",
    "simulated": MONITORED + SIMULATED,
    **{name: f"platform: {name}\n{MONITORED}{PLAIN}" for name in PLATFORMS if name not in {"bare", "k3s"}},
}
"""Values of the chart by overlay; for bare and k3s the overlay is the base."""

ROWS = [{"model": "NVIDIA H100*", "per_gpu_hour": 2.5, "source": "contract 17", "as_of": "2026-01-15"}]
PRICES = yaml.safe_dump({"currency": "EUR", "rows": ROWS})
BUDGET = "{name: research, amount: 1000, currency: EUR, period: month}"
BUDGETS = yaml.safe_dump({"budgets": [{"name": "research", "amount": 1000, "currency": "EUR", "period": "month"}]})
SCRAPE = "{ca: {secret: {name: gpu-cost-exporter-tls, key: ca.crt}}, serverName: gpu-cost-exporter.gpu-cost.svc}"
TOGETHER: Mapping[str, tuple[tuple[str, ...], Mapping[str, str], str]] = {
    "price-book": (
        ("price-book",),
        {"gpu-cost-exporter-prices": f"prices.yaml={PRICES}"},
        PLAIN.replace("}}", f"}}, priceBook: {{content: {json.dumps(PRICES)}}}}}"),
    ),
    "collectors": (
        ("collectors",),
        {"gpu-cost-exporter-collectors": "metrics.csv=DCGM_FI_DEV_GPU_UTIL, gauge, x"},
        PLAIN.replace("}}", "}, collectors: {content: 'DCGM_FI_DEV_GPU_UTIL, gauge, x'}}"),
    ),
    "budgets": (
        ("cost-service", "budgets"),
        {"gpu-cost-exporter-service-budgets": f"budgets.yaml={BUDGETS}"},
        PLAIN + SERVICE.replace("true, ", "true, budgets: {content: [" + BUDGET + "]}, "),
    ),
    "tls": (
        ("tls",),
        {},
        PLAIN.replace("}}", f"}}, web: {{tlsSecret: gpu-cost-exporter-tls, scrape: {{tlsConfig: {SCRAPE}}}}}}}"),
    ),
    "without-dra": (("metadata", "without-dra"), {}, "agent: {metadata: {enabled: true, dra: false}}"),
    "without-namespace-teams": (
        ("metadata", "without-namespace-teams"),
        {},
        "agent: {metadata: {enabled: true, namespaceTeams: false}}",
    ),
    "scrape-annotations": (("cost-service", "scrape-annotations"), {}, PLAIN + SERVICE),
    "without-fixed-user": (
        ("cost-service", "without-fixed-user"),
        {},
        PLAIN
        + SERVICE.replace("true, ", "true, podSecurityContext: {runAsUser: null, runAsGroup: null, fsGroup: null}, "),
    ),
    "beside-dcgm-exporter": (("beside-dcgm-exporter",), {}, PLAIN.replace("}}", "}, openCost: false}")),
}
"""Components outside of the overlays: the components and files that they need, and the equivalent values."""


def test_every_overlay_is_compared() -> None:
    assert set(SAME) == {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("name", SAME)
def test_chart_and_kustomize_differ_only_in_documented_places(name: str) -> None:
    chart = read(rendered(values=SAME[name], release=RELEASE))
    ours, theirs = by_name(overlay(name)), by_name(chart)
    if name == "openshift":
        # In the chart, the constraints name the account; in kustomize a role does, and its binding follows the name.
        assert theirs["SecurityContextConstraints", RELEASE].pop("users") == [
            f"system:serviceaccount:gpu-cost:{RELEASE}"
        ]
        assert ours["SecurityContextConstraints", RELEASE].pop("users") == []
        assert ours.pop(("Role", f"{RELEASE}-scc"))["rules"][0]["verbs"] == ["use"]
        assert ours.pop(("RoleBinding", f"{RELEASE}-scc"))["roleRef"]["name"] == f"{RELEASE}-scc"
    compare(ours, theirs, chart)


@pytest.mark.parametrize("name", TOGETHER)
def test_components_match_the_chart_values(name: str, tmp_path: Path) -> None:
    components, files, values = TOGETHER[name]
    ours = composed(
        tmp_path / "ours",
        components,
        namespace="gpu-cost",
        generatorOptions={"disableNameSuffixHash": True},
        configMapGenerator=[{"name": file, "literals": [text]} for file, text in files.items()],
    )
    monitored = MONITORED.replace("{", "{scrapeAnnotations: true, ", 1) if name == "scrape-annotations" else MONITORED
    chart = read(rendered(values=monitored + values, release=RELEASE))
    compare(by_name(ours), by_name(chart), chart)


def compare(
    ours: Mapping[tuple[str, str], Document], theirs: Mapping[tuple[str, str], Document], chart: list[Document]
) -> None:
    """Compare two installations."""
    # helm creates the namespace without labels. Options are a file in the chart, and variables of the container here.
    ours = {key: one for key, one in ours.items() if key[0] != "Namespace" and not is_options(one)}
    theirs = {key: one for key, one in theirs.items() if not is_options(one)}
    assert set(ours) == set(theirs)
    for key, one in ours.items():
        assert normal(one, chart) == normal(theirs[key], chart), key


def by_name(found: list[Document]) -> dict[tuple[str, str], Document]:
    """Return documents by kind and name; cluster objects of the chart have the namespace in their name."""
    return {
        (document["kind"], document["metadata"]["name"].removeprefix("gpu-cost.")): copy.deepcopy(document)
        for document in found
    }


def is_options(document: Document) -> bool:
    """Return whether it is the file of a program's options."""
    return (
        document["kind"] == "ConfigMap"
        and {"agent.yaml", "service.yaml", "web.yaml"} & document["data"].keys() != set()
    )


def normal(document: Document, chart: list[Document]) -> Document:
    """Return an object without the intended differences."""
    whole = copy.deepcopy(document)
    kind, metadata = whole["kind"], whole["metadata"]
    metadata["name"] = metadata["name"].removeprefix("gpu-cost.")
    # kustomize has no releases, so it cannot name the one of an object.
    for key in (
        "app.kubernetes.io/instance",
        "app.kubernetes.io/managed-by",
        "app.kubernetes.io/version",
        "helm.sh/chart",
    ):
        metadata.get("labels", {}).pop(key, None)
    # An uninstalled release would remove its claim; kubectl has no release to uninstall.
    if metadata.get("annotations", {}).pop("helm.sh/resource-policy", "") == "keep":
        assert kind == "PersistentVolumeClaim"
    metadata = {key: value for key, value in metadata.items() if value}
    whole["metadata"] = metadata
    without_instance(whole.get("spec", {}))
    if kind == "ClusterRoleBinding":
        whole["roleRef"]["name"] = whole["roleRef"]["name"].removeprefix("gpu-cost.")
    if kind in {"DaemonSet", "Deployment"}:
        workload(whole, chart)
    if kind == "ConfigMap":
        whole["data"] = {
            key: read_yaml(text) if key.endswith(".yaml") else text.rstrip("\n") for key, text in whole["data"].items()
        }
        # The chart labels the files of a user, which a kustomization of the user leaves without labels.
        if "grafana_dashboard" not in metadata.get("labels", {}):
            metadata.pop("labels", None)
    return whole


def without_instance(spec: Document) -> None:
    """Remove the release from selectors, which only the chart sets."""
    for selector in (spec.get("selector", {}), spec.get("podSelector", {})):
        for labels in (selector, selector.get("matchLabels", {})):
            labels.pop("app.kubernetes.io/instance", None)


def workload(whole: Document, chart: list[Document]) -> None:
    """Return its pods, with their options as one mapping from either source."""
    template = whole["spec"]["template"]
    template["metadata"]["labels"].pop("app.kubernetes.io/instance", None)
    # In the chart a change of the file restarts the pods; in kustomize a change of a variable does.
    template["metadata"].get("annotations", {}).pop("checksum/config", None)
    template["metadata"] = {key: value for key, value in template["metadata"].items() if value}
    spec = pod_spec(whole)
    (container,) = spec["containers"]
    container["options"] = options(container) or file_of(spec, chart)
    container["env"] = sorted(
        (entry for entry in container["env"] if not entry["name"].startswith("GPU_COST_EXPORTER_")),
        key=lambda entry: str(entry["name"]),
    )
    drop_config(spec, container)
    # The chart has a value for the registry, kustomize has `images`.
    registry = read_yaml(REGISTRY.read_text(encoding="utf-8"))["image"]["registry"]
    container["image"] = container["image"].removeprefix(f"{registry}/")
    for volume in spec["volumes"]:
        if volume["name"] == "state" and "hostPath" in volume:
            # Several releases may share a node; of kustomize's installations there is one.
            path = volume["hostPath"].pop("path")
            assert path in {"/var/lib/gpu-cost-exporter", f"/var/lib/gpu-cost-exporter/gpu-cost.{RELEASE}"}
    for one, key in ((spec, "volumes"), (container, "volumeMounts")):
        one[key] = sorted(one[key], key=lambda entry: str(entry["name"]))


def file_of(spec: Document, chart: list[Document]) -> Document:
    """Return the options' file that a pod of the chart mounts."""
    (name,) = [volume["configMap"]["name"] for volume in spec["volumes"] if volume["name"] == "config"]
    (found,) = [one for one in chart if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name]
    (text,) = [text for key, text in found["data"].items() if key in {"agent.yaml", "service.yaml"}]
    whole: Document = read_yaml(text)
    return whole


def drop_config(spec: Document, container: Document) -> None:
    """Remove the volume of the file."""
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "config"]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "config"]

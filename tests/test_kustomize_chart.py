"""Chart and kustomize make the same objects of the same choices; every difference that is meant is named here."""

import copy
from collections.abc import Mapping

import pytest
import yaml
from chart_support import PRESETS, read, rendered
from kustomize_support import FOLDERS, Document, options, overlay, pod_spec

RELEASE = "gpu-cost-exporter"
"""With this name of the release the chart's objects are called as kustomize calls them."""
MONITORED = "monitoring: {podMonitor: {enabled: true}, rules: {enabled: true}}\n"
SERVICE = "service: {enabled: true, config: {prometheus: 'http://prometheus-operated.monitoring:9090'}}\n"
POLICIES = "networkPolicy: {enabled: true}\n"

SAME: Mapping[str, str] = {
    "base": MONITORED,
    "metadata": MONITORED + "agent: {metadata: {enabled: true}}",
    "driver-privileged": MONITORED + "agent: {driver: {mode: privileged}}",
    "driver-cdi": MONITORED + "agent: {driver: {mode: cdi}}",
    "driver-dra": MONITORED + "agent: {driver: {mode: dra}, metadata: {enabled: true}}",
    "dcgm": MONITORED + "agent: {dcgm: {address: 'nvidia-dcgm.gpu-operator:5555', library: {image: dcgm}}}",
    "slim": MONITORED + "agent: {processes: {enabled: false}, state: {enabled: false}}",
    "service-monitor": "monitoring: {serviceMonitor: {enabled: true}, rules: {enabled: true}}",
    "no-operator": "monitoring: {scrapeAnnotations: true}",
    "network-policy": MONITORED + POLICIES,
    "cost-service": MONITORED.replace("rules", "dashboards: {enabled: true}, rules") + SERVICE + POLICIES,
    "cost-service-only": MONITORED.replace(", rules: {enabled: true}", "")
    + SERVICE
    + POLICIES
    + "agent: {enabled: false}",
    **{path.stem: MONITORED for path in sorted(PRESETS.glob("*.yaml")) if path.stem != "prometheus-operator"},
}
"""Values of the chart by overlay; those that are presets, with the preset."""


def test_every_overlay_is_compared() -> None:
    assert set(SAME) == {folder.name for folder in FOLDERS}


@pytest.mark.parametrize("name", SAME)
def test_chart_and_kustomize_differ_only_where_it_is_said(name: str) -> None:
    preset = PRESETS / f"{name}.yaml"
    files = (preset,) if preset.exists() else ()
    chart = read(rendered(*files, values=SAME[name], release=RELEASE))
    ours, theirs = by_name(overlay(name)), by_name(chart)
    # helm makes the namespace, and does not label it.
    ours = {key: one for key, one in ours.items() if key[0] != "Namespace"}
    # Options are a file there, and variables of the container here.
    theirs = {key: one for key, one in theirs.items() if not is_options(one)}
    if name == "openshift":
        # The account is named by the constraints there; here by a role, whose binding follows it.
        assert theirs["SecurityContextConstraints", RELEASE].pop("users") == [
            f"system:serviceaccount:gpu-cost:{RELEASE}"
        ]
        assert ours["SecurityContextConstraints", RELEASE].pop("users") == []
        assert ours.pop(("Role", f"{RELEASE}-scc"))["rules"][0]["verbs"] == ["use"]
        assert ours.pop(("RoleBinding", f"{RELEASE}-scc"))["roleRef"]["name"] == f"{RELEASE}-scc"
    assert set(ours) == set(theirs)
    for key, one in ours.items():
        assert normal(one, chart) == normal(theirs[key], chart), key


def by_name(found: list[Document]) -> dict[tuple[str, str], Document]:
    """Documents by kind and name; objects of the cluster carry the namespace there, which kustomize cannot fill in."""
    return {
        (document["kind"], document["metadata"]["name"].removeprefix("gpu-cost.")): copy.deepcopy(document)
        for document in found
    }


def is_options(document: Document) -> bool:
    """Whether it is the file of a program's options."""
    return document["kind"] == "ConfigMap" and {"agent.yaml", "service.yaml"} & document["data"].keys() != set()


def normal(document: Document, chart: list[Document]) -> Document:
    """An object without what the two are meant to say differently."""
    whole = copy.deepcopy(document)
    kind, metadata = whole["kind"], whole["metadata"]
    metadata["name"] = metadata["name"].removeprefix("gpu-cost.")
    # Of a release kustomize knows nothing, and so it cannot say which one made an object.
    for key in (
        "app.kubernetes.io/instance",
        "app.kubernetes.io/managed-by",
        "app.kubernetes.io/version",
        "helm.sh/chart",
    ):
        metadata["labels"].pop(key, None)
    # Uninstalling a release would take its claim along; kubectl has no release to uninstall.
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
        whole["data"] = {key: text.rstrip("\n") for key, text in whole["data"].items()}
    return whole


def without_instance(spec: Document) -> None:
    """Selectors have the release only there."""
    for selector in (spec.get("selector", {}), spec.get("podSelector", {})):
        for labels in (selector, selector.get("matchLabels", {})):
            labels.pop("app.kubernetes.io/instance", None)


def workload(whole: Document, chart: list[Document]) -> None:
    """Its pods, with their options as one mapping wherever they come from."""
    template = whole["spec"]["template"]
    template["metadata"]["labels"].pop("app.kubernetes.io/instance", None)
    # A change of the file rolls the pods there; here a change of a variable does.
    template["metadata"].get("annotations", {}).pop("checksum/config", None)
    template["metadata"] = {key: value for key, value in template["metadata"].items() if value}
    spec = pod_spec(whole)
    (container,) = spec["containers"]
    container["options"] = options(container) or file_of(spec, chart)
    container["env"] = sorted(
        (entry for entry in container["env"] if not entry["name"].startswith("GPU_COST_EXPORTER_")),
        key=lambda entry: str(entry["name"]),
    )
    # An image of its own, as `images` of a kustomization go by the name without the tag.
    name, _, tag = container["image"].partition(":")
    container["image"] = f"{name.removesuffix('-service')}:{tag.removesuffix('-service')}"
    drop_config(spec, container)
    for volume in spec["volumes"]:
        if volume["name"] == "state" and "hostPath" in volume:
            # Several releases may share a node; of kustomize's installations there is one.
            path = volume["hostPath"].pop("path")
            assert path in {"/var/lib/gpu-cost-exporter", f"/var/lib/gpu-cost-exporter/gpu-cost.{RELEASE}"}
    for one, key in ((spec, "volumes"), (container, "volumeMounts")):
        one[key] = sorted(one[key], key=lambda entry: str(entry["name"]))


def file_of(spec: Document, chart: list[Document]) -> Document:
    """The options' file that a pod of the chart's mounts."""
    (name,) = [volume["configMap"]["name"] for volume in spec["volumes"] if volume["name"] == "config"]
    (found,) = [one for one in chart if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name]
    (text,) = [text for key, text in found["data"].items() if key in {"agent.yaml", "service.yaml"}]
    whole: Document = yaml.safe_load(text)
    return whole


def drop_config(spec: Document, container: Document) -> None:
    """Without the file's volume."""
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "config"]
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "config"]

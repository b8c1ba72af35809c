"""The Pod Security level that agent and cost service need, by the checks of Kubernetes' own admission."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from chart_support import FOLDERS, Document, built, documents, pod_spec

LEVELS = ("restricted", "baseline", "privileged")
"""From the strictest to the weakest."""
ENFORCE = "pod-security.kubernetes.io/enforce"
CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
"""Capabilities that `baseline` allows a container to add."""
SELINUX_TYPES = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)
"""Volumes that `restricted` allows."""


def above_baseline(spec: Document) -> Iterator[str]:
    """Yield the fields of a pod that `baseline` refuses."""
    yield from (key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key))
    yield from (f"hostPath {volume['name']}" for volume in spec.get("volumes", ()) if "hostPath" in volume)
    if spec.get("securityContext", {}).get("sysctls"):
        yield "sysctls"
    for context in contexts(spec):
        yield from (f"capability {name}" for name in set(added(context)) - CAPABILITIES)
        if context.get("privileged"):
            yield "privileged"
        if context.get("procMount", "Default") != "Default":
            yield "procMount"
        if context.get("seccompProfile", {}).get("type") == "Unconfined":
            yield "seccompProfile"
        if context.get("seLinuxOptions", {}).get("type", "") not in SELINUX_TYPES:
            yield "seLinuxOptions"
    for container in containers(spec):
        yield from ("hostPort" for port in container.get("ports", ()) if port.get("hostPort"))


def above_restricted(spec: Document) -> Iterator[str]:
    """Yield the fields of a pod that `restricted` refuses in addition."""
    yield from (volume["name"] for volume in spec.get("volumes", ()) if not volume.keys() & VOLUMES)
    for context in contexts(spec):
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
            yield "runAsNonRoot"
        if context.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            yield "seccompProfile"
        if "ALL" not in context.get("capabilities", {}).get("drop", ()) or set(added(context)) - {"NET_BIND_SERVICE"}:
            yield "capabilities"


def containers(spec: Document) -> list[Document]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def contexts(spec: Document) -> list[Document]:
    """Return the security context of each container, with the pod's settings for all."""
    return [spec.get("securityContext", {}) | one.get("securityContext", {}) for one in containers(spec)]


def added(context: Document) -> list[str]:
    return list(context.get("capabilities", {}).get("add", ()))


def needed(found: list[Document]) -> str:
    """Return the strictest level that admits all pods of an installation."""
    specs = [pod_spec(document) for document in found if document["kind"] in {"DaemonSet", "Deployment"}]
    assert specs
    if any(next(above_baseline(spec), None) for spec in specs):
        return "privileged"
    return "baseline" if any(next(above_restricted(spec), None) for spec in specs) else "restricted"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_namespace_has_exactly_the_pod_security_level_of_its_pods(folder: Path) -> None:
    found = built(folder)
    (namespace,) = [document for document in found if document["kind"] == "Namespace"]
    labels = namespace["metadata"]["labels"]
    assert labels[ENFORCE] == needed(found)
    for mode in ("warn", "audit"):
        level = labels.get(ENFORCE.replace("enforce", mode), labels[ENFORCE])
        assert LEVELS.index(level) >= LEVELS.index(labels[ENFORCE]), "a stricter level would warn of each change"


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ("", "privileged"),
        ("agent: {processes: {enabled: false}, state: {enabled: false}}", "privileged"),
        ("agent: {driver: {mode: privileged}}", "privileged"),
        ("agent: {attribution: {enabled: false}, processes: {enabled: false}, state: {enabled: false}}", "restricted"),
        ("agent: {config: {simulate: demo}, processes: {enabled: false}, state: {enabled: false}}", "restricted"),
        ("agent: {enabled: false}\nservice: {enabled: true, config: {prometheus: 'http://p:9090'}}", "restricted"),
    ],
    ids=["default", "slim", "driver privileged", "without attribution", "simulated", "service alone"],
)
def test_chart_values_need_their_documented_level(values: str, level: str) -> None:
    assert needed(documents(values=values)) == level


def test_kubelet_socket_and_lock_keep_a_minimal_agent_above_baseline() -> None:
    found = documents(
        values="agent: {processes: {enabled: false}, state: {enabled: false}, attribution: {podLogsPath: ''}}"
    )
    (agent,) = [document for document in found if document["kind"] == "DaemonSet"]
    assert list(above_baseline(pod_spec(agent))) == ["hostPath pod-resources", "hostPath lock"]

"""The rights of the agent's pod, for each way to the driver and each switch."""

import pytest
from chart_support import EVERYTHING, MODES, Document, documents, of_kind
from files_support import read_yaml


def pod(values: str = "") -> Document:
    spec = of_kind(documents(values=values), "DaemonSet")["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def mode(name: str) -> Document:
    return pod(MODES[name][1])


def env(spec: Document) -> dict[str, str]:
    (container,) = spec["containers"]
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def mounts(spec: Document) -> dict[str, str]:
    """Return the path on the host by path in the container."""
    (container,) = spec["containers"]
    hosts = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    return {one["mountPath"]: hosts[one["name"]] for one in container["volumeMounts"] if one["name"] in hosts}


def security(spec: Document) -> Document:
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert isinstance(context, dict)
    return context


def test_default_driver_mode_uses_the_runtime_class() -> None:
    spec = pod()
    assert spec["runtimeClassName"] == "nvidia"
    assert env(spec)["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert env(spec)["NVIDIA_DRIVER_CAPABILITIES"] == "utility"


def test_every_driver_mode_requests_no_gpu() -> None:
    for name in MODES:
        if name == "service-alone":
            continue
        resources = mode(name)["containers"][0]["resources"]
        asked = {**resources.get("limits", {}), **resources.get("requests", {})}
        assert not [key for key in asked if "/" in key], name


@pytest.mark.parametrize("name", ["", *(name for name in MODES if name not in {"privileged", "library-file"})])
def test_only_the_privileged_mode_is_privileged(name: str) -> None:
    if name == "service-alone":
        return
    context = security(mode(name) if name else pod())
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not context.get("privileged")


def test_privileged_mode_mounts_the_driver_of_the_node() -> None:
    spec = mode("privileged")
    assert "runtimeClassName" not in spec
    assert security(spec)["privileged"] is True
    assert security(spec)["readOnlyRootFilesystem"] is True
    assert mounts(spec)["/usr/local/nvidia"] == "/home/kubernetes/bin/nvidia"
    assert mounts(spec)["/dev"] == "/dev"
    assert env(spec)["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert "NVIDIA_VISIBLE_DEVICES" not in env(spec)


def test_library_file_is_mounted_alone() -> None:
    spec = mode("library-file")
    assert mounts(spec)["/usr/local/nvidia/libnvidia-ml.so.1"] == "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    assert env(spec)["LD_LIBRARY_PATH"] == "/usr/local/nvidia"


def test_cdi_mode_requests_the_all_gpus_device() -> None:
    assert env(mode("cdi"))["NVIDIA_VISIBLE_DEVICES"] == "nvidia.com/gpu=all"


def test_dra_mode_claims_all_gpus_with_admin_access() -> None:
    found = documents(values=MODES["dra"][1])
    spec = of_kind(found, "DaemonSet")["spec"]["template"]["spec"]
    claim = of_kind(found, "ResourceClaimTemplate")
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"] == {"deviceClassName": "gpu.nvidia.com", "allocationMode": "All", "adminAccess": True}
    (asked,) = spec["resourceClaims"]
    assert asked["resourceClaimTemplateName"] == claim["metadata"]["name"]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": asked["name"]}]
    assert "runtimeClassName" not in spec


def test_mode_without_a_driver_sets_no_driver_options() -> None:
    spec = mode("no-driver")
    assert "runtimeClassName" not in spec
    assert not [name for name in env(spec) if name.startswith("NVIDIA")]


def test_non_root_mode_has_no_host_mounts_or_host_pid() -> None:
    spec = mode("not-root")
    context = security(spec)
    assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (65534, 65534, True)
    assert mounts(spec) == {}
    assert "hostPID" not in spec


def test_host_mounts_are_read_only_except_state_and_lock() -> None:
    (container,) = pod()["containers"]
    writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"state", "lock", "tmp"}
    assert mounts(pod())["/var/lib/kubelet/pod-resources"] == "/var/lib/kubelet/pod-resources", "a folder"


def test_every_switch_adds_only_its_own_mounts_and_rights() -> None:
    assert pod()["hostPID"] is True
    assert "hostPID" not in pod("agent: {processes: {enabled: false}}")
    stateless = mounts(pod("agent: {state: {enabled: false}}"))
    assert "/state" not in stateless
    assert stateless["/run/gpu-cost-exporter"] == "/run/gpu-cost-exporter", (
        "every release has the same path on the host"
    )
    assert "/run/gpu-cost-exporter" not in mounts(pod("agent: {config: {simulate: demo}}"))
    assert "/var/log/pods" not in mounts(pod("agent: {attribution: {podLogsPath: ''}}"))
    assert pod()["automountServiceAccountToken"] is True
    assert pod("agent: {metadata: {enabled: false}}")["automountServiceAccountToken"] is False
    assert "hostNetwork" not in pod()
    assert pod("agent: {hostNetwork: true}")["hostNetwork"] is True


def test_rolling_update_may_surge() -> None:
    update = "{rollingUpdate: {maxUnavailable: 0, maxSurge: 10%}}"
    found = of_kind(documents(values=f"agent: {{updateStrategy: {update}}}"), "DaemonSet")
    assert found["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": "10%"}


@pytest.mark.parametrize(
    "address", ["unix:///tmp/nv-hostengine", "/run/nv-hostengine/socket", "unix:///var/run/dcgm.sock"]
)
def test_engine_socket_is_mounted_as_its_folder_without_conflicts(address: str) -> None:
    found = documents(values=f"agent: {{dcgm: {{address: '{address}', library: {{image: dcgm}}}}}}")
    spec = of_kind(found, "DaemonSet")["spec"]["template"]["spec"]
    folder, _, socket = address.removeprefix("unix://").rpartition("/")
    assert mounts(spec)["/run/dcgm"] == folder
    (container,) = spec["containers"]
    paths = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert len(paths) == len(set(paths))
    config = read_yaml(of_kind(found, "ConfigMap")["data"]["agent.yaml"])
    assert config["dcgm-address"] == f"unix:///run/dcgm/{socket}"


def test_init_container_has_the_resources_of_the_main_container() -> None:
    spec = mode("engine-by-socket")
    assert [one["resources"] for one in spec["initContainers"]] == [one["resources"] for one in spec["containers"]]


def test_agent_with_client_certificates_is_probed_by_tcp() -> None:
    (container,) = mode("client-certificates")["containers"]
    assert container["livenessProbe"]["tcpSocket"] == {"port": "metrics"}
    assert "httpGet" not in container["readinessProbe"]


def test_opt_out_labels_exclude_a_node_in_every_affinity_term() -> None:
    affinity = pod()["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    taking_out = [
        {"key": "gpu-cost-exporter/deploy", "operator": "NotIn", "values": ["false"]},
        {"key": "nvidia.com/gpu.deploy.device-plugin", "operator": "NotIn", "values": ["paused-for-driver-upgrade"]},
    ]
    terms = [term["matchExpressions"] for term in affinity["nodeSelectorTerms"]]
    assert [term[1:] for term in terms] == [taking_out] * 8
    assert "affinity" not in pod("agent: {config: {simulate: demo}}")


def test_empty_node_affinity_selects_every_node() -> None:
    assert "affinity" not in pod("agent: {nodeAffinity: {anyOf: [], allOf: []}}")


def test_opencost_label_is_present_unless_disabled() -> None:
    def labels(values: str) -> dict[str, str]:
        template = of_kind(documents(values=values), "DaemonSet")["spec"]["template"]
        return dict(template["metadata"]["labels"])

    assert [key for key, value in labels("").items() if "dcgm-exporter" in value]
    assert not [key for key, value in labels("agent: {openCost: false}").items() if "dcgm-exporter" in value]


def test_openshift_scc_allows_exactly_the_container_capabilities() -> None:
    for values, wanted in (("", []), ("securityContext: {capabilities: {add: [SYS_ADMIN]}}", ["SYS_ADMIN"])):
        found = documents(values=f"agent: {{scc: {{create: true}}, {values}}}")
        assert of_kind(found, "SecurityContextConstraints")["allowedCapabilities"] == wanted
        assert of_kind(found, "SecurityContextConstraints")["priority"] == 0
        (container,) = of_kind(found, "DaemonSet")["spec"]["template"]["spec"]["containers"]
        assert container["securityContext"]["capabilities"].get("add", []) == wanted


def test_openshift_cost_service_sets_no_user() -> None:
    files, values = MODES["openshift-service"]
    spec = of_kind(documents(*files, values=values), "Deployment")["spec"]["template"]["spec"]
    assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys()
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_cost_service_has_no_token_host_path_or_root() -> None:
    spec = of_kind(documents(EVERYTHING), "Deployment")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}

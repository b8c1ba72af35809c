"""Configuration: four layers, one table, and a report of all mistakes at once."""

import io
import json
import logging
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_support import settings_of

from exporter.config import AgentConfig, load_agent, resolve
from exporter.config.options import OPTIONS, Option
from exporter.config.types import Listen, duration_seconds, format_duration
from exporter.errors import ConfigError

DEFAULT_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*", "volcano.sh/vgpu-number")
DURATION = "a number with ms, s, m or h, from 200ms to 5m"
RATIO = "a number from 0 up to, not including, 1"


def settle(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, *, check_paths: bool = False
) -> AgentConfig:
    return load_agent(flags or {}, environ or {}, check_paths=check_paths)


def mistakes(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_agent(flags or {}, environ or {})
    return caught.value.problems


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "agent.yaml"
    path.write_text(text)
    return str(path)


def test_defaults_apply_without_any_setting() -> None:
    config = settle()
    assert (config.serving.listen.host, config.serving.listen.port) == ("", 9400)
    assert config.sampling.interval_seconds == 1.0
    assert (config.sampling.source, config.sampling.dcgm_address) == ("auto", "")
    assert (config.exposition.xid_count_window_seconds, config.exposition.clock_events_window_seconds) == (300.0, 300.0)
    assert config.attribution.kubelet_interval_seconds == 5.0
    assert config.attribution.expiry_seconds == 60.0
    assert config.attribution.enabled is True
    assert config.sampling.idle_threshold_ratio == 0.05
    assert config.attribution.gpu_resources == DEFAULT_RESOURCES
    assert (
        config.attribution.workload_manager,
        config.owners.kube_metadata,
        config.owners.kube_start_jitter_seconds,
    ) == (
        "kubernetes",
        False,
        60,
    )
    assert config.owners.team_keys[0] == "team"
    assert (config.owners.pod_labels, config.owners.pod_annotations) == ((), ())
    assert config.exposition.collectors is None
    assert config.running.state_dir is None
    assert config.running.lock_dir == Path("/run/gpu-cost-exporter")
    assert settle({"simulate": "demo"}).running.lock_dir is None, "one machine can run many simulated nodes"
    assert (
        settle({"simulate": "demo", "lock_dir": "/run/gpu-cost-exporter"}).running.lock_dir == config.running.lock_dir
    )
    assert config.running.state_interval_seconds == 5.0
    assert config.exposition.linger_seconds == 300.0
    assert config.prices.book is None
    assert (config.prices.instance_type, config.prices.capacity_type, config.prices.region) == ("", "", "")
    assert config.running.simulate is None
    assert config.exposition.hostname_label == "Hostname"
    assert config.attribution.node_name == socket.gethostname()
    assert config.warnings == ()


GIVEN: dict[str, tuple[str, str, object]] = {
    "listen": ("[::1]:1234", "listen", Listen("::1", 1234)),
    "web_config": ("/web.yaml", "web_config", Path("/web.yaml")),
    "release_seconds": ("2m", "release_seconds", 120.0),
    "cost_service_url": ("https://cost/", "cost_service_url", "https://cost"),
    "sample_interval": ("500ms", "interval_seconds", 0.5),
    "source": ("dcgm", "source", "dcgm"),
    "dcgm_address": ("engine", "dcgm_address", "engine:5555"),
    "idle_threshold": ("0.1", "idle_threshold_ratio", 0.1),
    "attribution": ("off", "enabled", False),
    "kubelet_socket": ("unix:///run/k.sock", "kubelet_socket", "/run/k.sock"),
    "kubelet_interval": ("10s", "kubelet_interval_seconds", 10.0),
    "attribution_expiry": ("90s", "expiry_seconds", 90.0),
    "gpu_resources": ("a.com/x, a.com/y-*", "gpu_resources", ("a.com/x", "a.com/y-*")),
    "node_name": ("n1", "node_name", "n1"),
    "proc_root": ("/host/proc", "proc_root", Path("/host/proc")),
    "pod_log_root": ("/host/pods", "pod_log_root", Path("/host/pods")),
    "workload_manager": ("slurm", "workload_manager", "slurm"),
    "job_mapping_dir": ("/jobs", "job_mapping_dir", Path("/jobs")),
    "kube_metadata": ("off", "kube_metadata", False),
    "kubeconfig": ("/kubeconfig", "kubeconfig", Path("/kubeconfig")),
    "kube_start_jitter": ("5s", "kube_start_jitter_seconds", 5.0),
    "team_keys": ("squad, example.com/team", "team_keys", ("squad", "example.com/team")),
    "cost_labels": ("project, example.com/cost-center", "cost_labels", ("project", "example.com/cost-center")),
    "namespace_teams": ("off", "namespace_teams", False),
    "pod_labels": ("app,tier", "pod_labels", ("app", "tier")),
    "pod_annotations": ("note", "pod_annotations", ("note",)),
    "reservation_namespaces": ("reserved", "reservation_namespaces", ("reserved",)),
    "dcgm_pod_uid": ("on", "dcgm_pod_uid", True),
    "dcgm_old_labels": ("on", "dcgm_old_labels", True),
    "dcgm_model_hyphens": ("on", "dcgm_model_hyphens", True),
    "collectors": ("/c.csv", "collectors", Path("/c.csv")),
    "dcgm_names": ("4.9", "dcgm_names", "4.9"),
    "hostname_label": ("node_name", "hostname_label", "node_name"),
    "xid_count_window": ("1m", "xid_count_window_seconds", 60.0),
    "clock_events_window": ("2m", "clock_events_window_seconds", 120.0),
    "series_limit": ("500", "series_limit", 500),
    "linger": ("10m", "linger_seconds", 600.0),
    "price_book": ("/prices.yaml", "book", Path("/prices.yaml")),
    "instance_type": ("p5.48xlarge", "instance_type", "p5.48xlarge"),
    "capacity_type": ("spot", "capacity_type", "spot"),
    "region": ("us-east-1", "region", "us-east-1"),
    "state_interval": ("10s", "state_interval_seconds", 10.0),
    "state_dir": ("/state", "state_dir", Path("/state")),
    "lock_dir": ("/lock", "lock_dir", Path("/lock")),
    "simulate": ("demo", "simulate", "demo"),
    "simulate_hour": ("1m", "simulate_hour_seconds", 60.0),
    "log_format": ("json", "log_format", "json"),
    "log_level": ("debug", "log_level", "debug"),
}
"""Text of each flag, and the setting with its value."""


def test_every_option_reaches_the_configuration_from_its_flag() -> None:
    config = settle({flag: text for flag, (text, _, _) in GIVEN.items()})
    assert {option.key.replace("-", "_") for option in OPTIONS} == set(GIVEN)
    assert settings_of(config) == {name: value for _, name, value in GIVEN.values()}
    assert config.warnings == tuple(
        f"{key}: needs kube-metadata on; not used"
        for key in ("kubeconfig", "pod-labels", "pod-annotations", "cost-labels")
    )


def test_hostname_label_follows_dcgm_names_and_can_be_changed_or_removed() -> None:
    assert settle({"dcgm_names": "4.9"}).exposition.hostname_label == "hostname"
    assert settle({"hostname_label": "none", "dcgm_names": "4.9"}).exposition.hostname_label == ""
    assert settle({"hostname_label": "hostname"}).exposition.hostname_label == "hostname"
    for name in ("pod", "uuid", "modelName", "DCGM_FI_DRIVER_VERSION"):
        (reported,) = mistakes({"hostname_label": name})
        assert reported.startswith(
            f"hostname-label (from --hostname-label): value '{name}' is not a label name; allowed: "
        )
        assert reported.endswith("; another label of these series has that name")
    assert "another label" not in mistakes({"hostname_label": "host-name"})[0]


def test_simulated_node_enables_kube_metadata_unless_disabled() -> None:
    assert settle({"simulate": "demo"}).owners.kube_metadata is True
    assert settle({"simulate": "demo"}, {"GPU_COST_EXPORTER_KUBE_METADATA": "off"}).owners.kube_metadata is False
    assert settle({"simulate": "demo", "kube_metadata": "off"}).owners.kube_metadata is False
    assert settle({"simulate": "demo", "workload_manager": "host"}).owners.kube_metadata is False
    assert settle({}).owners.kube_metadata is False


def test_unused_options_warn_and_conflicting_options_are_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    assert settle({"job_mapping_dir": "/jobs"}).warnings == (
        "job-mapping-dir: read only with workload-manager slurm; not used",
    )
    assert settle({"job_mapping_dir": "/jobs", "workload_manager": "host"}).warnings == (
        "job-mapping-dir: read only with workload-manager slurm; not used",
    )
    (reported,) = settle({"kube_metadata": "on", "attribution": "off"}).warnings
    assert reported.startswith("kube-metadata: with attribution off there are no holders")
    (reported,) = settle({"kube_metadata": "on", "pod_labels": "app,pod-template-hash"}).warnings
    assert reported.startswith("pod-labels: pod-template-hash is never shown")
    many = ",".join(f"key-{number}" for number in range(11))
    problems = mistakes({"kube_metadata": "on", "workload_manager": "slurm", "pod_labels": many, "kubeconfig": missing})
    reported = " | ".join(problems)
    assert "the workload-manager is slurm" in reported
    assert "pod-labels: names 11 keys; allowed: at most 10" in reported
    assert f"kubeconfig: cannot read {missing}" in reported
    nine = ",".join(f"example.com/key-{number}" for number in range(9))
    assert "cost-labels: names 9 keys; allowed: at most 8" in mistakes({"kube_metadata": "on", "cost_labels": nine})
    for key in ("a=b", "cost centre", "Example.com/a", "a/b/c", "project_", "x" * 64):
        (reported,) = mistakes({"kube_metadata": "on", "cost_labels": f"project,{key}"})
        assert (
            "is not a Kubernetes label key; allowed: label keys such as project or example.com/cost-center" in reported
        )
    assert "job-mapping-dir" in " ".join(mistakes({"workload_manager": "slurm", "job_mapping_dir": missing}))


def test_precedence_is_flag_then_environment_then_dcgm_exporter_then_file(tmp_path: Path) -> None:
    config_file = write(tmp_path, "sample-interval: 5s\n")
    flags: dict[str, object] = {"config": config_file}
    environ: dict[str, str] = {}
    seen = [settle(flags, environ).sampling.interval_seconds]
    environ["DCGM_EXPORTER_INTERVAL"] = "4000"
    seen.append(settle(flags, environ).sampling.interval_seconds)
    environ["GPU_COST_EXPORTER_SAMPLE_INTERVAL"] = "3s"
    seen.append(settle(flags, environ).sampling.interval_seconds)
    flags["sample_interval"] = "2s"
    seen.append(settle(flags, environ).sampling.interval_seconds)
    assert seen == [5.0, 4.0, 3.0, 2.0]


def test_file_from_the_environment_keeps_words_that_yaml_would_convert(tmp_path: Path) -> None:
    text = "attribution: off\ndcgm_names: 4.9\ngpu-resources: [a.com/x, 'a.com/y-*']\nlisten: :9401\n"
    config = settle({}, {"GPU_COST_EXPORTER_CONFIG": write(tmp_path, text)})
    assert config.attribution.enabled is False
    assert config.exposition.dcgm_names == "4.9"
    assert config.exposition.hostname_label == "hostname"
    assert config.attribution.gpu_resources == ("a.com/x", "a.com/y-*")
    assert config.serving.listen.port == 9401


def test_errors_of_all_layers_are_reported_at_once_with_their_location(tmp_path: Path) -> None:
    path = write(tmp_path, "sample-interval: 30\nsampel-interval: 1s\nsource: dcmg\nlisten: {port: 1}\nsource: auto\n")
    reported = mistakes(
        {"config": path, "series_limit": "many", "attribution": "maybe", "source": "nvml"},
        {"GPU_COST_EXPORTER_IDLE_THRESHOLD": "5"},
    )
    assert reported == (
        f"{path}:2: sampel-interval: unknown key; did you mean 'sample-interval'?",
        f"{path}:4: listen: empty or nested; allowed: one value, or a list of values",
        f"{path}:5: source: given twice, first in line 3; keep one",
        f"sample-interval (from {path}:1): value '30' is not a duration in range; allowed: {DURATION}",
        f"source (from {path}:3): value 'dcmg' is not a known choice; did you mean 'dcgm'? Allowed: auto, nvml, dcgm",
        f"idle-threshold (from GPU_COST_EXPORTER_IDLE_THRESHOLD): value '5' is not a ratio; allowed: {RATIO}",
        "attribution (from --attribution): value 'maybe' is not a switch; allowed: on, off",
        "series-limit (from --series-limit): value 'many' is not a whole number in range; allowed: 100 to 10000000",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", ":1: not YAML: expected the node content, but found '<stream end>'; close the '[' or '{'"),
        ("x: 1\na: {b: [1, 2\nc: 3\n", ":2: not YAML: '[' is not closed; close it with ']'"),
        ("x: 1\na: 'text\nb: 2\n", ":2: not YAML: the quote is not closed; close it"),
        ("a: b: c", "put text with ': ' in it in quotes, or correct the indentation"),
        ("- a\n- b\n", ":1: not a mapping"),
        ("listen: :1\n\tx: 2", "cannot start any token; indent with spaces, not tabs"),
        ("\x00", "not YAML"),
    ],
)
def test_invalid_configuration_file_is_reported_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    reported = mistakes({"config": write(tmp_path, text)})
    assert len(reported) == 1
    assert words in reported[0]
    assert "\n" not in reported[0]


def test_unreadable_configuration_file_is_reported_in_one_line(tmp_path: Path) -> None:
    (reported,) = mistakes({"config": str(tmp_path / "none.yaml")})
    assert "cannot read" in reported
    assert "No such file" in reported


@pytest.mark.parametrize("text", [":9400", "0.0.0.0:9400", "[::]:0", "localhost:65535", "[fe80::1%eth0]:9400"])
def test_valid_listen_addresses_are_accepted(text: str) -> None:
    assert settle({"listen": text}).serving.listen.port == int(text.rpartition(":")[2])


@pytest.mark.parametrize("text", ["9400", "", ":", ":x", ":65536", "::1:9400", "[::1]", "[x]:1", "a b:1", ":-1", ":٣"])
def test_invalid_listen_addresses_are_refused(text: str) -> None:
    (reported,) = mistakes({"listen": text, "simulate": "demo"})
    assert reported.startswith(f"listen (from --listen): value '{text}' is not")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node", "node:5555"),
        ("node:1234", "node:1234"),
        ("10.1.2.3", "10.1.2.3:5555"),
        ("tcp://node.example.:7", "node.example.:7"),
        ("my_engine", "my_engine:5555"),
        ("[::1]", "[::1]:5555"),
        ("[::1]:8", "[::1]:8"),
        ("tcp://[fd00::7]:5555", "[fd00::7]:5555"),
        ("::1", "[::1]:5555"),
        ("/run/nv-hostengine", "unix:///run/nv-hostengine"),
        ("unix:///run/nv-hostengine", "unix:///run/nv-hostengine"),
        (" embedded ", "embedded"),
    ],
)
def test_every_engine_address_form_is_accepted_and_reads_back_unchanged(text: str, address: str) -> None:
    assert settle({"dcgm_address": text}).sampling.dcgm_address == address
    assert settle({"dcgm_address": address}).sampling.dcgm_address == address
    assert settle({}, {"DCGM_REMOTE_HOSTENGINE_INFO": text}).sampling.dcgm_address == address


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("vsock://2:5555", "vsock:// is not spoken"),
        ("http://node:9400", "does not speak HTTP"),
        ("node:0", ""),
        ("node:65536", ""),
        ("node:", ""),
        (":5555", ""),
        ("a b", ""),
        ("[node]:1", ""),
        ("[::1]x", ""),
        ("::1]:5", ""),
        ("unix://run/x", ""),
        ("unix:///run/", ""),
        ("/" + "x" * 107, ""),
    ],
)
def test_invalid_engine_address_is_refused_with_the_allowed_forms(text: str, why: str) -> None:
    (reported,) = mistakes({"dcgm_address": text, "simulate": "demo"})
    assert reported.startswith(
        f"dcgm-address (from --dcgm-address): value '{text}' is not an engine's address; allowed: "
    )
    assert why in reported


def test_dcgm_is_used_with_an_address_or_on_request() -> None:
    assert settle({"source": "dcgm"}).sampling.dcgm_address == "localhost:5555"
    assert settle({"source": "auto", "dcgm_address": "node"}).sampling.dcgm_address == "node:5555"
    alone = settle({"source": "nvml", "dcgm_address": "node"})
    assert alone.sampling.dcgm_address == ""
    assert alone.warnings == ("dcgm-address: with source nvml no engine is asked; not used; source auto reads both",)


def test_dcgm_exporter_variables_have_their_original_meaning(tmp_path: Path) -> None:
    collectors = tmp_path / "c.csv"
    config = settle(
        {},
        {
            "DCGM_EXPORTER_LISTEN": ":9401",
            "DCGM_EXPORTER_INTERVAL": "10000",
            "DCGM_EXPORTER_COLLECTORS": str(collectors),
            "DCGM_POD_RESOURCES_KUBELET_SOCKET": "/k/kubelet.sock",
            "NVIDIA_RESOURCE_NAMES": "nvidia.com/a100, nvidia.com/gpu",
            "DCGM_EXPORTER_KUBERNETES": "false",
            "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID": "true",
            "NODE_NAME": "node-7",
            "DCGM_EXPORTER_LOG_FORMAT": "json",
        },
    )
    assert config.serving.listen.port == 9401
    assert config.sampling.interval_seconds == 10.0
    assert config.exposition.collectors == collectors
    assert config.attribution.kubelet_socket == "/k/kubelet.sock"
    assert config.attribution.gpu_resources == (*DEFAULT_RESOURCES, "nvidia.com/a100")
    assert config.exposition.dcgm_pod_uid is True
    assert config.attribution.enabled is False
    assert config.attribution.node_name == "node-7"
    assert config.logging.log_format == "json"
    assert config.warnings == ()


def test_unsupported_dcgm_exporter_variables_are_one_warning() -> None:
    environ = {
        "DCGM_EXPORTER_KUBERNETES_GPU_ID_TYPE": "device-name",
        "DCGM_EXPORTER_ENABLE_PPROF": "true",
        "DCGM_EXPORTER_CONFIGMAP_DATA": "none",
        "DCGM_EXPORTER_SOMETHING_NEWER": "1",
        "DCGM_EXPORTER_COLLECTORS": "/etc/dcgm-exporter/dcp-metrics-included.csv",
        # Variables that Kubernetes adds for Services with these names:
        "DCGM_EXPORTER_SERVICE_HOST": "10.0.0.1",
        "DCGM_EXPORTER_PORT_9400_TCP_ADDR": "10.0.0.1",
        "GPU_COST_EXPORTER_SERVICE_PORT_METRICS": "9400",
        "GPU_COST_EXPORTER_PORT": "tcp://10.0.0.1:9400",
    }
    config = settle({}, environ)
    assert config.exposition.collectors is None
    others, collectors = config.warnings
    assert collectors.startswith("collectors: /etc/dcgm-exporter/dcp-metrics-included.csv is in dcgm-exporter's image")
    assert others.startswith("of dcgm-exporter, without an equivalent here, not used: DCGM_EXPORTER_ENABLE_PPROF")
    assert others.endswith("DCGM_EXPORTER_SOMETHING_NEWER")
    assert "KUBERNETES_GPU_ID_TYPE" not in others


def test_interval_probably_meant_in_seconds_is_used_with_a_warning() -> None:
    config = settle({}, {"DCGM_EXPORTER_INTERVAL": "30"})
    assert config.sampling.interval_seconds == 0.2
    assert config.warnings == (
        "DCGM_EXPORTER_INTERVAL: 30 is in milliseconds; sample-interval is 200ms; 30000 would be 30 s",
    )
    (reported,) = mistakes({"simulate": "demo"}, {"DCGM_EXPORTER_INTERVAL": "soon"})
    assert "DCGM_EXPORTER_INTERVAL" in reported


def test_unknown_own_variable_warns_with_the_nearest_name() -> None:
    config = settle({}, {"GPU_COST_EXPORTER_SAMPEL_INTERVAL": "5s"})
    (reported,) = config.warnings
    assert reported.startswith("GPU_COST_EXPORTER_SAMPEL_INTERVAL: unknown variable, not used")
    assert reported.endswith("did you mean 'GPU_COST_EXPORTER_SAMPLE_INTERVAL'?")


@pytest.mark.parametrize("expiry", ["10s", "30s", "59s"])
def test_expiry_below_twice_the_kubelet_interval_is_refused(expiry: str) -> None:
    (reported,) = mistakes({"attribution_expiry": expiry, "kubelet_interval": "30s", "simulate": "demo"})
    assert reported.startswith(f"attribution-expiry: {expiry} is less than twice the kubelet-interval, 30s")


def test_configured_paths_are_checked_before_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    reported = mistakes(
        {"kubelet_socket": str(file), "state_dir": str(file), "proc_root": str(file), "collectors": "/no"}
    )
    assert [line.partition(":")[0] for line in reported] == ["collectors", "state-dir", "kubelet-socket", "proc-root"]
    assert "is a file, not a socket" in reported[2]
    (told_missing,) = mistakes({"state_dir": str(tmp_path / "none"), "kubelet_socket": str(tmp_path / "none.sock")})
    assert told_missing.startswith("state-dir:")


@pytest.mark.parametrize("key", ["state-dir", "proc-root", "collectors", "config"])
def test_inaccessible_path_is_one_line_without_a_traceback(tmp_path: Path, key: str) -> None:
    beyond = tmp_path / ("x" * 300)  # refused to every uid; a closed directory is not closed to uid 0
    with pytest.raises(ConfigError) as raised:
        load_agent({"attribution": "off", key: str(beyond)}, {})
    assert key in raised.value.problems[0]


def test_missing_kubelet_socket_and_valid_state_directory_are_accepted(tmp_path: Path) -> None:
    flags: dict[str, object] = {"kubelet_socket": str(tmp_path / "later.sock"), "state_dir": str(tmp_path)}
    assert settle(flags, check_paths=True).running.state_dir == tmp_path


@given(st.floats(min_value=0.001, max_value=86_400).map(lambda value: round(value, 3)))
def test_duration_reads_back_as_written(seconds: float) -> None:
    assert duration_seconds(format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@given(st.sampled_from(OPTIONS), st.text(max_size=30))
def test_any_text_is_a_valid_value_or_a_named_error(option: Option, text: str) -> None:
    key = option.key
    try:
        settle({key: text})
    except ConfigError as error:
        reported = error.problems
    else:
        reported = ()
    assert all(line.startswith((f"{key} (from --", "attribution-expiry: ")) for line in reported)


def logged(form: str, message: str, **extra: object) -> str:
    stream = io.StringIO()
    resolve.configure(form, "info", stream)  # type: ignore[arg-type]
    try:
        logging.getLogger("exporter.part").info(message, extra=extra)
    finally:
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.WARNING)
    return stream.getvalue()


def test_log_record_is_one_line_of_text_or_json() -> None:
    text = logged("text", "two\nlines", seconds=3)
    assert text.count("\n") == 1
    assert "INFO    part: two\\nlines seconds=3" in text
    event = json.loads(logged("json", "two\nlines", seconds=3))
    assert (event["message"], event["part"], event["level"], event["seconds"]) == ("two\nlines", "part", "info", 3)


@pytest.mark.parametrize("form", [resolve.EventFormatter(as_json=as_json) for as_json in (False, True)])
def test_exception_stays_on_the_line_of_its_log_record(form: logging.Formatter) -> None:
    try:
        raise ValueError("a\nb")  # noqa: TRY301 - the traceback is under test
    except ValueError:
        record = logging.LogRecord("exporter.x", logging.ERROR, __file__, 1, "failed", None, sys.exc_info())
    line = form.format(record)
    assert "\n" not in line
    assert "ValueError" in line

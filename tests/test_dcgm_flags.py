"""dcgm-exporter's command line and environment: every setting, by every name."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_support import settings_of

from exporter.cli import main
from exporter.config import AgentConfig, dcgm_flags, load_agent
from exporter.config.dcgm_flags import TABLE, GivenFlag, Setting
from exporter.config.options import BY_KEY
from exporter.config.types import Listen
from exporter.errors import ConfigError

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "migrating.md"
OURS = frozenset(BY_KEY)
DEFAULT_RESOURCES = tuple(str(BY_KEY["gpu-resources"].default).split(","))
SAMPLES: dict[str, tuple[str, str, object]] = {
    "collectors": ("/c.csv", "collectors", Path("/c.csv")),
    "address": ("[::1]:9401", "listen", Listen("::1", 9401)),
    "collect-interval": ("10000", "interval_seconds", 10.0),
    "kubernetes": ("false", "enabled", False),
    "kubernetes-enable-pod-uid": ("true", "dcgm_pod_uid", True),
    "kubernetes-enable-pod-labels": ("true", "kube_metadata", True),
    "kubernetes-enable-dra": ("1", "kube_metadata", True),
    "nvidia-resource-names": ("x.com/a,x.com/b", "gpu_resources", (*DEFAULT_RESOURCES, "x.com/a", "x.com/b")),
    "pod-resources-kubelet-socket": ("/k/kubelet.sock", "kubelet_socket", "/k/kubelet.sock"),
    "hpc-job-mapping-dir": ("/jobs", "job_mapping_dir", Path("/jobs")),
    "remote-hostengine-info": ("tcp://engine", "dcgm_address", "engine:5555"),
    "use-old-namespace": ("true", "dcgm_old_labels", True),
    "no-hostname": ("t", "hostname_label", ""),
    "replace-blanks-in-model-name": ("1", "dcgm_model_hyphens", True),
    "xid-count-window-size": ("60000", "xid_count_window_seconds", 60.0),
    "clock-events-count-window-size": ("120000", "clock_events_window_seconds", 120.0),
    "web-config-file": ("/web.yaml", "web_config", Path("/web.yaml")),
    "debug": ("T", "log_level", "debug"),
    "log-format": ("json", "log_format", "json"),
    "NODE_NAME": ("node-7", "node_name", "node-7"),
}
"""A text of each setting with an equivalent, and our setting with its value."""


def settle(words: list[str], environ: dict[str, str] | None = None, **ours: str) -> AgentConfig:
    rest, given_flags, problems = dcgm_flags.take(words)
    # A remaining flag with the name of one of ours is ours.
    same = dict(word.removeprefix("--").split("=", 1) for word in rest)
    assert problems == []
    return load_agent({**same, **ours}, environ or {}, dcgm_flags=given_flags, check_paths=False)


def named(setting: Setting) -> str:
    return setting.flags[-1].removeprefix("--") if setting.flags else setting.env


def text_of(setting: Setting) -> str:
    name = named(setting)
    return SAMPLES[name][0] if name in SAMPLES else "true" if setting.form == "switch" else "g:0"


def forms(setting: Setting) -> list[list[str]]:
    """Return every form of the setting on a command line."""
    text = text_of(setting)
    found = []
    for name in setting.flags:
        written = [name] if len(name) == 2 else [name, name.removeprefix("-")]
        found += [[f"{form}={text}"] for form in written]
        if setting.form != "switch" and name.removeprefix("--") not in OURS:
            found.append([name, text])
    return found


def without_origin(setting: Setting, config: AgentConfig) -> tuple[object, ...]:
    names = (*setting.flags, setting.env)
    written = [form for name in names for form in (name, name.removeprefix("-") if len(name) > 2 else name)]
    warnings = [re.sub(rf"(?<![\w-])({'|'.join(written)})(?![\w-])", "NAME", line) for line in config.warnings]
    groups = [name for name in AgentConfig.__dataclass_fields__ if name != "warnings"]
    return (*(getattr(config, name) for name in groups), warnings)


@pytest.mark.parametrize("setting", TABLE, ids=named)
def test_every_name_of_a_setting_gives_the_same_result(setting: Setting) -> None:
    by_variable = without_origin(setting, settle([], {setting.env: text_of(setting)}))
    for words in forms(setting):
        assert without_origin(setting, settle(words)) == by_variable, words


@pytest.mark.parametrize("name", SAMPLES)
def test_setting_with_an_equivalent_sets_it(name: str) -> None:
    setting = next(setting for setting in TABLE if named(setting) == name)
    text, attribute, value = SAMPLES[name]
    assert settings_of(settle([], {setting.env: text}))[attribute] == value


def test_every_setting_has_an_equivalent_a_constant_or_an_alternative() -> None:
    for setting in TABLE:
        assert sum(map(bool, (setting.key, setting.always, setting.instead))) == 1, setting
        assert not setting.key or setting.key in BY_KEY
    assert {named(setting) for setting in TABLE if setting.key} == {*SAMPLES, "kubernetes-pod-label-allowlist-regex"}
    names = [name for setting in TABLE for name in (*setting.flags, setting.env)]
    assert len(names) == len(set(names))


def test_unsupported_settings_are_one_warning_and_unset_ones_none() -> None:
    others = [setting for setting in TABLE if setting.instead]
    config = settle([f"{setting.flags[-1]}={text_of(setting)}" for setting in others])
    (line,) = config.warnings
    assert line.startswith("of dcgm-exporter, without an equivalent here, not used: ")
    for setting in others:
        assert f"{setting.flags[-1]} ({setting.instead})" in line
    quiet = [f"{setting.flags[-1]}={setting.unset or 'false'}" for setting in others]
    assert settle(quiet).warnings == ()
    assert settle([], {setting.env: setting.unset or "none" for setting in others}).warnings == ()


def test_always_on_settings_are_accepted_silently() -> None:
    always = [setting for setting in TABLE if setting.always]
    assert len(always) > 5
    assert settle([f"{setting.flags[-1]}={text_of(setting)}" for setting in always]) == settle([])


def test_chart_and_image_arguments_are_accepted_unchanged() -> None:
    environ = {
        "DCGM_EXPORTER_KUBERNETES": "true",
        "DCGM_EXPORTER_LISTEN": ":9400",
        "DCGM_EXPORTER_WEB_WRITE_TIMEOUT": "30s",
        "NODE_NAME": "gpu-1",
    }
    config = settle(
        ["-f", "/etc/dcgm-exporter/dcp-metrics-included.csv", "-r", "localhost:5555", "-c", "15000"], environ
    )
    assert config.exposition.collectors is None
    assert (config.sampling.source, config.sampling.dcgm_address) == ("auto", "localhost:5555")
    assert config.sampling.interval_seconds == 15.0
    assert config.attribution.node_name == "gpu-1"
    (line,) = config.warnings
    assert "its default set, which is built in, is used" in line


def test_file_not_shipped_in_the_dcgm_exporter_image_must_exist() -> None:
    rest, flags, _ = dcgm_flags.take(["-f", "/etc/dcgm-exporter/mine.csv"])
    assert rest == []
    with pytest.raises(ConfigError, match=r"cannot read /etc/dcgm-exporter/mine\.csv"):
        load_agent({"simulate": "demo"}, {}, dcgm_flags=flags)


def test_own_options_override_dcgm_exporter_flags_which_override_variables() -> None:
    assert settle(["-c", "2000"], {"DCGM_EXPORTER_INTERVAL": "3000"}).sampling.interval_seconds == 2.0
    assert settle(["-c", "2000", "--collect-interval=4000"]).sampling.interval_seconds == 4.0
    ours = settle(["-c", "30"], {"DCGM_EXPORTER_INTERVAL": "3"}, **{"sample-interval": "1s"})
    assert ours.sampling.interval_seconds == 1.0
    assert ours.warnings == ()  # a wrong interval that is not used gives no warning
    assert settle(["-a", ":1"], {"GPU_COST_EXPORTER_LISTEN": ":2"}).serving.listen.port == 2
    assert settle(["--debug"], {}, **{"log-level": "error"}).logging.log_level == "error"


def test_disabled_switch_is_silent_and_invalid_switch_value_is_refused() -> None:
    assert settle(["--debug=false", "--kubernetes-enable-pod-labels=0", "--kubernetes-enable-dra=F"]) == settle([])
    assert settle(["-k"]).attribution.enabled is True
    with pytest.raises(ConfigError, match=r"attribution \(from -k\): value 'perhaps'"):
        settle(["-k=perhaps"])
    with pytest.raises(ConfigError, match=r"kube-metadata \(from --kubernetes-enable-dra\): value 'perhaps'"):
        settle(["--kubernetes-enable-dra=perhaps"])


def test_label_switches_set_the_equivalent_options() -> None:
    config = settle(["-o", "-n", "--rbmn"])
    assert (
        config.exposition.dcgm_old_labels,
        config.exposition.hostname_label,
        config.exposition.dcgm_model_hyphens,
    ) == (True, "", True)
    assert config.warnings == ()
    assert settle(["-o=false", "--no-hostname=0", "--rbmn=F"]) == settle([])
    assert settle(["-n"], {}, **{"hostname-label": "host"}).exposition.hostname_label == "host"
    with pytest.raises(ConfigError, match=r"dcgm-old-labels \(from -o\): value 'perhaps'"):
        settle(["-o=perhaps"])


@pytest.mark.parametrize(
    ("flag", "least", "most", "option"),
    [
        ("-c", 200, 300_000, "interval_seconds"),
        ("-x", 1000, 3_600_000, "xid_count_window_seconds"),
        ("--clock-events-count-window-size", 1000, 3_600_000, "clock_events_window_seconds"),
    ],
)
def test_out_of_range_milliseconds_are_clamped_with_a_warning(flag: str, least: int, most: int, option: str) -> None:
    low, high = settle([flag, "30"]), settle([flag, str(most + 1)])
    assert settings_of(low)[option] == least / 1000
    assert settings_of(high)[option] == most / 1000
    assert low.warnings[0].startswith(f"{flag}: 30 is in milliseconds; ")
    assert low.warnings[0].endswith("; 30000 would be 30 s")
    assert "would be" not in settle([flag, "0"]).warnings[0]
    assert high.warnings[0].startswith(f"{flag}: {most + 1} ms is above the maximum; ")
    assert settle([flag, str(most)]).warnings == ()
    for text in ("5s5", "1" * 5000):
        with pytest.raises(ConfigError, match=f"value '{text}' is not a duration"):
            settle([flag, text])


def test_resource_names_accumulate_and_extend_the_defaults() -> None:
    words = ["--nvidia-resource-names", "nvidia.com/a100", "--nvidia-resource-names=nvidia.com/a10,"]
    assert settle(words).attribution.gpu_resources[-2:] == ("nvidia.com/a100", "nvidia.com/a10")
    assert settle(words, {}, **{"gpu-resources": "x.com/y"}).attribution.gpu_resources == (
        "x.com/y",
        "nvidia.com/a100",
        "nvidia.com/a10",
    )
    with pytest.raises(ConfigError, match=r"gpu-resources \(from --nvidia-resource-names\): value 'a b'"):
        settle(["--nvidia-resource-names", "a b"])


def test_label_patterns_become_keys_and_others_are_reported() -> None:
    switch, patterns = "--kubernetes-enable-pod-labels", "--kubernetes-pod-label-allowlist-regex"
    config = settle([switch, patterns, r"^app$,^(team|env)$,^app\.kubernetes\.io/name$,^x-.*", patterns, "tier"])
    assert config.owners.pod_labels == ("app", "team", "env", "app.kubernetes.io/name", "tier")
    assert config.owners.kube_metadata is True
    (line,) = config.warnings
    assert line.startswith(f"{switch}: labels are shown once, on gpu_pod_info")
    assert line.endswith("left out: ^x-.*")
    many = settle([switch, patterns, ",".join(f"key{number}" for number in range(12))])
    assert len(many.owners.pod_labels) == 10
    assert many.warnings[0].endswith("left out: key10, key11")
    assert settle([patterns, "team"]).owners.pod_labels == ()  # as in dcgm-exporter: nothing without the switch
    assert settle([switch, patterns, "team"], {}, **{"pod-labels": "mine"}).owners.pod_labels == ("mine",)
    assert settle([switch, patterns, "team"], {}, **{"kube-metadata": "on"}).owners.pod_labels == ("team",)


def test_job_mapping_without_kubernetes_is_slurm_and_with_it_a_warning() -> None:
    assert settle(["--hpc-job-mapping-dir", "/jobs"]).attribution.workload_manager == "slurm"
    alone = settle(["--hpc-job-mapping-dir", "/jobs", "-k=false", "--kubernetes-enable-pod-labels"])
    assert (alone.attribution.workload_manager, alone.attribution.enabled, alone.owners.kube_metadata) == (
        "slurm",
        True,
        False,
    )
    both = settle(["--hpc-job-mapping-dir", "/jobs", "--kubernetes"])
    assert both.attribution.workload_manager == "kubernetes"
    assert both.warnings == ("job-mapping-dir: read only with workload-manager slurm; not used",)


def test_kubernetes_off_disables_kube_metadata() -> None:
    assert settle(["-k=false", "--kubernetes-enable-pod-labels"]).owners.kube_metadata is False
    host = settle(["-k", "--kubernetes-enable-dra"], {}, **{"workload-manager": "host"})
    assert (host.attribution.workload_manager, host.owners.kube_metadata) == ("host", False)


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["-r"], "-r: needs a value, as in: -r VALUE"),
        (["--address", "--kubernetes"], "--address: needs a value"),
        (["--kuberntes"], "--kuberntes: unknown flag; did you mean '--kubernetes'?"),
        (["--colect-interval", "1"], "--colect-interval: unknown flag; did you mean '--collect-interval'?"),
        (["--kubernetes", "false"], "'false': unexpected argument"),
        (["-z"], "-z: unknown flag"),
        (["--x=1"], "--x: unknown flag"),
        (["-r", "vsock://1:2"], "dcgm-address (from -r): value 'vsock://1:2'"),
    ],
)
@pytest.mark.parametrize("command", ["agent", "doctor"])
def test_invalid_dcgm_exporter_argument_is_one_line(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str], reported: str
) -> None:
    assert main([command, "--simulate", "demo", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-cost-exporter: ")
    assert reported in line


def test_arguments_without_a_command_are_agent_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-c", "30000", "--simulate", "dmo"]) == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err
    assert main(["-c", "30000", "--listn", ":1"]) == 2
    assert "--listn: unknown flag; did you mean '--listen'?" in capsys.readouterr().err


def test_other_commands_refuse_dcgm_exporter_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--collect-interval", "1"]) == 2
    assert "--collect-interval: unknown flag" in capsys.readouterr().err


WORDS = st.lists(
    st.sampled_from([*dcgm_flags.KNOWN_FLAGS, "--listen", "--", "x", "-q"])
    | st.builds("{}={}".format, st.sampled_from(dcgm_flags.KNOWN_FLAGS), st.text(max_size=5))
    | st.text(max_size=5),
    max_size=8,
)


@given(WORDS)
def test_every_command_line_is_accepted_or_refused_by_name(words: list[str]) -> None:
    rest, flags, problems = dcgm_flags.take(words)
    kept = [*rest, *(part for one in flags for part in (one.origin, one.text)), *problems]
    for word in words:
        assert any(part in kept or any(part in problem for problem in problems) for part in (word, word.split("=")[0]))
    reported: tuple[str, ...] = ()
    try:
        load_agent({}, {}, dcgm_flags=flags, check_paths=False)
    except ConfigError as error:
        reported = error.problems
    assert all(any(f"(from {one.origin})" in line for one in flags) for line in reported)


@given(st.sampled_from([setting for setting in TABLE if setting.form == "milliseconds"]), st.integers(0, 10**12))
def test_any_number_of_milliseconds_is_accepted(setting: Setting, number: int) -> None:
    load_agent({}, {}, dcgm_flags=[GivenFlag(setting, "-c", str(number))], check_paths=False)

"""Maps dcgm-exporter's flags and variables to options of the agent."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from exporter.attribution import owner_rules
from exporter.config.options import BY_KEY
from exporter.config.types import format_duration

ENV_PREFIX = "DCGM_EXPORTER_"
Form = Literal["text", "list", "switch", "milliseconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of dcgm-exporter, as a flag, a variable or both.

    A setting has an equivalent if ``key`` names an option of this agent, or if ``always`` describes the behaviour of
    the agent. Otherwise ``instead`` describes the alternative; a warning shows it in brackets after the name.
    """

    flags: tuple[str, ...]
    """Flags with their hyphens, the longest last; empty if only the variable exists."""
    env: str
    form: Form = "text"
    """Form of the text. A ``switch`` accepts a value only with ``=``, a ``list`` may be repeated."""
    key: str = ""
    turns: str = ""
    """For a switch: text of this agent's option if the switch is on; if it is off, the option stays unset."""
    always: str = ""
    instead: str = ""
    unset: str = ""
    """Text without effect, in addition to the usual ones."""


class GivenFlag(NamedTuple):
    """A given setting: ``origin`` is its name as written, ``text`` its value."""

    setting: Setting
    origin: str
    text: str


def _own(flags: str, key: str, *, env: str = "", form: Form = "text", turns: str = "") -> Setting:
    return Setting(flags=tuple(flags.split()), env=env or _env(flags), form=form, key=key, turns=turns)


def _always(flag: str, always: str, *, env: str = "", form: Form = "switch") -> Setting:
    return Setting(flags=(flag,), env=env or _env(flag), form=form, always=always)


def _none(flags: str, instead: str, *, env: str = "", form: Form = "text", unset: str = "") -> Setting:
    return Setting(flags=tuple(flags.split()), env=env or _env(flags), form=form, instead=instead, unset=unset)


def _env(flags: str) -> str:
    return ENV_PREFIX + flags.rpartition("--")[2].upper().replace("-", "_")


EXTRA_RESOURCES = _own("--nvidia-resource-names", "gpu-resources", env="NVIDIA_RESOURCE_NAMES", form="list")
POD_LABELS = _own("--kubernetes-enable-pod-labels", "kube-metadata", form="switch", turns="on")
LABEL_PATTERNS = _own("--kubernetes-pod-label-allowlist-regex", "pod-labels", form="list")
JOB_MAPPING = _own("--hpc-job-mapping-dir", "job-mapping-dir", env="DCGM_HPC_JOB_MAPPING_DIR")
_IN_STEP = "says nothing without the switch it goes with"

TABLE: tuple[Setting, ...] = (
    _own("-f --collectors", "collectors"),
    _none("-m --configmap-data", "mount the ConfigMap and name its file with --collectors"),
    _none("--config-file", "a file of dcgm-exporter's: name its CSV with --collectors; --config is this agent's"),
    _own("-a --address", "listen", env=f"{ENV_PREFIX}LISTEN"),
    _own("-c --collect-interval", "sample-interval", env=f"{ENV_PREFIX}INTERVAL", form="milliseconds"),
    _own("-k --kubernetes", "attribution", form="switch"),
    POD_LABELS,
    LABEL_PATTERNS,
    _own("--kubernetes-enable-pod-uid", "dcgm-pod-uid", form="switch"),
    _always("--kubernetes-gpu-id-type", "every form of a device's id is recognised", form="text"),
    _always("--kubernetes-virtual-gpus", "every holder of a shared GPU has its part", env="KUBERNETES_VIRTUAL_GPUS"),
    _own("--kubernetes-enable-dra", "kube-metadata", env="KUBERNETES_ENABLE_DRA", form="switch", turns="on"),
    EXTRA_RESOURCES,
    _own("--pod-resources-kubelet-socket", "kubelet-socket", env="DCGM_POD_RESOURCES_KUBELET_SOCKET"),
    JOB_MAPPING,
    _own("-r --remote-hostengine-info", "dcgm-address", env="DCGM_REMOTE_HOSTENGINE_INFO"),
    _none("-d --devices", "every GPU and instance is measured", env=f"{ENV_PREFIX}DEVICES_STR", unset="f"),
    _none("-s --switch-devices", "NVSwitches are not measured", env=f"{ENV_PREFIX}OTHER_DEVICES_STR", unset="f"),
    _none("-p --cpu-devices", "CPUs are not measured", env=f"{ENV_PREFIX}CPU_DEVICES_STR", unset="f"),
    _own("-o --use-old-namespace", "dcgm-old-labels", form="switch"),
    _own("-n --no-hostname", "hostname-label", form="switch", turns="none"),
    _own("--rbmn --replace-blanks-in-model-name", "dcgm-model-hyphens", form="switch"),
    _own("-x --xid-count-window-size", "xid-count-window", form="milliseconds"),
    _own("--clock-events-count-window-size", "clock-events-window", form="milliseconds"),
    _own("--web-config-file", "web-config"),
    _none("--web-systemd-socket", "give an address with --listen", env=f"{ENV_PREFIX}SYSTEMD_SOCKET", form="switch"),
    _none("--web-read-timeout", "not to be set", unset="10s"),
    _none("--web-write-timeout", "not to be set: a scrape takes milliseconds", unset="30s"),
    _none("--max-concurrent-scrapes", "not to be set: a scrape reads no driver"),
    _always("--enable-exporter-metrics", "gpu_exporter_* and process_* are always there"),
    _none("--health-require-gpus", "probe /readyz, which says whether GPUs are read", form="switch"),
    _none("--watch-max-keep-age", "not to be set", unset="10m"),
    _none("--watch-max-keep-samples", "not to be set"),
    _none("--container-labels", "--workload-manager host finds containers by their cgroups", form="switch"),
    _always("--container-runtime-socket", _IN_STEP, env="DCGM_CONTAINER_RUNTIME_SOCKET", form="text"),
    _always("--enable-gpu-bind-unbind-watch", "GPUs that come and go are followed"),
    _always("--gpu-bind-unbind-poll-interval", "GPUs that come and go are seen at the next sample", form="text"),
    _own("--debug", "log-level", form="switch", turns="debug"),
    _own("--log-format", "log-format"),
    _none("--enable-dcgm-log", "read the engine's own log", form="switch"),
    _always("--dcgm-log-level", _IN_STEP, form="text"),
    _none("--enable-pprof", "there is no profiling over HTTP", form="switch"),
    _none("--dump-enabled", "see /api/v1/devices, and: doctor --format json", form="switch"),
    _always("--dump-directory", _IN_STEP, form="text"),
    _always("--dump-retention", _IN_STEP, form="text"),
    _always("--dump-compression", _IN_STEP),
    _none("--fake-gpus", "--simulate demo shows a whole node", env=f"{ENV_PREFIX}USE_FAKE_GPUS", form="switch"),
    _always("--disable-startup-validate", "no missing driver stops the start", env="DISABLE_STARTUP_VALIDATE"),
    Setting(flags=(), env="NODE_NAME", key="node-name"),
)
"""Settings in the order of dcgm-exporter's documentation."""

_BY_FLAG = {flag: setting for setting in TABLE for flag in setting.flags}
KNOWN_FLAGS = tuple(_BY_FLAG)


def names_for(key: str) -> tuple[str, ...]:
    """Return dcgm-exporter's names for an option of this agent."""
    settings = (setting for setting in TABLE if setting.key == key)
    return tuple(name for setting in settings for name in (*setting.flags, setting.env) if name != f"--{key}")


def find(word: str) -> Setting | None:
    """Return the setting of a command-line word: a flag with one or two hyphens, with or without ``=value``."""
    flag = word.partition("=")[0]
    return _BY_FLAG.get(flag) or (_BY_FLAG.get(f"-{flag}") if flag.startswith("-") else None)


def take(words: Sequence[str]) -> tuple[list[str], list[GivenFlag], list[str]]:
    """Return the words without dcgm-exporter's flags, these flags, and problems of one line each.

    The parser follows Go: a long flag has one or two hyphens; a switch stands alone or has ``=true`` or ``=false``; the
    value of another flag follows it, or its ``=``. A flag of the same name with two hyphens stays for this agent.

    Args:
        words: Words of the command line, without the command.
    """
    rest: list[str] = []
    given: list[GivenFlag] = []
    problems: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return [*rest, word, *queue], given, problems
        setting = find(word)
        origin, has_value, text = word.partition("=")
        if setting is None or origin.removeprefix("--") in BY_KEY:
            rest.append(word)
        elif has_value:
            given.append(GivenFlag(setting, origin, text))
        elif setting.form == "switch":
            given.append(GivenFlag(setting, origin, "true"))
        elif queue and not queue[0].startswith("-"):
            given.append(GivenFlag(setting, origin, queue.pop(0)))
        else:
            problems.append(f"{origin}: needs a value, as in: {origin} VALUE")
    return rest, given, problems


# Kubernetes adds variables of every Service to the pods of its namespace. Those of a Service dcgm-exporter have the
# same prefix.
SERVICE_LINK = re.compile(r".*?(^|_)(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")


def unknown_names(environ: Mapping[str, str], prefix: str, known: Collection[str]) -> list[str]:
    """Return the variables with a prefix that are not known, except those that Kubernetes sets for a Service."""
    names = sorted(name for name in environ if name.startswith(prefix) and name not in known)
    return [name for name in names if not SERVICE_LINK.fullmatch(name.removeprefix(prefix[:-1]))]


# Files of dcgm-exporter's image. The built-in set has the same metrics, so that a missing file is no mistake.
ITS_FILES = frozenset(
    Path("/etc/dcgm-exporter", name)
    for name in ("default-counters.csv", "dcp-metrics-included.csv", "1.x-compatibility-metrics.csv")
)
_SWITCH = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), "on"),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), "off"),
}
"""This agent's words for Go's."""
_SAYS_NOTHING = frozenset({"", "0", "f", "false", "none"})
_LITERAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_LIKELY_SECONDS = 1000
_MILLISECONDS = re.compile(r"[0-9]{1,15}")
_Given = dict[Setting, tuple[str, str]]
"""Name as written and text of each given setting, in the order of the table."""
Translated = dict[str, tuple[str, str]]
"""Name as written, and text in this agent's form, by option key."""


def translate(
    environ: Mapping[str, str], flags: Sequence[GivenFlag] = (), ours: frozenset[str] = frozenset()
) -> tuple[Translated, list[str]]:
    """Translate flags, and variables of settings without a flag; return the texts, and warnings of one line each.

    A text that cannot be translated stays unchanged, so that the option itself refuses it. The text of
    ``gpu-resources`` is added to the option's.

    Args:
        environ: The process environment.
        flags: Flags of the command line, in their order.
        ours: Keys of options that this agent's own flags and variables set; these are not translated.
    """
    texts: Translated = {}
    warnings: list[str] = []
    given = _settled(environ, flags)
    for setting, (origin, written) in given.items():
        if (setting.key in ours and setting is not EXTRA_RESOURCES) or setting is LABEL_PATTERNS or not setting.key:
            continue
        text = _SWITCH.get(written, written) if setting.form == "switch" else written
        if setting.form == "milliseconds":
            text = _milliseconds(setting.key, origin, written, warnings)
        if not (setting.turns and text == "off"):
            texts[setting.key] = (origin, setting.turns if setting.turns and text == "on" else text)
    if "workload-manager" not in ours:
        _settle_manager(given, texts)
    if "pod-labels" not in ours and ours | texts.keys() >= {"kube-metadata"}:
        _settle_labels(given, texts, warnings)
    return texts, [*warnings, *_others(given, environ)]


def _settled(environ: Mapping[str, str], flags: Sequence[GivenFlag]) -> _Given:
    """Return the effective text of each setting: of repeated flags the last, or all for a list."""
    settled: _Given = {}
    for setting in TABLE:
        written = [(flag.origin, flag.text) for flag in flags if flag.setting is setting]
        if not written and environ.get(setting.env):
            written = [(setting.env, environ[setting.env])]
        if written:
            origin, text = written[-1]
            settled[setting] = origin, ",".join(one for _, one in written) if setting.form == "list" else text
    return settled


def _milliseconds(key: str, origin: str, written: str, warnings: list[str]) -> str:
    bounds = BY_KEY[key].kind.bounds
    if bounds is None or not _MILLISECONDS.fullmatch(written.strip()):
        return written
    milliseconds = int(written)
    used = min(max(milliseconds, round(bounds[0] * 1000)), round(bounds[1] * 1000))
    shown = f"{key} is {format_duration(used / 1000)}"
    if milliseconds < _LIKELY_SECONDS:
        meant = f"; {milliseconds}000 would be {milliseconds} s" if milliseconds else ""
        warnings.append(f"{origin}: {milliseconds} is in milliseconds; {shown}{meant}")
    elif milliseconds > used:
        warnings.append(f"{origin}: {milliseconds} ms is above the maximum; {shown}")
    return f"{used}ms"


def _settle_manager(given: _Given, texts: Translated) -> None:
    """Select Slurm's jobs if jobs are mapped and pods are not; without pods, do not read their metadata."""
    kubernetes = texts.get("attribution", ("", ""))[1]
    if JOB_MAPPING in given and kubernetes != "on":
        texts["workload-manager"] = (given[JOB_MAPPING][0], "slurm")
        texts.pop("attribution", None)  # meant for the kubelet there, and for jobs here
    if kubernetes == "off" or "workload-manager" in texts:
        texts.pop("kube-metadata", None)


def _settle_labels(given: _Given, texts: Translated, warnings: list[str]) -> None:
    """Set the names of pod labels for dcgm-exporter's patterns."""
    asked, switch = given.get(POD_LABELS, ("", ""))
    if _SWITCH.get(switch) != "on":
        return
    origin, patterns = given.get(LABEL_PATTERNS, ("", ""))
    keys, unclear = _label_keys(patterns)
    if keys:
        texts["pod-labels"] = (origin, ",".join(keys[: owner_rules.MAX_KEYS]))
        unclear += keys[owner_rules.MAX_KEYS :]
    left_out = f"; left out: {', '.join(unclear)}" if unclear else ""
    warnings.append(
        f"{asked}: labels are shown once, on gpu_pod_info, and only those that --pod-labels names, at most"
        f" {owner_rules.MAX_KEYS}{left_out}"
    )


def _label_keys(patterns: str) -> tuple[list[str], list[str]]:
    """Return the keys that patterns name literally, and the patterns that do not."""
    keys: list[str] = []
    unclear: list[str] = []
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        inner = pattern.removeprefix("^").removesuffix("$")
        if inner.startswith("(") and inner.endswith(")"):
            inner = inner[1:-1].removeprefix("?:")
        names = [re.sub(r"\\([./-])", r"\1", name) for name in inner.split("|")]
        if all(_LITERAL.fullmatch(name) for name in names):
            keys += names
        else:
            unclear.append(pattern)
    return list(dict.fromkeys(keys)), unclear


def _others(given: _Given, environ: Mapping[str, str]) -> list[str]:
    """Return one line that names the settings without an equivalent, with their alternatives."""
    names = [
        f"{origin} ({setting.instead})"
        for setting, (origin, text) in given.items()
        if setting.instead and text != setting.unset and text.lower() not in _SAYS_NOTHING
    ]
    unknown = unknown_names(environ, ENV_PREFIX, {setting.env for setting in TABLE})
    names += [name for name in unknown if environ[name].lower() not in _SAYS_NOTHING]
    return [f"of dcgm-exporter, without an equivalent here, not used: {', '.join(names)}"] if names else []

"""Maps dcgm-exporter's flags and variables to options of the agent."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from exporter.attribution import owner_rules
from exporter.config.types import LABEL, checked, format_duration
from exporter.metrics.dcgm_names import PREFIX, TAKEN

ENV_PREFIX = "DCGM_EXPORTER_"
Form = Literal["text", "list", "switch", "milliseconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of dcgm-exporter, as a flag, a variable or both.

    It has an equivalent where ``key`` names an option of this agent, or where what it asks for is ``always`` so;
    else ``instead`` says what to do, in words that stand in brackets behind its name.
    """

    flag: str = ""
    """With two hyphens; empty where there is only the variable."""
    shorts: tuple[str, ...] = ()
    env: str
    form: Form = "text"
    """Of its text. A ``switch`` takes a value with ``=`` only, a ``list`` may be given several times."""
    key: str = ""
    turns: str = ""
    """Of a switch: the text that our option gets where it is on; off says nothing then."""
    always: str = ""
    instead: str = ""
    unset: str = ""
    """The text that asks for nothing, in addition to the usual ones."""

    @property
    def names(self) -> tuple[str, ...]:
        """As they are written: ``-c``, ``--collect-interval``, ``DCGM_EXPORTER_INTERVAL``."""
        return (*self.shorts, *((self.flag,) if self.flag else ()), self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlag:
    """A setting that is given: ``origin`` is its name as written, ``text`` its value."""

    setting: Setting
    origin: str
    text: str


def _own(name: str, key: str, *shorts: str, env: str = "", form: Form = "text", turns: str = "") -> Setting:
    return Setting(flag=f"--{name}", shorts=shorts, env=env or _env(name), form=form, key=key, turns=turns)


def _always(name: str, always: str, *, env: str = "", form: Form = "switch") -> Setting:
    return Setting(flag=f"--{name}", env=env or _env(name), form=form, always=always)


def _none(name: str, instead: str, *shorts: str, env: str = "", form: Form = "text", unset: str = "") -> Setting:
    env = env or _env(name)
    return Setting(flag=f"--{name}", shorts=shorts, env=env, form=form, instead=instead, unset=unset)


def _env(name: str) -> str:
    return ENV_PREFIX + name.upper().replace("-", "_")


EXTRA_RESOURCES = _own("nvidia-resource-names", "gpu-resources", env="NVIDIA_RESOURCE_NAMES", form="list")
POD_LABELS = _own("kubernetes-enable-pod-labels", "kube-metadata", form="switch", turns="on")
LABEL_PATTERNS = _own("kubernetes-pod-label-allowlist-regex", "pod-labels", form="list")
JOB_MAPPING = _own("hpc-job-mapping-dir", "job-mapping-dir", env="DCGM_HPC_JOB_MAPPING_DIR")
_IN_STEP = "says nothing without the switch it goes with"

TABLE: tuple[Setting, ...] = (
    _own("collectors", "collectors", "-f"),
    _none("configmap-data", "mount the ConfigMap and name its file with --collectors", "-m"),
    _none("config-file", "a file of dcgm-exporter's: name its CSV with --collectors; --config is this agent's"),
    _own("address", "listen", "-a", env=f"{ENV_PREFIX}LISTEN"),
    _own("collect-interval", "sample-interval", "-c", env=f"{ENV_PREFIX}INTERVAL", form="milliseconds"),
    _own("kubernetes", "attribution", "-k", form="switch"),
    POD_LABELS,
    LABEL_PATTERNS,
    _own("kubernetes-enable-pod-uid", "dcgm-pod-uid", form="switch"),
    _always("kubernetes-gpu-id-type", "every form of a device's id is recognised", form="text"),
    _always("kubernetes-virtual-gpus", "every holder of a shared GPU has its part", env="KUBERNETES_VIRTUAL_GPUS"),
    _own("kubernetes-enable-dra", "kube-metadata", env="KUBERNETES_ENABLE_DRA", form="switch", turns="on"),
    EXTRA_RESOURCES,
    _own("pod-resources-kubelet-socket", "kubelet-socket", env="DCGM_POD_RESOURCES_KUBELET_SOCKET"),
    JOB_MAPPING,
    _own("remote-hostengine-info", "dcgm-address", "-r", env="DCGM_REMOTE_HOSTENGINE_INFO"),
    _none("devices", "every GPU and instance is measured", "-d", env=f"{ENV_PREFIX}DEVICES_STR", unset="f"),
    _none("switch-devices", "NVSwitches are not measured", "-s", env=f"{ENV_PREFIX}OTHER_DEVICES_STR", unset="f"),
    _none("cpu-devices", "CPUs are not measured", "-p", env=f"{ENV_PREFIX}CPU_DEVICES_STR", unset="f"),
    _own("use-old-namespace", "dcgm-old-labels", "-o", form="switch"),
    _own("no-hostname", "hostname-label", "-n", form="switch", turns="none"),
    _own("replace-blanks-in-model-name", "dcgm-model-hyphens", "--rbmn", form="switch"),
    _own("xid-count-window-size", "xid-count-window", "-x", form="milliseconds"),
    _own("clock-events-count-window-size", "clock-events-window", form="milliseconds"),
    _own("web-config-file", "web-config"),
    _none("web-systemd-socket", "give an address with --listen", env=f"{ENV_PREFIX}SYSTEMD_SOCKET", form="switch"),
    _none("web-read-timeout", "not to be set", unset="10s"),
    _none("web-write-timeout", "not to be set: a scrape takes milliseconds", unset="30s"),
    _none("max-concurrent-scrapes", "not to be set: a scrape reads no driver"),
    _always("enable-exporter-metrics", "gpu_exporter_* and process_* are always there"),
    _none("health-require-gpus", "probe /readyz, which says whether GPUs are read", form="switch"),
    _none("watch-max-keep-age", "not to be set", unset="10m"),
    _none("watch-max-keep-samples", "not to be set"),
    _none("container-labels", "--workload-manager host finds containers by their cgroups", form="switch"),
    _always("container-runtime-socket", _IN_STEP, env="DCGM_CONTAINER_RUNTIME_SOCKET", form="text"),
    _always("enable-gpu-bind-unbind-watch", "GPUs that come and go are followed"),
    _always("gpu-bind-unbind-poll-interval", "GPUs that come and go are seen at the next sample", form="text"),
    _own("debug", "log-level", form="switch", turns="debug"),
    _own("log-format", "log-format"),
    _none("enable-dcgm-log", "read the engine's own log", form="switch"),
    _always("dcgm-log-level", _IN_STEP, form="text"),
    _none("enable-pprof", "there is no profiling over HTTP", form="switch"),
    _none("dump-enabled", "see /api/v1/devices, and: doctor --format json", form="switch"),
    _always("dump-directory", _IN_STEP, form="text"),
    _always("dump-retention", _IN_STEP, form="text"),
    _always("dump-compression", _IN_STEP),
    _none("fake-gpus", "--simulate demo shows a whole node", env=f"{ENV_PREFIX}USE_FAKE_GPUS", form="switch"),
    _always("disable-startup-validate", "no missing driver stops the start", env="DISABLE_STARTUP_VALIDATE"),
    Setting(env="NODE_NAME", key="node-name"),
)
"""In the order of dcgm-exporter's own documentation."""

_BY_FLAG = {name: setting for setting in TABLE for name in setting.names[:-1]}
_SHORT = 2
KNOWN_FLAGS = tuple(name for setting in TABLE for name in setting.names[:-1])


def names_for(key: str) -> tuple[str, ...]:
    """Names that dcgm-exporter has for what an option of this agent sets, whatever its text turns into."""
    return tuple(name for setting in TABLE if setting.key == key for name in setting.names if name != f"--{key}")


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag of dcgm-exporter, with or without ``=value``."""
    return _setting(word) is not None


def take(words: Sequence[str], ours: frozenset[str]) -> tuple[list[str], list[GivenFlag], list[str]]:
    """Take dcgm-exporter's flags out of a command line: what is left, what was given, problems of one line each.

    Read as Go reads them: a long one has one hyphen or two; a switch stands alone or has ``=true`` or ``=false``; the
    value of another follows it, or its ``=``. A flag of ours that has the same name is left, where it has two hyphens.

    Args:
        words: Of the command line, without the command.
        ours: Names of our own flags, without hyphens.
    """
    rest: list[str] = []
    given: list[GivenFlag] = []
    problems: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return [*rest, word, *queue], given, problems
        setting = _setting(word)
        if setting is None or word.partition("=")[0].removeprefix("--") in ours:
            rest.append(word)
            continue
        origin, has_value, text = word.partition("=")
        if not has_value and setting.form == "switch":
            text = "true"
        elif not has_value and (not queue or queue[0].startswith("-")):
            problems.append(f"{origin}: needs a value, as in: {origin} VALUE")
            continue
        elif not has_value:
            text = queue.pop(0)
        given.append(GivenFlag(setting=setting, origin=origin, text=text))
    return rest, given, problems


def _setting(word: str) -> Setting | None:
    name = word.partition("=")[0]
    return _BY_FLAG.get(name) or (_BY_FLAG.get(f"-{name}") if len(name) > _SHORT else None)


# Kubernetes puts variables for every Service into its namespace's pods; one named dcgm-exporter looks like our prefix.
SERVICE_LINK = re.compile(r".*?(^|_)(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
# Files of its image; our default set has the same metrics, so that one of them that is missing is no mistake.
_ITS_FILES = frozenset(
    Path("/etc/dcgm-exporter", name)
    for name in ("default-counters.csv", "dcp-metrics-included.csv", "1.x-compatibility-metrics.csv")
)
_GO_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_GO_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_SAYS_NOTHING = frozenset({"", "0", "f", "false", "none"})
_LITERAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_LIKELY_SECONDS = 1000
_MOST_DIGITS = 15
_BOUNDS = {
    "sample-interval": (200, 300_000, "sampling every"),
    "xid-count-window": (1000, 3_600_000, "counting over"),
    "clock-events-window": (1000, 3_600_000, "counting over"),
}
"""Least and most milliseconds of our options, and what they do."""


@dataclass(slots=True)
class Translation:
    """What dcgm-exporter's settings come to here."""

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By option key: the name that was written, and the text in this agent's form."""
    resources: list[tuple[str, str]] = field(default_factory=list)
    """Name and text of resource names that are added to ours."""
    warnings: list[str] = field(default_factory=list)
    """One line each."""


def translate(
    environ: Mapping[str, str], flags: Sequence[GivenFlag] = (), ours: frozenset[str] = frozenset()
) -> Translation:
    """Translate flags and, where a setting has none, its variable.

    A text that cannot be translated is passed on as it is, so that the option's own check refuses it.

    Args:
        environ: The process environment.
        flags: Of the command line, in their order.
        ours: Keys of options that this agent's own flags and variables set: of these nothing is translated.
    """
    done = Translation()
    settings = _settled(environ, flags)
    for given in settings:
        if given.setting.key not in ours or given.setting is EXTRA_RESOURCES:
            _translate_one(given, done)
    if "workload-manager" not in ours:
        _settle_manager(settings, done)
    if "pod-labels" not in ours and ours | done.values.keys() >= {"kube-metadata"}:
        _note_labels(settings, done)
    _note_others(settings, environ, done)
    return done


def image_file_warning(path: str) -> str:
    """Why a collectors file need not be there; empty where it is there, or must be."""
    if Path(path) not in _ITS_FILES or Path(path).exists():
        return ""
    return f"collectors: {path} is in dcgm-exporter's image only; its default set, which is built in, is used"


def _settled(environ: Mapping[str, str], flags: Sequence[GivenFlag]) -> list[GivenFlag]:
    """What counts of each setting, in the order of the table: of its flags the last, or all of a list."""
    settled: list[GivenFlag] = []
    for setting in TABLE:
        own = [given for given in flags if given.setting is setting]
        if not own and environ.get(setting.env):
            own = [GivenFlag(setting=setting, origin=setting.env, text=environ[setting.env])]
        if own:
            text = ",".join(given.text for given in own) if setting.form == "list" else own[-1].text
            settled.append(GivenFlag(setting=setting, origin=own[-1].origin, text=text))
    return settled


def _translate_one(given: GivenFlag, done: Translation) -> None:
    setting, text = given.setting, given.text
    if setting is EXTRA_RESOURCES:
        done.resources.append((given.origin, text))
    elif setting is LABEL_PATTERNS:
        return  # only with the switch that goes with it
    elif setting.turns:
        if _switch(text) == "on":
            done.values[setting.key] = (given.origin, setting.turns)
        elif _switch(text) != "off":
            done.values[setting.key] = (given.origin, text)
    elif setting.key:
        done.values[setting.key] = (given.origin, _text(given, done.warnings))


def _text(given: GivenFlag, warnings: list[str]) -> str:
    if given.setting.form == "milliseconds":
        return _milliseconds(given, warnings)
    return _switch(given.text) if given.setting.form == "switch" else given.text


def _switch(text: str) -> str:
    if text in _GO_TRUE:
        return "on"
    return "off" if text in _GO_FALSE else text


def _milliseconds(given: GivenFlag, warnings: list[str]) -> str:
    text = given.text.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        return given.text
    least, most, does = _BOUNDS[given.setting.key]
    milliseconds = int(text)
    used = min(max(milliseconds, least), most)
    if milliseconds < _LIKELY_SECONDS:
        meant = f"; {milliseconds}000 would be {milliseconds} s" if milliseconds else ""
        warnings.append(
            f"{given.origin}: {milliseconds} is in milliseconds; {does} {format_duration(used / 1000)}{meant}"
        )
    elif milliseconds > most:
        warnings.append(
            f"{given.origin}: {milliseconds} ms is above the maximum; {does} {format_duration(used / 1000)}"
        )
    return f"{used}ms"


def _settle_manager(settings: Iterable[GivenFlag], done: Translation) -> None:
    """Jobs where it maps jobs and no pods; and without pods there is nothing to ask their API for."""
    kubernetes = done.values.get("attribution", ("", ""))[1]
    job_mapping = next((given for given in settings if given.setting is JOB_MAPPING), None)
    if job_mapping and kubernetes != "on":
        done.values["workload-manager"] = (job_mapping.origin, "slurm")
        done.values.pop("attribution", None)  # which is the kubelet's there, and the jobs' here
    if kubernetes == "off" or "workload-manager" in done.values:
        done.values.pop("kube-metadata", None)


def _note_labels(settings: Iterable[GivenFlag], done: Translation) -> None:
    """Pod labels are asked for by pattern there, and by name here."""
    asked = next((given for given in settings if given.setting is POD_LABELS), None)
    if asked is None or _switch(asked.text) != "on":
        return
    patterns = next((given for given in settings if given.setting is LABEL_PATTERNS), None)
    keys, unclear = _label_keys(patterns.text if patterns else "")
    if patterns and keys:
        done.values["pod-labels"] = (patterns.origin, ",".join(keys[: owner_rules.MAX_KEYS]))
        unclear += keys[owner_rules.MAX_KEYS :]
    left_out = f"; left out: {', '.join(unclear)}" if unclear else ""
    done.warnings.append(
        f"{asked.origin}: labels are shown once, on gpu_pod_info, and only those that --pod-labels names, at most"
        f" {owner_rules.MAX_KEYS}{left_out}"
    )


def _label_keys(patterns: str) -> tuple[list[str], list[str]]:
    """Keys that patterns name letter by letter, and the patterns that name none."""
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


def _note_others(settings: Iterable[GivenFlag], environ: Mapping[str, str], done: Translation) -> None:
    """One line that names what has no equivalent, and what to do instead."""
    names = [
        f"{given.origin} ({given.setting.instead})"
        for given in settings
        if given.setting.instead and given.text != given.setting.unset and given.text.lower() not in _SAYS_NOTHING
    ]
    known = {setting.env for setting in TABLE}
    names += [
        name
        for name, value in sorted(environ.items())
        if name.startswith(ENV_PREFIX)
        and name not in known
        and value.lower() not in _SAYS_NOTHING
        and not SERVICE_LINK.fullmatch(name.removeprefix(ENV_PREFIX[:-1]))
    ]
    if names:
        done.warnings.append(f"of dcgm-exporter, without an equivalent here, not used: {', '.join(names)}")


_NONE = "none"


def hostname_label(text: str | None, dcgm_names: str | None) -> str:
    """Return the name of the label, empty for none: what was chosen, else what goes with the names of the metrics."""
    if text is None:
        return "hostname" if dcgm_names == "4.9" else "Hostname"
    return "" if text == _NONE else text


def _is_taken(text: str) -> bool:
    return text in TAKEN or text.startswith(PREFIX)


# Two labels of one name on a line, and Prometheus refuses the whole page.
HOSTNAME_LABEL = replace(
    LABEL,
    parse=checked(LABEL.parse, lambda label: not _is_taken(str(label))),
    allowed=f"{LABEL.allowed}; or {_NONE}",
    why=lambda text: "another label of these series has that name" if _is_taken(text) else "",
)

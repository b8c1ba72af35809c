"""dcgm-exporter's flags and variables in one table: what each becomes here, and how its command line is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PREFIX = "DCGM_EXPORTER_"
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
    """The text that asks for nothing, beside the usual ones."""

    @property
    def names(self) -> tuple[str, ...]:
        """As they are written: ``-c``, ``--collect-interval``, ``DCGM_EXPORTER_INTERVAL``."""
        return (*self.shorts, *((self.flag,) if self.flag else ()), self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A setting that somebody wrote: ``origin`` is the name that was written, ``text`` its value."""

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
    return PREFIX + name.upper().replace("-", "_")


EXTRA_RESOURCES = _own("nvidia-resource-names", "gpu-resources", env="NVIDIA_RESOURCE_NAMES", form="list")
POD_LABELS = _own("kubernetes-enable-pod-labels", "kube-metadata", form="switch", turns="on")
LABEL_PATTERNS = _own("kubernetes-pod-label-allowlist-regex", "pod-labels", form="list")
JOB_MAPPING = _own("hpc-job-mapping-dir", "job-mapping-dir", env="DCGM_HPC_JOB_MAPPING_DIR")
_IN_STEP = "says nothing without the switch it goes with"

TABLE: tuple[Setting, ...] = (
    _own("collectors", "collectors", "-f"),
    _none("configmap-data", "mount the ConfigMap and name its file with --collectors", "-m"),
    _none("config-file", "a file of dcgm-exporter's: name its CSV with --collectors; --config is this agent's"),
    _own("address", "listen", "-a", env=f"{PREFIX}LISTEN"),
    _own("collect-interval", "sample-interval", "-c", env=f"{PREFIX}INTERVAL", form="milliseconds"),
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
    _none("devices", "every GPU and instance is measured", "-d", env=f"{PREFIX}DEVICES_STR", unset="f"),
    _none("switch-devices", "NVSwitches are not measured", "-s", env=f"{PREFIX}OTHER_DEVICES_STR", unset="f"),
    _none("cpu-devices", "CPUs are not measured", "-p", env=f"{PREFIX}CPU_DEVICES_STR", unset="f"),
    _own("use-old-namespace", "dcgm-old-labels", "-o", form="switch"),
    _own("no-hostname", "hostname-label", "-n", form="switch", turns="none"),
    _own("replace-blanks-in-model-name", "dcgm-model-hyphens", "--rbmn", form="switch"),
    _own("xid-count-window-size", "xid-count-window", "-x", form="milliseconds"),
    _own("clock-events-count-window-size", "clock-events-window", form="milliseconds"),
    _own("web-config-file", "web-config"),
    _none("web-systemd-socket", "give an address with --listen", env=f"{PREFIX}SYSTEMD_SOCKET", form="switch"),
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
    _none("fake-gpus", "--simulate demo shows a whole node", env=f"{PREFIX}USE_FAKE_GPUS", form="switch"),
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


def take(words: Sequence[str], ours: frozenset[str]) -> tuple[list[str], list[Given], list[str]]:
    """Take dcgm-exporter's flags out of a command line: what is left, what was given, problems of one line each.

    Read as Go reads them: a long one has one hyphen or two; a switch stands alone or has ``=true`` or ``=false``; the
    value of another follows it, or its ``=``. A flag of ours that has the same name is left, where it has two hyphens.

    Args:
        words: Of the command line, without the command.
        ours: Names of our own flags, without hyphens.
    """
    rest: list[str] = []
    given: list[Given] = []
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
        given.append(Given(setting=setting, origin=origin, text=text))
    return rest, given, problems


def _setting(word: str) -> Setting | None:
    name = word.partition("=")[0]
    return _BY_FLAG.get(name) or (_BY_FLAG.get(f"-{name}") if len(name) > _SHORT else None)

"""Turns what was set for dcgm-exporter into this agent's options, so that its DaemonSet can be switched over."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.attribution import exported_labels
from exporter.config import dcgm_flags
from exporter.config.dcgm_flags import Given
from exporter.config.kinds import format_duration

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
    environ: Mapping[str, str], flags: Sequence[Given] = (), ours: frozenset[str] = frozenset()
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
        if given.setting.key not in ours or given.setting is dcgm_flags.EXTRA_RESOURCES:
            _translate_one(given, done)
    if "workload-manager" not in ours:
        _settle_manager(settings, done)
    if "pod-labels" not in ours and ours | done.values.keys() >= {"kube-metadata"}:
        _tell_labels(settings, done)
    _tell_others(settings, environ, done)
    return done


def image_file_warning(path: str) -> str:
    """Why a collectors file need not be there; empty where it is there, or must be."""
    if Path(path) not in _ITS_FILES or Path(path).exists():
        return ""
    return f"collectors: {path} is in dcgm-exporter's image only; its default set, which is built in, is used"


def _settled(environ: Mapping[str, str], flags: Sequence[Given]) -> list[Given]:
    """What counts of each setting, in the order of the table: of its flags the last, or all of a list."""
    settled: list[Given] = []
    for setting in dcgm_flags.TABLE:
        own = [given for given in flags if given.setting is setting]
        if not own and environ.get(setting.env):
            own = [Given(setting=setting, origin=setting.env, text=environ[setting.env])]
        if own:
            text = ",".join(given.text for given in own) if setting.form == "list" else own[-1].text
            settled.append(Given(setting=setting, origin=own[-1].origin, text=text))
    return settled


def _translate_one(given: Given, done: Translation) -> None:
    setting, text = given.setting, given.text
    if setting is dcgm_flags.EXTRA_RESOURCES:
        done.resources.append((given.origin, text))
    elif setting is dcgm_flags.LABEL_PATTERNS:
        return  # only with the switch that goes with it
    elif setting.turns:
        if _switch(text) == "on":
            done.values[setting.key] = (given.origin, setting.turns)
        elif _switch(text) != "off":
            done.values[setting.key] = (given.origin, text)
    elif setting.key:
        done.values[setting.key] = (given.origin, _text(given, done.warnings))


def _text(given: Given, warnings: list[str]) -> str:
    if given.setting.form == "milliseconds":
        return _milliseconds(given, warnings)
    return _switch(given.text) if given.setting.form == "switch" else given.text


def _switch(text: str) -> str:
    if text in _GO_TRUE:
        return "on"
    return "off" if text in _GO_FALSE else text


def _milliseconds(given: Given, warnings: list[str]) -> str:
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


def _settle_manager(settings: Iterable[Given], done: Translation) -> None:
    """Jobs where it maps jobs and no pods; and without pods there is nothing to ask their API for."""
    kubernetes = done.values.get("attribution", ("", ""))[1]
    job_mapping = next((given for given in settings if given.setting is dcgm_flags.JOB_MAPPING), None)
    if job_mapping and kubernetes != "on":
        done.values["workload-manager"] = (job_mapping.origin, "slurm")
        done.values.pop("attribution", None)  # which is the kubelet's there, and the jobs' here
    if kubernetes == "off" or "workload-manager" in done.values:
        done.values.pop("kube-metadata", None)


def _tell_labels(settings: Iterable[Given], done: Translation) -> None:
    """Pod labels are asked for by pattern there, and by name here."""
    asked = next((given for given in settings if given.setting is dcgm_flags.POD_LABELS), None)
    if asked is None or _switch(asked.text) != "on":
        return
    patterns = next((given for given in settings if given.setting is dcgm_flags.LABEL_PATTERNS), None)
    keys, unclear = _label_keys(patterns.text if patterns else "")
    if patterns and keys:
        done.values["pod-labels"] = (patterns.origin, ",".join(keys[: exported_labels.MAX_KEYS]))
        unclear += keys[exported_labels.MAX_KEYS :]
    left_out = f"; left out: {', '.join(unclear)}" if unclear else ""
    done.warnings.append(
        f"{asked.origin}: labels are shown once, on gpu_pod_info, and only those that --pod-labels names, at most"
        f" {exported_labels.MAX_KEYS}{left_out}"
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


def _tell_others(settings: Iterable[Given], environ: Mapping[str, str], done: Translation) -> None:
    """One line that names what has no equivalent, and what to do instead."""
    told = [
        f"{given.origin} ({given.setting.instead})"
        for given in settings
        if given.setting.instead and given.text != given.setting.unset and given.text.lower() not in _SAYS_NOTHING
    ]
    known = {setting.env for setting in dcgm_flags.TABLE}
    told += [
        name
        for name, value in sorted(environ.items())
        if name.startswith(dcgm_flags.PREFIX)
        and name not in known
        and value.lower() not in _SAYS_NOTHING
        and not SERVICE_LINK.fullmatch(name.removeprefix(dcgm_flags.PREFIX[:-1]))
    ]
    if told:
        done.warnings.append(f"of dcgm-exporter, without an equivalent here, not used: {', '.join(told)}")

"""dcgm-exporter's environment variables, read as this agent's options so that its DaemonSet can be switched over."""

import re
from collections.abc import Mapping
from pathlib import Path

from exporter.config.kinds import format_duration
from exporter.config.options import DCGM_ENV_PREFIX, OPTIONS

EXTRA_RESOURCES_ENV = "NVIDIA_RESOURCE_NAMES"

# Kubernetes puts variables for every Service into its namespace's pods; one named dcgm-exporter looks like our prefix.
SERVICE_LINK = re.compile(r".*?(^|_)(SERVICE_(HOST|PORT(_.+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
# Its image's own files: ours has the same default set built in, so a missing one is no mistake.
_ITS_FILES = Path("/etc/dcgm-exporter")
_GO_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_GO_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_SAYS_NOTHING = frozenset({"", "0", "false", "none"})
_MIN_MILLISECONDS, _MAX_MILLISECONDS, _LIKELY_SECONDS = 200, 300_000, 1000


def translate(environ: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Option key to (variable, text in this agent's form), and warnings, one line each.

    A text that cannot be translated is passed on as it is, so that the option's own check refuses it.
    """
    values: dict[str, tuple[str, str]] = {}
    warnings: list[str] = []
    for option in OPTIONS:
        variable = option.dcgm_env
        if variable is None or not environ.get(variable):
            continue
        text: str | None = environ[variable]
        if option.key == "sample-interval":
            text = _interval(environ[variable], warnings)
        elif option.key in {"xid-count-window", "clock-events-window"}:
            text = f"{text}ms" if environ[variable].isdecimal() else text
        elif option.key in {"attribution", "dcgm-pod-uid"}:
            text = _switch(environ[variable])
        elif option.key == "collectors":
            text = _collectors(environ[variable], warnings)
        if text is not None:
            values[option.key] = (variable, text)
    known = {option.dcgm_env for option in OPTIONS}
    others = [
        name
        for name, value in sorted(environ.items())
        if name.startswith(DCGM_ENV_PREFIX)
        and name not in known
        and value.lower() not in _SAYS_NOTHING
        and not SERVICE_LINK.fullmatch(name.removeprefix("DCGM_EXPORTER"))
    ]
    if others:
        warnings.append(f"{', '.join(others)}: of dcgm-exporter; no equivalent here, not used")
    return values, warnings


def _interval(text: str, warnings: list[str]) -> str:
    if not (text.isascii() and text.isdecimal()):
        return text
    milliseconds = int(text)
    used = min(max(milliseconds, _MIN_MILLISECONDS), _MAX_MILLISECONDS)
    if milliseconds < _LIKELY_SECONDS:
        warnings.append(
            f"DCGM_EXPORTER_INTERVAL: {milliseconds} is in milliseconds; sampling every {format_duration(used / 1000)};"
            f" {milliseconds}000 would be {milliseconds} s"
        )
    elif milliseconds > _MAX_MILLISECONDS:
        warnings.append(f"DCGM_EXPORTER_INTERVAL: {milliseconds} ms is above the maximum; sampling every 5m")
    return f"{used}ms"


def _switch(text: str) -> str:
    if text in _GO_TRUE:
        return "on"
    return "off" if text in _GO_FALSE else text


def _collectors(text: str, warnings: list[str]) -> str | None:
    path = Path(text)
    if path.parent == _ITS_FILES and not path.exists():
        warnings.append(f"DCGM_EXPORTER_COLLECTORS: {text} is in dcgm-exporter's image only; its default set is used")
        return None
    return text

"""Resolves the agent's configuration from flags, environment, dcgm-exporter's settings, file and defaults."""

import json
import logging
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from exporter.attribution import owner_rules
from exporter.config import types, yaml_file
from exporter.config.dcgm_flags import ITS_FILES, GivenFlag, translate, unknown_names
from exporter.config.options import BY_KEY, ENV_PREFIX, OPTIONS, AgentConfig, Option, groups_of
from exporter.config.yaml_file import FileValue, Raw
from exporter.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from exporter.metrics.collectors_file import Collectors

CONFIG_ENV = ENV_PREFIX + "CONFIG"


_Values = dict[str, Any]
"""Values by option key, each of its option's type; ``None`` is unset or refused."""


def settle(
    options: Sequence[Option],
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    problems: list[str],
    foreign: Mapping[str, tuple[str, str]] | None = None,
) -> tuple[_Values, set[str]]:
    """Return the values of all options of a table, and the keys of the given ones.

    Args:
        options: Table of options.
        flags: Texts by option key, with hyphens or underscores; ``None`` means not given. ``config`` is the file.
        environ: The process environment.
        problems: Receives the mistakes, one line each.
        foreign: Name and text of another program's equivalent flag or variable, by option key.
    """
    given = {key.replace("_", "-"): str(value) for key, value in flags.items() if value is not None}
    from_file: dict[str, FileValue] = {}
    if file := given.get("config") or environ.get(CONFIG_ENV):
        from_file, found = yaml_file.read(Path(file), [option.key for option in options])
        problems += found
    values: _Values = {}
    stated: set[str] = set()
    for option in options:
        candidates: list[tuple[str, Raw]] = []
        if option.key in given:
            candidates.append((option.flag, given[option.key]))
        if environ.get(option.env):
            candidates.append((option.env, environ[option.env]))
        if foreign and option.key in foreign and not candidates:
            candidates.append(foreign[option.key])
        if option.key in from_file:
            candidates.append(from_file[option.key])
        values[option.key] = _settle_one(option, candidates, problems)
        stated.update(option.key for _ in candidates)
    return values, stated


def _settle_one(option: Option, candidates: list[tuple[str, Raw]], problems: list[str]) -> object:
    """Return the value of the first candidate; all candidates are checked, so that no mistake stays hidden."""
    settled: list[object] = []
    for origin, raw in candidates:
        try:
            settled.append(option.parse(raw))
        except ValueError as error:
            settled.append(None)
            problems.append(option.refusal(origin, error))
    if settled:
        return settled[0]
    return None if option.default is None else option.parse(option.default)


def unknown_variables(options: Sequence[Option], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about unknown variables; Kubernetes and other programs also set variables with the prefix."""
    known = {option.env for option in options} | {CONFIG_ENV}
    for name in unknown_names(environ, ENV_PREFIX, known):
        yield f"{name}: unknown variable, not used{did_you_mean(name, known, cutoff=0.8)}"


EXPORTED_KEYS = ("pod-labels", "pod-annotations")
MOST_KEYS = {**dict.fromkeys(EXPORTED_KEYS, 10), "cost-labels": 8}
"""Maximum number of keys, by option that lists keys."""


def load_agent(
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    dcgm_flags: Sequence[GivenFlag] = (),
    check_paths: bool = True,
    extra: tuple[str, ...] = (),
) -> AgentConfig:
    """Return the agent's settled configuration.

    Args:
        flags: Texts by option key, with hyphens or underscores; ``None`` means not given. ``config`` is the file.
        environ: The process environment.
        dcgm_flags: Flags of dcgm-exporter; they override its variables, and options of this agent override both.
        check_paths: Whether to check the named files, directories and sockets as well.
        extra: Problems that the caller found, which are reported together with those found here.

    Raises:
        ConfigError: Lists all mistakes, one line each.
    """
    problems = list(extra)
    theirs, warnings = translate(environ, dcgm_flags, _stated(flags, environ))
    more_resources = theirs.pop("gpu-resources", None)
    values, stated = settle(OPTIONS, flags, environ, problems, theirs)
    if values["simulate"] and values["workload-manager"] == "kubernetes" and "kube-metadata" not in stated:
        values["kube-metadata"] = True  # a simulated node has an API server that needs no rights
    if values["workload-manager"] != "kubernetes" and "kube-metadata" in theirs:
        values["kube-metadata"] = False  # its flags configure pods, which this manager does not have
    if values["simulate"] and "lock-dir" not in stated:
        values["lock-dir"] = None  # many simulated nodes of one name may run on one machine
    if more_resources:
        _add_resources(values, *more_resources, problems)
    problems += _contradictions(values)
    warnings += [*_adjusted(values), *unknown_variables(OPTIONS, environ), *_without_effect(values)]
    if check_paths:
        problems += _path_problems(values)
    if problems:
        raise ConfigError(*problems)
    values["node-name"] = values["node-name"] or socket.gethostname()
    if values["hostname-label"] is None:
        values["hostname-label"] = "hostname" if values["dcgm-names"] == "4.9" else "Hostname"
    return AgentConfig(**groups_of(AgentConfig, values), warnings=tuple(warnings))


def _stated(flags: Mapping[str, object], environ: Mapping[str, str]) -> frozenset[str]:
    given = {key.replace("_", "-") for key, value in flags.items() if value is not None}
    return frozenset(option.key for option in OPTIONS if option.key in given or environ.get(option.env))


def _add_resources(values: _Values, origin: str, text: str, problems: list[str]) -> None:
    option, names = BY_KEY["gpu-resources"], text.strip(", ")
    if names and values["gpu-resources"] is not None:
        try:
            values["gpu-resources"] = tuple(
                dict.fromkeys((*values["gpu-resources"], *cast("Any", option.parse(names))))
            )
        except ValueError as error:
            problems.append(option.refusal(origin, error))


def _adjusted(values: _Values) -> Iterator[str]:
    """Set the collectors and the DCGM engine to the effective values; yield warnings about unused values."""
    path = values["collectors"]
    if path in ITS_FILES and not path.exists():
        values["collectors"] = None
        yield f"collectors: {path} is in dcgm-exporter's image only; its default set, which is built in, is used"
    if values["source"] == "dcgm":
        values["dcgm-address"] = values["dcgm-address"] or types.DEFAULT_ADDRESS
    elif values["source"] == "nvml" and values["dcgm-address"]:
        values["dcgm-address"] = None
        yield "dcgm-address: with source nvml no engine is asked; not used; source auto reads both"


def _contradictions(values: _Values) -> Iterator[str]:
    """Yield mistakes in combinations of valid values."""
    expiry, interval = values["attribution-expiry"], values["kubelet-interval"]
    if expiry is not None and interval is not None and expiry < 2 * interval:
        yield (
            f"attribution-expiry: {expiry:g}s is less than twice the kubelet-interval, {interval:g}s, so that"
            f" allocation would be unknown between two answers; allowed: {2 * interval:g}s or more"
        )
    manager = values["workload-manager"]
    if values["kube-metadata"] and manager not in {"kubernetes", None}:
        yield (
            f"kube-metadata: is on, and the workload-manager is {manager}: Kubernetes does not know its jobs;"
            " allowed: one of the two"
        )
    for key, most in MOST_KEYS.items():
        if len(values[key] or ()) > most:
            yield f"{key}: names {len(values[key])} keys; allowed: at most {most}"


def _without_effect(values: _Values) -> Iterator[str]:
    """Yield warnings about options that have no effect because another option is off."""
    if values["job-mapping-dir"] and values["workload-manager"] != "slurm":
        yield "job-mapping-dir: read only with workload-manager slurm; not used"
    if values["kube-metadata"] and values["attribution"] is False:
        yield "kube-metadata: with attribution off there are no holders; not used"
    if not values["kube-metadata"]:
        yield from (f"{key}: needs kube-metadata on; not used" for key in ("kubeconfig", *MOST_KEYS) if values[key])
        return
    for key in EXPORTED_KEYS:
        for name in filter(owner_rules.is_never_shown, values[key] or ()):
            yield f"{key}: {name} is never shown: another for every pod, or no label of its makers; not used"


COLLECTOR_PRESETS = ("wide",)
"""Collectors files in the package; the name is accepted instead of a path."""


def _path_problems(values: _Values) -> Iterator[str]:
    """Yield the problems of the named paths, one line each.

    A missing path that may appear later, such as the socket of a kubelet that is not up, is no problem.
    """
    for key in ("collectors", "price-book", "web-config"):
        yield from mistakes_in(key, values[key])
    if values["state-dir"] and (problem := state_dir_problem(values["state-dir"])):
        yield problem
    if values["simulate"]:
        return
    if values["attribution"] and values["kubelet-socket"]:
        yield from _kubelet_socket(Path(values["kubelet-socket"]))
    if values["kube-metadata"] and values["kubeconfig"] and not os.access(values["kubeconfig"], os.R_OK):
        yield f"kubeconfig: cannot read {values['kubeconfig']}; allowed: a kubeconfig file, or none in a pod"
    folders = {"proc-root": "where the host's /proc is mounted"}
    if values["workload-manager"] == "slurm":
        folders["job-mapping-dir"] = "where Slurm's prolog writes it"
    for key, allowed in folders.items():
        if values[key] and not os.path.isdir(values[key]):  # noqa: PTH112 - Path's method raises without permission
            yield f"{key}: {values[key]} is not a directory; allowed: {allowed}"


def read_collectors(path: Path | None, names: str = "legacy") -> "Collectors":
    """Return the collectors of a file in dcgm-exporter's format, of a preset, or of the default set.

    The default set has ``legacy`` or ``4.9`` names and units; a file has its own. A file with the name of a preset
    needs an absolute path.

    Raises:
        ConfigError: Lists all mistakes of the file, each with its line, or the file cannot be read.
    """
    from exporter.metrics import collectors_file  # noqa: PLC0415 - keeps `--help` fast

    if path is None:
        return collectors_file.default(names)
    if str(path) in COLLECTOR_PRESETS:
        text = files("exporter.metrics").joinpath(f"collectors-{path}.csv").read_text(encoding="utf-8")
        return collectors_file.parse(text, f"preset {path}")
    fix = f"allowed: a readable CSV file, or a preset: {', '.join(COLLECTOR_PRESETS)}"
    text = yaml_file.read_text(path, "collectors", "a collectors file", fix)
    return collectors_file.parse(text, str(path))


def mistakes_in(key: str, path: Path | None) -> tuple[str, ...]:
    """Return the mistakes in a file of settings; empty without a file."""
    if path is None:
        return ()
    from exporter.config import price_book, web_config  # noqa: PLC0415 - keeps `--help` fast

    load: Mapping[str, Callable[[Path], object]] = {
        "collectors": read_collectors,
        "price-book": price_book.load,
        "web-config": web_config.load,
    }
    try:
        load[key](path)
    except ConfigError as error:
        return error.problems
    return ()


def state_dir_problem(path: Path) -> str:
    """Return why a directory cannot store the state, in one line; empty if it can."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"state-dir: {path}: {error.strerror}; allowed: a directory that is there and can be written"
    if not stat.S_ISDIR(mode):
        return f"state-dir: {path} is not a directory; allowed: a directory that can be written"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return ""  # a disk with errors becomes read-only: the agent continues in memory and reports it
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return f"state-dir: uid {os.geteuid()} may not write {path}; change its owner or its mode"
    return ""


def _kubelet_socket(path: Path) -> Iterator[str]:
    """Yield why a path can never be the kubelet's socket; nothing if it is one, or may become one later."""
    allowed = "allowed: the kubelet's pod-resources socket"
    fix = "run as uid 0, or --attribution off"
    try:
        mode = path.stat().st_mode
    except PermissionError:
        yield f"kubelet-socket: no permission to reach {path} as uid {os.geteuid()}; {fix}"
    except NotADirectoryError:
        yield f"kubelet-socket: a part of {path} is not a directory; {allowed}"
    except OSError:
        return
    else:
        if not stat.S_ISSOCK(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "a file"
            yield f"kubelet-socket: {path} is {kind}, not a socket; {allowed}"
        elif not os.access(path, os.W_OK):
            yield f"kubelet-socket: uid {os.geteuid()} may not connect to {path}; {fix}"


_PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LOGIN = re.compile(r"(?:(?<=://)|(?<=http:/)(?!/)|(?<=https:/)(?!/))[^\s\"']{1,300}@")
"""User and password of an address. An address given for a file has one slash."""


def configure(log_format: Literal["text", "json"], level: str, stream: TextIO | None = None) -> None:
    """Send events of ``level`` (``debug`` to ``error``) and above to ``stream``, by default standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(EventFormatter(as_json=log_format == "json"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def redacted(text: str) -> str:
    """Return a text for display: ``printable``, without users and passwords in addresses."""
    return printable(_LOGIN.sub("...@", text))


def printable(text: str) -> str:
    """Return a text as one line without terminal control: characters that are not printable are escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


class EventFormatter(logging.Formatter):
    """Formats an event as ``TIME LEVEL part: message key=value``, or as a JSON object. Keys are passed as ``extra``.

    Line breaks and other characters that are not printable are escaped.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the event as one line."""
        at = datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        level, part = record.levelname.lower(), record.name.removeprefix("exporter.")
        more = {key: value for key, value in vars(record).items() if key not in _PLAIN_ATTRIBUTES}
        if record.exc_info:
            more["exception"] = self.formatException(record.exc_info)
        if not self._as_json:
            pairs = "".join(f" {key}={value}" for key, value in more.items())
            return redacted(f"{at} {level.upper():7} {part}: {record.getMessage()}{pairs}")
        event = {"time": at, "level": level, "part": part, "message": record.getMessage(), **more}
        event |= {key: _LOGIN.sub("...@", value) for key, value in event.items() if isinstance(value, str)}
        return _LOGIN.sub("...@", json.dumps(event, default=str))

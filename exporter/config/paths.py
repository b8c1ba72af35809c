"""Checks files, directories and sockets that a configuration names, before anything starts."""

import os
import stat
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.config import yaml_file
from exporter.errors import ConfigError

if TYPE_CHECKING:
    from exporter.metrics.collectors_file import Collectors

COLLECTOR_PRESETS = ("wide",)
"""Collectors files that the package has, by the name that stands for a path."""


def problems(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the named paths, one line each. ``values`` is by option key; ``None`` is unset or refused.

    What may still come - a kubelet that is not up yet - is no problem; what cannot recover is.
    """
    found = [problem for key in ("collectors", "price-book", "web-config") for problem in _mistakes(key, values[key])]
    if values["state-dir"]:
        found += _state_dir(values["state-dir"])
    if values["simulate"]:
        return found
    if values["attribution"] and values["kubelet-socket"]:
        problem = kubelet_socket_problem(Path(values["kubelet-socket"]))
        if problem:
            found.append(problem)
    found += _whose(values)
    if values["proc-root"] and not os.path.isdir(values["proc-root"]):  # noqa: PTH112 - Path's raises where it may not look
        found.append(f"proc-root: {values['proc-root']} is not a directory; allowed: where the host's /proc is mounted")
    return found


def _whose(values: Mapping[str, Any]) -> list[str]:
    """What tells whose a device is, besides the kubelet."""
    found: list[str] = []
    if values["kube-metadata"] and values["kubeconfig"] and not os.access(values["kubeconfig"], os.R_OK):
        found.append(f"kubeconfig: cannot read {values['kubeconfig']}; allowed: a kubeconfig file, or none in a pod")
    if values["job-mapping-dir"] and values["workload-manager"] == "slurm":
        directory = values["job-mapping-dir"]
        if not os.path.isdir(directory):  # noqa: PTH112 - as below
            found.append(f"job-mapping-dir: {directory} is not a directory; allowed: where Slurm's prolog writes it")
    return found


def read_collectors(path: Path | None) -> "Collectors":
    """Return the collectors of a file in dcgm-exporter's format, of a preset by its name, or the default set.

    A file that has a preset's name is named by its absolute path.

    Raises:
        ConfigError: With all mistakes of the file, each with its line, or that it cannot be read.
    """
    from exporter.metrics import collectors_file  # noqa: PLC0415 - keeps `--help` fast

    if path is None:
        return collectors_file.DEFAULT
    if str(path) in COLLECTOR_PRESETS:
        text = files("exporter.metrics").joinpath(f"collectors-{path}.csv").read_text(encoding="utf-8")
        return collectors_file.parse(text, f"preset {path}")
    fix = f"allowed: a readable CSV file, or a preset: {', '.join(COLLECTOR_PRESETS)}"
    text = yaml_file.read_text(path, "collectors", "a collectors file", fix)
    return collectors_file.parse(text, str(path))


def _mistakes(key: str, path: Path | None) -> tuple[str, ...]:
    """Return the mistakes in a file of settings; none where no file is named."""
    if path is None:
        return ()
    from exporter.config import price_book, web_config  # noqa: PLC0415 - keeps `--help` fast

    load = {"collectors": read_collectors, "price-book": price_book.load, "web-config": web_config.load}[key]
    try:
        load(path)
    except ConfigError as error:
        return error.problems
    return ()


def _state_dir(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return [f"state-dir: {path}: {error.strerror}; allowed: a directory that is there and can be written"]
    if not stat.S_ISDIR(mode):
        return [f"state-dir: {path} is not a directory; allowed: a directory that can be written"]
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return []  # a disk with errors turns read-only by itself: the agent goes on in memory and says so
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return [f"state-dir: {path} cannot be read and written by uid {os.geteuid()}; change its owner or its mode"]
    return []


def kubelet_socket_problem(path: Path) -> str:
    """Why this path can never be the kubelet's socket, in one line; empty where it is one or may still become one."""
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return (
            f"kubelet-socket: no permission to reach {path} as uid {os.geteuid()}; run as uid 0, or --attribution off"
        )
    except NotADirectoryError:
        return f"kubelet-socket: a part of {path} is not a directory; allowed: the kubelet's pod-resources socket"
    except OSError:
        return ""
    if stat.S_ISSOCK(mode):
        if os.access(path, os.W_OK):
            return ""
        return f"kubelet-socket: uid {os.geteuid()} may not connect to {path}; run as uid 0, or --attribution off"
    kind = "a directory" if stat.S_ISDIR(mode) else "a file"
    return f"kubelet-socket: {path} is {kind}, not a socket; allowed: the kubelet's pod-resources socket"

"""Options of every command that queries Prometheus: address, credentials, TLS and limits."""

# ruff: noqa: RUF009 - the calls in the class make its fields.

import argparse
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.config import types
from exporter.config.options import Option, filled, options_in
from exporter.config.resolve import CONFIG_ENV, settle
from exporter.config.types import OptionType
from exporter.errors import ConfigError

GROUP = "Prometheus"
_ADDRESS = "an address, as http://prometheus:9090 or https://mimir/prometheus"
_OUR_HEADERS = frozenset({"accept", "accept-encoding", "connection", "content-length", "content-type", "host"})
_TOKEN_CHARACTERS = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def _parse_header(text: str) -> tuple[str, str]:
    name, separator, value = text.strip().partition("=")
    shown = name if separator and name.isprintable() else "a text without ="  # the value may be a secret
    if not separator or not name or not _TOKEN_CHARACTERS.issuperset(name) or name.lower() in _OUR_HEADERS:
        raise ValueError(shown)
    if not value or not value.isprintable() or not value.isascii():
        raise ValueError(f"{shown}=...")
    return name, value


def _parse_url(text: str) -> str:
    if "@" in text.partition("//")[2].partition("/")[0]:
        why = (
            "a user or a password in it would be shown by logs and process lists; give --prometheus-username and"
            " --prometheus-password-file instead"
        )
        raise ValueError("...", why)
    parts = types.http_parts(text)
    if parts.path.endswith(("/api/v1", "/query", "/graph", "/targets")):
        raise ValueError(text, "this is the path of a page or of the API; leave it away: /api/v1 is added")
    return parts.geturl()


URL = OptionType(_parse_url, "an address", f"{_ADDRESS}, IPv6 in brackets, without ? and #", "URL")
HEADERS = OptionType(
    _parse_header,
    "a header",
    "NAME=VALUE of headers that HTTP itself does not need, separated by commas",
    "NAME=VALUE,...",
    is_list=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings:
    """Access to a Prometheus or a compatible server. Files are read again at each use, so that they can rotate."""

    url: str = Option("prometheus", URL, unset="", default_note="none").setting(
        "Address of Prometheus, Thanos, Mimir or VictoriaMetrics, with its path: http://host:9090, "
        "https://mimir/prometheus, http://vmselect:8481/select/0/prometheus."
    )
    token_file: Path | None = Option("prometheus-token-file", types.PATH, default_note="no token").setting(
        "File with a bearer token; read at each use."
    )
    username: str = Option("prometheus-username", types.NAME, unset="", default_note="no basic authentication").setting(
        "User of basic authentication."
    )
    password_file: Path | None = Option("prometheus-password-file", types.PATH, default_note="none").setting(
        "File with that user's password; read at each use."
    )
    ca_file: Path | None = Option("prometheus-ca-file", types.PATH, default_note="the system's").setting(
        "PEM file of the certificate authorities of the server, instead of the system's."
    )
    cert_file: Path | None = Option("prometheus-cert-file", types.PATH, default_note="none").setting(
        "PEM file of a client certificate, for a server that requires one."
    )
    key_file: Path | None = Option("prometheus-key-file", types.PATH, default_note="in the certificate's file").setting(
        "PEM file of the client certificate's key, without a passphrase."
    )
    skip_verify: bool = Option("prometheus-skip-verify", types.SWITCH, "off").setting(
        "Do not check the server's certificate. A man in the middle can then read the token and change figures."
    )
    headers: tuple[tuple[str, str], ...] = Option("prometheus-headers", HEADERS, default_note="none").setting(
        "More headers, such as the tenant of Mimir or Cortex: X-Scope-OrgID=team-a."
    )
    timeout_seconds: float = Option("prometheus-timeout", types.duration(1, 3600), "60s").setting(
        "Time limit of one query; the server receives it and stops, too."
    )
    concurrency: int = Option("prometheus-concurrency", types.count(1, 64), "4").setting("Concurrent queries.")
    retries: int = Option("prometheus-retries", types.count(0, 20), "4").setting(
        "Retries of a query after a timeout, an overload or a broken connection."
    )
    cluster_label: str = Option("cluster-label", types.LABEL, "cluster").setting(
        "Label that distinguishes the clusters of one Prometheus."
    )


PROMETHEUS_OPTIONS = options_in(PrometheusSettings, GROUP)
ADDRESS = next(option for option in PROMETHEUS_OPTIONS if option.key == "prometheus")
"""The option with the address of Prometheus."""


def add_prometheus_options(parser: argparse.ArgumentParser) -> None:
    """Add these options to a command, as a separate group."""
    listed = parser.add_argument_group(GROUP)
    for option in PROMETHEUS_OPTIONS:
        listed.add_argument(option.flag, metavar=option.kind.metavar, help=option.usage())


def prometheus_settings(namespace: argparse.Namespace, environ: Mapping[str, str]) -> PrometheusSettings:
    """Return the settings from flags, then from variables GPU_COST_EXPORTER_*.

    Raises:
        ConfigError: Lists all mistakes, including a missing address.
    """
    problems: list[str] = []
    flags = {key: value for key, value in vars(namespace).items() if key != "config"}
    variables = {name: value for name, value in environ.items() if name != CONFIG_ENV}
    values, given = settle(PROMETHEUS_OPTIONS, flags, variables, problems)
    problems += prometheus_problems(values, given)
    if problems:
        raise ConfigError(*problems)
    return filled(PrometheusSettings, values)


def prometheus_problems(values: Mapping[str, Any], given: Collection[str]) -> list[str]:
    """Return the problems of combined values, one line each.

    Args:
        values: Values by option key, as returned by ``settle``; ``None`` is unset or refused.
        given: Keys of the options that are given.
    """
    found = [*_together(values), *credential_problems("prometheus-", values)]
    if ADDRESS.key in given or found:
        return found
    return [f"prometheus: not given; give {_ADDRESS}, by --prometheus or GPU_COST_EXPORTER_PROMETHEUS"]


def _together(values: Mapping[str, Any]) -> list[str]:
    """Return settings that contradict each other, or that have no effect alone."""
    found: list[str] = []
    token, user, password = (values[f"prometheus-{key}"] for key in ("token-file", "username", "password-file"))
    if token and (user or password):
        found.append("prometheus-token-file: is given with a user's name or password; allowed: one way to get in")
    names = [name.lower() for name, _ in values["prometheus-headers"] or ()]
    if "authorization" in names:
        found.append(
            "prometheus-headers: Authorization would be seen in process lists; give prometheus-token-file, or"
            " prometheus-username and prometheus-password-file"
        )
    found += [f"prometheus-headers: {name} is given twice" for name in sorted({n for n in names if names.count(n) > 1})]
    return found


def credential_problems(prefix: str, values: Mapping[str, Any]) -> list[str]:
    """Return the problems of the files for access to a server, such as password and certificate, one line each.

    Args:
        prefix: Beginning of the names of the options.
        values: Values by name of the option; ``None`` or empty is unset.
    """
    found: list[str] = []
    user, password, certificate, key = (
        values[f"{prefix}{name}"] for name in ("username", "password-file", "cert-file", "key-file")
    )
    if bool(user) != bool(password):
        found.append(f"{prefix}username: needs {prefix}password-file, and the other way round; give both")
    if user and ":" in user:
        found.append(f"{prefix}username: no user's name has a colon; give the name alone")
    if key and not certificate:
        found.append(f"{prefix}key-file: does nothing without {prefix}cert-file; give both")
    files = (
        (name, path) for name, path in values.items() if name.startswith(prefix) and name.endswith("-file") and path
    )
    return found + [problem for name, path in files for problem in _file_problem(name, path)]


def _file_problem(key: str, path: Path) -> list[str]:
    if path.is_dir():
        return [f"{key}: {path} is a directory; allowed: a file"]
    if not os.access(path, os.R_OK):
        why = "may not be read" if path.exists() else "is not there"
        return [f"{key}: {path} {why}; allowed: a readable file"]
    return []

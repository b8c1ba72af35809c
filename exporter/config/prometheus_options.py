"""Options of every command that queries Prometheus: address, credentials, TLS and limits."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from exporter.config import types
from exporter.config.options import Option
from exporter.config.resolve import CONFIG_ENV, settle
from exporter.config.types import OptionType
from exporter.errors import ConfigError

GROUP = "Prometheus"
_ADDRESS = "an address, as http://prometheus:9090 or https://mimir/prometheus"
_OUR_HEADERS = frozenset({"accept", "accept-encoding", "connection", "content-length", "content-type", "host"})
_TOKEN_CHARACTERS = frozenset("!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusSettings:
    """How to ask one Prometheus, or what speaks its API. Files are read again at each use, so that they can rotate."""

    url: str
    """Without a slash at its end; the API is at ``url`` + ``/api/v1``."""
    token_file: Path | None = None
    username: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    skip_verify: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    timeout_seconds: float = 60.0
    """For one question, its retries not counted."""
    concurrency: int = 4
    retries: int = 4
    """Attempts after the first."""
    cluster_label: str = "cluster"


def _parse_header(text: str) -> tuple[str, str]:
    name, separator, value = text.strip().partition("=")
    shown = name if separator and name.isprintable() else "a text without ="  # the value may be a secret
    if not separator or not name or not _TOKEN_CHARACTERS.issuperset(name) or name.lower() in _OUR_HEADERS:
        raise ValueError(shown)
    if not value or not value.isprintable() or not value.isascii():
        raise ValueError(f"{shown}=...")
    return name, value


# Whatever is wrong with an address is told by ``settings``, which never repeats a password that stands in it.
URL = OptionType(parse=str.strip, noun="an address", allowed=_ADDRESS, metavar="URL")
HEADERS = OptionType(
    parse=_parse_header,
    noun="a header",
    allowed="NAME=VALUE of headers that HTTP itself does not need, separated by commas",
    metavar="NAME=VALUE,...",
    is_list=True,
)

PROMETHEUS_OPTIONS: tuple[Option, ...] = (
    Option(
        key="prometheus",
        kind=URL,
        default=None,
        default_note="none",
        group=GROUP,
        help="Address of Prometheus, Thanos, Mimir or VictoriaMetrics, with its path: http://host:9090,"
        " https://mimir/prometheus, http://vmselect:8481/select/0/prometheus.",
    ),
    Option(
        key="prometheus-token-file",
        kind=types.PATH,
        default=None,
        default_note="no token",
        group=GROUP,
        help="File with a bearer token; read at each use.",
    ),
    Option(
        key="prometheus-username",
        kind=types.NAME,
        default=None,
        default_note="no basic authentication",
        group=GROUP,
        help="User of basic authentication.",
    ),
    Option(
        key="prometheus-password-file",
        kind=types.PATH,
        default=None,
        default_note="none",
        group=GROUP,
        help="File with that user's password; read at each use.",
    ),
    Option(
        key="prometheus-ca-file",
        kind=types.PATH,
        default=None,
        default_note="the system's",
        group=GROUP,
        help="PEM file of the certificate authorities of the server, instead of the system's.",
    ),
    Option(
        key="prometheus-cert-file",
        kind=types.PATH,
        default=None,
        default_note="none",
        group=GROUP,
        help="PEM file of a client certificate, for a server that requires one.",
    ),
    Option(
        key="prometheus-key-file",
        kind=types.PATH,
        default=None,
        default_note="in the certificate's file",
        group=GROUP,
        help="PEM file of the client certificate's key, without a passphrase.",
    ),
    Option(
        key="prometheus-skip-verify",
        kind=types.SWITCH,
        default="off",
        group=GROUP,
        help="Do not check the server's certificate. A man in the middle can then read the token and change figures.",
    ),
    Option(
        key="prometheus-headers",
        kind=HEADERS,
        default=None,
        default_note="none",
        group=GROUP,
        help="More headers, such as the tenant of Mimir or Cortex: X-Scope-OrgID=team-a.",
    ),
    Option(
        key="prometheus-timeout",
        kind=types.duration(1, 3600),
        default="60s",
        group=GROUP,
        help="Time limit of one query; the server receives it and stops, too.",
    ),
    Option(
        key="prometheus-concurrency",
        kind=types.count(1, 64),
        default="4",
        group=GROUP,
        help="Concurrent queries.",
    ),
    Option(
        key="prometheus-retries",
        kind=types.count(0, 20),
        default="4",
        group=GROUP,
        help="Retries of a query after a timeout, an overload or a broken connection.",
    ),
    Option(
        key="cluster-label",
        kind=types.LABEL,
        default="cluster",
        group=GROUP,
        help="Label that distinguishes the clusters of one Prometheus.",
    ),
)


def add_prometheus_options(parser: argparse.ArgumentParser) -> None:
    """Add them to a command, as a group of its own."""
    group = parser.add_argument_group(GROUP)
    for option in PROMETHEUS_OPTIONS:
        allowed = "" if option.kind.metavar.startswith("{") else f" Allowed: {option.kind.allowed}."
        default = option.default_note or option.default
        group.add_argument(
            option.flag,
            metavar=option.kind.metavar,
            help=f"{option.help}{allowed} [default: {default}]".replace("%", "%%"),
        )


def prometheus_settings(namespace: argparse.Namespace, environ: Mapping[str, str]) -> PrometheusSettings:
    """The settings that flags, then GPU_COST_EXPORTER_* variables come to.

    Raises:
        ConfigError: With all mistakes at once; also where no address is given.
    """
    problems: list[str] = []
    flags = {key: value for key, value in vars(namespace).items() if key != "config"}
    variables = {name: value for name, value in environ.items() if name != CONFIG_ENV}
    values = settle(PROMETHEUS_OPTIONS, flags, variables, problems).values
    settings = settings_of(values, problems)
    if settings is None and not problems:
        problems.append(
            f"prometheus: is not given; allowed: {_ADDRESS}, by --prometheus or GPU_COST_EXPORTER_PROMETHEUS"
        )
    if problems:
        raise ConfigError(*problems)
    assert settings is not None  # noqa: S101 - told above
    return settings


def settings_of(values: Mapping[str, Any], problems: list[str]) -> PrometheusSettings | None:
    """The settings of settled values; ``None`` where no address is given, or where a mistake was added to ``problems``.

    Args:
        values: By option key, as ``settle`` gives them; ``None`` is unset or refused.
        problems: Mistakes are added here, one line each; no password stands in them.
    """
    before = len(problems)
    problems += _together(values)
    problems += [problem for key in _FILES if values[key] for problem in _file_problem(key, Path(values[key]))]
    if not values["prometheus"]:
        return None
    problems += address_problems(values["prometheus"])
    if len(problems) > before or any(values[key] is None for key in _NEEDED):
        return None
    return PrometheusSettings(
        url=values["prometheus"].rstrip("/"),
        token_file=_path(values["prometheus-token-file"]),
        username=values["prometheus-username"] or "",
        password_file=_path(values["prometheus-password-file"]),
        ca_file=_path(values["prometheus-ca-file"]),
        cert_file=_path(values["prometheus-cert-file"]),
        key_file=_path(values["prometheus-key-file"]),
        skip_verify=values["prometheus-skip-verify"],
        headers=values["prometheus-headers"] or (),
        timeout_seconds=values["prometheus-timeout"],
        concurrency=values["prometheus-concurrency"],
        retries=values["prometheus-retries"],
        cluster_label=values["cluster-label"],
    )


_FILES = tuple(option.key for option in PROMETHEUS_OPTIONS if option.kind is types.PATH)
_NEEDED = tuple(option.key for option in PROMETHEUS_OPTIONS if option.default is not None)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def address_problems(url: str) -> list[str]:
    """What is wrong with an address; a password in it is never repeated."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return [f"prometheus: the value is no address; allowed: {_ADDRESS}, IPv6 in brackets"]
    if "@" in parts.netloc:
        problem = (
            "prometheus: the address has a user or a password in it, which logs and process lists would show;"
            " give --prometheus-username and --prometheus-password-file instead"
        )
        return [problem]
    if parts.query or parts.fragment:
        return ["prometheus: the address has a ? or # in it; allowed: a host, a port and a path"]
    return _form_problems(url, parts, port)


def _form_problems(url: str, parts: SplitResult, port: int | None) -> list[str]:
    good_port = port is None or 0 < port <= _MOST_PORT
    if parts.scheme not in {"http", "https"} or not parts.hostname or not good_port or not _is_plain(url):
        return [f"prometheus: value '{url}' is not an address; allowed: {_ADDRESS}"]
    if parts.path.rstrip("/").endswith(("/api/v1", "/query", "/graph", "/targets")):
        return [f"prometheus: value '{url}' has the path of a page or of the API; leave it away: /api/v1 is added"]
    return []


def _is_plain(url: str) -> bool:
    return url.isascii() and url.isprintable() and not any(character in url for character in ' "<>\\^`{|}')


def _together(values: Mapping[str, Any]) -> list[str]:
    """What contradicts, or does nothing alone."""
    found: list[str] = []
    token, user, password = (values[f"prometheus-{key}"] for key in ("token-file", "username", "password-file"))
    if token and (user or password):
        found.append("prometheus-token-file: is given with a user's name or password; allowed: one way to get in")
    if bool(user) != bool(password):
        found.append("prometheus-username: needs prometheus-password-file, and the other way round; give both")
    if values["prometheus-key-file"] and not values["prometheus-cert-file"]:
        found.append("prometheus-key-file: does nothing without prometheus-cert-file; give both")
    names = [name.lower() for name, _ in values["prometheus-headers"] or ()]
    if "authorization" in names:
        found.append(
            "prometheus-headers: Authorization would be seen in process lists; give prometheus-token-file, or"
            " prometheus-username and prometheus-password-file"
        )
    found += [f"prometheus-headers: {name} is given twice" for name in sorted({n for n in names if names.count(n) > 1})]
    return found


def _file_problem(key: str, path: Path) -> list[str]:
    if path.is_dir():
        return [f"{key}: {path} is a directory; allowed: a file"]
    if not os.access(path, os.R_OK):
        why = "may not be read" if path.exists() else "is not there"
        return [f"{key}: {path} {why}; allowed: a readable file"]
    return []

"""Requests the JSON API of one agent: flags, credentials, TLS, and error texts."""

import argparse
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exporter.config.prometheus_options import credential_problems
from exporter.config.types import http_parts
from exporter.cost.prometheus_access import basic, client_context, why
from exporter.errors import ConfigError, ExporterError

LEDGER, DEVICES = "/api/v1/ledger", "/api/v1/devices"
API_VERSION = 1
TIMEOUT_SECONDS = 10.0
_CONTENTS = {LEDGER: "accounts", DEVICES: "devices"}
"""Required key of the answer, by path."""
_MOST_BYTES = 64 << 20
_MOST = 1e300
_SERVER = "gpu-cost-exporter"
_OF_THE_SERVICE = b"/openapi.json"
"""Text in every 404 answer of the cost service, which sends the same Server header as the agent."""


def number(value: Any) -> float:  # noqa: ANN401 - comes from JSON, is checked here
    """Return a finite number from an answer; the JSON parser also accepts NaN and 1e999.

    Raises:
        ValueError: The value is not a finite number.
    """
    found = float(value)
    if not abs(found) < _MOST:
        raise ValueError(f"{value!r} is no number")
    return found


@contextmanager
def understood(where: str, what: str) -> Iterator[None]:
    """Convert errors in parsing an answer to an ``ExporterError`` that names the agent and the expected document.

    Raises:
        ExporterError: The answer has another form.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise ExporterError(
            f"{where}: the answer is not {what}: {type(error).__name__} {error}; is this agent of another release?"
        ) from error


_FILES = {
    "agent_password_file": "file with that user's password [default: none]",
    "agent_ca_file": "PEM file of the authorities that may vouch for the agent [default: the system's]",
    "agent_cert_file": "PEM file of a client certificate [default: none]",
    "agent_key_file": "PEM file of its key, without a passphrase [default: in the certificate's file]",
}


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def add_agent_access(parser: argparse.ArgumentParser) -> None:
    """Add the flags for an agent with TLS and passwords, as a separate group."""
    group = parser.add_argument_group("An agent with TLS and passwords (docs/security.md)")
    group.add_argument("--agent-username", metavar="NAME", help="user of basic authentication [default: none]")
    for key, about in _FILES.items():
        group.add_argument(_flag(key), type=Path, metavar="FILE", help=about)
    group.add_argument(
        "--agent-skip-verify",
        action="store_const",
        const=True,
        help="do not check the agent's certificate; a machine in between can then read the password",
    )


def access_problems(namespace: argparse.Namespace, *, of_an_agent: bool) -> list[str]:
    """Return the mistakes in the access flags, one line each; without an agent, any given flag is a mistake."""
    values = {_flag(key): getattr(namespace, key) for key in KEYS}
    problems = credential_problems("--agent-", values)
    given = [flag for flag, value in values.items() if value is not None]
    if given and not of_an_agent:
        problems.append(f"{given[0]}: does nothing without --agent; give both")
    return problems


def base_address(given: str) -> str:
    """Return the URL of an agent without a path; accepts ``node-a:9400`` and ``http://node-a:9400/``.

    Raises:
        ConfigError: The text is not an HTTP address.
    """
    try:
        parts = http_parts(given if "://" in given else f"http://{given}")
        if not parts.path:
            return parts.geturl()
    except ValueError as error:
        given = str(error)  # this text has no password
    raise ConfigError(
        f"--agent: value '{given}' is not an address of an agent; allowed: an agent's address, as"
        " http://node-a:9400, IPv6 in brackets: http://[::1]:9400"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClient:
    """Requests the API of one agent, which may have a web configuration."""

    base: str
    """Address of the agent, as returned by ``base_address``."""
    username: str | None = None
    """User name; ``None`` sends no credentials."""
    password_file: Path | None = None
    ca_file: Path | None = None
    """PEM file of the trusted authorities; ``None``: the system's authorities."""
    cert_file: Path | None = None
    key_file: Path | None = None
    """PEM file of the client's key; ``None``: the key is in ``cert_file``."""
    skip_verify: bool | None = None

    def fetch(self, path: str = LEDGER, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
        """Return the agent's answer.

        Args:
            path: ``LEDGER`` or ``DEVICES``.
            timeout_seconds: Limit for each network operation.

        Raises:
            ConfigError: A file of a password, an authority or a certificate cannot be read, or is invalid.
            ExporterError: The agent is down, too old or too new, has no data yet, or the address is not an agent.
        """
        headers = {}
        if self.username and self.password_file:
            headers = {"Authorization": basic("--agent-", self.username, self.password_file)}
        # No proxy, because it has no route to a pod or to a port-forward on this host. No redirects.
        connection = self._connection(timeout_seconds)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            body = response.read(_MOST_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise ExporterError(_unreachable(self.base, error, timeout_seconds)) from None
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            raise ExporterError(_refused(self.base, path, response, body))
        if len(body) > _MOST_BYTES:
            raise ExporterError(f"{self.base}: the answer is longer than {_MOST_BYTES >> 20} MiB; is this an agent?")
        return document_of(body, self.base, path)

    def _connection(self, timeout_seconds: float) -> HTTPConnection:
        parts = urlsplit(self.base)
        if parts.scheme == "http":
            return HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_seconds)
        files = (self.ca_file, self.cert_file, self.key_file)
        context = client_context("--agent-", *files, skip_verify=bool(self.skip_verify))
        return HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout_seconds, context=context)


KEYS = tuple(f"agent_{one.name}" for one in fields(AgentClient) if one.name != "base")
"""Attributes that ``add_agent_access`` adds to the parsed arguments."""


def client_of(namespace: argparse.Namespace, given: str) -> AgentClient:
    """Return the client of the agent at an address, with the access that the flags configure.

    Raises:
        ConfigError: The address is not an HTTP address.
    """
    return AgentClient(
        base=base_address(given), **{key.removeprefix("agent_"): getattr(namespace, key) for key in KEYS}
    )


def document_of(body: bytes, base: str, path: str = LEDGER) -> dict[str, Any]:
    """Return the JSON object of an answer; ``base`` is the agent's address, ``path`` the requested path.

    Raises:
        ExporterError: The body is not a document of an agent, or the agent is too old or too new.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "api_version" not in document or _CONTENTS[path] not in document:
        raise ExporterError(_no_agent(base))
    version = document["api_version"]
    if version != API_VERSION:
        raise ExporterError(
            f"{base}: the agent speaks version {version} of its API, this program version {API_VERSION}; use"
            " the program of the agent's release"
        )
    return document


def _refused(base: str, path: str, response: HTTPResponse, body: bytes) -> str:
    code = response.status
    if response.headers.get("Server", "") != _SERVER:
        return _no_agent(base, f" (HTTP {code})")
    fixes: dict[int, str] = {
        HTTPStatus.UNAUTHORIZED: "the agent asks for a user and a password; give --agent-username and"
        " --agent-password-file",
        HTTPStatus.FORBIDDEN: "the agent rejects this client certificate; give another by --agent-cert-file",
        HTTPStatus.NOT_FOUND: f"this agent is of a release without {path}; update it",
        HTTPStatus.SERVICE_UNAVAILABLE: "the agent has only just started; ask again in a few seconds",
    }
    if code == HTTPStatus.NOT_FOUND and _OF_THE_SERVICE in body:
        return (
            f"{base}: this is the cost service, not an agent; give an agent's address (port 9400), or --prometheus URL"
            " for a fleet"
        )
    if code in fixes:
        return f"{base}: {fixes[code]}"
    return f"{base}{path}: the agent answers HTTP {code}; its log has the cause"


def _no_agent(base: str, how: str = "") -> str:
    return f"{base}: the server there is not an agent{how}; give the address of its --listen, as http://node-a:9400"


def _unreachable(base: str, cause: Exception, timeout_seconds: float) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"{base}: its certificate is not trusted: {cause.verify_message}; give its authority's by --agent-ca-file"
        )
    if isinstance(cause, ssl.SSLError):
        return (
            f"{base}: TLS failed: {why(cause)}; does the agent have a --web-config with TLS, and ask for a client"
            " certificate? without one give http://"
        )
    if isinstance(cause, HTTPException):
        return _no_agent(base)
    reason = why(cause)
    if isinstance(cause, TimeoutError):
        reason = f"no answer within {timeout_seconds:g} s"
    elif isinstance(cause, socket.gaierror):
        reason = "the name cannot be resolved"
    return f"{base}: cannot reach the agent: {reason}; is it running, and does its --listen have this address?"

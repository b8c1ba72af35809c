"""Asks an agent for its ledger over HTTP; every way in which that can fail is told with its mend."""

import base64
import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from exporter.errors import ConfigError, ExporterError
from exporter.report.redirects import NoRedirects

PATH = "/api/v1/ledger"
API_VERSION = 1
TIMEOUT_SECONDS = 10.0
_MOST_BYTES = 64 << 20
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE = 401, 403, 404, 503
_SERVER = "gpu-cost-exporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """How to get in to an agent that has a web configuration."""

    username: str = ""
    """Empty: no password is sent."""
    password_file: Path | None = None
    ca_file: Path | None = None
    """``None``: the system's authorities."""
    cert_file: Path | None = None
    key_file: Path | None = None
    """``None``: in the certificate's file."""
    skip_verify: bool = False


def base_address(given: str) -> str:
    """The address of an agent, without a path: ``node-a:9400`` and ``http://node-a:9400/`` mean the same.

    Raises:
        ConfigError: It is no HTTP address.
    """
    allowed = "allowed: an agent's address, as http://node-a:9400, IPv6 in brackets: http://[::1]:9400"
    whole = given if "://" in given else f"http://{given}"
    try:
        parts = urllib.parse.urlsplit(whole)
        port_is_good = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"--agent: value '{given}' is no address: {error}; {allowed}") from None
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_good or extra:
        raise ConfigError(f"--agent: value '{given}' is not an address of an agent; {allowed}")
    if not whole.isascii() or not whole.isprintable() or " " in whole:
        raise ConfigError(f"--agent: value '{given}' has characters that no address has; {allowed}")
    return f"{parts.scheme}://{parts.netloc}"


def fetch(base: str, timeout_seconds: float = TIMEOUT_SECONDS, access: AgentAccess | None = None) -> dict[str, Any]:
    """The agent's ledger as it sends it.

    Args:
        base: As ``base_address`` gives it.
        timeout_seconds: For each step of the exchange.
        access: How to get in, where it does not let everybody in.

    Raises:
        ConfigError: A file of ``access`` cannot be read, or is none.
        ExporterError: The agent is down, is none, is too old or new, or has nothing to tell yet.
    """
    return document_of(_get(base, timeout_seconds, access or AgentAccess()), base)


def document_of(body: bytes, base: str) -> dict[str, Any]:
    """The ledger in the body of an answer; ``base`` is whose.

    Raises:
        ExporterError: It is none, or of an agent that is too old or new.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or "api_version" not in document or "accounts" not in document:
        raise ExporterError(_no_agent(base))
    version = document["api_version"]
    if version != API_VERSION:
        raise ExporterError(
            f"{base}: the agent speaks version {version} of the ledger's API, this report version {API_VERSION}; use"
            " the report of the agent's release"
        )
    return document


def _get(base: str, timeout_seconds: float, access: AgentAccess) -> bytes:
    handlers: list[urllib.request.BaseHandler] = [
        # A proxy for the world outside has no way to a pod or to a port-forward on this host.
        urllib.request.ProxyHandler({}),
        NoRedirects(),
    ]
    if base.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_context(access)))
    request = urllib.request.Request(base + PATH, headers=_headers(access))  # noqa: S310 - base_address allows http only
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_seconds) as response:
            body: bytes = response.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ExporterError(_refused(base, error)) from None
    except (OSError, HTTPException) as error:
        raise ExporterError(_unreachable(base, error, timeout_seconds)) from None
    if len(body) > _MOST_BYTES:
        raise ExporterError(f"{base}: the answer is longer than {_MOST_BYTES >> 20} MiB; is this an agent?")
    return body


def _headers(access: AgentAccess) -> dict[str, str]:
    if not access.username or access.password_file is None:
        return {}
    try:
        password = access.password_file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--agent-password-file: {access.password_file}: {why}; give a file with one password"
        ) from None
    pair = base64.b64encode(f"{access.username}:{password}".encode()).decode("ascii")
    return {"Authorization": f"Basic {pair}"}


def _context(access: AgentAccess) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--agent-ca-file: {access.ca_file}: {error}; allowed: a PEM file of certificates") from None
    if access.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if access.cert_file is not None:
        try:
            context.load_cert_chain(access.cert_file, access.key_file, lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--agent-cert-file: {access.cert_file}: {error}; allowed: a PEM file, and its key there or by"
                " --agent-key-file, without a passphrase"
            ) from None
    return context


def _refused(base: str, error: urllib.error.HTTPError) -> str:
    ours = error.headers.get("Server", "") == _SERVER
    if error.code == _UNAUTHORIZED and ours:
        return f"{base}: the agent asks for a user and a password; give --agent-username and --agent-password-file"
    if error.code == _FORBIDDEN and ours:
        return f"{base}: the agent does not let this client certificate in; give another by --agent-cert-file"
    if error.code == _NOT_FOUND and ours:
        return f"{base}: this agent is of a release that keeps no ledger; update it"
    if error.code == _UNAVAILABLE and ours:
        return f"{base}: the agent has only just started; ask again in a few seconds"
    if not ours:
        return _no_agent(base, f" (HTTP {error.code})")
    return f"{base}{PATH}: the agent answers HTTP {error.code}; its log has the cause"


def _no_agent(base: str, how: str = "") -> str:
    return f"{base}: what answers there is no agent{how}; give the address of its --listen, as http://node-a:9400"


def _unreachable(base: str, error: Exception, timeout_seconds: float) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"{base}: its certificate is not trusted: {cause.verify_message}; give its authority's by --agent-ca-file"
        )
    if isinstance(cause, ssl.SSLError):
        why = (cause.reason or str(cause)).replace("_", " ").lower()
        return (
            f"{base}: TLS failed: {why}; does the agent have a --web-config with TLS, and ask for a client certificate?"
            " without one give http://"
        )
    if isinstance(cause, TimeoutError):
        why = f"no answer within {timeout_seconds:g} s"
    elif isinstance(cause, socket.gaierror):
        why = "the name cannot be resolved"
    elif isinstance(cause, HTTPException):
        return _no_agent(base)
    elif isinstance(cause, OSError) and cause.strerror:
        why = cause.strerror.lower()
    else:
        why = str(cause)
    return f"{base}: cannot reach the agent: {why}; is it running, and does its --listen have this address?"

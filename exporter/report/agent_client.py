"""Asks an agent for its ledger over HTTP; every way in which that can fail is told with its mend."""

import json
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

from exporter.errors import ConfigError, ExporterError

PATH = "/api/v1/ledger"
API_VERSION = 1
TIMEOUT_SECONDS = 10.0
_MOST_BYTES = 64 << 20
_NOT_FOUND, _UNAVAILABLE = 404, 503
_SERVER = "gpu-cost-exporter"


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


def fetch(base: str, timeout_seconds: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """The agent's ledger as it sends it.

    Args:
        base: As ``base_address`` gives it.
        timeout_seconds: For each step of the exchange.

    Raises:
        ExporterError: The agent is down, is none, is too old or new, or has nothing to tell yet.
    """
    body = _get(base, timeout_seconds)
    try:
        document = json.loads(body)
    except ValueError:
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


def _get(base: str, timeout_seconds: float) -> bytes:
    # A proxy for the world outside has no way to a pod or to a port-forward on this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(base + PATH, timeout=timeout_seconds) as response:
            body: bytes = response.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ExporterError(_refused(base, error)) from None
    except (OSError, HTTPException) as error:
        raise ExporterError(_unreachable(base, error, timeout_seconds)) from None
    if len(body) > _MOST_BYTES:
        raise ExporterError(f"{base}: the answer is longer than {_MOST_BYTES >> 20} MiB; is this an agent?")
    return body


def _refused(base: str, error: urllib.error.HTTPError) -> str:
    ours = error.headers.get("Server", "") == _SERVER
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
    if isinstance(cause, ssl.SSLError):
        why = cause.reason or cause
        return f"{base}: TLS failed ({why}); an agent speaks plain http: give http://, or the address of its TLS proxy"
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

"""Failed answers of the Kubernetes API in words, and how long to leave it in peace after each."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from exporter.errors import ApiError

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
FORBIDDEN_SECONDS = 60.0
"""Rights change by hand: no use in asking sooner."""
LONGEST_RETRY_AFTER_SECONDS = 300.0
_REASONS = {401: "unauthorised", 403: "forbidden", 404: "not_found", 410: "gone", 413: "too_large", 429: "too_many"}
_MENDS = {
    "unauthorised": "the token is not accepted though it was read again; see that the service account exists and"
    " the token is for this cluster",
    "not_found": "the API server has no such object, or does not serve this version of its API; compare with"
    " `kubectl api-resources`",
    "too_many": "the server is overloaded and asks to wait",
    "server_error": "see the log of the API server",
}


def retry_seconds(error: ApiError, failures: int, random: Callable[[], float]) -> float:
    """Say how long to wait: what the server asked for, else full jitter over 1 s, 2 s, 4 s up to 60 s.

    Args:
        error: What happened last.
        failures: How many attempts in a row have failed, this one included.
        random: 0..1.
    """
    if error.retry_after_seconds is not None:
        # A bit more than asked for, so that all who were told the same do not come back together.
        return min(error.retry_after_seconds, LONGEST_RETRY_AFTER_SECONDS) * (1 + 0.1 * random()) + 0.1 * random()
    if error.reason in {"forbidden", "too_large"}:
        return FORBIDDEN_SECONDS * (0.75 + 0.5 * random())
    ceiling = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 10), LONGEST_BACKOFF_SECONDS)
    # Never at once: a server that refuses quickly would be asked hundreds of times a second.
    return max(ceiling * random(), 0.1 * FIRST_BACKOFF_SECONDS)


def of_status(
    status: object,
    address: str,
    path: str,
    query: Mapping[str, str],
    *,
    details: object = "",
    retry_after: str | None = None,
) -> ApiError:
    """Make the error of an HTTP status, or of the code of an event of type ERROR."""
    code = status if isinstance(status, int) else 0
    reason = _REASONS.get(code, "server_error" if code >= 500 or code == 0 else "garbage")  # noqa: PLR2004 - HTTP
    verb, resource, group = _request(path, query)
    if reason == "forbidden":
        mend = f"grant verb {verb} on resource {resource} of API group {group!r} to this service account"
    else:
        mend = _MENDS.get(reason, "")
    said = " ".join(str(details or "").split())[:300]
    words = "; ".join(word for word in (said, mend) if word)
    message = f"{verb} {resource} at {address}: HTTP {code or str(status)[:40]}" + (f": {words}" if words else "")
    return ApiError(reason, message, status=code or None, retry_after_seconds=_seconds(retry_after))


def action(path: str, query: Mapping[str, str]) -> str:
    """Name a request as rights name it: ``watch pods``, ``get nodes``."""
    verb, resource, _group = _request(path, query)
    return f"{verb} {resource}"


def message_of(body: bytes) -> str:
    """Return the message of a ``Status``; empty for a body that is none."""
    try:
        status: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    message = status.get("message") if isinstance(status, dict) else None
    return message if isinstance(message, str) else ""


def _request(path: str, query: Mapping[str, str]) -> tuple[str, str, str]:
    """Split a request into verb, resource and API group, as a role names them."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else ("".join(parts[1:2]), parts[3:])
    if rest[:1] == ["namespaces"] and len(rest) > 2:  # noqa: PLR2004 - namespaces/<name>/<resource>
        rest = rest[2:]
    if not rest:
        return "get", path, group
    verb = "watch" if "watch" in query else "get" if len(rest) > 1 else "list"
    return verb, rest[0], group


def _seconds(retry_after: str | None) -> float | None:
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None

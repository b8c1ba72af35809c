"""What went wrong with a question to Prometheus: each answer that is none becomes words with a mend."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from exporter.config.prometheus_options import PrometheusSettings
from exporter.errors import PrometheusError

_TOO_MANY = (
    "too many samples",
    "-search.max",
    "maxsamplesperquery",
    "the query exceeded the maximum",
    "exceeds the limit",
    "exceeded limit",
    "the limit",
)
_TIMED_OUT = ("timed out", "timeout", "deadline exceeded", "time exceeded")
_BAD, _UNAUTHORISED, _FORBIDDEN, _NOT_FOUND, _WRONG_METHOD, _TOO_LONG, _BUSY, _SERVER = (
    400,
    401,
    403,
    404,
    405,
    413,
    429,
    500,
)
_ALWAYS = frozenset({"too_many_samples", "too_large", "bad_query"})
_UNPROCESSABLE, _REDIRECTS = 422, range(300, 400)
_MOST_SAID = 300


class Refusal(PrometheusError):  # noqa: N818 - a word for what it is
    """A refusal that says when to come back."""

    def __init__(
        self, reason: str, message: str, *, retriable: bool = False, retry_after_seconds: float | None = None
    ) -> None:
        """Keep what the next attempt goes by."""
        super().__init__(reason, message, retriable=retriable)
        self.retry_after_seconds = retry_after_seconds


def may_pass(error: PrometheusError) -> bool:
    """Whether it may yet be answered within the hour: a token, a name or an ingress may come right by then."""
    return error.reason not in _ALWAYS


def refusal(settings: PrometheusSettings, path: str, status: int, body: bytes, headers: dict[str, str]) -> Refusal:  # noqa: PLR0911 - a status each
    """The error of an HTTP status other than 200.

    Args:
        settings: Of the client.
        path: What was asked, below the address.
        status: Not 200.
        body: As much of the answer as was read.
        headers: By name in small letters.
    """
    url = settings.url
    said = _said(body)
    if status in _REDIRECTS:
        return Refusal("redirected", f"{url}: answers with a redirect{_where(headers)}; {_REDIRECT_MEND}")
    if status in {_UNAUTHORISED, _FORBIDDEN}:
        return _no_access(settings, status, said)
    if status in {_NOT_FOUND, _WRONG_METHOD}:
        return Refusal(
            "not_prometheus",
            f"{url}: HTTP {status} for {path}: the API is not there; give the address with its path, as"
            " http://HOST/prometheus for Mimir, http://HOST/select/0/prometheus for a VictoriaMetrics cluster",
        )
    if status == _BUSY:
        return Refusal(
            "overloaded",
            f"{url}: asks to come back later (HTTP 429){_quoted(said)}; lower --prometheus-concurrency",
            retriable=True,
            retry_after_seconds=_seconds(headers.get("retry-after", "")),
        )
    if status == _TOO_LONG:
        return Refusal(
            "bad_query", f"{url}: the question is too long for it (HTTP 413); give fewer values to filter by"
        )
    if status >= _SERVER:
        return _server_error(settings, status, said, headers)
    return _bad_query(settings, status, body, said)


_REDIRECT_MEND = (
    "give that address if it is Prometheus; if it is a login page, give the address behind it, or a token by"
    " --prometheus-token-file"
)


def _where(headers: dict[str, str]) -> str:
    # What follows ? may hold a ticket of the login.
    place = headers.get("location", "").partition("?")[0].partition("#")[0]
    host = place.rpartition("@")[2] if "@" in place else place
    return f" to {_plain(host)}" if host else ""


def _no_access(settings: PrometheusSettings, status: int, said: str) -> Refusal:
    url = settings.url
    if "org id" in said.lower() or "x-scope-orgid" in said.lower():
        return Refusal(
            "unauthorised", f"{url}: wants to know the tenant; give --prometheus-headers X-Scope-OrgID=TENANT"
        )
    if status == _FORBIDDEN:
        return Refusal(
            "forbidden", f"{url}: HTTP 403: these credentials may not ask{_quoted(said)}; grant them reading of metrics"
        )
    if settings.token_file:
        mend = f"the token of {settings.token_file} is not accepted; renew it"
    elif settings.username:
        mend = f"the user '{settings.username}' or the password of {settings.password_file} is not accepted"
    else:
        mend = "it wants credentials; give --prometheus-token-file, or --prometheus-username and -password-file"
    return Refusal("unauthorised", f"{url}: HTTP 401: {mend}")


def _server_error(settings: PrometheusSettings, status: int, said: str, headers: dict[str, str]) -> Refusal:
    if any(word in said.lower() for word in _TIMED_OUT):
        return timed_out(settings)
    if any(word in said.lower() for word in _TOO_MANY):
        return _too_many(settings, said)
    return Refusal(
        "server_error",
        f"{settings.url}: HTTP {status}{_quoted(said)}; its log has the cause",
        retriable=True,
        retry_after_seconds=_seconds(headers.get("retry-after", "")),
    )


def _bad_query(settings: PrometheusSettings, status: int, body: bytes, said: str) -> Refusal:
    if not body.lstrip().startswith(b"{"):
        return not_prometheus(settings, f"HTTP {status}{_quoted(said)}")
    if any(word in said.lower() for word in _TOO_MANY):
        return _too_many(settings, said)
    if status == _UNPROCESSABLE and any(word in said.lower() for word in _TIMED_OUT):
        return timed_out(settings)
    return Refusal("bad_query", f"{settings.url}: cannot answer (HTTP {status}){_quoted(said)}")


def timed_out(settings: PrometheusSettings) -> Refusal:
    """No answer in time, from the server's clock or ours."""
    return Refusal(
        "timeout",
        f"{settings.url}: no answer within {settings.timeout_seconds:g} s; raise --prometheus-timeout, or lower"
        " --prometheus-concurrency",
        retriable=True,
    )


def _too_many(settings: PrometheusSettings, said: str) -> Refusal:
    return Refusal(
        "too_many_samples",
        f"{settings.url}: a limit of the server is too low for this question{_quoted(said)}; raise it (Prometheus:"
        " --query.max-samples), or ask for a shorter window or fewer dimensions",
    )


def not_prometheus(settings: PrometheusSettings, how: str) -> Refusal:
    """What answers does not speak the API."""
    return Refusal(
        "not_prometheus",
        f"{settings.url}: what answers there is not Prometheus' API ({how}); give the address of Prometheus, with its"
        " path if it has one",
    )


@contextmanager
def rows_read(settings: PrometheusSettings) -> Iterator[None]:
    """Around what reads the rows of an answer: what it raises where they are none becomes a ``PrometheusError``."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        # Not divisible: some of the rows may have been taken.
        raise PrometheusError(
            "bad_rows",
            f"{settings.url}: the answer has rows that no Prometheus sends; is there a faulty proxy in between?",
        ) from None


def _said(body: bytes) -> str:
    """The server's own words, in one line."""
    try:
        decoded: Any = json.loads(body)
    except (ValueError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        return _plain(str(decoded.get("error", "")))
    text = body.decode("utf-8", "replace")
    return "" if text.lstrip().startswith("<") else _plain(text)


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))[:_MOST_SAID]


def _quoted(said: str) -> str:
    return f": {said}" if said else ""


def _seconds(text: str) -> float | None:
    """Of ``Retry-After`` in seconds; its form with a date is not used by any of these servers."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < len("100000") else None

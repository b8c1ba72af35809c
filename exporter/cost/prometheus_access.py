"""Provides credentials and TLS for Prometheus, re-reads their files when they change, and words the errors."""

import base64
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from exporter.config.prometheus_options import PrometheusSettings
from exporter.config.resolve import printable
from exporter.errors import ConfigError, PrometheusError

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
_ALWAYS = frozenset({"too_many_samples", "too_large", "bad_query"})
_REDIRECTS = range(300, 400)


def may_pass(error: PrometheusError) -> bool:
    """Return whether a retry within the hour may succeed; a token, a name or an ingress may be fixed by then."""
    return error.reason not in _ALWAYS


def refusal(
    settings: PrometheusSettings, path: str, status: int, body: bytes, headers: dict[str, str]
) -> PrometheusError:
    """Return the error of an HTTP status other than 200.

    Args:
        settings: Settings of the client.
        path: Requested path below the address.
        status: HTTP status other than 200.
        body: Part of the answer that was read.
        headers: Headers of the answer, by name in lower case.
    """
    url, said = settings.url, _said(body)
    quoted = f": {said}" if said else ""
    later = retry_after_seconds(headers.get("retry-after", ""))
    if status in _REDIRECTS:
        return PrometheusError("redirected", f"{url}: answers with a redirect{_where(headers)}; {_REDIRECT_FIX}")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return _no_access(settings, status, said, quoted)
    if status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}:
        return PrometheusError("not_prometheus", f"{url}: HTTP {status} for {path}: {_PATH_FIX}")
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        words = f"{url}: is overloaded (HTTP 429){quoted}; lower --prometheus-concurrency"
        return PrometheusError("overloaded", words, retriable=True, retry_after_seconds=later)
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        words = f"{url}: the query is too long for the server (HTTP 413); give fewer values to filter by"
        return PrometheusError("bad_query", words)
    return _failed(settings, status, said, quoted, later, is_json=body.lstrip().startswith(b"{"))


def _failed(
    settings: PrometheusSettings, status: int, said: str, quoted: str, later: float | None, *, is_json: bool
) -> PrometheusError:
    """Return the error of a failed query."""
    is_fault = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if not is_fault and not is_json:
        return not_prometheus(settings, f"HTTP {status}{quoted}")
    may_time_out = is_fault or status == HTTPStatus.UNPROCESSABLE_ENTITY
    if may_time_out and any(word in said.lower() for word in _TIMED_OUT):
        return timed_out(settings)
    if any(word in said.lower() for word in _TOO_MANY):
        words = f"{settings.url}: a limit of the server is too low for this query{quoted}; {_LIMIT_FIX}"
        return PrometheusError("too_many_samples", words)
    if is_fault:
        words = f"{settings.url}: HTTP {status}{quoted}; its log has the cause"
        return PrometheusError("server_error", words, retriable=True, retry_after_seconds=later)
    return PrometheusError("bad_query", f"{settings.url}: cannot answer (HTTP {status}){quoted}")


_PATH_FIX = (
    "the API is not there; give the address with its path, as http://HOST/prometheus for Mimir,"
    " http://HOST/select/0/prometheus for a VictoriaMetrics cluster"
)
_LIMIT_FIX = "raise it (Prometheus: --query.max-samples), or ask for a shorter window or fewer dimensions"
_REDIRECT_FIX = (
    "give that address if it is Prometheus; if it is a login page, give the address behind it, or a token by"
    " --prometheus-token-file"
)


def _where(headers: dict[str, str]) -> str:
    # The query string may contain a ticket of the login.
    place = headers.get("location", "").partition("?")[0].partition("#")[0]
    host = place.rpartition("@")[2] if "@" in place else place
    return f" to {one_line(host)}" if host else ""


def _no_access(settings: PrometheusSettings, status: int, said: str, quoted: str) -> PrometheusError:
    url = settings.url
    if "org id" in said.lower() or "x-scope-orgid" in said.lower():
        return PrometheusError(
            "unauthorised", f"{url}: requires a tenant; give --prometheus-headers X-Scope-OrgID=TENANT"
        )
    if status == HTTPStatus.FORBIDDEN:
        return PrometheusError(
            "forbidden", f"{url}: HTTP 403: these credentials have no access{quoted}; grant them reading of metrics"
        )
    if settings.token_file:
        fix = f"the token of {settings.token_file} is not accepted; renew it"
    elif settings.username:
        fix = f"the user '{settings.username}' or the password of {settings.password_file} is not accepted"
    else:
        fix = "it requires credentials; give --prometheus-token-file, or --prometheus-username and -password-file"
    return PrometheusError("unauthorised", f"{url}: HTTP 401: {fix}")


def timed_out(settings: PrometheusSettings) -> PrometheusError:
    """Return the error of a timeout of the server or of the client."""
    return PrometheusError(
        "timeout",
        f"{settings.url}: no answer within {settings.timeout_seconds:g} s; raise --prometheus-timeout, or lower"
        " --prometheus-concurrency",
        retriable=True,
    )


def not_prometheus(settings: PrometheusSettings, how: str) -> PrometheusError:
    """Return the error of a server without the API."""
    return PrometheusError(
        "not_prometheus",
        f"{settings.url}: this is not Prometheus' API ({how}); give the address of Prometheus, with its"
        " path if it has one",
    )


@contextmanager
def rows_read(settings: PrometheusSettings) -> Iterator[None]:
    """Convert errors in reading the rows of an answer to a ``PrometheusError``."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        # The query cannot be divided and repeated: some rows may already be added.
        raise PrometheusError(
            "bad_rows",
            f"{settings.url}: the answer has rows that no Prometheus sends; is there a faulty proxy in between?",
        ) from None


def _said(body: bytes) -> str:
    """Return the error text of the server, in one line."""
    try:
        decoded: Any = json.loads(body)
    except (ValueError, RecursionError):
        decoded = None
    text = str(decoded.get("error", "")) if isinstance(decoded, dict) else body.decode("utf-8", "replace")
    return "" if text.lstrip().startswith("<") else one_line(text)


def retry_after_seconds(text: str) -> float | None:
    """Return ``Retry-After`` in seconds; these servers do not use its form with a date."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < len("100000") else None


_NO_SECRETS = frozenset({"accept", "x-scope-orgid"})
_MOST_TEXT = 3000
"""Characters of a foreign text that are read."""
_LEAST_SECRET = 8
"""Minimum length of a secret: a shorter value of a user's header is a number of a tenant, and would occur anywhere."""


def headers(settings: PrometheusSettings) -> dict[str, str]:
    """Return the headers of a query.

    Raises:
        PrometheusError: A file of a token or a password cannot be read.
    """
    found = {"Accept": "application/json", **dict(settings.headers)}
    try:
        if settings.token_file is not None:
            found["Authorization"] = "Bearer " + _secret("prometheus-token-file", settings.token_file)
        elif settings.username and settings.password_file is not None:
            found["Authorization"] = basic("prometheus-", settings.username, settings.password_file)
    except ConfigError as error:
        raise PrometheusError("credentials", str(error)) from None
    return found


def basic(prefix: str, username: str, password_file: Path) -> str:
    """Return the value of ``Authorization`` for a user; ``prefix`` is the beginning of the option's name.

    Raises:
        ConfigError: The file cannot be read, or has no password.
    """
    password = _secret(f"{prefix}password-file", password_file)
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode("ascii")


def without_secrets(said: bytes, sent: Mapping[str, str]) -> bytes:
    """Return an answer without the secrets of the request, which some proxies repeat in their errors.

    Args:
        said: Text of the answer.
        sent: Headers of the request.
    """
    for name, value in sent.items():
        for secret in _secrets_of(name.lower(), value):
            said = said.replace(secret, b"...")
    return said


def _secrets_of(name: str, value: str) -> Iterator[bytes]:
    """Yield the secrets of a header, the longest first."""
    if name == "authorization":
        scheme, _, shown = value.partition(" ")
        yield shown.encode()
        if scheme == "Basic":
            yield base64.b64decode(shown).partition(b":")[2]
    elif name not in _NO_SECRETS and len(value) >= _LEAST_SECRET:
        yield value.encode()


def tls_of(settings: PrometheusSettings) -> ssl.SSLContext | bool:
    """Return the TLS context, created again when one of its files changes; true without TLS.

    Raises:
        PrometheusError: A file cannot be read or is invalid.
    """
    if not settings.url.startswith("https:"):
        return True
    files = (settings.ca_file, settings.cert_file, settings.key_file)
    try:
        return _tls_at(settings, tuple(_changed_at(path) for path in files if path))
    except ConfigError as error:
        raise PrometheusError("tls", str(error)) from None


@lru_cache(maxsize=8)
def _tls_at(settings: PrometheusSettings, _state: object) -> ssl.SSLContext:
    files = (settings.ca_file, settings.cert_file, settings.key_file)
    return client_context("prometheus-", *files, skip_verify=settings.skip_verify)


def client_context(
    prefix: str, ca_file: Path | None, cert_file: Path | None, key_file: Path | None, *, skip_verify: bool
) -> ssl.SSLContext:
    """Return the TLS context of a client.

    Args:
        prefix: Beginning of the names of the options, for messages.
        ca_file: Authorities for the server's certificate; ``None``: the system's authorities.
        cert_file: Certificate of the client; ``None``: no certificate.
        key_file: Key of the client; ``None``: the key is in ``cert_file``.
        skip_verify: Whether the server's certificate is not checked.

    Raises:
        ConfigError: A file cannot be read or is invalid.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{prefix}ca-file: {ca_file}: {why(error)}; allowed: a PEM file of certificates") from None
    if skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert_file is not None:
        try:
            # A key with a passphrase raises an error instead of a prompt on the terminal.
            context.load_cert_chain(cert_file, key_file, lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{prefix}cert-file: {cert_file} with key {key_file or 'in it'}: {why(error)};"
                " allowed: PEM files that belong together, the key without a passphrase"
            ) from None
    return context


def _secret(key: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {path}: {why(error)}; fix the file") from None
    if not text or not text.isprintable():
        raise ConfigError(f"{key}: {path} is empty or has more than one line; allowed: one line")
    return text


def _changed_at(path: Path) -> object:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino


def why(error: BaseException) -> str:
    """Return the cause of an error in a few words."""
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror.lower())
    return "it is not plain text" if isinstance(error, UnicodeDecodeError) else one_line(str(error))


def one_line(text: str) -> str:
    """Return a foreign text as one printable line of at most 300 characters, for use in a message."""
    return printable(" ".join(text[:_MOST_TEXT].split()))[:300]

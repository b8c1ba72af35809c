"""Credentials and TLS for Prometheus, re-read when files change, and the wording of its errors."""

import base64
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
        return Refusal("redirected", f"{url}: answers with a redirect{_where(headers)}; {_REDIRECT_FIX}")
    if status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        return _no_access(settings, status, said)
    if status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED}:
        return Refusal(
            "not_prometheus",
            f"{url}: HTTP {status} for {path}: the API is not there; give the address with its path, as"
            " http://HOST/prometheus for Mimir, http://HOST/select/0/prometheus for a VictoriaMetrics cluster",
        )
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return Refusal(
            "overloaded",
            f"{url}: asks to come back later (HTTP 429){_quoted(said)}; lower --prometheus-concurrency",
            retriable=True,
            retry_after_seconds=retry_after_seconds(headers.get("retry-after", "")),
        )
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Refusal(
            "bad_query", f"{url}: the question is too long for it (HTTP 413); give fewer values to filter by"
        )
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _server_error(settings, status, said, headers)
    return _bad_query(settings, status, body, said)


_REDIRECT_FIX = (
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
    if status == HTTPStatus.FORBIDDEN:
        return Refusal(
            "forbidden", f"{url}: HTTP 403: these credentials may not ask{_quoted(said)}; grant them reading of metrics"
        )
    if settings.token_file:
        fix = f"the token of {settings.token_file} is not accepted; renew it"
    elif settings.username:
        fix = f"the user '{settings.username}' or the password of {settings.password_file} is not accepted"
    else:
        fix = "it wants credentials; give --prometheus-token-file, or --prometheus-username and -password-file"
    return Refusal("unauthorised", f"{url}: HTTP 401: {fix}")


def _server_error(settings: PrometheusSettings, status: int, said: str, headers: dict[str, str]) -> Refusal:
    if any(word in said.lower() for word in _TIMED_OUT):
        return timed_out(settings)
    if any(word in said.lower() for word in _TOO_MANY):
        return _too_many(settings, said)
    return Refusal(
        "server_error",
        f"{settings.url}: HTTP {status}{_quoted(said)}; its log has the cause",
        retriable=True,
        retry_after_seconds=retry_after_seconds(headers.get("retry-after", "")),
    )


def _bad_query(settings: PrometheusSettings, status: int, body: bytes, said: str) -> Refusal:
    if not body.lstrip().startswith(b"{"):
        return not_prometheus(settings, f"HTTP {status}{_quoted(said)}")
    if any(word in said.lower() for word in _TOO_MANY):
        return _too_many(settings, said)
    if status == HTTPStatus.UNPROCESSABLE_ENTITY and any(word in said.lower() for word in _TIMED_OUT):
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


def retry_after_seconds(text: str) -> float | None:
    """Of ``Retry-After`` in seconds; its form with a date is not used by any of these servers."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < len("100000") else None


_NO_SECRETS = frozenset({"accept", "x-scope-orgid"})
_MOST_TEXT = 3000
"""Characters of a foreign text that are looked at."""
_LEAST_SECRET = 8
"""Letters: a shorter value of a header of the user's is a number of a tenant, and would stand anywhere."""


def headers(settings: PrometheusSettings) -> dict[str, str]:
    """Headers of a question.

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
        raise Refusal("credentials", str(error)) from None
    return found


def basic(prefix: str, username: str, password_file: Path) -> str:
    """Return the value of ``Authorization`` for a user; ``prefix`` begins the name of the option.

    Raises:
        ConfigError: The file cannot be read, or has no password.
    """
    password = _secret(f"{prefix}password-file", password_file)
    return "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode("ascii")


def without_secrets(said: bytes, sent: Mapping[str, str]) -> bytes:
    """What a server said, without what we got in with: some proxies repeat a request in their errors.

    Args:
        said: Any bytes.
        sent: Headers of the question.
    """
    for name, value in sent.items():
        for secret in _secrets_of(name.lower(), value):
            said = said.replace(secret, b"...")
    return said


def _secrets_of(name: str, value: str) -> Iterator[bytes]:
    """What of a header may be told to nobody, the longest first."""
    if name == "authorization":
        scheme, _, shown = value.partition(" ")
        yield shown.encode()
        if scheme == "Basic":
            yield base64.b64decode(shown).partition(b":")[2]
    elif name not in _NO_SECRETS and len(value) >= _LEAST_SECRET:
        yield value.encode()


class Tls:
    """How the server's certificate is checked, and which of ours is shown."""

    def __init__(self, settings: PrometheusSettings) -> None:
        self._settings = settings
        self._made: tuple[object, ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext | bool:
        """Made again when one of its files has changed.

        Raises:
            PrometheusError: A file cannot be read, or is none.
        """
        settings = self._settings
        if not settings.url.startswith("https:"):
            return True
        state = tuple(_changed_at(path) for path in (settings.ca_file, settings.cert_file, settings.key_file) if path)
        if self._made is None or self._made[0] != state:
            files = (settings.ca_file, settings.cert_file, settings.key_file)
            try:
                self._made = (state, client_context("prometheus-", *files, skip_verify=settings.skip_verify))
            except ConfigError as error:
                raise Refusal("tls", str(error)) from None
        return self._made[1]


def client_context(
    prefix: str, ca_file: Path | None, cert_file: Path | None, key_file: Path | None, *, skip_verify: bool
) -> ssl.SSLContext:
    """Return how a server's certificate is checked, and which of ours is shown; ``prefix`` begins names of options.

    Raises:
        ConfigError: A file cannot be read, or is none.
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
            # A key with a passphrase is refused rather than asked for on the terminal.
            context.load_cert_chain(cert_file, key_file or cert_file, lambda: "")
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
    """The cause of an error in a few words."""
    if isinstance(error, ssl.SSLError):
        return str(error.reason or error).replace("_", " ").lower()
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror.lower())
    return "it is not plain text" if isinstance(error, UnicodeDecodeError) else one_line(str(error))


def one_line(text: str) -> str:
    """Return a foreign text as one printable line of at most 300 characters, fit to stand in a message."""
    return printable(" ".join(text[:_MOST_TEXT].split()))[:300]

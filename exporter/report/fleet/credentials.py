"""How to get in to Prometheus: tokens, passwords and certificates, read again whenever they may have changed."""

import base64
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from exporter.config.logs import printable
from exporter.config.prometheus_options import PrometheusSettings
from exporter.report.fleet.prometheus_errors import Refusal

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
    if settings.token_file is not None:
        found["Authorization"] = "Bearer " + _secret("prometheus-token-file", settings.token_file)
    elif settings.username and settings.password_file is not None:
        password = _secret("prometheus-password-file", settings.password_file)
        found["Authorization"] = "Basic " + base64.b64encode(f"{settings.username}:{password}".encode()).decode("ascii")
    return found


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
        """Made anew when one of its files has changed.

        Raises:
            PrometheusError: A file cannot be read, or is none.
        """
        settings = self._settings
        if not settings.url.startswith("https:"):
            return True
        state = tuple(_changed_at(path) for path in (settings.ca_file, settings.cert_file, settings.key_file) if path)
        if self._made is None or self._made[0] != state:
            self._made = (state, _context(settings))
        return self._made[1]


def _context(settings: PrometheusSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(settings.ca_file) if settings.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise Refusal("tls", f"prometheus-ca-file: {settings.ca_file}: {why(error)}; allowed: a PEM file") from None
    if settings.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert_file is not None:
        try:
            # A key with a passphrase is refused rather than asked for on the terminal.
            context.load_cert_chain(str(settings.cert_file), str(settings.key_file or settings.cert_file), lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise Refusal(
                "tls",
                f"prometheus-cert-file: {settings.cert_file} with key {settings.key_file or 'in it'}: {why(error)};"
                " allowed: PEM files that belong together, the key without a passphrase",
            ) from None
    return context


def _secret(key: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal("credentials", f"{key}: cannot read {path}: {why(error)}; mend the file") from None
    if not text or not text.isprintable():
        raise Refusal("credentials", f"{key}: {path} is empty or has more than one line; allowed: one line")
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

"""Reads a web configuration file (TLS, users, headers) in the format of Prometheus' exporter-toolkit."""

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml

from exporter.config.yaml_file import Fields, fields_of, read_text
from exporter.errors import ConfigError

Value = TypeVar("Value")
_MOST_USERS, _MOST_NAMES = 1000, 1000
_LEAST_COST, _MOST_COST = 4, 16
_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_TOO_OLD = dict.fromkeys(("TLS10", "TLS11"), "is broken, and not served")
_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = dict.fromkeys(
    ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert"),
    "takes certificates without an authority; use RequireAndVerifyClientCert",
)
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_ALWAYS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Cipher suites of TLS 1.3, which are always enabled with it, in Go and here."""
_CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{name}": f"ECDHE-{key}-{ours}"
    for key in ("ECDSA", "RSA")
    for name, ours in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("CHACHA20_POLY1305", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Supported headers with their allowed values; empty: any value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebTls:
    """TLS settings of a file."""

    context: ssl.SSLContext
    """TLS context of the server."""
    files: tuple[Path, ...]
    """Files that were read: certificate, key and authorities."""
    allowed_sans: frozenset[str] = frozenset()
    """Accepted names of client certificates, of which one must match; empty: any name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """A valid web configuration."""

    path: Path
    tls: WebTls | None = None
    """TLS settings; ``None``: plain HTTP."""
    users: Mapping[str, bytes] = field(default_factory=dict)
    """Bcrypt hash by user; empty: no password required."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers that are added to every answer that lacks them."""
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The file and all files that it names."""
        return (self.path, *(self.tls.files if self.tls else ()))


def load(path: Path) -> WebSettings:
    """Return the settings of a file and read the files that it names; paths are relative to its directory.

    Raises:
        ConfigError: Lists all mistakes, each with file, line, key and allowed values.
    """
    text = read_text(path, "web-config", "a web configuration", "allowed: a readable YAML file")
    return parse(text, path)


def parse(text: str, path: Path) -> WebSettings:
    """Parse the settings of a file; ``path`` is the path of the file.

    Raises:
        ConfigError: Lists all mistakes.
    """
    wrong = "not a mapping; allowed: tls_server_config, http_server_config, basic_auth_users"
    top = fields_of(text, str(path), wrong, may_be_empty=True)
    if not top.node.value:
        return WebSettings(path=path, warnings=(f"web-config: {path} is empty: no TLS, no passwords",))
    problems, warnings = top.problems, list[str]()
    tls = _tls(top, path.parent)
    headers = _http(top, warnings)
    users = _users(top)
    if top.take("rate_limit") is not None:
        top.problem("rate_limit", "is not served here; leave it out, and limit requests in a proxy if they must be")
    top.finish()
    if problems:
        raise ConfigError(*problems)
    if users and tls is None:
        warnings.append(f"web-config: {path}: passwords without TLS can be read on the network")
    return WebSettings(path=path, tls=tls, users=users, headers=headers, warnings=tuple(warnings))


def _tls(top: Fields, folder: Path) -> WebTls | None:
    """Read the settings of TLS, and load the files."""
    fields = _mapping(top, "tls_server_config")
    if fields is None:
        return None
    before = len(fields.problems)
    cert, key = (_file(fields, name, folder, needed=True) for name in ("cert_file", "key_file"))
    ca = _file(fields, "client_ca_file", folder)
    for inline in ("cert", "key", "client_ca"):
        if fields.take(inline) is not None:
            fields.problem(inline, f"is not read from here; put it into a file and give {inline}_file")
    auth = _mapped(fields, "client_auth_type", _CLIENT_AUTH, _UNVERIFIED, wrong=ssl.CERT_REQUIRED) or ssl.CERT_NONE
    sans = frozenset(_texts(fields, "client_allowed_sans", "names of client certificates"))
    context = _context(fields)
    fields.finish()
    if (ca is None) != (auth is ssl.CERT_NONE):
        fields.problem("client_ca_file", "and client_auth_type are nothing without each other; give both or neither")
    if sans and auth is not ssl.CERT_REQUIRED:
        fields.problem("client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")
    if cert is None or key is None or len(fields.problems) > before:
        return None
    with _loading(fields, "cert_file", f"{cert}, {key}", "PEM files of one pair, the key without a passphrase"):
        # A key with a passphrase raises an error instead of a prompt on the terminal.
        context.load_cert_chain(cert, key, lambda: "")
    if ca is not None:
        with _loading(fields, "client_ca_file", str(ca), "a PEM file of certificates"):
            context.load_verify_locations(ca)
    context.verify_mode = auth
    return WebTls(context=context, files=(cert, key, *([ca] if ca else [])), allowed_sans=sans)


_DEFAULT_CIPHERS = "@SECLEVEL=2:ECDH+AESGCM:ECDH+CHACHA20:ECDH+AES:DHE+AES:!aNULL:!eNULL:!aDSS:!SHA1:!AESCCM"
"""CPython's own default; Debian builds Python with OpenSSL's, which has weaker ones."""


def _context(fields: Fields) -> ssl.SSLContext:
    """Return a TLS context with versions, ciphers and curve."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    least = _mapped(fields, "min_version", _VERSIONS, _TOO_OLD) or ssl.TLSVersion.TLSv1_2
    most = _mapped(fields, "max_version", _VERSIONS, _TOO_OLD) or ssl.TLSVersion.TLSv1_3
    if least > most:
        fields.problem("min_version", "is newer than max_version; allowed: the other way round")
    context.minimum_version, context.maximum_version = least, most
    context.set_ciphers(":".join(_ciphers(fields)) or _DEFAULT_CIPHERS)
    if curve := _curve(fields):
        with _loading(fields, "curve_preferences", curve, "a curve that this Python supports, or leave it out"):
            context.set_ecdh_curve(curve)  # Debian's Python 3.11.2 has no X25519 here
    if fields.take_switch("prefer_server_cipher_suites") is False:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    return context


@contextmanager
def _loading(fields: Fields, key: str, files: str, allowed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # SSLError is an OSError
        why = error.reason or "it is no PEM file" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
        fields.problem(key, f"{files}: {why.replace('_', ' ').lower()}; allowed: {allowed}")


def _mapping(fields: Fields, key: str) -> Fields | None:
    """Return the mapping below a key; ``None`` if it is empty."""
    node = fields.take(key)
    if isinstance(node, yaml.ScalarNode) and node.value in {"", "~", "null"}:
        return None
    return fields.take_mapping(key)


def _file(fields: Fields, key: str, folder: Path, *, needed: bool = False) -> Path | None:
    text = fields.take_text(key, "a PEM file, relative to the folder of this file", needed=needed)
    return None if text is None else folder / text


def _mapped(
    fields: Fields, key: str, values: Mapping[str, Value], refused: Mapping[str, str], wrong: Value | None = None
) -> Value | None:
    """Return the meaning of a word, ``wrong`` for an unknown word; ``refused`` has reasons for unsupported words."""
    allowed = ", ".join(values)
    text = fields.take_text(key, allowed)
    if text is None:
        return None
    if text not in values:
        fields.problem(key, f"'{text}' {refused.get(text, 'is not known')}; allowed: {allowed}")
    return values.get(text, wrong)


def _ciphers(fields: Fields) -> tuple[str, ...]:
    found = []
    for name in _texts(fields, "cipher_suites", "names of cipher suites"):
        if name in _CIPHERS:
            found.append(_CIPHERS[name])
        elif name not in _ALWAYS:
            allowed = f"{', '.join(_CIPHERS)}; those of TLS 1.3 are always on"
            fields.problem("cipher_suites", f"'{name}' is not known, or not secure; allowed: {allowed}")
    return tuple(dict.fromkeys(found))


def _curve(fields: Fields) -> str:
    names = _texts(fields, "curve_preferences", ", ".join(_CURVES))
    if not names:
        return ""
    if len(names) > 1 or names[0] not in _CURVES:
        fields.problem("curve_preferences", f"allowed: one of {', '.join(_CURVES)}; or leave it out for all of them")
        return ""
    return _CURVES[names[0]]


def _texts(fields: Fields, key: str, allowed: str) -> tuple[str, ...]:
    node = fields.take(key)
    if node is None:
        return ()
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    texts = tuple(str(item.value).strip() for item in items if isinstance(item, yaml.ScalarNode))
    if not texts or len(texts) != len(items) or len(texts) > _MOST_NAMES or not all(texts):
        fields.problem(key, f"no list of texts, or an empty one; allowed: {allowed}, or leave it out")
        return ()
    return texts


def _http(top: Fields, warnings: list[str]) -> dict[str, str]:
    fields = _mapping(top, "http_server_config")
    if fields is None:
        return {}
    if fields.take_switch("http2"):
        warnings.append(f"web-config: {top.path}: http2: HTTP/2 is not served; HTTP/1.1 is, and every client knows it")
    found: dict[str, str] = {}
    headers = _mapping(fields, "headers")
    if headers is not None:
        for name, values in _HEADERS.items():
            text = headers.take_choice(name, values, " or ".join(values)) if values else headers.take_text(name)
            if text is not None and not text.isascii():
                headers.problem(name, "has letters that no header can have; allowed: ASCII")
            elif text is not None:
                found[name] = text
        headers.finish()
    fields.finish()
    return found


def _users(top: Fields) -> dict[str, bytes]:
    fields = _mapping(top, "basic_auth_users")
    if fields is None:
        return {}
    if not 0 < len(fields.node.value) <= _MOST_USERS:
        top.problem("basic_auth_users", f"empty or too long; allowed: 1 to {_MOST_USERS} users, or leave it out")
        return {}
    users: dict[str, bytes] = {}
    allowed = "a bcrypt hash of a password, as: htpasswd -nBC 10 USER"
    for name in fields:
        if not name or ":" in name or not name.isprintable():
            top.problems.append(f"{fields.place_of(name)}: basic_auth_users: a user's name is text without a colon")
            continue
        text = fields.take_text(name, allowed, needed=True)
        if text is None:
            continue
        match = _HASH.fullmatch(text)
        if match is None:
            fields.problem(name, f"no bcrypt hash; allowed: {allowed}")  # the text may be the password
        elif not _LEAST_COST <= int(match[1]) <= _MOST_COST:
            words = f"a cost of {match[1]} takes too long or nothing; allowed: {_LEAST_COST} to {_MOST_COST}"
            fields.problem(name, words)
        else:
            users[name] = text.encode("ascii")
    return users

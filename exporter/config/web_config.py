"""Reads a web configuration file (TLS, users, headers) in the format of Prometheus' exporter-toolkit."""

import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from exporter.config.yaml_file import Fields, compose, read_text
from exporter.errors import ConfigError

Value = TypeVar("Value")
ClientAuth = Literal["none", "if-given", "required"]
_MOST_USERS, _MOST_NAMES = 1000, 1000
_LEAST_COST, _MOST_COST = 4, 16
_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_TOO_OLD = dict.fromkeys(("TLS10", "TLS11"), "is broken, and not served")
_CLIENT_AUTH: Mapping[str, ClientAuth] = {
    "NoClientCert": "none",
    "VerifyClientCertIfGiven": "if-given",
    "RequireAndVerifyClientCert": "required",
}
_UNVERIFIED = dict.fromkeys(
    ("RequestClientCert", "RequireClientCert", "RequireAnyClientCert"),
    "takes certificates without an authority; use RequireAndVerifyClientCert",
)
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_ALWAYS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Of TLS 1.3: on wherever that is, in Go and here."""
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
"""With the values that each may have; none: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Settings of TLS."""

    cert_file: Path
    """PEM: the certificate, then those between it and its authority."""
    key_file: Path
    client_auth: ClientAuth = "none"
    client_ca_file: Path | None = None
    """PEM: authorities of clients; set unless ``client_auth`` is none."""
    allowed_sans: frozenset[str] = frozenset()
    """Names of which a client's certificate must have one; empty: any will do."""
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ciphers: tuple[str, ...] = ()
    """Of TLS 1.2, by OpenSSL's names, the best first; empty: OpenSSL's own."""
    curve: str = ""
    """By OpenSSL's name; empty: OpenSSL's own."""
    prefer_server_ciphers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSettings:
    """A web configuration without mistakes."""

    path: Path
    tls: TlsSettings | None = None
    """``None``: plain HTTP."""
    users: Mapping[str, bytes] = field(default_factory=dict)
    """Bcrypt hash by user; empty: no password is needed."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Added to every answer that does not have them."""
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The file and all that it names."""
        if self.tls is None:
            return (self.path,)
        named = (self.tls.cert_file, self.tls.key_file, self.tls.client_ca_file)
        return (self.path, *(path for path in named if path is not None))


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """Return the context that secures connections.

    Raises:
        ConfigError: A file cannot be read, is no PEM file, or does not belong to the other.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = tls.min_version, tls.max_version
    context.set_alpn_protocols(["http/1.1"])
    if tls.prefer_server_ciphers:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    else:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if tls.ciphers:
        context.set_ciphers(":".join(tls.ciphers))
    if tls.curve:
        context.set_ecdh_curve(tls.curve)
    pair = f"cert_file, key_file: {tls.cert_file}, {tls.key_file}"
    with _loading(pair, "PEM files that belong together, the key without a passphrase"):
        # A key with a passphrase is refused rather than asked for on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, lambda: "")
    if tls.client_ca_file is not None:
        with _loading(f"client_ca_file: {tls.client_ca_file}", "a PEM file of certificates"):
            context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED if tls.client_auth == "required" else ssl.CERT_OPTIONAL
    return context


@contextmanager
def _loading(what: str, allowed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # which an SSLError is
        raise ConfigError(f"{what}: {_why(error)}; allowed: {allowed}") from None


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no PEM file").replace("_", " ").lower()
    return (error.strerror or str(error)).lower()


def load(path: Path) -> WebSettings:
    """The settings of a file; what it names lies relative to its folder, and has been tried.

    Raises:
        ConfigError: With all mistakes at once: file, line, key, what is wrong and what is allowed.
    """
    text = read_text(path, "web-config", "a web configuration", "allowed: a readable YAML file")
    return parse(text, path)


def parse(text: str, path: Path) -> WebSettings:
    """The settings of a file's text; ``path`` is where it stands.

    Raises:
        ConfigError: With all mistakes at once.
    """
    root, problem = compose(text, str(path))
    if problem:
        raise ConfigError(problem)
    if root is None:
        return WebSettings(path=path, warnings=(f"web-config: {path} is empty: no TLS, no passwords",))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: not a mapping; allowed: tls_server_config, http_server_config, basic_auth_users")
    problems: list[str] = []
    warnings: list[str] = []
    top = Fields(root, str(path), "", problems)
    tls = _tls(top, path.parent)
    headers = _http(top, warnings)
    users = _users(top)
    if top.take("rate_limit") is not None:
        top.problem("rate_limit", "is not served here; leave it out, and limit requests in a proxy if they must be")
    top.finish()
    if not problems and tls is not None:
        try:
            server_context(tls)
        except ConfigError as error:
            problems += [f"{path}: tls_server_config: {words}" for words in error.problems]
    if problems:
        raise ConfigError(*problems)
    if users and tls is None:
        warnings.append(f"web-config: {path}: passwords without TLS can be read on the network")
    return WebSettings(path=path, tls=tls, users=users, headers=headers, warnings=tuple(warnings))


def _tls(top: Fields, folder: Path) -> TlsSettings | None:
    fields = _mapping(top, "tls_server_config")
    if fields is None:
        return None
    cert, key = (_file(fields, name, folder, needed=True) for name in ("cert_file", "key_file"))
    ca = _file(fields, "client_ca_file", folder)
    for inline in ("cert", "key", "client_ca"):
        if fields.take(inline) is not None:
            fields.problem(inline, f"is not read from here; put it into a file and give {inline}_file")
    auth = _mapped(fields, "client_auth_type", _CLIENT_AUTH, _UNVERIFIED, wrong="required") or "none"
    sans = frozenset(_texts(fields, "client_allowed_sans", "names of client certificates"))
    least, most = (_mapped(fields, name, _VERSIONS, _TOO_OLD) for name in ("min_version", "max_version"))
    if least and most and least > most:
        fields.problem("min_version", "is newer than max_version; allowed: the other way round")
    ciphers, curve = _ciphers(fields), _curve(fields)
    prefers = fields.take_switch("prefer_server_cipher_suites") is not False
    fields.finish()
    if (ca is None) != (auth == "none"):
        fields.problem("client_ca_file", "and client_auth_type are nothing without each other; give both or neither")
    if sans and auth != "required":
        fields.problem("client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")
    if cert is None or key is None:
        return None
    return TlsSettings(
        cert_file=cert,
        key_file=key,
        client_auth=auth,
        client_ca_file=ca,
        allowed_sans=sans,
        min_version=least or ssl.TLSVersion.TLSv1_2,
        max_version=most or ssl.TLSVersion.TLSv1_3,
        ciphers=ciphers,
        curve=curve,
        prefer_server_ciphers=prefers,
    )


def _mapping(fields: Fields, key: str) -> Fields | None:
    """A mapping; one that was left empty is none."""
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
    """Return what a word means, ``wrong`` for another one; ``refused`` says why some words mean nothing here."""
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
            allowed = " or ".join(values) or "one line of text"
            text = headers.take_text(name, allowed)
            if text is not None and values and text not in values:
                headers.problem(name, f"'{text}' is not a value of it; allowed: {allowed}")
            elif text is not None and not text.isascii():
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
    for key, _ in fields.node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if not name or ":" in name or not name.isprintable() or name in users:
            line = key.start_mark.line + 1
            if name not in users:  # a name that is given twice is a problem already
                top.problems.append(f"{top.path}:{line}: basic_auth_users: a user's name is text without a colon")
            continue
        text = fields.take_text(name, allowed, needed=True)
        if text is None:
            continue
        match = _HASH.fullmatch(text)
        if match is None:
            fields.problem(name, f"no bcrypt hash; allowed: {allowed}")  # what stands there may be the password
        elif not _LEAST_COST <= int(match[1]) <= _MOST_COST:
            fields.problem(
                name, f"a cost of {match[1]} takes too long or nothing; allowed: {_LEAST_COST} to {_MOST_COST}"
            )
        else:
            users[name] = text.encode("ascii")
    return users

"""How an HTTP face is protected - certificates, passwords, headers - and the door to server-side TLS."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from exporter.errors import ConfigError

ClientAuth = Literal["none", "if-given", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """What TLS is served with."""

    cert_file: Path
    """PEM: the certificate, then those between it and its authority."""
    key_file: Path
    client_auth: ClientAuth = "none"
    client_ca_file: Path | None = None
    """PEM: who may vouch for clients; there unless ``client_auth`` is none."""
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
    """Bcrypt hash by user; empty: nobody is asked for a password."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Added to every answer that does not have them."""
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """All that it was made from."""
        if self.tls is None:
            return (self.path,)
        named = (self.tls.cert_file, self.tls.key_file, self.tls.client_ca_file)
        return (self.path, *(path for path in named if path is not None))


def server_context(tls: TlsSettings) -> ssl.SSLContext:
    """What connections are secured with.

    Raises:
        ConfigError: A file cannot be read, is none, or does not belong to the other.
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
    try:
        # A key with a passphrase is refused rather than asked for on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, lambda: "")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cert_file, key_file: {tls.cert_file}, {tls.key_file}: {_why(error)}; allowed: PEM files that belong"
            " together, the key without a passphrase"
        ) from None
    if tls.client_ca_file is not None:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"client_ca_file: {tls.client_ca_file}: {_why(error)}; allowed: a PEM file of certificates"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED if tls.client_auth == "required" else ssl.CERT_OPTIONAL
    return context


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "it is no PEM file").replace("_", " ").lower()
    return (error.strerror or str(error)).lower()

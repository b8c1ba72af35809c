"""Where a DCGM host engine listens, in every form that nv-hostengine's own clients take."""

import ipaddress
import re

from exporter.config.kinds import Kind

EMBEDDED = "embedded"
DEFAULT_ADDRESS = "localhost:5555"

_DEFAULT_PORT = 5555
_MAX_PORT = 65535
_MAX_SOCKET_PATH = 107
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")


def parse(text: str) -> str:
    """``host:port`` (``[v6]:port``), ``unix:///path`` or ``embedded``; ValueError for anything else."""
    given = text.strip()
    if given == EMBEDDED:
        return EMBEDDED
    path = given.removeprefix("unix://")
    if path.startswith("/") or path != given:
        if not path.startswith("/") or path.endswith("/") or not path.isprintable():
            raise ValueError(text)
        if len(path.encode()) > _MAX_SOCKET_PATH:
            raise ValueError(text)
        return f"unix://{path}"
    host, port = _split(given.removeprefix("tcp://"))
    return f"{host}:{port}"


def _split(given: str) -> tuple[str, int]:
    """Host, in brackets where it is IPv6, and port."""
    bracketed, bracket, rest = given.rpartition("]")
    if bracket:
        host = bracketed.removeprefix("[")
        if host == bracketed or (rest and not rest.startswith(":")):
            raise ValueError(given)
        return _v6(host), _port(rest[1:]) if rest else _DEFAULT_PORT
    if given.count(":") > 1:
        return _v6(given), _DEFAULT_PORT
    host, colon, port = given.partition(":")
    if not _HOST_NAME.fullmatch(host):
        raise ValueError(given)
    return host, _port(port) if colon else _DEFAULT_PORT


def _v6(host: str) -> str:
    ipaddress.IPv6Address(host)
    return f"[{host}]"


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _MAX_PORT):
        raise ValueError(text)
    return int(text)


def _why(text: str) -> str:
    scheme = text.strip().partition("://")[0].lower()
    if scheme == "vsock":
        return "vsock:// is not spoken; let nv-hostengine listen on TCP or a Unix socket"
    if scheme in {"http", "https"}:
        return "an engine does not speak HTTP; give nv-hostengine's own address, port 5555 unless it was changed"
    return ""


ENGINE_ADDRESS = Kind(
    parse=parse,
    noun="an engine's address",
    allowed="HOST, HOST:PORT, [IPV6]:PORT, unix:///path, embedded",
    metavar="HOST:PORT",
    why=_why,
)

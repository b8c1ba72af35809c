"""Checks that the agent or cost service in this container is healthy: exit code 0, else 1 and a line with the reason.

The Dockerfile uses it as HEALTHCHECK; Kubernetes has its own probes. It sends a request to the port that a process of
this container listens on, independent of the configuration, by plain HTTP and then by TLS. `/healthz` needs no
password. A server that requires a client certificate is healthy.
"""

# ruff: noqa: INP001 - a script that is copied into the image

import contextlib
import socket
import ssl
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"
_SECONDS = 2.0
_ENOUGH_BYTES = 64
_GOOD = "200"
_REQUEST = b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n"
_ANYWHERE = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}  # noqa: S104 - connected to, not bound


def _listeners() -> dict[str, tuple[str, int]]:
    """Return the listening addresses by the name of the socket in the open files of a process."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6 on this host
            for line in (_PROC / "self" / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING:
                    address, _, port = words[1].partition(":")
                    found[f"socket:[{words[9]}]"] = (_address(address), int(port, 16))
    return found


def _address(digits: str) -> str:
    """Return the address that /proc shows as words of four bytes in the byte order of the processor."""
    words = [digits[start : start + 8] for start in range(0, len(digits), 8)]
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return str(IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw))  # noqa: PLR2004 - bytes of an IPv4 address


def _own_sockets() -> Iterator[str]:
    """Yield the names of open files of processes in this container; with hostPID, /proc also has other processes."""
    own = (_PROC / "self" / "ns" / "mnt").readlink()
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process ended, or is not readable
            if (process / "ns" / "mnt").readlink() == own:
                yield from (str(file.readlink()) for file in (process / "fd").iterdir())


def _problem(host: str, port: int) -> str:
    """Return the problem of a listener; empty if it is healthy."""
    place = (_own_address(host), port)
    try:
        status = _plain(place) or _encrypted(place)
    except OSError as error:
        return str(error)
    return "" if status == _GOOD else f"HTTP status {status}"


def _own_address(host: str) -> str:
    """Return the address to connect to for a listener on ``host``: for a wildcard, the first usable loopback address.

    Containers of Docker before 26 and hosts without IPv6 have no ::1. A listener on [::] for IPv6 only has no other
    address.
    """
    for address in _ANYWHERE.get(host, ()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    return host


def _plain(place: tuple[str, int]) -> str:
    """Return the HTTP status; empty without a response, because TLS servers close a connection without TLS."""
    with socket.create_connection(place, timeout=_SECONDS) as connection:
        connection.sendall(_REQUEST)
        with contextlib.suppress(ConnectionResetError):
            return _status(connection.recv(_ENOUGH_BYTES))
    return ""


def _encrypted(place: tuple[str, int]) -> str:
    """Return the HTTP status; also good if the server only completes or refuses the handshake, to get a certificate."""
    # The certificate has the name of the node, not localhost; the request and the response contain no secret.
    context = ssl._create_unverified_context()  # noqa: S323, SLF001
    with socket.create_connection(place, timeout=_SECONDS) as connection:
        try:
            encrypted = context.wrap_socket(connection)
        except ssl.SSLError as error:
            if "ALERT" in str(error.reason):
                return _GOOD
            raise
        with encrypted, contextlib.suppress(ssl.SSLError, ConnectionError):
            encrypted.sendall(_REQUEST)
            return _status(encrypted.recv(_ENOUGH_BYTES)) or _GOOD
    return _GOOD


def _status(answer: bytes) -> str:
    version, _, rest = answer.decode("latin-1").partition(" ")
    return rest[:3] if version.startswith("HTTP/") else ""


def main() -> int:
    """Check all listeners; one healthy listener is enough."""
    listeners = _listeners()
    asked = {listeners[name] for name in _own_sockets() if name in listeners}
    problems = {place: _problem(*place) for place in sorted(asked)}
    if "" in problems.values():
        return 0
    reported = "; ".join(f"{host} port {port}: {problem}" for (host, port), problem in problems.items())
    print(reported or "no process of this container listens on a port")  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())

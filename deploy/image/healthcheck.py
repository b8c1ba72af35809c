"""Whether the agent or the cost service in this container is alive: exit code 0, else 1 and a line that says why.

The HEALTHCHECK of the Dockerfile; Kubernetes has probes of its own. It asks the port that a process of this container
listens on, whatever flag, variable or file named it, by plain HTTP and then by TLS. `/healthz` needs no password, and
who wants a certificate of the client is alive, too.
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
_ANYWHERE = {"0.0.0.0": ("127.0.0.1",), "::": ("::1", "127.0.0.1")}  # noqa: S104 - to be asked, not to be bound


def _listeners() -> dict[str, tuple[str, int]]:
    """Where somebody listens, by the socket's name in a process' list of files."""
    found = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6 here
            for line in (_PROC / "self" / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING:
                    address, _, port = words[1].partition(":")
                    found[f"socket:[{words[9]}]"] = (_address(address), int(port, 16))
    return found


def _address(digits: str) -> str:
    """The kernel writes words of four bytes, each in the processor's order."""
    words = [digits[start : start + 8] for start in range(0, len(digits), 8)]
    raw = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return str(IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw))  # noqa: PLR2004 - bytes of an IPv4 address


def _own_sockets() -> Iterator[str]:
    """Names of what processes of this container have open; in the host's PID namespace there are others, too."""
    own = (_PROC / "self" / "ns" / "mnt").readlink()
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or somebody else's
            if (process / "ns" / "mnt").readlink() == own:
                yield from (str(file.readlink()) for file in (process / "fd").iterdir())


def _problem(host: str, port: int) -> str:
    """What is wrong with who listens there; empty if nothing is."""
    place = (_own_address(host), port)
    try:
        status = _plain(place) or _encrypted(place)
    except OSError as error:
        return str(error)
    return "" if status == _GOOD else f"HTTP status {status}"


def _own_address(host: str) -> str:
    """Where to ask who listens on a host: of any address by the first that is here.

    Docker before 26 leaves containers without ::1, and so do hosts without IPv6; who listens on [::] for IPv6 alone
    has no other.
    """
    for address in _ANYWHERE.get(host, ()):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return address
    return host


def _plain(place: tuple[str, int]) -> str:
    """The status of the answer; empty where there is none, as TLS servers hang up on who does not speak TLS."""
    with socket.create_connection(place, timeout=_SECONDS) as connection:
        connection.sendall(_REQUEST)
        with contextlib.suppress(ConnectionResetError):
            return _status(connection.recv(_ENOUGH_BYTES))
    return ""


def _encrypted(place: tuple[str, int]) -> str:
    """The status of the answer; good where the server shook hands, or refused to: it wants a certificate, and lives."""
    # The name in the certificate is that of the node; nothing secret is asked or told.
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
    """Ask until one is alive."""
    listeners = _listeners()
    asked = {listeners[name] for name in _own_sockets() if name in listeners}
    problems = {place: _problem(*place) for place in sorted(asked)}
    if "" in problems.values():
        return 0
    told = "; ".join(f"{host} port {port}: {problem}" for (host, port), problem in problems.items())
    print(told or "nobody listens in this container")  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())

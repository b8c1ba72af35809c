"""Whether anything listens where a DCGM host engine should be, and if not, why: the library's answer is one for all."""

import socket
from collections.abc import Callable

from exporter.errors import SourceError

UNIX = "unix://"


def knock(address: str, timeout_seconds: float, by: Callable[[str, float], None] | None = None) -> str:
    """See whether anybody takes a connection at an address.

    Args:
        address: ``host:port`` or ``unix:///path``.
        timeout_seconds: How long to wait for an answer.
        by: What to try it with, instead of a socket; raises what that would.

    Returns:
        Where that was, without a name to look up: libdcgm would look up IPv4 alone, and take the first of several.

    Raises:
        SourceError: nobody does; the message tells why, and the mend.
    """
    try:
        if by is None:
            return _knock_at_socket(address, timeout_seconds)
        by(address, timeout_seconds)
    except (OSError, UnicodeError) as error:
        raise _unreachable(address, error) from error
    return address


def _knock_at_socket(address: str, timeout_seconds: float) -> str:
    path = address.removeprefix(UNIX)
    if path != address:
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(timeout_seconds)
            one.connect(path)
        return address
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout_seconds) as reached:
        number = reached.getpeername()[0]
    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"


def _unreachable(address: str, error: OSError | UnicodeError) -> SourceError:
    if isinstance(error, socket.gaierror | UnicodeError):
        why = error.strerror if isinstance(error, OSError) else "no name can be so"
        return SourceError(
            "dcgm_no_such_host",
            f"no host of the name in {address} is known ({why}): correct --dcgm-address, or see the DNS",
        )
    if isinstance(error, ConnectionRefusedError):
        return SourceError(
            "dcgm_refused",
            f"nothing listens at {address}: start nv-hostengine there (systemctl start nvidia-dcgm, or the GPU"
            " Operator's dcgm pod), or correct --dcgm-address",
        )
    if address.startswith(UNIX) and isinstance(error, FileNotFoundError | NotADirectoryError):
        return SourceError(
            "dcgm_socket_missing",
            f"there is no socket {address}: start nv-hostengine with -d and this path, mount the socket into the"
            " container, or correct --dcgm-address",
        )
    if isinstance(error, PermissionError) and address.startswith(UNIX):
        return SourceError(
            "dcgm_no_permission",
            f"this user may not open the socket {address}: run as a user or group that may write to it",
        )
    told = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return SourceError(
        "dcgm_unreachable",
        f"{address} cannot be reached ({told}): see whether a network policy or a firewall is in between, or correct"
        " --dcgm-address",
    )

"""Why a unix socket cannot be talked to, found by stat and connect: a gRPC status code does not tell."""

import os
import socket
import stat
from pathlib import Path

from exporter.errors import AttributionError

_CONNECT_SECONDS = 0.2
LONGEST_PATH_BYTES = 107
MEND_PATH = "set --kubelet-socket to <kubelet root>/pod-resources/kubelet.sock"


def check(path: str) -> None:
    """Look whether somebody listens on the kubelet's socket.

    Args:
        path: Of the socket.

    Raises:
        AttributionError: ``no_socket``, ``not_a_socket``, ``no_permission``, ``refused`` or ``bad_path``, with how to
            mend it. Nothing is raised where a connection is accepted, or a busy listener does not come to it.
    """
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            raise AttributionError("not_a_socket", f"{path} is not a socket; {MEND_PATH}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_CONNECT_SECONDS)
            probe.connect(path)
    except FileNotFoundError as error:
        raise AttributionError("no_socket", _missing(path)) from error
    except PermissionError as error:
        raise AttributionError(
            "no_permission",
            f"no permission for {path}: run as user 0 (no capability is needed), and under SELinux as a type that may"
            " connect to the kubelet",
        ) from error
    except ConnectionRefusedError as error:
        raise AttributionError(
            "refused",
            f"nobody listens on {path}: the kubelet is stopped, or its socket file was mounted instead of the"
            " directory and is left over from before a restart",
        ) from error
    except (TimeoutError, BlockingIOError):
        pass  # it exists, and is too busy to accept
    except (OSError, ValueError) as error:  # a name too long for a socket, a file on the way, a NUL
        raise AttributionError("bad_path", f"kubelet socket {path!r}: {error}; {MEND_PATH}") from error


def identity(path: str) -> tuple[int, int] | None:
    """Return what differs between two sockets that were made at one path; ``None`` where there is none.

    An inode number alone can be used again by the next socket.
    """
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_ctime_ns


def check_length(path: str) -> None:
    """Refuse a path that no unix socket can have; gRPC would complain of it on stderr.

    Raises:
        AttributionError: ``bad_path``.
    """
    length = len(os.fsencode(path))
    if length > LONGEST_PATH_BYTES:
        raise AttributionError(
            "bad_path", f"kubelet socket {path}: {length} bytes; allowed: {LONGEST_PATH_BYTES}; {MEND_PATH}"
        )


def _missing(path: str) -> str:
    if Path(path).parent.is_dir():
        return f"no kubelet socket at {path}: start the kubelet, or {MEND_PATH}"
    return f"no directory for the kubelet socket {path}: mount the directory, never the socket file, and {MEND_PATH}"

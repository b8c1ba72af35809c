"""Binds the socket that pages are served on."""

import socket

from exporter.errors import ExporterError

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: one that it must drop tries again after a second."""
SEND_BYTES = 262_144
"""What the kernel keeps of an answer that nobody takes (it doubles this); by itself it goes up to megabytes."""


def bind(host: str, port: int) -> socket.socket:
    """Bind the listening socket first, so that a port in use ends the program before anything is started.

    Raises:
        ExporterError: It cannot be bound: not now, since who has the port may end, and an address may come.
    """
    try:
        family = socket.AF_INET6 if ":" in host or not host else socket.AF_INET
        dual_stack = family is socket.AF_INET6 and not host and socket.has_dualstack_ipv6()
        if not host and not dual_stack:
            family = socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # create_server repeats the address there
        raise ExporterError(
            f"listen: cannot listen on '{host}:{port}': {why}; free the port or choose another address with --listen"
        ) from error
    return listener

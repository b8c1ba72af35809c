"""Binds the socket that pages are served on."""

import socket

from exporter.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """Bind the listening socket first, so that a port in use ends the program before anything is started.

    Raises:
        ConfigError: It cannot be bound.
    """
    try:
        family = socket.AF_INET6 if ":" in host or not host else socket.AF_INET
        dual_stack = family is socket.AF_INET6 and not host and socket.has_dualstack_ipv6()
        if not host and not dual_stack:
            family = socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=dual_stack)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # create_server repeats the address there
        raise ConfigError(
            f"listen: cannot listen on '{host}:{port}': {why}; free the port or choose another address with --listen"
        ) from error

"""How much clients may ask of an HTTP face at a time, and how long they may take."""

from dataclasses import dataclass, replace

RESERVED_DESCRIPTORS = 128
"""For files, children, the kubelet and the API: a flood of clients must not cost the agent its sources."""
_FEWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one HTTP face allows all its clients together, or each of them where it says so."""

    connections: int = 100
    """Connections that have sent something."""
    silent: int = 400
    """Connections that have sent nothing yet; they cost a descriptor and next to no memory."""
    answers: int = 64
    """Requests that are being answered."""
    line_bytes: int = 8190
    """Of a request line, and of a header."""
    headers: int = 64
    """Of a request."""
    head_bytes: int = 65_536
    """Of all that one connection sends until its request is taken up."""
    body_bytes: int = 1024
    """Of a request."""
    handshake_seconds: float = 10.0
    """For TLS."""
    head_seconds: float = 10.0
    """From the first byte of a request (of the first one: from the connection) to the end of its headers."""
    body_seconds: float = 10.0
    """From the end of the headers to that of the body."""
    stalled_seconds: float = 10.0
    """Without taking a byte of an answer."""
    answer_seconds: float = 60.0
    """To take all of it."""
    idle_seconds: float = 120.0
    """Between two requests: more than a usual scrape interval, so that Prometheus keeps its connection."""


def fitting(limits: Limits, descriptors: int) -> Limits:
    """Fewer connections where the process may not open that many files.

    Args:
        limits: As they should be.
        descriptors: Most files of the process (``RLIMIT_NOFILE``).
    """
    room = descriptors - RESERVED_DESCRIPTORS
    if limits.connections + limits.silent <= room:
        return limits
    connections = max(_FEWEST, min(limits.connections, room // 2))
    return replace(limits, connections=connections, silent=max(_FEWEST, min(limits.silent, room - connections)))

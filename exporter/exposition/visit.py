"""One connection: what comes in is handed on to aiohttp, and how its client behaves is remembered."""

import asyncio
import contextlib
import fcntl
import socket
import struct
import termios
from collections.abc import Callable

from aiohttp import web

from exporter.exposition.limits import Limits
from exporter.exposition.protocol import SERVER, UNLESS_SAID

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: what is not sent is thrown away; the kernel need not keep it for a client that takes nothing."""
_ACKED = struct.Struct("=120xQ")
"""Of ``struct tcp_info``: bytes that the other end has confirmed."""
_FAREWELL_SECONDS = 1.0
_FRESH_TURNS = 10
"""Of the loop: from being let in to being read takes five, however long one is."""
_FRESH_SECONDS = 0.5
"""For a handshake with a client that is not far away."""


class Visit(asyncio.Protocol):
    """A connection that has sent something. All times are the loop's, in seconds.

    Args:
        peer: Whose it is.
        inner: aiohttp's own protocol.
        limits: Of each connection.
        left: Told when it is over.
        turn: Of the loop, in which it came.
    """

    def __init__(
        self, peer: str, inner: web.RequestHandler, limits: Limits, left: Callable[["Visit"], None], *, turn: int
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.peer = peer
        self.inner = inner
        self.known = False
        """Whether it has asked for something that it was given: neither refused nor wrong."""
        self.answering = False
        """Whether a handler is at work for it."""
        self.quiet_since = now
        """When it last asked, was answered, or began."""
        self.opening: asyncio.Task[None] | None = None
        """Makes it, TLS included; over when the transport is there."""
        self._limits = limits
        self._left = left
        self._turn = turn
        self._transport: asyncio.Transport | None = None
        self._head_since: float | None = now
        self._head_bytes = 0
        self._sending_since: float | None = None
        self._stalled_since = now
        self._acked = 0
        self._has_asked = False
        self._is_unread = True
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop, with TLS after the handshake."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - of TCP, as all that come here
        self._transport = transport
        self._head_since = asyncio.get_running_loop().time()
        self.inner.connection_made(transport)
        if self._is_over:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        if self._is_over:
            return
        if self._head_since is None:
            self._head_since = asyncio.get_running_loop().time()
        self._head_bytes += len(data)
        self._is_unread = False
        if self._head_bytes > self._limits.head_bytes:
            self._turn_away(data)
        else:
            self.inner.data_received(data)

    def eof_received(self) -> None:
        """Called by the loop, which then closes the connection."""
        if not self._is_over:
            self.inner.eof_received()

    def pause_writing(self) -> None:
        """Called by the loop."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Called by the loop."""
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._is_over = True
        self._left(self)
        self.inner.connection_lost(exc)

    @property
    def is_open(self) -> bool:
        """Whether requests can come in, with TLS after the handshake."""
        return self._transport is not None

    @property
    def is_secured(self) -> bool:
        """Whether it speaks TLS."""
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def begin(self, now: float) -> None:
        """A request is taken up."""
        self._has_asked = True
        self.answering = True
        self.quiet_since = now
        self._head_since, self._head_bytes = None, 0

    def finish(self, now: float) -> None:
        """Its answer is made, and about to be sent."""
        self.answering = False
        self.quiet_since = self._sending_since = self._stalled_since = now
        self._head_since, self._head_bytes = None, 0

    def unsent_bytes(self) -> int:
        """What is written and not yet confirmed by the other end."""
        transport = self._transport
        own = transport.get_extra_info("socket") if transport else None
        if transport is None or own is None or own.fileno() < 0:
            return 0
        (queued,) = struct.unpack("i", fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
        return int(queued) + self.buffered_bytes()

    def buffered_bytes(self) -> int:
        """What of it is in this process's memory; with TLS there may be as much again below."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def takes_nothing(self, now: float, seconds: float) -> bool:
        """Whether its answer has not got on for so long, as far as ``is_late`` has looked."""
        return not self.answering and now - self._stalled_since >= seconds and self.unsent_bytes() > 0

    def is_fresh(self, turn: int, now: float) -> bool:
        """Whether it has just come, and what it has sent cannot have been taken up yet."""
        return turn - self._turn < _FRESH_TURNS or (self._is_unread and now - self.quiet_since < _FRESH_SECONDS)

    def is_late(self, now: float) -> bool:
        """Whether it takes longer than it may for what it does. To be asked about once a second."""
        limits = self._limits
        if self._transport is None:
            return now - self.quiet_since > limits.handshake_seconds
        if self.answering:
            return False
        if self._sending_since is not None:
            if self.unsent_bytes() == 0:
                self._sending_since = None
            else:
                self._look(now)
                stalled = now - self._stalled_since > limits.stalled_seconds
                return stalled or now - self._sending_since > limits.answer_seconds
        return self._head_since is not None and now - self._head_since > limits.head_seconds

    def is_idle(self, now: float) -> bool:
        """Whether it has asked for nothing for too long."""
        return not self.answering and now - self.quiet_since > self._limits.idle_seconds

    def end(self, *, at_once: bool) -> None:
        """Close it; ``at_once`` throws away what is not sent yet."""
        self._is_over = True
        if self._transport is None:
            if self.opening:
                self.opening.cancel()
        elif at_once:
            _reset(self._transport)
        else:
            self._transport.close()

    def _look(self, now: float) -> None:
        """Note whether the other end has taken something since the last look."""
        acked = _acked(self._transport)
        if acked != self._acked:
            self._acked, self._stalled_since = acked, now

    def _turn_away(self, data: bytes) -> None:
        """More than any request needs: say so where nothing else has been said, and listen no more."""
        self._is_over = True
        if self._transport is None:
            return
        if not self._has_asked:
            self._transport.write(_TOO_LONG_BODY if b"\r\n\r\n" in data else _TOO_LONG_HEAD)
        # A close now would answer what still comes with a reset, which may overtake the answer.
        asyncio.get_running_loop().call_later(_FAREWELL_SECONDS, _reset, self._transport)


def refusal(status: int, reason: str, words: str, *, retry_seconds: int | None = None) -> bytes:
    """A whole answer that ends the connection, for where aiohttp has not been let in."""
    headers = {"Content-Type": "text/plain; charset=utf-8", "Server": SERVER, **UNLESS_SAID}
    if retry_seconds is not None:
        headers["Retry-After"] = str(retry_seconds)
    headers |= {"Connection": "close", "Content-Length": str(len(words) + 1)}
    lines = (f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in headers.items()))
    return ("\r\n".join(lines) + f"\r\n\r\n{words}\n").encode("ascii")


def reset(connection: socket.socket) -> None:
    """Close a socket, and let the kernel keep nothing of it."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


def _reset(transport: asyncio.Transport) -> None:
    own = transport.get_extra_info("socket")
    if own is not None:
        with contextlib.suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


_TOO_LONG_HEAD = refusal(431, "Request Header Fields Too Large", "these headers are longer than any need be")
_TOO_LONG_BODY = refusal(413, "Content Too Large", "this request is longer than any need be")


def _acked(transport: asyncio.Transport | None) -> int:
    own = transport.get_extra_info("socket") if transport else None
    if own is None:
        return 0
    try:
        return int(_ACKED.unpack(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size))[0])
    except (OSError, struct.error):
        return 0

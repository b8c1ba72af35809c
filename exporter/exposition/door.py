"""Accepts connections, a few at a time, and lets those in who say something, the client with the fewest first."""

import asyncio
import contextlib
import errno
import resource
import socket
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from exporter.exposition.connections import CONNECTIONS, RETRY_SECONDS, SWEEP_SECONDS, Connections, options
from exporter.exposition.limits import fitting
from exporter.exposition.peers import peer_of
from exporter.exposition.protocol import Protocol
from exporter.exposition.visit import Visit, refusal, reset

if TYPE_CHECKING:
    import ssl

ACCEPTED_ONCE = 64
LET_IN_ONCE = 8
"""Far fewer than there is place for: who has come in is read before those behind him need his place."""
SOON_SECONDS = 0.01
"""Until it is looked again whether there is room."""
FRESH_SECONDS = 0.05
SILENT_A_SECOND = 4000.0
"""As many can come and go; so there is a tenth of a second for a client to send its request after it has connected."""
WAIT_SECONDS = 0.25
"""Most that one waits before the door while there is no place to wait for others."""
PAUSE_SECONDS = 0.1
"""Without a descriptor to accept with."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_DRAIN_BYTES = 65_536
_NO_ROOM = refusal(
    503, "Service Unavailable", "all connections are in use; ask again in a second", retry_seconds=RETRY_SECONDS
)


@dataclass(eq=False, slots=True, kw_only=True)
class _Outside:
    """A connection that is accepted, and not let in yet."""

    socket: socket.socket
    peer: str
    since: float
    knocks: bool = False
    """Whether it has sent something."""
    is_in: bool = False
    """Whether the socket is a transport's, which closes it."""


class Door:
    """A listening socket on which a runner's application is served.

    Args:
        listener: Bound; closed at the end.
        runner: Set up, of an application with ``CONNECTIONS``.
    """

    def __init__(self, listener: socket.socket, runner: web.AppRunner) -> None:
        if runner.server is None:
            raise RuntimeError("the runner is not set up")
        self.context: ssl.SSLContext | None = None
        """What the next connections are secured with; ``None``: plain HTTP."""
        self._listener = listener
        self._connections: Connections = runner.app[CONNECTIONS]
        self._loop = asyncio.get_running_loop()
        self._outside: defaultdict[str, dict[_Outside, None]] = defaultdict(dict)
        self._count = 0
        self._letting_in = False
        self._sweeping: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections.limits = fitting(self._connections.limits, descriptors)
        limits = options(self._connections.limits)
        self._protocol = partial(Protocol, runner.server, loop=self._loop, **limits)

    def open(self) -> None:
        """Begin to accept."""
        self._listener.settimeout(0)
        self._loop.add_reader(self._listener, self._accept)
        self._sweep()

    def close(self) -> None:
        """Accept no more; who is in stays."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
        if self._sweeping:
            self._sweeping.cancel()
        for group in list(self._outside.values()):
            for one in list(group):
                self._turn_out(one)
        for task in self._opening:
            task.cancel()
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_ONCE):
            if self._count > self._connections.limits.silent and not self._make_way():
                self._pause(SOON_SECONDS)  # all of them have just come: the kernel keeps the others meanwhile
                return
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                if self._make_way():
                    continue
                self._pause(PAUSE_SECONDS)
                return
            connection.settimeout(0)
            one = _Outside(socket=connection, peer=peer_of(address), since=self._loop.time())
            self._outside[one.peer][one] = None
            self._count += 1
            # By number: of a socket the loop first makes a text, with two calls of the kernel.
            self._loop.add_reader(connection.fileno(), self._hear, one)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _make_way(self) -> bool:
        """Of the client with the most outside, the oldest that has sent nothing goes; whether any could.

        Where it has all sent something and waits for long, its newest is told to ask again: only so is a client with
        fewer found behind them.
        """
        now, silent = self._loop.time(), self._connections.limits.silent
        old = now - max(FRESH_SECONDS, silent / SILENT_A_SECOND)
        for crowd in sorted(self._outside.values(), key=len, reverse=True):
            if leaves := next((one for one in crowd if not one.knocks and one.since <= old), None):
                self._turn_out(leaves)
                self._connections.ended("made_way")
                return True
            waits = now - next(iter(crowd)).since >= WAIT_SECONDS
            if waits and (newest := next((one for one in reversed(crowd) if one.knocks), None)):
                self._forget(newest)
                self._refuse(newest)
                return True
            if 2 * len(crowd) > silent:
                return False  # others are not to make way for one client
        return False

    def _hear(self, one: _Outside) -> None:
        """It has sent something, or has gone."""
        self._loop.remove_reader(one.socket.fileno())
        one.knocks = True
        if not self._letting_in:
            self._letting_in = True
            self._loop.call_soon(self._let_in)

    def _let_in(self) -> None:
        self._connections.turn += 1
        crowd = self._connections.crowd()
        queue = []
        for peer, group in self._outside.items():
            place = crowd[peer]
            for one in group:
                if one.knocks:
                    queue.append((place, one.since, one))
                    place += 1
        queue.sort(key=lambda each: each[:2])
        wait_seconds = 0.0
        for _, _, one in queue[:LET_IN_ONCE]:
            if not self._admit(one):
                wait_seconds = SOON_SECONDS
                break
        self._letting_in = len(queue) > LET_IN_ONCE or wait_seconds > 0
        if self._letting_in:
            self._loop.call_later(wait_seconds, self._let_in)

    def _admit(self, one: _Outside) -> bool:
        """Let it in or turn it away; false where that is not to be decided yet."""
        if _has_gone(one.socket):
            self._forget(one)
            one.socket.close()
            return True
        room = self._connections.make_room(one.peer, self._loop.time())
        if room == "soon":
            return False
        self._forget(one)
        if room == "free":
            visit = self._connections.enter(one.peer, self._protocol())
            visit.opening = asyncio.ensure_future(self._open(one, visit))
            self._opening.add(visit.opening)
            visit.opening.add_done_callback(partial(self._opened, one, visit))
        else:
            self._refuse(one)
        return True

    def _refuse(self, one: _Outside) -> None:
        self._connections.ended("refused")
        if self.context:
            reset(one.socket)
        else:
            _tell_to_return(one.socket)

    async def _open(self, one: _Outside, visit: Visit) -> None:
        """Take up TLS where there is some, and hand the connection to aiohttp."""
        limits, context = self._connections.limits, self.context
        one.is_in = True
        with contextlib.suppress(OSError):  # of TLS, or it has gone: what clients do wrong is not logged
            await self._loop.connect_accepted_socket(
                lambda: visit,
                one.socket,
                ssl=context,
                ssl_handshake_timeout=limits.handshake_seconds if context else None,
                ssl_shutdown_timeout=limits.stalled_seconds if context else None,
            )

    def _opened(self, one: _Outside, visit: Visit, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        visit.opening = None
        if not visit.is_open:
            self._connections.leave(visit)
        if not one.is_in:  # it was sent off before it was its turn
            reset(one.socket)

    def _forget(self, one: _Outside) -> None:
        group = self._outside[one.peer]
        del group[one]
        if not group:
            del self._outside[one.peer]
        self._count -= 1

    def _turn_out(self, one: _Outside) -> None:
        self._forget(one)
        self._loop.remove_reader(one.socket.fileno())
        reset(one.socket)

    def _sweep(self) -> None:
        """End who has said nothing for too long; they are in the order in which they came."""
        oldest = self._loop.time() - self._connections.limits.head_seconds
        for group in list(self._outside.values()):
            for one in list(group):
                if one.since > oldest:
                    break
                self._turn_out(one)
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)


def _has_gone(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _tell_to_return(connection: socket.socket) -> None:
    """Answer without reading the request; what has come of it is taken, since a reset would overtake the answer."""
    with contextlib.suppress(OSError):
        connection.recv(_DRAIN_BYTES)
        connection.send(_NO_ROOM)
        connection.shutdown(socket.SHUT_WR)
    connection.close()

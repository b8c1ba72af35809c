"""Serves an aiohttp application on one socket, with limits for all clients and deadlines for each connection."""

import asyncio
import contextlib
import gc
import io
import logging
import math
import resource
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Final, Literal, cast

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_request import BaseRequest

from exporter.errors import ExporterError
from exporter.web.access import ALIVE, ALIVE_TOO, READY, WebAccess, plain

LOG = logging.getLogger("exporter.http")
PROBES: Final = (ALIVE, ALIVE_TOO, READY)
"""Paths that are answered beyond every limit: a restart by the kubelet does not help a busy agent."""
RESERVED_DESCRIPTORS = 128
"""File descriptors for files, child processes, the kubelet and the API, which clients cannot use."""
BACKLOG = 1024
"""Connections in the kernel's queue. If the kernel drops one, its client retries after a second."""
SEND_BYTES = 131_072
"""Size of the kernel's send buffer per client; the kernel doubles it. The default size grows to megabytes."""
UNREAD_SECONDS = 10
"""Seconds until the kernel resets the connection of a client that does not read its response."""
PIECE_BYTES = 65_536
"""Longer responses are sent in pieces, so that a client that does not read causes no copy in memory."""
RETRY_SECONDS = 1
SWEEP_SECONDS = 1.0
LOG_SECONDS = 60.0
"""Seconds between two log lines about clients."""
FRESH_SECONDS = 0.05
"""Seconds for a new client to send its request, before its connection can be closed for another client."""
STALLED_SECONDS = 1.0
"""Seconds in the same state, after which a connection can be closed for another client."""
PAUSE_SECONDS = 0.01
"""Seconds until the next attempt to accept a connection, if none can be closed."""
_ACCEPTED_ONCE = 16
_MADE_WAY_ONCE = 4
"""Connections that are closed at once for waiting clients; the number of these clients is unknown."""
_RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER: the kernel drops unsent data and resets the connection."""
State = Literal["head", "body", "making", "sending", "idle"]
"""State of a connection: reads a head, reads a body, makes the response, sends it, waits for the next request."""
_HEADERS = {
    hdrs.SERVER: "gpu-cost-exporter",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
}
"""Headers that a response gets if it does not set them; no header shows a library or its version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server: ``connections`` and ``answers`` over all clients, the rest per connection or request."""

    connections: int = 128
    """Maximum number of open connections. A connection with TLS uses about 0.7 MiB."""
    answers: int = 64
    """Maximum number of responses that are made or sent at once; probes do not count against it."""
    line_bytes: int = 8190
    """Maximum size of a request line, and of a header."""
    headers: int = 64
    """Maximum number of headers of a request."""
    head_bytes: int = 65_536
    """Maximum number of bytes that a client sends before its request is handled."""
    body_bytes: int = 1024
    """Maximum size of the body of a request."""
    head_seconds: float = 10.0
    """Time for the head of a request, from the connection or from the first byte of a later request. Also the time
    for a TLS handshake, and for a body."""
    answer_seconds: float = 60.0
    """Time for the client to read a response."""
    idle_seconds: float = 120.0
    """Time between two requests; longer than a usual scrape interval, so that Prometheus keeps its connection."""

    def within(self, descriptors: int) -> "Limits":
        """Return the limits for a number of file descriptors (``RLIMIT_NOFILE``)."""
        connections = max(8, min(self.connections, descriptors - RESERVED_DESCRIPTORS))
        return replace(self, connections=connections, answers=min(self.answers, connections // 2))


def bind(host: str, port: int) -> socket.socket:
    """Bind the listening socket. Call it first, so that a port in use ends the program before the rest starts.

    Raises:
        ExporterError: The socket cannot be bound now. A retry can succeed, once the port is free or the address exists.
    """
    try:
        dual_stack = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if ":" in host or dual_stack else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=dual_stack)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while")[0]  # create_server repeats the address there
        raise ExporterError(
            f"listen: cannot listen on '{host}:{port}': {why}; free the port or choose another address with --listen"
        ) from error
    return listener


class Connection(web.RequestHandler):
    """Extends aiohttp's protocol of one connection: it reports its state to the server."""

    def __init__(self, keeper: "HttpServer", own_socket: socket.socket, manager: web.Server, **options: Any) -> None:  # noqa: ANN401 - aiohttp's
        super().__init__(manager, **options)
        self.keeper = keeper
        self.own_socket = own_socket
        self.channel: asyncio.Transport | None = None
        """Transport while the connection is open; with TLS, only after the handshake."""
        self.opening = asyncio.current_task()
        self.state: State | Literal["cut"] = "head"
        self.since = 0.0
        """Start of the state; loop time, as is the deadline."""
        self.deadline = math.inf
        self.received = 0
        """Bytes that were received in this state."""
        self.is_deaf = False
        """Whether the connection is closing; further data from the client is dropped."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for a request; called by the loop."""
        super().connection_made(transport)
        self.channel = cast("asyncio.Transport", transport)
        if self.state == "cut":
            self.channel.abort()
        self.keeper.enter(self, "head")

    def data_received(self, data: bytes) -> None:
        """Pass received data to the parser, up to a limit; called by the loop."""
        if self.is_deaf:
            return
        if self.state == "idle":
            self.keeper.enter(self, "head")
        self.received += len(data)
        requests, self.is_deaf = self._request_count, self.received > self.keeper.limits.head_bytes
        super().data_received(data)
        has_new = self._request_count > requests
        if self.is_deaf and self.state == "head" and not has_new:
            self.force_close()
        elif self.is_deaf:
            self.close()  # after the responses to the requests so far
        if self.state == "head" and has_new:
            self.keeper.enter(self, "body")

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection; called by the loop."""
        self.keeper.forget(self)
        self.channel = None  # with TLS it has buffers, which stay in memory until a garbage collection
        super().connection_lost(exc)

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; called by aiohttp."""
        for name, value in _HEADERS.items():
            resp.headers.setdefault(name, value)
        self.keeper.enter(self, "sending")
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if not resp.keep_alive:
                self.is_deaf = True
                self.close()
            self.keeper.enter(self, "idle")

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the response to an invalid request or a failed handler; called by aiohttp."""
        if status == web.HTTPBadRequest.status_code:
            # The message of the parser names the library.
            message = "this is not an unambiguous HTTP/1.1 request, or its headers are too long\n"
        return super().handle_error(request, status, exc, message)


@dataclass(slots=True, kw_only=True, eq=False)
class HttpServer:
    """Serves an application within limits.

    At the limit of connections, it closes one that waits for its client. At most ``answers`` connections do not wait
    for their clients, so a probe can always connect.
    """

    app: web.Application
    """Application to serve; the server adds its middlewares."""
    listener: socket.socket
    """Bound socket; the server closes it at the end."""
    shutdown_seconds: float
    """Time for open requests to finish at the end."""
    access: WebAccess | None = None
    """Access control; ``None``: plain HTTP without passwords."""
    count: Callable[[str, str], None] = lambda _part, _reason: None
    """Counts an error by part and reason: ``http``: ``made_way``, ``refused`` or ``slow``; ``web``: ``config``."""
    remark: str = ""
    """Text after the address in the log."""
    limits: Limits = field(default_factory=Limits)
    _runner: web.AppRunner = field(init=False)
    _open: dict[Connection, None] = field(init=False, default_factory=dict)
    """Open connections, in the order in which their states began."""
    _opening: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    _ended: Counter[str] = field(init=False, default_factory=Counter)
    _logged_at: float = field(init=False, default=-math.inf)

    async def serve(
        self,
        stop: asyncio.Event,
        parts: Iterable[Callable[[], Awaitable[object]]],
        last: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve until ``stop`` is set.

        Args:
            stop: Event that ends the server; the caller sets it.
            parts: Tasks to run meanwhile; the first that ends stops the server, and its error, if any, is raised.
            last: Runs after the parts, while requests are still answered.
        """
        parts = [*parts, self.watch]
        if self.access:
            parts.append(partial(self.access.watch, partial(self.count, "web", "config")))
        stopping = asyncio.ensure_future(stop.wait())
        tasks: list[asyncio.Future[Any]] = [stopping]
        async with self.running():
            try:
                # Permanent objects need no garbage collection: a full collection takes 40 ms.
                gc.collect()
                gc.freeze()
                LOG.info("listening on %s:%d%s", *self.listener.getsockname()[:2], self.remark)
                for part in parts:
                    tasks.append(asyncio.ensure_future(part()))  # noqa: PERF401 - started tasks end if the next fails to start
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stopping}:
                    task.result()
            finally:
                LOG.info("ending")
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await last()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Accept connections and answer requests until the block ends. Deadlines need ``watch``."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limits = self.limits.within(descriptors)
        LOG.addFilter(_is_ours)
        if self.access:
            self.app.middlewares.insert(0, self.access.guard)
        self.app.middlewares.insert(0, self._limited)
        # The handler is cancelled when its client disconnects.
        self._runner = web.AppRunner(
            self.app, handle_signals=False, shutdown_timeout=self.shutdown_seconds, handler_cancellation=True
        )
        await self._runner.setup()
        self.listener.settimeout(0)
        self._resume()
        try:
            yield
        finally:
            asyncio.get_running_loop().remove_reader(self.listener)
            self.listener.close()
            for connection in [one for one in self._open if one.channel is None]:
                self._cut(connection)
            await asyncio.gather(*self._opening, return_exceptions=True)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._runner.cleanup(), self.shutdown_seconds)

    async def watch(self) -> None:
        """Close connections at their deadlines and log closed and refused clients, until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            for connection in [one for one in self._open if now > one.deadline]:
                self._cut(connection, "slow")
            if self._ended and now - self._logged_at >= LOG_SECONDS:
                LOG.warning(
                    "many or slow clients: %d closed for others, %d refused with 503, %d timed out",
                    *(self._ended[reason] for reason in ("made_way", "refused", "slow")),
                )
                self._ended.clear()
                self._logged_at = now
            await asyncio.sleep(SWEEP_SECONDS)

    def enter(self, connection: Connection, state: State) -> None:
        """Store the new state of a connection, with its start and its deadline."""
        if connection not in self._open or connection.state == "cut":
            return
        seconds = {
            "head": self.limits.head_seconds,
            "body": math.inf,  # the middleware answers 408
            "making": math.inf,
            "sending": self.limits.answer_seconds,
            "idle": self.limits.idle_seconds + SWEEP_SECONDS,  # aiohttp closes it earlier, without a reset
        }
        connection.state, connection.received = state, 0
        connection.since = asyncio.get_running_loop().time()
        connection.deadline = connection.since + seconds[state]
        del self._open[connection]
        self._open[connection] = None

    def forget(self, connection: Connection) -> None:
        """Free the place of a closed connection."""
        self._open.pop(connection, None)

    def _accept(self) -> None:
        room = self.limits.connections - len(self._open)
        if room <= 0:
            # A closed connection frees its place in the next iteration of the loop.
            if not sum(self._make_way("head", "body", "idle", "sending") for _ in range(_MADE_WAY_ONCE)):
                self._pause()
            return
        for _ in range(min(_ACCEPTED_ONCE, room)):
            try:
                accepted, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # too few descriptors or too little memory
                self._make_way("head", "body", "idle", "sending")
                self._pause()
                return
            accepted.settimeout(0)
            task = asyncio.ensure_future(self._connect(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self, accepted: socket.socket) -> None:
        limits, loop = self.limits, asyncio.get_running_loop()
        connection = Connection(
            self,
            accepted,
            cast("web.Server", self._runner.server),
            loop=loop,
            access_log=None,
            logger=LOG,
            max_line_size=limits.line_bytes,
            max_field_size=limits.line_bytes,
            max_headers=limits.headers,
            lingering_time=1.0,
            auto_decompress=False,  # no body becomes longer than its Content-Length
            keepalive_timeout=limits.idle_seconds,
        )
        self._open[connection] = None
        self.enter(connection, "head")
        context = self.access.context if self.access else None
        seconds = limits.head_seconds if context else None
        try:
            await loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=context, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds
            )
        except OSError:  # TLS failed or the client has disconnected: errors of clients are not logged
            pass
        finally:
            connection.opening = None
            if connection.channel is None:
                self.forget(connection)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.listener)
        loop.call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        if self.listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self.listener, self._accept)

    def _make_way(self, *states: State) -> bool:
        """Close one connection in these states for another client; return false if all are too new.

        Order: stalled connections, idle connections, connections whose client sends nothing.
        """
        now = asyncio.get_running_loop().time()
        old = [one for one in self._open if one.state in states and now - one.since >= FRESH_SECONDS]
        stalled = (one for one in old if now - one.since >= STALLED_SECONDS)
        waiting = (one for only in ("idle", *states) for one in old if one.state == only and _is_waiting(one))
        for connection in chain(stalled, waiting):
            self._cut(connection, "made_way")
            return True
        return False

    def _cut(self, connection: Connection, reason: str = "") -> None:
        """Close a connection immediately. It keeps its place until its descriptor is free."""
        was_answered = connection.state == "idle"  # the kernel may still send the end of the response
        connection.state, connection.deadline, connection.is_deaf = "cut", math.inf, True
        with contextlib.suppress(OSError):
            if not was_answered:
                connection.own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if connection.channel:
            connection.channel.abort()
        elif connection.opening:
            connection.opening.cancel()
        if reason:
            self._note(reason)

    def _note(self, reason: str) -> None:
        self._ended[reason] += 1
        self.count("http", reason)

    @web.middleware
    async def _limited(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if refusal := await self._refusal_of_body(request):
            return refusal
        self.enter(cast("Connection", request.protocol), "making")
        answering = sum(one.state in {"making", "sending"} for one in self._open)
        if answering > self.limits.answers and not request.path.endswith(PROBES) and not self._make_way("sending"):
            self._note("refused")
            words = f"too many requests are being answered; ask again in {RETRY_SECONDS} s"
            return plain(503, words, {hdrs.RETRY_AFTER: str(RETRY_SECONDS)})
        answer = await handler(request)
        if isinstance(answer, web.Response) and isinstance(answer.body, bytes) and len(answer.body) > PIECE_BYTES:
            answer.body = io.BytesIO(answer.body)  # shares the bytes
        return answer

    async def _refusal_of_body(self, request: web.Request) -> web.Response | None:
        """Read and drop the body, since no request here needs one; return the response if that fails."""
        if not request.can_read_body:
            return None
        limit = self.limits.body_bytes
        try:
            async with asyncio.timeout(self.limits.head_seconds):
                await request.clone(client_max_size=limit).read()
        except TimeoutError:
            refusal = plain(408, "the rest of this request did not come in time")
        except (web.RequestPayloadError, ConnectionError):  # a disconnected client is not logged
            refusal = plain(400, "the body of this request is not what its headers say")
        except web.HTTPRequestEntityTooLarge:
            refusal = plain(413, f"no request here needs a body of {limit} bytes or more")
        else:
            return None
        refusal.force_close()  # the start of the next request is unknown
        return refusal


def _is_waiting(connection: Connection) -> bool:
    """Return whether a connection waits for its client: no response to send, no received data to handle."""
    if connection.state in {"sending", "body"}:  # most requests have no body, so their handlers start now
        return False
    try:
        return not connection.own_socket.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether to log a record: not for invalid requests, since a port scan causes many."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

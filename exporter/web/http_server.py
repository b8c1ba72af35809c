"""Serves an aiohttp application on one socket: bounds for all clients together, deadlines for each connection."""

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
"""Always answered: a kubelet that restarts a busy agent does not make it less busy."""
RESERVED_DESCRIPTORS = 128
"""For files, children, the kubelet and the API: many clients must not cost the agent its sources."""
BACKLOG = 1024
"""Connections in the kernel's queue; the client of one that the kernel drops tries again after a second."""
SEND_BYTES = 131_072
"""The kernel's buffer for a client that does not read (the kernel doubles it); by default it grows to megabytes."""
UNREAD_SECONDS = 10
"""Until the kernel resets the connection of a client that reads nothing of its answer."""
PIECE_BYTES = 65_536
"""A longer answer is sent piece by piece, so that a client that does not read holds no copy of it."""
RETRY_SECONDS = 1
SWEEP_SECONDS = 1.0
LOG_SECONDS = 60.0
"""Between two lines of the log about clients."""
FRESH_SECONDS = 0.05
"""Seconds for a new client to send its request, before its connection can be closed for another one."""
STALLED_SECONDS = 1.0
"""Seconds without progress of a response, after which its connection can be closed for another one."""
PAUSE_SECONDS = 0.01
"""Seconds until the next attempt to accept a connection, if none can be closed."""
_ACCEPTED_ONCE = 16
_MADE_WAY_ONCE = 4
"""The number of waiting clients is unknown: few lose a place in vain, and a flood costs few turns."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the kernel drops what is not sent yet."""
State = Literal["head", "body", "making", "sending", "idle"]
"""What a connection waits for: the head of a request, its body, its answer, the client to take it, another request."""
_HEADERS = {
    hdrs.SERVER: "gpu-cost-exporter",
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
}
"""Of every answer that has none of its own by that name; none names a version of what the program is made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server: of all clients together, or of each connection where the field says so."""

    connections: int = 128
    """Open connections. One with TLS takes some 0.7 MiB."""
    answers: int = 64
    """Requests with answers that are made or sent; probes are answered beyond it."""
    line_bytes: int = 8190
    """Of a request line, and of a header."""
    headers: int = 64
    """Of a request."""
    head_bytes: int = 65_536
    """Of all that a connection sends until its request is handled."""
    body_bytes: int = 1024
    """Of a request."""
    head_seconds: float = 10.0
    """From the connection, or from the first byte of a later request, to the end of the headers. Also for a TLS
    handshake, and for a body."""
    answer_seconds: float = 60.0
    """For the client to take an answer."""
    idle_seconds: float = 120.0
    """Between two requests: more than a usual scrape interval, so that Prometheus keeps its connection."""

    def within(self, descriptors: int) -> "Limits":
        """Return the limits of a process that may open this many files (``RLIMIT_NOFILE``)."""
        connections = max(8, min(self.connections, descriptors - RESERVED_DESCRIPTORS))
        return replace(self, connections=connections, answers=min(self.answers, connections // 2))


def bind(host: str, port: int) -> socket.socket:
    """Bind the listening socket before anything else starts, so that a port in use ends the program.

    Raises:
        ExporterError: It cannot be bound now. A later try may succeed: the port may be freed, an address may come.
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
    """aiohttp's protocol of one connection, which reports to the server what it waits for."""

    def __init__(self, keeper: "HttpServer", own_socket: socket.socket, manager: web.Server, **options: Any) -> None:  # noqa: ANN401 - aiohttp's
        super().__init__(manager, **options)
        self.keeper = keeper
        self.own_socket = own_socket
        self.channel: asyncio.Transport | None = None
        """Set while the connection is open, with TLS after the handshake."""
        self.opening = asyncio.current_task()
        self.state: State | Literal["cut"] = "head"
        self.since = 0.0
        """When the state began; loop time, as is the deadline."""
        self.deadline = math.inf
        self.received = 0
        """Bytes, in this state."""
        self.is_deaf = False
        """Whether the connection ends, and what the client sends is dropped."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request; called by the loop."""
        super().connection_made(transport)
        self.channel = cast("asyncio.Transport", transport)
        if self.state == "cut":
            self.channel.abort()
        self.keeper.enter(self, "head")

    def data_received(self, data: bytes) -> None:
        """Pass on what the client sends, up to a limit; called by the loop."""
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
            self.close()  # when the requests so far are answered
        if self.state == "head" and has_new:
            self.keeper.enter(self, "body")

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection; called by the loop."""
        self.keeper.forget(self)
        self.channel = None  # with TLS it has buffers, and garbage may wait for long
        super().connection_lost(exc)

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; called by aiohttp."""
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
        """Answer where a request cannot be read or a handler fails; called by aiohttp."""
        if status == web.HTTPBadRequest.status_code:
            # The parser's own words name the library.
            message = "this is not an HTTP/1.1 request that can be read in one way only, or its headers are too long\n"
        return super().handle_error(request, status, exc, message)


@dataclass(slots=True, kw_only=True, eq=False)
class HttpServer:
    """Serves an application within limits.

    At the limit, it closes a connection that waits for its client. At most ``answers`` connections do not wait for
    their clients, so that a probe can always connect.
    """

    app: web.Application
    """The server adds its middlewares."""
    listener: socket.socket
    """Bound; closed at the end."""
    shutdown_seconds: float
    """For open requests to finish at the end."""
    access: WebAccess | None = None
    """``None``: plain HTTP, for everybody."""
    count: Callable[[str, str], None] = lambda _part, _reason: None
    """Counts an error by part and reason: ``http``: ``made_way``, ``refused`` or ``slow``; ``web``: ``config``."""
    remark: str = ""
    """Follows the address in the log."""
    limits: Limits = field(default_factory=Limits)
    _runner: web.AppRunner = field(init=False)
    _open: dict[Connection, None] = field(init=False, default_factory=dict)
    """In the order in which their states began."""
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
            stop: Set from outside.
            parts: Run meanwhile; one that ends by an error ends all, and the error is raised.
            last: Runs when the parts have ended, while requests are still answered.
        """
        parts = [*parts, self.watch]
        if self.access:
            parts.append(partial(self.access.watch, partial(self.count, "web", "config")))
        stopping = asyncio.ensure_future(stop.wait())
        tasks: list[asyncio.Future[Any]] = [stopping]
        async with self.running():
            try:
                # What lives as long as the process need not be searched for garbage: a full collection takes 40 ms.
                gc.collect()
                gc.freeze()
                LOG.info("listening on %s:%d%s", *self.listener.getsockname()[:2], self.remark)
                for part in parts:
                    tasks.append(asyncio.ensure_future(part()))  # noqa: PERF401 - the begun ones end if the next fails
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
        """Accept and answer until the block ends. Deadlines need ``watch``."""
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limits = self.limits.within(descriptors)
        LOG.addFilter(_is_ours)
        if self.access:
            self.app.middlewares.insert(0, self.access.guard)
        self.app.middlewares.insert(0, self._limited)
        # The handler of a client that has left is cancelled: its answer has no reader.
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
        """Cut connections at their deadlines and log what was done to clients, until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            for connection in [one for one in self._open if now > one.deadline]:
                self._cut(connection, "slow")
            if self._ended and now - self._logged_at >= LOG_SECONDS:
                LOG.warning(
                    "many or slow clients: %d connections made way for others, %d were answered 503, %d took too long",
                    *(self._ended[reason] for reason in ("made_way", "refused", "slow")),
                )
                self._ended.clear()
                self._logged_at = now
            await asyncio.sleep(SWEEP_SECONDS)

    def enter(self, connection: Connection, state: State) -> None:
        """Note what a connection waits for from now on."""
        if connection not in self._open or connection.state == "cut":
            return
        seconds = {
            "head": self.limits.head_seconds,
            "body": math.inf,  # the middleware answers 408
            "making": math.inf,
            "sending": self.limits.answer_seconds,
            "idle": self.limits.idle_seconds + SWEEP_SECONDS,  # aiohttp closes it before, without a reset
        }
        connection.state, connection.received = state, 0
        connection.since = asyncio.get_running_loop().time()
        connection.deadline = connection.since + seconds[state]
        del self._open[connection]
        self._open[connection] = None

    def forget(self, connection: Connection) -> None:
        """Free the place of a connection that is closed."""
        self._open.pop(connection, None)

    def _accept(self) -> None:
        room = self.limits.connections - len(self._open)
        if room <= 0:
            # A connection that is cut frees its place in the loop's next turn.
            if not sum(self._make_way("head", "body", "idle", "sending") for _ in range(_MADE_WAY_ONCE)):
                self._pause()
            return
        for _ in range(min(_ACCEPTED_ONCE, room)):
            try:
                accepted, _ = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # of descriptors or memory there are too few
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
            auto_decompress=False,  # no body unpacks to more than it says
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
        except OSError:  # of TLS, or the client has left: mistakes of clients are not logged
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
        """Cut the connection in one of these states that needs its place least; return false where all are too fresh.

        These are one that has stalled; one that was answered and does not notice; one that sends nothing.
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
        """Close a connection at once. It keeps its place until its descriptor is free."""
        was_answered = connection.state == "idle"  # the kernel may have some of the answer yet
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
        """Read and drop the body, which no request here needs; return the answer where that fails."""
        if not request.can_read_body:
            return None
        limit = self.limits.body_bytes
        try:
            async with asyncio.timeout(self.limits.head_seconds):
                await request.clone(client_max_size=limit).read()
        except TimeoutError:
            refusal = plain(408, "the rest of this request did not come in time")
        except (web.RequestPayloadError, ConnectionError):  # the latter: the client has left, which is not logged
            refusal = plain(400, "the body of this request is not what its headers say")
        except web.HTTPRequestEntityTooLarge:
            refusal = plain(413, f"no request here needs a body of {limit} bytes or more")
        else:
            return None
        refusal.force_close()  # where the next request begins is unknown
        return refusal


def _is_waiting(connection: Connection) -> bool:
    """Return whether a client neither reads an answer nor has sent something that the loop has not handled yet."""
    if connection.state in {"sending", "body"}:  # most requests have no body, and their handlers are about to begin
        return False
    try:
        return not connection.own_socket.recv(1, socket.MSG_PEEK)
    except OSError:
        return True


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a record is no mistake of a client, of which any port scan makes pages."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

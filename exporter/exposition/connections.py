"""Keeps clients within their limits: how many are in, who leaves when there are too many, and who takes too long."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, Final, Literal

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from exporter.exposition.limits import Limits
from exporter.exposition.pieces import in_pieces
from exporter.exposition.visit import Visit

LOG = logging.getLogger("exporter.http")
RETRY_SECONDS = 1
SWEEP_SECONDS = 1.0
TELL_SECONDS = 60.0
"""Between two lines of the log about it."""
STALLED_SECONDS = 1.0
"""A connection whose answer has not got on for so long makes way for another."""
PROBES: Final = ("/healthz", "/health", "/readyz")
"""Always answered: a busy agent that its kubelet restarted would be no less busy."""


Room = Literal["free", "soon", "none"]
"""Place for one more: at once, as soon as those who have just come have had their turn, or not before long."""


class Connections:
    """Those that have sent something.

    Args:
        limits: Of all of them.
        count: Told once for each client that was ended or refused, and why: ``made_way``, ``refused``, ``slow``.
    """

    def __init__(self, limits: Limits | None = None, count: Callable[[str], None] = lambda _reason: None) -> None:
        self.limits = limits or Limits()
        self.count = count
        self._visits: dict[web.RequestHandler, Visit] = {}
        self.answering = 0
        """Requests that handlers are at work at."""
        self.turn = 0
        """How often those before the door were looked through."""
        self._ended: Counter[str] = Counter()
        self._told_at: float | None = None

    def __len__(self) -> int:
        return len(self._visits)

    def visits(self) -> tuple[Visit, ...]:
        """All of them."""
        return tuple(self._visits.values())

    def crowd(self) -> Counter[str]:
        """How many each client has."""
        return Counter(visit.peer for visit in self._visits.values())

    def make_room(self, peer: str, now: float) -> Room:
        """Whether there is place for one more; the one that deserves its place least makes it.

        Args:
            peer: Who wants to come in.
            now: The loop's time.
        """
        if len(self._visits) < self.limits.connections:
            return "free"
        leaves = who_leaves(self._visits.values(), peer, self.turn, now)
        if leaves is None:
            return "none"
        if leaves == "soon":
            return "soon"
        del self._visits[leaves.inner]
        # Nobody waits for the farewell of TLS while others wait for the place.
        leaves.end(at_once=not leaves.known or leaves.is_secured or leaves.unsent_bytes() > 0)
        self.ended("made_way")
        return "free"

    def enter(self, peer: str, inner: web.RequestHandler) -> Visit:
        """Somebody comes in."""
        visit = self._visits[inner] = Visit(peer, inner, self.limits, self.leave, turn=self.turn)
        return visit

    def leave(self, visit: Visit) -> None:
        """It is over."""
        self._visits.pop(visit.inner, None)

    def ended(self, reason: str) -> None:
        """Count a client that was ended or refused."""
        self._ended[reason] += 1
        self.count(reason)

    def middleware(self) -> Middleware:
        """What stands before all else of an application."""

        @web.middleware
        async def limited(request: web.Request, handler: Handler) -> web.StreamResponse:
            visit = self._visits.get(request.protocol)
            clock = asyncio.get_running_loop().time
            if visit:
                visit.begin(clock())
            self.answering += 1
            try:
                response = await self._answer(request, handler)
            finally:
                self.answering -= 1
                if visit:
                    visit.finish(clock())
            if visit and response.status < web.HTTPBadRequest.status_code:
                visit.known = True
            if isinstance(response, web.Response):
                in_pieces(response)
            return response

        return limited

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.answering > self.limits.answers and not request.path.endswith(PROBES):
            self.ended("refused")
            response = _plain(503, "too many requests are being answered; ask again in a second")
            response.headers[hdrs.RETRY_AFTER] = str(RETRY_SECONDS)
            return response
        return await self._refusal_of_body(request) or await handler(request)

    async def _refusal_of_body(self, request: web.Request) -> web.Response | None:
        """Read the body, which is next to nothing wherever one is wanted; what to answer where it is not."""
        if not request.can_read_body:
            return None
        if (request.content_length or 0) <= self.limits.body_bytes:
            try:
                async with asyncio.timeout(self.limits.body_seconds):
                    await request.read()
            except TimeoutError:
                return _last(408, "the rest of this request did not come in time")
            except (web.RequestPayloadError, ConnectionError):  # the latter: who sends it has left, and is not logged
                return _last(400, "the body of this request is not what its headers say")
            except web.HTTPRequestEntityTooLarge:
                pass
            else:
                return None
        return _last(413, f"no request here needs a body of more than {self.limits.body_bytes} bytes")

    async def watch(self) -> None:
        """Sweep until cancelled."""
        while True:
            now = asyncio.get_running_loop().time()
            self.sweep(now)
            self.tell(now)
            await asyncio.sleep(SWEEP_SECONDS)

    def sweep(self, now: float) -> None:
        """End who takes longer than he may. ``now`` is the loop's time."""
        for visit in self.visits():
            if visit.is_late(now):
                visit.end(at_once=True)
                self.ended("slow")
            elif visit.is_idle(now):
                visit.end(at_once=False)

    def tell(self, now: float) -> None:
        """Log what was done to clients, at most once a minute. ``now`` is the loop's time."""
        if not self._ended or (self._told_at is not None and now - self._told_at < TELL_SECONDS):
            return
        LOG.warning(
            "many or slow clients: %d connections made way for others, %d were answered 503, %d took too long",
            *(self._ended[reason] for reason in ("made_way", "refused", "slow")),
        )
        self._ended.clear()
        self._told_at = now


CONNECTIONS = web.AppKey("CONNECTIONS", Connections)


def who_leaves(visits: Iterable[Visit], peer: str, turn: int, now: float) -> Visit | Literal["soon"] | None:
    """Who makes way for one more of ``peer``: ``None`` where all are at work, "soon" where some have just come.

    First those who have not been given anything yet, of the client with the most connections the oldest; then, in
    the same order, those who have asked and been answered; last those who do not take their answer. Nobody does who
    has just come, since a flood would push out who has sent his request before it is read; but a client with most of
    the places makes way for one with few.
    """
    held = list(visits)
    crowd = Counter(visit.peer for visit in held)

    def place(visit: Visit) -> tuple[int, float]:
        return -crowd[visit.peer], visit.quiet_since

    free = sorted((visit for visit in held if not visit.answering), key=place)
    fresh = {visit for visit in free if not visit.known and visit.is_fresh(turn, now)}
    strangers = (visit for visit in free if not visit.known and visit not in fresh)
    if stranger := next(strangers, None):
        return stranger
    if 2 * len(fresh) > len(free):
        return free[0] if crowd[free[0].peer] > crowd[peer] + len(held) // 2 else "soon"
    for _, group in groupby(free, key=lambda visit: crowd[visit.peer]):
        of_a_size = list(group)
        for visit in of_a_size:
            if visit not in fresh and (visit.unsent_bytes() == 0 or visit.takes_nothing(now, STALLED_SECONDS)):
                return visit
        if not fresh.isdisjoint(of_a_size):
            return "soon"
    return next((visit for visit in free if crowd[visit.peer] > crowd[peer] + 1), None)


def runner_of(app: web.Application, shutdown_seconds: float) -> web.AppRunner:
    """What serves an application that has ``CONNECTIONS``, within its limits.

    Args:
        app: The application.
        shutdown_seconds: How long open requests may take to finish at the end.
    """
    limits = options(app[CONNECTIONS].limits)
    # The handler of a client that has left is cancelled: nobody waits for its answer.
    return web.AppRunner(
        app, handle_signals=False, shutdown_timeout=shutdown_seconds, handler_cancellation=True, **limits
    )


def options(limits: Limits) -> dict[str, Any]:
    """What aiohttp is told of the limits of each connection, and of the log."""
    return {
        "access_log": None,
        "logger": request_log(),
        "max_line_size": limits.line_bytes,
        "max_field_size": limits.line_bytes,
        "max_headers": limits.headers,
        "lingering_time": 1.0,
        "auto_decompress": False,  # nobody has to send a body that unpacks to more than it says
        "keepalive_timeout": limits.idle_seconds + 2 * SWEEP_SECONDS,
    }


def request_log() -> logging.Logger:
    """For aiohttp: without what clients do wrong, which any port scan would write into the log by the page."""
    log = logging.getLogger("exporter.http")
    log.addFilter(_is_ours)
    return log


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _plain(status: int, words: str) -> web.Response:
    return web.Response(text=f"{words}\n", status=status)


def _last(status: int, words: str) -> web.Response:
    """An answer after which the connection is closed: where the next request would begin cannot be known."""
    response = _plain(status, words)
    response.force_close()
    return response

"""Targets of what anybody may send to a listening port: whole requests over a real socket, headers, query strings."""

import asyncio
import contextlib
import logging
import socket
import time
from functools import cache
from pathlib import Path

import bcrypt
from aiohttp import web
from fuzz_page import lived, node
from fuzz_targets import UNEXPECTED, BrokenPromise, require, target
from yarl import URL

from exporter.config.web_config import WebSettings
from exporter.cost.ledger import Now
from exporter.cost.prometheus import PrometheusAnswer, PrometheusClient
from exporter.cost.prometheus_access import Refusal
from exporter.errors import ConfigError
from exporter.metrics import text_format
from exporter.metrics.collector import ExpositionOptions
from exporter.service import opencost_query, parameters
from exporter.service.page_frame import read_view
from exporter.service.run import Service
from exporter.service.settings import load_settings
from exporter.web.access import WebAccess
from exporter.web.http_server import Connection, HttpServer
from exporter.web.responses import accepts_gzip
from exporter.web.server import Renderer, create_app

NOW = 1_800_000_000.0
_LONGEST_SECONDS = 60.0
_QUIET_TURNS = 6
_PATIENCE_SECONDS = 0.3
"""A body that does not come is waited for as long as the limits of the server say, which is tested elsewhere."""


class _Face:
    """An application behind real connections of this process, its loop kept from input to input."""

    def __init__(self, app: web.Application, loop: asyncio.AbstractEventLoop, access: WebAccess | None = None) -> None:
        self.loop = loop
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"")  # an address that the kernel chooses; with ports of TCP a long run would run out of them
        listener.listen()
        self.address = listener.getsockname()
        self.server = HttpServer(app=app, listener=listener, shutdown_seconds=1.0, access=access)
        self.running = self.server.running()
        loop.run_until_complete(self.running.__aenter__())

    def ask(self, request: bytes) -> bytes:
        """Send it and read until the server has nothing more to say."""
        return self.loop.run_until_complete(asyncio.wait_for(self._exchange(request), _LONGEST_SECONDS))

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self.address)
        while not (connections := list(self.server._open)) or connections[-1].channel is None:  # noqa: SLF001, ASYNC110 - nothing else tells
            await asyncio.sleep(0)
        connection = connections[-1]
        try:
            writer.write(request)
            await _answered(connection)
            if writer.can_write_eof():
                writer.write_eof()
            return await reader.read()
        except ConnectionError:
            return b""  # it has said what it had to say before all was sent
        finally:
            writer.close()
            if connection.channel:
                connection.channel.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def _is_over(protocol: Connection) -> bool:
    return protocol.transport is None or protocol.transport.is_closing()


async def _answered(protocol: Connection) -> None:
    """Wait until the server waits for more: aiohttp takes the end of what is sent for the end of who sends it."""
    quiet, until = 0, time.monotonic() + _PATIENCE_SECONDS
    while quiet < _QUIET_TURNS and not _is_over(protocol) and time.monotonic() < until:
        busy = bool(protocol._current_request or protocol._messages)  # noqa: SLF001 - nothing else tells
        await asyncio.sleep(0.0005 if busy else 0)
        quiet = 0 if busy else quiet + 1


def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_keep)
    return loop


def _keep(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    error = context.get("exception")
    if isinstance(error, Exception) and not isinstance(error, ConnectionError):
        UNEXPECTED.emit(logging.makeLogRecord({"exc_info": (type(error), error, None)}))


@cache
def _agent_face(*, guarded: bool) -> _Face:
    snapshot = lived(*node())
    renderer = Renderer(ExpositionOptions(), list)
    settings = WebSettings(path=Path("web.yaml"), users={"prometheus": bcrypt.hashpw(b"secret", bcrypt.gensalt(4))})
    app = create_app(
        snapshot=lambda: snapshot,
        metrics=lambda accept: renderer.metrics(snapshot, accept),
        release=lambda _seconds: None,
        steady=lambda: snapshot.taken_steady_seconds or 0.0,  # readiness judges the snapshot's age, which stays 0 here
    )
    return _Face(app, _loop(), WebAccess(lambda: settings) if guarded else None)


class _NoPrometheus(PrometheusClient):
    """One that cannot be reached."""

    async def _attempt(self, path: str, form: object) -> PrometheusAnswer:  # noqa: ARG002 - any question
        raise Refusal("unreachable", "http://prometheus:9090: cannot connect; is it running there?")


@cache
def _service_face() -> _Face:
    settings = load_settings(
        {"prometheus": "http://prometheus:9090", "prometheus-retries": "0", "external-url": "http://a/cost"}, {}
    )

    async def app() -> web.Application:
        client = _NoPrometheus(settings.prometheus)
        return Service(settings, client, client, lambda: NOW).app()

    loop = _loop()
    return _Face(loop.run_until_complete(app()), loop)


def _check_answer(answer: bytes, *allowed: int) -> None:
    """Each head is one of HTTP's, and no answer says that a page could not be made."""
    if not answer:
        return
    require(answer.startswith(b"HTTP/"), f"the answer {answer[:80]!r}")
    head, _, _ = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    require(status < 500 or status in allowed, f"status {status}: {answer[:300]!r}")  # noqa: PLR2004 - HTTP
    for line in head.split(b"\r\n")[1:]:
        require(b":" in line and b"\n" not in line and line.isascii(), f"the header {line!r}")


@target("http", "agent")
def _agent(data: bytes) -> None:
    """A connection's bytes, to the agent."""
    _check_answer(_agent_face(guarded=False).ask(data), 501, 505)


@target("http", "guarded", most_bytes=1024)
def _guarded(data: bytes) -> None:
    """A connection's bytes, to an agent that asks for a password; ``prometheus:secret`` is right."""
    answer = _agent_face(guarded=True).ask(data)
    _check_answer(answer, 501, 505)
    if b"gpu_up" in answer and b"cHJvbWV0aGV1czpzZWNyZX" not in data:
        raise BrokenPromise("metrics without the password")


@target("http", "service")
def _service(data: bytes) -> None:
    """A connection's bytes, to the cost service."""
    _check_answer(_service_face().ask(data), 501, 503, 505)


@target("http", "headers", most_bytes=512)
def _headers(data: bytes) -> None:
    """Accept or Accept-Encoding, as aiohttp gives it."""
    header = data.decode("utf-8", "surrogateescape")
    text_format.negotiate(header)
    accepts_gzip(header)


_TABLES = (
    (parameters.WINDOW, parameters.BY, *parameters.FILTERS, parameters.SHARE_IDLE, parameters.SHARE_UNALLOCATED),
    (parameters.WINDOW, parameters.SERIES, parameters.OFFSET, parameters.LIMIT),
    opencost_query.PARAMETERS,
)


@target("http", "query", ConfigError, most_bytes=1024)
def _query(data: bytes) -> None:
    """A query string, to every table of parameters and to the pages; the last that refuses it says why."""
    pairs = list(URL("/?" + data.decode("utf-8", "surrogateescape"), encoded=True).query.items())
    refused: ConfigError | None = None
    for table in _TABLES:
        try:
            values = parameters.read(table, pairs, Now(NOW))
            parameters.filters_of(values)
            if table is opencost_query.PARAMETERS:
                opencost_query.wanted_of(values)
                opencost_query.sets_of(values["window"], values)
        except ConfigError as error:
            refused = error
    try:
        view = read_view("/namespaces", pairs, NOW)
        link = view.link(page=2)
        require(link.isascii() and " " not in link and '"' not in link, f"the link {link!r}")
        again = read_view("/namespaces", list(URL(link, encoded=True).query.items()), NOW)
        require(again.filters == view.filters and again.window == view.window, f"{link!r} asks for something else")
    except ConfigError as error:
        refused = error
    if refused is not None:
        raise refused

"""The HTTP server with many, slow or odd clients: real connections to an application of four pages."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine
from service_support import http_server, make_certificates, web_file

from exporter.config.web_config import load
from exporter.web import http_server as limits_of
from exporter.web.access import WebAccess
from exporter.web.http_server import HttpServer, Limits, bind

BIG = bytes(range(256)) * 40_000
"""Ten megabytes: more than the socket buffers of both ends."""
PATIENCE_SECONDS = 20.0


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def asks(self, path: str = "/quick", head: str = "") -> None:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in head.splitlines() if line.lower().startswith("content-length"))
            return int(head.split()[1]), await self.reader.readexactly(int(length.split(":")[1]))

    async def rest(self) -> bytes:
        """Return the bytes until the server closes the connection."""
        said = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while piece := await self.reader.read(65_536):
                    said += piece
        return said


@dataclass(slots=True)
class Served:
    """An application behind the server."""

    port: int
    counted: Counter[str]
    at_work: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[Client] = field(default_factory=list)

    async def client(self, receive_bytes: int | None = None) -> Client:
        own = socket.socket()
        own.settimeout(0)
        if receive_bytes:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.port))
        one = Client(*await asyncio.open_connection(sock=own, limit=1 << 16))
        self.clients.append(one)
        return one

    async def is_answered(self, path: str = "/quick") -> bool:
        one = await self.client()
        await one.asks(path)
        return await one.answer() == (200, b"quick")

    async def slow(self, count: int) -> list[Client]:
        """Open connections that wait for a slow answer."""
        clients = [await self.client() for _ in range(count)]
        for client in clients:
            await client.asks("/slow")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.at_work < count:  # noqa: ASYNC110 - the handlers send no event
                await asyncio.sleep(0)
        return clients


@asynccontextmanager
async def served(limits: Limits | None = None, access: WebAccess | None = None) -> AsyncIterator[Served]:
    app, counted = web.Application(), Counter[str]()
    one = Served(0, counted)

    async def slow(_: web.Request) -> web.Response:
        one.at_work += 1
        await one.hold.wait()
        return web.Response(text="slow")

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def big(_: web.Request) -> web.Response:
        return web.Response(body=BIG)

    for path, handler in (("/slow", slow), ("/quick", quick), ("/healthz", quick), ("/big", big)):
        app.router.add_route("*", path, handler)
    async with http_server(app, limits=limits, access=access, count=lambda *what: counted.update([what])) as one.port:
        try:
            yield one
        finally:
            one.hold.set()
            for client in one.clients:
                client.writer.transport.abort()


QUICK = Limits(head_seconds=0.3, answer_seconds=0.3, idle_seconds=0.5)


async def test_partial_request_head_is_closed_at_the_deadline() -> None:
    async with served(Limits(head_seconds=0.3)) as one:
        stops, drips, silent = [await one.client() for _ in range(3)]
        stops.writer.write(b"GET /qui")
        drips.writer.write(b"GET /quick HTTP/1.1\r\nX: ")

        async def drip() -> None:
            while True:
                drips.writer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        assert [await client.rest() for client in (stops, drips, silent)] == [b"", b"", b""]
        dripping.cancel()
        assert one.counted == {("http", "slow"): 3}


async def test_keep_alive_client_is_kept_until_the_idle_limit() -> None:
    async with served(QUICK) as one:
        client = await one.client()
        for _ in range(4):
            await client.asks()
            assert await client.answer() == (200, b"quick")
            await asyncio.sleep(0.2)
        assert await client.rest() == b""
        assert not one.counted, "closed, not reset"


async def test_slow_handler_is_not_cut_off() -> None:
    async with served(QUICK) as one:
        (client,) = await one.slow(1)
        await asyncio.sleep(1.5)
        one.hold.set()
        assert await client.answer() == (200, b"slow")


async def test_slow_reader_is_closed_at_the_answer_deadline() -> None:
    async with served(Limits(answer_seconds=0.5)) as one:
        client = await one.client(receive_bytes=4096)
        await client.asks("/big")
        said = await client.reader.readexactly(16)
        assert said.startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not one.counted:
                said += await client.reader.read(1)
                await asyncio.sleep(0.01)
        assert one.counted == {("http", "slow"): 1}
        assert len(said + await client.rest()) < len(BIG)


async def test_reader_within_the_deadline_gets_the_whole_long_response() -> None:
    async with served() as one:
        client = await one.client(receive_bytes=4096)
        await client.asks("/big")
        assert await client.answer() == (200, BIG)


async def test_client_that_never_reads_is_reset_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_of, "UNREAD_SECONDS", 1)
    async with served() as one:
        client = await one.client(receive_bytes=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined] # or asyncio takes some on its own
        await client.asks("/big")
        await asyncio.sleep(4)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await client.rest()) < len(BIG)


async def test_longest_waiting_connection_is_closed_at_the_cap() -> None:
    async with served(Limits(connections=8)) as one:
        (busy,) = await one.slow(1)
        first, *others = [await one.client() for _ in range(20)]
        for client in others:
            client.writer.write(b"GET /qui")
        assert await first.rest() == b""
        assert await one.is_answered()
        assert one.counted["http", "made_way"] >= 10
        one.hold.set()
        assert await busy.answer() == (200, b"slow"), "a connection with a pending answer stays open"


async def test_new_client_is_answered_at_the_cap_while_old_ones_do_not_read() -> None:
    async with served(Limits(connections=8)) as one:
        for _ in range(4):
            await (await one.client(receive_bytes=4096)).asks("/big")
        await asyncio.sleep(1.2)
        assert await one.is_answered(), "the connection with the longest pause in reading is closed"
        assert one.counted == {("http", "made_way"): 1}


async def test_idle_connection_is_closed_before_a_client_without_a_request() -> None:
    """After the close of an idle connection, a client repeats its request on a new one; without any answer it fails."""
    async with served(Limits(connections=8)) as one:
        new = [await one.client() for _ in range(3)]
        kept = [await one.client() for _ in range(4)]
        for client in kept:
            await client.asks()
            assert await client.answer() == (200, b"quick")
        await asyncio.sleep(0.1)
        for _ in range(4):
            assert await one.is_answered()
        assert one.counted["http", "made_way"] >= 1
        for client in new:
            await client.asks()
            assert await client.answer() == (200, b"quick")


async def test_requests_over_the_answer_cap_get_503_and_probes_are_answered() -> None:
    async with served(Limits(connections=8)) as one:
        at_work = await one.slow(4)
        more = await one.client()
        await more.asks()
        head = (await more.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        assert head[0].startswith("HTTP/1.1 503 ")
        assert {"Retry-After: 1", "Server: gpu-cost-exporter", "Cache-Control: no-store"} <= set(head)
        assert await one.is_answered("/healthz")
        assert one.counted == {("http", "refused"): 1}
        one.hold.set()
        assert [await client.answer() for client in at_work] == [(200, b"slow")] * 4
        assert await one.is_answered()


async def test_probes_are_answered_during_a_flood() -> None:
    async with served(Limits(connections=16)) as one:
        await one.slow(8)
        for _ in range(100):
            (await one.client()).writer.write(b"GET /qui")
        for _ in range(5):
            assert await one.is_answered("/healthz")


@pytest.mark.parametrize("head", [b"x" * 200_000, b"x: y\r\n" * 20_000, (b"x: " + b"y" * 8000 + b"\r\n") * 12])
async def test_oversized_header_is_refused_and_the_next_client_served(head: bytes) -> None:
    async with served() as one:
        client = await one.client()
        client.writer.write(b"GET /quick HTTP/1.1\r\nHost: x\r\n" + head)
        assert await one.is_answered()
        assert (await client.rest())[:13] in {b"", b"HTTP/1.0 400 ", b"HTTP/1.1 400 "}


async def test_head_of_many_small_headers_over_the_limit_is_not_answered() -> None:
    async with served(Limits(head_bytes=2000, head_seconds=60.0)) as one:
        client = await one.client()
        with contextlib.suppress(ConnectionError):
            for line in (b"GET /quick HTTP/1.1\r\nHost: x\r\n", *[b"x: " + b"y" * 100 + b"\r\n"] * 30, b"\r\n"):
                client.writer.write(line)
                await client.writer.drain()
                await asyncio.sleep(0.001)  # in one piece, the request would be read before it is counted
        assert await client.rest() == b""


@pytest.mark.parametrize("head", ["Content-Length: 100000000\r\n", "Transfer-Encoding: chunked\r\n"])
async def test_oversized_body_is_refused(head: str) -> None:
    async with served() as one:
        client = await one.client()
        await client.asks(head=head)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                client.writer.write(b"8000\r\n" + b"z" * 0x8000 + b"\r\n")
                await client.writer.drain()
        assert (await client.rest())[:13] in {b"", b"HTTP/1.1 413 "}
        assert await one.is_answered()


async def test_small_body_is_dropped_and_the_connection_kept() -> None:
    async with served() as one:
        client = await one.client()
        for _ in range(2):
            await client.asks(head="Content-Length: 5\r\n")
            client.writer.write(b"hello")
            assert await client.answer() == (200, b"quick")


async def test_missing_body_is_answered_with_408() -> None:
    async with served(QUICK) as one:
        client = await one.client()
        await client.asks(head="Content-Length: 5\r\n")
        assert (await client.answer())[0] == 408
        assert await client.rest() == b""


async def test_partial_tls_handshake_is_closed_at_the_deadline(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    access = WebAccess(partial(load, web_file(tmp_path, tls={})))
    async with served(QUICK, access) as one:
        client = await one.client()
        client.writer.write(b"\x16\x03\x01\x02\x00\x01")
        assert await client.rest() == b""
        reader, writer = await asyncio.open_connection("localhost", one.port, ssl=certificates.client())
        secured = Client(reader, writer)
        await secured.asks()
        assert await secured.answer() == (200, b"quick")
        writer.close()


async def test_shutdown_finishes_open_requests_and_accepts_no_new_ones() -> None:
    async def slow(_: web.Request) -> web.Response:
        begun.set()
        await asyncio.sleep(0.3)
        return web.Response(text="slow")

    app, begun, stop = web.Application(), asyncio.Event(), asyncio.Event()
    app.router.add_get("/slow", slow)
    listener, done = bind("127.0.0.1", 0), list[str]()
    port = listener.getsockname()[1]

    async def last() -> None:
        done.append("last")

    server = HttpServer(app=app, listener=listener, shutdown_seconds=5.0)
    serving = asyncio.ensure_future(server.serve(stop, (), last))
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    await client.asks("/slow")
    await begun.wait()
    stop.set()
    assert await client.answer() == (200, b"slow")
    await serving
    assert done == ["last"]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    client.writer.close()


async def test_failing_part_ends_the_server_with_its_error() -> None:
    async def fails() -> None:
        raise ValueError("a part")

    async def last() -> None:
        pass

    server = HttpServer(app=web.Application(), listener=bind("127.0.0.1", 0), shutdown_seconds=1.0)
    with pytest.raises(ValueError, match="a part"):
        await server.serve(asyncio.Event(), (fails,), last)


def test_limits_shrink_with_the_open_file_limit() -> None:
    assert Limits().within(20_000) == Limits()
    few = Limits().within(192)
    assert (few.connections, few.answers) == (64, 32)
    assert Limits().within(64).connections == 8


async def test_client_errors_are_not_logged_and_server_errors_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="exporter.http")
    async with served():
        limits_of.LOG.error("Error handling request", exc_info=BadStatusLine("GET"))
        assert not caplog.records
        limits_of.LOG.error("Unhandled exception", exc_info=ValueError("ours"))
        assert len(caplog.records) == 1


async def test_connection_limits_are_logged_once_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="exporter.http")
    async with served(Limits(connections=8, head_seconds=0.5)) as one:
        for _ in range(2):
            assert await (await one.client()).rest() == b""
        await asyncio.sleep(1.5)
    assert [record.getMessage() for record in caplog.records] == [
        "many or slow clients: 0 closed for others, 0 refused with 503, 1 timed out"
    ]

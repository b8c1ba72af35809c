"""Who is let in, who makes way and who is sent off, over real connections to an application with nothing else in it."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine

from exporter.exposition.connections import CONNECTIONS, Connections, request_log, runner_of
from exporter.exposition.door import Door
from exporter.exposition.limits import Limits, fitting
from exporter.exposition.peers import peer_of

BIG = bytes(range(256)) * 40_000
"""Ten megabytes: more than the sockets of both ends hold."""
PATIENCE_SECONDS = 20.0


class Client:
    """A raw connection from an address of its own choice."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def asks(self, path: str = "/quick", head: str = "") -> None:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in head.splitlines() if line.lower().startswith("content-length"))
            return int(head.split()[1]), await self.reader.readexactly(int(length.split(":")[1]))

    async def is_sent_off(self) -> bool:
        """Whether the other end closes; what it says first is passed over."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self.reader.read(65_536):
                    pass
        return True


@dataclass(slots=True)
class Served:
    """An application behind a door."""

    port: int
    connections: Connections
    counted: Counter[str]
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    clients: list[Client] = field(default_factory=list)

    async def client(self, address: str = "127.0.0.1", receive_bytes: int | None = None) -> Client:
        own = socket.socket()
        own.settimeout(0)
        if receive_bytes:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        own.bind((address, 0))
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.port))
        one = Client(*await asyncio.open_connection(sock=own, limit=1 << 16))
        self.clients.append(one)
        return one

    async def known(self, address: str = "127.0.0.1") -> Client:
        """A connection that has asked and been answered."""
        one = await self.client(address)
        await one.asks()
        assert await one.answer() == (200, b"quick")
        return one

    async def knocking(self, address: str = "127.0.0.1") -> Client:
        """A connection that has begun to ask, and is in."""
        before = len(self.connections)
        one = await self.client(address)
        one.writer.write(b"GET /qui")
        await self.until(lambda: len(self.connections) == min(before + 1, self.connections.limits.connections))
        return one

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not holds():  # noqa: ASYNC110 - what is waited for is the server's, which tells nobody
                await asyncio.sleep(0)

    def now(self) -> float:
        return asyncio.get_running_loop().time()


@asynccontextmanager
async def served(limits: Limits | None = None) -> AsyncIterator[Served]:
    counted: Counter[str] = Counter()
    connections = Connections(limits, lambda reason: counted.update([reason]))
    app = web.Application(middlewares=[connections.middleware()], client_max_size=connections.limits.body_bytes)
    app[CONNECTIONS] = connections
    runner = runner_of(app, 1.0)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    one = Served(listener.getsockname()[1], connections, counted)

    async def slow(_: web.Request) -> web.Response:
        await one.hold.wait()
        return web.Response(text="slow")

    async def quick(_: web.Request) -> web.Response:
        return web.Response(text="quick")

    async def big(_: web.Request) -> web.Response:
        return web.Response(body=BIG)

    for path, handler in (("/slow", slow), ("/quick", quick), ("/healthz", quick), ("/big", big)):
        app.router.add_route("*", path, handler)
    await runner.setup()
    door = Door(listener, runner)
    door.open()
    try:
        yield one
    finally:
        one.hold.set()
        door.close()
        for client in one.clients:
            client.writer.transport.abort()
        await runner.cleanup()


async def test_who_begins_and_does_not_end_a_request_is_sent_off_and_who_asks_at_times_is_kept() -> None:
    async with served() as one:
        begins, asks = await one.knocking(), await one.known()
        one.connections.sweep(one.now() + 9)
        await asks.asks()
        assert await asks.answer() == (200, b"quick")
        one.connections.sweep(one.now() + 11)
        assert await begins.is_sent_off()
        await asks.asks()
        assert await asks.answer() == (200, b"quick")
        assert one.counted == {"slow": 1}
        one.connections.sweep(one.now() + 121)
        assert await asks.is_sent_off()


async def test_a_header_that_comes_byte_by_byte_has_no_longer_than_one_that_stops() -> None:
    async with served() as one:
        drips = await one.knocking()
        began = one.now()
        for second in range(1, 12):
            drips.writer.write(b"x")
            one.connections.sweep(began + second)
        assert await drips.is_sent_off()


async def test_an_answer_that_is_worked_at_for_long_is_waited_for() -> None:
    async with served() as one:
        waits = await one.client()
        await waits.asks("/slow")
        await one.until(lambda: len(one.connections))
        one.connections.sweep(one.now() + 9)
        await one.knocking()
        one.connections.sweep(one.now() + 10_000)
        one.hold.set()
        assert await waits.answer() == (200, b"slow")


async def test_who_takes_nothing_of_an_answer_is_sent_off_and_who_takes_it_slowly_gets_all_of_it() -> None:
    async with served() as one:
        takes, takes_nothing = await one.client(receive_bytes=4096), await one.client(receive_bytes=4096)
        takes_nothing.writer.transport.pause_reading()  # type: ignore[attr-defined] # or asyncio takes some on its own
        await takes_nothing.asks("/big")
        await takes.asks("/big")
        head = await takes.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await one.until(lambda: len(one.connections) == 2)
        body, now = b"", one.now()
        for later in range(4, 40, 4):
            body += await takes.reader.readexactly(1_000_000)
            one.connections.sweep(now + later)
        assert one.counted == {"slow": 1}
        takes_nothing.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await takes_nothing.is_sent_off()
        assert body + await takes.reader.readexactly(len(BIG) - len(body)) == BIG


async def test_a_long_answer_costs_a_piece_of_memory_for_each_client_and_not_a_copy() -> None:
    async with served() as one:
        for _ in range(4):
            await (await one.client(receive_bytes=4096)).asks("/big")
        await one.until(lambda: all(visit.unsent_bytes() > 100_000 for visit in one.connections.visits()))
        assert max(visit.buffered_bytes() for visit in one.connections.visits()) < 300_000


async def test_of_too_many_that_have_asked_for_nothing_yet_the_oldest_makes_way() -> None:
    async with served(Limits(connections=3)) as one:
        known = await one.known()
        first, second = await one.knocking(), await one.knocking()
        third = await one.knocking()
        assert await first.is_sent_off()
        for client in (second, third):
            client.writer.write(b"ck HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await client.answer() == (200, b"quick")
        await known.asks()
        assert await known.answer() == (200, b"quick")


async def test_one_client_with_many_connections_does_not_push_out_another_with_few() -> None:
    async with served(Limits(connections=4)) as one:
        few = await one.known("127.0.0.2")
        many = [await one.known("127.0.0.3") for _ in range(12)]
        await few.asks()
        assert await few.answer() == (200, b"quick")
        assert all([await gone.is_sent_off() for gone in many[:-3]])
        assert len(one.connections) == 4


async def test_where_all_are_at_work_one_more_is_told_to_ask_again_and_a_client_with_less_finds_room() -> None:
    async with served(Limits(connections=3)) as one:
        at_work = [await one.client() for _ in range(3)]
        for client in at_work:
            await client.asks("/slow")
        await one.until(lambda: one.connections.answering == 3)
        more = await one.client("127.0.0.2")
        await more.asks()
        head = (await more.reader.read()).decode().partition("\r\n\r\n")[0]
        assert head.startswith("HTTP/1.1 503 ")
        told = {"Retry-After: 1", "Connection: close", "Server: gpu-cost-exporter"}
        assert told | {"Cache-Control: no-store", "X-Content-Type-Options: nosniff"} <= set(head.split("\r\n"))
        one.hold.set()
        for client in at_work:
            assert await client.answer() == (200, b"slow")
        await one.known("127.0.0.2")


async def test_where_too_many_requests_are_answered_one_more_is_told_to_ask_again_and_probes_are_answered() -> None:
    async with served(Limits(answers=2)) as one:
        at_work = [await one.client() for _ in range(2)]
        for client in at_work:
            await client.asks("/slow")
        await one.until(lambda: one.connections.answering == 2)
        more = await one.client()
        await more.asks()
        assert (await more.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        probe = await one.client()
        await probe.asks("/healthz")
        assert await probe.answer() == (200, b"quick")


async def test_connections_that_say_nothing_take_no_place_and_of_too_many_the_oldest_goes() -> None:
    async with served(Limits(connections=2, silent=5)) as one:
        silent = [await one.client("127.0.0.3") for _ in range(5)]
        other = await one.client("127.0.0.2")
        await one.known()
        more = await one.client("127.0.0.3")
        await one.client("127.0.0.3")
        assert await silent[0].is_sent_off()
        for client in (other, silent[-1], more):
            await client.asks()
            assert await client.answer() == (200, b"quick")


async def test_a_client_with_most_places_makes_way_for_another_though_it_has_just_taken_them() -> None:
    async with served(Limits(connections=6)) as one:
        for _ in range(6):
            (await one.client("127.0.0.3")).writer.write(b"GET /qui")
        await one.until(lambda: len(one.connections) == 6)
        one.connections.turn = 0
        await one.known("127.0.0.2")
        assert one.connections.turn < 10


async def test_of_too_many_who_wait_for_a_place_the_newest_is_told_to_ask_again() -> None:
    async with served(Limits(connections=2, silent=3)) as one:
        for _ in range(2):
            await (await one.client()).asks("/slow")
        await one.until(lambda: one.connections.answering == 2)
        one.connections.limits = Limits(connections=2, silent=3)
        more = [await one.client() for _ in range(6)]
        for client in more:
            await client.asks()
        heads = [(await client.reader.read())[:13] for client in more]
        assert set(heads) == {b"HTTP/1.1 503 "}
        assert one.counted["refused"] == 6


async def test_silent_connections_of_many_addresses_make_way_though_the_newest_are_of_the_client_with_most() -> None:
    async with served(Limits(connections=2, silent=20)) as one:
        for number in range(2, 22):
            await one.client(f"127.0.1.{number}")
        for number in range(12, 22):
            await one.client(f"127.0.1.{number}")
        await one.known("127.0.2.1")
        assert one.counted["made_way"] >= 9


async def test_a_header_larger_than_any_need_be_is_cut_and_the_next_client_served() -> None:
    async with served() as one:
        heads = (b"x" * 200_000, b"x: y\r\n" * 20_000, b"x: " + b"y" * 100_000)
        clients = [await one.client() for _ in heads]
        for client, head in zip(clients, heads, strict=True):
            client.writer.write(b"GET /quick HTTP/1.1\r\nHost: x\r\n" + head)
        await one.known()
        for client in clients:
            said = b""
            with contextlib.suppress(ConnectionError):
                said = await client.reader.read()
            assert said[:13] in {b"", b"HTTP/1.1 431 ", b"HTTP/1.1 400 "}
        await one.known()


@pytest.mark.parametrize(
    "head",
    ["Content-Length: 100000000\r\n", "Transfer-Encoding: chunked\r\n"],
    ids=["with a length", "in chunks"],
)
async def test_a_body_larger_than_any_need_be_is_refused(head: str) -> None:
    async with served() as one:
        client = await one.client()
        await client.asks(head=head)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                client.writer.write(b"8000\r\n" + b"z" * 0x8000 + b"\r\n")
                await client.writer.drain()
        with contextlib.suppress(ConnectionError):
            said = await client.reader.read()
            assert said[:13] in {b"", b"HTTP/1.1 413 "}
        await one.known()


async def test_fewer_are_let_in_where_the_process_may_open_few_files() -> None:
    assert fitting(Limits(), 20_000) == Limits()
    few = fitting(Limits(), 256)
    assert (few.connections, few.silent) == (64, 64)
    assert fitting(Limits(), 64).connections == 8


def test_clients_are_told_apart_by_address_and_in_ipv6_by_network() -> None:
    assert peer_of(("10.0.0.1", 5)) == peer_of(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    assert peer_of(("2001:db8::1", 5, 0, 0)) == peer_of(("2001:db8::ffff:2", 6, 0, 0)) != peer_of(("2001:db8:0:1::", 5))
    assert peer_of(("fe80::1%eth0", 5, 0, 2)) == "fe80::/64"
    assert peer_of("") == ""


def test_what_clients_send_wrong_is_not_logged_and_what_goes_wrong_here_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="exporter.http")
    log = request_log()
    log.error("Error handling request", exc_info=BadStatusLine("GET"))
    assert not caplog.records
    log.error("Unhandled exception", exc_info=ValueError("ours"))
    assert len(caplog.records) == 1


async def test_what_was_done_to_clients_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="exporter.http")
    async with served(Limits(connections=1)) as one:
        for _ in range(5):
            await one.known()
        for later in range(50):
            one.connections.tell(one.now() + later)
        assert [record.getMessage() for record in caplog.records] == [
            "many or slow clients: 4 connections made way for others, 0 were answered 503, 0 took too long"
        ]

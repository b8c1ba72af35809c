"""Opens clients of one kind in one process, at the given number and rate, and prints their outcomes as JSON."""

import argparse
import asyncio
import contextlib
import gzip
import json
import random
import re
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

ENOUGH = 200
"""Clients after which it prints that it has begun."""
PIECE = b"y" * 65_536
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n%s\r\n"
PACKED = b"Accept-Encoding: gzip\r\n"
KINDS: Final = ("silent", "begins", "drips", "asks", "slow", "scrapes", "line", "headers", "body", "hello", "odd")
ODD: Final = (
    b"GET /metrics\r\n\r\n",
    b"GET / HTTP/0.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(40),
    b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\nSSH-2.0-x\r\n",
    b"GET http://other.example/metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //other.example/%2e%2e/%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /y",
    b"POST /-/release?seconds=x HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhellox",
    b"POST /-/release?seconds=x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /-/release?seconds=x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nxx",
    b"POST /-/release?seconds=x HTTP/1.1\r\nHost: x\r\nExpect: magic\r\nContent-Length: 2\r\n\r\nxx",
    b"POST /-/release?seconds=x HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\0\0",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: a\r\n folded\r\nX : b\r\n\r\n",
    b"GET /met\xffrics?\xfe=\xfd HTTP/1.1\r\nHost: \xff\r\nAccept: \xff\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n" + bytes(100),
    b"GET /metrics HTTP/1.1\nHost: x\n\n",
    b"\r\n\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 200,
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics?" + b"a" * 8000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1,5-9\r\nIf-None-Match: *\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: " + b"gzip;q=0.00000001," * 300 + b"\r\n\r\n",
    b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    bytes(range(256)),
)
"""Requests; the client waits after each."""


@dataclass(slots=True)
class Tally:
    """Outcomes of the clients."""

    opened: int = 0
    open: int = 0
    most_open: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcomes by status; ``ended``: closed without an answer; ``unheard``: not accepted; ``broken``: no whole page."""


class Source:
    """Opens clients of one kind until the time is over.

    Args:
        arguments: Arguments of the command line.
        on_begun: Call after the first clients have been opened.
    """

    def __init__(self, arguments: Sequence[str], on_begun: Callable[[], None] = lambda: None) -> None:
        self.options = options = parsed(arguments)
        self.on_begun = on_begun
        self.stopped = False
        self.tally = Tally()
        self.context = None
        if options.tls:
            self.context = ssl.create_default_context()
            self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.hello = hello()
        self.random = random.Random(options.seed)  # noqa: S311 - a choice of inputs

    async def run(self) -> None:
        """Hold up to ``count`` clients, opened at ``rate``, for ``seconds``; then close all."""
        options, tasks, begun = self.options, set[asyncio.Task[None]](), False
        began = time.monotonic()
        while (
            not self.stopped
            and time.monotonic() - began < options.seconds
            and (options.again or self.tally.opened < options.count)
        ):
            due = min(round((time.monotonic() - began) * options.rate) + 1, self.tally.opened + 200)
            while self.tally.opened < due and len(tasks) < options.count:
                if not options.again and self.tally.opened >= options.count:
                    break
                self.tally.opened += 1
                task = asyncio.ensure_future(self.client(self.tally.opened))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if not begun and self.tally.opened >= min(options.count, ENOUGH):
                begun = True
                self.on_begun()
            await asyncio.sleep(0.01)
        while tasks and not self.stopped and time.monotonic() - began < options.seconds:
            await asyncio.wait(tasks, timeout=0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End as if the time were over."""
        self.stopped = True

    async def client(self, number: int) -> None:
        """Run one client, from its connection to its end."""
        options, tally = self.options, self.tally
        try:
            async with asyncio.timeout(20):
                reader, writer = await self.connected(options.source[number % len(options.source)])
        except ConnectionResetError:
            tally.outcomes["ended"] += 1
            return
        except (OSError, TimeoutError):
            tally.outcomes["unheard"] += 1
            return
        tally.open += 1
        tally.most_open = max(tally.most_open, tally.open)
        try:
            outcome = await self.behave(reader, writer)
        except (OSError, EOFError):
            outcome = "ended"
        finally:
            tally.open -= 1
            writer.transport.abort()
        tally.outcomes[outcome] += 1

    async def connected(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection from an address.

        Raises:
            OSError: No connection is available.
        """
        own = socket.socket()
        try:
            own.settimeout(0)
            if self.options.kind == "slow":
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT: the same port to different servers
            own.bind((address, 0))
            await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.options.port))
        except BaseException:
            own.close()
            raise
        context = None if self.options.kind == "hello" else self.context
        return await asyncio.open_connection(
            sock=own, ssl=context, server_hostname="localhost" if context else None, limit=16_384
        )

    async def behave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Act as a client of this kind; return the outcome."""
        kind = self.options.kind
        if kind == "scrapes":
            return await self.scrape(reader, writer)
        if kind == "slow":
            return await self.read_slowly(reader, writer)
        if kind in {"line", "headers", "body"}:
            return await self.pour(reader, writer)
        first = {
            "silent": b"",
            "begins": b"GET /metr",
            "drips": b"GET /metrics HTTP/1.1\r\nX: ",
            "asks": GET % PACKED,
            "hello": self.hello,
            "odd": self.random.choice(ODD),
        }[kind]
        writer.write(first)
        dripping = asyncio.ensure_future(drip(writer)) if kind == "drips" else None
        try:
            said = await reader.read(16_384)
            while await reader.read(65_536):
                pass
        finally:
            if dripping:
                dripping.cancel()
        return status(said)

    async def scrape(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Scrape over one connection; each answer must be a whole page."""
        while True:
            writer.write(GET % PACKED)
            head = await reader.readuntil(b"\r\n\r\n")
            found = _LENGTH.search(head)
            body = await reader.readexactly(int(found[1])) if found else b""
            if status(head) != "200":
                return status(head)
            if not gzip.decompress(body).endswith(b"\n"):
                return "broken"
            self.tally.outcomes["200"] += 1
            await asyncio.sleep(self.options.pause)

    async def read_slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Read a page in plain text, a few bytes a second."""
        writer.write(GET % b"")
        said = piece = await reader.read(16)
        while piece:
            await asyncio.sleep(1)
            piece = await reader.read(16)
        return status(said)

    async def pour(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """Send 100 MB that no server expects; return the status of the answer."""
        head = {
            "line": GET[: -len(b"%s\r\n")] + b"X: ",
            "headers": GET[: -len(b"%s\r\n")],
            "body": b"POST /-/release HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n",
        }[self.options.kind]
        piece = b"x: y\r\n" * 10_000 if self.options.kind == "headers" else PIECE
        writer.write(head)
        with contextlib.suppress(OSError):
            for _ in range(100_000_000 // len(piece)):
                writer.write(piece)
                await writer.drain()
        return status(await reader.read(16_384))


def status(said: bytes) -> str:
    """Return the status of an answer."""
    return said[9:12].decode("ascii", "replace") if said.startswith(b"HTTP/1.") else "ended"


def hello() -> bytes:
    """Return the first message of a TLS client."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def drip(writer: asyncio.StreamWriter) -> None:
    """Send a byte a second."""
    while True:
        await asyncio.sleep(1)
        writer.write(b"x")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, default=100, help="clients at a time")
    parser.add_argument("--rate", type=float, default=1e6, help="new clients a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two scrapes of one client")
    parser.add_argument("--again", action="store_true", help="open another client for each that ends")
    parser.add_argument("--source", nargs="+", default=["127.0.0.1"], help="source addresses")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


async def _run(source: Source) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, source.stop)
    await source.run()


def main() -> int:
    """Run a source."""
    source = Source(sys.argv[1:], lambda: print("begun", flush=True))
    asyncio.run(_run(source))
    tally = source.tally
    print(json.dumps({"opened": tally.opened, "most_open": tally.most_open, "outcomes": tally.outcomes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

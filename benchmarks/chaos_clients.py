"""Clients that an agent under chaos gets too much of: a storm of scrapes, and requests that never end."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

import aiohttp

STORM_CLIENTS = 40
HALF_OPEN_CLIENTS = 25
_WAIT_SECONDS = 10.0


async def storm(url: str, seconds: float, there: Callable[[], bool]) -> Counter[str]:
    """Ask for a page from many clients without pause; what came: status, or the error's name.

    Args:
        url: Of the page.
        seconds: How long.
        there: Whether there is still somebody to be asked.
    """
    came: Counter[str] = Counter()
    until = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < until and there():
            try:
                async with session.get(url) as answer:
                    await answer.read()
                    came[str(answer.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                came[type(error).__name__] += 1

    connector = aiohttp.TCPConnector(limit=STORM_CLIENTS)
    wait = aiohttp.ClientTimeout(total=_WAIT_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=wait) as session:
        await asyncio.gather(*(client(session) for _ in range(STORM_CLIENTS)))
    return came


async def half_open(port: int, seconds: float) -> None:
    """Begin many requests at a port of this machine, say no more, and go away after a time."""
    writers: list[asyncio.StreamWriter] = []
    for _ in range(HALF_OPEN_CLIENTS):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Half: ")
            writers.append(writer)
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.close()

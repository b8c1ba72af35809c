"""Ends connections that ask for nothing or take nothing for long, so that no client can pile them up."""

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

PATIENCE_SECONDS = 120.0
"""More than a usual scrape interval, so that Prometheus keeps its connection."""
MOST_CONNECTIONS = 100
SWEEP_SECONDS = 5.0


class Connections:
    """Remembers when each connection last asked for something."""

    def __init__(self) -> None:
        self._asked: dict[object, float] = {}

    def note(self, request: web.Request) -> None:
        """A request has come in."""
        self._asked[request.protocol] = asyncio.get_running_loop().time()

    async def watch(self, server: web.Server) -> None:
        """Sweep until cancelled."""
        while True:
            self.sweep(server, asyncio.get_running_loop().time())
            await asyncio.sleep(SWEEP_SECONDS)

    def sweep(self, server: web.Server, now: float) -> None:
        """End what has been silent for too long, and the longest silent of too many. ``now`` is the loop's time."""
        self._asked = {one: self._asked.get(one, now) for one in server.connections}
        by_age = sorted(server.connections, key=lambda one: self._asked[one])
        surplus = len(by_age) - MOST_CONNECTIONS
        for place, connection in enumerate(by_age):
            silent = now - self._asked[connection] > PATIENCE_SECONDS
            if (silent or place < surplus) and connection.transport is not None:
                connection.transport.abort()  # close() would wait for a reader that does not read


CONNECTIONS = web.AppKey("CONNECTIONS", Connections)


def request_log() -> logging.Logger:
    """For aiohttp: without what clients do wrong, which any port scan would write into the log by the page."""
    log = logging.getLogger("exporter.http")
    log.addFilter(_is_ours)
    return log


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))

"""Serves an application until told to end, beside all else that runs as long, and then ends all of it."""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from exporter.exposition.connections import CONNECTIONS, runner_of
from exporter.exposition.web_access import Listening, WebAccess


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What is served, where, and to whom."""

    app: web.Application
    """With ``CONNECTIONS``."""
    listener: socket.socket
    """Bound; closed at the end."""
    access: WebAccess | None
    """Who may ask; ``None``: everybody, by plain HTTP."""
    access_failed: Callable[[], None]
    """Counts a new web configuration that is broken."""
    log: logging.Logger
    remark: str = ""
    """Stands in the log behind the address."""
    shutdown_seconds: float
    """How long open requests may take to finish at the end."""

    async def until(
        self,
        stop: asyncio.Event,
        parts: Iterable[Callable[[], Awaitable[object]]],
        last: Callable[[], Awaitable[None]],
    ) -> None:
        """Serve until ``stop`` is set.

        Args:
            stop: Set from outside.
            parts: What runs meanwhile; one that ends by an error ends all, and the error is raised.
            last: Done when the parts have ended, while requests are still answered.
        """
        runner = runner_of(self.app, self.shutdown_seconds)
        await runner.setup()
        listening = Listening(runner, self.listener, self.access)
        stopping = asyncio.ensure_future(stop.wait())
        tasks: list[asyncio.Future[Any]] = [stopping]
        try:
            listening.start()
            # What lives as long as this need not be searched for garbage: a full collection costs a scrape 40 ms.
            gc.collect()
            gc.freeze()
            self.log.info("listening on %s:%d%s", *self.listener.getsockname()[:2], self.remark)
            for part in (*parts, self.app[CONNECTIONS].watch, *self._access_watch(listening)):
                tasks.append(asyncio.ensure_future(part()))  # noqa: PERF401 - what began must end, though the next cannot
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            self.log.info("ending")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await last()
            listening.stop()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(runner.cleanup(), self.shutdown_seconds)

    def _access_watch(self, listening: Listening) -> Iterable[Callable[[], Awaitable[object]]]:
        if self.access:
            yield lambda: listening.watch(self.access_failed)

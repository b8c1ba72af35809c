"""A TCP relay that counts what passes through it: connections, and bytes of the answers."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 18


class ByteMeter:
    """Relays connections on a port of its own to another one on loopback.

    Args:
        target_port: Where the server listens; it may come and go.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self.connections = 0
        """Opened since the start."""
        self.answer_bytes = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        """Listen."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening and break what is open."""
        if self._server:
            self._server.close()
        for task in self._relays:
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task:
            self._relays.add(task)
            task.add_done_callback(self._relays.discard)
        self.connections += 1
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        try:
            # One side's end is the other's.
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream[1], count=False))
                group.create_task(self._pump(upstream[0], writer, count=True))
        except* OSError:
            pass
        finally:
            for one in (writer, upstream[1]):
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        with contextlib.closing(writer):
            while chunk := await reader.read(_CHUNK_BYTES):
                if count:
                    self.answer_bytes += len(chunk)
                writer.write(chunk)
                await writer.drain()

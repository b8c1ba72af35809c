"""Child processes of the demonstration: started, waited for until they answer, watched, and ended."""

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import aiohttp

END_SECONDS = 10.0
TAIL_LINES = 5


@dataclass(slots=True, kw_only=True)
class Part:
    """One program of the stack.

    ``ready_url`` answers 200 once it can be used; ``log`` takes what it writes. ``process`` is there after ``start``.
    """

    name: str
    command: Sequence[str]
    ready_url: str
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the program in a process group of its own, so that a Ctrl-C reaches the stack only."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    async def wait_ready(self, session: aiohttp.ClientSession, timeout_seconds: float) -> bool:
        """Ask until it answers 200; False when the time is over or it ended before."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while asyncio.get_running_loop().time() < deadline:
            if self.process is None or self.process.returncode is not None:
                return False
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(self.ready_url) as response:
                    if response.status == HTTPStatus.OK:
                        return True
            await asyncio.sleep(0.1)
        return False

    async def ended(self) -> int:
        """Wait for the program's end; its exit code (negative: the signal that ended it)."""
        return await self.process.wait() if self.process is not None else 0

    async def end(self) -> None:
        """Ask it to end, and after 10 s make it; then end what is left of its process group."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), END_SECONDS)
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self.process.wait()
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid if self.process else 0, number)

    def tail(self) -> str:
        """Give the last lines of its log, in one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        return " | ".join(lines[-TAIL_LINES:])


_QUIET_PORTS = range(15_000, 30_000)
"""Below those that the system gives to outgoing connections, one of which could take a port before its server does."""
_DRAWS = 20


def free_port(preferred: int) -> int:
    """Give ``preferred`` on 127.0.0.1 where nobody listens there, else a port that is free now; 0 prefers none."""
    drawn = (secrets.choice(_QUIET_PORTS) for _ in range(_DRAWS))
    for port in (*((preferred,) if preferred else ()), *drawn, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")

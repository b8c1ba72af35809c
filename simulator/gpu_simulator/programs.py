"""Programs of the demonstration: started, waited for, watched and ended; and the receiver of their alerts."""

import asyncio
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

END_SECONDS = 10.0
TAIL_LINES = 5


@dataclass(slots=True, kw_only=True)
class Program:
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


Alert = Mapping[str, Any]
"""One element of ``alerts`` of Alertmanager's webhook payload, version 4."""


def line(alert: Alert) -> str:
    """Say one alert in one line: state, name, severity, since when, and its summary."""
    labels, annotations = alert.get("labels", {}), alert.get("annotations", {})
    since = str(alert.get("startsAt", ""))
    try:
        since = datetime.fromisoformat(since).astimezone(UTC).strftime("%H:%M:%S UTC")
    except ValueError:
        since = since or "unknown time"
    words = annotations.get("summary") or ", ".join(f"{key}={value}" for key, value in sorted(labels.items()))
    state = str(alert.get("status", "firing")).upper()
    name, severity = labels.get("alertname", "unnamed alert"), labels.get("severity", "no severity")
    return " ".join(f"SIMULATED ALERT {state} {name} ({severity}, since {since}): {words}".split())


@dataclass(slots=True, kw_only=True)
class Webhook:
    """An HTTP server on loopback that hands each received alert to ``say`` as a line.

    ``port`` is 0 until ``start``; ``received`` keeps every alert, oldest first.
    """

    say: Callable[[str], None]
    port: int = 0
    received: list[Alert] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        app = web.Application()
        app.router.add_post("/", self._receive)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _receive(self, request: web.Request) -> web.Response:
        try:
            alerts = (await request.json())["alerts"]
        except (json.JSONDecodeError, KeyError, TypeError):
            return web.Response(status=400, text="expected Alertmanager's webhook payload, version 4\n")
        for alert in alerts:
            self.received.append(alert)
            self.say(line(alert))
        return web.Response(text="ok\n")


_QUERY = "g0.expr=gpu_pod_idle_for_seconds&g0.tab=1"
_SECONDS = 5.0


async def page_addresses(prometheus: int, alertmanager: int) -> list[tuple[str, str]]:
    """Return what to show people, and where: of each the first address that answers, as some packages have no pages.

    Args:
        prometheus: Its port on 127.0.0.1.
        alertmanager: The same.
    """
    figures = "api/v1/query?query=gpu_pod_idle_for_seconds"
    pages = (
        ("Prometheus", prometheus, (f"graph?{_QUERY}", f"classic/graph?{_QUERY}", figures)),
        ("alerts", prometheus, ("alerts", "classic/alerts", "api/v1/alerts")),
        ("Alertmanager", alertmanager, ("", "api/v2/alerts")),
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:
        return [
            (name, await _first(session, [f"http://127.0.0.1:{port}/{path}" for path in paths]))
            for name, port, paths in pages
        ]


async def _first(session: aiohttp.ClientSession, urls: Sequence[str]) -> str:
    for url in urls[:-1]:
        try:
            async with session.get(url) as response:
                if response.ok:
                    return url
        except (aiohttp.ClientError, TimeoutError):
            continue
    return urls[-1]

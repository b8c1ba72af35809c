"""Receives what Alertmanager sends and says each alert in one readable line; the last link of the demonstration."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

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

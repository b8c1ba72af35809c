"""Shows alerts of the demo: receives Alertmanager's webhook and formats each alert for a terminal."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

Alert = Mapping[str, Any]
"""Element of ``alerts`` in Alertmanager's webhook payload, version 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """Properties of the output, which is a terminal or a file."""

    columns: int = 100
    colours: bool = False

    def painted(self, text: str, look: str) -> str:
        """Return the text in the colour of a severity or state if colours are enabled."""
        return f"\033[{_COLOURS.get(look, '0')}m{text}\033[0m" if self.colours else text


_COLOURS = {"critical": "1;31", "warning": "33", "info": "36", "resolved": "32"}
_WIDEST = 110


def find_screen() -> Screen:
    """Return the properties of standard output: colours only on a terminal, and not with NO_COLOR."""
    terminal = sys.stdout.isatty()
    colours = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    columns = shutil.get_terminal_size().columns if terminal else _WIDEST
    return Screen(columns=min(columns, _WIDEST), colours=colours)


def lines(alert: Alert, screen: Screen) -> str:
    """Return an alert as a coloured line with time, name and severity, followed by summary and runbook."""
    labels, annotations = alert.get("labels", {}), alert.get("annotations", {})
    is_over = alert.get("status") == "resolved"
    when = str(alert.get("endsAt" if is_over else "startsAt", ""))
    with suppress(ValueError):
        when = datetime.fromisoformat(when).astimezone(UTC).strftime("%H:%M:%S UTC")
    severity = "resolved" if is_over else str(labels.get("severity", "no severity"))
    head = screen.painted(f"{severity.upper():<8} {labels.get('alertname', 'unnamed alert')}", severity)
    words = str(annotations.get("summary") or ", ".join(f"{key}={value}" for key, value in sorted(labels.items())))
    body = words.split() + ([] if is_over else str(annotations.get("runbook_url", "")).split())
    wrapped = textwrap.fill(" ".join(body), screen.columns - 2, break_long_words=False, break_on_hyphens=False)
    return f"SIMULATED {when} {head}\n{textwrap.indent(wrapped, '  ')}"


@dataclass(slots=True, kw_only=True)
class Webhook:
    """HTTP server on loopback that calls ``say`` with the text of each received alert.

    ``port`` is 0 until ``start``.
    """

    say: Callable[[str], None]
    screen: Screen = field(default_factory=Screen)
    port: int = 0
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
            self.say(lines(alert, self.screen))
        return web.Response(text="ok\n")

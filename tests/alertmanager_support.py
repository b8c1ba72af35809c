"""A real Alertmanager on the shipped example; only addresses and waits are the test's."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from yaml_support import read_yaml

from gpu_simulator.stack import Program, find_tools, free_port

EXAMPLE = Path(__file__).resolve().parent.parent / "deploy" / "alertmanager-example.yaml"
TEMPLATE = EXAMPLE.with_suffix(".tmpl")
WAITS = {"group_wait": "1s", "group_interval": "1s", "repeat_interval": "1h"}
QUIET_SECONDS = 4.0
"""Longer than a wait and two intervals: what has not come by then does not come."""

Message = Mapping[str, Any]


def alert(
    name: str, severity: str, *, annotations: Mapping[str, str] | None = None, **labels: str
) -> dict[str, Mapping[str, str]]:
    """An alert as Prometheus sends it, of now."""
    words = {
        "summary": f"{name} of {labels.get('workload_name', labels.get('node', 'all'))}",
        "description": "Mend: so. Mute: so.",
        "runbook_url": f"https://example.com/docs/runbook.md#{name.lower()}",
        "dashboard": "/d/gpu-cost-fleet/gpu-fleet",
    }
    return {
        "labels": {"alertname": name, "severity": severity, **labels},
        "annotations": {**words, **(annotations or {})},
    }


@dataclass(slots=True, kw_only=True)
class Receivers:
    """What has been sent, by receiver: the bodies of requests, oldest first."""

    got: list[tuple[str, Message]] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, receiver: str) -> list[Message]:
        """Messages of one receiver."""
        return [message for name, message in self.got if name == receiver]

    @property
    def text(self) -> str:
        """All words of all messages."""
        return "\n".join(str(message) for _, message in self.got)

    async def until(self, condition: Callable[["Receivers"], bool], seconds: float = 30.0) -> None:
        """Wait for messages."""
        async with asyncio.timeout(seconds):
            while not condition(self):
                self._arrived.clear()
                await self._arrived.wait()

    async def receive(self, request: web.Request) -> web.Response:
        """Take one message."""
        self.got.append((request.match_info["receiver"], await request.json()))
        self._arrived.set()
        return web.Response(text="ok")


def for_test(url: str) -> dict[str, Any]:
    """The example with receivers at ``url`` and short waits; all else as it is shipped."""
    config: dict[str, Any] = read_yaml(EXAMPLE.read_text(encoding="utf-8"))
    for receiver in config["receivers"]:
        for slack in receiver.get("slack_configs", ()):
            slack["api_url"] = f"{url}/{receiver['name']}"
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = f"{url}/{receiver['name']}"
    others = next(receiver for receiver in config["receivers"] if receiver["name"] == "others")
    others["webhook_configs"] = [{"url": f"{url}/others"}]
    routes = [config["route"]]
    for route in routes:
        route.update(WAITS)
        routes.extend(route.get("routes", ()))
    return config


@dataclass(slots=True, kw_only=True)
class Alertmanager:
    """A running Alertmanager."""

    url: str
    receivers: Receivers

    async def post(self, alerts: Iterable[Mapping[str, Mapping[str, str]]], *, over: bool = False) -> None:
        """Send alerts as Prometheus does: firing for the next hour, or over."""
        now = datetime.now(UTC)
        times = {"startsAt": now.isoformat()}
        times["endsAt"] = (now if over else now + timedelta(hours=1)).isoformat()
        body = [{**one, **times} for one in alerts]
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/api/v2/alerts", json=body) as response,
        ):
            assert response.status == 200, await response.text()

    async def inhibited(self) -> set[str]:
        """Names of workloads, else of nodes, whose alerts are held back now."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/api/v2/alerts") as response,
        ):
            alerts = await response.json()
        return {
            one["labels"].get("workload_name") or one["labels"].get("node", "")
            for one in alerts
            if one["status"]["inhibitedBy"]
        }


def with_webhooks(url: str) -> dict[str, Any]:
    """The same with a webhook for every receiver that is told anything: it says each alert's labels and state."""
    config = for_test(url)
    for receiver in config["receivers"]:
        if receiver.pop("slack_configs", None):
            receiver["webhook_configs"] = [{"url": f"{url}/{receiver['name']}", "send_resolved": True}]
    return config


@asynccontextmanager
async def alertmanager(
    directory: Path, configure: Callable[[str], dict[str, Any]] = for_test
) -> AsyncIterator[Alertmanager]:
    """Start one on the example, with a server for all of its receivers."""
    program = find_tools().alertmanager
    if program is None:
        pytest.skip("needs prometheus-alertmanager on the PATH: make install")
    receivers = Receivers()
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{receiver}", receivers.receive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    shutil.copy(TEMPLATE, directory)
    file = directory / "alertmanager.yml"
    file.write_text(yaml.safe_dump(configure(f"http://127.0.0.1:{runner.addresses[0][1]}")), encoding="utf-8")
    port = free_port(0)
    part = Program(
        name="alertmanager",
        command=(
            program,
            f"--config.file={file}",
            f"--storage.path={directory / 'storage'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--web.external-url=https://alerts.example.com",
            "--cluster.listen-address=",
            "--web.route-prefix=/",
        ),
        ready_url=f"http://127.0.0.1:{port}/-/ready",
        log=directory / "alertmanager.log",
    )
    await part.start()
    try:
        async with aiohttp.ClientSession() as session:
            assert await part.wait_ready(session, 30.0), part.tail()
        yield Alertmanager(url=f"http://127.0.0.1:{port}", receivers=receivers)
    finally:
        await part.end()
        await runner.cleanup()

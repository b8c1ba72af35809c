"""Three simulated nodes, their agents, a real Prometheus with the shipped rules in short, and a real Alertmanager."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpu_simulator import stack
from gpu_simulator.stack import RULES, Program, find_tools, free_port
from tests.alertmanager_support import Alertmanager, alertmanager, with_webhooks

SCENARIOS = Path(__file__).resolve().parent / "fixtures" / "alerts"
AGENTS: Mapping[str, tuple[str, ...]] = {
    "owners": ("--kube-metadata", "on"),
    "plain": ("--kube-metadata", "off"),
    "doomed": ("--kube-metadata", "on"),
}
"""Scenario by scenario: options of its agent."""

HOUR = "30s"
"""How long an hour of the agents' windows takes."""
SHORTER = {
    "interval: 1m": "interval: 1s",
    "[15m]": "[10s]",
    "keep_firing_for: 15m": "keep_firing_for: 10s",
    "for: 15m": "for: 8s",
    "for: 10m": "for: 4s",
    "for: 5m": "for: 4s",
}
UNKNOWN = (
    stack.Substitution(shipped="interval: 5m", demo="interval: 1s", what="how often slow rules run"),
    stack.Substitution(shipped="for: 30m", demo="for: 4s", what="delay of what is unknown"),
)
SUBSTITUTIONS = (
    *(item._replace(demo=SHORTER.get(item.shipped, item.demo)) for item in stack.SUBSTITUTIONS),
    *UNKNOWN,
)
"""The demonstration's, shorter still. As in the shipped rules an exporter is down before waste outlives its cause."""

CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["{alertmanager}"]}}]}}]}}
scrape_configs:
  - job_name: gpu-cost-exporter
    honor_labels: true
    static_configs: [{{targets: {agents}}}]
"""

Alert = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class AlertStack:
    """All of it, running."""

    manager: Alertmanager
    prometheus: Program
    agents: Mapping[str, Program]
    since: float = field(default_factory=time.time)

    def told(self, status: str = "firing", **labels: str) -> list[tuple[str, Alert]]:
        """Who was sent an alert of these labels, and the alert; oldest first."""
        return [
            (receiver, one)
            for receiver, message in self.manager.receivers.got
            for one in message["alerts"]
            if one["status"] == status and labels.items() <= one["labels"].items()
        ]

    async def until_told(self, seconds: float, status: str = "firing", **labels: str) -> tuple[str, Alert]:
        """Wait for an alert; its receiver and itself."""
        try:
            await self.manager.receivers.until(lambda _: bool(self.told(status, **labels)), seconds)
        except TimeoutError:
            raise AssertionError(
                f"nobody was told {labels} ({status}) within {seconds} s; told: {self.summaries()}; "
                f"known to Prometheus: {await self.alerts()}"
            ) from None
        return self.told(status, **labels)[0]

    def summaries(self) -> list[str]:
        """What has been told, in words."""
        return [
            f"{receiver}: {one['status']} {one['labels']['alertname']}: {one['annotations'].get('summary')}"
            for receiver, message in self.manager.receivers.got
            for one in message["alerts"]
        ]

    async def ask(self, path: str, **query: str) -> Any:  # noqa: ANN401 - JSON of any shape
        """Data of Prometheus' answer."""
        url = f"{self.prometheus.ready_url.removesuffix('/-/ready')}/api/v1/{path}"
        async with aiohttp.ClientSession() as session, session.get(url, params=query) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def alerts(self, selector: str = "ALERTS") -> list[Mapping[str, str]]:
        """Labels of every alert that has been pending or firing since the start."""
        found: list[Mapping[str, str]] = await self.ask(
            "series", **{"match[]": selector, "start": str(self.since), "end": str(time.time())}
        )
        return found

    async def ask_value(self, expression: str) -> list[float]:
        """Values of an instant query."""
        data = await self.ask("query", query=expression)
        return [float(row["value"][1]) for row in data["result"]]

    async def held(self) -> Mapping[tuple[str, str], bool]:
        """What Alertmanager holds now, by alert and workload, and whether it keeps it back."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.manager.url}/api/v2/alerts") as response,
        ):
            answer = await response.json()
        return {
            (one["labels"]["alertname"], one["labels"].get("workload_name", "")): bool(one["status"]["inhibitedBy"])
            for one in answer
        }

    async def kill(self, agent: str) -> None:
        """End an agent and its children at once, as the kernel does when memory runs out."""
        process = self.agents[agent].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def until(check: Callable[[], Awaitable[object]], what: str, seconds: float) -> None:
    """Ask until it holds."""
    deadline = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < deadline, f"not seen within {seconds} s: {what}"
        await asyncio.sleep(0.2)


def _agents(directory: Path) -> dict[str, Program]:
    found = {}
    for name, options in AGENTS.items():
        port = free_port(0)
        command = (sys.executable, "-m", "exporter", "agent", "--simulate", str(SCENARIOS / f"{name}.yaml"))
        found[name] = Program(
            name=f"agent {name}",
            command=(*command, "--simulate-hour", HOUR, "--listen", f"127.0.0.1:{port}", *options),
            ready_url=f"http://127.0.0.1:{port}/readyz",
            log=directory / f"agent-{name}.log",
        )
    return found


def _prometheus(program: str, manager: Alertmanager, agents: Mapping[str, Program], directory: Path) -> Program:
    rules = directory / "rules.yaml"
    rules.write_text(stack.shorten(RULES.read_text(encoding="utf-8"), str(RULES), SUBSTITUTIONS), encoding="utf-8")
    targets = [part.ready_url.removeprefix("http://").removesuffix("/readyz") for part in agents.values()]
    config = directory / "prometheus.yml"
    config.write_text(
        CONFIG.format(
            rules=json.dumps(str(rules)),
            alertmanager=manager.url.removeprefix("http://"),
            agents=json.dumps(targets),
        ),
        encoding="utf-8",
    )
    port = free_port(0)
    return Program(
        name="prometheus",
        command=(
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ),
        ready_url=f"http://127.0.0.1:{port}/-/ready",
        log=directory / "prometheus.log",
    )


@asynccontextmanager
async def alert_stack(directory: Path) -> AsyncIterator[AlertStack]:
    """Start all of it; Prometheus once the agents answer, so that no target is down at first."""
    program = find_tools().prometheus
    if program is None:
        pytest.skip("needs prometheus on the PATH: make install")
    started: list[Program] = []

    async def start(*parts: Program) -> None:
        started.extend(parts)
        for part in parts:
            await part.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
            ready = await asyncio.gather(*(part.wait_ready(session, 40.0) for part in parts))
        assert all(ready), [part.tail() for part in parts]

    async with alertmanager(directory, with_webhooks) as manager:
        try:
            agents = _agents(directory)
            await start(*agents.values())
            prometheus = _prometheus(program, manager, agents, directory)
            await start(prometheus)
            yield AlertStack(manager=manager, prometheus=prometheus, agents=agents)
        finally:
            await asyncio.gather(*(part.end() for part in started))

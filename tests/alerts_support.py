"""Real Prometheus and Alertmanager over simulated nodes, and the queries of other consumers."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from agent_support import AgentProcess, running_agent
from aiohttp import web
from chart_support import FIXTURES, Document, Scraper, documents, of_kind, page_server, scrape_config, scraping
from files_support import read_yaml

from gpu_simulator import stack
from gpu_simulator.stack import RULES, Program, find_tools, free_port

EXAMPLE = Path(__file__).resolve().parent.parent / "deploy" / "alertmanager-example.yaml"
TEMPLATE = EXAMPLE.with_suffix(".tmpl")
WAITS = {"group_wait": "1s", "group_interval": "1s", "repeat_interval": "1h"}
QUIET_SECONDS = 4.0
"""Longer than a wait and two intervals: a message that is missing by then does not come."""

Message = Mapping[str, Any]


def alert(
    name: str, severity: str, *, annotations: Mapping[str, str] | None = None, **labels: str
) -> dict[str, Mapping[str, str]]:
    """Return an alert of now, as Prometheus sends it."""
    words = {
        "summary": f"{name} of {labels.get('workload_name', labels.get('node', 'all'))}",
        "description": "Fix: so. Mute: so.",
        "runbook_url": f"https://example.com/docs/runbook.md#{name.lower()}",
        "dashboard": "/d/gpu-cost-fleet/gpu-fleet",
    }
    return {
        "labels": {"alertname": name, "severity": severity, **labels},
        "annotations": {**words, **(annotations or {})},
    }


@dataclass(slots=True, kw_only=True)
class Receivers:
    """Bodies of the requests that each receiver got, oldest first."""

    got: list[tuple[str, Message]] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, receiver: str) -> list[Message]:
        """Return the messages of one receiver."""
        return [message for name, message in self.got if name == receiver]

    @property
    def text(self) -> str:
        """Return the text of all messages."""
        return "\n".join(str(message) for _, message in self.got)

    async def until(self, condition: Callable[["Receivers"], bool], seconds: float = 30.0) -> None:
        """Wait for messages."""
        async with asyncio.timeout(seconds):
            while not condition(self):
                self._arrived.clear()
                await self._arrived.wait()

    async def receive(self, request: web.Request) -> web.Response:
        """Accept one message."""
        self.got.append((request.match_info["receiver"], await request.json()))
        self._arrived.set()
        return web.Response(text="ok")


def for_test(url: str) -> dict[str, Any]:
    """Return the example with receivers at ``url`` and short waits; all else is as shipped."""
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
        """Post alerts as Prometheus does: firing for the next hour, or resolved."""
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
        """Return the workloads, or nodes, of the alerts that are inhibited now."""
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
    """Return the configuration with a webhook for every receiver with alerts: it logs labels and state."""
    config = for_test(url)
    for receiver in config["receivers"]:
        if receiver.pop("slack_configs", None):
            receiver["webhook_configs"] = [{"url": f"{url}/{receiver['name']}", "send_resolved": True}]
    return config


@asynccontextmanager
async def alertmanager(
    directory: Path, configure: Callable[[str], dict[str, Any]] = for_test
) -> AsyncIterator[Alertmanager]:
    """Start Alertmanager on the example, with a server for all of its receivers."""
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


SCENARIOS = Path(__file__).resolve().parent / "fixtures" / "alerts"
AGENTS: Mapping[str, tuple[str, ...]] = {
    "owners": ("--kube-metadata", "on"),
    "plain": ("--kube-metadata", "off"),
    "doomed": ("--kube-metadata", "on"),
}
"""Options of the agent, by scenario."""

HOUR = "30s"
"""Duration of an hour in the agents' windows."""
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
"""As in the demonstration, but shorter. As in the shipped rules, an exporter is down before waste alerts end."""

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
    """The running stack."""

    manager: Alertmanager
    prometheus: Program
    agents: Mapping[str, Program]
    since: float = field(default_factory=time.time)

    def received(self, status: str = "firing", **labels: str) -> list[tuple[str, Alert]]:
        """Return the receiver and the alert for each sent alert with these labels; oldest first."""
        return [
            (receiver, one)
            for receiver, message in self.manager.receivers.got
            for one in message["alerts"]
            if one["status"] == status and labels.items() <= one["labels"].items()
        ]

    async def until_received(self, seconds: float, status: str = "firing", **labels: str) -> tuple[str, Alert]:
        """Wait for an alert; return its receiver and the alert."""
        try:
            await self.manager.receivers.until(lambda _: bool(self.received(status, **labels)), seconds)
        except TimeoutError:
            raise AssertionError(
                f"no message for {labels} ({status}) within {seconds} s; messages: {self.summaries()}; "
                f"alerts in Prometheus: {await self.alerts()}"
            ) from None
        return self.received(status, **labels)[0]

    def summaries(self) -> list[str]:
        """Return the sent alerts as text."""
        return [
            f"{receiver}: {one['status']} {one['labels']['alertname']}: {one['annotations'].get('summary')}"
            for receiver, message in self.manager.receivers.got
            for one in message["alerts"]
        ]

    async def ask(self, path: str, **query: str) -> Any:  # noqa: ANN401 - JSON of any shape
        """Query Prometheus; return the data of its answer."""
        url = f"{self.prometheus.ready_url.removesuffix('/-/ready')}/api/v1/{path}"
        async with aiohttp.ClientSession() as session, session.get(url, params=query) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]

    async def alerts(self, selector: str = "ALERTS") -> list[Mapping[str, str]]:
        """Return the labels of every alert that has been pending or firing since the start."""
        found: list[Mapping[str, str]] = await self.ask(
            "series", **{"match[]": selector, "start": str(self.since), "end": str(time.time())}
        )
        return found

    async def ask_value(self, expression: str) -> list[float]:
        """Return the values of an instant query."""
        data = await self.ask("query", query=expression)
        return [float(row["value"][1]) for row in data["result"]]

    async def held(self) -> Mapping[tuple[str, str], bool]:
        """Return the alerts in Alertmanager now, by alert and workload, and whether each is inhibited."""
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
    """Poll until a condition holds."""
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
    """Start the stack; Prometheus starts after the agents answer, so that no target is down at first."""
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


PUBLIC_RULES = Path(__file__).resolve().parent.parent / "benchmarks" / "public_rules.yaml"
NODES = {
    "node-a": ("switch-over-node.yaml", ()),
    "node-b": ("consumers-node.yaml", ("--dcgm-address", "localhost:5555")),
}
HIDING = "gpu-cost-gpu-cost-exporter-4f6zq"
"""An idle pod of a tenant, with a name like those of the agent's pods: it still holds its GPU."""
HOLDERS = {
    "node-a": {"train-0", "notebook-4", "llm-a", "llm-b"},
    "node-b": {"resnet-0", "bert-serving", "idle-slice", "etl-a", "etl-b", HIDING},
}
NAMESPACES = {
    "train-0": "ml",
    "notebook-4": "lab",
    "llm-a": "serving",
    "llm-b": "serving",
    "resnet-0": "vision",
    "bert-serving": "vision",
    "idle-slice": "vision",
    "etl-a": "batch",
    "etl-b": "batch",
    HIDING: "lab",
}


def labels_in(name: str) -> dict[str, str]:
    """Return the labels of a series as on a page."""
    return dict(re.findall(r'([A-Za-z_]+)="([^"]*)"', name))


@contextmanager
def agents() -> Iterator[dict[str, AgentProcess]]:
    """Start the agents of both nodes; wait until they show every holder."""
    with ExitStack() as stack:
        found = {}
        for node, (file, words) in NODES.items():
            simulated = ("--simulate", str(FIXTURES / file), "--dcgm-pod-uid", "on", "--sample-interval", "500ms")
            found[node] = stack.enter_context(running_agent(*simulated, *words, env={"NODE_NAME": node}))
        for node, agent in found.items():
            agent.until(
                lambda page, node=node: (  # type: ignore[misc] # mypy infers no defaults of a lambda
                    {
                        labels["pod"]
                        for name in page
                        if name.startswith("DCGM_FI_PROF_GR_ENGINE_ACTIVE") and "pod_uid" in (labels := labels_in(name))
                    }
                    >= HOLDERS[node]
                ),
                f"every holder of {node} with its uid",
            )
        yield found


@contextmanager
def kube_state_metrics() -> Iterator[str]:
    """Serve a page like that of kube-state-metrics for the pods with GPUs; yield its address."""
    lines = []
    for pod, namespace in NAMESPACES.items():
        labels = f'namespace="{namespace}",pod="{pod}",uid="{pod}"'
        lines.append(f'kube_pod_status_phase{{{labels},phase="Running"}} 1')
        lines.append(f"kube_pod_created{{{labels}}} 1600000000")
        resource = 'container="main",resource="nvidia_com_gpu",unit="integer"'
        lines.append(f"kube_pod_container_resource_requests{{{labels},{resource}}} 1")
    with page_server(lambda: "\n".join(lines) + "\n") as address:
        yield address


def jobs(found: Mapping[str, AgentProcess], state: str, folder: Path, *, honor: bool) -> list[Document]:
    """Return the scrape configurations of the agents, from the chart's monitor, and of kube-state-metrics."""
    values = f"monitoring: {{podMonitor: {{enabled: true}}, scrape: {{honorLabels: {str(honor).lower()}}}}}"
    monitor = next(one for one in documents(values=values) if one["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    name = of_kind(documents(values=values), "DaemonSet")["metadata"]["name"]
    ours = []
    for node, agent in found.items():
        pod = {"namespace": "gpu-cost", "pod": f"{name}-x7x7x", "container": "agent", "endpoint": "metrics"}
        labels = {**pod, "instance": node}
        ours.append(scrape_config(endpoint, node, f"127.0.0.1:{agent.port}", labels, folder))
    ksm = {"job_name": "kube-state-metrics", "honor_labels": True, "static_configs": [{"targets": [state]}]}
    return [*ours, ksm]


@contextmanager
def prometheuses(found: Mapping[str, AgentProcess], folder: Path) -> Iterator[dict[bool, Scraper]]:
    """Start two Prometheus, one of which honours labels, each with several scrapes of both nodes."""
    with ExitStack() as stack:
        state = stack.enter_context(kube_state_metrics())
        servers = {}
        for honor in (True, False):
            place = folder / str(honor)
            place.mkdir()
            servers[honor] = stack.enter_context(
                scraping(place, jobs(found, state, place, honor=honor), rules=[PUBLIC_RULES])
            )
        for server in servers.values():
            server.until('count_over_time(up{job="gpu-cost-exporter"}[1m]) >= 4', count=2)
        yield servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A sample, as read by OpenCost's collector."""

    name: str
    labels: dict[str, str]
    value: float


class PageError(ValueError):
    """OpenCost's parser refuses the whole page, and with it the target."""


_SKIPPED = re.compile(r"[^#{},=\"\w.+-]+", re.ASCII)
_TOKENS = (
    ("comment", re.compile(r"#[^\n]*(?:\n|$)")),
    ("sign", re.compile(r"[{},=]")),
    ("string", re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)),
    ("word", re.compile(r"[A-Za-z][A-Za-z0-9_]*")),
    # It consumes the next character, too.
    ("value", re.compile(r"([0-9.+\-][NaInf+\-._eE0-9]*).?", re.DOTALL)),
    # The lexer skips unknown characters silently: a leading underscore of a name, a colon.
    ("nothing", re.compile(r"_")),
)
_ESCAPES = {r"\n": "\n", r"\\": "\\", r"\"": '"'}


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        if found := _SKIPPED.match(text, place):
            place = found.end()
            continue
        for kind, pattern in _TOKENS:
            if found := pattern.match(text, place):
                place = found.end()
                value = found[found.lastindex or 0]
                if kind == "string":
                    value = re.sub(r'\\[n\\"]', lambda one: _ESCAPES[one[0]], value)
                if kind not in {"comment", "nothing"}:
                    yield ("value" if kind == "word" and value in {"NaN", "Inf"} else kind), value
                break
        else:
            raise PageError(f"an open string at {text[place : place + 40]!r}")


def opencost_reads(text: str) -> list[Record]:
    """Parse a page as OpenCost's collector does (2026): newlines have no meaning, one fault refuses the whole page.

    Raises:
        PageError: A token is not the expected one.
    """
    tokens = [*_tokens(text), ("end", "")]
    found, place = [], 0

    def take(kind: str, sign: str = "") -> str:
        nonlocal place
        token = tokens[place]
        if token[0] != kind or (sign and token[1] != sign):
            raise PageError(f"expected {sign or kind}, got {token} after {tokens[max(0, place - 6) : place]}")
        place += 1
        return token[1]

    while tokens[place][0] != "end":
        name, labels = take("word"), {}
        if tokens[place] == ("sign", "{"):
            place += 1
            while tokens[place] != ("sign", "}"):
                if tokens[place] == ("sign", ","):
                    place += 1
                    continue
                label = take("word")
                take("sign", "=")
                labels[label] = take("string")
            place += 1
        value = float(take("value"))
        if tokens[place][0] == "value":
            int(take("value"))
        found.append(Record(name=name, labels=labels, value=value))
    return found

"""A simulated node with agent, Prometheus, Alertmanager, a webhook for alerts and the cost service, on one machine."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from exporter.errors import ConfigError, ExporterError
from gpu_simulator.fleet import Writing, write_fleet
from gpu_simulator.fleet_plan import HOUR_SECONDS, RECORDED_AFTER_SECONDS, FleetPlan, team_names
from gpu_simulator.models import table
from gpu_simulator.scenario import load

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

    async def wait_ready(
        self, session: aiohttp.ClientSession, timeout_seconds: float, stop: asyncio.Event | None = None
    ) -> bool:
        """Ask until it answers 200; False when the time is over, it ended before, or ``stop`` was set."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while asyncio.get_running_loop().time() < deadline and not (stop and stop.is_set()):
            if self.process is None or self.process.returncode is not None:
                return False
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(self.ready_url) as response:
                    if response.status == HTTPStatus.OK:
                        return True
            await asyncio.sleep(0.1)
        return False

    @property
    def exit_code(self) -> int | None:
        """Its exit code (negative: the signal that ended it); ``None`` while it runs."""
        return self.process.returncode if self.process is not None else 1

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
        return " | ".join(lines[-TAIL_LINES:]) or "it wrote nothing"


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


class Substitution(NamedTuple):
    """One text of the rules file, what stands there in the demonstration, and what it is."""

    shipped: str
    demo: str
    what: str


_CONFIGURATION = table("stack")
SUBSTITUTIONS = tuple(Substitution(*row) for row in _CONFIGURATION["substitutions"])
"""In this order: a longer text comes before one that it contains."""


def shorten(rules: str, source: str, substitutions: tuple[Substitution, ...] = SUBSTITUTIONS) -> str:
    """Put the demonstration's windows into a rules file.

    Args:
        rules: Text of ``rules/prometheus-rules.yaml``.
        source: Where the text comes from, for the error.
        substitutions: What to replace, in order.

    Returns:
        The same rules, with every shipped text replaced.

    Raises:
        ConfigError: A text to be replaced is not in the file, so the file and this table do not belong together.
    """
    missing = [item for item in substitutions if item.shipped not in rules]
    if missing:
        advice = "is not in it; take the rules file of this version"
        raise ConfigError(*(f"{source}: {item.shipped!r} ({item.what}) {advice}" for item in missing))
    for item in substitutions:
        rules = rules.replace(item.shipped, item.demo)
    return rules


NODES = 12
CLUSTERS = ("sim-research", "sim-serving")
_PROMTOOL_SECONDS = 120.0


def demo_fleet(now_seconds: float, days: int) -> FleetPlan:
    """The fleet whose past ends with the last hour that is recorded: Prometheus appends nothing before its newest."""
    end = int((now_seconds - RECORDED_AFTER_SECONDS) // HOUR_SECONDS) * HOUR_SECONDS
    return FleetPlan(nodes=NODES, days=days, end_seconds=end, clusters=CLUSTERS)


def make_history(fleet: FleetPlan, promtool: str, blocks: Path) -> None:
    """Write the fleet's past as blocks into a directory that Prometheus has not opened yet; takes seconds.

    Raises:
        ExporterError: promtool could not make them; its words are in the message.
    """
    blocks.mkdir(parents=True, exist_ok=True)
    text = blocks.with_suffix(".om")
    with text.open("w", encoding="utf-8") as output:
        write_fleet(fleet, output, Writing(form="openmetrics"))
    command = [promtool, "tsdb", "create-blocks-from", "--max-block-duration=768h", "--quiet", "openmetrics"]
    try:
        made = subprocess.run(  # noqa: S603 - promtool, found on the PATH, on a file of ours
            [*command, str(text), str(blocks)], check=False, capture_output=True, text=True, timeout=_PROMTOOL_SECONDS
        )
        problem = "" if made.returncode == 0 else (made.stderr or made.stdout).strip()[-500:] or "it said nothing"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    finally:
        text.unlink()
    if problem:
        raise ExporterError(f"{promtool}: could not make the simulated fleet's past: {problem}")


def demo_budgets(fleet: FleetPlan) -> str:
    """A budget file for teams of the fleet."""
    first, second = team_names(fleet)[:2]
    return str(_CONFIGURATION["budgets"]).format(first=first, second=second)


RULES = Path(__file__).resolve().parents[2] / "rules" / "prometheus-rules.yaml"
READY_SECONDS = 60.0
_LOOK_SECONDS = 0.2
HISTORY_DAYS = 62
"""So that the month before this one is whole."""
SCRAPE_INTERVAL = "2s"
GET_THEM = "get them with: make install, or apt-get install prometheus prometheus-alertmanager"

HOUR = "1m"
"""How long an hour of activity windows takes, so that an alert comes in two minutes."""

ALERTMANAGER_CONFIG: str = _CONFIGURATION["alertmanager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What to show and where; ports are preferences, taken only where they are free."""

    scenario: str
    rules: Path = RULES
    substitutions: tuple[Substitution, ...] = SUBSTITUTIONS
    agent_port: int = 9400
    prometheus_port: int = 9090
    alertmanager_port: int = 9093
    cost_port: int = 9401
    agent_command: Sequence[str] = (sys.executable, "-m", "exporter", "agent")
    history_days: int = 0
    """Days of a simulated fleet's past for the cost service to show; 0: no past, and no cost service."""

    def with_free_ports(self) -> "StackOptions":
        """Return the same with ports that are free now."""
        return replace(
            self,
            agent_port=free_port(self.agent_port),
            prometheus_port=free_port(self.prometheus_port),
            alertmanager_port=free_port(self.alertmanager_port),
            cost_port=free_port(self.cost_port),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Paths of the programs; ``None`` where there is none."""

    prometheus: str | None
    alertmanager: str | None
    promtool: str | None = None


def find_tools() -> Tools:
    """Look on the PATH; Debian names Alertmanager ``prometheus-alertmanager``."""
    return Tools(
        prometheus=shutil.which("prometheus"),
        alertmanager=shutil.which("prometheus-alertmanager") or shutil.which("alertmanager"),
        promtool=shutil.which("promtool"),
    )


def _configure(options: StackOptions, webhook_port: int, directory: Path) -> tuple[Path, Path]:
    """Write the configurations of Alertmanager and Prometheus, and the rules that the second one reads."""
    try:
        shipped = options.rules.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.rules}: {error.strerror}; run it from a checkout of the repository") from error
    rules = directory / "rules.yaml"
    rules.write_text(shorten(shipped, str(options.rules), options.substitutions), encoding="utf-8")
    alertmanager_file = directory / "alertmanager.yml"
    alertmanager_file.write_text(ALERTMANAGER_CONFIG.format(webhook=webhook_port), encoding="utf-8")
    prometheus_file = directory / "prometheus.yml"
    text = str(_CONFIGURATION["prometheus"]).format(
        interval=SCRAPE_INTERVAL,
        rules=json.dumps(str(rules)),
        alertmanager=options.alertmanager_port,
        agent=options.agent_port,
    )
    prometheus_file.write_text(text, encoding="utf-8")
    return alertmanager_file, prometheus_file


def programs(options: StackOptions, tools: Tools, webhook_port: int, directory: Path) -> list[Program]:
    """Write the configurations into ``directory`` and name the programs to start, the agent first.

    Raises:
        ConfigError: The rules file is not there, or is not the one of this version.
    """

    def program(name: str, ready: str, *command: str) -> Program:
        log = directory / f"{name.partition(' ')[0]}.log"
        return Program(name=name, command=command, ready_url=f"http://{ready}", log=log)

    agent, prometheus, alertmanager, cost = (
        f"127.0.0.1:{port}"
        for port in (options.agent_port, options.prometheus_port, options.alertmanager_port, options.cost_port)
    )
    more = ["--simulate", options.scenario, "--simulate-hour", HOUR, "--cost-labels", "project,environment"]
    if tools.alertmanager and _has_past(options, tools):
        more += ["--cost-service-url", f"http://{cost}"]
    started = [program("agent", f"{agent}/readyz", *options.agent_command, *more, "--listen", agent)]
    if tools.prometheus is None or tools.alertmanager is None:
        return started
    alertmanager_file, prometheus_file = _configure(options, webhook_port, directory)
    command = [tools.alertmanager, f"--config.file={alertmanager_file}", "--cluster.listen-address="]
    command += [f"--storage.path={directory / 'alertmanager'}", f"--web.listen-address={alertmanager}"]
    started.append(program("alertmanager", f"{alertmanager}/-/ready", *command))
    command = [tools.prometheus, f"--config.file={prometheus_file}", "--storage.tsdb.retention.time=1y"]
    command += [f"--storage.tsdb.path={directory / 'prometheus'}", f"--web.listen-address={prometheus}"]
    started.append(program("prometheus", f"{prometheus}/-/ready", *command))
    if _has_past(options, tools):
        command = [sys.executable, "-m", "exporter", "serve", "--listen", cost, "--refresh-interval", "30s"]
        command += ["--budgets", str(directory / "budgets.yaml"), "--store", str(directory / "cost.db")]
        command += ["--prometheus", f"http://{prometheus}"]
        command += ["--title", "GPU cost (simulated)", "--external-url", f"http://{cost}"]
        started.append(program("cost service", f"{cost}/readyz", *command))
    return started


def _has_past(options: StackOptions, tools: Tools) -> bool:
    return options.history_days > 0 and tools.promtool is not None and tools.prometheus is not None


def _make_past(options: StackOptions, tools: Tools, directory: Path) -> None:
    fleet = demo_fleet(time.time(), options.history_days)
    (directory / "budgets.yaml").write_text(demo_budgets(fleet), encoding="utf-8")
    make_history(fleet, str(tools.promtool), directory / "prometheus")


def greeting(options: StackOptions, pages: Sequence[tuple[str, str]], *, with_cost: bool = False) -> str:
    """Say where to look, and what is not as on a real cluster."""
    lines = [
        "",
        f"SIMULATED NODE: scenario {options.scenario!r}; no GPU, cluster or bill is real.",
        f"  agent's page       http://127.0.0.1:{options.agent_port}/",
        f"  metrics            http://127.0.0.1:{options.agent_port}/metrics",
    ]
    if with_cost:
        days = f"{NODES} nodes that do not exist, {options.history_days} days"
        lines.insert(3, f"  cost of a fleet    http://127.0.0.1:{options.cost_port}/   ({days})")
    lines += [f"  {name:<18} {url}" for name, url in pages]
    if pages:
        width = max(len(item.shipped) for item in options.substitutions)
        lines += [
            "",
            f"An hour of activity takes {HOUR}. Rules: rules/prometheus-rules.yaml with shorter times:",
            *(f"  {item.shipped:<{width}}  ->  {item.demo:<31}  {item.what}" for item in options.substitutions),
            "",
            "Alerts that Alertmanager delivers are printed below. Ctrl-C ends everything.",
        ]
    else:
        lines += ["", "Ctrl-C ends it."]
    return "\n".join(lines)


async def _bring_up(started: list[Program], say: Callable[[str], None], stop: asyncio.Event) -> int | None:
    """Start all and wait until all answer; an exit code when there is nothing to show or it was asked to stop."""
    for part in started:
        await part.start()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        ready = await asyncio.gather(*(part.wait_ready(session, READY_SECONDS, stop) for part in started))
    if stop.is_set():
        return 0
    for part, answers in zip(started, ready, strict=True):
        if not answers:
            say(f"{part.name} does not answer at {part.ready_url}: {part.tail()}")
    return started[0].exit_code


async def _stand_by(started: list[Program], say: Callable[[str], None], stop: asyncio.Event) -> int:
    """Wait until asked to stop or the agent ends; another dead part is told, and the rest goes on."""
    running = list(started)
    while not stop.is_set():
        for part in [part for part in running if part.exit_code is not None]:
            running.remove(part)
            say(f"{part.name} ended by itself with code {part.exit_code}: {part.tail()}")
            if part is started[0]:
                return part.exit_code or 1
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_SECONDS)
    return 0


async def run(options: StackOptions, *, say: Callable[[str], None], stop: asyncio.Event, tools: Tools) -> int:
    """Show the scenario until ``stop`` is set.

    Args:
        options: What to show.
        say: Takes every line meant for the user.
        stop: Set it to end everything.
        tools: Programs to use; without one of them the agent is shown alone.

    Returns:
        Exit code: 0 after a stop, else that of the agent that did not come up or ended by itself.

    Raises:
        ConfigError: The rules file is missing or not of this version; nothing was started then.
    """
    webhook, options = Webhook(say=say), options.with_free_ports()
    await webhook.start()
    missing = [name for name in ("prometheus", "alertmanager") if getattr(tools, name) is None]
    if missing:
        say(f"not on the PATH: {' and '.join(missing)}; showing the agent alone ({GET_THEM})")
    with tempfile.TemporaryDirectory(prefix="gpu-cost-exporter-") as directory:
        started: list[Program] = []
        try:
            started = programs(options, tools, webhook.port, Path(directory))
            say(f"SIMULATED: starting {', '.join(part.name for part in started)} ...")
            with_cost = _has_past(options, tools) and len(started) > 1
            if with_cost:
                say(f"SIMULATED: making {options.history_days} days of a fleet's past, for the cost service ...")
                try:
                    await asyncio.to_thread(_make_past, options, tools, Path(directory))
                except ExporterError as error:
                    say(f"{error}; showing the rest without the cost service")
                    with_cost = started.pop() is None
            code = await _bring_up(started, say, stop)
            if code is not None:
                return code
            pages = await page_addresses(options.prometheus_port, options.alertmanager_port) if len(started) > 1 else ()
            say(greeting(options, pages, with_cost=with_cost))
            return await _stand_by(started, say, stop)
        finally:
            await asyncio.gather(*(part.end() for part in started))
            await webhook.stop()


async def _until_signalled(options: StackOptions) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    code = await run(options, say=_say, stop=stop, tools=find_tools())
    _say("ended: nothing of the demonstration is left running")
    return code


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(scenario: str) -> int:
    """Run the stack until Ctrl-C or SIGTERM; the exit code.

    Args:
        scenario: Name of a shipped scenario, or a scenario file.

    Raises:
        ConfigError: There is no such scenario, or the rules file is missing or not of this version.
    """
    load(scenario)  # its mistakes are told here, before anything is started
    return asyncio.run(_until_signalled(StackOptions(scenario=scenario, history_days=HISTORY_DAYS)))

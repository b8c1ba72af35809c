"""Runs the demo: a simulated node with agent, Prometheus, Alertmanager, a webhook for alerts and the cost service."""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from exporter.errors import ConfigError
from gpu_simulator.fleet_plan import FleetPlan, team_names
from gpu_simulator.models import table
from gpu_simulator.past import NODES, Past, demo_fleet
from gpu_simulator.scenario import load

END_SECONDS = 10.0
TAIL_LINES = 5


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


def alert_text(alert: Alert, screen: Screen) -> str:
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
            self.say(alert_text(alert, self.screen))
        return web.Response(text="ok\n")


@dataclass(slots=True, kw_only=True)
class Program:
    """A program of the stack.

    ``ready_url`` returns 200 when the program is ready; ``log`` is its output. ``process`` is set after ``start``.
    """

    name: str
    command: Sequence[str]
    ready_url: str
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the program in a separate process group, so that only the stack receives Ctrl-C."""
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
        """Poll until the program returns 200; return False after the timeout, an exit, or if ``stop`` is set."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while asyncio.get_running_loop().time() < deadline and not (stop and stop.is_set()):
            if self.exit_code is not None:
                return False
            if await _answers(session, self.ready_url):
                return True
            await asyncio.sleep(0.1)
        return False

    @property
    def exit_code(self) -> int | None:
        """Return the exit code (negative: a signal); ``None`` while the program runs."""
        return self.process.returncode if self.process is not None else 1

    async def end(self) -> None:
        """Stop the program, after 10 s by force, and then the rest of its process group."""
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
        """Return the last lines of the log as one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        return " | ".join(lines[-TAIL_LINES:]) or "no output"


_QUIET_PORTS = range(15_000, 30_000)
"""Ports below those of outgoing connections, because a connection could use a port before its server starts."""
_DRAWS = 20


def free_port(preferred: int) -> int:
    """Return ``preferred`` on 127.0.0.1 if it is free, otherwise another free port; 0: any port."""
    drawn = (secrets.choice(_QUIET_PORTS) for _ in range(_DRAWS))
    for port in (*((preferred,) if preferred else ()), *drawn, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise OSError("no free port on 127.0.0.1; stop a program that listens")


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError, TimeoutError):
        async with session.get(url) as response:
            return response.status == HTTPStatus.OK
    return False


_QUERY = "g0.expr=gpu_pod_idle_for_seconds&g0.tab=1"
_SECONDS = 5.0


async def page_addresses(prometheus: int, alertmanager: int) -> list[tuple[str, str]]:
    """Return names and addresses of pages: the first existing path of each program, as some packages have no pages.

    Args:
        prometheus: Port of Prometheus on 127.0.0.1.
        alertmanager: Port of Alertmanager on 127.0.0.1.
    """
    figures = "api/v1/query?query=gpu_pod_idle_for_seconds"
    pages = (
        ("Prometheus", prometheus, (f"graph?{_QUERY}", f"classic/graph?{_QUERY}", figures)),
        ("its alerts", prometheus, ("alerts", "classic/alerts", "api/v1/alerts")),
        ("Alertmanager", alertmanager, ("", "api/v2/alerts")),
    )
    found: dict[str, str] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:
        for name, port, paths in pages:
            for path in paths:
                found[name] = f"http://127.0.0.1:{port}/{path}"
                if await _answers(session, found[name]):
                    break
    return list(found.items())


class Substitution(NamedTuple):
    """A text of the rules file, its replacement in the demo, and its meaning."""

    shipped: str
    demo: str
    what: str


_CONFIGURATION = table("stack")
SUBSTITUTIONS = tuple(Substitution(*row) for row in _CONFIGURATION["substitutions"])
"""Substitutions in order: a longer text precedes one that it contains."""


def shorten(rules: str, source: str, substitutions: tuple[Substitution, ...] = SUBSTITUTIONS) -> str:
    """Return a rules file with the shorter windows of the demo.

    Args:
        rules: Text of ``rules/prometheus-rules.yaml``.
        source: Name of the file, for the error.
        substitutions: Replacements, in order.

    Returns:
        The rules with all replacements.

    Raises:
        ConfigError: The file does not contain a text to replace, because it has another version than the table.
    """
    missing = [item for item in substitutions if item.shipped not in rules]
    if missing:
        advice = "not found; use the rules file of this version"
        raise ConfigError(*(f"{source}: {item.shipped!r} ({item.what}) {advice}" for item in missing))
    for item in substitutions:
        rules = rules.replace(item.shipped, item.demo)
    return rules


def demo_budgets(fleet: FleetPlan) -> str:
    """Return a budget file for teams of the fleet."""
    return str(_CONFIGURATION["budgets"]).format(*team_names(fleet))


ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "rules" / "prometheus-rules.yaml"
READY_SECONDS = 60.0
_LOOK_SECONDS = 0.2
HISTORY_DAYS = 62
"""Days of the past, so that the previous month is complete."""
SCRAPE_INTERVAL = "2s"
HOUR = "40s"
"""Duration of an hour of activity windows, so that the first alert fires within two minutes."""
SHIPPED_COST = "http://localhost:9401"
"""Address of the cost service in the links of the shipped rules."""

ALERTMANAGER_CONFIG: str = _CONFIGURATION["alertmanager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """Options of the demo; a port that is in use is replaced with a free one."""

    scenario: str
    rules: Path = RULES
    substitutions: tuple[Substitution, ...] = SUBSTITUTIONS
    hour: str = HOUR
    agent_port: int = 9400
    prometheus_port: int = 9090
    alertmanager_port: int = 9093
    cost_port: int = 9401
    agent_command: Sequence[str] = (sys.executable, "-m", "exporter", "agent")
    history_days: int = 0
    """Days of a simulated fleet's past for the cost service; 0: no past, and no cost service."""
    cache: Path = ROOT / ".cache"
    """Directory of the cached past."""

    def with_free_ports(self) -> "StackOptions":
        """Return the options with free ports."""
        return replace(
            self,
            agent_port=free_port(self.agent_port),
            prometheus_port=free_port(self.prometheus_port),
            alertmanager_port=free_port(self.alertmanager_port),
            cost_port=free_port(self.cost_port),
        )

    @property
    def cost_page(self) -> str:
        """Return the address of the cost service."""
        return f"http://127.0.0.1:{self.cost_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Paths of the programs; ``None``: not found."""

    prometheus: str | None
    alertmanager: str | None
    promtool: str | None = None


def find_tools() -> Tools:
    """Return the programs on the PATH; Debian names Alertmanager ``prometheus-alertmanager``."""
    return Tools(
        prometheus=shutil.which("prometheus"),
        alertmanager=shutil.which("prometheus-alertmanager") or shutil.which("alertmanager"),
        promtool=shutil.which("promtool"),
    )


def _past_of(options: StackOptions, tools: Tools) -> Past | None:
    """Return the past for the cost service; ``None`` if it is disabled, or a program is missing."""
    if not options.history_days or None in {tools.promtool, tools.prometheus, tools.alertmanager}:
        return None
    fleet = demo_fleet(time.time(), options.history_days)
    return Past(fleet=fleet, promtool=str(tools.promtool), cache=options.cache)


def _configure(options: StackOptions, webhook_port: int, directory: Path, *, with_cost: bool) -> tuple[Path, Path]:
    """Write the configurations of Alertmanager and Prometheus, and the rules."""
    try:
        shipped = options.rules.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.rules}: {error.strerror}; run it from a checkout of the repository") from error
    text = shorten(shipped, str(options.rules), options.substitutions)
    if with_cost:  # without Grafana, the cost service redirects to its own pages
        text = text.replace(SHIPPED_COST, options.cost_page)
        text = text.replace("dashboard: /d/", f"dashboard: {options.cost_page}/d/")
    rules = directory / "rules.yaml"
    rules.write_text(text, encoding="utf-8")
    alertmanager_file = directory / "alertmanager.yml"
    alertmanager_file.write_text(ALERTMANAGER_CONFIG.format(webhook=webhook_port), encoding="utf-8")
    prometheus_file = directory / "prometheus.yml"
    text = str(_CONFIGURATION["prometheus"]).format(
        interval=SCRAPE_INTERVAL,
        rules=json.dumps(str(rules)),
        alertmanager=options.alertmanager_port,
        agent=options.agent_port,
        services=json.dumps([options.cost_page.removeprefix("http://")] if with_cost else []),
    )
    prometheus_file.write_text(text, encoding="utf-8")
    return alertmanager_file, prometheus_file


def programs(
    options: StackOptions, tools: Tools, past: Past | None, webhook_port: int, directory: Path
) -> list[Program]:
    """Write the configurations to ``directory`` and return the programs to start, the agent first.

    Raises:
        ConfigError: The rules file is missing, or has another version.
    """

    def program(name: str, ready: str, *command: str) -> Program:
        log = directory / f"{name.partition(' ')[0]}.log"
        return Program(name=name, command=command, ready_url=f"http://{ready}", log=log)

    agent, prometheus, alertmanager, cost = (
        f"127.0.0.1:{port}"
        for port in (options.agent_port, options.prometheus_port, options.alertmanager_port, options.cost_port)
    )
    command = [*options.agent_command, "--simulate", options.scenario, "--simulate-hour", options.hour]
    command += ["--cost-labels", "project,environment", "--listen", agent]
    if past is not None:
        command += ["--cost-service-url", options.cost_page]
    started = [program("agent", f"{agent}/readyz", *command)]
    if tools.prometheus is None or tools.alertmanager is None:
        return started
    alertmanager_file, prometheus_file = _configure(options, webhook_port, directory, with_cost=past is not None)
    # Without an external address, links contain the name of this machine.
    command = [tools.alertmanager, f"--config.file={alertmanager_file}", "--cluster.listen-address="]
    command += [f"--storage.path={directory / 'alertmanager'}", *_served(alertmanager)]
    if Path(tools.alertmanager).name == "prometheus-alertmanager":  # Debian's package has no web interface
        command.append(f"--web.ui-path={Path(__file__).with_name('alertmanager')}")
    started.append(program("alertmanager", f"{alertmanager}/-/ready", *command))
    command = [tools.prometheus, f"--config.file={prometheus_file}", "--storage.tsdb.retention.time=1y"]
    command += [f"--storage.tsdb.path={directory / 'prometheus'}", *_served(prometheus)]
    started.append(program("prometheus", f"{prometheus}/-/ready", *command))
    if past is not None:
        budgets = directory / "budgets.yaml"
        budgets.write_text(demo_budgets(past.fleet), encoding="utf-8")
        command = [sys.executable, "-m", "exporter", "serve", "--listen", cost, "--refresh-interval", "15s"]
        command += ["--budgets", str(budgets), "--store", str(directory / "cost.db")]
        command += ["--prometheus", f"http://{prometheus}"]
        command += ["--title", "GPU cost (simulated)", "--external-url", options.cost_page]
        started.append(program("cost service", f"{cost}/readyz", *command))
    return started


def _served(address: str) -> tuple[str, str]:
    return f"--web.listen-address={address}", f"--web.external-url=http://{address}/"


def greeting(options: StackOptions, pages: Sequence[tuple[str, str]], past: str = "") -> str:
    """Return a text with all addresses.

    Args:
        options: Options of the demo.
        pages: Names and addresses of the pages of Prometheus and Alertmanager.
        past: Contents of the cost service; empty without the cost service.
    """
    agent = f"http://127.0.0.1:{options.agent_port}"
    rows = [("agent's page", f"{agent}/"), ("metrics", f"{agent}/metrics")]
    if past:
        rows += [("cost service", f"{options.cost_page}/   ({past})"), ("runbook", f"{options.cost_page}/runbook")]
    rows += pages
    text = [
        "",
        f"SIMULATED NODE: scenario {options.scenario!r}; GPUs, cluster and costs are simulated.",
        *(f"  {name:<14}  {address}" for name, address in rows),
        "",
    ]
    if pages:
        text += [
            f"An hour of GPU activity takes {options.hour}: the first alert fires within two minutes.",
            "Alerts from Alertmanager are printed below.",
        ]
    return "\n".join([*text, "Ctrl-C stops all programs."])


async def _bring_up(
    options: StackOptions, started: list[Program], say: Callable[[str], None], stop: asyncio.Event
) -> int | None:
    """Start all programs and wait until they are ready; return an exit code if the agent failed, or after a stop."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        agent, *others = started
        await agent.start()
        answers = await agent.wait_ready(session, READY_SECONDS, stop)
        if answers:
            say(f"SIMULATED: the agent's page is up: http://127.0.0.1:{options.agent_port}/")
        for part in others if answers else ():
            await part.start()
        ready = await asyncio.gather(*(part.wait_ready(session, READY_SECONDS, stop) for part in others))
    if stop.is_set():
        return 0
    for part, is_ready in zip(started, [answers, *ready], strict=True):
        if not is_ready and (answers or part is agent):
            say(f"{part.name} does not respond at {part.ready_url}: {part.tail()}")
    return agent.exit_code


async def _stand_by(started: list[Program], say: Callable[[str], None], stop: asyncio.Event) -> int:
    """Wait for a stop or the exit of the agent; report the exit of another program, and continue."""
    running = list(started)
    while not stop.is_set():
        for part in [part for part in running if part.exit_code is not None]:
            running.remove(part)
            say(f"{part.name} exited with code {part.exit_code}: {part.tail()}")
            if part is started[0]:
                return part.exit_code or 1
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _LOOK_SECONDS)
    return 0


_STEP_PERCENT = 5
_READ_SECONDS = 120


async def _make_past(options: StackOptions, past: Past, directory: Path, say: Callable[[str], None]) -> None:
    """Create the past while the programs run, load it into Prometheus, and show the progress."""
    clock = asyncio.get_running_loop().time
    days, begun, said = f"{options.history_days} days of a fleet's past", clock(), 0
    maker = Program(name="past", command=past.command, ready_url="", log=directory / "past.log")
    await maker.start()
    try:
        while maker.exit_code is None:
            await asyncio.sleep(_LOOK_SECONDS)
            last = maker.tail().rpartition(" ")[2]
            percent = int(last) if last.isdigit() else 0
            if percent >= said + _STEP_PERCENT:
                said = percent
                say(f"{days}: {percent} % created, about {(clock() - begun) * (100 - percent) / percent:.0f} s left")
    finally:
        await maker.end()
    if not await asyncio.to_thread(past.load, directory / "prometheus"):
        say(f"{days}: not created: {maker.tail()}; the cost service has no figures")
        return
    say(f"{days}: created; Prometheus loads it within a minute")
    if await _is_read(options, past):
        say(f"{days}: loaded, and cached in {past.kept.parent.name}/: {options.cost_page}/")


async def _is_read(options: StackOptions, past: Past) -> bool:
    """Wait until Prometheus has loaded the past."""
    url = f"http://127.0.0.1:{options.prometheus_port}/api/v1/query"
    query = {"query": "count(gpu_node_info)", "time": str(past.fleet.end_seconds)}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:
        for _ in range(_READ_SECONDS):
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url, params=query) as response:
                    if (await response.json())["data"]["result"]:
                        return True
            await asyncio.sleep(1.0)
    return False


async def run(
    options: StackOptions,
    *,
    say: Callable[[str], None],
    stop: asyncio.Event,
    tools: Tools,
    screen: Screen | None = None,
) -> int:
    """Run the demo until ``stop`` is set.

    Args:
        options: Options of the demo.
        say: Called with every text for the user.
        stop: Event that stops the demo.
        tools: Programs; if one is missing, only the agent runs.
        screen: Properties of the output for alerts.

    Returns:
        Exit code: 0 after a stop, else that of the agent, which did not start or exited.

    Raises:
        ConfigError: The rules file is missing or has another version; no program was started.
    """
    webhook, options = Webhook(say=say, screen=screen or Screen()), options.with_free_ports()
    await webhook.start()
    missing = [name for name in ("prometheus", "alertmanager") if getattr(tools, name) is None]
    if missing:
        packages = "make install, or apt-get install prometheus prometheus-alertmanager"
        say(f"not on the PATH: {' and '.join(missing)}; running the agent only (install them with: {packages})")
    with tempfile.TemporaryDirectory(prefix="gpu-cost-exporter-") as name:
        directory, making = Path(name), None
        started: list[Program] = []
        try:
            past = _past_of(options, tools)
            started = programs(options, tools, past, webhook.port, directory)
            is_made = past is not None and await asyncio.to_thread(past.load, directory / "prometheus")
            say(f"SIMULATED: starting {', '.join(part.name for part in started)} ...")
            code = await _bring_up(options, started, say, stop)
            if code is not None:
                return code
            pages = await page_addresses(options.prometheus_port, options.alertmanager_port) if len(started) > 1 else ()
            shown = f"{NODES} simulated nodes, {options.history_days} days{'' if is_made else ', in preparation'}"
            say(greeting(options, pages, shown if past else ""))
            if past is not None and not is_made:
                making = asyncio.create_task(_make_past(options, past, directory, say))
            return await _stand_by(started, say, stop)
        finally:
            if making is not None:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
            await asyncio.gather(*(part.end() for part in started))
            await webhook.stop()


async def _until_signalled(options: StackOptions) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    say = partial(print, flush=True)
    code = await run(options, say=say, stop=stop, tools=find_tools(), screen=find_screen())
    say("stopped: all programs of the demo have exited")
    return code


def main(scenario: str) -> int:
    """Run the stack until Ctrl-C or SIGTERM; return the exit code.

    Args:
        scenario: Name of a shipped scenario, or a scenario file.

    Raises:
        ConfigError: The scenario does not exist, or the rules file is missing or has another version.
    """
    load(scenario)  # reports mistakes before a program is started
    return asyncio.run(_until_signalled(StackOptions(scenario=scenario, history_days=HISTORY_DAYS)))

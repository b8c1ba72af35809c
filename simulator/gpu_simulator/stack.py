"""A simulated node with agent, Prometheus, Alertmanager, a webhook for alerts and the cost service, on one machine."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from exporter.errors import ConfigError, ExporterError
from gpu_simulator.fleet import Writing, write_fleet
from gpu_simulator.fleet_plan import HOUR_SECONDS, RECORDED_AFTER_SECONDS, FleetPlan, team_names
from gpu_simulator.models import table
from gpu_simulator.programs import Program, Webhook, free_port, page_addresses
from gpu_simulator.scenario import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One text of the rules file, what stands there in the demonstration, and what it is."""

    shipped: str
    demo: str
    what: str


_CONFIGURATION = table("stack")
SUBSTITUTIONS = tuple(
    Substitution(shipped=shipped, demo=demo, what=what) for shipped, demo, what in _CONFIGURATION["substitutions"]
)
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
        raise ConfigError(
            *(
                f"{source}: {item.shipped!r} ({item.what}) is not in it; take the rules file of this version"
                for item in missing
            )
        )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where each part listens on 127.0.0.1."""

    agent: int
    prometheus: int
    alertmanager: int
    webhook: int
    cost: int


def _configure(options: StackOptions, ports: Ports, directory: Path) -> tuple[Path, Path]:
    """Write the configurations of Alertmanager and Prometheus, and the rules that the second one reads."""
    try:
        shipped = options.rules.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{options.rules}: {error.strerror}; run it from a checkout of the repository") from error
    rules = directory / "rules.yaml"
    rules.write_text(shorten(shipped, str(options.rules), options.substitutions), encoding="utf-8")
    alertmanager_file = directory / "alertmanager.yml"
    alertmanager_file.write_text(ALERTMANAGER_CONFIG.format(webhook=ports.webhook), encoding="utf-8")
    prometheus_file = directory / "prometheus.yml"
    text = str(_CONFIGURATION["prometheus"]).format(
        interval=SCRAPE_INTERVAL, rules=json.dumps(str(rules)), alertmanager=ports.alertmanager, agent=ports.agent
    )
    prometheus_file.write_text(text, encoding="utf-8")
    return alertmanager_file, prometheus_file


def programs(options: StackOptions, tools: Tools, ports: Ports, directory: Path) -> list[Program]:
    """Write the configurations into ``directory`` and name the programs to start, the agent first.

    Raises:
        ConfigError: The rules file is not there, or is not the one of this version.
    """

    def program(name: str, port: int, ready: str, *command: str) -> Program:
        url, log = f"http://127.0.0.1:{port}/{ready}", directory / f"{name.partition(' ')[0]}.log"
        return Program(name=name, command=command, ready_url=url, log=log)

    address = f"127.0.0.1:{ports.agent}"
    more = ("--simulate", options.scenario, "--simulate-hour", HOUR, "--cost-labels", "project,environment")
    started = [program("agent", ports.agent, "readyz", *options.agent_command, *more, "--listen", address)]
    if tools.prometheus is None or tools.alertmanager is None:
        return started
    alertmanager_file, prometheus_file = _configure(options, ports, directory)
    command = [tools.alertmanager, f"--config.file={alertmanager_file}", "--cluster.listen-address="]
    command += [f"--storage.path={directory / 'alertmanager'}", f"--web.listen-address=127.0.0.1:{ports.alertmanager}"]
    started.append(program("alertmanager", ports.alertmanager, "-/ready", *command))
    command = [tools.prometheus, f"--config.file={prometheus_file}", "--storage.tsdb.retention.time=1y"]
    command += [f"--storage.tsdb.path={directory / 'prometheus'}", f"--web.listen-address=127.0.0.1:{ports.prometheus}"]
    started.append(program("prometheus", ports.prometheus, "-/ready", *command))
    if _has_past(options, tools):
        address, files = f"127.0.0.1:{ports.cost}", ("--budgets", str(directory / "budgets.yaml"))
        command = [sys.executable, "-m", "exporter", "serve", "--listen", address, "--refresh-interval", "30s", *files]
        command += ["--prometheus", f"http://127.0.0.1:{ports.prometheus}", "--store", str(directory / "cost.db")]
        command += ["--title", "GPU cost (simulated)", "--external-url", f"http://{address}"]
        started.append(program("cost service", ports.cost, "readyz", *command))
    return started


def _has_past(options: StackOptions, tools: Tools) -> bool:
    return options.history_days > 0 and tools.promtool is not None and tools.prometheus is not None


def _make_past(options: StackOptions, tools: Tools, directory: Path) -> None:
    fleet = demo_fleet(time.time(), options.history_days)
    (directory / "budgets.yaml").write_text(demo_budgets(fleet), encoding="utf-8")
    make_history(fleet, str(tools.promtool), directory / "prometheus")


def greeting(options: StackOptions, ports: Ports, pages: Sequence[tuple[str, str]], *, with_cost: bool = False) -> str:
    """Say where to look, and what is not as on a real cluster."""
    lines = [
        "",
        f"SIMULATED NODE: scenario {options.scenario!r}; no GPU, cluster or bill is real.",
        f"  agent's page       http://127.0.0.1:{ports.agent}/",
        f"  metrics            http://127.0.0.1:{ports.agent}/metrics",
    ]
    if with_cost:
        days = f"{NODES} nodes that do not exist, {options.history_days} days"
        lines.insert(3, f"  cost of a fleet    http://127.0.0.1:{ports.cost}/   ({days})")
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
        waits = [asyncio.create_task(part.wait_ready(session, READY_SECONDS)) for part in started]
        ready = asyncio.create_task(asyncio.wait(waits))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (*waits, ready, stopping):
            task.cancel()
        if stop.is_set():
            return 0
    for part, wait in zip(started, waits, strict=True):
        if not wait.result():
            say(f"{part.name} does not answer at {part.ready_url}: {part.tail() or 'it wrote nothing'}")
    agent = started[0].process
    return agent.returncode if agent is not None else 1


async def _stand_by(started: list[Program], say: Callable[[str], None], stop: asyncio.Event) -> int:
    """Wait until asked to stop or the agent ends; another dead part is told, and the rest goes on."""
    stopping = asyncio.create_task(stop.wait())
    watches = {asyncio.create_task(part.ended()): part for part in started}
    try:
        while not stop.is_set():
            await asyncio.wait((stopping, *watches), return_when=asyncio.FIRST_COMPLETED)
            for watch in [watch for watch in watches if watch.done()]:
                part = watches.pop(watch)
                say(f"{part.name} ended by itself with code {watch.result()}: {part.tail() or 'it wrote nothing'}")
                if part is started[0]:
                    return watch.result() or 1
        return 0
    finally:
        for task in (stopping, *watches):
            task.cancel()


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
    webhook = Webhook(say=say)
    await webhook.start()
    ports = Ports(
        agent=free_port(options.agent_port),
        prometheus=free_port(options.prometheus_port),
        alertmanager=free_port(options.alertmanager_port),
        webhook=webhook.port,
        cost=free_port(options.cost_port),
    )
    missing = [name for name in ("prometheus", "alertmanager") if getattr(tools, name) is None]
    if missing:
        say(f"not on the PATH: {' and '.join(missing)}; showing the agent alone ({GET_THEM})")
    with tempfile.TemporaryDirectory(prefix="gpu-cost-exporter-") as directory:
        started: list[Program] = []
        try:
            started = programs(options, tools, ports, Path(directory))
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
            pages = await page_addresses(ports.prometheus, ports.alertmanager) if len(started) > 1 else ()
            say(greeting(options, ports, pages, with_cost=with_cost))
            return await _stand_by(started, say, stop)
        finally:
            await asyncio.gather(*(part.end() for part in started))
            await webhook.stop()


async def _until_signalled(options: StackOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    code = await run(options, say=say, stop=stop, tools=find_tools())
    say("ended: nothing of the demonstration is left running")
    return code


def main(scenario: str) -> int:
    """Run the stack until Ctrl-C or SIGTERM; the exit code.

    Args:
        scenario: Name of a shipped scenario, or a scenario file.

    Raises:
        ConfigError: There is no such scenario, or the rules file is missing or not of this version.
    """
    load(scenario)  # its mistakes are told here, before anything is started
    return asyncio.run(_until_signalled(StackOptions(scenario=scenario, history_days=HISTORY_DAYS)))

"""The demonstration: real Prometheus and Alertmanager, and an alert that reaches the webhook."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from exporter.errors import ConfigError
from gpu_simulator import stack
from gpu_simulator.stack import (
    ALERTMANAGER_CONFIG,
    RULES,
    Screen,
    StackOptions,
    Tools,
    Webhook,
    alert_text,
    find_screen,
    find_tools,
    free_port,
    run,
)

TIMEOUT_SECONDS = 90.0

# Answers like an agent with one pod that has been idle for two hours, at 12 USD an hour.
STAND_IN = """
import http.server, sys, signal, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
owner = 'node="sim",workload_namespace="research",workload_kind="Notebook",workload_name="notebook",team="vision"'
def page():
    return "".join(f"gpu_owner_{name}{{{owner}{more}}} {value}\\n" for name, more, value in (
        ("gpus", "", 1), ("policy", ',policy="default"', 1), ("idle_for_seconds", "", 7200),
        ("active_gpu_seconds", ',window="15m"', 0), ("measured_gpu_seconds", ',window="15m"', 900),
        ("active_gpu_seconds", ',window="1h"', 0), ("measured_gpu_seconds", ',window="1h"', 3600),
        ("underused_gpus", "", 1), ("unused_gpus", ',window="1h"', 1),
        ("cost_per_hour", ',currency="USD"', 12), ("idle_cost_per_hour", ',currency="USD"', 12)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(page().encode())
    def log_message(self, *_):
        pass
host, port = sys.argv[sys.argv.index("--listen") + 1].rsplit(":", 1)
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""

# Even shorter than in the demonstration.
QUICKER = {
    "interval: 1m": "interval: 1s",
    "interval: 1h": "interval: 2s",
    "[24h]": "[60s]",
    ") / 3600": ") / 10",
    "[1h]": "[10s]",
    "offset 1h": "offset 10s",
    "[15m]": "[4s]",
    "keep_firing_for: 15m": "keep_firing_for: 5s",
    "for: 15m": "for: 5s",
    "for: 10m": "for: 2s",
}
HAS_PAGES = Path("/usr/share/prometheus/web/templates").is_dir()
"""Whether Debian's Prometheus has its pages; ``make install`` installs them for root."""


def is_greeting(text: str) -> bool:
    return "Ctrl-C stops" in text


QUICK = tuple(item._replace(demo=QUICKER.get(item.shipped, item.demo)) for item in stack.SUBSTITUTIONS)


@dataclass
class Running:
    """A stack that runs in the background, and its messages."""

    options: StackOptions
    said: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[int] | None = None

    async def until(self, condition: Callable[[str], bool], seconds: float = TIMEOUT_SECONDS) -> str:
        """Wait for a line."""
        assert self.task is not None
        async with asyncio.timeout(seconds):
            while True:
                for text in self.said:
                    if condition(text):
                        return text
                assert not self.task.done(), f"it ended with {self.task.result()}: {self.said}"
                await asyncio.sleep(0.1)


@asynccontextmanager
async def running(options: StackOptions, tools: Tools) -> AsyncIterator[Running]:
    state = Running(options)
    state.task = asyncio.create_task(run(options, say=state.said.append, stop=state.stop, tools=tools))
    try:
        yield state
    finally:
        state.stop.set()
        async with asyncio.timeout(30):
            await state.task


def stand_in(scenario: str = "stand-in") -> StackOptions:
    return StackOptions(
        scenario=scenario,
        substitutions=QUICK,
        agent_port=free_port(0),
        prometheus_port=free_port(0),
        alertmanager_port=free_port(0),
        agent_command=(sys.executable, "-c", STAND_IN),
    )


def both_tools() -> Tools:
    tools = find_tools()
    if tools.prometheus is None or tools.alertmanager is None:
        pytest.skip("needs prometheus and prometheus-alertmanager on the PATH: make install")
    return tools


def test_shortened_rules_are_valid_and_have_no_long_window(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    text = stack.shorten(RULES.read_text(encoding="utf-8"), str(RULES))
    for item in stack.SUBSTITUTIONS:
        assert item.shipped not in text
    path = tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    result = subprocess.run([promtool, "check", "rules", str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_rules_file_of_another_version_is_refused_with_every_missing_part() -> None:
    with pytest.raises(ConfigError) as caught:
        stack.shorten("groups: []", "old.yaml")
    assert len(caught.value.problems) == len(stack.SUBSTITUTIONS)
    assert "old.yaml: '[1h]' (window) not found" in str(caught.value)


ALERT = {
    "status": "firing",
    "startsAt": "2026-03-01T10:00:00.123Z",
    "endsAt": "2026-03-01T10:05:00Z",
    "labels": {"alertname": "GPUUnderutilised", "severity": "warning"},
    "annotations": {
        "summary": "Pod a/b leaves\n its GPU idle.",
        "runbook_url": "http://localhost:9401/runbook#gpuunderutilised",
    },
}


def test_alert_is_short_and_marked_simulated_with_its_runbook_link() -> None:
    assert alert_text(ALERT, Screen(columns=60)).splitlines() == [
        "SIMULATED 10:00:00 UTC WARNING  GPUUnderutilised",
        "  Pod a/b leaves its GPU idle.",
        "  http://localhost:9401/runbook#gpuunderutilised",
    ]
    assert alert_text({**ALERT, "status": "resolved"}, Screen()).splitlines() == [
        "SIMULATED 10:05:00 UTC RESOLVED GPUUnderutilised",
        "  Pod a/b leaves its GPU idle.",
    ]


def test_alerts_have_a_colour_by_severity_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = set()
    for severity in ("critical", "warning", "info"):
        text = alert_text({**ALERT, "labels": {"alertname": "A", "severity": severity}}, Screen(colours=True))
        looks.add(re.findall(r"\x1b\[[\d;]+m", text)[0])
    assert len(looks) == 3
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not find_screen().colours
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert find_screen().colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not find_screen().colours


@pytest.mark.parametrize(("severity", "reported"), [("none", "nobody"), ("info", "webhook"), ("critical", "webhook")])
def test_internal_alerts_are_not_routed_to_the_webhook(tmp_path: Path, severity: str, reported: str) -> None:
    amtool = shutil.which("amtool")
    if amtool is None:
        pytest.skip("needs amtool on the PATH: make install")
    path = tmp_path / "alertmanager.yml"
    path.write_text(ALERTMANAGER_CONFIG.format(webhook=1), encoding="utf-8")
    command = [amtool, "config", "routes", "test", f"--config.file={path}", f"severity={severity}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == reported


async def test_webhook_refuses_requests_that_are_not_from_alertmanager() -> None:
    webhook = Webhook(say=lambda _: None)
    await webhook.start()
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{webhook.port}/", data=b"no") as response,
        ):
            assert response.status == 400
            assert "Alertmanager" in await response.text()
    finally:
        await webhook.stop()


async def test_agent_is_shown_alone_without_prometheus() -> None:
    options = stand_in()
    async with running(options, Tools(prometheus=None, alertmanager=None)) as state:
        greeting = await state.until(is_greeting, 20)
    assert "not on the PATH: prometheus and alertmanager; running the agent only" in state.said[0]
    assert f"http://127.0.0.1:{options.agent_port}/" in greeting
    assert "SIMULATED" in greeting
    assert state.task is not None
    assert state.task.result() == 0


async def test_failing_agent_ends_the_stack_with_its_message_and_code() -> None:
    options = replace(stand_in(), agent_command=(sys.executable, "-c", "raise SystemExit('no such scenario: dmeo')"))
    said: list[str] = []
    code = await run(options, say=said.append, stop=asyncio.Event(), tools=Tools(prometheus=None, alertmanager=None))
    assert code == 1
    assert "no such scenario: dmeo" in said[-1]


async def test_missing_rules_file_is_reported_before_the_start(tmp_path: Path) -> None:
    options = replace(stand_in(), rules=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        await run(options, say=lambda _: None, stop=asyncio.Event(), tools=Tools(prometheus="p", alertmanager="a"))


async def test_idle_workload_alerts_once_through_prometheus_and_alertmanager() -> None:
    async with running(stand_in(), both_tools()) as state, aiohttp.ClientSession() as session:
        greeting = await state.until(is_greeting)
        text = await state.until(lambda text: "GPUUnderutilised" in text)
        base = re.search(r"Alertmanager +(http\S+)/", greeting)
        assert base, greeting
        states = await known(session, base.group(1))
    assert states == {"GPUUnderutilised": "active"}
    text = " ".join(text.split())
    assert re.match(
        r"SIMULATED \d\d:\d\d:\d\d UTC WARNING GPUUnderutilised Notebook research/notebook of team vision ", text
    )
    assert " leaves its GPU idle, 12.00 USD an hour, without any work for 2h 0m 0s: 0% used over the last 1h." in text


async def known(session: aiohttp.ClientSession, alertmanager: str) -> dict[str, str]:
    """Return the state of the alerts in Alertmanager that have receivers."""
    async with session.get(f"{alertmanager}/api/v2/alerts") as response:
        alerts = await response.json()
    return {one["labels"]["alertname"]: one["status"]["state"] for one in alerts if one["labels"]["severity"] != "none"}


async def test_every_printed_url_answers() -> None:
    async with running(stand_in(), both_tools()) as state, aiohttp.ClientSession() as session:
        greeting = await state.until(is_greeting)
        pages = re.findall(r"^  (Prometheus|its alerts|Alertmanager) +(http\S+)$", greeting, re.MULTILINE)
        assert [name for name, _ in pages] == ["Prometheus", "its alerts", "Alertmanager"]
        for name, url in pages:
            async with session.get(url) as response:
                assert response.status == 200, url
                if name == "Alertmanager" or HAS_PAGES:
                    assert response.content_type == "text/html", url
    assert len(greeting.splitlines()) <= 24
    assert max(map(len, greeting.splitlines())) <= 100


async def test_dead_process_is_reported_and_the_others_continue() -> None:
    options = stand_in()
    async with running(options, both_tools()) as state:
        await state.until(is_greeting)
        for pid in children(f"--web.listen-address=127.0.0.1:{options.prometheus_port}"):
            os.kill(pid, signal.SIGKILL)
        text = await state.until(lambda text: text.startswith("prometheus exited"))
        assert "with code -9" in text
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{options.agent_port}/metrics") as response,
        ):
            assert response.status == 200
    assert not children(f"127.0.0.1:{options.agent_port}")
    assert not children(f"127.0.0.1:{options.alertmanager_port}")


def children(word: str) -> list[int]:
    """Return the processes with ``word`` in an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def ports_of(options: StackOptions) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("agent_port", "prometheus_port", "alertmanager_port")}

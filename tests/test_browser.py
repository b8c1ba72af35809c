"""The agent's page in a real browser: it shows the node, stays live, and asks for nothing from elsewhere."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from agent_support import AgentProcess

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("needs chromium on the PATH: make install")


def visit(agent: AgentProcess, directory: Path, *flags: str) -> tuple[str, list[dict[str, object]]]:
    """The page's DOM after a few (virtual) seconds, and the browser's network log."""
    log = directory / "network.json"
    done = subprocess.run(
        [
            browser(),
            *FLAGS,
            f"--user-data-dir={directory}/profile",
            f"--log-net-log={log}",
            "--enable-logging=stderr",
            "--v=0",
            "--virtual-time-budget=6000",
            "--dump-dom",
            *flags,
            f"http://127.0.0.1:{agent.port}/",
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == [], "the page writes errors to the console"
    text = log.read_text(encoding="utf-8")
    events = json.loads(text if text.rstrip().endswith("}") else text.rstrip().rstrip(",") + "]}")
    return done.stdout, events["events"]


def test_the_page_shows_the_node_and_asks_only_the_agent(demo_agent: AgentProcess, tmp_path: Path) -> None:
    dom, events = visit(demo_agent, tmp_path, "--window-size=1400,1600")
    for text in ("SIMULATED", "jupyter-mkowalski", "llama-pretrain-worker-0", "3g.40gb", "whisper-batch"):
        assert text in dom
    urls = {
        str(parameters["url"])
        for event in events
        if isinstance(parameters := event.get("params"), dict) and "url" in parameters
    }
    home = f"http://127.0.0.1:{demo_agent.port}/"
    assert any(url.startswith(f"{home}?fragment=1") for url in urls), "the page does not keep itself fresh"
    foreign = {url for url in urls if url.startswith("http") and not url.startswith(home)}
    # The browser itself looks for its maker's update and account services; the page names none of these hosts.
    assert not {url for url in foreign if not any(host in url for host in ("google", "gstatic", "chrome"))}
    assert not any(f'="{url}' in dom for url in foreign)

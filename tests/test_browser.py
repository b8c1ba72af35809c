"""The agent's page in a real browser: it shows the node, updates itself, and requests nothing from other hosts."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from agent_support import AgentProcess
from playwright.sync_api import BrowserContext
from test_service_browser import Watched, browser, context, faults_for_axe

__all__ = ["browser", "context"]

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


def program() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("needs chromium on the PATH: make install")


def visit(agent: AgentProcess, directory: Path, *flags: str) -> tuple[str, list[dict[str, object]]]:
    """Return the page's DOM after a few (virtual) seconds, and the browser's network log."""
    log = directory / "network.json"
    done = subprocess.run(
        [
            program(),
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


def test_page_shows_the_node_and_requests_only_the_agent(demo_agent: AgentProcess, tmp_path: Path) -> None:
    dom, events = visit(demo_agent, tmp_path, "--window-size=1400,1600")
    for text in ("SIMULATED", "jupyter-mkowalski", "llama-pretrain-worker-0", "3g.40gb", "whisper-batch"):
        assert text in dom
    urls = {
        str(parameters["url"])
        for event in events
        if isinstance(parameters := event.get("params"), dict) and "url" in parameters
    }
    home = f"http://127.0.0.1:{demo_agent.port}/"
    assert any(url.startswith(f"{home}?fragment=1") for url in urls), "the page does not update itself"
    foreign = {url for url in urls if url.startswith("http") and not url.startswith(home)}
    # The browser itself contacts its vendor's update and account services; the page names none of these hosts.
    assert not {url for url in foreign if not any(host in url for host in ("google", "gstatic", "chrome"))}
    assert not any(f'="{url}' in dom for url in foreign)


HEIGHTS = """() => [...document.querySelectorAll('table tbody tr')].filter((row) => row.offsetHeight).map((row) => {
    const style = getComputedStyle(row);
    return row.clientHeight - parseFloat(style.paddingTop) - parseFloat(style.paddingBottom);
})"""
PLACES = """() => [...document.querySelectorAll('.map a')].map((card) => [card.clientHeight,
    card.children[1].getBoundingClientRect().top - card.getBoundingClientRect().top].join())"""


def test_page_fits_phone_and_desktop_widths_and_passes_axe(context: BrowserContext, demo_agent: AgentProcess) -> None:
    seen = Watched(context, f"http://127.0.0.1:{demo_agent.port}")
    try:
        page = seen.open("/")
        for width in (360, 390, 768, 1280, 2560):
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width, timeout=10_000)
            assert len(set(page.evaluate(PLACES))) == 1, "a card is higher, or its picture has another place"
            if width == 390:
                assert max(page.evaluate(HEIGHTS)) < 3 * 24, "a row has more than three lines"
        assert faults_for_axe(page) == []
        seen.check()
    finally:
        seen.page.close()


def test_device_filter_and_sort_persist_when_the_page_refreshes(
    context: BrowserContext, demo_agent: AgentProcess
) -> None:
    seen = Watched(context, f"http://127.0.0.1:{demo_agent.port}")
    try:
        page = seen.open("/")
        rows = page.locator("table.devices tbody tr:visible")
        all_rows = rows.count()
        page.get_by_label("Filter devices").press_sequentially("classroom 1g")
        page.wait_for_function(RENEWED, arg=page.evaluate(TAKEN), timeout=15_000)
        assert page.get_by_label("Filter devices").input_value() == "classroom 1g"
        assert page.evaluate("document.activeElement.id") == "filter"
        assert all("GPU 5" in text or "classroom" in text for text in rows.all_inner_texts())
        assert page.locator("#shown").inner_text() == "5 of 19 devices"
        page.get_by_label("Filter devices").fill("")
        page.get_by_label("Sort by").select_option(label="longest idle")
        page.wait_for_function(RENEWED, arg=page.evaluate(TAKEN), timeout=15_000)
        longest = [float(value) for value in page.evaluate(LONGEST)]
        assert longest == sorted(longest, reverse=True)
        assert longest[0] > longest[-1]
        page.get_by_label("Sort by").select_option(label="device")
        assert rows.count() == all_rows
        assert page.locator("table.devices tbody tr.gpu").first.get_attribute("id") == "gpu-0"
        seen.check()
    finally:
        seen.page.close()


TAKEN = "document.querySelector('#live > div').dataset.taken"
RENEWED = f"taken => {TAKEN} !== taken"
LONGEST = """[...document.querySelectorAll('table.devices tbody')].map((body) =>
    Math.max(...[...body.rows].map((row) => parseFloat(row.dataset.idle || -1))))"""

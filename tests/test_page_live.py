"""The page in a real browser: its own policy allows its own script, and the content updates itself."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import page_support as made
import pytest
from aiohttp import web

from exporter.metrics.collector import ExpositionOptions
from exporter.model.snapshot import Snapshot
from exporter.web.server import NodeSite, Renderer

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
async def test_page_refreshes_without_reloading_and_announces_it(tmp_path: Path) -> None:
    first = made.rich_snapshot()
    asked: list[Snapshot] = []

    def newest() -> Snapshot:
        asked.append(replace(first, node=f"picture-{len(asked)}"))
        return asked[-1]

    app = NodeSite(snapshot=newest, renderer=Renderer(ExpositionOptions(), list), release=lambda _: None).app()
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        browser = await asyncio.create_subprocess_exec(
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={tmp_path}",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"http://127.0.0.1:{runner.addresses[0][1]}/",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await asyncio.wait_for(browser.communicate(), 60)
    finally:
        await runner.cleanup()
    dom = out.decode()
    assert "<title>SIMULATED GPUs of picture-0</title>" in dom
    assert "<h1>picture-0</h1>" not in dom
    assert len(asked) > 1
    assert 'aria-live="polite">' in dom
    assert "data is " in dom
    assert "Content Security Policy" not in errors.decode(errors="replace")

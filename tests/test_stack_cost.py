"""The demonstration: its cost service has a fleet's past in a real Prometheus, and says that it is simulated."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from test_stack import both_tools, running, stand_in

from exporter.cost.budgets import load as load_budgets
from exporter.errors import ExporterError
from gpu_simulator import stack
from gpu_simulator.stack import free_port

HISTORY_DAYS = 3


async def test_the_demonstration_shows_the_money_of_a_fleets_past() -> None:
    tools = both_tools()
    if tools.promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    options = replace(stand_in(), history_days=HISTORY_DAYS, cost_port=free_port(0))
    async with running(options, tools) as state, aiohttp.ClientSession() as session:
        greeting = await state.until(lambda text: "cost of a fleet" in text)
        address = re.search(r"cost of a fleet +(\S+)/ ", greeting)
        assert address, greeting
        base = address.group(1)
        async with session.get(f"{base}/api/v1/report?window=3d&by=cluster") as response:
            report = json.loads(await response.text())
        async with session.get(f"{base}/") as response:
            page = await response.text()
        assert await budget_of_all(session, base) > 0
    assert {line["cluster"] for line in report["lines"]} >= set(stack.CLUSTERS)
    assert report["total"]["allocated_seconds"] >= 0.9 * stack.NODES * 8 * (HISTORY_DAYS - 1) * 86_400
    assert report["simulated"] is True
    assert "SIMULATED" in page


async def budget_of_all(session: aiohttp.ClientSession, base: str) -> float:
    """Money spent of the budget for everything, as the service shows it to Prometheus."""
    for _ in range(100):
        async with session.get(f"{base}/metrics") as response:
            text = await response.text()
        found = re.search(r'^gpu_budget_spent\{budget="all-gpus"[^}]*\} (\S+)$', text, re.MULTILINE)
        if found:
            return float(found.group(1))
        await asyncio.sleep(0.2)
    raise AssertionError(text)


def test_the_demonstrations_budgets_are_a_budget_file(tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text(stack.demo_budgets(stack.demo_fleet(1_790_000_000.0, 1)), encoding="utf-8")
    assert [budget.name for budget in load_budgets(file)][-1] == "all-gpus"


def test_a_promtool_that_fails_is_told_in_its_words(tmp_path: Path) -> None:
    promtool = tmp_path / "promtool"
    promtool.write_text("#!/bin/sh\necho no such command >&2; exit 1\n", encoding="utf-8")
    promtool.chmod(0o755)
    with pytest.raises(ExporterError, match=r"promtool: could not make .*: no such command"):
        stack.make_history(stack.demo_fleet(1_790_000_000.0, 1), str(promtool), tmp_path / "blocks")
    assert not list(tmp_path.glob("*.om"))

"""The demonstration from a user's view: alerts, the past of a fleet, cost, and the queries of the runbook."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_service_runbook import QUERIES
from test_stack import QUICK, both_tools, is_greeting, ports_of, running, stand_in

from exporter.cost.budgets import load as load_budgets
from exporter.errors import ExporterError
from gpu_simulator import past, stack
from gpu_simulator.stack import StackOptions, free_port

HISTORY_DAYS = 3
QUICKER_STILL = (
    *QUICK,
    stack.Substitution(shipped="interval: 5m", demo="interval: 2s", what="how often the ledger is recorded"),
)
NO_DATA = {
    "workload:gpu_effective:ratio": "a notebook that does nothing has no active time",
    "workload:gpu_bottleneck_seconds:sum": "a notebook that does nothing has no active time",
    'workload_name="$workload_name"}[1d]': "the node's own first hour is not recorded yet",
    "gpu_shared_idle_gpus": "the agent knows the processes of every sharer",
    "workload:gpu_large_cost:increase1h": "nothing costs 20 an hour in the first minutes",
    '{quantity="cost",workload_namespace="$workload_namespace"}[7d]': "the node's own first hour is not recorded yet",
    "gpu_xid_last_seen_timestamp_seconds": "the first Xid comes after three minutes",
    "gpu_owner_xid_last_seen_timestamp_seconds": "no program makes an invalid access",
    "gpu_up == 0": "the first GPU is lost after three minutes",
    "gpu_owner_broken_gpus": "the first GPU is lost after three minutes",
    'severity="critical"': "the first GPU is lost after three minutes",
    "kube_node_": "there is no kube-state-metrics",
    "gpu_exporter_dcgm_info": "there is no DCGM",
    "gpu_profiling_state": "there is no DCGM",
    "gpu_exporter_errors_total": "nothing fails",
    "gpu_exporter_ledger_locked": "a simulated node takes no lock of the host",
    "gpu_cost_service_read_errors_total": "every query is answered",
    "gpu_cost_service_days_not_closed": "the service closes days once an hour",
    "gpu_cost_service_closed_until_timestamp_seconds": "the service closes days once an hour",
}
"""Part of a query of the runbook, and the reason why the demonstration has no data for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Results of one run of the demonstration."""

    said: tuple[str, ...]
    notebook: str
    pages: Mapping[str, int]
    """Status by address in the greeting."""
    report: Mapping[str, Any]
    page: str
    spent: float
    answers: Mapping[tuple[str, str], int]
    """Number of series that each query of the runbook returns, by alert and query."""
    greeting_again: str
    read_again: int
    """Series of the past in a second run at its greeting."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Queries to the Prometheus and the cost service of a running demonstration."""

    session: aiohttp.ClientSession
    options: StackOptions

    async def query(self, expression: str, **more: str) -> list[dict[str, str]]:
        """Return the labels of the series that an instant query finds."""
        url = f"http://127.0.0.1:{self.options.prometheus_port}/api/v1/query"
        async with self.session.get(url, params={"query": expression, **more}) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        return [row["metric"] for row in answer["data"]["result"]]

    async def first(self, expression: str) -> dict[str, str]:
        """Return the labels of the first series."""
        found = await self.query(expression)
        assert found, f"no data: {expression}"
        return found[0]

    async def spent(self) -> float:
        """Return the money spent of the budget for everything, as the service shows it to Prometheus."""
        for _ in range(300):
            async with self.session.get(f"{self.options.cost_page}/metrics") as response:
                text = await response.text()
            found = re.search(r'^gpu_budget_spent\{budget="all-gpus"[^}]*\} (\S+)$', text, re.MULTILINE)
            if found and await self.query("budget:gpu_burn:ratio1h"):
                return float(found.group(1))
            await asyncio.sleep(0.2)
        raise AssertionError(text)

    async def labels(self, alert: str) -> dict[str, str]:
        """Return the labels of an alert: its own if it is pending or firing, otherwise those that it would have."""
        own = await self.query(f'ALERTS{{alertname="{alert}",workload_name=~"mkowalski|"}}')
        if own:
            return own[0]
        job = "gpu-cost-service" if alert.startswith("GPUCostService") else "gpu-cost-exporter"
        found = {"xid": "79", "source": "nvml"}
        for expression in (
            'gpu_budget_limit{budget="all-gpus"}',
            "pool:gpu_capacity:sum",
            'gpu_pod_info{pod_name="jupyter-mkowalski"}',
            f'up{{job="{job}"}}',
        ):
            found |= await self.first(expression)
        if alert == "GPUIdleCost":
            found |= await self.first(
                "topk(1, sum by (workload_namespace) (sum_over_time("
                'workload:gpu_ledger:delta1h{quantity="cost",state="idle",workload_kind!~"Una.+"}[24h])))'
            )
        return found

    async def answers(self) -> dict[tuple[str, str], int]:
        """Run every query of the runbook with the labels of its alert."""
        labels = {alert: await self.labels(alert) for alert in dict(QUERIES)}
        found = {}
        for alert, query in QUERIES:
            of_alert = labels[alert]
            asked = re.sub(r"\$([a-z_]+)", lambda name, of_alert=of_alert: of_alert.get(name[1], ""), query)
            found[alert, query] = len(await self.query(asked))
        return found


async def show(cache: Path) -> Demo:
    """Run the demonstration twice: the first run makes the past, the second one has it."""
    tools = both_tools()
    if tools.promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    options = replace(
        StackOptions(scenario="demo", substitutions=QUICKER_STILL, hour="10s", history_days=HISTORY_DAYS, cache=cache),
        **ports_of(stand_in()),
        cost_port=free_port(0),
    )
    end_seconds = past.demo_fleet(stack.time.time(), HISTORY_DAYS).end_seconds
    async with running(options, tools) as state, aiohttp.ClientSession() as session:
        asking = Asking(session, options)
        greeting = await state.until(is_greeting)
        notebook = await state.until(lambda text: "mkowalski" in text, 180)
        await state.until(lambda text: "loaded, and cached" in text, 180)
        pages = {}
        for url in re.findall(r"http\S+", greeting):
            async with session.get(url) as response:
                pages[url] = response.status
        spent = await asking.spent()
        async with session.get(f"{options.cost_page}/api/v1/report?window=3d&by=cluster") as response:
            report = await response.json()
        async with session.get(f"{options.cost_page}/") as response:
            page = await response.text()
        answers = await asking.answers()
        said = tuple(state.said)
    async with running(options, tools) as state, aiohttp.ClientSession() as session:
        greeting_again = await state.until(is_greeting)
        read_again = len(await Asking(session, options).query("gpu_node_info", time=str(end_seconds)))
    return Demo(
        said=said,
        notebook=" ".join(notebook.split()),
        pages=pages,
        report=report,
        page=page,
        spent=spent,
        answers=answers,
        greeting_again=greeting_again,
        read_again=read_again,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return asyncio.run(show(tmp_path_factory.mktemp("cache")))


def test_idle_notebook_of_the_demo_alerts(demo: Demo) -> None:
    words = r"leaves its GPU idle, \d+\.\d\d USD an hour, .* used over the last 2h\."
    assert re.search(f"Notebook data-science/mkowalski of team recommender {words} http://127.0.0.1:", demo.notebook)


def test_every_address_of_the_greeting_answers(demo: Demo) -> None:
    assert len(demo.pages) == 7
    assert set(demo.pages.values()) == {200}


def test_demonstration_shows_the_cost_of_the_generated_history(demo: Demo) -> None:
    assert {line["cluster"] for line in demo.report["lines"]} >= set(past.CLUSTERS)
    assert demo.report["total"]["allocated_seconds"] >= 0.9 * past.NODES * 8 * (HISTORY_DAYS - 1) * 86_400
    assert demo.report["simulated"] is True
    assert "SIMULATED" in demo.page
    assert demo.spent > 0


def test_history_is_generated_once_with_progress_and_kept(demo: Demo) -> None:
    assert [text for text in demo.said if re.search(r"\d+ % created, about \d+ s left", text)]
    assert "in preparation" not in demo.greeting_again
    assert demo.read_again > 0


def test_every_query_of_the_runbook_returns_data(demo: Demo) -> None:
    assert demo.answers.keys() == set(QUERIES)
    empty = [query for (_, query), rows in demo.answers.items() if not rows]
    assert [query for query in empty if not any(part in query for part in NO_DATA)] == []


def test_every_query_exception_matches_a_query() -> None:
    assert [part for part in NO_DATA if not any(part in query for _, query in QUERIES)] == []


def test_demonstration_budgets_are_a_valid_budget_file(tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text(stack.demo_budgets(past.demo_fleet(1_790_000_000.0, 1)), encoding="utf-8")
    assert [budget.name for budget in load_budgets(file)][-1] == "all-gpus"


def test_failing_promtool_is_reported_with_its_message(tmp_path: Path) -> None:
    promtool = tmp_path / "promtool"
    promtool.write_text("#!/bin/sh\necho no such command >&2; exit 1\n", encoding="utf-8")
    promtool.chmod(0o755)
    with pytest.raises(ExporterError, match=r"promtool: cannot create .*: no such command"):
        past.make_history(past.demo_fleet(1_790_000_000.0, 1), str(promtool), tmp_path / "blocks")
    assert not list(tmp_path.glob("*.om"))

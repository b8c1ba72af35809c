import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fleet_support
import pytest
from files_support import read_yaml
from page_support import samples_of
from service_support import quiet_fleet

from exporter.cost.budgets import Budget, BudgetState
from exporter.cost.store import ClosedDay
from exporter.cost.window import Window, period_at
from exporter.metrics import catalog as agent_catalog
from exporter.metrics.collector import ProcessMetrics
from exporter.metrics.text_format import Kind
from exporter.service import metrics as catalog
from exporter.service.data import Month, ThisMonth
from exporter.service.fleet import Fleet
from exporter.service.metrics import families, render

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "rules" / "prometheus-rules.yaml"
NOW = datetime(2026, 10, 15, 12, tzinfo=UTC).timestamp()
"""14.5 of 31 days have passed, 16.5 remain."""


def state(name: str, spent: float, projected: float | None, *, now: float = NOW, **owner: str) -> BudgetState:
    budget = Budget(name=name, amount=1000.0, currency="USD", period="month", owner=owner)  # type: ignore[arg-type]
    return BudgetState(
        budget=budget,
        period=period_at("month", now),
        spent=spent,
        projected=projected,
        unpriced_seconds=0.0,
        as_of_seconds=now,
    )


def everything() -> Fleet:
    day = Window(start_seconds=int(NOW) - 129_600, end_seconds=int(NOW) - 43_200)
    budgets = (state("research", 400.0, 900.0, team="red", namespace="a", cluster="east"), state("all", 1.0, None))
    fleet = quiet_fleet(NOW, budgets)
    money = (Month(currency="USD", spent=5.0, forecast=9.0, last_month=7.0),)
    fleet.month.value = ThisMonth(start_seconds=period_at("month", NOW).start_seconds, money=money, coverage=0.99)
    fleet.keeping.path, fleet.keeping.not_closed = Path("days.sqlite"), 0
    fleet.keeping.days = (ClosedDay(day, 1, 24, simulated=False, reopened=""),)
    fleet.newest.value, fleet.last_read_seconds, fleet.errors["timeout"] = NOW, NOW - 60, 3
    return fleet


def test_every_metric_has_a_unique_name_and_help_and_a_matching_type() -> None:
    names = [metric.name for metric in catalog.ALL]
    assert len(set(names)) == len(names)
    for metric in catalog.OWN:
        assert re.fullmatch(r"gpu_(budget|cost)_[a-z0-9_]*", metric.name)
        assert metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.name not in agent_catalog.BY_NAME


def test_page_has_exactly_the_metrics_of_the_catalogue() -> None:
    page = families(everything())
    assert [family.name for family in page] == [metric.name for metric in catalog.OWN]
    by_name = {metric.name: metric for metric in catalog.OWN}
    for family in page:
        metric = by_name[family.name]
        assert (family.kind, family.help) == (metric.kind, metric.help)
        for sample in samples_of(family):
            order = [name for name, _ in sample.pairs]
            assert order == [label for label in metric.labels if label in order], family.name


def test_every_metric_has_its_row_in_the_document() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert [metric.name for metric in catalog.ALL if f"| `{metric.name}` |" not in text] == []


def test_unknown_values_are_absent() -> None:
    unknown = state("b", 0.0, None)
    known = {name: getattr(unknown, name) for name in unknown.__slots__} | {"known": False}
    fleet = quiet_fleet(NOW, (BudgetState(**known),))
    shown = {family.name for family in families(fleet)}
    assert shown == {
        "gpu_budget_limit",
        "gpu_budget_period_start_timestamp_seconds",
        "gpu_budget_period_end_timestamp_seconds",
        "gpu_cost_service_build_info",
        "gpu_cost_service_simulated",
    }


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_promtool_accepts_the_page(accept: str) -> None:
    shown = render(everything(), accept, ProcessMetrics())
    body, content_type = shown.plain, shown.content_type
    assert content_type.startswith("application/openmetrics-text" if accept else "text/plain")
    assert b'gpu_budget_spent{budget="research",period="month",currency="USD",cluster="east",team="red"' in body
    if not accept:
        done = subprocess.run(
            [fleet_support.tool("promtool"), "check", "metrics"], input=body, capture_output=True, check=False
        )
        # These metrics count days, not a time.
        faults = [line for line in done.stderr.decode().splitlines() if 'instead of "days"' not in line]
        assert faults == []


def rules() -> dict[str, dict[str, Any]]:
    """Return the rules that read budgets, by recorded name; for alerts, the first of each."""
    found: dict[str, dict[str, Any]] = {}
    for group in read_yaml(RULES.read_text())["groups"]:
        if group["name"] == "gpu-budgets":
            for rule in group["rules"]:
                found.setdefault(rule.get("record") or rule["alert"], rule)
    return found


def test_rules_read_only_existing_series_and_labels() -> None:
    text = json.dumps(rules())
    names = set(re.findall(r"gpu_budget_\w+", text))
    assert names
    assert names <= {metric.name for metric in catalog.OWN}
    for labels in re.findall(r"max by \(([^)]*)\)", text):
        assert set(labels.replace(" ", "").split(",")) == set(catalog.BUDGET_LABELS)


@contextmanager
def scraped(directory: Path, pages: list[tuple[float, Fleet]]) -> Iterator[str]:
    """Run a real Prometheus with scrapes of these pages at these times; yield its address."""
    series: dict[str, list[str]] = {}
    for moment, fleet in pages:
        head = ""
        for line in render(fleet, "application/openmetrics-text").plain.decode().splitlines():
            if line.startswith("# TYPE"):
                head = line
                series.setdefault(head, [])
            elif not line.startswith("#"):
                series[head].append(f"{line} {moment:.0f}")
    text = directory / "pages.om"
    # Series by series, each in the order of time.
    text.write_text(
        "".join(f"{head}\n" + "".join(f"{line}\n" for line in sorted(lines)) for head, lines in series.items())
        + "# EOF\n"
    )
    fleet_support.backfill(text, directory / "blocks")
    with fleet_support.prometheus(directory, directory / "blocks", fleet_support.SMALL_FLEET) as server:
        yield server.url


def ask(url: str, query: str) -> dict[str, float]:
    """Return the values of an instant query at ``NOW``, by budget."""
    parameters = urllib.parse.urlencode({"query": query, "time": NOW})
    with urllib.request.urlopen(f"{url}/api/v1/query?{parameters}") as response:  # noqa: S310 - our own server
        data = json.load(response)["data"]
    return {row["metric"].get("budget", ""): float(row["value"][1]) for row in data["result"]}


def inlined(expression: str, known: dict[str, dict[str, Any]]) -> str:
    """Return an expression over raw series: it replaces the names of recorded series by their expressions."""
    while match := re.search(r"budget:[a-z_]+:[a-z0-9_]+", expression):
        inner = known[match[0]]["expr"]
        expression = expression.replace(match[0], f"({inner})")
    return expression


def test_rules_detect_a_burning_budget_and_ignore_a_normal_one(tmp_path: Path) -> None:
    """Three budgets of 1000 a month: one used at 20 an hour for a day, one with a third too much, and a normal one."""
    pages = []
    for back in range(72 * 12, -1, -1):  # every five minutes of three days
        moment = NOW - 300 * back
        hours = max(0, 24 - back * 300 // 3600)
        budgets = (
            state("burning", 100.0 + 20.0 * hours, 900.0 + 5 * hours, now=moment, team="red"),
            state("dear", 600.0, 1330.0, now=moment, namespace="a", cluster="east"),
            state("calm", 300.0, 640.0, now=moment),
        )
        pages.append((moment, quiet_fleet(moment, budgets)))
    known = rules()
    with scraped(tmp_path, pages) as url:
        burn = ask(url, inlined(known["GPUBudgetBurn"]["expr"], known))
        overrun = ask(url, inlined(known["GPUBudgetProjectedOverrun"]["expr"], known))
        spent = ask(url, inlined("budget:gpu_spent:ratio", known))
        labels = ask(url, 'gpu_budget_spent{workload_namespace="a",cluster="east",period="month",currency="USD"}')
    assert set(burn) == {"burning"}
    # 420 are left for 396 hours, and 20 are spent in one.
    assert burn["burning"] == pytest.approx(20 / (420 / 396), rel=0.05)
    assert overrun == {"dear": 1.33}
    assert spent == pytest.approx({"burning": 0.58, "dear": 0.6, "calm": 0.3})
    assert labels == {"dear": 600.0}

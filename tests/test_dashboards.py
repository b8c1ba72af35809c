"""The dashboards equal the output of their script, have Grafana's published types, and query existing series only."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards_support import DEFAULTS, NAMES, ROOT, Board, expand, load, panels
from files_support import read_yaml

from exporter.metrics import catalog
from exporter.model.devices import XidTier
from exporter.service import metrics

BOARDS = {name: load(name) for name in NAMES}
UIDS = {"fleet": "gpu-cost-fleet", "oncall": "gpu-cost-oncall", "finops": "gpu-cost-finops"}
RULES = read_yaml((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))
SCHEMA = ROOT / "tests" / "grafana_schema"
SCHEMA_TOOLS = ROOT / ".tools" / "grafana_schema" / "node_modules"
MADE_BY_PROMETHEUS = {"up", "ALERTS"}
each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def expressions(board: Board) -> Iterator[tuple[str, str]]:
    """Return title and expression of every target."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def variables(board: Board) -> list[dict[str, Any]]:
    return list(board["templating"]["list"])


def test_committed_dashboards_match_the_build_script() -> None:
    command = [sys.executable, str(ROOT / "dashboards" / "build.py"), "--check"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@each_board
def test_panel_and_target_ids_are_unique(board: Board) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    assert 0 not in ids
    for panel in panels(board):
        letters = [target["refId"] for target in panel["targets"]]
        assert all(letters)
        assert len(letters) == len(set(letters)), panel["title"]


@each_board
def test_panels_do_not_overlap(board: Board) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} overlaps {taken[x, y]}"
                taken[x, y] = panel["title"]


@each_board
def test_every_panel_has_a_title_description_unit_and_the_data_source_variable(board: Board) -> None:
    for panel in panels(board):
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) == len(set(titles))


@each_board
def test_variables_start_with_the_data_source_and_follow_the_time_range(board: Board) -> None:
    first, *others = variables(board)
    assert (first["name"], first["type"]) == ("datasource", "datasource")
    assert others[0]["name"] == "cluster"
    for variable in others:
        if variable["type"] == "query":
            assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert variable["multi"], variable["name"]
            assert variable["includeAll"], variable["name"]
            assert variable["allValue"] == ".*", "All includes a cluster without the label"
            assert variable["refresh"] == 2, "on time range change"
    assert {variable["name"] for variable in others} - {"cost_page"} <= set(DEFAULTS)


@each_board
def test_every_variable_is_used_and_every_query_filters_by_cluster(board: Board) -> None:
    text = json.dumps(board)
    for variable in variables(board):
        assert re.search(rf"\${variable['name']}\b|\${{{variable['name']}}}", text), variable["name"]
    for title, expression in expressions(board):
        of_all_clusters = "gpu_cost_month" in expression or "gpu_cost_last" in expression or "gpu_budget" in expression
        assert of_all_clusters or 'cluster=~"$cluster"' in expression, title


@each_board
def test_dashboard_has_stable_settings_and_links(board: Board) -> None:
    name = next(name for name, other in BOARDS.items() if other is board)
    assert board["uid"] == UIDS[name]
    assert not board.get("id")
    assert board["editable"] is False
    assert 39 <= board["schemaVersion"] <= 41
    assert board["timezone"] == ("utc" if name == "finops" else "browser"), "the ledger's days are UTC"
    dashboards, cost_page, runbook = board["links"]
    assert dashboards["tags"] == ["gpu-cost-exporter"]
    assert all("gpu-cost-exporter" in other["tags"] for other in BOARDS.values())
    assert cost_page["url"] == "${cost_page}"
    assert runbook["url"] == "${cost_page}/runbook"
    assert next(v["query"] for v in variables(board) if v["name"] == "cost_page") == "http://localhost:9401"


@each_board
def test_cell_links_lead_to_existing_dashboards_pages_and_headings(board: Board) -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    urls = re.findall(r'"url": "([^"]+)"', json.dumps(board))
    assert urls
    for url in urls:
        if url.startswith("/d/"):
            assert url.split("/")[2] in UIDS.values(), url
        elif "/runbook#" in url:
            assert url.partition("#")[2] in anchors, url
        else:
            assert url.startswith("${cost_page}"), url


@each_board
def test_docs_describe_every_panel(board: Board) -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8")
    assert [panel["title"] for panel in panels(board) if panel["title"] not in text] == []


def test_every_expression_is_valid_promql(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    asked = [expand(expression, 86_400) for board in BOARDS.values() for _, expression in expressions(board)]
    rules = [{"record": f"panel:expression:{number}", "expr": text} for number, text in enumerate(asked)]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    result = subprocess.run([promtool, "check", "rules", str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@each_board
def test_every_metric_is_made_by_the_agent_the_cost_service_or_the_rules(board: Board) -> None:
    known = set(catalog.BY_NAME) | {metric.name for metric in metrics.OWN} | MADE_BY_PROMETHEUS
    known |= {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    asked = set()
    filled = [variable["query"]["query"] for variable in variables(board) if variable["type"] == "query"]
    for text in (*(expression for _, expression in expressions(board)), *filled):
        bare = re.sub(r'\{[^}]*\}|"[^"]*"|(?:by|on|group_left|group_right) \([^)]*\)', "", text)
        asked |= set(re.findall(r"\b(?:[a-z_]+:gpu_[a-z0-9_:]+|gpu_[a-z0-9_]+|up|ALERTS)\b", bare))
    assert asked
    assert asked <= known


def test_every_xid_tier_has_a_colour() -> None:
    (panel,) = (one for one in panels(BOARDS["oncall"]) if one["title"] == "Xids")
    assert "tier" in panel["targets"][0]["expr"]
    assert all(f'"{tier}"' in json.dumps(panel["fieldConfig"]["overrides"]) for tier in XidTier)


def test_alert_links_lead_to_existing_dashboards() -> None:
    links = {
        rule["annotations"]["dashboard"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
    }
    assert all(link.split("/")[2] in UIDS.values() for link in links)


def test_dashboards_match_the_published_grafana_types(tmp_path: Path) -> None:
    if not SCHEMA_TOOLS.is_dir() or shutil.which("node") is None:
        pytest.skip("needs node and Grafana's types: make install")
    (tmp_path / "node_modules").symlink_to(SCHEMA_TOOLS)
    shutil.copy(SCHEMA / "schema.ts", tmp_path)
    lines = ['import type { Custom, Options, Whole } from "./schema";']
    for name, board in BOARDS.items():
        lines.append(f"const {name}: Whole = {json.dumps(board)};")
        for panel in panels(board):
            kind, at = panel["type"], f"{name}{panel['id']}"
            custom = panel["fieldConfig"]["defaults"].get("custom", {})
            lines.append(f'const {at}: Options["{kind}"] = {json.dumps(panel.get("options", {}))};')
            lines.append(f'const {at}c: Custom["{kind}"] = {json.dumps(custom)};')
    (tmp_path / "boards.ts").write_text("\n".join(lines), encoding="utf-8")
    options = [
        "--noEmit",
        "--strict",
        "--skipLibCheck",
        "--moduleResolution",
        "bundler",
        "--module",
        "esnext",
        "--target",
        "es2022",
    ]
    compiler = SCHEMA_TOOLS / "typescript" / "bin" / "tsc"
    command = ["node", str(compiler), *options, "boards.ts"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[:4000]

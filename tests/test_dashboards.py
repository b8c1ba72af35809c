"""The dashboard is what its script builds, and asks only for series that exist."""

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

from exporter.exposition import catalog

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = json.loads((ROOT / "dashboards" / "fleet.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))
VARIABLES = {"$node": "n1", "$namespace": "research", "$__rate_interval": "1m"}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    for panel in panels():
        for target in panel["targets"]:
            yield target["expr"]


def test_the_committed_dashboard_is_what_the_script_builds() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "dashboards" / "build.py"), "--check"], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_panels_and_their_targets_have_unique_ids() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        letters = [target["refId"] for target in panel["targets"]]
        assert all(letters)
        assert len(letters) == len(set(letters)), panel["title"]


def test_every_panel_is_titled_described_has_a_unit_and_follows_the_data_source_variable() -> None:
    assert panels()
    for panel in panels():
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), panel["title"]
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "node", "namespace"]


def test_every_expression_is_valid_promql(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    rules = []
    for number, expression in enumerate(expressions()):
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)  # noqa: PLW2901 - each pass refines the same text
        assert "$" not in expression
        rules.append({"record": f"panel:expression:{number}", "expr": expression})
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    result = subprocess.run([promtool, "check", "rules", str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_metric_is_one_that_the_agent_or_the_rules_make() -> None:
    known = set(catalog.BY_NAME) | {
        rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule
    }
    filled = [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    assert filled
    asked = set()
    for text in (*expressions(), *(query["query"] for query in filled)):
        asked |= set(re.findall(r"\b(?:[a-z_]+:)?gpu_[a-z0-9_:]+", re.sub(r"\{[^}]*\}|by \([^)]*\)", "", text)))
    assert asked
    assert asked - {"gpu_instance"} <= known


def test_the_alerts_link_to_this_dashboard() -> None:
    links = {
        rule["annotations"]["dashboard"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule
    }
    assert all(link.startswith(f"/d/{DASHBOARD['uid']}/") for link in links)

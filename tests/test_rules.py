"""The rules hold together with their tests, the runbook and the metrics that the agent has."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.exposition import catalog

ROOT = Path(__file__).resolve().parent.parent
RULES_FILE = ROOT / "rules" / "prometheus-rules.yaml"
TEXT = RULES_FILE.read_text(encoding="utf-8")
RULES: list[dict[str, Any]] = [rule for group in yaml.safe_load(TEXT)["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
UNIT_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
# Series that Prometheus makes itself.
PROMETHEUS_OWN = {"up"}
NOT_METRICS = {"and", "or", "unless", "by", "on"}


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool on the PATH: make install")
    return found


def metrics_of(expression: str) -> set[str]:
    """Names of series in a PromQL expression: words that are neither labels, functions nor keywords."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^]]*\]", " ", expression)
    bare = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"[a-z_][a-z0-9_:]*(?![a-z0-9_:(]|\s*\()", bare)) - NOT_METRICS


def test_prometheus_accepts_the_rules(promtool: str) -> None:
    result = subprocess.run([promtool, "check", "rules", str(RULES_FILE)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_unit_tests(promtool: str, path: Path) -> None:
    result = subprocess.run([promtool, "test", "rules", str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# A change that someone could make in good faith, and that a unit test must notice.
WEAKENED = {
    "hour not low": ("            and (pod_device:gpu_use:avg1h < 0.05)\n", ""),
    "quarter not low": ("            and (pod_device:gpu_use:avg15m < 0.05)\n", ""),
    "no coverage": ("            and (pod_device:gpu_observed:ratio1h >= 0.9)\n", ""),
    "half coverage": (">= 0.9)", ">= 0.4)"),
    "no age": ("            and (max_over_time(pod_device:gpu_age:seconds[1h]) > 3600)\n", ""),
    "newest age": ("max_over_time(pod_device:gpu_age:seconds[1h])", "pod_device:gpu_age:seconds"),
    "estimate taken as measured": ('source!~"process_samples|estimated"', 'source!=""'),
    "counted, not by share": ("            pod_device:gpu_share:ratio{", "            0 * pod_device:gpu_share:ratio{"),
    "platform included": ('{pod_namespace!~"kube-system|gpu-operator|nvidia-gpu-operator|cw-hpc-verification"}', ""),
    "no delay": ("        for: 10m\n", ""),
    "no keep firing": ("        keep_firing_for: 15m\n", ""),
}


@pytest.mark.parametrize("change", WEAKENED)
def test_a_guard_of_the_idle_alert_cannot_be_lost_unnoticed(promtool: str, tmp_path: Path, change: str) -> None:
    before, after = WEAKENED[change]
    assert TEXT.count(before) == 1, before
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests" / "rules").mkdir(parents=True)
    (tmp_path / "rules" / RULES_FILE.name).write_text(TEXT.replace(before, after), encoding="utf-8")
    source = ROOT / "tests" / "rules" / "gpu_underutilised.yaml"
    copy = shutil.copy(source, tmp_path / "tests" / "rules")
    result = subprocess.run([promtool, "test", "rules", str(copy)], check=False, capture_output=True, text=True)
    assert result.returncode != 0


@pytest.mark.parametrize("alert", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_who_should_do_what_and_where_to_look(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"info", "warning", "critical"}
    annotations = alert["annotations"]
    assert annotations["summary"]
    assert annotations["dashboard"]
    assert annotations["runbook_url"].endswith(f"/docs/runbook.md#{alert['alert'].lower()}")


def test_money_and_idleness_never_page() -> None:
    assert all(alert["labels"]["severity"] != "critical" for alert in ALERTS)


def test_the_runbook_has_a_heading_for_every_alert_and_no_other() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (GPU\w+)$", runbook, flags=re.MULTILINE)
    assert headings == [alert["alert"] for alert in ALERTS]


def test_every_alert_is_tested_to_fire_and_to_stay_silent() -> None:
    fired: set[str] = set()
    for path in UNIT_TESTS:
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for case in test.get("alert_rule_test", ()):
                if case["exp_alerts"]:
                    fired.add(case["alertname"])
    silent = {
        case["alertname"]
        for path in UNIT_TESTS
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]
        for case in test.get("alert_rule_test", ())
        if not case["exp_alerts"]
    }
    assert fired == silent == {alert["alert"] for alert in ALERTS}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_series_that_a_rule_reads_is_made_by_the_agent_or_by_a_rule(rule: dict[str, Any]) -> None:
    read = metrics_of(rule["expr"])
    assert read
    assert read <= set(catalog.BY_NAME) | RECORDED | PROMETHEUS_OWN


def test_rules_use_only_labels_that_the_series_have() -> None:
    pods = {"cluster", *catalog.DEVICE_LABELS, *catalog.POD_LABELS}
    for rule in RULES:
        if rule.get("record", "").startswith("pod_device:"):
            for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
                assert {label.strip() for label in labels.split(",")} <= pods

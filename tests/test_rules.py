"""The rules agree with their tests, the runbook and the metrics of the agent."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from files_support import read_yaml
from rules_support import relevant

from exporter.metrics import catalog
from exporter.service import metrics

ROOT = Path(__file__).resolve().parent.parent
RULES_FILE = ROOT / "rules" / "prometheus-rules.yaml"
DCGM_RULES_FILE = ROOT / "rules" / "prometheus-rules-dcgm-exporter.yaml"
INEFFECTIVE_RULES_FILE = ROOT / "rules" / "prometheus-rules-ineffective.yaml"
FILES = (RULES_FILE, DCGM_RULES_FILE, INEFFECTIVE_RULES_FILE)
TEXT = RULES_FILE.read_text(encoding="utf-8")
RULES: list[dict[str, Any]] = [
    rule
    for path in (RULES_FILE, INEFFECTIVE_RULES_FILE)
    for group in read_yaml(path.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
UNIT_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
# Series of Prometheus itself.
PROMETHEUS_OWN = {"up"}
# Series of kube-state-metrics; rules must work without them.
KUBERNETES_OWN = {"kube_node_info", "kube_node_status_capacity"}
# Alerts without a receiver, for inhibition in Alertmanager.
INHIBITING = {"GPUBudgetInhibitor", "GPUWasteInhibitor"}
# Labels from target relabelling, a rule or the cost service.
RULES_OWN_LABELS = {
    "cluster",
    "instance",
    "job",
    "pod",
    "namespace",
    "policy",
    "window",
    "alertname",
    "alertstate",
    "severity",
    "budget",
    "period",
    "fact",
    "quantity",
    "resource",
}
# Series of the cost service: absent without it or without budgets; their alerts are then silent.
COST_SERVICE = {metric.name for metric in metrics.ALL}
NOT_METRICS = {"and", "or", "unless", "by", "on", "bool", "offset", "without", "inf"}


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("needs promtool on the PATH: make install")
    return found


def metrics_of(expression: str) -> set[str]:
    """Return the series names in a PromQL expression: words that are neither labels, functions nor keywords."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^]]*\]", " ", expression)
    bare = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"(?<![A-Za-z0-9_:])[a-z_][a-z0-9_:]*(?![a-z0-9_:(]|\s*\()", bare)) - NOT_METRICS


def listed(expression: str) -> set[str]:
    """Return the series names in a name matcher, as in ``gpu_(a|b)_total``."""
    found = re.findall(r'__name__=~"(\w+)\(([\w|]+)\)(\w+)"', expression)
    return {f"{before}{word}{after}" for before, words, after in found for word in words.split("|")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_prometheus_accepts_the_rules(promtool: str, path: Path) -> None:
    result = subprocess.run([promtool, "check", "rules", str(path)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_unit_tests(promtool: str, tmp_path: Path, path: Path) -> None:
    files = relevant(path, tmp_path, thorough=True)
    result = subprocess.run([promtool, "test", "rules", *map(str, files)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


OWNER = "cluster, node, workload_namespace, workload_kind, workload_name, team"
LEDGER_LABELS = (
    f"__name__, {OWNER.replace('node', 'node, ledger')}, cost_labels, model,\n{' ' * 12}mode, state, currency"
)
# A plausible change: the part of the rules, before, after; then the file of unit tests and the beginning of the case
# that must notice it.
WEAKENED = {
    "long window not low": (
        *("waste", 'judged_active:ratio{window!="24h"} < 0.05', 'judged_active:ratio{window!="24h"} < 2'),
        *("waste_guards", "a pause of twenty minutes"),
    ),
    "short window not low": (
        *("waste", 'gpu_active:ratio{window="15m"} < 0.1', 'gpu_active:ratio{window="15m"} < 2'),
        *("waste_guards", "a burst within the hour"),
    ),
    "half coverage": (
        *("waste", "workload:gpu_coverage:ratio >= 0.9", "workload:gpu_coverage:ratio >= 0.4"),
        *("waste_guards", "half of the hour"),
    ),
    "platform included": ("recording", '=~"kube-system|', '=~"', "waste_guards", "the platform's own"),
    "opt-out for good only": ("waste", "> time()", "> 1e11", "waste_guards", "who asked for quiet"),
    "opt-out never ends": ("waste", "> time()", "> 0", "waste_guards", "who asked for quiet"),
    "every currency an alert": (
        "waste",
        "(1, workload:gpu_idle",
        "(9, workload:gpu_idle",
        "waste_underutilised",
        "of a workload in two",
    ),
    "with a price and without": (
        *("waste", "or ignoring (currency) workload:gpu_underused", "or workload:gpu_underused"),
        *("waste_underutilised", "below 10 an hour"),
    ),
    "tiers overlap": (
        "waste",
        "keep_firing_for: 15m",
        "keep_firing_for: 20m",
        "waste_underutilised",
        "when the price crosses",
    ),
    "tiers leave a hole": (
        "waste",
        "keep_firing_for: 15m",
        "keep_firing_for: 10m",
        "waste_underutilised",
        "when the price crosses",
    ),
    "no delay": ("waste", "        for: 15m\n", "", "waste_underutilised", "a job with eight"),
    "mean of what is free": (
        "waste",
        "min_over_time",
        "avg_over_time",
        "waste_unallocated",
        "what is taken and given back",
    ),
    "pool forgotten in an outage": (
        "waste",
        "[2h] offset 6h",
        "[5m] offset 6h",
        "waste_unallocated",
        "a Prometheus that",
    ),
    "missed scrape ends it": (
        *("recording", "last_over_time(gpu_owner_gpus[5m])", "gpu_owner_gpus"),
        *("waste_guards", "a scrape that fails"),
    ),
    "target labels kept": (
        *("recording", f"max by ({OWNER}) (last_over_time(gpu_owner_gpus[5m]))", "last_over_time(gpu_owner_gpus[2m])"),
        *("waste_guards", "a second scrape"),
    ),
    "target labels kept by the ledger": (
        *("ledger", f"max by (\n{' ' * 12}{LEDGER_LABELS}\n{' ' * 10})", "max without (instance, job, namespace, pod)"),
        *("recording_ledger", "one ledger under two targets"),
    ),
    "least patient policy": (
        "recording",
        '{policy="reserved"}',
        '{policy="none"}',
        "recording",
        "the most patient policy",
    ),
    "money reported twice": (
        "waste",
        'alertname=~"GPUUnderutilised|GPUIdle"',
        'alertname="none"',
        "waste_cost",
        "jobs with",
    ),
    "money of servers": ("waste", '{policy=~"inference|reserved"}', '{policy="none"}', "waste_cost", "jobs with"),
    "no name is as good as one": (
        "evidence",
        "2 * max_over_time",
        "0 * max_over_time",
        "evidence",
        "of a job on two GPUs",
    ),
    "two answers": ("evidence", "(1, max by", "(9, max by", "evidence", "of a job on two GPUs"),
}


@pytest.mark.parametrize("change", WEAKENED)
def test_every_weakened_guard_of_a_waste_alert_fails_a_unit_test(promtool: str, tmp_path: Path, change: str) -> None:
    part, before, after, file, case = WEAKENED[change]
    shutil.copytree(ROOT / "rules" / "src", tmp_path / "rules" / "src")
    weakened = tmp_path / "rules" / "src" / f"{part}.yaml"
    text = weakened.read_text(encoding="utf-8")
    assert before in text
    weakened.write_text(text.replace(before, after), encoding="utf-8")
    tests = read_yaml((ROOT / "tests" / "rules" / f"{file}.yaml").read_text(encoding="utf-8"))
    tests["tests"] = [test for test in tests["tests"] if test["name"].startswith(case)]
    assert len(tests["tests"]) == 1
    copy = tmp_path / "tests" / "rules" / "one.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(yaml.safe_dump(tests), encoding="utf-8")
    files = relevant(copy, tmp_path, thorough=True)
    result = subprocess.run([promtool, "test", "rules", *map(str, files)], check=False, capture_output=True, text=True)
    assert result.returncode != 0
    assert "time: " in result.stdout + result.stderr or "many-to-many" in result.stdout + result.stderr, result.stderr


def test_every_alert_has_severity_summary_dashboard_and_runbook_link() -> None:
    for alert in ALERTS:
        name, severity, annotations = alert["alert"], alert["labels"]["severity"], alert["annotations"]
        assert severity in {"info", "warning", "critical", "none"}, name
        assert (severity == "none") == (name in INHIBITING)
        assert annotations["summary"], name
        assert annotations["dashboard"], name
        assert annotations["runbook_url"] == f"http://localhost:9401/runbook#{name.lower()}"


def test_rules_files_have_limited_length_and_line_width() -> None:
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if len(line) > 140] == []
        assert len(lines) <= 1100, path


LEDGER: list[dict[str, Any]] = [
    rule
    for group in read_yaml(TEXT)["groups"]
    if group["name"] in {"gpu-ledger", "gpu-ledger-hours"}
    for rule in group["rules"]
]


def test_a_rule_of_the_ledger_has_at_most_twelve_lines() -> None:
    entries = re.split(r"^(?=      - )", TEXT, flags=re.MULTILINE)
    for rule in LEDGER:
        (written,) = (entry for entry in entries if entry.startswith(f"      - record: {rule['record']}\n"))
        of_rule = [line for line in written.splitlines() if line.startswith("      ")]
        assert " ".join(" ".join(of_rule[1:]).split()).endswith(rule["expr"].split("\n")[-1][-40:])
        assert len(of_rule) <= 12, rule["record"]


def test_ledger_promql_has_a_limited_length() -> None:
    assert LEDGER
    assert sum(len(rule["expr"]) for rule in LEDGER) <= 6000


def test_the_rules_of_the_ledger_list_its_labels_once() -> None:
    lists = [
        found for rule in LEDGER for found in re.findall(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)", rule["expr"])
    ]
    long = [set(re.findall(r"\w+", found)) for found in lists if found.count(",") > 2]
    names = [name for name in catalog.BY_NAME if name.startswith("gpu_ledger_") and name.endswith("_total")]
    assert long == [{"cluster", "__name__", *(label for name in names for label in catalog.BY_NAME[name].labels)}]


def test_at_most_twelve_rules_adapt_dcgm_exporter_series() -> None:
    adapter = read_yaml((ROOT / "rules" / "src" / "dcgm-exporter.yaml").read_text(encoding="utf-8"))
    rules = [rule for group in adapter["groups"] for rule in group["rules"]]
    assert {rule["record"] for rule in rules} <= {rule.get("record") for rule in dcgm_rules()}
    assert 0 < len(rules) <= 12


def test_rules_file_has_only_a_short_head_comment() -> None:
    head, rules = TEXT.split("groups:\n", 1)
    assert len(head.splitlines()) <= 15
    assert "#" not in rules.replace("/runbook#", "")


def test_alert_text_has_at_most_one_query() -> None:
    texts = [text for alert in ALERTS for text in alert["annotations"].values()]
    assert [text for text in texts if len(re.findall(r"\| query\b", text)) > 1] == []


def test_cost_and_idle_alerts_are_never_critical() -> None:
    for part in ("waste", "cost", "service", "ineffective"):
        groups = read_yaml((ROOT / "rules" / "src" / f"{part}.yaml").read_text(encoding="utf-8"))["groups"]
        alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
        assert alerts
        reported = [alert["labels"]["severity"] for alert in alerts if alert["alert"] not in INHIBITING]
        assert set(reported) <= {"info", "warning"}


def test_runbook_headings_match_the_alerts() -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (GPU\w+)$", runbook, flags=re.MULTILINE)
    assert sorted(headings) == sorted({alert["alert"] for alert in ALERTS})


def test_every_alert_is_tested_to_fire_and_to_stay_silent() -> None:
    cases = [
        case
        for path in UNIT_TESTS
        for test in read_yaml(path.read_text(encoding="utf-8"))["tests"]
        for case in test.get("alert_rule_test", ())
    ]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fired == silent == {alert["alert"] for alert in ALERTS}


def is_made(name: str) -> bool:
    """Return whether the agent, a rule, Prometheus, or the cost service makes a series."""
    known = name in catalog.BY_NAME or name in RECORDED or name in PROMETHEUS_OWN | KUBERNETES_OWN
    return known or name in COST_SERVICE


def test_every_series_in_rules_and_summaries_is_made_by_the_agent_or_a_rule() -> None:
    for rule in RULES:
        read = metrics_of(rule["expr"]) | listed(rule["expr"])
        assert read or rule["expr"] == "vector(time())"
        asked = re.findall(r"\b([a-z_][a-z0-9_:]+)\{(?![{ ])", " ".join(rule.get("annotations", {}).values()))
        assert {name for name in (*read, *asked) if not is_made(name)} == set(), rule


DEVICE_LABELS = {"uuid", "gpu", "gpu_instance"}


def joined_labels(expressions: Iterable[str]) -> set[str]:
    """Return the labels on which expressions join two series, also in the records that they read."""
    waiting, seen, labels = list(expressions), set[str](), set[str]()
    while waiting:
        expression = waiting.pop()
        found = re.findall(r"\b(?:on|group_left|group_right)\s*\(([^)]*)\)", expression)
        labels |= {label.strip() for part in found for label in part.split(",")}
        read = metrics_of(expression) - seen
        seen |= read
        waiting += [rule["expr"] for rule in RULES if rule.get("record") in read]
    return labels


def test_no_alert_joins_on_device_labels() -> None:
    assert {alert["alert"]: joined_labels([alert["expr"]]) & DEVICE_LABELS for alert in ALERTS} == {
        alert["alert"]: set() for alert in ALERTS
    }


def test_device_join_in_a_record_read_by_an_alert_is_detected() -> None:
    assert "uuid" in joined_labels(["workload_device:gpu_use:facts > 1"]) & DEVICE_LABELS


def test_rules_use_only_existing_labels() -> None:
    known = {label for metric in catalog.BY_NAME.values() for label in metric.labels} | RULES_OWN_LABELS | {"__name__"}
    for rule in RULES:
        used = re.findall(r"\b(?:by|on|group_left|ignoring|without)\s*\(([^)]*)\)", rule["expr"])
        used += [",".join(re.findall(r"([a-z_]+)\s*[=!]~?\"", rule["expr"]))]
        assert {label.strip() for labels in used for label in labels.split(",") if label.strip()} <= known, rule


# Labels that Prometheus adds to a series: its name, labels of the target, and renamed labels of the page.
TARGET_LABELS = {
    "__name__",
    "cluster",
    "job",
    "instance",
    "namespace",
    "pod",
    "exported_pod",
    "controller_revision_hash",
}
LABEL = re.compile(r"([a-z_]+)=\"")


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_unit_test_series_have_only_exported_labels(path: Path) -> None:
    made = {**catalog.BY_NAME, **{metric.name: metric for metric in metrics.ALL}}
    for test in read_yaml(path.read_text(encoding="utf-8"))["tests"]:
        for series in test["input_series"]:
            name, _, labels = series["series"].partition("{")
            if name in made:
                others = set(LABEL.findall(labels)) - set(made[name].labels) - TARGET_LABELS
                assert others == set(), f"{test['name']}: {series['series']}"


def test_metrics_document_lists_the_recorded_rules() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    parts = [
        read_yaml((ROOT / "rules" / "src" / f"{part}.yaml").read_text("utf-8"))
        for part in ("recording", "ledger", "evidence", "waste")
    ]
    rules = [rule for part in parts for group in part["groups"] for rule in group["rules"]]
    for name in sorted(rule["record"] for rule in rules if "record" in rule):
        level, metric, operation = name.split(":")
        assert f"`{level}:{metric}:" in page, name
        assert f":{operation}`" in page, name


def dcgm_rules() -> list[dict[str, Any]]:
    groups = read_yaml(DCGM_RULES_FILE.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_waste_alerts_are_the_same_for_dcgm_exporter() -> None:
    theirs = [rule for rule in dcgm_rules() if "alert" in rule]
    assert {rule["alert"] for rule in theirs} == {"GPUUnderutilised", "GPUIdle"}
    ours = [rule for rule in ALERTS if rule["alert"] in {"GPUUnderutilised", "GPUIdle"}]
    for mine, other in zip(ours, theirs, strict=True):
        assert {**mine, "annotations": {**mine["annotations"], "description": ""}} == {
            **other,
            "annotations": {**other["annotations"], "description": ""},
        }
        assert "alerts-until" not in other["annotations"]["description"]


def test_dcgm_exporter_rules_read_only_its_own_and_kube_state_metrics_series() -> None:
    rules = dcgm_rules()
    recorded = {rule["record"] for rule in rules if "record" in rule}
    # Users record the price; dcgm-exporter does not report how long a workload has been idle.
    absent = {"node_gpu:gpu_hourly_price:max", "workload:gpu_idle_for_seconds:min"}
    for rule in rules:
        foreign = {name for name in metrics_of(rule["expr"]) if name not in recorded | absent}
        assert {name for name in foreign if not re.fullmatch(r"kube_[a-z_]+", name)} == set(), rule

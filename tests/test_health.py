"""Every health fault from the driver to its alert: simulated driver, agent's tick, page, Prometheus' rule engine."""

import asyncio
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from files_support import read_yaml
from page_support import samples_of
from pipeline_support import EPOCH_SECONDS, Pipeline, pipeline

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.collectors_file import parse
from exporter.model.devices import xid_tier
from exporter.model.snapshot import Snapshot
from gpu_simulator import scenario

ROOT = Path(__file__).resolve().parent.parent
RULES_FILE = ROOT / "rules" / "prometheus-rules.yaml"
STEP_SECONDS = 30
STEPS = range(22 * 60 // STEP_SECONDS + 1)
LATE = "21m30s"
# (alert, severity, index of the board; empty for an alert on a workload or a node)
EXPECTED = {
    ("GPUXidApplication", "info", ""),
    ("GPUXidCritical", "critical", "15"),
    ("GPUXidWarning", "warning", "1"),
    ("GPUEccUncorrectable", "critical", "1"),
    ("GPURowRemapFailure", "critical", "2"),
    ("GPURowRemapPending", "warning", "3"),
    ("GPURowRemapPending", "warning", "4"),
    ("GPUNvlinkErrors", "warning", "5"),
    ("GPUNvlinkErrors", "warning", "6"),
    ("GPUPcieReplays", "warning", "7"),
    ("GPUMemoryTemperature", "warning", "8"),
    ("GPUMemoryTemperature", "warning", "9"),
    ("GPUThermalThrottling", "warning", "10"),
    ("GPUPowerBrake", "warning", "11"),
    ("GPUThermalThrottling", "warning", "12"),
    ("GPURecoveryActionNeeded", "warning", "13"),
    ("GPURecoveryActionNeeded", "critical", "14"),
    ("GPUMissing", "critical", ""),
}


def groups() -> list[dict[str, Any]]:
    text = read_yaml(RULES_FILE.read_text(encoding="utf-8"))
    return [group for group in text["groups"] if group["name"] in {"gpu-health", "gpu-health-slow"}]


async def with_its_xids(node: Pipeline, seconds: float) -> Snapshot:
    """Return the snapshot of an instant, once the event thread has received the Xids of this instant."""
    snapshot = await node.step(seconds)
    due = sum(len(gpu.xids) for gpu in node.truth.gpus)
    for _ in range(500):
        if sum(sum(view.xids.values()) for view in snapshot.devices) >= due:
            return snapshot
        await asyncio.sleep(0.01)
        snapshot = await node.step(seconds)
    raise AssertionError(f"only {[dict(view.xids) for view in snapshot.devices]} arrived of {due} Xids")


def add(series: dict[str, dict[int, float]], snapshot: Snapshot, step: int) -> None:
    for family in families(snapshot, ExpositionOptions()):
        if not family.name.startswith("gpu_"):
            continue
        shift = EPOCH_SECONDS if family.name.endswith("_timestamp_seconds") else 0.0
        for sample in samples_of(family):
            series[f"{family.name}{{{sample.labels}}}"][step] = sample.value - shift


def written(values: dict[int, float]) -> str:
    return " ".join(repr(values[step]) if step in values else "_" for step in STEPS)


async def pages(directory: Path) -> dict[str, dict[int, float]]:
    """Return every series of the node with the faults, by step."""
    series: dict[str, dict[int, float]] = defaultdict(dict)
    loaded = scenario.load(str(ROOT / "tests" / "fixtures" / "health.yaml"))
    # A collectors file without these metrics: the alerts do not depend on it.
    little = parse("DCGM_FI_DEV_SM_CLOCK, gauge, Clock.", "a file")
    async with pipeline(loaded, directory, collectors=little, with_api=True) as node:
        for step in STEPS:
            add(series, await with_its_xids(node, step * STEP_SECONDS), step)
    return series


def unit_test(rules: Path, series: dict[str, dict[int, float]]) -> str:
    """Return the input of ``promtool test rules``: the pages, and the alerts before and after the faults."""
    firing = 'count by (alertname, severity, gpu) (ALERTS{alertstate="firing"})'
    samples = [
        {"labels": f'{{alertname="{name}",severity="{severity}",gpu="{gpu}"}}'.replace(',gpu=""', ""), "value": 1}
        for name, severity, gpu in EXPECTED
    ]
    test = {
        "interval": f"{STEP_SECONDS}s",
        "input_series": [{"series": name, "values": written(values)} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": firing, "eval_time": "4m", "exp_samples": []},
            {"expr": firing, "eval_time": LATE, "exp_samples": samples},
        ],
    }
    return yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": f"{STEP_SECONDS}s", "tests": [test]})


def test_every_fault_raises_exactly_its_alert(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    series = asyncio.run(pages(tmp_path))
    rules, test = tmp_path / "rules.yaml", tmp_path / "test.yaml"
    rules.write_text(yaml.safe_dump({"groups": groups()}), encoding="utf-8")
    test.write_text(unit_test(rules, series), encoding="utf-8")
    result = subprocess.run([promtool, "test", "rules", str(test)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def tiers_of_the_runbook() -> dict[str, set[int]]:
    tiers: dict[str, set[int]] = defaultdict(set)
    text = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    for tier, codes in re.findall(r"^\| (critical|application|none|warning) \| ([\d, ]+)", text, flags=re.MULTILINE):
        tiers[tier] |= {int(code) for code in codes.split(",")}
    return tiers


def tiers_of_the_agent() -> dict[str, set[int]]:
    tiers: dict[str, set[int]] = defaultdict(set)
    for code in range(1, 1000):
        tiers[xid_tier(code)].add(code)
    return tiers


def test_xid_tiers_match_the_runbook() -> None:
    reported, done = tiers_of_the_runbook(), tiers_of_the_agent()
    assert {tier: done[tier] for tier in ("critical", "application", "none")} == {
        tier: reported[tier] for tier in ("critical", "application", "none")
    }
    assert reported["warning"] <= done["warning"]


def test_application_xids_are_not_critical() -> None:
    # Codes that NVIDIA's device plugin takes for an application's error, except 109, on which its catalogue disagrees.
    assert not tiers_of_the_agent()["critical"] & {13, 31, 43, 45, 68}

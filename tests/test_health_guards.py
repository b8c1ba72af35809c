"""No guard of the health alerts can be lost without one of their unit tests noticing."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "rules" / "src" / "health.yaml"
OWNERS = ROOT / "rules" / "src" / "evidence.yaml"
"""Records whose workload a pod is."""
UNIT_TESTS = ROOT / "tests" / "rules" / "health.yaml"
THERMAL = '            unless on (cluster, node, gpu, uuid) gpu_throttle_seconds_total{reason="thermal"}\n'
NO_LIMIT = ' gpu_temperature_limit_celsius{limit="memory_max_operating"}\n          ) <= 0'
TOLD = "on (cluster, node, gpu) gpu_recovery_action"
# A change that someone could make in good faith: before, after, and the beginning of the case that must notice it.
WEAKENED = {
    "old events": (") > time() - 600", ") > 0", "a GPU fell off the bus"),
    "154 in any case": (TOLD, "on (cluster, node, gpu) gpu_row_remap_failure", "codes that are not known"),
    "154 like any other": ('|158|154"', '|158"', "codes that are not known"),
    "everybody on the board": (
        '(or\n            $labels.gpu_instance ".*")',
        '\n            ".*"',
        "the event of one MIG instance",
    ),
    "owners while their pods live": (
        "pod_namespace, pod_name) last_over_time(gpu_pod_info[10m])",
        "pod_namespace, pod_name) gpu_pod_info",
        "an illegal address",
    ),
    "pods whose owner has come to be known": (
        '2 * max_over_time(gpu_pod_info{workload_name!=""}[1h])',
        '0.5 * max_over_time(gpu_pod_info{workload_name!=""}[1h])',
        "a pod whose workload is not known",
    ),
    "errors of long ago": (
        ' - min_over_time(gpu_ecc_errors_total{type="uncorrected"}[15m])',
        "",
        "a board that is well",
    ),
    "corrected errors": ('{type="uncorrected"}', "", "a board that is well"),
    "flags believed before clocks": (THERMAL, "", "a board that is well"),
    "a few errors of links": (") > 100", ") > 10", "a board that is well"),
    "a few replays": (") > 50", ") > 10", "a board that is well"),
    "asks for a reset, hence missing": (
        "              0 * max by (cluster, node, uuid) (gpu_recovery_action > 0) + 1\n              or max",
        "              max",
        "a GPU that asks for a reset",
    ),
    "driver away": (
        ' and on (cluster, instance) gpu_exporter_source_up{source=~"nvml|dcgm"} == 1',
        "",
        "one GPU of two is lost",
    ),
    "forgotten by a new agent": (' or max_over_time(gpu_devices{state="present"}[6h])', "", "the only GPU is lost"),
    "warm memory": (") <= 0", ") <= 3", "memory at its limit"),
    "a limit that is told": (NO_LIMIT, NO_LIMIT.replace("memory_max_operating", "none"), "memory at its limit"),
    "a drain pages": (
        "(gpu_recovery_action > 0 != 4)",
        "(gpu_recovery_action > 0)",
        "a GPU that asks for a reset",
    ),
    "no keep firing": ("        keep_firing_for: 30m\n", "", "a GPU fell off the bus"),
    "no delay": ("        for: 5m\n", "", "rows and pages that wait"),
}


@pytest.mark.parametrize("change", WEAKENED)
def test_a_guard_of_a_health_alert_cannot_be_lost_unnoticed(tmp_path: Path, change: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    before, after, case = WEAKENED[change]
    sources = {path.name: path.read_text(encoding="utf-8") for path in (RULES, OWNERS)}
    assert any(before in text for text in sources.values())
    (tmp_path / "rules" / "src").mkdir(parents=True)
    (tmp_path / "tests" / "rules").mkdir(parents=True)
    for name, text in sources.items():
        (tmp_path / "rules" / "src" / name).write_text(text.replace(before, after), encoding="utf-8")
    document = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))
    document["tests"] = [test for test in document["tests"] if test["name"].startswith(case)]
    assert len(document["tests"]) == 1
    copy = tmp_path / "tests" / "rules" / UNIT_TESTS.name
    copy.write_text(yaml.safe_dump(document), encoding="utf-8")
    checked = subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "rules" / "src" / RULES.name)], check=False, capture_output=True
    )
    assert checked.returncode == 0
    result = subprocess.run([promtool, "test", "rules", str(copy)], check=False, capture_output=True, text=True)
    assert result.returncode != 0
    assert "time: " in result.stdout + result.stderr, result.stderr

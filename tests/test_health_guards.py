"""Every guard of the health alerts has a unit test that notices its loss."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from files_support import read_yaml

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "rules" / "src" / "health.yaml"
UNIT_TESTS = ROOT / "tests" / "rules" / "health.yaml"
# A plausible change: before, after, and the beginning of the case that must notice it.
WEAKENED = {
    "old events": (") < 600", ") < 60000", "a GPU fell off the bus"),
    "a tier without a receiver": ('{tier="warning"}', '{tier!="critical"}', "codes that nobody needs"),
    "critical alone": ('{tier="warning"}', '{tier="critical"}', "codes that are not known"),
    "everybody on the board": (
        '(or\n            $labels.gpu_instance ".*")',
        '\n            ".*"',
        "the event of one MIG instance",
    ),
    "a second scrape is a second GPU": (
        "cluster, node, uuid, workload_namespace",
        "cluster, node, uuid, instance, workload_namespace",
        "an illegal address",
    ),
    "errors of long ago": (
        ' - min_over_time(gpu_ecc_errors_total{type="uncorrected"}[15m])',
        "",
        "a board that is well",
    ),
    "corrected errors": ('{type="uncorrected"}', "", "a board that is well"),
    "heat now and then": (
        "(gpu_thermal_throttle_ratio > 0.1)",
        "(gpu_thermal_throttle_ratio > 0.05)",
        "a board that is well",
    ),
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
    "warm memory": ('{limit="assumed"}[5m]) <= 0', '{limit="assumed"}[5m]) <= 3', "memory at its limit"),
    "a limit of the driver": ('{limit="driver"}[5m]) <= 3', '{limit="driver"}[5m]) <= 10', "memory at its limit"),
    "a drain pages": (
        "(gpu_recovery_action > 0 != 4)",
        "(gpu_recovery_action > 0)",
        "a GPU that asks for a reset",
    ),
    "no keep firing": ("        keep_firing_for: 30m\n", "", "a GPU fell off the bus"),
    "no delay": ("        for: 5m\n", "", "rows and pages that wait"),
}


@pytest.mark.parametrize("change", WEAKENED)
def test_removed_health_alert_guard_fails_a_unit_test(tmp_path: Path, change: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    before, after, case = WEAKENED[change]
    text = RULES.read_text(encoding="utf-8")
    assert before in text
    (tmp_path / "rules" / "src").mkdir(parents=True)
    (tmp_path / "tests" / "rules").mkdir(parents=True)
    (tmp_path / "rules" / "src" / RULES.name).write_text(text.replace(before, after), encoding="utf-8")
    document = read_yaml(UNIT_TESTS.read_text(encoding="utf-8"))
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

"""The rules hold on the oldest Prometheus and vmalert that they are for, and on newer ones."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
RULES_FILES = sorted((ROOT / "rules").glob("*.yaml"))
UNIT_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
UNAVAILABLE = ROOT / ".tools" / "unavailable"
PROMTOOLS = ("promtool-2.53", "promtool-3")
"""Beside the one on the PATH, which tests/test_rules.py asks."""
VMALERTS = ("vmalert-1.112", "vmalert-new")
VMALERT_UNIT_TESTS = "vmalert-tool-new"
"""That of 1.112 listens on a fixed port, so that two of them cannot run at once."""


def program(name: str) -> str:
    """Path of a tool; one that cannot be downloaded here is no fault of the rules, and STRICT=1 lets that pass."""
    found = shutil.which(name)
    if found is not None:
        return found
    tried = UNAVAILABLE.read_text(encoding="utf-8").splitlines() if UNAVAILABLE.is_file() else []
    for line in tried:
        if line.startswith(f"{name}: "):
            pytest.xfail(f"not to be had here: {line}")
    pytest.skip(f"needs {name} on the PATH: make install")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)


def test_one_of_the_tools_is_the_oldest_prometheus_that_the_rules_are_for() -> None:
    versions = [
        run(found, "--version").stdout for name in ("promtool", "promtool-2.42") if (found := shutil.which(name))
    ]
    if not any("version 2.42." in version for version in versions):
        program("promtool-2.42")


@pytest.mark.parametrize("path", RULES_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", PROMTOOLS)
def test_newer_versions_of_prometheus_accept_the_rules(name: str, path: Path) -> None:
    result = run(program(name), "check", "rules", "--lint=all", "--lint-fatal", path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_unit_tests_on_the_newest_prometheus(path: Path) -> None:
    result = run(program(PROMTOOLS[-1]), "test", "rules", path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", RULES_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", VMALERTS)
def test_vmalert_loads_the_rules(name: str, path: Path) -> None:
    result = run(program(name), "-dryRun", f"-rule={path}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", VMALERTS)
@pytest.mark.parametrize("change", [("expr: ", "expr: 1 >> "), ("humanizeDuration", "humaniseDuration")])
def test_vmalert_looks_at_expressions_and_templates(tmp_path: Path, name: str, change: tuple[str, str]) -> None:
    before, after = change
    text = RULES_FILES[0].read_text(encoding="utf-8")
    assert before in text
    broken = tmp_path / "rules.yaml"
    broken.write_text(re.sub(rf"{before}(?!\|)", after, text), encoding="utf-8")
    assert run(program(name), "-dryRun", f"-rule={broken}").returncode != 0


def for_vmalert(path: Path, folder: Path) -> Path:
    """The alerts of a unit test as vmalert-tool takes them; without queries: its series of alerts have a label more."""
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    document["rule_files"] = [str((path.parent / name).resolve()) for name in document["rule_files"]]
    for test in document["tests"]:
        test.pop("promql_expr_test", None)
    document["tests"] = [test for test in document["tests"] if "alert_rule_test" in test]
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    return copy


def hours(path: Path) -> float:
    """How long the longest test of a file lasts, in virtual hours."""
    times = re.findall(r"eval_time: *(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m\b)?", path.read_text(encoding="utf-8"))
    return max(int(d or 0) * 24 + int(h or 0) + int(m or 0) / 60 for d, h, m in times)


# vmalert-tool takes minutes for a day: it evaluates every group at its own interval.
@pytest.mark.parametrize("path", [path for path in UNIT_TESTS if hours(path) <= 12], ids=lambda path: path.stem)
def test_the_alerts_fire_alike_on_the_engine_of_victoriametrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    tool = program(VMALERT_UNIT_TESTS)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # its storage has a fixed name there
    result = run(tool, "unittest", "-disableAlertgroupLabel", f"--files={for_vmalert(path, tmp_path)}")
    assert result.returncode == 0, result.stdout + result.stderr

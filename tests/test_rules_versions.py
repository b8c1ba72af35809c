"""The rules work on the oldest supported Prometheus and vmalert, and on newer versions."""

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

ROOT = Path(__file__).resolve().parent.parent
RULES_FILES = sorted((ROOT / "rules").glob("*.yaml"))
UNIT_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yaml"))
UNAVAILABLE = ROOT / ".tools" / "unavailable"
PROMTOOLS = ("promtool-2.53", "promtool-3")
"""Versions in addition to the one on the PATH, which tests/test_rules.py uses."""
VMALERTS = ("vmalert-1.112", "vmalert-new")
VMALERT_UNIT_TESTS = "vmalert-tool-new"
"""The tool of 1.112 listens on a fixed port, so that two of them cannot run at once."""


def program(name: str) -> str:
    """Return the path of a tool; one that cannot be downloaded here is no fault of the rules, also with STRICT=1."""
    found = shutil.which(name)
    if found is not None:
        return found
    tried = UNAVAILABLE.read_text(encoding="utf-8").splitlines() if UNAVAILABLE.is_file() else []
    for line in tried:
        if line.startswith(f"{name}: "):
            pytest.xfail(f"not available here: {line}")
    pytest.skip(f"needs {name} on the PATH: make install")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], check=False, capture_output=True, text=True)


def test_oldest_supported_promtool_is_available() -> None:
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
def test_the_rules_pass_their_unit_tests_on_the_newest_prometheus(tmp_path: Path, path: Path) -> None:
    result = run(program(PROMTOOLS[-1]), "test", "rules", *relevant(path, tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", RULES_FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", VMALERTS)
def test_vmalert_loads_the_rules(name: str, path: Path) -> None:
    result = run(program(name), "-dryRun", f"-rule={path}")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", VMALERTS)
@pytest.mark.parametrize("change", [("expr: ", "expr: 1 >> "), ("humanizeDuration", "humaniseDuration")])
def test_vmalert_checks_expressions_and_templates(tmp_path: Path, name: str, change: tuple[str, str]) -> None:
    before, after = change
    text = RULES_FILES[0].read_text(encoding="utf-8")
    assert before in text
    broken = tmp_path / "rules.yaml"
    broken.write_text(re.sub(rf"{before}(?!\|)", after, text), encoding="utf-8")
    assert run(program(name), "-dryRun", f"-rule={broken}").returncode != 0


LATER = {
    ("dcgm_exporter", "75m"): "78m",
    ("exporter", "11m"): "15m",
    ("waste_guards", "70m"): "73m",
    ("waste_guards", "93m"): "96m",
    ("waste_guards", "140m"): "143m",
    ("waste_guards", "150m"): "153m",
    ("waste_guards", "156m"): "159m",
}
"""Times of vmalert. It sees the record of a rule one turn later, so a chain of rules takes as many turns.
A recorded series that ends can stay for 5 minutes.
"""
MINUTES = frozenset({"exporter_nodes"})
"""Unit tests that need the interval of the real rules: a record that reads itself must be as recent as its turns."""
LONG = frozenset({"cost", "waste_inference"})
"""Unit tests of days: vmalert-tool takes minutes for these, because it evaluates every group at its own interval."""


def in_metricsql(expression: str) -> str:
    """Translate a query so that its result has the labels of Prometheus' result.

    In MetricsQL, series of alerts have the label ``alertgroup``, and ``round`` keeps the name of the series.
    """
    plain = re.sub(r"\bALERTS\b(\{[^}]*\})?(?![{\[])", r'label_del(ALERTS\1, "alertgroup")', expression)
    return re.sub(r"^round\(", "0 + round(", plain)


def for_vmalert(path: Path, folder: Path) -> tuple[Path, ...]:
    """Write the unit tests in the form of vmalert-tool, queries included."""
    files = relevant(path, folder)
    for file in files:
        document: dict[str, Any] = read_yaml(file.read_text(encoding="utf-8"))
        for test in document["tests"]:
            queries = test["metricsql_expr_test"] = test.pop("promql_expr_test", [])
            alerts = test.get("alert_rule_test", [])
            assert queries or alerts, f"{path.stem}: {test.get('name')} tests nothing"
            for query in queries:
                query["expr"] = in_metricsql(query["expr"])
            for one in (*queries, *alerts):
                one["eval_time"] = LATER.get((path.stem, one["eval_time"]), one["eval_time"])
        assert document["tests"]
        if path.stem in MINUTES:
            document["evaluation_interval"] = "1m"
        file.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    return files


def unit_tests(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files: Iterable[Path]
) -> subprocess.CompletedProcess[str]:
    tool = program(VMALERT_UNIT_TESTS)
    monkeypatch.setenv("TMPDIR", str(folder))  # its storage has a fixed name in this folder
    # It sends itself thousands of HTTP requests: switches of cores and garbage collection took a quarter.
    monkeypatch.setenv("GOMAXPROCS", "1")
    monkeypatch.setenv("GOGC", "1000")
    return run(tool, "unittest", "-disableAlertgroupLabel", *(f"--files={file}" for file in files))


@pytest.mark.parametrize("path", [path for path in UNIT_TESTS if path.stem not in LONG], ids=lambda path: path.stem)
def test_the_unit_tests_pass_on_the_engine_of_victoriametrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    result = unit_tests(tmp_path, monkeypatch, for_vmalert(path, tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr


def test_victoriametrics_unit_tests_check_query_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = for_vmalert(ROOT / "tests" / "rules" / "recording.yaml", tmp_path)[0]
    document = read_yaml(copy.read_text(encoding="utf-8"))
    query = next(query for test in document["tests"] for query in test["metricsql_expr_test"] if query["exp_samples"])
    query["exp_samples"][0]["value"] += 1
    copy.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8")
    result = unit_tests(tmp_path, monkeypatch, [copy])
    assert result.returncode != 0
    assert query["expr"] in result.stdout + result.stderr

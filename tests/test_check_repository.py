"""scripts/check_repository.py: the language of the texts."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import check_repository  # noqa: E402 - lies in a folder of scripts

PAGE = """# Title

The agent counts anew.

    gpu-cost-exporter fix    # code is not checked

It prints "the rest goes on" and `mends`.
```
who holds
```
A GPU that nobody holds is told on the page.
"""


def test_language_reports_line_expression_and_replacement() -> None:
    assert list(check_repository.stilted(PAGE)) == [
        (3, "anew", "again"),
        (11, "nobody holds", "unheld, or no holder"),
        (11, "is told", "is reported, is shown or is logged"),
    ]


def test_language_finding_names_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "new.md").write_text("Mend it.\n", encoding="utf-8")
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    assert list(check_repository.language(Path("docs/new.md"))) == ['docs/new.md:1: "Mend": write fix']


MODULE = '''"""Counts anew."""

REPLACEMENTS = (("mend", "fix"),)
beside = None  # it goes on, unless ``anew`` is None


def told(mend: str) -> str:
    """A long text.

    There is none beside-me; an owner is none.
    """
    return f"{mend} was told"
'''


def test_language_of_a_module_is_that_of_comments_docstrings_and_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    assert list(check_repository.language(Path("new.py"))) == [
        'new.py:1: "anew": write again',
        'new.py:4: "goes on": write continue',
        "new.py:10: \"is none\": write unknown X, not 'X is none'",
        'new.py:12: "was told": write is reported, is shown or is logged',
    ]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "new.py").write_text(
        f"{MODULE.replace('A long text', 'Who is long')}\nassert 'mend', 'nobody knows'\n", encoding="utf-8"
    )
    assert list(check_repository.language(Path("tests/new.py"))) == [
        'tests/new.py:1: "anew": write again',
        'tests/new.py:4: "goes on": write continue',
        'tests/new.py:8: "Who": write holder, owner, client or kubelet',
        "tests/new.py:10: \"is none\": write unknown X, not 'X is none'",
        'tests/new.py:14: "nobody": write no holder, no owner, or a user',
    ]


def test_language_of_manifests_scripts_and_build_files_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Makefile").write_text("help: ## Mend it\n", encoding="utf-8")
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    assert list(check_repository.language(Path("Makefile"))) == ['Makefile:1: "Mend": write fix']
    checked = ["Makefile", "deploy/a/b.tpl", "rules/src/a.yaml", "scripts/a.sh"]
    left = ["requirements/dev.txt", "rules/a.yaml", "deploy/a.json", "tests/a.yaml"]
    assert [path for path in [*checked, *left] if check_repository.is_text(Path(path))] == checked


def test_classes_of_one_name_in_two_modules_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path("exporter/a.py"), Path("simulator/b.py")]
    for path in paths:
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text("class Window:\n    pass\n\n\nclass _Own:\n    pass\n", encoding="utf-8")
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    assert list(check_repository.namesakes(paths)) == [
        "exporter/a.py, simulator/b.py: class Window is defined 2 times; rename all but one"
    ]


def test_word_count_excludes_tables_code_and_generated_parts() -> None:
    page = "| a | b-c |\n|---|---|\n\n<!-- generated: x -->\nmany words\n<!-- end -->\n\nTwo words, `code`.\n"
    assert check_repository.words_of(page) == 5


def test_documentation_over_its_word_limit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    pages = [Path("docs/page.md"), Path("docs/runbook.md")]
    for page in pages:
        (tmp_path / page).write_text("Four words and more.\n", encoding="utf-8")
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    monkeypatch.setattr(check_repository, "DOCS_WORDS", 4)
    assert list(check_repository.wordy(pages)) == []
    monkeypatch.setattr(check_repository, "DOCS_WORDS", 3)
    (finding,) = check_repository.wordy(pages)
    assert finding.startswith("docs/: 4 words; expected: at most 3")


def test_alert_without_a_runbook_heading_or_rule_tests_is_reported(
    tmp_path: Path,
) -> None:
    for directory in ("rules", "docs", "tests/rules"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "rules" / "prometheus-rules.yaml").write_text(
        "groups: [{name: g, rules: [{record: r, expr: 1}, {alert: GPUFine, expr: 1}, {alert: GPUOther, expr: 1}]}]"
    )
    (tmp_path / "docs" / "runbook.md").write_text("# Runbook\n\n### GPUFine\n")
    (tmp_path / "tests" / "rules" / "one.yaml").write_text(
        "tests: [{alert_rule_test: [{alertname: GPUFine, exp_alerts: [{}]}, {alertname: GPUFine, exp_alerts: []},"
        " {alertname: GPUOther, exp_alerts: []}]}]"
    )
    assert list(check_repository.unproven(tmp_path)) == [
        "rules/prometheus-rules.yaml: GPUOther: docs/runbook.md has no heading with its name; add one",
        "rules/prometheus-rules.yaml: GPUOther: no test of tests/rules/ in which it fires; add one",
    ]


def test_test_name_is_short_and_in_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = f"test_{'x' * 80}"
    text = (
        f"def test_a_store_is_told() -> None: ...\ndef {long}() -> None: ...\ndef test_store_is_kept() -> None: ...\n"
    )
    (tmp_path / "test_new.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(check_repository, "ROOT", tmp_path)
    assert [line.rpartition(": ")[2] for line in check_repository.unreadable(Path("test_new.py"))] == [
        "'told'; write test_<subject>_<behaviour> in plain words",
        "85 characters; at most 80",
    ]

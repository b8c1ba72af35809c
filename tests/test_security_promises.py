"""The table of promises in docs/security.md against the tests that prove them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
_ROW = re.compile(r"\| (?P<number>\d+) \| (?P<promise>[^|]+) \| (?P<tests>[^|]*) \|")
_TEST = re.compile(r"`(?P<file>test_[a-z0-9_]+\.py)::(?P<test>test_[a-z0-9_]+)`")


def rows() -> list[re.Match[str]]:
    return [match for line in PAGE.splitlines() if (match := _ROW.fullmatch(line))]


@cache
def names_in(name: str) -> frozenset[str]:
    """Return the tests of a file; empty without such a file."""
    path = TESTS / name
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in found if node.name.startswith("test_"))


def test_promises_are_numbered_without_a_gap() -> None:
    assert len(rows()) > 40
    assert [int(row["number"]) for row in rows()] == list(range(1, len(rows()) + 1))
    table = PAGE.partition("| no. | promise | held by |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len([line for line in table if not line.startswith("| | **")]) == len(rows()), "every row can be parsed"


@pytest.mark.parametrize("row", rows(), ids=[row["number"] for row in rows()])
def test_every_promise_has_existing_tests(row: re.Match[str]) -> None:
    named = [(match["file"], match["test"]) for match in _TEST.finditer(row["tests"])]
    assert named, f"no test for: {row['promise']}"
    assert _TEST.sub("", row["tests"]).replace("<br>", "").strip() == "", "the cell has other text"
    assert [one for one in named if one[1] not in names_in(one[0])] == [], row["promise"]


def test_every_security_test_is_listed_for_a_promise() -> None:
    named = {(match["file"], match["test"]) for match in _TEST.finditer(PAGE)}
    files = [path.name for path in TESTS.glob("test_security_*.py") if path.name != Path(__file__).name]
    assert len(files) >= 5
    assert {(name, test) for name in files for test in names_in(name)} - named == set()


def test_security_policy_names_no_person_and_links_the_page() -> None:
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "private vulnerability reporting" in policy
    assert "docs/security.md" in policy
    assert "@" not in policy

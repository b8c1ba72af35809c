"""Under STRICT=1 nothing passes by not being run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
import pytest

@pytest.mark.gpu
def test_of_a_real_gpu():
    pytest.skip("no GPU here")

@pytest.mark.xfail(reason="known", strict=True)
def test_that_is_known_to_fail():
    raise AssertionError

def test_without_its_tool():
    pytest.skip("no tool here")
"""


@pytest.mark.parametrize(("strict", "failed"), [("1", 1), ("", 0), ("0", 0)])
def test_strict_fails_what_is_skipped_but_for_real_gpus(tmp_path: Path, strict: str, failed: int) -> None:
    (tmp_path / "test_some.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "test_module.py").write_text("def test_of_another_module():\n    pass\n", encoding="utf-8")
    result = run(tmp_path, strict)
    assert result.returncode == failed, result.stdout
    assert ("skipped under STRICT=1: Skipped: no tool here" in result.stdout) is bool(failed)


def test_strict_fails_a_module_that_skips_itself(tmp_path: Path) -> None:
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n", encoding="utf-8")
    assert run(tmp_path, "1").returncode != 0
    assert run(tmp_path, "").returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_the_last_lines_of_a_run_name_what_failed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "def test_some():\n    assert list(range(999)) == [], 'many'\n", encoding="utf-8"
    )
    last = run(tmp_path, "").stdout.splitlines()[-1]
    assert last == "failed: test_some.py::test_some: AssertionError: many"


def run(directory: Path, strict: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "tests.strict_plugin", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(directory), "-p", "no:cacheprovider", str(directory)]
    environ = {**os.environ, "STRICT": strict}
    return subprocess.run(command, cwd=ROOT, env=environ, check=False, capture_output=True, text=True)

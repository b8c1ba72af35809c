"""With STRICT=1 a test must run to pass."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent
SUITE = """
import pytest

@pytest.mark.gpu
def test_real_gpu_is_skipped():
    pytest.skip("no GPU here")

@pytest.mark.xfail(reason="known", strict=True)
def test_known_failure_fails():
    raise AssertionError

def test_missing_tool_is_skipped():
    pytest.skip("no tool here")
"""


Tested = Callable[[str], pytest.RunResult]


@pytest.fixture
def tested(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Tested:
    """Run the tests of the folder with this value of ``STRICT``."""
    options = ["-p", "tests.strict_plugin", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]

    def run(strict: str) -> pytest.RunResult:
        monkeypatch.setenv("STRICT", strict)
        return pytester.runpytest_inprocess(*options, "--rootdir", str(pytester.path), str(pytester.path))

    return run


@pytest.mark.parametrize(("strict", "failed"), [("1", 1), ("", 0), ("0", 0)])
def test_strict_mode_fails_skipped_tests_except_real_gpu_ones(
    pytester: pytest.Pytester, tested: Tested, strict: str, failed: int
) -> None:
    pytester.makepyfile(test_some=SUITE, test_module="def test_other_module_passes():\n    pass\n")
    result = tested(strict)
    assert result.ret == failed
    assert ("skipped under STRICT=1: Skipped: no tool here" in result.stdout.str()) is bool(failed)


def test_strict_fails_a_module_that_skips_itself(pytester: pytest.Pytester, tested: Tested) -> None:
    pytester.makepyfile(test_module="import pytest\npytest.importorskip('no_such_module')\n")
    assert tested("1").ret != 0
    assert tested("").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_last_lines_of_a_run_list_the_failed_tests(pytester: pytest.Pytester, tested: Tested) -> None:
    pytester.makepyfile(test_some="def test_some():\n    assert list(range(999)) == [], 'many'\n")
    last = [line for line in tested("").outlines if line][-1]
    assert last == "failed: test_some.py::test_some: AssertionError: many"

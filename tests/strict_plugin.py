"""With STRICT=1 a skipped test fails, unless it is marked ``gpu``: a test that does not run proves nothing.

The last lines of a run name each failed test with the first line of its error, so that the end of a long log is enough.
"""

import os
from collections.abc import Generator

import pytest


def _strict() -> bool:
    return os.environ.get("STRICT", "") not in {"", "0"}


def _reason(longrepr: object) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("gpu") is not None
    if _strict() and report.skipped and not expected:
        report.outcome = "failed"
        report.longrepr = f"skipped under STRICT=1: {_reason(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _strict() and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"module skipped under STRICT=1: {_reason(report.longrepr)}"
    return report


def pytest_unconfigure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None:
        return
    for report in [*terminal.stats.get("failed", ()), *terminal.stats.get("error", ())]:
        crash = getattr(report.longrepr, "reprcrash", None)
        error = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines() or [""]
        terminal.write_line(f"failed: {report.nodeid}: {error[0][:300]}")

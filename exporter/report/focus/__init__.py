"""Money in the FinOps Foundation's format for cost and usage, FOCUS: the export, and a checker for such files."""

from exporter.report.focus.check import check_focus
from exporter.report.focus.columns import DEFAULT_VERSION, VERSIONS
from exporter.report.focus.findings import Check, Finding
from exporter.report.focus.rows import FOCUS_DIMENSIONS, focus_rows
from exporter.report.focus.values import FocusRow, FocusSettings, FocusSummary, Unpriced
from exporter.report.focus.write import write_focus

__all__ = (
    "DEFAULT_VERSION",
    "FOCUS_DIMENSIONS",
    "VERSIONS",
    "Check",
    "Finding",
    "FocusRow",
    "FocusSettings",
    "FocusSummary",
    "Unpriced",
    "check_focus",
    "focus_rows",
    "write_focus",
)

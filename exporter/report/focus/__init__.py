"""Money in the FinOps Foundation's format for cost and usage, FOCUS."""

from exporter.report.focus.columns import DEFAULT_VERSION, VERSIONS
from exporter.report.focus.rows import FOCUS_DIMENSIONS, focus_rows
from exporter.report.focus.values import FocusRow, FocusSettings, FocusSummary, Unpriced
from exporter.report.focus.write import write_focus

__all__ = (
    "DEFAULT_VERSION",
    "FOCUS_DIMENSIONS",
    "VERSIONS",
    "FocusRow",
    "FocusSettings",
    "FocusSummary",
    "Unpriced",
    "focus_rows",
    "write_focus",
)

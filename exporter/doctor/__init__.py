"""Checks whether a node is ready for the agent, and says what to fix."""

from exporter.doctor.checks import examine
from exporter.doctor.findings import (
    Finding,
    Level,
    Surroundings,
    interval_seconds,
    worst,
    write_json,
    write_report,
    write_text,
)

__all__ = [
    "Finding",
    "Level",
    "Surroundings",
    "examine",
    "interval_seconds",
    "worst",
    "write_json",
    "write_report",
    "write_text",
]

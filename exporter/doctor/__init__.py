"""Checks whether a node is ready for the agent, and reports what to fix."""

# ruff: noqa: I001 - one statement per module: every name is exported under itself.

from exporter.doctor.checks import examine as examine
from exporter.doctor.findings import (
    Finding as Finding,
    Level as Level,
    Surroundings as Surroundings,
    interval_seconds as interval_seconds,
    worst as worst,
    write_json as write_json,
    write_report as write_report,
    write_text as write_text,
)

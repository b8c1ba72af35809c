"""Looks whether a node is fit for the agent, and says what to mend."""

from exporter.doctor.examine import Surroundings, examine
from exporter.doctor.finding import Finding, Level
from exporter.doctor.report import worst, write_json, write_text

__all__ = ["Finding", "Level", "Surroundings", "examine", "worst", "write_json", "write_text"]

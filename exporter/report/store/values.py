"""What the store says of the days that it has."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from exporter.report.fleet.values import DAY_SECONDS, Dimension, Figures, LineKey, Window

HOURS_OF_A_DAY = 24
ALL_OF_A_DAY: frozenset[Dimension] = frozenset(LineKey._fields)
"""Dimensions that a day is kept at: every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedDay:
    """A day that reports read from the store."""

    window: Window
    version: int
    """1 for a day that was closed once."""
    recorded_hours: int
    """Of the cluster that has the fewest; below 24 the day was closed with gaps."""
    simulated: bool
    reopened: str = ""
    """Why it is to be read anew; this version holds until that is done. Empty where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DayVersion:
    """What a closing of a day found; a day that was closed again has several, and the last one holds."""

    window: Window
    number: int
    closed_at_seconds: float
    closed_by: str
    reason: str
    """Why it was closed again; empty for the first."""
    engine: str
    """Where it was read."""
    simulated: bool
    lines: int
    figures: Figures
    """Of all lines, Unallocated and Unattributed, too."""
    capacity_seconds: Mapping[str, float] = field(default_factory=dict)
    """By cluster."""
    recorded_hours: Mapping[str, int] = field(default_factory=dict)
    """By cluster."""


def day_window(start_seconds: int) -> Window:
    """The UTC day that begins then; its label is the date."""
    return Window(start_seconds=start_seconds, end_seconds=start_seconds + DAY_SECONDS, label=day_name(start_seconds))


def day_name(seconds: float) -> str:
    """The date, as ``2026-11-21``."""
    return datetime.fromtimestamp(seconds, UTC).date().isoformat()


def is_day(window: Window) -> bool:
    """Whether it is a whole UTC day, and one only."""
    return window.start_seconds % DAY_SECONDS == 0 and window.seconds == DAY_SECONDS


def days_of(window: Window) -> tuple[Window, ...]:
    """The window in pieces, cut at midnight UTC; those of a whole day are labelled with their date."""
    pieces = []
    start = window.start_seconds
    while start < window.end_seconds:
        end = min(window.end_seconds, (start // DAY_SECONDS + 1) * DAY_SECONDS)
        pieces.append(Window(start_seconds=start, end_seconds=end, label=day_name(start)))
        start = end
    return tuple(pieces)

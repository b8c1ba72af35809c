"""The weeks of a digest: Monday to Sunday, UTC, by their ISO numbers."""

import re
from datetime import UTC, date, datetime, timedelta

from exporter.errors import ConfigError
from exporter.report.fleet.values import DAY_SECONDS, Window, last_recorded

WEEK_SECONDS = 7 * DAY_SECONDS
_ISO = re.compile(r"(\d{4})-?W(\d{2})")
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
_ALLOWED = "allowed: lastweek, or a week that is over, as 2026-W46 (from Monday, UTC)"


def parse_week(text: str, now_seconds: float) -> Window:
    """The week that a text means.

    Raises:
        ConfigError: It is none, or is not over.
    """
    written = text.strip()
    if written == "lastweek":
        return _week(_monday(now_seconds) - timedelta(days=7))
    monday = _monday_of(written)
    if monday is None:
        shown = "".join(letter if letter.isprintable() else "?" for letter in text[:80])
        raise ConfigError(f"week: value '{shown}' is no week; {_ALLOWED}")
    week = _week(monday)
    if week.end_seconds > last_recorded(now_seconds):
        raise ConfigError(f"week: {week.label} is not over; {_ALLOWED}")
    return week


def both_weeks(week: Window) -> Window:
    """The week with the one before it."""
    return Window(
        start_seconds=week.start_seconds - WEEK_SECONDS, end_seconds=week.end_seconds, label=f"{week.label} and before"
    )


def _monday_of(text: str) -> date | None:
    match = _ISO.fullmatch(text)
    if match is None or not _FIRST_YEAR <= int(match[1]) <= _LAST_YEAR:
        return None
    try:
        return date.fromisocalendar(int(match[1]), int(match[2]), 1)
    except ValueError:
        return None


def _monday(now_seconds: float) -> date:
    today = datetime.fromtimestamp(last_recorded(now_seconds), UTC).date()
    return today - timedelta(days=today.weekday())


def _week(monday: date) -> Window:
    start = int(datetime(monday.year, monday.month, monday.day, tzinfo=UTC).timestamp())
    return Window(start_seconds=start, end_seconds=start + WEEK_SECONDS, label=f"{monday:%G-W%V}")

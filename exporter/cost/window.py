"""Parses and computes the periods of reports: windows of whole hours, and periods of the calendar."""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Literal, NamedTuple, TypeAlias, get_args

from exporter.errors import ConfigError, expected
from exporter.model.formatting import day, minute, shown

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400
CHECKPOINT_SECONDS = 1200
"""Time after an hour at which no recording runs; an hour is recorded 5 to 20 minutes after its end."""


def last_recorded(now_seconds: float) -> int:
    """Return the Unix time at which the last recorded hour ended."""
    return int((now_seconds - CHECKPOINT_SECONDS) // HOUR_SECONDS) * HOUR_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period between two whole hours UTC; the end is exclusive."""

    start_seconds: int
    end_seconds: int
    label: str = ""
    """Name of the period, such as the user's text: ``30d``, ``2026-10``."""

    @property
    def seconds(self) -> int:
        """Length in seconds."""
        return self.end_seconds - self.start_seconds

    @property
    def hours(self) -> int:
        """Length in hours."""
        return self.seconds // HOUR_SECONDS

    def meets(self, other: "Window") -> bool:
        """Return whether the windows overlap."""
        return self.start_seconds < other.end_seconds and other.start_seconds < self.end_seconds


ALLOWED = (
    "30d, 12h or 4w back from now; today, yesterday, week, lastweek, month, lastmonth or last-month; 2026,"
    " 2026-Q3, 2026-10, 2026-10-03; 2026-10-01..2026-10-15 (both days included); two times such as"
    " 2026-10-01T00:00Z..2026-10-02T06:00Z (the end is outside); Unix seconds 1790000000,1790086400"
)
_BACK = re.compile(r"(\d{1,6})([hdw])")
_LONG_BACK = re.compile(r"(\d{1,6}) ?([hdw])?(?:(?:ou)?rs?|ays?|eeks?)?", re.ASCII)
_UNIX = re.compile(r"(\d{1,12}),(\d{1,12})")
_HOURS = {"h": 1, "d": 24, "w": 168}
Period = Literal["week", "month", "quarter", "year"]
Unit: TypeAlias = Literal["day"] | Period
_MONTHS: dict[Unit, int] = {"month": 1, "quarter": 3, "year": 12}
_CALENDAR: dict[Unit, re.Pattern[str]] = {
    "year": re.compile(r"(\d{4})"),
    "quarter": re.compile(r"(\d{4})-[Qq]([1-4])"),
    "month": re.compile(r"(\d{4})-(\d{2})"),
    "day": re.compile(r"(\d{4})-(\d{2})-(\d{2})"),
}
_NAMED: dict[str, tuple[Unit, bool]] = {
    "today": ("day", False),
    "yesterday": ("day", True),
    "week": ("week", False),
    "lastweek": ("week", True),
    "month": ("month", False),
    "lastmonth": ("month", True),
}
"""Unit of each named period, and whether the name means the previous one."""
PERIODS = tuple(_NAMED)
_A_DAY = timedelta(days=1)
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
_LONGEST_DAYS = 3700
_STRETCH_DAYS = 31
"""Days in one stretch. A month in three stretches takes a server twice as long, as it reads lasting owners again."""


class Now(NamedTuple):
    """An instant, and the time zone of its calendar."""

    seconds: float
    """Unix time."""
    zone: tzinfo = UTC


def parse_window(text: str, now_seconds: float, zone: tzinfo = UTC) -> Window:
    """Parse a period, and end it at the last recorded hour at the latest.

    Args:
        text: One of the forms in ``ALLOWED``; it is the label, even of a shortened window.
        now_seconds: Unix time.
        zone: Time zone of days and months, and of times without a zone.

    Raises:
        ConfigError: The text is not a window. Or the window ends before it begins, lies in the future, is longer than
            ten years, or does not begin and end on whole hours UTC.
    """
    written = text.strip()
    try:
        bounds = _bounds(written, Now(now_seconds, zone))
    except (ValueError, OverflowError):
        bounds = None
    if bounds is None:
        raise ConfigError(f"window: value '{shown(text)}' is not a period{_nearest(written)}")
    start, end = bounds
    last = last_recorded(now_seconds)
    problem = ""
    if end <= start:
        problem = f" ends before it begins, or has less than an hour; allowed: {ALLOWED}"
    elif start >= last:
        when = "has no recorded hour yet" if start <= now_seconds else "lies in the future"
        problem = f" {when}; it is {minute(now_seconds)} UTC; allowed: a period that has begun"
    elif start % HOUR_SECONDS or end % HOUR_SECONDS:
        problem = _within_hours(start, end, zone)
    elif end - start > _LONGEST_DAYS * DAY_SECONDS:
        problem = f" is longer than ten years; allowed: at most {_LONGEST_DAYS} days"
    if problem:
        raise ConfigError(f"window: '{shown(text)}'{problem}")
    return Window(start_seconds=start, end_seconds=min(end, last), label=written)


def _nearest(text: str) -> str:
    """Return the end of a message: the most similar period, if any, and the allowed forms."""
    back = _LONG_BACK.fullmatch(text.lower())
    word = f"{back[1]}{back[2] or 'd'}" if back else _plain(text)
    return expected(word, (word,) if back else PERIODS, ALLOWED)


def _plain(text: str) -> str:
    """Return a name of a period in the form of ``PERIODS``: ``Last-Month`` is ``lastmonth``."""
    return text.lower().replace("-", "").replace("_", "").replace(" ", "")


def last_days(count: int, now: Now) -> tuple[int, int]:
    """Return start and end of the last ``count`` days, today included, until the last recorded hour, in Unix seconds.

    While no hour of today is recorded, return the ``count`` days before today.
    """
    today = datetime.fromtimestamp(now.seconds, now.zone).date()
    start, _ = _days(today - timedelta(days=count - 1), today, now.zone)
    last = last_recorded(now.seconds)
    if last > start:
        return start, last
    start, end = _days(today - timedelta(days=count), today, now.zone)
    return start, min(end, last)


def chunks(window: Window) -> tuple[Window, ...]:
    """Return the UTC days of a window in the order of time; the first and the last may be parts of days."""
    midnight = (window.start_seconds // DAY_SECONDS + 1) * DAY_SECONDS
    starts = [window.start_seconds, *range(midnight, window.end_seconds, DAY_SECONDS)]
    ends = [*starts[1:], window.end_seconds]
    return tuple(
        Window(start_seconds=start, end_seconds=end, label=day(start))
        for start, end in zip(starts, ends, strict=True)
        if start < end
    )


def stretches(window: Window) -> tuple[Window, ...]:
    """Return the window in pieces of several days, for queries that need no daily values."""
    starts = range(window.start_seconds, window.end_seconds, _STRETCH_DAYS * DAY_SECONDS)
    return tuple(
        Window(start_seconds=start, end_seconds=min(start + _STRETCH_DAYS * DAY_SECONDS, window.end_seconds))
        for start in starts
    )


def _bounds(text: str, now: Now) -> tuple[int, int] | None:
    """Return start and end in Unix seconds, before shortening; ``None`` for an unknown form."""
    zone = now.zone
    if match := _BACK.fullmatch(text):
        end = last_recorded(now.seconds)
        return end - int(match[1]) * _HOURS[match[2]] * HOUR_SECONDS, end
    if named := _NAMED.get(_plain(text)):
        unit, is_before = named
        first, after = _span(unit, datetime.fromtimestamp(now.seconds, zone).date())
        return _days(*(_span(unit, first - _A_DAY) if is_before else (first, after)), zone)
    if match := _UNIX.fullmatch(text):
        return int(match[1]), _end_of(int(match[2]))
    begin, dots, end_text = text.partition("..")
    one, other = _calendar(begin, zone), _calendar(end_text, zone)
    if not dots:
        return one
    return (one[0], other[1]) if one and other else (_instant(begin, zone), _end_of(_instant(end_text, zone)))


def _calendar(text: str, zone: tzinfo) -> tuple[int, int] | None:
    """Return the bounds of a year, a quarter, a month or a day."""
    for unit, pattern in _CALENDAR.items():
        if match := pattern.fullmatch(text):
            year, number, day_of_month = (*map(int, match.groups()), 1, 1)[:3]
            month = number * 3 - 2 if unit == "quarter" else number
            return _days(*_span(unit, _checked(date(year, month, day_of_month))), zone)
    return None


def _span(unit: Unit, day: date) -> tuple[date, date]:
    """Return the first day of the unit that contains a day, and the first day after it; a week begins on Monday."""
    if unit == "day":
        return day, day + _A_DAY
    if unit == "week":
        first = day - day.weekday() * _A_DAY
        return first, first + 7 * _A_DAY
    months = _MONTHS[unit]
    first = day.replace(day=1, month=(day.month - 1) // months * months + 1)
    after = first.year * 12 + first.month - 1 + months
    return first, date(after // 12, after % 12 + 1, 1)


def _checked(day: date) -> date:
    if not _FIRST_YEAR <= day.year <= _LAST_YEAR:
        raise ValueError(day)
    return day


def _days(first: date, after: date, zone: tzinfo) -> tuple[int, int]:
    """Return the starts of two days in a time zone, where a day may have 23 or 25 hours."""
    start, end = (int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) for day in (first, after))
    return start, end


def _instant(text: str, zone: tzinfo) -> int:
    """Return the Unix seconds of an RFC 3339 time; ``zone`` applies to a time without a zone."""
    if "T" not in text.upper() and not _CALENDAR["day"].fullmatch(text):
        raise ValueError(text)
    moment = datetime.fromisoformat(text.upper())
    _checked(moment.date())
    return int((moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp())


def _end_of(seconds: int) -> int:
    """Return the end of a period; 23:59:59, which many clients send as the end of a day, becomes midnight."""
    return seconds + 1 if seconds % HOUR_SECONDS == HOUR_SECONDS - 1 else seconds


def _within_hours(start: int, end: int, zone: tzinfo) -> str:
    """Return the error text for a period that does not begin and end on recorded hours, with an allowed period."""
    first, after = start // HOUR_SECONDS * HOUR_SECONDS, -(-end // HOUR_SECONDS) * HOUR_SECONDS
    what = "begins" if start % HOUR_SECONDS else "ends"
    at = datetime.fromtimestamp(start if start % HOUR_SECONDS else end, UTC)
    of_zone = "" if zone is UTC else f" ({zone})"
    return (
        f"{of_zone} {what} at {at:%Y-%m-%d %H:%M:%S} UTC, within an hour, and the ledger is"
        f" recorded by the hour UTC; allowed: whole hours, such as {_rfc3339(first)}..{_rfc3339(after)}, or days of a"
        " time zone that differs from UTC by whole hours"
    )


def _rfc3339(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%MZ}"


def period_at(period: Period, now: float, zone: tzinfo = UTC) -> Window:
    """Return the week (from Monday), month, quarter or year of ``now``, labelled ``2026-W47``, ``2026-11``, ..."""
    first, after = _span(period, datetime.fromtimestamp(now, zone).date())
    quarter = f"{first:%Y}-Q{first.month // 3 + 1}"
    label = {"week": f"{first:%G-W%V}", "month": f"{first:%Y-%m}", "quarter": quarter, "year": f"{first:%Y}"}[period]
    start, end = _days(first, after, zone)
    return Window(start_seconds=start, end_seconds=end, label=label)


def period_before(window: Window, zone: tzinfo = UTC) -> Window | None:
    """Return the period before a whole week, month, quarter or year; ``None`` for every other window."""
    for period in get_args(Period):
        here = period_at(period, window.start_seconds, zone)
        if (here.start_seconds, here.end_seconds) == (window.start_seconds, window.end_seconds):
            return period_at(period, window.start_seconds - 1, zone)
    return None

"""Periods as people write them, in a time zone, on whole hours UTC, and the days that they are read in."""

import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import NamedTuple

from exporter.errors import ConfigError
from exporter.report.fleet.values import DAY_SECONDS, HOUR_SECONDS, Window, last_recorded

ALLOWED = (
    "allowed: 30d, 12h or 4w back from now; today, yesterday, week, lastweek, month, lastmonth; 2026, 2026-Q3, 2026-10,"
    " 2026-10-03; 2026-10-01..2026-10-15 (both days included); two times such as"
    " 2026-10-01T00:00Z..2026-10-02T06:00Z (the end is outside); Unix seconds 1790000000,1790086400"
)
_BACK = re.compile(r"(\d{1,6})([hdw])")
_MONTH, _QUARTER, _YEAR = re.compile(r"(\d{4})-(\d{2})"), re.compile(r"(\d{4})-[Qq]([1-4])"), re.compile(r"(\d{4})")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_UNIX = re.compile(r"(\d{1,12}),(\d{1,12})")
_HOURS = {"h": 1, "d": 24, "w": 168}
_DECEMBER = 12
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
_LONGEST_DAYS = 3700
_STRETCH_DAYS = 31
"""Owners that last are read once: a month in three parts takes a server twice as long as in one."""


class Now(NamedTuple):
    """An instant, and the time zone whose calendar it is looked up in."""

    seconds: float
    """Unix time."""
    zone: tzinfo = UTC


def parse_window(text: str, now_seconds: float, zone: tzinfo = UTC) -> Window:
    """Return the period that a text means, cut at the last recorded hour.

    Args:
        text: One of the forms in ``ALLOWED``; its label is kept where it is cut.
        now_seconds: Unix time.
        zone: Whose days and months are meant, and times without a zone.

    Raises:
        ConfigError: It is none of them, ends before it begins, lies in the future, is longer than ten years, or begins
            or ends within an hour UTC, by which the ledger is recorded.
    """
    written = text.strip()
    try:
        bounds = _bounds(written, Now(now_seconds, zone))
    except (ValueError, OverflowError):
        bounds = None
    if bounds is None:
        raise ConfigError(f"window: value '{_shown(text)}' is not a period; {ALLOWED}")
    start, end = bounds
    last = last_recorded(now_seconds)
    if end <= start:
        raise ConfigError(f"window: '{_shown(text)}' ends before it begins, or has less than an hour; {ALLOWED}")
    if start >= last:
        told = "has no recorded hour yet" if start <= now_seconds else "lies in the future"
        raise ConfigError(
            f"window: '{_shown(text)}' {told}; it is {_stamp(now_seconds)}; allowed: a period that has begun"
        )
    if start % HOUR_SECONDS or end % HOUR_SECONDS:
        raise ConfigError(_within_hours(text, start, end, zone))
    if end - start > _LONGEST_DAYS * DAY_SECONDS:
        raise ConfigError(f"window: '{_shown(text)}' is longer than ten years; allowed: at most {_LONGEST_DAYS} days")
    return Window(start_seconds=start, end_seconds=min(end, last), label=written)


def last_days(count: int, now: Now) -> tuple[int, int]:
    """Return the Unix times from the beginning of a day, today being the last of ``count``, to the last recorded hour.

    While no hour of today is recorded, the days before it are meant.
    """
    today = datetime.fromtimestamp(now.seconds, now.zone).date()
    start, _ = _days(today - timedelta(days=count - 1), today, now.zone)
    last = last_recorded(now.seconds)
    if last > start:
        return start, last
    start, end = _days(today - timedelta(days=count), today, now.zone)
    return start, min(end, last)


def chunks(window: Window) -> tuple[Window, ...]:
    """The UTC days of a window in the order of time, the first and the last as far as they lie in it."""
    starts = [window.start_seconds]
    while (after := (starts[-1] // DAY_SECONDS + 1) * DAY_SECONDS) < window.end_seconds:
        starts.append(after)
    ends = [*starts[1:], window.end_seconds]
    return tuple(
        Window(start_seconds=start, end_seconds=end, label=f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d}")
        for start, end in zip(starts, ends, strict=True)
        if start < end
    )


def stretches(window: Window) -> tuple[Window, ...]:
    """The same in pieces of several days, for who asks for no day."""
    starts = range(window.start_seconds, window.end_seconds, _STRETCH_DAYS * DAY_SECONDS)
    return tuple(
        Window(start_seconds=start, end_seconds=min(start + _STRETCH_DAYS * DAY_SECONDS, window.end_seconds))
        for start in starts
    )


def _bounds(text: str, now: Now) -> tuple[int, int] | None:  # noqa: PLR0911 - a form each
    """Return start and end in Unix seconds, not yet cut; ``None`` for an unknown form."""
    zone = now.zone
    if match := _BACK.fullmatch(text):
        end = last_recorded(now.seconds)
        return end - int(match[1]) * _HOURS[match[2]] * HOUR_SECONDS, end
    if named := _NAMED.get(text.lower()):
        return _days(*named(datetime.fromtimestamp(now.seconds, zone).date()), zone)
    if match := _UNIX.fullmatch(text):
        return int(match[1]), _end_of(int(match[2]))
    first, dots, last = text.partition("..")
    if not dots:
        return _calendar(text, zone)
    if _DAY.fullmatch(first) and _DAY.fullmatch(last):
        return _days(_date(first), _date(last) + timedelta(days=1), zone)
    if (one := _calendar(first, zone)) and (other := _calendar(last, zone)):
        return one[0], other[1]
    return _instant(first, zone), _end_of(_instant(last, zone))


def _calendar(text: str, zone: tzinfo) -> tuple[int, int] | None:
    """A year, a quarter, a month or a day."""
    if match := _YEAR.fullmatch(text):
        return _months(int(match[1]), 1, 12, zone)
    if match := _QUARTER.fullmatch(text):
        return _months(int(match[1]), int(match[2]) * 3 - 2, 3, zone)
    if match := _MONTH.fullmatch(text):
        return _months(int(match[1]), int(match[2]), 1, zone)
    if _DAY.fullmatch(text):
        return _days(_date(text), _date(text) + timedelta(days=1), zone)
    return None


def _months(year: int, month: int, count: int, zone: tzinfo) -> tuple[int, int]:
    first = _checked(date(year, month, 1))
    return _days(first, _month_after(first, count), zone)


def _month_after(first: date, count: int = 1) -> date:
    months = first.year * _DECEMBER + first.month - 1 + count
    return date(months // _DECEMBER, months % _DECEMBER + 1, 1)


def _date(text: str) -> date:
    return _checked(date.fromisoformat(text))


def _checked(day: date) -> date:
    if not _FIRST_YEAR <= day.year <= _LAST_YEAR:
        raise ValueError(day)
    return day


def _days(first: date, after: date, zone: tzinfo) -> tuple[int, int]:
    """Return when one day begins and another one does, in a time zone; a day may have 23 or 25 hours there."""
    start, end = (int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) for day in (first, after))
    return start, end


def _instant(text: str, zone: tzinfo) -> int:
    """Return the Unix seconds of an RFC 3339 time; one without a zone is of ``zone``."""
    if "T" not in text.upper() and not _DAY.fullmatch(text):
        raise ValueError(text)
    moment = datetime.fromisoformat(text.upper())
    _checked(moment.date())
    return int((moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp())


def _end_of(seconds: int) -> int:
    """Return the end of a period; 23:59:59, as many clients write the end of a day, is midnight."""
    return seconds + 1 if seconds % HOUR_SECONDS == HOUR_SECONDS - 1 else seconds


def _within_hours(text: str, start: int, end: int, zone: tzinfo) -> str:
    """Say that a period does not begin and end on hours that are recorded, and what to give instead."""
    first, after = start // HOUR_SECONDS * HOUR_SECONDS, -(-end // HOUR_SECONDS) * HOUR_SECONDS
    what = "begins" if start % HOUR_SECONDS else "ends"
    at = datetime.fromtimestamp(start if start % HOUR_SECONDS else end, UTC)
    of_zone = "" if zone is UTC else f" ({zone})"
    return (
        f"window: '{_shown(text)}'{of_zone} {what} at {at:%Y-%m-%d %H:%M:%S} UTC, within an hour, and the ledger is"
        f" recorded by the hour UTC; allowed: whole hours, such as {_rfc3339(first)}..{_rfc3339(after)}, or days of a"
        " time zone that differs from UTC by whole hours"
    )


def _rfc3339(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%MZ}"


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[:80])


def _stamp(now_seconds: float) -> str:
    return f"{datetime.fromtimestamp(now_seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _monday(today: date) -> date:
    return today - timedelta(days=today.weekday())


_DAY_LONG, _WEEK_LONG = timedelta(days=1), timedelta(days=7)
_NAMED: dict[str, Callable[[date], tuple[date, date]]] = {
    "today": lambda today: (today, today + _DAY_LONG),
    "yesterday": lambda today: (today - _DAY_LONG, today),
    "week": lambda today: (_monday(today), _monday(today) + _WEEK_LONG),
    "lastweek": lambda today: (_monday(today) - _WEEK_LONG, _monday(today)),
    "month": lambda today: (today.replace(day=1), _month_after(today.replace(day=1))),
    "lastmonth": lambda today: ((today.replace(day=1) - _DAY_LONG).replace(day=1), today.replace(day=1)),
}

"""Fields of one line of a bill, read by name: numbers and times, with what is wrong told in words."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation

from exporter.report.focus.findings import shown

_MOST_DIGITS = 15
_LEADING_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class MalformedError(ValueError):
    """A line that cannot be read; the text says which field and why."""


def number(row: Mapping[str, str], name: str) -> Decimal:
    """A number; 0 where the field is empty or not there.

    Raises:
        MalformedError: It is no number.
    """
    text = row.get(name, "").strip()
    if not text:
        return Decimal(0)
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or (value and not -_MOST_DIGITS < value.adjusted() < _MOST_DIGITS):
        raise MalformedError(f"{name}: {shown(text)} is no number")
    return value


def needed(row: Mapping[str, str], name: str) -> Decimal:
    """A number that must be there.

    Raises:
        MalformedError: It is not, or is no number.
    """
    if not row.get(name, "").strip():
        raise MalformedError(f"{name}: is empty")
    return number(row, name)


def moment(row: Mapping[str, str], name: str) -> datetime:
    """A time, in UTC where it does not say.

    Raises:
        MalformedError: It is no time.
    """
    text = row.get(name, "").strip()
    try:
        if not _LEADING_DAY.match(text):
            raise ValueError  # noqa: TRY301 - told below as every other
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise MalformedError(f"{name}: {shown(text)} is no time") from None


def days_between(start: datetime, end: datetime) -> int:
    """Whole days that a line is for, at least 1."""
    return max(1, -((start - end) // timedelta(days=1)))

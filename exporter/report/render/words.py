"""How numbers, times and names are shown, in every report for people and spreadsheets."""

from datetime import UTC, datetime
from math import floor

HOUR = 3600.0
JOULES_PER_KWH = 3.6e6
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_MANY_HOURS, _SOME_HOURS = 1000, 10


def digits_of(capacity_seconds: float) -> int:
    """Decimals of hours: more of them for a ledger that has only just begun."""
    hours = capacity_seconds / HOUR
    return 1 if hours >= _MANY_HOURS else 2 if hours >= _SOME_HOURS else 4


def decimal(value: float, digits: int) -> str:
    """``1,234.50``; a little is never shown as nothing, and nothing has no sign."""
    least = 10**-digits
    if abs(value) < least / 2:
        return f"<{least:.{digits}f}" if value > 0 else f"{0:.{digits}f}"
    return f"{value:,.{digits}f}"


def percent(ratio: float, digits: int = 2) -> str:
    """``99.86 %``; rounded down, so that 100 % is all of it; a little is never shown as nothing."""
    scale = 10**digits
    if 0 < ratio * 100 * scale < 1:
        return f"<{1 / scale:.{digits}f} %"
    return f"{floor(ratio * 100 * scale + 1e-6) / scale:.{digits}f} %"


def clean(name: str) -> str:
    """A text that cannot steer the terminal or turn the line around that it is written to."""
    return name if name.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in name)


def guarded(name: str) -> str:
    """A name that a spreadsheet does not take for a formula, nor for the end of a row."""
    name = name.replace("\r\n", "\n").replace("\r", "\n")  # not quoted by Python's writer where rows end in \n
    return f"'{name}" if name.startswith(_FORMULA) else name


def encodable(name: str) -> str:
    """A text that UTF-8 has: half a surrogate pair, which JSON can smuggle in, becomes a question mark."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


def moment(unix_seconds: float) -> str:
    """``2026-10-01 00:00:00 UTC``."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"


def minute(unix_seconds: float) -> str:
    """``2026-10-01 00:00``, in UTC, where that is said beside it."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=UTC):%Y-%m-%d %H:%M}"


def iso(unix_seconds: float) -> str:
    """``2026-10-01T00:00:00Z``."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=UTC):%Y-%m-%dT%H:%M:%SZ}"

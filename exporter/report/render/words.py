"""How numbers, times and names are shown, in every report for people and spreadsheets."""

import re
from datetime import UTC, datetime
from math import floor
from typing import Protocol, TextIO

HOUR = 3600.0
JOULES_PER_KWH = 3.6e6
_FORMULA_START = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\n")
_FORMULA_WITHIN = re.compile(r'(^\s+|[;\t\n|][\s"]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])')
"""A formula sign where a spreadsheet that splits at another character than the comma sees the begin of a cell."""
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
    """Return the text of a CSV cell: UTF-8 can encode it, and no spreadsheet reads a formula or another row in it.

    Spreadsheets of many locales split at ``;`` and ignore quotes within a cell, so each part gets its own guard.
    """
    name = encodable(name).replace("\r\n", "\n").replace("\r", "\n")  # Python's writer does not quote a lone \r
    name = _FORMULA_WITHIN.sub(r"\1'", name)
    return f"'{name}" if name.startswith(_FORMULA_START) else name


class Writable(Protocol):
    """What the csv module writes to."""

    def write(self, text: str, /) -> object:
        """Write a text."""


def csv_stream(stream: TextIO) -> Writable:
    """Return where to write CSV: a terminal gets no control characters, a file gets every name as it is."""
    return _Terminal(stream) if stream.isatty() else stream


class _Terminal:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> object:
        return self._stream.write("\n".join(clean(line) for line in text.split("\n")))


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

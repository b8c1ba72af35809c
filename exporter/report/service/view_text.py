"""Numbers and times as the pages show them; plain text, which the templates escape."""

from datetime import UTC, datetime
from math import floor

from exporter.report.fleet.values import HOUR_SECONDS

_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
_CENT, _WHOLE_FROM = 0.005, 1000
_FEW_HOURS, _MANY_HOURS = 10, 1000
_MINUTE, _DAY = 60, 86_400
_GIB = 1024**3

DASH = "—"
"""What is not known, and what does not apply."""


def money(value: float, currency: str) -> str:
    """``$12.34``, ``$1,234``, ``CHF 0.10``; a little is never shown as nothing."""
    symbol = _SYMBOLS.get(currency, f"{currency} ")
    if 0 < value < _CENT:
        return f"<{symbol}0.01"
    return f"{symbol}{value:,.0f}" if value >= _WHOLE_FROM else f"{symbol}{value:,.2f}"


def amount(value: float) -> str:
    """Money below a heading that has the currency: ``1,234.50``."""
    return "<0.01" if 0 < value < _CENT else f"{value:,.2f}"


def hours(seconds: float) -> str:
    """GPU-seconds as GPU-hours with three figures or so: ``0.03``, ``12.5``, ``1,234``."""
    value = seconds / HOUR_SECONDS
    if 0 < value < _CENT:
        return "<0.01"
    return f"{value:,.2f}" if value < _FEW_HOURS else f"{value:,.1f}" if value < _MANY_HOURS else f"{value:,.0f}"


def gpus(value: float) -> str:
    """A mean number of GPUs: ``0.5``, ``12.3``, ``7,940``."""
    if 0 < value < 0.05:  # noqa: PLR2004 - what would be rounded to 0.0
        return "<0.1"
    return f"{value:,.1f}" if value < _MANY_HOURS else f"{value:,.0f}"


def percent(ratio: float) -> str:
    """A part of a whole; neither a little nor all but a little is rounded away: ``<1 %``, ``42 %``, ``99 %``."""
    if 0 < ratio < 0.01:  # noqa: PLR2004 - a per cent
        return "<1 %"
    return f"{floor(ratio * 100) if ratio < 1 and ratio * 100 > 99 else ratio * 100:.0f} %"  # noqa: PLR2004


def coverage(ratio: float) -> str:
    """A coverage, rounded down: ``100 %`` only where it is all."""
    tenths = floor(ratio * 1000 + 1e-9) / 10
    return "100 %" if ratio >= 1 else f"{tenths:.1f} %"


def duration(seconds: float) -> str:
    """``42 min``, ``7 h``, ``12 d``."""
    if seconds < 2 * HOUR_SECONDS:
        return f"{max(0, seconds) // _MINUTE:.0f} min"
    return f"{seconds // HOUR_SECONDS:.0f} h" if seconds < 2 * _DAY else f"{seconds // _DAY:.0f} d"


def moment(unix_seconds: float) -> str:
    """``2026-11-20 14:00``, UTC, which the page says once."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=UTC):%Y-%m-%d %H:%M}"


def day(unix_seconds: float) -> str:
    """``2026-11-20``."""
    return f"{datetime.fromtimestamp(unix_seconds, tz=UTC):%Y-%m-%d}"


def gib(size_bytes: float) -> str:
    """``71.3 GiB``."""
    return f"{size_bytes / _GIB:,.1f} GiB"


def model(name: str) -> str:
    """The model without the vendor, which is always the same."""
    return name.removeprefix("NVIDIA ")


def plural(number: int, word: str) -> str:
    """``1 hour``, ``2 hours``, ``1,200 hours``."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")

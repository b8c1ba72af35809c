"""Formats numbers, money, durations and times for display, without escaping: templates escape them."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import floor

_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
_CENT, _WHOLE_FROM = 0.005, 1000
_FEW, _MANY = 10, 1000
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
_IN_SECONDS_BELOW, _IN_MINUTES_BELOW, _IN_HOURS_BELOW = 2 * _MINUTE, 2 * _HOUR, 2 * _DAY
_GIB = 1024**3
_DUST = 1e-9
"""Maximum floating-point error of shares that sum to 1."""


def clean(name: str) -> str:
    """Return a text without characters that control the terminal or the direction of text."""
    return name if name.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in name)


def shown(text: str) -> str:
    """Return the beginning of a user's text, safe for a message."""
    return clean(text[:80])


def decimal(value: float, digits: int = 2) -> str:
    """Return ``1,234.50``; a small value is never shown as 0, and 0 has no sign."""
    least = 10**-digits
    if abs(value) < least / 2:
        return f"<{least:.{digits}f}" if value > 0 else f"{0:.{digits}f}"
    return f"{value:,.{digits}f}"


def money(value: float, currency: str) -> str:
    """Return ``$12.34``, ``$1,234``, ``CHF 0.10``, for pages; a small amount is never shown as 0."""
    symbol = _SYMBOLS.get(currency) or f"{currency} "
    if 0 < value < _CENT:
        return f"<{symbol}0.01"
    return f"{symbol}{value:,.0f}" if value >= _WHOLE_FROM else f"{symbol}{value:,.2f}"


def short_money(value: float, currency: str) -> str:
    """Return ``$200``, ``$2.5k``, ``€3M``, for the axes of charts."""
    symbol = _SYMBOLS.get(currency) or f"{currency} "
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{symbol}{value / size:,.4g}{unit}"
    return f"{symbol}{value:,.4g}"


def amounts(values: Mapping[str, float]) -> str:
    """Return ``€3.00 + $4.00`` of money by currency: amounts in different currencies are never summed."""
    return " + ".join(money(value, currency) for currency, value in sorted(values.items()))


def money_with_code(value: float, currency: str, digits: int = 2) -> str:
    """Return ``1,234.50 USD``, for tables and messages that need all cents."""
    return f"{decimal(value, digits)} {currency}"


def hours(seconds: float) -> str:
    """Return GPU-seconds as GPU-hours with about three figures: ``0.03``, ``12.5``, ``1,234``."""
    value = seconds / _HOUR
    return decimal(value, 2 if value < _FEW else 1 if value < _MANY else 0)


def hour_digits(seconds: float) -> int:
    """Return the number of decimals for hours in a table with a total of GPU-seconds; a small total needs more."""
    value = seconds / _HOUR
    return 1 if value >= _MANY else 2 if value >= _FEW else 4


def gpus(value: float) -> str:
    """Return a mean number of GPUs: ``0.5``, ``12.3``, ``7,940``."""
    return decimal(value, 1 if value < _MANY else 0)


def percent(ratio: float) -> str:
    """Return ``<1 %``, ``42 %``, ``99 %``: rounded, but 0 % and 100 % only for the exact value."""
    if 0 < ratio < 0.01:  # noqa: PLR2004 - a per cent
        return "<1 %"
    return "99 %" if 0.99 < ratio < 1 - _DUST else f"{ratio * 100:.0f} %"  # noqa: PLR2004 - 99 per cent


def percent_down(ratio: float, digits: int = 2) -> str:
    """Return ``99.86 %``: rounded down, so parts never exceed the whole; a small part is never shown as 0."""
    scale = 10**digits
    if 0 < ratio * 100 * scale < 1:
        return f"<{1 / scale:.{digits}f} %"
    return f"{floor(ratio * 100 * scale + 1e-6) / scale:.{digits}f} %"


def coverage(ratio: float) -> str:
    """Return ``99.9 %``: rounded down, and ``100 %`` only if it is complete."""
    return "100 %" if ratio >= 1 else percent_down(ratio, 1)


def duration(seconds: float) -> str:
    """Return ``95 s``, ``42 min``, ``3 h 12 min``, ``5 d 4 h``."""
    whole = max(0, int(seconds))
    if whole < _IN_SECONDS_BELOW:
        return f"{whole} s"
    if whole < _IN_MINUTES_BELOW:
        return f"{whole // _MINUTE} min"
    if whole < _IN_HOURS_BELOW:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def brief(seconds: float) -> str:
    """Return a duration without its smaller unit, for narrow places: ``95 s``, ``42 min``, ``3 h``, ``5 d``."""
    return " ".join(duration(seconds).split()[:2])


def brief_minutes(seconds: float) -> str:
    """Return a brief duration in minutes or longer units, for values that can be a minute old: ``1 min``, ``7 h``."""
    return brief(seconds) if seconds >= _IN_SECONDS_BELOW else f"{max(0, int(seconds)) // _MINUTE} min"


def _utc(unix_seconds: float) -> datetime:
    return datetime.fromtimestamp(unix_seconds, tz=UTC)


def moment(unix_seconds: float) -> str:
    """Return ``2026-10-01 00:00:00 UTC``."""
    return f"{_utc(unix_seconds):%Y-%m-%d %H:%M:%S} UTC"


def minute(unix_seconds: float) -> str:
    """Return ``2026-10-01 00:00`` in UTC, without the zone."""
    return f"{_utc(unix_seconds):%Y-%m-%d %H:%M}"


def day(unix_seconds: float) -> str:
    """Return ``2026-10-01``, in UTC."""
    return f"{_utc(unix_seconds):%Y-%m-%d}"


def iso(unix_seconds: float) -> str:
    """Return ``2026-10-01T00:00:00Z``."""
    return f"{_utc(unix_seconds):%Y-%m-%dT%H:%M:%SZ}"


def gib(size_bytes: float) -> str:
    """Return ``71.3 GiB``."""
    return f"{size_bytes / _GIB:,.1f} GiB"


def gib_number(size_bytes: float) -> str:
    """Return GiB with two figures and no unit: ``0.4``, ``71``."""
    value = size_bytes / _GIB
    return f"{value:.1f}" if value < _FEW else f"{value:.0f}"


def model(name: str) -> str:
    """Return the model name without the vendor."""
    return name.removeprefix("NVIDIA ")


def summed(amounts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of the amounts of each name, in the order in which names first occur."""
    totals: dict[str, float] = {}
    for name, amount in amounts:
        totals[name] = totals.get(name, 0.0) + amount
    return totals


def some(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, and the number of the others."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def plural(number: int, noun: str) -> str:
    """Return ``1 hour``, ``2 hours``, ``1,200 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"

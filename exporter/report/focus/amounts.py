"""Decimal arithmetic of split charges: parts that sum to the whole, to the last digit."""

from collections.abc import Sequence
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal

PLACES = 10
"""Decimals of money and hours."""
RATIO_PLACES = 12
_WIDE = Context(prec=60, rounding=ROUND_HALF_EVEN)


def exact(value: float) -> Decimal:
    """A float as the shortest decimal that means it."""
    return Decimal(repr(value))


def rounded(value: Decimal, places: int = PLACES) -> Decimal:
    """The value with so many decimals."""
    return value.quantize(Decimal(1).scaleb(-places), context=_WIDE)


def parts_of(whole: Decimal, values: Sequence[Decimal], places: int = PLACES) -> list[Decimal]:
    """The values rounded up or down, such that they sum to ``whole``; none turns negative by it.

    Those nearest to the next digit are rounded up. ``whole`` is the sum of the values, or it all but rounding.
    """
    step = Decimal(1).scaleb(-places)
    parts = [value.quantize(step, rounding=ROUND_FLOOR, context=_WIDE) for value in values]
    left = int((whole - sum(parts, Decimal(0))) / step)
    by_loss = sorted(range(len(parts)), key=lambda index: parts[index] - values[index])
    for index in by_loss[: max(left, 0)]:
        parts[index] += step
    if parts:
        largest = max(range(len(parts)), key=values.__getitem__)
        parts[largest] += whole - sum(parts, Decimal(0))
    return parts


def ratios_of(values: Sequence[Decimal]) -> list[Decimal]:
    """Each value's part of their sum; the parts sum to exactly 1. Equal parts where the sum is 0."""
    total = sum(values, Decimal(0))
    shares = [
        _WIDE.divide(value, total) if total else _WIDE.divide(Decimal(1), Decimal(len(values))) for value in values
    ]
    return parts_of(Decimal(1), shares, RATIO_PLACES)


def quotient(value: Decimal, by: Decimal) -> Decimal:
    """To more digits than are ever written; ``by`` is not 0."""
    return _WIDE.divide(value, by)


def written(value: Decimal) -> str:
    """Return a number as FOCUS writes it: no exponent, no needless zeros, no sign at 0.

    A whole number has one decimal: readers that guess types take a column without any for integers.
    """
    if not value:
        return "0.0"
    whole, _, decimals = f"{value:f}".partition(".")
    return f"{whole}.{decimals.rstrip('0') or '0'}"

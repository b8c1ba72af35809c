"""Spreads the money of GPUs that no owner held over those who did, to the hundredth, so that nothing is lost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import floor

from exporter.report.fleet.report import ReportLine, ShareIdle
from exporter.report.fleet.values import UNALLOCATED, UNATTRIBUTED, Dimension

_PER_UNIT, _HALF = 100, 0.5 + 1e-6
"""Money is spread in hundredths, whatever the currency's smallest coin is."""
_PLACES: tuple[Dimension, ...] = ("cluster", "pool", "model", "node")
_NARROWER: tuple[frozenset[Dimension], ...] = (
    frozenset(_PLACES),
    frozenset({"cluster", "pool", "model"}),
    frozenset({"cluster", "pool"}),
    frozenset({"cluster", "model"}),
    frozenset({"cluster"}),
)
"""Whose owners pay for what was free in a place: that place's; where it had none, a wider one's; never another
cluster's."""


def spread(
    held: Sequence[ReportLine],
    apart: Sequence[ReportLine],
    by: Iterable[Dimension],
    *,
    share_idle: ShareIdle,
    share_unallocated: bool,
) -> tuple[list[ReportLine], list[ReportLine]]:
    """The lines with ``shared`` filled in; its sum over all lines is 0 in every currency.

    Args:
        held: Owners' lines.
        apart: Lines that are nobody's.
        by: The report's dimensions. Where they tell places apart (cluster, pool, model, node), the owners of a place
            pay for what was free there.
        share_idle: ``even`` over lines, or ``weighted`` by their own money (where they have none in the currency by
            their GPU-seconds). Spreads Unallocated: GPUs that nobody held, which other tools call idle. What an owner
            held and did not use stays the owner's.
        share_unallocated: Unattributed is spread, too, so that all that has no owner is.

    Returns:
        Owners' lines, whose ``shared`` are whole hundredths, and the others, whose ``shared`` is what was taken from
        them: all but what is less than half a hundredth. What nobody can be charged with stays where it is.
    """
    if share_idle == "none":
        return list(held), list(apart)
    kinds = {UNALLOCATED, UNATTRIBUTED} if share_unallocated else {UNALLOCATED}
    places = frozenset(by) & frozenset(_PLACES)
    given: list[dict[str, int]] = [{} for _ in held]
    crowds: dict[tuple[frozenset[Dimension], tuple[str, ...]], list[int]] = {}
    for level in dict.fromkeys(narrow & places for narrow in _NARROWER):
        for index, line in enumerate(held):
            crowds.setdefault((level, _place(line, level)), []).append(index)
    taken = [
        _take(line, held, _payers(line, places, crowds), share_idle, given) if line.key.kind in kinds else line
        for line in apart
    ]
    return [replace(line, shared=_units(hundredths)) for line, hundredths in zip(held, given, strict=True)], taken


def _place(line: ReportLine, level: frozenset[Dimension]) -> tuple[str, ...]:
    return tuple(getattr(line.key, dimension) for dimension in _PLACES if dimension in level)


def _payers(
    line: ReportLine,
    places: frozenset[Dimension],
    crowds: Mapping[tuple[frozenset[Dimension], tuple[str, ...]], list[int]],
) -> list[int]:
    for narrow in _NARROWER:
        level = narrow & places
        found = crowds.get((level, _place(line, level)))
        if found:
            return found
    return []


def _take(
    line: ReportLine,
    held: Sequence[ReportLine],
    payers: Sequence[int],
    share_idle: ShareIdle,
    given: Sequence[dict[str, int]],
) -> ReportLine:
    if not payers:
        return line
    taken: dict[str, int] = {}
    for currency, money in line.figures.money.items():
        hundredths = round(money.total * _PER_UNIT)
        weights = [1.0] * len(payers) if share_idle == "even" else _weights([held[n] for n in payers], currency)
        for index, part in zip(payers, divide(hundredths, weights), strict=True):
            given[index][currency] = given[index].get(currency, 0) + part
        taken[currency] = -hundredths
    return replace(line, shared=_units(taken))


def _weights(lines: Sequence[ReportLine], currency: str) -> list[float]:
    measures: tuple[Callable[[ReportLine], float], ...] = (
        lambda line: line.figures.money_in(currency).total,
        lambda line: line.figures.allocated_seconds,
    )
    for measure in measures:
        weights = [max(0.0, measure(line)) for line in lines]
        if any(weights):
            return weights
    return [1.0] * len(lines)


def _units(hundredths: Mapping[str, int]) -> dict[str, float]:
    return {currency: number / _PER_UNIT for currency, number in hundredths.items() if number}


def divide(whole: int, weights: Sequence[float]) -> list[int]:
    """Whole parts in proportion to weights that sum to the whole; the largest remainders are rounded up.

    Args:
        whole: What is divided, not negative.
        weights: At least one, none negative, not all 0; of equal remainders the first is rounded up.
    """
    total = sum(weights)
    exact = [whole * (weight / total) for weight in weights]
    parts = [floor(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    # Rounding of floats may leave a little more than a unit for each part, or take one too many.
    while left := whole - sum(parts):
        for index in order[:left] if left > 0 else [index for index in order if parts[index]][left:]:
            parts[index] += 1 if left > 0 else -1
    return parts


def close(amounts: Sequence[float]) -> list[float]:
    """Amounts in hundredths, rounded such that they sum to their rounded sum: a bill that closes to the cent.

    The largest remainders are rounded up; an amount of less than half a hundredth, as what is left of a line that was
    spread, is 0 as long as others can bear the difference.
    """
    hundredths = [amount * _PER_UNIT for amount in amounts]
    is_little = [abs(value) <= _HALF for value in hundredths]
    parts = [0 if little else floor(value) for value, little in zip(hundredths, is_little, strict=True)]
    order = sorted(range(len(parts)), key=lambda index: (is_little[index], parts[index] - hundredths[index]))
    whole = round(sum(hundredths))
    while left := whole - sum(parts):
        for index in order[:left] if left > 0 else [index for index in order if parts[index]][left:]:
            parts[index] += 1 if left > 0 else -1
    return [part / _PER_UNIT for part in parts]

"""Charts as data: what is drawn by a script, and stands as a table beside it."""

from collections.abc import Callable, Sequence
from typing import Any

from exporter.cost.ledger import HOUR_SECONDS, UNALLOCATED, UNATTRIBUTED, Figures
from exporter.cost.report import FleetReport, ReportLine
from exporter.model.formatting import day

Value = Callable[[Figures], float]
Chart = dict[str, Any]
"""Stacked bars, one per period: what the script draws from, and ``name``, that of its element in the page.

A stack has a name, values, and a look: ``active``, ``idle``, ``unknown``, ``unattributed``, ``unallocated``,
``others`` or a number; the style has colours for these. The unit is a currency, or GPU-hours.
"""


def uses(report: FleetReport, currency: str) -> Chart | None:
    """What active, idle and unknown GPUs cost day by day, and what nobody held; hours where nothing has a price.

    ``None`` where the report has no days.
    """
    if not report.periods:
        return None
    parts = [
        (name, name.lower(), _summed(report.held, report, _value(currency, f"{name.lower()}_seconds", name.lower())))
        for name in ("Active", "Idle", "Unknown")
    ]
    for kind in (UNATTRIBUTED, UNALLOCATED):
        apart = [line for line in report.apart if line.key.kind == kind]
        parts.append((kind, kind.lower(), _summed(apart, report, _whole(currency))))
    # A colour that is nowhere would only lengthen the legend.
    return _chart("uses", currency, report, [part for part in parts if any(part[2])])


def largest(whole: FleetReport, currency: str, named: Sequence[tuple[str, ReportLine]], *, more: bool) -> Chart | None:
    """What each of the named lines costs day by day, and where there are ``more`` all others together.

    Args:
        whole: What all lines together are, with its days.
        currency: Of the money; empty for hours.
        named: Names and lines with their days.
        more: Whether there are others.
    """
    drawn = [(name, line) for name, line in named if len(line.series) == len(whole.periods)]
    if not whole.periods or not drawn:
        return None
    value = _whole(currency)
    stacks = [(name, str(number), _summed([line], whole, value)) for number, (name, line) in enumerate(drawn, start=1)]
    if more:
        of_named = [sum(values) for values in zip(*(values for _, _, values in stacks), strict=True)]
        of_all = zip(_summed(whole.held, whole, value), of_named, strict=True)
        stacks.append(("All others", "others", tuple(max(0.0, every - these) for every, these in of_all)))
    return _chart("largest", currency, whole, stacks)


def _chart(
    name: str, currency: str, report: FleetReport, stacks: Sequence[tuple[str, str, tuple[float, ...]]]
) -> Chart | None:
    if not stacks:
        return None
    return {
        "name": name,
        "unit": currency or "GPU-hours",
        "money": bool(currency),
        "periods": [day(period.start_seconds) for period in report.periods],
        "stacks": [{"name": name, "look": look, "values": values} for name, look, values in stacks],
    }


def _summed(lines: Sequence[ReportLine], report: FleetReport, value: Value) -> tuple[float, ...]:
    """Return the sum of some lines by period."""
    with_days = [line.series for line in lines if line.series]
    return tuple(sum(value(series[index]) for series in with_days) for index in range(len(report.periods)))


def _value(currency: str, hours: str, money: str) -> Value:
    """Return what takes a part of figures: hours where there is no currency, else its money."""
    if not currency:
        return lambda figures: float(getattr(figures, hours)) / HOUR_SECONDS
    return lambda figures: float(getattr(figures.money_in(currency), money))


def _whole(currency: str) -> Value:
    return _value(currency, "allocated_seconds", "total")

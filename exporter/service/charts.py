"""Charts as data: what is drawn by a script, and stands as a table beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.cost.ledger import HOUR_SECONDS, UNALLOCATED, UNATTRIBUTED, Figures
from exporter.cost.report import FleetReport, ReportLine
from exporter.model.formatting import day

_OTHERS = "All others"

Value = Callable[[Figures], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One colour of a chart."""

    name: str
    look: str
    """``active``, ``idle``, ``unknown``, ``unattributed``, ``unallocated``, or a number; the style has colours."""
    values: tuple[float, ...]
    """One per period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Stacked bars, one per period."""

    name: str
    """Of its element in the page."""
    title: str
    unit: str
    """A currency, or ``GPU-hours``."""
    periods: tuple[str, ...]
    stacks: tuple[Stack, ...]

    @property
    def is_money(self) -> bool:
        """Whether the values are money."""
        return self.unit != "GPU-hours"

    def totals(self) -> tuple[float, ...]:
        """The height of each bar."""
        return tuple(sum(values) for values in zip(*(stack.values for stack in self.stacks), strict=True))

    def rows(self) -> list[tuple[str, tuple[float, ...], float]]:
        """Period, values in the order of the stacks, and their sum."""
        columns = zip(*(stack.values for stack in self.stacks), strict=True)
        return [(period, values, sum(values)) for period, values in zip(self.periods, columns, strict=True)]

    def data(self) -> dict[str, Any]:
        """What the script draws from."""
        return {
            "unit": self.unit,
            "money": self.is_money,
            "periods": self.periods,
            "stacks": [{"name": one.name, "look": one.look, "values": one.values} for one in self.stacks],
        }


def uses(report: FleetReport, currency: str, *, with_apart: bool) -> Chart | None:
    """What active, idle and unknown GPUs cost day by day, and what nobody held; hours where nothing has a price.

    ``None`` where the report has no days.
    """
    if not report.periods:
        return None
    held = _by_period(report.held, len(report.periods))
    parts = [
        ("Active", "active", _summed(held, _part(currency, "active"))),
        ("Idle", "idle", _summed(held, _part(currency, "idle"))),
        ("Unknown", "unknown", _summed(held, _part(currency, "unknown"))),
    ]
    if with_apart:
        for kind in (UNATTRIBUTED, UNALLOCATED):
            apart = _by_period([line for line in report.apart if line.key.kind == kind], len(report.periods))
            parts.append((kind, kind.lower(), _summed(apart, _whole(currency))))
    # A colour that is nowhere would only lengthen the legend.
    stacks = tuple(Stack(name=name, look=look, values=values) for name, look, values in parts if any(values))
    return _chart("uses", "Day by day", currency, report, stacks)


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
    value, count = _whole(currency), len(whole.periods)
    stacks = [
        Stack(name=name, look=str(number), values=_summed(_by_period([line], count), value))
        for number, (name, line) in enumerate(drawn, start=1)
    ]
    if more:
        of_all = _summed(_by_period(whole.held, count), value)
        of_named = [sum(values) for values in zip(*(stack.values for stack in stacks), strict=True)]
        rest = tuple(max(0.0, every - these) for every, these in zip(of_all, of_named, strict=True))
        stacks.append(Stack(name=_OTHERS, look="others", values=rest))
    return _chart("largest", "Day by day", currency, whole, tuple(stacks))


def _chart(name: str, title: str, currency: str, report: FleetReport, stacks: tuple[Stack, ...]) -> Chart | None:
    if not stacks:
        return None
    periods = tuple(day(period.start_seconds) for period in report.periods)
    return Chart(name=name, title=title, unit=currency or "GPU-hours", periods=periods, stacks=stacks)


def _by_period(lines: Sequence[ReportLine], count: int) -> list[list[Figures]]:
    return [[line.series[index] for line in lines if line.series] for index in range(count)]


def _summed(periods: list[list[Figures]], value: Value) -> tuple[float, ...]:
    return tuple(sum(value(figures) for figures in period) for period in periods)


def _value(currency: str, hours: str, money: str) -> Value:
    """Return what takes a part of figures: hours where there is no currency, else its money."""
    if not currency:
        return lambda figures: float(getattr(figures, hours)) / HOUR_SECONDS
    return lambda figures: float(getattr(figures.money_in(currency), money))


def _whole(currency: str) -> Value:
    return _value(currency, "allocated_seconds", "total")


def _part(currency: str, part: str) -> Value:
    return _value(currency, f"{part}_seconds", part)

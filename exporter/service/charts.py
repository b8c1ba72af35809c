"""Draws stacked bars, one per day, as SVG without scripts: computes the values and the position of each bar."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from exporter.cost.document import PARTS, parts
from exporter.cost.ledger import Figures
from exporter.cost.report import FleetReport, ReportLine
from exporter.cost.window import HOUR_SECONDS
from exporter.model.formatting import day, decimal, money, short_money

HEIGHT, _TOP = 236, 8
"""Pixels of the bars' area, and of the space above the highest line."""
_TICKS, _LABELS = 4, 6
_BAR_PART = 0.8
"""Width of a bar as part of a day's width; the rest is a gap."""

Value = Callable[[Figures], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The values of one colour."""

    name: str
    look: str
    """Key of the colour: a key of ``PARTS``, ``others`` or a number."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Stacked bars, one per period; widths and horizontal positions are in percent, heights in pixels."""

    name: str
    """Name of the element in the page."""
    currency: str
    """Currency of the values; empty for GPU-hours."""
    periods: tuple[str, ...]
    stacks: tuple[Stack, ...]

    @property
    def unit(self) -> str:
        """Unit of the values."""
        return self.currency or "GPU-hours"

    def words(self, value: float) -> str:
        """Return a value with its unit."""
        return money(value, self.currency) if self.currency else f"{decimal(value, 1)} h"

    @property
    def sums(self) -> list[float]:
        """Sum of each period."""
        return [sum(values) for values in zip(*(stack.values for stack in self.stacks), strict=True)]

    @property
    def ticks(self) -> Iterator[tuple[float, str]]:
        """Height and text of each line of the axis."""
        step, count = self._scale
        for number in range(count + 1):
            value = number * step
            words = short_money(value, self.currency) if self.currency else f"{value:,.4g}"
            yield round(HEIGHT - value * self._pixels, 2), words

    @property
    def _scale(self) -> tuple[float, int]:
        """Size of a step of the axis, 1, 2 or 5 times a power of ten, and number of steps: about four."""
        most = max(self.sums, default=0.0) or 1.0
        power = 10.0 ** floor(log10(most / _TICKS))
        step = next(power * size for size in (1, 2, 5, 10) if power * size * _TICKS >= most)
        return step, ceil(most / step - 1e-9)

    @property
    def _pixels(self) -> float:
        """Height of one unit of value."""
        step, count = self._scale
        return (HEIGHT - _TOP) / (count * step)

    @property
    def bars(self) -> Iterator[tuple[Stack, list[tuple[float, float, float]]]]:
        """Each stack with horizontal position, top and height of its bars."""
        below = [0.0] * len(self.periods)
        pixels = self._pixels
        for stack in self.stacks:
            found = []
            for number, value in enumerate(stack.values):
                if value > 0:
                    below[number] += value
                    place = round((number + (1 - _BAR_PART) / 2) * self.width, 3)
                    found.append((place, round(HEIGHT - below[number] * pixels, 2), round(value * pixels, 2)))
            yield stack, found

    @property
    def width(self) -> float:
        """Width of a day, in percent."""
        return 100 / max(1, len(self.periods))

    @property
    def bar_width(self) -> float:
        """Width of a bar, in percent."""
        return round(self.width * _BAR_PART, 3)

    @property
    def labels(self) -> Iterator[tuple[float, str]]:
        """Horizontal position and text of each labelled day."""
        every = max(1, ceil(len(self.periods) / _LABELS))
        for number in range(0, len(self.periods), every):
            yield round((number + 0.5) * self.width, 3), self.periods[number]


def uses(report: FleetReport, currency: str) -> Chart | None:
    """Return a chart of the cost of GPUs per day by use; of hours if nothing has a price.

    The result is ``None`` for a report without days.
    """
    days = [parts(report, currency, number) for number in range(len(report.periods))]
    stacks = [Stack(name=name, look=look, values=tuple(day[look] for day in days)) for look, name in PARTS.items()]
    # An unused colour would only lengthen the legend.
    return _chart("uses", currency, report, [stack for stack in stacks if any(stack.values)])


def largest(
    everything: FleetReport, currency: str, named: Sequence[tuple[str, ReportLine]], *, more: bool
) -> Chart | None:
    """Return a chart of the named lines per day, and, with ``more``, of the sum of all others.

    Args:
        everything: Report on all lines, with its days.
        currency: Currency of the money; empty for hours.
        named: Names and lines with their days.
        more: Whether there are other lines.
    """
    drawn = [(name, line) for name, line in named if len(line.series) == len(everything.periods)]
    value = whole(currency)
    stacks = [
        Stack(name=name, look=str(number), values=_summed([line], everything, value))
        for number, (name, line) in enumerate(drawn, start=1)
    ]
    if more and stacks:
        of_named = [sum(values) for values in zip(*(stack.values for stack in stacks), strict=True)]
        of_all = zip(_summed(everything.held, everything, value), of_named, strict=True)
        others = tuple(max(0.0, every - these) for every, these in of_all)
        stacks.append(Stack(name="All others", look="others", values=others))
    return _chart("largest", currency, everything, stacks)


def _chart(name: str, currency: str, report: FleetReport, stacks: Sequence[Stack]) -> Chart | None:
    if not stacks or not report.periods:
        return None
    periods = tuple(day(period.start_seconds) for period in report.periods)
    return Chart(name=name, currency=currency, periods=periods, stacks=tuple(stacks))


def _summed(lines: Sequence[ReportLine], report: FleetReport, value: Value) -> tuple[float, ...]:
    """Return the sum of some lines by period."""
    with_days = [line.series for line in lines if line.series]
    return tuple(sum(value(series[index]) for series in with_days) for index in range(len(report.periods)))


def whole(currency: str) -> Value:
    """Return a function that returns the money of figures, or their hours without a currency."""
    unit = 1 if currency else HOUR_SECONDS
    return lambda figures: figures.amounts(currency).total / unit

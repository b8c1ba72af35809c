"""Divides a report's GPU-hours and money by what they were used for, from what was there to what was effective."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from exporter.cost.ledger import UNALLOCATED, UNATTRIBUTED, total_by_state
from exporter.cost.report import APART, FleetReport, ReportLine
from exporter.model import ByState

PARTS: Mapping[str, str] = {
    "effective": "Effective",
    "ineffective": "Ineffective",
    "unprofiled": "Active, not profiled",
    "idle": "Idle",
    "unknown": "Unknown",
    "unattributed": UNATTRIBUTED,
    "unallocated": UNALLOCATED,
}
"""What all GPU-seconds, and all money, consist of, in words: of owners by state, then what is nobody's."""


def parts(report: FleetReport, currency: str = "", period: int | None = None) -> dict[str, float]:
    """Return GPU-seconds, or money in a currency, by ``PARTS``; of one of the report's ``periods`` alone."""

    def amounts(line: ReportLine) -> ByState:
        return (line.figures if period is None else line.series[period]).amounts(currency)

    nobodys = [(line.key.kind, amounts(line).total) for line in report.apart]
    values = [value for _, value in total_by_state(map(amounts, report.held))]
    values += [sum(value for kind, value in nobodys if kind == wanted) for wanted in APART]
    return dict(zip(PARTS, values, strict=True))


MEANINGS: Mapping[str, str] = {
    "Active": "share x activity x time: a GPU that is half busy for an hour is half an active GPU-hour.",
    "Effective": "active time weighted by use of the resource nearest to its limit (arithmetic pipes, memory, links,"
    " video engines): at most so much of what the GPU can do. What is at a limit, as decoding at that of memory, is"
    " no waste.",
    "Unprofiled": "active time in which one of these resources was not measured: effective or not is not known.",
    "Idle": "held, measured, and not active. It belongs to its holder.",
    "Unknown": "held, and its activity could not be measured. It is never counted as idle.",
    UNALLOCATED: "parts of GPUs that nobody held.",
    UNATTRIBUTED: "GPUs that were held, or may have been, by an unknown holder.",
}
"""What the words for hours and money mean, in help and pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Funnel:
    """From what was there to what was used of it, in GPUs or money; each step is a part of the one before."""

    total: Annotated[float, "There and metered."]
    allocated: Annotated[float, "Held by owners."]
    active: Annotated[float, "Held and at work; a GPU that is half busy counts half."]
    effective: Annotated[float | None, "The profiled part of it, by use of its limit; null where nothing was profiled."]
    unprofiled: Annotated[float, "Active, and effective or not: that was not measured."]
    unknown: Annotated[float, "Held and not measured."]

    @property
    def profiled_ratio(self) -> float:
        """Part of what was active of which it was measured whether it was effective."""
        return 1 - self.unprofiled / self.active if self.active else 0.0


def funnel(report: FleetReport, currency: str = "", unit: float = 1.0) -> Funnel:
    """Return the funnel of money in a currency, or of GPU-seconds, in a unit."""
    held = report.owned.amounts(currency).scaled(1 / unit)
    return Funnel(
        total=report.total.amounts(currency).total / unit,
        allocated=held.total,
        active=held.active,
        effective=held.effective if held.profiled else None,
        unprofiled=held.unprofiled,
        unknown=held.unknown,
    )

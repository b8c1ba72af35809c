"""The report that every format, page and export shows: lines by dimension, what is apart, and how far to trust it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.report.fleet.values import Dimension, Failure, Figures, Filters, LineKey, Window

ShareIdle = Literal["none", "even", "weighted"]
"""What becomes of money that no owner's GPUs cost: shown apart, spread evenly over owners, or by their own money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One line. ``key`` has the dimensions of the report, and ``kind`` where it is none of an owner's."""

    key: LineKey
    figures: Figures
    shared: Mapping[str, float] = field(default_factory=dict)
    """By currency: money of others (idle, Unallocated) that was spread onto this line; not in ``figures``."""
    series: tuple[Figures, ...] = ()
    """The same, chunk by chunk of the report's ``periods``; empty where it was not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far a report can be trusted; at the foot of every format."""

    capacity_seconds: float
    """GPU-seconds that were metered; all lines must sum to it."""
    missing_seconds: float
    """What the lines lack of it (negative: have too much); 0 within rounding, or something is wrong."""
    expected_hours: int
    """Hours of the window, times clusters; those of a cluster that is new only from its first chunk on."""
    recorded_hours: int
    """For how many of them the ledger was recorded."""
    activity_coverage_ratio: float | None
    """Part of the held GPU-seconds whose activity was measured; ``None`` where nothing was held."""
    price_coverage_ratio: float | None
    """Part of all GPU-seconds that had a price; ``None`` where there are none."""
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def period_coverage_ratio(self) -> float | None:
        """Part of the hours that were recorded; ``None`` of a window without hours."""
        return self.recorded_hours / self.expected_hours if self.expected_hours else None

    @property
    def whole(self) -> bool:
        """Whether nothing is missing: every question answered, every second accounted for."""
        return not self.failures and not self.missing_seconds


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class FleetReport:
    """Lines sorted by money, dearest first, then by time; ``held`` are owners', ``apart`` nobody's that is known."""

    window: Window
    by: tuple[Dimension, ...]
    filters: Filters
    held: tuple[ReportLine, ...]
    apart: tuple[ReportLine, ...]
    """``Unattributed`` and ``Unallocated``, in this order, split by those of ``by`` that they have."""
    total: Figures
    """Of held and apart."""
    share_idle: ShareIdle = "none"
    share_unallocated: bool = False
    """Unallocated and Unattributed money is spread, too, in the manner of ``share_idle``."""
    periods: tuple[Window, ...] = ()
    """Of ``ReportLine.series``."""
    trust: Trust
    engine: str
    simulated: bool
    prices: str = ""
    """Which prices the money is at: empty for those of the time of use, else the price book of a re-pricing."""

    @property
    def currencies(self) -> tuple[str, ...]:
        """Every currency in which something was priced, in the order of the alphabet."""
        return tuple(sorted(self.total.money))

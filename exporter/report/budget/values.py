"""A budget as its file has it, and how it stands."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporter.report.fleet.values import Dimension, Window

Period = Literal["week", "month", "quarter", "year"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much the GPUs of an owner may cost in a period."""

    name: str
    currency: str
    amount: float
    period: Period
    owner: Mapping[Dimension, str] = field(default_factory=dict)
    """What it is for: any of cluster, namespace, team, labels; empty is for all that is held."""
    thresholds: tuple[float, ...] = (0.5, 0.8, 1.0)
    """Parts of the amount that pages and digests mark."""
    include_unallocated: bool = False
    """Counts Unallocated and Unattributed, too; only where it is for all, or a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """How a budget stands."""

    budget: Budget
    period: Window
    spent: float
    projected: float | None
    """Of the whole period; ``None`` while too little of it is known."""
    unpriced_seconds: float
    """GPU-seconds of the budget without a price: ``spent`` is too low while there are any."""
    as_of_seconds: float
    passed: tuple[float, ...] = ()
    """Thresholds that ``spent`` has reached."""
    known: bool = True
    """False where a part of the period could not be read, or its money is in other currencies: ``spent`` is not it."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the figures, one sentence each, with the mend."""
    unread: str = ""
    """Why a question about the period stayed unanswered that may be answered when it is asked again; else empty."""

"""What a reconciliation is made of: lines of bills, groups of like instances, and what explains their gaps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal, NamedTuple

from exporter.report.fleet.values import Failure, Window

Sort = Literal["use", "unused", "tax", "credit", "other"]
"""Of a line: time of an instance; capacity that was paid and not used; taxes; credits and discounts; the rest of it."""


class BillLine(NamedTuple):
    """One line of a bill, whoever wrote it."""

    start_seconds: int
    """Unix time."""
    days: int
    """How many days the line is for, at least 1."""
    sort: Sort
    account: str
    resource: str
    instance_type: str
    """Empty where the line names no instance type with GPUs."""
    region: str
    currency: str
    hours: Decimal
    """Of the instance; 0 where the line is not for time, or for that of a part of the instance."""
    listed: Decimal
    contracted: Decimal
    """After negotiated discounts, before commitments."""
    amortised: Decimal
    """What it cost in the end, what was paid ahead spread over the time it was paid for."""
    billed: Decimal
    """What is on the invoice."""
    gpus: int | None
    """Of one such instance, as the bill tells it."""
    gpu_hours: Decimal = Decimal(0)
    """Of the instance's GPUs, where these are a line of their own."""


ExplanationKind = Literal[
    "price_book",
    "negotiated",
    "commitments",
    "not_gpu",
    "unpriced",
    "not_recorded",
    "not_metered",
    "not_billed",
    "unused",
    "tax",
    "credit",
    "other",
    "unexplained",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A part of a gap. Money is what the bill has more than we have; negative where we have more."""

    kind: ExplanationKind
    words: str
    amount: Decimal
    """To the cent."""
    gpu_hours: float | None = None
    """That it is about, where it is about hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Like instances in one region and one currency; the explanations sum to the gap, to the cent."""

    instance_type: str
    region: str
    currency: str
    billed: Decimal
    """What the bill has for them: amortised, taxes and the rest of their lines included."""
    invoiced: Decimal
    """The same as it stands on the invoice."""
    metered: Decimal
    """What our ledger has."""
    billed_gpu_hours: float | None
    """``None`` where the bill tells no hours, or it is not known how many GPUs such an instance has."""
    metered_gpu_hours: float
    explanations: tuple[Explanation, ...]
    note: str = ""
    """One sentence: why it could not be compared; empty where it was."""

    @property
    def gap(self) -> Decimal:
        """What the bill has more, to the cent."""
        return self.billed - self.metered


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of the bill was looked at, in lines."""

    lines: int = 0
    gpu_lines: int = 0
    other_lines: int = 0
    """For something else than instances with GPUs."""
    outside_window: int = 0
    other_accounts: int = 0
    malformed: int = 0
    other_cost: Mapping[str, Decimal] = field(default_factory=dict)
    """By currency: amortised cost of ``other_lines``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """A bill beside the ledger."""

    window: Window
    groups: tuple[Group, ...]
    """Largest gap first."""
    scope: Scope
    expected_hours: int
    recorded_hours: int
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def currencies(self) -> tuple[str, ...]:
        """In which something was compared, in the order of the alphabet."""
        return tuple(sorted({group.currency for group in self.groups if not group.note}))

    def total(self, currency: str) -> tuple[Decimal, Decimal, Decimal]:
        """Of a currency: what is billed, what was metered, and the gap; of groups that were compared."""
        groups = [group for group in self.groups if group.currency == currency and not group.note]
        billed = sum((group.billed for group in groups), Decimal(0))
        metered = sum((group.metered for group in groups), Decimal(0))
        return billed, metered, billed - metered

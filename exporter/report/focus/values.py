"""What an export takes and what it tells beside its rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

FocusRow = dict[str, str]
"""One charge: texts by the name of the column, as version 1.4 calls it; what is absent is null."""
NULLS = frozenset(("", "NULL", "null"))
"""Texts that readers take for null: the specification's examples have ``NULL``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusSettings:
    """What the ledger cannot know, and the bill's reader wants to see."""

    billing_account_id: str = "on-prem"
    billing_account_name: str = ""
    billing_account_type: str = "Account"
    provider: str = "Internal"
    """Who provides the GPUs, hosts them and would send an invoice."""
    service_name: str = "GPU Compute"
    sub_account_type: str = "Cluster"
    restated: bool = False
    """The period was exported before: its charges are corrections."""
    filters: str = ""
    """In words, which part of the fleet's charges was asked for; empty for all of them."""
    created_seconds: float | None = None
    """Unix time for the metadata; ``None`` leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """GPU-hours that had no price, and so are no charge."""

    cluster: str
    node: str
    model: str
    gpu_hours: float


@dataclass(slots=True, kw_only=True)
class FocusSummary:
    """What was written, to be held against the ledger; filled while rows are made."""

    rows: int = 0
    origins: int = 0
    split_origins: int = 0
    cost: dict[str, Decimal] = field(default_factory=dict)
    """By currency: sum of EffectiveCost."""
    gpu_hours: Decimal = Decimal(0)
    """Sum of ConsumedQuantity."""
    unpriced_seconds: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """By cluster, node and model: seconds of lines without any price, which are in no row."""
    ledger_cost: Mapping[str, float] = field(default_factory=dict)
    ledger_gpu_hours: float = 0.0
    """Of all lines."""
    capacity_gpu_hours: float = 0.0

    @property
    def unpriced(self) -> tuple[Unpriced, ...]:
        """Most hours first."""
        ordered = sorted(self.unpriced_seconds.items(), key=lambda item: (-item[1], item[0]))
        return tuple(
            Unpriced(cluster=cluster, node=node, model=model, gpu_hours=seconds / 3600)
            for (cluster, node, model), seconds in ordered
        )

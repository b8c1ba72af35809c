"""FOCUS exports: settings, columns and values of a row."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from typing import Literal, cast

FocusRow = dict[str, str]
"""One charge: texts by the name of the column, as version 1.4 calls it; what is absent is null."""
NULLS = frozenset(("", "NULL", "null"))
"""Texts that readers take for null: the specification's examples have ``NULL``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusSettings:
    """What the ledger cannot know, and the bill's reader wants to see."""

    billing_account_id: str = "on-prem"
    billing_account_name: str = ""
    provider: str = "Internal"
    """Who provides the GPUs, hosts them and would send an invoice."""
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


Level = Literal["mandatory", "conditional", "recommended"]
Kind = Literal["string", "decimal", "price", "datetime", "json", "tags", "currency", "unit"]
"""What a value is: ``price`` is a decimal that is not negative, ``tags`` a JSON object of plain values."""
VERSIONS = ("1.2", "1.3", "1.4")
DEFAULT_VERSION = "1.4"


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusColumn:
    """One column."""

    name: str
    kind: Kind
    level: Level
    nullable: bool = True
    allowed: tuple[str, ...] = ()
    """The values that it can have; empty where any is allowed, or the specification lists many."""
    since: str
    """The version that brought it."""
    until: str = ""
    """The last version that has it; empty where the newest does."""

    def is_in(self, version: str) -> bool:
        """Whether a version has the column."""
        return self.since <= version and (not self.until or version <= self.until)


_LEVELS: dict[str, Level] = {"M": "mandatory", "C": "conditional", "R": "recommended"}
_ALLOWED: dict[str, tuple[str, ...]] = {
    "CapacityReservationStatus": ("Used", "Unused"),
    "ChargeCategory": ("Usage", "Purchase", "Tax", "Credit", "Adjustment"),
    "ChargeClass": ("Correction",),
    "ChargeFrequency": ("One-Time", "Recurring", "Usage-Based"),
    "CommitmentDiscountCategory": ("Spend", "Usage"),
    "CommitmentDiscountStatus": ("Used", "Unused"),
    "PricingCategory": ("Standard", "Dynamic", "Committed", "Other"),
}
# Name, kind, level, whether null is allowed (N) or not (X), first version, last version.
_TABLE = """
AllocatedMethodDetails json R N 1.3
AllocatedMethodId string C N 1.3
AllocatedResourceId string C N 1.3
AllocatedResourceName string C N 1.3
AllocatedTags tags C N 1.3
AvailabilityZone string R N 0.5
BilledCost decimal M X 0.5
BillingAccountId string M X 0.5
BillingAccountName string M N 0.5
BillingAccountType string C N 1.2
BillingCurrency currency M X 0.5
BillingPeriodEnd datetime M X 0.5
BillingPeriodStart datetime M X 0.5
CapacityReservationId string C N 1.1
CapacityReservationStatus string C N 1.1
ChargeCategory string M X 1.0
ChargeClass string M N 1.0
ChargeDescription string M N 1.0
ChargeFrequency string R X 1.0
ChargePeriodEnd datetime M X 0.5
ChargePeriodStart datetime M X 0.5
CommitmentDiscountCategory string C N 1.0
CommitmentDiscountId string C N 1.0
CommitmentDiscountName string C N 1.0
CommitmentDiscountQuantity decimal C N 1.1
CommitmentDiscountStatus string C N 1.0
CommitmentDiscountType string C N 1.0
CommitmentDiscountUnit unit C N 1.1
CommitmentProgramEligibilityDetails json C N 1.4
ConsumedQuantity decimal C N 1.0
ConsumedUnit unit C N 1.0
ContractApplied json C N 1.3
ContractedCost decimal M X 1.0
ContractedUnitPrice price C N 1.0
EffectiveCost decimal M X 1.0
HostProviderName string M N 1.3
InvoiceDetailId string C N 1.4
InvoiceId string R N 1.2
InvoiceIssuerName string M X 0.5
ListCost decimal M X 1.0
ListUnitPrice price C N 1.0
PricingCategory string C N 1.0
PricingCurrency currency C N 1.2
PricingCurrencyContractedUnitPrice price C N 1.2
PricingCurrencyEffectiveCost decimal C N 1.2
PricingCurrencyListUnitPrice price C N 1.2
PricingQuantity decimal M N 1.0
PricingUnit unit M N 1.0
ProviderName string M X 0.5 1.3
PublisherName string M X 0.5 1.3
RegionId string C N 1.0
RegionName string C N 1.0
ResourceId string C N 0.5
ResourceName string C N 0.5
ResourceType string C N 1.0
ServiceCategory string M X 0.5
ServiceName string M X 0.5
ServiceProviderName string M X 1.3
ServiceSubcategory string R X 1.1
SkuId string C N 1.0
SkuMeter string C N 1.1
SkuPriceDetails json C N 1.1
SkuPriceId string C N 1.0
SubAccountId string C N 0.5
SubAccountName string C N 0.5
SubAccountType string C N 1.2
Tags tags C N 1.0
"""


def _read(name: str, kind: str, level: str, null: str, since: str, until: str = "") -> FocusColumn:
    return FocusColumn(
        name=name,
        kind=cast("Kind", kind),
        level=_LEVELS[level],
        nullable=null == "N",
        allowed=_ALLOWED.get(name, ()),
        since=since,
        until=until,
    )


COLUMNS: tuple[FocusColumn, ...] = tuple(_read(*line.split()) for line in _TABLE.split("\n") if line)
"""Every column that some version from 1.2 on has, in the order of the alphabet."""

# In 1.2, which has no split charges, our files say the same in columns of their own.
SPLIT_COLUMNS = tuple(column.name for column in COLUMNS if column.name.startswith("Allocated"))
_OWN: tuple[tuple[Kind, str], ...] = (
    ("decimal", "ActiveCost ActiveRatio Coverage IdleCost UnknownCost UnpricedGpuHours"),
    ("string", "CapacityType Cluster GpuModel InstanceType Namespace Node SharingMode Simulated SplitConfidence"),
    ("string", "Team Workload WorkloadKind"),
)
OWN_COLUMNS: dict[str, Kind] = {f"x_{name}": kind for kind, names in _OWN for name in names.split()}
"""Columns of our own, which stand behind all of FOCUS', and what they hold."""


@cache
def columns_of(version: str) -> dict[str, FocusColumn]:
    """The columns of one of ``VERSIONS``, by name, in the order of the alphabet."""
    return {column.name: column for column in COLUMNS if column.is_in(version)}

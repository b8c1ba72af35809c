"""What the values of one row of a FOCUS file must be to each other."""

from collections.abc import Iterator, Mapping
from decimal import Decimal

from exporter.report.focus.categories import CATEGORY_OF

Row = Mapping[str, str]
"""Values that are not null and right by themselves, by column."""
Fault = tuple[str, str, str, str]
"""Column, rule, what is wrong, what is allowed."""

_CENT_PART = Decimal("1e-6")
_OWN_TOLERANCE = Decimal("1e-9")
# Right-hand columns are null where the left one is.
_FOLLOWERS: dict[str, tuple[str, ...]] = {
    "ResourceId": ("ResourceName", "ResourceType"),
    "SubAccountId": ("SubAccountName", "SubAccountType"),
    "RegionId": ("RegionName",),
    "CapacityReservationId": ("CapacityReservationStatus",),
    "CommitmentDiscountId": (
        "CommitmentDiscountCategory",
        "CommitmentDiscountName",
        "CommitmentDiscountQuantity",
        "CommitmentDiscountStatus",
        "CommitmentDiscountType",
        "CommitmentDiscountUnit",
    ),
    "SkuId": ("SkuMeter", "SkuPriceId"),
    "SkuPriceId": ("SkuPriceDetails", "ListUnitPrice", "ContractedUnitPrice"),
    "PricingQuantity": ("PricingUnit",),
    "ConsumedQuantity": ("ConsumedUnit",),
}
_TOGETHER = ("PricingQuantity", "ConsumedQuantity", "RegionId")
"""Whose first follower is not null, either, where they are not."""
_OF_USE_AND_PURCHASE = (
    "PricingQuantity",
    "PricingUnit",
    "SkuId",
    "SkuPriceId",
    "PricingCategory",
    "ContractedUnitPrice",
)


def faults(row: Row, present: frozenset[str]) -> Iterator[Fault]:
    """Every rule that the row breaks; ``present`` are the file's columns."""
    for check in (_periods, _category, _charge, _followers, _products, _kinds):
        yield from check(row, present)


def _periods(row: Row, _present: frozenset[str]) -> Iterator[Fault]:
    for period in ("BillingPeriod", "ChargePeriod"):
        start, end = row.get(f"{period}Start"), row.get(f"{period}End")
        if start and end and end <= start:
            yield f"{period}End", "ROW-1", f"{end} is not after {start}", f"a time after {period}Start"


def _category(row: Row, _present: frozenset[str]) -> Iterator[Fault]:
    subcategory, category = row.get("ServiceSubcategory"), row.get("ServiceCategory")
    if subcategory and category and CATEGORY_OF[subcategory] != category:
        what = f"'{subcategory}' is not one of '{category}'"
        yield "ServiceSubcategory", "ROW-2", what, f"ServiceCategory '{CATEGORY_OF[subcategory]}' with it"


def _charge(row: Row, present: frozenset[str]) -> Iterator[Fault]:
    category = row.get("ChargeCategory")
    is_correction = "ChargeClass" in row
    if category in {"Usage", "Purchase"} and not is_correction:
        for name in _OF_USE_AND_PURCHASE:
            if name in present and name not in row:
                yield name, "ROW-3", f"null in a charge of category {category}", "a value, unless it is a correction"
    if category == "Tax":
        for name in _OF_USE_AND_PURCHASE:
            if name in row:
                yield name, "ROW-3", "a value in a charge of category Tax", "null"
    if category == "Purchase" and row.get("ChargeFrequency") == "Usage-Based":
        yield "ChargeFrequency", "ROW-3", "a purchase is not Usage-Based", "One-Time, Recurring"
    yield from _consumption(row, present, category, is_correction=is_correction)


def _consumption(row: Row, present: frozenset[str], category: str | None, *, is_correction: bool) -> Iterator[Fault]:
    is_use = category == "Usage" and row.get("CommitmentDiscountStatus") != "Unused"
    for name in ("ConsumedQuantity", "ConsumedUnit"):
        if name not in present or category is None:
            continue
        if is_use and not is_correction and name not in row:
            yield name, "ROW-3", "null in a charge of category Usage", "a value, unless unused or a correction"
        if not is_use and not is_correction and name in row:
            yield name, "ROW-3", "a value where nothing was consumed", "null"


def _followers(row: Row, present: frozenset[str]) -> Iterator[Fault]:
    for leader, followers in _FOLLOWERS.items():
        if leader in present and leader not in row:
            for name in followers:
                if name in row:
                    yield name, "ROW-4", f"a value where {leader} is null", f"null, or a value in {leader}"
    for leader in _TOGETHER:
        follower = _FOLLOWERS[leader][0]
        if leader in row and follower in present and follower not in row:
            yield follower, "ROW-4", f"null where {leader} has a value", "a value"


def _products(row: Row, _present: frozenset[str]) -> Iterator[Fault]:
    quantity = row.get("PricingQuantity")
    for cost_name, price_name in (("ContractedCost", "ContractedUnitPrice"), ("ListCost", "ListUnitPrice")):
        cost, price = row.get(cost_name), row.get(price_name)
        if quantity is None or cost is None or price is None:
            continue
        product = Decimal(price) * Decimal(quantity)
        if abs(product - Decimal(cost)) > _CENT_PART * max(abs(product), Decimal(1)):
            what = f"{cost} is not {price_name} {price} x PricingQuantity {quantity}"
            yield cost_name, "ROW-5", what, "their product"


def _kinds(row: Row, _present: frozenset[str]) -> Iterator[Fault]:
    kinds = [row.get(name) for name in ("x_ActiveCost", "x_IdleCost", "x_UnknownCost")]
    cost = row.get("EffectiveCost")
    known = [Decimal(value) for value in kinds if value is not None]
    if cost is not None and len(known) == len(kinds):
        total = sum(known, Decimal(0))
        if abs(total - Decimal(cost)) > _OWN_TOLERANCE:
            yield "EffectiveCost", "ROW-6", f"{cost}, and its parts sum to {total}", "the sum of its parts"

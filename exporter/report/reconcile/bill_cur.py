"""Lines of an AWS Cost and Usage Report, old form or new: what each type of line costs when it is amortised."""

import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal

from exporter.report.reconcile.columns import MalformedError, days_between, moment, needed, number
from exporter.report.reconcile.instances import instance_type_in
from exporter.report.reconcile.values import BillLine, Sort

NEEDED = frozenset(("line_item_unblended_cost", "line_item_usage_start_date", "line_item_line_item_type"))
"""Columns by which such a file is known, as the new form names them."""
_BEFORE_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_IS_TIME = re.compile(r"(?:Box|Spot|Dedicated|Host|HeavyUsage|Reservation)")
_UNUSED_TIME = re.compile(r"Unused(?:Box|Ded)")
_SORTS: dict[str, Sort] = {
    "Usage": "use",
    "SavingsPlanCoveredUsage": "use",
    "DiscountedUsage": "use",
    "SavingsPlanRecurringFee": "unused",
    "RIFee": "unused",
    "Tax": "tax",
    "Credit": "credit",
    "Refund": "credit",
    "BundledDiscount": "credit",
    "EdpDiscount": "credit",
    "PrivateRateDiscount": "credit",
    "RiVolumeDiscount": "credit",
    "Discount": "credit",
}
_AMORTISED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "SavingsPlanCoveredUsage": (("savings_plan_savings_plan_effective_cost",), ()),
    "SavingsPlanRecurringFee": (("savings_plan_total_commitment_to_date",), ("savings_plan_used_commitment",)),
    "DiscountedUsage": (("reservation_effective_cost",), ()),
    "RIFee": (
        ("reservation_unused_amortized_upfront_fee_for_billing_period", "reservation_unused_recurring_fee"),
        (),
    ),
}
"""By type of line: columns that are added, and columns that are taken away; of others the unblended cost."""
_RESERVATION = ("reservation_reservation_arn", "reservation_reservation_a_r_n")
_NOTHING = frozenset(("SavingsPlanNegation", "SavingsPlanUpfrontFee"))
"""What amortised cost has in other lines already."""


def new_name(name: str) -> str:
    """``lineItem/UsageStartDate`` as ``line_item_usage_start_date``."""
    return "_".join(_BEFORE_CAPITAL.sub("_", part).lower() for part in name.split("/"))


def line_of(row: Mapping[str, str], known: Collection[str]) -> BillLine:
    """One row, its columns named as in the new form; ``known`` are types of instances that have GPUs.

    Raises:
        MalformedError: A field that is needed cannot be read.
    """
    start = moment(row, "line_item_usage_start_date")
    end = moment(row, "line_item_usage_end_date") if row.get("line_item_usage_end_date") else start
    kind = row.get("line_item_line_item_type", "")
    unblended = needed(row, "line_item_unblended_cost")
    product = _product(row.get("product", ""))
    usage_type = row.get("line_item_usage_type", "")
    sort = _sort(kind, usage_type)
    amortised = _amortised(row, kind, unblended)
    public = number(row, "pricing_public_on_demand_cost") if sort == "use" else Decimal(0)
    currency = row.get("line_item_currency_code", "").strip()
    if not currency:
        raise MalformedError("line_item_currency_code: is empty")
    return BillLine(
        start_seconds=int(start.timestamp()),
        days=days_between(start, end),
        sort=sort,
        account=row.get("line_item_usage_account_id", ""),
        resource=row.get("line_item_resource_id", ""),
        instance_type=_instance_type(row, product, usage_type, known),
        region=row.get("product_region_code") or row.get("product_region") or product.get("region", ""),
        currency=currency,
        hours=number(row, "line_item_usage_amount") if sort == "use" else Decimal(0),
        listed=public or amortised,
        contracted=_contracted(kind, unblended, public, amortised),
        amortised=amortised,
        billed=unblended,
        gpus=_count(row.get("product_gpu") or product.get("gpu", "")),
    )


def _sort(kind: str, usage_type: str) -> Sort:
    sort = _SORTS.get(kind, "other")
    if sort == "use":
        if _UNUSED_TIME.search(usage_type):
            return "unused"
        return "use" if _IS_TIME.search(usage_type) else "other"
    return sort


def _amortised(row: Mapping[str, str], kind: str, unblended: Decimal) -> Decimal:
    if kind in _NOTHING or (kind == "Fee" and any(row.get(name) for name in _RESERVATION)):
        return Decimal(0)  # what was paid ahead is in the lines of its use
    plus, minus = _AMORTISED.get(kind, ((), ()))
    if not plus:
        return unblended
    return sum((number(row, name) for name in plus), Decimal(0)) - sum(
        (number(row, name) for name in minus), Decimal(0)
    )


def _contracted(kind: str, unblended: Decimal, public: Decimal, amortised: Decimal) -> Decimal:
    if kind == "DiscountedUsage":
        return public or amortised  # its unblended cost is without what was paid ahead
    return unblended if kind in {"Usage", "SavingsPlanCoveredUsage"} else amortised


def _instance_type(row: Mapping[str, str], product: Mapping[str, str], usage_type: str, known: Collection[str]) -> str:
    return instance_type_in(
        known,
        row.get("product_instance_type", ""),
        product.get("instance_type", ""),
        usage_type,
        row.get("line_item_line_item_description", ""),
    )


def _product(text: str) -> dict[str, str]:
    try:
        found = json.loads(text) if text.startswith("{") else {}
    except (ValueError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def _count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 and int(text) else None  # noqa: PLR2004

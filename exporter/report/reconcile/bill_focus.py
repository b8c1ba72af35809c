"""Lines of a bill in the FOCUS format, any version from 1.0 on, whichever cloud wrote it."""

import json
from collections.abc import Collection, Mapping
from decimal import Decimal

from exporter.report.reconcile.columns import MalformedError, days_between, moment, needed, number
from exporter.report.reconcile.instances import instance_type_in
from exporter.report.reconcile.values import BillLine, Sort

NEEDED = frozenset(("BilledCost", "EffectiveCost", "ChargePeriodStart", "ChargePeriodEnd", "BillingCurrency"))
"""Columns by which such a file is known."""
_MOST_GPUS = 1024
_HOUR_UNITS = frozenset(("hour", "hours", "hrs", "hr", "1 hour", "1 hours", "compute-hours", "instance-hours"))
_SORTS: dict[str, Sort] = {"Usage": "use", "Tax": "tax", "Credit": "credit", "Adjustment": "credit"}


def line_of(row: Mapping[str, str], known: Collection[str]) -> BillLine:
    """One row; ``known`` are types of instances that have GPUs.

    Raises:
        MalformedError: A field that is needed cannot be read.
    """
    start, end = moment(row, "ChargePeriodStart"), moment(row, "ChargePeriodEnd")
    amortised, billed = needed(row, "EffectiveCost"), needed(row, "BilledCost")
    details = _details(row.get("SkuPriceDetails", ""))
    instance_type = _instance_type(row, details, known)
    hours = _hours(row)
    currency = row.get("BillingCurrency", "").strip()
    if not currency:
        raise MalformedError("BillingCurrency: is empty")
    return BillLine(
        start_seconds=int(start.timestamp()),
        days=days_between(start, end),
        sort=_sort(row, hours),
        account=row.get("SubAccountId") or row.get("BillingAccountId", ""),
        resource=row.get("ResourceId", ""),
        instance_type=instance_type,
        region=row.get("RegionId", ""),
        currency=currency,
        hours=hours,
        listed=number(row, "ListCost") or amortised,
        contracted=number(row, "ContractedCost") or amortised,
        amortised=amortised,
        billed=billed,
        gpus=_count(details.get("GpuCount")),
    )


def _sort(row: Mapping[str, str], hours: Decimal) -> Sort:
    if "Unused" in {row.get("CommitmentDiscountStatus"), row.get("CapacityReservationStatus")}:
        return "unused"
    sort = _SORTS.get(row.get("ChargeCategory", ""), "other")
    # What an instance costs beside its time: transfer, disks, requests.
    return "other" if sort == "use" and not hours else sort


def _hours(row: Mapping[str, str]) -> Decimal:
    for of in ("Consumed", "Pricing"):
        if row.get(f"{of}Unit", "").strip().lower() in _HOUR_UNITS:
            return number(row, f"{of}Quantity")
    return Decimal(0)


def _instance_type(row: Mapping[str, str], details: Mapping[str, object], known: Collection[str]) -> str:
    named = details.get("InstanceType")
    return instance_type_in(
        known,
        named if isinstance(named, str) else "",
        row.get("x_InstanceType", ""),
        row.get("x_UsageType", ""),
        row.get("SkuMeter", ""),
        row.get("SkuPriceDetails", ""),
        row.get("x_SkuDetails", ""),
        row.get("ChargeDescription", ""),
    )


def _details(text: str) -> dict[str, object]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(value: object) -> int | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= _MOST_GPUS:
        return int(value)
    return None

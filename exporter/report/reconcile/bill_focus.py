"""Lines of a bill in the FOCUS format, any version from 1.0 on, whichever cloud wrote it."""

import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import NamedTuple

from exporter.report.reconcile.columns import MalformedError, days_between, moment, needed, number
from exporter.report.reconcile.instances import instance_type_in, is_googles
from exporter.report.reconcile.values import BillLine, Sort

NEEDED = frozenset(("BilledCost", "EffectiveCost", "ChargePeriodStart", "ChargePeriodEnd", "BillingCurrency"))
"""Columns by which such a file is known."""
_MOST_GPUS = 1024
_HOUR_UNITS = frozenset(("hour", "hours", "hrs", "hr", "1 hour", "1 hours", "compute-hours", "instance-hours"))
_GOOGLE = "google"
# Not the publisher: Google publishes images that others' instances run.
_PROVIDERS = ("ServiceProviderName", "ProviderName")
# Google names a SKU "Nvidia H100 80GB GPU attached to ...", "A3 Instance Core running in ...", "... Instance Ram ...".
_SKU_NAMES = ("SkuMeter", "x_SkuDescription", "ChargeDescription")
_GPU_PART = re.compile(r"\bGPUs?\b", re.IGNORECASE)
_REST_PART = re.compile(r"\b(?:core|ram)\b", re.IGNORECASE)
# Licence fees name parts, too ("(GPU cost)"), and commitments name what they are for.
_NO_PART = re.compile(r"licen[cs]|commitment", re.IGNORECASE)
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
    time = _googles_time(row) if _is_googles(row, instance_type) else _time(row)
    currency = row.get("BillingCurrency", "").strip()
    if not currency:
        raise MalformedError("BillingCurrency: is empty")
    return BillLine(
        start_seconds=int(start.timestamp()),
        days=days_between(start, end),
        sort=_sort(row, is_time=time.is_time),
        account=row.get("SubAccountId") or row.get("BillingAccountId", ""),
        resource=row.get("ResourceId", ""),
        instance_type=instance_type,
        region=row.get("RegionId", ""),
        currency=currency,
        hours=time.hours,
        listed=number(row, "ListCost") or amortised,
        contracted=number(row, "ContractedCost") or amortised,
        amortised=amortised,
        billed=billed,
        gpus=_count(details.get("GpuCount")),
        gpu_hours=time.gpu_hours,
    )


class _Time(NamedTuple):
    """What a line tells of time."""

    is_time: bool
    """Whether it is for the time of an instance, or of a part of it."""
    hours: Decimal = Decimal(0)
    """Of the instance."""
    gpu_hours: Decimal = Decimal(0)


def _time(row: Mapping[str, str]) -> _Time:
    hours = _hours(row)
    return _Time(bool(hours), hours)


def _googles_time(row: Mapping[str, str]) -> _Time:
    """Of an instance that is billed as cores, memory and GPUs, each by the hour: only the GPUs' hours are known."""
    name = " ".join(row.get(column, "") for column in _SKU_NAMES)
    hours = _hours(row)
    if _NO_PART.search(name):
        return _Time(is_time=False)
    if _GPU_PART.search(name):
        return _Time(bool(hours), gpu_hours=hours)
    return _Time(bool(hours or _REST_PART.search(name)))


def _is_googles(row: Mapping[str, str], instance_type: str) -> bool:
    """By the type, or by who provides it where a map ties the resource to its node."""
    return is_googles(instance_type) or any(_GOOGLE in row.get(column, "").lower() for column in _PROVIDERS)


def _sort(row: Mapping[str, str], *, is_time: bool) -> Sort:
    if "Unused" in {row.get("CommitmentDiscountStatus"), row.get("CapacityReservationStatus")}:
        return "unused"
    sort = _SORTS.get(row.get("ChargeCategory", ""), "other")
    # What an instance costs beside its time: transfer, disks, requests.
    return "other" if sort == "use" and not is_time else sort


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

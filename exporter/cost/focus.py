"""Writes a FOCUS file and its metadata file; the columns of every version."""

import csv
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from exporter import __version__
from exporter.cost.focus_rows import (
    METHOD_ID,
    NULLS,
    PLACES,
    TAG_PREFIX,
    UNIT,
    FocusRow,
    FocusSettings,
    FocusSummary,
    focus_rows,
    written,
)
from exporter.cost.ledger import FleetLedger, total_of
from exporter.cost.report_csv import csv_stream, encodable, guarded
from exporter.errors import ConfigError
from exporter.model.formatting import iso

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


COLUMNS: tuple[FocusColumn, ...] = tuple(
    _read(*line.split())
    for line in Path(__file__).with_name("focus_columns.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
"""Every column that some version from 1.2 on has, in the order of the alphabet."""

# In 1.2, which has no split charges, our files say the same in columns of their own.
SPLIT_COLUMNS = tuple(column.name for column in COLUMNS if column.name.startswith("Allocated"))
_OWN: tuple[tuple[Kind, str], ...] = (
    ("decimal", "ActiveCost ActiveEffectiveCost ActiveIneffectiveCost ActiveUnprofiledCost ActiveRatio Coverage"),
    ("decimal", "EffectiveRatio IdleCost ProfiledRatio UnknownCost UnpricedGpuHours"),
    ("string", "CapacityType Cluster GpuModel InstanceType Namespace Node SharingMode Simulated SplitConfidence"),
    ("string", "Team Workload WorkloadKind"),
)
OWN_COLUMNS: dict[str, Kind] = {f"x_{name}": kind for kind, names in _OWN for name in names.split()}
"""Columns of our own, which stand behind all of FOCUS', and what they hold."""


@cache
def columns_of(version: str) -> dict[str, FocusColumn]:
    """The columns of one of ``VERSIONS``, by name, in the order of the alphabet."""
    return {column.name: column for column in COLUMNS if column.is_in(version)}


_SCHEMA_SPACE = uuid.UUID("7a2d2f4e-2c0c-5a67-9f55-3a8b8f9f6a10")
# Conditional columns for what a meter of GPUs never has.
_NEVER = frozenset(
    """
    CapacityReservationId CapacityReservationStatus CommitmentDiscountQuantity CommitmentDiscountUnit
    CommitmentProgramEligibilityDetails ContractApplied InvoiceDetailId ListUnitPrice
    PricingCurrencyContractedUnitPrice PricingCurrencyEffectiveCost PricingCurrencyListUnitPrice
    """.split()  # noqa: SIM905 - names read better in lines
)
_OF_METADATA = {
    "string": "STRING",
    "currency": "STRING",
    "unit": "STRING",
    "json": "JSON",
    "tags": "JSON",
    "datetime": "DATETIME",
    "decimal": "DECIMAL",
    "price": "DECIMAL",
}
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_METHOD = (
    "Each owner's share of a GPU times the time it held it, hour by hour at the price in effect: a whole GPU counts 1,"
    " a MIG instance its slices, a replica of a shared GPU one part of all its replicas (x_SharingMode tells which)."
    " AllocatedRatio is the owner's part of the origin's EffectiveCost."
)
_ORIGIN = (
    "The origin of a split charge is the time of all GPUs of one model on one node over one charge period. It is left"
    " out: only its parts are in the file, and they sum to it. What no known owner held is a part without an"
    " AllocatedResourceId; x_WorkloadKind tells Unallocated from Unattributed."
)


def write_focus(
    ledger: FleetLedger,
    stream: TextIO,
    *,
    version: str = DEFAULT_VERSION,
    settings: FocusSettings | None = None,
    metadata_stream: TextIO | None = None,
) -> FocusSummary:
    """Write the ledger as CSV, and its metadata as JSON where there is a stream for them.

    Args:
        ledger: Read by ``FOCUS_DIMENSIONS``.
        stream: For the CSV; a null is an empty field.
        version: One of ``VERSIONS``; in 1.2, which knows no split charges, what it lacks stands in x_ columns.
        settings: What the ledger does not know.
        metadata_stream: For the metadata.

    Returns:
        What was written, and which GPU-hours were not because they had no price: for standard error.

    Raises:
        ConfigError: No such version.
        ExporterError: The ledger was read by too few dimensions.
    """
    if version not in VERSIONS:
        raise ConfigError(f"focus-version: '{version}' is not known; allowed: {', '.join(VERSIONS)}")
    own = settings or FocusSettings()
    summary = FocusSummary()
    header = header_of(version)
    writer = csv.writer(csv_stream(stream), lineterminator="\n")
    writer.writerow(header)
    simulated = "true" if ledger.simulated else ""
    for row in focus_rows(ledger, own, summary):
        row["x_Simulated"] = simulated
        writer.writerow(_fields(row, header))
    if metadata_stream is not None:
        document = _metadata(ledger, version, own, summary)
        metadata_stream.write(encodable(json.dumps(document, ensure_ascii=False, indent=2)) + "\n")
    return summary


def header_of(version: str) -> tuple[str, ...]:
    """The columns of our files: FOCUS' in the order of the alphabet, then those of our own."""
    of_focus = [name for name in columns_of(version) if name not in _NEVER]
    own = list(OWN_COLUMNS)
    if "AllocatedMethodId" not in of_focus:
        own += [f"x_{name}" for name in SPLIT_COLUMNS]
    return (*of_focus, *sorted(own))


def _fields(row: FocusRow, header: tuple[str, ...]) -> Iterator[str]:
    for name in header:
        text = row.get(name)
        if text is None:
            text = row.get(name.removeprefix("x_"), "")
        yield _plain(text)


def _plain(text: str) -> str:
    """Text that a spreadsheet does not take for a formula, no reader for null, and that UTF-8 and CSV have."""
    if text and text in NULLS:
        return f"'{text}"
    return text if _NUMBER.fullmatch(text) else guarded(text)


def _metadata(ledger: FleetLedger, version: str, settings: FocusSettings, summary: FocusSummary) -> dict[str, Any]:
    header = header_of(version)
    schema: dict[str, Any] = {
        "SchemaId": str(uuid.uuid5(_SCHEMA_SPACE, f"{version} {' '.join(header)}")),
        "FocusVersion": version,
        "DataGeneratorVersion": __version__,
        "ColumnDefinition": [_definition(name, version) for name in header],
    }
    if settings.created_seconds is not None:
        schema["CreationDate"] = iso(settings.created_seconds)
    return {
        "DataGenerator": {"DataGenerator": "gpu-cost-exporter"},
        "Schema": schema,
        "x_Window": {
            "Start": iso(ledger.window.start_seconds),
            "End": iso(ledger.window.end_seconds),
            "Granularity": "Daily",
        },
        "x_Filter": settings.filters or None,
        "x_OriginCharges": _ORIGIN,
        "x_AllocationMethods": [{"AllocatedMethodId": METHOD_ID, "Description": _METHOD, "UsageUnit": UNIT}],
        "x_BilledCost": "0 on every row: this is metered cost, not an invoice; EffectiveCost is the column to sum.",
        "x_ListCost": "Equal to ContractedCost: the ledger holds what was paid, not what lists ask.",
        "x_TagPrefix": TAG_PREFIX,
        "x_Coverage": _coverage(ledger),
        "x_Conservation": _conservation(summary),
        "x_Unpriced": [
            {"Cluster": one.cluster, "Node": one.node, "Model": one.model, "GpuHours": round(one.gpu_hours, PLACES)}
            for one in summary.unpriced
        ],
        "x_Failures": [
            {
                "Start": iso(failure.window.start_seconds),
                "End": iso(failure.window.end_seconds),
                "What": failure.what,
                "Reason": failure.reason,
            }
            for failure in ledger.failures
        ],
        "x_Notes": list(ledger.notes),
        "x_Engine": ledger.engine,
        "x_Simulated": ledger.simulated,
    }


def _definition(name: str, version: str) -> dict[str, Any]:
    column = columns_of(version).get(name)
    inner = columns_of(DEFAULT_VERSION).get(name.removeprefix("x_"))
    kind = column.kind if column else inner.kind if inner else OWN_COLUMNS[name]
    definition: dict[str, Any] = {"ColumnName": name, "DataType": _OF_METADATA[kind]}
    if kind in {"decimal", "price"}:
        definition["NumberScale"] = PLACES
    if kind == "tags":
        definition["ProviderTagPrefixes"] = [TAG_PREFIX]
    return definition


def _coverage(ledger: FleetLedger) -> dict[str, Any]:
    clusters = {name for chunk in ledger.chunks for name in chunk.recorded_hours}
    recorded = sum(sum(chunk.recorded_hours.values()) for chunk in ledger.chunks)
    total = total_of(figures for chunk in ledger.chunks for figures in chunk.lines.values())
    held, measured = total.seconds.total, total.seconds.measured
    priced = held - total.unpriced_seconds
    return {
        "HoursOfWindow": ledger.window.hours * max(len(clusters), 1),
        "HoursRecorded": recorded,
        "ActivityRatio": round(measured / held, 6) if held else None,
        "PriceRatio": round(priced / held, 6) if held else None,
    }


def _conservation(summary: FocusSummary) -> dict[str, Any]:
    unpriced = sum(one.gpu_hours for one in summary.unpriced)
    return {
        "Rows": summary.rows,
        "Origins": summary.origins,
        "SplitOrigins": summary.split_origins,
        "EffectiveCost": {currency: written(cost) for currency, cost in sorted(summary.cost.items())},
        "LedgerCost": {currency: round(cost, PLACES) for currency, cost in summary.ledger_cost.items()},
        "ConsumedGpuHours": written(summary.gpu_hours),
        "UnpricedGpuHours": round(unpriced, PLACES),
        "LedgerGpuHours": round(summary.ledger_gpu_hours, PLACES),
        "MeteredGpuHours": round(summary.capacity_gpu_hours, PLACES),
    }

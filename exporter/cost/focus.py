"""Writes a FOCUS file and its metadata file; the columns of every version."""

import csv
import json
import re
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, cast

from exporter import __version__
from exporter.cost.focus_rows import (
    METHOD_ID,
    NULLS,
    PLACES,
    TAG_PREFIX,
    UNIT,
    FocusRow,
    FocusSettings,
    FocusSums,
    focus_rows,
    unpriced_hours,
    written,
)
from exporter.cost.ledger import Figures, FleetLedger, Window, total_of
from exporter.cost.report_csv import csv_stream, encodable, guarded
from exporter.model.formatting import iso

Kind = Literal["string", "decimal", "price", "datetime", "json", "tags", "currency", "unit"]
"""What a value is: ``price`` is a decimal that is not negative, ``tags`` a JSON object of plain values."""
VERSIONS = ("1.2", "1.3", "1.4")
DEFAULT_VERSION = "1.4"


class FocusColumn(NamedTuple):
    """One column, as ``focus_columns.txt`` has it."""

    name: str
    kind: Kind
    level: str
    """``mandatory``, ``conditional``, ``recommended``; ``own`` of those that FOCUS has not."""
    nullable: bool
    is_ours: bool
    """Whether our files have it."""
    since: str
    """The version that brought it."""
    until: str
    """The last version that has it; ``-`` where the newest does."""
    allowed: tuple[str, ...]
    """The values that it can have; empty where any is allowed, or the specification lists many."""


def _read(
    name: str, kind: str, level: str, null: str, ours: str, since: str, until: str = "-", *allowed: str
) -> FocusColumn:
    return FocusColumn(name, cast("Kind", kind), level, null == "may", ours == "yes", since, until, allowed)


_COLUMNS: tuple[FocusColumn, ...] = tuple(
    _read(*line.split())
    for line in Path(__file__).with_name("focus_columns.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
COLUMNS = tuple(column for column in _COLUMNS if column.level != "own")
"""Every column that some version from 1.2 on has, in alphabetical order."""
OWN_COLUMNS = {column.name: column.kind for column in _COLUMNS if column.level == "own"}
"""Columns of our own, and what they hold."""
# In 1.2, which has no split charges, our files say the same in columns of their own.
SPLIT_COLUMNS = tuple(column.name for column in COLUMNS if column.name.startswith("Allocated"))


@cache
def columns_of(version: str) -> dict[str, FocusColumn]:
    """Return the columns of one of ``VERSIONS`` by name, in alphabetical order."""
    return {
        column.name: column
        for column in COLUMNS
        if column.since <= version and (column.until == "-" or version <= column.until)
    }


_SCHEMA_SPACE = uuid.UUID("7a2d2f4e-2c0c-5a67-9f55-3a8b8f9f6a10")
_OF_METADATA = {"currency": "STRING", "unit": "STRING", "tags": "JSON", "price": "DECIMAL"}
"""Types in the metadata of kinds that it has no type for."""
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
) -> None:
    """Write the ledger as CSV, and its metadata as JSON where there is a stream for them.

    Args:
        ledger: Read by ``FOCUS_DIMENSIONS``.
        stream: For the CSV; a null is an empty field.
        version: One of ``VERSIONS``; in 1.2, which knows no split charges, what it lacks stands in x_ columns.
        settings: What the ledger does not know.
        metadata_stream: For the metadata.
    """
    own = settings or FocusSettings()
    sums = FocusSums()
    header = header_of(version)
    writer = csv.writer(csv_stream(stream), lineterminator="\n")
    writer.writerow(header)
    simulated = "true" if ledger.simulated else ""
    for row in focus_rows(ledger, own, sums):
        row["x_Simulated"] = simulated
        writer.writerow(_fields(row, header))
    if metadata_stream is not None:
        document = _metadata(ledger, version, own, sums)
        metadata_stream.write(encodable(json.dumps(document, ensure_ascii=False, indent=2)) + "\n")


def header_of(version: str) -> tuple[str, ...]:
    """Return the columns of our files: FOCUS' in alphabetical order, then our own."""
    of_focus = [name for name, column in columns_of(version).items() if column.is_ours]
    split = () if "AllocatedMethodId" in of_focus else (f"x_{name}" for name in SPLIT_COLUMNS)
    return (*of_focus, *sorted((*OWN_COLUMNS, *split)))


def _fields(row: FocusRow, header: tuple[str, ...]) -> Iterator[str]:
    for name in header:
        text = row.get(name)
        if text is None:
            text = row.get(name.removeprefix("x_"), "")
        yield _plain(text)


def _plain(text: str) -> str:
    """Return text that is no formula for a spreadsheet, no null for a reader, and valid in UTF-8 and CSV."""
    if text and text in NULLS:
        return f"'{text}"
    return text if _NUMBER.fullmatch(text) else guarded(text)


def _metadata(ledger: FleetLedger, version: str, settings: FocusSettings, sums: FocusSums) -> dict[str, Any]:
    header = header_of(version)
    total = total_of(figures for chunk in ledger.chunks for figures in chunk.lines.values())
    metered = sum(sum(chunk.capacity_seconds.values()) for chunk in ledger.chunks)
    unpriced = unpriced_hours(ledger)
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
        "x_Window": {**_period(ledger.window), "Granularity": "Daily"},
        "x_Filter": settings.filters or None,
        "x_OriginCharges": _ORIGIN,
        "x_AllocationMethods": [{"AllocatedMethodId": METHOD_ID, "Description": _METHOD, "UsageUnit": UNIT}],
        "x_BilledCost": "0 on every row: this is metered cost, not an invoice; EffectiveCost is the column to sum.",
        "x_ListCost": "Equal to ContractedCost: the ledger holds what was paid, not what lists ask.",
        "x_TagPrefix": TAG_PREFIX,
        "x_Coverage": _coverage(ledger, total),
        "x_Conservation": {
            "Rows": sums.rows,
            "Origins": sums.origins,
            "SplitOrigins": sums.split_origins,
            "EffectiveCost": {currency: written(cost) for currency, cost in sorted(sums.cost.items())},
            "LedgerCost": {code: round(money.total, PLACES) for code, money in sorted(total.money.items())},
            "ConsumedGpuHours": written(sums.gpu_hours),
            "UnpricedGpuHours": round(sum(unpriced.values()), PLACES),
            "LedgerGpuHours": round(total.seconds.total / 3600, PLACES),
            "MeteredGpuHours": round(metered / 3600, PLACES),
        },
        "x_Unpriced": [
            {"Cluster": cluster, "Node": node, "Model": model, "GpuHours": round(count, PLACES)}
            for (cluster, node, model), count in unpriced.items()
        ],
        "x_Failures": [
            {**_period(failure.window), "What": failure.what, "Reason": failure.reason} for failure in ledger.failures
        ],
        "x_Notes": list(ledger.notes),
        "x_Engine": ledger.engine,
        "x_Simulated": ledger.simulated,
    }


def _period(window: Window) -> dict[str, str]:
    return {"Start": iso(window.start_seconds), "End": iso(window.end_seconds)}


def _definition(name: str, version: str) -> dict[str, Any]:
    column = columns_of(version).get(name)
    inner = columns_of(DEFAULT_VERSION).get(name.removeprefix("x_"))
    kind = column.kind if column else inner.kind if inner else OWN_COLUMNS[name]
    definition: dict[str, Any] = {"ColumnName": name, "DataType": _OF_METADATA.get(kind, kind.upper())}
    if kind in {"decimal", "price"}:
        definition["NumberScale"] = PLACES
    if kind == "tags":
        definition["ProviderTagPrefixes"] = [TAG_PREFIX]
    return definition


def _coverage(ledger: FleetLedger, total: Figures) -> dict[str, Any]:
    clusters = {name for chunk in ledger.chunks for name in chunk.recorded_hours}
    held = total.seconds.total
    return {
        "HoursOfWindow": ledger.window.hours * max(len(clusters), 1),
        "HoursRecorded": sum(sum(chunk.recorded_hours.values()) for chunk in ledger.chunks),
        "ActivityRatio": round(total.seconds.measured / held, 6) if held else None,
        "PriceRatio": round((held - total.unpriced_seconds) / held, 6) if held else None,
    }

"""Writes a fleet's ledger as FOCUS charges, split among the holders of a GPU, and the metadata of the file."""

import csv
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, cast

from exporter import __version__
from exporter.cost.dimensions import APART, Dimension, LineKey
from exporter.cost.ledger import Figures, FleetLedger, total_of
from exporter.cost.render import csv_stream, encodable, guarded
from exporter.cost.report import settled
from exporter.cost.window import Window, period_at
from exporter.model.attribution import NodeFacts
from exporter.model.formatting import iso
from exporter.model.ledger import ByState

FocusRow = dict[str, str]
"""One charge: texts by column name of version 1.4; an absent column is null."""
NULLS = frozenset(("", "NULL", "null"))
"""Texts that readers interpret as null; examples in the specification use ``NULL``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusSettings:
    """Values for a bill that the ledger does not contain."""

    billing_account: str = "on-prem"
    billing_account_name: str = ""
    provider: str = "Internal"
    """Name of the provider that hosts the GPUs and issues the invoice."""
    restated: bool = False
    """Whether the period was exported before; its charges are then corrections."""
    filters: str = ""
    """Text of the filters on the fleet's charges; empty for all charges."""
    created_seconds: float | None = None
    """Unix time for the metadata; ``None`` omits it."""


@dataclass(slots=True, kw_only=True)
class FocusSums:
    """Sums over the written rows, for comparison with the ledger."""

    rows: int = 0
    origins: int = 0
    split_origins: int = 0
    cost: dict[str, Decimal] = field(default_factory=dict)
    """By currency: sum of EffectiveCost."""
    gpu_hours: Decimal = Decimal(0)
    """Sum of ConsumedQuantity."""


PLACES = 10
"""Decimals of money and hours."""
RATIO_PLACES = 12
_WIDE = Context(prec=60, rounding=ROUND_HALF_EVEN)


def exact(value: float) -> Decimal:
    """Return the shortest decimal that means the float."""
    return Decimal(repr(value))


def rounded(value: Decimal, places: int = PLACES) -> Decimal:
    """Return the value rounded to ``places`` decimals."""
    return value.quantize(Decimal(1).scaleb(-places), context=_WIDE)


def hours(seconds: float) -> Decimal:
    """Convert seconds to hours, with more digits than the file has."""
    return _WIDE.divide(exact(seconds), Decimal(3600))


def parts_of(whole: Decimal, values: Sequence[Decimal], places: int = PLACES) -> list[Decimal]:
    """Round each value up or down so that they sum to ``whole``; no value becomes negative.

    The values nearest to the next digit are rounded up. ``whole`` is the sum of the values, apart from rounding.
    """
    exact = [value.scaleb(places, _WIDE) for value in values]
    return [Decimal(part).scaleb(-places, _WIDE) for part in settled(exact, int(whole.scaleb(places, _WIDE)))]


def ratios_of(values: Sequence[Decimal]) -> list[Decimal]:
    """Return each value's fraction of the sum. The fractions sum to exactly 1, and are equal if the sum is 0."""
    total = sum(values)
    shares = [_WIDE.divide(value, total) if total else _WIDE.divide(1, len(values)) for value in values]
    return parts_of(Decimal(1), shares, RATIO_PLACES)


def written(value: Decimal) -> str:
    """Return a number in the format of FOCUS: no exponent, no trailing zeros, no sign at 0.

    A whole number has one decimal; otherwise readers that infer types would take the column for integers.
    """
    if not value:
        return "0.0"
    whole, _, decimals = f"{value:f}".partition(".")
    return f"{whole}.{decimals.rstrip('0') or '0'}"


class ChargePart(NamedTuple):
    """The part of a charge of one owner."""

    owner: LineKey
    """Key with namespace, kind, workload, team and labels; the remainder has only a kind."""
    modes: frozenset[str]
    figures: Figures
    """Figures of the part; if a line has several currencies, only the part in the first one has its seconds."""

    @property
    def is_remainder(self) -> bool:
        """Whether the part has no known owner."""
        return self.owner.kind in APART

    @property
    def path(self) -> str:
        """Path of the owner, ``namespace/kind/workload``, without unknown parts."""
        return _path(self.owner.namespace, self.owner.kind, self.owner.workload) or "(unknown owner)"

    @property
    def rank(self) -> tuple[int, LineKey]:
        """Sort key among the parts; the remainder is last."""
        return APART.index(self.owner.kind) + 1 if self.is_remainder else 0, self.owner


class Origin(NamedTuple):
    """One charge before the split; its parts are in the order of owners, the remainder last."""

    window: Window
    cluster: str
    node: str
    model: str
    currency: str
    facts: NodeFacts
    parts: tuple[ChargePart, ...]


def origins(ledger: FleetLedger) -> Iterator[Origin]:
    """Yield the charges of the ledger by time, cluster, node and model; lines without a price are left out."""
    for chunk in ledger.chunks:
        for place, lines in groupby(sorted(chunk.lines.items(), key=_place), key=_place):
            facts = ledger.nodes.get(place[:2], NodeFacts())
            for currency, owners in sorted(_owners(lines).items()):
                parts = [
                    ChargePart(owner, frozenset(key.mode for key, _ in own), total_of(figures for _, figures in own))
                    for owner, own in owners.items()
                ]
                yield Origin(chunk.window, *place, currency, facts, tuple(sorted(parts, key=lambda part: part.rank)))


def _place(line: tuple[LineKey, Figures]) -> tuple[str, str, str]:
    return line[0].cluster, line[0].node, line[0].model


def _owners(
    lines: Iterable[tuple[LineKey, Figures]],
) -> dict[str, dict[LineKey, list[tuple[LineKey, Figures]]]]:
    """Return the lines by currency and owner; only the first currency of a line has its seconds."""
    found: dict[str, dict[LineKey, list[tuple[LineKey, Figures]]]] = {}
    for key, figures in lines:
        owner = key._replace(cluster="", node="", pool="", model="", mode="")
        for number, currency in enumerate(sorted(figures.money)):
            own = Figures(money=figures.money) if number else figures
            found.setdefault(currency, {}).setdefault(owner, []).append((key, own))
    return found


def unpriced_hours(ledger: FleetLedger) -> dict[tuple[str, str, str], float]:
    """Return GPU-hours without a price, which have no charge, by cluster, node and model; most hours first."""
    found: dict[tuple[str, str, str], float] = {}
    for chunk in ledger.chunks:
        for line in chunk.lines.items():
            seconds = line[1].seconds.total
            if seconds and not line[1].money:  # energy alone needs no price
                found[_place(line)] = found.get(_place(line), 0.0) + seconds / 3600
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


FOCUS_DIMENSIONS: frozenset[Dimension] = frozenset(LineKey._fields)
"""Dimensions of an exported ledger."""
ORIGIN_DIMENSIONS: frozenset[Dimension] = frozenset({"cluster", "node", "pool", "model"})
"""Dimensions that filters of a FOCUS export may use; other filters would remove parts of split charges."""
METHOD_ID = "gpu-seconds-held"
TAG_PREFIX = "gpu-cost-exporter/"
UNIT = "GPU-Hours"
_NEAR = Decimal("1e-8")


def _charges(origin: Origin, settings: FocusSettings) -> Iterator[tuple[FocusRow, Decimal, Decimal]]:
    """Yield the rows of an origin, each with its EffectiveCost and its hours."""
    figures = [part.figures for part in origin.parts]
    costs = _shares([exact(one.money_in(origin.currency).total) for one in figures])
    held = _shares([hours(one.seconds.total) for one in figures])
    priced = _shares([hours(max(one.seconds.total - one.unpriced_seconds, 0.0)) for one in figures])
    unit_price = rounded(_WIDE.divide(sum(costs), sum(priced))) if any(priced) else None
    ratios = ratios_of(costs if any(costs) else priced)
    common = _common(origin, settings, unit_price)
    for part, cost, quantity, paid, ratio in zip(origin.parts, costs, held, priced, ratios, strict=True):
        row = common | _amounts(cost, quantity, paid, unit_price)
        row |= _own(part, part.figures.money_in(origin.currency), cost)
        if len(origin.parts) > 1:
            row |= _allocated(part, ratio, paid)
        elif not part.is_remainder:
            row["Tags"] = _json(_node_tags(origin) | _owner_tags(part.owner))
        yield {name: value for name, value in row.items() if value}, cost, quantity


def _shares(values: list[Decimal]) -> list[Decimal]:
    """Round the values so that they sum to their rounded sum."""
    return parts_of(rounded(sum(values, Decimal(0))), values)


_FIXED = {
    "BillingAccountType": "Account",
    "ChargeCategory": "Usage",
    "ChargeFrequency": "Usage-Based",
    "ConsumedUnit": UNIT,
    "PricingUnit": UNIT,
    "ResourceType": "GPU",
    "ServiceCategory": "Compute",
    "ServiceName": "GPU Compute",
    "ServiceSubcategory": "Containers",
    "SkuMeter": "GPU Time",
}
"""Columns with the same value in every row."""


def _common(origin: Origin, settings: FocusSettings, unit_price: Decimal | None) -> FocusRow:
    """Return the columns that are the same in every row of an origin."""
    month = period_at("month", origin.window.start_seconds)
    facts = origin.facts
    model = origin.model or "GPU"
    return _FIXED | {
        "BillingAccountId": settings.billing_account,
        "BillingAccountName": settings.billing_account_name,
        "BillingCurrency": origin.currency,
        "BillingPeriodStart": iso(month.start_seconds),
        "BillingPeriodEnd": iso(month.end_seconds),
        "ChargeClass": "Correction" if settings.restated else "",
        "ChargeDescription": f"GPU time of {model} on {origin.node}",
        "ChargePeriodStart": iso(origin.window.start_seconds),
        "ChargePeriodEnd": iso(origin.window.end_seconds),
        "ContractedUnitPrice": "" if unit_price is None else written(unit_price),
        "HostProviderName": settings.provider,
        "InvoiceIssuerName": settings.provider,
        "PricingCategory": "Dynamic" if facts.capacity_type == "spot" else "Standard",
        "PricingCurrency": origin.currency,
        "ProviderName": settings.provider,
        "PublisherName": settings.provider,
        "RegionId": facts.region,
        "RegionName": facts.region,
        "ResourceId": _path(origin.cluster, origin.node, model),
        "ResourceName": f"{model} of {origin.node}",
        "ServiceProviderName": settings.provider,
        "SkuId": model,
        "SkuPriceDetails": _json({"GpuCount": 1, "InstanceType": facts.instance_type}),
        "SkuPriceId": _path(model, facts.instance_type, facts.capacity_type, facts.region),
        "SubAccountId": origin.cluster,
        "SubAccountName": origin.cluster,
        "SubAccountType": "Cluster" if origin.cluster else "",
        "Tags": _json(_node_tags(origin)),
        "x_CapacityType": facts.capacity_type,
        "x_Cluster": origin.cluster,
        "x_GpuModel": origin.model,
        "x_InstanceType": facts.instance_type,
        "x_Node": origin.node,
    }


def _path(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _amounts(cost: Decimal, hours: Decimal, paid: Decimal, unit_price: Decimal | None) -> FocusRow:
    at_unit_price = cost if unit_price is None else rounded(unit_price * paid)
    # A price change within the day, or energy, may make the costs differ, but rounding alone must not.
    contracted = written(cost if abs(at_unit_price - cost) <= _NEAR else at_unit_price)
    return {
        "BilledCost": written(Decimal(0)),
        "ConsumedQuantity": written(hours),
        "ContractedCost": contracted,
        "EffectiveCost": written(cost),
        "ListCost": contracted,
        "PricingQuantity": written(paid),
    }


def _own(part: ChargePart, money: ByState, cost: Decimal) -> FocusRow:
    """Return the exporter's own x_ columns."""
    effective, ineffective, unprofiled, idle, unknown = parts_of(cost, [exact(amount) for _, amount in money])
    seconds, owner = part.figures.seconds, part.owner
    profiled = seconds.profiled or money.profiled  # only the first of several currencies has the seconds
    return {
        "x_ActiveCost": written(effective + ineffective + unprofiled),
        "x_ActiveEffectiveCost": written(effective) if profiled else "",
        "x_ActiveIneffectiveCost": written(ineffective) if profiled else "",
        "x_ActiveUnprofiledCost": written(unprofiled),
        "x_ActiveRatio": _ratio(seconds.active_ratio),
        "x_Coverage": _ratio(seconds.measured / seconds.total if seconds.total else None),
        "x_EffectiveRatio": _ratio(seconds.effective_ratio),
        "x_IdleCost": written(idle),
        "x_Namespace": owner.namespace,
        "x_ProfiledRatio": _ratio(seconds.profiled_ratio),
        "x_SharingMode": "+".join(sorted(filter(None, part.modes))),
        "x_SplitConfidence": "estimated" if "shared" in part.modes else "exact",
        "x_Team": owner.team,
        "x_UnknownCost": written(unknown),
        "x_UnpricedGpuHours": written(rounded(hours(part.figures.unpriced_seconds))),
        "x_Workload": owner.workload,
        "x_WorkloadKind": owner.kind,
    }


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else written(rounded(exact(ratio), 6))


def _allocated(part: ChargePart, ratio: Decimal, paid: Decimal) -> FocusRow:
    # Without json, which converts decimals to floats: the sum of seven sevenths in floats is not 1.
    element = f'{{"AllocatedRatio":{written(ratio)},"UsageUnit":"{UNIT}","UsageQuantity":{written(paid)}}}'
    row = {"AllocatedMethodId": METHOD_ID, "AllocatedMethodDetails": f'{{"Elements":[{element}]}}'}
    if not part.is_remainder:
        row["AllocatedResourceId"] = part.path
        name = part.owner.workload or part.owner.namespace
        row["AllocatedResourceName"] = part.path if name in NULLS else name
        row["AllocatedTags"] = _json(_owner_tags(part.owner))
    return row


def _node_tags(origin: Origin) -> dict[str, str]:
    facts = origin.facts
    return _tags(
        cluster=origin.cluster,
        node=origin.node,
        instance_type=facts.instance_type,
        capacity_type=facts.capacity_type,
    )


def _owner_tags(owner: LineKey) -> dict[str, str]:
    # Users' keys have no prefix. A user's key with the exporter's prefix is dropped.
    labels = {key: value for key, value in owner.label_values.items() if not key.startswith(TAG_PREFIX)}
    own = _tags(namespace=owner.namespace, workload_kind=owner.kind, workload=owner.workload, team=owner.team)
    return labels | own


def _tags(**values: str) -> dict[str, str]:
    return {f"{TAG_PREFIX}{name.replace('_', '-')}": value for name, value in values.items() if value}


def _json(values: Mapping[str, str | int]) -> str:
    known = {name: value for name, value in values.items() if value}
    return json.dumps(known, ensure_ascii=False, separators=(",", ":")) if known else ""


Kind = Literal["string", "decimal", "price", "datetime", "json", "tags", "currency", "unit"]
"""Type of a value: ``price`` is a decimal that is not negative, ``tags`` a JSON object of plain values."""
VERSIONS = ("1.2", "1.3", "1.4")
DEFAULT_VERSION = "1.4"


class FocusColumn(NamedTuple):
    """One column of ``focus_columns.txt``."""

    name: str
    kind: Kind
    level: str
    """``mandatory``, ``conditional``, ``recommended``; ``own`` for columns that are not in FOCUS."""
    nullable: bool
    is_ours: bool
    """Whether exported files have the column."""
    since: str
    """First version with the column."""
    until: str
    """Last version with the column; ``-`` if the newest version has it."""
    allowed: tuple[str, ...]
    """Allowed values; empty if any value is allowed, or if the specification lists many."""


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
"""Columns of all versions from 1.2 on, in alphabetical order."""
OWN_COLUMNS = {column.name: column.kind for column in _COLUMNS if column.level == "own"}
"""Kinds of the exporter's own columns, by name."""
# Version 1.2 has no split charges; its files have these columns with the prefix x_.
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
"""Metadata types of kinds without a type of the same name."""
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
    """Write the ledger as CSV, and its metadata as JSON if there is a stream for it.

    Args:
        ledger: Ledger at ``FOCUS_DIMENSIONS``.
        stream: Stream for the CSV; a null is an empty field.
        version: One of ``VERSIONS``; 1.2 has no split charges, and their columns have the prefix x_.
        settings: Values that the ledger does not contain.
        metadata_stream: Stream for the metadata; ``None``: no metadata.
    """
    own = settings or FocusSettings()
    sums = FocusSums()
    header = header_of(version)
    writer = csv.writer(csv_stream(stream), lineterminator="\n")
    writer.writerow(header)
    simulated = "true" if ledger.simulated else ""
    for origin in origins(ledger):
        sums.origins += 1
        sums.split_origins += len(origin.parts) > 1
        for row, cost, held in _charges(origin, own):
            sums.rows += 1
            sums.cost[origin.currency] = sums.cost.get(origin.currency, Decimal(0)) + cost
            sums.gpu_hours += held
            row["x_Simulated"] = simulated
            writer.writerow([_plain(row.get(name, row.get(name.removeprefix("x_"), ""))) for name in header])
    if metadata_stream is not None:
        document = _metadata(ledger, version, own, sums)
        metadata_stream.write(encodable(json.dumps(document, ensure_ascii=False, indent=2)) + "\n")


def header_of(version: str) -> tuple[str, ...]:
    """Return the columns of an exported file: FOCUS columns in alphabetical order, then the exporter's own."""
    of_focus = [name for name, column in columns_of(version).items() if column.is_ours]
    split = () if "AllocatedMethodId" in of_focus else (f"x_{name}" for name in SPLIT_COLUMNS)
    return (*of_focus, *sorted((*OWN_COLUMNS, *split)))


def _plain(text: str) -> str:
    """Return text that spreadsheets do not take for a formula, nor readers for null, in valid UTF-8 and CSV."""
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

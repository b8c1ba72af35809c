#!/usr/bin/env python3
"""Compares a cloud bill with a FOCUS export of gpu-cost-exporter and explains each gap, to the cent."""

import argparse
import csv
import gzip
import json
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TextIO

EXIT_UNREADABLE, EXIT_PARTIAL = 1, 3
MOST_REPORTED = 20
CENT, ZERO = Decimal("0.01"), Decimal(0)
DAY_HOURS = 24
NEAR_WHOLE = Decimal("0.05")
MOST_DIGITS = 15
MOST_RECORD = 4 << 20
"""Longest unpacked record in characters: a megabyte of gzip can be one line of a gigabyte."""

AWS = r"(?:ml\.)?(?:p[2-9][a-z0-9-]*|g[3-9](?!ad)[a-z]*|gr[6-9][a-z]*)\.(?:[0-9]*xlarge|metal[a-z0-9-]*)"
AZURE = r"Standard_N[CDV][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*"
GOOGLE = r"(?:a[2-9]x?|g[2-9])-[a-z]+gpu-[0-9]+g(?:-[a-z]+)*|g[2-9]-standard-[0-9]+"
GPU_INSTANCE = re.compile(rf"(?<![A-Za-z0-9])(?:{AWS}|{AZURE}|{GOOGLE})(?![A-Za-z0-9])")
GPUS_IN_NAME = re.compile(r"-([0-9]+)g(?:-|$)")

FOCUS_COLUMNS = {"BilledCost", "EffectiveCost", "ChargePeriodStart", "ChargePeriodEnd", "BillingCurrency"}
FOCUS_SORTS = {"Usage": "use", "Tax": "tax", "Credit": "credit", "Adjustment": "credit"}
HOUR_UNITS = {"hour", "hours", "hrs", "hr", "1 hour", "1 hours", "compute-hours", "instance-hours"}
# Google bills cores, memory and GPUs of an instance as separate SKUs, which only their descriptions distinguish.
SKU_NAMES = ("SkuMeter", "x_SkuDescription", "ChargeDescription")
GPU_PART = re.compile(r"\bGPUs?\b", re.IGNORECASE)
OTHER_PART = re.compile(r"\b(?:core|ram)\b", re.IGNORECASE)
NO_PART = re.compile(r"licen[cs]|commitment", re.IGNORECASE)

CUR_COLUMNS = {"line_item_unblended_cost", "line_item_usage_start_date", "line_item_line_item_type"}
BEFORE_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
CUR_SORTS = {
    **dict.fromkeys(("Usage", "SavingsPlanCoveredUsage", "DiscountedUsage"), "use"),
    **dict.fromkeys(("SavingsPlanRecurringFee", "RIFee"), "unused"),
    **dict.fromkeys(("Credit", "Refund", "BundledDiscount", "EdpDiscount", "PrivateRateDiscount"), "credit"),
    **dict.fromkeys(("RiVolumeDiscount", "Discount"), "credit"),
    "Tax": "tax",
}
# Columns to add and to subtract for the amortised cost, by type of line; other types use the unblended cost.
CUR_AMORTISED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "SavingsPlanCoveredUsage": (("savings_plan_savings_plan_effective_cost",), ()),
    "SavingsPlanRecurringFee": (("savings_plan_total_commitment_to_date",), ("savings_plan_used_commitment",)),
    "DiscountedUsage": (("reservation_effective_cost",), ()),
    "RIFee": (
        ("reservation_unused_amortized_upfront_fee_for_billing_period", "reservation_unused_recurring_fee"),
        (),
    ),
}
CUR_RESERVATION = ("reservation_reservation_arn", "reservation_reservation_a_r_n")
CUR_TIME = re.compile(r"(?:Box|Spot|Dedicated|Host|HeavyUsage|Reservation)")
CUR_UNUSED_TIME = re.compile(r"Unused(?:Box|Ded)")

MAP_COLUMNS = ("cluster", "node", "instance_type", "account", "resource", "gpus")
EXTRAS = {
    "unused": "unused commitments: reservations, savings plans, capacity",
    "tax": "taxes",
    "credit": "credits, refunds and discounts",
    "other": "other costs of these instances: data transfer, disks, support",
}

Row = dict[str, str]
Place = tuple[str, str]
"""Instance type and region; or cluster and node."""


class InputError(Exception):
    """A file cannot be used; the text has the file and the fix."""


class LineError(ValueError):
    """A line of a bill cannot be read."""


@dataclass(slots=True, kw_only=True)
class Line:
    """One line of a bill."""

    start: datetime
    end: datetime
    sort: str
    """``use``, or a key of ``EXTRAS``."""
    account: str
    resource: str
    instance_type: str
    """Instance type; empty if the line has no instance type with GPUs."""
    region: str
    currency: str
    hours: Decimal = ZERO
    """Instance-hours."""
    gpu_hours: Decimal = ZERO
    """GPU-hours, if the bill has GPUs on separate lines."""
    listed: Decimal
    contracted: Decimal
    amortised: Decimal
    billed: Decimal
    gpus: int | None


@dataclass(slots=True)
class Billed:
    """Sums of the bill for one place and currency."""

    hours: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    """Instance-hours by UTC day."""
    gpu_hours: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    daily: bool = True
    """Whether no line is longer than a day, so that days are comparable."""
    listed: Decimal = ZERO
    contracted: Decimal = ZERO
    amortised: Decimal = ZERO
    """Amortised cost of used time; ``extras`` has the other sorts."""
    extras: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    invoiced: Decimal = ZERO
    gpus: int | None = None


@dataclass(slots=True)
class Metered:
    """Sums of the export for one place."""

    hours: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    """GPU-hours by UTC day."""
    unpriced: Decimal = ZERO
    priced: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    """GPU-hours by currency."""
    cost: dict[str, Decimal] = field(default_factory=lambda: defaultdict(Decimal))
    gpus: int | None = None
    """GPUs of one instance, from its fullest day."""

    def add(self, other: "Metered") -> None:
        """Add the sums of another place."""
        for own, more in ((self.hours, other.hours), (self.priced, other.priced), (self.cost, other.cost)):
            for name, amount in more.items():
                own[name] += amount
        self.unpriced += other.unpriced
        self.gpus = max(self.gpus or 0, other.gpus or 0) or None


@dataclass(slots=True)
class Map:
    """Relations between nodes and a bill that labels do not show."""

    resources: dict[str, Place] = field(default_factory=dict)
    instance_types: dict[Place, str] = field(default_factory=dict)
    accounts: set[str] = field(default_factory=set)
    gpus: dict[str, int] = field(default_factory=dict)


class RecordLines:
    """The lines of a text; a record of more than ``MOST_RECORD`` characters is an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.taken = 0
        """Characters since the last record; the reader of records resets it."""

    def __iter__(self) -> Iterator[str]:
        """Yield the lines with limited length; the csv module would read a line of any length."""
        while line := self._stream.readline(MOST_RECORD + 1):
            self.taken += len(line)
            if self.taken > MOST_RECORD:
                raise csv.Error(f"a record is longer than {MOST_RECORD >> 20} MiB")
            yield line


def records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and fields of each record of a CSV file, also with gzip."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8-sig", newline="") as stream:
            lines = RecordLines(stream)
            reader = csv.reader(lines, strict=True)
            for fields in reader:
                lines.taken = 0
                if fields:
                    yield reader.line_num, ["" if value in {"NULL", "null"} else value for value in fields]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot read CSV: {error}") from None


def number(row: Row, name: str, *, needed: bool = False) -> Decimal:
    """Return a number of a row; 0 if it is empty."""
    text = row.get(name, "").strip()
    if not text:
        if needed:
            raise LineError(f"{name}: empty")
        return ZERO
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite() or (value and abs(value.adjusted()) >= MOST_DIGITS):
        raise LineError(f"{name}: not a number: {printable(text)}")
    return value


def moment(row: Row, name: str) -> datetime:
    """Return a time of a row; UTC if it has no zone."""
    try:
        found = datetime.fromisoformat(row.get(name, "").strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise LineError(f"{name}: not a time: {printable(row.get(name, ''))}") from None


def text_of(row: Row, name: str) -> str:
    """Return a text of a row that must not be empty."""
    if not row.get(name, "").strip():
        raise LineError(f"{name}: empty")
    return row[name].strip()


def details(text: str) -> dict[str, Any]:
    """Return a JSON object; empty if the text is not one."""
    try:
        found = json.loads(text) if text.startswith("{") else {}
    except (ValueError, RecursionError):
        found = {}
    return found if isinstance(found, dict) else {}


def count(value: object) -> int | None:
    """Return a number of GPUs from 1 to 1024, else ``None``."""
    found = re.fullmatch(r"([0-9]{1,4})(?:\.0)?", str(value), re.ASCII)
    return int(found[1]) if found and 0 < int(found[1]) <= 1024 else None  # noqa: PLR2004 - as documented


def gpu_type(known: set[str], *texts: object) -> str:
    """Return the first instance type with GPUs in the texts, which are in order of reliability."""
    for text in texts:
        if text in known:
            return str(text)
        if isinstance(text, str) and (found := GPU_INSTANCE.search(text)):
            return found.group()
    return ""


def focus_line(row: Row, known: set[str]) -> Line:
    """Return a row of a FOCUS bill as a line."""
    about = details(row.get("SkuPriceDetails", ""))
    texts = (about.get("InstanceType"), *(row.get(name) for name in ("x_InstanceType", "x_UsageType", "SkuMeter")))
    more = (row.get(name) for name in ("SkuPriceDetails", "x_SkuDetails", "ChargeDescription"))
    instance_type = gpu_type(known, *texts, *more)
    hours, gpu_hours, is_time = focus_time(row, instance_type)
    sort = FOCUS_SORTS.get(row.get("ChargeCategory", ""), "other")
    if "Unused" in {row.get("CommitmentDiscountStatus"), row.get("CapacityReservationStatus")}:
        sort = "unused"
    elif sort == "use" and not is_time:
        sort = "other"
    amortised = number(row, "EffectiveCost", needed=True)
    return Line(
        start=moment(row, "ChargePeriodStart"),
        end=moment(row, "ChargePeriodEnd"),
        sort=sort,
        account=row.get("SubAccountId") or row.get("BillingAccountId", ""),
        resource=row.get("ResourceId", ""),
        instance_type=instance_type,
        region=row.get("RegionId", ""),
        currency=text_of(row, "BillingCurrency"),
        hours=hours,
        gpu_hours=gpu_hours,
        listed=number(row, "ListCost") or amortised,
        contracted=number(row, "ContractedCost") or amortised,
        amortised=amortised,
        billed=number(row, "BilledCost", needed=True),
        gpus=count(about.get("GpuCount")),
    )


def focus_time(row: Row, instance_type: str) -> tuple[Decimal, Decimal, bool]:
    """Return instance-hours, GPU-hours and whether the line is for time."""
    units = {of: row.get(f"{of}Unit", "").strip().lower() for of in ("Consumed", "Pricing")}
    hours = next((number(row, f"{of}Quantity") for of, unit in units.items() if unit in HOUR_UNITS), ZERO)
    # The provider, not the publisher: Google publishes images that run on instances of other clouds.
    provider = f"{row.get('ServiceProviderName', '')} {row.get('ProviderName', '')}".lower()
    if not (re.fullmatch(GOOGLE, instance_type) or "google" in provider):
        return hours, ZERO, bool(hours)
    name = " ".join(row.get(column, "") for column in SKU_NAMES)
    if NO_PART.search(name):
        return ZERO, ZERO, False
    if GPU_PART.search(name):
        return ZERO, hours, bool(hours)
    return ZERO, ZERO, bool(hours or OTHER_PART.search(name))


def cur_line(row: Row, known: set[str]) -> Line:
    """Return a row of an AWS Cost and Usage Report as a line; the columns have the names of version 2.0."""
    kind, usage_type = row.get("line_item_line_item_type", ""), row.get("line_item_usage_type", "")
    unblended = number(row, "line_item_unblended_cost", needed=True)
    product = details(row.get("product", ""))
    sort = CUR_SORTS.get(kind, "other")
    if sort == "use":
        is_unused = CUR_UNUSED_TIME.search(usage_type)
        sort = "unused" if is_unused else "use" if CUR_TIME.search(usage_type) else "other"
    amortised = cur_amortised(row, kind)
    public = number(row, "pricing_public_on_demand_cost") if sort == "use" else ZERO
    contracted = unblended if kind in {"Usage", "SavingsPlanCoveredUsage"} else amortised
    texts = (row.get("product_instance_type"), product.get("instance_type"), usage_type)
    return Line(
        start=moment(row, "line_item_usage_start_date"),
        end=moment(
            row, "line_item_usage_end_date" if row.get("line_item_usage_end_date") else "line_item_usage_start_date"
        ),
        sort=sort,
        account=row.get("line_item_usage_account_id", ""),
        resource=row.get("line_item_resource_id", ""),
        instance_type=gpu_type(known, *texts, row.get("line_item_line_item_description")),
        region=row.get("product_region_code") or row.get("product_region") or str(product.get("region", "")),
        currency=text_of(row, "line_item_currency_code"),
        hours=number(row, "line_item_usage_amount") if sort == "use" else ZERO,
        listed=public or amortised,
        # The unblended cost of reserved use does not include upfront payments.
        contracted=(public or amortised) if kind == "DiscountedUsage" else contracted,
        amortised=amortised,
        billed=unblended,
        gpus=count(row.get("product_gpu") or product.get("gpu")),
    )


def cur_amortised(row: Row, kind: str) -> Decimal:
    """Return the amortised cost of a line: upfront payments are spread over their term."""
    paid_ahead = kind == "Fee" and any(row.get(name) for name in CUR_RESERVATION)
    if paid_ahead or kind in {"SavingsPlanNegation", "SavingsPlanUpfrontFee"}:
        return ZERO  # included in the lines of its use
    plus, minus = CUR_AMORTISED.get(kind, (("line_item_unblended_cost",), ()))
    return sum((number(row, name) for name in plus), ZERO) - sum((number(row, name) for name in minus), ZERO)


def bill_lines(path: Path, known: set[str]) -> Iterator[Line | str]:
    """Yield each line of a bill, or the problem of a line as text."""
    lines = records(path)
    _, header = next(lines, (0, []))
    line_of = focus_line
    if not FOCUS_COLUMNS.issubset(header):
        header = ["_".join(BEFORE_CAPITAL.sub("_", part).lower() for part in name.split("/")) for name in header]
        line_of = cur_line
        if not CUR_COLUMNS.issubset(header):
            raise InputError(f"{path}: neither FOCUS nor an AWS Cost and Usage Report; export the bill as one")
    for at, fields in lines:
        try:
            yield line_of(dict(zip(header, fields, strict=True)), known)
        except LineError as error:
            yield f"{path}:{at}: {error}"
        except ValueError:
            yield f"{path}:{at}: {len(fields)} fields, the header has {len(header)}"


class Bill:
    """Sums of the lines of all bills that start in the window."""

    def __init__(self, window: tuple[datetime, datetime], known: set[str], mapping: Map) -> None:
        self.window, self.known, self.mapping = window, known, mapping
        self.groups: dict[Place, dict[str, Billed]] = defaultdict(lambda: defaultdict(Billed))
        self.lines: dict[str, int] = defaultdict(int)
        self.other_cost: dict[str, Decimal] = defaultdict(Decimal)
        self.malformed: list[str] = []
        """The first problems of lines."""

    def read(self, paths: list[Path]) -> None:
        """Add all lines; read the files twice, because a tax can precede the line of its instance."""
        place_of: dict[str, Place] = {}
        for path in paths:
            for line in bill_lines(path, self.known):
                if not isinstance(line, str) and line.resource and line.sort == "use" and self._type(line):
                    place_of[line.resource] = (self._type(line), line.region)
        for path in paths:
            for line in bill_lines(path, self.known):
                self.lines["lines"] += 1
                if isinstance(line, str):
                    self.lines["malformed"] += 1
                    self.malformed += [line] if len(self.malformed) < MOST_REPORTED else []
                else:
                    self._add(line, place_of)

    def _type(self, line: Line) -> str:
        node = self.mapping.resources.get(line.resource)
        return line.instance_type or (self.mapping.instance_types.get(node, "") if node else "")

    def _add(self, line: Line, place_of: dict[str, Place]) -> None:
        if not self.window[0] <= line.start < self.window[1]:
            self.lines["outside_window"] += 1
            return
        if self.mapping.accounts and line.account not in self.mapping.accounts:
            self.lines["other_accounts"] += 1
            return
        own = self._type(line)
        place = (own, line.region) if own else place_of.get(line.resource)
        if place is None:
            self.lines["other_lines"] += 1
            self.other_cost[line.currency] += line.amortised
            return
        self.lines["gpu_lines"] += 1
        group = self.groups[place][line.currency]
        group.invoiced += line.billed
        if line.sort != "use" or not own:
            group.extras["other" if line.sort == "use" else line.sort] += line.amortised
            return
        group.gpus = group.gpus or line.gpus
        day = line.start.date().isoformat()
        group.hours[day] += line.hours
        group.gpu_hours[day] += line.gpu_hours
        group.daily = group.daily and line.end - line.start <= timedelta(days=1)
        group.listed += line.listed
        group.contracted += line.contracted
        group.amortised += line.amortised


def read_map(path: Path | None) -> Map:
    """Return the relations in the file of ``--map``."""
    found = Map()
    if path is None:
        return found
    lines = records(path)
    _, header = next(lines, (0, []))
    if not header or set(header) - set(MAP_COLUMNS):
        raise InputError(f"{path}: unknown column; allowed: {', '.join(MAP_COLUMNS)}")
    for at, fields in lines:
        row = dict.fromkeys(MAP_COLUMNS, "") | dict(zip(header, map(str.strip, fields), strict=False))
        node, gpus = (row["cluster"], row["node"]), count(row["gpus"])
        is_said = bool(row["account"] or (row["node"] and (row["resource"] or row["instance_type"])))
        if not (is_said or gpus) or (row["gpus"] and not (gpus and row["instance_type"])) or len(fields) > len(header):
            raise InputError(f"{path}:{at}: expected: node with resource or instance_type, account, or type and gpus")
        if row["node"] and row["resource"]:
            found.resources[row["resource"]] = node
        if row["node"] and row["instance_type"]:
            found.instance_types[node] = row["instance_type"]
        if row["account"]:
            found.accounts.add(row["account"])
        if gpus:
            found.gpus[row["instance_type"]] = gpus
    return found


class Export:
    """Sums of a FOCUS export of gpu-cost-exporter and its metadata file."""

    def __init__(self, path: Path, mapping: Map) -> None:
        self.places: dict[Place, Metered] = defaultdict(Metered)
        self._mapping = mapping
        self._place_of: dict[Place, Place] = {}
        beside = path.with_name(f"{path.name}.metadata.json")
        try:
            metadata = json.loads(beside.read_text(encoding="utf-8"))
            self.window = tuple(datetime.fromisoformat(metadata["x_Window"][name]) for name in ("Start", "End"))
            self.recorded_hours = int(metadata["x_Coverage"]["HoursRecorded"])
            self.expected_hours = int(metadata["x_Coverage"]["HoursOfWindow"])
            self.recorded = min(Decimal(self.recorded_hours) / max(self.expected_hours, 1), Decimal(1))
            unpriced = [(one["Cluster"], one["Node"], Decimal(str(one["GpuHours"]))) for one in metadata["x_Unpriced"]]
            self.notes = [str(note) for note in metadata["x_Notes"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{beside}: not the metadata of an export ({error}); write it with --output") from None
        self._read(path)
        days = [self.window[0] + timedelta(days=day) for day in range((self.window[1] - self.window[0]).days)]
        for cluster, node, hours in unpriced:  # the metadata have no days
            group = self.places[self._place((cluster, node), "", "")]
            group.unpriced += hours
            for day in days:
                group.hours[day.date().isoformat()] += hours / len(days)

    def _place(self, node: Place, instance_type: str, region: str) -> Place:
        named = instance_type or self._mapping.instance_types.get(node, "")
        return self._place_of.setdefault(node, (named, region))

    def _read(self, path: Path) -> None:
        lines = records(path)
        _, header = next(lines, (0, []))
        by_node: dict[tuple[Place, str], Decimal] = defaultdict(Decimal)
        try:
            for _, fields in lines:
                row = dict(zip(header, fields, strict=True))
                node = (row["x_Cluster"], row["x_Node"])
                group = self.places[self._place(node, row["x_InstanceType"], row["RegionId"])]
                day = row["ChargePeriodStart"][:10]
                by_node[node, day] += number(row, "ConsumedQuantity")
                group.hours[day] += number(row, "ConsumedQuantity")
                group.unpriced += number(row, "x_UnpricedGpuHours")
                group.priced[row["BillingCurrency"]] += number(row, "PricingQuantity")
                group.cost[row["BillingCurrency"]] += number(row, "EffectiveCost")
        except (KeyError, ValueError) as error:
            raise InputError(f"{path}: not an export of `report --format focus`: {error}") from None
        for (node, _), hours in by_node.items():
            group, gpus = self.places[self._place_of[node]], hours / DAY_HOURS
            if round(gpus) and abs(gpus - round(gpus)) <= NEAR_WHOLE * round(gpus):
                group.gpus = max(group.gpus or 0, round(gpus))

    def settle_regions(self, bill: Bill) -> None:
        """Set the region of nodes without one, if the bill has their type in a single region."""
        for place in [one for one in self.places if one[0] and not one[1]]:
            regions = [region for instance_type, region in bill.groups if instance_type == place[0]]
            if len(regions) == 1:
                self.places[place[0], regions[0]].add(self.places.pop(place))


@dataclass(slots=True, kw_only=True)
class Part:
    """One explanation of the difference of bill and export; negative if the bill is lower."""

    kind: str
    words: str
    amount: Decimal
    gpu_hours: Decimal | None = None


def billed_hours(billed: Billed, gpus: int | None) -> dict[str, Decimal] | None:
    """Return GPU-hours of the bill by day; ``None`` if it has cost without hours, or the number of GPUs is unknown."""
    instances, separate = sum(billed.hours.values(), ZERO), sum(billed.gpu_hours.values(), ZERO)
    if (instances and not gpus) or (billed.amortised and not instances and not separate):
        return None
    return {day: hours * (gpus or 0) + billed.gpu_hours[day] for day, hours in billed.hours.items()}


def explain(
    billed: Billed, mine: Metered, currency: str, gpus: int | None, gpu_part: Decimal, recorded: Decimal
) -> list[Part]:
    """Return the explanations of a gap; their sum is the gap."""
    by_day = billed_hours(billed, gpus)
    hours = sum((by_day or {}).values(), ZERO)
    parts: list[Part] = []
    if by_day is not None and not hours and not billed.amortised and mine.cost[currency]:
        words = "metered, but the bill has no hours of such instances"
        parts.append(Part(kind="not_billed", words=words, amount=-mine.cost[currency], gpu_hours=total(mine.hours)))
    elif by_day is not None and hours:
        rate = billed.amortised / hours
        parts += hour_parts(by_day if billed.daily else None, hours, mine, rate, recorded)
        parts += rate_parts(billed, hours, mine, currency, gpu_part)
    parts += [Part(kind=sort, words=EXTRAS[sort], amount=amount) for sort, amount in billed.extras.items()]
    gap = billed.amortised + total(billed.extras) - mine.cost[currency]
    left = gap - sum((part.amount for part in parts), ZERO)
    if abs(left) >= CENT / 2:
        words = "the bill has no hours of instances, or of their GPUs, to derive a rate from"
        if sum(billed.hours.values(), ZERO) and not gpus:
            words = "the number of GPUs of such an instance is unknown: add it to --map"
        parts.append(Part(kind="unexplained", words=words, amount=left))
    return to_cents(
        parts, (billed.amortised + total(billed.extras)).quantize(CENT) - mine.cost[currency].quantize(CENT)
    )


def hour_parts(
    by_day: dict[str, Decimal] | None, hours: Decimal, mine: Metered, rate: Decimal, recorded: Decimal
) -> Iterator[Part]:
    """Yield the hours of one side only, at the rate of the bill; ``by_day`` is ``None`` if lines exceed a day."""
    days = {"": (hours, total(mine.hours))}
    if by_day is not None:
        days = {day: (by_day.get(day, ZERO), mine.hours.get(day, ZERO)) for day in {*by_day, *mine.hours}}
    missing = {day: max(theirs - ours, ZERO) for day, (theirs, ours) in days.items()}
    not_recorded = sum((min(missing[day], days[day][0] * (1 - recorded)) for day in days), ZERO)
    not_billed = sum((max(ours - theirs, ZERO) for theirs, ours in days.values()), ZERO)
    for kind, words, count_of, sign in (
        ("not_recorded", "hours for which no ledger was recorded", not_recorded, 1),
        ("not_metered", "billed, but not metered by an agent", total(missing) - not_recorded, 1),
        ("not_billed", "metered, but not on the bill", not_billed, -1),
        ("unpriced", "GPU-hours without a price in the export", mine.unpriced, 1),
    ):
        if count_of:
            told = f"{words}, at the bill's {rate:,.4f}"
            yield Part(kind=kind, words=told, amount=sign * rate * count_of, gpu_hours=count_of)


def rate_parts(billed: Billed, hours: Decimal, mine: Metered, currency: str, part: Decimal) -> Iterator[Part]:
    """Yield the differences between rates times the common hours, from the price of the export to the paid price."""
    priced = mine.priced[currency]
    if not priced:
        return
    own = mine.cost[currency] / priced
    listed, contracted, rate = (one / hours for one in (billed.listed, billed.contracted, billed.amortised))
    of_gpus = f", {part:%} of it for GPUs" if part != 1 else ""
    for kind, words, difference in (
        ("price_book", f"price of {own:,.4f}, list price of the bill {listed:,.4f}{of_gpus}", listed * part - own),
        ("negotiated", f"negotiated price: {contracted:,.4f} instead of {listed:,.4f}", (contracted - listed) * part),
        ("commitments", f"reservations and savings plans, amortised: {rate:,.4f}", (rate - contracted) * part),
        ("not_gpu", f"rest of the node: {1 - part:%} of {rate:,.4f}", rate * (1 - part)),
    ):
        yield Part(kind=kind, words=words, amount=priced * difference, gpu_hours=priced)


def to_cents(parts: list[Part], gap: Decimal) -> list[Part]:
    """Return the parts rounded to cents with the sum ``gap``, without zeros; the largest gets the difference."""
    for part in parts:
        part.amount = part.amount.quantize(CENT)
    difference = gap - sum((part.amount for part in parts), ZERO)
    if difference and not parts:
        parts = [Part(kind="unexplained", words="rounding", amount=ZERO)]
    if difference:
        max(parts, key=lambda part: abs(part.amount)).amount += difference
    return [part for part in parts if part.amount or (part.kind in {"not_metered", "not_billed"} and part.gpu_hours)]


def total(amounts: dict[str, Decimal]) -> Decimal:
    """Return the sum of all values."""
    return sum(amounts.values(), ZERO)


def groups_of(bill: Bill, export: Export, mapping: Map, gpu_part: Decimal) -> list[dict[str, Any]]:
    """Return the groups by instance type, region and currency in the JSON format, the largest gap first."""
    found = []
    for place in sorted({*bill.groups, *export.places}):
        mine = export.places.get(place, Metered())
        billed = bill.groups.get(place, {})
        currencies = sorted({*billed, *mine.cost})
        note = ""
        if len(currencies) > 1:
            own = ", ".join(sorted(mine.cost)) or "nothing"
            note = f"the bill is in {', '.join(sorted(billed)) or 'nothing'}, the export in {own}: not converted"
        if not currencies:
            export.notes.append(f"{' '.join(place)}: {total(mine.hours):,.1f} GPU-hours have no price and no bill")
        for currency in currencies:
            of = billed.get(currency, Billed())
            gpus = mapping.gpus.get(place[0]) or of.gpus or gpus_named(place[0]) or mine.gpus
            by_day = billed_hours(of, gpus)
            parts = [] if note else explain(of, mine, currency, gpus, gpu_part, export.recorded)
            cost, amount = mine.cost.get(currency, ZERO), of.amortised + total(of.extras)
            found.append(
                {
                    "instance_type": place[0],
                    "region": place[1],
                    "currency": currency,
                    "metered": f"{cost:.2f}",
                    "billed": f"{amount:.2f}",
                    "invoiced": f"{of.invoiced:.2f}",
                    "gap": None if note else f"{amount.quantize(CENT) - cost.quantize(CENT):.2f}",
                    "metered_gpu_hours": float(total(mine.hours)),
                    "billed_gpu_hours": None if by_day is None else float(total(by_day)),
                    "note": note or None,
                    "explanations": [
                        {
                            "kind": part.kind,
                            "what": part.words,
                            "amount": f"{part.amount:.2f}",
                            "gpu_hours": None if part.gpu_hours is None else float(part.gpu_hours),
                        }
                        for part in parts
                    ],
                }
            )
    return sorted(found, key=lambda group: -abs(Decimal(group["gap"] or 0)))


def gpus_named(instance_type: str) -> int | None:
    """Return the number of GPUs in the name of an instance type, such as 8 in ``a3-highgpu-8g``."""
    found = GPUS_IN_NAME.search(instance_type)
    return int(found[1]) if found else None


def printable(text: str) -> str:
    """Return a shortened text without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300])


def write_text(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"Bill and export, {document['start']} to {document['end']}"
    for group in document["groups"]:
        currency = printable(group["currency"])
        yield ""
        yield printable(f"{group['instance_type']} {group['region']}".strip() or "(no instance type)")
        rows = [("metered", group["metered_gpu_hours"], group["metered"])]
        rows += [(f"  {one['what']}", one["gpu_hours"], f"{Decimal(one['amount']):+}") for one in group["explanations"]]
        rows += [(f"  not compared: {group['note']}", None, "")] if group["note"] else []
        rows += [("on the bill, amortised", group["billed_gpu_hours"], group["billed"])]
        rows += [("on the invoice", None, group["invoiced"])] if group["invoiced"] != group["billed"] else []
        for words, hours, amount in rows:
            yield f"  {printable(words):<86}{'' if hours is None else f'{hours:,.1f}':>12}{amount:>16} {currency}"
    yield ""
    lines = document["bill"]
    yield ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in lines.items() if name != "other_cost")
    yield from (f"not compared: {cost} {printable(currency)}" for currency, cost in lines["other_cost"].items())
    yield f"{document['recorded_hours']:,} of {document['expected_hours']:,} hours of the ledger are recorded"
    yield from (f"note: {printable(note)}" for note in document["notes"])


def run(arguments: argparse.Namespace) -> int:
    """Read both sides, write the comparison and return the exit code."""
    mapping = read_map(arguments.map)
    export = Export(arguments.export, mapping)
    known = {place[0] for place in export.places if place[0]} | {*mapping.instance_types.values(), *mapping.gpus}
    bill = Bill((export.window[0], export.window[1]), known, mapping)
    bill.read(list({path.resolve(): path for path in arguments.bill}.values()))
    export.settle_regions(bill)
    names = ("lines", "gpu_lines", "other_lines", "outside_window", "other_accounts", "malformed")
    document = {
        "start": export.window[0].isoformat(),
        "end": export.window[1].isoformat(),
        "groups": groups_of(bill, export, mapping, arguments.gpu_part),
        "bill": {name: bill.lines[name] for name in names}
        | {"other_cost": {currency: f"{cost:.2f}" for currency, cost in bill.other_cost.items() if cost}},
        "recorded_hours": export.recorded_hours,
        "expected_hours": export.expected_hours,
        "notes": export.notes,
    }
    lines = [json.dumps(document, indent=2)] if arguments.format == "json" else write_text(document)
    for line in lines:
        print(line)
    for problem in bill.malformed:
        print(f"reconcile: {printable(problem)}; the line is not included in the sums", file=sys.stderr)
    return EXIT_PARTIAL if bill.malformed else 0


def part_of(text: str) -> Decimal:
    """Return the value of ``--gpu-part``."""
    value = Decimal(text) if re.fullmatch(r"[01](\.[0-9]{1,6})?", text, re.ASCII) else ZERO
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"value '{text}': expected more than 0, at most 1")
    return value


def main() -> int:
    """Parse the flags and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.epilog = "Exit code: 0; 1 a file cannot be read; 2 invalid flags; 3 lines of the bill could not be read."
    parser.add_argument("export", type=Path, help="CSV of `gpu-cost-exporter report --format focus --output FILE`")
    parser.add_argument("--bill", type=Path, required=True, action="append", help="CSV: FOCUS 1.0 or later, or AWS CUR")
    parser.add_argument("--map", type=Path, help="CSV with relations between nodes and the bill (README.md)")
    parser.add_argument("--gpu-part", type=part_of, default=Decimal(1), help="gpu_part of the price book [default: 1]")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="[default: text]")
    try:
        return run(parser.parse_args())
    except InputError as error:
        print(f"reconcile: {printable(str(error))}", file=sys.stderr)
        return EXIT_UNREADABLE


if __name__ == "__main__":
    sys.exit(main())

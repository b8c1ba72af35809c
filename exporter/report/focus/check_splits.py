"""What rows of split charges must be, one by one and together with the other rows of their origin."""

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from hashlib import blake2b

from exporter.report.focus.check_rows import Fault, Row
from exporter.report.focus.check_values import parsed
from exporter.report.focus.columns import SPLIT_COLUMNS
from exporter.report.focus.findings import Findings, shown

_ORIGIN = (
    "ResourceId",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "BillingPeriodStart",
    "BillingCurrency",
    "BillingAccountId",
    "ChargeCategory",
    "ChargeClass",
    "CommitmentDiscountId",
    "SkuId",
    "SkuPriceId",
)
"""What tells one origin from another."""
_SUMMED = frozenset(
    """
    BilledCost CommitmentDiscountQuantity ConsumedQuantity ContractedCost EffectiveCost ListCost
    PricingCurrencyEffectiveCost PricingQuantity
    """.split()  # noqa: SIM905 - names read better in lines
)
_OF_ORIGIN = frozenset(_ORIGIN)
_NEAR = Decimal("1e-6")
_MOST_DECIMALS = 40
_ELEMENT_KEYS = frozenset(("AllocatedRatio", "UsageUnit", "UsageQuantity"))


class _Origin:
    """What is kept of one origin: as little as can be, there may be hundreds of thousands."""

    __slots__ = ("cost", "dimensions", "largest", "line", "ratio")

    def __init__(self, line: int, dimensions: bytes) -> None:
        self.line = line
        self.dimensions = dimensions
        self.ratio: Decimal | None = None
        """Sum over the rows; ``None`` while none has one."""
        self.largest = Decimal(0)
        self.cost = Decimal(0)
        """Of the row with the largest ratio, from which the origin's is told best."""


class Splits:
    """Follows a file's rows; origins may stand in any order. Memory grows with the number of origins, not of rows."""

    def __init__(self, header: tuple[str, ...], findings: Findings, prefix: str = "") -> None:
        """Take the file's columns; ``prefix`` is ``x_`` where the split columns are custom ones."""
        self.rows = 0
        self._names = {name: f"{prefix}{name}" for name in SPLIT_COLUMNS}
        self._dimensions = tuple(name for name in header if self._is_dimension(name))
        self._origins: dict[bytes, _Origin] = {}
        self._wholes: dict[bytes, int] = {}
        self._findings = findings

    def _is_dimension(self, name: str) -> bool:
        return not (name.startswith("x_") or name in _SUMMED or name in _OF_ORIGIN or name in self._names.values())

    @property
    def origins(self) -> int:
        """How many charges were split."""
        return len(self._origins)

    def row(self, line: int, row: Row) -> Iterator[Fault]:
        """Faults of one row by itself and against the rows of its origin before it."""
        split = {name: row[column] for name, column in self._names.items() if column in row}
        if "AllocatedMethodId" not in split:
            for name in split:
                yield self._names[name], "SPLIT-1", "a value without a method", "null, or a value in AllocatedMethodId"
            self._note_whole(line, row)
            return
        self.rows += 1
        yield from self._names_and_tags(split, row)
        ratio = None
        if "AllocatedMethodDetails" in split:
            ratio, problem = ratio_of(split["AllocatedMethodDetails"])
            if problem:
                yield self._names["AllocatedMethodDetails"], "SPLIT-2", problem, "Elements with an AllocatedRatio each"
        yield from self._against_origin(line, row, split["AllocatedMethodId"], ratio)

    def _names_and_tags(self, split: Mapping[str, str], row: Row) -> Iterator[Fault]:
        has_id, has_name = "AllocatedResourceId" in split, "AllocatedResourceName" in split
        if has_id != has_name:
            name = self._names["AllocatedResourceName"]
            yield name, "SPLIT-3", "only one of id and name is null", "both, of what is not allocated, or none"
        tags = parsed(split.get("AllocatedTags", "{}")) or {}
        if tags and not has_id:
            yield self._names["AllocatedTags"], "SPLIT-3", "tags of what is not allocated", "null"
        repeated = sorted(set(tags) & set(parsed(row.get("Tags", "{}")) or {}))
        if repeated:
            yield (
                self._names["AllocatedTags"],
                "SPLIT-4",
                f"repeats {shown(repeated[0])}",
                "keys that Tags does not have",
            )

    def _against_origin(self, line: int, row: Row, method: str, ratio: Decimal | None) -> Iterator[Fault]:
        key = _key(row)
        dimensions = _digest((method, *(row.get(name, "") for name in self._dimensions)))
        origin = self._origins.get(key)
        if origin is None:
            origin = self._origins[key] = _Origin(line, dimensions)
        if origin.dimensions != dimensions:
            what = f"differs from line {origin.line}, which is of the same origin"
            yield "", "SPLIT-6", what, "the origin's method, dimensions and unit prices on all its rows"
        if ratio is not None:
            yield from _cost(origin, ratio, Decimal(row.get("EffectiveCost", "0")))

    def _note_whole(self, line: int, row: Row) -> None:
        # A row that is zeroed may stand beside its parts: one of the two ways to tell an origin.
        if row.get("ResourceId") and Decimal(row.get("EffectiveCost", "0")):
            self._wholes.setdefault(_key(row), line)

    def finish(self) -> None:
        """Note what only the whole file can tell."""
        for key, origin in self._origins.items():
            if origin.ratio is not None and origin.ratio != 1:
                column = self._names["AllocatedMethodDetails"]
                what = f"the ratios of the origin that begins here sum to {origin.ratio:f}"
                self._findings.add(origin.line, column, "SPLIT-5", what, "exactly 1")
            if key in self._wholes:
                what = f"money of an origin that line {origin.line} splits"
                self._findings.add(self._wholes[key], "", "SPLIT-8", what, "parts alone, or beside them an origin of 0")


def _cost(origin: _Origin, ratio: Decimal, cost: Decimal) -> Iterator[Fault]:
    """Hold a row's cost against the origin's, which the row with the largest ratio tells best."""
    origin.ratio = (origin.ratio or Decimal(0)) + ratio
    small, small_cost, large, large_cost = origin.largest, origin.cost, ratio, cost
    if ratio <= origin.largest:
        small, small_cost, large, large_cost = ratio, cost, origin.largest, origin.cost
    origin.largest, origin.cost = large, large_cost
    if not large:
        return
    whole = large_cost / large
    if abs(small_cost - whole * small) > _NEAR * max(abs(whole), Decimal(1)):
        what = f"{cost} at a ratio of {ratio}, where line {origin.line} has the origin begin"
        yield "EffectiveCost", "SPLIT-7", what, "AllocatedRatio of the origin's EffectiveCost, on each of its rows"


def _key(row: Row) -> bytes:
    return _digest(row.get(name, "") for name in _ORIGIN)


def _digest(values: Iterable[str]) -> bytes:
    return blake2b("\x1f".join(values).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def ratio_of(details: str) -> tuple[Decimal | None, str]:
    """The sum of a row's ratios, and what is wrong with them; an empty text where nothing is."""
    found = parsed(details)
    if found is None:
        return None, ""  # told as a value already
    elements = found.get("Elements")
    if not isinstance(elements, list) or not elements:
        return None, "no Elements"
    total = Decimal(0)
    for element in elements:
        ratio = element.get("AllocatedRatio") if isinstance(element, dict) else None
        if not isinstance(ratio, Decimal) or not _is_ratio(ratio):
            return None, "an element without a number from 0 to 1 as AllocatedRatio"
        if "UsageQuantity" in element and "UsageUnit" not in element:
            return None, "an element with UsageQuantity and no UsageUnit"
        strange = [key for key in element if key not in _ELEMENT_KEYS and not key.startswith("x_")]
        if strange:
            return None, f"an element with the key {shown(strange[0])}, which is not FOCUS' and has no x_"
        total += ratio
    return total, ""


def _is_ratio(value: Decimal) -> bool:
    # A number such as 1e-999999999 would take a gigabyte to write.
    return 0 <= value <= 1 and (not value or value.adjusted() > -_MOST_DECIMALS)

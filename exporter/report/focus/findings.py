"""What a checker of FOCUS files has found: rules, findings with their lines, and how many there were of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_MOST_SHOWN = 60
MOST_TOLD = 20
"""Findings of one rule in one column that are told one by one; the rest is counted."""

RULES: Mapping[str, str] = {
    "FILE-1": "the file is CSV with a header",
    "FILE-2": "every row has as many fields as the header",
    "COL-1": "every mandatory column is there",
    "COL-2": "a column is one of the version's, or begins with x_",
    "COL-3": "a column is there once",
    "COL-4": "x_ columns stand behind FOCUS' columns",
    "COL-5": "x_ and PascalCase letters and digits, at most 50 characters",
    "VAL-1": "no null where the column allows none",
    "VAL-2": "null is an empty field or NULL, not another word for it; a name that people choose may be any word",
    "VAL-3": "numbers are plain decimals",
    "VAL-4": "times are UTC, as 2026-01-31T00:00:00Z",
    "VAL-5": "a word of the column's list",
    "VAL-6": "currencies are ISO 4217 codes",
    "VAL-7": "JSON objects; tags hold texts, numbers or true",
    "VAL-8": "units are capitalised, joined by a hyphen, per a slash",
    "VAL-9": "prices are not negative, ratios are from 0 to 1",
    "ROW-1": "periods end after they start, and their end is exclusive",
    "ROW-2": "a subcategory belongs to the service's category",
    "ROW-3": "what a charge of this category must have, or must not",
    "ROW-4": "a name, type or status is null where its id is, a unit where its quantity is",
    "ROW-5": "a cost is its unit price times PricingQuantity",
    "ROW-6": "EffectiveCost is x_ActiveCost + x_IdleCost + x_UnknownCost",
    "SPLIT-1": "Allocated columns are null where AllocatedMethodId is",
    "SPLIT-2": "AllocatedMethodDetails has Elements with AllocatedRatio, and UsageUnit beside UsageQuantity",
    "SPLIT-3": "AllocatedResourceName is null exactly where AllocatedResourceId is; AllocatedTags only with them",
    "SPLIT-4": "AllocatedTags do not repeat keys of Tags",
    "SPLIT-5": "AllocatedRatio over all rows of one origin sums to exactly 1",
    "SPLIT-6": "dimensions and unit prices of split rows are their origin's",
    "SPLIT-7": "a split row's EffectiveCost is its AllocatedRatio of the origin's",
    "SPLIT-8": "an origin is split or told whole, never both with money",
}
"""What each rule asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault."""

    line: int
    """Of the file, from 1; of a value over several lines the last."""
    column: str
    """Empty where it is about a row or the file."""
    rule: str
    what: str
    allowed: str

    @property
    def words(self) -> str:
        """In one line, values shortened and without control characters."""
        place = f"{self.column}: " if self.column else ""
        return f"line {self.line}: {place}{self.what}; allowed: {self.allowed} [{self.rule}]"


@dataclass(slots=True)
class Findings:
    """Collects findings; of each kind the first few, and how many there were."""

    kept: list[Finding] = field(default_factory=list)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, line: int, column: str, rule: str, what: str, allowed: str) -> None:
        """Note a fault."""
        kind = (rule, column)
        number = self.counts[kind] = self.counts.get(kind, 0) + 1
        if number <= MOST_TOLD:
            self.kept.append(Finding(line=line, column=column, rule=rule, what=what, allowed=allowed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a check has found."""

    version: str
    rows: int
    split_rows: int
    origins: int
    """Charges that were split."""
    findings: tuple[Finding, ...]
    """The first of each kind, in the order of lines."""
    counts: Mapping[tuple[str, str], int]
    """By rule and column: all there were."""

    @property
    def faults(self) -> int:
        """All findings, told or not."""
        return sum(self.counts.values())


def shown(value: str) -> str:
    """A value for a message: short, quoted, without control characters."""
    return f"'{printable(value[:_MOST_SHOWN])}{'…' if len(value) > _MOST_SHOWN else ''}'"


def printable(text: str) -> str:
    """The text without what could move a terminal's cursor or turn its direction."""
    return "".join(character if character.isprintable() else "?" for character in text)

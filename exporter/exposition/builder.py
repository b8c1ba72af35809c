"""Collects the samples of one page in order, and keeps out what would make Prometheus refuse the page."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from exporter.exposition.family import Family, Kind, Labels
from exporter.exposition.metric import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What was left out of pages so far: series over the limit, and bad samples by reason."""

    series: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Named(Protocol):
    """What says which family a series is of: an own metric, or a row of a collectors file."""

    @property
    def name(self) -> str:
        """Of the family."""


class PageBuilder:
    """A page in the making. Not for several threads."""

    def __init__(self) -> None:
        self._heads: dict[str, tuple[Kind, str]] = {}
        self._values: dict[str, dict[Labels, int | float]] = {}
        self.reasons: Counter[str] = Counter()
        self.dropped_series = 0

    def declare(self, name: str, kind: Kind, text: str) -> None:
        """Give a family its place on the page; a second declaration changes nothing."""
        if name not in self._heads:
            self._heads[name] = (kind, text)
            self._values[name] = {}

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add a series to a declared family; a repeated label set or a value that is no number is counted instead."""
        if not math.isfinite(value):
            self.reasons["not_finite"] += 1
            return
        values = self._values[name]
        if labels in values:
            self.reasons["duplicate_series"] += 1
        else:
            values[labels] = value

    def metric(self, metric: Metric, labels: Labels, value: float | None) -> None:
        """Add a series of an own metric; ``None`` is absent."""
        if value is not None:
            self.add(metric.name, labels, value)

    def rows(self, rows: Iterable[tuple[Named, Labels, float | None]]) -> None:
        """Add series one by one, as ``add`` does; ``None`` is absent."""
        isfinite, families = math.isfinite, self._values
        for metric, labels, value in rows:
            if value is None:
                continue
            values = families[metric.name]
            if labels not in values and isfinite(value):
                values[labels] = value
            else:
                self.add(metric.name, labels, value)

    def column(self, metric: Named, labels: Sequence[Labels], values: Sequence[float | None]) -> None:
        """Add many series of one metric, as ``add`` does one by one; ``None`` is absent."""
        told = [value for value in values if value is not None]
        column = self._values[metric.name]
        new = dict(zip(labels, told, strict=False))
        whole = len(told) == len(new) == len(labels) and column.keys().isdisjoint(new.keys())
        if whole and all(map(math.isfinite, told)):
            column.update(new)
        else:
            self.rows((metric, one, value) for one, value in zip(labels, values, strict=True))

    def declare_all(self, metrics: Iterable[Metric]) -> None:
        """Declare own metrics in the order of the catalogue."""
        for metric in metrics:
            self.declare(metric.name, metric.kind, metric.help)

    def families(self) -> list[Family]:
        """Every family that has a series, in the order of declaration."""
        return [
            Family(name=name, kind=kind, help=text, values=self._values[name])
            for name, (kind, text) in self._heads.items()
            if self._values[name]
        ]

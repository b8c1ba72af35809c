"""Collects the samples of one page in order, and keeps out what would make Prometheus refuse the page."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.exposition.family import Family, Kind, Labels, Sample
from exporter.exposition.metric import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What was left out of pages so far: series over the limit, and bad samples by reason."""

    series: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class PageBuilder:
    """A page in the making. Not for several threads."""

    def __init__(self) -> None:
        self._heads: dict[str, tuple[Kind, str]] = {}
        self._samples: dict[str, list[Sample]] = {}
        self._seen: dict[str, set[str]] = {}
        self.reasons: Counter[str] = Counter()
        self.dropped_series = 0

    def declare(self, name: str, kind: Kind, text: str) -> None:
        """Give a family its place on the page; a second declaration changes nothing."""
        if name not in self._heads:
            self._heads[name] = (kind, text)
            self._samples[name] = []
            self._seen[name] = set()

    def add(self, name: str, labels: Labels, value: float) -> None:
        """Add a sample to a declared family; a repeated label set or a value that is no number is counted instead."""
        if not math.isfinite(value):
            self.reasons["not_finite"] += 1
            return
        seen = self._seen[name]
        if labels.text in seen:
            self.reasons["duplicate_series"] += 1
            return
        seen.add(labels.text)
        self._samples[name].append(Sample(labels, value))

    def metric(self, metric: Metric, labels: Labels, value: float | None) -> None:
        """Add a sample of an own metric; ``None`` is absent."""
        if value is not None:
            self.add(metric.name, labels, value)

    def declare_all(self, metrics: Iterable[Metric]) -> None:
        """Declare own metrics in the order of the catalogue."""
        for metric in metrics:
            self.declare(metric.name, metric.kind, metric.help)

    def families(self) -> list[Family]:
        """Every family that has a sample, in the order of declaration."""
        return [
            Family(name=name, kind=kind, help=text, samples=tuple(self._samples[name]))
            for name, (kind, text) in self._heads.items()
            if self._samples[name]
        ]

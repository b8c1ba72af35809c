"""The series of a page's families one by one, as the tests compare them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import Family, Labels
from exporter.model.snapshot import Snapshot

_PAIR = re.compile(r'([^=,]+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a family."""

    labels: Labels
    value: int | float

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names and values of its labels."""
        return pairs(self.labels)


def samples_of(family: Family) -> tuple[Sample, ...]:
    """Return the series one by one."""
    return tuple(Sample(carried, value) for carried, value in family.values.items())


def rows(snapshot: Snapshot, name: str, options: ExpositionOptions | None = None) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of every series that a metric has on the page of a snapshot."""
    return [
        (dict(sample.pairs), sample.value)
        for family in families(snapshot, options or ExpositionOptions())
        if family.name == name
        for sample in samples_of(family)
    ]


def pairs(carried: Labels) -> tuple[tuple[str, str], ...]:
    """Return names and values of a label set, in its order."""
    return tuple((name, _ESCAPED.sub(_unescaped, value)) for name, value in _PAIR.findall(carried))


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def duplicate_series(page: Iterable[Family]) -> list[tuple[str, frozenset[tuple[str, str]]]]:
    """Return name and label set of every series after the first of its kind; Prometheus refuses a page with one."""
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    twice = []
    for family in page:
        for sample in samples_of(family):
            key = (family.name, frozenset(sample.pairs))
            if key in seen:
                twice.append(key)
            seen.add(key)
    return twice

"""Metric families and their label sets, as every text format renders them."""

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NewType

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_PAIR = re.compile(r'([^=,]+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")

Labels = NewType("Labels", str)
"""An ordered label set as its text, ``name="value",...`` without braces, escaped: the same in both text formats.

A text knows its hash, and is shared by all series that carry it: nothing else is kept of a label set.
"""

NO_LABELS = Labels("")
_MOST_SETS = 1 << 16
"""Of one turn; more than any page has."""


class Kind(StrEnum):
    """Prometheus type of a family; ``LABEL`` is a row of a collectors file that becomes a label instead."""

    GAUGE = "gauge"
    COUNTER = "counter"
    LABEL = "label"


class _Sets:
    """Label sets by what they were made of: from page to page nearly all are the same."""

    def __init__(self) -> None:
        self.now: dict[Hashable, Labels] = {}
        self._before: dict[Hashable, Labels] = {}

    def new(self, parts: Hashable, base: Labels, more: Iterable[tuple[str, str | None]]) -> Labels:
        """Make or find one that has not been asked for since the last turn."""
        if len(self.now) >= _MOST_SETS:
            self.turn()
        found = self._before.get(parts)
        if found is None:
            text = ",".join([_pair(name, value) for name, value in more if value])
            found = Labels(f"{base},{text}" if base and text else base or text)
        self.now[parts] = found
        return found

    def turn(self) -> None:
        """Forget those that nobody has asked for since the last turn."""
        self.now, self._before = {}, self.now


_SETS = _Sets()
forget_unused = _SETS.turn
"""Forgets the label sets that were not asked for since the last call: those of pods that ended, above all."""


def labels(*pairs: tuple[str, str | None]) -> Labels:
    """A label set in the given order; empty values are left out, since Prometheus holds empty for absent."""
    return plus(NO_LABELS, *pairs)


def plus(base: Labels, *more: tuple[str, str | None]) -> Labels:
    """A label set with more labels behind; empty values are left out."""
    parts = (base, more)
    return _SETS.now.get(parts) or _SETS.new(parts, base, more)


class LabelNames:
    """Names of labels that go together: for what a page has many of, cheaper than pairs."""

    __slots__ = ("_names",)

    def __init__(self, *names: str) -> None:
        self._names = names

    def of(self, *values: str | None) -> Labels:
        """As ``labels``, of one value for each name."""
        return self.behind(NO_LABELS, *values)

    def behind(self, base: Labels, *values: str | None) -> Labels:
        """As ``plus``, of one value for each name."""
        parts = (self, base, values)
        return _SETS.now.get(parts) or _SETS.new(parts, base, zip(self._names, values, strict=True))


@lru_cache(maxsize=1024)  # new sets are made of the same few hundred pairs
def _pair(name: str, value: str) -> str:
    # What is no valid Unicode is replaced here, so that two sets that would be shown alike are known to be alike.
    valid = value if value.isascii() else value.encode("utf-8", "replace").decode()
    return f'{name}="{valid.translate(_ESCAPES)}"'


def pairs(carried: Labels) -> tuple[tuple[str, str], ...]:
    """Names and values of a label set, in its order."""
    return tuple((name, _ESCAPED.sub(_unescaped, value)) for name, value in _PAIR.findall(carried))


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a family, for who reads a page."""

    labels: Labels
    value: int | float

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Names and values of its labels."""
        return pairs(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All series of one metric name, in a stable order. ``name`` is the full name, with ``_total`` on counters."""

    name: str
    kind: Kind
    help: str
    values: Mapping[Labels, int | float]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The series one by one."""
        return tuple(Sample(carried, value) for carried, value in self.values.items())


def duplicate_series(families: Iterable[Family]) -> list[tuple[str, frozenset[tuple[str, str]]]]:
    """Name and label set of every series after the first of its kind; empty on a page that Prometheus takes whole."""
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    twice = []
    for family in families:
        for sample in family.samples:
            key = (family.name, frozenset(sample.pairs))
            if key in seen:
                twice.append(key)
            seen.add(key)
    return twice

"""Metric families and their samples, as every text format renders them."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Kind(StrEnum):
    """Prometheus type of a family; ``LABEL`` is a row of a collectors file that becomes a label instead."""

    GAUGE = "gauge"
    COUNTER = "counter"
    LABEL = "label"


@dataclass(frozen=True, slots=True)
class Labels:
    """An ordered label set with its escaped text, made once and shared by all samples that carry it."""

    pairs: tuple[tuple[str, str], ...]
    text: str
    """``name="value",...`` without braces; the same in both text formats."""

    def plus(self, *more: tuple[str, str | None]) -> "Labels":
        """This set with more labels behind; empty values are left out, since Prometheus holds empty for absent."""
        kept = tuple((name, value) for name, value in more if value)
        text = ",".join([_text(name, value) for name, value in kept])
        return Labels(self.pairs + kept, f"{self.text},{text}" if self.text and text else self.text or text)


NO_LABELS = Labels((), "")


def labels(*pairs: tuple[str, str | None]) -> Labels:
    """A label set in the given order; empty values are left out."""
    return NO_LABELS.plus(*pairs)


@lru_cache(maxsize=4096)  # the same few hundred pairs are on every page
def _text(name: str, value: str) -> str:
    return f'{name}="{value.translate(_ESCAPES)}"'


@dataclass(frozen=True, slots=True)
class Sample:
    """One value; positional, because a page has thousands of them."""

    labels: Labels
    value: int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All samples of one metric name, in a stable order. ``name`` is the full name, with ``_total`` on counters."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...] = ()


def duplicate_series(families: Iterable[Family]) -> list[tuple[str, frozenset[tuple[str, str]]]]:
    """Name and label set of every series after the first of its kind; empty on a page that Prometheus takes whole."""
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    twice = []
    for family in families:
        for sample in family.samples:
            key = (family.name, frozenset(sample.labels.pairs))
            if key in seen:
                twice.append(key)
            seen.add(key)
    return twice

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


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """An ordered label set with its escaped text, made once and shared by all samples that carry it.

    Two sets with the same text are the same; a text knows its hash, which makes the sets cheap to remember.
    """

    pairs: tuple[tuple[str, str], ...]
    text: str
    """``name="value",...`` without braces; the same in both text formats."""

    def plus(self, *more: tuple[str, str | None]) -> "Labels":
        """This set with more labels behind; empty values are left out, since Prometheus holds empty for absent."""
        return _extended(self, more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Labels) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


# From page to page nearly all label sets are the same: making them anew was half the cost of a page.
@lru_cache(maxsize=8192)
def _extended(base: Labels, more: tuple[tuple[str, str | None], ...]) -> Labels:
    kept = tuple((name, value) for name, value in more if value)
    text = ",".join([_text(name, value) for name, value in kept])
    return Labels(base.pairs + kept, f"{base.text},{text}" if base.text and text else base.text or text)


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

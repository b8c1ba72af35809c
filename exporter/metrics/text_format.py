"""Renders the two text formats of Prometheus; prometheus_client would append `_total` to DCGM's counters."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NewType, Self

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Labels = NewType("Labels", str)
"""An ordered label set as its text, ``name="value",...`` without braces, escaped: the same in both text formats.

A string caches its hash, and all series with the same labels share it.
"""

NO_LABELS = Labels("")
_MOST_SETS = 1 << 16
"""Maximum number of label sets between two turns, more than any page has."""


class Kind(StrEnum):
    """Prometheus type of a family; ``LABEL`` is a row of a collectors file that becomes a label instead."""

    GAUGE = "gauge"
    COUNTER = "counter"
    LABEL = "label"


class _Sets:
    """Caches label sets by their parts: nearly all are the same from page to page."""

    def __init__(self) -> None:
        self.now: dict[Hashable, Labels] = {}
        self._before: dict[Hashable, Labels] = {}

    def new(self, parts: Hashable, base: Labels, more: Iterable[tuple[str, str | None]]) -> Labels:
        """Return a label set that was not requested since the last turn."""
        if len(self.now) >= _MOST_SETS:
            self.turn()
        found = self._before.get(parts)
        if found is None:
            text = ",".join([_pair(name, value) for name, value in more if value])
            found = Labels(f"{base},{text}" if base and text else base or text)
        self.now[parts] = found
        return found

    def turn(self) -> None:
        """Drop the label sets that were not used since the last turn."""
        self.now, self._before = {}, self.now


_SETS = _Sets()
forget_unused = _SETS.turn
"""Drops the label sets that were not requested since the last call, such as those of ended pods."""


def labels(*pairs: tuple[str, str | None]) -> Labels:
    """Return a label set in the given order, without empty values, which mean absent in Prometheus."""
    return plus(NO_LABELS, *pairs)


def plus(base: Labels, *more: tuple[str, str | None]) -> Labels:
    """Return a label set with more labels appended; empty values are left out."""
    parts = (base, more)
    return _SETS.now.get(parts) or _SETS.new(parts, base, more)


class LabelNames:
    """Names of a group of labels; for frequent label sets cheaper than pairs."""

    __slots__ = ("_names",)

    def __init__(self, *names: str) -> None:
        self._names = names

    def of(self, *values: str | None) -> Labels:
        """Do the same as ``labels``, with one value per name."""
        return self.behind(NO_LABELS, *values)

    def behind(self, base: Labels, *values: str | None) -> Labels:
        """Do the same as ``plus``, with one value per name."""
        parts = (self, base, values)
        return _SETS.now.get(parts) or _SETS.new(parts, base, zip(self._names, values, strict=True))


@lru_cache(maxsize=1024)  # new sets are made of the same few hundred pairs
def _pair(name: str, value: str) -> str:
    # Invalid Unicode is replaced here, so two sets with the same text on the page are equal.
    valid = value if value.isascii() else value.encode("utf-8", "replace").decode()
    return f'{name}="{valid.translate(_ESCAPES)}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All series of one metric name, in a stable order. ``name`` is the full name, with ``_total`` on counters."""

    name: str
    kind: Kind
    help: str
    values: Mapping[Labels, int | float]


PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GO_EXPONENT_DIGITS = 6
_GO_EXPONENT_FROM = 10**_GO_EXPONENT_DIGITS
_PLAIN = {int, float}
_PURE = ({int}, {float})


def number(value: float) -> str:
    """Return a value as text: integers without a point, floats in the shortest form that parses to the same value.

    The form of floats is that of prometheus_client.
    """
    if isinstance(value, int):
        return str(int(value))
    text = repr(value)
    if -math.inf < value < _GO_EXPONENT_FROM:
        return text
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    point = text.find(".")
    if point <= _GO_EXPONENT_DIGITS:  # an exponent already
        return text
    mantissa = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{point - 1:02d}"


class Block:
    """The lines of a family, kept from page to page; only the text of values is made again.

    Names and labels are kept as pieces of text until a label set comes, goes or changes. An unchanged family is kept as
    a whole.

    Args:
        family: The family of the first page.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._labels: list[Labels] = []
        self._values: list[int | float] = []
        self._kind: type | None = None
        """Type of all values; ``None`` if they are not all integers or all floats."""
        self._pieces: list[str] = []
        self._parts: dict[bool, bytes] = {}
        self.show(family)

    def show(self, family: Family) -> None:
        """Replace the values by those of another page, of a family with the same name."""
        labels, values = list(family.values), list(family.values.values())
        kinds = set(map(type, values))
        kind = next(iter(kinds)) if kinds in _PURE else None
        again = labels == self._labels and (family.kind, family.help) == (self._family.kind, self._family.help)
        # Equal values can have different texts: 1 and 1.0, 0.0 and -0.0.
        comparable = again and kind is not None and kind is self._kind
        if comparable and values == self._values and (kind is int or 0.0 not in values):
            return
        if not again:
            name = family.name
            befores = [f"{name}{{{one}}} " if one else f"{name} " for one in labels]
            # The line end belongs to the next line, so each line has two pieces.
            self._pieces = [piece for before in befores for piece in (f"\n{before}", "")]
        plain = kinds <= _PLAIN and -math.inf < sum(values) < math.inf and max(values, default=0) < _GO_EXPONENT_FROM
        spell = repr if plain or kind is int else number
        if comparable and kind is float:
            old = zip(self._values, self._pieces[1::2], strict=True)
            texts: Iterable[str] = [
                text if value == then != 0 else spell(value) for value, (then, text) in zip(values, old, strict=True)
            ]
        else:
            texts = map(spell, values)
        self._pieces[1::2] = texts
        self._family, self._labels, self._values, self._kind = family, labels, values, kind
        self._parts.clear()

    def part(self, *, openmetrics: bool) -> bytes:
        """Return head and lines; empty without series."""
        if not self._pieces:
            return b""
        part = self._parts.get(openmetrics)
        if part is None:
            family = self._family
            text = "".join([_head(family, openmetrics=openmetrics), *self._pieces, "\n"])
            part = self._parts[openmetrics] = text.encode("utf-8", "replace")
        return part


def page(blocks: Iterable[Block], *, openmetrics: bool) -> list[bytes]:
    """Return a page in text format 0.0.4, or in OpenMetrics 1.0, in parts to be joined.

    OpenMetrics requires counters to end in ``_total``; DCGM's do not, so they are of type ``unknown`` there. Families
    without series are left out. Invalid Unicode is replaced, so one invalid name does not make the page invalid.
    """
    parts = [block.part(openmetrics=openmetrics) for block in blocks]
    return [*parts, b"# EOF\n"] if openmetrics else parts


def render(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """Return the joined page of families."""
    return b"".join(page(map(Block, families), openmetrics=openmetrics))


def _head(family: Family, *, openmetrics: bool) -> str:
    name, kind = family.name, str(family.kind)
    text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        text = text.replace('"', r"\"")
        if family.kind is Kind.COUNTER:
            if name.endswith("_total"):
                name = name.removesuffix("_total")
            else:
                kind = "unknown"
    return f"# HELP {name} {text}\n# TYPE {name} {kind}"


def negotiate(accept: str) -> bool:
    """Return whether the client prefers OpenMetrics 1.0; plain text is the default."""
    best = {True: 0.0, False: 0.0}
    for entry in accept.lower().split(","):
        media, *parts = (part.strip() for part in entry.split(";"))
        parameters = dict(part.split("=", 1) for part in parts if "=" in part)
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            continue
        if media == "application/openmetrics-text":
            if parameters.get("version", "1.0.0").strip('"') == "1.0.0":
                best[True] = max(best[True], quality)
        elif media in {"text/plain", "text/*", "*/*"}:
            best[False] = max(best[False], quality)
    return best[True] > 0 and best[True] >= best[False]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Name, type, help (with unit and source) and label names of one metric."""

    name: str
    kind: Kind
    help: str = ""
    labels: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    """Prefixes of further labels: the pods' own, by allow-list."""

    def meaning(self, text: str) -> Self:
        """Return the metric with its help."""
        return replace(self, help=text)


def plain(name: str, *labels: str, prefixes: tuple[str, ...] = ()) -> Metric:
    """Return a metric with these labels: a counter if its name ends in ``_total``, else a gauge."""
    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    return Metric(name=name, kind=kind, labels=labels, prefixes=prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Counts of what was left out of pages so far: series over the limit, and invalid samples by reason."""

    series: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class PageBuilder:
    """Builds a page. Not for several threads."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._values: dict[str, dict[Labels, int | float]] = {}
        self.reasons: Counter[str] = Counter()
        self.dropped_series = 0

    def metric(self, metric: Metric, labels: Labels, value: float | None) -> None:
        """Add a series of a declared metric, as ``rows`` does."""
        self.rows(((metric, labels, value),))

    def rows(self, rows: Iterable[tuple[Metric, Labels, float | None]]) -> None:
        """Add series one by one; ``None`` is absent. Values that are not finite and repeated label sets are counted."""
        isfinite, families = math.isfinite, self._values
        for metric, labels, value in rows:
            if value is None:
                continue
            values = families[metric.name]
            if not isfinite(value):
                self.reasons["not_finite"] += 1
            elif labels in values:
                self.reasons["duplicate_series"] += 1
            else:
                values[labels] = value

    def column(self, metric: Metric, labels: Sequence[Labels], values: Sequence[float | None]) -> None:
        """Add many series of one metric, as ``rows`` does one by one; ``None`` is absent."""
        there = [value for value in values if value is not None]
        column = self._values[metric.name]
        new = dict(zip(labels, there, strict=False))
        whole = len(there) == len(new) == len(labels) and column.keys().isdisjoint(new.keys())
        if whole and all(map(math.isfinite, there)):
            column.update(new)
        else:
            self.rows((metric, one, value) for one, value in zip(labels, values, strict=True))

    def declare_all(self, metrics: Iterable[Metric]) -> None:
        """Set the order of families on the page; a second declaration changes nothing."""
        for metric in metrics:
            self._metrics.setdefault(metric.name, metric)
            self._values.setdefault(metric.name, {})

    def families(self) -> list[Family]:
        """Return every family with a series, in the order of declaration."""
        return [
            Family(name=name, kind=metric.kind, help=metric.help, values=self._values[name])
            for name, metric in self._metrics.items()
            if self._values[name]
        ]

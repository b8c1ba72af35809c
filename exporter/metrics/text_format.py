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
        """Forget those that were not used since the last turn."""
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
    """A value as text: whole numbers whole, floats in the shortest form that reads back the same.

    Floats are spelt as prometheus_client spells them, so that both give the same bytes.
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
    """The lines of a family, for as long as pages show it: of a line only the value is made again for a page.

    What stands before the values is kept with them, as pieces of text that need only be joined, until label sets come,
    go or change. A family of which nothing has changed is kept whole.

    Args:
        family: What the first page shows.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._labels: list[Labels] = []
        self._values: list[int | float] = []
        self._kind: type | None = None
        """Of all values; ``None`` where they are not all integers or all floats."""
        self._pieces: list[str] = []
        self._parts: dict[bool, bytes] = {}
        self.show(family)

    def show(self, family: Family) -> None:
        """Take the values of another page; the family has the same name."""
        labels, values = list(family.values), list(family.values.values())
        kinds = set(map(type, values))
        kind = next(iter(kinds)) if kinds in _PURE else None
        again = labels == self._labels and (family.kind, family.help) == (self._family.kind, self._family.help)
        # Equal is not alike: 1 and 1.0, 0.0 and -0.0.
        comparable = again and kind is not None and kind is self._kind
        if comparable and values == self._values and (kind is int or 0.0 not in values):
            return
        if not again:
            name = family.name
            befores = [f"{name}{{{one}}} " if one else f"{name} " for one in labels]
            # Each line ends in front of the next one, which keeps it to two pieces.
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
        """Head and lines; empty without any series."""
        if not self._pieces:
            return b""
        part = self._parts.get(openmetrics)
        if part is None:
            family = self._family
            text = "".join([_head(family, openmetrics=openmetrics), *self._pieces, "\n"])
            part = self._parts[openmetrics] = text.encode("utf-8", "replace")
        return part


def page(blocks: Iterable[Block], *, openmetrics: bool) -> list[bytes]:
    """A page in text format 0.0.4, or in OpenMetrics 1.0, in parts to be put together.

    OpenMetrics wants counters to end in ``_total``; DCGM's do not and are typed ``unknown`` there, with their
    name untouched. Families without series are left out. Text that is no valid Unicode has its bad parts
    replaced, so that one odd name cannot cost the page.
    """
    parts = [block.part(openmetrics=openmetrics) for block in blocks]
    return [*parts, b"# EOF\n"] if openmetrics else parts


def render(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """A page of families, as ``page`` has it, put together."""
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
    """Of labels that come behind those, by allow-list: the pods' own."""

    def meaning(self, text: str) -> Self:
        """Return it with its help."""
        return replace(self, help=text)


def plain(name: str, *labels: str, prefixes: tuple[str, ...] = ()) -> Metric:
    """A metric with no labels but its own; a counter where its name ends in ``_total``, else a gauge."""
    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    return Metric(name=name, kind=kind, labels=labels, prefixes=prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What was left out of pages so far: series over the limit, and bad samples by reason."""

    series: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class PageBuilder:
    """A page in the making. Not for several threads."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._values: dict[str, dict[Labels, int | float]] = {}
        self.reasons: Counter[str] = Counter()
        self.dropped_series = 0

    def metric(self, metric: Metric, labels: Labels, value: float | None) -> None:
        """Add a series of a declared metric, as ``rows`` does."""
        self.rows(((metric, labels, value),))

    def rows(self, rows: Iterable[tuple[Metric, Labels, float | None]]) -> None:
        """Add series one by one; ``None`` is absent. A value that is no number and a repeated label set are counted."""
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
        """Give families their places on the page, in this order; a second declaration changes nothing."""
        for metric in metrics:
            self._metrics.setdefault(metric.name, metric)
            self._values.setdefault(metric.name, {})

    def families(self) -> list[Family]:
        """Every family that has a series, in the order of declaration."""
        return [
            Family(name=name, kind=metric.kind, help=metric.help, values=self._values[name])
            for name, metric in self._metrics.items()
            if self._values[name]
        ]

"""Builds pages of metrics and renders them in the two text formats of Prometheus.

prometheus_client would append `_total` to DCGM's counters.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, NewType, Self

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Labels = NewType("Labels", str)
"""Ordered label set as text: ``name="value",...`` without braces, escaped; the same in both text formats.

A string caches its hash, and all series with the same labels share it.
"""

NO_LABELS = Labels("")


class Kind(StrEnum):
    """Prometheus type of a family; ``LABEL`` is a row of a collectors file that becomes a label."""

    GAUGE = "gauge"
    COUNTER = "counter"
    LABEL = "label"


def labels(*pairs: tuple[str, str | None]) -> Labels:
    """Return a label set in the given order. Empty values are left out: Prometheus treats them as absent."""
    return plus(NO_LABELS, *pairs)


def plus(base: Labels, *more: tuple[str, str | None]) -> Labels:
    """Return a label set with more labels appended; empty values are left out."""
    return _joined(base, more)


def named(names: Sequence[str], *values: str | None, base: Labels = NO_LABELS) -> Labels:
    """Return a label set like ``plus``, with one value per name."""
    return _joined(base, tuple(zip(names, values, strict=True)))


@lru_cache(maxsize=4096)  # most sets repeat from page to page; limited, because pods change
def _joined(base: Labels, more: tuple[tuple[str, str | None], ...]) -> Labels:
    text = ",".join([_pair(name, value) for name, value in more if value])
    return Labels(f"{base},{text}" if base and text else base or text)


@lru_cache(maxsize=1024)  # new sets consist of the same few hundred pairs
def _pair(name: str, value: str) -> str:
    # Invalid Unicode is replaced here, so two sets with the same text on the page are equal.
    valid = value if value.isascii() else value.encode("utf-8", "replace").decode()
    return f'{name}="{valid.translate(_ESCAPES)}"'


class Family(NamedTuple):
    """All series of one metric name, in a stable order. ``name`` is the full name, with ``_total`` on counters."""

    name: str
    kind: Kind
    help: str
    values: Mapping[Labels, int | float]


PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GO_EXPONENT_DIGITS = 6
_GO_EXPONENT_FROM = 10**_GO_EXPONENT_DIGITS
_USUAL = frozenset({int, float})


def number(value: float) -> str:
    """Return a value as text: integers without a decimal point, floats in the shortest exact form.

    Floats have the same form as in prometheus_client.
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
    if point <= _GO_EXPONENT_DIGITS:  # the text already has an exponent
        return text
    mantissa = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
    return f"{mantissa}e+{point - 1:02d}"


class Shown(NamedTuple):
    """A family of the last page, the types of its values, and its text."""

    family: Family
    types: list[type]
    """The equal values 1 and 1.0 have different texts."""
    text: bytes


Kept = dict[str, Shown]
"""Families of the last page by name: most repeat on the next page."""


def render(families: Iterable[Family], *, openmetrics: bool, kept: Kept | None = None) -> bytes:
    """Return a page in text format 0.0.4, or in OpenMetrics 1.0.

    OpenMetrics requires names of counters to end in ``_total``. DCGM's do not, so their type there is ``unknown``.
    Families without series are left out. Invalid Unicode is replaced, so that one name cannot invalidate the page.

    Args:
        families: Families in the order of the page.
        openmetrics: Whether the format is OpenMetrics.
        kept: Families of the last page in this format; updated to those of this page.
    """
    kept, parts = {} if kept is None else kept, []
    for family in families:
        if values := family.values:
            types, last = [*map(type, values.values())], kept.get(family.name)
            is_same = last and last.family == family and last.types == types and [*last.family.values] == [*values]
            if not last or not is_same:
                last = kept[family.name] = Shown(family, types, _text(family, types, openmetrics=openmetrics))
            parts.append(last.text)
    return b"".join([*parts, b"# EOF\n"] if openmetrics else parts)


def _text(family: Family, types: Iterable[type], *, openmetrics: bool) -> bytes:
    name, values = family.name, family.values
    # ``number`` is slow, and few values need it.
    is_usual = _USUAL.issuperset(types) and -math.inf < sum(values.values()) < math.inf
    texts = map(repr if is_usual and max(values.values()) < _GO_EXPONENT_FROM else number, values.values())
    lines = [f"{name}{{{one}}} {text}" if one else f"{name} {text}" for one, text in zip(values, texts, strict=True)]
    return "\n".join([_head(family, openmetrics=openmetrics), *lines, ""]).encode("utf-8", "replace")


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
    """Return whether the client prefers OpenMetrics 1.0 to plain text, the default."""
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
    """Prefixes of additional labels: those that the allow-list exports from pods."""

    def meaning(self, text: str) -> Self:
        """Return the metric with its help."""
        return replace(self, help=text)


def plain(name: str, *labels: str, prefixes: tuple[str, ...] = ()) -> Metric:
    """Return a metric with these labels: a counter if its name ends in ``_total``, else a gauge."""
    kind = Kind.COUNTER if name.endswith("_total") else Kind.GAUGE
    return Metric(name=name, kind=kind, labels=labels, prefixes=prefixes)


Series = tuple[Metric, Labels, float | None]
"""Metric, labels and value of one series; ``None`` is absent."""


@dataclass(slots=True, kw_only=True)
class Dropped:
    """Counts of omitted data of all pages so far: series over the limit, and invalid samples by reason."""

    series: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class PageBuilder:
    """Builds a page. Not for several threads.

    Args:
        metrics: All metrics that the page can have, in its order; of several with one name, the first counts.
        room: Maximum number of series of holders.
        dropped: Counts of omitted data, which the builder increases.
    """

    def __init__(self, metrics: Iterable[Metric], room: int = 0, dropped: Dropped | None = None) -> None:
        self._metrics = metrics
        self._room = room
        self._dropped = dropped or Dropped()
        self._values: defaultdict[str, dict[Labels, int | float]] = defaultdict(dict)

    def metric(self, metric: Metric, labels: Labels, value: float | None) -> None:
        """Add one series of a metric; see ``rows``."""
        self.rows(((metric, labels, value),))

    def rows(self, rows: Iterable[Series]) -> None:
        """Add series. Series with a value that is not finite, or a repeated label set, are counted as dropped."""
        isfinite, families, reasons = math.isfinite, self._values, self._dropped.reasons
        for metric, labels, value in rows:
            if value is None:
                continue
            values = families[metric.name]
            if not isfinite(value):
                reasons["not_finite"] += 1
            elif labels in values:
                reasons["duplicate_series"] += 1
            else:
                values[labels] = value

    def pod(self, rows: Sequence[Series]) -> None:
        """Add the series of one holder; if there is no room for all of them, add none and count them as dropped."""
        if len(rows) > self._room:
            self._dropped.series += len(rows)
        else:
            self._room -= len(rows)
            self.rows(rows)

    def families(self) -> list[Family]:
        """Return every family with a series, in the order of the metrics; the builder is empty after that.

        Raises:
            KeyError: A series is of none of the metrics.
        """
        found, self._values = self._values, defaultdict(dict)
        of_metrics = ((metric, found.pop(metric.name, None)) for metric in self._metrics)
        families = [Family(metric.name, metric.kind, metric.help, values) for metric, values in of_metrics if values]
        if found:
            raise KeyError(*found)
        return families

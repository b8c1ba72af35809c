"""The two text formats of Prometheus; our own, because prometheus_client appends ``_total`` to DCGM's counters."""

import math
from collections.abc import Iterable

from exporter.exposition.family import Family, Kind, Labels

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
    """The lines of a family, for as long as pages show it: of a line only the value is made anew for a page.

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
    """Whether the client would rather have OpenMetrics 1.0; plain text for whoever does not ask for it."""
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

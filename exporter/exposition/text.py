"""The two text formats of Prometheus; our own, because prometheus_client appends ``_total`` to DCGM's counters."""

import math
from collections.abc import Iterable
from functools import lru_cache

from exporter.exposition.family import Family, Kind, Labels

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GO_EXPONENT_DIGITS = 6
_GO_EXPONENT_FROM = 10**_GO_EXPONENT_DIGITS


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
    go or change.

    Args:
        family: What the first page shows.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self._labels: list[Labels] = []
        self._pieces: list[str] = []
        self._floats: list[int | float] = []
        """The values, where all of them are floats: what is the same on the next page is spelt the same."""
        self.show(family)

    def show(self, family: Family) -> None:
        """Take the values of another page; the family has the same name."""
        labels = list(family.values)
        if labels != self._labels:
            self._labels, self._floats, name = labels, [], family.name
            befores = [f"{name}{{{one}}} " if one else f"{name} " for one in labels]
            # Each line ends in front of the next one, which keeps it to two pieces.
            self._pieces = [piece for before in befores for piece in (f"\n{before}", "")]
        self._pieces[1::2] = self._spelt(list(family.values.values()))
        self.family = family

    def _spelt(self, values: list[int | float]) -> Iterable[str]:
        """Each as ``number`` has it; where none needs more than ``repr`` no line of Python runs for each."""
        kinds = set(map(type, values))
        before, self._floats = self._floats, values if kinds == {float} else []
        if kinds <= {int}:
            return map(repr, values)
        plain = kinds <= {int, float} and -math.inf < sum(values) < math.inf and max(values) < _GO_EXPONENT_FROM
        spell = repr if plain else number
        if before and self._floats:
            texts = self._pieces[1::2]  # of zeros there are two
            old = zip(before, texts, strict=True)
            return [
                text if value == then != 0 else spell(value) for value, (then, text) in zip(values, old, strict=True)
            ]
        return map(spell, values)

    def text(self, *, openmetrics: bool) -> str:
        """Head and lines; empty without any series."""
        if not self._pieces:
            return ""
        family = self.family
        return "".join([_head(family.name, family.kind, family.help, openmetrics), *self._pieces, "\n"])


def page(blocks: Iterable[Block], *, openmetrics: bool) -> list[bytes]:
    """A page in text format 0.0.4, or in OpenMetrics 1.0, in parts to be put together.

    OpenMetrics wants counters to end in ``_total``; DCGM's do not and are typed ``unknown`` there, with their
    name untouched. Families without series are left out. Text that is no valid Unicode has its bad parts
    replaced, so that one odd name cannot cost the page.
    """
    parts = [block.text(openmetrics=openmetrics).encode("utf-8", "replace") for block in blocks]
    return [*parts, b"# EOF\n"] if openmetrics else parts


def render(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """A page of families, as ``page`` has it, put together."""
    return b"".join(page(map(Block, families), openmetrics=openmetrics))


@lru_cache(maxsize=1024)  # one for each family and format
def _head(name: str, kind: Kind, text: str, openmetrics: bool) -> str:  # noqa: FBT001 - so that the cache takes it
    shown, text = str(kind), text.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        text = text.replace('"', r"\"")
        if kind is Kind.COUNTER:
            if name.endswith("_total"):
                name = name.removesuffix("_total")
            else:
                shown = "unknown"
    return f"# HELP {name} {text}\n# TYPE {name} {shown}"


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

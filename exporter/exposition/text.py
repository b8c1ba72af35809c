"""The two text formats of Prometheus; our own, because prometheus_client appends ``_total`` to DCGM's counters."""

import math
from collections.abc import Iterable

from exporter.exposition.family import Family, Kind

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GO_EXPONENT_DIGITS = 6


def number(value: float) -> str:
    """A value as text: whole numbers whole, floats in the shortest form that reads back the same.

    Floats are spelt as prometheus_client spells them, so that both give the same bytes.
    """
    if isinstance(value, int):
        return str(int(value))
    text = repr(value)
    if -math.inf < value < 10**_GO_EXPONENT_DIGITS:
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


def render(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """A page in text format 0.0.4, or in OpenMetrics 1.0.

    OpenMetrics wants counters to end in ``_total``; DCGM's do not and are typed ``unknown`` there, with their
    name untouched. Families without samples are left out. Text that is no valid Unicode has its bad parts
    replaced, so that one odd name cannot cost the page.
    """
    lines: list[str] = []
    for family in families:
        if family.values:
            lines.extend(_head(family, openmetrics=openmetrics))
            lines.extend(_lines(family))
    if openmetrics:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode("utf-8", "replace")


def _lines(family: Family) -> list[str]:
    name = family.name
    return [
        f"{name}{{{labels}}} {number(value)}" if labels else f"{name} {number(value)}"
        for labels, value in family.values.items()
    ]


def _head(family: Family, *, openmetrics: bool) -> tuple[str, str]:
    name, kind = family.name, str(family.kind)
    text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        text = text.replace('"', r"\"")
        if family.kind is Kind.COUNTER:
            if name.endswith("_total"):
                name = name.removesuffix("_total")
            else:
                kind = "unknown"
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


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

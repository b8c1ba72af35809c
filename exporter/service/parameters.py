"""Defines the parameters of the API in one table: meaning, parser and description for OpenAPI."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from exporter.cost.dimensions import (
    DIMENSIONS,
    LABEL,
    MOST_LABELS,
    Dimension,
    Filters,
    dimension_of,
    label_problem,
    too_many_labels,
)
from exporter.cost.report import ShareIdle
from exporter.cost.window import Now, parse_window
from exporter.errors import ConfigError, did_you_mean, expected
from exporter.model.formatting import shown

FILTER = "filter."
MOST_LINES = 100_000
_LONGEST = 2000
_MOST_PROBLEMS = 20
_CHANGES_SUMS = ("filter", "shareCost", "shareLabels", "shareNamespaces", "shareSplit")
"""Prefixes of parameters that no endpoint may ignore, because the sums of the answer would be wrong."""
_YES, _NO = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the query.

    ``parse`` converts its text, and the time, to the value. It raises ConfigError, which names the parameter, or
    ValueError, for which the message shows ``allowed``.
    """

    name: str
    about: str
    """Meaning, in one or two sentences."""
    parse: Callable[[str, Now], Any]
    allowed: str
    default: str | None = None
    """Default value as text; ``None``: the value is ``None`` without the parameter."""
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    repeatable: bool = False
    """Whether the parameter may be repeated; its value is a tuple, and an empty text counts as a value."""
    prefix: str = ""
    """Prefix of the accepted names, each with a separate value; empty for a parameter with a single name."""


def read(
    parameters: Sequence[Parameter],
    pairs: Iterable[tuple[str, str]],
    now: Now,
    ignored: list[str] | None = None,
) -> dict[str, Any]:
    """Return the values by name.

    Args:
        parameters: The parameters of the endpoint.
        pairs: Names and texts of the query.
        now: The time, and the time zone of days and months.
        ignored: Receives a warning for each unknown parameter that cannot change sums; ``None`` makes each an error.

    Raises:
        ConfigError: Lists every parameter that is unknown (the first 20), repeated or invalid.
    """
    known = {parameter.name: parameter for parameter in parameters}
    given: dict[str, list[str]] = {}
    problems: list[str] = []
    unknown: dict[str, None] = {}
    for name, text in pairs:
        if any(one.prefix and name.startswith(one.prefix) for one in parameters):
            known[name] = replace(next(one for one in parameters if one.prefix), name=name)
        if name in known:
            given.setdefault(name, []).append(text)
        else:
            unknown[name] = None
    # Each name is compared with all known names; the limit bounds the time and the size of the answer.
    for name in sorted(unknown, key=lambda one: not one.startswith(_CHANGES_SUMS))[:_MOST_PROBLEMS]:
        refused = ignored is None or name.startswith(_CHANGES_SUMS)
        (problems if ignored is None or refused else ignored).append(_unknown(name, known, refused=refused))
    if len(unknown) > _MOST_PROBLEMS:
        more = f"{len(unknown) - _MOST_PROBLEMS} more unknown parameters"
        (problems if ignored is None else ignored).append(more)
    labels = [name.removeprefix(FILTER) for name in given if name.startswith(FILTER + LABEL)]
    problems += too_many_labels("filter", labels)
    problems += [f"{FILTER}{shown(name)}: {words}" for name in labels[:MOST_LABELS] if (words := label_problem(name))]
    values: dict[str, Any] = {}
    for name, parameter in known.items():
        texts = given.get(name, [])
        if not parameter.repeatable:
            texts = [text for text in texts if text.strip()]
        if len(texts) > 1 and not parameter.repeatable:
            problems.append(f"{name}: is given {len(texts)} times; allowed: once")
        values[name] = _value(parameter, texts, now, problems)
    if problems:
        raise ConfigError(*problems)
    return values


def _value(parameter: Parameter, texts: Sequence[str], now: Now, problems: list[str]) -> Any:  # noqa: ANN401 - of any parameter
    try:
        if parameter.repeatable:
            return tuple(part for text in texts for part in _checked(parameter, text, now))
        text = texts[0] if texts else parameter.default
        return None if text is None else _checked(parameter, text, now)
    except ConfigError as error:
        problems += error.problems
    except ValueError:
        problems.append(f"{parameter.name}: value '{shown(texts[0])}' is not known; allowed: {parameter.allowed}")
    return None


def _checked(parameter: Parameter, text: str, now: Now) -> Any:  # noqa: ANN401 - of any parameter
    if len(text) > _LONGEST:
        raise ConfigError(f"{parameter.name}: is longer than {_LONGEST} characters; allowed: {parameter.allowed}")
    return parameter.parse(text, now)


def _unknown(name: str, known: Mapping[str, Parameter], *, refused: bool) -> str:
    if refused:
        return f"{shown(name)}: unknown parameter{expected(name, known, ', '.join(known) or 'none')}"
    return f"{shown(name)}: unknown parameter, ignored{did_you_mean(name, known)}"


def _dimensions(text: str, _now: Now) -> tuple[Dimension, ...]:
    found: list[Dimension] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name, problem = dimension_of(part)
        if problem:
            raise ConfigError(f"by: '{shown(part)}' {problem}")
        found.append(name)
    if problems := too_many_labels("by", found):
        raise ConfigError(*problems)
    return tuple(dict.fromkeys(found))


def _filter(text: str, _now: Now) -> tuple[str, ...]:
    """Return values between commas; a backslash escapes a comma or a backslash after it."""
    values = [""]
    for part in re.split(r"\\([\\,])|,", text):
        if part is None:  # a comma without a backslash before it
            values.append("")
        else:
            values[-1] += part
    return tuple(values)


def filter_text(value: str) -> str:
    """Return a value with the escapes for the parameter of a filter."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


def words(meanings: Mapping[str, object]) -> Callable[[str, Now], object]:
    """Return a function that converts a word in any case to its meaning."""

    def parse(text: str, _now: Now) -> object:
        word = text.strip().lower()
        if word not in meanings:
            raise ValueError(text)
        return meanings[word]

    return parse


def count(name: str, about: str, default: str | None = None, most: int | None = None) -> Parameter:
    """Return a parameter for a whole number from 0."""

    def parse(text: str, _now: Now) -> int:
        number = text.strip()
        if not (number.isascii() and number.isdecimal()) or (most is not None and int(number) > most):
            raise ValueError(text)
        return int(number)

    return Parameter(
        name=name,
        about=about,
        parse=parse,
        allowed="a whole number from 0" + ("" if most is None else f" to {most}"),
        default=default,
        schema={"type": "integer", "minimum": 0, **({} if most is None else {"maximum": most})},
    )


def switch(name: str, about: str) -> Parameter:
    """Return a parameter for a switch, by default false."""
    return Parameter(
        name=name,
        about=about,
        parse=words({**dict.fromkeys(_YES, True), **dict.fromkeys(_NO, False)}),
        allowed="true, false",
        default="false",
        schema={"type": "boolean"},
    )


def choice(name: str, about: str, known: Sequence[str], default: str) -> Parameter:
    """Return a parameter for a choice of words."""
    return Parameter(
        name=name,
        about=about,
        parse=words({word: word for word in known}),
        allowed=", ".join(known),
        default=default,
        schema={"type": "string", "enum": list(known)},
    )


WINDOW = Parameter(
    name="window",
    about="Period: 30d, 12h, today, yesterday, week, lastweek, month, lastmonth, 2026-10, 2026-Q3, 2026, 2026-10-03,"
    " 2026-10-01..2026-10-15 (both days), two RFC 3339 times, or two Unix times with a comma; days and months of the"
    " service's time zone. Begins and ends on whole hours UTC;"
    " a period that has begun is cut at the last recorded hour.",
    parse=lambda text, now: parse_window(text, now.seconds, now.zone),
    allowed="such as 30d, month, 2026-10, 2026-10-01..2026-10-15",
    default="30d",
)
BY = Parameter(
    name="by",
    about="Dimensions of the lines, separated by commas; empty: one line for all held devices.",
    parse=_dimensions,
    allowed=f"{', '.join(DIMENSIONS)}, label:KEY",
    default="namespace",
)
FILTERS = tuple(
    Parameter(
        name=f"{FILTER}{dimension}",
        about=f"Only lines of this {dimension}; several with commas (one within a value is written \\,) or by giving it"
        " again. Empty: of those without one.",
        parse=_filter,
        allowed="values separated by commas",
        repeatable=True,
    )
    for dimension in DIMENSIONS
)
LABEL_FILTER = Parameter(
    name=f"{FILTER}{LABEL}KEY",
    prefix=f"{FILTER}{LABEL}",
    about="Only lines with this value of a cost label, as filter.label:project=llm; values as of the other filters.",
    parse=_filter,
    allowed=f"values separated by commas; at most {MOST_LABELS} labels",
    repeatable=True,
)
SHARE_IDLE = choice(
    "shareIdle",
    "How Unallocated money is spread over owners: not, evenly, or by their own cost.",
    get_args(ShareIdle),
    "none",
)
SHARE_UNALLOCATED = switch("shareUnallocated", "Spread Unattributed money, too, in the manner of shareIdle.")
SERIES = switch("series", "Each line also has its figures day by day.")
OFFSET = count("offset", "How many owners' lines are left out at the beginning.", "0")
LIMIT = count(
    "limit",
    "How many owners' lines there are at most; lines without an owner and the total are always there.",
    str(MOST_LINES),
    MOST_LINES,
)


def filters_of(values: Mapping[str, Any]) -> Filters:
    """Return the filters among the values of ``read``."""
    return Filters(
        wanted={
            name.removeprefix(FILTER): frozenset(value)
            for name, value in values.items()
            if name.startswith(FILTER) and value
        }
    )

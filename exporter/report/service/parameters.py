"""Parameters of the API: one table says what each is, how it is read and how OpenAPI tells of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, get_args

from exporter.errors import ConfigError
from exporter.report.fleet.report import ShareIdle
from exporter.report.fleet.values import Dimension, Filters
from exporter.report.fleet.windows import parse_window

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
FILTER = "filter."
MOST_LINES = 100_000
_LONGEST = 2000
_MOST_PROBLEMS = 20
_POOLS = {"node pool", "node-pool", "nodepool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the query.

    ``parse`` turns its text, and the Unix time of now, into the value; it raises ConfigError, whose words name the
    parameter, or ValueError, for which ``allowed`` is told.
    """

    name: str
    about: str
    """One sentence or two."""
    parse: Callable[[str, float], Any]
    allowed: str
    default: str | None = None
    """As a client would write it; ``None``: the value is ``None`` where the parameter is not given."""
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    repeatable: bool = False
    """May be given several times: the value is a tuple. An empty text is a value, too."""


def read(parameters: Sequence[Parameter], pairs: Iterable[tuple[str, str]], now_seconds: float) -> dict[str, Any]:
    """The values by name.

    Raises:
        ConfigError: With every parameter that is not known (the first 20), given twice or cannot be understood.
    """
    known = {parameter.name: parameter for parameter in parameters}
    given: dict[str, list[str]] = {}
    problems: list[str] = []
    unknown: dict[str, None] = {}
    for name, text in pairs:
        if name in known:
            given.setdefault(name, []).append(text)
        else:
            unknown[name] = None
    # Each is compared with all that are known, and told: an answer must not be many times its question.
    problems += [_unknown(name, known) for name in list(unknown)[:_MOST_PROBLEMS]]
    if len(unknown) > _MOST_PROBLEMS:
        problems.append(f"{len(unknown) - _MOST_PROBLEMS} more unknown parameters")
    values: dict[str, Any] = {}
    for name, parameter in known.items():
        texts = given.get(name, [])
        if not parameter.repeatable:
            texts = [text for text in texts if text.strip()]
        if len(texts) > 1 and not parameter.repeatable:
            problems.append(f"{name}: is given {len(texts)} times; allowed: once")
        values[name] = _value(parameter, texts, now_seconds, problems)
    if problems:
        raise ConfigError(*problems)
    return values


def _value(parameter: Parameter, texts: Sequence[str], now_seconds: float, problems: list[str]) -> Any:  # noqa: ANN401 - of any parameter
    try:
        if parameter.repeatable:
            return tuple(part for text in texts for part in _checked(parameter, text, now_seconds))
        text = texts[0] if texts else parameter.default
        return None if text is None else _checked(parameter, text, now_seconds)
    except ConfigError as error:
        problems += error.problems
    except ValueError:
        problems.append(f"{parameter.name}: value '{shown(texts[0])}' is not known; allowed: {parameter.allowed}")
    return None


def _checked(parameter: Parameter, text: str, now_seconds: float) -> Any:  # noqa: ANN401 - of any parameter
    if len(text) > _LONGEST:
        raise ConfigError(f"{parameter.name}: is longer than {_LONGEST} characters; allowed: {parameter.allowed}")
    return parameter.parse(text, now_seconds)


def _unknown(name: str, known: Mapping[str, Parameter]) -> str:
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known) or 'none'}"
    return f"{shown(name)}: unknown parameter; {hint}"


def shown(text: str) -> str:
    """Somebody's text as it may stand in a message."""
    return "".join(character if character.isprintable() else "?" for character in text[:80])


def _dimensions(text: str, _now_seconds: float) -> tuple[Dimension, ...]:
    found: list[Dimension] = []
    for part in (part.strip() for part in text.split(",") if part.strip()):
        name = "pool" if part.lower() in _POOLS else part
        match = [dimension for dimension in DIMENSIONS if dimension == name]
        if not match:
            close = get_close_matches(name, DIMENSIONS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"by: '{shown(part)}' is no dimension; allowed: {', '.join(DIMENSIONS)}{hint}")
        found += match
    return tuple(dict.fromkeys(found))


def _filter(text: str, _now_seconds: float) -> tuple[str, ...]:
    """Values between commas; a backslash takes its meaning from a comma or a backslash after it."""
    values = [""]
    escaped = False
    for character in text:
        if escaped:
            values[-1] += character if character in "\\," else "\\" + character
        elif character == ",":
            values.append("")
        elif character != "\\":
            values[-1] += character
        escaped = character == "\\" and not escaped
    return tuple(values if not escaped else [*values[:-1], values[-1] + "\\"])


def filter_text(value: str) -> str:
    """A value as it is written in the parameter of a filter."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


def _one_of(*words: str) -> Callable[[str, float], str]:
    def parse(text: str, _now_seconds: float) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def _switch(text: str, _now_seconds: float) -> bool:
    return {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}[
        _one_of("true", "1", "on", "yes", "false", "0", "off", "no")(text.strip().lower(), 0.0)
    ]


def _count(most: int) -> Callable[[str, float], int]:
    def parse(text: str, _now_seconds: float) -> int:
        number = text.strip()
        if not (number.isascii() and number.isdecimal()) or int(number) > most:
            raise ValueError(text)
        return int(number)

    return parse


def switch(name: str, about: str, *, default: bool = False) -> Parameter:
    """True or false."""
    return Parameter(
        name=name,
        about=about,
        parse=_switch,
        allowed="true, false",
        default="true" if default else "false",
        schema={"type": "boolean"},
    )


def choice(name: str, about: str, *words: str) -> Parameter:
    """One of a few words, the first by default."""
    return Parameter(
        name=name,
        about=about,
        parse=_one_of(*words),
        allowed=", ".join(words),
        default=words[0],
        schema={"type": "string", "enum": list(words)},
    )


WINDOW = Parameter(
    name="window",
    about="Period: 30d, 12h, today, yesterday, week, lastweek, month, lastmonth, 2026-10, 2026-Q3, 2026, 2026-10-03,"
    " 2026-10-01..2026-10-15 (both days), two RFC 3339 times, or two Unix times with a comma. Ends on whole hours UTC;"
    " a period that has begun is cut at the last whole hour.",
    parse=parse_window,
    allowed="such as 30d, month, 2026-10, 2026-10-01..2026-10-15",
    default="30d",
)
BY = Parameter(
    name="by",
    about="What lines are told apart by, separated by commas; empty: one line for all that is held.",
    parse=_dimensions,
    allowed=", ".join(DIMENSIONS),
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
SHARE_IDLE = choice(
    "shareIdle", "How Unallocated money is spread over owners: not, evenly, or by their own cost.", *get_args(ShareIdle)
)
SHARE_UNALLOCATED = switch("shareUnallocated", "Spread Unattributed money, too, in the manner of shareIdle.")
SERIES = switch("series", "Each line also has its figures day by day.")
OFFSET = Parameter(
    name="offset",
    about="How many owners' lines are left out at the beginning.",
    parse=_count(1_000_000_000),
    allowed="a whole number from 0",
    default="0",
    schema={"type": "integer", "minimum": 0},
)
LIMIT = Parameter(
    name="limit",
    about="How many owners' lines there are at most; what is nobody's, and the total, always are there.",
    parse=_count(MOST_LINES),
    allowed=f"a whole number from 0 to {MOST_LINES}",
    default=str(MOST_LINES),
    schema={"type": "integer", "minimum": 0, "maximum": MOST_LINES},
)


def filters_of(values: Mapping[str, Any]) -> Filters:
    """The filters among the values that ``read`` gave."""
    return Filters(
        wanted={
            dimension: frozenset(values[f"{FILTER}{dimension}"])
            for dimension in DIMENSIONS
            if values.get(f"{FILTER}{dimension}")
        }
    )

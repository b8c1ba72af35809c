"""Parses requests of OpenCost and Kubecost clients: windows, steps, aggregation and filters."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, tzinfo
from typing import Any

from exporter.cost.dimensions import LABEL, Dimension, Filters, LineKey, label_problem, too_many_labels
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Now, Period, Window, last_days, parse_window, period_at
from exporter.errors import ConfigError
from exporter.model.formatting import shown
from exporter.service.parameters import Parameter, count, switch, words

NOBODY, IDLE, UNATTRIBUTED_NAME = "__unallocated__", "__idle__", "__unattributed__"
"""Names in OpenCost: an owner without the property, and time without an owner. The third name is not in OpenCost."""
MOST_STEPS = 400
_MOST_DAYS = 3650


def kind_of(key: LineKey) -> str:
    """Return a line's kind in lower case, as in OpenCost."""
    return key.kind.lower()


FILTERABLE = ("cluster", "node", "namespace", "controllerKind", "controllerName", "team")
_KINDS = ("deployment", "statefulset", "daemonset", "job")
PARTS = ("cluster", "node", "namespace", "controllerKind", "team", "controller", "label:team", *_KINDS)
"""Properties that rows can be aggregated by, in addition to labels."""
_DIMENSION_OF: Mapping[str, Dimension] = {
    **{name: name for name in ("cluster", "node", "namespace", "team")},
    "controllerKind": "kind",
    **dict.fromkeys(("controller", "controllerName", *_KINDS), "workload"),
    "label:team": "team",
}
_LACKING = frozenset({"pod", "container", "service", "department", "environment", "owner", "product"})


def is_lacking(name: str) -> bool:
    """Return whether OpenCost can aggregate by this property but the ledger does not record it."""
    return name in _LACKING or name.startswith("annotation:")


def _is_label(name: str) -> bool:
    return name.startswith(LABEL) and not label_problem(name)


def dimension_of(name: str) -> Dimension | None:
    """Return the ledger's dimension for a property of OpenCost; ``None`` if the ledger does not record it."""
    return _DIMENSION_OF.get(name, name if name.startswith(LABEL) else None)


def value_of(name: str, key: LineKey) -> str:
    """Return a line's value of a property; empty if the line has none."""
    if name in _KINDS:
        return key.workload if kind_of(key) == name else ""
    if name == "controller":
        return f"{kind_of(key)}:{key.workload}" if key.workload else ""
    dimension = dimension_of(name)
    value = key.value(dimension) if dimension else ""
    return value.lower() if name == "controllerKind" else value


def keeps(wanted: Mapping[str, frozenset[str]], key: LineKey) -> bool:
    """Return whether a line matches the conditions; kinds are in lower case."""
    return all(value_of(name, key) in values for name, values in wanted.items())


_TERM = re.compile(
    r"\s*(?P<name>[A-Za-z]+)(?:\[(?P<label>[^\]]*)\])?\s*:\s*"
    r'(?P<values>"[^"]*"(?:\s*,\s*"[^"]*")*|[^\s+"|]+)\s*\+?'
)


def conditions(text: str, _now: Now) -> dict[str, frozenset[str]]:
    """Parse a filter such as ``namespace:"a","b"+controllerKind:"job"`` to values by property; kinds are in lower case.

    Raises:
        ConfigError: The text is not a filter; the message shows the part that is invalid.
    """
    found: dict[str, frozenset[str]] = {}
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        name = _property_of_term(match) if match else None
        if match is None or name is None:
            raise ConfigError(
                f"filter: '{shown(text)}' is not understood from '{shown(text[at:])}'; allowed: terms such as"
                f' namespace:"a","b" of {", ".join(FILTERABLE)}, label[KEY], joined by +'
            )
        values = [value.strip().strip('"') for value in match["values"].split(",")]
        wanted = frozenset(value.lower() if name == "controllerKind" else value for value in values)
        found[name] = found[name] & wanted if name in found else wanted
        at = match.end()
    return found


def _property_of_term(match: re.Match[str]) -> str | None:
    """Return the property of a filter's term; ``None`` if it is not filterable."""
    name, label = match["name"], match["label"]
    if name == "label" and label:
        return "team" if label == "team" else LABEL + label if _is_label(LABEL + label) else None
    if label is not None:
        return None
    return "controllerName" if name == "controller" else name if name in FILTERABLE else None


_DAYS = re.compile(r"(\d{1,5})([dw])")
_MINUTES = re.compile(r"(\d{1,8})m")
_STEP = re.compile(r"(\d{1,6})([mhdw])")
_LENGTHS = {"hour": HOUR_SECONDS, "day": DAY_SECONDS, "week": 7 * DAY_SECONDS}
_SECONDS = {"m": 60, "h": HOUR_SECONDS, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}


_CALENDAR: Mapping[str, Period] = {"weeknow": "week", "month": "month", "quarter": "quarter"}
"""Calendar periods that bound sets, by value of ``accumulate``."""


def window_of(text: str, now: Now) -> Window:
    """Parse a window; days are calendar days and include today, as in OpenCost.

    Raises:
        ConfigError: The text is not a window, or not a whole number of hours.
    """
    written = text.strip()
    if match := _DAYS.fullmatch(written):
        days = int(match[1]) * (7 if match[2] == "w" else 1)
        if not 1 <= days <= _MOST_DAYS:
            raise ConfigError(f"window: '{shown(text)}' has no day, or too many; allowed: 1d to {_MOST_DAYS}d")
        start, end = last_days(days, now)
        return Window(start_seconds=start, end_seconds=end, label=f"{written} of the calendar")
    if match := _MINUTES.fullmatch(written):
        if int(match[1]) % 60 or not int(match[1]):
            raise ConfigError(
                f"window: '{shown(text)}' is no whole number of hours, and the ledger is recorded by the hour; allowed:"
                " 60m, 2h, 7d"
            )
        written = f"{int(match[1]) // 60}h"
    elif "," in written and "T" in written.upper():
        written = written.replace(",", "..")
    return parse_window(written, now.seconds, now.zone)


def _step(text: str, _now: Now) -> int | None:
    if text.strip() in {"window", "all"}:
        return None
    match = _STEP.fullmatch(text.strip())
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not seconds or seconds % HOUR_SECONDS:
        raise ConfigError(
            f"step: value '{shown(text)}' is no whole number of hours, by which the ledger is recorded; allowed: 1h,"
            " 1d, 7d, window"
        )
    return seconds


def _aggregate(text: str, _now: Now) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS and not is_lacking(name) and not _is_label(name)]
    if unknown or not names:
        raise ConfigError(
            *(
                f"aggregate: '{shown(name)}' is no property of OpenCost's; allowed: {', '.join(PARTS)}, label:KEY; pod,"
                f" container, service and annotation:NAME are accepted, and every owner is {NOBODY} in them"
                for name in unknown or [text]
            )
        )
    if problems := too_many_labels("aggregate", names):
        raise ConfigError(*problems)
    return tuple(names)


_SHARES = {
    **dict.fromkeys(("true", "1", "weighted"), "weighted"),
    **dict.fromkeys(("false", "0", "none"), "none"),
    "even": "even",
}
_ACCUMULATIONS = {
    **dict.fromkeys(("true", "1", "all"), "all"),
    **dict.fromkeys(("false", "0", "none", ""), ""),
    **{word: word for word in (*_LENGTHS, *_CALENDAR)},
}


def _text(text: str, _now: Now) -> str:
    return text.strip()


_WINDOW = Parameter(
    name="window",
    about="Period: today, yesterday, week, lastweek, month, lastmonth, 24h, 7d (days of the calendar, today among"
    " them), two RFC 3339 or two Unix times with a comma. Begins and ends on whole hours UTC.",
    parse=window_of,
    allowed="such as 7d, lastweek, 2026-10-01T00:00:00Z,2026-10-08T00:00:00Z",
    default="7d",
)
_FILTER = Parameter(
    name="filter",
    about='Rows that are wanted: terms such as namespace:"a","b" or controllerKind:"job", joined by +.',
    parse=conditions,
    allowed='such as namespace:"a"+controllerKind:"job"',
)
_CURRENCY = Parameter(
    name="currency",
    about="Currency of the costs where there are several, else that of --currency; not known to OpenCost.",
    parse=_text,
    allowed="an ISO 4217 code",
)
_LIMIT = count("limit", "How many rows each set has at most.")
PARAMETERS: tuple[Parameter, ...] = (
    _WINDOW,
    Parameter(
        name="aggregate",
        about="Dimensions of the rows, separated by commas. The ledger does not record pods, containers, services,"
        f" annotations, and labels that the agents do not take: every owner is {NOBODY} in them, and warning says so.",
        parse=_aggregate,
        allowed=f"{', '.join(PARTS)}, label:KEY",
        default="cluster,node,namespace,controllerKind,controller",
    ),
    Parameter(
        name="step",
        about="Length of each set of rows; the whole window by default.",
        parse=_step,
        allowed="1h, 1d, 7d, window",
        default="window",
    ),
    Parameter(
        name="accumulate",
        about="true or all: one set for the whole window, whatever the step; hour, day, week: sets of this length;"
        " weeknow, month, quarter: sets that end with the calendar's week (Monday), month, quarter, in the service's"
        " time zone.",
        parse=words(_ACCUMULATIONS),
        allowed="true, all, false, hour, day, week, weeknow, month, quarter",
        default="false",
    ),
    switch("includeIdle", f"Add a row {IDLE} of GPUs without a holder."),
    switch("idle", "The same, in Kubecost's word: the row is there where either of the two is true."),
    Parameter(
        name="shareIdle",
        about="Spread the money of GPUs without a holder over owners: true or weighted (by their cost), even.",
        parse=words(_SHARES),
        allowed="true, false, weighted, even",
        default="false",
    ),
    _FILTER,
    Parameter(
        name="filterNamespaces",
        about="The same as filter=namespace, in older words: values separated by commas.",
        parse=lambda text, _: frozenset(value.strip() for value in text.split(",")),
        allowed="values separated by commas",
    ),
    _CURRENCY,
    count("offset", "How many rows of each set are left out, the dearest first.", "0"),
    _LIMIT,
)


def _optional(name: str, about: str, allowed: str = "any text") -> Parameter:
    return Parameter(name=name, about=about, parse=_text, allowed=allowed)


SUGGESTION_PARAMETERS: tuple[Parameter, ...] = (
    _WINDOW,
    _FILTER,
    _LIMIT,
    _optional("field", f"Values of: {', '.join(FILTERABLE)}; anything else has none."),
    _optional("search", "Only values that contain this, whatever the case."),
)
ASSET_PARAMETERS: tuple[Parameter, ...] = (
    _WINDOW,
    _CURRENCY,
    replace(
        _FILTER,
        about='Nodes that are wanted: cluster:"a" or node:"a","b", joined by +.',
        allowed='such as cluster:"a"',
    ),
    Parameter(
        name="filterTypes",
        about="Kubecost's: types of assets; there are nodes only. Where it is given, data is a list of one set.",
        parse=lambda text, _: frozenset(one.strip().lower() for one in text.split(",")),
        allowed="Node",
    ),
    *(
        _optional(name, "Accepted, and without a meaning here.", "anything")
        for name in ("aggregate", "accumulate", "includeIdle", "step")
    ),
)


def wanted_of(values: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return all conditions of a request, by property."""
    found: dict[str, frozenset[str]] = dict(values["filter"] or {})
    if (namespaces := values["filterNamespaces"]) is not None:
        found["namespace"] = found.get("namespace", namespaces) & namespaces
    return found


def sets_of(window: Window, values: Mapping[str, Any], zone: tzinfo = UTC) -> tuple[Window, ...]:
    """Return the periods of the sets, in the order of time.

    Raises:
        ConfigError: There are too many sets.
    """
    period = _CALENDAR.get(values["accumulate"])
    seconds = _LENGTHS.get(values["accumulate"]) or values["step"] or window.seconds
    if values["accumulate"] == "all":
        seconds = window.seconds
    starts = [window.start_seconds]
    while (
        end := period_at(period, starts[-1], zone).end_seconds if period else starts[-1] + seconds
    ) < window.end_seconds:
        starts.append(end)
    if len(starts) == 1:
        return (window,)
    if len(starts) > MOST_STEPS:
        raise ConfigError(
            f"step: {len(starts)} sets are more than {MOST_STEPS}; allowed: a longer step, or a shorter window"
        )
    ends = [*starts[1:], window.end_seconds]
    return tuple(Window(start_seconds=start, end_seconds=end) for start, end in zip(starts, ends, strict=True))


def dimensions_of(names: Iterable[str]) -> tuple[Dimension, ...]:
    """Return the ledger's dimensions for properties, without duplicates."""
    return tuple(dict.fromkeys(dimension for name in names if (dimension := dimension_of(name))))


def pushed(wanted: Mapping[str, frozenset[str]]) -> Filters:
    """Return the filters that the source can apply; kinds are left out, because the ledger spells them differently."""
    found = {dimension_of(name): values for name, values in wanted.items() if name != "controllerKind"}
    return Filters(wanted={dimension: values for dimension, values in found.items() if dimension is not None})

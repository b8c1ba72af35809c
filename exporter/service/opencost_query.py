"""What a client of OpenCost or Kubecost asks for: windows, steps, aggregation and filters in their words."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any

from exporter.cost.ledger import (
    DAY_SECONDS,
    HOUR_SECONDS,
    LABEL,
    Dimension,
    LineKey,
    Now,
    Window,
    label_problem,
    last_days,
    parse_window,
    too_many_labels,
)
from exporter.errors import ConfigError
from exporter.service.parameters import Parameter, choice, shown, switch

NOBODY, IDLE, UNATTRIBUTED_NAME = "__unallocated__", "__idle__", "__unattributed__"
"""OpenCost's names: an owner that lacks what is asked for; what nobody held. The third is ours."""
_TERM = re.compile(
    r"\s*(?P<name>[A-Za-z]+)(?:\[(?P<label>[^\]]*)\])?\s*:\s*"
    r'(?P<values>"[^"]*"(?:\s*,\s*"[^"]*")*|[^\s+"|]+)\s*'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of what rows are told apart by: its dimensions, and a line's name in it."""

    dimensions: tuple[Dimension, ...]
    name: Callable[[LineKey], str]


def kind_of(key: LineKey) -> str:
    """As OpenCost spells kinds: in small letters."""
    return key.kind.lower()


def _controller(key: LineKey) -> str:
    return f"{kind_of(key)}:{key.workload}" if key.workload else ""


def _of_kind(kind: str) -> Callable[[LineKey], str]:
    return lambda key: key.workload if kind_of(key) == kind else ""


_TEAM = Part(dimensions=("team",), name=lambda key: key.team)
_CONTROLLERS = ("deployment", "statefulset", "daemonset", "job")
PARTS: Mapping[str, Part] = {
    "cluster": Part(dimensions=("cluster",), name=lambda key: key.cluster),
    "node": Part(dimensions=("node",), name=lambda key: key.node),
    "namespace": Part(dimensions=("namespace",), name=lambda key: key.namespace),
    "controllerKind": Part(dimensions=("kind",), name=kind_of),
    "controller": Part(dimensions=("workload",), name=_controller),
    "team": _TEAM,
    "label:team": _TEAM,
    **{kind: Part(dimensions=("workload",), name=_of_kind(kind)) for kind in _CONTROLLERS},
}
_LACKING = frozenset({"pod", "container", "service", "department", "environment", "owner", "product"})
_ANNOTATION = "annotation:"
_NONE = Part(dimensions=(), name=lambda _: "")


def is_lacking(name: str) -> bool:
    """Return whether OpenCost can aggregate by this property and the ledger does not record it."""
    return name in _LACKING or name.startswith(_ANNOTATION)


def part_of(name: str) -> Part:
    """Return the part of a property; one that the ledger does not record is empty on every line."""
    if name.startswith(LABEL) and name not in PARTS:
        return Part(dimensions=(name,), name=lambda key: key.value(name))
    return PARTS.get(name, _NONE)


_FIELDS: Mapping[str, str] = {
    "cluster": "cluster",
    "node": "node",
    "namespace": "namespace",
    "controllerKind": "controllerKind",
    "controllerName": "controllerName",
    "controller": "controllerName",
    "team": "team",
}
FILTER_DIMENSIONS: Mapping[str, tuple[Dimension, ...]] = {
    "cluster": ("cluster",),
    "node": ("node",),
    "namespace": ("namespace",),
    "controllerKind": ("kind",),
    "controllerName": ("workload",),
    "team": ("team",),
}
_VALUE_OF: Mapping[str, Callable[[LineKey], str]] = {
    "cluster": lambda key: key.cluster,
    "node": lambda key: key.node,
    "namespace": lambda key: key.namespace,
    "controllerKind": kind_of,
    "controllerName": lambda key: key.workload,
    "team": lambda key: key.team,
}


def dimensions_of_field(name: str) -> tuple[Dimension, ...]:
    """Return what a ledger must be told apart by for a filter by a field or a label."""
    return FILTER_DIMENSIONS.get(name, (name,))


def value_of(name: str, key: LineKey) -> str:
    """Return a line's value of a field or label that can be filtered by; kinds in small letters."""
    return _VALUE_OF[name](key) if name in _VALUE_OF else key.value(name)


def keeps(wanted: Mapping[str, frozenset[str]], key: LineKey) -> bool:
    """Whether a line is asked for; kinds in small letters."""
    return all(value_of(name, key) in values for name, values in wanted.items())


def conditions(text: str, _now: Now) -> dict[str, frozenset[str]]:
    """``namespace:"a","b"+controllerKind:"job"``: what must hold, all of it; kinds in small letters.

    Raises:
        ConfigError: It is not understood, and from where on.
    """
    found: dict[str, frozenset[str]] = {}
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        name = _FIELDS.get(match["name"]) if match else None
        if match and match["name"] == "label" and match["label"]:
            label = LABEL + match["label"]
            name = "team" if label == "label:team" else None if label_problem(label) else label
        elif match and match["label"] is not None:
            name = None
        if match is None or name is None:
            raise ConfigError(
                f"filter: '{shown(text)}' is not understood from '{shown(text[at:])}'; allowed: terms such as"
                f' namespace:"a","b" of {", ".join(FILTER_DIMENSIONS)}, label[KEY], joined by +'
            )
        values = [value.strip().strip('"') for value in match["values"].split(",")]
        wanted = frozenset(value.lower() if name == "controllerKind" else value for value in values)
        found[name] = found[name] & wanted if name in found else wanted
        at = match.end()
        if at < len(text) and text[at] in "+ ":
            at += 1
    return found


MOST_STEPS = 400
_MOST_DAYS = 3650
_DAYS = re.compile(r"(\d{1,5})([dw])")
_MINUTES = re.compile(r"(\d{1,8})m")
_STEP = re.compile(r"(\d{1,6})([mhdw])")
_LENGTHS = {"hour": HOUR_SECONDS, "day": DAY_SECONDS, "week": 7 * DAY_SECONDS}
_SECONDS = {"m": 60, "h": HOUR_SECONDS, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}


def _first_after(day: date, months: int) -> date:
    """Return the first day of the next period of so many months that divides the year."""
    count = day.year * 12 + (day.month - 1) // months * months + months
    return date(count // 12, count % 12 + 1, 1)


_CALENDAR: Mapping[str, Callable[[date], date]] = {
    "weeknow": lambda day: day + timedelta(days=7 - day.weekday()),
    "month": lambda day: _first_after(day, 1),
    "quarter": lambda day: _first_after(day, 3),
}
"""From a day to the first day of the next set."""


def window_of(text: str, now: Now) -> Window:
    """Return the period; days are those of the calendar, today among them, as OpenCost counts them.

    Raises:
        ConfigError: It is none, or is no whole number of hours.
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


def _resolution(text: str, _now: Now) -> str:
    if not _STEP.fullmatch(text.strip()):
        raise ValueError(text)
    return text


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


def _is_label(name: str) -> bool:
    return name.startswith(LABEL) and not label_problem(name)


def _share(text: str, _now: Now) -> str:
    words = {"true": "true", "1": "true", "false": "none", "0": "none", "none": "none"}
    known = {**words, "weighted": "weighted", "even": "even"}
    return known[text.strip().lower()] if text.strip().lower() in known else _refused(text)


def _refused(text: str) -> str:
    raise ValueError(text)


def _accumulate(text: str, _now: Now) -> str:
    word = {"true": "all", "1": "all", "false": "", "0": "", "none": ""}.get(text.strip().lower(), text.strip().lower())
    if word not in {"", "all", *_LENGTHS, *_CALENDAR}:
        raise ValueError(text)
    return word


def _values(name: str) -> Callable[[str, Now], frozenset[str]]:
    def parse(text: str, _now: Now) -> frozenset[str]:
        values = (value.strip() for value in text.split(","))
        return frozenset(value.lower() if name == "controllerKind" else value for value in values)

    return parse


def _team_labels(text: str, _now: Now) -> frozenset[str]:
    pairs = [pair.strip().partition(":") for pair in text.split(",")]
    if any(name != "team" or not colon for name, colon, _ in pairs):
        raise ValueError(text)
    return frozenset(value for _, _, value in pairs)


def _nothing(text: str, _now: Now) -> None:
    raise ValueError(text)


def _text(text: str, _now: Now) -> str:
    return text


def ignored(name: str) -> Parameter:
    """Return a parameter that clients send and that has no meaning here."""
    return Parameter(name=name, about="Accepted, and without a meaning here.", parse=_text, allowed="anything")


def _not_here(name: str) -> Parameter:
    return Parameter(
        name=name,
        about="Not offered: only GPUs are counted, which no namespace holds for others. Refused where it is given.",
        parse=_nothing,
        allowed="leave it out",
    )


OLD_FILTERS: Mapping[str, str] = {
    "filterClusters": "cluster",
    "filterNodes": "node",
    "filterNamespaces": "namespace",
    "filterControllerKinds": "controllerKind",
    "filterControllers": "controllerName",
    "filterLabels": "team",
}

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        name="window",
        about="Period: today, yesterday, week, lastweek, month, lastmonth, 24h, 7d (days of the calendar, today among"
        " them), two RFC 3339 or two Unix times with a comma. Begins and ends on whole hours UTC.",
        parse=window_of,
        allowed="such as 7d, lastweek, 2026-10-01T00:00:00Z,2026-10-08T00:00:00Z",
        default="7d",
    ),
    Parameter(
        name="aggregate",
        about="What rows are told apart by, separated by commas. The ledger does not record pods, containers, services,"
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
        parse=_accumulate,
        allowed="true, all, false, hour, day, week, weeknow, month, quarter",
        default="false",
    ),
    Parameter(
        name="resolution",
        about="Accepted, and without a meaning: the ledger counts every second.",
        parse=_resolution,
        allowed="such as 1m",
    ),
    switch("includeIdle", f"Add a row {IDLE} of what nobody held."),
    switch("idle", "The same, in Kubecost's word: the row is there where either of the two is true."),
    Parameter(
        name="shareIdle",
        about="Spread what nobody held over owners: true (as shareSplit says), weighted, even.",
        parse=_share,
        allowed="true, false, weighted, even",
        default="false",
    ),
    choice("shareSplit", "How shareIdle=true is spread: by owners' cost, or evenly.", "weighted", "even"),
    switch("idleByNode", f"A row {IDLE} for each node."),
    switch("splitIdle", f"A row {IDLE} for each cluster."),
    Parameter(
        name="filter",
        about='Rows that are wanted: terms such as namespace:"a","b" or controllerKind:"job", joined by +.',
        parse=conditions,
        allowed='such as namespace:"a"+controllerKind:"job"',
    ),
    *(
        Parameter(
            name=name,
            about=f"The same as filter={field}, in older words: values separated by commas.",
            parse=_team_labels if field == "team" else _values(field),
            allowed="team:NAME" if field == "team" else "values separated by commas",
        )
        for name, field in OLD_FILTERS.items()
    ),
    Parameter(
        name="currency",
        about="Currency of the costs where there are several, else that of --currency; not known to OpenCost.",
        parse=_text,
        allowed="an ISO 4217 code",
    ),
    Parameter(
        name="offset",
        about="How many rows of each set are left out, the dearest first.",
        parse=lambda text, _: int(text) if text.isascii() and text.isdecimal() else _refused(text),
        allowed="a whole number",
        default="0",
        schema={"type": "integer", "minimum": 0},
    ),
    Parameter(
        name="limit",
        about="How many rows each set has at most.",
        parse=lambda text, _: int(text) if text.isascii() and text.isdecimal() else _refused(text),
        allowed="a whole number",
        schema={"type": "integer", "minimum": 0},
    ),
    *(_not_here(name) for name in ("shareNamespaces", "shareLabels", "shareCost")),
    *(
        ignored(name)
        for name in (
            "reconcile",
            "external",
            "etl",
            "costMetric",
            "costUnit",
            "shareTenancyCosts",
            "includeAggregatedMetadata",
            "includeProportionalAssetResourceCosts",
            "includeSharedCostBreakdown",
        )
    ),
)


def wanted_of(values: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """All conditions together."""
    found: dict[str, frozenset[str]] = dict(values["filter"] or {})
    for name, field in OLD_FILTERS.items():
        if values[name] is not None:
            found[field] = found[field] & values[name] if field in found else values[name]
    return found


def sets_of(window: Window, values: Mapping[str, Any], zone: tzinfo = UTC) -> tuple[Window, ...]:
    """The periods of the sets, in the order of time.

    Raises:
        ConfigError: There would be too many.
    """
    if values["accumulate"] in _CALENDAR:
        return _calendar_sets(window, _CALENDAR[values["accumulate"]], zone)
    seconds = _LENGTHS.get(values["accumulate"]) or values["step"]
    if values["accumulate"] == "all" or seconds is None or seconds >= window.seconds:
        return (window,)
    if -(-window.seconds // seconds) > MOST_STEPS:
        raise ConfigError(
            f"step: {-(-window.seconds // seconds)} sets are more than {MOST_STEPS}; allowed: a longer step, or a"
            " shorter window"
        )
    return tuple(
        Window(start_seconds=start, end_seconds=min(start + seconds, window.end_seconds))
        for start in range(window.start_seconds, window.end_seconds, seconds)
    )


def _calendar_sets(window: Window, after: Callable[[date], date], zone: tzinfo) -> tuple[Window, ...]:
    starts = [window.start_seconds]
    while (end := _midnight(after(datetime.fromtimestamp(starts[-1], zone).date()), zone)) < window.end_seconds:
        starts.append(end)
    ends = [*starts[1:], window.end_seconds]
    return tuple(Window(start_seconds=start, end_seconds=end) for start, end in zip(starts, ends, strict=True))


def _midnight(day: date, zone: tzinfo) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp())

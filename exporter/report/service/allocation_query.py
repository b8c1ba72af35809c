"""What a client of OpenCost or Kubecost asks for: windows, steps, aggregation and filters in their words."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from exporter.errors import ConfigError
from exporter.report.fleet.values import DAY_SECONDS, HOUR_SECONDS, Window
from exporter.report.fleet.windows import parse_window
from exporter.report.service.allocation_parts import IDLE, PARTS, conditions
from exporter.report.service.parameters import Parameter, choice, shown, switch

MOST_STEPS = 400
_DAYS = re.compile(r"(\d{1,5})([dw])")
_MINUTES = re.compile(r"(\d{1,8})m")
_STEP = re.compile(r"(\d{1,6})([mhdw])")
_SECONDS = {"m": 60, "h": HOUR_SECONDS, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}


def window_of(text: str, now_seconds: float) -> Window:
    """The period; days are those of the calendar, today among them, as OpenCost counts them.

    Raises:
        ConfigError: It is none, or is no whole number of hours.
    """
    written = text.strip()
    if match := _DAYS.fullmatch(written):
        end = int(now_seconds // HOUR_SECONDS) * HOUR_SECONDS
        days = int(match[1]) * (7 if match[2] == "w" else 1)
        start = int(now_seconds // DAY_SECONDS) * DAY_SECONDS - (days - 1) * DAY_SECONDS
        if days < 1 or start < 0:
            raise ConfigError(f"window: '{shown(text)}' has no day; allowed: 1d or more")
        if end <= start:  # the first hour of a day has nothing of it yet: then it is the day before
            start, end = start - DAY_SECONDS, start
        return Window(start_seconds=start, end_seconds=end, label=f"{written} of the calendar")
    if match := _MINUTES.fullmatch(written):
        if int(match[1]) % 60 or not int(match[1]):
            raise ConfigError(
                f"window: '{shown(text)}' is no whole number of hours, and the ledger is recorded by the hour; allowed:"
                " 60m, 2h, 7d"
            )
        return parse_window(f"{int(match[1]) // 60}h", now_seconds)
    if "," in written and "T" in written.upper():
        return parse_window(written.replace(",", ".."), now_seconds)
    return parse_window(written, now_seconds)


def _step(text: str, _now_seconds: float) -> int | None:
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


def _resolution(text: str, _now_seconds: float) -> str:
    if not _STEP.fullmatch(text.strip()):
        raise ValueError(text)
    return text


def _aggregate(text: str, _now_seconds: float) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise ConfigError(
            *(
                f"aggregate: '{shown(name)}' is not known to the ledger, which has owners, not pods or labels; allowed:"
                f" {', '.join(PARTS)}"
                for name in unknown or [text]
            )
        )
    return tuple(names)


def _share(text: str, _now_seconds: float) -> str:
    words = {"true": "true", "1": "true", "false": "none", "0": "none", "none": "none"}
    known = {**words, "weighted": "weighted", "even": "even"}
    return known[text.strip().lower()] if text.strip().lower() in known else _refused(text)


def _refused(text: str) -> str:
    raise ValueError(text)


def _accumulate(text: str, _now_seconds: float) -> str:
    word = {"true": "all", "1": "all", "false": "", "0": "", "none": ""}.get(text.strip().lower(), text.strip().lower())
    if word not in {"", "all", "hour", "day", "week"}:
        raise ValueError(text)
    return word


def _values(name: str) -> Callable[[str, float], frozenset[str]]:
    def parse(text: str, _now_seconds: float) -> frozenset[str]:
        values = (value.strip() for value in text.split(","))
        return frozenset(value.lower() if name == "controllerKind" else value for value in values)

    return parse


def _team_labels(text: str, _now_seconds: float) -> frozenset[str]:
    pairs = [pair.strip().partition(":") for pair in text.split(",")]
    if any(name != "team" or not colon for name, colon, _ in pairs):
        raise ValueError(text)
    return frozenset(value for _, _, value in pairs)


def _nothing(text: str, _now_seconds: float) -> None:
    raise ValueError(text)


def _text(text: str, _now_seconds: float) -> str:
    return text


def _ignored(name: str) -> Parameter:
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
        " them), two RFC 3339 or two Unix times with a comma. Ends on whole hours UTC.",
        parse=window_of,
        allowed="such as 7d, lastweek, 2026-10-01T00:00:00Z,2026-10-08T00:00:00Z",
        default="7d",
    ),
    Parameter(
        name="aggregate",
        about="What rows are told apart by, separated by commas; pods, containers, services and labels other than team"
        " are not known to the ledger.",
        parse=_aggregate,
        allowed=", ".join(PARTS),
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
        about="true: one set for the whole window, whatever the step; hour, day, week: sets of this length.",
        parse=_accumulate,
        allowed="true, false, hour, day, week",
        default="false",
    ),
    Parameter(
        name="resolution",
        about="Accepted, and without a meaning: the ledger counts every second.",
        parse=_resolution,
        allowed="such as 1m",
    ),
    switch("includeIdle", f"Add a row {IDLE} of what nobody held."),
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
        about="Which money is told, where there are several; not known to OpenCost.",
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
        _ignored(name)
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


def sets_of(window: Window, values: Mapping[str, Any]) -> tuple[Window, ...]:
    """The periods of the sets, in the order of time.

    Raises:
        ConfigError: There would be too many.
    """
    named = {"hour": HOUR_SECONDS, "day": DAY_SECONDS, "week": 7 * DAY_SECONDS}
    seconds = named.get(values["accumulate"]) or values["step"]
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

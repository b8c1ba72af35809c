"""Provides the frame of every page: menu, filters, and notes on simulation, freshness, completeness and prices."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from urllib.parse import quote, urlencode

from exporter.cost.dimensions import DIMENSIONS, LABEL, Dimension, Filters, LineKey, label_problem, too_many_labels
from exporter.cost.render import TITLES
from exporter.cost.report import NO_MATCH, FleetReport, Question
from exporter.cost.window import Now, Window
from exporter.errors import ConfigError
from exporter.model.formatting import day
from exporter.service.data import Freshness
from exporter.service.parameters import SHARE_IDLE, SHARE_UNALLOCATED, WINDOW, choice, count, filter_text
from exporter.service.parameters import read as read_values

NONE = "(none)"
"""Value in an address that means the empty value, such as no team. An empty parameter does not filter."""
_OF_A_TABLE = ("sort", "page", "q", "columns")
_DATES = ("from", "to")
_TWO_DATES = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.\.(\d{4}-\d{2}-\d{2}))?")
DEFAULT_WINDOW = WINDOW.default or ""
_LONGEST = 500

Asked = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A parsed request of a page."""

    prefix: str
    """Prefix of all paths if a proxy serves the pages below a folder; otherwise empty."""
    path: str
    window: Window
    now_seconds: float
    asked: Asked = field(default_factory=dict)
    """Known parameters that are not empty, as written."""
    question: Question = field(default_factory=Question)
    """Filters, and sharing of money without an owner."""
    is_funnel: bool = False
    """Whether tables show the steps from held to effective instead of idle and unknown time."""
    page: int = 1
    usual_currency: str = ""
    """Currency of most of the fleet's GPU-hours, shown by default."""

    def first(self, name: str, otherwise: str = "") -> str:
        """Return the first value of a parameter, as written."""
        return self.asked.get(name, (otherwise,))[0]

    def currency_of(self, report: FleetReport | None) -> str:
        """Return the first currency with money: the requested one, the usual one, any other."""
        there = report.currencies if report else ()
        wanted = (self.first("currency"), self.usual_currency)
        return next((one for one in wanted if one in there), there[0] if there else "")

    @property
    def window_text(self) -> str:
        """The window as written, or the default window."""
        return self.first("window", DEFAULT_WINDOW)

    def about(self, *by: Dimension, with_series: bool = False) -> Question:
        """Return the question of the page with the given dimensions."""
        return replace(self.question, by=by, with_series=with_series)

    def link(self, path: str | None = None, **changes: str | int | None) -> str:
        """Return the address of a page with the same window, filters, sharing and currency, except ``changes``.

        ``None`` removes a parameter. The address of another page has no order and no page number.
        """
        asked = dict(self.asked)
        if path is not None and path != self.path:
            asked = {name: values for name, values in asked.items() if name not in _OF_A_TABLE}
        if "page" not in changes:
            asked.pop("page", None)
        for name, value in changes.items():
            asked.pop(name, None)
            if value is not None:
                asked[name] = (str(value),)
        path = self.path if path is None else path
        pairs = [(name, value) for name, values in asked.items() for value in values if value]
        return f"{self.prefix}{path}" + (f"?{urlencode(pairs, quote_via=quote, safe=':/')}" if pairs else "")

    def menu(self, path: str) -> str:
        """Return the address of a page of the menu; it does not keep the subject of an owner page as a filter."""
        subject: Iterable[str] = ()
        if self.path == "/owner":
            subject = (name for name in dimensions_in(self.asked) if name != "cluster")
        return self.link(path, **dict.fromkeys(subject))

    def owner(self, **parts: str) -> str:
        """Return the address of an owner's page, within the filters."""
        return self.link("/owner", **{name: value or NONE for name, value in parts.items()})

    def workload(self, of: LineKey) -> str:
        """Return the address of the page of a line's workload."""
        where = {"cluster": of.cluster} if of.cluster else {}
        return self.owner(**where, namespace=of.namespace, kind=of.kind, workload=of.workload)

    def download(self, by: Iterable[Dimension], form: str) -> str:
        """Return the address of a table's data in the API, with the same window, filters and sharing."""
        pairs = [("window", self.window_text), ("by", ",".join(by))]
        for name in dimensions_in(self.asked):
            pairs += [(f"filter.{name}", "" if value == NONE else filter_text(value)) for value in self.asked[name]]
        if self.question.is_shared:
            pairs.append(("shareIdle", self.question.share_idle))
        if self.question.share_unallocated:
            pairs.append(("shareUnallocated", "true"))
        pairs.append(("format", form))
        return f"{self.prefix}/api/v1/report?{urlencode(pairs, quote_via=quote)}"


def dimensions_in(asked: Asked) -> list[Dimension]:
    """Return the dimensions in the filters of a page, labels last."""
    return [name for name in DIMENSIONS if name in asked] + [name for name in asked if name.startswith(LABEL)]


_PARAMETERS = (
    WINDOW,
    replace(SHARE_IDLE, name="share"),
    SHARE_UNALLOCATED,
    count("page", "", "1"),
    choice("columns", "", ("states", "funnel"), "states"),
)
_NAMES = tuple(parameter.name for parameter in _PARAMETERS)


def read_view(path: str, pairs: Iterable[tuple[str, str]], now: Now, prefix: str = "") -> View:
    """Parse the parameters of a page; unknown names, and all but the first value of a name, are ignored.

    Raises:
        ConfigError: Lists every invalid parameter.
    """
    known = {*_NAMES, *_DATES, "currency", *_OF_A_TABLE, *DIMENSIONS}
    asked: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        if (name in known or (name.startswith(LABEL) and not label_problem(name))) and value.strip():
            # Bytes of an address that are not UTF-8 become surrogates, which a link cannot contain.
            text = value.strip()[:_LONGEST].encode("utf-8", "replace").decode()
            asked[name] = (*asked.get(name, ()), text)
    problems = too_many_labels("the page's address", asked)
    first, last = (asked.pop(name, ("",))[0] for name in _DATES)
    if first and last:  # both fields of the form; the window includes both days
        asked["window"] = (f"{first}..{last}",)
    elif first or last:
        problems.append("from, to: one of the two dates is missing; give both, or neither and a period")
    try:
        values = read_values(_PARAMETERS, [(name, asked[name][0]) for name in _NAMES if name in asked], now)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    wanted = {name: frozenset("" if value == NONE else value for value in asked[name]) for name in dimensions_in(asked)}
    return View(
        prefix=prefix,
        path=path,
        window=values["window"],
        now_seconds=now.seconds,
        asked=asked,
        question=Question(
            filters=Filters(wanted=wanted), share_idle=values["share"], share_unallocated=values["shareUnallocated"]
        ),
        is_funnel=values["columns"] == "funnel",
        page=max(1, values["page"]),
    )


GROUPS: tuple[Dimension, ...] = ("cluster", "namespace", "team", "model")
"""Dimensions that every page offers as filters; few enough lines in any fleet to read with their days."""
MOST_CHOICES = 500


def choices(report: FleetReport | None, labels: Mapping[str, tuple[str, ...]]) -> Mapping[Dimension, tuple[str, ...]]:
    """Return the values that filters offer, in alphabetical order.

    Args:
        report: Report by ``GROUPS``; ``None`` if it is unknown.
        labels: Values of cost labels by key.
    """
    lines = (*report.held, *report.apart) if report else ()
    found = {name: sorted({str(getattr(line.key, name)) for line in lines}) for name in GROUPS if report}
    return {
        **{name: tuple(value or NONE for value in values[:MOST_CHOICES]) for name, values in found.items()},
        **{LABEL + key: known[:MOST_CHOICES] for key, known in labels.items()},
    }


def make_frame(
    view: View,
    freshness: Freshness,
    report: FleetReport | None,
    offered: Mapping[Dimension, tuple[str, ...]],
    whole: FleetReport | None,
) -> dict[str, object]:
    """Return the values of ``base.html`` around a page.

    Args:
        view: The page.
        freshness: Freshness of the data.
        report: Report of the page; ``None`` if it could not be read.
        offered: Values that the filters offer.
        whole: Report on the whole period by ``GROUPS`` and day; ``None`` if it is unknown.
    """
    labels = [name for name in dict.fromkeys((*offered, *view.asked)) if name.startswith(LABEL)]
    filtered, dates = dimensions_in(view.asked), _TWO_DATES.fullmatch(view.window_text)
    return {
        "labels": labels,
        "windows": _windows(view.now_seconds),
        "dates": dates.groups(default=dates[1]) if dates else ("", ""),
        "fields": () if view.path == "/owner" else (*GROUPS, *labels),
        "filtered": filtered,
        "chips": 0 if view.path == "/owner" else len(filtered) + view.question.is_shared,
        "currency": view.currency_of(report),
        # An empty page itself shows that nothing matches.
        "notes": [note for note in report.trust.notes if not note.startswith(NO_MATCH)] if report else (),
        "unpriced": tuple(_unpriced(whole)) if whole and report and report.total.unpriced_seconds else (),
        "unknown": tuple(_unknown(view, offered)),
        "simulated": freshness.simulated or bool(report and report.simulated),
    }


def _unpriced(whole: FleetReport) -> Iterator[tuple[str, float, str, str, str]]:
    """Yield model, seconds, first and last day, and a row for a price book, of unpriced time; most seconds first."""
    found: dict[str, list[float]] = {}
    for line in (*whole.held, *whole.apart):
        sums = found.setdefault(line.key.model, [0.0] * len(whole.periods))
        for number, figures in enumerate(line.series):
            sums[number] += figures.unpriced_seconds
    for model, sums in sorted(found.items(), key=lambda one: -sum(one[1])):
        days = [day(period.start_seconds) for period, seconds in zip(whole.periods, sums, strict=True) if seconds > 0]
        if days:
            row = f"- model: {json.dumps(model)}\n  per_gpu_hour: PRICE\n  source: ORIGIN\n  as_of: {days[-1]}"
            yield model, sum(sums), days[0], days[-1], row


def _windows(now_seconds: float) -> list[tuple[str, str]]:
    """Return names and texts of common periods."""
    today = datetime.fromtimestamp(now_seconds, tz=UTC)
    last = f"{today.replace(day=1) - timedelta(days=1):%Y-%m}"
    offered = [("7 days", "7d"), ("30 days", "30d"), ("90 days", "90d"), ("Last month", last)]
    if today.day > 1 or today.hour:
        # A month has no recorded hour in its first hour.
        offered.insert(3, ("This month", f"{today:%Y-%m}"))
    return offered


def _unknown(view: View, offered: Mapping[Dimension, tuple[str, ...]]) -> Iterator[str]:
    """Yield texts on filter values without data in the period, with similar values."""
    for name, known in offered.items():
        if name.startswith(LABEL):
            continue  # offered values are those of the last day, not of this period
        for value in view.asked.get(name, ()):
            if value in known or len(known) >= MOST_CHOICES:
                continue
            near = get_close_matches(value, known, n=3, cutoff=0.5) or known[:5]
            there = f"; there is: {', '.join(near)}" if near else ""
            yield f"{TITLES[name]} {value} had no GPU in this period{there}."

"""What every page shows: the menu, the filters, whether what it shows is real, new, whole and priced."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from difflib import get_close_matches
from typing import NamedTuple, get_args
from urllib.parse import quote, urlencode

from exporter.cost.ledger import (
    DIMENSIONS,
    LABEL,
    Dimension,
    Filters,
    LineKey,
    Now,
    Window,
    label_problem,
    parse_window,
    too_many_labels,
    total_of,
)
from exporter.cost.render import TITLES
from exporter.cost.report import NO_MATCH, FleetReport, ReportLine, ShareIdle, group_of, is_apart, rank
from exporter.errors import ConfigError
from exporter.model.formatting import day, minute, plural
from exporter.service.data import Book, Freshness
from exporter.service.parameters import filter_text
from exporter.web import templating

NONE = "(none)"
"""In an address: the value is empty, as the team of those that have none. An empty parameter asks for nothing."""
_OF_A_TABLE = ("sort", "page", "q", "columns")
_DATES = ("from", "to")
_TWO_DATES = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.\.(\d{4}-\d{2}-\d{2}))?")
DEFAULT_WINDOW = "30d"
_LONGEST = 500

Asked = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A page as it was asked for."""

    prefix: str
    """Of all paths, where a proxy serves this below a folder; else empty."""
    path: str
    window: Window
    now_seconds: float
    asked: Asked = field(default_factory=dict)
    """Every known parameter that is not empty, as it was written."""
    filters: Filters = field(default_factory=Filters)
    share_idle: ShareIdle = "none"
    share_unallocated: bool = False
    sort: str = ""
    """A column's name, with a ``-`` before it where the largest comes first; empty is the table's own order."""
    page: int = 1
    search: str = ""
    usual_currency: str = ""
    """That which most of the fleet's GPU-hours were paid in: what is shown where none is asked for."""

    @property
    def currency(self) -> str:
        """The one that was asked for, or empty."""
        return (self.asked.get("currency") or ("",))[0]

    @property
    def is_funnel(self) -> bool:
        """Whether tables show the steps from held to effective in the place of idle and unknown time."""
        return self.asked.get("columns") == ("funnel",)

    @property
    def window_text(self) -> str:
        """The window as it was written, or the default one."""
        return (self.asked.get("window") or (DEFAULT_WINDOW,))[0]

    def link(self, path: str | None = None, **changes: str | int | None) -> str:
        """The address of a page with the same window, filters, sharing and currency, but for ``changes``.

        ``None`` takes a parameter away. Another page begins with its own order and its first hundred.
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
        """The address of a page of the menu. What a page is about is no filter of the next one."""
        subject: Iterable[str] = ()
        if self.path == "/owner":
            subject = (name for name in dimensions_in(self.asked) if name != "cluster")
        return self.link(path, **dict.fromkeys(subject))

    def owner(self, **parts: str) -> str:
        """The address of the page on an owner, within what is asked for."""
        return self.link("/owner", **{name: value or NONE for name, value in parts.items()})

    def workload(self, of: LineKey) -> str:
        """The address of the page on a line's workload."""
        where = {"cluster": of.cluster} if of.cluster else {}
        return self.owner(**where, namespace=of.namespace, kind=of.kind, workload=of.workload)

    def download(self, by: Iterable[Dimension], form: str) -> str:
        """The address of a table's data in the API, with the same window, filters and sharing."""
        pairs = [("window", self.window_text), ("by", ",".join(by))]
        for name in dimensions_in(self.asked):
            pairs += [(f"filter.{name}", "" if value == NONE else filter_text(value)) for value in self.asked[name]]
        if self.share_idle != "none":
            pairs.append(("shareIdle", self.share_idle))
        if self.share_unallocated:
            pairs.append(("shareUnallocated", "true"))
        pairs.append(("format", form))
        return f"{self.prefix}/api/v1/report?{urlencode(pairs, quote_via=quote)}"


def dimensions_in(asked: Asked) -> list[Dimension]:
    """Dimensions that a page is filtered by, labels last."""
    return [name for name in DIMENSIONS if name in asked] + [name for name in asked if name.startswith(LABEL)]


def read_view(
    path: str, pairs: Iterable[tuple[str, str]], now_seconds: float, prefix: str = "", zone: tzinfo = UTC
) -> View:
    """Understand the parameters of a page; unknown ones are passed over.

    Raises:
        ConfigError: With every parameter that cannot be understood.
    """
    known = {"window", *_DATES, "currency", "share", "shareUnallocated", *_OF_A_TABLE, *DIMENSIONS}
    asked: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        if (name in known or (name.startswith(LABEL) and not label_problem(name))) and value.strip():
            # Bytes of an address that are no UTF-8 come as surrogates, which no link can have.
            text = value.strip()[:_LONGEST].encode("utf-8", "replace").decode()
            asked[name] = (*asked.get(name, ()), text)
    problems = too_many_labels("the page's address", asked)
    _take_dates(asked, problems)
    window = _window(asked, Now(now_seconds, zone), problems)
    share, page = _share(asked, problems), _page(asked, problems)
    if (columns := asked.get("columns", ("funnel",))) != ("funnel",):
        problems.append(f"columns: '{columns[0]}' is no set of columns; allowed: funnel, or leave it out")
    if problems:
        raise ConfigError(*problems)
    wanted = {name: frozenset("" if value == NONE else value for value in asked[name]) for name in dimensions_in(asked)}
    return View(
        prefix=prefix,
        path=path,
        window=window,
        now_seconds=now_seconds,
        asked=asked,
        filters=Filters(wanted=wanted),
        share_idle=share,
        share_unallocated=asked.get("shareUnallocated", ("",))[0] in {"true", "1", "on"},
        sort=asked.get("sort", ("",))[0],
        page=page,
        search=asked.get("q", ("",))[0],
    )


def _take_dates(asked: dict[str, tuple[str, ...]], problems: list[str]) -> None:
    """Make one window of the two dates of the form; both days are in it."""
    first, last = (asked.pop(name, ("",))[0] for name in _DATES)
    if first and last:
        asked["window"] = (f"{first}..{last}",)
    elif first or last:
        problems.append("from, to: one of the two dates is missing; give both, or neither and a period")


def _window(asked: Asked, now: Now, problems: list[str]) -> Window:
    try:
        return parse_window(asked.get("window", (DEFAULT_WINDOW,))[0], now.seconds, now.zone)
    except ConfigError as error:
        problems.extend(error.problems)
        return parse_window(DEFAULT_WINDOW, now.seconds, now.zone)


def _share(asked: Asked, problems: list[str]) -> ShareIdle:
    text = asked.get("share", ("none",))[0]
    for known in get_args(ShareIdle):
        if text == known:
            return known  # type: ignore[no-any-return]
    problems.append(f"share: '{text}' is no way to share idle money; allowed: none, even, weighted")
    return "none"


def _page(asked: Asked, problems: list[str]) -> int:
    text = asked.get("page", ("1",))[0]
    if text.isascii() and text.isdigit() and 1 <= len(text) <= 6 and int(text) > 0:  # noqa: PLR2004 - of a million
        return int(text)
    problems.append(f"page: '{text}' is no page; allowed: a whole number from 1")
    return 1


GROUPS: tuple[Dimension, ...] = ("cluster", "namespace", "team", "model")
"""Few enough lines in any fleet to be had with their days, and what the filters of every page offer."""
MOST_CHOICES = 500
_OF_A_WORKLOAD: tuple[Dimension, ...] = ("namespace", "workload")


async def groups(book: Book, view: View) -> FleetReport:
    """What is asked for by ``GROUPS``, day by day."""
    return await read(book, view, GROUPS, with_series=True)


async def read(book: Book, view: View, by: Sequence[Dimension], *, with_series: bool = False) -> FleetReport:
    """What is asked for by any dimensions."""
    return await book.report(
        view.window,
        tuple(by),
        view.filters,
        share_idle=view.share_idle,
        share_unallocated=view.share_unallocated,
        with_series=with_series,
    )


async def everything(book: Book, view: View) -> FleetReport:
    """All of the window by ``GROUPS``, whatever is asked for."""
    return await book.report(view.window, GROUPS, Filters(), with_series=True)


def usual_currency(report: FleetReport) -> str:
    """The currency that most GPU-hours were paid in; empty where nothing has a price."""
    seconds = dict.fromkeys(report.currencies, 0.0)
    for line in report.held:
        for currency in line.figures.money:
            seconds[currency] += line.figures.seconds.total
    return max(seconds, key=lambda currency: seconds[currency], default="")


def choices(report: FleetReport) -> Mapping[Dimension, tuple[str, ...]]:
    """What the filters can be set to: what there is in a report by ``GROUPS``, in the order of the alphabet."""
    lines = (*report.held, *report.apart)
    found = {name: sorted({str(getattr(line.key, name)) for line in lines}) for name in GROUPS}
    return {name: tuple(value or NONE for value in values[:MOST_CHOICES]) for name, values in found.items()}


async def summed(book: Book, view: View, by: Sequence[Dimension]) -> FleetReport:
    """The report day by day at some of ``GROUPS``, summed from the one at all of them where that is the same."""
    if view.share_idle != "none" or not set(by) <= set(GROUPS):
        # What is spread evenly depends on how many lines there are.
        return await read(book, view, by, with_series=True)
    report = await groups(book, view)
    return replace(report, by=tuple(by), held=_regrouped(report.held, by), apart=_regrouped(report.apart, by))


async def with_days(book: Book, view: View, report: FleetReport, lines: Sequence[ReportLine]) -> list[ReportLine]:
    """Lines of a report on workloads that was read without days, now with them, in the same order.

    Thousands of workloads with their days would be a lot to read for the few that are shown.
    """
    if not lines:
        return []
    wanted = dict(view.filters.wanted)
    for name in _OF_A_WORKLOAD:
        wanted[name] = frozenset(str(getattr(line.key, name)) for line in lines)
    some = await book.report(view.window, report.by, Filters(wanted=wanted), with_series=True)
    series = {line.key: line.series for line in some.held}
    return [replace(line, series=series.get(line.key, ())) for line in lines]


def _regrouped(lines: Iterable[ReportLine], by: Sequence[Dimension]) -> tuple[ReportLine, ...]:
    found: dict[LineKey, list[ReportLine]] = {}
    for line in lines:
        found.setdefault(group_of(line.key, by), []).append(line)
    summed_lines = [sum_line(key, many) for key, many in found.items()]
    if lines and is_apart(next(iter(found))):
        return tuple(summed_lines)
    return tuple(sorted(summed_lines, key=rank))


def sum_line(key: LineKey, lines: Sequence[ReportLine]) -> ReportLine:
    """One line for several, with what was shared onto them or taken from them, and their days where all have them."""
    if len(lines) == 1:
        return replace(lines[0], key=key)
    periods = zip(*(line.series for line in lines), strict=True)
    shared: dict[str, float] = {}
    for line in lines:
        for currency, money in line.shared.items():
            shared[currency] = shared.get(currency, 0.0) + money
    return ReportLine(
        key=key,
        figures=total_of(line.figures for line in lines),
        shared=shared,
        series=tuple(total_of(figures) for figures in periods),
    )


_WITHOUT_MONEY = ("/recommendations", "/budgets", "/about", "/api")
"""Pages whose money, if any, is in a currency of its own."""


def chosen_currency(report: FleetReport | None, view: View) -> str:
    """The first in which there is money of the one that was asked for, the usual one, and any."""
    there = report.currencies if report else ()
    return next((one for one in (view.currency, view.usual_currency) if one in there), there[0] if there else "")


def make_frame(
    view: View,
    freshness: Freshness,
    report: FleetReport | None,
    offered: Mapping[Dimension, tuple[str, ...]],
    whole: FleetReport | None,
) -> dict[str, object]:
    """What ``base.html`` shows around a page.

    Args:
        view: The page.
        freshness: How new the data is.
        report: Of what the page shows; ``None`` where nothing could be read.
        offered: What the filters can be set to.
        whole: All of the period by ``GROUPS`` and day; ``None`` where it is not known.
    """
    subject = view.path == "/owner"
    labels = [name for name in dict.fromkeys((*offered, *view.asked)) if name.startswith(LABEL)]
    form = (*GROUPS, *labels)
    filtered = dimensions_in(view.asked)
    windows, dates = _windows(view.now_seconds), _TWO_DATES.fullmatch(view.window_text)
    # Recommendations have their own period, and share nothing.
    fixed = ("window", "share", "shareUnallocated") if view.path == "/recommendations" else ()
    carried = [name for name in filtered if subject or name not in form]
    return {
        "labels": labels,
        "windows": windows,
        "dates": dates.groups(default=dates[1]) if dates else ("", ""),
        "custom": not dates and view.window_text not in dict(windows).values(),
        "window_words": window_words(view.window),
        "fields": () if subject else form,
        # Parameters that the form carries along unseen.
        "kept": (*carried, "currency", "sort", "columns", *fixed),
        "periodic": not fixed,
        "filtered": filtered,
        "chips": 0 if subject else len(filtered) + (view.share_idle != "none"),
        "currencies": report.currencies if report and view.path not in _WITHOUT_MONEY else (),
        "currency": chosen_currency(report, view),
        "unread": _unread(report) if report else (),
        # An empty page says in its own words that nothing matches.
        "notes": [note for note in report.trust.notes if not note.startswith(NO_MATCH)] if report else (),
        "unpriced": tuple(_unpriced(whole)) if whole and report and report.total.unpriced_seconds else (),
        "unknown": tuple(_unknown(view, offered)),
        "simulated": freshness.simulated or bool(report and report.simulated),
    }


class MissingPrice(NamedTuple):
    """Time of a model without a price."""

    model: str
    seconds: float
    first: str
    last: str
    """Days."""
    row: str
    """To be pasted into a price book."""


def _unpriced(whole: FleetReport) -> Iterator[MissingPrice]:
    """Yield models without a price, and when, the most hours first."""
    found: dict[str, list[float]] = {}
    for line in (*whole.held, *whole.apart):
        sums = found.setdefault(line.key.model, [0.0] * len(whole.periods))
        for number, figures in enumerate(line.series):
            sums[number] += figures.unpriced_seconds
    for model, sums in sorted(found.items(), key=lambda one: -sum(one[1])):
        days = [day(period.start_seconds) for period, seconds in zip(whole.periods, sums, strict=True) if seconds > 0]
        if days:
            row = f"- model: {json.dumps(model)}\n  per_gpu_hour: PRICE\n  source: ORIGIN\n  as_of: {days[-1]}"
            yield MissingPrice(model, sum(sums), days[0], days[-1], row)


def window_words(window: Window) -> str:
    """``2026-10-22 to 2026-11-20``: days, both within; with hours where an end is in the middle of a day."""
    days = not window.start_seconds % 86_400 and not window.end_seconds % 86_400
    if days:
        return f"{day(window.start_seconds)} to {day(window.end_seconds - 1)}"
    return f"{minute(window.start_seconds)} to {minute(window.end_seconds)}"


def _windows(now_seconds: float) -> list[tuple[str, str]]:
    """Names and texts of usual periods."""
    today = datetime.fromtimestamp(now_seconds, tz=UTC)
    last = f"{today.replace(day=1) - timedelta(days=1):%Y-%m}"
    offered = [("7 days", "7d"), ("30 days", "30d"), ("90 days", "90d"), ("Last month", last)]
    if today.day > 1 or today.hour:
        # In its first hour a month has no hour yet.
        offered.insert(3, ("This month", f"{today:%Y-%m}"))
    return offered


def _unknown(view: View, offered: Mapping[Dimension, tuple[str, ...]]) -> Iterator[str]:
    """Yield the filters with a value that nothing in the period has, and the values that come near."""
    for name, known in offered.items():
        if name.startswith(LABEL):
            continue  # offered are those of the last day, not of this period
        for value in view.asked.get(name, ()):
            if value in known or len(known) >= MOST_CHOICES:
                continue
            near = get_close_matches(value, known, n=3, cutoff=0.5) or known[:5]
            there = f"; there is: {', '.join(near)}" if near else ""
            yield f"{TITLES[name]} {value} had no GPU in this period{there}."


def _unread(report: FleetReport) -> list[str]:
    """Return failures by reason: a server that is away fails every day's question alike."""
    reasons: dict[str, list[Window]] = {}
    for failure in report.trust.failures:
        reasons.setdefault(failure.reason, []).append(failure.window)
    return [f"Not whole: {_span(windows)} could not be read: {reason}" for reason, windows in reasons.items()]


def _span(windows: Sequence[Window]) -> str:
    days = sorted({day(window.start_seconds) for window in windows})
    return days[0] if len(days) == 1 else f"{plural(len(days), 'day')} from {days[0]} to {days[-1]}"


def render(template: str, values: Mapping[str, object]) -> bytes:
    """The page as UTF-8; what cannot be encoded (half a surrogate pair in a name) is shown as a question mark."""
    return templating.render("exporter.service", template, values).encode("utf-8", "replace")

"""What every page shows: the menu, the filters, whether what it shows is real, new, whole and priced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import NamedTuple

from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import HOUR_SECONDS, LABEL, Dimension, Window
from exporter.report.render.rows import TITLES, title
from exporter.report.service.book import Freshness
from exporter.report.service.settings import ServeSettings
from exporter.report.service.view_groups import MOST_CHOICES
from exporter.report.service.view_query import View, dimensions_in, written
from exporter.report.service.view_text import coverage, day, duration, hours, moment, plural

_STALE_SECONDS = 3 * HOUR_SECONDS
_WITHOUT_MONEY = ("/recommendations", "/budgets", "/about")
"""Pages whose money, if any, is in a currency of its own."""
_FORM: tuple[Dimension, ...] = ("cluster", "namespace", "team", "model")
SHARING: Mapping[str, str] = {"none": "no", "even": "evenly", "weighted": "by own cost"}
_MENU = (
    ("/", "Overview"),
    ("/by/team", "Teams"),
    ("/by/namespace", "Namespaces"),
    ("/by/workload", "Workloads"),
    ("/by/model", "Models"),
    ("/by/pool", "Node pools"),
    ("/by/cluster", "Clusters"),
    ("/by/node", "Nodes"),
    ("/recommendations", "Recommendations"),
    ("/budgets", "Budgets"),
    ("/about", "About"),
)
_AFTER_OWNERS = 4


class Link(NamedTuple):
    """A link, and whether it leads to what is shown now."""

    words: str
    href: str
    current: bool = False


class Field(NamedTuple):
    """A field of the filter form."""

    name: str
    words: str
    value: str
    offered: tuple[str, ...]


class Notice(NamedTuple):
    """What a reader must know first. The tone is ``warn`` or ``bad``."""

    tone: str
    words: str


class Fact(NamedTuple):
    """One line of how far to trust the page. The tone is ``ok``, ``warn`` or ``bad``."""

    words: str
    value: str
    tone: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All of it."""

    site: str
    menu: tuple[Link, ...]
    windows: tuple[Link, ...]
    window_text: str
    window_words: str
    fields: tuple[Field, ...]
    kept: tuple[tuple[str, str], ...]
    """Parameters that the form carries along unseen."""
    chips: tuple[Link, ...]
    """Filters that are set; each link takes one away."""
    currencies: tuple[Link, ...]
    currency: str
    """What money is shown in; empty where nothing has a price."""
    facts: tuple[Fact, ...]
    notices: tuple[Notice, ...]
    notes: tuple[str, ...]
    simulated: bool
    sharing: Mapping[str, str]
    """Ways to share what nobody held, in words."""


def chosen_currency(report: FleetReport | None, view: View) -> str:
    """The first in which there is money of the one that was asked for, the usual one, and any."""
    there = report.currencies if report else ()
    return next((one for one in (view.currency, view.usual_currency) if one in there), there[0] if there else "")


def make_frame(
    view: View,
    freshness: Freshness,
    report: FleetReport | None,
    offered: Mapping[Dimension, tuple[str, ...]],
    settings: ServeSettings,
) -> Frame:
    """The frame of a page; ``report`` is of what it shows, ``None`` where nothing could be read."""
    currency = chosen_currency(report, view)
    subject = view.path == "/owner"
    labels = [name for name in (*offered, *view.asked) if name.startswith(LABEL)]
    form = tuple(dict.fromkeys((*_FORM, *labels)))
    values = {name: view.asked.get(name, ("",))[0] for name in form}
    carried = [name for name in dimensions_in(view.asked) if subject or name not in form]
    return Frame(
        site=settings.title or "GPU cost",
        menu=tuple(Link(words, view.menu(path), path == view.path) for path, words in _menu(labels)),
        windows=_windows(view),
        window_text=written(view),
        window_words=window_words(view.window),
        fields=() if subject else tuple(Field(name, title(name), values[name], offered.get(name, ())) for name in form),
        kept=tuple((name, value) for name in (*carried, "currency", "sort") for value in view.asked.get(name, ())),
        chips=() if subject else _chips(view),
        currencies=tuple(
            Link(one, view.link(None, currency=one), one == currency)
            for one in (report.currencies if report and view.path not in _WITHOUT_MONEY else ())
        ),
        currency=currency,
        facts=(*(_trust(report) if report else ()), *_age(freshness)),
        notices=(*_notices(view, freshness, report), *_not_known(view, offered)),
        notes=report.trust.notes if report else (),
        simulated=freshness.simulated or bool(report and report.simulated),
        sharing=SHARING,
    )


def _menu(labels: Sequence[Dimension]) -> list[tuple[str, str]]:
    """The pages, those of labels after those of other properties of an owner."""
    of_labels = [(f"/by/{name}", title(name)) for name in dict.fromkeys(labels)]
    return [*_MENU[:_AFTER_OWNERS], *of_labels, *_MENU[_AFTER_OWNERS:]]


def window_words(window: Window) -> str:
    """``2026-10-22 to 2026-11-20``: days, both within; with hours where an end is in the middle of a day."""
    days = not window.start_seconds % 86_400 and not window.end_seconds % 86_400
    if days:
        return f"{day(window.start_seconds)} to {day(window.end_seconds - 1)}"
    return f"{moment(window.start_seconds)} to {moment(window.end_seconds)}"


def _windows(view: View) -> tuple[Link, ...]:
    today = datetime.fromtimestamp(view.now_seconds, tz=UTC)
    last = f"{today.replace(day=1) - timedelta(days=1):%Y-%m}"
    offered = [("7 days", "7d"), ("30 days", "30d"), ("90 days", "90d"), ("Last month", last)]
    if today.day > 1 or today.hour:
        # In its first hour a month has no hour yet.
        offered.insert(3, ("This month", f"{today:%Y-%m}"))
    return tuple(Link(words, view.link(None, window=text), text == written(view)) for words, text in offered)


def _chips(view: View) -> tuple[Link, ...]:
    chips = [
        Link(f"{title(name)} {' or '.join(view.asked[name])}", view.without(name)) for name in dimensions_in(view.asked)
    ]
    if view.share_idle != "none":
        what = "Unallocated and Unattributed" if view.share_unallocated else "Unallocated"
        words = f"{what} shared {SHARING[view.share_idle]}"
        chips.append(Link(words, view.without("share", "shareUnallocated")))
    return tuple(chips)


def _trust(report: FleetReport) -> tuple[Fact, ...]:
    trust = report.trust
    return (
        _ratio(
            "Coverage",
            trust.activity_coverage_ratio,
            "Part of the held GPU-hours whose activity was measured; the rest is unknown, not idle.",
        ),
        _ratio(
            "Priced", trust.price_coverage_ratio, "Part of all GPU-hours that had a price; the rest is in no money."
        ),
        Fact(
            "Hours recorded",
            f"{trust.recorded_hours:,} of {trust.expected_hours:,}",
            "ok" if trust.recorded_hours >= trust.expected_hours else "warn",
            "Hours of the window that are over, times clusters (a new one from its first day on), and those recorded.",
        ),
        _sum_fact(report),
    )


def _sum_fact(report: FleetReport) -> Fact:
    meaning = (
        "Active, idle, unknown, unattributed and unallocated GPU-hours must sum to the GPU-hours that were metered."
    )
    if report.trust.missing_seconds:
        missing = report.trust.missing_seconds / HOUR_SECONDS
        return Fact("Sum", f"{missing:+,.2f} GPU-hours missing", "bad", meaning)
    if report.filters.wanted:
        return Fact("Sum", "a part of the fleet", "ok", meaning)
    return Fact("Sum", "all of the capacity", "ok", meaning)


def _ratio(words: str, ratio: float | None, meaning: str) -> Fact:
    if ratio is None:
        return Fact(words, "nothing held" if words == "Coverage" else "nothing metered", "warn", meaning)
    tone = "ok" if ratio >= 0.95 else "warn" if ratio >= 0.5 else "bad"  # noqa: PLR2004 - where a reader must take care
    return Fact(words, coverage(ratio), tone, meaning)


def _age(freshness: Freshness) -> tuple[Fact, ...]:
    facts = []
    until = freshness.read_until_seconds or freshness.closed_until_seconds
    if until is None:
        facts.append(Fact("Newest hour", "none yet", "warn", "No hour of the ledger has been read."))
    else:
        age = freshness.now_seconds - until
        tone = "warn" if age > _STALE_SECONDS else "ok"
        facts.append(
            Fact("Newest hour", f"{moment(until)} UTC, {duration(age)} ago", tone, "Newer hours are not in here.")
        )
    if freshness.closed_until_seconds is not None:
        last = day(freshness.closed_until_seconds - 1)
        facts.append(Fact("Closed until", last, "ok", "Days that are in the store, and change no more."))
    return tuple(facts)


def _notices(view: View, freshness: Freshness, report: FleetReport | None) -> tuple[Notice, ...]:
    notices = [Notice("bad", freshness.problem)] if freshness.problem else []
    if report is None:
        return tuple(notices)
    notices += [Notice("bad", words) for words in _grouped(report)]
    if report.trust.missing_seconds:
        lost = report.trust.missing_seconds / HOUR_SECONDS
        notices.append(
            Notice("bad", f"The lines and the capacity differ by {lost:+,.2f} GPU-hours: please report this as a bug.")
        )
    if view.currency and report.currencies and view.currency not in report.currencies:
        there = ", ".join(report.currencies)
        notices.append(Notice("warn", f"Nothing here was priced in {view.currency}; there is: {there}."))
    unpriced = report.total.unpriced_seconds
    if unpriced > 0:
        lacking = "no row of the price book matches their model, node and time"
        notices.append(Notice("warn", f"{hours(unpriced)} GPU-hours are in no money here: {lacking}."))
    return tuple(notices)


def _not_known(view: View, offered: Mapping[Dimension, tuple[str, ...]]) -> list[Notice]:
    """Filters with a value that nothing in the period has, and those that come near."""
    notices = []
    for name, known in offered.items():
        if name.startswith(LABEL):
            continue  # offered are those of the last day, not of this period
        for value in view.asked.get(name, ()):
            if value in known or len(known) >= MOST_CHOICES:
                continue
            near = get_close_matches(value, known, n=3, cutoff=0.5) or known[:5]
            there = f"; there is: {', '.join(near)}" if near else ""
            notices.append(Notice("warn", f"{TITLES[name]} {value} had no GPU in this period{there}."))
    return notices


def _grouped(report: FleetReport) -> list[str]:
    """Failures by reason: a server that is away fails every day's question alike."""
    reasons: dict[str, list[Window]] = {}
    for failure in report.trust.failures:
        reasons.setdefault(failure.reason, []).append(failure.window)
    return [f"Not whole: {_span(windows)} could not be read: {reason}" for reason, windows in reasons.items()]


def _span(windows: Sequence[Window]) -> str:
    days = sorted({day(window.start_seconds) for window in windows})
    return days[0] if len(days) == 1 else f"{plural(len(days), 'day')} from {days[0]} to {days[-1]}"

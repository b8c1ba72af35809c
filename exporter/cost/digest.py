"""Collects the sections of the weekly digest: spend, movers, waste, savings and budgets."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from exporter.cost.budgets import Budget, BudgetState, standings
from exporter.cost.holdings import Recommendation
from exporter.cost.ledger import (
    DAY_SECONDS,
    UNALLOCATED,
    UNATTRIBUTED,
    Dimension,
    FleetLedger,
    LineKey,
    Window,
    last_recorded,
    period_at,
)
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.query_rows import LedgerSource, Progress
from exporter.cost.recommend import read
from exporter.cost.recommend_render import totals
from exporter.cost.render_rows import HOUR, clean, encodable, failure_words
from exporter.cost.report import FleetReport, make_report, parts
from exporter.errors import ConfigError, ExporterError, PrometheusError
from exporter.model.formatting import decimal, minute, money_with_code, percent_down

WEEK_SECONDS = 7 * DAY_SECONDS
DIMENSIONS: frozenset[Dimension] = frozenset({"cluster", "namespace", "kind", "workload", "team"})
"""Of the ledger that a digest is made from."""
MOST_MOVERS, MOST_WASTE, MOST_ADVICE, MOST_BUDGETS, MOST_NOTES = 5, 10, 10, 20, 8
_OWNER: tuple[Dimension, ...] = ("cluster", "namespace", "workload", "team")
_COMPARABLE_RATIO = 0.98
"""Of the hours of the week before: with less, what looks like more money is only more that is known."""
_LEAST_MONEY, _LEAST_RATIO = 0.01, 0.001
_LONGEST_NAME, _LONGEST_NOTE = 120, 400
_ISO_WEEK = re.compile(r"2[01][0-9]{2}-?W[0-9]{2}")
_WEEKS = "allowed: lastweek, or a week that is over, as 2026-W46 (from Monday, UTC)"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A week of a fleet."""

    week: Window
    """Labelled ``2026-W46``."""
    teams: FleetReport
    """The week by team."""
    teams_before: FleetReport | None
    """The week before; ``None`` where the two cannot be compared."""
    owners: FleetReport
    """The week by cluster, namespace, workload and team."""
    recommendations: tuple[Recommendation, ...] | None
    """The dearest first; ``None`` where they could not be read."""
    budgets: tuple[BudgetState, ...] = ()
    notes: tuple[str, ...] = ()
    """One line each: what a reader must know of the figures."""
    title: str = "GPU cost"
    external_url: str = ""
    """Address of the cost service, for links; empty where there is none."""


class DigestRow(NamedTuple):
    """One row of a section."""

    texts: tuple[str, ...]
    href: str = ""
    """Whole address of the page about the first text; empty where there is none."""
    bad: tuple[int, ...] = ()
    """Places of texts that stand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a sentence or none, and a table or none."""

    title: str
    href: str = ""
    lead: str = ""
    columns: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    """Places of the columns that have numbers."""
    rows: tuple[DigestRow, ...] = ()
    more: str = ""
    """What is not shown."""


def parse_week(text: str, now_seconds: float) -> Window:
    """Return the week, Monday to Sunday in UTC, that a text names.

    Raises:
        ConfigError: It names none, or the week is not over.
    """
    written = text.strip()
    last = last_recorded(now_seconds)
    try:
        monday = date.fromisoformat(written) if _ISO_WEEK.fullmatch(written) else None
    except ValueError:
        monday = None
    if monday is None and written != "lastweek":
        raise ConfigError(f"week: value '{clean(text[:80])}' is no week; {_WEEKS}")
    within = datetime(monday.year, monday.month, monday.day, tzinfo=UTC).timestamp() if monday else last - WEEK_SECONDS
    week = period_at("week", within)
    if week.end_seconds > last:
        raise ConfigError(f"week: {week.label} is not over; {_WEEKS}")
    return week


async def read_digest(
    source: LedgerSource,
    client: PrometheusClient | None,
    week: Window,
    now_seconds: float,
    *,
    budgets: Sequence[Budget] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Digest:
    """Read what a digest of a week is made of; what cannot be read besides the ledger becomes a note.

    Args:
        source: What has the ledger.
        client: Has the evidence of recommendations; ``None`` where there is only a store.
        week: From ``parse_week``.
        now_seconds: Unix time, as of which budgets stand.
        budgets: From their file.
        progress: Called while the ledger is read.

    Raises:
        ExporterError: The ledger cannot be read, or has nothing of the week.
    """
    both = Window(
        start_seconds=week.start_seconds - WEEK_SECONDS, end_seconds=week.end_seconds, label=f"{week.label} and before"
    )
    ledger = await source.ledger(both, DIMENSIONS, None, progress)
    of_week = _within(ledger, week)
    if not any(chunk.lines or chunk.capacity_seconds for chunk in of_week.chunks):
        if of_week.failures:
            first = of_week.failures[0]
            raise ExporterError(f"nothing could be read of {week.label}: {first.what}: {first.reason}")
        why = "; ".join(ledger.notes) or "do Prometheus or the store reach back so far, and are the rules loaded?"
        raise ExporterError(f"there is no ledger of {week.label}: {why}")
    notes: list[str] = []
    recommendations = await _recommendations(source, client, week, notes)
    states: tuple[BudgetState, ...] = ()
    try:
        states = await standings(budgets, source, now_seconds)
    except PrometheusError as error:
        notes.append(f"Budgets could not be read: {error}")
    return make_digest(ledger, week, recommendations, states, notes)


async def _recommendations(
    source: LedgerSource, client: PrometheusClient | None, week: Window, notes: list[str]
) -> tuple[Recommendation, ...] | None:
    if client is None:
        notes.append("Recommendations need --prometheus: the store does not keep how devices were used.")
        return None
    try:
        found = await read(client, source, week)
    except PrometheusError as error:
        notes.append(f"Recommendations could not be read: {error}")
        return None
    if not found.uses:
        notes.append(
            "There is no evidence for recommendations: load the group gpu-evidence of rules/prometheus-rules.yaml."
        )
        return None
    return found.recommendations


def make_digest(
    ledger: FleetLedger,
    week: Window,
    recommendations: tuple[Recommendation, ...] | None = None,
    budgets: tuple[BudgetState, ...] = (),
    notes: Iterable[str] = (),
) -> Digest:
    """Return the digest of a week from a ledger, by ``DIMENSIONS``, of that week and the one before."""
    last = Window(start_seconds=week.start_seconds - WEEK_SECONDS, end_seconds=week.start_seconds)
    before = make_report(_within(ledger, last), ("team",))
    incomparable = _incomparable(before)
    return Digest(
        week=week,
        teams=make_report(_within(ledger, week), ("team",)),
        teams_before=None if incomparable else before,
        owners=make_report(_within(ledger, week), _OWNER),
        recommendations=recommendations,
        budgets=budgets,
        notes=(*([incomparable] if incomparable else []), *notes, *ledger.notes),
    )


def _within(ledger: FleetLedger, window: Window) -> FleetLedger:
    """Return a part of a ledger, of whole days."""
    chunks = tuple(chunk for chunk in ledger.chunks if window.meets(chunk.window))
    failures = tuple(failure for failure in ledger.failures if window.meets(failure.window))
    return replace(ledger, window=window, chunks=chunks, failures=failures)


def _incomparable(before: FleetReport) -> str:
    """Return why nothing is compared with the week before; empty where it is."""
    trust = before.trust
    if trust.failures:
        return "The week before could not be read whole, so that nothing is compared with it."
    if (trust.period_coverage_ratio or 0.0) >= _COMPARABLE_RATIO:
        return ""
    if not trust.recorded_hours:
        return "Nothing is known of the week before, so that nothing is compared with it."
    hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,} hours"
    return f"Of the week before only {hours} were recorded, so that nothing is compared with it."


def headline(digest: Digest) -> str:
    """Return the digest in a line, for subjects and notifications."""
    mark = "SIMULATED: " if digest.teams.simulated else ""
    return f"{mark}{clean(digest.title)}, {digest.week.label}: {_spent(digest) or 'no GPU had a price'}"


def period(digest: Digest) -> str:
    """Return ``2026-11-09 to 2026-11-15, UTC``, both days included."""
    return f"{' to '.join(_days(digest.week))}, UTC"


def sections(digest: Digest) -> Iterator[Section]:
    """Yield all of it, in the order in which it is read."""
    yield _spend(digest)
    yield from _movers(digest)
    yield _waste(digest)
    yield _advice(digest)
    if digest.budgets:
        yield _budgets(digest)
    yield _trust(digest)


def _currencies(digest: Digest) -> list[str]:
    """Return the currencies of both weeks."""
    return sorted({*digest.teams.currencies, *(digest.teams_before.currencies if digest.teams_before else ())})


def _total(report: FleetReport, currency: str) -> float:
    return report.total.money_in(currency).total


def _spent(digest: Digest) -> str:
    """Return the money of each currency, with its change."""
    told = []
    for currency in _currencies(digest):
        after = _total(digest.teams, currency)
        change = _change(_total(digest.teams_before, currency), after) if digest.teams_before else ""
        told.append(_money(after, currency) + (f" ({change})" if change else ""))
    return " and ".join(told)


def _change(before: float, after: float) -> str:
    """Return ``+12.0 % against the week before``; empty where both weeks are free."""
    if before <= 0:
        return "nothing the week before" if after > 0 else ""
    ratio = after / before - 1
    if abs(ratio) < _LEAST_RATIO:
        return "as the week before"
    return f"{'+' if ratio > 0 else '-'}{percent_down(abs(ratio), 1)} against the week before"


def _money(amount: float, currency: str) -> str:
    return money_with_code(amount, clean(currency))


def _cut(text: str, most: int = _LONGEST_NAME) -> str:
    shown = clean(encodable(text))
    return shown if len(shown) <= most else f"{shown[:most]}…"


def _spend(digest: Digest) -> Section:
    rows = []
    for currency in _currencies(digest):
        total, own = _total(digest.teams, currency), parts(digest.teams, currency)
        before = _money(_total(digest.teams_before, currency), currency) if digest.teams_before else "not known"
        rows.append(DigestRow((f"Total {clean(currency)}", _money(total, currency), "", before)))
        for title, part in (
            ("Active", "Active"),
            ("Idle, held without work", "Idle"),
            ("Held, activity not known", "Unknown"),
            ("Unattributed", UNATTRIBUTED),
            ("Unallocated, nobody held it", UNALLOCATED),
        ):
            if own[part] > 0:
                share = percent_down(own[part] / total, 1) if total else ""
                rows.append(DigestRow((title, _money(own[part], currency), share, "")))
    return Section(
        title="Spend",
        href=_link(digest, "/"),
        lead=f"{_spent(digest) or 'No GPU had a price'}.",
        columns=("", "This week", "Part", "Week before"),
        numbers=(1, 2, 3),
        rows=tuple(rows),
    )


def _movers(digest: Digest) -> Iterator[Section]:
    """Yield the teams whose money changed, the largest change of each currency first."""
    money: dict[tuple[str, str], list[float]] = {}
    if digest.teams_before is None:
        return
    for place, report in enumerate((digest.teams_before, digest.teams)):
        for line in report.held:
            for currency, amount in line.figures.money.items():
                money.setdefault((currency, line.key.team), [0.0, 0.0])[place] += amount.total
    changes = [(currency, after - before, team, before, after) for (currency, team), (before, after) in money.items()]
    changes.sort(key=lambda one: (one[0], -abs(one[1]), one[2]))
    for title, sign in (("Teams that cost more", 1), ("Teams that cost less", -1)):
        movers = [one for one in changes if sign * one[1] >= _LEAST_MONEY]
        if not movers:
            continue
        shown, left = _first(movers, MOST_MOVERS, lambda one: one[0])
        yield Section(
            title=title,
            href=_link(digest, "/by/team"),
            columns=("Team", "Change", "This week", "Before"),
            numbers=(1, 2, 3),
            rows=tuple(
                DigestRow(
                    (
                        _cut(team) or "(no team)",
                        f"{'+' if sign > 0 else '-'}{_money(abs(change), currency)}",
                        _money(after, currency),
                        _money(before, currency),
                    ),
                    href=_link(digest, "/owner", team=team),
                    bad=(1,) if sign > 0 else (),
                )
                for currency, change, team, before, after in shown
            ),
            more=_more(left, "team"),
        )


def _waste(digest: Digest) -> Section:
    """Return the owners that paid most for GPUs that they held and did not use."""
    found = [
        (currency, money, line)
        for line in digest.owners.held
        for currency, money in line.figures.money.items()
        if money.idle >= _LEAST_MONEY
    ]
    found.sort(key=lambda one: (one[0], -one[1].idle, one[2].key))
    shown, _ = _first(found, MOST_WASTE, lambda one: one[0])
    return Section(
        title="Waste: GPUs held without work",
        href=_link(digest, "/by/workload"),
        lead="" if shown else "No money was idle at an owner.",
        columns=("Owner", "Team", "Idle", "Part of its cost", "Idle GPU-hours") if shown else (),
        numbers=(2, 3, 4),
        rows=tuple(
            DigestRow(
                (
                    _owner(line.key),
                    _cut(line.key.team) or ("(no team)" if line.key.namespace else "-"),
                    _money(money.idle, currency),
                    percent_down(money.idle / money.total, 0) if money.total else "-",
                    decimal(line.figures.idle_seconds / HOUR, 1),
                ),
                href=_owner_link(digest, line.key) if line.key.namespace else "",
            )
            for currency, money, line in shown
        ),
    )


def _owner(of: LineKey) -> str:
    place = f"{of.cluster}: " if of.cluster else ""
    workload = f"{of.kind} {of.namespace}/{of.workload}" if of.workload else of.namespace
    return _cut(f"{place}{workload}" if workload else "") or "(no namespace)"


def _owner_link(digest: Digest, of: LineKey) -> str:
    where = {"cluster": of.cluster} if of.cluster else {}
    return _link(digest, "/owner", **where, namespace=of.namespace, kind=of.kind, workload=of.workload)


def _advice(digest: Digest) -> Section:
    title, href = "What to do", _link(digest, "/recommendations")
    found = digest.recommendations
    if not found:
        lead = "Recommendations are not known; see below." if found is None else "Nothing is suggested."
        return Section(title=title, href=href, lead=lead)
    savings = " and ".join(_money(amount, currency) for currency, amount in totals(found).items())
    count = f"{len(found):,} recommendation{'s' if len(found) > 1 else ''}"
    return Section(
        title=title,
        href=href,
        lead=f"{count} would save {savings} a month." if savings else f"{count}, without a price.",
        columns=("Owner", "Team", "What", "A month", "Risk"),
        numbers=(3,),
        rows=tuple(
            DigestRow(
                (
                    _owner(one.owner),
                    _cut(one.owner.team) or "(no team)",
                    _cut(one.title),
                    "no price" if one.per_month is None else _money(one.per_month, one.currency),
                    one.risk_level,
                ),
                href=_owner_link(digest, one.owner),
            )
            for one in found[:MOST_ADVICE]
        ),
        more=_more(len(found) - MOST_ADVICE, "recommendation"),
    )


def _budgets(digest: Digest) -> Section:
    """Return those that passed a threshold, will be overspent or are not wholly known; count the rest."""
    news = [state for state in digest.budgets if state.passed or _will_be_over(state) or not state.known or state.notes]
    quiet = len(digest.budgets) - len(news)
    news.sort(key=lambda state: -(state.spent / state.budget.amount if state.known else -1.0))
    return Section(
        title="Budgets",
        href=_link(digest, "/budgets"),
        lead=f"{quiet:,} of {len(digest.budgets):,} below every threshold and on course." if quiet else "",
        columns=("Budget", "Period", "Spent", "Of", "Will be") if news else (),
        numbers=(2, 3, 4),
        rows=tuple(_budget_row(state) for state in news[:MOST_BUDGETS]),
        more=_more(len(news) - MOST_BUDGETS, "budget"),
    )


def _will_be_over(state: BudgetState) -> bool:
    return state.projected is not None and state.projected > state.budget.amount


def _budget_row(state: BudgetState) -> DigestRow:
    budget = state.budget
    ratio = state.spent / budget.amount
    spent = f"{_money(state.spent, budget.currency)}, {percent_down(ratio, 0)}" if state.known else "not known"
    projected = "not known" if state.projected is None else _money(state.projected, budget.currency)
    return DigestRow(
        (_cut(budget.name), state.period.label, spent, _money(budget.amount, budget.currency), projected),
        bad=(*((2,) if state.known and ratio >= 1 else ()), *((4,) if _will_be_over(state) else ())),
    )


def _trust(digest: Digest) -> Section:
    trust, unpriced_seconds = digest.teams.trust, digest.teams.total.unpriced_seconds
    rows: list[DigestRow] = []
    if trust.period_coverage_ratio is not None:
        hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
        rows.append(DigestRow(("Hours recorded", f"{percent_down(trust.period_coverage_ratio)} ({hours})")))
    if trust.activity_coverage_ratio is not None:
        rows.append(
            DigestRow(("Activity measured", f"{percent_down(trust.activity_coverage_ratio)} of held GPU-hours"))
        )
    if trust.price_coverage_ratio is not None:
        rows.append(DigestRow(("Price known", f"{percent_down(trust.price_coverage_ratio)} of GPU-hours")))
    if unpriced_seconds > 0:
        rows.append(DigestRow(("Unpriced", f"{decimal(unpriced_seconds / HOUR, 1)} GPU-hours are in no cost")))
    if trust.missing_seconds:
        rows.append(DigestRow(("Missing", f"{decimal(abs(trust.missing_seconds) / HOUR, 3)} GPU-hours do not add up")))
    left = 0
    for label, notes in (
        ("Budget", [f"{state.budget.name}: {note}" for state in digest.budgets for note in state.notes[:1]]),
        ("Not read", [failure_words(failure) for failure in trust.failures]),
        ("Note", digest.notes),
    ):
        rows += [DigestRow((label, _cut(" ".join(note.split()), _LONGEST_NOTE))) for note in notes[:MOST_NOTES]]
        left += max(0, len(notes) - MOST_NOTES) if label != "Budget" else 0
    return Section(
        title="How far to trust it",
        href=_link(digest, "/about"),
        columns=("", ""),
        rows=tuple(rows),
        more=_more(left, "note"),
    )


def _first(items: Iterable[_T], most: int, kind: Callable[[_T], str]) -> tuple[list[_T], int]:
    """Return so many of each kind, and how many are left."""
    counts: dict[str, int] = {}
    kept, left = [], 0
    for item in items:
        counts[kind(item)] = counts.get(kind(item), 0) + 1
        if counts[kind(item)] <= most:
            kept.append(item)
        else:
            left += 1
    return kept, left


def _more(count: int, what: str) -> str:
    return f"and {count:,} more {what}{'' if count == 1 else 's'}" if count > 0 else ""


def _days(week: Window) -> tuple[str, str]:
    return minute(week.start_seconds)[:10], minute(week.end_seconds - 1)[:10]


def _link(digest: Digest, path: str, **asked: str) -> str:
    """Return a page of the service over the week; empty where its address is unknown."""
    if not digest.external_url:
        return ""
    # "(none)" is how pages write that there is no value: an empty one asks for nothing.
    pairs = {"window": "..".join(_days(digest.week))}
    pairs |= {name: encodable(value) or "(none)" for name, value in asked.items()}
    return f"{digest.external_url.rstrip('/')}{path}?{urlencode(pairs, quote_via=quote)}"

"""The sections of a digest in words: what the mail, the chat and the terminal show alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import quote, urlencode

from exporter.report.budget.values import BudgetState
from exporter.report.digest.values import Digest, Mover, Spend, Waste
from exporter.report.fleet.values import LineKey
from exporter.report.recommend.values import Recommendation
from exporter.report.render.foot import failure_words
from exporter.report.render.words import HOUR, clean, decimal, encodable, minute, percent

Tone = Literal["", "good", "bad"]
MOST_MOVERS, MOST_ADVICE, MOST_BUDGETS, MOST_NOTES = 5, 10, 20, 8
_LONGEST_NAME, _LONGEST_NOTE = 120, 400
_LEAST_RATIO = 0.001
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One value of a row; ``href`` is whole, or empty."""

    text: str
    href: str = ""
    is_number: bool = False
    tone: Tone = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a sentence or none, and a table or none."""

    title: str
    href: str = ""
    lead: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    more: str = ""
    """What is not shown."""


def headline(digest: Digest) -> str:
    """The digest in a line, for subjects and notifications."""
    money = " and ".join(_spent(spend) for spend in digest.spends) or "no GPU had a price"
    mark = "SIMULATED: " if digest.simulated else ""
    return f"{mark}{clean(digest.title)}, {digest.week.label}: {money}"


def period(digest: Digest) -> str:
    """``2026-11-09 to 2026-11-15, UTC``, both days included."""
    first, last = minute(digest.week.start_seconds)[:10], minute(digest.week.end_seconds - 1)[:10]
    return f"{first} to {last}, UTC"


def sections(digest: Digest) -> Iterator[Section]:
    """All of it, in the order in which it is read."""
    yield _spend(digest)
    yield from _movers(digest)
    yield _waste(digest)
    yield _advice(digest)
    if digest.budgets:
        yield _budgets(digest)
    yield _trust(digest)


def _spent(spend: Spend) -> str:
    change = _change(spend.before, spend.total)
    return f"{_money(spend.total, spend.currency)}" + (f" ({change})" if change else "")


def _change(before: float | None, after: float) -> str:
    """``+12 % against the week before``; empty where there is nothing to compare with."""
    if before is None:
        return ""
    if before <= 0:
        return "nothing the week before" if after > 0 else ""
    ratio = after / before - 1
    if abs(ratio) < _LEAST_RATIO:
        return "as the week before"
    return f"{'+' if ratio > 0 else '-'}{percent(abs(ratio), 1)} against the week before"


def _money(amount: float, currency: str) -> str:
    return f"{decimal(amount, 2)} {clean(currency)}"


def _signed(amount: float, currency: str) -> str:
    return f"{'+' if amount > 0 else '-'}{_money(abs(amount), currency)}"


def _number(text: str, tone: Tone = "") -> Cell:
    return Cell(text=text, is_number=True, tone=tone)


def _name(text: str, nothing: str) -> str:
    shown = clean(encodable(text))
    return (shown if len(shown) <= _LONGEST_NAME else f"{shown[:_LONGEST_NAME]}…") or nothing


def _owner_name(key: LineKey) -> str:
    place = f"{key.cluster}: " if key.cluster else ""
    workload = f"{key.kind} {key.namespace}/{key.workload}" if key.workload else key.namespace
    return _name(f"{place}{workload}" if workload else "", "(no namespace)")


def _spend(digest: Digest) -> Section:
    parts: Sequence[tuple[str, Callable[[Spend], float]]] = (
        ("Active", lambda spend: spend.active),
        ("Idle, held without work", lambda spend: spend.idle),
        ("Held, activity not known", lambda spend: spend.unknown),
        ("Unattributed", lambda spend: spend.unattributed),
        ("Unallocated, nobody held it", lambda spend: spend.unallocated),
    )
    rows = []
    for spend in digest.spends:
        before = "not known" if spend.before is None else _money(spend.before, spend.currency)
        rows.append(
            (
                Cell(text=f"Total {clean(spend.currency)}"),
                _number(_money(spend.total, spend.currency)),
                _number(""),
                _number(before),
            )
        )
        for title, part in parts:
            amount = part(spend)
            if amount > 0:
                share = percent(amount / spend.total, 1) if spend.total else ""
                rows.append((Cell(text=title), _number(_money(amount, spend.currency)), _number(share), _number("")))
    lead = f"{' and '.join(_spent(spend) for spend in digest.spends)}." if digest.spends else "No GPU had a price."
    return Section(
        title="Spend",
        href=_link(digest, "/"),
        lead=lead,
        columns=("", "This week", "Part", "Week before"),
        rows=tuple(rows),
    )


def _movers(digest: Digest) -> Iterator[Section]:
    sorts: Sequence[tuple[str, Callable[[Mover], bool], Tone]] = (
        ("Teams that cost more", lambda mover: mover.change > 0, "bad"),
        ("Teams that cost less", lambda mover: mover.change < 0, "good"),
    )
    for title, belongs, tone in sorts:
        movers = [mover for mover in digest.movers if belongs(mover)]
        if not movers:
            continue
        shown, left = _first(movers, MOST_MOVERS, lambda mover: mover.currency)
        yield Section(
            title=title,
            href=_link(digest, "/by/team"),
            columns=("Team", "Change", "This week", "Before"),
            rows=tuple(
                (
                    Cell(text=_name(mover.team, "(no team)"), href=_link(digest, "/owner", team=mover.team)),
                    _number(_signed(mover.change, mover.currency), tone),
                    _number(_money(mover.after, mover.currency)),
                    _number(_money(mover.before, mover.currency)),
                )
                for mover in shown
            ),
            more=_more(left, "team"),
        )


def _waste(digest: Digest) -> Section:
    return Section(
        title="Waste: GPUs held without work",
        href=_link(digest, "/by/workload"),
        lead="" if digest.waste else "No money was idle at an owner.",
        columns=("Owner", "Team", "Idle", "Part of its cost", "Idle GPU-hours") if digest.waste else (),
        rows=tuple(_waste_row(digest, one) for one in digest.waste),
    )


def _waste_row(digest: Digest, one: Waste) -> tuple[Cell, ...]:
    key = one.key
    where = {"cluster": key.cluster} if key.cluster else {}
    href = (
        _link(digest, "/owner", **where, namespace=key.namespace, kind=key.kind, workload=key.workload)
        if key.namespace
        else ""
    )
    return (
        Cell(text=_owner_name(key), href=href),
        Cell(text=_name(key.team, "(no team)" if key.namespace else "-")),
        _number(_money(one.idle, one.currency)),
        _number(percent(one.idle / one.total, 0) if one.total else "-"),
        _number(decimal(one.idle_seconds / HOUR, 1)),
    )


def _advice(digest: Digest) -> Section:
    title, href = "What to do", _link(digest, "/recommendations")
    found = digest.recommendations
    if found is None:
        return Section(title=title, href=href, lead="Recommendations are not known; see below.")
    if not found:
        return Section(title=title, href=href, lead="Nothing is suggested.")
    savings = " and ".join(_money(amount, currency) for currency, amount in digest.savings.items())
    count = f"{len(found):,} recommendation{'s' if len(found) > 1 else ''}"
    lead = f"{count} would save {savings} a month." if savings else f"{count}, without a price."
    return Section(
        title=title,
        href=href,
        lead=lead,
        columns=("Owner", "Team", "What", "A month", "Risk"),
        rows=tuple(_advice_row(digest, one) for one in found[:MOST_ADVICE]),
        more=_more(len(found) - MOST_ADVICE, "recommendation"),
    )


def _advice_row(digest: Digest, one: Recommendation) -> tuple[Cell, ...]:
    key = LineKey(cluster=one.cluster, namespace=one.namespace, kind=one.kind, workload=one.workload, team=one.team)
    where = {"cluster": one.cluster} if one.cluster else {}
    return (
        Cell(
            text=_owner_name(key),
            href=_link(digest, "/owner", **where, namespace=one.namespace, kind=one.kind, workload=one.workload),
        ),
        Cell(text=_name(one.team, "(no team)")),
        Cell(text=_name(one.title, "")),
        _number("no price" if one.per_month is None else _money(one.per_month, one.currency)),
        Cell(text=one.risk_level),
    )


def _budgets(digest: Digest) -> Section:
    """Those of which somebody must know something; the rest are counted."""
    told = [state for state in digest.budgets if _is_news(state)]
    quiet = len(digest.budgets) - len(told)
    lead = f"{quiet:,} of {len(digest.budgets):,} below every threshold and on course." if quiet else ""
    shown = sorted(told, key=lambda state: -(state.spent / state.budget.amount if state.known else -1.0))
    return Section(
        title="Budgets",
        href=_link(digest, "/budgets"),
        lead=lead,
        columns=("Budget", "Period", "Spent", "Of", "Will be") if shown else (),
        rows=tuple(_budget_row(state) for state in shown[:MOST_BUDGETS]),
        more=_more(len(shown) - MOST_BUDGETS, "budget"),
    )


def _is_news(state: BudgetState) -> bool:
    over = state.projected is not None and state.projected > state.budget.amount
    return bool(state.passed) or over or not state.known or bool(state.notes)


def _budget_row(state: BudgetState) -> tuple[Cell, ...]:
    budget = state.budget
    spent, projected = "not known", "not known"
    tone: Tone = ""
    if state.known:
        ratio = state.spent / budget.amount
        spent = f"{_money(state.spent, budget.currency)}, {percent(ratio, 0)}"
        tone = "bad" if ratio >= 1 else ""
    if state.projected is not None:
        projected = _money(state.projected, budget.currency)
    over: Tone = "bad" if state.projected is not None and state.projected > budget.amount else ""
    return (
        Cell(text=_name(budget.name, "")),
        Cell(text=state.period.label),
        _number(spent, tone),
        _number(_money(budget.amount, budget.currency)),
        _number(projected, over),
    )


def _trust(digest: Digest) -> Section:
    trust = digest.trust
    rows: list[tuple[str, str]] = []
    if trust.period_coverage_ratio is not None:
        hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
        rows.append(("Hours recorded", f"{percent(trust.period_coverage_ratio)} ({hours})"))
    if trust.activity_coverage_ratio is not None:
        rows.append(("Activity measured", f"{percent(trust.activity_coverage_ratio)} of held GPU-hours"))
    if trust.price_coverage_ratio is not None:
        rows.append(("Price known", f"{percent(trust.price_coverage_ratio)} of GPU-hours"))
    if digest.unpriced_seconds > 0:
        rows.append(("Unpriced", f"{decimal(digest.unpriced_seconds / HOUR, 1)} GPU-hours are in no cost"))
    if trust.missing_seconds:
        rows.append(("Missing", f"{decimal(abs(trust.missing_seconds) / HOUR, 3)} GPU-hours do not add up"))
    rows += [("Budget", _note(f"{state.budget.name}: {note}")) for state in digest.budgets for note in state.notes[:1]][
        :MOST_NOTES
    ]
    rows += [("Not read", _note(failure_words(failure))) for failure in trust.failures[:MOST_NOTES]]
    rows += [("Note", _note(note)) for note in digest.notes[:MOST_NOTES]]
    left = max(0, len(trust.failures) - MOST_NOTES) + max(0, len(digest.notes) - MOST_NOTES)
    return Section(
        title="How far to trust it",
        href=_link(digest, "/about"),
        columns=("", ""),
        rows=tuple((Cell(text=label), Cell(text=words)) for label, words in rows),
        more=_more(left, "note"),
    )


def _note(text: str) -> str:
    shown = clean(encodable(" ".join(text.split())))
    return shown if len(shown) <= _LONGEST_NOTE else f"{shown[:_LONGEST_NOTE]}…"


def _first(items: Iterable[_T], most: int, kind: Callable[[_T], str]) -> tuple[list[_T], int]:
    """So many of each kind, and how many are left."""
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


def _link(digest: Digest, path: str, **asked: str) -> str:
    """A page of the service over the week; empty where nobody said where it is."""
    if not digest.external_url:
        return ""
    first, last = minute(digest.week.start_seconds)[:10], minute(digest.week.end_seconds - 1)[:10]
    # "(none)" is how pages write that there is no value: an empty one asks for nothing.
    pairs: Mapping[str, str] = {
        "window": f"{first}..{last}",
        **{name: encodable(value) or "(none)" for name, value in asked.items()},
    }
    return f"{digest.external_url}{path}?{urlencode(pairs, quote_via=quote)}"

"""A digest from a ledger of two weeks, recommendations and budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from exporter.report.budget.values import BudgetState
from exporter.report.digest.values import Digest, Mover, Spend, Waste
from exporter.report.digest.weeks import WEEK_SECONDS
from exporter.report.fleet.costs import make_report, total_of
from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import UNATTRIBUTED, Dimension, FleetLedger, Window
from exporter.report.recommend.values import Recommendation
from exporter.report.recommend.write import totals

DIMENSIONS: frozenset[Dimension] = frozenset({"cluster", "namespace", "kind", "workload", "team"})
"""Of the ledger."""
MOST_WASTE = 10
_OWNER: tuple[Dimension, ...] = ("cluster", "namespace", "workload", "team")
_COMPARABLE_RATIO = 0.98
"""Of the hours of the week before: with less, what looks like more money is only more that is known."""
_LEAST_CHANGE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a digest tells besides the ledger."""

    recommendations: tuple[Recommendation, ...] | None = None
    """Of all owners, the dearest first; ``None`` where they could not be read."""
    budgets: tuple[BudgetState, ...] = ()
    title: str = "GPU cost"
    external_url: str = ""
    notes: tuple[str, ...] = ()


def make_digest(ledger: FleetLedger, week: Window, around: Around) -> Digest:
    """The digest of a week.

    Args:
        ledger: Of the week and the week before, at ``DIMENSIONS``.
        week: As ``parse_week`` gives it.
        around: The rest.
    """
    last = Window(start_seconds=week.start_seconds - WEEK_SECONDS, end_seconds=week.start_seconds)
    after, before = (make_report(_within(ledger, window), ("team",)) for window in (week, last))
    by_owner = make_report(_within(ledger, week), _OWNER)
    can_compare = not before.trust.failures and (before.trust.period_coverage_ratio or 0.0) >= _COMPARABLE_RATIO
    return Digest(
        week=week,
        title=around.title,
        external_url=around.external_url.rstrip("/"),
        spends=_spends(after, before if can_compare else None),
        movers=_movers(after, before) if can_compare else (),
        waste=_waste(by_owner),
        recommendations=around.recommendations,
        savings=totals(around.recommendations or ()),
        budgets=around.budgets,
        trust=after.trust,
        unpriced_seconds=after.total.unpriced_seconds,
        allocated_seconds=after.total.allocated_seconds,
        engine=ledger.engine,
        simulated=ledger.simulated,
        notes=(*_comparison_notes(before, can_compare=can_compare), *around.notes, *ledger.notes),
    )


def _within(ledger: FleetLedger, window: Window) -> FleetLedger:
    """A part of a ledger, of whole days."""
    chunks = (chunk for chunk in ledger.chunks if _meet(chunk.window, window))
    failures = (failure for failure in ledger.failures if _meet(failure.window, window))
    return replace(ledger, window=window, chunks=tuple(chunks), failures=tuple(failures))


def _meet(one: Window, other: Window) -> bool:
    return one.start_seconds < other.end_seconds and other.start_seconds < one.end_seconds


def _comparison_notes(before: FleetReport, *, can_compare: bool) -> tuple[str, ...]:
    if can_compare:
        return ()
    if before.trust.failures:
        return ("The week before could not be read whole, so that nothing is compared with it.",)
    trust = before.trust
    if not trust.recorded_hours:
        return ("Nothing is known of the week before, so that nothing is compared with it.",)
    hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,} hours"
    return (f"Of the week before only {hours} were recorded, so that nothing is compared with it.",)


def _spends(after: FleetReport, before: FleetReport | None) -> tuple[Spend, ...]:
    currencies = set(after.currencies) | set(before.currencies if before else ())
    held = total_of(line.figures for line in after.held)
    found = []
    for currency in sorted(currencies):
        own = held.money_in(currency)
        apart = {
            is_unattributed: sum(
                line.figures.money[currency].total
                for line in after.apart
                if (line.key.kind == UNATTRIBUTED) is is_unattributed and currency in line.figures.money
            )
            for is_unattributed in (True, False)
        }
        found.append(
            Spend(
                currency=currency,
                total=after.total.money_in(currency).total,
                before=before.total.money_in(currency).total if before else None,
                active=own.active,
                idle=own.idle,
                unknown=own.unknown,
                unattributed=apart[True],
                unallocated=apart[False],
            )
        )
    return tuple(found)


def _movers(after: FleetReport, before: FleetReport) -> tuple[Mover, ...]:
    """Teams whose money changed by a cent or more, the largest change first."""
    money: dict[tuple[str, str], list[float]] = {}
    for place, report in ((0, before), (1, after)):
        for line in report.held:
            for currency, amount in line.figures.money.items():
                money.setdefault((line.key.team, currency), [0.0, 0.0])[place] += amount.total
    movers = [
        Mover(team=team, currency=currency, before=then, after=now) for (team, currency), (then, now) in money.items()
    ]
    changed = [mover for mover in movers if abs(mover.change) >= _LEAST_CHANGE]
    return tuple(sorted(changed, key=lambda mover: (mover.currency, -abs(mover.change), mover.team)))


def _waste(report: FleetReport) -> tuple[Waste, ...]:
    found = [
        Waste(
            key=line.key,
            currency=currency,
            idle=money.idle,
            total=money.total,
            idle_seconds=line.figures.idle_seconds,
        )
        for line in report.held
        for currency, money in line.figures.money.items()
        if money.idle >= _LEAST_CHANGE
    ]
    found.sort(key=lambda one: (one.currency, -one.idle, one.key))
    return tuple(_first(found))


def _first(found: Sequence[Waste]) -> list[Waste]:
    """The dearest of each currency."""
    counts: dict[str, int] = {}
    kept = []
    for one in found:
        counts[one.currency] = counts.get(one.currency, 0) + 1
        if counts[one.currency] <= MOST_WASTE:
            kept.append(one)
    return kept

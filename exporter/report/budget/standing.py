"""How budgets stand: what their owners have cost in the period, and what the whole period will."""

from collections.abc import Sequence

from exporter.report.budget.periods import period_at
from exporter.report.budget.values import Budget, BudgetState
from exporter.report.fleet.costs import dimensions_of
from exporter.report.fleet.forecast import complete_days, forecast
from exporter.report.fleet.queries import CAPACITY, ENERGY, LEVELS, NODE_INFO, SIMULATED
from exporter.report.fleet.sources import LedgerSource
from exporter.report.fleet.values import (
    DAY_SECONDS,
    HOUR_SECONDS,
    UNALLOCATED,
    UNATTRIBUTED,
    Chunk,
    Failure,
    Figures,
    FleetLedger,
    LineKey,
    Window,
    last_recorded,
)

_DAYS_BEFORE = 28
"""What a projection looks back on, even where the period is younger."""
_NOT_MONEY = {CAPACITY, NODE_INFO, SIMULATED, *(ENERGY.series(level) for level in LEVELS)}
_LATE_HOURS = 1
"""Of the last hour a busy server may still be recording its values."""


async def standings(budgets: Sequence[Budget], source: LedgerSource, now: float) -> tuple[BudgetState, ...]:
    """How every budget stands, in their order, from one reading; empty without budgets.

    Args:
        budgets: As their file has them.
        source: What has the ledger of their periods.
        now: Unix time; money counts until the last recorded hour.

    Raises:
        PrometheusError: Nothing can be read at all.
        StoreError: The store cannot be read.
    """
    if not budgets:
        return ()
    end = last_recorded(now)
    midnight = int(now // DAY_SECONDS) * DAY_SECONDS
    starts = [period_at(budget.period, now).start_seconds for budget in budgets]
    start = min(*starts, midnight - _DAYS_BEFORE * DAY_SECONDS)
    dimensions = dimensions_of(dimension for budget in budgets for dimension in budget.owner)
    ledger = await source.ledger(Window(start_seconds=start, end_seconds=end, label="budgets"), dimensions)
    return tuple(standing(budget, ledger, now) for budget in budgets)


def standing(budget: Budget, ledger: FleetLedger, now: float) -> BudgetState:
    """How one budget stands, by a ledger that has its owner's dimensions, its period and the 28 days before."""
    period = period_at(budget.period, now)
    end = ledger.window.end_seconds
    own = [chunk for chunk in ledger.chunks if chunk.window.start_seconds >= period.start_seconds]
    figures = [figures for chunk in own for figures in _figures(budget, chunk)]
    spent = _money(figures, budget.currency)
    notes = _notes(budget, period, ledger, own, figures)
    others = {code for line in figures for code in line.money} - {budget.currency}
    unread = _unread(period, ledger)
    known = (
        not unread
        and _is_recorded(budget, period, own, end)
        and not (others and not any(budget.currency in line.money for line in figures))
    )
    days = _complete_days(budget, ledger)
    return BudgetState(
        budget=budget,
        period=period,
        spent=spent,
        projected=forecast(spent, days, end, period) if known else None,
        unpriced_seconds=sum(line.unpriced_seconds for line in figures),
        as_of_seconds=end,
        passed=tuple(part for part in budget.thresholds if known and spent >= part * budget.amount),
        known=known,
        notes=notes,
        unread=next((failure.reason for failure in unread if failure.may_pass), ""),
    )


def _unread(period: Window, ledger: FleetLedger) -> list[Failure]:
    """What of the period is not known; capacity, energy and what nodes are make no difference to money."""
    failures = (failure for failure in ledger.failures if failure.what not in _NOT_MONEY)
    return [failure for failure in failures if failure.window.end_seconds > period.start_seconds]


def _is_recorded(budget: Budget, period: Window, own: Sequence[Chunk], end: int) -> bool:
    """Whether there is any hour of the period; one that has just begun has none to wait for."""
    return end - period.start_seconds <= _LATE_HOURS * HOUR_SECONDS or any(_hours(budget, chunk) for chunk in own)


def _figures(budget: Budget, chunk: Chunk) -> list[Figures]:
    return [figures for key, figures in chunk.lines.items() if _is_for(budget, key)]


def _is_for(budget: Budget, key: LineKey) -> bool:
    if key.kind in {UNALLOCATED, UNATTRIBUTED} and not budget.include_unallocated:
        return False
    return all(key.value(dimension) == name for dimension, name in budget.owner.items())


def _money(lines: Sequence[Figures], currency: str) -> float:
    return sum(line.money_in(currency).total for line in lines)


def _complete_days(budget: Budget, ledger: FleetLedger) -> list[float]:
    return complete_days(
        ledger,
        money=lambda chunk: _money(_figures(budget, chunk), budget.currency),
        hours=lambda chunk: _hours(budget, chunk),
    )


def _hours(budget: Budget, chunk: Chunk) -> int:
    """Recorded hours of the budget's cluster, or of the one that has most: one that is new has fewer."""
    cluster = budget.owner.get("cluster")
    if cluster is not None:
        return chunk.recorded_hours.get(cluster, 0)
    return max(chunk.recorded_hours.values(), default=0)


def _notes(
    budget: Budget, period: Window, ledger: FleetLedger, own: Sequence[Chunk], figures: Sequence[Figures]
) -> tuple[str, ...]:
    notes = []
    if unread := _unread(period, ledger):
        notes.append(f"{len(unread)} questions about the period stayed unanswered, first: {unread[0].reason}.")
    hours = (ledger.window.end_seconds - period.start_seconds) // HOUR_SECONDS
    recorded = sum(_hours(budget, chunk) for chunk in own)
    if not unread and hours - recorded > _LATE_HOURS:
        where = f" for cluster '{budget.owner['cluster']}'" if "cluster" in budget.owner else ""
        notes.append(f"{hours - recorded} of the period's {hours} hours were not recorded{where}, and are not in it.")
    if own and recorded and not figures:
        notes.append("Nobody of the period is this budget's owner: see whether the owner is spelt as reports have it.")
    others = sorted({code for line in figures for code in line.money} - {budget.currency})
    notes += [
        f"{_money(figures, code):.2f} {code} of the period are not in it: give the budget in {code}, or the price book"
        f" in {budget.currency}."
        for code in others
    ]
    return tuple(notes)

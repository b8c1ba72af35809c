"""Reads the budgets file, compares spending with each budget, and forecasts the period."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import yaml

from exporter.config.types import CURRENCIES, part_of
from exporter.config.yaml_file import Fields, fields_of, read_text
from exporter.cost.dimensions import APART, LABEL, Dimension, LineKey, dimensions_of, label_problem, too_many_labels
from exporter.cost.ledger import Chunk, Failure, Figures, FleetLedger, LedgerSource
from exporter.cost.queries import CAPACITY, ENERGY, LEVELS, NODE_INFO, SIMULATED
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Period, Window, last_recorded, period_at
from exporter.errors import ConfigError

_DEFAULT_THRESHOLDS = (0.5, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limit on the cost of an owner's GPUs in a period."""

    name: str
    currency: str
    amount: float
    period: Period
    owner: Mapping[Dimension, str] = field(default_factory=dict)
    """Owner by any of cluster, namespace, team and labels; empty: all held devices."""
    thresholds: tuple[float, ...] = _DEFAULT_THRESHOLDS
    """Fractions of the amount that pages and digests highlight."""
    include_unallocated: bool = False
    """Whether Unallocated and Unattributed count; allowed for a budget of the fleet or of a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The state of a budget."""

    budget: Budget
    period: Window
    spent: float
    projected: float | None
    """Forecast for the whole period; ``None`` while too little of it is known."""
    unpriced_seconds: float
    """GPU-seconds of the budget without a price; ``spent`` is too low if there are any."""
    as_of_seconds: float
    passed: tuple[float, ...] = ()
    """Thresholds that ``spent`` has reached."""
    known: bool = True
    """False if the period was not read or recorded, or its money is in other currencies; ``spent`` is then invalid."""
    notes: tuple[str, ...] = ()
    """Notes on the figures, one sentence each, with the fix."""
    unread: str = ""
    """Reason of a failed query that a retry may answer; empty otherwise."""


PERIODS: tuple[Period, ...] = get_args(Period)
OWNERS: tuple[Dimension, ...] = ("cluster", "namespace", "team")
"""Dimensions of a budget's owner, in addition to ``label:KEY``."""
_MOST_BUDGETS, _MOST_THRESHOLDS, _MOST_PARTS = 2000, 20, 10
_LEAST_AMOUNT, _MOST_AMOUNT = 0.01, 1e15
_THRESHOLDS = f"a list of 1 to {_MOST_THRESHOLDS} parts of the amount, such as 0.8 or 80%"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def load(path: Path) -> tuple[Budget, ...]:
    """Return the budgets of a file, in its order.

    Raises:
        ConfigError: Lists all mistakes, each with file, line, budget, key and allowed values.
    """
    return parse(read_text(path, "budgets", "a file of budgets", "allowed: a readable YAML file"), str(path))


def parse(text: str, path: str) -> tuple[Budget, ...]:
    """Return the budgets in the text of a file; ``path`` is for messages.

    Raises:
        ConfigError: Lists all mistakes.
    """
    wrong = "no budgets; allowed: the key budgets with a list below it (see docs/cost.md)"
    top = fields_of(text, path, wrong)
    budgets = tuple(_budgets(top))
    top.finish()
    if top.problems:
        raise ConfigError(*top.problems)
    return budgets


def _budgets(top: Fields) -> Iterator[Budget]:
    lines: dict[str, str] = {}
    for fields in top.take_mappings("budgets", "budgets", "budget", _MOST_BUDGETS):
        budget = _budget(fields)
        fields.finish()
        if budget is None:
            continue
        if first := lines.get(budget.name):
            fields.problem("name", f"'{budget.name}' is given twice, first in line {first}; rename one")
        lines.setdefault(budget.name, fields.place_of("").rpartition(":")[2])
        yield budget


def _budget(fields: Fields) -> Budget | None:
    """Return a budget; ``None`` if it has a mistake, which is added to the problems."""
    before = len(fields.problems)
    name = fields.take_text("name", needed=True)
    allowed = "an amount of money, 0.01 or more"
    amount = fields.take_number("amount", allowed, _LEAST_AMOUNT, _MOST_AMOUNT, needed=True)
    currency = fields.take_choice("currency", CURRENCIES, "an ISO 4217 code such as USD or EUR", needed=True)
    period = fields.take_choice("period", PERIODS, ", ".join(PERIODS), needed=True)
    owner = _owner(fields)
    thresholds = _thresholds(fields)
    word = fields.take_choice("include_unallocated", _WORDS, "true, false")
    with_unallocated = _WORDS.get(word or "false", False)
    if with_unallocated and owner.keys() - {"cluster"}:
        fields.problem(
            "include_unallocated",
            "GPUs without an owner belong to no namespace, team or label; allowed: for all, or for a cluster",
        )
    if len(fields.problems) > before or name is None or amount is None or currency is None:
        return None
    return Budget(
        name=name,
        currency=currency,
        amount=amount,
        period=next(known for known in PERIODS if known == period),
        owner=owner,
        thresholds=thresholds,
        include_unallocated=with_unallocated,
    )


def _owner(fields: Fields) -> dict[Dimension, str]:
    selector = fields.take_mapping("owner")
    if selector is None:
        return {}
    labels = [key for key in selector if key.startswith(LABEL)]
    for key in labels:
        if problem := label_problem(key):
            selector.problem(key, problem)
    fields.problems += too_many_labels(f"{selector.path}: {selector.place.rstrip(': ')}", labels)
    chosen = {key: selector.take_text(key, "one name, as reports show it") for key in (*OWNERS, *labels)}
    selector.finish()
    return {key: text for key, text in chosen.items() if text is not None}


def _thresholds(fields: Fields) -> tuple[float, ...]:
    node = fields.take("thresholds")
    if node is None:
        return _DEFAULT_THRESHOLDS
    if not isinstance(node, yaml.SequenceNode) or not 0 < len(node.value) <= _MOST_THRESHOLDS:
        fields.problem("thresholds", f"no list, empty or too long; allowed: {_THRESHOLDS}")
        return ()
    parts = [_part(item) for item in node.value]
    for item, part in zip(node.value, parts, strict=True):
        if part is None:
            shown = item.value if isinstance(item, yaml.ScalarNode) else "a list or mapping"
            fields.problem("thresholds", f"'{shown}' is not a threshold; allowed: {_THRESHOLDS}, at most {_MOST_PARTS}")
    return tuple(sorted({part for part in parts if part is not None}))


def _part(node: yaml.Node) -> float | None:
    """Return a threshold from 0.01 to ``_MOST_PARTS``; ``None`` for any other node."""
    text = node.value.strip() if isinstance(node, yaml.ScalarNode) else ""
    try:
        value = part_of(text)
    except ValueError:
        return None
    return value if _LEAST_AMOUNT <= value <= _MOST_PARTS else None


_WEEK, _TWO_WEEKS, _LOOK_BACK = 7, 14, 28
"""Days that a forecast uses."""
_DAY_HOURS = 24


def complete_days(ledger: FleetLedger, money: Sequence[float], hours: Sequence[int]) -> list[float]:
    """Return the money of the last complete days up to the ledger's last midnight, oldest first, for ``forecast``.

    Args:
        ledger: Ledger with one chunk per day.
        money: Money of each chunk.
        hours: Recorded hours of each chunk.
    """
    due = ledger.window.end_seconds // DAY_SECONDS * DAY_SECONDS
    days: list[float] = []
    for chunk, spent, recorded in zip(reversed(ledger.chunks), reversed(money), reversed(hours), strict=True):
        if chunk.window.end_seconds > due:
            continue
        if chunk.window.end_seconds < due or min(chunk.window.hours, recorded) < _DAY_HOURS:
            break
        days.append(spent)
        due = chunk.window.start_seconds
    return days[::-1]


def forecast(spent: float, daily: Sequence[float], now_seconds: float, period: Window) -> float | None:
    """Return the projected money of the whole period; ``None`` without a complete day.

    Each remaining day costs the mean of the last 7 complete days. With 14 or more days, it is the mean of its weekday
    in the last 28 days. The result then depends on the number of weekends in the month.

    Args:
        spent: Money of the period until ``now_seconds``, in one currency.
        daily: Money of the last complete UTC days without a gap, oldest first. The last day ends at the midnight before
            ``now_seconds``. The days may lie before the period.
        now_seconds: Unix time until which ``spent`` counts.
        period: Period of whole UTC days.
    """
    if not daily:
        return None
    midnight = int(now_seconds // DAY_SECONDS) * DAY_SECONDS
    start = max(now_seconds, period.start_seconds)
    rest = 0.0
    for day in range(int(start // DAY_SECONDS) * DAY_SECONDS, period.end_seconds, DAY_SECONDS):
        left = (day + DAY_SECONDS - max(day, start)) / DAY_SECONDS
        rest += left * _of_day(daily, (day - midnight) // DAY_SECONDS)
    return spent + rest


def _of_day(daily: Sequence[float], days_ahead: int) -> float:
    """Return the projected money of a day; ``days_ahead`` is 0 for today, and ``daily`` ends with yesterday."""
    lately = daily[-_WEEK:]
    if len(daily) >= _TWO_WEEKS:
        recent = reversed(daily[-_LOOK_BACK:])
        lately = [cost for back, cost in enumerate(recent, start=1) if (back + days_ahead) % _WEEK == 0]
    return sum(lately) / len(lately)


_NOT_MONEY = {CAPACITY, NODE_INFO, SIMULATED, *(ENERGY.series(level) for level in LEVELS)}
_LATE_HOURS = 1
"""Most recent hours that a busy server may not have recorded yet."""


async def standings(budgets: Sequence[Budget], source: LedgerSource, now: float) -> tuple[BudgetState, ...]:
    """Return the states of the budgets, in their order, from one reading; empty without budgets.

    Args:
        budgets: Budgets in the order of their file.
        source: Source of the ledger of their periods.
        now: Unix time; money counts until the last recorded hour.

    Raises:
        PrometheusError: No query can be answered.
        StoreError: The store cannot be read.
    """
    if not budgets:
        return ()
    end = last_recorded(now)
    midnight = int(now // DAY_SECONDS) * DAY_SECONDS
    starts = [period_at(budget.period, now).start_seconds for budget in budgets]
    start = min(*starts, midnight - _LOOK_BACK * DAY_SECONDS)
    dimensions = dimensions_of(dimension for budget in budgets for dimension in budget.owner)
    ledger = await source.ledger(Window(start_seconds=start, end_seconds=end, label="budgets"), dimensions)
    return tuple(standing(budget, ledger, now) for budget in budgets)


def standing(budget: Budget, ledger: FleetLedger, now: float) -> BudgetState:
    """Return the state of a budget, from a ledger with its owner's dimensions, its period and the 28 days before."""
    period = period_at(budget.period, now)
    end = ledger.window.end_seconds
    by_day = [[figures for key, figures in chunk.lines.items() if _is_for(budget, key)] for chunk in ledger.chunks]
    hours = [_hours(budget, chunk) for chunk in ledger.chunks]
    days = complete_days(ledger, [_money(lines, budget.currency) for lines in by_day], hours)
    first = sum(chunk.window.start_seconds < period.start_seconds for chunk in ledger.chunks)
    figures = [one for lines in by_day[first:] for one in lines]
    recorded = sum(hours[first:])
    spent = _money(figures, budget.currency)
    unread = _unread(period, ledger)
    due = (end - period.start_seconds) // HOUR_SECONDS
    currencies = {code for line in figures for code in line.money}
    # A period that has just begun has no recorded hour yet.
    known = not unread and (due <= _LATE_HOURS or recorded > 0) and (not currencies or budget.currency in currencies)
    return BudgetState(
        budget=budget,
        period=period,
        spent=spent,
        projected=forecast(spent, days, end, period) if known else None,
        unpriced_seconds=sum(line.unpriced_seconds for line in figures),
        as_of_seconds=end,
        passed=tuple(part for part in budget.thresholds if known and spent >= part * budget.amount),
        known=known,
        notes=tuple(_notes(budget, figures, unread, due=due, recorded=recorded)),
        unread=next((failure.reason for failure in unread if failure.may_pass), ""),
    )


def _unread(period: Window, ledger: FleetLedger) -> list[Failure]:
    """Return the failures that concern money of the period, not capacity, energy or facts of nodes."""
    failures = (failure for failure in ledger.failures if failure.what not in _NOT_MONEY)
    return [failure for failure in failures if failure.window.end_seconds > period.start_seconds]


def _is_for(budget: Budget, key: LineKey) -> bool:
    if key.kind in APART and not budget.include_unallocated:
        return False
    return all(key.value(dimension) == name for dimension, name in budget.owner.items())


def _money(lines: Sequence[Figures], currency: str) -> float:
    return sum(line.money_in(currency).total for line in lines)


def _hours(budget: Budget, chunk: Chunk) -> int:
    """Return the recorded hours of the budget's cluster; without one, the maximum, because a new cluster has fewer."""
    cluster = budget.owner.get("cluster")
    if cluster is not None:
        return chunk.recorded_hours.get(cluster, 0)
    return max(chunk.recorded_hours.values(), default=0)


def _notes(
    budget: Budget, figures: Sequence[Figures], unread: Sequence[Failure], *, due: int, recorded: int
) -> Iterator[str]:
    """Yield notes on a period with ``recorded`` of ``due`` hours."""
    if unread:
        yield f"{len(unread)} queries about the period failed, first: {unread[0].reason}."
    elif due - recorded > _LATE_HOURS:
        where = f" for cluster '{budget.owner['cluster']}'" if "cluster" in budget.owner else ""
        yield f"{due - recorded} of the period's {due} hours were not recorded{where}, and are not in it."
    if recorded and not figures:
        yield "No line of the period is of this budget's owner: check the spelling against a report."
    for code in sorted({code for line in figures for code in line.money} - {budget.currency}):
        yield (
            f"{_money(figures, code):.2f} {code} of the period are not in it: give the budget in {code}, or the price"
            f" book in {budget.currency}."
        )

"""What a period will have cost when it is over: what was spent, and for the rest of it what days cost lately."""

from collections.abc import Callable, Sequence
from typing import Literal

from exporter.report.fleet.values import DAY_SECONDS, Chunk, FleetLedger, Window

_WEEK, _TWO_WEEKS, _LOOK_BACK = 7, 14, 28
_DAY_HOURS = 24

Method = Literal["weekdays", "mean"]


def method(daily: Sequence[float]) -> Method | None:
    """How the rest of a period is told: ``None`` not at all, for want of a complete day.

    ``mean``: each day as the mean of the last 7 complete days. ``weekdays``, from 14 days on: each as the mean of
    its weekday in the last 28, so that a month with five weekends is not taken for one with four.
    """
    if not daily:
        return None
    return "weekdays" if len(daily) >= _TWO_WEEKS else "mean"


def complete_days(
    ledger: FleetLedger, *, money: Callable[[Chunk], float], hours: Callable[[Chunk], int]
) -> list[float]:
    """Money of the last days without a hole until the ledger's last midnight, oldest first: what ``forecast`` goes by.

    Args:
        ledger: By day.
        money: Of a day.
        hours: How many hours of it were recorded.
    """
    due = ledger.window.end_seconds // DAY_SECONDS * DAY_SECONDS
    days: list[float] = []
    for chunk in reversed(ledger.chunks):
        if chunk.window.end_seconds > due:
            continue
        if chunk.window.end_seconds < due or chunk.window.hours < _DAY_HOURS or hours(chunk) < _DAY_HOURS:
            break
        days.append(money(chunk))
        due = chunk.window.start_seconds
    return days[::-1]


def forecast(spent: float, daily: Sequence[float], now_seconds: float, period: Window) -> float | None:
    """What the whole period costs; ``None`` while not one complete day is known.

    Args:
        spent: Money of the period until ``now_seconds``, in one currency.
        daily: Money of the last complete UTC days without a hole, oldest first; the last ended at the midnight before
            ``now_seconds``. They may lie before the period.
        now_seconds: Unix time until which ``spent`` counts.
        period: What is asked for.
    """
    if now_seconds >= period.end_seconds:
        return spent
    how = method(daily)
    if how is None:
        return None
    midnight = int(now_seconds // DAY_SECONDS) * DAY_SECONDS
    start = max(now_seconds, float(period.start_seconds))
    rest = 0.0
    for day in range(int(start // DAY_SECONDS) * DAY_SECONDS, period.end_seconds, DAY_SECONDS):
        part = min(day + DAY_SECONDS, period.end_seconds) - max(float(day), start)
        rest += part / DAY_SECONDS * _of_day(daily, (day - midnight) // DAY_SECONDS, how)
    return spent + rest


def _of_day(daily: Sequence[float], days_ahead: int, how: Method) -> float:
    """What a day costs; today is 0 days ahead, so that yesterday, the last of ``daily``, is 1 day before it."""
    if how == "mean":
        lately = daily[-_WEEK:]
    else:
        recent = daily[-_LOOK_BACK:]
        lately = [cost for back, cost in enumerate(reversed(recent), start=1) if (back + days_ahead) % _WEEK == 0]
    return sum(lately) / len(lately)

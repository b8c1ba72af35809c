"""The calendar's periods that budgets are for, in UTC."""

from datetime import UTC, datetime, timedelta

from exporter.report.budget.values import Period
from exporter.report.fleet.values import Window

_MONTHS = {"month": 1, "quarter": 3, "year": 12}


def period_at(period: Period, now: float) -> Window:
    """The week (from Monday), month, quarter or year that ``now`` is in; labelled ``2026-W47``, ``2026-11``, ..."""
    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        start = day - timedelta(days=day.weekday())
        end, label = start + timedelta(days=7), f"{start:%G-W%V}"
    else:
        months = _MONTHS[period]
        start = day.replace(day=1, month=(day.month - 1) // months * months + 1)
        after = start.month - 1 + months
        end = start.replace(year=start.year + after // 12, month=after % 12 + 1)
        label = {1: f"{start:%Y-%m}", 3: f"{start:%Y}-Q{start.month // 3 + 1}", 12: f"{start:%Y}"}[months]
    return Window(start_seconds=int(start.timestamp()), end_seconds=int(end.timestamp()), label=label)

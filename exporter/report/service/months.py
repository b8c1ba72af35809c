"""What this month has cost, will cost and what the last one did, from one reading of both."""

from datetime import UTC, datetime, timedelta

from exporter.report.fleet.forecast import complete_days, forecast
from exporter.report.fleet.values import HOUR_SECONDS, Chunk, FleetLedger, Window, last_recorded
from exporter.report.service.book import MonthMoney

KNOWN_RATIO = 0.99
"""So much of the last month must have been recorded, or its money is not called that of the month."""


def months_window(now_seconds: float) -> Window:
    """Last month and this one, as far as they are recorded."""
    this = _month(now_seconds)
    last = _month(this.start_seconds - 1)
    return Window(start_seconds=last.start_seconds, end_seconds=last_recorded(now_seconds), label="last month and this")


def month_start(now_seconds: float) -> int:
    """When the month of a moment began, Unix time."""
    return _month(now_seconds).start_seconds


def month_money(ledger: FleetLedger, now_seconds: float) -> tuple[MonthMoney, ...]:
    """This month's money, a line per currency.

    Args:
        ledger: Over ``months_window``; its dimensions do not matter.
        now_seconds: Unix time.
    """
    this = _month(now_seconds)
    last = [chunk for chunk in ledger.chunks if chunk.window.start_seconds < this.start_seconds]
    now = [chunk for chunk in ledger.chunks if chunk.window.start_seconds >= this.start_seconds]
    hours = sum(chunk.window.hours for chunk in last)
    known = bool(hours) and sum(_recorded_hours(chunk) for chunk in last) >= KNOWN_RATIO * hours
    months = []
    for currency in sorted({currency for chunk in ledger.chunks for currency in _money(chunk)}):
        spent = sum(_money(chunk).get(currency, 0.0) for chunk in now)
        months.append(
            MonthMoney(
                currency=currency,
                spent=spent,
                forecast=forecast(spent, _days(ledger, currency), ledger.window.end_seconds, this),
                last_month=sum(_money(chunk).get(currency, 0.0) for chunk in last) if known else None,
            )
        )
    return tuple(months)


def month_coverage(ledger: FleetLedger, now_seconds: float) -> float | None:
    """Part of the hours of this month so far that were recorded, over all clusters; ``None`` of a month just begun."""
    this = _month(now_seconds)
    chunks = [chunk for chunk in ledger.chunks if chunk.window.start_seconds >= this.start_seconds]
    clusters = {cluster for chunk in chunks for cluster in chunk.recorded_hours}
    hours = (ledger.window.end_seconds - this.start_seconds) // HOUR_SECONDS * max(1, len(clusters))
    return sum(sum(chunk.recorded_hours.values()) for chunk in chunks) / hours if hours > 0 else None


def _days(ledger: FleetLedger, currency: str) -> list[float]:
    return complete_days(ledger, money=lambda chunk: _money(chunk).get(currency, 0.0), hours=_recorded_hours)


def _month(seconds: float) -> Window:
    start = datetime.fromtimestamp(seconds, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    after = (start + timedelta(days=32)).replace(day=1)
    return Window(start_seconds=int(start.timestamp()), end_seconds=int(after.timestamp()), label=f"{start:%Y-%m}")


def _recorded_hours(chunk: Chunk) -> int:
    """Of the cluster that has most: one that is new has fewer."""
    return max(chunk.recorded_hours.values(), default=0)


def _money(chunk: Chunk) -> dict[str, float]:
    total: dict[str, float] = {}
    for figures in chunk.lines.values():
        for currency, money in figures.money.items():
            total[currency] = total.get(currency, 0.0) + money.total
    return total

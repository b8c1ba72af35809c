"""Provides data of the cost service that is not in reports: this month's money, freshness, and cost labels."""

import asyncio
from dataclasses import dataclass
from typing import Annotated

from exporter.cost.budgets import Budget, standing
from exporter.cost.dimensions import pairs
from exporter.cost.document import Funnel, funnel
from exporter.cost.ledger import FleetLedger, total_of
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.queries import COST_LABELS, RECORDED, SECONDS
from exporter.cost.report import KNOWN_RATIO, FleetReport
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, period_at
from exporter.errors import PrometheusError
from exporter.model.formatting import minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """This month in one currency."""

    currency: Annotated[str, "ISO 4217."]
    spent: Annotated[float, "Month to date: all GPUs, held or not."]
    forecast: Annotated[float | None, "Of the whole month; null while too little is known."]
    last_month: Annotated[float | None, "Of the month before; null where it is not wholly known."]


def gpu_funnel(report: FleetReport, now_seconds: float) -> Funnel | None:
    """Return the funnel in mean numbers of GPUs over the recorded hours; ``None`` without recorded hours."""
    trust, window = report.trust, report.window
    over = min(window.end_seconds, now_seconds) - window.start_seconds
    if not trust.recorded_hours or not trust.expected_hours or over <= 0:
        return None
    # Hours of several clusters are concurrent, so the recorded part of all expected hours counts.
    seconds = over // HOUR_SECONDS * HOUR_SECONDS * (trust.recorded_hours / trust.expected_hours)
    return funnel(report, unit=seconds) if seconds > 0 else None


_TIME = "Unix time; null while it is not known."


@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """Freshness of the data."""

    now_seconds: Annotated[float, "Time of the answer, Unix time."]
    first_day_seconds: Annotated[float | None, f"Start of the oldest day that is known. {_TIME}"] = None
    closed_until_seconds: Annotated[float | None, f"End of the newest closed day. {_TIME}"] = None
    read_until_seconds: Annotated[float | None, f"End of the newest recorded hour. {_TIME}"] = None
    problem: Annotated[str | None, "Why newer hours are not there, with the fix."] = None
    simulated: Annotated[bool, "Some of it is of simulated nodes."] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMonth:
    """The money of a month at the time of reading."""

    start_seconds: int
    money: tuple[Month, ...]
    coverage: float | None
    """Recorded part of the month's hours so far, over all clusters; ``None`` for a month that has just begun."""


def this_month(ledger: FleetLedger, now_seconds: float) -> ThisMonth:
    """Return this month's money, one ``Month`` per currency.

    Args:
        ledger: Ledger of last month and this month, as far as recorded, at any dimensions.
        now_seconds: Unix time.
    """
    this = period_at("month", now_seconds)
    last = [chunk for chunk in ledger.chunks if chunk.window.start_seconds < this.start_seconds]
    now = [chunk for chunk in ledger.chunks if chunk.window.start_seconds >= this.start_seconds]
    hours = sum(chunk.window.hours for chunk in last)
    # The maximum over clusters, because a new cluster has fewer hours.
    recorded = sum(max(chunk.recorded_hours.values(), default=0) for chunk in last)
    before, whole = (
        total_of(figures for chunk in part for figures in chunk.lines.values()) for part in (last, ledger.chunks)
    )
    months = []
    for currency in sorted(whole.money):
        everything = Budget(name="", currency=currency, amount=1.0, period="month", include_unallocated=True)
        state = standing(everything, ledger, now_seconds)
        last_month = before.money_in(currency).total if hours and recorded >= KNOWN_RATIO * hours else None
        months.append(Month(currency=currency, spent=state.spent, forecast=state.projected, last_month=last_month))
    clusters = {cluster for chunk in now for cluster in chunk.recorded_hours}
    hours = (ledger.window.end_seconds - this.start_seconds) // HOUR_SECONDS * max(1, len(clusters))
    return ThisMonth(
        start_seconds=this.start_seconds,
        money=tuple(months),
        coverage=sum(sum(chunk.recorded_hours.values()) for chunk in now) / hours if hours > 0 else None,
    )


LOOK_BACK_HOURS = 26
PATIENCE_SECONDS = 20.0
"""Limit in seconds, retries included, so that pages do not look fresh while Prometheus hangs."""
LATE_SECONDS = 2.5 * HOUR_SECONDS
"""Maximum age of the newest hour: the next hour includes one missed hour, but two missed hours are a fault."""


async def newest_hour(client: PrometheusClient, now_seconds: float) -> float | None:
    """Return the end of the newest recorded hour in Unix time; ``None`` if there is none within the last 26 hours.

    Raises:
        PrometheusError: The query failed.
    """
    # A recorded sample has one timestamp; steps of 5 min see each sample once, with its own time.
    query = f"max(max_over_time(timestamp({RECORDED})[{LOOK_BACK_HOURS}h:5m]))"
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            samples = await client.instant(query, now_seconds)
    except TimeoutError:
        raise PrometheusError(
            "timeout",
            f"{client.settings.url}: no answer to a small query in {PATIENCE_SECONDS:g} s; see what keeps it busy",
            retriable=True,
        ) from None
    newest = samples[0].value if samples else None
    if newest is not None and newest > now_seconds + DAY_SECONDS:
        raise PrometheusError(
            "bad_rows",
            f"{client.settings.url}: {RECORDED} has an hour that is more than a day in the future; see the clock of"
            " what records it, and other writers of this series",
        )
    return None if newest is None else newest // HOUR_SECONDS * HOUR_SECONDS


async def label_values(client: PrometheusClient, now_seconds: float) -> dict[str, tuple[str, ...]]:
    """Return the values of cost labels of owners of the last day by key, both in alphabetical order.

    Raises:
        PrometheusError: The query failed.
    """
    series = SECONDS.series("workload", f'{COST_LABELS}!=""')
    samples = await client.instant(f"count by ({COST_LABELS}) (last_over_time({series}[1d]))", now_seconds)
    found: dict[str, set[str]] = {}
    for sample in samples:
        for key, value in pairs(sample.labels.get(COST_LABELS, "")).items():
            found.setdefault(key, set()).add(value)
    return {key: tuple(sorted(values)) for key, values in sorted(found.items())}


def lateness(newest_seconds: float | None, now_seconds: float) -> str:
    """Return why the newest hour is old, in one sentence with the fix; empty if it is new enough."""
    if newest_seconds is None:
        return (
            f"{RECORDED} has no sample of the last {LOOK_BACK_HOURS} hours: load rules/prometheus-rules.yaml into"
            " Prometheus, and see that it scrapes the agents"
        )
    if now_seconds - newest_seconds <= LATE_SECONDS:
        return ""
    at = minute(newest_seconds)
    return f"no hour after {at} UTC was recorded: see whether Prometheus evaluates its rules and scrapes the agents"

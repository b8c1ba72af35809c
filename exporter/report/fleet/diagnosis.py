"""Says what is missing of a reading and why: hours without records, rules that are not loaded, the wrong server."""

from collections.abc import Sequence

from exporter.errors import PrometheusError
from exporter.report.fleet import queries
from exporter.report.fleet.engine import Engine
from exporter.report.fleet.gaps import day_of, missing_hours
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.recorded import Recorded
from exporter.report.fleet.values import CHECKPOINT_SECONDS, DAY_SECONDS, Window

RULES = (
    "load rules/prometheus-rules.yaml into Prometheus (or vmalert, or the ruler); the ledger is recorded from then on"
)
_LOOK_BACK_DAYS = 400


async def notes(client: PrometheusClient, windows: Sequence[Window], recorded: Recorded, engine: Engine) -> list[str]:
    """One line for each thing that a reader must know.

    Args:
        client: Asked only where nothing was recorded.
        windows: The chunks.
        recorded: What is known of their hours.
        engine: What answers.
    """
    if not recorded.clusters:
        try:
            return [await _why_nothing(client, windows)]
        except PrometheusError as error:
            return [f"No hour of the period was recorded, and why could not be asked: {error}"]
    why = ""
    if engine.retention_seconds is not None and engine.retention_seconds < _length(windows):
        days = engine.retention_seconds / DAY_SECONDS
        why = f": the server keeps {days:g} days; keep closed days with `serve --store`, or raise its retention"
    return missing_hours(windows, [recorded.hours(number) for number in range(len(windows))], why)


async def _why_nothing(client: PrometheusClient, windows: Sequence[Window]) -> str:
    """Nothing was recorded: the period is another, the rules are not loaded, or this is not the right server."""
    url = client.settings.url
    end = queries.asked_at(windows[-1])
    first, last = day_of(windows[0].start_seconds), day_of(windows[-1].end_seconds - 1)
    period = f"from {first} to {last}" if first != last else f"on {first}"
    days = await client.range(
        f"count(last_over_time({queries.RECORDED}[1d]))", end - _LOOK_BACK_DAYS * DAY_SECONDS, end, DAY_SECONDS
    )
    now = await client.instant(f"count(last_over_time({queries.RECORDED}[1d]))", None)
    if days:
        newest = day_of(days[0].points[-1][0] - CHECKPOINT_SECONDS - 1)
        return f"{url}: nothing was recorded {period}; the newest hours before it are of {newest}"
    if now:
        return (
            f"{url}: nothing was recorded {period}, but is now: that is before the rules were loaded, or older than"
            " what the server keeps"
        )
    if await client.instant(f"count(last_over_time({queries.RAW_LEDGER}[1h]))", None):
        return f"{url}: the agents' ledger is there, but its hourly series {queries.RECORDED} are not: {RULES}"
    if await client.instant(f"count(last_over_time({queries.ANYTHING}[1h]))", None):
        return f"{url}: agents are scraped, but they have no ledger yet; ask again in a few minutes"
    return (
        f"{url}: has no series of an agent at all; is this the right Prometheus, and the right tenant"
        " (--prometheus-headers X-Scope-OrgID=...), and does it scrape the agents?"
    )


def _length(windows: Sequence[Window]) -> int:
    return windows[-1].end_seconds - windows[0].start_seconds

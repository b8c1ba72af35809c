"""Says what is missing of a reading and why: hours without records, rules that are not loaded, the wrong server."""

from collections.abc import Sequence
from datetime import UTC, datetime

from exporter.errors import PrometheusError
from exporter.report.fleet import queries
from exporter.report.fleet.engine import Engine
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.recorded import Recorded
from exporter.report.fleet.values import DAY_SECONDS, Window

RULES = (
    "load rules/prometheus-rules.yaml into Prometheus (or vmalert, or the ruler); the ledger is recorded from then on"
)
_LOOK_BACK_DAYS = 400
_MOST_GAPS = 3


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
    found = []
    for cluster in sorted(recorded.clusters):
        found += _missing(
            windows, [recorded.hours(number).get(cluster, 0) for number in range(len(windows))], cluster, engine
        )
    return found


async def _why_nothing(client: PrometheusClient, windows: Sequence[Window]) -> str:
    """Nothing was recorded: the period is another, the rules are not loaded, or this is not the right server."""
    url = client.settings.url
    end = windows[-1].end_seconds
    days = await client.range(
        f"count(last_over_time({queries.RECORDED}[1d]))", end - _LOOK_BACK_DAYS * DAY_SECONDS, end, DAY_SECONDS
    )
    now = await client.instant(f"count(last_over_time({queries.RECORDED}[1d]))", None)
    if days:
        last = days[0].points[-1][0]
        return f"{url}: nothing was recorded in the period; the newest hours before it are of {_day(last - 1)}"
    if now:
        return (
            f"{url}: nothing was recorded in the period, but is now: it lies before the rules were loaded, or is older"
            " than what the server keeps"
        )
    if await client.instant(f"count(last_over_time({queries.RAW_LEDGER}[1h]))", None):
        return f"{url}: the agents' ledger is there, but its hourly series {queries.RECORDED} are not: {RULES}"
    if await client.instant(f"count(last_over_time({queries.ANYTHING}[1h]))", None):
        return f"{url}: agents are scraped, but they have no ledger yet; ask again in a few minutes"
    return (
        f"{url}: has no series of an agent at all; is this the right Prometheus, and the right tenant"
        " (--prometheus-headers X-Scope-OrgID=...), and does it scrape the agents?"
    )


def _missing(windows: Sequence[Window], hours: Sequence[int], cluster: str, engine: Engine) -> list[str]:
    """Hours without records: before the first that has some, and gaps after it."""
    where = f"cluster {cluster}: " if cluster else ""
    first = next(number for number, count in enumerate(hours) if count)
    found = []
    kept = ""
    if engine.retention_seconds is not None and engine.retention_seconds < _length(windows):
        days = engine.retention_seconds / DAY_SECONDS
        kept = f": the server keeps {days:g} days; keep closed days with `serve --store`, or raise its retention"
    before = sum(window.hours for window in windows[:first])
    if before:
        found.append(f"{where}nothing was recorded before {_day(windows[first].start_seconds)}, {before} hours{kept}")
    gaps = [
        (window, window.hours - count)
        for window, count in list(zip(windows, hours, strict=True))[first:]
        if count < window.hours
    ]
    if gaps:
        total = sum(missing for _, missing in gaps)
        told = ", ".join(f"{_days(window)} ({missing})" for window, missing in gaps[:_MOST_GAPS])
        more = f" and {len(gaps) - _MOST_GAPS} more days" if len(gaps) > _MOST_GAPS else ""
        # What a server of a short memory lacks of a chunk of many days lies at the beginning of the chunk.
        why = kept if gaps[0][0] == windows[0] and windows[0].seconds > DAY_SECONDS else ""
        found.append(f"{where}{total} {'hour was' if total == 1 else 'hours were'} not recorded: {told}{more}{why}")
    return found


def _length(windows: Sequence[Window]) -> int:
    return windows[-1].end_seconds - windows[0].start_seconds


def _days(window: Window) -> str:
    """A day, or the first and the last of a chunk that has several."""
    first, last = _day(window.start_seconds), _day(window.end_seconds - 1)
    return first if first == last else f"within {first} to {last}"


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"

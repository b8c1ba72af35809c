"""Asks Prometheus how new its ledger is: one light question that tells whether anything has to be read anew."""

import asyncio
from datetime import UTC, datetime

from exporter.errors import PrometheusError
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.queries import COST_LABELS, RECORDED, SECONDS
from exporter.report.fleet.values import DAY_SECONDS, HOUR_SECONDS, pairs

LOOK_BACK_HOURS = 26
PATIENCE_SECONDS = 20.0
"""Retries included: pages must not seem to be new while Prometheus hangs."""
LATE_SECONDS = 2.5 * HOUR_SECONDS
"""After the end of the newest hour: one that was missed is in the next, and two are no accident."""


async def newest_hour(client: PrometheusClient, now_seconds: float) -> float | None:
    """When the newest recorded hour ended, Unix time; ``None`` where none was within the last 26 hours.

    Raises:
        PrometheusError: It cannot be asked.
    """
    # A recorded sample is of one moment: in steps of 5 min each is seen once, with its own time.
    query = f"max(max_over_time(timestamp({RECORDED})[{LOOK_BACK_HOURS}h:5m]))"
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            samples = await client.instant(query, now_seconds)
    except TimeoutError:
        raise PrometheusError(
            "timeout",
            f"{client.settings.url}: no answer to a light question in {PATIENCE_SECONDS:g} s; see what keeps it busy",
            retriable=True,
        ) from None
    newest = samples[0].value if samples else None
    if newest is not None and newest > now_seconds + DAY_SECONDS:
        raise PrometheusError(
            "bad_rows",
            f"{client.settings.url}: {RECORDED} has an hour that is more than a day in the future; see the clock of"
            " what records it, and who else may write this series",
        )
    return None if newest is None else newest // HOUR_SECONDS * HOUR_SECONDS


async def label_values(client: PrometheusClient, now_seconds: float) -> dict[str, tuple[str, ...]]:
    """Values by key of the cost labels that owners of the last day had, both in the order of the alphabet.

    Raises:
        PrometheusError: It cannot be asked.
    """
    series = f'{SECONDS.series("workload")}{{{COST_LABELS}!=""}}'
    samples = await client.instant(f"count by ({COST_LABELS}) (last_over_time({series}[1d]))", now_seconds)
    found: dict[str, set[str]] = {}
    for sample in samples:
        for key, value in pairs(sample.labels.get(COST_LABELS, "")).items():
            found.setdefault(key, set()).add(value)
    return {key: tuple(sorted(values)) for key, values in sorted(found.items())}


def lateness(newest_seconds: float | None, now_seconds: float) -> str:
    """Why there is no newer hour, in one sentence with the mend; empty where it is new enough."""
    if newest_seconds is None:
        return (
            f"{RECORDED} has no sample of the last {LOOK_BACK_HOURS} hours: load rules/prometheus-rules.yaml into"
            " Prometheus, and see that it scrapes the agents"
        )
    if now_seconds - newest_seconds <= LATE_SECONDS:
        return ""
    at = f"{datetime.fromtimestamp(newest_seconds, UTC):%Y-%m-%d %H:%M} UTC"
    return f"no hour after {at} was recorded: see whether Prometheus evaluates its rules and scrapes the agents"

"""Asks Prometheus how new its ledger is: one light question that tells whether anything has to be read anew."""

import asyncio
from datetime import UTC, datetime

from exporter.errors import PrometheusError
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.values import HOUR_SECONDS

CAPACITY = "cluster:gpu_capacity_seconds:delta1h"
"""Recorded for every hour that has been metered, whoever held the GPUs."""
LOOK_BACK_HOURS = 26
PATIENCE_SECONDS = 20.0
"""Retries included: pages must not seem to be new while Prometheus hangs."""
LATE_SECONDS = 2.5 * HOUR_SECONDS
"""An hour is recorded within the next; by then another one should have been."""


async def newest_hour(client: PrometheusClient, now_seconds: float) -> float | None:
    """When the newest hour was recorded, Unix time; ``None`` where none was within the last 26 hours.

    Raises:
        PrometheusError: It cannot be asked.
    """
    # A recorded sample is of one moment: in steps of 5 min each is seen once, with its own time.
    query = f"max(max_over_time(timestamp({CAPACITY})[{LOOK_BACK_HOURS}h:5m]))"
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            samples = await client.instant(query, now_seconds)
    except TimeoutError:
        raise PrometheusError(
            "timeout",
            f"{client.settings.url}: no answer to a light question in {PATIENCE_SECONDS:g} s; see what keeps it busy",
            retriable=True,
        ) from None
    return samples[0].value if samples else None


def lateness(newest_seconds: float | None, now_seconds: float) -> str:
    """Why there is no newer hour, in one sentence with the mend; empty where it is new enough."""
    if newest_seconds is None:
        return (
            f"{CAPACITY} has no sample of the last {LOOK_BACK_HOURS} hours: load rules/prometheus-rules.yaml into"
            " Prometheus, and see that it scrapes the agents"
        )
    if now_seconds - newest_seconds <= LATE_SECONDS:
        return ""
    at = f"{datetime.fromtimestamp(newest_seconds, UTC):%Y-%m-%d %H:%M} UTC"
    return f"nothing has been recorded since {at}: see whether Prometheus evaluates its rules and scrapes the agents"

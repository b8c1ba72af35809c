"""What part of the GPUs that are held is at work at all, from the recorded funnel."""

from exporter.report.fleet import queries
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.values import Filters, Window

_HELD, _AT_WORK = "cluster:gpu_allocated:sum", "cluster:gpu_active:sum"


async def at_work_ratio(client: PrometheusClient, window: Window, filters: Filters, cluster_label: str) -> float | None:
    """Mean part of the held GPUs that were active for 5 % of a quarter of an hour or more.

    Args:
        client: Where.
        window: Over which; what of it Prometheus has forgotten is not in the mean.
        filters: Clusters are looked at; of anything else the funnel is not recorded.
        cluster_label: Tells clusters apart.

    Returns:
        0-1; ``None`` where it is not recorded, or nothing was held.

    Raises:
        PrometheusError: It cannot be asked.
    """
    if set(filters.wanted) - {"cluster"}:
        return None
    matchers = queries.matchers(filters, cluster_label)
    held, at_work = (
        f"sum(max by ({cluster_label}) (avg_over_time({name}{{{matchers}}}[{window.seconds}s])))"
        for name in (_HELD, _AT_WORK)
    )
    found = await client.instant(f"{at_work} / {held}", window.end_seconds)
    return min(1.0, found[0].value) if found else None

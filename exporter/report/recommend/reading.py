"""Recommendations of a fleet, from its evidence and its ledger over the last days."""

from dataclasses import dataclass

from exporter.report.fleet.sources import LedgerSource
from exporter.report.fleet.values import DAY_SECONDS, Dimension, Filters, FleetLedger, Window, last_recorded
from exporter.report.recommend.advice import recommend
from exporter.report.recommend.evidence import Asks, read_evidence
from exporter.report.recommend.settings import AdviceSettings
from exporter.report.recommend.values import DeviceUse, Recommendation

DIMENSIONS: frozenset[Dimension] = frozenset({"cluster", "namespace", "kind", "workload", "team", "model"})
"""Of the ledger that prices are taken from."""
WINDOW_DAYS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What was suggested, and from what."""

    recommendations: tuple[Recommendation, ...]
    uses: tuple[DeviceUse, ...]
    """Empty: no evidence was recorded, or it was filtered out."""
    ledger: FleetLedger


async def read(
    client: Asks,
    source: LedgerSource,
    window: Window,
    *,
    cluster_label: str = "cluster",
    filters: Filters | None = None,
    settings: AdviceSettings | None = None,
) -> Read:
    """Recommendations over a window with what they rest on, dearest first.

    Raises:
        PrometheusError: Prometheus cannot be asked, or not for all of the evidence.
        StoreError: The store of closed days cannot be read.
    """
    # What others pay is wanted too, for the price of a smaller model: the ledger is not filtered.
    uses = await read_evidence(client, window, cluster_label, filters)
    ledger = await source.ledger(window, DIMENSIONS)
    return Read(recommendations=recommend(uses, ledger, settings), uses=uses, ledger=ledger)


async def read_recommendations(
    client: Asks,
    source: LedgerSource,
    now_seconds: float,
    *,
    cluster_label: str = "cluster",
) -> tuple[Recommendation, ...]:
    """Recommendations over the last days up to the last recorded hour, dearest first.

    Raises:
        PrometheusError: As for ``read``.
        StoreError: As for ``read``.
    """
    end = last_recorded(now_seconds)
    window = Window(start_seconds=end - WINDOW_DAYS * DAY_SECONDS, end_seconds=end, label=f"{WINDOW_DAYS}d")
    return (await read(client, source, window, cluster_label=cluster_label)).recommendations

"""Reads what a digest is made of; what cannot be read besides the ledger becomes a note."""

from collections.abc import Callable, Sequence

from exporter.errors import ExporterError, PrometheusError
from exporter.report.budget.standing import standings
from exporter.report.budget.values import Budget, BudgetState
from exporter.report.digest.make import DIMENSIONS, Around, make_digest
from exporter.report.digest.values import Digest
from exporter.report.digest.weeks import both_weeks
from exporter.report.fleet.sources import LedgerSource, Progress
from exporter.report.fleet.values import Window
from exporter.report.recommend.evidence import Asks
from exporter.report.recommend.reading import read
from exporter.report.recommend.values import Recommendation


async def read_digest(  # noqa: PLR0913 - each is another thing to read
    source: LedgerSource,
    client: Asks | None,
    week: Window,
    now_seconds: float,
    *,
    budgets: Sequence[Budget] = (),
    cluster_label: str = "cluster",
    title: str = "GPU cost",
    external_url: str = "",
    progress: Callable[[Progress], None] | None = None,
) -> Digest:
    """The digest of a week.

    Args:
        source: What has the ledger.
        client: Has the evidence of recommendations; ``None`` where there is only a store.
        week: As ``parse_week`` gives it.
        now_seconds: Unix time, as of which budgets stand.
        budgets: As their file has them.
        cluster_label: Of the evidence.
        title: Head of the digest.
        external_url: Of the cost page.
        progress: Told of the reading of the ledger.

    Raises:
        ExporterError: The ledger cannot be read, or has nothing of the week.
    """
    ledger = await source.ledger(both_weeks(week), DIMENSIONS, None, progress)
    of_week = [chunk for chunk in ledger.chunks if chunk.window.start_seconds >= week.start_seconds]
    if not any(chunk.lines or chunk.capacity_seconds for chunk in of_week):
        failures = [one for one in ledger.failures if one.window.end_seconds > week.start_seconds]
        if failures:
            raise ExporterError(f"nothing could be read of {week.label}: {failures[0].what}: {failures[0].reason}")
        why = "; ".join(ledger.notes) or "do Prometheus or the store reach back so far, and are the rules loaded?"
        raise ExporterError(f"there is no ledger of {week.label}: {why}")
    notes: list[str] = []
    recommendations = await _recommendations(source, client, week, cluster_label, notes)
    states = await _budgets(source, budgets, now_seconds, notes)
    around = Around(
        recommendations=recommendations, budgets=states, title=title, external_url=external_url, notes=tuple(notes)
    )
    return make_digest(ledger, week, around)


async def _recommendations(
    source: LedgerSource, client: Asks | None, week: Window, cluster_label: str, notes: list[str]
) -> tuple[Recommendation, ...] | None:
    if client is None:
        notes.append("Recommendations need --prometheus: the store does not keep how devices were used.")
        return None
    try:
        found = await read(client, source, week, cluster_label=cluster_label)
    except PrometheusError as error:
        notes.append(f"Recommendations could not be read: {error}")
        return None
    if not found.uses:
        notes.append(
            "There is no evidence for recommendations: load the group gpu-evidence of rules/prometheus-rules.yaml."
        )
        return None
    return found.recommendations


async def _budgets(
    source: LedgerSource, budgets: Sequence[Budget], now_seconds: float, notes: list[str]
) -> tuple[BudgetState, ...]:
    try:
        return await standings(budgets, source, now_seconds)
    except PrometheusError as error:
        notes.append(f"Budgets could not be read: {error}")
        return ()

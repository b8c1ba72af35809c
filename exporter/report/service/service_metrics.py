"""The service's own /metrics: budgets as the rules read them, the month's money, and how well the service is."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import exporter
from exporter.exposition import text
from exporter.exposition.builder import PageBuilder
from exporter.exposition.family import NO_LABELS, Family, Labels, labels
from exporter.exposition.process import ProcessMetrics
from exporter.report.budget.values import BudgetState
from exporter.report.service import metrics_catalog as catalog
from exporter.report.service.book import Freshness, MonthMoney


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """What the page is made of; what is ``None`` is not known, and absent from it."""

    freshness: Freshness
    budgets: Sequence[BudgetState] = ()
    months: Sequence[MonthMoney] = ()
    days_closed: int | None = None
    """``None`` without a store."""
    days_not_closed: int | None = None
    """Of the last closing."""
    last_read_seconds: float | None = None
    coverage_ratio: float | None = None
    read_errors: Mapping[str, int] = field(default_factory=dict)
    """By reason, since the start."""


def families(figures: ServiceFigures) -> list[Family]:
    """Everything that the page says but for the process; a pure function."""
    page = PageBuilder()
    page.declare_all(catalog.OWN)
    for state in figures.budgets:
        _budget(page, state)
    for month in figures.months:
        of = labels(("currency", month.currency))
        page.metric(catalog.MONTH_TO_DATE, of, month.spent)
        page.metric(catalog.MONTH_FORECAST, of, month.forecast)
        page.metric(catalog.LAST_MONTH, of, month.last_month)
    _itself(page, figures)
    return page.families()


def render(figures: ServiceFigures, accept: str, process: ProcessMetrics | None = None) -> tuple[bytes, str]:
    """The body of the page and its content type, by the client's Accept header."""
    openmetrics = text.negotiate(accept)
    shown = [*families(figures), *(process.families() if process is not None else ())]
    return text.render(shown, openmetrics=openmetrics), text.OPENMETRICS if openmetrics else text.PLAIN


def _budget(page: PageBuilder, state: BudgetState) -> None:
    of = _budget_labels(state)
    page.metric(catalog.BUDGET_LIMIT, of, state.budget.amount)
    page.metric(catalog.BUDGET_START, of, state.period.start_seconds)
    page.metric(catalog.BUDGET_END, of, state.period.end_seconds)
    if state.known:
        page.metric(catalog.BUDGET_SPENT, of, state.spent)
        page.metric(catalog.BUDGET_PROJECTED, of, state.projected)
        page.metric(catalog.BUDGET_UNPRICED, of, state.unpriced_seconds)


def _budget_labels(state: BudgetState) -> Labels:
    budget = state.budget
    return labels(
        ("budget", budget.name),
        ("period", budget.period),
        ("currency", budget.currency),
        ("cluster", budget.owner.get("cluster")),
        ("team", budget.owner.get("team")),
        ("workload_namespace", budget.owner.get("namespace")),
    )


def _itself(page: PageBuilder, figures: ServiceFigures) -> None:
    freshness = figures.freshness
    version = labels(("version", exporter.__version__), ("python", platform.python_version()))
    page.metric(catalog.BUILD_INFO, version, 1)
    page.metric(catalog.SIMULATED, NO_LABELS, int(freshness.simulated))
    for reason, count in sorted(figures.read_errors.items()):
        page.metric(catalog.READ_ERRORS_TOTAL, labels(("reason", reason)), count)
    page.metric(catalog.LAST_READ, NO_LABELS, figures.last_read_seconds)
    page.metric(catalog.READ_UNTIL, NO_LABELS, freshness.read_until_seconds)
    page.metric(catalog.COVERAGE, NO_LABELS, figures.coverage_ratio)
    page.metric(catalog.DAYS_CLOSED, NO_LABELS, figures.days_closed)
    page.metric(catalog.CLOSED_UNTIL, NO_LABELS, freshness.closed_until_seconds)
    page.metric(catalog.DAYS_NOT_CLOSED, NO_LABELS, figures.days_not_closed)

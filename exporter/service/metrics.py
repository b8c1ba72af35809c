"""The service's own /metrics: budgets as the rules read them, the month's money, and how well the service is."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import exporter
from exporter.cost.budgets import BudgetState
from exporter.metrics import catalog, text_format
from exporter.metrics.process import ProcessMetrics
from exporter.metrics.text_format import NO_LABELS, Family, Labels, Metric, PageBuilder, labels
from exporter.metrics.text_format import plain as _own
from exporter.service.data import Freshness, Month

BUDGET_LABELS = ("budget", "period", "currency", "cluster", "team", "workload_namespace")
"""Its name, its period's kind, and what it is for: the last three are absent where it is not for one of these."""

BUDGET_LIMIT = _own("gpu_budget_limit", *BUDGET_LABELS).meaning(
    "Money that the budget's period may cost, in its currency."
)
BUDGET_SPENT = _own("gpu_budget_spent", *BUDGET_LABELS).meaning(
    "Money of the budget's period until the last recorded hour; it begins again with the period. Absent where a part "
    "of the period could not be read, or its money is in other currencies."
)
BUDGET_PROJECTED = _own("gpu_budget_projected", *BUDGET_LABELS).meaning(
    "Money of the budget's whole period, if the rest of it costs what the last complete days did. Absent until one day "
    "is known."
)
BUDGET_START = _own("gpu_budget_period_start_timestamp_seconds", *BUDGET_LABELS).meaning(
    "Unix time at which the budget's period began."
)
BUDGET_END = _own("gpu_budget_period_end_timestamp_seconds", *BUDGET_LABELS).meaning(
    "Unix time at which the budget's period ends."
)
BUDGET_UNPRICED = _own("gpu_budget_unpriced_seconds", *BUDGET_LABELS).meaning(
    "GPU-seconds of the budget's period without a price: what was spent is too low while there are any."
)
MONTH_TO_DATE = _own("gpu_cost_month_to_date", "currency").meaning(
    "Money of this month (UTC) until the last recorded hour: held, Unallocated and Unattributed."
)
MONTH_FORECAST = _own("gpu_cost_month_forecast", "currency").meaning(
    "Money that the whole month will have cost. Absent until one day is known."
)
LAST_MONTH = _own("gpu_cost_last_month", "currency").meaning(
    "Money of the whole month before. Absent where not all of it is known."
)
BUILD_INFO = _own("gpu_cost_service_build_info", "version", "python").meaning(
    "Version of this service and of its Python; always 1."
)
SIMULATED = _own("gpu_cost_service_simulated").meaning("1 where some of what is shown is of simulated nodes, else 0.")
READ_ERRORS_TOTAL = _own("gpu_cost_service_read_errors_total", "reason").meaning(
    "What went wrong since the start while Prometheus, the store or the web configuration was read, by reason."
)
LAST_READ = _own("gpu_cost_service_last_read_timestamp_seconds").meaning(
    "Unix time of the last reading of which everything was answered."
)
READ_UNTIL = _own("gpu_cost_service_read_until_timestamp_seconds").meaning(
    "Unix time of the end of the newest hour that is shown."
)
COVERAGE = _own("gpu_cost_service_coverage_ratio").meaning(
    "Part of the hours of this month, so far, for which the ledger was recorded, 0-1."
)
DAYS_CLOSED = _own("gpu_cost_service_days_closed").meaning("Days in the store. Absent without a store.")
CLOSED_UNTIL = _own("gpu_cost_service_closed_until_timestamp_seconds").meaning(
    "Unix time of the end of the newest closed day. Absent without a store, and while it is empty."
)
DAYS_NOT_CLOSED = _own("gpu_cost_service_days_not_closed").meaning(
    "Days that are over and due, and could not be closed: read the log, or: gpu-cost-exporter store list. Those of "
    "which hours may still come, and those without any, are not counted."
)

OWN: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""In the order above, which is the order on the page."""
ALL: tuple[Metric, ...] = (*OWN, *catalog.PROCESS)
"""With those of the process, which are the agent's, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFigures:
    """What the page is made of; what is ``None`` is not known, and absent from it."""

    freshness: Freshness
    budgets: Sequence[BudgetState] = ()
    months: Sequence[Month] = ()
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
    page.declare_all(OWN)
    for state in figures.budgets:
        _budget(page, state)
    for month in figures.months:
        of = labels(("currency", month.currency))
        page.metric(MONTH_TO_DATE, of, month.spent)
        page.metric(MONTH_FORECAST, of, month.forecast)
        page.metric(LAST_MONTH, of, month.last_month)
    _itself(page, figures)
    return page.families()


def render(figures: ServiceFigures, accept: str, process: ProcessMetrics | None = None) -> tuple[bytes, str]:
    """The body of the page and its content type, by the client's Accept header."""
    openmetrics = text_format.negotiate(accept)
    shown = [*families(figures), *(process.families() if process is not None else ())]
    return text_format.render(
        shown, openmetrics=openmetrics
    ), text_format.OPENMETRICS if openmetrics else text_format.PLAIN


def _budget(page: PageBuilder, state: BudgetState) -> None:
    of = _budget_labels(state)
    page.metric(BUDGET_LIMIT, of, state.budget.amount)
    page.metric(BUDGET_START, of, state.period.start_seconds)
    page.metric(BUDGET_END, of, state.period.end_seconds)
    if state.known:
        page.metric(BUDGET_SPENT, of, state.spent)
        page.metric(BUDGET_PROJECTED, of, state.projected)
        page.metric(BUDGET_UNPRICED, of, state.unpriced_seconds)


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
    page.metric(BUILD_INFO, version, 1)
    page.metric(SIMULATED, NO_LABELS, int(freshness.simulated))
    for reason, count in sorted(figures.read_errors.items()):
        page.metric(READ_ERRORS_TOTAL, labels(("reason", reason)), count)
    page.metric(LAST_READ, NO_LABELS, figures.last_read_seconds)
    page.metric(READ_UNTIL, NO_LABELS, freshness.read_until_seconds)
    page.metric(COVERAGE, NO_LABELS, figures.coverage_ratio)
    page.metric(DAYS_CLOSED, NO_LABELS, figures.days_closed)
    page.metric(CLOSED_UNTIL, NO_LABELS, freshness.closed_until_seconds)
    page.metric(DAYS_NOT_CLOSED, NO_LABELS, figures.days_not_closed)

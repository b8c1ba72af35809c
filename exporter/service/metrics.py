"""Renders the service's /metrics: budgets for the rules, this month's money, and the state of the service."""

import platform

import exporter
from exporter.cost.budgets import BudgetState
from exporter.metrics import catalog, text_format
from exporter.metrics.collector import ProcessMetrics
from exporter.metrics.text_format import NO_LABELS, Family, Metric, PageBuilder, labels
from exporter.metrics.text_format import plain as _own
from exporter.service.fleet import Fleet
from exporter.web.responses import Body

BUDGET_LABELS = ("budget", "period", "currency", "cluster", "team", "workload_namespace")
"""Name, kind of period, currency and owner of a budget; each of the last three is absent if the owner lacks it."""

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
    "GPU-seconds of the budget's period without a price; gpu_budget_spent is too low if there are any."
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
SIMULATED = _own("gpu_cost_service_simulated").meaning("1 if some of the data are of simulated nodes, else 0.")
READ_ERRORS_TOTAL = _own("gpu_cost_service_read_errors_total", "reason").meaning(
    "Errors in reading Prometheus, the store or the web configuration since the start, by reason."
)
LAST_READ = _own("gpu_cost_service_last_read_timestamp_seconds").meaning(
    "Unix time of the last reading without errors."
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
    "Days that are over and due, and could not be closed: read the log, or: gpu-cost-exporter store list. Days "
    "without recorded hours, and days whose hours may still be recorded, do not count."
)

OWN: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Metrics of the service, in the order of the page."""
ALL: tuple[Metric, ...] = (*OWN, *catalog.PROCESS)
"""Metrics of the service and of its process; the latter have the names of the agent's."""


def families(fleet: Fleet) -> list[Family]:
    """Return all families of the page except those of the process; an unknown value is absent."""
    freshness, keeping, this_month = fleet.freshness(), fleet.keeping, fleet.known_month()
    page = PageBuilder(OWN)
    for state in fleet.budgets.value:
        _budget(page, state)
    for month in this_month.money if this_month else ():
        of = labels(("currency", month.currency))
        page.metric(MONTH_TO_DATE, of, month.spent)
        page.metric(MONTH_FORECAST, of, month.forecast)
        page.metric(LAST_MONTH, of, month.last_month)
    version = labels(("version", exporter.__version__), ("python", platform.python_version()))
    page.metric(BUILD_INFO, version, 1)
    page.metric(SIMULATED, NO_LABELS, int(freshness.simulated))
    for reason, count in sorted(fleet.errors.items()):
        page.metric(READ_ERRORS_TOTAL, labels(("reason", reason)), count)
    page.metric(LAST_READ, NO_LABELS, fleet.last_read_seconds)
    page.metric(READ_UNTIL, NO_LABELS, freshness.read_until_seconds)
    page.metric(COVERAGE, NO_LABELS, this_month.coverage if this_month else None)
    page.metric(DAYS_CLOSED, NO_LABELS, None if keeping.path is None else len(keeping.days))
    page.metric(CLOSED_UNTIL, NO_LABELS, freshness.closed_until_seconds)
    page.metric(DAYS_NOT_CLOSED, NO_LABELS, keeping.not_closed)
    return page.families()


def render(fleet: Fleet, accept: str, process: ProcessMetrics | None = None) -> Body:
    """Return the page in the format of the client's Accept header."""
    openmetrics = text_format.negotiate(accept)
    shown = [*families(fleet), *(process.families() if process is not None else ())]
    page = text_format.render(shown, openmetrics=openmetrics)
    return Body(page, text_format.OPENMETRICS if openmetrics else text_format.PLAIN)


def _budget(page: PageBuilder, state: BudgetState) -> None:
    budget = state.budget
    of = labels(
        ("budget", budget.name),
        ("period", budget.period),
        ("currency", budget.currency),
        ("cluster", budget.owner.get("cluster")),
        ("team", budget.owner.get("team")),
        ("workload_namespace", budget.owner.get("namespace")),
    )
    page.metric(BUDGET_LIMIT, of, budget.amount)
    page.metric(BUDGET_START, of, state.period.start_seconds)
    page.metric(BUDGET_END, of, state.period.end_seconds)
    if state.known:
        page.metric(BUDGET_SPENT, of, state.spent)
        page.metric(BUDGET_PROJECTED, of, state.projected)
        page.metric(BUDGET_UNPRICED, of, state.unpriced_seconds)

"""Every metric of the cost service, one value each; the source of its part of docs/metrics.md."""

from exporter.exposition import catalog
from exporter.exposition.family import Kind
from exporter.exposition.metric import Metric
from exporter.exposition.metric import plain as _own

BUDGET_LABELS = ("budget", "period", "currency", "cluster", "team", "workload_namespace")
"""Its name, its period's kind, and what it is for: the last three are absent where it is not for one of these."""

BUDGET_LIMIT = _own("gpu_budget_limit", "Money that the budget's period may cost, in its currency.", *BUDGET_LABELS)
BUDGET_SPENT = _own(
    "gpu_budget_spent",
    "Money of the budget's period until the last recorded hour; it begins again with the period. Absent where a part "
    "of the period could not be read, or its money is in other currencies.",
    *BUDGET_LABELS,
)
BUDGET_PROJECTED = _own(
    "gpu_budget_projected",
    "Money of the budget's whole period, if the rest of it costs what the last complete days did. Absent until one day "
    "is known.",
    *BUDGET_LABELS,
)
BUDGET_START = _own(
    "gpu_budget_period_start_timestamp_seconds", "Unix time at which the budget's period began.", *BUDGET_LABELS
)
BUDGET_END = _own(
    "gpu_budget_period_end_timestamp_seconds", "Unix time at which the budget's period ends.", *BUDGET_LABELS
)
BUDGET_UNPRICED = _own(
    "gpu_budget_unpriced_seconds",
    "GPU-seconds of the budget's period without a price: what was spent is too low while there are any.",
    *BUDGET_LABELS,
)
MONTH_TO_DATE = _own(
    "gpu_cost_month_to_date",
    "Money of this month (UTC) until the last recorded hour: held, Unallocated and Unattributed.",
    "currency",
)
MONTH_FORECAST = _own(
    "gpu_cost_month_forecast", "Money that the whole month will have cost. Absent until one day is known.", "currency"
)
LAST_MONTH = _own(
    "gpu_cost_last_month", "Money of the whole month before. Absent where not all of it is known.", "currency"
)
BUILD_INFO = _own(
    "gpu_cost_service_build_info", "Version of this service and of its Python; always 1.", "version", "python"
)
SIMULATED = _own("gpu_cost_service_simulated", "1 where some of what is shown is of simulated nodes, else 0.")
READ_ERRORS_TOTAL = _own(
    "gpu_cost_service_read_errors_total",
    "What went wrong since the start while Prometheus, the store or the web configuration was read, by reason.",
    "reason",
    kind=Kind.COUNTER,
)
LAST_READ = _own(
    "gpu_cost_service_last_read_timestamp_seconds", "Unix time of the last reading of which everything was answered."
)
READ_UNTIL = _own(
    "gpu_cost_service_read_until_timestamp_seconds", "Unix time of the end of the newest hour that is shown."
)
COVERAGE = _own(
    "gpu_cost_service_coverage_ratio",
    "Part of the hours of this month, so far, for which the ledger was recorded, 0-1.",
)
DAYS_CLOSED = _own("gpu_cost_service_days_closed", "Days in the store. Absent without a store.")
CLOSED_UNTIL = _own(
    "gpu_cost_service_closed_until_timestamp_seconds",
    "Unix time of the end of the newest closed day. Absent without a store, and while it is empty.",
)
DAYS_NOT_CLOSED = _own(
    "gpu_cost_service_days_not_closed",
    "Days that are over and due, and could not be closed: read the log, or: gpu-cost-exporter store list. Those of "
    "which hours may still come, and those without any, are not counted.",
)

OWN: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""In the order above, which is the order on the page."""
ALL: tuple[Metric, ...] = (*OWN, *catalog.PROCESS)
"""With those of the process, which are the agent's, too."""

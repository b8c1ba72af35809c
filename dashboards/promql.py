"""PromQL that the panels share: labels, filters, and sums over hourly recorded series."""

from typing import NamedTuple

CLUSTER = 'cluster=~"$cluster"'
NODES = f'{CLUSTER},node=~"$node"'
DEVICE = "cluster, node, gpu, uuid, gpu_instance"
"""Labels that identify a GPU or MIG instance, whichever labels Prometheus adds."""
GPU = "cluster, node, gpu, uuid"
HOLDER = f"{DEVICE}, pod_namespace, pod_name, pod_uid, container_name"
WORKLOAD = "cluster, workload_namespace, workload_kind, workload_name, team"
HELD = 'workload_kind!~"Unallocated|Unattributed"'
HELD_IN_CLUSTER = f"{CLUSTER},{HELD}"


SERIES = "quantity, workload_namespace, workload_kind, workload_name, team, cost_labels, model, state, currency"
"""All labels of a workload's hourly series except cluster and those of the recording Prometheus."""


class Window(NamedTuple):
    """A window of recorded hours: range and offset."""

    range: str
    offset: str
    longer: str
    """The range plus the hour before it, if it is constant: a missed hour is part of the next one."""

    def __str__(self) -> str:
        """Return the text that follows a selector."""
        return f"[{self.range}] offset {self.offset}"


# An hour is recorded 5 to 20 minutes after its end: moved by 20 minutes, a range has the hours that lie in it.
RANGE = Window("$__range", "-20m", "$__range")
DAY = Window("1d", "-1d20m", "1d1h")
"""For steps of one day: the day that starts at the step."""
HOUR = Window("1h", "-1h20m", "2h")
"""For steps of one hour: the hour that starts at the step."""


def gained(quantity: str, by: str, window: Window, matchers: str = HELD_IN_CLUSTER) -> str:
    """Return the sum of the hourly series of workloads, from one recorder per cluster.

    Two servers cut hours at different instants: the larger values of both would have a part of a job twice.
    """
    series = f'sum_over_time(workload:gpu_ledger:delta1h{{quantity="{quantity}",{matchers}}}{window})'
    return f"sum by ({by}) ({series} and ignoring ({SERIES}) {_recorder(window)})"


def _recorder(window: Window) -> str:
    """Select the recorder of each cluster with the most recorded hours and GPU-seconds."""
    recorded = f"cluster:gpu_capacity_seconds:delta1h{{{CLUSTER}}}[{window.longer}] offset {window.offset}"
    return f"topk by (cluster) (1, count_over_time({recorded}) * sum_over_time({recorded}))"


STEPS = ("Active", "Profiled", "Effective")
"""Steps of the funnel below allocated. Active time that was not profiled may be effective."""


def steps(quantity: str, by: str, matchers: str) -> tuple[str, ...]:
    """Return a quantity of the range by ``STEPS``, each a part of the one before; absent if it was not measured."""

    def of(states: str) -> str:
        return gained(quantity, by, RANGE, f'{matchers},state=~"{states}"')

    profiled = of("active_(in)?effective")
    return f"{of('active.*')} or 0 * {of('idle')}", profiled, f"{of('active_effective')} or 0 * {profiled}"


def hours_recorded(window: Window) -> str:
    """Return the number of recorded hours of a window by cluster."""
    return f"max by (cluster) (count_over_time(cluster:gpu_capacity_seconds:delta1h{{{CLUSTER}}}{window}))"


def of_one_currency(amount: str, window: Window, unit: float) -> str:
    """Return cost by model and currency per unit (seconds or joules) of an amount by cluster and model.

    Absent for a model with prices in several currencies in one cluster: the amount per currency is unknown.
    """
    cost = gained("cost", "cluster, model, currency", window)
    cost = f"({cost} unless on (cluster, model) count by (cluster, model) ({cost}) > 1)"
    paid = f"sum by (model, currency) ({amount} * on (cluster, model) group_right () ({cost} > bool 0))"
    return f"sum by (model, currency) ({cost}) / ({paid} / {unit:.0f} > 0)"


def of_top(column: str, top: str) -> str:
    """Restrict a column to the workloads of the first column: those of a large fleet are too many to send."""
    return f"({column}) and on ({WORKLOAD}) {top}"

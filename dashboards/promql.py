"""Pieces of PromQL that the panels share: labels, filters, and sums over what is recorded once an hour."""

from typing import NamedTuple

CLUSTER = 'cluster=~"$cluster"'
NODES = f'{CLUSTER},node=~"$node"'
DEVICE = "cluster, node, gpu, uuid, gpu_instance"
"""What a GPU or MIG instance is told by, whichever labels Prometheus adds."""
GPU = "cluster, node, gpu, uuid"
HOLDER = f"{DEVICE}, pod_namespace, pod_name, pod_uid, container_name"
WORKLOAD = "cluster, workload_namespace, workload_kind, workload_name, team"
HELD = 'workload_kind!~"Unallocated|Unattributed"'
HELD_IN_CLUSTER = f"{CLUSTER},{HELD}"


SERIES = "quantity, workload_namespace, workload_kind, workload_name, team, cost_labels, model, state, currency"
"""All labels of a workload's hourly series, but for those of the Prometheus that recorded it and its cluster."""


class Window(NamedTuple):
    """A stretch of recorded hours: a range and how far it is moved."""

    range: str
    offset: str
    longer: str
    """The range and the hour before it, where that can be written: an hour that is missing there is in the next one."""

    def __str__(self) -> str:
        """As it stands behind a selector."""
        return f"[{self.range}] offset {self.offset}"


# An hour is recorded 5 to 20 minutes after its end: moved by 20 minutes, a range has the hours that lie in it.
RANGE = Window("$__range", "-20m", "$__range")
DAY = Window("1d", "-1d20m", "1d1h")
"""Of a step of one day, the day that begins at the step."""
HOUR = Window("1h", "-1h20m", "2h")
"""Of a step of one hour, the hour that begins at the step."""


def gained(quantity: str, by: str, window: Window, matchers: str = HELD_IN_CLUSTER) -> str:
    """What workloads' hourly series add up to, of one recorder for each cluster.

    Two servers cut hours at different instants: the larger values of both would have a part of a job twice.
    """
    series = f'sum_over_time(workload:gpu_ledger:delta1h{{quantity="{quantity}",{matchers}}}{window})'
    return f"sum by ({by}) ({series} and ignoring ({SERIES}) {_recorder(window)})"


def _recorder(window: Window) -> str:
    """By cluster the one that recorded most: hours, and GPU-seconds in them."""
    recorded = f"cluster:gpu_capacity_seconds:delta1h{{{CLUSTER}}}[{window.longer}] offset {window.offset}"
    return f"topk by (cluster) (1, count_over_time({recorded}) * sum_over_time({recorded}))"


STEPS = ("Active", "Profiled", "Effective")
"""The steps of the funnel below what is allocated. What is active and not profiled may be effective or not."""


def steps(quantity: str, by: str, matchers: str) -> tuple[str, ...]:
    """A quantity of the range by ``STEPS``, each a part of the one before; absent where that was not measured."""

    def of(states: str) -> str:
        return gained(quantity, by, RANGE, f'{matchers},state=~"{states}"')

    profiled = of("active_(in)?effective")
    return f"{of('active.*')} or 0 * {of('idle')}", profiled, f"{of('active_effective')} or 0 * {profiled}"


def hours_recorded(window: Window) -> str:
    """How many hours of a window were recorded, by cluster."""
    return f"max by (cluster) (count_over_time(cluster:gpu_capacity_seconds:delta1h{{{CLUSTER}}}{window}))"


def of_one_currency(amount: str, window: Window, unit: float) -> str:
    """Money by model and currency for each unit (seconds or joules) of an amount by cluster and model.

    Where a model was paid in several currencies in one cluster nobody can say what was paid in which: absent.
    """
    cost = gained("cost", "cluster, model, currency", window)
    cost = f"({cost} unless on (cluster, model) count by (cluster, model) ({cost}) > 1)"
    paid = f"sum by (model, currency) ({amount} * on (cluster, model) group_right () ({cost} > bool 0))"
    return f"sum by (model, currency) ({cost}) / ({paid} / {unit:.0f} > 0)"


def of_top(column: str, top: str) -> str:
    """A column of the workloads of a table's first one: all of a large fleet's would be too many to send."""
    return f"({column}) and on ({WORKLOAD}) {top}"

"""Pieces of PromQL that the panels share: labels, filters, and sums over what is recorded once an hour."""

from typing import NamedTuple

CLUSTER = 'cluster=~"$cluster"'
NODES = f'{CLUSTER},node=~"$node"'
DEVICE = "cluster, node, gpu, uuid, gpu_instance"
"""What a GPU or MIG instance is told by, whichever labels Prometheus adds."""
GPU = "cluster, node, gpu, uuid"
HOLDER = f"{DEVICE}, pod_namespace, pod_name, pod_uid, container_name"
WORKLOAD = "cluster, workload_namespace, workload_kind, workload_name, team"
OWNER = f"{WORKLOAD}, node, model, mode"
"""Labels of the hourly ledger, without the currency."""


class Window(NamedTuple):
    """A stretch of hourly samples: a range and how far it is moved."""

    range: str
    offset: str

    def __str__(self) -> str:
        """As it stands behind a selector."""
        return f"[{self.range}] offset {self.offset}"


# A sample is of the hour before it. Ranges of Prometheus up to 2 are closed at both ends: a second less, or moved by a
# second, and no sample is in two of them, nor is that of the hour before the first.
RANGE = Window("$__range", "-1s")
DAY = Window("23h59m59s", "-1d")
"""Of a step of one day, the day that begins at the step."""
HOUR = Window("59m59s", "-1h")
"""Of a step of one hour, the hour that begins at the step."""


def gained(name: str, labels: str, window: Window, matchers: str = CLUSTER) -> str:
    """What an hourly series adds up to; replicas of one Prometheus, which recorded the same, count once."""
    return f"max by ({labels}) (sum_over_time({name}:delta1h{{{matchers}}}{window}))"


def money(window: Window) -> str:
    """All money by cluster and currency: held, Unallocated and Unattributed."""
    held = gained("cluster:gpu_cost", "cluster, currency", window)
    free, unattributed = (
        gained(f"cluster:gpu_{name}_cost", "cluster, currency", window) for name in ("unallocated", "unattributed")
    )
    apart = f'label_replace({free}, "of", "1", "", "") or label_replace({unattributed}, "of", "2", "", "")'
    return f"sum by (cluster, currency) ({held} or {apart})"


def less(whole: str, part: str) -> str:
    """A difference in which a part that is not recorded is nothing."""
    return f"{whole} - ({part} or 0 * {whole})"


def held_money(window: Window) -> tuple[str, str, str]:
    """Money of what is held, by currency: active, idle, unknown.

    Idle money is recorded. The rest is divided by seconds, model by model, as the reports do.
    """
    at = "cluster, model"
    cost = gained("model:gpu_cost", f"{at}, currency", window)
    idle = gained("model:gpu_idle_cost", f"{at}, currency", window)
    unknown = gained("model:gpu_unknown_seconds", at, window)
    active = gained("model:gpu_active_seconds", at, window)
    busy = f"({less(cost, idle)})"
    part = f"({unknown} / ({unknown} + ({active} or 0 * {unknown})))"
    unsure = f"sum by (currency) ({busy} * on ({at}) group_left () {part})"
    return less(f"sum by (currency) {busy}", unsure), f"sum by (currency) ({idle})", f"{unsure} > 0"


def of_one_currency(name: str, window: Window, unit: float) -> str:
    """Money by model and currency for each unit (seconds or joules) of what it was paid for.

    Where a model was paid in several currencies in one cluster nobody can say what was paid in which: absent.
    """
    cost = gained("model:gpu_cost", "cluster, model, currency", window)
    cost = f"({cost} unless on (cluster, model) count by (cluster, model) ({cost}) > 1)"
    amount = gained(f"model:{name}", "cluster, model", window)
    if name == "gpu_allocated_seconds":
        amount = f"({less(amount, gained('model:gpu_unpriced_seconds', 'cluster, model', window))})"
    paid = f"sum by (model, currency) ({amount} * on (cluster, model) group_right () ({cost} > bool 0))"
    return f"sum by (model, currency) ({cost}) / ({paid} / {unit:.0f} > 0)"


def of_top(column: str, top: str) -> str:
    """A column of the workloads of a table's first one: all of a large fleet's would be too many to send."""
    return f"({column}) and on ({WORKLOAD}) {top}"


def price(share: str) -> str:
    """What a number of GPUs costs an hour at prices of now, by currency."""
    now = f"node_gpu:gpu_hourly_price:max{{{CLUSTER}}}"
    return f"sum by (currency) ({share} * on (cluster, node, gpu) group_left (currency) {now})"

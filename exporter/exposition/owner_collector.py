"""The series of what owners hold and use now, of the node's pools, and of shared devices that are idle."""

from collections.abc import Mapping, Sequence

from exporter.exposition import catalog
from exporter.exposition.builder import PageBuilder
from exporter.exposition.family import LabelNames, Labels, plus
from exporter.exposition.metric import WORKLOAD_LABELS, Metric
from exporter.exposition.tenants import shown_until_seconds
from exporter.model import OwnersView, OwnerUse, Snapshot, shown_windows

_WORKLOAD, _POOL = LabelNames(*WORKLOAD_LABELS), LabelNames(*catalog.POOL_LABELS)
_SHARED = LabelNames("node", "gpu", "uuid", "gpu_instance")
_DIGITS = 3
"""Decimals of GPU-seconds over a window; they are interpolated, so that more would be noise."""


def collect(page: PageBuilder, snapshot: Snapshot) -> None:
    """Add the series of owners, pools and shared devices; none where no ledger is shown."""
    view = snapshot.owners
    if view is None:
        return
    _owners(page, view, snapshot.node)
    facts = snapshot.node_facts
    for pool in view.pools:
        carried = _POOL.of(snapshot.node, pool.model, facts.instance_type, facts.capacity_type)
        page.metric(catalog.GPU_POOL_GPUS, carried, pool.gpus)
        page.metric(catalog.GPU_POOL_UNALLOCATED_GPUS, carried, pool.unallocated_gpus)
        for currency, cost in sorted(pool.unallocated_cost_per_hour.items()):
            priced = plus(carried, ("currency", currency))
            page.metric(catalog.GPU_POOL_UNALLOCATED_COST_PER_HOUR, priced, cost)
    for idle in view.shared_idle:
        carried = _SHARED.of(snapshot.node, str(idle.gpu_index), idle.uuid, idle.gpu_instance)
        page.metric(catalog.GPU_SHARED_IDLE_GPUS, carried, idle.gpus)


def _owners(page: PageBuilder, view: OwnersView, node: str) -> None:
    rows = [(_labels(use, node), use) for use in view.owners]
    carried, uses = [one for one, _ in rows], [use for _, use in rows]
    page.column(catalog.GPU_OWNER_GPUS, carried, [use.gpus for use in uses])
    page.column(catalog.GPU_OWNER_ESTIMATED_GPUS, carried, [use.estimated_gpus for use in uses])
    active = [(one, _rounded(_shown(use, use.active_seconds))) for one, use in rows]
    _by(page, catalog.GPU_OWNER_ACTIVE_GPU_SECONDS, "window", active)
    measured = [(one, _rounded(_shown(use, use.measured_seconds))) for one, use in rows]
    _by(page, catalog.GPU_OWNER_MEASURED_GPU_SECONDS, "window", measured)
    page.column(catalog.GPU_OWNER_UNDERUSED_GPUS, carried, [use.underused_gpus for use in uses])
    _by(page, catalog.GPU_OWNER_UNUSED_GPUS, "window", [(one, _shown(use, use.unused_gpus)) for one, use in rows])
    page.column(catalog.GPU_OWNER_ACTIVE_GPUS, carried, [use.active_gpus for use in uses])
    page.column(catalog.GPU_OWNER_IDLE_FOR_SECONDS, carried, [use.idle_for_seconds for use in uses])
    page.column(catalog.GPU_OWNER_AGE_SECONDS, carried, [use.age_seconds for use in uses])
    _by(page, catalog.GPU_OWNER_POLICY, "policy", [(one, {use.policy: 1}) for one, use in rows if use.policy])
    until = [shown_until_seconds(use.opt_out_until_seconds) for use in uses]
    page.column(catalog.GPU_OWNER_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS, carried, until)
    _by(page, catalog.GPU_OWNER_COST_PER_HOUR, "currency", [(one, use.cost_per_hour) for one, use in rows])
    _by(page, catalog.GPU_OWNER_IDLE_COST_PER_HOUR, "currency", [(one, use.idle_cost_per_hour) for one, use in rows])


def _labels(use: OwnerUse, node: str) -> Labels:
    owner = use.owner
    return _WORKLOAD.of(node, owner.namespace, owner.kind, owner.name, owner.team)


def _by(page: PageBuilder, metric: Metric, label: str, rows: Sequence[tuple[Labels, Mapping[str, float]]]) -> None:
    """Add a metric of several values per owner, by one more label."""
    pairs = [(plus(one, (label, name)), value) for one, values in rows for name, value in values.items()]
    page.column(metric, [one for one, _ in pairs], [value for _, value in pairs])


def _shown(use: OwnerUse, by_window: Mapping[str, float]) -> dict[str, float]:
    windows = shown_windows(use.policy)
    return {window: value for window, value in by_window.items() if window in windows}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {window: round(value, _DIGITS) for window, value in seconds.items()}

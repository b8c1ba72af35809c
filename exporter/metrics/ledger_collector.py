"""Collects the series of ledgers and owners."""

from collections.abc import Iterator, Mapping

from exporter.metrics import catalog
from exporter.metrics.catalog import DEVICE_LABELS, OWNER_LABELS, POD_LABELS, WORKLOAD_LABELS, shown_until_seconds
from exporter.metrics.text_format import NO_LABELS, Labels, PageBuilder, Series, labels, named, plus
from exporter.model.attribution import Owner
from exporter.model.ledger import OwnerUse, PodAccount, PoolUse, ShownLedger, Totals, shown_windows
from exporter.model.snapshot import Snapshot

_POD = (*DEVICE_LABELS, *POD_LABELS)

# Part of the seconds that counts as all of them: sums of floats have rounding errors.
_NEARLY_ALL = 1 - 1e-9


def collect_ledger(page: PageBuilder, snapshot: Snapshot) -> None:
    """Add the series of the ledgers; there are none until the first reading is metered.

    The series limit does not apply to owners, because the ledger limits their number.
    """
    if snapshot.devices and snapshot.metering.price_book:
        page.metric(catalog.UNPRICED_DEVICES, NO_LABELS, snapshot.metering.unpriced_gpus)
    ledger = snapshot.metering.ledger
    if ledger is None:
        return
    for pod, totals in ledger.pods.items():
        page.pod([*_pod(pod, totals, snapshot.node)])
    for one in ledger.ledgers:
        page.rows(_ledger(one, snapshot.node))
    page.metric(catalog.CONSERVATION_ERROR_SECONDS, NO_LABELS, ledger.conservation_error_seconds)
    page.metric(catalog.LEDGER_WITHHELD_SECONDS, NO_LABELS, ledger.withheld_seconds)
    page.metric(catalog.STATE_SAVED, NO_LABELS, int(ledger.saved_at_seconds is not None))
    page.metric(catalog.STATE_SAVED_TIMESTAMP_SECONDS, NO_LABELS, ledger.saved_at_seconds)


def energy_joules(totals: Totals) -> float | None:
    """Return the energy of an account; ``None`` if it was never measured, or the account has no seconds."""
    never = totals.energy_unknown_seconds >= totals.seconds.total * _NEARLY_ALL
    return None if never and not totals.energy_joules else totals.energy_joules


def _pod(pod: PodAccount, totals: Totals, node: str) -> Iterator[Series]:
    device = (str(pod.gpu_index), pod.device_uuid, pod.gpu_instance, pod.mig_profile, pod.model)
    carried = named(_POD, node, *device, pod.namespace, pod.pod, pod.container, pod.pod_uid)
    yield catalog.GPU_POD_ALLOCATED_SECONDS_TOTAL, carried, totals.seconds.total
    yield catalog.GPU_POD_ACTIVE_SECONDS_TOTAL, carried, totals.seconds.active
    yield catalog.GPU_POD_IDLE_SECONDS_TOTAL, carried, totals.seconds.idle
    yield catalog.GPU_POD_UNKNOWN_SECONDS_TOTAL, carried, totals.seconds.unknown
    if (joules := energy_joules(totals)) is not None:
        yield catalog.GPU_POD_ENERGY_JOULES_TOTAL, carried, joules
    for currency, money in sorted(totals.money.items()):
        yield catalog.GPU_POD_COST_TOTAL, plus(carried, ("currency", currency)), money.total


def _ledger(ledger: ShownLedger, node: str) -> Iterator[Series]:
    """Yield the series of one ledger; a series begins with its first second, joule or cent."""
    of_ledger = labels(("ledger", ledger.identity))
    yield catalog.GPU_LEDGER_CREATED_TIMESTAMP_SECONDS, plus(of_ledger, ("node", node)), ledger.created_at_seconds
    yield catalog.LEDGER_CAPACITY_SECONDS_TOTAL, of_ledger, ledger.capacity_seconds
    for account, totals in ledger.accounts.items():
        owner = account.owner
        labels_of_owner = (owner.namespace, owner.kind, owner.name, owner.team, owner.cost_labels)
        carried = named(OWNER_LABELS, node, *labels_of_owner, account.model, account.mode, base=of_ledger)
        for state, seconds in totals.seconds:  # without plus: the states of a long ledger would fill its cache
            yield catalog.GPU_LEDGER_SECONDS_TOTAL, Labels(f'{carried},state="{state}"'), seconds or None
        for currency, money in sorted(totals.money.items()):
            priced = plus(carried, ("currency", currency))
            for state, cost in money:
                yield catalog.GPU_LEDGER_COST_TOTAL, Labels(f'{priced},state="{state}"'), cost or None
        yield catalog.GPU_LEDGER_ENERGY_JOULES_TOTAL, carried, energy_joules(totals)
        yield catalog.GPU_LEDGER_UNPRICED_SECONDS_TOTAL, carried, totals.unpriced_seconds or None


_DIGITS = 3
"""Decimals of GPU-seconds over a window; they are interpolated, so further decimals are noise."""


def collect_owners(page: PageBuilder, snapshot: Snapshot) -> None:
    """Add the series of owners, pools and shared devices, if a ledger is shown."""
    view, node = snapshot.metering.owners, snapshot.node
    if view is None:
        return
    for use in view.owners:
        page.rows(_owner(use, _workload(use.owner, node)))
    for owner, gpus in view.broken_gpus.items():
        page.metric(catalog.GPU_OWNER_BROKEN_GPUS, _workload(owner, node), gpus)
    for xid in view.xids:
        device = (("gpu", str(xid.gpu_index)), ("uuid", xid.device_uuid))
        pod = (("pod_namespace", xid.namespace), ("pod_name", xid.pod))
        carried = plus(_workload(xid.owner, node), *device, *pod, ("xid", str(xid.xid)))
        page.metric(catalog.GPU_OWNER_XID_LAST_SEEN_TIMESTAMP_SECONDS, carried, xid.at_seconds)
    for pool in view.pools:
        page.rows(_pool(pool, snapshot))
    for idle in view.shared_idle:
        place = (("gpu", str(idle.gpu_index)), ("uuid", idle.uuid), ("gpu_instance", idle.gpu_instance))
        page.metric(catalog.GPU_SHARED_IDLE_GPUS, labels(("node", node), *place), idle.gpus)


def _workload(owner: Owner, node: str) -> Labels:
    return named(WORKLOAD_LABELS, node, owner.namespace, owner.kind, owner.name, owner.team)


def _owner(use: OwnerUse, carried: Labels) -> Iterator[Series]:
    yield catalog.GPU_OWNER_GPUS, carried, use.gpus
    yield catalog.GPU_OWNER_ESTIMATED_GPUS, carried, use.estimated_gpus
    yield catalog.GPU_OWNER_UNDERUSED_GPUS, carried, use.underused_gpus
    yield catalog.GPU_OWNER_ACTIVE_GPUS, carried, use.active_gpus
    yield catalog.GPU_OWNER_IDLE_FOR_SECONDS, carried, use.idle_for_seconds
    yield catalog.GPU_OWNER_AGE_SECONDS, carried, use.age_seconds
    until = shown_until_seconds(use.opt_out_until_seconds)
    yield catalog.GPU_OWNER_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS, carried, until
    for metric, figures in (
        (catalog.GPU_OWNER_ACTIVE_GPU_SECONDS, _rounded(_shown(use, use.active_seconds))),
        (catalog.GPU_OWNER_MEASURED_GPU_SECONDS, _rounded(_shown(use, use.measured_seconds))),
        (catalog.GPU_OWNER_PROFILED_GPU_SECONDS, _rounded(_shown(use, use.profiled_seconds))),
        (catalog.GPU_OWNER_EFFECTIVE_GPU_SECONDS, _rounded(_shown(use, use.effective_seconds))),
        (catalog.GPU_OWNER_UNUSED_GPUS, _shown(use, use.unused_gpus)),
        (catalog.GPU_OWNER_POLICY, {use.policy: 1} if use.policy else {}),
        (catalog.GPU_OWNER_COST_PER_HOUR, use.cost_per_hour),
        (catalog.GPU_OWNER_IDLE_COST_PER_HOUR, use.idle_cost_per_hour),
    ):
        for label, figure in figures.items():
            yield metric, plus(carried, (metric.labels[-1], label)), figure
    for metric, by_resource in (
        (catalog.GPU_OWNER_BOTTLENECK_GPU_SECONDS, use.bottleneck_seconds),
        (catalog.GPU_OWNER_RESOURCE_USE_GPU_SECONDS, use.resource_use_seconds),
    ):
        for resource, seconds in _rounded(by_resource).items():
            yield metric, plus(carried, ("window", "1h"), ("resource", resource)), seconds


def _shown(use: OwnerUse, by_window: Mapping[str, float]) -> dict[str, float]:
    windows = shown_windows(use.policy)
    return {window: value for window, value in by_window.items() if window in windows}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, _DIGITS) for name, value in seconds.items()}


def _pool(pool: PoolUse, snapshot: Snapshot) -> Iterator[Series]:
    facts = snapshot.metering.node_facts
    carried = named(catalog.POOL_LABELS, snapshot.node, pool.model, facts.instance_type, facts.capacity_type)
    yield catalog.GPU_POOL_GPUS, carried, pool.gpus
    yield catalog.GPU_POOL_UNALLOCATED_GPUS, carried, pool.unallocated_gpus
    for currency, cost in sorted(pool.unallocated_cost_per_hour.items()):
        yield catalog.GPU_POOL_UNALLOCATED_COST_PER_HOUR, plus(carried, ("currency", currency)), cost
    if snapshot.metering.price_book:
        yield catalog.GPU_POOL_UNPRICED_GPUS, carried, pool.unpriced_gpus

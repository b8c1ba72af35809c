"""Collects the series of ledgers and owners."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from exporter.metrics import catalog
from exporter.metrics.catalog import DEVICE_LABELS, OWNER_LABELS, POD_LABELS, WORKLOAD_LABELS, shown_until_seconds
from exporter.metrics.text_format import NO_LABELS, LabelNames, Labels, Metric, PageBuilder, labels, plus
from exporter.model import (
    Account,
    ByState,
    LedgerView,
    Owner,
    OwnersView,
    OwnerUse,
    PodAccount,
    ShownLedger,
    Snapshot,
    Totals,
    shown_windows,
)

_POD = LabelNames(*DEVICE_LABELS, *POD_LABELS)
_OWNER = LabelNames("ledger", *OWNER_LABELS)
_STATE = LabelNames("state")

_POD_SECONDS: tuple[tuple[Metric, Callable[[Totals], float]], ...] = (
    (catalog.GPU_POD_ALLOCATED_SECONDS_TOTAL, attrgetter("seconds.total")),
    (catalog.GPU_POD_ACTIVE_SECONDS_TOTAL, attrgetter("seconds.active")),
    (catalog.GPU_POD_IDLE_SECONDS_TOTAL, attrgetter("seconds.idle")),
    (catalog.GPU_POD_UNKNOWN_SECONDS_TOTAL, attrgetter("seconds.unknown")),
)

# Seconds are sums of floats, so "all" allows for rounding.
_NEARLY_ALL = 1 - 1e-9


def collect_ledger(page: PageBuilder, snapshot: Snapshot, *, series_limit: int) -> None:
    """Add the ledger's series; before the first reading was metered there are none.

    A pod that does not fit ``series_limit`` is left out whole and counted. Owners always fit: the ledger bounds them.
    """
    if snapshot.devices and snapshot.metering.price_book:
        page.metric(catalog.UNPRICED_DEVICES, NO_LABELS, snapshot.metering.unpriced_gpus)
    ledger = snapshot.metering.ledger
    if ledger is None:
        return
    _pods(page, ledger, snapshot.node, series_limit)
    for one in ledger.ledgers:
        _owners(page, one, snapshot.node)
    _itself(page, ledger)


def energy_joules(totals: Totals) -> float | None:
    """Return the energy of an account; ``None`` if it was never measured, as in an account without seconds."""
    never = totals.energy_unknown_seconds >= totals.seconds.total * _NEARLY_ALL
    return None if never and not totals.energy_joules else totals.energy_joules


def _pods(page: PageBuilder, ledger: LedgerView, node: str, room: int) -> None:
    carried, shown, joules = [], [], []
    for pod, totals in ledger.pods.items():
        energy = energy_joules(totals)
        count = len(_POD_SECONDS) + (energy is not None) + len(totals.money)
        if count > room:
            page.dropped_series += count
            continue
        room -= count
        carried.append(_pod_labels(pod, node))
        shown.append(totals)
        joules.append(energy)
    for metric, value_of in _POD_SECONDS:
        page.column(metric, carried, [*map(value_of, shown)])
    page.column(catalog.GPU_POD_ENERGY_JOULES_TOTAL, carried, joules)
    priced, money = _money(carried, shown)
    page.column(catalog.GPU_POD_COST_TOTAL, priced, [one.total for one in money])


def _owners(page: PageBuilder, ledger: ShownLedger, node: str) -> None:
    """Add the series of one ledger; a series exists from its first second, joule or cent on."""
    of_ledger = labels(("ledger", ledger.identity), ("node", node))
    page.metric(catalog.GPU_LEDGER_CREATED_TIMESTAMP_SECONDS, of_ledger, ledger.created_at_seconds)
    page.metric(catalog.LEDGER_CAPACITY_SECONDS_TOTAL, labels(("ledger", ledger.identity)), ledger.capacity_seconds)
    carried = [_owner_labels(account, ledger.identity, node) for account in ledger.accounts]
    shown = [*ledger.accounts.values()]
    priced, money = _money(carried, shown)
    _by_state(page, catalog.GPU_LEDGER_SECONDS_TOTAL, carried, [totals.seconds for totals in shown])
    _by_state(page, catalog.GPU_LEDGER_COST_TOTAL, priced, money)
    page.column(catalog.GPU_LEDGER_ENERGY_JOULES_TOTAL, carried, [*map(energy_joules, shown)])
    page.column(
        catalog.GPU_LEDGER_UNPRICED_SECONDS_TOTAL, carried, [totals.unpriced_seconds or None for totals in shown]
    )


def _by_state(page: PageBuilder, metric: Metric, carried: Iterable[Labels], figures: Iterable[ByState]) -> None:
    there = [
        (_STATE.behind(one, state), value)
        for one, by_state in zip(carried, figures, strict=True)
        for state, value in by_state
        if value
    ]
    page.column(metric, [one for one, _ in there], [value for _, value in there])


def _money(carried: list[Labels], shown: list[Totals]) -> tuple[list[Labels], list[ByState]]:
    """Return label sets and money by state, one of each per account and currency."""
    priced, money = [], []
    for one, totals in zip(carried, shown, strict=True):
        for currency in sorted(totals.money):
            priced.append(plus(one, ("currency", currency)))
            money.append(totals.money[currency])
    return priced, money


def _pod_labels(pod: PodAccount, node: str) -> Labels:
    device = (str(pod.gpu_index), pod.device_uuid, pod.gpu_instance, pod.mig_profile, pod.model)
    return _POD.of(node, *device, pod.namespace, pod.pod, pod.container, pod.pod_uid)


def _owner_labels(account: Account, ledger: str, node: str) -> Labels:
    owner = account.owner
    labels_of_owner = (owner.namespace, owner.kind, owner.name, owner.team, owner.cost_labels)
    return _OWNER.of(ledger, node, *labels_of_owner, account.model, account.mode)


def _itself(page: PageBuilder, ledger: LedgerView) -> None:
    page.metric(catalog.CONSERVATION_ERROR_SECONDS, NO_LABELS, ledger.conservation_error_seconds)
    page.metric(catalog.LEDGER_WITHHELD_SECONDS, NO_LABELS, ledger.withheld_seconds)
    page.metric(catalog.STATE_SAVED, NO_LABELS, int(ledger.saved_at_seconds is not None))
    page.metric(catalog.STATE_SAVED_TIMESTAMP_SECONDS, NO_LABELS, ledger.saved_at_seconds)


_WORKLOAD, _POOL = LabelNames(*WORKLOAD_LABELS), LabelNames(*catalog.POOL_LABELS)
_SHARED = LabelNames("node", "gpu", "uuid", "gpu_instance")
_DIGITS = 3
"""Decimals of GPU-seconds over a window, which are interpolated: more would be noise."""


def collect_owners(page: PageBuilder, snapshot: Snapshot) -> None:
    """Add the series of owners, pools and shared devices, if a ledger is shown."""
    view, facts = snapshot.metering.owners, snapshot.metering.node_facts
    if view is None:
        return
    _owner_series(page, view, snapshot.node)
    _faults(page, view, snapshot.node)
    for pool in view.pools:
        carried = _POOL.of(snapshot.node, pool.model, facts.instance_type, facts.capacity_type)
        page.metric(catalog.GPU_POOL_GPUS, carried, pool.gpus)
        page.metric(catalog.GPU_POOL_UNALLOCATED_GPUS, carried, pool.unallocated_gpus)
        for currency, cost in sorted(pool.unallocated_cost_per_hour.items()):
            priced = plus(carried, ("currency", currency))
            page.metric(catalog.GPU_POOL_UNALLOCATED_COST_PER_HOUR, priced, cost)
        if snapshot.metering.price_book:
            page.metric(catalog.GPU_POOL_UNPRICED_GPUS, carried, pool.unpriced_gpus)
    for idle in view.shared_idle:
        carried = _SHARED.of(snapshot.node, str(idle.gpu_index), idle.uuid, idle.gpu_instance)
        page.metric(catalog.GPU_SHARED_IDLE_GPUS, carried, idle.gpus)


_OWNER_COLUMNS: tuple[tuple[Metric, Callable[[OwnerUse], float | None]], ...] = (
    (catalog.GPU_OWNER_GPUS, attrgetter("gpus")),
    (catalog.GPU_OWNER_ESTIMATED_GPUS, attrgetter("estimated_gpus")),
    (catalog.GPU_OWNER_UNDERUSED_GPUS, attrgetter("underused_gpus")),
    (catalog.GPU_OWNER_ACTIVE_GPUS, attrgetter("active_gpus")),
    (catalog.GPU_OWNER_IDLE_FOR_SECONDS, attrgetter("idle_for_seconds")),
    (catalog.GPU_OWNER_AGE_SECONDS, attrgetter("age_seconds")),
    (
        catalog.GPU_OWNER_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS,
        lambda use: shown_until_seconds(use.opt_out_until_seconds),
    ),
)
_OWNER_PARTS: tuple[tuple[Metric, Callable[[OwnerUse], Mapping[str, float]]], ...] = (
    (catalog.GPU_OWNER_ACTIVE_GPU_SECONDS, lambda use: _rounded(_shown(use, use.active_seconds))),
    (catalog.GPU_OWNER_MEASURED_GPU_SECONDS, lambda use: _rounded(_shown(use, use.measured_seconds))),
    (catalog.GPU_OWNER_PROFILED_GPU_SECONDS, lambda use: _rounded(_shown(use, use.profiled_seconds))),
    (catalog.GPU_OWNER_EFFECTIVE_GPU_SECONDS, lambda use: _rounded(_shown(use, use.effective_seconds))),
    (catalog.GPU_OWNER_UNUSED_GPUS, lambda use: _shown(use, use.unused_gpus)),
    (catalog.GPU_OWNER_POLICY, lambda use: {use.policy: 1} if use.policy else {}),
    (catalog.GPU_OWNER_COST_PER_HOUR, attrgetter("cost_per_hour")),
    (catalog.GPU_OWNER_IDLE_COST_PER_HOUR, attrgetter("idle_cost_per_hour")),
)
"""Values by that of the metric's last label."""


def _owner_series(page: PageBuilder, view: OwnersView, node: str) -> None:
    rows = [(_labels(use.owner, node), use) for use in view.owners]
    carried = [one for one, _ in rows]
    for metric, value_of in _OWNER_COLUMNS:
        page.column(metric, carried, [value_of(use) for _, use in rows])
    for metric, values_of in _OWNER_PARTS:
        label = metric.labels[-1]
        parts = [(plus(one, (label, name)), value) for one, use in rows for name, value in values_of(use).items()]
        page.column(metric, [one for one, _ in parts], [value for _, value in parts])
    for one, use in rows:
        for metric, by_resource in (
            (catalog.GPU_OWNER_BOTTLENECK_GPU_SECONDS, use.bottleneck_seconds),
            (catalog.GPU_OWNER_RESOURCE_USE_GPU_SECONDS, use.resource_use_seconds),
        ):
            for resource, seconds in _rounded(by_resource).items():
                page.metric(metric, plus(one, ("window", "1h"), ("resource", resource)), seconds)


def _faults(page: PageBuilder, view: OwnersView, node: str) -> None:
    for owner, gpus in view.broken_gpus.items():
        page.metric(catalog.GPU_OWNER_BROKEN_GPUS, _labels(owner, node), gpus)
    for xid in view.xids:
        device = (("gpu", str(xid.gpu_index)), ("uuid", xid.device_uuid))
        pod = (("pod_namespace", xid.namespace), ("pod_name", xid.pod))
        carried = plus(_labels(xid.owner, node), *device, *pod, ("xid", str(xid.xid)))
        page.metric(catalog.GPU_OWNER_XID_LAST_SEEN_TIMESTAMP_SECONDS, carried, xid.at_seconds)


def _labels(owner: Owner, node: str) -> Labels:
    return _WORKLOAD.of(node, owner.namespace, owner.kind, owner.name, owner.team)


def _shown(use: OwnerUse, by_window: Mapping[str, float]) -> dict[str, float]:
    windows = shown_windows(use.policy)
    return {window: value for window, value in by_window.items() if window in windows}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {window: round(value, _DIGITS) for window, value in seconds.items()}

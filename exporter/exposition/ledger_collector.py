"""The series of the ledger: seconds, joules and money per pod and per owner, and whether they add up."""

from collections.abc import Iterator

from exporter.exposition import catalog
from exporter.exposition.builder import PageBuilder
from exporter.exposition.family import NO_LABELS, Labels, labels, plus
from exporter.exposition.metric import Metric
from exporter.model import OTHER, Account, LedgerView, PodAccount, Snapshot, Totals

_Row = tuple[Metric, Labels, float]
# As good as all: seconds are sums of floats.
_NEARLY_ALL = 1 - 1e-9


def collect(page: PageBuilder, snapshot: Snapshot, *, series_limit: int) -> None:
    """Add the ledger's series; before the first reading was metered there are none.

    A pod that does not fit ``series_limit`` is left out whole and counted. Owners always fit: the ledger bounds them.
    """
    if snapshot.devices and snapshot.price_book:
        page.metric(catalog.UNPRICED_DEVICES, NO_LABELS, snapshot.unpriced_gpus)
    ledger = snapshot.ledger
    if ledger is None:
        return
    room = series_limit
    for pod, totals in ledger.pods.items():
        rows = list(_pod(_pod_labels(pod, snapshot.node), totals))
        if len(rows) > room:
            page.dropped_series += len(rows)
            continue
        room -= len(rows)
        page.rows(rows)
    for account, totals in ledger.accounts.items():
        if account.owner == OTHER:
            # Prometheus has had these seconds under the owners that were folded; here they would be counted again.
            continue
        page.rows(_owner(_owner_labels(account, snapshot.node), totals))
    _itself(page, ledger)


def energy_joules(totals: Totals) -> float | None:
    """The energy of an account, ``None`` where it was never measured."""
    unmeasured = totals.energy_unknown_seconds
    never = unmeasured > 0 and unmeasured >= totals.allocated_seconds * _NEARLY_ALL
    return None if never and not totals.energy_joules else totals.energy_joules


def _pod_labels(pod: PodAccount, node: str) -> Labels:
    return labels(
        ("node", node),
        ("gpu", str(pod.gpu_index)),
        ("uuid", pod.device_uuid),
        ("gpu_instance", pod.gpu_instance),
        ("mig_profile", pod.mig_profile),
        ("model", pod.model),
        ("pod_namespace", pod.namespace),
        ("pod_name", pod.pod),
        ("container_name", pod.container),
        ("pod_uid", pod.pod_uid),
    )


def _owner_labels(account: Account, node: str) -> Labels:
    owner = account.owner
    return labels(
        ("node", node),
        ("workload_namespace", owner.namespace),
        ("workload_kind", owner.kind),
        ("workload_name", owner.name),
        ("team", owner.team),
        ("model", account.model),
        ("mode", account.mode),
    )


def _pod(carried: Labels, totals: Totals) -> Iterator[_Row]:
    yield catalog.GPU_POD_ALLOCATED_SECONDS_TOTAL, carried, totals.allocated_seconds
    yield catalog.GPU_POD_ACTIVE_SECONDS_TOTAL, carried, totals.active_seconds
    yield catalog.GPU_POD_IDLE_SECONDS_TOTAL, carried, totals.idle_seconds
    yield catalog.GPU_POD_UNKNOWN_SECONDS_TOTAL, carried, totals.unknown_seconds
    joules = energy_joules(totals)
    if joules is not None:
        yield catalog.GPU_POD_ENERGY_JOULES_TOTAL, carried, joules
    for currency, money in sorted(totals.money.items()):
        yield catalog.GPU_POD_COST_TOTAL, plus(carried, ("currency", currency)), money.total


def _owner(carried: Labels, totals: Totals) -> Iterator[_Row]:
    yield catalog.GPU_LEDGER_ALLOCATED_SECONDS_TOTAL, carried, totals.allocated_seconds
    yield catalog.GPU_LEDGER_ACTIVE_SECONDS_TOTAL, carried, totals.active_seconds
    yield catalog.GPU_LEDGER_IDLE_SECONDS_TOTAL, carried, totals.idle_seconds
    yield catalog.GPU_LEDGER_UNKNOWN_SECONDS_TOTAL, carried, totals.unknown_seconds
    yield catalog.GPU_LEDGER_UNPRICED_SECONDS_TOTAL, carried, totals.unpriced_seconds
    joules = energy_joules(totals)
    if joules is not None:
        yield catalog.GPU_LEDGER_ENERGY_JOULES_TOTAL, carried, joules
    for currency, money in sorted(totals.money.items()):
        priced = plus(carried, ("currency", currency))
        yield catalog.GPU_LEDGER_COST_TOTAL, priced, money.total
        yield catalog.GPU_LEDGER_IDLE_COST_TOTAL, priced, money.idle


def _itself(page: PageBuilder, ledger: LedgerView) -> None:
    page.metric(catalog.CONSERVATION_ERROR_SECONDS, NO_LABELS, ledger.conservation_error_seconds)
    page.metric(catalog.LEDGER_CAPACITY_SECONDS_TOTAL, NO_LABELS, ledger.capacity_seconds)
    folded = sum(totals.allocated_seconds for account, totals in ledger.accounts.items() if account.owner == OTHER)
    page.metric(catalog.LEDGER_WITHHELD_SECONDS, NO_LABELS, ledger.withheld_seconds + folded)
    page.metric(catalog.LEDGER_START_TIMESTAMP_SECONDS, NO_LABELS, ledger.started_at_seconds)
    page.metric(catalog.STATE_SAVED, NO_LABELS, int(ledger.saved_at_seconds is not None))
    page.metric(catalog.STATE_SAVED_TIMESTAMP_SECONDS, NO_LABELS, ledger.saved_at_seconds)

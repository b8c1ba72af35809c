"""Converts a snapshot to the metric families of a page."""

import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import exporter
from exporter.metrics import catalog, collectors_file, dcgm_collector, dcgm_names, health_collector, ledger_collector
from exporter.metrics.catalog import DEVICE_LABELS, POD_LABELS, alerts_off_until_seconds, exported_labels
from exporter.metrics.collectors_file import Collectors, Row
from exporter.metrics.dcgm_names import Era, LabelStyle
from exporter.metrics.text_format import (
    NO_LABELS,
    Dropped,
    Family,
    LabelNames,
    Labels,
    Metric,
    PageBuilder,
    labels,
    plus,
)
from exporter.model import AllocationState, DeviceState, DeviceView, Field, NodeFacts, PodUse, Snapshot, SourceState

_BYTES_PER_MIB = 1 << 20
_MILLIJOULES = 1000

_Row = tuple[Metric, Labels, float | None]

_Held = tuple[Labels, PodUse, bool]
"""A holder with its labels, and whether its device is up."""
_ALWAYS = 3
"""Series of a holder that do not depend on what is known of it."""

_ALLOCATION_STATES = tuple(AllocationState)
_DEVICE, _HOLDER = LabelNames(*DEVICE_LABELS), LabelNames(*POD_LABELS)
_DEVICE_INFO = LabelNames("parent_uuid", "pci_bus_id", "minor", "driver_version")
_INFO = LabelNames(
    *("resource", "share_mode", "attribution_source", "share_estimated"),
    *("workload_namespace", "workload_kind", "workload_name", "team", "queue", "workload_class"),
)

_PLAIN: tuple[tuple[Metric, Field], ...] = (
    (catalog.GPU_POWER_WATTS, Field.POWER_USAGE),
    (catalog.GPU_PCIE_TRANSMIT_BYTES_TOTAL, Field.PCIE_TX_BYTES_TOTAL),
    (catalog.GPU_PCIE_RECEIVE_BYTES_TOTAL, Field.PCIE_RX_BYTES_TOTAL),
    (catalog.GPU_NVLINK_TRANSMIT_BYTES_TOTAL, Field.NVLINK_TX_BYTES_TOTAL),
    (catalog.GPU_NVLINK_RECEIVE_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL),
)


def collect_devices(page: PageBuilder, snapshot: Snapshot, *, series_limit: int) -> int:
    """Add the series of every device and holder, and of what could not be matched to a device.

    A device that is not up keeps its identity, its holders, its price and its Xid counts; it has no measured values,
    but a GPU that needs a reset still says so.

    Returns:
        How many more series of the pod level may follow.
    """
    room = series_limit
    shown: list[_Held] = []
    for view in snapshot.devices:
        identity, up = _identity(view, snapshot.node), view.state is DeviceState.UP
        page.rows(_device(view, snapshot, identity))
        for use in view.pods:
            count = _series(use, up=up)
            if count > room:
                page.dropped_series += count
                continue
            room -= count
            holder = use.holder
            plain = _HOLDER.behind(identity, holder.namespace, holder.pod, holder.container, holder.pod_uid)
            shown.append((plain, use, up))
    _holders(page, shown)
    _devices(page, snapshot)
    _unresolved(page, snapshot)
    return room


def _identity(view: DeviceView, node: str) -> Labels:
    gpu, instance = view.gpu, view.instance
    if instance is None:
        return _DEVICE.of(node, str(gpu.index), gpu.uuid, None, None, gpu.model)
    return _DEVICE.of(node, str(gpu.index), instance.uuid, str(instance.gpu_instance_id), instance.profile, gpu.model)


def _device(view: DeviceView, snapshot: Snapshot, identity: Labels) -> Iterator[_Row]:
    minor = view.gpu.minor
    info = _DEVICE_INFO.behind(
        identity,
        view.instance.parent_uuid if view.instance else None,
        view.gpu.pci_bus_id,
        None if minor is None else str(minor),
        snapshot.driver_version,
    )
    yield catalog.GPU_INFO, info, 1
    if view.instance is None:
        if view.state is not DeviceState.UNKNOWN:
            yield catalog.GPU_UP, identity, int(view.state is DeviceState.UP)
        price = snapshot.prices.get(view.gpu.uuid)
        if price is not None:
            priced = plus(identity, ("currency", price.currency), ("price_source", price.source))
            yield catalog.GPU_HOURLY_PRICE, priced, price.per_hour
        if view.profiling is not None:
            yield catalog.GPU_PROFILING_STATE, plus(identity, ("state", view.profiling)), 1
    if view.allocation is not None:
        for state in _ALLOCATION_STATES:
            yield catalog.GPU_ALLOCATION_STATE, plus(identity, ("state", state)), int(view.allocation is state)
    events = snapshot.events.get(view.uuid) if view.instance is None else None
    yield from health_collector.rows(view, identity, events)
    if view.state is not DeviceState.UP:
        return
    if view.activity is not None:
        measured = (("source", view.activity.source), ("measured_by", view.activity.measured_by))
        yield catalog.GPU_ACTIVITY_RATIO, plus(identity, *measured), view.activity.ratio
    yield catalog.GPU_MEMORY_USED_BYTES, identity, _scaled(view, Field.FB_USED, _BYTES_PER_MIB, 1)
    yield catalog.GPU_MEMORY_TOTAL_BYTES, identity, _scaled(view, Field.FB_TOTAL, _BYTES_PER_MIB, 1)
    yield catalog.GPU_UNATTRIBUTED_ACTIVITY_RATIO, identity, view.unattributed_activity_ratio
    yield catalog.GPU_UNATTRIBUTED_MEMORY_USED_BYTES, identity, view.unattributed_memory_bytes
    yield catalog.GPU_UNATTRIBUTED_PROCESSES, identity, view.unattributed_processes
    if view.instance is None:
        yield from _board(view, identity)


def _board(view: DeviceView, identity: Labels) -> Iterator[_Row]:
    """Values of the whole board, which a MIG instance does not have."""
    for metric, field in _PLAIN:
        yield metric, identity, view.values.get(field)
    yield catalog.GPU_ENERGY_JOULES_TOTAL, identity, _scaled(view, Field.TOTAL_ENERGY_CONSUMPTION, 1, _MILLIJOULES)


def _scaled(view: DeviceView, field: Field, times: int, per: int) -> float | None:
    value = view.values.get(field)
    if value is None:
        return None
    return value * times if per == 1 else value * times / per


def _series(use: PodUse, *, up: bool) -> int:
    """How many series ``_holders`` makes of one."""
    measured = (use.activity, use.idle_for_seconds, use.memory_used_bytes) if up else ()
    told = (alerts_off_until_seconds(use.facts), *measured)
    return _ALWAYS + len(told) - told.count(None)


def _holders(page: PageBuilder, shown: list[_Held]) -> None:
    carried, uses = [plain for plain, _, _ in shown], [use for _, use, _ in shown]
    page.column(catalog.GPU_POD_INFO, [_info(plain, use) for plain, use, _ in shown], [1] * len(shown))
    until = [alerts_off_until_seconds(use.facts) for use in uses]
    page.column(catalog.GPU_POD_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS, carried, until)
    page.column(catalog.GPU_POD_SHARE_RATIO, carried, [use.holder.share_ratio for use in uses])
    page.column(catalog.GPU_POD_AGE_SECONDS, carried, [use.age_seconds for use in uses])
    measured = [(plain, use) for plain, use, up in shown if up]
    active = [(plain, use.activity) for plain, use in measured if use.activity is not None]
    sources = [plus(plain, ("source", activity.source)) for plain, activity in active]
    page.column(catalog.GPU_POD_ACTIVITY_RATIO, sources, [activity.ratio for _, activity in active])
    carried, uses = [plain for plain, _ in measured], [use for _, use in measured]
    page.column(catalog.GPU_POD_IDLE_FOR_SECONDS, carried, [use.idle_for_seconds for use in uses])
    page.column(catalog.GPU_POD_MEMORY_USED_BYTES, carried, [use.memory_used_bytes for use in uses])


def _info(plain: Labels, use: PodUse) -> Labels:
    """With the owner spelt as the ledger spells it, so that the two can be joined."""
    holder, facts = use.holder, use.facts
    estimated = "true" if holder.share_estimated else "false"
    how = (holder.resource, holder.mode, holder.source, estimated)
    if facts is None:
        return _INFO.behind(plain, *how, holder.namespace, None, None, None, None, None)
    owner = facts.owner
    whose = (owner.namespace, owner.kind, owner.name, owner.team, facts.queue, facts.workload_class)
    info = _INFO.behind(plain, *how, *whose)
    return plus(info, *exported_labels(facts.exported)) if facts.exported else info


def _devices(page: PageBuilder, snapshot: Snapshot) -> None:
    counts = {
        "present": None if snapshot.sample_at_seconds is None else present(snapshot),
        "expected": snapshot.expected_devices,
        "advertised": snapshot.advertised_devices,
        "allocated": snapshot.allocated_devices,
    }
    for state, count in counts.items():
        page.metric(catalog.GPU_DEVICES, labels(("node", snapshot.node), ("state", state)), count)
    facts = snapshot.node_facts
    if facts != NodeFacts():
        carried = labels(
            ("node", snapshot.node),
            ("instance_type", facts.instance_type),
            ("capacity_type", facts.capacity_type),
            ("region", facts.region),
            ("gpu_product", facts.gpu_product),
        )
        page.metric(catalog.GPU_NODE_INFO, carried, 1)


def present(snapshot: Snapshot) -> int:
    """Physical GPUs that the driver enumerates and that have not fallen off the bus."""
    gone = {DeviceState.LOST, DeviceState.MISSING}
    return sum(1 for view in snapshot.devices if view.instance is None and view.state not in gone)


def _unresolved(page: PageBuilder, snapshot: Snapshot) -> None:
    counts = Counter((one.namespace, one.pod, one.container, one.resource, one.reason) for one in snapshot.unresolved)
    names = ("pod_namespace", "pod_name", "container_name", "resource", "reason")
    for key, count in sorted(counts.items()):
        carried = labels(("node", snapshot.node), *zip(names, key, strict=True))
        page.metric(catalog.GPU_POD_UNRESOLVED_DEVICES, carried, count)


_PART = "exposition"
_NEW_DEFAULT = collectors_file.default(Era.NEW)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpositionOptions:
    """How a snapshot is shown."""

    collectors: Collectors = collectors_file.DEFAULT
    names: Literal["legacy", "4.9"] = "legacy"
    """Names and units of the built-in default set; a collectors file prints what it says."""
    dcgm_labels: LabelStyle = dcgm_names.DEFAULT
    series_limit: int = 20_000
    """Most series of the pod level; a holder that does not fit whole is left out and counted."""


def families(snapshot: Snapshot, options: ExpositionOptions) -> list[Family]:
    """Everything that the snapshot has to say, in a stable order; a pure function."""
    return build(snapshot, options, Dropped())[0]


def build(snapshot: Snapshot, options: ExpositionOptions, earlier: Dropped) -> tuple[list[Family], Dropped]:
    """The families of a page, and what was left out of this page and of all ``earlier`` ones."""
    page = PageBuilder()
    page.declare_all(catalog.ALL)
    room = collect_devices(page, snapshot, series_limit=options.series_limit)
    ledger_collector.collect_ledger(page, snapshot, series_limit=room)
    ledger_collector.collect_owners(page, snapshot)
    dcgm_collector.collect_dcgm(page, snapshot, _rows(options), options.collectors.events, style=options.dcgm_labels)
    dropped = Dropped(series=earlier.series + page.dropped_series, reasons=earlier.reasons + page.reasons)
    _itself(page, snapshot, dropped)
    return page.families(), dropped


def _rows(options: ExpositionOptions) -> tuple[Row, ...]:
    if Era(options.names) is Era.NEW and not options.collectors.from_file:
        return _NEW_DEFAULT.rows
    return options.collectors.rows


def _itself(page: PageBuilder, snapshot: Snapshot, dropped: Dropped) -> None:
    version = labels(("version", exporter.__version__), ("python", platform.python_version()))
    page.metric(catalog.BUILD_INFO, version, 1)
    page.metric(catalog.SIMULATED, NO_LABELS, int(snapshot.simulated))
    for source in snapshot.sources:
        label = labels(("source", source.name))
        page.metric(catalog.SOURCE_UP, label, int(source.state is SourceState.UP))
        page.metric(catalog.WORKER_RESTARTS_TOTAL, label, source.restarts)
    if snapshot.attribution_enabled:
        well = snapshot.attribution_known and not snapshot.attribution_problem
        page.metric(catalog.SOURCE_UP, labels(("source", snapshot.attribution_source)), int(well))
    if snapshot.metadata_enabled:
        well = snapshot.metadata_known and not snapshot.metadata_problem
        page.metric(catalog.SOURCE_UP, labels(("source", "kubernetes-api")), int(well))
    if snapshot.dcgm_version:
        page.metric(catalog.DCGM_INFO, labels(("version", snapshot.dcgm_version)), 1)
    for (part, reason), count in sorted(_errors(snapshot.errors, dropped.reasons).items()):
        page.metric(catalog.ERRORS_TOTAL, labels(("part", part), ("reason", reason)), count)
    page.metric(catalog.SAMPLE_DURATION_SECONDS, NO_LABELS, snapshot.sample_duration_seconds)
    page.metric(catalog.TICK_DURATION_SECONDS, NO_LABELS, snapshot.tick_duration_seconds)
    page.metric(catalog.SNAPSHOT_TIMESTAMP_SECONDS, NO_LABELS, snapshot.taken_at_seconds)
    page.metric(catalog.SAMPLE_TIMESTAMP_SECONDS, NO_LABELS, snapshot.sample_at_seconds)
    page.metric(catalog.ATTRIBUTION_TIMESTAMP_SECONDS, NO_LABELS, snapshot.attribution_at_seconds)
    page.metric(catalog.METADATA_TIMESTAMP_SECONDS, NO_LABELS, snapshot.metadata_at_seconds)
    for reason, count in catalog.problems(snapshot).items():
        page.metric(catalog.POD_METADATA_PROBLEMS, labels(("reason", reason)), count)
    if snapshot.ledger_writer is not None:
        page.metric(catalog.LEDGER_WRITER, NO_LABELS, int(snapshot.ledger_writer))
    if snapshot.ledger_locked is not None:
        page.metric(catalog.LEDGER_LOCKED, NO_LABELS, int(snapshot.ledger_locked))
    page.metric(catalog.DROPPED_SERIES_TOTAL, NO_LABELS, dropped.series)


def _errors(counted: Mapping[tuple[str, str], int], reasons: Counter[str]) -> Mapping[tuple[str, str], int]:
    errors = Counter(counted)
    for reason, count in reasons.items():
        errors[_PART, reason] += count
    return errors

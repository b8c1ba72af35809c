"""Converts a snapshot to the metric families of a page: the own ones, and `DCGM_FI_*` like dcgm-exporter.

It also collects memory, CPU and garbage collection of this process, like prometheus_client.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import GCCollector, ProcessCollector
from prometheus_client.registry import CollectorRegistry

import exporter
from exporter.metrics import catalog, collectors_file, dcgm_names, ledger_collector
from exporter.metrics.catalog import DEVICE_LABELS, INFO_LABELS, POD_LABELS, alerts_off_until_seconds
from exporter.metrics.collectors_file import BY_IDENTITY, Collectors, Columns, Row
from exporter.metrics.dcgm_names import ANSWERING, LabelStyle, Pairs
from exporter.metrics.text_format import (
    NO_LABELS,
    Dropped,
    Family,
    Labels,
    Metric,
    PageBuilder,
    Series,
    labels,
    named,
    plus,
)
from exporter.model.attribution import AllocationState, NodeFacts, ShareMode
from exporter.model.devices import CLOCK_EVENTS, DeviceEvents, DeviceState, SourceState, xid_tier
from exporter.model.fields import Field
from exporter.model.ledger import Bottleneck
from exporter.model.snapshot import DeviceView, PodUse, Snapshot

_BYTES_PER_MIB = 1 << 20
_MILLIJOULES = 1000
_NANOSECONDS = 1_000_000_000
_MEMORY_LIMIT_CELSIUS = 95
"""Assumed limit if the driver has none: that of HBM on boards with a known limit."""

_ALLOCATION_STATES = tuple(AllocationState)
_DEVICE_INFO = catalog.GPU_INFO.labels[len(DEVICE_LABELS) :]

_PLAIN: tuple[tuple[Metric, Field], ...] = (
    (catalog.GPU_POWER_WATTS, Field.POWER_USAGE),
    (catalog.GPU_NVLINK_TRANSMIT_BYTES_TOTAL, Field.NVLINK_TX_BYTES_TOTAL),
    (catalog.GPU_NVLINK_RECEIVE_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL),
)


def _collect_devices(page: PageBuilder, snapshot: Snapshot) -> None:
    """Add the series of every device and holder, and of the unmatched devices of containers.

    A device that is not up has no measured values. It keeps its identity, holders, price and Xid counts. A GPU that
    needs a reset keeps its recovery action too.
    """
    for view in snapshot.devices:
        identity, up = _identity(view, snapshot.node), view.state is DeviceState.UP
        page.rows(_device(view, snapshot, identity))
        page.rows(_health(view, identity, snapshot.events.get(view.uuid) if view.instance is None else None))
        if up:
            page.rows(_activity(view, identity, snapshot.history.bottlenecks.get(view.uuid, {})))
            page.rows(_measures(view, identity))
        for use in view.pods:
            page.pod(_holder(use, identity, up=up))
    _devices(page, snapshot)
    _unresolved(page, snapshot)


def _identity(view: DeviceView, node: str) -> Labels:
    gpu, instance = view.gpu, view.instance
    if instance is None:
        return named(DEVICE_LABELS, node, str(gpu.index), gpu.uuid, None, None, gpu.model)
    return named(
        DEVICE_LABELS, node, str(gpu.index), instance.uuid, str(instance.gpu_instance_id), instance.profile, gpu.model
    )


def _device(view: DeviceView, snapshot: Snapshot, identity: Labels) -> Iterator[Series]:
    parent = view.instance.parent_uuid if view.instance else None
    minor = None if view.gpu.minor is None else str(view.gpu.minor)
    driver_version = snapshot.reading.driver_version if snapshot.reading else None
    info = named(_DEVICE_INFO, parent, view.gpu.pci_bus_id, minor, driver_version, base=identity)
    yield catalog.GPU_INFO, info, 1
    if view.instance is None:
        if view.state is not DeviceState.UNKNOWN:
            yield catalog.GPU_UP, identity, int(view.state is DeviceState.UP)
        price = snapshot.metering.prices.get(view.gpu.uuid)
        if price is not None:
            priced = plus(identity, ("currency", price.currency), ("price_source", price.source))
            yield catalog.GPU_HOURLY_PRICE, priced, price.per_hour
        if view.profiling is not None:
            yield catalog.GPU_PROFILING_STATE, plus(identity, ("state", view.profiling)), 1
    else:
        yield catalog.GPU_SHARE_RATIO, identity, view.share_ratio
    if view.allocation is not None:
        for state in _ALLOCATION_STATES:
            yield catalog.GPU_ALLOCATION_STATE, plus(identity, ("state", state)), int(view.allocation is state)


def _measures(view: DeviceView, identity: Labels) -> Iterator[Series]:
    yield catalog.GPU_MEMORY_USED_BYTES, identity, _bytes(view, Field.FB_USED)
    yield catalog.GPU_MEMORY_TOTAL_BYTES, identity, _bytes(view, Field.FB_TOTAL)
    yield catalog.GPU_UNATTRIBUTED_ACTIVITY_RATIO, identity, view.unattributed_activity_ratio
    yield catalog.GPU_UNATTRIBUTED_MEMORY_USED_BYTES, identity, view.unattributed_memory_bytes
    yield catalog.GPU_UNATTRIBUTED_PROCESSES, identity, view.unattributed_processes
    if view.instance is None:
        for metric, field in _PLAIN:
            yield metric, identity, view.values.get(field)
        energy = view.values.get(Field.TOTAL_ENERGY_CONSUMPTION)
        yield catalog.GPU_ENERGY_JOULES_TOTAL, identity, None if energy is None else energy / _MILLIJOULES


def _activity(view: DeviceView, identity: Labels, bottlenecks: Mapping[Bottleneck, float]) -> Iterator[Series]:
    if view.activity is not None:
        measured = (("source", view.activity.source), ("measured_by", view.activity.measured_by))
        yield catalog.GPU_ACTIVITY_RATIO, plus(identity, *measured), view.activity.ratio
        if view.activity.profile is not None:
            yield catalog.GPU_EFFECTIVE_RATIO, identity, view.activity.profile.effective_ratio
    for resource, part in bottlenecks.items():
        yield catalog.GPU_BOTTLENECK, plus(identity, ("resource", resource)), part


def _health(view: DeviceView, identity: Labels, events: DeviceEvents | None) -> Iterator[Series]:
    """Yield the Xids of a device, and the other health series of a GPU that answers."""
    for xid, count in sorted(view.xids.items()):
        yield catalog.GPU_XID_ERRORS_TOTAL, plus(identity, ("xid", str(xid))), count
    is_board = view.instance is None and view.state in ANSWERING
    tells_action = is_board and Field.GPU_RECOVERY_ACTION in view.values
    for xid, at_seconds in sorted(view.xid_last_seen_seconds.items()):
        tier = xid_tier(xid, tells_action=tells_action)
        yield catalog.GPU_XID_LAST_SEEN_TIMESTAMP_SECONDS, plus(identity, ("xid", str(xid)), ("tier", tier)), at_seconds
    if is_board:
        yield from _board_health(view, identity)
        yield from _throttling(view, identity)
        if events:
            yield catalog.GPU_THERMAL_THROTTLE_RATIO, identity, events.thermal_throttle_ratio
            for event, times in (events.clock_events or {}).items():
                yield catalog.GPU_CLOCK_EVENTS_TOTAL, plus(identity, ("event", event)), times


def _board_health(view: DeviceView, identity: Labels) -> Iterator[Series]:
    for metric, field in catalog.HEALTH_PLAIN:
        yield metric, identity, view.values.get(field)
    for metric, parts in catalog.HEALTH_LABELLED.items():
        for value, field in parts.items():
            if field in view.values:
                yield metric, plus(identity, (metric.labels[-1], value)), view.values[field]
    memory = view.values.get(Field.MEMORY_TEMP)
    if memory is not None:
        driver_limit = view.values.get(Field.MEM_MAX_OP_TEMP)
        limit, margin = (
            ("assumed", _MEMORY_LIMIT_CELSIUS - memory) if driver_limit is None else ("driver", driver_limit - memory)
        )
        yield catalog.GPU_MEMORY_TEMPERATURE_MARGIN_CELSIUS, plus(identity, ("limit", limit)), margin
    recoveries = [view.values[field] for field in catalog.NVLINK_RECOVERIES if field in view.values]
    if recoveries:
        yield catalog.GPU_NVLINK_ERRORS_TOTAL, plus(identity, ("kind", "recovery")), max(recoveries)


def _throttling(view: DeviceView, identity: Labels) -> Iterator[Series]:
    for reason, field in catalog.THROTTLE_TIMES.items():
        nanoseconds = view.values.get(field)
        if nanoseconds is not None:
            yield catalog.GPU_THROTTLE_SECONDS_TOTAL, plus(identity, ("reason", reason)), nanoseconds / _NANOSECONDS
    mask = view.values.get(Field.CLOCK_THROTTLE_REASONS)
    if mask is not None:
        for bit, reason in enumerate(CLOCK_EVENTS):
            active = int(mask) >> bit & 1
            yield catalog.GPU_THROTTLE_ACTIVE, plus(identity, ("reason", reason)), active


def _bytes(view: DeviceView, field: Field) -> float | None:
    mebibytes = view.values.get(field)
    return None if mebibytes is None else mebibytes * _BYTES_PER_MIB


def _holder(use: PodUse, identity: Labels, *, up: bool) -> list[Series]:
    """Return the series of a holder, which are shown together or left out together."""
    holder, activity = use.holder, use.activity
    plain = named(POD_LABELS, holder.namespace, holder.pod, holder.container, holder.pod_uid, base=identity)
    rows: list[Series] = [
        (catalog.GPU_POD_INFO, _info(plain, use), 1),
        (catalog.GPU_POD_SHARE_RATIO, plain, holder.share_ratio),
        (catalog.GPU_POD_AGE_SECONDS, plain, use.age_seconds),
    ]
    if (until := alerts_off_until_seconds(use.facts)) is not None:
        rows.append((catalog.GPU_POD_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS, plain, until))
    if up and activity is not None:
        rows.append((catalog.GPU_POD_ACTIVITY_RATIO, plus(plain, ("source", activity.source)), activity.ratio))
        if activity.profile:
            rows.append((catalog.GPU_POD_EFFECTIVE_RATIO, plain, activity.profile.effective_ratio))
    if up and use.idle_for_seconds is not None:
        rows.append((catalog.GPU_POD_IDLE_FOR_SECONDS, plain, use.idle_for_seconds))
    if up and use.memory_used_bytes is not None:
        rows.append((catalog.GPU_POD_MEMORY_USED_BYTES, plain, use.memory_used_bytes))
    return rows


def _info(plain: Labels, use: PodUse) -> Labels:
    """Return the labels of a holder's info series, with the owner as in the ledger, so queries can join the two."""
    holder, facts = use.holder, use.facts
    estimated = "true" if holder.share_estimated else "false"
    how = (holder.resource, holder.mode, holder.source, estimated)
    if facts is None:
        return named(INFO_LABELS, *how, holder.namespace, None, None, None, None, None, base=plain)
    owner = facts.owner
    labels_of_owner = (owner.namespace, owner.kind, owner.name, owner.team, facts.queue, facts.workload_class)
    info = named(INFO_LABELS, *how, *labels_of_owner, base=plain)
    return plus(info, *facts.exported)


def _devices(page: PageBuilder, snapshot: Snapshot) -> None:
    counts = {
        "present": present(snapshot),
        "expected": snapshot.expected_devices,
        "advertised": snapshot.attribution.advertised_devices,
        "allocated": snapshot.attribution.allocated_devices,
    }
    for state, count in counts.items():
        page.metric(catalog.GPU_DEVICES, labels(("node", snapshot.node), ("state", state)), count)
    facts = snapshot.metering.node_facts
    if facts != NodeFacts():
        known = (snapshot.node, facts.instance_type, facts.capacity_type, facts.region, facts.gpu_product)
        page.metric(catalog.GPU_NODE_INFO, named(catalog.GPU_NODE_INFO.labels, *known), 1)


def present(snapshot: Snapshot) -> int | None:
    """Return the number of physical GPUs that the driver lists and that are not lost; ``None`` while unknown."""
    states = [view.state for view in snapshot.devices if view.instance is None]
    if snapshot.reading is None or DeviceState.UNKNOWN in states:
        return None
    return sum(state not in {DeviceState.LOST, DeviceState.MISSING} for state in states)


def _unresolved(page: PageBuilder, snapshot: Snapshot) -> None:
    entries = snapshot.attribution.unresolved
    counts = Counter((one.namespace, one.pod, one.container, one.resource, one.reason) for one in entries)
    names = catalog.GPU_POD_UNRESOLVED_DEVICES.labels
    for key, count in sorted(counts.items()):
        carried = named(names, snapshot.node, *key)
        page.metric(catalog.GPU_POD_UNRESOLVED_DEVICES, carried, count)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpositionOptions:
    """Options of the page."""

    collectors: Collectors = collectors_file.DEFAULT
    dcgm_labels: LabelStyle = dcgm_names.DEFAULT
    series_limit: int = 20_000
    """Maximum number of series of holders; a holder that exceeds it is left out with all its series, and counted."""


def families(snapshot: Snapshot, options: ExpositionOptions, dropped: Dropped | None = None) -> list[Family]:
    """Return all families of a snapshot, in a stable order; count omitted series in ``dropped``."""
    dropped = dropped or Dropped()
    page = PageBuilder(options.collectors.metrics, options.series_limit, dropped)
    _collect_devices(page, snapshot)
    ledger_collector.collect_ledger(page, snapshot)
    ledger_collector.collect_owners(page, snapshot)
    _collect_dcgm(page, snapshot, options)
    _itself(page, snapshot, dropped)
    return page.families()


def _collect_dcgm(page: PageBuilder, snapshot: Snapshot, options: ExpositionOptions) -> None:
    """Add the `DCGM_FI_*` rows of every device that answers, and the Xids of all.

    The rows of a device with one exclusive holder have the labels of that holder. A shared device has a row per field
    without a holder, and a row per holder for values that were measured per holder. The rows of a MIG instance have
    the labels of its GPU, and only values that are measured on the instance. The rows of the GPU leave out the fields
    of its instances, as in dcgm-exporter: a sum over all rows would count them twice.
    """
    collectors, style = options.collectors, options.dcgm_labels
    columns, of_instance = collectors.columns, collectors.columns_of_instances
    in_parts = _in_parts(snapshot.devices, of_instance)
    crowded = _crowded_instances(snapshot.devices)
    node = style.node(snapshot)
    for view in snapshot.devices:
        crowd = view.instance is not None and (view.gpu.uuid, view.instance.gpu_instance_id) in crowded
        texts = ((row.name, _text(view, snapshot, row)) for row in collectors.texts)
        before = labels(*style.device(view, node, crowded=crowd), *texts)
        holder = _exclusive(view.pods)
        holder_labels = style.holder(holder.holder) if holder else []
        for event in collectors.events:
            for more, count in dcgm_names.event_samples(event.name, view, snapshot):
                page.metric(event, plus(before, *more, *holder_labels), count)
        # The last Xid of a lost GPU may be the cause.
        page.rows(_last_xid(collectors.numbers, view.last_xid, before, holder_labels))
        if view.state not in ANSWERING:
            continue
        shown = of_instance if view.instance else columns
        elsewhere = in_parts.get(view.uuid, frozenset())
        page.rows(_measured(shown, view.values, plus(before, *holder_labels), elsewhere))
        if holder is None:
            for use in view.pods:
                page.rows(_measured(columns, use.values, plus(before, *style.holder(use.holder))))


def _exclusive(pods: tuple[PodUse, ...]) -> PodUse | None:
    """Return the only holder of a whole device; ``None`` for a free or shared device."""
    return pods[0] if len(pods) == 1 and pods[0].holder.mode is not ShareMode.SHARED else None


def _in_parts(devices: tuple[DeviceView, ...], of_instance: Columns) -> Mapping[str, frozenset[Field]]:
    """Return the fields that the rows of instances contain, by UUID of the GPU."""
    shown: dict[str, frozenset[Field]] = {}
    # Profiling values of the GPU could be mistaken for those of instances without values.
    profiled = {field for field, ((row, _), *_) in of_instance.items() if row.field.is_profiling}
    for view in devices:
        if view.instance and view.state in ANSWERING:
            in_parts = profiled | (of_instance.keys() & view.values.keys())
            shown[view.gpu.uuid] = shown.get(view.gpu.uuid, frozenset()) | in_parts
    return shown


def _measured(
    columns: Columns, values: Mapping[Field, int | float], carried: Labels, elsewhere: frozenset[Field] = frozenset()
) -> Iterator[tuple[Row, Labels, float]]:
    for field, value in values.items():
        if field in columns and field not in elsewhere:
            for row, convert in columns[field]:
                yield row, carried, convert(value)


def _last_xid(
    rows: Iterable[Row], last: int | None, before: Labels, holder: Pairs
) -> Iterator[tuple[Row, Labels, float]]:
    if last is not None:
        carried = plus(before, *sorted([*holder, ("err_code", str(last)), ("err_msg", dcgm_names.xid_text(last))]))
        for row in rows:
            if row.field.field is Field.XID_ERRORS:
                yield row, carried, last


def _crowded_instances(devices: tuple[DeviceView, ...]) -> frozenset[tuple[str, int]]:
    """Return the GPU instances with several compute instances, which need an additional label."""
    counts = Counter((view.gpu.uuid, view.instance.gpu_instance_id) for view in devices if view.instance)
    return frozenset(key for key, count in counts.items() if count > 1)


def _text(view: DeviceView, snapshot: Snapshot, row: Row) -> str | None:
    instance, reading = view.instance, snapshot.reading
    name, uuid, bus_id = BY_IDENTITY
    known: dict[Field, str | None] = {
        name: instance.profile if instance else view.gpu.model,
        uuid: view.uuid,
        bus_id: view.gpu.pci_bus_id,
        Field.DRIVER_VERSION: reading.driver_version if reading else None,
        Field.NVML_VERSION: reading.nvml_version if reading else None,
    }
    # The text of the GPU is not that of an instance.
    other = None if instance and row.field.per_instance else view.gpu.labels.get(row.field.field)
    return known.get(row.field.field, other)


def _itself(page: PageBuilder, snapshot: Snapshot, dropped: Dropped) -> None:
    version = labels(("version", exporter.__version__), ("python", platform.python_version()))
    page.metric(catalog.BUILD_INFO, version, 1)
    page.metric(catalog.SIMULATED, NO_LABELS, int(snapshot.simulated))
    for source in snapshot.sources:
        label = labels(("source", source.name))
        page.metric(catalog.SOURCE_UP, label, int(source.state is SourceState.UP))
        page.metric(catalog.WORKER_RESTARTS_TOTAL, label, source.restarts)
    attribution, metadata, metering = snapshot.attribution, snapshot.metadata, snapshot.metering
    if attribution.source:
        well = attribution.known and not attribution.problem
        page.metric(catalog.SOURCE_UP, labels(("source", attribution.source)), int(well))
    page.metric(catalog.ATTRIBUTION_TIMESTAMP_SECONDS, NO_LABELS, attribution.answered_at_seconds)
    if metadata:
        well = metadata.known and not metadata.problem
        page.metric(catalog.SOURCE_UP, labels(("source", "kubernetes-api")), int(well))
        page.metric(catalog.METADATA_TIMESTAMP_SECONDS, NO_LABELS, metadata.at_seconds)
    if reading := snapshot.reading:
        if reading.dcgm_version:
            page.metric(catalog.DCGM_INFO, labels(("version", reading.dcgm_version)), 1)
        page.metric(catalog.SAMPLE_DURATION_SECONDS, NO_LABELS, reading.duration_seconds)
        page.metric(catalog.SAMPLE_TIMESTAMP_SECONDS, NO_LABELS, reading.taken_at_seconds)
    of_pages = {("exposition", reason): count for reason, count in dropped.reasons.items()}
    for (part, reason), count in sorted({**snapshot.errors, **of_pages}.items()):
        page.metric(catalog.ERRORS_TOTAL, labels(("part", part), ("reason", reason)), count)
    page.metric(catalog.TICK_DURATION_SECONDS, NO_LABELS, snapshot.tick_duration_seconds)
    page.metric(catalog.SNAPSHOT_TIMESTAMP_SECONDS, NO_LABELS, snapshot.taken_at_seconds)
    for reason, count in catalog.problems(snapshot).items():
        page.metric(catalog.POD_METADATA_PROBLEMS, labels(("reason", reason)), count)
    if metering.is_writer is not None:
        page.metric(catalog.LEDGER_WRITER, NO_LABELS, int(metering.is_writer))
    if metering.is_locked is not None:
        page.metric(catalog.LEDGER_LOCKED, NO_LABELS, int(metering.is_locked))
    page.metric(catalog.DROPPED_SERIES_TOTAL, NO_LABELS, dropped.series)


class ProcessMetrics:
    """Reads ``/proc/self`` and the garbage collector's counters at each call."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def families(self) -> list[Family]:
        """Return the families of the catalogue, in its order; none without ``/proc``."""
        found: dict[str, dict[Labels, float]] = {}
        for sample in (sample for metric in self._registry.collect() for sample in metric.samples):
            found.setdefault(sample.name, {})[labels(*sorted(sample.labels.items()))] = sample.value
        return [
            Family(metric.name, metric.kind, metric.help, found[metric.name])
            for metric in catalog.PROCESS
            if metric.name in found
        ]

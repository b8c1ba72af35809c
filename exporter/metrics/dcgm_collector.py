"""Collects the drop-in `DCGM_FI_*` family with dcgm-exporter's names, types, units and labels."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from exporter.metrics import health_collector
from exporter.metrics.collectors_file import BY_IDENTITY, Row
from exporter.metrics.dcgm_names import LabelStyle, Pairs
from exporter.metrics.health_collector import ANSWERING
from exporter.metrics.text_format import Kind, Labels, Metric, PageBuilder, labels, plus
from exporter.model import DeviceView, Field, PodUse, ShareMode, Snapshot

_Values = Mapping[Field, int | float]
_Columns = Mapping[Field, Sequence[tuple[Row, Callable[[float], int | float]]]]


def collect_dcgm(
    page: PageBuilder,
    snapshot: Snapshot,
    rows: Iterable[Row],
    events: Iterable[Metric] = (),
    *,
    style: LabelStyle,
) -> None:
    """Add the rows of every device that answers, and the Xids of all.

    A device with one exclusive holder carries its labels. A shared device has a bare row per field, and a row per
    holder only for what was measured per holder. A MIG instance shows what is measured on it, with the labels of
    its parent; values of the whole board stand once, on the board's own row. What the instances show the board's
    row leaves out, as dcgm-exporter does: a sum over all rows would count it twice.
    """
    numbers = [row for row in rows if row.kind is not Kind.LABEL]
    texts = [row for row in rows if row.kind is Kind.LABEL]
    events = tuple(events)
    for row in numbers:
        page.declare(row.name, row.kind, row.help)
    for event in events:
        page.declare(event.name, event.kind, event.help)
    columns = _columns(numbers)
    of_instance = {field: shown for field, shown in columns.items() if shown[0][0].field.per_instance}
    in_parts = _in_parts(snapshot.devices, of_instance)
    crowded = _crowded_instances(snapshot.devices)
    node = style.node(snapshot)
    for view in snapshot.devices:
        crowd = view.instance is not None and (view.gpu.uuid, view.instance.gpu_instance_id) in crowded
        before = labels(*style.device(view, node, crowded=crowd), *_text_labels(view, snapshot, texts))
        holder = _exclusive(view.pods)
        holder_labels = style.holder(holder.holder) if holder else []
        for event in events:
            for more, count in health_collector.samples(event.name, view, snapshot):
                page.add(event.name, plus(before, *more, *holder_labels), count)
        # The last Xid of a GPU that is gone may say why it is.
        page.rows(_last_xid(numbers, view.last_xid, before, holder_labels))
        if view.state not in ANSWERING:
            continue
        shown = of_instance if view.instance else columns
        elsewhere = in_parts.get(view.uuid, frozenset())
        page.rows(_measured(shown, view.values, plus(before, *holder_labels), elsewhere))
        if holder is None:
            for use in view.pods:
                page.rows(_measured(columns, use.values, plus(before, *style.holder(use.holder))))


def _columns(rows: Iterable[Row]) -> _Columns:
    """The rows of each field, and what converts its values; those of the last Xid are made apart: they carry more."""
    columns: dict[Field, list[tuple[Row, Callable[[float], int | float]]]] = {}
    for row in rows:
        if row.field.field is not Field.XID_ERRORS:
            columns.setdefault(row.field.field, []).append((row, row.field.converter(row.era)))
    return columns


def _exclusive(pods: tuple[PodUse, ...]) -> PodUse | None:
    """The only holder of the whole device, if there is one."""
    if len(pods) == 1:
        holder = pods[0].holder
        if holder.mode is not ShareMode.SHARED and holder.device_share_ratio >= 1:
            return pods[0]
    return None


def _in_parts(devices: tuple[DeviceView, ...], of_instance: _Columns) -> Mapping[str, frozenset[Field]]:
    """By UUID of the board the fields that rows of its instances show."""
    shown: dict[str, frozenset[Field]] = {}
    for view in devices:
        if view.instance and view.state in ANSWERING:
            # A board's profile beside silent instances would be taken for theirs.
            profiled = {field for field, ((row, _), *_) in of_instance.items() if row.field.is_profiling}
            told = profiled | (of_instance.keys() & view.values.keys())
            shown[view.gpu.uuid] = shown.get(view.gpu.uuid, frozenset()) | told
    return shown


def _measured(
    columns: _Columns, values: _Values, carried: Labels, elsewhere: frozenset[Field] = frozenset()
) -> Iterator[tuple[Row, Labels, float]]:
    for field, value in values.items():
        if field in columns and field not in elsewhere:
            for row, convert in columns[field]:
                yield row, carried, convert(value)


def _last_xid(
    rows: Iterable[Row], last: int | None, before: Labels, holder: Pairs
) -> Iterator[tuple[Row, Labels, float]]:
    if last is not None:
        carried = plus(before, *sorted([*holder, ("err_code", str(last)), ("err_msg", health_collector.text(last))]))
        for row in rows:
            if row.field.field is Field.XID_ERRORS:
                yield row, carried, last


def _crowded_instances(devices: tuple[DeviceView, ...]) -> frozenset[tuple[str, int]]:
    """GPU instances with several compute instances, which only one more label keeps apart."""
    counts = Counter((view.gpu.uuid, view.instance.gpu_instance_id) for view in devices if view.instance)
    return frozenset(key for key, count in counts.items() if count > 1)


def _text_labels(view: DeviceView, snapshot: Snapshot, rows: Iterable[Row]) -> Pairs:
    return sorted(((row.name, _text(view, snapshot, row)) for row in rows), key=lambda pair: pair[0])


def _text(view: DeviceView, snapshot: Snapshot, row: Row) -> str | None:
    field, instance = row.field.field, view.instance
    if field in BY_IDENTITY:
        return _known_text(view, field)
    if field is Field.DRIVER_VERSION:
        return snapshot.driver_version
    if field is Field.NVML_VERSION:
        return snapshot.nvml_version
    # An instance has a text of its own, which is not its board's.
    return None if instance and row.field.per_instance else view.gpu.labels.get(field)


def _known_text(view: DeviceView, field: Field) -> str:
    name, uuid, _ = BY_IDENTITY
    if field is name:
        return view.instance.profile if view.instance else view.gpu.model
    return view.uuid if field is uuid else view.gpu.pci_bus_id

"""The drop-in ``DCGM_FI_*`` family: dcgm-exporter's names, types, units and labels, and no copied values."""

from collections import Counter
from collections.abc import Iterable, Mapping

from exporter.exposition import dcgm_exp, xid
from exporter.exposition.builder import PageBuilder
from exporter.exposition.collectors_file import BY_IDENTITY, Row
from exporter.exposition.dcgm_exp import EventRow
from exporter.exposition.dcgm_labels import LabelStyle, Pairs
from exporter.exposition.family import Kind, Labels, labels, plus
from exporter.model import DeviceState, DeviceView, Field, PodUse, ShareMode, Snapshot

_Values = Mapping[Field, int | float]


def collect(
    page: PageBuilder,
    snapshot: Snapshot,
    rows: Iterable[Row],
    events: Iterable[EventRow] = (),
    *,
    style: LabelStyle,
) -> None:
    """Add the rows of every device that is up, and the Xid counts of all.

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
    crowded = _crowded_instances(snapshot.devices)
    own = _own_values(snapshot.devices, {row.field.field for row in numbers if row.field.per_instance})
    for view in snapshot.devices:
        if view.state is not DeviceState.UP and not events:
            continue
        crowd = view.instance is not None and (view.gpu.uuid, view.instance.gpu_instance_id) in crowded
        before = labels(*style.device(view, snapshot.node, crowded=crowd), *_text_labels(view, snapshot, texts))
        holder = _exclusive(view.pods)
        holder_labels = style.holder(holder.holder) if holder else []
        for event in events:
            for more, count in dcgm_exp.samples(event.count, view, snapshot):
                page.add(event.name, plus(before, *more, *holder_labels), count)
        if view.state is not DeviceState.UP:
            continue
        _device_rows(page, view, own[view.uuid], numbers, before, holder_labels)
        if holder is None:
            for use in view.pods:
                _measured(page, numbers, use.values, plus(before, *style.holder(use.holder)))


def _exclusive(pods: tuple[PodUse, ...]) -> PodUse | None:
    """The only holder of the whole device, if there is one."""
    if len(pods) == 1:
        holder = pods[0].holder
        if holder.mode is not ShareMode.SHARED and holder.device_share_ratio >= 1:
            return pods[0]
    return None


def _own_values(devices: tuple[DeviceView, ...], per_instance: set[Field]) -> dict[str, _Values]:
    """By UUID what a device's row shows: of an instance what is measured there, of its board the rest."""
    own: dict[str, _Values] = {}
    in_parts: dict[str, set[Field]] = {}
    for view in devices:
        if view.instance and view.state is DeviceState.UP:
            own[view.uuid] = {field: value for field, value in view.values.items() if field in per_instance}
            in_parts.setdefault(view.gpu.uuid, set()).update(own[view.uuid])
    for view in devices:
        if view.uuid not in own:
            shown = in_parts.get(view.uuid, set())
            own[view.uuid] = {field: value for field, value in view.values.items() if field not in shown}
    return own


def _device_rows(
    page: PageBuilder, view: DeviceView, values: _Values, rows: list[Row], before: Labels, holder: Pairs
) -> None:
    _measured(page, rows, values, plus(before, *holder))
    if view.last_xid is not None:
        error = [("err_code", str(view.last_xid)), ("err_msg", xid.text(view.last_xid))]
        carried = plus(before, *sorted([*holder, *error]))
        for row in rows:
            if row.field.field is Field.XID_ERRORS:
                page.add(row.name, carried, view.last_xid)


def _measured(page: PageBuilder, rows: list[Row], values: _Values, carried: Labels) -> None:
    for row in rows:
        field = row.field.field
        value = values.get(field)
        if value is not None and field is not Field.XID_ERRORS:
            page.add(row.name, carried, row.field.convert(value, row.era))


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

"""The lower half of the page: one table row per device and per holder of a shared device."""

from exporter.exposition import page_money
from exporter.exposition.api import mebibytes
from exporter.exposition.page_summary import Group, condition, groups, is_idle, is_used
from exporter.exposition.page_text import STATE_WORDS, UNKNOWN, activity, chip, duration, memory, model, text, words
from exporter.exposition.page_whose import pod_name, source, whose
from exporter.model import AllocationState, DeviceState, DeviceView, Field, PodUse, ShareMode, Snapshot

_HEAD = (
    '<thead><tr role="row">'
    '<th role="columnheader" scope="col">Device</th><th role="columnheader" scope="col">Held by</th>'
    '<th role="columnheader" scope="col">Activity</th><th role="columnheader" scope="col">Idle for</th>{money}'
    '<th role="columnheader" scope="col" class="num">Memory</th>'
    '<th role="columnheader" scope="col" class="num">Power</th>'
    '<th role="columnheader" scope="col" class="num">Temp.</th></tr></thead>'
)
_MONEY_HEAD = '<th role="columnheader" scope="col" class="num">Per hour</th>'
_MODE_WORDS = {ShareMode.EXCLUSIVE: "whole device", ShareMode.MIG: "MIG slice", ShareMode.SHARED: "shared"}


def table(snapshot: Snapshot) -> str:
    """All devices with their holders. Roles are spelled out, since on a phone the rows become cards."""
    bodies = "".join(_body(group, snapshot) for group in groups(snapshot))
    if not bodies:
        return (
            '<section class="panel"><h2>No devices</h2><p class="notes">No source has reported a GPU yet.</p></section>'
        )
    caption = "<caption>Devices and their holders</caption>"
    head = _HEAD.format(money=_MONEY_HEAD if page_money.is_shown(snapshot) else "")
    return f'<div class="panel"><table role="table">{caption}{head}{bodies}</table></div>'


def _body(group: Group, snapshot: Snapshot) -> str:
    rows = _device_rows(group.gpu, group, snapshot)
    for instance in group.instances:
        rows += _device_rows(instance, group, snapshot)
    return f'<tbody role="rowgroup">{"".join(rows)}</tbody>'


def _device_rows(view: DeviceView, group: Group, snapshot: Snapshot) -> list[str]:
    only = view.pods[0] if len(view.pods) == 1 and view.pods[0].holder.device_share_ratio >= 1 else None
    css = ["part" if view.instance else "gpu"]
    if view.state is not DeviceState.UP:
        css.append("down")
    elif only and is_idle(only):
        css.append("flag")
    anchor = "" if view.instance else f' id="gpu-{view.gpu.index}"'
    cells = [
        cell("pod", "", _held_by(view, group, only, snapshot)),
        cell("act", "Activity", "" if _partitioned(view) and view.activity is None else _device_activity(view)),
        cell("since", "Idle for", _since(only) if only else ""),
        *_cost_cell(view, only, snapshot),
        cell("num", "Memory", memory(_used(view), mebibytes(view.values, Field.FB_TOTAL))),
        *_board_cells(view),
    ]
    rows = [row(" ".join(css), _name(view), cells, anchor)]
    deep = " deep" if view.instance else ""
    if not only:
        rows += [_holder_row(use, view, deep, snapshot) for use in view.pods]
    return rows + _unattributed_row(view, deep, snapshot)


def _cost_cell(view: DeviceView, use: PodUse | None, snapshot: Snapshot) -> list[str]:
    """A holder's cost; on a row without one, dimmed, what the device would cost; no cell where nothing has a price."""
    if not page_money.is_shown(snapshot):
        return []
    share_ratio = use.holder.share_ratio if use else view.share_ratio
    shown = page_money.part_rate(snapshot, view, share_ratio)
    if use is None:
        shown = f'<span class="dim" title="price of the device">{shown}</span>'
    elif is_idle(use):
        shown = f"<b>{shown}</b>"
    return [cell("num cost", "Per hour", shown)]


def _partitioned(view: DeviceView) -> bool:
    return view.allocation is None and view.state is DeviceState.UP


def cell(css: str, label: str, inner: str) -> str:
    """One cell of a table that becomes cards on a phone; ``inner`` must be safe."""
    labelled = f' data-label="{label}"' if label and inner else ""
    # On a phone the cell is a flex box of label and value: the value must be one element.
    value = f"<span>{inner}</span>" if css.startswith("num") and inner else inner
    return f'<td role="cell" class="{css if inner else "none"}"{labelled}>{value}</td>'


def row(css: str, head: str, cells: list[str], anchor: str = "") -> str:
    """One row with its head; ``anchor`` is an attribute. All of it must be safe."""
    first = f'<th role="rowheader" scope="row">{head}</th>'
    return f'<tr role="row" class="{css}"{anchor}>{first}{"".join(cells)}</tr>'


def _name(view: DeviceView) -> str:
    if view.instance:
        number = f'<span class="meta">#{view.instance.gpu_instance_id}</span>'
        return f'<span title="{text(view.uuid)}">{text(view.instance.profile)} {number}</span>'
    xids = "".join(
        f" {chip('bad', f'Xid {xid}' + (f', {count} times' if count > 1 else ''))}"
        for xid, count in sorted(view.xids.items())
    )
    return (
        f'<span title="{text(view.uuid)}">GPU {view.gpu.index}</span>{xids}'
        f'<span class="model">{model(view.gpu.model)}</span>'
    )


def _held_by(view: DeviceView, group: Group, only: PodUse | None, snapshot: Snapshot) -> str:
    if view.state is not DeviceState.UP:
        why = f' <span class="meta">{words(view.reason)}</span>' if view.reason else ""
        who = f" · {_pod(only, snapshot)}" if only else ""
        return chip("bad", STATE_WORDS[view.state]) + why + who
    if view.allocation is None:
        held = sum(part.allocation is AllocationState.ALLOCATED for part in group.instances)
        return f'<span class="dim">MIG · {held} of {len(group.instances)} instances held</span>'
    if only:
        return _pod(only, snapshot)
    if view.pods:
        of_it = f"{sum(use.holder.device_share_ratio for use in view.pods) * 100:.0f} % of it held"
        plural = "s" if len(view.pods) > 1 else ""
        return f'{len(view.pods)} holder{plural} <span class="meta">· {of_it}</span>'
    return chip(*condition(view))


def _pod(use: PodUse, snapshot: Snapshot) -> str:
    holder = use.holder
    how = [text(holder.container)]
    if holder.mode is ShareMode.SHARED:
        about = "about " if holder.share_estimated else ""
        how.append(f"shared, {about}{holder.device_share_ratio * 100:.0f} %")
    how.append(source(use))
    told = " · ".join(part for part in how if part)
    mode = f' title="{_MODE_WORDS[holder.mode]}, {text(holder.resource)}"'
    about_owner = whose(use, snapshot)
    below = f'<span class="whose">{about_owner}</span>' if about_owner else ""
    return f'{pod_name(use)} <span class="meta"{mode}>{told}</span>{below}'


def _device_activity(view: DeviceView) -> str:
    return activity(view.activity, view.activity_unknown_reason)


def _since(use: PodUse) -> str:
    if use.idle_for_seconds is None:
        return UNKNOWN
    if is_idle(use):
        return chip("idle", f"idle {duration(use.idle_for_seconds)}")
    return f'<span class="dim">{duration(use.idle_for_seconds)}</span>' if use.idle_for_seconds >= 1 else ""


def _used(view: DeviceView) -> int | None:
    return mebibytes(view.values, Field.FB_USED)


def _board_cells(view: DeviceView) -> list[str]:
    """Power and temperature: of the board, so an instance has none."""
    if view.instance:
        return [cell("num", "", ""), cell("num", "", "")]
    watts, celsius = view.values.get(Field.POWER_USAGE), view.values.get(Field.GPU_TEMP)
    return [
        cell("num", "Power", UNKNOWN if watts is None else f'{watts:.0f} <span class="dim">W</span>'),
        cell("num", "Temperature", UNKNOWN if celsius is None else f'{celsius:.0f} <span class="dim">°C</span>'),
    ]


def _holder_row(use: PodUse, view: DeviceView, deep: str, snapshot: Snapshot) -> str:
    flag = " flag" if is_idle(use) else ""
    share = f"{use.holder.device_share_ratio * 100:.0f} % share"
    cells = [
        cell("pod", "", _pod(use, snapshot)),
        cell("act", "Activity", activity(use.activity, view.activity_unknown_reason)),
        cell("since", "Idle for", _since(use)),
        *_cost_cell(view, use, snapshot),
        cell("num", "Memory", memory(use.memory_used_bytes, None)),
        cell("num", "", ""),
        cell("num", "", ""),
    ]
    return row(f"user{deep}{flag}", share, cells)


def _unattributed_row(view: DeviceView, deep: str, snapshot: Snapshot) -> list[str]:
    """Use by no listed pod, where there is any."""
    processes, ratio, used = (
        view.unattributed_processes,
        view.unattributed_activity_ratio,
        view.unattributed_memory_bytes,
    )
    if not is_used(view):
        return []
    what = "no listed pod"
    if processes:
        what += f' <span class="meta">{processes} process{"es" if processes > 1 else ""}</span>'
    number = "" if ratio is None else f'<span class="val">{ratio * 100:.0f} %</span>'
    cells = [
        cell("pod", "", what),
        cell("act", "Activity", number),
        cell("since", "", ""),
        *([cell("num", "", "")] if page_money.is_shown(snapshot) else []),
        cell("num", "Memory", memory(used, None)),
        cell("num", "", ""),
        cell("num", "", ""),
    ]
    return [row(f"user{deep}", "unattributed", cells)]

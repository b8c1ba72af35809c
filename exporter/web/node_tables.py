"""The lower half of the page: one table row per device and per holder of a shared device."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from exporter.metrics.catalog import FOR_GOOD_SECONDS, alerts_off_until_seconds, owner_of
from exporter.model import AllocationState, DeviceState, DeviceView, Field, Owner, PodFacts, PodUse, ShareMode, Snapshot
from exporter.web import formatting
from exporter.web.formatting import (
    STATE_WORDS,
    UNKNOWN,
    activity,
    brief,
    chip,
    duration,
    memory,
    model,
    moment,
    text,
    words,
)
from exporter.web.node_api import mebibytes
from exporter.web.node_summary import Group, condition, groups, is_idle, is_used, place, pod_key

_SOURCE_WORDS = {
    "annotation": ("by annotation", "its share is as its annotations declare it, and nobody enforces it"),
    "job-mapping": ("by job mapping", "from the files in which the workload manager lists jobs by GPU"),
    "process": ("by processes", "it runs there; nothing allocates GPUs on this node"),
}


def source(use: PodUse) -> str:
    """How the holder is known, where that is not the usual way. Safe."""
    name = use.holder.source
    if name == "device-plugin":
        return ""
    shown, meaning = _SOURCE_WORDS.get(name, (name, ""))
    return f'<span title="{text(meaning)}">{text(shown)}</span>' if meaning else text(shown)


def named(namespace: str, name: str) -> str:
    """``vision/resnet-0``, the name in bold; the name alone outside of Kubernetes. Safe."""
    return f"{text(namespace)}/<b>{text(name)}</b>" if namespace else f"<b>{text(name)}</b>"


def pod_name(use: PodUse) -> str:
    """The holder's pod. Safe."""
    return named(use.holder.namespace, use.holder.pod)


def workload(owner: Owner) -> str:
    """``Job resnet``; empty where the namespace is all that is known. Safe."""
    return text(f"{owner.kind} {owner.name}".strip()) if owner.name else text(owner.kind)


def whose(use: PodUse, snapshot: Snapshot) -> str:
    """Workload, team, queue and class, and until when alerts are off; empty where nothing of it is known. Safe."""
    facts = use.facts
    if facts is None:
        return '<span class="dim">owner not known yet</span>' if snapshot.metadata_known else ""
    owner = facts.owner
    parts = [
        _beside(use.holder.pod, owner),
        f"team {text(owner.team)}" if owner.team else "",
        f"queue {text(facts.queue)}" if facts.queue else "",
        text(facts.workload_class),
        ", ".join(f"not understood: {words(problem)}" for problem in facts.problems),
    ]
    shown = " · ".join(part for part in parts if part)
    return " ".join(part for part in (shown, alerts_off(facts, snapshot.taken_at_seconds)) if part)


def _beside(pod: str, owner: Owner) -> str:
    """The workload without what the pod's name already says."""
    if owner.name != pod:
        return workload(owner)
    return "" if owner.kind == "Pod" else text(owner.kind)


def alerts_off(facts: PodFacts | None, now: float) -> str:
    """That waste alerts leave the pod alone, and until when; empty where they do not, or no longer. Safe."""
    until = alerts_off_until_seconds(facts)
    if until is None or until <= now:
        return ""
    # A chip sets its parts side by side: words and time must be one part to be broken as text is.
    return chip("free", "alerts off" if until >= FOR_GOOD_SECONDS else f"<span>alerts off until {moment(until)}</span>")


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
    head = _HEAD.format(money=_MONEY_HEAD if formatting.is_shown(snapshot) else "")
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
    if not formatting.is_shown(snapshot):
        return []
    share_ratio = use.holder.share_ratio if use else view.share_ratio
    shown = formatting.part_rate(snapshot, view, share_ratio)
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
        *([cell("num", "", "")] if formatting.is_shown(snapshot) else []),
        cell("num", "Memory", memory(used, None)),
        cell("num", "", ""),
        cell("num", "", ""),
    ]
    return [row(f"user{deep}", "unattributed", cells)]


_NAMED_AT_MOST = 8

_Uses = list[tuple[DeviceView, PodUse]]


@dataclass(frozen=True, slots=True)
class _Idler:
    """The idle pods of one workload; a pod whose workload is not known stands alone."""

    pods: dict[tuple[str, str], _Uses] = field(default_factory=dict)

    @property
    def uses(self) -> _Uses:
        return [use for uses in self.pods.values() for use in uses]

    def idle_seconds(self) -> list[float]:
        """By pod; one with several devices is idle since the last of them went idle."""
        return [min(use.idle_for_seconds or 0.0 for _, use in uses) for uses in self.pods.values()]

    def spent(self, snapshot: Snapshot) -> dict[str, float]:
        """Money since each of them went idle, by currency, at the price of now."""
        spent: dict[str, float] = {}
        for uses, seconds in zip(self.pods.values(), self.idle_seconds(), strict=True):
            for currency, rate in formatting.rates(snapshot, uses).items():
                spent[currency] = spent.get(currency, 0.0) + rate * seconds / 3600
        return spent


def waste(snapshot: Snapshot) -> str:
    """Idle workloads by what that has cost, then longest first; empty where nobody idles."""
    idlers = _idlers(snapshot)
    if not idlers:
        return ""
    rates = formatting.rates(snapshot, (use for idler in idlers.values() for use in idler.uses))
    cost = f" <small>{formatting.amounts(rates)} an hour</small>" if rates else ""
    rank = {
        key: (-sum(idler.spent(snapshot).values()), -max(idler.idle_seconds()), key) for key, idler in idlers.items()
    }
    dearest = sorted(idlers, key=rank.__getitem__)
    lines = [_line(idlers[key], snapshot) for key in dearest[:_NAMED_AT_MOST]]
    if len(idlers) > _NAMED_AT_MOST:
        lines.append(f'<li class="meta">and {len(idlers) - _NAMED_AT_MOST} more, marked in the table</li>')
    return (
        f'<section class="panel waste" aria-labelledby="waste"><h2 id="waste">Held, but idle{cost}</h2>'
        f"<ol>{''.join(lines)}</ol></section>"
    )


def _idlers(snapshot: Snapshot) -> dict[tuple[str, str, str], _Idler]:
    idlers: dict[tuple[str, str, str], _Idler] = {}
    for view in snapshot.devices:
        for use in view.pods:
            if is_idle(use):
                owner = owner_of(use)
                key = (owner.namespace, owner.kind, owner.name) if owner.name else (*pod_key(use), "")
                pods = idlers.setdefault(key, _Idler()).pods
                pods.setdefault(pod_key(use), []).append((view, use))
    return idlers


def _line(idler: _Idler, snapshot: Snapshot) -> str:
    uses = idler.uses
    places = _places(view for view, _ in uses)
    kind = model(uses[0][0].gpu.model)
    return (
        f'<li><span class="for">idle for {_idle_range(idler.idle_seconds())}</span>'
        f"{_money(idler, snapshot)}{_who(idler, snapshot)}"
        f' <span class="meta">{places} · {kind}</span></li>'
    )


def _places(views: Iterable[DeviceView]) -> str:
    return ", ".join(dict.fromkeys(place(view) for view in views))


def _idle_range(idle_seconds: list[float]) -> str:
    shortest, longest = min(idle_seconds), max(idle_seconds)
    return duration(shortest) if brief(shortest) == brief(longest) else f"{brief(shortest)} to {brief(longest)}"


def _who(idler: _Idler, snapshot: Snapshot) -> str:
    _, use = idler.uses[0]
    if len(idler.pods) == 1:
        about = whose(use, snapshot)
        return f'<span class="pod">{pod_name(use)}</span>' + (f' <span class="meta">{about}</span>' if about else "")
    owner = owner_of(use)
    team = f" · team {text(owner.team)}" if owner.team else ""
    # They have one template as a rule, and so one word on alerts; where they have not, the table tells.
    off = {alerts_off(one.facts, snapshot.taken_at_seconds) for _, one in idler.uses}
    word = f" {off.pop()}" if len(off) == 1 else ""
    return (
        f'<span class="pod">{named(owner.namespace, owner.name)}</span>'
        f' <span class="meta">{text(owner.kind)} · {len(idler.pods)} pods{team}{word}</span>'
    )


def _money(idler: _Idler, snapshot: Snapshot) -> str:
    """What an idle workload has cost since it went idle, at the price of now, and goes on to cost per hour."""
    if not formatting.is_shown(snapshot):
        return ""
    costs = formatting.rates(snapshot, idler.uses)
    if not costs:
        return f'<span class="money">{formatting.NO_PRICE}</span>'
    return (
        '<span class="money" title="since it went idle, at the price of now">'
        f"{formatting.amounts(idler.spent(snapshot))}"
        f' <span class="meta">at {formatting.amounts(costs)} an hour</span></span>'
    )

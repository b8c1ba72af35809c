"""The upper half of the page: figures, and the node's devices at a glance."""

from collections.abc import Iterable
from dataclasses import dataclass

from exporter.model import AllocationState, DeviceState, DeviceView, Field, PodUse, Snapshot
from exporter.web import formatting
from exporter.web.formatting import STATE_WORDS, bar, brief, chip, percent, text

IDLE_SHOWN_SECONDS = 120.0
"""From here on a holder is pointed at; shorter pauses are everyday life of a busy pod."""
SHOWN_RATIO = 0.005
"""Less than this would be shown as 0 %."""
_LARGEST_MIG = 7
_NOT_HELD = {
    AllocationState.UNALLOCATED: ("free", "free"),
    AllocationState.UNKNOWN: ("unknown", "holder unknown"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """One physical GPU and its MIG instances, as the page shows them."""

    gpu: DeviceView
    instances: tuple[DeviceView, ...]


def groups(snapshot: Snapshot) -> list[Group]:
    """Physical GPUs by index, each with its instances in the driver's order."""
    instances: dict[str, list[DeviceView]] = {}
    for view in snapshot.devices:
        if view.instance:
            instances.setdefault(view.gpu.uuid, []).append(view)
    whole = sorted((view for view in snapshot.devices if not view.instance), key=lambda view: view.gpu.index)
    return [Group(view, tuple(instances.get(view.gpu.uuid, ()))) for view in whole]


def is_idle(use: PodUse) -> bool:
    """Whether the holder is known to have done nothing for long enough to be pointed at."""
    return use.idle_for_seconds is not None and use.idle_for_seconds >= IDLE_SHOWN_SECONDS


def is_used(view: DeviceView) -> bool:
    """Whether something that belongs to no listed pod uses the device."""
    ratio = view.unattributed_activity_ratio or 0.0
    return bool(view.unattributed_processes or view.unattributed_memory_bytes) or ratio >= SHOWN_RATIO


def condition(view: DeviceView) -> tuple[str, str]:
    """Colour class and safe words for the state of one device."""
    if view.state is not DeviceState.UP:
        return "bad", STATE_WORDS[view.state].partition(":")[0]
    if view.allocation is None:
        return "", "MIG"
    if view.allocation is AllocationState.UNALLOCATED and is_used(view):
        return "idle", "stray use"
    if view.allocation is not AllocationState.ALLOCATED:
        return _NOT_HELD[view.allocation]
    return _held_condition(view)


def _held_condition(view: DeviceView) -> tuple[str, str]:
    idle = [use.idle_for_seconds or 0.0 for use in view.pods if is_idle(use)]
    if idle and len(idle) == len(view.pods):
        return "idle", f"idle {brief(min(idle))}"
    if view.activity is None:
        return "unknown", "not measured"
    return "busy", "in use"


def place(view: DeviceView) -> str:
    """``GPU 3`` or ``GPU 3 · 1g.10gb #7``, safe."""
    name = f"GPU {view.gpu.index}"
    return f"{name} · {text(view.instance.profile)} #{view.instance.gpu_instance_id}" if view.instance else name


def _tile(title: str, value: str, css: str = "") -> str:
    return f'<div class="tile {css}"><dt>{title}</dt><dd>{value}</dd></div>'


def tiles(snapshot: Snapshot) -> str:
    """The figures of the node."""
    whole = [view for view in snapshot.devices if not view.instance]
    units = [view for view in snapshot.devices if view.allocation is not None]
    up = sum(view.state is DeviceState.UP for view in whole)
    expected = max(len(whole), snapshot.expected_devices or 0)
    count = {state: sum(view.allocation is state for view in units) for state in AllocationState}
    uses = [(view, use) for view in units for use in view.pods if is_idle(use)]
    idle = len({pod_key(use) for _, use in uses})
    unheld = _beside(formatting.unheld_rates(snapshot))
    shown = [
        _tile("GPUs up", f"{up} <small>of {expected}</small>", "alarm" if up < expected else ""),
        _tile("Allocated", f"{count[AllocationState.ALLOCATED]} <small>of {len(units)} devices</small>"),
        _tile("Free", f"{count[AllocationState.UNALLOCATED]}{unheld}"),
    ]
    if count[AllocationState.UNKNOWN]:
        shown.append(_tile("Holder unknown", str(count[AllocationState.UNKNOWN]), "warn"))
    shown.append(_tile("Idle holders", f"{idle}{_beside(formatting.rates(snapshot, uses))}", "warn" if idle else ""))
    shown += _cost_tile(snapshot)
    ratio = _held_activity(units)
    if ratio is not None:
        shown.append(_tile("Activity, where held", percent(ratio)))
    watts = [view.values[Field.POWER_USAGE] for view in whole if Field.POWER_USAGE in view.values]
    if watts:
        shown.append(_tile("Power", f"{sum(watts) / 1000:.2f} <small>kW</small>"))
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def _cost_tile(snapshot: Snapshot) -> list[str]:
    if not formatting.is_shown(snapshot):
        return []
    held = [(view, use) for view in snapshot.devices for use in view.pods]
    costs, without = formatting.rates(snapshot, held), formatting.unpriced(snapshot, held)
    if not costs:
        return [_tile("Held, cost now", "no price" if without else "none")]
    more = f" <small>and {without} without price</small>" if without else ""
    return [_tile("Held, cost now", f"{formatting.amounts(costs)}<small>/h</small>{more}")]


def _beside(rates: formatting.Rates) -> str:
    return f" <small>{formatting.amounts(rates)}/h</small>" if rates else ""


def _held_activity(units: Iterable[DeviceView]) -> float | None:
    """Mean activity of held devices, weighted by the part of a physical GPU that is held; unknown ones left out."""
    weights = [
        (sum(use.holder.share_ratio for use in view.pods), view.activity.ratio)
        for view in units
        if view.activity and view.pods
    ]
    total = sum(weight for weight, _ in weights)
    return sum(weight * ratio for weight, ratio in weights) / total if total else None


def pod_key(use: PodUse) -> tuple[str, str]:
    """What tells a pod from every other of the node."""
    return use.holder.namespace, use.holder.pod


def glance(snapshot: Snapshot) -> str:
    """One card per physical GPU."""
    cards = "".join(f"<li>{_card(group, snapshot)}</li>" for group in groups(snapshot))
    return f'<ol class="map" aria-label="GPUs at a glance">{cards}</ol>' if cards else ""


def _card(group: Group, snapshot: Snapshot) -> str:
    view = group.gpu
    css, word = condition(view)
    idle_parts = sum(condition(part)[0] == "idle" for part in group.instances)
    down = view.state is not DeviceState.UP
    if group.instances and not down:
        css, word = ("idle", f"{idle_parts} idle") if idle_parts else ("", "MIG")
        held = sum(part.allocation is AllocationState.ALLOCATED for part in group.instances)
        figure = f"{held} <small>of {len(group.instances)} held</small>"
        picture = _slices(group.instances)
    else:
        figure = percent(view.activity.ratio) if view.activity and not down else "<small>—</small>"
        if view.gpu.uuid in snapshot.prices and css == "idle" and view.pods:
            figure += f" <small>{formatting.part_rate(snapshot, view, 1)}/h</small>"
        picture = bar(None if down or view.activity is None else view.activity.ratio)
    tone = {"idle": "is-idle", "bad": "is-bad", "free": "is-free"}.get(css, "") if not group.instances or down else ""
    idle_sharers = sum(is_idle(use) for use in view.pods)
    if css == "busy" and idle_sharers:
        css, word = "idle", f"{idle_sharers} idle"
    return (
        f'<a id="glance-{view.gpu.index}" class="{tone}" href="#gpu-{view.gpu.index}">'
        f'<span class="gpu"><span>GPU {view.gpu.index}</span>{chip(css, word)}</span>'
        f'<span class="pct">{figure}</span>{picture}<span class="who">{_who(group)}</span></a>'
    )


def _who(group: Group) -> str:
    view = group.gpu
    if view.state is not DeviceState.UP:
        return text(view.reason.replace("_", " ")) or "down"
    pods = list(dict.fromkeys(pod_key(use) for part in (view, *group.instances) for use in part.pods))
    if len(pods) == 1:
        return f"{text(pods[0][0])}/{text(pods[0][1])}"
    return f"{len(pods)} pods" if pods else "nobody" if view.allocation is not AllocationState.UNKNOWN else "unknown"


def _slices(instances: tuple[DeviceView, ...]) -> str:
    """The partitioned GPU as a row of slices, each filled as far as it is busy."""
    slices = max((view.gpu.compute_slices for view in instances), default=0) or _LARGEST_MIG
    drawn, x = [], 0
    for view in instances:
        width = max(view.instance.compute_slices, 1) if view.instance else 1
        css = {"busy": "held", "idle": "idle", "unknown": "held"}.get(condition(view)[0], "none")
        drawn.append(f'<rect class="{css}" x="{x + 0.06:.2f}" width="{width - 0.12:.2f}" height="22"/>')
        if view.activity and view.allocation is AllocationState.ALLOCATED:
            height = 22 * min(max(view.activity.ratio, 0), 1)
            drawn.append(
                f'<rect class="busy" x="{x + 0.06:.2f}" y="{22 - height:.1f}" width="{width - 0.12:.2f}"'
                f' height="{height:.1f}"/>'
            )
        x += width
    return (
        f'<svg class="slices" viewBox="0 0 {max(slices, x)} 22" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(drawn)}</svg>"
    )

"""Renders the agent's page from a snapshot with ``templates/node.html``. The page loads no other files."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from exporter.metrics.catalog import FOR_GOOD_SECONDS, alerts_off_until_seconds, owner_of
from exporter.metrics.collector import present
from exporter.model.attribution import AllocationState, Owner
from exporter.model.devices import DeviceState, xid_tier
from exporter.model.fields import Field
from exporter.model.formatting import brief, percent, summed
from exporter.model.ledger import Price
from exporter.model.snapshot import ActivityHistory, ActivitySource, DeviceView, PodUse, Snapshot
from exporter.web.node_api import mebibytes
from exporter.web.templating import render

_LEAST_RATIO = 0.005
"""Activity from which a device counts as used by an unlisted pod."""
LEAST_GPUS = 0.005
"""Fewer GPUs would round to 0 on the page."""
_OWNERS_AT_MOST = 20
_DUST = 1e-9
_STATES = {DeviceState.RESET_REQUIRED: "needs a reset", DeviceState.FAILED: "no answer"}

Item = TypeVar("Item")
Key = TypeVar("Key")
Use = tuple[DeviceView, PodUse]
Rates = Mapping[str, float]
"""Money per hour by currency; amounts of different currencies are never summed."""


class Condition(NamedTuple):
    """State of a device: its words, and the look, which repeats them in colour."""

    look: str
    words: str


def is_used(view: DeviceView) -> bool:
    """Return whether processes of no listed pod use the device."""
    ratio = view.unattributed_activity_ratio or 0.0
    return bool(view.unattributed_processes or view.unattributed_memory_bytes) or ratio >= _LEAST_RATIO


def condition(view: DeviceView) -> Condition:
    """Return the state of one device."""
    if view.state is not DeviceState.UP:
        return Condition("bad", _STATES.get(view.state, str(view.state)))
    if view.allocation is None:
        return Condition("", "MIG")
    if view.allocation is AllocationState.UNALLOCATED:
        return Condition("idle", "stray use") if is_used(view) else Condition("free", "free")
    if view.allocation is AllocationState.UNKNOWN:
        return Condition("unknown", "holder unknown")
    if (idle := idle_seconds(view)) is not None:
        return Condition("idle", f"idle {brief(idle)}")
    return Condition("unknown", "not measured") if view.activity is None else Condition("busy", "in use")


class Spark(NamedTuple):
    """Drawing of a device's recent activity, one unit wide per step, ``SPARK_HEIGHT`` high; empty without history."""

    area: str = ""
    """SVG path of the activity, with gaps where it was not measured."""
    idle_from: float | None = None
    """Start of the current idle time, in steps; ``None`` if the device is not idle."""
    words: str = ""
    """Text alternative of the drawing."""


SPARK_HEIGHT = 40
_SPARK_MOST = SPARK_HEIGHT - 2
"""Vertical position of activity 0, which stays visible: it differs from no measurement."""


def spark(snapshot: Snapshot, view: DeviceView) -> Spark:
    """Return the drawing of a device's recent activity."""
    history, ratios = snapshot.history, snapshot.history.ratios(view.uuid)
    if not ratios or history.ends_at_seconds is None:
        return Spark()
    step = history.STEP_SECONDS
    tops = (SPARK_HEIGHT if ratio is None else round((1 - ratio) * _SPARK_MOST) for ratio in ratios)
    runs = "".join(f"V{top}h{sum(1 for _ in run)}" for top, run in groupby(tops))
    area = f"M{history.STEPS - len(ratios)} {SPARK_HEIGHT}{runs}V{SPARK_HEIGHT}z"
    measured = [ratio for ratio in ratios if ratio is not None]
    words = [f"last {brief(len(ratios) * step)}"]
    if measured:
        words.append(f"{percent(sum(measured) / len(measured))} on average")
        words.append(f"{percent(min(measured))} to {percent(max(measured))}")
    if len(measured) < len(ratios):
        words.append(f"{brief((len(ratios) - len(measured)) * step)} not measured")
    idle = idle_seconds(view)
    if idle is None:
        return Spark(area, None, ", ".join(words))
    words.append(f"idle for {brief(idle)}")
    since_end = idle - (snapshot.taken_at_seconds - history.ends_at_seconds)
    return Spark(area, min(max(0.0, history.STEPS - since_end / step), history.STEPS), ", ".join(words))


def idle_seconds(view: DeviceView) -> float | None:
    """Return the time in which all holders of a device are idle; ``None`` without holders, or if one is not idle."""
    idle = [use.idle_for_seconds or 0.0 for use in view.pods if use.is_idle]
    return min(idle) if idle and len(idle) == len(view.pods) else None


def sole_holder(view: DeviceView) -> PodUse | None:
    """Return the holder of the whole device, which is shown in the device's row; ``None`` without one."""
    return view.pods[0] if len(view.pods) == 1 and view.pods[0].holder.device_share_ratio >= 1 else None


def rates(snapshot: Snapshot, uses: Iterable[Use]) -> Rates:
    """Return the cost of holders per hour: their shares at the current prices. A GPU without a price adds nothing."""
    return _sum((snapshot.metering.prices.get(view.gpu.uuid), use.holder.share_ratio) for view, use in uses)


def unheld(snapshot: Snapshot) -> Mapping[str, float]:
    """Return the unheld part of each GPU, by UUID, without the GPUs that may have unknown holders."""
    held = summed((view.gpu.uuid, _held(view)) for view in snapshot.devices)
    for view in snapshot.devices:
        # An unknown holder may have the rest of the device, or slices without an instance.
        hides = not view.rest_is_free and _held(view) < view.share_ratio - _DUST
        if view.allocation is AllocationState.UNKNOWN or hides:
            held.pop(view.gpu.uuid, None)
    return {uuid: 1 - share for uuid, share in held.items() if 1 - share > _DUST}


def _held(view: DeviceView) -> float:
    return sum(use.holder.share_ratio for use in view.pods)


def _sum(parts: Iterable[tuple[Price | None, float]]) -> Rates:
    return summed((price.currency, price.per_hour * share) for price, share in parts if price)


def _mean(weighted: Iterable[tuple[float, float]]) -> float | None:
    parts = list(weighted)
    total = sum(weight for weight, _ in parts)
    return sum(weight * ratio for weight, ratio in parts) / total if total else None


def _grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _pod(use: Use) -> tuple[str, str]:
    return use[1].holder.namespace, use[1].holder.pod


def _workload(owner: Owner) -> tuple[str, str, str]:
    return owner.namespace, owner.kind, owner.name


@dataclass(frozen=True, slots=True)
class Group:
    """A physical GPU with its MIG instances in the driver's order."""

    gpu: DeviceView
    instances: Sequence[DeviceView]

    @property
    def pods(self) -> list[tuple[str, str]]:
        """Namespaces and names of the pods on the GPU."""
        return list(dict.fromkeys(_pod((view, use)) for view in (self.gpu, *self.instances) for use in view.pods))

    @property
    def held(self) -> int:
        """Number of held instances."""
        return sum(view.allocation is AllocationState.ALLOCATED for view in self.instances)

    @property
    def summary(self) -> Condition:
        """State of the GPU, or the number of its idle instances and holders."""
        state = condition(self.gpu)
        sharers = self.gpu.pods if state.look == "busy" else ()
        idle = sum(use.is_idle for use in sharers) + sum(condition(view).look == "idle" for view in self.instances)
        return Condition("idle", f"{idle} idle") if idle and state.look != "bad" else state


@dataclass(frozen=True, slots=True)
class Holding:
    """Devices that an owner holds, or only the idle devices."""

    snapshot: Snapshot
    owner: Owner
    uses: Sequence[Use]
    more: int = 0
    """Number of owners that are summed in this holding; 0 for a single owner, which is shown by name."""

    @property
    def pods(self) -> int:
        """Number of pods that hold the devices."""
        return len({_pod(use) for use in self.uses})

    @property
    def gpus(self) -> float:
        """GPUs, by share."""
        return sum(use.holder.share_ratio for _, use in self.uses)

    @property
    def idle_gpus(self) -> float:
        """GPUs of idle holders, by share."""
        return sum(use.holder.share_ratio for _, use in self.uses if use.is_idle)

    @property
    def activity_ratio(self) -> float | None:
        """Mean activity of the holders, weighted by share, without unmeasured activity."""
        return _mean(
            (use.holder.share_ratio, min(1.0, use.activity.ratio / use.holder.device_share_ratio))
            for _, use in self.uses
            if use.activity is not None and use.holder.device_share_ratio > 0
        )

    @property
    def rates(self) -> Rates:
        """Cost per hour at the current prices."""
        return rates(self.snapshot, self.uses)

    @property
    def unpriced(self) -> int:
        """Number of GPUs without a price."""
        return len({view.gpu.uuid for view, _ in self.uses} - self.snapshot.metering.prices.keys())

    @property
    def idle_seconds(self) -> list[float]:
        """Idle seconds by pod; for a pod with several devices, those of the device that became idle last."""
        return [min(use.idle_for_seconds or 0.0 for _, use in uses) for uses in _grouped(self.uses, _pod).values()]

    @property
    def spent(self) -> Rates:
        """Cost since each pod became idle, at the current prices."""
        return summed(
            (currency, rate * seconds / 3600)
            for uses, seconds in zip(_grouped(self.uses, _pod).values(), self.idle_seconds, strict=True)
            for currency, rate in rates(self.snapshot, uses).items()
        )

    @property
    def devices(self) -> list[DeviceView]:
        """Held devices, each of them once."""
        return list({view.uuid: view for view, _ in self.uses}.values())

    @property
    def alerts_off_until(self) -> float | None:
        """Unix time until which alerts are off; ``None`` if they are on, or if the pods differ."""
        ends = {alerts_off_until_seconds(use.facts) for _, use in self.uses}
        return ends.pop() if len(ends) == 1 else None


def _groups(snapshot: Snapshot) -> list[Group]:
    """Return physical GPUs by index, each with its instances."""
    whole = [view for view in snapshot.devices if not view.instance]
    instances = _grouped((view for view in snapshot.devices if view.instance), lambda view: view.gpu.uuid)
    return [Group(view, instances.get(view.gpu.uuid, [])) for view in sorted(whole, key=lambda view: view.gpu.index)]


def _owners(held: Holding) -> list[Holding]:
    """Return owners by cost, then by GPUs; the last entry sums those beyond ``_OWNERS_AT_MOST``."""
    by_owner = _grouped(held.uses, lambda use: owner_of(use[1]))
    owners = [Holding(held.snapshot, owner, uses) for owner, uses in by_owner.items()]
    owners.sort(key=lambda one: (-sum(one.rates.values()), -one.gpus, *_workload(one.owner), one.owner.team))
    if rest := owners[_OWNERS_AT_MOST:]:
        uses = [use for one in rest for use in one.uses]
        owners[_OWNERS_AT_MOST:] = [Holding(held.snapshot, Owner(), uses, more=len(rest))]
    return owners


def _idlers(idle: Holding) -> list[Holding]:
    """Return idle workloads by cost of their idle time, then by its length; a pod without a workload counts as one."""

    def workload(use: Use) -> tuple[str, str, str]:
        owner = owner_of(use[1])
        return _workload(owner) if owner.name else (*_pod(use), "")

    found = sorted(_grouped(idle.uses, workload).items())
    idlers = [Holding(idle.snapshot, owner_of(uses[0][1]), uses) for _, uses in found]
    return sorted(idlers, key=lambda one: (-sum(one.spent.values()), -max(one.idle_seconds)))


def _lacks_profiling(view: DeviceView) -> bool:
    """Return whether NVML measures no engine activity of a GPU; with it, NVML has the other profiling fields too."""
    measured = view.activity and (view.activity.source, view.activity.measured_by)
    return measured != (ActivitySource.ENGINE, "nvml")


def _disagreement(snapshot: Snapshot) -> str:
    """Return the GPU counts of the driver, device plugin and kubelet as text; empty if they agree or are unknown."""
    seen, kubelet = present(snapshot), snapshot.attribution
    advertised, held = kubelet.advertised_devices, kubelet.allocated_devices
    if seen is None or (advertised in {None, seen} and (held is None or held <= seen)):
        return ""
    counts = ((seen, "seen by the driver"), (advertised, "advertised by the kubelet"), (held, "held by pods"))
    return ", ".join(f"{count} {what}" for count, what in counts if count is not None)


def _view(snapshot: Snapshot) -> dict[str, object]:
    """Return the values of the template that are derived from the snapshot."""
    groups, prices = _groups(snapshot), snapshot.metering.prices
    whole = [group.gpu for group in groups]
    uses = [(view, use) for view in snapshot.devices for use in view.pods]
    held = Holding(snapshot, Owner(), uses)
    idle = Holding(snapshot, Owner(), [use for use in uses if use[1].is_idle])
    free = unheld(snapshot)
    return {
        # Without prices the page shows no money.
        "has_prices": bool(prices or snapshot.metering.price_book or snapshot.metering.unpriced_gpus),
        "groups": groups,
        "held": held,
        "idle": idle,
        "owners": _owners(held),
        "idlers": _idlers(idle),
        "free_gpus": sum(free.values()),
        "free_rates": _sum((prices.get(uuid), share) for uuid, share in free.items()),
        "activity_ratio": _mean((_held(view), view.activity.ratio) for view in snapshot.devices if view.activity),
        "watts": [view.values[Field.POWER_USAGE] for view in whole if Field.POWER_USAGE in view.values],
        "prices": _grouped((view.gpu for view in whole), lambda gpu: (gpu.model, prices.get(gpu.uuid))),
        "unprofiled": _grouped(filter(_lacks_profiling, whole), lambda view: view.profiling),
        "disagreement": _disagreement(snapshot),
        "profiled": any(view.activity and view.activity.profile for view in snapshot.devices),
        "activity_sources": {
            activity.source
            for view in snapshot.devices
            for activity in (view.activity, *(use.activity for use in view.pods))
            if activity
        },
    }


_STATIC = files("exporter.web") / "static"
_CSS = (_STATIC / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_STATIC / "page.js").read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src {_hash(_CSS)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Allows only the inline script and style of the page, so that markup in the name of a pod has no effect."""


def _cost_address(cost_service_url: str, owner: Owner) -> str:
    """Return the address of an owner's page in the cost service; empty without a cost service."""
    known = {"namespace": owner.namespace, "kind": owner.kind, "workload": owner.name}
    asked = {name: value for name, value in known.items() if value}
    return (
        f"{cost_service_url}/owner?{urlencode(asked, quote_via=quote, errors='replace')}"
        if cost_service_url and asked
        else ""
    )


def document(snapshot: Snapshot | None, cost_service_url: str = "", *, is_whole: bool = True) -> str:
    """Return the page.

    Args:
        snapshot: Newest snapshot of the node; ``None`` before the first.
        cost_service_url: Address of the cost service; empty for a page without links to it.
        is_whole: False for only the parts that change, which the script replaces.
    """
    helpers = (alerts_off_until_seconds, condition, is_used, mebibytes, owner_of, sole_holder, spark, xid_tier)
    values = {
        **{helper.__name__: helper for helper in helpers},
        "cost_address": partial(_cost_address, cost_service_url),
        "cost_service_url": cost_service_url,
        "is_whole": is_whole,
        "css": _CSS,
        "script": _SCRIPT,
        "snapshot": snapshot,
        "page": _view(snapshot) if snapshot else {},
        "Field": Field,
        "FOR_GOOD_SECONDS": FOR_GOOD_SECONDS,
        "LEAST_GPUS": LEAST_GPUS,
        "SPARK_HEIGHT": SPARK_HEIGHT,
        "STEPS": ActivityHistory.STEPS,
    }
    return render("exporter.web", "node.html", values)

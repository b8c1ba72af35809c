"""Computes the current holdings and use of each owner, faults of its devices, and idle shared devices."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, inf
from typing import NamedTuple

from exporter.accounting.windows import Sums, WindowSample, owner_shown
from exporter.model.attribution import PLATFORM_NAMESPACES, AllocationState, Owner
from exporter.model.devices import DeviceState, XidTier, xid_tier
from exporter.model.fields import Field
from exporter.model.ledger import (
    RESOURCES,
    WINDOWS,
    Bottleneck,
    OwnersView,
    OwnerUse,
    OwnerXid,
    PoolUse,
    Price,
    SharedIdle,
)
from exporter.model.snapshot import DeviceView, PodUse

LOW_15M_RATIO, LOW_1H_RATIO = 0.1, 0.05
"""Activity over 15 minutes and over an hour; a device with less over one of the windows is underused."""
ACTIVE_RATIO = 0.05
"""Minimum activity over 15 minutes of a device at work; a shared device with less is idle."""
UNUSED_RATIO = 0.001
"""Activity below this counts as 0."""
COVERAGE_RATIO = 0.9
"""Minimum measured part of a window for which a device is reported as unused, or a shared device as idle."""

DUST_SECONDS = 0.01
"""Seconds below this are rounding errors."""

POLICIES = ("batch", "default", "interactive", "inference", "reserved")
"""Workload classes in the order of increasing patience of their alerts."""
_LEFT_ALONE = frozenset({"inference", "reserved"})

_JUDGED_WINDOWS = ("30m", "1h", "2h", "24h")
"""Windows for which unused devices are reported."""


class _Part(NamedTuple):
    """A holder with the price of its GPU, and its active and measured seconds by window."""

    use: PodUse
    price: Price | None
    seconds: Mapping[str, Sums]

    @property
    def share(self) -> float:
        """Part of the physical GPU."""
        return self.use.holder.share_ratio

    @property
    def idle_ratio(self) -> float:
        """Idle part of the last 15 minutes, if measured."""
        active, measured = self.seconds["15m"]
        return max(0.0, 1 - active / measured)

    def is_below(self, ratio: float, window: str) -> bool:
        """Return whether its activity over a window was measured and is below a ratio."""
        return _is_below(ratio, *self.seconds[window])

    def was_unused(self, window: str) -> bool:
        """Return whether it had no activity over a window: by its seconds, and for a day by the idle clock too."""
        if window == "24h":
            return self.was_unused("1h") and (self.use.idle_for_seconds or 0.0) >= WINDOWS["24h"]
        active, measured = self.seconds[window]
        covered = measured >= COVERAGE_RATIO * self.share * WINDOWS[window]
        return covered and _is_below(UNUSED_RATIO, active, measured)


def owners_view(
    views: Sequence[DeviceView],
    windows: WindowSample,
    prices: Mapping[str, Price],
    free_shares: Mapping[str, float],
    now: float,
) -> OwnersView:
    """Return each owner's holdings and use, the node's pools, and the idle shared devices.

    Args:
        views: GPUs, each followed by its MIG instances, with their holders.
        windows: Windows that end now.
        prices: Current price by UUID of the physical GPU.
        free_shares: Result of ``Meter.free_shares``.
        now: Unix time, to check the ends of opt-outs.
    """
    parts: dict[Owner, list[_Part]] = {}
    for view in views:
        for use in view.pods:
            seconds = windows.of_holder(use.holder.key, use.holder.pod_uid)
            parts.setdefault(shown_owner(use), []).append(_Part(use, prices.get(view.gpu.uuid), seconds))
    held = [_holding(owner, of_owner, windows) for owner, of_owner in parts.items()]
    # Owners without current holders: alerts use these seconds together with pods on other nodes.
    ended = [_past(owner, windows) for owner in windows.owners() - parts.keys()]
    return OwnersView(
        owners=(*held, *(use for use in ended if use.measured_seconds)),
        pools=tuple(_pools(views, prices, free_shares)),
        shared_idle=tuple(idle for view in views if view.pods and (idle := _shared_idle(view, windows, now))),
    )


def _holding(owner: Owner, parts: Sequence[_Part], windows: WindowSample) -> OwnerUse:
    """Return the holdings and use of an owner; figures of activity leave out holders with estimated activity."""
    estimated = [part for part in parts if windows.is_estimated(part.use.holder.key)]
    judged = [part for part in parts if not windows.is_estimated(part.use.holder.key)]
    measured = [part for part in judged if part.seconds["15m"][1] > 0]
    underused = [one for one in judged if one.is_below(LOW_1H_RATIO, "1h") or one.is_below(LOW_15M_RATIO, "15m")]
    at_work = [part for part in measured if not part.is_below(ACTIVE_RATIO, "15m")]
    past = _past(owner, windows, estimated)
    unused = {name: _gpus(part for part in judged if part.was_unused(name)) for name in _JUDGED_WINDOWS}
    opt_out = max(opt_out_of(part.use) for part in parts)
    return replace(
        past,
        # If a holder has no estimated activity, windows without measured seconds are 0, not absent.
        measured_seconds={**(dict.fromkeys(WINDOWS, 0.0) if judged else {}), **past.measured_seconds},
        gpus=_gpus(parts),
        estimated_gpus=_gpus(estimated) or None,
        underused_gpus=_gpus(underused) or None,
        unused_gpus={name: gpus for name, gpus in unused.items() if gpus},
        active_gpus=_gpus(at_work) if measured else None,
        idle_for_seconds=min(
            (part.use.idle_for_seconds for part in judged if part.use.idle_for_seconds is not None), default=None
        ),
        age_seconds=max(part.use.age_seconds for part in parts),
        policy=max((policy_of(part.use) for part in parts), key=POLICIES.index),
        opt_out_until_seconds=None if opt_out == -inf else opt_out,
        cost_per_hour=_cost((part.price, part.share) for part in parts),
        idle_cost_per_hour=_cost((part.price, part.share * part.idle_ratio) for part in measured),
    )


def _past(owner: Owner, windows: WindowSample, estimated: Sequence[_Part] = ()) -> OwnerUse:
    """Return the seconds of an owner without holders with estimated activity (24h: without their last 2 h)."""
    rest: dict[str, Sums] = {}
    for name, (active, measured) in windows.of_owner(owner).items():
        gone = [part.seconds.get(name, part.seconds["2h"]) for part in estimated]
        left = measured - fsum(sums[1] for sums in gone)
        if left > DUST_SECONDS:
            rest[name] = max(0.0, min(left, active - fsum(sums[0] for sums in gone))), left
    profiles = {} if estimated else windows.profile_of(owner)
    known = {name: sums for name, sums in profiles.items() if sums[1] > DUST_SECONDS}
    by_class: dict[str, float] = {}
    used: dict[str, float] = {}
    if "1h" in known:
        _, profiled, *figures = known["1h"]
        by_class = dict(zip(Bottleneck, figures, strict=False))
        used = dict(zip((*RESOURCES, "sm", "sm_profiled"), figures[len(Bottleneck) :], strict=True))
        if used["sm_profiled"] <= DUST_SECONDS:
            del used["sm"], used["sm_profiled"]
        used["profiled"] = profiled
    return OwnerUse(
        owner=owner,
        active_seconds={name: active for name, (active, _) in rest.items()},
        measured_seconds={name: measured for name, (_, measured) in rest.items()},
        effective_seconds={name: sums[0] for name, sums in known.items()},
        profiled_seconds={name: sums[1] for name, sums in known.items()},
        bottleneck_seconds={kind: seconds for kind, seconds in by_class.items() if seconds > DUST_SECONDS},
        resource_use_seconds=used,
    )


def _gpus(parts: Iterable[_Part]) -> float:
    return fsum(part.share for part in parts)


def _cost(parts: Iterable[tuple[Price | None, float]]) -> dict[str, float]:
    """Return the price per hour of parts of GPUs, by currency; parts without a price are left out."""
    cost: dict[str, float] = {}
    for price, share in parts:
        if price is not None:
            cost[price.currency] = cost.get(price.currency, 0.0) + share * price.per_hour
    return cost


def _pools(
    views: Iterable[DeviceView], prices: Mapping[str, Price], free_shares: Mapping[str, float]
) -> Iterable[PoolUse]:
    models: dict[str, list[DeviceView]] = {}
    for view in views:
        models.setdefault(view.gpu.model, []).append(view)
    for model, of_model in models.items():
        gpus = [view.gpu.uuid for view in of_model if view.instance is None]
        known = any(view.allocation not in {None, AllocationState.UNKNOWN} for view in of_model)
        yield PoolUse(
            model=model,
            gpus=len(gpus),
            unallocated_gpus=fsum(free_shares.get(uuid, 0.0) for uuid in gpus) if known else None,
            unallocated_cost_per_hour=_cost((prices.get(uuid), free_shares.get(uuid, 0.0)) for uuid in gpus if known),
            unpriced_gpus=sum(uuid not in prices for uuid in gpus),
        )


def _shared_idle(view: DeviceView, windows: WindowSample, now: float) -> SharedIdle | None:
    """Return a device that was idle for 2 h and has only estimated activity of its holders; otherwise ``None``."""
    estimated = fsum(use.holder.share_ratio for use in view.pods if windows.is_estimated(use.holder.key))
    if not estimated or any(_is_left_alone(use, now) for use in view.pods):
        return None
    held = fsum(use.holder.share_ratio for use in view.pods)
    seconds = windows.of_shared(view.uuid)
    last, both = seconds["1h"], seconds["2h"]
    before = both[0] - last[0], both[1] - last[1]
    covered = min(last[1], before[1]) >= COVERAGE_RATIO * held * WINDOWS["1h"]
    idle = all(_is_below(ACTIVE_RATIO, *sums) for sums in (seconds["15m"], last, before))
    if not covered or not idle:
        return None
    instance = str(view.instance.gpu_instance_id) if view.instance else ""
    return SharedIdle(gpu_index=view.gpu.index, uuid=view.uuid, gpu_instance=instance, gpus=estimated)


def _is_left_alone(use: PodUse, now: float) -> bool:
    namespace = shown_owner(use).namespace
    return policy_of(use) in _LEFT_ALONE or opt_out_of(use) > now or namespace in PLATFORM_NAMESPACES


def policy_of(use: PodUse) -> str:
    """Return the class of a pod for alerts; the default class for an unknown class."""
    name = use.facts.workload_class if use.facts else ""
    return name if name in POLICIES else "default"


def opt_out_of(use: PodUse) -> float:
    """Return the Unix time until which a pod opts out of alerts; ``-inf`` without an opt-out."""
    until = use.facts.opt_out_until_seconds if use.facts else None
    return -inf if until is None else until


def shown_owner(use: PodUse) -> Owner:
    """Return the owner under which a holder is shown."""
    holder = use.holder
    owner = use.facts.owner if use.facts else Owner(namespace=holder.namespace)
    return owner_shown(owner, holder.namespace, holder.pod)


def _is_below(ratio: float, active: float, measured: float) -> bool:
    return measured > 0 and active < ratio * measured


XID_SECONDS = 600.0
"""Time for which an Xid of a program is shown, with owners that held the device within this time before it."""
CRITICAL_XID_SECONDS, ECC_SECONDS = 2400.0, 2700.0
"""Time for which a GPU is broken after the event: the duration of GPUXidCritical and GPUEccUncorrectable."""
HELD_SECONDS = 3600.0
"""Time after its last sample for which a holder still counts as an owner of a broken GPU."""
HOLDERS_LIMIT = 4096
"""Maximum number of remembered holders, ended ones included; the oldest are dropped first."""

_DRAIN_AND_RESET = 4
"""Recovery action that requires the end of running work first."""


class _Key(NamedTuple):
    """A pod on a device."""

    device_uuid: str
    namespace: str
    pod: str


class _Held(NamedTuple):
    """Owner of a pod on a device, and the monotonic time of its last sample there."""

    owner: Owner
    gpu_uuid: str
    at: float


@dataclass(slots=True)
class OwnerFaults:
    """Stores the holders of each device, and the last increase of memory errors of each GPU."""

    _held: dict[_Key, _Held] = field(default_factory=dict)
    """Holders in the order of their last sample."""
    _ecc: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Number of errors that ECC could not correct, and the instant of its last increase, by UUID of the GPU."""

    def add_to(self, shown: OwnersView, views: Sequence[DeviceView], *, now: float, steady: float) -> OwnersView:
        """Return the view of owners with the faults of their devices.

        Args:
            shown: The view without faults.
            views: GPUs and MIG instances with their holders.
            now: Unix time.
            steady: Seconds of the monotonic clock.
        """
        self._remember(views, steady)
        self._count_memory_errors(views, steady)
        broken = {view.gpu.uuid for view in views if self._is_broken(view, now, steady)}
        return replace(shown, broken_gpus=self._broken_gpus(broken), xids=tuple(self._xids(views, now, steady)))

    def _remember(self, views: Iterable[DeviceView], steady: float) -> None:
        for view in views:
            for use in view.pods:
                key = _Key(view.uuid, use.holder.namespace, use.holder.pod)
                self._held.pop(key, None)
                self._held[key] = _Held(shown_owner(use), view.gpu.uuid, steady)
        while self._held:
            oldest = next(iter(self._held))
            if len(self._held) <= HOLDERS_LIMIT and steady - self._held[oldest].at <= HELD_SECONDS:
                return
            del self._held[oldest]

    def _count_memory_errors(self, views: Iterable[DeviceView], steady: float) -> None:
        for view in views:
            count = view.values.get(Field.ECC_DBE_VOL_TOTAL) if view.instance is None else None
            if count is not None:
                before, grew_at = self._ecc.get(view.gpu.uuid, (count, -inf))
                self._ecc[view.gpu.uuid] = count, steady if count > before else grew_at

    def _is_broken(self, view: DeviceView, now: float, steady: float) -> bool:
        """Return whether a GPU does not answer or has a critical fault."""
        if any(
            now - at < CRITICAL_XID_SECONDS and xid_tier(xid) is XidTier.CRITICAL
            for xid, at in view.xid_last_seen_seconds.items()
        ):
            return True
        if view.instance is not None:
            return False
        if view.state not in {DeviceState.UP, DeviceState.UNKNOWN}:
            return True
        _, grew_at = self._ecc.get(view.gpu.uuid, (0.0, -inf))
        return (
            view.values.get(Field.ROW_REMAP_FAILURE) == 1
            or view.values.get(Field.GPU_RECOVERY_ACTION, 0) not in {0, _DRAIN_AND_RESET}
            or steady - grew_at < ECC_SECONDS
        )

    def _broken_gpus(self, broken: set[str]) -> Counter[Owner]:
        held = dict.fromkeys((held.owner, held.gpu_uuid) for held in self._held.values() if held.gpu_uuid in broken)
        return Counter(owner for owner, _ in held)

    def _xids(self, views: Iterable[DeviceView], now: float, steady: float) -> Iterator[OwnerXid]:
        for view in views:
            for xid, at in view.xid_last_seen_seconds.items():
                if now - at >= XID_SECONDS or xid_tier(xid) is not XidTier.APPLICATION:
                    continue
                for key, held in self._held.items():
                    if key.device_uuid == view.uuid and steady - held.at <= XID_SECONDS:
                        yield OwnerXid(
                            owner=held.owner,
                            gpu_index=view.gpu.index,
                            device_uuid=view.uuid,
                            namespace=key.namespace,
                            pod=key.pod,
                            xid=xid,
                            at_seconds=at,
                        )

"""Finds the owners of devices with faults: of broken GPUs, and of programs that caused errors."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from exporter.accounting.owner_figures import shown_owner
from exporter.model import DeviceState, DeviceView, Field, Owner, OwnersView, OwnerXid, XidTier, xid_tier

XID_SECONDS = 600.0
"""Time for which a program's Xid is shown, for the owners that held the device within that time before it."""
CRITICAL_XID_SECONDS, ECC_SECONDS = 2400.0, 2700.0
"""Time for which a GPU is broken after the event: the duration of GPUXidCritical and GPUEccUncorrectable."""
HELD_SECONDS = 3600.0
"""A holder within this time before is still an owner of a broken GPU: the longest usual activity window includes it."""
HOLDERS_LIMIT = 4096
"""Maximum number of remembered holders, ended ones included; the oldest are dropped first."""

_DRAIN_AND_RESET = 4
"""The recovery action that waits for running work to end."""


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
    """Remembers the holders of each device, and the time when a GPU's memory errors increased."""

    _held: dict[_Key, _Held] = field(default_factory=dict)
    """Holders in the order of their last sample."""
    _ecc_counts: dict[str, float] = field(default_factory=dict)
    """Number of errors that ECC could not correct, by UUID of the GPU."""
    _ecc_grew_at: dict[str, float] = field(default_factory=dict)

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
                if count > self._ecc_counts.get(view.gpu.uuid, count):
                    self._ecc_grew_at[view.gpu.uuid] = steady
                self._ecc_counts[view.gpu.uuid] = count

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
        grew_at = self._ecc_grew_at.get(view.gpu.uuid)
        return (
            view.values.get(Field.ROW_REMAP_FAILURE) == 1
            or view.values.get(Field.GPU_RECOVERY_ACTION, 0) not in {0, _DRAIN_AND_RESET}
            or (grew_at is not None and steady - grew_at < ECC_SECONDS)
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

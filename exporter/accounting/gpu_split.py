"""Divides each GPU among its holders; the parts of a GPU always sum to the whole."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from exporter.model.attribution import (
    UNALLOCATED,
    UNATTRIBUTED,
    AllocationState,
    Holder,
    HolderKey,
    Owner,
    ShareMode,
    is_other_pod,
)
from exporter.model.devices import DeviceState, MigInstance
from exporter.model.ledger import Account, ByState, PodAccount, ResourceProfile
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse

DUST = 1e-12
"""Shares below this are rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A part of a physical GPU with its owner; kept between samples, to know the holder before a gap."""

    device_uuid: str
    """UUID of the held device; the GPU's own for a part without a holder."""
    gpu_uuid: str
    account: Account
    namespace: str = ""
    """Namespace; empty, like pod and container, for a part without a holder."""
    pod: str = ""
    container: str = ""
    pod_uid: str | None = None
    share_ratio: float
    """Part of the physical GPU, 0..1."""
    energy_counter_millijoules: float | None = None
    """Energy counter of the GPU at that instant, the same in all of its slots; ``None`` if unknown."""
    idle_watts: float | None = None
    """Lowest power of the GPU so far, the same in all of its slots; ``None`` if unknown."""

    @property
    def key(self) -> HolderKey:
        """Container and device."""
        return self.device_uuid, self.namespace, self.pod, self.container


class GpuPart(NamedTuple):
    """A slot and its use."""

    slot: Slot
    pod: PodAccount | None
    """Account of the pod; ``None`` for a part with no holder or an unknown holder."""
    ratios: ByState
    """Parts of the physical GPU, 0..1; they sum to the slot's share."""
    estimated: bool = False
    """Whether the activity is divided by share because process data is missing."""
    profile: ResourceProfile | None = None
    """Resource profile of the device for the profiled part; ``None`` without such a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Division of one GPU into parts that sum to 1."""

    gpu_uuid: str
    unattributed: Account
    """Account of the parts with an unknown holder."""
    parts: tuple[GpuPart, ...]
    foreign_ratio: float = 0.0
    """Activity on held devices that belongs to no holder, as part of the GPU."""


def across_gap(before: Iterable[Slot], after: Division) -> Division:
    """Return the holders of a GPU's parts during a time without samples.

    A holder before and after the gap gets the smaller of its two parts. A part that was free before and after is free.
    All other parts have an unknown holder. The use of every part is unknown.
    """
    held: dict[HolderKey, Slot] = {}
    free_before = 0.0
    for slot in before:
        if slot.pod:
            held[slot.key] = slot
        elif slot.account.owner == UNALLOCATED:
            free_before += slot.share_ratio
    parts: list[GpuPart] = []
    for part in after.parts:
        slot = part.slot
        if slot.pod:
            earlier = held.get(slot.key)
            same = earlier is not None and not is_other_pod(earlier.pod_uid, slot.pod_uid)
            share = min(slot.share_ratio, earlier.share_ratio) if earlier and same else 0.0
        else:
            share = min(slot.share_ratio, free_before) if slot.account.owner == UNALLOCATED else 0.0
        if share > DUST:
            parts.append(GpuPart(replace(slot, share_ratio=share), part.pod, ByState(unknown=share)))
    lost = 1 - sum(part.ratios.unknown for part in parts)
    if lost > DUST:
        parts.append(_part_without_holder(ByState(unknown=lost), after.gpu_uuid, after.unattributed))
    return replace(after, parts=tuple(parts), foreign_ratio=0.0)


def _ratios(share: float, activity: Activity | None, part: float = 1.0) -> ByState:
    """Divide a share by state.

    Args:
        share: Part of the physical GPU.
        activity: Activity of the share's holder; ``None`` if it is unknown.
        part: Part of the device that the holder can use at most. A holder of a quarter that uses all of it is fully
            active, not idle for three quarters.
    """
    if activity is None:
        return ByState(unknown=share)
    active = share * min(1.0, max(0.0, activity.ratio / part if part > 0 else 0.0))
    if activity.profile is None:
        return ByState(unprofiled=active, idle=share - active)
    effective = min(active, share * activity.profile.effective_ratio)
    return ByState(effective=effective, ineffective=active - effective, idle=share - active)


def divide(views: Sequence[DeviceView], owner_of: Callable[[Holder], Owner]) -> list[Division]:
    """Divide every GPU of a sample.

    Args:
        views: GPUs, and their MIG instances.
        owner_of: Returns the owner of a holder.
    """
    by_gpu: dict[str, list[DeviceView]] = {}
    for view in views:
        by_gpu.setdefault(view.gpu.uuid, []).append(view)
    return [_division(of_gpu, owner_of) for of_gpu in by_gpu.values()]


def _division(views: Sequence[DeviceView], owner_of: Callable[[Holder], Owner]) -> Division:
    gpu = views[0].gpu
    up = views[0].state is DeviceState.UP
    devices = held_units(views)
    # One holder has the GPU and others have instances of it: their shares fill the GPU, so no part is free.
    overlapping = len(devices) > 1 and devices[0].instance is None
    free, lost = ByState(), ByState()
    parts: list[GpuPart] = []
    foreign = covered = 0.0
    for device in devices:
        activity = device.activity if device.state is DeviceState.UP else None
        held = [_part(device, use, owner_of) for use in device.pods]
        parts += held
        of_held = sum(part.slot.share_ratio for part in held)
        left = 0.0 if overlapping else device.share_ratio - of_held
        covered += of_held + max(left, 0.0)
        if held:
            foreign += (device.unattributed_activity_ratio or 0.0) * device.share_ratio
            if left > DUST and device.rest_is_free:  # free replicas are not in use
                free += ByState(unknown=left) if activity is None else ByState(idle=left)
            elif left > DUST:
                lost += ByState(unknown=left)
        elif device.allocation is AllocationState.UNALLOCATED:
            free += _ratios(left, activity)
        else:
            lost += _ratios(left, activity)
    if covered < 1 - DUST:  # slices without an instance, or of one that the driver does not describe
        if up and views[0].rest_is_free and not views[0].lacks_instances:
            free += ByState(idle=1 - covered)
        elif views[0].rest_is_free:
            free += ByState(unknown=1 - covered)
        else:
            lost += ByState(unknown=1 - covered)
    mode = mode_of_rest(views)
    rest = {owner: Account(owner=owner, model=gpu.model, mode=mode) for owner in (UNALLOCATED, UNATTRIBUTED)}
    parts += [
        _part_without_holder(ratios, gpu.uuid, rest[owner])
        for owner, ratios in ((UNALLOCATED, free), (UNATTRIBUTED, lost))
        if ratios.total > 0
    ]
    if covered > 1 + DUST:
        parts = [_scaled(part, 1 / covered) for part in parts]
    return Division(gpu_uuid=gpu.uuid, unattributed=rest[UNATTRIBUTED], parts=tuple(parts), foreign_ratio=foreign)


def _part(view: DeviceView, use: PodUse, owner_of: Callable[[Holder], Owner]) -> GpuPart:
    holder, gpu = use.holder, view.gpu
    slot, pod = _described(holder, owner_of(holder), (view.uuid, gpu.uuid, gpu.index, gpu.model), view.instance)
    activity = use.activity if view.state is DeviceState.UP else None
    is_estimated = activity is not None and activity.source is ActivitySource.ESTIMATED
    ratios = _ratios(slot.share_ratio, activity, holder.device_share_ratio)
    return GpuPart(slot, pod, ratios, is_estimated, activity.profile if activity else None)


@lru_cache(maxsize=1024)
def _described(
    holder: Holder, owner: Owner, device: tuple[str, str, int, str], instance: MigInstance | None
) -> tuple[Slot, PodAccount]:
    """Return the slot and account of a holder, the same objects while nothing changes."""
    uuid, gpu_uuid, gpu_index, model = device
    slot = Slot(
        device_uuid=uuid,
        gpu_uuid=gpu_uuid,
        account=Account(owner=owner, model=model, mode=holder.mode),
        namespace=holder.namespace,
        pod=holder.pod,
        container=holder.container,
        pod_uid=holder.pod_uid,
        share_ratio=holder.share_ratio,
    )
    pod = PodAccount(
        device_uuid=uuid,
        gpu_index=gpu_index,
        gpu_uuid=gpu_uuid,
        gpu_instance=str(instance.gpu_instance_id) if instance else "",
        mig_profile=instance.profile if instance else "",
        model=model,
        namespace=holder.namespace,
        pod=holder.pod,
        container=holder.container,
        pod_uid=holder.pod_uid,
    )
    return slot, pod


def _part_without_holder(ratios: ByState, gpu_uuid: str, account: Account) -> GpuPart:
    slot = Slot(device_uuid=gpu_uuid, gpu_uuid=gpu_uuid, account=account, share_ratio=ratios.total)
    return GpuPart(slot, None, ratios)


def _scaled(part: GpuPart, factor: float) -> GpuPart:
    slot = replace(part.slot, share_ratio=part.slot.share_ratio * factor)
    return part._replace(slot=slot, ratios=part.ratios.scaled(factor))


def held_units(views: Sequence[DeviceView]) -> list[DeviceView]:
    """Return the allocatable devices of one GPU: its instances, otherwise the GPU itself.

    Without a MIG strategy, a holder can have a partitioned GPU itself. It then holds the whole GPU, and an instance
    counts only if it is held too.
    """
    instances = [view for view in views if view.instance]
    whole = [view for view in views if not view.instance]
    if not instances:
        return whole
    if any(view.pods for view in whole):
        return whole + [view for view in instances if view.pods]
    return instances


def mode_of_rest(views: Iterable[DeviceView]) -> ShareMode:
    """Return the share mode of a GPU's parts without a holder."""
    mode = ShareMode.EXCLUSIVE
    for view in views:
        if view.instance:
            return ShareMode.MIG
        if any(use.holder.mode is ShareMode.SHARED for use in view.pods):
            mode = ShareMode.SHARED
    return mode

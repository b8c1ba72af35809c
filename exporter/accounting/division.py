"""Divides GPUs among their holders, such that the parts of every GPU are all of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from exporter.accounting.slots import DUST, Division, Part, Slot, SlotKey
from exporter.model import (
    UNALLOCATED,
    UNATTRIBUTED,
    Account,
    ActivitySource,
    AllocationState,
    DeviceState,
    DeviceView,
    Holder,
    Owner,
    PodAccount,
    PodUse,
    ShareMode,
)


@dataclass(slots=True)
class _Remainder:
    """What nobody is known to hold, of one kind."""

    active: float = 0.0
    idle: float = 0.0
    unknown: float = 0.0

    def add(self, share: float, activity_ratio: float | None) -> None:
        if activity_ratio is None:
            self.unknown += share
        else:
            self.active += share * activity_ratio
            self.idle += share - share * activity_ratio

    @property
    def share(self) -> float:
        return self.active + self.idle + self.unknown

    def part(self, gpu_uuid: str, account: Account) -> Part:
        slot = Slot(device_uuid=gpu_uuid, gpu_uuid=gpu_uuid, account=account, share_ratio=self.share)
        return Part(slot=slot, active_ratio=self.active, idle_ratio=self.idle, unknown_ratio=self.unknown)


@dataclass(slots=True)
class Divider:
    """Divides GPUs among their holders; remembers the holders so that the same ones are not described anew."""

    owner_of: Callable[[Holder], Owner]
    _known: dict[SlotKey, tuple[Holder, Slot, PodAccount]] = field(default_factory=dict)

    def divide(self, views: Sequence[DeviceView]) -> list[Division]:
        """Divide every GPU of a sample.

        Args:
            views: GPUs, and MIG instances beside their GPU.
        """
        by_gpu: dict[str, list[DeviceView]] = {}
        for view in views:
            by_gpu.setdefault(view.gpu.uuid, []).append(view)
        divisions = [self._division(of_gpu) for of_gpu in by_gpu.values()]
        if len(self._known) > sum(len(division.parts) for division in divisions):
            here = {part.slot.key for division in divisions for part in division.parts}
            for key in self._known.keys() - here:
                del self._known[key]
        return divisions

    def _division(self, views: Sequence[DeviceView]) -> Division:
        gpu = views[0].gpu
        up = views[0].state is DeviceState.UP
        devices = held_units(views)
        # Somebody holds the GPU, others instances of it: their shares were made to fit and leave nothing free.
        overlapping = len(devices) > 1 and devices[0].instance is None
        free, lost = _Remainder(), _Remainder()
        parts: list[Part] = []
        foreign = covered = 0.0
        for device in devices:
            ratio = device.activity.ratio if device.activity and device.state is DeviceState.UP else None
            held = [self._part(device, use) for use in device.pods]
            parts += held
            of_held = sum(part.slot.share_ratio for part in held)
            left = 0.0 if overlapping else device.share_ratio - of_held
            covered += of_held + max(left, 0.0)
            if held:
                foreign += (device.unattributed_activity_ratio or 0.0) * device.share_ratio
                if left > DUST and device.rest_is_free:  # free replicas: nobody is there to use them
                    free.add(left, None if ratio is None else 0.0)
                elif left > DUST:
                    lost.add(left, None)
            elif device.allocation is AllocationState.UNALLOCATED:
                free.add(left, ratio)
            else:
                lost.add(left, ratio)
        if covered < 1 - DUST:  # slices of no instance, or of one that the driver does not describe
            hides = views[0].lacks_instances
            rest = lost if hides and not views[0].rest_is_free else free
            rest.add(1 - covered, 0.0 if up and not hides else None)
        mode = mode_of_rest(views)
        parts += [
            rest.part(gpu.uuid, Account(owner=owner, model=gpu.model, mode=mode))
            for owner, rest in ((UNALLOCATED, free), (UNATTRIBUTED, lost))
            if rest.share > 0
        ]
        if covered > 1 + DUST:
            parts = [part.scaled(1 / covered) for part in parts]
        return Division(gpu_uuid=gpu.uuid, model=gpu.model, mode=mode, parts=tuple(parts), foreign_ratio=foreign)

    def _part(self, view: DeviceView, use: PodUse) -> Part:
        holder = use.holder
        slot, pod = self._describe(view, holder)
        share = slot.share_ratio
        if use.activity is None or view.state is not DeviceState.UP:
            return Part(slot=slot, pod=pod, unknown_ratio=share)
        # All of a quarter is all that a sharer can use: it is wholly active, not idle for three quarters.
        of_its_share = use.activity.ratio / holder.device_share_ratio if holder.device_share_ratio > 0 else 0.0
        active = share * min(1.0, max(0.0, of_its_share))
        estimated = use.activity.source is ActivitySource.ESTIMATED
        return Part(slot=slot, pod=pod, active_ratio=active, idle_ratio=share - active, estimated=estimated)

    def _describe(self, view: DeviceView, holder: Holder) -> tuple[Slot, PodAccount]:
        key = (view.uuid, holder.namespace, holder.pod, holder.container)
        owner = self.owner_of(holder)
        known = self._known.get(key)
        if known is not None:
            of_holder, slot, pod = known
            if of_holder == holder and slot.account.owner == owner and pod.gpu_index == view.gpu.index:
                return slot, pod
        slot = Slot(
            device_uuid=view.uuid,
            gpu_uuid=view.gpu.uuid,
            account=Account(owner=owner, model=view.gpu.model, mode=holder.mode),
            namespace=holder.namespace,
            pod=holder.pod,
            container=holder.container,
            pod_uid=holder.pod_uid,
            share_ratio=holder.share_ratio,
        )
        pod = PodAccount(
            device_uuid=view.uuid,
            gpu_index=view.gpu.index,
            gpu_uuid=view.gpu.uuid,
            gpu_instance=str(view.instance.gpu_instance_id) if view.instance else "",
            mig_profile=view.instance.profile if view.instance else "",
            model=view.gpu.model,
            namespace=holder.namespace,
            pod=holder.pod,
            container=holder.container,
            pod_uid=holder.pod_uid,
        )
        self._known[key] = (holder, slot, pod)
        return slot, pod


def held_units(views: Sequence[DeviceView]) -> list[DeviceView]:
    """Choose what of one GPU can be held: its instances, else itself.

    Where somebody holds a partitioned GPU itself (no MIG strategy), he has all of it, and an instance counts only if
    it is held besides.
    """
    instances = [view for view in views if view.instance]
    whole = [view for view in views if not view.instance]
    if not instances:
        return whole
    if any(view.pods for view in whole):
        return whole + [view for view in instances if view.pods]
    return instances


def mode_of_rest(views: Iterable[DeviceView]) -> ShareMode:
    """Say under which mode what nobody holds of one GPU is entered."""
    mode = ShareMode.EXCLUSIVE
    for view in views:
        if view.instance:
            return ShareMode.MIG
        if any(use.holder.mode is ShareMode.SHARED for use in view.pods):
            mode = ShareMode.SHARED
    return mode

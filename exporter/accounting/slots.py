"""Parts of a GPU and whose they are: at one instant, and through a time in which nobody looked."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from exporter.model import UNALLOCATED, UNATTRIBUTED, Account, Owner, PodAccount, ShareMode

DUST = 1e-12
"""Shares below this are rounding."""

SlotKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A part of a physical GPU and whose it is; what is kept of an instant to know who held before a gap.

    ``dataclasses.asdict`` makes it ready for JSON, ``slot_of`` reads that back.
    """

    device_uuid: str
    """Of what is held; the GPU's own where nobody holds the part."""
    gpu_uuid: str
    account: Account
    namespace: str = ""
    """Empty, as pod and container, where nobody holds the part."""
    pod: str = ""
    container: str = ""
    pod_uid: str | None = None
    share_ratio: float
    """Part of the physical GPU, 0..1."""
    energy_counter_millijoules: float | None = None
    """The GPU's energy counter at that instant, the same in all of its slots."""
    idle_watts: float | None = None
    """The GPU's lowest power so far, the same in all of its slots."""

    @property
    def key(self) -> SlotKey:
        """What must be the same for the same container to hold the same device."""
        return self.device_uuid, self.namespace, self.pod, self.container


def slot_of(data: Mapping[str, Any]) -> Slot:
    """Read a slot that ``dataclasses.asdict`` wrote.

    Raises:
        KeyError, TypeError, ValueError: It is not one.
    """
    account = data["account"]
    owner, model = Owner(**account["owner"]), account["model"]
    slot = Slot(**{**data, "account": Account(owner=owner, model=model, mode=ShareMode(account["mode"]))})
    of_owner = (owner.namespace, owner.kind, owner.name, owner.team, owner.cost_labels, owner.pod_uid)
    texts: tuple[object, ...] = (*of_owner, model, *slot.key, slot.gpu_uuid, slot.pod_uid or "")
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"not the texts of a slot: {texts!r}")
    figures: tuple[object, ...] = (slot.share_ratio, slot.energy_counter_millijoules or 0.0, slot.idle_watts or 0.0)
    if not all(isinstance(figure, int | float) and 0 <= figure < math.inf for figure in figures):
        raise ValueError(f"not the figures of a slot: {figures!r}")
    return slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A slot and how it is used; the three shares sum to the slot's."""

    slot: Slot
    pod: PodAccount | None = None
    """``None`` where nobody holds the part or it is not known who does."""
    active_ratio: float = 0.0
    idle_ratio: float = 0.0
    unknown_ratio: float = 0.0
    estimated: bool = False
    """Whether the activity is divided by share, for want of process data."""

    def scaled(self, factor: float) -> "Part":
        """Return the same part made larger or smaller."""
        return replace(
            self,
            slot=replace(self.slot, share_ratio=self.slot.share_ratio * factor),
            active_ratio=self.active_ratio * factor,
            idle_ratio=self.idle_ratio * factor,
            unknown_ratio=self.unknown_ratio * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """All of one GPU: its parts sum to 1."""

    gpu_uuid: str
    model: str
    mode: ShareMode
    """Of what nobody holds."""
    parts: tuple[Part, ...]
    foreign_ratio: float = 0.0
    """Activity on held devices that belongs to no holder, as part of the GPU."""


def across_gap(before: Iterable[Slot], after: Division) -> Division:
    """Say who had which part of a GPU through a time in which nobody looked.

    Whoever held before and after had the smaller of the two parts throughout; what nobody held before and after was
    free. Of everything else it is not known whose it was, and of nothing how it was used.
    """
    held: dict[SlotKey, Slot] = {}
    free_before = 0.0
    for slot in before:
        if slot.pod:
            held[slot.key] = slot
        elif slot.account.owner == UNALLOCATED:
            free_before += slot.share_ratio
    parts: list[Part] = []
    for part in after.parts:
        if part.pod:
            earlier = held.get(part.slot.key)
            same = earlier is not None and not (
                earlier.pod_uid and part.pod.pod_uid and earlier.pod_uid != part.pod.pod_uid
            )
            share = min(part.slot.share_ratio, earlier.share_ratio) if earlier and same else 0.0
        else:
            share = min(part.slot.share_ratio, free_before) if part.slot.account.owner == UNALLOCATED else 0.0
        if share > DUST:
            parts.append(
                Part(slot=replace(part.slot, share_ratio=share), pod=part.pod, unknown_ratio=share),
            )
    lost = 1 - sum(part.unknown_ratio for part in parts)
    if lost > DUST:
        account = Account(owner=UNATTRIBUTED, model=after.model, mode=after.mode)
        slot = Slot(device_uuid=after.gpu_uuid, gpu_uuid=after.gpu_uuid, account=account, share_ratio=lost)
        parts.append(Part(slot=slot, unknown_ratio=lost))
    return replace(after, parts=tuple(parts), foreign_ratio=0.0)

"""How many physical GPUs the kubelet advertises and has given away, whether the driver sees them or not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from exporter.attribution import dra
from exporter.attribution.device_ids import IdKind, ParsedId
from exporter.attribution.entries import Entry
from exporter.attribution.evidence import Evidence
from exporter.attribution.inventory import Inventory
from exporter.attribution.shares import DRA
from exporter.model import Unresolved

_UNDECIDED = frozenset({"claim_pending", "reservation_pending", "needs_annotation", "bad_annotation"})
"""Reasons why what an entry names may not be what is held."""

_PASSED_THROUGH = "dra_passed_through"
"""To a virtual machine: the driver cannot see it, and nothing is wrong with that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Numbers of physical GPUs; ``None`` where it cannot be told."""

    advertised: int | None
    allocated: int | None
    expected: int | None
    """Advertised or allocated; ``None`` too where nothing is advertised: a plugin may still be about to register."""
    unseen_instances: bool
    """Whether a MIG instance is advertised or allocated that no seen GPU has; its UUID does not name its GPU."""

    @classmethod
    def of(
        cls,
        advertised: Sequence[tuple[str, ParsedId]] | None,
        evidence: Evidence,
        entries: Sequence[Entry],
        unresolved: dict[Unresolved, Entry],
        inventory: Inventory,
    ) -> Self:
        """Count.

        Args:
            advertised: Resource and id of what the kubelet advertises, ``None`` where it cannot tell.
            evidence: For the ResourceSlices.
            entries: What containers are listed with.
            unresolved: Of those, what was not found, with the reasons.
            inventory: The devices that are seen.
        """
        physical = _advertised(advertised, evidence, entries, inventory)
        undecided = any(one.reason in _UNDECIDED for one in unresolved)
        named = _physical((entry.parsed for entry in entries if entry.parsed.reason != _PASSED_THROUGH), inventory)
        of_kubelet = [*(parsed for _, parsed in advertised or ()), *(entry.parsed for entry in entries)]
        return cls(
            unseen_instances=any(one.kind is IdKind.MIG and inventory.physical(one) is None for one in of_kubelet),
            advertised=None if physical is None else len(physical),
            allocated=None if undecided or named is None else len(named),
            expected=len(physical | named) if physical and named is not None else None,
        )


def _advertised(
    advertised: Sequence[tuple[str, ParsedId]] | None,
    evidence: Evidence,
    entries: Sequence[Entry],
    inventory: Inventory,
) -> set[str] | None:
    slices = dra.advertised(evidence)
    if slices is None and (advertised is None or any(entry.source == DRA for entry in entries)):
        return None  # DRA devices are never among what the kubelet itself advertises
    of_plugins = [parsed for _, parsed in advertised or ()]
    of_slices = [
        ParsedId(kind=IdKind.GPU, uuid=device.parent_uuid or device.uuid)
        if device.kind == "gpu" or device.parent_uuid
        else ParsedId(kind=IdKind.MIG, uuid=device.uuid)
        for device in slices or ()
    ]
    return _physical([*of_plugins, *of_slices], inventory)


def _physical(parsed_ids: Iterable[ParsedId], inventory: Inventory) -> set[str] | None:
    physical: set[str] = set()
    for parsed in parsed_ids:
        if parsed.kind is IdKind.ALL:
            physical.update(inventory.gpus)
        elif gpu := inventory.physical(parsed):
            physical.add(gpu)
        else:
            return None
    return physical

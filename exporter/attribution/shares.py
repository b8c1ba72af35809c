"""Divides a device that several containers hold into their shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from exporter.attribution.device_ids import IdKind, ParsedId, ReplicaKey
from exporter.attribution.inventory import Inventory
from exporter.model.attribution import Holder, ShareMode

DEVICE_PLUGIN = "device-plugin"
DRA = "dra"
"""Source of a holder that the kubelet lists with a claim."""
ANNOTATION = "annotation"
"""Source of a holder that only the annotations of its pod name."""
SLURM, SLURM_PROCESS, HOST = "slurm", "slurm-process", "host"
"""Resource names of devices outside Kubernetes."""
SOURCES: Mapping[str, str] = {SLURM: "job-mapping", SLURM_PROCESS: "process", HOST: "process"}
"""Sources of holders outside Kubernetes, by resource name."""

WHOLE_WITHIN_ROUNDING = 1.0 + 1e-9

MIB = 1 << 20

HolderName = tuple[str, str, str]
"""Namespace, pod, container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Part of a device that a pod has requested and received."""

    memory_bytes: int = 0
    """Part of the memory of the GPU in bytes; 0 is unlimited, like a ratio of 0."""
    ratio: float = 0.0

    def part(self, device_bytes: int | None) -> tuple[float, bool] | None:
        """Return the part of the device, 0..1, and whether it is estimated; ``None`` if unknown.

        Args:
            device_bytes: Memory of the GPU in bytes; ``None`` if the driver does not report it.
        """
        lacks_whole = self.memory_bytes > 0 and not device_bytes
        if lacks_whole and self.ratio <= 0:
            return None
        part = max(self.memory_bytes / device_bytes if device_bytes else 0.0, self.ratio)
        if part <= 0:  # no limit
            return 1.0, True
        return min(part, 1.0), lacks_whole or part > WHOLE_WITHIN_ROUNDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One device of one container, before the search for the device."""

    holder: HolderName
    resource: str
    source: str
    device_id: str
    """Text that is shown if the id cannot be resolved."""
    parsed: ParsedId
    share_id: str | None = None
    claim: str = ""
    """DRA claim; containers with the same claim hold its devices together."""
    declared: Declared | None = None
    """Declared part; ``None`` is the whole device, or a replica if the id has a replica number."""
    is_placeholder: bool = False
    """Whether the held device may differ from the device that the id names."""

    @property
    def is_replica(self) -> bool:
        """Whether the entry is a replica of a device."""
        return self.parsed.replica is not None and self.declared is None


def undecided(parsed: ParsedId, reason: str) -> ParsedId:
    """Return a parsed id without its device, with a reason."""
    return replace(parsed, kind=IdKind.UNKNOWN, reason=reason)


class ReplicaCount(NamedTuple):
    """Number of replicas that a device is divided into."""

    number: int
    is_known: bool
    """Whether the kubelet advertises or has advertised it; otherwise it is from other devices or held replicas."""


ReplicaCounts = Mapping[ReplicaKey, ReplicaCount]
"""Counts by device UUID and resource; an unknown count is absent."""


def replica_counts(
    advertised: Sequence[tuple[str, ParsedId]] | None,
    entries: Sequence[Entry],
    inventory: Inventory,
    remembered: Mapping[ReplicaKey, int],
) -> ReplicaCounts:
    """Count the replicas of each device.

    The kubelet does not advertise an unhealthy device, or a device whose plugin restarts, so its last count is used. If
    that is unknown, the count is that of the other devices of the resource, if these agree: device plugins divide all
    devices of a resource alike. An old kubelet advertises no devices: the held replica numbers then give a lower bound.

    Args:
        advertised: Resource and id of each device of ``GetAllocatableResources``; ``None`` for a kubelet without it.
        entries: All devices that containers hold.
        inventory: The devices of the node; counts of other devices are dropped unless they are held.
        remembered: Earlier advertised counts, by (device UUID, resource).
    """
    numbers = inventory.replicas((one.resource, one.parsed) for one in entries if one.declared is None)
    remembered = {key: count for key, count in remembered.items() if key in numbers or inventory.may_have(key[0])}
    # Numbers of replicas start at 0, and a plugin may report a single replica of a GPU as unhealthy.
    now = {key: max(seen) + 1 for key, seen in inventory.replicas(advertised or ()).items()}
    others: dict[str, set[int]] = {}
    for (_, resource), count in now.items():
        others.setdefault(resource, set()).add(count)
    if advertised is None:
        for (_, resource), seen in numbers.items():
            others[resource] = {max(*others.get(resource, ()), max(seen) + 1, 1)}
    counts: dict[ReplicaKey, ReplicaCount] = {}
    for (uuid, resource), seen in numbers.items():
        alike = others.get(resource, set())
        if len(alike) == 1 and max(seen) < max(alike):
            counts[uuid, resource] = ReplicaCount(max(alike), is_known=False)
    for key, number in {**remembered, **now}.items():
        counts[key] = ReplicaCount(max(number, len(numbers.get(key, ()))), is_known=True)
    return counts


class _Part(NamedTuple):
    """Part of the device that one entry has."""

    ratio: float | None
    """Part of the device, 0..1; ``None`` for an equal part of the rest that no entry declares."""
    is_certain: bool
    is_shared: bool
    """Whether other holders may have the rest."""


def divide(uuid: str, entries: Sequence[Entry], counts: ReplicaCounts, inventory: Inventory) -> list[Holder]:
    """Divide one device among its holders.

    Args:
        uuid: The device.
        entries: All entries that resolve to the device.
        counts: Result of ``replica_counts``, with a number for each replica among ``entries``.
        inventory: The devices of the node.

    Returns:
        One holder per container, even if it holds the device by several resources; the ratios sum to at most 1.
    """
    device = inventory.parts[uuid]
    grouped: dict[HolderName, list[tuple[Entry, _Part]]] = {}
    for entry in entries:
        part = _part(uuid, entry, counts, inventory.memory_bytes(uuid))
        grouped.setdefault(entry.holder, []).append((entry, part))
    weights = _weights(grouped)
    excess = max(sum(weights.values()), 1.0)
    fitted = device.estimated or excess > WHOLE_WITHIN_ROUNDING
    whole = ShareMode.MIG if uuid in inventory.instances else ShareMode.EXCLUSIVE
    holders = []
    for name, group in grouped.items():
        namespace, pod, container = name
        first, ratio = group[0][0], weights[name] / excess
        # A replica of an instance has the mode shared, not mig.
        shared = len(grouped) > 1 or any(part.is_shared for _, part in group)
        holder = Holder(
            namespace=namespace,
            pod=pod,
            container=container,
            device_uuid=uuid,
            mode=ShareMode.SHARED if shared else whole,
            resource=first.resource,
            source=first.source,
            share_ratio=device.ratio * ratio,
            device_share_ratio=ratio,
            share_estimated=fitted or not all(part.is_certain for _, part in group),
            replicas=len({(one.resource, one.parsed.replica, one.claim, one.share_id) for one, _ in group}),
        )
        holders.append(holder)
    return holders


def _part(uuid: str, entry: Entry, counts: ReplicaCounts, device_bytes: int | None) -> _Part:
    declared = entry.declared and entry.declared.part(device_bytes)
    if declared:
        ratio, estimated = declared
        return _Part(ratio, is_certain=not estimated, is_shared=ratio * WHOLE_WITHIN_ROUNDING < 1)
    if entry.share_id is not None:  # the kubelet does not report the part of a share in the device's capacity
        return _Part(None, is_certain=False, is_shared=True)
    count = counts.get((uuid, entry.resource))
    if entry.parsed.replica is None or count is None:
        return _Part(1.0, is_certain=True, is_shared=False)
    return _Part(1 / count.number, is_certain=count.is_known, is_shared=True)


def _weights(grouped: Mapping[HolderName, Sequence[tuple[Entry, _Part]]]) -> dict[HolderName, float]:
    """Return the part of each holder before it is limited to the device; the rest is divided among undeclared parts."""
    users: dict[tuple[str, str | None], set[HolderName]] = {}
    for holder, group in grouped.items():
        for entry, _ in group:
            users.setdefault((entry.claim, entry.share_id), set()).add(holder)
    weights: dict[HolderName, float] = {}
    open_shares: dict[HolderName, float] = {}
    for holder, group in grouped.items():
        weights[holder] = 0.0
        for entry, part in group:
            sharers = len(users[entry.claim, entry.share_id]) if entry.claim else 1
            if part.ratio is None:
                open_shares[holder] = open_shares.get(holder, 0.0) + 1 / sharers
            else:
                weights[holder] += part.ratio / sharers
        weights[holder] = min(weights[holder], 1.0)
    left = max(1 - sum(weights.values()), 0.0) or 1.0
    for holder, share in open_shares.items():
        weights[holder] += share * left / sum(open_shares.values())
    return weights

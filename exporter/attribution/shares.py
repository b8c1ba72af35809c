"""Divides a device that several containers hold into their shares."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from exporter.attribution.device_ids import IdKind, ParsedId, ReplicaKey
from exporter.model import Holder, ShareMode

DRA = "dra"
"""Source of a holder that the kubelet lists with a claim."""

WHOLE_WITHIN_ROUNDING = 1.0 + 1e-9

Replica = tuple[str, str, int]
"""Device UUID, resource, number of the replica."""

ANNOTATION = "annotation"
"""Source of a holder that only its pod's annotations name."""

MIB = 1 << 20

HolderName = tuple[str, str, str]
"""Namespace, pod, container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The part of a device that a pod requested and received."""

    memory_bytes: int = 0
    """Memory in bytes; 0 is unlimited, as is a ratio of 0."""
    of_bytes: int | None = None
    """The whole in bytes that ``memory_bytes`` is a part of; ``None`` is the GPU's memory."""
    ratio: float = 0.0

    def is_of_unknown_whole(self, device_bytes: int | None) -> bool:
        """Return whether only memory was declared and the GPU's memory size is not known."""
        return self.memory_bytes > 0 and self.ratio <= 0 and not (self.of_bytes or device_bytes)

    def part(self, device_bytes: int | None) -> tuple[float, bool]:
        """Return the part of the device, 0..1, and whether it is estimated.

        Args:
            device_bytes: Memory of the GPU in bytes, ``None`` if the driver does not report it.
        """
        whole = self.of_bytes or device_bytes
        part = max(self.memory_bytes / whole if whole else 0.0, self.ratio)
        if part <= 0:  # no limit, or an unknown whole
            return 1.0, True
        return min(part, 1.0), part > WHOLE_WITHIN_ROUNDING or (self.memory_bytes > 0 and not whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One device of one container, before the device is resolved."""

    holder: HolderName
    resource: str
    source: str
    device_id: str
    """Text that is shown where the id cannot be resolved."""
    parsed: ParsedId
    share_id: str | None = None
    claim: str = ""
    """DRA: containers that name the same claim hold its devices together."""
    declared: Declared | None = None
    """The declared part; ``None`` is the whole device, or a replica if the id names one."""
    is_placeholder: bool = False
    """Whether the held device may differ from the device that the id names."""

    @property
    def is_replica(self) -> bool:
        """Whether this is one of the replicas that a device is divided into."""
        return self.parsed.replica is not None and self.declared is None


def undecided(parsed: ParsedId, reason: str) -> ParsedId:
    """Resolve an id to devices; on failure record the reason."""
    return replace(parsed, kind=IdKind.UNKNOWN, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Numbers of replicas that devices are divided into."""

    known: Mapping[ReplicaKey, int]
    """Counts that the kubelet advertises or once advertised."""
    likely: Mapping[ReplicaKey, int]
    """Counts that it never advertised, derived from those of other devices or from the held replicas."""
    told: Mapping[ReplicaKey, int]
    """Last advertised counts, whatever is held; they are saved."""
    current: frozenset[ReplicaKey]
    """Devices with replicas that are advertised or held now."""

    def of(self, uuid: str, resource: str) -> int | None:
        """Return the number of a device's replicas; ``None`` if it is unknown."""
        return self.known.get((uuid, resource)) or self.likely.get((uuid, resource))


def replica_counts(
    advertised: Iterable[Replica] | None, held: Iterable[Replica], remembered: Mapping[ReplicaKey, int]
) -> ReplicaCounts:
    """Count the replicas of each device.

    A device that is unhealthy, or with a restarting plugin, is not advertised: its last count is remembered. If that is
    unknown too, the count is that of the resource's other devices if those agree: device plugins divide all devices
    of a resource alike. An old kubelet advertises none: there the held replica numbers give a lower bound.

    Args:
        advertised: (device UUID, resource, replica number) of ``GetAllocatableResources``; ``None`` for a kubelet
            without that call.
        held: The same for the replicas that containers hold.
        remembered: Counts advertised before, by (device UUID, resource).
    """
    numbers = _numbers(held)
    # Replicas are numbered from 0, and a plugin may report a single replica of a GPU as unhealthy.
    now = {key: max(seen) + 1 for key, seen in _numbers(advertised or ()).items()}
    latest = {**remembered, **now}
    others: dict[str, set[int]] = {}
    for (_, resource), count in now.items():
        others.setdefault(resource, set()).add(count)
    if advertised is None:
        for (_, resource), seen in numbers.items():
            others[resource] = {max(*others.get(resource, ()), max(seen) + 1, 1)}
    likely = {
        (uuid, resource): max(others[resource])
        for (uuid, resource), seen in numbers.items()
        if len(others.get(resource, ())) == 1 and max(seen) < max(others[resource])
    }
    known = {key: max(count, len(numbers.get(key, ()))) for key, count in latest.items()}
    return ReplicaCounts(known=known, likely=likely, told=latest, current=frozenset({*now, *numbers}))


def _numbers(replicas: Iterable[Replica]) -> dict[ReplicaKey, set[int]]:
    numbers: dict[ReplicaKey, set[int]] = {}
    for uuid, resource, number in replicas:
        numbers.setdefault((uuid, resource), set()).add(number)
    return numbers


_DeclaredParts = Mapping[Entry, tuple[float, bool]]
"""Declared part of the device, and whether it is estimated."""


def divide(
    uuid: str, entries: Sequence[Entry], counts: ReplicaCounts, *, device_bytes: int | None, is_instance: bool
) -> tuple[Holder, ...]:
    """Divide one device among the containers that hold it.

    Args:
        uuid: The device.
        entries: All entries that resolve to the device.
        counts: Result of ``replica_counts``, with a number for each replica among ``entries``.
        device_bytes: Memory of the GPU in bytes, ``None`` if the driver does not report it.
        is_instance: Whether the device is a MIG instance.

    Returns:
        One holder per container, even if it holds the device by several resources, as if the device were a whole GPU;
        the ratios sum to at most 1.
    """
    grouped: dict[HolderName, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.holder, []).append(entry)
    declared = {entry: entry.declared.part(device_bytes) for entry in entries if entry.declared}
    weights = _weights(uuid, grouped, counts, declared)
    excess = max(sum(weights.values()), 1.0)
    fitted = excess > WHOLE_WITHIN_ROUNDING
    holders = []
    for (namespace, pod, container), group in grouped.items():
        ratio = weights[namespace, pod, container] / excess
        # A replica of an instance is both an instance and shared; shared takes precedence.
        shared = len(grouped) > 1 or any(_is_share(entry, declared) for entry in group)
        mode = ShareMode.SHARED if shared else ShareMode.MIG if is_instance else ShareMode.EXCLUSIVE
        holder = Holder(
            namespace=namespace,
            pod=pod,
            container=container,
            device_uuid=uuid,
            mode=mode,
            resource=group[0].resource,
            source=group[0].source,
            share_ratio=ratio,
            device_share_ratio=ratio,
            share_estimated=fitted or not all(_is_certain(uuid, entry, counts, declared) for entry in group),
            replicas=len({(one.resource, one.parsed.replica, one.claim, one.share_id) for one in group}),
        )
        holders.append(holder)
    return tuple(holders)


def _weights(
    uuid: str, grouped: Mapping[HolderName, Sequence[Entry]], counts: ReplicaCounts, declared: _DeclaredParts
) -> dict[HolderName, float]:
    """Return each holder's part before it is fitted into the device; holders without a declared part share the rest."""
    users: dict[tuple[str, str | None], set[HolderName]] = {}
    for holder, group in grouped.items():
        for entry in group:
            if entry.claim:
                users.setdefault((entry.claim, entry.share_id), set()).add(holder)
    weights: dict[HolderName, float] = {}
    open_shares: dict[HolderName, float] = {}
    for holder, group in grouped.items():
        replicas = {(entry.resource, entry.parsed.replica) for entry in group if entry.is_replica}
        weights[holder] = sum(1 / number for name, _ in replicas if (number := counts.of(uuid, name)))
        for entry in group:
            sharers = len(users.get((entry.claim, entry.share_id), ())) or 1
            if entry.declared or (entry.parsed.replica is None and entry.share_id is None):
                weights[holder] += (declared[entry][0] if entry.declared else 1.0) / sharers
            elif entry.parsed.replica is None:
                open_shares[holder] = open_shares.get(holder, 0.0) + 1 / sharers
        weights[holder] = min(weights[holder], 1.0)
    left = max(1 - sum(weights.values()), 0.0) or 1.0
    for holder, share in open_shares.items():
        weights[holder] += share * left / sum(open_shares.values())
    return weights


def _is_certain(uuid: str, entry: Entry, counts: ReplicaCounts, declared: _DeclaredParts) -> bool:
    if entry.declared:
        return not declared[entry][1]
    if entry.share_id is not None:
        return False  # the kubelet's answer does not contain a share's part of the device's capacity
    return entry.parsed.replica is None or (uuid, entry.resource) in counts.known


def _is_share(entry: Entry, declared: _DeclaredParts) -> bool:
    if entry.declared:
        return declared[entry][0] * WHOLE_WITHIN_ROUNDING < 1
    return entry.parsed.replica is not None or entry.share_id is not None

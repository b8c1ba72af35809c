"""How a device that several containers hold is divided among them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.model import ShareMode

WHOLE_WITHIN_ROUNDING = 1.0 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One id of one container that resolves to one device."""

    holder: tuple[str, str, str]
    """Namespace, pod, container."""
    resource: str
    source: str
    replica: int | None
    share_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one container holds of one device, all its replicas together."""

    holder: tuple[str, str, str]
    resource: str
    source: str
    ratio: float
    """Of the device, 0..1."""
    replicas: int
    shared: bool
    estimated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """How many replicas devices are divided into."""

    known: Mapping[tuple[str, str], int]
    """(device UUID, resource) to the number of replicas, where the kubelet advertises them."""
    least: Mapping[str, int]
    """Resource to the smallest number that explains what is seen anywhere on the node."""


def replica_counts(advertised: Iterable[tuple[str, str, int]], claims: Mapping[str, Sequence[Claim]]) -> ReplicaCounts:
    """Count the replicas of each device.

    An unhealthy device is not advertised, and an old kubelet advertises none. There the number is estimated: replicas
    are numbered from 0, and device plugins divide all devices of a resource alike.

    Args:
        advertised: (device UUID, resource, replica number) of ``GetAllocatableResources``.
        claims: What containers hold, by device UUID.
    """
    seen: dict[tuple[str, str], set[int]] = {}
    for uuid, resource, replica in advertised:
        seen.setdefault((uuid, resource), set()).add(replica)
    advertised_keys = set(seen)
    for uuid, claims_of in claims.items():
        for claim in claims_of:
            if claim.replica is not None:
                seen.setdefault((uuid, claim.resource), set()).add(claim.replica)
    least: dict[str, int] = {}
    for (uuid, resource), replicas in seen.items():
        count = len(replicas) if (uuid, resource) in advertised_keys else max(len(replicas), max(replicas) + 1)
        least[resource] = max(least.get(resource, 0), count)
    return ReplicaCounts(known={key: len(seen[key]) for key in advertised_keys}, least=least)


def divide(uuid: str, claims: Sequence[Claim], counts: ReplicaCounts) -> tuple[Part, ...]:
    """Divide one device among the containers that hold it.

    Args:
        uuid: The device.
        claims: All claims on it.
        counts: As ``replica_counts`` made them.

    Returns:
        One part per container and resource; the ratios sum to at most 1.
    """
    grouped: dict[tuple[tuple[str, str, str], str, str], list[Claim]] = {}
    for claim in claims:
        grouped.setdefault((claim.holder, claim.resource, claim.source), []).append(claim)
    weights = {key: _weight(uuid, group, counts) for key, group in grouped.items()}
    excess = max(sum(weights.values()), 1.0)
    # An even split of a claim that several containers name is how it is shared; of device-plugin ids it is a guess.
    odd_split = excess > WHOLE_WITHIN_ROUNDING and any(claim.source != "dra" for claim in claims)
    return tuple(
        Part(
            holder=holder,
            resource=resource,
            source=source,
            ratio=weights[holder, resource, source] / excess,
            replicas=len({(claim.replica, claim.share_id) for claim in group}),
            shared=len(grouped) > 1 or any(_is_share(claim) for claim in group),
            estimated=odd_split or not _is_certain(uuid, group, counts),
        )
        for (holder, resource, source), group in grouped.items()
    )


def mode(part: Part, *, is_instance: bool) -> ShareMode:
    """Say how a part is held: shared wins over MIG, as a replica of an instance is both."""
    if part.shared:
        return ShareMode.SHARED
    return ShareMode.MIG if is_instance else ShareMode.EXCLUSIVE


def _weight(uuid: str, group: Sequence[Claim], counts: ReplicaCounts) -> float:
    held = {claim.replica for claim in group}
    if None in held:
        return 1.0
    resource = group[0].resource
    return len(held) / (counts.known.get((uuid, resource)) or counts.least[resource])


def _is_certain(uuid: str, group: Sequence[Claim], counts: ReplicaCounts) -> bool:
    if any(claim.share_id is not None for claim in group):
        return False  # how much of the device's capacity a share has is not in the kubelet's answer
    return any(claim.replica is None for claim in group) or (uuid, group[0].resource) in counts.known


def _is_share(claim: Claim) -> bool:
    return claim.replica is not None or claim.share_id is not None

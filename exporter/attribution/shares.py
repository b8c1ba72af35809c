"""How a device that several containers hold is divided among them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.model import ShareMode

DRA = "dra"
"""Source of a holder that the kubelet lists with a claim."""

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
    claim: str = ""
    """DRA: containers that name one claim have together what it has."""
    declared: float | None = None
    """Part of the device as somebody declared it; ``None``: all of it, or by replicas."""
    estimated: bool = False
    """``declared`` is a guess."""


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
        One part per container, whatever resources it holds the device by; the ratios sum to at most 1.
    """
    grouped: dict[tuple[str, str, str], list[Claim]] = {}
    for claim in claims:
        grouped.setdefault(claim.holder, []).append(claim)
    weights = _weights(uuid, grouped, counts)
    excess = max(sum(weights.values()), 1.0)
    fitted = excess > WHOLE_WITHIN_ROUNDING
    return tuple(
        Part(
            holder=holder,
            resource=group[0].resource,
            source=group[0].source,
            ratio=weights[holder] / excess,
            replicas=len({(claim.resource, claim.replica, claim.claim, claim.share_id) for claim in group}),
            shared=len(grouped) > 1 or any(_is_share(claim) for claim in group),
            estimated=fitted or not all(_is_certain(uuid, claim, counts) for claim in group),
        )
        for holder, group in grouped.items()
    )


def mode(part: Part, *, is_instance: bool) -> ShareMode:
    """Say how a part is held: shared wins over MIG, as a replica of an instance is both."""
    if part.shared:
        return ShareMode.SHARED
    return ShareMode.MIG if is_instance else ShareMode.EXCLUSIVE


def _weights(
    uuid: str, grouped: Mapping[tuple[str, str, str], Sequence[Claim]], counts: ReplicaCounts
) -> dict[tuple[str, str, str], float]:
    """Give each holder's part before it is fitted into the device; what nobody declared is what the others leave."""
    users: dict[tuple[str, str | None], set[tuple[str, str, str]]] = {}
    for holder, group in grouped.items():
        for claim in group:
            if claim.claim:
                users.setdefault((claim.claim, claim.share_id), set()).add(holder)
    weights: dict[tuple[str, str, str], float] = {}
    open_shares: dict[tuple[str, str, str], float] = {}
    for holder, group in grouped.items():
        replicas = {(claim.resource, claim.replica) for claim in group if _is_replica(claim)}
        weights[holder] = sum(1 / (counts.known.get((uuid, name)) or counts.least[name]) for name, _ in replicas)
        for claim in group:
            sharers = len(users.get((claim.claim, claim.share_id), ())) or 1
            if claim.declared is not None or (claim.replica is None and claim.share_id is None):
                weights[holder] += (1.0 if claim.declared is None else claim.declared) / sharers
            elif claim.replica is None:
                open_shares[holder] = open_shares.get(holder, 0.0) + 1 / sharers
        weights[holder] = min(weights[holder], 1.0)
    left = max(1 - sum(weights.values()), 0.0) or 1.0
    for holder, share in open_shares.items():
        weights[holder] += share * left / sum(open_shares.values())
    return weights


def _is_replica(claim: Claim) -> bool:
    return claim.replica is not None and claim.declared is None


def _is_certain(uuid: str, claim: Claim, counts: ReplicaCounts) -> bool:
    if claim.declared is not None:
        return not claim.estimated
    if claim.share_id is not None:
        return False  # how much of the device's capacity a share has is not in the kubelet's answer
    return claim.replica is None or (uuid, claim.resource) in counts.known


def _is_share(claim: Claim) -> bool:
    if claim.declared is not None:
        return claim.declared * WHOLE_WITHIN_ROUNDING < 1
    return claim.replica is not None or claim.share_id is not None

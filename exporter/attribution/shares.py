"""Divides a device that several containers hold into their shares."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.model import ShareMode

DRA = "dra"
"""Source of a holder that the kubelet lists with a claim."""

WHOLE_WITHIN_ROUNDING = 1.0 + 1e-9

Replica = tuple[str, str, int]
"""Device UUID, resource, number of the replica."""
ReplicaKey = tuple[str, str]
"""Device UUID, resource."""


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
class SharePart:
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

    known: Mapping[ReplicaKey, int]
    """Where the kubelet advertises them or once did."""
    likely: Mapping[ReplicaKey, int]
    """Of those that it never did, where their number follows from those of other devices, or from what is held."""
    told: Mapping[ReplicaKey, int]
    """As advertised last, whatever is held: to be remembered."""
    current: frozenset[ReplicaKey]
    """Whose replicas are advertised or held now."""

    def of(self, uuid: str, resource: str) -> int | None:
        """Give the number of a device's replicas; ``None`` where it cannot be told."""
        return self.known.get((uuid, resource)) or self.likely.get((uuid, resource))


def replica_counts(
    advertised: Iterable[Replica] | None, held: Iterable[Replica], remembered: Mapping[ReplicaKey, int]
) -> ReplicaCounts:
    """Count the replicas of each device.

    A device that is unhealthy, or whose plugin restarts, is not advertised: what it last was is remembered. Where that
    is not known either, its number is that of the resource's other devices if those agree, as device plugins divide
    all devices of a resource alike. An old kubelet advertises none: there the numbers that are held tell the least.

    Args:
        advertised: (device UUID, resource, replica number) of ``GetAllocatableResources``; ``None`` of a kubelet that
            has none.
        held: The same of what containers hold.
        remembered: As advertised before, by (device UUID, resource).
    """
    numbers = _numbers(held)
    # Replicas are numbered from 0, and a plugin may call a single one of a GPU's unhealthy.
    now = {key: max(seen) + 1 for key, seen in _numbers(advertised or ()).items()}
    told = {**remembered, **now}
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
    known = {key: max(count, len(numbers.get(key, ()))) for key, count in told.items()}
    return ReplicaCounts(known=known, likely=likely, told=told, current=frozenset({*now, *numbers}))


def _numbers(replicas: Iterable[Replica]) -> dict[ReplicaKey, set[int]]:
    numbers: dict[ReplicaKey, set[int]] = {}
    for uuid, resource, number in replicas:
        numbers.setdefault((uuid, resource), set()).add(number)
    return numbers


def divide(uuid: str, claims: Sequence[Claim], counts: ReplicaCounts) -> tuple[SharePart, ...]:
    """Divide one device among the containers that hold it.

    Args:
        uuid: The device.
        claims: All claims on it.
        counts: As ``replica_counts`` made them, with a number for each replica among ``claims``.

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
        SharePart(
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


def mode(part: SharePart, *, is_instance: bool) -> ShareMode:
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
        weights[holder] = sum(1 / number for name, _ in replicas if (number := counts.of(uuid, name)))
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

"""The pure join: what the kubelet lists and what the driver sees become holders of devices."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from exporter.attribution import shares
from exporter.attribution.device_ids import GPU_DRA_DRIVER, IdKind, ParsedId, parse, parse_claimed
from exporter.attribution.evidence import NO_EVIDENCE, Evidence
from exporter.attribution.inventory import Inventory
from exporter.attribution.shares import DRA, Claim
from exporter.model import (
    Allocations,
    Attribution,
    ContainerAllocation,
    DeviceIds,
    Gpu,
    Holder,
    MigInstance,
    Unresolved,
)

DEVICE_PLUGIN = "device-plugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One id that the kubelet lists with one container."""

    container: ContainerAllocation
    resource: str
    source: str
    device_id: str
    share_id: str | None
    parsed: ParsedId


def attribute(
    *,
    allocations: Allocations | None,
    gpus: Sequence[Gpu],
    instances: Sequence[MigInstance],
    now: float,
    expiry_seconds: float,
    evidence: Evidence = NO_EVIDENCE,  # noqa: ARG001
) -> Attribution:
    """Match every id that the kubelet lists to the devices of this node.

    Args:
        allocations: The kubelet's newest good answer, ``None`` before the first.
        gpus: Physical GPUs as the driver tells them, lost and missing ones too.
        instances: MIG instances of all of them.
        now: Unix time.
        expiry_seconds: Age past which an answer says nothing any more.
        evidence: What the Kubernetes API adds, as much of it as is known.

    Returns:
        Holders by device UUID, and by name what could not be matched. With no answer, or an expired one, nothing is
        known, which is not the same as "unallocated".
    """
    if allocations is None:
        return Attribution(known=False)
    answered_at = allocations.answered_at_seconds
    if now - answered_at > expiry_seconds:
        return Attribution(known=False, answered_at_seconds=answered_at)
    inventory = Inventory.of(gpus, instances)
    entries = list(_entries(allocations.containers))
    claims, unresolved = _match(entries, inventory)
    counts = shares.replica_counts(_advertised(allocations.allocatable, inventory), claims)
    return Attribution(
        known=True,
        answered_at_seconds=answered_at,
        holders=_holders(claims, counts, inventory),
        unresolved=unresolved,
        expected_devices=_expected(allocations.allocatable, entries, inventory),
    )


def _entries(containers: Sequence[ContainerAllocation]) -> Iterator[_Entry]:
    for container in containers:
        for devices in container.devices:
            for device_id in dict.fromkeys(devices.ids):
                yield _Entry(
                    container=container,
                    resource=devices.resource,
                    source=DEVICE_PLUGIN,
                    device_id=device_id,
                    share_id=None,
                    parsed=parse(devices.resource, device_id),
                )
        # A container that names one claim twice lists its devices twice.
        keys = {(claim.driver, claim.pool, claim.device, claim.share_id): claim for claim in container.claims}
        for driver, _, device, share_id in keys:
            parsed = parse_claimed(driver, device)
            if parsed is not None:
                yield _Entry(
                    container=container,
                    resource=GPU_DRA_DRIVER,
                    source=DRA,
                    device_id=device,
                    share_id=share_id,
                    parsed=parsed,
                )


def _match(entries: Sequence[_Entry], inventory: Inventory) -> tuple[dict[str, list[Claim]], tuple[Unresolved, ...]]:
    """Find each entry's devices: claims by device UUID, and what has none."""
    claimed = {(entry.device_id, entry.parsed) for entry in entries if entry.parsed.profile is not None}
    by_profile = Counter((parsed.minor, parsed.profile) for _, parsed in claimed)
    claims: dict[str, list[Claim]] = {}
    unresolved: dict[Unresolved, None] = {}
    for entry in entries:
        found, reason = inventory.resolve(entry.parsed)
        if by_profile[entry.parsed.minor, entry.parsed.profile] > 1:
            found, reason = (), "dra_unresolved"  # two claims and one instance: one of them is not enumerated yet
        if not found:
            unresolved[_unresolved(entry, reason)] = None
        for uuid in found:
            claims.setdefault(uuid, []).append(_claim(entry))
    return claims, tuple(unresolved)


def _claim(entry: _Entry) -> Claim:
    container = entry.container
    return Claim(
        holder=(container.namespace, container.pod, container.container),
        resource=entry.resource,
        source=entry.source,
        replica=entry.parsed.replica,
        share_id=entry.share_id,
    )


def _unresolved(entry: _Entry, reason: str) -> Unresolved:
    container = entry.container
    return Unresolved(
        namespace=container.namespace,
        pod=container.pod,
        container=container.container,
        resource=entry.resource,
        device_id=entry.device_id,
        reason=reason,
    )


def _advertised(allocatable: tuple[DeviceIds, ...] | None, inventory: Inventory) -> Iterator[tuple[str, str, int]]:
    """Give (device UUID, resource, replica number) of every advertised replica."""
    for devices in allocatable or ():
        for device_id in devices.ids:
            parsed = parse(devices.resource, device_id)
            if parsed.replica is not None:
                for uuid in inventory.resolve(parsed)[0]:
                    yield uuid, devices.resource, parsed.replica


def _holders(
    claims: dict[str, list[Claim]], counts: shares.ReplicaCounts, inventory: Inventory
) -> dict[str, tuple[Holder, ...]]:
    parts = {uuid: shares.divide(uuid, claims_of, counts) for uuid, claims_of in claims.items()}
    used: dict[str, float] = dict.fromkeys(inventory.gpus, 0.0)
    for uuid, parts_of in parts.items():
        used[inventory.gpu_of(uuid)] += inventory.part_of_gpu(uuid).ratio * sum(part.ratio for part in parts_of)
    holders: dict[str, tuple[Holder, ...]] = {}
    for uuid, parts_of in parts.items():
        whole = inventory.part_of_gpu(uuid)
        # A whole GPU and an instance of it can both be listed while the node is being partitioned.
        excess = max(used[inventory.gpu_of(uuid)], 1.0)
        holders[uuid] = tuple(
            Holder(
                namespace=part.holder[0],
                pod=part.holder[1],
                container=part.holder[2],
                device_uuid=uuid,
                mode=shares.mode(part, is_instance=inventory.is_instance(uuid)),
                resource=part.resource,
                source=part.source,
                share_ratio=whole.ratio * part.ratio / excess,
                device_share_ratio=part.ratio,
                share_estimated=part.estimated or whole.estimated or excess > shares.WHOLE_WITHIN_ROUNDING,
                replicas=part.replicas,
            )
            for part in parts_of
        )
    return holders


def _expected(allocatable: tuple[DeviceIds, ...] | None, entries: Sequence[_Entry], inventory: Inventory) -> int | None:
    advertised = [parse(devices.resource, device_id) for devices in allocatable or () for device_id in devices.ids]
    if not advertised:  # an old kubelet, a plugin that has not registered yet, or DRA alone
        return None
    physical: set[str] = set()
    for parsed in [*advertised, *(entry.parsed for entry in entries)]:
        if parsed.kind is IdKind.ALL:
            physical.update(inventory.gpus)
        elif gpu := inventory.physical(parsed):
            physical.add(gpu)
        else:
            return None
    return len(physical)

"""The pure join: what the kubelet lists and what the driver sees become holders of devices."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from exporter.attribution import annotated, counting, dra, shares
from exporter.attribution.device_ids import IdKind, ParsedId, parse, telling
from exporter.attribution.entries import Entry, undecided
from exporter.attribution.evidence import NO_EVIDENCE, Evidence
from exporter.attribution.inventory import Inventory
from exporter.attribution.reservations import Groups
from exporter.attribution.shares import Claim, Replica, ReplicaCounts, ReplicaKey
from exporter.attribution.tenants import SOURCES, UNNAMED_REASON
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
REPLICAS_UNKNOWN = "replicas_unknown"
"""Reason of a replica whose part of the device cannot be told, as the number of the others is not known."""
MEMORY_UNKNOWN = "memory_unknown"
"""Reason of a declared part of a GPU's memory, while it is not known how much memory the GPU has."""
NOTHING_REMEMBERED: Mapping[ReplicaKey, int] = MappingProxyType({})


def attribute(
    *,
    allocations: Allocations | None,
    gpus: Sequence[Gpu],
    instances: Sequence[MigInstance],
    now: float,
    expiry_seconds: float,
    evidence: Evidence = NO_EVIDENCE,
    replicas: Mapping[ReplicaKey, int] = NOTHING_REMEMBERED,
) -> Attribution:
    """Match every id that the kubelet lists to the devices of this node.

    Args:
        allocations: The kubelet's newest good answer, ``None`` before the first.
        gpus: Physical GPUs as the driver tells them, lost and missing ones too.
        instances: MIG instances of all of them.
        now: Unix time.
        expiry_seconds: Age past which an answer says nothing any more.
        evidence: What the Kubernetes API adds, as much of it as is known.
        replicas: ``Attribution.replicas`` of the join before, or as an earlier process left them.

    Returns:
        Holders by device UUID, and by name what could not be matched. With no answer, or an expired one, nothing is
        known, which is not the same as "unallocated".
    """
    answered_at = allocations.answered_at_seconds if allocations else None
    if allocations is None or now - allocations.answered_at_seconds > expiry_seconds:
        return Attribution(known=False, answered_at_seconds=answered_at)
    inventory = Inventory.of(gpus, instances)
    entries = list(_entries(allocations, evidence))
    advertised = _advertised(allocations.allocatable)
    counts = shares.replica_counts(
        None if advertised is None else _replicas(advertised, inventory),
        _replicas(((entry.resource, entry.parsed) for entry in entries if entry.declared is None), inventory),
        replicas,
    )
    claims, unresolved = _match(entries, inventory, counts)
    known = counting.Known.of(advertised, evidence, entries, unresolved, inventory)
    return Attribution(
        known=True,
        answered_at_seconds=answered_at,
        holders=_holders(claims, counts, inventory, evidence),
        unresolved=tuple(unresolved),
        expected_devices=known.expected,
        unseen_instances=known.unseen_instances,
        advertised_devices=known.advertised,
        allocated_devices=known.allocated,
        replicas=_remembered(counts, inventory),
    )


def _entries(allocations: Allocations, evidence: Evidence) -> Iterator[Entry]:
    """Give every device of every container that holds any."""
    by_pod: dict[tuple[str, str], list[ContainerAllocation]] = {}
    for container in allocations.containers:
        name = (container.namespace, container.pod)
        if name not in evidence.ended and name != evidence.own_pod:
            by_pod.setdefault(name, []).append(container)
    groups: Groups | None = None
    if evidence.pods is not None or not evidence.is_followed:  # asked for, and perhaps not there yet
        with_devices = {(container.namespace, container.pod) for container in allocations.containers}
        groups = Groups(evidence, _others(allocations), with_devices)
    for (namespace, _), containers in by_pod.items():
        listed = _entries_of_pod(containers, evidence)
        if groups is not None and namespace in evidence.reservation_namespaces:
            for entry in listed:
                yield from groups.divided(entry)
        else:
            yield from listed


def _others(allocations: Allocations) -> dict[tuple[str, str], list[str]]:
    """Name the containers without devices, by pod."""
    others: dict[tuple[str, str], list[str]] = {}
    for namespace, pod, container in allocations.other_containers:
        others.setdefault((namespace, pod), []).append(container)
    return others


def _entries_of_pod(containers: Sequence[ContainerAllocation], evidence: Evidence) -> Iterator[Entry]:
    name = (containers[0].namespace, containers[0].pod)
    pod = evidence.pods.get(name) if evidence.pods is not None else None
    placeholders: list[ContainerAllocation] = []
    for container in containers:
        told: list[DeviceIds] = []
        for devices in container.devices:
            if annotated.is_told_by_annotation(devices, pod):
                told.append(devices)
            else:
                yield from _listed_entries(container, devices)
        if told:
            placeholders.append(replace(container, devices=tuple(told)))
        yield from dra.entries(container, evidence)
    yield from annotated.entries(placeholders, pod)


def _listed_entries(container: ContainerAllocation, devices: DeviceIds) -> Iterator[Entry]:
    holder = (container.namespace, container.pod, container.container)
    source = SOURCES.get(devices.resource, DEVICE_PLUGIN)
    told: set[ParsedId] = set()
    for device_id in telling(devices.resource, devices.ids):
        parsed = parse(devices.resource, device_id)
        if devices.resource in SOURCES and not container.pod and parsed.kind is not IdKind.UNKNOWN:
            parsed = undecided(parsed, UNNAMED_REASON)
        if parsed.kind is IdKind.UNKNOWN:  # there can be tens of thousands, and one says it all
            if parsed in told:
                continue
            told.add(parsed)
        yield Entry(holder=holder, resource=devices.resource, source=source, device_id=device_id, parsed=parsed)


def _match(
    entries: Sequence[Entry], inventory: Inventory, counts: ReplicaCounts
) -> tuple[dict[str, list[Claim]], dict[Unresolved, Entry]]:
    """Find each entry's devices: claims by device UUID, and what has none."""
    by_profile = Counter(
        place for _, place in {(entry.device_id, _profile(entry, inventory)) for entry in entries} if place is not None
    )
    claims: dict[str, list[Claim]] = {}
    unresolved: dict[Unresolved, Entry] = {}
    for entry in entries:
        found, reason = inventory.resolve(entry.parsed)
        place = _profile(entry, inventory)
        if place is not None and by_profile[place] > 1:
            found, reason = (), "dra_unresolved"  # two claims and one instance: one of them is not enumerated yet
        if not found:
            unresolved.setdefault(_unresolved(entry, reason, inventory), entry)
        is_replica = entry.parsed.replica is not None and entry.declared is None
        for uuid in found:
            if is_replica and counts.of(uuid, entry.resource) is None:
                unresolved.setdefault(_unresolved(entry, REPLICAS_UNKNOWN, inventory), entry)
                continue
            gpu = inventory.gpus[inventory.gpu_of(uuid)]
            if entry.declared and entry.declared.is_of_unknown_whole(gpu.memory_total_bytes):
                unresolved.setdefault(_unresolved(entry, MEMORY_UNKNOWN, inventory), entry)
            else:
                claims.setdefault(uuid, []).append(_claim(entry, gpu))
    return claims, unresolved


def _profile(entry: Entry, inventory: Inventory) -> tuple[str | None, str] | None:
    """Give GPU and profile of an entry whose instance is known by them alone."""
    if entry.parsed.profile is None or inventory.knows_places(entry.parsed):
        return None
    return inventory.physical(entry.parsed), entry.parsed.profile


def _claim(entry: Entry, gpu: Gpu) -> Claim:
    declared, estimated = entry.declared.part(gpu.memory_total_bytes) if entry.declared else (None, False)
    return Claim(
        holder=entry.holder,
        resource=entry.resource,
        source=entry.source,
        replica=entry.parsed.replica,
        share_id=entry.share_id,
        claim=entry.claim,
        declared=declared,
        estimated=estimated,
    )


def _unresolved(entry: Entry, reason: str, inventory: Inventory) -> Unresolved:
    namespace, pod, container = entry.holder
    return Unresolved(
        namespace=namespace,
        pod=pod,
        container=container,
        resource=entry.resource,
        device_id=entry.device_id,
        reason=reason,
        gpu_uuids=None if entry.is_placeholder else inventory.suspects(entry.parsed),
    )


def _advertised(allocatable: tuple[DeviceIds, ...] | None) -> list[tuple[str, ParsedId]] | None:
    """Give resource and id of what the kubelet advertises, where it can tell."""
    if allocatable is None:
        return None
    return [
        (devices.resource, parse(devices.resource, device_id))
        for devices in allocatable
        for device_id in telling(devices.resource, devices.ids)
    ]


def _replicas(ids: Iterable[tuple[str, ParsedId]], inventory: Inventory) -> Iterator[Replica]:
    """Give the replicas among ids, each with its resource; of devices that the driver does not see (yet) too."""
    for resource, parsed in ids:
        if parsed.replica is not None:
            named = (parsed.uuid,) if parsed.uuid and parsed.kind in {IdKind.GPU, IdKind.MIG} else ()
            for uuid in inventory.resolve(parsed)[0] or named:
                yield uuid, resource, parsed.replica


def _remembered(counts: ReplicaCounts, inventory: Inventory) -> dict[ReplicaKey, int]:
    """Give the counts of devices that are there, advertised or held; of all, while nothing is seen."""
    return {
        key: count
        for key, count in counts.told.items()
        if not inventory.gpus or key in counts.current or key[0] in inventory.gpus or key[0] in inventory.instances
    }


def _holders(
    claims: Mapping[str, list[Claim]], counts: ReplicaCounts, inventory: Inventory, evidence: Evidence
) -> dict[str, tuple[Holder, ...]]:
    parts = {uuid: shares.divide(uuid, claims_of, counts) for uuid, claims_of in claims.items()}
    used: dict[str, float] = dict.fromkeys(inventory.gpus, 0.0)
    for uuid, parts_of in parts.items():
        used[inventory.gpu_of(uuid)] += inventory.part_of_gpu(uuid).ratio * sum(part.ratio for part in parts_of)
    # A whole GPU and an instance of it can both be listed while the node is being partitioned.
    return {
        uuid: tuple(
            _holder(uuid, part, max(used[inventory.gpu_of(uuid)], 1.0), inventory, evidence) for part in parts_of
        )
        for uuid, parts_of in parts.items()
    }


def _holder(uuid: str, part: shares.Part, excess: float, inventory: Inventory, evidence: Evidence) -> Holder:
    namespace, pod, container = part.holder
    whole = inventory.part_of_gpu(uuid)
    known = evidence.pods.get((namespace, pod)) if evidence.pods is not None else None
    return Holder(
        namespace=namespace,
        pod=pod,
        container=container,
        device_uuid=uuid,
        mode=shares.mode(part, is_instance=inventory.is_instance(uuid)),
        resource=part.resource,
        source=part.source,
        share_ratio=whole.ratio * part.ratio / excess,
        device_share_ratio=part.ratio,
        share_estimated=part.estimated or whole.estimated or excess > shares.WHOLE_WITHIN_ROUNDING,
        replicas=part.replicas,
        pod_uid=known.uid if known else None,
    )

"""Joins the kubelet's allocations and the driver's devices into holders of devices; pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from exporter.attribution import device_ids, shares, vgpu
from exporter.attribution.device_ids import GPU_DRA_DRIVER, IdKind, ParsedId, ReplicaKey, claim_uid
from exporter.attribution.inventory import PASSED_THROUGH, Inventory
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, AllocatedDevice, Evidence, SliceDevice
from exporter.attribution.shares import DRA, SOURCES, Declared, Entry, HolderName, ReplicaCounts, undecided
from exporter.model.attribution import (
    Allocations,
    Attribution,
    ClaimedDevice,
    ContainerAllocation,
    DeviceIds,
    Holder,
    Unresolved,
)
from exporter.model.devices import GpuReading

REPLICAS_UNKNOWN = "replicas_unknown"
"""Reason of a replica whose part of the device is unknown, because the number of replicas is unknown."""
MEMORY_UNKNOWN = "memory_unknown"
"""Reason of a declared part of the memory of a GPU while the size of the memory is unknown."""
DRA_UNRESOLVED = "dra_unresolved"
UNDECIDED = frozenset({"claim_pending", "reservation_pending", "needs_annotation", "bad_annotation"})
"""Reasons of entries whose held device may differ from the named device."""
NOTHING_REMEMBERED: Mapping[ReplicaKey, int] = MappingProxyType({})


def attribute(
    allocations: Allocations,
    gpus: Sequence[GpuReading],
    evidence: Evidence = NO_EVIDENCE,
    replicas: Mapping[ReplicaKey, int] = NOTHING_REMEMBERED,
) -> Attribution:
    """Match the ids in the kubelet's list with the devices of this node.

    Args:
        allocations: Newest valid answer of the kubelet.
        gpus: Physical GPUs and their MIG instances as the driver reports them, including lost and missing GPUs.
        evidence: Known data of the Kubernetes API.
        replicas: ``Attribution.replicas`` of the previous join, or saved by an earlier process.

    Returns:
        Holders by device UUID, and the unmatched ids by name.
    """
    inventory = Inventory.of(gpus)
    entries = list(_entries(allocations, evidence))
    advertised = _advertised(allocations.allocatable)
    counts = shares.replica_counts(advertised, entries, inventory, replicas)
    resolved, unresolved = _match(entries, inventory, counts)
    of_kubelet = [*(parsed for _, parsed in advertised or ()), *(entry.parsed for entry in entries)]
    listed = _advertised_gpus(advertised, evidence, entries, inventory)
    held = inventory.physical_gpus(entry.parsed for entry in entries if entry.parsed.reason != PASSED_THROUGH)
    is_decided = held is not None and not any(one.reason in UNDECIDED for one in unresolved)
    return Attribution(
        known=True,
        answered_at_seconds=allocations.answered_at_seconds,
        holders=_holders(resolved, counts, inventory, evidence),
        unresolved=tuple(unresolved),
        # The UUID of an instance does not identify its GPU.
        unseen_instances=any(one.kind is IdKind.MIG and inventory.physical(one) is None for one in of_kubelet),
        advertised_devices=None if listed is None else len(listed),
        allocated_devices=len(held) if held is not None and is_decided else None,
        # Also unknown if no device is advertised, because a plugin may not have registered yet.
        expected_devices=len(listed | held) if listed and held is not None else None,
        replicas={key: count.number for key, count in counts.items() if count.is_known},
    )


def _entries(allocations: Allocations, evidence: Evidence) -> Iterator[Entry]:
    """Yield an entry for every device of every container."""
    by_pod: dict[tuple[str, str], list[ContainerAllocation]] = {}
    for container in allocations.containers:
        name = (container.namespace, container.pod)
        if not evidence.holds_nothing(name):
            by_pod.setdefault(name, []).append(container)
    groups: vgpu.Groups | None = None
    reserved = any(namespace in evidence.reservation_namespaces for namespace, _ in by_pod)
    if reserved and (evidence.pods is not None or not evidence.is_followed):  # configured, possibly not loaded yet
        groups = vgpu.Groups(evidence, allocations)
    for (namespace, _), containers in by_pod.items():
        listed = _entries_of_pod(containers, evidence)
        if groups is not None and namespace in evidence.reservation_namespaces:
            for entry in listed:
                yield from groups.divided(entry)
        else:
            yield from listed


def _entries_of_pod(containers: Sequence[ContainerAllocation], evidence: Evidence) -> Iterator[Entry]:
    pod = evidence.pod(containers[0].namespace, containers[0].pod)
    annotated: dict[HolderName, list[DeviceIds]] = {}
    for container in containers:
        for devices in container.devices:
            if vgpu.is_annotated(devices, pod):
                annotated.setdefault(container.name, []).append(devices)
            else:
                yield from _listed_entries(container, devices)
        yield from claimed_entries(container, evidence)
    yield from vgpu.entries(annotated, pod)


def _listed_entries(container: ContainerAllocation, devices: DeviceIds) -> Iterator[Entry]:
    source = SOURCES.get(devices.resource, shares.DEVICE_PLUGIN)
    seen: set[ParsedId] = set()
    for device_id in device_ids.significant_ids(devices.resource, devices.ids):
        parsed = device_ids.parse(devices.resource, device_id)
        if devices.resource in SOURCES and not container.pod and parsed.kind is not IdKind.UNKNOWN:
            parsed = undecided(parsed, "job_id_unknown")
        if parsed.kind is IdKind.UNKNOWN:  # there can be tens of thousands; one entry is enough
            if parsed in seen:
                continue
            seen.add(parsed)
        yield Entry(holder=container.name, resource=devices.resource, source=source, device_id=device_id, parsed=parsed)


def claimed_entries(container: ContainerAllocation, evidence: Evidence) -> Iterator[Entry]:
    """Yield an entry for every GPU that a container holds by a claim, without devices that it only monitors."""
    # A container with two references to a claim lists its devices twice.
    keys = {(claim.driver, claim.pool, claim.device, claim.share_id): claim for claim in container.claims}
    for claim in keys.values():
        parsed = device_ids.parse_claimed(claim.driver, claim.device)
        if parsed is None:
            continue
        device = (evidence.devices or {}).get((claim.pool, claim.device))
        if device is not None:
            parsed = _as_sliced(device, parsed)
        allocated = _allocated(claim, evidence)
        if evidence.awaits_claim(claim_uid(claim)):
            parsed = undecided(parsed, "claim_pending")
        elif allocated is not None and allocated.admin_access:
            continue
        yield Entry(
            holder=container.name,
            resource=GPU_DRA_DRIVER,
            source=DRA,
            device_id=claim.device,
            parsed=parsed,
            share_id=claim.share_id,
            claim=_key_of(claim),
            declared=_declared(allocated, device),
        )


def _key_of(claim: ClaimedDevice) -> str:
    return claim_uid(claim) or f"{claim.claim_namespace}/{claim.claim_name}"


def _as_sliced(device: SliceDevice, by_name: ParsedId) -> ParsedId:
    if device.kind == "vfio":
        return undecided(by_name, PASSED_THROUGH)
    if device.uuid:
        return ParsedId(kind=IdKind.MIG if device.kind == "mig" else IdKind.GPU, uuid=device.uuid)
    if device.kind != "mig" or not device.parent_uuid:
        return by_name
    # Numbers in names of the form before v25.12 have other meanings, so only the attributes count there.
    return ParsedId(
        kind=IdKind.MINOR_PROFILE,
        uuid=device.parent_uuid,
        profile=device_ids.comparable_profile(device.profile) or by_name.profile,
        profile_id=by_name.profile_id,
        placement_start=by_name.placement_start,
    )


def _allocated(claim: ClaimedDevice, evidence: Evidence) -> AllocatedDevice | None:
    """Return the device in the result of the claim; ``None`` if unknown."""
    key = (claim.driver, claim.pool, claim.device, claim.share_id)
    results = evidence.claims.get(_key_of(claim), ())
    same = [one for one in results if (one.driver, one.pool, one.device, one.share_id) == key]
    # A claim can both monitor and hold a device.
    return min(same, key=lambda one: one.admin_access, default=None)


def _declared(allocated: AllocatedDevice | None, device: SliceDevice | None) -> Declared | None:
    if allocated is None or device is None or not allocated.consumed_memory_bytes or not device.memory_bytes:
        return None
    return Declared(ratio=allocated.consumed_memory_bytes / device.memory_bytes)


def _advertised(allocatable: tuple[DeviceIds, ...] | None) -> list[tuple[str, ParsedId]] | None:
    """Return resource and id of each advertised device; ``None`` if the kubelet does not report these."""
    if allocatable is None:
        return None
    return [
        (devices.resource, device_ids.parse(devices.resource, device_id))
        for devices in allocatable
        for device_id in device_ids.significant_ids(devices.resource, devices.ids)
    ]


def _advertised_gpus(
    advertised: Sequence[tuple[str, ParsedId]] | None,
    evidence: Evidence,
    entries: Sequence[Entry],
    inventory: Inventory,
) -> set[str] | None:
    """Return the physical GPUs that device plugins and DRA drivers advertise; ``None`` if they are not known."""
    if evidence.devices is None and (advertised is None or any(entry.source == DRA for entry in entries)):
        return None  # the kubelet never advertises DRA devices
    of_plugins = [parsed for _, parsed in advertised or ()]
    of_slices = [
        ParsedId(kind=IdKind.GPU, uuid=device.parent_uuid or device.uuid)
        if device.kind == "gpu" or device.parent_uuid
        else ParsedId(kind=IdKind.MIG, uuid=device.uuid)
        for device in (evidence.devices or {}).values()
        if device.kind in ("gpu", "mig")  # visible to the GPU's driver
    ]
    return inventory.physical_gpus([*of_plugins, *of_slices])


def _match(
    entries: Sequence[Entry], inventory: Inventory, counts: ReplicaCounts
) -> tuple[dict[str, list[Entry]], dict[Unresolved, None]]:
    """Find the devices of entries; return entries by device UUID, and unresolved entries, each once."""
    by_profile = Counter(profile for _, profile in {(one.device_id, inventory.profile(one.parsed)) for one in entries})
    resolved: dict[str, list[Entry]] = {}
    unresolved: dict[Unresolved, None] = {}
    for entry in entries:
        found, reason = inventory.resolve(entry.parsed)
        profile = inventory.profile(entry.parsed)
        if profile is not None and by_profile[profile] > 1:
            found, reason = (), DRA_UNRESOLVED  # two claims for one instance: the driver's list lacks an instance
        if not found:
            unresolved[_unresolved(entry, reason, inventory)] = None
        for uuid in found:
            if entry.is_replica and (uuid, entry.resource) not in counts:
                unresolved[_unresolved(entry, REPLICAS_UNKNOWN, inventory)] = None
            elif entry.declared and entry.declared.part(inventory.memory_bytes(uuid)) is None:
                unresolved[_unresolved(entry, MEMORY_UNKNOWN, inventory)] = None
            else:
                resolved.setdefault(uuid, []).append(entry)
    return resolved, unresolved


def _unresolved(entry: Entry, reason: str, inventory: Inventory) -> Unresolved:
    namespace, pod, container = entry.holder
    return Unresolved(
        namespace=namespace,
        pod=pod,
        container=container,
        resource=entry.resource,
        device_id=entry.device_id,
        reason=reason,
        devices=None if entry.is_placeholder else inventory.suspects(entry.parsed, reason),
    )


def _holders(
    resolved: Mapping[str, list[Entry]], counts: ReplicaCounts, inventory: Inventory, evidence: Evidence
) -> dict[str, tuple[Holder, ...]]:
    """Return the holders of each device, with shares of the physical GPU and pod UIDs."""
    parts = {uuid: shares.divide(uuid, entries, counts, inventory) for uuid, entries in resolved.items()}
    used = dict.fromkeys(inventory.gpus, 0.0)
    for uuid, holders in parts.items():
        used[inventory.gpu_of(uuid)] += sum(holder.share_ratio for holder in holders)
    return {
        uuid: tuple(_fitted(holder, used[inventory.gpu_of(uuid)], evidence) for holder in holders)
        for uuid, holders in parts.items()
    }


def _fitted(holder: Holder, used: float, evidence: Evidence) -> Holder:
    """Return a holder with the UID of its pod, if known; its share is scaled if the shares of the GPU exceed 1."""
    known = evidence.pod(holder.namespace, holder.pod)
    fits = used <= shares.WHOLE_WITHIN_ROUNDING
    # A whole GPU and an instance of it can both be listed while the node is being partitioned.
    return replace(
        holder,
        share_ratio=holder.share_ratio / max(used, 1.0),
        share_estimated=holder.share_estimated or not fits,
        pod_uid=known.uid if known else None,
    )

"""Joins the kubelet's allocations and the driver's devices into holders of devices; pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from exporter.attribution import shares, vgpu
from exporter.attribution.device_ids import (
    GPU_DRA_DRIVER,
    IdKind,
    ParsedId,
    ReplicaKey,
    claim_uid,
    comparable_profile,
    parse,
    parse_claimed,
    telling,
)
from exporter.attribution.host import SOURCES, UNNAMED_REASON
from exporter.attribution.inventory import Inventory, PartOfGpu
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, AllocatedDevice, Evidence, SliceDevice
from exporter.attribution.shares import DRA, Declared, Entry, Replica, ReplicaCounts, undecided
from exporter.attribution.vgpu import Groups
from exporter.model import (
    Allocations,
    Attribution,
    ClaimedDevice,
    ContainerAllocation,
    DeviceIds,
    Gpu,
    Holder,
    MigInstance,
    Unresolved,
)


def entries(container: ContainerAllocation, evidence: Evidence) -> Iterator[Entry]:
    """Yield an entry for every GPU that a container holds by a claim; devices that it only monitors are left out."""
    # A container that names one claim twice lists its devices twice.
    keys = {(claim.driver, claim.pool, claim.device, claim.share_id): claim for claim in container.claims}
    for claim in keys.values():
        parsed = parse_claimed(claim.driver, claim.device)
        if parsed is None:
            continue
        device = (evidence.devices or {}).get((claim.pool, claim.device))
        if device is not None:
            parsed = _as_sliced(device, parsed)
        allocated, pending = _allocated(claim, evidence)
        if pending:
            parsed = undecided(parsed, "claim_pending")
        elif allocated is not None and allocated.admin_access:
            continue
        yield Entry(
            holder=(container.namespace, container.pod, container.container),
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
        return replace(by_name, kind=IdKind.UNKNOWN, reason="dra_passed_through")
    if device.uuid:
        kind = IdKind.MIG if device.kind == "mig" else IdKind.GPU
        return ParsedId(kind=kind, uuid=device.uuid)
    if device.kind != "mig" or not device.parent_uuid:
        return by_name
    # A name of the form before v25.12 has numbers with other meanings: for it only the attributes count.
    return ParsedId(
        kind=IdKind.MINOR_PROFILE,
        uuid=device.parent_uuid,
        profile=comparable_profile(device.profile) or by_name.profile,
        profile_id=by_name.profile_id,
        placement_start=by_name.placement_start,
    )


def _allocated(claim: ClaimedDevice, evidence: Evidence) -> tuple[AllocatedDevice | None, bool]:
    """Return the device in the claim's own result, and whether that result is still pending."""
    if _key_of(claim) in evidence.unreadable_claims:
        return None, False
    results = evidence.claims.get(_key_of(claim))
    if results is None:
        return None, evidence.reads_claims and claim_uid(claim) is not None
    key = (claim.driver, claim.pool, claim.device, claim.share_id)
    same = [one for one in results if (one.driver, one.pool, one.device, one.share_id) == key]
    # One claim may both monitor a device and hold it.
    return min(same, key=lambda one: one.admin_access, default=None), False


def _declared(allocated: AllocatedDevice | None, device: SliceDevice | None) -> Declared | None:
    if allocated is None or device is None or not allocated.consumed_memory_bytes or not device.memory_bytes:
        return None
    return Declared(memory_bytes=allocated.consumed_memory_bytes, of_bytes=device.memory_bytes)


_UNDECIDED = frozenset({"claim_pending", "reservation_pending", "needs_annotation", "bad_annotation"})
"""Reasons for which the held device may differ from the device that the entry names."""

_PASSED_THROUGH = "dra_passed_through"
"""Passed through to a virtual machine: the driver does not see the device, which is no fault."""


def _counted(
    advertised: Sequence[tuple[str, ParsedId]] | None,
    evidence: Evidence,
    entries: Sequence[Entry],
    unresolved: dict[Unresolved, Entry],
    inventory: Inventory,
) -> Attribution:
    """Count physical GPUs; the caller adds the holders.

    Args:
        advertised: Resource and id of each device that the kubelet advertises, ``None`` if it does not report them.
        evidence: For the ResourceSlices.
        entries: All entries of the listed containers.
        unresolved: The entries without a device, with the reasons.
        inventory: The devices that the driver reports.
    """
    physical = _advertised_devices(advertised, evidence, entries, inventory)
    undecided = any(one.reason in _UNDECIDED for one in unresolved)
    named = _physical((entry.parsed for entry in entries if entry.parsed.reason != _PASSED_THROUGH), inventory)
    of_kubelet = [*(parsed for _, parsed in advertised or ()), *(entry.parsed for entry in entries)]
    return Attribution(
        known=True,
        unresolved=tuple(unresolved),
        # The UUID of an instance does not identify its GPU.
        unseen_instances=any(one.kind is IdKind.MIG and inventory.physical(one) is None for one in of_kubelet),
        advertised_devices=None if physical is None else len(physical),
        allocated_devices=None if undecided or named is None else len(named),
        # Also unknown if no device is advertised: a plugin may still be about to register.
        expected_devices=len(physical | named) if physical and named is not None else None,
    )


def _advertised_devices(
    advertised: Sequence[tuple[str, ParsedId]] | None,
    evidence: Evidence,
    entries: Sequence[Entry],
    inventory: Inventory,
) -> set[str] | None:
    if evidence.devices is None and (advertised is None or any(entry.source == DRA for entry in entries)):
        return None  # the kubelet itself never advertises DRA devices
    of_plugins = [parsed for _, parsed in advertised or ()]
    of_slices = [
        ParsedId(kind=IdKind.GPU, uuid=device.parent_uuid or device.uuid)
        if device.kind == "gpu" or device.parent_uuid
        else ParsedId(kind=IdKind.MIG, uuid=device.uuid)
        for device in (evidence.devices or {}).values()
        if device.kind in ("gpu", "mig")  # visible to the GPU's driver
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


DEVICE_PLUGIN = "device-plugin"
REPLICAS_UNKNOWN = "replicas_unknown"
"""Reason of a replica with an unknown part of the device, as the number of replicas is not known."""
MEMORY_UNKNOWN = "memory_unknown"
"""Reason of a declared part of a GPU's memory while the GPU's memory size is not known."""
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
        gpus: Physical GPUs as the driver reports them, lost and missing ones too.
        instances: MIG instances of all of them.
        now: Unix time.
        expiry_seconds: Age after which an answer is no longer used.
        evidence: Data of the Kubernetes API, as far as it is known.
        replicas: ``Attribution.replicas`` of the previous join, or as an earlier process saved them.

    Returns:
        Holders by device UUID, and the unmatched ids by name. Without an answer, or with an expired one, the holders
        are unknown, which differs from "unallocated".
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
    resolved, unresolved = _match(entries, inventory, counts)
    return replace(
        _counted(advertised, evidence, entries, unresolved, inventory),
        answered_at_seconds=answered_at,
        holders=_holders(resolved, counts, inventory, evidence),
        replicas=_remembered(counts, inventory),
    )


def _entries(allocations: Allocations, evidence: Evidence) -> Iterator[Entry]:
    """Yield an entry for every device of every container."""
    by_pod: dict[tuple[str, str], list[ContainerAllocation]] = {}
    for container in allocations.containers:
        name = (container.namespace, container.pod)
        if name not in evidence.ended and name != evidence.own_pod:
            by_pod.setdefault(name, []).append(container)
    groups: Groups | None = None
    reserved = any(namespace in evidence.reservation_namespaces for namespace, _ in by_pod)
    if reserved and (evidence.pods is not None or not evidence.is_followed):  # configured, possibly not loaded yet
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
    """Return the names of the containers without devices, by pod."""
    others: dict[tuple[str, str], list[str]] = {}
    for namespace, pod, container in allocations.other_containers:
        others.setdefault((namespace, pod), []).append(container)
    return others


def _entries_of_pod(containers: Sequence[ContainerAllocation], evidence: Evidence) -> Iterator[Entry]:
    name = (containers[0].namespace, containers[0].pod)
    pod = evidence.pods.get(name) if evidence.pods is not None else None
    placeholders: list[ContainerAllocation] = []
    for container in containers:
        annotated: list[DeviceIds] = []
        for devices in container.devices:
            if vgpu.is_told_by_annotation(devices, pod):
                annotated.append(devices)
            else:
                yield from _listed_entries(container, devices)
        if annotated:
            placeholders.append(replace(container, devices=tuple(annotated)))
        yield from entries(container, evidence)
    yield from vgpu.entries(placeholders, pod)


def _listed_entries(container: ContainerAllocation, devices: DeviceIds) -> Iterator[Entry]:
    holder = (container.namespace, container.pod, container.container)
    source = SOURCES.get(devices.resource, DEVICE_PLUGIN)
    seen: set[ParsedId] = set()
    for device_id in telling(devices.resource, devices.ids):
        parsed = parse(devices.resource, device_id)
        if devices.resource in SOURCES and not container.pod and parsed.kind is not IdKind.UNKNOWN:
            parsed = undecided(parsed, UNNAMED_REASON)
        if parsed.kind is IdKind.UNKNOWN:  # there can be tens of thousands of them; one entry is enough
            if parsed in seen:
                continue
            seen.add(parsed)
        yield Entry(holder=holder, resource=devices.resource, source=source, device_id=device_id, parsed=parsed)


def _match(
    entries: Sequence[Entry], inventory: Inventory, counts: ReplicaCounts
) -> tuple[dict[str, list[Entry]], dict[Unresolved, Entry]]:
    """Find each entry's devices: return entries by device UUID, and the entries without a device."""
    by_profile = Counter(
        place for _, place in {(entry.device_id, _profile(entry, inventory)) for entry in entries} if place is not None
    )
    resolved: dict[str, list[Entry]] = {}
    unresolved: dict[Unresolved, Entry] = {}
    for entry in entries:
        found, reason = inventory.resolve(entry.parsed)
        place = _profile(entry, inventory)
        if place is not None and by_profile[place] > 1:
            found, reason = (), "dra_unresolved"  # two claims, one instance: the driver lacks one of the instances
        if not found:
            unresolved.setdefault(_unresolved(entry, reason, inventory), entry)
        for uuid in found:
            if entry.is_replica and counts.of(uuid, entry.resource) is None:
                unresolved.setdefault(_unresolved(entry, REPLICAS_UNKNOWN, inventory), entry)
                continue
            gpu = inventory.gpus[inventory.gpu_of(uuid)]
            if entry.declared and entry.declared.is_of_unknown_whole(gpu.memory_total_bytes):
                unresolved.setdefault(_unresolved(entry, MEMORY_UNKNOWN, inventory), entry)
            else:
                resolved.setdefault(uuid, []).append(entry)
    return resolved, unresolved


def _profile(entry: Entry, inventory: Inventory) -> tuple[str | None, str] | None:
    """Return GPU and profile of an entry that identifies its instance by these alone."""
    if entry.parsed.profile is None or inventory.knows_places(entry.parsed):
        return None
    return inventory.physical(entry.parsed), entry.parsed.profile


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
    """Return resource and id of each advertised device; ``None`` if the kubelet does not report them."""
    if allocatable is None:
        return None
    return [
        (devices.resource, parse(devices.resource, device_id))
        for devices in allocatable
        for device_id in telling(devices.resource, devices.ids)
    ]


def _replicas(ids: Iterable[tuple[str, ParsedId]], inventory: Inventory) -> Iterator[Replica]:
    """Yield the replicas among ids, each with its resource; also of devices that the driver does not see (yet)."""
    for resource, parsed in ids:
        if parsed.replica is not None:
            named = (parsed.uuid,) if parsed.uuid and parsed.kind in {IdKind.GPU, IdKind.MIG} else ()
            for uuid in inventory.resolve(parsed)[0] or named:
                yield uuid, resource, parsed.replica


def _remembered(counts: ReplicaCounts, inventory: Inventory) -> dict[ReplicaKey, int]:
    """Return the counts of devices that are present, advertised or held; all counts while no device is seen."""
    return {
        key: count
        for key, count in counts.told.items()
        if not inventory.gpus or key in counts.current or key[0] in inventory.gpus or key[0] in inventory.instances
    }


def _holders(
    resolved: Mapping[str, list[Entry]], counts: ReplicaCounts, inventory: Inventory, evidence: Evidence
) -> dict[str, tuple[Holder, ...]]:
    of_device = {
        uuid: shares.divide(
            uuid,
            entries,
            counts,
            device_bytes=inventory.gpus[inventory.gpu_of(uuid)].memory_total_bytes,
            is_instance=uuid in inventory.instances,
        )
        for uuid, entries in resolved.items()
    }
    used: dict[str, float] = dict.fromkeys(inventory.gpus, 0.0)
    for uuid, holders in of_device.items():
        used[inventory.gpu_of(uuid)] += inventory.part_of_gpu(uuid).ratio * sum(one.share_ratio for one in holders)
    # A whole GPU and an instance of it can both be listed while the node is being partitioned.
    return {
        uuid: tuple(
            _of_gpu(one, max(used[inventory.gpu_of(uuid)], 1.0), inventory.part_of_gpu(uuid), evidence)
            for one in holders
        )
        for uuid, holders in of_device.items()
    }


def _of_gpu(holder: Holder, excess: float, device: PartOfGpu, evidence: Evidence) -> Holder:
    """Set a holder's share of the physical GPU, and its pod's UID if that is known."""
    known = evidence.pods.get((holder.namespace, holder.pod)) if evidence.pods is not None else None
    return replace(
        holder,
        share_ratio=device.ratio * holder.share_ratio / excess,
        share_estimated=holder.share_estimated or device.estimated or excess > shares.WHOLE_WITHIN_ROUNDING,
        pod_uid=known.uid if known else None,
    )

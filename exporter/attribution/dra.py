"""Devices of DRA claims: what the kubelet lists, resolved through ResourceSlices and the claims' own allocations."""

import re
from collections.abc import Iterator
from dataclasses import replace

from exporter.attribution.device_ids import GPU_DRA_DRIVER, IdKind, ParsedId, comparable_profile, parse_claimed
from exporter.attribution.entries import Declared, Entry, undecided
from exporter.attribution.evidence import AllocatedDevice, Evidence, SliceDevice
from exporter.attribution.shares import DRA
from exporter.model import ClaimedDevice, ContainerAllocation

_CDI_NAME = re.compile(
    r"[^=]+/claim=(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})-(?P<device>.+)", re.ASCII | re.IGNORECASE
)


def entries(container: ContainerAllocation, evidence: Evidence) -> Iterator[Entry]:
    """Give every GPU that a container holds by a claim; what it only monitors is left out."""
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


def claim_uid(claim: ClaimedDevice) -> str | None:
    """Read the claim's UID from its CDI name, ``None`` where no name has it.

    Kubelets may list the names of a claim's other devices with each of them: that says nothing else of the claim.
    """
    names = [match for name in claim.cdi_names if (match := _CDI_NAME.fullmatch(name))]
    own = [match for match in names if match["device"] == claim.device]
    uids = {match["uid"].lower() for match in own or names}
    return uids.pop() if len(uids) == 1 else None


def _key_of(claim: ClaimedDevice) -> str:
    return claim_uid(claim) or f"{claim.claim_namespace}/{claim.claim_name}"


def advertised(evidence: Evidence) -> list[SliceDevice] | None:
    """Give the devices of this node's ResourceSlices that its driver can see; ``None`` while no slice is known."""
    if evidence.devices is None:
        return None
    return [device for device in evidence.devices.values() if device.kind in ("gpu", "mig")]


def _as_sliced(device: SliceDevice, by_name: ParsedId) -> ParsedId:
    if device.kind == "vfio":
        return replace(by_name, kind=IdKind.UNKNOWN, reason="dra_passed_through")
    if device.uuid:
        kind = IdKind.MIG if device.kind == "mig" else IdKind.GPU
        return ParsedId(kind=kind, uuid=device.uuid)
    if device.kind != "mig" or not device.parent_uuid:
        return by_name
    # A name of the form before v25.12 has numbers too, with other meanings: there only the attributes count.
    return ParsedId(
        kind=IdKind.MINOR_PROFILE,
        uuid=device.parent_uuid,
        profile=comparable_profile(device.profile) or by_name.profile,
        profile_id=by_name.profile_id,
        placement_start=by_name.placement_start,
    )


def _allocated(claim: ClaimedDevice, evidence: Evidence) -> tuple[AllocatedDevice | None, bool]:
    """Give the claim's own word on a device, and whether it is still to come."""
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

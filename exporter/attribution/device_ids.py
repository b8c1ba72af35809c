"""Parses device-plugin ids and DRA device names; pure, without guesses.

Patterns are anchored, so that they match only complete ids. If an id is a placeholder (HAMi, volcano, AliCloud,
Tencent: a pod annotation names the device), the result has a reason instead of a device.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from exporter.model.attribution import ClaimedDevice

GPU_DRA_DRIVER = "gpu.nvidia.com"

_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Nine digits cover every meaningful number and keep int() from parsing absurdly long input.
_NUMBER = r"[0-9]{1,9}"
_FLAGS = re.ASCII | re.IGNORECASE
_REPLICA = re.compile(rf"(?P<base>.+)::(?P<replica>{_NUMBER})", _FLAGS)
_VGPU = re.compile(rf"(?P<base>nvidia.+)/vgpu(?P<replica>{_NUMBER})", re.ASCII)
# Groups are named like the fields of ``ParsedId``.
_GPU = re.compile(rf"(?P<uuid>GPU-{_HEX})", _FLAGS)
_MIG = re.compile(rf"(?P<uuid>MIG-{_HEX})", _FLAGS)
_LEGACY_MIG = re.compile(
    rf"MIG-(?P<uuid>GPU-{_HEX})/(?P<gpu_instance_id>{_NUMBER})/(?P<compute_instance_id>{_NUMBER})", _FLAGS
)
_MINOR = re.compile(rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gpu_instance_id>{_NUMBER}))?", re.ASCII)
_PLACEHOLDER = re.compile(rf"(?P<uuid>GPU-{_HEX})-(?:_-)?(?:(?:memory|core)-)?(?P<replica>{_NUMBER})", _FLAGS)

_DRA_GPU = re.compile(rf"gpu-(?P<minor>{_NUMBER})", re.ASCII)
# Before v25.12, three numbers follow "mig-"; only the newer form starts with a profile, which contains a "g".
_DRA_MIG = re.compile(
    rf"gpu-(?P<minor>{_NUMBER})-mig-(?P<profile>[0-9]+c?[0-9]*g[0-9a-z.+-]*)-"
    rf"(?P<profile_id>{_NUMBER})-(?P<placement_start>{_NUMBER})",
    re.ASCII,
)
_DRA_PART = re.compile(rf"gpu-(?P<minor>{_NUMBER})-mig-", re.ASCII)
_DRA_VFIO = re.compile(rf"gpu-vfio-{_NUMBER}", re.ASCII)

_CDI_NAME = re.compile(rf"[^=]+/claim=(?P<uid>{_HEX})-(?P<device>.+)", _FLAGS)

_ANNOTATED_RESOURCES = ("volcano.sh/", "aliyun.com/gpu-", "tencent.com/vcuda-")
_UNIT_RESOURCES = ("volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "aliyun.com/gpu-mem", "tencent.com/vcuda-")
_NAMED_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")
_AWS_RESOURCE = "k8s.amazonaws.com/vgpu"


class IdKind(StrEnum):
    """Kind of device that an id identifies, before the search for it on the node."""

    GPU = "gpu"
    """A whole GPU by ``uuid``."""
    MIG = "mig"
    """A MIG instance by ``uuid``."""
    LEGACY_MIG = "legacy_mig"
    """A MIG instance by parent ``uuid``, ``gpu_instance_id`` and ``compute_instance_id``."""
    MINOR = "minor"
    """A GPU by the N of ``/dev/nvidiaN``, or with ``gpu_instance_id`` a MIG instance of it."""
    MINOR_PROFILE = "minor_profile"
    """A MIG instance of a GPU by ``minor`` or ``uuid``, identified by its ``profile`` and its placement."""
    ALL = "all"
    """Every GPU of the node (WSL), or its only GPU (Tegra)."""
    NEEDS_ANNOTATION = "needs_annotation"
    """A placeholder; a pod annotation names the device. ``uuid`` is that of the id and may be another device's."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedId:
    """A parsed id. UUIDs are in the driver's spelling: prefix, lower-case digits."""

    kind: IdKind
    uuid: str | None = None
    minor: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    profile: str | None = None
    """Profile name, only lower-case letters and digits: ``1g24gb``."""
    profile_id: int | None = None
    """Number of the profile in NVML; ``None`` if the id has none."""
    placement_start: int | None = None
    """First memory slice of the instance; ``None`` if the id has none."""
    replica: int | None = None
    """Number of the replica of a shared device; ``None`` if the id has none."""
    reason: str = ""
    """Reason in snake case for ``NEEDS_ANNOTATION`` and ``UNKNOWN``; otherwise empty."""


_BY_UUID = frozenset({IdKind.GPU, IdKind.MIG, IdKind.LEGACY_MIG})
_UNKNOWN = ParsedId(kind=IdKind.UNKNOWN, reason="unknown_form")


@lru_cache(maxsize=4096)
def parse(resource: str, device_id: str) -> ParsedId:
    """Parse a device-plugin id.

    Args:
        resource: Resource name of the id in the kubelet's list; decides between ambiguous forms.
        device_id: The id, in any of the forms that the known device plugins use.

    Returns:
        The parsed id; ``IdKind.UNKNOWN`` with a reason for any other text. Never raises.
    """
    # Cached: every sample parses the same few ids.
    if resource.startswith(_ANNOTATED_RESOURCES):
        return _needs_annotation(_PLACEHOLDER.fullmatch(device_id))
    if device_id in ("all", "tegra"):
        return ParsedId(kind=IdKind.ALL)
    if shared := _REPLICA.fullmatch(device_id):
        return _uuid_form(shared["base"], int(shared["replica"])) or _UNKNOWN
    if shared := _VGPU.fullmatch(device_id):
        return _minor_form(shared["base"], int(shared["replica"])) or _UNKNOWN
    return _uuid_form(device_id, None) or _minor_form(device_id, None) or _placeholder_form(resource, device_id)


def parse_claimed(driver: str, device: str) -> ParsedId | None:
    """Parse the device name of a DRA claim; only the parts that are reliable without its ResourceSlice.

    Args:
        driver: DRA driver name.
        device: Device name within the driver's pool, e.g. ``gpu-0`` or ``gpu-2-mig-1g24gb-19-0``.

    Returns:
        The parsed name; ``None`` if the devices of the driver are not GPUs (compute domains, other vendors).
    """
    if driver != GPU_DRA_DRIVER:
        return None
    if whole := _DRA_GPU.fullmatch(device):
        return _parsed(IdKind.MINOR, whole)
    if part := _DRA_MIG.fullmatch(device):
        return _parsed(IdKind.MINOR_PROFILE, part)
    if _DRA_VFIO.fullmatch(device):
        return ParsedId(kind=IdKind.UNKNOWN, reason="dra_passed_through")
    return _parsed(IdKind.UNKNOWN, _DRA_PART.match(device), reason="dra_unresolved")


def claim_uid(claim: ClaimedDevice) -> str | None:
    """Read the UID of the claim from its CDI names; ``None`` if no name contains it.

    Kubelets may list the CDI names of other devices of the claim with each device. All contain the same UID.
    """
    names = [match for name in claim.cdi_names if (match := _CDI_NAME.fullmatch(name))]
    own = [match for match in names if match["device"] == claim.device]
    uids = {match["uid"].lower() for match in own or names}
    return uids.pop() if len(uids) == 1 else None


def significant_ids(resource: str, ids: Sequence[str]) -> tuple[str, ...]:
    """Drop redundant ids: for a plugin with one id per MiB, keep one id per GPU.

    Args:
        resource: Resource name that the kubelet lists them under.
        ids: As the kubelet lists them.
    """
    if not ids or parse(resource, ids[0]).kind is not IdKind.NEEDS_ANNOTATION:
        return tuple(dict.fromkeys(ids))
    named: dict[str, str] = {}
    for device_id in ids:
        named.setdefault(device_id[:_NAMED_LENGTH] if device_id.startswith("GPU-") else "", device_id)
    return tuple(named.values())


def named_devices(resource: str, ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids that are UUIDs of GPUs or MIG instances, for any resource name.

    Args:
        resource: Resource name that the kubelet lists them under.
        ids: Ids in the kubelet's list. The ids of a plugin have the same form, so the first decides for all.
    """
    if not ids or parse(resource, ids[0]).kind not in _BY_UUID:
        return ()
    return tuple(one for one in ids if parse(resource, one).kind in _BY_UUID)


def is_per_unit(resource: str) -> bool:
    """Return whether a resource has one id per unit of memory or compute, next to another resource for devices."""
    return resource.startswith(_UNIT_RESOURCES)


def comparable_profile(profile: str) -> str:
    """Normalise a MIG profile name: all spellings of ``1g.10gb+me``, such as ``1g10gb-me``, become ``1g10gbme``."""
    return re.sub(r"[^0-9a-z]", "", profile.lower())


def _parsed(kind: IdKind, match: re.Match[str] | None, **more: Any) -> ParsedId:  # noqa: ANN401 - fields of ParsedId
    """Build an id from the groups of a pattern; ``more`` adds fields, or replaces the values of groups."""
    groups = match.groupdict() if match else {}
    fields = {name: _spelt(name, text) for name, text in groups.items() if text is not None}
    return ParsedId(kind=kind, **{**fields, **more})


def _spelt(field: str, text: str) -> str | int:
    if field == "uuid":
        return text[:4].upper() + text[4:].lower()
    return comparable_profile(text) if field == "profile" else int(text)


def _uuid_form(text: str, replica: int | None) -> ParsedId | None:
    for kind, form in ((IdKind.GPU, _GPU), (IdKind.MIG, _MIG), (IdKind.LEGACY_MIG, _LEGACY_MIG)):
        if match := form.fullmatch(text):
            return _parsed(kind, match, replica=replica)
    return None


def _minor_form(text: str, replica: int | None) -> ParsedId | None:
    match = _MINOR.fullmatch(text)
    if match is None:
        return None
    compute = None if match["gpu_instance_id"] is None else 0
    return _parsed(IdKind.MINOR, match, compute_instance_id=compute, replica=replica)


def _placeholder_form(resource: str, device_id: str) -> ParsedId:
    match = _PLACEHOLDER.fullmatch(device_id)
    if match is None:
        return _UNKNOWN
    # Only the ids of this plugin contain the UUID of the allocated device.
    return _parsed(IdKind.GPU, match) if resource == _AWS_RESOURCE else _needs_annotation(match)


def _needs_annotation(match: re.Match[str] | None) -> ParsedId:
    return _parsed(IdKind.NEEDS_ANNOTATION, match, replica=None, reason="needs_annotation")


ReplicaKey = tuple[str, str]
"""Device UUID and resource."""

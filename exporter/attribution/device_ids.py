"""What a device-plugin id or a DRA device name says about the device behind it; pure, and never a guess.

The shape of an id is not trusted: patterns are anchored, and where an id is only a placeholder (HAMi, volcano,
AliCloud, Tencent: the truth is in a pod annotation) the answer says so instead of naming a device.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from exporter.attribution.shares import WHOLE_WITHIN_ROUNDING, ReplicaKey

GPU_DRA_DRIVER = "gpu.nvidia.com"

_HEX = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Nine digits hold every number that can mean something and keep int() off absurd input.
_NUMBER = r"[0-9]{1,9}"
_FLAGS = re.ASCII | re.IGNORECASE
_REPLICA = re.compile(rf"(?P<base>.+)::(?P<replica>{_NUMBER})", _FLAGS)
_VGPU = re.compile(rf"(?P<base>nvidia.+)/vgpu(?P<replica>{_NUMBER})", re.ASCII)
_GPU = re.compile(rf"GPU-(?P<uuid>{_HEX})", _FLAGS)
_MIG = re.compile(rf"MIG-(?P<uuid>{_HEX})", _FLAGS)
_LEGACY_MIG = re.compile(rf"MIG-GPU-(?P<uuid>{_HEX})/(?P<gi>{_NUMBER})/(?P<ci>{_NUMBER})", _FLAGS)
_MINOR = re.compile(rf"nvidia(?P<minor>{_NUMBER})(?:/gi(?P<gi>{_NUMBER}))?", re.ASCII)
_PLACEHOLDER = re.compile(rf"GPU-(?P<uuid>{_HEX})-(?:_-)?(?:(?:memory|core)-)?(?P<number>{_NUMBER})", _FLAGS)

_DRA_GPU = re.compile(rf"gpu-(?P<minor>{_NUMBER})", re.ASCII)
# Before v25.12 the part behind "mig-" is three numbers; only the newer form begins with a profile, which has a "g".
_DRA_MIG = re.compile(
    rf"gpu-(?P<minor>{_NUMBER})-mig-(?P<profile>[0-9]+c?[0-9]*g[0-9a-z.+-]*)-(?P<number>{_NUMBER})-(?P<start>{_NUMBER})",
    re.ASCII,
)
_DRA_PART = re.compile(rf"gpu-(?P<minor>{_NUMBER})-mig-", re.ASCII)
_DRA_VFIO = re.compile(rf"gpu-vfio-{_NUMBER}", re.ASCII)

_ANNOTATED_RESOURCES = ("volcano.sh/", "aliyun.com/gpu-", "tencent.com/vcuda-")
_UNIT_RESOURCES = ("volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores", "aliyun.com/gpu-mem", "tencent.com/vcuda-")
_NAMED_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")
_AWS_RESOURCE = "k8s.amazonaws.com/vgpu"


class IdKind(StrEnum):
    """What an id resolves to, before any device is looked at."""

    GPU = "gpu"
    """A whole GPU by ``uuid``."""
    MIG = "mig"
    """A MIG instance by ``uuid``."""
    LEGACY_MIG = "legacy_mig"
    """A MIG instance by parent ``uuid``, ``gpu_instance_id`` and ``compute_instance_id``."""
    MINOR = "minor"
    """A GPU by the N of ``/dev/nvidiaN``, or with ``gpu_instance_id`` a MIG instance of it."""
    MINOR_PROFILE = "minor_profile"
    """A MIG instance of a GPU by ``minor`` or ``uuid``, known by its ``profile`` and where it lies on the GPU."""
    INDEX = "index"
    """A whole GPU by its number in the driver's order."""
    ALL = "all"
    """Every GPU of the node (WSL), or the one that there is (Tegra)."""
    NEEDS_ANNOTATION = "needs_annotation"
    """A placeholder; which device is meant is in a pod annotation. ``uuid`` is what it names, not what is held."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedId:
    """An id taken apart. UUIDs are in the driver's spelling: prefix, lower-case digits."""

    kind: IdKind
    uuid: str | None = None
    minor: int | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    profile: str | None = None
    """Letters and digits only, lower case: ``1g24gb``."""
    profile_id: int | None = None
    """NVML's number of the profile."""
    placement_start: int | None = None
    """First memory slice."""
    index: int | None = None
    replica: int | None = None
    """Running number of a shared device's replica; ``None`` where the id names no replica."""
    reason: str = ""
    """Snake case; set for ``NEEDS_ANNOTATION`` and ``UNKNOWN``."""


_BY_UUID = frozenset({IdKind.GPU, IdKind.MIG, IdKind.LEGACY_MIG})
_UNKNOWN = ParsedId(kind=IdKind.UNKNOWN, reason="unknown_form")


@lru_cache(maxsize=4096)
def parse(resource: str, device_id: str) -> ParsedId:
    """Take a device-plugin id apart.

    Args:
        resource: Resource name that the kubelet lists it under; decides where the id alone cannot.
        device_id: The id, in any of the forms that the known device plugins use.

    Returns:
        What the id says; ``IdKind.UNKNOWN`` with a reason for anything else. Never raises.
    """
    # Remembered, as the same few ids are asked for with every sample.
    if resource.startswith(_ANNOTATED_RESOURCES):
        named = _PLACEHOLDER.fullmatch(device_id)
        return _needs_annotation(f"GPU-{named['uuid'].lower()}" if named else None)
    if device_id in ("all", "tegra"):
        return ParsedId(kind=IdKind.ALL)
    if shared := _REPLICA.fullmatch(device_id):
        return _uuid_form(shared["base"], int(shared["replica"])) or _UNKNOWN
    if shared := _VGPU.fullmatch(device_id):
        return _minor_form(shared["base"], int(shared["replica"])) or _UNKNOWN
    return _uuid_form(device_id, None) or _minor_form(device_id, None) or _placeholder_form(resource, device_id)


def parse_claimed(driver: str, device: str) -> ParsedId | None:
    """Take the device name of a DRA claim apart, as far as it can be believed without its ResourceSlice.

    Args:
        driver: DRA driver name.
        device: Device name within the driver's pool, e.g. ``gpu-0`` or ``gpu-2-mig-1g24gb-19-0``.

    Returns:
        What the name says, or ``None`` where the driver's devices are no GPUs (compute domains, other vendors).
    """
    if driver != GPU_DRA_DRIVER:
        return None
    if whole := _DRA_GPU.fullmatch(device):
        return ParsedId(kind=IdKind.MINOR, minor=int(whole["minor"]))
    if part := _DRA_MIG.fullmatch(device):
        return ParsedId(
            kind=IdKind.MINOR_PROFILE,
            minor=int(part["minor"]),
            profile=comparable_profile(part["profile"]),
            profile_id=int(part["number"]),
            placement_start=int(part["start"]),
        )
    if _DRA_VFIO.fullmatch(device):
        return ParsedId(kind=IdKind.UNKNOWN, reason="dra_passed_through")
    parent = _DRA_PART.match(device)
    return ParsedId(kind=IdKind.UNKNOWN, minor=int(parent["minor"]) if parent else None, reason="dra_unresolved")


def telling(resource: str, ids: Sequence[str]) -> tuple[str, ...]:
    """Leave out ids that say nothing new: of a plugin with one id per MiB, all but one per GPU that they name.

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
    """Return the ids that are UUIDs of GPUs or MIG instances, whatever the resource is called.

    Args:
        resource: Resource name that the kubelet lists them under.
        ids: As the kubelet lists them; all of one plugin have one form, so the first decides whether to read the rest.
    """
    if not ids or parse(resource, ids[0]).kind not in _BY_UUID:
        return ()
    return tuple(one for one in ids if parse(resource, one).kind in _BY_UUID)


def is_per_unit(resource: str) -> bool:
    """Tell whether a resource has an id per unit of memory or compute, beside another one that counts devices."""
    return resource.startswith(_UNIT_RESOURCES)


def comparable_profile(profile: str) -> str:
    """Reduce a MIG profile name to what all its spellings share: ``1g.10gb+me`` and ``1g10gb-me`` are ``1g10gbme``."""
    return re.sub(r"[^0-9a-z]", "", profile.lower())


def _uuid_form(text: str, replica: int | None) -> ParsedId | None:
    if match := _GPU.fullmatch(text):
        return ParsedId(kind=IdKind.GPU, uuid=f"GPU-{match['uuid'].lower()}", replica=replica)
    if match := _MIG.fullmatch(text):
        return ParsedId(kind=IdKind.MIG, uuid=f"MIG-{match['uuid'].lower()}", replica=replica)
    if match := _LEGACY_MIG.fullmatch(text):
        return ParsedId(
            kind=IdKind.LEGACY_MIG,
            uuid=f"GPU-{match['uuid'].lower()}",
            gpu_instance_id=int(match["gi"]),
            compute_instance_id=int(match["ci"]),
            replica=replica,
        )
    return None


def _minor_form(text: str, replica: int | None) -> ParsedId | None:
    match = _MINOR.fullmatch(text)
    if match is None:
        return None
    instance = match["gi"]
    return ParsedId(
        kind=IdKind.MINOR,
        minor=int(match["minor"]),
        gpu_instance_id=None if instance is None else int(instance),
        compute_instance_id=None if instance is None else 0,
        replica=replica,
    )


def _placeholder_form(resource: str, device_id: str) -> ParsedId:
    match = _PLACEHOLDER.fullmatch(device_id)
    if match is None:
        return _UNKNOWN
    uuid = f"GPU-{match['uuid'].lower()}"
    if resource == _AWS_RESOURCE:  # the one plugin of this form whose UUID is the device
        return ParsedId(kind=IdKind.GPU, uuid=uuid, replica=int(match["number"]))
    return _needs_annotation(uuid)


def _needs_annotation(uuid: str | None) -> ParsedId:
    return ParsedId(kind=IdKind.NEEDS_ANNOTATION, uuid=uuid, reason="needs_annotation")


LARGEST = 1_000_000_000
"""Numbers of replicas have at most nine digits."""


@dataclass(slots=True)
class Replicas:
    """What the kubelet advertised last of each shared device that is there or held."""

    counts: Mapping[ReplicaKey, int] = field(default_factory=dict)
    """By (device UUID, resource)."""

    def dump(self) -> list[list[str | int]]:
        """Return what JSON can keep: lists of device UUID, resource and count."""
        return [[uuid, resource, count] for (uuid, resource), count in self.counts.items()]


def counts_of(kept: object) -> dict[ReplicaKey, int]:
    """Read what ``dump`` wrote.

    Raises:
        TypeError, ValueError: It is something else.
    """
    if not isinstance(kept, list):
        raise TypeError(f"no list of replicas: {kept!r:.100}")
    counts: dict[ReplicaKey, int] = {}
    for uuid, resource, count in kept:
        if not isinstance(uuid, str) or not isinstance(resource, str) or type(count) is not int:
            raise TypeError(f"no replicas of a device: {uuid!r:.100}, {resource!r:.100}, {count!r:.100}")
        if not 1 <= count <= LARGEST:
            raise ValueError(f"no number of replicas: {count!r:.100}")
        counts[uuid, resource] = count
    return counts


ANNOTATION = "annotation"
"""Source of a holder that only its pod's annotations name."""

MIB = 1 << 20

HolderName = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The part of a device that somebody asked for and was given."""

    memory_bytes: int = 0
    """0 is not limited, as is a ratio of 0."""
    of_bytes: int | None = None
    """Of what ``memory_bytes`` is a part; ``None`` is the GPU's memory."""
    ratio: float = 0.0

    def is_of_unknown_whole(self, device_bytes: int | None) -> bool:
        """Return whether only memory was declared, and how much the GPU has in all is not known."""
        return self.memory_bytes > 0 and self.ratio <= 0 and not (self.of_bytes or device_bytes)

    def part(self, device_bytes: int | None) -> tuple[float, bool]:
        """Give the part of the device, 0..1, and whether it is a guess.

        Args:
            device_bytes: The GPU's memory, ``None`` where the driver does not tell.
        """
        whole = self.of_bytes or device_bytes
        part = max(self.memory_bytes / whole if whole else 0.0, self.ratio)
        if part <= 0:  # nothing limits it, or nothing tells of what it is a part
            return 1.0, True
        return min(part, 1.0), part > WHOLE_WITHIN_ROUNDING or (self.memory_bytes > 0 and not whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One device of one container, before it is looked for."""

    holder: HolderName
    """Namespace, pod, container."""
    resource: str
    source: str
    device_id: str
    """As it is shown where it cannot be resolved."""
    parsed: ParsedId
    share_id: str | None = None
    claim: str = ""
    """DRA: containers that name one claim have together what it has."""
    declared: Declared | None = None
    """``None`` is the whole device, or by the replicas that the id names."""
    is_placeholder: bool = False
    """The device that the id names need not be the held device."""


def undecided(parsed: ParsedId, reason: str) -> ParsedId:
    """Resolve an id to devices; on failure record the reason."""
    return replace(parsed, kind=IdKind.UNKNOWN, reason=reason)

"""Parses pods, claims and slices of the Kubernetes API, with limits on every size."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from sys import intern
from typing import Any

from exporter.attribution import vgpu
from exporter.attribution.device_ids import GPU_DRA_DRIVER
from exporter.attribution.pod_lifecycle import AllocatedDevice, SliceDevice
from exporter.model import PodMetadata

TEXT_LIMIT = 4096
LONG_TEXT_LIMIT = 64 << 10
"""A device list of HAMi has a line per container and device."""
KEYS_LIMIT = 512
"""Labels of one object; a node has up to some 200, a pod a dozen."""
LONG_KEYS = vgpu.VGPU_KEYS | vgpu.KAI_KEYS
"""Annotations that are kept of every pod, whatever is configured."""

_KEY_LIMIT = 317
_NAME_LIMIT = 253
_CONFIG_HASH = "kubernetes.io/config.hash"
_CONFIG_MIRROR = "kubernetes.io/config.mirror"
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)


def parse(item: Mapping[str, Any], wanted: frozenset[str]) -> tuple[tuple[str, str], PodMetadata] | None:
    """Read one pod.

    Args:
        item: A Pod or the PartialObjectMetadata of one; anything is borne.
        wanted: Annotations to keep, beside those that say who has which part of a GPU.

    Returns:
        (namespace, name) and the pod; ``None`` for what has no name.
    """
    metadata = _mapping(item.get("metadata"))
    namespace, name = text_of(metadata.get("namespace"), _NAME_LIMIT), text_of(metadata.get("name"), _NAME_LIMIT)
    if not namespace or not name:
        return None
    controller = _controller(metadata.get("ownerReferences"))
    kind = text_of(controller.get("kind"), _NAME_LIMIT)
    pod = PodMetadata(
        namespace=intern(namespace),
        name=name,
        uid=_uid(metadata, kind),
        labels=labels_of(item),
        annotations=annotations_of(item, wanted | LONG_KEYS),
        owner_kind=intern(kind),
        owner_name=text_of(controller.get("name"), _NAME_LIMIT),
        owner_api=intern(text_of(controller.get("apiVersion"), _NAME_LIMIT)),
    )
    return (pod.namespace, pod.name), pod


def labels_of(item: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of an object, those whose values are text or can be."""
    return _texts(_mapping(_mapping(item.get("metadata")).get("labels")))


def annotations_of(item: Mapping[str, Any], wanted: frozenset[str]) -> dict[str, str]:
    """Return the wanted annotations of an object."""
    annotations = _mapping(_mapping(item.get("metadata")).get("annotations"))
    return _texts({key: annotations[key] for key in wanted if key in annotations})


def text_of(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return a value of JSON as text that can be encoded, cut; what is no scalar is empty."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        value = str(value)
    if not isinstance(value, str):
        return ""
    # JSON can write half of a surrogate pair, and no encoder takes it.
    return value[:limit].encode(errors="replace").decode()


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in values.items():
        if value is None or isinstance(value, (list, dict)):
            continue
        if len(texts) == KEYS_LIMIT:
            break
        texts[intern(text_of(key, _KEY_LIMIT))] = text_of(value, LONG_TEXT_LIMIT if key in LONG_KEYS else TEXT_LIMIT)
    return texts


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _controller(references: object) -> Mapping[str, Any]:
    if not isinstance(references, list):
        return {}
    owners = (_mapping(reference) for reference in references)
    return next((owner for owner in owners if owner.get("controller") is True), {})


def _uid(metadata: Mapping[str, Any], owner_kind: str) -> str:
    """Return the UID in the pod's cgroups: of a static pod it is its file's hash.

    The hash alone is anybody's to write; that a pod is the image of a static one only its node may say.
    """
    annotations = _mapping(metadata.get("annotations"))
    file_hash = text_of(annotations.get(_CONFIG_HASH), _NAME_LIMIT)
    if _HASH.fullmatch(file_hash) and (_CONFIG_MIRROR in annotations or owner_kind == "Node"):
        return file_hash
    return text_of(metadata.get("uid"), _NAME_LIMIT).lower()


VERSIONS = ("v1", "v1beta2", "v1beta1")
"""Of ``resource.k8s.io``, the best first; v1alpha3 (Kubernetes 1.31) had claims of another shape."""

_DOMAIN = f"{GPU_DRA_DRIVER}/"
_QUANTITY = re.compile(r"\+?(\d{1,30}\.?\d{0,30}|\.\d{1,30})(?:([KMGTPE]i|[numkMGTPE])|[eE]([+-]?\d{1,2}))?", re.ASCII)
_UNITS = {
    **{f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)},
    **{
        letter: Decimal(10) ** power
        for letter, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)
    },
}
_MOST_BYTES = 2**63 - 1

Devices = Mapping[str, SliceDevice]
"""By name within one pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One ResourceSlice: a part of one generation of a pool."""

    pool: str
    generation: int
    slice_count: int
    """Slices that this generation consists of."""
    devices: Devices


def parse_slice(item: Mapping[str, Any]) -> tuple[tuple[str, str], Slice] | None:
    """Read one slice; a slice without devices (shared counters) counts too.

    Returns:
        ("", name) and the slice; ``None`` for what is no slice of NVIDIA's GPU driver.
    """
    spec, pool = _mapping(item.get("spec")), _mapping(_mapping(item.get("spec")).get("pool"))
    name, pool_name = text_of(_mapping(item.get("metadata")).get("name")), text_of(pool.get("name"))
    if not name or not pool_name or spec.get("driver") != GPU_DRA_DRIVER:
        return None
    devices = {
        text_of(device.get("name")): _device(device) for device in _mappings(spec.get("devices")) if device.get("name")
    }
    part = Slice(
        pool=pool_name,
        generation=_whole(pool.get("generation"), 0),
        slice_count=_whole(pool.get("resourceSliceCount"), 1),
        devices=devices,
    )
    return ("", name), part


def pools_of(slices: Iterable[Slice], before: Mapping[str, Devices]) -> dict[str, Devices]:
    """Put pools together from their slices.

    Args:
        slices: All that there are, of any generation.
        before: The last result: a driver replaces slices one by one, and meanwhile no generation is complete.

    Returns:
        Devices by pool, each of its newest complete generation; pools that never were complete are left out.
    """
    parts: dict[str, dict[int, list[Slice]]] = {}
    for part in slices:
        parts.setdefault(part.pool, {}).setdefault(part.generation, []).append(part)
    pools: dict[str, Devices] = {}
    for pool, generations in parts.items():
        complete = [
            number for number, group in generations.items() if len(group) >= max(one.slice_count for one in group)
        ]
        if complete:
            newest = generations[max(complete)]
            pools[pool] = {name: device for part in newest for name, device in part.devices.items()}
        elif pool in before:
            pools[pool] = before[pool]
    return pools


def claim_uid(item: Mapping[str, Any]) -> str:
    """Return the UID of a claim's object, in lower case; empty where it has none."""
    return text_of(_mapping(item.get("metadata")).get("uid")).lower()


def allocated_devices(item: Mapping[str, Any]) -> tuple[AllocatedDevice, ...] | None:
    """Read what a ResourceClaim was given; ``None`` while it is not allocated."""
    allocation = _mapping(item.get("status")).get("allocation")
    if not isinstance(allocation, dict):
        return None
    return tuple(
        AllocatedDevice(
            driver=text_of(result.get("driver")),
            pool=text_of(result.get("pool")),
            device=text_of(result.get("device")),
            share_id=text_of(result.get("shareID")) or None,
            admin_access=result.get("adminAccess") is True,
            consumed_memory_bytes=quantity(_named(_mapping(result.get("consumedCapacity")), "memory")),
        )
        for result in _mappings(_mapping(allocation.get("devices")).get("results"))
    )


def served_version(group: Mapping[str, Any]) -> str:
    """Choose from the API group ``resource.k8s.io`` the best version that is read here; empty for none."""
    served = {text_of(version.get("version")) for version in _mappings(group.get("versions"))}
    return next((version for version in VERSIONS if version in served), "")


def quantity(value: object) -> int | None:
    """Return a Kubernetes quantity (``40Gi``, ``1e9``, ``85899345920``) in whole units, rounded up; else ``None``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value <= _MOST_BYTES else None
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    unit = _UNITS[match[2]] if match[2] else Decimal(10) ** int(match[3] or 0)
    whole = int((Decimal(match[1]) * unit).to_integral_value(ROUND_CEILING))
    return whole if whole <= _MOST_BYTES else None


def _device(device: Mapping[str, Any]) -> SliceDevice:
    basic = device.get("basic")
    body = basic if isinstance(basic, dict) else device
    attributes, memory = _mapping(body.get("attributes")), _named(_mapping(body.get("capacity")), "memory")
    uuid = _attribute(attributes, "uuid")
    return SliceDevice(
        kind=_attribute(attributes, "type") or _kind_of(uuid),
        uuid=uuid,
        parent_uuid=_attribute(attributes, "parentUUID"),
        profile=_attribute(attributes, "profile"),
        memory_bytes=quantity(memory.get("value") if isinstance(memory, dict) else memory),
    )


def _kind_of(uuid: str) -> str:
    return {"GPU-": "gpu", "MIG-": "mig"}.get(uuid[:4], "")


def _attribute(attributes: Mapping[str, Any], name: str) -> str:
    value = _mapping(_named(attributes, name))
    return next((text_of(value[kind]) for kind in ("string", "version", "int", "bool") if kind in value), "")


def _named(values: Mapping[str, Any], name: str) -> object:
    """Look a qualified name up; without a domain the driver's own is meant."""
    return values.get(name, values.get(_DOMAIN + name))


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default

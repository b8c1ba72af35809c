"""Reads the shares that schedulers write into pod annotations: HAMi, volcano and KAI."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from exporter.attribution.device_ids import IdKind, ParsedId, comparable_profile, parse
from exporter.attribution.pod_lifecycle import Evidence
from exporter.attribution.shares import ANNOTATION, MIB, Declared, Entry, HolderName, undecided
from exporter.model.attribution import Allocations, DeviceIds, PodMetadata

HAMI_DEVICES: Final = "hami.io/vgpu-devices-allocated"
HAMI_INSTANCES: Final = "hami.io/vgpu-mig-allocations"
VOLCANO_DEVICES: Final = "volcano.sh/vgpu-ids-new"

_VOLCANO_VGPU = "volcano.sh/vgpu-"
_UNREADABLE_PREFIXES = ("volcano.sh/gpu-", "aliyun.com/", "tencent.com/")
"""Prefixes of resources whose annotations are not read."""
_NUMBER = r"[0-9]{1,9}"
_DEVICE = re.compile(rf"(?P<uuid>[^,]+),[^,]*,(?P<memory>{_NUMBER}),(?P<cores>{_NUMBER})(?:,.*)?", re.ASCII)
_NO_DEVICE = re.compile(r",[^,]*,0,0(?:,.*)?", re.ASCII)
"""Element that some versions of HAMi write for a container without a GPU."""
_PART_OF_GPU = re.compile(r"(?P<gpu>GPU-[0-9a-fA-F-]{36})\[.*\]", re.ASCII)
_COUNT = "volcano.sh/vgpu-number"
_UUID_KINDS = (IdKind.GPU, IdKind.MIG, IdKind.LEGACY_MIG)


class _Device(NamedTuple):
    """One device of one container, as an annotation names it."""

    text: str
    parsed: ParsedId
    declared: Declared | None = None


def is_annotated(devices: DeviceIds, pod: PodMetadata | None) -> bool:
    """Return whether an annotation, not the ids, names the devices of one resource of a container.

    A plain UUID of a whole GPU is always valid; no annotation changes it.
    """
    if not devices.ids:
        return False
    parsed = parse(devices.resource, devices.ids[0])
    if parsed.kind is IdKind.MIG:
        return pod is not None and HAMI_DEVICES in pod.annotations
    return parsed.kind is IdKind.NEEDS_ANNOTATION


def entries(annotated: Mapping[HolderName, Sequence[DeviceIds]], pod: PodMetadata | None) -> Iterator[Entry]:
    """Yield the entries of one pod's containers by its annotations.

    Args:
        annotated: Ids that satisfy ``is_annotated``, by container in the kubelet's order.
        pod: The pod; ``None`` if unknown.
    """
    annotations: Mapping[str, str] = pod.annotations if pod else {}
    by_key: dict[str, list[tuple[Entry, int]]] = {}
    for holder, resources in annotated.items():
        for key in dict.fromkeys(_key_of(devices.resource) for devices in resources):
            group = [devices for devices in resources if _key_of(devices.resource) == key]
            by_key.setdefault(key, []).append(_placeholder(holder, group))
    for key, placeholders in by_key.items():
        text = annotations.get(key)
        if text is None:
            yield from (_doubt(entry, "needs_annotation") for entry, _ in placeholders)
            continue
        try:
            found = _read_vgpus(text, annotations, [count for _, count in placeholders])
        except ValueError:
            yield from (_doubt(entry, "bad_annotation") for entry, _ in placeholders)
            continue
        for (entry, _), devices_of in zip(placeholders, found, strict=True):
            for device in devices_of:
                yield replace(entry, device_id=device.text, parsed=device.parsed, declared=device.declared)


def _doubt(placeholder: Entry, reason: str) -> Entry:
    return replace(placeholder, parsed=undecided(placeholder.parsed, reason), is_placeholder=True)


def _key_of(resource: str) -> str:
    if resource.startswith(_VOLCANO_VGPU):
        return VOLCANO_DEVICES
    return "" if resource.startswith(_UNREADABLE_PREFIXES) else HAMI_DEVICES


def _placeholder(holder: HolderName, group: Sequence[DeviceIds]) -> tuple[Entry, int]:
    """Return an entry for the resources of a container that belong to one annotation, and the number of devices."""
    # For a request of only memory, volcano allocates one GPU, with one id per unit of memory.
    numbers = [devices for devices in group if devices.resource == _COUNT]
    counted = numbers or [devices for devices in group if not devices.resource.startswith("volcano.sh/")]
    shown = (counted or group)[0]
    entry = Entry(
        holder=holder,
        resource=shown.resource,
        source=ANNOTATION,
        device_id=shown.ids[0],
        parsed=parse(shown.resource, shown.ids[0]),
    )
    return entry, sum(len(devices.ids) for devices in counted) or 1


def _read_vgpus(text: str, annotations: Mapping[str, str], counts: Sequence[int]) -> list[list[_Device]]:
    """Parse HAMi's form: containers end with ``;``, devices with ``:``, each ``UUID,type,MiB,cores in percent``.

    Raises:
        ValueError: The text has another form, or its containers are not those of the kubelet's list.
    """
    elements = [
        [_device(one) for one in element.split(":") if one and not _NO_DEVICE.fullmatch(one)]
        for element in text.split(";")
    ]
    if HAMI_INSTANCES in annotations and text == annotations.get(HAMI_DEVICES):
        _place(elements, annotations[HAMI_INSTANCES])
    return _aligned([element for element in elements if element], counts)


def _aligned(elements: list[list[_Device]], counts: Sequence[int]) -> list[list[_Device]]:
    """Match the elements with containers from the end, because unlisted ordinary init containers come first."""
    if len(elements) == len(counts) == 1:
        return elements
    found: list[list[_Device]] = []
    for count in reversed(counts):
        while elements and len(elements[-1]) != count:
            elements = elements[:-1]
        if not elements:
            raise ValueError("other containers than the kubelet lists")
        found.append(elements[-1])
        elements = elements[:-1]
    return found[::-1]


def _device(text: str) -> _Device:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a device")
    parsed = _named(match["uuid"])
    # A container always holds a whole instance; the numbers describe the instance.
    whole = parsed.kind is not IdKind.GPU
    declared = Declared(memory_bytes=int(match["memory"]) * MIB, ratio=int(match["cores"]) / 100)
    return _Device(match["uuid"], parsed, None if whole else declared)


def _named(uuid: str) -> ParsedId:
    parsed = parse("", uuid)
    # The meaning of other forms is unknown; a version of HAMi wrote GPU-...[1-0] for an instance.
    if parsed.kind in _UUID_KINDS and parsed.replica is None:
        return parsed
    part = _PART_OF_GPU.fullmatch(uuid)
    return ParsedId(kind=IdKind.UNKNOWN, uuid=parse("", part["gpu"]).uuid if part else None, reason="unknown_form")


def _place(elements: list[list[_Device]], text: str) -> None:
    """Set the MIG instances that HAMi created, if it created any.

    Raises:
        ValueError: The text is not in HAMi's form.
    """
    try:
        for one in json.loads(text):
            devices = elements[_index(one["containerIndex"])]
            position = _index(one["deviceIndex"])
            devices[position] = _Device(devices[position].text, _instance(one))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("no allocations of instances") from error


def _index(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not an index")
    return value


def _instance(one: Mapping[str, Any]) -> ParsedId:
    made = one.get("migUUID")
    if made:
        return _named(str(made))
    return ParsedId(
        kind=IdKind.MINOR_PROFILE,
        uuid=_named(str(one["gpuUUID"])).uuid,
        profile=comparable_profile(str(one["profile"])),
        placement_start=_index(one["placement"]["start"]),
    )


FRACTION: Final = "gpu-fraction"
MEMORY: Final = "gpu-memory"
CONTAINER: Final = "gpu-fraction-container-name"
KEYS: Final = frozenset({HAMI_DEVICES, HAMI_INSTANCES, VOLCANO_DEVICES, FRACTION, MEMORY, CONTAINER})
"""Keys of the annotations that are read."""
GROUP: Final = "runai-gpu-group"
"""Label of a reservation pod and of the pods with fractions of its GPU; for several GPUs, ``<label>/<group>``."""
RESOURCE: Final = "gpu-fraction"

_RATIO = re.compile(r"[0-9]{0,9}(?:\.[0-9]{0,18})?", re.ASCII)
_MIB_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)


class Groups:
    """Finds the pods with fractions of the GPU of each group.

    Args:
        evidence: API data; its pods must be known.
        allocations: The kubelet's answer, for the containers without devices.
    """

    def __init__(self, evidence: Evidence, allocations: Allocations) -> None:
        self._evidence = evidence
        self._containers: dict[tuple[str, str], list[str]] = {}
        """Names of the containers without devices, by pod."""
        for namespace, pod_name, container in allocations.other_containers:
            self._containers.setdefault((namespace, pod_name), []).append(container)
        listed = {*self._containers, *((one.namespace, one.pod) for one in allocations.containers)}
        pods = evidence.pods or {}
        self._members: dict[str, list[PodMetadata]] = {}
        self._awaited: set[str] = set()
        """Groups with a member that the kubelet does not list yet."""
        for name, pod in pods.items():
            if pod.namespace in evidence.reservation_namespaces or evidence.holds_nothing(name):
                continue
            for group in _groups(pod):
                if name in listed or (evidence.is_followed and not self._containers):
                    self._members.setdefault(group, []).append(pod)
                elif evidence.is_followed:  # otherwise the pod may have ended unnoticed
                    self._awaited.add(group)
        self._may_lack_members = not evidence.is_followed and any(
            name not in pods and not evidence.holds_nothing(name) for name in self._containers
        )

    def divided(self, entry: Entry) -> Iterator[Entry]:
        """Yield the entries of the pods for which a reservation pod holds a device.

        Args:
            entry: Entry of a pod in a reservation namespace. If no pods match its labels, the pod keeps the device.
        """
        pod = self._evidence.pod(*entry.holder[:2])
        if pod is None:
            yield replace(entry, parsed=undecided(entry.parsed, "reservation_pending"))
            return
        groups = _groups(pod)
        if not groups:
            yield entry
        elif self._may_lack_members or groups & self._awaited:
            yield replace(entry, parsed=undecided(entry.parsed, "reservation_pending"))
        members = {(one.namespace, one.name): one for group in groups for one in self._members.get(group, ())}
        for member in members.values():
            declared, reason = _declared(member)
            yield replace(
                entry,
                holder=(member.namespace, member.name, self._container(member)),
                resource=RESOURCE,
                source=ANNOTATION,
                parsed=undecided(entry.parsed, reason) if reason else entry.parsed,
                declared=declared,
            )

    def _container(self, member: PodMetadata) -> str:
        named = member.annotations.get(CONTAINER, "")
        listed = self._containers.get((member.namespace, member.name), [])
        return named or (listed[0] if len(listed) == 1 else "")


def _groups(pod: PodMetadata) -> frozenset[str]:
    several = {key.removeprefix(f"{GROUP}/") for key in pod.labels if key.startswith(f"{GROUP}/")}
    single = pod.labels.get(GROUP, "")
    return frozenset(several | {single}) - {""}


def _declared(member: PodMetadata) -> tuple[Declared | None, str]:
    """Return the share that a pod has requested, or the reason why it is unknown."""
    fraction, memory = member.annotations.get(FRACTION), member.annotations.get(MEMORY)
    if fraction is not None:
        ratio = float(fraction) if _RATIO.fullmatch(fraction) and fraction.strip(".") else 0.0
        declared = Declared(ratio=ratio)
    elif memory is not None:
        declared = Declared(memory_bytes=int(memory) * MIB if _MIB_NUMBER.fullmatch(memory) else 0)
    else:
        return None, "needs_annotation"
    return (declared, "") if declared != Declared() else (None, "bad_annotation")

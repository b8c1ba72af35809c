"""Reads MIG mode, profiles and instances of a GPU."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pynvml

from exporter.gpu.nvml import library
from exporter.gpu.nvml.library import NvmlCode
from exporter.model import MigInstance

_OLD_UUID = re.compile(r"^MIG-(?P<parent>GPU-[0-9a-fA-F-]+)/(?P<gpu_instance>\d+)/(?P<compute_instance>\d+)$")
_FULL_COMPUTE_SLICES = 7
_FULL_MEMORY_SLICES = 8
_PROFILE_INFO_VERSION = 1
_NOT_OFFERED = library.UNAVAILABLE | {NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND}
"""Codes for a missing feature or object; any other code does not imply that it is missing."""
_VANISHED = frozenset({NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND})
"""Codes of calls with the handle of a destroyed instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The possible partitioning of a GPU; zeros if there is none."""

    enabled: bool = False
    compute_slices: int = 0
    memory_slices: int = 0
    memory_mib: int = 0
    """Memory of the largest profile in MiB."""


class MigLayout(NamedTuple):
    """The MIG instances that a GPU reports."""

    found: tuple["Found", ...]
    failed: tuple["Failed", ...] = ()
    """Instances that the driver did not describe; empty if ``found`` is complete."""


class Failed(NamedTuple):
    """An instance that the driver did not describe."""

    slot: int
    uuid: str | None
    """UUID; ``None`` if the driver did not return it."""
    error: pynvml.NVMLError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One MIG instance with its handle, which is valid until the instance is destroyed."""

    instance: MigInstance
    slot: int
    """Device index of the instance within the GPU."""
    handle: Any
    gpu_instance_slices: int

    @property
    def fills_its_gpu_instance(self) -> bool:
        """Whether this compute instance is all of its GPU instance."""
        return self.instance.compute_slices == self.gpu_instance_slices


def shape(handle: Any) -> Shape:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return whether MIG is enabled and the size of the largest profile.

    Raises:
        pynvml.NVMLError: The device does not report it.
    """
    current = enabled(handle)
    if current is None:
        return Shape()
    largest = (0, 0)
    for profile in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        # Not every GPU offers every profile; a profile missing for another reason would make all shares wrong.
        info = library.optional(
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, profile, _PROFILE_INFO_VERSION, absent=_NOT_OFFERED
        )
        if info is not None:
            largest = max(largest, (int(info.sliceCount), int(info.memorySizeMB)))
    slices, memory_mib = largest
    # The driver reports only compute slices; GPUs with 7 of them have 8 of memory, others the same number.
    memory_slices = _FULL_MEMORY_SLICES if slices == _FULL_COMPUTE_SLICES else slices
    return Shape(enabled=current, compute_slices=slices, memory_slices=memory_slices, memory_mib=memory_mib)


def enabled(handle: Any) -> bool | None:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return whether MIG is enabled now, or ``None`` for a GPU without MIG.

    Raises:
        pynvml.NVMLError: The device does not report it.
    """
    mode = library.optional(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0])


def instances(handle: Any, parent_uuid: str, of: Shape) -> MigLayout:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return every compute instance of a GPU, in the driver's order; one that is destroyed during the call is left out.

    Raises:
        pynvml.NVMLError: The GPU is lost, the driver gone, or it does not report the maximum number.
    """
    found: list[Found] = []
    failed: list[Failed] = []
    # A GPU that fails to report its instances still has them: only "not offered" means none.
    slots = library.optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle, absent=_NOT_OFFERED)
    for slot in range(slots or 0):
        uuid = None
        try:
            one = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except pynvml.NVMLError as error:
            # An empty slot is not an instance: instances keep their index when another one is destroyed.
            if library.code_unless_fatal(error) not in _NOT_OFFERED:
                failed.append(Failed(slot, uuid, error))
            continue
        try:
            uuid = str(pynvml.nvmlDeviceGetUUID(one))
            found.append(_describe(handle, one, slot, uuid, parent_uuid, of))
        except pynvml.NVMLError as error:
            if library.code_unless_fatal(error) not in _VANISHED:
                failed.append(Failed(slot, uuid, error))
    return MigLayout(tuple(found), tuple(failed))


def profile_name(*, compute_slices: int, instance_slices: int, memory_mib: int, total_mib: int) -> str:
    """Return the profile's name from its size, for drivers that do not put it into the device's name."""
    eighths = -(-_FULL_MEMORY_SLICES * memory_mib // total_mib) if total_mib else 0
    gigabytes = round(eighths / _FULL_MEMORY_SLICES * -(-total_mib // 1024))
    prefix = f"{compute_slices}c." if compute_slices < instance_slices else ""
    return f"{prefix}{instance_slices}g.{gigabytes}gb"


def _describe(parent: Any, handle: Any, slot: int, uuid: str, parent_uuid: str, of: Shape) -> Found:  # noqa: ANN401 - handles are whatever pynvml gave
    old = _OLD_UUID.match(uuid)
    gpu_instance = int(old["gpu_instance"]) if old else int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    compute_instance = int(old["compute_instance"]) if old else int(pynvml.nvmlDeviceGetComputeInstanceId(handle))
    attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    compute_slices, instance_slices = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    name = library.optional(pynvml.nvmlDeviceGetName, handle)
    _, separator, profile = str(name or "").rpartition(" MIG ")
    if not separator:
        profile = profile_name(
            compute_slices=compute_slices,
            instance_slices=instance_slices,
            memory_mib=attributes.memorySizeMB,
            total_mib=of.memory_mib,
        )
    # Rounded: an instance has a little less memory than its slices, because the driver reserves some.
    parts = round(of.memory_slices * attributes.memorySizeMB / of.memory_mib) if of.memory_mib else 0
    profile_id, placement_start = _placement(parent, gpu_instance)
    return Found(
        instance=MigInstance(
            uuid=uuid,
            parent_uuid=parent_uuid,
            gpu_instance_id=gpu_instance,
            compute_instance_id=compute_instance,
            profile=profile,
            compute_slices=compute_slices,
            memory_slices=max(1, parts),
            profile_id=profile_id,
            placement_start=placement_start,
        ),
        slot=slot,
        handle=handle,
        gpu_instance_slices=instance_slices,
    )


def _placement(parent: Any, gpu_instance: int) -> tuple[int | None, int | None]:  # noqa: ANN401 - as _describe
    """Return a GPU instance's profile number and first memory slice; not every user is allowed to read them."""
    instance = library.optional(pynvml.nvmlDeviceGetGpuInstanceById, parent, gpu_instance)
    info = None if instance is None else library.optional(pynvml.nvmlGpuInstanceGetInfo, instance)
    return (None, None) if info is None else (int(info.profileId), int(info.placement.start))

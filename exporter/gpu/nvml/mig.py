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
_MIB = 2**20
_NOT_OFFERED = library.UNAVAILABLE | {NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND}
"""Codes that say that there is no such thing here; any other one says nothing of it."""
_VANISHED = frozenset({NvmlCode.INVALID_ARGUMENT, NvmlCode.NOT_FOUND})
"""Codes that the handle of an instance answers with when the instance was destroyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a GPU can be partitioned; zeros where it cannot."""

    enabled: bool = False
    compute_slices: int = 0
    memory_slices: int = 0
    memory_mib: int = 0
    """Of the largest profile."""


class MigLayout(NamedTuple):
    """The MIG instances that a GPU reports."""

    found: tuple["Found", ...]
    failed: tuple["Failed", ...] = ()
    """Without one, those found are all there are."""


class Failed(NamedTuple):
    """An instance that the driver did not describe."""

    slot: int
    uuid: str | None
    """``None`` where the driver did not even return that."""
    error: pynvml.NVMLError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One MIG instance with the handle that is good until the instance is destroyed."""

    instance: MigInstance
    slot: int
    """Its device index within the GPU."""
    handle: Any
    gpu_instance_slices: int

    @property
    def fills_its_gpu_instance(self) -> bool:
        """Whether this compute instance is all of its GPU instance."""
        return self.instance.compute_slices == self.gpu_instance_slices


def shape(handle: Any) -> Shape:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return whether MIG is on and how large the largest profile is.

    Raises:
        pynvml.NVMLError: the device does not report it.
    """
    current = enabled(handle)
    if current is None:
        return Shape()
    largest = (0, 0)
    for profile in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, profile, version=1)
        except pynvml.NVMLError as error:
            # Not every GPU offers every profile; one that is left out for another reason would make all shares wrong.
            _reraise_unless_not_offered(error)
            continue
        largest = max(largest, (int(info.sliceCount), int(info.memorySizeMB)))
    slices, memory_mib = largest
    # The driver reports compute slices only; GPUs with 7 of them have 8 of memory, others as many as of compute.
    memory_slices = _FULL_MEMORY_SLICES if slices == _FULL_COMPUTE_SLICES else slices
    return Shape(enabled=current, compute_slices=slices, memory_slices=memory_slices, memory_mib=memory_mib)


def enabled(handle: Any) -> bool | None:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return whether MIG is on now, or ``None`` for a GPU without MIG.

    Raises:
        pynvml.NVMLError: the device does not report it.
    """
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError as error:
        if library.code_of(error) not in library.UNAVAILABLE:
            raise
        return None


def instances(handle: Any, parent_uuid: str, of: Shape) -> MigLayout:  # noqa: ANN401 - a handle is whatever pynvml gave
    """Return every compute instance of a GPU, in the driver's order; one that vanishes meanwhile is left out.

    Raises:
        pynvml.NVMLError: the GPU is lost, the driver gone, or it does not report the largest number.
    """
    found: list[Found] = []
    failed: list[Failed] = []
    for slot in range(_slots(handle)):
        uuid = None
        try:
            one = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except pynvml.NVMLError as error:
            # A hole is none of them: instances keep their index when another one is destroyed.
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


def _slots(handle: Any) -> int:  # noqa: ANN401 - a handle is whatever pynvml gave
    try:
        return int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    except pynvml.NVMLError as error:
        _reraise_unless_not_offered(error)
        return 0


def _describe(parent: Any, handle: Any, slot: int, uuid: str, parent_uuid: str, of: Shape) -> Found:  # noqa: ANN401 - handles are whatever pynvml gave
    old = _OLD_UUID.match(uuid)
    gpu_instance = int(old["gpu_instance"]) if old else int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    compute_instance = int(old["compute_instance"]) if old else int(pynvml.nvmlDeviceGetComputeInstanceId(handle))
    attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    compute_slices, instance_slices = attributes.computeInstanceSliceCount, attributes.gpuInstanceSliceCount
    name = _name(handle)
    _, separator, profile = name.rpartition(" MIG ")
    if not separator:
        profile = profile_name(
            compute_slices=compute_slices,
            instance_slices=instance_slices,
            memory_mib=attributes.memorySizeMB,
            total_mib=of.memory_mib,
        )
    # Rounded: an instance has a little less memory than its slices, for the driver keeps some.
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


def _name(handle: Any) -> str:  # noqa: ANN401 - a handle is whatever pynvml gave
    try:
        return str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        if library.code_of(error) not in library.UNAVAILABLE:
            raise
        return ""


def _placement(parent: Any, gpu_instance: int) -> tuple[int | None, int | None]:  # noqa: ANN401 - as _describe
    """Give a GPU instance's profile number and first memory slice; not every user may ask for them."""
    try:
        info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(parent, gpu_instance))
    except pynvml.NVMLError as error:
        if library.code_of(error) not in library.UNAVAILABLE:
            raise
        return None, None
    return int(info.profileId), int(info.placement.start)


def _reraise_unless_not_offered(error: pynvml.NVMLError) -> None:
    """Raise an error again that is no answer: a GPU that fails to report its instances has not lost them."""
    if library.code_of(error) not in _NOT_OFFERED:
        raise error

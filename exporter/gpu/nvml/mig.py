"""Reads MIG mode, profiles and instances of a GPU."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pynvml

from exporter.gpu.nvml import library
from exporter.gpu.nvml.library import Handle
from exporter.model.devices import Gpu, MigInstance

_FULL_COMPUTE_SLICES = 7
_FULL_MEMORY_SLICES = 8
_PROFILE_INFO_VERSION = 1
_NOT_OFFERED = library.UNAVAILABLE | {pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND}
"""Codes for a missing feature or object; any other code does not imply that it is missing."""
_VANISHED = frozenset({pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_FOUND})
"""Codes of calls with the handle of a destroyed instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One MIG instance with its handle, which is valid until the instance is destroyed."""

    instance: MigInstance
    slot: int
    """Device index of the instance within the GPU."""
    handle: Handle
    fills_its_gpu_instance: bool
    """Whether this compute instance is as large as its GPU instance."""


def shaped(handle: Handle, gpu: Gpu) -> tuple[Gpu, int]:
    """Return a GPU with its MIG mode and the slices of its largest profile, and the memory of that profile in MiB.

    The numbers are 0 for a GPU without MIG.

    Raises:
        pynvml.NVMLError: The device does not report it.
    """
    current = enabled(handle)
    largest = (0, 0)
    for profile in range(0 if current is None else pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        # Not every GPU offers every profile; a profile missing for another reason would make all shares wrong.
        info = library.optional(
            pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, profile, _PROFILE_INFO_VERSION, absent=_NOT_OFFERED
        )
        if info is not None:
            largest = max(largest, (int(info.sliceCount), int(info.memorySizeMB)))
    slices, memory_mib = largest
    # The driver reports only compute slices; GPUs with 7 of them have 8 of memory, others the same number.
    memory_slices = _FULL_MEMORY_SLICES if slices == _FULL_COMPUTE_SLICES else slices
    return replace(gpu, mig_enabled=bool(current), compute_slices=slices, memory_slices=memory_slices), memory_mib


def enabled(handle: Handle) -> bool | None:
    """Return whether MIG is enabled now; ``None`` for a GPU without MIG.

    Raises:
        pynvml.NVMLError: The device does not report it.
    """
    mode = library.optional(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else bool(mode[0])


def instances(
    handle: Handle, gpu: Gpu, memory_mib: int, before: Iterable[Found], note: Callable[[pynvml.NVMLError], None]
) -> tuple[list[Found], bool]:
    """Return the compute instances of a GPU, and whether the driver described all of them.

    An instance that is destroyed during the call is left out. If the driver fails to describe an instance, its earlier
    data stays, unless it is known to have been replaced.

    Args:
        handle: Handle of the GPU.
        gpu: The GPU.
        memory_mib: Memory of its largest profile.
        before: The instances at the previous call.
        note: Called with each error; raises it if the GPU is lost or the driver gone.
    """
    found: list[Found] = []
    undescribed: dict[int, str | None] = {}
    # A GPU that fails to report its instances may have some: only "not offered" means no instances.
    slots = library.optional(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle, absent=_NOT_OFFERED)
    for slot in range(slots or 0):
        uuid, absent = None, _NOT_OFFERED
        try:
            one = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            absent = _VANISHED
            uuid = str(pynvml.nvmlDeviceGetUUID(one))
            found.append(_describe(handle, one, slot, uuid, gpu, memory_mib))
        except pynvml.NVMLError as error:
            # Slots can be empty, because instances keep their index when another instance is destroyed.
            if library.code_of(error) not in absent:
                note(error)
                undescribed[slot] = uuid
    described = {one.instance.uuid for one in found}
    kept = [
        one
        for one in before
        if one.instance.uuid not in described
        and one.slot in undescribed
        and undescribed[one.slot] in {None, one.instance.uuid}
    ]
    return [*found, *kept], not undescribed


def _describe(parent: Handle, handle: Handle, slot: int, uuid: str, gpu: Gpu, memory_mib: int) -> Found:
    gpu_instance = int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    compute_slices = attributes.computeInstanceSliceCount
    _, separator, profile = str(library.optional(pynvml.nvmlDeviceGetName, handle) or "").rpartition(" MIG ")
    # Rounded: an instance has a little less memory than its slices, because the driver reserves some.
    parts = round(gpu.memory_slices * attributes.memorySizeMB / memory_mib) if memory_mib else 0
    profile_id, placement_start = _placement(parent, gpu_instance)
    return Found(
        instance=MigInstance(
            uuid=uuid,
            parent_uuid=gpu.uuid,
            gpu_instance_id=gpu_instance,
            compute_instance_id=int(pynvml.nvmlDeviceGetComputeInstanceId(handle)),
            profile=profile if separator else "unknown",
            compute_slices=compute_slices,
            memory_slices=max(1, parts),
            profile_id=profile_id,
            placement_start=placement_start,
        ),
        slot=slot,
        handle=handle,
        fills_its_gpu_instance=compute_slices == attributes.gpuInstanceSliceCount,
    )


def _placement(parent: Handle, gpu_instance: int) -> tuple[int | None, int | None]:
    """Return the profile number and first memory slice of a GPU instance; ``None`` without the permission."""
    instance = library.optional(pynvml.nvmlDeviceGetGpuInstanceById, parent, gpu_instance)
    info = None if instance is None else library.optional(pynvml.nvmlGpuInstanceGetInfo, instance)
    return (None, None) if info is None else (int(info.profileId), int(info.placement.start))

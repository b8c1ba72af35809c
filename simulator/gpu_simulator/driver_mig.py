"""NVML functions of MIG and GPM: instances with holes in their numbering, and means between two samples."""

import math
import re
from collections.abc import Sequence
from dataclasses import fields

import pynvml

from exporter.model import Field
from gpu_simulator.driver_session import (
    CArgument,
    DriverSession,
    GpmSample,
    Refused,
    Target,
    address,
    check_version,
    device,
    pointer_field,
    put_pointer,
    supported,
    system,
)
from gpu_simulator.models import MIB, table
from gpu_simulator.truth import Load, MigTruth

_PROFILE_INFO_V2 = 0x02000098
_PROFILE_COUNT = 18
_PROFILE = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<slices>\d+)g\.\d+gb(?P<suffix>[+-].*)?$")
_NVML = table("nvml")


def profile_index(name: str, memory_slices: int) -> int | None:
    """Return NVML_GPU_INSTANCE_PROFILE_* of a profile name such as ``1g.10gb+me``; ``None`` where NVML has none."""
    match = _PROFILE.match(name)
    if match is None:
        return None
    slices, suffix = int(match["slices"]), match["suffix"] or ""
    if slices == 1 and memory_slices > 1 and not suffix:
        suffix = "twice"
    index: int | None = _NVML["profiles"].get(suffix, {}).get(slices)
    return index


def slices_of(instance: MigTruth) -> tuple[int, int]:
    """Return the slices of the GPU instance and of the compute instance, by the profile's name."""
    match = _PROFILE.match(instance.profile)
    if match is None:
        return (instance.compute_slices, instance.compute_slices)
    slices = int(match["slices"])
    return (slices, int(match["compute"] or slices))


@device("nvmlDeviceGetMigMode", static=True)
def _mode(target: Target, current: CArgument, pending: CArgument) -> None:
    supported(target.gpu.model.mig_profiles or None)
    current.value = pending.value = int(target.gpu.mig_enabled)


@device("nvmlDeviceGetMigDeviceHandleByIndex", static=True)
def _by_index(target: Target, index: int, device: CArgument) -> None:
    if not target.gpu.mig_enabled:
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    slots = target.session.mig_slots(target.gpu)
    if index >= max(target.gpu.model.compute_slices, len(slots)):
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    uuid = slots[index] if index < len(slots) else None
    if uuid is None:
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)
    put_pointer(device, target.session.pointer((target.gpu.uuid, uuid)))


@device("nvmlDeviceGetAttributes_v2", static=True, mig=True)
def _attributes(target: Target, struct: CArgument) -> None:
    instance = supported(target.instance)
    struct.multiprocessorCount = instance.multiprocessors
    struct.gpuInstanceSliceCount, struct.computeInstanceSliceCount = slices_of(instance)
    struct.memorySizeMB = instance.memory_bytes // MIB


def _fill_profile(target: Target, index: int, struct: CArgument) -> str:
    """Fill what both versions of the struct have; the profile's name is returned."""
    supported(target.gpu.model.mig_profiles or None)
    if not 0 <= index < _PROFILE_COUNT:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    model = target.gpu.model
    for name, (profile_id, compute_slices, memory_slices) in model.mig_profiles.items():
        if profile_index(name, memory_slices) != index:
            continue
        struct.id, struct.sliceCount = profile_id, compute_slices
        struct.instanceCount = min(model.compute_slices // compute_slices, model.memory_slices // memory_slices)
        struct.multiprocessorCount = model.multiprocessors * compute_slices // (model.compute_slices + 1)
        struct.memorySizeMB = model.memory_bytes * memory_slices // model.memory_slices // MIB
        return name
    raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)


@device("nvmlDeviceGetGpuInstanceProfileInfoV", static=True)
def _profile_v2(target: Target, index: int, info: CArgument) -> None:
    check_version(info, _PROFILE_INFO_V2)
    info.name = f"MIG {_fill_profile(target, index, info)}".encode()


@device("nvmlDeviceGetGpuInstanceProfileInfo", static=True)
def _profile_v1(target: Target, index: int, info: CArgument) -> None:
    _fill_profile(target, index, info)


@device("nvmlDeviceGetGpuInstanceById", static=True)
def _gpu_instance(target: Target, number: int, gpu_instance: CArgument) -> None:
    if not any(instance.gpu_instance_id == number for instance in target.gpu.instances):
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)
    put_pointer(gpu_instance, target.session.pointer((target.gpu.uuid, f"gpu-instance {number}")))


@system("nvmlGpuInstanceGetInfo")
def _gpu_instance_info(session: DriverSession, gpu_instance: int, struct: CArgument) -> None:
    key = session.handles.get(gpu_instance)
    if key is None or not key[1].startswith("gpu-instance "):
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    gpu, number = session.find_gpu(key[0]), int(key[1].split()[1])
    instance = next((i for i in gpu.instances if i.gpu_instance_id == number), None)
    if instance is None:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    struct.id, struct.profileId = number, instance.profile_id
    struct.placement.start, struct.placement.size = instance.placement_start, instance.memory_slices
    struct.device = pointer_field(struct.device, session.pointer((gpu.uuid, "")))


_GPM_VERSION = 1
_MOST_METRICS = 477
_SHORTEST_SECONDS = 0.1
_PERCENT = 100.0
_PER_MIB = 1 / (1 << 20)


@device("nvmlGpmQueryDeviceSupport", static=True, mig=True)
def _support(target: Target, support: CArgument) -> None:
    check_version(support, _GPM_VERSION)
    support.isSupportedDevice = int(target.gpu.model.gpm)


@system("nvmlGpmSampleAlloc")
def _alloc(session: DriverSession, sample: CArgument) -> None:
    pointer = session.new_pointer()
    session.gpm_samples[pointer] = None
    put_pointer(sample, pointer)


@system("nvmlGpmSampleFree")
def _gpm_free(session: DriverSession, sample: int) -> None:
    if sample not in session.gpm_samples:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    del session.gpm_samples[sample]


@device("nvmlGpmSampleGet", mig=True)
def _sample(target: Target, sample: int) -> None:
    if target.instance:
        _store(target, sample, target.instance.uuid, target.instance.load_integral, whole=False)
    else:
        _store(target, sample, target.gpu.uuid, target.gpu.load_integral, whole=True)


@device("nvmlGpmMigSampleGet")
def _mig_sample(target: Target, number: int, sample: int) -> None:
    instances = target.gpu.instances if target.gpu.mig_enabled else ()
    members = [instance for instance in instances if instance.gpu_instance_id == number]
    if not members:
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND if target.gpu.mig_enabled else pynvml.NVML_ERROR_NOT_SUPPORTED)
    uuid = f"{target.gpu.uuid}/{number}/" + ",".join(member.uuid for member in members)
    _store(target, sample, uuid, joined(members), whole=False)


def joined(members: Sequence[MigTruth]) -> Load:
    """Load of a GPU instance: its compute instances by their part of the slices in use."""
    weights = [slices_of(member)[1] for member in members]
    total = max(sum(weights), 1)
    pairs = [(member.load_integral, weight / total) for member, weight in zip(members, weights, strict=True)]
    return Load(**{f.name: sum(getattr(one, f.name) * part for one, part in pairs) for f in fields(Load)})


def _store(target: Target, sample: int, uuid: str, integral: Load, *, whole: bool) -> None:
    if not target.gpu.model.gpm:
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if sample not in target.session.gpm_samples:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    target.session.gpm_samples[sample] = GpmSample(
        device_uuid=uuid, at_seconds=target.node.at_seconds, integral=integral, gpu=target.gpu, whole=whole
    )


@system("nvmlGpmMetricsGet")
def _metrics(session: DriverSession, struct: CArgument) -> None:
    check_version(struct, _GPM_VERSION)
    old = session.gpm_samples.get(address(struct.sample1))
    new = session.gpm_samples.get(address(struct.sample2))
    if old is None or new is None or old.device_uuid != new.device_uuid or struct.numMetrics > _MOST_METRICS:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    for metric in struct.metrics[: struct.numMetrics]:
        try:
            metric.value = _mean(old, new, metric.metricId)
            metric.nvmlReturn = 0
        except Refused as refusal:
            metric.nvmlReturn = refusal.code


def _mean(old: GpmSample, new: GpmSample, number: int) -> float:
    """Return the mean of a metric between two samples; NaN where they are too close or in the wrong order."""
    of, field_id = _NVML["metrics"].get(number, ("", None))
    field, is_rate = Field(field_id) if field_id else None, of.endswith("_per_second")
    if field is None or field in new.gpu.model.not_supported or (is_rate and not new.whole):
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    scale = _PER_MIB if is_rate else _PERCENT
    seconds = new.at_seconds - old.at_seconds
    if seconds < _SHORTEST_SECONDS:
        return math.nan
    if new.whole and field in new.gpu.overrides:
        return supported(new.gpu.overrides[field]) * scale
    moved: float = getattr(new.integral, of) - getattr(old.integral, of)
    return moved / seconds * scale

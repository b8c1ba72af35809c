"""NVML functions of MIG and GPM: instances with holes in their numbering, and means between two samples."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import pynvml

from exporter.model import DECODERS, FLOW_ENGINES, JPEG_DECODERS, Field
from gpu_simulator.driver_session import (
    CArgument,
    GpmSample,
    Refused,
    Session,
    Target,
    address,
    check_version,
    device,
    pointer_field,
    put_pointer,
    supported,
    system,
)
from gpu_simulator.models import MIB
from gpu_simulator.truth import Load, MigTruth

_PROFILE_INFO_V2 = 0x02000098
_PROFILE_COUNT = 18
_PROFILE = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<slices>\d+)g\.\d+gb(?P<suffix>[+-].*)?$")
_PLAIN_INDEX = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
_SUFFIX_INDEX = {
    ("+me", 1): 7,
    ("+me", 2): 8,
    ("+gfx", 1): 10,
    ("+gfx", 2): 11,
    ("+gfx", 4): 12,
    ("-me", 1): 13,
    ("-me", 2): 14,
    ("+me.all", 1): 15,
    ("+me.all", 2): 16,
    ("+gfx", 3): 17,
}
_ONE_SLICE_TWICE_MEMORY_INDEX = 9


def profile_index(name: str, memory_slices: int) -> int | None:
    """NVML_GPU_INSTANCE_PROFILE_* of a profile name such as ``1g.10gb+me``; ``None`` where NVML has none."""
    match = _PROFILE.match(name)
    if match is None:
        return None
    slices, suffix = int(match["slices"]), match["suffix"]
    if suffix:
        return _SUFFIX_INDEX.get((suffix, slices))
    if slices == 1 and memory_slices > 1:
        return _ONE_SLICE_TWICE_MEMORY_INDEX
    return _PLAIN_INDEX.get(slices)


def slices_of(instance: MigTruth) -> tuple[int, int]:
    """(slices of the GPU instance, slices of the compute instance) by the profile's name."""
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
def _gpu_instance_info(session: Session, gpu_instance: int, struct: CArgument) -> None:
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


@dataclass(frozen=True, slots=True)
class _Metric:
    """What a GPM metric is the mean of; ``scale`` turns a ratio or bytes per second into NVML's unit."""

    of: str
    """Part of the load."""
    field: Field
    scale: float = _PERCENT
    whole_gpu_only: bool = False


_METRICS: Mapping[int, _Metric] = {
    1: _Metric("engine", Field.PROF_GR_ENGINE_ACTIVE),
    2: _Metric("sm", Field.PROF_SM_ACTIVE),
    3: _Metric("occupancy", Field.PROF_SM_OCCUPANCY),
    5: _Metric("tensor", Field.PROF_PIPE_TENSOR_ACTIVE),
    10: _Metric("dram", Field.PROF_DRAM_ACTIVE),
    11: _Metric("fp64", Field.PROF_PIPE_FP64_ACTIVE),
    12: _Metric("fp32", Field.PROF_PIPE_FP32_ACTIVE),
    13: _Metric("fp16", Field.PROF_PIPE_FP16_ACTIVE),
    20: _Metric("pcie_tx_bytes_per_second", Field.PROF_PCIE_TX_BYTES, _PER_MIB, whole_gpu_only=True),
    21: _Metric("pcie_rx_bytes_per_second", Field.PROF_PCIE_RX_BYTES, _PER_MIB, whole_gpu_only=True),
    30: _Metric("decode", DECODERS[0]),
    40: _Metric("jpeg", JPEG_DECODERS[0]),
    50: _Metric("optical_flow", FLOW_ENGINES[0]),
    60: _Metric("nvlink_rx_bytes_per_second", Field.PROF_NVLINK_RX_BYTES, _PER_MIB, whole_gpu_only=True),
    61: _Metric("nvlink_tx_bytes_per_second", Field.PROF_NVLINK_TX_BYTES, _PER_MIB, whole_gpu_only=True),
}


@device("nvmlGpmQueryDeviceSupport", static=True, mig=True)
def _support(target: Target, support: CArgument) -> None:
    check_version(support, _GPM_VERSION)
    support.isSupportedDevice = int(target.gpu.model.gpm)


@system("nvmlGpmSampleAlloc")
def _alloc(session: Session, sample: CArgument) -> None:
    pointer = session.new_pointer()
    session.gpm_samples[pointer] = None
    put_pointer(sample, pointer)


@system("nvmlGpmSampleFree")
def _gpm_free(session: Session, sample: int) -> None:
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
    return Load(
        **{
            f.name: sum(
                getattr(member.load_integral, f.name) * weight for member, weight in zip(members, weights, strict=True)
            )
            / total
            for f in fields(Load)
        }
    )


def _store(target: Target, sample: int, uuid: str, integral: Load, *, whole: bool) -> None:
    if not target.gpu.model.gpm:
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if sample not in target.session.gpm_samples:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    target.session.gpm_samples[sample] = GpmSample(
        device_uuid=uuid, at_seconds=target.node.at_seconds, integral=integral, gpu=target.gpu, whole=whole
    )


@system("nvmlGpmMetricsGet")
def _metrics(session: Session, struct: CArgument) -> None:
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
    """Mean of a metric between two samples; NaN where they are too close or in the wrong order."""
    metric = _METRICS.get(number)
    if metric is None or metric.field in new.gpu.model.not_supported or (metric.whole_gpu_only and not new.whole):
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    seconds = new.at_seconds - old.at_seconds
    if seconds < _SHORTEST_SECONDS:
        return math.nan
    if new.whole and metric.field in new.gpu.overrides:
        fixed = new.gpu.overrides[metric.field]
        if fixed is None:
            raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return fixed * metric.scale
    moved: float = getattr(new.integral, metric.of) - getattr(old.integral, metric.of)
    return moved / seconds * metric.scale

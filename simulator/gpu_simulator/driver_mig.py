"""NVML functions of MIG: mode, instances with holes in their numbering, shapes and profiles."""

import re

from gpu_simulator.driver_board import MIB
from gpu_simulator.driver_core import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Calls,
    CArgument,
    Refused,
    Session,
    Target,
    address,
    check_version,
    out,
    plain,
    put_pointer,
)
from gpu_simulator.truth import GpuTruth, MigTruth

CALLS = Calls()

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


def instance_of(target: Target) -> MigTruth:
    """The instance behind a MIG handle; other handles are refused."""
    if target.instance is None:
        raise Refused(NOT_SUPPORTED)
    return target.instance


def _require_mig_model(gpu: GpuTruth) -> None:
    if not gpu.model.mig_profiles:
        raise Refused(NOT_SUPPORTED)


@CALLS.device("nvmlDeviceGetMigMode", static=True)
def _mode(target: Target, current: CArgument, pending: CArgument) -> None:
    _require_mig_model(target.gpu)
    out(current).value = out(pending).value = int(target.gpu.mig_enabled)


@CALLS.device("nvmlDeviceIsMigDeviceHandle", static=True, mig=True)
def _is_mig(target: Target, answer: CArgument) -> None:
    out(answer).value = int(target.instance is not None)


@CALLS.device("nvmlDeviceGetMaxMigDeviceCount", static=True)
def _max_count(target: Target, count: CArgument) -> None:
    out(count).value = target.gpu.model.compute_slices if target.gpu.mig_enabled else 0


@CALLS.device("nvmlDeviceGetMigDeviceHandleByIndex", static=True)
def _by_index(target: Target, index: CArgument, device: CArgument) -> None:
    if not target.gpu.mig_enabled:
        raise Refused(NOT_SUPPORTED)
    slots, position = target.session.mig_slots(target.gpu), plain(index)
    if position >= max(target.gpu.model.compute_slices, len(slots)):
        raise Refused(INVALID_ARGUMENT)
    if position >= len(slots) or not slots[position]:
        raise Refused(NOT_FOUND)
    put_pointer(device, target.session.pointer((target.gpu.uuid, slots[position])))


@CALLS.device("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", static=True, mig=True)
def _parent(target: Target, device: CArgument) -> None:
    instance_of(target)
    put_pointer(device, target.session.pointer((target.gpu.uuid, "")))


@CALLS.device("nvmlDeviceGetGpuInstanceId", static=True, mig=True)
def _gpu_instance_id(target: Target, number: CArgument) -> None:
    out(number).value = instance_of(target).gpu_instance_id


@CALLS.device("nvmlDeviceGetComputeInstanceId", static=True, mig=True)
def _compute_instance_id(target: Target, number: CArgument) -> None:
    out(number).value = instance_of(target).compute_instance_id


@CALLS.device("nvmlDeviceGetAttributes_v2", static=True, mig=True)
def _attributes(target: Target, attributes: CArgument) -> None:
    instance, struct = instance_of(target), out(attributes)
    struct.multiprocessorCount = instance.multiprocessors
    struct.gpuInstanceSliceCount, struct.computeInstanceSliceCount = slices_of(instance)
    struct.memorySizeMB = instance.memory_bytes // MIB


def _fill_profile(target: Target, index: CArgument, struct: CArgument) -> str:
    """Fill what both versions of the struct have; the profile's name is returned."""
    _require_mig_model(target.gpu)
    if not 0 <= plain(index) < _PROFILE_COUNT:
        raise Refused(INVALID_ARGUMENT)
    model = target.gpu.model
    for name, (profile_id, compute_slices, memory_slices) in model.mig_profiles.items():
        if profile_index(name, memory_slices) != plain(index):
            continue
        struct.id, struct.sliceCount = profile_id, compute_slices
        struct.instanceCount = min(model.compute_slices // compute_slices, model.memory_slices // memory_slices)
        struct.multiprocessorCount = model.multiprocessors * compute_slices // (model.compute_slices + 1)
        struct.memorySizeMB = model.memory_bytes * memory_slices // model.memory_slices // MIB
        return name
    raise Refused(NOT_SUPPORTED)


@CALLS.device("nvmlDeviceGetGpuInstanceProfileInfoV", static=True)
def _profile_v2(target: Target, index: CArgument, info: CArgument) -> None:
    check_version(out(info), _PROFILE_INFO_V2)
    out(info).name = f"MIG {_fill_profile(target, index, out(info))}".encode()


@CALLS.device("nvmlDeviceGetGpuInstanceProfileInfo", static=True)
def _profile_v1(target: Target, index: CArgument, info: CArgument) -> None:
    _fill_profile(target, index, out(info))


def _gpu_instance_pointer(session: Session, gpu: GpuTruth, number: int) -> int:
    return session.pointer((gpu.uuid, f"gpu-instance {number}"))


@CALLS.device("nvmlDeviceGetGpuInstanceById", static=True)
def _gpu_instance(target: Target, number: CArgument, gpu_instance: CArgument) -> None:
    if not any(instance.gpu_instance_id == plain(number) for instance in target.gpu.instances):
        raise Refused(NOT_FOUND)
    put_pointer(gpu_instance, _gpu_instance_pointer(target.session, target.gpu, plain(number)))


@CALLS.device("nvmlDeviceGetGpuInstances", static=True)
def _gpu_instances(target: Target, profile_id: CArgument, instances: CArgument, count: CArgument) -> None:
    found = sorted({i.gpu_instance_id for i in target.gpu.instances if i.profile_id == plain(profile_id)})
    for position, number in enumerate(found):
        pointer = _gpu_instance_pointer(target.session, target.gpu, number)
        out(instances)[position] = type(out(instances)[position]).from_buffer(_pointer_bytes(pointer))
    out(count).value = len(found)


def _pointer_bytes(pointer: int) -> bytearray:
    return bytearray(pointer.to_bytes(8, "little"))


@CALLS.system("nvmlGpuInstanceGetInfo")
def _gpu_instance_info(session: Session, gpu_instance: CArgument, info: CArgument) -> None:
    key = session.handles.get(address(gpu_instance))
    if key is None or not key[1].startswith("gpu-instance "):
        raise Refused(INVALID_ARGUMENT)
    gpu, number = session.find_gpu(key[0]), int(key[1].split()[1])
    instance = next((i for i in gpu.instances if i.gpu_instance_id == number), None)
    if instance is None:
        raise Refused(INVALID_ARGUMENT)
    struct = out(info)
    struct.id, struct.profileId = number, instance.profile_id
    struct.placement.start, struct.placement.size = instance.placement_start, instance.memory_slices
    parent = _pointer_bytes(session.pointer((gpu.uuid, "")))
    struct.device = type(struct.device).from_buffer(parent)

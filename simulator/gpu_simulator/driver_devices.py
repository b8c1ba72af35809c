"""Computes field values of a simulated GPU, and provides the NVML functions of devices, MIG and GPM."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from operator import attrgetter
from typing import Any

import pynvml

from exporter.model.fields import Field
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
    put_text,
    supported,
    system,
)
from gpu_simulator.models import MIB, UTILISATION, table
from gpu_simulator.truth import Fault, GpuTruth, Load, MigTruth, NodeTruth

_NVML = table("nvml")
_BAR1_PER_MEMORY_SLICE = 0.047186
"""Part of the board's BAR1 per memory slice of an instance, recorded on H100 with driver 590.48.01."""


def _video_clock_mhz(gpu: GpuTruth) -> int:
    """Linear between the two points of the H100 capture: 765 MHz idle, 1545 MHz at the highest SM clock."""
    return max(765, round(1545 * gpu.sm_clock_mhz / max(gpu.model.max_sm_clock_mhz, 1)))


def _usable_mib(gpu: GpuTruth) -> float | None:
    total, reserved = read(gpu, Field.FB_TOTAL), read(gpu, Field.FB_RESERVED)
    return None if total is None or reserved is None else total - reserved


def _free_mib(gpu: GpuTruth) -> float | None:
    usable, used = _usable_mib(gpu), read(gpu, Field.FB_USED)
    return None if usable is None or used is None else max(usable - used, 0.0)


def _used_ratio(gpu: GpuTruth) -> float | None:
    usable, used = _usable_mib(gpu), read(gpu, Field.FB_USED)
    return None if not usable or used is None else used / usable


def _percent(path: str, gpu: GpuTruth) -> int:
    return round(min(max(float(attrgetter(path)(gpu)), 0.0), 1.0) * 100)


_PATHS = {Field[name]: attrgetter(path) for name, path in _NVML["read"].items()}
_PERCENTS = {Field[name]: partial(_percent, path) for name, path in _NVML["percent"].items()}
_COUNTERS = {Field[name]: attrgetter(path) for name, path in _NVML["counters"].items()}
_CONSTANTS = {Field[name]: value for name, value in _NVML["constants"].items()}
_READERS: Mapping[Field, Callable[[GpuTruth], int | float | None]] = {
    Field.BAR1_FREE: lambda g: g.model.bar1_mib - 1,
    Field.VIDEO_CLOCK: _video_clock_mhz,
    Field.GPU_MAX_OP_TEMP: lambda g: g.model.celsius[0],
    Field.MEM_MAX_OP_TEMP: lambda g: None if g.memory_temp_celsius is None else 95,
    Field.GPU_TEMP_LIMIT: lambda g: g.model.celsius[0] - g.gpu_temp_celsius,
    Field.SLOWDOWN_TEMP: lambda g: sum(g.model.celsius[:2]),
    Field.SHUTDOWN_TEMP: lambda g: g.model.celsius[0] + g.model.celsius[2],
    Field.TOTAL_ENERGY_CONSUMPTION: lambda g: g.energy_joules * 1000.0,
    Field.FB_TOTAL: lambda g: g.model.memory_bytes / MIB,
    Field.FB_RESERVED: lambda g: g.model.memory_reserved_bytes / MIB,
    Field.FB_USED: lambda g: g.load.memory_used_bytes / MIB,
    Field.FB_FREE: _free_mib,
    Field.FB_USED_PERCENT: _used_ratio,
    Field.GPU_RECOVERY_ACTION: lambda g: int(g.fault is Fault.RESET_REQUIRED),
    **_PATHS,
    **_PERCENTS,
    **_COUNTERS,
}
_HEALTHY_ZERO = frozenset(
    field
    for field in Field
    if field is not Field.ECC_INFOROM_VER
    and re.search(
        r"_VIOLATION$|^ECC_|^RETIRED_|REMAP|^NVLINK_(CRC|REPLAY|RECOVERY|ERROR|COUNT)|_SLOWDOWN_NS$"
        r"|^PCIE_(REPLAY|COUNT)|^MEMORY_UNREPAIRABLE",
        field.name,
    )
)
"""Counters and flags of a board without errors; a scenario can override them."""


MEMORY = (Field.FB_TOTAL, Field.FB_RESERVED, Field.FB_FREE, Field.FB_USED)
BAR1 = (Field.BAR1_TOTAL, Field.BAR1_USED, Field.BAR1_FREE)


def _read_instance(gpu: GpuTruth, instance: MigTruth) -> dict[Field, float]:
    """Return the memory of an instance, and its part of the board's BAR1, which is unused."""
    total, used = instance.memory_bytes, instance.load.memory_used_bytes
    board_bar1 = round((read(gpu, Field.BAR1_TOTAL) or 0) * MIB)
    bar1 = int(board_bar1 * _BAR1_PER_MEMORY_SLICE * instance.memory_slices) / MIB
    memory = (total / MIB, 0, (total - used) / MIB, used / MIB)
    values = dict(zip((*MEMORY, *BAR1), (*memory, bar1, 0, bar1), strict=True))
    return values | {Field.FB_USED_PERCENT: used / total}


def read(gpu: GpuTruth, field: Field, instance: MigTruth | None = None) -> int | float | None:
    """Return the value of ``field`` in the units of ``Field``; ``None`` if the driver returns NOT_SUPPORTED.

    An instance has its own memory; other values are those of the board. Precedence: overrides, fields that the model
    does not support, fields that MIG does not support, the truth.
    """
    if instance is not None and (field in MEMORY or field in BAR1 or field is Field.FB_USED_PERCENT):
        return _read_instance(gpu, instance)[field]
    if field in gpu.overrides:
        return gpu.overrides[field]
    if field in gpu.model.not_supported or (gpu.mig_enabled and field in UTILISATION):
        return None
    if field in _HEALTHY_ZERO or field in _CONSTANTS:
        return int(_CONSTANTS.get(field, 0))
    reader = _READERS.get(field)
    value: int | float | None = reader(gpu) if reader else None
    return int(value or 0) if field in _COUNTERS else value


def driver_major(node: NodeTruth) -> int:
    """Return the major version of the driver, such as 590 of ``590.48.01``."""
    return int(node.driver_version.partition(".")[0])


def cuda_major(node: NodeTruth) -> int:
    """Return the major CUDA version of the node's driver."""
    return next((cuda for since, cuda in ((580, 13), (525, 12)) if driver_major(node) >= since), 11)


def is_before(node: NodeTruth, field: Field) -> bool:
    """Return whether the node's driver is too old for a field."""
    return driver_major(node) < int(_NVML["since"].get(field.name, 0))


_BRAND_NVIDIA = 14
_MEMORY_V2 = 0x02000028
_SAMPLING_PERIOD_US = 166_666
_ECC_CORRECTED = 0
_VGPU_LICENSED_FEATURE = 1


def whole(gpu: GpuTruth, field: Field, scale: float = 1.0) -> int:
    """Return ``field`` as an integer of NVML; refuse it if the board does not support it."""
    return round(supported(read(gpu, field)) * scale)


def _byte_counts(target: Target, fields: Sequence[Field]) -> list[int]:
    """Return sizes of a GPU or an instance; refuse them if the board does not support one."""
    return [round(supported(read(target.gpu, field, target.instance)) * MIB) for field in fields]


def _lookup(session: DriverSession, name: str, device: CArgument, uuid: str | None) -> None:
    """Store the handle of an enumerated GPU; a lost GPU is not found."""
    if uuid is None:
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)
    session.refuse_faulty(name, session.find_gpu(uuid), static=True)
    put_pointer(device, session.pointer((uuid, "")))


@system("nvmlDeviceGetCount_v2")
def _count(session: DriverSession, count: CArgument) -> None:
    count.value = len(session.enumerated)


@system("nvmlDeviceGetHandleByIndex_v2")
def _by_index(session: DriverSession, index: int, device: CArgument) -> None:
    if not 0 <= index < len(session.enumerated):
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    _lookup(session, "nvmlDeviceGetHandleByIndex_v2", device, session.enumerated[index])


@system("nvmlDeviceGetHandleByPciBusId_v2")
def _by_pci_bus_id(session: DriverSession, text: bytes, device: CArgument) -> None:
    wanted = _bus_id(text.decode())
    gpus = (gpu for gpu in session.now().gpus if gpu.uuid in session.enumerated)
    uuid = next((gpu.uuid for gpu in gpus if _bus_id(gpu.pci_bus_id) == wanted), None)
    _lookup(session, "nvmlDeviceGetHandleByPciBusId_v2", device, uuid)


def _bus_id(text: str) -> tuple[int, str]:
    """Return domain and rest of a bus id; the number of digits of the domain varies."""
    domain, _, rest = text.partition(":")
    try:
        return (int(domain, 16), rest.upper())
    except ValueError as error:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT) from error


@device("nvmlDeviceGetInforomVersion", static=True)
def _inforom(target: Target, kind: int, buffer: CArgument, size: int) -> None:
    versions = target.gpu.model.inforom[1:]
    if not 0 <= kind < len(versions):
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    put_text(buffer, size, versions[kind])


@device("nvmlDeviceGetPciInfo_v3", static=True)
def _pci(target: Target, struct: CArgument) -> None:
    domain, rest = _bus_id(target.gpu.pci_bus_id)
    bus, _, number = rest.partition(":")
    struct.busId = f"{domain:08X}:{rest}".encode()
    struct.busIdLegacy = f"{domain:04X}:{rest}".encode()
    struct.domain, struct.bus, struct.device = domain, int(bus, 16), int(number.split(".")[0], 16)
    struct.pciDeviceId = target.gpu.model.pci_device_id


def _name(target: Target) -> str:
    return target.gpu.model.name + (f" MIG {target.instance.profile}" if target.instance else "")


_TEXTS: Mapping[str, Callable[[Target], str | None]] = {
    "nvmlDeviceGetName": _name,
    "nvmlDeviceGetUUID": lambda target: (target.instance or target.gpu).uuid,
    "nvmlDeviceGetSerial": lambda target: target.gpu.serial,
    "nvmlDeviceGetVbiosVersion": lambda target: target.gpu.model.vbios,
    "nvmlDeviceGetInforomImageVersion": lambda target: target.gpu.model.inforom[0],
}
_OF_INSTANCES_TOO = frozenset(
    {"nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"}
)
_NUMBERS: Mapping[str, Callable[[Target], int]] = {
    "nvmlDeviceGetBrand": lambda _: _BRAND_NVIDIA,
    "nvmlDeviceGetMinorNumber": lambda target: target.gpu.minor,
    "nvmlDeviceGetMaxMigDeviceCount": lambda target: target.gpu.model.compute_slices if target.gpu.mig_enabled else 0,
    "nvmlDeviceGetGpuInstanceId": lambda target: supported(target.instance).gpu_instance_id,
    "nvmlDeviceGetComputeInstanceId": lambda target: supported(target.instance).compute_instance_id,
}
"""Functions for static numbers with one output argument."""


def _put_text_of(text_of: Callable[[Target], str | None], target: Target, buffer: CArgument, size: int) -> None:
    put_text(buffer, size, text_of(target))


def _put_number(number_of: Callable[[Target], int], target: Target, value: CArgument) -> None:
    value.value = number_of(target)


def _put_member(layout: tuple[int, str, str], target: Target, struct: CArgument) -> None:
    version, attribute, field = layout
    check_version(struct, version)
    setattr(struct, attribute, whole(target.gpu, Field[field]))


def _put_scalar(item: tuple[str, float], target: Target, value: CArgument) -> None:
    value.value = whole(target.gpu, Field[item[0]], item[1])


def _put_engine(field: str, target: Target, value: CArgument, period: CArgument) -> None:
    value.value, period.value = whole(target.gpu, Field[field]), _SAMPLING_PERIOD_US


def _put_chosen(fields: Sequence[str], target: Target, choice: int, value: CArgument) -> None:
    if not 0 <= choice < len(fields):
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    value.value = whole(target.gpu, Field[fields[choice]])


def _declare(
    table: Mapping[str, Any], put: Callable[..., None], *, static: bool = False, mig: frozenset[str] = frozenset()
) -> None:
    for symbol, item in table.items():
        device(symbol, static=static, mig=symbol in mig)(partial(put, item))


_declare(_TEXTS, _put_text_of, static=True, mig=_OF_INSTANCES_TOO)
_declare(_NUMBERS, _put_number, static=True, mig=_OF_INSTANCES_TOO)
_declare(_NVML["structs"], _put_member)
_declare(_NVML["scalars"], _put_scalar)
_declare(_NVML["engines"], _put_engine)
_declare(_NVML["choices"], _put_chosen)


@device("nvmlDeviceGetPowerManagementLimitConstraints")
def _limits(target: Target, lowest: CArgument, highest: CArgument) -> None:
    lowest.value = whole(target.gpu, Field.POWER_MGMT_LIMIT_MIN, 1000.0)
    highest.value = whole(target.gpu, Field.POWER_MGMT_LIMIT_MAX, 1000.0)


@device("nvmlDeviceGetUtilizationRates")
def _utilisation(target: Target, rates: CArgument) -> None:
    rates.gpu = whole(target.gpu, Field.GPU_UTIL)
    rates.memory = whole(target.gpu, Field.MEM_COPY_UTIL)


@device("nvmlDeviceGetMemoryInfo_v2", mig=True)
def _memory_v2(target: Target, struct: CArgument) -> None:
    check_version(struct, _MEMORY_V2)
    struct.total, struct.reserved, struct.free, struct.used = _byte_counts(target, MEMORY)


@device("nvmlDeviceGetMemoryInfo", mig=True)
def _memory(target: Target, struct: CArgument) -> None:
    struct.total, reserved, struct.free, used = _byte_counts(target, MEMORY)
    struct.used = used + reserved


@device("nvmlDeviceGetBAR1MemoryInfo", mig=True)
def _bar1(target: Target, struct: CArgument) -> None:
    struct.bar1Total, struct.bar1Used, struct.bar1Free = _byte_counts(target, BAR1)


@device("nvmlDeviceGetRetiredPages")
def _retired_pages(target: Target, cause: int, count: CArgument, pages: CArgument) -> None:
    field = Field.RETIRED_SBE if cause == _ECC_CORRECTED else Field.RETIRED_DBE
    number, room = whole(target.gpu, field), count.value
    count.value = number
    if number > room or (number and pages is None):
        raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for position in range(number):
        pages[position] = 0x1000 * (position + 1)


@device("nvmlDeviceGetGridLicensableFeatures_v4")
def _licences(target: Target, struct: CArgument) -> None:
    licensed = whole(target.gpu, Field.VGPU_LICENSE_STATUS)
    struct.isGridLicenseSupported = struct.licensableFeaturesCount = licensed
    if licensed:
        struct.gridLicensableFeatures[0].featureCode = _VGPU_LICENSED_FEATURE
        struct.gridLicensableFeatures[0].featureState = 1


_KINDS = {"double": (0, "ullVal"), "uint": (1, "uiVal"), "ulonglong": (3, "ullVal"), "int": (5, "siVal")}
"""Number and union member by value type."""
_ALL_LINKS = 0xFFFFFFFF
_LATENCY_US = 12
_LAST_ECC_ID = 6
_RECOVERY_ACTION = 230
_BOARD_POWER_IDS = frozenset({185, 186, 187, 188, 189, 190, 191, 192})


def _answer(target: Target, number: int, scope: int) -> tuple[int, str]:
    """Return NVML value and value type of a field id; ``Refused`` has its return code."""
    item = _NVML["items"].get(number)
    if item is not None and is_before(target.node, Field[item["field"]]):
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    if target.instance is not None:
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    if target.gpu.fault is Fault.RESET_REQUIRED and number != _RECOVERY_ACTION:
        raise Refused(pynvml.NVML_ERROR_RESET_REQUIRED)
    if item is None or (scope and number in _BOARD_POWER_IDS) or ("links" in item and scope != _ALL_LINKS):
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    value = supported(read(target.gpu, Field[item["field"]])) * item.get("scale", 1.0)
    # Counters are truncated, measured values rounded, to the resolution of the unit.
    return (int(value) if "links" in item else round(value), item.get("kind", "ulonglong"))


@device("nvmlDeviceGetFieldValues", static=True, mig=True)
def _field_values(target: Target, count: int, values: CArgument) -> None:
    if target.gpu.fault is Fault.UNKNOWN_ERROR:
        target.session.refuse_faulty("nvmlDeviceGetFieldValues", target.gpu, static=False)
    timestamp_us = round((target.session.epoch_seconds + target.node.at_seconds) * 1e6)
    for value in values[:count]:
        try:
            number, kind = _answer(target, value.fieldId, value.scopeId)
        except Refused as refusal:
            if value.fieldId <= _LAST_ECC_ID and refusal.code == pynvml.NVML_ERROR_NOT_SUPPORTED:
                continue  # a known driver bug: the driver does not write ECC items if ECC is off
            value.timestamp, value.latencyUsec, value.nvmlReturn = timestamp_us, _LATENCY_US, refusal.code
            continue
        value.timestamp, value.latencyUsec = timestamp_us, _LATENCY_US
        (value.valueType, member), value.nvmlReturn = _KINDS[kind], 0
        value.value.ullVal = 0
        setattr(value.value, member, number)


_PROFILE_COUNT = 18
_PROFILE = re.compile(r"(?:(?P<compute>\d+)c\.)?(?P<slices>\d+)g\.\d+gb(?P<suffix>[+-].*)?$")


def profile_index(name: str, memory_slices: int) -> int | None:
    """Return NVML_GPU_INSTANCE_PROFILE_* of a profile name such as ``1g.10gb+me``; ``None`` if NVML has none."""
    match = _PROFILE.match(name)
    if match is None:
        return None
    slices, suffix = int(match["slices"]), match["suffix"] or ""
    if slices == 1 and memory_slices > 1 and not suffix:
        suffix = "twice"
    index: int | None = _NVML["profiles"].get(suffix, {}).get(slices)
    return index


def slices_of(instance: MigTruth) -> tuple[int, int]:
    """Return the slices of the GPU instance and of the compute instance from the name of the profile."""
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
def _mig_by_index(target: Target, index: int, device: CArgument) -> None:
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


@device("nvmlDeviceGetGpuInstanceProfileInfo", static=True)
def _profile_info(target: Target, index: int, info: CArgument) -> None:
    model = target.gpu.model
    supported(model.mig_profiles or None)
    if not 0 <= index < _PROFILE_COUNT:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    found = (one for name, one in model.mig_profiles.items() if profile_index(name, one[2]) == index)
    info.id, compute_slices, memory_slices = supported(next(found, None))
    info.sliceCount = compute_slices
    info.instanceCount = min(model.compute_slices // compute_slices, model.memory_slices // memory_slices)
    info.multiprocessorCount = model.multiprocessors * compute_slices // (model.compute_slices + 1)
    info.memorySizeMB = model.memory_bytes * memory_slices // model.memory_slices // MIB


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
    """Return the load of a GPU instance: that of its compute instances, weighted by their slices."""
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
    """Return the mean of a metric between two samples; NaN if they are too close or in the wrong order."""
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

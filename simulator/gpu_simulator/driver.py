"""Simulates a driver, as a replacement of the library that the real pynvml binding loads.

This module has initialisation, processes and events; ``driver_devices`` has values of devices, MIG and GPM.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple, Unpack

import pynvml

from gpu_simulator.driver_devices import cuda_major, driver_major
from gpu_simulator.driver_session import (
    CALLS,
    CArgument,
    DriverSession,
    EventSet,
    Installed,
    MeanUse,
    Refused,
    Target,
    Timing,
    check_version,
    device,
    pointer_field,
    put_pointer,
    put_text,
    system,
)
from gpu_simulator.truth import Fault, GpuTruth, NodeTruth, ProcessTruth

_NO_GPUS_IS_FINE = 0x1
_ERRORS = {
    code: name.removeprefix("NVML_ERROR_").replace("_", " ").capitalize()
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}


@system("nvmlInitWithFlags", needs_init=False)
def _init_with_flags(session: DriverSession, flags: int) -> None:
    session.open(tolerate_no_gpus=bool(flags & _NO_GPUS_IS_FINE))


@system("nvmlSystemGetDriverVersion")
def _driver_version(session: DriverSession, buffer: CArgument, size: int) -> None:
    put_text(buffer, size, session.now().driver_version)


@system("nvmlSystemGetNVMLVersion")
def _nvml_version(session: DriverSession, buffer: CArgument, size: int) -> None:
    node = session.now()
    put_text(buffer, size, f"{cuda_major(node)}.{node.driver_version}")


def _shutdown(session: DriverSession) -> None:
    """Close the driver, which works during all faults except a hang."""
    session.wait_while(Fault.HANG)
    session.close()


CALLS["nvmlShutdown"] = _shutdown

_NO_INSTANCE = 0xFFFFFFFF
_UTILISATION_INFO_V1 = 0x01000018
_UTILISATION_INFO_SINCE_DRIVER = 550
_SLOTS = 100
"""Number of records that the driver requests, independent of the number that it fills."""
_GARBAGE_PERCENT = 37100
_MPS_SERVER = "nvidia-cuda-mps-server"
_DISPLAY_SERVERS = frozenset({"Xorg", "Xwayland", "gnome-shell"})


class _Running(NamedTuple):
    process: ProcessTruth
    gpu_instance_id: int = _NO_INSTANCE
    compute_instance_id: int = _NO_INSTANCE


def _running(target: Target) -> list[_Running]:
    """Return the processes on the device; for a partitioned GPU those of all its instances."""
    if Fault.PROCESSES_LOST in target.node.faults:
        return []
    if target.instance is None and not target.gpu.mig_enabled:
        return [_Running(process) for process in target.gpu.processes]
    instances = (target.instance,) if target.instance else target.gpu.instances
    return [_Running(p, i.gpu_instance_id, i.compute_instance_id) for i in instances for p in i.processes]


def _split(target: Target) -> tuple[list[_Running], list[_Running], list[_Running]]:
    """Return the three lists of the driver: compute, graphics, and clients of an MPS server."""
    entries = _running(target)
    graphics = [entry for entry in entries if entry.process.comm in _DISPLAY_SERVERS]
    compute = [entry for entry in entries if entry not in graphics]
    servers = [entry for entry in compute if entry.process.comm == _MPS_SERVER]
    if not servers:
        return (compute, graphics, [])
    return (servers, graphics, [entry for entry in compute if entry not in servers])


def _list(position: int, target: Target, count: CArgument, records: CArgument) -> None:
    """Fill the records; refuse a buffer that is too small, with the required number."""
    entries = _split(target)[position]
    room, count.value = count.value, len(entries)
    if entries and (not records or room < len(entries)):
        raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for record, entry in zip(records or (), entries, strict=False):
        record.pid, record.usedGpuMemory = entry.process.pid, entry.process.memory_used_bytes
        record.gpuInstanceId, record.computeInstanceId = entry[1:]


for _position, _kind in enumerate(("Compute", "Graphics", "MPSCompute")):
    device(f"nvmlDeviceGet{_kind}RunningProcesses_v3", mig=True)(partial(_list, _position))


@system("nvmlDeviceGetRunningProcessDetailList")
def _detail_list(_session: DriverSession, *_: CArgument) -> None:
    """Refuse the call; only the presence of the function matters: drivers without it have long process records."""
    raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _uses(target: Target, last_seen_us: int) -> tuple[MeanUse, ...]:
    if target.gpu.mig_enabled:
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    session = target.session
    samples = session.samples[target.gpu.uuid]
    with session.lock:
        uses = samples.since(last_seen_us / 1e6 - session.epoch_seconds)
    if not uses:
        raise Refused(pynvml.NVML_ERROR_NOT_FOUND)
    return uses[:_SLOTS]


def _fill_samples(target: Target, uses: Sequence[MeanUse], room: int, records: CArgument, last_seen_us: int) -> None:
    """Write the samples, and garbage to the remaining slots, like a real driver."""
    if not records or room < _SLOTS:
        raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    for position, use in enumerate(uses):
        record = records[position]
        record.pid = use.pid
        record.timeStamp = round((target.session.epoch_seconds + use.newest_seconds) * 1e6)
        record.smUtil, record.memUtil, record.encUtil, record.decUtil, *further = use.percents
        if hasattr(record, "jpgUtil"):
            record.jpgUtil, record.ofaUtil = further
    garbage = zip(cycle((0, 4_242_424)), cycle((last_seen_us, 0, last_seen_us + 1)), strict=False)
    for position, (pid, stamp) in enumerate(islice(garbage, _SLOTS - len(uses)), start=len(uses)):
        record = records[position]
        record.pid, record.timeStamp, record.smUtil = pid, stamp, _GARBAGE_PERCENT


@device("nvmlDeviceGetProcessUtilization")
def _utilisation(target: Target, records: CArgument, count: CArgument, last_seen_us: int) -> None:
    uses = _uses(target, last_seen_us)
    room, count.value = count.value, _SLOTS
    _fill_samples(target, uses, room, records, last_seen_us)


@device("nvmlDeviceGetProcessesUtilizationInfo")
def _utilisation_info(target: Target, struct: CArgument) -> None:
    if driver_major(target.node) < _UTILISATION_INFO_SINCE_DRIVER:
        raise Refused(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    check_version(struct, _UTILISATION_INFO_V1)
    uses = _uses(target, struct.lastSeenTimeStamp)
    room, struct.processSamplesCount = struct.processSamplesCount, _SLOTS
    _fill_samples(target, uses, room, struct.procUtilArray, struct.lastSeenTimeStamp)


_ECC_EVENTS = 0x1 | 0x2
_XID = 0x8
_MIG_CONFIG_CHANGE = 0x100
_Event = tuple[str, int, int, tuple[int, ...]]
"""GPU UUID, event type, data, ids of the instance."""


def _supported_types(gpu: GpuTruth) -> int:
    return _ECC_EVENTS | _XID | (_MIG_CONFIG_CHANGE if gpu.model.mig_profiles else 0)


def _layout(gpu: GpuTruth) -> tuple[str, ...]:
    return (str(gpu.mig_enabled), *(instance.uuid for instance in gpu.instances))


@system("nvmlEventSetCreate")
def _create(session: DriverSession, event_set: CArgument) -> None:
    pointer = session.new_pointer()
    session.event_sets[pointer] = EventSet()
    put_pointer(event_set, pointer)


@system("nvmlEventSetFree")
def _free(session: DriverSession, event_set: int) -> None:
    if session.event_sets.pop(event_set, None) is None:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)


@device("nvmlDeviceGetSupportedEventTypes")
def _types(target: Target, mask: CArgument) -> None:
    mask.value = _supported_types(target.gpu)


@system("nvmlDeviceRegisterEvents")
def _register(session: DriverSession, handle: int, mask: int, event_set: int) -> None:
    registered = session.event_sets.get(event_set)
    if registered is None:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    try:
        target = session.target("nvmlDeviceRegisterEvents", handle)
    except Refused as refused:
        registered.undefined |= refused.code == pynvml.NVML_ERROR_UNKNOWN
        raise
    if target.instance is not None or mask & ~_supported_types(target.gpu):
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    uuid = target.gpu.uuid
    if uuid not in registered.masks:
        registered.told[uuid], registered.layouts[uuid] = len(target.gpu.xids), _layout(target.gpu)
    registered.masks[uuid] = registered.masks.get(uuid, 0) | mask


def _next_event(registered: EventSet, node: NodeTruth) -> _Event | None:
    """Return the oldest undelivered event, and mark it as delivered."""
    due: list[tuple[float, str, int, tuple[int, ...]]] = []
    for gpu in node.gpus:
        mask = registered.masks.get(gpu.uuid, 0)
        if mask & _MIG_CONFIG_CHANGE and registered.layouts[gpu.uuid] != _layout(gpu):
            registered.layouts[gpu.uuid] = _layout(gpu)
            return (gpu.uuid, _MIG_CONFIG_CHANGE, 0, ())
        told = registered.told[gpu.uuid] = min(registered.told.get(gpu.uuid, 0), len(gpu.xids))
        if mask & _XID and told < len(gpu.xids):
            seconds, code, *part = gpu.xids[told]
            due.append((seconds, gpu.uuid, code, tuple(part)))
    if not due:
        return None
    _, uuid, xid, part_of = min(due)
    registered.told[uuid] += 1
    return (uuid, _XID, xid, part_of)


@system("nvmlEventSetWait_v2")
def _wait(session: DriverSession, event_set: int, struct: CArgument, _timeout_ms: int) -> None:
    """Return a pending event; the exporter never waits for one."""
    registered = session.event_sets.get(event_set)
    if registered is None:
        raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    event = None if registered.undefined else _next_event(registered, session.now())
    if event is None:
        raise Refused(pynvml.NVML_ERROR_TIMEOUT)
    uuid, struct.eventType, struct.eventData, part = event
    struct.device = pointer_field(struct.device, session.pointer((uuid, "")))
    struct.gpuInstanceId, struct.computeInstanceId = (*part, _NO_INSTANCE, _NO_INSTANCE)[:2]


_installed: Installed[DriverSession] = Installed("driver")
set_epoch, fail, clear_failures = _installed.set_epoch, _installed.fail, _installed.clear_failures
_before: list[object] = []
"""Library of pynvml before the first ``install``."""


def install(truth: Callable[[], NodeTruth], **timing: Unpack[Timing]) -> None:
    """Install a fake driver that returns values of ``truth``, as if pynvml had just loaded its library."""
    if _installed.double is None:
        _before.append(pynvml.nvmlLib)
    session = _installed.double = DriverSession(source=truth, calls=CALLS, **timing)
    _swap(session.library(nvmlErrorString=lambda code: _ERRORS.get(code, "Unknown Error").encode()))


def uninstall() -> None:
    """Restore the library of pynvml before the first ``install``; no effect without one."""
    if _installed.double is not None:
        _installed.double = None
        _swap(_before.pop())


def _swap(library: object) -> None:
    pynvml.nvmlLib = library
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - pynvml caches pointers by name until the process ends
    pynvml._nvmlLib_refcount = 0  # noqa: SLF001 - the new library is not initialised

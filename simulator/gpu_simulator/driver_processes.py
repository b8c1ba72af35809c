"""NVML functions of processes and events: the processes on a device, samples of their use, Xid errors, MIG changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gpu_simulator.driver_session import (
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    CArgument,
    EventSet,
    ProcessSamples,
    ProcessUse,
    Refused,
    Session,
    Target,
    address,
    check_version,
    device,
    out,
    plain,
    pointer_field,
    put_pointer,
    system,
)
from gpu_simulator.gpu_values import driver_major
from gpu_simulator.truth import Fault, GpuTruth, NodeTruth, ProcessTruth

_NO_INSTANCE = 0xFFFFFFFF
_DETAIL_LIST_V1 = 0x01000018
_UTILISATION_INFO_V1 = 0x01000018
_UTILISATION_INFO_SINCE_DRIVER = 550
_SLOTS = 100
"""Records that the driver asks room for, however few it fills."""
_GARBAGE_PERCENT = 37100
_MPS_SERVER = "nvidia-cuda-mps-server"
_DISPLAY_SERVERS = frozenset({"Xorg", "Xwayland", "gnome-shell"})


@dataclass(frozen=True, slots=True)
class _Running:
    process: ProcessTruth
    gpu_instance_id: int = _NO_INSTANCE
    compute_instance_id: int = _NO_INSTANCE


def _running(target: Target) -> list[_Running]:
    """Processes on the device; a partitioned GPU lists those of all its instances."""
    gpu = target.gpu
    if Fault.PROCESSES_LOST in target.node.faults:
        return []
    if target.instance is None and not gpu.mig_enabled:
        return [_Running(process) for process in gpu.processes]
    instances = (target.instance,) if target.instance else gpu.instances
    return [_Running(p, i.gpu_instance_id, i.compute_instance_id) for i in instances for p in i.processes]


def _is_graphics(entry: _Running) -> bool:
    return entry.process.comm in _DISPLAY_SERVERS


def _split(target: Target) -> tuple[list[_Running], list[_Running], list[_Running]]:
    """(compute, graphics, MPS) as the three lists of the driver; clients of an MPS server are in the third."""
    entries = _running(target)
    graphics = [entry for entry in entries if _is_graphics(entry)]
    compute = [entry for entry in entries if not _is_graphics(entry)]
    if not any(entry.process.comm == _MPS_SERVER for entry in compute):
        return (compute, graphics, [])
    servers = [entry for entry in compute if entry.process.comm == _MPS_SERVER]
    return (servers, graphics, [entry for entry in compute if entry.process.comm != _MPS_SERVER])


def _fill_list(entries: Sequence[_Running], count: CArgument, records: CArgument) -> None:
    """The two-call pattern: too little room answers with the number that is needed."""
    room = out(count).value
    out(count).value = len(entries)
    if entries and (records is None or room < len(entries)):
        raise Refused(INSUFFICIENT_SIZE)
    for record, entry in zip(out(records) or (), entries, strict=False):
        _fill_record(record, entry)


def _fill_record(record: CArgument, entry: _Running) -> None:
    record.pid = entry.process.pid
    record.usedGpuMemory = entry.process.memory_used_bytes
    record.gpuInstanceId = entry.gpu_instance_id
    record.computeInstanceId = entry.compute_instance_id


def _list(position: int, target: Target, count: CArgument, records: CArgument) -> None:
    _fill_list(_split(target)[position], count, records)


for _position, _kind in enumerate(("Compute", "Graphics", "MPSCompute")):
    device(f"nvmlDeviceGet{_kind}RunningProcesses_v3", mig=True)(partial(_list, _position))


@device("nvmlDeviceGetRunningProcessDetailList", mig=True)
def _detail_list(target: Target, details: CArgument) -> None:
    struct = out(details)
    check_version(struct, _DETAIL_LIST_V1)
    if not target.gpu.model.gpm:
        raise Refused(NOT_SUPPORTED)
    lists = _split(target)
    if not 0 <= struct.mode < len(lists):
        raise Refused(INVALID_ARGUMENT)
    entries = lists[struct.mode]
    room, struct.numProcArrayEntries = struct.numProcArrayEntries, len(entries)
    if entries and (not struct.procArray or room < len(entries)):
        raise Refused(INSUFFICIENT_SIZE)
    for position, entry in enumerate(entries):
        _fill_record(struct.procArray[position], entry)


def _uses(target: Target, last_seen_us: int) -> tuple[ProcessUse, ...]:
    if target.gpu.mig_enabled:
        raise Refused(NOT_SUPPORTED)
    session = target.session
    samples = session.samples.get(target.gpu.uuid, ProcessSamples())
    with session.lock:
        uses = samples.since(last_seen_us / 1e6 - session.epoch_seconds)
    if not uses:
        raise Refused(NOT_FOUND)
    return uses


def _fill_samples(
    target: Target, uses: Sequence[ProcessUse], record_at: Callable[[int], CArgument], last_seen_us: int
) -> None:
    """Write the samples, and into the slots behind them what a real driver leaves there: garbage."""
    for position, use in enumerate(uses):
        record = record_at(position)
        record.pid = use.pid
        record.timeStamp = round((target.session.epoch_seconds + use.newest_seconds) * 1e6)
        record.smUtil, record.memUtil, record.encUtil, record.decUtil, *further = use.percents
        if hasattr(record, "jpgUtil"):
            record.jpgUtil, record.ofaUtil = further
    for position in range(len(uses), _SLOTS):
        record = record_at(position)
        record.pid = (0, 4_242_424)[position % 2]
        record.timeStamp = (last_seen_us, 0, last_seen_us + 1)[position % 3]
        record.smUtil = _GARBAGE_PERCENT


@device("nvmlDeviceGetProcessUtilization")
def _utilisation(target: Target, records: CArgument, count: CArgument, last_seen: CArgument) -> None:
    last_seen_us = plain(last_seen)
    uses = _uses(target, last_seen_us)
    room = out(count).value
    out(count).value = _SLOTS
    if records is None or room < _SLOTS:
        raise Refused(INSUFFICIENT_SIZE)
    array = out(records)
    _fill_samples(target, uses[:_SLOTS], lambda position: array[position], last_seen_us)


@device("nvmlDeviceGetProcessesUtilizationInfo")
def _utilisation_info(target: Target, info: CArgument) -> None:
    struct = out(info)
    if driver_major(target.node.driver_version) < _UTILISATION_INFO_SINCE_DRIVER:
        raise Refused(FUNCTION_NOT_FOUND)
    check_version(struct, _UTILISATION_INFO_V1)
    last_seen_us = struct.lastSeenTimeStamp
    uses = _uses(target, last_seen_us)
    room, struct.processSamplesCount = struct.processSamplesCount, _SLOTS
    if not struct.procUtilArray or room < _SLOTS:
        raise Refused(INSUFFICIENT_SIZE)
    _fill_samples(target, uses[:_SLOTS], lambda position: struct.procUtilArray[position], last_seen_us)


_ECC_EVENTS = 0x1 | 0x2
_XID = 0x8
_MIG_CONFIG_CHANGE = 0x100
_WHOLE_GPU = 0xFFFFFFFF
_POLL_SECONDS = 0.1


def supported_types(gpu: GpuTruth) -> int:
    """Mask of the event types that the board can tell."""
    return _ECC_EVENTS | _XID | (_MIG_CONFIG_CHANGE if gpu.model.mig_profiles else 0)


def _layout(gpu: GpuTruth) -> tuple[str, ...]:
    return (str(gpu.mig_enabled), *(instance.uuid for instance in gpu.instances))


@system("nvmlEventSetCreate")
def _create(session: Session, event_set: CArgument) -> None:
    pointer = session.new_pointer()
    session.event_sets[pointer] = EventSet()
    put_pointer(event_set, pointer)


@system("nvmlEventSetFree")
def _event_free(session: Session, event_set: CArgument) -> None:
    if session.event_sets.pop(address(event_set), None) is None:
        raise Refused(INVALID_ARGUMENT)


@device("nvmlDeviceGetSupportedEventTypes")
def _types(target: Target, mask: CArgument) -> None:
    out(mask).value = supported_types(target.gpu)


@system("nvmlDeviceRegisterEvents")
def _register(session: Session, device: CArgument, mask: CArgument, event_set: CArgument) -> None:
    registered = session.event_sets.get(address(event_set))
    if registered is None:
        raise Refused(INVALID_ARGUMENT)
    try:
        target = session.target("nvmlDeviceRegisterEvents", device)
    except Refused as refused:
        registered.undefined |= refused.code == UNKNOWN
        raise
    if target.instance is not None or plain(mask) & ~supported_types(target.gpu):
        raise Refused(NOT_SUPPORTED)
    uuid = target.gpu.uuid
    if uuid not in registered.masks:
        registered.told[uuid], registered.layouts[uuid] = len(target.gpu.xids), _layout(target.gpu)
    registered.masks[uuid] = registered.masks.get(uuid, 0) | plain(mask)


def is_delivered(registered: EventSet, node: NodeTruth) -> bool:
    """Return whether a set has delivered every event so far, and its owner waits again."""
    watched = [(gpu, registered.masks[gpu.uuid]) for gpu in node.gpus if gpu.uuid in registered.masks]
    return registered.waits and not any(
        (mask & _XID and registered.told.get(gpu.uuid, 0) < len(gpu.xids))
        or (mask & _MIG_CONFIG_CHANGE and registered.layouts[gpu.uuid] != _layout(gpu))
        for gpu, mask in watched
    )


def _next_event(registered: EventSet, node: NodeTruth) -> tuple[str, int, int, tuple[int, ...]] | None:
    """(GPU UUID, event type, data, ids of the part) of the oldest event not told yet, and mark it as told."""
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
def _wait(session: Session, event_set: CArgument, data: CArgument, timeout_ms: CArgument) -> None:
    deadline = session.monotonic() + plain(timeout_ms) / 1000
    while True:
        registered = session.event_sets.get(address(event_set))
        if registered is None:
            raise Refused(INVALID_ARGUMENT if session.references else UNINITIALIZED)
        event = None if registered.undefined else _next_event(registered, session.now())
        registered.waits = event is None
        if event is not None:
            return _tell(session, out(data), event)
        left = deadline - session.monotonic()
        if left <= 0:
            raise Refused(TIMEOUT)
        session.sleep(min(left, _POLL_SECONDS))
        session.gate("nvmlEventSetWait_v2", needs_init=True)


def _tell(session: Session, struct: CArgument, event: tuple[str, int, int, tuple[int, ...]]) -> None:
    uuid, struct.eventType, struct.eventData, part = event
    pointer = session.pointer((uuid, ""))
    struct.device = pointer_field(struct.device, pointer)
    struct.gpuInstanceId, struct.computeInstanceId = (*part, _WHOLE_GPU, _WHOLE_GPU)[:2]

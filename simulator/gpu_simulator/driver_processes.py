"""NVML functions of processes: who runs on a device, and the ring of who was seen running."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_simulator.driver_core import (
    FUNCTION_NOT_FOUND,
    INSUFFICIENT_SIZE,
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Calls,
    CArgument,
    Refused,
    Target,
    check_version,
    out,
    plain,
)
from gpu_simulator.driver_fields import driver_major
from gpu_simulator.driver_ring import Ring, Use
from gpu_simulator.truth import Fault, ProcessTruth

CALLS = Calls()

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


def _declare_lists() -> None:
    for position, kind in enumerate(("Compute", "Graphics", "MPSCompute")):

        def listed(target: Target, count: CArgument, records: CArgument, position: int = position) -> None:
            _fill_list(_split(target)[position], count, records)

        symbol = f"nvmlDeviceGet{kind}RunningProcesses"
        CALLS.device(f"{symbol}_v2", f"{symbol}_v3", mig=True)(listed)


_declare_lists()


@CALLS.device("nvmlDeviceGetRunningProcessDetailList", mig=True)
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


def _uses(target: Target, last_seen_us: int) -> tuple[Use, ...]:
    if target.gpu.mig_enabled:
        raise Refused(NOT_SUPPORTED)
    session = target.session
    ring = session.rings.get(target.gpu.uuid, Ring())
    with session.lock:
        uses = ring.since(last_seen_us / 1e6 - session.epoch_seconds)
    if not uses:
        raise Refused(NOT_FOUND)
    return uses


def _fill_samples(
    target: Target, uses: Sequence[Use], record_at: Callable[[int], CArgument], last_seen_us: int
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


@CALLS.device("nvmlDeviceGetProcessUtilization")
def _utilisation(target: Target, records: CArgument, count: CArgument, last_seen: CArgument) -> None:
    last_seen_us = plain(last_seen)
    uses = _uses(target, last_seen_us)
    room = out(count).value
    out(count).value = _SLOTS
    if records is None or room < _SLOTS:
        raise Refused(INSUFFICIENT_SIZE)
    array = out(records)
    _fill_samples(target, uses[:_SLOTS], lambda position: array[position], last_seen_us)


@CALLS.device("nvmlDeviceGetProcessesUtilizationInfo")
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

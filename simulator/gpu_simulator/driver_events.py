"""NVML event sets: Xid errors and MIG changes, each told once to every set that registered before it happened."""

from gpu_simulator.driver_core import (
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    Calls,
    CArgument,
    EventSet,
    Refused,
    Session,
    Target,
    address,
    out,
    plain,
    put_pointer,
)
from gpu_simulator.truth import GpuTruth, NodeTruth

CALLS = Calls()

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


@CALLS.system("nvmlEventSetCreate")
def _create(session: Session, event_set: CArgument) -> None:
    pointer = session.new_pointer()
    session.event_sets[pointer] = EventSet()
    put_pointer(event_set, pointer)


@CALLS.system("nvmlEventSetFree")
def _free(session: Session, event_set: CArgument) -> None:
    if session.event_sets.pop(address(event_set), None) is None:
        raise Refused(INVALID_ARGUMENT)


@CALLS.device("nvmlDeviceGetSupportedEventTypes")
def _types(target: Target, mask: CArgument) -> None:
    out(mask).value = supported_types(target.gpu)


@CALLS.system("nvmlDeviceRegisterEvents")
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


@CALLS.system("nvmlEventSetWait_v2")
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
    struct.device = type(struct.device).from_buffer(bytearray(pointer.to_bytes(8, "little")))
    struct.gpuInstanceId, struct.computeInstanceId = (*part, _WHOLE_GPU, _WHOLE_GPU)[:2]

"""NVML functions that find a device and say what it is: handles, names, bus ids, versions, modes."""

from gpu_simulator.driver_board import board_of
from gpu_simulator.driver_core import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Calls,
    CArgument,
    Refused,
    Session,
    Target,
    out,
    plain,
    put_pointer,
    put_text,
)

CALLS = Calls()

_BRAND_NVIDIA = 14
_ACCOUNTING_BUFFER = 4000


def _lookup(session: Session, name: str, device: CArgument, uuid: str | None, mig_uuid: str = "") -> None:
    """Store the handle of an enumerated GPU; a lost one cannot even be looked up."""
    if uuid is None:
        raise Refused(NOT_FOUND)
    session.refuse_faulty(name, session.find_gpu(uuid), static=True)
    put_pointer(device, session.pointer((uuid, mig_uuid)))


@CALLS.system("nvmlDeviceGetCount_v2")
def _count(session: Session, count: CArgument) -> None:
    out(count).value = len(session.enumerated)


@CALLS.system("nvmlDeviceGetHandleByIndex_v2")
def _by_index(session: Session, index: CArgument, device: CArgument) -> None:
    position = plain(index)
    if not 0 <= position < len(session.enumerated):
        raise Refused(INVALID_ARGUMENT)
    _lookup(session, "nvmlDeviceGetHandleByIndex_v2", device, session.enumerated[position])


@CALLS.system("nvmlDeviceGetHandleByUUID")
def _by_uuid(session: Session, text: CArgument, device: CArgument) -> None:
    wanted = text.value.decode()
    for gpu in session.now().gpus:
        if gpu.uuid not in session.enumerated:
            continue
        if gpu.uuid == wanted:
            return _lookup(session, "nvmlDeviceGetHandleByUUID", device, gpu.uuid)
        if gpu.mig_enabled and any(instance.uuid == wanted for instance in gpu.instances):
            return _lookup(session, "nvmlDeviceGetHandleByUUID", device, gpu.uuid, wanted)
    raise Refused(NOT_FOUND)


@CALLS.system("nvmlDeviceGetHandleByPciBusId_v2")
def _by_pci_bus_id(session: Session, text: CArgument, device: CArgument) -> None:
    wanted = _bus_tail(text.value.decode())
    gpus = (gpu for gpu in session.now().gpus if gpu.uuid in session.enumerated)
    uuid = next((gpu.uuid for gpu in gpus if _bus_tail(gpu.pci_bus_id) == wanted), None)
    _lookup(session, "nvmlDeviceGetHandleByPciBusId_v2", device, uuid)


@CALLS.system("nvmlDeviceGetHandleBySerial")
def _by_serial(session: Session, text: CArgument, device: CArgument) -> None:
    wanted = text.value.decode()
    gpus = (gpu for gpu in session.now().gpus if gpu.uuid in session.enumerated)
    uuid = next((gpu.uuid for gpu in gpus if gpu.serial == wanted), None)
    _lookup(session, "nvmlDeviceGetHandleBySerial", device, uuid)


def _bus_tail(bus_id: str) -> tuple[int, str]:
    """(domain, rest) of a bus id, however many digits its domain has."""
    domain, _, rest = bus_id.partition(":")
    try:
        return (int(domain, 16), rest.upper())
    except ValueError as error:
        raise Refused(INVALID_ARGUMENT) from error


@CALLS.device("nvmlDeviceGetName", static=True, mig=True)
def _name(target: Target, buffer: CArgument, size: CArgument) -> None:
    suffix = f" MIG {target.instance.profile}" if target.instance else ""
    put_text(buffer, size, target.gpu.model.name + suffix)


@CALLS.device("nvmlDeviceGetUUID", static=True, mig=True)
def _uuid(target: Target, buffer: CArgument, size: CArgument) -> None:
    put_text(buffer, size, target.instance.uuid if target.instance else target.gpu.uuid)


@CALLS.device("nvmlDeviceGetSerial", static=True)
def _serial(target: Target, buffer: CArgument, size: CArgument) -> None:
    put_text(buffer, size, target.gpu.serial)


@CALLS.device("nvmlDeviceGetVbiosVersion", static=True)
def _vbios(target: Target, buffer: CArgument, size: CArgument) -> None:
    put_text(buffer, size, board_of(target.gpu).vbios)


@CALLS.device("nvmlDeviceGetInforomVersion", static=True)
def _inforom(target: Target, kind: CArgument, buffer: CArgument, size: CArgument) -> None:
    board = board_of(target.gpu)
    versions = {0: board.inforom_oem, 1: board.inforom_ecc, 2: board.inforom_power}
    if plain(kind) not in versions:
        raise Refused(INVALID_ARGUMENT)
    version = versions[plain(kind)]
    if version is None:
        raise Refused(NOT_SUPPORTED)
    put_text(buffer, size, version)


@CALLS.device("nvmlDeviceGetInforomImageVersion", static=True)
def _inforom_image(target: Target, buffer: CArgument, size: CArgument) -> None:
    version = board_of(target.gpu).inforom_image
    if version is None:
        raise Refused(NOT_SUPPORTED)
    put_text(buffer, size, version)


@CALLS.device("nvmlDeviceGetBrand", static=True)
def _brand(_target: Target, brand: CArgument) -> None:
    out(brand).value = _BRAND_NVIDIA


@CALLS.device("nvmlDeviceGetMinorNumber", static=True)
def _minor(target: Target, minor: CArgument) -> None:
    out(minor).value = target.gpu.minor


@CALLS.device("nvmlDeviceGetIndex", static=True, mig=True)
def _index(target: Target, index: CArgument) -> None:
    if target.instance:
        out(index).value = target.session.mig_slots(target.gpu).index(target.instance.uuid)
    else:
        out(index).value = target.session.enumerated.index(target.gpu.uuid)


@CALLS.device("nvmlDeviceGetPciInfo_v3", static=True)
def _pci(target: Target, info: CArgument) -> None:
    struct = out(info)
    domain, rest = _bus_tail(target.gpu.pci_bus_id)
    bus, _, device = rest.partition(":")
    struct.busId = f"{domain:08X}:{rest}".encode()
    struct.busIdLegacy = f"{domain:04X}:{rest}".encode()
    struct.domain, struct.bus, struct.device = domain, int(bus, 16), int(device.split(".")[0], 16)
    struct.pciDeviceId = board_of(target.gpu).pci_device_id


@CALLS.device("nvmlDeviceGetCudaComputeCapability", static=True)
def _capability(target: Target, major: CArgument, minor: CArgument) -> None:
    out(major).value, out(minor).value = board_of(target.gpu).compute_capability


@CALLS.device("nvmlDeviceGetArchitecture", static=True)
def _architecture(target: Target, architecture: CArgument) -> None:
    out(architecture).value = board_of(target.gpu).architecture


@CALLS.device("nvmlDeviceGetPersistenceMode", static=True)
def _persistence(_target: Target, mode: CArgument) -> None:
    out(mode).value = 1


@CALLS.device("nvmlDeviceGetComputeMode", "nvmlDeviceGetAccountingMode", static=True)
def _mode_zero(_target: Target, mode: CArgument) -> None:
    out(mode).value = 0


@CALLS.device("nvmlDeviceGetAccountingBufferSize", static=True)
def _accounting_size(_target: Target, size: CArgument) -> None:
    out(size).value = _ACCOUNTING_BUFFER


@CALLS.device("nvmlDeviceGetAccountingPids")
def _accounting_pids(_target: Target, count: CArgument, _pids: CArgument) -> None:
    out(count).value = 0

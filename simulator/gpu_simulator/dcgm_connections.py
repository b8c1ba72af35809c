"""Functions of the simulated libdcgm that reach the engine and ask about the engine itself."""

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import MODULE_FAILED, MODULE_LOADED, MODULE_PAUSED, PROFILING_MODULE
from gpu_simulator import dcgm_known
from gpu_simulator.dcgm_core import HOST, PORT, UNINITIALIZED, Calls, Connection, Engine, Refused, check_version
from gpu_simulator.driver_core import CArgument, out, plain
from gpu_simulator.truth import Fault

CALLS = Calls()

_LOOPBACK = frozenset({HOST, "127.0.0.1"})
_SCHEME = "tcp://"
_MODULES = 10
_LAST_LOADED_MODULE = 1


def listens_at(address: str) -> bool:
    """Whether the engine's address is meant: ``localhost:5555``, with or without scheme and port."""
    host, _, port = address.removeprefix(_SCHEME).partition(":")
    return host in _LOOPBACK and port in ("", str(PORT))


@CALLS.library("dcgmInit")
def _init(engine: Engine) -> None:
    engine.references += 1


@CALLS.library("dcgmShutdown")
def _shutdown(engine: Engine) -> None:
    engine.references = max(0, engine.references - 1)
    if engine.references == 0:
        for handle in list(engine.connections):
            _end(engine, handle)


@CALLS.library("dcgmVersionInfo")
def _own_version(engine: Engine, info: CArgument) -> None:
    _put_version(engine, info)


def _connect(engine: Engine, address: bytes, params: CArgument, handle: CArgument, *, unix: bool) -> None:
    if engine.references == 0:
        raise Refused(UNINITIALIZED)
    check_version(params)
    node = engine.gate()
    if unix or Fault.ENGINE_DOWN in node.faults or not listens_at(address.decode()):
        engine.sleep(out(params).timeoutMs / 1000)  # recorded: a closed port costs all of it
        raise Refused(library.CONNECTION_GONE)
    if engine.version[0] != engine.library_major:
        raise Refused(library.VERSION_MISMATCH)
    out(handle).value = _opened(engine, Connection())


def _opened(engine: Engine, connection: Connection) -> int:
    handle = engine.new_handle()
    engine.connections[handle] = connection
    return handle


@CALLS.library("dcgmConnect_v2")
def _connect_v2(engine: Engine, address: bytes, params: CArgument, handle: CArgument) -> None:
    _connect(engine, address, params, handle, unix=bool(out(params).addressIsUnixSocket))


@CALLS.library("dcgmConnect_v3")
def _connect_v3(engine: Engine, address: bytes, params: CArgument, handle: CArgument) -> None:
    _connect(engine, address, params, handle, unix=address.startswith((b"unix:", b"vsock:")))


@CALLS.library("dcgmStartEmbedded_v2")
def _start_embedded(engine: Engine, params: CArgument) -> None:
    if engine.references == 0:
        raise Refused(UNINITIALIZED)
    check_version(params)
    out(params).dcgmHandle = _opened(engine, Connection(embedded=True))


@CALLS.library("dcgmDisconnect")
def _disconnect(engine: Engine, handle: CArgument) -> None:
    _end(engine, plain(handle))


@CALLS.library("dcgmStopEmbedded")
def _stop_embedded(engine: Engine, handle: CArgument) -> None:
    _end(engine, plain(handle))


def _end(engine: Engine, handle: int) -> None:
    """Close a connection, dead or alive, with all that was its own."""
    connection = engine.connections.pop(handle, None)
    if connection is None:
        raise Refused(library.CONNECTION_GONE)
    for watch in connection.watches.values():
        engine.cache.unwatch(watch.keys)


@CALLS.engine("dcgmHostengineVersionInfo")
def _engine_version(engine: Engine, _connection: Connection, info: CArgument) -> None:
    _put_version(engine, info)


def _put_version(engine: Engine, info: CArgument) -> None:
    check_version(info)
    version = engine.now().dcgm.version
    out(
        info
    ).rawBuildInfoString = f"version:{version};arch:x86_64;buildtype:Release;buildid:0;commit:simulated".encode()


@CALLS.engine("dcgmHostengineIsHealthy")
def _is_healthy(_engine: Engine, _connection: Connection, health: CArgument) -> None:
    check_version(health)
    out(health).overallHealth = 0


@CALLS.engine("dcgmModuleGetStatuses")
def _modules(engine: Engine, _connection: Connection, statuses: CArgument) -> None:
    check_version(statuses)
    struct = out(statuses)
    struct.numStatuses = _MODULES
    for number in range(_MODULES):
        struct.statuses[number].id = number
        struct.statuses[number].status = MODULE_LOADED if number <= _LAST_LOADED_MODULE else 0
    struct.statuses[PROFILING_MODULE].status = _profiling_status(engine)


def _profiling_status(engine: Engine) -> int:
    node = engine.now()
    if Fault.PROFILING_PAUSED in node.faults:
        return MODULE_PAUSED
    if not engine.profiled:
        return 0
    return MODULE_LOADED if node.dcgm.profiling_module else MODULE_FAILED


def has_function(name: str, version: dcgm_known.Version) -> bool:
    """Whether a library of a version has a function."""
    return name != "dcgmConnect_v3" or version >= (4, 5)

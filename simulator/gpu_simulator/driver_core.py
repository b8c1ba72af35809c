"""State of the fake driver: initialisation, handles, faults, injected errors, and how calls are declared."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpu_simulator.driver_ring import Ring
from gpu_simulator.truth import Fault, GpuTruth, Load, MigTruth, NodeTruth

CArgument: TypeAlias = Any
"""Whatever pynvml hands to a C function: ctypes scalars, byref objects, arrays, pointers, plain ints, None."""

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
ARGUMENT_VERSION_MISMATCH = 25
GPU_NOT_FOUND = 28
UNKNOWN = 999

_NODE_FAULTS = {
    Fault.DRIVER_UNLOADED: (DRIVER_NOT_LOADED, DRIVER_NOT_LOADED),
    Fault.LIBRARY_MISMATCH: (LIB_RM_VERSION_MISMATCH, LIB_RM_VERSION_MISMATCH),
    Fault.LIBRARY_MISSING: (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED),
}
"""Codes of (initialisation, other calls). A driver that is uninstalled takes its module and its library along: who
has the library mapped finds no driver, who comes later finds no library."""
_GPU_FAULTS = {
    Fault.GPU_LOST: GPU_IS_LOST,
    Fault.GPU_ABSENT: GPU_IS_LOST,
    Fault.RESET_REQUIRED: RESET_REQUIRED,
    Fault.UNKNOWN_ERROR: UNKNOWN,
}
_HANG_POLL_SECONDS = 0.05
_SLOW_GPU_SECONDS = 0.05
"""A slow GPU has no parameter of its own in the truth; a slow node has."""
_FIRST_POINTER = 0x7F50_0000_1000
"""Above 2^32, so that a truncated handle shows."""


class Refused(Exception):  # noqa: N818 - control flow inside the driver, becomes a return code and never leaves it
    """A call that does not succeed; ``code`` is the nvmlReturn_t."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a device handle stands for now: a GPU, or one MIG instance of it."""

    session: "Session"
    node: NodeTruth
    gpu: GpuTruth
    instance: MigTruth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpmSample:
    """What one GPM sample buffer was filled with."""

    device_uuid: str
    at_seconds: float
    integral: Load
    gpu: GpuTruth
    whole: bool


@dataclass(slots=True, kw_only=True)
class EventSet:
    """Registrations of one event set: per GPU the mask, Xids already told, and the MIG layout last seen."""

    masks: dict[str, int] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    waits: bool = False
    """Whether its owner waits and has taken all that it was told."""
    undefined: bool = False
    """Whether a registration ended in an unknown error: such a set is of no use any more, and tells nothing."""


@dataclass(slots=True, kw_only=True)
class _Failure:
    code: int
    device_index: int | None
    times: int | None


@dataclass(slots=True, kw_only=True)
class Session:
    """One loaded library: everything a process's driver state consists of.

    ``monotonic`` and ``sleep`` are real time, needed for waits, hangs and for how long a truth is kept;
    ``epoch_seconds`` is the Unix time of the scenario's start, used in timestamps only.
    """

    source: Callable[[], NodeTruth]
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    cache_seconds: float
    epoch_seconds: float
    references: int = 0
    dead_code: int = 0
    enumerated: tuple[str, ...] = ()
    handles: dict[int, tuple[str, str]] = field(default_factory=dict)
    pointers: dict[tuple[str, str], int] = field(default_factory=dict)
    slots: dict[str, list[str]] = field(default_factory=dict)
    gpm_samples: dict[int, GpmSample | None] = field(default_factory=dict)
    event_sets: dict[int, EventSet] = field(default_factory=dict)
    rings: dict[str, Ring] = field(default_factory=dict)
    failures: dict[str, list[_Failure]] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _next_pointer: int = _FIRST_POINTER
    _cached: NodeTruth | None = None
    _cached_at: float = 0.0

    def now(self, *, fresh: bool = False) -> NodeTruth:
        """The truth, at most ``cache_seconds`` old unless ``fresh``; process rings follow it."""
        moment = self.monotonic()
        if fresh or self._cached is None or moment - self._cached_at >= self.cache_seconds:
            truth = self.source()
            with self.lock:
                self._cached, self._cached_at = truth, moment
                for gpu in truth.gpus:
                    if not gpu.mig_enabled:
                        self.rings.setdefault(gpu.uuid, Ring()).observe(
                            truth.at_seconds, () if Fault.PROCESSES_LOST in truth.faults else gpu.processes
                        )
            return truth
        return self._cached

    def open(self, *, tolerate_no_gpus: bool) -> None:
        """One more initialisation; the first one enumerates the GPUs that are there."""
        with self.lock:
            if self.references == 0:
                present = tuple(gpu.uuid for gpu in self.now().gpus if gpu.fault is not Fault.GPU_ABSENT)
                if not present and not tolerate_no_gpus:
                    raise Refused(GPU_NOT_FOUND)
                self.enumerated = present
                if self.dead_code == UNINITIALIZED:
                    self.dead_code = 0
            self.references += 1

    def close(self) -> None:
        """One initialisation less; the last one ends every handle, sample and event set."""
        with self.lock:
            if self.references == 0:
                raise Refused(UNINITIALIZED)
            self.references -= 1
            if self.references == 0:
                for owned in (self.handles, self.pointers, self.slots, self.gpm_samples, self.event_sets):
                    owned.clear()

    def wait_while_hung(self) -> NodeTruth:
        """Return only when the driver does not hang (any more), with the truth of then."""
        node = self.now()
        while Fault.HANG in node.faults:
            self.sleep(_HANG_POLL_SECONDS)
            node = self.now(fresh=True)
        return node

    def gate(self, name: str, *, needs_init: bool) -> None:
        """Everything that can stop any call: hang, latency, missing driver, injected errors, no init."""
        node = self.wait_while_hung()
        if seconds := node.faults.get(Fault.SLOW):
            self.sleep(seconds)
        self._refuse_injected(name, None)
        for fault, codes in _NODE_FAULTS.items():
            if fault in node.faults:
                self._remember_death(fault)
                raise Refused(codes[needs_init])
        if self.dead_code == LIB_RM_VERSION_MISMATCH or (self.dead_code and needs_init):
            raise Refused(self.dead_code)
        if needs_init and self.references == 0:
            raise Refused(UNINITIALIZED)

    def _remember_death(self, fault: Fault) -> None:
        """A mapped library stays mismatched for the life of its process; a driver that was gone needs a new init."""
        if fault is Fault.LIBRARY_MISMATCH:
            self.dead_code = LIB_RM_VERSION_MISMATCH
        elif self.references and not self.dead_code:
            self.dead_code = UNINITIALIZED

    def pointer(self, key: tuple[str, str]) -> int:
        """Handle of (GPU UUID, MIG UUID or empty), the same one for the life of this initialisation."""
        with self.lock:
            if key not in self.pointers:
                self.pointers[key] = self.new_pointer()
                self.handles[self.pointers[key]] = key
            return self.pointers[key]

    def new_pointer(self) -> int:
        """An address that was never given out before."""
        with self.lock:
            self._next_pointer += 0x10
            return self._next_pointer

    def find_gpu(self, uuid: str) -> GpuTruth:
        """The enumerated GPU; refused as lost when the truth does not have it any more."""
        gpu = next((gpu for gpu in self.now().gpus if gpu.uuid == uuid), None)
        if gpu is None:
            raise Refused(GPU_IS_LOST)
        return gpu

    def refuse_faulty(self, name: str, gpu: GpuTruth, *, static: bool) -> None:
        """Refuse ``name`` where the GPU's fault or an injected error says so; ``static`` facts outlive most faults."""
        while gpu.fault is Fault.HANG:
            self.sleep(_HANG_POLL_SECONDS)
            self.now(fresh=True)
            gpu = self.find_gpu(gpu.uuid)
        if gpu.fault is Fault.SLOW:
            self.sleep(_SLOW_GPU_SECONDS)
        self._refuse_injected(name, gpu.index)
        code = _GPU_FAULTS.get(gpu.fault) if gpu.fault else None
        if code is not None and (code == GPU_IS_LOST or not static):
            raise Refused(code)

    def target(self, name: str, handle: CArgument, *, static: bool = False) -> Target:
        """What ``handle`` stands for; a stale one or one of a destroyed MIG instance is an invalid argument."""
        key = self.handles.get(address(handle))
        if key is None:
            raise Refused(INVALID_ARGUMENT)
        gpu = self.find_gpu(key[0])
        self.refuse_faulty(name, gpu, static=static)
        if not key[1]:
            return Target(session=self, node=self.now(), gpu=gpu)
        instances = gpu.instances if gpu.mig_enabled else ()
        instance = next((instance for instance in instances if instance.uuid == key[1]), None)
        if instance is None:
            raise Refused(INVALID_ARGUMENT)
        return Target(session=self, node=self.now(), gpu=gpu, instance=instance)

    def mig_slots(self, gpu: GpuTruth) -> list[str]:
        """MIG UUID per device index, empty for a hole: survivors of a new layout keep their index."""
        with self.lock:
            slots = self.slots.setdefault(gpu.uuid, [])
            alive = [instance.uuid for instance in gpu.instances] if gpu.mig_enabled else []
            slots[:] = [uuid if uuid in alive else "" for uuid in slots]
            for uuid in alive:
                if uuid in slots:
                    continue
                if "" in slots:
                    slots[slots.index("")] = uuid
                else:
                    slots.append(uuid)
            return list(slots)

    def inject(self, name: str, code: int, device_index: int | None, times: int | None) -> None:
        """Make the C function ``name`` answer ``code``; see ``driver.fail``."""
        self.failures.setdefault(name, []).append(_Failure(code=code, device_index=device_index, times=times))

    def _refuse_injected(self, name: str, device_index: int | None) -> None:
        for failure in self.failures.get(name, ()):
            if failure.device_index != device_index or failure.times == 0:
                continue
            if failure.times is not None:
                failure.times -= 1
            raise Refused(failure.code)


Call = Callable[[Session, tuple[CArgument, ...]], None]
"""One C function: fills its out-arguments or raises ``Refused``."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The C functions of one subject, by symbol."""

    by_name: dict[str, Call] = field(default_factory=dict)

    def system(self, name: str, *, needs_init: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Declare a function that takes no device handle: ``handler(session, *arguments)``."""

        def declare(handler: Callable[..., None]) -> Callable[..., None]:
            def call(session: Session, arguments: tuple[CArgument, ...]) -> None:
                session.gate(name, needs_init=needs_init)
                handler(session, *arguments)

            self.by_name[name] = call
            return handler

        return declare

    def device(
        self, *names: str, static: bool = False, mig: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Declare functions whose first argument is a device: ``handler(target, *arguments)``.

        ``static`` facts answer while the GPU needs a reset; ``mig`` functions take MIG handles too, the others
        answer NOT_SUPPORTED to them, as the driver does.
        """

        def declare(handler: Callable[..., None]) -> Callable[..., None]:
            for name in names:
                self.by_name[name] = _device_call(name, handler, static=static, mig=mig)
            return handler

        return declare


def _device_call(name: str, handler: Callable[..., None], *, static: bool, mig: bool) -> Call:
    def call(session: Session, arguments: tuple[CArgument, ...]) -> None:
        session.gate(name, needs_init=True)
        target = session.target(name, arguments[0], static=static)
        if target.instance is not None and not mig:
            raise Refused(NOT_SUPPORTED)
        handler(target, *arguments[1:])

    return call


def out(argument: CArgument) -> CArgument:
    """The object behind a ``byref``; arrays and buffers come as themselves."""
    return getattr(argument, "_obj", argument)


def plain(argument: CArgument) -> int:
    """The integer in a ctypes scalar, or the integer itself."""
    return int(argument if isinstance(argument, int) else argument.value)


def address(pointer: CArgument) -> int:
    """The address in a pointer argument, 0 for NULL."""
    if pointer is None or isinstance(pointer, int):
        return pointer or 0
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def put_pointer(argument: CArgument, value: int) -> None:
    """Store ``value`` in a pointer-typed out-argument."""
    ctypes.c_void_p.from_buffer(out(argument)).value = value


def put_text(buffer: CArgument, size: CArgument, text: str) -> None:
    """Store a NUL-terminated string in a buffer of ``size`` bytes."""
    data = text.encode()
    if len(data) + 1 > plain(size):
        raise Refused(INSUFFICIENT_SIZE)
    out(buffer).value = data


def check_version(struct: CArgument, *versions: int) -> None:
    """Refuse a versioned struct whose version word is not one of ``versions``."""
    if struct.version not in versions:
        raise Refused(ARGUMENT_VERSION_MISMATCH)


def supported(value: float | None) -> int | float:
    """``value``, or NOT_SUPPORTED where there is none."""
    if value is None:
        raise Refused(NOT_SUPPORTED)
    return value

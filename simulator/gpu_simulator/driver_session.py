"""State of the fake driver: initialisation, handles, faults, injected errors, and how C functions are declared."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from gpu_simulator.truth import Fault, GpuTruth, Load, MigTruth, NodeTruth, ProcessTruth

_Name = TypeVar("_Name", int, str)
CArgument: TypeAlias = Any
"""An argument of a C function: a ctypes scalar, byref object, array, pointer, plain int or None."""

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
"""Codes of (initialisation, other calls). Uninstalling removes module and library: a process that has the library
mapped finds no driver, a later process finds no library."""
_GPU_FAULTS = {
    Fault.GPU_LOST: GPU_IS_LOST,
    Fault.GPU_ABSENT: GPU_IS_LOST,
    Fault.RESET_REQUIRED: RESET_REQUIRED,
    Fault.UNKNOWN_ERROR: UNKNOWN,
}
HANG_POLL_SECONDS = 0.05
SAMPLES_PER_SECOND = 7
SAMPLES_KEPT = 72
"""Process samples per GPU (reference: 72 samples, wraps after 10 s)."""
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
class InjectedError:
    """An error that a test asks for."""

    code: int
    selector: int | None
    """Index of the GPU, or id of the DCGM field, that it is for; ``None``: every call."""
    times: int | None
    """How many calls fail; ``None``: all."""


@dataclass(slots=True)
class InjectedErrors:
    """Errors that tests ask for, by C function."""

    library: str
    calls: Mapping[str, object]
    by_name: dict[str, list[InjectedError]] = field(default_factory=dict)

    def add(self, name: str, code: int, selector: int | None, times: int | None) -> None:
        """Make the C function ``name`` answer ``code``.

        Raises:
            ValueError: The library has no such function.
        """
        if name not in self.calls:
            raise ValueError(f"the simulated {self.library} has no function {name!r}")
        self.by_name.setdefault(name, []).append(InjectedError(code=code, selector=selector, times=times))

    def refuse(self, name: str, selectors: Iterable[int | None] = (None,)) -> None:
        """Refuse where an error of ``name`` is for one of ``selectors``."""
        wanted = frozenset(selectors)
        for error in self.by_name.get(name, ()):
            if error.times == 0 or error.selector not in wanted:
                continue
            if error.times is not None:
                error.times -= 1
            raise Refused(error.code)


class CLibrary:
    """Stands for a loaded C library: its symbols are plain functions, most of which return a code.

    Args:
        state: First argument of each call.
        calls: Functions by symbol that raise ``Refused`` or return for success.
        others: Functions by symbol that return something else.
    """

    def __init__(
        self, state: object, calls: Mapping[str, Callable[..., None]], others: Mapping[str, Callable[..., object]]
    ) -> None:
        self._state, self._calls, self._others = state, calls, others

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name in self._others:
            return self._others[name]
        if name not in self._calls:
            raise AttributeError(name)
        call, state = self._calls[name], self._state

        def function(*arguments: CArgument) -> int:
            try:
                call(state, *arguments)
            except Refused as refusal:
                return refusal.code
            return 0

        return function


def fill_slots(slots: list[_Name | None], alive: Sequence[_Name]) -> list[_Name | None]:
    """Give new names the free slots, and keep the slots of names that stay; return the slots."""
    slots[:] = [name if name in alive else None for name in slots]
    for name in alive:
        if name not in slots:
            if None not in slots:
                slots.append(None)
            slots[slots.index(None)] = name
    return slots


_ENGINES: tuple[Callable[[ProcessTruth], float], ...] = (
    lambda p: p.sm_ratio,
    lambda p: p.mem_ratio,
    lambda p: p.enc_ratio,
    lambda p: p.dec_ratio,
    lambda p: p.jpg_ratio,
    lambda p: p.ofa_ratio,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """Mean use of one process over the samples asked for, in whole percent as the driver answers it."""

    pid: int
    newest_seconds: float
    """Time of its newest sample, in seconds since the scenario's start."""
    percents: tuple[int, ...]
    """SM, memory, encoder, decoder, JPEG, optical flow."""


@dataclass(slots=True, kw_only=True)
class ProcessSamples:
    """The driver's samples of the processes of one GPU: 7 Hz, 10 seconds deep, one process per sample and engine.

    Each process's unpaid part is carried forward, so that over many samples every process appears in proportion
    to its part, as in a statistical sampler.
    """

    samples: deque[tuple[int, tuple[tuple[int, float], ...]]] = field(
        default_factory=lambda: deque(maxlen=SAMPLES_KEPT)
    )
    """(tick, (pid, utilisation of the whole engine 0..1) per engine); pid 0 where nothing runs."""
    last_tick: int | None = None
    credit: tuple[dict[int, float], ...] = field(default_factory=lambda: tuple({} for _ in _ENGINES))

    def observe(self, at_seconds: float, processes: Sequence[ProcessTruth]) -> None:
        """Take the samples that are due since the last call, all with the ``processes`` of now.

        A clock that goes back starts the samples again; the first call fills one second.
        """
        tick = int(at_seconds * SAMPLES_PER_SECOND)
        if self.last_tick is None or tick < self.last_tick:
            self.samples.clear()
            self.last_tick = tick - SAMPLES_PER_SECOND
        for due in range(max(self.last_tick + 1, tick - SAMPLES_KEPT + 1), tick + 1):
            self.samples.append((due, tuple(self._pick(engine, processes) for engine in range(len(_ENGINES)))))
        self.last_tick = tick

    def _pick(self, engine: int, processes: Sequence[ProcessTruth]) -> tuple[int, float]:
        shares = {p.pid: ratio for p in processes if (ratio := _ENGINES[engine](p)) > 0.0}
        total = sum(shares.values())
        credit = self.credit[engine]
        for gone in credit.keys() - shares.keys():
            del credit[gone]
        if total <= 0.0:
            return (0, 0.0)
        for pid, share in shares.items():
            credit[pid] = credit.get(pid, 0.0) + share / total
        chosen = max(credit, key=lambda pid: (credit[pid], -pid))
        credit[chosen] -= 1.0
        return (chosen, min(total, 1.0))

    def since(self, seconds: float) -> tuple[ProcessUse, ...]:
        """Return the mean use per process over the samples after ``seconds``; processes without a sample are absent."""
        # A thousandth of a sample: timestamps in whole microseconds must find their sample.
        newer = [sample for sample in self.samples if sample[0] > seconds * SAMPLES_PER_SECOND + 1e-3]
        sums: dict[int, list[float]] = {}
        newest: dict[int, float] = {}
        for tick, picked in newer:
            for engine, (pid, ratio) in enumerate(picked):
                if pid:
                    sums.setdefault(pid, [0.0] * len(_ENGINES))[engine] += ratio
                    newest[pid] = tick / SAMPLES_PER_SECOND
        return tuple(
            ProcessUse(
                pid=pid, newest_seconds=newest[pid], percents=tuple(round(100 * one / len(newer)) for one in total)
            )
            for pid, total in sorted(sums.items())
        )


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
    slots: dict[str, list[str | None]] = field(default_factory=dict)
    """UUIDs of MIG instances by device index, by GPU; survivors of a new layout keep their index."""
    gpm_samples: dict[int, GpmSample | None] = field(default_factory=dict)
    event_sets: dict[int, EventSet] = field(default_factory=dict)
    samples: dict[str, ProcessSamples] = field(default_factory=dict)
    failures: InjectedErrors = field(default_factory=lambda: InjectedErrors("driver", CALLS))
    lock: threading.RLock = field(default_factory=threading.RLock)
    _next_pointer: int = _FIRST_POINTER
    _cached: NodeTruth | None = None
    _cached_at: float = 0.0

    def now(self, *, fresh: bool = False) -> NodeTruth:
        """The truth, at most ``cache_seconds`` old unless ``fresh``; process samples follow it."""
        moment = self.monotonic()
        if fresh or self._cached is None or moment - self._cached_at >= self.cache_seconds:
            truth = self.source()
            with self.lock:
                self._cached, self._cached_at = truth, moment
                for gpu in truth.gpus:
                    if not gpu.mig_enabled:
                        self.samples.setdefault(gpu.uuid, ProcessSamples()).observe(
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
            self.sleep(HANG_POLL_SECONDS)
            node = self.now(fresh=True)
        return node

    def gate(self, name: str, *, needs_init: bool) -> None:
        """Everything that can stop any call: hang, latency, missing driver, injected errors, no init."""
        node = self.wait_while_hung()
        if seconds := node.faults.get(Fault.SLOW):
            self.sleep(seconds)
        self.failures.refuse(name)
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
            self.sleep(HANG_POLL_SECONDS)
            self.now(fresh=True)
            gpu = self.find_gpu(gpu.uuid)
        if gpu.fault is Fault.SLOW:
            self.sleep(_SLOW_GPU_SECONDS)
        self.failures.refuse(name, [gpu.index])
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

    def mig_slots(self, gpu: GpuTruth) -> list[str | None]:
        """Return the MIG UUID per device index; ``None`` for a hole."""
        with self.lock:
            alive = [instance.uuid for instance in gpu.instances] if gpu.mig_enabled else []
            return list(fill_slots(self.slots.setdefault(gpu.uuid, []), alive))


Call = Callable[..., None]
"""One C function: takes the session and C arguments, fills its out-arguments or raises ``Refused``."""
CALLS: dict[str, Call] = {}
"""Every C function of the fake driver, by symbol."""


def system(name: str, *, needs_init: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a function that takes no device handle: ``handler(session, *arguments)``."""

    def declare(handler: Callable[..., None]) -> Callable[..., None]:
        def call(session: Session, *arguments: CArgument) -> None:
            session.gate(name, needs_init=needs_init)
            handler(session, *arguments)

        CALLS[name] = call
        return handler

    return declare


def device(
    name: str, *, static: bool = False, mig: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a function whose first argument is a device: ``handler(target, *arguments)``.

    ``static`` facts answer while the GPU needs a reset. ``mig`` functions take MIG handles too; the others
    answer NOT_SUPPORTED to them, as the driver does.
    """

    def declare(handler: Callable[..., None]) -> Callable[..., None]:
        def call(session: Session, *arguments: CArgument) -> None:
            session.gate(name, needs_init=True)
            target = session.target(name, arguments[0], static=static)
            if target.instance is not None and not mig:
                raise Refused(NOT_SUPPORTED)
            handler(target, *arguments[1:])

        CALLS[name] = call
        return handler

    return declare


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


def pointer_field(field_of: CArgument, value: int) -> CArgument:
    """Return ``value`` as a pointer of the type that a struct's field has."""
    return type(field_of).from_buffer(bytearray(value.to_bytes(8, "little")))


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

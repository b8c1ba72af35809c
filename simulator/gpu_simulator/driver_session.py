"""Manages the state of the fake driver (initialisation, handles, faults, process samples) and declares C functions.

It also has the common parts of the fake libraries: arguments, injected errors and access to the truth.
"""

import ctypes
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar

import pynvml

from gpu_simulator.truth import Fault, GpuTruth, Load, MigTruth, NodeTruth, ProcessTruth

_Name = TypeVar("_Name", int, str)
CArgument: TypeAlias = Any
"""Argument of a C function: number, bytes, address, array, callback, None, or the object of a ``byref``."""
Call = Callable[..., None]
"""C function: takes state and arguments, fills the objects of ``byref``, or raises ``Refused``."""

_NODE_FAULTS = {
    Fault.DRIVER_UNLOADED: (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    Fault.LIBRARY_MISMATCH: (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    Fault.LIBRARY_MISSING: (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
}
"""Return codes of initialisation and of other calls. An uninstallation removes module and library: a process with
the mapped library finds no driver, a later process finds no library."""
_GPU_FAULTS = {
    Fault.GPU_LOST: pynvml.NVML_ERROR_GPU_IS_LOST,
    Fault.GPU_ABSENT: pynvml.NVML_ERROR_GPU_IS_LOST,
    Fault.RESET_REQUIRED: pynvml.NVML_ERROR_RESET_REQUIRED,
    Fault.UNKNOWN_ERROR: pynvml.NVML_ERROR_UNKNOWN,
}
_HANG_POLL_SECONDS = 0.05
SAMPLES_PER_SECOND = 7
SAMPLES_KEPT = 72
"""Number of process samples per GPU (reference: 72 samples, wraps after 10 s)."""
_SLOW_GPU_SECONDS = 0.05
"""Delay of a slow GPU in seconds, because the truth has a parameter only for a slow node."""
_FIRST_POINTER = 0x7F50_0000_1000
"""First address, above 2^32, so that a truncated handle causes an error."""


class Refused(Exception):  # noqa: N818 - control flow inside the fake library, which converts it to a return code
    """A call fails; ``code`` is the return code of the C function."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True, kw_only=True)
class _InjectedError:
    """An error injected by a test."""

    code: int
    selector: int | None
    times: int | None


class Timing(TypedDict, total=False):
    """Time of a fake library."""

    cache_seconds: float
    """Validity of a truth in real seconds, so that a burst of calls computes only one; 0: every call computes one."""
    epoch_seconds: float
    """Unix time of the scenario's start, for timestamps only."""
    monotonic: Callable[[], float]
    """Real clock for cache, waits and watches, in seconds."""
    sleep: Callable[[float], None]
    """Sleep function for hangs, slow calls and waits."""


@dataclass(slots=True, kw_only=True)
class Double:
    """Fake C library: its truth, its ``Timing``, and errors injected by tests."""

    source: Callable[[], NodeTruth]
    cache_seconds: float = 0.02
    epoch_seconds: float = 1_700_000_000.0
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    calls: Mapping[str, Call]
    errors: dict[str, list[_InjectedError]] = field(default_factory=dict)
    last_pointer: int = _FIRST_POINTER
    lock: threading.RLock = field(default_factory=threading.RLock)
    _truth: NodeTruth | None = None
    _truth_at: float = 0.0

    def now(self, *, fresh: bool = False) -> NodeTruth:
        """Return the truth, at most ``cache_seconds`` old unless ``fresh``."""
        moment = self.monotonic()
        if fresh or self._truth is None or moment - self._truth_at >= self.cache_seconds:
            truth = self.source()
            with self.lock:
                if truth is not self._truth:
                    self.follow(truth)
                self._truth, self._truth_at = truth, moment
            return truth
        return self._truth

    def follow(self, truth: NodeTruth) -> None:
        """Replace the truth."""

    def wait_while(self, fault: Fault) -> NodeTruth:
        """Return the truth when the node does not have the fault (any more)."""
        node = self.now()
        while fault in node.faults:
            self.sleep(_HANG_POLL_SECONDS)
            node = self.now(fresh=True)
        return node

    def new_pointer(self) -> int:
        """Return an unused address."""
        with self.lock:
            self.last_pointer += 0x10
            return self.last_pointer

    def refuse(self, name: str, selectors: Iterable[int | None] = (None,)) -> None:
        """Refuse the call if an injected error of ``name`` applies to one of ``selectors``."""
        wanted = frozenset(selectors)
        for error in self.errors.get(name, ()):
            if error.times != 0 and error.selector in wanted:
                if error.times is not None:
                    error.times -= 1
                raise Refused(error.code)

    def library(self, **others: Callable[..., object]) -> SimpleNamespace:
        """Return the replacement of the loaded library.

        Args:
            others: Functions that do not return a code.
        """
        return SimpleNamespace(**{name: partial(self._code_of, call) for name, call in self.calls.items()}, **others)

    def _code_of(self, call: Call, *arguments: CArgument) -> int:
        try:
            call(self, *map(_plain, arguments))
        except Refused as refusal:
            return refusal.code
        return 0


def _plain(argument: CArgument) -> CArgument:
    """Return the object of a ``byref``, the value of a scalar, or the address in a pointer."""
    if isinstance(argument, ctypes._SimpleCData):  # noqa: SLF001 - the base of all scalars
        return argument.value
    return address(argument) if isinstance(argument, ctypes._Pointer) else getattr(argument, "_obj", argument)  # noqa: SLF001 - as above


def address(pointer: CArgument) -> int:
    """Return the address in a pointer, 0 for NULL."""
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


_Double = TypeVar("_Double", bound=Double)


class Installed(Generic[_Double]):
    """The single fake library of its kind in this process.

    Args:
        name: Name of the library, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.double: _Double | None = None

    def get(self) -> _Double:
        """Return the fake library.

        Raises:
            ValueError: The library is not installed.
        """
        if self.double is None:
            raise ValueError(f"the simulated {self._name} is not installed; call install(truth) first")
        return self.double

    def set_epoch(self, epoch_seconds: float) -> None:
        """Change the Unix time of the scenario's start in timestamps, as if the wall clock was set."""
        self.get().epoch_seconds = epoch_seconds

    def fail(self, function_name: str, code: int, *, only: int | None = None, times: int | None = None) -> None:
        """Inject an error into a C function until ``clear_failures``.

        Args:
            function_name: C symbol, e.g. ``nvmlDeviceGetMemoryInfo_v2`` or ``dcgmWatchFields``.
            code: nvmlReturn_t (13 for a missing symbol) or dcgmReturn_t.
            only: Index of the GPU in the truth, or DCGM field in a group, for which calls fail; ``None``: all.
            times: Number of failing calls; ``None``: all.

        Raises:
            ValueError: The library has no such function, or is not installed.
        """
        double = self.get()
        if function_name not in double.calls:
            raise ValueError(f"the simulated {self._name} has no function {function_name!r}")
        error = _InjectedError(code=code, selector=only, times=times)
        double.errors.setdefault(function_name, []).append(error)

    def clear_failures(self) -> None:
        """Remove all injected errors."""
        self.get().errors.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Device of a handle: a GPU, or one of its MIG instances."""

    session: "DriverSession"
    node: NodeTruth
    gpu: GpuTruth
    instance: MigTruth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpmSample:
    """Contents of a GPM sample buffer."""

    device_uuid: str
    at_seconds: float
    integral: Load
    gpu: GpuTruth
    whole: bool


@dataclass(slots=True, kw_only=True)
class EventSet:
    """Registrations of an event set: mask, number of delivered Xids and last MIG layout of each GPU."""

    masks: dict[str, int] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    layouts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    undefined: bool = False
    """Whether a registration failed with an unknown error: such a set delivers no more events."""


def fill_slots(slots: list[_Name | None], alive: Sequence[_Name]) -> list[_Name | None]:
    """Return the slots: new names get free slots, existing names keep theirs."""
    slots[:] = [name if name in alive else None for name in slots]
    for name in alive:
        if name not in slots:
            if None not in slots:
                slots.append(None)
            slots[slots.index(None)] = name
    return slots


_ENGINES = ("sm_ratio", "mem_ratio", "enc_ratio", "dec_ratio", "jpg_ratio", "ofa_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanUse:
    """Mean use of a process over the requested samples, in whole percent like in the driver."""

    pid: int
    newest_seconds: float
    """Time of the newest sample, in seconds since the scenario's start."""
    percents: tuple[int, ...]
    """Percentages of SM, memory, encoder, decoder, JPEG and optical flow."""


@dataclass(slots=True, kw_only=True)
class ProcessSamples:
    """Samples of the processes of a GPU: 7 Hz over 10 seconds, with one process per sample and engine.

    The remainder of each process is carried forward, so that over many samples each process appears in proportion to
    its part, like in a statistical sampler.
    """

    samples: deque[tuple[int, tuple[tuple[int, float], ...]]] = field(
        default_factory=lambda: deque(maxlen=SAMPLES_KEPT)
    )
    """Tick, and for each engine pid and utilisation (0..1); pid 0 without a process."""
    last_tick: int | None = None
    credit: tuple[dict[int, float], ...] = field(default_factory=lambda: tuple({} for _ in _ENGINES))

    def observe(self, at_seconds: float, processes: Sequence[ProcessTruth]) -> None:
        """Add the samples that are due since the last call, with the current ``processes``.

        The samples restart if the clock goes back; the first call adds one second.
        """
        tick = int(at_seconds * SAMPLES_PER_SECOND)
        if self.last_tick is None or tick < self.last_tick:
            self.samples.clear()
            self.last_tick = tick - SAMPLES_PER_SECOND
        for due in range(max(self.last_tick + 1, tick - SAMPLES_KEPT + 1), tick + 1):
            self.samples.append((due, tuple(self._pick(engine, processes) for engine in range(len(_ENGINES)))))
        self.last_tick = tick

    def _pick(self, engine: int, processes: Sequence[ProcessTruth]) -> tuple[int, float]:
        shares = {p.pid: ratio for p in processes if (ratio := getattr(p, _ENGINES[engine])) > 0.0}
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

    def since(self, seconds: float) -> tuple[MeanUse, ...]:
        """Return the mean use by process over the samples after ``seconds``, without processes that have no sample."""
        # A thousandth of a sample, because timestamps are rounded to microseconds.
        newer = [sample for sample in self.samples if sample[0] > seconds * SAMPLES_PER_SECOND + 1e-3]
        sums: dict[int, list[float]] = {}
        newest: dict[int, float] = {}
        for tick, picked in newer:
            for engine, (pid, ratio) in enumerate(picked):
                if pid:
                    sums.setdefault(pid, [0.0] * len(_ENGINES))[engine] += ratio
                    newest[pid] = tick / SAMPLES_PER_SECOND
        return tuple(
            MeanUse(pid=pid, newest_seconds=newest[pid], percents=tuple(round(100 * one / len(newer)) for one in total))
            for pid, total in sorted(sums.items())
        )


@dataclass(slots=True, kw_only=True)
class DriverSession(Double):
    """A loaded library with the driver state of the process."""

    references: int = 0
    dead_code: int = 0
    enumerated: tuple[str, ...] = ()
    handles: dict[int, tuple[str, str]] = field(default_factory=dict)
    pointers: dict[tuple[str, str], int] = field(default_factory=dict)
    slots: dict[str, list[str | None]] = field(default_factory=dict)
    """UUIDs of MIG instances by GPU and device index; instances keep their index in a new layout."""
    gpm_samples: dict[int, GpmSample | None] = field(default_factory=dict)
    event_sets: dict[int, EventSet] = field(default_factory=dict)
    samples: defaultdict[str, ProcessSamples] = field(default_factory=lambda: defaultdict(ProcessSamples))

    def follow(self, truth: NodeTruth) -> None:
        """Add the process samples that are due."""
        for gpu in truth.gpus:
            if not gpu.mig_enabled:
                processes = () if Fault.PROCESSES_LOST in truth.faults else gpu.processes
                self.samples[gpu.uuid].observe(truth.at_seconds, processes)

    def open(self, *, tolerate_no_gpus: bool) -> None:
        """Count an initialisation; the first one enumerates the GPUs."""
        with self.lock:
            if self.references == 0:
                present = tuple(gpu.uuid for gpu in self.now().gpus if gpu.fault is not Fault.GPU_ABSENT)
                if not present and not tolerate_no_gpus:
                    raise Refused(pynvml.NVML_ERROR_GPU_NOT_FOUND)
                self.enumerated = present
                if self.dead_code == pynvml.NVML_ERROR_UNINITIALIZED:
                    self.dead_code = 0
            self.references += 1

    def close(self) -> None:
        """Count a shutdown; the last one ends every handle, sample and event set."""
        with self.lock:
            if self.references == 0:
                raise Refused(pynvml.NVML_ERROR_UNINITIALIZED)
            self.references -= 1
            if self.references == 0:
                for owned in (self.handles, self.pointers, self.slots, self.gpm_samples, self.event_sets):
                    owned.clear()

    def gate(self, name: str, *, needs_init: bool = True) -> None:
        """Apply the conditions of every call: hang, latency, missing driver, injected errors, no initialisation."""
        node = self.wait_while(Fault.HANG)
        if seconds := node.faults.get(Fault.SLOW):
            self.sleep(seconds)
        self.refuse(name)
        mismatch, uninitialized = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_UNINITIALIZED
        for fault, codes in _NODE_FAULTS.items():
            if fault not in node.faults:
                continue
            # A mapped library stays mismatched until its process ends; an unloaded driver needs a new initialisation.
            if fault is Fault.LIBRARY_MISMATCH:
                self.dead_code = mismatch
            elif self.references and not self.dead_code:
                self.dead_code = uninitialized
            raise Refused(codes[needs_init])
        if self.dead_code == mismatch or (self.dead_code and needs_init):
            raise Refused(self.dead_code)
        if needs_init and self.references == 0:
            raise Refused(uninitialized)

    def pointer(self, key: tuple[str, str]) -> int:
        """Return the handle of GPU UUID and MIG UUID (or empty), which is stable until the shutdown."""
        with self.lock:
            if key not in self.pointers:
                self.pointers[key] = self.new_pointer()
                self.handles[self.pointers[key]] = key
            return self.pointers[key]

    def find_gpu(self, uuid: str, node: NodeTruth | None = None) -> GpuTruth:
        """Return the enumerated GPU, now or in a truth; refuse it as lost if the truth no longer has it."""
        gpu = next((gpu for gpu in (node or self.now()).gpus if gpu.uuid == uuid), None)
        if gpu is None:
            raise Refused(pynvml.NVML_ERROR_GPU_IS_LOST)
        return gpu

    def refuse_faulty(self, name: str, gpu: GpuTruth, *, static: bool) -> None:
        """Refuse ``name`` for a fault of the GPU or an injected error; most faults do not affect ``static`` values."""
        while gpu.fault is Fault.HANG:
            self.sleep(_HANG_POLL_SECONDS)
            gpu = self.find_gpu(gpu.uuid, self.now(fresh=True))
        if gpu.fault is Fault.SLOW:
            self.sleep(_SLOW_GPU_SECONDS)
        self.refuse(name, [gpu.index])
        code = _GPU_FAULTS.get(gpu.fault) if gpu.fault else None
        if code is not None and (code == pynvml.NVML_ERROR_GPU_IS_LOST or not static):
            raise Refused(code)

    def target(self, name: str, handle: int, *, static: bool = False) -> Target:
        """Return the device of ``handle``; a stale handle, or that of a destroyed instance, is an invalid argument."""
        if handle not in self.handles:
            raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        gpu_uuid, uuid = self.handles[handle]
        self.refuse_faulty(name, self.find_gpu(gpu_uuid), static=static)
        node = self.now()
        gpu = self.find_gpu(gpu_uuid, node)
        instances = gpu.instances if gpu.mig_enabled else ()
        instance = next((instance for instance in instances if instance.uuid == uuid), None)
        if uuid and instance is None:
            raise Refused(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return Target(session=self, node=node, gpu=gpu, instance=instance)

    def mig_slots(self, gpu: GpuTruth) -> list[str | None]:
        """Return the MIG UUIDs by device index; ``None`` for an unused index."""
        with self.lock:
            alive = [instance.uuid for instance in gpu.instances] if gpu.mig_enabled else []
            return list(fill_slots(self.slots.setdefault(gpu.uuid, []), alive))


CALLS: dict[str, Call] = {}
"""All C functions of the fake driver, by symbol."""


def system(name: str, *, needs_init: bool = True) -> Callable[[Call], Call]:
    """Declare a function without a device handle: ``handler(session, *arguments)``."""

    def declare(handler: Call) -> Call:
        def call(session: DriverSession, *arguments: CArgument) -> None:
            session.gate(name, needs_init=needs_init)
            handler(session, *arguments)

        CALLS[name] = call
        return handler

    return declare


def device(name: str, *, static: bool = False, mig: bool = False) -> Callable[[Call], Call]:
    """Declare a function with a device handle as first argument: ``handler(target, *arguments)``.

    ``static`` functions work while the GPU needs a reset. ``mig`` functions also accept MIG handles; other functions
    return NOT_SUPPORTED for them, like the driver.
    """

    def declare(handler: Call) -> Call:
        def call(session: DriverSession, handle: int, *arguments: CArgument) -> None:
            session.gate(name)
            target = session.target(name, handle, static=static)
            if target.instance is not None and not mig:
                raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
            handler(target, *arguments)

        CALLS[name] = call
        return handler

    return declare


def put_pointer(argument: CArgument, value: int) -> None:
    """Store ``value`` in an output argument of a pointer type."""
    ctypes.c_void_p.from_buffer(argument).value = value


def pointer_field(field_of: CArgument, value: int) -> CArgument:
    """Return ``value`` as a pointer of the type of a struct's field."""
    return type(field_of).from_buffer(bytearray(value.to_bytes(8, "little")))


def put_text(buffer: CArgument, size: int, text: str | None) -> None:
    """Store a NUL-terminated string in a buffer of ``size`` bytes; refuse ``None`` as not supported."""
    data = str(supported(text)).encode()
    if len(data) + 1 > size:
        raise Refused(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    buffer.value = data


def check_version(struct: CArgument, version: int) -> None:
    """Refuse a struct with another version."""
    if struct.version != version:
        raise Refused(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)


_Value = TypeVar("_Value")


def supported(value: _Value | None) -> _Value:
    """Return ``value``; refuse ``None`` as not supported."""
    if value is None:
        raise Refused(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value

"""Build and control the stub libdcgm and host engine of tests/dcgm_stub, and count driver calls."""

import contextlib
import ctypes
import json
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import dcgm_stub_support
import stub_support
from stub_support import MAX_INSTANCES, MIB, compiled, compiler, gpu_uuid, instance_uuid

__all__ = ["MAX_INSTANCES", "MIB", "Engine", "StubControl", "build", "compiler", "control", "environment"]
__all__ += ["gpu_uuid", "instance_uuid", "xid"]

SOURCES = Path(__file__).parent / "dcgm_stub"
RELEASES = {3: "3.3.9", 4: "4.6.0"}

MAX_GPUS, MAX_XIDS, MAX_OVERRIDES, SLOTS = 16, 32, 32, 8
BY_NOTHING, BY_MODULE, BY_GPM = 0, 1, 2
NOT_LOADED, LOADED, PAUSED = 0, 3, 5
WORKS, LOST, DETACHED = 1, 4, 7
KEEP, STATUS, BLANK, BLANK32, NUMBER, FROZEN = range(6)

WITHOUT_GPM = (
    *("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleFree", "nvmlGpmSampleGet"),
    *("nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"),
)
"""Functions that ``stub_support.build`` omits for GPUs before Hopper: DCGM alone profiles them."""

_PARTS = ("fields", "connection", "watches")


class StubInstance(ctypes.Structure):
    """One MIG instance; as ``struct stub_instance``."""

    _fields_ = [
        ("engine_permille", ctypes.c_uint32),
        ("generation", ctypes.c_uint32),
        ("memory_used_bytes", ctypes.c_uint64),
    ]


class StubXid(ctypes.Structure):
    """One Xid; as ``struct stub_xid``."""

    _fields_ = [
        ("at_micros", ctypes.c_int64),
        ("xid", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("place", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class StubGpu(ctypes.Structure):
    """One GPU; as ``struct stub_gpu``."""

    _fields_ = [
        ("status", ctypes.c_uint32),
        ("nvml_index", ctypes.c_uint32),
        ("gpu_percent", ctypes.c_uint32),
        ("memory_percent", ctypes.c_uint32),
        ("encoder_percent", ctypes.c_uint32),
        ("decoder_percent", ctypes.c_uint32),
        ("engine_permille", ctypes.c_uint32),
        ("temperature_celsius", ctypes.c_uint32),
        ("memory_temperature_celsius", ctypes.c_uint32),
        ("power_milliwatts", ctypes.c_uint32),
        ("sm_clock_mhz", ctypes.c_uint32),
        ("memory_clock_mhz", ctypes.c_uint32),
        ("clock_event_reasons", ctypes.c_uint32),
        ("instance_count", ctypes.c_uint32),
        ("profiling", ctypes.c_uint32),
        ("xid_count", ctypes.c_uint32),
        ("memory_used_bytes", ctypes.c_uint64),
        ("memory_reserved_bytes", ctypes.c_uint64),
        ("energy_millijoules", ctypes.c_uint64),
        ("instances", StubInstance * MAX_INSTANCES),
        ("xids", StubXid * MAX_XIDS),
    ]


class StubOverride(ctypes.Structure):
    """Another answer for a field; as ``struct stub_override``."""

    _fields_ = [
        ("field_id", ctypes.c_uint32),
        ("what", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("entity_id", ctypes.c_uint32),
        ("code", ctypes.c_int32),
        ("reserved", ctypes.c_uint32),
        ("at_micros", ctypes.c_int64),
        ("number", ctypes.c_double),
    ]


class StubEngine(ctypes.Structure):
    """State of the running engine; as ``struct stub_engine``."""

    _fields_ = [
        ("pid", ctypes.c_uint32),
        ("connections", ctypes.c_uint32),
        ("groups", ctypes.c_uint32),
        ("field_groups", ctypes.c_uint32),
        ("watches", ctypes.c_uint32),
        ("accepted", ctypes.c_uint32),
        ("requests", ctypes.c_uint64),
    ]


class StubControl(ctypes.Structure):
    """The control block; as ``struct stub_control``. Running libraries and engines read it at once."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("slow_micros", ctypes.c_uint32),
        ("connect_code", ctypes.c_int32),
        ("module_present", ctypes.c_uint32),
        ("module_status", ctypes.c_uint32),
        ("foreign_groups", ctypes.c_uint32),
        ("per_callback", ctypes.c_uint32),
        ("refused_field", ctypes.c_uint32),
        ("refused_code", ctypes.c_int32),
        ("clock_ahead_micros", ctypes.c_int64),
        ("deliveries", ctypes.c_uint64),
        ("records", ctypes.c_uint64),
        ("paused_micros", ctypes.c_int64),
        ("reserved", ctypes.c_uint32),
        ("embedded", ctypes.c_uint32),
        ("override_count", ctypes.c_uint32),
        ("engine", StubEngine),
        ("overrides", StubOverride * MAX_OVERRIDES),
        ("gpus", StubGpu * MAX_GPUS),
    ]

    def override(
        self,
        field_id: int,
        what: int,
        *,
        entity: tuple[int, int] = (0, 0),
        code: int = 0,
        number: float = 0.0,
    ) -> None:
        """Change the answer of a field from now on.

        Args:
            field_id: Field id of DCGM.
            what: ``STATUS`` (``code``, with a blank), ``BLANK`` (plus ``code``), ``BLANK32``, ``NUMBER`` (``number``),
                ``FROZEN`` (its values are never newer than now), ``KEEP`` (unchanged).
            entity: level and id; level 0: every entity.
            code: see ``what``.
            number: see ``what``.
        """
        one = StubOverride(field_id, what, *entity, code, 0, self.now_micros(), number)
        self.overrides[self.override_count] = one
        self.override_count += 1

    def pause(self) -> None:
        """Pause telemetry, as the engine does for a diagnosis."""
        self.paused_micros = self.now_micros()

    def resume(self) -> None:
        """Resume telemetry."""
        self.paused_micros = 0

    def now_micros(self) -> int:
        """Return the time of the engine's clock."""
        return time.time_ns() // 1000 + int(self.clock_ahead_micros)


def build(directory: Path, *, major: int = 4, release: str = "", without: Iterable[str] = ()) -> Path:
    """Compile ``directory/libdcgm.so.<major>`` and ``directory/stub-engine``.

    Args:
        directory: created if missing; goes into ``LD_LIBRARY_PATH``. It can have both majors.
        major: major version of the library.
        release: release of the library, which has the fields of that release. Default 4.6.0, or 3.3.9.
        without: functions that this library lacks, like an older one: ``dcgmConnect_v3``.

    Returns:
        The directory.
    """
    hidden = "".join(f"{name}; " for name in without)
    options = ["-fPIC", "-shared", "-fvisibility=hidden", f"-DMAJOR={major}"]
    options += [f'-DRELEASE="{release or RELEASES[major]}"', f"-Wl,-soname,libdcgm.so.{major}", "-lm", "-lpthread"]
    exports = f"{{ global: dcgm*; Dcgm*; errorString; local: {hidden}*; }};\n"
    compiled(directory / f"libdcgm.so.{major}", [SOURCES / f"{name}.c" for name in _PARTS], *options, exports=exports)
    compiled(directory / "stub-engine", [SOURCES / "engine.c"])
    return directory


def control(path: Path, *, gpus: int = 8, partitioned: bool = False) -> StubControl:
    """Make a control file and map it: GPUs with the profiling module, and values as in tests/stub."""
    path.write_bytes(bytes(ctypes.sizeof(StubControl)))
    block = opened(path)
    block.size = ctypes.sizeof(StubControl)
    block.gpu_count = gpus
    block.module_present = 1
    block.per_callback = 1
    for index in range(gpus):
        _fill(block.gpus[index], index, partitioned=partitioned)
    return block


def opened(path: Path) -> StubControl:
    """Map an existing control file, also of another process."""
    with path.open("r+b") as file:
        return StubControl.from_buffer(mmap.mmap(file.fileno(), 0))


def _fill(gpu: StubGpu, index: int, *, partitioned: bool) -> None:
    gpu.status, gpu.nvml_index, gpu.profiling = WORKS, index, BY_MODULE
    gpu.gpu_percent, gpu.memory_percent = 90 - index, 40 + index
    gpu.engine_permille = 805 - index
    gpu.temperature_celsius, gpu.memory_temperature_celsius = 50 + index, 60 + index
    gpu.power_milliwatts = 400_000 + 1_000 * index
    gpu.sm_clock_mhz, gpu.memory_clock_mhz = 1_900 + index, 2_600 + index
    gpu.memory_used_bytes, gpu.memory_reserved_bytes = (20_000 + index) * MIB, 500 * MIB
    gpu.energy_millijoules = 5_000_000_000_000 + index
    if not partitioned:
        return
    gpu.instance_count = MAX_INSTANCES
    for place in range(MAX_INSTANCES):
        gpu.instances[place] = StubInstance(100 * place + index, 0, (1_000 + 10 * index + place) * MIB)


def xid(block: StubControl, gpu: int, number: int, *, level: int = 1, place: int = 0) -> None:
    """Report an Xid for a GPU, or for its instance at ``place``, now."""
    one = block.gpus[gpu]
    one.xids[one.xid_count % MAX_XIDS] = StubXid(block.now_micros(), number, level, place, 0)
    one.xid_count += 1


def entity_id(gpu: int, place: int) -> int:
    """Return DCGM's id of the instance at ``place``, the same for GPU instance and compute instance."""
    return gpu * SLOTS + place


def environment(directory: Path, control_path: Path, *, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which a process finds the simulated libdcgm and its control file.

    Args:
        directory: directory of ``build``.
        control_path: the control file.
        base: an environment to extend, such as that of tests/stub: the process finds both libraries.
    """
    joined = dict(base or {})
    paths = [str(directory), *filter(None, [joined.get("LD_LIBRARY_PATH")])]
    return {**joined, "LD_LIBRARY_PATH": ":".join(paths), "DCGM_STUB_CONTROL": str(control_path)}


def free_port() -> int:
    """Return a free TCP port of this machine, outside of the range for outgoing connections."""
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port


class Engine:
    """A host engine in a separate process; a context manager.

    Args:
        directory: directory of ``build``.
        control_path: the control file.
        socket_path: unix socket to listen on; ``None``: a free TCP port of the loopback address.
        release: version of the engine; its first digit must be that of the library.
    """

    def __init__(
        self, directory: Path, control_path: Path, *, socket_path: Path | None = None, release: str = "4.6.0"
    ) -> None:
        self._directory, self._control_path, self._socket_path = directory, control_path, socket_path
        self._port = free_port() if socket_path is None else 0
        self.release = release
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Return the address in the agent's form: ``127.0.0.1:PORT``, or ``unix:///PATH``."""
        return f"127.0.0.1:{self._port}" if self._socket_path is None else f"unix://{self._socket_path}"

    @property
    def pid(self) -> int:
        """Return the process id of the running engine."""
        assert self._process is not None, "the engine does not run"
        return self._process.pid

    def start(self) -> None:
        """Start the engine, always at the same address; it listens on return."""
        place = str(self._port if self._socket_path is None else self._socket_path)
        command = [str(self._directory / "stub-engine"), str(self._control_path), place, self.release]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline().strip() == "ready", "the engine did not start; see above"
        self._process = process

    def kill(self) -> None:
        """Kill the engine at once, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stop(self) -> None:
        """Stop the engine: it answers nothing until ``resume``."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the engine answer again."""
        os.kill(self.pid, signal.SIGCONT)

    def has_crashed(self) -> bool:
        """Return whether the engine crashes within five seconds."""
        assert self._process is not None, "the engine was not started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=5) != 0
        return False

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.kill()


WARM_UP_SAMPLES = 30
DCGM_INTERVAL_SECONDS, DCGM_WARM_UP_SAMPLES = 0.1, 10
INTERVAL_SECONDS = 1.0


def nvml(*, partitioned: bool, samples: int) -> dict[str, int]:
    """Return the calls of a number of samples by function, of a process that reads 8 GPUs."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        directory = Path(name)
        library = stub_support.build(directory / "lib")
        stub_support.control(directory / "control", partitioned=partitioned)
        return _counted_calls("nvml", samples, stub_support.environment(library, directory / "control"))


def dcgm(*, partitioned: bool, samples: int) -> dict[str, int]:
    """Return the calls of a number of samples by function, of a process that queries an engine for 8 GPUs."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        directory = Path(name)
        library = dcgm_stub_support.build(directory / "lib")
        control = directory / "control"
        dcgm_stub_support.control(control, partitioned=partitioned)
        with dcgm_stub_support.Engine(library, control) as engine:
            return _counted_calls(engine.address, samples, dcgm_stub_support.environment(library, control))


def _counted_calls(source: str, samples: int, environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, __file__, source, str(samples)]
    counted = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE).stdout
    calls: dict[str, int] = json.loads(counted)
    return calls


def _nvml(samples: int) -> Counter[str]:
    import pynvml  # noqa: PLC0415 - only the process that samples has the library

    from exporter.config import read_collectors  # noqa: PLC0415 - as above
    from exporter.gpu.nvml.source import NvmlSource  # noqa: PLC0415 - as above

    calls: Counter[str] = Counter()
    find = pynvml._nvmlGetFunctionPointer  # every call of the binding goes through it

    def counted(name: str) -> Callable[..., Any]:
        function = find(name)

        def call(*arguments: object) -> object:
            calls[name] += 1
            return function(*arguments)

        return call

    pynvml._nvmlGetFunctionPointer = counted
    source = NvmlSource(read_collectors(None).fields, interval_seconds=INTERVAL_SECONDS)
    source.open()
    start = time.time()
    for number in range(WARM_UP_SAMPLES + samples):
        if number == WARM_UP_SAMPLES:
            calls.clear()
        source.sample(start + number * INTERVAL_SECONDS)
    counts = Counter(calls)
    source.close()
    return counts


def _dcgm(address: str, samples: int) -> Counter[str]:
    from exporter.config import read_collectors  # noqa: PLC0415 - as in _nvml
    from exporter.gpu.dcgm.library import Library  # noqa: PLC0415 - as above
    from exporter.gpu.dcgm.session import DcgmSource  # noqa: PLC0415 - as above
    from exporter.gpu.merge import supplement  # noqa: PLC0415 - as above

    calls: Counter[str] = Counter()
    ask = Library.call

    def counted(library: Library, name: str, *arguments: object) -> int:
        calls[name] += 1
        return ask(library, name, *arguments)

    Library.call = counted  # type: ignore[method-assign] # every call goes through it
    fields = supplement(read_collectors(None).fields)
    source = DcgmSource(fields, address=address, interval_seconds=DCGM_INTERVAL_SECONDS)
    source.announce = lambda: None
    source.open()
    for number in range(DCGM_WARM_UP_SAMPLES + samples):
        if number == DCGM_WARM_UP_SAMPLES:
            calls.clear()
        source.sample(time.time())
        time.sleep(DCGM_INTERVAL_SECONDS)  # the engine is a separate process, which samples on the real clock
    counts = Counter(calls)
    source.close()
    return counts


if __name__ == "__main__":
    counted = _nvml(int(sys.argv[2])) if sys.argv[1] == "nvml" else _dcgm(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write(json.dumps(counted))

"""Builds and controls the simulated libnvidia-ml.so.1 of tests/stub, for ABI tests and benchmarks."""

import ctypes
import hashlib
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "stub"
CACHE = Path(__file__).parents[1] / ".cache" / "stubs"
RELEASE = "590.48.01"
NEXT_RELEASE = "595.71.05"
MIB = 1024 * 1024

MAX_GPUS, MAX_INSTANCES, MAX_PROCESSES = 16, 7, 16


class StubProcess(ctypes.Structure):
    """One process of a whole GPU; as ``struct stub_process``."""

    _fields_ = [("pid", ctypes.c_uint32), ("sm_percent", ctypes.c_uint32), ("memory_bytes", ctypes.c_uint64)]


class StubInstance(ctypes.Structure):
    """One MIG instance; as ``struct stub_instance``."""

    _fields_ = [
        ("engine_permille", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("memory_used_bytes", ctypes.c_uint64),
        ("generation", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class StubGpu(ctypes.Structure):
    """One GPU; as ``struct stub_gpu``."""

    _fields_ = [
        ("error", ctypes.c_uint32),
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
        ("xid", ctypes.c_uint32),
        ("xid_count", ctypes.c_uint32),
        ("process_count", ctypes.c_uint32),
        ("instance_count", ctypes.c_uint32),
        ("recovery_action", ctypes.c_uint32),
        ("memory_used_bytes", ctypes.c_uint64),
        ("memory_reserved_bytes", ctypes.c_uint64),
        ("energy_millijoules", ctypes.c_uint64),
        ("processes", StubProcess * MAX_PROCESSES),
        ("instances", StubInstance * MAX_INSTANCES),
    ]


class StubControl(ctypes.Structure):
    """The control block; as ``struct stub_control``. Running libraries read it at once."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("driver_error", ctypes.c_uint32),
        ("slow_micros", ctypes.c_uint32),
        ("inits", ctypes.c_uint32),
        ("shutdowns", ctypes.c_uint32),
        ("calls", ctypes.c_uint64),
        ("kernel_release", ctypes.c_char * 32),
        ("hang", ctypes.c_char * 64),
        ("gpus", StubGpu * MAX_GPUS),
    ]


def compiler() -> str | None:
    """Return the path of a C compiler, or ``None`` without one."""
    return shutil.which("cc") or shutil.which("gcc")


def build(directory: Path, *, release: str = RELEASE, without: Iterable[str] = (), wide: bool = False) -> Path:
    """Compile ``directory/libnvidia-ml.so.1`` and put it there in one step, as a package manager does.

    Args:
        directory: created if missing; goes into ``LD_LIBRARY_PATH``.
        release: driver release of the library; a control block with another ``kernel_release`` is a mismatch.
        without: functions that this library lacks, like an older driver.
        wide: 32-byte process records under the ``_v3`` name, as early R535 drivers.

    Returns:
        The directory.
    """
    hidden = "".join(f"{name}; " for name in without)
    options = ["-fPIC", "-shared", f'-DSTUB_RELEASE="{release}"', "-Wl,-soname,libnvidia-ml.so.1"]
    options += ["-DSTUB_WIDE_PROCESS_RECORDS"] if wide else []
    sources = [SOURCES / "board.c", SOURCES / "sharing.c"]
    place = directory / "libnvidia-ml.so.1"
    compiled(place, sources, *options, "-lm", exports=f"{{ global: nvml*; local: {hidden}*; }};\n")
    return directory


def compiled(place: Path, sources: Sequence[Path], *options: str, exports: str = "") -> None:
    """Put a compiled program or library in a place in one step; an earlier compilation is copied.

    Args:
        place: its directory is created if missing.
        sources: C files, in one folder.
        options: for compiler and linker.
        exports: version script of a library.
    """
    parts = [*sources, *sources[0].parent.glob("*.h")]
    content = "\0".join([*options, exports, *(path.read_text(encoding="utf-8") for path in parts)])
    made = CACHE / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            script, building = Path(folder, "exports.map"), Path(folder, "building")
            script.write_text(exports, encoding="ascii")
            command = [compiler() or "cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", *map(str, sources)]
            command += [*options, *([f"-Wl,--version-script={script}"] if exports else []), "-o", str(building)]
            subprocess.run(command, check=True)
            building.replace(made)
    place.parent.mkdir(parents=True, exist_ok=True)
    copy = place.with_name("copy")
    shutil.copy(made, copy)
    copy.replace(place)


def control(path: Path, *, gpus: int = 8, partitioned: bool = False) -> StubControl:
    """Make a control file and map it; every GPU has different values, so that a test notices a mix-up."""
    path.write_bytes(bytes(ctypes.sizeof(StubControl)))
    with path.open("r+b") as file:
        block = StubControl.from_buffer(mmap.mmap(file.fileno(), 0))
    block.size = ctypes.sizeof(StubControl)
    block.gpu_count = gpus
    block.kernel_release = RELEASE.encode()
    for index in range(gpus):
        _fill(block.gpus[index], index, partitioned=partitioned)
    return block


def _fill(gpu: StubGpu, index: int, *, partitioned: bool) -> None:
    gpu.gpu_percent, gpu.memory_percent = 90 - index, 40 + index
    gpu.engine_permille = 805 - index
    gpu.temperature_celsius, gpu.memory_temperature_celsius = 50 + index, 60 + index
    gpu.power_milliwatts = 400_000 + 1_000 * index
    gpu.sm_clock_mhz, gpu.memory_clock_mhz = 1_900 + index, 2_600 + index
    gpu.memory_used_bytes, gpu.memory_reserved_bytes = (20_000 + index) * MIB, 500 * MIB
    gpu.energy_millijoules = 5_000_000_000_000 + index
    if not partitioned:
        gpu.process_count = 2
        for place in range(2):
            gpu.processes[place] = StubProcess(100_000 + 10 * index + place, 40 + place, (9_000 + place) * MIB)
        return
    gpu.instance_count = MAX_INSTANCES
    for place in range(MAX_INSTANCES):
        pid = 200_000 + 10 * index + place
        gpu.instances[place] = StubInstance(100 * place + index, pid, (1_000 + 10 * index + place) * MIB, 0, 0)


def gpu_uuid(index: int) -> str:
    """Return the UUID of the simulated GPU ``index``."""
    return f"GPU-5717b000-0000-4000-8000-{index:012d}"


def instance_uuid(gpu: int, place: int, generation: int = 0) -> str:
    """Return the UUID of the simulated MIG instance at ``place`` of GPU ``gpu``."""
    return f"MIG-5717b000-{generation:04d}-5000-8000-{gpu:06d}{place:06d}"


def holdable(*, partitioned: bool) -> list[str]:
    """Return the UUIDs of all devices of 8 simulated GPUs that a pod can hold: GPUs, or MIG instances."""
    if partitioned:
        return [instance_uuid(gpu, place) for gpu in range(8) for place in range(MAX_INSTANCES)]
    return [gpu_uuid(gpu) for gpu in range(8)]


def environment(directory: Path, control_path: Path) -> dict[str, str]:
    """Return the environment in which a child process finds the simulated library and its control file."""
    return {"LD_LIBRARY_PATH": str(directory), "NVML_STUB_CONTROL": str(control_path)}

"""Simulated drivers and DCGM engines in time that a test moves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pynvml

from exporter.gpu.dcgm.session import DcgmSource
from exporter.gpu.nvml.activity import OLDEST_SECONDS, record_type
from exporter.gpu.nvml.library import Driver
from exporter.model.devices import GpuReading, Reading
from exporter.model.fields import Field
from gpu_simulator import dcgm, driver
from gpu_simulator.truth import DcgmTruth, Fault, GpuTruth, Load, MigTruth, ModelSpec, NodeTruth, ProcessTruth

GIB = 1 << 30
MIB = 1 << 20
H100 = ModelSpec(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=81559 * MIB,
    memory_reserved_bytes=479 * MIB,
    power_limit_watts=700.0,
    idle_watts=70.0,
    max_sm_clock_mhz=1980,
    max_mem_clock_mhz=2619,
    multiprocessors=132,
    gpm=True,
    mig_profiles={
        "1g.10gb": (19, 1, 1),
        "1g.10gb+me": (20, 1, 1),
        "1g.20gb": (15, 1, 2),
        "2g.20gb": (14, 2, 2),
        "3g.40gb": (9, 3, 4),
        "4g.40gb": (5, 4, 4),
        "7g.80gb": (0, 7, 8),
    },
    compute_slices=7,
    memory_slices=8,
)
T4 = ModelSpec(
    name="Tesla T4",
    memory_bytes=15360 * MIB,
    memory_reserved_bytes=400 * MIB,
    power_limit_watts=70.0,
    idle_watts=10.0,
    max_sm_clock_mhz=1590,
    max_mem_clock_mhz=5001,
    multiprocessors=40,
    gpm=False,
)


def process(pid: int, *, sm: float = 0.0, memory: int = GIB, comm: str = "python", **ratios: float) -> ProcessTruth:
    return ProcessTruth(
        pid=pid, start_ticks=1000 + pid, comm=comm, cgroup="0::/", memory_used_bytes=memory, sm_ratio=sm, **ratios
    )


def gpu(index: int = 0, **values: object) -> GpuTruth:
    base = GpuTruth(
        index=index,
        minor=index + 2,
        uuid=f"GPU-00000000-0000-0000-0000-00000000000{index}",
        pci_bus_id=f"00000000:{0x17 + index:02X}:00.0",
        serial=f"165242300000{index}",
        model=H100,
        memory_temp_celsius=48,
        power_watts=123.456,
    )
    return replace(base, **values)


def instance(number: int, profile: str = "1g.10gb", *, compute_instance: int = 0, **values: object) -> MigTruth:
    base = MigTruth(
        uuid=f"MIG-00000000-0000-0000-000{compute_instance}-0000000000{number:02}",
        gpu_instance_id=number,
        compute_instance_id=compute_instance,
        profile=profile,
        profile_id=19,
        placement_start=number,
        compute_slices=1,
        memory_slices=1,
        memory_bytes=9984 * MIB,
        multiprocessors=16,
    )
    return replace(base, **values)


def partitioned(*instances: MigTruth, index: int = 0, **values: object) -> GpuTruth:
    return gpu(index, mig_enabled=True, instances=instances, **values)


def load(**ratios: float) -> Load:
    return Load(**ratios)


@dataclass
class Node:
    """A truth that a test changes, and a monotonic time that never passes by itself."""

    truth: NodeTruth
    seconds: float = 0.0

    def set(self, *gpus: GpuTruth, at: float | None = None, **values: object) -> None:
        seconds = self.truth.at_seconds if at is None else at
        self.truth = replace(self.truth, gpus=gpus or self.truth.gpus, at_seconds=seconds, **values)

    def change(self, index: int = 0, *, at: float | None = None, **values: object) -> None:
        gpus = [replace(one, **values) if one.index == index else one for one in self.truth.gpus]
        self.set(*gpus, at=at)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@contextmanager
def simulated(*gpus: GpuTruth, at: float = 100.0, init: bool = True, **values: object) -> Iterator[Node]:
    """Install the driver of a node, and initialise it unless ``init`` is false; undo it at the end."""
    settings: dict[str, object] = {"driver_version": "590.48.01"} | values
    node = Node(NodeTruth(at_seconds=at, node="simulated", gpus=gpus, **settings))
    driver.install(lambda: node.truth, cache_seconds=0.0, monotonic=lambda: node.seconds, sleep=node.sleep)
    try:
        if init:
            pynvml.nvmlInit()
        yield node
    finally:
        driver.uninstall()


def session(
    *fields: Field, count: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = lambda: 0.0
) -> Driver:
    """Return the shared state of device readers under the simulated driver."""
    return Driver(
        fields=frozenset(fields),
        count=count,
        clock=clock,
        major=590,
        record=record_type(),
        oldest_seconds=OLDEST_SECONDS,
    )


def code_of(call: object, *arguments: object) -> int:
    """Return the code of an exception of pynvml, or 0 without one."""
    try:
        call(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


EPOCH_SECONDS = 1_800_000_000.0
ADDRESS = "localhost:5555"
FIELDS = frozenset(
    {
        *(Field.SM_CLOCK, Field.GPU_TEMP, Field.POWER_USAGE, Field.TOTAL_ENERGY_CONSUMPTION, Field.GPU_UTIL),
        *(Field.FB_TOTAL, Field.FB_USED, Field.FB_FREE, Field.ECC_DBE_VOL_TOTAL, Field.PCIE_REPLAY_COUNTER),
        *(Field.PROF_GR_ENGINE_ACTIVE, Field.PROF_SM_ACTIVE, Field.PROF_DRAM_ACTIVE, Field.PROF_PCIE_TX_BYTES),
        *(Field.DRIVER_VERSION, Field.VBIOS_VERSION, Field.XID_ERRORS),
    }
)
PROFILED = frozenset(one for one in FIELDS if one.name.startswith("PROF_"))


@dataclass
class Bench:
    """A node, its engine and the source that queries it."""

    truth: NodeTruth
    fields: frozenset[Field] = FIELDS
    seconds: float = 1000.0
    interval_seconds: float = 1.0
    errors: dict[str, int] = field(default_factory=dict)
    slept_seconds: float = 0.0

    def __post_init__(self) -> None:
        dcgm.install(
            self.now, cache_seconds=0.0, epoch_seconds=EPOCH_SECONDS, monotonic=self.monotonic, sleep=self._sleep
        )
        self.source = DcgmSource(
            self.fields, address=ADDRESS, interval_seconds=self.interval_seconds, monotonic=self.monotonic
        )

    def now(self) -> NodeTruth:
        return replace(self.truth, at_seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds

    def _sleep(self, seconds: float) -> None:
        self.slept_seconds += seconds
        self.seconds += seconds

    def change(self, index: int = 0, **values: object) -> None:
        gpus = tuple(replace(one, **values) if one.index == index else one for one in self.truth.gpus)
        self.truth = replace(self.truth, gpus=gpus)

    def set(self, **values: object) -> None:
        self.truth = replace(self.truth, **values)

    def sample(self, count: int = 1) -> Reading:
        """Return the last of several readings, one per interval; their errors are added up in ``errors``."""
        for _ in range(count):
            reading = self.source.sample(EPOCH_SECONDS + self.seconds)
            for reason, number in reading.errors.items():
                self.errors[reason] = self.errors.get(reason, 0) + number
            self.seconds += self.interval_seconds
        return reading

    def opened(self, samples: int = 2) -> Reading:
        """Open the source and return the first reading that also has profiling fields."""
        self.source.open()
        return self.sample(samples)

    def until(self, wanted: Callable[[Reading], bool], *, within_seconds: float) -> Reading:
        end = self.seconds + within_seconds
        while not wanted(reading := self.sample()):
            assert self.seconds < end, f"condition not met within {within_seconds:g} seconds: {reading}"
        return reading


@contextmanager
def engine(
    *gpus: GpuTruth,
    fields: frozenset[Field] = FIELDS,
    interval_seconds: float = 1.0,
    version: str = "4.6.0",
    profiling_module: bool = True,
    faults: dict[Fault, float] | None = None,
) -> Iterator[Bench]:
    """Install a node with these GPUs and a host engine; undo it at the end."""
    truth = NodeTruth(
        at_seconds=0.0,
        node="simulated",
        driver_version="590.48.01",
        gpus=gpus,
        dcgm=DcgmTruth(version=version, profiling_module=profiling_module),
        faults=faults or {},
    )
    bench = Bench(truth, fields=fields, interval_seconds=interval_seconds)
    try:
        yield bench
    finally:
        bench.source.close()
        dcgm.uninstall()


def of(reading: Reading, index: int = 0) -> GpuReading:
    return next(one for one in reading.gpus if one.gpu.index == index)


def profiled(reading: Reading, index: int = 0) -> frozenset[Field]:
    return PROFILED & of(reading, index).values.keys()

"""The DCGM source on a simulated host engine, in time that a test moves by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from exporter.gpu.dcgm.session import DcgmSource
from exporter.model.devices import GpuReading, Reading
from exporter.model.fields import Field
from gpu_simulator import dcgm
from gpu_simulator.truth import DcgmTruth, Fault, GpuTruth, NodeTruth

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
    """A node, its engine and the source that asks it."""

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
        """The last of so many readings, one an interval; what they count is added up in ``errors``."""
        for _ in range(count):
            reading = self.source.sample(EPOCH_SECONDS + self.seconds)
            for reason, number in reading.errors.items():
                self.errors[reason] = self.errors.get(reason, 0) + number
            self.seconds += self.interval_seconds
        return reading

    def opened(self, samples: int = 2) -> Reading:
        """Open the source and return the reading that has profiling fields too."""
        self.source.open()
        return self.sample(samples)

    def until(self, wanted: Callable[[Reading], bool], *, within_seconds: float) -> Reading:
        end = self.seconds + within_seconds
        while not wanted(reading := self.sample()):
            assert self.seconds < end, f"not so within {within_seconds:g} seconds: {reading}"
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
    """A node with these GPUs and a host engine; undone at the end."""
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

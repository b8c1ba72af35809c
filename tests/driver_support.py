"""Hand-made truths and a driver that follows them, for the tests of the simulated driver."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pynvml

from exporter.gpu.nvml.activity import OLDEST_SECONDS, record_type
from exporter.gpu.nvml.library import Driver
from exporter.model.fields import Field
from gpu_simulator import driver
from gpu_simulator.truth import GpuTruth, Load, MigTruth, ModelSpec, NodeTruth, ProcessTruth

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
    """A truth that a test moves by hand, and real time that never passes by itself."""

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
    """A node whose driver is installed, and initialised unless told otherwise; undone at the end."""
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
    """What readers of devices share while the simulated driver is installed."""
    return Driver(
        fields=frozenset(fields),
        count=count,
        clock=clock,
        major=590,
        record=record_type(),
        oldest_seconds=OLDEST_SECONDS,
    )


def code_of(call: object, *arguments: object) -> int:
    """The return code that pynvml raises, 0 where it does not."""
    try:
        call(*arguments)
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0

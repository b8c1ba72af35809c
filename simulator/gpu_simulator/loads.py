"""What a level of activity does to a GPU's engines, memory and links: the mixes of typical workloads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from gpu_simulator.truth import Load

NAMES = tuple(f.name for f in fields(Load) if f.name != "memory_used_bytes")
"""What a mix has a factor for, in the order of its tuple."""

_RATIO_COUNT = sum(not name.endswith("_per_second") for name in NAMES)
"""Ratios come first in ``Load``, then bytes per second."""
_COMPUTE = tuple(
    NAMES.index(name)
    for name in ("engine", "sm", "occupancy", "tensor", "dram", "fp16", "fp32", "fp64", "utilisation", "memory_copy")
)
_ENGINES = tuple(NAMES.index(name) for name in ("engine", "encode", "decode", "jpeg", "optical_flow"))
_UTILISATION = NAMES.index("utilisation")


@dataclass(frozen=True, slots=True)
class Mix:
    """Factors by which an activity of 1 appears in each part of ``Load``; ratios, and bytes per second for links."""

    factors: tuple[float, ...]

    @property
    def peak(self) -> float:
        """Greatest ratio among the factors."""
        return max(self.factors[:_RATIO_COUNT])

    def factor(self, name: str) -> float:
        """One factor by its name."""
        return self.factors[NAMES.index(name)]


def mix(**factors: float) -> Mix:
    """A mix from named factors; what is not named is 0, and ``utilisation`` follows ``engine``."""
    factors.setdefault("utilisation", factors.get("engine", 0.0))
    return Mix(tuple(float(factors.get(name, 0.0)) for name in NAMES))


MIXES = {
    "training": {
        "engine": 1.0,
        "sm": 0.92,
        "occupancy": 0.42,
        "tensor": 0.46,
        "dram": 0.52,
        "fp16": 0.06,
        "fp32": 0.12,
        "memory_copy": 0.45,
        "pcie_rx_bytes_per_second": 1.2e9,
        "pcie_tx_bytes_per_second": 3e8,
        "nvlink_tx_bytes_per_second": 9e10,
        "nvlink_rx_bytes_per_second": 9e10,
    },
    "inference": {
        "engine": 1.0,
        "sm": 0.68,
        "occupancy": 0.28,
        "tensor": 0.31,
        "dram": 0.61,
        "fp16": 0.08,
        "fp32": 0.05,
        "memory_copy": 0.5,
        "pcie_rx_bytes_per_second": 4e8,
        "pcie_tx_bytes_per_second": 2e8,
    },
    "notebook": {
        "engine": 1.0,
        "sm": 0.7,
        "occupancy": 0.3,
        "tensor": 0.1,
        "dram": 0.3,
        "fp32": 0.35,
        "memory_copy": 0.25,
        "pcie_rx_bytes_per_second": 2e8,
        "pcie_tx_bytes_per_second": 1e8,
    },
    "science": {
        "engine": 1.0,
        "sm": 0.95,
        "occupancy": 0.55,
        "tensor": 0.02,
        "dram": 0.7,
        "fp64": 0.4,
        "fp32": 0.1,
        "memory_copy": 0.65,
        "pcie_rx_bytes_per_second": 3e8,
        "pcie_tx_bytes_per_second": 3e8,
    },
    "transcode": {
        "engine": 0.08,
        "sm": 0.05,
        "occupancy": 0.02,
        "dram": 0.06,
        "utilisation": 0.1,
        "memory_copy": 0.05,
        "encode": 1.0,
        "decode": 0.6,
        "pcie_rx_bytes_per_second": 2e8,
        "pcie_tx_bytes_per_second": 2e8,
    },
}
"""Factors by kind of workload."""

NOTHING = (0.0,) * len(NAMES)


def add(vectors: Iterable[tuple[float, Mix]]) -> tuple[float, ...]:
    """Sum of amounts of mixes, as a vector in the order of ``NAMES``."""
    total: Sequence[float] = NOTHING
    for amount, part in vectors:
        if amount:
            total = [value + amount * factor for value, factor in zip(total, part.factors, strict=True)]
    return tuple(total)


def combine(parts: Sequence[tuple[float, tuple[float, ...]]]) -> tuple[float, ...]:
    """Board-level vector of a partitioned GPU: compute by slices (first of each pair), links and codecs added."""
    total = list(NOTHING)
    for weight, vector in parts:
        for position, value in enumerate(vector):
            total[position] += value * weight if position in _COMPUTE else value
    return tuple(total)


def load(vector: tuple[float, ...], memory_used_bytes: int = 0, *, clamp: bool = True) -> Load:
    """A vector as a ``Load``; ratios are kept to 1 against rounding unless it is an integral."""
    if clamp and max(vector[:_RATIO_COUNT]) > 1.0:
        vector = (*(min(1.0, ratio) for ratio in vector[:_RATIO_COUNT]), *vector[_RATIO_COUNT:])
    return Load(memory_used_bytes=memory_used_bytes, **dict(zip(NAMES, vector, strict=True)))


def dominant(vector: tuple[float, ...], *, gpm: bool) -> int:
    """Position of the busiest engine; without GPM compute is what NVML calls utilisation."""
    engines = _ENGINES if gpm else (_UTILISATION, *_ENGINES[1:])
    return max(engines, key=lambda position: vector[position])

"""Activity over time with its exact integral, and what a level of activity does to a GPU's engines and links."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from gpu_simulator.truth import Load

NOISE_SLOTS = 256
"""Noise repeats after this many slots, so that its integral stays a table look-up for ever."""


class Signal(Protocol):
    """A level 0..1 as a function of the seconds since its owner started."""

    @property
    def peak(self) -> float:
        """Greatest level that it ever takes."""

    def value(self, t: float) -> float:
        """Level at ``t`` >= 0."""

    def integral(self, t: float) -> float:
        """Exact integral of the level from 0 to ``t`` >= 0, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """One level for ever."""

    level: float

    @property
    def peak(self) -> float:
        """The level."""
        return self.level

    def value(self, t: float) -> float:  # noqa: ARG002 - all signals answer the same question
        """The level."""
        return self.level

    def integral(self, t: float) -> float:
        """``level * t``."""
        return self.level * t


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """``high`` for the first ``duty`` part of every period, else ``low``; bursts of requests, epochs of training."""

    high: float
    low: float = 0.0
    period_seconds: float
    duty: float = 0.5
    phase_seconds: float = 0.0
    """How far into a period it starts."""

    @property
    def peak(self) -> float:
        """The greater of the two levels."""
        return max(self.high, self.low)

    def value(self, t: float) -> float:
        """``high`` or ``low``."""
        within = (t + self.phase_seconds) % self.period_seconds
        return self.high if within < self.duty * self.period_seconds else self.low

    def _from_zero(self, t: float) -> float:
        cycles, within = divmod(t, self.period_seconds)
        on_seconds = self.duty * self.period_seconds
        on = cycles * on_seconds + min(within, on_seconds)
        return self.high * on + self.low * (t - on)

    def integral(self, t: float) -> float:
        """Whole periods plus the part of the running one."""
        return self._from_zero(t + self.phase_seconds) - self._from_zero(self.phase_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sine:
    """A smooth wave around ``mean``: daily or hourly demand."""

    mean: float
    amplitude: float
    period_seconds: float
    phase_seconds: float = 0.0

    @property
    def peak(self) -> float:
        """``mean + amplitude``."""
        return self.mean + self.amplitude

    def value(self, t: float) -> float:
        """Level of the wave, kept within 0..1 against rounding."""
        angle = math.tau * (t + self.phase_seconds) / self.period_seconds
        return min(1.0, max(0.0, self.mean + self.amplitude * math.sin(angle)))

    def integral(self, t: float) -> float:
        """Closed form."""
        scale = self.period_seconds / math.tau
        start = math.cos(self.phase_seconds / scale)
        return self.mean * t + self.amplitude * scale * (start - math.cos((t + self.phase_seconds) / scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """From one level to another in ``seconds``, then the second one for ever."""

    first: float
    last: float
    seconds: float

    @property
    def peak(self) -> float:
        """The greater of the two levels."""
        return max(self.first, self.last)

    def value(self, t: float) -> float:
        """Linear between the two levels."""
        return self.first + (self.last - self.first) * min(t / self.seconds, 1.0)

    def integral(self, t: float) -> float:
        """A trapezium, then a rectangle."""
        rising = min(t, self.seconds)
        trapezium = rising * (self.first + self.value(rising)) / 2
        return trapezium + self.last * (t - rising)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Levels that each hold from their time until the next one's; 0 before the first."""

    points: tuple[tuple[float, float], ...]
    """(seconds, level), in order of time."""

    @property
    def peak(self) -> float:
        """The greatest level."""
        return max(level for _, level in self.points)

    def value(self, t: float) -> float:
        """Level of the step that holds at ``t``."""
        index = bisect_right(self.points, t, key=lambda point: point[0])
        return self.points[index - 1][1] if index else 0.0

    def integral(self, t: float) -> float:
        """Sum of rectangles."""
        total = 0.0
        ends = [at for at, _ in self.points[1:]] + [math.inf]
        for (start, level), end in zip(self.points, ends, strict=True):
            total += level * max(0.0, min(t, end) - start)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A level that changes every slot, looks random and is not: the same seed always gives the same levels."""

    levels: tuple[float, ...]
    sums: tuple[float, ...]
    """Integral at the start of each slot, in slots; one more than ``levels``."""
    slot_seconds: float

    @property
    def peak(self) -> float:
        """The greatest level."""
        return max(self.levels)

    def value(self, t: float) -> float:
        """Level of the slot that ``t`` is in."""
        return self.levels[int(t // self.slot_seconds) % len(self.levels)]

    def integral(self, t: float) -> float:
        """Table look-up."""
        slots, within = divmod(t, self.slot_seconds)
        rounds, slot = divmod(int(slots), len(self.levels))
        whole = rounds * self.sums[-1] + self.sums[slot]
        return whole * self.slot_seconds + self.levels[slot] * within


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAfter:
    """Another signal until a time, then nothing at all: the forgotten notebook."""

    signal: Signal
    seconds: float

    @property
    def peak(self) -> float:
        """The other signal's."""
        return self.signal.peak

    def value(self, t: float) -> float:
        """The other signal's level, or 0."""
        return self.signal.value(t) if t < self.seconds else 0.0

    def integral(self, t: float) -> float:
        """The other signal's integral, which stops growing."""
        return self.signal.integral(min(t, self.seconds))


def noise(*, low: float, high: float, slot_seconds: float, seed: str) -> Noise:
    """Noise between two levels, from a hash of ``seed``."""
    levels: list[float] = []
    sums = [0.0]
    for slot in range(NOISE_SLOTS):
        digest = hashlib.blake2b(f"{seed}/{slot}".encode(), digest_size=4).digest()
        levels.append(low + (high - low) * int.from_bytes(digest) / 0xFFFFFFFF)
        sums.append(sums[-1] + levels[-1])
    return Noise(levels=tuple(levels), sums=tuple(sums), slot_seconds=slot_seconds)


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

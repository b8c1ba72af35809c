"""Computes activity over time with its exact integral, and the load of engines and links for a level of activity."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from gpu_simulator.models import table
from gpu_simulator.truth import Load

NOISE_SLOTS = 256
"""Number of slots after which noise repeats, so that its integral stays a table lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Levels that each last until the time of the next one, once or in every period; 0 before the first."""

    starts: tuple[float, ...]
    """Start of each level in seconds, in order."""
    levels: tuple[float, ...]
    sums: tuple[float, ...]
    """Integral at each start, in seconds."""
    period_seconds: float = math.inf
    phase_seconds: float = 0.0
    """Offset of the start in the period, in seconds."""

    @property
    def peak(self) -> float:
        """Return the highest level."""
        return max(self.levels)

    def value(self, t: float) -> float:
        """Return the level at ``t``."""
        index = bisect_right(self.starts, (t + self.phase_seconds) % self.period_seconds)
        return self.levels[index - 1] if index else 0.0

    def integral(self, t: float) -> float:
        """Return the integral: complete periods plus the part of the current one."""
        return self._from_zero(t + self.phase_seconds) - self._from_zero(self.phase_seconds)

    def _from_zero(self, t: float) -> float:
        cycles, within = divmod(t, self.period_seconds)
        return (cycles * self._within(self.period_seconds) if cycles else 0.0) + self._within(within)

    def _within(self, t: float) -> float:
        index = bisect_right(self.starts, t) - 1
        return self.sums[index] + self.levels[index] * (t - self.starts[index]) if index >= 0 else 0.0


def steps(
    points: Sequence[tuple[float, float]], period_seconds: float = math.inf, phase_seconds: float = 0.0
) -> Levels:
    """Return levels from pairs of seconds and level, in order of time."""
    starts, levels = (tuple(column) for column in zip(*points, strict=True))
    areas = ((end - start) * level for start, end, level in zip(starts, starts[1:], levels, strict=False))
    return Levels(
        starts=starts,
        levels=levels,
        sums=tuple(accumulate(areas, initial=0.0)),
        period_seconds=period_seconds,
        phase_seconds=phase_seconds,
    )


def steady(level: float) -> Levels:
    """Return a constant level."""
    return steps([(0.0, level)])


def square(
    *, high: float, low: float = 0.0, period_seconds: float, duty: float = 0.5, phase_seconds: float = 0.0
) -> Levels:
    """Return ``high`` for the first ``duty`` part of every period, else ``low``: bursts of requests, or epochs."""
    return steps([(0.0, high), (duty * period_seconds, low)], period_seconds, phase_seconds)


def noise(*, low: float, high: float, slot_seconds: float, seed: str) -> Levels:
    """Return a pseudo-random level that changes every slot; the same seed gives the same levels."""
    points: list[tuple[float, float]] = []
    for slot in range(NOISE_SLOTS):
        digest = hashlib.blake2b(f"{seed}/{slot}".encode(), digest_size=4).digest()
        points.append((slot * slot_seconds, low + (high - low) * int.from_bytes(digest) / 0xFFFFFFFF))
    return steps(points, NOISE_SLOTS * slot_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A level defined by formulas, for ``t`` >= 0."""

    peak: float
    """Highest level."""
    value: Callable[[float], float]
    """Return the level at ``t``."""
    integral: Callable[[float], float]
    """Return the exact integral of the level from 0 to ``t``, in seconds."""


Signal = Levels | Curve
"""A level 0..1 as a function of the seconds since its owner started."""


def sine(*, mean: float, amplitude: float, period_seconds: float, phase_seconds: float = 0.0) -> Curve:
    """Return a wave around ``mean``, such as daily or hourly demand."""
    scale = period_seconds / math.tau

    def value(t: float) -> float:
        level = mean + amplitude * math.sin(math.tau * (t + phase_seconds) / period_seconds)
        return min(1.0, max(0.0, level))  # rounding can exceed the limits

    def integral(t: float) -> float:
        return mean * t + amplitude * scale * (math.cos(phase_seconds / scale) - math.cos((t + phase_seconds) / scale))

    return Curve(peak=mean + amplitude, value=value, integral=integral)


def ramp(*, first: float, last: float, seconds: float) -> Curve:
    """Return a level that changes linearly in ``seconds``, then stays constant."""

    def value(t: float) -> float:
        return first + (last - first) * min(t / seconds, 1.0)

    def integral(t: float) -> float:
        rising = min(t, seconds)
        return rising * (first + value(rising)) / 2 + last * (t - rising)

    return Curve(peak=max(first, last), value=value, integral=integral)


def idle_after(signal: Signal, seconds: float) -> Curve:
    """Return another signal until a time, then 0, like a forgotten notebook."""
    return Curve(
        peak=signal.peak,
        value=lambda t: signal.value(t) if t < seconds else 0.0,
        integral=lambda t: signal.integral(min(t, seconds)),
    )


NAMES = tuple(f.name for f in fields(Load) if f.name != "memory_used_bytes")
"""Fields with a factor in a mix, in the order of the vector."""

_RATIO_COUNT = sum(not name.endswith("_per_second") for name in NAMES)
"""Number of ratios, which precede the bytes per second in ``Load``."""
_COMPUTE = tuple(
    NAMES.index(name)
    for name in (
        *("engine", "sm", "occupancy", "tensor", "dram", "fp16", "fp32", "fp64", "integer"),
        *("utilisation", "memory_copy"),
    )
)
_ENGINES = tuple(NAMES.index(name) for name in ("engine", "encode", "decode", "jpeg", "optical_flow"))
_UTILISATION = NAMES.index("utilisation")


Vector = tuple[float, ...]
"""One number for each of ``NAMES``: a load, its integral, or the factors of an activity of 1."""
NOTHING: Vector = (0.0,) * len(NAMES)


def mix(**factors: float) -> Vector:
    """Return factors as a vector; missing ``utilisation`` is ``engine``, ``integer`` half ``fp32``, others are 0."""
    factors.setdefault("utilisation", factors.get("engine", 0.0))
    factors.setdefault("integer", factors.get("fp32", 0.0) / 2)
    return tuple(float(factors.get(name, 0.0)) for name in NAMES)


def peak(factors: Vector) -> float:
    """Return the highest ratio among factors."""
    return max(factors[:_RATIO_COUNT])


MIXES: Mapping[str, Mapping[str, float]] = table("workloads")
"""Factors by kind of workload."""


def add(vectors: Iterable[tuple[float, Vector]]) -> Vector:
    """Return the sum of factors, each multiplied by its amount."""
    total: Sequence[float] = NOTHING
    for amount, part in vectors:
        if amount:
            total = [value + amount * factor for value, factor in zip(total, part, strict=True)]
    return tuple(total)


def combine(parts: Sequence[tuple[float, Vector]]) -> Vector:
    """Return the vector of a partitioned GPU: compute weighted (first of each pair), links and codecs summed."""
    total = list(NOTHING)
    for weight, vector in parts:
        for position, value in enumerate(vector):
            total[position] += value * weight if position in _COMPUTE else value
    return tuple(total)


def load(vector: Vector, memory_used_bytes: int = 0, *, clamp: bool = True) -> Load:
    """Return a vector as a ``Load``; ratios are limited to 1, except in an integral."""
    if clamp and peak(vector) > 1.0:
        vector = (*(min(1.0, ratio) for ratio in vector[:_RATIO_COUNT]), *vector[_RATIO_COUNT:])
    return Load(memory_used_bytes=memory_used_bytes, **dict(zip(NAMES, vector, strict=True)))


def dominant(vector: Vector, *, gpm: bool) -> int:
    """Return the index of the busiest engine; without GPM, compute is NVML's utilisation."""
    engines = _ENGINES if gpm else (_UTILISATION, *_ENGINES[1:])
    return max(engines, key=lambda position: vector[position])

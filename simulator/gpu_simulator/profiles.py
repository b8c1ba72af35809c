"""Activity over time, each form with its exact integral, so that a mean over any window is known and not sampled."""

import hashlib
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol

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

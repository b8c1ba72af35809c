"""What a GPU used of energy over an interval, and whose it was."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from exporter.model import Field

MOST_WATTS = 10_000.0
"""Several times what any GPU takes: what is beyond is no reading. One blank in a 64-bit counter would be a fortune."""
COUNTER_STEP_SECONDS = 1.0
"""A counter may step for this much time at once, however short the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """One GPU's energy over one interval; ``idle_joules`` is what it would have used doing nothing."""

    joules: float
    idle_joules: float
    earlier_joules: float = 0.0
    """Part of ``joules`` that is of the time before the interval, in which the counter could not be read."""

    def without_earlier(self) -> "Energy":
        """Return what is of the interval itself."""
        own = self.joules - self.earlier_joules
        return Energy(joules=own, idle_joules=self.idle_joules * (own / self.joules))


@dataclass(slots=True, kw_only=True)
class EnergyMeter:
    """One physical GPU's energy: its counter's increase, else power times time."""

    counter_millijoules: float | None = None
    """The driver's counter when it was read last; it begins again at 0 with the driver."""
    idle_watts: float | None = None
    """Lowest mean power over an interval so far: what the GPU takes when it does nothing."""
    uncounted_seconds: float = 0.0
    """How long before the present interval the counter was read last."""
    driver: int | None = None
    """Identity of the loaded driver at the last interval's end; ``None`` where it is unknown."""

    def take(
        self,
        values: Mapping[Field, int | float],
        interval_seconds: float,
        *,
        seen: bool,
        telling: bool,
        driver: int | None = None,
    ) -> Energy | None:
        """Close an interval.

        Args:
            values: What was measured of the GPU at its end.
            interval_seconds: Its length, > 0.
            seen: False for a gap: then only a counter can tell, as power is of the instant.
            telling: False where the interval is too short to tell the idle power; counters step every 20-100 ms.
            driver: Identity of the loaded driver. A counter of another one began at 0 at an unknown instant, so that
                its increase is not measured, even where it is already higher.

        Returns:
            ``None`` where the energy was not measured, or cannot be what was measured. Where the counter is read again
            after a while, all that it has counted since.
        """
        if driver != self.driver:
            self.driver, self.counter_millijoules, self.uncounted_seconds = driver, None, 0.0
        joules = self._joules(values, interval_seconds, seen=seen)
        seconds = interval_seconds + self.uncounted_seconds
        waits = self.counter_millijoules is not None and values.get(Field.TOTAL_ENERGY_CONSUMPTION) is None
        earlier, self.uncounted_seconds = self.uncounted_seconds, seconds if waits else 0.0
        if joules is None or joules > MOST_WATTS * (seconds + COUNTER_STEP_SECONDS):
            return None
        if seen and telling and joules > 0:
            watts = joules / seconds
            self.idle_watts = watts if self.idle_watts is None else min(self.idle_watts, watts)
        idle = joules if self.idle_watts is None else min(joules, self.idle_watts * seconds)
        return Energy(joules=joules, idle_joules=idle, earlier_joules=joules * (earlier / seconds))

    def begin(self, values: Mapping[Field, int | float], driver: int | None = None) -> None:
        """Note where the counter of a driver stands at the start of the first interval."""
        self.driver = driver
        self.counter_millijoules = values.get(Field.TOTAL_ENERGY_CONSUMPTION)

    def _joules(self, values: Mapping[Field, int | float], interval_seconds: float, *, seen: bool) -> float | None:
        counter, before = values.get(Field.TOTAL_ENERGY_CONSUMPTION), self.counter_millijoules
        if counter is not None and before is not None:
            self.counter_millijoules = counter
            # A fall: the driver was loaded again, and what it had counted until then is lost.
            return (counter - before) / 1000 if counter >= before else None
        power = values.get(Field.POWER_USAGE) if seen else None
        if counter is not None or power is not None:
            self.counter_millijoules = counter  # what power has told must not be told again by the counter's return
            self.uncounted_seconds = 0.0
        return None if power is None else max(0.0, power) * interval_seconds


def split_energy(energy: Energy, shares: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Divide a GPU's energy: the idle part by share, what is above it by activity.

    Args:
        energy: The GPU's.
        shares: Parts of the GPU; 0 for use by nobody who holds a part.
        weights: Active parts of the GPU; where all are 0 everything goes by share.

    Returns:
        One part per share, in joules, none negative; they sum to the GPU's energy.
    """
    total_share, total_weight = sum(shares), sum(weights)
    idle = energy.idle_joules if total_weight > 0 else energy.joules
    dynamic = energy.joules - idle
    parts = [
        idle * share / total_share + (dynamic * weight / total_weight if total_weight > 0 else 0.0)
        for share, weight in zip(shares, weights, strict=True)
    ]
    largest = max(range(len(parts)), key=parts.__getitem__)
    parts[largest] += energy.joules - sum(parts)  # rounding, where it can make nothing negative
    return parts

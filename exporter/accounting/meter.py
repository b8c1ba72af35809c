"""Converts samples of a node to seconds and joules, each charged to one owner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from exporter.accounting.gpu_split import Division, Slot, across_gap, divide
from exporter.model.attribution import UNALLOCATED, Holder, Owner
from exporter.model.fields import Field
from exporter.model.ledger import Portion
from exporter.model.snapshot import DeviceView

MOST_WATTS = 10_000.0
"""Maximum valid power, several times the maximum of any GPU; otherwise a blank 64-bit counter would be charged."""
COUNTER_STEP_SECONDS = 1.0
"""Time whose energy a counter may add at once, even in a shorter interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of one GPU over one interval; ``idle_joules`` is the part that it would have used without work."""

    joules: float
    idle_joules: float


@dataclass(slots=True, kw_only=True)
class EnergyMeter:
    """Measures the energy of one physical GPU: the increase of its counter, otherwise power times time."""

    counter_millijoules: float | None = None
    """Counter of the driver at its last reading; ``None`` if unknown. It restarts with the driver."""
    idle_watts: float | None = None
    """Power of the GPU without work: the lowest mean power over an interval so far; ``None`` if unknown."""
    driver: int | None = None
    """Identity of the driver that counted; ``None`` if unknown."""
    uncounted_seconds: float = 0.0
    """Time between the last reading of the counter and the current interval."""

    def end(
        self,
        values: Mapping[Field, int | float],
        interval_seconds: float,
        *,
        seen: bool,
        is_long: bool,
        driver: int | None = None,
    ) -> Energy | None:
        """End an interval, and begin the next one.

        Args:
            values: Values of the GPU at the end of the interval.
            interval_seconds: Length of the interval, > 0.
            seen: False for a gap, whose energy only a counter measures, because power is a momentary value.
            is_long: False if the interval is too short to measure idle power; counters step every 20-100 ms.
            driver: Identity of the loaded driver. The counter of another driver began at 0 at an unknown instant, so
                its increase is not measured, even if the counter is already higher.

        Returns:
            The energy; ``None`` if it was not measured or is impossible. If the counter is readable again after some
            time, the energy includes that time.
        """
        before = self.counter_millijoules if driver == self.driver else None
        counter, power = values.get(Field.TOTAL_ENERGY_CONSUMPTION), values.get(Field.POWER_USAGE) if seen else None
        seconds = interval_seconds + self.uncounted_seconds
        if before is not None and counter is None and power is None:
            self.uncounted_seconds = seconds
            return None
        self.begin(values, driver)
        if before is not None and counter is not None:
            joules = (counter - before) / 1000
        elif power is not None:
            joules, seconds = max(0.0, power) * interval_seconds, interval_seconds
        else:
            return None
        # After a decrease, the driver was loaded again, and its earlier count is lost.
        if not 0 <= joules <= MOST_WATTS * (seconds + COUNTER_STEP_SECONDS):
            return None
        if seen and is_long and joules > 0:
            watts = joules / seconds
            self.idle_watts = watts if self.idle_watts is None else min(self.idle_watts, watts)
        idle = joules if self.idle_watts is None else min(joules, self.idle_watts * seconds)
        return Energy(joules=joules, idle_joules=idle)

    def begin(self, values: Mapping[Field, int | float], driver: int | None = None) -> None:
        """Store the counter of the driver at the start of an interval."""
        self.driver, self.uncounted_seconds = driver, 0.0
        self.counter_millijoules = values.get(Field.TOTAL_ENERGY_CONSUMPTION)


def split_energy(energy: Energy, shares: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Divide a GPU's energy: the idle part by share, the rest by activity.

    Args:
        energy: Energy of the GPU.
        shares: Parts of the GPU; 0 for use without a holder.
        weights: Active parts of the GPU; if all are 0, all energy is divided by share.

    Returns:
        One part per share, in joules, not negative; they sum to the energy of the GPU.
    """
    total_share, total_weight = sum(shares), sum(weights)
    idle = energy.idle_joules if total_weight > 0 else energy.joules
    dynamic = energy.joules - idle
    parts = [
        idle * share / total_share + (dynamic * weight / total_weight if total_weight > 0 else 0.0)
        for share, weight in zip(shares, weights, strict=True)
    ]
    largest = max(range(len(parts)), key=parts.__getitem__)
    parts[largest] += energy.joules - sum(parts)  # the rounding error; it cannot make the largest part negative
    return parts


LATE_SECONDS = 60.0
"""Maximum age of a late sample, relative to the last one; for an older sample, the clock has restarted."""
LEAST_INTERVALS = 0.5
"""Minimum part of the sample interval over which a mean measures idle power."""


def stale_after_seconds(sample_interval_seconds: float) -> float:
    """Return the age above which readings are not shown; a longer interval is a gap."""
    return max(3 * sample_interval_seconds, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterState:
    """State of a meter, from which the next process in the same boot continues; a record of the state file."""

    boot_id: str
    """Boot id of the machine. Monotonic clocks of two boots are not comparable."""
    metered_steady: float
    """Instant of the last sample."""
    metered_until: Mapping[str, float]
    """Instant up to which each GPU is metered; an absent GPU may be far behind the last sample."""
    energy_drivers: Mapping[str, int] = field(default_factory=dict)
    """Identity of the driver that last counted the energy, by GPU; absent if unknown."""
    energy_uncounted_seconds: Mapping[str, float]
    """Time since the last reading of the energy counter, by GPU; 0 if absent."""
    slots: tuple[Slot, ...]
    """Slots of every GPU at its last sample."""


@dataclass(slots=True, kw_only=True)
class _GpuMeter:
    """State of one physical GPU, and the instant up to which it is metered."""

    steady: float
    slots: tuple[Slot, ...]
    energy: EnergyMeter = field(default_factory=EnergyMeter)


@dataclass(slots=True)
class Meter:
    """Integrates samples: every GPU-second between two samples is charged to one account, once.

    The holder of a part at the end of an interval is charged for the interval. An interval longer than three sample
    intervals (at least 2 s) is a gap: its use is unknown, and holders before and after it are charged.
    """

    sample_interval_seconds: float
    owner_of: Callable[[Holder], Owner]
    """Returns the owner of a holder; called for every sample, as metadata may arrive late."""
    _gpus: dict[str, _GpuMeter] = field(default_factory=dict)
    steady: float | None = None
    """Instant of the last sample, of this process or the previous one; ``None`` before the first sample."""

    def add(self, views: Sequence[DeviceView], steady: float, driver: int | None = None) -> tuple[Portion, ...]:
        """Close the interval that ends with a sample.

        Args:
            views: GPUs and MIG instances of the sample.
            steady: Instant of the sample, in seconds of the monotonic clock. A sample that is not later than the last
                one closes no interval, and the next sample continues from the latest. So no time is charged twice.
            driver: Identity of the loaded driver; ``None`` if unknown. Energy counters restart with the driver.

        Returns:
            Portions that sum per GPU to the time since the last sample of that GPU; no portions for a new GPU.
        """
        portions: list[Portion] = []
        values_of = {view.gpu.uuid: view.values for view in views if view.instance is None}
        for division in divide(views, self.owner_of):
            values = values_of.get(division.gpu_uuid, {})
            slots = tuple(part.slot for part in division.parts)
            meter = self._gpus.get(division.gpu_uuid)
            if meter is None:
                meter = self._gpus[division.gpu_uuid] = _GpuMeter(steady=steady, slots=slots)
                meter.energy.begin(values, driver)
            interval = steady - meter.steady
            if -LATE_SECONDS < interval < 0:
                continue
            if meter.energy.uncounted_seconds and not _same(meter.slots, slots):
                meter.energy.begin({})  # energy that is not counted yet may belong to the previous holders
            if interval > 0:
                seen = interval <= stale_after_seconds(self.sample_interval_seconds)
                is_long = interval >= LEAST_INTERVALS * self.sample_interval_seconds
                energy = meter.energy.end(values, interval, seen=seen, is_long=is_long, driver=driver)
                portions += _portions(division if seen else across_gap(meter.slots, division), interval, energy)
            meter.steady, meter.slots = steady, slots
        if self.steady is None or not -LATE_SECONDS < steady - self.steady < 0:
            self.steady = steady
        return tuple(portions)

    def free_shares(self) -> dict[str, float]:
        """Return the unheld part (0..1) of each physical GPU, by UUID, at its last sample."""
        return {
            uuid: fsum(slot.share_ratio for slot in meter.slots if slot.account.owner == UNALLOCATED)
            for uuid, meter in self._gpus.items()
        }

    def state(self, boot_id: str = "") -> MeterState:
        """Return the state to save; call it only after the first sample."""
        drivers = {uuid: meter.energy.driver for uuid, meter in self._gpus.items()}
        return MeterState(
            boot_id=boot_id,
            metered_steady=self.steady or 0.0,
            metered_until={uuid: meter.steady for uuid, meter in self._gpus.items()},
            energy_drivers={uuid: driver for uuid, driver in drivers.items() if driver is not None},
            energy_uncounted_seconds={uuid: meter.energy.uncounted_seconds for uuid, meter in self._gpus.items()},
            slots=tuple(
                replace(
                    slot,
                    energy_counter_millijoules=meter.energy.counter_millijoules,
                    idle_watts=meter.energy.idle_watts,
                )
                for meter in self._gpus.values()
                for slot in meter.slots
            ),
        )

    def resume(self, state: MeterState) -> None:
        """Continue from the state of a process in the same boot: the next sample closes an interval or a gap."""
        by_gpu: dict[str, list[Slot]] = {}
        for slot in state.slots:
            by_gpu.setdefault(slot.gpu_uuid, []).append(slot)
        for uuid, slots in by_gpu.items():
            energy = EnergyMeter(
                counter_millijoules=slots[0].energy_counter_millijoules,
                idle_watts=slots[0].idle_watts,
                driver=state.energy_drivers.get(uuid),
                uncounted_seconds=state.energy_uncounted_seconds.get(uuid, 0.0),
            )
            since = state.metered_until.get(uuid, state.metered_steady)
            self._gpus[uuid] = _GpuMeter(steady=since, slots=tuple(slots), energy=energy)
        self.steady = state.metered_steady


def _portions(division: Division, interval: float, energy: Energy | None) -> list[Portion]:
    """Convert parts of a GPU into seconds and joules."""
    shares = [part.slot.share_ratio for part in division.parts]
    weights = [part.ratios.active for part in division.parts]
    foreign = energy is not None and division.foreign_ratio > 0
    if foreign:
        shares.append(0.0)
        weights.append(division.foreign_ratio)
    joules: Sequence[float | None] = split_energy(energy, shares, weights) if energy else [None] * len(shares)
    gpu = division.gpu_uuid
    portions = [
        Portion(
            gpu_uuid=gpu,
            account=slot.account,
            pod=pod,
            seconds=ratios.scaled(interval),
            energy_joules=own,
            interval_seconds=interval,
            estimated=estimated,
            profile=profile,
        )
        for (slot, pod, ratios, estimated, profile), own in zip(division.parts, joules, strict=False)
    ]
    if foreign:  # energy of use without a holder, and no seconds
        unknown = division.unattributed
        portions.append(Portion(gpu_uuid=gpu, account=unknown, energy_joules=joules[-1], interval_seconds=interval))
    return portions


def _same(before: Sequence[Slot], after: Sequence[Slot]) -> bool:
    """Return whether the same holders had the same parts."""
    held = [{(slot.key, slot.pod_uid, slot.share_ratio) for slot in slots if slot.pod} for slots in (before, after)]
    return held[0] == held[1]

"""Meters samples of a node into seconds and joules, each charged to one owner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from exporter.accounting.gpu_split import Divider, Division, Slot, across_gap
from exporter.model import UNALLOCATED, UNATTRIBUTED, Account, DeviceView, Field, Holder, Owner, Portion

MOST_WATTS = 10_000.0
"""Power above this is not a reading: several times any GPU's maximum. A blank 64-bit counter would be billed."""
COUNTER_STEP_SECONDS = 1.0
"""A counter may step by the energy of this time at once, however short the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """One GPU's energy over one interval; ``idle_joules`` is what it would have used without work."""

    joules: float
    idle_joules: float
    earlier_joules: float = 0.0
    """Part of ``joules`` from before the interval, when the counter could not be read."""

    def without_earlier(self) -> "Energy":
        """Return the energy of the interval itself."""
        own = self.joules - self.earlier_joules
        return Energy(joules=own, idle_joules=self.idle_joules * (own / self.joules))


@dataclass(slots=True, kw_only=True)
class EnergyMeter:
    """One physical GPU's energy: its counter's increase, otherwise power times time."""

    counter_millijoules: float | None = None
    """The driver's counter at its last reading; it restarts at 0 with the driver."""
    idle_watts: float | None = None
    """Lowest mean power over an interval so far: the power of the GPU without work."""
    uncounted_seconds: float = 0.0
    """Time between the last reading of the counter and the current interval, in seconds."""
    driver: int | None = None
    """Identity of the loaded driver at the end of the last interval; ``None`` if unknown."""

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
            values: Values of the GPU at the end of the interval.
            interval_seconds: Length of the interval, > 0.
            seen: False for a gap: then only a counter measures its energy, because power is a momentary value.
            telling: False if the interval is too short to measure idle power; counters step every 20-100 ms.
            driver: Identity of the loaded driver. Another driver's counter began at 0 at an unknown instant, so its
                increase is not measured, even if the counter is already higher.

        Returns:
            ``None`` if the energy was not measured or is impossible. If the counter is readable again after a while,
            all energy that it has counted since.
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
        """Store a driver's counter at the start of the first interval."""
        self.driver = driver
        self.counter_millijoules = values.get(Field.TOTAL_ENERGY_CONSUMPTION)

    def _joules(self, values: Mapping[Field, int | float], interval_seconds: float, *, seen: bool) -> float | None:
        counter, before = values.get(Field.TOTAL_ENERGY_CONSUMPTION), self.counter_millijoules
        if counter is not None and before is not None:
            self.counter_millijoules = counter
            # A decrease: the driver was loaded again, and its earlier count is lost.
            return (counter - before) / 1000 if counter >= before else None
        power = values.get(Field.POWER_USAGE) if seen else None
        if counter is not None or power is not None:
            self.counter_millijoules = counter  # when readable again, it must not count energy that power has measured
            self.uncounted_seconds = 0.0
        return None if power is None else max(0.0, power) * interval_seconds


def split_energy(energy: Energy, shares: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Divide a GPU's energy: the idle part by share, the rest by activity.

    Args:
        energy: Energy of the GPU.
        shares: Parts of the GPU; 0 for use without a holder.
        weights: Active parts of the GPU; if all are 0, everything is divided by share.

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
    parts[largest] += energy.joules - sum(parts)  # the rounding error, where no part becomes negative
    return parts


LATE_SECONDS = 60.0
"""A sample older than the last one by less than this is late; if by more, its clock has restarted."""
TELLING_INTERVALS = 0.5
"""A mean over less than this part of the sample interval does not measure the idle power."""


def stale_after_seconds(sample_interval_seconds: float) -> float:
    """Return the age from which a reading is no longer shown, and the length from which an interval is a gap."""
    return max(3 * sample_interval_seconds, 2.0)


@dataclass(slots=True, kw_only=True)
class _GpuMeter:
    """The instant up to which one physical GPU is metered, and its state then."""

    steady: float
    slots: tuple[Slot, ...]
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    counted: tuple[Slot, ...] = ()
    """Slots at the last reading of the energy counter."""


@dataclass(slots=True)
class Meter:
    """Integrates samples: every GPU-second between two samples is charged to one account, once.

    The holder of a part at the end of an interval is charged for it. An interval longer than three sample intervals
    (at least 2 s) is a gap: its use is unknown, and it is charged to the holders before and after.
    """

    sample_interval_seconds: float
    owner_of: Callable[[Holder], Owner]
    """Returns the owner of a holder; called for every sample, as metadata may arrive late."""
    _divider: Divider = field(init=False)
    _gpus: dict[str, _GpuMeter] = field(default_factory=dict)
    steady: float | None = None
    """Instant of the last sample, to be saved with ``slots``; ``None`` before the first."""

    def __post_init__(self) -> None:
        self._divider = Divider(self.owner_of)

    def add(self, views: Sequence[DeviceView], steady: float, driver: int | None = None) -> tuple[Portion, ...]:
        """Close the interval that ends with a sample.

        Args:
            views: Result of the sample: GPUs, and their MIG instances.
            steady: Its instant, in seconds of the monotonic clock. A sample that is not later than the last one closes
                no interval, and the next sample continues from the latest: no time is charged twice or backwards.
            driver: Identity of the loaded driver, with which energy counters restart; ``None``: unknown.

        Returns:
            Portions that, per GPU, sum to the time since that GPU's last sample; none for a new GPU.
        """
        portions: list[Portion] = []
        by_uuid = {view.gpu.uuid: view for view in views if view.instance is None}
        for division in self._divider.divide(views):
            board = by_uuid.get(division.gpu_uuid)
            values = board.values if board else {}
            slots = tuple(part.slot for part in division.parts)
            meter = self._gpus.get(division.gpu_uuid)
            if meter is None:
                meter = self._gpus[division.gpu_uuid] = _GpuMeter(steady=steady, slots=slots)
                meter.energy.begin(values, driver)
                meter.counted = slots
                continue
            interval = steady - meter.steady
            if -LATE_SECONDS < interval < 0:
                continue
            if interval > 0:
                seen = interval <= stale_after_seconds(self.sample_interval_seconds)
                telling = interval >= TELLING_INTERVALS * self.sample_interval_seconds
                energy = meter.energy.take(values, interval, seen=seen, telling=telling, driver=driver)
                of_interval = division if seen else across_gap(meter.slots, division)
                if energy and energy.earlier_joules and not _same(meter.counted, slots):
                    portions.append(_unattributed(division, energy.earlier_joules, interval))
                    energy = energy.without_earlier()
                portions += _portions(of_interval, interval, energy)
                if not meter.energy.uncounted_seconds:
                    meter.counted = slots
            meter.steady, meter.slots = steady, slots
        if self.steady is None or not -LATE_SECONDS < steady - self.steady < 0:
            self.steady = steady
        return tuple(portions)

    def slots(self) -> tuple[Slot, ...]:
        """Return the current slots of every GPU, for the saved state."""
        return tuple(
            replace(
                slot,
                energy_counter_millijoules=meter.energy.counter_millijoules,
                idle_watts=meter.energy.idle_watts,
            )
            for meter in self._gpus.values()
            for slot in meter.slots
        )

    def free_shares(self) -> dict[str, float]:
        """Return the part (0..1) of each physical GPU without a holder, by UUID, as of its last sample."""
        return {
            uuid: fsum(slot.share_ratio for slot in meter.slots if slot.account.owner == UNALLOCATED)
            for uuid, meter in self._gpus.items()
        }

    def instants(self) -> dict[str, float]:
        """Return the instant up to which each GPU is metered; an absent GPU may be far behind the last sample."""
        return {uuid: meter.steady for uuid, meter in self._gpus.items()}

    def uncounted(self) -> dict[str, float]:
        """Return the seconds since the energy counter was last read, for GPUs without a value."""
        found = {uuid: meter.energy.uncounted_seconds for uuid, meter in self._gpus.items()}
        return {uuid: seconds for uuid, seconds in found.items() if seconds > 0}

    def drivers(self) -> dict[str, int]:
        """Return the identity of the driver that last counted a GPU's energy, for GPUs with a known one."""
        return {uuid: meter.energy.driver for uuid, meter in self._gpus.items() if meter.energy.driver is not None}

    def resume(
        self,
        slots: Iterable[Slot],
        steady: float,
        instants: Mapping[str, float] | None = None,
        uncounted: Mapping[str, float] | None = None,
        drivers: Mapping[str, int] | None = None,
    ) -> None:
        """Continue as if the last sample had been at ``steady`` with these slots.

        The next sample then closes an interval or a gap. Only for the same boot: clocks of two boots do not compare.

        Args:
            slots: Result of ``slots``.
            steady: Instant of the last sample.
            instants: Result of ``instants``; a GPU that is not in it was metered up to the last sample.
            uncounted: Result of ``uncounted``. The holders at the reading of the counter are no longer known.
            drivers: Result of ``drivers``.
        """
        by_gpu: dict[str, list[Slot]] = {}
        for slot in slots:
            by_gpu.setdefault(slot.gpu_uuid, []).append(slot)
        for uuid, of_gpu in by_gpu.items():
            energy = EnergyMeter(
                counter_millijoules=of_gpu[0].energy_counter_millijoules,
                idle_watts=of_gpu[0].idle_watts,
                uncounted_seconds=uncounted.get(uuid, 0.0) if uncounted else 0.0,
                driver=drivers.get(uuid) if drivers else None,
            )
            since = instants.get(uuid, steady) if instants else steady
            counted = () if energy.uncounted_seconds else tuple(of_gpu)
            self._gpus[uuid] = _GpuMeter(steady=since, slots=tuple(of_gpu), energy=energy, counted=counted)
        self.steady = steady


def _portions(division: Division, interval: float, energy: Energy | None) -> list[Portion]:
    """Convert parts of a GPU into seconds and joules."""
    shares = [part.slot.share_ratio for part in division.parts]
    weights = [part.ratios.active for part in division.parts]
    foreign = energy is not None and division.foreign_ratio > 0
    if foreign:
        shares.append(0.0)
        weights.append(division.foreign_ratio)
    joules: Sequence[float | None] = split_energy(energy, shares, weights) if energy else [None] * len(shares)
    portions = [
        Portion(
            gpu_uuid=division.gpu_uuid,
            account=part.slot.account,
            pod=part.pod,
            seconds=part.ratios.scaled(interval),
            energy_joules=own,
            interval_seconds=interval,
            estimated=part.estimated,
            profile=part.profile,
        )
        for part, own in zip(division.parts, joules, strict=False)
    ]
    if foreign:
        portions.append(_unattributed(division, joules[-1], interval))
    return portions


def _unattributed(division: Division, joules: float | None, interval: float) -> Portion:
    """Return a portion that contains only energy without a known user."""
    account = Account(owner=UNATTRIBUTED, model=division.model, mode=division.mode)
    return Portion(gpu_uuid=division.gpu_uuid, account=account, energy_joules=joules, interval_seconds=interval)


def _same(before: Iterable[Slot], after: Iterable[Slot]) -> bool:
    """Return whether the same holders had the same parts."""
    return {(slot.key, slot.pod_uid, slot.share_ratio) for slot in before} == {
        (slot.key, slot.pod_uid, slot.share_ratio) for slot in after
    }

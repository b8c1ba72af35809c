"""Meters: from pictures of a node to seconds and joules, each of which has an owner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from exporter.accounting.division import Divider
from exporter.accounting.energy import Energy, EnergyMeter, split_energy
from exporter.accounting.slots import Division, Slot, across_gap
from exporter.model import UNALLOCATED, UNATTRIBUTED, Account, DeviceView, Holder, Owner, Portion

GAP_INTERVALS = 3
LEAST_GAP_SECONDS = 2.0
LATE_SECONDS = 60.0
"""A sample that is older than the last one by less than this has come late; by more, its clock has begun anew."""
TELLING_INTERVALS = 0.5
"""A mean over less than this part of the sample interval says nothing of the power when idle."""


@dataclass(slots=True, kw_only=True)
class _GpuMeter:
    """Where one physical GPU was metered to."""

    steady: float
    slots: tuple[Slot, ...]
    energy: EnergyMeter = field(default_factory=EnergyMeter)
    counted: tuple[Slot, ...] = ()
    """Who held it when the energy counter was last read."""


@dataclass(slots=True)
class Meter:
    """Integrates samples: every GPU-second between two of them goes to somebody, once.

    Whoever holds a part at the end of an interval is charged for it. An interval longer than three sample intervals
    (at least 2 s) was not seen: it is unknown, at whoever held before and after.
    """

    sample_interval_seconds: float
    owner_of: Callable[[Holder], Owner]
    """Who pays for a holder; asked for every sample, as metadata may come late."""
    _divider: Divider = field(init=False)
    _gpus: dict[str, _GpuMeter] = field(default_factory=dict)
    _steady: float | None = None

    def __post_init__(self) -> None:
        self._divider = Divider(self.owner_of)

    @property
    def steady(self) -> float | None:
        """Instant of the last sample, to be kept with ``slots``; ``None`` before the first."""
        return self._steady

    @property
    def gap_seconds(self) -> float:
        """An interval that is longer than this was not seen."""
        return max(GAP_INTERVALS * self.sample_interval_seconds, LEAST_GAP_SECONDS)

    def add(self, views: Sequence[DeviceView], steady: float, driver: int | None = None) -> tuple[Portion, ...]:
        """Close the interval that ends with a sample.

        Args:
            views: What was made of the sample: GPUs, and MIG instances beside their GPU.
            steady: Its instant, in seconds of a clock that nobody sets. One that is not later than the last sample's
                closes no interval, and what comes after it goes on from the latest: nothing is charged twice, nor
                backwards.
            driver: Identity of the loaded driver, with which energy counters begin again; ``None``: unknown.

        Returns:
            Portions that, per GPU, sum to the time since that GPU's last sample; none for one seen first.
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
                seen = interval <= self.gap_seconds
                telling = interval >= TELLING_INTERVALS * self.sample_interval_seconds
                energy = meter.energy.take(values, interval, seen=seen, telling=telling, driver=driver)
                of_interval = division if seen else across_gap(meter.slots, division)
                if energy and energy.earlier_joules and not _same(meter.counted, slots):
                    portions.append(_of_nobody(division, energy.earlier_joules, interval))
                    energy = energy.without_earlier()
                portions += _portions(of_interval, interval, energy)
                if not meter.energy.uncounted_seconds:
                    meter.counted = slots
            meter.steady, meter.slots = steady, slots
        if self._steady is None or not -LATE_SECONDS < steady - self._steady < 0:
            self._steady = steady
        return tuple(portions)

    def slots(self) -> tuple[Slot, ...]:
        """Return what is held now, all of every GPU, for the state that outlives this process."""
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
        """Return the part (0..1) of each physical GPU that nobody holds, by UUID, as of its last sample."""
        return {
            uuid: fsum(slot.share_ratio for slot in meter.slots if slot.account.owner == UNALLOCATED)
            for uuid, meter in self._gpus.items()
        }

    def instants(self) -> dict[str, float]:
        """Return up to when each GPU is metered; one that is away may be far behind the last sample."""
        return {uuid: meter.steady for uuid, meter in self._gpus.items()}

    def uncounted(self) -> dict[str, float]:
        """Return for how many seconds the energy counter of a GPU has not been read, of those that do not tell it."""
        found = {uuid: meter.energy.uncounted_seconds for uuid, meter in self._gpus.items()}
        return {uuid: seconds for uuid, seconds in found.items() if seconds > 0}

    def drivers(self) -> dict[str, int]:
        """Return the identity of the driver that counted a GPU's energy last, of those of which it is known."""
        return {uuid: meter.energy.driver for uuid, meter in self._gpus.items() if meter.energy.driver is not None}

    def resume(
        self,
        slots: Iterable[Slot],
        steady: float,
        instants: Mapping[str, float] | None = None,
        uncounted: Mapping[str, float] | None = None,
        drivers: Mapping[str, int] | None = None,
    ) -> None:
        """Go on as if the last sample had been at ``steady`` with these slots.

        The next sample then closes an interval or a gap. Only for the same boot: another boot's clock means nothing.

        Args:
            slots: As ``slots`` returned them.
            steady: Of the last sample.
            instants: As ``instants`` returned them; a GPU that is not in it was metered up to the last sample.
            uncounted: As ``uncounted`` returned them. Who held when the counter was read is not known any more.
            drivers: As ``drivers`` returned them.
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
        self._steady = steady


def _portions(division: Division, interval: float, energy: Energy | None) -> list[Portion]:
    """Turn parts of a GPU into seconds and joules."""
    shares = [part.slot.share_ratio for part in division.parts]
    weights = [part.active_ratio for part in division.parts]
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
            active_seconds=part.active_ratio * interval,
            idle_seconds=part.idle_ratio * interval,
            unknown_seconds=part.unknown_ratio * interval,
            energy_joules=own,
            interval_seconds=interval,
            estimated=part.estimated,
        )
        for part, own in zip(division.parts, joules, strict=False)
    ]
    if foreign:
        portions.append(_of_nobody(division, joules[-1], interval))
    return portions


def _of_nobody(division: Division, joules: float | None, interval: float) -> Portion:
    """Make a portion of energy alone, of which it is not known who used it."""
    account = Account(owner=UNATTRIBUTED, model=division.model, mode=division.mode)
    return Portion(gpu_uuid=division.gpu_uuid, account=account, energy_joules=joules, interval_seconds=interval)


def _same(before: Iterable[Slot], after: Iterable[Slot]) -> bool:
    """Tell whether the same held the same parts."""
    return {(slot.key, slot.pod_uid, slot.share_ratio) for slot in before} == {
        (slot.key, slot.pod_uid, slot.share_ratio) for slot in after
    }

"""Keeps counters from falling where one source's older figure follows the other's newer one."""

from dataclasses import dataclass, field, replace

from exporter.model import Field, GpuReading, Reading
from exporter.sources.dcgm_fields import COUNTERS

RISING = frozenset(one for one in Field if one in COUNTERS)
"""What only rises until the driver is loaded anew, and either source can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    value: float
    by_dcgm: bool
    at: float


@dataclass(slots=True, kw_only=True)
class Counters:
    """Remembers what was told last of each GPU's counters, and by whom.

    DCGM's figures are up to some intervals older than NVML's, what it measures slowly half a minute. A counter that
    falls is taken for one that has begun again from 0, by Prometheus and by whoever takes differences, so that all it
    ever counted would be counted once more.
    """

    patience_seconds: float
    """A counter that is still lower after this time has truly begun again."""
    _told: dict[tuple[str, Field], _Told] = field(default_factory=dict)

    def kept_from_falling(self, reading: Reading, at: float) -> Reading:
        """Return the reading without the counters that have changed source and are not yet where they were.

        Args:
            reading: With ``from_dcgm`` set.
            at: Its instant, in seconds of a clock that nobody sets.
        """
        gpus = tuple(self._without_fallen(gpu, at) for gpu in reading.gpus)
        changed = any(new is not old for new, old in zip(gpus, reading.gpus, strict=True))
        return replace(reading, gpus=gpus) if changed else reading

    def _without_fallen(self, gpu: GpuReading, at: float) -> GpuReading:
        fallen = set()
        for key in RISING & gpu.values.keys():
            value, by_dcgm = gpu.values[key], key in gpu.from_dcgm
            before = self._told.get((gpu.gpu.uuid, key))
            if (
                before is not None
                and before.by_dcgm is not by_dcgm
                and value < before.value
                and at - before.at <= self.patience_seconds
            ):
                fallen.add(key)
            else:
                self._told[gpu.gpu.uuid, key] = _Told(value=value, by_dcgm=by_dcgm, at=at)
        if not fallen:
            return gpu
        values = {key: value for key, value in gpu.values.items() if key not in fallen}
        return replace(gpu, values=values, from_dcgm=gpu.from_dcgm - fallen)

"""Joins what the driver sees with what the kubelet says, again only when one of the two has changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from exporter.attribution.join import attribute
from exporter.attribution.processes import PidResolver, PodNames
from exporter.model import (
    Allocations,
    AllocationState,
    Attribution,
    DeviceState,
    Gpu,
    GpuReading,
    MigInstance,
    Reading,
    Unresolved,
)

HARMLESS_REASONS = frozenset({"unknown_uuid", "unknown_minor", "unknown_instance", "dra_passed_through"})
"""Reasons why an id was not resolved that leave no doubt about the devices that *are* seen: it names another one."""


class Kubelet(Protocol):
    """What the kubelet said last: ``attribution.podresources.KubeletPoller``, or an answer asked for in a replay."""

    @property
    def latest(self) -> Allocations | None:
        """The last good answer, however old."""
        ...

    @property
    def problem(self) -> str:
        """One line on why there is no newer one; empty when all is well."""
        ...

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since start by reason."""
        ...


@dataclass(slots=True)
class Attributor:
    """Keeps the last join and the ways from a process to its pod.

    ``kubelet`` is ``None`` where attribution is switched off: then nothing is known of any holder.
    """

    kubelet: Kubelet | None
    pids: PidResolver
    names: PodNames
    expiry_seconds: float
    _first_joined: tuple[Allocations, float] | None = None
    _cached_for: tuple[Allocations, tuple[Gpu, ...], tuple[MigInstance, ...]] | None = None
    _cached: Attribution = field(default_factory=lambda: Attribution(known=False))

    def join(self, reading: Reading | None, now: float, steady: float) -> Attribution:
        """Return the holders of every device of ``reading``, or that they are not known.

        Args:
            reading: The newest one.
            now: Unix time.
            steady: Seconds of a clock that nobody sets: set back by hours, the other would keep an answer for hours.
        """
        allocations = self.kubelet.latest if self.kubelet else None
        if allocations is None:
            return Attribution(known=False)
        # A minor number may have passed to another GPU since one went missing: those that are there come first.
        there_first = sorted(reading.gpus, key=lambda gpu: gpu.state is DeviceState.MISSING) if reading else ()
        gpus = tuple(gpu.gpu for gpu in there_first)
        instances = tuple(part.instance for gpu in reading.gpus for part in gpu.instances) if reading else ()
        if self._first_joined is None or self._first_joined[0] is not allocations:
            self._first_joined = allocations, steady
        age = max(now - allocations.answered_at_seconds, steady - self._first_joined[1])
        expired = age > self.expiry_seconds
        previous = self._cached_for
        unchanged = (
            previous is not None
            and previous[0] is allocations
            and previous[1] == gpus
            and previous[2] == instances
            and self._cached.known is not expired
        )
        if not unchanged:
            self._cached = attribute(
                allocations=allocations,
                gpus=gpus,
                instances=instances,
                now=allocations.answered_at_seconds + age,
                expiry_seconds=self.expiry_seconds,
            )
            self._cached_for = (allocations, gpus, instances)
        return self._cached


def allocation_state(attribution: Attribution, uuid: str, gpu: GpuReading) -> AllocationState:
    """Tell the three apart; "unallocated" only where no unresolved id could stand for the device.

    Args:
        attribution: Holders of all devices.
        uuid: Of the device.
        gpu: The GPU that the device is or is part of.
    """
    if not attribution.known:
        return AllocationState.UNKNOWN
    if attribution.holders.get(uuid):
        return AllocationState.ALLOCATED
    doubtful = any(
        entry.reason not in HARMLESS_REASONS or _may_be_part_of(gpu, entry) for entry in attribution.unresolved
    )
    return AllocationState.UNKNOWN if doubtful else AllocationState.UNALLOCATED


def _may_be_part_of(gpu: GpuReading, entry: Unresolved) -> bool:
    """Tell whether an id may name a MIG instance of a GPU whose driver does not tell its instances (yet)."""
    if not gpu.gpu.mig_enabled or gpu.instances:
        return False
    return entry.reason == "unknown_instance" or (entry.reason == "unknown_uuid" and entry.device_id.startswith("MIG-"))

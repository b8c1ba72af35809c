"""What the agent remembers of its readings between ticks: the newest, every GPU ever seen, Xid counts."""

from collections import Counter
from dataclasses import dataclass, field, replace

from exporter.model import DeviceState, GpuReading, MigReading, Reading, XidEvent

MOST_XIDS = 64
"""Codes of one device that are told apart: more than it meets in its life, fewer than a source that lies makes up."""


@dataclass(slots=True)
class XidRecord:
    """Xid events of one device since the agent started."""

    counts: Counter[int] = field(default_factory=Counter)
    last_seen_seconds: dict[int, float] = field(default_factory=dict)
    last: int | None = None


@dataclass(slots=True)
class SourceRecord:
    """Everything kept of the readings."""

    newest: Reading | None = None
    """With every GPU that was ever seen: one that is gone is missing, not forgotten."""
    known: dict[str, GpuReading] = field(default_factory=dict)
    """The last reading of each GPU while it was up, by UUID."""
    xids: dict[tuple[str, int | None], XidRecord] = field(default_factory=dict)
    """By (GPU uuid, GPU-instance id or ``None`` for the whole GPU)."""
    made_anew: frozenset[tuple[str, int]] = frozenset()
    """GPU instances, as in ``xids``, that the newest reading shows in the place of others of the same id."""
    _instances: dict[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    """UUIDs of the compute instances that were told last in each GPU instance."""

    def add(self, reading: Reading) -> tuple[XidEvent, ...]:
        """Add one reading: counts add up, values replace.

        Returns:
            Its Xid events without those of codes beyond ``MOST_XIDS``, which would be a series each without end.
        """
        self.newest = replace(reading, gpus=self._with_all_known(reading.gpus))
        counted = tuple(event for event in reading.xids if self._count(event))
        # After the events, so that those of this very reading go with the former instance: it may have been destroyed
        # for them, while nobody can hold the new one before its device plugin has seen it, as we do now.
        self.made_anew = self._follow_instances(reading.gpus)
        for made_anew in self.made_anew:
            self.xids.pop(made_anew, None)
        return counted

    def _follow_instances(self, gpus: tuple[GpuReading, ...]) -> frozenset[tuple[str, int]]:
        """Return the GPU instances that are others than before: the driver gives the id of a destroyed one out again.

        One that is not told is not followed, as it need not be gone; nor is one of which a compute instance is left,
        for that is the same GPU instance.
        """
        told: dict[tuple[str, int], set[str]] = {}
        for gpu in gpus:
            if gpu.state is DeviceState.UP:
                for part in gpu.instances:
                    told.setdefault((gpu.gpu.uuid, part.instance.gpu_instance_id), set()).add(part.instance.uuid)
        before = {key: self._instances.get(key) for key in told}
        self._instances.update((key, frozenset(uuids)) for key, uuids in told.items())
        return frozenset(key for key, uuids in before.items() if uuids and uuids.isdisjoint(told[key]))

    def _count(self, event: XidEvent) -> bool:
        record = self.xids.setdefault((event.uuid, event.gpu_instance_id), XidRecord())
        if event.xid not in record.counts and len(record.counts) >= MOST_XIDS:
            return False
        record.counts[event.xid] += 1
        record.last_seen_seconds[event.xid] = event.at_seconds
        record.last = event.xid
        return True

    def _with_all_known(self, gpus: tuple[GpuReading, ...]) -> tuple[GpuReading, ...]:
        """Complete a reading by what it cannot say of GPUs that do not answer.

        A new child does not know a GPU that was lost before it started, and a lost GPU does not tell its MIG
        instances; their holders go on holding them all the same.
        """
        for gpu in gpus:
            if gpu.state is DeviceState.UP:
                self.known[gpu.gpu.uuid] = gpu
        completed = [self._with_instances(gpu) for gpu in gpus]
        here = {gpu.gpu.uuid for gpu in gpus}
        gone = [gpu for uuid, gpu in self.known.items() if uuid not in here]
        completed.extend(
            GpuReading(
                gpu=gpu.gpu,
                state=DeviceState.MISSING,
                reason="not_enumerated",
                instances=_identities(gpu.instances),
                lacks_instances=gpu.lacks_instances,
            )
            for gpu in gone
        )
        return tuple(sorted(completed, key=lambda reading: reading.gpu.index)) if gone else tuple(completed)

    def _with_instances(self, gpu: GpuReading) -> GpuReading:
        before = self.known.get(gpu.gpu.uuid)
        if gpu.state is DeviceState.UP or gpu.instances or before is None:
            return gpu
        return replace(gpu, instances=_identities(before.instances), lacks_instances=before.lacks_instances)


def _identities(instances: tuple[MigReading, ...]) -> tuple[MigReading, ...]:
    return tuple(MigReading(instance=part.instance) for part in instances)

"""Computes the shown values of each device from one reading and one attribution."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.accounting.activity import (
    ActivityJudge,
    DeviceLevel,
    Judgement,
    Observation,
    SampledUse,
    partitioned_activity,
    samples_cover,
    split_activity,
)
from exporter.accounting.idle import IdleClock
from exporter.agent.facts import Attributor, allocation_state, is_doubtful
from exporter.agent.history import XidRecord
from exporter.agent.owners import Owners
from exporter.attribution.inventory import PartOfGpu, instance_parts
from exporter.attribution.processes import Matched, hides_processes, match
from exporter.model import (
    Activity,
    ActivitySource,
    AllocationState,
    Attribution,
    DeviceState,
    DeviceView,
    Field,
    GpuReading,
    Holder,
    MigReading,
    PodUse,
    ProcessUse,
    Reading,
)

MEBIBYTE = 1 << 20
_DIGITS = 6
"""Decimal places of a holder's part of a value."""


def _of_its_share(holder: Holder, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the activity for the idle clock: full use of a quarter is busy, though it is 0.25 of the device."""
    if bounds is None:
        return None
    least, most = bounds
    return least / holder.device_share_ratio, most / holder.device_share_ratio


def _samples(matched: Matched, values: Mapping[Field, int | float], holder_count: int) -> list[SampledUse] | None:
    """Return the sampled use of the processes; ``None`` if it does not divide the device's activity."""
    if holder_count == 1 and not matched.unattributed:
        return None  # the only holder has all of it
    processes = [process for bucket in matched.buckets for process in bucket.processes]
    if matched.by_mps or not samples_cover(values, processes):
        return None
    return [
        SampledUse(
            holders=bucket.holders,
            ratio=sum(process.busiest_ratio or 0.0 for process in bucket.processes),
            known=bucket.known,
        )
        for bucket in matched.buckets
    ]


def _foreign(matched: Matched | None) -> tuple[ProcessUse, ...] | None:
    """Return the processes without a holder; ``None`` if there may be more of them than are known."""
    if matched is None or matched.hidden:
        return None
    unsure = any(not process.ended for bucket in matched.buckets if not bucket.known for process in bucket.processes)
    return None if unsure else matched.unattributed


def _memory(processes: Sequence[ProcessUse]) -> int | None:
    """Return the sum of memory in bytes; ``None`` if a process's memory is unknown. An ended process has none."""
    alive = [process.memory_used_bytes for process in processes if not process.ended]
    known = [memory for memory in alive if memory is not None]
    return sum(known) if len(known) == len(alive) else None


def _memories(holders: Sequence[Holder], matched: Matched | None, used_mib: float | None) -> dict[Holder, int | None]:
    """Return memory in bytes of every holder with processes; ``None`` if a holder may have more than is known.

    Args:
        holders: Holders of the device.
        matched: Its processes, ``None`` if the driver does not list them.
        used_mib: Memory in use on the device; a sole holder has all except that of processes without a holder.
    """
    if used_mib is not None:
        foreign = _memory(matched.unattributed) if matched else 0
        return dict.fromkeys(holders, None if foreign is None else max(0, int(used_mib) * MEBIBYTE - foreign))
    if matched is None or matched.hidden:
        return dict.fromkeys(holders)
    memories: dict[Holder, int | None] = {}
    for bucket in matched.buckets:
        memory = _memory(bucket.processes)
        if memory and (len(bucket.holders) > 1 or not bucket.known):
            memory = None
        for holder in bucket.holders:
            before = memories.get(holder, 0)
            memories[holder] = None if memory is None or before is None else before + memory
    return memories


def _drop_in_values(
    part: Activity | None, device: Judgement, values: Mapping[Field, int | float], memory_bytes: int | None
) -> dict[Field, int | float]:
    """Return the drop-in fields that exist per holder on a shared device: its part of the device's value."""
    drop_in: dict[Field, int | float] = {}
    if memory_bytes is not None:
        drop_in[Field.FB_USED] = memory_bytes // MEBIBYTE
    if part is None or device.activity is None or part.source is ActivitySource.ESTIMATED:
        return drop_in
    if not device.activity.ratio and values.get(Field.GPU_UTIL):
        return drop_in  # a previous sample's utilisation, without a ratio to divide it by
    fraction = part.ratio / device.activity.ratio if device.activity.ratio else 0.0
    for utilisation in (Field.GPU_UTIL, Field.PROF_GR_ENGINE_ACTIVE):
        if utilisation in values:
            drop_in[utilisation] = round(values[utilisation] * fraction, _DIGITS)
    return drop_in


XidRecords = Mapping[str, XidRecord]
NO_XIDS = XidRecord()


@dataclass(slots=True)
class Viewer:
    """Creates device views; keeps the clocks and the memory of contradictions between ticks."""

    attributor: Attributor
    clock: IdleClock
    judge: ActivityJudge = field(default_factory=ActivityJudge)
    process_list_reliable: bool = True
    owners: Owners = field(default_factory=Owners)
    _judged_at: float | None = None
    _judgements: dict[str, Judgement] = field(default_factory=dict)

    def views(self, reading: Reading, attribution: Attribution, xids: XidRecords, now: float) -> tuple[DeviceView, ...]:
        """Return one view per GPU, each followed by its MIG instances; ``now`` is of the monotonic clock."""
        views = tuple(view for gpu in reading.gpus for view in self._views_of_gpu(gpu, reading, attribution, xids, now))
        self._judged_at = reading.taken_at_seconds
        if attribution.known:
            self.clock.forget(use.holder.key for view in views for use in view.pods)
            self.owners.forget(
                ((holder.namespace, holder.pod) for held in attribution.holders.values() for holder in held), now
            )
        here = frozenset(view.uuid for view in views)
        self.judge.forget(here)
        for uuid in self._judgements.keys() - here:  # MIG instances get new UUIDs with every reconfiguration
            del self._judgements[uuid]
        return views

    def _views_of_gpu(
        self, gpu: GpuReading, reading: Reading, attribution: Attribution, xids: XidRecords, now: float
    ) -> Iterator[DeviceView]:
        new = self._judged_at != reading.taken_at_seconds
        parts = [(part, self._judge(gpu, part, reading, new=new)) for part in gpu.instances]
        own = self._judge(gpu, None, reading, new=new)
        shares: Mapping[str, PartOfGpu] = {}
        if parts or gpu.lacks_instances:
            judged = [(part.instance.compute_slices, judgement) for part, judgement in parts]
            own = partitioned_activity(
                gpu.gpu, own, judged, idle_below=self.clock.threshold_ratio, lacks_some=gpu.lacks_instances
            )
            shares = instance_parts(gpu.gpu, [part.instance for part in gpu.instances])
        yield self._view(gpu, None, own, attribution, xids, now)
        for part, judgement in parts:
            yield self._view(gpu, part, judgement, attribution, xids, now, shares[part.instance.uuid].ratio)

    def _judge(self, gpu: GpuReading, part: MigReading | None, reading: Reading, *, new: bool) -> Judgement:
        """Determine the activity of a GPU or one of its instances, once per reading."""
        if gpu.state is not DeviceState.UP:
            return Judgement(activity=None, reason="device_down")
        uuid = part.instance.uuid if part else gpu.gpu.uuid
        if new or uuid not in self._judgements:
            listed = _own_processes(gpu, part)
            sample = Observation(
                uuid=uuid,
                at_seconds=reading.instant,
                values=part.values if part else gpu.values,
                level=_level(gpu, part),
                model=gpu.gpu.model,
                from_dcgm=part.from_dcgm if part else gpu.from_dcgm,
                process_count=len(listed) if listed is not None and self.process_list_reliable else None,
                draws=None if listed is None else any(process.graphics for process in listed),
                parent_values=gpu.values if part else {},
            )
            self._judgements[uuid] = self.judge.judge(sample, idle_below=self.clock.threshold_ratio)
        return self._judgements[uuid]

    def _view(
        self,
        gpu: GpuReading,
        part: MigReading | None,
        judgement: Judgement,
        attribution: Attribution,
        xids: XidRecords,
        now: float,
        share_ratio: float = 1.0,
    ) -> DeviceView:
        uuid = part.instance.uuid if part else gpu.gpu.uuid
        values = part.values if part else gpu.values
        holders = attribution.holders.get(uuid, ())
        pods, rest_ratio, foreign = self._use(holders, judgement, values, _own_processes(gpu, part), now)
        partitioned = part is None and bool(gpu.instances) and not holders
        allocation = allocation_state(attribution, uuid, gpu)
        # If the holders are unknown, any running process may be theirs.
        known = allocation is not AllocationState.UNKNOWN
        record = xids.get(uuid, NO_XIDS)
        return DeviceView(
            gpu=gpu.gpu,
            instance=part.instance if part else None,
            share_ratio=share_ratio,
            state=gpu.state,
            reason=gpu.reason,
            values=values,
            activity=judgement.activity,
            activity_unknown_reason=judgement.reason,
            allocation=None if partitioned else allocation,
            pods=pods,
            rest_is_free=not is_doubtful(attribution, uuid, gpu),
            lacks_instances=part is None and gpu.lacks_instances,
            unattributed_activity_ratio=rest_ratio if known and not partitioned else None,
            unattributed_memory_bytes=None if foreign is None or not known else _memory(foreign),
            unattributed_processes=None if foreign is None or not known else sum(not one.ended for one in foreign),
            profiling=gpu.profiling,
            xids=dict(record.counts),
            xid_last_seen_seconds=dict(record.last_seen_seconds),
            last_xid=record.last,
        )

    def _use(
        self,
        holders: Sequence[Holder],
        judgement: Judgement,
        values: Mapping[Field, int | float],
        processes: tuple[ProcessUse, ...] | None,
        now: float,
    ) -> tuple[tuple[PodUse, ...], float | None, tuple[ProcessUse, ...] | None]:
        """Divide a device among its holders, which are in a stable order.

        Returns:
            The use of each holder, the activity without a holder, and the processes without one, if they are known.
        """
        matched: Matched | None = None
        if processes is not None and self.process_list_reliable:
            known = self.attributor
            hidden = hides_processes(processes, values)
            matched = match(
                holders, processes, known.pids.pod_uid, known.names.name_of, known.command_of, hidden=hidden
            )
        sole = len(holders) == 1 and holders[0].device_share_ratio >= 1
        device = judgement.activity
        if device is not None and device.profile is not None and not sole:
            device = replace(device, profile=None)  # its resources cannot be divided among holders
        split = split_activity(device, holders, _samples(matched, values, len(holders)) if matched else None)
        memories = _memories(holders, matched, values.get(Field.FB_USED) if sole else None)
        pods: list[PodUse] = []
        for holder, part, bounds in zip(holders, split.parts, split.bounds, strict=True):
            pod_uid = holder.pod_uid or self.attributor.names.uid_of(holder.namespace, holder.pod)
            standing = self.clock.observe(holder.key, now, _of_its_share(holder, bounds), pod_uid)
            memory = memories.get(holder, 0)
            use = PodUse(
                holder=holder,
                age_seconds=standing.age_seconds,
                activity=part,
                idle_for_seconds=standing.idle_for_seconds,
                memory_used_bytes=memory,
                values={} if sole or matched is None else _drop_in_values(part, judgement, values, memory),
                facts=self.owners.facts(holder),
            )
            pods.append(use)
        return tuple(pods), split.remainder_ratio, _foreign(matched)


def _level(gpu: GpuReading, part: MigReading | None) -> DeviceLevel:
    if part is not None:
        return DeviceLevel.INSTANCE
    return DeviceLevel.PARTITIONED_GPU if gpu.gpu.mig_enabled or gpu.instances else DeviceLevel.GPU


def _own_processes(gpu: GpuReading, part: MigReading | None) -> tuple[ProcessUse, ...] | None:
    if part is not None:
        return part.processes
    return None if gpu.instances else gpu.processes


def darkened(reading: Reading, reason: str) -> Reading:
    """Return a reading that is too old to be shown: identities stay, every value is removed.

    A driver that does not answer for a GPU is a fact about the GPU. A host engine that does not answer is not.
    """
    down = DeviceState.UNKNOWN if reading.source == "dcgm" else DeviceState.FAILED
    gpus = (
        gpu.without_values(down if gpu.state is DeviceState.UP else gpu.state, gpu.reason or reason)
        for gpu in reading.gpus
    )
    return replace(reading, dcgm_version=None, gpus=tuple(gpus))

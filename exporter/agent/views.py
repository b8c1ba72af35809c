"""Computes the shown values of each device from one reading and one attribution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.accounting import activity
from exporter.accounting.idle import IdleClock
from exporter.agent.history import XidRecord
from exporter.agent.owners import Owners
from exporter.attribution.inventory import parts_of
from exporter.attribution.processes import Matched, ProcessLookup, hides_processes, match
from exporter.model.attribution import AllocationState, Attribution, Holder
from exporter.model.devices import DeviceReading, DeviceState, GpuReading, MigReading, ProcessUse, Reading
from exporter.model.fields import Field
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse

MEBIBYTE = 1 << 20
_DIGITS = 6
"""Decimals of a holder's part of a value."""


def _of_its_share(holder: Holder, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return bounds of activity for the idle clock, as parts of the holder's share instead of the device."""
    if bounds is None:
        return None
    least, most = bounds
    return least / holder.device_share_ratio, most / holder.device_share_ratio


def _samples(matched: Matched, values: Mapping[Field, int | float], holders: int) -> list[activity.SampledUse] | None:
    """Return the sampled use of the processes; ``None`` if it cannot divide the activity of the device."""
    if holders == 1 and not matched.unattributed:
        return None  # the only holder has all activity
    processes = [process for bucket in matched.buckets for process in bucket.processes]
    if matched.by_mps or not activity.samples_cover(values, processes):
        return None
    return [
        activity.SampledUse(
            holders=bucket.holders,
            ratio=sum(process.busiest_ratio or 0.0 for process in bucket.processes),
            known=bucket.known,
        )
        for bucket in matched.buckets
    ]


def _foreign(matched: Matched | None) -> tuple[ProcessUse, ...] | None:
    """Return the processes without a holder; ``None`` if there may be unknown ones."""
    if matched is None or matched.hidden:
        return None
    unsure = any(not process.ended for bucket in matched.buckets if not bucket.known for process in bucket.processes)
    return None if unsure else matched.unattributed


def _memory(processes: Sequence[ProcessUse]) -> int | None:
    """Return the sum of memory in bytes; ``None`` if the memory of a process is unknown. Ended processes have none."""
    alive = [process.memory_used_bytes for process in processes if not process.ended]
    known = [memory for memory in alive if memory is not None]
    return sum(known) if len(known) == len(alive) else None


def _memories(holders: Sequence[Holder], matched: Matched | None, used_mib: float | None) -> dict[Holder, int | None]:
    """Return the memory in bytes of every holder with processes; ``None`` for a holder that may have more.

    Args:
        holders: Holders of the device.
        matched: Its processes, ``None`` if the driver does not list them.
        used_mib: Memory in use on the device of a sole holder, who has all but that of processes without a holder.
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
    part: Activity | None, device: activity.Judgement, values: Mapping[Field, int | float], memory_bytes: int | None
) -> dict[Field, int | float]:
    """Return the drop-in fields of a holder of a shared device, as its parts of the values of the device."""
    drop_in: dict[Field, int | float] = {}
    if memory_bytes is not None:
        drop_in[Field.FB_USED] = memory_bytes // MEBIBYTE
    if part is None or device.activity is None or part.source is ActivitySource.ESTIMATED:
        return drop_in
    if not device.activity.ratio and values.get(Field.GPU_UTIL):
        return drop_in  # the utilisation is of the previous sample, and no ratio divides it
    fraction = part.ratio / device.activity.ratio if device.activity.ratio else 0.0
    for utilisation in (Field.GPU_UTIL, Field.PROF_GR_ENGINE_ACTIVE):
        if utilisation in values:
            drop_in[utilisation] = round(values[utilisation] * fraction, _DIGITS)
    return drop_in


NO_XIDS = XidRecord()
_DOWN = activity.Judgement(activity=None, reason="device_down")


@dataclass(slots=True, kw_only=True)
class Viewer:
    """Creates device views; keeps idle clocks and the state of activity between ticks."""

    lookup: ProcessLookup
    """Finds the holders of processes."""
    clock: IdleClock
    judge: activity.ActivityJudge = field(default_factory=activity.ActivityJudge)
    process_list_reliable: bool = True
    owners: Owners = field(default_factory=Owners)
    _judged_at: float | None = None
    _judgements: dict[str, activity.Judgement] = field(default_factory=dict)
    """Activity by UUID of each device that was up in the reading of ``_judged_at``."""

    def views(
        self, reading: Reading, attribution: Attribution, xids: Mapping[str, XidRecord], now: float
    ) -> tuple[DeviceView, ...]:
        """Return one view per GPU, each followed by its MIG instances; ``now`` is of the monotonic clock."""
        down = (gpu for gpu in reading.gpus if gpu.state is not DeviceState.UP)
        self.judge.interrupt(device.uuid for gpu in down for device in gpu.with_instances)
        if self._judged_at != reading.taken_at_seconds:
            self._judged_at, self._judgements = reading.taken_at_seconds, self._judged(reading)
        views: list[DeviceView] = []
        for gpu in reading.gpus:
            shares = parts_of(gpu)
            for device in gpu.with_instances:
                record = xids.get(device.uuid, NO_XIDS)
                views.append(self._view(gpu, device, shares[device.uuid].ratio, attribution, record, now))
        if attribution.known:
            self.clock.forget(use.holder.key for view in views for use in view.pods)
            self.owners.forget(
                ((holder.namespace, holder.pod) for held in attribution.holders.values() for holder in held), now
            )
        return tuple(views)

    def _judged(self, reading: Reading) -> dict[str, activity.Judgement]:
        """Determine the activity of each device that is up; once per reading."""
        judged: dict[str, activity.Judgement] = {}
        for gpu in reading.gpus:
            if gpu.state is not DeviceState.UP:
                continue
            for device in gpu.with_instances:
                judged[device.uuid] = self._judgement(gpu, device, reading.instant)
            if gpu.instances or gpu.lacks_instances:
                judged[gpu.uuid] = activity.partitioned_activity(
                    gpu.gpu,
                    judged[gpu.uuid],
                    [(part.instance.compute_slices, judged[part.uuid]) for part in gpu.instances],
                    idle_below=self.clock.threshold_ratio,
                    lacks_some=gpu.lacks_instances,
                )
        self.judge.forget(frozenset(device.uuid for gpu in reading.gpus for device in gpu.with_instances))
        return judged

    def _judgement(self, gpu: GpuReading, device: DeviceReading, at: float) -> activity.Judgement:
        processes = _own_processes(gpu, device)
        sample = activity.Observation(
            uuid=device.uuid,
            at_seconds=at,
            values=device.values,
            level=_level(gpu, device),
            model=gpu.gpu.model,
            from_dcgm=device.from_dcgm,
            process_count=len(processes) if processes is not None and self.process_list_reliable else None,
            draws=None if processes is None else any(process.graphics for process in processes),
            parent_values={} if device is gpu else gpu.values,
        )
        return self.judge.judge(sample, idle_below=self.clock.threshold_ratio)

    def _view(
        self,
        gpu: GpuReading,
        device: DeviceReading,
        share_ratio: float,
        attribution: Attribution,
        xids: XidRecord,
        now: float,
    ) -> DeviceView:
        is_up = gpu.state is DeviceState.UP
        judgement = self._judgements.get(device.uuid, _DOWN) if is_up else _DOWN
        holders = attribution.holders.get(device.uuid, ())
        pods, rest_ratio, foreign = self._use(holders, judgement, device.values, _own_processes(gpu, device), now)
        partitioned = device is gpu and bool(gpu.instances) and not holders
        allocation = attribution.allocation(device.uuid)
        # If the holders are unknown, any running process may belong to them.
        known = allocation is not AllocationState.UNKNOWN
        foreign = foreign if known else None
        return DeviceView(
            gpu=gpu.gpu,
            instance=device.instance if isinstance(device, MigReading) else None,
            share_ratio=share_ratio,
            state=gpu.state,
            reason=gpu.reason,
            values=device.values,
            activity=judgement.activity,
            activity_unknown_reason=judgement.reason,
            allocation=None if partitioned else allocation,
            pods=pods,
            rest_is_free=not attribution.is_doubtful(device.uuid),
            lacks_instances=device is gpu and gpu.lacks_instances,
            unattributed_activity_ratio=rest_ratio if known and not partitioned else None,
            unattributed_memory_bytes=None if foreign is None else _memory(foreign),
            unattributed_processes=None if foreign is None else sum(not one.ended for one in foreign),
            profiling=gpu.profiling,
            xids=dict(xids.counts),
            xid_last_seen_seconds=dict(xids.last_seen_seconds),
            last_xid=xids.last,
        )

    def _use(
        self,
        holders: Sequence[Holder],
        judgement: activity.Judgement,
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
            matched = match(holders, processes, self.lookup, hidden=hides_processes(processes, values))
        sole = len(holders) == 1 and holders[0].device_share_ratio >= 1
        device = judgement.activity
        if device is not None and device.profile is not None and not sole:
            device = replace(device, profile=None)  # its resources cannot be divided among holders
        split = activity.split_activity(device, holders, _samples(matched, values, len(holders)) if matched else None)
        memories = _memories(holders, matched, values.get(Field.FB_USED) if sole else None)
        pods: list[PodUse] = []
        for holder, part, bounds in zip(holders, split.parts, split.bounds, strict=True):
            pod_uid = holder.pod_uid or self.lookup.uid_of(holder.namespace, holder.pod)
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


def _level(gpu: GpuReading, device: DeviceReading) -> activity.DeviceLevel:
    if device is not gpu:
        return activity.DeviceLevel.INSTANCE
    return activity.DeviceLevel.PARTITIONED_GPU if gpu.gpu.mig_enabled or gpu.instances else activity.DeviceLevel.GPU


def _own_processes(gpu: GpuReading, device: DeviceReading) -> tuple[ProcessUse, ...] | None:
    return None if device is gpu and gpu.instances else device.processes


def darkened(reading: Reading, reason: str) -> Reading:
    """Return a reading that is too old without its values; identities stay.

    If a driver does not answer, its GPUs are down. If a host engine does not answer, the state of its GPUs is unknown.
    """
    down = DeviceState.UNKNOWN if reading.source == "dcgm" else DeviceState.FAILED
    gpus = (
        gpu.without_values(down if gpu.state is DeviceState.UP else gpu.state, gpu.reason or reason)
        for gpu in reading.gpus
    )
    return replace(reading, dcgm_version=None, gpus=tuple(gpus))

"""Turns one reading and one attribution into what is shown of each device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from exporter.accounting.activity import ActivityJudge, Judgement, Level, Observation, partitioned_activity
from exporter.accounting.idle import IdleClock
from exporter.agent.attributor import Attributor, allocation_state, is_doubtful
from exporter.agent.owners import Owners
from exporter.agent.record import XidRecord
from exporter.agent.uses import DeviceUse, PodKnowledge, divide
from exporter.attribution.inventory import PartOfGpu, instance_parts
from exporter.attribution.processes import Matched, hides_processes, match
from exporter.model import (
    AllocationState,
    Attribution,
    DeviceState,
    DeviceView,
    Field,
    GpuReading,
    Holder,
    MigReading,
    ProcessUse,
    Reading,
)

XidRecords = Mapping[str, XidRecord]
NO_XIDS = XidRecord()


@dataclass(slots=True)
class Viewer:
    """Makes device views; keeps the clocks and the memory of contradictions that go from tick to tick."""

    attributor: Attributor
    clock: IdleClock
    judge: ActivityJudge = field(default_factory=ActivityJudge)
    process_list_reliable: bool = True
    owners: Owners = field(default_factory=Owners)
    _judged_at: float | None = None
    _judgements: dict[str, Judgement] = field(default_factory=dict)

    def views(self, reading: Reading, attribution: Attribution, xids: XidRecords, now: float) -> tuple[DeviceView, ...]:
        """Return one view per GPU and one per MIG instance behind its GPU; ``now`` is of a clock that nobody sets."""
        views = tuple(view for gpu in reading.gpus for view in self._views_of_gpu(gpu, reading, attribution, xids, now))
        self._judged_at = reading.taken_at_seconds
        if attribution.known:
            self.clock.forget(
                (view.uuid, pod.holder.namespace, pod.holder.pod, pod.holder.container)
                for view in views
                for pod in view.pods
            )
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
            view = self._view(gpu, part, judgement, attribution, xids, now)
            yield replace(view, share_ratio=shares[part.instance.uuid].ratio)

    def _judge(self, gpu: GpuReading, part: MigReading | None, reading: Reading, *, new: bool) -> Judgement:
        """Judge a GPU or one of its instances, once per reading."""
        if gpu.state is not DeviceState.UP:
            return Judgement(activity=None, reason="device_down")
        uuid = part.instance.uuid if part else gpu.gpu.uuid
        if new or uuid not in self._judgements:
            processes = _own_processes(gpu, part) if self.process_list_reliable else None
            sample = Observation(
                uuid=uuid,
                at_seconds=reading.taken_at_seconds if reading.steady_seconds is None else reading.steady_seconds,
                values=part.values if part else gpu.values,
                level=_level(gpu, part),
                model=gpu.gpu.model,
                from_dcgm=part.from_dcgm if part else gpu.from_dcgm,
                process_count=None if processes is None else len(processes),
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
    ) -> DeviceView:
        uuid = part.instance.uuid if part else gpu.gpu.uuid
        values = part.values if part else gpu.values
        holders = attribution.holders.get(uuid, ())
        use = self._use(uuid, holders, judgement, values, _own_processes(gpu, part), now)
        partitioned = part is None and bool(gpu.instances) and not holders
        allocation = allocation_state(attribution, uuid, gpu)
        # Where holders are not known, whatever runs may be theirs.
        told = allocation is not AllocationState.UNKNOWN
        record = xids.get(uuid, NO_XIDS)
        return DeviceView(
            gpu=gpu.gpu,
            instance=part.instance if part else None,
            state=gpu.state,
            reason=gpu.reason,
            values=values,
            activity=judgement.activity,
            activity_unknown_reason=judgement.reason,
            allocation=None if partitioned else allocation,
            pods=use.pods,
            rest_is_free=not attribution.unresolved or not is_doubtful(attribution, uuid, gpu),
            lacks_instances=part is None and gpu.lacks_instances,
            unattributed_activity_ratio=use.unattributed_activity_ratio if told and not partitioned else None,
            unattributed_memory_bytes=use.unattributed_memory_bytes if told else None,
            unattributed_processes=use.unattributed_processes if told else None,
            profiling=gpu.profiling,
            xids=dict(record.counts),
            xid_last_seen_seconds=dict(record.last_seen_seconds),
            last_xid=record.last,
        )

    def _use(
        self,
        uuid: str,
        holders: tuple[Holder, ...],
        judgement: Judgement,
        values: Mapping[Field, int | float],
        processes: tuple[ProcessUse, ...] | None,
        now: float,
    ) -> DeviceUse:
        matched: Matched | None = None
        if processes is not None and self.process_list_reliable:
            known = self.attributor
            hidden = hides_processes(processes, values)
            matched = match(
                holders, processes, known.pids.pod_uid, known.names.name_of, known.command_of, hidden=hidden
            )
        return divide(
            uuid=uuid,
            holders=holders,
            judgement=judgement,
            values=values,
            matched=matched,
            clock=self.clock,
            known=PodKnowledge(uid_of=self.attributor.names.uid_of, facts_of=self.owners.facts),
            now=now,
        )


def _level(gpu: GpuReading, part: MigReading | None) -> Level:
    if part is not None:
        return Level.INSTANCE
    return Level.PARTITIONED_GPU if gpu.gpu.mig_enabled or gpu.instances else Level.GPU


def _own_processes(gpu: GpuReading, part: MigReading | None) -> tuple[ProcessUse, ...] | None:
    if part is not None:
        return part.processes
    return None if gpu.instances else gpu.processes


def darkened(reading: Reading, reason: str) -> Reading:
    """Return a reading that is too old to be shown: identities stay, every value is gone.

    A driver that does not answer for a GPU is a fact about it. A host engine that does not is none.
    """
    down = DeviceState.UNKNOWN if reading.source == "dcgm" else DeviceState.FAILED
    return replace(
        reading,
        gpus=tuple(
            GpuReading(
                gpu=gpu.gpu,
                state=down if gpu.state is DeviceState.UP else gpu.state,
                reason=gpu.reason or reason,
                instances=tuple(MigReading(instance=part.instance) for part in gpu.instances),
                lacks_instances=gpu.lacks_instances,
            )
            for gpu in reading.gpus
        ),
    )

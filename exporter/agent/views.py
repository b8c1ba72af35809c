"""Turns one reading and one attribution into what is shown of each device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from exporter.accounting.activity import ActivityJudge, Judgement, partitioned_activity
from exporter.accounting.idle import IdleClock
from exporter.agent.attributor import Attributor, allocation_state, is_doubtful
from exporter.agent.owners import Owners
from exporter.agent.record import XidRecord
from exporter.agent.uses import DeviceUse, PodKnowledge, divide, visible_processes
from exporter.attribution.inventory import PartOfGpu, instance_parts
from exporter.attribution.processes import Matched, match
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

XidRecords = Mapping[tuple[str, int | None], XidRecord]
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
        parts = [(part, self._judge_instance(part, gpu, new=new)) for part in gpu.instances]
        own = self._judge_gpu(gpu, new=new)
        shares: Mapping[str, PartOfGpu] = {}
        if parts:
            judged = [(part.instance.compute_slices, judgement) for part, judgement in parts]
            own = partitioned_activity(gpu.gpu, own, judged, lacks_some=gpu.lacks_instances)
            shares = instance_parts(gpu.gpu, [part.instance for part in gpu.instances])
        yield self._view(gpu, None, own, attribution, xids, now)
        for part, judgement in parts:
            view = self._view(gpu, part, judgement, attribution, xids, now)
            yield replace(view, share_ratio=shares[part.instance.uuid].ratio)

    def _judge_gpu(self, gpu: GpuReading, *, new: bool) -> Judgement:
        if gpu.state is not DeviceState.UP:
            return Judgement(activity=None, reason="device_down")
        if new or gpu.gpu.uuid not in self._judgements:
            processes = gpu.processes
            self._judgements[gpu.gpu.uuid] = self.judge.judge(
                gpu.gpu.uuid,
                gpu.values,
                from_dcgm=gpu.from_dcgm,
                process_count=None if processes is None or gpu.instances else len(processes),
                process_list_reliable=self.process_list_reliable,
            )
        return self._judgements[gpu.gpu.uuid]

    def _judge_instance(self, part: MigReading, gpu: GpuReading, *, new: bool) -> Judgement:
        if gpu.state is not DeviceState.UP:
            return Judgement(activity=None, reason="device_down")
        uuid = part.instance.uuid
        if new or uuid not in self._judgements:
            self._judgements[uuid] = self.judge.judge(uuid, part.values, from_dcgm=part.from_dcgm)
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
        record = xids.get((gpu.gpu.uuid, part.instance.gpu_instance_id if part else None), NO_XIDS)
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
            rest_is_free=not attribution.unresolved or not is_doubtful(attribution, gpu),
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
        processes = visible_processes(processes, values) if self.process_list_reliable else None
        matched: Matched | None = None
        if processes is not None:
            known = self.attributor
            matched = match(holders, processes, known.pids.pod_uid, known.names.name_of, known.command_of)
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


def _own_processes(gpu: GpuReading, part: MigReading | None) -> tuple[ProcessUse, ...] | None:
    if part is not None:
        return part.processes
    return None if gpu.instances else gpu.processes


def darkened(reading: Reading, reason: str) -> Reading:
    """Return a reading that is too old to be shown: identities stay, every value is gone."""
    return replace(
        reading,
        gpus=tuple(
            GpuReading(
                gpu=gpu.gpu,
                state=DeviceState.FAILED if gpu.state is DeviceState.UP else gpu.state,
                reason=gpu.reason or reason,
                instances=tuple(MigReading(instance=part.instance) for part in gpu.instances),
                lacks_instances=gpu.lacks_instances,
            )
            for gpu in reading.gpus
        ),
    )

"""Who uses how much of one device: holders, their processes, and what belongs to nobody listed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exporter.accounting.activity import Judgement, SampledUse, samples_cover, split_activity
from exporter.accounting.idle import HolderKey, IdleClock
from exporter.attribution.processes import Matched
from exporter.model import Activity, ActivitySource, Field, Holder, PodFacts, PodUse, ProcessUse

MEBIBYTE = 1 << 20
_DIGITS = 6
"""Decimal places of a holder's part of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodKnowledge:
    """Ways to look up pods."""

    uid_of: Callable[[str, str], str | None]
    """UID by namespace and name, ``None`` where it is not known: another pod under the same name starts anew."""
    facts_of: Callable[[Holder], PodFacts | None]
    """Whose a holder's pod is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One device's use, divided."""

    pods: tuple[PodUse, ...]
    unattributed_activity_ratio: float | None
    unattributed_memory_bytes: int | None
    unattributed_processes: int | None


def divide(
    *,
    uuid: str,
    holders: Sequence[Holder],
    judgement: Judgement,
    values: Mapping[Field, int | float],
    matched: Matched | None,
    clock: IdleClock,
    known: PodKnowledge,
    now: float,
) -> DeviceUse:
    """Divide a device among its holders.

    Args:
        uuid: Of the device (GPU or MIG instance).
        holders: Its holders, in a stable order.
        judgement: The device's activity.
        values: The device's values.
        matched: Its processes by holder, ``None`` where the driver lists none.
        clock: Remembers ages and idleness.
        known: Looks up pods.
        now: Monotonic clock, in seconds.
    """
    split = split_activity(judgement.activity, holders, _samples(matched, values) if matched else None)
    sole = len(holders) == 1 and holders[0].device_share_ratio >= 1
    memories = _memories(holders, matched, values.get(Field.FB_USED) if sole else None)
    pods: list[PodUse] = []
    for holder, part, bounds in zip(holders, split.parts, split.bounds, strict=True):
        pod_uid = holder.pod_uid or known.uid_of(holder.namespace, holder.pod)
        standing = clock.observe(_key(uuid, holder), now, _of_its_share(holder, bounds), pod_uid)
        memory = memories.get(holder, 0)
        use = PodUse(
            holder=holder,
            age_seconds=standing.age_seconds,
            activity=part,
            idle_for_seconds=standing.idle_for_seconds,
            memory_used_bytes=memory,
            values={} if sole or matched is None else _drop_in_values(part, judgement, values, memory),
            facts=known.facts_of(holder),
        )
        pods.append(use)
    foreign = _foreign(matched)
    return DeviceUse(
        pods=tuple(pods),
        unattributed_activity_ratio=split.remainder_ratio,
        unattributed_memory_bytes=None if foreign is None else _memory(foreign),
        unattributed_processes=None if foreign is None else sum(not process.ended for process in foreign),
    )


def _key(uuid: str, holder: Holder) -> HolderKey:
    return uuid, holder.namespace, holder.pod, holder.container


def _of_its_share(holder: Holder, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the activity by which idleness is judged: all of a quarter is busy, though it is 0.25 of the device."""
    if bounds is None:
        return None
    least, most = bounds
    return least / holder.device_share_ratio, most / holder.device_share_ratio


def _samples(matched: Matched, values: Mapping[Field, int | float]) -> list[SampledUse] | None:
    """Return what the processes were sampled to use; ``None`` where that does not divide the device's activity."""
    processes = (process for bucket in matched.buckets for process in bucket.processes)
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
    """Return the processes of no holder; ``None`` where there may be more of them than are known."""
    if matched is None or matched.hidden:
        return None
    unsure = any(not process.ended for bucket in matched.buckets if not bucket.known for process in bucket.processes)
    return None if unsure else matched.unattributed


def _memory(processes: Sequence[ProcessUse]) -> int | None:
    """Sum of memory in bytes; ``None`` as soon as one process's is not known. One that ended has none."""
    alive = [process.memory_used_bytes for process in processes if not process.ended]
    known = [memory for memory in alive if memory is not None]
    return sum(known) if len(known) == len(alive) else None


def _memories(holders: Sequence[Holder], matched: Matched | None, used_mib: float | None) -> dict[Holder, int | None]:
    """Return memory in bytes of every holder with processes; ``None`` where one may have more than is known.

    Args:
        holders: Holders of the device.
        matched: Its processes, ``None`` where the driver lists none.
        used_mib: Memory in use on the device, where a sole holder has all but what is of no holder.
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
    """Fields of the drop-in family that are truly per holder on a shared device: its part of the device's value."""
    drop_in: dict[Field, int | float] = {}
    if memory_bytes is not None:
        drop_in[Field.FB_USED] = memory_bytes // MEBIBYTE
    if part is None or device.activity is None or part.source is ActivitySource.ESTIMATED:
        return drop_in
    if not device.activity.ratio and values.get(Field.GPU_UTIL):
        return drop_in  # utilisation of a moment ago, without anything to divide it by
    fraction = part.ratio / device.activity.ratio if device.activity.ratio else 0.0
    for field in (Field.GPU_UTIL, Field.PROF_GR_ENGINE_ACTIVE):
        if field in values:
            drop_in[field] = round(values[field] * fraction, _DIGITS)
    return drop_in

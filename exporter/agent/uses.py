"""Who uses how much of one device: holders, their processes, and what belongs to nobody listed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exporter.accounting.activity import Judgement, Samples, split_activity
from exporter.accounting.idle import HolderKey, IdleClock, Standing
from exporter.attribution.processes import Matched
from exporter.model import Activity, ActivitySource, Field, Holder, PodFacts, PodUse, ProcessUse

MEBIBYTE = 1 << 20

HIDDEN_PROCESSES_MEMORY_MIB = 300
"""An empty process list with more memory than this in use means that processes are hidden, not absent."""


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


def visible_processes(
    processes: tuple[ProcessUse, ...] | None, values: Mapping[Field, int | float]
) -> tuple[ProcessUse, ...] | None:
    """Return the process list, or ``None`` where an empty one cannot be true (another PID namespace)."""
    if processes == () and values.get(Field.FB_USED, 0) > HIDDEN_PROCESSES_MEMORY_MIB:
        return None
    return processes


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
        matched: Its processes by holder, ``None`` where the driver does not tell processes.
        clock: Remembers ages and idleness.
        known: Looks up pods.
        now: Seconds of a clock that nobody sets.
    """
    told = matched if matched is not None and matched.complete else None
    split = split_activity(judgement.activity, holders, _samples(holders, told))
    return DeviceUse(
        pods=tuple(
            _pod_use(
                holder,
                part,
                clock.observe(
                    _key(uuid, holder),
                    now,
                    _of_its_share(holder, part),
                    holder.pod_uid or known.uid_of(holder.namespace, holder.pod),
                ),
                judgement,
                values,
                told,
                known.facts_of(holder),
                sole=len(holders) == 1 and holder.device_share_ratio >= 1,
            )
            for holder, part in zip(holders, split.parts, strict=True)
        ),
        unattributed_activity_ratio=split.remainder_ratio,
        unattributed_memory_bytes=_memory(told.unattributed) if told else None,
        unattributed_processes=sum(not process.ended for process in told.unattributed) if told else None,
    )


def _key(uuid: str, holder: Holder) -> HolderKey:
    return uuid, holder.namespace, holder.pod, holder.container


def _of_its_share(holder: Holder, part: Activity | None) -> float | None:
    """Activity by what idleness is judged: all of a quarter is busy, though it is 0.25 of the device."""
    return None if part is None else min(1.0, part.ratio / holder.device_share_ratio)


def _pod_use(
    holder: Holder,
    part: Activity | None,
    standing: Standing,
    judgement: Judgement,
    values: Mapping[Field, int | float],
    told: Matched | None,
    facts: PodFacts | None,
    *,
    sole: bool,
) -> PodUse:
    """What is known of one holder; ``sole`` holders of a whole device have what the device has."""
    used = values.get(Field.FB_USED) if sole else None
    if used is not None:
        memory = _memory_of_sole_holder(int(used), _memory(told.unattributed) if told else 0)
    else:
        memory = _memory(told.by_holder.get(holder, ())) if told else None
    return PodUse(
        holder=holder,
        age_seconds=standing.age_seconds,
        activity=part,
        idle_for_seconds=standing.idle_for_seconds,
        memory_used_bytes=memory,
        values=_drop_in_values(part, judgement, values, memory) if told and not sole else {},
        facts=facts,
    )


def _samples(holders: Sequence[Holder], matched: Matched | None) -> Samples | None:
    if matched is None or matched.by_mps:
        return None
    everybody = [process for uses in matched.by_holder.values() for process in uses] + list(matched.unattributed)
    if not any(process.sm_ratio is not None for process in everybody):
        return None
    return Samples(
        by_holder=tuple(_busy(matched.by_holder.get(holder, ())) for holder in holders),
        others=_busy(matched.unattributed),
    )


def _busy(processes: Sequence[ProcessUse]) -> float:
    """Sum, over processes, of the busiest of their engines: a transcoder is not idle."""
    return sum(max(p.sm_ratio or 0.0, p.enc_ratio or 0.0, p.dec_ratio or 0.0) for p in processes)


def _memory(processes: Sequence[ProcessUse]) -> int | None:
    """Sum of memory in bytes; ``None`` as soon as one process's is not known. One that ended has none."""
    alive = [process.memory_used_bytes for process in processes if not process.ended]
    known = [memory for memory in alive if memory is not None]
    return sum(known) if len(known) == len(alive) else None


def _memory_of_sole_holder(used_mib: int, foreign_bytes: int | None) -> int | None:
    return None if foreign_bytes is None else max(0, used_mib * MEBIBYTE - foreign_bytes)


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
    if Field.GPU_UTIL in values:
        drop_in[Field.GPU_UTIL] = round(values[Field.GPU_UTIL] * fraction)
    if Field.PROF_GR_ENGINE_ACTIVE in values:
        drop_in[Field.PROF_GR_ENGINE_ACTIVE] = values[Field.PROF_GR_ENGINE_ACTIVE] * fraction
    return drop_in

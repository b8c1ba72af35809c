"""Merges the readings of two sources: NVML's values first, DCGM's where NVML has none or does not answer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from exporter.model.devices import DeviceState, GpuReading, MigReading, Reading
from exporter.model.fields import CODECS, COUNTERS, PROFILING, Field

SLOW_COUNTER_SECONDS = 60.0
"""Maximum age of a DCGM counter: DCGM measures slow fields every 10 s, and three of those may be missing."""
_RISING = frozenset(one for one in Field if one in COUNTERS)
"""Fields that only rise until the driver is loaded again, and that both sources can report."""
Values = Mapping[Field, int | float]
_UP = DeviceState.UP


_FALLBACK = frozenset(
    {
        Field.GPU_UTIL,
        Field.ENC_UTIL,
        Field.DEC_UTIL,
        Field.FB_USED,
        Field.FB_TOTAL,
        Field.POWER_USAGE,
        Field.TOTAL_ENERGY_CONSUMPTION,
    }
)
"""Enough fields to attribute use while NVML does not answer; without its codecs, a transcoder would look idle."""
_ACTIVITY = frozenset({Field.PROF_GR_ENGINE_ACTIVE})


def supplement(fields: Iterable[Field]) -> frozenset[Field]:
    """Return the fields to read from DCGM in addition to NVML: those that NVML may lack, and a few as a fallback.

    Codecs are both: for a GPU before Hopper in MIG mode, NVML does not report them.
    """
    wanted = frozenset(fields) | _ACTIVITY | CODECS
    return frozenset(one for one in wanted if one.only_dcgm or one in PROFILING) | _FALLBACK | {Field.XID_ERRORS}


def alone(fields: Iterable[Field]) -> frozenset[Field]:
    """Return the fields to read from DCGM without NVML: all that it has, always with Xid events and codecs."""
    return frozenset(one for one in fields if one < Field.OWN_FIRST) | _ACTIVITY | CODECS | {Field.XID_ERRORS}


class _Counted(NamedTuple):
    """A counter in the last merged reading."""

    value: float
    by_dcgm: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeMemory:
    """State that ``merge`` keeps between calls."""

    at: float = -math.inf
    """Instant of the newest merged reading."""
    profiled: bool = False
    """Whether DCGM had profiling values in it."""
    nvml: Reading | None = None
    """NVML's newest reading."""
    dcgm_uuids: frozenset[str] = frozenset()
    """UUIDs of all GPUs that DCGM has ever reported."""
    other_machine: bool = False
    """Whether DCGM's newest reading has none of NVML's GPUs: its engine is on another machine."""
    counters: Mapping[tuple[str, Field], _Counted] = field(default_factory=dict)
    """Counters by UUID of the GPU and field."""


def merge(
    nvml: Reading | None,
    dcgm: Reading | None,
    memory: MergeMemory = MergeMemory(),
    *,
    away: str = "stale",
    patience_seconds: float = SLOW_COUNTER_SECONDS,
) -> tuple[Reading | None, MergeMemory]:
    """Return the readings of both sources as one, and the memory for the next call; pure.

    - While NVML answers, GPUs, their state, MIG instances and processes are NVML's. For a GPU that both sources list
      and that is up, DCGM adds the quantities that NVML did not measure. A GPU that only DCGM knows is added whole,
      under a separate index if NVML uses its index for another.
    - While NVML does not answer, DCGM's reading is used whole, under the identities that NVML reported before.
    - An engine with none of NVML's GPUs is on another machine: its reading is not used.
    - A counter lower than the other source's earlier value is left out until it has caught up: a difference would
      count all of it again.

    Args:
        nvml: NVML's reading; ``None`` while it does not answer.
        dcgm: DCGM's reading of about the same time; ``None`` without a recent one.
        memory: Memory that the previous call returned.
        away: Reason why NVML does not answer, in snake case.
        patience_seconds: Time after which a counter that is still lower has really restarted.

    Returns:
        A reading at the instant of NVML's, or of DCGM's if NVML does not answer; ``from_dcgm`` names DCGM's values.
        For an ``nvml`` that was merged before, a reading at DCGM's instant if DCGM begins to profile, which does not
        wait for NVML. ``None`` if no reading is newer than in the previous call.
    """
    known = nvml or memory.nvml
    if dcgm is not None:
        other = known is not None and not of_one_machine(known, dcgm)
        memory = replace(memory, dcgm_uuids=memory.dcgm_uuids | _uuids(dcgm.gpus), other_machine=other)
        dcgm = None if other else dcgm
    memory = replace(memory, nvml=known)
    if all(one is None or one.instant <= memory.at for one in (nvml, dcgm)):
        return None, memory
    if nvml is None:
        merged = dcgm and _in_place(dcgm, memory, away)
    else:
        merged = nvml if dcgm is None else _supplemented(nvml, dcgm)
        if dcgm is not None and nvml.instant <= memory.at and _profiles(merged) and not memory.profiled:
            merged = replace(merged, taken_at_seconds=dcgm.taken_at_seconds, steady_seconds=dcgm.steady_seconds)
    if merged is None or merged.instant <= memory.at:
        return None, memory
    merged, counters = _without_fallen(merged, memory.counters, patience_seconds)
    return merged, replace(memory, at=merged.instant, profiled=_profiles(merged), counters=counters)


def of_one_machine(nvml: Reading, dcgm: Reading) -> bool:
    """Return whether two readings may be of the same machine: they share a GPU, or one of them has no GPUs."""
    ours, theirs = _uuids(nvml.gpus), _uuids(dcgm.gpus)
    return not ours or not theirs or bool(ours & theirs)


def _supplemented(nvml: Reading, dcgm: Reading) -> Reading:
    """Return NVML's reading with the additional values of DCGM."""
    theirs = {gpu.uuid: gpu for gpu in dcgm.gpus}
    both = [_with_more(gpu, theirs.pop(gpu.uuid, None)) for gpu in nvml.gpus]
    only_dcgm = [_by_dcgm(gpu) for gpu in theirs.values() if _reports_anything(gpu)]
    return replace(
        nvml,
        gpus=by_index(both, only_dcgm),
        driver_version=nvml.driver_version or dcgm.driver_version,
        dcgm_version=dcgm.dcgm_version,
    )


def _in_place(dcgm: Reading, memory: MergeMemory, away: str) -> Reading | None:
    """Return DCGM's reading alone, under the identities that NVML reported while it answered.

    A GPU that DCGM never reported is not missing but failed, for NVML's reason. NVML's data of a GPU that was not up
    stays, as long as DCGM does not report that GPU.

    Returns:
        ``None`` for an engine that was started without a driver: it has no GPUs, which does not make them missing.
    """
    before = memory.nvml or replace(dcgm, gpus=())
    known, here = {gpu.uuid: gpu for gpu in before.gpus}, _uuids(dcgm.gpus)
    if known and not dcgm.gpus:
        return None
    there = [_by_dcgm(gpu, known[gpu.uuid]) for gpu in dcgm.gpus if gpu.uuid in known]
    there += [
        gpu.without_values(DeviceState.FAILED, away) if gpu.state is _UP else gpu.without_values(gpu.state, gpu.reason)
        for uuid, gpu in known.items()
        if uuid not in here and (uuid not in memory.dcgm_uuids or gpu.state is not _UP)
    ]
    new = [_by_dcgm(gpu) for gpu in dcgm.gpus if gpu.uuid not in known]
    return replace(dcgm, gpus=by_index(there, new), driver_version=dcgm.driver_version or before.driver_version)


def _without_fallen(
    reading: Reading, before: Mapping[tuple[str, Field], _Counted], patience_seconds: float
) -> tuple[Reading, Mapping[tuple[str, Field], _Counted]]:
    """Return a reading without counters lower than the other source's, and the current values of all counters."""
    counters, gpus = dict(before), []
    for gpu in reading.gpus:
        fallen = set()
        for one in _RISING & gpu.values.keys():
            now = _Counted(gpu.values[one], one in gpu.from_dcgm, reading.instant)
            last = before.get((gpu.uuid, one), now)
            lower = now.value < last.value and now.by_dcgm is not last.by_dcgm
            if lower and now.at - last.at <= patience_seconds:
                fallen.add(one)
            else:
                counters[gpu.uuid, one] = now
        if fallen:
            values = {one: value for one, value in gpu.values.items() if one not in fallen}
            gpu = replace(gpu, values=values, from_dcgm=gpu.from_dcgm - fallen)  # noqa: PLW2901 - as it is passed on
        gpus.append(gpu)
    return replace(reading, gpus=tuple(gpus)), counters


def _profiles(merged: Reading) -> bool:
    """Return whether DCGM has profiling values that NVML does not have."""
    measured = ((gpu.from_dcgm, *(part.from_dcgm for part in gpu.instances)) for gpu in merged.gpus)
    return any(not PROFILING.isdisjoint(fields) for of_gpu in measured for fields in of_gpu)


def _with_more(ours: GpuReading, theirs: GpuReading | None) -> GpuReading:
    """Return NVML's GPU with the additional values of DCGM while it is up."""
    if theirs is None or ours.state is not _UP:
        return ours
    values, from_dcgm = _filled(ours.values, theirs.values)
    return replace(
        ours,
        values=values,
        from_dcgm=from_dcgm,
        instances=_instances(ours, theirs),
        profiling=theirs.profiling,
        # Texts that only DCGM has, if a collectors file selects them.
        gpu=replace(ours.gpu, labels={**theirs.gpu.labels, **ours.gpu.labels}) if theirs.gpu.labels else ours.gpu,
    )


def _instances(ours: GpuReading, theirs: GpuReading) -> tuple[MigReading, ...]:
    """Return NVML's instances, or DCGM's if NVML reports that there are some but not which ones.

    If NVML lists instances, one that only DCGM lists belongs to a former layout: with it, the GPU would have more
    parts than it can have.
    """
    if not ours.instances:
        return _by_dcgm(theirs).instances if ours.gpu.mig_enabled else ()
    measured = {part.uuid: part.values for part in theirs.instances}
    filled = []
    for part in ours.instances:
        values, from_dcgm = _filled(part.values, measured.get(part.uuid, {}))
        filled.append(replace(part, values=values, from_dcgm=from_dcgm))
    return tuple(filled)


def _filled(ours: Values, theirs: Values) -> tuple[Values, frozenset[Field]]:
    added = {field: value for field, value in theirs.items() if field not in ours}
    return ({**ours, **added}, frozenset(added)) if added else (ours, frozenset())


def _by_dcgm(gpu: GpuReading, before: GpuReading | None = None) -> GpuReading:
    """Return DCGM's GPU under the identities that NVML reported before, if it did."""
    known = {part.uuid: part.instance for part in before.instances} if before else {}
    labels = {**gpu.gpu.labels, **before.gpu.labels} if before else {}
    return replace(
        gpu,
        gpu=replace(before.gpu, mig_enabled=gpu.gpu.mig_enabled, labels=labels) if before else gpu.gpu,
        instances=tuple(
            replace(part, instance=known.get(part.uuid, part.instance), from_dcgm=frozenset(part.values))
            for part in gpu.instances
        ),
        from_dcgm=frozenset(gpu.values),
    )


def _reports_anything(gpu: GpuReading) -> bool:
    """Return whether DCGM reports more about a GPU than that it once existed."""
    if gpu.state is DeviceState.MISSING:
        return False
    return gpu.state is not _UP or bool(gpu.values) or any(part.values for part in gpu.instances)


def by_index(there: Iterable[GpuReading], new: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """Return all GPUs by index; a new GPU with an index that is in use gets the next free one."""
    gpus, added = list(there), sorted(new, key=lambda gpu: (gpu.gpu.index, gpu.uuid))
    taken = {gpu.gpu.index for gpu in gpus}
    free = max([*taken, *(gpu.gpu.index for gpu in added)], default=0) + 1
    for gpu in added:
        index = gpu.gpu.index
        if index in taken:
            index, free = free, free + 1
        taken.add(index)
        gpus.append(replace(gpu, gpu=replace(gpu.gpu, index=index)))
    return tuple(sorted(gpus, key=lambda gpu: gpu.gpu.index))


def _uuids(gpus: Iterable[GpuReading]) -> frozenset[str]:
    return frozenset(gpu.uuid for gpu in gpus)

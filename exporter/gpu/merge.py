"""Merges readings of NVML and DCGM; DCGM's values are used if NVML has none or does not answer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from exporter.model.devices import DeviceState, GpuReading, MigReading, Reading
from exporter.model.fields import CODECS, COUNTERS, PROFILING, Field

SLOW_COUNTER_SECONDS = 60.0
"""Maximum age of a DCGM counter: DCGM measures slow fields every 10 s, and several may be missing."""
_RISING = frozenset(one for one in Field if one in COUNTERS)
"""Fields that only rise until the driver is loaded again."""
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
"""Fields to attribute use while NVML does not answer, with codecs, so that a transcoder does not look idle."""
_ACTIVITY = frozenset({Field.PROF_GR_ENGINE_ACTIVE})


def supplement(fields: Iterable[Field]) -> frozenset[Field]:
    """Return the fields to read from DCGM in addition to NVML: fields that NVML may lack, and a few as a fallback.

    Codecs belong to both groups: NVML does not report them for a GPU before Hopper in MIG mode.
    """
    wanted = frozenset(fields) | _ACTIVITY | CODECS
    return frozenset(one for one in wanted if one.only_dcgm or one in PROFILING) | _FALLBACK | {Field.XID_ERRORS}


def alone(fields: Iterable[Field]) -> frozenset[Field]:
    """Return the fields to read from DCGM without NVML: all that DCGM has, always with Xid events and codecs."""
    return frozenset(one for one in fields if one < Field.OWN_FIRST) | _ACTIVITY | CODECS | {Field.XID_ERRORS}


class _Last(NamedTuple):
    """The last merged reading of a GPU."""

    gpu: GpuReading
    at: float
    older: Mapping[Field, tuple[GpuReading, float]]
    """Last reading, with its instant, of each counter that this reading lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeMemory:
    """State that ``merge`` keeps between calls."""

    at: float = -math.inf
    """Instant of the newest merged reading."""
    profiled: bool = False
    """Whether the newest merged reading has profiling values of DCGM."""
    nvml: Reading | None = None
    """NVML's newest reading."""
    dcgm_uuids: frozenset[str] = frozenset()
    """UUIDs of all GPUs that DCGM has ever reported."""
    other_machine: bool = False
    """Whether the newest DCGM reading has no GPU of NVML, because its engine is on another machine."""
    gpus: Mapping[str, _Last] = field(default_factory=dict)
    """Last readings by UUID of the GPU, for their counters."""


def merge(
    nvml: Reading | None,
    dcgm: Reading | None,
    memory: MergeMemory = MergeMemory(),
    *,
    away: str = "stale",
    patience_seconds: float = SLOW_COUNTER_SECONDS,
) -> tuple[Reading | None, MergeMemory]:
    """Merge the readings of both sources; return the result and the memory for the next call; pure.

    - While NVML answers, GPUs, their state, MIG instances and processes are NVML's. For a GPU that both sources list
      and that is up, DCGM adds the quantities that NVML did not measure. A GPU that only DCGM knows is added whole,
      under a separate index if NVML uses its index for another.
    - While NVML does not answer, DCGM's reading is used whole, under the identities that NVML reported before.
    - An engine with none of NVML's GPUs is on another machine: its reading is not used.
    - A counter below the earlier value of the other source is left out until it reaches that value. Otherwise, a
      difference would count the whole counter again.

    Args:
        nvml: NVML's reading; ``None`` while it does not answer.
        dcgm: DCGM's reading of about the same time; ``None`` without a recent one.
        memory: Memory that the previous call returned.
        away: Reason why NVML does not answer, in snake case.
        patience_seconds: Time after which a counter that is still lower counts as restarted.

    Returns:
        A reading at the instant of NVML's, or of DCGM's if NVML does not answer; ``from_dcgm`` has DCGM's fields. If
        ``nvml`` was merged before and DCGM begins to profile, a reading at DCGM's instant. ``None`` if no reading is
        newer than in the previous call.
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
    merged, gpus = _without_fallen(merged, memory.gpus, patience_seconds)
    return merged, replace(memory, at=merged.instant, profiled=_profiles(merged), gpus=gpus)


def of_one_machine(nvml: Reading, dcgm: Reading) -> bool:
    """Return whether two readings can be of the same machine: they share a GPU, or one of them has no GPUs."""
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

    A GPU that DCGM never reported counts as failed with NVML's reason, not as missing. NVML's data of a GPU that was
    not up stays while DCGM does not report that GPU.

    Returns:
        The reading; ``None`` for an engine without GPUs that was started without a driver, since they are not missing.
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
    reading: Reading, before: Mapping[str, _Last], patience_seconds: float
) -> tuple[Reading, Mapping[str, _Last]]:
    """Return a reading without counters below those of the other source, and the last readings of all GPUs."""
    lasts, at = dict(before), reading.instant
    for gpu in reading.gpus:
        last, kept = before.get(gpu.uuid), gpu
        older: dict[Field, tuple[GpuReading, float]] = {}
        # A counter can only fall if sources change. This is rare, and the comparison of all counters takes long.
        if last and (last.older or last.gpu.from_dcgm != gpu.from_dcgm or last.gpu.values.keys() - gpu.values.keys()):
            known = dict.fromkeys(_RISING & last.gpu.values.keys(), (last.gpu, last.at))
            for one, (earlier, since) in {**known, **last.older}.items():
                waits = at - since <= patience_seconds and (one in gpu.from_dcgm) is not (one in earlier.from_dcgm)
                if one not in gpu.values or (waits and gpu.values[one] < earlier.values[one]):
                    older[one] = earlier, since
            values = {one: value for one, value in gpu.values.items() if one not in older}
            kept = replace(gpu, values=values, from_dcgm=gpu.from_dcgm - older.keys())
        lasts[gpu.uuid] = _Last(kept, at, older)
    return replace(reading, gpus=tuple(lasts[gpu.uuid].gpu for gpu in reading.gpus)), lasts


def _profiles(merged: Reading) -> bool:
    """Return whether a merged reading has profiling values of DCGM."""
    measured = ((gpu.from_dcgm, *(part.from_dcgm for part in gpu.instances)) for gpu in merged.gpus)
    return any(not PROFILING.isdisjoint(fields) for of_gpu in measured for fields in of_gpu)


def _with_more(ours: GpuReading, theirs: GpuReading | None) -> GpuReading:
    """Return NVML's GPU with the additional values of DCGM while it is up."""
    if theirs is None or ours.state is not _UP:
        return ours
    values, from_dcgm = _filled(ours.values, theirs.values)
    texts = theirs.gpu.labels.keys() - ours.gpu.labels.keys()  # only if a collectors file selects such fields
    return replace(
        ours,
        gpu=replace(ours.gpu, labels={**theirs.gpu.labels, **ours.gpu.labels}) if texts else ours.gpu,
        values=values,
        from_dcgm=from_dcgm,
        instances=_instances(ours, theirs),
        profiling=theirs.profiling,
    )


def _instances(ours: GpuReading, theirs: GpuReading) -> tuple[MigReading, ...]:
    """Return NVML's instances, or DCGM's if NVML reports MIG mode but no instances.

    If NVML lists instances, an instance that only DCGM lists belongs to a former layout. With it, the GPU would have
    too many parts.
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
    """Return DCGM's GPU under the identities that NVML reported before, if any."""
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
    """Return whether DCGM reports data of a GPU, not only its earlier existence."""
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

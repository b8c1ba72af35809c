"""Determines the activity of devices: their engines, the fields that measure them, and unknown activity."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from functools import lru_cache

from exporter.accounting import effective
from exporter.model.attribution import Holder
from exporter.model.devices import NO_PROCESS_MEMORY_MIB, Gpu, ProcessUse
from exporter.model.fields import DECODERS, FLOW_ENGINES, JPEG_DECODERS, Field
from exporter.model.snapshot import Activity, ActivitySource

_PERCENT = frozenset({Field.GPU_UTIL, Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL})

MEAN_SECONDS = 60.0
"""Time constant of the compared means: with a sample per second, a reading of this age has 1/e of its weight."""

LEAST_EXPLAINED = 0.25
"""Process samples that sum to less than this part of a device's activity do not attribute it.

They are from another time than the activity, for example from before work began.
"""

CONTRADICTING_UTILISATION = 0.1
"""Mean utilisation that proves work."""

CONTRADICTING_FRACTION = 0.1
"""Mean engine activity below this part of the mean utilisation contradicts it.

NVML's utilisation lags behind the engine counter by a sample, and DCGM's figures by up to three. Means over many
samples hide that lag. They show a counter that stays at 0 for weeks at 99 % utilisation (NVIDIA/dcgm-exporter#662).
"""

_HEAVIEST_READING_SECONDS = 2.0
"""Maximum weight of a reading, so that with rare samples three lagging readings are not a contradiction."""

_LONGEST_STEP_SECONDS = 600.0
"""Time without a reading after which the means restart; twice the longest sample interval."""

RECENT_SECONDS = 60.0
"""Time since its last measurement in which an engine counts as measurable."""

SETTLING_SECONDS = 5.0
"""Time after the first or returned values of a device that DCGM measures. In this time, DCGM or NVML may not have
reported all engines yet."""

_NOISE = 0.005
"""Activity of a codec or of the PCIe link up to this value does not prove use."""


class EngineClass(StrEnum):
    """A part of a device that works independently."""

    COMPUTE = auto()
    ENCODE = auto()
    DECODE = auto()
    JPEG = auto()
    OPTICAL_FLOW = auto()
    COPY = auto()
    """Copies between host and device: use of the PCIe link in its busier direction. The engine counter does not
    include copies. NVML's utilisation includes their time, but lags, so it is not used for them."""


class DeviceLevel(StrEnum):
    """Kind of a device whose activity is determined."""

    GPU = auto()
    """A whole GPU."""
    PARTITIONED_GPU = auto()
    """A GPU in MIG mode; its codecs belong to its instances."""
    INSTANCE = auto()
    """A MIG instance."""


_NOT_VIDEO = frozenset({EngineClass.COMPUTE, EngineClass.COPY})

_Found = dict[EngineClass, tuple[float, Field]]
"""Activity (0..1) of each measured engine, and the field that measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One engine: the devices that have it, and the fields that measure it."""

    engine: EngineClass
    fields: tuple[tuple[Field, ...], ...]
    """Alternatives, best first; the first alternative with a value counts. Of several units, the busiest counts."""
    of_process: Callable[[ProcessUse], float | None]
    """Use of the engine by a process; ``None`` if the driver's samples do not cover it."""
    lacking_models: re.Pattern[str] | None = None
    """GPU models without the engine, from NVIDIA's video codec support matrix."""
    levels: frozenset[DeviceLevel] = frozenset({DeviceLevel.GPU, DeviceLevel.INSTANCE})

    def measured(self, values: Mapping[Field, int | float]) -> tuple[float, Field] | None:
        """Return the engine's activity (0..1) and the field that measured it; ``None`` if it was not measured."""
        for units in self.fields:
            known = [unit for unit in units if unit in values]
            if known:
                busiest = max(known, key=values.__getitem__)
                ratio = values[busiest] / 100 if busiest in _PERCENT else values[busiest]
                return min(1.0, max(0.0, ratio)), busiest
        return None


_WITHOUT_ENCODER = re.compile(r"\b(A100|A800|A30|H100|H800|H20|H200|GH200|B200|GB200|B300|GB300)\b")
_BEFORE_AMPERE = r"\b(K80|M40|M60|P4|P40|P100|V100|V100S|T4|T40|RTX [4568]000)\b(?!.*\bAda\b)"
_WITHOUT_JPEG = re.compile(_BEFORE_AMPERE + r"|\b(A2|A10|A10G|A16|A40|RTX A\d{3,4}|RTX 30\d0)\b")
_INSTANCE_WITHOUT_CODECS = re.compile(r"\b(A100|A800|A30)\b")
"""Ampere models with MIG: they have no GPM, the only source of codecs of instances."""
_WITHOUT_FLOW = re.compile(_BEFORE_AMPERE)

ENGINES = (
    EngineRow(
        engine=EngineClass.COMPUTE,
        # The engine counter: GPM (NVML on Hopper and later, MIG instances included), or DCGM. Otherwise NVML's
        # utilisation, which MIG instances do not have.
        fields=((Field.PROF_GR_ENGINE_ACTIVE,), (Field.GPU_UTIL,)),
        of_process=lambda use: use.sm_ratio,
        levels=frozenset(DeviceLevel),
    ),
    EngineRow(
        engine=EngineClass.ENCODE,
        # NVML and DCGM, whole GPUs only.
        fields=((Field.ENC_UTIL,),),
        of_process=lambda use: use.enc_ratio,
        lacking_models=_WITHOUT_ENCODER,
    ),
    EngineRow(
        engine=EngineClass.DECODE,
        # The utilisation: NVML and DCGM, whole GPUs only. The units: GPM of NVML (MIG instances), or DCGM.
        fields=((Field.DEC_UTIL,), DECODERS),
        of_process=lambda use: use.dec_ratio,
    ),
    EngineRow(
        engine=EngineClass.JPEG,
        # The utilisation: NVML, whole GPUs only. The units: as for decoders.
        fields=((Field.JPG_UTIL,), JPEG_DECODERS),
        of_process=lambda use: use.jpg_ratio,
        lacking_models=_WITHOUT_JPEG,
    ),
    EngineRow(
        engine=EngineClass.OPTICAL_FLOW,
        fields=((Field.OFA_UTIL,), FLOW_ENGINES),
        of_process=lambda use: use.ofa_ratio,
        lacking_models=_WITHOUT_FLOW,
    ),
)
"""Engines and the fields that measure them; all engines of a device must be measured for idle time."""


@lru_cache(maxsize=64)
def engines_of(level: DeviceLevel, model: str) -> tuple[EngineRow, ...]:
    """Return the engines of a device.

    Args:
        level: Kind of the device.
        model: Name of the GPU as the driver reports it.
    """
    return tuple(
        row
        for row in ENGINES
        if level in row.levels and not (row.lacking_models is not None and row.lacking_models.search(model))
    )


def samples_cover(values: Mapping[Field, int | float], processes: Sequence[ProcessUse]) -> bool:
    """Return whether the driver's process samples cover the engines in use on a device.

    Drivers before R550 do not sample JPEG and optical-flow engines, and the first poll of processes has no samples.

    Args:
        values: The device's values.
        processes: The processes on the device.
    """
    lacking = [row for row in ENGINES if any(row.of_process(use) is None for use in processes)]
    return not any((found := row.measured(values)) and found[0] > _NOISE for row in lacking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Activity of a device, or ``None`` and the snake-case reason why it is unknown."""

    activity: Activity | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """New sample of one device."""

    uuid: str
    """UUID of the GPU or MIG instance."""
    at_seconds: float
    """Instant of the sample; only differences matter."""
    values: Mapping[Field, int | float]
    level: DeviceLevel = DeviceLevel.GPU
    model: str = ""
    from_dcgm: frozenset[Field] = frozenset()
    """Fields in ``values`` that DCGM measured."""
    process_count: int | None = None
    """Number of processes that the driver lists; ``None`` if it reports no list or an unreliable one."""
    draws: bool | None = False
    """Whether a process has a graphics context; ``None`` without a process list. No source measures its units."""
    parent_values: Mapping[Field, int | float] = field(default_factory=dict)
    """Values of a MIG instance's GPU."""

    @property
    def runs_nothing(self) -> bool:
        """Whether the device has no process; an empty list is not credible while memory is in use."""
        return self.process_count == 0 and self.values.get(Field.FB_USED, 0) < NO_PROCESS_MEMORY_MIB


@dataclass(slots=True)
class _Means:
    """Decaying means of several quantities, starting from 0."""

    values: tuple[float, ...]
    at_seconds: float | None = None

    def add(self, at_seconds: float, *readings: float) -> None:
        """Add readings, with the time since the previous ones as weight, up to a maximum."""
        step = math.inf if self.at_seconds is None else at_seconds - self.at_seconds
        self.at_seconds = at_seconds
        if not 0 <= step <= _LONGEST_STEP_SECONDS:
            self.values = (0.0,) * len(readings)
            return
        kept = math.exp(-min(step, _HEAVIEST_READING_SECONDS) / MEAN_SECONDS)
        self.values = tuple(
            mean * kept + reading * (1 - kept) for mean, reading in zip(self.values, readings, strict=True)
        )


@dataclass(slots=True)
class _Memory:
    """Data of one device that is kept between samples."""

    measured_since_seconds: float = math.inf
    """Instant since which its compute engine is measured without interruption; infinite while it is not."""
    means: _Means = field(default_factory=lambda: _Means((0.0, 0.0)))
    """Means of engine activity and utilisation."""
    unexplained: _Means = field(default_factory=lambda: _Means((0.0,)))
    """Mean of utilisation without a process or memory in use."""
    measured: dict[EngineClass, tuple[float, float]] = field(default_factory=dict)
    """Instant of each engine's last measurement, and the activity at that time."""
    counted: set[str] = field(default_factory=set)
    """Reasons that have been counted and still apply."""
    draws: bool = False
    """Whether a process had a graphics context when the processes were last listed."""

    def contradicts(self, sample: Observation, found: _Found) -> bool:
        """Add a sample to the means, and return whether its readings contradict each other.

        Two cases are known: an engine counter stays at 0 while kernels run, or a device reports utilisation without a
        process or memory in use. The latter occurs on Blackwell after a process was killed while a kernel ran.
        """
        engine, percent = sample.values.get(Field.PROF_GR_ENGINE_ACTIVE), sample.values.get(Field.GPU_UTIL)
        copying = found.get(EngineClass.COPY, (0.0,))[0]
        if percent is None:
            return False
        unused = sample.runs_nothing and Field.FB_USED in sample.values
        self.unexplained.add(sample.at_seconds, percent / 100 if unused else 0.0)
        if unused and self.unexplained.values[0] >= CONTRADICTING_UTILISATION:
            return True
        if engine is None:
            return False
        self.means.add(sample.at_seconds, max(engine, copying), percent / 100)
        mean_engine, mean_utilisation = self.means.values
        return mean_utilisation >= CONTRADICTING_UTILISATION and mean_engine < CONTRADICTING_FRACTION * mean_utilisation

    def unmeasured(self, sample: Observation, found: _Found) -> list[EngineRow]:
        """Record the engines that a sample measured, and return the device's other engines."""
        is_measured = EngineClass.COMPUTE in found
        self.measured_since_seconds = min(self.measured_since_seconds, sample.at_seconds) if is_measured else math.inf
        for engine, (ratio, _) in found.items():
            self.measured[engine] = sample.at_seconds, ratio
        return [row for row in engines_of(sample.level, sample.model) if row.engine not in found]

    def age_seconds(self, row: EngineRow, at_seconds: float) -> float:
        """Return the time since an engine was last measured; if never, the time since the compute engine is."""
        last = self.measured.get(row.engine)
        return at_seconds - (self.measured_since_seconds if last is None else last[0])

    def may_be_in_use(self, row: EngineRow, sample: Observation, *, nvml_reads: bool) -> bool:
        """Return whether an engine that a sample did not measure may be busy.

        It may be busy in four cases: it was measured a short time ago, so only this reading is missing; it was busy
        when last measured; the device's values have just begun or returned and DCGM or NVML may not have reported the
        engine yet; or the GPU's engine is in use. Without a process, no engine is in use.
        """
        if sample.runs_nothing:
            return False
        last = self.measured.get(row.engine)
        settling = sample.at_seconds - self.measured_since_seconds < SETTLING_SECONDS
        reported = sample.level is DeviceLevel.GPU or (
            sample.level is DeviceLevel.INSTANCE and nvml_reads and not _INSTANCE_WITHOUT_CODECS.search(sample.model)
        )
        if settling and reported and sample.from_dcgm:
            return True
        if last is not None and (sample.at_seconds - last[0] <= RECENT_SECONDS or last[1] > _NOISE):
            return True
        of_parent = row.measured(sample.parent_values)
        return of_parent is not None and of_parent[0] > _NOISE


@dataclass(slots=True)
class ActivityJudge:
    """Determines the activity of many devices, and keeps the necessary data of each."""

    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts since start by (part, reason), increased when a reason starts to apply: ``contradiction``, ``incomplete``
    and ``impossible_profile``."""
    nvml_reads: bool = True
    """Whether NVML is a source: no other source measures the codecs of MIG instances."""
    _memory: dict[str, _Memory] = field(default_factory=dict)

    def judge(self, sample: Observation, *, idle_below: float) -> Judgement:
        """Determine the activity of one device from a new sample.

        Args:
            sample: The new sample.
            idle_below: Idle threshold, 0..1. Below it, a device is idle only if no unmeasured engine may be in use.

        Returns:
            The activity of the busiest engine. Unknown without a compute reading, for contradicting readings, and for
            a device that is idle except for an unmeasured engine that may be in use.
        """
        memory = self._memory.setdefault(sample.uuid, _Memory())
        board = sample.parent_values if sample.level is DeviceLevel.INSTANCE else None
        pcie_ratio = effective.pcie_use(sample.values if board is None else board)
        found = _measured(sample, pcie_ratio)
        contradiction = memory.contradicts(sample, found)
        self._count(memory, "contradiction", holds=contradiction)
        missing = memory.unmeasured(sample, found)
        if EngineClass.COMPUTE not in found:
            return Judgement(activity=None, reason="no_source")
        busiest = _busiest(found, sample.from_dcgm)
        lasting = any(memory.age_seconds(row, sample.at_seconds) > RECENT_SECONDS for row in missing)
        if lasting or not missing:
            self._count(memory, "incomplete", holds=lasting)
        if contradiction:
            return Judgement(activity=None, reason="contradiction")
        more = any(memory.may_be_in_use(row, sample, nvml_reads=self.nvml_reads) for row in missing)
        if busiest.ratio < idle_below and more:
            return Judgement(activity=None, reason="incomplete")
        memory.draws = memory.draws if sample.draws is None else sample.draws
        # If an unmeasured unit may be in use, the measured ones do not show the limit.
        if not (more or memory.draws or sample.level is DeviceLevel.PARTITIONED_GPU):
            profile, is_possible = effective.profile_of(
                sample.model,
                sample.values,
                board,
                activity_ratio=busiest.ratio,
                video_ratio=max((found[one][0] for one in found if one not in _NOT_VIDEO), default=0.0),
                pcie_ratio=pcie_ratio,
            )
            self._count(memory, "impossible_profile", holds=not is_possible)
            busiest = replace(busiest, profile=profile)
        return Judgement(activity=busiest)

    def interrupt(self, uuids: Iterable[str]) -> None:
        """Record that devices are not measured now; afterwards, DCGM reports their engines one after the other."""
        for uuid in uuids:
            if memory := self._memory.get(uuid):
                memory.measured_since_seconds = math.inf

    def forget(self, keep: frozenset[str]) -> None:
        """Forget devices that are not in ``keep``."""
        for uuid in self._memory.keys() - keep:
            del self._memory[uuid]

    def _count(self, memory: _Memory, reason: str, *, holds: bool) -> None:
        """Count a reason when it starts to apply."""
        if not holds:
            memory.counted.discard(reason)
        elif reason not in memory.counted:
            memory.counted.add(reason)
            self.errors["activity", reason] += 1


def _measured(sample: Observation, pcie_ratio: float | None) -> _Found:
    found = {row.engine: known for row in ENGINES if (known := row.measured(sample.values)) is not None}
    # NVML's utilisation includes copies; the part of the link that a MIG instance uses is unknown.
    with_engine = sample.level is not DeviceLevel.INSTANCE and Field.PROF_GR_ENGINE_ACTIVE in sample.values
    if with_engine and pcie_ratio is not None and pcie_ratio > _NOISE:
        found[EngineClass.COPY] = min(1.0, pcie_ratio), Field.PROF_PCIE_TX_BYTES
    return found


def _busiest(found: _Found, from_dcgm: frozenset[Field]) -> Activity:
    """Return the activity of the busiest engine."""
    engine = max(found, key=lambda one: found[one][0])
    ratio, by = found[engine]
    if engine is EngineClass.COPY:
        source = ActivitySource.COPY
    elif engine is not EngineClass.COMPUTE:
        source = ActivitySource.CODEC
    else:
        source = ActivitySource.UTILISATION if by is Field.GPU_UTIL else ActivitySource.ENGINE
    return Activity(ratio=ratio, source=source, measured_by="dcgm" if by in from_dcgm else "nvml")


def partitioned_activity(
    gpu: Gpu,
    own: Judgement,
    instances: Sequence[tuple[int, Judgement]],
    *,
    idle_below: float,
    lacks_some: bool = False,
) -> Judgement:
    """Return the activity of a partitioned GPU: by its own engine counter, else by its instances.

    Args:
        gpu: The GPU.
        own: The judgement of the GPU's own values, which do not include the codecs of its instances.
        instances: Compute slices and judgement of each instance; slices without an instance are idle.
        idle_below: The idle threshold, 0..1.
        lacks_some: Whether there are other instances without any data.

    Returns:
        ``own`` if it is known and no instance is busiest in a codec. Otherwise the slice-weighted mean of the
        instances: unknown if one instance is unknown, measured by DCGM if one instance is. ``own`` below the idle
        threshold is also unknown if one instance is, because its codecs may be in use.
    """
    judged = [judgement.activity for _, judgement in instances]
    if own.activity is not None and own.activity.ratio < idle_below and (lacks_some or None in judged):
        return Judgement(activity=None, reason="incomplete")
    in_codec = any(activity and activity.source is ActivitySource.CODEC for activity in judged)
    if not gpu.compute_slices or lacks_some or (own.activity is not None and not in_codec):
        return own
    total = 0.0
    source, measured_by = ActivitySource.ENGINE, "nvml"
    for slices, judgement in instances:
        if judgement.activity is None:
            return Judgement(activity=None, reason=judgement.reason)
        total += judgement.activity.ratio * slices / gpu.compute_slices
        source = judgement.activity.source
        measured_by = "dcgm" if judgement.activity.measured_by == "dcgm" else measured_by
    source = ActivitySource.CODEC if in_codec else source
    return Judgement(activity=Activity(ratio=min(1.0, max(0.0, total)), source=source, measured_by=measured_by))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledUse:
    """Sampled use of a device by the processes of the same holders."""

    holders: tuple[Holder, ...]
    """Possible holders of the processes; empty if they have none."""
    ratio: float
    """Sum of the processes' use, 0..1 of the device."""
    known: bool = True
    """Whether the processes surely belong to one of the holders; if not, they may also have no holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A device's activity divided among its holders; parts and remainder sum to it."""

    parts: tuple[Activity | None, ...]
    """One part per holder, in their order; ``None`` if the device's activity is unknown."""
    bounds: tuple[tuple[float, float] | None, ...]
    """Minimum and maximum of each part, 0..1 of the device; equal if all of it was measured."""
    remainder_ratio: float | None
    """Activity without a holder; ``None`` if unknown."""


def split_activity(device: Activity | None, holders: Sequence[Holder], samples: Sequence[SampledUse] | None) -> Split:
    """Divide a device's activity among its holders.

    The activity is divided in proportion to the process samples. Samples with several possible holders are divided
    among those by share. Without samples, or with samples of less than ``LEAST_EXPLAINED`` of the activity, all of it
    is divided by share. A part that is mostly divided by share is estimated. A single holder gets all activity except
    that of processes without a holder.

    Args:
        device: Activity of the device, ``None`` if unknown.
        holders: Its holders.
        samples: Process samples, ``None`` if the driver has none or they cannot divide this activity.

    Returns:
        Parts that, with the remainder, sum to the device's activity.
    """
    if device is None:
        return Split(parts=(None,) * len(holders), bounds=(None,) * len(holders), remainder_ratio=None)
    if not holders:
        return Split(parts=(), bounds=(), remainder_ratio=device.ratio)
    samples = _explaining(device, holders, samples)
    scale = device.ratio / sum(one.ratio for one in samples)
    remainder = scale * sum(one.ratio for one in samples if not one.holders)
    if len(holders) == 1 and not remainder:
        return Split(parts=(device,), bounds=((device.ratio, device.ratio),), remainder_ratio=0.0)
    position = {holder: number for number, holder in enumerate(holders)}
    measured, divided, possible = ([0.0] * len(holders) for _ in range(3))
    for one in samples:
        shares = sum(holder.device_share_ratio for holder in one.holders)
        for holder in one.holders:
            number = position[holder]
            if one.known and len(one.holders) == 1:
                measured[number] += one.ratio
            else:
                divided[number] += one.ratio * holder.device_share_ratio / shares
                possible[number] += one.ratio
    return Split(
        parts=tuple(
            replace(
                device,
                ratio=min(device.ratio, scale * own + scale * part),
                profile=None,
                source=ActivitySource.ESTIMATED if part > own else ActivitySource.PROCESS_SAMPLES,
            )
            for own, part in zip(measured, divided, strict=True)
        ),
        bounds=tuple((scale * own, scale * own + scale * more) for own, more in zip(measured, possible, strict=True)),
        remainder_ratio=remainder,
    )


def _explaining(
    device: Activity, holders: Sequence[Holder], samples: Sequence[SampledUse] | None
) -> Sequence[SampledUse]:
    """Return the samples, or one sample of all holders if the samples explain too little of the activity."""
    # At least the smallest normal number: a denormal divisor overflows.
    least = max(LEAST_EXPLAINED * device.ratio, sys.float_info.min)
    if samples is None or sum(one.ratio for one in samples) < least:
        return (SampledUse(holders=tuple(holders), ratio=1.0, known=False),)
    return samples

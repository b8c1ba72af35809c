"""How busy a device was over a sample, how sure that is, and whose activity it was."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.model import Activity, ActivitySource, Field, Gpu, Holder

CODEC_FIELDS = (Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL)

DEAD_ENGINE_RATIO = 0.001
"""An engine-active reading below this says "nothing ran"."""

HIGH_UTILISATION_PERCENT = 50
"""A utilisation from here on says "something ran for sure"."""

NO_PROCESS_MEMORY_MIB = 64
"""With less memory in use than the smallest CUDA context, an empty process list can be believed."""

CONTRADICTING_SAMPLES = 3
"""So many contradicting samples in a row are no coincidence of windows.

NVML's utilisation is a mean over up to the last second and so lags behind the engine counter by a sample
whenever work stops; only a contradiction that lasts is one (NVIDIA/dcgm-exporter#662: 0 for weeks at 99 %).
"""

CONTRADICTING_SAMPLES_ACROSS = 6
"""The same where one source told the one and the other the other: DCGM's figure has been measured, read and joined in
steps of one sample each, and so may be of three samples ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Activity of a device, or ``None`` and the snake-case reason why it is unknown."""

    activity: Activity | None
    reason: str = ""


@dataclass(slots=True)
class ActivityJudge:
    """Judges samples of many devices; remembers per device for how long its signals contradict each other."""

    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts since start by (part, reason): contradictions that have made a device unknown, one when that begins."""
    _contradictions: dict[str, int] = field(default_factory=dict)
    _unknown: set[str] = field(default_factory=set)
    """Devices of which a contradiction has been counted and lasts."""

    def judge(
        self,
        uuid: str,
        values: Mapping[Field, int | float],
        *,
        from_dcgm: frozenset[Field] = frozenset(),
        process_count: int | None = None,
        process_list_reliable: bool = True,
    ) -> Judgement:
        """Judge one new sample of one device.

        Args:
            uuid: Identity of the GPU or MIG instance.
            values: What was measured, in ``Field`` units.
            from_dcgm: Which of them DCGM told.
            process_count: Processes that the driver lists; ``None`` where it does not tell.
            process_list_reliable: False in a PID namespace of our own, where the list is empty whatever runs.

        Returns:
            The largest of compute, encode, decode, JPEG and optical-flow activity, 0..1. Compute is the engine
            counter where there is one, else NVML's utilisation, else unknown.
        """
        contradiction = contradicts(values, process_count if process_list_reliable else None)
        if not contradiction:
            self._contradictions.pop(uuid, None)
        else:
            self._contradictions[uuid] = self._contradictions.get(uuid, 0) + 1
            across = (Field.PROF_GR_ENGINE_ACTIVE in from_dcgm) is not (Field.GPU_UTIL in from_dcgm)
            enough = CONTRADICTING_SAMPLES_ACROSS if across else CONTRADICTING_SAMPLES
            if self._contradictions[uuid] >= enough:
                if uuid not in self._unknown:
                    self._unknown.add(uuid)
                    self.errors["activity", "contradiction"] += 1
                return Judgement(activity=None, reason="contradiction")
        self._unknown.discard(uuid)
        return judge_sample(values, from_dcgm)

    def forget(self, keep: frozenset[str]) -> None:
        """Forget devices that are not in ``keep``."""
        for uuid in self._contradictions.keys() - keep:
            del self._contradictions[uuid]
        self._unknown &= keep


def contradicts(values: Mapping[Field, int | float], process_count: int | None) -> bool:
    """Tell whether the signals of one sample cannot all be true.

    Two cases are known: an engine counter that is dead while a kernel is resident, and a device that says it is
    busy with no process on it and no memory in use (a process killed in mid-kernel on Blackwell).
    """
    utilisation = values.get(Field.GPU_UTIL)
    if utilisation is None or utilisation < HIGH_UTILISATION_PERCENT:
        return False
    engine = values.get(Field.PROF_GR_ENGINE_ACTIVE)
    if engine is not None and engine < DEAD_ENGINE_RATIO:
        return True
    memory = values.get(Field.FB_USED)
    return process_count == 0 and memory is not None and memory < NO_PROCESS_MEMORY_MIB


def judge_sample(values: Mapping[Field, int | float], from_dcgm: frozenset[Field] = frozenset()) -> Judgement:
    """Judge one sample by itself: engine before utilisation, and codecs where they are busier than both."""

    def told(ratio: float, source: ActivitySource, by: Field) -> Activity:
        return Activity(ratio=_clamp(ratio), source=source, measured_by="dcgm" if by in from_dcgm else "nvml")

    engine = values.get(Field.PROF_GR_ENGINE_ACTIVE)
    utilisation = values.get(Field.GPU_UTIL)
    if engine is not None:
        compute = told(engine, ActivitySource.ENGINE, Field.PROF_GR_ENGINE_ACTIVE)
    elif utilisation is not None:
        compute = told(utilisation / 100, ActivitySource.UTILISATION, Field.GPU_UTIL)
    else:
        # Codecs alone cannot show that a device is idle; that its compute engines are is not known.
        return Judgement(activity=None, reason="no_source")
    busiest = max((key for key in CODEC_FIELDS if key in values), key=values.__getitem__, default=None)
    if busiest is not None and values[busiest] / 100 > compute.ratio:
        return Judgement(activity=told(values[busiest] / 100, ActivitySource.CODEC, busiest))
    return Judgement(activity=compute)


def partitioned_activity(
    gpu: Gpu, own: Judgement, instances: Sequence[tuple[int, Judgement]], *, lacks_some: bool = False
) -> Judgement:
    """Activity of a GPU that is partitioned, from its own counters or else from its instances.

    Args:
        gpu: The GPU.
        own: What the GPU's own values say.
        instances: Compute slices and judgement of each instance; slices of no instance are idle.
        lacks_some: There are others, of which nothing is known.

    Returns:
        The slice-weighted mean, unknown as soon as one instance is unknown; DCGM's as soon as one instance's is.
    """
    if own.activity is not None or not gpu.compute_slices or lacks_some:
        return own
    total = 0.0
    source, measured_by = ActivitySource.ENGINE, "nvml"
    for slices, judgement in instances:
        if judgement.activity is None:
            return Judgement(activity=None, reason=judgement.reason)
        total += judgement.activity.ratio * slices / gpu.compute_slices
        source = judgement.activity.source
        measured_by = "dcgm" if judgement.activity.measured_by == "dcgm" else measured_by
    return Judgement(activity=Activity(ratio=_clamp(total), source=source, measured_by=measured_by))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A device's activity divided among its holders; parts and remainder sum to it."""

    parts: tuple[Activity | None, ...]
    """One per holder, in their order; ``None`` where the device's activity is unknown."""
    remainder_ratio: float | None
    """Activity that belongs to no holder; ``None`` where it cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Per-process samples of a device, summed: by holder (in their order), and of everything else."""

    by_holder: tuple[float, ...]
    others: float


def split_activity(device: Activity | None, holders: Sequence[Holder], samples: Samples | None) -> Split:
    """Divide a device's activity among its holders.

    A single holder gets everything but what foreign processes were sampled to use. Several holders
    get it in proportion to the process samples; the samples tell *whose*, the device tells *how much*. Without
    samples, or when they show nothing on a busy device, it is divided by share and marked as estimated.

    Args:
        device: Activity of the device, ``None`` if unknown.
        holders: Its holders.
        samples: Process samples, ``None`` where processes are not told or cannot be told apart.

    Returns:
        Parts that, with the remainder, sum to the device's activity.
    """
    if device is None:
        return Split(parts=(None,) * len(holders), remainder_ratio=None)
    if not holders:
        return Split(parts=(), remainder_ratio=device.ratio)
    sampled = sum(samples.by_holder) + samples.others if samples else 0.0
    if samples and sampled > 0:
        alone = len(holders) == 1 and not samples.others
        source = device.source if alone else ActivitySource.PROCESS_SAMPLES
        parts = tuple(
            replace(device, ratio=device.ratio * (part / sampled), source=source) for part in samples.by_holder
        )
        return Split(parts=parts, remainder_ratio=device.ratio * (samples.others / sampled))
    if len(holders) == 1:
        return Split(parts=(device,), remainder_ratio=0.0)
    shares = sum(holder.device_share_ratio for holder in holders)
    return Split(
        parts=tuple(
            replace(device, ratio=device.ratio * holder.device_share_ratio / shares, source=ActivitySource.ESTIMATED)
            for holder in holders
        ),
        remainder_ratio=0.0,
    )


def _clamp(ratio: float) -> float:
    return min(1.0, max(0.0, ratio))

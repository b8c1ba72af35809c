"""Makes one reading of two: NVML's word on what is there, and what DCGM measures beside it."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from exporter.model import DeviceState, Field, Gpu, GpuReading, MigReading, Reading

Values = Mapping[Field, int | float]
_UP = DeviceState.UP


def joined(nvml: Reading | None, dcgm: Reading | None) -> Reading:
    """Return what both sources say of one instant; pure.

    What is there is as NVML has it while it answers: GPUs, their condition, MIG instances, processes, Xids. Of a GPU
    that both have and that is up, DCGM adds the quantities that NVML did not measure. A GPU that only DCGM knows is
    added whole, under an index of its own where NVML gives that index to another. An engine that knows none of the
    GPUs that NVML has is another machine's: nothing of it is taken.

    Args:
        nvml: The newest reading, ``None`` where there is no fresh one: then DCGM's is used whole.
        dcgm: The same.

    Returns:
        A reading of the source that leads, with its time and errors; ``from_dcgm`` says what DCGM measured.

    Raises:
        ValueError: Both are ``None``.
    """
    if nvml is None:
        if dcgm is None:
            raise ValueError("neither source has a reading")
        return replace(dcgm, gpus=tuple(map(_all_from_dcgm, dcgm.gpus)))
    if dcgm is None or not of_one_machine(nvml, dcgm):
        return nvml
    theirs = {gpu.gpu.uuid: gpu for gpu in dcgm.gpus}
    both = [_supplemented(gpu, theirs.pop(gpu.gpu.uuid, None)) for gpu in nvml.gpus]
    only_dcgm = [_all_from_dcgm(gpu) for gpu in theirs.values() if _tells_anything(gpu)]
    return replace(
        nvml,
        gpus=tuple(sorted([*both, *without_clashes(only_dcgm, both)], key=_index)),
        driver_version=nvml.driver_version or dcgm.driver_version,
        dcgm_version=dcgm.dcgm_version,
    )


def of_one_machine(nvml: Reading, dcgm: Reading) -> bool:
    """Tell whether two readings may be of the same machine: they share a GPU, or one of them has none."""
    ours, theirs = _uuids(nvml.gpus), _uuids(dcgm.gpus)
    return not ours or not theirs or bool(ours & theirs)


def in_place_of(dcgm: Reading, before: Reading, known_to_dcgm: Collection[str], reason: str) -> Reading:
    """Return a reading of DCGM alone under the identities that NVML gave while it answered.

    Args:
        dcgm: A reading of DCGM alone, as ``joined`` makes it.
        before: The last one that NVML led.
        known_to_dcgm: UUIDs of GPUs that DCGM has ever told of.
        reason: Why NVML does not answer, in snake case.

    Returns:
        DCGM's values and conditions. A GPU that DCGM never knew is not missing for that: it has failed, with
        ``reason``. What NVML had said of one that was not up stays, as long as DCGM does not tell of it.
    """
    gpus = {gpu.gpu.uuid: gpu for gpu in before.gpus}
    named = [_named(gpu, gpus[gpu.gpu.uuid]) for gpu in dcgm.gpus if gpu.gpu.uuid in gpus]
    here = _uuids(dcgm.gpus)
    away = [gpu for uuid, gpu in gpus.items() if uuid not in here]
    unseen = [_unseen(gpu, reason) for gpu in away if gpu.gpu.uuid not in known_to_dcgm or gpu.state is not _UP]
    new = without_clashes([gpu for gpu in dcgm.gpus if gpu.gpu.uuid not in gpus], [*named, *unseen])
    return replace(
        dcgm,
        gpus=tuple(sorted([*named, *unseen, *new], key=_index)),
        driver_version=dcgm.driver_version or before.driver_version,
    )


def _supplemented(ours: GpuReading, theirs: GpuReading | None) -> GpuReading:
    """A GPU as NVML has it, with what else DCGM measured of it while it is up."""
    if theirs is None or ours.state is not _UP:
        return ours
    values, from_dcgm = _filled(ours.values, theirs.values)
    return replace(
        ours,
        values=values,
        from_dcgm=from_dcgm,
        instances=_instances(ours, theirs),
        profiling=theirs.profiling,
        # Texts that only DCGM has, where a collectors file asks for them.
        gpu=replace(ours.gpu, labels={**theirs.gpu.labels, **ours.gpu.labels}) if theirs.gpu.labels else ours.gpu,
    )


def _instances(ours: GpuReading, theirs: GpuReading) -> tuple[MigReading, ...]:
    """Instances as NVML has them, and DCGM's where NVML tells that there are some and not which.

    Beside instances that NVML tells, one that only DCGM knows is of a layout that is gone: with it the GPU would have
    more parts than it can have.
    """
    if not ours.instances:
        return tuple(map(_part_from_dcgm, theirs.instances)) if ours.gpu.mig_enabled else ()
    measured = {part.instance.uuid: part.values for part in theirs.instances}
    filled = []
    for part in ours.instances:
        values, from_dcgm = _filled(part.values, measured.get(part.instance.uuid, {}))
        filled.append(replace(part, values=values, from_dcgm=from_dcgm))
    return tuple(filled)


def _filled(ours: Values, theirs: Values) -> tuple[Values, frozenset[Field]]:
    added = {field: value for field, value in theirs.items() if field not in ours}
    return ({**ours, **added}, frozenset(added)) if added else (ours, frozenset())


def _all_from_dcgm(gpu: GpuReading) -> GpuReading:
    return replace(gpu, from_dcgm=frozenset(gpu.values), instances=tuple(map(_part_from_dcgm, gpu.instances)))


def _part_from_dcgm(part: MigReading) -> MigReading:
    return replace(part, from_dcgm=frozenset(part.values))


def _tells_anything(gpu: GpuReading) -> bool:
    """Return whether DCGM says more of a GPU than that it once was there."""
    if gpu.state is DeviceState.MISSING:
        return False
    return gpu.state is not _UP or bool(gpu.values) or any(part.values for part in gpu.instances)


def without_clashes(new: Iterable[GpuReading], there: Iterable[GpuReading]) -> Iterator[GpuReading]:
    """Return the new GPUs, each under its index, or under the next free one where another GPU has that already."""
    new = sorted(new, key=lambda gpu: (gpu.gpu.index, gpu.gpu.uuid))
    taken = {gpu.gpu.index for gpu in there}
    highest = max([*taken, *(gpu.gpu.index for gpu in new)], default=0)
    for gpu in new:
        if gpu.gpu.index in taken:
            highest += 1
            gpu = replace(gpu, gpu=replace(gpu.gpu, index=highest))  # noqa: PLW2901 - it goes on under this number
        taken.add(gpu.gpu.index)
        yield gpu


def _named(now: GpuReading, before: GpuReading) -> GpuReading:
    known = {part.instance.uuid: part.instance for part in before.instances}
    identity: Gpu = replace(before.gpu, mig_enabled=now.gpu.mig_enabled)
    parts = tuple(replace(part, instance=known.get(part.instance.uuid, part.instance)) for part in now.instances)
    return replace(now, gpu=identity, instances=parts)


def _unseen(gpu: GpuReading, reason: str) -> GpuReading:
    up = gpu.state is _UP
    return GpuReading(
        gpu=gpu.gpu,
        state=DeviceState.FAILED if up else gpu.state,
        reason=reason if up else gpu.reason,
        instances=tuple(MigReading(instance=part.instance) for part in gpu.instances),
        lacks_instances=gpu.lacks_instances,
    )


def _uuids(gpus: Iterable[GpuReading]) -> frozenset[str]:
    return frozenset(gpu.gpu.uuid for gpu in gpus)


def _index(gpu: GpuReading) -> int:
    return gpu.gpu.index

"""Merge of two readings: NVML decides which devices exist, DCGM supplies values that NVML lacks."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpu.merge import merge, of_one_machine
from exporter.model.devices import (
    DeviceState,
    Gpu,
    GpuReading,
    MigInstance,
    MigReading,
    ProcessUse,
    ProfilingState,
    Reading,
    XidEvent,
)
from exporter.model.fields import Field

Values = Mapping[Field, int | float]
ENGINE, UTIL, POWER = Field.PROF_GR_ENGINE_ACTIVE, Field.GPU_UTIL, Field.POWER_USAGE


def gpu(number: int, *, index: int | None = None, mig: bool = False, model: str = "A100") -> Gpu:
    return Gpu(
        uuid=f"GPU-{number}",
        index=number if index is None else index,
        minor=number,
        model=model,
        pci_bus_id=f"00000000:{number:02X}:00.0",
        mig_enabled=mig,
        compute_slices=7,
        memory_slices=8,
    )


def part(number: int, values: Values | None = None, *, profile_id: int | None = None) -> MigReading:
    one = MigInstance(
        uuid=f"MIG-{number}",
        parent_uuid="GPU-0",
        gpu_instance_id=number,
        compute_instance_id=0,
        profile="1g.10gb",
        compute_slices=1,
        memory_slices=1,
        profile_id=profile_id,
    )
    return MigReading(instance=one, values=values or {})


def reading(source: str, *gpus: GpuReading, at: float = 100.0, **facts: object) -> Reading:
    return Reading(
        source=source,
        taken_at_seconds=at,
        duration_seconds=0.01,
        steady_seconds=at,
        gpus=gpus,
        **facts,  # type: ignore[arg-type] # facts of the one dataclass
    )


def joined(nvml: Reading | None, dcgm: Reading | None) -> Reading:
    """Return the merge of both readings, without an earlier reading."""
    one, _ = merge(nvml, dcgm)
    assert one is not None
    return one


def of(number: int, values: Values | None = None, **facts: object) -> GpuReading:
    return GpuReading(gpu=gpu(number), values=values or {}, **facts)  # type: ignore[arg-type] # as above


def test_dcgm_adds_only_fields_that_nvml_did_not_measure() -> None:
    nvml = reading("nvml", of(0, {UTIL: 40, POWER: 300.0}))
    dcgm = reading("dcgm", of(0, {UTIL: 99, ENGINE: 0.4}, profiling=ProfilingState.RUNNING), dcgm_version="4.6.0")
    one = joined(nvml, dcgm)
    (both,) = one.gpus
    assert (dict(both.values), both.from_dcgm) == ({UTIL: 40, POWER: 300.0, ENGINE: 0.4}, frozenset({ENGINE}))
    assert (both.profiling, one.dcgm_version, one.source) == (ProfilingState.RUNNING, "4.6.0", "nvml")


def test_dcgm_reading_is_used_whole_and_marked_without_nvml() -> None:
    dcgm = reading("dcgm", of(0, {UTIL: 99}, instances=(part(1, {ENGINE: 0.5}),)))
    (alone,) = joined(None, dcgm).gpus
    assert (alone.from_dcgm, alone.instances[0].from_dcgm) == (frozenset({UTIL}), frozenset({ENGINE}))
    assert merge(None, None)[0] is None


@pytest.mark.parametrize("state", [state for state in DeviceState if state is not DeviceState.UP])
def test_gpu_lost_in_nvml_stays_lost_despite_dcgm_values(state: DeviceState) -> None:
    lost = of(0, state=state, reason="gpu_is_lost")
    dcgm = reading("dcgm", of(0, {UTIL: 5, ENGINE: 0.1}, profiling=ProfilingState.RUNNING))
    assert joined(reading("nvml", lost), dcgm).gpus == (lost,)


def test_nvml_decides_identity_processes_xids_and_errors() -> None:
    process = ProcessUse(pid=10)
    theirs = GpuReading(gpu=gpu(0, index=5, model="GRID"), values={ENGINE: 0.5}, processes=(ProcessUse(pid=99),))
    event = XidEvent(uuid="GPU-0", xid=31, at_seconds=1.0)
    nvml = reading("nvml", of(0, processes=(process,)), errors={"a": 1})
    one = joined(nvml, reading("dcgm", theirs, xids=(event,), errors={"b": 1}))
    assert (one.gpus[0].gpu, one.gpus[0].processes) == (gpu(0), (process,))
    assert (one.xids, one.errors) == ((), {"a": 1})


def test_dcgm_adds_missing_texts_and_nvml_texts_stay() -> None:
    chassis, serial = Field(30_001), Field.SERIAL
    ours = GpuReading(gpu=replace(gpu(0), labels={serial: "1"}))
    theirs = GpuReading(gpu=replace(gpu(0), labels={serial: "one", chassis: "C7"}))
    (both,) = joined(reading("nvml", ours), reading("dcgm", theirs)).gpus
    assert both.gpu.labels == {serial: "1", chassis: "C7"}


def test_instance_values_are_matched_by_uuid_not_by_number() -> None:
    nvml = reading("nvml", GpuReading(gpu=gpu(0, mig=True), instances=(part(7, {Field.FB_USED: 9}), part(8))))
    renamed = MigReading(instance=part(9).instance, values={ENGINE: 0.9})
    dcgm = reading("dcgm", GpuReading(gpu=gpu(0, mig=True), instances=(part(7, {ENGINE: 0.7}), renamed)))
    seven, eight = joined(nvml, dcgm).gpus[0].instances
    assert (dict(seven.values), seven.from_dcgm) == ({Field.FB_USED: 9, ENGINE: 0.7}, frozenset({ENGINE}))
    assert dict(eight.values) == {}


def test_dcgm_instances_are_used_if_nvml_lists_none_of_a_partitioned_gpu() -> None:
    dcgm = reading("dcgm", GpuReading(gpu=gpu(0, mig=True), instances=(part(7, {ENGINE: 0.7}),)))
    for mig, expected in ((True, ["MIG-7"]), (False, [])):
        one = joined(reading("nvml", GpuReading(gpu=gpu(0, mig=mig))), dcgm)
        assert [part.instance.uuid for part in one.gpus[0].instances] == expected


def test_gpu_known_only_to_dcgm_is_added_with_a_free_index() -> None:
    nvml = reading("nvml", of(0), of(1))
    dcgm = reading("dcgm", of(0), GpuReading(gpu=gpu(7, index=1), values={UTIL: 3}))
    one = joined(nvml, dcgm)
    assert [(each.gpu.uuid, each.gpu.index) for each in one.gpus] == [("GPU-0", 0), ("GPU-1", 1), ("GPU-7", 2)]
    assert one.gpus[2].from_dcgm == {UTIL}


def test_missing_or_lost_gpu_of_dcgm_is_not_added() -> None:
    assert len(joined(reading("nvml", of(0)), reading("dcgm", of(0), of(1))).gpus) == 1
    lost = of(1, state=DeviceState.LOST, reason="gpu_is_lost")
    assert joined(reading("nvml", of(0)), reading("dcgm", of(0), lost)).gpus[1] == lost
    removed = of(1, state=DeviceState.MISSING, reason="not_enumerated")
    assert len(joined(reading("nvml", of(0)), reading("dcgm", of(0), removed)).gpus) == 1


def test_dcgm_of_another_machine_adds_nothing() -> None:
    nvml, other = reading("nvml", of(0, {UTIL: 3})), reading("dcgm", of(5, {UTIL: 4}), dcgm_version="4.6.0")
    assert joined(nvml, other) == nvml
    assert not of_one_machine(nvml, other)
    assert of_one_machine(reading("nvml"), other), "an NVML without GPUs does not contradict the engine"


def test_gpus_keep_their_nvml_identities_while_nvml_is_unavailable() -> None:
    before = GpuReading(gpu=gpu(0, mig=True), instances=(part(1, profile_id=19),))
    _, memory = merge(reading("nvml", before, driver_version="590"), None)
    theirs = GpuReading(gpu=gpu(0, index=4, model="GRID", mig=True), instances=(part(1, {ENGINE: 0.5}), part(2)))
    now, _ = merge(None, reading("dcgm", theirs, at=101.0), memory, away="died")
    assert now is not None
    (one,) = now.gpus
    assert one.gpu == gpu(0, mig=True)
    assert [each.instance.profile_id for each in one.instances] == [19, None]
    assert (one.instances[0].from_dcgm, now.driver_version, now.source) == (frozenset({ENGINE}), "590", "dcgm")


def test_gpu_unknown_to_dcgm_stays_present_while_nvml_is_unavailable() -> None:
    lost = of(2, state=DeviceState.LOST, reason="gpu_is_lost")
    before = reading("nvml", of(0), of(1, {UTIL: 5}, instances=(part(1, {ENGINE: 1.0}),)), lost, of(3))
    _, memory = merge(before, reading("dcgm", of(0), of(3)))
    now, _ = merge(None, reading("dcgm", of(0), at=101.0), memory, away="died")
    assert now is not None
    assert [(each.gpu.uuid, each.state, each.reason) for each in now.gpus] == [
        ("GPU-0", DeviceState.UP, ""),
        ("GPU-1", DeviceState.FAILED, "died"),
        ("GPU-2", DeviceState.LOST, "gpu_is_lost"),
    ]
    assert (dict(now.gpus[1].values), now.gpus[1].instances) == ({}, (part(1),))


fields = st.sampled_from([ENGINE, UTIL, POWER, Field.FB_USED, Field.ENC_UTIL, Field(1076)])
values = st.dictionaries(fields, st.integers(0, 100), max_size=4)
states = st.sampled_from([DeviceState.UP, DeviceState.UP, DeviceState.UP, DeviceState.LOST])
parts = st.lists(st.tuples(st.integers(0, 3), values), max_size=3, unique_by=lambda one: one[0]).map(
    lambda rows: tuple(part(number, reported) for number, reported in rows)
)


@st.composite
def gpus(draw: st.DrawFn) -> tuple[GpuReading, ...]:
    rows = []
    numbers = sorted(draw(st.sets(st.integers(0, 4), max_size=4)))
    for index, number in enumerate(numbers):
        state, mig = draw(states), draw(st.booleans())
        up = state is DeviceState.UP
        device = gpu(number, index=draw(st.sampled_from([index, index, number])), mig=mig)
        instances = draw(parts) if mig else ()
        rows.append(GpuReading(gpu=device, state=state, values=draw(values) if up else {}, instances=instances))
    return tuple(sorted({row.gpu.index: row for row in rows}.values(), key=lambda row: row.gpu.index))


@given(ours=gpus(), theirs=gpus())
def test_merge_keeps_every_value_and_the_identities_of_nvml(
    ours: tuple[GpuReading, ...], theirs: tuple[GpuReading, ...]
) -> None:
    nvml, dcgm = reading("nvml", *ours), reading("dcgm", *theirs)
    one = joined(nvml, dcgm)
    assert joined(nvml, dcgm) == one, "the inputs stay unchanged"
    by_uuid = {each.gpu.uuid: each for each in one.gpus}
    engine = {each.gpu.uuid: each for each in theirs}
    known = engine if of_one_machine(nvml, dcgm) else {}
    assert len(by_uuid) == len(one.gpus)
    indexes = [each.gpu.index for each in one.gpus]
    assert indexes == sorted(set(indexes)), "GPUs are sorted by a unique index"
    for before in ours:
        after = by_uuid[before.gpu.uuid]
        assert (after.gpu, after.state) == (before.gpu, before.state)
        beside = known.get(before.gpu.uuid, GpuReading(gpu=before.gpu))
        up = before.state is DeviceState.UP
        check_values(before.values, beside.values if up else {}, after.values, after.from_dcgm)
        reported = {one.instance.uuid: one.values for one in beside.instances} if up else {}
        if before.instances:
            assert [one.instance for one in after.instances] == [one.instance for one in before.instances]
            for own, made in zip(before.instances, after.instances, strict=True):
                check_values(own.values, reported.get(own.instance.uuid, {}), made.values, made.from_dcgm)
    if of_one_machine(nvml, dcgm):
        unknown = {each.gpu.uuid for each in theirs} - {each.gpu.uuid for each in ours}
        for uuid in unknown:
            told_anything = engine[uuid].values or any(one.values for one in engine[uuid].instances)
            if told_anything or engine[uuid].state is not DeviceState.UP:
                assert by_uuid[uuid].values == engine[uuid].values
    else:
        assert one.gpus == ours


def check_values(ours: Values, theirs: Values, made: Values, from_dcgm: frozenset[Field]) -> None:
    assert made == {**theirs, **ours}
    assert from_dcgm == theirs.keys() - ours.keys()

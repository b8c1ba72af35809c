"""Activity: which signal counts, when signals contradict each other, and how it is divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.accounting.activity import (
    CONTRADICTING_SAMPLES,
    CONTRADICTING_SAMPLES_ACROSS,
    ActivityJudge,
    Judgement,
    Samples,
    judge_sample,
    partitioned_activity,
    split_activity,
)
from exporter.model import Activity, ActivitySource, Field, Gpu, Holder, ShareMode


def holder(name: str, share: float = 1.0) -> Holder:
    return Holder(
        namespace="ml",
        pod=name,
        container="main",
        device_uuid="GPU-0",
        mode=ShareMode.EXCLUSIVE if share == 1 else ShareMode.SHARED,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=share,
        device_share_ratio=share,
    )


def test_the_engine_counter_wins_over_utilisation() -> None:
    judged = judge_sample({Field.PROF_GR_ENGINE_ACTIVE: 0.4, Field.GPU_UTIL: 100})
    assert judged.activity == Activity(ratio=0.4, source=ActivitySource.ENGINE)


def test_utilisation_serves_where_there_is_no_engine_counter() -> None:
    assert judge_sample({Field.GPU_UTIL: 37}).activity == Activity(ratio=0.37, source=ActivitySource.UTILISATION)


def test_a_contradiction_across_sources_is_one_too_after_dcgm_s_delay() -> None:
    judge = ActivityJudge()
    lie = {Field.PROF_GR_ENGINE_ACTIVE: 0.0, Field.GPU_UTIL: 99}
    told = frozenset({Field.PROF_GR_ENGINE_ACTIVE})
    reasons = [judge.judge("GPU-0", lie, from_dcgm=told).reason for _ in range(CONTRADICTING_SAMPLES_ACROSS)]
    assert reasons == [*[""] * (CONTRADICTING_SAMPLES_ACROSS - 1), "contradiction"]
    alone = ActivityJudge()
    both = frozenset({Field.PROF_GR_ENGINE_ACTIVE, Field.GPU_UTIL})
    reasons = [alone.judge("GPU-0", lie, from_dcgm=both).reason for _ in range(CONTRADICTING_SAMPLES)]
    assert reasons[-1] == "contradiction", "one source's own figures are of one time"


@pytest.mark.parametrize(
    ("from_dcgm", "measured_by"),
    [({Field.PROF_GR_ENGINE_ACTIVE}, "dcgm"), ({Field.GPU_UTIL, Field.ENC_UTIL}, "nvml"), (set(), "nvml")],
)
def test_who_measured_it_is_who_told_the_figure_that_counts(from_dcgm: set[Field], measured_by: str) -> None:
    values = {Field.PROF_GR_ENGINE_ACTIVE: 0.4, Field.GPU_UTIL: 100, Field.ENC_UTIL: 10}
    activity = judge_sample(values, frozenset(from_dcgm)).activity
    assert activity is not None
    assert activity.measured_by == measured_by
    parts = split_activity(activity, [holder("a", 0.5), holder("b", 0.5)], None).parts
    assert {part.measured_by for part in parts if part} == {measured_by}


def test_a_codec_s_figure_and_a_utilisation_are_their_own_sources() -> None:
    told = frozenset({Field.ENC_UTIL, Field.GPU_UTIL})
    for values in ({Field.GPU_UTIL: 40}, {Field.PROF_GR_ENGINE_ACTIVE: 0.1, Field.ENC_UTIL: 60, Field.DEC_UTIL: 5}):
        activity = judge_sample(values, told).activity
        assert activity is not None
        assert activity.measured_by == "dcgm"


def test_the_mean_of_a_partitioned_gpu_is_dcgm_s_as_soon_as_one_instance_is() -> None:
    board = Gpu(uuid="GPU-0", index=0, minor=0, model="A100", pci_bus_id="", mig_enabled=True, compute_slices=7)
    parts = [
        (3, Judgement(activity=Activity(ratio=0.5, source=ActivitySource.ENGINE, measured_by="dcgm"))),
        (4, Judgement(activity=Activity(ratio=0.5, source=ActivitySource.ENGINE))),
    ]
    mean = partitioned_activity(board, Judgement(activity=None, reason="no_source"), parts).activity
    assert mean is not None
    assert mean.ratio == pytest.approx(0.5)
    assert mean.measured_by == "dcgm"


def test_a_transcoder_is_not_idle() -> None:
    judged = judge_sample({Field.GPU_UTIL: 2, Field.ENC_UTIL: 71, Field.DEC_UTIL: 30})
    assert judged.activity == Activity(ratio=0.71, source=ActivitySource.CODEC)


@pytest.mark.parametrize("values", [{}, {Field.POWER_USAGE: 300.0}, {Field.ENC_UTIL: 0, Field.DEC_UTIL: 0}])
def test_without_a_compute_signal_activity_is_unknown_and_never_zero(values: dict[Field, float]) -> None:
    assert judge_sample(values) == Judgement(activity=None, reason="no_source")


def test_an_engine_counter_that_stays_dead_at_high_utilisation_becomes_unknown() -> None:
    judge = ActivityJudge()
    lie = {Field.PROF_GR_ENGINE_ACTIVE: 0.0, Field.GPU_UTIL: 99}
    judged = [judge.judge("GPU-0", lie).reason for _ in range(CONTRADICTING_SAMPLES)]
    assert judged == ["", "", "contradiction"]
    assert judge.judge("GPU-0", {Field.PROF_GR_ENGINE_ACTIVE: 0.9, Field.GPU_UTIL: 99}).reason == ""
    assert judge.judge("GPU-0", lie).reason == "", "a lag of one sample after work has stopped is no contradiction"


def test_a_busy_gpu_without_process_and_memory_becomes_unknown() -> None:
    judge = ActivityJudge()
    stuck = {Field.GPU_UTIL: 100, Field.FB_USED: 3}
    assert [judge.judge("GPU-0", stuck, process_count=0).reason for _ in range(3)][-1] == "contradiction"
    fresh = ActivityJudge()
    hidden = [fresh.judge("GPU-0", stuck, process_count=0, process_list_reliable=False).reason for _ in range(5)]
    assert set(hidden) == {""}, "in a PID namespace of our own the empty list proves nothing"


def test_a_contradiction_is_counted_once_per_device_when_it_makes_it_unknown_and_again_when_it_is_back() -> None:
    judge = ActivityJudge()
    lie, truth = {Field.PROF_GR_ENGINE_ACTIVE: 0.0, Field.GPU_UTIL: 99}, {Field.GPU_UTIL: 99}
    counted = []
    for values in (*[lie] * 5, truth, *[lie] * 4):
        for uuid in ("GPU-0", "GPU-1"):
            judge.judge(uuid, values)
        counted.append(judge.errors["activity", "contradiction"])
    assert counted == [0, 0, 2, 2, 2, 2, 2, 2, 4, 4]
    judge.forget(frozenset({"GPU-0"}))
    for _ in range(3):
        judge.judge("GPU-0", lie)
        judge.judge("GPU-1", lie)
    assert judge.errors["activity", "contradiction"] == 5, "one that lasts goes on, one of a new device is new"


def test_a_partitioned_gpu_is_the_slice_weighted_mean_of_its_instances() -> None:
    gpu = Gpu(uuid="G", index=0, minor=0, model="H100", pci_bus_id="0", mig_enabled=True, compute_slices=7)
    unknown = Judgement(activity=None, reason="no_source")

    def engine(ratio: float) -> Judgement:
        return Judgement(activity=Activity(ratio=ratio, source=ActivitySource.ENGINE))

    whole = partitioned_activity(gpu, unknown, [(3, engine(1.0)), (2, engine(0.5))])
    assert whole.activity is not None
    assert whole.activity.ratio == pytest.approx(4 / 7)
    assert partitioned_activity(gpu, unknown, [(3, engine(1.0)), (2, unknown)]).activity is None
    assert partitioned_activity(gpu, unknown, [(3, engine(1.0))], lacks_some=True) == unknown
    assert partitioned_activity(gpu, engine(0.5), [(3, engine(1.0))], lacks_some=True) == engine(0.5)


def test_sharers_get_their_part_by_process_samples() -> None:
    device = Activity(ratio=0.8, source=ActivitySource.UTILISATION)
    split = split_activity(device, [holder("a", 0.25), holder("b", 0.25)], Samples(by_holder=(0.3, 0.1), others=0.0))
    assert [part.ratio for part in split.parts if part] == pytest.approx([0.6, 0.2])
    assert {part.source for part in split.parts if part} == {ActivitySource.PROCESS_SAMPLES}


def test_without_process_data_the_parts_are_by_share_and_say_so() -> None:
    device = Activity(ratio=0.6, source=ActivitySource.UTILISATION)
    split = split_activity(device, [holder("a", 0.5), holder("b", 0.25)], None)
    assert [part.ratio for part in split.parts if part] == pytest.approx([0.4, 0.2])
    assert {part.source for part in split.parts if part} == {ActivitySource.ESTIMATED}


def test_silent_samples_on_a_busy_device_do_not_make_its_sharers_idle() -> None:
    device = Activity(ratio=0.9, source=ActivitySource.ENGINE)
    split = split_activity(device, [holder("a", 0.5), holder("b", 0.5)], Samples(by_holder=(0.0, 0.0), others=0.0))
    assert [part.ratio for part in split.parts if part] == pytest.approx([0.45, 0.45])


def test_a_foreign_process_on_an_exclusive_gpu_is_not_its_holders_activity() -> None:
    device = Activity(ratio=1.0, source=ActivitySource.ENGINE)
    split = split_activity(device, [holder("a")], Samples(by_holder=(0.0,), others=0.9))
    assert split.parts[0] == Activity(ratio=0.0, source=ActivitySource.PROCESS_SAMPLES)
    assert split.remainder_ratio == pytest.approx(1.0)


ratios = st.floats(0, 1)


@given(
    device=st.one_of(st.none(), ratios),
    shares=st.lists(st.floats(0.01, 1), max_size=5),
    samples=st.one_of(st.none(), st.lists(ratios, min_size=5, max_size=5)),
    others=ratios,
)
def test_parts_and_remainder_always_sum_to_the_device(
    device: float | None, shares: list[float], samples: list[float] | None, others: float
) -> None:
    activity = None if device is None else Activity(ratio=device, source=ActivitySource.ENGINE)
    holders = [holder(f"p{i}", share) for i, share in enumerate(shares)]
    given_samples = None if samples is None else Samples(by_holder=tuple(samples[: len(holders)]), others=others)
    split = split_activity(activity, holders, given_samples)
    assert len(split.parts) == len(holders)
    if activity is None:
        assert split.remainder_ratio is None
        assert set(split.parts) <= {None}
    else:
        assert split.remainder_ratio is not None
        total = sum(part.ratio for part in split.parts if part) + split.remainder_ratio
        assert total == pytest.approx(activity.ratio, abs=1e-12)
        assert all(part is not None and 0 <= part.ratio <= 1 for part in split.parts)

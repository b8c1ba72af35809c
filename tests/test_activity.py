"""Activity: which signal counts, what happens if signals contradict each other, and how activity is divided."""

from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exporter.accounting.activity import (
    ENGINES,
    ActivityJudge,
    DeviceLevel,
    EngineClass,
    Judgement,
    Observation,
    SampledUse,
    Split,
    engines_of,
    partitioned_activity,
    samples_cover,
    split_activity,
)
from exporter.model.attribution import Holder, ShareMode
from exporter.model.devices import Gpu, ProcessUse
from exporter.model.fields import DECODERS, Field
from exporter.model.snapshot import Activity, ActivitySource

DCGM = frozenset({Field.PROF_GR_ENGINE_ACTIVE})
CODECS_AT_REST = {Field.ENC_UTIL: 0, Field.DEC_UTIL: 0, Field.JPG_UTIL: 0, Field.OFA_UTIL: 0}


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


def judge_values(values: Mapping[Field, float], from_dcgm: frozenset[Field] = frozenset()) -> Judgement:
    return Track(from_dcgm=from_dcgm).see(values)[0]


def test_engine_counter_takes_precedence_over_utilisation() -> None:
    judged = judge_values({Field.PROF_GR_ENGINE_ACTIVE: 0.4, Field.GPU_UTIL: 100})
    assert judged.activity == Activity(ratio=0.4, source=ActivitySource.ENGINE)


def test_utilisation_is_used_without_an_engine_counter() -> None:
    assert judge_values({Field.GPU_UTIL: 37}).activity == Activity(ratio=0.37, source=ActivitySource.UTILISATION)


@pytest.mark.parametrize(
    ("from_dcgm", "measured_by"),
    [({Field.PROF_GR_ENGINE_ACTIVE}, "dcgm"), ({Field.GPU_UTIL, Field.ENC_UTIL}, "nvml"), (set(), "nvml")],
)
def test_measured_by_is_the_source_of_the_figure_used(from_dcgm: set[Field], measured_by: str) -> None:
    values = {Field.PROF_GR_ENGINE_ACTIVE: 0.4, Field.GPU_UTIL: 100, Field.ENC_UTIL: 10}
    activity = judge_values(values, frozenset(from_dcgm)).activity
    assert activity is not None
    assert activity.measured_by == measured_by
    parts = split_activity(activity, [holder("a", 0.5), holder("b", 0.5)], None).parts
    assert {part.measured_by for part in parts if part} == {measured_by}


def test_measured_by_of_a_codec_or_utilisation_figure_is_its_own_source() -> None:
    reported = frozenset({Field.ENC_UTIL, Field.GPU_UTIL})
    for values in ({Field.GPU_UTIL: 40}, {Field.PROF_GR_ENGINE_ACTIVE: 0.1, Field.ENC_UTIL: 60, Field.DEC_UTIL: 5}):
        activity = judge_values(values, reported).activity
        assert activity is not None
        assert activity.measured_by == "dcgm"


def test_partitioned_gpu_mean_is_measured_by_dcgm_if_any_instance_is() -> None:
    board = Gpu(uuid="GPU-0", index=0, minor=0, model="A100", pci_bus_id="", mig_enabled=True, compute_slices=7)
    parts = [
        (3, Judgement(activity=Activity(ratio=0.5, source=ActivitySource.ENGINE, measured_by="dcgm"))),
        (4, Judgement(activity=Activity(ratio=0.5, source=ActivitySource.ENGINE))),
    ]
    mean = partitioned_activity(board, Judgement(activity=None, reason="no_source"), parts, idle_below=0.05).activity
    assert mean is not None
    assert mean.ratio == pytest.approx(0.5)
    assert mean.measured_by == "dcgm"


def test_transcoding_gpu_is_not_idle() -> None:
    judged = judge_values({Field.GPU_UTIL: 2, Field.ENC_UTIL: 71, Field.DEC_UTIL: 30})
    assert judged.activity == Activity(ratio=0.71, source=ActivitySource.CODEC)


@pytest.mark.parametrize("values", [{}, {Field.POWER_USAGE: 300.0}, {Field.ENC_UTIL: 0, Field.DEC_UTIL: 0}])
def test_activity_without_a_compute_signal_is_unknown_and_never_zero(values: dict[Field, float]) -> None:
    assert judge_values(values) == Judgement(activity=None, reason="no_source")


class Track:
    """One device, with a judgement each second."""

    def __init__(self, **facts: object) -> None:
        self.judge = ActivityJudge()
        self.facts = facts
        self.at_seconds = 1000.0
        self.interval_seconds = 1.0

    def see(self, values: Mapping[Field, float], seconds: int = 1, **facts: object) -> list[Judgement]:
        seen = []
        for _ in range(seconds):
            self.at_seconds += self.interval_seconds
            sample = Observation(
                **{"uuid": "GPU-0", "at_seconds": self.at_seconds, "values": values, **self.facts, **facts}  # type: ignore[arg-type]
            )
            seen.append(self.judge.judge(sample, idle_below=0.05))
        return seen

    def counted(self, reason: str) -> int:
        return self.judge.errors["activity", reason]


def reading(engine: float, utilisation: float, **others: float) -> dict[Field, float]:
    reported = {Field.PROF_GR_ENGINE_ACTIVE: engine, Field.GPU_UTIL: utilisation, **CODECS_AT_REST}
    return {**reported, **{Field[name]: value for name, value in others.items()}}


@pytest.mark.parametrize("from_dcgm", [frozenset(), DCGM], ids=["one source", "two sources"])
@pytest.mark.parametrize("utilisation", [[99], [45], [99, 30, 99, 99, 30, 99], [99, 99, 99, 99, 99, 42], [12]], ids=str)
def test_dead_engine_counter_with_utilisation_is_a_contradiction(
    utilisation: list[int], from_dcgm: frozenset[Field]
) -> None:
    device = Track(from_dcgm=from_dcgm)
    reasons = [device.see(reading(0.0, utilisation[second % len(utilisation)]))[0].reason for second in range(1200)]
    begins = reasons.index("contradiction")
    assert begins <= (150 if utilisation == [12] else 20), "the mean must reach 10 % first"
    assert set(reasons[begins:]) == {"contradiction"}
    assert device.counted("contradiction") == 1


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("idle", [reading(0.0, 0)]),
        ("idle, a beat of the driver", [reading(0.0, 1)] * 9 + [reading(0.0, 9)]),
        ("low engine activity in long kernels", [reading(0.12, 99)]),
        ("bursts, one sample late in NVML", [reading(0.9, 0), reading(0.0, 90), *[reading(0.0, 0)] * 28]),
        (
            "bursts, three samples late in DCGM",
            [*[reading(0.0, 99)] * 3, *[reading(0.99, 99)] * 7] + [reading(0.99, 0)] * 3,
        ),
        ("a job that ends and starts", [reading(0.95, 95)] * 600 + [reading(0.0, 95)] + [reading(0.0, 0)] * 600),
    ],
)
def test_readings_that_agree_on_average_are_no_contradiction(name: str, seconds: list[dict[Field, float]]) -> None:
    device = Track()
    reasons = {device.see(seconds[second % len(seconds)])[0].reason for second in range(3600)}
    assert reasons == {""}, name


def test_first_reading_and_reading_after_a_long_gap_are_no_contradiction() -> None:
    device = Track()
    stopped = reading(0.0, 99)  # of work that has just ended
    assert device.see(stopped)[0].reason == ""
    device.at_seconds += 3600
    assert device.see(stopped)[0].reason == ""
    assert {judged.reason for judged in device.see(reading(0.0, 0), 300)} == {""}


@pytest.mark.parametrize("interval_seconds", [1.0, 10.0, 60.0, 300.0])
def test_sparse_samples_at_a_job_start_are_no_contradiction(interval_seconds: float) -> None:
    device = Track()
    device.interval_seconds = interval_seconds
    for values in (reading(0.0, 0), reading(0.05, 100), reading(1.0, 100), reading(0.02, 0), reading(0.02, 100)):
        assert device.see(values)[0].reason == "", values
    device.see(reading(0.0, 0), 20)
    assert device.see(reading(0.0, 45), 20)[-1].reason == "contradiction"


def test_partitioned_gpu_without_utilisation_has_no_contradiction() -> None:
    device = Track(level=DeviceLevel.PARTITIONED_GPU, model="NVIDIA H100 80GB HBM3")
    assert {judged.reason for judged in device.see({Field.PROF_GR_ENGINE_ACTIVE: 0.0}, 300)} == {""}


def test_contradiction_ends_when_readings_agree_and_is_counted_again() -> None:
    device = Track()
    device.see(reading(0.0, 90), 600)
    healed = device.see(reading(0.9, 90), 60)
    assert [judged.reason for judged in healed[10:]] == [""] * 50
    device.see(reading(0.0, 90), 600)
    assert device.counted("contradiction") == 2


def test_busy_gpu_without_process_and_memory_is_unknown() -> None:
    stuck = {Field.GPU_UTIL: 100, Field.FB_USED: 3, **CODECS_AT_REST}
    device = Track(process_count=0)
    assert device.see(stuck, 30)[-1].reason == "contradiction"
    assert device.see({**stuck, Field.FB_USED: 900}, process_count=1)[0].reason == "", (
        "a process explains the utilisation"
    )
    hidden = Track(process_count=None)
    assert {judged.reason for judged in hidden.see(stuck, 300)} == {""}, (
        "without a reliable list there is no contradiction"
    )
    ended = Track()
    ended.see({**stuck, Field.FB_USED: 900}, 600, process_count=1)
    assert {judged.reason for judged in ended.see(stuck, 3, process_count=0)} == {""}, "utilisation lags"


def test_contradiction_of_a_forgotten_device_is_counted_again() -> None:
    device = Track()
    device.see(reading(0.0, 99), 60)
    device.judge.forget(frozenset({"GPU-0"}))
    device.see(reading(0.0, 99), 60)
    assert device.counted("contradiction") == 1
    device.judge.forget(frozenset())
    device.see(reading(0.0, 99), 60)
    assert device.counted("contradiction") == 2


INSTANCE = {"level": DeviceLevel.INSTANCE, "uuid": "MIG-0"}
IDLE_ENGINE = {Field.PROF_GR_ENGINE_ACTIVE: 0.01}


def test_instance_that_decodes_video_is_busy() -> None:
    device = Track(**INSTANCE, model="NVIDIA H100 80GB HBM3")
    judged = device.see({**IDLE_ENGINE, DECODERS[0]: 0.1, DECODERS[3]: 0.9})[0]
    assert judged == Judgement(activity=Activity(ratio=0.9, source=ActivitySource.CODEC))


def test_instance_with_unmeasured_codecs_is_idle_and_counted_incomplete() -> None:
    device = Track(**INSTANCE, model="NVIDIA A100-SXM4-40GB", from_dcgm=DCGM, process_count=2)
    assert {judged.reason for judged in device.see(IDLE_ENGINE, 3600)} == {""}
    assert device.counted("incomplete") == 1


def test_new_gpu_is_not_idle_before_dcgm_reports_its_codecs() -> None:
    device = Track(model="NVIDIA H200", from_dcgm=frozenset({Field.GPU_UTIL}))
    judged = [one.reason for one in device.see({Field.GPU_UTIL: 4}, 10)]
    assert judged[:5] == ["incomplete"] * 5
    assert set(judged[6:]) == {""}


@pytest.mark.parametrize("before", [{}, {Field.GPU_UTIL: 0, **CODECS_AT_REST}], ids=["never measured", "idle before"])
def test_gpu_with_returning_values_is_not_idle_before_dcgm_reports_its_codecs(before: dict[Field, float]) -> None:
    device = Track(model="NVIDIA H200", from_dcgm=frozenset({Field.GPU_UTIL}))
    device.see(before)
    assert {one.reason for one in device.see({}, 120)} == {"no_source"}, "listed, but without values"
    assert [one.reason for one in device.see({Field.GPU_UTIL: 4}, 7)] == ["incomplete"] * 5 + [""] * 2
    device.judge.interrupt(["GPU-0", "GPU-1"])
    assert device.see({Field.GPU_UTIL: 4})[0].reason == "incomplete", "it was down between two readings"


def test_new_instance_measured_by_dcgm_is_not_idle_before_nvml_reports_codecs() -> None:
    device = Track(**INSTANCE, model="NVIDIA H100 80GB HBM3", from_dcgm=DCGM, process_count=2)
    judged = [one.reason for one in device.see(IDLE_ENGINE, 10)]
    assert judged[:5] == ["incomplete"] * 5
    assert set(judged[6:]) == {""}


def test_unmeasured_codec_makes_an_instance_unknown_while_the_gpu_uses_it() -> None:
    device = Track(**INSTANCE, model="NVIDIA A100-SXM4-40GB", from_dcgm=DCGM, process_count=2)
    decodes = {DECODERS[2]: 0.4}
    assert device.see(IDLE_ENGINE, parent_values=decodes)[0].reason == "incomplete"
    assert device.see(IDLE_ENGINE, parent_values=decodes, process_count=None)[0].reason == "incomplete"
    assert device.see(IDLE_ENGINE, parent_values=decodes, process_count=0)[0].reason == "", (
        "no process is in the instance"
    )
    assert device.see(IDLE_ENGINE, parent_values={DECODERS[2]: 0.0})[0].reason == ""
    busy = device.see({Field.PROF_GR_ENGINE_ACTIVE: 0.3}, parent_values=decodes)[0].activity
    assert busy == Activity(ratio=0.3, source=ActivitySource.ENGINE, measured_by="dcgm"), (
        "an activity above the threshold is not idle"
    )


def test_single_failed_codec_reading_makes_one_sample_unknown() -> None:
    device = Track(model="NVIDIA L40S")
    idle = {Field.GPU_UTIL: 0, **CODECS_AT_REST}
    failing = {key: value for key, value in idle.items() if key is not Field.DEC_UTIL}
    judged = [device.see(values)[0].reason for values in (idle, failing, idle, {**failing, Field.GPU_UTIL: 40})]
    assert judged == ["", "incomplete", "", ""]
    assert device.counted("incomplete") == 0


def test_unmeasured_codec_of_a_gpu_without_processes_is_idle() -> None:
    device = Track(model="NVIDIA L40S")
    device.see({Field.GPU_UTIL: 0, **CODECS_AT_REST, Field.JPG_UTIL: 80}, 10)
    without = {Field.GPU_UTIL: 0, Field.ENC_UTIL: 0, Field.DEC_UTIL: 0, Field.OFA_UTIL: 0}
    assert device.see(without, process_count=1)[0].reason == "incomplete"
    assert device.see(without, process_count=0)[0].activity is not None
    assert device.see({**without, Field.FB_USED: 3}, process_count=0)[0].activity is not None
    hidden = device.see({**without, Field.FB_USED: 4096}, process_count=0)
    assert hidden[0].reason == "incomplete", "used memory belongs to an unlisted process"


def test_codec_no_longer_measured_is_unknown_only_if_it_was_in_use() -> None:
    for percent, later in ((80, "incomplete"), (0, "")):
        device = Track(model="NVIDIA L40S")
        device.see({Field.GPU_UTIL: 0, **CODECS_AT_REST, Field.JPG_UTIL: percent}, 10)
        others = {Field.GPU_UTIL: 0, Field.ENC_UTIL: 0, Field.DEC_UTIL: 0, Field.OFA_UTIL: 0}
        assert device.see(others, 120)[-1].reason == later
        assert device.counted("incomplete") == 1


@pytest.mark.parametrize(
    ("model", "lacks"),
    [
        ("Tesla T4", {EngineClass.JPEG, EngineClass.OPTICAL_FLOW}),
        ("Tesla V100-SXM2-32GB", {EngineClass.JPEG, EngineClass.OPTICAL_FLOW}),
        ("NVIDIA A10", {EngineClass.JPEG}),
        ("NVIDIA A100-SXM4-40GB", {EngineClass.ENCODE}),
        ("NVIDIA H100 80GB HBM3", {EngineClass.ENCODE}),
        ("NVIDIA L40S", set()),
        ("NVIDIA RTX A4000", {EngineClass.JPEG}),
        ("NVIDIA RTX 6000 Ada Generation", set()),
        ("NVIDIA RTX 4000 SFF Ada Generation", set()),
    ],
)
def test_engines_missing_from_a_model_are_not_awaited(model: str, lacks: set[EngineClass]) -> None:
    has = {row.engine for row in engines_of(DeviceLevel.GPU, model)}
    assert {row.engine for row in ENGINES} - has == lacks
    device = Track(model=model)
    fields = {Field.GPU_UTIL: 0, **CODECS_AT_REST}
    names = {
        EngineClass.ENCODE: Field.ENC_UTIL,
        EngineClass.JPEG: Field.JPG_UTIL,
        EngineClass.OPTICAL_FLOW: Field.OFA_UTIL,
    }
    for engine in lacks:
        del fields[names[engine]]
    assert {judged.reason for judged in device.see(fields, 300)} == {""}
    assert device.counted("incomplete") == 0


@pytest.mark.parametrize(
    ("values", "sampled", "covered"),
    [
        ({Field.GPU_UTIL: 40}, {"sm_ratio": 0.4}, True),
        ({Field.GPU_UTIL: 40, Field.JPG_UTIL: 0, Field.OFA_UTIL: 0}, {"sm_ratio": 0.4}, True),
        ({Field.GPU_UTIL: 40, Field.JPG_UTIL: 1}, {"sm_ratio": 0.4}, False),
        ({Field.GPU_UTIL: 40, Field.OFA_UTIL: 90}, {"sm_ratio": 0.4, "jpg_ratio": 0.0}, False),
        ({Field.GPU_UTIL: 40, Field.JPG_UTIL: 90}, {"sm_ratio": 0.4, "jpg_ratio": 0.9}, True),
        ({Field.GPU_UTIL: 40}, {}, False),
        ({Field.PROF_GR_ENGINE_ACTIVE: 0.4}, {}, False),
    ],
)
def test_process_samples_cover_a_device_if_they_cover_every_engine_in_use(
    values: dict[Field, float], sampled: dict[str, float], *, covered: bool
) -> None:
    one = ProcessUse(pid=1, **sampled)  # type: ignore[arg-type] # a table
    assert samples_cover(values, [one, one]) is covered
    assert samples_cover(values, [])


def test_partitioned_gpu_activity_is_the_slice_weighted_mean_of_instances() -> None:
    gpu = Gpu(uuid="G", index=0, minor=0, model="H100", pci_bus_id="0", mig_enabled=True, compute_slices=7)
    unknown = Judgement(activity=None, reason="no_source")

    def engine(ratio: float) -> Judgement:
        return Judgement(activity=Activity(ratio=ratio, source=ActivitySource.ENGINE))

    whole = partitioned_activity(gpu, unknown, [(3, engine(1.0)), (2, engine(0.5))], idle_below=0.05)
    assert whole.activity is not None
    assert whole.activity.ratio == pytest.approx(4 / 7)
    assert partitioned_activity(gpu, unknown, [(3, engine(1.0)), (2, unknown)], idle_below=0.05).activity is None
    lacking = partial(partitioned_activity, gpu, instances=[(3, engine(1.0))], idle_below=0.05, lacks_some=True)
    assert lacking(unknown) == unknown
    assert lacking(engine(0.5)) == engine(0.5)
    assert lacking(engine(0.04)) == Judgement(activity=None, reason="incomplete")


def test_instance_codecs_count_for_their_gpu() -> None:
    gpu = Gpu(uuid="G", index=0, minor=0, model="H100", pci_bus_id="0", mig_enabled=True, compute_slices=7)
    own = Judgement(activity=Activity(ratio=0.01, source=ActivitySource.ENGINE))
    codec = Judgement(activity=Activity(ratio=0.7, source=ActivitySource.CODEC))
    decoding = partitioned_activity(gpu, own, [(3, codec), (3, own)], idle_below=0.05).activity
    assert decoding == Activity(ratio=pytest.approx(2.13 / 7), source=ActivitySource.CODEC)
    assert partitioned_activity(gpu, own, [(3, own), (3, own)], idle_below=0.05) == own


def test_partitioned_gpu_is_not_idle_while_one_instance_is_unknown() -> None:
    """The GPU's engine counter does not show the decoders of an instance that has just been created."""
    gpu = Gpu(uuid="G", index=0, minor=0, model="H100", pci_bus_id="0", mig_enabled=True, compute_slices=7)
    idle, busy = (Judgement(activity=Activity(ratio=ratio, source=ActivitySource.ENGINE)) for ratio in (0.01, 0.4))
    unknown = Judgement(activity=None, reason="no_source")
    parts = [(3, idle), (3, unknown)]
    assert partitioned_activity(gpu, idle, parts, idle_below=0.05) == Judgement(activity=None, reason="incomplete")
    assert partitioned_activity(gpu, busy, parts, idle_below=0.05) == busy


def sampled(ratio: float, *holders: Holder, known: bool = True) -> SampledUse:
    return SampledUse(holders=holders, ratio=ratio, known=known)


def ratios_of(split: Split) -> list[float]:
    return [part.ratio for part in split.parts if part]


def sources_of(split: Split) -> list[str]:
    return [part.source for part in split.parts if part]


HALF_A, HALF_B = holder("a", 0.5), holder("b", 0.5)
QUARTERS = [holder(name, 0.25) for name in "abcd"]


def test_shared_activity_is_split_by_process_samples() -> None:
    device = Activity(ratio=0.8, source=ActivitySource.UTILISATION)
    split = split_activity(device, [HALF_A, HALF_B], [sampled(0.3, HALF_A), sampled(0.1, HALF_B)])
    assert ratios_of(split) == pytest.approx([0.6, 0.2])
    assert set(sources_of(split)) == {ActivitySource.PROCESS_SAMPLES}
    assert [pytest.approx((ratio, ratio)) for ratio in ratios_of(split)] == list(split.bounds)


def test_split_of_an_idle_device_without_samples_is_estimated() -> None:
    device = Activity(ratio=0.0, source=ActivitySource.ENGINE)
    split = split_activity(device, [HALF_A, HALF_B], None)
    assert [(part.ratio, part.source) for part in split.parts if part] == [(0.0, ActivitySource.ESTIMATED)] * 2
    assert split.bounds == ((0.0, 0.0), (0.0, 0.0)), "both are known to be idle"


def test_split_without_process_data_is_by_share_and_estimated() -> None:
    device = Activity(ratio=0.6, source=ActivitySource.UTILISATION)
    split = split_activity(device, [holder("a", 0.5), holder("b", 0.25)], None)
    assert ratios_of(split) == pytest.approx([0.4, 0.2])
    assert set(sources_of(split)) == {ActivitySource.ESTIMATED}
    assert split.bounds == ((0.0, pytest.approx(0.6)),) * 2, "either pod may have all of it"


def test_zero_process_samples_on_a_busy_device_do_not_make_sharers_idle() -> None:
    device = Activity(ratio=0.9, source=ActivitySource.ENGINE)
    split = split_activity(device, [HALF_A, HALF_B], [sampled(0.0, HALF_A), sampled(0.0, HALF_B)])
    assert ratios_of(split) == pytest.approx([0.45, 0.45])


def test_foreign_process_on_an_exclusive_gpu_is_not_the_holders_activity() -> None:
    device = Activity(ratio=1.0, source=ActivitySource.ENGINE)
    split = split_activity(device, [holder("a")], [sampled(0.9)])
    assert split.parts[0] == Activity(ratio=0.0, source=ActivitySource.PROCESS_SAMPLES)
    assert split.remainder_ratio == pytest.approx(1.0)


def test_single_holder_gets_all_activity_not_known_to_be_of_others() -> None:
    device = Activity(ratio=1.0, source=ActivitySource.ENGINE)
    alone = holder("a")
    assert split_activity(device, [alone], [sampled(0.9, alone, known=False)]).parts == (device,)
    split = split_activity(device, [alone], [sampled(0.9, alone, known=False), sampled(0.1)])
    assert ratios_of(split) == pytest.approx([0.9])
    assert split.bounds == ((0.0, pytest.approx(0.9)),), "the pod may have none of it"


def test_split_between_containers_of_a_pod_leaves_other_pods_unchanged() -> None:
    device = Activity(ratio=0.4, source=ActivitySource.UTILISATION)
    x, y, solo = (holder(name, 1 / 3) for name in ("pair-x", "pair-y", "solo"))
    split = split_activity(device, [x, y, solo], [sampled(0.4, x, y), sampled(0.0, solo)])
    assert ratios_of(split) == pytest.approx([0.2, 0.2, 0.0])
    assert sources_of(split) == ["estimated", "estimated", "process_samples"]
    assert split.bounds == ((0.0, pytest.approx(0.4)), (0.0, pytest.approx(0.4)), (0.0, 0.0))


def test_ambiguous_samples_are_split_among_their_candidate_holders() -> None:
    device = Activity(ratio=0.8, source=ActivitySource.UTILISATION)
    a, b, c, _ = QUARTERS
    samples = [sampled(0.4, a), sampled(0.1, b), sampled(0.1), sampled(0.2, b, c, known=False)]
    split = split_activity(device, QUARTERS, samples)
    assert ratios_of(split) == pytest.approx([0.4, 0.2, 0.1, 0.0])
    assert sources_of(split) == ["process_samples", "process_samples", "estimated", "process_samples"]
    assert split.bounds[1] == (pytest.approx(0.1), pytest.approx(0.3))
    assert split.remainder_ratio == pytest.approx(0.1)


ratios = st.floats(0, 1)


@given(
    device=st.one_of(st.none(), ratios),
    shares=st.lists(st.floats(0.01, 1), max_size=5),
    samples=st.one_of(st.none(), st.lists(st.tuples(st.sets(st.integers(0, 4)), ratios, st.booleans()), max_size=6)),
)
@example(device=1.0, shares=[1.0], samples=[(set(), 5e-324, False)])
def test_parts_and_remainder_always_sum_to_the_device(
    device: float | None, shares: list[float], samples: list[tuple[set[int], float, bool]] | None
) -> None:
    activity = None if device is None else Activity(ratio=device, source=ActivitySource.ENGINE)
    holders = [holder(f"p{i}", share) for i, share in enumerate(shares)]
    given_samples = samples and [
        sampled(ratio, *(holders[i] for i in sorted(found) if i < len(holders)), known=known)
        for found, ratio, known in samples
    ]
    split = split_activity(activity, holders, given_samples)
    assert len(split.parts) == len(split.bounds) == len(holders)
    if activity is None:
        assert split.remainder_ratio is None
        assert set(split.parts) | set(split.bounds) <= {None}
    else:
        assert split.remainder_ratio is not None
        total = sum(ratios_of(split)) + split.remainder_ratio
        assert total == pytest.approx(activity.ratio, abs=1e-12)
        for part, bounds in zip(split.parts, split.bounds, strict=True):
            assert part is not None
            assert bounds is not None
            assert 0 <= part.ratio <= 1
            assert bounds[0] - 1e-12 <= part.ratio <= bounds[1] + 1e-12

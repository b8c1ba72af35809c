"""Distance of a device to the limits of its hardware: recorded and published profiles, and unknown cases."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metering_support import H100, plain_viewer
from page_support import samples_of
from pipeline_support import pipeline

from exporter.accounting.activity import ActivityJudge, DeviceLevel, Observation
from exporter.accounting.effective import pcie_use
from exporter.attribution.processes import PodLookup
from exporter.metrics.collector import ExpositionOptions, families
from exporter.model.attribution import Attribution
from exporter.model.devices import Gpu, GpuReading, ProcessUse, Reading
from exporter.model.fields import Field
from exporter.model.ledger import RESOURCES, Bottleneck, ByState, ResourceProfile
from exporter.model.snapshot import Activity, ActivitySource, Snapshot
from gpu_simulator import scenario, scenario_file

ENGINE, TENSOR, DRAM = Field.PROF_GR_ENGINE_ACTIVE, Field.PROF_PIPE_TENSOR_ACTIVE, Field.PROF_DRAM_ACTIVE
FP64, FP32, FP16 = Field.PROF_PIPE_FP64_ACTIVE, Field.PROF_PIPE_FP32_ACTIVE, Field.PROF_PIPE_FP16_ACTIVE
INT, SENT, RECEIVED = Field.PROF_PIPE_INT_ACTIVE, Field.PROF_PCIE_TX_BYTES, Field.PROF_PCIE_RX_BYTES
NVLINK_SENT, NVLINK_RECEIVED = Field.PROF_NVLINK_TX_BYTES, Field.PROF_NVLINK_RX_BYTES
PIPES, LINKS = (TENSOR, FP64, FP32, FP16, INT), (SENT, RECEIVED, NVLINK_SENT, NVLINK_RECEIVED)
BOARD = MappingProxyType(
    {
        Field.SM_CLOCK: 1980,
        Field.MAX_SM_CLOCK: 1980,
        Field.PCIE_LINK_GEN: 5,
        Field.PCIE_MAX_LINK_GEN: 5,
        Field.PCIE_LINK_WIDTH: 16,
    }
)
CODECS = MappingProxyType({Field.DEC_UTIL: 0, Field.JPG_UTIL: 0, Field.OFA_UTIL: 0})
QUIET = MappingProxyType({**dict.fromkeys((*PIPES, DRAM), 0.0), **dict.fromkeys(LINKS, 0), **CODECS, **BOARD})
"""An idle H100 with every resource measured."""
MIB = 1 << 20
A100, L40S, GH200 = "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GH200 480GB"
Values = Mapping[Field, int | float]


def judged(values: Values, judge: ActivityJudge | None = None, **changes: object) -> Activity | None:
    """Return the judged activity of one sample of an H100."""
    facts: dict[str, object] = {"uuid": "GPU-0", "at_seconds": 1.0, "model": H100, "process_count": 1} | changes
    return (judge or ActivityJudge()).judge(Observation(values={**QUIET, **values}, **facts), idle_below=0.05).activity


def profile(values: Values, **changes: object) -> ResourceProfile | None:
    activity = judged(values, **changes)
    return activity and activity.profile


@pytest.mark.parametrize(
    ("name", "values", "bottleneck", "ratio", "truth"),
    [
        # Recorded on an H100 under known kernels; the truth is their work as a part of the data sheet's at 1980 MHz.
        ("gemm bf16", {ENGINE: 0.989, TENSOR: 0.927, DRAM: 0.255, Field.SM_CLOCK: 1410}, "compute", 0.660, 0.638),
        ("gemm fp8", {ENGINE: 0.987, TENSOR: 0.902, FP32: 0.229, Field.SM_CLOCK: 1260}, "compute", 0.574, 0.570),
        ("gemm tf32", {ENGINE: 0.988, TENSOR: 0.921, INT: 0.101, Field.SM_CLOCK: 1545}, "compute", 0.719, 0.658),
        ("gemm fp32", {ENGINE: 0.997, FP32: 0.771, DRAM: 0.068}, "compute", 0.771, 0.711),
        ("gemm fp64", {ENGINE: 0.993, TENSOR: 0.973, DRAM: 0.159, Field.SM_CLOCK: 1800}, "compute", 0.885, 0.818),
        ("gemm int8", {ENGINE: 0.995, TENSOR: 0.743, DRAM: 0.243, Field.SM_CLOCK: 1650}, "compute", 0.619, 0.413),
        ("integer", {ENGINE: 0.9894, INT: 1.0}, "compute", 0.9894, None),
        ("stream", {ENGINE: 0.993, DRAM: 0.897, INT: 0.056}, "memory", 0.897, 0.896),
        ("decode", {ENGINE: 0.986, TENSOR: 0.019, DRAM: 0.742, RECEIVED: 147 * MIB}, "memory", 0.742, None),
        ("decode, batch of 64", {ENGINE: 0.988, TENSOR: 0.151, DRAM: 0.736}, "memory", 0.736, None),
        ("one SM of 132", {ENGINE: 0.997, FP32: 0.007}, "starved", 0.007, 1 / 132),
        ("a quarter of the SMs", {ENGINE: 0.997, FP32: 0.227, INT: 0.014}, "starved", 0.227, None),
        ("tiny kernels", {ENGINE: 0.413, RECEIVED: 262 * MIB}, "starved", 0.0044, None),
        ("small gemm", {ENGINE: 0.399, TENSOR: 0.023, RECEIVED: 276 * MIB}, "starved", 0.023, None),
        ("training with sleeps", {ENGINE: 0.089, TENSOR: 0.028, DRAM: 0.045}, "starved", 0.045, None),
        # Published: training on 8 H100 (guilbaults/slurm-job-exporter#30), and values of KempnerPulse's classes for a
        # saturated GEMM, memory-bound work, and a GPU that is busy with few SMs.
        (
            "training",
            {ENGINE: 0.95, TENSOR: 0.279, DRAM: 0.214, FP32: 0.054, RECEIVED: 873_509_672, NVLINK_SENT: 4_991_556_833},
            "compute",
            0.279,
            None,
        ),
        ("saturated gemm", {ENGINE: 1.0, TENSOR: 0.93, DRAM: 0.3}, "compute", 0.93, None),
        ("memory-bound", {ENGINE: 0.9, TENSOR: 0.05, DRAM: 0.55}, "memory", 0.55, None),
        ("busy, low SM use", {ENGINE: 0.45, TENSOR: 0.02, DRAM: 0.05}, "starved", 0.05, None),
        # Links and video engines.
        ("all-reduce", {ENGINE: 0.98, DRAM: 0.2, NVLINK_RECEIVED: 3.6e11}, "transfer", 0.8, None),
        ("transcoding", {ENGINE: 0.08, Field.DEC_UTIL: 90}, "video", 0.9, None),
    ],
)
def test_profile_has_the_class_of_its_work_and_an_upper_bound_of_its_use(
    name: str, values: Values, bottleneck: str, ratio: float, truth: float | None
) -> None:
    found = profile(values)
    assert found is not None, name
    assert (found.bottleneck, found.effective_ratio) == (bottleneck, pytest.approx(ratio, abs=1e-3))
    assert truth is None or found.effective_ratio >= truth - 1e-3


@pytest.mark.parametrize("missing", [*PIPES, DRAM, *LINKS, *BOARD.keys() - {Field.PCIE_MAX_LINK_GEN}])
def test_device_is_unprofiled_without_one_of_its_resources(missing: Field) -> None:
    values = {field: value for field, value in {**QUIET, ENGINE: 0.9, TENSOR: 0.5}.items() if field is not missing}
    if missing is Field.PCIE_LINK_GEN:  # the highest generation of GPU and slot is an equally good upper bound
        del values[Field.PCIE_MAX_LINK_GEN]
    sample = Observation(uuid="GPU-0", at_seconds=1.0, model=H100, values=values, process_count=1)
    activity = ActivityJudge().judge(sample, idle_below=0.05).activity
    assert activity == Activity(ratio=0.9, source=activity.source) if activity else False


def test_required_counters_differ_by_model() -> None:
    without_int = {field: value for field, value in QUIET.items() if field is not INT} | {ENGINE: 0.9, FP32: 0.5}
    without_links = {field: value for field, value in without_int.items() if field not in LINKS[2:]}
    c2c = {Field.PROF_C2C_TX_ALL_BYTES: 0, Field.PROF_C2C_RX_ALL_BYTES: 225e9}

    def of(model: str, values: Values) -> ResourceProfile | None:
        sample = Observation(uuid="GPU-0", at_seconds=1.0, model=model, values=values, process_count=1)
        activity = ActivityJudge().judge(sample, idle_below=0.05).activity
        return activity and activity.profile

    half = ResourceProfile((0.5, 0.0, 0.0, 0.0), Bottleneck.COMPUTE)
    assert (of(H100, without_int), of(A100, without_int)) == (None, half)
    assert (of(A100, without_links), of(L40S, without_links)) == (None, half)
    whole = {**QUIET, ENGINE: 0.9}
    assert of(GH200, whole) is None
    assert of(GH200, {**whole, **c2c}) == ResourceProfile((0.0, 0.0, 0.5, 0.0), Bottleneck.TRANSFER)
    unknown_limit = {**whole, NVLINK_SENT: 1e9}
    assert of(H100, {**whole, TENSOR: 0.5, Field.SM_CLOCK: 0}) is None, "a pipe is active without a clock"
    assert (of("NVIDIA X900", whole) is None, of("NVIDIA X900", unknown_limit)) == (False, None)
    assert of("NVIDIA X900", {**whole, **c2c}) is None, "C2C with an unknown limit"
    assert (of("Tesla V100S-PCIE-32GB", without_links), of("NVIDIA GeForce RTX 4090", without_links)) == (half, half)
    assert of("Quadro RTX 5000", without_links) is None, "it has an NVLink bridge"


def test_device_with_an_unmeasured_resource_is_unprofiled() -> None:
    busy = {ENGINE: 0.9, TENSOR: 0.5}
    assert profile(busy) is not None
    assert profile(busy, draws=True) is None, "a process with a graphics context"
    assert profile(busy, level=DeviceLevel.PARTITIONED_GPU) is None, "its instances have separate profiles"
    unmeasured = {field: value for field, value in QUIET.items() if field is not Field.DEC_UTIL}
    sample = Observation(
        uuid="GPU-0", at_seconds=1.0, model=H100, values={**unmeasured, **busy}, from_dcgm=frozenset({DRAM})
    )
    activity = ActivityJudge().judge(sample, idle_below=0.05).activity
    assert activity is not None
    assert activity.profile is None, "the decoders may be busy"


@pytest.mark.parametrize("host_pids", [True, False])
def test_gpu_is_unprofiled_until_its_graphics_process_is_gone(tmp_path: Path, *, host_pids: bool) -> None:
    viewer = plain_viewer(PodLookup(tmp_path, tmp_path), process_list_reliable=host_pids)
    gpu = Gpu(uuid="GPU-0", index=0, minor=0, model=H100, pci_bus_id="")
    found = []
    for at, graphics in enumerate((False, True, None, False)):  # the driver's list fails after the second sample
        processes = None if graphics is None else (ProcessUse(pid=1, graphics=graphics),)
        busy = GpuReading(gpu=gpu, values={**QUIET, ENGINE: 0.9}, processes=processes)
        reading = Reading(source="nvml", taken_at_seconds=float(at), duration_seconds=0.0, gpus=(busy,))
        (view,) = viewer.views(reading, Attribution(known=True, answered_at_seconds=0.0, holders={}), {}, float(at))
        assert view.activity is not None
        found.append(view.activity.profile is not None)
    assert found == [True, False, False, True]


def test_instance_is_profiled_with_the_links_and_clocks_of_its_gpu() -> None:
    own = {ENGINE: 0.9, TENSOR: 0.5, DRAM: 0.1, **dict.fromkeys((FP64, FP32, FP16, INT), 0.0)}

    def of(values: Values, parent: Values) -> ResourceProfile | None:
        sample = Observation(
            uuid="MIG-0",
            at_seconds=1.0,
            model=H100,
            level=DeviceLevel.INSTANCE,
            values=values,
            parent_values=parent,
            process_count=1,
        )
        activity = ActivityJudge().judge(sample, idle_below=0.05).activity
        return activity and activity.profile

    links = {SENT: 0, RECEIVED: 6.3008e9}
    found = of({**own, Field.PROF_SM_ACTIVE: 0.6}, {**BOARD, **links, Field.SM_CLOCK: 990})
    assert found == ResourceProfile((0.25, 0.1, pytest.approx(0.1, rel=1e-4), 0.0), Bottleneck.COMPUTE, sm_ratio=0.6)
    assert of(own, BOARD) is None, "the driver refuses this agent the GPU's transfer counters"
    part = {field: value for field, value in own.items() if field is not DRAM}
    assert of(part, {**BOARD, **links}) is None, "a part of an instance has no memory counter"


@pytest.mark.parametrize(
    "values",
    [
        {ENGINE: 0.1, TENSOR: 0.6},
        {ENGINE: 0.9, DRAM: 1.2},
        {ENGINE: 0.9, RECEIVED: 80e9},
        {ENGINE: 0.9, NVLINK_SENT: 600e9},
    ],
)
def test_impossible_reading_is_unprofiled_and_counted_once(values: Values) -> None:
    judge = ActivityJudge()
    found = [judged(values, judge, at_seconds=float(second)) for second in range(3)]
    assert [activity and activity.profile for activity in found] == [None] * 3
    assert judge.errors == {("activity", "impossible_profile"): 1}
    assert judged({ENGINE: 0.9, TENSOR: 0.6}, judge, at_seconds=3.0) is not None
    judged(values, judge, at_seconds=4.0)
    assert judge.errors == {("activity", "impossible_profile"): 2}


def test_copy_with_an_idle_engine_is_possible() -> None:
    judge = ActivityJudge()
    activity = judged({ENGINE: 0.0, RECEIVED: 56_206 * MIB, SENT: 3357 * MIB, DRAM: 0.016}, judge)
    assert activity is not None
    assert (activity.source, activity.ratio) == (ActivitySource.COPY, pytest.approx(0.935, abs=1e-3))
    assert activity.profile == ResourceProfile((0.0, 0.016, activity.ratio, 0.0), Bottleneck.TRANSFER)
    assert judge.errors == {}


def test_pcie_use_is_relative_to_the_negotiated_link() -> None:
    copy = {SENT: 3357 * MIB, RECEIVED: 56_206 * MIB}
    assert pcie_use({**BOARD, **copy}) == pytest.approx(0.935, abs=1e-3)
    assert pcie_use({**BOARD, **copy, Field.PCIE_LINK_WIDTH: 8}) == pytest.approx(1.871, abs=1e-3)
    slow = {**BOARD, SENT: 0, RECEIVED: 2e9, Field.PCIE_LINK_GEN: 1}
    assert pcie_use(slow) == pytest.approx(0.5)
    assert pcie_use({**slow, RECEIVED: 40e9}) == pytest.approx(0.635, abs=1e-3), (
        "the link became active after its reading"
    )
    assert pcie_use({SENT: 0, RECEIVED: 0}) is None
    assert pcie_use(BOARD) is None


RATIO, CLOCKS = st.floats(0, 1), st.floats(0.1, 1)


@given(RATIO, st.lists(RATIO, min_size=6, max_size=6), st.lists(st.floats(0, 60e9), min_size=4, max_size=4), CLOCKS)
def test_effective_part_is_never_more_than_the_activity(
    engine: float, ratios: list[float], rates: list[float], clock: float
) -> None:
    values = {
        ENGINE: engine,
        **dict(zip((*PIPES, DRAM), ratios, strict=True)),
        **dict(zip(LINKS, rates, strict=True)),
        Field.SM_CLOCK: 1980 * clock,
    }
    judge = ActivityJudge()
    activity = judged(values, judge)
    assert activity is not None
    impossible = max(ratios[:5]) > engine + 0.05
    assert (activity.profile is None) == impossible == bool(judge.errors)
    if activity.profile:
        nearest = max(max(ratios[:5]) * clock, ratios[5], max(rates[:2]) / 63.008e9, max(rates[2:]) / 450e9)
        copying = max(rates[:2]) / 63.008e9
        assert activity.ratio == pytest.approx(max(engine, copying if copying > 0.005 else 0.0))
        assert activity.profile.effective_ratio == pytest.approx(min(activity.ratio, nearest))
        assert activity.profile.uses[1] == min(activity.ratio, ratios[5])
        assert (activity.profile.bottleneck is Bottleneck.STARVED) == (nearest < 0.25)


KINDS = {"training": 0.52, "gemm": 0.94, "decode": 0.75, "starved": 0.06}
"""Effective part of an activity of 1 at the highest clock, from the workloads' own factors."""
CLOCK = 990
"""Clock of the GPU with the GEMM: half of the highest."""


def node_of(model: str, *, sharing: str = "", dcgm: str = "", faults: str = "") -> scenario.Scenario:
    """Make a node with a GPU for each kind of work, at half of its activity, and one for a transcoder."""
    replica = ", replicas: [0]" if sharing else ""
    pods = "\n".join(
        f"  - {{namespace: {kind}, name: {kind}-0, kind: {kind}, activity: 0.5, "
        f"devices: [{{gpu: {number}{replica if number > 1 else ''}}}]}}"
        for number, kind in enumerate((*KINDS, "transcode"))
    )
    text = f"""\
description: known pipes
node: node-a
{dcgm}
gpus:
  - {{model: {model}}}
  - {{model: {model}, overrides: [{{from: 0, values: {{SM_CLOCK: {CLOCK}}}}}]}}
  - {{model: {model}, count: 3{sharing}}}
pods:
{pods}
{faults}
"""
    return scenario.build(scenario_file.parse(text, source="known.yaml"))


async def metered(node: scenario.Scenario, directory: Path, source: str, seconds: int = 31) -> Snapshot:
    async with pipeline(node, directory, source=source) as found:
        for second in range(seconds - 1):
            await found.step(float(second))
        return await found.step(float(seconds - 1))


def by_namespace(snapshot: Snapshot) -> dict[str, ByState]:
    ledger = snapshot.metering.ledger
    assert ledger is not None
    return {account.owner.namespace: totals.seconds for account, totals in ledger.accounts.items()}


@pytest.mark.parametrize(("model", "source"), [("h100", "nvml"), ("a100-80gb", "auto"), ("h100", "dcgm")])
async def test_ledger_has_the_true_effective_time(model: str, source: str, tmp_path: Path) -> None:
    snapshot = await metered(node_of(model), tmp_path, source)
    found = by_namespace(snapshot)
    for kind, factor in KINDS.items():
        highest = 1980 if model == "h100" else 1410
        part = 0.47 if kind == "gemm" and model == "h100" else factor * CLOCK / highest if kind == "gemm" else factor
        seconds = found[kind]
        profiled = seconds.profiled
        assert profiled > 25 * 0.5, "except the first samples"
        assert seconds.effective == pytest.approx(part * profiled, rel=1e-9)
        assert seconds.active == pytest.approx(0.5 * (seconds.active + seconds.idle), rel=1e-9)
    assert found["transcode"].ineffective == pytest.approx(0.0, abs=1e-9)
    assert snapshot.metering.ledger is not None
    assert snapshot.metering.ledger.conservation_error_seconds == pytest.approx(0.0, abs=1e-9)
    assert snapshot.metering.owners is not None
    for use in snapshot.metering.owners.owners:
        used = use.resource_use_seconds
        assert used["profiled"] == pytest.approx(use.profiled_seconds["1h"])
        assert max(used[kind] for kind in RESOURCES) == pytest.approx(use.effective_seconds["1h"], abs=0.01)
        assert used.get("sm_profiled") == (pytest.approx(used["profiled"], abs=0.01) if source == "nvml" else None)
        assert 0 < used["sm"] <= used["profiled"] if source == "nvml" else "sm" not in used
    classes = {
        view.pods[0].holder.namespace: dict(snapshot.history.bottlenecks[view.uuid])
        for view in snapshot.devices
        if view.pods
    }
    assert classes == {
        "training": {"memory": 1.0},
        "gemm": {"compute": 1.0} if model == "a100-80gb" else {"starved": 1.0},
        "decode": {"memory": 1.0},
        "starved": {"starved": 1.0},
        "transcode": {"video": 1.0},
    }


SHOWN = {"gpu_effective_ratio", "gpu_pod_effective_ratio", "gpu_bottleneck", "gpu_owner_effective_gpu_seconds"}


@pytest.mark.parametrize(
    ("model", "source", "extra"),
    [
        pytest.param("a100-80gb", "nvml", {}, id="before Hopper without DCGM"),
        pytest.param("a100-80gb", "auto", {"dcgm": "dcgm: {profiling_module: false}"}, id="DCGM without its module"),
        pytest.param(
            "a100-80gb", "auto", {"faults": "faults: [{kind: profiling_paused, from: 0}]"}, id="profiling paused"
        ),
    ],
)
async def test_unmeasured_effective_time_is_absent(
    model: str, source: str, extra: dict[str, str], tmp_path: Path
) -> None:
    snapshot = await metered(node_of(model, **extra), tmp_path, source, seconds=15)
    found = by_namespace(snapshot)
    assert {seconds.profiled for seconds in found.values()} == {0.0}
    assert found["training"].unprofiled > 5.0
    assert not SHOWN & {family.name for family in families(snapshot, ExpositionOptions())}


async def test_effective_time_is_absent_on_instances_without_profiling(tmp_path: Path) -> None:
    snapshot = await metered(scenario.load("a100-mig"), tmp_path, "nvml", seconds=15)
    assert {seconds.profiled for seconds in by_namespace(snapshot).values()} == {0.0}
    assert by_namespace(snapshot)["ml"].unknown > 0
    assert not SHOWN & {family.name for family in families(snapshot, ExpositionOptions())}


async def test_effective_time_of_a_shared_gpu_is_shown_only_for_the_device(tmp_path: Path) -> None:
    sharing = ", sharing: {strategy: time-slicing, replicas: 2}"
    snapshot = await metered(node_of("h100", sharing=sharing), tmp_path, "nvml", seconds=15)
    found = by_namespace(snapshot)
    assert found["decode"].profiled == 0.0
    assert found["training"].profiled > 5.0
    rows = {family.name: samples_of(family) for family in families(snapshot, ExpositionOptions())}
    assert len(rows["gpu_effective_ratio"]) == 5
    assert len(rows["gpu_pod_effective_ratio"]) == 2

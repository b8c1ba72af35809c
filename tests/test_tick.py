"""The tick with all inputs of source and kubelet: properties of every node, reading and clock."""

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metering_support import plain_node, plain_viewer
from page_support import samples_of
from pipeline_support import AskedKubelet, DirectSource

from exporter.agent.attributor import Attributor
from exporter.agent.sources import Sources
from exporter.attribution.processes import PodLookup
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import Dropped
from exporter.model.attribution import Allocations, AllocationState, ContainerAllocation, DeviceIds
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading, ProcessUse, Reading
from exporter.model.fields import Field
from exporter.model.snapshot import DeviceView, Snapshot

UIDS = [f"00000000-0000-4000-8000-{number:012d}" for number in range(4)]
WHOLE, PARTITIONED = (f"GPU-00000000-0000-4000-8000-00000000000{number}" for number in range(2))
SLICES = [f"MIG-00000000-0000-5000-8000-00000000000{number}" for number in range(3)]
EPOCH = 1_800_000_000.0
COMPUTE = (Field.GPU_UTIL, Field.PROF_GR_ENGINE_ACTIVE)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make processes 10 to 13 of pods a to d and one of the host; 15 has ended. Pod d has no log directory."""
    root = tmp_path_factory.mktemp("node")
    for pid, uid in [*zip(range(10, 14), UIDS, strict=True), (14, None)]:
        process = root / "proc" / str(pid)
        process.mkdir(parents=True)
        process.joinpath("cgroup").write_text(f"0::/kubepods/pod{uid}/{'c' * 64}\n" if uid else "0::/user.slice\n")
        process.joinpath("stat").write_text(f"{pid} (python) S " + "0 " * 18 + "4242 0\n")
    for name, uid in zip("abc", UIDS, strict=False):
        (root / "pods" / f"ml_{name}_{uid}").mkdir(parents=True)
    return root


ratios = st.none() | st.sampled_from([0.0, 0.01, 0.5, 1.0])
processes = st.none() | st.lists(
    st.builds(
        ProcessUse,
        pid=st.integers(10, 15),
        memory_used_bytes=st.none() | st.integers(0, 1 << 36),
        sm_ratio=ratios,
        enc_ratio=ratios,
        dec_ratio=ratios,
        ended=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda use: use.pid,
).map(tuple)
values = st.fixed_dictionaries(
    {},
    optional={
        Field.GPU_UTIL: st.integers(0, 100),
        Field.PROF_GR_ENGINE_ACTIVE: st.floats(0, 1),
        Field.ENC_UTIL: st.integers(0, 100),
        Field.FB_USED: st.integers(0, 80_000),
        Field.FB_TOTAL: st.just(81_559),
    },
)


def instance(number: int) -> MigInstance:
    return MigInstance(
        uuid=SLICES[number],
        parent_uuid=PARTITIONED,
        gpu_instance_id=number,
        compute_instance_id=0,
        profile="2g.20gb",
        compute_slices=2,
        memory_slices=2,
    )


@st.composite
def readings(draw: st.DrawFn) -> tuple[GpuReading, ...]:
    gpus = []
    for index, uuid in enumerate((WHOLE, PARTITIONED)):
        if draw(st.integers(0, 9)) == 0:
            continue
        mig = bool(index) and draw(st.booleans())
        gpu = Gpu(uuid=uuid, index=index, minor=index, model="H100", pci_bus_id="", mig_enabled=mig, compute_slices=7)
        if draw(st.integers(0, 9)) == 0:
            gpus.append(GpuReading(gpu=gpu, state=DeviceState.LOST, reason="gpu_is_lost"))
            continue
        parts = [MigReading(instance=instance(n), values=draw(values), processes=draw(processes)) for n in range(3)]
        there = tuple(part for part in parts if mig and draw(st.booleans()))
        gpus.append(GpuReading(gpu=gpu, values=draw(values), processes=draw(processes), instances=there))
    return tuple(gpus)


ids = st.sampled_from([WHOLE, PARTITIONED, *SLICES, *(f"{WHOLE}::{n}" for n in range(3)), "nvidia0", "junk", "GPU-x"])
containers = st.lists(
    st.builds(
        lambda pod, container, listed: ContainerAllocation(
            namespace="ml",
            pod=pod,
            container=container,
            devices=(DeviceIds(resource="nvidia.com/gpu", ids=tuple(listed)),),
        ),
        st.sampled_from("abcd"),
        st.sampled_from(["main", "side"]),
        st.lists(ids, min_size=1, max_size=2),
    ),
    max_size=5,
    unique_by=lambda one: (one.pod, one.container),
).map(tuple)
steps = st.lists(
    st.tuples(
        st.none() | readings(),
        st.none() | containers,
        st.sampled_from([1.0, 1.0, 1.0, 30.0, 70.0]),
        st.sampled_from([0.0, 0.0, 0.0, -7200.0, 7200.0]),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(script=steps, host_pids=st.booleans())
def test_tick_is_consistent_for_arbitrary_sources_kubelet_and_clock(
    trees: Path,
    script: list[tuple[tuple[GpuReading, ...] | None, tuple[ContainerAllocation, ...] | None, float, float]],
    *,
    host_pids: bool,
) -> None:
    source, kubelet = DirectSource(), AskedKubelet()
    lookup = PodLookup(trees / "proc", trees / "pods")
    node = plain_node(
        Sources(nvml=source, stale_after_seconds=3.0),
        Attributor(kubelet=kubelet, lookup=lookup, expiry_seconds=60.0),
        viewer=plain_viewer(lookup, process_list_reliable=host_pids),
    )
    wall, steady, answered_steady = EPOCH, 0.0, -math.inf
    for gpus, listed, passed, set_by in script:
        wall, steady = wall + passed + set_by, steady + passed
        if gpus is not None:
            source.readings.append(
                Reading(source="nvml", taken_at_seconds=wall, duration_seconds=0.0, steady_seconds=steady, gpus=gpus)
            )
        if listed is not None:
            kubelet.latest = Allocations(answered_at_seconds=wall, containers=listed)
            answered_steady = steady
        snapshot = node.tick(wall, steady)
        assert snapshot.attribution.known <= (steady - answered_steady <= 60)
        check(snapshot, kubelet.latest)
        check_page(snapshot)


def test_contradictory_readings_are_counted_on_the_page(trees: Path) -> None:
    source = DirectSource()
    lookup = PodLookup(trees / "proc", trees / "pods")
    attributor = Attributor(kubelet=None, lookup=lookup, expiry_seconds=60.0)
    node = plain_node(Sources(nvml=source, stale_after_seconds=3.0), attributor)
    gpu = Gpu(uuid=WHOLE, index=0, minor=0, model="H100", pci_bus_id="")
    lie = GpuReading(gpu=gpu, values={Field.PROF_GR_ENGINE_ACTIVE: 0.0, Field.GPU_UTIL: 99})
    counted = []
    for second in range(20):
        at = EPOCH + second
        source.readings.append(Reading(source="nvml", taken_at_seconds=at, duration_seconds=0.0, gpus=(lie,)))
        page = families(node.tick(at, float(second)), ExpositionOptions())
        samples = [
            one for family in page if family.name.startswith("gpu_exporter_errors") for one in samples_of(family)
        ]
        counted.append([(dict(one.pairs), one.value) for one in samples])
    reported = ({"part": "activity", "reason": "contradiction"}, 1)
    assert counted[:5] == [[]] * 5, "the means need some seconds"
    assert counted[10:] == [[reported]] * 10


def test_failed_tick_is_counted_while_the_last_snapshot_is_shown(trees: Path) -> None:
    source = DirectSource()
    attributor = Attributor(kubelet=None, lookup=PodLookup(trees / "proc", trees / "pods"), expiry_seconds=60.0)
    node = plain_node(Sources(nvml=source, stale_after_seconds=3.0), attributor)
    busy = GpuReading(gpu=Gpu(uuid=WHOLE, index=0, minor=0, model="H100", pci_bus_id=""), values={Field.GPU_UTIL: 50})
    source.readings.append(Reading(source="nvml", taken_at_seconds=EPOCH, duration_seconds=0.0, gpus=(busy,)))
    last = node.tick(EPOCH, 0.0)
    node.count_error("agent", "tick")
    shown = node.after_failed_tick(last, EPOCH + 1.0, 1.0)
    assert (shown.devices, shown.errors) == (last.devices, {("agent", "tick"): 1})


@pytest.mark.parametrize("name", ["nvml", "dcgm"])
def test_failed_ticks_leave_no_values_and_report_no_gpu_as_down(trees: Path, name: str) -> None:
    source = DirectSource(name=name)
    attributor = Attributor(kubelet=None, lookup=PodLookup(trees / "proc", trees / "pods"), expiry_seconds=60.0)
    node = plain_node(Sources(nvml=source, stale_after_seconds=3.0), attributor)
    busy = GpuReading(gpu=Gpu(uuid=WHOLE, index=0, minor=0, model="H100", pci_bus_id=""), values={Field.GPU_UTIL: 50})
    source.readings.append(Reading(source=name, taken_at_seconds=EPOCH, duration_seconds=0.0, gpus=(busy,)))
    shown = node.after_failed_tick(node.tick(EPOCH, 0.0), EPOCH + 60.0, 60.0)
    page = {family.name: samples_of(family) for family in families(shown, ExpositionOptions())}
    assert {"gpu_info", "gpu_exporter_source_up"} <= page.keys()
    assert not {"gpu_up", "gpu_activity_ratio", "DCGM_FI_DEV_GPU_UTIL"} & page.keys()
    assert {dict(one.pairs)["state"] for one in page["gpu_devices"]} == {"expected"}, "GPUMissing needs present"
    assert not shown.ready


def check(snapshot: Snapshot, allocations: Allocations | None) -> None:
    listed = {(c.namespace, c.pod, c.container) for c in allocations.containers} if allocations else set()
    for view in snapshot.devices:
        assert {(use.holder.namespace, use.holder.pod, use.holder.container) for use in view.pods} <= listed
        assert not view.pods or snapshot.attribution.known
        assert (view.allocation is AllocationState.ALLOCATED) == bool(view.pods)
        check_use(view)


def check_use(view: DeviceView) -> None:
    foreign = view.unattributed_activity_ratio
    if view.activity is None:
        assert view.activity_unknown_reason
        assert foreign is None
        assert all(use.activity is None and use.idle_for_seconds is None for use in view.pods)
        return
    assert view.state is DeviceState.UP
    assert any(field in view.values for field in COMPUTE) or view.gpu.mig_enabled
    if view.allocation in {None, AllocationState.UNKNOWN}:
        assert foreign is None
        return
    assert foreign is not None
    parts = [use.activity.ratio for use in view.pods if use.activity]
    assert len(parts) == len(view.pods)
    assert sum(parts) + foreign == pytest.approx(view.activity.ratio, abs=1e-9)


def check_page(snapshot: Snapshot) -> None:
    dropped = Dropped()
    page = families(snapshot, ExpositionOptions(), dropped)
    assert dropped == Dropped(), "no duplicate or invalid samples"
    for family in page:
        assert all(math.isfinite(sample.value) and sample.value >= 0 for sample in samples_of(family)), family.name

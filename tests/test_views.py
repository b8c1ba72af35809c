"""Device views: the agent's result for one reading and one attribution."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from metering_support import plain_viewer
from pipeline_support import AskedKubelet

from exporter.agent.attributor import Attributor
from exporter.agent.history import MOST_XIDS, EventLog, SourceRecord
from exporter.agent.views import Viewer, darkened
from exporter.attribution.processes import PodLookup
from exporter.model.attribution import (
    Allocations,
    AllocationState,
    Attribution,
    ContainerAllocation,
    DeviceIds,
    Holder,
    ShareMode,
)
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading, ProcessUse, Reading, XidEvent
from exporter.model.fields import Field
from exporter.model.snapshot import Activity, ActivitySource, DeviceView

UID_A = "00000000-0000-4000-8000-00000000000a"
UID_B = "00000000-0000-4000-8000-00000000000b"
MIB = 1 << 20


@pytest.fixture
def viewer(tmp_path: Path) -> Viewer:
    for pid, uid in ((101, UID_A), (102, UID_B), (103, None)):
        process = tmp_path / "proc" / str(pid)
        process.mkdir(parents=True)
        path = f"/kubepods/burstable/pod{uid}/{'c' * 64}" if uid else "/user.slice"
        (process / "cgroup").write_text(f"0::{path}\n")
        (process / "stat").write_text(f"{pid} (python) S " + "0 " * 18 + "4242 0\n")
    logs = tmp_path / "pods"
    for name, uid in (("ml_a", UID_A), ("ml_b", UID_B)):
        (logs / f"{name}_{uid}").mkdir(parents=True)
    return plain_viewer(PodLookup(tmp_path / "proc", logs))


def gpu(index: int = 0, **facts: object) -> Gpu:
    return Gpu(
        uuid=f"GPU-{index}",
        index=index,
        minor=index,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id=f"00000000:{index:02X}:00.0",
        **facts,  # type: ignore[arg-type] # keyword facts of the one dataclass above
    )


def holder(pod: str, device: str = "GPU-0", share: float = 1.0, mode: ShareMode = ShareMode.EXCLUSIVE) -> Holder:
    return Holder(
        namespace="ml",
        pod=pod,
        container="main",
        device_uuid=device,
        mode=mode,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=share,
        device_share_ratio=share,
    )


def reading(*gpus: GpuReading, at: float = 1000.0) -> Reading:
    return Reading(source="nvml", taken_at_seconds=at, duration_seconds=0.01, gpus=gpus)


def held(*holders: Holder) -> Attribution:
    by_device: dict[str, tuple[Holder, ...]] = {}
    for each in holders:
        by_device[each.device_uuid] = (*by_device.get(each.device_uuid, ()), each)
    return Attribution(known=True, answered_at_seconds=1000.0, holders=by_device)


def views(viewer: Viewer, gpus: Sequence[GpuReading], attribution: Attribution, at: float = 1000.0) -> list[DeviceView]:
    return list(viewer.views(reading(*gpus, at=at), attribution, {}, at))


def test_exclusive_holder_has_the_activity_and_memory_of_the_device(viewer: Viewer) -> None:
    busy = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 80, Field.FB_USED: 4096})
    (view,) = views(viewer, [busy], held(holder("a")))
    assert view.allocation is AllocationState.ALLOCATED
    assert view.pods[0].activity == Activity(ratio=0.8, source=ActivitySource.UTILISATION)
    assert view.pods[0].memory_used_bytes == 4096 * MIB
    assert view.pods[0].values == {}, "an exclusive holder needs no separate rows in the drop-in family"


def test_holder_memory_without_device_memory_is_that_of_its_processes(viewer: Viewer) -> None:
    # A compute instance among others of its GPU instance, or a board with memory of the host.
    processes = (ProcessUse(pid=101, memory_used_bytes=700 * MIB), ProcessUse(pid=103, memory_used_bytes=9 * MIB))
    reported = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 80}, processes=processes)
    (view,) = views(viewer, [reported], held(holder("a")))
    assert view.pods[0].memory_used_bytes == 700 * MIB
    (view,) = views(viewer, [GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 80})], held(holder("a")))
    assert view.pods[0].memory_used_bytes is None


def test_shared_holders_are_measured_by_their_processes(viewer: Viewer) -> None:
    shared = GpuReading(
        gpu=gpu(),
        values={Field.GPU_UTIL: 80, Field.FB_USED: 5000},
        processes=(
            ProcessUse(pid=101, memory_used_bytes=1000 * MIB, sm_ratio=0.6),
            ProcessUse(pid=102, memory_used_bytes=3000 * MIB, sm_ratio=0.0),
            ProcessUse(pid=103, memory_used_bytes=500 * MIB, sm_ratio=0.2),
        ),
    )
    sharers = [holder(pod, share=0.25, mode=ShareMode.SHARED) for pod in "ab"]
    (view,) = views(viewer, [shared], held(*sharers))
    parts = {pod.holder.pod: pod for pod in view.pods}
    assert parts["a"].activity == Activity(ratio=pytest.approx(0.6), source=ActivitySource.PROCESS_SAMPLES)
    assert parts["b"].activity == Activity(ratio=0.0, source=ActivitySource.PROCESS_SAMPLES)
    assert (parts["a"].values[Field.GPU_UTIL], parts["b"].values[Field.GPU_UTIL]) == (60, 0)
    assert parts["b"].memory_used_bytes == 3000 * MIB
    assert view.unattributed_activity_ratio == pytest.approx(0.2)
    assert (view.unattributed_processes, view.unattributed_memory_bytes) == (1, 500 * MIB)


@pytest.mark.parametrize(
    ("clients_listed", "samples_of"), [(True, "server"), (True, "client"), (False, "server")], ids=str
)
def test_mps_holders_are_estimated_for_any_sampled_process(
    viewer: Viewer, tmp_path: Path, *, clients_listed: bool, samples_of: str
) -> None:
    server = tmp_path / "proc" / "104"
    server.mkdir()
    (server / "cgroup").write_text("0::/system.slice/nvidia-mps.service\n")
    (server / "stat").write_text("104 (nvidia-cuda-mps) S " + "0 " * 18 + "4242 0\n")
    busy = {101: 0.9} if samples_of == "client" else {104: 0.9}
    shared = GpuReading(
        gpu=gpu(),
        values={Field.GPU_UTIL: 90, Field.FB_USED: 5000},
        processes=tuple(
            ProcessUse(pid=pid, memory_used_bytes=mib * MIB, sm_ratio=busy.get(pid, 0.0), mps=clients_listed and is_one)
            for pid, mib, is_one in ((101, 1000, True), (102, 3000, True), (104, 30, False))
        ),
    )
    sharers = [holder(pod, share=0.5, mode=ShareMode.SHARED) for pod in "ab"]
    (view,) = views(viewer, [shared], held(*sharers))
    half = Activity(ratio=pytest.approx(0.45), source=ActivitySource.ESTIMATED)
    assert [pod.activity for pod in view.pods] == [half, half]
    assert [pod.memory_used_bytes for pod in view.pods] == [1000 * MIB, 3000 * MIB]
    assert view.unattributed_activity_ratio == 0.0
    (view,) = views(viewer, [shared], held(sharers[1]))
    assert view.pods[0].activity == Activity(ratio=pytest.approx(0.9), source=ActivitySource.UTILISATION)


def test_lagging_utilisation_is_not_divided_among_holders(viewer: Viewer) -> None:
    trailing = GpuReading(
        gpu=gpu(),
        values={Field.GPU_UTIL: 30, Field.PROF_GR_ENGINE_ACTIVE: 0.0, Field.FB_USED: 900},
        processes=(ProcessUse(pid=101, memory_used_bytes=700 * MIB, sm_ratio=0.3),),
    )
    sharers = [holder(pod, share=0.5, mode=ShareMode.SHARED) for pod in "ab"]
    (view,) = views(viewer, [trailing], held(*sharers))
    assert [dict(pod.values) for pod in view.pods] == [{Field.FB_USED: 700}, {Field.FB_USED: 0}]


def test_ended_process_counts_for_activity_but_not_for_memory(viewer: Viewer) -> None:
    ended = ProcessUse(pid=101, memory_used_bytes=None, sm_ratio=0.3, ended=True)
    alive = ProcessUse(pid=102, memory_used_bytes=100 * MIB, sm_ratio=0.1)
    reading_ = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 40, Field.FB_USED: 500}, processes=(ended, alive))
    sharers = [holder(pod, share=0.25, mode=ShareMode.SHARED) for pod in "ab"]
    (view,) = views(viewer, [reading_], held(*sharers))
    parts = {pod.holder.pod: pod for pod in view.pods}
    assert parts["a"].activity == Activity(ratio=pytest.approx(0.3), source=ActivitySource.PROCESS_SAMPLES)
    assert (parts["a"].memory_used_bytes, parts["b"].memory_used_bytes) == (0, 100 * MIB)


def test_shared_holders_without_visible_processes_are_estimated(viewer: Viewer) -> None:
    blind = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 80, Field.FB_USED: 5000}, processes=())
    sharers = [holder(pod, share=0.25, mode=ShareMode.SHARED) for pod in "ab"]
    (view,) = views(viewer, [blind], held(*sharers))
    assert {pod.activity.source for pod in view.pods if pod.activity} == {ActivitySource.ESTIMATED}
    assert [pod.values for pod in view.pods] == [{}, {}]
    assert [pod.memory_used_bytes for pod in view.pods] == [None, None]
    assert view.unattributed_processes is None


@pytest.mark.parametrize(("reliable", "reason"), [(True, "contradiction"), (False, "")])
def test_only_a_reliable_list_without_processes_contradicts_utilisation(
    viewer: Viewer, reason: str, *, reliable: bool
) -> None:
    viewer.process_list_reliable = reliable
    codecs = dict.fromkeys((Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL), 0)
    stuck = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 100, Field.FB_USED: 3, **codecs}, processes=())
    for second in range(60):
        (view,) = views(viewer, [stuck], held(holder("a")), at=1000.0 + second)
    assert view.activity_unknown_reason == reason


def test_holder_using_its_whole_share_is_not_idle(viewer: Viewer) -> None:
    viewer.clock.threshold_ratio = 0.5
    shared = GpuReading(
        gpu=gpu(),
        values={Field.GPU_UTIL: 25, Field.FB_USED: 900},
        processes=(ProcessUse(pid=101, memory_used_bytes=900 * MIB, sm_ratio=0.25),),
    )
    only = held(holder("a", share=0.25, mode=ShareMode.SHARED))
    for at in (1000.0, 1001.0, 1002.0):
        (view,) = views(viewer, [shared], only, at)
    assert view.pods[0].idle_for_seconds == 0.0


def mig(slot: int) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{slot}",
        parent_uuid="GPU-0",
        gpu_instance_id=slot,
        compute_instance_id=0,
        profile="1g.10gb",
        compute_slices=1,
        memory_slices=1,
    )


def test_mig_instances_have_own_activity_and_the_board_has_no_holder(viewer: Viewer) -> None:
    partitioned = GpuReading(
        gpu=gpu(mig_enabled=True, compute_slices=7, memory_slices=8),
        values={Field.POWER_USAGE: 200.0},
        instances=(
            MigReading(instance=mig(7), values={Field.PROF_GR_ENGINE_ACTIVE: 0.7}),
            MigReading(instance=mig(8), values={Field.PROF_GR_ENGINE_ACTIVE: 0.0}),
        ),
    )
    board, busy, idle = views(viewer, [partitioned], held(holder("a", "MIG-7", 0.143, ShareMode.MIG)))
    assert (board.allocation, busy.allocation, idle.allocation) == (
        None,
        AllocationState.ALLOCATED,
        AllocationState.UNALLOCATED,
    )
    assert board.activity == Activity(ratio=pytest.approx(0.1), source=ActivitySource.ENGINE)
    assert busy.pods[0].activity == Activity(ratio=0.7, source=ActivitySource.ENGINE)


def test_mig_without_a_source_is_unknown_and_its_holder_is_not_idle(viewer: Viewer) -> None:
    ampere = GpuReading(gpu=gpu(mig_enabled=True, compute_slices=7), instances=(MigReading(instance=mig(7)),))
    board, instance = views(viewer, [ampere], held(holder("a", "MIG-7", 0.143, ShareMode.MIG)))
    assert (board.activity, instance.activity, instance.activity_unknown_reason) == (None, None, "no_source")
    assert instance.pods[0].activity is None
    assert instance.pods[0].idle_for_seconds is None


@pytest.mark.parametrize("described", [True, False])
def test_a_partitioned_gpu_with_a_new_instance_is_not_idle(viewer: Viewer, *, described: bool) -> None:
    """The first sample of an instance has no mean yet, and the GPU's own counters do not show its decoders."""
    new = GpuReading(
        gpu=gpu(mig_enabled=True, compute_slices=7, memory_slices=8),
        values={Field.PROF_GR_ENGINE_ACTIVE: 0.01},
        instances=(MigReading(instance=mig(7)),) if described else (),
        lacks_instances=not described,
    )
    board = views(viewer, [new], held())[0]
    assert (board.activity, board.activity_unknown_reason) == (None, "incomplete")


def test_lost_gpu_keeps_its_holder_without_values(viewer: Viewer) -> None:
    lost = GpuReading(gpu=gpu(), state=DeviceState.LOST, reason="gpu_is_lost")
    other = GpuReading(gpu=gpu(1), values={Field.GPU_UTIL: 50})
    first, second = views(viewer, [lost, other], held(holder("a")))
    assert (first.activity, first.activity_unknown_reason) == (None, "device_down")
    assert first.pods[0].activity is None
    assert second.activity is not None


def test_stale_reading_shows_identities_without_values(viewer: Viewer) -> None:
    fresh = reading(GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 80}))
    (view,) = viewer.views(darkened(fresh, "hung"), held(holder("a")), {}, 1010.0)
    assert (view.state, view.reason, dict(view.values)) == (DeviceState.FAILED, "hung", {})
    assert view.activity is None
    assert view.pods[0].holder.pod == "a"


def test_device_is_unallocated_only_if_the_holders_are_known() -> None:
    assert Attribution(known=True).allocation("GPU-0") is AllocationState.UNALLOCATED
    assert Attribution(known=False).allocation("GPU-0") is AllocationState.UNKNOWN


def test_incomplete_instance_list_leaves_an_unknown_mig_uuid_possibly_held(viewer: Viewer) -> None:
    whole = GpuReading(gpu=gpu(mig_enabled=True), instances=(MigReading(instance=mig(7)),))
    lacking = replace(whole, lacks_instances=True)
    kubelet = AskedKubelet(latest=kubelet_answer(1000.0, "MIG-00000000-0000-5000-8000-000000000009"))
    attributor = Attributor(kubelet=kubelet, lookup=viewer.lookup, expiry_seconds=60.0)
    record = SourceRecord()
    record.add(reading(lacking))
    for seen, is_doubtful in (
        (reading(GpuReading(gpu=gpu())), False),
        (reading(GpuReading(gpu=gpu(mig_enabled=True))), True),
        (reading(whole), False),
        (reading(lacking), True),
        (darkened(reading(lacking), "hung"), True),
        (record.add(reading()), True),
    ):
        shown = viewer.views(seen, attributor.join(seen, 1000.0, 50.0), {}, 50.0)
        assert {view.rest_is_free for view in shown} == {not is_doubtful}
        states = {view.allocation for view in shown} - {None}
        assert states == {AllocationState.UNKNOWN if is_doubtful else AllocationState.UNALLOCATED}


@pytest.mark.parametrize("known", [True, False])
def test_use_is_unattributed_only_if_the_holders_are_known(viewer: Viewer, *, known: bool) -> None:
    host = ProcessUse(pid=103, memory_used_bytes=100 * MIB, sm_ratio=0.8)
    busy = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 80, Field.FB_USED: 4096}, processes=(host,))
    (view,) = views(viewer, [busy], Attribution(known=known))
    foreign = (view.unattributed_activity_ratio, view.unattributed_memory_bytes, view.unattributed_processes)
    assert foreign == ((0.8, 100 * MIB, 1) if known else (None, None, None))
    assert view.activity == Activity(ratio=0.8, source=ActivitySource.UTILISATION)


def test_reassigned_minor_number_resolves_to_the_new_gpu(viewer: Viewer) -> None:
    gone = GpuReading(gpu=gpu(0), state=DeviceState.MISSING)
    heir = GpuReading(gpu=replace(gpu(1), index=0, minor=0))
    kubelet = AskedKubelet(latest=kubelet_answer(1000.0))
    attributor = Attributor(kubelet=kubelet, lookup=viewer.lookup, expiry_seconds=60.0)
    assert list(attributor.join(reading(heir, gone), 1000.0, 1000.0).holders) == ["GPU-1"]


def test_xids_are_counted_per_code_and_device() -> None:
    log = EventLog()
    for at, code in ((10.0, 31), (20.0, 79), (30.0, 31)):
        event = XidEvent(uuid="GPU-0", xid=code, at_seconds=at)
        log.add(Reading(source="nvml", taken_at_seconds=at, duration_seconds=0.0, xids=(event,)), None, at)
    xids = log.xids["GPU-0"]
    assert dict(xids.counts) == {31: 2, 79: 1}
    assert (xids.last_seen_seconds[31], xids.last) == (30.0, 31)


def test_number_of_xid_codes_is_limited() -> None:
    log = EventLog()
    events = tuple(XidEvent(uuid="GPU-0", xid=code, at_seconds=1.0) for code in (*range(1000), 5))
    made_up = Reading(source="dcgm", taken_at_seconds=1.0, duration_seconds=0.0, xids=events)
    assert log.add(made_up, None, 1.0) == 1000 - MOST_XIDS
    assert log.xids["GPU-0"].counts[5] == 2
    assert len(log.xids["GPU-0"].counts) == MOST_XIDS


def test_gpu_unseen_by_a_new_child_is_missing_and_keeps_its_instances() -> None:
    record = SourceRecord()
    partitioned = GpuReading(
        gpu=gpu(1, mig_enabled=True),
        values={Field.POWER_USAGE: 90.0},
        instances=(MigReading(instance=mig(7), values={Field.PROF_GR_ENGINE_ACTIVE: 0.7}),),
    )
    record.add(reading(GpuReading(gpu=gpu(0)), partitioned))
    record.add(reading(GpuReading(gpu=gpu(0)), at=1001.0))
    assert record.newest is not None
    _, missing = record.newest.gpus
    assert (missing.state, dict(missing.values)) == (DeviceState.MISSING, {})
    assert missing.instances == (MigReading(instance=mig(7)),)


def test_missing_gpu_does_not_share_its_index_with_another() -> None:
    record = SourceRecord()
    record.add(reading(*(GpuReading(gpu=gpu(number)) for number in range(4))))
    renumbered = [replace(gpu(number), index=index) for index, number in enumerate((0, 2, 3))]
    record.add(reading(*(GpuReading(gpu=one) for one in renumbered), at=1001.0))
    assert record.newest is not None
    shown = {one.gpu.uuid: (one.gpu.index, one.state) for one in record.newest.gpus}
    assert shown == {
        gpu(0).uuid: (0, DeviceState.UP),
        gpu(2).uuid: (1, DeviceState.UP),
        gpu(3).uuid: (2, DeviceState.UP),
        gpu(1).uuid: (3, DeviceState.MISSING),
    }


def test_gpu_replaced_in_its_slot_is_one_gpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="exporter.agent")
    record = SourceRecord()
    old, new = gpu(0), replace(gpu(0), uuid="GPU-new")
    record.add(reading(GpuReading(gpu=old), GpuReading(gpu=gpu(1))))
    record.add(reading(GpuReading(gpu=new), GpuReading(gpu=gpu(1)), at=1001.0))
    assert record.newest is not None
    assert [one.gpu.uuid for one in record.newest.gpus] == [new.uuid, gpu(1).uuid]
    assert [line.getMessage() for line in caplog.records if old.uuid in line.getMessage()] == [
        f"GPU forgotten: uuid={old.uuid} pci_bus_id={old.pci_bus_id}: replaced by {new.uuid}"
    ]


def test_lost_gpu_keeps_its_instances_until_it_recovers() -> None:
    record = SourceRecord()
    up = GpuReading(gpu=gpu(mig_enabled=True), instances=(MigReading(instance=mig(7)),))
    record.add(reading(up))
    record.add(reading(GpuReading(gpu=gpu(mig_enabled=True), state=DeviceState.LOST, reason="gpu_is_lost")))
    assert record.newest is not None
    assert [part.instance for part in record.newest.gpus[0].instances] == [mig(7)]
    repartitioned = GpuReading(gpu=gpu(mig_enabled=True), instances=(MigReading(instance=mig(9)),))
    record.add(reading(repartitioned))
    assert record.newest.gpus[0].instances == repartitioned.instances


def kubelet_answer(at: float, device: str = "nvidia0") -> Allocations:
    listed = ContainerAllocation(
        namespace="ml", pod="a", container="main", devices=(DeviceIds(resource="nvidia.com/gpu", ids=(device,)),)
    )
    return Allocations(answered_at_seconds=at, containers=(listed,))


@pytest.mark.parametrize("set_by_seconds", [-7200.0, 0.0, 7200.0])
def test_answer_expires_on_time_despite_clock_changes(viewer: Viewer, set_by_seconds: float) -> None:
    kubelet = AskedKubelet(latest=kubelet_answer(1000.0))
    attributor = Attributor(kubelet=kubelet, lookup=viewer.lookup, expiry_seconds=60.0)
    seen = reading(GpuReading(gpu=gpu()))
    assert attributor.join(seen, 1000.0, 50.0).known
    wall = 1000.0 + set_by_seconds
    assert not attributor.join(seen, wall + 61.0, 111.0).known
    kubelet.latest = kubelet_answer(wall + 62.0)
    assert attributor.join(seen, wall + 62.0, 112.0).known


def test_recreated_pod_with_its_old_name_has_a_new_age(viewer: Viewer, tmp_path: Path) -> None:
    idle = GpuReading(gpu=gpu(), values={Field.GPU_UTIL: 0, Field.FB_USED: 0})
    for second in range(3):
        (view,) = views(viewer, [idle], held(holder("a")), at=1000.0 + second)
    assert view.pods[0].idle_for_seconds == 2
    logs = tmp_path / "pods"
    (logs / "ml_a_00000000-0000-4000-8000-00000000000c").mkdir()
    (view,) = views(viewer, [idle], held(holder("a")), at=1003.0)
    assert view.pods[0].idle_for_seconds == 3, "the surviving pod is still unknown"
    (logs / f"ml_a_{UID_A}").rmdir()
    (view,) = views(viewer, [idle], held(holder("a")), at=1004.0)
    assert (view.pods[0].age_seconds, view.pods[0].idle_for_seconds) == (0, 0)

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.agent.run import attributor_of
from exporter.attribution.processes import (
    NO_NAME,
    NO_POD,
    Bucket,
    Matched,
    PodLookup,
    ProcessLookup,
    hides_processes,
    match,
    with_unlisted_uses,
)
from exporter.config import load_agent
from exporter.model.attribution import Attribution, Holder, ShareMode
from exporter.model.devices import Gpu, GpuReading, ProcessUse, Reading
from exporter.model.fields import Field

UID_A = "aaaaaaaa-0000-4000-8000-000000000001"
UID_B = "bbbbbbbb-0000-4000-8000-000000000002"
UID_OLD = "cccccccc-0000-4000-8000-000000000003"


def holder(pod: str, container: str = "main", uid: str | None = None) -> Holder:
    return Holder(
        namespace="ml",
        pod=pod,
        container=container,
        device_uuid="GPU-0",
        mode=ShareMode.SHARED,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=0.5,
        device_share_ratio=0.5,
        pod_uid=uid,
    )


A, B = holder("a"), holder("b")
P1, P2, P3 = (ProcessUse(pid=pid) for pid in (1, 2, 3))
NAMES = {UID_A: ("ml", "a"), UID_B: ("ml", "b"), UID_OLD: ("ml", "gone")}


class Known(ProcessLookup):
    """Processes by pid with the UIDs of their pods, and the names of pods if readable."""

    def __init__(self, uids: Mapping[int, str], names: Mapping[str, tuple[str, str]] | None = NAMES) -> None:
        super().__init__(Path("/nonexistent"))
        self.uids, self.names = uids, names

    def pod_uid(self, pid: int) -> str | None:
        return self.uids.get(pid)

    def name_of(self, uid: str) -> tuple[str, str] | None:
        return None if self.names is None else self.names.get(uid, NO_NAME)

    def uid_of(self, namespace: str, pod: str) -> str | None:
        raise NotImplementedError


def write_process(proc: Path, pid: int, *, uid: str | None, started: int = 100, comm: str = "python3") -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True, exist_ok=True)
    cgroup = "0::/user.slice" if uid is None else f"0::/kubepods/pod{uid}/{'ab' * 32}"
    (directory / "cgroup").write_text(f"{cgroup}\n")
    (directory / "stat").write_text(f"{pid} ({comm}) S {'0 ' * 18}{started} {'0 ' * 30}\n")


def of(matched: Matched, *holders: Holder, known: bool = True) -> tuple[ProcessUse, ...]:
    """Return the processes in the bucket of these holders."""
    return next((one.processes for one in matched.buckets if (one.holders, one.known) == (holders, known)), ())


def test_processes_are_matched_to_the_holder_of_their_pod() -> None:
    matched = match([A, B], [P1, P2, P3], Known({1: UID_A, 2: UID_B, 3: UID_A}))
    assert matched.buckets == (Bucket(holders=(A,), processes=(P1, P3)), Bucket(holders=(B,), processes=(P2,)))
    assert matched.unattributed == ()


def test_process_of_a_pod_without_devices_is_unattributed() -> None:
    matched = match([A], [P1], Known({1: UID_OLD}))
    assert (len(matched.buckets), matched.unattributed) == (1, (P1,))


def test_process_of_a_pod_without_log_directory_is_unattributed() -> None:
    matched = match([A], [P1], Known({1: "dddddddd-0000-4000-8000-000000000004"}))
    assert (len(matched.buckets), matched.unattributed) == (1, (P1,))


def test_a_host_process_is_unattributed() -> None:
    matched = match([A], [P1, P2], Known({1: NO_POD, 2: UID_A}))
    assert (of(matched, A), matched.unattributed) == ((P2,), (P1,))


def test_vanished_process_is_unattributed_and_others_stay() -> None:
    matched = match([A], [P1, P2], Known({2: UID_A}))
    assert (of(matched, A), matched.unattributed) == ((P2,), (P1,))


def test_busy_process_that_ended_unresolved_may_belong_to_any_holder() -> None:
    vanished = ProcessUse(pid=1, sm_ratio=0.9, ended=True)
    launcher = ProcessUse(pid=2, sm_ratio=0.0)
    matched = match([A, B], [vanished, launcher], Known({2: UID_A}))
    assert (of(matched, A), of(matched, A, B, known=False), of(matched)) == ((launcher,), (vanished,), ())


@pytest.mark.parametrize("engine", ["sm_ratio", "enc_ratio", "dec_ratio", "jpg_ratio", "ofa_ratio"])
def test_vanished_process_is_busy_on_any_engine(engine: str) -> None:
    vanished = ProcessUse(pid=1, ended=True, **{"sm_ratio": 0.0, engine: 0.4})  # type: ignore[arg-type] # a table
    matched = match([A], [vanished, P2], Known({2: UID_A}))
    assert of(matched, A, known=False) == (vanished,)


def test_processes_of_a_former_pod_do_not_reduce_the_activity_of_the_next() -> None:
    """The driver reports both: a process that has ended since, and one that has started since."""
    before = ProcessUse(pid=1, sm_ratio=0.6, ended=True)
    after = ProcessUse(pid=2, sm_ratio=0.3)
    matched = match([A], [before, after], Known({1: UID_OLD, 2: UID_A}))
    assert matched.buckets == (Bucket(holders=(A,), processes=(after,)),)
    assert match([A], [before], Known({1: UID_OLD})).buckets == ()
    assert match([], [before], Known({1: UID_OLD})).unattributed == (before,), "no other holder followed"


def test_ended_host_process_is_unattributed() -> None:
    ended = ProcessUse(pid=1, sm_ratio=0.6, ended=True)
    assert match([A], [ended, P2], Known({1: NO_POD, 2: UID_A})).unattributed == (ended,)


def test_unresolvable_processes_may_belong_to_any_holder() -> None:
    matched = match([A, B], [P1, P2], Known({}))
    assert matched.buckets == (Bucket(holders=(A, B), processes=(P1, P2), known=False),)


def test_free_device_needs_no_process_matching() -> None:
    matched = match([], [P1], Known({}, names=None))
    assert matched.buckets == (Bucket(holders=(), processes=(P1,)),)


def test_no_holder_is_chosen_by_elimination_without_pod_names() -> None:
    matched = match([A], [P1], Known({1: UID_A}, names=None))
    assert matched.buckets == (Bucket(holders=(A,), processes=(P1,), known=False),)


def test_a_known_pod_uid_needs_no_name() -> None:
    known = holder("a", uid=UID_A)
    assert of(match([known, B], [P1], Known({1: UID_A}, names=None)), known) == (P1,)


def test_unnamed_pod_does_not_match_a_holder_with_another_uid() -> None:
    known = holder("a", uid=UID_A)
    matched = match([known, B], [P1, P2], Known({1: UID_A, 2: UID_B}, names=None))
    assert (of(matched, known), of(matched, B, known=False)) == ((P1,), (P2,))


def test_new_pod_with_the_same_name_does_not_inherit_old_processes() -> None:
    new = holder("a", uid=UID_B)
    matched = match([new], [P1], Known({1: UID_A}))
    assert (len(matched.buckets), matched.unattributed) == (1, (P1,))


def test_containers_of_one_pod_share_its_processes_only() -> None:
    side = holder("a", "side")
    matched = match([A, side, B], [P1, P2], Known({1: UID_A, 2: UID_B}))
    assert (of(matched, A, side), of(matched, B)) == ((P1,), (P2,))


@pytest.mark.parametrize(
    ("processes", "used_mib", "hidden"),
    [
        ((), 59_000, True),
        ((ProcessUse(pid=1, sm_ratio=0.4, ended=True),), 59_000, True),
        ((ProcessUse(pid=1, sm_ratio=0.4, ended=True), ProcessUse(pid=2)), 59_000, False),
        ((ProcessUse(pid=1, sm_ratio=0.4, ended=True),), 3, False),
        ((), 3, False),
    ],
)
def test_processes_are_hidden_if_memory_is_used_but_no_process_runs(
    processes: tuple[ProcessUse, ...], used_mib: int, *, hidden: bool
) -> None:
    assert hides_processes(processes, {Field.FB_USED: used_mib}) is hidden


@pytest.mark.parametrize("comm", ["python3", "a) b (c", "tmux: server", ") S 1 2 3"])
def test_process_with_any_name_resolves_to_its_pod(tmp_path: Path, comm: str) -> None:
    write_process(tmp_path, 7, uid=UID_A, comm=comm)
    assert PodLookup(tmp_path, tmp_path).pod_uid(7) == UID_A


def test_reused_pid_is_resolved_again(tmp_path: Path) -> None:
    resolver = PodLookup(tmp_path, tmp_path)
    write_process(tmp_path, 7, uid=UID_A, started=100)
    assert resolver.pod_uid(7) == UID_A
    write_process(tmp_path, 7, uid=UID_B, started=200)
    assert resolver.pod_uid(7) == UID_B


def test_ended_process_keeps_its_resolved_pod(tmp_path: Path) -> None:
    resolver = PodLookup(tmp_path, tmp_path)
    write_process(tmp_path, 7, uid=UID_A)
    assert resolver.pod_uid(7) == UID_A
    shutil.rmtree(tmp_path / "7")
    assert resolver.pod_uid(7) == UID_A
    write_process(tmp_path, 7, uid=UID_B, started=900)
    assert resolver.pod_uid(7) == UID_B, "the pid belongs to a new process"


def test_recent_and_long_running_processes_stay_in_the_cache(tmp_path: Path) -> None:
    write_process(tmp_path, 1, uid=UID_A)
    write_process(tmp_path, 1000, uid=UID_B)
    pids = PodLookup(tmp_path, tmp_path)
    for pid in range(1000, 6000):
        assert pids.pod_uid(pid) == UID_B
        if pid % 100 == 0:
            assert pids.pod_uid(1) == UID_A
        (tmp_path / str(pid)).rename(tmp_path / str(pid + 1))
    shutil.rmtree(tmp_path / "1")
    assert pids.pod_uid(1) == UID_A, "the driver's samples are from before its end"
    assert pids.pod_uid(5500) == UID_B
    assert pids.pod_uid(2000) is None, "a process that ended long ago is not requested"


def test_host_process_and_vanished_process_are_distinct(tmp_path: Path) -> None:
    write_process(tmp_path, 7, uid=None)
    resolver = PodLookup(tmp_path, tmp_path)
    assert (resolver.pod_uid(7), resolver.pod_uid(8)) == (NO_POD, None)


def test_truncated_stat_file_makes_a_process_unresolvable(tmp_path: Path) -> None:
    write_process(tmp_path, 7, uid=UID_A)
    (tmp_path / "7" / "stat").write_text("7 (python3) S 1\n")
    assert PodLookup(tmp_path, tmp_path).pod_uid(7) is None


def test_pod_names_follow_the_log_directories(tmp_path: Path) -> None:
    names = PodLookup(tmp_path, tmp_path)
    assert names.name_of(UID_A) == NO_NAME
    (tmp_path / f"ml_a_{UID_A}").mkdir()
    (tmp_path / "lost+found").mkdir()
    assert names.name_of(UID_A) == ("ml", "a")
    (tmp_path / f"ml_b_{UID_B}").mkdir()
    assert names.name_of(UID_B) == ("ml", "b")
    (tmp_path / f"ml_a_{UID_A}").rmdir()
    assert names.name_of(UID_A) == NO_NAME


def test_two_pods_with_one_name_are_unknown_until_one_ends(tmp_path: Path) -> None:
    names = PodLookup(tmp_path, tmp_path)
    (tmp_path / f"ml_a_{UID_OLD}").mkdir()
    assert names.name_of(UID_OLD) == ("ml", "a")
    (tmp_path / f"ml_a_{UID_A}").mkdir()
    assert names.name_of(UID_A) is None
    assert names.name_of(UID_OLD) is None
    (tmp_path / f"ml_a_{UID_OLD}").rmdir()
    assert names.name_of(UID_A) == ("ml", "a")


def test_missing_log_directory_resolves_no_pod_name(tmp_path: Path) -> None:
    names = PodLookup(tmp_path, tmp_path / "pods")
    assert names.name_of(UID_A) is None
    (tmp_path / "pods" / f"ml_a_{UID_A}").mkdir(parents=True)
    assert names.name_of(UID_A) == ("ml", "a")


@pytest.mark.parametrize("manager", ["kubernetes", "slurm", "host"])
def test_mps_server_is_detected_by_name_under_every_workload_manager(tmp_path: Path, manager: str) -> None:
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text("9 (nvidia-cuda-mps) S " + "0 " * 18 + "4242 0\n")
    config = load_agent({"workload_manager": manager, "proc_root": str(tmp_path)}, {}, check_paths=False)
    lookup = attributor_of(config).lookup
    shown = ProcessUse(pid=9, sm_ratio=0.9)
    assert match((), (shown,), lookup).by_mps
    assert not match((), (replace(shown, sm_ratio=0.0),), lookup).by_mps
    assert not match((), (replace(shown, pid=8),), lookup).by_mps


def test_mps_server_in_a_pod_does_not_make_a_free_device_unresolved(tmp_path: Path) -> None:
    (tmp_path / "pods" / f"ml_a_{UID_A}").mkdir(parents=True)
    write_process(tmp_path, 7, uid=UID_A, comm="nvidia-cuda-mps")
    write_process(tmp_path, 8, uid=UID_A)
    lookup, free = PodLookup(tmp_path, tmp_path / "pods"), Attribution(known=True)
    gpu = Gpu(uuid="GPU-0", index=0, minor=0, model="H100", pci_bus_id="")

    def used_by(*pids: int) -> Attribution:
        of_gpu = GpuReading(gpu=gpu, processes=tuple(ProcessUse(pid=pid) for pid in pids))
        reading = Reading(source="nvml", taken_at_seconds=0.0, duration_seconds=0.0, gpus=(of_gpu,))
        return with_unlisted_uses(free, reading, lookup)

    assert used_by(7) == free
    assert [(one.pod, one.devices) for one in used_by(7, 8).unresolved] == [("a", ("GPU-0",))]

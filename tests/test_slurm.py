"""Slurm's jobs as holders, by mapping directory and by cgroup, against a fake /proc."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from agent_support import ROOT
from outside_support import Proc, gpu, holders, instance_uuid, joined, partitioned, reading, state, whole

from exporter.attribution import tenants
from exporter.attribution.processes import NO_NAME, NO_POD
from exporter.attribution.tenants import RENEW_SECONDS, TEAM_PATIENCE_SECONDS, Mapped, SlurmJobs
from exporter.model.attribution import AllocationState, Owner
from exporter.model.devices import DeviceState, GpuReading

V2 = "0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n"
V1 = (
    "11:memory:/slurm/uid_1001/job_{job}/step_batch/task_0\n"
    "4:devices:/slurm_node7/uid_1001/job_{job}/step_batch\n"
    "1:name=systemd:/system.slice/slurmd.service\n"
)
USERS = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nbob:x:1001:1001::/:/bin/sh\ngarbage\n"


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    made = Proc(tmp_path / "proc")
    made.users(USERS)
    return made


@pytest.fixture
def mapping(tmp_path: Path) -> Path:
    directory = tmp_path / "mapping"
    directory.mkdir()
    return directory


def running(proc: Proc) -> SlurmJobs:
    return SlurmJobs(mapping_dir=None, proc_root=proc.root)


def owner(jobs: SlurmJobs, name: str) -> Owner | None:
    facts = jobs.facts("slurm", name)
    return facts.owner if facts else None


@pytest.mark.parametrize("form", [V1, V2, "0::/system.slice/node7_slurmstepd.scope/job_{job}/step_extern\n"])
def test_job_of_a_process_in_its_cgroup_holds_the_device(proc: Proc, form: str) -> None:
    proc.add(42, form.format(job=123), user=1001)
    jobs, seen = running(proc), reading(whole(0, 42), whole(1))
    assert jobs.latest is None
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {gpu(0).uuid: [("slurm", "job-123", 1.0)]}
    assert state(jobs.latest, seen, 1) is AllocationState.UNALLOCATED
    assert (jobs.pod_uid(42), jobs.name_of("job-123")) == ("job-123", ("slurm", "job-123"))
    assert jobs.uid_of("slurm", "job-123") == "job-123"
    assert owner(jobs, "job-123") == Owner(namespace="slurm", kind="SlurmJob", name="123", team="bob")
    assert jobs.problem == ""


def test_user_cgroup_cannot_impersonate_a_job(proc: Proc) -> None:
    delegated = "0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_123/step_0\n"
    proc.add(42, delegated, user=1000)
    proc.add(43, V1.format(job=7) + "0::/user.slice/user-1001.slice/session-3.scope\n", user=1001)
    jobs, seen = running(proc), reading(whole(0, 42), whole(1, 43))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {gpu(1).uuid: [("slurm", "job-7", 1.0)]}


def test_several_jobs_on_one_device_share_it_evenly_as_an_estimate(proc: Proc) -> None:
    for pid, job in ((42, 1), (43, 2), (44, 2)):
        proc.add(pid, V2.format(job=job))
    jobs, seen = running(proc), reading(whole(0, 42, 43, 44))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen)[gpu(0).uuid] == [("slurm", "job-1", 0.5), ("slurm", "job-2", 0.5)]
    assert all(holder.share_estimated for holder in joined(jobs.latest, seen).holders[gpu(0).uuid])


def test_processes_outside_jobs_hold_nothing_until_moved_by_slurmstepd(proc: Proc) -> None:
    proc.add(42, "0::/system.slice/slurmd.service\n")
    jobs, seen = running(proc), reading(whole(0, 42))
    jobs.observe(seen, 100.0)
    assert (holders(jobs.latest, seen), jobs.pod_uid(42)) == ({}, NO_POD)
    assert state(jobs.latest, seen, 0) is AllocationState.UNALLOCATED
    proc.add(42, V2.format(job=9))
    jobs.observe(seen, 101.0)
    assert holders(jobs.latest, seen)[gpu(0).uuid] == [("slurm", "job-9", 1.0)]


def test_reused_pid_is_a_new_process_and_a_vanished_one_keeps_its_job(proc: Proc) -> None:
    proc.add(42, V2.format(job=1))
    jobs = running(proc)
    assert jobs.pod_uid(42) == "job-1"
    proc.end(42)
    assert jobs.pod_uid(42) == "job-1"
    proc.add(42, V2.format(job=2), started=77)
    assert jobs.pod_uid(42) == "job-2"
    assert jobs.pod_uid(4711) is None


def test_process_name_with_brackets_and_spaces_is_parsed(proc: Proc) -> None:
    proc.add(42, V2.format(job=1), comm="a) R (b c")
    assert running(proc).pod_uid(42) == "job-1"


def test_user_without_a_name_is_shown_as_uid(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    proc.add(42, V2.format(job=1), user=4000)
    proc.add(43, V2.format(job=2), status="Name: x\nUid:\n")
    jobs = running(proc)
    jobs.observe(reading(whole(0, 42, 43)), 100.0)
    assert (owner(jobs, "job-1") or Owner()).team == "uid-4000"
    assert (owner(jobs, "job-2") or Owner(team="?")).team == ""


def test_root_process_does_not_make_root_the_owner_of_the_job(proc: Proc) -> None:
    proc.add(42, V2.format(job=1), user=0)
    jobs = running(proc)
    jobs.observe(reading(whole(0, 42)), 100.0)
    assert (owner(jobs, "job-1") or Owner(team="?")).team == ""
    proc.add(43, V2.format(job=1))
    jobs.observe(reading(whole(0, 42, 43)), 101.0)
    assert (owner(jobs, "job-1") or Owner()).team == "alice"


def test_mig_instances_have_separate_holders(proc: Proc) -> None:
    proc.add(42, V2.format(job=1))
    jobs, seen = running(proc), reading(partitioned(0, gi1=(42,), gi2=()))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {instance_uuid(0, 1): [("slurm", "job-1", 1.0)]}


def test_invisible_processes_keep_the_last_answer(proc: Proc) -> None:
    proc.add(42, V2.format(job=1))
    jobs = running(proc)
    jobs.observe(reading(whole(0, 42)), 100.0)
    before = jobs.latest
    jobs.observe(reading(GpuReading(gpu=gpu(0), processes=None)), 200.0)
    assert jobs.latest is before
    assert "GPU 0" in jobs.problem
    assert "PID namespace" in jobs.problem
    jobs.observe(reading(whole(0, 4711)), 201.0)  # on the device, but not in this /proc
    assert jobs.latest is before
    assert jobs.errors["processes_not_told"] == 2
    jobs.observe(reading(whole(0)), 202.0)
    assert (jobs.problem, holders(jobs.latest, reading(whole(0)))) == ("", {})


def test_lost_gpu_keeps_its_holders_and_does_not_affect_others(proc: Proc) -> None:
    proc.add(42, V2.format(job=1))
    proc.add(43, V2.format(job=2))
    jobs = running(proc)
    jobs.observe(reading(whole(0, 42), whole(1)), 100.0)
    seen = reading(GpuReading(gpu=gpu(0), state=DeviceState.LOST), whole(1, 43))
    jobs.observe(seen, 101.0)
    jobs.observe(seen, 102.0)
    assert holders(jobs.latest, seen) == {
        gpu(0).uuid: [("slurm", "job-1", 1.0)],
        gpu(1).uuid: [("slurm", "job-2", 1.0)],
    }


def test_lost_gpu_is_held_while_a_process_of_its_job_runs(proc: Proc) -> None:
    for pid in (42, 43):
        proc.add(pid, V2.format(job=1))
    jobs = running(proc)
    jobs.observe(reading(whole(0, 42, 43)), 100.0)
    seen = reading(GpuReading(gpu=gpu(0), state=DeviceState.LOST))
    proc.end(42)
    jobs.observe(seen, 101.0)
    assert holders(jobs.latest, seen) == {gpu(0).uuid: [("slurm", "job-1", 1.0)]}
    proc.add(43, V2.format(job=2), started=77)
    jobs.observe(seen, 86_400.0)
    assert (holders(jobs.latest, seen), state(jobs.latest, seen, 0)) == ({}, AllocationState.UNALLOCATED)


SLUID = "0::/system.slice/{node}slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0\n"


@pytest.mark.parametrize("node", ["", "node7_"])
def test_sluid_without_job_id_leaves_its_gpu_unknown_and_is_reported(proc: Proc, node: str) -> None:
    proc.add(42, SLUID.format(node=node))
    proc.add(43, V2.format(job=2))
    jobs, seen = running(proc), reading(whole(0, 42), whole(1, 43), whole(2))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {gpu(1).uuid: [("slurm", "job-2", 1.0)]}
    assert [state(jobs.latest, seen, index) for index in range(3)] == [
        AllocationState.UNKNOWN,
        AllocationState.ALLOCATED,
        AllocationState.UNALLOCATED,
    ]
    assert [entry.reason for entry in joined(jobs.latest, seen).unresolved] == ["job_id_unknown"]
    assert jobs.problem.startswith("GPU 0: Slurm names the cgroups of jobs by SLUID")
    assert "set CgroupJobIdPaths=yes in cgroup.conf (Slurm 26.05.2 or later)" in jobs.problem
    assert jobs.pod_uid(42) is None
    proc.end(42)
    seen = reading(whole(0), whole(1, 43))
    jobs.observe(seen, 101.0)
    assert (jobs.problem, state(jobs.latest, seen, 0)) == ("", AllocationState.UNALLOCATED)


def test_user_cgroup_in_sluid_form_belongs_to_no_job(proc: Proc) -> None:
    proc.add(42, "0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/s5K1KKYAYG5D00/x\n")
    assert running(proc).pod_uid(42) == NO_POD


def test_mapping_gives_job_and_user_of_sluid_processes(proc: Proc, mapping: Path) -> None:
    proc.add(42, SLUID.format(node=""), user=1001)
    (mapping / "0").write_text("123")
    jobs, seen = SlurmJobs(mapping_dir=mapping, proc_root=proc.root), reading(whole(0, 42))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {gpu(0).uuid: [("slurm", "job-123", 1.0)]}
    assert owner(jobs, "job-123") == Owner(namespace="slurm", kind="SlurmJob", name="123", team="bob")
    assert (jobs.problem, jobs.pod_uid(42)) == ("", None)


def missing(index: int) -> GpuReading:
    return GpuReading(gpu=gpu(index), state=DeviceState.MISSING)


def moved(index: int, *pids: int, to: int) -> GpuReading:
    """Return a GPU under another index than before."""
    return replace(whole(index, *pids), gpu=replace(gpu(index), index=to))


def test_mapping_file_stays_with_one_gpu_after_indices_moved(proc: Proc, mapping: Path) -> None:
    (mapping / "0").write_text("500")
    (mapping / "1").write_text("501")
    jobs = SlurmJobs(mapping_dir=mapping, proc_root=proc.root)
    jobs.observe(reading(whole(0), whole(1)), 100.0)
    seen = reading(missing(0), moved(1, to=0))
    jobs.observe(seen, 105.0)
    both = {gpu(0).uuid: [("slurm", "job-500", 1.0)], gpu(1).uuid: [("slurm", "job-501", 1.0)]}
    assert holders(jobs.latest, seen) == both


def test_mapping_file_applies_to_the_present_gpu_not_a_missing_one(proc: Proc, mapping: Path) -> None:
    jobs = SlurmJobs(mapping_dir=mapping, proc_root=proc.root)
    jobs.observe(reading(whole(0), whole(1)), 100.0)
    (mapping / "0").write_text("500")
    seen = reading(missing(0), moved(1, to=0))
    jobs.observe(seen, 105.0)
    assert holders(jobs.latest, seen) == {gpu(1).uuid: [("slurm", "job-500", 1.0)]}


def test_unchanged_answer_is_the_same_object_until_renewal(proc: Proc) -> None:
    jobs = running(proc)
    jobs.observe(reading(whole(0)), 100.0)
    first = jobs.latest
    jobs.observe(reading(whole(0)), 101.0)
    assert jobs.latest is first
    jobs.observe(reading(whole(0)), 100.0 + RENEW_SECONDS)
    assert jobs.latest is not first
    second = jobs.latest
    jobs.observe(reading(whole(0)), 50.0)  # the clock stepped back
    assert jobs.latest is not second


def test_mapping_gives_holders_without_running_processes(proc: Proc, mapping: Path) -> None:
    (mapping / "0").write_text("123\n")
    (mapping / "2.1").write_text("124_7\n")
    (mapping / ".0.swp").write_text("\0")
    jobs = SlurmJobs(mapping_dir=mapping, proc_root=proc.root)
    seen = reading(whole(0), whole(1), partitioned(2, gi1=(), gi2=()))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {
        gpu(0).uuid: [("slurm", "job-123", 1.0)],
        instance_uuid(2, 1): [("slurm", "job-124_7", 1.0)],
    }
    assert (jobs.problem, jobs.errors) == ("", {})


def test_mapping_of_a_partitioned_gpu_covers_all_instances_and_lines_share_it(proc: Proc, mapping: Path) -> None:
    (mapping / "0").write_text("1\n2\n1\n\n")
    jobs = SlurmJobs(mapping_dir=mapping, proc_root=proc.root)
    seen = reading(partitioned(0, gi1=(), gi2=()))
    jobs.observe(seen, 100.0)
    both = [("slurm", "job-1", 0.5), ("slurm", "job-2", 0.5)]
    assert holders(jobs.latest, seen) == {instance_uuid(0, 1): both, instance_uuid(0, 2): both}


def test_mapping_is_read_again_after_its_interval(proc: Proc, mapping: Path) -> None:
    jobs, seen = SlurmJobs(mapping_dir=mapping, proc_root=proc.root), reading(whole(0))
    jobs.observe(seen, 100.0)
    (mapping / "0").write_text("5")
    jobs.observe(seen, 101.0)
    assert holders(jobs.latest, seen) == {}
    jobs.observe(seen, 105.0)
    assert holders(jobs.latest, seen)[gpu(0).uuid] == [("slurm", "job-5", 1.0)]
    (mapping / "0").unlink()
    jobs.observe(seen, 110.0)
    assert state(jobs.latest, seen, 0) is AllocationState.UNALLOCATED


def test_owner_of_a_mapped_job_waits_for_its_first_process_for_a_bounded_time(proc: Proc, mapping: Path) -> None:
    (mapping / "0").write_text("1")
    (mapping / "1").write_text("2")
    jobs = SlurmJobs(mapping_dir=mapping, proc_root=proc.root)
    jobs.observe(reading(whole(0), whole(1)), 100.0)
    assert (owner(jobs, "job-1"), owner(jobs, "job-2")) == (None, None)
    proc.add(42, V2.format(job=1))
    jobs.observe(reading(whole(0, 42), whole(1)), 101.0)
    assert owner(jobs, "job-1") == Owner(namespace="slurm", kind="SlurmJob", name="1", team="alice")
    jobs.observe(reading(whole(0), whole(1)), 100.0 + TEAM_PATIENCE_SECONDS)
    assert owner(jobs, "job-2") == Owner(namespace="slurm", kind="SlurmJob", name="2")
    assert owner(jobs, "job-3") is None


def test_invalid_mapping_gives_neither_a_holder_nor_a_free_device(proc: Proc, mapping: Path) -> None:
    (mapping / "0").write_bytes(b"\xff\xfe rm -rf\n")
    (mapping / "1").write_text("7")
    (mapping / "9").write_text("8")
    jobs, seen = SlurmJobs(mapping_dir=mapping, proc_root=proc.root), reading(whole(0), whole(1), whole(2))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen) == {gpu(1).uuid: [("slurm", "job-7", 1.0)]}
    assert state(jobs.latest, seen, 0) is AllocationState.UNKNOWN
    assert "SLURM_JOB_ID" in jobs.problem
    assert "1 more" in jobs.problem
    assert jobs.errors == {"mapping_garbage": 1, "mapping_absent_device": 1}
    (mapping / "0").unlink()
    jobs.observe(seen, 105.0)
    assert jobs.problem.startswith("mapping files of devices that are not here: 9;")


def test_missing_mapping_directory_keeps_the_last_answer(proc: Proc, mapping: Path) -> None:
    jobs, seen = SlurmJobs(mapping_dir=mapping, proc_root=proc.root), reading(whole(0))
    (mapping / "0").write_text("1")
    jobs.observe(seen, 100.0)
    before = jobs.latest
    (mapping / "0").unlink()
    mapping.rmdir()
    jobs.observe(seen, 105.0)
    jobs.observe(seen, 106.0)
    assert jobs.latest is before
    assert (str(mapping) in jobs.problem, jobs.errors["mapping_unreadable"]) == (True, 1)
    mapping.mkdir()
    jobs.observe(seen, 111.0)
    assert (jobs.problem, holders(jobs.latest, seen)) == ("", {})


def test_unmapped_job_holds_nothing(proc: Proc, mapping: Path) -> None:
    (mapping / "0").write_text("1")
    proc.add(42, V2.format(job=666))
    jobs, seen = SlurmJobs(mapping_dir=mapping, proc_root=proc.root), reading(whole(0, 42))
    jobs.observe(seen, 100.0)
    assert holders(jobs.latest, seen)[gpu(0).uuid] == [("slurm", "job-1", 1.0)]
    assert jobs.name_of(jobs.pod_uid(42) or "") == ("slurm", "job-666")
    assert jobs.name_of("job-5") == NO_NAME


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (b"", ()),
        (b"12\r\n13\n", ("12", "13")),
        (b" 12 \n", ("12",)),
        (b"12.batch\n12.0\n", ("12",)),
        (b"12_3\n12+1\n", ("12_3", "12+1")),
    ],
)
def test_lines_of_a_mapping_file_are_job_ids(mapping: Path, text: bytes, ids: tuple[str, ...]) -> None:
    (mapping / "3").write_bytes(text)
    assert tenants.read_mapping(mapping) == Mapped(jobs={(3, None): ids} if ids else {})


@pytest.mark.parametrize("text", [b"job 12\n", b"12\n\x00\n", b"x" * 70_000, b"1\n" * 300, b"\xff\n"])
def test_invalid_mapping_file_is_doubtful_and_named(mapping: Path, text: bytes) -> None:
    (mapping / "2.1").write_bytes(text)
    found = tenants.read_mapping(mapping)
    assert found.jobs == {}
    assert str(mapping / "2.1") in found.doubtful[2, 1]


def test_directory_in_place_of_a_mapping_file_is_doubtful(mapping: Path) -> None:
    (mapping / "0").mkdir()
    assert "directory" in tenants.read_mapping(mapping).doubtful[0, None].lower()


def test_prolog_and_epilog_maintain_the_mapping_directory(proc: Proc, mapping: Path) -> None:
    def script(name: str, job: int, gpus: str) -> None:
        env = {"PATH": "/usr/bin:/bin", "GPU_COST_EXPORTER_JOB_MAPPING_DIR": str(mapping)}
        env |= {"SLURM_JOB_ID": str(job), "SLURM_JOB_GPUS": gpus}
        subprocess.run([str(ROOT / "deploy" / "slurm" / f"{name}.sh")], env=env, check=True, timeout=60)

    jobs, seen = SlurmJobs(mapping_dir=mapping, proc_root=proc.root), reading(whole(0), whole(1), whole(2))
    script("prolog", 1, "0,1")
    script("prolog", 2, "1")
    script("prolog", 3, "")
    jobs.observe(seen, 100.0)
    both = [("slurm", "job-1", 0.5), ("slurm", "job-2", 0.5)]
    assert holders(jobs.latest, seen) == {gpu(0).uuid: [("slurm", "job-1", 1.0)], gpu(1).uuid: both}
    script("epilog", 1, "0,1")
    assert {path.name: path.read_text() for path in mapping.glob("[0-9]")} == {"1": "2\n"}
    script("epilog", 2, "1")
    assert list(mapping.glob("[0-9]")) == []

"""Users and systemd units as holders on a host without a workload manager, against a fake /proc."""

from dataclasses import replace
from pathlib import Path

import pytest
from agent_support import matching, running_agent
from outside_support import Proc, gpu, holders, instance_uuid, joined, partitioned, reading, state, whole

from exporter.attribution.processes import NO_NAME, NO_POD
from exporter.attribution.tenants import HostProcess, HostUsers, tenant_of
from exporter.model.attribution import AllocationState, Owner
from exporter.model.devices import DeviceState, ProcessUse
from exporter.model.fields import Field

ID = "ab" * 32
LOGIN = "0::/user.slice/user-1000.slice/session-3.scope\n"
UNIT = "0::/system.slice/triton.service\n"
V1 = (
    "9:devices:/system.slice\n5:memory:/user.slice/user-1000.slice/session-3.scope\n"
    "1:name=systemd:/system.slice/triton.service\n0::/system.slice/triton.service\n"
)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    made = Proc(tmp_path / "proc")
    made.users("root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\n")
    return made


@pytest.mark.parametrize(
    ("cgroup", "found"),
    [
        (UNIT, ("SystemdUnit", "triton.service", None)),
        ("0::/system.slice/triton.service/worker/1\n", ("SystemdUnit", "triton.service", None)),
        ("0::/ml.slice/system-jupyter.slice/jupyter@ann.service\n", ("SystemdUnit", "jupyter@ann.service", None)),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/notebook.service\n",
            ("SystemdUnit", "notebook.service", 1000),
        ),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.code@5f3e.service\n",
            ("User", "", 1000),
        ),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-x-12.scope\n", ("User", "", 1000)),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-u12.service\n", ("User", "", 1000)),
        ("0::/system.slice/run-r0123456789abcdef.service\n", ("User", "", 7)),
        ("0::/system.slice/run-p12-i34.service\n", ("User", "", 7)),
        (LOGIN, ("User", "", 1000)),
        ("0::/\n", ("User", "", 7)),
        ("", ("User", "", 7)),
        ("garbage", ("User", "", 7)),
        (V1, ("SystemdUnit", "triton.service", None)),
        (f"0::/system.slice/docker-{ID}.scope\n", ("Container", ID[:12], None)),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", ("Container", ID[:12], None)),
        (f"0::/user.slice/user-1000.slice/user@1000.service/libpod-{ID}.scope\n", ("Container", ID[:12], 1000)),
        (f"9:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}\n", ("Container", ID[:12], None)),
    ],
)
def test_holder_of_a_process_is_read_from_its_cgroup_or_its_user(
    cgroup: str, found: tuple[str, str, int | None]
) -> None:
    assert tenant_of(HostProcess(command="python3", cgroup=cgroup, user_id=7)) == found


def test_process_without_a_known_user_has_no_holder() -> None:
    assert tenant_of(HostProcess(command="x", cgroup="0::/\n", user_id=None)) == ("", "", None)


def test_process_owner_holds_the_device_and_a_device_without_processes_is_free(proc: Proc) -> None:
    proc.add(42, LOGIN)
    proc.add(43, UNIT, user=998)
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42), whole(1, 43), whole(2))
    users.observe(seen, 100.0)
    assert holders(users.latest, seen) == {
        gpu(0).uuid: [("host", "alice", 1.0)],
        gpu(1).uuid: [("host", "triton.service", 1.0)],
    }
    assert state(users.latest, seen, 2) is AllocationState.UNALLOCATED
    alice, unit = users.facts("host", "alice"), users.facts("host", "triton.service")
    assert alice
    assert unit
    assert alice.owner == Owner(namespace="host", kind="User", name="alice", team="alice")
    assert unit.owner == Owner(namespace="host", kind="SystemdUnit", name="triton.service")
    assert users.facts("host", "bob") is None
    assert users.uid_of("host", "bob") is None
    assert users.name_of("user:bob") == NO_NAME


def test_processes_and_names_map_to_the_same_keys(proc: Proc) -> None:
    proc.add(42, LOGIN)
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42))
    users.observe(seen, 100.0)
    key = users.pod_uid(42)
    assert key == users.uid_of("host", "alice")
    assert users.name_of(key or "") == ("host", "alice")
    assert users.pod_uid(4711) is None


def test_several_holders_of_a_device_have_equal_estimated_shares(proc: Proc) -> None:
    proc.add(42, LOGIN)
    proc.add(43, UNIT)
    proc.add(44, LOGIN)
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42, 43, 44), partitioned(1, gi1=(43,), gi2=()))
    users.observe(seen, 100.0)
    assert holders(users.latest, seen) == {
        gpu(0).uuid: [("host", "alice", 0.5), ("host", "triton.service", 0.5)],
        instance_uuid(1, 1): [("host", "triton.service", 1.0)],
    }
    found = joined(users.latest, seen).holders
    assert all(holder.share_estimated for holder in found[gpu(0).uuid])


@pytest.mark.parametrize(("used_mib", "hidden"), [(59_000, True), (3, False)])
def test_sampled_but_unlisted_processes_are_a_problem(proc: Proc, used_mib: int, *, hidden: bool) -> None:
    """In another PID namespace only active processes are sampled: an idle holder must not seem to be gone."""
    proc.add(42, LOGIN)
    users = HostUsers(proc_root=proc.root)
    sampled = (ProcessUse(pid=42, sm_ratio=0.4, ended=True),)
    users.observe(reading(replace(whole(0), processes=sampled, values={Field.FB_USED: used_mib})), 100.0)
    assert bool(users.problem) is hidden
    assert (users.latest is None) is hidden


def test_same_named_units_of_two_users_are_separate_holders(proc: Proc) -> None:
    form = "0::/user.slice/user-{0}.slice/user@{0}.service/app.slice/notebook.service\n"
    proc.add(42, form.format(1000))
    proc.add(43, form.format(1001))
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42, 43))
    users.observe(seen, 100.0)
    names = [name for _, name, _ in holders(users.latest, seen)[gpu(0).uuid]]
    assert names == ["alice/notebook.service", "uid-1001/notebook.service"]


@pytest.mark.parametrize("comm", ["Xorg", "nvidia-cuda-mps-server"[:15], "nv-hostengine"])
def test_root_services_for_others_hold_nothing_but_a_user_process_does(proc: Proc, comm: str) -> None:
    proc.add(42, UNIT, user=0, comm=comm)
    proc.add(43, LOGIN, comm=comm)
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42), whole(1, 43))
    users.observe(seen, 100.0)
    assert users.pod_uid(42) == NO_POD
    assert holders(users.latest, seen) == {gpu(1).uuid: [("host", "alice", 1.0)]}


def test_holder_ends_with_its_last_process(proc: Proc) -> None:
    proc.add(42, LOGIN)
    users = HostUsers(proc_root=proc.root)
    users.observe(reading(whole(0, 42)), 100.0)
    proc.end(42)
    seen = reading(whole(0))
    users.observe(seen, 101.0)
    assert holders(users.latest, seen) == {}
    assert (users.problem, users.errors) == ("", {})


def test_lost_gpu_is_unallocated_when_its_last_process_has_ended(proc: Proc) -> None:
    proc.add(42, "0::/system.slice/triton.service\n")
    users = HostUsers(proc_root=proc.root)
    users.observe(reading(whole(0, 42)), 100.0)
    seen = reading(whole(0, state=DeviceState.LOST))
    users.observe(seen, 101.0)
    assert holders(users.latest, seen) == {gpu(0).uuid: [("host", "triton.service", 1.0)]}
    proc.end(42)
    users.observe(seen, 30 * 86_400.0)
    assert (holders(users.latest, seen), state(users.latest, seen, 0)) == ({}, AllocationState.UNALLOCATED)


def test_changed_user_name_is_read_without_a_restart(proc: Proc) -> None:
    proc.add(42, "0::/\n", user=1002)
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42))
    users.observe(seen, 100.0)
    assert holders(users.latest, seen)[gpu(0).uuid] == [("host", "uid-1002", 1.0)]
    passwd = proc.root / "1" / "root" / "etc" / "passwd"
    passwd.write_text("carol:x:1002:1002::/:/bin/sh\nroot:x:nonsense:0\n")
    users.observe(seen, 105.0)
    assert holders(users.latest, seen)[gpu(0).uuid] == [("host", "carol", 1.0)]


def test_process_with_an_unreadable_user_still_has_its_unit(proc: Proc) -> None:
    proc.add(42, UNIT)
    proc.add(43, "0::/\n")
    for pid in (42, 43):
        (proc.root / str(pid) / "status").unlink()
    users, seen = HostUsers(proc_root=proc.root), reading(whole(0, 42), whole(1, 43))
    users.observe(seen, 100.0)
    assert holders(users.latest, seen) == {gpu(0).uuid: [("host", "triton.service", 1.0)]}
    assert users.pod_uid(43) == NO_POD


def test_agent_without_kubernetes_names_holders_and_conserves_time() -> None:
    with running_agent("--simulate", "demo", "--workload-manager", "host", "--kube-metadata", "off") as agent:
        info = {"attribution_source": "process", "workload_namespace": "host", "workload_kind": "Container"}
        page = agent.until(lambda page: matching(page, "gpu_pod_info", **info), "holders by their processes")
        assert matching(page, "gpu_pod_info", share_mode="shared", share_estimated="true")
        assert abs(page["gpu_exporter_conservation_error_seconds"]) < 1e-6
        assert agent.get("/readyz")[0] == 200

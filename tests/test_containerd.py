"""Processes in real cgroups of pods, above all those of containerd's containers, are mapped to their pods."""

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import stub_support as stub
from agent_support import ROOT, matching, running_agent
from image_support import (
    Containerd,
    hierarchies,
    lacking_containerd,
    made_cgroup,
    put,
    remove_cgroup,
    running_containerd,
    sleeper,
    within,
)

from exporter.attribution import processes
from exporter.attribution.processes import NO_POD, PodLookup, sees_host_processes
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.truth import HolderTruth, NodeTruth

PROC = Path("/proc")

# Cgroups of kubelets, by driver and quality of service; u is the pod's UID, u_ the same with underscores.
FORMS = {
    "cgroupfs besteffort": "/kubepods/besteffort/pod{u}/{c}",
    "cgroupfs burstable": "/kubepods/burstable/pod{u}/{c}",
    "cgroupfs guaranteed": "/kubepods/pod{u}/{c}",
    "systemd": "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{u_}.slice/cri-containerd-{c}.scope",
    "systemd guaranteed": "/kubepods.slice/kubepods-pod{u_}.slice/cri-containerd-{c}.scope",
    "CRI-O": "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{u_}.slice/crio-{c}.scope/container",
    "a cgroup of its own within": "/kubepods/burstable/pod{u}/{c}/init.scope",
    "below a root": "/some-root/kubepods/besteffort/pod{u}/{c}",
}
BESTEFFORT = FORMS["cgroupfs besteffort"]
SYSTEMD = FORMS["systemd"]
OUTSIDE = "/gpu-cost-exporter-test-{c}.service"

# The product's view of a process, printed by a reader in another cgroup namespace.
READER = """
import json, sys
from pathlib import Path
from exporter.attribution.processes import PodLookup
pid = int(sys.argv[1])
proc = Path("/proc")
print(json.dumps([(proc / str(pid) / "cgroup").read_text(), PodLookup(proc, proc).pod_uid(pid)]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place for the container of a new pod."""

    path: str
    uid: str
    container: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running container."""

    pid: int
    place: Place


Start = Callable[[str], Running]


def new_place(form: str, uid: str = "") -> Place:
    uid, container = uid or str(uuid.uuid4()), secrets.token_hex(32)
    path = form.format(u=uid, u_=uid.replace("-", "_"), c=container)
    return Place(path=path, uid=uid, container=container)


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    if reason := lacking_containerd():
        pytest.skip(reason)
    with running_containerd(tmp_path_factory.mktemp("c")) as running:
        yield running


@pytest.fixture
def start(containerd: Containerd) -> Iterator[Start]:
    """Starts a pod of one container, in a cgroup of the given form."""
    places: list[Place] = []

    def begin(form: str) -> Running:
        places.append(new_place(form))
        return Running(pid=containerd.run(places[-1].path, places[-1].container), place=places[-1])

    yield begin
    for place in places:
        containerd.remove(place.container)
        remove_cgroup(place.path)


@pytest.fixture(params=["v1", "v2"])
def hierarchy(request: pytest.FixtureRequest) -> Path:
    """Return the hierarchy for cgroups of that version; on a machine with one version, that one serves for both."""
    mounts = hierarchies()
    return mounts.get(request.param) or next(iter(mounts.values()))


def until_it_is(pid: int, program: str) -> None:
    deadline = time.monotonic() + 30
    while (PROC / str(pid) / "comm").read_text(encoding="ascii").strip() != program:
        assert time.monotonic() < deadline, f"{pid} does not become {program}"
        time.sleep(0.01)


def text_of(pid: int) -> str:
    return (PROC / str(pid) / "cgroup").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_containerd_container_is_mapped_to_its_pod(start: Start, form: str) -> None:
    running = start(form)
    assert processes.pod_of(text_of(running.pid)) == running.place.uid
    assert PodLookup(PROC, PROC).pod_uid(running.pid) == running.place.uid


def test_ended_container_keeps_its_pod(containerd: Containerd, start: Start) -> None:
    running = start(BESTEFFORT)
    resolver = PodLookup(PROC, PROC)
    assert resolver.pod_uid(running.pid) == running.place.uid
    containerd.ctr("task", "rm", "--force", running.place.container)
    assert not (PROC / str(running.pid)).exists()
    assert resolver.pod_uid(running.pid) == running.place.uid
    assert PodLookup(PROC, PROC).pod_uid(running.pid) is None


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_process_in_a_real_cgroup_is_mapped_to_its_pod(form: str, hierarchy: Path) -> None:
    place = new_place(form)
    with made_cgroup(hierarchy, place.path) as made, sleeper() as pid:
        put(pid, made)
        assert processes.pod_of(text_of(pid)) == place.uid
        assert PodLookup(PROC, PROC).pod_uid(pid) == place.uid


def test_process_moved_into_its_pod_after_the_first_lookup_is_mapped(hierarchy: Path) -> None:
    place = new_place(BESTEFFORT)
    resolver = PodLookup(PROC, PROC)
    with (
        made_cgroup(hierarchy, new_place(OUTSIDE).path) as outside,
        made_cgroup(hierarchy, place.path) as made,
        sleeper() as pid,
    ):
        put(pid, outside)
        assert resolver.pod_uid(pid) == NO_POD
        put(pid, made)
        assert resolver.pod_uid(pid) == place.uid


def test_process_with_its_own_cgroup_namespace_is_mapped_to_its_pod(hierarchy: Path) -> None:
    place = new_place(SYSTEMD)
    with made_cgroup(hierarchy, place.path) as made, sleeper(*within(made)) as pid:
        until_it_is(pid, "sleep")
        assert (PROC / str(pid) / "ns" / "cgroup").readlink() != (PROC / "self" / "ns" / "cgroup").readlink()
        assert PodLookup(PROC, PROC).pod_uid(pid) == place.uid


def read_from(own: Path, pid: int) -> tuple[str, str]:
    """Return a process' cgroups and pod from the view of a reader with a private namespace that begins at ``own``."""
    command = [*within(own), sys.executable, "-c", READER, str(pid)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no cgroup namespace can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    text, uid = json.loads(done.stdout)
    return text, uid


@pytest.mark.parametrize(
    ("form", "own", "seen"),
    [
        (BESTEFFORT, BESTEFFORT, ":/../../pod{u}/{c}\n"),
        (BESTEFFORT, FORMS["cgroupfs guaranteed"], ":/../../besteffort/pod{u}/{c}\n"),
        (FORMS["cgroupfs guaranteed"], BESTEFFORT, ":/../../../pod{u}/{c}\n"),
        (SYSTEMD, SYSTEMD, ":/../../kubepods-burstable-pod{u_}.slice/cri-containerd-{c}.scope\n"),
        (FORMS["systemd guaranteed"], SYSTEMD, ":/../../../kubepods-pod{u_}.slice/cri-containerd-{c}.scope\n"),
    ],
    ids=["of the same class", "guaranteed reader", "guaranteed pod", "systemd", "systemd, guaranteed pod"],
)
def test_reader_in_a_private_cgroup_namespace_maps_a_process_of_another_pod(
    form: str, own: str, seen: str, hierarchy: Path
) -> None:
    place = new_place(form)
    with (
        made_cgroup(hierarchy, place.path) as made,
        made_cgroup(hierarchy, new_place(own).path) as reader,
        sleeper() as pid,
    ):
        put(pid, made)
        text, uid = read_from(reader, pid)
        assert seen.format(u=place.uid, u_=place.uid.replace("-", "_"), c=place.container) in text
        assert "kubepods/" not in text
        assert uid == place.uid


def test_private_cgroup_namespace_hides_the_pod_of_a_sibling_container(hierarchy: Path) -> None:
    place = new_place(BESTEFFORT)
    with (
        made_cgroup(hierarchy, place.path) as made,
        made_cgroup(hierarchy, new_place(BESTEFFORT, place.uid).path) as reader,
        sleeper() as pid,
    ):
        put(pid, made)
        text, uid = read_from(reader, pid)
        assert f":/../{place.container}\n" in text
        assert uid == NO_POD


@contextlib.contextmanager
def kubelet(socket: Path, truth: NodeTruth) -> Iterator[None]:
    """Run a kubelet that answers from a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = KubeletServer(socket, lambda: truth)
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
        yield
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def sharer(pod: str, place: Place, number: int) -> HolderTruth:
    return HolderTruth(
        namespace="ml",
        pod=pod,
        container="main",
        pod_uid=place.uid,
        device_uuid=stub.gpu_uuid(0),
        resource="nvidia.com/gpu",
        device_ids=(f"{stub.gpu_uuid(0)}::{number}",),
        share_ratio=0.5,
        activity_ratio=0.0,
        started_seconds=0.0,
    )


def node_of(holders: tuple[HolderTruth, ...], directory: Path) -> NodeTruth:
    """Return the kubelet's answer about the holders; create the logs of their pods, too."""
    for holder in holders:
        (directory / "pods" / f"{holder.namespace}_{holder.pod}_{holder.pod_uid}" / "main").mkdir(parents=True)
    ids = tuple(one for holder in holders for one in holder.device_ids)
    return NodeTruth(
        at_seconds=0.0,
        node="real",
        driver_version=stub.RELEASE,
        holders=holders,
        allocatable={"nvidia.com/gpu": ids},
    )


def run_on_one_gpu(directory: Path, pids: dict[int, int]) -> dict[str, str]:
    """Run a driver with one GPU that these processes use, in per cent and GiB; yield the agent's environment."""
    control = stub.control(directory / "control", gpus=1)
    control.gpus[0].process_count = len(pids)
    for slot, (pid, percent) in enumerate(pids.items()):
        control.gpus[0].processes[slot] = stub.StubProcess(pid, percent, percent << 30)
    return stub.environment(stub.build(directory / "lib"), directory / "control")


def value(page: dict[str, float], name: str, **labels: str) -> float:
    (found,) = matching(page, name, **labels).values()
    return found


@pytest.mark.skipif(stub.compiler() is None, reason="the simulated driver needs a C compiler")
@pytest.mark.skipif(not sees_host_processes(PROC), reason="needs the host's PID namespace")
@pytest.mark.parametrize("private", [False, True], ids=["host's cgroup namespace", "private cgroup namespace"])
def test_agent_attributes_shared_gpu_activity_to_the_working_container(
    start: Start, tmp_path: Path, *, private: bool
) -> None:
    busy, quiet = start(BESTEFFORT), start(SYSTEMD)
    truth = node_of((sharer("busy", busy.place, 0), sharer("quiet", quiet.place, 1)), tmp_path)
    arguments = ["--node-name", "real", "--sample-interval", "0.2s", "--pod-log-root", str(tmp_path / "pods")]
    arguments += ["--kubelet-socket", str(tmp_path / "kubelet.sock")]
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(made_cgroup(next(iter(hierarchies().values())), new_place(BESTEFFORT).path))
        stranger = stack.enter_context(sleeper())
        environment = run_on_one_gpu(tmp_path, {busy.pid: 40, quiet.pid: 10, stranger: 5})
        stack.enter_context(kubelet(tmp_path / "kubelet.sock", truth))
        prefix = within(own) if private else ()
        agent = stack.enter_context(running_agent(*arguments, prefix=prefix, env=environment))
        page = agent.until(
            lambda page: len(matching(page, "gpu_pod_activity_ratio", source="process_samples")) == 2,
            "activity of both containers by their processes",
        )
    ours = {pod: value(page, "gpu_pod_activity_ratio", pod_name=pod) for pod in ("busy", "quiet")}
    assert ours["busy"] == pytest.approx(4 * ours["quiet"])
    assert value(page, "gpu_pod_memory_used_bytes", pod_name="busy") == 40 << 30
    assert value(page, "gpu_pod_memory_used_bytes", pod_name="quiet") == 10 << 30
    assert value(page, "gpu_unattributed_processes") == 1
    assert value(page, "gpu_unattributed_memory_used_bytes") == 5 << 30
    parts = sum(ours.values()) + value(page, "gpu_unattributed_activity_ratio")
    assert parts == pytest.approx(value(page, "gpu_activity_ratio"))

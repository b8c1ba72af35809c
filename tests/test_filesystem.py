import dataclasses
from pathlib import Path

import pytest

from exporter.attribution.processes import NO_NAME, PodLookup
from exporter.errors import ConfigError
from gpu_simulator.node import write_filesystem
from gpu_simulator.scenario import load, shipped
from gpu_simulator.truth import GpuTruth, HolderTruth, ModelSpec, NodeTruth, ProcessTruth

UID = "aaaaaaaa-0000-4000-8000-000000000001"
GPU = "GPU-00000000-0000-4000-8000-000000000000"
MODEL = ModelSpec(
    name="NVIDIA T4",
    memory_bytes=16 << 30,
    memory_reserved_bytes=0,
    power_limit_watts=70,
    idle_watts=10,
    max_sm_clock_mhz=1590,
    max_mem_clock_mhz=5001,
    multiprocessors=40,
    gpm=False,
)
PROCESS = ProcessTruth(
    pid=4242,
    start_ticks=100,
    comm="a) b",
    cgroup=f"0::/kubepods/pod{UID}/{'ab' * 32}\n",
    memory_used_bytes=1,
    namespace="ml",
    pod="a",
    container="main",
    pod_uid=UID,
)
HOLDER = HolderTruth(
    namespace="ml",
    pod="a",
    container="main",
    pod_uid=UID,
    device_uuid=GPU,
    resource="nvidia.com/gpu",
    device_ids=(GPU,),
    share_ratio=1,
    activity_ratio=1,
    started_seconds=0,
)


def node(*processes: ProcessTruth, holders: tuple[HolderTruth, ...] = (HOLDER,)) -> NodeTruth:
    gpu = GpuTruth(
        index=0, minor=0, uuid=GPU, pci_bus_id="00000000:17:00.0", serial="1", model=MODEL, processes=processes
    )
    return NodeTruth(at_seconds=0, node="n", driver_version="580.1", gpus=(gpu,), holders=holders)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "proc", tmp_path / "pods"


def test_pod_lookup_finds_the_simulated_processes(roots: tuple[Path, Path]) -> None:
    write_filesystem(node(PROCESS), *roots)
    uid = PodLookup(*roots).pod_uid(4242)
    assert uid == UID
    assert PodLookup(*roots).name_of(uid) == ("ml", "a")
    assert (roots[0] / "4242" / "comm").read_text() == "a) b\n"


def test_ended_process_is_removed_and_unchanged_files_are_not_rewritten(roots: tuple[Path, Path]) -> None:
    other = dataclasses.replace(PROCESS, pid=4243)
    write_filesystem(node(PROCESS, other), *roots)
    before = (roots[0] / "4242" / "stat").stat().st_mtime_ns
    write_filesystem(node(PROCESS), *roots)
    assert (roots[0] / "4242" / "stat").stat().st_mtime_ns == before
    assert not (roots[0] / "4243").exists()


def test_reused_pid_maps_to_the_new_pod(roots: tuple[Path, Path]) -> None:
    lookup = PodLookup(*roots)
    write_filesystem(node(PROCESS), *roots)
    assert lookup.pod_uid(4242) == UID
    write_filesystem(node(dataclasses.replace(PROCESS, start_ticks=101, cgroup="0::/user.slice\n")), *roots)
    assert lookup.pod_uid(4242) == ""


def test_removed_pod_has_no_log_directory_while_its_process_lives(roots: tuple[Path, Path]) -> None:
    write_filesystem(node(PROCESS), *roots)
    write_filesystem(node(PROCESS, holders=()), *roots)
    assert PodLookup(*roots).pod_uid(4242) == UID
    assert PodLookup(*roots).name_of(UID) == NO_NAME


def test_listed_pod_without_a_device_has_a_log_directory(roots: tuple[Path, Path]) -> None:
    truth = dataclasses.replace(node(PROCESS, holders=()), other_pods=(("ml", "a", "main"),))
    write_filesystem(truth, *roots)
    assert PodLookup(*roots).name_of(UID) == ("ml", "a")


def test_filesystem_is_marked_as_simulated(roots: tuple[Path, Path]) -> None:
    write_filesystem(node(PROCESS), *roots)
    assert all("simulator" in (root / "simulated").read_text() for root in roots)


@pytest.mark.parametrize("name", shipped())
def test_every_process_of_a_shipped_scenario_maps_to_its_pod(name: str, roots: tuple[Path, Path]) -> None:
    scenario = load(name)
    lookup = PodLookup(*roots)
    for now in (1.0, 60.0, 600.0, 6000.0):
        truth = scenario.at(now)
        write_filesystem(truth, *roots)
        listed = {(holder.namespace, holder.pod) for holder in truth.holders}
        listed.update((namespace, pod) for namespace, pod, _ in truth.other_pods)
        for gpu in truth.gpus:
            for process in (*gpu.processes, *(process for one in gpu.instances for process in one.processes)):
                uid = lookup.pod_uid(process.pid)
                assert uid == process.pod_uid
                pod = (process.namespace, process.pod)
                assert not uid or lookup.name_of(uid) == (pod if pod in listed else NO_NAME)


def test_foreign_directory_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "proc" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="not empty"):
        write_filesystem(node(PROCESS), tmp_path / "proc", tmp_path / "pods")
    assert (tmp_path / "proc" / "1").exists()


def test_log_directory_exists_before_the_process(tmp_path: Path) -> None:
    """Otherwise a reader in between would find a process of a pod that is not on this node."""
    proc, pods = tmp_path / "proc", tmp_path / "pods"
    proc.mkdir()
    write_filesystem(dataclasses.replace(load("demo").at(0.0), gpus=(), holders=(), pods=()), proc, pods)
    truth = load("demo").at(0.0)
    process = next(process for gpu in truth.gpus for process in gpu.processes)
    (proc / str(process.pid)).write_text("in the way")
    with pytest.raises(FileExistsError):
        write_filesystem(truth, proc, pods)
    assert PodLookup(proc, pods).name_of(process.pod_uid) == (process.namespace, process.pod)

"""A GPU that is missing or hangs: the others are read as before, and it is up again once it answers."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from agent_support import ROOT, matching, running_agent, until
from driver_support import gpu, instance
from metering_support import plain_node
from pipeline_support import AskedKubelet

from exporter.accounting.prices import PriceBook
from exporter.agent.attributor import Attributor
from exporter.agent.history import SourceRecord
from exporter.agent.run import Agent, bound_driver
from exporter.agent.sources import MissingGpus, Sources
from exporter.attribution.processes import PodLookup
from exporter.gpu.worker import Worker
from exporter.metrics.collector import ExpositionOptions
from exporter.metrics.collectors_file import ALWAYS_READ
from exporter.model.attribution import Allocations, ContainerAllocation, DeviceIds
from exporter.web.server import Renderer
from gpu_simulator.truth import Fault

CHILD = """
import pathlib, sys, time
sys.path[:0] = [{tests!r}]
from driver_support import gpu, instance
from gpu_simulator import driver
from gpu_simulator.truth import Fault, NodeTruth
from exporter.gpu import child

faults = pathlib.Path({faults!r})

def truth():
    gpus = []
    for index in range(3):
        path = faults / str(index)
        mig = dict(mig_enabled=True, instances=(instance(1),)) if (faults / f"mig-{{index}}").exists() else {{}}
        gpus.append(gpu(index, fault=Fault(path.read_text()) if path.exists() else None, **mig))
    return NodeTruth(at_seconds=time.time() - epoch, node="n", driver_version="550.54.15", gpus=tuple(gpus))

epoch = time.time()
driver.install(truth, epoch_seconds=epoch)
child.main(["--interval", "0.1", "--fields", {fields!r}, *sys.argv[1:]])
"""
WHOLE = tuple(gpu(number).uuid for number in range(3))
UP, MISSING = ("up", ""), ("missing", "not_enumerated")
HUNG = ("failed", "hung")


class Faults:
    """Faults of each GPU of the simulated driver, for every process that opens it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def set(self, index: int, fault: Fault) -> None:
        new = self.directory / "new"
        new.write_text(fault)
        new.rename(self.directory / str(index))

    def end(self, index: int) -> None:
        (self.directory / str(index)).unlink()

    def worker(self) -> Worker:
        """Return a worker whose child is killed after half a second of silence."""
        fields = ",".join(str(int(field)) for field in sorted(ALWAYS_READ))
        program = CHILD.format(tests=str(ROOT / "tests"), faults=str(self.directory), fields=fields)
        return Worker(
            name="nvml",
            command=(sys.executable, "-c", program),
            interval_seconds=0.1,
            deadline_seconds=0.5,
            start_deadline_seconds=3.0,
        )


def states(agent: Agent) -> list[tuple[str, str]]:
    """Return state and reason of each GPU, by UUID: without one GPU a driver numbers the others differently."""
    views = agent.snapshot.devices if agent.snapshot else ()
    return [(view.state, view.reason) for view in sorted(views, key=lambda view: view.uuid)]


def bind(sys_root: Path, bus_id: str, driver: str) -> None:
    """Bind a PCI device to a kernel driver, as in sysfs."""
    device = sys_root / "bus/pci/devices" / bus_id
    device.mkdir(parents=True, exist_ok=True)
    (device / "driver").unlink(missing_ok=True)
    (device / "driver").symlink_to(Path("../../../bus/pci/drivers") / driver)


def on_page(agent: Agent, name: str, label: str) -> dict[str, float]:
    """Return values of a metric on the page, by one of their labels."""
    text = agent.renderer.metrics(agent.snapshot, "").plain.decode() if agent.snapshot else ""
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {key.split(f'{label}="')[1].split('"')[0]: float(value) for key, value in rows}


@asynccontextmanager
async def running(
    worker: Worker,
    sys_root: Path = Path("/nowhere"),
    held: Sequence[str] = WHOLE,
) -> AsyncIterator[Agent]:
    """Run an agent that samples every 0.1 s and waits 0.3 s for a missing GPU."""
    containers = tuple(
        ContainerAllocation(
            namespace="ml",
            pod=f"train-{number}",
            container="main",
            devices=(DeviceIds(resource="nvidia.com/gpu", ids=(uuid,)),),
        )
        for number, uuid in enumerate(held)
    )
    kubelet = AskedKubelet(latest=Allocations(answered_at_seconds=time.time(), containers=containers))
    attributor = Attributor(kubelet=kubelet, lookup=PodLookup(Path("/"), Path("/")), expiry_seconds=60.0)
    agent = Agent(
        node=plain_node(
            Sources(nvml=worker, stale_after_seconds=3.0, missing=MissingGpus(first_seconds=0.3, longest_seconds=1.0)),
            attributor,
            sample_interval_seconds=0.1,
            process_clock=time.monotonic,
            record=SourceRecord(bound_driver=partial(bound_driver, sys_root)),
        ),
        renderer=Renderer(ExpositionOptions()),
        release_seconds=60.0,
        load_prices=lambda: PriceBook(name="test", currency="USD", rows=()),
    )
    task = asyncio.create_task(agent.run(socket.create_server(("127.0.0.1", 0))))
    try:
        yield agent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def children() -> list[int]:
    """Return the process ids of this process' children."""
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="ascii")
    return [int(pid) for pid in text.split()]


async def longest_gap_seconds(agent: Agent, index: int, until_true: Callable[[], bool]) -> float:
    """Return the longest time for which one GPU was not up on the page, until a condition holds."""
    longest, since, end = 0.0, None, time.monotonic() + 30.0
    while not until_true():
        assert time.monotonic() < end, "the condition was not met in time"
        now = time.monotonic()
        if states(agent)[index] == UP:
            since = None
        else:
            since = now if since is None else since
            longest = max(longest, now - since)
        await asyncio.sleep(0.02)
    return longest


async def test_returning_gpu_is_up_and_the_others_have_no_gap(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    worker = faults.worker()
    async with running(worker) as agent:
        await until(lambda: states(agent) == [UP, UP, UP])
        faults.set(1, Fault.GPU_ABSENT)
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: states(agent) == [UP, MISSING, UP])
        second = worker.pid
        assert worker.well_gpus == 2
        assert agent.snapshot is not None
        assert len({view.gpu.index for view in agent.snapshot.devices}) == 3
        faults.end(1)
        dark = await longest_gap_seconds(agent, 0, lambda: states(agent) == [UP, UP, UP])
        assert dark < 0.5
        # A new process takes over after it has measured everything.
        assert worker.pid != second
        assert worker.status.restarts == 1


async def test_partitioned_gpu_missing_at_start_is_up_once_it_returns(tmp_path: Path) -> None:
    """The kubelet lists its instances, and their ids do not name their GPU."""
    faults = Faults(tmp_path)
    (tmp_path / "mig-1").touch()
    faults.set(1, Fault.GPU_ABSENT)
    async with running(faults.worker(), held=(gpu(0).uuid, instance(1).uuid, gpu(2).uuid)) as agent:
        await until(lambda: states(agent) == [UP, UP])
        faults.end(1)
        await until(lambda: instance(1).uuid in {view.uuid for view in agent.snapshot.devices})
    assert agent.snapshot.attribution.unresolved == ()


async def test_gpu_passed_to_a_virtual_machine_is_not_missing(tmp_path: Path) -> None:
    faults, sys_root = Faults(tmp_path), tmp_path / "sys"
    worker = faults.worker()
    async with running(worker, sys_root) as agent:
        await until(lambda: states(agent) == [UP, UP, UP])
        faults.set(1, Fault.GPU_ABSENT)
        bind(sys_root, "0000:18:00.0", "nvidia")
        await until(lambda: states(agent)[1] != UP)
        assert len(states(agent)) == 3  # without evidence it is missing, and its holder keeps it
        bind(sys_root, "0000:18:00.0", "vfio-pci")
        await until(lambda: states(agent) == [UP, UP])
        assert agent.snapshot is not None
        assert (agent.snapshot.expected_devices, agent.snapshot.ready) == (2, True)
        bind(sys_root, "0000:18:00.0", "nvidia")
        faults.end(1)
        await until(lambda: states(agent) == [UP, UP, UP])


async def test_lost_gpu_does_not_restart_the_process_of_the_others(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    worker = faults.worker()
    async with running(worker) as agent:
        await until(lambda: states(agent) == [UP, UP, UP])
        first = worker.pid
        faults.set(1, Fault.GPU_LOST)
        lost = [UP, ("lost", "gpu_is_lost"), UP]
        await until(lambda: states(agent) == lost)
        worker.renew()
        since = time.monotonic()
        dark = await longest_gap_seconds(agent, 0, lambda: time.monotonic() - since > 2.5)
        assert (dark, worker.pid, states(agent)) == (0.0, first, lost)


async def test_hung_gpu_does_not_affect_others_and_recovers(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    worker = faults.worker()
    async with running(worker) as agent:
        await until(lambda: states(agent) == [UP, UP, UP])
        faults.set(1, Fault.HANG)
        dark = await longest_gap_seconds(agent, 0, lambda: states(agent) == [UP, HUNG, UP])
        assert dark < 5.0  # the deadline and one start
        working, since = worker.pid, time.monotonic()
        # A process for which no other waits reads the hung GPU again in that time.
        dark = await longest_gap_seconds(agent, 2, lambda: time.monotonic() - since > 4.5)
        assert (dark, worker.pid, worker.status.restarts) == (0.0, working, 1)
        assert (worker.errors, states(agent)) == ({"hung": 1}, [UP, HUNG, UP])
        assert on_page(agent, "gpu_up", "gpu") == {"0": 1, "1": 0, "2": 1}
        assert on_page(agent, "DCGM_FI_DEV_POWER_USAGE", "gpu").keys() == {"0", "2"}
        assert on_page(agent, "gpu_pod_share_ratio", "pod_name") == {"train-0": 1, "train-1": 1, "train-2": 1}
        faults.end(1)
        dark = await longest_gap_seconds(agent, 0, lambda: states(agent) == [UP, UP, UP])
        assert dark < 0.5
        assert worker.status.restarts == 1


def test_the_page_of_an_agent_shows_a_hung_gpu_down_and_the_others_up(tmp_path: Path) -> None:
    path = tmp_path / "hung.yaml"
    pods = [f"{{namespace: ml, name: train-{gpu}, devices: [{{gpu: {gpu}}}], activity: 0.9}}" for gpu in range(2)]
    faults = "{kind: hang, gpu: 1, from: 5, to: 19}"
    text = f"node: n\ngpus: [{{model: h100, count: 2}}]\npods: [{', '.join(pods)}]\nfaults: [{faults}]\n"
    path.write_text(text, encoding="utf-8")

    def up(page: dict[str, float]) -> list[float]:
        return [value for key, value in sorted(page.items()) if key.startswith("gpu_up{")]

    with running_agent("--simulate", str(path), "--sample-interval", "500ms") as agent:
        agent.until(lambda page: up(page) == [1, 1], "two GPUs")
        page = agent.until(lambda page: up(page) == [1, 0], "the other GPU continues")
        assert len(matching(page, "gpu_pod_share_ratio")) == 2
        agent.until(lambda page: up(page) == [1, 1], "the GPU is back")


async def test_two_hung_gpus_recover_independently(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    worker = faults.worker()
    async with running(worker) as agent:
        await until(lambda: states(agent) == [UP, UP, UP])
        faults.set(0, Fault.HANG)
        faults.set(2, Fault.HANG)
        await until(lambda: states(agent) == [HUNG, UP, HUNG])
        faults.end(2)
        await until(lambda: states(agent) == [HUNG, UP, UP])
        faults.end(0)
        await until(lambda: states(agent) == [UP, UP, UP])


async def test_gpu_hanging_at_driver_open_hides_no_other_gpu(tmp_path: Path) -> None:
    faults = Faults(tmp_path)
    faults.set(0, Fault.HANG)
    worker = faults.worker()
    async with running(worker) as agent:
        await until(lambda: states(agent) == [UP, UP])
        assert worker.status.restarts == 1
        faults.end(0)
        await until(lambda: states(agent) == [UP, UP, UP])


async def test_one_process_reads_the_driver_in_normal_operation(tmp_path: Path) -> None:
    others = set(children())  # children of other tests in this process
    worker = Faults(tmp_path).worker()
    async with running(worker) as agent:
        await until(lambda: states(agent) == [UP, UP, UP])
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert set(children()) - others == {worker.pid}


def dues(missing: MissingGpus, *, expected: int | None, well: int | None, until_seconds: int) -> list[int]:
    return [at for at in range(until_seconds) if missing.is_due(expected=expected, well=well, steady=float(at))]


def test_driver_is_reopened_with_increasing_intervals_while_a_gpu_is_missing() -> None:
    assert dues(MissingGpus(), expected=8, well=7, until_seconds=3000) == [60, 180, 420, 900, 1500, 2100, 2700]


def test_driver_is_not_reopened_without_a_missing_gpu() -> None:
    assert dues(MissingGpus(), expected=8, well=8, until_seconds=3000) == []
    assert dues(MissingGpus(), expected=7, well=8, until_seconds=3000) == []
    assert dues(MissingGpus(), expected=None, well=8, until_seconds=3000) == []
    assert dues(MissingGpus(), expected=8, well=None, until_seconds=3000) == []


def test_new_missing_gpu_resets_the_interval() -> None:
    missing = MissingGpus()
    assert dues(missing, expected=8, well=7, until_seconds=500) == [60, 180, 420]
    assert not missing.is_due(expected=8, well=8, steady=500.0)
    assert [at for at in range(600, 700) if missing.is_due(expected=8, well=7, steady=float(at))] == [660]


def test_time_without_driver_answer_does_not_extend_the_first_interval() -> None:
    missing = MissingGpus()
    assert not missing.is_due(expected=8, well=7, steady=0.0)
    assert not missing.is_due(expected=8, well=None, steady=30.0)
    assert missing.is_due(expected=8, well=7, steady=60.0)

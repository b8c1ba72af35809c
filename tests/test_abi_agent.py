"""The whole agent on a simulated driver library: /metrics is served throughout, in every state of the driver."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import agent_support
import pytest
import stub_support as stub
from agent_support import AgentProcess, matching

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated driver needs a C compiler")

GPUS = 4
SLOWEST_SCRAPE_SECONDS = 2.0
Page = dict[str, float]


@contextmanager
def scraped_all_the_time(agent: AgentProcess) -> Iterator[None]:
    """Scrape ten times a second in the block, four times at least; every scrape must be answered in time."""
    stop, took = threading.Event(), []

    def scrape() -> None:
        while not stop.wait(0.1) or len(took) < 4:
            started = time.monotonic()
            try:
                status, _ = agent.get("/metrics")
            except OSError as error:
                took.append(repr(error))
            else:
                seconds = time.monotonic() - started
                is_well = status == 200 and seconds <= SLOWEST_SCRAPE_SECONDS
                took.append("" if is_well else f"status {status} after {seconds:.1f} s")

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert [problem for problem in took if problem] == []


@dataclass(frozen=True)
class Node:
    """An agent, and the control of its driver."""

    agent: AgentProcess
    control: stub.StubControl

    def child(self) -> int:
        """Return the process id of the child that owns the driver."""
        self.agent.until(lambda _: len(self.agent.children()) == 1, "one child")
        return self.agent.children()[0]


def up(page: Page) -> dict[int, float]:
    """Return ``gpu_up`` by the GPU's index."""
    found = {index: matching(page, "gpu_up", uuid=stub.gpu_uuid(index)) for index in range(GPUS)}
    return {index: value for index, series in found.items() for value in series.values()}


def all_up(page: Page) -> bool:
    return up(page) == dict.fromkeys(range(GPUS), 1.0)


def total(page: Page, name: str, **labels: str) -> float:
    return sum(matching(page, name, **labels).values())


def errors(page: Page, reason: str) -> float:
    return total(page, "gpu_exporter_errors_total", reason=reason)


def restarts(page: Page) -> float:
    return total(page, "gpu_exporter_worker_restarts_total")


@contextmanager
def running(library: Path, directory: Path, *, driver_error: int = 0) -> Iterator[Node]:
    """Run an agent on the simulated driver; wait until all GPUs are up, unless the driver has an error."""
    control = stub.control(directory / "control", gpus=GPUS)
    control.driver_error = driver_error
    env = stub.environment(library, directory / "control")
    options = ("--node-name", "abi", "--sample-interval", "500ms", "--attribution", "off")
    with agent_support.running_agent(*options, env=env) as agent:
        agent.until(lambda page: driver_error or all_up(page), "the start")
        with scraped_all_the_time(agent):
            yield Node(agent, control)
        assert agent.end() == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def node(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Run an agent for all tests that leave its driver unchanged."""
    with running(library, tmp_path_factory.mktemp("node")) as one:
        yield one


def test_scrape_shows_the_values_of_the_driver(node: Node) -> None:
    page = node.agent.until(lambda page: len(matching(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE")) == GPUS, "GPM")
    for index in range(GPUS):
        mine = {name.partition("{")[0]: value for name, value in page.items() if stub.gpu_uuid(index) in name}
        assert mine["DCGM_FI_DEV_GPU_TEMP"] == 50 + index
        assert mine["DCGM_FI_DEV_POWER_USAGE"] == 400 + index
        assert mine["DCGM_FI_DEV_GPU_UTIL"] == 90 - index
        assert mine["DCGM_FI_DEV_FB_USED"] == 20_000 + index
        assert mine["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == 5_000_000_000_000 + index
        assert mine["DCGM_FI_PROF_GR_ENGINE_ACTIVE"] == pytest.approx((805 - index) / 1000)
        assert mine["gpu_activity_ratio"] == pytest.approx((805 - index) / 1000)


def test_metrics_are_served_while_a_driver_call_hangs_and_devices_return(node: Node) -> None:
    node.control.hang = b"nvmlDeviceGetPowerUsage"
    dark = node.agent.until(lambda page: up(page) == dict.fromkeys(range(GPUS), 0.0), "every GPU down")
    assert matching(dark, "gpu_activity_ratio") == {}
    hung = node.agent.until(lambda page: errors(page, "hung") >= 1, "the hang counted")
    assert restarts(hung) >= 1
    node.control.hang = b""
    page = node.agent.until(all_up, "all up after the hang")
    assert total(page, "gpu_exporter_source_up") == 1


def test_lost_gpu_alone_is_down_and_returns(node: Node) -> None:
    node.control.gpus[3].error = 15
    page = node.agent.until(lambda page: up(page).get(3) == 0, "GPU 3 down")
    assert up(page) == {index: float(index != 3) for index in range(GPUS)}
    assert not any(stub.gpu_uuid(3) in name for name in matching(page, "DCGM_FI_DEV_POWER_USAGE"))
    node.control.gpus[3].error = 0
    node.agent.until(all_up, "GPU 3 back")


def test_killed_child_is_replaced_while_metrics_are_served(node: Node) -> None:
    before = node.agent.until(all_up, "all up")
    os.kill(node.child(), signal.SIGKILL)
    node.agent.until(lambda page: errors(page, "died") >= 1, "the death counted")
    page = node.agent.until(all_up, "all up after the kill")
    assert restarts(page) == restarts(before) + 1


def test_release_unmaps_the_driver_library_until_it_reopens(library: Path, node: Node) -> None:
    mapped, child = str(library / "libnvidia-ml.so.1"), node.child()
    assert mapped in Path(f"/proc/{child}/maps").read_text(encoding="utf-8")
    assert mapped not in Path(f"/proc/{node.agent.process.pid}/maps").read_text(encoding="utf-8")
    assert node.agent.ask("POST", "/-/release?seconds=2")[0] in {200, 202}
    page = node.agent.until(lambda page: up(page) and 1.0 not in up(page).values(), "the driver released")
    assert matching(page, "gpu_activity_ratio") == {}, "an unmeasured value is absent"
    status, reasons = node.agent.get("/readyz")
    assert (status, "released" in reasons) == (503, True)
    assert not Path(f"/proc/{child}").exists()
    node.agent.until(all_up, "all up after the release")
    node.agent.process.send_signal(signal.SIGUSR1)
    node.agent.until(lambda page: 1.0 not in up(page).values(), "SIGUSR1 releases as well")


def test_library_replaced_under_the_agent_is_loaded_without_a_restart(tmp_path: Path) -> None:
    library = stub.build(tmp_path / "driver")
    with running(library, tmp_path) as node:
        child = node.child()
        node.control.kernel_release = stub.NEXT_RELEASE.encode()
        node.agent.until(lambda page: errors(page, "library_mismatch") >= 1, "the mismatch counted")
        stub.build(library, release=stub.NEXT_RELEASE)
        page = node.agent.until(all_up, "all up on the new library")
        assert matching(page, "gpu_info", driver_version=stub.NEXT_RELEASE)
        assert node.child() != child


def test_agent_without_a_driver_is_not_ready_and_starts_when_it_loads(library: Path, tmp_path: Path) -> None:
    with running(library, tmp_path, driver_error=9) as node:
        page = node.agent.until(lambda page: errors(page, "driver_not_loaded") >= 1, "the reason counted")
        assert up(page) == {}
        status, body = node.agent.get("/readyz")
        assert status == 503
        assert "kernel module is not loaded" in body
        assert node.agent.get("/healthz")[0] == 200
        node.control.driver_error = 0
        node.agent.until(all_up, "all up once the driver is loaded")
        assert node.agent.get("/readyz")[0] == 200

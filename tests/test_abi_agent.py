"""The whole agent on a simulated driver library: /metrics is served throughout, whatever the driver does."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import stub_support as stub

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated driver needs a C compiler")

PATIENCE_SECONDS = 40.0
SLOWEST_SCRAPE_SECONDS = 2.0
ROOT = Path(__file__).resolve().parents[1]


class Agent:
    """A running agent, scraped all the time; every scrape must be answered, and quickly."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, control: stub.StubControl) -> None:
        self.process, self.port, self.control = process, port, control
        self.failures: list[str] = []
        self.scrapes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._scrape_on)

    @contextlib.contextmanager
    def scraped_all_the_time(self) -> Iterator[None]:
        """Scrape ten times a second meanwhile, four times at least; every scrape must have been answered in time."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
        assert self.failures == []

    def ask_any(self, method: str, path: str) -> tuple[int, str]:
        """Return the status and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def ask(self, method: str, path: str) -> str:
        """Return the body of a good answer."""
        status, body = self.ask_any(method, path)
        if not 200 <= status < 300:
            raise OSError(f"{method} {path}: {status} {body}")
        return body

    def page(self) -> dict[str, float]:
        """Return the series of one scrape by name and labels."""
        lines = self.ask("GET", "/metrics").splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def until(self, check: Callable[[dict[str, float]], object], what: str) -> dict[str, float]:
        """Return the first page for which ``check`` is true."""
        until = time.monotonic() + PATIENCE_SECONDS
        page: dict[str, float] = {}
        while time.monotonic() < until:
            try:
                page = self.page()
            except OSError:
                page = {}
            if page and check(page):
                return page
            time.sleep(0.05)
        own = {name: value for name, value in page.items() if name.startswith(("gpu_up", "gpu_exporter"))}
        pytest.fail(f"not seen within {PATIENCE_SECONDS} s: {what}; {own}")

    def child(self) -> int:
        """Return the pid of the process that owns the driver."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        return int(text.split()[0])

    def _scrape_on(self) -> None:
        while not self._stop.wait(0.1) or self.scrapes <= 3:
            started = time.monotonic()
            try:
                self.page()
            except OSError as error:
                self.failures.append(repr(error))
            if (took := time.monotonic() - started) > SLOWEST_SCRAPE_SECONDS:
                self.failures.append(f"a scrape took {took:.1f} s")
            self.scrapes += 1


def up(page: dict[str, float]) -> dict[int, float]:
    """Return ``gpu_up`` by the GPU's index."""
    rows = {index: f'uuid="{stub.gpu_uuid(index)}"' for index in range(8)}
    found = {}
    for name, value in page.items():
        for index, label in rows.items():
            if name.startswith("gpu_up{") and label in name:
                found[index] = value
    return found


def all_up(page: dict[str, float]) -> bool:
    return up(page) == dict.fromkeys(range(8), 1.0)


def errors(page: dict[str, float], reason: str) -> float:
    return sum(
        value
        for name, value in page.items()
        if name.startswith("gpu_exporter_errors_total{") and f'reason="{reason}"' in name
    )


def series(page: dict[str, float], name: str) -> float:
    return sum(value for key, value in page.items() if key == name or key.startswith(name + "{"))


@pytest.fixture(scope="module")
def driver_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub.build(tmp_path_factory.mktemp("driver"))


@contextlib.contextmanager
def running_agent(driver_directory: Path, tmp_path: Path, *, driver_error: int = 0) -> Iterator[Agent]:
    control = stub.control(tmp_path / "control")
    control.driver_error = driver_error
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "exporter", "agent", "--listen", f"127.0.0.1:{port}", "--node-name", "abi"]
    command += ["--sample-interval", "0.5s", "--attribution", "off", "--lock-dir", str(tmp_path / "lock")]
    environment = {**os.environ, **stub.environment(driver_directory, tmp_path / "control"), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    agent = Agent(process, port, control)
    try:
        agent.until(lambda page: driver_error or all_up(page), "the start")
        with agent.scraped_all_the_time():
            yield agent
        assert process.poll() is None, "the agent ended"
    finally:
        process.terminate()
        try:
            code = process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
    assert code == 0


@pytest.fixture
def agent(driver_directory: Path, tmp_path: Path) -> Iterator[Agent]:
    with running_agent(driver_directory, tmp_path) as one:
        yield one


def test_what_the_driver_holds_is_what_a_scrape_shows(agent: Agent) -> None:
    page = agent.until(lambda page: any(name.startswith("DCGM_FI_PROF_GR_ENGINE_ACTIVE{") for name in page), "GPM")
    for index in range(8):
        mine = {name.partition("{")[0]: value for name, value in page.items() if stub.gpu_uuid(index) in name}
        assert mine["DCGM_FI_DEV_GPU_TEMP"] == 50 + index
        assert mine["DCGM_FI_DEV_POWER_USAGE"] == 400 + index
        assert mine["DCGM_FI_DEV_GPU_UTIL"] == 90 - index
        assert mine["DCGM_FI_DEV_FB_USED"] == 20_000 + index
        assert mine["DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"] == 5_000_000_000_000 + index
        assert mine["DCGM_FI_PROF_GR_ENGINE_ACTIVE"] == pytest.approx((805 - index) / 1000)
        assert mine["gpu_activity_ratio"] == pytest.approx((805 - index) / 1000)


def test_metrics_are_served_while_a_driver_call_hangs_and_devices_come_back(agent: Agent) -> None:
    agent.control.hang = b"nvmlDeviceGetPowerUsage"
    dark = agent.until(lambda page: up(page) == dict.fromkeys(range(8), 0.0), "every GPU down")
    assert not any(name.startswith("gpu_activity_ratio") for name in dark)
    hung = agent.until(lambda page: errors(page, "hung") >= 1, "the hang counted")
    assert series(hung, "gpu_exporter_worker_restarts_total") >= 1
    agent.control.hang = b""
    page = agent.until(all_up, "all up after the hang")
    assert series(page, "gpu_exporter_source_up") == 1


def test_a_lost_gpu_is_down_alone_and_comes_back(agent: Agent) -> None:
    agent.control.gpus[3].error = 15
    page = agent.until(lambda page: up(page).get(3) == 0, "GPU 3 down")
    assert up(page) == {index: float(index != 3) for index in range(8)}
    assert not any(name.startswith("DCGM_FI_DEV_POWER_USAGE{") and stub.gpu_uuid(3) in name for name in page)
    agent.control.gpus[3].error = 0
    agent.until(all_up, "GPU 3 back")


def test_a_killed_child_is_replaced_and_the_page_stays(agent: Agent) -> None:
    os.kill(agent.child(), signal.SIGKILL)
    agent.until(lambda page: errors(page, "died") >= 1, "the death counted")
    agent.until(all_up, "all up after the kill")


def test_a_library_replaced_under_the_agent_is_loaded_without_a_restart(tmp_path: Path) -> None:
    library = stub.build(tmp_path / "driver")
    with running_agent(library, tmp_path) as agent:
        parent, child = agent.process.pid, agent.child()
        agent.control.kernel_release = stub.NEXT_RELEASE.encode()
        agent.until(lambda page: errors(page, "library_mismatch") >= 1, "the mismatch counted")
        stub.build(library, release=stub.NEXT_RELEASE)
        page = agent.until(all_up, "all up on the new library")
        assert any(f'driver_version="{stub.NEXT_RELEASE}"' in name for name in page if name.startswith("gpu_info{"))
        assert (agent.process.pid, agent.child() != child) == (parent, True)


def test_an_agent_without_a_driver_says_so_and_starts_when_it_comes(driver_directory: Path, tmp_path: Path) -> None:
    with running_agent(driver_directory, tmp_path, driver_error=9) as agent:
        page = agent.until(lambda page: errors(page, "driver_not_loaded") >= 1, "the reason counted")
        assert up(page) == {}
        status, body = agent.ask_any("GET", "/readyz")
        assert status == 503
        assert "kernel module is not loaded" in body
        assert agent.ask_any("GET", "/healthz")[0] == 200
        agent.control.driver_error = 0
        agent.until(all_up, "all up once the driver is loaded")
        assert agent.ask_any("GET", "/readyz")[0] == 200


def test_a_release_leaves_nobody_in_the_driver_until_it_opens_again(driver_directory: Path, agent: Agent) -> None:
    library = str(driver_directory / "libnvidia-ml.so.1")
    assert library in Path(f"/proc/{agent.child()}/maps").read_text(encoding="utf-8")
    assert library not in Path(f"/proc/{agent.process.pid}/maps").read_text(encoding="utf-8")
    agent.ask("POST", "/-/release?seconds=2")
    agent.until(lambda page: 1.0 not in up(page).values(), "the driver released")
    agent.until(all_up, "all up after the release")

"""The whole agent while its DCGM host engine is killed and restarted, many times, under load."""

import contextlib
import logging
import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dcgm_stub_support as dcgm
import pytest
import stub_support as nvml
from agent_support import AgentProcess, matching, running_agent
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.skipif(
    nvml.compiler() is None, reason="the simulated driver and engine need a C compiler (gcc)"
)

GPUS = 2
INTERVAL_SECONDS = 0.2
KILLS, WARM_UP_KILLS = 60, 10
PATIENCE_SECONDS = 20.0
SLOWEST_SCRAPE_SECONDS = 2.0
PROF, TEMPERATURE = "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_GPU_TEMP"
GROWTH_BYTES = 3 * 2**20
"""Tolerance for a process' memory between the first third of the kills and the last."""
LATE_SECONDS = 0.5
"""Delay of a busy machine."""
SHORTLY_LATE_SECONDS = 0.3
"""Delay of a busy machine without another measurement at that moment."""
MOST_INTERVALS_AWAY = 2
"""Intervals from the engine's return until the page has its fields again: a first value takes an interval."""
LONG_INTERVAL_SECONDS, FEW_KILLS = 1.0, 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Usage:
    """Resources of a process."""

    memory_bytes: int
    descriptors: int
    threads: int


def settled(usages: list[Usage]) -> Usage:
    """Return the resources of a process without short-lived use."""
    return Usage(
        int(statistics.median(one.memory_bytes for one in usages)),
        min(one.descriptors for one in usages),
        min(one.threads for one in usages),
    )


def usage(pid: int) -> Usage:
    proc = Path("/proc") / str(pid)
    rollup = (proc / "smaps_rollup").read_text(encoding="ascii").splitlines()
    pss = next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    return Usage(pss, sum(1 for _ in (proc / "fd").iterdir()), sum(1 for _ in (proc / "task").iterdir()))


def waited_for_a_core(pids: Iterable[int]) -> float:
    """Return the seconds that the threads of these processes have waited for a core while they were ready to run.

    The machine causes this time, not the agent: a limit in seconds must exclude it while tests run in parallel.
    """
    tasks = (task for pid in pids for task in (Path("/proc") / str(pid) / "task").iterdir())
    waited = 0
    for task in tasks:
        with contextlib.suppress(OSError):  # it has just ended, or the kernel does not count
            waited += int((task / "schedstat").read_text(encoding="ascii").split()[1])
    return waited / 1e9


class Watcher:
    """Scrapes the agent all the time: every page must be on time and valid, and must have true values only."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent
        self._news = threading.Condition()
        self._profiled: tuple[int, float] = (0, 0.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._scrape_on)
        self.failures: list[str] = []
        self.scrapes = 0
        self.slowest_seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Scrape in the block; at its end, every page must have been right."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()
        assert self.failures == []

    def until(self, check: Callable[[int], bool], since: float, what: str) -> float:
        """Wait for a page with such a number of profiled GPUs, requested after ``since``; return the time."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        with self._news:
            while self._profiled[1] < since or not check(self._profiled[0]):
                left = deadline - time.monotonic()
                assert left > 0, f"not seen within {PATIENCE_SECONDS} s: {what}; its log: {self._agent.lines[-5:]}"
                self._news.wait(left)
            return time.monotonic()

    def _scrape_on(self) -> None:
        while not self._stop.wait(0.05):
            started = time.monotonic()
            try:
                status, text = self._agent.get("/metrics")
            except OSError as error:
                self.failures.append(repr(error))
                continue
            took = time.monotonic() - started
            self.slowest_seconds = max(self.slowest_seconds, took)
            if took > SLOWEST_SCRAPE_SECONDS:
                self.failures.append(f"a scrape took {took:.1f} s")
            profiled = self._look(status, text)
            with self._news:
                self._profiled = (profiled, started)
                self._news.notify_all()
            self.scrapes += 1

    def _look(self, status: int, text: str) -> int:
        """Note the faults of a page; return its number of profiled GPUs."""
        lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
        ratios = [float(value) for name, _, value in lines if name.startswith(PROF)]
        temperatures = {float(value) for name, _, value in lines if name.startswith(TEMPERATURE)}
        if status != 200 or not text.endswith("\n"):
            self.failures.append(f"status {status}, {len(text)} characters")
        if temperatures != {50.0 + index for index in range(GPUS)}:
            self.failures.append(f"temperatures of NVML: {sorted(temperatures)}")
        if not {round(1000 * ratio) for ratio in ratios} <= {805 - index for index in range(GPUS)}:
            self.failures.append(f"ratios without a measurement: {ratios}")
        if self.scrapes % 20 == 0:
            self._parse(text)
        return len(ratios)

    def _parse(self, text: str) -> None:
        try:
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        except ValueError as error:
            self.failures.append(f"no valid page: {error}")
            return
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
        if len(set(series)) != len(series):
            self.failures.append("a series stands twice on a page")


@dataclass
class Node:
    """An agent with both sources, and the control of its parts."""

    agent: AgentProcess
    engine: dcgm.Engine
    control: dcgm.StubControl
    interval_seconds: float

    def child(self, *, of_dcgm: bool) -> int:
        """Return the process id of one source's child."""
        for pid in self.agent.children():
            if (b"--dcgm-address" in Path(f"/proc/{pid}/cmdline").read_bytes()) is of_dcgm:
                return pid
        raise AssertionError("no such child")

    def processes(self) -> dict[str, int]:
        """Return the agent's processes by their part."""
        return {
            "agent": self.agent.process.pid,
            "child of NVML": self.child(of_dcgm=False),
            "child of DCGM": self.child(of_dcgm=True),
        }

    def left_in_engine(self) -> tuple[int, int, int, int]:
        """Return the numbers of connections, groups, field groups and watches in the engine."""
        now = self.control.engine
        return now.connections, now.groups, now.field_groups, now.watches


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """Start an agent on GPUs that only DCGM's profiling module profiles; takes the sample interval, in seconds."""
    interval_seconds = getattr(request, "param", INTERVAL_SECONDS)
    driver = nvml.build(tmp_path / "driver", without=dcgm.WITHOUT_GPM)
    nvml.control(tmp_path / "nvml", gpus=GPUS)
    library = dcgm.build(tmp_path / "dcgm")
    control = dcgm.control(tmp_path / "dcgm-control", gpus=GPUS)
    both = dcgm.environment(library, tmp_path / "dcgm-control", base=nvml.environment(driver, tmp_path / "nvml"))
    options = ("--node-name", "kill", "--sample-interval", f"{interval_seconds}s", "--attribution", "off")
    with (
        dcgm.Engine(library, tmp_path / "dcgm-control") as engine,
        running_agent(*options, "--dcgm-address", engine.address, env=both, is_fork=False) as agent,
    ):
        agent.until(lambda page: len(matching(page, PROF)) == GPUS, "every GPU profiled by DCGM")
        yield Node(agent, engine, control, interval_seconds)


def kill_and_return(node: Node, watcher: Watcher) -> tuple[float, float]:
    """Return how long profiling fields outlived the engine, and how long they were absent after its return.

    Both in seconds; the latter without the time for which processes waited for a core.
    """
    killed_at = time.monotonic()
    node.engine.kill()
    gone_at = watcher.until(lambda count: count == 0, killed_at, "profiling fields absent")
    # At any moment between two beats: the last page marks the beginning of one.
    time.sleep(secrets.randbelow(1000) / 1000 * node.interval_seconds)
    node.engine.start()
    back_at, measured = time.monotonic(), (*node.processes().values(), node.engine.pid, os.getpid())
    waited_before = waited_for_a_core(measured)
    seen_at = watcher.until(lambda count: count == GPUS, back_at, "profiling fields back")
    waited = waited_for_a_core(measured) - waited_before
    return gone_at - killed_at, max(0.0, seen_at - back_at - waited)


def test_engine_killed_many_times_removes_only_its_own_fields_and_leaks_nothing(node: Node) -> None:
    watcher = Watcher(node.agent)
    outlived: list[float] = []
    away: list[float] = []
    started = time.monotonic()
    with watcher.watching():
        for _ in range(WARM_UP_KILLS):
            kill_and_return(node, watcher)
        processes = node.processes()
        usages: dict[str, list[Usage]] = {name: [] for name in processes}
        held = node.left_in_engine()
        for _ in range(KILLS - WARM_UP_KILLS):
            stayed, missed = kill_and_return(node, watcher)
            outlived.append(stayed)
            away.append(missed)
            for name, pid in processes.items():
                usages[name].append(usage(pid))
    third = len(away) // 3
    before = {name: settled(some[:third]) for name, some in usages.items()}
    after = {name: settled(some[-third:]) for name, some in usages.items()}
    _log.info(
        "%d kills in %.0f s, %d scrapes, slowest %.0f ms; profiling fields outlived the engine by %s and were back %s"
        " after its return, at a sample interval of %g s",
        *(KILLS, time.monotonic() - started, watcher.scrapes, watcher.slowest_seconds * 1000),
        *(summary(outlived), summary(away), INTERVAL_SECONDS),
    )
    for name in processes:
        _log.info("%s: %s, then %s", name, before[name], after[name])
    _log.info("left in the engine: %s, then %s", held, node.left_in_engine())
    assert node.processes() == processes, "a process was replaced"
    assert node.left_in_engine() == held
    assert held[0] == 1
    for name in processes:
        assert (after[name].descriptors, after[name].threads) == (before[name].descriptors, before[name].threads), name
        assert after[name].memory_bytes - before[name].memory_bytes < GROWTH_BYTES, name
    assert statistics.median(away) <= MOST_INTERVALS_AWAY * INTERVAL_SECONDS
    assert max(away) <= MOST_INTERVALS_AWAY * INTERVAL_SECONDS + LATE_SECONDS


@pytest.mark.parametrize("node", [LONG_INTERVAL_SECONDS], indirect=True)
def test_profiling_fields_return_within_two_intervals_of_the_engine(node: Node) -> None:
    watcher = Watcher(node.agent)
    with watcher.watching():
        away = [kill_and_return(node, watcher)[1] for _ in range(FEW_KILLS)]
    _log.info("profiling fields were back %s after the engine's return", summary(away))
    assert max(away) <= MOST_INTERVALS_AWAY * LONG_INTERVAL_SECONDS + SHORTLY_LATE_SECONDS
    # 1.2 in a measurement; 1.9 if values wait for the next beat of NVML and of the page.
    assert statistics.median(away) <= 1.7 * LONG_INTERVAL_SECONDS
    page = node.agent.until(bool, "a page")
    assert page["gpu_exporter_conservation_error_seconds"] == pytest.approx(0, abs=1e-6)
    assert matching(page, "gpu_exporter_errors_total", part="agent") == {}


def summary(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ms (at most {max(seconds) * 1000:.0f})"


def test_hanging_engine_affects_only_its_fields_until_it_resumes(node: Node) -> None:
    watcher = Watcher(node.agent)
    processes = node.processes()
    with watcher.watching():
        stopped_at = time.monotonic()
        node.engine.stop()
        watcher.until(lambda count: count == 0, stopped_at, "profiling fields absent")
        node.engine.resume()
        went_on_at = time.monotonic()
        watcher.until(lambda count: count == GPUS, went_on_at, "profiling fields back")
    assert node.processes() == processes

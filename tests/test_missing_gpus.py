"""A GPU that was away when the driver was opened is found again when it is back, though the driver's list lacks it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agent_support import ROOT, until

from exporter.accounting.idle import IdleClock
from exporter.accounting.pricing import PriceBook
from exporter.agent.attribution import Attributing
from exporter.agent.attributor import Attributor
from exporter.agent.missing import MissingGpus
from exporter.agent.node import Node
from exporter.agent.run import Agent
from exporter.agent.views import Viewer
from exporter.attribution.processes import PidResolver, PodNames
from exporter.exposition.collector import ExpositionOptions
from exporter.exposition.rendered import Renderer
from exporter.model import DeviceState
from exporter.sources.worker import Worker

CHILD = """
import pathlib, sys, time
sys.path[:0] = [{tests!r}]
from driver_support import gpu
from exporter.simulator import driver
from exporter.simulator.truth import Fault, NodeTruth
from exporter.sources import child

def truth():
    fault = Fault.GPU_ABSENT if pathlib.Path({away!r}).exists() else None
    gpus = (gpu(0), gpu(1, fault=fault))
    return NodeTruth(at_seconds=time.time() - epoch, node="n", driver_version="550.54.15", gpus=gpus)

epoch = time.time()
driver.install(truth, epoch_seconds=epoch)
child.main(["--interval", "0.05"])
"""


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[Agent]:
    """An agent that samples every 0.05 s and whose patience with a missing GPU is 0.3 s."""
    nobody = Attributor(kubelet=None, pids=PidResolver(Path("/")), names=PodNames(Path("/")), expiry_seconds=60.0)
    viewer = Viewer(attributor=nobody, clock=IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=3.0))
    agent = Agent(
        node=Node(name="n", source=worker, viewer=viewer, sample_interval_seconds=0.05, process_clock=time.monotonic),
        workers=(worker,),
        attributing=Attributing(attributor=nobody, tasks=()),
        renderer=Renderer(ExpositionOptions()),
        release_seconds=60.0,
        load_prices=lambda: PriceBook(name="test", currency="USD", rows=()),
        missing=MissingGpus(first_seconds=0.3, longest_seconds=1.0),
    )
    task = asyncio.create_task(agent.run(socket.create_server(("127.0.0.1", 0))))
    try:
        yield agent
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_gpu_that_was_away_while_the_drivers_process_was_started_is_up_again_when_it_is_back(
    tmp_path: Path,
) -> None:
    away = tmp_path / "away"
    command = (sys.executable, "-c", CHILD.format(tests=str(ROOT / "tests"), away=str(away)))
    worker = Worker(name="nvml", command=command, interval_seconds=0.05, clock=time.monotonic)
    async with running(worker) as agent:

        def states() -> list[DeviceState]:
            return [view.state for view in agent.snapshot.devices] if agent.snapshot else []

        await until(lambda: states() == [DeviceState.UP, DeviceState.UP])
        away.touch()
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: worker.pid not in {None, first} and worker.named_gpus == 1)
        await until(lambda: states() == [DeviceState.UP, DeviceState.MISSING])
        second = worker.pid
        away.unlink()
        await until(lambda: states() == [DeviceState.UP, DeviceState.UP])
        # In the same process: those that never were away do not wait for a new one.
        assert (worker.pid, worker.status.restarts) == (second, 1)


def dues(missing: MissingGpus, *, expected: int | None, named: int | None, until_seconds: int) -> list[int]:
    return [at for at in range(until_seconds) if missing.is_due(expected=expected, named=named, steady=float(at))]


def test_the_driver_is_opened_anew_after_a_minute_and_ever_more_rarely_while_that_does_not_help() -> None:
    assert dues(MissingGpus(), expected=8, named=7, until_seconds=3000) == [60, 180, 420, 900, 1500, 2100, 2700]


def test_it_is_left_alone_while_nothing_is_missing_or_nobody_knows() -> None:
    assert dues(MissingGpus(), expected=8, named=8, until_seconds=3000) == []
    assert dues(MissingGpus(), expected=7, named=8, until_seconds=3000) == []
    assert dues(MissingGpus(), expected=None, named=8, until_seconds=3000) == []
    assert dues(MissingGpus(), expected=8, named=None, until_seconds=3000) == []


def test_a_gpu_that_is_missing_again_is_looked_for_as_soon_as_at_first() -> None:
    missing = MissingGpus()
    assert dues(missing, expected=8, named=7, until_seconds=500) == [60, 180, 420]
    assert not missing.is_due(expected=8, named=8, steady=500.0)
    assert [at for at in range(600, 700) if missing.is_due(expected=8, named=7, steady=float(at))] == [660]


def test_a_driver_that_does_not_answer_for_a_time_costs_no_patience() -> None:
    missing = MissingGpus()
    assert not missing.is_due(expected=8, named=7, steady=0.0)
    assert not missing.is_due(expected=8, named=None, steady=30.0)
    assert missing.is_due(expected=8, named=7, steady=60.0)

"""An agent ends on a signal, even if one of its threads cannot end, or a part of it cannot start."""

import mmap
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from agent_support import ROOT, running_agent

COMPILER = shutil.which("cc") or shutil.which("gcc")


BROKEN = """
import asyncio, socket, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledgers
from exporter.accounting.prices import PriceBook
from exporter.accounting.state_file import StateFile
from exporter.accounting.meter import Meter
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering
from exporter.agent.node import Node
from exporter.agent.sources import Sources
from exporter.agent.owners import Owners
from exporter.agent.run import Agent
from exporter.agent.views import Viewer
from exporter.attribution.processes import PodLookup
from exporter.metrics.collector import ExpositionOptions
from exporter.web.server import Renderer
from exporter.model.attribution import NodeFacts
from exporter.gpu.worker import Worker

async def endless():
    print("began", flush=True)
    await asyncio.Event().wait()

def broken():
    if len(sys.argv) > 1:
        threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(threads)
        threads.shutdown()
    raise ZeroDivisionError("of the programmer")

async def main():
    sleeper = (sys.executable, "-c", "import time; time.sleep(600)")
    worker = Worker(name="nvml", command=sleeper, interval_seconds=1.0)
    lookup = PodLookup(Path("/"), Path("/"))
    metering = Metering(
        meter=Meter(1.0, Owners().owner_of),
        ledgers=Ledgers(saves=True),
        file=StateFile(Path(sys.argv[1])) if len(sys.argv) > 1 else None,
    )
    node = Node(
        name="n",
        sources=Sources(nvml=worker, stale_after_seconds=3.0),
        attributor=Attributor(kubelet=None, lookup=lookup, expiry_seconds=60.0),
        viewer=Viewer(lookup=lookup, clock=IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=3.0)),
        sample_interval_seconds=1.0,
        process_clock=time.monotonic,
        metering=metering,
    )
    if len(sys.argv) > 1:
        metering.observe([], sampled_steady=0.0, now=0.0, steady=0.0)
    agent = Agent(
        node=node,
        tasks=(endless, broken),
        renderer=Renderer(ExpositionOptions()),
        release_seconds=60.0,
        load_prices=broken,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    try:
        await agent.run(listener)
    except ZeroDivisionError:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        children = Path("/proc/thread-self/children").read_text()
        print("left", sorted(map(str, others)), children, listener.fileno())
    if len(sys.argv) > 1:
        print(node.metering.errors)

asyncio.run(main())
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_agent_with_a_hanging_disk_ends_on_sigterm(tmp_path: Path) -> None:
    library, control, state = tmp_path / "chaos_clock.so", tmp_path / "control", tmp_path / "state"
    source = ROOT / "benchmarks" / "chaos_clock.c"
    subprocess.run([str(COMPILER), "-O2", "-fPIC", "-shared", str(source), "-o", str(library), "-ldl"], check=True)
    state.mkdir()
    control.write_bytes(bytes(16))
    env = {"LD_PRELOAD": str(library), "CHAOS_CONTROL": str(control)}
    options = ("--simulate", "t4-timeslicing", "--state-dir", str(state), "--state-interval", "1s")
    with running_agent(*options, env=env) as agent:
        agent.until(lambda page: page.get("gpu_exporter_state_saved") == 1, "a first save")
        with control.open("r+b") as file, mmap.mmap(file.fileno(), 16) as block:
            block[8:16] = struct.pack("q", 1)
            began = agent.series()["gpu_exporter_snapshot_timestamp_seconds"]
            agent.until(lambda page: page["gpu_exporter_snapshot_timestamp_seconds"] > began + 1.5, "a save that hangs")
            assert agent.end(seconds=30) == 0
    assert any("without a thread" in line for line in agent.lines)


def test_agent_with_a_part_that_fails_to_start_stops_all_started_parts() -> None:
    process = subprocess.run([sys.executable, "-c", BROKEN], check=False, capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.stderr, process.returncode) == ("left []  -1\n", "", 0)


def test_agent_without_a_thread_for_saving_reports_it_and_ends(tmp_path: Path) -> None:
    command = (sys.executable, "-c", BROKEN, str(tmp_path))
    process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    reported = "left []  -1\nCounter({('state', 'state_unwritable'): 2})\n"
    assert (process.stdout, process.returncode) == (reported, 0), process.stderr
    assert "cannot schedule new futures" in process.stderr

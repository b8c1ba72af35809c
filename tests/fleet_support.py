"""A small simulated fleet behind a real Prometheus and a real VictoriaMetrics, and what is true of it.

Every test may ask for the fixtures ``small_fleet``, ``fleet_truth``, ``fleet_prometheus`` and ``fleet_victoria``; the
servers are there for a worker's whole session, so tests only read. ``fleet_blocks`` is for servers of one's own.
For other fleets: ``backfilled``, ``prometheus``, ``victoria``.
"""

import fcntl
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import pytest

from gpu_simulator.fleet import FleetSums, FleetTruth, Writing, write_fleet
from gpu_simulator.fleet_ledger import node_ledger
from gpu_simulator.fleet_plan import FleetPlan, fleet_nodes
from gpu_simulator.stack import free_port

TOOLS = Path(__file__).resolve().parent.parent / ".tools" / "bin"
END_SECONDS = 1_789_999_200
"""2026-09-21T14:00Z: the last day is of 14 hours, and so is not over; the first one has 10."""
SMALL_FLEET = FleetPlan(
    nodes=12,
    gpus_per_node=2,
    days=40,
    end_seconds=END_SECONDS,
    seed=7,
    clusters=("alpha", "beta"),
    currencies=("USD", "EUR"),
)
READY_SECONDS = 60.0
END_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetServer:
    """A server that has a fleet's series."""

    url: str
    """Without a slash at the end: ``http://127.0.0.1:9090``."""
    plan: FleetPlan
    process: subprocess.Popen[bytes]


def tool(name: str) -> str:
    """The path of a program; the test is skipped where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS))
    if found is None:
        pytest.skip(f"{name} is not installed; get it with: make install")
    return found


@lru_cache(maxsize=4)
def fleet_sums(plan: FleetPlan) -> FleetSums:
    """What all nodes of a small fleet recorded."""
    sums = FleetSums(plan)
    for ledger in map(node_ledger, fleet_nodes(plan)):
        sums.add(ledger)
    return sums


def truth_between(start_seconds: int, end_seconds: int, plan: FleetPlan = SMALL_FLEET) -> FleetTruth:
    """What is true of the samples with start < time <= end, by UTC day."""
    return fleet_sums(plan).truth(start_seconds, end_seconds)


def backfilled(plan: FleetPlan, directory: Path, *extras: Mapping[str, str], devices: bool = True) -> Path:
    """Blocks of a fleet in a new directory; ``extras``: labels, and the fleet once for each of them (HA pairs)."""
    blocks = directory / "blocks"
    for number, extra in enumerate(extras or ({},)):
        text = directory / f"fleet-{number}.om"
        with text.open("w", encoding="utf-8") as output:
            write_fleet(plan, output, Writing(form="openmetrics", extra=extra, devices=devices))
        backfill(text, blocks)
        text.unlink()
    return blocks


def backfill(text: Path, blocks: Path, block_hours: int = 4380) -> None:
    """Make blocks of a file in OpenMetrics text; it is read once for each, so large ones are quick to make."""
    made = subprocess.run(
        [
            tool("promtool"),
            "tsdb",
            "create-blocks-from",
            f"--max-block-duration={block_hours}h",
            "--quiet",
            "openmetrics",
            text,
            blocks,
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr


@contextmanager
def prometheus(
    directory: Path, blocks: Path, plan: FleetPlan, *options: str, program: str = "prometheus"
) -> Iterator[FleetServer]:
    """A real Prometheus over blocks; it scrapes nothing."""
    with engine(directory, blocks, *options, program=program) as (url, process):
        yield FleetServer(url=url, plan=plan, process=process)


@contextmanager
def engine(
    directory: Path, data: Path, *options: str, program: str = "prometheus", config: str = "global: {}\n"
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A real Prometheus on a folder; its address and its process."""
    file, port = directory / "prometheus.yml", free_port(0)
    file.write_text(config, encoding="utf-8")
    command = [
        tool(program),
        f"--config.file={file}",
        f"--storage.tsdb.path={data}",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address=127.0.0.1:{port}",
        *options,
    ]
    url = f"http://127.0.0.1:{port}"
    with _running(command, f"{url}/-/ready", directory / "prometheus.log") as process:
        yield url, process


@contextmanager
def victoria(
    directory: Path, text: Path | None, plan: FleetPlan, *options: str, program: str = "victoria-metrics-1.112"
) -> Iterator[FleetServer]:
    """A real VictoriaMetrics with a file of series, written in the format ``import``."""
    port = free_port(0)
    command = [
        tool(program),
        f"-storageDataPath={directory / 'victoria'}",
        "-retentionPeriod=100y",
        "-search.latencyOffset=0s",
        f"-httpListenAddr=127.0.0.1:{port}",
        "-loggerLevel=ERROR",
        *options,
    ]
    url = f"http://127.0.0.1:{port}"
    with _running(command, f"{url}/health", directory / "victoria.log") as process:
        if text is not None:
            victoria_import(url, text)
        yield FleetServer(url=url, plan=plan, process=process)


def victoria_import(url: str, text: Path) -> None:
    """Import a file, and make it visible to questions at once."""
    with text.open("rb") as body:
        request = urllib.request.Request(  # noqa: S310 - our own server
            f"{url}/api/v1/import/prometheus",
            data=body,
            method="POST",
            headers={"Content-Length": str(text.stat().st_size)},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310 - as above
            answer.read()
    for path in ("/internal/force_flush", "/internal/resetRollupResultCache"):
        with urllib.request.urlopen(url + path, timeout=60) as answer:  # noqa: S310 - as above
            answer.read()


@contextmanager
def _running(command: list[str], ready: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _answers(ready):
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            assert process.poll() is None, f"{command[0]} ended: {said}"
            assert time.monotonic() < deadline, f"{command[0]} was not ready after {READY_SECONDS} s: {said}"
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own server
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def small_fleet() -> FleetPlan:
    """12 nodes of 2 GPUs in the clusters alpha and beta, over 40 days, priced in USD and EUR."""
    return SMALL_FLEET


@pytest.fixture(scope="session")
def fleet_truth(small_fleet: FleetPlan) -> FleetTruth:
    """What is true of all its 40 days, node by node."""
    return truth_between(small_fleet.start_seconds, small_fleet.end_seconds, small_fleet)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that ``make`` fills once for all processes of a run; to be read, or copied."""
    common = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    made = common / f"once-{name}"
    with (common / f"once-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            making = factory.mktemp(name)
            make(making)
            making.rename(made)
    return made


@pytest.fixture(scope="session")
def fleet_blocks(small_fleet: FleetPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small fleet's blocks, for copies: a server locks and changes what it runs on."""
    return once(tmp_path_factory, "fleet", partial(backfilled, small_fleet)) / "blocks"


@pytest.fixture(scope="session")
def fleet_prometheus(
    small_fleet: FleetPlan, fleet_blocks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetServer]:
    """The small fleet in Prometheus 2.42."""
    directory = tmp_path_factory.mktemp("fleet-prometheus")
    blocks = Path(shutil.copytree(fleet_blocks, directory / "blocks"))
    with prometheus(directory, blocks, small_fleet) as server:
        yield server


@pytest.fixture(scope="session")
def fleet_victoria(small_fleet: FleetPlan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    """The small fleet in VictoriaMetrics 1.112."""

    def load(directory: Path) -> None:
        text = directory / "fleet.txt"
        with text.open("w", encoding="utf-8") as output:
            write_fleet(small_fleet, output, Writing(form="import"))
        with victoria(directory, text, small_fleet):
            text.unlink()

    directory = tmp_path_factory.mktemp("fleet-victoria")
    shutil.copytree(once(tmp_path_factory, "victoria", load), directory, dirs_exist_ok=True)
    with victoria(directory, None, small_fleet) as server:
        yield server

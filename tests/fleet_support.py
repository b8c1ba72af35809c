"""A small simulated fleet behind real servers, hand-made ledgers of it, and servers with scripted answers."""

import asyncio
import fcntl
import os
import random
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import cycle
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from focus_support import by_state
from hypothesis import strategies as st

from exporter.cost.dimensions import UNALLOCATED, UNATTRIBUTED, Dimension, LineKey
from exporter.cost.ledger import Chunk, Failure, Figures, FleetLedger
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Window
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import ByState
from gpu_simulator.fleet import FleetSums, FleetTruth, Writing, write_fleet
from gpu_simulator.fleet_ledger import node_ledger
from gpu_simulator.fleet_plan import FleetPlan, fleet_nodes
from gpu_simulator.stack import free_port

TOOLS = Path(__file__).resolve().parent.parent / ".tools" / "bin"
END_SECONDS = 1_789_999_200
"""2026-09-21T14:00Z: the last day has 14 hours, and so is incomplete; the first day has 10."""
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
    """A server with the series of a fleet."""

    url: str
    """Address without a slash at the end: ``http://127.0.0.1:9090``."""
    plan: FleetPlan
    process: subprocess.Popen[bytes]


def tool(name: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS))
    if found is None:
        pytest.skip(f"{name} is not installed; get it with: make install")
    return found


@lru_cache(maxsize=4)
def fleet_sums(plan: FleetPlan) -> FleetSums:
    """Return the records of all nodes of a small fleet."""
    sums = FleetSums(plan)
    for ledger in map(node_ledger, fleet_nodes(plan)):
        sums.add(ledger)
    return sums


def truth_between(start_seconds: int, end_seconds: int, plan: FleetPlan = SMALL_FLEET) -> FleetTruth:
    """Return the truth for samples with start < time <= end, by UTC day."""
    return fleet_sums(plan).truth(start_seconds, end_seconds)


def backfilled(plan: FleetPlan, directory: Path, *extras: Mapping[str, str], devices: bool = True) -> Path:
    """Return blocks of a fleet in a new directory; ``extras``: labels, with the fleet once for each (HA pairs)."""
    blocks = directory / "blocks"
    for number, extra in enumerate(extras or ({},)):
        text = directory / f"fleet-{number}.om"
        with text.open("w", encoding="utf-8") as output:
            write_fleet(plan, output, Writing(form="openmetrics", extra=extra, devices=devices))
        backfill(text, blocks)
        text.unlink()
    return blocks


def backfill(text: Path, blocks: Path, block_hours: int = 4380) -> None:
    """Make blocks of a file in OpenMetrics text; it is read once for each block, so large blocks are quick to make."""
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
    """Run a real Prometheus over blocks, without scrapes."""
    with engine(directory, blocks, *options, program=program) as (url, process):
        yield FleetServer(url=url, plan=plan, process=process)


@contextmanager
def engine(
    directory: Path, data: Path, *options: str, program: str = "prometheus", config: str = "global: {}\n"
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a real Prometheus on a folder; yield its address and its process."""
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
    """Run a real VictoriaMetrics with a file of series in the format ``import``."""
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
    """Import a file, and make it visible to queries at once."""
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
    """Return 12 nodes of 2 GPUs in the clusters alpha and beta, over 40 days, priced in USD and EUR."""
    return SMALL_FLEET


@pytest.fixture(scope="session")
def fleet_truth(small_fleet: FleetPlan) -> FleetTruth:
    """Return the truth of all its 40 days, node by node."""
    return truth_between(small_fleet.start_seconds, small_fleet.end_seconds, small_fleet)


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that ``make`` fills once for all processes of a run; read or copy it only."""
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
    """Return the small fleet's blocks, for copies: a server locks and changes its blocks."""
    return once(tmp_path_factory, "fleet", partial(backfilled, small_fleet)) / "blocks"


@pytest.fixture(scope="session")
def fleet_prometheus(
    small_fleet: FleetPlan, fleet_blocks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetServer]:
    """Run Prometheus 2.42 with the small fleet."""
    directory = tmp_path_factory.mktemp("fleet-prometheus")
    blocks = Path(shutil.copytree(fleet_blocks, directory / "blocks"))
    with prometheus(directory, blocks, small_fleet) as server:
        yield server


@pytest.fixture(scope="session")
def fleet_victoria(small_fleet: FleetPlan, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetServer]:
    """Run VictoriaMetrics 1.112 with the small fleet."""

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


START = 1_790_812_800
"""2026-10-01T00:00Z."""
ALL: frozenset[Dimension] = frozenset(LineKey._fields)
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
HOSTILE = '=cmd|"/c calc"!A1'
MARKUP = "<script>alert(1)</script>"
TURNED = "right\u202eto-left\n\x1b[31mred"


def day(number: int, hours: int = 24) -> Window:
    """Return a day of the fleet, or its first hours."""
    start = START + number * DAY_SECONDS
    return Window(start_seconds=start, end_seconds=start + hours * HOUR_SECONDS)


def hours(
    *,
    active: float = 0.0,
    profiled: tuple[float, float] = (0.0, 0.0),
    idle: float = 0.0,
    unknown: float = 0.0,
    unpriced: float = 0.0,
    usd: float | None = None,
    eur: float | None = None,
    kwh: float | None = None,
) -> Figures:
    """Return figures from GPU-hours and amounts of money; a state has money in proportion to its hours.

    ``profiled`` are effective and ineffective hours of the active ones; the rest of these is not profiled.
    """
    parts = by_state(active, profiled, idle=idle, unknown=unknown)
    amounts = {"USD": usd, "EUR": eur}
    return Figures(
        seconds=parts.scaled(HOUR_SECONDS),
        unpriced_seconds=unpriced * HOUR_SECONDS,
        energy_joules=None if kwh is None else kwh * 3.6e6,
        money={
            name: parts.scaled(one / parts.total) if parts.total else ByState(unprofiled=one)
            for name, one in amounts.items()
            if one is not None
        },
    )


def owner(namespace: str, workload: str, team: str = "", **more: str) -> LineKey:
    """Return the line of a Job on the only node."""
    fields = {"node": "n1", "pool": "p5.48xlarge on-demand", "kind": "Job", "model": H100, "mode": "exclusive"}
    return LineKey(**{**fields, "namespace": namespace, "workload": workload, "team": team, **more})


def nobody(kind: str, **more: str) -> LineKey:
    """Return a line without an owner on the only node."""
    return LineKey(**{"kind": kind, "node": "n1", "pool": "p5.48xlarge on-demand", "model": H100, **more})


def ledger(
    *days: Mapping[LineKey, Figures],
    dimensions: frozenset[Dimension] = ALL,
    capacity: Mapping[str, float] | None = None,
    failures: tuple[Failure, ...] = (),
    notes: tuple[str, ...] = (),
) -> FleetLedger:
    """Return a ledger of whole days; the default capacity is that of its lines."""
    chunks = []
    for number, lines in enumerate(days):
        summed: dict[str, float] = {}
        for key, figures in lines.items():
            summed[key.cluster] = summed.get(key.cluster, 0.0) + figures.seconds.total
        chunks.append(
            Chunk(
                window=day(number),
                lines=lines,
                capacity_seconds=summed if capacity is None else capacity,
                recorded_hours=dict.fromkeys(summed if capacity is None else capacity, 24),
            )
        )
    window = Window(start_seconds=START, end_seconds=START + len(days) * DAY_SECONDS, label="2026-10")
    return FleetLedger(
        window=window,
        dimensions=dimensions,
        chunks=tuple(chunks),
        nodes={("", "n1"): NodeFacts(instance_type="p5.48xlarge", capacity_type="on-demand", region="us-east-1")},
        failures=failures,
        engine="Prometheus 2.42.0",
        notes=notes,
    )


def small_ledger() -> FleetLedger:
    """Return two days with all cases of a report: every kind of line, two currencies, hostile names, a failure."""
    first = {
        owner("vision", "resnet", "core"): hours(active=172.8, profiled=(43.2, 86.4), idle=19.2, usd=1344.0, kwh=110.5),
        owner("vision", "notebook", "core", kind="Notebook", mode="mig"): hours(idle=12.0, usd=84.0),
        owner("lab", HOSTILE, MARKUP): hours(active=6.0, unknown=18.0, usd=168.0),
        owner("lab", TURNED, "", model=A100): hours(active=10.0, idle=14.0, unpriced=24.0),
        owner("batch", "", kind=""): hours(active=1.0, idle=3.0, usd=28.0),
        nobody(UNATTRIBUTED): hours(active=2.0, usd=14.0),
        nobody(UNALLOCATED): hours(idle=10.0, usd=70.01),
        nobody(UNALLOCATED, model=A100): hours(idle=24.0, eur=33.333),
    }
    second = {
        owner("vision", "resnet", "core"): hours(active=86.4, idle=9.6, usd=672.0, kwh=55.25),
        owner("lab", TURNED, "", model=A100): hours(active=12.0, idle=12.0, eur=24.0),
        nobody(UNALLOCATED): hours(idle=96.0, usd=672.0),
    }
    failure = Failure(
        window=day(1),
        what='workload:gpu_ledger:delta1h{quantity="energy_joules"}',
        reason="HTTP 503 after 4 retries; give --prometheus-timeout more time",
    )
    return ledger(first, second, failures=(failure,), notes=(f"hours are missing on {MARKUP}",))


_NAMES = st.sampled_from(["", "a", "b", "c"])
_SECONDS = st.floats(0, 1e6)
_MONEY = st.floats(0, 1e5)


@st.composite
def figures(draw: st.DrawFn) -> Figures:
    """Generate any figures."""
    parts = st.builds(ByState, **dict.fromkeys(ByState.__slots__, _MONEY))
    return Figures(
        seconds=draw(st.builds(ByState, **dict.fromkeys(ByState.__slots__, _SECONDS))),
        unpriced_seconds=draw(_SECONDS),
        energy_joules=draw(st.none() | _SECONDS),
        money=draw(st.dictionaries(st.sampled_from(["EUR", "USD"]), parts, max_size=2)),
    )


@st.composite
def keys(draw: st.DrawFn) -> LineKey:
    """Generate the key of any line."""
    kind = draw(st.sampled_from(["Job", "Deployment", UNATTRIBUTED, UNALLOCATED]))
    place = {name: draw(_NAMES) for name in ("cluster", "node", "pool", "model", "mode")}
    if kind in {UNATTRIBUTED, UNALLOCATED}:
        return LineKey(kind=kind, **place)
    whose = {name: draw(_NAMES) for name in ("namespace", "workload", "team")}
    return LineKey(kind=kind, **place, **whose)


@st.composite
def ledgers(draw: st.DrawFn) -> FleetLedger:
    """Generate any ledger with a capacity equal to its lines."""
    return ledger(*draw(st.lists(st.dictionaries(keys(), figures(), max_size=8), min_size=1, max_size=3)))


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """A server, and its requests."""

    url: str
    requests: list[web.Request] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Run a server on a free port; the handler answers everything."""
    server = Server("")

    async def answer(request: web.Request) -> web.StreamResponse:
        server.requests.append(request)
        server.forms.append({name: str(value) for name, value in (await request.post()).items()})
        return await handler(request)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"{'https' if tls else 'http'}://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


def success(result: object, kind: str = "vector", **more: object) -> web.Response:
    """Return an answer in Prometheus' form."""
    return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}, **more})


def failure(status: int, error: str, kind: str = "execution") -> web.Response:
    """Return an error in Prometheus' form."""
    return web.json_response({"status": "error", "errorType": kind, "error": error}, status=status)


@dataclass
class FaultyProxy:
    """A faulty proxy in front of a real server; ``rate`` of all requests fail, by a seed."""

    upstream: str
    rate: float = 0.05
    faults: tuple[str, ...] = ("503", "429", "cut", "garbage", "stall", "drop")
    seed: int = 3
    stall_seconds: float = 3.0
    refuse: Callable[[dict[str, str]], bool] = lambda form: False  # noqa: ARG005 - the default refuses nothing
    faults_sent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - faults that come again, not secrets
        self._turns = cycle(self.faults)

    async def __call__(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - a fault each
        """Answer a request, or fail."""
        form = {name: str(value) for name, value in (await request.post()).items()}
        if self.refuse(form):
            return failure(503, "storage is away", "unavailable")
        fault = next(self._turns) if self._random.random() < self.rate else ""
        self.faults_sent[fault] = self.faults_sent.get(fault, 0) + 1
        if fault == "503":
            return web.Response(status=503, text="upstream connect error")
        if fault == "429":
            return web.Response(status=429, headers={"Retry-After": "0"})
        if fault == "garbage":
            return web.Response(text='{"status":"success","data":{"resul', content_type="application/json")
        if fault == "stall":
            await asyncio.sleep(self.stall_seconds)
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
            return web.Response()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.upstream + request.path_qs, data=form or None) as answer,
        ):
            body = await answer.read()
            if fault == "cut":
                return await _cut(request, body)
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)


async def _cut(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send half of the body, then end the connection."""
    response = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.abort()
    return response


def vector(*samples: tuple[dict[str, str], str]) -> list[dict[str, object]]:
    """Return rows of an instant query."""
    return [{"metric": labels, "value": [1_790_000_000, value]} for labels, value in samples]


@dataclass
class StubLedger:
    """A Prometheus with the same lines, from a test, in every recorded hour."""

    lines: Sequence[tuple[dict[str, str], str]] = ()
    """Labels, and active seconds."""
    money: Sequence[tuple[dict[str, str], str]] = ()
    warnings: tuple[str, ...] = ()
    newest_hour: float | None = None
    delay_seconds: float = 0.0
    asked: list[dict[str, str]] = field(default_factory=list)
    """Form and path of every query for the ledger."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Answer a query."""
        form = {name: str(value) for name, value in (await request.post()).items()}
        if "query" not in form:
            return web.json_response({"status": "error", "error": "not here"}, status=404)
        self.asked.append({"path": request.path, **form})
        await asyncio.sleep(self.delay_seconds)
        rows = self._rows(form["query"])
        if request.path.endswith("query_range"):
            start, end, step = (float(form[name]) for name in ("start", "end", "step"))
            moments = [start + number * step for number in range(int((end - start) / step + 1e-9) + 1)]
            found = [{"metric": labels, "values": [[at, text] for at in moments]} for labels, text in rows]
            return success(found, "matrix", warnings=list(self.warnings))
        at = float(form.get("time", "0"))
        found = [{"metric": labels, "value": [at, text]} for labels, text in rows]
        return success(found, warnings=list(self.warnings))

    def _rows(self, query: str) -> Sequence[tuple[dict[str, str], str]]:
        if "timestamp(" in query:
            return [] if self.newest_hour is None else [({}, str(self.newest_hour))]
        if "count_over_time(" in query:
            return [({}, "24")]
        is_idle = 'state="idle"' in query
        if 'quantity="cost"' in query:
            return [row for row in self.money if (row[0].get("state") == "idle") == is_idle]
        if ":gpu_capacity_seconds:delta1h" in query:
            return [({}, str(sum(float(text) for _, text in self.lines)))]
        return self.lines if 'quantity="seconds"' in query and not is_idle else ()

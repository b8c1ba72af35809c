"""A week of a busy node, compressed: does the agent stay within its memory, descriptors, series and state file?

The agent's real tick (join, views, meters, ledger, prices, owners, a state file that is truly flushed) runs in virtual
time. At their virtual times a real HTTP client scrapes the real app over a socket, plain and gzip in turn, and the real
kubelet client asks a real gRPC server on a unix socket. Pods come and go by the ten thousand, MIG layouts change, the
kubelet and the driver are away now and then. The client and the made-up node live in the same process: their memory is
in the figures.

    python benchmarks/soak.py [--days N] [--interval SECONDS] [--accounts N] [--trace]
"""

import argparse
import asyncio
import gc
import logging
import math
import os
import sys
import time
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean, linear_regression, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import virtual_node
from aiohttp import web
from virtual_world import LAYOUTS, MODELS, Board, World

from exporter.agent.metering import Save
from exporter.config import price_book
from exporter.errors import AttributionError
from exporter.gpu import wire
from exporter.kube.kubelet import KubeletClient
from exporter.metrics.collector import ExpositionOptions
from exporter.model import SourceState
from exporter.web.server import Renderer, create_app
from gpu_simulator.kubelet import KubeletServer

DAY_SECONDS = 86_400.0
INTERVAL_SECONDS = 60.0
"""Between samples: one a second would be 604,800 ticks, an hour of CPU."""
SCRAPE_SECONDS, KUBELET_SECONDS, SAVE_SECONDS, MEASURE_SECONDS = 300.0, 60.0, 300.0, 1800.0
TROUBLE_SECONDS = 4 * 3600.0
AWAY_SECONDS = 120.0
PAGES = ("/", "/api/v1/devices", "/api/v1/ledger", "/readyz")
LIFE_SECONDS = 300.0
EPOCH_SECONDS = 1_800_000_000.0


@dataclass(frozen=True, slots=True)
class Point:
    """What the process held at a virtual instant."""

    day: float
    mib: float
    descriptors: int
    threads: int
    accounts: int
    is_full: bool
    """Whether the ledger has come to its limit of owners, so that another one has begun."""
    pods: int
    objects: int
    """Python objects that can refer to others."""
    state_bytes: int


@dataclass(slots=True)
class Figures:
    """What was measured; milliseconds are CPU time of this process."""

    points: list[Point] = field(default_factory=list)
    tick_ms: "array[float]" = field(default_factory=lambda: array("d"))
    scrapes: int = 0
    failed: int = 0
    page_bytes: int = 0
    questions: int = 0
    refused: int = 0


def week_world(random: Random, directory: Path) -> World:
    """Make a node of 8 GPUs: shared, partitioned, and one whole."""
    boards = [Board(index=index, serial=1, model=MODELS[0], replicas=4) for index in range(6)]
    boards += [Board(index=6, serial=1, model=MODELS[0], layout=LAYOUTS[0]), Board(index=7, serial=1, model=MODELS[0])]
    (directory / "proc" / "2").mkdir(parents=True)
    return World(random=random, boards=boards, directory=directory, churn=0.3, life_seconds=LIFE_SECONDS, forgets=True)


@dataclass(slots=True, kw_only=True)
class Week:
    """The node, the agent on it, and those who ask it."""

    world: World
    agent: virtual_node.Agent
    client: KubeletClient
    session: aiohttp.ClientSession
    url: str
    figures: Figures
    interval_seconds: float
    state_file: Path
    _due: dict[str, float] = field(default_factory=dict)
    _away_until: float = 0.0

    @property
    def wall(self) -> float:
        """Unix time."""
        return EPOCH_SECONDS + self.world.t

    def due(self, what: str, every: float) -> bool:
        """Whether something's time has come."""
        if self.world.t < self._due.get(what, 0.0):
            return False
        self._due[what] = self.world.t + every
        return True

    async def step(self) -> None:
        """Let one sample interval pass."""
        self.world.turn_over()
        self.world.pass_time(self.interval_seconds)
        if self.due("trouble", TROUBLE_SECONDS):
            self._trouble()
        is_away = self.world.t < self._away_until
        pipe = self.agent.pipe
        pipe.state = SourceState.FAILED if is_away else SourceState.UP
        if not is_away:
            line = wire.encode(self.world.reading(wall=self.wall, steady=self.world.t))
            pipe.lines.append((0.0, line))
        if self.due("kubelet", KUBELET_SECONDS):
            await self._ask()
        if self.agent.api:
            self.agent.api.follow(self.wall)
        started = time.process_time()
        self.agent.tick(self.wall, self.world.t)
        self.figures.tick_ms.append((time.process_time() - started) * 1000)
        pipe.taken.clear()
        self.agent.ledgers.taken()
        save = self.agent.metering.begin_save(self.wall, self.world.t)
        if save is not None:
            await self._save(save)
        if self.due("scrape", SCRAPE_SECONDS):
            await self._scrape("/metrics")
        if self.due("pages", 3600.0):
            for path in PAGES:
                await self._scrape(path)
        if self.due("measure", MEASURE_SECONDS):
            self._measure()

    def _trouble(self) -> None:
        self._away_until = self.world.t + AWAY_SECONDS
        board = self.world.boards[6]
        self.world.evict(board)
        board.generation += 1
        board.layout = self.world.random.choice(LAYOUTS)

    async def _ask(self) -> None:
        self.figures.questions += 1
        kubelet = self.agent.kubelet
        try:
            kubelet.latest, kubelet.problem = await self.client.fetch(self.wall), ""
        except AttributionError as error:
            self.figures.refused += 1
            kubelet.problem = str(error)

    async def _save(self, save: Save) -> None:
        error = await asyncio.to_thread(save.write)
        self.agent.metering.end_save(save, error)
        if error is not None:
            raise error

    async def _scrape(self, path: str) -> None:
        self.figures.scrapes += 1
        encoding = "gzip" if self.figures.scrapes % 2 else "identity"
        async with self.session.get(self.url + path, headers={"Accept-Encoding": encoding}) as answer:
            length = 0
            async for piece in answer.content.iter_chunked(1 << 16):
                length += len(piece)
        may_wait = path == "/readyz" and self.world.t < self._away_until + self.interval_seconds
        self.figures.failed += answer.status != web.HTTPOk.status_code and not may_wait
        self.figures.page_bytes = max(self.figures.page_bytes, length)

    def _measure(self) -> None:
        ledger = self.agent.snapshot.ledger if self.agent.snapshot else None
        gc.collect()
        self.figures.points.append(
            Point(
                day=self.world.t / DAY_SECONDS,
                mib=resident_mib(),
                descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - a count, thousands of times
                threads=len(os.listdir("/proc/self/task")),  # noqa: PTH208 - as above
                accounts=len(ledger.accounts) if ledger else 0,
                is_full=bool(ledger and len(ledger.ledgers) > 1)
                or any(point.is_full for point in self.figures.points[-1:]),
                pods=len(ledger.pods) if ledger else 0,
                objects=len(gc.get_objects()),
                state_bytes=self.state_file.stat().st_size if self.state_file.exists() else 0,
            )
        )


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def soak(days: float, settings: virtual_node.Settings, figures: Figures, *, trace: bool = False) -> None:
    """Let a node's agent live for so many virtual days."""
    directory = settings.directory
    world = week_world(Random(7), directory)  # noqa: S311 - not for secrets
    (directory / "state").mkdir()
    agent = virtual_node.start(settings, world, price_book.load(None), boot_id="week", steady=world.t)
    server = KubeletServer(directory / "kubelet.sock", world.truth, clock=lambda: world.t)
    await server.start()
    renderer = Renderer(ExpositionOptions())
    runner = web.AppRunner(_app(agent, renderer, world), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    client = KubeletClient(str(directory / "kubelet.sock"))
    gc.collect()
    gc.freeze()  # as the agent does at its start
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        week = Week(
            world=world,
            agent=agent,
            client=client,
            session=session,
            url=f"http://127.0.0.1:{port}",
            figures=figures,
            interval_seconds=settings.interval_seconds,
            state_file=directory / "state" / "ledger.json",
        )
        before: tracemalloc.Snapshot | None = None
        week_day = 0.0
        while world.t < days * DAY_SECONDS:
            await week.step()
            if world.t // DAY_SECONDS != week_day:
                week_day = world.t // DAY_SECONDS
                print(f"day {week_day:.0f}: {resident_mib():.1f} MiB", file=sys.stderr, flush=True)
            if trace and before is None and world.t >= days * DAY_SECONDS / 2:
                before = _traced()
        if before is not None:
            for line in _traced().compare_to(before, "lineno")[:15]:
                print(line)
    await runner.cleanup()
    await server.stop()
    show(figures, world, agent, days)


def _traced() -> tracemalloc.Snapshot:
    gc.collect()
    return tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])  # noqa: FBT003 - its own order


def _app(agent: virtual_node.Agent, renderer: Renderer, world: World) -> web.Application:
    def metrics(accept: str) -> Any:  # noqa: ANN401 - whatever the app takes
        if agent.snapshot is None:
            raise RuntimeError("a scrape before the first tick")
        return renderer.metrics(agent.snapshot, accept)

    return create_app(snapshot=lambda: agent.snapshot, metrics=metrics, release=None, steady=lambda: world.t)


def slope(points: list[Point]) -> tuple[float, float]:
    """MiB per day and the half-width of its 95 % interval, as if points were independent."""
    days, mib = [point.day for point in points], [point.mib for point in points]
    fitted = linear_regression(days, mib)
    residual = sum((y - fitted.slope * x - fitted.intercept) ** 2 for x, y in zip(days, mib, strict=True))
    spread = sum((x - fmean(days)) ** 2 for x in days)
    return fitted.slope, 1.96 * math.sqrt(residual / max(1, len(points) - 2) / spread)


def show(figures: Figures, world: World, agent: virtual_node.Agent, days: float) -> None:
    """Print the table."""
    points = figures.points
    full = [point for point in points if point.is_full]
    is_full = len(full) > len(points) // 4
    settled = full if is_full else points[len(points) // 2 :]
    steepness, within = slope(settled)
    ledger = agent.metering.shown
    when = f"after the first full ledger, from day {full[0].day:.1f} on" if is_full else "while the ledger fills"
    each_day = [next(p.mib for p in points if p.day >= day) for day in range(1, int(days))]
    rows = [
        ("virtual days, ticks", f"{days:g}, {len(figures.tick_ms):,}"),
        ("pods in all, at the end", f"{world.started:,}, {len(world.pods)}"),
        ("scrapes and pages, not answered", f"{figures.scrapes:,}, {figures.failed}"),
        ("questions to the kubelet, not answered", f"{figures.questions:,}, {figures.refused}"),
        ("resident after each day / at the end, MiB", " / ".join(f"{mib:.1f}" for mib in (*each_day, points[-1].mib))),
        (f"slope {when}, MiB per day", f"{steepness:+.3f} ± {within:.3f}"),
        ("the rest least / most in that time: Python objects", _range([p.objects for p in settled])),
        ("accounts", _range([p.accounts for p in settled])),
        ("pods of the ledger", _range([p.pods for p in settled])),
        ("descriptors", _range([p.descriptors for p in settled])),
        ("threads", _range([p.threads for p in settled])),
        ("state file, KiB", _range([p.state_bytes // 1024 for p in settled])),
        ("page, most, KiB", f"{figures.page_bytes // 1024}"),
        ("CPU of a tick, mean / p99 / worst, ms", _spread(figures.tick_ms)),
        ("the same, first and last tenth, mean, ms", _ends(figures.tick_ms)),
        (
            "conservation error, s",
            f"{ledger.conservation_error_seconds:.1e} of {ledger.capacity_seconds:,.0f}" if ledger else "",
        ),
    ]
    print("| what | figure |\n|---|---:|")
    print("\n".join(f"| {what} | {figure} |" for what, figure in rows))


def _range(values: list[int]) -> str:
    return f"{min(values):,} / {max(values):,}"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f} / {quantiles(values, n=100, method='inclusive')[98]:.2f} / {max(values):.2f}"


def _ends(values: Sequence[float]) -> str:
    tenth = len(values) // 10
    return f"{fmean(values[:tenth]):.2f}, {fmean(values[-tenth:]):.2f}"


def main() -> int:
    """Run and print; never fails on a slow machine."""
    parser = argparse.ArgumentParser(description="Run a busy node's agent for some virtual days.")
    parser.add_argument("--days", type=float, default=7.0, help="virtual days [default: %(default)s]")
    parser.add_argument(
        "--interval", type=float, default=INTERVAL_SECONDS, help="sample interval [default: %(default)s s]"
    )
    parser.add_argument("--accounts", type=int, default=2000, help="limit of the ledger [default: %(default)s]")
    parser.add_argument("--trace", action="store_true", help="tell which lines hold more at the end than half way")
    options = parser.parse_args()
    logging.getLogger("exporter").setLevel(logging.CRITICAL)
    if options.trace:
        tracemalloc.start()
    started = time.monotonic()
    with TemporaryDirectory() as directory:
        settings = virtual_node.Settings(
            directory=Path(directory),
            interval_seconds=options.interval,
            save_seconds=SAVE_SECONDS,
            account_limit=options.accounts,
        )
        asyncio.run(soak(options.days, settings, Figures(), trace=options.trace))
    print(f"\n{time.monotonic() - started:.0f} s, of which {time.process_time():.0f} s of CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a fleet's agents ask of the Kubernetes API: computed, and measured on watchers of a simulated server.

A node's agent is one watcher here, with the agent's own list and watch. ``--watchers`` of them stand for ``--nodes``
nodes: what they ask at the start or after an outage is scaled up by the ratio of the two; in the steady part time runs
faster by the same ratio, so that what is seen each second is the fleet's as it stands.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet_load
import kube_objects
from byte_meter import ByteMeter

from gpu_simulator.api_objects import ApiObjects
from gpu_simulator.api_server import ApiServer
from gpu_simulator.truth import Fault

ROOT = Path(__file__).resolve().parents[1]
STEP_SECONDS = 0.1
PATIENCE_SECONDS = 120.0
OUTAGE_SECONDS = 30.0


@dataclass(kw_only=True)
class Traffic:
    """What came to the server from the beginning of a part to its end."""

    server: ApiServer
    meter: ByteMeter
    started: float = field(default_factory=time.monotonic)
    requests: Counter[str] = field(default_factory=Counter)
    peak_requests: float = 0.0
    """The most within one second."""
    peak_bytes: float = 0.0
    seconds: float = 0.0
    _before: Counter[str] = field(default_factory=Counter)
    _bytes_before: int = 0
    _connections_before: int = 0
    _window: deque[tuple[float, int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Count from now on."""
        self._before = Counter(self.server.requests)
        self._bytes_before, self._connections_before = self.meter.answer_bytes, self.meter.connections

    @property
    def answer_bytes(self) -> int:
        """Bytes of all answers."""
        return self.meter.answer_bytes - self._bytes_before

    @property
    def connections(self) -> int:
        """Connections opened."""
        return self.meter.connections - self._connections_before

    def look(self) -> None:
        """Take note of how things stand now; often enough for a peak of a second."""
        now = time.monotonic()
        self.seconds = now - self.started
        self.requests = Counter(self.server.requests)
        self.requests.subtract(self._before)
        self._window.append((now, self.requests.total(), self.answer_bytes))
        while now - self._window[0][0] > 1.0 + STEP_SECONDS / 2:
            self._window.popleft()
        _, requests, count = self._window[0]
        self.peak_requests = max(self.peak_requests, self.requests.total() - requests)
        self.peak_bytes = max(self.peak_bytes, self.answer_bytes - count)

    async def until(self, check: Callable[[], bool], seconds: float) -> None:
        """Look until ``check`` holds, or for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not check():
            await asyncio.sleep(STEP_SECONDS)
            self.look()


class Children:
    """The watchers' processes."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes
        self.report: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    async def say(self, word: str) -> None:
        """Tell all of them."""
        for process in self._processes:
            assert process.stdin is not None  # noqa: S101 - made with pipes
            process.stdin.write(f"{word}\n".encode())

    async def hear(self) -> list[str]:
        """Read a line of each."""
        lines = []
        for process in self._processes:
            assert process.stdout is not None  # noqa: S101 - as above
            lines.append((await process.stdout.readline()).decode())
        return lines

    async def look(self) -> None:
        """Ask how all watchers are."""
        await self.say("report")
        self.report, self.errors = Counter(), Counter()
        for line in await self.hear():
            answer: dict[str, Any] = json.loads(line)
            self.errors.update(answer.pop("errors"))
            self.report.update(answer)


class World:
    """The pods of the one node that all watchers watch; one of them changes now and then."""

    def __init__(self, pods: int, *, changes_per_second: float) -> None:
        self._pods = [kube_objects.pod(number) for number in range(pods)]
        self._interval = 1 / changes_per_second if changes_per_second else float("inf")
        self._due = time.monotonic() + self._interval
        self._changes = 0
        self._objects = ApiObjects(pods=tuple(self._pods), node=kube_objects.node())
        self.faults: dict[Fault, float] = {}

    def objects(self) -> ApiObjects:
        """Return what there is now; the same object while nothing changes."""
        while time.monotonic() >= self._due:
            self._due += self._interval
            self.change()
        return self._objects

    def change(self) -> None:
        """Change one pod."""
        self._changes += 1
        place = self._changes % len(self._pods)
        before = self._pods[place]
        labels = {**before["metadata"]["labels"], "attempt": str(self._changes)}
        self._pods[place] = {**before, "metadata": {**before["metadata"], "labels": labels}}
        self._objects = ApiObjects(pods=tuple(self._pods), node=kube_objects.node())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A server with a node's pods, and watchers that have not started yet."""

    world: World
    server: ApiServer
    meter: ByteMeter
    children: Children

    def traffic(self) -> Traffic:
        """Count from now on."""
        return Traffic(server=self.server, meter=self.meter)


@contextlib.asynccontextmanager
async def _children(
    options: argparse.Namespace, kubeconfig: Path, *, jitter: float, speed: float
) -> AsyncIterator[Children]:
    low, high = (seconds / speed for seconds in fleet_load.Fleet().watch_seconds)
    processes = []
    for number in range(options.processes):
        count = options.watchers // options.processes
        command = [sys.executable, str(ROOT / "benchmarks" / "api_watchers.py"), "--kubeconfig", str(kubeconfig)]
        command += ["--watchers", str(count), "--jitter", str(jitter), "--lifetime", str(low), str(high)]
        processes.append(
            await asyncio.create_subprocess_exec(
                *command,
                "--seed",
                str(number),
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )
    children = Children(processes)
    try:
        await children.hear()
        yield children
    finally:
        for process in processes:
            if process.stdin:
                process.stdin.close()
        for process in processes:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 30)
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def _measured(
    options: argparse.Namespace, *, jitter: float, speed: float = 1.0, changing: bool = False
) -> AsyncIterator[Part]:
    """A server with a node's pods, and watchers that have not started yet."""
    with tempfile.TemporaryDirectory(prefix="api-load-") as name:
        directory = Path(name)
        world = World(options.pods, changes_per_second=_changes_per_second(options, speed) if changing else 0.0)
        kubeconfig = directory / "kubeconfig"
        server = ApiServer(
            world.objects,
            lambda: world.faults,
            token_file=directory / "token",
            kubeconfig=kubeconfig,
            bookmark_seconds=fleet_load.Fleet().bookmark_seconds / speed,
        )
        await server.start()
        try:
            async with ByteMeter(int(server.url.rpartition(":")[2])) as meter:
                told = kubeconfig.read_text(encoding="utf-8").replace(server.url, f"http://127.0.0.1:{meter.port}")
                kubeconfig.write_text(told, encoding="utf-8")
                async with _children(options, kubeconfig, jitter=jitter, speed=speed) as children:
                    yield Part(world=world, server=server, meter=meter, children=children)
        finally:
            await server.stop()


def _changes_per_second(options: argparse.Namespace, speed: float) -> float:
    """Events that one node's watch gets, in time that runs so much faster."""
    fleet = fleet_load.Fleet(nodes=options.nodes)
    return fleet_load.load(fleet, fleet_load.sizes()).events / fleet.nodes * speed


async def _start(options: argparse.Namespace, jitter: float) -> Traffic:
    """All watchers are started at once, or each at a random time within ``jitter``."""
    async with _measured(options, jitter=jitter) as part:
        traffic = part.traffic()
        await part.children.say("go")
        await traffic.until(lambda: part.server.open_streams >= options.watchers, jitter + PATIENCE_SECONDS)
        await _must_be_well(options, part.children)
        return traffic


async def _steady(options: argparse.Namespace) -> Traffic:
    """Nothing happens but the life of pods; time runs faster by the ratio of nodes to watchers."""
    speed = options.nodes / options.watchers
    longest = fleet_load.Fleet().watch_seconds[1] / speed
    # Spread over a watch's life and given another one, the watches are of all ages when it is counted.
    async with _measured(options, jitter=longest, speed=speed, changing=True) as part:
        await part.children.say("go")
        await part.traffic().until(lambda: part.server.open_streams >= options.watchers, longest + PATIENCE_SECONDS)
        await asyncio.sleep(longest)
        traffic = part.traffic()
        await traffic.until(lambda: False, options.seconds)
        await _must_be_well(options, part.children)
        return traffic


async def _outage(options: argparse.Namespace, seconds: float, *, forgotten: bool) -> Traffic:
    """The server goes away and comes back; what was before it knows no more where ``forgotten``."""
    async with _measured(options, jitter=5.0) as part:
        await part.children.say("go")
        await part.traffic().until(lambda: part.server.open_streams >= options.watchers, PATIENCE_SECONDS)
        await _must_be_well(options, part.children)
        part.world.faults = {Fault.API_DOWN: 0.0}
        await asyncio.sleep(max(seconds, 5 * STEP_SECONDS))
        if forgotten:
            part.world.change()
            await asyncio.sleep(5 * STEP_SECONDS)
        traffic = part.traffic()
        part.world.faults = {}
        await part.server.restart()
        await traffic.until(lambda: part.server.open_streams >= options.watchers, PATIENCE_SECONDS)
        await _must_be_well(options, part.children)
        return traffic


async def _must_be_well(options: argparse.Namespace, children: Children) -> None:
    await children.look()
    if children.report["well"] != options.watchers or children.report["items"] != options.watchers * options.pods:
        raise SystemExit(f"api_load: not all watchers know all pods: {dict(children.report)}, {dict(children.errors)}")


def _row(name: str, traffic: Traffic, ratio: float) -> str:
    requests = ", ".join(f"{count:,} {kind}" for kind, count in sorted((+traffic.requests).items()))
    cells = (
        requests,
        f"{traffic.seconds:.1f}",
        f"{traffic.peak_requests:,.0f}",
        f"{traffic.peak_requests * ratio:,.0f}",
        f"{traffic.answer_bytes / 1e6:,.1f}",
        f"{traffic.answer_bytes * ratio / 1e9:,.2f}",
        f"{traffic.peak_bytes * ratio / 1e6:,.0f}",
        f"{traffic.connections:,}",
    )
    return f"| {name} | " + " | ".join(cells) + " |"


async def _run(options: argparse.Namespace) -> None:
    ratio = options.nodes / options.watchers
    fleet = fleet_load.Fleet(nodes=options.nodes, pods_per_node=options.pods)
    print(fleet_load.table(fleet, fleet_load.sizes()), flush=True)
    print(f"\n{options.watchers} watchers, {options.pods} pods each; the fleet's figures are {ratio:g} times theirs.\n")
    print(
        "| what | requests | s | requests in the worst second | of the fleet | MB | fleet's GB |"
        " fleet's MB in the worst second | connections |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    jitter = fleet.start_jitter_seconds
    for name, traffic in (
        ("start, all at once", _start(options, 0.0)),
        (f"start within {jitter:g} s", _start(options, jitter)),
        ("server restarted", _outage(options, 0.0, forgotten=False)),
        ("server restarted, old versions forgotten", _outage(options, 0.0, forgotten=True)),
        (f"server away for {OUTAGE_SECONDS:g} s, versions forgotten", _outage(options, OUTAGE_SECONDS, forgotten=True)),
    ):
        print(_row(name, await traffic, ratio), flush=True)
    steady = await _steady(options)
    seconds = steady.seconds
    print(
        f"\nSteady, {seconds:.0f} s at {ratio:g} times the speed, so as the fleet:"
        f" {steady.requests['watch pods'] / seconds:.1f} watches renewed/s"
        f" (at most {steady.peak_requests:.0f} in a second),"
        f" {steady.requests['list pods'] / seconds:.2f} lists/s, {steady.answer_bytes / seconds / 1e6:.2f} MB/s;"
        f" {options.watchers} streams, {steady.connections} connections opened."
    )


def main() -> int:
    """Print Markdown; 0 when every watcher knew every pod at the end of each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=5000, help="of the fleet (default 5000)")
    parser.add_argument("--watchers", type=int, default=500, help="that are run here (default 500)")
    parser.add_argument("--processes", type=int, default=2, help="that share the watchers (default 2)")
    parser.add_argument("--pods", type=int, default=110, help="per node (default 110)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the steady part (default 60)")
    options = parser.parse_args()
    options.watchers -= options.watchers % options.processes
    asyncio.run(_run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())

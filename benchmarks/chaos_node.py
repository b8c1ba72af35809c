"""A node under chaos: kubelet, API, disk, clock and clients around a real agent process, and the acts on them."""

import asyncio
import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp
from chaos_invariants import PER_GPU_HOUR, Judge
from chaos_machine import HERE, Machine, Weight, send, weigh
from chaos_schedule import Act, Injection
from chaos_world import INSTANCE_TYPE, NODE, World
from load_source import Source
from measure import family
from page_checks import Page

from gpu_simulator.node import SimulatedNode
from gpu_simulator.stack import free_port
from gpu_simulator.truth import NodeTruth

SCRAPE_SECONDS = 0.5
LATE_SECONDS = 0.2
SCRAPE_LIMIT_SECONDS = 10.0
"""Timeout of a scrape: the default of Prometheus."""
START_SECONDS, END_SECONDS = 120.0, 30.0
"""Longest start, and longest end of an agent: the default grace period of the kubelet."""
_PRICES = f"""currency: USD
rows:
  - {{model: '*', instance_type: {INSTANCE_TYPE}, per_gpu_hour: {PER_GPU_HOUR}, source: chaos, as_of: 2026-01-01}}
  - {{model: '*', per_gpu_hour: 36, source: a general row that must not be charged, as_of: 2026-01-01}}
"""


@dataclass(kw_only=True)
class ChaosNode:
    """One node and its agent. A context manager: its exit ends every started process."""

    directory: Path
    world: World
    judge: Judge
    machine: Machine
    newest: Page | None = None
    lost_seconds: float = 0.0
    """Time for which this machine had no CPU time for the node's servers."""
    _process: asyncio.subprocess.Process | None = None
    _serving: bool = False
    _started: list[asyncio.subprocess.Process] = field(default_factory=list)
    _ended: int = 0
    _is_ending: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _restarting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lasting: Counter[str] = field(default_factory=Counter)
    _disk_failed_at: float = -1e9
    _saved_at: float = -1e9

    async def __aenter__(self) -> Self:
        """Make the node and start the agent."""
        self._port, self._log = free_port(0), self.directory / "agent.log"
        self._node = SimulatedNode(self.world, self.directory, time.monotonic, self.world.plan.epoch_monotonic)
        # The scraper has another address than a storm, as a Prometheus has: clients of one address count as one.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(local_addr=("127.0.0.2", 0)),
            timeout=aiohttp.ClientTimeout(total=SCRAPE_LIMIT_SECONDS),
        )
        self.world.plan.write(self.directory / "plan.json")
        (self.directory / "state").mkdir()
        await self._node.start()
        self._spawn(self._watch_own_time())
        await self._start()
        for openmetrics in (False, True):
            self._spawn(self._scrape_forever(openmetrics=openmetrics))
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything."""
        self._serving = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._started:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await self._session.close()
        await self._node.stop()

    def now(self) -> float:
        """Return the time of the world."""
        return time.monotonic() - self.world.plan.epoch_monotonic

    def truth(self) -> NodeTruth:
        """Return the truth of the node now."""
        return self.world.at(self.now())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.judge.note("harness", self.now(), f"{error!r}")

    async def _watch_own_time(self) -> None:
        """Record times without CPU for this process: the node's servers then answer late; pages are not at fault."""
        while True:
            due = self.now() + 0.1
            await asyncio.sleep(0.1)
            if self.now() > due + LATE_SECONDS:
                self.judge.late.append(self.now())
                self.lost_seconds += self.now() - due

    # The agent

    def _command(self, port: int) -> list[str]:
        node, directory = self._node, self.directory
        options = {
            "listen": f"127.0.0.1:{port}",
            "node-name": NODE,
            "sample-interval": "200ms",
            "kubelet-interval": "1s",
            "attribution-expiry": "5s",
            "state-interval": "1s",
            "release-seconds": "1s",
            "kube-metadata": "on",
            "kube-start-jitter": "0ms",
            "kubelet-socket": node.kubelet_socket,
            "proc-root": node.proc_root,
            "pod-log-root": node.pod_log_root,
            "kubeconfig": node.kubeconfig,
            "state-dir": directory / "state",
            "lock-dir": directory / "lock",
            "price-book": directory / "prices.yaml",
        }
        if self.judge.with_dcgm:
            options["dcgm-address"] = "localhost:5555"
        launcher = [sys.executable, str(HERE / "chaos_agent.py"), "agent", str(directory / "plan.json")]
        return [*launcher, *(f"--{name}={value}" for name, value in options.items())]

    async def _start(self) -> None:
        """Start an agent and wait until it listens."""
        began = await self._launch(self._port)
        if began is not None:
            self._serve(*began)

    def _serve(self, process: asyncio.subprocess.Process, since: float) -> None:
        """Make an agent, which listens since a time of the world, the agent of the node."""
        self._process, self._is_ending, self._serving = process, False, True
        self.judge.agent_since = since
        self._spawn(self._watch(process))

    async def _launch(self, port: int) -> tuple[asyncio.subprocess.Process, float] | None:
        """Start an agent; return it and the time at which it listens, or ``None`` if it never does."""
        (self.directory / "prices.yaml").write_text(_PRICES, encoding="utf-8")
        own = next(one for one in self.truth().pods if one.owner_kind == "DaemonSet" and one.namespace == "kube-system")
        names = {"POD_NAMESPACE": own.namespace, "POD_NAME": own.name}
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command(port),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.machine.environment | names,
            )
        self._started.append(process)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(f"http://127.0.0.1:{port}/healthz") as answer:
                    if answer.status == 200:  # noqa: PLR2004 - OK
                        return process, self.now()
            await asyncio.sleep(0.05)
        ended = f"ended with code {process.returncode}" if process.returncode is not None else "does not listen"
        self.judge.note("agent starts", self.now(), f"{ended}: {self._last_words()}")
        return None

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if process is self._process and not self._is_ending:
            self._serving = False
            self.judge.note("agent lives", self.now(), f"it ended with code {code}: {self._last_words()}")

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])[-600:]

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    async def _restart(self, number: signal.Signals) -> None:
        """End the agent and start another one at once."""
        async with self._restarting:
            if await self._end(number):
                await self._start()

    async def _overlap(self) -> None:
        """Start another agent next to the first one, and end the first one after both have shown a page."""
        async with self._restarting:
            port = free_port(0)
            began = await self._launch(port)
            if began is None or self._process is None or self._process.returncode is not None:
                return
            text = ""
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                    text = await answer.text() if answer.status == 200 else ""  # noqa: PLR2004 - OK
            shown = [line for line in text.splitlines() if line.startswith("gpu_ledger_")]
            self.judge.expect("one agent shows the ledger", not shown, self.now(), f"{shown[:2]}")
            if await self._end(signal.SIGTERM):
                self._port = port
                self._serve(*began)

    async def _end(self, number: signal.Signals) -> bool:
        """End the agent; return whether there was one."""
        process = self._process
        if process is None or process.returncode is not None:
            return False
        saved = self._all_is_saved()
        self._is_ending, self._serving = True, False
        process.send_signal(number)
        try:
            code = await asyncio.wait_for(process.wait(), END_SECONDS)
            self.judge.expect(
                "agent ends on a signal",
                code == (-number if number == signal.SIGKILL else 0),
                self.now(),
                f"{number.name}: exit code {code}: {self._last_words()}",
            )
        except TimeoutError:
            self.judge.note("agent ends on a signal", self.now(), f"not within {END_SECONDS:g} s of {number.name}")
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGABRT)
            await process.wait()
        self.judge.agent_began(all_was_saved=saved and self._all_is_saved())
        self._ended += 1
        return True

    def _all_is_saved(self) -> bool:
        """Return whether all shown totals are saved: the last page reports it, and the last disk fault is long past."""
        said = self.newest is not None and self.newest.one("gpu_exporter_state_saved") == 1.0
        return said and not self._lasting[Act.DISK_HANG] and self._saved_at > self._disk_failed_at + 2.5

    # Clients

    async def _scrape_forever(self, *, openmetrics: bool) -> None:
        accept = "application/openmetrics-text;version=1.0.0" if openmetrics else "text/plain;version=0.0.4"
        while True:
            began = time.monotonic()
            if self._serving:
                await self._scrape({"Accept": accept, "Accept-Encoding": "gzip"})
            await asyncio.sleep(max(0.05, SCRAPE_SECONDS - (time.monotonic() - began)))

    async def _scrape(self, headers: dict[str, str]) -> None:
        ended = self._ended
        problem = ""
        try:
            async with self._session.get(self._url("/metrics"), headers=headers) as answer:
                text = await answer.text()
                if answer.status != 200:  # noqa: PLR2004 - OK
                    problem = f"status {answer.status}: {text[:200]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            text, problem = "", f"{error!r}"
        if not self._serving or ended != self._ended:
            return
        seen_at = self.now()
        self.judge.expect("page served", not problem, seen_at, problem)
        if not problem:
            before = len(self.judge.violations)
            page = self.judge.look(text, seen_at)
            if len(self.judge.violations) > before:
                (self.directory / f"wrong-{seen_at:.2f}.txt").write_text(text, encoding="utf-8")
            self.newest = page or self.newest
            if page and page.one("gpu_exporter_state_saved") == 1.0:
                self._saved_at = seen_at

    # Acts

    async def play(self, injections: tuple[Injection, ...]) -> None:
        """Start every act at its time; the scenario produces its faults by itself."""
        known = {one.value for one in Act}
        for one in injections:
            if one.kind in known:
                await asyncio.sleep(max(0.0, one.at - self.now()))
                self._spawn(self._act(one))

    async def until_quiet(self) -> None:
        """Wait until no act lasts any more."""
        while self._lasting.total() or self._restarting.locked():  # noqa: ASYNC110 - many ways to end
            await asyncio.sleep(0.05)

    async def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds; time without CPU time for this machine does not count."""
        began, lost = self.now(), self.lost_seconds
        while not holds() and self.now() - began - (self.lost_seconds - lost) < seconds:  # noqa: ASYNC110 - many ways to end
            await asyncio.sleep(0.05)
        return holds()

    async def _act(self, one: Injection) -> None:
        act = Act(one.kind)
        self._lasting[act] += 1
        try:
            match act:
                case Act.AGENT_KILL | Act.AGENT_TERM:
                    await self._restart(signal.SIGKILL if act is Act.AGENT_KILL else signal.SIGTERM)
                case Act.AGENT_OVERLAP:
                    await self._overlap()
                case Act.CHILD_KILL:
                    self._signal_child(signal.SIGKILL)
                case Act.HANGUP:
                    self._signal(signal.SIGHUP)
                case Act.RELEASE:
                    self._signal(signal.SIGUSR1)
                case Act.STORM:
                    await self._crowd(one.seconds, "scrapes", 40)
                case Act.HALF_OPEN:
                    await self._crowd(one.seconds, "begins", 25)
                case Act.XID:
                    pass
                case _:
                    await self._last(act, one)
        finally:
            self._lasting[act] -= 1

    async def _crowd(self, seconds: float, kind: str, count: int) -> None:
        """Open clients of a kind for some seconds; each is answered or rejected."""
        options = ("--count", str(count), "--rate", "400", "--seconds", str(seconds), "--port", str(self._port))
        source = Source([kind, "--again", *options])
        # A separate loop: a scraper that waits for its turn in a storm would connect and then send nothing for long.
        await asyncio.to_thread(asyncio.run, source.run())
        came = source.tally.outcomes
        wrong = {key: number for key, number in came.items() if key.isdigit() and key not in ("200", "408", "503")}
        self.judge.expect("a storm is answered or rejected", not wrong, self.now(), f"{wrong}")

    async def _last(self, act: Act, one: Injection) -> None:
        """Start a lasting act and end it, unless another of its kind still lasts."""
        stopped = self._signal_child(signal.SIGSTOP) if act is Act.CHILD_STOP else 0
        if act is Act.CLOCK:
            self._step(one.parameter)
        self.machine.hang(hangs=self._lasting[Act.DISK_HANG] > 0)
        try:
            await asyncio.sleep(one.seconds)
        finally:
            send(stopped, signal.SIGCONT)
            if act is Act.CLOCK and self._lasting[act] == 1:
                self._step(0.0)
            if act is Act.DISK_HANG:
                self.machine.hang(hangs=self._lasting[act] > 1)
                self._disk_failed_at = self.now()

    def _step(self, seconds: float) -> None:
        begin = self.now()
        self.machine.step(seconds)
        self.judge.stepped(begin, self.now(), seconds)

    def _signal(self, number: signal.Signals) -> None:
        if self._serving and self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _signal_child(self, number: signal.Signals) -> int:
        """Send a signal to one of the agent's children; return its process id, or 0 without a child."""
        there = self.family()[1:]
        if not there:
            return 0
        pid = there[int(self.now() * 1000) % len(there)]
        send(pid, number)
        return pid

    def weigh(self) -> Weight | None:
        """Return the resource use of the agent now; ``None`` without an agent."""
        if self._process is None or self.newest is None:
            return None
        return weigh(self._process.pid, self.directory / "state", self.newest.living())

    def family(self) -> tuple[int, ...]:
        """Return the process ids of the agent and its children."""
        return family(self._process.pid) if self._process is not None else ()

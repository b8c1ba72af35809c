"""A node under chaos: kubelet, API, disk, clock and clients around a real agent process, and what is done to them."""

import asyncio
import contextlib
import errno
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from chaos_invariants import Judge, Page
from chaos_schedule import CLOCK_LIKE, Act, Injection
from chaos_world import NODE, World

from exporter.simulator import api_objects, filesystem
from exporter.simulator.api_server import ApiServer
from exporter.simulator.kubelet import KubeletServer
from exporter.simulator.parts import free_port
from exporter.simulator.truth import NodeTruth

HERE = Path(__file__).parent
SCRAPE_SECONDS = 0.5
SCRAPE_LIMIT_SECONDS = 10.0
"""Prometheus waits as long by default."""
START_SECONDS = 60.0
END_SECONDS = 30.0
"""As the kubelet waits by default."""
STORM_CLIENTS = 40
HALF_OPEN_CLIENTS = 25
_DISK_BYTES = 512 * 1024
_PRICES = "currency: USD\nrows:\n  - {model: '*', per_gpu_hour: 3.6, source: chaos, as_of: 2026-01-01}\n"
_WEB = "http_server_config: {headers: {X-Frame-Options: deny}}\n"
_GARBAGE = "{[\x00 this is no YAML"
_AGENT = ("--sample-interval", "200ms", "--kubelet-interval", "1s", "--attribution-expiry", "5s", "--state-interval", "1s")
_FAULTY_DISKS = frozenset({Act.DISK_FULL, Act.DISK_READ_ONLY, Act.DISK_HANG})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What this machine has."""

    clock: Path | None
    """Library with a wall clock that can be set and a disk that can hang; ``None`` without a compiler."""
    may_mount: bool

    @property
    def cannot(self) -> frozenset[str]:
        """Kinds that are left out here."""
        without: set[str] = set() if self.clock else {*CLOCK_LIKE}
        return frozenset(without if self.may_mount else without | {Act.DISK_FULL, Act.DISK_READ_ONLY})


def tools(directory: Path) -> Tools:
    """Build the clock into ``directory`` and see whether a file system can be mounted there."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    clock = directory / "chaos_clock.so" if compiler else None
    if compiler:
        command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared"]
        subprocess.run([*command, str(HERE / "chaos_clock.c"), "-o", str(clock), "-ldl"], check=True)
    probe = directory / "probe"
    probe.mkdir()
    mounted = os.geteuid() == 0 and _mount(probe) == 0
    if mounted:
        subprocess.run(["umount", str(probe)], check=True)
    return Tools(clock=clock, may_mount=mounted)


def _mount(directory: Path) -> int:
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(directory)]
    return subprocess.run(command, check=False, capture_output=True).returncode


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """What the agent and its children take."""

    threads: int
    descriptors: int
    children: int
    files: int
    """In the state directory."""
    series: int
    pss_kib: int


@dataclass(kw_only=True)
class ChaosNode:
    """One node and its agent. A context: everything it started is gone when it ends."""

    directory: Path
    world: World
    judge: Judge
    tools: Tools
    pages: int = 0
    storm: Counter[str] = field(default_factory=Counter)
    newest: Page | None = None
    weights: list[Weight] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _serving: bool = False
    _agents: int = 0
    _told: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _restarting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _lasting: Counter[str] = field(default_factory=Counter)
    _disk_failed_at: float = -1e9
    _saved_at: float = -1e9

    async def __aenter__(self) -> "ChaosNode":
        """Make the node and start the agent."""
        self.state.mkdir()
        if self.tools.may_mount and _mount(self.state):
            raise OSError("cannot mount a file system any more")
        self._control_path.write_bytes(bytes(16))
        with self._control_path.open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 16)
        self._port = free_port(0)
        self._kubelet = KubeletServer(self.directory / "kubelet.sock", self.truth)
        self._api = ApiServer(
            lambda: api_objects.objects_of(self.truth()),
            lambda: self.truth().faults,
            token_file=self.directory / "token",
            kubeconfig=self.directory / "kubeconfig",
        )
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_LIMIT_SECONDS))
        self.world.plan.write(self.directory / "plan.json")
        await self._kubelet.start()
        await self._api.start()
        self._spawn(self._keep_fresh())
        await self._start()
        for openmetrics in (False, True):
            self._spawn(self._scrape_for_ever(openmetrics=openmetrics))
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything."""
        self._serving = False
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._set_disk_hanging(hangs=False)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._session.close()
        await self._api.stop()
        await self._kubelet.stop()
        if self.tools.may_mount:
            subprocess.run(["umount", "-l", str(self.state)], check=False, capture_output=True)

    @property
    def state(self) -> Path:
        """The state directory."""
        return self.directory / "state"

    @property
    def log(self) -> Path:
        """What all agents of the node have said."""
        return self.directory / "agent.log"

    @property
    def _control_path(self) -> Path:
        return self.directory / "control"

    def now(self) -> float:
        """Time of the world."""
        return time.monotonic() - self.world.plan.epoch_monotonic

    def truth(self) -> NodeTruth:
        """The node now."""
        return self.world.at(self.now())

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[arg-type, var-annotated]
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.judge.note(f"harness: {error!r}", self.now())

    async def _keep_fresh(self) -> None:
        while True:
            filesystem.write(self.truth(), self.directory / "proc", self.directory / "pods")
            await asyncio.sleep(0.5)

    # The agent

    def _command(self) -> list[str]:
        files = ("--kubelet-socket", "kubelet.sock"), ("--proc-root", "proc"), ("--pod-log-root", "pods")
        made = [*files, ("--kubeconfig", "kubeconfig"), ("--state-dir", "state"), ("--price-book", "prices.yaml")]
        given = [word for flag, name in made for word in (flag, str(self.directory / name))]
        if self._has_web_config:
            given += ["--web-config", str(self.directory / "web.yaml")]
        if self.judge.with_dcgm:
            given += ["--dcgm-address", "localhost:5555"]
        plain = ["--listen", f"127.0.0.1:{self._port}", "--node-name", NODE, "--kube-metadata", "on"]
        plain += ["--kube-start-jitter", "0ms", "--release-seconds", "1s"]
        launcher = [sys.executable, str(HERE / "chaos_agent.py"), "agent", str(self.directory / "plan.json")]
        return [*launcher, *_AGENT, *plain, *given]

    @property
    def _has_web_config(self) -> bool:
        return any(one.kind == Act.WEB for one in self.judge.injections)

    async def _start(self) -> None:
        """Start an agent and wait until it listens."""
        (self.directory / "prices.yaml").write_text(_PRICES, encoding="utf-8")
        (self.directory / "web.yaml").write_text(_WEB, encoding="utf-8")
        env = {**os.environ, "CHAOS_CONTROL": str(self._control_path)}
        if self.tools.clock:
            env["LD_PRELOAD"] = str(self.tools.clock)
        self._told = False
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        self._agents += 1
        process, until = self._process, time.monotonic() + START_SECONDS
        while time.monotonic() < until and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(self._url("/healthz")) as answer:
                    if answer.status == 200:  # noqa: PLR2004 - OK
                        self._serving = True
                        self._spawn(self._watch(process))
                        return
            await asyncio.sleep(0.05)
        ended = f"ended with code {process.returncode}" if process.returncode is not None else "does not listen"
        self.judge.note(f"agent starts: {ended}: {self._last_words()}", self.now())

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if process is self._process and not self._told:
            self._serving = False
            self.judge.note(f"agent lives: it ended by itself with code {code}: {self._last_words()}", self.now())

    def _last_words(self) -> str:
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])[-600:]

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"

    async def _restart(self, number: signal.Signals) -> None:
        """End the agent and start another one at once."""
        async with self._restarting:
            process = self._process
            if process is None or process.returncode is not None:
                return
            saved = self._all_is_saved()
            self._told, self._serving = True, False
            process.send_signal(number)
            try:
                code = await asyncio.wait_for(process.wait(), END_SECONDS)
                self.judge.expect("agent ends as told", code == (-number if number == signal.SIGKILL else 0), self.now(),
                                  f"{number.name}: exit code {code}: {self._last_words()}")
            except TimeoutError:
                self.judge.note(f"agent ends as told: not within {END_SECONDS:g} s of {number.name}", self.now())
                process.send_signal(signal.SIGABRT)
                await process.wait()
            saved = saved and self._all_is_saved()
            self.judge.agent_began(all_was_saved=saved)
            await self._start()

    def _all_is_saved(self) -> bool:
        """Whether what has been shown has been saved: the last page said so, and no disk failed since long before."""
        failing = any(self._lasting[kind] for kind in _FAULTY_DISKS)
        said = self.newest is not None and self.newest.one("gpu_exporter_state_saved") == 1.0
        return said and not failing and self._saved_at > self._disk_failed_at + 2.5

    # Clients

    async def _scrape_for_ever(self, *, openmetrics: bool) -> None:
        accept = "application/openmetrics-text;version=1.0.0" if openmetrics else "text/plain;version=0.0.4"
        while True:
            began = time.monotonic()
            if self._serving:
                await self._scrape({"Accept": accept, "Accept-Encoding": "gzip"})
            await asyncio.sleep(max(0.05, SCRAPE_SECONDS - (time.monotonic() - began)))

    async def _scrape(self, headers: dict[str, str]) -> None:
        agents = self._agents
        told = ""
        try:
            async with self._session.get(self._url("/metrics"), headers=headers) as answer:
                text = await answer.text()
                if answer.status != 200:  # noqa: PLR2004 - OK
                    told = f"status {answer.status}: {text[:200]}"
        except (aiohttp.ClientError, TimeoutError) as error:
            text, told = "", f"{error!r}"
        if not self._serving or agents != self._agents:
            return
        seen_at = self.now()
        self.judge.expect("page served", not told, seen_at, told)
        if not told:
            self.pages += 1
            before = len(self.judge.violations)
            page = self.judge.look(text, seen_at)
            if len(self.judge.violations) > before:
                (self.directory / f"wrong-{seen_at:.2f}.txt").write_text(text, encoding="utf-8")
            self.newest = page or self.newest
            if page and page.one("gpu_exporter_state_saved") == 1.0:
                self._saved_at = seen_at

    async def _storm(self, seconds: float) -> None:
        until = time.monotonic() + seconds

        async def client(session: aiohttp.ClientSession) -> None:
            while time.monotonic() < until and self._serving:
                try:
                    async with session.get(self._url("/metrics")) as answer:
                        await answer.read()
                        self.storm[str(answer.status)] += 1
                        if answer.status not in (200, 503) and self._serving:
                            self.judge.note(f"storm: status {answer.status}", self.now())
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.storm[type(error).__name__] += 1

        limit = aiohttp.TCPConnector(limit=STORM_CLIENTS)
        wait = aiohttp.ClientTimeout(total=SCRAPE_LIMIT_SECONDS)
        async with aiohttp.ClientSession(connector=limit, timeout=wait) as session:
            await asyncio.gather(*(client(session) for _ in range(STORM_CLIENTS)))

    async def _half_open(self, seconds: float) -> None:
        writers = []
        for _ in range(HALF_OPEN_CLIENTS):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Half: ")
                writers.append(writer)
        await asyncio.sleep(seconds)
        for writer in writers:
            writer.close()

    # What is done

    async def play(self, injections: tuple[Injection, ...]) -> None:
        """Do everything at its time; faults of the scenario happen by themselves."""
        known = {one.value for one in Act}
        for one in injections:
            if one.kind in known:
                await asyncio.sleep(max(0.0, one.at - self.now()))
                self._spawn(self._act(one))

    async def until_quiet(self) -> None:
        """Wait until nothing that was done lasts."""
        while self._lasting.total() or self._restarting.locked():
            await asyncio.sleep(0.05)

    async def _act(self, one: Injection) -> None:
        act = Act(one.kind)
        self._lasting[act] += 1
        try:
            match act:
                case Act.AGENT_KILL | Act.AGENT_TERM:
                    await self._restart(signal.SIGKILL if act is Act.AGENT_KILL else signal.SIGTERM)
                case Act.CHILD_KILL:
                    self._signal_child(signal.SIGKILL)
                case Act.HANGUP:
                    self._signal(signal.SIGHUP)
                case Act.RELEASE:
                    self._signal(signal.SIGUSR1)
                case Act.STORM:
                    await self._storm(one.seconds)
                case Act.HALF_OPEN:
                    await self._half_open(one.seconds)
                case Act.MIG | Act.XID:
                    pass
                case _:
                    await self._last(act, one)
        finally:
            self._lasting[act] -= 1

    async def _last(self, act: Act, one: Injection) -> None:
        """Do what lasts, and undo it."""
        undo = self._begin(act, one)
        try:
            await asyncio.sleep(one.seconds)
        finally:
            if self._lasting[act] == 1:  # else another of its kind still lasts
                undo()
            if act in _FAULTY_DISKS:
                self._disk_failed_at = self.now()

    def _begin(self, act: Act, one: Injection) -> Callable[[], None]:
        match act:
            case Act.CLOCK:
                self._step(one.parameter)
                return lambda: self._step(0.0)
            case Act.CHILD_STOP:
                stopped = self._signal_child(signal.SIGSTOP)
                return lambda: _send(stopped, signal.SIGCONT)
            case Act.DISK_HANG:
                self._set_disk_hanging(hangs=True)
                return lambda: self._set_disk_hanging(hangs=False)
            case Act.DISK_READ_ONLY:
                self._remount("ro")
                return lambda: (self._remount("rw"), self._make_room())[0]
            case Act.DISK_FULL:
                self._fill()
                return self._make_room
            case Act.PRICES:
                return self._spoil("prices.yaml", _PRICES, hangup=True)
            case _:
                return self._spoil("web.yaml", _WEB, hangup=False)

    def _step(self, seconds: float) -> None:
        self.judge.stepped(self.now(), seconds)
        self._control[0:8] = struct.pack("q", int(seconds * 1e9))

    def _set_disk_hanging(self, *, hangs: bool) -> None:
        self._control[8:16] = struct.pack("q", int(hangs))

    def _remount(self, mode: str) -> None:
        # Busy with an open file it stays as it is; then there is no fault.
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.state)], check=False, capture_output=True)

    def _fill(self) -> None:
        try:
            with (self.state / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EROFS):
                raise

    def _make_room(self) -> None:
        """End the lack of space, unless another one lasts; a disk that is read-only makes room when it is not any more."""
        if self._lasting[Act.DISK_FULL] <= 1:
            with contextlib.suppress(OSError):
                (self.state / "ballast").unlink()

    def _spoil(self, name: str, good: str, *, hangup: bool) -> Callable[[], None]:
        def write(text: str) -> None:
            (self.directory / name).write_text(text, encoding="utf-8")
            if hangup:
                self._signal(signal.SIGHUP)

        if self._serving:  # one that starts with garbage says so and ends, as it should
            write(_GARBAGE)
        return lambda: write(good)

    def _signal(self, number: signal.Signals) -> None:
        if self._serving and self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def _signal_child(self, number: signal.Signals) -> int:
        """Send a signal to one of the agent's children, the one or the other; its id, 0 where there was none."""
        children = list(self.children())
        if not children:
            return 0
        pid = children[int(self.now() * 1000) % len(children)]
        _send(pid, number)
        return pid

    # What the agent takes

    def children(self) -> Iterator[int]:
        """Ids of the agent's children."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(OSError):
            pid = self._process.pid
            text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
            yield from (int(one) for one in text.split())

    def weigh(self) -> Weight | None:
        """What the agent takes now; ``None`` where it is not there."""
        if self._process is None or self._process.returncode is not None or self.newest is None:
            return None
        try:
            own = Path(f"/proc/{self._process.pid}")
            family = [self._process.pid, *self.children()]
            return Weight(
                threads=len(list((own / "task").iterdir())),
                descriptors=len(list((own / "fd").iterdir())),
                children=len(family) - 1,
                files=len(list(self.state.iterdir())),
                series=len(self.newest.values),
                pss_kib=sum(map(_pss_kib, family)),
            )
        except OSError:
            return None

    async def until_well(self, seconds: float) -> tuple[float, str]:
        """Wait until a page is the whole truth: seconds that it took, and what was still missing if it never was."""
        began = self.now()
        why, looked = "no page", None
        while (waited := self.now() - began) < seconds:
            if self.newest is not None and self.newest is not looked:
                looked = self.newest
                why = self.judge.is_well(looked, self.now())
                if not why:
                    return waited, ""
            await asyncio.sleep(0.05)
        return seconds, why


def _pss_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def _send(pid: int, number: signal.Signals) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
